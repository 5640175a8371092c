"""Tell a server that a dataset is published: an event that automations start runs from."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.events import Event
from prefect.events.clients import get_events_client
from prefect.events.filters import EventFilter, EventIDFilter, EventOccurredFilter
from websockets.exceptions import WebSocketException

from flows.registering import server
from signal_batch.errors import SignalBatchError
from signal_batch.frozen import canonical_json
from signal_batch.pins import Pin
from signal_batch.uris import refuse_credentials
from signal_batch.validation import validate
from tasks.validation import raise_faults

PUBLISHED = "signal-batch.dataset.published"
_NAMESPACE = uuid.UUID("5b1d6f0c-6a52-4f0e-9d4e-2b1c8f6d3a71")
#: Prefect looks through today's events only, unless told.
_EVER = EventOccurredFilter.model_validate(
    {"since": "2020-01-01T00:00:00Z", "until": "2200-01-01T00:00:00Z"}
)
_LONGEST_WAIT_S = 60.0
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Announcement:
    """The event of a published dataset; `earlier` is when the server had it already."""

    event: Event
    earlier: datetime | None

    @property
    def fingerprint(self) -> str:
        return str(self.event.payload["fingerprint"])


def announce(dataset: str, annotations: list[str]) -> Announcement:
    """Validate and pin the dataset, send the event, and wait until the server has stored it.

    The event's id follows from the digests of dataset and annotation sets, so the same state is
    announced once, for as long as the server keeps its events.

    Raises:
        InputError: no such dataset or set, credentials in the URI, or no server is named.
        CorruptDatasetError: the dataset has faults.
        SignalBatchError: the server does not answer, or did not store the event in 60 s.
    """
    refuse_credentials(dataset)
    with server() as client:  # before the dataset is read: without one there is nothing to do
        result = validate(dataset, annotations)
        raise_faults(result)
        event = _event(result.pin)
        earlier = _stored(client, event)
        if earlier is None:
            _send(client, event)
        return Announcement(event, earlier)


def _event(pin: Pin) -> Event:
    name = pin.uri.rpartition("/")[2].removesuffix(".sds")
    resource = {
        "prefect.resource.id": f"signal-batch.dataset.{pin.dataset_id}",
        "prefect.resource.name": name,
        "signal-batch.uri": pin.uri,
        "signal-batch.fingerprint": pin.fingerprint,
        "signal-batch.snapshot": pin.snapshot_id,
    }
    payload: dict[str, Any] = {
        "uri": pin.uri,
        "name": name,
        "dataset_id": pin.dataset_id,
        "snapshot_id": pin.snapshot_id,
        "fingerprint": pin.fingerprint,
        "records": pin.record_count,
        "annotations": {item.name: item.publication_id for item in pin.annotations},
    }
    identity = canonical_json(pin.identity()).decode()
    return Event.model_validate(
        {
            "event": PUBLISHED,
            "resource": resource,
            "payload": payload,
            "id": uuid.uuid5(_NAMESPACE, identity),
        }
    )


def _send(client: SyncPrefectClient, event: Event) -> None:
    try:
        asyncio.run(_emit(event))
    except (OSError, WebSocketException) as exc:
        raise SignalBatchError(f"the server took no event ({exc}); announce again") from exc
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while _stored(client, event) is None:
        if time.monotonic() > deadline:
            raise SignalBatchError(
                f"the server took the event but has not stored it in {_LONGEST_WAIT_S:.0f} s; "
                "look at its log, and announce again"
            )
        time.sleep(_LOOK_EVERY_S)


async def _emit(event: Event) -> None:
    async with get_events_client(checkpoint_every=1) as events:  # waits for the server's answer
        await events.emit(event)


def _stored(client: SyncPrefectClient, event: Event) -> datetime | None:
    """When the event occurred that the server has under this id."""
    wanted = EventFilter(id=EventIDFilter(id=[event.id]), occurred=_EVER)
    page = client.read_events(wanted, limit=1)
    return page.events[0].occurred if page.events else None
