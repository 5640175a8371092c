"""Batches of records of similar length, out of an order that is already shuffled.

Padding wastes work, and a step is compiled once for each length it is given. So records are
sorted into a few buckets of length within windows of the global order, cut into steps, and the
steps of a window put into a random order. The result is a pure function of (seed, order), and each
record stays within its window: what a step saw does not depend on ranks or on where a run resumed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from signal_batch._grain import grain
from signal_batch.batches import Ints

#: Steps among which records are sorted; more make purer buckets and a coarser shuffle.
WINDOW_STEPS = 64
#: Sets the permutation of a window apart from whatever else is drawn with the same seed.
_STREAM = 0x6275636B
_KEPT_WINDOWS = 3


def buckets_of(lengths: npt.ArrayLike, limits: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """The bucket of each length: the first whose limit holds it; uint8, shape of `lengths`."""
    return np.searchsorted(np.asarray(limits), np.asarray(lengths), side="left").astype(np.uint8)


def equal_limits(lengths: npt.ArrayLike, longest: int, count: int = 4) -> tuple[int, ...]:
    """Up to `count` limits that divide `lengths` into buckets of about equal counts."""
    shares = np.arange(1, count) / count
    inner = np.quantile(np.asarray(lengths), shares, method="inverted_cdf") if count > 1 else []
    return tuple(sorted({*(int(value) for value in inner), longest}))


class BucketedMapDataset(grain.MapDataset):  # type: ignore[misc]
    """A Grain dataset that reorders its parent so that each step is of one bucket, mostly.

    The parent's elements are positions in a selection, `buckets` their buckets (one a position),
    `step_records` the records of a global step, of which the parent has a whole number.
    """

    def __init__(
        self,
        parent: grain.MapDataset,
        buckets: npt.NDArray[np.uint8],
        *,
        step_records: int,
        seed: int,
    ) -> None:
        super().__init__(parent)
        self._buckets = buckets
        self._step = step_records
        self._window = step_records * WINDOW_STEPS
        self._seed = seed
        self._orders: dict[int, Ints] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: int | slice) -> object:
        if isinstance(index, slice):
            return self.slice(index)
        window, offset = divmod(index, self._window)
        return int(self._order(window)[offset])

    def __str__(self) -> str:
        return f"BucketedMapDataset(step_records={self._step})"

    def _order(self, window: int) -> Ints:
        """The positions of a window, in the order in which steps take them."""
        known = self._orders.get(window)
        if known is None:
            first = window * self._window
            places = range(first, min(first + self._window, len(self)))
            positions = np.array([self._parent[place] for place in places], np.int64)
            by_length = positions[np.argsort(self._buckets[positions], kind="stable")]
            steps = by_length.reshape(-1, self._step)
            rng = np.random.default_rng([self._seed, _STREAM, window])
            known = steps[rng.permutation(len(steps))].ravel()
            # Threads may do this twice; they come to the same result.
            kept = dict(list(self._orders.items())[1 - _KEPT_WINDOWS :])
            self._orders = {**kept, window: known}
        return known
