"""Fingerprints against the files on disk, and what each kind of wrong dataset is told."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch import pins
from signal_batch.errors import (
    CorruptDatasetError,
    DatasetFormatError,
    DatasetNotFoundError,
    InputError,
    PinMismatchError,
    SpecError,
    UnknownAnnotationError,
)
from signal_batch.pins import (
    Pin,
    absolute_uri,
    pin_dataset,
    read_pin,
    reopen,
    write_pin,
)
from signal_batch.shards import PooledShardStore
from signal_batch.synth import synthesize

WriteDataset = Callable[..., Path]
Row = tuple[str, dict[str, Any]]
ROWS: list[Row] = [("success", {"label": i}) for i in range(20)]


def fingerprint_of(root: Path) -> str:
    """The fingerprint, from the files alone."""
    document = (root / "root.json").read_bytes()
    snapshot = (root / json.loads(document)["snapshot"]["path"]).read_bytes()
    pages = [root / page["object"]["path"] for page in json.loads(snapshot)["manifests"]]
    return sha256(
        b"".join([document, snapshot, *(page.read_bytes() for page in pages)])
    ).hexdigest()


def edit(path: Path, change: Callable[[Any], None]) -> int:
    """Change a JSON document in place; its new size."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path.stat().st_size


def edit_snapshot(root: Path, change: Callable[[Any], None]) -> None:
    """Change the snapshot, and its size in `root.json` with it."""
    snapshot = next(root.glob("snapshots/*/snapshot.json"))
    size = edit(snapshot, change)
    edit(root / "root.json", lambda value: value["snapshot"].update(stored_bytes=size))


