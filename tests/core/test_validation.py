"""What a validation reports, against plain loops, and every kind of fault it has to find."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch import validation
from signal_batch.errors import InputError, PinMismatchError, StorageError, UnknownAnnotationError
from signal_batch.pins import pin_dataset
from signal_batch.validation import FieldSummary, validate

WriteDataset = Callable[..., Path]
MakeRecord = Callable[..., sds.Record]


def ragged(index: int) -> dict[str, Any]:
    """Changes that make record `index` unlike its neighbours: length, dtype, keys, a field."""
    length = 3 + index % 5
    wide = np.dtype("float64" if index % 4 == 0 else "float32")
    samples = sds.Field(
        np.full((2, length), index, wide), (sds.Axis("channel", 2), sds.Axis("time", length))
    )
    fields = {"samples": samples}
    if index % 2:
        fields["mask"] = sds.Field(np.zeros(index + 1, np.uint8), (sds.Axis("bin", index + 1),))
    return {"fields": fields, "metadata": {"index": index, **({"odd": True} if index % 2 else {})}}


def shards_of(root: Path, kind: str) -> list[Path]:
    """Shard objects in manifest order, `kind` being "data" or "metadata"."""
    manifest = json.loads(next(root.glob("manifests/*/*.json")).read_text())
    return [root / shard[kind]["path"] for shard in manifest["shards"]]


@pytest.fixture
def root(write_dataset: WriteDataset, tmp_path: Path) -> Path:
    """Twenty records in four shards."""
    return write_dataset(tmp_path / "set")


# --- sound datasets ------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_dataset_is_described_as_a_plain_loop_would(
    write_dataset: WriteDataset, make_record: MakeRecord, tmp_path: Path, deep: bool
) -> None:
    records = [make_record(i, **ragged(i)) for i in range(17)]
    root = write_dataset(tmp_path / "set", records)
    found = validate(str(root), deep=deep)
    assert found.ok
    assert (found.faults, found.examined, found.deep) == ((), 17, deep)
    assert found.pin == pin_dataset(str(root)).pin
    assert {k: v.records for k, v in found.metadata_keys.items()} == {"index": 17, "odd": 8}
    assert set(found.fields) == {"samples", "mask"}
    for name, summary in found.fields.items():
        fields = [record[name] for record in records if name in record]
        shapes = [item.data.shape for item in fields]
        assert summary.to_dict() == {
            "dtypes": sorted({item.data.dtype.name for item in fields}),
            "axes": [list(axes) for axes in {tuple(axis.name for axis in f.axes) for f in fields}],
            "records": len(fields),
            "smallest_shape": np.min(shapes, axis=0).tolist(),
            "largest_shape": np.max(shapes, axis=0).tolist(),
        }
        assert summary.varies


def test_statuses_are_counted(iq_root: Path) -> None:
    found = validate(str(iq_root), ["review-v1", "truth-v1"], deep=True)
    dataset = sds.open(str(iq_root))
    reviews = Counter(row.status.value for row in dataset.annotations["review-v1"])
    assert found.faults == ()
    assert found.statuses == {"review-v1": dict(reviews), "truth-v1": {"success": 200}}
    assert set(reviews) == {"success", "skipped", "failed"}
    assert found.known_annotations == ("review-v1", "truth-v1")
    assert found.fields["samples"].to_dict() == {
        "dtypes": ["complex64"],
        "axes": [["channel", "time"]],
        "records": 200,
        "smallest_shape": [2, 64],
        "largest_shape": [2, 64],
    }
    assert not found.fields["samples"].varies


def test_sets_that_are_not_named_are_not_looked_at(iq_root: Path) -> None:
    found = validate(str(iq_root))
    assert (found.statuses, found.pin.annotations) == ({}, ())
    assert found.known_annotations == ("review-v1", "truth-v1")


def test_the_result_is_json(vowels_root: Path) -> None:
    found = validate(str(vowels_root), ["speakers-v1"])
    document = json.loads(json.dumps(found.to_dict()))
    assert document["pin"] == found.pin.model_dump(mode="json")
    assert document["fields"]["samples"]["smallest_shape"] == [12, 7]
    assert document["fields"]["samples"]["largest_shape"] == [12, 29]
    assert document["metadata_keys"] == {
        "frames": {"types": ["int"], "records": 640},
        "split": {"types": ["str"], "records": 640},
    }
    assert document["annotation_keys"] == {
        "speakers-v1": {"label": {"types": ["int"], "records": 640}}
    }
    assert document["statuses"] == {"speakers-v1": {"success": 640}}
    assert document["faults"] == []


@pytest.mark.parametrize("records", [0, 1])
def test_the_smallest_datasets(write_dataset: WriteDataset, tmp_path: Path, records: int) -> None:
    found = validate(str(write_dataset(tmp_path / "set", records)), deep=True)
    assert (found.ok, found.examined) == (True, records)


def test_shapes_of_another_rank_start_anew() -> None:
    summary = FieldSummary()
    for shape in ((4, 2), (3, 9), (7,)):
        summary.add("<f4", shape, ("a",))
    assert (summary.smallest, summary.largest, summary.records) == ((7,), (7,), 3)


@pytest.mark.parametrize("deep", [False, True])
def test_a_reference_dataset_is_sound(iq_root: Path, tmp_path: Path, deep: bool) -> None:
    chosen = [150, 3, 3 + 40, 7, 199, 0]
    view = sds.open(str(iq_root)).select(chosen)
    view.publish(str(tmp_path / "view"), dataset_id="view", snapshot_id="v1")
    found = validate(str(tmp_path / "view"), ["review-v1"], deep=deep)
    reviews = sds.open(str(iq_root)).annotations["review-v1"]
    assert found.faults == ()
    assert found.examined == 6
    assert found.statuses["review-v1"] == dict(Counter(reviews[i].status.value for i in chosen))


def test_a_large_dataset_is_sampled_evenly(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = validation.metadata_rows
    monkeypatch.setattr(validation, "SAMPLE_RECORDS", 7)
    monkeypatch.setattr(
        validation,
        "metadata_rows",
        lambda dataset, block: seen.extend(block.tolist()) or read(dataset, block),
    )
    found = validate(str(root))
    assert found.examined == len(seen) == len(set(seen)) == 7
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 19)
    assert set(np.diff(seen)) == {3, 4}
    assert found.fields["samples"].records == 7
    assert validate(str(root), deep=True).examined == 20


# --- refusals ------------------------------------------------------------------------------


def test_the_fingerprint_that_was_expected(root: Path) -> None:
    fingerprint = pin_dataset(str(root)).pin.fingerprint
    assert validate(str(root), expect=fingerprint).ok
    with pytest.raises(
        PinMismatchError, match=f"has the fingerprint {fingerprint}, not {'0' * 64}"
    ):
        validate(str(root), expect="0" * 64)


def test_an_unknown_set_is_refused(root: Path) -> None:
    with pytest.raises(UnknownAnnotationError, match="no annotation set 'x'"):
        validate(str(root), ["x"])


def test_a_failure_of_storage_is_not_a_fault_of_the_data(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(validation, "_size_of", fails)
    with pytest.raises(InputError, match=r"no permission to read .*arrayrecord"):
        validate(str(root))


def test_a_hiccup_of_storage_is_waited_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size_of, calls = validation._size_of, []

    def fails_once(dataset: Any, item: Any) -> Any:
        calls.append(item.uri)
        if len(calls) == 1:
            raise TimeoutError("no answer")
        return size_of(dataset, item)

    monkeypatch.setattr("signal_batch.failures._PAUSES_S", (0.0,))
    monkeypatch.setattr(validation, "_size_of", fails_once)
    assert validate(str(root)).ok
    assert len(calls) == 9
    monkeypatch.setattr(
        validation, "_size_of", lambda dataset, item: (_ for _ in ()).throw(TimeoutError("none"))
    )
    with pytest.raises(StorageError, match="could not be read: none"):
        validate(str(root))


# --- damaged objects -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["data", "metadata"])
@pytest.mark.parametrize("change", ["missing", "shorter", "longer"])
def test_a_shard_that_is_not_as_declared_is_named_with_its_sizes(
    root: Path, kind: str, change: str
) -> None:
    shard = shards_of(root, kind)[2]
    size = shard.stat().st_size
    if change == "missing":
        shard.unlink()
        expected = f"shard {shard} is missing"
    else:
        now = size - 100 if change == "shorter" else size + 100
        os.truncate(shard, now)
        expected = f"shard {shard} has {now} bytes where the manifest declares {size}"
    found = validate(str(root))
    assert found.faults[0] == expected
    assert not found.ok
    # Metadata rows are read to describe the dataset, data rows are not.
    named = [fault.split(":")[0] for fault in found.faults[1:]]
    assert named == ([f"record {i}" for i in range(10, 15)] if kind == "metadata" else [])
    unchecked = validate(str(root), check_objects=False)
    assert unchecked.faults == found.faults[1:]


def test_deep_validation_names_each_record_of_a_missing_shard(root: Path) -> None:
    shards_of(root, "data")[1].unlink()
    found = validate(str(root), deep=True)
    assert [fault.partition(":")[0] for fault in found.faults[1:]] == [
        f"record {i}" for i in range(5, 10)
    ]
    assert found.examined == 20


@pytest.mark.parametrize("deep", [False, True])
def test_faults_are_listed_up_to_a_limit(root: Path, deep: bool) -> None:
    for shard in (*shards_of(root, "data"), *shards_of(root, "metadata")):
        shard.unlink()
    found = validate(str(root), deep=deep)
    assert len(found.faults) == 21
    assert found.faults[-1] == "... and more"
    assert sum("is missing" in fault and fault.startswith("shard") for fault in found.faults) == 8


def test_a_flipped_bit_is_found_by_a_deep_validation(vowels_copy: Path) -> None:
    """The shards of the recordings are not compressed, so a record's samples can be found."""
    ordinal = 333
    samples = sds.open(str(vowels_copy))[ordinal]["samples"].data.tobytes()
    damaged = [path for path in shards_of(vowels_copy, "data") if samples in path.read_bytes()]
    assert damaged == shards_of(vowels_copy, "data")[2:3]
    content = bytearray(damaged[0].read_bytes())
    content[content.index(samples) + 40] ^= 1
    damaged[0].write_bytes(content)
    assert validate(str(vowels_copy)).ok
    found = validate(str(vowels_copy), deep=True)
    assert [fault.partition(":")[0] for fault in found.faults] == [f"record {ordinal}"]


