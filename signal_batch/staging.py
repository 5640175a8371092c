"""Shards of an object store as local files, downloaded once a machine.

ArrayRecord opens paths only, so a shard under `s3://` has to become a file before one record of
it can be read. signal-dataset makes it a file of the one process that reads it. Here it becomes
a file in a folder that all processes of a user share, so that workers that read the same shard,
a reader that comes back to one, and the next run find it there.

Two variables set the folder up: `SIGNAL_BATCH_CACHE_DIR` (by default `signal-batch/shards` in
`$XDG_CACHE_HOME` or `~/.cache`) and `SIGNAL_BATCH_CACHE_SIZE` (by default 20GB; 0 is no cache).
Whatever the size, at most half of the disk's free space is taken. See `signal_batch.cache`.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlparse

import numpy as np
import signal_dataset as sds
from signal_dataset.storage import object_store_for
from signal_dataset.storage.contracts import ObjectStore, ShardStore
from signal_dataset.storage.staging import (
    EphemeralFileStaging,
    ShardStagingArea,
    default_staging,
)

from signal_batch.batches import Ints
from signal_batch.cache import CacheFolder, CannotHoldError, Entry
from signal_batch.errors import SpecError, StorageError
from signal_batch.frozen import parse_size
from signal_batch.layout import DatasetLayout, Shard
from signal_batch.shards import MemoObjectStore, PooledShardStore

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "SIGNAL_BATCH_CACHE_DIR"
SIZE_VARIABLE = "SIGNAL_BATCH_CACHE_SIZE"
DEFAULT_SIZE = "20GB"
#: The one scheme whose objects ArrayRecord cannot open by itself.
SCHEME = "s3"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SharedShardCache(ShardStagingArea):
    """Stages `s3://` shards as files that all processes of a machine share.

    Local paths are opened where they are. So are `gs://` objects: ArrayRecord reads those itself,
    record by record, which is not to be traded for whole downloads without measuring it.

    A staged path stays readable until its context ends, even if the shard is evicted meanwhile:
    it is `/dev/fd/N` of an open descriptor. Where the folder cannot hold a shard (not writable,
    disk full, a shard beyond the limit), the shard is staged for this process alone, as
    signal-dataset does it, with one warning in the log. Every process asks for a shard's size and
    ETag with its own credentials before it uses a copy. May be shared by threads; is not pickled.
    """

    def __init__(
        self,
        *,
        objects: ObjectStore | None = None,
        root: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Download through the store that the dataset at `root` is opened with, if it can.

        A reference dataset at a local root may name `s3://` shards, which the store of its root
        cannot serve; those come through the store that is registered for the scheme.
        """
        self._own = objects if root is not None and _scheme(root) == SCHEME else None
        self._directory = directory
        self._max_bytes = max_bytes
        self._alone = default_staging(objects, root=root)
        self._lock = threading.Lock()
        self._warned = False
        self._wanted: tuple[str, int | None] | None = None
        self._fetching = False
        self._distrusted: set[str] = set()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a shard cache cannot be pickled; make another for the same folder")

    @contextmanager
    def stage(self, uri: str, *, generation: int | None = None) -> Iterator[str]:
        """Yield a path to the whole shard.

        Raises what the store raises, and `StorageError` where no disk has room for the shard.
        """
        descriptor = self._copy(uri, generation) if _scheme(uri) == SCHEME else None
        with ExitStack() as held:
            if descriptor is None:
                with _full_disk_explained(uri):
                    path = held.enter_context(self._alone.stage(uri, generation=generation))
            else:
                held.callback(os.close, descriptor)
                path = f"/dev/fd/{descriptor}"
            yield path

    def prefetch(self, uri: str, *, generation: int | None = None) -> None:
        """Start to download a shard that will be read soon; returns at once.

        One shard is downloaded ahead at a time; of those that wait, the latest is kept. Failures
        are left to the read that comes: it meets them again and reports them.
        """
        if _scheme(uri) != SCHEME:
            return
        with self._lock:
            self._wanted = (uri, generation)
            if self._fetching:
                return
            self._fetching = True
        threading.Thread(target=self._fetch_wanted, name="shard-read-ahead", daemon=True).start()

    def discard(self, uri: str, *, generation: int | None = None) -> bool:
        """Drop the copy of a shard that turned out to be damaged; whether to read once more.

        True once for each shard: when a fresh copy is damaged too, the object itself is.
        """
        with self._lock:
            if _scheme(uri) != SCHEME or uri in self._distrusted:
                return False
            self._distrusted.add(uri)
        self._folder.discard(self._entry(uri, generation))
        return True

    def _fetch_wanted(self) -> None:
        while True:
            with self._lock:
                wanted, self._wanted = self._wanted, None
                if wanted is None:
                    self._fetching = False
                    return
            with suppress(Exception):
                descriptor = self._copy(*wanted)
                if descriptor is not None:
                    os.close(descriptor)

    def _copy(self, uri: str, generation: int | None) -> int | None:
        """Descriptor of the shard's file in the folder, or None if that cannot hold it."""
        if self._folder.limit == 0:
            return None
        entry = self._entry(uri, generation)
        try:
            found = self._folder.open(entry)
            return self._download(uri, generation, entry) if found is None else found
        except CannotHoldError as exc:
            self._warn(uri, exc)
            return None

    def _download(self, uri: str, generation: int | None, entry: Entry) -> int:
        def fill(descriptor: int) -> None:
            with os.fdopen(descriptor, "wb", closefd=False) as stream:
                EphemeralFileStaging.fetch(self._store, uri, stream, generation)
            found = os.fstat(descriptor).st_size
            if found != entry.size:
                raise sds.StorageError(f"{uri} came as {found} bytes of {entry.size}")

        with self._folder.claim(entry):
            found = self._folder.open(entry)  # whoever had the claim before may have got it
            if found is not None:
                return found
            with _full_disk_ignored():
                return self._folder.add(entry, fill)
            self._folder.empty()
            with _full_disk_ignored():
                return self._folder.add(entry, fill)
            raise CannotHoldError("its disk is full")

    def _entry(self, uri: str, generation: int | None) -> Entry:
        size, version = self._store.identity(uri, generation=generation)
        return Entry.of(uri, size, version)

    @cached_property
    def _store(self) -> MemoObjectStore:
        objects = object_store_for(f"{SCHEME}://") if self._own is None else self._own
        return objects if isinstance(objects, MemoObjectStore) else MemoObjectStore(objects)

    @cached_property
    def _folder(self) -> CacheFolder:
        directory = cache_directory() if self._directory is None else Path(self._directory)
        return CacheFolder(directory, cache_bytes() if self._max_bytes is None else self._max_bytes)

    def _warn(self, uri: str, reason: Exception) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            logger.warning(
                "%s cannot be kept in the shard cache %s: %s. Such shards are downloaded by each "
                "process for itself; %s names another folder, %s another size",
                uri,
                self._folder.path,
                reason,
                DIRECTORY_VARIABLE,
                SIZE_VARIABLE,
            )


