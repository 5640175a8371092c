"""The export flow against a real server: what is written, and what the run's page shows."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import signal_dataset as sds

from flows.export_features import export_features
from signal_batch import export, verify
from signal_batch.errors import CorruptDatasetError, FeatureError, OutputConflictError, SpecError
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore
from tasks import tracking

pytestmark = pytest.mark.xdist_group("prefect")

MakeSpec = Callable[..., ExportSpec]
STEPS = ["validate dataset", "pin annotations", "select records", "plan parts"]
LAST_STEPS = ["commit output", "report"]
SHARD_NAME = re.compile(r"export shard \d+ of \d+, ordinals \d+-\d+")


def rows_of(output: str) -> list[dict[str, Any]]:
    files = sorted(Path(output, "data").glob("*.parquet"))
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def contents(folder: str | Path) -> dict[str, tuple[int, bytes]]:
    """Every file under a folder, with the time it was written."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def digests(output: str) -> list[tuple[str, str]]:
    files = (OutputStore(output).read_manifest() or {})["files"]
    return [(item["logical_digest"], item["sha256"]) for item in files]


def shard_runs(task_runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in task_runs if SHARD_NAME.fullmatch(run["name"])]


def failed(spec: ExportSpec) -> Any:
    """The state of a run that must fail."""
    state = export_features(spec, return_state=True)
    assert state.is_failed()
    return state


def most_at_once(spans: list[tuple[str, str]]) -> int:
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = most = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    return most


