"""A published model: read it, run it, judge it on a dataset.

`model.json` and `model.safetensors` are all that is read, so a model may be copied anywhere; the
manifest beside them says what their hashes are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from signal_batch.batches import Array, Batch
from signal_batch.columns import Column
from signal_batch.errors import DamagedOutputError, InputError, SignalBatchError, SpecError
from signal_batch.frozen import checked, digest
from signal_batch.judging import evaluation_batches, judge
from signal_batch.pins import reopen
from signal_batch.planning import pin_inputs, select
from signal_batch.preparation import Preparation, preparation_of
from signal_batch.source import BatchFetcher
from signal_batch.specs import MODEL_FORMAT
from signal_batch.splits import survey
from signal_batch.statistics import Statistics
from signal_batch.store import OutputStore
from signal_batch.trainers import resolve_trainer
from signal_batch.training import Label, Trainer
from signal_batch.training_job import ARRAYS, MODEL, TrainPlan, batch_spec_of
from signal_batch.training_spec import SIDES, TrainSpec


@dataclass(frozen=True)
class Model:
    """A model that is ready: its trainer with what it learned, and the way from a record to it.

    `identity` changes whenever its predictions could.
    """

    uri: str
    identity: str
    spec: TrainSpec
    plan: TrainPlan
    ready: Preparation
    trainer: Trainer
    document: Mapping[str, Any]

    @property
    def columns(self) -> tuple[Column, ...]:
        """What must be read of a record to predict: neither its label nor what reports need."""
        aside = {self.spec.target, *self.spec.by_columns} - set(self.plan.inputs)
        return tuple(column for column in self.plan.columns if column.name not in aside)

    def predict(self, batch: Batch) -> dict[str, Array]:
        """Predictions for a batch as it was read; at most `spec.batch_size` records.

        Of a classifier: `prediction`, the class itself, `probability`, that of this class
        (float32), and `probabilities` (records, classes), float32, in the order of the classes.
        Of any other trainer what its `predict` returns.
        """
        predicted: dict[str, Array] = self.trainer.predict(self.ready.evaluation(batch))  # type: ignore[attr-defined]
        probabilities = predicted.get("probabilities")
        if not self.plan.classes or probabilities is None:
            return predicted
        chosen = probabilities.argmax(axis=1)
        return {
            "prediction": _as_column(self.plan.classes)[chosen],
            "probability": probabilities[np.arange(len(chosen)), chosen],
            "probabilities": probabilities,
        }


def read_model(uri: str) -> Model:
    """Read a published model and build its trainer.

    Raises:
        InputError: there is no published model at `uri`.
        DamagedOutputError: its files are not those that its manifest names.
    """
    store = OutputStore(uri)
    manifest = store.read_manifest()
    if manifest is None or manifest.get("format") != MODEL_FORMAT:
        claim = store.read_claim() if manifest is None else None
        begun = (claim or {}).get("format") == MODEL_FORMAT
        what = "an unfinished training run" if begun else "no published model"
        raise InputError(f"{uri} holds {what}: there is no manifest of one (it is written last)")
    try:
        hashes = {entry["file"]: entry["sha256"] for entry in manifest["files"]}
        arrays = _read(store, ARRAYS, hashes)
        document: dict[str, Any] = json.loads(_read(store, MODEL, hashes))
        spec = checked(TrainSpec, document["spec"])
        plan = TrainPlan.from_json(document["plan"])
        statistics = document["statistics"]
        ready = preparation_of(
            spec, plan, None if statistics is None else Statistics.from_json(statistics)
        )
        trainer = resolve_trainer(spec.trainer)[0]()
        trainer.init(batch_spec_of(spec, plan), spec.trainer_args)
        trainer.load(load(arrays))
        identity = digest([manifest["run_key"], hashes[ARRAYS]])
    except (KeyError, TypeError, ValueError, SafetensorError) as exc:
        if isinstance(exc, SignalBatchError):
            raise
        raise DamagedOutputError(f"{uri} is not a whole model: {exc!r}") from exc
    return Model(uri, identity, spec, plan, ready, trainer, document)


def evaluate(
    model_uri: str, dataset: str, *, where: Sequence[str] = (), side: str | None = None
) -> dict[str, Any]:
    """Judge a model on the records of a dataset that has its columns, label included.

    `where` filters the records; `side` keeps those that the model's own split puts there.
    Returns `dataset`, `fingerprint`, `records` and what `judge` finds.
    """
    model = read_model(model_uri)
    spec = model.spec.model_copy(update={"dataset": dataset, "where": tuple(where), "pin": None})
    if model.spec.target is None:
        raise SpecError(f"{model_uri} was trained without a target; there is nothing to judge by")
    pin = pin_inputs(spec)
    selection = select(spec, pin)
    if side is not None:
        if side not in SIDES:
            raise SpecError(f"side {side!r} is not one of {', '.join(SIDES)}")
        with closing(reopen(pin)) as pinned:
            sides = survey(pinned.dataset, selection, spec.split, (), None).sides
        selection = sides[side].selection
        if not len(selection):
            raise SpecError(f"the split '{spec.split}' puts no record of {dataset} there: {side}")
    with (
        closing(BatchFetcher(pin, model.plan.columns)) as fetch,
        evaluation_batches(selection, fetch, model.ready, spec.batch_size) as batches,
    ):
        result = judge(model.trainer, batches, model.ready, spec.by_columns)
    return {
        "model": model_uri,
        "dataset": dataset,
        "fingerprint": pin.fingerprint,
        "side": side,
        "records": len(selection),
        "classes": list(model.plan.classes),
        **result,
    }


def prediction_fields(model: Model, dataset: str, output: str) -> dict[str, Any]:
    """The fields of an `ExportSpec` that writes a model's predictions for a dataset."""
    if not callable(getattr(model.trainer, "predict", None)):
        raise InputError(f"trainer {model.spec.trainer!r} cannot predict: it has no such method")
    return {
        "dataset": dataset,
        "output": output,
        "columns": list(map(str, model.columns)),
        "features": "signal_batch.prediction:predictions",
        "feature_args": {"model": OutputStore(model.uri).uri, "identity": model.identity},
        "batch_size": model.spec.batch_size,
    }


def _read(store: OutputStore, name: str, hashes: Mapping[str, str]) -> bytes:
    payload = store.read_object(name)
    if payload is None or sha256(payload).hexdigest() != hashes[name]:
        raise DamagedOutputError(
            f"{store.uri}/{name} is {'missing' if payload is None else 'not what was published'}; "
            "train again into another folder, or restore the file"
        )
    return payload


def _as_column(classes: Sequence[Label]) -> Array:
    """Classes as a column of values: text as objects, as everywhere."""
    return np.array(classes, dtype=object if isinstance(classes[0], str) else None)
