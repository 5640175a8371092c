"""Worker programs on the workers of a Dask cluster, one that runs already or one for this run.

Dask carries a work order there and the receipts back, both as plain JSON. A Dask worker starts the
same worker program as this machine would, and ends it when the scheduler takes the order back: on
`stop`, and when the process that asked for it is gone.
"""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import ExitStack, suppress
from typing import Any

from distributed import CancelledError, Client, LocalCluster, get_worker
from distributed.scheduler import KilledWorker

from signal_batch.engines import Engine, receipts_from, run_order
from signal_batch.errors import InputError, SignalBatchError, StoppedError, WorkerDiedError
from signal_batch.export import WorkOrder
from signal_batch.processes import OnProgress
from signal_batch.store import Receipt

CONNECT_S = 30
_POLL_S = 0.5


class DaskEngine(Engine):
    """Runs work orders on Dask workers.

    Without an address, a cluster of `workers` processes on this machine lives as long as the run.
    """

    def __init__(self, address: str | None, workers: int) -> None:
        self._address = address
        self._workers = workers
        self._run_id = uuid.uuid4().hex
        self._opened = ExitStack()
        self._lock = threading.Lock()
        self._futures: set[Any] = set()
        self._stopping = False

    def open(self) -> None:
        with ExitStack() as opening:
            place = self._address or opening.enter_context(_cluster(self._workers))
            self._client = opening.enter_context(_connected(place))
            self._opened = opening.pop_all()

    def close(self) -> None:
        self._opened.close()

    def run(self, order: WorkOrder, on_progress: OnProgress) -> list[Receipt]:
        future = self._submitted(order)
        try:
            return receipts_from(future.result())
        except CancelledError as exc:
            raise self._lost(f"the Dask cluster dropped an order: {exc}") from exc
        except KilledWorker as exc:
            raise self._lost(f"a Dask worker died, and others with the same order: {exc}") from exc
        except SignalBatchError:
            raise
        except Exception as exc:
            raise SignalBatchError(f"the Dask cluster could not run an order: {exc!r}") from exc
        finally:
            with self._lock:
                self._futures.discard(future)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            futures = list(self._futures)
        with suppress(Exception):  # a cluster that is gone has nothing to stop
            self._client.cancel(futures, force=True, reason="the run was stopped")

    def _submitted(self, order: WorkOrder) -> Any:
        with self._lock:
            if self._stopping:
                raise StoppedError("the run was stopped")
            # Not pure: an order that is given again is to be run again.
            future = self._client.submit(_work, order.to_json(), self._run_id, pure=False)
            self._futures.add(future)
        return future

    def _lost(self, message: str) -> SignalBatchError:
        return StoppedError("the run was stopped") if self._stopping else WorkerDiedError(message)


def engine(address: str | None, workers: int) -> DaskEngine:
    """The engine of this module, as every engine's module offers it."""
    return DaskEngine(address, workers)


def _cluster(workers: int) -> LocalCluster:
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=logging.ERROR,
    )


def _connected(place: str | LocalCluster) -> Client:
    try:
        return Client(place, set_as_default=False, timeout=CONNECT_S)
    except (OSError, ValueError, TypeError) as exc:
        raise InputError(
            f"no Dask scheduler answers at {place}: {exc}; start one with `dask scheduler`, or "
            "take the runner dask without an address"
        ) from exc


def _work(order: dict[str, Any], run_id: str) -> dict[str, Any]:
    """On a Dask worker: run the order, unless the scheduler takes it back."""
    worker = get_worker()
    task = worker.state.tasks[worker.get_current_task()]
    abort, done = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(task, abort, done), daemon=True)
    watch.start()
    try:
        return run_order(order, run_id, abort)
    finally:
        done.set()
        watch.join()


def _watch(task: Any, abort: threading.Event, done: threading.Event) -> None:
    """Abort when the scheduler has taken the task back, which Dask itself only notes."""
    while not done.wait(_POLL_S):
        if task.state in ("cancelled", "resumed"):
            abort.set()
