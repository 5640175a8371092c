"""A job for a range of dates: complete, missing, failing and stopped ones, and nothing twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from signal_batch.backfill import moments, plan_runs
from signal_batch.cli import main
from signal_batch.errors import SpecError
from signal_batch.frozen import checked
from signal_batch.scheduling import parse_moment
from signal_batch.specs import ExportSpec
from signal_batch.synth import synthesize
from signal_batch.verification import verify

RECORDS = 24
PARTS = 6
DAYS = ("01", "02", "04", "05")  # of March 2026; nothing was published on the third
SLOW = '''
"""Says which records it saw, and takes its time over them if it is told to."""

import os
import sys
import time
from pathlib import Path


def slow(batch):
    if Path(sys.argv[0]).name == "worker.py":
        with (Path(os.environ["TEST_SEEN"]) / str(os.getpid())).open("a") as log:
            log.write(f"{batch['id'][0]}\\n")
        time.sleep(float(os.environ.get("TEST_PAUSE_S", "0")))
    return {"samples": batch["samples"]}
'''


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset a day; not to be changed."""
    folder = tmp_path_factory.mktemp("lab")
    for day in DAYS:
        root = str(folder / f"captures-2026-03-{day}.sds")
        synthesize(root, records=RECORDS, shape=(1, 16), seed=int(day))
    return folder


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the workers log what they saw, a file a process."""
    (tmp_path / "slow_features.py").write_text(SLOW)
    (folder := tmp_path / "seen").mkdir()
    monkeypatch.setenv("TEST_SEEN", str(folder))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return folder


@pytest.fixture
def job(lab: Path, tmp_path: Path) -> list[str]:
    """An export of six parts a day, each of one batch."""
    return [
        *("export", f"{lab}/captures-{{scheduled:%Y-%m-%d}}.sds", "out/{scheduled:%Y-%m-%d}"),
        *("--column", "field:samples", "--features", "slow_features:slow"),
        *("--batch-size", "4", "--part-size", "1200", "--workers", "1"),
    ]


@pytest.fixture
def start(tmp_path: Path, seen: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `backfill` with options as a person would."""
    started = []

    def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "signal_batch", "backfill", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err
    return process.returncode, out.splitlines(), err


def table(lines: list[str]) -> list[list[str]]:
    """The cells of a summary: date, result, amount, seconds, error."""
    assert re.split(r"  +", lines[0]) == ["date", "result", "rows", "seconds"]
    return [re.split(r"  +", line) for line in lines[1:-1]]


def of(folder: Path, pattern: str) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.glob(pattern)
    }


