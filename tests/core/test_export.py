"""Exports end to end: every selected record once, in order, with the values of a plain loop."""

from __future__ import annotations

import json
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
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
import scipy.signal
import scipy.stats
import signal_dataset as sds

import signal_batch
from signal_batch import engines
from signal_batch.errors import CorruptDatasetError, FeatureError, MissingValueError, SpecError
from signal_batch.frozen import checked
from signal_batch.job import claim, commit, progress_of
from signal_batch.pins import pin_dataset
from signal_batch.planning import prepare
from signal_batch.specs import ExportSpec
from signal_batch.worker import work

FEATURES = """
    import numpy as np
    from signal_batch import feature

    def chatty(batch, *, scale=1.0):
        print("a line on stdout", flush=True)
        print('{"event": "progress", "rows": 1000000}')
        import os
        os.write(1, b'{"event": "error", "kind": "SpecError", "message": "fooled"}\\n')
        return {"energy": scale * np.sum(np.abs(batch["samples"]) ** 2, axis=(1, 2))}

    def broken_past_probe(batch):
        if len(batch["ordinal"]) <= 8 and 19 in batch["ordinal"]:
            raise ZeroDivisionError("cannot do 19")
        return {"x": np.ones(len(batch["ordinal"]))}

    def changing(batch):
        width = 3 if len(batch["ordinal"]) <= 8 and 19 in batch["ordinal"] else 2
        return {"x": np.ones((len(batch["ordinal"]), width), np.float32)}

    def several(batch):
        rows = len(batch["ordinal"])
        return {
            "matrix": np.ones((rows, 2, 3), np.float32) * batch["ordinal"][:, None, None],
            "name": np.array([f"n{i}" for i in batch["ordinal"]], dtype=object),
            "flag": batch["ordinal"] % 2 == 0,
            "label": batch["label"] + 1,
        }
"""


def spec_of(dataset: Path, output: Path, *columns: str, **fields: Any) -> ExportSpec:
    defaults: dict[str, Any] = {"batch_size": 8, "part_bytes": "32KB"}
    return checked(
        ExportSpec,
        {"dataset": str(dataset), "output": str(output), "columns": columns} | defaults | fields,
    )


def export_here(spec: ExportSpec) -> dict[str, Any]:
    """What `signal_batch.export` does, with the worker's work done in this process."""
    job = claim(prepare(spec))
    for shard in progress_of(job).shards:
        work(job.order(shard), lambda event: None)
    return commit(job)


def table_of(output: Path) -> pa.Table:
    """All rows in the order of the files' names, read by pyarrow alone."""
    return ds.dataset(sorted(map(str, (output / "data").glob("*.parquet")))).to_table()


def digests(manifest: dict[str, Any]) -> list[tuple[int, str]]:
    return [(entry["part"], entry["logical_digest"]) for entry in manifest["files"]]


def array(table: pa.Table, name: str) -> Any:
    return np.array(table.column(name).to_pylist())


def samples_of(root: Path) -> list[Any]:
    dataset = sds.open(str(root))
    return [dataset[ordinal]["samples"].data for ordinal in range(len(dataset))]


@pytest.fixture
def features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module of feature functions in the current folder."""
    name = f"features_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(FEATURES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


# --- values --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw_output(iq_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw samples with labels and metadata, exported by two worker processes."""
    output = tmp_path_factory.mktemp("raw") / "out"
    outcome = signal_batch.export(
        spec_of(
            iq_root,
            output,
            "iq=field:samples",
            "label=annotation:truth-v1/label:int32",
            "modulation=annotation:truth-v1/modulation",
            "snr=metadata:snr_db:float32",
            "antenna=metadata:receiver.antenna",
            "roll_off=metadata:roll_off:float32?null",
            "quality=annotation:review-v1/quality:float64?-1",
            "where=scene",
        )
    )
    assert not outcome.already_complete
    return output


