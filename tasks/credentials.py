"""Credentials of the storage from a Prefect Secret block, put into the environment of a run.

The block's value is a JSON object of environment variables, as `{"AWS_ACCESS_KEY_ID": "...", ...}`.
Parameters, logs, artifacts and what is written to the output hold the block's name alone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from typing import Any

from prefect.blocks.system import Secret

from signal_batch.errors import InputError, SignalBatchError, StorageError
from signal_batch.remote import forget_file_systems

logger = logging.getLogger(__name__)

#: What a block may set: the settings of storage libraries, and nothing that could change which
#: code runs.
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "GCS_", "GCSFS_", "STORAGE_", "FSSPEC_")
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
#: Half of other credentials: a token that belongs to a key which the block replaces.
_BELONGS = {"AWS_ACCESS_KEY_ID": "AWS_SESSION_TOKEN"}

_lock = threading.Lock()
#: What the environment had before a block replaced it; None where it had nothing.
_before: dict[str, str | None] = {}


def use_credentials(name: str | None) -> None:
    """Put the variables of a Secret block into this process's environment; None changes nothing.

    Worker programs inherit them. The block wins over what is set already, as the run asked for it
    by name; what an earlier block set and this one does not is put back. May be called any number
    of times and from any thread: a block that has not changed changes nothing. Runs with different
    credentials cannot share a process.

    Raises:
        InputError: there is no such block, or it holds anything but variables of the storage.
        StorageError: Prefect's server did not answer.
    """
    if name is None:
        return
    wanted = _checked(name, _value_of(name))
    for key, belonging in _BELONGS.items():
        if key in wanted:
            wanted.setdefault(belonging, None)
    with _lock:
        if _apply(wanted):
            forget_file_systems()
            shown = ", ".join(sorted(key for key, value in wanted.items() if value is not None))
            logger.info("storage credentials from block %s: %s", name, shown)


def _value_of(name: str) -> Any:
    try:
        block: Any = Secret.load(name, _sync=True)  # type: ignore[call-arg]
        return block.get()
    except ValueError as exc:
        if "Unable to find" not in str(exc):
            raise InputError(f"the block {name!r} is no Secret block that can be read") from None
        raise InputError(
            f"there is no Prefect Secret block {name!r} on this server; add one under Blocks in "
            "the UI, its value a JSON object of environment variables for the storage"
        ) from None
    except SignalBatchError:
        raise
    except Exception as exc:
        raise StorageError(
            f"Prefect's server did not hand out the Secret block {name!r}: {type(exc).__name__}"
        ) from exc


def _checked(name: str, value: Any) -> dict[str, str | None]:
    """The block's variables; its values are in no message."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping) or not value:
        raise InputError(
            f"the Secret block {name!r} must hold a JSON object of environment variables for the "
            'storage, as {"AWS_ACCESS_KEY_ID": "...", "AWS_SECRET_ACCESS_KEY": "..."}'
        )
    odd = [str(key) for key in value if not _is_of_storage(key)]
    if odd:
        raise InputError(
            f"the Secret block {name!r} sets {', '.join(sorted(odd)[:5])}; credentials of the "
            f"storage may only set variables that begin with {', '.join(_PREFIXES)}"
        )
    bad = [key for key, item in value.items() if not isinstance(item, str) or "\0" in item]
    if bad:
        raise InputError(
            f"the Secret block {name!r}: the value of {', '.join(sorted(bad)[:5])} is no text"
        )
    return dict(value)


def _is_of_storage(key: object) -> bool:
    return isinstance(key, str) and key.startswith(_PREFIXES) and bool(_NAME.fullmatch(key))


def _apply(wanted: Mapping[str, str | None]) -> bool:
    """Change the environment, and say whether that changed anything."""
    restored = {key: old for key, old in _before.items() if key not in wanted}
    changes = {
        key: value for key, value in {**restored, **wanted}.items() if os.environ.get(key) != value
    }
    for key in restored:
        del _before[key]
    for key in wanted:
        _before.setdefault(key, os.environ.get(key))
    for key, value in changes.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    return bool(changes)
