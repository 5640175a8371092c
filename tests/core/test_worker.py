"""The range worker: what it says on stdout, what it skips, and that it ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import signal_dataset as sds

from signal_batch.errors import (
    CorruptDatasetError,
    PinMismatchError,
    SignalBatchError,
    StoppedError,
    WorkerDiedError,
)
from signal_batch.export import WorkOrder
from signal_batch.frozen import checked
from signal_batch.job import ExportJob, claim, progress_of
from signal_batch.planning import prepare
from signal_batch.processes import run_worker, stop_workers, worker_pids
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore
from signal_batch.worker import work


def planned(dataset: Path, output: Path, **fields: Any) -> ExportJob:
    defaults = {"columns": ["field:samples"], "batch_size": 8, "part_bytes": "32KB"}
    locations = {"dataset": str(dataset), "output": str(output)}
    return claim(prepare(checked(ExportSpec, defaults | locations | fields)))


def order_of(job: ExportJob) -> WorkOrder:
    """All parts in one order."""
    shards = progress_of(job).shards
    parts = tuple(part for shard in shards for part in shard.parts)
    return job.order(replace(shards[0], parts=parts))


@pytest.fixture
def order(iq_root: Path, tmp_path: Path) -> WorkOrder:
    return order_of(planned(iq_root, tmp_path / "out"))


def run(
    payload: bytes, cwd: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "signal_batch.worker", *arguments],
        input=payload,
        capture_output=True,
        cwd=cwd,
        env=os.environ | environment,
        timeout=60,
    )


def test_an_order_survives_json(order: WorkOrder) -> None:
    back = WorkOrder.from_json(json.loads(json.dumps(order.to_json())))
    assert back == order
    assert back.schema.equals(order.schema, check_metadata=True)


def test_events_of_a_whole_order(order: WorkOrder) -> None:
    events: list[dict[str, Any]] = []
    work(order, events.append)
    assert sum(event["rows"] for event in events if event["event"] == "progress") == 200
    receipts = [event["receipt"] for event in events if event["event"] == "receipt"]
    assert [receipt["part"] for receipt in receipts] == list(range(len(order.parts)))
    stored = OutputStore(order.spec.output).receipts()
    assert receipts == [stored[index].to_dict() for index in sorted(stored)]
    assert json.loads(json.dumps(events)) == events


def test_parts_with_a_receipt_are_only_reported(order: WorkOrder) -> None:
    seen: list[dict[str, Any]] = []
    work(replace(order, parts=order.parts[:3], runs=order.runs[:3]), seen.append)
    data = Path(order.spec.output) / "data"
    before = {path.name: path.stat().st_ino for path in data.iterdir()}
    events: list[dict[str, Any]] = []
    work(order, events.append)
    receipts = [event["receipt"] for event in events if event["event"] == "receipt"]
    assert len(receipts) == len(order.parts)
    assert receipts[:3] == [event["receipt"] for event in seen if event["event"] == "receipt"]
    assert sum(event["rows"] for event in events if event["event"] == "progress") == 200
    assert {name: (data / name).stat().st_ino for name in before} == before


def test_the_pin_is_proved_before_anything_is_read(order: WorkOrder) -> None:
    pin = order.pin.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(PinMismatchError, match="fingerprint"):
        work(replace(order, pin=pin), lambda event: None)
    assert not (Path(order.spec.output) / "data").exists()


def test_events_are_all_there_is_on_stdout(order: WorkOrder, tmp_path: Path) -> None:
    few = replace(order, parts=order.parts[:2], runs=order.runs[:2])
    ended = run(json.dumps(few.to_json()).encode(), tmp_path)
    assert ended.returncode == 0, ended.stderr
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {event["event"] for event in events} == {"progress", "receipt", "done"}
    assert sum(event["event"] == "receipt" for event in events) == 2


@pytest.mark.parametrize("payload", [b"", b'{"spec": 3, "parts": []}'])
def test_an_order_it_cannot_read_is_an_error_event(payload: bytes, tmp_path: Path) -> None:
    ended = run(payload, tmp_path)
    assert ended.returncode == 1
    (event,) = [json.loads(line) for line in ended.stdout.splitlines()]
    assert (event["event"], event["kind"]) == ("error", SignalBatchError.__name__)
    assert event["message"]
    assert "\n" not in event["message"]


def test_an_error_arrives_as_the_same_class(order: WorkOrder) -> None:
    """The dataset's samples are gone; the worker's error crosses the process boundary."""
    gone = order.pin.model_copy(update={"uri": "/nowhere"})
    with pytest.raises(PinMismatchError, match="/nowhere") as caught:
        run_worker(replace(order, pin=gone), lambda rows: None, run_id="class")
    assert caught.value.transient is False
    assert worker_pids("class") == []


def test_a_damaged_record_arrives_with_its_ordinal(vowels_copy: Path, tmp_path: Path) -> None:
    job = planned(vowels_copy, tmp_path / "out", features="statistics")
    dataset = sds.open(str(vowels_copy))
    entry, _ = dataset._index.locate(5)
    path = vowels_copy / entry.data.path
    data = bytearray(path.read_bytes())
    data[data.index(dataset[5]["samples"].data.tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDatasetError) as caught:
        run_worker(order_of(job), lambda rows: None, run_id="ordinal")
    assert caught.value.ordinal == 5


# --- ends ----------------------------------------------------------------------------------

SLOW = """
    import os, sys, time
    from pathlib import Path
    import numpy as np

    def slow(batch, *, pause_s=0.2):
        if Path(sys.argv[0]).name == "worker.py":
            with open(os.environ["PIDS"], "a") as log:
                log.write(f"{os.getpid()}\\n")
            time.sleep(pause_s)
        return {"one": np.ones(len(batch["ordinal"]))}

    def quits(batch):
        if Path(sys.argv[0]).name == "worker.py":
            print("the last words", file=sys.stderr, flush=True)
            os._exit(7)
        return {"one": np.ones(len(batch["ordinal"]))}

    def says_nothing_more(batch):
        if Path(sys.argv[0]).name == "worker.py":
            os._exit(0)
        return {"one": np.ones(len(batch["ordinal"]))}
