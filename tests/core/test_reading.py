"""Batches against a plain loop over signal-dataset, and every way in which reading can fail."""

from __future__ import annotations

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds
from signal_dataset.annotation.codec import SafeTensorsAnnotationCodec
from signal_dataset.record.codec import SafeTensorsRecordCodec
from signal_dataset.storage import ArrayRecordShardStore, object_store_for

from signal_batch import access, failures, reading
from signal_batch.assembly import look_up
from signal_batch.columns import Column
from signal_batch.errors import (
    CorruptDatasetError,
    MissingValueError,
    SpecError,
    StorageError,
    UnknownAnnotationError,
)
from signal_batch.reading import (
    RecordReader,
    annotation_rows,
    as_ordinals,
    metadata_rows,
)
from signal_batch.shards import MemoObjectStore, PooledShardStore

COUNT = 23
SHARD = 5
#: Uncompressed, so that tests find a record's bytes in its shard.
WRITER = "group_size:1,uncompressed"


def make_record(i: int, **changes: Any) -> sds.Record:
    rng = np.random.default_rng(i)
    samples = (rng.standard_normal((2, 8)) + 1j * i).astype(np.complex64)
    axes = (sds.Axis("channel", 2), sds.Axis("time", 8))
    fields = {
        "samples": sds.Field(samples, axes),
        "power": sds.Field(rng.standard_normal(4), (sds.Axis("bin", 4),)),
    }
    metadata = {
        "snr_db": i / 2,
        "label": i,
        "flag": i % 2 == 0,
        "name": f"n{i % 3}",
        "mixed": i if i % 2 else i + 0.5,
        "radio": {"gain": i * 10, "chain": {"lo": i + 0.25}},
        "dotted.key": i * 2,
    }
    values: dict[str, Any] = {
        "id": f"r{i:03d}",
        "fields": fields,
        "scene_id": None if i % 4 == 0 else f"s{i}",
        "metadata": metadata,
    }
    return sds.Record(**values | changes)


def write(root: Path, records: list[sds.Record], per_shard: int = SHARD) -> Path:
    options = sds.StorageOptions(writer_options=WRITER)
    made = [
        sds.write_shard(
            records[start : start + per_shard], str(root), work_id=f"{start:04d}", options=options
        )
        for start in range(0, len(records), per_shard)
    ]
    sds.publish(str(root), made, dataset_id="d", snapshot_id="s")
    return root


def make_label(record_id: str, i: int) -> sds.AnnotationRecord:
    if i % 6 == 5:
        status = sds.AnnotationStatus.FAILED if i % 4 == 1 else sds.AnnotationStatus.SKIPPED
        return sds.AnnotationRecord(record_id, i, status, detail_status="no signal")
    mask = sds.Field(np.arange(3, dtype=np.uint8) + i, (sds.Axis("m", 3),))
    return sds.AnnotationRecord(
        record_id,
        i,
        sds.AnnotationStatus.SUCCESS,
        {"label": i % 4, "who": {"name": f"w{i}"}},
        {"mask": mask},
        {"tool": "t"},
    )


def annotate(root: Path, name: str = "review-v1", per_shard: int = 7) -> None:
    dataset = sds.open(str(root))
    rows = [make_label(record.id, i) for i, record in enumerate(dataset.record_metadata)]
    options = sds.AnnotationOptions(records_per_shard=per_shard)
    sds.publish_annotations(dataset, name, rows, options=options)


def open_pooled(root: Path) -> sds.Dataset:
    where = str(root)
    objects = MemoObjectStore(object_store_for(where, root_is_directory=True))
    store = PooledShardStore(objects=objects, root=where)
    return sds.open(where, object_store=objects, shard_store=store)


def columns(*texts: str) -> tuple[Column, ...]:
    return tuple(Column.parse(text) for text in texts)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write(tmp_path_factory.mktemp("reading") / "d", [make_record(i) for i in range(COUNT)])
    annotate(path)
    return path


@pytest.fixture(scope="module")
def dataset(root: Path) -> sds.Dataset:
    return open_pooled(root)


EVERYTHING = columns(
    "field:samples",
    "power32=field:power:float32",
    "metadata:snr_db",
    "metadata:label",
    "small=metadata:label:int8",
    "metadata:flag",
    "metadata:name",
    "metadata:mixed",
    "gain=metadata:radio.gain:float32",
    "lo=metadata:radio.chain.lo",
    "dotted=metadata:dotted.key",
    "absent=metadata:nothing:float64?null",
    "word=metadata:nothing:str?null",
    "number=metadata:nothing?7",
    "marked=annotation:review-v1/label:int16?-1",
    "who=annotation:review-v1/who.name:str?null",
    "ordinal",
    "id",
    "scene",
    "again=ordinal",
    "also=id",
)


