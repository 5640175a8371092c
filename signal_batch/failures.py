"""Failures of storage and shard readers: what they mean, and trying again what may pass."""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import signal_dataset as sds

from signal_batch.errors import CorruptDatasetError, InputError, SignalBatchError, StorageError

T = TypeVar("T")
Ints = npt.NDArray[np.int64]

#: Pauses before each further attempt of a storage call that failed in passing.
_PAUSES_S = (0.2, 0.8, 3.2)
_ERRNO_OF_TEXT = {os.strerror(code): code for code in errno.errorcode}
_SYSTEM_CALL = re.compile(r"\w+\(\) failed: ([^;]+)")
_DAMAGE = ("orrupt", "mismatch", "runcated", "should be at least", "nvalid")


def patiently(call: Callable[[], T], uri: str) -> T:
    """Make a storage call, again after a pause if its failure may pass.

    Raises only errors of this package.
    """
    for pause_s in _PAUSES_S:
        try:
            return call()
        except Exception as exc:
            error = boundary_error(exc, uri)
            if not error.transient:
                raise error from exc
        time.sleep(pause_s * random.uniform(0.5, 1.5))
    try:
        return call()
    except Exception as exc:
        raise boundary_error(exc, uri) from exc


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
