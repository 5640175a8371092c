"""Several ranks of one run: together they see what one would, and they live and die together.

Their trainer needs no communication, so what happens to a rank is this program's doing alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from signal_batch.errors import SignalBatchError

WORLD, STEPS, BATCH = 2, 24, 16
SPEC: dict[str, Any] = {
    "trainer": "recording_trainer:RankedTrainer",
    "transforms": ["add_noise snr_db=[0,20]"],
    "split": "id",
    "steps": STEPS,
    "batch_size": BATCH,
    "checkpoint_steps": 2,
}
TWO = {"ranks": WORLD, "threads": 1}


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, iq_root: Path, entered: Callable[..., Any]
) -> Iterator[Any]:
    """A scene with a run of two ranks that was left alone."""
    with entered(tmp_path_factory.mktemp("ranks"), iq_root) as scene:
        scene.train(**SPEC, execution=TWO)
    return scene


def shares(log: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """What each rank saw in each step, every time that it took it."""
    found: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for line in log:
        if line["event"] == "step":
            seen = (line["positions"], line["ordinals"], line["values"])
            found.setdefault((line["rank"], line["step"]), []).append(seen)
    return found


def pids(log: list[dict[str, Any]], rank: int | None = None) -> set[int]:
    started = [line for line in log if line["event"] == "init"]
    return {line["pid"] for line in started if rank in (None, line["rank"])}


def test_ranks_see_together_what_one_sees(undisturbed: Any, scene: Any) -> None:
    """Which is the same run: the number of ranks is no part of the run key."""
    manifest = scene.train(**SPEC)
    alone = shares(scene.log())
    together = shares(undisturbed.log())
    assert manifest["run_key"] == undisturbed.json("_manifest.json")["run_key"]
    assert set(together) == {(rank, step) for rank in range(WORLD) for step in range(1, STEPS + 1)}
    for step in range(1, STEPS + 1):
        ((positions, ordinals, _),) = alone[0, step]
        records = []
        for rank in range(WORLD):
            ((mine, seen, _),) = together[rank, step]
            assert len(mine) == BATCH // WORLD
            records += zip(mine, seen, strict=True)
        assert sorted(records) == [*zip(positions, ordinals, strict=True)]


def test_only_the_first_rank_writes(undisturbed: Any) -> None:
    log = undisturbed.log()
    written = [line for line in log if line["event"] == "wrote"]
    assert {line["rank"] for line in written} == {0}
    assert {line["pid"] for line in written} == pids(log, rank=0)
    assert f"_checkpoints/step-{STEPS:09d}.json" in {line["path"] for line in written}
    assert len(pids(log)) == WORLD


def test_progress_counts_records_and_not_ranks(undisturbed: Any) -> None:
    timing = undisturbed.json("model.json")["timing"]
    assert timing["steps"] == STEPS
    assert timing["records"] == STEPS * BATCH
    rows = (undisturbed.folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(3, STEPS + 1, 3))


def test_a_killed_rank_takes_the_others_along_and_all_go_on(
    undisturbed: Any, scene: Any, processes: Any
) -> None:
    """Either rank may go; the other, which would never end, is ended."""
    scene.act(
        {"step": 9, "rank": 0, "do": "hang"},
        {"step": 10, "rank": 1, "do": "kill"},
        {"step": 18, "rank": 1, "do": "hang"},
        {"step": 19, "rank": 0, "do": "kill"},
        step_s=0.02,
    )
    scene.train(**SPEC, execution={**TWO, "retries": 2})
    scene.check_same("out", undisturbed.folder / "out")
    wanted, found = shares(undisturbed.log()), shares(scene.log())
    assert set(found) == set(wanted)
    for key, taken in found.items():
        assert taken == wanted[key] * len(taken), key
    for rank in range(WORLD):
        assert len(pids(scene.log(), rank)) == 3
    assert processes.none_within(pids(scene.log()), 0)


def test_a_rank_that_fails_says_why_and_no_process_stays(scene: Any, processes: Any) -> None:
    scene.act({"step": 5, "rank": 1, "do": "raise"}, {"step": 6, "rank": 0, "do": "hang"})
    with pytest.raises(SignalBatchError, match="ZeroDivisionError: no such luck") as caught:
        scene.train(**SPEC, execution={**TWO, "retries": 2})
    assert type(caught.value) is SignalBatchError
    assert len(pids(scene.log())) == WORLD, "and it is not tried again"
    assert processes.none_within(pids(scene.log()), 0)
    assert processes.children_of(os.getpid()) & pids(scene.log()) == set()
