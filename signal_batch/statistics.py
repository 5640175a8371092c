"""Mean and standard deviation of the training records, and normalizing by them.

Measured over the training split only and kept with the model, so that nothing of the records a
model is judged by goes into it. One pair of numbers for each index of the first axis of a
record: for each channel of (channels, time), for each element of a 1-D vector of features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from signal_batch.batches import Array, Batch, Values
from signal_batch.errors import DamagedOutputError, FeatureError, SpecError
from signal_batch.frozen import digest

#: Input handled at a time: small enough for float64 temporaries to stay in cache.
_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class Moments:
    """Of one column: `mean` and `std` of each index of the first axis, from `count` values each.

    std = sqrt(E|x - mean|^2), that of the population; the mean of complex values is complex.
    """

    count: int
    mean: tuple[complex, ...]
    std: tuple[float, ...]

    @property
    def is_complex(self) -> bool:
        return any(isinstance(value, complex) for value in self.mean)

    def to_json(self) -> dict[str, Any]:
        mean = [[m.real, m.imag] if isinstance(m, complex) else m for m in self.mean]
        return {"count": self.count, "mean": mean, "std": list(self.std)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        mean = tuple(complex(*m) if isinstance(m, list) else float(m) for m in value["mean"])
        moments = cls(int(value["count"]), mean, tuple(map(float, value["std"])))
        if len(moments.mean) != len(moments.std):
            raise ValueError("mean and std differ in length")
        return moments


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of every column that `normalize` works on."""

    columns: Mapping[str, Moments]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, complex numbers as [re, im]; `from_json` gives back the same numbers."""
        return {"columns": {name: moments.to_json() for name, moments in self.columns.items()}}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises `DamagedOutputError` for anything that `to_json` did not make."""
        try:
            columns = value["columns"].items()
            return cls({str(name): Moments.from_json(moments) for name, moments in columns})
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise DamagedOutputError(f"these are no statistics of training records: {exc}") from exc

    @property
    def digest(self) -> str:
        return digest(self.to_json())

    def normalized(self, name: str, values: Values, ordinals: Sequence[Any] | Array) -> Values:
        """(x - mean) / std of a column's records (B, ...), in their dtype; a std of 0 counts as 1.

        Calculated in float64, so that a mean far larger than the std does no harm.

        Raises `SpecError` where records have another first axis than those measured, or where
        there are no statistics of the column.
        """
        if name not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise SpecError(f"normalize: there are no statistics of {name!r}; there are: {known}")
        moments = self.columns[name]
        if isinstance(values, np.ndarray):
            _check_fit(name, moments, values, ordinals[0] if len(ordinals) else "none")
            return _normalized(moments, values, 1)
        for item, ordinal in zip(values, ordinals, strict=True):
            _check_fit(name, moments, item[None], ordinal)
        return [_normalized(moments, item, 0) for item in values]


def is_measurable(values: Values) -> bool:
    """Whether a column holds floats with a first axis in each record."""
    if isinstance(values, list):
        return bool(values) and all(v.ndim > 0 and v.dtype.kind in "fc" for v in values)
    return values.ndim > 1 and values.shape[1] > 0 and values.dtype.kind in "fc"


def measure(batches: Iterable[Batch], columns: Sequence[str]) -> Statistics:
    """The moments of columns over all records, and over all axes of a record but its first.

    Columns of another dtype than float or complex, and those with a single value a record, are
    left out. Sums are kept in float64 as (count, mean, sum of squared distances from the mean)
    and put together block by block, which does not cancel as sums of squares do: T. F. Chan,
    G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", Technical Report STAN-CS-79-773, Stanford University, 1979. The same
    batches in the same order give the same bits; other batches of the same records differ by
    rounding. A variance within rounding of zero beside the mean counts as none.

    Raises:
        SpecError: no batches, or records that differ along their first axis.
        FeatureError: NaN or infinity, with the column and the first ordinal that has it.
    """
    sums: dict[str, _Sums] = {}
    empty = True
    for batch in batches:
        empty = empty and not len(batch["ordinal"])
        for name in columns:
            for values, ordinals in _blocks(batch, name):
                block = _sums(name, values, ordinals)
                sums[name] = block if name not in sums else _joined(name, sums[name], block)
    if empty:
        raise SpecError("there are no training records to measure statistics of")
    return Statistics({name: _moments(name, sums[name]) for name in columns if name in sums})


@dataclass(frozen=True, slots=True)
class _Sums:
    count: int
    mean: Array  # (first axis,), float64 or complex128
    squares: Array  # (first axis,), float64: the sum of |x - mean|^2
    ordinal: int  # the first record that went in


