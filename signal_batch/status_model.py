"""What a status says, whatever the output is of; how notes become what runs and what failed.

A status is read while others write, so it is a picture with a blurred edge: what is written in
the same moment may be in it or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from signal_batch.notes import Attempt, Failure, Notes, presentable, process_lives, seconds_of
from signal_batch.specs import SCHEMA_VERSION
from signal_batch.store import CLAIM
from signal_batch.uris import redact

#: `retrying` waits to try a failed part again, `waiting` is none of the others: nothing is known to
#: run, and nothing failed. `damaged` says that the output's own account cannot be read.
State = Literal["complete", "running", "retrying", "waiting", "stopped", "failed", "damaged"]
_FAILED = ("stopped", "failed", "damaged")
#: How much later than planned a further attempt may begin.
_SLACK_S = 30.0

AGAIN = "run the same command again; it goes on from there"
REMEDIES = {
    "CorruptDatasetError": "restore the dataset, or export to another folder with --on-error "
    "quarantine",
    "PinMismatchError": "restore the dataset as it was pinned, or write to another folder",
    "MissingValueError": "give the column a default or filter such records out, in another folder",
    "FeatureError": "correct the function and write to another folder: its source is part of the "
    "run key",
    "StorageError": f"see that storage answers, then {AGAIN}",
    "OutputError": f"see to space and permissions of the output, then {AGAIN}",
    "WorkerDiedError": f"see to memory and time on that host, then {AGAIN}",
}


@dataclass(frozen=True, slots=True)
class Job:
    """What is read and what is made of it, as the claim says; `method` is feature or trainer."""

    dataset: str
    dataset_id: str
    snapshot_id: str
    fingerprint: str
    annotations: tuple[str, ...]
    columns: tuple[str, ...]
    target: str | None
    where: tuple[str, ...]
    method: str
    run_key: str


@dataclass(frozen=True, slots=True)
class Count:
    """How many of a unit are done."""

    unit: str
    done: int
    of: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Consecutive parts without a receipt; their ordinals where the claim alone tells them."""

    first_part: int
    last_part: int
    records: int
    first_ordinal: int | None
    last_ordinal: int | None


@dataclass(frozen=True, slots=True)
class Running:
    """A worker at work, since when and for how many seconds."""

    doing: str
    part: int | None
    first_ordinal: int | None
    last_ordinal: int | None
    host: str
    pid: int
    run_id: str | None
    since: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """What went wrong where, how often in a row, and what to do.

    `outcome` is `open`, `again` while it is tried again, or `passed`.
    """

    kind: str
    message: str
    doing: str
    part: int | None
    first_ordinal: int | None
    last_ordinal: int | None
    ordinal: int | None
    host: str
    at: str
    count: int
    outcome: Literal["open", "again", "passed"]
    remedy: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Units a second; None where there is too little to tell.

    `overall` of an export is from its claim to its newest receipt, pauses included. That of a
    training run, and its `recent`, count time in steps alone.
    """

    unit: str
    recent: float | None = None
    overall: float | None = None

    def left_s(self, remaining: int) -> float | None:
        rate = self.recent or self.overall
        return remaining / rate if rate and remaining else None


@dataclass(frozen=True, slots=True)
class Status:
    """What an output folder says about the job that writes it; see `signal_batch.status`.

    `faults` are documents that could not be read; `set_aside` counts unreadable records in the
    `receipts_read` newest parts; `metrics` are the last row of each side.
    """

    uri: str
    kind: Literal["export", "training"]
    state: State
    advice: str
    job: Job
    counts: tuple[Count, ...]
    speed: Speed
    seconds_left: float | None = None
    missing: tuple[Missing, ...] = ()
    running: tuple[Running, ...] = ()
    problems: tuple[Problem, ...] = ()
    faults: tuple[str, ...] = ()
    set_aside: int = 0
    receipts_read: int = 0
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    completed: str | None = None

    @property
    def exit_code(self) -> int:
        """0 if complete or under way, 1 if the last attempt failed and nothing runs."""
        return int(self.state in _FAILED)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a run may be silent, in seconds, and how it tries again."""

    timeout_s: float
    retries: int
    retry_delay_s: float

    @classmethod
    def of(cls, claim: Mapping[str, Any], timeout: str) -> Patience:
        execution = mapping(claim, "spec", "execution")
        return cls(
            float(execution.get(timeout, 900.0)),
            int(execution.get("retries", 0)),
            float(execution.get("retry_delay_s", 0.0)),
        )

    def waits_after(self, failure: Failure, now_s: float) -> bool:
        """Whether the run that failed may still be in the pause before another attempt."""
        if not failure.transient or not self.retries or process_lives(failure) is False:
            return False
        longest_s = self.retry_delay_s * 2.0 ** min(self.retries - 1, 32) * 1.5
        return now_s - seconds_of(failure.at) <= min(longest_s, self.timeout_s) + _SLACK_S