def edit_annotation_root(root: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a set's root document, and the catalog so that it agrees with it."""
    path = next(root.glob(f"annotations/sets/{name}/*/root.json"))
    size = edit(path, change)
    pointer = root / "annotations" / "catalog.json"
    revision = root / json.loads(pointer.read_text())["revision"]["path"]
    value = json.loads(revision.read_text())
    value["sets"][name]["stored_bytes"] = size
    payload = json.dumps(value).encode()
    name_of = f"annotations/catalogs/{sha256(payload).hexdigest()}.json"
    (root / name_of).write_bytes(payload)
    edit(pointer, lambda document: document["revision"].update(path=name_of))


def republish(root: Path, name: str, rows: list[Row], **options: Any) -> None:
    """Take a set away and publish another under its name."""
    shutil.rmtree(root / "annotations" / "sets" / name)
    (root / "annotations" / "catalog.json").unlink()
    dataset = sds.open(str(root))
    records = [
        sds.AnnotationRecord(row.id, i, sds.AnnotationStatus(status), values)
        for i, (row, (status, values)) in enumerate(zip(dataset.record_metadata, rows, strict=True))
    ]
    sds.publish_annotations(dataset, name, records, options=sds.AnnotationOptions(**options))


@pytest.fixture
def root(write_dataset: WriteDataset, tmp_path: Path) -> Path:
    """Twenty records in four shards with one annotation set."""
    return write_dataset(tmp_path / "set", annotations={"labels": ROWS})


# --- pinning -------------------------------------------------------------------------------


def test_a_pin_says_what_is_on_disk(root: Path) -> None:
    pin = pin_dataset(str(root), ["labels"]).pin
    path = next(root.glob("annotations/sets/labels/*/root.json"))
    stored = sum(file.stat().st_size for file in (root / "objects").rglob("*.arrayrecord"))
    assert pin.model_dump() == {
        "uri": str(root),
        "dataset_id": "small",
        "snapshot_id": "s1",
        "record_count": 20,
        "shard_count": 4,
        "stored_bytes": stored,
        "fingerprint": fingerprint_of(root),
        "annotations": (
            {
                "name": "labels",
                "publication_id": path.parent.name,
                "source_snapshot_id": "s1",
                "record_count": 20,
                "root_sha256": sha256(path.read_bytes()).hexdigest(),
            },
        ),
        "catalog_revision": json.loads((root / "annotations/catalog.json").read_text())["revision"][
            "path"
        ],
    }


def test_the_fingerprint_goes_over_every_manifest_page(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    pages = sds.PublicationOptions(shards_per_manifest=2)
    root = write_dataset(tmp_path / "set", 50, publication=pages)
    assert len(list(root.glob("manifests/*/*"))) == 5
    assert pin_dataset(str(root)).pin.fingerprint == fingerprint_of(root)


def test_the_identity_is_digests_without_places(root: Path) -> None:
    pin = pin_dataset(str(root), ["labels"]).pin
    found = pin.identity()
    assert found == {
        "fingerprint": pin.fingerprint,
        "annotations": {
            "labels": [pin.annotations[0].publication_id, pin.annotations[0].root_sha256]
        },
    }
    moved = pin.model_copy(update={"uri": "s3://elsewhere/x", "catalog_revision": None})
    assert moved.identity() == found


def test_two_writes_of_a_dataset_have_one_fingerprint(iq_root: Path, tmp_path: Path) -> None:
    first = pin_dataset(str(iq_root), ["truth-v1", "review-v1"]).pin
    again = tmp_path / "again"
    synthesize(str(again), records=200, shape=(2, 64), seed=7, records_per_shard=40)
    second = pin_dataset(str(again), ["review-v1", "truth-v1", "truth-v1"]).pin
    assert second.identity() == first.identity()
    other = tmp_path / "other"
    synthesize(str(other), records=200, shape=(2, 64), seed=8, records_per_shard=40)
    assert pin_dataset(str(other)).pin.fingerprint != first.fingerprint


def test_the_fingerprint_changes_with_a_manifest_alone(root: Path) -> None:
    before = pin_dataset(str(root)).pin
    page = next(root.glob("manifests/*/*.json"))
    text = page.read_text()
    # Another shard of the same size under another name: nothing else in the dataset says so.
    name = re.findall(r"objects/data/../(\w+)\.arrayrecord", text)[0]
    page.write_text(text.replace(name, "0" * len(name)))
    assert page.stat().st_size == len(text)
    assert pin_dataset(str(root)).pin.fingerprint == fingerprint_of(root) != before.fingerprint
    with pytest.raises(PinMismatchError, match="fingerprint: pinned"):
        reopen(before)


def test_publishing_another_set_leaves_a_pin_valid(root: Path) -> None:
    before = pin_dataset(str(root), ["labels"]).pin
    dataset = sds.open(str(root))
    rows = [
        sds.AnnotationRecord(row.id, i, sds.AnnotationStatus.SKIPPED)
        for i, row in enumerate(dataset.record_metadata)
    ]
    sds.publish_annotations(dataset, "more", rows)
    after = pin_dataset(str(root), ["labels"]).pin
    assert after.catalog_revision != before.catalog_revision
    assert after.identity() == before.identity()
    reopened = reopen(before)
    assert reopened.pin == before
    assert reopened.dataset.annotations["labels"][3].values["label"] == 3


def test_a_reopened_dataset_keeps_its_readers_open_until_closed(root: Path) -> None:
    pinned = reopen(pin_dataset(str(root)).pin)
    assert pinned.dataset[7].metadata["index"] == 7
    store = pinned.dataset.shard_store
    assert isinstance(store, PooledShardStore)
    assert len(store._open) == 1
    pinned.close()
    assert not store._open


def test_a_reference_dataset_is_pinned_like_any_other(root: Path, tmp_path: Path) -> None:
    view = sds.open(str(root)).select([3, 1, 19])
    view.publish(str(tmp_path / "view"), dataset_id="view", snapshot_id="v1")
    pin = pin_dataset(str(tmp_path / "view"), ["labels"]).pin
    assert (pin.dataset_id, pin.record_count) == ("view", 3)
    assert pin.fingerprint == fingerprint_of(tmp_path / "view")
    assert [record.id for record in reopen(pin).dataset] == ["r0003", "r0001", "r0019"]


# --- what is not a dataset -----------------------------------------------------------------


@pytest.mark.parametrize(
    "uri", ["file:///data/x", "https://host/x", "ftp://me@host/x", "memory://"]
)
def test_other_schemes_are_refused(uri: str) -> None:
    with pytest.raises(SpecError, match=r"credentials|datasets are read from a local path, s3://"):
        pin_dataset(uri)


@pytest.mark.parametrize("uri", ["gs://", "s3://", "s3:///x"])
def test_a_service_without_a_bucket_is_refused_before_it_is_asked(uri: str) -> None:
    with pytest.raises(SpecError, match=f"^{uri} names no bucket or host; write it as in"):
        pin_dataset(uri)


@pytest.mark.parametrize("uri", ["", "  "])
def test_no_uri_at_all(uri: str) -> None:
    with pytest.raises(SpecError, match="URI is empty"):
        pin_dataset(uri)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"there is no dataset at .*does not exist"):
        pin_dataset(str(tmp_path / "none" / "set"))


def test_a_file_instead_of_a_folder(root: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"is a file; a dataset is a folder with a root"):
        pin_dataset(str(root / "root.json"))


def test_the_root_of_the_file_system() -> None:
    with pytest.raises(DatasetNotFoundError, match=r"/ (cannot hold|is not) a dataset"):
        pin_dataset("/")


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"no root\.json \(it is written last") as caught:
        pin_dataset(str(tmp_path))
    assert "did you mean" not in str(caught.value)


