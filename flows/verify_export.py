"""The verification flow: hold an output against its manifest, on a schedule or after a scare."""

from __future__ import annotations

from typing import Any

from prefect.runtime import flow_run

from flows.careful import flow
from signal_batch.scheduling import resolve
from tasks.credentials import use_credentials
from tasks.verification import check_output


def _run_name() -> str:
    return f"verify {resolve(flow_run.parameters['output'], flow_run.scheduled_start_time)}"


@flow(name="verify-export", flow_run_name=_run_name)
def verify_export(output: str, credentials: str | None = None) -> dict[str, Any]:
    """Read, hash and decode every file of an output; the run fails if it is not sound.

    Args:
        output: output folder of an export or a model: a local path or any fsspec URI;
            {scheduled:%Y-%m-%d} in it stands for the date that a run is scheduled for
        credentials: Prefect Secret block with environment variables for the storage
    """
    use_credentials(credentials)
    return check_output(resolve(output, flow_run.scheduled_start_time))
