"""Shard objects and their sizes, opened and asked for once.

Two things that signal-dataset does on every call are done once here: opening a shard
(`PooledShardStore`) and asking for an object's size (`MemoObjectStore`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import signal_dataset as sds
from array_record.python.array_record_module import ArrayRecordReader
from signal_dataset.storage import ArrayRecordShardStore
from signal_dataset.storage.contracts import ObjectInfo, ObjectStore, ObjectVersion, ShardStore
from signal_dataset.storage.staging import ShardStagingArea, default_staging

from signal_batch.failures import native_error

T = TypeVar("T")

_SIZES_KEPT = 1 << 16
_MUTABLE_OBJECTS = ("/root.json", "/annotations/catalog.json")
_OPTIONAL_STORE_METHODS = ("download_to_fileobj", "indexed_uri", "list")


class _Key(NamedTuple):
    uri: str
    generation: int | None
    options: str
    buffer_size: int | None


class _Open:
    """An open reader, how many records it has and how many reads are going through it."""

    __slots__ = ("reader", "records", "retired", "staged", "users")

    def __init__(self, reader: Any, staged: ExitStack) -> None:
        self.reader = reader
        self.records = int(reader.num_records())
        self.staged = staged
        self.users = 1
        self.retired = False

    def close(self) -> None:
        # A reader that met damage raises that error again on close.
        with self.staged, suppress(RuntimeError):
            self.reader.close()


class PooledShardStore(ShardStore):
    """Keeps ArrayRecord readers open between reads, the most recently used ones first.

    Threads share a reader. A reader that is pushed out of the pool while it is being read is
    closed by the last read to leave it. On a backend that stages shards as local files, up to
    `capacity` of them occupy temporary storage.
    """

    def __init__(
        self,
        *,
        objects: ObjectStore | None = None,
        root: str | None = None,
        staging: ShardStagingArea | None = None,
        capacity: int = 64,
    ) -> None:
        """Stage through the store that the dataset at `root` is opened with, if one is given."""
        if capacity < 1:
            raise ValueError("capacity must be at least one reader")
        if staging is None:
            staging = default_staging(objects, root=root, max_open_shards=capacity)
        self._staging = staging
        self._writer = ArrayRecordShardStore(staging=self._staging)
        self._capacity = capacity
        self._open: OrderedDict[_Key, _Open] = OrderedDict()
        self._opening: dict[_Key, threading.Lock] = {}
        # Guards the two tables above; never held while a shard is opened, read or closed.
        self._lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("open shard readers cannot be pickled; open the dataset again instead")

    def write(self, path: Path, records: Iterable[bytes], *, options: str) -> int:
        return self._writer.write(path, records, options=options)

    def read(
        self,
        uri: str,
        index: int,
        *,
        generation: int | None = None,
        options: str,
        file_reader_buffer_size: int | None = None,
    ) -> bytes:
        return self.read_many(
            uri,
            (index,),
            generation=generation,
            options=options,
            file_reader_buffer_size=file_reader_buffer_size,
        )[0]

    def read_many(
        self,
        uri: str,
        indices: Sequence[int],
        *,
        generation: int | None = None,
        options: str,
        file_reader_buffer_size: int | None = None,
    ) -> tuple[bytes, ...]:
        """Payloads in the order of `indices`, which may repeat.

        Raises `IndexError` for an index the shard does not have, `FileNotFoundError` and other
        `OSError`s as the system reports them, and `sds.CorruptDatasetError` for a damaged shard.
        """
        if not indices:
            return ()
        key = _Key(uri, generation, options, file_reader_buffer_size)
        try:
            return self._read(key, indices)
        except sds.CorruptDatasetError:
            if not self._discard_copy(key):
                raise
            return self._read(key, indices)

    def _read(self, key: _Key, indices: Sequence[int]) -> tuple[bytes, ...]:
        uri = key.uri
        with self._reader(key) as entry:
            # Checked here because the binding makes up records for a shard without any.
            for index in (min(indices), max(indices)):
                if not 0 <= index < entry.records:
                    raise IndexError(f"shard {uri} has {entry.records} records, no index {index}")
            payloads = entry.reader.read(list(indices))
        if len(payloads) != len(indices):
            raise sds.CorruptDatasetError(f"shard {uri} did not return every requested record")
        return tuple(payloads)

    def count(
        self,
        uri: str,
        *,
        generation: int | None = None,
        options: str,
        file_reader_buffer_size: int | None = None,
    ) -> int:
        key = _Key(uri, generation, options, file_reader_buffer_size)
        with self._reader(key) as entry:
            return entry.records

    def read_ahead(self, uri: str, *, generation: int | None = None) -> None:
        """Say that a shard will be read soon; where shards are not downloaded, nothing is done."""
        prefetch = getattr(self._staging, "prefetch", None)
        if prefetch is not None:
            prefetch(uri, generation=generation)

    def close(self) -> None:
        """Close every reader that is not being read; a later read opens its shard again."""
        with self._lock:
            entries = list(self._open.values())
            self._open.clear()
            unused = [entry for entry in entries if self._retire(entry)]
        for entry in unused:
            entry.close()

    @contextmanager
    def _reader(self, key: _Key) -> Iterator[_Open]:
        entry = self._acquire(key)
        try:
            yield entry
        except RuntimeError as exc:
            error = native_error(exc, key.uri)
            if not isinstance(error, IndexError):
                self._discard(key, entry)
            raise error from exc
        finally:
            self._release(entry)

    def _acquire(self, key: _Key) -> _Open:
        entry = self._reuse(key)
        if entry is not None:
            return entry
        with self._lock:
            gate = self._opening.setdefault(key, threading.Lock())
        with gate:
            entry = self._reuse(key)
            if entry is not None:
                return entry
            try:
                entry = self._open_reader(key)
                self._admit(key, entry)
            finally:
                with self._lock:
                    self._opening.pop(key, None)
        return entry

    def _reuse(self, key: _Key) -> _Open | None:
        with self._lock:
            entry = self._open.get(key)
            if entry is not None:
                self._open.move_to_end(key)
                entry.users += 1
            return entry

    def _open_reader(self, key: _Key) -> _Open:
        with ExitStack() as staged:
            path = staged.enter_context(self._staging.stage(key.uri, generation=key.generation))
            extra = {} if key.buffer_size is None else {"file_reader_buffer_size": key.buffer_size}
            reader = ArrayRecordReader(path, key.options, **extra)
            _raise_open_failure(reader, key.uri)
            return _Open(reader, staged.pop_all())

    def _admit(self, key: _Key, entry: _Open) -> None:
        with self._lock:
            # A failed opening may have let two threads through, each with a gate of its own.
            replaced = self._open.pop(key, None)
            self._open[key] = entry
            pushed = [] if replaced is None else [replaced]
            while len(self._open) > self._capacity:
                pushed.append(self._open.popitem(last=False)[1])
            unused = [item for item in pushed if self._retire(item)]
        for item in unused:
            item.close()

    def _discard(self, key: _Key, entry: _Open) -> None:
        """Never hand a reader out again that met damage: its state is not documented."""
        with self._lock:
            if self._open.get(key) is entry:
                del self._open[key]
            entry.retired = True

    def _discard_copy(self, key: _Key) -> bool:
        """Whether a damaged shard was a local copy that may be worse than the object itself."""
        discard = getattr(self._staging, "discard", None)
        return discard is not None and bool(discard(key.uri, generation=key.generation))

    def _release(self, entry: _Open) -> None:
        with self._lock:
            entry.users -= 1
            unused = entry.retired and entry.users == 0
        if unused:
            entry.close()

    @staticmethod
    def _retire(entry: _Open) -> bool:
        """Mark as pushed out; whether nobody is reading through it, so that it can be closed."""
        entry.retired = True
        return entry.users == 0


def _raise_open_failure(reader: Any, uri: str) -> None:
    """The binding's constructor never raises; a file it could not open fails at the first read."""
    if reader.ok():
        return
    try:
        reader.read([0])
    except RuntimeError as exc:
        raise native_error(exc, uri) from exc
    raise sds.CorruptDatasetError(f"shard {uri} could not be opened")


