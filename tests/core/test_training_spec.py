"""Splits and transforms as text, every refusal, and what a training run's identity is made of."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from signal_batch.errors import SpecError
from signal_batch.frozen import checked, digest
from signal_batch.training_spec import (
    TRAIN_NOT_IDENTITY,
    Split,
    TrainExecution,
    TrainSpec,
    Transform,
)

BASE: dict[str, Any] = {
    "dataset": "s3://signals/radar",
    "output": "models/radar",
    "columns": [
        "field:samples",
        "label=annotation:truth-v1/label:int32",
        "metadata:snr_db:float32",
        "metadata:site",
    ],
    "trainer": "sklearn",
}
COLUMNS = [
    "samples=field:samples",
    "label=annotation:truth-v1/label:int32",
    "snr_db=metadata:snr_db:float32",
    "site=metadata:site",
]

#: Another value for every field of a spec. A new field has to be given one here, and a place in
#: or out of the identity: out of it only if it can never change the model or its metrics, or if
#: another digest of the run key stands for it.
CHANGED: dict[str, Any] = {
    "dataset": "s3://elsewhere/radar",
    "output": "other",
    "columns": ["field:samples"],
    "where": ["metadata:snr_db >= 5"],
    "pin": "pin.json",
    "target": "label",
    "split": "scene test=0.2",
    "transforms": ["unit_power"],
    "inputs": ["samples"],
    "lengths": "pad",
    "length": 128,
    "buckets": [64, 128],
    "batch_size": 32,
    "epochs": 3,
    "steps": 7,
    "seed": 1,
    "shuffle": "block",
    "trainer": "jax",
    "trainer_args": {"width": 8},
    "checkpoint_steps": 5,
    "checkpoint_s": 1.5,
    "keep_checkpoints": 9,
    "evaluate_steps": 11,
    "log_steps": 2,
    "by": ["site"],
    "mlflow": "http://localhost:5000",
    "execution": {"threads": 7},
}
#: What a changed field needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "length": {"lengths": "pad"},
    "buckets": {"lengths": "bucket"},
}
OUT_OF_IDENTITY = {
    *("dataset", "output", "pin", "where", "split", "execution", "mlflow"),
    *("checkpoint_steps", "checkpoint_s", "keep_checkpoints"),
}
CHANGED_EXECUTION: dict[str, Any] = {
    "ranks": 4,
    "threads": 1,
    "prefetch_batches": 1,
    "retries": 0,
    "retry_delay_s": 0.5,
    "stall_timeout_s": 10.0,
    "safe_decode": True,
    "credentials": "team-storage",
    "limits": ("gpu",),
}


def spec(**changes: Any) -> TrainSpec:
    return checked(TrainSpec, BASE | changes)


def split(text: str) -> Split:
    return spec(split=text).split


# --- splits --------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
#: NaN is no value of a key, and infinities have no JSON.
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.booleans() | st.integers(-(2**63), 2**64) | numbers | texts
value_lists = st.lists(values, max_size=4, unique_by=lambda v: (isinstance(v, bool), v))
keys = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=12
).filter(lambda text: not any(map(str.isspace, text)))
selectors = st.sampled_from(["id", "scene", "ordinal"]) | st.one_of(
    keys.map(lambda key: f"metadata:{key}"), keys.map(lambda key: f"annotation:set-v1/{key}")
)


@st.composite
def splits(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a split that holds together."""
    fields: dict[str, Any] = {"by": draw(selectors), "seed": draw(st.integers(0, 2**32 - 1))}
    if draw(st.booleans()):
        fields["test"] = draw(st.floats(0, 0.75))
        fields["validation"] = draw(st.floats(0, 0.2))
        return fields
    chosen = draw(value_lists)
    cuts = sorted(draw(st.tuples(st.integers(0, len(chosen)), st.integers(0, len(chosen)))))
    fields["test"] = tuple(chosen[: cuts[0]])
    fields["validation"] = tuple(chosen[cuts[0] : cuts[1]])
    fields["train"] = draw(st.none() | st.just(tuple(chosen[cuts[1] :])))
    return fields


