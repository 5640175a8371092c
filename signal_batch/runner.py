"""A whole export, without Prefect: on this machine, or on a Dask or Ray cluster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from signal_batch.engines import Engine, Fallout, engine_for, following
from signal_batch.errors import SignalBatchError
from signal_batch.execution import refuse_block
from signal_batch.job import ExportJob, Outcome, claim, commit, finished, peek, progress_of
from signal_batch.plan import Shard
from signal_batch.planning import prepare
from signal_batch.processes import retried
from signal_batch.specs import ExportSpec
from signal_batch.store import Receipt

logger = logging.getLogger(__name__)

OnProgress = Callable[..., None]


def export(spec: ExportSpec, *, on_progress: OnProgress | None = None) -> Outcome:
    """Run an export to its end; resumes what an earlier run left.

    Shards run in `spec.execution.workers` worker processes, with retries for faults that can
    pass. A shard that fails by its data leaves the others alone. On an output that is complete
    already, nothing is done. On Ctrl-C and on any other error the worker processes are stopped
    first, and what has a receipt stays. `on_progress(rows, total=None)` is called from several
    threads.
    """
    refuse_block(spec.execution.credentials)
    engine = engine_for(spec.execution)
    job = peek(prepare(spec))
    if standing := finished(job):
        return Outcome(standing, already_complete=True)
    report = on_progress or (lambda rows, total=None: None)
    with engine:  # before the claim: without a place to run, nothing is written
        job = claim(job)
        progress = progress_of(job)
        report(progress.done_rows, total=len(job.selection))
        with following(engine, job, progress.done_rows, report):
            _run_shards(job, progress.shards, report, engine)
    return Outcome(commit(job))


def _run_shards(
    job: ExportJob, shards: Sequence[Shard], report: OnProgress, engine: Engine
) -> None:
    stopping = threading.Event()
    fallout = Fallout()
    with ThreadPoolExecutor(job.spec.execution.workers) as pool:
        futures = {
            pool.submit(_with_retries, job, shard, report, engine, stopping): shard
            for shard in shards
        }
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except SignalBatchError as exc:
                    fallout.add(futures[future].label, exc)
        except BaseException:
            stopping.set()
            engine.stop()
            for future in futures:
                future.cancel()
            raise
    fallout.check()


def _with_retries(
    job: ExportJob, shard: Shard, report: OnProgress, engine: Engine, stopping: threading.Event
) -> list[Receipt]:
    def pause(exc: SignalBatchError, seconds: float) -> None:
        logger.warning("%s failed (%s); again in %.1f s", shard.label, exc, seconds)
        stopping.wait(seconds)

    return retried(lambda: engine.run(job.order(shard), report), job.spec.execution, pause)
