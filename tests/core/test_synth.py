"""Synthetic captures against their definition: power, noise, carrier, symbols, determinism."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import fft, integrate

from signal_batch import synth
from signal_batch.errors import InputError, SpecError
from signal_batch.synth import (
    CONSTELLATIONS,
    MODULATIONS,
    capture,
    parse_shape,
    root_raised_cosine,
    synthesize,
    synthetic,
)

LINEAR = tuple(name for name in MODULATIONS if name != "2FSK")


def clean(seed: int, index: int, shape: tuple[int, int]) -> NDArray[np.complex64]:
    """What a capture would be without noise, (channels, samples)."""
    _, signal, _, response = synth._components(seed, index, shape)
    return response * signal


def first_index(modulation: str) -> int:
    """A record of the first scene of a modulation."""
    return MODULATIONS.index(modulation) * synth.CAPTURES_PER_SCENE


def control_documents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for folder in ("root.json", "snapshots/*/*", "manifests/*/*")
        for path in root.glob(folder)
    }


@pytest.mark.parametrize(
    ("text", "shape"), [("1x1024", (1, 1024)), (" 2X4096 ", (2, 4096)), ("4 x 7", (4, 7))]
)
def test_shapes_are_read(text: str, shape: tuple[int, int]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["", "1024", "0x5", "1x0", "-1x4", "1x2x3", "1.5x2", "axb"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"shape|number of"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": 0}, "records must be"),
        ({"records": True}, "records must be"),
        ({"shape": (0, 8)}, "number of channels"),
        ({"shape": (1, -1)}, "number of samples"),
        ({"shape": (8,)}, "a shape is"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1 << 64}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"records_per_shard": 0}, "records_per_shard must be"),
    ],
)
def test_arguments_out_of_range_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"records": 4, "shape": (1, 8), "seed": 1} | change
    with pytest.raises(SpecError, match=message):
        synthesize(str(tmp_path / "set"), **arguments)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("name", LINEAR)
def test_constellations_have_unit_power_and_distinct_points(name: str) -> None:
    points = CONSTELLATIONS[name].astype(complex)
    assert np.mean(np.abs(points) ** 2) == pytest.approx(1, abs=1e-6)
    bits = synth._truth(synth._scene(0, MODULATIONS.index(name)))["bits_per_symbol"]
    assert len(points) == 2**bits
    apart = np.abs(points[:, None] - points)[~np.eye(len(points), dtype=bool)]
    order = len(points)
    expected = {"PSK": 2 * np.sin(np.pi / order), "QAM": np.sqrt(6 / (order - 1))}
    assert apart.min() == pytest.approx(expected.get(name[-3:], np.sqrt(2)), abs=1e-6)


@pytest.mark.parametrize("roll_off", [*synth.ROLL_OFFS, 1.0])
def test_the_pulse_is_the_transform_of_a_root_raised_cosine_spectrum(roll_off: float) -> None:
    def spectrum(f: float) -> float:
        """Square root of the raised cosine, in symbol rates."""
        inner = (1 - roll_off) / 2
        if f <= inner:
            return 1.0
        return float(np.cos(np.pi / (2 * roll_off) * (f - inner)))

    edges = (0, (1 - roll_off) / 2, (1 + roll_off) / 2)
    times = np.array([0, 0.3, 1 / (4 * roll_off), -1 / (4 * roll_off), 1, 2.75])
    for time, value in zip(times, root_raised_cosine(times, roll_off), strict=True):
        parts = [
            integrate.quad(lambda f, t=time: spectrum(f) * np.cos(2 * np.pi * f * t), a, b)[0]
            for a, b in pairwise(edges)
        ]
        assert value == pytest.approx(2 * sum(parts), abs=1e-9)


@pytest.mark.parametrize("index", range(0, 40, 3))
def test_snr_is_what_the_metadata_says_on_every_channel(index: int) -> None:
    shape = (3, 16_384)
    samples, metadata, _ = capture(9, index, shape)
    signal = clean(9, index, shape).astype(complex)
    noise = samples - signal
    measured = 10 * np.log10(np.mean(np.abs(signal) ** 2, 1) / np.mean(np.abs(noise) ** 2, 1))
    np.testing.assert_allclose(measured, metadata["snr_db"], atol=0.2)


def test_noise_is_white_circular_and_independent() -> None:
    samples = 65_536
    _, _, noise, _ = synth._components(2, 5, (2, samples))
    a, b = (row.astype(complex) / np.sqrt(np.mean(np.abs(row) ** 2)) for row in noise)
    bound = 5 / np.sqrt(samples)
    assert abs(np.mean(a * b.conj())) < bound
    assert abs(np.mean(a * a)) < bound
    for lag in (1, 2, 7):
        assert abs(np.mean(a[lag:] * a[:-lag].conj())) < bound
    other = synth._components(2, 6, (2, samples))[2][0].astype(complex)
    assert abs(np.mean(a * other.conj()) / np.sqrt(np.mean(np.abs(other) ** 2))) < bound


@pytest.mark.parametrize("name", ["BPSK", "QPSK", "8PSK", "16QAM", "64QAM"])
def test_the_carrier_is_the_centroid_of_the_spectrum(name: str) -> None:
    index, samples = first_index(name), 65_536
    _, metadata, _ = capture(3, index, (1, samples))
    power = np.abs(fft.fft(clean(3, index, (1, samples))[0])) ** 2
    centroid = np.sum(power * fft.fftfreq(samples)) / np.sum(power)
    offset = metadata["carrier_offset_hz"] / metadata["sample_rate_hz"]
    assert centroid == pytest.approx(offset, abs=0.003)
    assert abs(offset) <= 0.1


def test_the_carrier_of_on_off_keying_is_the_line_in_its_spectrum() -> None:
    index, samples = first_index("OOK"), 65_536
    noisy, metadata, _ = capture(3, index, (1, samples))
    peak = fft.fftfreq(samples)[np.argmax(np.abs(fft.fft(noisy[0])))]
    offset = metadata["carrier_offset_hz"] / metadata["sample_rate_hz"]
    assert peak == pytest.approx(offset, abs=1 / samples)


def test_frequency_shift_keying_has_two_tones_a_symbol_rate_apart() -> None:
    index, samples = first_index("2FSK"), 65_536
    _, metadata, truth = capture(3, index, (1, samples))
    signal = clean(3, index, (1, samples))[0].astype(complex)
    offset = metadata["carrier_offset_hz"]
    steps = np.angle(signal[1:] * signal[:-1].conj()) / (2 * np.pi) * metadata["sample_rate_hz"]
    tones = np.abs(steps - offset) * 2
    np.testing.assert_allclose(tones, truth["symbol_rate_hz"], rtol=1e-3)
    assert 0.45 < np.mean(steps > offset) < 0.55
    np.testing.assert_allclose(np.abs(signal), np.abs(signal[0]), rtol=1e-5)


@pytest.mark.parametrize("name", LINEAR)
def test_a_receiver_that_follows_the_metadata_finds_the_constellation(name: str) -> None:
    index, samples = first_index(name), 16_384
    _, metadata, truth = capture(4, index, (1, samples))
    speed, rate = metadata["samples_per_symbol"], metadata["sample_rate_hz"]
    assert truth["symbol_rate_hz"] == rate / speed
    turns = metadata["carrier_offset_hz"] / rate * np.arange(samples)
    still = clean(4, index, (1, samples))[0] * np.exp(
        -1j * (2 * np.pi * turns + metadata["phase_rad"])
    )
    if name == "OOK":
        received = still[metadata["symbol_offset"] + speed // 2 :: speed]
    else:
        reach = np.arange(-20 * speed, 20 * speed + 1) / speed
        matched = np.convolve(still, root_raised_cosine(reach, metadata["roll_off"]), mode="same")
        received = matched[metadata["symbol_offset"] :: speed][25:-25]
    points = CONSTELLATIONS[name].astype(complex)
    received = received / np.sqrt(np.mean(np.abs(received) ** 2))
    for _ in range(2):
        nearest = np.argmin(np.abs(received[:, None] - points), axis=1)
        sent = points[nearest]
        received = received / (np.vdot(sent, received).real / np.vdot(sent, sent).real)
    assert np.sqrt(np.mean(np.abs(received - sent) ** 2)) < 0.03
    assert set(nearest) == set(range(len(points)))


def test_channels_carry_one_transmission_with_their_own_gain_and_phase() -> None:
    shape = (4, 4096)
    samples, metadata, _ = capture(6, 12, shape)
    receiver = metadata["receiver"]
    first, *others = clean(6, 12, shape).astype(complex)
    assert receiver["channel_gain_db"][0] == receiver["channel_phase_rad"][0] == 0
    for channel, other in enumerate(others, start=1):
        ratio = np.vdot(first, other) / np.vdot(first, first)
        gain, phase = receiver["channel_gain_db"][channel], receiver["channel_phase_rad"][channel]
        assert ratio == pytest.approx(10 ** (gain / 20) * np.exp(1j * phase), rel=1e-5)
    assert 10 * np.log10(np.mean(np.abs(first) ** 2)) == pytest.approx(
        receiver["gain_db"], abs=1e-3
    )
    assert samples.shape == shape
    assert samples.dtype == np.complex64


def test_scenes_are_shared_and_never_split() -> None:
    described = [capture(1, index, (1, 8)) for index in range(200)]
    for start in range(0, 200, 4):
        scene = described[start : start + 4]
        shared = ("carrier_offset_hz", "sample_rate_hz", "samples_per_symbol", "split")
        assert len({tuple(m[name] for name in shared) for _, m, _ in scene}) == 1
        assert len({truth["modulation"] for _, _, truth in scene}) == 1
        assert len({m["snr_db"] for _, m, _ in scene}) == 4
    assert Counter(m["split"] for _, m, _ in described) == {"train": 160, "test": 40}
    pairs = {(truth["modulation"], m["split"]) for _, m, truth in described}
    assert len(pairs) == 2 * len(MODULATIONS)


def test_review_skips_a_tenth_and_fails_a_fiftieth() -> None:
    rows = [synth._review(5, index, 1) for index in range(6000)]
    share = {status: count / 6000 for status, count in Counter(s for s, _ in rows).items()}
    assert share[sds.AnnotationStatus.SKIPPED] == pytest.approx(0.10, abs=0.015)
    assert share[sds.AnnotationStatus.FAILED] == pytest.approx(0.02, abs=0.008)
    empty = [values for status, values in rows if status is not sds.AnnotationStatus.SUCCESS]
    assert not any(empty)
    kept = [(i, values) for i, (_, values) in enumerate(rows) if values]
    wrong = np.mean([v["label"] != i // 4 % len(MODULATIONS) for i, v in kept])
    assert wrong == pytest.approx(0.05, abs=0.012)
    assert all(0 <= v["quality"] <= 1 for _, v in kept)


def test_every_seed_index_and_purpose_has_its_own_numbers() -> None:
    keys = [(s, i, p) for s in (0, 1, 2**64 - 1) for i in (0, 1, 2) for p in range(3)]
    assert len({synth._stream(*key).random() for key in keys}) == len(keys)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
)
def test_a_capture_is_a_pure_function(seed: int, index: int, shape: tuple[int, int]) -> None:
    samples, metadata, truth = capture(seed, index, shape)
    again = capture(seed, index, shape)
    assert samples.shape == shape
    assert np.isfinite(samples).all()
    assert samples.tobytes() == again[0].tobytes()
    assert (metadata, truth) == again[1:]


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(SpecError, match="index"):
        capture(1, -1, (1, 8))


def test_a_dataset_holds_the_captures(tmp_path: Path) -> None:
    dataset = synthesize(str(tmp_path), records=30, shape=(2, 64), seed=8, records_per_shard=7)
    for index, record in enumerate(dataset):
        samples, metadata, _ = capture(8, index, (2, 64))
        assert record.id == f"capture-{index:08d}"
        assert record.scene_id == f"scene-{index // 4:08d}"
        assert record["samples"].data.tobytes() == samples.tobytes()
        assert record.metadata["snr_db"] == metadata["snr_db"]
        receiver = record.metadata["receiver"]
        assert isinstance(receiver, Mapping)
        assert receiver["antenna"] == metadata["receiver"]["antenna"]
        _, time = record["samples"].axes
        assert time.coordinate is not None
        assert time.coordinate.step == 1 / metadata["sample_rate_hz"]
    truth = dataset.annotations["truth-v1"]
    assert {row.status for row in truth} == {sds.AnnotationStatus.SUCCESS}
    assert [row.values for row in truth] == [capture(8, i, (2, 64))[2] for i in range(30)]
    review = dataset.annotations["review-v1"]
    assert [(r.status, r.values) for r in review] == [synth._review(8, i, 2) for i in range(30)]


def test_records_do_not_depend_on_shards_or_on_their_number(tmp_path: Path) -> None:
    def encoded(name: str, records: int, per_shard: int | None) -> list[bytes]:
        dataset = synthesize(
            str(tmp_path / name),
            records=records,
            shape=(1, 128),
            seed=3,
            records_per_shard=per_shard,
        )
        return [sds.encode(record) for record in dataset]

    whole = encoded("whole", 20, None)
    assert encoded("threes", 20, 3) == whole
    assert encoded("fewer", 11, 4) == whole[:11]


def test_same_arguments_same_bytes_and_others_another_snapshot(tmp_path: Path) -> None:
    for name in "ab":
        synthesize(str(tmp_path / name), records=9, shape=(1, 32), seed=3, records_per_shard=4)
    documents = control_documents(tmp_path / "a")
    assert len(documents) == 3
    assert documents == control_documents(tmp_path / "b")
    recipes = [
        synthetic(9, (1, 32), 3, 4),
        synthetic(9, (1, 32), 4, 4),
        synthetic(9, (1, 32), 3, 5),
        synthetic(9, (1, 32), 3),
        synthetic(10, (1, 32), 3, 4),
        synthetic(9, (2, 32), 3, 4),
    ]
    assert len({recipe.snapshot_id for recipe in recipes}) == len(recipes)


def test_an_interrupted_call_is_finished_and_another_seed_refused(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"records": 10, "shape": (1, 32), "records_per_shard": 4}

    def stop(done: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(str(tmp_path / "a"), seed=1, progress=stop, **arguments)
    finished = synthesize(str(tmp_path / "a"), seed=1, **arguments)
    synthesize(str(tmp_path / "b"), seed=1, **arguments)
    assert control_documents(tmp_path / "a") == control_documents(tmp_path / "b")
    assert sorted(finished.annotations) == ["review-v1", "truth-v1"]
    with pytest.raises(InputError, match="already holds another dataset"):
        synthesize(str(tmp_path / "a"), seed=2, **arguments)


def test_a_shard_holds_64_mib_of_samples_by_default() -> None:
    assert synthetic(1, (1, 1024), 0).records_per_shard == 8192
    assert synthetic(1, (2, 65_536), 0).records_per_shard == 64
    assert synthetic(1, (1, 1 << 24), 0).records_per_shard == 1
    assert synthetic(1, (1, 1), 0).records_per_shard == 65_536


def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    def peak(records: int) -> int:
        tracemalloc.start()
        synthesize(str(tmp_path / str(records)), records=records, shape=(1, 8192), seed=1)
        value = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return value

    peak(8)
    small, large = peak(40), peak(400)
    assert large - small < 4 << 20, "400 records are 25 MiB of samples"