def typed(value: Any) -> Any:
    """A value with its types, as True, 1 and 1.0 are equal."""
    return [(type(item), item) for item in value] if isinstance(value, tuple) else value


@given(splits())
def test_a_split_is_written_so_that_it_reads_back(fields: dict[str, Any]) -> None:
    made = checked(Split, fields)
    for again in (
        Split.model_validate(str(made)),
        Split.model_validate(made.model_dump(mode="json")),
        Split.model_validate_json(made.model_dump_json()),
        split(str(made)),
    ):
        assert again == made
        assert str(again.by) == fields["by"]
        for side in ("test", "validation", "train"):
            assert typed(getattr(again, side)) == typed(fields.get(side))
        assert again.seed == fields["seed"]
    assert made.model_dump(mode="json") == str(made)


@pytest.mark.parametrize(
    ("text", "by", "expected"),
    [
        ("id", "id", {}),
        ("scene test=0.2 validation=0.1", "scene", {"test": 0.2, "validation": 0.1}),
        ("  id   test=0.2   seed=7 ", "id", {"test": 0.2, "seed": 7}),
        ("id test=0", "id", {"test": 0.0}),
        ("metadata:fold test=[3]", "metadata:fold", {"test": (3,)}),
        ("metadata:fold test=[3,4] validation=[5]", "metadata:fold", {"test": (3, 4)}),
        ("metadata:split test=test train=train", "metadata:split", {"test": ("test",)}),
        ('metadata:site test=["pier 1"]', "metadata:site", {"test": ("pier 1",)}),
        ('metadata:site test="pier 1"', "metadata:site", {"test": ("pier 1",)}),
        ("metadata:night test=[true]", "metadata:night", {"test": (True,)}),
        ("metadata:a.b=c test=0.5", "metadata:a.b=c", {"test": 0.5}),
        ("annotation:truth-v1/day test=[1.5]", "annotation:truth-v1/day", {"test": (1.5,)}),
        ("metadata:split train=train", "metadata:split", {"train": ("train",)}),
        ("metadata:day test=2020-01-01", "metadata:day", {"test": ("2020-01-01",)}),
    ],
)
def test_forms_of_a_split(text: str, by: str, expected: dict[str, Any]) -> None:
    found = split(text)
    assert str(found.by) == by
    for name, value in expected.items():
        assert typed(getattr(found, name)) == typed(value)


@pytest.mark.parametrize(
    "written",
    [
        {"by": "metadata:fold", "test": [3, 4], "seed": 2},
        "metadata:fold test=[3,4] seed=2",
        "metadata:fold seed=2 test=[3, 4]",
    ],
)
def test_a_split_in_yaml(written: Any) -> None:
    document = yaml.safe_load(yaml.safe_dump({"split": written}))
    assert str(spec(**document).split) == "metadata:fold test=[3, 4] seed=2"


