"""Parquet parts: values survive every reader, digests follow values alone, faults are clear."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signal_batch.arrow import arrow_schema, to_numpy, to_record_batch
from signal_batch.batches import Batch
from signal_batch.digests import LogicalDigest
from signal_batch.errors import DamagedOutputError, FeatureError, OutputError, SpecError
from signal_batch.parquet import (
    PartFile,
    PartWriter,
    read_part_digest,
    write_part,
)


def identity(rows: int, first: int = 0) -> Batch:
    ids = np.array([f"record-{first + i}" for i in range(rows)], dtype=object)
    return {"ordinal": np.arange(first, first + rows, dtype=np.int64), "id": ids}


def batch_of(rows: int, first: int = 0) -> Batch:
    """A column of every kind there is."""
    rng = np.random.default_rng(first)
    real, imaginary = rng.standard_normal((2, rows, 2, 5)).astype("f4")
    lengths = rng.integers(0, 6, rows)
    return identity(rows, first) | {
        "label": np.array([None if i % 3 == 1 else f"é{i}" for i in range(rows)], dtype=object),
        "flag": rng.random(rows) > 0.5,
        "level": rng.standard_normal(rows),
        "count": rng.integers(0, 255, rows).astype("uint8"),
        "half": rng.standard_normal((rows, 3)).astype("float16"),
        "bits": rng.random((rows, 11)) > 0.5,
        "spectrum": rng.standard_normal((rows, 4)).astype("float32"),
        "image": rng.integers(-9, 9, (rows, 2, 3, 2)).astype("int16"),
        "point": (rng.standard_normal(rows) + 1j).astype("complex64"),
        "iq": real + 1j * imaginary,
        "nothing": np.zeros((rows, 2, 0), "float32"),
        "pulses": [rng.standard_normal(n).astype("float32") for n in lengths],
        "bursts": [(rng.standard_normal((2, n)) + 1j * n).astype("complex64") for n in lengths],
    }


def assert_equal(actual: Batch, expected: Batch) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        found = actual[name]
        if isinstance(value, list) or isinstance(found, list):
            assert len(found) == len(value)
            pairs = list(zip(found, value, strict=True))
        else:
            pairs = [(found, value)]
        for one, other in pairs:
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert one.tolist() == other.tolist(), name


def write(path: Path, batch: Batch, **options: Any) -> tuple[pa.Schema, PartFile]:
    schema = arrow_schema(batch, metadata={"signal_batch.run_key": "abc"}, **options)
    return schema, write_part(path, [to_record_batch(batch, schema)], schema)


# --- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", ["nested", "extension"])
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_every_kind_of_column_comes_back(tmp_path: Path, tensors: Any, compression: str) -> None:
    batches = [batch_of(7), batch_of(5, 7), batch_of(1, 12)]
    schema = arrow_schema(batches[0], tensors=tensors)
    stream = [to_record_batch(batch, schema) for batch in batches]
    part = write_part(
        tmp_path / "part.parquet", stream, schema, compression=compression, row_group_bytes=500
    )
    table = pq.read_table(tmp_path / "part.parquet")
    assert table.schema.equals(schema)
    assert part.rows == table.num_rows == 13
    values = to_numpy(table)
    for batch in batches:
        first, rows = int(batch["ordinal"][0]), len(batch["ordinal"])
        as_read = {
            name: list(value) if name == "nothing" else value for name, value in batch.items()
        }
        assert_equal({n: v[first : first + rows] for n, v in values.items()}, as_read)


def test_a_batch_comes_back_from_a_slice_and_empty() -> None:
    batch = batch_of(8)
    schema = arrow_schema(batch)
    sliced = to_numpy(to_record_batch(batch, schema).slice(3, 4))
    expected = {n: list(v[3:7]) if n == "nothing" else v[3:7] for n, v in batch.items()}
    assert_equal(sliced, expected)
    empty = to_numpy(to_record_batch({n: v[:0] for n, v in batch.items()}, schema))
    assert empty["iq"].shape == (0, 2, 5)
    assert empty["bursts"] == []
    assert_equal(to_numpy(schema.empty_table()), empty)


def test_numbers_of_fixed_shape_are_not_copied() -> None:
    batch = identity(4) | {"x": np.ones((4, 3, 2), "f4"), "z": np.ones((4, 3), "complex64")}
    for tensors in ("nested", "extension"):
        values = to_numpy(to_record_batch(batch, arrow_schema(batch, tensors=tensors)))
        assert np.shares_memory(values["x"], batch["x"])
        assert np.shares_memory(values["z"], batch["z"])


def test_strided_and_ragged_by_choice() -> None:
    wide = np.arange(48, dtype="f4").reshape(4, 3, 4)
    batch = identity(4) | {"x": wide[:, ::2, ::-1], "y": wide.transpose(0, 2, 1)}
    schema = arrow_schema(batch, ragged=["y"])
    assert schema.names == ["ordinal", "id", "x", "y", "y_shape"]
    values = to_numpy(to_record_batch(batch, schema))
    assert_equal(values, batch | {"y": list(batch["y"])})


def test_the_schema_tells_types_and_shapes() -> None:
    schema = arrow_schema(batch_of(3), metadata={"a": "b"})
    assert schema.metadata == {b"a": b"b"}
    assert schema.names[:2] == ["ordinal", "id"]
    assert not schema.field("ordinal").nullable
    assert not schema.field("id").nullable
    assert schema.field("label").nullable
    iq = schema.field("iq")
    assert (iq.type.list_size, iq.type.value_type.list_size) == (2, 5)
    assert iq.type.value_type.value_type.list_size == 2
    assert iq.metadata[b"shape"] == b"[2, 5]"
    assert iq.metadata[b"dtype"] == b"complex64"
    assert iq.metadata[b"complex"]
    assert schema.field("bursts").metadata[b"ndim"] == b"2"
    assert schema.field("bursts_shape").type.list_size == 2
    tensor = arrow_schema(batch_of(3), tensors="extension").field("iq").type
    assert tensor == pa.fixed_shape_tensor(pa.float32(), (2, 5, 2))


# --- other readers -----------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Batch]:
    batch = batch_of(9)
    write(tmp_path / "part.parquet", batch)
    return tmp_path / "part.parquet", batch


def as_lists(batch: Batch, name: str) -> list[Any]:
    """What a reader that knows no complex numbers and no shapes should see."""
    value = batch[name]
    if name in ("pulses", "bursts", "nothing"):
        value = [np.ravel(item) for item in value]
    split = [np.stack([v.real, v.imag], -1) if np.iscomplexobj(v) else np.asarray(v) for v in value]
    return [item.tolist() for item in split]


def test_pyarrow_dataset_reads_it(written: tuple[Path, Batch]) -> None:
    path, batch = written
    table = ds.dataset(path).to_table(filter=ds.field("ordinal") >= 4)
    assert table.schema.metadata[b"signal_batch.run_key"] == b"abc"
    for name in batch:
        assert table.column(name).to_pylist() == as_lists(batch, name)[4:]
    assert table.column("bursts_shape").to_pylist() == [[*b.shape] for b in batch["bursts"][4:]]


def test_duckdb_reads_it(written: tuple[Path, Batch]) -> None:
    path, batch = written
    with duckdb.connect() as connection:
        for name in batch:
            query = f"SELECT {name} FROM read_parquet(?) ORDER BY ordinal"
            rows = connection.execute(query, [str(path)]).fetchall()
            assert [row[0] for row in rows] == as_lists(batch, name)


def test_polars_reads_it(written: tuple[Path, Batch]) -> None:
    path, batch = written
    frame = pl.read_parquet(path)
    assert frame.schema["image"] == pl.Array(pl.Int16, (2, 3, 2))
    for name in batch:
        assert frame[name].to_list() == as_lists(batch, name)


def test_pandas_reads_it(written: tuple[Path, Batch]) -> None:
    path, batch = written
    frame = pd.read_parquet(path)
    assert frame["label"].isna().tolist() == [value is None for value in batch["label"]]
    for name in set(batch) - {"label"}:
        nested = [
            np.array(v.tolist()).tolist()
            if isinstance(v, np.ndarray) and v.dtype != object
            else plain(v)
            for v in frame[name]
        ]
        assert nested == as_lists(batch, name)


def plain(value: Any) -> Any:
    """Nested object arrays, as pandas has them, to lists."""
    return [plain(item) for item in value] if isinstance(value, np.ndarray) else value


def test_the_tensor_extension_keeps_its_shape(tmp_path: Path) -> None:
    batch = batch_of(4)
    write(tmp_path / "part.parquet", batch, tensors="extension")
    column = pq.read_table(tmp_path / "part.parquet").column("image").combine_chunks()
    np.testing.assert_array_equal(column.to_numpy_ndarray(), batch["image"])


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"spectrum": np.zeros((4, 5), "f4")},
            r"'spectrum': the schema says float32 of shape "
            r"\(4,\) a record, here is float32 of shape \(5,\) .*--ragged spectrum",
        ),
        (
            {"spectrum": np.zeros((4, 4), "f8")},
            r"says float32 of shape \(4,\) a record, here is "
            r"float64 of shape \(4,\) a record$",
        ),
        ({"spectrum": np.zeros(4, "f4")}, "here is one float32 a record"),
        (
            {"spectrum": [np.zeros(3, "f4"), np.zeros(4, "f4")] * 2},
            r"here are lists of \(3,\), \(4,\); .*--ragged spectrum",
        ),
        ({"spectrum": np.zeros((4, 0), "f4")}, "here is float32 lists of 1 axes"),
        ({"level": np.zeros(4, "f4")}, "says one float64 a record, here is one float32 a record"),
        ({"level": np.array(["a"] * 4, dtype=object)}, "here is one text a record"),
        ({"level": np.zeros(3)}, "'level' has 3 entries for 4 records"),
        ({"pulses": [np.zeros(3)] * 4}, "float32 lists of 1 axes, here are float64 lists of 1"),
        ({"pulses": [np.zeros((3, 1), "f4")] * 4}, "here are float32 lists of 2 axes"),
        ({"pulses": np.zeros((4, 3), "f8")}, "here is float64 lists of 1 axes"),
        ({"other": np.zeros(4)}, "column 'other' is not in the schema"),
        ({"level": None}, "column 'level' is missing"),
        ({"id": np.array(["a", None, "b", "c"], dtype=object)}, "'id' must not be null"),
        ({"label": np.array(["a", 3, "b", "c"], dtype=object)}, "'label' is not text throughout"),
        ({"label": np.array(["a", "\ud800", "b", "c"], dtype=object)}, "not text throughout"),
    ],
)
def test_a_batch_unlike_the_schema_is_refused(change: dict[str, Any], message: str) -> None:
    batch = batch_of(4, 20)
    schema = arrow_schema(batch)
    changed = {n: v for n, v in (batch | change).items() if v is not None}
    with pytest.raises(FeatureError, match=message) as info:
        to_record_batch(changed, schema)
    assert str(info.value).startswith("ordinals 20-23: column ")


def test_all_differences_are_listed() -> None:
    batch = batch_of(2)
    schema = arrow_schema(batch)
    del batch["level"]
    with pytest.raises(FeatureError, match=r"'level' is missing; .*'new' .*; column 'half': "):
        to_record_batch(batch | {"new": batch["flag"], "half": batch["spectrum"]}, schema)


def test_a_schema_that_cannot_be_is_refused() -> None:
    batch = batch_of(3)
    with pytest.raises(SpecError, match=r"--ragged level: no such array .* half, bits, spectrum"):
        arrow_schema(batch, ragged=["level"])
    with pytest.raises(FeatureError, match="'pulses_shape' would be there twice"):
        arrow_schema(batch | {"pulses_shape": np.zeros(3)})
    with pytest.raises(FeatureError, match="'pulses': a probe of no records"):
        arrow_schema({name: value[:0] for name, value in batch.items()})
    with pytest.raises(ValueError, match="'x' lacks the metadata"):
        to_numpy(pa.table({"x": [1]}))


# --- logical digest ----------------------------------------------------------------------------


def digest_of(table: pa.Table, cuts: Sequence[int] = ()) -> str:
    digest = LogicalDigest(table.schema)
    edges = [0, *sorted(cuts), table.num_rows]
    for start, stop in pairwise(edges):
        for batch in table.slice(start, stop - start).combine_chunks().to_batches():
            digest.update(batch)
    return digest.hexdigest()


def table_of(batch: Batch, **options: Any) -> pa.Table:
    schema = arrow_schema(batch, **options)
    return pa.Table.from_batches([to_record_batch(batch, schema)])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 21), max_size=6), st.sampled_from(["nested", "extension"]))
def test_the_digest_does_not_depend_on_batches(cuts: list[int], tensors: str) -> None:
    table = table_of(batch_of(21), tensors=tensors)
    assert digest_of(table, cuts) == digest_of(table)
    copied = (
        pa.concat_tables(
            [
                pa.table(t.to_pydict(), schema=table.schema)
                for t in (table.slice(0, 5), table.slice(5))
            ]
        )
        if tensors == "nested"
        else table
    )
    assert digest_of(copied, cuts) == digest_of(table)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-3, 3),
            st.none() | st.text(max_size=3),
            st.none() | st.booleans(),
            st.none() | st.lists(st.none() | st.floats(width=16), max_size=3),
            st.none() | st.lists(st.none() | st.integers(0, 3), min_size=2, max_size=2),
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_the_digest_of_nulls_follows_values_alone(rows: list[Any], cuts: list[int]) -> None:
    small = (pa.int16(), pa.string(), pa.bool_(), pa.list_(pa.float16()), pa.list_(pa.int8(), 2))
    large = (*small[:1], pa.large_string(), small[2], pa.large_list(pa.float16()), small[4])
    columns = list(zip(*rows, strict=True)) or [()] * 5
    one, other = (
        pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=[*"abcde"])
        for types in (small, large)
    )
    assert digest_of(one, [c for c in cuts if c <= len(rows)]) == digest_of(other)
    encoded = other.set_column(1, "b", one.column("b").dictionary_encode())
    assert digest_of(encoded) == digest_of(one)


def test_bytes_under_a_null_do_not_count() -> None:
    valid = pa.py_buffer(b"\x05")
    arrays = [
        pa.Array.from_buffers(pa.int16(), 3, [valid, pa.py_buffer(np.array(v, "i2"))])
        for v in ([1, 2, 3], [1, 9, 3])
    ]
    assert digest_of(pa.table({"x": arrays[0]})) == digest_of(pa.table({"x": arrays[1]}))
    assert digest_of(pa.table({"x": arrays[0]})) != digest_of(
        pa.table({"x": pa.array([1, 0, 3], pa.int16())})
    )


@pytest.mark.parametrize("name", [n for n in batch_of(1) if n != "nothing"])
def test_any_change_changes_the_digest(name: str) -> None:
    batch = batch_of(6, 3)
    before = digest_of(table_of(batch))
    swapped = dict(batch)
    if isinstance(batch[name], list):
        order = (
            [1, 0, 2, 3, 4, 5] if batch[name][0].size != batch[name][1].size else [3, 2, 1, 0, 4, 5]
        )
        swapped[name] = [batch[name][i] for i in order]
    else:
        distinct = next(
            i for i in range(1, 6) if not np.array_equal(batch[name][i], batch[name][0])
        )
        order = np.arange(6)
        order[[0, distinct]] = [distinct, 0]
        swapped[name] = batch[name][order]
    assert digest_of(table_of(swapped)) != before
    renamed = {("renamed" if n == name else n): v for n, v in batch.items()}
    if name not in ("ordinal", "id"):
        assert digest_of(table_of(renamed)) != before


def test_one_bit_a_shape_and_a_row_change_the_digest() -> None:
    base = identity(3) | {"x": np.zeros((3, 4), "f4")}
    digests = {digest_of(table_of(base)), digest_of(table_of(base).slice(0, 2))}
    negative = base["x"].copy()
    negative[1, 2] = -0.0
    digests.add(digest_of(table_of(base | {"x": negative})))
    digests.add(digest_of(table_of(base | {"x": base["x"].reshape(3, 2, 2)})))
    digests.add(digest_of(table_of(base | {"x": base["x"].view("i4")})))
    digests.add(digest_of(table_of(base, ragged=["x"])))
    assert len(digests) == 6


def test_text_and_lists_do_not_run_into_each_other() -> None:
    pairs = [(["ab", "c"], ["a", "bc"]), (["a", None], ["a", ""]), ([[1], [2, 3]], [[1, 2], [3]])]
    for one, other in pairs:
        assert digest_of(pa.table({"x": one})) != digest_of(pa.table({"x": other}))


def test_the_digest_refuses_other_columns_and_types() -> None:
    digest = LogicalDigest(pa.schema({"x": pa.int8()}))
    with pytest.raises(ValueError, match="expected the columns"):
        digest.update(pa.record_batch({"y": pa.array([1], pa.int8())}))
    with pytest.raises(ValueError, match="column 'x': expected int8, not int16"):
        digest.update(pa.record_batch({"x": pa.array([1], pa.int16())}))
    with pytest.raises(TypeError, match="no logical digest for the Arrow type"):
        LogicalDigest(pa.schema({"x": pa.timestamp("s")}))


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", ["nested", "extension"])
def test_the_digest_survives_the_file(tmp_path: Path, tensors: Any) -> None:
    batches = [batch_of(7), batch_of(5, 7)]
    schema = arrow_schema(batches[0], tensors=tensors)
    stream = [to_record_batch(batch, schema) for batch in batches]
    digests = set()
    for index, (compression, size) in enumerate([("zstd", 1), ("none", "1MB"), ("gzip", 900)]):
        path = tmp_path / f"{index}.parquet"
        part = write_part(path, stream, schema, compression=compression, row_group_bytes=size)
        content = read_part_digest(path)
        assert content.ordinals.tolist() == list(range(12))
        assert (content.rows, content.logical_digest) == (12, part.logical_digest)
        digests.add(part.logical_digest)
    assert digests == {digest_of(pa.Table.from_batches(stream))}


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"{i}.parquet", batch_of(40))[1] for i in range(2)]
    assert parts[0] == parts[1]
    assert (tmp_path / "0.parquet").read_bytes() == (tmp_path / "1.parquet").read_bytes()
    assert parts[0].file_bytes == (tmp_path / "0.parquet").stat().st_size


def test_row_groups_are_sized_in_bytes(tmp_path: Path) -> None:
    path, batch = tmp_path / "part.parquet", identity(1000) | {"x": np.ones((1000, 256), "f4")}
    schema = arrow_schema(batch)
    whole = to_record_batch(batch, schema)
    pieces = [whole.slice(at, 30) for at in range(0, 1000, 30)]
    for stream in ([whole], pieces):
        write_part(path, stream, schema, row_group_bytes="256KB")
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        assert sum(groups) == 1000
        assert all(248 <= rows <= 256 for rows in groups[:-1])
    assert metadata.row_group(0).column(2).statistics is None
    encodings = {metadata.row_group(0).column(i).encodings for i in (0, 2)}
    assert not any("DICTIONARY" in name for names in encodings for name in names)


def test_a_part_of_no_rows_is_a_file(tmp_path: Path) -> None:
    schema = arrow_schema(batch_of(2))
    part = write_part(tmp_path / "part.parquet", [], schema)
    content = read_part_digest(tmp_path / "part.parquet")
    assert (part.rows, content.rows, len(content.ordinals)) == (0, 0, 0)
    assert content.logical_digest == part.logical_digest


def test_a_failing_stream_leaves_no_file_and_keeps_its_error(tmp_path: Path) -> None:
    schema = arrow_schema(batch_of(2))

    def stream() -> Iterator[pa.RecordBatch]:
        yield to_record_batch(batch_of(2), schema)
        raise TimeoutError(errno.ETIMEDOUT, "storage did not answer")

    with pytest.raises(TimeoutError):
        write_part(tmp_path / "part.parquet", stream(), schema, row_group_bytes=1)
    with contextlib.suppress(KeyboardInterrupt), PartWriter(tmp_path / "b.parquet", schema):
        raise KeyboardInterrupt
    with pytest.raises(Exception, match=r"(?i)compression"):
        PartWriter(tmp_path / "c.parquet", schema, compression="zip")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    path.symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"part\.parquet: No space left on device; free"):
        write(path, batch_of(2000))
    assert not path.is_symlink()


def test_a_limit_on_file_sizes_is_a_clear_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    batch = batch_of(3000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OutputError, match="ulimit -f"):
            write(tmp_path / "part.parquet", batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_forbidden_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="create it first"):
        write(tmp_path / "nowhere" / "part.parquet", batch_of(1))
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(OutputError, match="check the permissions"):
            write(tmp_path / "part.parquet", batch_of(1))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write(path, batch_of(50))
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-100], whole[:200] + bytes(400) + whole[600:]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedOutputError, match=r"part\.parquet is not a readable part"):
            read_part_digest(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(DamagedOutputError, match="ordinal"):
        read_part_digest(path)
    with pytest.raises(FileNotFoundError):
        read_part_digest(tmp_path / "nothing.parquet")
