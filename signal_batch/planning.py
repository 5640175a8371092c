"""From a spec to a planned export: pin, select, plan. Nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import signal_dataset as sds

from signal_batch import selection as filters
from signal_batch.arrow import arrow_schema, to_record_batch
from signal_batch.columns import Column
from signal_batch.errors import (
    MissingValueError,
    SpecError,
)
from signal_batch.export import UNREADABLE, array_columns
from signal_batch.features import compute, resolve_feature
from signal_batch.frozen import canonical_json, digest
from signal_batch.job import ExportJob
from signal_batch.pins import Pin, absolute_uri, pin_dataset, read_pin, reopen
from signal_batch.plan import rows_a_part
from signal_batch.reading import RecordReader, annotation_rows
from signal_batch.scheduling import refuse_unresolved
from signal_batch.selection import Selection
from signal_batch.specs import SCHEMA_VERSION, ExportSpec, JobSpec

#: A batch holds at most this much stored data, whatever `batch_size` says, to bound memory.
BATCH_BYTES = 32 << 20
#: Records read at planning, spread over the selection, to learn dtypes, shapes and row size.
PROBE_RECORDS = 64
PROBE_NEIGHBOURS = 8
_PROBE_BYTES = 64 << 20


def pin_inputs(spec: JobSpec) -> Pin:
    """Pin the dataset and the annotation sets that columns and filters read.

    With `spec.pin`, the pin of that file is proved to hold instead. A spec that still moves with
    the scheduled time is a `SpecError`.
    """
    refuse_unresolved(spec)
    wanted = spec.annotation_sets | filters.annotation_sets(
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
    reopen(found).close()
    return found


def select(spec: JobSpec, pin: Pin) -> Selection:
    """Resolve the filters to ordinals, reading metadata and annotation rows only."""
    conditions = [filters.parse_filter(text) for text in spec.where]
    if not conditions:
        chosen = Selection.all_of(pin.record_count)
    else:
        with closing(reopen(pin)) as pinned:
            blocks = _FilterReader(pinned.dataset)
            chosen = filters.resolve(pin.record_count, conditions, blocks)
    if not len(chosen):
        shown = " and ".join(spec.where) or "no filter: the dataset is empty"
        raise SpecError(f"no record of {pin.uri} is selected ({shown}); nothing to do")
    return chosen


def plan(spec: ExportSpec, pin: Pin, selection: Selection) -> ExportJob:
    """Fix dtypes, schema and parts from a probe of the selection; compute the run key.

    Raises what reading, the feature function or the schema raises on the probe.
    """
    feature = resolve_feature(spec.features, spec.feature_args)
    record_bytes = pin.record_bytes
    ordinals = probe_ordinals(selection, record_bytes)
    with closing(reopen(pin)) as pinned:
        reader = RecordReader(pinned.dataset, spec.columns, safe_decode=spec.execution.safe_decode)
        batch = _readable_probe(reader, ordinals, spec)
    columns = tuple(typed(column, batch) for column in spec.columns)
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


def prepare(spec: ExportSpec) -> ExportJob:
    """Pin, select and plan; nothing is written."""
    pinned = pin_inputs(spec)
    return plan(spec, pinned, select(spec, pinned))


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
        try:
            return list(reader.read(ordinals)[item.column.name])
        except MissingValueError as exc:
            selector = item.column.selector
            raise MissingValueError(
                f"filter {item.text!r}: {exc.problem} Give the filter a default, as in "
                f"{selector}?0, or put a filter before it that keeps such records away."
            ) from None


def probe_ordinals(selection: Selection, record_bytes: float) -> npt.NDArray[np.int64]:
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


def typed(column: Column, batch: Mapping[str, Any]) -> Column:
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
