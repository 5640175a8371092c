"""Looking a dataset over before a run: objects, fields, statuses, and on request every record.

Every shard object must be there with the size that the manifest declares. What records look
like is told from their metadata rows, all of them or an even sample of a large dataset. A deep
validation decodes every record and holds data, metadata and annotation rows against each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import signal_dataset as sds

from signal_batch.errors import CorruptDatasetError, PinMismatchError
from signal_batch.failures import boundary_error, patiently
from signal_batch.layout import DatasetLayout, StoredObject
from signal_batch.pins import Pin, pin_dataset
from signal_batch.reading import annotation_rows, metadata_rows
from signal_batch.uris import redact

#: Records looked at when a validation is not deep.
SAMPLE_RECORDS = 20_000
_THREADS = 16
_BLOCK = 1024
_FAULTS_SHOWN = 20
_NAMES_SHOWN = 10
_MISSING = -1


@dataclass(slots=True)
class FieldSummary:
    """How one field looks over the records examined."""

    dtypes: set[str] = field(default_factory=set)
    records: int = 0
    smallest: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()
    axes: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, dtype: npt.DTypeLike, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        self.dtypes.add(np.dtype(dtype).name)
        self.axes.add(axes)
        same_rank = self.records > 0 and len(shape) == len(self.smallest)
        self.smallest = _pairwise(min, self.smallest, shape) if same_rank else shape
        self.largest = _pairwise(max, self.largest, shape) if same_rank else shape
        self.records += 1

    @property
    def varies(self) -> bool:
        return self.smallest != self.largest

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtypes": sorted(self.dtypes),
            "axes": [list(item) for item in sorted(self.axes)],
            "records": self.records,
            "smallest_shape": list(self.smallest),
            "largest_shape": list(self.largest),
        }


@dataclass(slots=True)
class KeySummary:
    """JSON types under one dotted key of metadata or annotation values, and in how many records."""

    types: set[str] = field(default_factory=set)
    records: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"types": sorted(self.types), "records": self.records}


Keys = dict[str, KeySummary]


@dataclass(frozen=True, slots=True)
class Validation:
    """The pin and what the dataset looks like; `faults` is empty for a sound dataset."""

    pin: Pin
    examined: int
    deep: bool
    fields: dict[str, FieldSummary]
    metadata_keys: Keys
    statuses: dict[str, dict[str, int]]
    annotation_keys: dict[str, Keys]
    known_annotations: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        return {
            "pin": self.pin.model_dump(mode="json"),
            "examined": self.examined,
            "deep": self.deep,
            "fields": {name: item.to_dict() for name, item in self.fields.items()},
            "metadata_keys": {name: item.to_dict() for name, item in self.metadata_keys.items()},
            "statuses": self.statuses,
            "annotation_keys": {
                name: {key: item.to_dict() for key, item in keys.items()}
                for name, keys in self.annotation_keys.items()
            },
            "known_annotations": list(self.known_annotations),
            "faults": list(self.faults),
        }


@dataclass(slots=True)
class _Findings:
    """Collects faults, and stops counting them when there are enough to act on."""

    faults: list[str] = field(default_factory=list)

    def add(self, fault: str) -> None:
        if len(self.faults) < _FAULTS_SHOWN:
            self.faults.append(fault)
        elif len(self.faults) == _FAULTS_SHOWN:
            self.faults.append("... and more")

    @property
    def full(self) -> bool:
        return len(self.faults) > _FAULTS_SHOWN


def validate(
    uri: str,
    annotations: Sequence[str] = (),
    *,
    deep: bool = False,
    expect: str | None = None,
    check_objects: bool = True,
) -> Validation:
    """Validate a dataset and pin it with the named annotation sets.

    Faults in the data are collected into the result, at most a few dozen.

    Raises:
        InputError: nothing there, or nothing readable, or an unknown annotation set.
        PinMismatchError: the fingerprint is not `expect`.
        CorruptDatasetError: control documents that contradict each other.
    """
    with closing(pin_dataset(uri, annotations)) as pinned:
        if expect is not None and pinned.pin.fingerprint != expect:
            raise PinMismatchError(
                f"{redact(pinned.pin.uri)} has the fingerprint {pinned.pin.fingerprint}, "
                f"not {expect} as expected: it is another dataset, or another snapshot of it"
            )
        return _examine(pinned.pin, pinned.dataset, deep, check_objects)


def _examine(pin: Pin, dataset: sds.Dataset, deep: bool, check_objects: bool) -> Validation:
    findings = _Findings()
    if check_objects:
        for fault in _object_faults(dataset):
            findings.add(fault)
    ordinals = _ordinals(pin.record_count, deep)
    fields, keys = _describe(pin, dataset, ordinals, findings)
    labels = {
        item.name: _describe_annotations(pin, dataset, item.name, ordinals, findings)
        for item in pin.annotations
    }
    if deep:
        _decode_all(pin, dataset, list(fields), findings)
    return Validation(
        pin=pin,
        examined=len(ordinals),
        deep=deep,
        fields=fields,
        metadata_keys=keys,
        statuses={name: counts for name, (counts, _) in labels.items()},
        annotation_keys={name: found for name, (_, found) in labels.items()},
        known_annotations=tuple(sorted(dataset.annotations)),
        faults=tuple(findings.faults),
    )


def _object_faults(dataset: sds.Dataset) -> Iterator[str]:
    """Missing objects and objects of another size, in manifest order."""
    layout = DatasetLayout(dataset)
    layout.table()  # reads every manifest page, so that all shards are known
    objects = [item for shard in layout.shards for item in shard]

    def check(item: StoredObject) -> str | None:
        size = patiently(lambda: _size_of(dataset, item), item.uri)
        if size == _MISSING:
            return f"shard {redact(item.uri)} is missing"
        if size not in (None, item.stored_bytes):
            return (
                f"shard {redact(item.uri)} has {size} bytes where the manifest declares "
                f"{item.stored_bytes}"
            )
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from filter(None, pool.map(check, objects))


def _size_of(dataset: sds.Dataset, item: StoredObject) -> int | None:
    """None for an object of another service, which this dataset's store cannot ask."""
    try:
        if item.owned:
            return dataset.object_store.info(item.uri, generation=item.generation).size
        return None if "://" in item.uri else Path(item.uri).stat().st_size
    except FileNotFoundError:
        return _MISSING


