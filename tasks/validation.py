"""Validating a dataset as a Prefect task, with the findings as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.artifacts import create_markdown_artifact

from signal_batch.errors import CorruptDatasetError
from signal_batch.validation import Validation, validate
from tasks.policy import task
from tasks.reporting import tag_run


@task(name="check dataset")
def check_dataset(
    dataset: str, annotations: list[str], deep: bool, expect: str | None
) -> dict[str, Any]:
    """Validate, leave a report, and fail if there are faults."""
    result = validate(dataset, annotations, deep=deep, expect=expect)
    tag_run(result.pin)
    create_markdown_artifact(_report(result), key="dataset-validation", description=dataset)
    raise_faults(result)
    return result.to_dict()


def raise_faults(result: Validation) -> None:
    """Fail with the first few faults of an unsound dataset."""
    if not result.ok:
        count = len(result.faults)
        shown = "; ".join(result.faults[:5]) + (f"; and {count - 5} more" if count > 5 else "")
        faults = "1 fault" if count == 1 else f"{count} faults"
        raise CorruptDatasetError(
            f"{faults} in {result.pin.uri}: {shown}. Put back what is damaged from a copy; "
            "`signal-batch validate` lists it all"
        )


def _report(result: Validation) -> str:
    fields = [
        f"| {name} | {', '.join(item['dtypes'])} | {item['smallest_shape']} "
        f"| {item['largest_shape']} |"
        for name, item in result.to_dict()["fields"].items()
    ]
    sets = [
        f"| {item.name} | {item.publication_id} | {_counts(result.statuses[item.name])} |"
        for item in result.pin.annotations
    ]
    labels = ["", "| annotations | publication | rows |", "| --- | --- | --- |", *sets]
    faults = [f"- {fault}" for fault in result.faults] or ["None."]
    return "\n".join(
        [
            f"# {result.pin.uri}",
            f"{result.pin.record_count:,} records, snapshot `{result.pin.snapshot_id}`, "
            f"fingerprint `{result.pin.fingerprint}`, {result.examined:,} examined.",
            "",
            "| field | dtype | smallest | largest |",
            "| --- | --- | --- | --- |",
            *fields,
            *(labels if sets else ()),
            "",
            "## Faults",
            *faults,
        ]
    )


def _counts(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {status}" for status, count in statuses.items())
