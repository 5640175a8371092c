"""Datasets that this package writes itself: the packaged recordings, and how any such is written.

A `Recipe` says what the records and annotation rows at each ordinal are; `write_once` turns it
into a dataset. Writing is create-only and root-last, so the same call works three ways: it
writes, it finishes what an earlier call left undone, or it opens what is already complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from typing import Any, TypeVar, overload

import numpy as np
import signal_dataset as sds
from signal_dataset.storage import ObjectStore, ShardStore, object_store_for

from signal_batch.errors import DatasetFormatError, InputError, OutputError, SpecError, StorageError
from signal_batch.frozen import digest
from signal_batch.uris import refuse_credentials

T = TypeVar("T")
Row = tuple[sds.AnnotationStatus, Mapping[str, Any]]
Progress = Callable[[int], None]

#: Rows of an annotation shard, all of which are in memory while it is written.
ROWS_PER_SHARD = 4096

_VOWELS_FILE = "data/japanese_vowels.npz"
_VOWELS_LAYOUT = 1
_VOWELS_PER_SHARD = 160
_SHIFT_S = 0.0064


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a dataset consists of, ordinal by ordinal.

    `record` and every function in `annotations` must be pure: an interrupted write calls them
    again and expects the same answer. `snapshot_id` has to change whenever their answers do.
    """

    dataset_id: str
    snapshot_id: str
    records: int
    records_per_shard: int
    record_id: Callable[[int], str]
    record: Callable[[int], sds.Record]
    annotations: Mapping[str, Callable[[int], Row]]
    metadata: Mapping[str, Any]
    options: sds.StorageOptions = field(default_factory=sds.StorageOptions)


def write_japanese_vowels(root: str) -> sds.Dataset:
    """Write the packaged Japanese Vowels recordings as a dataset at `root`, or open it there.

    640 records in file order, 160 a shard: field `samples`, float32 with axes (channel 12, time
    7 to 29), LPC cepstrum coefficients every 6.4 ms; metadata `split` and `frames`; annotation
    set `speakers-v1` with `label`, the speaker from 1 to 9. The shards are not compressed, so
    the sizes in the manifest, and with them the fingerprint, do not hang on a compressor's
    version.

    Raises `InputError` if `root` holds another dataset, `OutputError` or `StorageError` if it
    cannot be written.
    """
    return write_once(root, japanese_vowels())


def japanese_vowels() -> Recipe:
    """The packaged recordings; sources and licence are in `data/README.md`."""
    packed = files("signal_batch").joinpath(_VOWELS_FILE).read_bytes()
    with np.load(BytesIO(packed), allow_pickle=False) as file:
        frames, lengths, splits = file["frames"], file["lengths"].tolist(), file["split"].tolist()
        speakers = [int(label) for label in file["labels"].tolist()]
        note = str(file["note"])
    ends = np.cumsum(lengths).tolist()

    def record_id(index: int) -> str:
        return f"utterance-{index:04d}"

    def record(index: int) -> sds.Record:
        samples = frames[ends[index] - lengths[index] : ends[index]].T
        time = sds.Coordinate(start=0, step=_SHIFT_S, unit="s")
        axes = (
            sds.Axis("channel", samples.shape[0]),
            sds.Axis("time", samples.shape[1], coordinate=time),
        )
        return sds.Record(
            record_id(index),
            {"samples": sds.Field(samples, axes, {"quantity": "LPC cepstrum coefficients"})},
            metadata={"split": splits[index], "frames": lengths[index]},
        )

    return Recipe(
        dataset_id="japanese-vowels",
        snapshot_id=digest({"file": sha256(packed).hexdigest(), "layout": _VOWELS_LAYOUT})[:16],
        records=len(lengths),
        records_per_shard=_VOWELS_PER_SHARD,
        record_id=record_id,
        record=record,
        annotations={
            "speakers-v1": lambda index: (
                sds.AnnotationStatus.SUCCESS,
                {"label": speakers[index]},
            )
        },
        metadata={
            "title": "Japanese Vowels",
            "source": note,
            "doi": "10.24432/C5NS47",
            "licence": "CC-BY-4.0",
        },
        options=sds.StorageOptions(writer_options="group_size:1,uncompressed"),
    )