def test_raw_export_equals_a_loop(raw_output: Path, iq_root: Path) -> None:
    table = table_of(raw_output)
    dataset = sds.open(str(iq_root))
    truth, review = dataset.annotations["truth-v1"], dataset.annotations["review-v1"]
    assert table.num_rows == len(dataset)
    assert array(table, "ordinal").tolist() == list(range(len(dataset)))
    for ordinal, row in enumerate(table.to_pylist()):
        record = dataset[ordinal]
        pairs = np.array(row["iq"], np.float32)
        np.testing.assert_array_equal(pairs.view(np.complex64)[..., 0], record["samples"].data)
        assert row["id"] == record.id
        assert row["where"] == record.scene_id
        assert row["label"] == truth[ordinal].values["label"]
        assert row["modulation"] == truth[ordinal].values["modulation"]
        assert row["snr"] == np.float32(record.metadata["snr_db"])
        assert row["antenna"] == record.metadata["receiver"]["antenna"]
        wanted = np.float32(record.metadata.get("roll_off", np.nan))
        np.testing.assert_equal(np.float32(row["roll_off"]), wanted)
        assert row["quality"] == review[ordinal].values.get("quality", -1)
    assert table.schema.field("label").type == pa.int32()
    assert table.schema.field("snr").type == pa.float32()


def test_every_reader_sees_the_same(raw_output: Path, iq_root: Path) -> None:
    files = sorted((raw_output / "data").glob("*.parquet"))
    assert len(files) > 5
    glob = str(raw_output / "data" / "*.parquet")
    truth = sds.open(str(iq_root)).annotations["truth-v1"]
    labels = [truth[i].values["label"] for i in range(200)]
    power = [float(np.sum(np.abs(x.astype(complex)) ** 2)) for x in samples_of(iq_root)]

    by_duckdb = duckdb.sql(f"select ordinal, label, iq from '{glob}' order by ordinal").fetchall()
    assert [row[:2] for row in by_duckdb] == list(enumerate(labels))
    np.testing.assert_allclose(
        [np.sum(np.square(np.array(row[2]))) for row in by_duckdb], power, rtol=1e-5
    )
    by_pandas = pd.concat(map(pd.read_parquet, files), ignore_index=True)
    assert by_pandas["label"].tolist() == labels
    by_polars = pl.read_parquet(glob)
    assert by_polars["ordinal"].to_list() == list(range(200))
    assert by_polars["label"].to_list() == labels
    assert by_polars["iq"].to_numpy().shape == (200, 2, 64, 2)
    pairs = by_polars["iq"].to_numpy()
    np.testing.assert_array_equal(pairs.view(np.complex64)[..., 0], np.stack(samples_of(iq_root)))


def test_files_say_what_they_are(raw_output: Path, iq_root: Path) -> None:
    manifest = json.loads((raw_output / "_manifest.json").read_text())
    pin = pin_dataset(str(iq_root), ["truth-v1", "review-v1"]).pin
    first = 0
    for entry in manifest["files"]:
        metadata = pq.read_metadata(raw_output / "data" / entry["file"]).metadata
        assert metadata[b"signal_batch.run_key"].decode() == manifest["run_key"]
        assert metadata[b"signal_batch.fingerprint"].decode() == pin.fingerprint
        told = json.loads(metadata[b"signal_batch.annotations"])
        assert {name: pair[1] for name, pair in told.items()} == {
            item.name: item.root_sha256 for item in pin.annotations
        }
        assert json.loads(metadata[b"signal_batch.ordinals"]) == [first, first + entry["rows"] - 1]
        assert json.loads(metadata[b"signal_batch.spec"])["batch_size"] == 8
        first += entry["rows"]
    assert first == 200


