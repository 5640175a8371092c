"""A flow process that is killed, terminated or interrupted: no worker stays, nothing is lost."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signal_batch import verify

pytestmark = pytest.mark.xdist_group("prefect")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def done_parts(out: Path) -> set[int]:
    names = [path.stem for path in (out / "_receipts").glob("*.json")]
    return {int(name.removeprefix("part-")) for name in names}


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_stopped_run_leaves_no_worker_and_is_finished_by_the_same_command(
    api: Any,
    start: Callable[..., Any],
    arguments: list[str],
    workers: Any,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    name: str,
) -> None:
    out = tmp_path / "out"
    process = start(*arguments, TEST_PAUSE_S="0.4")
    wait_until(lambda: len(workers.alive) == 2 and done_parts(out), 60)
    process.send_signal(signal.Signals[name])
    workers.gone_after(5)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode != 0
    if name == "SIGINT":
        assert process.returncode == 1
        assert stdout == ""
        assert re.fullmatch(r"signal-batch: stopped; .*\n", stderr)
    if name != "SIGKILL":
        assert "Traceback" not in stderr
        assert api.flow_runs()[0]["state_type"] == "CRASHED"

    finished = done_parts(out)
    assert 1 <= len(finished) < 6
    before = {
        path: value
        for path, value in contents(out).items()
        if any(f"part-{part:05d}" in path for part in finished)
    }
    workers.forget()
    again = start(*arguments)
    stdout, stderr = again.communicate(timeout=60)
    assert (again.returncode, stderr) == (0, "")
    page = f"{api.url.removesuffix('/api')}/runs/flow-run/{api.flow_runs()[0]['id']}"
    assert f"  watch it in the Prefect UI: {page}\n" in stdout
    assert verify(str(out)).ok
    assert before.items() <= contents(out).items()
    computed = sorted(ordinal for log in workers.logs.values() for ordinal in log)
    left = [part for part in range(6) if part not in finished]
    assert computed == sorted(8 * part + half for part in left for half in (0, 4))
