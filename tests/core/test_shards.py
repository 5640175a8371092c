"""Open readers, damaged files, addresses of ordinals, and what storage failures become."""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds
from signal_dataset.dataset.layout import Manifest, ManifestReference, ShardEntry, Snapshot
from signal_dataset.storage import ArrayRecordShardStore, object_store_for
from signal_dataset.storage.contracts import ObjectDownloader
from signal_dataset.storage.reference import ObjectReference
from signal_dataset.storage.staging import EphemeralFileStaging, ShardStagingArea

from signal_batch import failures, shards
from signal_batch.access import PayloadReader
from signal_batch.errors import CorruptDatasetError, InputError, SpecError, StorageError
from signal_batch.failures import boundary_error, patiently
from signal_batch.layout import DatasetLayout
from signal_batch.shards import MemoObjectStore, PooledShardStore

OPTIONS = sds.StorageOptions().reader_options
RECORDS = 40


def write_file(path: Path, count: int = RECORDS, size: int = 4000, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    payloads = [b"%06d" % i + rng.bytes(size) for i in range(count)]
    ArrayRecordShardStore().write(path, payloads, options="group_size:1")
    return payloads


def write_dataset(root: Path, sizes: list[int], **options: Any) -> sds.Dataset:
    made = []
    first = 0
    for work, size in enumerate(sizes):
        records = [
            sds.Record(f"r{i}", {"x": sds.Field(np.full(4, i, np.float32), (sds.Axis("t", 4),))})
            for i in range(first, first + size)
        ]
        made.append(sds.write_shard(records, str(root), work_id=f"w{work}"))
        first += size
    publication = sds.PublicationOptions(**options)
    sds.publish(str(root), made, dataset_id="d", snapshot_id="s", publication_options=publication)
    return sds.open(str(root))


class CountingStaging(ShardStagingArea):
    """Hands paths through and counts how often each is staged and how many still are."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.entered: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self._delay_s = delay_s

    @contextmanager
    def stage(self, uri: str, *, generation: int | None = None) -> Iterator[str]:
        self.entered[uri] += 1
        self.active[uri] += 1
        time.sleep(self._delay_s)
        try:
            yield uri
        finally:
            self.active[uri] -= 1


def test_reads_what_the_library_reads_in_any_order(tmp_path: Path) -> None:
    payloads = write_file(tmp_path / "a")
    pool = PooledShardStore()
    uri = str(tmp_path / "a")
    indices = [3, 1, 3, RECORDS - 1, 0]
    assert pool.read_many(uri, indices, options=OPTIONS) == tuple(payloads[i] for i in indices)
    assert pool.read(uri, 7, options=OPTIONS) == payloads[7]
    assert pool.count(uri, options=OPTIONS) == RECORDS
    assert pool.read_many(uri, [], options=OPTIONS) == ()
    assert pool.read(uri, 7, options=OPTIONS, file_reader_buffer_size=4096) == payloads[7]


def test_a_pool_writes_shards_too(tmp_path: Path) -> None:
    pool = PooledShardStore()
    assert pool.write(tmp_path / "a", [b"x", b"y"], options="group_size:1") == 2
    assert pool.read(str(tmp_path / "a"), 1, options=OPTIONS) == b"y"


def test_a_shard_is_opened_once_and_the_least_recent_is_closed(tmp_path: Path) -> None:
    uris = [str(tmp_path / name) for name in "abc"]
    for uri in uris:
        write_file(Path(uri), 2)
    staging = CountingStaging()
    pool = PooledShardStore(staging=staging, capacity=2)
    for uri in [uris[0], uris[1], uris[0], uris[2], uris[0]]:
        pool.read(uri, 0, options=OPTIONS)
    assert staging.entered == dict.fromkeys(uris, 1)
    assert staging.active == {uris[0]: 1, uris[1]: 0, uris[2]: 1}
    pool.close()
    assert not staging.active.total()
    assert pool.read(uris[1], 1, options=OPTIONS)
    assert staging.entered[uris[1]] == 2


def test_eviction_and_close_spare_a_reader_in_use(tmp_path: Path) -> None:
    payloads = write_file(tmp_path / "a")
    write_file(tmp_path / "b")
    staging = CountingStaging()
    pool = PooledShardStore(staging=staging, capacity=1)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    key = shards._Key(a, None, OPTIONS, None)
    with pool._reader(key) as entry:
        pool.read(b, 0, options=OPTIONS)
        pool.close()
        assert staging.active == {a: 1, b: 0}
        assert entry.reader.read([4]) == [payloads[4]]
    assert staging.active == {a: 0, b: 0}


def test_contention_opens_a_shard_once(tmp_path: Path) -> None:
    payloads = write_file(tmp_path / "a")
    staging = CountingStaging(delay_s=0.05)
    pool = PooledShardStore(staging=staging)
    barrier = threading.Barrier(8)

    def read(index: int) -> bytes:
        barrier.wait()
        return pool.read(str(tmp_path / "a"), index, options=OPTIONS)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read, range(8))) == payloads[:8]
    assert staging.entered.total() == 1
    assert not pool._opening


def test_opening_one_shard_does_not_hold_up_another(tmp_path: Path) -> None:
    write_file(tmp_path / "slow")
    write_file(tmp_path / "fast")
    entered, leave = threading.Event(), threading.Event()

    class Stuck(CountingStaging):
        @contextmanager
        def stage(self, uri: str, *, generation: int | None = None) -> Iterator[str]:
            if uri.endswith("slow"):
                entered.set()
                assert leave.wait(20)
            yield uri

    pool = PooledShardStore(staging=Stuck())
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(pool.read, str(tmp_path / "slow"), 0, options=OPTIONS)
        assert entered.wait(20)
        assert pool.read(str(tmp_path / "fast"), 0, options=OPTIONS)
        leave.set()
        assert slow.result(20)


def test_threads_with_a_pool_smaller_than_their_shards(tmp_path: Path) -> None:
    uris = [str(tmp_path / f"s{i}") for i in range(6)]
    expected = {uri: write_file(Path(uri), 20, 2000, seed=i) for i, uri in enumerate(uris)}
    staging = CountingStaging()
    pool = PooledShardStore(staging=staging, capacity=2)

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            uri = uris[rng.integers(6)]
            indices = rng.integers(0, 20, 4).tolist()
            found = pool.read_many(uri, indices, options=OPTIONS)
            assert found == tuple(expected[uri][i] for i in indices)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert staging.active.total() == 2
    pool.close()
    assert staging.active.total() == 0


def test_staged_copies_stay_open_with_their_reader(tmp_path: Path) -> None:
    payloads = write_file(tmp_path / "a")
    write_file(tmp_path / "b")
    objects = object_store_for(str(tmp_path), root_is_directory=True)
    staging = EphemeralFileStaging(objects=objects, max_open_shards=1)
    pool = PooledShardStore(staging=staging)
    for name in "abab":
        assert pool.read(str(tmp_path / name), 0, options=OPTIONS)
    (tmp_path / "a").unlink()
    assert pool.read(str(tmp_path / "a"), 5, options=OPTIONS) == payloads[5]
    pool.close()
    assert not staging._holders


def test_a_pool_does_not_pickle() -> None:
    with pytest.raises(TypeError, match="open the dataset again"):
        pickle.dumps(PooledShardStore())


def test_a_pool_holds_at_least_one_reader() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PooledShardStore(capacity=0)


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "empty":
        data.clear()
    elif kind == "cut to half":
        del data[len(data) // 2 :]
    elif kind == "cut at the end":
        del data[-100:]
    elif kind == "a few bytes":
        del data[10:]
    elif kind == "garbage":
        data[:] = np.random.default_rng(0).bytes(len(data))
    elif kind == "zeros":
        data[:] = bytes(len(data))
    path.write_bytes(data)


@pytest.mark.parametrize(
    "kind", ["empty", "cut to half", "cut at the end", "a few bytes", "garbage", "zeros"]
)
def test_a_damaged_shard_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    write_file(path)
    damage(path, kind)
    staging = CountingStaging()
    pool = PooledShardStore(staging=staging)
    for call in (
        lambda: pool.read(str(path), 0, options=OPTIONS),
        lambda: pool.count(str(path), options=OPTIONS),
    ):
        with pytest.raises(sds.CorruptDatasetError, match=f"{path} is damaged"):
            call()
    assert not staging.active.total()
    assert not pool._opening


def test_a_flipped_bit_spoils_one_record(tmp_path: Path) -> None:
    path = tmp_path / "a"
    payloads = write_file(path)
    data = bytearray(path.read_bytes())
    data[data.index(payloads[9][:200]) + 150] ^= 8
    path.write_bytes(data)
    pool = PooledShardStore()
    with pytest.raises(sds.CorruptDatasetError, match="hash mismatch"):
        pool.read_many(str(path), [8, 9, 10], options=OPTIONS)
    assert pool.read_many(str(path), [8, 10], options=OPTIONS) == (payloads[8], payloads[10])


@pytest.mark.parametrize("seed", range(4))
def test_no_flipped_bits_crash_or_change_a_record(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "a"
    payloads = write_file(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(seed)
    for _ in range(40):
        data = bytearray(whole)
        for position in rng.integers(0, len(data), 3):
            data[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        pool = PooledShardStore()
        for index in range(0, RECORDS, 5):
            with suppress(sds.CorruptDatasetError, IndexError):
                assert pool.read(str(path), index, options=OPTIONS) == payloads[index]
        pool.close()


def test_missing_files_and_folders(tmp_path: Path) -> None:
    pool = PooledShardStore()
    with pytest.raises(FileNotFoundError):
        pool.read(str(tmp_path / "none"), 0, options=OPTIONS)
    with pytest.raises(IsADirectoryError):
        pool.read(str(tmp_path), 0, options=OPTIONS)


def test_a_file_without_permission(
    tmp_path: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    write_file(tmp_path / "a")
    (tmp_path / "a").chmod(0)
    with unprivileged(), pytest.raises(PermissionError):
        PooledShardStore().read(str(tmp_path / "a"), 0, options=OPTIONS)


@pytest.mark.parametrize("index", [RECORDS, RECORDS + 1000, -1])
def test_an_index_outside_the_shard(tmp_path: Path, index: int) -> None:
    write_file(tmp_path / "a")
    pool = PooledShardStore()
    with pytest.raises(IndexError, match=str(tmp_path / "a")):
        pool.read_many(str(tmp_path / "a"), [0, index], options=OPTIONS)
    assert pool.read(str(tmp_path / "a"), 0, options=OPTIONS)


def test_an_empty_shard_is_not_damaged(tmp_path: Path) -> None:
    ArrayRecordShardStore().write(tmp_path / "a", [], options="group_size:1")
    pool = PooledShardStore()
    assert pool.count(str(tmp_path / "a"), options=OPTIONS) == 0
    with pytest.raises(IndexError):
        pool.read(str(tmp_path / "a"), 0, options=OPTIONS)


@pytest.mark.parametrize(
    ("text", "uri", "kind"),
    [
        ("index 7 out of bound 3", "/a", IndexError),
        ("open() failed: No such file or directory; opening /a", "/a", FileNotFoundError),
        ("open() failed: Permission denied; opening /a", "/a", PermissionError),
        ("read() failed: Input/output error; reading /a; at byte 7", "/a", OSError),
        ("open() failed: Too many open files; opening /a", "/a", OSError),
        ("Corrupted Riegeli/records file: chunk", "gs://b/a", sds.CorruptDatasetError),
        ("connection reset", "gs://b/a", sds.StorageError),
        ("something new", "/a", sds.CorruptDatasetError),
    ],
)
def test_native_failures(text: str, uri: str, kind: type[Exception]) -> None:
    error = failures.native_error(RuntimeError(text), uri)
    assert isinstance(error, kind)
    assert uri in str(error)


class CountingStore:
    """Counts size requests of a local store."""

    supports_compare_and_swap = False

    def __init__(self, root: Path) -> None:
        self._inner = object_store_for(str(root), root_is_directory=True)
        self.asked: Counter[str] = Counter()

    def info(self, uri: str, *, generation: int | None = None) -> Any:
        self.asked[uri] += 1
        return self._inner.info(uri, generation=generation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_sizes_of_immutable_objects_are_asked_once(tmp_path: Path) -> None:
    objects = CountingStore(tmp_path)
    memo = MemoObjectStore(objects)
    for name in ("root.json", "objects/a", "annotations/catalog.json"):
        memo.create(f"{tmp_path}/{name}", b"12345", content_type="text/plain")
        for _ in range(3):
            assert memo.info(f"{tmp_path}/{name}").size == 5
    assert [objects.asked[f"{tmp_path}/{name}"] for name in ("root.json", "objects/a")] == [3, 1]
    assert objects.asked[f"{tmp_path}/annotations/catalog.json"] == 3
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            memo.info(f"{tmp_path}/none")


def test_a_memo_store_is_otherwise_the_store_within(tmp_path: Path) -> None:
    objects = CountingStore(tmp_path)
    memo = MemoObjectStore(objects)
    uri = f"{tmp_path}/annotations/catalog.json"
    memo.create(uri, b"1", content_type="text/plain")
    assert not memo.supports_compare_and_swap
    assert memo.read(uri) == memo.read_version(uri).data == b"1"
    memo.compare_and_swap(
        uri, b"22", expected_generation=memo.generation(uri), content_type="text/plain"
    )
    assert memo.info(uri).size == 2
    (tmp_path / "local").write_bytes(b"333")
    memo.create_file(f"{tmp_path}/copy", tmp_path / "local", content_type="text/plain")
    assert memo.read(f"{tmp_path}/copy") == b"333"
    with memo.indexed_uri(f"{tmp_path}/copy") as path:
        assert Path(path).read_bytes() == b"333"


def test_a_memo_store_shows_whether_it_can_stream(tmp_path: Path) -> None:
    assert not isinstance(MemoObjectStore(CountingStore(tmp_path)), ObjectDownloader)

    class Streaming(CountingStore):
        def download_to_fileobj(
            self, uri: str, stream: Any, *, generation: int | None = None
        ) -> None:
            stream.write(b"streamed")

    memo = MemoObjectStore(Streaming(tmp_path))
    assert isinstance(memo, ObjectDownloader)
    stream = io.BytesIO()
    memo.download_to_fileobj("x", stream)
    assert stream.getvalue() == b"streamed"


def test_a_pooled_dataset_equals_a_plain_one(tmp_path: Path) -> None:
    plain = write_dataset(tmp_path / "d", [3, 4])
    root = str(tmp_path / "d")
    objects = MemoObjectStore(object_store_for(root, root_is_directory=True))
    pooled = sds.open(
        root, object_store=objects, shard_store=PooledShardStore(objects=objects, root=root)
    )
    for one, other in zip(plain, pooled, strict=True):
        assert one.id == other.id
        assert one["x"].data.tolist() == other["x"].data.tolist()


def assert_located(dataset: sds.Dataset, ordinals: list[int]) -> None:
    layout = DatasetLayout(dataset)
    shard, local = layout.locate(np.array(ordinals, np.int64))
    for ordinal, number, index in zip(ordinals, shard.tolist(), local.tolist(), strict=True):
        entry, expected = dataset._index.locate(ordinal)
        found = layout.shards[number]
        assert index == expected
        assert found.data.uri.endswith(entry.data.path)
        assert found.data.stored_bytes == entry.data.stored_bytes
        assert found.metadata.uri.endswith(entry.metadata.path)


def test_ordinals_are_located_as_the_library_does(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "d", [3, 1, 4, 1, 5, 9, 2], shards_per_manifest=2)
    assert len(dataset._index.snapshot.manifests) == 4
    ordinals = np.random.default_rng(0).integers(0, len(dataset), 100).tolist()
    assert_located(dataset, ordinals)
    assert_located(dataset, [])


def test_a_reference_dataset_shares_shards(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "d", [3, 4])
    view = source.select([6, 0, 5, 0, 2])
    view.publish(
        str(tmp_path / "view"),
        dataset_id="v",
        snapshot_id="v1",
        publication_options=sds.PublicationOptions(shards_per_manifest=2),
    )
    dataset = sds.open(str(tmp_path / "view"))
    assert_located(dataset, [4, 3, 2, 1, 0, 0])
    layout = DatasetLayout(dataset)
    shard, local = layout.locate(np.arange(5))
    assert len(layout.shards) == 2
    assert not any(shard.data.owned for shard in layout.shards)
    assert shard.tolist() == [0, 1, 0, 1, 1]
    assert local.tolist() == [3, 0, 2, 0, 2]


@pytest.mark.parametrize("ordinal", [-1, 7, 2**40])
def test_ordinals_outside_the_dataset(tmp_path: Path, ordinal: int) -> None:
    layout = DatasetLayout(write_dataset(tmp_path / "d", [3, 4]))
    with pytest.raises(IndexError, match=f"ordinal {ordinal} is outside this dataset of 7"):
        layout.locate(np.array([0, ordinal]))


def test_the_table_of_shards(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "d", [3, 4, 2], shards_per_manifest=2)
    table = DatasetLayout(dataset).table()
    assert table["first_ordinal"].tolist() == [0, 3, 7]
    assert table["record_count"].tolist() == [3, 4, 2]
    stored = table["data_bytes"].sum() + table["metadata_bytes"].sum()
    assert stored == dataset._index.snapshot.stored_bytes


class Snapshotless:
    """As much of a dataset as a layout asks for, with manifests held in memory."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.root = "/nowhere"
        self._index = self
        references = tuple(
            ManifestReference(
                m.first_ordinal, m.record_count, len(m.shards), 0, ObjectReference("m", None, 0)
            )
            for m in manifests
        )
        self.count = sum(m.record_count for m in manifests)
        self.snapshot = Snapshot(
            "s", self.count, sum(len(m.shards) for m in manifests), 0, references
        )
        self.read: list[int] = []
        self._by_first = {m.first_ordinal: m for m in manifests}

    def __len__(self) -> int:
        return self.count

    def _manifest(self, reference: ManifestReference) -> Manifest:
        self.read.append(reference.first_ordinal)
        return self._by_first[reference.first_ordinal]


def many_shards(pages: int, per_page: int, records: int) -> Snapshotless:
    manifests = []
    for page in range(pages):
        start = page * per_page * records
        entries = tuple(
            ShardEntry(
                start + i * records,
                records,
                ObjectReference(f"data/{page}-{i}", None, 1),
                ObjectReference(f"meta/{page}-{i}", None, 1),
            )
            for i in range(per_page)
        )
        manifests.append(Manifest(start, per_page * records, entries))
    return Snapshotless(manifests)


def test_only_the_pages_that_are_needed_are_read() -> None:
    dataset = many_shards(5, 3, 10)
    layout = DatasetLayout(dataset)
    layout.locate(np.array([35, 95, 36]))
    layout.locate(np.array([37]))
    assert dataset.read == [30, 90]


def test_ten_thousand_shards_are_laid_out_quickly() -> None:
    dataset = many_shards(10, 1000, 10_000)
    ordinals = np.random.default_rng(0).integers(0, len(dataset), 100_000)
    started = time.perf_counter()
    layout = DatasetLayout(dataset)
    shard, local = layout.locate(ordinals)
    assert time.perf_counter() - started < 2
    found = [layout.shards[number].data.uri for number in shard[:50].tolist()]
    expected = [f"/nowhere/data/{o // 10**7}-{o // 10**4 % 1000}" for o in ordinals[:50].tolist()]
    assert found == expected
    assert (local == ordinals % 10_000).all()


class FailingStore(PooledShardStore):
    """Fails the first calls with what it is given."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)
        self.calls = 0

    def read_many(self, uri: str, indices: Any, **options: Any) -> tuple[bytes, ...]:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return super().read_many(uri, indices, **options)


def payload_reader(root: Path, store: PooledShardStore) -> tuple[PayloadReader, Any]:
    dataset = sds.open(str(root), shard_store=store)
    layout = DatasetLayout(dataset)
    layout.locate(np.array([0]))
    return PayloadReader(dataset), layout.shards[0].data


def test_a_passing_failure_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_PAUSES_S", (0.0, 0.0))
    write_dataset(tmp_path / "d", [3])
    store = FailingStore(sds.StorageError("503"), ConnectionResetError("reset"))
    reader, source = payload_reader(tmp_path / "d", store)
    assert len(reader.read(source, [0, 2], [0, 2])) == 2
    assert store.calls == 3


def test_a_lasting_failure_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_PAUSES_S", (0.0, 0.0))
    write_dataset(tmp_path / "d", [3])
    store = FailingStore(*[TimeoutError("no answer")] * 9)
    reader, source = payload_reader(tmp_path / "d", store)
    with pytest.raises(StorageError, match=r"\.arrayrecord could not be read: no answer") as caught:
        reader.read(source, [0, 2], [0, 2])
    assert caught.value.transient
    assert store.calls == 3


def test_what_cannot_pass_is_not_tried_again(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [3])
    store = FailingStore(PermissionError("denied"))
    reader, source = payload_reader(tmp_path / "d", store)
    with pytest.raises(InputError, match="no permission to read") as caught:
        reader.read(source, [0], [0])
    assert not caught.value.transient
    assert store.calls == 1


@pytest.mark.parametrize(
    ("failure", "kind", "transient"),
    [
        (FileNotFoundError("x"), CorruptDatasetError, False),
        (NotADirectoryError("x"), CorruptDatasetError, False),
        (PermissionError("x"), InputError, False),
        (sds.StorageError("x"), StorageError, True),
        (TimeoutError("x"), StorageError, True),
        (OSError(5, "x"), StorageError, True),
        (sds.CorruptDatasetError("x"), CorruptDatasetError, False),
        (sds.ValidationError("x"), CorruptDatasetError, False),
        (IndexError("x"), CorruptDatasetError, False),
        (RuntimeError("Corrupted file"), CorruptDatasetError, False),
        (SpecError("/uri: x"), SpecError, False),
    ],
)
def test_every_failure_becomes_an_error_of_this_package(
    failure: Exception, kind: type[Exception], transient: bool
) -> None:
    error = boundary_error(failure, "/uri")
    assert type(error) is kind
    assert error.transient == transient
    assert "/uri" in str(error)


def test_a_mistake_in_the_program_is_not_dressed_up() -> None:
    def wrong() -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        patiently(wrong, "/uri")
