"""Failures of storage and shard readers: what they mean, and trying again what may pass."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import signal_dataset as sds

from signal_batch.errors import (
    CorruptDatasetError,
    InputError,
    OutputError,
    SignalBatchError,
    StorageError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ints = npt.NDArray[np.int64]

#: Pauses before each further attempt of a storage call that failed in passing: nearly a minute
#: in all, so that a service that is started again is waited for.
_PAUSES_S = (0.2, 0.8, 2.0, 4.0, *(5.0,) * 9)
#: A local disk is not started again: so many of the pauses are enough.
_LOCAL_PAUSES = 3
#: No further attempt so long after the first failure, however few there were: attempts themselves
#: can be long.
_PATIENCE_S = 60.0
#: After this time somebody may wonder what is going on.
_TELL_AFTER_S = 3.0
_ERRNO_OF_TEXT = {os.strerror(code): code for code in errno.errorcode}
_SYSTEM_CALL = re.compile(r"\w+\(\) failed: ([^;]+)")
#: In the names of what botocore, Google's and Azure's libraries raise.
_NO_CREDENTIALS = (
    *("NoCredentials", "PartialCredentials", "DefaultCredentials"),
    *("ProfileNotFound", "ClientAuthentication"),
)
_DAMAGE = ("orrupt", "mismatch", "runcated", "should be at least", "nvalid")

_once: ContextVar[bool] = ContextVar("_once", default=False)


def patiently(call: Callable[[], T], uri: str) -> T:
    """Make a storage call, again after a pause if its failure may pass.

    Raises only errors of this package. A call within a patient call is made once: the outer one
    is made again as a whole.
    """
    pauses = _PAUSES_S if "://" in uri else _PAUSES_S[:_LOCAL_PAUSES]
    return persistently(call, lambda exc: boundary_error(exc, uri), pauses)


def persistently(
    call: Callable[[], T],
    meaning: Callable[[Exception], SignalBatchError],
    pauses_s: Sequence[float] | None = None,
) -> T:
    """Make a call, again after a pause if the error that its failure stands for may pass.

    Raises that error, with how long it was tried. What `meaning` itself raises is not tried again.
    """
    pauses = iter(() if _once.get() else _PAUSES_S if pauses_s is None else pauses_s)
    began, failed_at, told = time.monotonic(), math.inf, False
    while True:
        try:
            with at_once():
                return call()
        except Exception as exc:
            error, now = meaning(exc), time.monotonic()
            failed_at = min(failed_at, now)
            pause_s = next(pauses, None)
            if not error.transient or pause_s is None or now - failed_at > _PATIENCE_S:
                raise _gave_up(error, now - failed_at) from exc
            if not told and now + pause_s - began > _TELL_AFTER_S:
                logger.warning("%s; trying again, for about a minute", error)
                told = True
        time.sleep(pause_s * random.uniform(0.5, 1.5))


def _gave_up(error: SignalBatchError, tried_s: float) -> SignalBatchError:
    """The error, with how long it was waited for better, if it was."""
    if not error.transient or tried_s < 1.0:
        return error
    return type(error)(
        f"{error}; it was tried again for {tried_s:.0f} s. What is finished stays: when the "
        "storage answers, run the same command again"
    )


@contextmanager
def at_once() -> Iterator[None]:
    """Make each storage call of the block once, without patience."""
    token = _once.set(True)
    try:
        yield
    finally:
        _once.reset(token)


def boundary_error(exc: Exception, uri: str) -> SignalBatchError:
    """The error of this package that a failure of storage or of a shard reader stands for."""
    if isinstance(exc, SignalBatchError):
        return exc
    if type(exc) is RuntimeError:
        exc = native_error(exc, uri)
    if isinstance(exc, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return CorruptDatasetError(f"{uri} is missing, though the dataset names it")
    if isinstance(exc, PermissionError):
        return InputError(f"no permission to read {uri}: {exc}")
    if isinstance(exc, sds.StorageError) and "credentials" in str(exc).lower():
        return InputError(f"the credentials for {uri} are missing or were refused: {exc}")
    if isinstance(exc, OSError):
        return StorageError(f"{uri} could not be read: {exc}")
    if isinstance(exc, IndexError):
        return CorruptDatasetError(f"{uri} holds fewer records than declared: {exc}")
    if isinstance(exc, ValueError):
        return CorruptDatasetError(str(exc) if uri in str(exc) else f"{uri}: {exc}")
    raise exc


def output_error(exc: Exception, where: str) -> SignalBatchError:
    """What a failed write or read of an output means, and whether trying again can help."""
    name = type(exc).__name__
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"no space left for {where}; free some and run the same command again")
    if isinstance(exc, NotADirectoryError):
        return InputError(f"{where} cannot be: a part of that path is a file, not a folder")
    if isinstance(exc, PermissionError):
        return OutputError(f"no access to {where}: {exc}")
    if isinstance(exc, OSError) and exc.errno == errno.EROFS:
        return OutputError(f"{where} cannot be written: {exc}")
    if isinstance(exc, ValueError) or name == "ParamValidationError":
        return InputError(f"{where} is no place to write to: {exc}")
    if any(word in name for word in _NO_CREDENTIALS):
        return InputError(f"no credentials for {where}: {exc}")
    if isinstance(exc, FileNotFoundError):
        return OutputError(f"{where} cannot be reached: {exc} (is there such a bucket?)")
    return StorageError(f"{where}: {name}: {exc}")


def native_error(exc: RuntimeError, uri: str) -> Exception:
    """What an ArrayRecord failure means; the binding raises `RuntimeError` for all of them."""
    text = str(exc)
    if "out of bound" in text:
        return IndexError(f"shard {uri}: {text}")
    match = _SYSTEM_CALL.search(text)
    code = _ERRNO_OF_TEXT.get(match[1].strip()) if match else None
    if code is not None:
        return OSError(code, os.strerror(code), uri)
    if "://" in uri and not any(word in text for word in _DAMAGE):
        return sds.StorageError(f"shard {uri}: {text}")
    return sds.CorruptDatasetError(f"shard {uri} is damaged: {text}")
