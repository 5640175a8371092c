"""Parts cover a selection exactly once; shards cover the parts; neither knows the workers."""

from __future__ import annotations

import inspect
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signal_batch import plan
from signal_batch.errors import SpecError
from signal_batch.plan import Part, group_into_shards, plan_parts, rows_a_part
from signal_batch.selection import Selection

ordinal_sets = st.lists(st.integers(0, 200), unique=True).map(sorted)


@given(ordinal_sets, st.integers(1, 220))
def test_every_selected_record_is_in_exactly_one_part_in_order(
    ordinals: list[int], rows: int
) -> None:
    selection = Selection.of(ordinals)
    parts = plan_parts(selection, rows)
    covered = []
    for index, part in enumerate(parts):
        held = selection.slice(part.first, part.rows).ordinals().tolist()
        assert part.index == index
        assert len(held) == part.rows > 0
        assert (part.first_ordinal, part.last_ordinal) == (held[0], held[-1])
        covered += held
    assert covered == ordinals
    assert [part.rows for part in parts[:-1]] == [rows] * (len(parts) - 1 if parts else 0)
    assert len(parts) == -(-len(ordinals) // rows)


def test_parts_are_planned_without_knowing_the_workers() -> None:
    assert list(inspect.signature(plan_parts).parameters) == ["selection", "rows"]
    assert "workers" not in inspect.signature(rows_a_part).parameters


@pytest.mark.parametrize("rows", [0, -1])
def test_a_part_has_rows(rows: int) -> None:
    with pytest.raises(SpecError, match=f"at least one row, not {rows}"):
        plan_parts(Selection.all_of(3), rows)


def test_names_sort_in_order() -> None:
    names = [Part(index, 0, 1, 0, 0).name for index in (0, 9, 10, 99_999)]
    assert names == ["part-00000", "part-00009", "part-00010", "part-99999"]


def rows_of(
    *,
    selected: int = 10**12,
    part_bytes: int = 1 << 50,
    row_bytes: float = 1,
    record_bytes: float = 1e-6,
    batch_rows: int = 1,
) -> int:
    """Rows of a part where, unless they are given, nothing limits them."""
    return rows_a_part(
        selected=selected,
        part_bytes=part_bytes,
        row_bytes=row_bytes,
        record_bytes=record_bytes,
        batch_rows=batch_rows,
    )


@pytest.mark.parametrize(
    ("part_bytes", "row_bytes", "batch_rows", "rows"),
    [
        (1000, 10, 7, 98),
        (1000, 10, 100, 100),
        (1000, 10, 101, 100),
        (1000, 10, 1, 100),
        (1000, 3000, 64, 1),
        (1000, 0, 64, 960),
        (128 << 20, 65.5, 256, 2_049_024),
    ],
)
def test_parts_hold_whole_batches_where_they_hold_one(
    part_bytes: int, row_bytes: float, batch_rows: int, rows: int
) -> None:
    assert rows_of(part_bytes=part_bytes, row_bytes=row_bytes, batch_rows=batch_rows) == rows


def test_a_part_is_no_more_than_a_worker_can_afford_to_lose() -> None:
    record_bytes = 64 << 10
    assert rows_of(record_bytes=record_bytes) == plan.MOST_READ // record_bytes


def test_a_small_selection_is_still_shared_out() -> None:
    """Into `FEWEST_PARTS`, as long as each of them reads `LEAST_READ`."""
    record_bytes = 1 << 20
    least = plan.LEAST_READ >> 20
    ample = least * plan.FEWEST_PARTS + plan.FEWEST_PARTS
    assert rows_of(selected=ample, record_bytes=record_bytes) == ample // plan.FEWEST_PARTS
    assert rows_of(selected=least * 2, record_bytes=record_bytes) == least
    assert rows_of(selected=1, record_bytes=record_bytes) == least


@given(
    selected=st.integers(1, 10**9),
    part_bytes=st.integers(1, 1 << 40),
    row_bytes=st.floats(0, 1e9),
    record_bytes=st.floats(1, 1e12),
    batch_rows=st.integers(1, 10**6),
)
def test_a_part_is_never_empty_nor_larger_than_asked(
    selected: int, part_bytes: int, row_bytes: float, record_bytes: float, batch_rows: int
) -> None:
    rows = rows_a_part(
        selected=selected,
        part_bytes=part_bytes,
        row_bytes=row_bytes,
        record_bytes=record_bytes,
        batch_rows=batch_rows,
    )
    assert rows >= 1
    assert rows == 1 or rows * max(row_bytes, 1) <= part_bytes
    assert rows == 1 or rows * record_bytes <= plan.MOST_READ
    assert rows < batch_rows or rows % batch_rows == 0


@given(
    st.integers(0, 400),
    st.integers(1, 40),
    st.sampled_from([1.0, 1e6, 1e8, 1e10]),
)
def test_shards_cover_all_parts_in_order_and_evenly(
    count: int, workers: int, record_bytes: float
) -> None:
    parts = plan_parts(Selection.all_of(3 * count), 3)
    shards = group_into_shards(parts, workers, record_bytes)
    assert [part for shard in shards for part in shard.parts] == list(parts)
    sizes = [len(shard.parts) for shard in shards]
    assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)
    assert [shard.number for shard in shards] == list(range(1, len(shards) + 1))
    assert {shard.of for shard in shards} <= {len(shards)}
    assert len(shards) >= min(workers, count)
    assert len(shards) <= max(workers, plan.MOST_SHARDS)
    assert sum(shard.rows for shard in shards) == 3 * count


def test_a_large_job_has_a_shard_for_every_gibibyte_up_to_a_limit() -> None:
    parts = plan_parts(Selection.all_of(10_000), 10)
    gibibyte = float(1 << 30)
    assert len(group_into_shards(parts, 2, gibibyte / 10_000)) == 2
    assert len(group_into_shards(parts, 2, 20 * gibibyte / 10_000)) == 20
    assert len(group_into_shards(parts, 2, 9000 * gibibyte / 10_000)) == plan.MOST_SHARDS
    assert len(group_into_shards(parts[:3], 2, gibibyte)) == 3


def test_what_is_left_of_a_job_is_grouped_anew() -> None:
    """A resumed job has gaps between its parts."""
    parts = plan_parts(Selection.all_of(100), 10)
    left = [parts[1], parts[4], parts[5], parts[9]]
    shards = group_into_shards(left, 2, 1.0)
    assert [shard.parts for shard in shards] == [(parts[1], parts[4]), (parts[5], parts[9])]
    assert [shard.label for shard in shards] == [
        "shard 1 of 2, ordinals 10-49",
        "shard 2 of 2, ordinals 50-99",
    ]


def test_ten_million_records_in_a_million_runs() -> None:
    starts = np.arange(0, 12_000_000, 12)
    selection = Selection(np.stack((starts, starts + 10), axis=1))
    parts = plan_parts(selection, 4096)
    assert len(parts) == -(-10_000_000 // 4096)
    assert sum(part.rows for part in parts) == 10_000_000
    assert (parts[0].first_ordinal, parts[-1].last_ordinal) == (0, 11_999_997)
    assert all(a.last_ordinal < b.first_ordinal for a, b in pairwise(parts))