def _ordinals(record_count: int, deep: bool) -> npt.NDArray[np.int64]:
    if deep or record_count <= SAMPLE_RECORDS:
        return np.arange(record_count, dtype=np.int64)
    return np.unique(np.linspace(0, record_count - 1, SAMPLE_RECORDS).astype(np.int64))


def _describe(
    pin: Pin, dataset: sds.Dataset, ordinals: npt.NDArray[np.int64], findings: _Findings
) -> tuple[dict[str, FieldSummary], Keys]:
    fields: dict[str, FieldSummary] = {}
    keys: Keys = {}
    seen: dict[str, int] = {}
    for block in _blocks(ordinals):
        for ordinal, row in _guarded(pin, block, findings, lambda b: metadata_rows(dataset, b)):
            _note_keys(keys, row.metadata)
            for name, (dtype, shape, axes) in row.fields.items():
                fields.setdefault(name, FieldSummary()).add(dtype, shape, axes)
            if (first := seen.setdefault(row.id, ordinal)) != ordinal:
                findings.add(f"records {first} and {ordinal} have the same id {row.id!r}")
    return fields, dict(sorted(keys.items()))


def _note_keys(keys: Keys, values: Mapping[str, Any], prefix: str = "") -> None:
    """Count the keys of nested objects by their dotted path, with the types found there."""
    for name, value in values.items():
        if isinstance(value, dict):
            _note_keys(keys, value, f"{prefix}{name}.")
        else:
            summary = keys.setdefault(f"{prefix}{name}", KeySummary())
            summary.types.add("null" if value is None else type(value).__name__)
            summary.records += 1


