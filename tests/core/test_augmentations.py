"""The built-in transforms: each against its definition, on records whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from signal_batch.augmentations import (
    BUILT_IN,
    add_noise,
    channel_dropout,
    frequency_offset,
    random_crop,
    scale,
    transform,
    unit_power,
)
from signal_batch.errors import SpecError

FLOATS = ("float16", "float32", "float64", "complex64")
OPTIONS: dict[str, dict[str, Any]] = {
    "random_crop": {"length": 16},
    "add_noise": {"snr_db": [0, 20]},
    "frequency_offset": {"max_cycles": 0.1},
    "channel_dropout": {"probability": 0.9},
    "scale": {"gain_db": [-6, 6]},
    "unit_power": {},
}
#: Below this a test of randomness would fail by chance once in ten thousand seeds; they are fixed.
UNLIKELY = 1e-4


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def waves(*shape: int, dtype: str = "complex64", seed: int = 1) -> np.ndarray:
    """Samples with another power in each channel."""
    drawn = rng(seed).standard_normal(shape)
    if dtype.startswith("complex"):
        drawn = drawn + 1j * rng(seed + 1).standard_normal(shape)
    levels = np.arange(1, 1 + (shape[0] if len(shape) > 1 else 1))
    return (drawn * (levels[:, None] if len(shape) > 1 else 3)).astype(dtype)


def power(x: np.ndarray) -> float:
    return float(np.mean(np.abs(x.astype("complex128")) ** 2))


def is_uniform(values: Any, low: float, high: float) -> bool:
    return stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > UNLIKELY


# --- what holds for all of them ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 64), (64,), (2, 3, 64)])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in BUILT_IN for d in FLOATS if n != "frequency_offset" or d == "complex64"],
)
def test_one_array_is_replaced_and_nothing_is_changed(
    name: str, shape: tuple[int, ...], dtype: str
) -> None:
    x, other = rng().standard_normal(shape).astype(dtype), np.arange(3)
    x.setflags(write=False)
    record = {"ordinal": np.int64(4), "iq": x, "other": other, "label": "a"}
    before = x.copy()
    result = BUILT_IN[name].function(record, rng(), column="iq", **OPTIONS[name])
    assert list(record) == ["ordinal", "iq", "other", "label"]
    assert record["iq"] is x
    np.testing.assert_array_equal(x, before)
    assert result["iq"].dtype == dtype
    assert result["iq"].shape == (shape if name != "random_crop" else (*shape[:-1], 16))
    assert result["other"] is other
    again = BUILT_IN[name].function(record, rng(), column="iq", **OPTIONS[name])
    np.testing.assert_array_equal(again["iq"], result["iq"])


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("x", [np.zeros((2, 32), "complex64"), np.zeros((2, 0), "complex64")])
def test_silence_stays_silent(name: str, x: np.ndarray) -> None:
    result = BUILT_IN[name].function({"samples": x}, rng(), **OPTIONS[name])["samples"]
    assert result.dtype == x.dtype
    assert not result.any()


def test_those_that_make_training_harder_are_for_training_only() -> None:
    always = {n for n, b in BUILT_IN.items() if not b.function.training_only}  # type: ignore[attr-defined]
    assert always == {"unit_power"}


def test_a_function_is_marked() -> None:
    @transform(training_only=True)
    def own(record: Any, rng: Any) -> Any:
        return record

    @transform()
    def other(record: Any, rng: Any) -> Any:
        return record

    assert own.training_only  # type: ignore[attr-defined]
    assert not other.training_only  # type: ignore[attr-defined]
    assert own({"a": 1}, None) == {"a": 1}


# --- random_crop -------------------------------------------------------------------------------


@given(
    size=st.integers(0, 40),
    length=st.integers(1, 40),
    channels=st.integers(0, 3),
    dtype=st.sampled_from(["int16", "uint8", "float32", "complex64", "bool"]),
    seed=st.integers(0, 1000),
)
def test_a_crop_is_a_piece_of_its_record(
    size: int, length: int, channels: int, dtype: str, seed: int
) -> None:
    lead = (channels,) if channels else ()
    x = np.arange(max(1, channels) * size).reshape(*lead, size).astype(dtype)
    crop = random_crop({"samples": x}, rng(seed), length=length)["samples"]
    assert crop.shape == (*lead, length)
    assert crop.dtype == x.dtype
    if size <= length:
        padding = [(0, 0)] * len(lead) + [(0, length - size)]
        np.testing.assert_array_equal(crop, np.pad(x, padding))
    else:
        pieces = [x[..., s : s + length] for s in range(size - length + 1)]
        assert any(np.array_equal(crop, piece) for piece in pieces)


def test_every_start_is_as_likely() -> None:
    generator, record = rng(), {"samples": np.arange(10)}
    crops = [random_crop(record, generator, length=4)["samples"] for _ in range(3000)]
    counts = np.bincount([crop[0] for crop in crops])
    assert len(counts) == 7  # starts 0 to 6
    assert stats.chisquare(counts).pvalue > UNLIKELY


# --- add_noise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("snr_db", [-10, 0.0, 17.5])
def test_noise_has_the_power_that_was_asked_for(dtype: str, snr_db: float) -> None:
    x = waves(2, 100_000, dtype=dtype)
    noise = add_noise({"samples": x}, rng(), snr_db=snr_db)["samples"].astype("complex128") - x
    # The mean of N squares of a normal variable deviates by sqrt(2 / N) of itself.
    assert power(x) / power(noise) == pytest.approx(
        10 ** (snr_db / 10), rel=4 * (2 / x.size) ** 0.5
    )
    # The noise is at one level, though the channels are not.
    assert power(noise[0]) == pytest.approx(power(noise[1]), rel=0.03)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_noise_is_white_normal_and_circular(dtype: str) -> None:
    size = 50_000
    x = np.ones((2, size), dtype)
    noise = add_noise({"samples": x}, rng(), snr_db=0)["samples"].astype("complex128") - x
    parts = [noise.real, noise.imag] if dtype == "complex64" else [noise.real]
    sigma = (1 / len(parts)) ** 0.5  # the power of 1 is shared by the parts
    for part in parts:
        for channel in part:
            assert stats.kstest(channel / sigma, "norm").pvalue > UNLIKELY
    small = 5 / size**0.5  # five standard deviations of a correlation of independent values
    spectrum = np.abs(np.fft.fft(noise[0])) ** 2
    correlations = np.fft.ifft(spectrum)[1:100] / size
    assert np.abs(correlations).max() < small
    assert abs(np.vdot(noise[0], noise[1])) / size < small
    if dtype == "complex64":
        assert abs(np.mean(noise**2)) < small
        assert abs(np.mean(noise.real * noise.imag)) < small


def test_the_ratio_is_drawn_uniformly_in_decibels() -> None:
    x, generator = waves(1, 4000), rng()
    noises = (
        add_noise({"samples": x}, generator, snr_db=[5, 25])["samples"] - x for _ in range(300)
    )
    ratios = [10 * np.log10(power(x) / power(noise)) for noise in noises]
    assert is_uniform(ratios, 5, 25)


# --- frequency_offset --------------------------------------------------------------------------


def turned(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Frequency in cycles per sample and phase in [0, 2 pi) between two arrays (time,)."""
    angles = np.unwrap(np.angle(y.astype("complex128") / x))
    slope, start = np.polyfit(np.arange(len(x)), angles, 1)
    return slope / (2 * np.pi), start % (2 * np.pi)


