"""The same export on a Dask cluster, a Ray cluster and a work pool, with things killed on the way.

Every engine is real: a Dask scheduler with two workers, a Ray cluster, and two Prefect workers that
poll a work pool, each a process of its own. The right values are those of an export without any
of them, which other tests hold against a plain loop.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import signal_dataset as sds

from flows.export_features import export_features
from signal_batch import export, verify

pytestmark = pytest.mark.xdist_group("prefect")
BIN = Path(sys.executable).parent
POOL = "runners"
WORKER = ("-m", "prefect", "worker", "start", "--pool", POOL, "--limit", 2)
#: A worker that looks for runs every second, and runs that show every 30 s that they live.
QUICK = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
RUNNERS = ("dask", "ray", "work-pool")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def done_parts(out: Path) -> set[int]:
    return {int(path.stem.removeprefix("part-")) for path in (out / "_receipts").glob("*.json")}


def digests(out: Path) -> dict[str, str]:
    receipts = [json.loads(path.read_text()) for path in (out / "_receipts").glob("*.json")]
    return {receipt["file"]: receipt["logical_digest"] for receipt in receipts}


def under_way(process: subprocess.Popen[str], workers: Any, out: Path) -> bool:
    """Whether two workers are at it and a part is done; fails if the command has ended."""
    assert process.poll() is None, process.communicate()
    return len(workers.alive) == 2 and bool(done_parts(out))


def computed(workers: Any) -> list[int]:
    return sorted(ordinal for log in workers.logs.values() for ordinal in log)


class Cluster:
    """Processes of a test, stopped in the order in which they were started, backwards."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: object, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | QUICK | environment,
        )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def gated(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker program waits with its first part done, until the test opens the gate."""
    monkeypatch.setenv("TEST_GATED", "1")


@pytest.fixture
def dask_address(cluster: Cluster, gated: None, tmp_path: Path) -> str:
    """A Dask scheduler with two workers, which can use the helper features."""
    pytest.importorskip("distributed", reason="distributed is not installed (extra dask)")
    address = f"tcp://127.0.0.1:{free_port()}"
    quiet = ("--no-dashboard", "--host", "127.0.0.1")
    cluster.start("-m", "distributed.cli.dask_scheduler", *quiet, "--port", address[16:])
    for name in ("one", "two"):
        folder = ("--local-directory", tmp_path / name)
        options = (*quiet, "--nworkers", 1, "--nthreads", 1, "--no-nanny", *folder)
        cluster.start("-m", "distributed.cli.dask_worker", address, *options)
    return address


@pytest.fixture
def work_pool(api: Any, cluster: Cluster, gated: None) -> str:
    """The deployments of an export on a work pool that two Prefect workers poll."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.deployments.runner import EntrypointType

    from flows.export_shard import export_shard

    with get_client(sync_client=True) as client:
        if POOL not in [pool.name for pool in client.read_work_pools()]:
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    for flow in (export_shard, export_features):
        flow.to_deployment(
            flow.name, work_pool_name=POOL, entrypoint_type=EntrypointType.MODULE_PATH
        ).apply()
    for name in ("one", "two"):
        cluster.start(*WORKER, "--name", name, PREFECT_API_URL=api.url)
    return "export-shard/export-shard"


@pytest.fixture
def runner(request: pytest.FixtureRequest, gated: None) -> str:
    """What `--runner` takes, for the engine that a test is about."""
    if request.param == "dask":
        return f"dask:{request.getfixturevalue('dask_address')}"
    if request.param == "ray":
        pytest.importorskip("ray", reason="ray is not installed (extra ray)")
        return "ray"
    return f"work-pool:{request.getfixturevalue('work_pool')}"


@pytest.mark.parametrize("runner", RUNNERS, indirect=True)
def test_a_killed_machine_costs_only_what_it_was_writing(
    runner: str,
    start: Callable[..., Any],
    arguments: list[str],
    make_spec: Callable[..., Any],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    """Kill what started a worker program: a Dask worker, a Ray worker, a flow run's process."""
    plain = make_spec(output=str(tmp_path / "plain"))
    workers.open_gate()
    export(plain)
    workers.forget()

    out = tmp_path / "out"
    process = start(*arguments, "--runner", runner)
    try:
        wait_until(lambda: under_way(process, workers, out), 120)
        victim = workers.alive[0]
        os.kill(parent_of(victim), signal.SIGKILL)
        finished = done_parts(out)
        wait_until(lambda: victim not in workers.alive, 5)
        workers.open_gate()
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (0, ""), stdout
    assert verify(str(out)).ok
    assert digests(out) == digests(tmp_path / "plain")
    assert len(workers.logs) == 3
    # What had a receipt was computed once; of the rest at most one part twice.
    again = [ordinal for ordinal in range(0, 48, 4) if computed(workers).count(ordinal) > 1]
    assert set(computed(workers)) == set(range(0, 48, 4))
    assert not {ordinal // 8 for ordinal in again} & finished
    assert len({ordinal // 8 for ordinal in again}) <= 1
    left = {path.name for path in out.iterdir()}
    assert left == {"_manifest.json", "_receipts", "_spec.json", "data"}


@pytest.mark.parametrize("runner", RUNNERS, indirect=True)
def test_a_stopped_run_ends_its_workers_everywhere_and_is_finished_by_the_same_command(
    runner: str,
    start: Callable[..., Any],
    arguments: list[str],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    out = tmp_path / "out"
    process = start(*arguments, "--runner", runner)
    wait_until(lambda: under_way(process, workers, out), 120)
    process.send_signal(signal.SIGINT)
    workers.gone_after(5)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 1
    assert re.fullmatch(r"signal-batch: stopped; .*\n", stderr)

    finished = done_parts(out)
    assert 1 <= len(finished) < 6
    workers.forget()
    workers.open_gate()
    again = start(*arguments, "--runner", runner)
    stdout, stderr = again.communicate(timeout=120)
    assert (again.returncode, stderr) == (0, ""), stdout
    assert verify(str(out)).ok
    left = [part for part in range(6) if part not in finished]
    assert computed(workers) == sorted(8 * part + half for part in left for half in (0, 4))


def test_a_dask_worker_ends_what_a_killed_parent_asked_for(
    dask_address: str,
    start: Callable[..., Any],
    arguments: list[str],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    process = start(*arguments, "--runner", f"dask:{dask_address}")
    wait_until(lambda: len(workers.alive) == 2, 120)
    process.kill()
    process.communicate()
    workers.gone_after(5)


def test_cancelling_in_the_ui_ends_parent_and_children_and_the_next_run_resumes(
    api: Any,
    work_pool: str,
    make_spec: Callable[..., Any],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
) -> None:
    out = tmp_path / "out"
    spec = make_spec(execution={"runner": "work-pool", "workers": 2, "retry_delay_s": 0.2})
    deployment = api.get("/deployments/name/export-features/export-features")["id"]
    body = {
        "state": {"type": "SCHEDULED"},
        "parameters": {"spec": spec.model_dump(mode="json")},
    }

    def state_of(run: dict[str, Any]) -> str:
        return str(api.flow_run(run["id"])["state_type"])

    run = api.post(f"/deployments/{deployment}/create_flow_run", body)
    wait_until(lambda: len(workers.alive) == 2 and done_parts(out), 120)
    api.post(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    workers.gone_after(5)
    wait_until(lambda: state_of(run) == "CANCELLED", 30)
    children = api.flow_runs("export-shard")[:2]
    wait_until(lambda: {state_of(child) for child in children} == {"CANCELLED"}, 30)

    finished = done_parts(out)
    assert 1 <= len(finished) < 6
    workers.forget()
    workers.open_gate()
    again = api.post(f"/deployments/{deployment}/create_flow_run", body)
    wait_until(lambda: state_of(again) == "COMPLETED", 120)
    assert verify(str(out)).ok
    left = [part for part in range(6) if part not in finished]
    assert computed(workers) == sorted(8 * part + half for part in left for half in (0, 4))


def test_a_limit_on_the_server_holds_back_the_shards_of_all_runs(
    api: Any,
    start: Callable[..., Any],
    arguments: list[str],
    workers: Any,
    tmp_path: Path,
) -> None:
    """Two exports of two workers each share one slot, as a GPU or a slow bucket would ask for."""
    api.post("/concurrency_limits/", {"tag": "bucket", "concurrency_limit": 1})
    given = ("--limit", "bucket", "--workers", "2")
    outs = [tmp_path / "out", tmp_path / "other"]
    commands = [[str(out) if item == str(outs[0]) else item for item in arguments] for out in outs]
    runs = [start(*command, *given, TEST_PAUSE_S="0.1") for command in commands]
    most = 0
    while any(run.poll() is None for run in runs):
        most = max(most, len(workers.alive))
        time.sleep(0.05)
    for run in runs:
        stdout, stderr = run.communicate(timeout=60)
        assert (run.returncode, stderr) == (0, ""), stdout
    assert most == 1
    assert len(workers.logs) == 4
    for out in outs:
        assert verify(str(out)).ok


def test_failures_are_told_apart_from_successes(
    api: Any,
    work_pool: str,
    workers: Any,
    start: Callable[..., Any],
    write_dataset: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Two damaged records in four flow runs: those two fail, and the message has both."""
    workers.open_gate()
    root = tmp_path / "damaged.sds"
    uncompressed = sds.StorageOptions(writer_options="group_size:1,uncompressed")
    write_dataset(root, 200, per_shard=50, options=uncompressed)
    for bad in (47, 102):  # none of those that planning reads
        needle = np.arange(8 * bad, 8 * bad + 8, dtype=np.float32).tobytes()
        (path,) = [path for path in root.rglob("*.arrayrecord") if needle in path.read_bytes()]
        whole = bytearray(path.read_bytes())
        whole[whole.index(needle)] ^= 4
        path.write_bytes(whole)
    out = tmp_path / "out"
    process = start(
        *("export", root, out, "--column", "field:samples", "--features", "helper_features:energy"),
        *("--batch-size", 10, "--part-size", 1, "--workers", 4, "--runner", "work-pool"),
    )
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1
    assert stderr.startswith("signal-batch: 2 shards failed. ")
    assert stderr.count("\n") == 1
    for words in ("record 47 ", "record 102 ", "ordinals 0-49", "ordinals 100-149"):
        assert words in stderr
    parents = api.flow_runs()
    assert parents[0]["state_type"] == "FAILED"
    children = {run["name"].partition(" to ")[0]: run for run in api.flow_runs("export-shard")[:4]}
    states = {name: run["state_type"] for name, run in children.items()}
    assert states == {
        "export ordinals 0-49": "FAILED",
        "export ordinals 50-99": "COMPLETED",
        "export ordinals 100-149": "FAILED",
        "export ordinals 150-199": "COMPLETED",
    }
    firsts = [json.loads(path.read_text())["first_ordinal"] for path in receipts_of(out)]
    done = [ordinal for ordinal in firsts if 50 <= ordinal < 100 or ordinal >= 150]
    assert len(done) * rows_a_part(out) == 100
    assert not (out / "_manifest.json").exists()


def receipts_of(out: Path) -> list[Path]:
    return sorted((out / "_receipts").glob("*.json"))


def rows_a_part(out: Path) -> int:
    return int(json.loads((out / "_spec.json").read_text())["plan"]["part_rows"])


def test_a_machine_that_dies_without_a_word_is_noticed(
    api: Any,
    work_pool: str,
    cluster: Cluster,
    make_spec: Callable[..., Any],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefect's workers and their flow runs are killed together; no automation is there to tell."""
    monkeypatch.setattr("tasks.work_pool.DEAD_AFTER_S", 45.0)  # a heartbeat comes every 30 s
    monkeypatch.setattr("tasks.work_pool.LOOK_EVERY_S", 1.0)
    out = tmp_path / "out"
    execution = {"runner": "work-pool", "workers": 2, "retry_delay_s": 0.2}
    spec = make_spec(execution=execution)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(export_features, spec)
        wait_until(lambda: len(workers.alive) == 2 and done_parts(out), 120)
        for process in cluster.processes:
            for pid in (*descendants(process.pid), process.pid):
                os.kill(pid, signal.SIGKILL)
        finished = done_parts(out)
        wait_until(lambda: not workers.alive, 5)
        workers.forget()
        workers.open_gate()
        cluster.start(*WORKER, "--name", "three", PREFECT_API_URL=api.url)
        run.result(timeout=200)
    assert verify(str(out)).ok
    left = [part for part in range(6) if part not in finished]
    assert computed(workers) == sorted(8 * part + half for part in left for half in (0, 4))
    children = api.flow_runs("export-shard")[:4]
    assert sorted(child["state_type"] for child in children) == ["COMPLETED"] * 2 + ["CRASHED"] * 2


def test_a_work_pool_is_polled_at_the_server_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where settings hold for a block only, as with a server that a command starts for itself."""
    from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

    from tasks import work_pool

    asked: list[str | None] = []

    def get_client(*, sync_client: bool) -> Any:
        asked.append(get_current_settings().api.url)
        return MagicMock()

    monkeypatch.setattr(work_pool, "get_client", get_client)
    settings = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with settings, work_pool.WorkPoolEngine(None, "parent", None):
        pass
    # Once to look up the deployment, once to poll.
    assert asked == ["http://127.0.0.1:9/api"] * 2


def descendants(pid: int) -> list[int]:
    """All processes that a process started, and that those started."""
    children = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = []
    for child in children:
        try:
            if parent_of(child) == pid:
                found += [child, *descendants(child)]
        except FileNotFoundError:
            continue
    return found
