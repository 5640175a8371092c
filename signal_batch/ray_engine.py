"""Worker programs on the nodes of a Ray cluster, one that runs already or one for this run.

Ray carries a work order there and the receipts back, both as plain JSON. A Ray worker process
starts the same worker program as this machine would; the program ends with it, and Ray ends that
process on `stop` and when the process that asked for it is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from contextlib import suppress
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when a cluster is started

import ray
from ray import exceptions

from signal_batch.engines import Engine, receipts_from, run_order
from signal_batch.errors import InputError, SignalBatchError, StoppedError, WorkerDiedError
from signal_batch.export import WorkOrder
from signal_batch.processes import OnProgress
from signal_batch.store import Receipt

#: How often a waiting thread looks whether the run was stopped; how long leaving waits for it.
_POLL_S, _FAREWELL_S = 0.5, 10.0
#: What Ray raises when the process or the machine that ran an order is gone.
_DIED = (
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.LocalRayletDiedError,
    exceptions.ObjectLostError,
)


class RayEngine(Engine):
    """Runs work orders as Ray tasks of one CPU each.

    Without an address, a cluster of `workers` CPUs on this machine lives as long as the run.
    """

    def __init__(self, address: str | None, workers: int) -> None:
        self._address = address
        self._workers = workers
        self._run_id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._fewer = threading.Condition(self._lock)
        self._running: set[Any] = set()
        self._stopping = False

    def open(self) -> None:
        self._owns = not ray.is_initialized()
        if self._owns:
            _start(self._address, self._workers)
        # Ray would try again by itself, without a pause; that is for whoever gave the order.
        self._work = ray.remote(max_retries=0, num_cpus=1)(run_order)

    def close(self) -> None:
        # Whoever still waits for an order would wait for ever, or start a cluster of its own.
        with self._fewer:
            self._fewer.wait_for(lambda: not self._running, timeout=_FAREWELL_S)
        if self._owns:
            ray.shutdown()

    def run(self, order: WorkOrder, on_progress: OnProgress) -> list[Receipt]:
        with self._lock:
            if self._stopping:
                raise StoppedError("the run was stopped")
            running = self._work.remote(order.to_json(), self._run_id)
            self._running.add(running)
        try:
            return receipts_from(self._answer(running))
        except SignalBatchError:
            raise
        except (*_DIED, exceptions.TaskCancelledError) as exc:
            if self._stopping:
                raise StoppedError("the run was stopped") from exc
            raise WorkerDiedError(f"a Ray worker died with its order: {_first_line(exc)}") from exc
        except exceptions.RayError as exc:
            raise SignalBatchError(f"Ray could not run an order: {_first_line(exc)}") from exc
        finally:
            with self._fewer:
                self._running.discard(running)
                self._fewer.notify_all()

    def _answer(self, running: Any) -> dict[str, Any]:
        while True:
            try:
                answer: dict[str, Any] = ray.get(running, timeout=_POLL_S)
                return answer
            except exceptions.GetTimeoutError:
                # One that was cancelled before it began may never be answered.
                if self._stopping:
                    raise StoppedError("the run was stopped") from None

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for item in running:
            with suppress(Exception):  # a cluster that is gone has nothing to stop
                ray.cancel(item, force=True)


def engine(address: str | None, workers: int) -> RayEngine:
    """The engine of this module, as every engine's module offers it."""
    return RayEngine(address, workers)


def _start(address: str | None, workers: int) -> None:
    try:
        if address is None:
            ray.init(
                address="local",  # never one that happens to run here
                num_cpus=workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, exceptions.RayError) as exc:
        raise InputError(
            f"no Ray cluster answers at {address}: {_first_line(exc)}; start one with "
            "`ray start --head`, or take the runner ray without an address"
        ) from exc


def _first_line(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0] or type(exc).__name__
