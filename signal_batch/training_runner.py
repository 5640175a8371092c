"""A whole training run in this process and its worker processes, without Prefect."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from signal_batch.errors import SignalBatchError
from signal_batch.execution import refuse_block
from signal_batch.processes import retried, stop_workers
from signal_batch.publishing import TrainOutcome, publish
from signal_batch.ranks import OnEvent, run_evaluation, run_ranks, run_statistics
from signal_batch.training_job import TrainJob, claim_training, standing_model
from signal_batch.training_planning import check_trainer, prepare_training
from signal_batch.training_spec import TrainSpec

logger = logging.getLogger(__name__)

OnProgress = Callable[..., None]


def train(spec: TrainSpec, *, on_progress: OnProgress | None = None) -> TrainOutcome:
    """Train a model and publish it; goes on from the newest checkpoint of an earlier run.

    On an output that is complete already, nothing is done. On Ctrl-C and on any error the worker
    processes are stopped first, and the checkpoints stay. `on_progress(records, total=None)` is
    called as steps are taken.
    """
    refuse_block(spec.execution.credentials)
    job = prepare_training(spec)
    check_trainer(job)
    job = claim_training(job)
    if (standing := standing_model(job)) is not None:
        return TrainOutcome(standing, already_complete=True)
    listener = RunListener(job, on_progress)
    run_id = uuid.uuid4().hex
    try:
        if job.plan.normalizes:
            _with_retries(run_statistics, job, listener, run_id)
        _with_retries(run_ranks, job, listener, run_id)
        if job.monitored is not None:
            _with_retries(run_evaluation, job, listener, run_id)
    except BaseException:
        stop_workers(run_id)
        raise
    return TrainOutcome(publish(job, warnings=tuple(listener.warnings)))


class RunListener:
    """Follows the events of a run: counts records, and keeps what the report should say."""

    def __init__(
        self,
        job: TrainJob,
        on_progress: OnProgress | None,
        log: logging.Logger | logging.LoggerAdapter[Any] = logger,
    ) -> None:
        self.warnings: list[str] = []
        self.metrics: list[dict[str, Any]] = []
        self._log = log
        self._batch = job.spec.batch_size
        self._total = job.plan.total_steps * self._batch
        self._on_progress = on_progress or (lambda rows, total=None: None)

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self._on_progress(event["step"] * self._batch, total=self._total)
            if event["step"]:
                self._log.info("going on from the checkpoint of step %d", event["step"])
        elif kind == "progress":
            self._on_progress(event["rows"])
        elif kind == "metrics":
            row = {"step": event["step"], "side": event["side"], **event["metrics"]}
            self.metrics.append(row)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in event["metrics"].items())
            self._log.info("step %d, %s: %s", event["step"], event["side"], shown)
        elif kind == "warning":
            self.warnings.append(event["message"])
            self._log.warning("%s", event["message"])


def _with_retries(run: Callable[..., None], job: TrainJob, on_event: OnEvent, run_id: str) -> None:
    def pause(exc: SignalBatchError, seconds: float) -> None:
        logger.warning("%s; going on from the last checkpoint in %.1f s", exc, seconds)
        time.sleep(seconds)

    retried(lambda: run(job, on_event, run_id=run_id), job.spec.execution, pause)
