"""One part: read its records, compute features, write one Parquet file, leave a receipt.

Reading, computing and writing overlap, each in a thread of its own, with a bound on the bytes
that wait in between.

The order of steps is what makes a crash harmless: the Parquet file is finished and hashed in
local temporary storage, put under a name that carries its hash, and only then the receipt is
written. Whoever dies in between leaves a file that no receipt names.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from signal_batch.arrow import to_record_batch
from signal_batch.batches import Batch
from signal_batch.columns import Column
from signal_batch.errors import CorruptDatasetError, MissingValueError, OutputError
from signal_batch.features import Feature, compute, resolve_feature
from signal_batch.frozen import canonical_json, checked
from signal_batch.iteration import batches_in_order, iterating
from signal_batch.parquet import PartFile, write_part
from signal_batch.pins import Pin
from signal_batch.plan import Part
from signal_batch.selection import Selection
from signal_batch.source import BatchFetcher
from signal_batch.specs import ExportSpec
from signal_batch.stages import overlapped
from signal_batch.store import OutputStore, Receipt

Progress = Callable[[int], None]
TEMPORARY = "signal-batch-part-"
UNREADABLE = (CorruptDatasetError, MissingValueError)

#: Bytes that wait between two steps of a worker: read but not computed, computed but not written.
WAITING_BYTES = 32 << 20
MOST_WAITING_BATCHES = 16


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """Everything a worker process needs for one shard, as plain JSON: no arrays, no pickles.

    `columns` are those of the spec with every dtype filled in, `runs` the ordinals of each part,
    `batch_rows` how many records are read at a time.
    """

    spec: ExportSpec
    pin: Pin
    run_key: str
    columns: tuple[Column, ...]
    schema: pa.Schema
    batch_rows: int
    bad_limit: int
    parts: tuple[Part, ...]
    runs: tuple[Selection, ...]

    @property
    def prefetch_batches(self) -> int:
        """Batches to read ahead, so that about `WAITING_BYTES` of stored records wait."""
        batch_bytes = self.batch_rows * self.pin.record_bytes
        return int(max(1, min(MOST_WAITING_BATCHES, WAITING_BYTES // batch_bytes)))

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": self.spec.model_dump(mode="json"),
            "pin": self.pin.model_dump(mode="json"),
            "run_key": self.run_key,
            "columns": list(map(str, self.columns)),
            "schema": encode_schema(self.schema),
            "batch_rows": self.batch_rows,
            "bad_limit": self.bad_limit,
            "parts": [
                {"index": part.index, "first": part.first, "runs": runs.runs.tolist()}
                for part, runs in zip(self.parts, self.runs, strict=True)
            ],
        }

    def first_after(self, part: Part) -> npt.NDArray[np.int64]:
        """The ordinal that the next part begins with, if there is a next one; int64 (0 or 1,)."""
        later = (
            runs
            for other, runs in zip(self.parts, self.runs, strict=True)
            if other.index > part.index
        )
        return np.array([runs.ordinal_at(0) for runs in islice(later, 1)], np.int64)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        runs = tuple(Selection(part["runs"]) for part in value["parts"])
        return cls(
            spec=checked(ExportSpec, value["spec"]),
            pin=checked(Pin, value["pin"]),
            run_key=value["run_key"],
            columns=tuple(Column.parse(text) for text in value["columns"]),
            schema=decode_schema(value["schema"]),
            batch_rows=value["batch_rows"],
            bad_limit=value["bad_limit"],
            parts=tuple(
                Part(
                    index=part["index"],
                    first=part["first"],
                    rows=len(selection),
                    first_ordinal=selection.ordinal_at(0),
                    last_ordinal=selection.ordinal_at(len(selection) - 1),
                )
                for part, selection in zip(value["parts"], runs, strict=True)
            ),
            runs=runs,
        )


class PartExporter:
    """Exports parts of one work order; opens the dataset once for all of them."""

    def __init__(self, order: WorkOrder) -> None:
        self._order = order
        self._store = OutputStore(order.spec.output)
        self._feature = resolve_feature(order.spec.features, order.spec.feature_args)
        self._fetch = BatchFetcher(
            order.pin, order.columns, safe_decode=order.spec.execution.safe_decode
        )
        # Opened only where there is something to set aside: reads metadata rows, not samples.
        self._identities = BatchFetcher(order.pin, ())

    def export(self, part: Part, selection: Selection, progress: Progress) -> Receipt:
        """Write one part and return the receipt that stands for it.

        `progress(rows)` is called after each batch. Raises whatever reading, the feature
        function or writing raises; an unreadable record only under `on_error="fail"` or past
        the ceiling.
        """
        order = self._order
        if (self._store.read_claim() or {}).get("run_key") != order.run_key:
            raise OutputError(
                f"{order.spec.output} no longer has the claim of this job; was it removed while "
                "the job ran? Remove what is left of it and run the same command again"
            )
        aside = _SetAside(order, part, self._identities)
        self._fetch.expect(np.append(selection.ordinals(), order.first_after(part)))
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{os.getpid()}-") as folder:
            local = Path(folder) / "part.parquet"
            computed = self._record_batches(selection, aside, progress)
            with overlapped(computed, attrgetter("nbytes"), WAITING_BYTES) as batches:
                written = write_part(
                    local,
                    batches,
                    part_schema(order.schema, part),
                    compression=order.spec.compression,
                    row_group_bytes=order.spec.row_group_bytes,
                )
            name = f"{part.name}-{written.sha256[:12]}.parquet"
            self._store.put_part(local, name)
        if aside.lines and order.spec.on_error == "quarantine":
            self._store.put_quarantine(part.name, aside.lines)
        receipt = self._store.add_receipt(_receipt(order.run_key, part, name, written, aside))
        if receipt.file != name:  # another attempt was first, and no receipt names our file
            self._store.remove_data([name])
        return receipt

    def _record_batches(
        self, selection: Selection, aside: _SetAside, progress: Progress
    ) -> Iterator[pa.RecordBatch]:
        order = self._order
        pipeline = batches_in_order(
            selection,
            _Tolerant(self._fetch, aside),
            order.batch_rows,
            prefetch_batches=order.prefetch_batches,
        )
        with iterating(pipeline) as batches:
            for batch, rows in batches:
                if batch is not None:
                    yield features_of(self._feature, batch, order.columns, order.schema)
                progress(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fetch.close()
        self._identities.close()


def sweep_temporary() -> None:
    """Remove the temporary folders that killed workers of this user left on this machine."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*-*"):
        owner = path.name.removeprefix(TEMPORARY).partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, OSError):
            continue


