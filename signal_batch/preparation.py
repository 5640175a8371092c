"""From a batch as it was read to a batch as the model gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from signal_batch.batches import Array, Batch, ordinal_range
from signal_batch.errors import SpecError
from signal_batch.export import array_columns
from signal_batch.lengths import Lengths
from signal_batch.statistics import Statistics
from signal_batch.training import Label, ModelBatch
from signal_batch.training_job import TrainPlan
from signal_batch.training_spec import TrainSpec
from signal_batch.transforms import Chain, resolve_chain


@dataclass(frozen=True)
class Preparation:
    """Transforms, lengths, and labels as indices into the classes; safe in several threads."""

    chain: Chain
    lengths: Lengths
    target: str | None
    classes: tuple[Label, ...]

    def training(self, batch: Batch) -> ModelBatch:
        """A batch of the global order, which carries `position`."""
        return self._prepared(batch, training=True)

    def evaluation(self, batch: Batch) -> ModelBatch:
        """A batch for evaluation or prediction, without what is for training only.

        The target is left out where the batch has none.
        """
        return self._prepared(batch, training=False)

    def _prepared(self, batch: Batch, *, training: bool) -> ModelBatch:
        ready = self.lengths(self.chain(batch, training=training))
        if self.target is not None and self.classes and self.target in ready:
            ready[self.target] = self._indices(ready[self.target], batch)
        return ready

    def _indices(self, labels: Array, batch: Batch) -> Array:
        known: Mapping[Label, int] = {label: i for i, label in enumerate(self.classes)}
        try:
            return np.array([known[label] for label in labels.tolist()], np.int32)
        except KeyError as exc:
            raise SpecError(
                f"{ordinal_range(batch)}: {exc.args[0]!r} is no class of this model; it knows "
                f"{', '.join(map(str, self.classes))}"
            ) from None


def preparation_of(spec: TrainSpec, plan: TrainPlan, statistics: Statistics | None) -> Preparation:
    """The way from a record to the model that a run planned.

    `statistics` are those of the training records, where a transform normalizes by them.
    """
    chain = resolve_chain(
        spec.transforms,
        seed=spec.seed,
        array_columns=array_columns(plan.columns),
        statistics=statistics,
    )
    return Preparation(chain, plan.lengths, spec.target, plan.classes)
