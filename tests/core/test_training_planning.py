"""Planning a training run: lengths, inputs, classes, steps, the run key, and nothing written."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch.errors import FeatureError, InputError, MissingValueError, SpecError
from signal_batch.frozen import checked, digest
from signal_batch.lengths import Lengths
from signal_batch.pins import pin_dataset, write_pin
from signal_batch.preparation import preparation_of
from signal_batch.selection import Selection
from signal_batch.source import BatchFetcher
from signal_batch.trainers.sklearn import SklearnTrainer
from signal_batch.training import ArraySpec
from signal_batch.training_job import TrainJob, TrainPlan
from signal_batch.training_planning import check_trainer, prepare_training
from signal_batch.training_spec import TrainExecution, TrainSpec

Write = Callable[..., Path]
MakeRecord = Callable[..., sds.Record]

#: 30 records of 20 to 49 samples, two channels; fold i % 3, kind by name, mask as long as half.
LENGTHS = [20 + i for i in range(30)]


@pytest.fixture(scope="module")
def ragged_root(
    tmp_path_factory: pytest.TempPathFactory, write_dataset: Write, make_record: MakeRecord
) -> Path:
    return write_dataset(
        tmp_path_factory.mktemp("planning") / "ragged",
        [_record(make_record, i, LENGTHS[i]) for i in range(30)],
        per_shard=10,
        annotations={"a": [("success", {"y": i % 4, "w": i / 4}) for i in range(30)]},
    )


@pytest.fixture(scope="module")
def even_root(
    tmp_path_factory: pytest.TempPathFactory, write_dataset: Write, make_record: MakeRecord
) -> Path:
    """The same, but all of 64 samples."""
    return write_dataset(
        tmp_path_factory.mktemp("planning") / "even",
        [_record(make_record, i, 64) for i in range(30)],
        per_shard=10,
    )


def _record(make_record: MakeRecord, index: int, length: int) -> sds.Record:
    data = np.random.default_rng(index).normal(size=(2, length)).astype(np.float32)
    axes = (sds.Axis("channel", 2), sds.Axis("time", length))
    still = sds.Field(np.full(3, index, np.int16), (sds.Axis("k", 3),))
    return make_record(
        index,
        scene_id=f"scene-{index // 2}",
        fields={"samples": sds.Field(data, axes), "still": still},
        metadata={
            "kind": "cab"[index % 3],
            "fold": index % 3,
            "night": index % 2 == 0,
            "snr": index / 8,
        },
    )


def spec(root: Path, **changes: Any) -> TrainSpec:
    """By default the model sees `samples` and learns `kind`."""
    fields: dict[str, Any] = {
        "dataset": str(root),
        "output": str(root.parent / "never-written"),
        "columns": ["field:samples", "metadata:kind"],
        "target": "kind",
        "trainer": "sklearn",
        "batch_size": 4,
    }
    return checked(TrainSpec, fields | changes)


def planned(root: Path, **changes: Any) -> TrainJob:
    return prepare_training(spec(root, **changes))


def module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of one's own on the path, forgotten again after the test."""
    name = f"own_{folder.name}".replace("-", "_").replace("[", "_").replace("]", "_")
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


# --- lengths -------------------------------------------------------------------------------------


def test_records_of_different_lengths_ask_for_a_decision(ragged_root: Path) -> None:
    with pytest.raises(SpecError) as caught:
        planned(ragged_root)
    message = str(caught.value)
    assert "column 'samples' has records of 20 to 49 samples" in message
    for word in ("pad (", "crop (", "bucket (", "lengths:", "mask", "statistics"):
        assert word in message


def test_the_decision_is_asked_for_whichever_records_the_probe_saw(
    tmp_path: Path, write_dataset: Write, make_record: MakeRecord
) -> None:
    """One record of 200 that is longer, and not among those read at planning."""
    records = [_record(make_record, i, 17 if i == 11 else 16) for i in range(200)]
    root = write_dataset(tmp_path / "ds", records, per_shard=200)
    with pytest.raises(SpecError, match="has records of 16 to 17 samples"):
        planned(root)
    assert planned(root, lengths="pad").plan.lengths.length == 17
    assert planned(root, lengths="crop").plan.lengths.length == 16


