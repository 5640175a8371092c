"""Overlapped steps: order, the bound in bytes, errors at their place, nothing left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from signal_batch.stages import overlapped


def test_items_come_in_order() -> None:
    with overlapped(iter(range(1000)), lambda item: 1, 10) as items:
        assert list(items) == list(range(1000))


def test_no_more_than_the_bound_waits() -> None:
    produced = []

    def produce() -> Iterator[int]:
        for size in (5, 5, 5, 5):
            produced.append(size)
            yield size

    with overlapped(produce(), lambda item: item, 10) as items:
        time.sleep(0.2)
        assert len(produced) == 3  # two wait, the third has no room
        assert list(items) == [5, 5, 5, 5]


def test_an_item_larger_than_the_bound_passes() -> None:
    with overlapped(iter([100, 200]), lambda item: item, 10) as items:
        assert list(items) == [100, 200]


def test_production_goes_on_while_the_consumer_works() -> None:
    second = threading.Event()

    def produce() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    with overlapped(produce(), lambda item: 1, 10) as items:
        assert next(items) == 1
        assert second.wait(5)


def test_an_error_comes_after_what_was_produced() -> None:
    def produce() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    with overlapped(produce(), lambda item: 1, 10) as items:
        assert next(items) == 1
        with pytest.raises(KeyError, match="broken"):
            next(items)


def test_leaving_early_stops_the_producer_and_closes_it() -> None:
    closed = threading.Event()

    def produce() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    before = threading.active_count()
    with overlapped(produce(), lambda item: 1, 3) as items:
        assert next(items) == 1
    assert closed.is_set()
    assert threading.active_count() == before


def test_an_error_of_the_consumer_stops_the_producer() -> None:
    before = threading.active_count()

    def consume() -> None:
        with overlapped(iter(range(100)), lambda item: 1, 3) as items:
            raise RuntimeError(f"consumer at {next(items)}")

    with pytest.raises(RuntimeError, match="consumer at 0"):
        consume()
    assert threading.active_count() == before
