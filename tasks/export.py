"""The steps of an export as Prefect tasks, and its artifacts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import CancelledRun
from prefect.futures import PrefectFuture
from prefect.runtime import task_run
from prefect.states import Cancelled
from prefect.utilities.annotations import quote

from signal_batch import job as steps
from signal_batch import planning
from signal_batch.engines import Engine, Fallout, LocalEngine, engine_for, following
from signal_batch.errors import DamagedOutputError, SignalBatchError, StoppedError
from signal_batch.execution import Execution
from signal_batch.export import WorkOrder
from signal_batch.job import ExportJob, Outcome
from signal_batch.pins import Pin
from signal_batch.plan import Shard
from signal_batch.selection import Selection
from signal_batch.specs import ExportSpec
from signal_batch.store import ORDERS, OutputStore, Receipt
from tasks import reporting
from tasks.credentials import use_credentials
from tasks.fanout import run_bounded
from tasks.policy import retry_delays, task
from tasks.tracking import report_rows, tracked
from tasks.work_pool import WorkPoolEngine

ShardRow = dict[str, Any]


@task(name="plan parts")
def plan_parts(spec: ExportSpec, pin: Pin, selection: Selection) -> ExportJob:
    """Plan, or take up what an earlier run planned; nothing is written yet."""
    job = steps.peek(planning.plan(spec, pin, selection))
    get_run_logger().info("run key %s, %d parts", job.run_key[:16], len(job.parts))
    return job


@task(name="export shard")
def export_shard(order: dict[str, Any], label: str, run_id: str) -> ShardRow:
    """Have one worker program run over the parts of a work order, given as JSON."""
    started = time.monotonic()
    try:
        receipts = _engines[run_id].run(WorkOrder.from_json(order), partial(report_rows, run_id))
    except StoppedError as exc:
        # No failure, and not to be shown as one. Prefect takes a state for that of the task.
        return Cancelled(message=f"{exc}; its finished parts stay")  # type: ignore[return-value]
    row = _row(label, receipts, time.monotonic() - started, attempts=task_run.run_count)
    get_run_logger().info(
        "%s rows in %.1f s, %s records/s",
        *(f"{row['rows']:,}", row["seconds"], f"{row['records/s']:,}"),
    )
    return row


@task(name="commit output")
def commit_output(job: ExportJob, run: dict[str, Any]) -> dict[str, Any]:
    return steps.commit(job, run=run)


def report_run(outcome: Outcome, spec: ExportSpec, rows: list[ShardRow], seconds: float) -> None:
    """Leave the table of shards and a report on the run's page."""
    # Quoted: a line from each of many shards would hide their bars in the run's graph.
    unlinked: tuple[Any, Any] = quote(outcome), quote(rows)
    leave_report(unlinked[0], spec, unlinked[1], seconds)


@task(name="report")
def leave_report(outcome: Outcome, spec: ExportSpec, rows: list[ShardRow], seconds: float) -> None:
    reporting.report_export(outcome, spec, rows, seconds)


def export_shards(job: ExportJob, run_id: str) -> tuple[ExportJob, list[ShardRow]]:
    """Claim the output, and run every shard that still lacks receipts, where the spec says.

    `workers` shards run at a time. Returns the job as it was claimed, and what each shard did.

    A shard that fails by its data leaves the others alone; the run fails when they are done. Any
    other error stops the worker programs of the run first. What has a receipt stays, and the
    next run goes on from there.
    """
    with _engine(job.spec.execution, run_id) as engine:  # first: without it, nothing is written
        job = steps.claim(job)
        return job, _run_shards(job, engine, run_id)


def _run_shards(job: ExportJob, engine: Engine, run_id: str) -> list[ShardRow]:
    progress = steps.progress_of(job)
    rows: list[ShardRow] = []
    fallout = Fallout()
    with (
        tracked(run_id, progress.done_rows, len(job.selection), key="export-progress") as shown,
        following(engine, job, progress.done_rows, shown.add),
    ):
        submits = {shard.label: partial(_submit, job, shard, run_id) for shard in progress.shards}
        try:
            for label, future in run_bounded(submits, job.spec.execution.workers):
                try:
                    rows.append(_row_of(future))
                except SignalBatchError as exc:
                    rows.append(_failed_row(label, exc))
                    fallout.add(label, exc)
            fallout.check()
        except BaseException as exc:
            engine.stop()  # at once: closing the progress may wait for a slow server
            if isinstance(exc, SignalBatchError) and rows:
                reporting.leave_shards(_in_order(rows, submits))
            raise
    return _in_order(rows, submits)


def _row_of(future: PrefectFuture[ShardRow]) -> ShardRow:
    try:
        return future.result()
    except CancelledRun as exc:
        raise StoppedError("the run was stopped") from exc


def run_order(output: str, name: str, label: str, credentials: str | None) -> None:
    """Run the worker program for a work order that an export left in its output folder."""
    use_credentials(credentials)
    document = OutputStore(output).read_document(f"{ORDERS}/{name}.json")
    if document is None:
        raise DamagedOutputError(
            f"{output}/{ORDERS}/{name}.json is not there: the export that asked for it is over"
        )
    started = time.monotonic()
    with LocalEngine() as engine:
        receipts = engine.run(WorkOrder.from_json(document), lambda rows: None)
    row = _row(label, receipts, time.monotonic() - started, attempts=1)
    get_run_logger().info("%s: %d rows in %.1f s", label, row["rows"], row["seconds"])


#: The engine of each run of this process.
_engines: dict[str, Engine] = {}


@contextmanager
def _engine(execution: Execution, run_id: str) -> Iterator[Engine]:
    if execution.engine == "work-pool":
        chosen: Engine = WorkPoolEngine(execution.runner_address, run_id, execution.credentials)
    else:
        chosen = engine_for(execution)
        if execution.credentials and execution.runner_address:
            get_run_logger().warning(
                "block %s is used on this machine; those of %s take the storage's credentials from "
                "their own environment",
                *(execution.credentials, execution.runner),
            )
    with chosen as engine:
        _engines[run_id] = engine
        try:
            yield engine
        finally:
            del _engines[run_id]


def _submit(job: ExportJob, shard: Shard, run_id: str) -> PrefectFuture[ShardRow]:
    execution = job.spec.execution
    named = export_shard.with_options(
        task_run_name=f"export {shard.label}",
        retries=execution.retries,
        retry_delay_seconds=retry_delays(execution),
        tags={"export-shard", *execution.limits},
    )
    # Quoted: looking for results of other tasks in it would draw lines that are not there.
    order: Any = quote(job.order(shard).to_json())
    return named.submit(order, shard.label, run_id)


def _in_order(rows: Sequence[ShardRow], labels: Iterable[str]) -> list[ShardRow]:
    place = {label: number for number, label in enumerate(labels)}
    return sorted(rows, key=lambda row: place[row["shard"]])


def _failed_row(label: str, exc: SignalBatchError) -> ShardRow:
    return {"shard": label, "record": getattr(exc, "ordinal", None), "error": str(exc)}


def _row(label: str, receipts: Sequence[Receipt], seconds: float, attempts: int) -> ShardRow:
    rows = sum(receipt.rows for receipt in receipts)
    return {
        "shard": label,
        "parts": len(receipts),
        "rows": rows,
        "bytes": sum(receipt.bytes for receipt in receipts),
        "set aside": sum(len(receipt.bad_ordinals) for receipt in receipts),
        "attempts": attempts,
        "seconds": round(seconds, 2),
        "records/s": round(rows / max(seconds, 1e-9)),
    }
