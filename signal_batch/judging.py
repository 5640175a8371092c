"""Running a trainer over records that it does not learn from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from signal_batch.errors import SpecError
from signal_batch.evaluation import Scores
from signal_batch.iteration import batches_in_order, iterating
from signal_batch.preparation import Preparation
from signal_batch.program import Emit
from signal_batch.selection import Selection
from signal_batch.source import BatchFetcher
from signal_batch.training import ModelBatch, Trainer

#: Progress is reported so often, and a worker that reports nothing for long is taken for hung.
REPORT_EVERY_S = 0.5


@contextmanager
def evaluation_batches(
    selection: Selection,
    fetch: BatchFetcher,
    ready: Preparation,
    batch_size: int,
    *,
    threads: int = 1,
    emit: Emit | None = None,
) -> Iterator[Iterator[ModelBatch]]:
    """Records in ordinal order as the model gets them, the last batch shorter."""
    read = _Then(fetch, ready.evaluation)
    with iterating(batches_in_order(selection, read, batch_size, threads=threads)) as batches:
        yield heard(batches, emit)


def judge(
    trainer: Trainer, batches: Iterator[ModelBatch], ready: Preparation, by: tuple[str, ...]
) -> dict[str, Any]:
    """Metrics of a trainer; one that classifies also gets a confusion matrix, see `Scores`.

    `metrics` holds the plain numbers: accuracy and loss, or what `Trainer.evaluate` says.
    """
    predict = getattr(trainer, "predict", None)
    if predict is None or not ready.classes or ready.target is None:
        return {"metrics": floats(trainer.evaluate(batches))}
    scores = Scores()
    for batch in batches:
        probabilities = predict(batch).get("probabilities")
        if probabilities is None:
            raise SpecError("predict of a trainer that classifies must return probabilities")
        groups = {name: batch[name] for name in by if name in batch}
        scores.add(probabilities, batch[ready.target], groups)
    result = scores.result()
    return {**result, "metrics": {name: result[name] for name in ("accuracy", "loss")}}


def heard(batches: Iterator[Any], emit: Emit | None) -> Iterator[Any]:
    """The batches; says now and then that there is still something going on."""
    said = time.monotonic()
    for batch in batches:
        yield batch
        if emit is not None and time.monotonic() - said >= REPORT_EVERY_S:
            emit({"event": "alive"})
            said = time.monotonic()


def floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A trainer's metrics as plain numbers; `SpecError` where they are none."""
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, AttributeError) as exc:
        raise SpecError(f"a trainer's metrics must be numbers by name: {exc}") from exc


@dataclass(frozen=True)
class _Then:
    """A read and what is done with it, in the thread that reads."""

    fetch: BatchFetcher
    then: Callable[[Any], Any]

    def __call__(self, ordinals: npt.NDArray[np.int64]) -> Any:
        return self.then(self.fetch(ordinals))
