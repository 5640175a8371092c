"""Verifying an output as a Prefect task, with the findings as an artifact."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect.artifacts import create_markdown_artifact

from signal_batch.errors import DamagedOutputError
from signal_batch.report import human_bytes
from signal_batch.verification import Verification, verify
from tasks.policy import task

#: Faults that a report and an error name; an output that lost a disk has one a file.
_SHOWN = 100
_NAMED = 5


@task(name="check output")
def check_output(output: str) -> dict[str, Any]:
    """Verify, leave a report, and fail if there are faults."""
    result = verify(output)
    create_markdown_artifact(_report(result), key="output-verification", description=output)
    if not result.ok:
        shown = "; ".join(result.faults[:_NAMED])
        raise DamagedOutputError(f"{len(result.faults)} faults in {result.uri}: {shown}")
    return asdict(result)


def _report(result: Verification) -> str:
    verdict = "sound" if result.ok else f"**{len(result.faults):,} faults**"
    faults = [f"- {fault}" for fault in result.faults[:_SHOWN]] or ["None."]
    if len(result.faults) > _SHOWN:
        faults.append(
            f"- and {len(result.faults) - _SHOWN:,} more; `signal-batch verify` names all"
        )
    remedy = "" if result.ok else "Export to another folder, or delete this one and export again."
    return "\n".join(
        [
            f"# {result.uri}: {verdict}",
            f"{result.rows:,} rows in {result.files:,} files, {human_bytes(result.bytes)}.",
            "",
            "## Faults",
            *faults,
            "",
            remedy,
        ]
    )
