"""Which shard, and which index in it, each ordinal of a dataset is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import signal_dataset as sds
from signal_dataset.dataset.layout import ShardEntry
from signal_dataset.storage import is_absolute_uri
from signal_dataset.storage.paths import join_uri
from signal_dataset.storage.reference import ObjectReference

from signal_batch.batches import Ints
from signal_batch.failures import patiently


class StoredObject(NamedTuple):
    """A shard object: `owned` unless it lies in the dataset that a reference dataset names."""

    uri: str
    generation: int | None
    stored_bytes: int
    owned: bool

    @classmethod
    def of(cls, root: str, reference: ObjectReference) -> StoredObject:
        absolute = is_absolute_uri(reference.path)
        uri = reference.path if absolute else join_uri(root, reference.path)
        return cls(uri, reference.generation, reference.stored_bytes, not absolute)


class Shard(NamedTuple):
    """A pair of aligned shard objects."""

    data: StoredObject
    metadata: StoredObject


class _Page(NamedTuple):
    """One manifest as arrays: per entry its first ordinal, size, shard and chosen indices."""

    first: Ints
    records: Ints
    shard: Ints
    offset: Ints
    chosen: Ints


class DatasetLayout:
    """Which shard, and which index in it, each ordinal of a dataset is.

    Manifest pages are turned into arrays when an ordinal on them is first asked for. A reference
    dataset has one entry a record; entries that name the same objects share one `Shard`.
    """

    def __init__(self, dataset: sds.Dataset) -> None:
        self._root = dataset.root
        self._index = dataset._index
        self._manifests = dataset._index.snapshot.manifests
        self._starts = np.array([m.first_ordinal for m in self._manifests], np.int64)
        self._pages: dict[int, _Page] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._size = len(dataset)
        self.shards: list[Shard] = []

    def __len__(self) -> int:
        return self._size

    def locate(self, ordinals: Ints) -> tuple[Ints, Ints]:
        """Number of the shard in `shards` and index within it, for each ordinal.

        Raises `IndexError` for an ordinal outside the dataset.
        """
        check_ordinals(ordinals, self._size)
        page_of = np.searchsorted(self._starts, ordinals, "right") - 1
        shard, local = np.empty_like(ordinals), np.empty_like(ordinals)
        for number in np.unique(page_of).tolist():
            here = page_of == number
            shard[here], local[here] = _locate_on_page(self._page(number), ordinals[here])
        return shard, local

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """All manifest entries as columns: ordinals, record counts, and the objects' sizes."""
        pages = [self._page(number) for number in range(len(self._manifests))]
        numbers = np.concatenate([np.empty(0, np.int64), *(page.shard for page in pages)])
        data = np.array([shard.data.stored_bytes for shard in self.shards], np.int64)
        metadata = np.array([shard.metadata.stored_bytes for shard in self.shards], np.int64)
        return {
            "first_ordinal": np.concatenate([numbers[:0], *(page.first for page in pages)]),
            "record_count": np.concatenate([numbers[:0], *(page.records for page in pages)]),
            "shard": numbers,
            "data_bytes": data[numbers],
            "metadata_bytes": metadata[numbers],
        }

    def _page(self, number: int) -> _Page:
        page = self._pages.get(number)
        if page is None:
            reference = self._manifests[number]
            uri = StoredObject.of(self._root, reference.object).uri
            manifest = patiently(lambda: self._index._manifest(reference), uri)
            with self._lock:
                page = self._pages.setdefault(number, self._arrays(manifest.shards))
        return page

    def _arrays(self, entries: Sequence[ShardEntry]) -> _Page:
        first = np.array([entry.first_ordinal for entry in entries], np.int64)
        records = np.array([entry.record_count for entry in entries], np.int64)
        shard = np.array([self._number(entry) for entry in entries], np.int64)
        offset = np.full(len(entries), -1, np.int64)
        chosen: list[int] = []
        for position, entry in enumerate(entries):
            if entry.record_indices is not None:
                offset[position] = len(chosen)
                chosen.extend(entry.record_indices)
        return _Page(first, records, shard, offset, np.array(chosen, np.int64))

    def _number(self, entry: ShardEntry) -> int:
        key = (entry.data.path, entry.metadata.path)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.shards)
            data = StoredObject.of(self._root, entry.data)
            self.shards.append(Shard(data, StoredObject.of(self._root, entry.metadata)))
        return number


def _locate_on_page(page: _Page, ordinals: Ints) -> tuple[Ints, Ints]:
    # Entries without records share a first ordinal with the entry after them; "right" skips them.
    entry = np.searchsorted(page.first, ordinals, "right") - 1
    local = ordinals - page.first[entry]
    offset = page.offset[entry]
    picked = offset >= 0
    if picked.any():
        local[picked] = page.chosen[offset[picked] + local[picked]]
    return page.shard[entry], local


def check_ordinals(ordinals: Ints, size: int) -> None:
    """Raise `IndexError` naming the first ordinal that a dataset of `size` records lacks."""
    outside = (ordinals < 0) | (ordinals >= size)
    if outside.any():
        raise IndexError(f"ordinal {ordinals[outside][0]} is outside this dataset of {size}")
