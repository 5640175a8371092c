"""Both orders against plain arithmetic: every record once, any number of ranks, any restart."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import signal_dataset as sds
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from signal_batch.columns import Column
from signal_batch.errors import SpecError
from signal_batch.iteration import (
    batches_in_order,
    iterating,
    rng_at,
    training_batches,
)
from signal_batch.pins import pin_dataset
from signal_batch.selection import Selection
from signal_batch.source import BatchFetcher

Batch = dict[str, Any]


def echo(ordinals: NDArray[np.int64]) -> Batch:
    """Stands in for reading: a batch that says which records it is of."""
    assert ordinals.dtype == np.int64
    return {"ordinal": ordinals}


def taken(pipeline: Iterable[Batch], name: str = "ordinal", count: int | None = None) -> list[Any]:
    """One column of the first batches, a list for each batch."""
    with iterating(pipeline) as batches:  # type: ignore[arg-type]
        return [batch[name].tolist() for batch in islice(batches, count)]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [item for batch in batches for item in batch]


def trained(records: int | Selection, **options: Any) -> list[list[int]]:
    selection = Selection.all_of(records) if isinstance(records, int) else records
    return taken(training_batches(selection, echo, **{"seed": 11, **options}))


# --- in order ------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 99), unique=True, max_size=30).map(sorted),
    st.integers(1, 12),
)
@settings(max_examples=25)
def test_batches_in_order_are_those_of_a_loop(ordinals: list[int], size: int) -> None:
    found = taken(batches_in_order(Selection.of(ordinals), echo, size))
    assert found == [ordinals[i : i + size] for i in range(0, len(ordinals), size)]


@pytest.mark.parametrize(("threads", "prefetch"), [(0, 0), (1, 1), (3, 2), (4, 8)])
def test_threads_do_not_change_the_order(threads: int, prefetch: int) -> None:
    pipeline = batches_in_order(
        Selection.all_of(50), echo, 3, threads=threads, prefetch_batches=prefetch
    )
    assert flat(taken(pipeline)) == list(range(50))


def test_no_more_batches_are_read_ahead_than_asked() -> None:
    read, caught_up = [], threading.Event()

    def fetch(ordinals: NDArray[np.int64]) -> Batch:
        read.append(len(ordinals))
        if len(read) >= 3:
            caught_up.set()
        return {"ordinal": ordinals}

    with iterating(batches_in_order(Selection.all_of(100), fetch, 2, prefetch_batches=2)) as it:
        next(it)
        caught_up.wait(5)
        threading.Event().wait(0.1)
        assert len(read) <= 1 + 2 + 1


def test_batches_hold_the_records_themselves(iq_root: Path) -> None:
    pin = pin_dataset(str(iq_root)).pin
    columns = (Column.parse("field:samples"), Column.parse("metadata:snr_db"))
    fetch = BatchFetcher(pin, columns)
    dataset = sds.open(str(iq_root))
    selection = Selection.of([1, 2, 39, 40, 41, 117, 199])
    with iterating(batches_in_order(selection, fetch, 3, threads=2)) as batches:
        found = list(batches)
    fetch.close()
    assert [batch["ordinal"].tolist() for batch in found] == [[1, 2, 39], [40, 41, 117], [199]]
    for batch in found:
        records = [dataset[ordinal] for ordinal in batch["ordinal"].tolist()]
        assert batch["id"].tolist() == [record.id for record in records]
        np.testing.assert_array_equal(batch["samples"], [r["samples"].data for r in records])
        np.testing.assert_array_equal(batch["snr_db"], [r.metadata["snr_db"] for r in records])


# --- the training order --------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("threads", [0, 2])
def test_every_record_comes_once_an_epoch(world: int, threads: int) -> None:
    records, epochs, size = 24, 3, 4
    ranks = [
        trained(records, batch_size=size, epochs=epochs, rank=rank, world=world, threads=threads)
        for rank in range(world)
    ]
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == records * epochs // (size * world)
    # Batches of ranks interleave record by record, so the global order can be put together.
    order = [rank[i] for step in steps for i in range(size) for rank in step]
    for epoch in range(epochs):
        assert Counter(order[epoch * records : (epoch + 1) * records]) == Counter(range(records))
    assert order[:records] != order[records : 2 * records]
    assert order[:records] != list(range(records))


def test_the_records_of_a_global_step_are_the_same_for_any_number_of_ranks() -> None:
    selection = Selection.of(range(3, 200, 5))
    whole = trained(selection, batch_size=12, epochs=2)
    for world in (2, 3, 4, 6):
        ranks = [
            trained(selection, batch_size=12 // world, epochs=2, rank=rank, world=world)
            for rank in range(world)
        ]
        steps = [sorted(flat(step)) for step in zip(*ranks, strict=True)]
        assert steps == [sorted(step) for step in whole]


@given(
    records=st.integers(1, 40),
    world=st.integers(1, 5),
    size=st.integers(1, 6),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_ranks_share_the_global_order_without_overlap_or_gap(
    records: int, world: int, size: int, epochs: int, seed: int
) -> None:
    total, step = records * epochs, world * size
    options: dict[str, Any] = {"batch_size": size, "seed": seed, "epochs": epochs, "threads": 0}
    if total < step:
        with pytest.raises(SpecError, match=f"takes {step} records, but all epochs have {total}"):
            trained(records, **options, world=world)
        return
    positions, ordinals = [], []
    for rank in range(world):
        pipeline = training_batches(
            Selection.all_of(records), echo, **options, rank=rank, world=world
        )
        with iterating(pipeline) as batches:
            found = list(batches)
        assert [len(batch["position"]) for batch in found] == [size] * (total // step)
        positions += flat(batch["position"].tolist() for batch in found)
        ordinals += flat(batch["ordinal"].tolist() for batch in found)
    assert sorted(positions) == list(range(total // step * step))
    at = dict(zip(positions, ordinals, strict=True))
    for epoch in range(len(at) // records):
        order = [at[position] for position in range(epoch * records, (epoch + 1) * records)]
        assert sorted(order) == list(range(records))


def test_positions_count_the_global_order() -> None:
    for rank in range(3):
        pipeline = training_batches(
            Selection.all_of(30),
            echo,
            batch_size=2,
            seed=5,
            epochs=2,
            cursor=12,
            rank=rank,
            world=3,
        )
        found = taken(pipeline, "position")
        assert found == [[first + rank, first + 3 + rank] for first in range(12, 60, 6)]
    with iterating(training_batches(Selection.all_of(4), echo, batch_size=4, seed=5)) as batches:
        assert next(batches)["position"].dtype == np.int64


def test_the_order_follows_from_the_seed() -> None:
    assert trained(50, batch_size=10, epochs=1) == trained(50, batch_size=10, epochs=1)
    assert trained(50, batch_size=10, epochs=1) != trained(50, batch_size=10, epochs=1, seed=12)
    assert flat(trained(50, batch_size=10, epochs=1)) == flat(trained(50, batch_size=2, epochs=1))


def test_another_selection_of_the_same_size_is_shuffled_alike() -> None:
    plain = flat(trained(20, batch_size=5, epochs=1))
    chosen = np.arange(7, 47, 2)
    assert flat(trained(Selection.of(chosen), batch_size=5, epochs=1)) == chosen[plain].tolist()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 5, 11, 12])
def test_a_cursor_resumes_with_exactly_the_batches_that_are_left(world: int, steps: int) -> None:
    size = 3
    for rank in range(world):
        options: dict[str, Any] = {"batch_size": size, "epochs": 2, "rank": rank, "world": world}
        whole = trained(18 * world, **options)
        assert len(whole) == 12
        resumed = trained(18 * world, **options, cursor=steps * size * world)
        assert resumed == whole[steps:]


def test_a_run_can_go_on_with_other_ranks() -> None:
    """A cursor is a place in the global order, whoever reads it."""
    whole = trained(24, batch_size=6, epochs=1)
    ranks = [trained(24, batch_size=2, epochs=1, rank=r, world=3, cursor=12) for r in range(3)]
    assert [sorted(flat(step)) for step in zip(*ranks, strict=True)] == list(map(sorted, whole[2:]))


def test_without_epochs_training_does_not_end() -> None:
    def order(count: int, cursor: int = 0) -> list[int]:
        pipeline = training_batches(
            Selection.all_of(30), echo, batch_size=6, seed=1, cursor=cursor, threads=0
        )
        return flat(taken(pipeline, count=count))

    whole = order(20)
    for first in range(0, 120, 30):
        assert sorted(whole[first : first + 30]) == list(range(30))
    assert order(6, cursor=84) == whole[84:]
    assert len(order(2, cursor=6 * 10**12)) == 12


def test_a_transform_is_given_the_batch_with_its_positions() -> None:
    def augment(batch: Batch) -> Batch:
        noise = [rng_at(3, int(position)).random() for position in batch["position"]]
        return {**batch, "noise": np.array(noise)}

    def noise_at(**options: Any) -> dict[int, float]:
        found: dict[int, float] = {}
        pipeline = training_batches(
            Selection.all_of(24), echo, seed=1, epochs=1, transform=augment, **options
        )
        with iterating(pipeline) as batches:
            for batch in batches:
                places, noise = batch["position"].tolist(), batch["noise"].tolist()
                found.update(zip(places, noise, strict=True))
        return found

    whole = noise_at(batch_size=6)
    assert len(set(whole.values())) == 24
    parts = [noise_at(batch_size=3, rank=rank, world=2, threads=rank) for rank in range(2)]
    assert parts[0] | parts[1] == whole
    assert noise_at(batch_size=4, cursor=12) == {p: v for p, v in whole.items() if p >= 12}


def test_random_numbers_are_keyed_by_seed_and_position_alone() -> None:
    expected = np.random.Generator(np.random.Philox(key=[5, 17])).random(4)
    rng_at(5, 16).random(100)
    np.testing.assert_array_equal(rng_at(5, 17).random(4), expected)
    draws = {tuple(rng_at(seed, place).random(2)) for seed in range(20) for place in range(20)}
    assert len(draws) == 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world": 2}, r"rank 2 is not one of 2 ranks \(0 to 1\)"),
        ({"rank": -1}, "rank -1 is not one of 1 ranks"),
        ({"world": 0}, "rank 0 is not one of 0 ranks"),
        ({"cursor": 5}, "cursor 5 is not a whole number of global steps of 4 records"),
        ({"cursor": 4, "world": 2}, "cursor 4 is not a whole number of global steps of 8 records"),
        ({"cursor": -4}, "cursor -4 is not"),
        ({"batch_size": 0}, "a batch needs at least one record, not 0"),
        ({"batch_size": 21}, "takes 21 records, but all epochs have 20 in all"),
        ({"batch_size": 11, "world": 2}, "takes 22 records, but all epochs have 20 in all"),
        ({"epochs": 0}, "at least one epoch"),
        ({"epochs": -1}, "at least one epoch"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2"),
        ({"seed": 2**32}, "seed must be a whole number from 0 to 2"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trained(10, **{"batch_size": 4, "epochs": 2, **options})


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(SpecError, match="no records to train on"):
        trained(0, batch_size=4)


# --- iterators -----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("order", ["in order", "training"])
def test_the_state_of_an_iterator_restores_in_the_middle(order: str, threads: int) -> None:
    def pipeline() -> Any:
        if order == "in order":
            return batches_in_order(Selection.all_of(40), echo, 3, threads=threads)
        return training_batches(
            Selection.all_of(20), echo, batch_size=3, seed=2, epochs=2, threads=threads
        )

    whole = taken(pipeline())
    with iterating(pipeline()) as batches:
        for _ in range(5):
            next(batches)
        state = json.loads(json.dumps(batches.get_state()))  # type: ignore[attr-defined]
        rest = [batch["ordinal"].tolist() for batch in batches]
    with iterating(pipeline()) as batches:
        batches.set_state(state)  # type: ignore[attr-defined]
        assert [batch["ordinal"].tolist() for batch in batches] == rest == whole[5:]


class _Closes:
    """A pipeline of which one sees whether its iterator was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self) -> _Closes:
        return self

    def __next__(self) -> int:
        return 1

    def close(self) -> None:
        self.closed += 1


