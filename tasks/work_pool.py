"""Worker programs as flow runs of their own, on whatever machines poll a Prefect work pool.

A work order is left in the output folder, and a run of the deployment `export-shard` is told its
name. Which run it is follows from the parent's run and the order, so asking twice gives the same
one; whether its parts are done is read from their receipts, never from the state of that run.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import ClassVar, Self
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.states import Cancelling

from signal_batch.errors import (
    InputError,
    SignalBatchError,
    StoppedError,
    WorkerDiedError,
    rebuilt_error,
)
from signal_batch.export import WorkOrder
from signal_batch.processes import OnProgress
from signal_batch.specs import digest
from signal_batch.store import ORDERS, RECEIPTS, OutputStore, Receipt

DEPLOYMENT = "export-shard/export-shard"
POLL_S = 1.0
#: After so long without a worker that takes a run, the log says so.
_LONG_WAIT_S = 60.0
_FILTERED = 200


def check_deployment(name: str | None) -> None:
    """Raises `InputError` where the deployment that runs shards is not registered."""
    name = name or DEPLOYMENT
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(name)
        except (ObjectNotFound, ValueError) as exc:
            raise InputError(
                f"there is no deployment {name} to run shards with; register it with "
                "`signal-batch deploy --pool NAME --only export-shard`"
            ) from exc


class WorkPoolEngine:
    """Runs each work order as a flow run of a deployment, `export-shard/export-shard` by default.

    `parent` is the id of the flow run that all belong to; `credentials` the block that the
    children take the storage's variables from.
    """

    reports_rows: ClassVar[bool] = False

    def __init__(self, deployment: str | None, parent: str, credentials: str | None) -> None:
        self._deployment = deployment or DEPLOYMENT
        self._parent = parent
        self._credentials = credentials
        # The key by which Prefect draws a child below its parent is not thread-safe.
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._runs: dict[UUID, FlowRun] = {}
        self._waiting: set[UUID] = set()
        self._stopping = False
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.stop()
        self._closed.set()
        self._poller.join()

    def run(self, order: WorkOrder, on_progress: OnProgress) -> list[Receipt]:
        store = OutputStore(order.spec.output)
        value = order.to_json()
        name = digest(value)[:32]
        store.put_document(f"{ORDERS}/{name}.json", value)
        state, run = self._ended(self._child(order, name))
        if state.is_completed():
            return [_receipt_of(store, part.name) for part in order.parts]
        raise _failure(run, state)

    def stop(self) -> None:
        self._stopping = True
        with self._asking, self._changed:
            children = list(self._waiting)
            self._changed.notify_all()
        with get_client(sync_client=True) as client:
            for child in children:
                with suppress(Exception):  # each by itself: one that is gone must not keep others
                    client.set_flow_run_state(child, Cancelling())

    def _child(self, order: WorkOrder, name: str) -> FlowRun:
        """The flow run for an order: a new one, or one that an interrupted parent started."""
        parameters = {
            "output": order.spec.output,
            "order": name,
            "shard": f"ordinals {order.parts[0].first_ordinal}-{order.parts[-1].last_ordinal}",
            "credentials": self._credentials,
        }
        for attempt in count():
            with self._asking:
                if self._stopping:
                    raise StoppedError("the run was stopped")
                run = run_deployment(
                    self._deployment,
                    parameters=parameters,
                    idempotency_key=f"{self._parent}/{name}/{attempt}",
                    timeout=0,
                )
                assert isinstance(run, FlowRun)
                # One that has ended is of an earlier attempt: what it left undone is this order.
                if run.state is None or not run.state.is_final():
                    with self._lock:
                        self._runs[run.id] = run
                        self._waiting.add(run.id)
                    return run
        raise AssertionError("attempts do not end by themselves")

    def _ended(self, run: FlowRun) -> tuple[State, FlowRun]:
        asked, told = time.monotonic(), False
        with self._changed:
            while True:
                found = self._runs[run.id]
                if self._stopping:
                    raise StoppedError("the run was stopped")
                if found.state is not None and found.state.is_final():
                    self._waiting.discard(run.id)
                    return found.state, found
                if not told and _is_waiting(found) and time.monotonic() - asked > _LONG_WAIT_S:
                    told = True
                    get_logger(__name__).warning(
                        "no worker has taken flow run %s yet; is one started for the work pool "
                        "%s? (prefect worker start --pool %s)",
                        *(found.name, found.work_pool_name, found.work_pool_name),
                    )
                self._changed.wait(POLL_S)

    def _poll(self) -> None:
        """Ask for the states of all children at once, however many threads wait for one."""
        while not self._closed.wait(POLL_S):
            with self._lock:
                waiting = sorted(self._waiting)
            # A server that does not answer is asked again: children do not depend on it.
            with suppress(Exception), get_client(sync_client=True) as client:
                for first in range(0, len(waiting), _FILTERED):
                    self._note(_read(client, waiting[first : first + _FILTERED]))

    def _note(self, runs: list[FlowRun]) -> None:
        with self._changed:
            self._runs |= {run.id: run for run in runs}
            self._changed.notify_all()


def _read(client: SyncPrefectClient, ids: list[UUID]) -> list[FlowRun]:
    found: list[FlowRun] = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)), limit=_FILTERED
    )
    return found


def _is_waiting(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_scheduled()


def _receipt_of(store: OutputStore, name: str) -> Receipt:
    path = f"{RECEIPTS}/{name}.json"
    document = store.read_document(path)
    if document is None:
        raise WorkerDiedError(f"a flow run was completed, but {store.uri}/{path} is not there")
    return Receipt.from_dict(document, where=f"{store.uri}/{path}")


def _failure(run: FlowRun, state: State) -> SignalBatchError:
    """What the end of a child means: its own error, a death, or a stop."""
    message = state.message or ""
    if state.is_cancelled():
        return StoppedError(f"flow run {run.name} was cancelled")
    if state.is_crashed():
        return WorkerDiedError(f"flow run {run.name} crashed: {message}")
    told = re.search(r"(\w+Error): (.*)", message, re.DOTALL)
    if told is None:
        return SignalBatchError(f"flow run {run.name} failed: {message}")
    return rebuilt_error({"kind": told[1], "message": told[2], "ordinal": None})
