"""A published model against arithmetic on the arrays in its own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
import signal_dataset as sds
from safetensors.numpy import load_file
from scipy import stats
from scipy.special import expit

from signal_batch.errors import DamagedOutputError, InputError, SpecError
from signal_batch.export import array_columns
from signal_batch.frozen import checked
from signal_batch.models import evaluate, prediction_fields, read_model
from signal_batch.pins import pin_dataset
from signal_batch.runner import export
from signal_batch.source import BatchFetcher
from signal_batch.specs import ExportSpec
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def model_folder(vowels_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speakers by scikit-learn's default, a linear model; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "speakers"
    spec = {
        "dataset": str(vowels_root),
        "output": str(folder),
        "columns": [
            "field:samples",
            "label=annotation:speakers-v1/label:int32",
            "frames=metadata:frames:int32",
        ],
        "target": "label",
        "split": "metadata:split test=test train=train",
        "transforms": ["statistics", "normalize"],
        "trainer": "sklearn",
        "batch_size": 30,
        "epochs": 20,
        "by": ["frames"],
    }
    train(checked(TrainSpec, spec))
    return folder


def plain(dataset: Path, folder: Path) -> dict[str, np.ndarray]:
    """Split, truth and what the linear model says of every record, with SciPy and NumPy alone."""
    arrays = load_file(folder / "model.safetensors")
    document = json.loads((folder / "model.json").read_text())
    opened = sds.open(str(dataset))
    features = []
    for record in opened:
        x = np.asarray(record.fields["samples"].data, np.float64)
        found = {
            "mean": x.mean(axis=1),
            "std": x.std(axis=1),
            "skewness": stats.skew(x, axis=1),
            "kurtosis": stats.kurtosis(x, axis=1),
            "min": x.min(axis=1),
            "max": x.max(axis=1),
            "rms": np.sqrt((x**2).mean(axis=1)),
        }
        features.append(np.concatenate([found[name] for name in document["inputs"]]))
    inputs, split = np.array(features), np.array([r.metadata["split"] for r in opened])
    learned = inputs[split == "train"]
    scores = (inputs - learned.mean(axis=0)) / learned.std(axis=0) @ arrays["coef_"].T
    scores += arrays["intercept_"]
    one_against_rest = expit(scores)
    labels = opened.annotations["speakers-v1"]
    return {
        "split": split,
        "truth": np.array([labels[i].values["label"] for i in range(len(opened))]),
        "prediction": np.array(document["classes"])[scores.argmax(axis=1)],
        "probabilities": one_against_rest / one_against_rest.sum(axis=1, keepdims=True),
    }


def is_clear(wanted: dict[str, np.ndarray]) -> np.ndarray:
    """Whether the likeliest class is no tie: of one-against-rest models, two may say 1.0."""
    ordered = np.sort(wanted["probabilities"], axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2] > 1e-3)


def test_predictions_are_those_of_the_arrays_in_the_file(
    vowels_root: Path, model_folder: Path, tmp_path: Path
) -> None:
    fields = prediction_fields(read_model(str(model_folder)), str(vowels_root), str(tmp_path / "p"))
    export(checked(ExportSpec, fields))
    table = ds.dataset(tmp_path / "p" / "data").to_table().sort_by("ordinal").to_pydict()
    wanted = plain(vowels_root, model_folder)
    assert table["ordinal"] == list(range(640))
    assert "label" not in table  # a dataset without labels can be predicted
    np.testing.assert_allclose(table["probabilities"], wanted["probabilities"], atol=2e-4)
    clear = is_clear(wanted)
    assert clear.mean() > 0.95
    assert (np.array(table["prediction"]) == wanted["prediction"])[clear].all()
    np.testing.assert_allclose(
        table["probability"], np.max(table["probabilities"], axis=1), atol=1e-7
    )


def test_evaluation_is_that_of_a_plain_loop(vowels_root: Path, model_folder: Path) -> None:
    wanted = plain(vowels_root, model_folder)
    held_out = wanted["split"] == "test"
    right = (wanted["prediction"] == wanted["truth"])[held_out]
    found = evaluate(str(model_folder), str(vowels_root), side="test")
    assert found["records"] == held_out.sum() == 370
    ties = (~is_clear(wanted) & held_out).sum()
    assert abs(found["metrics"]["accuracy"] - right.mean()) <= ties / 370 + 1e-9
    assert found["metrics"]["accuracy"] > 0.95
    assert np.sum(found["confusion"]) == 370
    published = json.loads((model_folder / "model.json").read_text())["metrics"]["test"]
    assert published == pytest.approx(found["metrics"])
    filtered = evaluate(str(model_folder), str(vowels_root), where=["metadata:split == 'test'"])
    assert filtered["metrics"] == pytest.approx(found["metrics"])
    assert sum(group["records"] for group in found["by"]["frames"]) == 370


def test_accuracy_is_that_of_the_demo(vowels_root: Path, tmp_path: Path) -> None:
    from signal_batch.demo import demo_training

    manifest = train(demo_training(str(vowels_root), str(tmp_path / "demo"))).manifest
    assert manifest["metrics"]["test"]["accuracy"] >= 0.96


def test_a_model_may_be_moved(model_folder: Path, vowels_root: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("model.json", "model.safetensors", "_manifest.json"):
        shutil.copy(model_folder / name, moved)
    here, there = read_model(str(model_folder)), read_model(str(moved))
    assert here.identity == there.identity
    pin = pin_dataset(str(vowels_root)).pin
    fetch = BatchFetcher(pin, here.columns)
    batch = fetch(np.arange(5))
    fetch.close()
    assert array_columns(here.columns) == ("samples",)
    for name, values in here.predict(batch).items():
        np.testing.assert_array_equal(values, there.predict(batch)[name])


def damaged(folder: Path, name: str) -> None:
    payload = bytearray((folder / name).read_bytes())
    payload[len(payload) // 2] ^= 1
    (folder / name).write_bytes(payload)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_damage_is_named(model_folder: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(model_folder, tmp_path / "copy"))
    damaged(copy, name)
    with pytest.raises(DamagedOutputError, match=f"{name} is not what was published"):
        read_model(str(copy))
    (copy / name).unlink()
    with pytest.raises(DamagedOutputError, match=f"{name} is missing"):
        read_model(str(copy))


def test_what_is_no_model_is_bad_input(
    tmp_path: Path, vowels_root: Path, model_folder: Path
) -> None:
    with pytest.raises(InputError, match="no published model"):
        read_model(str(tmp_path / "nothing"))
    unfinished = Path(shutil.copytree(model_folder, tmp_path / "unfinished"))
    (unfinished / "_manifest.json").unlink()
    with pytest.raises(InputError, match="manifest"):
        read_model(str(unfinished))
    with pytest.raises(SpecError, match="side 'holdout' is not one of"):
        evaluate(str(model_folder), str(vowels_root), side="holdout")
    with pytest.raises(SpecError, match="puts no record"):
        evaluate(str(model_folder), str(vowels_root), side="validation")


def test_predictions_of_another_model_are_refused(
    vowels_root: Path, model_folder: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = prediction_fields(
        read_model(str(model_folder)), str(vowels_root), str(tmp_path / "p")
    )
    fields["feature_args"]["identity"] = "0" * 64
    with pytest.raises(InputError, match="another one than when this was planned"):
        export(checked(ExportSpec, fields))
