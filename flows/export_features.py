"""The export flow: validate, pin, select, plan, fan out, commit, report."""

from __future__ import annotations

import time

from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows.careful import flow
from signal_batch.job import Outcome, finished
from signal_batch.specs import ExportSpec
from tasks import export as tasks
from tasks import inputs
from tasks.credentials import use_credentials
from tasks.reporting import name_of, report_failure


def _run_name() -> str:
    spec = inputs.scheduled(flow_run.parameters["spec"])
    return f"export {spec.features} of {name_of(spec.dataset)} to {spec.output}"


@flow(
    name="export-features",
    flow_run_name=_run_name,
    task_runner=ThreadPoolTaskRunner(),
    on_failure=[report_failure],
)
def export_features(spec: ExportSpec) -> Outcome:
    """Export the features of a dataset to a folder of Parquet files.

    The same call again finishes what an earlier one left, and does nothing on a complete output.

    Args:
        spec: what to export, from where, to where
    """
    started = time.monotonic()
    spec = inputs.scheduled(spec)
    use_credentials(spec.execution.credentials)
    inputs.validate_dataset(spec)
    pin = inputs.pin_inputs(spec)
    selection = inputs.select_records(spec, pin)
    job = tasks.plan_parts(spec, pin, selection)
    if standing := finished(job):
        outcome = Outcome(standing, already_complete=True)
        tasks.report_run(outcome, spec, [], 0.0)
        return outcome
    job, rows = tasks.export_shards(job, str(flow_run.id))
    run = {"flow_run_id": str(flow_run.id), "flow_run_name": flow_run.name}
    outcome = Outcome(tasks.commit_output(job, run))
    tasks.report_run(outcome, spec, rows, time.monotonic() - started)
    return outcome
