"""Every error this package raises, in one tree.

::

    SignalBatchError
    ├── InputError (ValueError)            what was asked for cannot be done; nothing was written
    │   ├── SpecError                  a spec, selector, filter or feature is wrong
    │   ├── DatasetNotFoundError       no dataset at that URI
    │   ├── DatasetFormatError         something is there, but no dataset it can open
    │   ├── UnknownAnnotationError     no annotation set of that name
    │   └── OutputConflictError        the output folder belongs to another job
    ├── PinMismatchError (ValueError)      the data is no longer what the pin names
    ├── CorruptDatasetError (ValueError)   a shard, record or annotation row is damaged
    ├── MissingValueError (KeyError)       a record lacks what a column asks for
    ├── FeatureError                       a feature function failed or broke its schema
    ├── StorageError (OSError)             storage did not answer; trying again may help
    ├── OutputError (OSError)              the output could not be written
    ├── DamagedOutputError                 an output disagrees with its own manifest
    ├── WorkerDiedError                    a worker was killed or hung; trying again may help
    ├── ShardsFailedError                  several shards of an export failed, each by itself
    └── StoppedError                       the run was asked to stop

``exit_code`` is what the command line returns for it: 1 the job failed, 2 bad input.
``transient`` says whether running the same thing again can help; nothing else is retried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class SignalBatchError(Exception):
    """Base class of all errors of this package."""

    exit_code: ClassVar[int] = 1
    transient: ClassVar[bool] = False

    def __str__(self) -> str:
        # KeyError would otherwise quote its message like a key.
        return str(self.args[0]) if self.args else ""


class InputError(SignalBatchError, ValueError):
    """What was asked for cannot be done, and nothing was written."""

    exit_code = 2


class SpecError(InputError):
    """A spec, selector, filter or feature reference is wrong."""


class DatasetNotFoundError(InputError):
    """There is no dataset at the URI."""


class DatasetFormatError(InputError):
    """The URI holds something that this reader cannot open as a dataset."""


class UnknownAnnotationError(InputError):
    """The dataset has no annotation set of that name."""


class OutputConflictError(InputError):
    """The output folder belongs to a job with another run key."""


class PinMismatchError(SignalBatchError, ValueError):
    """The dataset or an annotation set is no longer what the pin names."""


class CorruptDatasetError(SignalBatchError, ValueError):
    """A shard, a record or an annotation row is damaged.

    `ordinal` is the record concerned, where one is known.
    """

    def __init__(self, message: str, *, ordinal: int | None = None) -> None:
        super().__init__(message)
        self.ordinal = ordinal


class MissingValueError(SignalBatchError, KeyError):
    """A record lacks the key or field that a column asks for.

    `problem` is the message without what can be done about it.
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".rstrip())
        self.problem = problem


class FeatureError(SignalBatchError):
    """A feature function failed, or returned what its schema does not allow."""


class StorageError(SignalBatchError, OSError):
    """Storage did not answer as it should; trying again may help."""

    transient = True


class OutputError(SignalBatchError, OSError):
    """The output could not be written: disk full, no permission, no such bucket."""


class DamagedOutputError(SignalBatchError):
    """An output folder disagrees with its own manifest or receipts."""


class WorkerDiedError(SignalBatchError):
    """A worker process was killed, ran out of memory or hung."""

    transient = True


class ShardsFailedError(SignalBatchError):
    """Several shards of an export failed, each by itself; the message has each cause."""

    causes: Sequence[SignalBatchError] = ()


class StoppedError(SignalBatchError):
    """The run was asked to stop before it was done."""


def error_event(exc: SignalBatchError) -> dict[str, Any]:
    """An error as plain JSON, to cross a process boundary; see `rebuilt_error`."""
    return {
        "event": "error",
        "kind": type(exc).__name__,
        "message": str(exc),
        "ordinal": getattr(exc, "ordinal", None),
    }


def rebuilt_error(event: Mapping[str, Any]) -> SignalBatchError:
    """The error that `error_event` described, as the same class."""
    exc = _classes().get(event["kind"], SignalBatchError)(event["message"])
    if isinstance(exc, CorruptDatasetError):
        exc.ordinal = event["ordinal"]
    return exc


def _classes() -> dict[str, type[SignalBatchError]]:
    found: dict[str, type[SignalBatchError]] = {}
    pending: list[type[SignalBatchError]] = [SignalBatchError]
    while pending:
        kind = pending.pop()
        found[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return found
