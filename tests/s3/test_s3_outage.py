"""The S3 server is killed in the middle of an export and of a training run, and started again.

One outage for both runs, each in processes of its own; while nothing answers, one worker of each
is killed, so that its next attempt starts in the middle of the outage.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pyarrow.parquet as pq
import pytest
import signal_dataset as sds

from signal_batch.errors import StorageError
from signal_batch.frozen import checked
from signal_batch.store import OutputStore
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

pytestmark = pytest.mark.timeout(400)

TRAINER = Path(__file__).parents[1] / "training"
BUCKET = "outage"
#: Where each run shows how far it is.
PLACES = ("out/_receipts", "model/_checkpoints")
RECORDS, PART_ROWS, STEPS = 200, 10, 48
OUTAGE_S = 11.0
PATIENCE_S = 180.0

FEATURES = '''
"""Slow enough to be interrupted; says which batches it was given."""

import os
import sys
import time
from pathlib import Path

import numpy as np


def energy(batch):
    if Path(sys.argv[0]).name == "worker.py":
        with (Path(os.environ["TEST_BATCHES"]) / str(os.getpid())).open("a") as log:
            log.write(f"{batch['ordinal'][0]}\\n")
        time.sleep(float(Path(os.environ["TEST_PACE"]).read_text()))
    energies = np.sum(np.abs(batch["samples"]) ** 2, axis=(1, 2), dtype=np.float64)
    return {"samples": batch["samples"], "energy": energies}
'''


def training_spec(dataset: str, output: str) -> dict[str, Any]:
    return {
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
        "checkpoint_steps": 2,
        "keep_checkpoints": 2,
    }


def export_spec(dataset: str, output: str) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "output": output,
        "columns": ["field:samples"],
        "features": "slow_features:energy",
        "batch_size": PART_ROWS // 2,
        "part_bytes": 12_000,
        "execution": {"workers": 2},
    }


def wait_until(check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := check()):
        assert time.monotonic() < deadline, f"still {value!r} after {PATIENCE_S} s"
        time.sleep(0.1)
    return value


def keys_of(client: Any, prefix: str) -> dict[str, Any]:
    """ETag and time of every object below a prefix, by the rest of its key."""
    found = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        for item in page.get("Contents", ()):
            found[item["Key"].removeprefix(prefix)] = (item["ETag"], item["LastModified"])
    return found


def object_at(client: Any, key: str) -> bytes:
    body: bytes = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return body


def upload(client: Any, local: Path, prefix: str) -> None:
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(local.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            key = f"{prefix}/{path.relative_to(local)}"
            client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())


def command(folder: Path, name: str, spec: dict[str, Any]) -> list[str]:
    (folder / f"{name}.json").write_text(json.dumps(spec))
    return [sys.executable, "-m", "signal_batch", name, "--spec", str(folder / f"{name}.json")]


def workers_of(folder: Path) -> dict[int, list[int]]:
    """First ordinals of the batches that each worker of the export was given."""
    return {int(path.name): list(map(int, path.read_text().split())) for path in folder.iterdir()}


def pace_of(folder: Path) -> Path:
    """Holds the seconds that a batch of the export and a step of the training take."""
    return folder / "training" / "step_s"


def trainer_pids() -> list[int]:
    import recording_trainer  # type: ignore[import-not-found]

    log = recording_trainer.read_log(Path(os.environ["TEST_TRAINING"]))
    return list(dict.fromkeys(line["pid"] for line in log if line["event"] == "step"))


def on_their_way(client: Any, runs: dict[str, subprocess.Popen[str]]) -> bool:
    """Whether there are three parts and two checkpoints."""
    for run in runs.values():
        assert run.poll() is None, run.communicate()[0]
    parts, checkpoints = (keys_of(client, f"{key}/") for key in PLACES)
    return len(parts) >= 3 and len(checkpoints) >= 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the trainer and the feature function are found, and what they say."""
    folder = tmp_path_factory.mktemp("outage")
    for name in ("batches", "training"):
        (folder / name).mkdir()
    (folder / "slow_features.py").write_text(FEATURES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAINER))
        patch.setenv("PYTHONPATH", f"{TRAINER}:{folder}")
        patch.setenv("TEST_BATCHES", str(folder / "batches"))
        patch.setenv("TEST_TRAINING", str(folder / "training"))
        patch.setenv("TEST_PACE", str(pace_of(folder)))
        patch.setenv("SIGNAL_BATCH_CACHE_SIZE", "0")  # what is read is read from the server
        yield folder