def test_a_folder_above_datasets_names_those_below(root: Path) -> None:
    shutil.copytree(root, root.parent / "also")
    with pytest.raises(DatasetNotFoundError) as caught:
        pin_dataset(str(root.parent))
    assert f"did you mean {root.parent / 'also'} or {root}?" in str(caught.value)


def test_the_layout_of_before_0_1(tmp_path: Path) -> None:
    (tmp_path / "sds.json").write_text("{}")
    with pytest.raises(DatasetFormatError, match=r"holds sds\.json, the split-based layout"):
        pin_dataset(str(tmp_path))


def test_a_dataset_for_a_newer_reader(root: Path) -> None:
    edit(root / "root.json", lambda value: value.update(min_reader_version="99.1.0"))
    with pytest.raises(DatasetFormatError, match=r"written for a newer reader: .*99\.1\.0"):
        pin_dataset(str(root))


def test_a_newer_layout(root: Path) -> None:
    edit(root / "root.json", lambda value: value.update(layout_version="7.3"))
    with pytest.raises(DatasetFormatError, match=r"newer reader: .*layout version '7\.3'"):
        pin_dataset(str(root))


def test_a_newer_layout_of_the_snapshot(root: Path) -> None:
    edit_snapshot(root, lambda value: value.update(layout_version="7.3"))
    with pytest.raises(DatasetFormatError, match=r"newer reader: .*layout version '7\.3'"):
        pin_dataset(str(root))


def test_the_root_document_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "root.json").write_text('{"name": "web-app"}')
    with pytest.raises(DatasetFormatError, match=r"has a root\.json, but not of a signal dataset"):
        pin_dataset(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"format": NaN}', "\xff"])
def test_a_root_document_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "root.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptDatasetError, match=r"JSON document .*root\.json"):
        pin_dataset(str(tmp_path))


# --- what is no longer whole ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("snapshots/*/snapshot.json", r"snapshot\.json"),
        ("manifests/*/*.json", r"manifests/\w+/s1-00000000\.json is missing"),
        ("annotations/catalogs/*.json", r"missing \(\w{64}\.json\)"),
        ("annotations/sets/*/*/root.json", r"incomplete: .* missing \(root\.json\)"),
    ],
)
def test_a_missing_control_document_is_damage_not_absence(
    root: Path, pattern: str, named: str
) -> None:
    for path in root.glob(pattern):
        path.unlink()
    with pytest.raises(CorruptDatasetError, match=named) as caught:
        pin_dataset(str(root))
    assert str(root) in str(caught.value)


def test_control_documents_that_contradict_each_other(root: Path) -> None:
    edit_snapshot(root, lambda value: value.update(record_count=21))
    with pytest.raises(CorruptDatasetError, match="snapshot range does not match its manifests"):
        pin_dataset(str(root))


def test_a_snapshot_of_another_size(root: Path) -> None:
    edit(next(root.glob("snapshots/*/snapshot.json")), lambda value: value)
    with pytest.raises(CorruptDatasetError, match="snapshot stored_bytes does not match"):
        pin_dataset(str(root))


def test_a_set_of_another_snapshot_is_named(root: Path) -> None:
    edit_annotation_root(root, "labels", lambda value: value.update(source_snapshot_id="s0"))
    with pytest.raises(CorruptDatasetError) as caught:
        pin_dataset(str(root))
    assert "annotation set 'labels' (of snapshot 's0') was made for another" in str(caught.value)
    assert "publish the annotations again" in str(caught.value)


def test_an_unknown_set_is_told_which_there_are(root: Path, vowels_root: Path) -> None:
    with pytest.raises(UnknownAnnotationError, match="no annotation set 'labls'; it has labels"):
        pin_dataset(str(root), ["labels", "labls"])
    shutil.rmtree(root / "annotations")
    with pytest.raises(UnknownAnnotationError, match="'a', 'b'; it has none"):
        pin_dataset(str(root), ["a", "b"])


