"""Synthetic IQ captures whose truth is known, to test, demonstrate and measure with.

Everything about record `i` follows from `(seed, i)` and from its scene, `(seed, i // 4)`; the
size of a shard and the order of writing have no part in it. Four captures of a scene share its
modulation, carrier and rates, and differ in symbols, phase, gain and noise. A scene is wholly
in the training or wholly in the test split.

The model of channel `c` of a capture, sample by sample::

    samples[c, n] = g * h[c] * (x[n] * exp(2j pi (f n + p)) + w[c, n])

with `x` the transmission at a mean power of 1, `f` the carrier offset in cycles a sample, `p` its
phase, `w` white circular Gaussian noise of power 10 ** (-snr_db / 10), independent from channel
to channel, `h` the channel's own gain and phase (1 for the first) and `g` the receiver's gain.
So `snr_db` is 10 log10 of the mean power of the signal over that of the noise, both per complex
sample over the full sampled bandwidth, and it holds on every channel. The energy of a symbol
over the noise density, Es/N0, is snr_db + 10 log10(samples_per_symbol) in dB.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import signal_dataset as sds
from numpy.typing import NDArray

from signal_batch.errors import SpecError
from signal_batch.frozen import digest
from signal_batch.recordings import Progress, Recipe, Row, write_once

Complex = NDArray[np.complex64]
Shape = tuple[int, int]
Choice = TypeVar("Choice")

#: Raised when the same seed would give other samples, metadata or annotations than before.
GENERATOR_VERSION = 1

#: Classes in label order: the label of a modulation is its position.
MODULATIONS = ("BPSK", "QPSK", "8PSK", "16QAM", "64QAM", "2FSK", "OOK")
CAPTURES_PER_SCENE = 4

SAMPLE_RATES_HZ = (1_000_000.0, 2_000_000.0, 5_000_000.0, 10_000_000.0)
SAMPLES_PER_SYMBOL = (4, 8, 16)
ROLL_OFFS = (0.2, 0.25, 0.35)
ANTENNAS = ("dipole", "patch", "horn")
SNR_DB = (-10.0, 30.0)
GAIN_DB = (-20.0, 20.0)
CHANNEL_GAIN_DB = (-3.0, 3.0)
CARRIER_CYCLES = (-0.1, 0.1)

_TURN = 2 * math.pi
_HALF_SPAN = 6
_SHARD_BYTES = 64 << 20
_MAX_RECORDS_PER_SHARD = 65_536
_SHAPE = re.compile(r"(\d+)\s*[xX]\s*(\d+)")
_SCENE, _CAPTURE, _REVIEW = range(3)


@dataclass(frozen=True, slots=True)
class _Scene:
    """What the captures of a scene have in common."""

    index: int
    label: int
    sample_rate_hz: float
    samples_per_symbol: int
    roll_off: float
    carrier_cycles: float

    @property
    def modulation(self) -> str:
        return MODULATIONS[self.label]


@dataclass(frozen=True, slots=True)
class _Settings:
    """What is a capture's own, symbols and noise aside; the tuples have one value a channel."""

    scene: _Scene
    snr_db: float
    phase_rad: float
    symbol_offset: int
    gain_db: float
    antenna: str
    gains_db: tuple[float, ...]
    phases_rad: tuple[float, ...]


def synthesize(
    root: str,
    *,
    records: int,
    shape: Shape,
    seed: int,
    records_per_shard: int | None = None,
    progress: Progress | None = None,
) -> sds.Dataset:
    """Write a dataset of synthetic captures at `root`, or finish or open one already there.

    `shape` is (channels, samples) of the field `samples`, complex64 with axes (channel, time)
    and time in seconds. A shard holds `records_per_shard` records, by default 64 MiB of samples
    and at most 65,536 records. `progress` is called once a shard with the records written so far.

    Annotation set `truth-v1` has `modulation`, `label`, `symbol_rate_hz` and `bits_per_symbol`
    for every record. In `review-v1` about 10 % of the rows are skipped, 2 % failed, and the
    others have a `quality` from 0 to 1 that grows with the SNR and a `label` that is wrong for
    5 % of them.

    The same arguments give the same bytes on one machine with the same versions of the
    libraries; from one kind of processor to another, sines and sums of products may differ in
    their last bits. Memory is that of one record plus a few megabytes of annotation rows,
    whatever the number of records; a shard passes through the temporary folder. A call that was
    interrupted is finished by the same call.

    Raises `SpecError` for arguments out of range, `InputError` if `root` holds another
    dataset, `OutputError` or `StorageError` if it cannot be written.
    """
    return write_once(root, synthetic(records, shape, seed, records_per_shard), progress)


