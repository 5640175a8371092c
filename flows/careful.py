"""A flow that looks at its parameters before Prefect sends them to its server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from prefect import Flow

from signal_batch.uris import refuse_credentials

P = ParamSpec("P")
R = TypeVar("R")


class CarefulFlow(Flow[P, R]):
    """Refuses a dataset, output or tracking URI with credentials, also in plain JSON.

    Prefect stores the parameters of a run first and validates them afterwards, so a password
    would be on the server, and on the run's page, before any model had seen it.
    """

    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        _refuse_credentials(parameters)
        return super().serialize_parameters(parameters)


def flow(**options: Any) -> Callable[[Callable[P, R]], CarefulFlow[P, R]]:
    """Prefect's decorator, for flows of this project; results are not stored."""

    def decorate(function: Callable[P, R]) -> CarefulFlow[P, R]:
        return CarefulFlow(function, persist_result=False, **options)

    return decorate


def _refuse_credentials(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _refuse_credentials(value)
        elif name in ("dataset", "output", "mlflow") and isinstance(value, str):
            refuse_credentials(value)
