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


def training_batches(
    selection: Selection,
    fetch: Fetch,
    *,
    batch_size: int,
    seed: int,
    epochs: int | None = None,
    cursor: int = 0,
    rank: int = 0,
    world: int = 1,
    transform: Transform | None = None,
    block_shuffle: BlockShuffle | None = None,
    threads: int = 2,
    prefetch_batches: int = 4,
) -> grain.IterDataset:
    """Batches of the global training order, from a cursor, for one of `world` ranks.

    The order is a shuffle of the selection, another one each epoch, and every record comes once
    an epoch; `block_shuffle` gives one that respects storage, see `signal_batch.shuffling`.
    `batch_size` is that of one rank; a global step takes `batch_size * world` records, and
    records that do not fill a global step at the very end are left out, so all ranks take the
    same number of steps. `cursor` counts records of the global order that are already done and
    must be whole global steps. Each batch carries `position` (int64), the place of each record
    in the global order, which keys whatever is random about it: see `rng_at`.

    Raises:
        SpecError: a cursor inside a step, a rank or a number out of range, or fewer records in
            all epochs than a step takes.
    """
    total = None if epochs is None else epochs * len(selection)
    _check_training(batch_size, rank, world, seed)
    step = batch_size * world
    _check_length(selection, total, step, cursor)
    stop = None if total is None else cursor + max(0, total - cursor) // step * step
    # Grain's work a record is what limits small records, so it moves bare positions through as
    # few steps as can be: one slice takes the cursor and the rank, and ordinals and places in
    # the global order are worked out a batch at a time.
    order = grain.MapDataset.range(len(selection))
    shuffled = (
        order.shuffle(seed=seed)
        if block_shuffle is None
        else BlockShuffledMapDataset(order, selection, block_shuffle, seed=seed)
    )
    mine = shuffled.repeat(epochs)[cursor + rank : stop : world]
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


def _check_length(selection: Selection, total: int | None, step: int, cursor: int) -> None:
    if len(selection) < 1:
        raise SpecError("there are no records to train on")
    if total is not None and total < 1:
        raise SpecError("training takes at least one epoch")
    if total is not None and total < step:
        raise SpecError(f"a global step takes {step} records, but all epochs have {total} in all")
    if cursor < 0 or cursor % step:
        raise SpecError(f"cursor {cursor} is not a whole number of global steps of {step} records")
