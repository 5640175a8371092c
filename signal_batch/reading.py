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

from signal_batch.decoding import Array, Decoded, FieldSpec, RecordDecoder
from signal_batch.errors import (
    CorruptDatasetError,
    MissingValueError,
    SpecError,
    UnknownAnnotationError,
)
from signal_batch.shards import (
    DatasetLayout,
    Ints,
    PayloadReader,
    StoredObject,
    check_ordinals,
)
from signal_batch.specs import Column, annotation_sets

__all__ = [
    "AnnotationRow",
    "Batch",
    "DatasetLayout",
    "MetadataRow",
    "RecordReader",
    "annotation_rows",
    "as_ordinals",
    "look_up",
    "metadata_rows",
    "shard_objects",
]

#: Column name -> array with one entry a record, or a list of arrays where shapes differ.
Batch = dict[str, Array | list[Array]]

#: Payload bytes held at a time, besides the batch itself.
_CHUNK_BYTES = 16 << 20
_STATUSES = frozenset(status.value for status in sds.AnnotationStatus)
_NAMES_SHOWN = 20
_NOUNS = {
    "field": "field",
    "metadata": "metadata key",
    "annotation": "value",
    "annotation-field": "field",
}


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


class _Label(NamedTuple):
    status: str
    values: dict[str, Any]
    fields: Mapping[str, FieldSpec]
    arrays: dict[str, Array]


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
        rows = _Rows(self._access, wanted)
        tensors = [
            _TensorColumn(column, rows) for column in self._columns if column.selector.is_array
        ]
        own = [tensor for tensor in tensors if tensor.set_name is None]
        for position, record in self._access.records(wanted, self._fields):
            rows.keep(position, record)
            for tensor in own:
                tensor.put(position, record.arrays, record.fields)
        for name, labels in self._sets.items():
            rows.labels[name] = self._read_labels(name, labels, rows, tensors)
        batch: Batch = {"ordinal": wanted, "id": _objects(rows.ids)}
        built = {tensor.column.name: tensor for tensor in tensors}
        for column in self._columns:
            tensor_column = built.get(column.name)
            batch[column.name] = (
                _value_column(column, rows) if tensor_column is None else tensor_column.result()
            )
        return batch

    def _read_labels(
        self, name: str, labels: _LabelReader, rows: _Rows, tensors: list[_TensorColumn]
    ) -> list[_Label]:
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


