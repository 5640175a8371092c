"""The installed `signal-batch` command: the core's command line, exports run as a flow."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("SIGNAL_BATCH_PLAIN_GRAIN", "1")  # read where Grain is imported, below

from dataclasses import replace
from pathlib import Path
from typing import Any

from signal_batch import cli
from signal_batch.job import Outcome
from signal_batch.report import note
from signal_batch.specs import ExportSpec

#: What a person at a terminal expects, unless they said otherwise: patience with a cold embedded
#: server, and our own messages instead of Prefect's log (the run's page has it).
_DEFAULTS = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(cli.main(run_export=run_flow))


def run_flow(spec: ExportSpec, *, on_progress: Any) -> Outcome:
    """Run the export flow in this process, and say where to watch it."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Prefect takes its settings from the environment when it is first imported.
    from flows import embedded
    from flows.export_features import export_features
    from tasks.tracking import listening

    if not embedded.configured():
        note("starting Prefect's embedded server (`python -m signal_batch` does without) ...")
    with embedded.server(), listening(on_progress):
        outcome: Outcome = export_features(spec)
    return replace(outcome, watch_at=_page_of(outcome))


def _page_of(outcome: Outcome) -> str:
    """The run's page, and how to get a server that shows it where none is running."""
    from prefect.settings import get_current_settings

    run_id = outcome.manifest["run"].get("flow_run_id", "")
    settings = get_current_settings()
    if settings.api.url:
        return f"{settings.ui_url or settings.api.url.removesuffix('/api')}/runs/flow-run/{run_id}"
    prefect = Path(sys.executable).with_name("prefect")
    quiet = "DO_NOT_TRACK=1 PREFECT_SERVER_ANALYTICS_ENABLED=false"
    return (
        f"http://127.0.0.1:4200/runs/flow-run/{run_id}\n"
        f"  after starting a server: {quiet} {prefect} server start"
    )
