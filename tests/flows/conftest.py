"""A Prefect server for the session, a small dataset, and what the tests of flows have in common.

Prefect reads its settings when it is first imported, so they are set here, before any test
module of this folder imports it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
# Not a fixture's folder: it must be there before Prefect is.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="signal-batch-prefect-")
# Prefect's log would be printed for every failing flow that a test wants to fail.
os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"

import httpx
import numpy as np
import pytest
import signal_dataset as sds

from signal_batch.frozen import checked
from signal_batch.specs import ExportSpec
from signal_batch.synth import synthesize

atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

T = TypeVar("T")
BIN = Path(sys.executable).parent
RECORDS = 48
#: Six parts of eight records, each of two batches.
PART_ROWS = 8

FEATURES = '''
"""A feature function that tests disturb through the environment, so the run key stays the same."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

IN_WORKER = Path(sys.argv[0]).name == "worker.py"  # and not in the probe of the planning


def energy(batch):
    if IN_WORKER:
        _disturb(batch["ordinal"])
    energies = np.sum(np.abs(batch["samples"]) ** 2, axis=(1, 2), dtype=np.float64)
    return {"samples": batch["samples"], "energy": energies}


def broken(batch):
    if IN_WORKER:
        raise RuntimeError("no such luck")
    return {"zero": np.zeros(len(batch["ordinal"]))}


def _disturb(ordinals):
    log = Path(os.environ["TEST_WORKERS"]) / str(os.getpid())
    with log.open("a") as lines:
        lines.write(f"{ordinals[0]}\\n")
    while "TEST_GATED" in os.environ and len(log.read_text().split()) == 3:
        if log.with_name("open").exists():
            break
        time.sleep(0.02)
    first = int(ordinals[0])
    if first < int(os.environ.get("TEST_PAUSE_BELOW", "1000")):
        time.sleep(float(os.environ.get("TEST_PAUSE_S", "0")))
    if str(first) == os.environ.get("TEST_KILL_AT"):
        marker = Path(os.environ["TEST_WORKERS"]) / "killed"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''


