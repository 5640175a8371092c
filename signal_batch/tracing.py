"""Which records a step of a training run saw, and which steps saw a record.

Worked out from the run's claim alone, without its checkpoints: the global order is a pure function
of the run key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from signal_batch.errors import InputError
from signal_batch.pins import reopen
from signal_batch.reading import metadata_rows
from signal_batch.training_job import TrainJob
from signal_batch.training_run import order_of

_BLOCK = 4096


class Seen(NamedTuple):
    """A record at its place in the global order."""

    position: int
    ordinal: int
    id: str


def records_of(job: TrainJob, step: int) -> list[Seen]:
    """The records of a global step, counted from 1, in their order.

    Raises `InputError` for a step that the run has not.
    """
    total = job.plan.total_steps
    if not 1 <= step <= total:
        raise InputError(f"step {step} is none of this run, which has steps 1 to {total:,}")
    size = job.spec.batch_size
    places = range((step - 1) * size, step * size)
    order = order_of(job)
    chosen = np.array([order[place] for place in places], np.int64)
    ordinals = job.sides["train"].ordinals_at(chosen)
    with closing(reopen(job.pin)) as pinned:
        rows = metadata_rows(pinned.dataset, ordinals)
    return [
        Seen(place, int(ordinal), row.id)
        for place, ordinal, row in zip(places, ordinals, rows, strict=True)
    ]


def steps_of(job: TrainJob, record: str) -> list[int]:
    """The global steps, counted from 1, that see a record, named by its id.

    Raises `InputError` for a record that is not on the training side.
    """
    position = _position_of(job, record)
    order = order_of(job)
    size = job.spec.batch_size
    total = job.plan.total_steps * size
    return [place // size + 1 for place in range(total) if order[place] == position]


def _position_of(job: TrainJob, record: str) -> int:
    for first, ids in _ids(job):
        if record in ids:
            return first + ids.index(record)
    raise InputError(
        f"record {record!r} is not among the {len(job.sides['train']):,} that this run trains on"
    )


def _ids(job: TrainJob) -> Iterator[tuple[int, list[str]]]:
    """Ids of the training side, block by block, with the position that a block begins at."""
    selection = job.sides["train"]
    with closing(reopen(job.pin)) as pinned:
        for first in range(0, len(selection), _BLOCK):
            ordinals = selection.slice(first, _BLOCK).ordinals()
            yield first, [row.id for row in metadata_rows(pinned.dataset, ordinals)]
