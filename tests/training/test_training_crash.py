"""Real kills: a run that was killed ends with the same model, bit for bit, as one left alone.

Worker, program and single steps of a save are killed at random moments (of a fixed seed) and at
chosen ones. What every step saw is compared with the undisturbed run, however often it was taken.
"""

from __future__ import annotations

import html
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from signal_batch import store
from signal_batch.checkpoints import Checkpoint, Checkpoints
from signal_batch.errors import SignalBatchError, WorkerDiedError
from signal_batch.training_job import read_training

#: A state of 4 MB, saved as often as the disk allows: many moments are inside a save.
STEPS = 300
LARGE: dict[str, Any] = {
    "trainer_args": {"ballast": 1 << 19, "jitter": 0.01},
    "transforms": ["add_noise snr_db=[0,20]"],
    "split": "scene test=0.1",
    "batch_size": 8,
    "steps": STEPS,
    "checkpoint_steps": 3,
    "evaluate_steps": 90,
    "log_steps": 7,
}
STEP_S = 0.01
KILLS = 20
STALL_S = 10


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, iq_root: Path, entered: Callable[..., Any]
) -> Iterator[Any]:
    """A scene whose output `out` is of a run that was left alone."""
    with entered(tmp_path_factory.mktemp("undisturbed"), iq_root) as scene:
        scene.train(**LARGE)
    return scene


class Killer(threading.Thread):
    """Kills the workers of a run one after the other, every second one while it saves.

    One that is `patient` first waits for a checkpoint that was not there before.
    """

    def __init__(
        self, scene: Any, processes: Any, count: int, seed: int, *, patient: bool = False
    ) -> None:
        super().__init__()
        self.patient = patient
        self.scene, self.processes, self.count = scene, processes, count
        self.random = random.Random(seed)
        self.killed: list[int] = []
        self.in_a_save = 0
        self.problem: BaseException | None = None
        self.folder = scene.folder / "out" / "_checkpoints"

    def run(self) -> None:
        try:
            for number in range(self.count):
                self._kill_next(aim=number % 2 == 1)
        except BaseException as exc:
            self.problem = exc

    def finish(self) -> None:
        self.join()
        if self.problem is not None:
            raise self.problem

    def _kill_next(self, *, aim: bool) -> None:
        whole = set(self.folder.glob("*.json"))
        pid = self.processes.wait_until(self._worker)
        if self.patient:
            self.processes.wait_until(lambda: set(self.folder.glob("*.json")) - whole)
        time.sleep(self.random.uniform(0, 0.2))
        if aim:
            self.processes.wait_until(lambda: self._half_written() or not self._worker())
            time.sleep(self.random.uniform(0, 0.03))
        before = self._half_written()
        os.kill(pid, signal.SIGKILL)
        self.killed.append(pid)
        assert self.processes.none_within({pid}, 10)
        self.in_a_save += bool(before and self._unfinished())

    def _worker(self) -> int | None:
        """A worker that takes steps and was not killed yet."""
        busy = {line["pid"] for line in self.scene.log() if line["event"] in ("step", "noted")}
        return next(iter(pid for pid in busy - {*self.killed} if self.processes.alive(pid)), None)

    def _half_written(self) -> set[str]:
        return {path.name for path in self.folder.glob("*.tmp")}

    def _unfinished(self) -> set[str]:
        """Arrays, or parts of them, that belong to no checkpoint."""
        arrays = {path.name[:14] for path in self.folder.glob("*.safetensors*")}
        return arrays - {path.stem for path in self.folder.glob("*.json")}


def check_records(scene: Any, undisturbed: Any) -> None:
    """Every taking of every step saw what the same step of the undisturbed run saw."""
    wanted = undisturbed.seen()
    seen = scene.seen()
    assert list(wanted) == sorted(seen) == list(range(1, len(wanted) + 1))
    for step, taken in seen.items():
        assert taken == wanted[step] * len(taken), step