# --- rows that do not belong together ------------------------------------------------------


def mixed(root: Path, data: list[sds.Record], metadata: list[sds.Record]) -> str:
    """A dataset with the data rows of some records beside the metadata rows of others."""
    first = sds.write_shard(data, str(root), work_id="a")
    second = sds.write_shard(metadata, str(root), work_id="b")
    shard = replace(first, metadata_uri=second.metadata_uri, metadata_bytes=second.metadata_bytes)
    sds.publish(str(root), [shard], dataset_id="mixed", snapshot_id="s")
    return str(root)


def test_a_metadata_row_of_another_record_is_found(make_record: MakeRecord, tmp_path: Path) -> None:
    records = [make_record(i) for i in range(5)]
    other = [*records[:3], records[3], make_record(4, id="stranger")]
    uri = mixed(tmp_path / "set", records, other)
    assert validate(uri).ok
    found = validate(uri, deep=True)
    assert found.faults == ("record 4: the data row is 'r0004', the metadata row 'stranger'",)


def test_a_metadata_row_of_another_shape_or_dtype_is_found(
    make_record: MakeRecord, tmp_path: Path
) -> None:
    records = [make_record(i) for i in range(4)]
    axes = (sds.Axis("channel", 2), sds.Axis("time", 4))
    doubles = {"samples": sds.Field(np.zeros((2, 4)), axes)}
    longer = {"samples": sds.Field(np.zeros((2, 5), np.float32), (axes[0], sds.Axis("time", 5)))}
    other = [
        records[0],
        make_record(1, fields=doubles),
        make_record(2, fields=longer),
        make_record(3, fields={**records[3].fields, "more": records[3]["samples"]}),
    ]
    faults = validate(mixed(tmp_path / "set", records, other), deep=True).faults
    assert [fault.partition(":")[0] for fault in faults] == [
        f"record {i} ('r000{i}')" for i in (1, 2, 3)
    ]
    for fault, declared in zip(faults, ("float64", "(2, 5)", "more"), strict=True):
        holds, _, says = fault.partition("the metadata row says")
        assert declared in says
        assert declared not in holds


