"""The shard cache between processes, against a real S3 server.

Reads go through a `Tap`, which passes them on and writes down what was sent: how often a shard
was downloaded is counted on the wire, whatever the processes believe.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest

from signal_batch.columns import Column
from signal_batch.pins import pin_dataset
from signal_batch.reading import RecordReader
from signal_batch.runner import export
from signal_batch.source import BatchFetcher
from signal_batch.specs import ExportSpec
from signal_batch.staging import SharedShardCache
from signal_batch.synth import synthesize

pytestmark = pytest.mark.xdist_group("s3")

BUCKET = "shared-cache"
RECORDS, PER_SHARD, SHARDS = 240, 40, 6
SAMPLES = (Column.parse("field:samples"),)
#: argv: URI, open shards, rounds, seed (0 is in order). Prints a digest of all samples a round.
READ_ALL = """
import sys
from hashlib import sha256
import numpy as np, signal_dataset as sds
from signal_dataset.storage import object_store_for
from signal_batch.reading import RecordReader
from signal_batch.shards import MemoObjectStore, PooledShardStore
from signal_batch.columns import Column
from signal_batch.staging import SharedShardCache

uri, capacity, rounds, seed = sys.argv[1], *map(int, sys.argv[2:])
objects = MemoObjectStore(object_store_for(uri, root_is_directory=True))
staging = SharedShardCache(objects=objects, root=uri)
pool = PooledShardStore(staging=staging, capacity=capacity)
dataset = sds.open(uri, object_store=objects, shard_store=pool)
reader = RecordReader(dataset, (Column.parse("field:samples"),))
order, rng = np.arange(len(dataset)), np.random.default_rng(seed)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(rounds):
    if seed:
        rng.shuffle(order)
    values = [reader.read(part)["samples"] for part in np.array_split(order, 12)]
    found = np.empty_like(np.concatenate(values))
    found[order] = np.concatenate(values)
    print(sha256(found).hexdigest(), flush=True)
"""


class Traffic:
    """What went by during one test, object by object; `hold` stops one object in the middle."""

    def __init__(self) -> None:
        self.gets: Counter[str] = Counter()
        self.heads: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.hold: str | None = None
        self.held, self.release = threading.Event(), threading.Event()
        self._changed = threading.Condition()

    def count(self, counter: Counter[str], key: str, amount: int = 1) -> None:
        with self._changed:
            counter[key] += amount
            self._changed.notify_all()

    def wait_for(self, seen: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(seen, timeout=60)


class Tap(ThreadingHTTPServer):
    """Passes GET and HEAD on to the S3 server and writes down the traffic."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = port
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.traffic = Traffic()


class _Passing(BaseHTTPRequestHandler):
    server: Tap
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._pass_on(self.server.traffic, self.server.traffic.heads)

    def do_GET(self) -> None:
        self._pass_on(self.server.traffic, self.server.traffic.gets)

    def _pass_on(self, traffic: Traffic, counter: Counter[str]) -> None:
        traffic.count(counter, self.path)
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        behind.request(self.command, self.path, headers=dict(self.headers.items()))
        answer = behind.getresponse()
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):
            while block := answer.read(1 << 14):
                self.wfile.write(block)
                traffic.count(traffic.sent, self.path, len(block))
                if self.path == traffic.hold:
                    traffic.hold = None
                    traffic.held.set()
                    traffic.release.wait(60)
        behind.close()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def local_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("local") / "iq"
    synthesize(str(root), records=RECORDS, shape=(2, 1024), seed=3, records_per_shard=PER_SHARD)
    return root


