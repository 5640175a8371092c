"""Real kills: of a worker, of the whole program, by Ctrl-C and by the watchdog."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import signal_batch
from signal_batch import engines
from signal_batch.errors import SignalBatchError, WorkerDiedError
from signal_batch.frozen import checked
from signal_batch.job import claim, commit, progress_of
from signal_batch.planning import prepare
from signal_batch.processes import worker_pids
from signal_batch.specs import ExportSpec
from signal_batch.worker import work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")

#: The feature does what the file `action` asks for, in worker processes alone, and logs each
#: batch. It is the same source, and so the same job, whatever the action.
FEATURE = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np

    def energy(batch):
        if Path(sys.argv[0]).name == "worker.py":
            act(int(batch["ordinal"][0]))
        return {"energy": np.sum(np.abs(batch["samples"]) ** 2, axis=(1, 2))}

    def act(first):
        folder = Path(__file__).parent
        with (folder / "log").open("a") as log:
            log.write(f"{os.getpid()} {first}\\n")
        action, _, ordinal = (folder / "action").read_text().partition(" ")
        if action == "slow":
            time.sleep(0.1)
        elif first == int(ordinal or -1):
            if "once" in action:
                (folder / "action").write_text("none")
            if action.startswith("hang"):
                time.sleep(600)
            elif action.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif action.startswith("fork"):
                if os.fork() == 0:
                    time.sleep(600)
                os.kill(os.getpid(), signal.SIGKILL)
            elif action.startswith("nest"):
                import subprocess

                child = subprocess.Popen(["sleep", "600"])
                (folder / "nested").write_text(str(child.pid))
                time.sleep(600)
            elif action.startswith("exit"):
                print("secret is", "x" * 5, file=sys.stderr)
                os._exit(9)
"""
SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"


class Scene:
    """A folder with a feature function whose misbehaviour a test chooses."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder, self.dataset, self.out = folder, dataset, folder / "out"
        self.module = f"energy_{folder.name}"
        (folder / f"{self.module}.py").write_text(textwrap.dedent(FEATURE))
        self.act("none")

    def act(self, action: str) -> None:
        (self.folder / "action").write_text(action)

    def spec(self, output: Path | None = None, **execution: Any) -> ExportSpec:
        """25 parts of 8 records, a batch each."""
        return checked(
            ExportSpec,
            {
                "dataset": str(self.dataset),
                "output": str(output or self.out),
                "columns": ["field:samples"],
                "features": f"{self.module}:energy",
                "batch_size": 8,
                "part_bytes": 320,
                "execution": {"workers": 1, "retry_delay_s": 0.01} | execution,
            },
        )

    def command(self, workers: int = 2) -> list[str]:
        spec = self.spec()
        return [
            *(sys.executable, "-m", "signal_batch", "export", spec.dataset, spec.output),
            *("--column", "field:samples", "--features", spec.features, "--batch-size", "8"),
            *("--part-size", "320", "--workers", str(workers)),
        ]

    def start(self, workers: int = 2) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(workers),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def log(self) -> list[tuple[int, int]]:
        """(worker's process id, first ordinal) of every batch so far."""
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(first)) for pid, first in map(str.split, lines)]

    def receipts(self) -> dict[str, int]:
        """Receipts by name, with their times."""
        found = (self.out / "_receipts").glob("*.json")
        return {path.name: path.stat().st_mtime_ns for path in found}

    def wait_for(self, count: int) -> None:
        """Until there are so many receipts."""
        wait_until(lambda: len(self.receipts()) >= count)

    def finish(self, output: Path | None = None) -> dict[str, Any]:
        """Run the job to its end in this process, where the feature always behaves."""
        job = claim(prepare(self.spec(output)))
        for shard in progress_of(job).shards:
            work(job.order(shard), lambda event: None)
        return commit(job)

    def check(self) -> None:
        """The output is complete and equals an undisturbed run."""
        manifest = json.loads((self.out / "_manifest.json").read_text())
        undisturbed = self.finish(self.folder / "reference")
        for name in ("logical_digest", "first_ordinal", "last_ordinal", "rows"):
            assert [e[name] for e in manifest["files"]] == [e[name] for e in undisturbed["files"]]
        assert manifest["totals"]["rows"] == 200
        assert signal_batch.verify(str(self.out)).faults == ()
        left = [path.name for path in self.out.rglob("*.tmp")]
        assert left == []