def _describe_annotations(
    pin: Pin,
    dataset: sds.Dataset,
    name: str,
    ordinals: npt.NDArray[np.int64],
    findings: _Findings,
) -> tuple[dict[str, int], Keys]:
    counts: Counter[str] = Counter()
    keys: Keys = {}
    for block in _blocks(ordinals):
        rows = _guarded(pin, block, findings, lambda b: annotation_rows(dataset, name, b))
        for _, (status, values) in rows:
            counts[status] += 1
            _note_keys(keys, values)
    return dict(sorted(counts.items())), dict(sorted(keys.items()))


def _decode_all(pin: Pin, dataset: sds.Dataset, fields: Sequence[str], findings: _Findings) -> None:
    """Decode every record with the library's own decoder; compare it with its metadata row."""
    for block in _blocks(np.arange(pin.record_count, dtype=np.int64), 64):
        metadata = dict(_guarded(pin, block, findings, lambda b: metadata_rows(dataset, b)))
        records = _guarded(pin, block, findings, lambda b: dataset.__getitems__(b.tolist()))
        for ordinal, record in records:
            row = metadata.get(ordinal)
            if row is not None:
                for fault in _record_faults(ordinal, record, row):
                    findings.add(fault)
        if findings.full:
            return


def _record_faults(ordinal: int, record: sds.Record, row: Any) -> Iterator[str]:
    where = f"record {ordinal}"
    if record.id != row.id:
        yield f"{where}: the data row is {record.id!r}, the metadata row {row.id!r}"
    found = {name: (item.data.dtype.name, item.data.shape) for name, item in record.items()}
    declared = {name: (dtype.name, shape) for name, (dtype, shape, _) in row.fields.items()}
    if found != declared:
        yield f"{where} ({record.id!r}): the data holds {found}, the metadata row says {declared}"
    held = {"scene id": record.scene_id, **record.metadata}
    said = {"scene id": row.scene, **row.metadata}
    names = [name for name in sorted({*held, *said}) if _json(held, name) != _json(said, name)]
    if names:
        yield (
            f"{where} ({record.id!r}): data row and metadata row differ in "
            f"{', '.join(names[:_NAMES_SHOWN])}"
        )


def _json(values: Mapping[str, Any], name: str) -> str | None:
    """A value as text, so that the library's frozen mappings compare with plain ones."""
    return json.dumps(values[name], sort_keys=True, default=dict) if name in values else None


def _guarded(
    pin: Pin,
    block: npt.NDArray[np.int64],
    findings: _Findings,
    read: Callable[[npt.NDArray[np.int64]], Sequence[Any]],
) -> list[tuple[int, Any]]:
    """Read a block; where that fails, its records one by one, noting those that cannot be read."""
    if findings.full:
        return []
    try:
        return list(zip(block.tolist(), read(block), strict=True))
    except Exception as exc:
        if not isinstance(boundary_error(exc, pin.uri), CorruptDatasetError):
            raise boundary_error(exc, pin.uri) from exc
    rows = []
    for ordinal in block.tolist():
        try:
            rows.append((ordinal, read(np.array([ordinal]))[0]))
        except Exception as exc:
            error = boundary_error(exc, pin.uri)
            if not isinstance(error, CorruptDatasetError):
                raise error from exc
            findings.add(f"record {ordinal}: {error}")
            if findings.full:
                break
    return rows


def _blocks(ordinals: npt.NDArray[np.int64], size: int = _BLOCK) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, len(ordinals), size):
        yield ordinals[start : start + size]


def _pairwise(
    choose: Callable[[int, int], int], first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[int, ...]:
    return tuple(choose(a, b) for a, b in zip(first, second, strict=True))
