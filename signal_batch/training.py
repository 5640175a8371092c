"""The Trainer protocol: what a training run asks of a framework.

A trainer is a class that the spec names, `sklearn`, `jax` or `package.module:Class`. The run makes
one without arguments, calls `init` once, `load` if there is a checkpoint, and then `step` for every
batch of the global order. All of what it learned is in the arrays of `state`: a run that is
killed goes on from the last ones that were saved, and must end with the same arrays as a run
that was left alone. So a step may depend on the state, on the batch and on the options, and on
nothing else: randomness comes from `rng_at(batch_spec.seed, batch["position"][0])` or from a
generator whose state is among the arrays.

Batches are dicts of arrays with a leading record axis:

- every column of `BatchSpec.arrays`, among them `BatchSpec.inputs`, what the model sees;
- `NAME_mask`, bool (records, length), beside every input that was padded: True where it is real;
- the target as int32 indices into `BatchSpec.classes`, or as it was read where it is a float;
- `ordinal`, `id` and, in training, `position`, each record's place in the global order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np

from signal_batch.batches import Array
from signal_batch.errors import SpecError

ModelBatch: TypeAlias = dict[str, Array]
Metrics: TypeAlias = Mapping[str, float]
State: TypeAlias = dict[str, Array]
Label: TypeAlias = bool | int | str

#: Keeps the logarithm of a probability finite.
SMALLEST_PROBABILITY = 1e-12


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One column of a batch: the shape of one record's value, and its dtype.

    A length of None differs from batch to batch (records in buckets of one length).
    """

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The batches that a trainer will be given, and where it stands in the run.

    `batch_size` is that of one rank, `world` ranks take a global step together; evaluation may
    end with a shorter batch. `coordinator` is the host and port at which the ranks meet, None
    for a rank that works alone.
    """

    arrays: Mapping[str, ArraySpec]
    inputs: tuple[str, ...]
    target: str | None
    classes: tuple[Label, ...]
    batch_size: int
    total_steps: int
    seed: int
    rank: int = 0
    world: int = 1
    coordinator: str | None = None


@runtime_checkable
class Trainer(Protocol):
    """Learns from batches; see the module for what it must hold to.

    A trainer that can also `predict(batch) -> {column: array}` can be used by `signal-batch
    predict`; where it returns `probabilities`, float32 (records, classes), the run computes
    accuracy and a confusion matrix from them. One whose `distributed` is True can be run in
    several ranks.
    """

    def init(self, batch_spec: BatchSpec, options: Mapping[str, Any]) -> None:
        """Build the model. Raises `SpecError` for options or batches that it cannot work with."""

    def step(self, batch: ModelBatch) -> Metrics:
        """Learn from one batch; numbers to log, such as `loss` and `accuracy` of this batch."""

    def evaluate(self, batches: Iterable[ModelBatch]) -> Metrics:
        """Numbers over all batches, without learning from them."""

    def state(self) -> State:
        """Everything that was learned, optimizer included, by name; arrays are copied at once."""

    def load(self, state: State) -> None:
        """Go on from what `state` returned, after `init` with the same arguments."""


def check_classes(spec: BatchSpec, trainer: str) -> None:
    """Refuse batches without at least two classes to learn; `trainer` begins the message.

    Raises `SpecError`.
    """
    if spec.target is None:
        raise SpecError(f"{trainer} learns classes: give the column to learn as target")
    if not spec.classes:
        raise SpecError(
            f"target {spec.target!r} is a float, and {trainer} learns classes; choose a target "
            "of whole numbers, text or booleans"
        )
    if len(spec.classes) < 2:
        raise SpecError(
            f"target {spec.target!r} is {spec.classes[0]!r} in every record; there must be two "
            "classes at least to learn from"
        )


class Classifier:
    """A base for trainers that classify: `evaluate` from the probabilities of `predict`."""

    distributed: ClassVar[bool] = False
    spec: BatchSpec

    def predict(self, batch: ModelBatch) -> dict[str, Array]:
        """`probabilities`, float32 (records, classes)."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[ModelBatch]) -> Metrics:
        """`accuracy`, and `loss`, the mean of -log of the probability given to the true class."""
        assert self.spec.target is not None
        count, right, loss = 0, 0, 0.0
        for batch in batches:
            probabilities = self.predict(batch)["probabilities"]
            truth = batch[self.spec.target]
            right += int((probabilities.argmax(axis=1) == truth).sum())
            loss += float(cross_entropy(probabilities, truth).sum())
            count += len(truth)
        return {"accuracy": right / max(1, count), "loss": loss / max(1, count)}


def cross_entropy(probabilities: Array, truth: Array) -> Array:
    """-log p(true class), float64 (records,), from (records, classes) and indices (records,)."""
    chosen = probabilities[np.arange(len(truth)), truth].astype(np.float64)
    return -np.log(np.maximum(chosen, SMALLEST_PROBABILITY))
