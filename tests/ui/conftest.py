"""A Prefect server with its pages, a browser, and runs to look at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import signal_dataset as sds

from signal_batch.synth import synthesize

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
RECORDS = 320
#: Records that a flipped bit makes unreadable; none of those that planning reads.
DAMAGED = (102, 230)

#: Power spectra by NumPy alone; a worker waits at the second half until the file `go` is there.
GATED = """
import sys
import time
from pathlib import Path

import numpy as np


def spectrum(batch):
    while Path(sys.argv[0]).name == "worker.py" and batch["ordinal"][0] >= 160:
        if Path("go").exists():
            break
        time.sleep(0.05)
    spectra = np.abs(np.fft.fft(batch["samples"])) ** 2 + 1e-9
    return {"spectrum": spectra.astype(np.float32)}
"""


class Server:
    """A server on a free port, whose pages ask that port."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.environment = os.environ | {
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_UI_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        }
        self._http = httpx.Client(base_url=f"{self.url}/api", timeout=30.0, trust_env=False)

    @contextmanager
    def running(self, log: Path) -> Iterator[None]:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, "--port", self.url.rpartition(":")[2]],
                stdout=stream,
                stderr=stream,
                env=self.environment,
            )
        try:
            wait_until(self._answers, 120.0)
            yield
        finally:
            self._http.close()
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def run_of(self, flow: str, output: str) -> str | None:
        """The id of the newest run of a flow whose name ends with its output."""
        body = {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_DESC"}
        runs = self._http.post("/flow_runs/filter", json=body).raise_for_status().json()
        return next((run["id"] for run in runs if run["name"].endswith(output)), None)

    def artifact(self, run: str, key: str) -> str | None:
        """The id of an artifact of a run."""
        body = {"artifacts": {"flow_run_id": {"any_": [run]}, "key": {"any_": [key]}}}
        found = self._http.post("/artifacts/filter", json=body).raise_for_status().json()
        return found[0]["id"] if found else None


def wait_until(check: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout_s} s"
        time.sleep(0.1)
    return value


@dataclass(frozen=True)
class Stories:
    """The runs: an export that waits at its half for `go`, and three that come to their end."""

    server: Server
    folder: Path
    export: subprocess.Popen[bytes]
    others: subprocess.Popen[bytes]

    def run(self, flow: str, output: str) -> str:
        return str(wait_until(lambda: self.server.run_of(flow, output), 90.0))

    def artifact(self, run: str, key: str) -> str:
        return str(wait_until(lambda: self.server.artifact(run, key), 90.0))

    def go(self) -> None:
        """Let the export finish, and wait for the others as well."""
        (self.folder / "go").touch()
        for process in (self.export, self.others):
            assert process.wait(120) == 0, (self.folder / "runs.log").read_text()[-3000:]


@pytest.fixture(scope="session")
def stories(
    tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., Path]
) -> Iterator[Stories]:
    folder = tmp_path_factory.mktemp("stories")
    server = Server(tmp_path_factory.mktemp("prefect"))
    synthesize(
        str(folder / "captures.sds"), records=RECORDS, shape=(1, 32), seed=7, records_per_shard=40
    )
    _write_damaged(folder / "damaged.sds", write_dataset)
    (folder / "gated.py").write_text(GATED)
    with server.running(folder / "server.log"), (folder / "runs.log").open("wb") as log:
        program = str(Path(__file__).with_name("runs.py"))

        def start(*names: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, program, *names],
                cwd=folder,
                env=server.environment | {"PYTHONPATH": str(folder)},
                stdout=log,
                stderr=log,
            )

        started = start("export"), start("damaged", "validate", "train")
        try:
            yield Stories(server, folder, *started)
        finally:
            for process in started:
                process.terminate()
                process.wait(30)


def _write_damaged(root: Path, write_dataset: Callable[..., Path]) -> None:
    labels = [("success", {"label": index % 3}) for index in range(RECORDS)]
    options = sds.StorageOptions(writer_options="group_size:1,uncompressed")
    annotations = {"truth-v1": labels}
    write_dataset(root, RECORDS, per_shard=40, options=options, annotations=annotations)
    for bad in DAMAGED:
        needle = np.arange(8 * bad, 8 * bad + 8, dtype=np.float32).tobytes()
        (path,) = [path for path in root.rglob("*.arrayrecord") if needle in path.read_bytes()]
        whole = bytearray(path.read_bytes())
        whole[whole.index(needle)] ^= 4
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A page of a headless browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("needs the package playwright")
    if not CHROMIUM.exists():
        pytest.skip("needs the Debian package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(30_000)
        yield page
        browser.close()
