"""The README's code blocks run as they stand, in order, in one folder."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"<!-- run[^>]*-->\n```(sh|python)\n(.*?)```", re.DOTALL)
_TEAM = re.compile(r"<!-- team -->\n```sh\n(.*?)```", re.DOTALL)
_NAMED = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    return _BLOCK.findall(README.read_text())


def test_the_readme_starts_with_the_two_commands() -> None:
    first = re.search(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == [
        "make demo",
        "make test",
    ]


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


@pytest.mark.timeout(600)
def test_every_block_runs(tmp_path: Path) -> None:
    for name, text in _NAMED.findall(README.read_text()):
        (tmp_path / name).write_text(text)
    environment = _environment(tmp_path)
    found = blocks()
    assert len(found) >= 6
    for number, (language, text) in enumerate(found):
        if language == "python":
            script = tmp_path / f"block_{number}.py"
            script.write_text(text)
            command = [sys.executable, script.name]
        else:
            command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@contextmanager
def _ended(shell: subprocess.Popen[str], environment: dict[str, str]) -> Iterator[None]:
    """End whatever the commands left in the background."""
    try:
        yield
    finally:
        stop = [Path(sys.executable).with_name("prefect"), "server", "stop"]
        subprocess.run(stop, env=environment, capture_output=True, check=False)
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
        shell.communicate()


@pytest.mark.timeout(600)
def test_a_team_has_a_scheduled_run_in_the_ui(tmp_path: Path) -> None:
    """The commands of "Run it for a team", with another port, and then a look at the UI."""
    (commands,) = _TEAM.findall(README.read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = _environment(tmp_path) | {
        "PREFECT_SERVER_API_PORT": port,
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    synth = [Path(sys.executable).with_name("signal-batch"), "synth", "captures.sds"]
    subprocess.run(
        [*synth, "--records", "400", "--shape", "2x256"], cwd=tmp_path, env=environment, check=True
    )
    with (tmp_path / "said.txt").open("w+") as said:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", commands.replace("4200", port)],
            cwd=tmp_path,
            env=environment,
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        with _ended(shell, environment):
            code = shell.wait(400)
            said.seek(0)
            assert code == 0, said.read()
            page = _runs_page(f"http://127.0.0.1:{port}/runs", until="captures.sds")
    (night,) = (tmp_path / "nightly").iterdir()
    days = datetime.now(UTC).date() - datetime.fromisoformat(night.name).date()
    assert days.days in (0, 1)
    assert (night / "_manifest.json").exists()
    assert f"export power_spectrum of captures.sds to {night}" in page
    assert "Completed" in page


def _runs_page(url: str, until: str) -> str:
    """The text of a page in Chromium, once it shows `until`."""
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("there is no Chromium (Debian package chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    options = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
    quiet = ("--disable-background-networking", "--disable-component-update")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=[*options, *quiet]
        )
        page = browser.new_page()
        page.goto(url)
        page.get_by_text(until).first.wait_for(timeout=60_000)
        text: str = page.inner_text("body")
        browser.close()
    return text
