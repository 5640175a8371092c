"""A picture of what an export made: the features of its first records."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from signal_batch.arrow import to_numpy
from signal_batch.columns import RESERVED_COLUMNS
from signal_batch.errors import SignalBatchError
from signal_batch.pictures import draw_lines, draw_map, drawing
from signal_batch.store import DATA, OutputStore

#: Records whose values are drawn, and values of one axis.
_RECORDS = 4
_MOST_VALUES = 256


def preview(output: str, manifest: Mapping[str, Any]) -> tuple[str, str] | None:
    """An SVG of a feature of the first records as a `data:` URI, and a line that says what it is.

    Vectors are drawn as lines, one a record; matrices as a map of the first record. None where
    the output holds no such feature, or cannot be read now: a preview is never worth a failure.
    """
    with suppress(SignalBatchError, OSError, pa.ArrowException, ValueError):
        found = _first_records(output, manifest)
        for name, values in found.items():
            if name not in RESERVED_COLUMNS and _can_be_drawn(values):
                return _drawn(name, values, found["ordinal"])
    return None


def _first_records(output: str, manifest: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of the columns of fixed shape, at most `_RECORDS` rows of each."""
    file = next(item["file"] for item in manifest["files"] if item["rows"])
    with OutputStore(output).open(f"{DATA}/{file}") as stream, pq.ParquetFile(stream) as parquet:
        batch = next(parquet.iter_batches(batch_size=_RECORDS))
    found = to_numpy(batch)
    return {name: values for name, values in found.items() if isinstance(values, np.ndarray)}


def _can_be_drawn(values: npt.NDArray[Any]) -> bool:
    return values.ndim >= 2 and values.dtype.kind in "fiu" and values.size > 0


def _drawn(name: str, values: npt.NDArray[Any], ordinals: npt.NDArray[Any]) -> tuple[str, str]:
    # Leading axes beyond a matrix are channels or the like: the first one stands for all.
    while values.ndim > 3:
        values = values[:, 0]
    shape = " x ".join(map(str, values.shape[1:]))
    with drawing():
        if values.ndim == 3 and min(values.shape[1:]) > 8:
            step = [max(1, -(-size // _MOST_VALUES)) for size in values.shape[1:]]
            picture = draw_map(name, values[0, :: step[0], :: step[1]])
            return picture, f"{name} ({shape}) of record {ordinals[0]}"
        lines = values[:, 0] if values.ndim == 3 else values
        lines = lines[:, :: max(1, -(-lines.shape[1] // _MOST_VALUES))]
        channel = ", first channel" if values.ndim == 3 else ""
        picture = draw_lines(name, lines, [f"record {ordinal}" for ordinal in ordinals])
        return picture, f"{name} ({shape}{channel}) of the first {len(lines)} records"
