"""The services of compose.yaml as processes of this machine, on a Postgres of the test's own.

What a container is given, command, environment and health check, is read from the file, and only
hosts, ports and folders are put in the place of those that containers have.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"

import httpx
import pytest
import yaml

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
AUTH = "team:a secret of the test"
PASSWORD = "another/secret: 100%"


def _wait_until(check: Callable[[], T], timeout_s: float = 60.0, every_s: float = 0.1) -> T:
    """The first true value of `check`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout_s} s"
        time.sleep(every_s)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- Postgres ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Postgres:
    bin: Path
    port: int


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A database `prefect` of the user `prefect`, in a folder of its own, and not durable."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("needs the Debian package postgresql")
    folder = Path(tempfile.mkdtemp(prefix="signal-batch-postgres-"))
    programs, port = found[-1].parent, free_port()
    # Postgres refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    as_user: dict[str, Any] = {"user": user, "group": pwd.getpwnam(user).pw_gid, "cwd": folder}
    if os.geteuid() != 0:
        as_user = {"cwd": folder}
    (folder / "password").write_text(PASSWORD)
    for path in (folder, folder / "password"):
        shutil.chown(path, user)
    initdb = [
        programs / "initdb",
        "--pgdata",
        folder / "data",
        "--username",
        "prefect",
        "--no-sync",
    ]
    initdb += ["--auth", "scram-sha-256", "--pwfile", folder / "password", "--encoding", "UTF8"]
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, **as_user)
    command = [programs / "postgres", "-D", folder / "data", "-h", "127.0.0.1", "-p", str(port)]
    command += ["-k", folder, "-c", "fsync=off", "-c", "synchronous_commit=off"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **as_user)
    try:
        createdb = [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "prefect"]

        def created() -> bool:
            said = subprocess.run(
                [*createdb, "prefect"],
                env={"PGPASSWORD": PASSWORD},
                capture_output=True,
                check=False,
            )
            assert process.poll() is None, (folder / "log").read_text()
            return said.returncode == 0

        _wait_until(created, 30.0)
        yield Postgres(programs, port)
    finally:
        process.send_signal(signal.SIGINT)  # a fast shutdown
        process.wait(20)
        shutil.rmtree(folder)


# --- the services of compose.yaml ----------------------------------------------------------


