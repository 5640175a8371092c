"""Which ordinals a job reads: filters on metadata and annotations, resolved before iteration.

A filter is one line; all filters must hold::

    metadata:snr_db >= 5
    metadata:split == "train"
    metadata:receiver.antenna in ["a", "b"]
    annotation:review-v1 status success
    annotation:review-v1/quality > 0.5
    scene == "scene-17"
    ordinal < 1000

Filters apply in the order given, those on a status first, and a record that one refuses is not
shown to the next. A record that lacks a key is an error, unless the selector names a default:
`metadata:snr_db?0 >= 5`.

Only metadata and annotation rows are read, never samples. A resolved selection is kept as runs
of consecutive ordinals, and its digest is part of the run key.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from signal_batch.columns import Column
from signal_batch.errors import SpecError

STATUSES = ("success", "skipped", "failed")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_SUBJECT = "column 'filter': "
_FORMS = (
    "a filter reads SELECTOR OP VALUE (OP one of == != < <= > >= in), for example "
    "'metadata:snr_db >= 5', or 'annotation:SET status success'"
)


class Selection:
    """Ordinals in ascending order, kept as runs of consecutive ones.

    `runs` is an int64 array of shape (number of runs, 2) of `[start, stop)`.
    """

    def __init__(self, runs: npt.ArrayLike) -> None:
        self.runs = np.asarray(runs, dtype=np.int64).reshape(-1, 2)
        self.runs.setflags(write=False)
        self._ends = np.cumsum(self.runs[:, 1] - self.runs[:, 0])

    @classmethod
    def all_of(cls, record_count: int) -> Selection:
        return cls([(0, record_count)] if record_count else [])

    @classmethod
    def of(cls, ordinals: npt.ArrayLike) -> Selection:
        """From distinct ascending ordinals."""
        values = np.asarray(ordinals, dtype=np.int64)
        if values.size == 0:
            return cls([])
        steps = np.diff(values)
        if values[0] < 0 or (steps < 1).any():
            raise ValueError("ordinals must be nonnegative, distinct and ascending")
        breaks = np.flatnonzero(steps > 1)
        starts = values[np.concatenate(([0], breaks + 1))]
        stops = values[np.concatenate((breaks, [values.size - 1]))] + 1
        return cls(np.stack((starts, stops), axis=1))

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and np.array_equal(self.runs, other.runs)

    def __hash__(self) -> int:
        return hash(self.runs.tobytes())

    def __repr__(self) -> str:
        return f"Selection(records={len(self)}, runs={len(self.runs)})"

    def ordinal_at(self, position: int) -> int:
        """The ordinal at a position of the selection."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a selection of {len(self)}")
        run = int(np.searchsorted(self._ends, position, side="right"))
        return int(self.runs[run, 1]) - int(self._ends[run]) + position

    def ordinals_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The ordinals at some positions, in their order; none may be out of range."""
        run = np.searchsorted(self._ends, positions, side="right")
        return np.asarray(self.runs[run, 1] - self._ends[run] + positions, dtype=np.int64)

    def slice(self, first: int, count: int) -> Selection:
        """The selection's positions `[first, first + count)`."""
        last = min(first + count, len(self)) - 1
        if last < first:
            return Selection([])
        start = int(np.searchsorted(self._ends, first, side="right"))
        stop = int(np.searchsorted(self._ends, last, side="right")) + 1
        runs = self.runs[start:stop].copy()
        runs[0, 0] = self.ordinal_at(first)
        runs[-1, 1] = self.ordinal_at(last) + 1
        return Selection(runs)

    def ordinals(self) -> npt.NDArray[np.int64]:
        """All ordinals, int64, ascending."""
        lengths = self.runs[:, 1] - self.runs[:, 0]
        shifts = self.runs[:, 1] - self._ends
        return np.arange(len(self), dtype=np.int64) + np.repeat(shifts, lengths)

    def digest(self) -> str:
        """SHA-256 over the runs, as little-endian int64 pairs."""
        return sha256(self.runs.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Filter:
    """One condition on a record; `column` is what it reads."""

    text: str
    column: Column | None
    status_of: str | None
    test: Callable[[Any], bool]

    @property
    def set_name(self) -> str | None:
        return self.status_of or (self.column.selector.set_name if self.column else None)


def parse_filter(text: str) -> Filter:
    """Read one filter line; anything else is a `SpecError` that shows the forms."""
    words = text.strip().split(None, 2)
    if len(words) != 3:
        raise SpecError(f"filter {text!r} is not complete: {_FORMS}")
    selector, name, value = words
    if name == "status":
        return _status_filter(text, selector, value)
    try:
        column = Column.parse(f"filter={selector}")
    except SpecError as exc:
        raise SpecError(f"filter {text!r}: {str(exc).removeprefix(_SUBJECT)}") from exc
    if column.selector.is_array:
        raise SpecError(f"filter {text!r}: filters read metadata and annotations, not samples")
    return Filter(text, column, None, _test(text, name, _literal(value)))


def annotation_sets(filters: Iterable[Filter]) -> set[str]:
    """Names of the annotation sets that filters read."""
    return {name for item in filters if (name := item.set_name)}


def resolve(
    record_count: int,
    filters: Sequence[Filter],
    blocks: Callable[[npt.NDArray[np.int64], Filter], Sequence[Any]],
    *,
    block_size: int = 4096,
) -> Selection:
    """The ordinals of the records that pass every filter.

    `blocks(ordinals, filter)` reads what a filter needs for some ordinals; it is handed only
    those that passed the filters before it.
    """
    if not filters:
        return Selection.all_of(record_count)
    # The values of a row that is not a success are often absent, so statuses are asked for first.
    filters = sorted(filters, key=lambda item: item.status_of is None)
    kept = list(_kept(record_count, filters, blocks, block_size))
    return Selection.of(np.concatenate(kept) if kept else [])


def _kept(
    record_count: int,
    filters: Sequence[Filter],
    blocks: Callable[[npt.NDArray[np.int64], Filter], Sequence[Any]],
    block_size: int,
) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, record_count, block_size):
        ordinals = np.arange(start, min(start + block_size, record_count), dtype=np.int64)
        for item in filters:
            if not ordinals.size:
                break
            values = blocks(ordinals, item)
            ordinals = ordinals[np.fromiter(map(item.test, values), bool, len(values))]
        yield ordinals


