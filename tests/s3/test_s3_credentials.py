"""Credentials of the storage from a block of a Prefect server, and from nowhere else.

The command line runs in processes whose environment has no `AWS_` variable; what they may do, and
even where the storage is, comes from the block.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from signal_batch.synth import synthesize

pytestmark = pytest.mark.timeout(400)

BIN = Path(sys.executable).parent
BLOCK = "lab-storage"
SAVE = """
import json, sys
from prefect.blocks.system import Secret
Secret(value=json.load(sys.stdin)).save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without credentials, with a home of its own."""
    home = tmp_path_factory.mktemp("home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | {
        "HOME": str(home),
        "AWS_EC2_METADATA_DISABLED": "true",
        "PREFECT_HOME": str(home / "prefect"),
        "SIGNAL_BATCH_CACHE_DIR": str(home / "cache"),
    }


@pytest.fixture(scope="module")
def server(plain: dict[str, str]) -> Iterator[str]:
    """URL of a Prefect server of these tests' own, so that all it wrote can be searched."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = Path(plain["PREFECT_HOME"])
    home.mkdir()
    command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=plain,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}/api"
        _wait_for(url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str) -> None:
    import httpx

    deadline = time.monotonic() + 120
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            assert time.monotonic() < deadline, "Prefect's server does not answer"
        time.sleep(0.2)


def run(command: list[str], environment: dict[str, str], text: str = "") -> str:
    """Standard output and error of a command that ends well."""
    ended = subprocess.run(
        command,
        env=environment,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_a_block_opens_the_storage_and_its_values_are_nowhere(
    s3_client: Any,
    bucket: str,
    server: str,
    plain: dict[str, str],
    s3_environment: str,
    s3_variables: Any,
    tmp_path: Path,
) -> None:
    root, output = f"s3://{bucket}/iq", f"s3://{bucket}/out"
    synthesize(root, records=60, shape=(1, 32), seed=3, records_per_shard=20)
    variables = s3_variables(s3_environment)
    environment = plain | {"PREFECT_API_URL": server}
    run([sys.executable, "-c", SAVE, BLOCK], environment, json.dumps(variables))

    export = [
        *(str(BIN / "signal-batch"), "export", root, output, "--column", "field:samples"),
        *("--credentials", BLOCK),
    ]
    said = run(export, environment)
    assert f"{output}" in said
    stored = {
        item["Key"]: s3_client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        for item in s3_client.list_objects_v2(Bucket=bucket, Prefix="out/")["Contents"]
    }
    assert json.loads(stored["out/_manifest.json"])["totals"]["rows"] == 60
    claim = json.loads(stored["out/_spec.json"])
    assert claim["spec"]["execution"]["credentials"] == BLOCK

    # The database, its journal, logs and results of the server and of the command.
    written = {
        str(path): path.read_bytes() for path in Path(plain["HOME"]).rglob("*") if path.is_file()
    }
    assert any("prefect.db" in path and BLOCK.encode() in body for path, body in written.items())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        value = variables[name].encode()
        assert value not in said.encode()
        assert not [key for key, body in {**stored, **written}.items() if value in body]


def test_without_a_server_a_block_is_refused(
    plain: dict[str, str], iq_root: Path, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-m", "signal_batch", "export", str(iq_root), str(tmp_path / "out")),
        *("--column", "field:samples", "--credentials", BLOCK),
    ]
    ended = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert f"credentials '{BLOCK}' name a block" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
