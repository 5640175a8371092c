"""Sides of records: the documented formula, sides that stay put, and counts from a plain loop."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from signal_batch import splits
from signal_batch.columns import Column
from signal_batch.errors import MissingValueError, SpecError
from signal_batch.frozen import checked
from signal_batch.selection import Selection
from signal_batch.splits import Survey, side_of, survey
from signal_batch.training_spec import Split

Write = Callable[..., Path]
SIDES = ("train", "validation", "test")


def split(text: str) -> Split:
    return Split.model_validate(text)


def hashed_side(key: Any, test: float, validation: float, seed: int) -> str:
    """The documented formula, from the standard library alone."""
    text = json.dumps([seed, key], separators=(",", ":"), ensure_ascii=False)
    place = int.from_bytes(sha256(text.encode()).digest()[:8], "big") / 2**64
    if place < test:
        return "test"
    return "validation" if place < test + validation else "train"


def columns(*texts: str) -> list[Column]:
    return [Column.parse(text) for text in texts]


def surveyed(
    root: Path,
    text: str = "id",
    *,
    wanted: tuple[str, ...] = ("field:samples",),
    target: str | None = None,
    selection: Selection | None = None,
) -> Survey:
    dataset = sds.open(str(root))
    chosen = Selection.all_of(len(dataset)) if selection is None else selection
    return survey(dataset, chosen, split(text), columns(*wanted), target)


def ordinals(found: Survey) -> dict[str, list[int]]:
    return {side: found.sides[side].selection.ordinals().tolist() for side in SIDES}


# --- the formula ---------------------------------------------------------------------------------


@given(
    key=st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    test=st.floats(0, 0.6),
    validation=st.floats(0, 0.35),
)
def test_a_share_is_a_hash_of_seed_and_key(
    key: Any, seed: int, test: float, validation: float
) -> None:
    made = checked(
        Split, {"by": "metadata:k", "test": test, "validation": validation, "seed": seed}
    )
    assert side_of(made, key) == hashed_side(key, test, validation, seed)


@pytest.mark.parametrize(
    ("share", "side"), [("0.1753", "train"), ("0.1754", "test"), ("0.9", "test")]
)
def test_a_place_worked_out_by_hand(share: str, side: str) -> None:
    # printf '[0,"r0000"]' | sha256sum begins with 2ce47d04, and 0x2ce47d04 / 2**32 = 0.17536.
    assert side_of(split(f"id test={share}"), "r0000") == side


def test_shares_are_about_what_they_say() -> None:
    made = split("id test=0.2 validation=0.1")
    counts = Counter(side_of(made, f"record-{i}") for i in range(20_000))
    for side, share in {"test": 0.2, "validation": 0.1, "train": 0.7}.items():
        # Five standard deviations of a binomial distribution.
        assert abs(counts[side] / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_sides_of_different_seeds_are_independent() -> None:
    names = [f"record-{i}" for i in range(4000)]
    first, second = (
        np.array([side_of(split(f"id test=0.5 seed={seed}"), name) == "test" for name in names])
        for seed in (1, 2)
    )
    assert 0.45 < (first == second).mean() < 0.55


def test_a_larger_test_share_keeps_those_that_were_in_it() -> None:
    for i in range(500):
        if side_of(split("id test=0.2"), i) == "test":
            assert side_of(split("id test=0.3"), i) == "test"


@pytest.mark.parametrize(
    ("text", "key", "side"),
    [
        ("metadata:k test=[3]", 3, "test"),
        ("metadata:k test=[3]", 3.0, "test"),
        ("metadata:k test=[3.0]", 3, "test"),
        ("metadata:k test=[3]", "3", "train"),
        ('metadata:k test=["3"]', "3", "test"),
        ('metadata:k test=["3"]', 3, "train"),
        ("metadata:k test=[1]", True, "train"),
        ("metadata:k test=[true]", True, "test"),
        ("metadata:k test=[true]", 1, "train"),
        ("metadata:k test=[false]", 0, "train"),
        ("metadata:k test=[false]", False, "test"),
        ("metadata:k test=[0.5] validation=[0.25]", 0.25, "validation"),
        ("metadata:k test=test train=train", "test", "test"),
        ("metadata:k test=test train=train", "train", "train"),
        ("metadata:k test=test train=train", "other", None),
        ("metadata:k train=[]", "any", None),
        ("metadata:k test=[]", "any", "train"),
    ],
)
def test_by_value(text: str, key: Any, side: str | None) -> None:
    assert side_of(split(text), key) == side


# --- over a dataset ------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["id", "scene", "ordinal", "metadata:snr_db", "metadata:scene_name"])
def test_sides_of_a_dataset_follow_the_formula(
    by: str, tmp_path: Path, write_dataset: Write, make_record: Callable[..., sds.Record]
) -> None:
    records = [
        make_record(
            i,
            scene_id=f"scene-{i // 4}",
            metadata={"snr_db": i / 2, "scene_name": f"straße {i // 7}"},
        )
        for i in range(120)
    ]
    root = write_dataset(tmp_path / "ds", records, per_shard=50)
    dataset = sds.open(str(root))
    expected: dict[str, list[int]] = {side: [] for side in SIDES}
    for i in range(120):
        record = dataset[i]
        snr = record.metadata["snr_db"]
        key = {
            "id": record.id,
            "scene": record.scene_id,
            "ordinal": i,
            # 3.0 is 3: a dataset may well hold both.
            "metadata:snr_db": int(snr) if snr == int(snr) else snr,
            "metadata:scene_name": record.metadata["scene_name"],
        }[by]
        expected[hashed_side(key, 0.3, 0.2, 9)].append(i)
    assert ordinals(surveyed(root, f"{by} test=0.3 validation=0.2 seed=9")) == expected


@pytest.mark.parametrize("by", ["id", "scene"])
def test_adding_records_never_moves_one(
    by: str, tmp_path: Path, write_dataset: Write, make_record: Callable[..., sds.Record]
) -> None:
    records = [make_record(i, scene_id=f"scene-{i % 13}") for i in range(90)]
    few = write_dataset(tmp_path / "few", records[:40], per_shard=10)
    many = write_dataset(tmp_path / "many", records, per_shard=25, dataset_id="other")
    text = f"{by} test=0.3 validation=0.2 seed=3"
    before, after = ordinals(surveyed(few, text)), ordinals(surveyed(many, text))
    for side in SIDES:
        assert before[side] == [ordinal for ordinal in after[side] if ordinal < 40]
        assert before[side]


@pytest.fixture(scope="module")
def scenes_root(
    tmp_path_factory: pytest.TempPathFactory,
    write_dataset: Write,
    make_record: Callable[..., sds.Record],
) -> Path:
    """60 records of 17 scenes, classes by text, some of unequal lengths."""

    def field(i: int) -> dict[str, sds.Field]:
        data = np.zeros((2, 3 + i % 5), np.float32)
        axes = (sds.Axis("channel", 2), sds.Axis("time", data.shape[-1]))
        still = sds.Field(np.zeros(4, np.int16), (sds.Axis("time", 4),))
        return {"samples": sds.Field(data, axes), "still": still}

    records = [
        make_record(
            i,
            scene_id=f"scene-{i % 17}",
            fields=field(i),
            metadata={"kind": "abc"[i % 3], "night": i % 2 == 0, "fold": i % 4, "snr": i / 8},
        )
        for i in range(60)
    ]
    root = tmp_path_factory.mktemp("splits") / "ds"
    return write_dataset(
        root,
        records,
        per_shard=20,
        annotations={"a": [("success", {"y": i % 5}) for i in range(60)]},
    )


@given(seed=st.integers(0, 2**32 - 1), test=st.floats(0.05, 0.5), validation=st.floats(0.05, 0.4))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_scene_is_on_two_sides(
    seed: int, test: float, validation: float, scenes_root: Path
) -> None:
    text = f"scene test={test!r} validation={validation!r} seed={seed}"
    if {hashed_side(f"scene-{i}", test, validation, seed) for i in range(17)} < set(SIDES):
        # A side that no scene falls on is refused, whichever it is.
        with pytest.raises(SpecError, match="no record"):
            surveyed(scenes_root, text)
        return
    found = surveyed(scenes_root, text)
    scenes = {side: {o % 17 for o in chosen} for side, chosen in ordinals(found).items()}
    assert sum(map(len, scenes.values())) == 17
    assert found.shared_scenes == 0
    assert {side: found.sides[side].scenes for side in SIDES} == {
        side: len(members) for side, members in scenes.items()
    }


@pytest.mark.parametrize(
    ("text", "target", "key", "side_by_key"),
    [
        (
            'metadata:kind test=a validation=["b"]',
            "kind",
            "kind",
            {"a": "test", "b": "validation", "c": "train"},
        ),
        ("metadata:kind test=a train=c", "kind", "kind", {"a": "test", "c": "train"}),
        ("metadata:night test=[true]", "night", "night", {True: "test", False: "train"}),
        (
            "metadata:fold test=[3] validation=[0]",
            "y",
            "fold",
            {3: "test", 0: "validation", 1: "train", 2: "train"},
        ),
        ("metadata:fold test=[3] train=[1, 2.0]", "y", "fold", {3: "test", 1: "train", 2: "train"}),
        ("metadata:snr test=[1.0, 0.125]", "y", "snr", {1.0: "test", 0.125: "test", ...: "train"}),
    ],
)
def test_counts_and_scenes_are_those_of_a_plain_loop(
    scenes_root: Path, text: str, target: str, key: str, side_by_key: dict[Any, str]
) -> None:
    dataset = sds.open(str(scenes_root))
    rows = dataset.annotations["a"]
    chosen: dict[str, list[int]] = {side: [] for side in SIDES}
    counts: dict[str, Counter[Any]] = {side: Counter() for side in SIDES}
    scenes: dict[str, set[str]] = {side: set() for side in SIDES}
    unused = 0
    for i in range(len(dataset)):
        record = dataset[i]
        side = side_by_key.get(record.metadata[key], side_by_key.get(...))
        if side is None:
            unused += 1
            continue
        chosen[side].append(i)
        values = dict(record.metadata) | dict(rows[i].values)
        counts[side][values[target]] += 1
        scenes[side].add(record.scene_id)
    texts = ("field:samples", "metadata:kind", "metadata:night", "annotation:a/y")
    found = surveyed(scenes_root, text, wanted=texts, target=target)
    assert ordinals(found) == chosen
    assert found.unused == unused
    assert {side: dict(found.sides[side].counts) for side in SIDES} == {
        side: dict(counts[side]) for side in SIDES
    }
    assert {side: found.sides[side].scenes for side in SIDES} == {
        side: len(scenes[side]) for side in SIDES
    }
    appearances = Counter(scene for side in SIDES for scene in scenes[side])
    assert found.shared_scenes == sum(count > 1 for count in appearances.values())
    assert found.classes == tuple(sorted({label for side in SIDES for label in counts[side]}))
    document = json.loads(json.dumps(found.to_json()))
    assert (document["unused"], document["shared_scenes"]) == (unused, found.shared_scenes)
    for side in SIDES:
        assert document["sides"][side] == {
            "records": len(chosen[side]),
            "scenes": len(scenes[side]),
            "classes": {str(label): counts[side][label] for label in sorted(counts[side])},
        }


def test_a_selection_is_what_is_split(scenes_root: Path) -> None:
    chosen = [1, 2, 3, 20, 33, 34, 59]
    found = surveyed(
        scenes_root,
        "metadata:night test=[true]",
        wanted=("field:samples",),
        selection=Selection.of(chosen),
    )
    assert ordinals(found) == {"train": [1, 3, 33, 59], "validation": [], "test": [2, 20, 34]}
    assert found.lengths["samples"].tolist() == [3 + o % 5 for o in chosen]
    assert found.lengths_of("samples", "test").tolist() == [3 + o % 5 for o in (2, 20, 34)]
    assert found.lengths_of("samples", "validation").tolist() == []


def test_lengths_are_read_without_samples(
    scenes_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, ...]] = []

    class Reader(splits.RecordReader):
        def __init__(self, dataset: Any, columns: Any, **options: Any) -> None:
            read.append(tuple(str(column.selector) for column in columns))
            super().__init__(dataset, columns, **options)

    monkeypatch.setattr(splits, "RecordReader", Reader)
    found = surveyed(
        scenes_root, wanted=("field:samples", "field:still", "metadata:kind"), target="kind"
    )
    assert read == [("id", "metadata:kind")]
    assert found.lengths["samples"].tolist() == [3 + i % 5 for i in range(60)]
    assert found.lengths["still"].tolist() == [4] * 60
    assert set(found.lengths) == {"samples", "still"}
    assert found.lengths["samples"].dtype == np.int32


def test_blocks_make_no_difference(scenes_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, options = "scene test=0.3 seed=1", {"wanted": ("field:samples", "metadata:kind")}
    whole = surveyed(scenes_root, text, **options, target="kind")  # type: ignore[arg-type]
    monkeypatch.setattr(splits, "_BLOCK", 7)
    parts = surveyed(scenes_root, text, **options, target="kind")  # type: ignore[arg-type]
    assert ordinals(parts) == ordinals(whole)
    assert parts.to_json() == whole.to_json()
    np.testing.assert_array_equal(parts.lengths["samples"], whole.lengths["samples"])


def test_true_is_not_one_in_another_block(
    tmp_path: Path,
    write_dataset: Write,
    make_record: Callable[..., sds.Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key is told apart by its type wherever its record lies."""
    keys = [1, 1, 0, True, True, False]
    records = [make_record(i, metadata={"k": key}) for i, key in enumerate(keys)]
    root = write_dataset(tmp_path / "ds", records, per_shard=6)
    monkeypatch.setattr(splits, "_BLOCK", 3)
    found = surveyed(root, "metadata:k test=[true] validation=[0]")
    assert ordinals(found) == {"train": [0, 1, 5], "validation": [2], "test": [3, 4]}


