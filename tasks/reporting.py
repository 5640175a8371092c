"""What a run leaves on its page: tags, a table of shards or evaluations, a report with pictures.

A server that does not take them must not fail the run: the output is what counts.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from signal_batch.errors import SignalBatchError
from signal_batch.job import Outcome
from signal_batch.pictures import drawing
from signal_batch.pins import Pin
from signal_batch.preview import preview
from signal_batch.publishing import TrainOutcome
from signal_batch.report import human_bytes
from signal_batch.scheduling import at_time
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore
from signal_batch.training_report import learning_curves
from signal_batch.training_spec import TrainSpec
from tasks.advice import advice

Row = dict[str, Any]


def name_of(dataset: str) -> str:
    """The last part of a dataset's URI, by which people know it."""
    return dataset.rstrip("/").rpartition("/")[2]


def tag_run(pin: Pin) -> None:
    """Tag the flow run with its dataset and snapshot, so that the UI finds all runs of them."""
    tags = {f"dataset:{name_of(pin.uri)}", f"snapshot:{pin.snapshot_id}"}
    with _lenient("its tags"), get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *tags}))


def leave_shards(rows: Sequence[Row]) -> str | None:
    """The table of shards, those that failed first; the address of its page, where it has one."""
    failed = any("error" in row for row in rows)
    ordered = sorted(rows, key=lambda row: "error" not in row)
    with _lenient("the table of shards"):
        table = [_shown(row) for row in ordered] if failed else ordered
        words = "shards of this run, failed ones first" if failed else "shards of this run"
        made = create_table_artifact(table=table, key="export-shards", description=words)
        return _page("artifacts/artifact", made)
    return None


def _shown(row: Row) -> Row:
    """A row with all columns: the page takes its columns from the first one."""
    names = ("rows", "records/s", "seconds", "attempts", "parts", "bytes", "set aside", "error")
    return {
        "state": "failed" if "error" in row else "done",
        "shard": row["shard"],
        "record": row.get("record") if row.get("record") is not None else "",
        **{name: row.get(name, "") for name in names},
    }


def report_export(outcome: Outcome, spec: ExportSpec, rows: Sequence[Row], seconds: float) -> None:
    """The table of shards and the report of an export that is complete."""
    table = leave_shards(rows) if rows else None
    with _lenient("the report"):
        lines = _export_report(outcome, spec, rows, seconds)
        if table:
            lines.append(f"How fast each shard was: [table of shards]({table}).")
        _leave_report("export-report", spec.output, lines)


def report_training(outcome: TrainOutcome, spec: TrainSpec, metrics: Sequence[Row]) -> None:
    """The table of evaluations and the report of a model that is published."""
    with _lenient("the report"):
        if metrics:
            create_table_artifact(
                table=[_rounded(row) for row in metrics],
                key="training-metrics",
                description="evaluations while training",
            )
        _leave_report("training-report", spec.output, _training_report(outcome, spec))


def _rounded(row: Row) -> Row:
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in row.items()
    }


def report_failure(flow: Flow[Any, Any], run: FlowRun, state: State[Any]) -> None:
    """What failed and what to do, for a run that comes to no good end; a hook of the flows."""
    spec = at_time(flow_run.parameters["spec"], flow_run.scheduled_start_time)
    with _lenient("the report"):
        error = state.result(raise_on_failure=False)
        lines = [
            f"# {_plain(name_of(spec.output))} is not complete",
            f"Made from `{spec.dataset}`, for `{spec.output}`.",
            "",
            "**What happened**",
            "",
            *_what_happened(error if isinstance(error, Exception) else state.message or "", run),
            "**What to do**",
            "",
            *(f"- {line}" for line in advice(error, spec, claimed=_is_claimed(spec.output))),
        ]
        _leave_report(f"{flow.name}-failure", spec.output, lines)


def _is_claimed(output: str) -> bool:
    try:
        return OutputStore(output).read_claim() is not None
    except SignalBatchError:
        return False


def _what_happened(error: object, run: FlowRun) -> list[str]:
    """Shard by shard, where shards failed; otherwise in the words of the error."""
    with get_client(sync_client=True) as client:
        tables = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]),
                key=ArtifactFilterKey(any_=["export-shards"]),
            )
        )
    if not tables:
        return _quoted(str(error))
    rows: list[Row] = json.loads(str(tables[0].data))
    failed = [row for row in rows if row["error"]]
    page = _page("artifacts/artifact", tables[0].id)
    all_shards = f"[table of shards]({page})" if page else "table of shards"
    lines = [f"{len(failed)} of the {len(rows)} shards that ran failed; see the {all_shards}.", ""]
    for row in failed:
        record = f", at record {row['record']}" if row["record"] != "" else ""
        lines += [f"{_plain(row['shard'])}{record}:", "", *_quoted(row["error"])]
    return lines