def attempts(log: list[dict[str, Any]]) -> list[list[int]]:
    """The steps that each process took, process by process."""
    taken: dict[int, list[int]] = {}
    for line in log:
        if line["event"] == "step":
            taken.setdefault(line["pid"], []).append(line["step"])
    return list(taken.values())


# --- at random moments --------------------------------------------------------------------------


def test_a_worker_killed_at_random_moments(
    scene: Any, undisturbed: Any, processes: Any, record_property: Callable[[str, object], None]
) -> None:
    """20 kills, after each of which another number of threads and of waiting batches goes on."""
    scene.act(step_s=STEP_S)
    ways = [(1, 1), (4, 2), (2, 16), (3, 4)]
    kills = KILLS // len(ways)
    in_a_save = 0
    for seed, (threads, prefetch) in enumerate(ways):
        killer = Killer(scene, processes, kills, seed)
        killer.start()
        execution = {"threads": threads, "prefetch_batches": prefetch, "retries": kills - 1}
        with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL \(out of memory\?\)"):
            scene.train(**LARGE, execution=execution)
        killer.finish()
        in_a_save += killer.in_a_save
    scene.act()
    scene.train(**LARGE, execution={"threads": 4, "prefetch_batches": 1})
    scene.check_same("out", undisturbed.folder / "out")
    check_records(scene, undisturbed)

    taken = attempts(scene.log())
    assert len(taken) == KILLS + 1
    firsts = [steps[0] for steps in taken]
    assert firsts == sorted(firsts), "no attempt falls behind the one before"
    assert firsts[-1] > 1, "and not all begin anew"
    assert all(steps == list(range(steps[0], steps[-1] + 1)) for steps in taken)
    record_property("kills inside a save", in_a_save)
    record_property("steps taken again", sum(map(len, taken)) - STEPS)
    print(f"{in_a_save} of {KILLS} kills inside a save, {sum(map(len, taken)) - STEPS} steps again")
    assert in_a_save >= KILLS // 5
    kept = sorted(path.name for path in (scene.folder / "out" / "_checkpoints").iterdir())
    assert len([name for name in kept if name.endswith(".json")]) == 3


def test_a_program_killed_at_random_moments(scene: Any, undisturbed: Any, processes: Any) -> None:
    """SIGKILL and Ctrl-C of the command: no worker stays, the same command goes on."""
    scene.act(step_s=STEP_S)
    chance = random.Random(23)
    for how in (signal.SIGKILL, signal.SIGINT):
        taken = len(scene.log())
        program = scene.start(scene.spec(**LARGE))
        try:
            processes.wait_until(lambda taken=taken: len(scene.log()) > taken + 20)
            time.sleep(chance.uniform(0, 0.3))
            children = processes.children_of(program.pid)
            assert children
            program.send_signal(how)
            assert processes.none_within(children, 5)
            _, errors = program.communicate(timeout=20)
        finally:
            program.kill()
            program.communicate()
        assert program.returncode == (1 if how == signal.SIGINT else -how)
        if how == signal.SIGINT:
            assert re.fullmatch(r"signal-batch: stopped; .*goes on from there\n", errors), errors
    scene.act()
    program = scene.start(scene.spec(**LARGE))
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    scene.check_same("out", undisturbed.folder / "out")
    check_records(scene, undisturbed)
    firsts = [steps[0] for steps in attempts(scene.log())]
    assert firsts == sorted(firsts)
    assert firsts[0] == 1 < firsts[-1]


# --- at chosen moments --------------------------------------------------------------------------


