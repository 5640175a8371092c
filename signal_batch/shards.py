"""Where records are stored, and their bytes by ordinal: open readers, addresses, retries.

Three things that signal-dataset does once a call are done once here: opening a shard
(`PooledShardStore`), asking for an object's size (`MemoObjectStore`) and looking an ordinal up
in the manifests (`DatasetLayout`). `PayloadReader` puts them together and is the one place where
a storage or shard failure becomes an error of this package.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import signal_dataset as sds
from array_record.python.array_record_module import ArrayRecordReader
from signal_dataset.dataset.layout import ShardEntry
from signal_dataset.storage import ArrayRecordShardStore, is_absolute_uri
from signal_dataset.storage.contracts import ObjectInfo, ObjectStore, ObjectVersion, ShardStore
from signal_dataset.storage.paths import join_uri
from signal_dataset.storage.reference import ObjectReference
from signal_dataset.storage.staging import ShardStagingArea, default_staging

from signal_batch.errors import CorruptDatasetError, InputError, SignalBatchError, StorageError

T = TypeVar("T")
Ints = npt.NDArray[np.int64]

#: Pauses before each further attempt of a storage call that failed in passing.
_PAUSES_S = (0.2, 0.8, 3.2)
_SIZES_KEPT = 1 << 16
_MUTABLE_OBJECTS = ("/root.json", "/annotations/catalog.json")
_OPTIONAL_STORE_METHODS = ("download_to_fileobj", "indexed_uri", "list")
_ERRNO_OF_TEXT = {os.strerror(code): code for code in errno.errorcode}
_SYSTEM_CALL = re.compile(r"\w+\(\) failed: ([^;]+)")
_DAMAGE = ("orrupt", "mismatch", "runcated", "should be at least", "nvalid")
_jitter = random.Random()


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


def native_error(exc: RuntimeError, uri: str) -> Exception:
    """What an ArrayRecord failure means; the binding raises `RuntimeError` for all of them."""
    text = str(exc)
    if "out of bound" in text:
        return IndexError(f"shard {uri}: {text}")
    match = _SYSTEM_CALL.search(text)
    code = _ERRNO_OF_TEXT.get(match[1].strip()) if match else None
    if code is not None:
        return OSError(code, os.strerror(code), uri)
    if "://" in uri and not any(word in text for word in _DAMAGE):
        return sds.StorageError(f"shard {uri}: {text}")
    return sds.CorruptDatasetError(f"shard {uri} is damaged: {text}")


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


class StoredObject(NamedTuple):
    """A shard object: `owned` unless it lies in the dataset that a reference dataset names."""

    uri: str
    generation: int | None
    stored_bytes: int
    owned: bool

    @classmethod
    def of(cls, root: str, reference: ObjectReference) -> StoredObject:
        absolute = is_absolute_uri(reference.path)
        uri = reference.path if absolute else join_uri(root, reference.path)
        return cls(uri, reference.generation, reference.stored_bytes, not absolute)


class Shard(NamedTuple):
    """A pair of aligned shard objects."""

    data: StoredObject
    metadata: StoredObject


class _Page(NamedTuple):
    """One manifest as arrays: per entry its first ordinal, size, shard and chosen indices."""

    first: Ints
    records: Ints
    shard: Ints
    offset: Ints
    chosen: Ints


class DatasetLayout:
    """Which shard, and which index in it, each ordinal of a dataset is.

    Manifest pages are turned into arrays when an ordinal on them is first asked for. A reference
    dataset has one entry a record; entries that name the same objects share one `Shard`.
    """

    def __init__(self, dataset: sds.Dataset) -> None:
        self._root = dataset.root
        self._index = dataset._index
        self._manifests = dataset._index.snapshot.manifests
        self._starts = np.array([m.first_ordinal for m in self._manifests], np.int64)
        self._pages: dict[int, _Page] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._size = len(dataset)
        self.shards: list[Shard] = []

    def __len__(self) -> int:
        return self._size

    def locate(self, ordinals: Ints) -> tuple[Ints, Ints]:
        """Number of the shard in `shards` and index within it, for each ordinal.

        Raises `IndexError` for an ordinal outside the dataset.
        """
        check_ordinals(ordinals, self._size)
        page_of = np.searchsorted(self._starts, ordinals, "right") - 1
        shard, local = np.empty_like(ordinals), np.empty_like(ordinals)
        for number in np.unique(page_of).tolist():
            here = page_of == number
            shard[here], local[here] = _locate_on_page(self._page(number), ordinals[here])
        return shard, local

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """All manifest entries as columns: ordinals, record counts, and the objects' sizes."""
        pages = [self._page(number) for number in range(len(self._manifests))]
        numbers = np.concatenate([np.empty(0, np.int64), *(page.shard for page in pages)])
        data = np.array([shard.data.stored_bytes for shard in self.shards], np.int64)
        metadata = np.array([shard.metadata.stored_bytes for shard in self.shards], np.int64)
        return {
            "first_ordinal": np.concatenate([numbers[:0], *(page.first for page in pages)]),
            "record_count": np.concatenate([numbers[:0], *(page.records for page in pages)]),
            "shard": numbers,
            "data_bytes": data[numbers],
            "metadata_bytes": metadata[numbers],
        }

    def _page(self, number: int) -> _Page:
        page = self._pages.get(number)
        if page is None:
            reference = self._manifests[number]
            uri = StoredObject.of(self._root, reference.object).uri
            manifest = patiently(lambda: self._index._manifest(reference), uri)
            with self._lock:
                page = self._pages.setdefault(number, self._arrays(manifest.shards))
        return page

    def _arrays(self, entries: Sequence[ShardEntry]) -> _Page:
        first = np.array([entry.first_ordinal for entry in entries], np.int64)
        records = np.array([entry.record_count for entry in entries], np.int64)
        shard = np.array([self._number(entry) for entry in entries], np.int64)
        offset = np.full(len(entries), -1, np.int64)
        chosen: list[int] = []
        for position, entry in enumerate(entries):
            if entry.record_indices is not None:
                offset[position] = len(chosen)
                chosen.extend(entry.record_indices)
        return _Page(first, records, shard, offset, np.array(chosen, np.int64))

    def _number(self, entry: ShardEntry) -> int:
        key = (entry.data.path, entry.metadata.path)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.shards)
            data = StoredObject.of(self._root, entry.data)
            self.shards.append(Shard(data, StoredObject.of(self._root, entry.metadata)))
        return number


