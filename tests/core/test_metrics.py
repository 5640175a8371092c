"""Metric history: means over intervals, the same after any number of restarts, NaN visible."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signal_batch.errors import FeatureError
from signal_batch.metrics import MetricLog, to_jsonl, to_parquet, value_of

numbers = st.floats(width=32) | st.floats()


def restored(log: MetricLog) -> MetricLog:
    """The log after a round through JSON text, as a checkpoint keeps it."""
    text = json.dumps(log.to_json(), sort_keys=True, allow_nan=False)
    return MetricLog.from_json(json.loads(text))


# --- intervals ---------------------------------------------------------------------------------


def test_rows_are_means_over_their_interval() -> None:
    rng = np.random.default_rng(0)
    losses = rng.random(25)
    log = MetricLog(10)
    for step, loss in enumerate(losses, start=1):
        log.add(step, {"loss": np.float32(loss), "rate": 0.5})
    log.record(25, "validation", {"accuracy": 0.25})
    log.flush(25)
    log.flush(25)  # has nothing left to write
    rows = log.rows
    assert [(r["step"], r["side"]) for r in rows] == [
        *((10, "train"), (20, "train"), (25, "validation"), (25, "train"))
    ]
    narrow = losses.astype("float32").astype(float)
    means = [narrow[:10].mean(), narrow[10:20].mean(), narrow[20:].mean()]
    assert [rows[i]["loss"] for i in (0, 1, 3)] == pytest.approx(means, rel=1e-14)
    assert rows[2] == {"step": 25, "side": "validation", "accuracy": 0.25}
    assert all(rows[i]["rate"] == 0.5 for i in (0, 1, 3))


def test_a_metric_of_some_steps_is_averaged_over_those() -> None:
    log = MetricLog(4)
    for step in range(1, 9):
        log.add(step, {"loss": step} | ({"norm": step * 10.0} if step in (1, 3) else {}))
    assert [dict(row) for row in log.rows] == [
        {"step": 4, "side": "train", "loss": 2.5, "norm": 20.0},
        {"step": 8, "side": "train", "loss": 6.5},
    ]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.dictionaries(st.sampled_from(["loss", "accuracy", "ü"]), numbers, max_size=3),
        max_size=40,
    ),
    log_steps=st.integers(1, 15),
    evaluate_at=st.sets(st.integers(1, 40)),
    cuts=st.sets(st.integers(0, 40)),
)
def test_a_log_that_was_interrupted_gives_the_same_rows(
    values: list[dict[str, float]], log_steps: int, evaluate_at: set[int], cuts: set[int]
) -> None:
    one, other = MetricLog(log_steps), MetricLog(log_steps)
    for step, metrics in enumerate(values, start=1):
        if step - 1 in cuts:
            other = restored(other)
        for log in (one, other):
            log.add(step, metrics)
            if step in evaluate_at:
                log.record(step, "test", metrics)
    if len(values) in cuts:
        other = restored(other)
    one.flush(len(values))
    other.flush(len(values))
    assert to_jsonl(one.rows) == to_jsonl(other.rows)  # repr of a float is exact
    assert to_parquet(one.rows) == to_parquet(other.rows)
    assert one.rows == other.rows == restored(other).rows


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=12))
def test_sums_are_added_in_the_order_of_steps(values: list[float]) -> None:
    log = MetricLog(len(values))
    for step, value in enumerate(values, start=1):
        log.add(step, {"loss": value})
    total = 0.0
    for value in values:
        total += value
    (row,) = log.rows
    assert repr(value_of(row, "loss")) == repr(total / len(values))


# --- numbers that JSON has not -----------------------------------------------------------------


def test_a_loss_that_is_not_finite_stays_visible() -> None:
    log = MetricLog(2)
    log.add(1, {"loss": math.nan, "accuracy": 0.5})
    log = restored(log)
    log.add(2, {"loss": 1.0, "accuracy": 1.0})
    log.record(2, "validation", {"loss": -math.inf})
    first, second = json.loads(b"[" + b",".join(to_jsonl(log.rows).splitlines()) + b"]")
    assert first["loss"] is None
    assert first["not_finite"] == {"loss": "nan"}
    assert first["accuracy"] == 0.75
    assert second["not_finite"] == {"loss": "-inf"}
    table = pq.read_table(io.BytesIO(to_parquet(log.rows)))
    loss = table["loss"].to_pylist()
    assert math.isnan(loss[0])
    assert loss[1] == -math.inf
    assert table["accuracy"].to_pylist() == [0.75, None]


# --- files -------------------------------------------------------------------------------------


def test_files_hold_the_rows() -> None:
    rows = [
        {"step": 10, "side": "train", "loss": 0.1, "accuracy": 0.5},
        {"side": "test", "step": 10, "mse": 1e-300},
    ]
    lines = to_jsonl(rows).decode().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert list(json.loads(lines[1])) == ["step", "side", "mse"]
    table = pq.read_table(io.BytesIO(to_parquet(rows)))
    assert table.schema == pa.schema(
        [
            *(("step", pa.int64()), ("side", pa.string()), ("accuracy", pa.float64())),
            *(("loss", pa.float64()), ("mse", pa.float64())),
        ]
    )
    assert table.to_pylist() == [
        {"step": 10, "side": "train", "accuracy": 0.5, "loss": 0.1, "mse": None},
        {"step": 10, "side": "test", "accuracy": None, "loss": None, "mse": 1e-300},
    ]


def test_no_rows_are_valid_files() -> None:
    assert to_jsonl([]) == b""
    assert pq.read_table(io.BytesIO(to_parquet([]))).num_rows == 0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"step": 1.0}, "cannot name a metric 'step'"),
        ({"not_finite": 1.0}, "cannot name a metric 'not_finite'"),
        ({"loss": np.zeros(3)}, "metric 'loss' must be one number"),
        ({"loss": "low"}, "metric 'loss' must be one number"),
        ({"loss": None}, "metric 'loss' must be one number"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused(metrics: Any, message: str) -> None:
    with pytest.raises(FeatureError, match=message):
        MetricLog(10).add(1, metrics)
    with pytest.raises(FeatureError, match=message):
        MetricLog(10).record(1, "test", metrics)


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ValueError, match="'dev' is no side; those are train, validation, test"):
        MetricLog(10).record(1, "dev", {})
