"""From predictions to numbers: accuracy, loss, a confusion matrix, and accuracy by some value.

Works on the probabilities that a trainer's `predict` returns, whatever framework made them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from signal_batch.batches import Array
from signal_batch.errors import FeatureError
from signal_batch.training import cross_entropy

Group: TypeAlias = dict[str, Any]

#: Numbers with more distinct values than this are put into at most as many bins.
MOST_BINS = 12
#: The 0.975 quantile of the standard normal distribution.
Z_95 = 1.959963984540054


class Scores:
    """Accumulates predictions over the batches of one side.

    Per batch only counts are added up, but for each `by` column the value and the outcome of
    every record are kept, up to 9 bytes a record: bins can be chosen only once the range is
    known. Equal texts are kept once.
    """

    def __init__(self) -> None:
        self._confusion: Array | None = None
        self._loss = 0.0
        self._by: dict[str, list[tuple[Array, Array]]] = {}
        self._texts: dict[Any, Any] = {}

    def add(
        self, probabilities: Array, truth: Array, by: Mapping[str, Array | Sequence[Any]]
    ) -> None:
        """Count one batch in.

        `probabilities` (records, classes), `truth` (records,) as indices of classes; of each
        `by` column (records,) numbers, booleans or text, NaN or None where a record has none.
        The predicted class is the first of the most probable ones.
        Raises `FeatureError` where the probabilities do not fit the truth or earlier batches.
        """
        probabilities, truth = np.asarray(probabilities), np.asarray(truth)
        self._check(probabilities, truth)
        classes = probabilities.shape[1]
        if self._confusion is None:
            self._confusion = np.zeros((classes, classes), np.int64)
        predicted = probabilities.argmax(axis=1)
        cells = np.bincount(truth * np.int64(classes) + predicted, minlength=classes * classes)
        self._confusion += cells.reshape(classes, classes)
        self._loss += float(cross_entropy(probabilities, truth).sum())
        right = predicted == truth
        for name, values in by.items():
            self._by.setdefault(name, []).append((self._column(values), right))

    def result(self) -> dict[str, Any]:
        """All numbers as plain JSON; null where one is not defined.

        `confusion` has the true class in rows and the predicted one in columns. `loss` is the
        mean of -log of the probability given to the true class, null too where that is not
        finite. `by` holds, for each column, groups with `records`, `accuracy` and its 95 %
        interval `low` to `high`: numbers of more than 12 distinct values fall into bins
        `from` <= value < `to` of one round width, without those that are empty; all others are
        told apart by `value`.
        """
        confusion = np.zeros((0, 0), np.int64) if self._confusion is None else self._confusion
        records = int(confusion.sum())
        loss = _ratio(self._loss, records)
        return {
            "records": records,
            "accuracy": _ratio(int(confusion.trace()), records),
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "confusion": confusion.tolist(),
            "per_class": _per_class(confusion),
            "by": {name: _groups(parts) for name, parts in self._by.items()},
        }

    def _check(self, probabilities: Array, truth: Array) -> None:
        if probabilities.ndim != 2 or len(probabilities) != len(truth):
            raise FeatureError(
                f"probabilities of shape {probabilities.shape} for {len(truth)} records; they "
                "must be (records, classes)"
            )
        classes = probabilities.shape[1]
        if self._confusion is not None and len(self._confusion) != classes:
            raise FeatureError(
                f"probabilities of {classes} classes after some of {len(self._confusion)}"
            )
        if len(truth) and not 0 <= truth.min() <= truth.max() < classes:
            raise FeatureError(
                f"class {truth.min() if truth.min() < 0 else truth.max()} has no probability: "
                f"there are {classes}"
            )

    def _column(self, values: Array | Sequence[Any]) -> Array:
        """A copy to keep: numbers as they are, all else as objects of which equals are one."""
        column = np.array(values)
        if column.dtype.kind in "iuf":
            return column
        objects = [_plain(value) for value in column.tolist()]
        numbers = [value for value in objects if value is not None]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers):
            return np.array([math.nan if value is None else value for value in objects], float)
        kept = np.empty(len(objects), object)
        kept[:] = [self._texts.setdefault((type(v), v), v) for v in objects]
        return kept


def wilson_interval(right: int, records: int) -> tuple[float, float]:
    """The 95 % score interval of a share, `right` of `records` (at least 1).

    Equation 4 of Brown, Cai and DasGupta, "Interval estimation for a binomial proportion",
    Statistical Science 16 (2001), after E. B. Wilson, JASA 22 (1927). It stays within 0 to 1
    and is of use with few records, where the usual p +- 1.96 s is not.
    """
    share, square = right / records, Z_95**2
    middle = (share + square / (2 * records)) / (1 + square / records)
    spread = math.sqrt(share * (1 - share) / records + square / (4 * records**2))
    half = Z_95 * spread / (1 + square / records)
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == records else middle + half
    return low, high


def round_bins(smallest: float, largest: float, *, whole: bool = False) -> list[float]:
    """Edges of at most `MOST_BINS` half-open bins of equal, round width from a range.

    The width is the smallest of 1, 2, 2.5 and 5 times a power of ten that will do, and every
    edge is a multiple of it. With `whole`, the width is a whole number. Edges are computed as
    fractions: 3 * 0.1 is not 0.3 in floats, and a value on an edge must not miss its bin.
    """
    first, last = Fraction(smallest), Fraction(largest)
    exponent = 0
    if last > first:
        span = (last - first) / MOST_BINS
        exponent = math.floor(math.log10(span.numerator) - math.log10(span.denominator)) - 1
    while True:
        for factor in (Fraction(1), Fraction(2), Fraction(5, 2), Fraction(5)):
            width = factor * Fraction(10) ** exponent
            if whole and width.denominator != 1:
                continue
            start, stop = math.floor(first / width), math.floor(last / width) + 1
            if stop - start <= MOST_BINS:
                return [_as_float(edge * width) for edge in range(start, stop + 1)]
        exponent += 1


def _as_float(value: Fraction) -> float:
    limit = Fraction(sys.float_info.max)
    return float(max(-limit, min(limit, value)))


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _per_class(confusion: Array) -> list[Group]:
    """Records, recall, precision and F1 of each class.

    F1 is 2 TP / (2 TP + FP + FN): not defined only for a class that neither occurs nor is
    predicted.
    """
    found = []
    for index in range(len(confusion)):
        right = int(confusion[index, index])
        true, predicted = int(confusion[index].sum()), int(confusion[:, index].sum())
        found.append(
            {
                "records": true,
                "recall": _ratio(right, true),
                "precision": _ratio(right, predicted),
                "f1": _ratio(2 * right, true + predicted),
            }
        )
    return found


def _groups(parts: Sequence[tuple[Array, Array]]) -> list[Group]:
    """Accuracy by one column, from its values and outcomes batch by batch."""
    values = np.concatenate([part for part, _ in parts])
    right = np.concatenate([outcome for _, outcome in parts])
    if values.dtype == object:
        return _by_object(values, right)
    finite = np.isfinite(values)
    if len(np.unique(values[finite])) <= MOST_BINS:
        return _by_number(values, right)
    return _by_bin(values[finite], right[finite]) + _by_number(values[~finite], right[~finite])


def _by_object(values: Array, right: Array) -> list[Group]:
    """Groups of text, booleans and None; numbers go before text, None to the end."""
    counts: dict[Any, list[int]] = {}
    for value, outcome in zip(map(_plain, values.tolist()), right.tolist(), strict=True):
        # True and 1 are equal keys, but not the same value.
        key = (value is None, isinstance(value, str), isinstance(value, bool), value)
        count = counts.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += outcome
    return [{"value": key[-1]} | _shares(*counts[key]) for key in sorted(counts)]


def _by_number(values: Array, right: Array) -> list[Group]:
    """Groups of equal numbers in ascending order, NaN last."""
    distinct, places = np.unique(values, return_inverse=True)
    records = np.bincount(places, minlength=len(distinct)).tolist()
    rights = np.bincount(places[right], minlength=len(distinct)).tolist()
    return [
        {"value": _readable(value)} | _shares(records[i], rights[i])
        for i, value in enumerate(distinct)
    ]


def _readable(value: Any) -> float | int | str | None:
    """A number for JSON: 0.1 for the float32 nearest to it, text for infinities, None for NaN."""
    if np.isfinite(value):
        return float(str(value)) if value.dtype.kind == "f" else int(value)
    return None if np.isnan(value) else str(value)


def _by_bin(values: Array, right: Array) -> list[Group]:
    whole = values.dtype.kind != "f"
    edges = round_bins(values.min().item(), values.max().item(), whole=whole)
    # Compared in the values' own precision: the float32 nearest to 0.7 lies below 0.7.
    limits = np.array(edges) if whole else _narrowed(edges, values.dtype)
    places = np.clip(np.searchsorted(limits, values, side="right") - 1, 0, len(edges) - 2)
    records = np.bincount(places, minlength=len(edges) - 1).tolist()
    rights = np.bincount(places[right], minlength=len(edges) - 1).tolist()
    return [
        {"from": edges[i], "to": edges[i + 1]} | _shares(records[i], rights[i])
        for i in range(len(records))
        if records[i]
    ]


def _narrowed(edges: list[float], dtype: np.dtype[Any]) -> Array:
    limit = np.finfo(dtype).max
    return np.clip(edges, -float(limit), float(limit)).astype(dtype)


def _shares(records: int, right: int) -> Group:
    low, high = wilson_interval(right, records)
    return {"records": records, "accuracy": right / records, "low": low, "high": high}
