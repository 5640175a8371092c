"""The packaged recordings, and writing a dataset once: repeat, resume, refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch import recordings
from signal_batch.errors import DatasetFormatError, InputError, OutputError, SpecError
from signal_batch.recordings import Recipe, write_japanese_vowels, write_once


class Interrupted(Exception):
    pass


def contents(root: Path) -> dict[str, bytes]:
    """Every object below a root, but for lock files."""
    found = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def fingerprint(root: Path) -> str:
    """SHA-256 over root document, snapshot and manifest pages in the order they are named."""
    document = (root / "root.json").read_bytes()
    snapshot = (root / json.loads(document)["snapshot"]["path"]).read_bytes()
    pages = [
        (root / page["object"]["path"]).read_bytes() for page in json.loads(snapshot)["manifests"]
    ]
    return sha256(b"".join([document, snapshot, *pages])).hexdigest()


def counting_recipe(records: int = 10, **changes: Any) -> Recipe:
    """Record `i` holds the single number `i`, and so does its row."""

    def record(index: int) -> sds.Record:
        data = np.array([index], dtype=np.int64)
        return sds.Record(f"r{index}", {"x": sds.Field(data, (sds.Axis("n", 1),))})

    recipe = Recipe(
        dataset_id="counting",
        snapshot_id="one",
        records=records,
        records_per_shard=4,
        record_id=lambda index: f"r{index}",
        record=record,
        annotations={
            "even-v1": lambda index: (
                (sds.AnnotationStatus.SUCCESS, {"n": index})
                if index % 2 == 0
                else (sds.AnnotationStatus.SKIPPED, {})
            )
        },
        metadata={},
    )
    return replace(recipe, **changes)


@pytest.fixture(scope="module")
def vowels(tmp_path_factory: pytest.TempPathFactory) -> sds.Dataset:
    return write_japanese_vowels(str(tmp_path_factory.mktemp("vowels") / "set"))


def test_every_utterance_is_a_record_in_file_order(vowels: sds.Dataset) -> None:
    packed = files("signal_batch").joinpath("data/japanese_vowels.npz")
    with packed.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        expected = np.split(file["frames"], np.cumsum(file["lengths"])[:-1])
        splits = file["split"].tolist()
    assert len(vowels) == len(expected) == 640
    for index, record in enumerate(vowels):
        samples = record["samples"]
        assert record.id == f"utterance-{index:04d}"
        assert samples.data.dtype == np.float32
        np.testing.assert_array_equal(samples.data, expected[index].T)
        assert record.metadata == {"split": splits[index], "frames": len(expected[index])}


def test_axes_say_what_the_numbers_are(vowels: sds.Dataset) -> None:
    channel, time = vowels.record_metadata[0]["samples"].axes
    assert (channel.name, channel.length, time.name, time.length) == ("channel", 12, "time", 20)
    assert time.coordinate is not None
    assert (time.coordinate.start, time.coordinate.step, time.coordinate.unit) == (0, 0.0064, "s")
    assert vowels.metadata["licence"] == "CC-BY-4.0"
    assert "Kudo" in str(vowels.metadata["source"])


def test_speakers_are_as_the_authors_counted_them(vowels: sds.Dataset) -> None:
    """Blocks a speaker, as the data set's own description lists them for its two files."""
    train, test = [30] * 9, [31, 35, 88, 44, 29, 24, 40, 50, 29]
    expected = [s + 1 for counts in (train, test) for s, n in enumerate(counts) for _ in range(n)]
    rows = vowels.annotations["speakers-v1"]
    assert {row.status for row in rows} == {sds.AnnotationStatus.SUCCESS}
    assert [row.values["label"] for row in rows] == expected


def test_shards_keep_the_order(vowels: sds.Dataset) -> None:
    starts = [i.first_ordinal for i in vowels.read_instructions()]
    assert starts == [0, 160, 320, 480]


def test_two_folders_hold_the_same_bytes(vowels: sds.Dataset, tmp_path: Path) -> None:
    write_japanese_vowels(str(tmp_path / "elsewhere"))
    assert fingerprint(tmp_path / "elsewhere") == fingerprint(Path(vowels.root))
    assert contents(tmp_path / "elsewhere") == contents(Path(vowels.root))


