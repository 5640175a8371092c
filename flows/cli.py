"""The installed `signal-batch` command: the core's command line, jobs run as flows."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("SIGNAL_BATCH_PLAIN_GRAIN", "1")  # read where Grain is imported, below

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows import automation_cli, team_cli
from signal_batch import cli
from signal_batch.cli_options import Runners
from signal_batch.errors import SignalBatchError
from signal_batch.job import Outcome
from signal_batch.publishing import TrainOutcome
from signal_batch.report import note
from signal_batch.specs import ExportSpec
from signal_batch.training_spec import TrainSpec

#: What a person at a terminal expects, unless they said otherwise: patience with a cold embedded
#: server, and our own messages instead of Prefect's log (the run's page has it).
_DEFAULTS = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(
        cli.main(
            runners=Runners(
                export=run_export,
                train=run_training,
                session=session,
                storage=storage,
                module="flows.cli",
                add_commands=add_commands,
            )
        )
    )


def add_commands(commands: Any) -> None:
    """The commands that only make sense with a server."""
    automation_cli.add_commands(commands)
    team_cli.add_commands(commands)


def run_export(spec: ExportSpec, *, on_progress: Any) -> Outcome:
    """Run the export flow in this process, and say where to watch it."""
    with _prefect(on_progress):
        from flows.export_features import export_features

        outcome: Outcome = _result_of(export_features(spec, return_state=True))
        return replace(outcome, watch_at=_page_of(outcome.manifest["run"].get("flow_run_id", "")))


def run_training(spec: TrainSpec, *, on_progress: Any) -> TrainOutcome:
    """Run the training flow in this process, and say where to watch it."""
    with _prefect(on_progress):
        from flows.train_model import train_model

        outcome: TrainOutcome = _result_of(train_model(spec, return_state=True))
        return replace(outcome, watch_at=_page_of(outcome.manifest["run"].get("flow_run_id", "")))


def _result_of(state: Any) -> Any:
    """What a run came to; for one that failed, a person is told where its page is."""
    try:
        return state.result()
    except SignalBatchError:
        note(f"the run's page: {_page_of(str(state.state_details.flow_run_id))}")
        raise


@contextmanager
def session() -> Iterator[None]:
    """Prefect with a server: the one that is configured, or one for the time of the block."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Prefect takes its settings from the environment when it is first imported.
    from flows import embedded

    if not embedded.available():
        note("starting Prefect's embedded server (`python -m signal_batch` does without) ...")
    with embedded.server(), _known_to_children():
        yield


@contextmanager
def storage(credentials: str | None) -> Iterator[None]:
    """The storage's credentials in the environment, where a block on the server has them."""
    if credentials is None:
        yield
        return
    with session():
        from tasks.credentials import use_credentials

        use_credentials(credentials)
        yield


@contextmanager
def _known_to_children() -> Iterator[None]:
    """Let the commands that this process starts meanwhile use its embedded server."""
    from prefect.settings import get_current_settings

    from flows import embedded

    url = get_current_settings().api.url
    # Whoever names a server in the environment, or in a profile, has named it to children too.
    own = {} if embedded.configured() or url is None else {"PREFECT_API_URL": url}
    added = own.keys() - os.environ.keys()
    os.environ.update(own)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _prefect(on_progress: Any) -> Iterator[None]:
    with session():
        from tasks.tracking import listening

        with listening(on_progress):
            yield


def _page_of(run_id: str) -> str:
    """A run's page, and how to get a server that shows it where none is running."""
    from prefect.settings import get_current_settings

    from flows import embedded

    settings = get_current_settings()
    if embedded.configured() and settings.api.url:
        return f"{settings.ui_url or settings.api.url.removesuffix('/api')}/runs/flow-run/{run_id}"
    prefect = Path(sys.executable).with_name("prefect")
    quiet = "DO_NOT_TRACK=1 PREFECT_SERVER_ANALYTICS_ENABLED=false"
    return (
        f"http://127.0.0.1:4200/runs/flow-run/{run_id}\n"
        f"  after starting a server: {quiet} {prefect} server start"
    )


if __name__ == "__main__":
    main()
