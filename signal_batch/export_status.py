"""How far an export is, from its claim, the names and times of its receipts, and its notes.

Which parts are done is in one listing, so it takes no longer for many parts; only the newest
receipts are read, side by side, for what was set aside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from signal_batch.errors import DamagedOutputError
from signal_batch.notes import Attempt, Notes, presentable, read_notes, seconds_of
from signal_batch.status_model import (
    Activity,
    Count,
    Missing,
    Patience,
    Speed,
    State,
    Status,
    job_of,
    mapping,
    version_faults,
)
from signal_batch.store import AGAIN, CLAIM, RECEIPTS, OutputStore, Receipt

#: Receipts that are read, and receipts that the recent speed is measured over.
MOST_READ = 512
RECENT = 64
_RECEIPT = re.compile(r"part-(\d{5,})\.json")


def export_status(store: OutputStore, claim: Mapping[str, Any], manifest: Any) -> Status:
    """The status of an export; `claim` is its manifest where there is no claim."""
    job, faults = job_of(claim, "features"), [*version_faults(claim)]
    plan = _Plan.of(claim, manifest)
    if plan is None:
        advice = "see `signal-batch verify`, or remove the output and run the command again"
        faults.append(f"{CLAIM} does not say how many parts and records there are to be")
        return Status(
            *(store.uri, "export", "damaged", advice, job, (), Speed("records/s")),
            faults=tuple(map(presentable, faults)),
        )
    # Receipts first: a worker that goes on meanwhile is at a part that has none yet.
    times = _receipt_times(store, plan, faults)
    set_aside, read = _read_newest(store, job.run_key, times, faults)
    notes = read_notes(store, job.run_key) if manifest is None else Notes((), (), ())
    activity = Activity(notes, lambda note: note.part in times, Patience.of(claim, "timeout_s"))
    if manifest is None and len(times) == plan.parts:
        manifest = store.read_manifest()  # it may have been committed meanwhile
    state, advice = _state(activity, manifest, all_written=len(times) == plan.parts)
    missing = () if state == "complete" else plan.missing(times)
    done = plan.rows - sum(item.records for item in missing)
    speed = _speed(times, plan, store.times("").get(CLAIM), notes.attempts)
    return Status(
        uri=store.uri,
        kind="export",
        state=state,
        advice=advice,
        job=job,
        counts=(
            Count("parts", plan.parts - sum(_parts_of(m) for m in missing), plan.parts),
            Count("records", done, plan.rows),
        ),
        speed=speed,
        seconds_left=speed.left_s(plan.rows - done),
        missing=missing,
        running=() if state == "complete" else activity.running(),
        problems=() if state == "complete" else activity.problems(),
        faults=tuple(map(presentable, (*faults, *notes.faults))),
        set_aside=set_aside,
        receipts_read=read,
        completed=None if manifest is None else str(manifest.get("created")),
    )


class _Plan:
    """How many parts and rows there are, by the claim's arithmetic."""

    def __init__(self, parts: int, rows: int, part_rows: int, *, whole: bool) -> None:
        self.parts, self.rows, self._part_rows, self._whole = parts, rows, part_rows, whole

    @classmethod
    def of(cls, claim: Mapping[str, Any], manifest: Any) -> _Plan | None:
        """None where the claim does not say, and no manifest says it instead."""
        plan = mapping(claim, "plan")
        numbers: list[Any] = [plan.get(name) for name in ("parts", "rows", "part_rows")]
        if not plan and manifest is not None:
            files, records = manifest.get("files"), mapping(manifest, "selection").get("records")
            count = len(files) if isinstance(files, list) else None
            numbers = [count, records, -(-int(records or 0) // max(1, count or 0))]
        if not all(type(number) is int and number >= 0 for number in numbers):
            return None
        parts, rows, part_rows = numbers
        return cls(parts, rows, part_rows, whole=rows == mapping(claim, "pin").get("record_count"))

    def rows_of(self, first: int, last: int) -> int:
        """Rows of the parts from `first` to `last`."""
        return min(self.rows, (last + 1) * self._part_rows) - first * self._part_rows

    def missing(self, done: Mapping[int, object]) -> tuple[Missing, ...]:
        absent = [index for index in range(self.parts) if index not in done]
        runs = groupby(enumerate(absent), key=lambda pair: pair[1] - pair[0])
        return tuple(self._run([index for _, index in run]) for _, run in runs)

    def _run(self, indexes: Sequence[int]) -> Missing:
        first, last = indexes[0], indexes[-1]
        rows, start = self.rows_of(first, last), first * self._part_rows
        # Where every record is selected, positions are ordinals.
        ordinals = (start, start + rows - 1) if self._whole else (None, None)
        return Missing(first, last, rows, *ordinals)


def _parts_of(missing: Missing) -> int:
    return missing.last_part - missing.first_part + 1


def _receipt_times(store: OutputStore, plan: _Plan, faults: list[str]) -> dict[int, float | None]:
    """When each part was finished, by index."""
    found = {}
    for name, at in store.times(RECEIPTS).items():
        match = _RECEIPT.fullmatch(name)
        if match and int(match[1]) < plan.parts:
            found[int(match[1])] = at
        elif name.endswith(".json"):
            faults.append(f"{RECEIPTS}/{name} is of no part of this plan")
    return found


def _read_newest(
    store: OutputStore, run_key: str, times: dict[int, float | None], faults: list[str]
) -> tuple[int, int]:
    """Records set aside in the newest parts, and how many receipts were read for it.

    A receipt that is damaged counts for nothing: the run refuses it as well.
    """
    newest = sorted(times, key=lambda index: (times[index] or 0.0, index))[-MOST_READ:]
    paths = [f"{RECEIPTS}/part-{index:05d}.json" for index in newest]
    set_aside = 0
    for index, path, found in zip(newest, paths, store.read_documents(paths), strict=True):
        try:
            if not isinstance(found, dict):
                raise found or DamagedOutputError(
                    f"{store.uri}/{path} went away; run the same command again"
                )
            receipt = Receipt.from_dict(found, where=f"{store.uri}/{path}")
            if (receipt.part, receipt.run_key) != (index, run_key):
                what = f"{store.uri}/{path} is of another part or run key"
                raise DamagedOutputError(f"{what}; {AGAIN}")
            set_aside += len(receipt.bad_ordinals)
        except DamagedOutputError as exc:
            faults.append(str(exc))
            del times[index]
    return set_aside, len(newest)


def _state(activity: Activity, manifest: Any, *, all_written: bool) -> tuple[State, str]:
    if manifest is not None:
        return "complete", "nothing to do"
    state, advice = activity.state()
    if state != "waiting":
        return state, advice
    if all_written:
        return state, "every part is written; if nothing runs, the same command completes it"
    return state, "nothing is known to run; if so, run the same command"


def _speed(
    times: Mapping[int, float | None],
    plan: _Plan,
    claimed_at: float | None,
    attempts: Sequence[Attempt],
) -> Speed:
    known = sorted((at, index) for index, at in times.items() if at is not None)
    if not known:
        return Speed("records/s")
    begun_at = _begun_at(attempts)
    recent = [item for item in known if begun_at is None or item[0] >= begun_at]
    if begun_at is None or len(recent) > RECENT:
        # Between receipts: when the work on the first of them began is not known.
        begun_at, recent = recent[-RECENT - 1 :][0][0], recent[-RECENT - 1 :][1:]
    return Speed(
        "records/s",
        recent=_rate(plan, recent, begun_at),
        overall=None if claimed_at is None else _rate(plan, known, claimed_at),
    )


def _begun_at(attempts: Sequence[Attempt]) -> float | None:
    """When the run that was seen last took up its first order, if it is known."""
    if not attempts:
        return None
    newest = max(attempts, key=lambda item: seconds_of(item.started))
    same = [item for item in attempts if item is newest or item.run_id == newest.run_id is not None]
    return min(seconds_of(item.began) for item in same)


def _rate(plan: _Plan, finished: Sequence[tuple[float, int]], since: float) -> float | None:
    """Rows a second of the parts that were finished after `since`."""
    seconds = finished[-1][0] - since if finished else 0.0
    rows = sum(plan.rows_of(index, index) for _, index in finished)
    return rows / seconds if seconds > 0 else None
