"""How far a training run is, from its claim, the documents of its newest checkpoints, its notes.

No arrays are read. Steps after the newest checkpoint are not counted: a run that ends now would
go on from there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from signal_batch.checkpoints import FOLDER
from signal_batch.errors import DamagedOutputError
from signal_batch.frozen import digest
from signal_batch.notes import Attempt, Failure, Notes, presentable, read_notes, seconds_of
from signal_batch.status_model import (
    Activity,
    Count,
    Patience,
    Speed,
    State,
    Status,
    job_of,
    mapping,
    version_faults,
)
from signal_batch.store import CLAIM, OutputStore
from signal_batch.training_job import EVALUATION, STATISTICS

MOST_READ = 16
_DOCUMENT = re.compile(r"step-(\d{9})\.json")


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the document of a checkpoint says; `at` is when it was written."""

    step: int
    at: float | None
    steps: int
    seconds: float
    rows: tuple[Mapping[str, Any], ...]


def training_status(store: OutputStore, claim: Mapping[str, Any], manifest: Any) -> Status:
    """The status of a training run; `claim` is its manifest where there is no claim."""
    job, faults = job_of(claim, "trainer"), [*version_faults(claim)]
    total = mapping(claim, "plan").get("total_steps") or mapping(manifest or {}).get("steps")
    if type(total) is not int:
        advice = "see `signal-batch verify`, or remove the output and run the command again"
        faults.append(f"{CLAIM} does not say how many steps there are to be")
        return Status(
            *(store.uri, "training", "damaged", advice, job, (), Speed("steps/s")),
            faults=tuple(map(presentable, faults)),
        )
    saved = _checkpoints(store, job.run_key, faults)
    newest = saved[-1] if saved else None
    done = newest.step if newest else 0
    notes = read_notes(store, job.run_key) if manifest is None else Notes((), (), ())
    heard_at = (newest.at if newest else None) or 0.0
    activity = Activity(
        notes,
        _done_by(store, notes, heard_at, all_steps=done >= total),
        Patience.of(claim, "stall_timeout_s"),
        heard_at,
    )
    manifest = manifest or store.read_manifest()
    complete = manifest is not None
    state, advice = _state(activity, complete=complete)
    speed = _speed(saved)
    return Status(
        uri=store.uri,
        kind="training",
        state=state,
        advice=advice,
        job=job,
        counts=(Count("steps", total if complete else done, total),),
        speed=speed,
        seconds_left=None if complete else speed.left_s(total - done),
        running=() if complete else activity.running(),
        problems=() if complete else activity.problems(),
        faults=tuple(map(presentable, (*faults, *notes.faults))),
        checkpoint_step=newest.step if newest else None,
        checkpoint_age_s=max(0.0, time.time() - newest.at) if newest and newest.at else None,
        metrics=_metrics(newest, manifest),
        completed=str(manifest.get("created")) if manifest is not None else None,
    )


def _checkpoints(store: OutputStore, run_key: str, faults: list[str]) -> list[_Saved]:
    """The newest checkpoints that are whole, by step."""
    times = store.times(FOLDER)
    names = sorted(name for name in times if _DOCUMENT.fullmatch(name))[-MOST_READ:]
    found = store.read_documents([f"{FOLDER}/{name}" for name in names])
    saved = []
    for name, document in zip(names, found, strict=True):
        try:
            if isinstance(document, DamagedOutputError):
                raise document
            if document is not None:  # else a newer one took its place
                saved.append(_saved(document, run_key, times, name))
        except DamagedOutputError as exc:
            faults.append(str(exc))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            faults.append(f"{store.uri}/{FOLDER}/{name} is damaged: {exc}")
    return saved


def _saved(
    document: dict[str, Any], run_key: str, times: Mapping[str, float | None], name: str
) -> _Saved:
    if document.pop("digest", None) != digest(document):
        raise ValueError("it was changed after it was written")
    if document["run_key"] != run_key:
        raise ValueError("it is of another run")
    if document["arrays"]["file"] not in times:
        raise ValueError(f"{document['arrays']['file']} is missing")
    spent = document["progress"]["times"]
    return _Saved(
        step=document["cursor"]["step"],
        at=times[name],
        steps=spent["steps"],
        seconds=spent["train_s"] + spent["wait_s"],
        rows=tuple(document["progress"]["metrics"]["rows"]),
    )


def _done_by(store: OutputStore, notes: Notes, saved_at: float, *, all_steps: bool) -> Any:
    """Whether what a note is about was done since, stage by stage.

    Whoever saved a checkpoint after a failure, or came to a later stage, is past that failure.
    """
    present = store.listing("")
    finished = {
        "statistics": STATISTICS in present,
        "train": all_steps,
        "evaluate": EVALUATION in present,
    }
    newest = max(map(_started, notes.attempts), default=0.0)

    def is_done(note: Attempt | Failure) -> bool:
        if finished.get(note.doing, False):
            return True
        if isinstance(note, Failure):
            return note.doing == "train" and saved_at > seconds_of(note.at)
        return _started(note) < newest  # ranks and stages follow each other, one at a time

    return is_done


def _started(note: Attempt) -> float:
    return seconds_of(note.started)


def _state(activity: Activity, *, complete: bool) -> tuple[State, str]:
    if complete:
        return "complete", "nothing to do"
    state, advice = activity.state()
    return state, advice or "nothing is known to run; if so, run the same command"


def _speed(saved: list[_Saved]) -> Speed:
    if not saved:
        return Speed("steps/s")
    last, before = saved[-1], saved[-2] if len(saved) > 1 else None
    return Speed(
        "steps/s",
        recent=None
        if before is None
        else _rate(last.steps - before.steps, last.seconds - before.seconds),
        overall=_rate(last.steps, last.seconds),
    )


def _rate(steps: int, seconds: float) -> float | None:
    return steps / seconds if steps > 0 and seconds > 0 else None


def _metrics(newest: _Saved | None, manifest: Any) -> dict[str, dict[str, Any]]:
    """The last row of each side; of a finished model also what it reaches at its end."""
    found = {str(row["side"]): dict(row) for row in (newest.rows if newest else ())}
    for side, values in mapping(manifest or {}, "metrics").items():
        found[side] = {"step": manifest.get("steps"), "side": side, **values}
    return found
