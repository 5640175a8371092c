"""The logical digest: a hash of Arrow values that says nothing of how they are stored.

Two exports of the same job have equal digests although their files may differ in pyarrow
version, compression, encoding, row groups and batch boundaries. It is the proof that a resumed
run equals a clean one, and what `verify` recomputes from the files.

Every level of a column keeps running hashes: of the bytes of its values, of the lengths of its
lists or texts, and of the positions of its nulls. Positions, not a bitmap, because a bitmap
depends on where batches begin, and because a column without nulls then costs nothing. The bytes
under a null never count. Values count bit for bit: -0.0 is not 0.0, and NaNs may differ.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from signal_batch.frozen import digest


class LogicalDigest:
    """Running digest of a stream of record batches of one schema.

    >>> schema = pa.schema({"x": pa.int8()})
    >>> one, two = LogicalDigest(schema), LogicalDigest(schema)
    >>> one.update(pa.record_batch({"x": pa.array([1, 2, 3], pa.int8())}))
    >>> two.update(pa.record_batch({"x": pa.array([1, 2], pa.int8())}))
    >>> two.update(pa.record_batch({"x": pa.array([3], pa.int8())}))
    >>> one.hexdigest() == two.hexdigest()
    True
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.rows = 0
        self._names = list(schema.names)
        self._levels = [_Level(field.type) for field in schema]

    def update(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch; ValueError if its columns are not those of the schema."""
        if batch.schema.names != self._names:
            raise ValueError(f"expected the columns {self._names}, not {batch.schema.names}")
        for name, level, array in zip(self._names, self._levels, batch.columns, strict=True):
            if _describe(array.type) != level.description:
                raise ValueError(f"column {name!r}: expected {level.description}, not {array.type}")
            level.update(array)
        self.rows += batch.num_rows

    def hexdigest(self) -> str:
        """SHA-256 (hex) over names, types, row count and values so far."""
        columns = [
            [name, level.description, level.state()]
            for name, level in zip(self._names, self._levels, strict=True)
        ]
        return digest([self.rows, columns])


class _Level:
    """Running hashes of one level of nesting, and of the one below it."""

    def __init__(self, kind: pa.DataType) -> None:
        self.description = _describe(kind)
        self.count = 0
        self.values, self.lengths, self.nulls = sha256(), sha256(), sha256()
        stored = _stored(kind)
        self.child = _Level(stored.value_type) if _is_list(stored) else None

    def update(self, array: pa.Array) -> None:
        array = _stored_array(array)
        nulls = _null_positions(array)
        if len(nulls):
            self.nulls.update((nulls + self.count).astype("<i8"))
        if self.child is not None:
            if not pa.types.is_fixed_size_list(array.type):
                self.lengths.update(_lengths(pc.list_value_length(array)))
            self.child.update(array.flatten())  # leaves out what lies under nulls
        elif _is_text(array.type):
            self._update_text(array.cast(pa.large_string()).fill_null(""))
        elif pa.types.is_boolean(array.type):
            self.values.update(array.fill_null(False).to_numpy(zero_copy_only=False))
        else:
            self.values.update(_fixed_width_bytes(array, nulls))
        self.count += len(array)

    def _update_text(self, array: pa.Array) -> None:
        self.lengths.update(_lengths(pc.binary_length(array)))
        _, offsets, characters = array.buffers()
        if len(array) and characters is not None:
            ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
            self.values.update(memoryview(characters)[ends[0] : ends[-1]])

    def state(self) -> list[Any]:
        hashes = [h.hexdigest() for h in (self.values, self.lengths, self.nulls)]
        return [self.count, *hashes, self.child.state() if self.child else None]


def _describe(kind: pa.DataType) -> str:
    """A type by what it can hold: large or dictionary-encoded variants read the same.

    Spelled out here rather than with `str`, whose wording belongs to pyarrow.
    """
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"tensor{list(kind.shape)}<{_describe(kind.value_type)}>"
    stored = _stored(kind)
    if pa.types.is_fixed_size_list(stored):
        return f"list[{stored.list_size}]<{_describe(stored.value_type)}>"
    if _is_list(stored):
        return f"list<{_describe(stored.value_type)}>"
    if _is_text(stored):
        return "string"
    if pa.types.is_boolean(stored) or pa.types.is_integer(stored) or pa.types.is_floating(stored):
        return str(np.dtype(stored.to_pandas_dtype()))
    raise TypeError(f"there is no logical digest for the Arrow type {kind}")


def _stored(kind: pa.DataType) -> pa.DataType:
    """The type below dictionary encoding and extensions."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _stored_array(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        return array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _null_positions(array: pa.Array) -> Any:
    if array.null_count == 0:
        return np.empty(0, np.int64)
    return np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))


def _lengths(lengths: pa.Array) -> Any:
    return lengths.fill_null(0).to_numpy(zero_copy_only=False).astype("<i8")


def _fixed_width_bytes(array: pa.Array, nulls: Any) -> Any:
    """The value bytes of a numeric array, zeroed under nulls; a view where there are none."""
    if len(array) == 0:
        return b""
    width = array.type.bit_width // 8
    start, end = array.offset * width, (array.offset + len(array)) * width
    values = memoryview(array.buffers()[1])[start:end]
    if len(nulls) == 0:
        return values
    copied = np.frombuffer(values, np.uint8).reshape(-1, width).copy()
    copied[nulls] = 0
    return copied
