"""The validation flow: look a dataset over on a schedule, before anything depends on it."""

from __future__ import annotations

from typing import Any

from flows.careful import flow
from tasks.validation import check_dataset


@flow(name="validate-dataset")
def validate_dataset(
    dataset: str,
    annotations: list[str] | None = None,
    deep: bool = False,
    expect: str | None = None,
) -> dict[str, Any]:
    """Validate and pin a dataset; the run fails if the dataset is not sound.

    Args:
        dataset: dataset root: a local path, s3:// or gs://
        annotations: annotation sets to pin and count
        deep: decode every record
        expect: fingerprint that the dataset must have
    """
    return check_dataset(dataset, annotations or [], deep, expect)
