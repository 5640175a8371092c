"""What people see on the terminal: a progress bar, summaries, problems."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from signal_batch.errors import DamagedOutputError, SignalBatchError
from signal_batch.job import ExportJob, Outcome, progress_of
from signal_batch.pins import Pin
from signal_batch.publishing import TrainOutcome
from signal_batch.specs import MODEL_FORMAT
from signal_batch.store import OutputStore
from signal_batch.training_job import TrainJob
from signal_batch.validation import FieldSummary, Keys, Validation
from signal_batch.verification import Verification

_LONGEST_LINE = 4000

OnProgress = Callable[..., None]


def problem(message: str) -> None:
    """One line on stderr, whatever a feature function or a library put into its message."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(message.split()))
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]} ..."
    print(f"signal-batch: {line}", file=sys.stderr)


def note(message: str) -> None:
    """A line about what takes time, for a person who waits; silent where nobody watches."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


@contextmanager
def progress_bar(total: int | None = None) -> Iterator[OnProgress]:
    """A bar with records/s and time left; silent where stderr is no terminal.

    Yields `on_progress(rows, total=None)`.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda rows, total=None: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RecordsPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("records" if total else "planning", total=total)

        def on_progress(rows: int, total: int | None = None) -> None:
            if total is not None:
                # What an earlier run left is done, but was not done at this run's speed.
                bar.reset(task, total=total, completed=rows, description="records")
            else:
                bar.advance(task, rows)

        yield on_progress


class _RecordsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("-- records/s" if not task.speed else f"{task.speed:,.0f} records/s")


def show_outcome(output: str, outcome: Outcome) -> None:
    """What an export made."""
    show_manifest(output, outcome.manifest)
    if outcome.already_complete:
        print("  it was complete already; nothing was done")
    if outcome.watch_at:
        print(f"  watch it in the Prefect UI: {outcome.watch_at}")


def show_manifest(output: str, manifest: dict[str, Any]) -> None:
    """What an output holds, from its manifest."""
    totals = manifest["totals"]
    print(
        f"{output}: {totals['rows']:,} rows in {totals['files']} Parquet files, "
        f"{human_bytes(totals['bytes'])}"
    )
    if totals["bad"]:
        print(f"  {totals['bad']} records could not be read and were set aside")
    print(f"  run key {manifest['run_key'][:16]}, dataset {manifest['pin']['fingerprint'][:16]}")
    run = manifest.get("run") or {}
    if run.get("flow_run_name"):
        print(f"  written by Prefect flow run {run['flow_run_name']} ({run['flow_run_id']})")


def show_model(output: str, outcome: TrainOutcome) -> None:
    """What a training run made."""
    manifest = outcome.manifest
    print(f"{output}: {manifest['trainer']} model after {manifest['steps']:,} steps")
    for side, metrics in manifest["metrics"].items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"  {side:<11} {shown}")
    print(f"  run key {manifest['run_key'][:16]}, dataset {manifest['pin']['fingerprint'][:16]}")
    print(f"  report      {output.rstrip('/')}/report.html")
    if outcome.already_complete:
        print("  it was complete already; nothing was done")
    if outcome.watch_at:
        print(f"  watch it in the Prefect UI: {outcome.watch_at}")


def show_training_plan(job: TrainJob) -> None:
    """What a training run would do."""
    plan = job.plan
    print(f"run key       {job.run_key}")
    print(f"dataset       {job.pin.uri} ({job.pin.fingerprint[:16]})")
    for item in job.pin.annotations:
        print(f"annotations   {item.name} ({item.root_sha256[:16]})")
    for side, found in plan.split["sides"].items():
        counts = ", ".join(f"{label}: {count:,}" for label, count in found["classes"].items())
        print(f"{side:<13} {found['records']:,} records" + (f" ({counts})" if counts else ""))
    for name, array in plan.arrays.items():
        shape = " x ".join("any" if size is None else str(size) for size in array.shape)
        seen = ", seen by the model" if name in plan.inputs else ""
        print(f"column        {name}: {array.dtype} {shape or 'a value'}{seen}")
    print(f"steps         {plan.total_steps:,} of {job.spec.batch_size:,} records")
    for warning in plan.warnings:
        problem(warning)


def show_evaluation(result: dict[str, Any]) -> None:
    """What a model reaches on a dataset."""
    side = f", {result['side']} side" if result["side"] else ""
    print(f"{result['model']} on {result['dataset']}{side}: {result['records']:,} records")
    for name, value in result["metrics"].items():
        print(f"  {name:<11} {value:.4g}")
    for column, groups in result.get("by", {}).items():
        for group in groups:
            where = (
                f"{group['from']:g} to {group['to']:g}" if "from" in group else str(group["value"])
            )
            print(f"  {column} {where}: accuracy {group['accuracy']:.3f} of {group['records']:,}")


def show_dry_run(job: ExportJob) -> None:
    """What an export would do."""
    progress = progress_of(job)
    parts = job.parts
    missing = [part for shard in progress.shards for part in shard.parts]
    print(f"run key       {job.run_key}")
    print(f"dataset       {job.pin.uri} ({job.pin.fingerprint[:16]})")
    for item in job.pin.annotations:
        print(f"annotations   {item.name} ({item.root_sha256[:16]})")
    print(f"selected      {len(job.selection):,} of {job.pin.record_count:,} records")
    print(f"parts         {len(parts)} of up to {job.part_rows:,} rows")
    print(
        f"would write   {sum(p.rows for p in missing):,} rows, about "
        f"{human_bytes(int(job.row_bytes * sum(p.rows for p in missing)))} before compression"
    )
    print(
        f"would skip    {len(parts) - len(missing)} parts, {progress.done_rows:,} rows, "
        "already in the output"
    )
    print(f"columns       {', '.join(f'{f.name}: {f.type}' for f in job.schema)}")
    if progress.manifest is not None:
        print("the output is complete already; nothing would be done")


