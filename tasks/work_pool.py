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
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.states import Cancelling, Crashed

from signal_batch.engines import Engine
from signal_batch.errors import (
    InputError,
    SignalBatchError,
    StoppedError,
    WorkerDiedError,
    rebuilt_error,
)
from signal_batch.export import WorkOrder
from signal_batch.frozen import digest
from signal_batch.processes import OnProgress
from signal_batch.store import ORDERS, RECEIPTS, OutputStore, Receipt

DEPLOYMENT = "export-shard/export-shard"
POLL_S = 1.0
#: After so long without a worker that takes a run, the log says so.
_LONG_WAIT_S = 60.0
#: How often it is looked whether children that are said to run do, and after how long without a
#: receipt or a heartbeat one is taken for dead. Runs of deployments have a heartbeat every 30 s.
LOOK_EVERY_S, DEAD_AFTER_S = 10.0, 120.0
_FILTERED = 200


def _check_deployment(name: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(name)
        except (ObjectNotFound, ValueError) as exc:
            raise InputError(
                f"there is no deployment {name} to run shards with; register it with "
                "`signal-batch deploy --pool NAME --only export-shard`"
            ) from exc


@dataclass
class _Child:
    """A flow run that is waited for, and when it last showed that it is alive (monotonic)."""

    run: FlowRun
    order: WorkOrder
    receipts: frozenset[str]
    sign_of_life: float = field(default_factory=time.monotonic)
    done: bool = False
    missing: int = -1

    @property
    def state(self) -> State:
        assert self.run.state is not None
        return self.run.state


class WorkPoolEngine(Engine):
    """Runs each work order as a flow run of a deployment, `export-shard/export-shard` by default.

    `parent` is the id of the flow run that all belong to; `credentials` the block that the
    children take the storage's variables from.
    """

    def __init__(self, deployment: str | None, parent: str, credentials: str | None) -> None:
        self._deployment = deployment or DEPLOYMENT
        self._parent = parent
        self._credentials = credentials
        # The key by which Prefect draws a child below its parent is not thread-safe.
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._children: dict[UUID, _Child] = {}
        self._stopping = False
        self._closed = threading.Event()

    def open(self) -> None:
        _check_deployment(self._deployment)
        # With this run's settings, which say where the server is; a new thread has none.
        poll = partial(copy_context().run, self._poll)
        self._poller = threading.Thread(target=poll, daemon=True)
        self._poller.start()

    def close(self) -> None:
        self._closed.set()
        self._poller.join()

    def run(self, order: WorkOrder, on_progress: OnProgress) -> list[Receipt]:
        store = OutputStore(order.spec.output)
        value = order.to_json()
        name = digest(value)[:32]
        store.put_document(f"{ORDERS}/{name}.json", value)
        child = self._child(order, name)
        try:
            self._wait_for(child)
        finally:
            with self._lock:
                del self._children[child.run.id]
        if child.done or child.state.is_completed():
            return [_receipt_of(store, part.name) for part in order.parts]
        raise _failure(child.run, child.state)

    def stop(self) -> None:
        self._stopping = True
        with self._asking, self._changed:
            children = list(self._children)
            self._changed.notify_all()
        with get_client(sync_client=True) as client:
            for child in children:
                with suppress(Exception):  # each by itself: one that is gone must not keep others
                    client.set_flow_run_state(child, Cancelling())

    def _child(self, order: WorkOrder, name: str) -> _Child:
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
                receipts = frozenset(f"{part.name}.json" for part in order.parts)
                child = _Child(run, order, receipts)
                # One that has ended is of an earlier attempt: what it left undone is this order.
                if not _is_over(child.state):
                    with self._lock:
                        self._children[run.id] = child
                    return child
        raise AssertionError("attempts do not end by themselves")

    def _wait_for(self, child: _Child) -> None:
        """Until the child is over, or has done all its parts."""
        asked, told = time.monotonic(), False
        with self._changed:
            while not (child.done or _is_over(child.state)):
                if self._stopping:
                    raise StoppedError("the run was stopped")
                waited = time.monotonic() - asked
                if not told and child.state.is_scheduled() and waited > _LONG_WAIT_S:
                    told = True
                    get_logger(__name__).warning(
                        "no worker has taken flow run %s yet; is one started for the work pool "
                        "%s? (prefect worker start --pool %s)",
                        *(child.run.name, child.run.work_pool_name, child.run.work_pool_name),
                    )
                self._changed.wait(POLL_S)

    def _poll(self) -> None:
        """Ask for the states of all children at once, however many threads wait for one."""
        looked = time.monotonic()
        with get_client(sync_client=True) as client:
            while not self._closed.wait(POLL_S):
                with self._lock:
                    children = list(self._children.values())
                # A server that does not answer is asked again: children do not depend on it.
                with suppress(Exception):
                    for first in range(0, len(children), _FILTERED):
                        self._note(_read(client, children[first : first + _FILTERED]))
                    if children and time.monotonic() - looked > LOOK_EVERY_S:
                        looked = time.monotonic()
                        self._look_after(client, children)

    def _note(self, runs: list[FlowRun]) -> None:
        with self._changed:
            for run in runs:
                if run.id in self._children and run.state is not None:
                    self._children[run.id].run = run
            self._changed.notify_all()

    def _look_after(self, client: SyncPrefectClient, children: list[_Child]) -> None:
        """See what children have done, and mark those as crashed that died without a word.

        A machine that goes down takes the worker with it, which would have said so.
        """
        written = OutputStore(children[0].order.spec.output).listing(RECEIPTS).keys()
        for child in children:
            missing = len(child.receipts - written)
            if missing != child.missing or not child.state.is_running():
                child.missing, child.sign_of_life = missing, time.monotonic()
            child.done = not missing
            if not child.done and _is_dead(client, child):
                client.set_flow_run_state(
                    child.run.id,
                    Crashed(message="no heartbeat and no receipt: its machine or process is gone"),
                    force=True,
                )


def _is_over(state: State) -> bool:
    """Whether nothing more is to be expected of a run; who cancels one may be gone, too."""
    return state.is_final() or state.is_cancelling()


def _is_dead(client: SyncPrefectClient, child: _Child) -> bool:
    silent_s = time.monotonic() - child.sign_of_life
    if silent_s < DEAD_AFTER_S:
        return False
    if _heartbeats(client, child.run.id, since_s=DEAD_AFTER_S):
        child.sign_of_life = time.monotonic()
        return False
    # One that never had a heartbeat runs without: then only the worker's own limit tells.
    never = not _heartbeats(client, child.run.id, since_s=silent_s + 86_400)
    return not never or silent_s > child.order.spec.execution.timeout_s


def _heartbeats(client: SyncPrefectClient, run_id: UUID, since_s: float) -> bool:
    """Whether the server knows of a heartbeat of a flow run in the last so many seconds."""
    since = datetime.now(UTC) - timedelta(seconds=since_s)
    wanted = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run_id}"]},
        "occurred": {"since": since.isoformat()},
    }
    found = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 1})
    return bool(found.json()["events"])


def _read(client: SyncPrefectClient, children: list[_Child]) -> list[FlowRun]:
    ids = [child.run.id for child in children]
    found: list[FlowRun] = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)), limit=_FILTERED
    )
    return found


def _receipt_of(store: OutputStore, name: str) -> Receipt:
    path = f"{RECEIPTS}/{name}.json"
    document = store.read_document(path)
    if document is None:
        raise WorkerDiedError(f"a flow run was completed, but {store.uri}/{path} is not there")
    return Receipt.from_dict(document, where=f"{store.uri}/{path}")


def _failure(run: FlowRun, state: State) -> SignalBatchError:
    """What the end of a child means: its own error, a death, or a stop."""
    message = state.message or ""
    if state.is_cancelled() or state.is_cancelling():
        return StoppedError(f"flow run {run.name} was cancelled")
    if state.is_crashed():
        return WorkerDiedError(f"flow run {run.name} crashed: {message}")
    told = re.search(r"(\w+Error): (.*)", message, re.DOTALL)
    if told is None:
        return SignalBatchError(f"flow run {run.name} failed: {message}")
    return rebuilt_error({"kind": told[1], "message": told[2], "ordinal": None})