def expected_rows(root: Path, ordinals: list[int]) -> list[dict[str, Any]]:
    """The columns of EVERYTHING, worked out one record at a time through the plain library."""
    dataset = sds.open(str(root))
    rows = []
    for ordinal in ordinals:
        record, label = dataset[ordinal], dataset.annotations["review-v1"][ordinal]
        values = record.metadata
        rows.append(
            {
                "ordinal": ordinal,
                "id": record.id,
                "samples": record["samples"].data,
                "power32": record["power"].data.astype(np.float32),
                **{key: values[key] for key in ("snr_db", "label", "flag", "name", "mixed")},
                "small": values["label"],
                "gain": values["radio"]["gain"],
                "lo": values["radio"]["chain"]["lo"],
                "dotted": values["dotted.key"],
                "absent": np.nan,
                "word": None,
                "number": 7,
                "marked": label.values.get("label", -1),
                "who": label.values["who"]["name"] if label.values else None,
                "scene": record.scene_id,
                "again": ordinal,
                "also": record.id,
            }
        )
    return rows


ORDERS = [
    list(range(COUNT)),
    [22, 0, 7, 7, 3, 22, 14, 0, 9],
    [5],
    np.random.default_rng(1).integers(0, COUNT, 200).tolist(),
]


@pytest.mark.parametrize("ordinals", ORDERS, ids=["sequential", "repeats", "one", "shuffled"])
@pytest.mark.parametrize("safe", [False, True], ids=["fast", "safe"])
def test_equals_a_plain_loop(
    root: Path, dataset: sds.Dataset, ordinals: list[int], safe: bool
) -> None:
    batch = RecordReader(dataset, EVERYTHING, safe_decode=safe).read(ordinals)
    rows = expected_rows(root, ordinals)
    for name, column in batch.items():
        assert isinstance(column, np.ndarray)
        np.testing.assert_array_equal(column, np.array([row[name] for row in rows]), strict=False)
    assert batch["word"].tolist() == [None] * len(ordinals)


def test_names_order_and_dtypes(dataset: sds.Dataset) -> None:
    batch = RecordReader(dataset, EVERYTHING).read([4, 2])
    declared = [c.name for c in EVERYTHING if c.name not in ("ordinal", "id")]
    assert list(batch) == ["ordinal", "id", *declared]
    assert {name: str(column.dtype) for name, column in batch.items()} == {
        **{"ordinal": "int64", "id": "object", "samples": "complex64", "power32": "float32"},
        **{"snr_db": "float64", "label": "int64", "small": "int8", "flag": "bool"},
        **{"name": "object", "mixed": "float64", "gain": "float32", "lo": "float64"},
        **{"dotted": "int64", "absent": "float64", "word": "object", "number": "int64"},
        **{"marked": "int16", "who": "object", "scene": "object", "again": "int64"},
        "also": "object",
    }
    assert batch["samples"].shape == (2, 2, 8)


def test_arrays_of_a_batch_are_its_own(dataset: sds.Dataset) -> None:
    reader = RecordReader(dataset, columns("field:samples"))
    first = reader.read([1, 2])["samples"]
    assert isinstance(first, np.ndarray)
    assert first.flags.writeable
    first[:] = 0
    assert np.abs(reader.read([1, 2])["samples"]).min() > 0


def test_no_records(dataset: sds.Dataset) -> None:
    batch = RecordReader(dataset, columns("field:samples", "metadata:label:int8", "id")).read([])
    assert {name: len(column) for name, column in batch.items()} == {
        **{"ordinal": 0, "id": 0},
        **{"samples": 0, "label": 0},
    }


def test_accepts_arrays_of_any_integer_type(dataset: sds.Dataset) -> None:
    reader = RecordReader(dataset, columns("metadata:label"))
    for kind in ("int32", "uint8", "int64"):
        assert reader.read(np.array([3, 1], kind))["label"].tolist() == [3, 1]


@pytest.mark.parametrize("wrong", [[1.0], [[1]], ["a"], [True], 3])
def test_ordinals_are_integers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="flat list of integers"):
        as_ordinals(wrong)


