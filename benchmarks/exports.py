"""Exporting a feature of every record to Parquet: the contenders, `signal_batch` aside.

Each is a context manager over a task that gives `export(first, stop, path)`: it writes the rows
of the records `[first, stop)`, with `ordinal`, `id` and the feature's columns, zstd-compressed.
What a contender needs is imported inside it, so that its memory is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.settings import BATCH

Export = Callable[[int, int, Path], None]
Task = dict[str, Any]
#: What `signal_batch export` reads at a time: 256 records, and no more than 32 MiB.
_CHUNK_RECORDS = 256
_CHUNK_BYTES = 32 << 20
_ROW_GROUP_BYTES = 16 << 20


@contextmanager
def _guide(task: Task) -> Iterator[Export]:
    """The documented per-record pipeline, in order, feeding SciPy and a ParquetWriter."""
    import grain
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from scipy import signal

    from benchmarks.guide import CaptureSource, batches_of, identified

    captures = grain.MapDataset.source(CaptureSource(task["dataset"], identified))
    nperseg = task["feature_args"]["nperseg"]

    def export(first: int, stop: int, path: Path) -> None:
        writer = None
        for batch in batches_of(captures[first:stop], BATCH):
            _, power = signal.welch(
                batch["samples"], nperseg=nperseg, detrend=False, return_onesided=False
            )
            values = fixed_lists(power.astype(np.float32))
            table = pa.table(
                {"ordinal": batch["ordinal"], "id": batch["id"], "power_spectrum": values}
            )
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
        if writer is not None:
            writer.close()

    yield export


@contextmanager
def _pandas_lists(task: Task) -> Iterator[Export]:
    """The first thing one would write: rows of Python lists, then a data frame."""
    import itertools

    import numpy as np
    import pandas as pd
    import signal_dataset as sds
    from scipy import signal

    dataset = sds.open(task["dataset"])
    nperseg = task["feature_args"]["nperseg"]

    def export(first: int, stop: int, path: Path) -> None:
        rows = []
        for ordinal, record in enumerate(itertools.islice(dataset.iter_records(), stop)):
            _, power = signal.welch(
                record["samples"].data, nperseg=nperseg, detrend=False, return_onesided=False
            )
            spectrum = power.astype(np.float32).tolist()
            rows.append({"ordinal": ordinal, "id": record.id, "power_spectrum": spectrum})
        pd.DataFrame(rows[first:]).to_parquet(path, compression="zstd")

    yield export


@contextmanager
def _limit_loop(task: Task) -> Iterator[Export]:
    """What the machine allows: the same reading, arithmetic and writing, and nothing else.

    One straight line with no check, no digest, no receipt; the arithmetic is the very function
    that `signal_batch` calls.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from benchmarks.raw import RawShards, record_id, stacked
    from signal_batch.built_ins import BUILT_IN

    compute, _ = BUILT_IN[task["feature"]]
    shape = tuple(task["shape"])
    chunk = min(_CHUNK_RECORDS, _CHUNK_BYTES // task["record_bytes"])

    with RawShards(task["dataset"]) as shards:

        def export(first: int, stop: int, path: Path) -> None:
            writer = None
            pending: list[pa.Table] = []
            size = 0
            for start in range(first, stop, chunk):
                ordinals = list(range(start, min(start + chunk, stop)))
                payloads = shards.read(ordinals)
                features = compute({"samples": stacked(payloads, shape)}, **task["feature_args"])
                columns = {"ordinal": pa.array(ordinals), "id": list(map(record_id, payloads))}
                columns |= {name: fixed_lists(value) for name, value in features.items()}
                table = pa.table(columns)
                writer = writer or pq.ParquetWriter(
                    path, table.schema, compression="zstd", use_dictionary=["id"]
                )
                pending.append(table)
                size += table.nbytes
                if size >= _ROW_GROUP_BYTES:
                    writer.write_table(pa.concat_tables(pending))
                    pending, size = [], 0
            if writer is not None:
                if pending:
                    writer.write_table(pa.concat_tables(pending))
                writer.close()

        yield export


def fixed_lists(values: Any) -> Any:
    """An array (records, ...) as fixed-size lists within each other, complex as pairs."""
    import numpy as np
    import pyarrow as pa

    if values.dtype.kind == "c":
        values = np.ascontiguousarray(values).view(values.real.dtype).reshape(*values.shape, 2)
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def contender(name: str) -> Callable[[Task], AbstractContextManager[Export]]:
    """The contender of a name; those that need an extra live in `benchmarks.others`."""
    known = {"guide": _guide, "pandas lists": _pandas_lists, "limit loop": _limit_loop}
    if name in known:
        return known[name]
    from benchmarks import others

    return others.EXPORTS[name]


#: Contenders that go record by record and are given fewer of them.
SLOW = frozenset(("guide", "pandas lists", "Ray Data", "HF datasets"))
#: Modules without which a contender is left out.
NEEDS = {"pandas lists": "pandas", "Ray Data": "ray", "HF datasets": "datasets"}
