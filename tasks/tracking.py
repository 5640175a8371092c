"""How far a run is: one updating progress artifact, and whoever else listens.

Workers report to the process that started them, so the progress of a run is looked up there by
the run's id; a task that runs on another machine finds none and reports to nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

Listener = Callable[..., None]
UPDATE_EVERY_S = 2.0

_runs: dict[str, RunProgress] = {}
_listeners: list[Listener] = []


class RunProgress:
    """Rows done of a run; counting is safe from any thread."""

    def __init__(self, done: int, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self.restart(done)

    def restart(self, done: int) -> None:
        """Count on from so many rows, which may be fewer than were counted."""
        with self._lock:
            self._done = self._first = done
            self._since = time.monotonic()
        for listener in _listeners:
            listener(done, total=self.total)

    def add(self, rows: int) -> None:
        with self._lock:
            self._done += rows
        for listener in _listeners:
            listener(rows)

    @property
    def percent(self) -> float:
        with self._lock:
            return min(100.0, max(0.0, 100.0 * self._done / max(1, self.total)))

    @property
    def words(self) -> str:
        """How far and how fast, such as `3,200 of 6,400 records, 410 records/s`."""
        with self._lock:
            new, seconds = self._done - self._first, time.monotonic() - self._since
            shown = f"{self._done:,} of {self.total:,} records"
        return f"{shown}, {new / max(seconds, 1e-9):,.0f} records/s" if new > 0 else shown


@contextmanager
def tracked(run_id: str, done: int, total: int, *, key: str) -> Iterator[RunProgress]:
    """Keep the run's progress artifact up to date while the block runs."""
    progress = _runs[run_id] = RunProgress(done, total)
    artifact = cast(
        UUID,
        create_progress_artifact(progress.percent, key=key, description=progress.words),
    )
    stop = threading.Event()
    # With this run's settings and client; a new thread has neither.
    update = partial(copy_context().run, _update, artifact, progress, stop)
    updater = threading.Thread(target=update, daemon=True)
    updater.start()
    try:
        yield progress
    finally:
        stop.set()
        updater.join()
        _runs.pop(run_id, None)
        _publish(artifact, progress)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener(rows, total=None)` for the runs of this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report_rows(run_id: str, rows: int) -> None:
    """Count rows for a run, if that run is tracked in this process."""
    if progress := _runs.get(run_id):
        progress.add(rows)


def _update(artifact: UUID, progress: RunProgress, stop: threading.Event) -> None:
    shown = progress.percent
    while not stop.wait(UPDATE_EVERY_S):
        if progress.percent != shown:
            shown = progress.percent
            _publish(artifact, progress)


def _publish(artifact: UUID, progress: RunProgress) -> None:
    # A server that does not answer must not fail the run it merely shows.
    with suppress(Exception):
        update_progress_artifact(
            artifact_id=artifact, progress=progress.percent, description=progress.words
        )
