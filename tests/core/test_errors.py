"""The error tree against its drawing, exit codes, and errors that cross a process boundary."""

from __future__ import annotations

import builtins
import inspect
import json
import pickle
import re
import subprocess
import sys
from types import ModuleType

import pytest

import signal_batch
from signal_batch import errors
from signal_batch.errors import (
    CorruptDatasetError,
    InputError,
    MissingValueError,
    SignalBatchError,
    error_event,
    rebuilt_error,
)

CLASSES = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, SignalBatchError)
]
BRANCH = re.compile(r"^([ │]*)[├└]── (\w+)(?: \((\w+)\))?")


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """Class -> (parent, builtin beside it), as the module's docstring draws it."""
    found: dict[str, tuple[str, str | None]] = {}
    above = {-1: "SignalBatchError"}
    for line in (errors.__doc__ or "").splitlines():
        if match := BRANCH.match(line):
            depth = (len(match[1]) - 4) // 4
            found[match[2]] = (above[depth - 1], match[3])
            above[depth] = match[2]
    return found


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    tree = {}
    for kind in CLASSES:
        if kind is not SignalBatchError:
            parent, *others = (base.__name__ for base in kind.__bases__)
            assert len(others) <= 1
            tree[kind.__name__] = (parent, others[0] if others else None)
    assert drawn_tree() == tree
    assert len(tree) > 10


def test_every_class_beside_the_tree_is_a_builtin() -> None:
    for _, builtin in drawn_tree().values():
        assert builtin is None or issubclass(getattr(builtins, builtin), Exception)


@pytest.mark.parametrize("kind", CLASSES)
def test_bad_input_exits_with_2_and_a_failed_job_with_1(kind: type[SignalBatchError]) -> None:
    # A value that a record lacks is what a column asked for in vain.
    assert kind.exit_code == (2 if issubclass(kind, InputError | MissingValueError) else 1)


def test_only_storage_and_dead_workers_are_worth_another_attempt() -> None:
    assert {kind.__name__ for kind in CLASSES if kind.transient} == {
        "StorageError",
        "WorkerDiedError",
    }


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_crosses_a_process_boundary_as_json(kind: type[SignalBatchError]) -> None:
    error = kind("shard 'a' → gone, \"quoted\"\nsecond line")
    event = json.loads(json.dumps(error_event(error)))
    again = rebuilt_error(event)
    assert event["event"] == "error"
    assert type(again) is kind
    assert str(again) == str(error) == "shard 'a' → gone, \"quoted\"\nsecond line"


@pytest.mark.parametrize("ordinal", [None, 0, 17])
def test_the_ordinal_of_a_damaged_record_crosses_too(ordinal: int | None) -> None:
    error = CorruptDatasetError("damaged", ordinal=ordinal)
    again = rebuilt_error(json.loads(json.dumps(error_event(error))))
    assert isinstance(again, CorruptDatasetError)
    assert again.ordinal == ordinal
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.ordinal) == ("damaged", ordinal)


def test_an_unknown_kind_is_rebuilt_as_the_base_class() -> None:
    event = {"event": "error", "kind": "NewerError", "message": "what", "ordinal": None}
    assert type(rebuilt_error(event)) is SignalBatchError


def test_an_error_without_a_message_is_an_empty_string() -> None:
    assert str(SignalBatchError()) == ""


def test_what_the_package_exports_is_what_it_says() -> None:
    public = {
        name
        for name, value in vars(signal_batch).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public == set(signal_batch.__all__)
    assert list(signal_batch.__all__) == sorted(signal_batch.__all__)


def test_importing_the_core_leaves_prefect_alone() -> None:
    code = (
        "import sys, signal_batch, pkgutil, importlib\n"
        "for item in pkgutil.iter_modules(signal_batch.__path__):\n"
        "    if item.name != '__main__':\n"
        "        importlib.import_module('signal_batch.' + item.name)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'prefect'))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
