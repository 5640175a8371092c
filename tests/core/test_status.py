"""What a status says at every moment of an export, held against the files on disk."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

import signal_batch
from signal_batch import errors, notes
from signal_batch.cli import main
from signal_batch.errors import (
    CorruptDatasetError,
    FeatureError,
    InputError,
    OutputError,
    StorageError,
)
from signal_batch.frozen import checked
from signal_batch.job import ExportJob, claim, commit, progress_of
from signal_batch.planning import prepare
from signal_batch.specs import ExportSpec
from signal_batch.status import read_status
from signal_batch.status_model import REMEDIES, Status
from signal_batch.store import OutputStore
from signal_batch.worker import work

PARTS, ROWS, RECORDS = 25, 8, 200
SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"

#: In worker processes the function logs each batch and then does what the file `action` says for
#: it: `wait` until that file changes, or `raise`. It is the same source whatever it does.
FEATURE = """
    import os, sys, time
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
        action = folder / "action"
        while action.read_text() == "wait" and first in (16, 112):
            time.sleep(0.02)
        if action.read_text() == "raise" and first == 16:
            key = os.environ["AWS_SECRET_ACCESS_KEY"]
            raise ValueError(f"\\x1b[31mno s3://me:{key}@lab/x?sig=abc, {key}")
"""


class Scene:
    """A folder with a feature function whose doings a test chooses; 25 parts of 8 records."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder, self.dataset, self.out = folder, dataset, folder / "out"
        self.module = f"energy_{folder.name}"
        (folder / f"{self.module}.py").write_text(textwrap.dedent(FEATURE))
        self.act("none")

    def act(self, action: str) -> None:
        """Read again and again by workers, so it must never be seen empty."""
        (self.folder / "action.new").write_text(action)
        (self.folder / "action.new").replace(self.folder / "action")

    def spec(self, **fields: Any) -> ExportSpec:
        execution = {"workers": 2, "retry_delay_s": 0.01} | fields.pop("execution", {})
        defaults: dict[str, Any] = {
            "dataset": str(self.dataset),
            "output": str(self.out),
            "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
            "features": f"{self.module}:energy",
            "batch_size": ROWS,
            "part_bytes": 400,
        }
        return checked(ExportSpec, defaults | fields | {"execution": execution})

    def start(self, **execution: Any) -> subprocess.Popen[str]:
        file = self.folder / "spec.json"
        file.write_text(self.spec(execution=execution).model_dump_json())
        return subprocess.Popen(
            [sys.executable, "-m", "signal_batch", "export", "--spec", str(file)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pids(self) -> dict[int, int]:
        """The worker's process id by the first ordinal of each batch."""
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(first): int(pid) for pid, first in map(str.split, lines)}

    def begin(self, count: int | None = None, **fields: Any) -> ExportJob:
        """Claim the folder, and write the first `count` parts in this process."""
        job = claim(prepare(self.spec(**fields)))
        for shard in progress_of(job).shards:
            parts = tuple(part for part in shard.parts if count is None or part.index < count)
            if parts:
                work(job.order(replace(shard, parts=parts)), lambda event: None)
        return job

    def status(self) -> Status:
        return read_status(str(self.out))


@pytest.fixture
def scene(tmp_path: Path, iq_root: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    made = Scene(tmp_path, iq_root)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([path] if path else [])]))
    return made


@pytest.fixture
def halfway(scene: Scene) -> Iterator[tuple[Scene, subprocess.Popen[str]]]:
    """A run whose two workers wait in part 2 and part 14."""
    scene.act("wait")
    program = scene.start(retries=1, retry_delay_s=60)
    try:
        wait_until(lambda: {16, 112} <= set(scene.pids()))
        yield scene, program
    finally:
        program.kill()
        program.communicate()


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def written(out: Path) -> dict[int, float]:
    """When each part got its receipt, by index."""
    return {
        json.loads(path.read_text())["part"]: path.stat().st_mtime
        for path in (out / "_receipts").glob("*.json")
    }


