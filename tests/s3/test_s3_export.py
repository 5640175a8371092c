"""Datasets and outputs on S3, against a real server: the same results, the same refusals."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import signal_dataset as sds

import signal_batch
from signal_batch.cli import main
from signal_batch.errors import (
    CorruptDatasetError,
    DatasetNotFoundError,
    OutputConflictError,
    OutputError,
)
from signal_batch.frozen import checked
from signal_batch.job import ExportJob, claim, commit, progress_of
from signal_batch.planning import prepare
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore, Receipt
from signal_batch.synth import synthesize
from signal_batch.worker import work

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


def spec_of(dataset: str | Path, output: str | Path, **fields: Any) -> ExportSpec:
    defaults: dict[str, Any] = {
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        "where": ["annotation:review-v1 status success"],
        "batch_size": 8,
        "part_bytes": "32KB",
    }
    locations = {"dataset": str(dataset), "output": str(output)}
    return checked(ExportSpec, defaults | locations | fields)


def export_here(spec: ExportSpec, *, parts: int | None = None) -> ExportJob:
    """Claim and write the first `parts` parts that are missing, in this process."""
    job = claim(prepare(spec))
    shards = progress_of(job).shards
    chosen = [part for shard in shards for part in shard.parts][:parts]
    if chosen:
        work(job.order(replace(shards[0], parts=tuple(chosen))), lambda event: None)
    return job


def keys_of(client: Any, uri: str) -> dict[str, tuple[int, str, Any]]:
    """Size, ETag and time of every object below a URI, by relative key."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    found = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            key = item["Key"].removeprefix(f"{prefix}/")
            found[key] = (item["Size"], item["ETag"], item["LastModified"])
    return found


def lasting(keys: dict[str, Any]) -> dict[str, Any]:
    """Without the notes of workers, which go when an output is complete."""
    return {key: value for key, value in keys.items() if not key.startswith("_attempts/")}


def object_at(client: Any, uri: str) -> bytes:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    body: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return body


# --- datasets ----------------------------------------------------------------------------------


def test_the_same_dataset_has_the_same_fingerprint_anywhere(dataset: str, iq_root: Path) -> None:
    here, there = signal_batch.validate(str(iq_root)), signal_batch.validate(dataset)
    assert there.ok
    assert there.pin.fingerprint == here.pin.fingerprint
    assert there.pin.uri == dataset


