"""Running a contender in processes of its own and taking its time.

A child writes `ready` on stdout when it has warmed up, begins when it reads a line on stdin, and
ends with its result as one JSON line.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from signal_batch.processes import worker_environment

PROJECT = Path(__file__).resolve().parent.parent
#: A contender that is not done by then is ended, and the run with it.
_TIMEOUT_S = 900.0
_GRACE_S = 10.0
#: Beside that of a worker process (threads, allocator), which every contender is given.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement; `rows` were handled in `seconds`, the whole command took `whole_s`.

    `cpu_s` is what all threads of the processes used in that time, 0 where it is not known.
    """

    rows: int
    seconds: float
    cpu_s: float
    whole_s: float
    peak_bytes: int
    whole_rows: int

    @property
    def rate(self) -> float:
        return self.rows / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ChildFailedError(RuntimeError):
    """A contender ended with an error; the message holds the end of what it said."""


class Clock:
    """The child's side: `start` when warmed up, `stop` when done."""

    def __init__(self, events: IO[str]) -> None:
        self._events = events
        self._start = self._stop = self._cpu = 0.0

    def start(self) -> None:
        """Report ready, wait for the others, start the clock."""
        print("ready", file=self._events, flush=True)
        sys.stdin.readline()
        self._start = time.monotonic()
        self._cpu = -time.process_time()

    def stop(self) -> None:
        self._cpu += time.process_time()
        self._stop = time.monotonic()

    def report(self, **result: Any) -> None:
        times = {"start": self._start, "stop": self._stop, "cpu_s": self._cpu}
        print(json.dumps(times | result), file=self._events, flush=True)


def run(tasks: Sequence[dict[str, Any]]) -> Sample:
    """Run one child for each task, started together, and take their time as one contender's."""
    began = time.monotonic()
    with ExitStack() as stack:
        children = [_Child(stack, task) for task in tasks]
        for child in children:
            child.expect("ready")
        for child in children:
            child.go()
        results = [child.result() for child in children]
    whole = time.monotonic() - began
    start = min(result["start"] for result in results)
    return Sample(
        rows=sum(result["rows"] for result in results),
        seconds=max(result["stop"] for result in results) - start,
        cpu_s=sum(result["cpu_s"] for result in results),
        whole_s=whole,
        peak_bytes=max(result["peak_bytes"] for result in results),
        whole_rows=sum(result.get("whole_rows", result["rows"]) for result in results),
    )


def ask(task: dict[str, Any]) -> dict[str, Any]:
    """Run one child that needs no clock and return its result."""
    with ExitStack() as stack:
        return _Child(stack, task).result()


def command(arguments: Sequence[str]) -> float:
    """Seconds that `python ARGUMENTS` takes from start to end."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        check=False,
    )
    whole = time.monotonic() - began
    if done.returncode:
        shown = done.stdout.decode(errors="replace")[-2000:]
        raise ChildFailedError(f"python {' '.join(arguments)} failed: {shown}")
    return whole


def peak_bytes() -> int:
    """Largest resident set of this process so far.

    `ru_maxrss` starts at what the parent held when it forked, so on Linux the kernel's own
    high-water mark of this program is read instead.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Child:
    def __init__(self, stack: ExitStack, task: dict[str, Any]) -> None:
        self._name = f"{task.get('kind')} {task.get('name', '')}".strip()
        self._log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack closes it)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
            cwd=PROJECT,
        )
        # SIGTERM lets a framework end the processes it started.
        watchdog = threading.Timer(_TIMEOUT_S, self._process.terminate)
        watchdog.daemon = True
        watchdog.start()
        stack.callback(self._end)
        stack.callback(watchdog.cancel)

    def expect(self, word: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != word.encode():
            self._fail()

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if self._process.wait() or not line:
            self._fail()
        result: dict[str, Any] = json.loads(line)
        return result

    def _fail(self) -> None:
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-3000:].strip()
        raise ChildFailedError(f"{self._name} ended with exit code {code}: {said}")

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    return worker_environment() | _ENVIRONMENT