def test_manifest_names_exactly_the_files(raw_output: Path, iq_root: Path) -> None:
    manifest = json.loads((raw_output / "_manifest.json").read_text())
    files = {path.name: path.stat().st_size for path in (raw_output / "data").iterdir()}
    assert {entry["file"]: entry["bytes"] for entry in manifest["files"]} == files
    assert [entry["part"] for entry in manifest["files"]] == list(range(len(files)))
    totals = manifest["totals"]
    assert (totals["files"], totals["rows"], totals["bad"]) == (len(files), 200, 0)
    assert totals["bytes"] == sum(files.values())
    assert manifest["pin"]["fingerprint"] == pin_dataset(str(iq_root)).pin.fingerprint
    assert manifest["selection"]["records"] == 200
    assert manifest["spec"]["columns"][0] == "iq=field:samples"
    assert manifest["schema"]["ordinal"] == "int64"
    assert manifest["versions"]["pyarrow"] == pa.__version__
    assert manifest["versions"]["numpy"] == np.__version__
    claimed = json.loads((raw_output / "_spec.json").read_text())
    assert claimed["run_key"] == manifest["run_key"]
    assert claimed["plan"]["parts"] == len(files)


def test_power_spectrum_is_scipys(iq_root: Path, tmp_path: Path) -> None:
    spec = spec_of(
        iq_root,
        tmp_path / "out",
        "field:samples",
        "label=annotation:truth-v1/label:int32",
        features="power_spectrum",
        feature_args={"nperseg": 32, "noverlap": 8, "detrend": "constant"},
        where=["metadata:snr_db >= 5", "annotation:review-v1 status success"],
    )
    signal_batch.export(spec)
    dataset = sds.open(str(iq_root))
    review = dataset.annotations["review-v1"]
    chosen = [
        i
        for i in range(len(dataset))
        if dataset[i].metadata["snr_db"] >= 5 and review[i].status.value == "success"
    ]
    assert 20 < len(chosen) < 180
    table = table_of(tmp_path / "out")
    assert array(table, "ordinal").tolist() == chosen
    assert table.column_names == ["ordinal", "id", "label", "power_spectrum"]
    _, wanted = scipy.signal.welch(
        np.stack([dataset[i]["samples"].data for i in chosen]).astype(np.complex128),
        nperseg=32,
        noverlap=8,
        detrend="constant",
        return_onesided=False,
    )
    found = array(table, "power_spectrum")
    assert found.shape == (len(chosen), 2, 32)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-5 * wanted.max())
    assert signal_batch.verify(str(tmp_path / "out")).ok


