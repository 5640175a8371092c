"""The built-in transforms: what may be done to one record on its way to a model.

Each takes a record, a dict of one record's values, and a random generator, and returns a new
record in which one array is replaced; it never changes its input. Time is the last axis, so an
array is (channels, time) or (time,). All calculate in the precision of the array or better and
return its dtype. A function of one's own has the same form::

    @transform(training_only=True)
    def flip_time(record, rng, *, probability=0.5):
        if rng.random() >= probability:
            return record
        return {**record, "samples": record["samples"][..., ::-1]}

What is drawn, and in which order, is part of a result: the version in `BUILT_IN` is raised when
that changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from signal_batch.batches import Array
from signal_batch.errors import SpecError

Record: TypeAlias = dict[str, Any]
Bounds: TypeAlias = float | Sequence[float]
F = TypeVar("F", bound=Callable[..., Any])

#: Decibels beyond which a value is a mistake, and float32 would overflow soon after.
LARGEST_DB = 300.0
_FLOATS = ("float16", "float32", "float64", "complex64")
_TURN = 2 * math.pi
_CARRIER_BLOCK = 64


def transform(*, training_only: bool = False) -> Callable[[F], F]:
    """Mark a transform; `training_only` ones are skipped where a model is evaluated or used.

    An unmarked function is always applied.
    """

    def mark(function: F) -> F:
        function.training_only = training_only  # type: ignore[attr-defined]
        return function

    return mark


# --- the transforms ----------------------------------------------------------------------------


@transform(training_only=True)
def random_crop(
    record: Record, rng: np.random.Generator, *, length: int, column: str = "samples"
) -> Record:
    """`length` samples from a place drawn uniformly: x[..., s : s + length].

    s is one of 0 .. T - length, each as likely, the same for all channels. A record of T <
    `length` samples is kept from its start and filled up with zeros at its end. Any dtype.
    """
    _check_crop(length=length)
    x = _array(record, column)
    spare = x.shape[-1] - length
    if spare < 0:
        padding = np.zeros((*x.shape[:-1], -spare), x.dtype)
        return {**record, column: np.concatenate([x, padding], axis=-1)}
    start = int(rng.integers(spare + 1))
    return {**record, column: x[..., start : start + length]}


@transform(training_only=True)
def add_noise(
    record: Record, rng: np.random.Generator, *, snr_db: Bounds, column: str = "samples"
) -> Record:
    """White Gaussian noise w at a given signal-to-noise ratio: x + w.

    `snr_db` is a number or [low, high], from which one value a record is drawn uniformly in dB::

        P = mean |x|^2              over all channels and samples of the record
        E|w|^2 = P / 10^(snr_db / 10)

    so 10 log10(P / E|w|^2) = snr_db exactly. It is the variance of the noise that is set: the
    mean power of the N values drawn differs from it by about sqrt(2 / N) of itself (sqrt(1 / N)
    where complex). x counts as signal as it is, with whatever noise is already in it. Noise is
    independent between samples and channels; complex noise is circular, half of its power in
    each part. A silent record stays silent.
    """
    low, high = _bounds("add_noise", "snr_db", snr_db)
    x = _floats("add_noise", record, column)
    snr = rng.uniform(low, high)
    variance = _mean_power(x) * 10 ** (-snr / 10)
    if variance == 0:
        return record
    return {**record, column: x + _white(rng, x, variance)}


@transform(training_only=True)
def frequency_offset(
    record: Record,
    rng: np.random.Generator,
    *,
    max_cycles: float = 0.0,
    max_hz: float | None = None,
    sample_rate_hz: float | str | None = None,
    phase: bool = True,
    column: str = "samples",
) -> Record:
    """A carrier offset, as of a receiver tuned beside the signal: x[n] exp(2j pi f n + 1j phi).

    f is drawn uniformly from [-max_cycles, max_cycles] in cycles per sample, or from
    [-max_hz, max_hz] / `sample_rate_hz`, which is a number or the name of a value column of the
    record; phi uniformly from [0, 2 pi), or is 0 without `phase`. n counts from 0 at the
    record's first sample, and all channels turn together. Complex input only.
    """
    _check_offset(max_cycles=max_cycles, max_hz=max_hz, sample_rate_hz=sample_rate_hz, phase=phase)
    x = _floats("frequency_offset", record, column)
    if x.dtype.kind != "c":
        raise SpecError(
            f"transform frequency_offset: column {column!r} has dtype {x.dtype}; a carrier can "
            "be shifted in complex samples only"
        )
    limit = max_cycles if max_hz is None else max_hz / _rate(record, sample_rate_hz)
    if limit > 0.5:
        raise ValueError(f"an offset of up to {limit:g} cycles per sample is beyond half a cycle")
    cycles = rng.uniform(-limit, limit)
    angle = rng.uniform(0, _TURN) if phase else 0.0
    return {**record, column: x * _carrier(cycles, angle, x.shape[-1]).astype(x.dtype)}


@transform(training_only=True)
def channel_dropout(
    record: Record, rng: np.random.Generator, *, probability: float, column: str = "samples"
) -> Record:
    """Silence channels, each with the same probability p, independently; one is always kept.

    Where all C channels would go, one of them, drawn uniformly, stays: a channel is silent with
    probability p - p^C / C. A record of one channel, (time,) or (1, time), stays as it is.
    """
    _check_dropout(probability=probability)
    x = _floats("channel_dropout", record, column)
    channels = x.shape[0] if x.ndim > 1 else 1
    if channels < 2:
        return record
    kept = rng.random(channels) >= probability
    if not kept.any():
        kept[rng.integers(channels)] = True
    mask = kept.reshape(-1, *[1] * (x.ndim - 1))
    return {**record, column: np.where(mask, x, x.dtype.type(0))}


@transform(training_only=True)
def scale(
    record: Record, rng: np.random.Generator, *, gain_db: Bounds, column: str = "samples"
) -> Record:
    """One gain for the whole record: x 10^(g / 20).

    `gain_db` is a number or [low, high], from which g is drawn uniformly in dB.
    """
    low, high = _bounds("scale", "gain_db", gain_db)
    x = _floats("scale", record, column)
    return {**record, column: _times(x, 10 ** (rng.uniform(low, high) / 20))}


@transform()
def unit_power(record: Record, rng: np.random.Generator, *, column: str = "samples") -> Record:
    """Bring a record to a mean power of 1: x / sqrt(mean |x|^2) over channels and samples.

    Ratios between channels stay. Nothing is random, and it is applied in evaluation too. A
    silent record stays silent.
    """
    x = _floats("unit_power", record, column)
    power = _mean_power(x)
    return {**record, column: _times(x, 1 / math.sqrt(power))} if power else record


# --- checks of their options, before any record is read ------------------------------------------


def _check_crop(*, length: Any) -> None:
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise SpecError(
            f"transform random_crop: length must be a whole number of at least 1, not {length!r}"
        )


def _check_noise(*, snr_db: Any) -> None:
    _bounds("add_noise", "snr_db", snr_db)


def _check_offset(
    *,
    max_cycles: Any = 0.0,
    max_hz: Any = None,
    sample_rate_hz: Any = None,
    phase: Any = True,
) -> None:
    subject = "transform frequency_offset:"
    if not _is_number(max_cycles) or not 0 <= max_cycles <= 0.5:
        raise SpecError(
            f"{subject} max_cycles must be from 0 to 0.5 cycles per sample, not {max_cycles!r}"
        )
    if (max_hz is None) != (sample_rate_hz is None):
        raise SpecError(f"{subject} max_hz and sample_rate_hz go together")
    if not isinstance(phase, bool):
        raise SpecError(f"{subject} phase must be true or false, not {phase!r}")
    if max_hz is None:
        return
    if max_cycles:
        raise SpecError(f"{subject} give max_cycles or max_hz, not both")
    if not _is_number(max_hz) or max_hz < 0:
        raise SpecError(f"{subject} max_hz must be a number of at least 0, not {max_hz!r}")
    if isinstance(sample_rate_hz, str):
        return
    if not _is_number(sample_rate_hz) or sample_rate_hz <= 0:
        raise SpecError(
            f"{subject} sample_rate_hz must be a positive number or the name of a value column, "
            f"not {sample_rate_hz!r}"
        )
    if max_hz > sample_rate_hz / 2:
        raise SpecError(f"{subject} max_hz {max_hz:g} is beyond half the sample rate")


def _check_dropout(*, probability: Any) -> None:
    if not _is_number(probability) or not 0 <= probability < 1:
        raise SpecError(
            "transform channel_dropout: probability must be at least 0 and less than 1, not "
            f"{probability!r}"
        )


def _check_scale(*, gain_db: Any) -> None:
    _bounds("scale", "gain_db", gain_db)


def _check_nothing() -> None:
    """For a transform without options of its own."""


def _bounds(name: str, option: str, value: Any) -> tuple[float, float]:
    """(low, high) in dB from a number or a pair."""
    pair = [value, value] if _is_number(value) else value
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise SpecError(
            f"transform {name}: {option} must be a number or [low, high], not {value!r}"
        )
    low, high = map(float, pair)
    if low > high:
        raise SpecError(f"transform {name}: {option} {value!r} must go from low to high")
    if max(abs(low), abs(high)) > LARGEST_DB:
        raise SpecError(f"transform {name}: {option} {value!r} is beyond {LARGEST_DB:g} dB")
    return low, high


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# --- arithmetic ----------------------------------------------------------------------------------


def _array(record: Mapping[str, Any], column: str) -> Array:
    value = record.get(column)
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    arrays = [name for name, v in record.items() if isinstance(v, np.ndarray) and v.ndim]
    known = ", ".join(arrays) or "none"
    raise SpecError(f"column {column!r} is not an array with a time axis; those are: {known}")


def _floats(name: str, record: Mapping[str, Any], column: str) -> Array:
    x = _array(record, column)
    if x.dtype not in _FLOATS:
        raise SpecError(
            f"transform {name}: column {column!r} has dtype {x.dtype}, not one of "
            f"{', '.join(_FLOATS)}; read it as one, for example {column}=field:NAME:float32"
        )
    return x


def _rate(record: Mapping[str, Any], sample_rate_hz: Any) -> float:
    """Samples per second: the number, or what the record has in the column of that name."""
    if not isinstance(sample_rate_hz, str):
        return float(sample_rate_hz)
    if sample_rate_hz not in record:
        raise SpecError(
            f"transform frequency_offset: sample_rate_hz names {sample_rate_hz!r}, which is no "
            f"column; there are {', '.join(record)}"
        )
    rate = record[sample_rate_hz]
    number = isinstance(rate, int | float | np.integer | np.floating)
    if not number or not 0 < rate < math.inf:
        raise ValueError(f"column {sample_rate_hz!r} holds {rate!r}, not a sample rate in Hz")
    return float(rate)


def _mean_power(x: Array) -> float:
    """mean |x|^2 over all axes, summed in float64; 0 for no samples."""
    if x.size == 0:
        return 0.0
    parts = (x.real, x.imag) if x.dtype.kind == "c" else (x,)
    return sum(float(np.square(part, dtype=np.float64).sum()) for part in parts) / x.size


def _times(x: Array, factor: float) -> Array:
    """x * factor, rounded once to the dtype of x."""
    out = np.empty_like(x)
    return np.multiply(x, np.float64(factor), out=out, casting="same_kind")


def _white(rng: np.random.Generator, x: Array, variance: float) -> Array:
    """White Gaussian noise with the shape and dtype of x and E|w|^2 = variance.

    Drawn in the precision of the samples: float32 takes half the time of float64.
    """
    if x.dtype.kind == "c":
        pairs = rng.standard_normal((*x.shape, 2), dtype=np.float32)
        pairs *= np.float32(math.sqrt(variance / 2))
        return pairs.view(x.dtype)[..., 0]
    drawn = rng.standard_normal(x.shape, dtype=np.float64 if x.dtype == "float64" else np.float32)
    return _times(drawn, math.sqrt(variance)).astype(x.dtype, copy=False)


def _carrier(cycles: float, angle: float, length: int) -> Array:
    """exp(2j pi cycles n + 1j angle) for n = 0 .. length - 1, complex128.

    Each is the product of two exponentials, n = 64 a + b: a fifth of the time of one a sample.
    """
    fine = np.exp(1j * (_TURN * cycles * np.arange(_CARRIER_BLOCK) + angle))
    starts = np.arange(0, max(1, length), _CARRIER_BLOCK)
    coarse = np.exp(1j * (_TURN * cycles * starts))
    carrier: Array = np.outer(coarse, fine).ravel()[:length]
    return carrier


# --- the names that a spec may use ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in transform.

    `check` takes its options but `column`. `version` is raised when its results change, and
    `random` is False for one that needs no generator made.
    """

    function: Callable[..., Record]
    check: Callable[..., None]
    version: int = 1
    random: bool = True


BUILT_IN: dict[str, BuiltIn] = {
    "random_crop": BuiltIn(random_crop, _check_crop),
    "add_noise": BuiltIn(add_noise, _check_noise),
    "frequency_offset": BuiltIn(frequency_offset, _check_offset),
    "channel_dropout": BuiltIn(channel_dropout, _check_dropout),
    "scale": BuiltIn(scale, _check_scale),
    "unit_power": BuiltIn(unit_power, _check_nothing, random=False),
}
