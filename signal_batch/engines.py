"""Where the worker programs of an export run: on this machine, on a Dask or on a Ray cluster.

An engine runs one work order at a time to its end, wherever that is, and the same worker program
does it everywhere; what comes back are receipts. The parts, their files and their digests do not
depend on the engine.
"""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self

from signal_batch.errors import (
    CorruptDatasetError,
    InputError,
    ShardsFailedError,
    SignalBatchError,
    StorageError,
    WorkerDiedError,
    error_event,
    rebuilt_error,
)
from signal_batch.execution import Execution
from signal_batch.export import WorkOrder
from signal_batch.job import ExportJob
from signal_batch.processes import OnProgress, run_worker, stop_workers
from signal_batch.store import RECEIPTS, OutputStore, Receipt

#: How often the ledger is read for progress where workers cannot report theirs.
FOLLOW_EVERY_S = 2.0
#: Errors that concern the shard they happened in, and leave the others alone.
OF_A_SHARD = (CorruptDatasetError, StorageError, WorkerDiedError)
#: So many shards may fail before a run gives the others up as well.
MOST_FAILED = 3


class Engine(ABC):
    """What runs worker programs; entered once a run, used from many threads.

    Leaving it by an exception stops what still runs.
    """

    #: Whether `on_progress` is called while an order is worked on.
    reports_rows: ClassVar[bool] = False

    @abstractmethod
    def run(self, order: WorkOrder, on_progress: OnProgress) -> list[Receipt]:
        """Run one worker program to its end; the receipts of all parts of the order.

        Raises:
            WorkerDiedError: the program, or the machine it ran on, was killed or hung.
            StoppedError: `stop` was called.
            SignalBatchError: what the worker itself reported.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all worker programs of this run, wherever they are, and start no new one."""

    def open(self) -> None:  # noqa: B027 - there may be nothing to do
        """Reach the place where programs run; raises `InputError` where there is none."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to do
        """Give that place up again."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.stop()
        self.close()


class LocalEngine(Engine):
    """Worker programs as children of this process."""

    reports_rows: ClassVar[bool] = True

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex

    def run(self, order: WorkOrder, on_progress: OnProgress) -> list[Receipt]:
        return run_worker(order, on_progress, run_id=self._run_id)

    def stop(self) -> None:
        stop_workers(self._run_id)


def engine_for(execution: Execution) -> Engine:
    """The engine that a spec asks for.

    Raises `InputError` where its package is missing, or where it needs a Prefect server.
    """
    if execution.engine == "local":
        return LocalEngine()
    if execution.engine in ("dask", "ray"):
        try:
            module = import_module(f"signal_batch.{execution.engine}_engine")
        except ImportError as exc:
            raise InputError(
                f"runner {execution.runner} needs another package: "
                f"pip install 'signal-batch[{execution.engine}]' ({exc})"
            ) from exc
        engine: Engine = module.engine(execution.runner_address, execution.workers)
        return engine
    raise InputError(
        f"runner {execution.runner} needs a Prefect server; run it with the installed "
        "signal-batch command, or take local, dask or ray"
    )


def run_order(
    order: Mapping[str, Any], run_id: str, abort: threading.Event | None = None
) -> dict[str, Any]:
    """Run a work order on a machine of a cluster; what crosses back is plain JSON.

    The receipts, or the error as `errors.error_event` writes it; see `receipts_from`.
    """
    try:
        receipts = run_worker(
            WorkOrder.from_json(order), lambda rows: None, run_id=run_id, abort=abort
        )
    except SignalBatchError as exc:
        return error_event(exc)
    return {"receipts": [receipt.to_dict() for receipt in receipts]}


def receipts_from(answer: Mapping[str, Any]) -> list[Receipt]:
    """The receipts that `run_order` answered with; its error is raised."""
    if "receipts" not in answer:
        raise rebuilt_error(answer)
    return [Receipt.from_dict(value) for value in answer["receipts"]]


@contextmanager
def following(engine: Engine, job: ExportJob, done: int, on_progress: OnProgress) -> Iterator[None]:
    """Report progress from the ledger while the block runs, where the engine reports none.

    Calls `on_progress(rows)` with the rows that got a receipt since the last time, `done` of them
    having one at the start.
    """
    if engine.reports_rows:
        yield
        return
    stop = threading.Event()
    follower = threading.Thread(target=_follow, args=(job, done, on_progress, stop), daemon=True)
    follower.start()
    try:
        yield
    finally:
        stop.set()
        follower.join()


def _follow(job: ExportJob, done: int, on_progress: OnProgress, stop: threading.Event) -> None:
    parts, store = job.parts, OutputStore(job.spec.output)
    ended = False
    while not ended:
        ended = stop.wait(FOLLOW_EVERY_S)
        # Progress is only shown: storage that does not answer now will the next time.
        with suppress(SignalBatchError):
            names = store.listing(RECEIPTS)
            now = sum(part.rows for part in parts if f"{part.name}.json" in names)
            on_progress(now - done)
            done = now


class Fallout:
    """The shards of a run that failed, and whether the others are still worth running.

    A damaged record or a worker that died concern their shard alone, so the others go on, and
    what they finish need not be done again; anything else would fail every shard.
    """

    def __init__(self) -> None:
        self.failed: list[tuple[str, SignalBatchError]] = []

    def add(self, label: str, exc: SignalBatchError) -> None:
        """Note a failed shard; raises if the run is to end now."""
        if not isinstance(exc, OF_A_SHARD):
            raise exc
        self.failed.append((label, exc))
        if len(self.failed) > MOST_FAILED:
            self.check()

    def check(self) -> None:
        """Raise what failed, if anything did."""
        if len(self.failed) == 1:
            raise self.failed[0][1]
        if self.failed:
            several = ShardsFailedError(_several(self.failed))
            several.causes = [exc for _, exc in self.failed]
            raise several


def _several(failed: Sequence[tuple[str, SignalBatchError]]) -> str:
    each = "; ".join(f"{label}: {exc}" for label, exc in failed)
    return (
        f"{len(failed)} shards failed. {each}. Finished parts stay; the same command tries only "
        "what is missing"
    )
