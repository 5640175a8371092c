"""A model as a feature function, so that predictions are an export like any other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from signal_batch.batches import Array, Values
from signal_batch.built_ins import feature
from signal_batch.errors import InputError
from signal_batch.models import Model, read_model


@feature(equal_lengths=False)
def predictions(batch: Mapping[str, Values], *, model: str, identity: str) -> dict[str, Array]:
    """Predictions of the model at `model` for a batch, see `Model.predict`.

    `identity` is what that model must be, and part of the run key: another one that was put in
    its place is an `InputError`.
    """
    return _read(model, identity).predict(dict(batch))


@lru_cache(maxsize=1)
def _read(uri: str, identity: str) -> Model:
    found = read_model(uri)
    if found.identity != identity:
        raise InputError(
            f"the model at {uri} is another one than when this was planned; choose another "
            "output folder for its predictions"
        )
    return found