@pytest.fixture(scope="module")
def outage(
    own_server: Any, s3_variables: Any, iq_root: Path, folders: Path
) -> Iterator[SimpleNamespace]:
    """Both runs through the outage: their outputs before it, and how they ended."""
    client = own_server.client
    upload(client, iq_root, "iq")
    pace_of(folders).write_text("1.0")  # neither is done before both are on their way
    root = f"s3://{BUCKET}"
    environment = os.environ | s3_variables(own_server.endpoint)
    runs = {
        name: subprocess.Popen(
            command(folders, name, spec),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, spec in (
            ("export", export_spec(f"{root}/iq", f"{root}/out")),
            ("train", training_spec(f"{root}/iq", f"{root}/model")),
        )
    }
    try:
        wait_until(lambda: on_their_way(client, runs))
        own_server.kill()
        address = urlparse(own_server.endpoint)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.hostname, address.port), 5)
        victims = [min(workers_of(folders / "batches")), trainer_pids()[0]]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        pace_of(folders).write_text("0.05")
        time.sleep(OUTAGE_S)
        still_there = {name: run.poll() is None for name, run in runs.items()}
        own_server.start()
        # As they stand when nothing has been written since.
        before = keys_of(client, "out/_receipts/")
        said = {name: run.communicate(timeout=PATIENCE_S)[0] for name, run in runs.items()}
        codes = {name: run.returncode for name, run in runs.items()}
        yield SimpleNamespace(
            codes=codes, said=said, still_there=still_there, before=before, client=client
        )
    finally:
        for run in runs.values():
            run.kill()
            run.communicate()


def test_both_runs_wait_and_finish(outage: SimpleNamespace) -> None:
    assert outage.still_there == {"export": True, "train": True}, outage.said
    assert outage.codes == {"export": 0, "train": 0}, outage.said
    assert "Traceback" not in "".join(outage.said.values())


def test_the_export_is_right_and_nothing_with_a_receipt_was_done_again(
    outage: SimpleNamespace, folders: Path, iq_root: Path
) -> None:
    client = outage.client
    manifest = json.loads(object_at(client, "out/_manifest.json"))
    after = keys_of(client, "out/_receipts/")
    assert len(outage.before) >= 3
    assert len(after) == RECORDS // PART_ROWS
    assert {name: after[name] for name in outage.before} == outage.before
    assert set(keys_of(client, "out/data/")) == {entry["file"] for entry in manifest["files"]}

    rows = []
    for entry in manifest["files"]:
        payload = object_at(client, f"out/data/{entry['file']}")
        assert hashlib.sha256(payload).hexdigest() == entry["sha256"]
        rows += pq.read_table(io.BytesIO(payload)).to_pylist()
    assert [row["ordinal"] for row in rows] == list(range(RECORDS))
    for row, record in zip(rows, sds.open(str(iq_root)), strict=True):
        samples = record["samples"].data
        assert row["id"] == record.id
        np.testing.assert_array_equal(
            np.array(row["samples"], np.float32).view("c8")[..., 0], samples
        )
        assert row["energy"] == pytest.approx(float((np.abs(samples) ** 2).sum()), rel=1e-5)

    seen = Counter(first for log in workers_of(folders / "batches").values() for first in log)
    assert set(seen) == set(range(0, RECORDS, PART_ROWS // 2))
    for name in outage.before:
        first = int(Path(name).stem.removeprefix("part-")) * PART_ROWS
        assert seen[first] == seen[first + PART_ROWS // 2] == 1, name
    # One was killed, and took up its part again; the others waited where they were.
    assert len(workers_of(folders / "batches")) == 3


def test_the_model_is_that_of_a_run_that_was_left_alone(
    outage: SimpleNamespace, folders: Path, iq_root: Path, tmp_path: Path
) -> None:
    assert len(trainer_pids()) == 2
    pace_of(folders).write_text("0")
    spec = checked(TrainSpec, training_spec(str(iq_root), str(tmp_path / "model")))
    manifest = train(spec).manifest
    there = json.loads(object_at(outage.client, "model/_manifest.json"))
    for key in ("run_key", "identity", "metrics", "steps"):
        assert there[key] == manifest[key]
    for name in ("model.safetensors", "metrics.jsonl", "_evaluation.json"):
        local = (tmp_path / "model" / name).read_bytes()
        assert object_at(outage.client, f"model/{name}") == local, name


def test_an_outage_that_lasts_is_told_with_its_length_and_the_remedy(
    s3_variables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed (extra s3)")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        for name, value in s3_variables(f"http://127.0.0.1:{taken.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setattr("signal_batch.failures._PAUSES_S", (1.5, 1.5))
        s3fs.S3FileSystem.clear_instance_cache()
        store = OutputStore(f"s3://{BUCKET}/out")
        with pytest.raises(StorageError) as caught:
            store.read_manifest()
    s3fs.S3FileSystem.clear_instance_cache()
    said = str(caught.value)
    assert f"s3://{BUCKET}/out/_manifest.json" in said
    assert "Could not connect" in said
    assert "tried again for" in said
    assert "run the same command again" in said