def write_once(root: str, recipe: Recipe, progress: Progress | None = None) -> sds.Dataset:
    """Write a recipe at `root`, finish writing it, or open it where it is complete.

    `progress` is called with the number of records written so far, once a shard, and not at all
    where none are left to write. Memory: one record, `ROWS_PER_SHARD` annotation rows and a few
    hundred bytes a shard, however many records there are; a shard passes through the temporary
    folder before it is stored. Shard names carry the snapshot id, so what another recipe left
    unfinished at `root` is never mistaken for this one's.

    Raises `SpecError` for a URI that cannot be one, `InputError` if `root` holds another
    dataset or a damaged one, `OutputError` and `StorageError` if it cannot be written.
    """
    refuse_credentials(root)
    dataset = _open_if_there(root, recipe)
    with _errors_of_writing(root):
        if dataset is None:
            dataset = _publish_records(root, recipe, progress)
        missing = [name for name in recipe.annotations if name not in dataset.annotations]
        for name in missing:
            _publish_rows(dataset, recipe, name)
        return sds.open(root, options=recipe.options) if missing else dataset


def _open_if_there(root: str, recipe: Recipe) -> sds.Dataset | None:
    try:
        dataset = sds.open(root, options=recipe.options)
    except FileNotFoundError as exc:
        if not _has_root_document(root):
            return None
        raise DatasetFormatError(f"the dataset at {root} is incomplete: {exc}") from exc
    except sds.CorruptDatasetError as exc:
        raise DatasetFormatError(f"{root} holds something else: {exc}") from exc
    except sds.StorageError as exc:
        raise StorageError(f"cannot look at {root}: {exc}") from exc
    except OSError as exc:
        raise OutputError(f"cannot look at {root}: {exc}") from exc
    except ValueError as exc:
        raise SpecError(f"{root} cannot be a dataset root: {exc}") from exc
    if (dataset.id, dataset.snapshot_id) != (recipe.dataset_id, recipe.snapshot_id):
        raise InputError(
            f"{root} already holds another dataset: {dataset.id} (snapshot {dataset.snapshot_id}), "
            f"not {recipe.dataset_id} (snapshot {recipe.snapshot_id}); choose another folder"
        )
    return dataset


def _has_root_document(root: str) -> bool:
    try:
        object_store_for(root, root_is_directory=True).info(f"{root.rstrip('/')}/root.json")
    except FileNotFoundError:
        return False
    return True


def _publish_records(root: str, recipe: Recipe, progress: Progress | None) -> sds.Dataset:
    shards = []
    for number, first in enumerate(range(0, recipe.records, recipe.records_per_shard)):
        stop = min(first + recipe.records_per_shard, recipe.records)
        shards.append(
            sds.write_shard(
                (recipe.record(index) for index in range(first, stop)),
                root,
                work_id=f"{recipe.snapshot_id}-{number:08d}",
                options=recipe.options,
            )
        )
        if progress is not None:
            progress(stop)
    return sds.publish(
        root,
        shards,
        dataset_id=recipe.dataset_id,
        snapshot_id=recipe.snapshot_id,
        metadata=recipe.metadata,
        storage_options=recipe.options,
    )


def _publish_rows(dataset: sds.Dataset, recipe: Recipe, name: str) -> None:
    row = recipe.annotations[name]

    def annotation(index: int) -> sds.AnnotationRecord:
        status, values = row(index)
        return sds.AnnotationRecord(recipe.record_id(index), index, status, values)

    sds.publish_annotations(
        _Target.of(dataset, recipe),
        name,
        _Lazy(recipe.records, annotation),
        options=sds.AnnotationOptions(records_per_shard=ROWS_PER_SHARD),
    )


class _Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for, and not kept."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._make(item) for item in range(self._length)[index]]
        return self._make(range(self._length)[index])


@dataclass(frozen=True, slots=True)
class _Target:
    """A dataset as the annotation publisher sees it, with record ids that cost nothing.

    The publisher compares the id of every row with the stored record's, one read of half a
    millisecond each. A recipe knows its ids, and that the snapshot is its own.
    """

    root: str
    snapshot_id: str
    record_metadata: Sequence[sds.RecordMetadata]
    object_store: ObjectStore
    shard_store: ShardStore
    storage_options: sds.StorageOptions

    @classmethod
    def of(cls, dataset: sds.Dataset, recipe: Recipe) -> _Target:
        identities = _Lazy(len(dataset), lambda i: sds.RecordMetadata(recipe.record_id(i), {}))
        return cls(
            dataset.root,
            dataset.snapshot_id,
            identities,
            dataset.object_store,
            dataset.shard_store,
            dataset.storage_options,
        )

    def __len__(self) -> int:
        return len(self.record_metadata)


@contextmanager
def _errors_of_writing(root: str) -> Iterator[None]:
    try:
        yield
    except sds.PublicationCollisionError as exc:
        raise InputError(f"something else was published at {root} meanwhile: {exc}") from exc
    except sds.CorruptDatasetError as exc:
        raise DatasetFormatError(f"{root}: {exc}") from exc
    except sds.StorageError as exc:
        raise StorageError(f"cannot write {root}: {exc}") from exc
    except OSError as exc:
        raise OutputError(f"cannot write {root}: {exc}") from exc
