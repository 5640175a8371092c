"""Global shuffle beside block-shuffle, where a shard must be fetched whole and few are kept.

The shards lie on a local disk and are copied before they are read, as those of an object store
are downloaded; only so many copies are kept. What counts is the share of the dataset fetched for
each share of it that is trained on: 1.0 means every shard once an epoch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

SHARDS = 16
KEPT = (16, 4)
_BATCH = 64


def measured(folder: Path, records: int, batches: int) -> list[dict[str, Any]]:
    """Fetches and records/s for each order and number of kept shards.

    Only the first `batches` of an epoch are taken: with few shards kept, each batch of a global
    shuffle fetches almost all of them.
    """
    from signal_batch.synth import synthesize

    root = folder / f"shards-{records}"
    synthesize(
        str(root), records=records, shape=(1, 1024), seed=7, records_per_shard=records // SHARDS
    )
    return [
        {"order": order, "kept": kept} | _one(root, order, kept, batches)
        for kept in KEPT
        for order in ("global", "block-shuffle")
    ]


def _one(root: Path, order: str, kept: int, batches: int) -> dict[str, float]:
    from itertools import islice

    import signal_dataset as sds
    from signal_dataset.storage import EphemeralFileStaging, object_store_for

    from signal_batch import BlockShuffle, Column, Selection, iterating, pin_dataset
    from signal_batch import training_batches as batches_of
    from signal_batch.reading import RecordReader
    from signal_batch.shards import PooledShardStore

    objects = object_store_for(str(root), root_is_directory=True)

    class Counting(EphemeralFileStaging):
        fetches = 0

        def materialize(self, uri: str, generation: int | None) -> int:
            Counting.fetches += 1
            return super().materialize(uri, generation)

    staging = Counting(objects=objects, max_open_shards=kept)
    store = PooledShardStore(staging=staging, capacity=kept)
    reader = RecordReader(sds.open(str(root), shard_store=store), [Column.parse("field:samples")])
    pinned = pin_dataset(str(root))
    quarter = pinned.pin.stored_bytes // 4
    blocks = BlockShuffle.of(pinned, buffer_bytes=quarter) if order != "global" else None
    pipeline = batches_of(
        Selection.all_of(pinned.pin.record_count),
        reader.read,
        batch_size=_BATCH,
        seed=1,
        epochs=1,
        block_shuffle=blocks,
    )
    pinned.close()
    with iterating(pipeline) as taken:
        start = time.perf_counter()
        rows = sum(len(batch["id"]) for batch in islice(taken, batches))
        seconds = time.perf_counter() - start
    store.close()
    trained = rows / pinned.pin.record_count
    return {"fetched": Counting.fetches / SHARDS / trained, "records_per_s": rows / seconds}
