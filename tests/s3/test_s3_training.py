"""A training run from S3 to S3, against a real server: what a disk to disk run gives."""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import signal_dataset as sds
from safetensors.numpy import load

from signal_batch.cli import main
from signal_batch.frozen import checked
from signal_batch.models import evaluate, read_model
from signal_batch.synth import synthesize
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

HELPERS = Path(__file__).parents[1] / "training"
STEPS, KEPT = 24, 2
#: As `iq_root` of tests/conftest.py.
CAPTURES: dict[str, Any] = {"records": 200, "shape": (2, 64), "seed": 7, "records_per_shard": 40}


@pytest.fixture(scope="module")
def dataset(s3_client: Any) -> str:
    """The captures of `iq_root`, written to S3; not to be changed."""
    name = f"d-{uuid.uuid4().hex[:20]}"
    s3_client.create_bucket(Bucket=name)
    uri = f"s3://{name}/lab/captures"
    synthesize(uri, **CAPTURES)
    return uri


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the recording trainer looks what to do, and says what it did."""
    folder = tmp_path_factory.mktemp("training")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HELPERS))
        patch.setenv("PYTHONPATH", str(HELPERS))
        patch.setenv("TEST_TRAINING", str(folder))
        yield folder


def spec_of(dataset: str, output: str) -> TrainSpec:
    fields = {
        "dataset": dataset,
        "output": output,
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        "target": "label",
        "split": "scene test=0.3",
        "transforms": ["unit_power", "add_noise snr_db=[0,20]"],
        "batch_size": 16,
        "steps": STEPS,
        "trainer": "recording_trainer:RecordingTrainer",
        "trainer_args": {"jitter": 0.01},
        "checkpoint_steps": 3,
        "keep_checkpoints": KEPT,
        "log_steps": 5,
        "execution": {"retries": 2, "retry_delay_s": 0},
    }
    return checked(TrainSpec, fields)


def object_at(client: Any, uri: str) -> bytes:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    body: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return body


def keys_of(client: Any, uri: str) -> dict[str, Any]:
    """ETag and time of every object below a URI, by relative key."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    found = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            key = item["Key"].removeprefix(f"{prefix}/")
            found[key] = (item["ETag"], item["LastModified"])
    return found


def test_a_run_on_s3_that_was_killed_equals_one_on_disk(
    s3_client: Any, dataset: str, bucket: str, iq_root: Path, folder: Path
) -> None:
    """Killed between the arrays of a checkpoint and its document, then inside a step."""
    import recording_trainer  # type: ignore[import-not-found]

    local = folder / "local"
    manifest = train(spec_of(str(iq_root), str(local))).manifest
    wanted = recording_trainer.steps_seen(recording_trainer.read_log(folder))
    (folder / "log").unlink()

    uri = f"s3://{bucket}/models/out"
    actions = [{"save": 6, "place": "between"}, {"step": 17, "do": "kill"}]
    (folder / "actions.json").write_text(json.dumps(actions))
    there = train(spec_of(dataset, uri)).manifest
    assert {key: there[key] for key in ("run_key", "identity", "metrics", "steps")} == {
        key: manifest[key] for key in ("run_key", "identity", "metrics", "steps")
    }
    for name in ("model.safetensors", "metrics.jsonl", "_evaluation.json"):
        assert object_at(s3_client, f"{uri}/{name}") == (local / name).read_bytes(), name

    log = recording_trainer.read_log(folder)
    for step, taken in recording_trainer.steps_seen(log).items():
        assert taken == wanted[step] * len(taken)
    firsts: dict[int, int] = {}
    for line in log:
        if line["event"] == "step":
            firsts.setdefault(line["pid"], line["step"])
    assert len(firsts) == 3
    assert list(firsts.values())[2] > 1, "it went on from a checkpoint on S3"

    stored = keys_of(s3_client, uri)
    kept = sorted(key for key in stored if key.startswith("_checkpoints/"))
    documents = [key for key in kept if key.endswith(".json")]
    assert len(documents) == KEPT
    assert documents[-1] == f"_checkpoints/step-{STEPS:09d}.json"
    named = [json.loads(object_at(s3_client, f"{uri}/{d}"))["arrays"]["file"] for d in documents]
    assert set(kept) == {*documents, *(f"_checkpoints/{name}" for name in named)}
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    for key in stored:
        assert secret not in object_at(s3_client, f"{uri}/{key}")

    again = train(spec_of(dataset, uri))
    assert again.already_complete
    assert keys_of(s3_client, uri) == stored

    check_judging(uri, dataset, json.loads((local / "_evaluation.json").read_text()))
    check_predictions(s3_client, uri, dataset, f"s3://{bucket}/predictions", local, iq_root)


def check_judging(uri: str, dataset: str, evaluation: dict[str, Any]) -> None:
    found = evaluate(uri, dataset, side="test")
    wanted = evaluation["sides"]["test"]
    assert {name: found[name] for name in wanted} == wanted


def check_predictions(
    client: Any, uri: str, dataset: str, output: str, local: Path, root: Path
) -> None:
    """Softmax of the records at a mean power of 1, times the weights."""
    assert main(["predict", uri, dataset, output, "--workers", "1"]) == 0
    files = json.loads(object_at(client, f"{output}/_manifest.json"))["files"]
    rows = [
        row
        for entry in files
        for row in pq.read_table(
            io.BytesIO(object_at(client, f"{output}/data/{entry['file']}"))
        ).to_pylist()
    ]
    assert [row["ordinal"] for row in rows] == list(range(200))
    samples = np.stack([record["samples"].data for record in sds.open(str(root))])
    z = samples / np.sqrt((np.abs(samples) ** 2).mean(axis=(1, 2), keepdims=True))
    x = np.concatenate([z.real, z.imag], axis=1).reshape(len(z), -1).astype(np.float64)
    weights = load((local / "model.safetensors").read_bytes())["weights"]
    powers = np.exp(x @ weights)
    wanted = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose([row["probabilities"] for row in rows], wanted, rtol=1e-5)
    np.testing.assert_array_equal([row["prediction"] for row in rows], wanted.argmax(axis=1))
    assert read_model(uri).identity == read_model(str(local)).identity
