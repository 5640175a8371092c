"""The training flow: validate, pin, select and split, train, evaluate, publish, report."""

from __future__ import annotations

from prefect.runtime import flow_run

from flows.careful import flow
from signal_batch.publishing import TrainOutcome
from signal_batch.training_job import standing_model
from signal_batch.training_spec import TrainSpec
from tasks import inputs
from tasks import training as tasks
from tasks.credentials import use_credentials
from tasks.reporting import name_of, report_failure


def _run_name() -> str:
    spec = inputs.scheduled(flow_run.parameters["spec"])
    return f"train {spec.trainer} on {name_of(spec.dataset)} to {spec.output}"


@flow(name="train-model", flow_run_name=_run_name, on_failure=[report_failure])
def train_model(spec: TrainSpec) -> TrainOutcome:
    """Train a model on a dataset and publish it.

    The same call again goes on from the newest checkpoint, and does nothing on a complete model.

    Args:
        spec: what to train, on which records, and where to put the model
    """
    spec = inputs.scheduled(spec)
    use_credentials(spec.execution.credentials)
    inputs.validate_dataset(spec)
    pin = inputs.pin_inputs(spec)
    selection = inputs.select_records(spec, pin)
    job = tasks.plan_run(spec, pin, selection)
    if standing := standing_model(job):
        outcome = TrainOutcome(standing, already_complete=True)
        tasks.report_run(outcome, spec, [])
        return outcome
    told = tasks.learn(job, str(flow_run.id))
    run = {"flow_run_id": str(flow_run.id), "flow_run_name": flow_run.name}
    outcome = TrainOutcome(tasks.publish_model(job, run, tuple(told.warnings)))
    tasks.report_run(outcome, spec, told.metrics)
    return outcome
