"""Evaluation: against scikit-learn and SciPy, however the records are cut into batches."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from signal_batch.errors import FeatureError
from signal_batch.evaluation import MOST_BINS, Scores, round_bins, wilson_interval


def predictions(records: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that are better than chance, and the truth; the last class never occurs."""
    rng = np.random.default_rng([seed, records, classes])
    truth = rng.integers(0, max(1, classes - 1), records).astype("int32")
    scores = rng.standard_normal((records, classes))
    scores[np.arange(records), truth] += 1.0
    powers = np.exp(scores)
    return (powers / powers.sum(axis=1, keepdims=True)).astype("float32"), truth


def scored(probabilities: np.ndarray, truth: np.ndarray, cuts: tuple[int, ...] = (), **by: Any):
    """The result over batches that begin at `cuts`; it must be plain JSON."""
    scores, edges = Scores(), [0, *sorted(cuts), len(truth)]
    for start, stop in pairwise(edges):
        columns = {name: values[start:stop] for name, values in by.items()}
        scores.add(probabilities[start:stop], truth[start:stop], columns)
    return json.loads(json.dumps(scores.result(), allow_nan=False))


def by_group(values: Any, right: Any) -> list[dict[str, Any]]:
    """`by` of one column, for outcomes that are given."""
    right = np.asarray(right, bool)
    probabilities = np.where(right[:, None], [0.9, 0.1], [0.1, 0.9])
    return scored(probabilities, np.zeros(len(right), int), x=values)["by"]["x"]


# --- the numbers -------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    records=st.integers(1, 200),
    classes=st.integers(2, 7),
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(0, 200), max_size=4),
)
def test_agrees_with_sklearn(records: int, classes: int, seed: int, cuts: list[int]) -> None:
    sk = pytest.importorskip("sklearn.metrics")
    probabilities, truth = predictions(records, classes, seed)
    result = scored(probabilities, truth, tuple(min(cut, records) for cut in cuts))
    labels, predicted = range(classes), probabilities.argmax(axis=1)
    assert result["records"] == records
    assert result["confusion"] == sk.confusion_matrix(truth, predicted, labels=labels).tolist()
    assert result["accuracy"] == pytest.approx(sk.accuracy_score(truth, predicted))
    # Our floor of 1e-12 is never reached here, and log_loss wants rows of sum 1 in float64.
    exact = probabilities.astype(float)
    exact /= exact.sum(axis=1, keepdims=True)
    assert result["loss"] == pytest.approx(sk.log_loss(truth, exact, labels=labels), rel=1e-5)
    precision, recall, f1, support = sk.precision_recall_fscore_support(
        truth, predicted, labels=labels, zero_division=math.nan
    )
    for index, found in enumerate(result["per_class"]):
        assert found["records"] == support[index]
        for name, value in (("precision", precision), ("recall", recall), ("f1", f1)):
            expected = value[index]
            assert (found[name] is None) == math.isnan(expected)
            assert found[name] is None or found[name] == pytest.approx(expected)


def test_nothing_at_all_is_not_zero() -> None:
    empty = {"records": 0, "accuracy": None, "loss": None, "confusion": [], "per_class": []}
    assert Scores().result() == empty | {"by": {}}
    scores = Scores()
    scores.add(np.zeros((0, 2)), np.zeros(0, int), {"x": []})
    result = scores.result()
    assert (result["records"], result["accuracy"], result["loss"]) == (0, None, None)
    assert (
        result["per_class"] == [{"records": 0, "recall": None, "precision": None, "f1": None}] * 2
    )
    assert result["by"] == {"x": []}


def test_a_certain_mistake_costs_the_log_of_the_floor_and_nan_is_null() -> None:
    certain = np.array([[1.0, 0.0]])
    assert scored(certain, np.array([1]))["loss"] == pytest.approx(-math.log(1e-12))
    broken = scored(np.full((3, 2), np.nan), np.array([0, 1, 1]))
    assert (broken["records"], broken["loss"]) == (3, None)


@pytest.mark.parametrize(("right", "records"), [(0, 1), (1, 1), (0, 30), (7, 12), (499, 500)])
def test_intervals_agree_with_scipy(right: int, records: int) -> None:
    expected = binomtest(right, records).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right, records) == pytest.approx((expected.low, expected.high))


# --- accuracy by a value -----------------------------------------------------------------------


def test_few_numbers_text_and_booleans_are_their_own_groups() -> None:
    groups = by_group(np.array([5, -10, 5, 5]), [1, 0, 1, 0])
    low, high = binomtest(2, 3).proportion_ci(0.95, method="wilson")
    assert [(g["value"], g["records"]) for g in groups] == [(-10, 1), (5, 3)]
    assert groups[1]["accuracy"] == pytest.approx(2 / 3)
    assert (groups[1]["low"], groups[1]["high"]) == pytest.approx((low, high))
    text = by_group(np.array(["horn", None, "dish", "horn"], object), [1, 0, 0, 0])
    assert [(g["value"], g["records"], g["accuracy"]) for g in text] == [
        *(("dish", 1, 0.0), ("horn", 2, 0.5), (None, 1, 0.0))
    ]
    assert [g["value"] for g in by_group(np.array([True, False]), [1, 1])] == [False, True]
    assert [g["value"] for g in by_group([None, 3.5, math.nan], [1, 1, 1])] == [3.5, None]