def test_the_target_counts_only_where_it_is_a_class(scenes_root: Path) -> None:
    found = surveyed(scenes_root, wanted=("field:samples", "metadata:snr"), target="snr")
    assert found.classes == ()
    assert all(found.sides[side].counts == {} for side in SIDES)
    assert surveyed(scenes_root).classes == ()
    tensor = surveyed(scenes_root, wanted=("field:samples", "field:still"), target="still")
    assert tensor.classes == ()


def test_without_a_split_every_record_is_for_training(scenes_root: Path) -> None:
    for text in ("id", "scene", "metadata:fold"):
        found = surveyed(scenes_root, text)
        assert ordinals(found)["train"] == list(range(60))
        assert found.unused == found.shared_scenes == 0


def test_sides_depend_on_nothing_but_the_split(
    tmp_path: Path, write_dataset: Write, make_record: Callable[..., sds.Record]
) -> None:
    """Neither samples, shards, other columns nor the target move a record."""
    plain = [make_record(i, scene_id=f"s{i // 3}") for i in range(40)]
    other = [
        make_record(i, scene_id=f"s{i // 3}", metadata={"kind": i % 2, "snr_db": -1.0})
        for i in range(40)
    ]
    one = write_dataset(tmp_path / "one", plain, per_shard=40)
    two = write_dataset(tmp_path / "two", other, per_shard=3, dataset_id="b", snapshot_id="t")
    text = "scene test=0.4 seed=5"
    digests = [
        {side: found.sides[side].selection.digest() for side in SIDES}
        for found in (
            surveyed(one, text),
            surveyed(one, text, wanted=("metadata:index", "field:samples"), target="index"),
            surveyed(two, text, wanted=("metadata:kind",), target="kind"),
        )
    ]
    assert digests[0] == digests[1] == digests[2]
    assert digests[0] != {
        side: found.selection.digest()
        for side, found in surveyed(one, "scene test=0.4 seed=6").sides.items()
    }