def _blocks(batch: Batch, name: str) -> Iterator[tuple[Array, Array]]:
    """Stacked records (R, first axis, ...) that have values, with their ordinals (R,)."""
    values, ordinals = batch[name], np.asarray(batch["ordinal"])
    if not is_measurable(values):
        return
    if isinstance(values, list):
        pairs = ((item[None], ordinals[row : row + 1]) for row, item in enumerate(values))
    else:
        step = max(1, _BLOCK_BYTES // max(1, values[:1].nbytes))
        starts = range(0, len(values), step)
        pairs = ((values[at : at + step], ordinals[at : at + step]) for at in starts)
    yield from (pair for pair in pairs if pair[0].size)


def _sums(name: str, values: Array, ordinals: Array) -> _Sums:
    """The sums of one block (R, first axis, ...): the mean first, then distances from it."""
    axes = (0, *range(2, values.ndim))
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        mean = values.mean(axis=axes, dtype=wide)
        centred = values - _along_first(mean, values.ndim, 1)
        squares = np.square(centred.real).sum(axis=axes)
        if values.dtype.kind == "c":
            squares = squares + np.square(centred.imag).sum(axis=axes)
    if not (np.isfinite(mean).all() and np.isfinite(squares).all()):
        _check_finite(name, values, ordinals)
    return _Sums(values.size // values.shape[1], mean, squares, int(ordinals[0]))


def _joined(name: str, a: _Sums, b: _Sums) -> _Sums:
    """The sums over both sets of records, by the updating formula of Chan, Golub and LeVeque."""
    if len(a.mean) != len(b.mean):
        raise SpecError(
            f"normalize: column {name!r} has {len(b.mean)} along its first axis at ordinal "
            f"{b.ordinal} and {len(a.mean)} at ordinal {a.ordinal}; there are statistics for each "
            "channel or feature, so give a waveform of one channel the shape (1, time)"
        )
    count = a.count + b.count
    apart = b.mean - a.mean
    mean = a.mean + apart * (b.count / count)
    with np.errstate(all="ignore"):
        between = np.square(np.abs(apart)) * (a.count / count * b.count)
        return _Sums(count, mean, a.squares + b.squares + between, a.ordinal)


def _moments(name: str, sums: _Sums) -> Moments:
    if not np.isfinite(sums.squares).all():
        raise FeatureError(f"normalize: column {name!r} holds numbers too large to square")
    variance = sums.squares / sums.count
    rounding = np.finfo(np.float64).resolution * np.abs(sums.mean)
    std = np.where(variance <= rounding**2, 0.0, np.sqrt(variance))
    return Moments(sums.count, tuple(sums.mean.tolist()), tuple(std.tolist()))


def _check_finite(name: str, values: Array, ordinals: Array) -> None:
    for value, ordinal in zip(values, ordinals, strict=True):
        if not np.isfinite(value).all():
            raise FeatureError(
                f"normalize: column {name!r} holds NaN or infinity at ordinal {ordinal}; leave "
                "such records out with a filter, or replace the values in a transform before it"
            )


def _check_fit(name: str, moments: Moments, values: Array, ordinal: Any) -> None:
    """Whether records (B, first axis, ...) are of the kind that was measured."""
    found = values.shape[1] if values.ndim > 1 else 0
    if found != len(moments.mean):
        raise SpecError(
            f"normalize: column {name!r} has {found} along its first axis at ordinal {ordinal}, "
            f"but {len(moments.mean)} in the statistics; give a waveform of one channel the shape "
            "(1, time)"
        )
    if values.dtype.kind != ("c" if moments.is_complex else "f"):
        measured = "complex" if moments.is_complex else "real"
        raise SpecError(f"normalize: column {name!r} has dtype {values.dtype}, measured {measured}")


def _normalized(moments: Moments, x: Array, axis: int) -> Array:
    """(x - mean) / std with the statistics along an axis, in float64, in the dtype of x."""
    mean = _along_first(np.array(moments.mean), x.ndim, axis)
    std = _along_first(np.array([s or 1.0 for s in moments.std]), x.ndim, axis)
    out = np.empty_like(x)
    np.subtract(x, mean, out=out, casting="same_kind")
    for part in (out.real, out.imag) if x.dtype.kind == "c" else (out,):
        np.divide(part, std, out=part, casting="same_kind")
    return out


def _along_first(values: Array, ndim: int, axis: int) -> Array:
    """Values (first axis,) in a shape that meets that axis of an array of `ndim` axes."""
    return values.reshape(math.prod(values.shape), *[1] * (ndim - axis - 1))
