"""The output folder: create-only under races, whole or not at all, and clear errors."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signal_batch import store as store_module
from signal_batch.errors import (
    DamagedOutputError,
    InputError,
    OutputConflictError,
    OutputError,
    SpecError,
    StorageError,
)
from signal_batch.store import AGAIN, OutputStore, Receipt, differences, output_error


def receipt(part: int = 0, **changes: Any) -> Receipt:
    fields: dict[str, Any] = {
        "run_key": "k" * 64,
        "part": part,
        "first_ordinal": 10 * part,
        "last_ordinal": 10 * part + 9,
        "rows": 10,
        "bytes": 123,
        "file": f"part-{part:05d}-0123456789ab.parquet",
        "sha256": "0" * 64,
        "logical_digest": "1" * 64,
    }
    return Receipt(**(fields | changes))


def claim_of(run_key: str = "a", **identity: Any) -> dict[str, Any]:
    return {"run_key": run_key, "identity": identity, "plan": {"parts": 3}}


@pytest.fixture(params=["local", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "out")
        return
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}"
    fsspec.filesystem("memory").rm(root, recursive=True)


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- claims --------------------------------------------------------------------------------


def test_first_claim_stands_and_the_same_job_finds_it(uri: str) -> None:
    first = claim_of("a", batch=1) | {"plan": {"parts": 3}}
    assert OutputStore(uri).claim(first) == first
    later = first | {"plan": {"parts": 99}}
    assert OutputStore(uri).claim(later) == first
    assert OutputStore(uri).standing_claim(later) == first
    assert OutputStore(uri).read_claim() == first


def test_another_job_is_refused_with_every_difference_and_nothing_written(uri: str) -> None:
    standing = claim_of("a", features="raw", spec={"batch_size": 4, "same": 1})
    OutputStore(uri).claim(standing)
    other = claim_of("b", features="statistics", spec={"batch_size": 8, "same": 1}, ragged=["x"])
    with pytest.raises(OutputConflictError) as caught:
        OutputStore(uri).claim(other)
    message = str(caught.value)
    assert 'features: there "raw", here "statistics"' in message
    assert "spec.batch_size: there 4, here 8" in message
    assert 'ragged: there the default, here ["x"]' in message
    assert "same" not in message
    assert caught.value.exit_code == 2
    assert OutputStore(uri).read_claim() == standing


def test_standing_claim_of_a_new_folder_is_none_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert OutputStore(str(out)).standing_claim(claim_of()) is None
    assert not out.exists()
    out.mkdir()
    assert OutputStore(str(out)).standing_claim(claim_of()) is None
    assert names_below(out) == []


def test_folder_of_something_else_is_refused(uri: str) -> None:
    filesystem, root = fsspec.url_to_fs(uri)
    filesystem.makedirs(root, exist_ok=True)
    filesystem.pipe_file(f"{root}/thesis.tex", b"precious")
    with pytest.raises(OutputConflictError, match=r"not empty.*thesis\.tex"):
        OutputStore(uri).claim(claim_of())
    assert filesystem.cat_file(f"{root}/thesis.tex") == b"precious"
    assert len(filesystem.ls(root)) == 1


def test_what_a_killed_claim_left_behind_is_no_stranger(tmp_path: Path) -> None:
    (tmp_path / "_spec.json.0123.tmp").write_bytes(b'{"half')
    assert OutputStore(str(tmp_path)).claim(claim_of("a")) == claim_of("a")


def test_output_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("precious")
    for call in (OutputStore.claim, OutputStore.standing_claim):
        with pytest.raises(InputError, match="is a file"):
            call(OutputStore(str(file)), claim_of())
    assert file.read_text() == "precious"


@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"'])
def test_unreadable_documents_are_damage(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / "_spec.json").write_bytes(payload)
    with pytest.raises(DamagedOutputError, match=r"_spec\.json .*; remove that output, or choose"):
        OutputStore(str(tmp_path)).claim(claim_of())
    (tmp_path / "_manifest.json").write_bytes(payload)
    with pytest.raises(DamagedOutputError, match=rf"_manifest\.json .*; {AGAIN}, which checks"):
        OutputStore(str(tmp_path)).read_manifest()


# --- receipts ------------------------------------------------------------------------------


def test_receipts_by_part_and_the_first_one_stands(uri: str) -> None:
    store = OutputStore(uri)
    assert store.receipts() == {}
    mine, late = receipt(4), receipt(4, rows=9, bad_ordinals=(41,))
    assert store.add_receipt(mine) == mine
    assert OutputStore(uri).add_receipt(late) == mine
    other = receipt(0, bad_ordinals=(3, 7))
    store.add_receipt(other)
    assert OutputStore(uri).receipts() == {4: mine, 0: other}


@given(
    st.builds(
        receipt,
        part=st.integers(0, 10**6),
        rows=st.integers(0, 2**40),
        file=st.text(max_size=20),
        bad_ordinals=st.lists(st.integers(0, 2**60), max_size=5).map(tuple),
    )
)
def test_receipt_survives_json(value: Receipt) -> None:
    assert Receipt.from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("sha256"),
        lambda d: d.pop("bad_ordinals"),
        lambda d: d.update(bad_ordinals=3),
        lambda d: d.update(part="two"),
        lambda d: d.update(file=None),
        lambda d: d.update(colour="red"),
        lambda d: d.update(rows=math.inf),
        lambda d: d.update(rows=1e400),
        lambda d: d.update(rows=-5),
        lambda d: d.update(rows=True),
        lambda d: d.update(bytes=1 << 62),
        lambda d: d.update(first_ordinal=-1),
        lambda d: d.update(bad_ordinals=[-1]),
        lambda d: d.clear(),
    ],
)
def test_receipt_of_other_fields_is_damage(
    tmp_path: Path, damage: Callable[[dict[str, Any]], Any]
) -> None:
    store = OutputStore(str(tmp_path))
    store.add_receipt(receipt(2))
    path = tmp_path / "_receipts" / "part-00002.json"
    value = json.loads(path.read_text())
    damage(value)
    path.write_text(json.dumps(value))
    with pytest.raises(DamagedOutputError, match=rf"part-00002\.json is .*; {AGAIN}$"):
        store.receipts()


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[1]", b"\xff", b'{"rows": 1' + b"0" * 5000 + b"}"]
)
def test_a_receipt_that_is_cut_short_says_what_to_do(tmp_path: Path, payload: bytes) -> None:
    store = OutputStore(str(tmp_path))
    store.add_receipt(receipt(2))
    path = tmp_path / "_receipts" / "part-00002.json"
    path.write_bytes(payload)
    for call in (store.receipts, lambda: store.add_receipt(receipt(2))):
        with pytest.raises(DamagedOutputError, match=rf"^{path} .*; {AGAIN}$"):
            call()
    path.unlink()
    assert store.add_receipt(receipt(2)) == receipt(2)


# --- races ---------------------------------------------------------------------------------


def test_one_of_many_threads_creates_and_all_agree(uri: str) -> None:
    threads = 8
    barrier = threading.Barrier(threads, timeout=30)

    def attempt(number: int) -> tuple[dict[str, Any], Receipt]:
        store = OutputStore(uri)
        barrier.wait()
        claimed = store.claim(claim_of("a") | {"by": number})
        return claimed, store.add_receipt(receipt(0, bytes=number))

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(attempt, range(threads)))
    assert len({claimed["by"] for claimed, _ in results}) == 1
    assert len({found.bytes for _, found in results}) == 1
    assert OutputStore(uri).receipts() == {0: results[0][1]}


def test_of_two_jobs_at_once_exactly_one_gets_the_folder(uri: str) -> None:
    threads = 6
    barrier = threading.Barrier(threads, timeout=30)

    def attempt(number: int) -> bool:
        barrier.wait()
        try:
            OutputStore(uri).claim(claim_of(str(number)))
        except OutputConflictError:
            return False
        return True

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(attempt, range(threads))) == 1


RACER = """
    import json, sys, time
    from pathlib import Path
    from signal_batch.store import AGAIN, OutputStore, Receipt
    root, me, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = OutputStore(root)
    (Path(root).parent / f"ready-{me}").touch()
    while not (Path(root).parent / "go").exists():
        time.sleep(0.001)
    won = [store.claim({"run_key": "k", "identity": {}, "by": me})["by"]]
    for part in range(count):
        base = dict(run_key="k", part=part, first_ordinal=0, last_ordinal=0, rows=0, bytes=0)
        mine = Receipt(**base, file=me, sha256="", logical_digest="")
        won.append(store.add_receipt(mine).file)
    print(json.dumps(won))
