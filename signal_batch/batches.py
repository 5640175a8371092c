"""What passes between reading, features and Parquet: a batch of named columns.

Every value has a leading record axis, as an ndarray of shape (B, ...) or, where records differ in
shape, as a list of B ndarrays. Text columns are object arrays of `str` or `None`. `ordinal`
(int64) and `id` (text) are always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Values: TypeAlias = Array | list[Array]
Batch: TypeAlias = dict[str, Values]

Ints: TypeAlias = NDArray[np.int64]

#: dtypes that a feature function may return, besides text.
SUPPORTED_DTYPES = tuple(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64"),
    )
)


def ordinal_range(batch: Mapping[str, Values]) -> str:
    """The records of a batch as people write them: `ordinals 0-255`, `ordinal 7`."""
    ordinals = batch["ordinal"]
    if len(ordinals) == 0:
        return "no records"
    if len(ordinals) == 1:
        return f"ordinal {ordinals[0]}"
    return f"ordinals {ordinals[0]}-{ordinals[-1]}"
