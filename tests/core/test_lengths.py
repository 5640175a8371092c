"""Padding, cropping and buckets against loops over samples, masks, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signal_batch.errors import FeatureError
from signal_batch.lengths import Lengths, middle

DTYPES = ("float32", "float64", "complex64", "int16", "bool")


def records(lengths: list[int], channels: int | None, dtype: str) -> list[np.ndarray]:
    """Records without a zero in them, so that padding shows; bool ones are all True."""
    made, first = [], 1
    for length in lengths:
        shape = (length,) if channels is None else (channels, length)
        count = int(np.prod(shape))
        made.append(np.arange(first, first + count).reshape(shape).astype(dtype))
        first += count
    return made


def batch(values: Any, first: int = 10) -> dict[str, Any]:
    return {
        "ordinal": np.arange(first, first + len(values)),
        "id": np.array([f"r{i}" for i in range(len(values))], object),
        "x": values,
        "label": np.arange(len(values)),
    }


def as_read(values: list[np.ndarray]) -> Any:
    """As a reader hands them over: one array where shapes agree, a list where they differ."""
    return np.stack(values) if len({value.shape for value in values}) == 1 else values


def fitted(value: np.ndarray, length: int, *, crop: bool) -> np.ndarray:
    """A record of `length` samples, one sample after the other."""
    had = value.shape[-1]
    before = (had - length) // 2 if crop and had > length else 0
    out = np.zeros((*value.shape[:-1], length), value.dtype)
    for sample in range(length):
        if before + sample < had:
            out[..., sample] = value[..., before + sample]
    return out


cases = st.tuples(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.none() | st.integers(1, 3),
    st.sampled_from(DTYPES),
)


def check(
    found: dict[str, Any], values: list[np.ndarray], length: int, *, crop: bool, masked: bool
) -> None:
    x = found["x"]
    assert x.shape == (len(values), *values[0].shape[:-1], length)
    assert x.dtype == values[0].dtype
    for row, value in zip(x, values, strict=True):
        np.testing.assert_array_equal(row, fitted(value, length, crop=crop))
    assert ("x_mask" in found) is masked
    if masked:
        mask = found["x_mask"]
        assert (mask.dtype, mask.shape) == (np.bool_, (len(values), length))
        for row, value in zip(mask.tolist(), values, strict=True):
            assert row == [sample < value.shape[-1] for sample in range(length)]
    assert list(found) == ["ordinal", "id", "x", *(["x_mask"] if masked else []), "label"]


@given(cases, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_padding_is_zeros_at_the_end_and_a_mask(case: Any, more: int) -> None:
    lengths, channels, dtype = case
    values = records(lengths, channels, dtype)
    length = max(lengths) + more
    found = Lengths("pad", ("x",), length, masked=True)(batch(as_read(values)))
    check(found, values, length, crop=False, masked=True)


@given(cases, st.integers(1, 14))
@settings(max_examples=60, deadline=None)
def test_cropping_keeps_the_middle_and_pads_what_is_shorter(case: Any, length: int) -> None:
    lengths, channels, dtype = case
    values = records(lengths, channels, dtype)
    masked = min(lengths) < length
    found = Lengths("crop", ("x",), length, masked=masked)(batch(as_read(values)))
    check(found, values, length, crop=True, masked=masked)


@given(cases, st.sets(st.integers(1, 12), max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_bucket_is_the_smallest_that_holds_the_longest(case: Any, limits: set[int]) -> None:
    lengths, channels, dtype = case
    values = records(lengths, channels, dtype)
    buckets = tuple(sorted(limits | {12}))
    found = Lengths("bucket", ("x",), buckets=buckets, masked=True)(batch(as_read(values)))
    length = min(limit for limit in buckets if limit >= max(lengths))
    check(found, values, length, crop=False, masked=True)


def test_a_record_in_a_batch_of_its_own_is_the_same_as_among_others() -> None:
    values = records([3, 7, 5], 2, "float32")
    for plan in (Lengths("pad", ("x",), 8, masked=True), Lengths("crop", ("x",), 4, masked=True)):
        together = plan(batch(values))
        for row, value in enumerate(values):
            alone = plan(batch([value]))
            for name in ("x", "x_mask"):
                np.testing.assert_array_equal(alone[name][0], together[name][row])


@pytest.mark.parametrize(
    ("had", "length", "expected"),
    [
        (5, 3, [1, 2, 3]),
        (6, 3, [1, 2, 3]),
        (6, 4, [1, 2, 3, 4]),
        (7, 4, [1, 2, 3, 4]),
        (4, 4, [0, 1, 2, 3]),
        (3, 4, [0, 1, 2]),
        (1, 1, [0]),
    ],
)
def test_the_middle(had: int, length: int, expected: list[int]) -> None:
    assert middle(np.arange(had), length).tolist() == expected
    two = np.stack([np.arange(had), np.arange(had)])
    assert middle(two, length).tolist() == [expected, expected]


def test_only_the_planned_columns_are_touched() -> None:
    given_ = batch(records([4, 2], None, "float32")) | {"y": np.ones((2, 9))}
    found = Lengths("pad", ("x",), 4, masked=True)(given_)
    assert found["y"] is given_["y"]
    assert isinstance(given_["x"], list), "the batch that came in is left alone"
    both = Lengths("pad", ("x", "y"), 10, masked=True)(given_)
    assert (both["x"].shape, both["y"].shape) == ((2, 10), (2, 10))
    assert both["y_mask"].sum(axis=1).tolist() == [9, 9]


def test_equal_lengths_pass_through() -> None:
    given_ = batch(np.ones((3, 2, 4), np.float32))
    found = Lengths()(given_)
    assert all(found[name] is given_[name] for name in given_)
    assert found is not given_


def test_a_plan_survives_json() -> None:
    for plan in (
        Lengths(),
        Lengths("pad", ("x", "y"), 5, masked=True),
        Lengths("bucket", ("x",), buckets=(3, 9), masked=True),
    ):
        assert Lengths.from_json(json.loads(json.dumps(plan.to_json()))) == plan


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "limit"),
    [
        (Lengths("pad", ("x",), 6, masked=True), 6),
        (Lengths("bucket", ("x",), buckets=(2, 5), masked=True), 5),
    ],
)
def test_a_record_that_is_too_long_is_named(plan: Lengths, limit: int) -> None:
    with pytest.raises(FeatureError) as caught:
        plan(batch(records([3, 7, 2], 2, "float32"), first=40))
    assert str(caught.value).startswith("ordinals 40-42: a record of 7 samples in column 'x'")
    assert f"the {limit} that the run was planned for" in str(caught.value)
    with pytest.raises(FeatureError, match=r"^ordinal 41: a record of 7"):
        plan(batch(records([7], 2, "float32"), first=41))


def test_records_that_differ_though_none_did_are_named() -> None:
    with pytest.raises(FeatureError) as caught:
        Lengths()(batch(records([3, 7], 2, "float32"), first=5))
    assert str(caught.value).startswith(
        "ordinals 5-6: column 'x' has records of different shapes ((2, 3) and (2, 7))"
    )


@pytest.mark.parametrize("other", [(3, 4), (2, 2, 4), (4,)])
def test_only_the_last_axis_may_differ(other: tuple[int, ...]) -> None:
    values = [np.ones((2, 4)), np.ones(other)]
    for plan in (Lengths("pad", ("x",), 9, masked=True), Lengths("crop", ("x",), 2)):
        with pytest.raises(FeatureError, match=r"ordinals 10-11: .* only the last axis may differ"):
            plan(batch(values))
