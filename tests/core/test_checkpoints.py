"""Checkpoints: the newest whole one wins, whatever a kill or a bad disk made of the others."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from signal_batch.checkpoints import BackgroundSaver, Checkpoint, Checkpoints, copied
from signal_batch.errors import OutputConflictError, OutputError, SpecError
from signal_batch.store import OutputStore

KEY = "a" * 64
IDENTITY = {"spec": {"seed": 1, "columns": ["x"]}, "data": {"root": "r"}}
VERSIONS = {"numpy": "2"}


def checkpoints(folder: Path, **changes: Any) -> Checkpoints:
    options: dict[str, Any] = {"run_key": KEY, "identity": IDENTITY, "keep": 3}
    return Checkpoints(str(folder), **options | changes)


def at(step: int) -> Checkpoint:
    """What a run had learned after a step: another array each time."""
    arrays = {
        "weights": np.arange(6, dtype=np.float32).reshape(2, 3) * step,
        "count": np.array(step, np.int64),
    }
    return Checkpoint(step, step * 8, arrays, {"metrics": {"rows": [step]}, "times": {"s": 0.5}})


def saved(folder: Path, *steps: int, **changes: Any) -> Checkpoints:
    made = checkpoints(folder, **changes)
    for step in steps:
        made.save(at(step), VERSIONS)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "_checkpoints").iterdir())


def document_of(folder: Path, step: int) -> Path:
    return folder / "_checkpoints" / f"step-{step:09d}.json"


def arrays_of(folder: Path, step: int) -> Path:
    [path] = (folder / "_checkpoints").glob(f"step-{step:09d}-*.safetensors")
    return path


def same(found: Checkpoint | None, expected: Checkpoint) -> None:
    assert found is not None
    assert (found.step, found.records) == (expected.step, expected.records)
    assert found.progress == expected.progress
    assert set(found.arrays) == set(expected.arrays)
    for name, value in expected.arrays.items():
        identical(found.arrays[name], value)


def identical(found: Any, value: Any) -> None:
    """Bit for bit: NaNs, signs of zeros, dtype and shape included."""
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()


def nothing_to_warn_of(message: str) -> None:
    pytest.fail(message)


# --- what is there -------------------------------------------------------------------------------


def test_a_changed_document_is_noticed(tmp_path: Path) -> None:
    made = saved(tmp_path, 4, 9)
    document = document_of(tmp_path, 9)
    changed = document.read_text().replace('"records": ', '"records": 1', 1)
    assert json.loads(changed)["cursor"]["step"] == 9
    document.write_text(changed)
    told: list[str] = []
    same(made.newest(told.append), at(4))
    assert "changed after it was written" in told[0]


def test_there_is_none_at_first(tmp_path: Path) -> None:
    made = checkpoints(tmp_path / "out")
    assert made.newest(nothing_to_warn_of) is None
    assert made.steps() == []
    assert not (tmp_path / "out").exists(), "looking writes nothing"


def test_the_newest_is_the_one_to_go_on_from(tmp_path: Path) -> None:
    made = saved(tmp_path, 4, 9, 1200)
    assert made.steps() == [4, 9, 1200]
    same(made.newest(nothing_to_warn_of), at(1200))
    same(checkpoints(tmp_path).newest(nothing_to_warn_of), at(1200))


def test_what_is_written(tmp_path: Path) -> None:
    saved(tmp_path, 12)
    payload = arrays_of(tmp_path, 12).read_bytes()
    digest = sha256(payload).hexdigest()
    file = f"step-000000012-{digest[:12]}.safetensors"
    assert names(tmp_path) == [file, "step-000000012.json"]
    document = json.loads(document_of(tmp_path, 12).read_text())
    said = document.pop("digest")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert said == sha256(text.encode()).hexdigest()
    assert document == {
        "run_key": KEY,
        "identity": IDENTITY,
        "cursor": {"step": 12, "records": 96},
        "arrays": {"file": file, "bytes": len(payload), "sha256": digest},
        "progress": at(12).progress,
        "versions": VERSIONS,
    }
    loaded = load_file(arrays_of(tmp_path, 12))
    for name, value in at(12).arrays.items():
        identical(loaded[name], value)


def test_the_same_step_twice_is_the_same_bytes(tmp_path: Path) -> None:
    made = saved(tmp_path, 3)
    before = {path.name: path.read_bytes() for path in (tmp_path / "_checkpoints").iterdir()}
    made.save(at(3), VERSIONS)
    after = {path.name: path.read_bytes() for path in (tmp_path / "_checkpoints").iterdir()}
    assert after == before


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    made = checkpoints(tmp_path, keep=keep)
    for step in range(1, 8):
        made.save(at(step), VERSIONS)
        kept = list(range(max(1, step - keep + 1), step + 1))
        assert made.steps() == kept
        assert len(names(tmp_path)) == 2 * len(kept)
        for left in kept:
            assert arrays_of(tmp_path, left).exists()


def test_documents_go_before_the_arrays_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while it tidies up must not leave documents of arrays that are gone."""
    saved(tmp_path, 1, 2, 3, keep=3)
    removed: list[str] = []

    def remove(self: OutputStore, paths: Any) -> None:
        removed.extend(paths)

    monkeypatch.setattr(OutputStore, "remove", remove)
    checkpoints(tmp_path, keep=1).save(at(4), VERSIONS)
    kinds = [path.endswith(".json") for path in removed]
    assert kinds == [True] * 3 + [False] * 3


