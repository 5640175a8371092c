"""Decoded records and annotation rows of one open dataset, by ordinal.

Everything that readers of a dataset can share is here: where records are, which shard objects
were checked, and the layouts the decoder knows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import signal_dataset as sds

from signal_batch.assembly import Label
from signal_batch.batches import Ints
from signal_batch.decoding import Decoded, RecordDecoder
from signal_batch.errors import CorruptDatasetError, UnknownAnnotationError
from signal_batch.failures import patiently
from signal_batch.layout import DatasetLayout, StoredObject, check_ordinals

#: Payload bytes held at a time, besides the batch itself.
_CHUNK_BYTES = 16 << 20
_STATUSES = frozenset(status.value for status in sds.AnnotationStatus)


class PayloadReader:
    """Reads encoded records of a dataset's shard objects, checked once and retried in passing."""

    def __init__(self, dataset: sds.Dataset) -> None:
        self._root = dataset.root
        self._objects = dataset.object_store
        self._shards = dataset.shard_store
        self._options = dataset.storage_options
        self._checked: set[str] = set()

    def read(
        self, source: StoredObject, indices: Sequence[int], ordinals: Sequence[int]
    ) -> Sequence[bytes]:
        """Payloads of `indices`, which are the records `ordinals`.

        Raises `CorruptDatasetError` naming the first record that cannot be read.
        """
        try:
            self._check_size(source)
            return patiently(lambda: self._read_many(source, indices), source.uri)
        except CorruptDatasetError as exc:
            if len(indices) == 1:
                message = f"record {ordinals[0]} (index {indices[0]} of its shard): {exc}"
                raise CorruptDatasetError(message, ordinal=ordinals[0]) from exc
        pairs = zip(indices, ordinals, strict=True)
        return [self.read(source, [index], [ordinal])[0] for index, ordinal in pairs]

    def _read_many(self, source: StoredObject, indices: Sequence[int]) -> tuple[bytes, ...]:
        return self._shards.read_many(
            source.uri,
            indices,
            generation=source.generation,
            options=self._options.reader_options,
            file_reader_buffer_size=self._options.file_reader_buffer_size,
        )

    def _check_size(self, source: StoredObject) -> None:
        """Compare an object's size with its manifest's, the first time it is read."""
        if source.uri in self._checked:
            return
        found = patiently(lambda: self._size_of(source), source.uri)
        if found is not None and found != source.stored_bytes:
            raise CorruptDatasetError(
                f"shard {source.uri} holds {found} bytes where {source.stored_bytes} are declared; "
                "it was cut short or replaced after publication"
            )
        self._checked.add(source.uri)

    def _size_of(self, source: StoredObject) -> int | None:
        """Size of an object, or None where only the shard reader can reach it.

        A reference dataset names objects of another root, possibly on another service, which
        the dataset's own store may be confined away from.
        """
        if not source.owned:
            return None if "://" in source.uri else Path(source.uri).stat().st_size
        return self._objects.info(source.uri, generation=source.generation).size