def test_a_metadata_row_with_other_values_is_found(make_record: MakeRecord, tmp_path: Path) -> None:
    records = [make_record(i, scene_id="a") for i in range(4)]
    other = [
        records[0],
        make_record(1, scene_id="b"),
        make_record(2, scene_id="a", metadata={**records[2].metadata, "snr_db": 99.0}),
        make_record(3, scene_id="a", metadata={"index": 3, "new": None, "radio": {"gain": 31}}),
    ]
    faults = validate(mixed(tmp_path / "set", records, other), deep=True).faults
    assert faults == tuple(
        f"record {i} ('r000{i}'): data row and metadata row differ in {names}"
        for i, names in ((1, "scene id"), (2, "snr_db"), (3, "new, radio, snr_db, split"))
    )


def test_two_records_of_one_id_are_found_without_reading_samples(
    write_dataset: WriteDataset, make_record: MakeRecord, tmp_path: Path
) -> None:
    records = [make_record(i) for i in range(12)]
    records[9] = make_record(9, id="r0002")
    found = validate(str(write_dataset(tmp_path / "set", records)))
    assert found.faults == ("records 2 and 9 have the same id 'r0002'",)


@dataclass(frozen=True)
class Relabelled:
    """A dataset whose records the annotation publisher takes for others."""

    dataset: sds.Dataset
    record_metadata: list[sds.RecordMetadata]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)