def _wait_until(check: Callable[[], T], timeout_s: float = 30.0, every_s: float = 0.05) -> T:
    """The first true value of `check`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout_s} s"
        time.sleep(every_s)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Workers:
    """The worker processes of a test, as their feature functions logged themselves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def logs(self) -> dict[int, list[int]]:
        """First ordinals of the batches that each process was given."""
        files = [path for path in self._folder.iterdir() if path.name.isdigit()]
        return {int(path.name): list(map(int, path.read_text().split())) for path in files}

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.logs if alive(pid)]

    @property
    def killed_at_ns(self) -> int:
        return (self._folder / "killed").stat().st_mtime_ns

    def open_gate(self) -> None:
        """Let those go on that wait before their third batch because of `TEST_GATED`."""
        (self._folder / "open").touch()

    def forget(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()

    def gone_after(self, limit_s: float) -> float:
        """Seconds until none is left."""
        started = time.monotonic()
        _wait_until(lambda: not self.alive, limit_s, 0.02)
        return time.monotonic() - started


class Api:
    """What the server knows, over plain HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=30.0)

    def get(self, path: str, **params: Any) -> Any:
        return self._answer("GET", path, params=params)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._answer("POST", path, json=body)

    def _answer(self, method: str, path: str, **options: Any) -> Any:
        # A server on SQLite answers 503 while its database is busy; Prefect's client tries again.
        for pause_s in (0.5, 1.0, 2.0, 4.0, 0.0):
            answer = self._http.request(method, path, **options)
            if answer.status_code != 503:
                break
            time.sleep(pause_s)
        return answer.raise_for_status().json()

    def close(self) -> None:
        self._http.close()

    def flow_run(self, run_id: object) -> dict[str, Any]:
        return self.get(f"/flow_runs/{run_id}")

    def flow_runs(self, flow: str = "export-features") -> list[dict[str, Any]]:
        body = {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_DESC"}
        return self.post("/flow_runs/filter", body)

    def task_runs(self, run_id: object, count: int) -> list[dict[str, Any]]:
        """The task runs once so many have ended: the server hears of them a bit later."""

        def ended() -> list[dict[str, Any]]:
            runs = self.post(
                "/task_runs/filter",
                {"flow_runs": {"id": {"any_": [str(run_id)]}}, "sort": "EXPECTED_START_TIME_ASC"},
            )
            final = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
            ended = [run for run in runs if run["state_type"] in final]
            return runs if len(ended) == len(runs) >= count else []

        return _wait_until(ended, 20.0, 0.2)

    def states(self, task_run: dict[str, Any]) -> list[dict[str, Any]]:
        states = self.get("/task_run_states/", task_run_id=task_run["id"])
        return sorted(states, key=lambda state: state["timestamp"])

    def artifacts(self, run_id: object, kind: str | None = None) -> list[dict[str, Any]]:
        found = self.post(
            "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [str(run_id)]}}}
        )
        return [item for item in found if kind in (None, item["type"])]


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    """A real server in a process of its own; flows of this process run against it."""
    from prefect.context import _temporary_global_settings_context, get_settings_context
    from prefect.settings import PREFECT_API_URL, temporary_settings

    home = Path(os.environ["PREFECT_HOME"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--no-ui"], stdout=log, stderr=log
        )
    api = Api(f"http://127.0.0.1:{port}/api")
    try:
        _wait_until(lambda: _answers(api), 120.0, 0.2)
        # Threads that Prefect starts look the settings up globally, as in its own test harness.
        with (
            temporary_settings({PREFECT_API_URL: api.url}),
            _temporary_global_settings_context(get_settings_context()),
        ):
            yield api
            _drain()
    finally:
        api.close()
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(api: Api) -> bool:
    try:
        return api.get("/health") is True
    except httpx.HTTPError:
        return False


def _drain() -> None:
    """Send what is left of logs and events, so that no thread does after the server is gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all()
    APILogWorker.drain_all()


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return _wait_until


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dataset") / "captures.sds"
    synthesize(str(root), records=RECORDS, shape=(1, 32), seed=7, records_per_shard=12)
    return root


@pytest.fixture(scope="session")
def expected(dataset: Path) -> list[dict[str, Any]]:
    """The rows of an export, from a plain loop over the dataset."""
    opened = sds.open(str(dataset))
    truth = opened.annotations["truth-v1"]
    rows = []
    for ordinal, record in enumerate(opened):
        samples = record["samples"].data
        rows.append(
            {
                "ordinal": ordinal,
                "id": record.id,
                "label": truth[ordinal].values["label"],
                "snr": record.metadata["snr_db"],
                "samples": np.stack((samples.real, samples.imag), axis=-1).tolist(),
                "energy": sum(float(abs(np.complex128(x))) ** 2 for x in samples.ravel()),
            }
        )
    return rows


@pytest.fixture(scope="session")
def feature_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    (folder / "helper_features.py").write_text(textwrap.dedent(FEATURES))
    return folder


@pytest.fixture
def workers(
    tmp_path: Path, feature_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workers]:
    """Lets this process and its children use the helper features; no worker outlives a test."""
    folder = tmp_path / "workers"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(feature_folder))
    monkeypatch.setenv("PYTHONPATH", str(feature_folder))
    monkeypatch.setenv("TEST_WORKERS", str(folder))
    found = Workers(folder)
    yield found
    assert not found.alive


MakeSpec = Callable[..., ExportSpec]


@pytest.fixture
def make_spec(dataset: Path, tmp_path: Path, workers: Workers) -> MakeSpec:
    """An export of the dataset to `tmp_path / "out"`, with changes."""

    def make(**changes: Any) -> ExportSpec:
        fields = {
            "dataset": str(dataset),
            "output": str(tmp_path / "out"),
            "columns": [
                "field:samples",
                "label=annotation:truth-v1/label:int32",
                "snr=metadata:snr_db",
            ],
            "features": "helper_features:energy",
            "batch_size": PART_ROWS // 2,
            "part_bytes": 2600,
            "execution": {"workers": 2, "retry_delay_s": 0.2},
        }
        return checked(ExportSpec, fields | changes)

    return make


@pytest.fixture
def start(api: Api, workers: Workers, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the installed command, on the session's server unless `server` is another URL."""
    started = []

    def start(
        *arguments: object, server: str | None = api.url, **environment: str
    ) -> subprocess.Popen[str]:
        variables = os.environ | environment
        if server is not None:
            variables["PREFECT_API_URL"] = server
        process = subprocess.Popen(
            [str(BIN / "signal-batch"), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def arguments(dataset: Path, tmp_path: Path) -> list[str]:
    """`export` and the options that ask for the same as `make_spec`."""
    return [
        *("export", str(dataset), str(tmp_path / "out")),
        *("--column", "field:samples", "--column", "label=annotation:truth-v1/label:int32"),
        *("--column", "snr=metadata:snr_db", "--features", "helper_features:energy"),
        *("--batch-size", str(PART_ROWS // 2), "--part-size", "2600"),
    ]
