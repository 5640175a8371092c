"""Block-shuffle: each record once an epoch, shards one after the other, the same for everyone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signal_batch.iteration import training_batches
from signal_batch.pins import pin_dataset
from signal_batch.selection import Selection
from signal_batch.shuffling import BlockShuffle


def order(selection: Selection, blocks: BlockShuffle | None, **options: Any) -> list[int]:
    settings_ = {"batch_size": 1, "seed": 3, "epochs": 1} | options
    batches = training_batches(
        selection, lambda ordinals: {"ordinals": ordinals}, block_shuffle=blocks, **settings_
    )
    return [int(o) for batch in batches for o in batch["ordinals"]]


@st.composite
def selections(draw: st.DrawFn) -> tuple[Selection, BlockShuffle]:
    total = draw(st.integers(1, 60))
    chosen = draw(st.sets(st.integers(0, total - 1), min_size=1))
    starts = sorted({0} | draw(st.sets(st.integers(0, total - 1), max_size=6)))
    return Selection.of(sorted(chosen)), BlockShuffle(starts, draw(st.integers(1, 70)))


@settings(max_examples=60, deadline=None)
@given(selections(), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_each_record_once_an_epoch(
    case: tuple[Selection, BlockShuffle], epochs: int, seed: int
) -> None:
    selection, blocks = case
    found = order(selection, blocks, epochs=epochs, seed=seed)
    expected = selection.ordinals().tolist()
    for epoch in range(epochs):
        assert sorted(found[epoch * len(expected) : (epoch + 1) * len(expected)]) == expected


def test_a_shard_is_needed_during_one_stretch_only() -> None:
    blocks = BlockShuffle(range(0, 1000, 100), 200)
    shards = [ordinal // 100 for ordinal in order(Selection.all_of(1000), blocks)]
    for shard in range(10):
        places = [place for place, found in enumerate(shards) if found == shard]
        assert max(places) - min(places) < 2 * 200
    globally = [ordinal // 100 for ordinal in order(Selection.all_of(1000), None)]
    assert max(p for p, s in enumerate(globally) if s == 0) > 900


def test_orders_differ_by_epoch_and_seed_and_are_repeatable() -> None:
    blocks, selection = BlockShuffle(range(0, 90, 10), 25), Selection.all_of(90)
    two = order(selection, blocks, epochs=2)
    assert two == order(selection, blocks, epochs=2)
    assert two[:90] != two[90:]
    assert two[:90] != order(selection, blocks, seed=4)


def test_ranks_share_every_global_step_and_a_cursor_resumes() -> None:
    blocks, selection = BlockShuffle([0, 40, 70], 30), Selection.all_of(96)
    whole = order(selection, blocks, batch_size=8)
    ranks = [order(selection, blocks, batch_size=4, rank=rank, world=2) for rank in (0, 1)]
    for step in range(12):
        parts = [rank[step * 4 : (step + 1) * 4] for rank in ranks]
        assert sorted(parts[0] + parts[1]) == sorted(whole[step * 8 : (step + 1) * 8])
    assert order(selection, blocks, batch_size=8, cursor=40) == whole[40:]


def test_blocks_are_the_shards_of_the_dataset(iq_root: Path) -> None:
    pinned = pin_dataset(str(iq_root))
    blocks = BlockShuffle.of(pinned, buffer_bytes=pinned.pin.stored_bytes // 4)
    assert blocks.starts.tolist() == [0, 40, 80, 120, 160]
    assert blocks.buffer_records == 50
    pinned.close()


def test_what_is_no_block_shuffle() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        BlockShuffle([0], 0)
    with pytest.raises(ValueError, match="ascending"):
        BlockShuffle(np.array([5, 5]), 3)