"""


def test_two_processes_race_for_every_receipt(tmp_path: Path) -> None:
    root, count = tmp_path / "out", 60
    script = textwrap.dedent(RACER)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(root), me, str(count)], stdout=subprocess.PIPE
        )
        for me in ("one", "two")
    ]
    try:
        while any(racer.poll() is None for racer in racers) and not all(
            (tmp_path / f"ready-{me}").exists() for me in ("one", "two")
        ):
            threading.Event().wait(0.01)
        (tmp_path / "go").touch()
        # While they race, whatever name can be seen is already whole.
        while any(racer.poll() is None for racer in racers):
            for path in [root / "_spec.json", *root.glob("_receipts/*.json")]:
                if path.exists():
                    json.loads(path.read_bytes())
        outputs = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == count + 1
    standing = OutputStore(str(root)).receipts()
    assert [standing[part].file for part in range(count)] == outputs[0][1:]
    assert not [name for name in names_below(root) if name.endswith(".tmp")]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from signal_batch import store as module
    from signal_batch.store import AGAIN, OutputStore, Receipt
    base = Path(sys.argv[1])
    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def killed_in(name, action):
        child = os.fork()
        if child == 0:
            if name == "write":
                module.os.fsync = die
            elif name == "link":
                module.os.link = die
            else:
                module._sync = die
            action()
            os._exit(3)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, name

    parquet = base / "local.parquet"
    parquet.write_bytes(b"x" * 100_000)
    empty = dict(run_key="k", first_ordinal=0, last_ordinal=0, rows=0, bytes=0, file="f")
    done = Receipt(part=0, **empty, sha256="", logical_digest="")
    store = OutputStore(str(base / "out"))
    killed_in("write", lambda: store.claim({"run_key": "k", "identity": {}}))
    killed_in("link", lambda: store.claim({"run_key": "k", "identity": {}}))
    assert store.read_claim() is None
    store.claim({"run_key": "k", "identity": {}})
    killed_in("sync", lambda: store.put_part(parquet, "part-00000-aa.parquet"))
    killed_in("link", lambda: store.add_receipt(done))
    killed_in("write", lambda: store.write_manifest({"run_key": "k"}))
    killed_in("write", lambda: store.put_quarantine("part-00000", [{"ordinal": 1}]))
"""