@pytest.mark.parametrize("wrong", [-1, COUNT, 10**12])
def test_ordinals_outside_the_dataset(dataset: sds.Dataset, wrong: int) -> None:
    with pytest.raises(IndexError, match=f"ordinal {wrong} is outside this dataset of {COUNT}"):
        RecordReader(dataset, columns("field:samples")).read([0, wrong])


def test_reads_in_bounded_chunks(
    root: Path, dataset: sds.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_CHUNK_BYTES", 2500)
    calls: list[int] = []
    whole = PooledShardStore.read_many

    def counted(self: Any, uri: str, indices: Any, **options: Any) -> Any:
        calls.append(len(indices))
        return whole(self, uri, indices, **options)

    monkeypatch.setattr(PooledShardStore, "read_many", counted)
    batch = RecordReader(open_pooled(root), columns("field:samples")).read(range(COUNT))
    expected = RecordReader(dataset, columns("field:samples"), safe_decode=True).read(range(COUNT))
    np.testing.assert_array_equal(batch["samples"], expected["samples"])
    assert max(calls[1 : len(calls) // 2]) <= 3


def test_a_view_and_its_annotations(root: Path, tmp_path: Path) -> None:
    chosen = [20, 3, 3, 11, 0, 17]
    view = sds.open(str(root)).select(chosen)
    view.publish(str(tmp_path / "v"), dataset_id="v", snapshot_id="v1")
    found = RecordReader(open_pooled(tmp_path / "v"), EVERYTHING).read([5, 0, 1, 2, 3, 4])
    rows = expected_rows(root, [17, 20, 3, 3, 11, 0])
    for name, column in found.items():
        if name not in ("ordinal", "again"):
            np.testing.assert_array_equal(column, np.array([row[name] for row in rows]))
    assert found["ordinal"].tolist() == [5, 0, 1, 2, 3, 4]


def test_a_damaged_shard_behind_a_view(root: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "d", [make_record(i) for i in range(10)])
    view = sds.open(str(source)).select([7, 2])
    view.publish(str(tmp_path / "v"), dataset_id="v", snapshot_id="v1")
    object_of(source, 2, "data").unlink()
    reader = RecordReader(open_pooled(tmp_path / "v"), columns("field:samples"))
    assert len(reader.read([0])["samples"]) == 1
    with pytest.raises(CorruptDatasetError, match="is missing") as caught:
        reader.read([0, 1])
    assert caught.value.ordinal == 1


def ragged_records() -> list[sds.Record]:
    records = []
    for i in range(12):
        length = 4 if i < 6 else i
        data = np.arange(length, dtype=np.float32) + i
        records.append(make_record(i, fields={"x": sds.Field(data, (sds.Axis("t", length),))}))
    return records


@pytest.mark.parametrize("ordinals", [[0, 3, 8, 1, 11], [11, 0, 3], list(range(12)), [8, 8, 9]])
def test_ragged_fields_become_a_list(tmp_path: Path, ordinals: list[int]) -> None:
    dataset = open_pooled(write(tmp_path / "d", ragged_records()))
    reader = RecordReader(dataset, columns("field:x", "wide=field:x:float64"))
    batch = reader.read(ordinals)
    for name, kind in (("x", "float32"), ("wide", "float64")):
        column = batch[name]
        assert isinstance(column, list)
        for ordinal, array in zip(ordinals, column, strict=True):
            assert array.dtype == kind
            assert array.flags.owndata
            np.testing.assert_array_equal(array, ragged_records()[ordinal]["x"].data)
    assert isinstance(reader.read([0, 1, 5])["x"], np.ndarray)


def test_annotation_fields(root: Path, dataset: sds.Dataset) -> None:
    chosen = columns(
        "mask=annotation-field:review-v1/mask", "wide=annotation-field:review-v1/mask:int32"
    )
    batch = RecordReader(dataset, chosen).read([8, 0, 8, 21])
    assert batch["mask"].tolist() == [[8, 9, 10], [0, 1, 2], [8, 9, 10], [21, 22, 23]]
    assert batch["mask"].dtype == np.uint8
    assert batch["wide"].dtype == np.int32


def test_values_alone_never_touch_the_data_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "d", [make_record(i) for i in range(10)])
    annotate(path)
    for item in (path / "objects" / "data").rglob("*.arrayrecord"):
        item.unlink()
    dataset = open_pooled(path)
    wanted = columns("metadata:label", "scene", "marked=annotation:review-v1/label?9")
    batch = RecordReader(dataset, wanted).read([9, 5])
    assert batch["label"].tolist() == [9, 5]
    assert batch["marked"].tolist() == [1, 9]


def test_metadata_rows(root: Path, dataset: sds.Dataset) -> None:
    plain = sds.open(str(root))
    for ordinal, row in zip([7, 0, 7], metadata_rows(dataset, [7, 0, 7]), strict=True):
        expected = plain.record_metadata[ordinal]
        assert (row.id, row.scene) == (expected.id, expected.scene_id)
        assert row.metadata["radio"] == {"gain": ordinal * 10, "chain": {"lo": ordinal + 0.25}}
        assert row.fields["samples"] == (np.dtype("<c8"), (2, 8), ("channel", "time"))
        assert row.fields.keys() == expected.fields.keys()
    assert metadata_rows(dataset, []) == []


def test_annotation_rows(root: Path, dataset: sds.Dataset) -> None:
    ordinals = [22, 5, 11, 0]
    expected = [sds.open(str(root)).annotations["review-v1"][i] for i in ordinals]
    ids = [item.source_record_id for item in expected]
    for known in (None, ids):
        found = annotation_rows(dataset, "review-v1", ordinals, ids=known)
        assert [status for status, _ in found] == [str(item.status) for item in expected]
        assert [values.get("label") for _, values in found] == [
            item.values.get("label") for item in expected
        ]
    assert annotation_rows(dataset, "review-v1", []) == []
    with pytest.raises(
        CorruptDatasetError, match=r"belongs to record 22 \(id 'r022'\), not to 'x'"
    ):
        annotation_rows(dataset, "review-v1", [22], ids=["x"])


def test_an_unknown_annotation_set(dataset: sds.Dataset) -> None:
    with pytest.raises(UnknownAnnotationError, match="no annotation set 'nope'; it has: review-v1"):
        RecordReader(dataset, columns("annotation:nope/label"))
    with pytest.raises(UnknownAnnotationError):
        annotation_rows(dataset, "nope", [0])


def test_look_up() -> None:
    values = {"a": {"b": {"c": 1}, "n": None}, "a.b": {"d": 2}, "a.b.c": 3, "x.y": 4, "s": "t"}
    assert look_up(values, "a.b.c") == 3
    assert look_up(values, "a.b.d") == 2
    assert look_up(values, "x.y") == 4
    assert look_up({"a": {"b": {"c": 0}}}, "a.b.c") == 0
    assert look_up({"a": {"b": False}}, "a.b") is False
    for missing in ("z", "a.z", "a.n", "s.t", "a.b.c.d", ""):
        assert look_up(values, missing) is None


def failing(dataset: sds.Dataset, column: str, kind: type[Exception], ordinals: Any = None) -> str:
    reader = RecordReader(dataset, columns(column))
    with pytest.raises(kind) as caught:
        reader.read(range(COUNT) if ordinals is None else ordinals)
    return str(caught.value)


def test_a_missing_field(dataset: sds.Dataset) -> None:
    message = failing(dataset, "field:iq", MissingValueError, [17])
    uri = dataset._index.locate(17)[0].data.path
    assert re.fullmatch(
        rf"record 17 \(id 'r017'\) in \S+{uri} has no field 'iq'; it has: power, samples\. "
        r"Correct the name or filter such records out\.",
        message,
    )


def test_a_missing_metadata_key(dataset: sds.Dataset) -> None:
    message = failing(dataset, "metadata:radio.snr:float32", MissingValueError, [3])
    assert message.startswith("record 3 (id 'r003') in ")
    assert message.endswith(
        "has no metadata key 'radio.snr'; it has: dotted.key, flag, label, mixed, name, "
        "radio.chain.lo, radio.gain, snr_db. Give the column a default (metadata:radio.snr?0) "
        "or filter such records out."
    )


def test_a_missing_annotation_value(dataset: sds.Dataset) -> None:
    message = failing(dataset, "annotation:review-v1/label", MissingValueError)
    assert message.startswith("record 5 (id 'r005') in ")
    assert message.endswith(
        "has no value 'label' in its row of annotation set 'review-v1' (status failed); it has: "
        "none. Give the column a default (annotation:review-v1/label?0) or filter such records "
        "out, for example with --where 'annotation:review-v1 status success'."
    )


def test_a_missing_annotation_field(dataset: sds.Dataset) -> None:
    message = failing(dataset, "annotation-field:review-v1/mask", MissingValueError, [11])
    assert (
        "has no field 'mask' in its row of annotation set 'review-v1' (status skipped)" in message
    )
    assert "default" not in message


@pytest.mark.parametrize(
    ("column", "part"),
    [
        ("metadata:name:int32", "metadata:name is 'n0', not a number"),
        ("metadata:snr_db:int32", "record 1 (id 'r001')"),
        ("metadata:snr_db:int32", "is 0.5, not a whole number as int32 needs"),
        ("gain=metadata:radio.gain:int8", "record 13 (id 'r013')"),
        ("gain=metadata:radio.gain:int8", "is 130, outside the range of int8"),
        ("metadata:label:str", "is 0, not a string"),
        ("metadata:label:bool", "is 0, neither true nor false"),
        ("metadata:radio", "metadata:radio is a JSON dict, which is not a single value"),
        ("metadata:missing?[]", "a default is a single value"),
        ("who=annotation:review-v1/who?0", "is a JSON dict"),
        ("field:samples:float32", "is complex64, which does not convert to float32"),
        ("field:power:int16", "is float64, which does not convert to int16"),
    ],
)
def test_values_that_do_not_fit(dataset: sds.Dataset, column: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        RecordReader(dataset, columns(column)).read(range(COUNT))
    assert part in str(caught.value)


def dataset_of(path: Path, values: list[Any]) -> sds.Dataset:
    return open_pooled(
        write(path, [make_record(i, metadata={"v": value}) for i, value in enumerate(values)])
    )


@pytest.mark.parametrize(
    ("values", "column", "expected", "dtype"),
    [
        ([1, 2.5], "metadata:v", [1.0, 2.5], "float64"),
        ([2.0, 3], "metadata:v:uint8", [2, 3], "uint8"),
        ([True, 3], "metadata:v:int32", [1, 3], "int32"),
        ([2**63 - 1, -(2**63)], "metadata:v", [2**63 - 1, -(2**63)], "int64"),
        ([2**64 - 1, 0], "metadata:v:uint64", [2**64 - 1, 0], "uint64"),
        ([1.5, 7], "metadata:v:float16", [1.5, 7], "float16"),
        ([None, 7], "metadata:v?0", [0, 7], "int64"),
        (["a", None], "metadata:v:str?null", ["a", None], "object"),
        (["", "\u2603"], "metadata:v", ["", "\u2603"], "object"),
        ([False, True], "metadata:v:bool", [False, True], "bool"),
    ],
)
def test_value_dtypes(
    tmp_path: Path, values: list[Any], column: str, expected: list[Any], dtype: str
) -> None:
    found = RecordReader(dataset_of(tmp_path / "d", values), columns(column)).read([0, 1])["v"]
    assert isinstance(found, np.ndarray)
    assert found.dtype == dtype
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("values", "column", "part"),
    [
        ([1, "a"], "metadata:v", "mixes int, str: record 0 (id 'r000')"),
        ([1, True], "metadata:v", "mixes bool, int"),
        ([1, 2**63], "metadata:v", "is 9223372036854775808, outside the range of int64"),
        ([1, 10**30], "metadata:v", f"is {10**30}, outside the range of int64"),
        ([1, 10**400], "metadata:v:float64", "int too large to convert to float"),
        ([0, 1e39], "metadata:v:float32", "is 1e+39, outside the range of float32"),
        ([0, -1], "metadata:v:uint8", "is -1, outside the range of uint8"),
        ([0, [1]], "metadata:v", "is a JSON list, which is not a single value"),
    ],
)
def test_value_dtypes_that_fail(tmp_path: Path, values: list[Any], column: str, part: str) -> None:
    dataset = dataset_of(tmp_path / "d", values)
    with pytest.raises(SpecError) as caught:
        RecordReader(dataset, columns(column)).read([0, 1])
    assert part in str(caught.value)
    assert "column 'v'" in str(caught.value)


def field_dataset(path: Path, arrays: list[np.ndarray[Any, Any]]) -> sds.Dataset:
    return open_pooled(
        write(
            path,
            [
                make_record(i, fields={"x": sds.Field(a, (sds.Axis("t", len(a)),))})
                for i, a in enumerate(arrays)
            ],
        )
    )


def test_fields_of_several_dtypes_need_a_declared_one(tmp_path: Path) -> None:
    arrays = [np.arange(3, dtype=kind) for kind in ("float32", "float64", "int16")]
    dataset = field_dataset(tmp_path / "d", arrays)
    with pytest.raises(SpecError, match=r"record 1 .* is float64 where others are float32"):
        RecordReader(dataset, columns("field:x")).read([0, 1])
    found = RecordReader(dataset, columns("field:x:float32")).read([2, 1, 0])["x"]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert found.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([0, 300], np.int16), "int8"),
        (np.array([-1], np.int8), "uint8"),
        (np.array([2**63], np.uint64), "int64"),
        (np.array([1e39]), "float32"),
        (np.array([70000]), "float16"),
    ],
)
def test_a_cast_that_would_wrap_or_overflow_is_refused(
    tmp_path: Path, array: np.ndarray[Any, Any], dtype: str
) -> None:
    dataset = field_dataset(tmp_path / "d", [array])
    with pytest.raises(SpecError, match=rf"(outside the range of|does not convert to) {dtype}"):
        RecordReader(dataset, columns(f"field:x:{dtype}")).read([0])