def features_of(
    feature: Feature, batch: Batch, columns: tuple[Column, ...], schema: pa.Schema
) -> pa.RecordBatch:
    """Compute a feature on a batch and hold the result against the fixed schema."""
    return to_record_batch(compute(feature, batch, array_columns(columns)), schema)


def array_columns(columns: tuple[Column, ...]) -> tuple[str, ...]:
    """Names of the columns that hold tensors, which only the feature function sees."""
    return tuple(column.name for column in columns if column.selector.is_array)


def part_schema(schema: pa.Schema, part: Part) -> pa.Schema:
    """The schema with the part's ordinal range in the file's key-value metadata."""
    ordinals = canonical_json([part.first_ordinal, part.last_ordinal])
    return schema.with_metadata({**(schema.metadata or {}), b"signal_batch.ordinals": ordinals})


def encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


class _SetAside:
    """The unreadable records of one part, and the limit beyond which they are an error."""

    def __init__(self, order: WorkOrder, part: Part, identities: BatchFetcher) -> None:
        self.lines: list[dict[str, Any]] = []
        self._identities = identities
        self.fails = order.spec.on_error == "fail"
        self._limit = order.bad_limit
        self._part = part

    def add(self, ordinal: int, exc: Exception) -> None:
        if self.fails:
            raise exc
        self.lines.append(
            {
                "ordinal": ordinal,
                "id": self._id_of(ordinal),
                "error": type(exc).__name__,
                "message": str(exc),
            }
        )
        if len(self.lines) > self._limit:
            raise CorruptDatasetError(
                f"{len(self.lines)} records of {self._part.name} alone cannot be read, more than "
                f"the {self._limit} that max_bad_fraction allows in all; the last one: {exc}",
                ordinal=ordinal,
            ) from exc

    def _id_of(self, ordinal: int) -> str | None:
        try:
            return str(self._identities([ordinal])["id"][0])
        except UNREADABLE:
            return None


class _Tolerant:
    """Reads a batch; where that fails, reads its records one by one and sets aside the bad.

    Yields `(batch or None, records asked for)`, so progress counts what was set aside too.
    """

    def __init__(self, fetch: BatchFetcher, aside: _SetAside) -> None:
        self._fetch = fetch
        self._aside = aside

    def __call__(self, ordinals: npt.NDArray[np.int64]) -> tuple[Batch | None, int]:
        try:
            return self._fetch(ordinals), len(ordinals)
        except UNREADABLE:
            if self._aside.fails:
                raise
        good = [ordinal for ordinal in ordinals.tolist() if self._readable(ordinal)]
        return (self._fetch(good) if good else None), len(ordinals)

    def _readable(self, ordinal: int) -> bool:
        try:
            self._fetch([ordinal])
        except UNREADABLE as exc:
            self._aside.add(ordinal, exc)
            return False
        return True


def _receipt(run_key: str, part: Part, name: str, written: PartFile, aside: _SetAside) -> Receipt:
    return Receipt(
        run_key=run_key,
        part=part.index,
        first_ordinal=part.first_ordinal,
        last_ordinal=part.last_ordinal,
        rows=written.rows,
        bytes=written.file_bytes,
        file=name,
        sha256=written.sha256,
        logical_digest=written.logical_digest,
        bad_ordinals=tuple(sorted(line["ordinal"] for line in aside.lines)),
    )
