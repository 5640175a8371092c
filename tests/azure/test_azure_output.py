"""An output on Azure Blob storage, against a real service: resumed after a kill, and right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import signal_batch
from signal_batch.cli import main
from signal_batch.errors import OutputConflictError, WorkerDiedError
from signal_batch.frozen import checked
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore


def spec_of(dataset: Path, output: str, **execution: Any) -> ExportSpec:
    fields = {
        "dataset": str(dataset),
        "output": output,
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        "features": "killing_features:same",
        "batch_size": 20,
        "part_bytes": 24_000,
        "execution": {"workers": 1, "retries": 0} | execution,
    }
    return checked(ExportSpec, fields)


def blobs_of(container: Any) -> dict[str, Any]:
    """ETag and time of every blob of the output, by its path there."""
    found = container.list_blobs(name_starts_with="lab/out/")
    return {
        blob.name.removeprefix("lab/out/"): (blob.etag, blob.last_modified)
        for blob in found
        if not blob.name.startswith("lab/out/_attempts/")
    }


def blob_at(container: Any, path: str) -> bytes:
    body: bytes = container.download_blob(f"lab/out/{path}").readall()
    return body


def test_an_export_to_azure_is_resumed_after_a_kill_and_equals_one_to_disk(
    container: Any,
    iq_root: Path,
    killing_features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(killing_features))
    monkeypatch.setenv("PYTHONPATH", str(killing_features))
    monkeypatch.setenv("TEST_KILLED", str(tmp_path))
    uri = f"abfs://{container.container_name}/lab/out"
    spec = spec_of(iq_root, uri)
    with pytest.raises(WorkerDiedError):
        signal_batch.export(spec)
    before = blobs_of(container)
    done = [name for name in before if name.startswith("_receipts/")]
    assert len(done) == 6
    assert "_manifest.json" not in before

    manifest = signal_batch.export(spec).manifest
    after = blobs_of(container)
    assert {name: after[name] for name in done} == {name: before[name] for name in done}
    batches = Counter(map(int, (tmp_path / "batches").read_text().split()))
    assert batches == dict.fromkeys(range(0, 200, 20), 1) | {120: 2}

    local = signal_batch.export(spec_of(iq_root, str(tmp_path / "out"))).manifest
    assert manifest["run_key"] == local["run_key"]
    assert manifest["files"] == local["files"]
    assert json.loads(blob_at(container, "_manifest.json")) == manifest
    for entry in manifest["files"]:
        body = (tmp_path / "out" / "data" / entry["file"]).read_bytes()
        assert blob_at(container, f"data/{entry['file']}") == body
    assert main(["verify", uri]) == 0
    capsys.readouterr()
    assert signal_batch.export(spec).already_complete
    assert blobs_of(container) == after

    with pytest.raises(OutputConflictError, match=r"spec\.batch_size: there 20, here 10"):
        signal_batch.export(spec.model_copy(update={"batch_size": 10}))


def test_a_claim_on_azure_is_create_only_and_a_container_must_be_there(
    container: Any, iq_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"abfs://{container.container_name}/race"
    first = OutputStore(uri).claim({"run_key": "a", "identity": {}})
    assert OutputStore(uri).claim({"run_key": "a", "identity": {}, "by": 2}) == first
    with pytest.raises(OutputConflictError):
        OutputStore(uri).claim({"run_key": "b", "identity": {}})
    command = ["export", str(iq_root), "abfs://no-such-container/out", "--column", "field:samples"]
    assert main(command) == 1
    shown = capsys.readouterr().err
    assert "no-such-container/out" in shown
    assert "Traceback" not in shown
