"""The README's code blocks run as they stand, in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"<!-- run[^>]*-->\n```(sh|python)\n(.*?)```", re.DOTALL)
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


@pytest.mark.timeout(600)
def test_every_block_runs(tmp_path: Path) -> None:
    for name, text in _NAMED.findall(README.read_text()):
        (tmp_path / name).write_text(text)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
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