def test_a_cast_keeps_infinities_and_nan(tmp_path: Path) -> None:
    array = np.array([np.inf, -np.inf, np.nan, 1.5])
    dataset = field_dataset(tmp_path / "d", [array, array[:0]])
    found = RecordReader(dataset, columns("field:x:float32")).read([0, 1])["x"]
    np.testing.assert_array_equal(found[0], array)


def object_of(root: Path, ordinal: int, kind: str) -> Path:
    entry, _ = sds.open(str(root))._index.locate(ordinal)
    return root / getattr(entry, kind).path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = write(tmp_path / "d", [make_record(i) for i in range(12)])
    annotate(path)
    return path


def spoil(root: Path, ordinal: int) -> Path:
    """Flip one bit among the samples of a record; returns the shard."""
    path = object_of(root, ordinal, "data")
    data = bytearray(path.read_bytes())
    data[data.index(make_record(ordinal)["samples"].data.tobytes())] ^= 4
    path.write_bytes(data)
    return path


def rewrite(path: Path, payloads: list[bytes]) -> None:
    path.unlink()
    ArrayRecordShardStore().write(path, payloads, options=WRITER)


SAMPLES_AND_LABEL = ("field:samples", "metadata:label")


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [("data", SAMPLES_AND_LABEL), ("metadata", ("metadata:label",))],
)
def test_a_missing_shard_is_named(victim: Path, kind: str, chosen: tuple[str, ...]) -> None:
    path = object_of(victim, 6, kind)
    path.unlink()
    reader = RecordReader(open_pooled(victim), columns(*chosen))
    assert len(reader.read([0, 11])["id"]) == 2
    with pytest.raises(CorruptDatasetError, match=f"{path} is missing") as caught:
        reader.read([0, 8, 6, 11])
    assert caught.value.ordinal == 6


