"""Deployed flows that run: from one serving process, and from a worker of a work pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signal_batch import verify

pytestmark = [pytest.mark.xdist_group("deployments"), pytest.mark.timeout(400)]

SERVED = ("export-features", "verify-export", "validate-dataset")


def _spec(captures: Path, output: Path, **changes: Any) -> dict[str, Any]:
    fields = {
        "dataset": str(captures),
        "output": str(output),
        "columns": ["field:samples"],
        "features": "statistics",
    }
    return {"spec": fields | changes}


def _children(pid: int) -> set[int]:
    """Processes that descend from one, itself aside."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found: set[int] = set()
    front = {pid}
    while front := {child for child, parent in parents.items() if parent in front}:
        found |= front
    return found


def _running(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


@pytest.fixture
def serve(api: Any, start: Callable[..., Any], wait_until: Callable[..., Any]) -> Callable[[], Any]:
    """Starts `signal-batch serve` and waits until its deployments are there and not paused."""

    def ready() -> bool:
        made = api.deployments()
        return all(name in made and not made[name]["paused"] for name in SERVED)

    def serve() -> Any:
        process = start("signal-batch", "serve", "--limit", 4, "--only", *SERVED)
        wait_until(lambda: ready() or process.poll() is not None, 120)
        assert process.poll() is None, process.log.read_text()
        return process

    return serve


@pytest.fixture
def check_stop(
    api: Any,
    captures: Path,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    record_property: Callable[[str, object], None],
) -> Callable[..., None]:
    """Has two slow runs served, stops serving by a signal, and sees everything end in time."""

    def check(process: Any, how: signal.Signals) -> None:
        outputs = [tmp_path / f"slow-{number}" for number in range(2)]
        slow = {"features": "slow_features:slow", "batch_size": 4}
        runs = [api.run("export-features", _spec(captures, output, **slow)) for output in outputs]
        wait_until(lambda: all((output / "_spec.json").exists() for output in outputs), 120)
        wait_until(lambda: len(_children(process.pid)) >= 4, 30)  # two flow runs and their workers
        children = _children(process.pid)
        before = len(process.log.read_text())
        asked = time.monotonic()
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.send_signal(how)
        wait_until(lambda: not _running(children), 30, 0.05)
        gone_s = time.monotonic() - asked
        record_property("seconds until the runs are gone", gone_s)
        assert process.wait(60) == 0, process.log.read_text()
        record_property("seconds until serve is gone", time.monotonic() - asked)
        assert gone_s < 5.0
        said = process.log.read_text()[before:]
        assert said.rstrip().endswith("stopped; the deployments are paused until the next serve")
        assert "Traceback" not in said
        assert [api.get(f"/flow_runs/{run}")["state_type"] for run in runs] == ["CANCELLED"] * 2
        assert all(api.deployments()[name]["paused"] for name in SERVED)

    return check


def test_serve_runs_what_is_asked_for_and_ends_by_sigterm(
    api: Any,
    serve: Callable[[], Any],
    check_stop: Callable[..., None],
    captures: Path,
    tmp_path: Path,
) -> None:
    def report(run: str) -> str:
        found = api.post("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return str(next(item["data"] for item in found if item["type"] == "markdown"))

    process = serve()
    output = tmp_path / "out"
    state = api.ended(api.run("export-features", _spec(captures, output)))
    assert state["type"] == "COMPLETED", state
    assert verify(str(output)).ok
    run = api.run("verify-export", {"output": str(output)})
    assert api.ended(run)["type"] == "COMPLETED"
    assert api.get(f"/flow_runs/{run}")["name"] == f"verify {output}"
    assert f"# {output}: sound" in report(run)

    # A damaged output: the run fails, and says what is damaged.
    part = next((output / "data").iterdir())
    part.write_bytes(part.read_bytes()[:-1])
    run = api.run("verify-export", {"output": str(output)})
    state = api.ended(run)
    assert state["type"] == "FAILED"
    assert "truncated?" in state["message"]
    assert "truncated?" in report(run)
    said = process.log.read_text()
    assert "serving validate-dataset, export-features, verify-export; Ctrl-C stops" in said
    assert f"{api.url.removesuffix('/api')}/deployments" in said
    check_stop(process, signal.SIGTERM)


def test_serve_starts_again_and_ends_by_ctrl_c(
    serve: Callable[[], Any], check_stop: Callable[..., None]
) -> None:
    check_stop(serve(), signal.SIGINT)


def test_a_worker_runs_what_was_deployed(
    api: Any,
    start: Callable[..., Any],
    finish: Callable[..., tuple[int, str]],
    captures: Path,
    tmp_path: Path,
) -> None:
    # It may have been served before, which leaves it paused and off the pools.
    if standing := api.deployments().get("export-features"):
        api.ask("POST", f"/deployments/{standing['id']}/resume_deployment").raise_for_status()
    code, said = finish("signal-batch", "deploy", "--pool", "crew", "--only", "export-features")
    assert code == 0, said
    deployed = api.deployments()["export-features"]
    assert deployed["work_pool_name"] == "crew"
    assert deployed["job_variables"]["env"]["DO_NOT_TRACK"] == "1"
    start("prefect", "worker", "start", "--pool", "crew", "--install-policy", "never")
    output = tmp_path / "out"
    run = api.run("export-features", _spec(captures, output))
    state = api.ended(run, 180)
    assert state["type"] == "COMPLETED", state
    assert api.get(f"/flow_runs/{run}")["work_pool_name"] == "crew"
    assert verify(str(output)).ok
