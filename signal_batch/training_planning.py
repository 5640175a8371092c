"""From a spec to a planned training run: pin, select, split, plan. Nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

import numpy as np

from signal_batch.batches import Batch, Ints, Values
from signal_batch.bucketing import equal_limits
from signal_batch.columns import Column
from signal_batch.errors import SpecError
from signal_batch.export import array_columns
from signal_batch.frozen import digest
from signal_batch.iteration import global_order
from signal_batch.lengths import CHOICES, MASK, Lengths
from signal_batch.pins import Pin, reopen
from signal_batch.planning import pin_inputs, probe_ordinals, select, typed
from signal_batch.preparation import Preparation
from signal_batch.reading import RecordReader
from signal_batch.selection import Selection
from signal_batch.specs import SCHEMA_VERSION
from signal_batch.splits import Survey, survey
from signal_batch.store import OutputStore
from signal_batch.trainers import resolve_trainer
from signal_batch.training import ArraySpec, ModelBatch
from signal_batch.training_job import TrainJob, TrainPlan
from signal_batch.training_spec import DEFAULT_EPOCHS, SIDES, TrainSpec
from signal_batch.transforms import Chain, resolve_chain

_IDENTITY = ("ordinal", "id", "position")


def prepare_training(spec: TrainSpec) -> TrainJob:
    """Pin, select, split and plan; nothing is written."""
    pin = pin_inputs(spec)
    return plan_training(spec, pin, select(spec, pin))


def plan_training(spec: TrainSpec, pin: Pin, selection: Selection) -> TrainJob:
    """Make the sides, fix what a batch looks like from a probe, compute the run key.

    Raises what reading, the transforms or the trainer raise on the probe, and `SpecError` where
    records differ in length and the spec does not say what to do about it.
    """
    make_trainer, trainer_source = resolve_trainer(spec.trainer)
    if spec.execution.ranks > 1 and not getattr(make_trainer, "distributed", False):
        raise SpecError(f"trainer {spec.trainer!r} works alone; ranks must be 1")
    with closing(reopen(pin)) as pinned:
        found = survey(pinned.dataset, selection, spec.split, spec.columns, spec.target)
        reader = RecordReader(pinned.dataset, spec.columns, safe_decode=spec.execution.safe_decode)
        probe = reader.read(probe_ordinals(found.sides["train"].selection, pin.record_bytes))
    columns = tuple(typed(column, probe) for column in spec.columns)
    chain = resolve_chain(spec.transforms, seed=spec.seed, array_columns=array_columns(columns))
    chain.measured_columns(probe)
    tensors = chain.array_columns_after(probe)
    lengths = _Probe.of(chain, probe, tensors).plan(spec, found)
    _check_masks(lengths, columns)
    preparation = Preparation(chain, lengths, spec.target, found.classes)
    ready = preparation.evaluation(probe)
    inputs = _inputs(spec, ready, tensors)
    arrays = _array_specs(ready, lengths)
    trained = preparation.training({**probe, "position": _positions(probe)})
    _check_alike(inputs, _array_specs(trained, lengths), arrays)
    total_steps, epoch_steps = _steps(spec, found)
    sides = {side: found.sides[side].selection for side in SIDES}
    identity = {
        "schema_version": SCHEMA_VERSION,
        "data": pin.identity(),
        "sides": {side: chosen.digest() for side, chosen in sides.items()},
        "spec": spec.identity(),
        "transform_sources": chain.source_sha256,
        "trainer_source": trainer_source,
    }
    plan = TrainPlan(
        columns=columns,
        arrays=arrays,
        inputs=inputs,
        classes=found.classes,
        lengths=lengths,
        total_steps=total_steps,
        evaluate_steps=spec.evaluate_steps or epoch_steps,
        split={"by": str(spec.split), **found.to_json()},
        normalizes=chain.needs_statistics,
        warnings=tuple(_warnings(found)),
    )
    return TrainJob(spec, pin, sides, plan, identity, digest(identity))


def check_trainer(job: TrainJob) -> None:
    """Build the model once, here, so that options it cannot take are known before a claim.

    Nothing to do where an earlier attempt claimed the output for the same run.
    """
    if (OutputStore(job.spec.output).read_claim() or {}).get("run_key") == job.run_key:
        return
    make_trainer, _ = resolve_trainer(job.spec.trainer)
    make_trainer().init(job.batch_spec(), job.spec.trainer_args)


def _steps(spec: TrainSpec, found: Survey) -> tuple[int, int]:
    """Global steps of the whole run and of one epoch."""
    chosen = found.sides["train"].selection
    epochs = None if spec.steps else spec.epochs or DEFAULT_EPOCHS
    order = global_order(
        chosen, step_records=spec.batch_size, seed=spec.seed, epochs=epochs, steps=spec.steps
    )
    return len(order) // spec.batch_size, max(1, len(chosen) // spec.batch_size)


def _inputs(spec: TrainSpec, ready: ModelBatch, tensors: Sequence[str]) -> tuple[str, ...]:
    for name in spec.inputs:
        if name not in ready:
            raise SpecError(
                f"input {name!r} is no column after the transforms; there are "
                f"{', '.join(n for n in ready if n not in _IDENTITY)}"
            )
    inputs = spec.inputs or tuple(name for name in tensors if name != spec.target)
    if not inputs:
        raise SpecError(
            "the model has nothing to look at: name a tensor among the columns, for example "
            "field:samples, or the value columns that it sees with --input"
        )
    return inputs


def _array_specs(ready: ModelBatch, lengths: Lengths) -> dict[str, ArraySpec]:
    specs = {}
    for name, values in ready.items():
        if name in _IDENTITY:
            continue
        shape: tuple[int | None, ...] = values.shape[1:]
        fitted = name in lengths.columns or name.removesuffix("_mask") in lengths.columns
        if fitted and lengths.policy == "bucket":
            shape = (*shape[:-1], None)
        specs[name] = ArraySpec(shape, "str" if values.dtype == object else values.dtype.name)
    return specs


def _check_masks(lengths: Lengths, columns: Sequence[Column]) -> None:
    masks = [name + MASK for name in lengths.columns] if lengths.masked else []
    if taken := [column.name for column in columns if column.name in masks]:
        raise SpecError(
            f"column {taken[0]!r} has the name of the mask that goes with padding; give it another"
        )


def _check_alike(
    inputs: Sequence[str], training: Mapping[str, ArraySpec], evaluation: Mapping[str, ArraySpec]
) -> None:
    """A model learns from what it is judged by: transforms for training only must not reshape."""
    for name in inputs:
        if training.get(name) != evaluation[name]:
            raise SpecError(
                f"input {name!r} is {_shown(training.get(name))} in training and "
                f"{_shown(evaluation[name])} where the model is evaluated: a transform for "
                "training only must leave shape and dtype as they are"
            )


def _shown(array: ArraySpec | None) -> str:
    if array is None:
        return "no column"
    return " x ".join([array.dtype, *("any" if n is None else str(n) for n in array.shape)])


def _positions(probe: Batch) -> Ints:
    return np.arange(len(probe["ordinal"]), dtype=np.int64)


def _warnings(found: Survey) -> list[str]:
    warnings = []
    if found.shared_scenes:
        warnings.append(
            f"{found.shared_scenes:,} scenes have records on more than one side, so what is "
            "evaluated may have been learned by heart; split by scene to keep them apart"
        )
    trained = found.sides["train"].counts
    if unseen := [str(label) for label in found.classes if label not in trained]:
        warnings.append(f"there is no record of {', '.join(unseen)} to train on")
    if found.unused:
        warnings.append(f"{found.unused:,} selected records are on no side of the split")
    return warnings


class _Probe:
    """Lengths of a few records before and after the transforms, and what follows from them."""

    def __init__(
        self, raw: Batch, training: Batch, evaluation: Batch, tensors: Sequence[str]
    ) -> None:
        self._raw, self._training, self._evaluation = raw, training, evaluation
        self._tensors = tensors

    @classmethod
    def of(cls, chain: Chain, raw: Batch, tensors: Sequence[str]) -> _Probe:
        training = chain({**raw, "position": _positions(raw)}, training=True)
        if lost := [name for name in tensors if name not in training]:
            raise SpecError(
                f"column {lost[0]!r} is there where the model is evaluated, but not in training: "
                "a transform for training only must not take it away"
            )
        return cls(raw, training, chain(raw, training=False), tensors)

    def plan(self, spec: TrainSpec, found: Survey) -> Lengths:
        """The policy of the spec with its numbers filled in, for the columns that need it."""
        known = {name: found.lengths[name] for name in self._tensors if self._kept(name, found)}
        varying = [name for name in self._tensors if self._varies(name, known)]
        if spec.lengths == "equal":
            if varying:
                raise SpecError(_differ(varying[0], self._seen(varying[0], known)))
            return Lengths()
        fitted = varying or [name for name in known if spec.length is not None]
        if not fitted and spec.length is not None:
            fitted = [name for name in self._tensors if name in found.lengths]
        if not fitted:
            return Lengths()
        seen = (
            np.concatenate([known[name] for name in fitted])
            if all(name in known for name in fitted)
            else None
        )
        if spec.lengths == "bucket":
            return _in_buckets(spec, fitted, seen, found)
        return _to_one_length(spec, fitted, seen)

    def _kept(self, name: str, found: Survey) -> bool:
        """Whether a tensor of the records comes through the transforms as long as it was."""
        if name not in found.lengths:
            return False
        raw = _lengths(self._raw[name])
        return raw == _lengths(self._training[name]) == _lengths(self._evaluation[name])

    def _varies(self, name: str, known: Mapping[str, Values]) -> bool:
        if name in known and len(np.unique(known[name])) > 1:
            return True
        return len({*_lengths(self._training[name]), *_lengths(self._evaluation[name])}) > 1

    def _seen(self, name: str, known: Mapping[str, Values]) -> tuple[int, int]:
        if name in known:
            return int(np.min(known[name])), int(np.max(known[name]))
        lengths = {*_lengths(self._training[name]), *_lengths(self._evaluation[name])}
        return min(lengths), max(lengths)


def _lengths(values: Values) -> list[int]:
    return [value.shape[-1] if value.ndim else -1 for value in values]


def _differ(name: str, seen: tuple[int, int]) -> str:
    return (
        f"column {name!r} has records of {seen[0]} to {seen[1]} samples where the model gets "
        f"them, and a batch needs one length. Say which way with lengths: {CHOICES}; or make "
        "features of equal shape of them, for example with the transform statistics"
    )


def _to_one_length(spec: TrainSpec, fitted: Sequence[str], seen: Values | None) -> Lengths:
    length = spec.length
    if length is None:
        if seen is None:
            raise SpecError(
                f"metadata does not tell how long {', '.join(fitted)} will be, for transforms or "
                f"annotations decide it; say so with length, for lengths={spec.lengths}"
            )
        length = int(np.max(seen) if spec.lengths == "pad" else np.min(seen))
    if spec.lengths == "pad" and seen is not None and np.max(seen) > length:
        raise SpecError(
            f"the longest record has {np.max(seen)} samples, more than length={length}; give a "
            "larger length, or lengths=crop"
        )
    masked = spec.lengths == "pad" or seen is None or bool(np.min(seen) < length)
    return Lengths(spec.lengths, tuple(fitted), length, masked=masked)


def _in_buckets(
    spec: TrainSpec, fitted: Sequence[str], seen: Values | None, found: Survey
) -> Lengths:
    if seen is None:
        raise SpecError(
            f"metadata does not tell how long {', '.join(fitted)} will be, for transforms or "
            "annotations decide it, so records cannot be put into buckets by it; use lengths=pad "
            "or lengths=crop"
        )
    longest = int(np.max(seen))
    limits = spec.buckets or equal_limits(found.lengths_of(fitted[0], "train"), longest)
    if limits[-1] < longest:
        raise SpecError(
            f"the longest record has {longest} samples, more than the last bucket's {limits[-1]}"
        )
    return Lengths("bucket", tuple(fitted), buckets=tuple(limits), masked=True)
