"""Statistics of training records against NumPy over all of them at once, and normalizing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from signal_batch.batches import Batch
from signal_batch.errors import DamagedOutputError, FeatureError, SpecError
from signal_batch.statistics import Moments, Statistics, measure

DTYPES = ("float16", "float32", "float64", "complex64")


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    values = rng.standard_normal(shape)
    if dtype == "complex64":
        values = values + 2j * rng.standard_normal(shape)
    return (values * 3 + 1).astype(dtype)


def batches_of(records: list[np.ndarray], sizes: list[int]) -> list[Batch]:
    """Records in batches of these sizes in turn, stacked where their shapes agree."""
    batches: list[Batch] = []
    at = turn = 0
    while at < len(records):
        size = sizes[turn % len(sizes)]
        part: Any = records[at : at + size]
        if len({record.shape for record in part}) == 1:
            part = np.stack(part)
        batches.append({"ordinal": np.arange(at, at + len(part)) + 100, "x": part})
        at, turn = at + size, turn + 1
    return batches


def expected(records: list[np.ndarray]) -> tuple[int, np.ndarray, np.ndarray]:
    """Count, mean and standard deviation along the first axis, of all records side by side."""
    wide = "complex128" if records[0].dtype.kind == "c" else "float64"
    flat = np.concatenate([r.reshape(len(r), -1) for r in records], axis=1).astype(wide)
    return flat.shape[1], flat.mean(axis=1), flat.std(axis=1)


def check(moments: Moments, records: list[np.ndarray]) -> None:
    count, mean, std = expected(records)
    scale = max(1e-300, max(np.abs(r).astype("float64").max(initial=0) for r in records))
    assert moments.count == count
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-12, atol=1e-14 * scale)
    np.testing.assert_allclose(moments.std, std, rtol=1e-9, atol=1e-13 * scale)


# --- measuring ---------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    other=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    channels=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_statistics_are_those_of_all_records_side_by_side(
    lengths: list[int], sizes: list[int], other: list[int], channels: int, dtype: str
) -> None:
    records = [drawn(channels, n, dtype=dtype, seed=i) for i, n in enumerate([7, *lengths])]
    found = measure(batches_of(records, sizes), ["x"])
    check(found.columns["x"], records)
    again = measure(batches_of(records, other), ["x"]).columns["x"]
    np.testing.assert_allclose(again.mean, found.columns["x"].mean, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(again.std, found.columns["x"].std, rtol=1e-12)
    assert measure(batches_of(records, sizes), ["x"]).digest == found.digest


@settings(max_examples=60, deadline=None)
@given(
    values=npst.arrays(
        "float64",
        st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(1, 8)),
        elements=st.floats(-1e100, 1e100),
    ),
    size=st.integers(1, 8),
)
def test_statistics_of_any_numbers(values: np.ndarray, size: int) -> None:
    check(measure(batches_of(list(values), [size]), ["x"]).columns["x"], list(values))


@pytest.mark.parametrize("shape", [(5,), (2, 9), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_axes_but_the_first_of_a_record_are_taken_together(
    shape: tuple[int, ...], dtype: str
) -> None:
    records = [drawn(*shape, dtype=dtype, seed=i) for i in range(20)]
    moments = measure(batches_of(records, [6]), ["x"]).columns["x"]
    assert len(moments.mean) == shape[0]
    assert moments.is_complex == (dtype == "complex64")
    check(moments, records)


def test_a_large_offset_does_not_cancel() -> None:
    """Sums of squares would lose all of the variance: 1e9 ** 2 has no digits left for 1."""
    values = np.random.default_rng(0).standard_normal((300, 2, 50)) + 1e9
    std = np.array(measure(batches_of(list(values), [7]), ["x"]).columns["x"].std)
    exact = (values - 1e9).transpose(1, 0, 2).reshape(2, -1).std(axis=1)
    np.testing.assert_allclose(std, exact, rtol=1e-6)


def test_batches_larger_than_a_block_are_taken_in_parts() -> None:
    records = [drawn(2, 20_000, dtype="complex64", seed=i) for i in range(9)]
    check(measure(batches_of(records, [9]), ["x"]).columns["x"], records)


def test_only_float_columns_with_an_axis_are_measured() -> None:
    batch: Batch = {
        "ordinal": np.arange(4),
        "x": drawn(4, 2, 5),
        "counts": np.ones((4, 2, 5), "int16"),
        "single": drawn(4),
        "ragged": [np.ones(2, "int32"), np.ones(3, "int32")] * 2,
        "text": np.array(["a"] * 4, dtype=object),
        "other": drawn(4, 3),
    }
    names = [name for name in batch if name not in ("ordinal", "other")]
    assert list(measure([batch], names).columns) == ["x"]


def test_equal_values_have_no_deviation() -> None:
    records = [np.full((1, 7), 0.1, "float32")] * 50
    assert measure(batches_of(records, [3, 4]), ["x"]).columns["x"].std == (0.0,)


def test_nothing_to_measure() -> None:
    with pytest.raises(SpecError, match="no training records"):
        measure([], ["x"])
    with pytest.raises(SpecError, match="no training records"):
        measure([{"ordinal": np.arange(0), "x": np.zeros((0, 2, 3))}], ["x"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_named(bad: float, dtype: str) -> None:
    records = [drawn(2, 8, dtype=dtype, seed=i) for i in range(9)]
    records[5][1, 3] = bad
    with pytest.raises(FeatureError, match="column 'x' holds NaN or infinity at ordinal 105"):
        measure(batches_of(records, [4]), ["x"])
    records[5] = records[5][:, :6]
    with pytest.raises(FeatureError, match="at ordinal 105"):
        measure(batches_of(records, [4]), ["x"])


def test_numbers_too_large_to_square() -> None:
    records = [np.array([1e300, 0.0]), np.array([-1e300, 0.0])]
    for size in (1, 2):
        with pytest.raises(FeatureError, match="column 'x' holds numbers too large to square"):
            measure(batches_of(records, [size]), ["x"])


def test_records_must_agree_along_their_first_axis() -> None:
    with pytest.raises(SpecError, match="has 9 along its first axis at ordinal 101 and 7 at ord"):
        measure(batches_of([np.ones(7), np.ones(9)], [2]), ["x"])


# --- as JSON -----------------------------------------------------------------------------------


def test_statistics_survive_json_to_the_bit() -> None:
    batch: Batch = {
        "ordinal": np.arange(6),
        "iq": drawn(6, 2, 9, dtype="complex64"),
        "x": drawn(6, 3),
    }
    found = measure([batch], ["iq", "x"])
    text = json.dumps(found.to_json(), allow_nan=False)
    again = Statistics.from_json(json.loads(text))
    assert again == found
    assert again.digest == found.digest
    iq = json.loads(text)["columns"]["iq"]
    assert iq["count"] == 54
    assert iq["mean"][1] == [found.columns["iq"].mean[1].real, found.columns["iq"].mean[1].imag]
    assert measure([batch], ["x"]).digest != found.digest


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"columns": {"x": {}}},
        {"columns": {"x": {"count": 1, "mean": ["a"], "std": [1.0]}}},
        {"columns": {"x": {"count": 1, "mean": [1.0], "std": []}}},
    ],
)
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(DamagedOutputError, match="no statistics"):
        Statistics.from_json(value)


# --- normalizing -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("lengths", [[9, 9, 9], [4, 9, 2]])
def test_normalized_records_have_mean_zero_and_deviation_one(
    dtype: str, lengths: list[int]
) -> None:
    records = [drawn(2, n, dtype=dtype, seed=i) for i, n in enumerate(lengths)]
    (batch,) = batches_of(records, [3])
    before = [record.copy() for record in records]
    result = measure([batch], ["x"]).normalized("x", batch["x"], batch["ordinal"])
    assert isinstance(result, list) == (len(set(lengths)) > 1)
    _, mean, std = expected(records)
    for value, record, old in zip(result, records, before, strict=True):
        assert value.dtype == dtype
        np.testing.assert_allclose(value, (old - mean[:, None]) / std[:, None], rtol=1e-5)
        np.testing.assert_array_equal(record, old)
    _, mean, std = expected([np.asarray(value) for value in result])
    np.testing.assert_allclose(mean, 0, atol=1e-6)
    np.testing.assert_allclose(std, 1, rtol=1e-6)


def test_a_vector_is_normalized_element_by_element() -> None:
    values = drawn(30, 4, dtype="float64") * [1, 10, 100, 0]
    (batch,) = batches_of(list(values), [30])
    result = measure([batch], ["x"]).normalized("x", batch["x"], batch["ordinal"])
    spread = np.where(values.std(axis=0) > 0, values.std(axis=0), 1)
    np.testing.assert_allclose(result, (values - values.mean(axis=0)) / spread, rtol=1e-9)
    assert not np.asarray(result)[:, 3].any()


def test_a_mean_far_from_zero_is_taken_off_in_float64() -> None:
    """In float32, 1e4 + 1e-4 is 1e4: its neighbours are 1e-3 away."""
    statistics = Statistics({"x": Moments(9, (1e4 + 1e-4,), (1e-3,))})
    x = np.full((1, 1, 3), 1e4, "float32")
    result = np.asarray(statistics.normalized("x", x, [0]))
    np.testing.assert_allclose(result, -0.1, rtol=1e-6)


@pytest.mark.parametrize("ragged", [False, True])
def test_other_records_than_those_measured_are_refused(ragged: bool) -> None:
    statistics = Statistics({"x": Moments(9, (0.0, 1.0), (1.0, 1.0))})
    values: Any = [np.ones((3, 4)), np.ones((3, 4))]
    values = values if ragged else np.stack(values)
    with pytest.raises(SpecError, match="'x' has 3 along its first axis at ordinal 8, but 2 in"):
        statistics.normalized("x", values, [8, 9])
    with pytest.raises(SpecError, match="'x' has dtype complex64, measured real"):
        statistics.normalized("x", np.ones((1, 2, 4), "complex64"), [8])
    with pytest.raises(SpecError, match="no statistics of 'y'; there are: x"):
        statistics.normalized("y", np.ones((1, 2, 4)), [8])