"""


@pytest.fixture
def slow_order(
    iq_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> WorkOrder:
    """An order whose feature takes its time, or whatever function a test names."""
    name = f"slow_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SLOW))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    function = getattr(request, "param", "slow")
    return order_of(
        planned(iq_root, tmp_path / "out", features=f"{name}:{function}", part_bytes=200)
    )


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


PARENT = """
    import os, signal, subprocess, sys, time
    child = subprocess.Popen(
        [sys.executable, "-m", "signal_batch.worker", str(os.getpid())],
        stdin=open(sys.argv[1], "rb"),
        stdout=open("events", "wb"),
        start_new_session=True,
    )
    print(child.pid, flush=True)
    while sys.argv[2] == "late" and not os.path.exists(os.environ["PIDS"]):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("when", ["early", "late"])
def test_it_ends_with_its_parent(slow_order: WorkOrder, tmp_path: Path, when: str) -> None:
    """Also a parent that was killed while the worker was still importing."""
    (tmp_path / "order.json").write_text(json.dumps(slow_order.to_json()))
    script = textwrap.dedent(PARENT)
    parent = subprocess.run(
        [sys.executable, "-c", script, "order.json", when], capture_output=True, timeout=60
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid = int(parent.stdout)
    assert gone_within(pid, 5), "the worker outlived its parent"
    if when == "early":
        assert not (tmp_path / "pids").exists(), "it began to work as an orphan"


def test_stopping_a_run_kills_its_workers_and_lets_none_start(
    slow_order: WorkOrder, tmp_path: Path
) -> None:
    found: list[int] = []

    def stop() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pids").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        found.extend(worker_pids("stopping"))
        stop_workers("stopping")

    stopper = threading.Thread(target=stop)
    stopper.start()
    counted: list[int] = []
    with pytest.raises(StoppedError):
        run_worker(slow_order, counted.append, run_id="stopping")
    stopper.join()
    assert len(found) == 1
    assert not alive(found[0])
    assert sum(counted) == 0, "what it reported is taken back"
    started = time.monotonic()
    with pytest.raises(StoppedError):
        run_worker(slow_order, counted.append, run_id="stopping")
    assert time.monotonic() - started < 1
    assert worker_pids("stopping") == []


@pytest.mark.parametrize(
    ("slow_order", "words"),
    [
        ("quits", r"for ordinals 0-199 ended with exit code 7; it last said: .*the last words"),
        ("says_nothing_more", "ended with exit code 0"),
    ],
    indirect=["slow_order"],
)
def test_a_worker_that_just_ends_has_died(slow_order: WorkOrder, words: str) -> None:
    with pytest.raises(WorkerDiedError, match=words) as caught:
        run_worker(slow_order, lambda rows: None, run_id="dying")
    assert caught.value.transient


def test_an_exception_of_the_caller_ends_the_worker(slow_order: WorkOrder) -> None:
    pids: list[int] = []

    def fail(rows: int) -> None:
        pids.extend(worker_pids("caller"))
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        run_worker(slow_order, fail, run_id="caller")
    assert len(pids) == 1
    assert not alive(pids[0])
    assert worker_pids("caller") == []


def test_ctrl_c_at_the_terminal_is_left_to_the_parent(
    slow_order: WorkOrder, tmp_path: Path
) -> None:
    few = replace(slow_order, parts=slow_order.parts[:1], runs=slow_order.runs[:1])
    worker = subprocess.Popen(
        [sys.executable, "-m", "signal_batch.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(few.to_json()).encode())
    worker.stdin.close()
    while not (tmp_path / "pids").exists() and worker.poll() is None:
        time.sleep(0.02)
    worker.send_signal(signal.SIGINT)
    assert worker.stdout is not None
    lines = worker.stdout.read().splitlines()
    worker.stdout.close()
    assert worker.wait(30) == 0
    assert [json.loads(line)["event"] for line in lines[-2:]] == ["receipt", "done"]
