"""What training reads, as `training_batches` hands it out with buckets, blocks, ranks and threads.

The order without buckets is tested with the pipelines in `test_iteration`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from signal_batch.errors import SpecError
from signal_batch.iteration import global_order, iterating, training_batches
from signal_batch.selection import Selection
from signal_batch.shuffling import BlockShuffle

Batch = dict[str, Any]


def echo(ordinals: Any) -> Batch:
    return {"ordinal": ordinals}


def batches(selection: Selection, size: int, **options: Any) -> list[Batch]:
    """All batches of one rank."""
    pipeline = training_batches(selection, echo, batch_size=size, **{"seed": 5, **options})
    with iterating(pipeline) as found:
        return list(found)


def order_of(selection: Selection, step: int, **options: Any) -> list[int]:
    """The positions of the whole global order."""
    order = global_order(selection, step_records=step, **{"seed": 5, **options})
    return [order[place] for place in range(len(order))]


# In Grain a shuffled epoch of less than 65536 records takes about 10 ms, however few they are, so
# examples are of few epochs.
@st.composite
def plans(draw: st.DrawFn) -> tuple[Selection, dict[str, Any]]:
    """Some records and one way to order them; a global step of 4 or 8 records."""
    gaps = draw(st.lists(st.integers(1, 4), min_size=30, max_size=80))
    chosen = np.cumsum(gaps)
    options: dict[str, Any] = {"seed": draw(st.integers(0, 2**32 - 1))}
    step = draw(st.sampled_from([4, 8]))
    if draw(st.booleans()):
        options["steps"] = draw(st.integers(1, 24))
    else:
        options["epochs"] = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["global", "none", "block"]))
    if kind == "none":
        options["shuffle"] = False
    elif kind == "block":
        starts = sorted({0, *draw(st.sets(st.integers(1, int(chosen[-1])), max_size=4))})
        options["block_shuffle"] = BlockShuffle(starts, draw(st.integers(1, 20)))
    if draw(st.booleans()):
        kinds = draw(st.lists(st.integers(0, 3), min_size=len(gaps), max_size=len(gaps)))
        options["buckets"] = np.array(kinds, np.uint8)
    return Selection.of(chosen), options | {"step": step}


def known(plan: tuple[Selection, dict[str, Any]]) -> tuple[Selection, int, dict[str, Any]]:
    selection, options = plan
    return selection, options["step"], {k: v for k, v in options.items() if k != "step"}


@given(plans())
@settings(max_examples=20, deadline=None)
def test_every_record_comes_once_an_epoch(plan: tuple[Selection, dict[str, Any]]) -> None:
    selection, step, options = known(plan)
    buckets = options.pop("buckets", None)
    found = order_of(selection, step, **options)
    everything = range(len(selection))
    epochs, rest = divmod(len(found), len(selection))
    for epoch in range(epochs):
        first = epoch * len(selection)
        assert Counter(found[first : first + len(selection)]) == Counter(everything)
    assert max(Counter(found[len(found) - rest :]).values(), default=1) == 1
    if buckets is not None:
        # Buckets reorder what a window holds, and take nothing away.
        assert Counter(order_of(selection, step, **options, buckets=buckets)) == Counter(found)


@given(plans(), st.sampled_from([1, 2, 4]), st.data())
@settings(max_examples=20, deadline=None)
def test_ranks_interleave_to_the_global_order_from_any_cursor(
    plan: tuple[Selection, dict[str, Any]], world: int, data: st.DataObject
) -> None:
    selection, step, options = known(plan)
    expected = selection.ordinals()[np.array(order_of(selection, step, **options), int)]
    total = len(expected) // step
    done = data.draw(st.integers(0, total), label="steps done")
    threads = data.draw(st.integers(0, 4), label="threads")
    waiting = data.draw(st.sampled_from([1, 3, 16]), label="prefetch")
    ranks = [
        batches(
            selection,
            step // world,
            **options,
            rank=rank,
            world=world,
            cursor=done * step,
            threads=threads,
            prefetch_batches=waiting,
        )
        for rank in range(world)
    ]
    assert [len(rank) for rank in ranks] == [total - done] * world
    for number, parts in enumerate(zip(*ranks, strict=True)):
        first = (done + number) * step
        together = np.stack([part["ordinal"] for part in parts], axis=1).ravel()
        np.testing.assert_array_equal(together, expected[first : first + step])
        places = np.stack([part["position"] for part in parts], axis=1).ravel()
        np.testing.assert_array_equal(places, np.arange(first, first + step))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_change_nothing(threads: int) -> None:
    selection = Selection.of(np.arange(3, 400, 2))
    buckets = (np.arange(len(selection)) % 3).astype(np.uint8)
    options: dict[str, Any] = {"epochs": 3, "buckets": buckets}
    expected = selection.ordinals()[order_of(selection, 6, **options)]
    for waiting in (1, 8):
        found = batches(selection, 6, **options, threads=threads, prefetch_batches=waiting)
        taken = np.concatenate([batch["ordinal"] for batch in found])
        np.testing.assert_array_equal(taken, expected)


@given(
    records=st.integers(50, 120),
    step=st.integers(1, 16),
    epochs=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
@example(records=1, step=3, epochs=4, seed=0)
@example(records=2, step=3, epochs=1, seed=0)
@settings(max_examples=12, deadline=None)
def test_steps_and_epochs_are_two_ways_to_say_where_it_ends(
    records: int, step: int, epochs: int, seed: int
) -> None:
    selection = Selection.all_of(records)
    total = records * epochs // step
    if not total:
        with pytest.raises(SpecError, match=f"{step} records, but all epochs have"):
            order_of(selection, step, epochs=epochs, seed=seed)
    else:
        by_epochs = order_of(selection, step, epochs=epochs, seed=seed)
        assert len(by_epochs) == total * step
        assert order_of(selection, step, steps=total, seed=seed) == by_epochs
    # A run of more steps begins like one of fewer, and may take more records than there are.
    more = order_of(selection, step, steps=total + 3, seed=seed)
    assert len(more) == (total + 3) * step
    assert order_of(selection, step, steps=total + 1, seed=seed) == more[: (total + 1) * step]


def test_without_shuffling_it_is_the_order_of_the_dataset() -> None:
    selection = Selection.of([2, 3, 5, 7, 11])
    found = batches(selection, 2, shuffle=False, steps=6)
    ordinals = np.concatenate([batch["ordinal"] for batch in found]).tolist()
    assert ordinals == [2, 3, 5, 7, 11, 2, 3, 5, 7, 11, 2, 3]
    blocks = BlockShuffle([0, 4], 2)
    same = order_of(selection, 2, shuffle=False, steps=6, block_shuffle=blocks)
    assert selection.ordinals()[same].tolist() == ordinals


def test_each_epoch_and_each_seed_is_shuffled_anew() -> None:
    selection = Selection.all_of(40)
    found = order_of(selection, 8, epochs=2)
    assert found[:40] != found[40:]
    assert found != list(range(40)) * 2
    assert found[:40] != order_of(selection, 8, epochs=1, seed=6)
    assert found[:40] == order_of(selection, 8, epochs=1)


def test_block_shuffle_keeps_to_the_shards() -> None:
    """A block-shuffled order is one of whole shards where the buffer holds a single record."""
    selection = Selection.all_of(30)
    found = order_of(selection, 5, epochs=2, block_shuffle=BlockShuffle([0, 10, 20], 1))
    for epoch in (found[:30], found[30:]):
        shards = [place // 10 for place in epoch]
        assert [shards[i] for i in (0, 10, 20)] == [
            shard for i in (0, 10, 20) for shard in {*shards[i : i + 10]}
        ]
        assert Counter(epoch) == Counter(range(30))
    assert found != order_of(selection, 5, epochs=2)


def test_without_an_end_it_goes_on() -> None:
    order = global_order(Selection.all_of(7), step_records=2, seed=1)
    far = 7 * 10**9
    assert sorted(order[far + place] for place in range(7)) == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "training takes at least one step"),
        ({"steps": -1}, "training takes at least one step"),
        ({"epochs": 0}, "training takes at least one epoch"),
        ({"steps": 2, "epochs": 2}, "give epochs or steps, not both"),
        ({"epochs": 1, "step": 11}, "a global step takes 11 records, but all epochs have 10 in a"),
    ],
)
def test_what_is_no_order(options: dict[str, Any], message: str) -> None:
    step = options.pop("step", 4)
    with pytest.raises(SpecError, match=message):
        order_of(Selection.all_of(10), step, **options)
    with pytest.raises(SpecError, match=message):
        batches(Selection.all_of(10), step, **options)


def test_no_records_are_no_order() -> None:
    with pytest.raises(SpecError, match="there are no records to train on"):
        order_of(Selection([]), 1, steps=1)


@pytest.mark.parametrize("cursor", [1, -8, 9])
def test_a_cursor_is_whole_global_steps(cursor: int) -> None:
    with pytest.raises(SpecError, match=f"cursor {cursor} is not a whole number of global steps"):
        batches(Selection.all_of(20), 4, world=2, epochs=1, cursor=cursor)