def test_kinds_of_splits() -> None:
    assert split("id").is_trivial
    assert not split("id").by_value
    assert not split("id test=0.1").is_trivial
    assert not split("metadata:a train=[1]").is_trivial
    for text in ("metadata:a test=[1]", "metadata:a validation=[1]", "metadata:a train=[1]"):
        assert split(text).by_value
    assert spec().split == Split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "split '' is empty"),
        ("   ", "is empty"),
        ("scene test", "split 'scene test': 'test' must read KEY=VALUE"),
        ("scene 0.2", "'0.2' must read KEY=VALUE"),
        ("scene =0.2", "split 'scene =0.2': '=0.2' must read KEY=VALUE"),
        ("scene test =0.2", "'test' must read KEY=VALUE"),
        ("scene test=0.2 test=0.3", "gives test twice"),
        ("scene train_share=0.2", "train_share"),
        ("m test=0.2", "selector 'm' starts with 'm'; it must be one of field, metadata"),
        ("metadata: test=0.2", "needs a name after the colon"),
        ("field:samples test=0.2", "goes by a single value of a record, not by field:samples"),
        ("annotation-field:a/mask test=0.2", "not by annotation-field:a/mask"),
        ("scene test=0.6 validation=0.4", "leave nothing to train on"),
        ("scene test=1.0", r"test is 1.0; it takes a share from 0 to below 1, or .* as in \[3\]"),
        ("scene test=-0.1", "test is -0.1; it takes a share"),
        ("scene test=NaN", "test is nan; it takes a share"),
        ("metadata:fold test=3", "test is 3; it takes a share"),
        ("metadata:night validation=true", "validation is True; it takes a share"),
        ("metadata:night test=null", "test is None; it takes a share"),
        ('metadata:night test={"a": 1}', "it takes a share"),
        ("scene train=0.8", "train is 0.8; it takes the values of the key that are for training"),
        ("scene test=[[1]]", r"split\.test"),
        ("metadata:a test=0.1 validation=[1]", "by shares or by values, not by both"),
        ("metadata:a test=0.1 train=[1]", "by shares or by values, not by both"),
        ("metadata:a test=[1] train=[1]", "must not name the same value for two sides"),
        ("metadata:a test=[1,1]", "must not name the same value for two sides"),
        ("metadata:a test=[3] validation=[3.0]", "must not name the same value for two sides"),
        ("metadata:a test=x validation=x", "must not name the same value for two sides"),
        ("scene test=0.1 seed=-1", r"split\.seed: .* greater than or equal to 0"),
        ("scene test=0.1 seed=4294967296", r"split\.seed: .* less than 4294967296"),
    ],
)
def test_splits_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        split(text)


@pytest.mark.parametrize("value", [7, None, ["scene"], {"test": 0.1, "share": 1}])
def test_what_is_no_split(value: Any) -> None:
    with pytest.raises(SpecError, match="split"):
        spec(split=value)


def test_true_and_one_are_two_values() -> None:
    assert split("metadata:a test=[1] validation=[true]").test == (1,)


def test_a_key_that_text_cannot_carry_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot go by metadata:a b: its key has a space in it"):
        spec(split={"by": "metadata:a b", "test": 0.1})


# --- transforms ----------------------------------------------------------------------------------

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}(\.[a-z]{1,4})?(:[A-Za-z_]{1,8})?", fullmatch=True)
options = st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
    st.recursive(
        st.none() | values,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@given(names, options)
def test_a_transform_is_written_so_that_it_reads_back(name: str, given_: dict[str, Any]) -> None:
    made = checked(Transform, {"name": name, "options": given_})
    assert (made.name, made.options) == (name, given_)
    for again in (
        Transform.model_validate(str(made)),
        Transform.model_validate_json(made.model_dump_json()),
        spec(transforms=str(made)).transforms[0],
        spec(transforms=[{name: given_}]).transforms[0],
    ):
        assert again == made
        assert json.dumps(again.options) == json.dumps(given_)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("unit_power", "unit_power", {}),
        ("add_noise snr_db=[0,20]", "add_noise", {"snr_db": [0, 20]}),
        ("add_noise snr_db=[0, 20] column=iq", "add_noise", {"snr_db": [0, 20], "column": "iq"}),
        ('mine:f text="a b" n=1', "mine:f", {"text": "a b", "n": 1}),
        ("mine:f text=12abc", "mine:f", {"text": "12abc"}),
        ("mine:f a= b=null", "mine:f", {"a": "", "b": None}),
        ("mine:f a=b=c", "mine:f", {"a": "b=c"}),
        ("mine:f on=true off=True", "mine:f", {"on": True, "off": "True"}),
    ],
)
def test_forms_of_a_transform(text: str, name: str, expected: dict[str, Any]) -> None:
    found = spec(transforms=[text]).transforms[0]
    assert (found.name, found.options) == (name, expected)


