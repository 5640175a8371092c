"""The program in which one contender runs: a task as JSON in, one result line out."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from benchmarks.measure import Clock, peak_bytes
from benchmarks.settings import BATCH, CHECKED

Task = dict[str, Any]


def main() -> None:
    task = json.loads(sys.argv[1])
    clock = Clock(_take_stdout())
    _KINDS[task["kind"]](task, clock)


def _load(task: Task, clock: Clock) -> None:
    from benchmarks.loaders import LOADERS

    with LOADERS[task["name"]](task) as batches:
        for _ in batches(2 * BATCH):
            pass
        clock.start()
        rows = sum(_length(batch) for batch in batches(task["records"]))
        clock.stop()
    clock.report(rows=rows, peak_bytes=peak_bytes())


def _length(batch: Any) -> int:
    return len(batch) if isinstance(batch, list) else len(batch[0])


def _check_loaders(task: Task, clock: Clock) -> None:
    """A digest of the records and labels that each contender gives, in its order."""
    from benchmarks.loaders import LOADERS

    digests = {}
    for name, contender in LOADERS.items():
        with contender(task) as batches:
            digests[name] = [item for batch in batches(task["records"]) for item in _digests(batch)]
    clock.report(digests=digests)


def _digests(batch: Any) -> list[str]:
    import numpy as np
    import signal_dataset as sds

    if isinstance(batch, list):
        records = [sds.decode(payload) for payload in batch]
        pairs = [(record["samples"].data, record.metadata["snr_db"]) for record in records]
    else:
        pairs = list(zip(*batch, strict=True))
    return [
        hashlib.sha256(samples.tobytes() + np.float32(label).tobytes()).hexdigest()
        for samples, label in pairs
    ]


def _export(task: Task, clock: Clock) -> None:
    from benchmarks.exports import contender

    first, stop = task["first"], task["stop"]
    scratch = Path(task["scratch"])
    with contender(task["name"])(task) as export:
        export(first, min(first + CHECKED, stop), scratch / f"warm-{os.getpid()}.parquet")
        clock.start()
        export(first, stop, scratch / f"rows-{os.getpid()}.parquet")
        clock.stop()
    result: dict[str, Any] = {"rows": stop - first, "peak_bytes": peak_bytes()}
    clock.report(**result | task.get("of_others", {}))


def _check_exports(task: Task, clock: Clock) -> None:
    """The first rows of each contender, one file or folder each."""
    from benchmarks.exports import contender

    for name, path in task["paths"].items():
        with contender(name)(task) as export:
            export(0, task["stop"], Path(path))
    clock.report()


def _work(task: Task, clock: Clock) -> None:
    """One export worker on the work order that a file holds, from its first part's receipt on.

    With `warm` off, the clock runs from before the dataset is opened.
    """
    from signal_batch.export import WorkOrder
    from signal_batch.worker import work

    order = WorkOrder.from_json(json.loads(Path(task["order"]).read_text()))
    whole = sum(part.rows for part in order.parts)
    warm = order.parts[0].rows if task["warm"] else 0
    waiting = task["warm"]

    def emit(event: dict[str, Any]) -> None:
        nonlocal waiting
        if waiting and event["event"] == "receipt":
            waiting = False
            clock.start()

    if not waiting:
        clock.start()
    work(order, emit)
    clock.stop()
    clock.report(rows=whole - warm, whole_rows=whole, peak_bytes=peak_bytes())


def _plan(task: Task, clock: Clock) -> None:
    from benchmarks.planning import plan_steps

    clock.report(steps=plan_steps(task), peak_bytes=peak_bytes())


def _take_stdout() -> IO[str]:
    """Keep the real stdout for results; whatever else prints goes to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


_KINDS: dict[str, Callable[[Task, Clock], None]] = {
    "load": _load,
    "check loaders": _check_loaders,
    "export": _export,
    "check exports": _check_exports,
    "work": _work,
    "plan": _plan,
}

if __name__ == "__main__":
    main()
