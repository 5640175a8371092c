"""The steps of an export: pin, select, plan, claim, commit.

Each step is one call with plain arguments, so that a notebook, `signal_batch.runner` and a
Prefect flow make the same ones. Nothing is written before `claim`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import signal_dataset as sds

from signal_batch import selection as filters
from signal_batch.arrow import arrow_schema, to_record_batch
from signal_batch.errors import (
    CorruptDatasetError,
    DamagedOutputError,
    SpecError,
)
from signal_batch.export import UNREADABLE, WorkOrder, array_columns, decode_schema, encode_schema
from signal_batch.features import compute, resolve_feature
from signal_batch.pins import Pin, absolute_uri, pin_dataset, read_pin, reopen
from signal_batch.plan import Part, Shard, group_into_shards, plan_parts, rows_a_part
from signal_batch.reading import RecordReader, annotation_rows
from signal_batch.selection import Selection
from signal_batch.specs import (
    SCHEMA_VERSION,
    Column,
    ExportSpec,
    annotation_sets,
    canonical_json,
    digest,
)
from signal_batch.store import OutputStore, Receipt

FORMAT = "signal-batch.export"
#: A batch holds at most this much stored data, whatever `batch_size` says, to bound memory.
BATCH_BYTES = 32 << 20
#: Records read at planning, spread over the selection, to learn dtypes, shapes and row size.
PROBE_RECORDS = 64
PROBE_NEIGHBOURS = 8
_PROBE_BYTES = 64 << 20
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
        """The work order for one shard."""
        return WorkOrder(
            spec=self.spec,
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


# --- the steps -----------------------------------------------------------------------------


def pin_inputs(spec: ExportSpec) -> Pin:
    """Pin the dataset and the annotation sets that columns and filters read.

    With `spec.pin`, the pin of that file is proved to hold instead.
    """
    wanted = set(annotation_sets(spec.columns)) | filters.annotation_sets(
        filters.parse_filter(text) for text in spec.where
    )
    if spec.pin is None:
        return pin_dataset(spec.dataset, sorted(wanted)).pin
    found = read_pin(spec.pin)
    if found.uri != absolute_uri(spec.dataset):
        found = found.model_copy(update={"uri": absolute_uri(spec.dataset)})
    if missing := wanted - {item.name for item in found.annotations}:
        raise SpecError(
            f"{spec.pin} does not pin annotation set {', '.join(sorted(missing))}, which the "
            "columns or filters read"
        )
    reopened = reopen(found)
    reopened.close()
    return found


def select(spec: ExportSpec, pin: Pin) -> Selection:
    """Resolve the filters to ordinals, reading metadata and annotation rows only."""
    conditions = [filters.parse_filter(text) for text in spec.where]
    if not conditions:
        chosen = Selection.all_of(pin.record_count)
    else:
        pinned = reopen(pin)
        try:
            blocks = _FilterReader(pinned.dataset)
            chosen = filters.resolve(pin.record_count, conditions, blocks)
        finally:
            pinned.close()
    if not len(chosen):
        shown = " and ".join(spec.where) or "no filter: the dataset is empty"
        raise SpecError(f"no record of {pin.uri} is selected ({shown}); nothing to export")
    return chosen


def plan(spec: ExportSpec, pin: Pin, selection: Selection) -> ExportJob:
    """Fix dtypes, schema and parts from a probe of the selection; compute the run key.

    Raises what reading, the feature function or the schema raises on the probe.
    """
    feature = resolve_feature(spec.features, spec.feature_args)
    record_bytes = pin.record_bytes
    ordinals = _probe_ordinals(selection, record_bytes)
    pinned = reopen(pin)
    try:
        reader = RecordReader(pinned.dataset, spec.columns, safe_decode=spec.execution.safe_decode)
        batch = _readable_probe(reader, ordinals, spec)
    finally:
        pinned.close()
    columns = tuple(_typed(column, batch) for column in spec.columns)
    computed = compute(feature, batch, array_columns(columns))
    identity = {
        "schema_version": SCHEMA_VERSION,
        "data": pin.identity(),
        "selection": selection.digest(),
        "spec": spec.identity(),
        "feature_source": feature.source_sha256,
    }
    run_key = digest(identity)
    schema = arrow_schema(
        computed,
        tensors=spec.tensors,
        ragged=spec.ragged,
        metadata=_file_metadata(spec, pin, run_key),
    )
    row_bytes = to_record_batch(computed, schema).nbytes / max(1, len(computed["ordinal"]))
    batch_rows = max(1, min(spec.batch_size, int(BATCH_BYTES // record_bytes)))
    return ExportJob(
        spec=spec,
        pin=pin,
        selection=selection,
        columns=columns,
        schema=schema,
        identity=identity,
        run_key=run_key,
        batch_rows=batch_rows,
        part_rows=rows_a_part(
            selected=len(selection),
            part_bytes=spec.part_bytes,
            row_bytes=row_bytes,
            record_bytes=record_bytes,
            batch_rows=batch_rows,
        ),
        row_bytes=row_bytes,
    )


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
        return replace(
            job,
            columns=tuple(Column.parse(text) for text in planned["columns"]),
            schema=decode_schema(planned["schema"]),
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
        manifest=None if missing else store.read_manifest(),
    )


def commit(job: ExportJob, *, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Check that every part is there, remove what no receipt names, write the manifest.

    Totals are rebuilt from the receipts. `run` is recorded as it is (for example the id of the
    flow run). Returns the manifest.
    """
    store = OutputStore(job.spec.output)
    receipts = store.receipts()
    present = store.listing("data")
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
    store.remove_data(set(present) - {receipt.file for receipt in ordered})
    manifest = _manifest(job, ordered, dict(run or {}))
    store.write_manifest(manifest)
    return manifest


