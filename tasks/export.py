"""The steps of an export as Prefect tasks, and its artifacts."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.futures import PrefectFuture
from prefect.runtime import task_run

from signal_batch import job as steps
from signal_batch import planning
from signal_batch.export import WorkOrder
from signal_batch.job import ExportJob, Outcome
from signal_batch.pins import Pin
from signal_batch.plan import Shard
from signal_batch.processes import run_worker, stop_workers
from signal_batch.report import human_bytes
from signal_batch.selection import Selection
from signal_batch.specs import ExportSpec
from tasks.fanout import run_bounded
from tasks.policy import retry_delays, task
from tasks.tracking import report_rows, tracked

ShardRow = dict[str, Any]


@task(name="plan parts")
def plan_parts(spec: ExportSpec, pin: Pin, selection: Selection) -> ExportJob:
    """Plan, and claim the output folder for this run key."""
    job = steps.claim(planning.plan(spec, pin, selection))
    get_run_logger().info("run key %s, %d parts", job.run_key[:16], len(job.parts))
    return job


@task(name="export shard")
def export_shard(order: dict[str, Any], label: str, run_id: str) -> ShardRow:
    """Run one worker process over the parts of a work order, given as JSON."""
    started = time.monotonic()
    receipts = run_worker(WorkOrder.from_json(order), partial(report_rows, run_id), run_id=run_id)
    seconds = time.monotonic() - started
    rows = sum(receipt.rows for receipt in receipts)
    get_run_logger().info("%s: %d rows in %.1f s", label, rows, seconds)
    return {
        "shard": label,
        "parts": len(receipts),
        "rows": rows,
        "bytes": sum(receipt.bytes for receipt in receipts),
        "set aside": sum(len(receipt.bad_ordinals) for receipt in receipts),
        "attempts": task_run.run_count,
        "seconds": round(seconds, 2),
        "records/s": round(rows / max(seconds, 1e-9)),
    }


@task(name="commit output")
def commit_output(job: ExportJob, run: dict[str, Any]) -> dict[str, Any]:
    return steps.commit(job, run=run)


@task(name="report")
def report_run(outcome: Outcome, output: str, rows: list[ShardRow], seconds: float) -> None:
    """Leave the table of shards and a summary on the run's page.

    The output is complete by now: a server that does not take the report must not fail the run.
    """
    try:
        if rows:
            create_table_artifact(table=rows, key="export-shards", description="shards of this run")
        create_markdown_artifact(
            _summary(outcome, output, rows, seconds), key="export-report", description=output
        )
    except Exception as exc:
        get_run_logger().warning("the report could not be left on the run's page: %s", exc)


def export_shards(job: ExportJob, run_id: str) -> list[ShardRow]:
    """Run every shard that still lacks receipts, `workers` at a time.

    Any end but a good one stops the worker processes of the run first. The first failure is
    raised; what has a receipt stays, and the next run goes on from there.
    """
    progress = steps.progress_of(job)
    rows: list[ShardRow] = []
    submits = [partial(_submit, job, shard, run_id) for shard in progress.shards]
    total = len(job.selection)
    with tracked(
        run_id,
        progress.done_rows,
        total,
        key="export-progress",
        description=f"{total:,} records to export",
    ):
        try:
            for future in run_bounded(submits, job.spec.execution.workers):
                rows.append(future.result())
        except BaseException:
            stop_workers(run_id)  # at once: closing the progress may wait for a slow server
            raise
    return sorted(rows, key=lambda row: str(row["shard"]))


def _submit(job: ExportJob, shard: Shard, run_id: str) -> PrefectFuture[ShardRow]:
    execution = job.spec.execution
    named = export_shard.with_options(
        task_run_name=f"export {shard.label}",
        retries=execution.retries,
        retry_delay_seconds=retry_delays(execution),
    )
    return named.submit(job.order(shard).to_json(), shard.label, run_id)


def _summary(outcome: Outcome, output: str, rows: list[ShardRow], seconds: float) -> str:
    manifest = outcome.manifest
    totals, pin = manifest["totals"], manifest["pin"]
    pins = [f"| dataset | {pin['uri']} | `{pin['fingerprint'][:16]}` |"]
    pins += [
        f"| annotations | {item['name']} {item['publication_id']} | `{item['root_sha256'][:16]}` |"
        for item in pin["annotations"]
    ]
    written = sum(row["rows"] for row in rows)
    pace = f"{written:,} rows in {seconds:.1f} s, {written / max(seconds, 1e-9):,.0f} records/s"
    return "\n".join(
        [
            f"# Export to {output}",
            "Complete already; nothing was done." if outcome.already_complete else f"Wrote {pace}.",
            "",
            "| | |",
            "| --- | --- |",
            f"| rows | {totals['rows']:,} |",
            f"| files | {totals['files']:,} |",
            f"| bytes | {human_bytes(totals['bytes'])} |",
            f"| set aside | {totals['bad']:,} |",
            f"| run key | `{manifest['run_key']}` |",
            "",
            "| pinned | what | digest |",
            "| --- | --- | --- |",
            *pins,
        ]
    )
