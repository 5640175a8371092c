"""A published model in a real MLflow file store: once, with every number of the metric history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from signal_batch.errors import OutputError
from signal_batch.frozen import checked
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

pytest.importorskip("mlflow")
pytest.importorskip("sklearn")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")


def spec(dataset: Path, tmp_path: Path, uri: str) -> TrainSpec:
    return checked(
        TrainSpec,
        {
            "dataset": str(dataset),
            "output": str(tmp_path / "model"),
            "columns": ["field:samples", "label=annotation:speakers-v1/label:int32"],
            "target": "label",
            "split": "metadata:split test=test",
            "transforms": ["statistics"],
            "trainer": "sklearn",
            "steps": 8,
            "log_steps": 2,
            "mlflow": uri,
        },
    )


def test_a_model_is_logged_once_with_its_whole_history(
    vowels_root: Path, tmp_path: Path, client: Any
) -> None:
    wanted = spec(vowels_root, tmp_path, f"file://{tmp_path}/mlruns")
    manifest = train(wanted).manifest
    experiment = client.get_experiment_by_name("signal-batch")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == manifest["mlflow_run_id"]
    assert run.info.status == "FINISHED"
    assert run.data.tags["signal_batch.run_key"] == manifest["run_key"]
    assert run.data.params["trainer"] == "sklearn"
    lines = (tmp_path / "model" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for side in ("train", "test"):
        logged = client.get_metric_history(run.info.run_id, f"{side}/loss")
        said = [(row["step"], row["loss"]) for row in rows if row["side"] == side]
        assert [(metric.step, metric.value) for metric in logged] == said
    final = json.loads((tmp_path / "model" / "model.json").read_text())["metrics"]["test"]
    assert run.data.metrics["final/test/accuracy"] == final["accuracy"]
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert names == {"model.json", "report.html"}

    # Publishing again, as after a crash before the manifest, finds the run that is there.
    (tmp_path / "model" / "_manifest.json").unlink()
    assert train(wanted).manifest["mlflow_run_id"] == run.info.run_id
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_a_server_that_is_not_there_is_an_error_and_the_model_is_not_published(
    vowels_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(OutputError, match=r"MLflow at http://127\.0\.0\.1:9"):
        train(spec(vowels_root, tmp_path, "http://127.0.0.1:9"))
    assert not (tmp_path / "model" / "_manifest.json").exists()
