"""What a status says of a training run: at work, failed, gone on and complete."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from signal_batch.cli import main
from signal_batch.errors import SignalBatchError
from signal_batch.status import read_status
from signal_batch.status_model import Status

STEPS = 20
#: A save that is late moves the ones after it; these keep them at steps 4 and 8.
ON_TIME = ({"step": 5, "do": "settle"}, {"step": 9, "do": "settle"})


def saved(out: Path) -> list[dict[str, Any]]:
    """The documents of the checkpoints that are there, by step."""
    found = [json.loads(path.read_text()) for path in (out / "_checkpoints").glob("*.json")]
    return sorted(found, key=lambda document: document["cursor"]["step"])


def spent(document: dict[str, Any]) -> float:
    times = document["progress"]["times"]
    return float(times["train_s"] + times["wait_s"])


def check_numbers(status: Status, out: Path) -> None:
    """Steps, speed, age and metrics are those of the checkpoints on disk."""
    *_, before, last = saved(out)
    step, taken = last["cursor"]["step"], last["progress"]["times"]["steps"]
    (count,) = status.counts
    assert (count.unit, count.done, count.of) == ("steps", step, STEPS)
    assert status.checkpoint_step == step
    path = out / "_checkpoints" / f"step-{step:09d}.json"
    assert status.checkpoint_age_s == pytest.approx(time.time() - path.stat().st_mtime, abs=20)
    overall = taken / spent(last)
    recent = (taken - before["progress"]["times"]["steps"]) / (spent(last) - spent(before))
    assert status.speed.overall == pytest.approx(overall)
    assert status.speed.recent == pytest.approx(recent)
    if step < STEPS:
        assert status.seconds_left == pytest.approx((STEPS - step) / recent)
        for side, row in status.metrics.items():
            assert row == [r for r in last["progress"]["metrics"]["rows"] if r["side"] == side][-1]


def test_a_run_at_work_killed_and_gone_on(
    scene: Any, processes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits in step 10, after the checkpoints of steps 4 and 8, and is killed there."""
    out = scene.folder / "out"
    scene.act(*ON_TIME, {"step": 10, "do": "hang"})
    program = scene.start(scene.spec())
    try:
        processes.wait_until(lambda: 10 in scene.seen() and len(saved(out)) == 2)
        (pid,) = {line["pid"] for line in scene.log() if line["event"] == "step"}
        status = read_status(str(out))
        assert (status.kind, status.state, status.exit_code) == ("training", "running", 0)
        assert [(item.doing, item.pid, item.part) for item in status.running] == [
            ("train", pid, None)
        ]
        check_numbers(status, out)
        assert set(status.metrics) == {"train", "validation"}
        assert (status.job.target, status.job.method) == ("label", scene.spec().trainer)
        assert main(["status", str(out)]) == 0
        told = capsys.readouterr().out
        assert "8 of 20 steps (40 %)" in told
        assert "labels        label" in told

        os.kill(pid, signal.SIGKILL)
        program.communicate(timeout=60)
    finally:
        program.kill()
        program.communicate()
    status = read_status(str(out))
    assert (status.state, status.exit_code, status.running) == ("failed", 1, ())
    (problem,) = status.problems
    assert (problem.kind, problem.doing, problem.count) == ("WorkerDiedError", "train", 1)
    assert "was killed by SIGKILL" in problem.message
    check_numbers(status, out)

    manifest = scene.train()
    status = read_status(str(out))
    assert (status.state, status.exit_code, status.problems) == ("complete", 0, ())
    check_numbers(status, out)
    assert status.seconds_left is None
    for side, metrics in manifest["metrics"].items():
        assert metrics.items() <= status.metrics[side].items()
    assert not {"_attempts", "_errors"} & {path.name for path in out.iterdir()}
    assert main(["status", str(out)]) == 0
    assert "20 of 20 steps (100 %)" in capsys.readouterr().out


def test_a_trainer_that_fails_again_and_again(
    scene: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = scene.folder / "out"
    scene.act(*ON_TIME, {"step": 10, "do": "raise", "always": True})
    for count in (1, 2):
        with pytest.raises(SignalBatchError, match="no such luck"):
            scene.train()
        status = read_status(str(out))
        (problem,) = status.problems
        assert (status.state, status.exit_code) == ("failed", 1)
        assert (problem.doing, problem.count, problem.outcome) == ("train", count, "open")
        assert "ZeroDivisionError: no such luck" in problem.message
    check_numbers(status, out)
    assert main(["status", str(out)]) == 1
    assert "twice in a row" in capsys.readouterr().out

    newest = out / "_checkpoints" / "step-000000008.json"
    newest.write_text(newest.read_text().replace('"step": 8', '"step": 9'))
    (out / "_checkpoints" / "step-000000004.json").write_text("{")
    status = read_status(str(out))
    assert status.counts[0].done == 0
    assert "step-000000008.json is damaged" in " ".join(status.faults)
    assert "step-000000004.json is not valid JSON" in " ".join(status.faults)
    assert main(["status", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checkpoint_step"] is None


def test_only_claimed_and_damaged(scene: Any) -> None:
    out = scene.folder / "out"
    scene.act({"step": 1, "do": "raise"})
    with pytest.raises(SignalBatchError, match="no such luck"):
        scene.train()
    for path in (*out.glob("_errors/*"), *out.glob("_attempts/*")):
        path.unlink()
    status = read_status(str(out))
    assert (status.state, status.exit_code) == ("waiting", 0)
    assert [(item.done, item.of) for item in status.counts] == [(0, STEPS)]
    assert (status.speed.recent, status.speed.overall) == (None, None)
    claim = json.loads((out / "_spec.json").read_text())
    (out / "_spec.json").write_text(json.dumps(claim | {"plan": None}))
    status = read_status(str(out))
    assert (status.state, status.exit_code) == ("damaged", 1)
    assert "does not say how many steps" in status.faults[0]