@pytest.mark.parametrize("pooled", [True, False])
def test_a_truncated_shard_is_named_with_both_sizes(victim: Path, pooled: bool) -> None:
    path = object_of(victim, 6, "data")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    dataset = open_pooled(victim) if pooled else sds.open(str(victim))
    with pytest.raises(CorruptDatasetError) as caught:
        RecordReader(dataset, columns(*SAMPLES_AND_LABEL)).read(range(12))
    sizes = f"holds {len(whole) - 1000} bytes where {len(whole)} are declared"
    assert f"record 5 (index 0 of its shard): shard {path} {sizes}" in str(caught.value)
    assert caught.value.ordinal == 5


@pytest.mark.parametrize("pooled", [True, False])
def test_the_very_record_with_a_flipped_bit_is_named(victim: Path, pooled: bool) -> None:
    path = spoil(victim, 7)
    dataset = open_pooled(victim) if pooled else sds.open(str(victim))
    reader = RecordReader(dataset, columns(*SAMPLES_AND_LABEL))
    with pytest.raises(CorruptDatasetError, match="hash mismatch") as caught:
        reader.read([9, 5, 7, 6, 8, 0])
    assert caught.value.ordinal == 7
    assert f"record 7 (index 2 of its shard): shard {path} is damaged" in str(caught.value)
    assert reader.read([9, 5, 6, 8, 0])["label"].tolist() == [9, 5, 6, 8, 0]


