"""Holding an output folder against its manifest, its receipts and itself.

Nothing is believed: every file is fetched, hashed and decoded again, its logical digest and its
ordinals are recomputed, and the ordinals of all files together must be exactly the selection
that the manifest names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from signal_batch.errors import InputError, SignalBatchError
from signal_batch.frozen import checked, digest
from signal_batch.parquet import read_part_digest
from signal_batch.pins import Pin
from signal_batch.selection import Selection
from signal_batch.specs import MODEL_FORMAT
from signal_batch.store import (
    AGAIN,
    ATTEMPTS,
    CLAIM,
    DATA,
    ERRORS,
    MANIFEST,
    ORDERS,
    QUARANTINE,
    RECEIPTS,
    OutputStore,
    Receipt,
)

_THREADS = 2
#: What a manifest must hold for anything else about it to be checked.
_NEEDED = {"run_key": str, "files": list, "totals": dict, "selection": dict}


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found: no faults means that the output is exactly what its manifest says."""

    uri: str
    faults: tuple[str, ...]
    files: int
    rows: int
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(uri: str, *, on_file: Callable[[str], None] | None = None) -> Verification:
    """Check a complete output, naming every kind of damage.

    Raises `InputError` where there is no output of this program at all.
    """
    store = OutputStore(uri)
    claim, manifest = store.read_claim(), store.read_manifest()
    if claim is None and manifest is None:
        raise InputError(f"{store.uri} holds no output: neither {CLAIM} nor {MANIFEST} is there")
    if MODEL_FORMAT in ((manifest or {}).get("format"), (claim or {}).get("format")):
        return _verify_model(store, claim, manifest)
    if manifest is None:
        return Verification(store.uri, (_unfinished(store, claim or {}),), 0, 0, 0)
    if damage := tuple(_manifest_faults(manifest)):
        return Verification(store.uri, damage, 0, 0, 0)
    receipts = [Receipt.from_dict(entry, where=MANIFEST) for entry in manifest["files"]]
    faults = [
        *_claim_faults(claim, manifest),
        *_receipt_faults(store, receipts),
        *_stray_faults(store, receipts),
        *_total_faults(manifest, receipts),
    ]
    checks = _check_files(store, receipts, manifest["run_key"], on_file or (lambda name: None))
    faults += [fault for check in checks for fault in check.faults]
    if all(check.ordinals is not None for check in checks):
        faults += _ordinal_faults(manifest, receipts, checks)
    return Verification(
        uri=store.uri,
        faults=tuple(faults),
        files=len(receipts),
        rows=sum(receipt.rows for receipt in receipts),
        bytes=sum(receipt.bytes for receipt in receipts),
    )


def _unfinished(store: OutputStore, claim: Mapping[str, Any]) -> str:
    plan = claim.get("plan")
    of = plan.get("parts") if isinstance(plan, dict) else None
    if type(of) is not int:  # the same export would not go on from there either
        return (
            f"not complete: there is no {MANIFEST}, and {CLAIM} does not hold the plan of a job; "
            "remove that output, or choose another"
        )
    return (
        f"not complete: there is no {MANIFEST}; {len(store.receipts())} of {of} parts have a "
        "receipt. Run the same export again to finish it"
    )


def _verify_model(
    store: OutputStore, claim: Mapping[str, Any] | None, manifest: Mapping[str, Any] | None
) -> Verification:
    """A published model: every file that the manifest names has the hash it says."""
    if manifest is None:
        fault = (
            f"not complete: there is no {MANIFEST}; run the same training again to go on from its "
            "last checkpoint"
        )
        return Verification(store.uri, (fault,), 0, 0, 0)
    entries = manifest.get("files")
    if not isinstance(entries, list) or not entries or not all(map(_names_a_file, entries)):
        fault = f"{MANIFEST} is damaged: it names no files; {AGAIN}"
        return Verification(store.uri, (fault,), 0, 0, 0)
    faults = []
    if (claim or {}).get("run_key") != manifest.get("run_key"):
        faults.append(f"{CLAIM} is missing or of another run than {MANIFEST}")
    identity = manifest.get("identity")
    if not isinstance(identity, dict) or digest(identity) != manifest.get("run_key"):
        faults.append(f"{MANIFEST}: the identity does not give the run key")
    for entry in entries:
        payload = store.read_object(entry["file"])
        if payload is None:
            faults.append(f"{entry['file']} is missing")
        elif sha256(payload).hexdigest() != entry.get("sha256"):
            faults.append(f"{entry['file']} is not what was published")
    size = sum(entry["bytes"] for entry in entries)
    return Verification(store.uri, tuple(faults), len(entries), 0, size)


def _names_a_file(entry: Any) -> bool:
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        return False
    return isinstance(entry.get("file"), str)


@dataclass(frozen=True, slots=True)
class _FileCheck:
    faults: tuple[str, ...]
    ordinals: np.ndarray | None