def test_numbers_are_shown_as_people_wrote_them() -> None:
    groups = by_group(np.array([0.1, 0.7, math.inf, math.nan], "float32"), [1, 1, 1, 0])
    assert [g["value"] for g in groups] == [0.1, 0.7, "inf", None]


def test_many_numbers_are_binned() -> None:
    snr = np.arange(-20, 20, 2)  # 20 values in 40 dB: 4 dB would do, 5 is the round width
    groups = by_group(snr, snr >= 0)
    assert [(g["from"], g["to"]) for g in groups] == [(e, e + 5) for e in range(-20, 20, 5)]
    assert [g["records"] for g in groups] == [3, 2, 3, 2, 3, 2, 3, 2]
    assert [g["accuracy"] for g in groups] == [0.0] * 4 + [1.0] * 4


def test_bins_leave_out_what_is_empty_and_keep_what_has_no_number() -> None:
    values = np.array([*np.linspace(0, 1, 13), 9.5, math.nan, math.inf, -math.inf])
    groups = by_group(values, [True] * len(values))
    assert [(g.get("from"), g.get("value", ""), g["records"]) for g in groups] == [
        *((0.0, "", 12), (1.0, "", 1), (9.0, "", 1)),
        *((None, "-inf", 1), (None, "inf", 1), (None, None, 1)),
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_value_on_an_edge_is_in_the_bin_that_begins_there(dtype: str) -> None:
    """0.7 as float32 is less than 0.7, and 3 * 0.1 as float64 is more than 0.3."""
    tenths = np.repeat(np.array([i / 10 for i in range(11)], dtype), 3)
    spread = np.concatenate([tenths, np.array([0.05, 0.55], dtype)])
    groups = by_group(spread, [True] * len(spread))
    assert [g["from"] for g in groups] == [i / 10 for i in range(11)]
    assert [g["records"] for g in groups] == [4, 3, 3, 3, 3, 4, 3, 3, 3, 3, 3]


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(one=finite, other=finite)
def test_bins_are_few_round_and_cover_the_range(one: float, other: float) -> None:
    smallest, largest = min(one, other), max(one, other)
    edges = round_bins(smallest, largest)
    assert 1 <= len(edges) - 1 <= MOST_BINS
    assert edges[0] <= smallest <= largest <= edges[-1]
    if 1e-300 < largest - smallest < 1e300 and max(map(abs, edges)) < 1e9 * (edges[1] - edges[0]):
        mantissa = f"{edges[1] - edges[0]:.3e}".partition("e")[0]
        assert float(mantissa) in (1, 2, 2.5, 5)
        # Half the width would have made 13 bins or more, so 11 of them lie within the range.
        assert (largest - smallest) / (edges[1] - edges[0]) > 5.4


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.one_of(finite, st.just(math.nan)), min_size=1, max_size=60),
    cut=st.integers(0, 60),
)
def test_every_record_is_in_exactly_one_group(values: list[float], cut: int) -> None:
    column = np.array(values)
    probabilities, truth = predictions(len(values), 3)
    groups = scored(probabilities, truth, (min(cut, len(values)),), x=column)["by"]["x"]
    right = probabilities.argmax(axis=1) == truth
    for group in groups:
        if "from" in group:
            last = group is groups[-1] or "value" in groups[groups.index(group) + 1]
            below = column <= group["to"] if last else column < group["to"]
            inside = (group["from"] <= column) & below
        elif group["value"] is None:
            inside = np.isnan(column)
        else:
            inside = column == group["value"]
        assert group["records"] == inside.sum()
        assert group["accuracy"] == pytest.approx(right[inside].mean())
    assert sum(group["records"] for group in groups) == len(values)


def test_whole_numbers_get_bins_of_whole_width() -> None:
    edges = round_bins(0, 25, whole=True)
    assert edges == [0, 5, 10, 15, 20, 25, 30]
    assert round_bins(0, 25) == [2.5 * i for i in range(12)]
    assert all(Fraction(edge).denominator == 1 for edge in round_bins(1, 13, whole=True))


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "truth", "message"),
    [
        ((3,), [0, 0, 0], r"shape \(3,\) for 3 records"),
        ((2, 2), [0], r"shape \(2, 2\) for 1 records"),
        ((1, 2), [2], "class 2 has no probability: there are 2"),
        ((1, 2), [-1], "class -1 has no probability"),
        ((1, 3), [0], "probabilities of 3 classes after some of 2"),
    ],
)
def test_probabilities_that_do_not_fit_are_refused(
    shape: tuple[int, ...], truth: list[int], message: str
) -> None:
    scores = Scores()
    scores.add(np.full((1, 2), 0.5), np.array([0]), {})
    with pytest.raises(FeatureError, match=message):
        scores.add(np.zeros(shape), np.array(truth), {})