def test_equal_lengths_need_no_decision(even_root: Path) -> None:
    for lengths in ("equal", "pad", "crop", "bucket"):
        plan = planned(even_root, lengths=lengths).plan
        assert plan.lengths == Lengths()
        assert plan.arrays["samples"] == ArraySpec((2, 64), "float32")
        assert "samples_mask" not in plan.arrays


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lengths": "pad"}, Lengths("pad", ("samples",), 49, masked=True)),
        ({"lengths": "pad", "length": 64}, Lengths("pad", ("samples",), 64, masked=True)),
        ({"lengths": "pad", "length": 49}, Lengths("pad", ("samples",), 49, masked=True)),
        ({"lengths": "crop"}, Lengths("crop", ("samples",), 20, masked=False)),
        ({"lengths": "crop", "length": 10}, Lengths("crop", ("samples",), 10, masked=False)),
        ({"lengths": "crop", "length": 21}, Lengths("crop", ("samples",), 21, masked=True)),
        (
            {"lengths": "bucket", "buckets": [30, 60]},
            Lengths("bucket", ("samples",), buckets=(30, 60), masked=True),
        ),
    ],
)
def test_plans_for_different_lengths(
    ragged_root: Path, changes: dict[str, Any], expected: Lengths
) -> None:
    plan = planned(ragged_root, **changes).plan
    assert plan.lengths == expected
    last = None if expected.policy == "bucket" else expected.length
    assert plan.arrays["samples"] == ArraySpec((2, last), "float32")
    if expected.masked:
        assert plan.arrays["samples_mask"] == ArraySpec((last,), "bool")
    else:
        assert "samples_mask" not in plan.arrays
    assert plan.inputs == ("samples",)


def test_buckets_by_default_are_of_equal_counts(ragged_root: Path) -> None:
    plan = planned(ragged_root, lengths="bucket").plan
    # 30 lengths, each once: the 8th, 15th, 23rd and last of them.
    assert plan.lengths.buckets == (27, 34, 42, 49)


def test_buckets_follow_the_training_side_and_hold_all(ragged_root: Path) -> None:
    """Only what is trained on is divided, but the longest of the test side fits too."""
    split = "metadata:fold test=[2]"  # 22, 25, ... 49: the longest is for testing
    plan = planned(ragged_root, lengths="bucket", split=split).plan
    trained = sorted(length for i, length in enumerate(LENGTHS) if i % 3 != 2)
    assert len(trained) == 20
    assert plan.lengths.buckets == (trained[4], trained[9], trained[14], 49)


def test_columns_of_one_length_are_left_alone(ragged_root: Path) -> None:
    columns = ["field:samples", "field:still", "metadata:kind"]
    plan = planned(ragged_root, columns=columns, lengths="pad").plan
    assert plan.lengths.columns == ("samples",)
    assert plan.arrays["still"] == ArraySpec((3,), "int16")
    assert plan.inputs == ("samples", "still")


def test_equal_records_can_be_cropped_or_padded_on_purpose(even_root: Path) -> None:
    crop = planned(even_root, lengths="crop", length=10).plan
    assert crop.lengths == Lengths("crop", ("samples",), 10, masked=False)
    assert crop.arrays["samples"].shape == (2, 10)
    pad = planned(even_root, lengths="pad", length=100).plan
    assert pad.lengths == Lengths("pad", ("samples",), 100, masked=True)


def test_a_length_too_short_to_pad_to(ragged_root: Path) -> None:
    with pytest.raises(SpecError, match="longest record has 49 samples, more than length=48"):
        planned(ragged_root, lengths="pad", length=48)
    with pytest.raises(SpecError, match="49 samples, more than the last bucket's 40"):
        planned(ragged_root, lengths="bucket", buckets=[30, 40])


def test_features_of_one_shape_need_no_decision(ragged_root: Path) -> None:
    plan = planned(ragged_root, transforms=["statistics"]).plan
    assert plan.lengths == Lengths()
    assert plan.inputs
    assert all(None not in plan.arrays[name].shape for name in plan.inputs)


def test_the_name_of_a_mask_is_taken(ragged_root: Path) -> None:
    columns = ["field:samples", "samples_mask=metadata:night", "metadata:kind"]
    with pytest.raises(SpecError, match="column 'samples_mask' has the name of the mask"):
        planned(ragged_root, columns=columns, lengths="pad")
    assert planned(ragged_root, columns=columns, lengths="crop").plan.inputs == ("samples",)