# --- arrays --------------------------------------------------------------------------------------

DTYPES = (
    *("float16", "float32", "float64", "complex64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
states = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
    ),
    max_size=4,
)


@given(states)
@settings(max_examples=40, deadline=None)
def test_arrays_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("state")
    checkpoints(folder).save(replace(at(1), arrays=copied(state)), VERSIONS)
    same(checkpoints(folder).newest(nothing_to_warn_of), replace(at(1), arrays=state))


def test_special_numbers_and_shapes(tmp_path: Path) -> None:
    state = {
        "nan": np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 5e-324]),
        "payload": np.array([0x7FF0DEADBEEF0001], np.uint64).view(np.float64),
        "scalar": np.array(2.5, np.float32),
        "flag": np.array(True),
        "empty": np.zeros((0, 3), np.int64),
        "largest": np.array([2**63 - 1, -(2**63)]),
        "turned": np.asfortranarray(np.arange(12.0).reshape(3, 4)).T,
        "every other": np.arange(10)[::2],
        "complex": np.array([1 - 2j, np.nan * 1j], np.complex64),
    }
    checkpoints(tmp_path).save(replace(at(1), arrays=copied(state)), VERSIONS)
    same(checkpoints(tmp_path).newest(nothing_to_warn_of), replace(at(1), arrays=state))


@pytest.mark.parametrize(
    "odd",
    [
        np.ones(2, np.complex128),
        np.array(["a"]),
        np.array([None], object),
        np.array(0, "datetime64[s]"),
    ],
)
def test_arrays_that_cannot_be_saved_are_named(tmp_path: Path, odd: Any) -> None:
    state = {"fine": np.ones(2), "moments": odd}
    with pytest.raises(SpecError, match=f"moments is {re.escape(str(odd.dtype))}") as caught:
        checkpoints(tmp_path).save(replace(at(1), arrays=state), VERSIONS)
    assert "fine" not in str(caught.value)
    assert not (tmp_path / "_checkpoints").exists()


def test_arrays_are_copied() -> None:
    source = {
        "a": np.arange(6.0).reshape(2, 3),
        "view": np.arange(20.0)[::2],
        "fortran": np.asfortranarray(np.ones((2, 3), np.int16)),
        "scalar": np.array(1.5),
        "python": 7,
    }
    held = {name: np.array(value, copy=True) for name, value in source.items()}
    made = copied(source)  # type: ignore[arg-type]
    for name, value in made.items():
        assert value.flags.c_contiguous
        assert value.flags.owndata
        assert not np.shares_memory(value, np.asarray(source[name]))
        identical(value, held[name])
    for value in source.values():
        if isinstance(value, np.ndarray):
            value[...] = 99
    for name, value in made.items():
        identical(value, held[name])


# --- damage --------------------------------------------------------------------------------------


def _flip(path: Path, place: int) -> None:
    payload = bytearray(path.read_bytes())
    payload[place] ^= 1
    path.write_bytes(bytes(payload))


