"""The two orders in which records are read, as Grain pipelines over ordinals.

Grain iterates over ordinals, and a whole batch is fetched below it in one call: its own
batched-read push-down is off in Grain 0.2, so a per-record source reads one record at a time.
Shuffling comes before slicing, so the records of every global step are the same for any number
of ranks. No element is ever None: filters were resolved to ordinals beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from signal_batch._grain import grain
from signal_batch.batches import Batch
from signal_batch.bucketing import BucketedMapDataset
from signal_batch.errors import SpecError
from signal_batch.selection import Selection
from signal_batch.shuffling import BlockShuffle, BlockShuffledMapDataset

Fetch = Callable[[npt.NDArray[np.int64]], Any]
Transform = Callable[[Batch], Any]


def batches_in_order(
    selection: Selection,
    fetch: Fetch,
    batch_size: int,
    *,
    threads: int = 1,
    prefetch_batches: int = 2,
) -> grain.IterDataset:
    """Batches of a selection in ordinal order, the last one shorter.

    `threads` batches are read at a time and at most `prefetch_batches` wait to be taken:
    Grain's buffer counts batches, so it is kept small.
    """
    count = -(-len(selection) // batch_size)
    batches = grain.MapDataset.range(count).map(_InOrder(selection, batch_size, fetch))
    return batches.to_iter_dataset(_read_options(threads, prefetch_batches))


def global_order(
    selection: Selection,
    *,
    step_records: int,
    seed: int,
    epochs: int | None = None,
    steps: int | None = None,
    shuffle: bool = True,
    block_shuffle: BlockShuffle | None = None,
    buckets: npt.NDArray[np.uint8] | None = None,
) -> grain.MapDataset:
    """Positions in the selection, in the order in which training takes them.

    A pure function of its arguments: element `n` is known without the ones before it. Every
    record comes once an epoch, shuffled anew each epoch (`shuffle=False`: in ordinal order).
    `steps` global steps of `step_records`, or `epochs` passes less the records that do not fill a
    step at the very end, or with neither without an end. `block_shuffle` respects storage, and
    `buckets` holds the bucket of each position, by which records are reordered within windows
    that may reach over the end of an epoch: see `shuffling` and `bucketing`.

    Raises `SpecError` for numbers out of range, or fewer records in all epochs than a step takes.
    """
    stop = _stop_of(selection, step_records, epochs, steps)
    if stop is not None:
        epochs = -(-stop // len(selection))
    order = grain.MapDataset.range(len(selection))
    if block_shuffle is not None and shuffle:
        order = BlockShuffledMapDataset(order, selection, block_shuffle, seed=seed)
    elif shuffle:
        order = order.shuffle(seed=seed)
    order = order.repeat(epochs)
    if buckets is None:
        return order if stop is None or stop == len(order) else order[:stop]
    if stop is None:
        raise SpecError("an order without an end cannot be put into buckets; give epochs or steps")
    return BucketedMapDataset(order[:stop], buckets, step_records=step_records, seed=seed)


def training_batches(
    selection: Selection,
    fetch: Fetch,
    *,
    batch_size: int,
    seed: int,
    epochs: int | None = None,
    steps: int | None = None,
    cursor: int = 0,
    rank: int = 0,
    world: int = 1,
    transform: Transform | None = None,
    shuffle: bool = True,
    block_shuffle: BlockShuffle | None = None,
    buckets: npt.NDArray[np.uint8] | None = None,
    threads: int = 2,
    prefetch_batches: int = 4,
) -> grain.IterDataset:
    """Batches of the global training order, from a cursor, for one of `world` ranks.

    The order is that of `global_order`. `batch_size` is that of one rank; a global step takes
    `batch_size * world` records, so all ranks take the same number of steps. `cursor` counts
    records of the global order that are already done and must be whole global steps. Each batch
    carries `position` (int64), the place of each record in the global order, which keys whatever
    is random about it: see `rng_at`.

    Raises:
        SpecError: a cursor inside a step, a rank or a number out of range, or fewer records in
            all epochs than a step takes.
    """
    _check_training(batch_size, rank, world, seed)
    step = batch_size * world
    if cursor < 0 or cursor % step:
        raise SpecError(f"cursor {cursor} is not a whole number of global steps of {step} records")
    # Grain's work a record is what limits small records, so it moves bare positions through as
    # few steps as can be, and ordinals and places in the global order are worked out a batch at
    # a time.
    order = global_order(
        selection,
        step_records=step,
        seed=seed,
        epochs=epochs,
        steps=steps,
        shuffle=shuffle,
        block_shuffle=block_shuffle,
        buckets=buckets,
    )
    mine = order[cursor + rank :: world]
    batches = mine.batch(batch_size, batch_fn=_positions)
    fetched = batches.map_with_index(_Shuffled(selection, fetch, batch_size, cursor + rank, world))
    if transform is not None:
        fetched = fetched.map(transform)
    return fetched.to_iter_dataset(_read_options(threads, prefetch_batches))


def rng_at(seed: int, position: int) -> np.random.Generator:
    """The random generator of one place in the global order.

    Keyed by (seed, position) alone, so what is drawn does not depend on the number of workers
    or on where a run resumed.
    """
    return np.random.Generator(np.random.Philox(key=[seed, position]))


@contextmanager
def iterating(dataset: grain.IterDataset) -> Iterator[Iterator[Any]]:
    """One iterator over a pipeline, closed on the way out, whatever happens.

    After an exception a Grain iterator must not be used again: it would skip data silently.
    """
    iterator = iter(dataset)
    try:
        yield iterator
    finally:
        iterator.close()


class _InOrder:
    """Reads the n-th batch of a selection; a class, so that it pickles."""

    def __init__(self, selection: Selection, batch_size: int, fetch: Fetch) -> None:
        self._selection = selection
        self._batch_size = batch_size
        self._fetch = fetch

    def __call__(self, number: int) -> Any:
        first = int(number) * self._batch_size
        return self._fetch(self._selection.slice(first, self._batch_size).ordinals())


class _Shuffled:
    """Reads a batch of positions in the selection, and says where in the global order it is."""

    def __init__(
        self, selection: Selection, fetch: Fetch, batch_size: int, first: int, world: int
    ) -> None:
        self._selection = selection
        self._fetch = fetch
        self._batch_size = batch_size
        self._first = first
        self._world = world

    def __call__(self, number: int, positions: npt.NDArray[np.int64]) -> Batch:
        taken = number * self._batch_size + np.arange(len(positions), dtype=np.int64)
        place = self._first + self._world * taken
        return {**self._fetch(self._selection.ordinals_at(positions)), "position": place}


def _positions(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _read_options(threads: int, prefetch_batches: int) -> grain.ReadOptions:
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch_batches)


def _check_training(batch_size: int, rank: int, world: int, seed: int) -> None:
    if batch_size < 1:
        raise SpecError(f"a batch needs at least one record, not {batch_size}")
    if not 0 <= rank < world:
        raise SpecError(f"rank {rank} is not one of {world} ranks (0 to {world - 1})")
    if not 0 <= seed < 1 << 32:
        raise SpecError(f"seed must be a whole number from 0 to 2**32 - 1, not {seed}")


def _stop_of(selection: Selection, step: int, epochs: int | None, steps: int | None) -> int | None:
    """How many records of the global order are taken in all; None where there is no end."""
    if len(selection) < 1:
        raise SpecError("there are no records to train on")
    if steps is not None and epochs is not None:
        raise SpecError("give epochs or steps, not both")
    if steps is not None:
        if steps < 1:
            raise SpecError("training takes at least one step")
        return steps * step
    if epochs is None:
        return None
    if epochs < 1:
        raise SpecError("training takes at least one epoch")
    total = epochs * len(selection)
    if total < step:
        raise SpecError(f"a global step takes {step} records, but all epochs have {total} in all")
    return total // step * step
