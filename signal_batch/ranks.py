"""The parent's side of a training run: its worker programs, as many at a time as it has ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from signal_batch.errors import SignalBatchError, StoppedError, WorkerDiedError
from signal_batch.notes import note_failure
from signal_batch.processes import Program, run_program
from signal_batch.training_job import TrainJob

OnEvent = Callable[[dict[str, Any]], None]

_MODULE = "signal_batch.training_worker"


def run_statistics(job: TrainJob, on_event: OnEvent, *, run_id: str) -> None:
    """Measure the statistics of the training records in a worker program."""
    with _noting(job, "statistics", run_id):
        program = _program(job, "statistics", "measuring statistics", run_id=run_id)
        run_program(program, on_event, run_id=run_id)


def run_evaluation(job: TrainJob, on_event: OnEvent, *, run_id: str) -> None:
    """Judge the finished model in a worker program."""
    with _noting(job, "evaluate", run_id):
        program = _program(job, "evaluate", "evaluating the model", run_id=run_id)
        run_program(program, on_event, run_id=run_id)


def run_ranks(job: TrainJob, on_event: OnEvent, *, run_id: str) -> None:
    """Train from the newest checkpoint to the end, in one worker program for each rank.

    Ranks stand and fall together: each waits for the others at every step, so when one fails the
    others are stopped, and the next attempt starts them all again from the same checkpoint.

    Raises what `run_program` raises: the first failure that is not a consequence of another.
    """
    with _noting(job, "train", run_id):
        _run_ranks(job, on_event, run_id)


def _run_ranks(job: TrainJob, on_event: OnEvent, run_id: str) -> None:
    world = job.spec.execution.ranks
    coordinator = None if world == 1 else f"127.0.0.1:{_free_port()}"
    programs = [
        _program(
            job,
            "train",
            "training" if world == 1 else f"training, rank {rank} of {world}",
            rank=rank,
            coordinator=coordinator,
            run_id=run_id,
        )
        for rank in range(world)
    ]
    if world == 1:
        run_program(programs[0], on_event, run_id=run_id)
        return
    abort = threading.Event()
    failures: list[BaseException] = []
    with ThreadPoolExecutor(world) as pool:
        futures = [
            pool.submit(run_program, program, on_event, run_id=run_id, abort=abort)
            for program in programs
        ]
        try:
            for future in as_completed(futures):
                if (failure := future.exception()) is not None:
                    failures.append(failure)
                    abort.set()
        except BaseException:
            abort.set()  # before the pool waits for its threads
            raise
    if failures:
        # The others were stopped, or lost their connection to the one that failed.
        raise min(failures, key=_rank_of_cause)


@contextmanager
def _noting(job: TrainJob, doing: str, run_id: str) -> Iterator[None]:
    """Leave a note of a failure for people."""
    try:
        yield
    except SignalBatchError as exc:
        note_failure(job.spec.output, exc, run_key=job.run_key, run_id=run_id, doing=doing)
        raise


def _rank_of_cause(failure: BaseException) -> int:
    """Which of several failures says most: what a worker itself reported, then how one died."""
    if isinstance(failure, StoppedError):
        return 2
    return 1 if isinstance(failure, WorkerDiedError) else 0


def _program(job: TrainJob, do: str, label: str, **more: Any) -> Program:
    return Program(
        module=_MODULE,
        order={"do": do, "job": job.to_json(), **more},
        label=f"{label} ({job.spec.output})",
        timeout_s=job.spec.execution.stall_timeout_s,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
