"""Batches of columns for any list of ordinals.

`RecordReader.read` groups ordinals by shard, fetches each group's payloads in few calls, and
copies every wanted tensor once, from the payload into the batch. Metadata shards are read
instead of data shards when no column needs samples. Annotation rows are read the same way and
checked to be the rows of the records beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import signal_dataset as sds

from signal_batch.access import LabelReader, access_to
from signal_batch.assembly import Label, Rows, TensorColumn, objects, value_column
from signal_batch.batches import Array, Batch, Ints
from signal_batch.columns import Column, annotation_sets
from signal_batch.decoding import FieldSpec

#: Annotation values are kept in memory if those of the whole set take no more than this.
KNOWN_VALUES_BYTES = 64 << 20


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
        self._access = access_to(dataset, safe_decode)
        self._sets = {
            name: self._access.labels(dataset, name) for name in annotation_sets(self._columns)
        }
        self._fields = _names(self._columns, "field", None)
        self._known = {
            name: _KnownValues(columns, len(dataset))
            for name in self._sets
            if _fits(columns := _of_set(self._columns, name), len(dataset))
        }

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
        built: dict[str, Any] = {}
        for name, labels in self._sets.items():
            known = self._known.get(name)
            if known is None:
                rows.labels[name] = self._read_labels(name, labels, rows, tensors)
            else:
                self._learn(name, labels, rows, known)
                built |= known.of(wanted)
        built |= {tensor.column.name: tensor.result() for tensor in tensors}
        batch: Batch = {"ordinal": wanted, "id": objects(rows.ids)}
        for column in self._columns:
            values = built.get(column.name)
            batch[column.name] = value_column(column, rows) if values is None else values
        return batch

    def _read_labels(
        self, name: str, labels: LabelReader, rows: Rows, tensors: list[TensorColumn]
    ) -> list[Label]:
        found: list[Any] = [None] * len(rows.ids)
        theirs = [tensor for tensor in tensors if tensor.set_name == name]
        wanted = _names(self._columns, "annotation-field", name)
        for position, label in labels.read(rows.ordinals, rows.ids, wanted):
            for tensor in theirs:
                tensor.put(position, label.arrays, label.fields, label.status)
            found[position] = label._replace(arrays={})
        return found

    def _learn(self, name: str, labels: LabelReader, rows: Rows, known: _KnownValues) -> None:
        """Read the rows of a set that were not read before, and keep their values."""
        new = rows.part(known.unknown(rows.ordinals))
        if new.ids:
            new.labels[name] = self._read_labels(name, labels, new, [])
            known.keep(new.ordinals, {c.name: value_column(c, new) for c in known.columns})


class _KnownValues:
    """The values of a set's columns by ordinal, as far as they were read.

    An annotation row never changes, so a later epoch need not read it again. Values are in place
    before they are marked as known; two threads that read the same row store the same values.
    """

    def __init__(self, columns: Sequence[Column], records: int) -> None:
        self.columns = tuple(columns)
        self._values = {c.name: np.zeros(records, np.dtype(c.dtype)) for c in columns}
        self._known = np.zeros(records, np.bool_)

    def unknown(self, ordinals: Ints) -> Ints:
        """Positions in `ordinals` whose values must be read."""
        return np.flatnonzero(~self._known[ordinals])

    def keep(self, ordinals: Ints, values: Mapping[str, Array]) -> None:
        for name, found in values.items():
            self._values[name][ordinals] = found
        self._known[ordinals] = True

    def of(self, ordinals: Ints) -> dict[str, Array]:
        return {name: values[ordinals] for name, values in self._values.items()}


def _of_set(columns: Sequence[Column], name: str) -> tuple[Column, ...]:
    return tuple(column for column in columns if column.selector.set_name == name)


def _fits(columns: Sequence[Column], records: int) -> bool:
    """Whether a set's columns may be kept: plain numbers of a declared dtype, in all small."""
    if not all(c.selector.source == "annotation" and c.dtype not in (None, "str") for c in columns):
        return False
    return records * sum(np.dtype(c.dtype).itemsize for c in columns) <= KNOWN_VALUES_BYTES


def metadata_rows(dataset: sds.Dataset, ordinals: Sequence[int] | Ints) -> list[MetadataRow]:
    """Id, scene, metadata and field shapes of records, without reading a sample."""
    wanted = as_ordinals(ordinals)
    found: list[Any] = [None] * len(wanted)
    for position, record in access_to(dataset).records(wanted, ()):
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
    access = access_to(dataset)
    known = [row.id for row in metadata_rows(dataset, wanted)] if ids is None else ids
    found: list[Any] = [None] * len(wanted)
    for position, label in access.labels(dataset, set_name).read(wanted, known, ()):
        found[position] = AnnotationRow(label.status, label.values)
    return found


def as_ordinals(ordinals: Sequence[int] | npt.NDArray[Any]) -> Ints:
    """Ordinals as a new int64 array (records,); raises `TypeError` for anything but integers."""
    found = np.asarray(ordinals)
    if found.size == 0:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"ordinals are a flat list of integers, not {found.dtype} {found.shape}")
    return found.astype(np.int64)


def _names(columns: Sequence[Column], source: str, set_name: str | None) -> tuple[str, ...]:
    chosen = (c.selector for c in columns if c.selector.source == source)
    return tuple(sorted({str(s.path) for s in chosen if s.set_name == set_name}))
