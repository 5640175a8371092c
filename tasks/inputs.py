"""What every job does first, as Prefect tasks: look the dataset over, pin it, select records."""

from __future__ import annotations

from prefect import get_run_logger

from signal_batch import planning
from signal_batch.pins import Pin
from signal_batch.selection import Selection
from signal_batch.specs import JobSpec
from signal_batch.validation import validate
from tasks.policy import task
from tasks.validation import raise_faults


@task(name="validate dataset")
def validate_dataset(spec: JobSpec) -> None:
    """Every shard object is there with its size, and the metadata reads."""
    result = validate(spec.dataset)
    raise_faults(result)
    get_run_logger().info("%s: %d records, sound", spec.dataset, result.pin.record_count)


@task(name="pin annotations")
def pin_inputs(spec: JobSpec) -> Pin:
    return planning.pin_inputs(spec)


@task(name="select records")
def select_records(spec: JobSpec, pin: Pin) -> Selection:
    return planning.select(spec, pin)
