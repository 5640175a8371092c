"""What a run reads, by digest: open a dataset, pin it, reopen a pin and prove that it still holds.

The fingerprint is SHA-256 over the exact bytes of `root.json`, the snapshot and every manifest
page, in order. Those name every shard object and its size, so without a sample being read the
fingerprint fixes which objects a run reads. It trusts them to be immutable, as the format
promises: names of shards come from their producer's work ids, so a dataset published anew with
the same ids, sizes and snapshot id but other samples would have the same fingerprint. An
annotation pin is the set's publication and the SHA-256 of its root document. The catalog
revision is recorded but is no part of the identity: publishing another set must not break a
pinned run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import signal_dataset as sds
from signal_dataset.storage import ObjectStore, is_absolute_uri, object_store_for
from signal_dataset.storage.paths import join_uri

from signal_batch.errors import (
    CorruptDatasetError,
    DatasetFormatError,
    DatasetNotFoundError,
    InputError,
    PinMismatchError,
    SignalBatchError,
    SpecError,
    UnknownAnnotationError,
)
from signal_batch.failures import boundary_error, patiently
from signal_batch.frozen import Frozen, checked
from signal_batch.shards import MemoObjectStore, PooledShardStore
from signal_batch.staging import SharedShardCache
from signal_batch.uris import local_path, redact, refuse_credentials, refuse_placeless

CATALOG = "annotations/catalog.json"
SCHEMES = ("", "s3", "gs")


class AnnotationPin(Frozen):
    """One publication of one annotation set."""

    name: str
    publication_id: str
    source_snapshot_id: str
    record_count: int
    root_sha256: str

    @property
    def root_path(self) -> str:
        return f"annotations/sets/{self.name}/{self.publication_id}/root.json"


class Pin(Frozen):
    """A dataset and the chosen annotation sets, fixed by digest."""

    uri: str
    dataset_id: str
    snapshot_id: str
    record_count: int
    shard_count: int
    stored_bytes: int
    fingerprint: str
    annotations: tuple[AnnotationPin, ...] = ()
    catalog_revision: str | None = None

    @property
    def record_bytes(self) -> float:
        """Stored bytes of an average record, at least 1."""
        return max(1.0, self.stored_bytes / max(1, self.record_count))

    def identity(self) -> dict[str, Any]:
        """What enters the run key: digests, no location and no catalog revision."""
        return {
            "fingerprint": self.fingerprint,
            "annotations": {
                item.name: [item.publication_id, item.root_sha256] for item in self.annotations
            },
        }


@dataclass(frozen=True, slots=True)
class PinnedDataset:
    """An open dataset whose digests were checked against `pin`."""

    pin: Pin
    dataset: sds.Dataset

    def close(self) -> None:
        store = self.dataset.shard_store
        if isinstance(store, PooledShardStore):
            store.close()


def pin_dataset(uri: str, annotations: Sequence[str] = ()) -> PinnedDataset:
    """Open the dataset at `uri` and pin it with the named annotation sets.

    Raises:
        SpecError: the URI has a scheme that datasets are not stored under.
        DatasetNotFoundError, DatasetFormatError: nothing there, or nothing readable.
        UnknownAnnotationError: a name that is not in the catalog.
        CorruptDatasetError: control documents that contradict each other.
        StorageError: storage did not answer.
    """
    uri = absolute_uri(uri)
    dataset = _open(uri)
    objects = dataset.object_store
    missing = [name for name in annotations if name not in dataset.annotations]
    if missing:
        raise UnknownAnnotationError(
            f"{redact(uri)} has no annotation set {', '.join(map(repr, missing))}; "
            f"it has {', '.join(sorted(dataset.annotations)) or 'none'}"
        )
    pin = Pin(
        uri=uri,
        dataset_id=dataset.id,
        snapshot_id=dataset.snapshot_id,
        record_count=len(dataset),
        shard_count=dataset._index.snapshot.shard_count,
        stored_bytes=dataset._index.snapshot.stored_bytes,
        fingerprint=_fingerprint(objects, uri),
        annotations=tuple(
            _pin_annotations(objects, uri, dataset.annotations[name])
            for name in sorted(set(annotations))
        ),
        catalog_revision=dataset.annotations.revision,
    )
    return PinnedDataset(pin, dataset)


def reopen(pin: Pin) -> PinnedDataset:
    """Open what `pin` names and prove, once, that it is still the same.

    What was there before is waited for where the storage does not answer; see `failures`. Raises
    `PinMismatchError`, listing every difference, if it is not the same.
    """
    return patiently(lambda: _proved(pin), pin.uri)


def _proved(pin: Pin) -> PinnedDataset:
    try:
        current = pin_dataset(pin.uri)
    except InputError as exc:
        raise PinMismatchError(f"the pinned dataset cannot be opened any more: {exc}") from exc
    found = current.pin
    changes = [
        f"{label}: pinned {getattr(pin, name)}, found {getattr(found, name)}"
        for name, label in (
            ("dataset_id", "dataset id"),
            ("snapshot_id", "snapshot"),
            ("record_count", "records"),
            ("shard_count", "shards"),
            ("stored_bytes", "stored bytes"),
            ("fingerprint", "fingerprint"),
        )
        if getattr(pin, name) != getattr(found, name)
    ]
    for item in pin.annotations:
        changes += _annotation_changes(current.dataset, pin.uri, item)
    if changes:
        raise PinMismatchError(
            f"{redact(pin.uri)} is not what was pinned: {'; '.join(changes)}. "
            "Run again without the pin to accept the data as it is now, or point the pin's "
            "uri at the dataset it was made from"
        )
    return PinnedDataset(pin, current.dataset)


def read_pin(path: str) -> Pin:
    """Read a pin written by `write_pin`; a file that is no pin is a `SpecError`."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as exc:
        raise SpecError(f"{path} is not a readable pin file: {exc}") from exc
    if not isinstance(value, dict):
        raise SpecError(f"{path} is not a pin file: it must hold one JSON object")
    return checked(Pin, value)