def test_statistics_of_ragged_recordings(vowels_root: Path, tmp_path: Path) -> None:
    spec = spec_of(
        vowels_root,
        tmp_path / "out",
        "field:samples",
        "label=annotation:speakers-v1/label:int32",
        "metadata:frames:int32",
        features="statistics",
        batch_size=50,
    )
    export_here(spec)
    table = table_of(tmp_path / "out")
    assert table.num_rows == 640
    samples = samples_of(vowels_root)
    assert len({x.shape for x in samples}) > 10
    assert array(table, "frames").tolist() == [x.shape[1] for x in samples]
    with np.errstate(all="ignore"):
        for name, wanted in {
            "mean": [x.mean(-1) for x in samples],
            "std": [x.std(-1) for x in samples],
            "min": [x.min(-1) for x in samples],
            "max": [x.max(-1) for x in samples],
            "rms": [np.sqrt(np.mean(x.astype(float) ** 2, -1)) for x in samples],
            "skewness": [scipy.stats.skew(x.astype(float), axis=-1) for x in samples],
            "kurtosis": [scipy.stats.kurtosis(x.astype(float), axis=-1) for x in samples],
        }.items():
            np.testing.assert_allclose(
                array(table, name), np.stack(wanted), rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_raw_ragged_recordings(vowels_root: Path, tmp_path: Path) -> None:
    export_here(spec_of(vowels_root, tmp_path / "out", "field:samples", part_bytes="200KB"))
    table, samples = table_of(tmp_path / "out"), samples_of(vowels_root)
    assert table.num_rows == 640
    for row, wanted in zip(table.to_pylist(), samples, strict=True):
        assert tuple(row["samples_shape"]) == wanted.shape
        np.testing.assert_array_equal(np.array(row["samples"], np.float32), wanted.reshape(-1))
    by_duckdb = duckdb.sql(
        f"select sum(len(samples)) from '{tmp_path}/out/data/*.parquet'"
    ).fetchall()
    assert by_duckdb == [(sum(x.size for x in samples),)]


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": "extension"},
        {"ragged": ["samples"]},
        {"compression": "none", "row_group_bytes": 1},
        {"compression": "gzip"},
        {"batch_size": 1, "part_bytes": 1},
        {"batch_size": 7, "part_bytes": "64MB"},
        {"execution": {"safe_decode": True}},
    ],
    ids=str,
)
def test_layout_does_not_change_values(
    iq_root: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    fields = {"batch_size": 32, "where": ["ordinal < 50"]} | options
    manifest = export_here(spec_of(iq_root, tmp_path / "out", "field:samples", **fields))
    pairs = np.array(table_of(tmp_path / "out").column("samples").to_pylist(), np.float32)
    wanted = np.stack(samples_of(iq_root)[:50])
    np.testing.assert_array_equal(pairs.reshape(*wanted.shape, 2).view("c8")[..., 0], wanted)
    assert manifest["totals"]["rows"] == 50
    assert signal_batch.verify(str(tmp_path / "out")).ok


# --- the same whatever the workers ------------------------------------------------------------


def test_workers_do_not_change_the_result(raw_output: Path, iq_root: Path, tmp_path: Path) -> None:
    reference = json.loads((raw_output / "_manifest.json").read_text())
    for workers in (1, 5):
        fields = reference["spec"] | {
            "output": str(tmp_path / str(workers)),
            "execution": {"workers": workers},
        }
        manifest = signal_batch.export(checked(ExportSpec, fields)).manifest
        assert manifest["run_key"] == reference["run_key"]
        assert digests(manifest) == digests(reference)
        # On one machine even the bytes agree, so the names do.
        assert manifest["files"] == reference["files"]


# --- feature functions of one's own -----------------------------------------------------------


def test_a_feature_that_prints_does_not_disturb(
    features: str, iq_root: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    spec = spec_of(
        iq_root,
        tmp_path / "out",
        "field:samples",
        features=f"{features}:chatty",
        feature_args={"scale": 0.5},
        part_bytes=200,
    )
    outcome = signal_batch.export(
        spec, on_progress=lambda rows, total=None: seen.append((rows, total))
    )
    assert seen[0] == (0, 200)
    assert sum(rows for rows, _ in seen) == 200
    assert outcome.manifest["totals"]["rows"] == 200
    wanted = [0.5 * np.sum(np.abs(x) ** 2) for x in samples_of(iq_root)]
    np.testing.assert_allclose(array(table_of(tmp_path / "out"), "energy"), wanted, rtol=1e-5)


def test_a_feature_returns_columns_of_every_kind(
    features: str, iq_root: Path, tmp_path: Path
) -> None:
    spec = spec_of(
        iq_root,
        tmp_path / "out",
        "field:samples",
        "label=annotation:truth-v1/label:int32",
        features=f"{features}:several",
    )
    export_here(spec)
    table = table_of(tmp_path / "out")
    truth = sds.open(str(iq_root)).annotations["truth-v1"]
    assert array(table, "name").tolist() == [f"n{i}" for i in range(200)]
    assert array(table, "flag").tolist() == [i % 2 == 0 for i in range(200)]
    assert array(table, "label").tolist() == [truth[i].values["label"] + 1 for i in range(200)]
    assert array(table, "matrix")[17].tolist() == [[17.0] * 3] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken_past_probe", r"broken_past_probe, ordinals 15-19: ZeroDivisionError: cannot do"),
        ("changing", r"ordinals 15-19: column 'x': the schema says .*\(2,\).* here is .*\(3,\)"),
    ],
)
def test_a_feature_that_fails_ends_the_job_at_once(
    features: str,
    iq_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: str,
) -> None:
    attempts = counted_attempts(monkeypatch)
    spec = spec_of(
        iq_root,
        tmp_path / "out",
        "field:samples",
        features=f"{features}:{name}",
        execution={"workers": 1},
        part_bytes=200,
    )
    in_workers = name == "broken_past_probe"
    export: Callable[[ExportSpec], Any] = signal_batch.export if in_workers else export_here
    with pytest.raises(FeatureError, match=words) as caught:
        export(spec)
    assert caught.value.exit_code == 1
    assert len(attempts) == in_workers
    assert not (tmp_path / "out" / "_manifest.json").exists()
    receipts = list((tmp_path / "out" / "_receipts").glob("*.json"))
    assert receipts, "the parts before the failure stay"