class ReadAhead:
    """Has the next shard fetched while one is read, in a scan whose order is known.

    Random orders have no next shard, or nearly every shard is next: they do without.
    """

    def __init__(
        self, layout: DatasetLayout, ordinals: Ints, store: ShardStore, *, samples: bool
    ) -> None:
        """A scan of `ordinals`; without `samples` it reads the metadata objects of shards."""
        self._layout = layout
        self._store = store
        self._samples = samples
        self._following = dict(pairwise(upcoming_shards(layout, ordinals)))
        self._at: Shard | None = None

    def reached(self, ordinal: int) -> None:
        """Say that the scan has read up to a record."""
        at = upcoming_shards(self._layout, np.array([ordinal]))[0]
        if at == self._at or not isinstance(self._store, PooledShardStore):
            return
        self._at = at
        following = self._following.get(at)
        if following is not None:
            source = following.data if self._samples else following.metadata
            self._store.read_ahead(source.uri, generation=source.generation)


def upcoming_shards(layout: DatasetLayout, ordinals: Ints) -> list[Shard]:
    """The shards of records, each once, in the order in which they are first needed."""
    shard, _ = layout.locate(ordinals)
    entered = shard[np.flatnonzero(np.diff(shard, prepend=-1))]
    return [layout.shards[number] for number in dict.fromkeys(entered.tolist())]


def cache_directory() -> Path:
    """The cache folder that the environment asks for."""
    if named := os.environ.get(DIRECTORY_VARIABLE):
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():  # unset and relative are the same to the XDG specification
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a user without a home, as in some containers
            base = f"{tempfile.gettempdir()}/cache-{os.geteuid()}"
    return Path(base, "signal-batch", "shards")


def cache_bytes() -> int:
    """The size limit that the environment asks for; raises `SpecError` if it is no size."""
    text = os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE
    try:
        return 0 if text.strip() == "0" else parse_size(text)
    except SpecError as exc:
        raise SpecError(f"{SIZE_VARIABLE}: {exc}") from exc


@contextmanager
def _full_disk_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FULL:
            raise


@contextmanager
def _full_disk_explained(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FULL:
            raise
        raise StorageError(
            f"there is no room on disk for a local copy of {uri} ({exc}); free some, or let "
            f"{DIRECTORY_VARIABLE} or TMPDIR name a folder on a disk with room"
        ) from exc


def _scheme(uri: str) -> str:
    return urlparse(uri).scheme
