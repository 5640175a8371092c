"""Loading batches of samples and a label: the contenders.

Each is a context manager over a task that gives `batches(count)`: an iterator over batches of
`count` records in all, going on with the next epoch where the dataset ends. A batch is
(samples, snr_db), or a list of encoded records for those that read bytes alone. What a contender
needs is imported inside it, so that its memory is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks.settings import BATCH, SEED

Batches = Callable[[int], Iterator[Any]]
Task = dict[str, Any]
_CHUNK = 256


@contextmanager
def _guide(task: Task) -> Iterator[Batches]:
    """The documented per-record pipeline, shuffled."""
    import grain

    from benchmarks.guide import CaptureSource, batches_of, labelled

    source = CaptureSource(task["dataset"], labelled)
    shuffled = grain.MapDataset.source(source).shuffle(SEED).repeat()

    def batches(count: int) -> Iterator[Any]:
        for batch in batches_of(shuffled[:count], BATCH):
            yield batch["samples"], batch["snr_db"]

    yield batches


@contextmanager
def _getitems(task: Task) -> Iterator[Batches]:
    """The same order, a batch at a time through the library's `__getitems__`."""
    import grain
    import numpy as np
    import signal_dataset as sds

    dataset = sds.open(task["dataset"])
    order = grain.MapDataset.range(len(dataset)).shuffle(SEED).repeat()

    def batches(count: int) -> Iterator[Any]:
        for ordinals in _chunks((int(order[i]) for i in range(count)), BATCH):
            records = dataset.__getitems__(ordinals)
            samples = np.stack([record["samples"].data for record in records])
            yield samples, np.array([record.metadata["snr_db"] for record in records])

    yield batches


@contextmanager
def _training_batches(task: Task) -> Iterator[Batches]:
    """signal_batch: whole batches below Grain."""
    from signal_batch import BatchFetcher, Column, Selection, pin_dataset, training_batches
    from signal_batch.iteration import iterating

    pin = pin_dataset(task["dataset"]).pin
    columns = [Column.parse("field:samples"), Column.parse("metadata:snr_db:float32")]
    fetch = BatchFetcher(pin, columns)
    order = training_batches(Selection.all_of(pin.record_count), fetch, batch_size=BATCH, seed=SEED)

    def batches(count: int) -> Iterator[Any]:
        with iterating(order) as iterator:
            for batch in itertools.islice(iterator, count // BATCH):
                yield batch["samples"], batch["snr_db"]

    yield batches
    fetch.close()


@contextmanager
def _iter_records(task: Task) -> Iterator[Batches]:
    """The library's own sequential reading, decoded, stacked."""
    import numpy as np
    import signal_dataset as sds

    dataset = sds.open(task["dataset"])

    def batches(count: int) -> Iterator[Any]:
        endless = itertools.chain.from_iterable(dataset.iter_records() for _ in itertools.count())
        for records in _chunks(itertools.islice(endless, count), BATCH):
            samples = np.stack([record["samples"].data for record in records])
            yield samples, np.array([record.metadata["snr_db"] for record in records])

    yield batches


@contextmanager
def _raw_in_order(task: Task) -> Iterator[Batches]:
    """Encoded records only: what the shard reader gives, 256 neighbours at a time."""
    with _raw_shards(task) as (read, total):

        def batches(count: int) -> Iterator[Any]:
            for chunk in _chunks((i % total for i in range(count)), _CHUNK):
                yield read(chunk)

        yield batches


@contextmanager
def _raw_shuffled(task: Task) -> Iterator[Batches]:
    """Encoded records only, in the shuffled order of the others."""
    import grain

    with _raw_shards(task) as (read, total):
        order = grain.MapDataset.range(total).shuffle(SEED).repeat()

        def batches(count: int) -> Iterator[Any]:
            for chunk in _chunks((int(order[i]) for i in range(count)), BATCH):
                yield read(chunk)

        yield batches


@contextmanager
def _raw_shards(task: Task) -> Iterator[tuple[Callable[[list[int]], list[bytes]], int]]:
    """A function that reads encoded records by ordinal, and how many there are."""
    from benchmarks.raw import RawShards

    with RawShards(task["dataset"]) as shards:
        yield shards.read, len(shards)


def _chunks(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


LOADERS: dict[str, Callable[[Task], AbstractContextManager[Batches]]] = {
    "guide": _guide,
    "getitems": _getitems,
    "training_batches": _training_batches,
    "raw shuffled": _raw_shuffled,
    "iter_records": _iter_records,
    "raw in order": _raw_in_order,
}
#: Contenders that go record by record and are given fewer of them.
SLOW = frozenset(("guide", "getitems", "iter_records"))
#: Contenders that do not shuffle.
IN_ORDER = frozenset(("iter_records", "raw in order"))
