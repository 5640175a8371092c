"""Batches of columns for any list of ordinals.

`RecordReader.read` groups ordinals by shard, fetches each group's payloads in few calls, and
copies every wanted tensor once, from the payload into the batch. Metadata shards are read
instead of data shards when no column needs samples. Annotation rows are read the same way and
checked to be the rows of the records beside them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import signal_dataset as sds

from signal_batch.assembly import Label, Rows, TensorColumn, objects, value_column
from signal_batch.batches import Batch
from signal_batch.decoding import Decoded, FieldSpec, RecordDecoder
from signal_batch.errors import CorruptDatasetError, UnknownAnnotationError
from signal_batch.shards import (
    DatasetLayout,
    Ints,
    PayloadReader,
    StoredObject,
    check_ordinals,
)
from signal_batch.specs import Column, annotation_sets

#: Payload bytes held at a time, besides the batch itself.
_CHUNK_BYTES = 16 << 20
_STATUSES = frozenset(status.value for status in sds.AnnotationStatus)


class MetadataRow(NamedTuple):
    """A record without its samples; `fields` maps a name to (dtype, shape, axis names)."""

    id: str
    scene: str | None
    metadata: dict[str, Any]
    fields: Mapping[str, FieldSpec]


class AnnotationRow(NamedTuple):
    """An annotation set's row: its status (`success`, `skipped`, `failed`) and its values."""

    status: str
    values: dict[str, Any]


class RecordReader:
    """Reads the columns of a spec from an open dataset; may be shared between threads."""

    def __init__(
        self, dataset: sds.Dataset, columns: Sequence[Column], *, safe_decode: bool = False
    ) -> None:
        self._columns = tuple(columns)
        self._access = _access(dataset, safe_decode)
        self._sets = {
            name: self._access.labels(dataset, name) for name in annotation_sets(self._columns)
        }
        self._fields = _names(self._columns, "field", None)

    def read(self, ordinals: Sequence[int] | npt.NDArray[Any]) -> Batch:
        """Columns of the records `ordinals`, in their order, repeats included.

        The result has `ordinal` (int64) and `id` (object) first, then the columns as declared: a
        field of equal shapes is one array (records, *shape), otherwise a list of arrays; a value
        column is an array (records,). Raises `CorruptDatasetError` with the ordinal of a damaged
        record, `MissingValueError`, `SpecError` for a value that does not fit its column,
        `StorageError` and `IndexError`.
        """
        wanted = as_ordinals(ordinals)
        rows = Rows(wanted, self._access.where)
        tensors = [
            TensorColumn(column, rows) for column in self._columns if column.selector.is_array
        ]
        own = [tensor for tensor in tensors if tensor.set_name is None]
        for position, record in self._access.records(wanted, self._fields):
            rows.keep(position, record)
            for tensor in own:
                tensor.put(position, record.arrays, record.fields)
        for name, labels in self._sets.items():
            rows.labels[name] = self._read_labels(name, labels, rows, tensors)
        batch: Batch = {"ordinal": wanted, "id": objects(rows.ids)}
        built = {tensor.column.name: tensor for tensor in tensors}
        for column in self._columns:
            tensor_column = built.get(column.name)
            batch[column.name] = (
                value_column(column, rows) if tensor_column is None else tensor_column.result()
            )
        return batch

    def _read_labels(
        self, name: str, labels: _LabelReader, rows: Rows, tensors: list[TensorColumn]
    ) -> list[Label]:
        found: list[Any] = [None] * len(rows.ids)
        theirs = [tensor for tensor in tensors if tensor.set_name == name]
        wanted = _names(self._columns, "annotation-field", name)
        for position, label in labels.read(rows.ordinals, rows.ids, wanted):
            for tensor in theirs:
                tensor.put(position, label.arrays, label.fields, label.status)
            found[position] = label._replace(arrays={})
        return found


def metadata_rows(dataset: sds.Dataset, ordinals: Sequence[int] | Ints) -> list[MetadataRow]:
    """Id, scene, metadata and field shapes of records, without reading a sample."""
    wanted = as_ordinals(ordinals)
    found: list[Any] = [None] * len(wanted)
    for position, record in _access(dataset).records(wanted, ()):
        found[position] = MetadataRow(*record[:4])
    return found


def annotation_rows(
    dataset: sds.Dataset,
    set_name: str,
    ordinals: Sequence[int] | Ints,
    *,
    ids: Sequence[str] | None = None,
) -> list[AnnotationRow]:
    """Status and values of an annotation set's rows.

    `ids` are the records' own ids, to check that every row is the row of its record; they are
    read from the dataset if the caller does not have them.
    """
    wanted = as_ordinals(ordinals)
    access = _access(dataset)
    known = [row.id for row in metadata_rows(dataset, wanted)] if ids is None else ids
    found: list[Any] = [None] * len(wanted)
    for position, label in access.labels(dataset, set_name).read(wanted, known, ()):
        found[position] = AnnotationRow(label.status, label.values)
    return found


def shard_objects(dataset: sds.Dataset) -> list[tuple[str, int]]:
    """URI and declared size of every data and metadata shard object, in manifest order."""
    layout = _access(dataset).layout
    layout.table()
    objects = (item for shard in layout.shards for item in shard)
    return list(dict.fromkeys((item.uri, item.stored_bytes) for item in objects))


def as_ordinals(ordinals: Sequence[int] | npt.NDArray[Any]) -> Ints:
    """Ordinals as a new int64 array (records,); raises `TypeError` for anything but integers."""
    found = np.asarray(ordinals)
    if found.size == 0:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"ordinals are a flat list of integers, not {found.dtype} {found.shape}")
    return found.astype(np.int64)


class _Access:
    """What all readers of one open dataset share: its layout, checked shards and decoder."""

    def __init__(self, dataset: sds.Dataset, safe: bool) -> None:
        options = dataset.storage_options
        self.layout = DatasetLayout(dataset)
        self.payloads = PayloadReader(dataset)
        self.decoder = RecordDecoder(
            resources=options.resources, control=options.control, safe=safe
        )
        self._labels: dict[str, _LabelReader] = {}
        self._typical_bytes = 1 << 20

    def labels(self, dataset: sds.Dataset, name: str) -> _LabelReader:
        if name not in dataset.annotations:
            known = ", ".join(sorted(dataset.annotations)) or "none"
            raise UnknownAnnotationError(
                f"{dataset.root} has no annotation set {name!r}; it has: {known}"
            )
        return self._labels.setdefault(name, _LabelReader(self, dataset.annotations[name]))

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


class _LabelReader:
    """Reads the rows of one annotation set, which is dense: one row for every ordinal."""

    def __init__(self, access: _Access, labels: sds.AnnotationSet) -> None:
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


def _names(columns: Sequence[Column], source: str, set_name: str | None) -> tuple[str, ...]:
    chosen = (c.selector for c in columns if c.selector.source == source)
    return tuple(sorted({str(s.path) for s in chosen if s.set_name == set_name}))


_shared: WeakKeyDictionary[sds.Dataset, dict[bool, _Access]] = WeakKeyDictionary()
_shared_lock = threading.Lock()


def _access(dataset: sds.Dataset, safe: bool = False) -> _Access:
    with _shared_lock:
        known = _shared.setdefault(dataset, {})
        if safe not in known:
            known[safe] = _Access(dataset, safe)
        return known[safe]