def synthetic(
    records: int, shape: Shape, seed: int, records_per_shard: int | None = None
) -> Recipe:
    """The recipe of a dataset of captures; arguments and errors as in `synthesize`."""
    _check_count("records", records)
    _check_shape(shape)
    _check_seed(seed)
    if records_per_shard is None:
        records_per_shard = _default_shard(shape)
    _check_count("records_per_shard", records_per_shard)
    channels, samples = shape
    arguments = {
        "generator_version": GENERATOR_VERSION,
        "records": records,
        "shape": [channels, samples],
        "seed": seed,
        "records_per_shard": records_per_shard,
    }
    return Recipe(
        dataset_id=f"synthetic-iq-{channels}x{samples}",
        snapshot_id=digest(arguments)[:16],
        records=records,
        records_per_shard=records_per_shard,
        record_id=_record_id,
        record=lambda index: _record(seed, index, shape),
        annotations={
            "truth-v1": lambda index: (
                sds.AnnotationStatus.SUCCESS,
                _truth(_scene(seed, index // CAPTURES_PER_SCENE)),
            ),
            "review-v1": lambda index: _review(seed, index, channels),
        },
        metadata={"title": "Synthetic IQ captures", **arguments},
    )


def parse_shape(text: str) -> Shape:
    """(channels, samples) from text such as `2x4096`; raises `SpecError` for anything else."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{text!r} is not a shape; write CHANNELSxSAMPLES, for example 1x1024")
    shape = int(match[1]), int(match[2])
    _check_shape(shape)
    return shape


def capture(seed: int, index: int, shape: Shape) -> tuple[Complex, dict[str, Any], dict[str, Any]]:
    """Record `index` of a seed: samples (channels, samples), its metadata, its truth.

    A pure function of its arguments; see the module for the signal's model and `synthesize`
    for the rest. Raises `SpecError` for a shape, seed or index out of range.
    """
    _check_shape(shape)
    _check_seed(seed)
    if index < 0:
        raise SpecError(f"a record's index must be 0 or more, not {index}")
    settings, signal, noise, response = _components(seed, index, shape)
    noise += signal
    noise *= response
    return noise, _metadata(settings), _truth(settings.scene)


def _record(seed: int, index: int, shape: Shape) -> sds.Record:
    samples, metadata, _ = capture(seed, index, shape)
    time = sds.Coordinate(start=0, step=1 / metadata["sample_rate_hz"], unit="s")
    axes = (sds.Axis("channel", shape[0]), sds.Axis("time", shape[1], coordinate=time))
    return sds.Record(
        _record_id(index),
        {"samples": sds.Field(samples, axes)},
        scene_id=f"scene-{index // CAPTURES_PER_SCENE:08d}",
        metadata=metadata,
    )


def _record_id(index: int) -> str:
    return f"capture-{index:08d}"


def _metadata(settings: _Settings) -> dict[str, Any]:
    scene = settings.scene
    metadata: dict[str, Any] = {
        "split": "test" if scene.index % 5 == 1 else "train",
        "sample_rate_hz": scene.sample_rate_hz,
        "samples_per_symbol": scene.samples_per_symbol,
        "carrier_offset_hz": scene.carrier_cycles * scene.sample_rate_hz,
        "snr_db": settings.snr_db,
        "phase_rad": settings.phase_rad,
        "symbol_offset": settings.symbol_offset,
        "receiver": {
            "gain_db": settings.gain_db,
            "antenna": settings.antenna,
            "channel_gain_db": settings.gains_db,
            "channel_phase_rad": settings.phases_rad,
        },
    }
    if scene.modulation in _SHAPED:
        metadata["roll_off"] = scene.roll_off
    return metadata


def _truth(scene: _Scene) -> dict[str, Any]:
    return {
        "modulation": scene.modulation,
        "label": scene.label,
        "symbol_rate_hz": scene.sample_rate_hz / scene.samples_per_symbol,
        "bits_per_symbol": _BITS[scene.label],
    }


def _review(seed: int, index: int, channels: int) -> Row:
    rng = _stream(seed, index, _REVIEW)
    fate, slip, error, other = rng.random(4).tolist()
    if fate < 0.10:
        return sds.AnnotationStatus.SKIPPED, {}
    if fate < 0.12:
        return sds.AnnotationStatus.FAILED, {}
    settings, _ = _settings(seed, index, channels)
    label = settings.scene.label
    if slip < 0.05:
        label = (label + 1 + int(other * (len(MODULATIONS) - 1))) % len(MODULATIONS)
    quality = 1 / (1 + math.exp(-(settings.snr_db - 5) / 5)) + 0.1 * (error - 0.5)
    values = {"quality": min(max(quality, 0.0), 1.0), "label": label}
    return sds.AnnotationStatus.SUCCESS, values


def _stream(seed: int, index: int, purpose: int) -> np.random.Generator:
    """Random numbers of their own for each (seed, index, purpose).

    Philox is counter-based (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011):
    the key picks the stream, and the top word of the counter keeps the purposes 2**192 draws
    apart.
    """
    key = np.array([seed, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, purpose]))


@lru_cache(maxsize=256)
def _scene(seed: int, index: int) -> _Scene:
    rate, speed, roll_off, carrier = _stream(seed, index, _SCENE).random(4).tolist()
    return _Scene(
        index=index,
        label=index % len(MODULATIONS),
        sample_rate_hz=_pick(SAMPLE_RATES_HZ, rate),
        samples_per_symbol=_pick(SAMPLES_PER_SYMBOL, speed),
        roll_off=_pick(ROLL_OFFS, roll_off),
        carrier_cycles=_between(CARRIER_CYCLES, carrier),
    )


def _settings(seed: int, index: int, channels: int) -> tuple[_Settings, np.random.Generator]:
    """A capture's settings, and the generator from which its symbols and noise come next."""
    scene = _scene(seed, index // CAPTURES_PER_SCENE)
    rng = _stream(seed, index, _CAPTURE)
    snr, phase, offset, gain, antenna, *others = rng.random(3 + 2 * channels).tolist()
    gains, phases = others[::2], others[1::2]
    settings = _Settings(
        scene=scene,
        snr_db=_between(SNR_DB, snr),
        phase_rad=_TURN * phase,
        symbol_offset=int(offset * scene.samples_per_symbol),
        gain_db=_between(GAIN_DB, gain),
        antenna=_pick(ANTENNAS, antenna),
        gains_db=(0.0, *(_between(CHANNEL_GAIN_DB, value) for value in gains)),
        phases_rad=(0.0, *(_TURN * value for value in phases)),
    )
    return settings, rng


def _components(seed: int, index: int, shape: Shape) -> tuple[_Settings, Complex, Complex, Complex]:
    """Settings, signal (samples,), noise (channels, samples) and response (channels, 1)."""
    channels, samples = shape
    settings, rng = _settings(seed, index, channels)
    signal = _transmission(settings, samples, rng)
    turns = np.arange(samples, dtype=np.float64) * settings.scene.carrier_cycles
    signal *= _phasor(turns + np.float64(settings.phase_rad / _TURN))
    noise = rng.standard_normal((channels, 2 * samples), dtype=np.float32).view(np.complex64)
    noise *= np.float32(10 ** (-settings.snr_db / 20) / np.sqrt(2))
    gains = 10 ** ((np.array(settings.gains_db) + settings.gain_db) / 20)
    response = gains * np.exp(1j * np.array(settings.phases_rad))
    return settings, signal, noise, response.astype(np.complex64)[:, None]


def _transmission(settings: _Settings, samples: int, rng: np.random.Generator) -> Complex:
    """Baseband signal (samples,) at a mean power of 1.

    Symbol 1 is centred on sample `symbol_offset` or, where the pulse is rectangular, starts
    there. A capture too short to hold anything but zeros of OOK stays at zero.
    """
    scene = settings.scene
    rows = samples // scene.samples_per_symbol + 2
    if scene.modulation == "2FSK":
        signal = _keyed_frequency(rng.integers(0, 2, rows), scene.samples_per_symbol)
    else:
        points = CONSTELLATIONS[scene.modulation]
        shaped = scene.modulation in _SHAPED
        symbols = points[rng.integers(0, len(points), rows + (2 * _HALF_SPAN - 1) * shaped)]
        if shaped:
            taps = _taps(scene.samples_per_symbol, scene.roll_off)
            signal = (_windows(symbols, len(taps)) @ taps).ravel()
        else:
            signal = np.repeat(symbols, scene.samples_per_symbol)
    first = scene.samples_per_symbol - settings.symbol_offset
    signal = signal[first : first + samples]
    power = float(np.mean(signal.real**2 + signal.imag**2))
    return signal / np.float32(np.sqrt(power)) if power else signal


def _keyed_frequency(bits: NDArray[np.int64], samples_per_symbol: int) -> Complex:
    """Continuous-phase 2FSK of modulation index 1: tones half the symbol rate off the carrier.

    (bits,) -> (bits * samples_per_symbol,). With a power of two samples a symbol the phase is
    a sum of exact binary fractions, so it does not drift.
    """
    steps = np.repeat(bits - 0.5, samples_per_symbol) / samples_per_symbol
    return _phasor(np.cumsum(steps))


def _phasor(cycles: NDArray[np.float64]) -> Complex:
    """exp(2j pi cycles), reduced to one turn in float64 before it is taken in float32."""
    angle = ((cycles - np.floor(cycles)) * _TURN).astype(np.float32)
    result = np.empty(angle.shape, dtype=np.complex64)
    np.cos(angle, out=result.real)
    np.sin(angle, out=result.imag)
    return result


def _windows(values: Complex, width: int) -> Complex:
    """All runs of `width` neighbours, (values - width + 1, width), without copying.

    What `sliding_window_view` does, at a tenth of its fixed cost: it is the dearest line of a
    short capture.
    """
    step = values.itemsize
    shape = (len(values) - width + 1, width)
    return np.ndarray(shape, values.dtype, values, strides=(step, step))


@lru_cache(maxsize=64)
def _taps(samples_per_symbol: int, roll_off: float) -> Complex:
    """Root-raised-cosine pulse, (2 * half span symbols, samples of one period).

    Element (j, p) is the weight that the j-th of the neighbouring symbols has in sample p, so a
    window of symbols times the taps is one period of output.
    """
    symbols = np.arange(1 - _HALF_SPAN, _HALF_SPAN + 1)[:, None]
    time = np.arange(samples_per_symbol) / samples_per_symbol - symbols
    return root_raised_cosine(time, roll_off).astype(np.complex64)


def root_raised_cosine(time: NDArray[np.float64], roll_off: float) -> NDArray[np.float64]:
    """Root-raised-cosine pulse of energy 1 at `time` in symbol periods, 0 < roll_off <= 1.

    Impulse response RC0(t) of 3GPP TS 25.104, 6.8.1, with its limits at t = 0 and at
    t = 1 / (4 roll_off), where the quotient is 0 / 0.
    """
    ramp = 4 * roll_off * time
    at_zero, at_edge = np.isclose(time, 0), np.isclose(np.abs(ramp), 1)
    safe = np.where(at_zero | at_edge, 0.1, time)
    numerator = np.sin(np.pi * safe * (1 - roll_off))
    numerator += 4 * roll_off * safe * np.cos(np.pi * safe * (1 + roll_off))
    pulse = numerator / (np.pi * safe * (1 - (4 * roll_off * safe) ** 2))
    edge = np.pi / (4 * roll_off)
    limit = (1 + 2 / np.pi) * np.sin(edge) + (1 - 2 / np.pi) * np.cos(edge)
    pulse = np.where(at_edge, roll_off / np.sqrt(2) * limit, pulse)
    return np.where(at_zero, 1 + roll_off * (4 / np.pi - 1), pulse)


def _psk(order: int) -> Complex:
    return _points(np.exp(2j * np.pi * np.arange(order) / order))


def _qam(order: int) -> Complex:
    """Square QAM: odd levels on both axes over their root mean square, sqrt(2 (M - 1) / 3)."""
    side = round(order**0.5)
    levels = 2.0 * np.arange(side) - side + 1
    return _points((levels[:, None] + 1j * levels).ravel() / math.sqrt(2 * (order - 1) / 3))


def _points(values: NDArray[np.complex128]) -> Complex:
    points: Complex = values.astype(np.complex64)
    points.flags.writeable = False
    return points


def _pick(choices: tuple[Choice, ...], uniform: float) -> Choice:
    return choices[int(uniform * len(choices))]


def _between(limits: tuple[float, float], uniform: float) -> float:
    return limits[0] + (limits[1] - limits[0]) * uniform


def _default_shard(shape: Shape) -> int:
    return min(max(_SHARD_BYTES // (8 * shape[0] * shape[1]), 1), _MAX_RECORDS_PER_SHARD)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_shape(shape: Shape) -> None:
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise SpecError(f"a shape is (channels, samples), for example (1, 1024), not {shape!r}")
    _check_count("the number of channels", shape[0])
    _check_count("the number of samples", shape[1])


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise SpecError(f"seed must be a whole number from 0 to 2**64 - 1, not {seed!r}")


#: Points of each linear modulation, (order,), at a mean power of 1.
CONSTELLATIONS: dict[str, Complex] = {
    "BPSK": _psk(2),
    "QPSK": _psk(4),
    "8PSK": _psk(8),
    "16QAM": _qam(16),
    "64QAM": _qam(64),
    "OOK": _points(np.array([0, math.sqrt(2)], dtype=np.complex128)),
}
_SHAPED = frozenset(CONSTELLATIONS) - {"OOK"}
_BITS = (1, 2, 3, 4, 6, 1, 1)
