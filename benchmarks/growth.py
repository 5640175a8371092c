"""Exports of one, ten and a hundred times the records: time should grow with them, memory not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import export_task, in_turn, scratch_folder, work
from benchmarks.measure import Sample
from benchmarks.settings import Size

SHAPE = (1, 1024)


def sizes(records: Sequence[int]) -> list[Size]:
    return [
        Size(f"{count} records", SHAPE, 256, records=count, slow=count, loaded=count)
        for count in records
    ]


def measured(
    folder: Path, scratch: Path, records: Sequence[int], rounds: int
) -> dict[str, list[Sample]]:
    """Samples by `RECORDS xWORKERS`; no warm-up, since the smallest is a single part."""
    contenders = {}
    for size in sizes(records):
        task = export_task(folder, scratch, size, "power_spectrum", "signal_batch")
        for workers in (1, 2):
            contenders[f"{size.records} x{workers}"] = lambda task=task, n=workers: _once(task, n)
    return in_turn(contenders, rounds, "growth")


def _once(task: dict[str, Any], workers: int) -> Sample:
    with scratch_folder(task) as scratch:
        return work(task, workers, scratch, warm=False)