def test_killed_in_the_middle_of_a_write_leaves_no_object(tmp_path: Path) -> None:
    script = textwrap.dedent(KILLED)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    out = tmp_path / "out"
    left = names_below(out)
    assert [name for name in left if not name.endswith(".tmp")] == ["_spec.json"]
    assert len(left) == 7
    store = OutputStore(str(out))
    assert store.read_manifest() is None
    assert store.receipts() == {}
    assert not list(out.glob("data/*.parquet"))
    # What is left over hinders nobody, and clean-up of data finds it.
    store.claim(claim_of("k"))
    store.add_receipt(receipt(0))
    store.remove_data(store.listing("data"))
    assert store.listing("data") == {}


# --- parts ---------------------------------------------------------------------------------


def test_part_is_put_listed_fetched_and_removed(uri: str, tmp_path: Path) -> None:
    local, back = tmp_path / "local.parquet", tmp_path / "back"
    local.write_bytes(os.urandom(1000))
    store = OutputStore(uri)
    assert store.listing("data") == {}
    store.put_part(local, "part-00000-aa.parquet")
    store.put_part(local, "part-00000-aa.parquet")  # a retry writes the same name again
    assert store.listing("data") == {"part-00000-aa.parquet": 1000}
    store.fetch("data/part-00000-aa.parquet", back)
    assert back.read_bytes() == local.read_bytes()
    store.remove_data(["part-00000-aa.parquet"])
    assert store.listing("data") == {}