@dataclass
class Services:
    """Starts the services of compose.yaml here; `places` says what stands for what."""

    folder: Path
    places: dict[str, str]
    variables: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = ROOT / "deployments" / "compose.yaml"
        self.content = self._here(yaml.safe_load(path.read_text()))["services"]

    def _here(self, value: Any) -> Any:
        """A part of the file with variables filled in as compose does, and our places in it."""
        if isinstance(value, dict):
            return {key: self._here(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._here(item) for item in value]
        if not isinstance(value, str):
            return value
        text = re.sub(r"(?<!\$)\$\{(\w+)(?::([-?])([^}]*))?\}", self._filled, value)
        text = re.sub("|".join(map(re.escape, self.places)), lambda x: self.places[x[0]], text)
        return text.replace("$$", "$")

    def _filled(self, found: re.Match[str]) -> str:
        name, form, default = found.groups()
        if value := self.variables.get(name):
            return value
        assert form == "-", f"compose would refuse to start without {name}"
        return str(default)

    def environment(self, name: str, **changes: str) -> dict[str, str]:
        """What a service's process is given, and what it needs to run outside of a container."""
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        return {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(home),
            "PREFECT_HOME": str(home),
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "SIGNAL_BATCH_PLAIN_GRAIN": "1",
            **self.content[name].get("environment", {}),
            **changes,
        }

    def start(self, name: str, **changes: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            self.content[name]["command"],
            env=self.environment(name, **changes),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.started.append(process)
        return process

    def run(self, name: str, *command: object, **changes: str) -> str:
        """Run a service's command to its end, or another one with its environment."""
        done = subprocess.run(
            [str(part) for part in command] or self.content[name]["command"],
            env=self.environment(name, **changes),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{name} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def healthy(self, name: str, program: Path | None = None, **changes: str) -> bool:
        """Whether a service's own health check passes; `program` stands for its first word."""
        form, *test = self.content[name]["healthcheck"]["test"]
        assert form == "CMD"
        if program:
            test[0] = str(program)
        return _passes(test, self.environment(name, **changes))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a service as compose does."""
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            kill_session(process)
            process.wait()


def _passes(command: list[str], environment: dict[str, str]) -> bool:
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30)
    return done.returncode == 0


def kill_session(process: subprocess.Popen[bytes]) -> list[int]:
    """SIGKILL to a service and to all that it started, as when its machine dies; their ids."""
    family = [pid for pid in map(int, _numbers(Path("/proc"))) if _descends(pid, process.pid)]
    for pid in [process.pid, *family]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    return family


def _numbers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.isdigit()]


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
        if pid == ancestor:
            return True
    return False


# --- the server's API ----------------------------------------------------------------------


class Api:
    """What the server knows, over plain HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url
        user, _, password = AUTH.partition(":")
        self.http = httpx.Client(base_url=url, auth=(user, password), timeout=30.0)

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.http.post(path, json=body).raise_for_status().json()

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        body = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_DESC"}
        return self.post("/flow_runs/filter", body)

    def state(self, run: str) -> dict[str, Any]:
        return self.get(f"/flow_runs/{run}")["state"]

    def ended(self, run: str, timeout_s: float = 90.0) -> dict[str, Any]:
        """The run once it has ended."""
        final = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
        _wait_until(lambda: self.state(run)["type"] in final, timeout_s, 0.3)
        return self.get(f"/flow_runs/{run}")


@dataclass
class Team:
    """A running set-up: services, the API, a folder that stands for /data."""

    services: Services
    api: Api
    data: Path
    postgres: Postgres
    password: str = PASSWORD
    login: str = AUTH

    @staticmethod
    def free_port() -> int:
        return free_port()

    def events(self, name: str, run: str | None = None) -> list[dict[str, Any]]:
        """The events of a name that the server has stored, of a flow run if one is named."""
        wanted: dict[str, Any] = {"event": {"name": [name]}}
        if run:
            wanted["resource"] = {"id": [f"prefect.flow-run.{run}"]}
        return self.api.post("/events/filter", {"filter": wanted})["events"]

    def deployment(self, name: str = "export-features/export-features") -> str:
        return str(self.api.get(f"/deployments/name/{name}")["id"])


@pytest.fixture(scope="session")
def team(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Database, migrations and server of compose.yaml, healthy; no worker yet."""
    folder, data = tmp_path_factory.mktemp("team"), tmp_path_factory.mktemp("data")
    port = str(free_port())
    places = {
        "0.0.0.0": "127.0.0.1",
        "http://server:4200": f"http://127.0.0.1:{port}",
        "127.0.0.1:4200": f"127.0.0.1:{port}",
        "/data": str(data),
    }
    variables = {"POSTGRES_PASSWORD": PASSWORD, "SIGNAL_BATCH_AUTH": AUTH}
    services = Services(folder, places, variables)
    # Hosts and ports that stand alone.
    database = {
        "PREFECT_SERVER_DATABASE_HOST": "127.0.0.1",
        "PREFECT_SERVER_DATABASE_PORT": str(postgres.port),
    }
    for name in ("migrate", "server"):
        assert database.keys() <= services.content[name]["environment"].keys()
        services.content[name]["environment"] |= database
    services.content["server"]["command"] = [
        port if word == "4200" else word for word in services.content["server"]["command"]
    ]
    assert services.healthy("database", postgres.bin / "pg_isready", PGPORT=str(postgres.port))
    services.run("migrate")
    # A new schedule is looked at once a minute otherwise, and a run is late after 15 s.
    server = services.start(
        "server",
        PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS="2",
        PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS="5",
    )
    api = Api(f"http://127.0.0.1:{port}/api")
    try:

        def healthy() -> bool:
            assert server.poll() is None, services.log("server")
            return services.healthy("server")

        _wait_until(healthy, 120.0, 0.5)
        yield Team(services, api, data, postgres)
    finally:
        api.http.close()
        for process in reversed(services.started):
            if process.poll() is None:
                services.stop(process)


BLOCK = "custom-webhook/mailbox"
MAKE_BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock

CustomWebhookNotificationBlock(
    name="mailbox", url=sys.argv[1], json_data={"title": "{{subject}}", "text": "{{body}}"}
).save("mailbox")
"""


@dataclass(frozen=True, slots=True)
class Automated:
    """What the commands that set the automations up have printed, and the file of the last one."""

    deployed: str
    moved: str
    file: Path


@pytest.fixture(scope="session")
def automated(team: Team, mailbox: Any) -> Automated:
    """Deployments and automations, as the service `deploy` registers them.

    Then again from a copy of the file whose outputs are below the test's folder.
    """
    services = team.services
    services.run("deploy", sys.executable, "-c", MAKE_BLOCK, mailbox.url)
    deployed = services.run("deploy", NOTIFY=BLOCK)
    file = team.data / "automations.yaml"
    shipped = (ROOT / "deployments" / "automations.yaml").read_text()
    file.write_text(shipped.replace("/data/", f"{team.data}/"))
    moved = services.run("deploy", "signal-batch", "automate", "--file", file, "--notify", BLOCK)
    return Automated(deployed, moved, file)


# --- the image -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Image:
    """The Dockerfile's instructions: name and what follows, continued lines joined."""

    instructions: list[tuple[str, str]]

    @property
    def healthcheck(self) -> list[str]:
        [text] = [rest for name, rest in self.instructions if name == "HEALTHCHECK"]
        return list(json.loads(text[text.index("[") :]))


@pytest.fixture(scope="session")
def image() -> Image:
    text = (ROOT / "deployments" / "Dockerfile").read_text()
    lines = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    joined = lines.replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return Image([(name, rest.strip()) for name, _, rest in found])


# --- what notifications arrive at ----------------------------------------------------------


@pytest.fixture(scope="session")
def mailbox() -> Iterator[Any]:
    """An HTTP server that keeps what is posted to it, as text: `url` and `received`."""
    received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    server.received = received  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return _wait_until


@pytest.fixture(scope="session")
def kill_tree() -> Callable[[subprocess.Popen[bytes]], list[int]]:
    return kill_session
