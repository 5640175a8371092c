"""Training: the share of a step spent waiting for input, and how long until a step is taken again.

One run of the real worker program on records in the page cache. The share is that of the second
half of the steps, from the times in two checkpoints, so that importing and compiling are not in it.
Then the last checkpoint is taken away and the program started again, from the middle.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.settings import BATCH, SEED, Size

_ARGS: dict[str, dict[str, Any]] = {"jax": {}, "sklearn": {}}


def measured(
    folder: Path, scratch: Path, size: Size, steps: int, trainers: tuple[str, ...]
) -> list[dict[str, Any]]:
    """For each trainer: milliseconds a step, share of waiting, seconds to the first step."""
    return [_one(folder / size.name, scratch / f"model-{name}", name, steps) for name in trainers]


def _one(dataset: Path, output: Path, trainer: str, steps: int) -> dict[str, Any]:
    from signal_batch.frozen import checked
    from signal_batch.ranks import run_ranks
    from signal_batch.training_job import claim_training
    from signal_batch.training_planning import prepare_training
    from signal_batch.training_spec import TrainSpec

    shutil.rmtree(output, ignore_errors=True)
    job = claim_training(
        prepare_training(
            checked(
                TrainSpec,
                {
                    "dataset": str(dataset),
                    "output": str(output),
                    "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
                    "target": "label",
                    "transforms": ["unit_power"],
                    "trainer": trainer,
                    "trainer_args": _ARGS[trainer],
                    "batch_size": BATCH,
                    "steps": steps,
                    "seed": SEED,
                    "checkpoint_steps": steps // 2,
                    "checkpoint_s": 86_400,
                },
            )
        )
    )
    first: list[float] = []

    def run() -> None:
        started = time.perf_counter()
        taken: list[float] = []

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "progress" and not taken:
                taken.append(time.perf_counter() - started)

        run_ranks(job, on_event, run_id=f"bench-{trainer}-{started}")
        first.extend(taken)

    run()
    middle, last = (_times(path) for path in sorted((output / "_checkpoints").glob("*.json"))[-2:])
    sorted((output / "_checkpoints").glob("*.json"))[-1].unlink()
    run()
    spent = last["train_s"] - middle["train_s"]
    return {
        "trainer": trainer,
        "step_ms": 1e3 * spent / (last["steps"] - middle["steps"]),
        "records_per_s": (last["records"] - middle["records"]) / spent,
        "waiting": (last["wait_s"] - middle["wait_s"]) / spent,
        "first_step_s": first[0],
        "first_step_again_s": first[1],
    }


def _times(path: Path) -> dict[str, float]:
    return dict(json.loads(path.read_text())["progress"]["times"])
