"""Batches as Arrow: the schema of a feature's output, and conversion to it and back.

How a column is laid out is decided once, from a probe batch, and kept in its field's metadata::

    dtype    NumPy dtype of the values         shape    JSON, of one record (not for ragged)
    layout   value      one plain value a record
             nested     fixed_size_list in fixed_size_list ..., one level an axis
             extension  arrow.fixed_shape_tensor
             ragged     list of the values in C order; NAME_shape holds each record's shape
    complex  where complex64 was split into float32: the last axis is (real, imaginary)

Only text can be null. A column where an axis has length zero is ragged, whatever was asked for:
neither Arrow nor Parquet can hold a fixed-size list of size 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from signal_batch.batches import Array, Batch, Values, ordinal_range
from signal_batch.errors import FeatureError, SpecError

# --- schema ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one column is written; `shape` is that of a record, None for ragged."""

    dtype: np.dtype[Any]
    kind: Literal["value", "nested", "extension", "ragged"]
    shape: tuple[int, ...] | None
    ndim: int

    @classmethod
    def of_field(cls, field: pa.Field) -> _Layout:
        told = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
        try:
            shape = tuple(json.loads(told["shape"])) if "shape" in told else None
            ndim = int(told["ndim"]) if shape is None else len(shape)
            return cls(np.dtype(told["dtype"]), told["layout"], shape, ndim)
        except KeyError:
            raise ValueError(
                f"column {field.name!r} lacks the metadata that tells its dtype and shape; "
                "it was not written by signal-batch, or was rewritten without its Arrow schema"
            ) from None

    def field(self, name: str) -> pa.Field:
        metadata = {"dtype": str(self.dtype), "layout": self.kind}
        if self.shape is None:
            metadata["ndim"] = str(self.ndim)
        else:
            metadata["shape"] = json.dumps(self.shape)
        if self.dtype.kind == "c":
            metadata["complex"] = "float32 (real, imaginary) in the last axis"
        nullable = self.dtype == object and name != "id"
        return pa.field(name, self.arrow_type(), nullable=nullable, metadata=metadata)

    def arrow_type(self) -> pa.DataType:
        if self.dtype == object:
            return pa.string()
        value = pa.float32() if self.dtype.kind == "c" else pa.from_numpy_dtype(self.dtype)
        pair = (2,) if self.dtype.kind == "c" else ()
        if self.shape is None:
            return _list_of(_nested(value, pair))
        if self.kind == "extension":
            return pa.fixed_shape_tensor(value, (*self.shape, *pair))
        return _nested(value, (*self.shape, *pair))

    def __str__(self) -> str:
        dtype = "text" if self.dtype == object else str(self.dtype)
        if self.shape is None:
            return f"{dtype} lists of {self.ndim} axes"
        return f"{dtype} of shape {self.shape} a record" if self.shape else f"one {dtype} a record"


def _list_of(value: pa.DataType, size: int = -1) -> pa.DataType:
    # Never null: readers then need no definition levels for the values.
    return pa.list_(pa.field("element", value, nullable=False), size)


def _nested(value: pa.DataType, shape: tuple[int, ...]) -> pa.DataType:
    for size in reversed(shape):
        value = _list_of(value, size)
    return value