def test_an_iterator_is_closed_whatever_happens() -> None:
    calm, failing, stopped = _Closes(), _Closes(), _Closes()
    with iterating(calm) as batches:  # type: ignore[arg-type]
        assert next(batches) == 1
    with pytest.raises(ZeroDivisionError), iterating(failing) as batches:  # type: ignore[arg-type]
        next(batches) / 0
    with pytest.raises(KeyboardInterrupt), iterating(stopped):  # type: ignore[arg-type]
        raise KeyboardInterrupt
    assert (calm.closed, failing.closed, stopped.closed) == (1, 1, 1)


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_reading_comes_out_as_it_is_and_leaves_no_thread(threads: int) -> None:
    def fetch(ordinals: NDArray[np.int64]) -> Batch:
        if 12 in ordinals:
            raise SpecError("record 12")
        return {"ordinal": ordinals}

    before = threading.active_count()
    pipeline = batches_in_order(Selection.all_of(40), fetch, 5, threads=threads)
    seen = []
    with pytest.raises(SpecError, match="record 12"), iterating(pipeline) as batches:
        seen += [batch["ordinal"].tolist() for batch in batches]
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and threading.active_count() > before:
            thread.join(2)
    assert threading.active_count() <= before


def test_pipelines_over_a_dataset_pickle(iq_root: Path) -> None:
    """Grain hands its worker processes the pipeline, by cloudpickle."""
    fetch = BatchFetcher(pin_dataset(str(iq_root)).pin, (Column.parse("metadata:snr_db"),))
    selection = Selection.all_of(200)
    pipeline = training_batches(selection, fetch, batch_size=50, seed=1, epochs=1)
    whole = taken(pipeline, "snr_db")
    copy = cloudpickle.loads(cloudpickle.dumps(pipeline))
    assert taken(copy, "snr_db") == whole
    fetch.close()


def test_importing_is_silent_and_leaves_logging_alone() -> None:
    code = (
        "import logging, warnings\n"
        "before = list(logging.root.handlers), logging.root.level, logging.raiseExceptions\n"
        "import signal_batch\n"
        "after = list(logging.root.handlers), logging.root.level, logging.raiseExceptions\n"
        "assert before == after == ([], logging.WARNING, True), (before, after)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
