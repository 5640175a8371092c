"""A status as people read it on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from signal_batch.notes import presentable
from signal_batch.status_model import Missing, Problem, Running, Speed, Status
from signal_batch.wording import counted, duration, number, times

#: As many lines of one kind as fit a screen; `--json` has all.
_MOST_LINES = 5
_STATES = {
    "complete": "complete",
    "running": "running",
    "retrying": "waiting to try again",
    "waiting": "not complete, and nothing is known to run",
    "stopped": "stopped: its workers ended, and nothing runs",
    "failed": "failed, and nothing runs",
    "damaged": "damaged: its own account cannot be read",
}


def show_status(status: Status, *, as_json: bool = False) -> None:
    """Print a status, for people or as one JSON object."""
    if as_json:
        print(json.dumps(status.to_dict() | {"exit_code": status.exit_code}, indent=2))
        return
    for title, text in _lines(status):
        print(f"{title:<14}{presentable(text)}" if text else title)


def _lines(status: Status) -> Iterator[tuple[str, str]]:
    yield f"{status.uri}: {status.kind}, {_STATES[status.state]}", ""
    yield from _job_lines(status)
    yield from _progress_lines(status)
    yield from _listed("running", list(map(_running, status.running)))
    yield from _listed("missing", list(map(_missing, status.missing)))
    yield from _listed("problem", list(map(_problem, status.problems)))
    yield from _listed("unreadable", list(status.faults))
    if status.state not in ("complete", "running"):
        yield "what to do", status.advice


def _job_lines(status: Status) -> Iterator[tuple[str, str]]:
    job = status.job
    yield "dataset", f"{job.dataset} ({job.fingerprint[:16]}), snapshot {job.snapshot_id}"
    for name in job.annotations:
        yield "annotations", name
    yield "columns", ", ".join(job.columns)
    if labels := [job.target] if job.target else [c for c in job.columns if "=annotation" in c]:
        yield "labels", ", ".join(labels)
    for condition in job.where:
        yield "where", condition
    yield ("trainer" if status.kind == "training" else "features"), job.method
    yield "run key", job.run_key[:16]


def _progress_lines(status: Status) -> Iterator[tuple[str, str]]:
    if status.counts:
        share = status.counts[-1].done / max(1, status.counts[-1].of)
        done = ", ".join(f"{c.done:,} of {c.of:,} {c.unit}" for c in status.counts)
        # Rounded down: 100 % is for what is finished.
        yield "done", f"{done} ({int(1000 * share) / 10:g} %)"
    if status.set_aside:
        read = counted(status.receipts_read, "newest part")
        yield "set aside", f"{counted(status.set_aside, 'record')} of the {read}"
    if status.checkpoint_step is not None:
        age = status.checkpoint_age_s
        ago = "" if age is None else f", {duration(age)} ago"
        yield "checkpoint", f"step {status.checkpoint_step:,}{ago}"
    for side, row in status.metrics.items():
        values = (
            f"{name} {number(value) if isinstance(value, int | float) else value}"
            for name, value in row.items()
            if name not in ("step", "side", "not_finite")
        )
        yield side, f"step {row.get('step')}: {', '.join(values)}"
    if speed := _speed(status.speed):
        yield "speed", speed
    if status.seconds_left is not None:
        when = "" if status.state == "running" else " once it runs"
        yield "time left", f"about {duration(status.seconds_left)}{when}"
    if status.completed:
        yield "completed", status.completed


def _listed(title: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place, line in enumerate(lines[:_MOST_LINES]):
        yield ("" if place else title), line
    if len(lines) > _MOST_LINES:
        yield "", f"and {len(lines) - _MOST_LINES:,} more; --json shows all"


def _speed(speed: Speed) -> str:
    shown = [
        f"{rate:,.0f} {speed.unit} {when}" if rate >= 100 else f"{rate:.3g} {speed.unit} {when}"
        for rate, when in ((speed.recent, "lately"), (speed.overall, "over all"))
        if rate is not None
    ]
    return ", ".join(shown)


def _running(item: Running) -> str:
    who = f"{item.host}, process {item.pid}, for {duration(item.seconds)}"
    return f"{_where(item)} on {who} (since {item.since})"


def _missing(item: Missing) -> str:
    one = item.first_part == item.last_part
    parts = f"part {item.first_part}" if one else f"parts {item.first_part}-{item.last_part}"
    ordinals = (
        "" if item.first_ordinal is None else f", ordinals {item.first_ordinal}-{item.last_ordinal}"
    )
    return f"{parts}: {counted(item.records, 'record')}{ordinals}"


def _problem(item: Problem) -> str:
    outcome = {"open": "", "again": " It is being tried again.", "passed": " It passed since."}
    place = _where(item) + ("" if item.ordinal is None else f", at ordinal {item.ordinal}")
    often = f", {times(item.count)} in a row" if item.count > 1 else ""
    remedy = f" To do: {item.remedy}." if item.outcome == "open" else ""
    return (
        f"{item.at} {place}, {item.host}{often}: {item.kind}: {item.message}."
        f"{outcome[item.outcome]}{remedy}"
    ).replace("..", ".")


def _where(item: Any) -> str:
    if item.part is None:
        return str(item.doing)
    return f"part {item.part} (ordinals {item.first_ordinal}-{item.last_ordinal})"
