"""The steps of a training run as Prefect tasks, and its artifacts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import Task, get_run_logger

from signal_batch.pins import Pin
from signal_batch.processes import stop_workers
from signal_batch.publishing import TrainOutcome, publish
from signal_batch.ranks import OnEvent, run_evaluation, run_ranks, run_statistics
from signal_batch.selection import Selection
from signal_batch.training_job import TrainJob, claim_training
from signal_batch.training_planning import check_trainer, plan_training
from signal_batch.training_runner import RunListener
from signal_batch.training_spec import TrainSpec
from tasks import reporting
from tasks.policy import retry_delays, task
from tasks.tracking import RunProgress, tracked


@task(name="split and plan")
def plan_run(spec: TrainSpec, pin: Pin, selection: Selection) -> TrainJob:
    """Make the sides, look at what the trainer will get, claim the output folder."""
    planned = plan_training(spec, pin, selection)
    check_trainer(planned)
    job = claim_training(planned)
    logger = get_run_logger()
    logger.info("run key %s, %d steps", job.run_key[:16], job.plan.total_steps)
    for warning in job.plan.warnings:
        logger.warning("%s", warning)
    return job


@task(name="measure statistics")
def measure_statistics(job: dict[str, Any], run_id: str) -> None:
    """One pass over the training records in a worker program; an earlier run's result stands."""
    run_statistics(TrainJob.from_json(job), _listener(run_id), run_id=run_id)


@task(name="train")
def take_steps(job: dict[str, Any], run_id: str) -> None:
    """From the newest checkpoint to the last step, in one worker program for each rank."""
    run_ranks(TrainJob.from_json(job), _listener(run_id), run_id=run_id)


@task(name="evaluate")
def evaluate_model(job: dict[str, Any], run_id: str) -> None:
    """Judge the finished model on the sides that are held out, in a worker program."""
    run_evaluation(TrainJob.from_json(job), _listener(run_id), run_id=run_id)


@task(name="publish model")
def publish_model(job: TrainJob, run: dict[str, Any], warnings: tuple[str, ...]) -> dict[str, Any]:
    return publish(job, run=run, warnings=warnings)


@task(name="report")
def report_run(outcome: TrainOutcome, spec: TrainSpec, metrics: list[dict[str, Any]]) -> None:
    """Leave the table of evaluations and a report on the run's page."""
    reporting.report_training(outcome, spec, metrics)


def learn(job: TrainJob, run_id: str) -> RunListener:
    """Measure, train and evaluate, each retried by itself; returns what the run was told.

    Any end but a good one stops the worker processes of the run first. The checkpoints stay, and
    the next run goes on from the newest.
    """
    steps = [
        *([measure_statistics] if job.plan.normalizes else []),
        take_steps,
        *([evaluate_model] if job.monitored is not None else []),
    ]
    total = job.plan.total_steps * job.spec.batch_size
    with tracked(run_id, 0, total, key="training-progress") as progress:
        listener = _listening[run_id] = RunListener(job, _reporter(progress), get_run_logger())
        try:
            for step in steps:
                _patient(step, job)(job.to_json(), run_id)
        except BaseException:
            stop_workers(run_id)  # at once: closing the progress may wait for a slow server
            raise
        finally:
            del _listening[run_id]
    return listener


#: What follows the events of each run of this process.
_listening: dict[str, RunListener] = {}


def _listener(run_id: str) -> OnEvent:
    return _listening.get(run_id) or (lambda event: None)


def _reporter(progress: RunProgress) -> Callable[..., None]:
    def report(rows: int, total: int | None = None) -> None:
        if total is None:
            progress.add(rows)
        else:
            progress.restart(rows)

    return report


def _patient(step: Task[..., None], job: TrainJob) -> Task[..., None]:
    execution = job.spec.execution
    return step.with_options(
        retries=execution.retries,
        retry_delay_seconds=retry_delays(execution),
        tags={"train-model", *execution.limits},
    )