def prepare(spec: ExportSpec) -> ExportJob:
    """Pin, select and plan; nothing is written."""
    pinned = pin_inputs(spec)
    return plan(spec, pinned, select(spec, pinned))


# --- details -------------------------------------------------------------------------------


class _FilterReader:
    """Reads what a filter tests, for a block of ordinals."""

    def __init__(self, dataset: sds.Dataset) -> None:
        self._dataset = dataset
        self._readers: dict[str, RecordReader] = {}

    def __call__(self, ordinals: npt.NDArray[np.int64], item: filters.Filter) -> Sequence[Any]:
        if item.status_of is not None:
            rows = annotation_rows(self._dataset, item.status_of, ordinals)
            return [status for status, _ in rows]
        assert item.column is not None
        reader = self._readers.get(item.text)
        if reader is None:
            reader = self._readers[item.text] = RecordReader(self._dataset, (item.column,))
        return list(reader.read(ordinals)[item.column.name])


def _probe_ordinals(selection: Selection, record_bytes: float) -> npt.NDArray[np.int64]:
    """A few runs of neighbours, spread evenly: many records, but of few shards."""
    count = int(max(1, min(len(selection), PROBE_RECORDS, _PROBE_BYTES // record_bytes)))
    runs = -(-count // PROBE_NEIGHBOURS)
    last = max(0, len(selection) - PROBE_NEIGHBOURS)
    starts = np.linspace(0, last, runs).astype(np.int64)
    positions = (starts[:, None] + np.arange(PROBE_NEIGHBOURS)).ravel()
    return selection.ordinals_at(np.unique(positions[positions < len(selection)]))


def _readable_probe(
    reader: RecordReader, ordinals: npt.NDArray[np.int64], spec: ExportSpec
) -> dict[str, Any]:
    """The probe without the records that cannot be read, where the spec puts up with those."""
    try:
        return reader.read(ordinals)
    except UNREADABLE as exc:
        if spec.on_error == "fail":
            raise
        first = exc
    good = []
    for ordinal in ordinals:
        try:
            reader.read(np.array([ordinal]))
        except UNREADABLE:
            continue
        good.append(ordinal)
    if not good:
        raise first
    return reader.read(np.array(good))


def _typed(column: Column, batch: Mapping[str, Any]) -> Column:
    """The column with the dtype that the probe showed, so that later batches agree with it."""
    selector = column.selector
    if column.dtype is not None or selector.is_array or selector.path is None:
        return column
    values = np.asarray(batch[column.name])
    dtype = "str" if values.dtype == object else values.dtype.name
    return column.model_copy(update={"dtype": dtype})


def _file_metadata(spec: ExportSpec, pin: Pin, run_key: str) -> dict[str, str]:
    """Key-value metadata of every file; the part adds its ordinal range."""
    return {
        "signal_batch.run_key": run_key,
        "signal_batch.fingerprint": pin.fingerprint,
        "signal_batch.annotations": canonical_json(pin.identity()["annotations"]).decode(),
        "signal_batch.spec": canonical_json(spec.identity() | {"where": list(spec.where)}).decode(),
    }


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}


def _claim_document(job: ExportJob) -> dict[str, Any]:
    return {
        "format": FORMAT,
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
        raise DamagedOutputError(f"{where} is of another plan: expected {expected}, found {found}")
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
        "format": FORMAT,
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
