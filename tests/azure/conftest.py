"""A real Azure Blob service for these tests: Azurite on a free port of this machine."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ACCOUNT = "labaccount"
KEY = base64.b64encode(b"secret of the azure tests").decode()
_PATIENCE_S = 60


def _give_up(reason: str) -> None:
    """Skip, but not where everything is supposed to be there."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def azure_connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The connection string of the service."""
    binary = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if binary is None:
        _give_up(
            "there is no azurite-blob (npm install --global azurite), nor does AZURITE name it"
        )
        return
    folder = tmp_path_factory.mktemp("azurite")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    options = ["--location", str(folder), "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    with (folder / "azurite.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *options],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
        )
    try:
        if not _answers(server, port):
            log_text = (folder / "azurite.log").read_text()[-500:]
            _give_up(f"azurite did not answer within {_PATIENCE_S} s: {log_text}")
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
        )
    finally:
        server.kill()
        server.wait()


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        except OSError:
            time.sleep(0.1)
    return False


@pytest.fixture
def container(azure_connection: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an empty container; this process and its children are set up to use it."""
    adlfs = pytest.importorskip("adlfs", reason="adlfs is not installed (extra azure)")
    from azure.storage.blob import BlobServiceClient

    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_connection)
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    with BlobServiceClient.from_connection_string(azure_connection) as service:
        yield service.create_container(f"c-{uuid.uuid4().hex[:20]}")
    adlfs.AzureBlobFileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def killing_features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `killing_features:same`, whose first run dies at ordinal 120."""
    folder = tmp_path_factory.mktemp("killing")
    (folder / "killing_features.py").write_text(_FEATURES)
    return folder


_FEATURES = '''
"""Kills its worker once, at ordinal 120; says which batches it was given."""

import os
import signal
import sys
from pathlib import Path


def same(batch):
    folder, first = Path(os.environ["TEST_KILLED"]), int(batch["ordinal"][0])
    if Path(sys.argv[0]).name == "worker.py":
        with (folder / "batches").open("a") as log:
            log.write(f"{first}\\n")
        if first == 120 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return {"samples": batch["samples"]}
'''
