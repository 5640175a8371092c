"""The training worker: the program that does one thing of a training run.

`python -m signal_batch.training_worker PARENT` reads `{"do": ..., "job": ..., ...}` on stdin, where
`do` is `statistics`, `train` or `evaluate`, and writes events as JSON lines on stdout::

    {"event": "started", "step": 1200}
    {"event": "progress", "rows": 640, "step": 1210}
    {"event": "metrics", "step": 1250, "side": "test", "metrics": {"accuracy": 0.91}}
    {"event": "checkpoint", "step": 1500}
    {"event": "warning", "message": "..."}
    {"event": "alive"}

See `program` for the rest.
"""

from __future__ import annotations

import sys
from typing import Any

from signal_batch.notes import Attendance
from signal_batch.program import Emit, serve
from signal_batch.training_job import TrainJob
from signal_batch.training_run import evaluate_model, measure_statistics, train_rank


def work(order: dict[str, Any], emit: Emit) -> None:
    job = TrainJob.from_json(order["job"])
    if order.get("rank", 0) == 0:  # ranks stand and fall together
        Attendance(job.spec.output, job.run_key, order.get("run_id")).begin(order["do"])
    if order["do"] == "statistics":
        measure_statistics(job, emit)
    elif order["do"] == "evaluate":
        evaluate_model(job, emit)
    else:
        train_rank(job, order["rank"], order["coordinator"], emit)


if __name__ == "__main__":
    sys.exit(serve(work))
