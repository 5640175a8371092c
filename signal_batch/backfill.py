"""One job for many moments: what is complete is left alone, the rest runs in child processes.

Each moment is one run of the same command with `--scheduled`, in a process that leads a group of
its own. It ends when this process does; being stopped first gives it time to say so to its server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from signal_batch.attached import OUTCOME, tell, told
from signal_batch.errors import DatasetNotFoundError, SignalBatchError, SpecError
from signal_batch.frozen import checked
from signal_batch.job import Outcome
from signal_batch.pins import absolute_uri, pin_dataset
from signal_batch.publishing import TrainOutcome
from signal_batch.scheduling import at_time
from signal_batch.specs import JobSpec
from signal_batch.store import OutputStore

MOST_RUNS = 10_000
#: A child that was asked to stop is killed after this long.
_GRACE_S = 4.0
_POLL_S = 0.05
_LOOKS = 8


class Result(StrEnum):
    """How a moment ended, worst first: the order of the summary."""

    FAILED = "failed"
    NO_DATASET = "no dataset"
    STOPPED = "stopped"
    DONE = "done"
    COMPLETE = "was complete"
    PENDING = "to do"


@dataclass(frozen=True, slots=True)
class Run:
    """The job of one moment: its spec, resolved, and what came of it.

    `amount` is the rows of an export or the steps of a model, None where nothing was made.
    """

    moment: datetime
    spec: JobSpec
    result: Result = Result.PENDING
    amount: int | None = None
    seconds: float = 0.0
    error: str = ""


def moments(first: datetime, last: datetime, every: timedelta) -> list[datetime]:
    """Every moment from `first` to `last`, both included where a step falls on them."""
    if last < first:
        raise SpecError(f"--to {last:%Y-%m-%d %H:%M} is before --from {first:%Y-%m-%d %H:%M}")
    count = (last - first) // every + 1
    if count > MOST_RUNS:
        raise SpecError(f"these are {count:,} runs, more than {MOST_RUNS:,}; take larger steps")
    return [first + step * every for step in range(count)]


def plan_runs(spec: JobSpec, times: Sequence[datetime]) -> list[Run]:
    """The runs for the moments; raises `SpecError` where two of them have one output."""
    runs = [Run(moment, at_time(spec, moment)) for moment in times]
    seen: dict[str, datetime] = {}
    for run in runs:
        before = seen.setdefault(run.spec.output.rstrip("/"), run.moment)
        if before != run.moment:
            raise SpecError(
                f"{before.isoformat()} and {run.moment.isoformat()} both write to "
                f"{run.spec.output}; give output a template that tells them apart, such as "
                "{scheduled:%Y-%m-%d}, or take larger steps with --every"
            )
    return runs


def look(runs: Sequence[Run]) -> list[Run]:
    """The runs with what is known before anything is started: complete, or without a dataset."""
    with ThreadPoolExecutor(_LOOKS) as pool:
        return list(pool.map(_looked_at, runs))


def _looked_at(run: Run) -> Run:
    # What cannot be looked at from here is left to the run itself, which says what is wrong.
    with suppress(SignalBatchError):
        manifest = OutputStore(run.spec.output).read_manifest()
        if manifest is not None and _is_of(manifest, run.spec):
            return replace(run, result=Result.COMPLETE, amount=amount_of(manifest))
    try:
        pin_dataset(run.spec.dataset).close()
    except DatasetNotFoundError as exc:
        return replace(run, result=Result.NO_DATASET, error=str(exc))
    except SignalBatchError:
        pass
    return run


def _is_of(manifest: Mapping[str, Any], spec: JobSpec) -> bool:
    """Whether a complete output was made by this spec: the same data, and the same result."""
    found, pin = manifest.get("spec"), manifest.get("pin")
    if not isinstance(found, dict) or not isinstance(pin, dict):
        return False
    same_data = pin.get("uri") == absolute_uri(spec.dataset)
    return same_data and _essence(checked(type(spec), found)) == _essence(spec)


def _essence(spec: JobSpec) -> tuple[Any, ...]:
    # Together with the data, what the run key stands for; `split` is of training alone.
    return spec.where, str(getattr(spec, "split", "")), spec.pin, spec.identity()


def tell_outcome(outcome: Outcome | TrainOutcome) -> None:
    """Let a backfill that runs this job as its child know how it went."""
    tell(already_complete=outcome.already_complete, amount=amount_of(outcome.manifest))


def amount_of(manifest: Mapping[str, Any]) -> int | None:
    """Rows of an export, steps of a model."""
    totals = manifest.get("totals")
    value = totals.get("rows") if isinstance(totals, dict) else manifest.get("steps")
    return value if isinstance(value, int) else None


@dataclass(slots=True)
class _Child:
    run: Run
    process: subprocess.Popen[bytes]
    folder: Path
    started: float


def run_all(
    runs: Sequence[Run],
    command: Callable[[Run], tuple[str, Sequence[str]]],
    *,
    parallel: int,
    on_result: Callable[[Run], None],
) -> bool:
    """Run what is pending, `parallel` at a time; False if that was stopped by Ctrl-C or SIGTERM.

    `command` gives the module and the arguments of a run, `on_result` hears of each as it ends.
    Within five seconds of a stop no child is left.
    """
    waiting = [run for run in runs if run.result is Result.PENDING]
    running: list[_Child] = []
    with (
        tempfile.TemporaryDirectory(prefix="signal-batch-backfill-") as folder,
        _asked_to_stop() as stopping,
    ):
        try:
            while (waiting or running) and not stopping.is_set():
                while waiting and len(running) < parallel:
                    running.append(_start(waiting.pop(0), command, Path(folder)))
                stopping.wait(_POLL_S)
                for child in [one for one in running if one.process.poll() is not None]:
                    running.remove(child)
                    on_result(_ended(child))
            _interrupt(running)
        finally:
            _kill(running)
        for run in [*(child.run for child in running), *waiting]:
            on_result(replace(run, result=Result.STOPPED))
    return not stopping.is_set()


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, at whatever point they find us."""
    stopping = threading.Event()
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, lambda *_: stopping.set()) for name in names]
    try:
        yield stopping
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def _start(run: Run, command: Callable[[Run], tuple[str, Sequence[str]]], folder: Path) -> _Child:
    module, arguments = command(run)
    mine = Path(tempfile.mkdtemp(dir=folder))
    program = [sys.executable, "-P", "-m", "signal_batch.attached", str(os.getpid()), module]
    with (mine / "stderr").open("wb") as log:
        process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=os.environ | {OUTCOME: str(mine / "outcome.json")},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops us
        )
    return _Child(run, process, mine, time.monotonic())


def _ended(child: _Child) -> Run:
    outcome = told(child.folder / "outcome.json")
    seconds = time.monotonic() - child.started
    if child.process.returncode == 0:
        result = Result.COMPLETE if outcome.get("already_complete") else Result.DONE
        return replace(child.run, result=result, amount=outcome.get("amount"), seconds=seconds)
    missing = outcome.get("kind") == DatasetNotFoundError.__name__
    return replace(
        child.run,
        result=Result.NO_DATASET if missing else Result.FAILED,
        seconds=seconds,
        error=outcome.get("message") or _last_words(child),
    )


def _last_words(child: _Child) -> str:
    code = child.process.returncode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = (child.folder / "stderr").read_text(errors="replace").strip().splitlines()
    return f"{how}; it last said: {lines[-1]}" if lines else how


def _interrupt(children: Sequence[_Child]) -> None:
    """Ask the children to stop, and give them a little time to."""
    for child in children:
        child.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _GRACE_S
    with suppress(subprocess.TimeoutExpired):
        for child in children:
            child.process.wait(max(0.0, deadline - time.monotonic()))


def _kill(children: Sequence[_Child]) -> None:
    for child in children:
        # The group, also after its leader: what the run itself started may be left in it.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
