"""Selections against numpy, the filter grammar, and filters against a plain loop."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from signal_batch.errors import MissingValueError, SpecError
from signal_batch.frozen import checked
from signal_batch.planning import pin_inputs, select
from signal_batch.selection import (
    Filter,
    Selection,
    annotation_sets,
    parse_filter,
    resolve,
)
from signal_batch.specs import ExportSpec

ordinal_sets = st.lists(st.integers(0, 60), unique=True).map(sorted)


# --- selections ----------------------------------------------------------------------------


@given(ordinal_sets)
def test_a_selection_holds_what_it_was_made_of(ordinals: list[int]) -> None:
    selection = Selection.of(ordinals)
    assert selection.ordinals().tolist() == ordinals
    assert selection.ordinals().dtype == np.int64
    assert len(selection) == len(ordinals)
    assert bool(selection) is bool(ordinals)
    assert [selection.ordinal_at(i) for i in range(len(ordinals))] == ordinals
    backwards = np.arange(len(ordinals))[::-1]
    assert selection.ordinals_at(backwards).tolist() == ordinals[::-1]
    for outside in (-1, len(ordinals)):
        with pytest.raises(IndexError, match=f"position {outside} of a selection of"):
            selection.ordinal_at(outside)


@given(ordinal_sets)
def test_runs_are_maximal(ordinals: list[int]) -> None:
    selection = Selection.of(ordinals)
    member = np.zeros(63, bool)
    member[np.array(ordinals, int) + 1] = True
    edges = np.flatnonzero(np.diff(member.astype(int)))
    assert selection.runs.ravel().tolist() == edges.tolist()


@given(ordinal_sets, st.integers(0, 70), st.integers(0, 70))
def test_slices_are_those_of_a_list(ordinals: list[int], first: int, count: int) -> None:
    part = Selection.of(ordinals).slice(first, count)
    assert part.ordinals().tolist() == ordinals[first : first + count]
    assert part == Selection.of(ordinals[first : first + count])
    assert part.digest() == Selection.of(ordinals[first : first + count]).digest()


@given(ordinal_sets, ordinal_sets)
def test_digest_and_equality_are_those_of_the_ordinals(a: list[int], b: list[int]) -> None:
    first, second = Selection.of(a), Selection.of(b)
    assert (first == second) is (a == b)
    assert (first.digest() == second.digest()) is (a == b)
    if a == b:
        assert hash(first) == hash(second)


def test_the_digest_is_over_little_endian_pairs() -> None:
    pairs = b"".join(number.to_bytes(8, "little") for number in (3, 5, 9, 10))
    assert Selection.of([3, 4, 9]).digest() == sha256(pairs).hexdigest()
    assert Selection.of([]).digest() == sha256(b"").hexdigest()


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_all_of(count: int) -> None:
    assert Selection.all_of(count) == Selection.of(range(count))
    assert len(Selection.all_of(count)) == count


@pytest.mark.parametrize("ordinals", [[1, 1], [2, 1], [-1, 0], [0, 5, 5]])
def test_ordinals_out_of_order_are_refused(ordinals: list[int]) -> None:
    with pytest.raises(ValueError, match="nonnegative, distinct and ascending"):
        Selection.of(ordinals)


def test_a_selection_cannot_be_changed_and_says_little() -> None:
    selection = Selection.of([1, 2, 7])
    with pytest.raises(ValueError, match="read-only"):
        selection.runs[0, 0] = 0
    assert repr(selection) == "Selection(records=3, runs=2)"
    assert selection != [1, 2, 7]


def test_many_runs_are_no_burden() -> None:
    runs = np.stack((np.arange(0, 4_000_000, 4), np.arange(3, 4_000_003, 4)), axis=1)
    selection = Selection(runs)
    assert len(selection) == 3_000_000
    assert selection.ordinal_at(2_999_999) == 3_999_998
    assert selection.slice(1, 2_999_998).ordinals().sum() == selection.ordinals()[1:-1].sum()


# --- filter grammar ------------------------------------------------------------------------


def passes(text: str, *values: Any) -> list[bool]:
    return [parse_filter(text).test(value) for value in values]


@pytest.mark.parametrize(
    ("sign", "compare"),
    [
        ("==", operator.eq),
        ("!=", operator.ne),
        ("<", operator.lt),
        ("<=", operator.le),
        (">", operator.gt),
        (">=", operator.ge),
    ],
)
@given(value=st.integers(-9, 9) | st.floats(-9, 9), wanted=st.integers(-3, 3))
def test_comparisons(sign: str, compare: Callable[..., bool], value: Any, wanted: int) -> None:
    expected = compare(value, wanted)
    assert passes(f"metadata:x {sign} {wanted}", value, np.float64(value)) == [expected] * 2
    assert passes(f"  metadata:x   {sign}   {wanted} ", value) == [expected]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('metadata:x == "train"', "train"),
        ("metadata:x == 'train'", "train"),
        ("metadata:x == train", "train"),
        ("metadata:x == train ", "train"),
        ("metadata:x == two words", "two words"),
        ('metadata:x == "7"', "7"),
        ("metadata:x == 7", 7),
        ("metadata:x == true", True),
        ("metadata:x == null", None),
        ('metadata:x in ["a", 3]', "a"),
        ('metadata:x in ["a", 3]', 3),
        ('metadata:x in ["a", 3]', np.int64(3)),
    ],
)
def test_values_are_json_or_bare_words(text: str, value: Any) -> None:
    assert passes(text, value, "something else") == [True, False]


def test_a_filter_knows_what_it_reads() -> None:
    item = parse_filter("metadata:radio.gain?0 >= 5")
    assert item.column is not None
    assert str(item.column.selector) == "metadata:radio.gain"
    assert (item.column.has_default, item.column.default) == (True, 0)
    assert (item.status_of, item.set_name) == (None, None)
    status = parse_filter("annotation:review-v1 status success, skipped")
    assert (status.column, status.status_of, status.set_name) == (None, "review-v1", "review-v1")
    assert list(map(status.test, ("success", "skipped", "failed"))) == [True, True, False]


@pytest.mark.parametrize(
    "selector",
    ["id", "scene", "ordinal", "metadata:a-b", "metadata:a=b", "metadata:x:int99", "metadata:id"],
)
def test_identity_and_odd_keys_can_be_filtered(selector: str) -> None:
    item = parse_filter(f"{selector} == 1")
    assert item.column is not None
    assert str(item.column.selector) == selector


def test_sets_that_filters_read() -> None:
    texts = ["annotation:b status failed", "metadata:x == 1", "annotation:a/q > 0.5", "ordinal < 3"]
    assert annotation_sets(map(parse_filter, texts)) == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "filter '' is not complete: a filter reads SELECTOR OP VALUE"),
        ("metadata:x", "is not complete"),
        ("metadata:x >=", "is not complete"),
        ("metadata:x>=5 and more", "operator 'and'"),
        ("metadata:x >5", "is not complete"),
        ("metadata:x ~ 5", "filter 'metadata:x ~ 5' has the operator '~': a filter reads"),
        ("metadata:x is 5", "operator 'is'"),
        ("snr >= 5", "filter 'snr >= 5': selector 'snr' starts with 'snr'"),
        ("field:samples > 0", "filters read metadata and annotations, not samples"),
        ("annotation-field:s/m > 0", "filters read metadata and annotations, not samples"),
        ("annotation:s == 1", "must read annotation:SET/KEY"),
        ("metadata:x in 5", "'in' needs a list"),
        ('metadata:x in "abc"', "'in' needs a list"),
        ("metadata:x in ['a']", "'in' needs a list"),
        ("annotation:s status done", "done is no status; use success, skipped, failed"),
        ("annotation:s status success,maybe,", ", maybe is no status"),
        ("annotation:s/key status success", "status belongs to a set"),
        ("metadata:x status success", "status belongs to a set"),
        ("annotation: status success", "status belongs to a set"),
        ("metadata:x:complex64 == 1", "filter 'metadata:x:complex64 == 1': dtype 'complex64'"),
        ("metadata:x:int32?null == 1", "a null default needs a float dtype"),
    ],
)
def test_filters_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_filter(text)


def test_comparing_a_string_with_a_number_is_an_error_that_says_so() -> None:
    with pytest.raises(SpecError, match=r"compares 'train' \(str\) with 5 \(int\)"):
        passes("metadata:split >= 5", "train")
    with pytest.raises(SpecError, match=r"compares 3 \(int\) with 'high' \(str\)"):
        passes("metadata:x < high", np.int64(3))


# --- resolving -----------------------------------------------------------------------------


class Table:
    """Serves columns of numbers, and keeps account of who was asked about what."""

    def __init__(self, **columns: Sequence[int]) -> None:
        self.columns = columns
        self.asked: dict[str, list[int]] = {}

    def __call__(self, ordinals: NDArray[np.int64], item: Filter) -> list[int]:
        assert item.column is not None
        name = str(item.column.selector.path)
        self.asked.setdefault(name, []).extend(ordinals.tolist())
        return [self.columns[name][i] for i in ordinals]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 50),
)
def test_filters_apply_in_order_and_only_to_what_is_left(
    rows: list[tuple[int, int]], a: int, b: int, block_size: int
) -> None:
    table = Table(a=[row[0] for row in rows], b=[row[1] for row in rows])
    filters = [parse_filter(f"metadata:a >= {a}"), parse_filter(f"metadata:b < {b}")]
    found = resolve(len(rows), filters, table, block_size=block_size)
    left = [i for i, row in enumerate(rows) if row[0] >= a]
    assert found == Selection.of([i for i in left if rows[i][1] < b])
    assert table.asked.get("a", []) == list(range(len(rows)))
    assert table.asked.get("b", []) == left


def test_without_filters_nothing_is_read() -> None:
    def unread(ordinals: Any, item: Filter) -> Any:
        raise AssertionError("read")

    assert resolve(5, [], unread) == Selection.all_of(5)
    assert resolve(0, [parse_filter("ordinal < 3")], unread) == Selection.of([])


def selected(root: Path, *where: str) -> Selection:
    spec = checked(
        ExportSpec,
        {"dataset": str(root), "output": "unused", "columns": "field:samples", "where": where},
    )
    return select(spec, pin_inputs(spec))


@pytest.fixture(scope="module")
def table(iq_root: Path) -> list[tuple[int, sds.Record, sds.AnnotationRecord]]:
    """Every capture with its row of `review-v1`, read the plain way."""
    dataset = sds.open(str(iq_root))
    reviews = dataset.annotations["review-v1"]
    return [(i, dataset[i], reviews[i]) for i in range(len(dataset))]


FILTERS: dict[tuple[str, ...], Callable[..., Any]] = {
    ("metadata:snr_db >= 5",): lambda i, record, review: record.metadata["snr_db"] >= 5,
    ("metadata:split == train",): lambda i, record, review: record.metadata["split"] == "train",
    ('metadata:receiver.antenna in ["dipole", "horn"]',): (
        lambda i, record, review: record.metadata["receiver"]["antenna"] in ("dipole", "horn")
    ),
    ("metadata:receiver.gain_db < 0", "metadata:samples_per_symbol != 8"): (
        lambda i, record, review: (
            record.metadata["receiver"]["gain_db"] < 0
            and record.metadata["samples_per_symbol"] != 8
        )
    ),
    ("metadata:roll_off?0 > 0.2",): (
        lambda i, record, review: record.metadata.get("roll_off", 0) > 0.2
    ),
    ("annotation:review-v1 status success",): (
        lambda i, record, review: review.status == sds.AnnotationStatus.SUCCESS
    ),
    ("annotation:review-v1 status skipped,failed",): (
        lambda i, record, review: review.status != sds.AnnotationStatus.SUCCESS
    ),
    ("annotation:review-v1 status success", "annotation:review-v1/quality > 0.5"): (
        lambda i, record, review: review.values.get("quality", 0) > 0.5
    ),
    ("annotation:review-v1/quality?-1 <= 0.5",): (
        lambda i, record, review: review.values.get("quality", -1) <= 0.5
    ),
    ("scene == scene-00000017",): lambda i, record, review: record.scene_id == "scene-00000017",
    ("ordinal >= 37", "ordinal < 121"): lambda i, record, review: 37 <= i < 121,
    ('id in ["capture-00000003", "capture-00000150"]',): lambda i, record, review: i in (3, 150),
}


@pytest.mark.parametrize("where", FILTERS, ids=" and ".join)
def test_selecting_is_a_plain_loop(
    where: tuple[str, ...],
    iq_root: Path,
    table: list[tuple[int, sds.Record, sds.AnnotationRecord]],
) -> None:
    expected = [row[0] for row in table if FILTERS[where](*row)]
    assert 0 < len(expected) < len(table)
    assert selected(iq_root, *where).ordinals().tolist() == expected


def test_a_missing_value_is_an_error_where_no_earlier_filter_spares_it(iq_root: Path) -> None:
    with pytest.raises(MissingValueError, match=r"has no metadata key 'roll_off'.*metadata:roll"):
        selected(iq_root, "metadata:roll_off > 0.2")
    with pytest.raises(MissingValueError, match=r"annotation set 'review-v1' \(status skipped\)"):
        selected(iq_root, "annotation:review-v1/quality > 0.5")


def test_a_status_is_asked_for_before_values_whatever_the_order(iq_root: Path) -> None:
    filters = ("annotation:review-v1/quality > 0.5", "annotation:review-v1 status success")
    assert selected(iq_root, *filters) == selected(iq_root, *reversed(filters))


def test_values_of_another_kind_are_an_error(iq_root: Path) -> None:
    with pytest.raises(SpecError, match=r"'metadata:split >= 5' compares '\w+' \(str\) with 5"):
        selected(iq_root, "metadata:split >= 5")
    with pytest.raises(SpecError, match="not a single value; name a key inside it"):
        selected(iq_root, "metadata:receiver == 5")


def test_selecting_nothing_is_an_error_that_repeats_the_filters(iq_root: Path) -> None:
    with pytest.raises(SpecError, match=r"no record of .* \(ordinal < 5 and ordinal > 5\)"):
        selected(iq_root, "ordinal < 5", "ordinal > 5")


def test_selecting_never_opens_a_data_shard(iq_root: Path, iq_copy: Path) -> None:
    shutil.rmtree(iq_copy / "objects" / "data")
    where = (
        "annotation:review-v1 status success",
        "annotation:review-v1/quality > 0.5",
        "metadata:receiver.gain_db < 0",
        "scene != scene-00000001",
        'id != "capture-00000000"',
        "ordinal > 10",
    )
    found = selected(iq_copy, *where)
    assert len(found) > 10
    assert found == selected(iq_root, *where)
