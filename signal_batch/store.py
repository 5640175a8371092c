"""An output folder on fsspec: claim, parts, receipts, manifest, clean-up.

::

    OUT/_spec.json                       claim: run key and full spec, create-only
    OUT/_receipts/part-00017.json        a part is durably written, create-only
    OUT/data/part-00017-3f2a9c1b0d4e.parquet   the name carries the content's hash
    OUT/_quarantine/part-00017.jsonl     records that were set aside
    OUT/_manifest.json                   written last; names exactly the files of the output
    OUT/_attempts/HOST-PID.json          a worker, and what it works on; see `notes`
    OUT/_errors/part-00017.json          what failed there last; see `notes`
    OUT/_orders/3f2a9c1b0d4e.json        a work order for another machine, named by its digest

Attempts and errors are for people alone: nothing that is written depends on them, they may be
missing or out of date, and a complete output has none. What a training run keeps there beside
claim and manifest is in `checkpoints` and `training_job`. A small object appears whole or not at
all: on a local disk it is written beside its place and linked there, elsewhere the service sees
to it. Two attempts at the same part may race: the first receipt wins, and the other attempt
adopts it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeAlias

from signal_batch.errors import (
    DamagedOutputError,
    InputError,
    OutputConflictError,
    SignalBatchError,
    SpecError,
    StorageError,
)
from signal_batch.failures import at_once, output_error
from signal_batch.remote import open_file_system
from signal_batch.uris import (
    local_path,
    redact,
    refuse_credentials,
    refuse_placeless,
    refuse_read_only,
)

CLAIM = "_spec.json"
MANIFEST = "_manifest.json"
RECEIPTS = "_receipts"
QUARANTINE = "_quarantine"
DATA = "data"
ATTEMPTS = "_attempts"
ERRORS = "_errors"
ORDERS = "_orders"
_FETCHES = 16

#: A document, None where there is none, or what is wrong with it.
Found: TypeAlias = dict[str, Any] | DamagedOutputError | None

_RECEIPT_TYPES: dict[str, type] = {"int": int, "str": str, "tuple[int, ...]": tuple}
#: No number of a receipt is as large: no storage holds as many bytes or records.
_MOST = 1 << 62
AGAIN = "remove it and run the same command again"
#: What to do about a document that cannot be read.
_REMEDIES = {
    CLAIM: "remove that output, or choose another",
    MANIFEST: f"{AGAIN}, which checks what is written",
}
#: What a file system without hard links says to a request for one.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True, slots=True)
class Receipt:
    """Says that a part is durably written, and what it holds.

    `bad_ordinals` are the records of the part that could not be read and were left out.
    """

    run_key: str
    part: int
    first_ordinal: int
    last_ordinal: int
    rows: int
    bytes: int
    file: str
    sha256: str
    logical_digest: str
    bad_ordinals: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"part-{self.part:05d}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bad_ordinals": list(self.bad_ordinals)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], *, where: str = "a receipt") -> Receipt:
        try:
            receipt = cls(**{**value, "bad_ordinals": tuple(value["bad_ordinals"])})
            for item in fields(cls):
                found, kind = getattr(receipt, item.name), _RECEIPT_TYPES[str(item.type)]
                good = isinstance(found, kind) and not isinstance(found, bool)
                if not good or (isinstance(found, int) and not 0 <= found < _MOST):
                    raise TypeError(f"{item.name} is {found!r:.60}")
            if not all(type(o) is int and 0 <= o < _MOST for o in receipt.bad_ordinals):
                raise TypeError("bad_ordinals are not all ordinals")
            return receipt
        except KeyError as exc:
            raise DamagedOutputError(f"{where} is not a receipt: it has no {exc}; {AGAIN}") from exc
        except TypeError as exc:
            raise DamagedOutputError(f"{where} is not a receipt: {exc}; {AGAIN}") from exc


class OutputStore:
    """One output folder, on any file system that fsspec knows."""

    def __init__(self, uri: str) -> None:
        refuse_credentials(uri)
        refuse_placeless(uri)
        refuse_read_only(uri)
        self.uri = uri if "://" in uri else str(local_path(uri))
        try:
            self._fs, self._root = open_file_system(self.uri)
        except ImportError as exc:
            raise InputError(f"{self.uri} needs another package: {exc}") from exc
        except ValueError as exc:
            raise SpecError(f"{redact(self.uri)} is no output location: {exc}") from exc
        except Exception as exc:  # some services are asked at once, and do not answer
            raise output_error(exc, redact(self.uri)) from exc
        self._local = "file" in self._fs.protocol

    def claim(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Take the folder for one job, or find that it is already this job's.

        Returns the claim that stands, which an earlier attempt may have written. Raises
        `OutputConflictError`, listing each difference, if another job has the folder.
        """
        if standing := self.standing_claim(document):
            return standing
        if self._create(CLAIM, _document(document)):
            return dict(document)
        return self._same_job(self.read_claim() or {}, document)

    def standing_claim(self, document: Mapping[str, Any]) -> dict[str, Any] | None:
        """The claim of an earlier attempt at the same job, None in a new or empty folder.

        Raises `OutputConflictError` where the folder is taken by anything else.
        """
        strangers = self._strangers()
        # Read after the listing: an attempt that starts at the same time may claim in between.
        if existing := self.read_claim():
            return self._same_job(existing, document)
        if strangers:
            raise OutputConflictError(
                f"{self.uri} is not empty and no output of this program: it holds "
                f"{', '.join(strangers[:5])}. Choose another output folder"
            )
        return None

    def read_claim(self) -> dict[str, Any] | None:
        return self._read_json(CLAIM)

    def read_manifest(self) -> dict[str, Any] | None:
        return self._read_json(MANIFEST)

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        self._replace(MANIFEST, _document(document))

    def receipts(self) -> dict[int, Receipt]:
        """All receipts by part index."""
        names = [name for name in self.listing(RECEIPTS) if name.endswith(".json")]
        paths = [self._path(f"{RECEIPTS}/{name}") for name in names]
        # Side by side, for a remote file system; by name, as a name may look like a pattern.
        with self._errors(RECEIPTS), ThreadPoolExecutor(_FETCHES) as pool:
            payloads = list(pool.map(self._fs.cat_file, paths))
        found = {}
        for name, payload in zip(names, payloads, strict=True):
            receipt = _named_receipt(payload, name, f"{self.uri}/{RECEIPTS}/{name}")
            found[receipt.part] = receipt
        return found

    def add_receipt(self, receipt: Receipt) -> Receipt:
        """Record a part; if another attempt already did, its receipt stands and is returned."""
        path = f"{RECEIPTS}/{receipt.name}.json"
        if self._create(path, _document(receipt.to_dict())):
            return receipt
        standing = self._read_json(path)
        if standing is None:
            raise StorageError(f"{self.uri}/{path} appeared and went away again")
        return Receipt.from_dict(standing, where=f"{self.uri}/{path}")

    def put_part(self, local: Path, name: str) -> None:
        """Put a finished local Parquet file under its content-addressed name."""
        with self._errors(f"{DATA}/{name}"):
            self._make_folder(DATA)
            target = self._path(f"{DATA}/{name}")
            if not self._local:
                self._fs.put_file(str(local), target)
                return
            try:
                self._put_whole(local, target)
            except FileNotFoundError:
                # Another attempt at this job committed meanwhile, and cleaned up what it did
                # not know.
                self._put_whole(local, target)

    def put_quarantine(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the records of a part that were set aside, one JSON object a line."""
        payload = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        self._replace(f"{QUARANTINE}/{name}.jsonl", payload.encode())

    def listing(self, folder: str) -> dict[str, int]:
        """Names directly in a folder, with their sizes in bytes; empty if there is none."""
        return {name: int(entry["size"] or 0) for name, entry in self._files(folder).items()}

    def _files(self, folder: str) -> dict[str, dict[str, Any]]:
        with self._errors(folder):
            try:
                entries = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
            return {
                entry["name"].rstrip("/").rpartition("/")[2]: entry
                for entry in entries
                if entry["type"] == "file"
            }

    def times(self, folder: str) -> dict[str, float | None]:
        """When the files directly in a folder were written, in seconds since 1970.

        None where the file system does not say; whole seconds on S3.
        """
        return {name: _modified(entry) for name, entry in self._files(folder).items()}

    def read_documents(self, paths: Sequence[str]) -> list[Found]:
        """Objects of JSON, read side by side: None for one that is gone, the error of a bad one."""
        with ThreadPoolExecutor(_FETCHES) as pool:
            return list(pool.map(self._read_or_error, paths))

    def _read_or_error(self, path: str) -> Found:
        try:
            return self._read_json(path)
        except DamagedOutputError as exc:
            return exc

    def put_note(self, path: str, document: Mapping[str, Any]) -> None:
        """Write a small object that nothing depends on: whole, but not forced to disk.

        Does not bring back an output folder that was removed.
        """
        with self._errors(path), at_once():
            target = self._path(path)
            if not self._local:
                self._fs.pipe_file(target, _document(document))
                return
            staged = Path(f"{target}.{uuid.uuid4().hex}.tmp")
            try:
                if not staged.parent.is_dir():
                    staged.parent.mkdir()
                staged.write_bytes(_document(document))
                # Some file systems force to disk what replaces another file.
                Path(target).unlink(missing_ok=True)
                staged.replace(target)
            finally:
                staged.unlink(missing_ok=True)

    def remove_notes(self, folder: str) -> None:
        """Remove a folder of notes."""
        paths = [f"{folder}/{name}" for name in self.listing(folder)]
        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(lambda path: self.remove([path]), paths))
        if self._local:
            with suppress(OSError):  # there was none, or another run writes there
                Path(self._path(folder)).rmdir()

    def everything(self, folder: str) -> set[str]:
        """Paths of all files below a folder, at any depth, relative to it."""
        with self._errors(folder):
            top = self._path(folder).rstrip("/")
            found = self._fs.find(top)
            return {str(path)[len(top) :].lstrip("/") for path in found} - {""}

    def fetch(self, path: str, local: Path) -> None:
        """Copy an object of the output to a local file."""
        with self._errors(path):
            self._fs.get_file(self._path(path), str(local))

    @contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """An object of the output as a file to read from, of which only what is read is fetched."""
        with self._errors(path), self._fs.open(self._path(path), "rb") as stream:
            yield stream

    def put_object(self, path: str, payload: bytes) -> None:
        """Write an object whole, in place of what may be there under that name."""
        self._replace(path, payload)

    def put_document(self, path: str, document: Mapping[str, Any]) -> bytes:
        """Write an object of JSON whole, in place of what may be there; returns its bytes."""
        payload = _document(document)
        self._replace(path, payload)
        return payload

    def read_object(self, path: str) -> bytes | None:
        """The bytes of an object; None if there is none."""
        with self._errors(path):
            try:
                return bytes(self._fs.cat_file(self._path(path)))
            except FileNotFoundError:
                return None

    def read_document(self, path: str) -> dict[str, Any] | None:
        """An object of JSON; None if there is none, `DamagedOutputError` if it holds no JSON."""
        return self._read_json(path)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove objects; another run may just have removed them."""
        for path in paths:
            with self._errors(path), suppress(FileNotFoundError):
                self._fs.rm_file(self._path(path))

    def remove_data(self, names: Iterable[str]) -> None:
        """Remove files below `data`; another run may just have removed them."""
        self.remove(f"{DATA}/{name}" for name in names)

    def remove_staged(self) -> None:
        """Remove what killed processes left of files they had not put in place yet."""
        if self._local:  # elsewhere an object appears whole or not at all
            for folder in ("", RECEIPTS, QUARANTINE):
                names = [name for name in self.listing(folder) if name.endswith(".tmp")]
                self.remove(f"{folder}/{name}".lstrip("/") for name in names)

    def _same_job(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
        if found.get("run_key") == wanted["run_key"]:
            return dict(found)
        changes = differences(found.get("identity", {}), wanted["identity"])
        raise OutputConflictError(
            f"{self.uri} belongs to another job (run key {str(found.get('run_key'))[:12]}, "
            f"this one is {wanted['run_key'][:12]}); nothing was written. They differ in: "
            f"{'; '.join(changes) or 'the run key alone'}. Choose another output folder, or "
            "remove this one if it is no longer needed"
        )

    def _put_whole(self, local: Path, target: str) -> None:
        staged = f"{target}.{uuid.uuid4().hex}.tmp"
        try:
            self._fs.put_file(str(local), staged)
            _sync(staged)
            Path(staged).replace(target)
        finally:
            Path(staged).unlink(missing_ok=True)

    def _strangers(self) -> list[str]:
        with self._errors(""):
            try:
                entries = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            if entries and self._fs.isfile(self._root):
                raise InputError(f"{self.uri} is a file; an output is a folder")
            names = [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]
            ours = (ATTEMPTS, ERRORS)  # of a worker that outlived a folder that was removed
            return [name for name in names if name not in ours and not name.endswith(".tmp")]

    def _read_json(self, path: str) -> dict[str, Any] | None:
        with self._errors(path):
            try:
                payload = self._fs.cat_file(self._path(path))
            except FileNotFoundError:
                return None
        return _json_object(payload, f"{self.uri}/{path}")

    def _create(self, path: str, payload: bytes) -> bool:
        """Write a new object; False if there already is one."""
        with self._errors(path):
            self._make_folder(path.rpartition("/")[0])
            target = self._path(path)
            try:
                if self._local:
                    try:
                        _link_new(Path(target), payload)
                    except FileNotFoundError:
                        # Another attempt at this job took what was staged for what was left over.
                        _link_new(Path(target), payload)
                else:
                    self._fs.pipe_file(target, payload, mode="create")
            except FileExistsError:
                return False
            except StorageError:
                raise  # the service does not answer: it would not say either what is there
            except Exception:
                # s3fs says "invalid argument" where the service refused to overwrite. What is
                # there stands, also if it is our own write whose answer was lost.
                if self._local or not self._fs.exists(target):
                    raise
                return False
            return True

    def _replace(self, path: str, payload: bytes) -> None:
        with self._errors(path):
            self._make_folder(path.rpartition("/")[0])
            target = self._path(path)
            if not self._local:
                self._fs.pipe_file(target, payload)
                return
            try:
                _replace_whole(Path(target), payload)
            except FileNotFoundError:
                # Another attempt at this job took what is being written for what was left over.
                _replace_whole(Path(target), payload)

    def _make_folder(self, folder: str) -> None:
        if self._local:
            self._fs.makedirs(self._path(folder), exist_ok=True)

    def _path(self, relative: str) -> str:
        return f"{self._root.rstrip('/')}/{relative}" if relative else self._root

    def _errors(self, path: str) -> _ErrorsOf:
        return _ErrorsOf(f"{redact(self.uri)}/{path}".rstrip("/"))


class _ErrorsOf:
    """Turns what fsspec and the system raise about a path into our errors."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if exc is None or isinstance(exc, SignalBatchError) or not isinstance(exc, Exception):
            return
        raise output_error(exc, self._where) from exc


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Every field in which two identities differ, as `field: there X, here Y`."""
    changes: list[str] = []
    for key in sorted({*found, *wanted}):
        there, here = found.get(key), wanted.get(key)
        if there == here:
            continue
        if isinstance(there, dict) and isinstance(here, dict):
            changes += [f"{key}.{change}" for change in differences(there, here)]
        else:
            changes.append(f"{key}: there {_shown(there)}, here {_shown(here)}")
    # What a person wrote comes first, digests that follow from it last.
    return sorted(changes, key=lambda change: not change.startswith(("spec.", "where:")))


def _shown(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:12]
    return "the default" if value is None else json.dumps(value, ensure_ascii=False)


def _named_receipt(payload: bytes, name: str, where: str) -> Receipt:
    receipt = Receipt.from_dict(_json_object(payload, where), where=where)
    if name != f"{receipt.name}.json":
        raise DamagedOutputError(f"{where} is the receipt of {receipt.name}; {AGAIN}")
    return receipt


def _json_object(payload: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as exc:
        what = f"is not valid JSON: {exc}" if payload else "is empty"
        raise DamagedOutputError(f"{where} {what}{_remedy(where)}") from exc
    if not isinstance(value, dict):
        raise DamagedOutputError(f"{where} does not hold a JSON object{_remedy(where)}")
    return value


def _remedy(where: str) -> str:
    """What to do about a document of an output, as the end of a sentence about it."""
    folder, _, name = where.rpartition("/")
    remedy = AGAIN if folder.endswith(f"/{RECEIPTS}") else _REMEDIES.get(name)
    return f"; {remedy}" if remedy else ""


def _modified(entry: Mapping[str, Any]) -> float | None:
    """The time that a listing gives, under the name that each file system has for it."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = entry.get(key)
        try:
            value = datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            continue
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _document(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _link_new(target: Path, payload: bytes) -> None:
    """Create a file that was not there, complete from its first moment."""
    staged = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        _write_durably(staged, payload)
        try:
            os.link(staged, target)
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            # Some network mounts: create-only, if not atomic.
            _write_durably(target, payload)
    finally:
        staged.unlink(missing_ok=True)


def _replace_whole(target: Path, payload: bytes) -> None:
    staged = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        _write_durably(staged, payload)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)


def _write_durably(path: Path, payload: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(payload)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