def test_every_kind_of_death_in_a_row(
    scene: Any,
    undisturbed: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inside a save, by the kernel, by an exit of its own, by a hang that nobody ends but we,
    while the model is judged, and as it is to be published."""
    scene.act(
        {"save": 9, "place": "half"},
        {"save": 40, "place": "between"},
        {"save": 80, "place": "before"},
        {"step": 120, "do": "kill"},
        {"step": 160, "do": "exit", "code": 0},
        {"step": 200, "do": "exit", "code": 9},
        {"step": 240, "do": "hang"},
        {"judging": 1},
    )
    caplog.set_level(logging.WARNING, "signal_batch.training_runner")
    with monkeypatch.context() as patch:
        patch.setattr("signal_batch.training_runner.publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scene.train(**LARGE, execution={"retries": 12, "stall_timeout_s": STALL_S})
    assert not (scene.folder / "out" / "_manifest.json").exists()
    scene.train(**LARGE)
    told = [record.getMessage() for record in caplog.records]
    causes = [
        *["was killed by SIGKILL (out of memory?)"] * 4,
        *("ended with exit code 0", "ended with exit code 9"),
        f"said nothing for {STALL_S} s and was killed",
        "was killed by SIGKILL (out of memory?)",
    ]
    found = [cause for line in told for cause in sorted({*causes}) if cause in line]
    assert found == causes
    assert all("; going on from the last checkpoint in 0.0 s" in line for line in told)
    assert [line.startswith("evaluating the model") for line in told] == [False] * 7 + [True]
    scene.check_same("out", undisturbed.folder / "out")
    check_records(scene, undisturbed)
    taken = attempts(scene.log())
    assert len(taken) == len(causes), "the last one died in the evaluation, of no step"
    assert [steps[-1] for steps in taken[3:]] == [120, 160, 200, 240, STEPS]
    half, between, before = (steps[-1] for steps in taken[:3])
    assert half >= 9
    assert between >= 40
    assert before >= 80
    # What was whole is gone on from, what was not is not.
    assert taken[1][0] in range(1, 12)
    assert taken[2][0] <= 40
    assert taken[3][0] > 80
    assert scene.json("model.json")["timing"]["attempts"] <= len(taken)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_what_a_trainer_does_wrong_is_not_tried_again_and_can_be_mended(
    scene: Any, undisturbed: Any
) -> None:
    """Exceptions and too large requests; meanwhile checkpoints are damaged in every way."""
    folder = scene.folder / "out" / "_checkpoints"
    patient = {"retries": 3}

    def fails(
        match: str, *actions: dict[str, Any], kind: type = SignalBatchError
    ) -> list[list[int]]:
        scene.act(*actions)
        known = len(attempts(scene.log()))
        with pytest.raises(SignalBatchError, match=match) as caught:
            scene.train(**LARGE, execution=patient)
        assert type(caught.value) is kind
        return attempts(scene.log())[known:]

    (taken,) = fails("ZeroDivisionError: no such luck", {"step": 40, "do": "raise"})
    assert taken == list(range(1, 41))
    documents = sorted(folder.glob("*.json"))
    assert len(documents) == 3
    for document in documents:
        document.write_text("{")

    # From the start; and although damaged ones are further on, new checkpoints are kept.
    first, second, *again = fails(
        "ran out of memory: Unable to allocate 1.00 PiB",
        {"step": 30, "do": "kill"},
        *[{"step": 120, "do": "allocate"}] * 3,
        kind=WorkerDiedError,
    )
    assert first == list(range(1, 31))
    assert 1 < second[0] <= 30
    assert [taken[-1] for taken in (second, *again)] == [120, 120, 120]

    older, newest = two_newest(folder)
    newest.write_bytes(newest.read_bytes()[:-1000])
    (taken,) = fails("ZeroDivisionError", {"step": 160, "do": "raise"})
    assert taken[0] == step_of(older) + 1

    older, newest = two_newest(folder)
    newest.unlink()
    changed = bytearray(older.read_bytes())
    changed[-5] ^= 1
    older.write_bytes(changed)
    scene.act()
    scene.train(**LARGE)
    assert attempts(scene.log())[-1][0] < step_of(older)
    told = scene.json("model.json")["warnings"]
    assert len(told) == 2
    page = (scene.folder / "out" / "report.html").read_text()
    for line, path, problem in zip(
        told, (newest, older), ("is missing", "was cut short or changed"), strict=True
    ):
        assert line.startswith(
            f"checkpoint step-{step_of(path):09d} is damaged ({path.name} {problem}"
        )
        assert html.escape(line) in page
    scene.check_same("out", undisturbed.folder / "out")
    check_records(scene, undisturbed)


def two_newest(folder: Path) -> list[Path]:
    """The arrays of the two newest checkpoints, ascending."""
    newest = sorted(path.stem for path in folder.glob("*.json"))[-2:]
    return [next(folder.glob(f"{name}-*.safetensors")) for name in newest]


def step_of(path: Path) -> int:
    return int(path.name[5:14])


def test_damaged_checkpoints_further_on_do_not_displace_new_ones(undisturbed: Any) -> None:
    """Nor does what a killed run left of a save stay forever."""
    job = read_training(str(undisturbed.folder / "out"))
    checkpoints = Checkpoints(
        str(undisturbed.folder / "pruned"), run_key=job.run_key, identity=job.identity, keep=1
    )
    folder = undisturbed.folder / "pruned" / "_checkpoints"

    def save(step: int) -> None:
        checkpoints.save(Checkpoint(step, step, {}, {}), {})

    save(9)
    (folder / "step-000000009.json").write_text("{}")
    (folder / f"step-000000003-{'0' * 12}.safetensors.{'1' * 32}.tmp").touch()
    told: list[str] = []
    for step in (3, 6):
        save(step)
        newest = checkpoints.newest(told.append)
        assert newest is not None
        assert newest.step == step
    assert checkpoints.steps() == [6, 9]
    assert all("step-000000009 is damaged" in line for line in told)
    assert list(folder.glob("*.tmp")) == []
    save(9)
    assert checkpoints.steps() == [9]
    assert len(list(folder.iterdir())) == 2


def test_a_save_survives_that_another_run_clears_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run takes what another one is writing for what a killed run left."""
    write = store._write_durably
    cleared: list[Path] = []

    def write_and_lose(path: Path, payload: bytes) -> None:
        write(path, payload)
        if not cleared:
            cleared.append(path)
            path.unlink()

    monkeypatch.setattr(store, "_write_durably", write_and_lose)
    store.OutputStore(str(tmp_path)).put_object("object", b"payload")
    assert len(cleared) == 1
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("object", b"payload")
    ]