def test_an_export_and_what_its_page_shows(
    api: Any,
    make_spec: MakeSpec,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[float] = []
    update = tracking.update_progress_artifact

    def noting(*, artifact_id: object, progress: float, description: str) -> None:
        published.append(progress)
        update(artifact_id=artifact_id, progress=progress, description=description)

    monkeypatch.setattr(tracking, "update_progress_artifact", noting)
    monkeypatch.setattr(tracking, "UPDATE_EVERY_S", 0.2)
    monkeypatch.setenv("TEST_PAUSE_S", "0.3")
    spec = make_spec()
    outcome = export_features(spec)

    assert verify(spec.output).ok
    rows = rows_of(spec.output)
    assert [row.pop("energy") for row in rows] == pytest.approx(
        [row["energy"] for row in expected], rel=1e-6
    )
    assert rows == [{k: v for k, v in row.items() if k != "energy"} for row in expected]

    run_id = outcome.manifest["run"]["flow_run_id"]
    run = api.flow_run(run_id)
    assert run["state_type"] == "COMPLETED"
    assert run["name"] == outcome.manifest["run"]["flow_run_name"]
    assert run["name"] == f"export helper_features:energy of captures.sds to {spec.output}"
    snapshot = outcome.manifest["pin"]["snapshot_id"]
    assert run["tags"] == ["dataset:captures.sds", f"snapshot:{snapshot}"]

    task_runs = api.task_runs(run_id, 8)
    assert {item["state_type"] for item in task_runs} == {"COMPLETED"}
    shards = shard_runs(task_runs)
    assert sorted(item["name"] for item in shards) == [
        "export shard 1 of 2, ordinals 0-23",
        "export shard 2 of 2, ordinals 24-47",
    ]
    others = [item["name"] for item in task_runs if item not in shards]
    # Prefect adds a few characters to the name of a task that is called rather than submitted.
    assert [re.sub(r"-\w{3}$", "", name) for name in others] == STEPS + LAST_STEPS

    (progress,) = api.artifacts(run_id, "progress")
    assert progress["data"] == 100
    assert re.fullmatch(r"48 of 48 records, [\d,]+ records/s", progress["description"])
    assert published == sorted(published)
    assert any(0 < value < 100 for value in published)

    (table,) = api.artifacts(run_id, "table")
    assert [row["shard"] for row in _json(table["data"])] == [
        "shard 1 of 2, ordinals 0-23",
        "shard 2 of 2, ordinals 24-47",
    ]
    assert sum(row["rows"] for row in _json(table["data"])) == len(expected)

    (report,) = api.artifacts(run_id, "markdown")
    totals, pin = outcome.manifest["totals"], outcome.manifest["pin"]
    for fragment in (
        "| rows | 48 |",
        "| files | 6 |",
        "| bytes | ",
        "| set aside | 0 |",
        "records/s",
        outcome.manifest["run_key"],
        pin["fingerprint"][:16],
        pin["annotations"][0]["name"],
        pin["annotations"][0]["root_sha256"][:16],
    ):
        assert fragment in report["data"]
    assert totals["files"] == 6
    assert len(api.artifacts(run_id)) == 3


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def test_the_result_does_not_depend_on_prefect_or_on_the_number_of_workers(
    api: Any, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_spec(output=str(tmp_path / "plain"), execution={"workers": 2})
    export(plain)
    for workers, shards in ((1, 1), (3, 4)):
        # More shards than workers, as a large job has.
        monkeypatch.setattr("signal_batch.plan.SHARD_BYTES", 1)
        monkeypatch.setattr("signal_batch.plan.MOST_SHARDS", shards)
        spec = make_spec(output=str(tmp_path / f"w{workers}"), execution={"workers": workers})
        outcome = export_features(spec)
        assert digests(spec.output) == digests(plain.output)
        run_id = outcome.manifest["run"]["flow_run_id"]
        runs = shard_runs(api.task_runs(run_id, len(STEPS + LAST_STEPS) + shards))
        assert len(runs) == shards
        assert most_at_once([(run["start_time"], run["end_time"]) for run in runs]) == workers


def test_a_finished_output_is_left_alone(api: Any, make_spec: MakeSpec) -> None:
    spec = make_spec(execution={"workers": 1})
    export(spec)
    before = contents(spec.output)
    state = export_features(spec, return_state=True)
    assert state.is_completed()
    assert state.result().already_complete
    assert contents(spec.output) == before
    run_id = state.state_details.flow_run_id
    (report,) = api.artifacts(run_id)
    assert "Complete already" in report["data"]
    assert not shard_runs(api.task_runs(run_id, 5))


def test_another_spec_at_the_same_output_is_refused(
    api: Any, make_spec: MakeSpec, workers: Any
) -> None:
    spec = make_spec(execution={"workers": 1})
    export(spec)
    before = contents(spec.output)
    workers.forget()
    state = failed(make_spec(compression="gzip", batch_size=2))
    with pytest.raises(OutputConflictError, match="compression") as caught:
        state.result()
    assert "batch_size" in str(caught.value)
    assert "compression" in api.flow_run(state.state_details.flow_run_id)["state"]["message"]
    assert contents(spec.output) == before
    assert not workers.logs


def test_a_killed_worker_is_tried_again_and_goes_on_where_it_stopped(
    api: Any,
    make_spec: MakeSpec,
    workers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = make_spec(output=str(tmp_path / "undisturbed"))
    export(undisturbed)
    workers.forget()
    monkeypatch.setenv("TEST_KILL_AT", "28")  # the second batch of the fourth part
    spec = make_spec(execution={"workers": 1, "retry_delay_s": 0.2})
    outcome = export_features(spec)

    assert verify(spec.output).ok
    assert digests(spec.output) == digests(undisturbed.output)
    first, second = sorted(workers.logs.values())
    assert first == [0, 4, 8, 12, 16, 20, 24, 28]
    assert second == [24, 28, 32, 36, 40, 44]
    written = [time_ns for time_ns, _ in contents(Path(spec.output, "data")).values()]
    assert sum(time_ns < workers.killed_at_ns for time_ns in written) == 3

    (shard,) = shard_runs(api.task_runs(outcome.manifest["run"]["flow_run_id"], 7))
    assert shard["run_count"] == 2
    names = [state["name"] for state in api.states(shard)]
    assert names == ["Pending", "Running", "AwaitingRetry", "Retrying", "Completed"]
    (table,) = api.artifacts(outcome.manifest["run"]["flow_run_id"], "table")
    assert _json(table["data"])[0]["attempts"] == 2


def test_a_corrupt_record_fails_its_shard_alone(
    api: Any, make_spec: MakeSpec, write_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    """Its shard is not tried again, the others finish, and the page says what to do."""
    root = tmp_path / "damaged.sds"
    uncompressed = sds.StorageOptions(writer_options="group_size:1,uncompressed")
    write_dataset(root, 200, per_shard=40, options=uncompressed)
    bad = 102  # none of those that planning reads
    damaged = flip_a_bit(root, np.arange(8 * bad, 8 * bad + 8, dtype=np.float32))
    spec = make_spec(dataset=str(root), columns=["field:samples"], part_bytes=5_000)
    state = failed(spec)
    with pytest.raises(CorruptDatasetError) as caught:
        state.result()
    assert caught.value.ordinal == bad
    assert f"record {bad}" in str(caught.value)
    assert damaged.name in str(caught.value)
    run = api.flow_run(state.state_details.flow_run_id)
    assert f"record {bad}" in run["state"]["message"]
    shards = {item["name"]: item for item in shard_runs(api.task_runs(run["id"], 6))}
    (whole, hurt) = (shards[name] for name in sorted(shards))
    assert (whole["state_type"], whole["run_count"]) == ("COMPLETED", 1)
    assert (hurt["state_type"], hurt["run_count"]) == ("FAILED", 1)
    assert f"record {bad}" in hurt["state"]["message"]
    assert not Path(spec.output, "_manifest.json").exists()

    (table,) = api.artifacts(run["id"], "table")
    first, second = _json(table["data"])
    assert f"record {bad}" in first["error"]
    assert (first["state"], first["record"], second["state"]) == ("failed", bad, "done")
    assert second["rows"] == int(whole["name"].rpartition("-")[2]) + 1
    (report,) = api.artifacts(run["id"], "markdown")
    assert report["key"] == "export-features-failure"
    assert f"record {bad}" in report["data"]
    assert "run this again" in report["data"]


def flip_a_bit(root: Path, values: np.ndarray) -> Path:
    """Damage the record that holds the values; returns its shard."""
    needle = values.tobytes()
    (path,) = [path for path in root.rglob("*.arrayrecord") if needle in path.read_bytes()]
    whole = bytearray(path.read_bytes())
    whole[whole.index(needle)] ^= 4
    path.write_bytes(whole)
    return path


def test_a_feature_that_fails_is_not_tried_again(api: Any, make_spec: MakeSpec) -> None:
    state = failed(make_spec(features="helper_features:broken", execution={"workers": 1}))
    with pytest.raises(FeatureError, match="RuntimeError: no such luck"):
        state.result()
    (shard,) = shard_runs(api.task_runs(state.state_details.flow_run_id, 5))
    assert shard["run_count"] == 1


def test_a_dataset_with_a_missing_shard_is_not_exported(
    api: Any, make_spec: MakeSpec, dataset: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(dataset, tmp_path / "broken.sds"))
    gone = sorted(path for path in broken.rglob("*.arrayrecord") if "annotation" not in str(path))
    gone[0].unlink()
    spec = make_spec(dataset=str(broken))
    state = failed(spec)
    with pytest.raises(CorruptDatasetError, match=re.escape(gone[0].name)):
        state.result()
    assert not Path(spec.output).exists()


def test_orchestration_is_cheap(
    api: Any,
    make_spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """30 shards whose worker has nothing to do; the figures are reported, the bounds are wide."""
    monkeypatch.setattr("signal_batch.plan.SHARD_BYTES", 1)
    monkeypatch.setattr("signal_batch.plan.MOST_SHARDS", 30)
    monkeypatch.setattr("signal_batch.engines.run_worker", lambda order, on_progress, run_id: [])
    spec = make_spec(batch_size=1, part_bytes=1)
    totals = {"rows": 0, "files": 0, "bytes": 0, "bad": 0}

    def commit(job: Any, run: dict[str, Any]) -> dict[str, Any]:
        pin = job.pin.model_dump(mode="json")
        return {"run_key": job.run_key, "run": run, "pin": pin, "totals": totals}

    monkeypatch.setattr("tasks.export.steps.commit", commit)
    started = time.monotonic()
    outcome = export_features(spec)
    seconds = time.monotonic() - started
    runs = shard_runs(api.task_runs(outcome.manifest["run"]["flow_run_id"], 36))
    assert len(runs) == 30
    starts = [datetime.fromisoformat(run["start_time"]) for run in runs]
    ends = [datetime.fromisoformat(run["end_time"]) for run in runs]
    a_shard = (max(ends) - min(starts)).total_seconds() / len(runs)
    record_property("seconds a shard", a_shard)
    record_property("seconds a run", seconds)
    print(f"orchestration: {1000 * a_shard:.0f} ms a shard, {seconds:.1f} s the run")
    assert a_shard < 0.5
    assert seconds < 20


@pytest.mark.parametrize("where", ["dataset", "output"])
def test_credentials_in_a_uri_never_reach_the_server(
    api: Any, make_spec: MakeSpec, where: str
) -> None:
    before = len(api.flow_runs())
    with pytest.raises(SpecError, match="credentials") as caught:
        make_spec(**{where: "s3://key:hunter2@bucket/path"})
    assert "hunter2" not in str(caught.value)
    fields = make_spec().model_dump(mode="json") | {where: "s3://key:hunter2@bucket/path"}
    with pytest.raises(SpecError) as refused:
        export_features(fields)  # as plain JSON, which Prefect would send before it looks
    assert "hunter2" not in str(refused.value)
    assert len(api.flow_runs()) == before
