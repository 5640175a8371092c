"""What the training worker does: measure statistics, train one rank, evaluate what was learned.

The loop takes a batch, takes a step, and keeps three things apart: the metric history, which
depends on the run key alone and is the same however often the run was killed; the arrays, likewise;
and times, which are of this machine and are only added up. A checkpoint holds all three, so going
on from one is going on as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from signal_batch._grain import grain
from signal_batch.bucketing import buckets_of
from signal_batch.checkpoints import (
    BackgroundSaver,
    Checkpoint,
    checkpoints_of,
    copied,
    last_checkpoint,
)
from signal_batch.errors import DamagedOutputError
from signal_batch.iteration import batches_in_order, global_order, iterating, training_batches
from signal_batch.judging import REPORT_EVERY_S, evaluation_batches, floats, heard, judge
from signal_batch.metrics import MetricLog
from signal_batch.pins import reopen
from signal_batch.preparation import Preparation, preparation_of
from signal_batch.program import Emit
from signal_batch.reading import metadata_rows
from signal_batch.shuffling import BlockShuffle
from signal_batch.source import BatchFetcher
from signal_batch.statistics import measure
from signal_batch.store import OutputStore
from signal_batch.trainers import resolve_trainer
from signal_batch.training import ModelBatch, Trainer
from signal_batch.training_job import (
    EVALUATION,
    TrainJob,
    read_statistics,
    versions,
    write_statistics,
)

#: A batch in evaluation and in the measuring of statistics holds about so much stored data.
_PASS_BYTES = 16 << 20
_BLOCK = 4096


def measure_statistics(job: TrainJob, emit: Emit) -> None:
    """Read the training records once and write their statistics; an earlier attempt's stand."""
    if read_statistics(job) is not None:
        return
    chain = preparation_of(job.spec, job.plan, None).chain
    before = chain.until_statistics()
    with closing(_fetcher(job)) as fetch:
        selection = job.sides["train"]
        names = chain.measured_columns(fetch(selection.slice(0, 1).ordinals()))
        rows = _pass_rows(job)
        pipeline = batches_in_order(selection, fetch, rows, threads=job.spec.execution.threads)
        with iterating(pipeline) as batches:
            ready = (before(batch, training=False) for batch in heard(batches, emit))
            write_statistics(job, measure(ready, names))


def evaluate_model(job: TrainJob, emit: Emit) -> None:
    """Judge the last checkpoint on every side that is held out, and write what came out."""
    checkpoint = last_checkpoint(job, _warner(emit))
    trainer = _trainer(job)
    trainer.load(checkpoint.arrays)
    ready = preparation(job)
    results = {}
    with closing(_fetcher(job)) as fetch:
        for side in ("validation", "test"):
            if len(job.sides[side]):
                with _side_batches(job, side, fetch, ready, emit) as batches:
                    judged = judge(trainer, batches, ready, job.spec.by_columns)
                results[side] = {"records": len(job.sides[side]), **judged}
    document = {"run_key": job.run_key, "sides": results}
    OutputStore(job.spec.output).put_document(EVALUATION, document)


def train_rank(job: TrainJob, rank: int, coordinator: str | None, emit: Emit) -> None:
    """Train from the newest checkpoint to the last step, as one of the run's ranks.

    The first rank writes checkpoints and reports metrics; the others take the same steps.
    """
    with closing(_fetcher(job)) as fetch:
        _Loop(job, rank, coordinator, fetch, emit).run()


@dataclass
class _Times:
    """Seconds and counts of all attempts so far; of this machine, so in no key and no history."""

    train_s: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    records: int = 0
    attempts: int = 0


