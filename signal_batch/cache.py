"""The folder behind `signal_batch.staging`: whole shards as files, under locks and a size limit.

::

    <key>-<size>.shard   a whole shard; `key` hashes its URI, size and ETag or generation
    <key>-<size>.part    one that is being downloaded; its name says how much room it takes
    <key>-<size>.lock    whoever downloads it holds the lock of this file; gone when done
    folder.lock          held for a moment by whoever makes room

Locks are `flock`s, which end with the process that holds them, however it ends: what a killed
download leaves is known by a lock that nobody holds. The folder has to be on a local disk, where
`flock` and reading a removed file both work, and is made for its owner alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

#: The cache never takes more than this share of what the disk would have free without it.
SHARE_OF_FREE_SPACE = 0.5
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class CannotHoldError(Exception):
    """The folder cannot hold a shard, for a reason that is not the shard's own.

    Never leaves the package: the shard is staged in another way instead.
    """


class Entry(NamedTuple):
    """What a shard is called in the folder, and its size in bytes."""

    name: str
    size: int

    @classmethod
    def of(cls, uri: str, size: int, version: str) -> Self:
        key = sha256("\n".join((uri, str(size), version)).encode()).hexdigest()
        return cls(f"{key}-{size}", size)


class _File(NamedTuple):
    path: Path
    size: int
    used_ns: int


class CacheFolder:
    """The files of a cache: their locks, their sizes and which of them goes first.

    `limit` holds for whole shards and those being downloaded, together. Shards that were not
    used for longest go first; those that somebody reads, which a shared lock on the file shows,
    go when nothing else is left. Their readers are not disturbed, and the space is free when
    they are done.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit

    def path_of(self, entry: Entry) -> Path:
        return self.path / f"{entry.name}.shard"

    def open(self, entry: Entry) -> int | None:
        """Descriptor of a whole shard, marked as used now and as being read, if it is there."""
        with _own_faults():
            try:
                descriptor = os.open(self.path_of(entry), os.O_RDONLY | _FLAGS)
            except FileNotFoundError:
                return None
            try:
                if _is_whole(descriptor, entry):
                    _mark_used(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            return None

    @contextmanager
    def claim(self, entry: Entry) -> Iterator[None]:
        """Be the only one, in any process, that downloads an entry; waits for its turn."""
        with _own_faults():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.path / f"{entry.name}.lock", passing=True):
            yield

    def add(self, entry: Entry, fill: Callable[[int], None]) -> int:
        """Add an entry that the caller has claimed and return its descriptor, as `open` does.

        The entry gets its name after `fill(descriptor)` has written it; a wrong one under that
        name is replaced. Raises `CannotHoldError`, and whatever `fill` raises.
        """
        part = self.path / f"{entry.name}.part"
        descriptor = self._reserve(part, entry)
        try:
            fill(descriptor)
            with _own_faults():
                part.replace(self.path_of(entry))
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except BaseException:
            _remove(part)
            os.close(descriptor)
            raise
        return descriptor

    def discard(self, entry: Entry) -> None:
        _remove(self.path_of(entry))

    def empty(self) -> None:
        """Remove every shard that nobody reads."""
        with _locked(self.path / "folder.lock"), _own_faults():
            for file in self._files(".shard"):
                if not _in_use(file.path):
                    _remove(file.path)

    def _reserve(self, part: Path, entry: Entry) -> int:
        """Make room, and take it by creating the file whose name says how much it is."""
        with _locked(self.path / "folder.lock"), _own_faults():
            self._sweep()
            self._make_room(entry.size)
            return os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600)

    def _make_room(self, needed: int) -> None:
        shards = sorted(self._files(".shard"), key=lambda file: file.used_ns)
        used = sum(file.size for file in shards)
        limit = self._limit_now(used)
        if needed > limit:
            raise CannotHoldError(f"its {needed} bytes are more than the cache may hold ({limit})")
        used += sum(_room_of(file.path) for file in self._files(".part"))
        if used + needed <= limit:
            return
        # The sort is stable: on either side, what was not used for longest stays first.
        for file in sorted(shards, key=lambda file: _in_use(file.path)):
            _remove(file.path)
            used -= file.size
            if used + needed <= limit:
                return
        raise CannotHoldError("the shards being downloaded take all it may hold")

    def _limit_now(self, used: int) -> int:
        disk = os.statvfs(self.path)
        free_without = disk.f_bavail * disk.f_frsize + used
        return min(self.limit, int(free_without * SHARE_OF_FREE_SPACE))

    def _sweep(self) -> None:
        """Remove what killed downloads left: their locks are held by nobody."""
        left = {file.path.stem for kind in (".part", ".lock") for file in self._files(kind)}
        for name in left - {"folder"}:
            with suppress(BlockingIOError):
                descriptor = _lock(self.path / f"{name}.lock", wait=False)
                _remove(self.path / f"{name}.part")
                _remove(self.path / f"{name}.lock")
                os.close(descriptor)

    def _files(self, suffix: str) -> list[_File]:
        found = []
        with os.scandir(self.path) as listing:
            for item in listing:
                if item.name.endswith(suffix):
                    with suppress(FileNotFoundError):
                        state = item.stat(follow_symlinks=False)
                        found.append(_File(Path(item.path), state.st_size, state.st_mtime_ns))
        return found


def _is_whole(descriptor: int, entry: Entry) -> bool:
    """Whether an opened file is the entry, as this user wrote it and from first to last byte."""
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        raise CannotHoldError(f"{entry.name}.shard is there already, and not a file of this user")
    return state.st_size == entry.size


def _mark_used(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(OSError):  # a folder on a disk that may only be read still serves
        os.utime(descriptor)


def _in_use(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _locked(path: Path, *, passing: bool = False) -> Iterator[None]:
    """Hold the lock of a file, waiting for it; a `passing` lock file goes when it is let go."""
    with _own_faults():
        descriptor = _lock(path, wait=True)
    try:
        yield
    finally:
        if passing:
            _remove(path)
        os.close(descriptor)


def _lock(path: Path, *, wait: bool) -> int:
    """Lock the file that has this name, or raise `BlockingIOError` if it is not to `wait`.

    Another file may have come under the name while this waited for the one before, and whoever
    locks that one would not be kept out: then it is done over.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _has_name(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _room_of(part: Path) -> int:
    """How much an unfinished shard will take, as its name says."""
    size = part.stem.rpartition("-")[2]
    return int(size) if size.isdecimal() else 0


@contextmanager
def _own_faults() -> Iterator[None]:
    """Tell the folder's own faults from those of the store that shards come from."""
    try:
        yield
    except OSError as exc:
        raise CannotHoldError(str(exc)) from exc