def write_pin(pin: Pin, path: str) -> None:
    """Write a pin for `read_pin`; a path that cannot be written is an `InputError`."""
    try:
        Path(path).write_text(pin.model_dump_json(indent=2) + "\n")
    except (OSError, ValueError) as exc:
        raise InputError(f"the pin cannot be written to {path}: {exc}") from exc


def absolute_uri(uri: str) -> str:
    """The URI as every process will see it: local paths made absolute, no trailing slash."""
    refuse_credentials(uri)
    scheme = urlparse(uri).scheme if "://" in uri else ""
    if scheme not in SCHEMES:
        raise SpecError(
            f"{redact(uri)} has the scheme {scheme}://; datasets are read from a local path, "
            "s3:// or gs://"
        )
    refuse_placeless(uri)
    if scheme:
        return uri.rstrip("/")
    return str(local_path(uri)).rstrip("/") or "/"


def _open(uri: str) -> sds.Dataset:
    try:
        objects = MemoObjectStore(object_store_for(uri, root_is_directory=True))
        staging = SharedShardCache(objects=objects, root=uri)
        return sds.open(uri, object_store=objects, shard_store=PooledShardStore(staging=staging))
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise _nothing_there(uri, exc) from exc
    except sds.CorruptDatasetError as exc:
        raise _unreadable(uri, exc) from exc
    except ValueError as exc:
        raise DatasetNotFoundError(f"{redact(uri)} cannot hold a dataset: {exc}") from exc
    except ImportError as exc:
        extra = "s3" if uri.startswith("s3:") else "gcs"
        raise InputError(f"{uri} needs an extra: pip install 'signal-batch[{extra}]'") from exc
    except Exception as exc:
        raise boundary_error(exc, uri) from exc


def _nothing_there(uri: str, exc: OSError) -> SignalBatchError:
    where = redact(uri)
    if _holds_root(uri):
        missing = redact(str(exc.filename or exc))
        return CorruptDatasetError(
            f"{where} is incomplete: a document that is named from its root.json on is missing "
            f"({missing})"
        )
    if "://" in uri:
        return DatasetNotFoundError(
            f"there is no dataset at {where}: no root.json there (wrong bucket or prefix, "
            "or nothing published yet)"
        )
    path = Path(uri)
    if not path.exists():
        return DatasetNotFoundError(f"there is no dataset at {where}: the path does not exist")
    if not path.is_dir():
        return DatasetNotFoundError(f"{where} is a file; a dataset is a folder with a root.json")
    near = sorted(str(found.parent) for found in path.glob("*/root.json"))[:3]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return DatasetNotFoundError(
        f"{where} is not a dataset: the folder holds no root.json (it is written last, "
        f"so the dataset may not have been published yet){hint}"
    )


