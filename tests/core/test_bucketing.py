"""Steps of one length, mostly: nothing lost, nothing moved far, and little padding."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signal_batch.bucketing import WINDOW_STEPS, BucketedMapDataset, buckets_of, equal_limits
from signal_batch.errors import SpecError
from signal_batch.iteration import global_order
from signal_batch.selection import Selection

Ints = np.ndarray[Any, np.dtype[np.int64]]


def taken(
    records: int,
    buckets: Any = None,
    *,
    step: int,
    seed: int = 3,
    epochs: int | None = None,
    steps: int | None = None,
    shuffle: bool = True,
) -> list[int]:
    """The whole global order."""
    order = global_order(
        Selection.all_of(records),
        step_records=step,
        seed=seed,
        epochs=epochs,
        steps=steps,
        shuffle=shuffle,
        buckets=None if buckets is None else np.asarray(buckets, np.uint8),
    )
    return [order[place] for place in range(len(order))]


# --- limits --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=30),
    st.sets(st.integers(1, 100), max_size=5),
)
def test_a_record_goes_into_the_first_bucket_that_holds_it(
    lengths: list[int], limits: set[int]
) -> None:
    ascending = sorted(limits | {100})
    found = buckets_of(lengths, ascending)
    assert found.dtype == np.uint8
    assert found.tolist() == [
        next(i for i, limit in enumerate(ascending) if length <= limit) for length in lengths
    ]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 8))
def test_limits_divide_into_about_equal_counts(lengths: list[int], count: int) -> None:
    longest = max(lengths)
    limits = equal_limits(lengths, longest, count)
    assert 1 <= len(limits) <= count
    assert list(limits) == sorted(set(limits))
    assert limits[-1] == longest
    assert set(limits) <= {*lengths, longest}
    assert all(type(limit) is int for limit in limits)
    if len(set(lengths)) == len(lengths):
        # Where no two are alike each bucket has its share, to within one record.
        sizes = Counter(buckets_of(lengths, limits).tolist())
        if len(limits) == count:
            assert max(sizes.values()) - min(sizes.values()) <= 1


def test_limits_reach_the_longest_of_any_side() -> None:
    assert equal_limits([1, 2, 3, 4], 9) == (1, 2, 3, 9)
    assert equal_limits([5, 5, 5], 5) == (5,)
    assert equal_limits([5, 5, 5], 7, count=1) == (7,)


# --- the order -----------------------------------------------------------------------------------


# In Grain a shuffled epoch of less than 65536 records takes about 10 ms, however few they are, so
# examples are of few epochs.
@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    records, step = draw(st.integers(60, 150)), draw(st.integers(1, 4))
    epochs = draw(st.integers(1, 3))
    kinds = draw(st.integers(1, 5))
    buckets = draw(st.lists(st.integers(0, kinds - 1), min_size=records, max_size=records))
    seed = draw(st.integers(0, 2**32 - 1))
    return {"records": records, "step": step, "epochs": epochs, "buckets": buckets, "seed": seed}


@given(runs())
@settings(max_examples=20, deadline=None)
def test_no_record_is_lost_and_none_leaves_its_window(run: dict[str, Any]) -> None:
    records, step = run["records"], run["step"]
    options = {"step": step, "seed": run["seed"], "epochs": run["epochs"]}
    plain, found = taken(records, **options), taken(records, run["buckets"], **options)
    assert len(found) == len(plain) == records * run["epochs"] // step * step
    window = 64 * step
    for first in range(0, len(plain), window):
        assert Counter(found[first : first + window]) == Counter(plain[first : first + window])
    if len(found) == records * run["epochs"]:
        assert set(Counter(found).values()) == {run["epochs"]}


@pytest.mark.parametrize(("records", "step"), [(1, 1), (1, 2), (2, 3), (3, 2), (5, 4)])
def test_fewer_records_than_anyone_trains_on(records: int, step: int) -> None:
    buckets = list(range(records))
    plain, found = (taken(records, kind, step=step, epochs=4) for kind in (None, buckets))
    assert len(found) == records * 4 // step * step
    assert Counter(found) == Counter(plain)


@given(runs())
@settings(max_examples=20, deadline=None)
def test_a_window_has_no_more_mixed_steps_than_it_has_borders(run: dict[str, Any]) -> None:
    """Sorted by bucket and then cut, a window mixes two buckets at each of their borders only."""
    buckets, step = np.array(run["buckets"]), run["step"]
    found = taken(run["records"], buckets, step=step, seed=run["seed"], epochs=run["epochs"])
    kinds = buckets[np.array(found)].reshape(-1, step)
    mixed = [len(set(row)) > 1 for row in kinds.tolist()]
    for first in range(0, len(mixed), 64):
        there = len(set(kinds[first : first + 64].ravel().tolist()))
        assert sum(mixed[first : first + 64]) <= there - 1


def test_little_is_padded() -> None:
    """4000 records of 50 to 500 samples: what a step computes beyond what is real."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 501, 4000)
    limits = equal_limits(lengths, 500)
    found = np.array(taken(4000, buckets_of(lengths, limits), step=32, epochs=2))
    longest = lengths[found].reshape(-1, 32).max(axis=1)
    padded_to = np.array([min(limit for limit in limits if limit >= most) for most in longest])
    waste = 1 - lengths[found].sum() / (padded_to.sum() * 32)
    # Four equal buckets of a uniform distribution waste (1/8 + 1/8 + 1/8 + 1/8) / 4 of the range
    # on average, 56 of about 331 samples; three borders a window of 64 steps add little.
    assert waste < 0.20
    without = 1 - lengths.mean() / 500
    assert without > 0.4


