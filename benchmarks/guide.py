"""The Grain pipeline that the signal-dataset guide documents: one record at a time.

A random-access source opens the dataset lazily under a double-checked lock and returns the arrays
of one record; Grain shuffles, batches and reads with 16 threads, its default.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grain
import signal_dataset as sds

Element = Callable[[int, sds.Record], dict[str, Any]]


class CaptureSource(grain.sources.RandomAccessDataSource):
    """Records of a dataset as dictionaries."""

    def __init__(self, root: str, element: Element) -> None:
        self._root = root
        self._element = element
        self._dataset: sds.Dataset | None = None
        self._lock = threading.Lock()

    def _open(self) -> sds.Dataset:
        if self._dataset is None:
            with self._lock:
                if self._dataset is None:
                    self._dataset = sds.open(self._root)
        return self._dataset

    def __len__(self) -> int:
        return len(self._open())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._element(index, self._open()[index])

    def __repr__(self) -> str:
        return f"CaptureSource({self._root!r})"


def labelled(index: int, record: sds.Record) -> dict[str, Any]:
    """What a training loop wants; the label is metadata, so no annotation row is read."""
    return {"samples": record["samples"].data, "snr_db": record.metadata["snr_db"]}


def identified(index: int, record: sds.Record) -> dict[str, Any]:
    """What an export wants."""
    return {"ordinal": index, "id": record.id, "samples": record["samples"].data}


def batches_of(dataset: grain.MapDataset, batch_size: int) -> grain.IterDataset:
    return dataset.batch(batch_size).to_iter_dataset(
        grain.ReadOptions(num_threads=16, prefetch_buffer_size=500)
    )