def test_a_carrier_offset_is_its_formula() -> None:
    x = waves(2, 1001)
    y = frequency_offset({"samples": x}, rng(3), max_cycles=0.3)["samples"]
    f, phi = turned(x[0], y[0])
    expected = x * np.exp(2j * np.pi * f * np.arange(1001) + 1j * phi)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    still = frequency_offset({"samples": x}, rng(3), phase=False)["samples"]
    np.testing.assert_allclose(still, x, rtol=1e-6)
    only_phase = frequency_offset({"samples": x}, rng(3))["samples"] / x
    np.testing.assert_allclose(only_phase, only_phase[0, 0], rtol=1e-5)


def test_frequency_and_phase_are_uniform() -> None:
    generator, x = rng(), np.ones(64, "complex64")
    drawn = [
        turned(x, frequency_offset({"samples": x}, generator, max_cycles=0.2)["samples"])
        for _ in range(400)
    ]
    frequencies, phases = zip(*drawn, strict=True)
    assert is_uniform(frequencies, -0.2, 0.2)
    assert is_uniform(phases, 0, 2 * np.pi)


def test_the_angle_holds_to_the_end_of_a_long_record() -> None:
    x = np.ones(1_000_000, "complex64")
    y = frequency_offset({"samples": x}, rng(5), max_cycles=0.5, phase=False)["samples"]
    f = rng(5).uniform(-0.5, 0.5)
    turns = (f * np.arange(len(x))) % 1
    np.testing.assert_allclose(y, np.exp(2j * np.pi * turns), atol=1e-6)


