"""The validation flow."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.validate_dataset import validate_dataset
from signal_batch.errors import CorruptDatasetError, DatasetNotFoundError, SpecError

pytestmark = pytest.mark.xdist_group("prefect")


def test_a_sound_dataset_passes_and_is_described(api: Any, dataset: Path) -> None:
    state = validate_dataset(str(dataset), annotations=["truth-v1"], return_state=True)
    assert state.is_completed()
    result = state.result()
    assert result["pin"]["record_count"] == 48
    assert result["statuses"] == {"truth-v1": {"success": 48}}
    (report,) = api.artifacts(state.state_details.flow_run_id)
    assert report["type"] == "markdown"
    assert result["pin"]["fingerprint"] in report["data"]
    assert "48 records" in report["data"]
    assert report["data"].endswith("## Faults\nNone.")


def test_a_missing_shard_fails_the_run_and_is_named(
    api: Any, dataset: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(dataset, tmp_path / "broken.sds"))
    shard = min(path for path in broken.rglob("*.arrayrecord") if "annotation" not in str(path))
    shard.unlink()
    state = validate_dataset(str(broken), return_state=True)
    assert state.is_failed()
    with pytest.raises(CorruptDatasetError, match=f"{shard.name} is missing"):
        state.result()
    run = api.flow_run(state.state_details.flow_run_id)
    assert f"{shard.name} is missing" in run["state"]["message"]
    (check,) = api.task_runs(run["id"], 1)
    assert check["run_count"] == 1
    (report,) = api.artifacts(run["id"], "markdown")
    assert f"{shard.name} is missing" in report["data"]


def test_no_dataset_is_not_tried_again(api: Any, tmp_path: Path) -> None:
    state = validate_dataset(str(tmp_path / "nothing"), return_state=True)
    with pytest.raises(DatasetNotFoundError):
        state.result()
    (check,) = api.task_runs(state.state_details.flow_run_id, 1)
    assert check["run_count"] == 1


def test_credentials_never_reach_the_server(api: Any) -> None:
    before = api.flow_runs("validate-dataset")
    with pytest.raises(SpecError, match="credentials") as caught:
        validate_dataset("s3://key:hunter2@bucket/captures")
    assert "hunter2" not in str(caught.value)
    assert len(api.flow_runs("validate-dataset")) == len(before)