# --- the built-in trainers ----------------------------------------------------------------------


def check_built_in(scene: Any, processes: Any, **spec: Any) -> None:
    """Killed after a checkpoint and left alone, a built-in trainer learns the same."""
    fields = {
        "transforms": ["unit_power", "add_noise snr_db=[0,20]", "recording_trainer:noted"],
        "split": "id",
        "steps": 30,
        "checkpoint_steps": 1,
        **spec,
    }
    scene.act(step_s=0.002)
    killer = Killer(scene, processes, 1, seed=5, patient=True)
    killer.start()
    scene.train(**fields, execution={"retries": 1})
    killer.finish()
    scene.act()
    log = scene.log(forget=True)
    resumed = [line for line in log if line["pid"] not in killer.killed]
    assert len({line["pid"] for line in resumed}) == 1
    scene.train("alone", **fields)
    assert len(resumed) < len(scene.log()), "it went on and did not begin anew"
    scene.check_same("out", scene.folder / "alone")


def test_scikit_learn_goes_on_bit_for_bit(scene: Any, processes: Any) -> None:
    pytest.importorskip("sklearn")
    arguments = {"estimator": "MLPClassifier", "estimator_args": {"hidden_layer_sizes": [16]}}
    check_built_in(scene, processes, trainer="sklearn", trainer_args=arguments)


def test_jax_goes_on_bit_for_bit(scene: Any, processes: Any) -> None:
    for name in ("jax", "flax", "optax"):
        pytest.importorskip(name)
    arguments = {"width": 8, "blocks": 1, "kernel": 5, "dropout": 0.2}
    check_built_in(scene, processes, trainer="jax", trainer_args=arguments)
