"""The flows as deployments that a real Prefect worker runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.flows import EntrypointType

from flows.export_features import export_features
from signal_batch import verify

pytestmark = pytest.mark.xdist_group("prefect")

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@pytest.fixture(scope="module")
def deployment(api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Id of a deployment of the export flow whose work pool has a worker."""
    log = (tmp_path_factory.mktemp("worker") / "log").open("wb")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "tests"]
    worker = subprocess.Popen(
        [*command, "--type", "process", "--install-policy", "never"],
        env=os.environ | {"PREFECT_API_URL": api.url, "PREFECT_WORKER_QUERY_SECONDS": "0.5"},
        cwd=tmp_path_factory.mktemp("elsewhere"),
        stdout=log,
        stderr=log,
    )
    try:
        deadline = time.monotonic() + 60
        while not api.post("/work_pools/filter", {}):
            assert time.monotonic() < deadline, "the worker made no pool"
            time.sleep(0.2)
        made = export_features.to_deployment(
            "test", work_pool_name="tests", entrypoint_type=EntrypointType.MODULE_PATH
        )
        assert made.entrypoint == "flows.export_features.export_features"
        yield str(made.apply())
    finally:
        worker.send_signal(signal.SIGINT)
        try:
            worker.wait(20)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        log.close()


@pytest.fixture
def run(api: Any, deployment: str, workers: Any) -> Callable[..., str]:
    """Starts a run of the deployment with parameters as the UI's form sends them."""

    def run(spec: dict[str, Any], **environment: str) -> str:
        names = ("PYTHONPATH", "TEST_WORKERS")
        variables = {name: os.environ[name] for name in names} | environment
        body = {"parameters": {"spec": spec}, "job_variables": {"env": variables}}
        return api.post(f"/deployments/{deployment}/create_flow_run", body)["id"]

    return run


@pytest.fixture
def form(dataset: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "dataset": str(dataset),
        "output": str(tmp_path / "out"),
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        "features": "helper_features:energy",
        "batch_size": 4,
        "part_bytes": 2600,
        "compression": "snappy",
        "execution": {"workers": 2},
    }


def test_a_run_cancelled_in_the_ui_stops_and_the_next_one_finishes(
    api: Any,
    run: Callable[..., str],
    form: dict[str, Any],
    workers: Any,
    wait_until: Callable[..., Any],
    record_property: Callable[[str, object], None],
) -> None:
    first = run(form, TEST_PAUSE_S="0.5")
    receipts = Path(form["output"], "_receipts")
    wait_until(lambda: len(workers.alive) == 2 and list(receipts.glob("*.json")), 90)
    asked = time.monotonic()
    api.post(f"/flow_runs/{first}/set_state", {"state": {"type": "CANCELLING"}})
    # A worker learns of it from an event, or from asking every ten seconds.
    workers.gone_after(15)
    record_property("seconds until cancelled", time.monotonic() - asked)
    wait_until(lambda: api.flow_run(first)["state_type"] in FINAL, 30)
    assert api.flow_run(first)["state_type"] == "CANCELLED"
    done = len(list(receipts.glob("*.json")))
    assert 1 <= done < 6

    workers.forget()
    second = run(form)
    wait_until(lambda: api.flow_run(second)["state_type"] in FINAL, 60)
    assert api.flow_run(second)["state_type"] == "COMPLETED"
    assert verify(form["output"]).ok
    assert sum(len(log) for log in workers.logs.values()) == 2 * (6 - done)


def test_a_deployed_run_with_a_bad_column_fails_and_says_why(
    api: Any, run: Callable[..., str], form: dict[str, Any], wait_until: Callable[..., Any]
) -> None:
    failing = run(form | {"columns": ["samples"]})
    wait_until(lambda: api.flow_run(failing)["state_type"] in FINAL, 60)
    state = api.flow_run(failing)["state"]
    assert state["type"] == "FAILED"
    assert "selector 'samples' starts with 'samples'; it must be one of" in state["message"]
    assert not Path(form["output"]).exists()
