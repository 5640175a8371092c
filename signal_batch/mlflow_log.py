"""Logging a published model to MLflow: parameters, metric history, tags and the report.

It is logged as a whole when the model is published, from what the output folder holds, so a run
that was killed and resumed is one MLflow run with every metric once. A run of the same run key that
was logged completely before is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from math import isfinite
from typing import Any

from signal_batch.errors import InputError, OutputError
from signal_batch.metrics import value_of
from signal_batch.training_job import TrainJob

EXPERIMENT = "signal-batch"
_RUN_KEY = "signal_batch.run_key"
#: What MLflow takes in one call, and of one parameter.
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 6000


def log_model(
    job: TrainJob, model: Mapping[str, Any], history: Sequence[Mapping[str, Any]], report: str
) -> str:
    """Log a model to `job.spec.mlflow` and return the id of its MLflow run.

    Raises `InputError` where MLflow is not installed, `OutputError` where it does not take it.
    """
    uri = job.spec.mlflow
    assert uri is not None
    # Neither its telemetry nor its refusal of plain folders is what a person asked for here.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if "://" not in uri or uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as exc:
        raise InputError(
            f"mlflow needs an extra: pip install 'signal-batch[mlflow]' ({exc})"
        ) from exc
    try:
        return _log(MlflowClient(tracking_uri=uri), job, model, history, report)
    except (MlflowException, OSError) as exc:
        raise OutputError(f"MLflow at {uri} did not take the run: {exc}") from exc


def _log(
    client: Any,
    job: TrainJob,
    model: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    report: str,
) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
    query = f"tags.`{_RUN_KEY}` = '{job.run_key}'"
    for run in client.search_runs([experiment], query):
        if run.info.status == "FINISHED":
            return str(run.info.run_id)
        client.delete_run(run.info.run_id)
    tags = {
        _RUN_KEY: job.run_key,
        "signal_batch.fingerprint": job.pin.fingerprint,
        "signal_batch.dataset": job.pin.dataset_id,
        "signal_batch.output": job.spec.output,
    }
    name = f"{job.spec.trainer} on {job.pin.dataset_id}"
    run_id = str(client.create_run(experiment, tags=tags, run_name=name).info.run_id)
    for params in _batched(_params(job), _MOST_PARAMS):
        client.log_batch(run_id, params=params)
    for metrics in _batched(_metrics(model, history), _MOST_METRICS):
        client.log_batch(run_id, metrics=metrics)
    client.log_dict(run_id, dict(model), "model.json")
    client.log_text(run_id, report, "report.html")
    client.set_terminated(run_id, "FINISHED")
    return run_id


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _params(job: TrainJob) -> Iterator[Any]:
    from mlflow.entities import Param

    for name, value in job.spec.identity().items():
        yield Param(name, str(value)[:_LONGEST])
    yield Param("split", str(job.spec.split))
    yield Param("steps_in_all", str(job.plan.total_steps))


def _metrics(model: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Every finite number of the history, `train/loss` and so on, and the final ones."""
    from mlflow.entities import Metric

    when = int(datetime.fromisoformat(model["created"]).timestamp() * 1000)
    for row in history:
        for name in row:
            if name not in ("step", "side", "not_finite"):
                value = value_of(row, name)
                if value is not None and isfinite(value):
                    yield Metric(f"{row['side']}/{name}", value, when, row["step"])
    for side, metrics in model["metrics"].items():
        for name, value in metrics.items():
            if value is not None:
                yield Metric(f"final/{side}/{name}", value, when, model["cursor"]["step"])