def test_a_dataset_that_may_not_be_read(
    root: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    (root / "root.json").chmod(0)
    with unprivileged(), pytest.raises(InputError, match="no permission to read"):
        pin_dataset(str(root))


def test_permission_denied_is_told_as_such(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", "root.json")

    monkeypatch.setattr(pins.MemoObjectStore, "read", denied)
    with pytest.raises(InputError, match=r"no permission to read .*root"):
        pin_dataset(str(root))


def test_a_read_only_dataset_can_be_pinned_and_read(root: Path) -> None:
    paths = [root, *root.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        pinned = reopen(pin_dataset(str(root), ["labels"]).pin)
        assert pinned.dataset[19].metadata["index"] == 19
        assert pinned.dataset.annotations["labels"][19].values["label"] == 19
        assert sorted(paths) == sorted([root, *root.rglob("*")])
    finally:
        for path in paths:
            path.chmod(0o755)


# --- reopening -----------------------------------------------------------------------------


def test_a_dataset_replaced_at_its_path_is_a_mismatch_that_lists_every_difference(
    root: Path, write_dataset: WriteDataset
) -> None:
    pin = pin_dataset(str(root), ["labels"]).pin
    shutil.rmtree(root)
    write_dataset(root, 30, dataset_id="large", snapshot_id="s2")
    with pytest.raises(PinMismatchError) as caught:
        reopen(pin)
    for difference in (
        "dataset id: pinned small, found large",
        "snapshot: pinned s1, found s2",
        "records: pinned 20, found 30",
        f"fingerprint: pinned {pin.fingerprint}, found {fingerprint_of(root)}",
        "annotation set labels: pinned, but no longer in the catalog",
        "Run again without the pin",
    ):
        assert difference in str(caught.value)


def test_other_content_under_the_same_names_is_a_mismatch(
    root: Path, write_dataset: WriteDataset, make_record: Callable[..., sds.Record]
) -> None:
    pin = pin_dataset(str(root)).pin
    shutil.rmtree(root)
    field = sds.Field(np.random.default_rng(0).standard_normal(50_000), (sds.Axis("x", 50_000),))
    write_dataset(root, [make_record(i, fields={"samples": field}) for i in range(20)])
    with pytest.raises(PinMismatchError) as caught:
        reopen(pin)
    assert "fingerprint: pinned" in str(caught.value)
    for same in ("dataset id", "snapshot:", "records:"):
        assert same not in str(caught.value)


def test_a_set_published_anew_is_a_mismatch(root: Path) -> None:
    pin = pin_dataset(str(root), ["labels"]).pin
    republish(root, "labels", ROWS[::-1], publication_id="second")
    with pytest.raises(PinMismatchError) as caught:
        reopen(pin)
    message = str(caught.value)
    first = pin.annotations[0].publication_id
    assert f"annotation set labels: publication pinned {first}, found second" in message
    assert "annotation set labels: root document pinned" in message
    assert "fingerprint" not in message
    assert reopen(pin.model_copy(update={"annotations": ()})).pin.annotations == ()


@pytest.mark.parametrize(("rows", "per_shard"), [(ROWS, 7), (ROWS[::-1], 20)])
def test_other_shards_or_labels_under_the_same_publication_are_a_mismatch(
    root: Path, rows: list[Row], per_shard: int
) -> None:
    pin = pin_dataset(str(root), ["labels"]).pin
    first = pin.annotations[0].publication_id
    republish(root, "labels", rows, publication_id=first, records_per_shard=per_shard)
    with pytest.raises(PinMismatchError, match="labels: root document pinned") as caught:
        reopen(pin)
    assert "publication pinned" not in str(caught.value)


def test_a_dataset_that_is_gone_is_a_mismatch(root: Path) -> None:
    pin = pin_dataset(str(root)).pin
    shutil.rmtree(root)
    with pytest.raises(PinMismatchError, match="cannot be opened any more: there is no dataset"):
        reopen(pin)


# --- pin files and URIs --------------------------------------------------------------------


def test_a_pin_file_holds_the_pin(root: Path, tmp_path: Path) -> None:
    pin = pin_dataset(str(root), ["labels"]).pin
    path = tmp_path / "pin.json"
    write_pin(pin, str(path))
    assert read_pin(str(path)) == pin
    assert Pin.model_validate(json.loads(path.read_text())) == pin
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a readable pin file: .*No such file"),
        ("", "is not a readable pin file"),
        ("{", "is not a readable pin file"),
        ("\xff\xfe", "is not a readable pin file"),
        ("[]", "must hold one JSON object"),
        ("{}", "uri: Field required; dataset_id: Field required"),
        ('{"uri": 7}', "uri: Input should be a valid string"),
    ],
)
def test_a_file_that_is_no_pin(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "pin.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError, match=message):
        read_pin(str(path))


def test_a_pin_of_a_newer_release_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "pin.json"
    write_pin(pin_dataset(str(root)).pin, str(path))
    edit(path, lambda value: value.update(colour="red"))
    with pytest.raises(SpecError, match="colour: there is no such field"):
        read_pin(str(path))


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        ("s3://bucket/set", "s3://bucket/set"),
        ("gs://bucket/set///", "gs://bucket/set"),
        ("/data/set/", "/data/set"),
        ("/", "/"),
    ],
)
def test_absolute_uris(uri: str, absolute: str) -> None:
    assert absolute_uri(uri) == absolute


def test_a_relative_path_is_pinned_as_an_absolute_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    assert absolute_uri("set") == absolute_uri("./set/") == str(root)
    pin = pin_dataset("set").pin
    monkeypatch.chdir("/")
    assert len(reopen(pin).dataset) == 20
    monkeypatch.setenv("HOME", str(root.parent))
    assert absolute_uri("~/set") == str(root)