def counted_attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    attempts: list[Any] = []
    run_worker = engines.run_worker

    def counting(order: Any, *arguments: Any, **options: Any) -> Any:
        attempts.append(order)
        return run_worker(order, *arguments, **options)

    monkeypatch.setattr(engines, "run_worker", counting)
    return attempts


# --- damaged data ------------------------------------------------------------------------------


def spoil(root: Path, *ordinals: int) -> Path:
    """Flip one bit among the samples of records of an uncompressed dataset; the last shard."""
    dataset = sds.open(str(root))
    found = [dataset[ordinal]["samples"].data.tobytes() for ordinal in ordinals]
    for ordinal, samples in zip(ordinals, found, strict=True):
        entry, _ = dataset._index.locate(ordinal)
        path = root / entry.data.path
        data = bytearray(path.read_bytes())
        data[data.index(samples)] ^= 4
        path.write_bytes(data)
    return path


def vowels_spec(root: Path, output: Path, **fields: Any) -> ExportSpec:
    defaults = {"features": "statistics", "batch_size": 16, "part_bytes": "16KB"}
    return spec_of(root, output, "field:samples", **(defaults | fields))


def test_damage_fails_at_once_naming_shard_and_ordinal(
    vowels_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = spoil(vowels_copy, 205)
    attempts = counted_attempts(monkeypatch)
    spec = vowels_spec(vowels_copy, tmp_path / "out", execution={"workers": 1})
    with pytest.raises(CorruptDatasetError) as caught:
        signal_batch.export(spec)
    assert "record 205" in str(caught.value)
    assert str(shard) in str(caught.value)
    assert (caught.value.ordinal, caught.value.exit_code) == (205, 1)
    assert len(attempts) == 1
    assert not (tmp_path / "out" / "_manifest.json").exists()


def test_damage_found_while_planning_fails_before_anything_is_written(
    vowels_copy: Path, tmp_path: Path
) -> None:
    spoil(vowels_copy, 0)
    with pytest.raises(CorruptDatasetError, match="record 0"):
        export_here(vowels_spec(vowels_copy, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_damaged_records_are_set_aside(vowels_copy: Path, tmp_path: Path, policy: str) -> None:
    wanted = [x.mean(-1) for x in samples_of(vowels_copy)]
    bad = [0, 205, 206, 639]
    spoil(vowels_copy, *bad)
    output = tmp_path / "out"
    spec = vowels_spec(vowels_copy, output, on_error=policy)
    manifest = signal_batch.export(spec).manifest if policy == "skip" else export_here(spec)
    table = table_of(output)
    good = [i for i in range(640) if i not in bad]
    assert array(table, "ordinal").tolist() == good
    np.testing.assert_allclose(
        array(table, "mean"), np.stack([wanted[i] for i in good]), rtol=1e-4, atol=1e-5
    )
    assert manifest["totals"] | {"logical_digest": "", "bytes": 0, "files": 0} == {
        "rows": 636,
        "bad": 4,
        "logical_digest": "",
        "bytes": 0,
        "files": 0,
    }
    assert sorted(o for entry in manifest["files"] for o in entry["bad_ordinals"]) == bad
    assert signal_batch.verify(str(output)).ok
    lines = [
        json.loads(line)
        for path in sorted((output / "_quarantine").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    if policy == "skip":
        assert lines == []
        return
    assert [line["ordinal"] for line in lines] == bad
    assert [line["id"] for line in lines] == [f"utterance-{i:04d}" for i in bad]
    for line in lines:
        assert line["error"] == "CorruptDatasetError"
        assert f"record {line['ordinal']}" in line["message"]
        assert ".arrayrecord" in line["message"]


def test_a_record_whose_metadata_is_damaged_too_has_no_id(
    vowels_copy: Path, tmp_path: Path
) -> None:
    entry, _ = sds.open(str(vowels_copy))._index.locate(639)
    spoil(vowels_copy, 205, 639)
    (vowels_copy / entry.metadata.path).unlink()
    spec = vowels_spec(vowels_copy, tmp_path / "out", on_error="quarantine")
    assert export_here(spec)["totals"]["bad"] == 2
    lines = [
        json.loads(path.read_text())
        for path in sorted((tmp_path / "out" / "_quarantine").glob("*.jsonl"))
    ]
    assert [(line["ordinal"], line["id"]) for line in lines] == [
        (205, "utterance-0205"),
        (639, None),
    ]


def test_more_damage_than_the_ceiling_in_one_part(vowels_copy: Path, tmp_path: Path) -> None:
    spoil(vowels_copy, 5, 6, 7)
    spec = vowels_spec(vowels_copy, tmp_path / "out", on_error="skip", max_bad_fraction=2 / 640)
    with pytest.raises(CorruptDatasetError, match="max_bad_fraction"):
        export_here(spec)


def test_more_damage_than_the_ceiling_over_all_parts(vowels_copy: Path, tmp_path: Path) -> None:
    spoil(vowels_copy, 5, 205, 405)
    output = tmp_path / "out"
    spec = vowels_spec(vowels_copy, output, on_error="quarantine", max_bad_fraction=2 / 640)
    with pytest.raises(CorruptDatasetError, match=r"3 of 640 records.*the 2 that"):
        export_here(spec)
    assert not (output / "_manifest.json").exists()
    # A higher ceiling is no other job: it takes up what is there.
    before = {path: path.stat().st_ino for path in (output / "data").iterdir()}
    again = vowels_spec(vowels_copy, output, on_error="quarantine", max_bad_fraction=3 / 640)
    assert export_here(again)["totals"]["bad"] == 3
    assert {path: path.stat().st_ino for path in (output / "data").iterdir()} == before


def test_a_part_without_one_good_record(vowels_copy: Path, tmp_path: Path) -> None:
    spoil(vowels_copy, 4, 5, 6, 7)
    output = tmp_path / "out"
    spec = vowels_spec(
        vowels_copy, output, on_error="skip", batch_size=2, part_bytes=800, where="ordinal < 12"
    ).model_copy(update={"max_bad_fraction": 0.5})
    manifest = export_here(spec)
    assert [entry["rows"] for entry in manifest["files"] if entry["bad_ordinals"]] == [0, 0]
    assert array(table_of(output), "ordinal").tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert signal_batch.verify(str(output)).ok


def test_records_that_lack_a_value_are_set_aside_or_fail(iq_root: Path, tmp_path: Path) -> None:
    column = "annotation:review-v1/quality"
    with pytest.raises(MissingValueError, match="status success"):
        export_here(spec_of(iq_root, tmp_path / "fail", column))
    manifest = export_here(
        spec_of(iq_root, tmp_path / "skip", column, on_error="skip", max_bad_fraction=1)
    )
    review = sds.open(str(iq_root)).annotations["review-v1"]
    good = [i for i in range(200) if review[i].status.value == "success"]
    assert array(table_of(tmp_path / "skip"), "ordinal").tolist() == good
    assert manifest["totals"]["bad"] == 200 - len(good) > 0


def test_a_filter_that_selects_nothing(iq_root: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no record of .* is selected"):
        export_here(spec_of(iq_root, tmp_path / "out", "id", where="metadata:snr_db > 1000"))
    assert not (tmp_path / "out").exists()


def test_the_dataset_is_not_touched(iq_root: Path, tmp_path: Path) -> None:
    def snapshot() -> dict[Path, tuple[int, int]]:
        files = (path for path in iq_root.rglob("*") if path.is_file())
        return {f: (f.stat().st_size, f.stat().st_mtime_ns) for f in files}

    before = snapshot()
    export_here(spec_of(iq_root, tmp_path / "out", "field:samples"))
    assert snapshot() == before
