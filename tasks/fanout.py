"""Running many tasks, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from prefect.futures import PrefectFuture, as_completed


def run_bounded(
    submits: Mapping[str, Callable[[], PrefectFuture[Any]]], limit: int
) -> Iterator[tuple[str, PrefectFuture[Any]]]:
    """Submit named tasks, at most `limit` unfinished at a time; yield each as it finishes.

    A task that is submitted is running, so a run's page shows who works and who waits. Nothing
    new is submitted once the consumer stops.
    """
    waiting = iter(submits.items())
    running = {submit(): label for label, submit in islice(waiting, limit)}
    while running:
        finished = next(iter(as_completed(list(running))))
        yield running.pop(finished), finished
        running |= {submit(): label for label, submit in islice(waiting, 1)}
