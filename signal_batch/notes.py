"""Notes that a run leaves in its output for people: who works on what, and what failed last.

::

    OUT/_attempts/HOST-PID.json   by a worker, as it begins a part or a step of training
    OUT/_errors/part-00017.json   by the parent of a worker that failed there, or `train.json`

Nothing is ever decided from them about what is written, so no failure to write one is an error,
and they are removed when the output is complete. They hold no secrets: see `presentable`.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from signal_batch.errors import DamagedOutputError, SignalBatchError, StoppedError
from signal_batch.plan import Part
from signal_batch.store import ATTEMPTS, ERRORS, ORDERS, OutputStore
from signal_batch.uris import redact

N = TypeVar("N", "Attempt", "Failure")

#: No more of either are read, the newest first.
MOST_READ = 500
#: How long a failure waits for storage to take its note.
_PATIENCE_S = 5.0
_LONGEST_MESSAGE = 2000
_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "str | None": (str, NoneType),
    "int | None": (int, NoneType),
}
_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|_KEY|_SAS|CONNECTION_STRING|AUTH")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A worker process and what it began last.

    `machine` tells apart what shares a host name, `born` what shares a process id; `began` is
    when the worker took up its order, `started` when it took up this piece of it.
    """

    run_key: str
    run_id: str | None
    doing: str
    part: int | None
    first_ordinal: int | None
    last_ordinal: int | None
    host: str
    machine: str
    pid: int
    born: str
    began: str
    started: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of an attempt at a part, or at a piece of training.

    `count` is how often in a row it failed there in the same way, since `first_at`; `ordinal` the
    record concerned, where one is known; host, machine and process are those of the parent.
    """

    run_key: str
    run_id: str | None
    doing: str
    part: int | None
    first_ordinal: int | None
    last_ordinal: int | None
    kind: str
    message: str
    ordinal: int | None
    transient: bool
    host: str
    machine: str
    pid: int
    born: str
    first_at: str
    at: str
    count: int = 1

    @property
    def place(self) -> str:
        return self.doing if self.part is None else f"part-{self.part:05d}"


@dataclass(frozen=True, slots=True)
class Notes:
    """What could be read of them, and what is wrong with the others."""

    attempts: tuple[Attempt, ...]
    failures: tuple[Failure, ...]
    faults: tuple[str, ...]


class Attendance:
    """Says what this worker process works on."""

    def __init__(self, output: str, run_key: str, run_id: str | None) -> None:
        self._store = OutputStore(output)
        self._fixed = {"run_key": run_key, "run_id": run_id, "began": now(), **_here()}

    def begin(self, doing: str, part: Part | None = None) -> None:
        """Note that a piece of work begins; one small write."""
        attempt = Attempt(doing=doing, started=now(), **_of_part(part), **self._fixed)
        name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', attempt.host)}-{attempt.pid}.json"
        with suppress(SignalBatchError):
            self._store.put_note(f"{ATTEMPTS}/{name}", asdict(attempt))


def note_failure(
    output: str,
    exc: SignalBatchError,
    *,
    run_key: str,
    run_id: str,
    doing: str,
    part: Part | None = None,
) -> None:
    """Note what failed where; gives up after a few seconds, and never raises.

    That a run was stopped is no failure.
    """
    if isinstance(exc, StoppedError):
        return
    moment = now()
    failure = Failure(
        run_key=run_key,
        run_id=run_id,
        doing=doing,
        kind=type(exc).__name__,
        message=presentable(str(exc)),
        ordinal=getattr(exc, "ordinal", None),
        transient=exc.transient,
        first_at=moment,
        at=moment,
        **_of_part(part),
        **_here(),
    )
    _within(_PATIENCE_S, lambda: _put_failure(OutputStore(output), failure))


def read_notes(store: OutputStore, run_key: str) -> Notes:
    """The notes of one run key; those of another are of a folder that was removed meanwhile."""
    faults: list[str] = []
    attempts = _read_folder(store, ATTEMPTS, Attempt, faults)
    failures = _read_folder(store, ERRORS, Failure, faults)
    return Notes(
        attempts=tuple(item for item in attempts if item.run_key == run_key),
        failures=tuple(item for item in failures if item.run_key == run_key),
        faults=tuple(faults),
    )


def remove_notes(store: OutputStore) -> None:
    """Remove all notes of an output that is complete; leftovers are harmless."""
    for folder in (ATTEMPTS, ERRORS, ORDERS):
        with suppress(SignalBatchError):
            store.remove_notes(folder)


def process_lives(note: Attempt | Failure) -> bool | None:
    """Whether the process of a note is alive; None where it is of another machine."""
    if (note.host, note.machine) != (socket.gethostname(), _machine()):
        return None
    try:
        os.kill(note.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to someone else
        pass
    return _born(note.pid) == note.born


def presentable(message: str) -> str:
    """A message on one line, printable, without credentials in URIs and values of secrets."""
    for name, value in list(os.environ.items()):
        if len(value) >= 8 and _SECRET_NAMES.search(name.upper()):
            message = message.replace(value, "***")
    message = _URI.sub(lambda found: redact(found[0]), message)
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]} ..."


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def seconds_of(moment: str) -> float:
    """A time of a note in seconds since 1970."""
    return datetime.fromisoformat(moment).timestamp()


def _put_failure(store: OutputStore, failure: Failure) -> None:
    if store.read_manifest() is not None:  # another run completed it meanwhile
        return
    path = f"{ERRORS}/{failure.place}.json"
    with suppress(DamagedOutputError):
        if (standing := store.read_document(path)) is not None:
            before = _note_of(Failure, standing, path)
            if (before.run_key, before.kind) == (failure.run_key, failure.kind):
                failure = replace(failure, count=before.count + 1, first_at=before.first_at)
    store.put_note(path, asdict(failure))


def _within(seconds: float, action: Callable[[], None]) -> None:
    def act() -> None:
        with suppress(Exception):  # the failure itself is what people must see
            action()

    thread = threading.Thread(target=act, name="note", daemon=True)
    thread.start()
    thread.join(seconds)


def _read_folder(store: OutputStore, folder: str, kind: type[N], faults: list[str]) -> list[N]:
    times = {n: at or 0.0 for n, at in store.times(folder).items() if n.endswith(".json")}
    paths = [f"{folder}/{name}" for name in sorted(times, key=times.__getitem__)[-MOST_READ:]]
    notes = []
    for path, document in zip(paths, store.read_documents(paths), strict=True):
        try:
            if isinstance(document, DamagedOutputError):
                raise document
            if document is not None:
                notes.append(_note_of(kind, document, f"{store.uri}/{path}"))
        except DamagedOutputError as exc:
            faults.append(presentable(str(exc)))
    return notes


def _note_of(kind: type[N], document: Mapping[str, Any], where: str) -> N:
    values: dict[str, Any] = {item.name: document.get(item.name) for item in fields(kind)}
    try:
        for item in fields(kind):
            if not isinstance(values[item.name], _TYPES[str(item.type)]):
                raise ValueError(f"{item.name} is {values[item.name]!r}")
        for name in ("began", "started", "first_at", "at"):
            if name in values:
                seconds_of(values[name])
    except (ValueError, OverflowError) as exc:
        raise DamagedOutputError(f"{where} is damaged: {exc}") from exc
    return kind(**values)


def _of_part(part: Part | None) -> dict[str, Any]:
    if part is None:
        return {"part": None, "first_ordinal": None, "last_ordinal": None}
    return {
        "part": part.index,
        "first_ordinal": part.first_ordinal,
        "last_ordinal": part.last_ordinal,
    }


def _here() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "born": _born(pid)}


def _machine() -> str:
    """This boot of this machine, and on Linux the namespace that its process ids are of."""
    found = ""
    with suppress(OSError):
        found = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found += str(Path("/proc/self/ns/pid").readlink())
    return found


def _born(pid: int) -> str:
    """When a process was started, in ticks since boot; empty where the system does not say."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state[0] in "ZX" else state[19]
