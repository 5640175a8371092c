"""Block-shuffle: an order for training that respects how records are stored.

A global shuffle jumps between all shards of a dataset. That is the better shuffle, and the right
one where any record is as near as any other: on a local disk, or when all shards fit in the
machine's shard cache. Where a shard must be fetched whole before one record of it can be read, it
fetches every shard over and over. Block-shuffle takes shards in a random order and shuffles
records within a buffer of a bounded size that slides over them in steps, so each shard is needed
during one stretch of an epoch only.

The order is a pure function of (seed, epoch, position): deterministic, another one each epoch,
each record once an epoch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from signal_batch._grain import grain
from signal_batch.layout import DatasetLayout
from signal_batch.pins import PinnedDataset
from signal_batch.selection import Selection

Ints = npt.NDArray[np.int64]
BUFFER_BYTES = 512 << 20


class BlockShuffle:
    """Where shards begin, and how many records are shuffled among each other.

    `starts` are the first ordinals of the shards, ascending. A buffer of less than two average
    shards mixes little: records of one shard then stay close to each other.
    """

    def __init__(self, starts: npt.ArrayLike, buffer_records: int) -> None:
        self.starts = np.asarray(starts, dtype=np.int64)
        if buffer_records < 1:
            raise ValueError("a shuffle buffer holds at least one record")
        if self.starts.size == 0 or (np.diff(self.starts) <= 0).any():
            raise ValueError("shard starts must be ascending")
        self.buffer_records = buffer_records

    @classmethod
    def of(cls, pinned: PinnedDataset, *, buffer_bytes: int = BUFFER_BYTES) -> BlockShuffle:
        """For a pinned dataset: its shards, and a buffer of about so many stored bytes."""
        table = DatasetLayout(pinned.dataset).table()
        # Entries of a reference dataset that lie in one shard, side by side, are one block.
        new = np.diff(table["shard"], prepend=-1) != 0
        starts = table["first_ordinal"][new & (table["record_count"] > 0)]
        return cls(starts, max(1, int(buffer_bytes // pinned.pin.record_bytes)))


class BlockShuffledMapDataset(grain.MapDataset):  # type: ignore[misc]
    """A Grain dataset that puts its parent's elements in block-shuffled order.

    The parent has one element for each record of `selection`, in its order.
    """

    def __init__(
        self, parent: grain.MapDataset, selection: Selection, blocks: BlockShuffle, *, seed: int
    ) -> None:
        super().__init__(parent)
        self._bounds = _bounds_in(selection, blocks.starts)
        self._buffer = blocks.buffer_records
        self._seed = seed
        self._orders: dict[int, tuple[Ints, Ints]] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: int | slice) -> object:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, position = divmod(index, len(self))
        return self._parent[epoch * len(self) + self._shuffled(epoch, position)]

    def __str__(self) -> str:
        return f"BlockShuffledMapDataset(buffer_records={self._buffer})"

    def _shuffled(self, epoch: int, position: int) -> int:
        window, offset = divmod(position, self._buffer)
        first = window * self._buffer
        size = min(self._buffer, len(self) - first)
        place = first + int(_permutation(self._seed, epoch, window + 1, size)[offset])
        return self._in_shard_order(epoch, place)

    def _in_shard_order(self, epoch: int, place: int) -> int:
        """The position in the selection that comes at `place` when shards come shuffled."""
        starts, ends = self._shard_order(epoch)
        turn = int(np.searchsorted(ends, place, side="right"))
        return int(starts[turn]) + place - (int(ends[turn - 1]) if turn else 0)

    def _shard_order(self, epoch: int) -> tuple[Ints, Ints]:
        """Where the shards of an epoch begin in the selection, in its order, and their ends."""
        known = self._orders.get(epoch)
        if known is None:
            sizes = np.diff(self._bounds)
            order = np.random.default_rng([self._seed, epoch, 0]).permutation(len(sizes))
            known = (self._bounds[order], np.cumsum(sizes[order]))
            # Threads may do this twice; they come to the same result.
            self._orders = {epoch: known}
        return known


def _bounds_in(selection: Selection, starts: Ints) -> Ints:
    """Positions of the selection at which another shard begins, with its end; (shards + 1,)."""
    first, stop = selection.runs[:, 0], selection.runs[:, 1]
    before = np.concatenate(([0], np.cumsum(stop - first)))
    run = np.searchsorted(stop, starts, side="right")
    inside = np.zeros(len(starts), np.int64)
    within = run < len(first)
    inside[within] = np.maximum(0, starts[within] - first[run[within]])
    bounds = np.unique(np.concatenate((before[run] + inside, [len(selection)])))
    return np.unique(np.concatenate(([0], bounds)))


@lru_cache(maxsize=8)  # the window that each reading thread is in
def _permutation(seed: int, epoch: int, stream: int, size: int) -> Ints:
    return np.random.default_rng([seed, epoch, stream]).permutation(size)
