"""One stream of record batches to one local Parquet file, and reading it back to check it."""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from signal_batch.digests import LogicalDigest
from signal_batch.errors import DamagedOutputError, OutputError
from signal_batch.frozen import parse_size

#: What can be done about a local file that cannot be written.
REMEDIES = {
    errno.ENOSPC: "free some space, or set TMPDIR to a folder on a larger disk",
    errno.EDQUOT: "the quota is used up; set TMPDIR to a folder elsewhere",
    errno.EFBIG: "the limit on file sizes is reached (ulimit -f); raise it or make parts smaller",
    errno.EACCES: "check the permissions of its folder",
    errno.EPERM: "check the permissions of its folder",
    errno.EROFS: "its folder is mounted read-only; set TMPDIR to another",
    errno.ENOENT: "its folder does not exist; create it first",
}


@dataclass(frozen=True, slots=True)
class PartFile:
    """A finished Parquet file: `sha256` of its bytes, `logical_digest` of its values."""

    rows: int
    file_bytes: int
    sha256: str
    logical_digest: str


def write_part(
    path: Path,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    *,
    compression: str = "zstd",
    row_group_bytes: int | str = "16MB",
) -> PartFile:
    """Write a stream of batches to a local Parquet file.

    Memory holds one row group and one batch. Equal batches give equal bytes. On any failure the
    file is removed; one of writing itself is an `OutputError` that says what to do.
    """
    with PartWriter(
        path, schema, compression=compression, row_group_bytes=row_group_bytes
    ) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.finish()


class PartWriter:
    """`write_part`, a batch at a time; leaving it without `finish` removes the file."""

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        compression: str = "zstd",
        row_group_bytes: int | str = "16MB",
    ) -> None:
        self._path = Path(path)
        self._digest = LogicalDigest(schema)
        self._limit = parse_size(row_group_bytes)
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0.0
        self._finished = False
        text = [field.name for field in schema if pa.types.is_string(field.type)]
        plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
        with _writing(self._path):
            self._file = pa.OSFile(str(self._path), "wb")
            try:
                self._writer = pq.ParquetWriter(
                    self._file,
                    schema,
                    compression=compression,
                    use_dictionary=text,  # numbers are written faster and no larger without
                    write_statistics=plain,
                )
            except BaseException:
                self._remove()
                raise

    def write(self, batch: pa.RecordBatch) -> None:
        """Add a batch, writing row groups as they fill up."""
        self._digest.update(batch)
        row_bytes = max(1.0, batch.nbytes / max(1, batch.num_rows))
        at = 0
        while at < batch.num_rows:
            room = math.ceil((self._limit - self._pending_bytes) / row_bytes)
            piece = batch.slice(at, max(1, room))
            at += piece.num_rows
            self._pending.append(piece)
            self._pending_bytes += piece.num_rows * row_bytes
            if self._pending_bytes >= self._limit:
                self._flush()

    def finish(self) -> PartFile:
        """Complete the file and hash it."""
        self._flush()
        with _writing(self._path):
            self._writer.close()
            self._file.close()
            with self._path.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            size = self._path.stat().st_size
        self._finished = True
        return PartFile(self._digest.rows, size, sha256, self._digest.hexdigest())

    def _flush(self) -> None:
        if self._pending:
            table = pa.Table.from_batches(self._pending)
            self._pending, self._pending_bytes = [], 0.0
            with _writing(self._path):
                self._writer.write_table(table, row_group_size=table.num_rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._finished:
            return
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
        # A writer that could not be closed would try again, and complain, when collected.
        self._writer.is_open = False
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failure of the local file system into an `OutputError`."""
    try:
        yield
    except OSError as exc:
        code = exc.errno or 0
        remedy = f"; {REMEDIES[code]}" if code in REMEDIES else ""
        reason = os.strerror(code) if code else str(exc)
        raise OutputError(f"cannot write {path}: {reason}{remedy}") from exc


@dataclass(frozen=True, slots=True)
class PartContent:
    """What a Parquet file really holds."""

    rows: int
    ordinals: npt.NDArray[np.int64]
    logical_digest: str


def read_part_digest(file: str | Path | BinaryIO) -> PartContent:
    """Recompute rows, ordinals and logical digest from a file, one row group at a time.

    Raises `DamagedOutputError` when it is not a readable Parquet file with an `ordinal` column.
    """
    try:
        with pq.ParquetFile(file) as parquet:
            digest = LogicalDigest(parquet.schema_arrow)
            ordinals = [np.empty(0, np.int64)]
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group)
                ordinals.append(table.column("ordinal").to_numpy())
                for batch in table.to_batches():
                    digest.update(batch)
    except (pa.ArrowException, KeyError, TypeError) as exc:
        raise DamagedOutputError(f"{file} is not a readable part: {exc}") from exc
    except OSError as exc:
        if exc.errno is not None:  # the storage, not the content
            raise
        raise DamagedOutputError(f"{file} is not a readable part: {exc}") from exc
    return PartContent(digest.rows, np.concatenate(ordinals), digest.hexdigest())