def _holds_root(uri: str) -> bool:
    try:
        object_store_for(uri, root_is_directory=True).info(join_uri(uri, "root.json"))
    except OSError:
        return False
    return True


def _unreadable(uri: str, exc: Exception) -> SignalBatchError:
    where, text = redact(uri), str(exc)
    if "split-based" in text:
        return DatasetFormatError(
            f"{where} holds sds.json, the split-based layout of before signal-dataset 0.1; "
            "publish it again as an ordered dataset (signal_dataset.write_shard and publish)"
        )
    if "Upgrade" in text:
        return DatasetFormatError(f"{where} was written for a newer reader: {text}")
    if "targets another dataset snapshot" in text:
        return CorruptDatasetError(
            f"{where}: {_foreign_sets(uri) or 'an annotation set'} was made for another snapshot "
            "of this dataset, so its rows do not belong to these records; publish the annotations "
            "again for this snapshot"
        )
    if "expected 'signal-dataset.dataset'" in text:
        return DatasetFormatError(f"{where} has a root.json, but not of a signal dataset: {text}")
    return CorruptDatasetError(f"{where}: {text}")


def _foreign_sets(uri: str) -> str:
    """Name the annotation sets in the catalog whose rows belong to another snapshot."""
    objects = object_store_for(uri, root_is_directory=True)

    def load(path: str) -> dict[str, Any]:
        value = json.loads(objects.read(join_uri(uri, path)))
        return value if isinstance(value, dict) else {}

    try:
        snapshot = load(load("root.json")["snapshot"]["path"])["snapshot_id"]
        sets = load(load(CATALOG)["revision"]["path"])["sets"]
        wrong = [
            f"annotation set {name!r} (of snapshot {root['source_snapshot_id']!r})"
            for name, reference in sorted(sets.items())
            if (root := load(reference["path"]))["source_snapshot_id"] != snapshot
        ]
    except (KeyError, TypeError, ValueError, OSError):
        return ""
    return ", ".join(wrong)


def _fingerprint(objects: ObjectStore, uri: str) -> str:
    hasher = sha256()
    root = _read(objects, join_uri(uri, "root.json"))
    hasher.update(root)
    snapshot = _read(objects, _resolve(uri, json.loads(root)["snapshot"]["path"]))
    hasher.update(snapshot)
    for page in json.loads(snapshot)["manifests"]:
        hasher.update(_read(objects, _resolve(uri, page["object"]["path"])))
    return hasher.hexdigest()


def _read(objects: ObjectStore, uri: str) -> bytes:
    return patiently(lambda: objects.read(uri), uri)


def _resolve(uri: str, path: str) -> str:
    return path if is_absolute_uri(path) else join_uri(uri, path)


def _pin_annotations(objects: ObjectStore, uri: str, found: sds.AnnotationSet) -> AnnotationPin:
    pin = AnnotationPin(
        name=found.name,
        publication_id=found.publication_id,
        source_snapshot_id=found.source_snapshot_id,
        record_count=len(found),
        root_sha256="",
    )
    payload = _read(objects, join_uri(uri, pin.root_path))
    return pin.model_copy(update={"root_sha256": sha256(payload).hexdigest()})


def _annotation_changes(dataset: sds.Dataset, uri: str, pin: AnnotationPin) -> list[str]:
    if pin.name not in dataset.annotations:
        return [f"annotation set {pin.name}: pinned, but no longer in the catalog"]
    found = _pin_annotations(dataset.object_store, uri, dataset.annotations[pin.name])
    return [
        f"annotation set {pin.name}: {label} pinned {getattr(pin, name)}, "
        f"found {getattr(found, name)}"
        for name, label in (
            ("publication_id", "publication"),
            ("source_snapshot_id", "source snapshot"),
            ("record_count", "rows"),
            ("root_sha256", "root document"),
        )
        if getattr(pin, name) != getattr(found, name)
    ]