def look_up(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None where there is none (or a JSON null).

    A key that itself contains dots wins over nested objects.
    """
    value = values.get(path)
    if value is not None:
        return value
    at = path.find(".")
    while at >= 0:
        inner = values.get(path[:at])
        value = look_up(inner, path[at + 1 :]) if isinstance(inner, dict) else None
        if value is not None:
            return value
        at = path.find(".", at + 1)
    return None


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
    ) -> Iterator[tuple[int, _Label]]:
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


class _Rows:
    """What a batch keeps of its records while columns are put together."""

    def __init__(self, access: _Access, ordinals: Ints) -> None:
        self._access = access
        self.ordinals = ordinals
        self.ids: list[str] = [""] * len(ordinals)
        self.scenes: list[str | None] = [None] * len(ordinals)
        self.metadata: list[dict[str, Any]] = [{}] * len(ordinals)
        self.labels: dict[str, list[_Label]] = {}

    def keep(self, position: int, record: Decoded) -> None:
        self.ids[position] = record.id
        self.scenes[position] = record.scene_id
        self.metadata[position] = record.metadata

    def name(self, position: int) -> str:
        """How an error names a record."""
        ordinal = int(self.ordinals[position])
        return f"record {ordinal} (id {self.ids[position]!r}) in {self._access.where(ordinal)}"


class _TensorColumn:
    """One array for the batch while shapes agree, from then on a list of arrays."""

    def __init__(self, column: Column, rows: _Rows) -> None:
        self.column = column
        self.set_name = column.selector.set_name
        self._rows = rows
        self._path = column.selector.path or ""
        self._target = None if column.dtype is None else np.dtype(column.dtype)
        self._dtype: np.dtype[Any] | None = None
        self._batch: Array | None = None
        self._items: list[Any] | None = None
        self._filled: list[int] = []

    def put(
        self,
        position: int,
        arrays: Mapping[str, Array],
        fields: Mapping[str, FieldSpec],
        status: str | None = None,
    ) -> None:
        array = arrays.get(self._path)
        if array is None:
            _raise_missing(self.column, self._rows, position, fields, status)
        # numpy holds None to equal float64, so the comparison alone would let that one through.
        if self._dtype is None or array.dtype != self._dtype:
            array = self._fitted(position, array)
        if self._items is not None:
            self._items[position] = array.copy()
            return
        if self._batch is None:
            self._batch = np.empty((len(self._rows.ids), *array.shape), array.dtype)
        if self._batch.shape[1:] != array.shape:
            self._go_ragged()
            self.put(position, {self._path: array}, fields, status)
            return
        self._batch[position] = array
        self._filled.append(position)

    def result(self) -> Array | list[Array]:
        if self._items is not None:
            return self._items
        if self._batch is None:
            return np.empty(0, self._target or np.float64)
        return self._batch

    def _go_ragged(self) -> None:
        assert self._batch is not None
        self._items = [None] * len(self._rows.ids)
        for position in self._filled:
            self._items[position] = self._batch[position].copy()
        self._batch = None

    def _fitted(self, position: int, array: Array) -> Array:
        """The array in the column's dtype: the declared one, or that of the first record."""
        if self._dtype is None:
            self._dtype = self._target or array.dtype
            if array.dtype == self._dtype:
                return array
        problem = None
        if self._target is None:
            problem = f"is {array.dtype} where others are {self._dtype}; declare a dtype"
        elif not np.can_cast(array.dtype, self._target, "same_kind"):
            problem = f"is {array.dtype}, which does not convert to {self._target}"
        elif not _in_range(array, self._target):
            problem = f"has values outside the range of {self._target}"
        if problem is not None:
            raise SpecError(
                f"column {self.column.name!r}: {self._rows.name(position)}: "
                f"{self.column.selector} {problem}"
            )
        return array.astype(self._dtype)


def _in_range(array: Array, target: np.dtype[Any]) -> bool:
    """Whether a cast of the same kind keeps every value finite and unwrapped."""
    if np.can_cast(array.dtype, target, "safe"):
        return True
    values = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    if not values.size:
        return True
    limits = np.iinfo(target) if target.kind in "iu" else np.finfo(target)
    # As Python numbers: numpy would cast the other side to the narrower type first.
    least, most = limits.min, limits.max
    if target.kind not in "iu":
        least, most = float(least), float(most)
    return bool(least <= values.min().item() and values.max().item() <= most)


def _value_column(column: Column, rows: _Rows) -> Array:
    source = column.selector.source
    if source == "ordinal":
        return rows.ordinals.copy()
    if source == "id":
        return _objects(rows.ids)
    if source == "scene":
        return _objects(rows.scenes)
    path = column.selector.path or ""
    labels = rows.labels[column.selector.set_name] if column.selector.set_name else None
    held = rows.metadata if labels is None else [label.values for label in labels]
    values = [look_up(mapping, path) for mapping in held]
    for position, value in enumerate(values):
        if value is None:
            if not column.has_default:
                status = None if labels is None else labels[position].status
                _raise_missing(column, rows, position, held[position], status)
            values[position] = column.default
    return _typed(column, rows, values)


def _typed(column: Column, rows: _Rows, values: list[Any]) -> Array:
    dtype = column.dtype or _inferred(set(map(type, values)))
    if dtype is None:
        _raise_untyped(column, rows, values)
    try:
        return _converted(values, dtype)
    except (ValueError, OverflowError):
        for position, value in enumerate(values):
            try:
                _converted([value], dtype)
            except (ValueError, OverflowError) as exc:
                raise SpecError(
                    f"column {column.name!r}: {rows.name(position)}: {column.selector} is "
                    f"{value!r}, {exc}"
                ) from None
        raise


def _inferred(kinds: set[type]) -> str | None:
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64"
    if kinds == {str}:
        return "str"
    return "float64" if kinds <= {int, float} else None


def _converted(values: list[Any], dtype: str) -> Array:
    """Values as an array of a declared or inferred dtype; raises `ValueError` if one does not fit.

    None, which only a null default brings in, becomes NaN or stays None among strings.
    """
    if dtype == "str":
        _require(values, (str, type(None)), "not a string")
        return _objects(values)
    target = np.dtype(dtype)
    if target.kind == "b":
        _require(values, (bool,), "neither true nor false")
        return np.array(values, target)
    _require(values, (bool, int, float, type(None)), "not a number")
    if target.kind == "f":
        wide = np.array([np.nan if value is None else float(value) for value in values])
        if not _in_range(wide, target):
            raise ValueError(f"outside the range of {dtype}")
        return wide.astype(target)
    limits = np.iinfo(target)
    for value in values:
        if value is None or value != value // 1:
            raise ValueError(f"not a whole number as {dtype} needs")
        if not limits.min <= value <= limits.max:
            raise ValueError(f"outside the range of {dtype}")
    return np.array([int(value) for value in values], target)


def _require(values: list[Any], kinds: tuple[type, ...], problem: str) -> None:
    if not all(isinstance(value, kinds) for value in values):
        raise ValueError(problem)


def _raise_untyped(column: Column, rows: _Rows, values: list[Any]) -> NoReturn:
    known = (bool, int, float, str)
    odd = next((i for i, value in enumerate(values) if type(value) not in known), None)
    if odd is not None:
        raise SpecError(
            f"column {column.name!r}: {rows.name(odd)}: {column.selector} is a JSON "
            f"{type(values[odd]).__name__}, which is not a single value; name a key inside it"
        )
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    other = next(i for i, value in enumerate(values) if type(value) is not type(values[0]))
    raise SpecError(
        f"column {column.name!r}: {column.selector} mixes {kinds}: {rows.name(0)} has "
        f"{values[0]!r}, {rows.name(other)} has {values[other]!r}; declare a dtype"
    )


def _raise_missing(
    column: Column,
    rows: _Rows,
    position: int,
    present: Mapping[str, Any],
    status: str | None,
) -> NoReturn:
    """Say which record lacks what, what it has instead and what can be done about it."""
    selector = column.selector
    what = _NOUNS[selector.source]
    shown = sorted(present)[:_NAMES_SHOWN]
    names = ", ".join(shown) + (", ..." if len(present) > len(shown) else "")
    where, remedy = "", "filter such records out"
    if status is not None:
        where = f" in its row of annotation set {selector.set_name!r} (status {status})"
        remedy += f", for example with --where 'annotation:{selector.set_name} status success'"
    fix = "Correct the name" if selector.is_array else f"Give the column a default ({selector}?0)"
    raise MissingValueError(
        f"{rows.name(position)} has no {what} {selector.path!r}{where}; "
        f"it has: {names or 'none'}. {fix} or {remedy}."
    )


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


def _label(carrier: Decoded) -> _Label:
    body = carrier.metadata["annotation"]
    empty = body["empty_fields"]
    fields, arrays = ({}, {}) if empty else (carrier.fields, carrier.arrays)
    return _Label(body["status"], body.get("values", {}), fields, arrays)


def _groups(shard: Ints, local: Ints) -> list[Ints]:
    """Positions by shard, within a shard in storage order."""
    if not len(shard):
        return []
    order = np.lexsort((local, shard))
    return np.split(order, np.flatnonzero(np.diff(shard[order])) + 1)


def _names(columns: Sequence[Column], source: str, set_name: str | None) -> tuple[str, ...]:
    chosen = (c.selector for c in columns if c.selector.source == source)
    return tuple(sorted({str(s.path) for s in chosen if s.set_name == set_name}))


def _objects(values: Sequence[Any]) -> Array:
    found = np.empty(len(values), object)
    found[:] = values
    return found


_shared: WeakKeyDictionary[sds.Dataset, dict[bool, _Access]] = WeakKeyDictionary()
_shared_lock = threading.Lock()


def _access(dataset: sds.Dataset, safe: bool = False) -> _Access:
    with _shared_lock:
        known = _shared.setdefault(dataset, {})
        if safe not in known:
            known[safe] = _Access(dataset, safe)
        return known[safe]