def _changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated arrays": (
        lambda out: arrays_of(out, 3).write_bytes(arrays_of(out, 3).read_bytes()[:-5]),
        "cut short or changed",
    ),
    "empty arrays": (lambda out: arrays_of(out, 3).write_bytes(b""), "cut short or changed"),
    "longer arrays": (
        lambda out: arrays_of(out, 3).write_bytes(arrays_of(out, 3).read_bytes() + b"x"),
        "cut short or changed",
    ),
    "a flipped bit at the end": (lambda out: _flip(arrays_of(out, 3), -1), "changed"),
    "a flipped bit in the header": (lambda out: _flip(arrays_of(out, 3), 20), "changed"),
    "missing arrays": (lambda out: arrays_of(out, 3).unlink(), "is missing"),
    "half a document": (
        lambda out: document_of(out, 3).write_text(document_of(out, 3).read_text()[:80]),
        "not valid JSON",
    ),
    "an empty document": (lambda out: document_of(out, 3).write_text(""), "is empty"),
    "a document of bytes": (lambda out: document_of(out, 3).write_bytes(b"\xff\x00"), "JSON"),
    "a list": (lambda out: document_of(out, 3).write_text("[]"), "does not hold a JSON object"),
    "an empty object": (lambda out: document_of(out, 3).write_text("{}"), "run_key"),
    "no arrays named": (lambda out: _changed(document_of(out, 3), arrays=None), "damaged"),
    "no progress": (lambda out: _changed(document_of(out, 3), progress=None), "damaged"),
    "no cursor": (lambda out: _changed(document_of(out, 3), cursor={}), "step"),
    "the cursor of another step": (
        lambda out: _changed(document_of(out, 3), cursor={"step": 2, "records": 16}),
        "its cursor is of another step",
    ),
    "a cursor in words": (
        lambda out: _changed(document_of(out, 3), cursor={"step": 3, "records": "many"}),
        "its cursor is of another step",
    ),
    "a step in words": (
        lambda out: _changed(document_of(out, 3), cursor={"step": "3", "records": 24}),
        "damaged",
    ),
    "the arrays of another step": (
        lambda out: (
            _changed(
                document_of(out, 3), arrays=json.loads(document_of(out, 2).read_text())["arrays"]
            )
            or arrays_of(out, 2).write_bytes(arrays_of(out, 3).read_bytes())
        ),
        "cut short or changed",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, kind: str
) -> None:
    made = saved(tmp_path, 1, 2, 3)
    if kind == "the arrays of another step":
        saved(tmp_path, 1)
    damage, words = DAMAGE[kind]
    damage(tmp_path)
    warnings: list[str] = []
    found = made.newest(warnings.append)
    assert warnings[0].startswith("checkpoint step-000000003 is damaged (")
    assert words in warnings[0]
    assert warnings[0].endswith("; trying the one before")
    if kind == "the arrays of another step":
        assert [warning[:25] for warning in warnings[1:]] == ["checkpoint step-000000002"]
        same(found, at(1))
    else:
        assert len(warnings) == 1
        same(found, at(2))


