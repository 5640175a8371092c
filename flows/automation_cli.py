"""The commands `automate` and `announce`: what a Prefect server does by itself, and when."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flows import quiet_prefect
from signal_batch.cli_options import Runners, command

_AUTOMATE_EXAMPLES = """\
examples:
  # mark runs that died, export datasets that are announced
  signal-batch automate

  # and tell the team of failed, late and finished runs, by a block made in the UI
  signal-batch automate --notify slack-webhook/team
"""


def add_commands(commands: Any) -> None:
    """Add both; they need a server, which PREFECT_API_URL names."""
    automating = command(
        commands,
        "automate",
        _automate,
        "create or update the automations of a Prefect server",
        epilog=_AUTOMATE_EXAMPLES,
    )
    automating.add_argument(
        "--file", metavar="FILE", type=Path, help="automations (default: those of this package)"
    )
    automating.add_argument(
        "--notify", metavar="TYPE/NAME", help="notification block for failed, late and done runs"
    )
    announcing = command(
        commands, "announce", _announce, "tell a Prefect server that a dataset is published"
    )
    announcing.add_argument("dataset", metavar="DATASET", help="path, s3:// or gs://")
    announcing.add_argument(
        "--annotations", nargs="+", default=[], metavar="SET", help="annotation sets to pin"
    )


def _automate(arguments: argparse.Namespace, runners: Runners) -> int:
    quiet_prefect()
    from flows.automating import automate

    for one in automate(arguments.file, arguments.notify):
        why = f": {one.why}" if one.why else ""
        print(f"{one.outcome:9}  {one.name}{why}")
    return 0


def _announce(arguments: argparse.Namespace, runners: Runners) -> int:
    quiet_prefect()
    from flows.announcing import announce

    said = announce(arguments.dataset, arguments.annotations)
    what = f"{said.event.payload['uri']}, fingerprint {said.fingerprint[:16]}"
    if said.earlier is None:
        print(f"announced {what}, {said.event.payload['records']:,} records")
    else:
        print(f"{what}, was announced already, at {said.earlier:%Y-%m-%d %H:%M} UTC")
    return 0