@pytest.fixture(scope="module")
def remote_root(s3_client: Any, local_root: Path) -> str:
    s3_client.create_bucket(Bucket=BUCKET)
    for path in sorted(local_root.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            key = f"iq/{path.relative_to(local_root)}"
            s3_client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    return f"s3://{BUCKET}/iq"


@pytest.fixture(scope="module")
def running_tap(s3_environment: str) -> Iterator[Tap]:
    port = urlparse(s3_environment).port
    assert port is not None
    tap = Tap(port)
    thread = threading.Thread(target=tap.serve_forever, daemon=True)
    thread.start()
    yield tap
    tap.shutdown()
    tap.server_close()
    thread.join()


@pytest.fixture
def tap(running_tap: Tap) -> Traffic:
    """The traffic of this test; a connection that an earlier one left writes to its own."""
    running_tap.traffic = Traffic()
    return running_tap.traffic


@pytest.fixture
def folder(running_tap: Tap, tap: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this process and its children, which all read through the tap."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", running_tap.url)
    monkeypatch.setenv("SIGNAL_BATCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sizes(local_root: Path) -> dict[str, int]:
    """Size of every data shard by its path on the server."""
    return {
        f"/{BUCKET}/iq/{path.relative_to(local_root)}": path.stat().st_size
        for path in sorted((local_root / "objects" / "data").rglob("*.arrayrecord"))
    }


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start(uri, open_shards, rounds, seed)`: a reading process that waits for `go`."""
    started: list[subprocess.Popen[str]] = []

    def run(uri: str | Path, *numbers: int) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", READ_ALL, str(uri), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        return child

    yield run
    for child in started:
        child.kill()
        child.communicate()


def go(*children: subprocess.Popen[str]) -> None:
    """Let processes read, all at once, when the last of them is ready."""
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()


def digests(child: subprocess.Popen[str]) -> set[str]:
    """What a reading process found, when it is done."""
    found, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    return set(found.split())


@pytest.fixture(scope="module")
def truth(local_root: Path) -> set[str]:
    """The digest of all samples as they are on disk."""
    reader = RecordReader(pin_dataset(str(local_root)).dataset, SAMPLES)
    return {sha256(reader.read(range(RECORDS))["samples"]).hexdigest()}  # type: ignore[arg-type]


def of_shards(counter: Counter[str], sizes: dict[str, int]) -> dict[str, int]:
    return {path: count for path, count in counter.items() if path in sizes}


def test_six_processes_download_every_shard_once(
    remote_root: str,
    tap: Traffic,
    folder: Path,
    sizes: dict[str, int],
    truth: set[str],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    children = [start(remote_root, 64, 1, seed) for seed in range(6)]
    go(*children)
    assert [digests(child) for child in children] == [truth] * 6
    assert of_shards(tap.sent, sizes) == sizes
    assert len(list(folder.glob("*.shard"))) == SHARDS
    assert [path.name for path in folder.iterdir() if path.suffix != ".shard"] == ["folder.lock"]


def test_when_a_downloader_is_killed_those_who_wait_take_over(
    remote_root: str,
    tap: Traffic,
    folder: Path,
    sizes: dict[str, int],
    truth: set[str],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    first, *others = (start(remote_root, 64, 1, 0) for _ in range(4))
    pin = pin_dataset(remote_root)
    (path,) = (p for p in sizes if p.endswith(_first_data_object(pin.dataset)))
    tap.hold = path
    go(first)
    assert tap.held.wait(60)
    go(*others)
    tap.wait_for(lambda: tap.heads[path] >= 4)
    assert tap.gets[path] == 1
    assert len(list(folder.glob("*.part"))) == 1
    assert not list(folder.glob("*.shard"))
    first.kill()
    first.wait()
    found = [digests(child) for child in others]
    tap.release.set()
    assert found == [truth] * 3
    assert of_shards(tap.gets, sizes) == {**dict.fromkeys(sizes, 1), path: 2}
    assert [path.name for path in folder.iterdir() if path.suffix != ".shard"] == ["folder.lock"]


def _first_data_object(dataset: Any) -> str:
    return str(dataset._index._manifest(dataset._index.snapshot.manifests[0]).shards[0].data.path)


def test_eviction_under_readers_costs_downloads_and_no_byte(
    remote_root: str,
    tap: Traffic,
    folder: Path,
    sizes: dict[str, int],
    truth: set[str],
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 3 * max(sizes.values())
    monkeypatch.setenv("SIGNAL_BATCH_CACHE_SIZE", str(limit))
    children = [start(remote_root, 1, 2, 1 + seed) for seed in range(3)]
    go(*children)
    assert [digests(child) for child in children] == [truth] * 3
    assert min(of_shards(tap.gets, sizes).values()) > 1
    assert sum(path.stat().st_size for path in folder.glob("*.shard")) <= limit


def test_a_later_run_downloads_only_what_was_damaged(
    remote_root: str,
    tap: Traffic,
    folder: Path,
    sizes: dict[str, int],
    truth: set[str],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    for _ in range(2):
        child = start(remote_root, 1, 1, 0)
        go(child)
        assert digests(child) == truth
        short, long = sorted(folder.glob("*.shard"))[:2]
        os.truncate(short, short.stat().st_size - 100)
        os.truncate(long, long.stat().st_size + 100)
    assert sorted(of_shards(tap.gets, sizes).values()) == [1] * (SHARDS - 2) + [2, 2]


def test_without_a_folder_each_process_downloads_for_itself(
    remote_root: str,
    tap: Traffic,
    folder: Path,
    sizes: dict[str, int],
    truth: set[str],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    folder.write_bytes(b"a file is in its place")
    children = [start(remote_root, 64, 1, 0) for _ in range(2)]
    go(*children)
    assert [digests(child) for child in children] == [truth] * 2
    assert of_shards(tap.gets, sizes) == dict.fromkeys(sizes, 2)


def test_a_large_shard_comes_in_ranges_and_every_byte_once(
    remote_root: str, s3_client: Any, tap: Traffic, folder: Path
) -> None:
    body = np.random.default_rng(0).bytes((20 << 20) + 7)
    s3_client.put_object(Bucket=BUCKET, Key="large", Body=body)
    area = SharedShardCache(root=f"s3://{BUCKET}")
    with area.stage(f"s3://{BUCKET}/large") as path:
        assert Path(path).read_bytes() == body
    assert tap.gets[f"/{BUCKET}/large"] > 1
    assert tap.sent[f"/{BUCKET}/large"] == len(body)


def test_a_scan_finds_the_next_shard_there_before_it_asks(
    remote_root: str, tap: Traffic, folder: Path, sizes: dict[str, int]
) -> None:
    pin = pin_dataset(remote_root).pin
    fetch = BatchFetcher(pin, SAMPLES)
    fetch.expect(np.arange(RECORDS))
    for number in range(SHARDS):
        fetch(range(number * PER_SHARD, number * PER_SHARD + 10))
        ahead = min(number + 2, SHARDS)
        # Not asked for yet, and on its way to the last byte.
        tap.wait_for(lambda ahead=ahead: _whole(tap, sizes) == ahead)  # type: ignore[misc]
        fetch(range(number * PER_SHARD + 10, (number + 1) * PER_SHARD))
    assert of_shards(tap.gets, sizes) == dict.fromkeys(sizes, 1)
    fetch.close()


def _whole(tap: Traffic, sizes: dict[str, int]) -> int:
    return sum(tap.sent[path] == size for path, size in sizes.items())


def test_a_local_reference_dataset_reads_the_bucket_through_the_cache(
    remote_root: str,
    local_root: Path,
    tap: Traffic,
    folder: Path,
    sizes: dict[str, int],
    tmp_path: Path,
) -> None:
    chosen = list(range(RECORDS - 1, 0, -7))
    view = pin_dataset(remote_root).dataset.select(chosen)
    root = str(tmp_path / "view")
    view.publish(root, dataset_id="view", snapshot_id="v1")
    expected = RecordReader(pin_dataset(str(local_root)).dataset, SAMPLES).read(chosen)
    for _ in range(2):
        opened = pin_dataset(root)
        found = RecordReader(opened.dataset, SAMPLES).read(range(len(chosen)))
        np.testing.assert_array_equal(found["samples"], expected["samples"])
        opened.close()
    assert of_shards(tap.gets, sizes) == dict.fromkeys(sizes, 1)


@pytest.mark.parametrize("part_bytes", ["100KB", "700KB", "2MB"])
def test_an_export_downloads_every_shard_once_and_equals_a_local_one(
    remote_root: str,
    local_root: Path,
    tap: Traffic,
    folder: Path,
    sizes: dict[str, int],
    tmp_path: Path,
    part_bytes: str,
) -> None:
    """Parts smaller than a shard, about a shard, and beyond: the workers' ranges share shards."""
    found = {}
    for name, root in (("remote", remote_root), ("local", str(local_root))):
        spec = ExportSpec(
            dataset=root,
            output=str(tmp_path / name),
            columns=("field:samples",),  # type: ignore[arg-type]
            batch_size=16,
            part_bytes=part_bytes,  # type: ignore[arg-type]
        )
        found[name] = [item["logical_digest"] for item in export(spec).manifest["files"]]
    assert len(found["remote"]) > 1
    assert found["remote"] == found["local"]
    assert of_shards(tap.sent, sizes) == sizes
    shutil.rmtree(folder)