def test_validate_at_the_command_line(dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", dataset, "--annotations", "truth-v1", "--deep"]) == 0
    shown = capsys.readouterr()
    assert "sound, every record decoded" in shown.out
    assert main(["inspect", dataset]) == 0
    assert dataset in capsys.readouterr().out


@pytest.mark.parametrize("where", ["no-such-bucket/captures", "{bucket}/nothing/here", "{bucket}"])
def test_what_is_not_there(bucket: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"s3://{where.format(bucket=bucket)}"
    with pytest.raises(DatasetNotFoundError, match="wrong bucket or prefix"):
        signal_batch.validate(uri)
    assert main(["validate", uri]) == 2
    shown = capsys.readouterr()
    assert uri in shown.err
    assert "Traceback" not in shown.err


def test_a_missing_and_a_truncated_shard(
    s3_client: Any, bucket: str, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    local = write_dataset(tmp_path / "small", 20)
    for path in local.rglob("*"):
        if path.is_file():
            s3_client.upload_file(str(path), bucket, f"small/{path.relative_to(local)}")
    uri = f"s3://{bucket}/small"
    assert signal_batch.validate(uri).ok
    index = sds.open(uri)._index
    missing, short = (index.locate(ordinal)[0].data.path for ordinal in (0, 12))
    s3_client.delete_object(Bucket=bucket, Key=f"small/{missing}")
    payload = object_at(s3_client, f"{uri}/{short}")
    s3_client.put_object(Bucket=bucket, Key=f"small/{short}", Body=payload[:-7])
    faults = signal_batch.validate(uri).faults
    assert any(f"{missing} is missing" in fault for fault in faults)
    assert any(f"{short} has {len(payload) - 7} bytes where" in fault for fault in faults)
    spec = spec_of(uri, tmp_path / "out", columns=["field:samples"], where=[])
    with pytest.raises(CorruptDatasetError, match=f"{missing} is missing") as caught:
        export_here(spec)
    assert caught.value.ordinal == 0


def run_cli(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with another environment."""
    changed = {name: value for name, value in environment.items() if value is not None}
    kept = {name: value for name, value in os.environ.items() if name not in environment}
    return subprocess.run(
        [sys.executable, "-m", "signal_batch", *arguments],
        env=kept | changed,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_credentials_is_said_in_one_line(dataset: str, iq_root: Path, tmp_path: Path) -> None:
    nobody = {
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
        "HOME": str(tmp_path),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    bucket = dataset.removeprefix("s3://").partition("/")[0]
    commands = (
        ("validate", dataset),
        ("export", str(iq_root), f"s3://{bucket}/out", "--column", "field:samples"),
    )
    with ThreadPoolExecutor(2) as pool:
        for ended in pool.map(lambda command: run_cli(*command, **nobody), commands):
            assert ended.returncode == 2, ended.stderr
            assert "redentials" in ended.stderr
            assert "Traceback" not in ended.stderr
            assert ended.stderr.count("\n") == 1, ended.stderr


def test_wrong_credentials_are_refused_and_not_repeated(
    dataset: str, iq_root: Path, tmp_path: Path
) -> None:
    wrong = {"AWS_SECRET_ACCESS_KEY": "hunter2-hunter2"}
    bucket = dataset.removeprefix("s3://").partition("/")[0]
    commands = (
        ("validate", dataset),
        ("export", str(iq_root), f"s3://{bucket}/out", "--column", "field:samples"),
    )
    with ThreadPoolExecutor(2) as pool:
        for ended in pool.map(lambda command: run_cli(*command, **wrong), commands):
            assert ended.returncode in (1, 2), ended.stderr
            assert "hunter2" not in ended.stdout + ended.stderr
            assert "Traceback" not in ended.stderr


# --- outputs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local_run(iq_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The manifest of the same job, from disk to disk."""
    return commit(export_here(spec_of(iq_root, tmp_path_factory.mktemp("local") / "out")))


def test_s3_to_s3_in_two_workers_equals_disk_to_disk(
    s3_client: Any, dataset: str, bucket: str, local_run: dict[str, Any], iq_root: Path
) -> None:
    uri = f"s3://{bucket}/deep/out"
    rows: list[int] = []
    spec = spec_of(dataset, uri, execution={"workers": 2})
    manifest = signal_batch.export(
        spec, on_progress=lambda count, total=None: rows.append(count)
    ).manifest
    assert manifest["run_key"] == local_run["run_key"]
    assert manifest["files"] == local_run["files"]
    assert manifest["totals"] == local_run["totals"]
    assert sum(rows) == manifest["totals"]["rows"]

    stored = keys_of(s3_client, uri)
    assert {key for key in stored if key.startswith("data/")} == {
        f"data/{entry['file']}" for entry in manifest["files"]
    }
    assert json.loads(object_at(s3_client, f"{uri}/_manifest.json")) == manifest
    plain = sds.open(str(iq_root))
    entry = manifest["files"][1]
    table = pq.read_table(_spooled(s3_client, f"{uri}/data/{entry['file']}"))
    for row in table.to_pylist():
        pairs = np.array(row["samples"], np.float32)
        wanted = plain[row["ordinal"]]["samples"].data
        np.testing.assert_array_equal(pairs.view("c8")[..., 0], wanted)

    assert signal_batch.verify(uri).faults == ()
    again = signal_batch.export(spec)
    assert again.already_complete
    assert keys_of(s3_client, uri) == stored

    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    for key in stored:
        assert secret not in object_at(s3_client, f"{uri}/{key}")


def _spooled(client: Any, uri: str) -> Any:
    return io.BytesIO(object_at(client, uri))


def test_a_run_on_s3_is_resumed(
    s3_client: Any, dataset: str, bucket: str, local_run: dict[str, Any]
) -> None:
    uri = f"s3://{bucket}/out"
    spec = spec_of(dataset, uri)
    export_here(spec, parts=2)
    before = lasting(keys_of(s3_client, uri))
    assert sum(key.startswith("data/") for key in before) == 2
    stray = f"data/part-00000-{'0' * 12}.parquet"
    s3_client.put_object(Bucket=bucket, Key=f"out/{stray}", Body=b"of a late attempt")
    manifest = commit(export_here(spec))
    after = keys_of(s3_client, uri)
    assert {key: after[key] for key in before} == before
    assert stray not in after
    assert manifest["files"] == local_run["files"]
    assert signal_batch.verify(uri).ok


def test_verify_on_s3_names_damage(
    s3_client: Any, dataset: str, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"s3://{bucket}/out"
    manifest = commit(export_here(spec_of(dataset, uri)))
    first, second = (entry["file"] for entry in manifest["files"][:2])
    payload = bytearray(object_at(s3_client, f"{uri}/data/{first}"))
    payload[len(payload) // 2] ^= 1
    s3_client.put_object(Bucket=bucket, Key=f"out/data/{first}", Body=bytes(payload))
    s3_client.delete_object(Bucket=bucket, Key=f"out/data/{second}")
    s3_client.put_object(Bucket=bucket, Key="out/data/stray.parquet", Body=b"x")
    assert main(["verify", uri]) == 1
    shown = capsys.readouterr().err
    assert f"data/{first} has other bytes" in shown
    assert f"data/{second} is missing" in shown
    assert "data/stray.parquet is not named" in shown
    assert main(["verify", f"s3://{bucket}/nothing"]) == 2


def test_another_job_on_s3_is_refused(s3_client: Any, dataset: str, bucket: str) -> None:
    uri = f"s3://{bucket}/out"
    export_here(spec_of(dataset, uri), parts=1)
    before = keys_of(s3_client, uri)
    with pytest.raises(OutputConflictError, match=r"spec\.batch_size: there 8, here 9"):
        signal_batch.export(spec_of(dataset, uri, batch_size=9))
    assert keys_of(s3_client, uri) == before
    s3_client.put_object(Bucket=bucket, Key="full/thesis.tex", Body=b"precious")
    with pytest.raises(OutputConflictError, match=r"not empty.*thesis\.tex"):
        signal_batch.export(spec_of(dataset, f"s3://{bucket}/full"))
    assert list(keys_of(s3_client, f"s3://{bucket}/full")) == ["thesis.tex"]


def test_a_bucket_that_is_not_there(dataset: str, iq_root: Path) -> None:
    with pytest.raises(OutputError, match="is there such a bucket"):
        claim(prepare(spec_of(iq_root, "s3://no-such-bucket/out")))


def test_claims_and_receipts_are_create_only(bucket: str) -> None:
    """The server decides: of several at once, one wins and all agree."""
    uri, attempts = f"s3://{bucket}/race", 6

    def attempt(number: int) -> tuple[Any, Receipt]:
        store = OutputStore(uri)
        claimed = store.claim({"run_key": "k", "identity": {}, "by": number})
        mine = Receipt(
            run_key="k",
            part=0,
            first_ordinal=0,
            last_ordinal=0,
            rows=number,
            bytes=0,
            file=f"by-{number}",
            sha256="",
            logical_digest="",
        )
        return claimed["by"], store.add_receipt(mine)

    with ThreadPoolExecutor(attempts) as pool:
        found = set(pool.map(attempt, range(attempts)))
    assert len(found) == 1
    assert OutputStore(uri).receipts() == {0: found.pop()[1]}


def test_of_two_jobs_at_once_one_gets_the_folder(bucket: str) -> None:
    def attempt(number: int) -> bool:
        try:
            OutputStore(f"s3://{bucket}/race").claim({"run_key": str(number), "identity": {}})
        except OutputConflictError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(attempt, range(6))) == 1
