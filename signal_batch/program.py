"""What every worker program is: a process that reads one order and reports in events.

An order comes as JSON on stdin, events leave as JSON lines on stdout, the last of them `done` or
`error`. The process ends when the process that started it does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from signal_batch.errors import SignalBatchError, WorkerDiedError, error_event

Emit = Callable[[dict[str, Any]], None]
Work = Callable[[dict[str, Any], Emit], None]

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_S = 1.0


def serve(work: Work) -> int:
    """Be the program: do `work(order, emit)` for the order on stdin; the exit code is 0 or 1."""
    sys.path.append(str(Path.cwd()))  # functions of one's own, after everything installed
    end_with_parent(int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and kills if need be
    emit = _emitter(_take_stdout())
    try:
        work(json.loads(sys.stdin.buffer.read()), emit)
        emit({"event": "done"})
    except SignalBatchError as exc:
        emit(error_event(exc))
        return 1
    except MemoryError as exc:  # as if the system had killed it: there may be more another time
        emit(error_event(WorkerDiedError(f"a worker ran out of memory: {exc}")))
        return 1
    except Exception as exc:
        traceback.print_exc()
        emit(error_event(SignalBatchError(f"{type(exc).__name__}: {exc}")))
        return 1
    return 0


def end_with_parent(parent: int) -> None:
    """End this process and all it started when its parent ends, so that no orphan goes on.

    The parent says its own id: it may have ended while this process was still importing. For a
    process that leads its process group; what a feature function starts belongs to that group.
    """
    signal.signal(signal.SIGTERM, _end_group)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # On Linux this closes the gap before prctl, and helps where the main thread is busy;
    # elsewhere it is what does the work.
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    _end_group()


def _end_group(*_: object) -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _take_stdout() -> IO[str]:
    """Keep the real stdout for events; whatever else prints goes to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _emitter(stream: IO[str]) -> Emit:
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        with lock:
            stream.write(json.dumps(event) + "\n")
            stream.flush()

    return emit
