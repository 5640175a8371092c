"""The installed command with the embedded server: what a person sees, and what is not loaded."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signal_batch import verify

pytestmark = pytest.mark.xdist_group("prefect")

LOG_NOISE = re.compile(r"prefect\.|INFO|Beginning flow run|telemetry|server", re.IGNORECASE)


def finished(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=timeout_s)
    return process.returncode, stdout, stderr


def test_an_export_without_a_server_of_ones_own(
    start: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    code, stdout, stderr = finished(start(*arguments, server=None, PREFECT_HOME=str(home)))
    assert (code, stderr) == (0, "")
    out = tmp_path / "out"
    first, *rest = stdout.splitlines()
    assert first.startswith(f"{out}: 48 rows in 6 Parquet files, ")
    page, server = rest[-2:]
    assert re.fullmatch(
        r"  watch it in the Prefect UI: http://127\.0\.0\.1:4200/runs/flow-run/[0-9a-f-]{36}", page
    )
    told = server.removeprefix("  after starting a server: ").split()
    assert told[:2] == ["DO_NOT_TRACK=1", "PREFECT_SERVER_ANALYTICS_ENABLED=false"]
    assert Path(told[2]).exists()
    assert told[3:] == ["server", "start"]
    assert not LOG_NOISE.search("\n".join([first, *rest[:-2]]).replace("Prefect flow run", ""))
    assert verify(str(out)).ok


def test_a_failing_job_is_one_line(start: Callable[..., Any], arguments: list[str]) -> None:
    arguments[arguments.index("helper_features:energy")] = "helper_features:broken"
    code, stdout, stderr = finished(start(*arguments))
    assert (code, stdout) == (1, "")
    assert re.fullmatch(
        r"signal-batch: feature broken, ordinals \d+-\d+: RuntimeError: no such luck "
        r"\(in broken, .*helper_features\.py, line \d+; the batch has .*\)\n",
        stderr,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: "nowhere.sds"}, r".*nowhere\.sds.*"),
        ({4: "samples"}, r"columns: selector 'samples' starts with .*"),
        ({10: "no_such_module:f"}, r"feature 'no_such_module:f': .*"),
        ({1: "s3://key:hunter2@bucket/x"}, r"s3://bucket/x carries credentials .*"),
        ({2: "s3://key:hunter2@bucket/x"}, r"s3://bucket/x carries credentials .*"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    start: Callable[..., Any],
    arguments: list[str],
    tmp_path: Path,
    changes: dict[int, str],
    message: str,
) -> None:
    for place, value in changes.items():
        arguments[place] = value
    home = tmp_path / "home"
    started = time.monotonic()
    code, stdout, stderr = finished(start(*arguments, server=None, PREFECT_HOME=str(home)), 30)
    assert time.monotonic() - started < 20  # a cold server alone takes longer
    assert (code, stdout) == (2, "")
    assert re.fullmatch(f"signal-batch: {message}\n", stderr)
    assert not home.exists()
    assert not (tmp_path / "out").exists()


PROBE = """
import os, sys
sys.argv = ["signal-batch", *sys.argv[1:]]
import flows.cli
try:
    flows.cli.main()
except SystemExit as exc:
    print("code", exc.code)
print("prefect" in sys.modules, os.environ.get("PREFECT_HOME"))
"""


@pytest.mark.parametrize("command", ["verify", "validate", "inspect", "export --dry-run"])
def test_prefect_is_loaded_for_exports_only(
    arguments: list[str], workers: Any, dataset: Path, tmp_path: Path, command: str
) -> None:
    options = {
        "verify": ["verify", str(tmp_path)],
        "validate": ["validate", str(dataset)],
        "inspect": ["inspect", str(dataset)],
        "export --dry-run": [*arguments, "--dry-run"],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *options], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].startswith("False ")
    assert f"code {2 if command == 'verify' else 0}" in done.stdout


SETTINGS = """
import os, sys
import importlib.abc

class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "prefect":
            names = ("DO_NOT_TRACK", "PREFECT_SERVER_ANALYTICS_ENABLED")
            print({name: os.environ.get(name) for name in names})
            os._exit(0)

sys.meta_path.insert(0, Look())
from flows.cli import run_export
run_export(None, on_progress=None)
"""


def test_telemetry_is_off_before_prefect_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DO_NOT_TRACK")
    monkeypatch.delenv("PREFECT_SERVER_ANALYTICS_ENABLED")
    command = [sys.executable, "-u", "-c", SETTINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "{'DO_NOT_TRACK': '1', 'PREFECT_SERVER_ANALYTICS_ENABLED': 'false'}\n"