# --- transforms that change lengths --------------------------------------------------------------


def test_a_crop_in_training_alone_is_noticed_at_planning(even_root: Path) -> None:
    """The model would learn from 32 samples and be judged by 64."""
    crop = "random_crop length=32"
    with pytest.raises(SpecError) as caught:
        planned(even_root, transforms=[crop])
    assert "'samples' has records of 32 to 64 samples where the model gets them" in str(
        caught.value
    )
    assert "crop (" in str(caught.value)
    plan = planned(even_root, transforms=[crop], lengths="crop", length=32).plan
    assert plan.lengths == Lengths("crop", ("samples",), 32, masked=True)
    assert plan.arrays["samples"].shape == (2, 32)


@pytest.mark.parametrize("lengths", ["pad", "crop"])
def test_lengths_that_metadata_cannot_tell_have_to_be_given(
    ragged_root: Path, lengths: str
) -> None:
    with pytest.raises(SpecError, match=r"does not tell how long samples will be.* with length"):
        planned(ragged_root, transforms=["random_crop length=16"], lengths=lengths)
    plan = planned(
        ragged_root, transforms=["random_crop length=16"], lengths=lengths, length=60
    ).plan
    assert plan.lengths == Lengths(lengths, ("samples",), 60, masked=True)


def test_lengths_that_metadata_cannot_tell_make_no_buckets(ragged_root: Path) -> None:
    with pytest.raises(SpecError, match="cannot be put into buckets by it; use lengths=pad or"):
        planned(ragged_root, transforms=["random_crop length=16"], lengths="bucket")