def _quoted(text: str) -> list[str]:
    """Text as it is, in lines that fit the page; a path is longer, and stays whole."""
    lines = textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False)
    return ["~~~", *lines, "~~~", ""]


def _leave_report(key: str, output: str, lines: Sequence[str]) -> None:
    create_markdown_artifact("\n".join(lines), key=key, description=output)


@contextmanager
def _lenient(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        get_run_logger().warning("%s could not be left on the run's page: %s", what, exc)


def _export_report(
    outcome: Outcome, spec: ExportSpec, rows: Sequence[Row], seconds: float
) -> list[str]:
    manifest = outcome.manifest
    totals = manifest["totals"]
    written = sum(row["rows"] for row in rows)
    pace = f"{written:,} rows in {seconds:.1f} s, {written / max(seconds, 1e-9):,.0f} records/s"
    drawn = None if outcome.already_complete else preview(spec.output, manifest)
    return [
        f"# {spec.features} of {name_of(spec.dataset)}",
        "Complete already; nothing was done." if outcome.already_complete else f"Wrote {pace}.",
        "",
        f"| output | `{spec.output}` |",
        "| --- | --- |",
        f"| rows | {totals['rows']:,} |",
        f"| files | {totals['files']:,} |",
        f"| bytes | {human_bytes(totals['bytes'])} |",
        f"| set aside | {totals['bad']:,} |",
        f"| run key | `{manifest['run_key']}` |",
        "",
        *(_picture(*drawn) if drawn else ()),
        *_pinned(manifest["pin"]),
        *_asked(spec.columns, spec.where),
        *_links(manifest),
    ]


def _training_report(outcome: TrainOutcome, spec: TrainSpec) -> list[str]:
    manifest = outcome.manifest
    results = [
        f"| {side} {name} | {value:.4g} |"
        for side, metrics in manifest["metrics"].items()
        for name, value in metrics.items()
    ]
    curves: list[str] = []
    for picture, words in _curves(spec.output):
        curves += _picture(picture, words)
    return [
        f"# {manifest['trainer']} model of {name_of(spec.dataset)}",
        "Complete already; nothing was done." if outcome.already_complete else "",
        "",
        f"| output | `{spec.output}` |",
        "| --- | --- |",
        f"| steps | {manifest['steps']:,} |",
        *results,
        f"| full report | `{spec.output.rstrip('/')}/report.html` |",
        f"| run key | `{manifest['run_key']}` |",
        "",
        *curves,
        *_pinned(manifest["pin"]),
        *_asked(spec.columns, spec.where),
        *_links(manifest),
    ]


def _curves(output: str) -> list[tuple[str, str]]:
    payload = OutputStore(output).read_object("metrics.jsonl")
    history = [json.loads(line) for line in (payload or b"").splitlines()]
    with drawing():
        return learning_curves(history)


def _picture(source: str, words: str) -> list[str]:
    return [f"![{_plain(words)}]({source})", "", f"*{_plain(words)}*", ""]


def _pinned(pin: Mapping[str, Any]) -> list[str]:
    sets = [
        f"| annotations | {item['name']} {item['publication_id']} | `{item['root_sha256'][:16]}` |"
        for item in pin["annotations"]
    ]
    return [
        "| pinned | what | digest |",
        "| --- | --- | --- |",
        f"| dataset | {pin['uri']}, snapshot {pin['snapshot_id']}, {pin['record_count']:,} records "
        f"| `{pin['fingerprint'][:16]}` |",
        *sets,
        "",
    ]


def _asked(columns: Sequence[object], where: Sequence[str]) -> list[str]:
    lines = [f"- `{column}`" for column in columns]
    lines += [f"- where `{condition}`" for condition in where]
    return ["**Columns and filters**", "", *lines, ""]


def _links(manifest: Mapping[str, Any]) -> list[str]:
    """A link to the run that made it, which is another one where nothing was left to do."""
    run = manifest.get("run") or {}
    page = _page("runs/flow-run", run.get("flow_run_id"))
    # The page takes no escapes within a link.
    return [f"Made by [this run]({page}): {_plain(run['flow_run_name'])}.", ""] if page else []


def _page(kind: str, identity: object) -> str | None:
    """The address of something in the UI, as this process knows its server."""
    settings = get_current_settings()
    base = settings.ui_url or (settings.api.url or "").removesuffix("/api")
    return f"{base}/{kind}/{identity}" if base and identity else None


def _plain(text: str) -> str:
    """Text that Markdown takes as it is."""
    escaped = "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text)
    return " ".join(escaped.split())