def show_validation(result: Validation, *, judge: bool = True) -> None:
    """A dataset's pin, fields, statuses and faults."""
    _show_pin(result.pin)
    scope = (
        "every record"
        if result.examined == result.pin.record_count
        else (f"{result.examined:,} records spread evenly")
    )
    print(f"fields        (from {scope})")
    for name, item in sorted(result.fields.items()):
        print(f"  {name}: {_described(item, result.examined)}")
    _show_keys("metadata", result.metadata_keys, result.examined)
    for name, counts in result.statuses.items():
        shown = ", ".join(f"{count:,} {status}" for status, count in counts.items())
        print(f"annotations   {name}: {shown}")
        _show_keys("  values", result.annotation_keys[name], result.examined)
    others = [name for name in result.known_annotations if name not in result.statuses]
    if others:
        print(f"other sets    {', '.join(others)}")
    for fault in result.faults:
        problem(fault)
    if not judge:
        return
    decoded = ", every record decoded" if result.deep else ""
    print("sound" + decoded if result.ok else "NOT sound: see the problems named")


def show_verification(result: Verification) -> None:
    for fault in result.faults:
        problem(fault)
    if result.ok:
        rows = f"{result.rows:,} rows in " if result.rows else ""
        print(
            f"{result.uri}: complete and undamaged, {rows}{result.files} files, "
            f"{human_bytes(result.bytes)}"
        )
    else:
        plural = "" if len(result.faults) == 1 else "s"
        print(f"{result.uri}: {len(result.faults)} fault{plural}")


def show_output(path: str) -> bool:
    """Show an output folder; False if the path is none."""
    try:
        return _show_output(path, OutputStore(path))
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        if isinstance(exc, SignalBatchError):
            raise
        raise DamagedOutputError(
            f"{path} has a manifest or claim that is not complete ({exc!r}); "
            "`signal-batch verify` names every damage"
        ) from exc


def _show_output(path: str, store: OutputStore) -> bool:
    manifest, claim = store.read_manifest(), store.read_claim()
    if MODEL_FORMAT in ((manifest or {}).get("format"), (claim or {}).get("format")):
        _show_training(path, manifest, claim)
        return True
    if manifest is not None:
        show_manifest(path, manifest)
        print(
            f"  from {manifest['pin']['uri']}, features {manifest['spec']['features']}, "
            f"written {manifest['created']}"
        )
        for name, kind in manifest["schema"].items():
            print(f"  {name}: {kind}")
        return True
    if claim is not None and "plan" in claim:
        done, of = len(store.receipts()), claim["plan"]["parts"]
        print(
            f"{path}: not complete, {done} of {of} parts are written; run the same export "
            "again to finish it"
        )
        print(f"  run key {claim['run_key'][:16]}, from {claim['pin']['uri']}")
        return True
    return False


def _show_training(
    path: str, manifest: dict[str, Any] | None, claim: dict[str, Any] | None
) -> None:
    if manifest is not None:
        show_model(path, TrainOutcome(manifest))
        print(f"  from {manifest['pin']['uri']}, written {manifest['created']}")
    elif claim is not None:
        print(f"{path}: a training run that is not complete; run the same command to go on")
        print(f"  run key {claim['run_key'][:16]}, from {claim['pin']['uri']}")


def reading_hint(output: Path) -> str:
    """Lines that read an export when pasted into a shell."""
    data = output.absolute() / "data"
    python = shlex.quote(sys.executable)
    return "\n".join(
        [
            "4. read it with pyarrow, DuckDB, pandas or Polars, for example:",
            f'  {python} -c "import pyarrow.dataset as d; '
            f"print(d.dataset('{data}').head(3).to_pylist())\"",
            f"  in DuckDB: SELECT label, count(*) FROM '{data}/*.parquet' GROUP BY ALL",
            f"  {python} -m signal_batch verify {shlex.quote(str(output))}",
        ]
    )


def human_bytes(size: float) -> str:
    """A size for people, in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _show_pin(pin: Pin) -> None:
    print(f"dataset       {pin.uri}")
    print(f"id            {pin.dataset_id}, snapshot {pin.snapshot_id}")
    print(f"fingerprint   {pin.fingerprint}")
    print(
        f"records       {pin.record_count:,} in {pin.shard_count} shards, "
        f"{human_bytes(pin.stored_bytes)}"
    )
    for item in pin.annotations:
        print(
            f"pinned set    {item.name}, publication {item.publication_id}, {item.root_sha256[:16]}"
        )


def _show_keys(title: str, keys: Keys, examined: int) -> None:
    """Dotted keys with their types, as columns and filters name them."""
    for name, item in keys.items():
        partly = f", in {item.records:,} of {examined:,}" if item.records != examined else ""
        print(f"{title:<14}{name}: {' or '.join(sorted(item.types))}{partly}")
        title = ""


def _described(item: FieldSummary, examined: int) -> str:
    axes = " or ".join(" x ".join(names) for names in sorted(item.axes))
    smallest = "x".join(map(str, item.smallest)) or "scalar"
    largest = "x".join(map(str, item.largest)) or "scalar"
    shape = f"{smallest} to {largest}" if item.varies else smallest
    partly = f", in {item.records:,} of {examined:,}" if item.records != examined else ""
    return f"{'/'.join(sorted(item.dtypes))} {shape} ({axes}){partly}"