class MemoObjectStore(ObjectStore):
    """Asks for the size of an immutable object once; everything else goes to the store within."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._known: dict[tuple[str, int | None], tuple[ObjectInfo, str]] = {}
        self.supports_compare_and_swap = objects.supports_compare_and_swap
        # Set on the instance: a runtime-checked protocol does not see through __getattr__.
        for name in _OPTIONAL_STORE_METHODS:
            if hasattr(objects, name):
                setattr(self, name, getattr(objects, name))

    def info(self, uri: str, *, generation: int | None = None) -> ObjectInfo:
        return self._look_up(uri, generation)[0]

    def identity(self, uri: str, *, generation: int | None = None) -> tuple[int, str]:
        """Size of an object, and what tells its bytes from others of that size: ETag, generation.

        Empty where the store tells neither along with the size.
        """
        info, version = self._look_up(uri, generation)
        return info.size, version

    def _look_up(self, uri: str, generation: int | None) -> tuple[ObjectInfo, str]:
        key = (uri, generation)
        known = self._known.get(key)
        if known is None:
            known = self._ask(uri, generation)
            if not uri.endswith(_MUTABLE_OBJECTS):
                if len(self._known) >= _SIZES_KEPT:
                    self._known.clear()
                self._known[key] = known
        return known

    def _ask(self, uri: str, generation: int | None) -> tuple[ObjectInfo, str]:
        head = getattr(self._objects, "head", None)
        if head is not None and generation is None:
            size, etag = head(uri)
            return ObjectInfo(size), etag
        info = self._objects.info(uri, generation=generation)
        return info, "" if info.generation is None else str(info.generation)

    def read(self, uri: str, *, generation: int | None = None) -> bytes:
        return self._objects.read(uri, generation=generation)

    def read_version(self, uri: str) -> ObjectVersion:
        return self._objects.read_version(uri)

    def create(self, uri: str, data: bytes, *, content_type: str) -> int | None:
        return self._objects.create(uri, data, content_type=content_type)

    def create_file(self, uri: str, path: Path, *, content_type: str) -> int | None:
        return self._objects.create_file(uri, path, content_type=content_type)

    def compare_and_swap(
        self, uri: str, data: bytes, *, expected_generation: int | None, content_type: str
    ) -> int | None:
        self._known.pop((uri, None), None)
        return self._objects.compare_and_swap(
            uri, data, expected_generation=expected_generation, content_type=content_type
        )

    def generation(self, uri: str) -> int | None:
        return self._objects.generation(uri)
