"""Letting two steps of a pipeline overlap, with a bound on the bytes between them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


@contextmanager
def overlapped(
    items: Iterator[T], size_of: Callable[[T], int], max_bytes: int
) -> Iterator[Iterator[T]]:
    """Produce `items` in a thread of its own while the block consumes them.

    At most `max_bytes` wait between the two, by `size_of`, or one item that is larger than that.
    What producing raises is raised to the consumer, at its place. On the way out the producer is
    stopped and waited for, and `items` is closed if it is a generator.
    """
    stage = _Stage(items, size_of, max_bytes)
    stage.thread.start()
    try:
        yield stage.take()
    finally:
        stage.stop()


class _Stage(Generic[T]):
    def __init__(self, items: Iterator[T], size_of: Callable[[T], int], max_bytes: int) -> None:
        self._items = items
        self._size_of = size_of
        self._max_bytes = max_bytes
        self._ready: deque[T] = deque()
        self._waiting_bytes = 0
        self._error: BaseException | None = None
        self._ended = self._stopping = False
        self._change = threading.Condition()
        self.thread = threading.Thread(target=self._produce, name="produce", daemon=True)

    def take(self) -> Iterator[T]:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._ready.popleft()
                self._waiting_bytes -= self._size_of(item)
                self._change.notify_all()
            yield item

    def stop(self) -> None:
        with self._change:
            self._stopping = True
            self._change.notify_all()
        self.thread.join()

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as exc:
            self._error = exc
        finally:
            try:
                close = getattr(self._items, "close", None)
                if close is not None:
                    close()
            except BaseException as exc:
                self._error = self._error or exc
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _put(self, item: T) -> bool:
        size = self._size_of(item)
        with self._change:
            self._change.wait_for(lambda: self._stopping or self._has_room(size))
            if self._stopping:
                return False
            self._ready.append(item)
            self._waiting_bytes += size
            self._change.notify_all()
            return True

    def _has_room(self, size: int) -> bool:
        return not self._ready or self._waiting_bytes + size <= self._max_bytes
