"""Storage that does not answer is waited for, as long as that can help and no longer."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from signal_batch import failures
from signal_batch.errors import OutputConflictError, SpecError, StorageError
from signal_batch.failures import at_once, patiently
from signal_batch.frozen import checked
from signal_batch.remote import RemoteFileSystem, forget_file_systems, may_pass, open_file_system
from signal_batch.runner import export
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore, Receipt
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

URI = "far://bucket/out"


class FarFileSystem(MemoryFileSystem):
    """A service that does not answer `silent` calls, and of `lost` writes only the answer."""

    protocol = "far"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    silent = 0
    lost = 0
    calls: ClassVar[list[str]] = []

    def _answer(self, name: str) -> None:
        kind = FarFileSystem
        kind.calls.append(name)
        if kind.silent > 0:
            kind.silent -= 1
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._answer("cat_file")
        return super().cat_file(path, *arguments, **options)

    def ls(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._answer("ls")
        return super().ls(path, *arguments, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._answer("pipe_file")
        if mode == "create" and self.exists(path):
            raise OSError(errno.EINVAL, "At least one of the pre-conditions did not hold")
        super().pipe_file(path, value, **options)
        if FarFileSystem.lost > 0:
            FarFileSystem.lost -= 1
            raise TimeoutError("no answer")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("far://", "memory://"))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> type[FarFileSystem]:
    fsspec.register_implementation("far", FarFileSystem, clobber=True)
    monkeypatch.setattr(failures, "_PAUSES_S", (0.0,) * 4)
    FarFileSystem.store, FarFileSystem.pseudo_dirs = {}, [""]
    FarFileSystem.silent, FarFileSystem.lost, FarFileSystem.calls = 0, 0, []
    return FarFileSystem


def receipt(**changes: Any) -> Receipt:
    fields: dict[str, Any] = {
        **{"run_key": "k", "part": 0, "first_ordinal": 0, "last_ordinal": 3, "rows": 4},
        **{"bytes": 1, "file": "f", "sha256": "0", "logical_digest": "1"},
    }
    return Receipt(**{**fields, **changes})


# --- calls -------------------------------------------------------------------------------------


def failing(*errors: Exception) -> tuple[Callable[[], str], list[int]]:
    waiting, calls = list(errors), []

    def call() -> str:
        calls.append(1)
        if waiting:
            raise waiting.pop(0)
        return "there"

    return call, calls


def test_a_minute_is_waited_for_a_service_and_seconds_for_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(failures.time, "sleep", slept.append)
    monkeypatch.setattr(failures.random, "uniform", lambda low, high: 1.0)
    for uri, shortest, longest in (("s3://b/x", 45, 60), ("/data/x", 2, 5)):
        slept.clear()
        call, _ = failing(*[TimeoutError("no answer")] * 99)
        with pytest.raises(StorageError, match=f"{uri} could not be read: no answer"):
            patiently(call, uri)
        assert shortest <= sum(slept) <= longest
        assert slept == sorted(slept)


def test_attempts_that_are_long_themselves_come_to_an_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(failures.time, "sleep", lambda seconds: None)

    def slow() -> None:
        now[0] += 25.0
        raise TimeoutError("no answer")

    with caplog.at_level(logging.WARNING), pytest.raises(StorageError) as caught:
        patiently(slow, "s3://b/x")
    assert now[0] == 100.0
    assert "tried again for 75 s" in str(caught.value)
    assert "run the same command again" in str(caught.value)
    assert [record.getMessage() for record in caplog.records] == [
        "s3://b/x could not be read: no answer; trying again, for about a minute"
    ]


def test_a_call_within_a_patient_call_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_PAUSES_S", (0.0,) * 4)
    call, calls = failing(*[TimeoutError("no answer")] * 99)
    with pytest.raises(StorageError):
        patiently(lambda: patiently(call, "s3://b/x"), "s3://b")
    assert len(calls) == 5
    calls.clear()
    with at_once(), pytest.raises(StorageError):
        patiently(call, "s3://b/x")
    assert len(calls) == 1


class _Answer(Exception):
    def __init__(self, status_code: int) -> None:
        super().__init__(f"status {status_code}")
        self.status_code = status_code


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), True),
        (TimeoutError("x"), True),
        (OSError(errno.EBUSY, "SlowDown"), True),
        (OSError(errno.EIO, "500"), True),
        (RuntimeError("the session was closed"), True),
        (_Answer(503), True),
        (_Answer(429), True),
        (_Answer(403), False),
        (_Answer(409), False),
        (FileNotFoundError("x"), False),
        (FileExistsError("x"), False),
        (PermissionError("x"), False),
        (OSError(errno.EINVAL, "precondition"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (TypeError("a bug"), False),
        (type("NoCredentialsError", (Exception,), {})("x"), False),
        (type("ProfileNotFound", (Exception,), {})("x"), False),
    ],
)
def test_what_can_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes


# --- outputs -----------------------------------------------------------------------------------


def test_every_step_of_an_output_outlasts_a_service_that_is_away(far: type[FarFileSystem]) -> None:
    store = OutputStore(URI)
    steps: list[Callable[[], Any]] = [
        lambda: store.claim({"run_key": "k", "identity": {}}),
        lambda: store.add_receipt(receipt()),
        lambda: store.receipts(),
        lambda: store.put_object("_checkpoints/step", b"arrays"),
        lambda: store.write_manifest({"done": True}),
        lambda: store.listing("_receipts"),
        lambda: store.remove_data(["late"]),
    ]
    for step in steps:
        far.silent = 3
        step()
    assert store.receipts() == {0: receipt()}
    assert store.read_manifest() == {"done": True}
    assert store.read_object("_checkpoints/step") == b"arrays"


def test_a_write_whose_answer_was_lost_counts_and_is_not_somebody_elses(
    far: type[FarFileSystem],
) -> None:
    store = OutputStore(URI)
    far.lost = 1
    assert store.claim({"run_key": "k", "identity": {}})["run_key"] == "k"
    far.lost = 1
    assert store.add_receipt(receipt()) == receipt()
    assert store.add_receipt(receipt(bytes=2)).bytes == 1
    with pytest.raises(OutputConflictError):
        store.claim({"run_key": "another", "identity": {}})


def test_a_service_that_stays_away_is_asked_a_bounded_number_of_times(
    far: type[FarFileSystem],
) -> None:
    store = OutputStore(URI)
    far.silent = 1 << 30
    for step in (store.read_manifest, lambda: store.add_receipt(receipt())):
        far.calls.clear()
        with pytest.raises(StorageError, match=r"far://.*bucket/out/_.*nobody listens"):
            step()
        assert len(far.calls) == 5


def test_what_is_missing_is_missing_at_once(far: type[FarFileSystem]) -> None:
    assert OutputStore(URI).read_manifest() is None
    assert far.calls == ["cat_file"]


def test_only_a_service_gets_patience(tmp_path: Path, far: type[FarFileSystem]) -> None:
    assert not isinstance(open_file_system(str(tmp_path))[0], RemoteFileSystem)
    assert not isinstance(open_file_system("memory://x")[0], RemoteFileSystem)
    assert isinstance(open_file_system(URI)[0], RemoteFileSystem)


def test_file_systems_are_made_anew_from_the_environment(
    far: type[FarFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fsspec.url_to_fs(URI)[0]
    assert fsspec.url_to_fs(URI)[0] is first
    forget_file_systems()
    assert fsspec.url_to_fs(URI)[0] is not first


# --- credentials from a block ------------------------------------------------------------------


def test_without_a_server_a_block_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "dataset": str(tmp_path / "nothing"),
        "output": str(tmp_path / "out"),
        "columns": ["field:samples", "label=metadata:label:int32"],
        "execution": {"credentials": "lab"},
    }
    with pytest.raises(SpecError, match="credentials 'lab' name a block on a Prefect server"):
        export(checked(ExportSpec, fields))
    learned = {"target": "label", "split": "id test=0.2", "trainer": "sklearn", "steps": 1}
    with pytest.raises(SpecError, match="credentials 'lab' name a block on a Prefect server"):
        train(checked(TrainSpec, {**fields, **learned}))
    assert not (tmp_path / "out").exists()