@dataclass
class _Loop:
    job: TrainJob
    rank: int
    coordinator: str | None
    fetch: BatchFetcher
    emit: Emit
    step: int = 0
    times: _Times = field(default_factory=_Times)

    def __post_init__(self) -> None:
        spec = self.job.spec
        self.log = MetricLog(spec.log_steps)
        self.checkpoints = checkpoints_of(self.job)
        self.saver = BackgroundSaver(lambda item: self.checkpoints.save(item, versions()))
        self.ready = preparation(self.job)
        self.leads = self.rank == 0
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._reported_at, self._unreported = 0.0, 0

    def run(self) -> None:
        trainer = _trainer(self.job, self.rank, self.coordinator)
        self._resume(trainer)
        total = self.job.plan.total_steps
        if self.leads:
            self.emit({"event": "started", "step": self.step})
        if self.step < total:
            try:
                self._train(trainer, total)
            finally:
                self.saver.finish()

    def _resume(self, trainer: Trainer) -> None:
        checkpoint = self.checkpoints.newest(_warner(self.emit))
        if checkpoint is not None:
            trainer.load(checkpoint.arrays)
            self.step = self._saved_step = checkpoint.step
            self.log = MetricLog.from_json(checkpoint.progress["metrics"])
            self.times = _Times(**checkpoint.progress["times"])
        self.times.attempts += 1

    def _train(self, trainer: Trainer, total: int) -> None:
        with iterating(self._pipeline()) as batches:
            while self.step < total:
                began = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter()
                metrics = floats(trainer.step(batch))
                ended = time.perf_counter()
                self.step += 1
                self.times.wait_s += waited - began
                self.times.train_s += ended - began
                self.times.steps += 1
                self.times.records += self.job.spec.batch_size
                self.log.add(self.step, metrics)
                self._report(last=self.step == total)
                self._evaluate_if_due(trainer, total)
                self._save_if_due(trainer, total)

    def _pipeline(self) -> grain.IterDataset:
        job, execution = self.job, self.job.spec.execution
        return training_batches(
            job.sides["train"],
            self.fetch,
            batch_size=job.spec.batch_size // execution.ranks,
            steps=job.plan.total_steps,
            cursor=self.step * job.spec.batch_size,
            rank=self.rank,
            world=execution.ranks,
            transform=self.ready.training,
            threads=execution.threads,
            prefetch_batches=execution.prefetch_batches,
            **order_options(job),
        )

    def _evaluate_if_due(self, trainer: Trainer, total: int) -> None:
        job = self.job
        if self.step == total:
            self.log.flush(self.step)
        if job.monitored is None or (self.step % job.plan.evaluate_steps and self.step < total):
            return
        with _side_batches(job, job.monitored, self.fetch, self.ready, self.emit) as batches:
            metrics = floats(trainer.evaluate(batches))
        self.log.record(self.step, job.monitored, metrics)
        if self.leads:
            self.emit(
                {"event": "metrics", "step": self.step, "side": job.monitored, "metrics": metrics}
            )

    def _save_if_due(self, trainer: Trainer, total: int) -> None:
        if not self.leads:
            return
        spec, last = self.job.spec, self.step == total
        due = (
            self.step - self._saved_step >= spec.checkpoint_steps
            or time.monotonic() - self._saved_at >= spec.checkpoint_s
        )
        # One that is late because the one before it is still being written is late, not lost.
        if not last and (not due or self.saver.busy):
            return
        self.saver.start(
            Checkpoint(
                step=self.step,
                records=self.step * spec.batch_size,
                arrays=copied(trainer.state()),
                progress={"metrics": self.log.to_json(), "times": asdict(self.times)},
            )
        )
        self._saved_step, self._saved_at = self.step, time.monotonic()
        self.emit({"event": "checkpoint", "step": self.step})
        if last:
            self.saver.finish()

    def _report(self, *, last: bool) -> None:
        if self.leads:
            self._unreported += self.job.spec.batch_size
        if last or time.monotonic() - self._reported_at >= REPORT_EVERY_S:
            self.emit({"event": "progress", "rows": self._unreported, "step": self.step})
            self._reported_at, self._unreported = time.monotonic(), 0


def preparation(job: TrainJob) -> Preparation:
    """The steps from a record to the model, with the statistics that were measured for it."""
    statistics = read_statistics(job) if job.plan.normalizes else None
    if job.plan.normalizes and statistics is None:
        raise DamagedOutputError(
            f"{job.spec.output} has no statistics of this run; run the same command again"
        )
    return preparation_of(job.spec, job.plan, statistics)


def order_options(job: TrainJob) -> dict[str, Any]:
    """What the global order of a run depends on, besides its records, steps and batch size."""
    spec = job.spec
    options: dict[str, Any] = {"seed": spec.seed, "shuffle": spec.shuffle != "none"}
    if spec.shuffle == "block":
        with closing(reopen(job.pin)) as pinned:
            options["block_shuffle"] = BlockShuffle.of(pinned)
    if job.plan.lengths.policy == "bucket":
        options["buckets"] = _buckets(job)
    return options


def order_of(job: TrainJob) -> grain.MapDataset:
    """Positions in the training side, in the order in which the run takes them."""
    return global_order(
        job.sides["train"],
        step_records=job.spec.batch_size,
        steps=job.plan.total_steps,
        **order_options(job),
    )


def _buckets(job: TrainJob) -> npt.NDArray[np.uint8]:
    """The bucket of each record of the training side, from its metadata."""
    lengths = job.plan.lengths
    column = next(column for column in job.plan.columns if column.name == lengths.columns[0])
    path = str(column.selector.path)
    found: list[int] = []
    with closing(reopen(job.pin)) as pinned:
        for first in range(0, len(job.sides["train"]), _BLOCK):
            ordinals = job.sides["train"].slice(first, _BLOCK).ordinals()
            found += [row.fields[path][1][-1] for row in metadata_rows(pinned.dataset, ordinals)]
    return buckets_of(found, lengths.buckets)


def _trainer(job: TrainJob, rank: int | None = None, coordinator: str | None = None) -> Trainer:
    make_trainer, _ = resolve_trainer(job.spec.trainer)
    trainer = make_trainer()
    trainer.init(job.batch_spec(rank, coordinator), job.spec.trainer_args)
    return trainer


def _fetcher(job: TrainJob) -> BatchFetcher:
    return BatchFetcher(job.pin, job.plan.columns, safe_decode=job.spec.execution.safe_decode)


@contextmanager
def _side_batches(
    job: TrainJob, side: str, fetch: BatchFetcher, ready: Preparation, emit: Emit
) -> Iterator[Iterator[ModelBatch]]:
    """A side in ordinal order, in batches no larger than a rank's."""
    execution = job.spec.execution
    size = job.spec.batch_size // execution.ranks
    with evaluation_batches(
        job.sides[side], fetch, ready, size, threads=execution.threads, emit=emit
    ) as batches:
        yield batches


def _pass_rows(job: TrainJob) -> int:
    return int(max(1, min(1024, _PASS_BYTES // job.pin.record_bytes)))


def _warner(emit: Emit) -> Callable[[str], None]:
    return lambda message: emit({"event": "warning", "message": message})
