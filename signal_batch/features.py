"""Feature functions: finding one, running it on a batch, and the four that are built in.

A batch is `dict[str, Column]`: every value has a leading record axis, as an ndarray of shape
(B, ...) or, where records differ in shape, as a list of B ndarrays. Text columns are object
arrays of `str` or `None`. `ordinal` (int64) and `id` (text) are always there.

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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import fft, signal

from signal_batch.errors import FeatureError, InputError, SpecError
from signal_batch.specs import RESERVED_COLUMNS, digest

Array: TypeAlias = NDArray[Any]
Column: TypeAlias = Array | list[Array]
Batch: TypeAlias = dict[str, Column]
F = TypeVar("F", bound=Callable[..., Any])

#: dtypes that a feature function may return, besides text.
SUPPORTED_DTYPES = tuple(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64"),
    )
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


def feature(*, equal_lengths: bool = True) -> Callable[[F], F]:
    """Mark a feature function.

    With `equal_lengths` (also what an unmarked function gets) it only ever sees stacked arrays:
    a batch of differing shapes is handed over in groups of one shape. Without it a column
    arrives as a list of arrays wherever shapes differ within the batch, else stacked.
    """

    def mark(function: F) -> F:
        function.equal_lengths = equal_lengths  # type: ignore[attr-defined]
        return function

    return mark


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
        if reference not in _BUILT_IN:
            raise SpecError(_unknown_built_in(reference))
        name = reference
        function, version = _BUILT_IN[reference]
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
    close = difflib.get_close_matches(reference, _BUILT_IN, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"{reference!r} is not a built-in feature; {hint}The built-ins are {', '.join(_BUILT_IN)}; "
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


def compute(feature: Feature, batch: Mapping[str, Column], array_columns: Sequence[str]) -> Batch:
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


def ordinal_range(batch: Mapping[str, Column]) -> str:
    """The records of a batch as people write them: `ordinals 0-255`, `ordinal 7`."""
    ordinals = batch["ordinal"]
    if len(ordinals) == 0:
        return "no records"
    if len(ordinals) == 1:
        return f"ordinal {ordinals[0]}"
    return f"ordinals {ordinals[0]}-{ordinals[-1]}"


def _run(feature: Feature, batch: Mapping[str, Column]) -> Batch:
    """Call the function once and check what comes back."""
    subject = f"feature {feature.name}, {ordinal_range(batch)}"
    try:
        result = feature.function(dict(batch), **feature.options)
    except InputError:  # options that do not fit the columns: already written for people
        raise
    except Exception as exc:
        raise FeatureError(f"{subject}: {type(exc).__name__}: {exc}") from exc
    if not isinstance(result, Mapping):
        raise FeatureError(f"{subject}: returned a {type(result).__name__}, not a dict of arrays")
    checked: Batch = {}
    for name, value in result.items():
        try:
            checked[name] = _checked_column(name, value, len(batch["ordinal"]))
        except ValueError as exc:
            raise FeatureError(f"{subject}: column {name!r} {exc}") from None
    return checked


def _checked_column(name: Any, value: Any, rows: int) -> Column:
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
    column: Column = value
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
    feature: Feature, batch: Mapping[str, Column], ragged: Sequence[str]
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


def _take(batch: Mapping[str, Column], index: list[int]) -> Batch:
    """Some records of a batch that agree in shape, stacked."""
    return {
        name: np.stack([value[row] for row in index]) if isinstance(value, list) else value[index]
        for name, value in batch.items()
    }


def _kind(value: Column) -> tuple[np.dtype[Any], int]:
    """dtype and number of axes of one record's value."""
    if isinstance(value, list):
        return value[0].dtype, value[0].ndim
    return value.dtype, value.ndim - 1


def _scatter(subject: str, indices: list[list[int]], values: list[Column], rows: int) -> Column:
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


# --- the built-ins -----------------------------------------------------------------------------

#: Input handled at a time: small enough for the temporaries to stay in a core's cache.
_BLOCK_BYTES = 1 << 19


@feature(equal_lengths=False)
def raw(batch: Batch) -> Batch:
    """All columns unchanged, array columns as well."""
    return {name: value for name, value in batch.items() if name not in RESERVED_COLUMNS}


