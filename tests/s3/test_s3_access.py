"""Large parts on S3, and a bucket that may be read but not listed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import signal_batch
from signal_batch.frozen import checked
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

#: As `s3_server` knows them.
UNLISTED, READERS_OWN = "unlisted", "readers-own"
PART = "part-00000-3f2a9c1b0d4e.parquet"
LARGE = (110 << 20) + 7
#: What an upload may hold in memory, whatever the size of the part.
UPLOAD_BYTES = 100 << 20
#: argv: URI, file. Prints by how much the upload raised the peak of the memory, in bytes.
UPLOAD = """
import resource, sys
from pathlib import Path
from signal_batch.store import OutputStore

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

store = OutputStore(sys.argv[1])
store.put_object("small", b"x" * (1 << 20))
before = peak()
store.put_part(Path(sys.argv[2]), sys.argv[3])
print(peak() - before)
"""
#: The same, killed when every byte is there and only the last request is missing.
KILLED = """
import os, signal
import s3fs

whole = s3fs.S3FileSystem._call_s3

async def call(self, method, *arguments, **options):
    if method == "complete_multipart_upload":
        os.kill(os.getpid(), signal.SIGKILL)
    return await whole(self, method, *arguments, **options)

s3fs.S3FileSystem._call_s3 = call
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "part.parquet"
    path.write_bytes(np.random.default_rng(5).bytes(LARGE))
    return path


def upload(program: str, uri: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, uri, str(path), PART]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_large_part_goes_up_in_parts_and_is_there_when_all_are(
    s3_client: Any, bucket: str, large: Path
) -> None:
    """Killed before the last request, then left alone: within bounded memory."""
    uri, key = f"s3://{bucket}/out", f"out/data/{PART}"
    assert upload(KILLED + UPLOAD, uri, large).returncode == -9
    pending = s3_client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [item["Key"] for item in pending] == [key]
    store = OutputStore(uri)
    assert store.listing("data") == {}
    assert store.everything("") == {"small"}
    assert store.receipts() == {}

    ended = upload(UPLOAD, uri, large)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < UPLOAD_BYTES
    assert store.listing("data") == {PART: LARGE}
    found = s3_client.get_object(Bucket=bucket, Key=key)
    assert found["ETag"].strip('"').endswith("-7"), "7 requests of 16 MB"
    assert sha256(found["Body"].read()).digest() == sha256(large.read_bytes()).digest()


@pytest.fixture
def as_reader(
    s3_client: Any, reader: dict[str, str], iq_root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """This process may read the dataset whose URI it is given, and not list its bucket."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed (extra s3)")
    for name in (UNLISTED, READERS_OWN):
        s3_client.create_bucket(Bucket=name)
    for path in sorted(iq_root.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            key = f"iq/{path.relative_to(iq_root)}"
            s3_client.put_object(Bucket=UNLISTED, Key=key, Body=path.read_bytes())
    for name, value in reader.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield f"s3://{UNLISTED}/iq"
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_dataset_is_used_without_the_right_to_list_its_bucket(
    as_reader: str,
) -> None:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
        client.list_objects_v2(Bucket=UNLISTED)
    with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
        client.put_object(Bucket=UNLISTED, Key="mine", Body=b"")
    client.close()

    assert signal_batch.validate(as_reader, ["truth-v1", "review-v1"], deep=True).ok

    place = f"s3://{READERS_OWN}"
    common = {
        "dataset": as_reader,
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
    }
    exported = {**common, "output": f"{place}/out", "execution": {"workers": 1}}
    assert signal_batch.export(checked(ExportSpec, exported)).manifest["totals"]["rows"] == 200
    assert signal_batch.verify(f"{place}/out").ok
    learned = {
        **common,
        "output": f"{place}/model",
        "target": "label",
        "split": "scene test=0.3",
        "trainer": "sklearn",
        "transforms": ["statistics"],
        "steps": 6,
    }
    assert train(checked(TrainSpec, learned)).manifest["steps"] == 6