def _manifest_faults(manifest: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _NEEDED.items():
        if not isinstance(manifest.get(name), kind):
            found = repr(manifest[name])[:60] if name in manifest else "missing"
            yield f"{MANIFEST} is damaged: {name} is {found}; {AGAIN}"


def _claim_faults(claim: Mapping[str, Any] | None, manifest: Mapping[str, Any]) -> Iterator[str]:
    if claim is None:
        yield f"{CLAIM} is missing"
    elif claim.get("run_key") != manifest["run_key"]:
        yield f"{CLAIM} and {MANIFEST} have different run keys"
    yield from _identity_faults(manifest)


def _identity_faults(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The run key is a hash of what was read and how: hold the manifest's own account to it."""
    identity = manifest.get("identity")
    if not isinstance(identity, dict) or digest(identity) != manifest["run_key"]:
        yield f"{MANIFEST}: the identity does not give the run key"
        return
    if identity.get("selection") != manifest["selection"].get("digest"):
        yield f"{MANIFEST}: the selection is not that of the run key"
    try:
        data = checked(Pin, manifest["pin"]).identity()
    except (KeyError, TypeError, ValueError):
        data = None
    if data != identity.get("data"):
        yield f"{MANIFEST}: the pin is not that of the run key"


def _receipt_faults(store: OutputStore, named: list[Receipt]) -> Iterator[str]:
    try:
        found = store.receipts()
    except SignalBatchError as exc:
        yield str(exc)
        return
    for receipt in named:
        other = found.pop(receipt.part, None)
        if other is None:
            yield f"{RECEIPTS}/{receipt.name}.json is missing"
        elif other != receipt:
            yield f"{RECEIPTS}/{receipt.name}.json differs from the manifest"
    for stray in found.values():
        yield f"{RECEIPTS}/{stray.name}.json is of no part of the manifest"


def _stray_faults(store: OutputStore, named: list[Receipt]) -> Iterator[str]:
    expected = {CLAIM, MANIFEST}
    for receipt in named:
        expected |= {f"{DATA}/{receipt.file}", f"{RECEIPTS}/{receipt.name}.json"}
        if receipt.bad_ordinals:
            expected.add(f"{QUARANTINE}/{receipt.name}.jsonl")
    receipts = f"{RECEIPTS}/"  # a receipt of no part is told as such, by its content
    notes = (f"{ATTEMPTS}/", f"{ERRORS}/", f"{ORDERS}/")  # of an attempt that outlived the commit
    for name in sorted(store.everything("") - expected):
        if name.startswith(notes):
            continue
        if not (name.startswith(receipts) and name.endswith(".json")):
            yield f"{name} is not named by the manifest"


def _total_faults(manifest: Mapping[str, Any], receipts: list[Receipt]) -> Iterator[str]:
    recounted = {
        "files": len(receipts),
        "rows": sum(receipt.rows for receipt in receipts),
        "bytes": sum(receipt.bytes for receipt in receipts),
        "bad": sum(len(receipt.bad_ordinals) for receipt in receipts),
        "logical_digest": digest([receipt.logical_digest for receipt in receipts]),
    }
    for name, value in recounted.items():
        if manifest["totals"].get(name) != value:
            yield f"{MANIFEST}: total {name} is {manifest['totals'].get(name)}, not {value}"


def _check_files(
    store: OutputStore, receipts: list[Receipt], run_key: str, on_file: Callable[[str], None]
) -> list[_FileCheck]:
    def check(receipt: Receipt) -> _FileCheck:
        result = _check_file(store, receipt, run_key)
        on_file(receipt.file)
        return result

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(check, receipts))


def _check_file(store: OutputStore, receipt: Receipt, run_key: str) -> _FileCheck:
    name = f"{DATA}/{receipt.file}"
    with tempfile.TemporaryDirectory(prefix="signal-batch-") as folder:
        local = Path(folder) / "part.parquet"
        if receipt.file not in store.listing(DATA):
            return _FileCheck((f"{name} is missing",), None)
        store.fetch(name, local)
        size = local.stat().st_size
        if size != receipt.bytes:
            return _FileCheck((f"{name} has {size} bytes, not {receipt.bytes}: truncated?",), None)
        if _sha256_of(local) != receipt.sha256:
            return _FileCheck((f"{name} has other bytes than were written: damaged",), None)
        try:
            return _check_content(local, name, receipt, run_key)
        except (pa.ArrowException, OSError, SignalBatchError) as exc:
            return _FileCheck((f"{name} cannot be read as Parquet: {exc}",), None)


def _check_content(local: Path, name: str, receipt: Receipt, run_key: str) -> _FileCheck:
    content = read_part_digest(local)
    metadata = pq.read_schema(local).metadata or {}
    faults = []
    if content.rows != receipt.rows:
        faults.append(f"{name} has {content.rows} rows, not {receipt.rows}")
    if content.logical_digest != receipt.logical_digest:
        faults.append(f"{name} holds other values than its receipt says")
    if metadata.get(b"signal_batch.run_key", b"").decode() != run_key:
        faults.append(f"{name} was written for another run key")
    return _FileCheck(tuple(faults), content.ordinals)


def _ordinal_faults(
    manifest: Mapping[str, Any], receipts: list[Receipt], checks: list[_FileCheck]
) -> Iterator[str]:
    pieces = [check.ordinals for check in checks if check.ordinals is not None]
    written = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    if (np.diff(written) <= 0).any():
        place = int(np.flatnonzero(np.diff(written) <= 0)[0])
        yield f"ordinals are not ascending: {written[place + 1]} comes after {written[place]}"
        return
    bad = [ordinal for receipt in receipts for ordinal in receipt.bad_ordinals]
    covered = np.sort(np.concatenate((written, np.array(bad, dtype=np.int64))))
    distinct = (np.diff(covered, prepend=-1) > 0).all()
    selection = manifest["selection"]
    whole = distinct and Selection.of(covered).digest() == selection.get("digest")
    if not whole or selection.get("records") != len(covered):
        yield (
            f"the files hold {len(written)} ordinals and {len(bad)} were set aside, which is not "
            f"the selection of {selection.get('records')} records of the manifest"
        )


def _sha256_of(path: Path) -> str:
    hasher = sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()
