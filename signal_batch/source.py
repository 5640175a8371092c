"""Grain sources over a pin: records one by one, or whole batches below Grain.

Both open the dataset at the first read, once, and pickle to what reopens it, so that they can
be handed to threads, to Grain's worker processes and to other machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from signal_batch.access import access_to
from signal_batch.batches import Batch
from signal_batch.columns import Column, annotation_sets
from signal_batch.errors import SignalBatchError, SpecError
from signal_batch.pins import Pin, PinnedDataset, reopen
from signal_batch.reading import RecordReader
from signal_batch.selection import Selection
from signal_batch.staging import ReadAhead

Tree = dict[str, Any]


class BatchFetcher:
    """Reads batches of a pinned dataset: `fetcher(ordinals) -> {column: array}`.

    The lock guards the one-time open, never a read. Opening goes through the pin and proves that
    it still holds, so a dataset that changed is a `PinMismatchError` at the first read.
    """

    def __init__(self, pin: Pin, columns: Sequence[Column], *, safe_decode: bool = False) -> None:
        missing = set(annotation_sets(tuple(columns))) - {item.name for item in pin.annotations}
        if missing:
            raise SpecError(
                f"columns read annotation sets that are not pinned: {', '.join(sorted(missing))}; "
                "name them when the dataset is pinned"
            )
        self.pin = pin
        self.columns = tuple(columns)
        self.safe_decode = safe_decode
        self._lock = threading.Lock()
        self._opened: tuple[PinnedDataset, RecordReader] | None = None
        self._ahead: ReadAhead | None = None

    def __call__(self, ordinals: npt.ArrayLike) -> Batch:
        """Read records in the order given, duplicates included.

        Returns the columns, each with a leading record axis, and always `ordinal` and `id`.
        """
        wanted = np.asarray(ordinals, dtype=np.int64)
        batch = self.reader.read(wanted)
        ahead = self._ahead
        # After the read: a shard that is needed now has the line to itself.
        if ahead is not None and len(wanted):
            ahead.reached(int(wanted[-1]))
        return batch

    def expect(self, ordinals: npt.NDArray[np.int64]) -> None:
        """Say which records are about to be read, in order, so that shards are fetched ahead.

        Only a hint: what fails here fails again, and is reported, where it is read.
        """
        with suppress(SignalBatchError):
            dataset = self._open()[0].dataset
            samples = any(column.selector.source == "field" for column in self.columns)
            layout = access_to(dataset, self.safe_decode).layout
            self._ahead = ReadAhead(layout, ordinals, dataset.shard_store, samples=samples)

    @property
    def reader(self) -> RecordReader:
        return self._open()[1]

    def _open(self) -> tuple[PinnedDataset, RecordReader]:
        opened = self._opened
        if opened is None:
            with self._lock:
                if self._opened is None:
                    pinned = reopen(self.pin)
                    reader = RecordReader(
                        pinned.dataset, self.columns, safe_decode=self.safe_decode
                    )
                    self._opened = (pinned, reader)
                opened = self._opened
        return opened

    def close(self) -> None:
        """Close the pooled shard readers; the next read opens again."""
        with self._lock:
            opened, self._opened, self._ahead = self._opened, None, None
        if opened is not None:
            opened[0].close()

    def __getstate__(self) -> dict[str, Any]:
        return {"pin": self.pin, "columns": self.columns, "safe_decode": self.safe_decode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_described(self.pin, self.columns)})"


class SDSSource:
    """A Grain random-access source: one record at a time, as a tree of arrays.

    Elements are `{column: array}` with `id` and `ordinal`, arrays without a record axis, passed
    through `adapt` if given. `repr` carries the fingerprint and the annotation digests and no
    address, so that Grain's `DataLoader` accepts a checkpoint of the same pin in any process
    and refuses one of another.

    For speed prefer the batched pipelines of `signal_batch.iteration`, which read a whole batch
    at a time; this source is for pipelines of your own.
    """

    def __init__(
        self,
        pin: Pin,
        columns: Sequence[Column],
        *,
        selection: Selection | None = None,
        adapt: Callable[[Tree], Any] | None = None,
        safe_decode: bool = False,
    ) -> None:
        self._fetch = BatchFetcher(pin, columns, safe_decode=safe_decode)
        everything = Selection.all_of(pin.record_count)
        self._selection = everything if selection is None else selection
        self._adapt = adapt

    @property
    def pin(self) -> Pin:
        return self._fetch.pin

    def __len__(self) -> int:
        return len(self._selection)

    def __getitem__(self, index: int) -> Any:
        ordinal = self._selection.ordinal_at(int(index))
        tree: Tree = {name: values[0] for name, values in self._fetch([ordinal]).items()}
        return tree if self._adapt is None else self._adapt(tree)

    def close(self) -> None:
        self._fetch.close()

    def __repr__(self) -> str:
        name = getattr(self._adapt, "__qualname__", type(self._adapt).__qualname__)
        adapt = "" if self._adapt is None else f", adapt={name}"
        return (
            f"SDSSource({_described(self.pin, self._fetch.columns)}, "
            f"selection={self._selection.digest()[:16]}, records={len(self)}{adapt})"
        )


def _described(pin: Pin, columns: Sequence[Column]) -> str:
    sets = {item.name: item.root_sha256[:16] for item in pin.annotations}
    names = [str(column) for column in columns]
    return f"fingerprint={pin.fingerprint}, annotations={sets}, columns={names}"