def _locate_on_page(page: _Page, ordinals: Ints) -> tuple[Ints, Ints]:
    # Entries without records share a first ordinal with the entry after them; "right" skips them.
    entry = np.searchsorted(page.first, ordinals, "right") - 1
    local = ordinals - page.first[entry]
    offset = page.offset[entry]
    picked = offset >= 0
    if picked.any():
        local[picked] = page.chosen[offset[picked] + local[picked]]
    return page.shard[entry], local


def check_ordinals(ordinals: Ints, size: int) -> None:
    """Raise `IndexError` naming the first ordinal that a dataset of `size` records lacks."""
    outside = (ordinals < 0) | (ordinals >= size)
    if outside.any():
        raise IndexError(f"ordinal {ordinals[outside][0]} is outside this dataset of {size}")


class PayloadReader:
    """Reads encoded records of a dataset's shard objects, checked once and retried in passing."""

    def __init__(self, dataset: sds.Dataset) -> None:
        self._root = dataset.root
        self._objects = dataset.object_store
        self._shards = dataset.shard_store
        self._options = dataset.storage_options
        self._checked: set[str] = set()

    def read(
        self, source: StoredObject, indices: Sequence[int], ordinals: Sequence[int]
    ) -> Sequence[bytes]:
        """Payloads of `indices`, which are the records `ordinals`.

        Raises `CorruptDatasetError` naming the first record that cannot be read.
        """
        try:
            self._check_size(source)
            return patiently(lambda: self._read_many(source, indices), source.uri)
        except CorruptDatasetError as exc:
            if len(indices) == 1:
                message = f"record {ordinals[0]} (index {indices[0]} of its shard): {exc}"
                raise CorruptDatasetError(message, ordinal=ordinals[0]) from exc
        pairs = zip(indices, ordinals, strict=True)
        return [self.read(source, [index], [ordinal])[0] for index, ordinal in pairs]

    def _read_many(self, source: StoredObject, indices: Sequence[int]) -> tuple[bytes, ...]:
        return self._shards.read_many(
            source.uri,
            indices,
            generation=source.generation,
            options=self._options.reader_options,
            file_reader_buffer_size=self._options.file_reader_buffer_size,
        )

    def _check_size(self, source: StoredObject) -> None:
        """Compare an object's size with its manifest's, the first time it is read."""
        if source.uri in self._checked:
            return
        found = patiently(lambda: self._size_of(source), source.uri)
        if found is not None and found != source.stored_bytes:
            raise CorruptDatasetError(
                f"shard {source.uri} holds {found} bytes where {source.stored_bytes} are declared; "
                "it was cut short or replaced after publication"
            )
        self._checked.add(source.uri)

    def _size_of(self, source: StoredObject) -> int | None:
        """Size of an object, or None where only the shard reader can reach it.

        A reference dataset names objects of another root, possibly on another service, which
        the dataset's own store may be confined away from.
        """
        if not source.owned:
            return None if "://" in source.uri else Path(source.uri).stat().st_size
        return self._objects.info(source.uri, generation=source.generation).size


def patiently(call: Callable[[], T], uri: str) -> T:
    """Make a storage call, again after a pause if its failure may pass.

    Raises only errors of this package.
    """
    for pause_s in _PAUSES_S:
        try:
            return call()
        except Exception as exc:
            error = boundary_error(exc, uri)
            if not error.transient:
                raise error from exc
        time.sleep(pause_s * _jitter.uniform(0.5, 1.5))
    try:
        return call()
    except Exception as exc:
        raise boundary_error(exc, uri) from exc


def boundary_error(exc: Exception, uri: str) -> SignalBatchError:
    """The error of this package that a failure of storage or of a shard reader stands for."""
    if isinstance(exc, SignalBatchError):
        return exc
    if type(exc) is RuntimeError:
        exc = native_error(exc, uri)
    if isinstance(exc, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return CorruptDatasetError(f"{uri} is missing, though the dataset names it")
    if isinstance(exc, PermissionError):
        return InputError(f"no permission to read {uri}: {exc}")
    if isinstance(exc, sds.StorageError) and "credentials" in str(exc).lower():
        return InputError(f"the credentials for {uri} are missing or were refused: {exc}")
    if isinstance(exc, OSError):
        return StorageError(f"{uri} could not be read: {exc}")
    if isinstance(exc, IndexError):
        return CorruptDatasetError(f"{uri} holds fewer records than declared: {exc}")
    if isinstance(exc, ValueError):
        return CorruptDatasetError(str(exc) if uri in str(exc) else f"{uri}: {exc}")
    raise exc
