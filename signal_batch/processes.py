"""The parent's side of worker processes: start one, follow its events, stop all of a run.

A killed, crashed or silent child becomes `WorkerDiedError`, which is worth another attempt; what
the worker itself reports is raised again as the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import IO, Any, TypeVar

from signal_batch._grain import PLAIN_GRAIN
from signal_batch.errors import SignalBatchError, StoppedError, WorkerDiedError, rebuilt_error
from signal_batch.execution import Execution
from signal_batch.export import WorkOrder
from signal_batch.notes import note_failure
from signal_batch.plan import Part
from signal_batch.store import Receipt
from signal_batch.training_spec import TrainExecution

T = TypeVar("T")

OnProgress = Callable[[int], None]
#: One thread each: workers are processes, and results must not depend on how many there are.
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
#: glibc gives every batch back to the system and takes it anew, page by page, unless told not to.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass(frozen=True, slots=True)
class Program:
    """A worker program to run: its module, the order it is given, and how people know it.

    One that says nothing for `timeout_s` seconds is killed.
    """

    module: str
    order: Mapping[str, Any]
    label: str
    timeout_s: float


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[bytes]
    last_event: float = field(default_factory=time.monotonic)
    silent: bool = False
    done: bool = False


_lock = threading.Lock()
_running: dict[str, list[subprocess.Popen[bytes]]] = {}
_stopped: set[str] = set()


def worker_environment() -> dict[str, str]:
    """The environment of a worker process; what is set already stays."""
    return {PLAIN_GRAIN: "1", **_THREADS, **_ALLOCATOR, **os.environ}


def run_worker(
    order: WorkOrder,
    on_progress: OnProgress,
    *,
    run_id: str,
    abort: threading.Event | None = None,
) -> list[Receipt]:
    """Run one export worker to its end and return the receipts of all parts of the order.

    What an attempt that fails has reported is taken back with `on_progress(-rows)`: the next
    attempt counts it again. Raises what `run_program` raises.
    """
    first, last = order.parts[0], order.parts[-1]
    program = Program(
        module="signal_batch.worker",
        order=order.to_json() | {"run_id": run_id},
        label=f"the worker for ordinals {first.first_ordinal}-{last.last_ordinal}",
        timeout_s=order.spec.execution.timeout_s,
    )
    receipts: list[Receipt] = []
    reported = 0

    def on_event(event: dict[str, Any]) -> None:
        nonlocal reported
        if event["event"] == "progress":
            reported += event["rows"]
            on_progress(event["rows"])
        elif event["event"] == "receipt":
            receipts.append(Receipt.from_dict(event["receipt"]))

    try:
        run_program(program, on_event, run_id=run_id, abort=abort)
    except SignalBatchError as exc:
        on_progress(-reported)
        _note(exc, order, order.parts[min(len(receipts), len(order.parts) - 1)], run_id)
        raise
    return receipts


def _note(exc: SignalBatchError, order: WorkOrder, part: Part, run_id: str) -> None:
    output, run_key = order.spec.output, order.run_key
    note_failure(output, exc, run_key=run_key, run_id=run_id, doing="export", part=part)


def run_program(
    program: Program,
    on_event: Callable[[dict[str, Any]], None],
    *,
    run_id: str,
    abort: threading.Event | None = None,
) -> None:
    """Run one worker process to its end, handing on its events; errors are raised instead.

    `run_id` groups the processes of a run for `stop_workers`; `abort` stops this one alone.

    Raises:
        WorkerDiedError: the process was killed, crashed, or was silent for too long.
        StoppedError: the run was stopped.
        SignalBatchError: what the worker itself reported.
    """
    with tempfile.TemporaryFile() as log:
        child = _start(program, run_id, log)
        abort = abort or threading.Event()
        watchdog = threading.Thread(target=_watch, args=(child, abort), daemon=True)
        watchdog.start()
        try:
            _send(child)
            error = _listen(child, on_event)
            code = child.process.wait()
            done = child.done and code == 0
        finally:
            _kill(child.process)
            watchdog.join()
            _forget(run_id, child)
        if done:
            return
        if run_id in _stopped or (abort.is_set() and code < 0):
            raise StoppedError("the run was stopped")
        raise error or WorkerDiedError(_cause_of_death(child, code, _tail(log)))


def retried(
    run: Callable[[], T],
    execution: Execution | TrainExecution,
    pause: Callable[[SignalBatchError, float], object],
) -> T:
    """Run, and again after a failure that may pass, `execution.retries` times at most.

    `pause(failure, seconds)` is called before each further attempt and is to wait; the seconds
    double, with jitter.
    """
    for attempt in count():
        try:
            return run()
        except SignalBatchError as exc:
            if not exc.transient or attempt >= execution.retries:
                raise
            pause(exc, execution.retry_delay_s * 2**attempt * random.uniform(1.0, 1.5))
    raise AssertionError("attempts do not end by themselves")


def stop_workers(run_id: str) -> None:
    """Kill the worker processes of a run, and let no new one of that run start."""
    with _lock:
        _stopped.add(run_id)
        processes = list(_running.get(run_id, ()))
    for process in processes:
        _kill(process)


def worker_pids(run_id: str) -> list[int]:
    """Process ids of the workers of a run that are alive."""
    with _lock:
        return sorted(process.pid for process in _running.get(run_id, ()))


def _start(program: Program, run_id: str, log: IO[bytes]) -> _Child:
    with _lock:
        if run_id in _stopped:
            raise StoppedError("the run was stopped")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", program.module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops us
        )
        _running.setdefault(run_id, []).append(process)
    return _Child(program, process)


def _send(child: _Child) -> None:
    assert child.process.stdin is not None
    # A child that is already dead shows below, by its exit code.
    with contextlib.suppress(BrokenPipeError):
        child.process.stdin.write(json.dumps(child.program.order).encode())
    with contextlib.suppress(BrokenPipeError):
        child.process.stdin.close()


def _listen(child: _Child, on_event: Callable[[dict[str, Any]], None]) -> SignalBatchError | None:
    error: SignalBatchError | None = None
    assert child.process.stdout is not None
    for line in child.process.stdout:
        child.last_event = time.monotonic()
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line of a process killed while it wrote
        if event["event"] == "done":
            child.done = True
        elif event["event"] == "error":
            error = rebuilt_error(event)
        else:
            on_event(event)
    return error


def _watch(child: _Child, abort: threading.Event) -> None:
    """Kill a silent or unwanted worker; when it has ended, end what it left running.

    What a function of one's own forked holds the worker's pipe open, which would never come to
    its end.
    """
    timeout_s = child.program.timeout_s
    while child.process.poll() is None:
        if time.monotonic() - child.last_event > timeout_s and not child.silent:
            child.silent = True
            _kill(child.process)
        if abort.is_set():
            _kill(child.process)
        time.sleep(min(0.1, timeout_s / 4))
    _kill_group(child.process.pid)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and whatever its feature function started: a worker leads its group."""
    if process.poll() is None:
        _kill_group(process.pid)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _forget(run_id: str, child: _Child) -> None:
    child.process.wait()
    if child.process.stdout is not None:
        child.process.stdout.close()
    with _lock:
        _running[run_id].remove(child.process)
        if not _running[run_id]:
            del _running[run_id]


def _cause_of_death(child: _Child, code: int, log: str) -> str:
    program = child.program
    if child.silent:
        cause = f"said nothing for {program.timeout_s:g} s and was killed"
    elif code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        cause = f"was killed by {name}{hint}"
    else:
        cause = f"ended with exit code {code}"
    return f"{program.label} {cause}" + (f"; it last said: {log}" if log else "")


def _tail(log: IO[bytes], size: int = 2000) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - size))
    return log.read().decode(errors="replace").strip()