def _status_filter(text: str, selector: str, value: str) -> Filter:
    kind, _, set_name = selector.partition(":")
    wanted = {item.strip() for item in value.split(",")}
    if kind != "annotation" or not set_name or "/" in set_name:
        raise SpecError(f"filter {text!r}: status belongs to a set, as in annotation:SET status")
    if unknown := sorted(wanted - set(STATUSES)):
        raise SpecError(
            f"filter {text!r}: {', '.join(unknown)} is no status; use {', '.join(STATUSES)}"
        )
    return Filter(text, None, set_name, wanted.__contains__)


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip("'\"")


def _test(text: str, name: str, wanted: Any) -> Callable[[Any], bool]:
    if name == "in":
        if not isinstance(wanted, list):
            raise SpecError(f'filter {text!r}: \'in\' needs a list, as in ["a", "b"]')
        return lambda value: value in wanted
    if name not in _COMPARE:
        raise SpecError(f"filter {text!r} has the operator {name!r}: {_FORMS}")
    compare = _COMPARE[name]

    def test(value: Any) -> bool:
        if isinstance(value, np.generic):
            value = value.item()
        try:
            return bool(compare(value, wanted))
        except TypeError:
            raise SpecError(
                f"filter {text!r} compares {value!r} ({type(value).__name__}) "
                f"with {wanted!r} ({type(wanted).__name__})"
            ) from None

    return test