class Access:
    """What all readers of one open dataset share: its layout, checked shards and decoder."""

    def __init__(self, dataset: sds.Dataset, safe: bool) -> None:
        options = dataset.storage_options
        self.layout = DatasetLayout(dataset)
        self.payloads = PayloadReader(dataset)
        self.decoder = RecordDecoder(
            resources=options.resources, control=options.control, safe=safe
        )
        self._labels: dict[str, LabelReader] = {}
        self._typical_bytes = 1 << 20

    def labels(self, dataset: sds.Dataset, name: str) -> LabelReader:
        if name not in dataset.annotations:
            known = ", ".join(sorted(dataset.annotations)) or "none"
            raise UnknownAnnotationError(
                f"{dataset.root} has no annotation set {name!r}; it has: {known}"
            )
        if name not in self._labels:
            found = patiently(lambda: dataset.annotations[name], f"{dataset.root}/annotations")
            self._labels[name] = LabelReader(self, found)
        return self._labels[name]

    def records(self, ordinals: Ints, fields: Sequence[str]) -> Iterator[tuple[int, Decoded]]:
        """Position in `ordinals` and record, shard by shard; rows of metadata without `fields`."""
        shard, local = self.layout.locate(ordinals)
        for positions in _groups(shard, local):
            pair = self.layout.shards[shard[positions[0]]]
            source = pair.data if fields else pair.metadata
            yield from self.decoded(source, positions, local, ordinals, fields, row=not fields)

    def decoded(
        self,
        source: StoredObject,
        positions: Ints,
        local: Ints,
        ordinals: Ints,
        fields: Sequence[str],
        *,
        row: bool,
    ) -> Iterator[tuple[int, Decoded]]:
        decoder = self.decoder
        start = 0
        while start < len(positions):
            count = max(1, _CHUNK_BYTES // self._typical_bytes)
            chunk = positions[start : start + count]
            start += count
            indices, wanted = local[chunk].tolist(), ordinals[chunk].tolist()
            payloads = self.payloads.read(source, indices, wanted)
            self._typical_bytes = max(1, max(map(len, payloads)))
            for number, (position, payload) in enumerate(
                zip(chunk.tolist(), payloads, strict=True)
            ):
                try:
                    record = decoder.decode_row(payload) if row else decoder.decode(payload, fields)
                except CorruptDatasetError as exc:
                    _raise_damaged(source, indices[number], wanted[number], exc)
                yield position, record

    def where(self, ordinal: int) -> str:
        """URI of the data shard that holds a record."""
        shard, _ = self.layout.locate(np.array([ordinal]))
        return self.layout.shards[int(shard[0])].data.uri


class LabelReader:
    """Reads the rows of one annotation set, which is dense: one row for every ordinal."""

    def __init__(self, access: Access, labels: sds.AnnotationSet) -> None:
        self._access = access
        self._name = labels.name
        self._size = len(labels)
        shards = labels._specification.shards
        self._starts = np.array([shard.first_ordinal for shard in shards], np.int64)
        self._sources = [StoredObject.of(labels.root, shard.object) for shard in shards]

    def read(
        self, ordinals: Ints, ids: Sequence[str], fields: Sequence[str]
    ) -> Iterator[tuple[int, Label]]:
        """Position and row, shard by shard; `ids` are those of the records themselves."""
        check_ordinals(ordinals, self._size)
        shard = np.searchsorted(self._starts, ordinals, "right") - 1
        local = ordinals - self._starts[shard]
        for positions in _groups(shard, local):
            source = self._sources[shard[positions[0]]]
            rows = self._access.decoded(source, positions, local, ordinals, fields, row=False)
            for position, carrier in rows:
                ordinal = int(ordinals[position])
                problem = _row_problem(carrier, ordinal, ids[position])
                if problem:
                    raise CorruptDatasetError(
                        f"annotation set {self._name!r}, row of record {ordinal} in {source.uri}: "
                        f"{problem}",
                        ordinal=ordinal,
                    )
                yield position, _label(carrier)


def _raise_damaged(
    source: StoredObject, index: int, ordinal: int, exc: CorruptDatasetError
) -> NoReturn:
    raise CorruptDatasetError(
        f"record {ordinal} (index {index} of shard {source.uri}): {exc}", ordinal=ordinal
    ) from exc


def _row_problem(carrier: Decoded, ordinal: int, record_id: str) -> str | None:
    """What is wrong with an annotation row, by the same rules as the library's own reader."""
    body = carrier.metadata.get("annotation")
    if not isinstance(body, dict):
        return "it has no annotation object"
    index, status, detail = body.get("source_index"), body.get("status"), body.get("detail_status")
    if type(index) is not int or type(status) is not str or status not in _STATUSES:
        return f"source_index {index!r} or status {status!r} is not valid"
    if not isinstance(body.get("values", {}), dict):
        return "its values are not an object"
    if not isinstance(body.get("provenance", {}), dict):
        return "its provenance is not an object"
    if type(body.get("empty_fields")) is not bool:
        return "empty_fields is not true or false"
    if detail is not None and (type(detail) is not str or not detail):
        return f"detail_status {detail!r} is not valid"
    if index != ordinal or carrier.id != record_id:
        return f"it belongs to record {index} (id {carrier.id!r}), not to {record_id!r}"
    return None


def _label(carrier: Decoded) -> Label:
    body = carrier.metadata["annotation"]
    empty = body["empty_fields"]
    fields, arrays = ({}, {}) if empty else (carrier.fields, carrier.arrays)
    return Label(body["status"], body.get("values", {}), fields, arrays)


def _groups(shard: Ints, local: Ints) -> list[Ints]:
    """Positions by shard, within a shard in storage order."""
    if not len(shard):
        return []
    order = np.lexsort((local, shard))
    return np.split(order, np.flatnonzero(np.diff(shard[order])) + 1)


_shared: WeakKeyDictionary[sds.Dataset, dict[bool, Access]] = WeakKeyDictionary()
_shared_lock = threading.Lock()


def access_to(dataset: sds.Dataset, safe: bool = False) -> Access:
    with _shared_lock:
        known = _shared.setdefault(dataset, {})
        if safe not in known:
            known[safe] = Access(dataset, safe)
        return known[safe]