@feature(equal_lengths=True)
def power_spectrum(
    batch: Batch,
    *,
    nperseg: int = 256,
    noverlap: int | None = None,
    window: str | Sequence[Any] = "hann",
    detrend: Literal[False, "constant", "linear"] = False,
    scaling: str = "density",
    nfft: int | None = None,
    column: str | None = None,
    sample_rate_hz: float = 1.0,
) -> Batch:
    """Welch's averaged power spectrum along the last axis: `power_spectrum` (B, ..., F).

    One-sided for real input (F = nfft // 2 + 1, in 0 .. sample_rate_hz / 2). Two-sided for
    complex input (F = nfft) in FFT order: 0 Hz first, negative frequencies in the second half.
    Units are V**2/Hz for scaling="density", V**2 for "spectrum". The values are those of
    `scipy.signal.welch`, calculated in the precision of the input, as it was before SciPy
    went through float64, which takes three times as long.

    A record shorter than `nperseg` (samples) is one shorter segment, so F then depends on its
    length; give `nfft` >= `nperseg` to pad every segment to the same F. `noverlap` is
    nperseg // 2 unless given. Segments that do not fill up at the end are left out.

    Source: P. Welch, "The use of the fast Fourier transform for the estimation of power
    spectra", IEEE Trans. Audio Electroacoust. 15(2), 1967.
    """
    samples = _samples(batch, column)
    size = _segment_size(samples, nperseg, nfft)
    overlap = size // 2 if noverlap is None else noverlap
    if noverlap is not None and (not _is_count(noverlap, 0) or noverlap >= nperseg):
        raise SpecError(f"noverlap must be an integer from 0 to nperseg - 1, not {noverlap!r}")
    hop = max(1, size - overlap)
    weights, scale = _window(samples, window, size, scaling, sample_rate_hz)
    if detrend not in (False, "constant", "linear"):
        raise SpecError(f"detrend must be false, constant or linear, not {detrend!r}")
    spectrum = _Spectrum(weights, hop, nfft or size, scale, detrend)
    return _by_rows(samples, lambda x: {"power_spectrum": spectrum.mean_power(x)})


