"""A team's server as compose.yaml has it: Postgres, a login, deployments, workers, automations.

The tests tell one story in order: a worker dies in the middle of an export, another one takes over
and works on while the server finds out, and the next run finishes what the dead one began.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.dataset as ds
import pytest
import signal_dataset as sds

from signal_batch import verify
from signal_batch.synth import synthesize

pytestmark = [pytest.mark.xdist_group("team"), pytest.mark.timeout(420)]

RECORDS = 48
PARTS = 6
SLOW_FEATURES = '''
"""Energies, as slowly as the environment says: the run key is the same at any speed."""

import os
import time

import numpy as np


def energy(batch):
    time.sleep(float(os.environ.get("TEST_PAUSE_S", "0")))
    return {"energy": np.sum(np.abs(batch["samples"]) ** 2, axis=(1, 2), dtype=np.float64)}
'''


@pytest.fixture(scope="module")
def dataset(team: Any) -> Path:
    root: Path = team.data / "captures.sds"
    synthesize(str(root), records=RECORDS, shape=(1, 32), seed=11, records_per_shard=16)
    (team.data / "slow_features.py").write_text(SLOW_FEATURES)
    return root


@pytest.fixture(scope="module")
def energies(dataset: Path) -> dict[int, float]:
    """Ordinal to energy, from a plain loop over the dataset."""
    return {
        ordinal: sum(float(abs(np.complex128(value))) ** 2 for value in record["samples"].data.flat)
        for ordinal, record in enumerate(sds.open(str(dataset)))
    }


def spec_of(dataset: Path, output: Path) -> dict[str, Any]:
    """An export of six parts, as the form in the UI sends it."""
    return {
        "dataset": str(dataset),
        "output": str(output),
        "columns": ["field:samples"],
        "features": "slow_features:energy",
        "batch_size": RECORDS // PARTS,
        "part_bytes": 320,
        "execution": {"workers": 1},
    }


def rows_of(output: Path) -> dict[int, float]:
    table = ds.dataset(output / "data").to_table()
    return dict(zip(table["ordinal"].to_pylist(), table["energy"].to_pylist(), strict=True))


def receipts(output: Path) -> list[Path]:
    return sorted((output / "_receipts").glob("part-*.json"))


@dataclass
class Death:
    """A run whose machine died: its id, its output, and the files that were safe by then."""

    run: str
    output: Path
    files: dict[str, tuple[int, int]]


def identity(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file: another one is another file, whatever is in it."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.fixture
def message_about(
    team: Any, mailbox: Any, wait_until: Callable[..., Any]
) -> Callable[[str, str], dict[str, str]]:
    """The message that arrives with that state and that output in its title."""

    def message_about(state: str, output: str) -> dict[str, str]:
        def arrived() -> list[dict[str, str]]:
            failed = team.events("prefect.automation.action.failed")
            assert [one for one in failed if "notification" in one["payload"]["action_type"]] == []
            messages = map(json.loads, mailbox.received)
            return [
                message
                for message in messages
                if message["title"].startswith(f"{state}: ") and message["title"].endswith(output)
            ]

        found: list[dict[str, str]] = wait_until(arrived, 30.0, 0.5)
        return found[0]

    return message_about


@pytest.fixture(scope="module")
def death(
    team: Any,
    automated: Any,
    dataset: Path,
    wait_until: Callable[..., Any],
    kill_tree: Callable[..., list[int]],
) -> Death:
    """A worker takes a run, and is killed with everything it started once a few parts are safe."""
    output = team.data / "interrupted"
    worker = team.services.start(
        "worker",
        PYTHONPATH=str(team.data),
        TEST_PAUSE_S="2",
        PREFECT_WORKER_QUERY_SECONDS="1",
        PREFECT_WORKER_WEBSERVER_PORT=str(team.free_port()),
    )
    body = {"parameters": {"spec": spec_of(dataset, output)}}
    run = team.api.post(f"/deployments/{team.deployment()}/create_flow_run", body)["id"]
    wait_until(lambda: len(receipts(output)) >= 2, 90.0)
    wait_until(lambda: team.events("prefect.flow-run.heartbeat", run), 30.0)
    killed = kill_tree(worker)
    assert len(killed) >= 2  # the run's process, and its export worker
    safe = receipts(output)
    assert 2 <= len(safe) < PARTS
    assert team.api.state(run)["type"] == "RUNNING"  # nobody is left to say otherwise
    named = {json.loads(path.read_text())["file"].rpartition("/")[2] for path in safe}
    files = {name: seen for name, seen in identity(output / "data").items() if name in named}
    return Death(run, output, files)


@pytest.fixture(scope="module")
def worker(team: Any, death: Death, wait_until: Callable[..., Any]) -> Iterator[Any]:
    """The worker of a machine that lives."""
    port = str(team.free_port())
    process = team.services.start(
        "worker",
        PYTHONPATH=str(team.data),
        PREFECT_WORKER_QUERY_SECONDS="1",
        PREFECT_WORKER_WEBSERVER_PORT=port,
    )
    yield process, port
    team.services.stop(process)


def test_who_does_not_log_in_is_refused(team: Any) -> None:
    for auth in (None, ("team", "wrong")):
        answer = httpx.post(f"{team.api.url}/flow_runs/filter", json={}, auth=auth)
        assert answer.status_code == 401
    assert httpx.get(f"{team.api.url}/health").status_code == 200


def test_a_command_that_does_not_log_in_says_what_to_set(team: Any) -> None:
    environment = team.services.environment("deploy")
    environment["PREFECT_API_AUTH_STRING"] = "team:wrong"
    done = subprocess.run(
        ["signal-batch", "automate"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "PREFECT_API_AUTH_STRING" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_server_keeps_its_data_in_postgres(team: Any, automated: Any) -> None:
    query = "SELECT count(*) FROM deployment"
    command = [team.postgres.bin / "psql", "-h", "127.0.0.1", "-p", str(team.postgres.port)]
    done = subprocess.run(
        [*map(str, command), "-U", "prefect", "-At", "-c", query, "prefect"],
        env={"PGPASSWORD": team.password},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == len(team.api.post("/deployments/filter", {})) >= 5


def test_a_run_that_no_worker_takes_is_told(
    team: Any, automated: Any, dataset: Path, message_about: Any
) -> None:
    deployment = team.deployment("validate-dataset/validate-dataset")
    body = {"parameters": {"dataset": str(dataset)}}
    run = team.api.post(f"/deployments/{deployment}/create_flow_run", body)
    try:
        message = message_about("Late", run["name"])
    finally:  # the workers that come are for others
        team.api.http.delete(f"/flow_runs/{run['id']}").raise_for_status()
    assert message["title"] == f"Late: validate-dataset {run['name']}"
    assert f"dataset: {dataset}" in message["text"]
    assert "Is a worker of work pool signal-batch running?" in message["text"]
    assert f"/runs/flow-run/{run['id']}" in message["text"]


def test_a_scheduled_run_exports_what_is_there(
    team: Any, worker: Any, dataset: Path, energies: dict[int, float], wait_until: Any
) -> None:
    output, deployment = team.data / "scheduled", team.deployment()
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=9)
    timing = {"interval": 86400, "anchor_date": due.isoformat(), "timezone": "UTC"}
    parameters = {"spec": spec_of(dataset, output)}
    schedule = {"schedule": timing, "active": True, "parameters": parameters}
    path = f"/deployments/{deployment}/schedules"
    [made] = team.api.post(path, [schedule])

    def scheduled() -> list[dict[str, Any]]:
        runs = team.api.runs(deployment)
        return [run for run in runs if datetime.fromisoformat(run["expected_start_time"]) == due]

    try:
        [run] = wait_until(scheduled, 30.0)
        ended = team.api.ended(run["id"])
    finally:
        team.api.http.delete(f"{path}/{made['id']}").raise_for_status()
    assert run["auto_scheduled"]
    assert ended["state"]["type"] == "COMPLETED", ended["state"]["message"]
    assert rows_of(output) == pytest.approx(energies)
    assert verify(str(output)).ok


def test_the_workers_health_check_passes(team: Any, worker: Any, image: Any) -> None:
    process, port = worker
    assert process.poll() is None
    check = [word.replace(":8080", f":{port}") for word in image.healthcheck]
    environment = team.services.environment("worker")
    assert subprocess.run(check, env=environment, check=False, capture_output=True).returncode == 0


def test_an_announced_dataset_is_exported_once(
    team: Any, worker: Any, dataset: Path, wait_until: Any
) -> None:
    said = team.services.run(
        "deploy", "signal-batch", "announce", dataset, "--annotations", "truth-v1"
    )
    assert said.startswith(f"announced {dataset}, fingerprint ")
    again = team.services.run(
        "deploy", "signal-batch", "announce", dataset, "--annotations", "truth-v1"
    )
    assert "was announced already" in again

    [event] = team.events("signal-batch.dataset.published")
    assert event["payload"]["records"] == RECORDS
    folder = f"captures-{event['payload']['fingerprint'][:12]}"
    output = team.data / "features" / folder

    def started() -> list[dict[str, Any]]:
        runs = team.api.runs(team.deployment())
        return [run for run in runs if run["parameters"]["spec"]["output"] == str(output)]

    [run] = wait_until(started, 60.0)
    ended = team.api.ended(run["id"])
    assert ended["state"]["type"] == "COMPLETED", ended["state"]["message"]
    assert ended["parameters"]["spec"]["dataset"] == str(dataset)
    assert verify(str(output)).ok
    assert ds.dataset(output / "data").count_rows() == RECORDS
    assert len(started()) == 1


def test_a_finished_run_is_told(team: Any, worker: Any, message_about: Any) -> None:
    # Not of the scheduled run: of one that was scheduled less than five minutes before, Prefect
    # holds the events back for a quarter of an hour, waiting for one that it never sends.
    [output] = (team.data / "features").iterdir()
    message = message_about("Done", str(output))
    assert "captures.sds" in message["title"]
    assert message["text"].startswith("export-features: export ")
    assert "Completed after " in message["text"]
    assert "tags: " in message["text"]
    assert "http://localhost:4200/runs/flow-run/" in message["text"]


def test_a_run_whose_machine_died_is_marked_as_crashed(
    team: Any, worker: Any, death: Death, message_about: Any
) -> None:
    ended = team.api.ended(death.run, 150.0)
    assert ended["state"]["type"] == "CRASHED"
    assert ended["state"]["message"].startswith("No heartbeat for 90 s")
    assert "resumes" in ended["state"]["message"]
    message = message_about("Crashed", str(death.output))
    assert "captures.sds" in message["title"]
    assert "No heartbeat for 90 s" in message["text"]
    assert f"/runs/flow-run/{death.run}" in message["text"]


def test_the_next_run_resumes_it(
    team: Any, worker: Any, dataset: Path, death: Death, energies: dict[int, float]
) -> None:
    body = {"parameters": {"spec": spec_of(dataset, death.output)}}
    run = team.api.post(f"/deployments/{team.deployment()}/create_flow_run", body)["id"]
    ended = team.api.ended(run)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]["message"]
    assert len(receipts(death.output)) == PARTS
    after = identity(death.output / "data")
    assert {name: after[name] for name in death.files} == death.files
    assert rows_of(death.output) == pytest.approx(energies)
    assert verify(str(death.output)).ok