def test_transforms_in_yaml() -> None:
    document = yaml.safe_load(
        """
        transforms:
          - statistics
          - normalize:
          - add_noise: {snr_db: [0, 20]}
          - package.module:function strength=0.5
          - {name: random_crop, options: {length: 64}}
          - name: unit_power
        """
    )
    assert list(map(str, spec(**document).transforms)) == [
        "statistics",
        "normalize",
        "add_noise snr_db=[0, 20]",
        "package.module:function strength=0.5",
        "random_crop length=64",
        "unit_power",
    ]
    assert spec(transforms="unit_power").transforms == spec(transforms=["unit_power"]).transforms


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "transform '' is empty"),
        ("add_noise snr_db", "transform 'add_noise snr_db': 'snr_db' must read KEY=VALUE"),
        ("add_noise =3", "'=3' must read KEY=VALUE"),
        ("add_noise a=1 a=2", "gives a twice"),
        ("add_noise 1a=2", "transform 'add_noise': '1a' is no name of an option"),
        ("add_noise a-b=2", "'a-b' is no name of an option"),
        ("add_noise a=NaN", "transform 'add_noise' holds NaN or an infinity"),
        ("add_noise a=[1,Infinity]", "transform 'add_noise' holds NaN or an infinity"),
        ({"name": "a b"}, "'a b' is no name of a transform"),
        ({"name": ""}, "'' is no name of a transform"),
        ({"add_noise": [1]}, "options"),
        ({"add_noise": {1: 2}}, "options"),
        ({"add_noise": {"a": [yaml.safe_load("2020-01-01")]}}, "has no JSON"),
        ({"name": "add_noise", "option": {}}, "option"),
        (7, "transforms"),
        ([], "transforms"),
    ],
)
def test_transforms_that_are_refused(value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(transforms=[value])
    if not isinstance(value, str | list):
        with pytest.raises(SpecError, match="transforms"):
            spec(transforms=value)


# --- the spec ------------------------------------------------------------------------------------

FULL = """
dataset: s3://signals/radar
output: models/radar
columns:
  - field:samples
  - label=annotation:truth-v1/label:int32
  - metadata:snr_db:float32
where: metadata:snr_db >= 0
target: label
split: scene test=0.2 validation=0.1
transforms: [unit_power, {add_noise: {snr_db: [0, 20]}}]
inputs: samples
lengths: bucket
buckets: [64, 128]
batch_size: 32
steps: 1000
seed: 5
shuffle: block
trainer: package.module:Class
trainer_args: {width: 8, layers: [1, 2.5]}
checkpoint_steps: 100
evaluate_steps: 50
by: snr_db
mlflow: http://tracking:5000
execution: {ranks: 4, threads: 3, stall_timeout_s: 60}
"""


def test_a_spec_from_yaml() -> None:
    found = checked(TrainSpec, yaml.safe_load(FULL))
    assert (found.target, found.inputs, found.by) == ("label", ("samples",), ("snr_db",))
    assert str(found.split) == "scene test=0.2 validation=0.1"
    assert [t.options for t in found.transforms] == [{}, {"snr_db": [0, 20]}]
    assert (found.lengths, found.buckets, found.length) == ("bucket", (64, 128), None)
    assert (found.epochs, found.steps, found.batch_size) == (None, 1000, 32)
    assert (found.execution.ranks, found.execution.threads) == (4, 3)
    assert found.execution.retries == TrainExecution().retries
    assert str(found.target_column) == "label=annotation:truth-v1/label:int32"


@pytest.mark.parametrize("changes", [*CHANGED, "nothing", "full"])
def test_a_spec_survives_json(changes: str) -> None:
    """Specs travel to worker processes, claims and models as JSON."""
    if changes == "full":
        found = checked(TrainSpec, yaml.safe_load(FULL))
    else:
        given_ = {changes: CHANGED[changes]} if changes in CHANGED else {}
        found = spec(**BESIDE.get(changes, {}), **given_)
    document = json.loads(json.dumps(found.model_dump(mode="json")))
    assert TrainSpec.model_validate(document) == found
    assert TrainSpec.model_validate_json(found.model_dump_json()) == found
    assert document["split"] == str(found.split)
    assert document["transforms"] == list(map(str, found.transforms))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": None}, "trainer: "),
        ({"columns": []}, "name at least one column"),
        ({"target": "lable"}, "target 'lable' is no column; there are samples, label, snr_db, si"),
        ({"by": ["snr"]}, "by 'snr' is no column"),
        ({"by": "samples"}, "by 'samples' is a tensor"),
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        ({"epochs": 0}, "epochs: .* greater than or equal to 1"),
        ({"steps": 0}, "steps: .* greater than or equal to 1"),
        ({"batch_size": 0}, "batch_size: .* greater than or equal to 1"),
        ({"batch_size": 10, "execution": {"ranks": 4}}, "batch_size 10 does not divide among 4 r"),
        ({"length": 5}, "length goes with lengths=pad or lengths=crop"),
        ({"length": 5, "lengths": "bucket"}, "length goes with lengths=pad or lengths=crop"),
        ({"length": 0, "lengths": "pad"}, "length: .* greater than or equal to 1"),
        ({"buckets": [5], "lengths": "pad"}, "buckets go with lengths=bucket"),
        ({"buckets": [5, 5], "lengths": "bucket"}, "buckets must be ascending lengths"),
        ({"buckets": [9, 5], "lengths": "bucket"}, "buckets must be ascending lengths"),
        ({"buckets": [0, 5], "lengths": "bucket"}, "buckets must be ascending lengths"),
        ({"lengths": "cut"}, "lengths: .*'equal', 'pad', 'crop' or 'bucket'"),
        ({"shuffle": "some"}, "shuffle: .*'global', 'block' or 'none'"),
        ({"seed": -1}, "seed: .* greater than or equal to 0"),
        ({"seed": 2**32}, "seed: .* less than 4294967296"),
        ({"mlflow": "http://me:hunter2@host"}, "carries credentials"),
        ({"dataset": "s3://k:hunter2@bucket/x"}, "carries credentials"),
        ({"output": "memory://model"}, "another place in each worker process"),
        ({"trainer_args": {"a": float("nan")}}, "trainer_args holds NaN or an infinity"),
        ({"trainer_args": {"a": [yaml.safe_load("2020-01-01")]}}, "trainer_args .* has no JSON"),
        ({"trainer_args": [1]}, "trainer_args: "),
        ({"checkpoint_steps": 0}, "checkpoint_steps: .* greater than or equal to 1"),
        ({"checkpoint_s": 0}, "checkpoint_s: .* greater than 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: .* greater than or equal to 1"),
        ({"evaluate_steps": 0}, "evaluate_steps: .* greater than or equal to 1"),
        ({"log_steps": 0}, "log_steps: .* greater than or equal to 1"),
        ({"threads": 3}, "threads: there is no such field; it is execution.threads"),
        ({"execution": {"workers": 3}}, r"execution\.workers: there is no such field; there are r"),
        ({"execution": {"ranks": 0}}, r"execution\.ranks: .* greater than or equal to 1"),
        ({"execution": {"stall_timeout_s": 0}}, r"execution\.stall_timeout_s: .* greater than 0"),
        ({"learning_rate": 1}, "learning_rate: there is no such field; there are dataset, output"),
    ],
)
def test_specs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        spec(**changes)
    assert "hunter2" not in str(caught.value)