def test_a_record_that_does_not_decode_is_named(victim: Path) -> None:
    """A shard whose container is sound but which holds a record that is not."""
    path = object_of(victim, 6, "data")
    codec = SafeTensorsRecordCodec()
    payloads = [codec.encode(make_record(i)) for i in range(5, 10)]
    before = path.stat().st_size
    payloads[3] = payloads[3].replace(b'"version":"0.1"', b'"version":"0.7"')
    rewrite(path, payloads)
    assert path.stat().st_size == before
    reader = RecordReader(open_pooled(victim), columns(*SAMPLES_AND_LABEL))
    with pytest.raises(CorruptDatasetError, match="unsupported record format") as caught:
        reader.read(range(12))
    assert caught.value.ordinal == 8
    assert str(caught.value).startswith(f"record 8 (index 3 of shard {path}): ")


def test_a_shard_with_fewer_records_than_declared(victim: Path) -> None:
    path = object_of(victim, 6, "data")
    codec = SafeTensorsRecordCodec()
    rewrite(path, [codec.encode(make_record(i)) for i in range(5, 9)])
    dataset = open_pooled(victim)
    reader = RecordReader(dataset, columns(*SAMPLES_AND_LABEL))
    reader._access.payloads._checked.add(str(path))
    with pytest.raises(CorruptDatasetError, match="fewer records than declared") as caught:
        reader.read([5, 8, 9])
    assert caught.value.ordinal == 9