# --- errors --------------------------------------------------------------------------------------


def test_a_record_without_a_scene_cannot_be_placed(
    tmp_path: Path, write_dataset: Write, make_record: Callable[..., sds.Record]
) -> None:
    records = [make_record(i, scene_id=None if i == 7 else f"s{i}") for i in range(20)]
    root = write_dataset(tmp_path / "ds", records)
    with pytest.raises(SpecError, match="record 7 belongs to no scene, so a split by scene"):
        surveyed(root, "scene test=0.5")
    found = surveyed(root, "scene")
    assert found.sides["train"].scenes == 19
    assert surveyed(root, "id test=0.5").sides["test"].scenes > 0


def test_sides_that_would_be_empty(scenes_root: Path) -> None:
    for text, message in {
        "metadata:kind test=z": r"split 'metadata:kind test=\[\"z\"\]' puts no record on the test",
        "metadata:kind test=a validation=z": "puts no record on the validation side",
        "metadata:kind train=z": r"split 'metadata:kind train=\[\"z\"\]' leaves no record to train",
        'metadata:kind test=["a","b","c"]': "leaves no record to train on",
        "id test=1e-9": "puts no record on the test side",
        "id test=0.9999999": "leaves no record to train on",
    }.items():
        with pytest.raises(SpecError, match=message):
            surveyed(scenes_root, text)


def test_a_key_that_a_record_lacks(
    tmp_path: Path, write_dataset: Write, make_record: Callable[..., sds.Record]
) -> None:
    records = [make_record(i, metadata={} if i == 3 else {"fold": i % 2}) for i in range(8)]
    root = write_dataset(tmp_path / "ds", records)
    with pytest.raises(MissingValueError, match=r"fold") as caught:
        surveyed(root, "metadata:fold test=[1]")
    assert "3" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_target_that_a_record_lacks(
    tmp_path: Path, write_dataset: Write, make_record: Callable[..., sds.Record]
) -> None:
    records = [make_record(i, metadata={} if i == 5 else {"kind": "a"}) for i in range(8)]
    root = write_dataset(tmp_path / "ds", records)
    with pytest.raises(MissingValueError, match=r"kind") as caught:
        surveyed(root, wanted=("field:samples", "metadata:kind"), target="kind")
    assert "5" in str(caught.value)
    filled = surveyed(root, wanted=('metadata:kind:str?"none"',), target="kind")
    assert filled.sides["train"].counts == {"a": 7, "none": 1}
