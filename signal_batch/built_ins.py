"""The four built-in features: raw, power_spectrum, spectrogram, statistics.

Time is the last axis. Each works on small blocks of records, so that memory stays bounded and
temporaries stay in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import scipy  # its parts load when first used: scipy.signal alone takes half a second

from signal_batch.batches import Array, Batch
from signal_batch.columns import RESERVED_COLUMNS
from signal_batch.errors import SpecError

F = TypeVar("F", bound=Callable[..., Any])

#: Input handled at a time: small enough for the temporaries to stay in a core's cache.
_BLOCK_BYTES = 1 << 19


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
    slices = scipy.signal.ShortTimeFFT(weights, step, sample_rate_hz, fft_mode="twosided")
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
            segments = scipy.signal.detrend(segments, axis=-1, type=self.detrend)
        windowed = segments * self.window
        two_sided = windowed.dtype.kind == "c"
        bins = (
            scipy.fft.fft(windowed, n=self.nfft)
            if two_sided
            else scipy.fft.rfft(windowed, n=self.nfft)
        )
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


def _weights(window: str | Sequence[Any], size: int) -> Array:
    """A window (size,) of SciPy's, periodic as for spectra.

    The default is worked out here: loading `scipy.signal` takes longer than a small export.
    """
    if window == "hann" and size > 1:
        return np.asarray(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size))
    weights: Array = scipy.signal.get_window(
        window if isinstance(window, str) else tuple(window), size
    )
    return weights


def _window(
    samples: Array, window: str | Sequence[Any], size: int, scaling: str, sample_rate_hz: float
) -> tuple[Array, float]:
    """Window weights (size,) in the samples' precision, and what to scale |FFT|^2 by."""
    if isinstance(sample_rate_hz, bool | str) or not 0 < sample_rate_hz < math.inf:
        raise SpecError(f"sample_rate_hz must be a positive number, not {sample_rate_hz!r}")
    if scaling not in ("density", "spectrum"):
        raise SpecError(f"scaling must be density or spectrum, not {scaling!r}")
    try:
        weights = _weights(window, size)
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
BUILT_IN: dict[str, tuple[Callable[..., Batch], int]] = {
    "raw": (raw, 1),
    "power_spectrum": (power_spectrum, 1),
    "spectrogram": (spectrogram, 1),
    "statistics": (statistics, 1),
}