class Activity:
    """The notes of a run, held against what is done.

    `is_done(note)` says whether what a note is about was finished since; `heard_at` is the last
    sign of life that is not in a note, in seconds since 1970.
    """

    def __init__(
        self,
        notes: Notes,
        is_done: Callable[[Attempt | Failure], bool],
        patience: Patience,
        heard_at: float = 0.0,
    ) -> None:
        self._now_s = time.time()
        self._patience, self._is_done = patience, is_done
        undone = [item for item in notes.attempts if not is_done(item)]
        self._live = [item for item in undone if self._lives(item, heard_at)]
        self._lost = [item for item in undone if item not in self._live]
        self._failures = notes.failures

    def running(self) -> tuple[Running, ...]:
        found = [
            Running(
                **{k: getattr(item, k) for k in ("doing", "part", "first_ordinal", "last_ordinal")},
                host=item.host,
                pid=item.pid,
                run_id=item.run_id,
                since=item.started,
                seconds=max(0.0, self._now_s - seconds_of(item.started)),
            )
            for item in self._live
        ]
        return tuple(sorted(found, key=lambda item: (item.part or 0, item.since)))

    def problems(self) -> tuple[Problem, ...]:
        """What failed, and workers that ended without a word; the newest first."""
        found = [*map(self._of_failure, self._failures), *map(self._of_lost, self._silent())]
        return tuple(sorted(found, key=lambda item: seconds_of(item.at), reverse=True))

    def state(self) -> tuple[State, str]:
        """The state of an output that is not complete, and what a person can do."""
        if self._live:
            return "running", "nothing to do"
        unmet = [item for item in self._failures if not self._is_done(item)]
        if unmet:
            newest = max(unmet, key=lambda item: seconds_of(item.at))
            if self._patience.waits_after(newest, self._now_s):
                return "retrying", "nothing to do: it will be tried again"
            return "failed", remedy_for(newest.kind)
        return ("stopped", AGAIN) if self._lost else ("waiting", "")

    def _lives(self, item: Attempt, heard_at: float) -> bool:
        lives = process_lives(item)
        if lives is not None:
            return lives
        return self._now_s - max(seconds_of(item.started), heard_at) <= self._patience.timeout_s

    def _silent(self) -> Iterable[Attempt]:
        """Lost workers that no failure tells of."""
        told = {(note.doing, note.part): seconds_of(note.at) for note in self._failures}
        for item in self._lost:
            if told.get((item.doing, item.part), 0.0) < seconds_of(item.started):
                yield item

    def _outcome(self, note: Attempt | Failure) -> Literal["open", "again", "passed"]:
        if self._is_done(note):
            return "passed"
        again = any((item.doing, item.part) == (note.doing, note.part) for item in self._live)
        return "again" if again else "open"

    def _of_failure(self, item: Failure) -> Problem:
        return Problem(
            kind=item.kind,
            message=presentable(item.message),
            at=item.at,
            count=item.count,
            ordinal=item.ordinal,
            outcome=self._outcome(item),
            remedy=remedy_for(item.kind),
            **_place(item),
        )

    def _of_lost(self, item: Attempt) -> Problem:
        return Problem(
            kind="ended",
            message=f"worker {item.pid} ended without a word: it was killed, or the run stopped",
            at=item.started,
            count=1,
            ordinal=None,
            outcome=self._outcome(item),
            remedy=AGAIN,
            **_place(item),
        )


def remedy_for(kind: str) -> str:
    return REMEDIES.get(kind, f"see to what the message says, then {AGAIN}")


def job_of(document: Mapping[str, Any], method: str) -> Job:
    """What a claim or a manifest says about the job; what it lacks is empty.

    `method` is the field of the spec that names the feature or the trainer.
    """
    pin, spec = mapping(document, "pin"), mapping(document, "spec")
    columns = mapping(document, "plan").get("columns") or spec.get("columns")
    return Job(
        dataset=redact(_text(pin.get("uri") or spec.get("dataset"))),
        dataset_id=_text(pin.get("dataset_id")),
        snapshot_id=_text(pin.get("snapshot_id")),
        fingerprint=_text(pin.get("fingerprint")),
        annotations=tuple(
            f"{item.get('name')} {item.get('publication_id')}"
            for item in _items(pin.get("annotations"))
            if isinstance(item, Mapping)
        ),
        columns=tuple(map(str, _items(columns))),
        target=None if spec.get("target") is None else str(spec["target"]),
        where=tuple(map(str, _items(spec.get("where")))),
        method=_text(spec.get(method)),
        run_key=_text(document.get("run_key")),
    )


def version_faults(document: Mapping[str, Any]) -> tuple[str, ...]:
    version = document.get("format_version")
    if version == SCHEMA_VERSION:
        return ()
    return (
        f"{CLAIM} is of format version {version}, and this program knows {SCHEMA_VERSION}: look "
        "with the version of signal-batch that writes this output",
    )


def mapping(value: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """A mapping inside others; an empty one where there is none."""
    found: Any = value
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _place(item: Attempt | Failure) -> dict[str, Any]:
    names = ("doing", "part", "first_ordinal", "last_ordinal", "host")
    return {name: getattr(item, name) for name in names}


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
