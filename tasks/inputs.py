"""What every job does first, as Prefect tasks: look the dataset over, pin it, select records."""

from __future__ import annotations

from typing import TypeVar

from prefect import get_run_logger
from prefect.runtime import flow_run

from signal_batch import planning
from signal_batch.pins import Pin
from signal_batch.scheduling import at_time
from signal_batch.selection import Selection
from signal_batch.specs import JobSpec
from signal_batch.validation import validate
from tasks import reporting
from tasks.policy import task
from tasks.validation import raise_faults

S = TypeVar("S", bound=JobSpec)


def scheduled(spec: S) -> S:
    """The spec as of the time that this flow run was first scheduled for.

    That is the run's expected start, which the server sets once: a late start, a retry, and a
    run that is scheduled again after a crash all find the same, and so read the same dataset.
    For a run that nobody scheduled it is the moment at which the run was made.
    """
    return at_time(spec, flow_run.scheduled_start_time)


@task(name="validate dataset")
def validate_dataset(spec: JobSpec) -> None:
    """Every shard object is there with its size, and the metadata reads."""
    result = validate(spec.dataset)
    raise_faults(result)
    get_run_logger().info("%s: %d records, sound", spec.dataset, result.pin.record_count)


@task(name="pin annotations")
def pin_inputs(spec: JobSpec) -> Pin:
    pin = planning.pin_inputs(spec)
    reporting.tag_run(pin)
    return pin


@task(name="select records")
def select_records(spec: JobSpec, pin: Pin) -> Selection:
    return planning.select(spec, pin)
