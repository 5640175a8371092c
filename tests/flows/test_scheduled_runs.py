"""Runs on datasets that move with time: late ones, tried again, by schedule, and in a range."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import CronSchedule
from prefect.flow_engine import run_flow
from prefect.flows import EntrypointType
from prefect.states import Scheduled

from flows.export_features import export_features
from flows.train_model import train_model
from signal_batch import verify
from signal_batch.specs import ExportSpec

pytestmark = pytest.mark.xdist_group("prefect")

Publish = Callable[..., None]
Moving = dict[str, Any]
NOW = {"type": "SCHEDULED", "state_details": {"scheduled_time": datetime.now(UTC).isoformat()}}


@pytest.fixture
def publish(dataset: Path, tmp_path: Path) -> Publish:
    """Publishes the datasets of the given days."""

    def publish(*days: str) -> None:
        for day in days:
            shutil.copytree(dataset, tmp_path / f"captures-{day}.sds")

    return publish


@pytest.fixture
def moving(make_spec: Callable[..., ExportSpec], tmp_path: Path) -> Moving:
    """An export of the day's dataset to the day's output, as a deployment has it."""
    spec = make_spec(
        dataset=f"{tmp_path}/captures-{{scheduled:%Y-%m-%d}}.sds",
        output=f"{tmp_path}/out/{{scheduled:%Y/%m/%d}}",
    )
    return spec.model_dump(mode="json")


def scheduled_run(flow: Flow[..., Any], spec: Moving, moment: str) -> str:
    """A flow run that was to start at a moment, long ago."""
    state = Scheduled(scheduled_time=datetime.fromisoformat(moment))
    with get_client(sync_client=True) as client:
        return str(client.create_flow_run(flow, parameters={"spec": spec}, state=state).id)


def execute(flow: Flow[..., Any], run_id: str) -> Any:
    """Execute a flow run as a worker's process does, in this one; returns its final state."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(run_id))
    return run_flow(flow, flow_run=run, parameters=run.parameters, return_type="state")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def document(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_bytes())


