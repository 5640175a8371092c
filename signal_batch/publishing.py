"""Publishing a trained model: the files that people and `predict` read, the manifest last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from safetensors.numpy import save

from signal_batch.checkpoints import last_checkpoint
from signal_batch.errors import DamagedOutputError
from signal_batch.metrics import MetricLog, to_jsonl, to_parquet
from signal_batch.mlflow_log import log_model
from signal_batch.notes import remove_notes
from signal_batch.specs import MODEL_FORMAT, SCHEMA_VERSION
from signal_batch.statistics import Statistics
from signal_batch.store import OutputStore
from signal_batch.training_job import (
    ARRAYS,
    EVALUATION,
    METRICS,
    MODEL,
    REPORT,
    TrainJob,
    file_entry,
    read_statistics,
    versions,
)
from signal_batch.training_report import render


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """A published model: its manifest, whether it was there before this run, where to watch."""

    manifest: dict[str, Any]
    already_complete: bool = False
    watch_at: str | None = None


def publish(
    job: TrainJob, *, run: Mapping[str, Any] | None = None, warnings: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write model, metrics and report from the last checkpoint, then the manifest.

    `run` is recorded as it is, `warnings` are shown in the report besides those of the plan.
    Returns the manifest.

    Raises `DamagedOutputError` where the last checkpoint or the evaluation is not there.
    """
    store = OutputStore(job.spec.output)
    told: list[str] = []
    last = last_checkpoint(job, told.append)
    evaluation = _evaluation(job, store)
    history = MetricLog.from_json(last.progress["metrics"]).rows
    model = _model_document(
        job,
        cursor={"step": last.step, "records": last.records},
        timing=last.progress["times"],
        evaluation=evaluation,
        statistics=read_statistics(job),
        warnings=(*job.plan.warnings, *warnings, *told),
    )
    report = render(model, history, evaluation)
    payloads = {
        ARRAYS: save(last.arrays),
        METRICS[0]: to_jsonl(history),
        METRICS[1]: to_parquet(history),
        REPORT: report.encode(),
    }
    for name, payload in payloads.items():
        store.put_object(name, payload)
    payloads[MODEL] = store.put_document(MODEL, model)
    manifest = {
        "format": MODEL_FORMAT,
        "format_version": SCHEMA_VERSION,
        "run_key": job.run_key,
        "created": model["created"],
        "run": dict(run or {}),
        "pin": model["pin"],
        "identity": job.identity,
        "spec": model["spec"],
        "trainer": job.spec.trainer,
        "steps": last.step,
        "metrics": model["metrics"],
        "versions": model["versions"],
        "files": [file_entry(name, payload) for name, payload in sorted(payloads.items())],
    }
    if job.spec.mlflow is not None:
        # Before the manifest: a complete output is one that was logged.
        manifest["mlflow_run_id"] = log_model(job, model, history, report)
    store.remove_staged()
    store.write_manifest(manifest)
    remove_notes(store)
    return manifest


def _evaluation(job: TrainJob, store: OutputStore) -> dict[str, Any]:
    if job.monitored is None:
        return {}
    document = store.read_document(EVALUATION)
    if document is None or document.get("run_key") != job.run_key:
        raise DamagedOutputError(f"{store.uri} has no {EVALUATION} of this run")
    return dict(document["sides"])


def _model_document(
    job: TrainJob,
    *,
    cursor: Mapping[str, int],
    timing: Mapping[str, float],
    evaluation: Mapping[str, Any],
    statistics: Statistics | None,
    warnings: tuple[str, ...],
) -> dict[str, Any]:
    plan = job.plan.to_json()
    return {
        "format": MODEL_FORMAT,
        "format_version": SCHEMA_VERSION,
        "run_key": job.run_key,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "trainer": job.spec.trainer,
        "trainer_args": job.spec.trainer_args,
        "target": job.spec.target,
        "classes": plan["classes"],
        "columns": plan["columns"],
        "inputs": plan["inputs"],
        "arrays": plan["arrays"],
        "lengths": plan["lengths"],
        "statistics": None if statistics is None else statistics.to_json(),
        "spec": job.spec.model_dump(mode="json"),
        "pin": job.pin.model_dump(mode="json"),
        "split": plan["split"],
        "cursor": cursor,
        "timing": timing,
        "metrics": {side: item.get("metrics", {}) for side, item in evaluation.items()},
        "warnings": list(warnings),
        "versions": versions(),
        "identity": job.identity,
        "plan": plan,
    }
