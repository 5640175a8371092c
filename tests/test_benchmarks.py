"""The benchmarks run: the smallest setting gives its tables and its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(120)
def test_the_smallest_setting_gives_tables_and_json(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = ["-m", "benchmarks", "--smoke", "--folder", str(tmp_path / "data")]
    done = subprocess.run(
        [sys.executable, *command, "--json", str(results)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    # What the contenders compute is compared before anything is timed.
    assert "6 contenders give the same records" in done.stdout
    assert (
        "the same values from SciPy, guide, limit loop, pandas lists, signal_batch" in done.stdout
    )
    words = ("records/s", "training_batches", "limit loop x1", "locate a million", "waiting")
    for word in words:
        assert word in done.stdout
    found = json.loads(results.read_text())
    assert {"cores", "cpu", "memory_bytes"} <= found["machine"].keys()
    assert {"python", "numpy", "grain", "pyarrow", "signal-dataset"} <= found["versions"].keys()
    load, export = (group["contenders"] for group in found["groups"])
    assert load.keys() == {"guide", "training_batches"}
    assert export.keys() == {"limit loop x1", "signal_batch x1"}
    for sample in (*load["guide"], *export["signal_batch x1"]):
        assert sample["rows"] > 0
        assert sample["seconds"] > 0
        assert sample["peak_bytes"] > 10 << 20
    assert all(target["wanted"] > 0 for target in found["targets"])
    assert not list(tmp_path.glob("data-scratch/*-*"))