def children_of(pid: int) -> list[int]:
    """Every process below one, at any depth."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if entry.name.isdigit():
            parents[int(entry.name)] = int(stat[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(check: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_range_with_one_missing_and_one_complete(
    start: Callable[..., Any], job: list[str], lab: Path, tmp_path: Path, seen: Path
) -> None:
    here = {"cwd": tmp_path, "check": True, "stdout": subprocess.DEVNULL}
    one = [sys.executable, "-m", "signal_batch", job[0], "--scheduled", "2026-03-02", *job[1:]]
    subprocess.run(one, **here)
    before = of(tmp_path / "out", "2026-03-02/**/*.json")
    assert len(before) == PARTS + 2  # receipts, claim, manifest

    range_ = ("--from", "2026-03-01", "--to", "2026-03-04T23:59")
    code, lines, err = ended(start(*range_, "--dry-run", *job))
    assert (code, err) == (0, "")
    assert [line.split("  ")[1] for line in lines[:-1]] == [
        *("to do", "was complete", "no dataset", "to do")
    ]
    assert lines[-1] == "4 runs: no dataset 1, was complete 1, to do 2"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["2026-03-02"]

    code, lines, err = ended(start(*range_, *job))
    assert (code, err) == (1, "")
    rows = table(lines)
    assert [row[:3] for row in rows] == [
        ["2026-03-03", "no dataset", "-"],
        ["2026-03-01", "done", str(RECORDS)],
        ["2026-03-04", "done", str(RECORDS)],
        ["2026-03-02", "was complete", str(RECORDS)],
    ]
    assert rows[0][4].startswith(f"there is no dataset at {lab}/captures-2026-03-03.sds")
    assert lines[-1] == "4 runs: no dataset 1, done 2, was complete 1"
    assert of(tmp_path / "out", "2026-03-02/**/*.json") == before
    for day in ("01", "02", "04"):
        out = tmp_path / "out" / f"2026-03-{day}"
        assert verify(str(out)).ok
        for document in ("_spec.json", "_manifest.json"):
            found = json.loads((out / document).read_bytes())
            assert found["spec"]["dataset"] == f"{lab}/captures-2026-03-{day}.sds"
            assert found["spec"]["output"] == f"out/2026-03-{day}"

    after = of(tmp_path / "out", "**/*.json")
    processes = set(seen.iterdir())
    code, lines, err = ended(start(*range_, "--skip-missing", *job))
    assert (code, err) == (0, "")
    assert lines[-1] == "4 runs: no dataset 1, was complete 3"
    assert of(tmp_path / "out", "**/*.json") == after
    assert set(seen.iterdir()) == processes


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL", "SIGTERM"])
def test_stopped_in_the_middle_it_leaves_no_process_and_does_nothing_twice(
    start: Callable[..., Any], job: list[str], tmp_path: Path, seen: Path, name: str
) -> None:
    range_ = ("--from", "2026-03-01", "--to", "2026-03-02", "--parallel", 2)
    out = tmp_path / "out"
    process = start(*range_, *job, TEST_PAUSE_S="0.5")
    # Both days have a part, and workers are at the next ones.
    wait_until(lambda: all(of(out, f"2026-03-0{n}/_receipts/*.json") for n in (1, 2)))
    below = children_of(process.pid)
    assert len(below) >= 4  # two commands and their workers
    process.send_signal(signal.Signals[name])
    asked = time.monotonic()
    wait_until(lambda: not any(map(alive, below)), 10)
    assert time.monotonic() - asked < 5
    code, lines, err = ended(process)
    if name == "SIGKILL":
        assert (code, lines, err) == (-signal.SIGKILL, [], "")
    else:
        assert (code, err) == (1, "")
        assert [row[:2] for row in table(lines)] == [
            ["2026-03-01", "stopped"],
            ["2026-03-02", "stopped"],
        ]
    before = of(out, "*/_receipts/*.json")
    assert 2 <= len(before) < 2 * PARTS
    for path in seen.iterdir():
        path.unlink()

    code, lines, err = ended(start(*range_, *job))
    assert (code, err) == (0, "")
    assert lines[-1] == "2 runs: done 2"
    assert before.items() <= of(out, "*/_receipts/*.json").items()
    computed = [line for path in seen.iterdir() for line in path.read_text().split()]
    assert len(computed) == 2 * PARTS - len(before)


def test_failures_come_first_and_a_model_has_steps(
    start: Callable[..., Any], lab: Path, tmp_path: Path
) -> None:
    fields = {
        "dataset": f"{lab}/captures-{{scheduled:%Y-%m-%d}}.sds",
        "output": "models/{scheduled:%d}",
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        **{"target": "label", "trainer": "sklearn", "steps": 4, "batch_size": 8},
    }
    (tmp_path / "train.yaml").write_text(json.dumps(fields))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "02").write_text("in the way")
    code, lines, err = ended(
        start("--from", "2026-03-01", "--to", "2026-03-02", "train", "--spec", "train.yaml")
    )
    assert (code, err) == (1, "")
    assert lines[0].split() == ["date", "result", "steps", "seconds"]
    assert re.match(r"2026-03-02  failed +- +\d+\.\d  .*models/02/_spec.json cannot be", lines[1])
    assert re.match(r"2026-03-01  done +4 +\d+\.\d$", lines[2])
    assert lines[3] == "2 runs: failed 1, done 1"


def test_moments_include_both_ends() -> None:
    first = datetime(2024, 2, 28, tzinfo=UTC)
    found = moments(first, datetime(2024, 3, 1, tzinfo=UTC), timedelta(days=1))
    assert [at.day for at in found] == [28, 29, 1]
    assert moments(first, first, timedelta(weeks=1)) == [first]
    assert len(moments(first, first + timedelta(hours=5), timedelta(minutes=90))) == 4
    with pytest.raises(SpecError, match="is before --from"):
        moments(first, first - timedelta(minutes=1), timedelta(days=1))
    with pytest.raises(SpecError, match="more than 10,000"):
        moments(first, first + timedelta(days=10_000), timedelta(days=1))


def test_two_moments_with_one_output_are_refused() -> None:
    spec = checked(
        ExportSpec,
        {
            "dataset": "a-{scheduled:%Y-%m-%d}",
            "output": "out/{scheduled:%Y-%m}",
            "columns": ["field:samples"],
        },
    )
    march = [parse_moment(f"2026-03-{day:02d}") for day in (1, 2)]
    with pytest.raises(SpecError, match="both write to out/2026-03; give output a template"):
        plan_runs(spec, march)
    assert len(plan_runs(spec, [parse_moment(f"2026-{month:02d}-01") for month in (1, 2)])) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--from": "yesterday"}, "'yesterday' is no date or time"),
        ({"--to": "2026-02-01"}, "is before --from"),
        ({"--every": "1y"}, "'1y' is no step of time"),
        ({"--parallel": "0"}, "--parallel is 0; it takes 1 to 256"),
        ({"OUT": "out"}, "output does not"),
        ({"DATASET": "a.sds", "OUT": "out"}, "nothing in dataset or output depends on the date"),
        ({"OUT": "out/{scheduled:%Y}"}, "both write to out/2026"),
        ({"--column": "samples"}, "selector 'samples' starts with"),
        ({"JOB": ["--scheduled", "2026-03-01"]}, "--scheduled is no option of a job"),
        ({"JOB": ["--dry-run"]}, "--dry-run is no option of a job that is backfilled; give it"),
        ({"JOB": ["--write-pin", "pin.json"]}, "--write-pin is no option of a job"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        **{"--from": "2026-03-01", "--to": "2026-03-02", "--every": "1d", "--parallel": "1"},
        **{"DATASET": "a-{scheduled:%d}", "OUT": "out/{scheduled:%d}", "--column": "field:samples"},
        "JOB": [],
    } | changes
    own = [item for name in list(given)[:4] for item in (name, given[name])]
    job = ["export", given["DATASET"], given["OUT"], "--column", given["--column"], *given["JOB"]]
    assert main(["backfill", *own, *job]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"signal-batch: .*\n", shown.err)
    assert words in shown.err
    assert list(tmp_path.iterdir()) == []


def test_one_run_by_hand(
    capsys: pytest.CaptureFixture[str], lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = (f"{lab}/captures-{{scheduled-1d:%Y-%m-%d}}.sds", "out-{scheduled:%Y-%m-%d}")
    job = ["export", *places, "--column", "field:samples", "--dry-run"]
    assert main(job) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"signal-batch: dataset .* depends on the scheduled time .*\n", err)
    assert "give --scheduled TIME" in err
    assert main([*job, "--scheduled", "2026-03-06T04:00"]) == 0
    assert f"{lab}/captures-2026-03-05.sds" in capsys.readouterr().out
    assert main([*job, "--scheduled", "soon"]) == 2
    assert "'soon' is no date or time" in capsys.readouterr().err
