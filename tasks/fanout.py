"""Running many tasks, a bounded number at a time, on whatever task runner the flow has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from prefect.futures import PrefectFuture, as_completed


def run_bounded(
    submits: Iterable[Callable[[], PrefectFuture[Any]]], limit: int
) -> Iterator[PrefectFuture[Any]]:
    """Submit tasks, at most `limit` unfinished at a time; yield each future as it finishes.

    A task that is submitted is running, so a run's page shows who works and who waits. Nothing
    new is submitted once the consumer stops.
    """
    waiting = iter(submits)
    running = [submit() for submit in islice(waiting, limit)]
    while running:
        finished = next(iter(as_completed(running)))
        running.remove(finished)
        yield finished
        running += [submit() for submit in islice(waiting, 1)]
