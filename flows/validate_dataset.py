"""The validation flow: look a dataset over on a schedule, before anything depends on it."""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks.validation import check_dataset


@flow(name="validate-dataset", persist_result=False)
def validate_dataset(
    dataset: str,
    annotations: list[str] | None = None,
    deep: bool = False,
    expect: str | None = None,
) -> dict[str, Any]:
    """Validate and pin a dataset; the run fails if the dataset is not sound."""
    return check_dataset(dataset, annotations or [], deep, expect)
