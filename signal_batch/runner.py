"""A whole export in this process and its worker processes, without Prefect."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from signal_batch.errors import SignalBatchError
from signal_batch.job import ExportJob, Outcome, claim, commit, progress_of
from signal_batch.plan import Shard
from signal_batch.planning import prepare
from signal_batch.processes import retried, run_worker, stop_workers
from signal_batch.specs import ExportSpec
from signal_batch.store import Receipt

logger = logging.getLogger(__name__)

OnProgress = Callable[..., None]


def export(spec: ExportSpec, *, on_progress: OnProgress | None = None) -> Outcome:
    """Run an export to its end; resumes what an earlier run left.

    Shards run in `spec.execution.workers` worker processes, with retries for faults that can
    pass. On an output that is complete already, nothing is done. On Ctrl-C and on any error the
    worker processes are stopped first, and what has a receipt stays.
    `on_progress(rows, total=None)` is called from several threads.
    """
    job = claim(prepare(spec))
    progress = progress_of(job)
    if progress.manifest is not None:
        return Outcome(progress.manifest, already_complete=True)
    report = on_progress or (lambda rows, total=None: None)
    report(progress.done_rows, total=len(job.selection))
    _run_shards(job, progress.shards, report)
    return Outcome(commit(job))


def _run_shards(job: ExportJob, shards: Sequence[Shard], report: OnProgress) -> None:
    run_id = uuid.uuid4().hex
    stopping = threading.Event()
    with ThreadPoolExecutor(job.spec.execution.workers) as pool:
        futures = [
            pool.submit(_with_retries, job, shard, report, run_id, stopping) for shard in shards
        ]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopping.set()
            stop_workers(run_id)
            for future in futures:
                future.cancel()
            raise


def _with_retries(
    job: ExportJob, shard: Shard, report: OnProgress, run_id: str, stopping: threading.Event
) -> list[Receipt]:
    def pause(exc: SignalBatchError, seconds: float) -> None:
        logger.warning("%s failed (%s); again in %.1f s", shard.label, exc, seconds)
        stopping.wait(seconds)

    return retried(
        lambda: run_worker(job.order(shard), report, run_id=run_id), job.spec.execution, pause
    )