@pytest.mark.parametrize("rate", [2e6, np.float32(2e6), np.int32(2_000_000)])
def test_hertz_are_cycles_per_sample_times_the_sample_rate(rate: Any) -> None:
    record = {"samples": waves(2, 100), "rate_hz": rate}
    expected = frequency_offset(record, rng(2), max_cycles=0.05)["samples"]
    named = frequency_offset(record, rng(2), max_hz=1e5, sample_rate_hz="rate_hz")["samples"]
    given_rate = frequency_offset(record, rng(2), max_hz=1e5, sample_rate_hz=2e6)["samples"]
    np.testing.assert_array_equal(named, expected)
    np.testing.assert_array_equal(given_rate, expected)


# --- channel_dropout, scale, unit_power --------------------------------------------------------


@pytest.mark.parametrize(("channels", "probability"), [(2, 0.5), (4, 0.3), (3, 0.95)])
def test_channels_go_with_their_probability_but_never_all(
    channels: int, probability: float
) -> None:
    x, generator = np.ones((channels, 3), "float32"), rng()
    results = [
        channel_dropout({"samples": x}, generator, probability=probability)["samples"]
        for _ in range(4000)
    ]
    kept = np.array(results)
    assert (kept == kept[..., :1]).all()  # a channel goes as a whole
    assert kept[..., 0].any(axis=1).all()
    silent = probability - probability**channels / channels
    for channel in range(channels):
        count = int((kept[:, channel, 0] == 0).sum())
        assert stats.binomtest(count, len(kept), silent).pvalue > UNLIKELY


def test_one_channel_is_always_kept() -> None:
    for x in (np.ones(5, "float32"), np.ones((1, 5), "float32")):
        result = channel_dropout({"samples": x}, rng(), probability=0.99)["samples"]
        np.testing.assert_array_equal(result, x)


