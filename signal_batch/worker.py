"""The range worker: the program that exports the parts of one work order.

`python -m signal_batch.worker PARENT` reads a work order as JSON on stdin and writes events as JSON
lines on stdout::

    {"event": "progress", "rows": 256}
    {"event": "receipt", "receipt": {...}}
    {"event": "error", "kind": "CorruptDatasetError", "message": "...", "ordinal": 17}

A part that already has a receipt is not done again. What it begins it notes in the output, for
people; see `notes`, and `program` for the rest.
"""

from __future__ import annotations

import sys
from typing import Any

from signal_batch.export import PartExporter, WorkOrder, sweep_temporary
from signal_batch.notes import Attendance
from signal_batch.program import Emit, serve
from signal_batch.store import OutputStore


def work(order: WorkOrder, emit: Emit, *, run_id: str | None = None) -> None:
    """Export every part of the order that has no receipt yet."""
    sweep_temporary()
    attendance = Attendance(order.spec.output, order.run_key, run_id)
    done = OutputStore(order.spec.output).receipts()
    with PartExporter(order) as exporter:
        for part, selection in zip(order.parts, order.runs, strict=True):
            receipt = done.get(part.index)
            if receipt is None:
                attendance.begin("export", part)
                receipt = exporter.export(
                    part, selection, lambda rows: emit({"event": "progress", "rows": rows})
                )
            else:
                emit({"event": "progress", "rows": part.rows})
            emit({"event": "receipt", "receipt": receipt.to_dict()})


def _serve_json(order: dict[str, Any], emit: Emit) -> None:
    work(WorkOrder.from_json(order), emit, run_id=order.get("run_id"))


if __name__ == "__main__":
    sys.exit(serve(_serve_json))
