"""A Prefect server, the installed commands as processes, and captures to run deployments on.

Nothing of Prefect runs in the process of the tests but the reading of files: what is tested are
the commands, the server and the workers as a team has them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("PREFECT_HOME", tempfile.mkdtemp(prefix="signal-batch-prefect-"))

import httpx
import pytest

from signal_batch.synth import synthesize

T = TypeVar("T")
BIN = Path(sys.executable).parent
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
#: A feature function that takes its time, so that a run can be stopped while it works.
SLOW = """
import time

import numpy as np


def slow(batch):
    time.sleep(2.0)
    return {"zero": np.zeros(len(batch["ordinal"]))}
"""


def _wait_until(check: Callable[[], T], timeout_s: float = 60.0, every_s: float = 0.1) -> T:
    """The first true value of `check`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout_s} s"
        time.sleep(every_s)
    return value


class Api:
    """What the server knows, over plain HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=30.0)

    def get(self, path: str) -> Any:
        return self.ask("GET", path).raise_for_status().json()

    def post(self, path: str, body: Any) -> Any:
        return self.ask("POST", path, body).raise_for_status().json()

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The answer, good or bad."""
        # A server on SQLite answers 503 while its database is busy; Prefect's client tries again.
        for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 0.0):
            answer = self.http.request(method, path, json=body)
            if answer.status_code != 503:
                break
            time.sleep(pause_s)
        return answer

    def deployments(self) -> dict[str, dict[str, Any]]:
        """All deployments by name."""
        return {item["name"]: item for item in self.post("/deployments/filter", {})}

    def run(self, deployment: str, parameters: dict[str, Any], **options: Any) -> str:
        """Start a run as the UI does; its id."""
        made = self.deployments()[deployment]["id"]
        body = {"parameters": parameters, **options}
        return self.post(f"/deployments/{made}/create_flow_run", body)["id"]

    def ended(self, run_id: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """The state in which a run ended, waiting for it."""

        def state() -> dict[str, Any]:
            run = self.get(f"/flow_runs/{run_id}")
            return run["state"] if run["state_type"] in FINAL else {}

        return _wait_until(state, timeout_s)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return _wait_until


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server in a process of its own, with an empty database."""
    home = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [BIN / "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--no-ui"],
            env=os.environ | {"PREFECT_HOME": str(home)},
            stdout=log,
            stderr=log,
        )
    api = Api(f"http://127.0.0.1:{port}/api")
    try:
        _wait_until(lambda: _answers(api), 120.0, 0.2)
        yield api
    finally:
        api.http.close()
        _end(process, signal.SIGTERM)


def _answers(api: Api) -> bool:
    try:
        return api.get("/health") is True
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[Any], how: signal.Signals) -> None:
    process.send_signal(how)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def environment(api: Api, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What commands of this module run with: the server, a home, and `slow_features`."""
    home = tmp_path_factory.mktemp("home")
    (home / "slow_features.py").write_text(SLOW)
    return os.environ | {
        "PREFECT_API_URL": api.url,
        "PREFECT_HOME": str(home),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
    }


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Starts a command of this environment, output in `PROGRAM-N.log`; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        log = tmp_path / f"{program}-{len(started)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(BIN / program), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                env=environment | variables,
                cwd=tmp_path,
                start_new_session=True,  # a process group, as a terminal gives it
            )
        process.log = log  # type: ignore[attr-defined]
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            _end(process, signal.SIGTERM)


@pytest.fixture
def finish(start: Start) -> Callable[..., tuple[int, str]]:
    """Runs a command to its end; exit code and output."""

    def finish(program: str, *arguments: object, **variables: str) -> tuple[int, str]:
        process = start(program, *arguments, **variables)
        code = process.wait(240)
        return code, process.log.read_text()  # type: ignore[attr-defined]

    return finish


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """48 captures of 1x32 in four shards."""
    root = tmp_path_factory.mktemp("captures") / "captures.sds"
    synthesize(str(root), records=48, shape=(1, 32), seed=7, records_per_shard=12)
    yield root
    shutil.rmtree(root)
