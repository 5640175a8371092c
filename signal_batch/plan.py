"""Cutting the selected ordinals into parts and shards: pure arithmetic, no input or output.

A part is a run of consecutive selected records that becomes exactly one Parquet file. Parts
depend on the selection and the number of rows a part, never on workers. A shard is the run of
parts that one task works through; grouping them may differ between attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from signal_batch.errors import SpecError
from signal_batch.selection import Selection

#: Stored bytes that a part reads at most, and at least before a selection is cut further.
MOST_READ = 1 << 30
LEAST_READ = 16 << 20
FEWEST_PARTS = 8
#: Starting a worker costs a second or two, so a shard is worth this much stored data.
SHARD_BYTES = 1 << 30
#: As many tasks as a run's page can show.
MOST_SHARDS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file to be: positions `[first, first + rows)` of the selection."""

    index: int
    first: int
    rows: int
    first_ordinal: int
    last_ordinal: int

    @property
    def name(self) -> str:
        return f"part-{self.index:05d}"


@dataclass(frozen=True, slots=True)
class Shard:
    """The parts that one task works through, in order."""

    number: int
    of: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def label(self) -> str:
        """How people see it: `shard 3 of 8, ordinals 3072-4095`."""
        first, last = self.parts[0].first_ordinal, self.parts[-1].last_ordinal
        return f"shard {self.number} of {self.of}, ordinals {first}-{last}"


def rows_a_part(
    *, selected: int, part_bytes: int, row_bytes: float, record_bytes: float, batch_rows: int
) -> int:
    """Rows of a part.

    At most about `part_bytes` are written (`row_bytes` is the Arrow size of a row) and at most
    `MOST_READ` bytes are read for it (`record_bytes` is the stored size of a record), which is
    what a killed worker loses. A selection gives `FEWEST_PARTS` parts if each still reads
    `LEAST_READ`, so that workers have something to share. The result is a multiple of the batch
    where a part holds at least one, so that batches, which never cross parts, are full.
    """
    written = part_bytes / max(row_bytes, 1.0)
    shared = max(LEAST_READ / record_bytes, selected / FEWEST_PARTS)
    rows = max(1, int(min(written, MOST_READ / record_bytes, shared)))
    return rows - rows % batch_rows if rows >= batch_rows else rows


def plan_parts(selection: Selection, rows: int) -> tuple[Part, ...]:
    """Cut a selection into parts of `rows` records, the last one shorter.

    Every selected ordinal is in exactly one part, and parts are in ordinal order.
    """
    if rows < 1:
        raise SpecError(f"a part needs at least one row, not {rows}")
    parts = []
    for index, first in enumerate(range(0, len(selection), rows)):
        count = min(rows, len(selection) - first)
        parts.append(
            Part(
                index=index,
                first=first,
                rows=count,
                first_ordinal=selection.ordinal_at(first),
                last_ordinal=selection.ordinal_at(first + count - 1),
            )
        )
    return tuple(parts)


def group_into_shards(
    parts: Sequence[Part], workers: int, record_bytes: float
) -> tuple[Shard, ...]:
    """Group parts, in order, into shards, even to within one part.

    One shard a worker for small jobs, more for large ones, so that workers finish together.
    """
    stored = record_bytes * sum(part.rows for part in parts)
    wanted = max(workers, int(stored // SHARD_BYTES))
    count = min(len(parts), max(workers, min(MOST_SHARDS, wanted)))
    bounds = [len(parts) * number // count for number in range(count + 1)] if count else [0]
    return tuple(
        Shard(number + 1, count, tuple(parts[start:stop]))
        for number, (start, stop) in enumerate(pairwise(bounds))
    )