def ranges(parts: set[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, last)."""
    firsts = sorted(part for part in parts if part - 1 not in parts)
    lasts = sorted(part for part in parts if part + 1 not in parts)
    return list(zip(firsts, lasts, strict=True))


def check_progress(status: Status, out: Path) -> None:
    """Done, missing and speed are what receipts on disk and the plan's arithmetic say."""
    times = written(out)
    absent = ranges(set(range(PARTS)) - set(times))
    assert [(item.unit, item.done, item.of) for item in status.counts] == [
        ("parts", len(times), PARTS),
        ("records", ROWS * len(times), RECORDS),
    ]
    assert [(item.first_part, item.last_part) for item in status.missing] == absent
    assert [(item.first_ordinal, item.last_ordinal, item.records) for item in status.missing] == [
        (ROWS * first, ROWS * last + ROWS - 1, ROWS * (last - first + 1)) for first, last in absent
    ]
    since = max(times.values()) - (out / "_spec.json").stat().st_mtime
    assert status.speed.overall == pytest.approx(ROWS * len(times) / since)


def tamper(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# --- a run from its middle to its end -----------------------------------------------------------


def test_a_run_from_a_look_at_it_to_a_killed_worker_to_its_end(
    halfway: tuple[Scene, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    scene, program = halfway
    pids = scene.pids()
    status = scene.status()
    assert (status.state, status.exit_code) == ("running", 0)
    assert (status.problems, status.faults) == ((), ())
    assert set(written(scene.out)) == {0, 1, 12, 13}
    check_progress(status, scene.out)
    host = socket.gethostname()
    assert [
        (item.part, item.first_ordinal, item.last_ordinal, item.pid, item.host)
        for item in status.running
    ] == [(2, 16, 23, pids[16], host), (14, 112, 119, pids[112], host)]
    for item in status.running:
        assert 0 <= item.seconds < 60
        assert 0 <= time.time() - datetime.fromisoformat(item.since).timestamp() < 60
        assert item.run_id
    began = [json.loads(p.read_text())["began"] for p in (scene.out / "_attempts").iterdir()]
    since = min(datetime.fromisoformat(text).timestamp() for text in began)
    recent = ROWS * 4 / (max(written(scene.out).values()) - since)
    assert status.speed.recent == pytest.approx(recent)
    assert status.seconds_left == pytest.approx((RECORDS - ROWS * 4) / recent)
    assert main(["status", str(scene.out)]) == 0
    told = capsys.readouterr().out
    for text in ("4 of 25 parts, 32 of 200 records (16 %)", f"process {pids[16]}", "parts 2-11"):
        assert text in told

    os.kill(pids[16], signal.SIGKILL)
    wait_until(lambda: list(scene.out.glob("_errors/*.json")))
    status = scene.status()
    assert (status.state, status.exit_code) == ("running", 0)
    assert [item.part for item in status.running] == [14]
    (problem,) = status.problems
    assert (problem.kind, problem.part, problem.count) == ("WorkerDiedError", 2, 1)
    assert "was killed by SIGKILL" in problem.message
    assert (problem.host, problem.outcome) == (host, "open")

    scene.act("none")
    wait_until(lambda: len(written(scene.out)) == 15)
    wait_until(lambda: scene.status().state != "running")
    assert (scene.status().state, scene.status().exit_code) == ("retrying", 0)
    program.kill()
    program.communicate()
    status = scene.status()
    assert (status.state, status.exit_code) == ("failed", 1)
    check_progress(status, scene.out)
    assert main(["status", str(scene.out)]) == 1
    assert "parts 2-11: 80 records, ordinals 16-95" in capsys.readouterr().out

    commit(scene.begin())
    check_complete(scene)
    assert main(["status", str(scene.out)]) == 0
    told = capsys.readouterr().out
    assert "complete" in told.splitlines()[0]
    assert "25 of 25 parts, 200 of 200 records (100 %)" in told


def check_complete(scene: Scene) -> None:
    """Complete, with no notes left, and nothing that verification minds."""
    status = scene.status()
    assert (status.state, status.exit_code) == ("complete", 0)
    assert (status.running, status.problems, status.missing) == ((), (), ())
    check_progress(status, scene.out)
    assert status.seconds_left is None
    manifest = json.loads((scene.out / "_manifest.json").read_text())
    assert status.completed == manifest["created"]
    assert {path.name for path in scene.out.iterdir()} == {
        *("_spec.json", "_manifest.json", "_receipts", "data")
    }
    assert signal_batch.verify(str(scene.out)).ok


def test_a_program_that_was_killed_is_not_running(
    halfway: tuple[Scene, subprocess.Popen[str]],
) -> None:
    scene, program = halfway
    pids = scene.pids()
    program.kill()
    program.communicate()
    wait_until(lambda: scene.status().state != "running")
    status = scene.status()
    assert (status.state, status.exit_code, status.running) == ("stopped", 1, ())
    assert sorted((item.kind, item.part) for item in status.problems) == [
        ("ended", 2),
        ("ended", 14),
    ]
    assert sorted(item.message.split()[1] for item in status.problems) == sorted(
        str(pids[first]) for first in (16, 112)
    )
    check_progress(status, scene.out)
    assert "the same command" in status.advice


def test_a_look_at_any_moment(scene: Scene) -> None:
    """Numbers never fall, parts are never both done and running, and the end is complete."""
    job = claim(prepare(scene.spec()))
    thread = threading.Thread(target=lambda: commit(scene.begin()))
    thread.start()
    seen: list[Status] = []
    while thread.is_alive():
        seen.append(scene.status())
    thread.join()
    assert job.run_key == scene.status().job.run_key
    done = [status.counts[0].done for status in seen]
    assert done == sorted(done)
    assert {status.faults for status in seen} == {()}
    for status in seen:
        for item in status.running:
            assert any(m.first_part <= (item.part or 0) <= m.last_part for m in status.missing)
    check_complete(scene)


def test_only_claimed(scene: Scene) -> None:
    claim(prepare(scene.spec()))
    status = scene.status()
    assert (status.state, status.exit_code) == ("waiting", 0)
    assert [(item.done, item.of) for item in status.counts] == [(0, PARTS), (0, RECORDS)]
    assert [(item.first_part, item.last_part) for item in status.missing] == [(0, 24)]
    assert (status.speed.recent, status.speed.overall, status.seconds_left) == (None, None, None)


def test_every_part_is_written_and_the_commit_is_missing(scene: Scene) -> None:
    scene.begin()
    status = scene.status()
    assert (status.state, status.exit_code, status.missing) == ("waiting", 0, ())
    assert "the same command completes it" in status.advice


def test_what_is_read_and_made(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    where = "annotation:review-v1 status success"
    job = scene.begin(3, where=[where])
    assert main(["status", str(scene.out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    dataset = sds.open(str(scene.dataset))
    assert found["exit_code"] == 0
    assert found["job"]["dataset"] == str(scene.dataset)
    assert found["job"]["snapshot_id"] == dataset.snapshot_id
    assert (
        found["job"]["fingerprint"] == signal_batch.pin_dataset(str(scene.dataset)).pin.fingerprint
    )
    assert [text.split()[0] for text in found["job"]["annotations"]] == ["review-v1", "truth-v1"]
    assert found["job"]["columns"] == [
        "samples=field:samples",
        "label=annotation:truth-v1/label:int32",
    ]
    assert found["job"]["where"] == [where]
    assert found["job"]["method"] == f"{scene.module}:energy"
    assert found["job"]["run_key"] == job.run_key
    rows = sum(
        row.status == sds.AnnotationStatus.SUCCESS for row in dataset.annotations["review-v1"]
    )
    assert found["counts"][1] == {"unit": "records", "done": 3 * ROWS, "of": rows}
    # Which ordinals pass the filter, the claim does not say.
    assert found["missing"][0]["first_ordinal"] is None
    assert found["missing"][0]["records"] == rows - 3 * ROWS


# --- failures -----------------------------------------------------------------------------------


def test_a_failing_feature_is_told_without_secrets(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.act("raise")
    for count in (1, 2):
        with pytest.raises(FeatureError):
            signal_batch.export(scene.spec(execution={"workers": 1}))
        status = scene.status()
        assert (status.state, status.exit_code) == ("failed", 1)
        (problem,) = status.problems
        assert (problem.kind, problem.part, problem.count) == ("FeatureError", 2, count)
        assert (problem.first_ordinal, problem.last_ordinal) == (16, 23)
        assert "ValueError: [31mno s3://lab/x ***" in problem.message
        assert "correct the function" in problem.remedy
    check_progress(status, scene.out)
    assert main(["status", str(scene.out)]) == 1
    told = capsys.readouterr().out
    assert "twice in a row: FeatureError" in told
    assert SECRET not in told
    assert "\x1b" not in told
    for path in scene.out.rglob("*.json"):
        assert SECRET not in path.read_text()

    scene.act("none")
    scene.begin(3)
    (problem,) = scene.status().problems
    assert (scene.status().state, problem.outcome) == ("waiting", "passed")
    commit(scene.begin())
    check_complete(scene)


def test_a_corrupt_record(vowels_copy: Path, tmp_path: Path) -> None:
    dataset = sds.open(str(vowels_copy))
    entry, _ = dataset._index.locate(205)
    shard = vowels_copy / entry.data.path
    data = bytearray(shard.read_bytes())
    data[data.index(dataset[205]["samples"].data.tobytes())] ^= 4
    shard.write_bytes(data)
    fields: dict[str, Any] = {
        "dataset": str(vowels_copy),
        "columns": ["field:samples"],
        "features": "statistics",
        "batch_size": 16,
        "part_bytes": "16KB",
        "execution": {"workers": 1},
    }
    spec = checked(ExportSpec, fields | {"output": str(tmp_path / "fails")})
    with pytest.raises(CorruptDatasetError):
        signal_batch.export(spec)
    status = read_status(spec.output)
    (problem,) = status.problems
    assert (status.state, problem.kind, problem.ordinal) == ("failed", "CorruptDatasetError", 205)
    assert problem.first_ordinal is not None
    assert problem.last_ordinal is not None
    assert problem.first_ordinal <= 205 <= problem.last_ordinal
    assert str(shard) in problem.message
    assert "--on-error quarantine" in problem.remedy

    skips = fields | {"output": str(tmp_path / "skips"), "on_error": "skip"}
    signal_batch.export(checked(ExportSpec, skips))
    status = read_status(skips["output"])
    assert (status.state, status.set_aside) == ("complete", 1)


def test_a_note_that_cannot_be_written_hides_no_error(scene: Scene) -> None:
    job = claim(prepare(scene.spec()))
    for name in ("_errors", "_attempts"):
        (scene.out / name).write_text("no folder")
    scene.act("raise")
    with pytest.raises(FeatureError, match="ValueError"):
        signal_batch.export(scene.spec())
    scene.act("none")
    assert scene.status().problems == ()
    commit(scene.begin())
    assert scene.status().state == "complete"
    assert job.run_key == scene.status().job.run_key


def test_storage_that_does_not_answer_delays_no_error_for_long(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(prepare(scene.spec()))
    answered = threading.Event()

    def silent(*arguments: object) -> None:
        answered.wait(60)

    monkeypatch.setattr(OutputStore, "read_manifest", silent)
    monkeypatch.setattr(notes, "_PATIENCE_S", 0.2)
    began = time.monotonic()
    options: dict[str, Any] = {"run_key": "k", "run_id": "r", "doing": "export"}
    notes.note_failure(str(scene.out), StorageError("no answer"), **options)
    assert time.monotonic() - began < 30
    answered.set()


def test_a_folder_that_was_removed_does_not_come_back(scene: Scene) -> None:
    job = claim(prepare(scene.spec()))
    attendance = notes.Attendance(str(scene.out), job.run_key, None)
    (scene.out / "_spec.json").unlink()
    scene.out.rmdir()
    attendance.begin("export", job.parts[0])
    options: dict[str, Any] = {"run_key": job.run_key, "run_id": "r", "doing": "export"}
    notes.note_failure(str(scene.out), OutputError("gone"), **options)
    assert not scene.out.exists()


def test_notes_are_no_strangers_and_no_damage(scene: Scene) -> None:
    """What a worker writes that outlived its folder, or the commit of another run."""
    (scene.out / "_attempts").mkdir(parents=True)
    (scene.out / "_attempts" / "elsewhere-7.json").write_text('{"run_key": "of another job"}')
    job = scene.begin()
    commit(job)
    notes.Attendance(str(scene.out), job.run_key, None).begin("export", job.parts[0])
    assert signal_batch.verify(str(scene.out)).ok
    assert scene.status().state == "complete"
    again = signal_batch.export(scene.spec())
    assert again.already_complete


# --- whose notes are believed -------------------------------------------------------------------


@pytest.fixture
def note(scene: Scene) -> Path:
    """The note of this process, at part 2, which has no receipt."""
    job = scene.begin(2)
    notes.Attendance(str(scene.out), job.run_key, "r").begin("export", job.parts[2])
    (path,) = (scene.out / "_attempts").iterdir()
    assert [item.part for item in scene.status().running] == [2]
    return path


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


def test_a_process_of_another_machine_is_believed_for_so_long(scene: Scene, note: Path) -> None:
    timeout_s = scene.spec().execution.timeout_s
    tamper(note, host="elsewhere", pid=1, started=ago(timeout_s - 60))
    assert [item.host for item in scene.status().running] == ["elsewhere"]
    tamper(note, started=ago(timeout_s + 1))
    status = scene.status()
    assert (status.state, status.exit_code, status.running) == ("stopped", 1, ())
    assert [(item.kind, item.host) for item in status.problems] == [("ended", "elsewhere")]


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_a_process_that_got_the_id_of_another_is_not_it(scene: Scene, note: Path) -> None:
    tamper(note, born="1")
    assert scene.status().state == "stopped"


def test_notes_of_another_run_key_are_of_another_job(scene: Scene, note: Path) -> None:
    tamper(note, run_key="0" * 64)
    status = scene.status()
    assert (status.state, status.running, status.problems) == ("waiting", (), ())


# --- damage, and what is no output --------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run_key": 7}'])
def test_damaged_notes_and_receipts_are_named(scene: Scene, note: Path, text: str) -> None:
    note.write_text(text)
    (scene.out / "_errors").mkdir()
    (scene.out / "_errors" / "part-00003.json").write_text(text)
    (scene.out / "_receipts" / "part-00001.json").write_text(text)
    (scene.out / "_receipts" / "part-00099.json").write_text(text)
    status = scene.status()
    assert status.counts[0].done == 1
    named = " ".join(status.faults)
    for name in (f"_attempts/{note.name}", "_errors/part-00003.json", "part-00001", "part-00099"):
        assert name in named
    assert status.state == "waiting"


def test_an_output_of_another_format_version(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.begin(2)
    tamper(scene.out / "_spec.json", format_version=2)
    status = scene.status()
    assert status.counts[0].done == 2
    assert "format version 2, and this program knows 1" in status.faults[0]
    tamper(scene.out / "_spec.json", plan=7, pin=None, spec=[])
    assert main(["status", str(scene.out)]) == 1
    told = capsys.readouterr()
    assert "damaged" in told.out
    assert "does not say how many parts" in told.out


@pytest.mark.parametrize("name", ["_spec.json", "_manifest.json"])
def test_a_claim_or_manifest_that_is_no_json(
    scene: Scene, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.begin(1)
    (scene.out / name).write_text("{")
    assert main(["status", str(scene.out)]) == 1
    assert f"{name} is not valid JSON" in capsys.readouterr().err


def test_a_manifest_without_its_claim(scene: Scene) -> None:
    commit(scene.begin())
    (scene.out / "_spec.json").unlink()
    status = scene.status()
    assert status.state == "complete"
    assert [(item.done, item.of) for item in status.counts] == [(PARTS, PARTS), (RECORDS, RECORDS)]


def test_what_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "_spec.json").write_text('{"format": "something else"}')
    (tmp_path / "file").write_text("x")
    for name in ("empty", "foreign", "file", "nothing"):
        assert main(["status", str(tmp_path / name)]) == 2
        told = capsys.readouterr()
        assert told.err.count("\n") == 1
        assert name in told.err
    with pytest.raises(InputError, match="no output of an export or a training run"):
        read_status(str(tmp_path / "empty"))


# --- size ---------------------------------------------------------------------------------------


def test_thousands_of_parts(scene: Scene) -> None:
    """Only the newest receipts are read; speed lately is that of the last 64."""
    job, count, gone = scene.begin(1), 3000, {0, 7, 8, 2999}
    plan = {"parts": count, "rows": count, "part_rows": 1}
    claimed = json.loads((scene.out / "_spec.json").read_text())
    tamper(scene.out / "_spec.json", plan=claimed["plan"] | plan)
    (sample,) = (scene.out / "_receipts").iterdir()
    (only,) = (scene.out / "_attempts").iterdir()
    only.unlink()
    receipt, start = json.loads(sample.read_text()), time.time() - 10_000
    sample.unlink()
    for index in sorted(set(range(count)) - gone):
        path = sample.with_name(f"part-{index:05d}.json")
        path.write_text(json.dumps(receipt | {"part": index, "bad_ordinals": [index]}))
        os.utime(path, (start + 2 * index, start + 2 * index))
    os.utime(scene.out / "_spec.json", (start - 10, start - 10))
    began = time.monotonic()
    status = scene.status()
    assert time.monotonic() - began < 30
    assert status.job.run_key == job.run_key
    assert status.counts[0].done == count - len(gone)
    assert [(item.first_part, item.last_part) for item in status.missing] == [
        *((0, 0), (7, 8), (2999, 2999)),
    ]
    assert (status.receipts_read, status.set_aside, status.faults) == (512, 512, ())
    assert status.speed.recent == pytest.approx(1 / 2, rel=1e-6)
    assert status.speed.overall == pytest.approx((count - 4) / (2 * 2998 + 10), rel=1e-6)
    assert status.seconds_left == pytest.approx(4 * 2, rel=1e-6)
    assert np.isfinite(status.seconds_left or np.nan)


def test_remedies_are_for_errors_that_there_are() -> None:
    assert set(REMEDIES) <= set(vars(errors))