def test_quarantine_is_one_json_object_a_line(uri: str) -> None:
    store = OutputStore(uri)
    lines = [{"ordinal": 3, "message": "zu kurz: 3 µs\nund kaputt"}, {"ordinal": 4, "message": ""}]
    store.put_quarantine("part-00001", lines)
    filesystem, root = fsspec.url_to_fs(uri)
    text = filesystem.cat_file(f"{root}/_quarantine/part-00001.jsonl").decode()
    assert [json.loads(line) for line in text.splitlines()] == lines


def test_a_staged_file_that_a_commit_cleaned_away_is_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exports of one spec: one commits, and removes strays, while the other puts a part."""
    local = tmp_path / "local.parquet"
    local.write_bytes(b"x" * 1000)
    store, sync = OutputStore(str(tmp_path / "out")), store_module._sync
    rounds = []

    def cleaned_away(path: str) -> None:
        rounds.append(path)
        if len(rounds) == 1:
            store.remove_data(store.listing("data"))
        sync(path)

    monkeypatch.setattr(store_module, "_sync", cleaned_away)
    store.put_part(local, "part-00000-aa.parquet")
    assert store.listing("data") == {"part-00000-aa.parquet": 1000}


def test_manifest_is_replaced(uri: str) -> None:
    store = OutputStore(uri)
    assert store.read_manifest() is None
    store.write_manifest({"run_key": "a", "n": "é"})
    store.write_manifest({"run_key": "b"})
    assert store.read_manifest() == {"run_key": "b"}


# --- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OutputError, "no space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), OutputError, "no space left"),
        (PermissionError(errno.EACCES, "Permission denied"), OutputError, "no access to"),
        (PermissionError("Access Denied"), OutputError, "no access to"),
        (OSError(errno.EROFS, "Read-only file system"), OutputError, "cannot be written"),
        (FileNotFoundError("bucket"), OutputError, "is there such a bucket"),
        (type("NoCredentialsError", (Exception,), {})("Unable"), InputError, "no credentials"),
        (ValueError("embedded null byte"), InputError, "no place to write"),
        (TimeoutError("slow"), StorageError, "slow"),
        (ConnectionResetError("gone"), StorageError, "gone"),
        (OSError(errno.EIO, "Input/output error"), StorageError, "Input/output"),
        (RuntimeError("503 SlowDown"), StorageError, "SlowDown"),
    ],
)
def test_what_storage_raises_becomes_one_of_ours(
    raised: Exception, kind: type[Exception], words: str
) -> None:
    error = output_error(raised, "s3://bucket/out/data/x")
    assert type(error) is kind
    assert words in str(error)
    assert "s3://bucket/out/data/x" in str(error)
    assert error.transient is (kind is StorageError)


def test_every_method_maps_what_the_file_system_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local.parquet"
    local.write_bytes(b"x")
    store = OutputStore("memory://broken")

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("pipe_file", "put_file", "cat_file", "ls", "get_file", "rm_file"):
        monkeypatch.setattr(type(store._fs), name, full)
    calls: list[Callable[[], Any]] = [
        lambda: store.claim(claim_of()),
        lambda: store.add_receipt(receipt()),
        lambda: store.write_manifest({}),
        lambda: store.put_part(local, "part"),
        lambda: store.put_quarantine("part", []),
        lambda: store.listing("data"),
        lambda: store.receipts(),
        lambda: store.read_manifest(),
        lambda: store.fetch("data/x", tmp_path / "y"),
        lambda: store.remove_data(["x"]),
    ]
    for call in calls:
        with pytest.raises(OutputError, match="no space left"):
            call()


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_disk_full_leaves_nothing_that_looks_like_a_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = OutputStore(str(tmp_path))
    monkeypatch.setattr(store_module.os, step, full)
    with pytest.raises(OutputError, match="no space left"):
        store.add_receipt(receipt())
    monkeypatch.undo()
    assert names_below(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_file_systems_without_hard_links_still_create_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_links(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store_module.os, "link", no_links)
    store = OutputStore(str(tmp_path))
    assert store.add_receipt(receipt(0, bytes=1)).bytes == 1
    assert store.add_receipt(receipt(0, bytes=2)).bytes == 1
    assert names_below(tmp_path) == ["_receipts/part-00000.json"]


def test_read_only_folder_is_an_output_error(
    tmp_path: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o555)
    with unprivileged(), pytest.raises(OutputError, match="no access to"):
        OutputStore(str(out)).claim(claim_of())


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount command")
def test_full_and_read_only_file_systems(tmp_path: Path) -> None:
    out = tmp_path / "disk"
    out.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=64", "tmpfs", str(out)]
    if subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        local = tmp_path / "local.parquet"
        local.write_bytes(b"x" * 40_000)
        store = OutputStore(str(out / "result"))
        store.claim(claim_of())
        store.put_part(local, "part-00000-aa.parquet")
        store.add_receipt(receipt(0))
        with pytest.raises(OutputError, match=r"no space left for .*part-00001.*run the same"):
            store.put_part(local, "part-00001-bb.parquet")
        assert store.listing("data") == {"part-00000-aa.parquet": 40_000}
        (out / "filler").write_bytes(b"x" * (os.statvfs(out).f_bavail * 4096))
        with pytest.raises(OutputError, match="no space left"):
            store.add_receipt(receipt(1))
        assert store.receipts() == {0: receipt(0)}
        subprocess.run(["mount", "-o", "remount,ro", str(out)], check=True)
        for call in (lambda: store.add_receipt(receipt(1)), lambda: store.put_part(local, "x")):
            with pytest.raises(OutputError, match="cannot be written"):
                call()
        with pytest.raises(OutputError, match="cannot be written"):
            OutputStore(str(out / "other")).claim(claim_of())
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


# --- locations -----------------------------------------------------------------------------


def test_local_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert OutputStore("out").uri == str(tmp_path / "out")
    assert OutputStore("~/out").uri == str(tmp_path / "home" / "out")


def test_file_uri_is_the_local_folder(tmp_path: Path) -> None:
    OutputStore(f"file://{tmp_path}/out").claim(claim_of())
    assert OutputStore(str(tmp_path / "out")).read_claim() == claim_of()


@pytest.mark.parametrize(
    "uri",
    ["s3://key:hunter2@bucket/out", "https://host/out?sig=hunter2", "gs://hunter2@bucket/x"],
)
def test_credentials_in_the_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(SpecError, match="credentials") as caught:
        OutputStore(uri)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        *("", "  ", "nosuch://place/out", "http://host/out", "HTTPS://host/out"),
        *("gs://", "s3://", "s3:///x", "S3:///x", "abfs://", "ftp:///x", "sftp://"),
    ],
)
def test_what_is_no_location(uri: str) -> None:
    with pytest.raises(SpecError):
        OutputStore(uri)


def test_a_service_that_is_not_there_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match=r"^ftp://nowhere\.invalid/y: gaierror: ") as caught:
        OutputStore("ftp://nowhere.invalid/y")
    assert "\n" not in str(caught.value)


# --- differences ---------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=6,
)
documents = st.dictionaries(st.text("xyz", min_size=1, max_size=2), json_values, max_size=4)


@settings(max_examples=200)
@given(documents, documents)
def test_differences_are_none_exactly_for_equal_documents(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    def without_nulls(value: Any) -> Any:
        """A null is a field at its default, like one that is absent."""
        if not isinstance(value, dict):
            return value
        kept = {key: without_nulls(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None}

    changed = {line.partition(":")[0].split(".")[0] for line in differences(one, two)}
    certain = {k for k in {*one, *two} if without_nulls(one.get(k)) != without_nulls(two.get(k))}
    assert certain <= changed
    assert changed <= {k for k in {*one, *two} if one.get(k) != two.get(k)}
    assert differences(one, one) == []


def test_replace_keeps_a_receipt_comparable() -> None:
    assert replace(receipt(1), rows=11) != receipt(1)
    assert receipt(17).name == "part-00017"
