"""Feature functions: finding one by its reference, and running it on a batch.

A feature function takes a batch and keyword options and returns new columns::

    @feature(equal_lengths=True)
    def energy(batch, *, scale=1.0):
        return {"energy": scale * np.sum(np.abs(batch["samples"]) ** 2, axis=-1)}

It must be pure: the same batch gives the same columns, however records are grouped.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from signal_batch.batches import SUPPORTED_DTYPES, Array, Batch, Values, ordinal_range
from signal_batch.built_ins import BUILT_IN
from signal_batch.errors import FeatureError, InputError, SpecError
from signal_batch.specs import RESERVED_COLUMNS, digest

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


def resolve_feature(reference: str, options: Mapping[str, Any]) -> Feature:
    """The feature behind a built-in name or `package.module:function`.

    Raises `SpecError` when there is no such function or when it does not take the options.
    """
    module_name, colon, attribute = reference.partition(":")
    if colon:
        module = _import_module(reference, module_name)
        function = _attribute(reference, module, attribute)
        name, source = attribute, _source_sha256(reference, module, function)
    else:
        if reference not in BUILT_IN:
            raise SpecError(_unknown_built_in(reference))
        name = reference
        function, version = BUILT_IN[reference]
        source = digest(["built-in", name, version])
    _check_options(reference, function, options)
    return Feature(
        name=name,
        reference=reference,
        function=function,
        options=dict(options),
        equal_lengths=bool(getattr(function, "equal_lengths", True)),
        source_sha256=source,
    )


def _unknown_built_in(reference: str) -> str:
    close = difflib.get_close_matches(reference, BUILT_IN, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"{reference!r} is not a built-in feature; {hint}The built-ins are {', '.join(BUILT_IN)}; "
        "a function of your own is written package.module:function"
    )


def _import_module(reference: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise SpecError(f"feature {reference!r}: importing {name} failed: {exc}") from exc
        raise SpecError(
            f"feature {reference!r}: there is no module {exc.name!r} here; install the package "
            "or put its folder on PYTHONPATH, on every machine that runs workers"
        ) from exc
    except Exception as exc:
        raise SpecError(
            f"feature {reference!r}: importing {name} failed: {type(exc).__name__}: {exc}"
        ) from exc


def _attribute(reference: str, module: ModuleType, name: str) -> Callable[..., Any]:
    try:
        function = getattr(module, name)
    except AttributeError as exc:
        close = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SpecError(
            f"feature {reference!r}: {module.__name__} has no attribute {name!r}{hint}"
        ) from exc
    if not callable(function):
        raise SpecError(f"feature {reference!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _source_sha256(reference: str, module: ModuleType, function: Callable[..., Any]) -> str:
    """Hash of the files of the named module and of the one that defines the function.

    Both, because a package may only hand the function on. Without source (a compiled module)
    the reference alone stands for it.
    """
    while isinstance(function, partial):
        function = function.func
    defining = inspect.getmodule(inspect.unwrap(function)) or module
    hashes = set()
    for origin in (module, defining):
        file = getattr(origin, "__file__", None)
        if file is not None and file.endswith(".py") and Path(file).is_file():
            hashes.add(sha256(Path(file).read_bytes()).hexdigest())
    return digest(sorted(hashes) or reference)


def _check_options(
    reference: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # compiled functions may have no signature to check against
        return
    subject = f"feature {reference!r}"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise SpecError(f"{subject} must take the batch as its first argument")
    named = [p for p in parameters[1:] if p.kind in (positional[1], p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    unknown = [name for name in options if name not in names]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes = f"it takes {', '.join(names)}" if names else "it takes none"
        raise SpecError(f"{subject} has no option {', '.join(map(repr, unknown))}; {takes}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in options]
    if missing:
        raise SpecError(f"{subject} needs the option {', '.join(map(repr, missing))}")


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
    try:
        result = feature.function(_read_only(batch), **feature.options)
    except (InputError, KeyboardInterrupt):  # written for people already, or a person's wish
        raise
    except BaseException as exc:  # a function that calls sys.exit() must not end the export
        where = traceback.extract_tb(exc.__traceback__)[-1]
        raise FeatureError(
            f"{subject}: {type(exc).__name__}: {exc} (in {where.name}, {where.filename}, line "
            f"{where.lineno}; the batch has {', '.join(batch)})"
        ) from exc
    if not isinstance(result, Mapping):
        raise FeatureError(f"{subject}: returned a {type(result).__name__}, not a dict of arrays")
    checked: Batch = {}
    for name, value in result.items():
        try:
            found = _checked_column(name, value, len(batch["ordinal"]))
            checked[name] = found if feature.reference in BUILT_IN else _own(found)
        except ValueError as exc:
            raise FeatureError(f"{subject}: column {name!r} {exc}") from None
    return checked


def _read_only(batch: Mapping[str, Values]) -> Batch:
    """Views that a function cannot change: ids and labels are written as they were read."""

    def locked(array: Array) -> Array:
        view = array.view()
        view.setflags(write=False)
        return view

    return {
        name: [locked(item) for item in value] if isinstance(value, list) else locked(value)
        for name, value in batch.items()
    }


def _own(value: Values) -> Values:
    """A copy: a function may hand out the same buffer again while this batch waits."""
    return [item.copy() for item in value] if isinstance(value, list) else value.copy()


def _checked_column(name: Any, value: Any, rows: int) -> Values:
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
