"""The commands `serve` and `deploy`: the flows as deployments on a Prefect server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flows import quiet_prefect
from signal_batch.cli_options import Runners, command
from signal_batch.errors import InputError

_SERVE_NOTES = """\
Runs start here, with the environment of this process; no work pool or worker is needed. Ctrl-C or
SIGTERM stops the runs and pauses the deployments, so that no runs pile up; the next serve resumes
them. Deployments of the same names that were registered on a work pool leave it. An export with the
runner `work-pool` counts towards --limit, and so does each of its shards: leave room for both.
"""
_DEPLOY_NOTES = """\
Deploying again updates what is there: parameters, limits and schedules are those of the file. A
schedule with a slug that was switched off in the UI stays off, and a deployment that was paused
stays paused, unless the file says otherwise. Schedules made in the UI stay where the file has none.
"""


def add_commands(commands: Any) -> None:
    """Add `serve` and `deploy`."""
    serving = command(
        commands, "serve", _serve, "run the deployments from this process", epilog=_SERVE_NOTES
    )
    _add_file(serving)
    serving.add_argument("--limit", type=int, metavar="N", help="runs at a time (default 5)")
    deploying = command(
        commands, "deploy", _deploy, "register the deployments on a work pool", epilog=_DEPLOY_NOTES
    )
    deploying.add_argument(
        "--pool", required=True, metavar="NAME", help="work pool; made for processes if not there"
    )
    _add_file(deploying)


def _add_file(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--file", type=Path, metavar="FILE", help="deployments in YAML (default: packaged ones)")
    add("--only", nargs="+", default=[], metavar="NAME", help="only these deployments of the file")


def _serve(arguments: argparse.Namespace, runners: Runners) -> int:
    if arguments.limit is not None and arguments.limit < 1:
        raise InputError("--limit must be at least 1")
    from flows import deploying, registering

    deployments = deploying.read_deployments(_file(arguments), tuple(arguments.only))
    with registering.server() as client:
        names = ", ".join(str(deployment.name) for deployment in deployments)
        print(f"serving {names}; Ctrl-C stops")
        print(f"  start and watch runs at {registering.page()}", flush=True)
        registering.serve(client, deployments, arguments.limit)
    print("stopped; the deployments are paused until the next serve")
    return 0


def _deploy(arguments: argparse.Namespace, runners: Runners) -> int:
    quiet_prefect()
    from flows import deploying, registering

    deployments = deploying.read_deployments(_file(arguments), tuple(arguments.only))
    with registering.server() as client:
        if registering.ensure_pool(client, arguments.pool):
            print(f"{arguments.pool}: a new work pool, for workers that start processes")
        paused = registering.register(client, deployments, arguments.pool)
    for deployment in deployments:
        state = ", paused: resume it in the UI" if deployment.full_name in paused else ""
        print(f"{arguments.pool}: {deployment.full_name}{state}")
    print(f"  start a worker: prefect worker start --pool {arguments.pool}")
    print(f"  start and watch runs at {registering.page()}")
    return 0


def _file(arguments: argparse.Namespace) -> Path:
    from flows.deploying import DEFAULT_FILE

    given: Path | None = arguments.file
    return given if given is not None else DEFAULT_FILE
