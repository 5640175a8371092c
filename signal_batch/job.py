"""A planned export, and what is written about it: the claim first, the manifest last.

Each step is one call with plain arguments, so that a notebook, `signal_batch.runner` and a
Prefect flow make the same ones: those of `signal_batch.planning`, which write nothing, then
`claim`, the shards, `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from signal_batch.columns import Column
from signal_batch.errors import (
    CorruptDatasetError,
    DamagedOutputError,
)
from signal_batch.export import WorkOrder, decode_schema, encode_schema
from signal_batch.frozen import digest
from signal_batch.notes import remove_notes
from signal_batch.pins import Pin
from signal_batch.plan import Part, Shard, group_into_shards, plan_parts
from signal_batch.selection import Selection
from signal_batch.specs import EXPORT_FORMAT, SCHEMA_VERSION, ExportSpec
from signal_batch.store import AGAIN, DATA, MANIFEST, OutputStore, Receipt

_PACKAGES = ("signal-batch", "signal-dataset", "numpy", "scipy", "pyarrow", "grain")


@dataclass(frozen=True, slots=True)
class ExportJob:
    """A planned export: everything that is decided before the first part is written."""

    spec: ExportSpec
    pin: Pin
    selection: Selection
    columns: tuple[Column, ...]
    schema: pa.Schema
    identity: dict[str, Any]
    run_key: str
    batch_rows: int
    part_rows: int
    row_bytes: float

    @property
    def parts(self) -> tuple[Part, ...]:
        return plan_parts(self.selection, self.part_rows)

    @property
    def bad_limit(self) -> int:
        return int(self.spec.max_bad_fraction * len(self.selection))

    def order(self, shard: Shard) -> WorkOrder:
        """The work order for one shard, good in any working directory and on any machine."""
        places = {"dataset": self.pin.uri, "output": OutputStore(self.spec.output).uri}
        return WorkOrder(
            spec=self.spec.model_copy(update=places),
            pin=self.pin,
            run_key=self.run_key,
            columns=self.columns,
            schema=self.schema,
            batch_rows=self.batch_rows,
            bad_limit=self.bad_limit,
            parts=shard.parts,
            runs=tuple(self.selection.slice(part.first, part.rows) for part in shard.parts),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished export: its manifest, whether it was finished before this run, and where to
    look at the run.
    """

    manifest: dict[str, Any]
    already_complete: bool = False
    watch_at: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What an output already has of a job; `manifest` if that is all of it."""

    shards: tuple[Shard, ...]
    done_rows: int
    manifest: dict[str, Any] | None


def claim(job: ExportJob) -> ExportJob:
    """Take the output folder for this job, or take up what an earlier attempt planned there.

    Schema, dtypes and part sizes of an earlier claim stand, so that a run resumed under other
    library versions still writes the same parts.
    """
    standing = OutputStore(job.spec.output).claim(_claim_document(job))
    return _as_planned(job, standing)


def _as_planned(job: ExportJob, standing: Mapping[str, Any]) -> ExportJob:
    try:
        planned = standing["plan"]
        columns = tuple(Column.parse(text) for text in planned["columns"])
        schema = decode_schema(planned["schema"])
        # Only what the probe decides may differ from this run's own plan.
        if [(c.name, c.selector) for c in columns] != [(c.name, c.selector) for c in job.columns]:
            raise ValueError("its columns are not those of the spec")
        if schema.names != job.schema.names:
            raise ValueError("its schema is not that of the spec")
        for name in ("batch_rows", "part_rows"):
            if type(planned[name]) is not int or planned[name] < 1:
                raise ValueError(f"{name} is {planned[name]!r}")
        return replace(
            job,
            columns=columns,
            schema=schema,
            batch_rows=planned["batch_rows"],
            part_rows=planned["part_rows"],
        )
    except (KeyError, TypeError, ValueError, pa.ArrowException) as exc:
        raise DamagedOutputError(
            f"{job.spec.output}/_spec.json does not hold the plan of this job: {exc!r}; remove "
            "that output, or choose another"
        ) from exc


def peek(job: ExportJob) -> ExportJob:
    """The job as `claim` would leave it, without writing anything."""
    standing = OutputStore(job.spec.output).standing_claim(_claim_document(job))
    return job if standing is None else _as_planned(job, standing)


def progress_of(job: ExportJob) -> Progress:
    """Which parts still lack a receipt, grouped into shards, and how much is done."""
    store = OutputStore(job.spec.output)
    receipts = store.receipts()
    parts = job.parts
    missing = [part for part in parts if part.index not in receipts]
    return Progress(
        shards=group_into_shards(missing, job.spec.execution.workers, job.pin.record_bytes),
        done_rows=sum(part.rows for part in parts) - sum(part.rows for part in missing),
        manifest=None if missing else _standing_manifest(job, store, receipts),
    )


def finished(job: ExportJob) -> dict[str, Any] | None:
    """The manifest of an output that is complete already; without one, no receipt is read."""
    if OutputStore(job.spec.output).read_manifest() is None:
        return None
    return progress_of(job).manifest


def _standing_manifest(
    job: ExportJob, store: OutputStore, receipts: Mapping[int, Receipt]
) -> dict[str, Any] | None:
    """The manifest of an output that is complete; None where only the commit is missing.

    Raises `DamagedOutputError` where the manifest, the receipts and the files disagree.
    """
    manifest = store.read_manifest()
    if manifest is None:
        return None
    expected = [receipts[part.index].to_dict() for part in job.parts]
    present = store.listing(DATA)
    lost = [entry["file"] for entry in expected if present.get(entry["file"]) != entry["bytes"]]
    if manifest.get("run_key") != job.run_key or manifest.get("files") != expected:
        fault = f"its {MANIFEST} does not agree with its receipts"
    elif lost:
        fault = f"{', '.join(lost[:3])} {'is' if len(lost) == 1 else 'are'} missing or cut short"
    elif not isinstance(manifest.get("totals"), dict):
        fault = f"its {MANIFEST} has no totals"
    else:
        return manifest
    raise DamagedOutputError(
        f"{store.uri} was complete, but {fault}; see `signal-batch verify`. To write it anew, "
        f"remove {MANIFEST} and the receipts of the parts concerned, and run the same command"
    )


def commit(job: ExportJob, *, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Check that every part is there, remove what no receipt names, write the manifest.

    Notes of who worked and what failed go last: until then they may be of use.

    Totals are rebuilt from the receipts. `run` is recorded as it is (for example the id of the
    flow run). Returns the manifest.
    """
    store = OutputStore(job.spec.output)
    receipts = store.receipts()
    present = store.listing(DATA)
    for part in job.parts:
        _check_receipt(job, part, receipts.get(part.index), present)
    ordered = [receipts[part.index] for part in job.parts]
    bad = sum(len(receipt.bad_ordinals) for receipt in ordered)
    if bad > job.bad_limit:
        raise CorruptDatasetError(
            f"{bad} of {len(job.selection)} records could not be read, more than the "
            f"{job.bad_limit} that max_bad_fraction={job.spec.max_bad_fraction:g} allows; "
            f"see {job.spec.output}/_quarantine or the receipts, then run again with a higher "
            "max_bad_fraction or a repaired dataset in another output folder"
        )
    store.remove_staged()
    store.remove_data(set(present) - {receipt.file for receipt in ordered})
    manifest = _manifest(job, ordered, dict(run or {}))
    store.write_manifest(manifest)
    remove_notes(store)
    return manifest


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}