def test_a_spec_is_frozen() -> None:
    for frozen, name in ((spec(), "seed"), (Split(), "seed"), (Transform(name="x"), "name")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(frozen, name, 3)


def test_accuracy_is_broken_down_by_an_snr_unless_it_is_said_otherwise() -> None:
    assert spec().by_columns == ("snr_db",)
    assert spec(columns=["field:samples", "snr=metadata:x"]).by_columns == ("snr",)
    assert spec(columns=["field:samples"]).by_columns == ()
    assert spec(by=[]).by_columns == ()
    assert spec(by="site").by_columns == ("site",)


def test_annotation_sets_that_are_read() -> None:
    assert spec().annotation_sets == {"truth-v1"}
    assert spec(split="annotation:folds-v2/fold test=[3]").annotation_sets == {
        "truth-v1",
        "folds-v2",
    }


# --- the form ------------------------------------------------------------------------------------


def described(schema: dict[str, Any], model: type[Any]) -> None:
    assert set(schema["properties"]) == set(model.model_fields)
    for name, found in schema["properties"].items():
        assert found.get("description"), name
        # A field that refers to another model takes its title from there.
        assert found.get("title") or "$ref" in found, name


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_json_schema_of_the_form(mode: Any) -> None:
    schema = TrainSpec.model_json_schema(mode=mode)
    jsonschema.Draft202012Validator.check_schema(schema)
    described(schema, TrainSpec)
    described(schema["$defs"]["TrainExecution"], TrainExecution)
    assert set(schema["$defs"]) == {"TrainExecution"}
    assert schema["additionalProperties"] is False
    assert schema["properties"]["split"]["type"] == "string"
    assert schema["properties"]["transforms"]["items"] == {"type": "string"}
    if mode == "validation":
        assert schema["required"] == ["dataset", "output", "columns", "trainer"]
    checker = jsonschema.Draft202012Validator(schema)
    for found in (spec(), checked(TrainSpec, yaml.safe_load(FULL))):
        assert list(checker.iter_errors(found.model_dump(mode="json"))) == []
    wrong = spec().model_dump(mode="json") | {"batch_size": 0}
    assert [error.json_path for error in checker.iter_errors(wrong)] == ["$.batch_size"]


def test_defaults_of_the_form_are_values_that_it_takes() -> None:
    """A form is filled in with them and handed back."""
    properties = TrainSpec.model_json_schema()["properties"]
    defaults = {name: found["default"] for name, found in properties.items() if "default" in found}
    assert checked(TrainSpec, defaults | BASE) == spec()
    assert defaults["split"] == "id"


# --- identity ------------------------------------------------------------------------------------


def test_every_field_has_a_place_in_or_out_of_the_identity() -> None:
    assert set(CHANGED) == set(TrainSpec.model_fields)
    assert set(CHANGED_EXECUTION) == set(TrainExecution.model_fields)
    assert set(TRAIN_NOT_IDENTITY) == OUT_OF_IDENTITY


@pytest.mark.parametrize("name", CHANGED)
def test_what_can_change_the_result_changes_the_identity(name: str) -> None:
    before = spec(**BESIDE.get(name, {}))
    changed = spec(**BESIDE.get(name, {}), **{name: CHANGED[name]})
    assert changed != before
    same = digest(changed.identity()) == digest(before.identity())
    assert same is (name in OUT_OF_IDENTITY)


@pytest.mark.parametrize("name", CHANGED_EXECUTION)
def test_how_a_run_is_carried_out_never_changes_the_identity(name: str) -> None:
    changed = spec(execution={name: CHANGED_EXECUTION[name]})
    assert changed != spec()
    assert changed.identity() == spec().identity()


@pytest.mark.parametrize(
    "name", [name for name, field in TrainSpec.model_fields.items() if not field.is_required()]
)
def test_an_explicit_default_is_the_same_identity(name: str) -> None:
    default = TrainSpec.model_fields[name].get_default(call_default_factory=True)
    assert spec(**{name: default}).identity() == spec().identity()


def test_the_identity_of_a_plain_spec_holds_nothing_but_columns_and_trainer() -> None:
    """An option added later must not change the run keys of models that exist."""
    assert spec().identity() == {"columns": COLUMNS, "trainer": "sklearn"}


def test_ways_to_write_the_same_transform_are_one_identity() -> None:
    ways: list[Any] = [
        "add_noise snr_db=[0,20]",
        "add_noise  snr_db=[0,  20]",
        {"add_noise": {"snr_db": [0, 20]}},
        {"name": "add_noise", "options": {"snr_db": [0, 20]}},
    ]
    assert len({digest(spec(transforms=[way]).identity()) for way in ways}) == 1
    assert digest(spec(transforms=[ways[0], "unit_power"]).identity()) != digest(
        spec(transforms=["unit_power", ways[0]]).identity()
    )