def test_sizes_are_asked_once_a_shard(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = sds.open(str(victim))
    asked: list[str] = []
    whole = dataset.object_store.info

    def info(uri: str, *, generation: int | None = None) -> Any:
        asked.append(uri)
        return whole(uri, generation=generation)

    monkeypatch.setattr(dataset.object_store, "info", info)
    wanted = columns("field:samples", "x=annotation:review-v1/label?0")
    for safe in (False, False):
        reader = RecordReader(dataset, wanted, safe_decode=safe)
        for _ in range(3):
            reader.read(range(12))
    shards_asked = [uri for uri in asked if uri.endswith(".arrayrecord")]
    assert len(shards_asked) == len(set(shards_asked)) == 3 + 2


def test_storage_that_does_not_answer(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_PAUSES_S", (0.0,))
    dataset = open_pooled(victim)

    def silent(*_: Any, **__: Any) -> Any:
        raise sds.StorageError("503 slow down")

    monkeypatch.setattr(dataset.shard_store, "read_many", silent)
    with pytest.raises(StorageError, match=r"\.arrayrecord could not be read: 503") as caught:
        RecordReader(dataset, columns("field:samples")).read([3])
    assert caught.value.transient


def forge(root: Path, rows: list[sds.AnnotationRecord] | list[bytes]) -> sds.Dataset:
    """Open a dataset whose one annotation shard holds other rows than were published."""
    dataset = open_pooled(root)
    labels = dataset.annotations["review-v1"]
    specification = labels._specification
    (entry,) = specification.shards
    path = root / entry.object.path
    codec = SafeTensorsAnnotationCodec()
    rewrite(path, [row if isinstance(row, bytes) else codec.encode(row) for row in rows])
    reference = dataclasses.replace(entry.object, stored_bytes=path.stat().st_size)
    changed = dataclasses.replace(entry, object=reference)
    labels._specification = dataclasses.replace(specification, shards=(changed,))
    return dataset


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    path = write(tmp_path / "d", [make_record(i) for i in range(4)])
    annotate(path, per_shard=100)
    return path


def label_rows() -> list[sds.AnnotationRecord]:
    return [make_label(f"r{i:03d}", i) for i in range(4)]


def test_annotation_rows_in_another_order(labelled: Path) -> None:
    rows = label_rows()
    dataset = forge(labelled, [rows[0], rows[2], rows[1], rows[3]])
    reader = RecordReader(dataset, columns("annotation:review-v1/label"))
    assert reader.read([0, 3])["label"].tolist() == [0, 3]
    with pytest.raises(CorruptDatasetError) as caught:
        reader.read([3, 1, 0])
    assert caught.value.ordinal == 1
    assert "annotation set 'review-v1', row of record 1 in " in str(caught.value)
    assert "it belongs to record 2 (id 'r002'), not to 'r001'" in str(caught.value)


def test_annotation_rows_of_other_records(labelled: Path) -> None:
    rows = label_rows()
    rows[2] = make_label("stranger", 2)
    dataset = forge(labelled, rows)
    with pytest.raises(CorruptDatasetError, match="'stranger'"):
        RecordReader(dataset, columns("annotation:review-v1/label")).read([0, 2])
    with pytest.raises(CorruptDatasetError, match="'stranger'"):
        annotation_rows(dataset, "review-v1", [0, 2])


GOOD_BODY: dict[str, Any] = {
    "source_index": 0,
    "status": "success",
    "values": {"label": 1},
    "provenance": {},
    "detail_status": None,
    "empty_fields": True,
}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"source_index": True}, "source_index True"),
        ({"source_index": "0"}, "source_index '0'"),
        ({"status": "great"}, "status 'great'"),
        ({"status": ["success"]}, "status"),
        ({"values": [1]}, "values are not an object"),
        ({"provenance": 4}, "provenance is not an object"),
        ({"empty_fields": None}, "empty_fields"),
        ({"detail_status": ""}, "detail_status ''"),
        ({"detail_status": 3}, "detail_status 3"),
        (None, "no annotation object"),
    ],
)
def test_malformed_annotation_rows(
    labelled: Path, changes: dict[str, Any] | None, part: str
) -> None:
    metadata = {} if changes is None else {"annotation": GOOD_BODY | changes}
    empty = {"__empty__": sds.Field(np.empty(0, np.uint8), (sds.Axis("empty", 0),))}
    payload = SafeTensorsRecordCodec().encode(sds.Record("r000", empty, None, metadata))
    with pytest.raises(sds.CorruptDatasetError):
        SafeTensorsAnnotationCodec().decode(payload)
    rows = [payload, *(SafeTensorsAnnotationCodec().encode(row) for row in label_rows()[1:])]
    with pytest.raises(CorruptDatasetError) as caught:
        RecordReader(forge(labelled, rows), columns("annotation:review-v1/label")).read([0])
    assert part in str(caught.value)
    assert caught.value.ordinal == 0