def arrow_schema(
    batch: Mapping[str, Values],
    *,
    tensors: Literal["nested", "extension"] = "nested",
    ragged: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> pa.Schema:
    """The schema that holds for every batch, from a computed probe batch.

    Columns given as lists, or named in `ragged`, become lists with a `NAME_shape` column beside
    them; other arrays keep the probe's shape. `metadata` goes into every file's key-value
    metadata. Raises `SpecError` for a wrong name in `ragged`, `FeatureError` for a column that
    cannot be written.
    """
    unknown = [name for name in ragged if name not in batch or _ndim(batch[name]) == 0]
    if unknown:
        known = [name for name, value in batch.items() if _ndim(value)]
        raise SpecError(
            f"--ragged {', '.join(unknown)}: no such array in the output; "
            f"arrays are {', '.join(known) or 'absent'}"
        )
    fields: list[pa.Field] = []
    for name in ("ordinal", "id", *(n for n in batch if n not in ("ordinal", "id"))):
        layout = _layout(name, batch[name], tensors, name in ragged)
        fields.append(layout.field(name))
        if layout.kind == "ragged":
            fields.append(_shape_field(name, layout.ndim))
    names = [field.name for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FeatureError(f"column {twice[0]!r} would be there twice; rename the feature's")
    return pa.schema(fields, metadata=dict(metadata or {}))


def _layout(name: str, value: Values, tensors: str, ragged: bool) -> _Layout:
    if isinstance(value, list):
        if not value:
            raise FeatureError(f"column {name!r}: a probe of no records does not tell its shape")
        first = value[0]
        return _Layout(first.dtype, "ragged", None, first.ndim)
    dtype = np.dtype(object) if value.dtype.kind in "OU" else value.dtype
    shape = value.shape[1:]
    if not shape:
        return _Layout(dtype, "value", (), 0)
    if ragged or 0 in shape:
        return _Layout(dtype, "ragged", None, len(shape))
    return _Layout(dtype, "extension" if tensors == "extension" else "nested", shape, len(shape))


def _shape_field(name: str, ndim: int) -> pa.Field:
    layout = _Layout(np.dtype(np.int32), "nested", (ndim,), 1)
    field = layout.field(f"{name}_shape")
    return field.with_metadata({**field.metadata, "shape_of": name})


def _shape_of(field: pa.Field) -> str | None:
    """The ragged column whose shapes this field holds."""
    owner = (field.metadata or {}).get(b"shape_of")
    return None if owner is None else owner.decode()


def _ndim(value: Values) -> int:
    """Axes of one record's value."""
    if isinstance(value, list):
        return value[0].ndim if value else 1
    return value.ndim - 1


# --- NumPy to Arrow ----------------------------------------------------------------------------


def to_record_batch(batch: Mapping[str, Values], schema: pa.Schema) -> pa.RecordBatch:
    """A computed batch as Arrow; numbers of fixed shape share the arrays' memory.

    Raises `FeatureError` listing every column whose name, dtype or shape is not the schema's:
    nothing is cast, padded or left out.
    """
    layouts = {f.name: _Layout.of_field(f) for f in schema if _shape_of(f) is None}
    rows = len(batch["ordinal"])
    differences = [
        *(f"column {name!r} is missing" for name in layouts if name not in batch),
        *(f"column {name!r} is not in the schema" for name in batch if name not in layouts),
    ]
    for name, layout in layouts.items():
        if name in batch:
            differences += _differences(name, batch[name], layout, rows)
    if differences:
        raise FeatureError(f"{ordinal_range(batch)}: {'; '.join(differences)}")
    arrays = []
    for field in schema:
        owner = _shape_of(field)
        if owner is not None:
            arrays.append(_fixed(_shapes(batch[owner], field.type.list_size), field.type))
        elif layouts[field.name].kind == "ragged":
            arrays.append(_ragged(batch[field.name], field))
        elif layouts[field.name].dtype == object:
            arrays.append(_text(batch, field))
        else:
            arrays.append(_fixed(np.asarray(batch[field.name]), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _differences(name: str, value: Values, layout: _Layout, rows: int) -> Iterator[str]:
    """What keeps a column from being written as the schema says."""
    subject = f"column {name!r}"
    if len(value) != rows:
        yield f"{subject} has {len(value)} entries for {rows} records"
    elif isinstance(value, list) and layout.kind != "ragged":
        shapes = sorted({item.shape for item in value})
        found = ", ".join(map(str, shapes[:3])) + (", ..." if len(shapes) > 3 else "")
        yield f"{subject}: the schema says {layout}, here are lists of {found}; {_remedy(name)}"
    elif isinstance(value, list):
        kinds = {_Layout(item.dtype, "ragged", None, item.ndim) for item in value}
        if found := " and ".join(sorted(str(kind) for kind in kinds if kind != layout)):
            yield f"{subject}: the schema says {layout}, here are {found}"
    else:
        came = _layout(name, value, layout.kind, layout.kind == "ragged")
        if came != layout:
            remedy = f"; {_remedy(name)}" if came.shape != layout.shape and came.ndim else ""
            yield f"{subject}: the schema says {layout}, here is {came}{remedy}"


def _remedy(name: str) -> str:
    return f"if its shape differs between records, export it with --ragged {name}"


def _fixed(value: Array, kind: pa.DataType) -> pa.Array:
    return _wrap(pa.array(_flat(value)), kind)


def _flat(value: Array) -> Array:
    """All values in C order, complex64 as pairs of float32; a view where memory allows."""
    flat = np.require(value, requirements=["C", "ALIGNED"]).reshape(-1)
    return flat.view(np.float32) if flat.dtype.kind == "c" else flat


def _wrap(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Put flat values into the levels of a fixed-size type."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, _wrap(values, kind.storage_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_wrap(values, kind.value_type), type=kind)
    return values


def _ragged(value: Values, field: pa.Field) -> pa.Array:
    sizes = [item.size for item in value]
    ends = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    if ends[-1] > np.iinfo(np.int32).max:
        raise FeatureError(
            f"column {field.name!r}: {ends[-1]} values in one batch of lists are too many for "
            "Arrow; use a smaller batch size"
        )
    if isinstance(value, list):
        pieces = [item.reshape(-1) for item in value]
        dtype = _Layout.of_field(field).dtype
        value = np.concatenate(pieces) if pieces else np.empty(0, dtype)
    values = _fixed(value, field.type.value_type)
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values, type=field.type)


def _shapes(value: Values, ndim: int) -> Array:
    """Shapes of the records, (B, ndim) int32."""
    if isinstance(value, list):
        return np.array([item.shape for item in value], np.int32).reshape(len(value), ndim)
    return np.tile(np.array(value.shape[1:], np.int32), (len(value), 1))


def _text(batch: Mapping[str, Values], field: pa.Field) -> pa.Array:
    subject = f"{ordinal_range(batch)}: column {field.name!r}"
    try:
        array = pa.array(batch[field.name], pa.string())
    except (pa.ArrowException, TypeError, UnicodeError) as exc:
        raise FeatureError(f"{subject} is not text throughout: {exc}") from exc
    if array.null_count and not field.nullable:
        raise FeatureError(f"{subject} must not be null")
    return array


# --- Arrow to NumPy ----------------------------------------------------------------------------


def to_numpy(table: pa.RecordBatch | pa.Table) -> Batch:
    """The inverse of `to_record_batch`, for a batch or a whole table read from a part.

    Columns of fixed shape come back as (B, ...) arrays, ragged ones as lists of B arrays, text
    as object arrays with None for null. Arrays may be read-only views of the table's memory.
    """
    values: Batch = {}
    for field in table.schema:
        if _shape_of(field) is not None:
            continue
        layout, array = _Layout.of_field(field), _single(table.column(field.name))
        if layout.kind == "ragged":
            shapes = _single(table.column(f"{field.name}_shape"))
            values[field.name] = _unravel(array, layout, _flat_numpy(shapes))
        elif layout.dtype == object:
            values[field.name] = np.asarray(array.to_numpy(zero_copy_only=False), dtype=object)
        else:
            values[field.name] = _values(array, layout).reshape(len(array), *(layout.shape or ()))
    return values


def _single(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _flat_numpy(array: pa.Array) -> Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    while pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _values(array: pa.Array, layout: _Layout) -> Array:
    flat = _flat_numpy(array)
    return flat.view(layout.dtype) if layout.dtype.kind == "c" else flat


def _unravel(array: pa.Array, layout: _Layout, shapes: Array) -> list[Array]:
    flat = _values(array.flatten(), layout)
    records, start = [], 0
    for shape in shapes.reshape(-1, layout.ndim).tolist():
        end = start + math.prod(shape)
        records.append(flat[start:end].reshape(shape))
        start = end
    return records