def test_gain_is_one_factor_uniform_in_decibels() -> None:
    x, generator = waves(2, 50), rng()
    gains = []
    for _ in range(300):
        ratio = scale({"samples": x}, generator, gain_db=[-20, 6])["samples"] / x
        np.testing.assert_allclose(ratio, ratio[0, 0].real, rtol=1e-6)
        gains.append(20 * np.log10(ratio[0, 0].real))
    assert is_uniform(gains, -20, 6)
    doubled = scale({"samples": x}, generator, gain_db=20 * np.log10(2))["samples"]
    np.testing.assert_allclose(doubled, 2 * x, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("level", [1e-12, 1.0, 1e12])
def test_unit_power_is_a_mean_power_of_one(dtype: str, level: float) -> None:
    x = (waves(3, 400, dtype=dtype) * level).astype(dtype)
    result = unit_power({"samples": x}, rng())["samples"]
    assert power(result) == pytest.approx(1, rel=1e-6)
    np.testing.assert_allclose(result, x / np.sqrt(power(x)), rtol=1e-6)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("random_crop", {"length": 0}, "length must be a whole number of at least 1, not 0"),
        ("random_crop", {"length": 2.0}, "length must be a whole number"),
        ("random_crop", {"length": True}, "length must be a whole number"),
        ("add_noise", {"snr_db": [20, 0]}, r"snr_db \[20, 0\] must go from low to high"),
        ("add_noise", {"snr_db": [1, 2, 3]}, r"snr_db must be a number or \[low, high\]"),
        ("add_noise", {"snr_db": "loud"}, "snr_db must be a number or"),
        ("add_noise", {"snr_db": None}, "snr_db must be a number or"),
        ("add_noise", {"snr_db": float("nan")}, "snr_db must be a number or"),
        ("add_noise", {"snr_db": -4000}, "is beyond 300 dB"),
        ("scale", {"gain_db": [1, "2"]}, "gain_db must be a number or"),
        ("scale", {"gain_db": [0, 1e9]}, "is beyond 300 dB"),
        ("channel_dropout", {"probability": 1}, "at least 0 and less than 1, not 1"),
        ("channel_dropout", {"probability": -0.1}, "at least 0 and less than 1"),
        ("channel_dropout", {"probability": "half"}, "at least 0 and less than 1"),
        ("frequency_offset", {"max_cycles": 0.6}, "from 0 to 0.5 cycles per sample, not 0.6"),
        ("frequency_offset", {"max_cycles": [0, 1]}, "from 0 to 0.5 cycles per sample"),
        ("frequency_offset", {"max_hz": 5.0}, "max_hz and sample_rate_hz go together"),
        ("frequency_offset", {"sample_rate_hz": 5.0}, "max_hz and sample_rate_hz go together"),
        (
            "frequency_offset",
            {"max_cycles": 0.1, "max_hz": 1, "sample_rate_hz": 5},
            "max_cycles or max_hz, not both",
        ),
        ("frequency_offset", {"max_hz": -1, "sample_rate_hz": 5}, "max_hz must be a number of"),
        ("frequency_offset", {"max_hz": 1, "sample_rate_hz": 0}, "must be a positive number or"),
        ("frequency_offset", {"max_hz": 3, "sample_rate_hz": 5}, "beyond half the sample rate"),
        ("frequency_offset", {"phase": 1}, "phase must be true or false, not 1"),
    ],
)
def test_a_wrong_option_is_named_without_data_and_with_it(
    name: str, options: dict[str, Any], message: str
) -> None:
    built_in = BUILT_IN[name]
    with pytest.raises(SpecError, match=f"transform {name}: .*{message}"):
        built_in.check(**options)
    with pytest.raises(SpecError, match=f"transform {name}: .*{message}"):
        built_in.function({"samples": waves(2, 8)}, rng(), **options)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "random_crop"])
def test_whole_numbers_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"transform {name}: column 'samples' has dtype int16"):
        BUILT_IN[name].function({"samples": np.ones((2, 9), "int16")}, rng(), **OPTIONS[name])


def test_real_samples_have_no_carrier_to_shift() -> None:
    with pytest.raises(SpecError, match="has dtype float32; a carrier can be shifted in complex"):
        frequency_offset({"samples": np.ones(4, "float32")}, rng(), max_cycles=0.1)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("record", [{"iq": np.ones(3)}, {"samples": 3.0, "iq": np.ones(3)}])
def test_a_column_that_is_no_array_is_named(name: str, record: dict[str, Any]) -> None:
    with pytest.raises(
        SpecError, match="'samples' is not an array with a time axis; those are: iq"
    ):
        BUILT_IN[name].function(record, rng(), **OPTIONS[name])


def test_a_sample_rate_that_is_none() -> None:
    record: dict[str, Any] = {"samples": np.ones(4, "complex64"), "rate": np.float32("nan")}
    with pytest.raises(SpecError, match="names 'fs', which is no column; there are samples, rate"):
        frequency_offset(record, rng(), max_hz=1, sample_rate_hz="fs")
    for rate, message in [
        (np.float32("nan"), "holds .*nan.*, not a sample rate"),
        (0, "holds 0, not a sample rate"),
        ("fast", "holds 'fast', not a sample rate"),
        (1.5, "up to 0.666667 cycles per sample is beyond half a cycle"),
    ]:
        with pytest.raises(ValueError, match=message):
            frequency_offset({**record, "rate": rate}, rng(), max_hz=1, sample_rate_hz="rate")
