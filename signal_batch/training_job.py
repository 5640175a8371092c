"""A planned training run, and what is written about it: the claim first, the manifest last.

::

    OUT/_spec.json                 claim: run key and full spec, create-only
    OUT/_records.safetensors       which ordinals are on which side, as runs
    OUT/_statistics.json           of the training records, where a transform normalizes by them
    OUT/_checkpoints/              see `checkpoints`
    OUT/_evaluation.json           what the finished model reaches on each side
    OUT/metrics.jsonl, .parquet    the metric history
    OUT/model.safetensors          the trainer's state
    OUT/model.json                 what it is a model of: trainer, options, inputs, classes, pins
    OUT/report.html                for people
    OUT/_manifest.json             written last; names the files with their hashes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from signal_batch.columns import Column
from signal_batch.errors import DamagedOutputError, InputError
from signal_batch.frozen import checked
from signal_batch.lengths import Lengths
from signal_batch.pins import Pin
from signal_batch.selection import Selection
from signal_batch.specs import MODEL_FORMAT, SCHEMA_VERSION
from signal_batch.statistics import Statistics
from signal_batch.store import MANIFEST, OutputStore
from signal_batch.training import ArraySpec, BatchSpec, Label
from signal_batch.training_spec import SIDES, TrainSpec

RECORDS = "_records.safetensors"
STATISTICS = "_statistics.json"
EVALUATION = "_evaluation.json"
MODEL = "model.json"
ARRAYS = "model.safetensors"
METRICS = ("metrics.jsonl", "metrics.parquet")
REPORT = "report.html"
_PACKAGES = (
    *("signal-batch", "signal-dataset", "numpy", "grain"),
    *("scikit-learn", "jax", "flax", "optax"),
)


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a probe and a pass over the metadata decided; an earlier claim's plan stands.

    `arrays` are the columns of a batch as the model gets it, `evaluate_steps` the steps between
    evaluations, `split` the table of sides for the report; `normalizes` says whether statistics
    are measured before training.
    """

    columns: tuple[Column, ...]
    arrays: Mapping[str, ArraySpec]
    inputs: tuple[str, ...]
    classes: tuple[Label, ...]
    lengths: Lengths
    total_steps: int
    evaluate_steps: int
    split: Mapping[str, Any]
    normalizes: bool = False
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": list(map(str, self.columns)),
            "arrays": {name: [list(item.shape), item.dtype] for name, item in self.arrays.items()},
            "inputs": list(self.inputs),
            "classes": list(self.classes),
            "lengths": self.lengths.to_json(),
            "total_steps": self.total_steps,
            "evaluate_steps": self.evaluate_steps,
            "split": self.split,
            "normalizes": self.normalizes,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainPlan:
        return cls(
            columns=tuple(Column.parse(text) for text in value["columns"]),
            arrays={
                name: ArraySpec(tuple(shape), dtype)
                for name, (shape, dtype) in value["arrays"].items()
            },
            inputs=tuple(value["inputs"]),
            classes=tuple(value["classes"]),
            lengths=Lengths.from_json(value["lengths"]),
            total_steps=value["total_steps"],
            evaluate_steps=value["evaluate_steps"],
            split=value["split"],
            normalizes=value["normalizes"],
            warnings=tuple(value["warnings"]),
        )


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A planned training run: everything that is decided before the first step is taken.

    `sides` maps train, validation and test to their records.
    """

    spec: TrainSpec
    pin: Pin
    sides: Mapping[str, Selection]
    plan: TrainPlan
    identity: dict[str, Any]
    run_key: str

    @property
    def monitored(self) -> str | None:
        """The side that is evaluated while training: validation, or test without one."""
        return next((side for side in ("validation", "test") if len(self.sides[side])), None)

    def batch_spec(self, rank: int | None = None, coordinator: str | None = None) -> BatchSpec:
        """What the trainer of one rank is told, or without a rank one that works alone."""
        ranks = 1 if rank is None else self.spec.execution.ranks
        return batch_spec_of(self.spec, self.plan, rank or 0, ranks, coordinator)

    def to_json(self) -> dict[str, Any]:
        """The order of a worker program; the sides are read from the output folder."""
        return {
            "spec": self.spec.model_dump(mode="json"),
            "pin": self.pin.model_dump(mode="json"),
            "plan": self.plan.to_json(),
            "identity": self.identity,
            "run_key": self.run_key,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainJob:
        """The job of an order; raises `DamagedOutputError` if its sides cannot be read."""
        spec = checked(TrainSpec, value["spec"])
        return cls(
            spec=spec,
            pin=checked(Pin, value["pin"]),
            sides=_read_sides(OutputStore(spec.output), value["identity"]["sides"]),
            plan=TrainPlan.from_json(value["plan"]),
            identity=value["identity"],
            run_key=value["run_key"],
        )


def batch_spec_of(
    spec: TrainSpec,
    plan: TrainPlan,
    rank: int = 0,
    world: int = 1,
    coordinator: str | None = None,
) -> BatchSpec:
    """What a trainer is told of the batches that a run planned."""
    return BatchSpec(
        arrays=plan.arrays,
        inputs=plan.inputs,
        target=spec.target,
        classes=plan.classes,
        batch_size=spec.batch_size // world,
        total_steps=plan.total_steps,
        seed=spec.seed,
        rank=rank,
        world=world,
        coordinator=coordinator,
    )


def claim_training(job: TrainJob) -> TrainJob:
    """Take the output folder for this run key, or take up what an earlier attempt planned there."""
    store = OutputStore(job.spec.output)
    standing = store.claim(_claim_document(job))
    job = as_planned(job, standing)
    records = save({side: job.sides[side].runs.copy() for side in SIDES})
    if store.read_object(RECORDS) != records:
        store.put_object(RECORDS, records)
    return job


def peek_training(job: TrainJob) -> TrainJob:
    """The job as `claim_training` would leave it, without writing anything."""
    standing = OutputStore(job.spec.output).standing_claim(_claim_document(job))
    return job if standing is None else as_planned(job, standing)


def as_planned(job: TrainJob, standing: Mapping[str, Any]) -> TrainJob:
    try:
        return replace(job, plan=TrainPlan.from_json(standing["plan"]))
    except (KeyError, TypeError, ValueError) as exc:
        raise DamagedOutputError(
            f"{job.spec.output}/_spec.json does not hold the plan of this run: {exc!r}; remove "
            "that output, or choose another"
        ) from exc


def read_training(output: str) -> TrainJob:
    """The training run that a folder was claimed for.

    Raises `InputError` where there is none, and `DamagedOutputError` where what it wrote cannot be
    read.
    """
    claim = OutputStore(output).read_claim()
    if claim is None or claim.get("format") != MODEL_FORMAT:
        raise InputError(f"{output} is not the output of a training run")
    try:
        spec = {**claim["spec"], "output": output}
        return TrainJob.from_json({**claim, "spec": spec})
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise DamagedOutputError(f"{output}/_spec.json is not complete: {exc!r}") from exc


def standing_model(job: TrainJob) -> dict[str, Any] | None:
    """The manifest of a model that is complete already; None where something is missing.

    Raises `DamagedOutputError` where its files are not those that the manifest names.
    """
    store = OutputStore(job.spec.output)
    manifest = store.read_manifest()
    if manifest is None:
        return None
    present = store.listing("")
    try:
        files = {str(entry["file"]): entry["bytes"] for entry in manifest["files"]}
    except (KeyError, TypeError):
        files = {}
    lost = [name for name, size in files.items() if present.get(name) != size]
    if manifest.get("run_key") != job.run_key or lost or not files:
        what = f"{', '.join(lost[:3])} missing or cut short" if lost else "of another run"
        raise DamagedOutputError(
            f"{store.uri} was complete, but is damaged ({what}); see `signal-batch verify`. To "
            f"publish it anew, remove {MANIFEST} and run the same command"
        )
    return manifest


def read_statistics(job: TrainJob) -> Statistics | None:
    """The statistics that an earlier attempt measured for this run key."""
    document = OutputStore(job.spec.output).read_document(STATISTICS)
    if document is None or document.get("run_key") != job.run_key:
        return None
    return Statistics.from_json(document["statistics"])


def write_statistics(job: TrainJob, statistics: Statistics) -> None:
    document = {"run_key": job.run_key, "statistics": statistics.to_json()}
    OutputStore(job.spec.output).put_document(STATISTICS, document)


def file_entry(name: str, payload: bytes) -> dict[str, Any]:
    """How a manifest names a file."""
    return {"file": name, "bytes": len(payload), "sha256": sha256(payload).hexdigest()}


def versions() -> dict[str, str]:
    """Versions of the libraries that a model depends on, of those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _claim_document(job: TrainJob) -> dict[str, Any]:
    return {
        "format": MODEL_FORMAT,
        "format_version": SCHEMA_VERSION,
        "run_key": job.run_key,
        "identity": job.identity,
        "where": list(job.spec.where),
        "spec": job.spec.model_dump(mode="json"),
        "pin": job.pin.model_dump(mode="json"),
        "plan": job.plan.to_json(),
        "versions": versions(),
    }


def _read_sides(store: OutputStore, digests: Mapping[str, str]) -> dict[str, Selection]:
    payload = store.read_object(RECORDS)
    if payload is None:
        raise DamagedOutputError(f"{store.uri}/{RECORDS} is missing; run the same command again")
    try:
        runs = load(payload)
        sides = {side: Selection(np.asarray(runs[side])) for side in SIDES}
    except Exception as exc:
        raise DamagedOutputError(f"{store.uri}/{RECORDS} is damaged: {exc}") from exc
    if {side: selection.digest() for side, selection in sides.items()} != dict(digests):
        raise DamagedOutputError(
            f"{store.uri}/{RECORDS} does not hold the records of this run; remove it and run the "
            "same command again"
        )
    return sides
