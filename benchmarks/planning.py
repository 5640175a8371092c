"""Planning a dataset of which only the manifest exists, so that no sample can be touched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.data import manifest_only

_LOCATED = 1_000_000


def measured(folder: Path, records: int, shards: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of each step of planning and the peak memory, each round in a process of its own."""
    root = manifest_only(folder, records, shards)
    return [measure.ask({"kind": "plan", "dataset": str(root)}) for _ in range(rounds)]


def plan_steps(task: dict[str, Any]) -> dict[str, float]:
    """The steps of `signal_batch.planning` that read no record, timed one after another."""
    import numpy as np

    from signal_batch import Selection, pin_dataset
    from signal_batch.layout import DatasetLayout
    from signal_batch.plan import group_into_shards, plan_parts, rows_a_part

    seconds: dict[str, float] = {}
    mark = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal mark
        now = time.perf_counter()
        seconds[step] = now - mark
        mark = now

    pinned = pin_dataset(task["dataset"])
    lap("pin")
    selection = Selection.all_of(pinned.pin.record_count)
    selection.digest()
    lap("select")
    record_bytes = pinned.pin.stored_bytes / pinned.pin.record_count
    rows = rows_a_part(
        selected=len(selection),
        part_bytes=128 << 20,
        row_bytes=1_048,
        record_bytes=record_bytes,
        batch_rows=256,
    )
    parts = plan_parts(selection, rows)
    shards = group_into_shards(parts, 2, record_bytes)
    lap("parts and shards")
    for shard in shards:
        for part in shard.parts:
            selection.slice(part.first, part.rows)
    lap("work orders")
    layout = DatasetLayout(pinned.dataset)
    layout.locate(np.array([0, len(selection) - 1]))
    lap("layout")
    ordinals = np.random.default_rng(0).integers(0, len(selection), _LOCATED)
    layout.locate(ordinals)
    lap("locate a million")
    return seconds