@pytest.fixture
def scene(tmp_path: Path, iq_root: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return Scene(tmp_path, iq_root)


def wait_until(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return found


def none_within(pids: set[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens in the test, its processes end."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# --- a worker dies -----------------------------------------------------------------------------


def test_a_killed_worker_is_started_again_at_the_first_part_without_a_receipt(
    scene: Scene,
) -> None:
    scene.act("kill-once 96")
    rows: list[int] = []
    signal_batch.export(scene.spec(), on_progress=lambda count, total=None: rows.append(count))
    log = scene.log()
    first, second = dict.fromkeys(pid for pid, _ in log)
    assert [ordinal for pid, ordinal in log if pid == first] == list(range(0, 97, 8))
    assert [ordinal for pid, ordinal in log if pid == second] == list(range(96, 200, 8))
    assert sum(rows) == 200, "what the dead worker counted is taken back"
    scene.check()


def test_a_worker_killed_from_outside(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does when memory runs out: of two workers, one goes at any moment."""
    scene.act("slow")
    run_ids: list[str] = []
    run_worker = engines.run_worker

    def noting(order: Any, report: Any, *, run_id: str) -> Any:
        run_ids.append(run_id)
        return run_worker(order, report, run_id=run_id)

    def kill_one() -> None:
        wait_until(lambda: len({pid for pid, _ in scene.log()}) == 2)
        pids = worker_pids(run_ids[0])
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        scene.act("none")

    monkeypatch.setattr(engines, "run_worker", noting)
    killer = threading.Thread(target=kill_one)
    killer.start()
    signal_batch.export(scene.spec(workers=2))
    killer.join()
    assert len(run_ids) == 3
    scene.check()


def test_a_worker_that_dies_every_time_is_given_up(scene: Scene) -> None:
    scene.act("exit 16")
    with pytest.raises(WorkerDiedError, match="exit code 9; it last said") as caught:
        signal_batch.export(scene.spec(retries=1))
    assert [ordinal for _, ordinal in scene.log()] == [0, 8, 16, 16]
    assert SECRET not in str(caught.value)
    assert set(scene.receipts()) == {"part-00000.json", "part-00001.json"}
    scene.finish()
    scene.check()
    for path in scene.out.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


def test_a_hung_worker_is_killed(scene: Scene) -> None:
    scene.act("hang 16")
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"ordinals 0-199 said nothing for 7 s and was kill"):
        signal_batch.export(scene.spec(retries=0, timeout_s=7))
    assert 7 < time.monotonic() - started < 40
    assert none_within({pid for pid, _ in scene.log()}, 1)
    assert [ordinal for _, ordinal in scene.log()] == [0, 8, 16]
    scene.finish()
    scene.check()


def test_one_failure_stops_the_other_worker(scene: Scene) -> None:
    """What the other worker has finished stays."""
    scene.act("exit 8")
    with pytest.raises(SignalBatchError):
        signal_batch.export(scene.spec(workers=2, retries=0))
    assert none_within({pid for pid, _ in scene.log()}, 1)


# --- the program dies --------------------------------------------------------------------------


def test_a_killed_program_takes_its_workers_along_and_is_resumed(scene: Scene) -> None:
    scene.act("slow")
    program = scene.start()
    with ended(program):
        scene.wait_for(4)
        workers = {pid for pid, _ in scene.log()} | set(children_of(program.pid))
        program.send_signal(signal.SIGKILL)
        program.wait()
        assert none_within(workers, 5)
    time.sleep(0.3)
    before, batches = scene.receipts(), len(scene.log())
    assert 4 <= len(before) < 25
    assert not (scene.out / "_manifest.json").exists()
    scene.act("none")
    again = subprocess.run(scene.command(), cwd=scene.folder, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert {name: scene.receipts()[name] for name in before} == before
    assert len(scene.log()) - batches == 25 - len(before), "nothing is done twice"
    scene.check()


def test_a_program_killed_as_its_workers_start_leaves_no_orphan(scene: Scene) -> None:
    scene.act("slow")
    program = scene.start()
    with ended(program):
        wait_until(lambda: len(children_of(program.pid)) == 2)
        workers = set(children_of(program.pid))
        program.send_signal(signal.SIGKILL)
        program.wait()
        assert none_within(workers, 5)
    assert scene.receipts() == {}


def test_ctrl_c_stops_within_seconds_and_is_resumable(scene: Scene) -> None:
    scene.act("slow")
    program = scene.start()
    with ended(program):
        scene.wait_for(3)
        workers = {pid for pid, _ in scene.log()} | set(children_of(program.pid))
        program.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        out, err = program.communicate(timeout=20)
        assert time.monotonic() - stopped < 5
        assert none_within(workers, 0.2)
    assert program.returncode == 1
    assert "Traceback" not in out + err
    assert re.fullmatch(r"signal-batch: stopped; .*goes on from there\n", err), err
    before = scene.receipts()
    scene.finish()
    assert {name: scene.receipts()[name] for name in before} == before
    scene.check()


def test_a_hung_worker_does_not_keep_ctrl_c_waiting(scene: Scene) -> None:
    scene.act("hang 0")
    program = scene.start(workers=1)
    with ended(program):
        wait_until(lambda: len(scene.log()) == 1)
        program.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        _, err = program.communicate(timeout=20)
        assert time.monotonic() - stopped < 5
    assert program.returncode == 1
    assert "Traceback" not in err
    assert none_within({pid for pid, _ in scene.log()}, 0.2)


# --- twice at the same time --------------------------------------------------------------------


def test_a_fork_of_a_killed_worker_does_not_keep_the_run_waiting(scene: Scene) -> None:
    scene.act("fork-once 40")
    program = scene.start()
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    scene.check()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_what_a_feature_started_ends_with_the_program(scene: Scene, how: signal.Signals) -> None:
    scene.act("nest 40")
    program = scene.start()
    nested = scene.folder / "nested"
    wait_until(lambda: nested.exists() and nested.read_text() != "")
    pids = {int(nested.read_text()), *children_of(program.pid)}
    program.send_signal(how)
    assert none_within(pids, 5)
    program.communicate()


def test_the_same_export_twice_at_the_same_time(scene: Scene) -> None:
    scene.act("slow")
    programs = scene.start(workers=1), scene.start(workers=1)
    with ended(*programs):
        results = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], results
    assert len({pid for pid, _ in scene.log()}) == 2
    scene.check()
