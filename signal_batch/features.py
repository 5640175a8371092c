"""Feature functions: finding one by its reference, and running it on a batch.

A feature function takes a batch and keyword options and returns new columns::

    @feature(equal_lengths=True)
    def energy(batch, *, scale=1.0):
        return {"energy": scale * np.sum(np.abs(batch["samples"]) ** 2, axis=-1)}

It must be pure: the same batch gives the same columns, however records are grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from signal_batch.batches import SUPPORTED_DTYPES, Array, Batch, Values, ordinal_range
from signal_batch.built_ins import BUILT_IN
from signal_batch.columns import RESERVED_COLUMNS
from signal_batch.errors import FeatureError
from signal_batch.frozen import digest
from signal_batch.references import (
    call,
    check_options,
    is_reference,
    load,
    read_only,
    unknown_built_in,
)

# --- finding a feature -------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """A feature function with its options, ready for `compute`.

    `source_sha256` is the function's part of the run key. For a function of one's own it covers
    the whole source file, so helpers beside it count too. For a built-in it covers the name and
    a version number that is raised when results change: hashing this file would give every
    export a new key whenever a docstring is edited.
    """

    name: str
    reference: str
    function: Callable[..., Mapping[str, Any]]
    options: Mapping[str, Any]
    equal_lengths: bool
    source_sha256: str


def resolve_feature(
    reference: str, options: Mapping[str, Any], *, kind: str = "feature"
) -> Feature:
    """The feature behind a built-in name or `package.module:function`; messages name the kind.

    Raises `SpecError` when there is no such function or when it does not take the options.
    """
    if is_reference(reference):
        name = reference.partition(":")[2]
        function, source = load(kind, reference)
    else:
        if reference not in BUILT_IN:
            raise unknown_built_in(kind, reference, list(BUILT_IN))
        name = reference
        function, version = BUILT_IN[reference]
        source = digest(["built-in", name, version])
    check_options(f"{kind} {reference!r}", function, options)
    return Feature(
        name=name,
        reference=reference,
        function=function,
        options=dict(options),
        equal_lengths=bool(getattr(function, "equal_lengths", True)),
        source_sha256=source,
    )


# --- running it on a batch ---------------------------------------------------------------------


def compute(feature: Feature, batch: Mapping[str, Values], array_columns: Sequence[str]) -> Batch:
    """Run a feature on a batch of B records.

    The result holds `ordinal` and `id`, then the batch's scalar columns (all but
    `array_columns`; the function may replace one by returning its name), then what the function
    returned. Array columns are only an input: export them with the feature `raw`.

    Raises `FeatureError`, naming the ordinals, when the function fails or returns something
    that is not one supported array (or list of arrays) per name with B entries.
    """
    ragged = [name for name in array_columns if isinstance(batch[name], list)]
    if feature.equal_lengths and ragged:
        result = _compute_in_groups(feature, batch, ragged)
    else:
        result = _run(feature, batch)
    carried = {name: batch[name] for name in batch if name not in array_columns}
    return {"ordinal": batch["ordinal"], "id": batch["id"], **carried, **result}


def _run(feature: Feature, batch: Mapping[str, Values]) -> Batch:
    """Call the function once and check what comes back."""
    subject = f"feature {feature.name}, {ordinal_range(batch)}"
    result = call(subject, feature.function, (read_only(batch),), feature.options)
    if not isinstance(result, Mapping):
        raise FeatureError(f"{subject}: returned a {type(result).__name__}, not a dict of arrays")
    checked: Batch = {}
    for name, value in result.items():
        try:
            found = checked_column(name, value, len(batch["ordinal"]))
            checked[name] = found if feature.reference in BUILT_IN else own(found)
        except ValueError as exc:
            raise FeatureError(f"{subject}: column {name!r} {exc}") from None
    return checked


def own(value: Values) -> Values:
    """A copy: a function may hand out the same buffer again while this batch waits."""
    return [item.copy() for item in value] if isinstance(value, list) else value.copy()


def checked_column(name: Any, value: Any, rows: int) -> Values:
    """The column as it will be written; ValueError says what is wrong with it."""
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
        raise ValueError("needs a name of letters, digits and underscores")
    if name in RESERVED_COLUMNS:
        raise ValueError("is always the record's own and added by itself; do not return it")
    if isinstance(value, list):
        if not all(isinstance(item, np.ndarray) and item.ndim for item in value):
            raise ValueError("is a list of something else than arrays with an axis")
        if len({(item.dtype, item.ndim) for item in value}) > 1:
            raise ValueError("mixes dtypes or numbers of axes between records")
        if any(item.dtype not in SUPPORTED_DTYPES for item in value):
            raise ValueError(_unsupported(value[0].dtype))
    elif not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"is a {type(value).__name__}, not an array or a list of arrays")
    elif value.ndim == 0:
        raise ValueError("is a single value and lacks the record axis")
    if len(value) != rows:
        raise ValueError(f"has {len(value)} entries for {rows} records")
    column: Values = value
    if isinstance(column, np.ndarray) and column.dtype not in SUPPORTED_DTYPES:
        return _checked_text(column)
    return column


def _checked_text(value: Array) -> Array:
    if value.dtype.kind not in "OU":
        raise ValueError(_unsupported(value.dtype))
    if value.ndim != 1:
        raise ValueError(f"is text of shape {value.shape}; text has one value a record")
    if not all(item is None or isinstance(item, str) for item in value):
        raise ValueError("holds Python objects other than str and None")
    return np.asarray(value, dtype=object)


def _unsupported(dtype: np.dtype[Any]) -> str:
    remedy = "cast it to complex64" if dtype.kind == "c" else "cast it to one that is"
    return (
        f"has dtype {dtype}, which is not one of "
        f"{', '.join(map(str, SUPPORTED_DTYPES))} or str; {remedy}"
    )


def _compute_in_groups(
    feature: Feature, batch: Mapping[str, Values], ragged: Sequence[str]
) -> Batch:
    """Run once for each combination of shapes and put the results back in record order."""
    rows = len(batch["ordinal"])
    if rows == 0:
        raise FeatureError(f"feature {feature.name}: a batch of no records has no shapes")
    groups: dict[Any, list[int]] = {}
    for row in range(rows):
        key = tuple((batch[name][row].shape, batch[name][row].dtype) for name in ragged)
        groups.setdefault(key, []).append(row)
    results = [_run(feature, _take(batch, index)) for index in groups.values()]
    subject = f"feature {feature.name}, {ordinal_range(batch)}"
    names = list(results[0])
    for result in results[1:]:
        if set(result) != set(names):
            odd = sorted(set(result) ^ set(names))
            raise FeatureError(f"{subject}: returned {', '.join(odd)} for some lengths only")
    indices = list(groups.values())
    return {
        name: _scatter(f"{subject}: column {name!r}", indices, [r[name] for r in results], rows)
        for name in names
    }


def _take(batch: Mapping[str, Values], index: list[int]) -> Batch:
    """Some records of a batch that agree in shape, stacked."""
    return {
        name: np.stack([value[row] for row in index]) if isinstance(value, list) else value[index]
        for name, value in batch.items()
    }


def _kind(value: Values) -> tuple[np.dtype[Any], int]:
    """dtype and number of axes of one record's value."""
    if isinstance(value, list):
        return value[0].dtype, value[0].ndim
    return value.dtype, value.ndim - 1


def _scatter(subject: str, indices: list[list[int]], values: list[Values], rows: int) -> Values:
    """One column from the columns of the groups: stacked where all shapes agree."""
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{dtype} with {ndim} axes" for dtype, ndim in kinds))
        raise FeatureError(f"{subject} is {found}, depending on the length of the records")
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if len(arrays) == len(values) and len({array.shape[1:] for array in arrays}) == 1:
        stacked = np.empty((rows, *arrays[0].shape[1:]), arrays[0].dtype)
        for index, array in zip(indices, arrays, strict=True):
            stacked[index] = array
        return stacked
    scattered: list[Any] = [None] * rows
    for index, value in zip(indices, values, strict=True):
        for row, item in zip(index, value, strict=True):
            scattered[row] = item
    return scattered