@pytest.fixture
def engine(api: Any, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Executes a flow run in a process of its own, as a worker on a work pool does."""
    started = []

    def engine(run_id: str, **environment: str) -> subprocess.Popen[bytes]:
        names = {
            "PREFECT_API_URL": api.url,
            "PREFECT__FLOW_RUN_ID": run_id,
            "PREFECT__FLOW_ENTRYPOINT": "flows.export_features.export_features",
        }
        command = [sys.executable, "-m", "prefect.engine", run_id]
        process = subprocess.Popen(command, env=os.environ | names | environment, cwd=tmp_path)
        started.append(process)
        return process

    yield engine
    for process in started:
        process.kill()
        process.wait()


def test_a_late_run_that_crashed_and_is_scheduled_again_reads_the_same_dataset(
    api: Any,
    publish: Publish,
    moving: Moving,
    engine: Callable[..., subprocess.Popen[bytes]],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    publish("2026-03-01", "2026-03-02")
    out = tmp_path / "out" / "2026" / "03" / "01"
    # Half past midnight on the second in Berlin; in UTC it is still the first.
    run_id = scheduled_run(export_features, moving, "2026-03-02T00:30:00+01:00")
    process = engine(run_id, TEST_PAUSE_S="0.5")
    wait_until(lambda: len(workers.alive) == 2 and list(out.glob("_receipts/*.json")), 90)
    process.kill()
    workers.gone_after(5)
    done = contents(out / "_receipts")
    assert 1 <= len(done) < 6
    claim = (out / "_spec.json").read_bytes()
    run = api.flow_run(run_id)
    name = run["name"]
    assert name.endswith(f" captures-2026-03-01.sds to {out}")
    assert run["parameters"]["spec"]["dataset"].endswith("captures-{scheduled:%Y-%m-%d}.sds")

    # Whoever takes up a crashed run gives it a new time to start; what it was for stays.
    workers.forget()
    again = {"state": NOW | {"name": "AwaitingRetry"}, "force": True}
    api.post(f"/flow_runs/{run_id}/set_state", again)
    run = api.flow_run(run_id)
    assert run["expected_start_time"] == "2026-03-01T23:30:00Z"
    assert run["next_scheduled_start_time"] > run["expected_start_time"]
    state = execute(export_features, run_id)
    assert state.is_completed()
    assert verify(str(out)).ok
    assert done.items() <= contents(out / "_receipts").items()
    assert sum(map(len, workers.logs.values())) == 2 * (6 - len(done))
    assert (out / "_spec.json").read_bytes() == claim
    assert api.flow_run(run_id)["name"] == name
    manifest = document(out, "_manifest.json")
    for found in (manifest, json.loads(claim)):
        assert found["spec"]["dataset"] == f"{tmp_path}/captures-2026-03-01.sds"
        assert found["spec"]["output"] == str(out)
    assert manifest["run"]["flow_run_name"] == name

    # The same run once more, by hand, and another run for the same time: nothing is left to do.
    before = contents(out)
    workers.forget()
    api.post(f"/flow_runs/{run_id}/set_state", {"state": NOW, "force": True})
    other = scheduled_run(export_features, moving, "2026-03-01T23:30:00+00:00")
    assert other != run_id
    for finished in (run_id, other):
        assert execute(export_features, finished).is_completed()
        assert api.flow_run(finished)["name"] == name
        assert api.flow_run(finished)["expected_start_time"] == "2026-03-01T23:30:00Z"
    assert contents(out) == before
    assert workers.logs == {}
    assert [path.name for path in out.parent.iterdir()] == ["01"]


@pytest.fixture
def nightly(api: Any, moving: Moving) -> Iterator[str]:
    """Id of a deployment that runs at half past midnight in Berlin."""
    made = export_features.to_deployment(
        "half past midnight",
        parameters={"spec": moving},
        schedule=CronSchedule(cron="30 0 * * *", timezone="Europe/Berlin"),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment = str(made.apply())
    yield deployment
    # With its runs, also those that the server planned ahead.
    with get_client(sync_client=True) as client:
        client.delete_deployment(UUID(deployment))
        body = {"deployments": {"id": {"any_": [deployment]}}}
        for run in api.post("/flow_runs/filter", body):
            client.delete_flow_run(UUID(run["id"]))


def test_a_schedule_makes_one_run_for_each_time_and_each_has_its_dataset(
    api: Any, publish: Publish, nightly: str, workers: Any, tmp_path: Path
) -> None:
    publish("2026-03-28")
    # The night in which clocks in Berlin go forward lies between the two.
    window = {"start_time": "2026-03-28T12:00:00Z", "end_time": "2026-03-30T12:00:00Z"}
    for _ in range(2):
        api.post(f"/deployments/{nightly}/schedule", window | {"min_runs": 5})
    body = {
        "deployments": {"id": {"any_": [nightly]}},
        "flow_runs": {"expected_start_time": {"before_": "2026-03-31T00:00:00Z"}},
        "sort": "EXPECTED_START_TIME_ASC",
    }
    first, second = api.post("/flow_runs/filter", body)
    assert first["expected_start_time"] == "2026-03-28T23:30:00Z"
    assert second["expected_start_time"] == "2026-03-29T22:30:00Z"
    assert execute(export_features, first["id"]).is_completed()
    assert verify(str(tmp_path / "out" / "2026" / "03" / "28")).ok
    # Nothing was published on the second day: that run fails, and says what it looked for.
    state = execute(export_features, second["id"])
    assert state.is_failed()
    assert f"{tmp_path}/captures-2026-03-29.sds" in state.message
    assert [path.name for path in (tmp_path / "out" / "2026" / "03").iterdir()] == ["28"]


def test_a_model_of_the_day(api: Any, publish: Publish, workers: Any, tmp_path: Path) -> None:
    publish("2024-02-29")
    spec = {
        "dataset": f"{tmp_path}/captures-{{scheduled-1d:%Y-%m-%d}}.sds",
        "output": f"{tmp_path}/models/{{scheduled:%Y-%m-%d}}",
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        **{"target": "label", "trainer": "sklearn", "steps": 2, "batch_size": 8},
    }
    run_id = scheduled_run(train_model, spec, "2024-03-01T04:00:00+00:00")
    assert execute(train_model, run_id).is_completed()
    out = tmp_path / "models" / "2024-03-01"
    assert api.flow_run(run_id)["name"].endswith(f" captures-2024-02-29.sds to {out}")
    for written in ("_spec.json", "_manifest.json", "model.json"):
        assert document(out, written)["spec"]["dataset"] == f"{tmp_path}/captures-2024-02-29.sds"


def embedded_servers(home: Path) -> set[tuple[bytes, ...]]:
    """Parent and port of each embedded server that keeps its database in a folder."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"flows.embedded" in words:
                settings = (entry / "environ").read_bytes().split(b"\0")
                if f"PREFECT_HOME={home}".encode() in settings:
                    found.add(tuple(words[words.index(b"flows.embedded") + 1 :][:2]))
        except OSError:
            continue
    return found


def test_a_backfill_is_stopped_and_goes_on_with_one_server_for_all_its_runs(
    api: Any,
    publish: Publish,
    moving: Moving,
    start: Callable[..., Any],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    publish("2026-03-01", "2026-03-03")
    (tmp_path / "export.yaml").write_text(json.dumps(moving))
    arguments = ["backfill", "--from", "2026-03-01", "--to", "2026-03-03", "--parallel", 2]
    arguments += ["--skip-missing", "export", "--spec", "export.yaml", "--workers", 1]
    out = tmp_path / "out" / "2026" / "03"
    process = start(*arguments, TEST_PAUSE_S="0.5")

    def days_begun() -> set[str]:
        assert process.poll() is None
        return {path.parts[-3] for path in out.glob("*/_receipts/*.json")}

    wait_until(lambda: days_begun() == {"01", "03"}, 120)
    process.send_signal(signal.SIGINT)
    workers.gone_after(5)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (1, "")
    assert stdout.splitlines()[-1] == "3 runs: no dataset 1, stopped 2"
    runs = [run for run in api.flow_runs()[:2] if f" to {out}/0" in run["name"]]
    assert len(runs) == 2
    # Each is given four seconds to tell its server; one that is busy hears of it too late.
    assert {run["state_type"] for run in runs} <= {"CRASHED", "RUNNING"}
    done = contents(out)
    receipts = {name: value for name, value in done.items() if "_receipts" in name}
    assert 2 <= len(receipts) < 12

    workers.forget()
    home = tmp_path / "home"
    process = start(*arguments, server=None, PREFECT_HOME=str(home))
    servers: set[tuple[bytes, ...]] = set()

    def watched() -> bool:
        servers.update(embedded_servers(home))
        return process.poll() is not None

    wait_until(watched, 180)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (0, "")
    assert stdout.splitlines()[-1] == "3 runs: no dataset 1, done 2"
    assert re.search(r"^2026-03-03  done +48 +\d", stdout, re.MULTILINE)
    assert [parent for parent, _ in servers] == [str(process.pid).encode()]
    wait_until(lambda: not embedded_servers(home), 10)
    assert receipts.items() <= contents(out).items()
    assert sum(map(len, workers.logs.values())) == 2 * (12 - len(receipts))
    for day in ("01", "03"):
        assert verify(str(out / day)).ok