def test_a_crop_that_brings_all_to_one_length(
    ragged_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(
        tmp_path,
        "def first(record, rng, *, n):\n"
        "    return {**record, 'samples': record['samples'][..., :n]}\n",
        monkeypatch,
    )
    plan = planned(ragged_root, transforms=[f"{name}:first n=8"]).plan
    assert plan.lengths == Lengths()
    assert plan.arrays["samples"] == ArraySpec((2, 8), "float32")
    with pytest.raises(SpecError, match="has records of 20 to 30 samples"):
        planned(ragged_root, transforms=[f"{name}:first n=30"])


_TRAINING_ONLY = """
from signal_batch.augmentations import transform

@transform(training_only=True)
def wide(record, rng):
    return {**record, "samples": record["samples"].astype("float64")}

@transform(training_only=True)
def one_channel(record, rng):
    return {**record, "samples": record["samples"][:1]}

@transform(training_only=True)
def flat(record, rng):
    return {**record, "samples": record["samples"].ravel()}

@transform(training_only=True)
def renamed(record, rng):
    rest = {name: value for name, value in record.items() if name != "samples"}
    return {**rest, "x": record["samples"]}

@transform(training_only=True)
def extra(record, rng):
    return {**record, "extra": record["samples"] ** 2}
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wide", "is float64 x 2 x 64 in training and float32 x 2 x 64 where the model is eval"),
        ("one_channel", "is float32 x 1 x 64 in training and float32 x 2 x 64"),
        ("renamed", "column 'samples' is there where the model is evaluated, but not in training"),
    ],
)
def test_what_training_alone_changes_is_noticed_at_planning(
    even_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, words: str
) -> None:
    name = module(tmp_path, _TRAINING_ONLY, monkeypatch)
    with pytest.raises(SpecError) as caught:
        planned(even_root, transforms=[f"{name}:{function}"])
    assert words in str(caught.value)


def test_other_changes_of_training_alone(
    even_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(tmp_path, _TRAINING_ONLY, monkeypatch)
    with pytest.raises(SpecError, match="has records of 64 to 128 samples"):
        planned(even_root, transforms=[f"{name}:flat"])
    # A column that only training has is nobody's business, until the model is to see it.
    assert planned(even_root, transforms=[f"{name}:extra"]).plan.inputs == ("samples",)
    with pytest.raises(SpecError, match="input 'extra' is no column after the transforms"):
        planned(even_root, transforms=[f"{name}:extra"], inputs=["extra"])


def test_batches_in_training_and_evaluation_are_what_was_planned(ragged_root: Path) -> None:
    """A plan is a promise to the trainer: hold real batches to it."""
    job = planned(
        ragged_root,
        columns=["field:samples", "field:still", "metadata:kind", "metadata:snr:float32"],
        transforms=["random_crop length=24", "add_noise snr_db=10"],
        lengths="crop",
        length=24,
        split="scene test=0.3",
    )
    ready = preparation_of(job.spec, job.plan, None)
    fetch = BatchFetcher(job.pin, job.plan.columns)
    for first in range(0, 30, 10):
        batch = fetch(np.arange(first, first + 10))
        position = np.arange(10)
        for found in (ready.training({**batch, "position": position}), ready.evaluation(batch)):
            for name, array in job.plan.arrays.items():
                values = found[name]
                kind = "str" if values.dtype == object else values.dtype.name
                assert (values.shape[1:], kind) == (array.shape, array.dtype), name
    fetch.close()


# --- inputs, columns, classes --------------------------------------------------------------------


def test_inputs_are_the_tensors_unless_it_is_said_otherwise(even_root: Path) -> None:
    columns = ["field:samples", "field:still", "metadata:kind", "metadata:snr:float32"]
    assert planned(even_root, columns=columns).plan.inputs == ("samples", "still")
    assert planned(even_root, columns=columns, inputs=["still"]).plan.inputs == ("still",)
    assert planned(even_root, columns=columns, inputs=["snr"]).plan.inputs == ("snr",)
    without = ["metadata:kind", "metadata:snr:float32"]
    assert planned(even_root, columns=without, inputs="snr").plan.inputs == ("snr",)
    with pytest.raises(SpecError, match="the model has nothing to look at: name a tensor"):
        planned(even_root, columns=without)
    with pytest.raises(SpecError, match="'smaples' is no column after the transforms; there are s"):
        planned(even_root, columns=columns, inputs=["smaples"])
    with pytest.raises(SpecError, match="input 'samples' is no column after the transforms"):
        planned(
            even_root, columns=columns, inputs=["samples"], transforms=["statistics column=still"]
        )


def test_a_tensor_to_learn_is_not_looked_at(even_root: Path) -> None:
    plan = planned(even_root, columns=["field:samples", "field:still"], target="still").plan
    assert (plan.inputs, plan.classes) == (("samples",), ())
    assert plan.arrays["still"] == ArraySpec((3,), "int16")


def test_columns_get_the_dtype_that_the_probe_showed(even_root: Path) -> None:
    columns = ["field:samples", "metadata:kind", "metadata:fold", "metadata:snr", "metadata:night"]
    plan = planned(even_root, columns=columns).plan
    assert [str(column) for column in plan.columns] == [
        "samples=field:samples",
        "kind=metadata:kind:str",
        "fold=metadata:fold:int64",
        "snr=metadata:snr:float64",
        "night=metadata:night:bool",
    ]
    # The target comes as an index into the classes.
    assert plan.arrays == {
        "samples": ArraySpec((2, 64), "float32"),
        "kind": ArraySpec((), "int32"),
        "fold": ArraySpec((), "int64"),
        "snr": ArraySpec((), "float64"),
        "night": ArraySpec((), "bool"),
    }


@pytest.mark.parametrize(
    ("column", "classes"),
    [
        ("metadata:kind", ("a", "b", "c")),
        ("metadata:fold", (0, 1, 2)),
        ("metadata:fold:int8", (0, 1, 2)),
        ("metadata:night", (False, True)),
        ("annotation:a/y", (0, 1, 2, 3)),
        ("metadata:snr", ()),
        ("annotation:a/w:float32", ()),
    ],
)
def test_classes_are_sorted_plain_values(
    ragged_root: Path, column: str, classes: tuple[Any, ...]
) -> None:
    columns = ["field:samples", f"label={column}"]
    plan = planned(ragged_root, columns=columns, target="label", lengths="pad").plan
    assert plan.classes == classes
    assert [type(label) for label in plan.classes] == [type(label) for label in classes]


def test_classes_of_all_sides_are_known_and_those_never_trained_are_told(even_root: Path) -> None:
    plan = planned(even_root, split="metadata:kind test=b").plan
    assert plan.classes == ("a", "b", "c")
    assert "there is no record of b to train on" in plan.warnings


def test_warnings(even_root: Path) -> None:
    assert planned(even_root, split="scene test=0.3").plan.warnings == ()
    shared = planned(even_root, split="metadata:night test=[true]").plan.warnings
    # Both records of each of the 15 scenes lie on different sides.
    assert [warning.split(" ", 1)[0] for warning in shared] == ["15"]
    assert "split by scene" in shared[0]
    unused = planned(even_root, split="metadata:fold test=[1] train=[0]").plan.warnings
    assert "10 selected records are on no side of the split" in unused


def test_the_split_is_told_with_its_counts(even_root: Path) -> None:
    job = planned(even_root, split="metadata:fold test=[1] validation=[2]")
    assert job.plan.split["by"] == "metadata:fold test=[1] validation=[2]"
    assert job.plan.split["sides"]["test"] == {"records": 10, "scenes": 10, "classes": {"a": 10}}
    assert job.sides["train"] == Selection.of(range(0, 30, 3))
    assert job.sides["test"] == Selection.of(range(1, 30, 3))
    assert job.sides["validation"] == Selection.of(range(2, 30, 3))
    assert job.monitored == "validation"
    assert planned(even_root, split="metadata:fold test=[1]").monitored == "test"
    assert planned(even_root).monitored is None


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "total", "every"),
    [
        ({}, 75, 7),  # 10 epochs of 30 records, 4 a step
        ({"epochs": 3}, 22, 7),
        ({"steps": 5}, 5, 7),
        ({"epochs": 1, "batch_size": 30}, 1, 1),
        ({"epochs": 3, "batch_size": 45}, 2, 1),
        ({"steps": 9, "evaluate_steps": 2}, 9, 2),
        ({"split": "metadata:fold test=[1]", "epochs": 2}, 10, 5),
    ],
)
def test_steps(even_root: Path, changes: dict[str, Any], total: int, every: int) -> None:
    plan = planned(even_root, **changes).plan
    assert (plan.total_steps, plan.evaluate_steps) == (total, every)


def test_fewer_records_than_a_step_takes(even_root: Path) -> None:
    with pytest.raises(SpecError, match="a global step takes 64 records, but all epochs have 60"):
        planned(even_root, batch_size=64, epochs=2)


def test_what_the_trainer_is_told(even_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SklearnTrainer, "distributed", True)
    job = planned(even_root, batch_size=8, seed=5, execution={"ranks": 2})
    found = job.batch_spec(rank=1, coordinator="127.0.0.1:9")
    assert (found.batch_size, found.total_steps, found.seed) == (4, 37, 5)
    assert (found.rank, found.world, found.coordinator) == (1, 2, "127.0.0.1:9")
    assert (found.target, found.classes, found.inputs) == ("kind", ("a", "b", "c"), ("samples",))
    assert found.arrays == job.plan.arrays


def test_a_plan_survives_json(ragged_root: Path) -> None:
    for changes in ({"lengths": "pad"}, {"lengths": "bucket", "split": "scene test=0.3"}):
        plan = planned(ragged_root, **changes).plan
        assert TrainPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


# --- the run key ---------------------------------------------------------------------------------

#: Another value for every field of a spec, as a plan of `even_root` can take it.
OTHER_KEY: dict[str, dict[str, Any]] = {
    "columns": {"columns": ["field:samples", "metadata:kind", "metadata:snr"]},
    "where": {"where": ["ordinal < 20"]},
    "target": {"target": None},
    "split": {"split": "scene test=0.3"},
    "transforms": {"transforms": ["unit_power"]},
    "inputs": {"inputs": ["samples"]},
    "lengths": {"lengths": "pad"},
    "length": {"lengths": "pad", "length": 70},
    "buckets": {"lengths": "bucket", "buckets": [64]},
    "batch_size": {"batch_size": 5},
    "epochs": {"epochs": 2},
    "steps": {"steps": 3},
    "seed": {"seed": 1},
    "shuffle": {"shuffle": "none"},
    "trainer": {"trainer": "{own}:Other"},
    "trainer_args": {"trainer_args": {"estimator": "GaussianNB"}},
    "evaluate_steps": {"evaluate_steps": 3},
    "log_steps": {"log_steps": 3},
    "by": {"by": ["kind"]},
}
SAME_KEY: dict[str, dict[str, Any]] = {
    "dataset": {"dataset": "{copy}"},
    "output": {"output": "{elsewhere}"},
    "pin": {"pin": "{pin}"},
    "mlflow": {"mlflow": "http://localhost:5000"},
    "checkpoint_steps": {"checkpoint_steps": 3},
    "checkpoint_s": {"checkpoint_s": 3.0},
    "keep_checkpoints": {"keep_checkpoints": 7},
    "execution": {"execution": {"threads": 5}},
}
_TRAINER = """
class Other:
    def init(self, batch_spec, options): ...
    def step(self, batch): ...
    def evaluate(self, batches): ...
    def state(self): ...
    def load(self, state): ...
"""


@pytest.fixture
def places(even_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    shutil.copytree(even_root, tmp_path / "copy")
    write_pin(pin_dataset(str(even_root)).pin, str(tmp_path / "pin.json"))
    return {
        "copy": str(tmp_path / "copy"),
        "pin": str(tmp_path / "pin.json"),
        "elsewhere": str(tmp_path / "elsewhere"),
        "own": module(tmp_path, _TRAINER, monkeypatch),
    }


def filled(changes: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    return {k: v.format_map(places) if isinstance(v, str) else v for k, v in changes.items()}


def test_every_field_has_a_place_in_or_out_of_the_run_key() -> None:
    assert set(OTHER_KEY) | set(SAME_KEY) == set(TrainSpec.model_fields)
    assert not set(OTHER_KEY) & set(SAME_KEY)


@pytest.mark.parametrize("name", OTHER_KEY)
def test_what_can_change_the_model_changes_the_run_key(
    even_root: Path, places: dict[str, str], name: str
) -> None:
    plain, changed = planned(even_root), planned(even_root, **filled(OTHER_KEY[name], places))
    assert changed.run_key != plain.run_key
    assert changed.run_key == digest(changed.identity)


@pytest.mark.parametrize("name", SAME_KEY)
def test_where_and_how_a_run_is_carried_out_does_not(
    even_root: Path, places: dict[str, str], name: str
) -> None:
    changed = planned(even_root, **filled(SAME_KEY[name], places))
    assert changed.spec != spec(even_root)
    assert changed.run_key == planned(even_root).run_key
    assert changed.plan == planned(even_root).plan


@pytest.mark.parametrize("name", sorted(set(TrainExecution.model_fields) - {"ranks"}))
def test_no_part_of_execution_is_in_the_run_key(even_root: Path, name: str) -> None:
    values = {"safe_decode": True, "retry_delay_s": 0.5, "stall_timeout_s": 9.0}
    value = (values | {"credentials": "team-storage", "limits": ["gpu"]}).get(name, 7)
    changed = planned(even_root, execution={name: value})
    assert changed.spec.execution != TrainExecution()
    assert changed.run_key == planned(even_root).run_key


def test_ranks_are_not_in_the_run_key(even_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SklearnTrainer, "distributed", True)
    assert planned(even_root, execution={"ranks": 4}).run_key == planned(even_root).run_key


def test_the_same_sides_by_other_words_are_the_same_run(even_root: Path) -> None:
    """What counts is which records are on which side."""
    plain = planned(even_root).run_key
    assert planned(even_root, where=["ordinal >= 0"]).run_key == plain
    assert planned(even_root, split="metadata:fold train=[0,1,2]").run_key == plain
    folds = planned(even_root, split="metadata:fold test=[1]").run_key
    assert planned(even_root, split="metadata:kind test=a").run_key == folds
    assert folds != plain


@pytest.mark.parametrize("part", ["transform", "trainer"])
def test_the_source_of_functions_of_ones_own_counts(
    even_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    text = _TRAINER + "\ndef same(record, rng):\n    return record\n"
    keys = []
    for changed in (text, text, text + "# another comment\n"):
        name = module(tmp_path, changed, monkeypatch)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        fields: dict[str, Any] = {"trainer": f"{name}:Other"}
        if part == "transform":
            fields = {"transforms": [f"{name}:same"]}
        keys.append(planned(even_root, **fields).run_key)
    assert keys[0] == keys[1] != keys[2]


def test_other_data_is_another_run(
    tmp_path: Path, write_dataset: Write, make_record: MakeRecord, even_root: Path
) -> None:
    records = [_record(make_record, i, 64) for i in range(30)]
    other = write_dataset(tmp_path / "ds", records, per_shard=10, snapshot_id="s2")
    assert planned(other).run_key != planned(even_root).run_key


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": "sklaern"}, "'sklaern' is not a built-in trainer; did you mean sklearn"),
        ({"trainer": "no_such_module:X"}, "trainer 'no_such_module:X': there is no module"),
        ({"trainer": "math:Nothing"}, "math has no attribute 'Nothing'"),
        ({"trainer": "math:sqrt"}, "trainer 'math:sqrt' lacks init, step, evaluate, state, load"),
        ({"execution": {"ranks": 2}}, "trainer 'sklearn' works alone; ranks must be 1"),
        ({"transforms": ["ad_noise"]}, "'ad_noise' is not a built-in transform; did you mean add_"),
        ({"transforms": ["add_noise"]}, "needs the option 'snr_db'"),
        ({"transforms": ["add_noise snr=3"]}, "no option 'snr'"),
        ({"transforms": ["normalize", "normalize"]}, "normalize can be one step"),
        ({"transforms": ["unit_power column=x"]}, "column 'x' is no tensor"),
        ({"split": "metadata:fold test=[9]"}, "puts no record on the test side"),
        ({"where": ["ordinal < 0"]}, "no record of .* is selected"),
        ({"columns": ["field:nothing", "metadata:kind"]}, "nothing"),
    ],
)
def test_what_cannot_be_planned(even_root: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, MissingValueError), match=message) as caught:
        planned(even_root, **changes)
    assert caught.value.exit_code == 2


def test_a_value_that_some_record_lacks(
    tmp_path: Path, write_dataset: Write, make_record: MakeRecord
) -> None:
    records = [
        make_record(i, metadata={"kind": "a", "index": i} if i != 6 else {"index": i})
        for i in range(12)
    ]
    root = write_dataset(tmp_path / "ds", records)
    with pytest.raises(MissingValueError, match="kind"):
        planned(root)


def test_a_transform_that_fails_is_told_at_planning(
    even_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(tmp_path, "def bad(record, rng):\n    return 1 / 0\n", monkeypatch)
    with pytest.raises(FeatureError, match=r"bad, ordinal 0: ZeroDivisionError"):
        planned(even_root, transforms=[f"{name}:bad"])


@pytest.mark.parametrize(("trainer", "framework"), [("jax", "flax"), ("sklearn", "sklearn")])
def test_a_framework_that_is_not_installed(
    even_root: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, framework: str
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    if trainer == "jax":  # it is imported with its module, and scikit-learn by `init`
        monkeypatch.delitem(sys.modules, "signal_batch.trainers.jax", raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(InputError, match=rf"install '?signal-batch\[{trainer}\]"):
        check_trainer(planned(even_root, trainer=trainer))


def test_options_that_a_trainer_does_not_take_are_known_before_a_claim(even_root: Path) -> None:
    job = planned(even_root, trainer_args={"estimater": "GaussianNB"})
    with pytest.raises(SpecError, match="trainer sklearn has no option 'estimater'"):
        check_trainer(job)
    check_trainer(planned(even_root))
    regression = planned(even_root, columns=["field:samples", "metadata:snr"], target="snr")
    with pytest.raises(SpecError, match="'snr' is a float, and trainer sklearn learns classes"):
        check_trainer(regression)
    with pytest.raises(SpecError, match="give the column to learn as target"):
        check_trainer(planned(even_root, target=None))


def test_nothing_is_written(ragged_root: Path) -> None:
    def everything() -> dict[str, int]:
        return {
            str(path.relative_to(ragged_root.parent)): path.stat().st_mtime_ns
            for path in ragged_root.parent.rglob("*")
        }

    before = everything()
    job = planned(ragged_root, lengths="pad", transforms=["normalize"], split="scene test=0.3")
    check_trainer(job)
    assert job.plan.normalizes
    with pytest.raises(SpecError):
        planned(ragged_root)
    assert everything() == before
    assert not Path(job.spec.output).exists()
