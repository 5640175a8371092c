"""The flow of one shard: a work order of an export, run by a worker of a work pool."""

from __future__ import annotations

from prefect.runtime import flow_run

from flows.careful import flow
from tasks import export as tasks


def _run_name() -> str:
    return f"export {flow_run.parameters['shard']} to {flow_run.parameters['output']}"


@flow(name="export-shard", flow_run_name=_run_name)
def export_shard(output: str, order: str, shard: str, credentials: str | None = None) -> None:
    """Export the parts of one work order; started by an export with the runner `work-pool`.

    Whether a part is done is said by its receipt in the output folder. What fails is tried again
    by the export that this run belongs to.

    Args:
        output: output folder of the export
        order: name of the work order in the output folder
        shard: which records these are, for people
        credentials: Prefect Secret block with environment variables for the storage
    """
    tasks.run_order(output, order, shard, credentials)
