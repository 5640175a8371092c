"""File systems by fsspec: local ones as they are, those of a service with patience.

The only module that touches fsspec, which knows a service for every scheme: `s3://`, `gs://`,
`abfs://` and more. Each takes its settings and credentials from the environment.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import fsspec
from fsspec.config import conf, set_conf_env

from signal_batch.failures import output_error, persistently

#: No service is asked for these.
_NEAR = {"file", "local", "memory"}
#: An upload to S3 in parts: s3fs would hold ten parts of 50 MB at a time.
_S3_UPLOAD = {"chunksize": 16 << 20, "max_concurrency": 4}
_UPLOADS = ("put_file", "pipe_file")

#: What another attempt cannot change.
_LASTING = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    NotImplementedError,
)
_LASTING_ERRNO = {
    *(errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG),
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS),
}
_PASSING_STATUS = (408, 425, 429)


def open_file_system(uri: str) -> tuple[Any, str]:
    """The file system that holds a URI, and the URI's path on it.

    Raises `ImportError` where that takes another package, `ValueError` where there is none.
    """
    # Listings are never cached: another process may be writing there.
    found, path = fsspec.url_to_fs(uri, use_listings_cache=False)
    return (found if _NEAR & set(_protocols(found)) else RemoteFileSystem(found)), path


def forget_file_systems() -> None:
    """Have file systems made anew, from the environment as it is now.

    fsspec keeps those that it made, with the credentials that there were then. What is already
    at work with one goes on with it.
    """
    set_conf_env(conf)  # FSSPEC_... is otherwise read once, when fsspec is imported
    for kind in set(fsspec.registry.values()):
        kind.clear_instance_cache()


class RemoteFileSystem:
    """A file system whose calls are made again, after a pause, while their failure may pass.

    What cannot pass is raised as the file system raises it; a service that did not answer for too
    long is a `StorageError`.
    """

    def __init__(self, within: Any) -> None:
        self._within = within
        self.protocol = _protocols(within)
        self._upload = _S3_UPLOAD if "s3" in self.protocol else {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._within, name)
        if not callable(found):
            return found
        return partial(self._call, found, **(self._upload if name in _UPLOADS else {}))

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        path = arguments[1] if method.__name__ == "put_file" else arguments[0]
        where = f"{self.protocol[0]}://{path}"

        def meaning(exc: Exception) -> Any:
            if not may_pass(exc):
                raise exc
            return output_error(exc, where)

        return persistently(lambda: method(*arguments, **options), meaning)


def may_pass(exc: Exception) -> bool:
    """Whether another attempt at a call that failed so can end otherwise."""
    if isinstance(exc, _LASTING):
        return False
    if isinstance(exc, OSError) and exc.errno in _LASTING_ERRNO:
        return False
    status = getattr(exc, "status_code", None) or getattr(exc, "code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _PASSING_STATUS
    return output_error(exc, "").transient


def _protocols(file_system: Any) -> tuple[str, ...]:
    names = file_system.protocol
    return (names,) if isinstance(names, str) else tuple(names)
