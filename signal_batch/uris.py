"""What a URI or a path may be, and how it may be shown."""

from __future__ import annotations

import re
from pathlib import Path

from signal_batch.errors import SpecError

#: Schemes whose URI begins with a bucket, a container or a host.
_PLACED = (
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"),
    *("ftp", "sftp", "ssh", "smb", "webhdfs", "http", "https"),
)


def refuse_credentials(uri: str) -> None:
    """Refuse a URI that carries a user, a password or a query: those end up in logs."""
    if not uri or not uri.strip():
        raise SpecError("a dataset or output URI is empty")
    try:
        uri.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{uri!r} is not a name in UTF-8") from None
    if uri != redact(uri):
        raise SpecError(
            f"{redact(uri)} carries credentials or a query in the URI; "
            "give them through the environment instead (for example AWS_PROFILE)"
        )


def refuse_placeless(uri: str) -> None:
    """Refuse a URI of a service that names no bucket or host there, before one is asked for it."""
    scheme, mark, rest = uri.partition("://")
    if mark and scheme.lower() in _PLACED and not rest.partition("/")[0].strip():
        raise SpecError(
            f"{redact(uri)} names no bucket or host; write it as in {scheme}://NAME/folder"
        )


def refuse_read_only(uri: str) -> None:
    """Refuse an output where nothing can be written."""
    if uri.lower().startswith(("http://", "https://")):
        raise SpecError(
            f"{redact(uri)} can only be read; an output is a folder on a local path, s3://, gs:// "
            "or another storage that can be written"
        )


def local_path(path: str) -> Path:
    """An absolute local path; `~` stands for a home folder."""
    try:
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as exc:
        raise SpecError(f"{path} is no path here: {exc}") from exc


def redact(uri: str) -> str:
    """The URI without user, password, query and fragment (local paths are left alone)."""
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return uri
    return f"{scheme}://{re.split('[?#]', _without_user(rest), maxsplit=1)[0]}"


def _without_user(rest: str) -> str:
    """What follows user and password; secret keys often hold a `/` that nobody escaped."""
    host, slash, path = rest.partition("/")
    if "@" in host:
        return host.rpartition("@")[2] + slash + path
    is_host = ":" not in host or re.fullmatch(r".*(:\d*|\])", host)
    return rest if is_host or "@" not in path else path.partition("@")[2]