def test_steps_of_all_lengths_are_spread_over_a_window() -> None:
    """Short records first and long ones last would be a curriculum that nobody asked for."""
    buckets = np.repeat(np.arange(4), 160)
    found = buckets[np.array(taken(640, buckets, step=10, epochs=1))].reshape(64, 10)[:, 0]
    assert set(found[:32].tolist()) == {0, 1, 2, 3}
    assert (np.diff(found) != 0).sum() > 20


def test_windows_and_seeds_have_permutations_of_their_own() -> None:
    buckets = np.arange(128) % 4
    one = taken(128, buckets, step=2, steps=192)
    assert one == taken(128, buckets, step=2, steps=192)
    assert one != taken(128, buckets, step=2, steps=192, seed=4)
    places = np.array(one).reshape(3, 64, 2)
    assert not np.array_equal(buckets[places[0]], buckets[places[1]])
    assert WINDOW_STEPS == 64


def test_one_bucket_only_permutes_the_steps_of_a_window() -> None:
    plain = taken(100, step=4, epochs=4)
    found = taken(100, [0] * 100, step=4, epochs=4)
    steps = [tuple(plain[i : i + 4]) for i in range(0, 400, 4)]
    there = [tuple(found[i : i + 4]) for i in range(0, 400, 4)]
    assert there != steps
    for first in range(0, 100, 64):
        assert Counter(there[first : first + 64]) == Counter(steps[first : first + 64])


def test_any_place_is_known_without_those_before_it() -> None:
    buckets = np.arange(300) % 5
    whole = taken(300, buckets, step=3, epochs=4)
    order = global_order(
        Selection.all_of(300),
        step_records=3,
        seed=3,
        epochs=4,
        buckets=buckets.astype(np.uint8),
    )
    # Windows are kept for a while only, so some of these are made again.
    for place in (1199, 0, 700, 200, 1100, 5, 1198):
        assert order[place] == whole[place]
    assert [order[900:][place] for place in range(5)] == whole[900:905]
    assert [order[1::7][place] for place in range(5)] == whole[1:36:7]


def test_a_shorter_run_agrees_up_to_its_last_window() -> None:
    buckets = np.arange(500) % 3
    long, short = (taken(500, buckets, step=5, steps=steps) for steps in (200, 128))
    assert long[: 128 * 5] == short


def test_unshuffled_records_are_still_put_into_buckets() -> None:
    found = taken(8, [0, 1] * 4, step=2, epochs=1, shuffle=False)
    steps = {tuple(found[i : i + 2]) for i in range(0, 8, 2)}
    assert steps == {(0, 2), (4, 6), (1, 3), (5, 7)}


def test_buckets_need_an_end() -> None:
    with pytest.raises(SpecError, match="an order without an end cannot be put into buckets"):
        taken(8, [0] * 8, step=2)


def test_it_says_what_it_is() -> None:
    order = global_order(
        Selection.all_of(8), step_records=2, seed=0, epochs=1, buckets=np.zeros(8, np.uint8)
    )
    assert isinstance(order, BucketedMapDataset)
    assert str(order) == "BucketedMapDataset(step_records=2)"
