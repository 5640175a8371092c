"""The metric history of a training run: rows of `step`, `side` and one number per metric.

::

    {"step": 10, "side": "train", "accuracy": 0.5, "loss": 1.2}
    {"step": 10, "side": "validation", "accuracy": 0.4, "loss": 1.4}
    {"step": 20, "side": "train", "accuracy": 0.1, "loss": null, "not_finite": {"loss": "nan"}}

Rows are plain JSON. JSON has no NaN, so a number that is not finite is null there and named with
its value, `nan`, `inf` or `-inf`, under `not_finite`: a loss that blew up is seen, and is not
taken for one that was not logged.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from signal_batch.errors import FeatureError
from signal_batch.training import Metrics
from signal_batch.training_spec import SIDES

Row: TypeAlias = dict[str, Any]

#: Keys of a row that are no metrics.
RESERVED = ("step", "side", "not_finite")


class MetricLog:
    """Collects the rows of a run: means over `log_steps` training steps, and evaluations.

    `to_json` carries the interval that is not full yet along with the rows, so a log that was
    saved at any step and restored goes on to give the same rows, bit for bit. For that the sums
    (float64) are always added up in the order of the steps.
    """

    def __init__(self, log_steps: int) -> None:
        self.log_steps = log_steps
        self._rows: list[Row] = []
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows so far, in the order in which they were made."""
        return tuple(self._rows)

    def add(self, step: int, metrics: Metrics) -> None:
        """Count one training step in; `step` is the number of steps taken, this one included.

        Where it is a multiple of `log_steps` a row with the means since the last row is made. A
        metric that only some steps return is averaged over those.
        Raises `FeatureError` for a metric that is not one number or takes a reserved name.
        """
        for name, value in _numbers(metrics).items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        if step % self.log_steps == 0:
            self.flush(step)

    def flush(self, step: int) -> None:
        """Make a row of the interval that is not full yet, if a step was added to it."""
        if self._sums:
            means = {name: total / self._counts[name] for name, total in self._sums.items()}
            self._rows.append(_row(step, "train", means))
        self._sums, self._counts = {}, {}

    def record(self, step: int, side: str, metrics: Metrics) -> None:
        """Make a row of an evaluation of one side, after `step` training steps."""
        if side not in SIDES:
            raise ValueError(f"{side!r} is no side; those are {', '.join(SIDES)}")
        self._rows.append(_row(step, side, _numbers(metrics)))

    def to_json(self) -> dict[str, Any]:
        """Everything there is, as plain JSON for `from_json`."""
        return {
            "log_steps": self.log_steps,
            "rows": [dict(row) for row in self._rows],
            # Text where JSON has no number for it; float() reads both.
            "sums": {k: v if math.isfinite(v) else str(v) for k, v in self._sums.items()},
            "counts": dict(self._counts),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The log that `to_json` described."""
        log = cls(value["log_steps"])
        log._rows = [dict(row) for row in value["rows"]]
        log._sums = {name: float(total) for name, total in value["sums"].items()}
        log._counts = dict(value["counts"])
        return log


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One line of JSON a row: step and side, then the metrics by name."""
    lines = []
    for row in rows:
        rest = {name: row[name] for name in sorted(row) if name not in RESERVED[:2]}
        ordered = {"step": row["step"], "side": row["side"]} | rest
        lines.append(json.dumps(ordered, ensure_ascii=False, allow_nan=False) + "\n")
    return "".join(lines).encode()


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A Parquet file: `step` int64, `side` string, then a float64 column per metric by name.

    A metric that a row lacks is null; one that was not finite is NaN or an infinity, which
    Parquet can hold.
    """
    names = sorted({name for row in rows for name in row if name not in RESERVED})
    columns = {
        "step": pa.array([row["step"] for row in rows], pa.int64()),
        "side": pa.array([row["side"] for row in rows], pa.string()),
    }
    for name in names:
        columns[name] = pa.array([value_of(row, name) for row in rows], pa.float64())
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """A metric as the number that it was, NaN and infinities too; None where the row lacks it."""
    if name in row.get("not_finite", {}):
        return float(row["not_finite"][name])
    return row.get(name)


def _row(step: int, side: str, metrics: Mapping[str, float]) -> Row:
    row: Row = {"step": step, "side": side}
    not_finite = {}
    for name, value in sorted(metrics.items()):
        row[name] = value if math.isfinite(value) else None
        if not math.isfinite(value):
            not_finite[name] = str(value)
    return row | ({"not_finite": not_finite} if not_finite else {})


def _numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics as floats: a trainer may return NumPy numbers or arrays of one value."""
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or name in RESERVED:
            raise FeatureError(f"a trainer cannot name a metric {name!r}; choose another name")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as exc:
            raise FeatureError(f"metric {name!r} must be one number: {exc}") from exc
    return numbers
