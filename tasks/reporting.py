"""What a run leaves on its page: tags, a table of shards or evaluations, a report with pictures.

A server that does not take them must not fail the run: the output is what counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

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

Row = dict[str, Any]


def name_of(dataset: str) -> str:
    """The last part of a dataset's URI, by which people know it."""
    return dataset.rstrip("/").rpartition("/")[2]


def tag_run(pin: Pin) -> None:
    """Tag the flow run with its dataset and snapshot, so that the UI finds all runs of them."""
    tags = {f"dataset:{name_of(pin.uri)}", f"snapshot:{pin.snapshot_id}"}
    with _lenient("its tags"), get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *tags}))


def leave_shards(rows: Sequence[Row]) -> None:
    """The table of shards, those that failed first."""
    ordered = sorted(rows, key=lambda row: "error" not in row)
    with _lenient("the table of shards"):
        create_table_artifact(
            table=ordered, key="export-shards", description="shards of this run, failed ones first"
        )


def report_export(outcome: Outcome, spec: ExportSpec, rows: Sequence[Row], seconds: float) -> None:
    """The table of shards and the report of an export that is complete."""
    if rows:
        leave_shards(rows)
    with _lenient("the report"):
        _leave_report("export-report", spec.output, _export_report(outcome, spec, rows, seconds))


def report_training(outcome: TrainOutcome, spec: TrainSpec, metrics: Sequence[Row]) -> None:
    """The table of evaluations and the report of a model that is published."""
    with _lenient("the report"):
        if metrics:
            create_table_artifact(
                table=list(metrics),
                key="training-metrics",
                description="evaluations while training",
            )
        _leave_report("training-report", spec.output, _training_report(outcome, spec))


def report_failure(flow: Flow[Any, Any], run: FlowRun, state: State[Any]) -> None:
    """What failed and what to do, for a run that comes to no good end; a hook of the flows."""
    output = at_time(flow_run.parameters["spec"], flow_run.scheduled_start_time).output
    lines = [
        f"# {_plain(output)} is not complete",
        "",
        "**What happened**",
        "",
        *(f"- {_plain(part)}" for part in str(_error_of(state)).split("; ")),
        "",
        "**What to do**",
        "",
        "What is finished stays. When the cause is gone, run this again with the same parameters "
        "(*Retry*, *Copy to new run*, or the next scheduled run): it does only what is missing.",
        "",
        f"`signal-batch status {output}` shows how far it came.",
    ]
    with _lenient("the report"):
        _leave_report(f"{flow.name}-failure", output, lines)


def _error_of(state: State[Any]) -> object:
    error = state.result(raise_on_failure=False)
    return error if isinstance(error, Exception) else state.message


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
        "| | |",
        "| --- | --- |",
        f"| rows | {totals['rows']:,} |",
        f"| files | {totals['files']:,} |",
        f"| bytes | {human_bytes(totals['bytes'])} |",
        f"| set aside | {totals['bad']:,} |",
        f"| output | `{spec.output}` |",
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
        "| | |",
        "| --- | --- |",
        f"| steps | {manifest['steps']:,} |",
        *results,
        f"| output | `{spec.output}` |",
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
    settings = get_current_settings()
    base = settings.ui_url or (settings.api.url or "").removesuffix("/api")
    if not base or "flow_run_id" not in run:
        return []
    return [f"Made by [{_plain(run['flow_run_name'])}]({base}/runs/flow-run/{run['flow_run_id']})."]


def _plain(text: str) -> str:
    """Text that Markdown takes as it is."""
    escaped = "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text)
    return " ".join(escaped.split())
