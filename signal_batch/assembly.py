"""Putting the columns of a batch together from decoded records and annotation rows.

A tensor is copied once, from the payload into the batch; single values become arrays of their
declared dtype, or of the one that they share. Whatever does not fit is an error that names the
record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from signal_batch.batches import Array, Ints
from signal_batch.columns import Column
from signal_batch.decoding import Decoded, FieldSpec
from signal_batch.errors import MissingValueError, SpecError

_NAMES_SHOWN = 20
_NOUNS = {
    "field": "field",
    "metadata": "metadata key",
    "annotation": "value",
    "annotation-field": "field",
}


class Label(NamedTuple):
    status: str
    values: dict[str, Any]
    fields: Mapping[str, FieldSpec]
    arrays: dict[str, Array]


class Rows:
    """What a batch keeps of its records while columns are put together."""

    def __init__(self, ordinals: Ints, where: Callable[[int], str]) -> None:
        self._where = where
        self.ordinals = ordinals
        self.ids: list[str] = [""] * len(ordinals)
        self.scenes: list[str | None] = [None] * len(ordinals)
        self.metadata: list[dict[str, Any]] = [{}] * len(ordinals)
        self.labels: dict[str, list[Label]] = {}

    def part(self, positions: Ints) -> Rows:
        """The rows at some positions, without annotation rows."""
        part = Rows(self.ordinals[positions], self._where)
        for name in ("ids", "scenes", "metadata"):
            own = getattr(self, name)
            setattr(part, name, [own[position] for position in positions.tolist()])
        return part

    def keep(self, position: int, record: Decoded) -> None:
        self.ids[position] = record.id
        self.scenes[position] = record.scene_id
        self.metadata[position] = record.metadata

    def name(self, position: int) -> str:
        """How an error names a record."""
        ordinal = int(self.ordinals[position])
        return f"record {ordinal} (id {self.ids[position]!r}) in {self._where(ordinal)}"


class TensorColumn:
    """One array for the batch while shapes agree, from then on a list of arrays."""

    def __init__(self, column: Column, rows: Rows) -> None:
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


def value_column(column: Column, rows: Rows) -> Array:
    source = column.selector.source
    if source == "ordinal":
        return rows.ordinals.copy()
    if source == "id":
        return objects(rows.ids)
    if source == "scene":
        return objects(rows.scenes)
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


def _typed(column: Column, rows: Rows, values: list[Any]) -> Array:
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
        return objects(values)
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


def _raise_untyped(column: Column, rows: Rows, values: list[Any]) -> NoReturn:
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
    rows: Rows,
    position: int,
    present: Mapping[str, Any],
    status: str | None,
) -> NoReturn:
    """Say which record lacks what, what it has instead and what can be done about it."""
    selector = column.selector
    what = _NOUNS[selector.source]
    shown = _paths(present) if not selector.is_array else sorted(present)
    names = ", ".join(shown[:_NAMES_SHOWN]) + (", ..." if len(shown) > _NAMES_SHOWN else "")
    where, remedy = "", "filter such records out"
    if status is not None:
        where = f" in its row of annotation set {selector.set_name!r} (status {status})"
        remedy += f", for example with --where 'annotation:{selector.set_name} status success'"
    fix = "Correct the name" if selector.is_array else f"Give the column a default ({selector}?0)"
    raise MissingValueError(
        f"{rows.name(position)} has no {what} {selector.path!r}{where}; it has: {names or 'none'}.",
        f"{fix} or {remedy}.",
    )


def _paths(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of nested objects, as selectors name them."""
    found: list[str] = []
    for name, value in sorted(values.items()):
        nested = isinstance(value, Mapping) and value
        found += _paths(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
    return found


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


def objects(values: Sequence[Any]) -> Array:
    found = np.empty(len(values), object)
    found[:] = values
    return found