def test_writing_again_only_opens(vowels: sds.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing was left to write")

    for name in ("write_shard", "publish", "publish_annotations"):
        monkeypatch.setattr(sds, name, refuse)
    again = write_japanese_vowels(vowels.root)
    assert (again.id, again.snapshot_id) == (vowels.id, vowels.snapshot_id)
    assert list(again.annotations) == ["speakers-v1"]


def test_another_dataset_is_refused_and_left_alone(tmp_path: Path) -> None:
    write_once(str(tmp_path), counting_recipe())
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"already holds another dataset: counting \(snapshot one"):
        write_japanese_vowels(str(tmp_path))
    with pytest.raises(InputError, match=r"not counting \(snapshot two"):
        write_once(str(tmp_path), counting_recipe(snapshot_id="two"))
    assert contents(tmp_path) == before


def interrupt_at(stop: int) -> Callable[[int], None]:
    def progress(done: int) -> None:
        if done >= stop:
            raise Interrupted

    return progress


@pytest.mark.parametrize("stop", [4, 8, 10])
def test_an_interrupted_write_is_finished_by_the_same_call(tmp_path: Path, stop: int) -> None:
    with pytest.raises(Interrupted):
        write_once(str(tmp_path / "a"), counting_recipe(), interrupt_at(stop))
    write_once(str(tmp_path / "a"), counting_recipe())
    write_once(str(tmp_path / "b"), counting_recipe())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_missing_annotations_are_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(sds, "publish_annotations", fail)
        with pytest.raises(Interrupted):
            write_once(str(tmp_path), counting_recipe())
    assert not sds.open(str(tmp_path)).annotations
    assert list(write_once(str(tmp_path), counting_recipe()).annotations) == ["even-v1"]


def test_what_another_recipe_left_unfinished_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    def negative(index: int) -> sds.Record:
        data = np.array([-index], dtype=np.int64)
        return sds.Record(f"r{index}", {"x": sds.Field(data, (sds.Axis("n", 1),))})

    other = counting_recipe(snapshot_id="two", record=negative)
    with pytest.raises(Interrupted):
        write_once(str(tmp_path), other, interrupt_at(10))
    dataset = write_once(str(tmp_path), counting_recipe())
    assert [int(record["x"].data[0]) for record in dataset] == list(range(10))


def test_rows_stay_aligned_over_many_annotation_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "ROWS_PER_SHARD", 3)
    rows = list(write_once(str(tmp_path), counting_recipe()).annotations["even-v1"])
    assert [row.source_record_id for row in rows] == [f"r{i}" for i in range(10)]
    assert [row.values.get("n") for row in rows] == [0, None, 2, None, 4, None, 6, None, 8, None]
    assert len(list(tmp_path.glob("annotations/sets/even-v1/*/objects/*/*"))) == 4


def test_more_than_ten_shards_stay_in_order(tmp_path: Path) -> None:
    dataset = write_once(str(tmp_path), counting_recipe(12, records_per_shard=1))
    assert [record.id for record in dataset] == [f"r{i}" for i in range(12)]


def test_progress_counts_records(tmp_path: Path) -> None:
    seen: list[int] = []
    write_once(str(tmp_path), counting_recipe(), seen.append)
    assert seen == [4, 8, 10]
    write_once(str(tmp_path), counting_recipe(), seen.append)
    assert seen == [4, 8, 10]


@pytest.mark.parametrize("root", ["", "ftp://host/set", "s3://key:secret@bucket/set", "/"])
def test_what_cannot_be_a_root_is_a_spec_error(root: str) -> None:
    with pytest.raises(SpecError):
        write_japanese_vowels(root)


def test_a_damaged_dataset_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "root.json").write_text("{}")
    with pytest.raises(DatasetFormatError, match="holds something else"):
        write_japanese_vowels(str(tmp_path))


def test_a_root_without_its_snapshot_is_incomplete(tmp_path: Path) -> None:
    write_once(str(tmp_path), counting_recipe())
    (tmp_path / "snapshots/one/snapshot.json").unlink()
    with pytest.raises(DatasetFormatError, match="incomplete"):
        write_once(str(tmp_path), counting_recipe())


def test_a_file_in_the_way_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_japanese_vowels(str(tmp_path / "file" / "set"))