@feature(equal_lengths=True)
def spectrogram(
    batch: Batch,
    *,
    nperseg: int = 256,
    hop: int | None = None,
    window: str | Sequence[Any] = "hann",
    scaling: str = "density",
    nfft: int | None = None,
    column: str | None = None,
    sample_rate_hz: float = 1.0,
) -> Batch:
    """Short-time power along the last axis: `spectrogram` (B, ..., F, S) of S slices.

    The slices, `hop` samples apart (nperseg // 2 unless given), and the values are those of
    `scipy.signal.ShortTimeFFT(...).spectrogram`: zero-padded, so that every sample is covered
    and the first and last slices stick out at the ends. Frequencies, units and `nfft` are as in
    `power_spectrum`, of which a slice inside the record is one segment.
    """
    samples = _samples(batch, column)
    size, length = _segment_size(samples, nperseg, nfft), samples.shape[-1]
    if hop is not None and not _is_count(hop, 1):
        raise SpecError(f"hop must be a positive integer, not {hop!r}")
    step = max(1, size // 2) if hop is None else hop
    weights, scale = _window(samples, window, size, scaling, sample_rate_hz)
    spectrum = _Spectrum(weights, step, nfft or size, scale)
    slices = signal.ShortTimeFFT(weights, step, sample_rate_hz, fft_mode="twosided")
    padding = ((0, 0), (-slices.k_min, max(0, slices.k_max(length) - length)))

    def power(x: Array) -> dict[str, Array]:
        segments = spectrum.segments(np.pad(x, padding))
        return {"spectrogram": np.swapaxes(spectrum.power(segments), -1, -2)}

    return _by_rows(samples, power)


@feature(equal_lengths=True)
def statistics(batch: Batch, *, column: str | None = None) -> Batch:
    """Moments and cumulants along the last axis, each (B, ...): one value a channel.

    Real input: `mean`, `std`, `skewness`, `kurtosis` (excess, as Fisher defines it), `min`,
    `max`, `rms`; population moments, as NumPy and `scipy.stats` have them. Skewness and kurtosis
    of a constant are NaN, as in SciPy.

    Complex input: `mean_re`, `mean_im`, `power` = E|x|^2, `papr` = max|x|^2 / power (a ratio,
    not dB), `kurtosis` of |x|, and the fourth-order cumulants `c40` (complex64) and `c42`, each
    divided by C21^2::

        C20 = E[x^2]    C21 = E|x|^2
        C40 = E[x^4] - 3 C20^2
        C42 = E|x|^4 - |C20|^2 - 2 C21^2

    for zero-mean x (the mean is not removed): A. Swami and B. M. Sadler, "Hierarchical digital
    modulation classification using cumulants", IEEE Trans. Commun. 48(3), 2000. Noise is not
    taken out of C21. Everything but the mean and power of a silent channel is NaN.

    Calculated in float64, returned as float32, or as float64 for float64 and wider integers.
    A record of no samples gives NaN.
    """
    samples = _samples(batch, column)
    if samples.shape[-1] == 0:
        samples = np.full((*samples.shape[:-1], 1), np.nan, _working_dtype(samples.dtype))
    return _by_rows(samples, _complex_stats if samples.dtype.kind == "c" else _real_stats)


def _real_stats(x: Array) -> dict[str, Array]:
    values = x.astype(np.float64)
    mean, variance, skewness, kurtosis = _moments(values)
    return {
        "mean": mean,
        "std": np.sqrt(variance),
        "skewness": skewness,
        "kurtosis": kurtosis,
        "min": x.min(-1),
        "max": x.max(-1),
        "rms": np.sqrt(_mean_product(values, values)),
    }


def _complex_stats(x: Array) -> dict[str, Array]:
    values = x.astype(np.complex128)
    instant = values.real**2 + values.imag**2
    squares = values * values
    mean, c21, c20 = values.mean(-1), instant.mean(-1), squares.mean(-1)
    c40 = _mean_product(squares, squares) - 3 * c20**2
    c42 = _mean_product(instant, instant) - np.abs(c20) ** 2 - 2 * c21**2
    return {
        "mean_re": mean.real,
        "mean_im": mean.imag,
        "power": c21,
        "papr": instant.max(-1) / c21,
        "kurtosis": _moments(np.sqrt(instant))[3],
        "c40": (c40 / c21**2).astype(np.complex64),
        "c42": c42 / c21**2,
    }


def _moments(x: Array) -> tuple[Array, Array, Array, Array]:
    """Mean, variance, skewness and excess kurtosis of float64 rows.

    A variance within rounding of zero counts as none, by the rule of `scipy.stats`.
    """
    mean = x.mean(-1)
    centred = x - mean[:, None]
    squares = centred * centred
    variance = squares.mean(-1)
    usable = np.where(variance <= (np.finfo(np.float64).resolution * mean) ** 2, np.nan, variance)
    skewness = _mean_product(squares, centred) / usable**1.5
    return mean, variance, skewness, _mean_product(squares, squares) / usable**2 - 3


def _mean_product(a: Array, b: Array) -> Array:
    """Mean of a * b along the last axis, without the product as a temporary."""
    return np.asarray(np.einsum("rt,rt->r", a, b) / a.shape[-1])


@dataclass(frozen=True, slots=True)
class _Spectrum:
    """Windowed segments and their scaled power, for rows of samples (R, T)."""

    window: Array  # (size,), in the precision of the samples
    hop: int
    nfft: int
    scale: float
    detrend: Literal[False, "constant", "linear"] = False

    def segments(self, x: Array) -> Array:
        """Overlapping views (R, S, size) of rows (R, T)."""
        views: Array = np.lib.stride_tricks.sliding_window_view(x, len(self.window), axis=-1)
        return views[:, :: self.hop]

    def power(self, segments: Array) -> Array:
        """Scaled power (R, S, F) of segments (R, S, size)."""
        if self.detrend:
            segments = signal.detrend(segments, axis=-1, type=self.detrend)
        windowed = segments * self.window
        two_sided = windowed.dtype.kind == "c"
        bins = fft.fft(windowed, n=self.nfft) if two_sided else fft.rfft(windowed, n=self.nfft)
        power: Array = (bins.real**2 + bins.imag**2) * bins.real.dtype.type(self.scale)
        if not two_sided:  # each bin stands for two, but for 0 Hz and an even length's last
            power[..., 1 : -1 if self.nfft % 2 == 0 else None] *= 2
        return power

    def mean_power(self, x: Array) -> Array:
        """Power (R, F) averaged over segments, a bounded number of them at a time."""
        segments = self.segments(x)
        step = max(1, 4 * _BLOCK_BYTES // (len(x) * self.nfft * x.itemsize))
        blocks = range(0, segments.shape[1], step)
        sums = (self.power(segments[:, at : at + step]).sum(-2, dtype=float) for at in blocks)
        return np.asarray(sum(sums) / segments.shape[1])


def _samples(batch: Batch, column: str | None) -> Array:
    """The array column to work on, (B, ..., T)."""
    arrays = [name for name, value in batch.items() if isinstance(value, list) or value.ndim > 1]
    if column is None and len(arrays) != 1:
        found = f"choose one of {', '.join(arrays)}" if arrays else "there is none in the batch"
        raise SpecError(f"the option column must name the array to work on; {found}")
    name = arrays[0] if column is None else column
    if name not in arrays:
        known = ", ".join(arrays) or "none"
        raise SpecError(f"column {name!r} is not an array with a time axis; those are: {known}")
    value = batch[name]
    if isinstance(value, list):
        raise SpecError(f"column {name!r} differs in length; stack records of one length first")
    return value


def _segment_size(samples: Array, nperseg: int, nfft: int | None) -> int:
    """Samples of a segment: `nperseg`, or what a shorter record has."""
    if not _is_count(nperseg, 1):
        raise SpecError(f"nperseg must be a positive integer, not {nperseg!r}")
    if nfft is not None and not _is_count(nfft, nperseg):
        raise SpecError(f"nfft must be an integer of at least nperseg={nperseg}, not {nfft!r}")
    if samples.shape[-1] == 0:
        raise ValueError("a record without samples has no spectrum")
    return min(nperseg, int(samples.shape[-1]))


def _window(
    samples: Array, window: str | Sequence[Any], size: int, scaling: str, sample_rate_hz: float
) -> tuple[Array, float]:
    """Window weights (size,) in the samples' precision, and what to scale |FFT|^2 by."""
    if isinstance(sample_rate_hz, bool | str) or not 0 < sample_rate_hz < math.inf:
        raise SpecError(f"sample_rate_hz must be a positive number, not {sample_rate_hz!r}")
    if scaling not in ("density", "spectrum"):
        raise SpecError(f"scaling must be density or spectrum, not {scaling!r}")
    try:
        weights = signal.get_window(window if isinstance(window, str) else tuple(window), size)
    except (ValueError, TypeError) as exc:
        raise SpecError(f"window {window!r}: {exc}") from exc
    dtype = np.empty(0, _working_dtype(samples.dtype)).real.dtype
    density = scaling == "density"
    power = sample_rate_hz * np.sum(weights**2) if density else np.sum(weights) ** 2
    return weights.astype(dtype), 1 / float(power)


def _is_count(value: Any, least: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and bool(value >= least)


def _working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float32 or complex64 where they hold every value of the dtype, else double that."""
    return np.result_type(dtype, np.float32)


def _blocks(rows: Array) -> Iterator[slice]:
    """Slices of at most `_BLOCK_BYTES`, at least one row each."""
    step = max(1, _BLOCK_BYTES // max(1, rows.shape[-1] * rows.itemsize))
    return (slice(at, at + step) for at in range(0, len(rows), step))


def _by_rows(samples: Array, kernel: Callable[[Array], dict[str, Array]]) -> Batch:
    """Apply a kernel of rows (R, T) to samples (B, ..., T), a block of rows at a time.

    Blocks keep the temporaries in cache and bound the memory by one block, not by the batch.
    NaN and infinity in the input show in the output; they are no reason for warnings.
    """
    lead, length = samples.shape[:-1], samples.shape[-1]
    count = math.prod(lead)
    # Without a record, one of zeros still tells the shapes.
    rows = samples.reshape(count, length) if count else np.zeros((1, length), samples.dtype)
    working = _working_dtype(samples.dtype)
    results: dict[str, Array] = {}
    with np.errstate(all="ignore"):
        for block in _blocks(rows):
            for name, value in kernel(rows[block].astype(working, copy=False)).items():
                if name not in results:
                    real = np.empty(0, working).real.dtype
                    dtype = np.complex64 if value.dtype.kind == "c" else real
                    results[name] = np.empty((len(rows), *value.shape[1:]), dtype)
                results[name][block] = value
    return {name: v[:count].reshape(*lead, *v.shape[1:]) for name, v in results.items()}


#: Built-in name -> function and the version of its results (see `Feature.source_sha256`).
_BUILT_IN: dict[str, tuple[Callable[..., Batch], int]] = {
    "raw": (raw, 1),
    "power_spectrum": (power_spectrum, 1),
    "spectrogram": (spectrogram, 1),
    "statistics": (statistics, 1),
}

BUILT_IN_FEATURES = tuple(_BUILT_IN)