def _claim_document(job: ExportJob) -> dict[str, Any]:
    return {
        "format": EXPORT_FORMAT,
        "format_version": SCHEMA_VERSION,
        "run_key": job.run_key,
        "identity": job.identity | {"where": list(job.spec.where)},
        "spec": job.spec.model_dump(mode="json"),
        "pin": job.pin.model_dump(mode="json"),
        "plan": {
            "columns": list(map(str, job.columns)),
            "schema": encode_schema(job.schema),
            "batch_rows": job.batch_rows,
            "part_rows": job.part_rows,
            "rows": len(job.selection),
            "parts": len(job.parts),
        },
        "versions": _versions(),
    }


def _check_receipt(
    job: ExportJob, part: Part, receipt: Receipt | None, present: Mapping[str, int]
) -> None:
    where = f"{job.spec.output}/_receipts/{part.name}.json"
    if receipt is None:
        raise DamagedOutputError(
            f"{part.name} has no receipt, so the output is not complete; run the same command "
            "again to finish it"
        )
    expected = (job.run_key, part.first_ordinal, part.last_ordinal, part.rows)
    found = (
        receipt.run_key,
        receipt.first_ordinal,
        receipt.last_ordinal,
        receipt.rows + len(receipt.bad_ordinals),
    )
    if expected != found:
        raise DamagedOutputError(
            f"{where} is of another plan: expected {expected}, found {found}; {AGAIN}"
        )
    if present.get(receipt.file) != receipt.bytes:
        raise DamagedOutputError(
            f"{where} names {receipt.file} with {receipt.bytes} bytes, but the output has "
            f"{present.get(receipt.file, 'no such file')}; remove the receipt and run the same "
            "command again to write the part anew"
        )


def _manifest(
    job: ExportJob, receipts: Sequence[Receipt], run: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "format": EXPORT_FORMAT,
        "format_version": SCHEMA_VERSION,
        "run_key": job.run_key,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": run,
        "pin": job.pin.model_dump(mode="json"),
        "identity": job.identity,
        "spec": job.spec.model_dump(mode="json"),
        "selection": {"digest": job.selection.digest(), "records": len(job.selection)},
        "schema": {field.name: str(field.type) for field in job.schema},
        "versions": _versions(),
        "files": [receipt.to_dict() for receipt in receipts],
        "totals": {
            "files": len(receipts),
            "rows": sum(receipt.rows for receipt in receipts),
            "bytes": sum(receipt.bytes for receipt in receipts),
            "bad": sum(len(receipt.bad_ordinals) for receipt in receipts),
            "logical_digest": digest([receipt.logical_digest for receipt in receipts]),
        },
    }