def test_annotation_rows_of_other_records_are_found(root: Path) -> None:
    dataset = sds.open(str(root))
    rows = list(dataset.record_metadata)
    rows[6], rows[7] = rows[7], rows[6]
    target = Relabelled(dataset, rows)
    labels = [
        sds.AnnotationRecord(row.id, i, sds.AnnotationStatus.SUCCESS) for i, row in enumerate(rows)
    ]
    sds.publish_annotations(target, "labels", labels)
    assert validate(str(root)).ok
    found = validate(str(root), ["labels"])
    assert [fault.partition(":")[0] for fault in found.faults] == ["record 6", "record 7"]
    assert "it belongs to record 6 (id 'r0007'), not to 'r0006'" in found.faults[0]
    assert found.statuses == {"labels": {"success": 18}}


def test_a_missing_annotation_shard_is_found(write_dataset: WriteDataset, tmp_path: Path) -> None:
    rows = [("success", {"label": i}) for i in range(3)]
    root = write_dataset(tmp_path / "set", 3, annotations={"labels": rows})
    next(root.glob("annotations/sets/labels/*/objects/*/*")).unlink()
    found = validate(str(root), ["labels"])
    assert [fault.partition(":")[0] for fault in found.faults] == [
        "record 0",
        "record 1",
        "record 2",
    ]
    assert all("is missing" in fault for fault in found.faults)
