"""The shared shard cache: what it keeps, what goes first, and what it does when it cannot."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import signal_dataset as sds
from signal_dataset.storage import ArrayRecordShardStore
from signal_dataset.storage.contracts import ObjectInfo, ObjectStore, ObjectVersion
from signal_dataset.storage.staging import ShardStagingArea

from signal_batch import cache, staging
from signal_batch.access import access_to
from signal_batch.columns import Column
from signal_batch.errors import SpecError, StorageError
from signal_batch.pins import pin_dataset
from signal_batch.shards import MemoObjectStore, PooledShardStore
from signal_batch.source import BatchFetcher
from signal_batch.staging import (
    ReadAhead,
    SharedShardCache,
    cache_bytes,
    cache_directory,
    upcoming_shards,
)

ROOT = "s3://bucket/data"
OPTIONS = sds.StorageOptions().reader_options


class Bucket(ObjectStore):
    """Objects in memory, read the way `S3ObjectStore` reads them; counts whole downloads."""

    def __init__(self, **objects: bytes) -> None:
        self.objects = {f"{ROOT}/{name}": data for name, data in objects.items()}
        self.etags: dict[str, str] = {}
        self.downloads: Counter[str] = Counter()
        self.before: Callable[[str, IO[bytes]], None] = lambda uri, stream: None

    def head(self, uri: str) -> tuple[int, str]:
        if uri not in self.objects:
            raise FileNotFoundError(uri)
        return len(self.objects[uri]), self.etags.get(uri, "one")

    def info(self, uri: str, *, generation: int | None = None) -> ObjectInfo:
        if generation is not None:
            raise ValueError("no generations here")
        return ObjectInfo(self.head(uri)[0])

    def download_to_fileobj(
        self, uri: str, stream: IO[bytes], *, generation: int | None = None
    ) -> None:
        self.downloads[uri.removeprefix(f"{ROOT}/")] += 1
        self.before(uri, stream)
        stream.write(self.read(uri))

    def read(self, uri: str, *, generation: int | None = None) -> bytes:
        return self.objects[uri]

    def read_version(self, uri: str) -> ObjectVersion:
        raise NotImplementedError

    def create(self, uri: str, data: bytes, *, content_type: str) -> int | None:
        raise NotImplementedError

    def create_file(self, uri: str, path: Path, *, content_type: str) -> int | None:
        raise NotImplementedError

    def compare_and_swap(
        self, uri: str, data: bytes, *, expected_generation: int | None, content_type: str
    ) -> int | None:
        raise NotImplementedError

    def generation(self, uri: str) -> int | None:
        raise NotImplementedError


class Announcing(ShardStagingArea):
    """Opens paths where they are, and keeps what it was told would come."""

    def __init__(self) -> None:
        self.announced: list[str] = []

    @contextmanager
    def stage(self, uri: str, *, generation: int | None = None) -> Iterator[str]:
        yield uri

    def prefetch(self, uri: str, *, generation: int | None = None) -> None:
        self.announced.append(uri)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def make_cache(folder: Path) -> Callable[..., SharedShardCache]:
    def make(bucket: Bucket, **options: Any) -> SharedShardCache:
        return SharedShardCache(
            objects=bucket, root=ROOT, **{"directory": folder, "max_bytes": 1 << 20} | options
        )

    return make


def staged(area: ShardStagingArea, name: str) -> bytes:
    with area.stage(f"{ROOT}/{name}") as path:
        return Path(path).read_bytes()


def kept(folder: Path, suffix: str = ".shard") -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def age(path: Path, seconds: int) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))


def fail_with(code: int, times: int, after: bytes = b"some") -> Callable[[str, IO[bytes]], None]:
    """A download that fails so many times, after it has written a little."""
    left = [times]

    def before(uri: str, stream: IO[bytes]) -> None:
        if left[0]:
            left[0] -= 1
            stream.write(after)
            raise OSError(code, os.strerror(code))

    return before


# What it keeps


def test_a_shard_is_downloaded_once_for_all_who_use_the_folder(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    bucket = Bucket(a=b"first", b=b"second")
    one, other = make_cache(bucket), make_cache(bucket)
    for area in (one, other, one):
        assert (staged(area, "a"), staged(area, "b")) == (b"first", b"second")
    assert bucket.downloads == {"a": 1, "b": 1}
    assert len(kept(folder)) == 2


def test_the_folder_and_its_files_are_for_their_owner_alone(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    staged(make_cache(Bucket(a=b"first")), "a")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".shard"]


def test_threads_that_want_the_same_shard_wait_for_one_download(
    make_cache: Callable[..., SharedShardCache],
) -> None:
    bucket, started, go = Bucket(a=b"first"), threading.Event(), threading.Event()

    def hold(uri: str, stream: IO[bytes]) -> None:
        started.set()
        assert go.wait(30)

    bucket.before = hold
    area = make_cache(bucket)
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(staged, area, "a") for _ in range(8)]
        assert started.wait(30)
        go.set()
        assert {future.result() for future in found} == {b"first"}
    assert bucket.downloads == {"a": 1}


def test_an_object_published_again_under_its_name_is_another_shard(
    make_cache: Callable[..., SharedShardCache],
) -> None:
    bucket = Bucket(a=b"first")
    assert staged(make_cache(bucket), "a") == b"first"
    bucket.objects[f"{ROOT}/a"], bucket.etags[f"{ROOT}/a"] = b"other", "two"
    assert staged(make_cache(bucket), "a") == b"other"


@pytest.mark.parametrize("damage", [b"fir", b"first and more", b""])
def test_a_file_of_another_size_is_replaced(
    make_cache: Callable[..., SharedShardCache], folder: Path, damage: bytes
) -> None:
    bucket = Bucket(a=b"first")
    staged(make_cache(bucket), "a")
    kept(folder)[0].write_bytes(damage)
    assert staged(make_cache(bucket), "a") == b"first"
    assert staged(make_cache(bucket), "a") == b"first"
    assert bucket.downloads == {"a": 2}


def test_a_download_that_fails_leaves_nothing_and_tells_its_own_error(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    bucket = Bucket(a=b"first")
    bucket.before = fail_with(errno.ECONNRESET, 1)
    area = make_cache(bucket)
    with pytest.raises(ConnectionResetError):
        staged(area, "a")
    assert [path.name for path in folder.iterdir()] == ["folder.lock"]
    assert staged(area, "a") == b"first"


def test_a_download_that_ends_early_is_not_kept(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    bucket = Bucket(a=b"first")
    area = make_cache(bucket)
    whole, bucket.objects[f"{ROOT}/a"] = bucket.objects[f"{ROOT}/a"], b"fir"
    bucket.head = lambda uri: (len(whole), "one")  # type: ignore[method-assign]
    with pytest.raises(sds.StorageError, match="3 bytes of 5"):
        staged(area, "a")
    assert not kept(folder)
    assert not kept(folder, ".part")


def test_a_missing_object_is_missing(make_cache: Callable[..., SharedShardCache]) -> None:
    with pytest.raises(FileNotFoundError):
        staged(make_cache(Bucket()), "a")


def test_what_a_dead_download_left_is_removed_and_what_a_living_one_has_is_not(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    bucket = Bucket(a=b"first", b=b"second")
    staged(make_cache(bucket), "a")
    for name in ("dead-7.part", "dead-7.lock", "orphan-7.part", "alive-7.part"):
        (folder / name).write_bytes(b"half")
    with (folder / "alive-7.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        staged(make_cache(bucket), "b")
        assert {path.name for path in kept(folder, ".part")} == {"alive-7.part"}
        assert {path.name for path in kept(folder, ".lock")} == {"alive-7.lock", "folder.lock"}


def test_a_half_shard_of_a_dead_download_is_never_used(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    bucket = Bucket(a=b"first")
    area = make_cache(bucket)
    staged(area, "a")
    path = kept(folder)[0]
    path.rename(path.with_suffix(".part")).write_bytes(b"longer than the shard is")
    path.with_suffix(".lock").touch()
    assert staged(area, "a") == b"first"
    assert path.read_bytes() == b"first"
    assert not kept(folder, ".part")


def test_it_is_not_pickled(make_cache: Callable[..., SharedShardCache]) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(make_cache(Bucket()))


# What goes first


def test_the_shard_not_used_for_longest_goes_first(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    bucket = Bucket(**{name: name.encode() * 100 for name in "abcd"})
    area = make_cache(bucket, max_bytes=300)
    for name in "abc":
        staged(area, name)
        for path in kept(folder):
            age(path, 10)
    staged(area, "a")  # used again, so that b is the oldest
    staged(area, "d")
    for name in "acd":
        staged(area, name)
    assert bucket.downloads == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert sum(path.stat().st_size for path in kept(folder)) == 300


def test_shards_being_read_go_last_and_stay_readable(
    make_cache: Callable[..., SharedShardCache],
) -> None:
    bucket = Bucket(**{name: name.encode() * 100 for name in "abcd"})
    area = make_cache(bucket, max_bytes=200)
    with ExitStack() as reading:
        first = reading.enter_context(area.stage(f"{ROOT}/a"))
        staged(area, "b")
        staged(area, "c")
        assert staged(area, "a") == b"a" * 100
        assert bucket.downloads == {"a": 1, "b": 1, "c": 1}
        reading.enter_context(area.stage(f"{ROOT}/c"))
        staged(area, "d")  # both are being read: the older one goes
        assert Path(first).read_bytes() == b"a" * 100
    staged(area, "c")
    staged(area, "a")
    assert bucket.downloads == {"a": 2, "b": 1, "c": 1, "d": 1}


def test_downloads_under_way_count_with_all_they_will_take(
    make_cache: Callable[..., SharedShardCache], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(a=b"a" * 100, b=b"b" * 100)
    area = make_cache(bucket, max_bytes=150)
    seen: list[list[Path]] = []

    def meanwhile(uri: str, stream: IO[bytes]) -> None:
        bucket.before = lambda uri, stream: None
        assert staged(make_cache(bucket, max_bytes=150), "b") == b"b" * 100
        seen.append(kept(folder))

    bucket.before = meanwhile
    assert staged(area, "a") == b"a" * 100
    assert seen == [[]]
    assert "being downloaded take all" in caplog.text
    assert len(kept(folder)) == 1


def test_it_never_takes_more_than_its_share_of_the_disk(
    make_cache: Callable[..., SharedShardCache], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return 400 - sum(path.stat().st_size for path in kept(folder))

    monkeypatch.setattr(cache.os, "statvfs", lambda path: Disk())
    bucket = Bucket(**{name: name.encode() * 100 for name in "abcd"})
    area = make_cache(bucket)
    for name in "abcd":
        staged(area, name)
    assert len(kept(folder)) == 2


# What it does when it cannot


def test_a_shard_beyond_the_limit_is_staged_alone_with_one_warning(
    make_cache: Callable[..., SharedShardCache], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    area = make_cache(Bucket(a=b"a" * 100, b=b"b" * 100), max_bytes=99)
    assert (staged(area, "a"), staged(area, "b")) == (b"a" * 100, b"b" * 100)
    assert not kept(folder)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "100 bytes are more" in record.getMessage()
    assert "SIGNAL_BATCH_CACHE_SIZE" in record.getMessage()


@pytest.mark.parametrize("where", ["a file", "below a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_done_without(
    make_cache: Callable[..., SharedShardCache],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    unprivileged: Callable[[], AbstractContextManager[None]],
    where: str,
) -> None:
    if where == "read-only":
        folder.mkdir(mode=0o500)
    else:
        folder.write_bytes(b"")
    area = make_cache(
        Bucket(a=b"first"), directory=folder / "x" if where == "below a file" else folder
    )
    with unprivileged():
        assert (staged(area, "a"), staged(area, "a")) == (b"first", b"first")
    assert len(caplog.records) == 1
    assert str(folder) in caplog.text


def test_a_file_that_is_not_ours_is_not_read(
    make_cache: Callable[..., SharedShardCache],
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = Bucket(a=b"first")
    area = make_cache(bucket)
    staged(area, "a")
    planted = tmp_path / "planted"
    planted.write_bytes(b"wrong")
    kept(folder)[0].unlink()
    (folder / f"{cache.Entry.of(f'{ROOT}/a', 5, 'one').name}.shard").symlink_to(planted)
    assert staged(area, "a") == b"first"
    assert len(caplog.records) == 1


def test_a_folder_removed_during_a_download_does_no_harm(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    bucket = Bucket(a=b"first")

    def remove(uri: str, stream: IO[bytes]) -> None:
        bucket.before = lambda uri, stream: None
        shutil.rmtree(folder)

    bucket.before = remove
    area = make_cache(bucket)
    assert (staged(area, "a"), staged(area, "a")) == (b"first", b"first")
    assert len(kept(folder)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_costs_the_shards_that_nobody_reads(
    make_cache: Callable[..., SharedShardCache], folder: Path, code: int
) -> None:
    bucket = Bucket(a=b"first", b=b"second", c=b"third")
    area = make_cache(bucket)
    with area.stage(f"{ROOT}/a"):
        staged(area, "b")
        bucket.before = fail_with(code, 1)
        assert staged(area, "c") == b"third"
    assert bucket.downloads == {"a": 1, "b": 1, "c": 2}
    assert sorted(path.read_bytes() for path in kept(folder)) == [b"first", b"third"]
    assert not kept(folder, ".part")


def test_a_disk_that_stays_full_is_done_without(
    make_cache: Callable[..., SharedShardCache], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(a=b"first")
    bucket.before = fail_with(errno.ENOSPC, 2)
    assert staged(make_cache(bucket), "a") == b"first"
    assert "its disk is full" in caplog.text
    assert not kept(folder)


def test_where_no_disk_has_room_the_error_says_what_to_do(
    make_cache: Callable[..., SharedShardCache],
) -> None:
    bucket = Bucket(a=b"first")
    bucket.before = fail_with(errno.ENOSPC, 3)
    with pytest.raises(StorageError, match=r"no room on disk for a local copy of s3://.*TMPDIR"):
        staged(make_cache(bucket), "a")


def test_size_0_is_no_cache_and_no_warning(
    make_cache: Callable[..., SharedShardCache], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert staged(make_cache(Bucket(a=b"first"), max_bytes=0), "a") == b"first"
    assert not folder.exists()
    assert not caplog.records


# Settings and schemes


def test_the_environment_names_folder_and_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIGNAL_BATCH_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("SIGNAL_BATCH_CACHE_SIZE", "2MB")
    assert (cache_directory(), cache_bytes()) == (tmp_path / "here", 2 << 20)
    monkeypatch.setenv("SIGNAL_BATCH_CACHE_SIZE", "0")
    assert cache_bytes() == 0
    monkeypatch.delenv("SIGNAL_BATCH_CACHE_DIR")
    monkeypatch.delenv("SIGNAL_BATCH_CACHE_SIZE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (cache_directory(), cache_bytes()) == (tmp_path / "signal-batch/shards", 20 << 30)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home/.cache/signal-batch/shards"


def test_a_size_that_is_none_is_named_when_it_matters(
    monkeypatch: pytest.MonkeyPatch, make_cache: Callable[..., SharedShardCache], iq_root: Path
) -> None:
    monkeypatch.setenv("SIGNAL_BATCH_CACHE_SIZE", "plenty")
    with pytest.raises(SpecError, match=r"SIGNAL_BATCH_CACHE_SIZE: 'plenty' is not a size"):
        staged(make_cache(Bucket(a=b"first"), max_bytes=None), "a")
    pin_dataset(str(iq_root)).close()


def test_paths_and_gs_uris_are_opened_where_they_are(
    make_cache: Callable[..., SharedShardCache], folder: Path
) -> None:
    area = make_cache(Bucket())
    with area.stage("/data/shard") as path, area.stage("gs://b/o", generation=7) as pinned:
        assert (path, pinned) == ("/data/shard", "gs://b/o#7")
    area.prefetch("/data/shard")
    assert not area.discard("gs://b/o")
    assert not folder.exists()


def test_size_and_etag_are_asked_for_once() -> None:
    bucket, asked = Bucket(a=b"first"), []
    head = bucket.head
    bucket.head = lambda uri: asked.append(uri) or head(uri)  # type: ignore[func-returns-value,method-assign]
    memo = MemoObjectStore(bucket)
    for _ in range(2):
        assert memo.info(f"{ROOT}/a") == ObjectInfo(5)
        assert memo.identity(f"{ROOT}/a") == (5, "one")
    assert asked == [f"{ROOT}/a"]


def test_a_local_root_may_name_shards_in_a_bucket(
    monkeypatch: pytest.MonkeyPatch, folder: Path, iq_root: Path
) -> None:
    bucket, asked = Bucket(a=b"first"), []
    monkeypatch.setattr(
        staging, "object_store_for", lambda uri: asked.append(uri) or MemoObjectStore(bucket)
    )
    area = SharedShardCache(objects=Bucket(), root=str(iq_root), directory=folder)
    assert (staged(area, "a"), staged(area, "a")) == (b"first", b"first")
    assert asked == ["s3://"]


# Reading ahead


def test_a_prefetched_shard_is_there_when_it_is_read(
    make_cache: Callable[..., SharedShardCache],
) -> None:
    bucket, done = Bucket(a=b"first"), threading.Event()
    area = make_cache(bucket)
    whole = area._copy

    def copy(uri: str, generation: int | None) -> int | None:
        try:
            return whole(uri, generation)
        finally:
            done.set()

    area._copy = copy  # type: ignore[method-assign]
    area.prefetch(f"{ROOT}/a")
    assert done.wait(30)
    bucket.objects.clear()
    assert staged(area, "a") == b"first"
    assert bucket.downloads == {"a": 1}


def test_one_shard_is_fetched_ahead_at_a_time_and_the_latest_wish_is_kept(
    make_cache: Callable[..., SharedShardCache],
) -> None:
    bucket = Bucket(**{name: name.encode() for name in "abcd"})
    started, go, last = threading.Event(), threading.Event(), threading.Event()

    def before(uri: str, stream: IO[bytes]) -> None:
        started.set()
        assert go.wait(30)
        if uri.endswith("/d"):
            last.set()

    bucket.before = before
    area = make_cache(bucket)
    area.prefetch(f"{ROOT}/a")
    assert started.wait(30)
    for name in "bcd":
        area.prefetch(f"{ROOT}/{name}")
    assert bucket.downloads == {"a": 1}
    go.set()
    assert last.wait(30)
    assert bucket.downloads == {"a": 1, "d": 1}


def test_a_prefetch_that_fails_is_left_to_the_read(
    make_cache: Callable[..., SharedShardCache],
) -> None:
    bucket, failed = Bucket(a=b"first"), threading.Event()

    def before(uri: str, stream: IO[bytes]) -> None:
        failed.set()
        raise ConnectionResetError(errno.ECONNRESET, "gone")

    bucket.before = before
    area = make_cache(bucket)
    area.prefetch(f"{ROOT}/a")
    assert failed.wait(30)
    with pytest.raises(ConnectionResetError):
        staged(area, "a")
    bucket.before = lambda uri, stream: None
    assert staged(area, "a") == b"first"


def test_shards_come_up_in_the_order_in_which_they_are_needed(iq_root: Path) -> None:
    pinned = pin_dataset(str(iq_root))
    layout = access_to(pinned.dataset).layout
    everything = upcoming_shards(layout, np.arange(200))
    assert len(everything) == 5
    assert upcoming_shards(layout, np.array([150, 10, 11, 199, 12])) == [
        everything[3],
        everything[0],
        everything[4],
    ]
    assert upcoming_shards(layout, np.array([], np.int64)) == []


@pytest.mark.parametrize(("samples", "kind"), [(True, "data"), (False, "metadata")])
def test_the_next_shard_is_announced_once_when_one_is_entered(
    iq_root: Path, samples: bool, kind: str
) -> None:
    layout = access_to(pin_dataset(str(iq_root)).dataset).layout
    area = Announcing()
    ahead = ReadAhead(layout, np.arange(0, 200, 3), PooledShardStore(staging=area), samples=samples)
    for ordinal in range(0, 200, 3):
        ahead.reached(ordinal)
    shards = upcoming_shards(layout, np.arange(200))
    assert area.announced == [getattr(shard, kind).uri for shard in shards[1:]]


def test_a_scan_that_says_what_it_will_read_has_shards_announced(
    iq_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []
    monkeypatch.setattr(
        PooledShardStore, "read_ahead", lambda self, uri, generation: announced.append(uri)
    )
    pin = pin_dataset(str(iq_root)).pin
    fetch = BatchFetcher(pin, (Column.parse("field:samples"),))
    fetch(range(80))
    assert announced == []
    fetch.expect(np.arange(200))
    again = pickle.loads(pickle.dumps(fetch))  # noqa: S301
    for first in range(0, 200, 50):
        fetch(range(first, first + 50))
        again(range(first, first + 50))
    # Batches end in the second, third, fourth and fifth of five shards; none comes after that.
    assert len(set(announced)) == len(announced) == 3
    fetch.close()
    again.close()


def test_expecting_records_that_are_not_there_is_left_to_the_read(
    iq_root: Path, tmp_path: Path
) -> None:
    pin = pin_dataset(str(iq_root)).pin
    fetch = BatchFetcher(
        pin.model_copy(update={"uri": str(tmp_path)}), (Column.parse("field:samples"),)
    )
    fetch.expect(np.arange(10))
    with pytest.raises(ValueError):
        fetch([0])


# Damage


@pytest.fixture
def shard(tmp_path: Path) -> tuple[bytes, list[bytes]]:
    payloads = [b"%06d" % i + np.random.default_rng(i).bytes(4000) for i in range(20)]
    ArrayRecordShardStore().write(tmp_path / "shard", payloads, options="group_size:1")
    return (tmp_path / "shard").read_bytes(), payloads


def test_a_damaged_copy_is_replaced_by_a_fresh_one(
    make_cache: Callable[..., SharedShardCache], folder: Path, shard: tuple[bytes, list[bytes]]
) -> None:
    bucket = Bucket(a=shard[0])
    staged(make_cache(bucket), "a")
    with kept(folder)[0].open("r+b") as stream:
        stream.write(b"\xff" * 30_000)
    pool = PooledShardStore(staging=make_cache(bucket))
    assert pool.read_many(f"{ROOT}/a", range(20), options=OPTIONS) == tuple(shard[1])
    assert bucket.downloads == {"a": 2}
    pool.close()


def test_a_damaged_object_is_downloaded_twice_and_then_reported(
    make_cache: Callable[..., SharedShardCache], shard: tuple[bytes, list[bytes]]
) -> None:
    bucket = Bucket(a=b"\xff" * 30_000 + shard[0][30_000:])
    pool = PooledShardStore(staging=make_cache(bucket))
    for index in range(3):
        with pytest.raises(sds.CorruptDatasetError):
            pool.read(f"{ROOT}/a", index, options=OPTIONS)
    assert bucket.downloads == {"a": 2}
    pool.close()
