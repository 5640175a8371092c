"""The validation flow: look a dataset over on a schedule, before anything depends on it."""

from __future__ import annotations

from typing import Any

from prefect.runtime import flow_run

from flows.careful import flow
from signal_batch.scheduling import resolve
from tasks.credentials import use_credentials
from tasks.reporting import name_of
from tasks.validation import check_dataset


def _run_name() -> str:
    dataset = resolve(flow_run.parameters["dataset"], flow_run.scheduled_start_time)
    return f"validate {name_of(dataset)}"


@flow(name="validate-dataset", flow_run_name=_run_name)
def validate_dataset(
    dataset: str,
    annotations: list[str] | None = None,
    deep: bool = False,
    expect: str | None = None,
    credentials: str | None = None,
) -> dict[str, Any]:
    """Validate and pin a dataset; the run fails if the dataset is not sound.

    Args:
        dataset: dataset root: a local path, s3:// or gs://; {scheduled:%Y-%m-%d} in it stands for
            the date that a run is scheduled for
        annotations: annotation sets to pin and count
        deep: decode every record
        expect: fingerprint that the dataset must have
        credentials: Prefect Secret block with environment variables for the storage
    """
    use_credentials(credentials)
    dataset = resolve(dataset, flow_run.scheduled_start_time)
    return check_dataset(dataset, annotations or [], deep, expect)