def test_all_of_them_damaged_is_a_fresh_start(tmp_path: Path) -> None:
    made = saved(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        arrays_of(tmp_path, step).unlink()
    warnings: list[str] = []
    assert made.newest(warnings.append) is None
    assert [warning.split()[1] for warning in warnings] == [
        "step-000000003",
        "step-000000002",
        "step-000000001",
    ]


def test_going_on_mends_a_damaged_one(tmp_path: Path) -> None:
    """The run that fell back comes past the same step again, with the same bytes."""
    made = saved(tmp_path, 1, 2, 3)
    _flip(arrays_of(tmp_path, 3), -1)
    made.save(at(3), VERSIONS)
    same(made.newest(nothing_to_warn_of), at(3))


def test_a_document_that_goes_away_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saved(tmp_path, 1, 2)
    listing = OutputStore.listing

    def then_gone(self: OutputStore, folder: str) -> dict[str, int]:
        found = listing(self, folder)
        document_of(tmp_path, 2).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(OutputStore, "listing", then_gone)
    warnings: list[str] = []
    same(made.newest(warnings.append), at(1))
    assert "step-000000002 is damaged (it went away)" in warnings[0]


# --- another run ---------------------------------------------------------------------------------


def test_the_checkpoints_of_another_run_are_refused_with_what_differs(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    other = {"spec": {"seed": 2, "columns": ["x"], "steps": 9}, "data": {"root": "r"}}
    with pytest.raises(OutputConflictError) as caught:
        checkpoints(tmp_path, run_key="b" * 64, identity=other).newest(nothing_to_warn_of)
    message = str(caught.value)
    assert f"run key {KEY[:12]}, this one is {'b' * 12}" in message
    assert "spec.seed: there 1, here 2; spec.steps: there the default, here 9" in message
    assert "columns" not in message
    assert "data" not in message.partition("They differ")[2]
    assert message.endswith("Choose another output folder")


def test_another_key_alone_is_refused_too(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(OutputConflictError, match="differ in: the run key alone"):
        checkpoints(tmp_path, run_key="b" * 64).newest(nothing_to_warn_of)


# --- kills ---------------------------------------------------------------------------------------


def test_arrays_that_no_document_names_do_no_harm_and_are_swept(tmp_path: Path) -> None:
    made = saved(tmp_path, 1, 2, keep=2)
    folder = tmp_path / "_checkpoints"
    strays = [
        "step-000000002-0123456789ab.safetensors",
        f"step-000000002.json.{'0' * 32}.tmp",
        "step-000000003-0123456789ab.safetensors",
        f"step-000000004-0123456789ab.safetensors.{'0' * 32}.tmp",
    ]
    for name in (*strays, "notes.txt"):
        (folder / name).write_bytes(b"half of it")
    assert made.steps() == [1, 2]
    same(made.newest(nothing_to_warn_of), at(2))
    made.save(at(3), VERSIONS)
    assert strays[3] in names(tmp_path), "it may be of a run that is further on"
    assert strays[1] not in names(tmp_path)
    made.save(at(4), VERSIONS)
    made.save(at(5), VERSIONS)
    assert made.steps() == [4, 5]
    assert len(names(tmp_path)) == 5
    assert (folder / "notes.txt").exists(), "what is not ours is left alone"


_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from signal_batch.checkpoints import Checkpoint, Checkpoints
from signal_batch.store import OutputStore

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

where, out = sys.argv[1:]
made = Checkpoints(out, run_key="a" * 64, identity={}, keep=3)
made.save(Checkpoint(1, 8, {"w": np.ones(3)}, {}), {})
if where == "document":
    OutputStore.put_document = die
else:
    Path.replace = die
made.save(Checkpoint(2, 16, {"w": np.full(3, 2.0)}, {}), {})
"""


@pytest.mark.parametrize("where", ["document", "arrays"])
def test_a_save_that_is_killed_leaves_the_one_before_in_force(tmp_path: Path, where: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _KILLED, where, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    left = [name for name in names(tmp_path) if name.startswith("step-000000002")]
    assert len(left) == 1
    assert left[0].endswith(".safetensors" if where == "document" else ".tmp")
    made = checkpoints(tmp_path, identity={}, keep=1)
    found = made.newest(nothing_to_warn_of)
    assert found is not None
    assert (found.step, found.arrays["w"].tolist()) == (1, [1.0, 1.0, 1.0])
    made.save(replace(at(2), arrays={"w": np.full(3, 2.0)}), VERSIONS)
    made.save(at(3), VERSIONS)
    assert len(names(tmp_path)) == 2


def test_a_save_that_fails_between_arrays_and_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saved(tmp_path, 1)

    def full(self: OutputStore, path: str, document: Any) -> None:
        raise OutputError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(OutputStore, "put_document", full)
        with pytest.raises(OutputError, match="no space left"):
            made.save(at(2), VERSIONS)
    assert made.steps() == [1]
    same(made.newest(nothing_to_warn_of), at(1))
    made.save(at(2), VERSIONS)
    same(made.newest(nothing_to_warn_of), at(2))


# --- in the background ---------------------------------------------------------------------------


class _Slow:
    """A save that takes until it is let go; fails with `error` if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.began, self.let_go = threading.Event(), threading.Event()
        self.steps: list[int] = []

    def __call__(self, checkpoint: Checkpoint) -> None:
        self.began.set()
        assert self.let_go.wait(20)
        self.steps.append(checkpoint.step)
        if self.error is not None:
            raise self.error


def test_saving_goes_on_beside_training() -> None:
    slow = _Slow()
    saver = BackgroundSaver(slow)
    assert not saver.busy
    saver.finish()  # nothing to wait for
    began = time.monotonic()
    saver.start(at(1))
    assert time.monotonic() - began < 10, "it did not wait for the save"
    assert slow.began.wait(20)
    assert saver.busy
    assert slow.steps == []
    slow.let_go.set()
    saver.finish()
    assert slow.steps == [1]
    assert not saver.busy


def test_one_save_at_a_time_and_in_order() -> None:
    slow = _Slow()
    saver = BackgroundSaver(slow)
    saver.start(at(1))
    second = threading.Thread(target=saver.start, args=(at(2),))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second waits for the first"
    slow.let_go.set()
    second.join(20)
    saver.finish()
    assert slow.steps == [1, 2]


@pytest.mark.parametrize("error", [OutputError("disk full"), KeyError("x"), SystemExit(3)])
@pytest.mark.parametrize("surfaces", ["start", "finish"])
def test_what_a_save_raised_is_raised_by_what_comes_next(
    error: BaseException, surfaces: str
) -> None:
    slow = _Slow(error)
    slow.let_go.set()
    saver = BackgroundSaver(slow)
    saver.start(at(1))
    with pytest.raises(type(error)) as caught:
        saver.start(at(2)) if surfaces == "start" else saver.finish()
    assert caught.value is error
    assert slow.steps == [1], "nothing was begun after it"
    slow.error = None
    saver.finish()
    saver.start(at(3))
    saver.finish()
    assert slow.steps == [1, 3], "and raised once only"


def test_a_saver_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    made = checkpoints(tmp_path)
    saver = BackgroundSaver(lambda item: made.save(item, VERSIONS))
    for step in (1, 2, 3, 4):
        saver.start(at(step))
    saver.finish()
    assert made.steps() == [2, 3, 4]
    assert set(threading.enumerate()) == before