def test_a_missing_annotation_shard(labelled: Path) -> None:
    dataset = open_pooled(labelled)
    (entry,) = dataset.annotations["review-v1"]._specification.shards
    (labelled / entry.object.path).unlink()
    with pytest.raises(CorruptDatasetError, match=r"is missing") as caught:
        annotation_rows(dataset, "review-v1", [2])
    assert caught.value.ordinal == 2


def test_a_truncated_annotation_shard(labelled: Path) -> None:
    dataset = open_pooled(labelled)
    (entry,) = dataset.annotations["review-v1"]._specification.shards
    path = labelled / entry.object.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDatasetError, match=r"bytes where \d+ are declared"):
        annotation_rows(dataset, "review-v1", [2])


def test_threads_share_a_reader(root: Path) -> None:
    dataset = open_pooled(root)
    reader = RecordReader(dataset, EVERYTHING)
    rows = {row["ordinal"]: row for row in expected_rows(root, list(range(COUNT)))}

    def check(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            ordinals = rng.integers(0, COUNT, 16).tolist()
            for name, column in reader.read(ordinals).items():
                np.testing.assert_array_equal(column, np.array([rows[o][name] for o in ordinals]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(8)))


def test_threads_meeting_damage(victim: Path) -> None:
    spoil(victim, 7)
    reader = RecordReader(open_pooled(victim), columns("metadata:label", "field:samples"))

    def check(seed: int) -> None:
        for _ in range(20):
            if seed % 2:
                assert reader.read([5, 6, 8, 9])["label"].tolist() == [5, 6, 8, 9]
                continue
            with pytest.raises(CorruptDatasetError) as caught:
                reader.read([5, 6, 7, 8])
            assert caught.value.ordinal == 7

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(8)))


def test_annotation_values_are_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of a small set is kept, so that a later epoch reads the record alone."""
    dataset = sds.open(str(root))
    reader = RecordReader(dataset, [Column.parse("x=annotation:review-v1/label:int16?-1")])
    expected = [row.values.get("label", -1) for row in dataset.annotations["review-v1"]]
    rng = np.random.default_rng(0)
    for _ in range(3):
        ordinals = rng.integers(0, len(dataset), 40)
        assert reader.read(ordinals)["x"].tolist() == [expected[i] for i in ordinals]
    reader.read(np.arange(len(dataset)))
    monkeypatch.setattr(access.LabelReader, "read", lambda *a: pytest.fail("read again"))
    assert reader.read(np.arange(len(dataset)))["x"].tolist() == expected


def test_values_that_take_too_much_are_not_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "KNOWN_VALUES_BYTES", 10)
    dataset = sds.open(str(root))
    reader = RecordReader(dataset, [Column.parse("x=annotation:review-v1/label:int16?-1")])
    assert not reader._known
    assert len(reader.read([1, 2])["x"]) == 2
