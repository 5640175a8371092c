"""How records of different lengths come into one batch: padded, cropped, or in buckets.

The length of a record is its last axis. Padding is zeros at the end, and a mask `NAME_mask`, bool
(records, length), says what is real. Cropping keeps the middle; what is shorter is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from signal_batch.batches import Array, Batch, Values, ordinal_range
from signal_batch.errors import FeatureError

MASK = "_mask"

#: What a spec that says nothing about lengths is told when records differ.
CHOICES = (
    "pad (zeros up to the longest, with a mask), crop (the middle of each, length as long as you "
    "say, by default the shortest) or bucket (batches of similar lengths, padded, with a mask)"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The policy of a run, with every number filled in.

    `columns` are those that are brought to one length: to `length`, or to the limit of the
    smallest of `buckets` that holds the longest record of a batch.
    """

    policy: str = "equal"
    columns: tuple[str, ...] = ()
    length: int | None = None
    buckets: tuple[int, ...] = ()
    masked: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "columns": list(self.columns),
            "length": self.length,
            "buckets": list(self.buckets),
            "masked": self.masked,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Lengths:
        return cls(
            policy=value["policy"],
            columns=tuple(value["columns"]),
            length=value["length"],
            buckets=tuple(value["buckets"]),
            masked=value["masked"],
        )

    def __call__(self, batch: Batch) -> dict[str, Array]:
        """The batch with every value one array.

        Raises `FeatureError`, naming the ordinals, where records still differ, or one is longer
        than the plan allows.
        """
        fitted: dict[str, Array] = {}
        for name, values in batch.items():
            if name in self.columns:
                fitted |= self._fit(name, values, batch)
            elif isinstance(values, list):
                shapes = sorted({value.shape for value in values})
                raise FeatureError(
                    f"{ordinal_range(batch)}: column {name!r} has records of different shapes "
                    f"({shapes[0]} and {shapes[-1]}), which the records seen at planning had not"
                )
            else:
                fitted[name] = values
        return fitted

    def _fit(self, name: str, values: Values, batch: Batch) -> dict[str, Array]:
        lengths = np.array([value.shape[-1] for value in values], np.int64)
        length = self._length_for(int(lengths.max(initial=0)), name, batch)
        first = values[0]
        fitted = np.zeros((len(values), *first.shape[:-1], length), first.dtype)
        for row, value in zip(fitted, values, strict=True):
            if value.shape[:-1] != first.shape[:-1]:
                raise FeatureError(
                    f"{ordinal_range(batch)}: column {name!r} has records of {first.shape} and "
                    f"{value.shape}; only the last axis may differ"
                )
            cut = middle(value, length)
            row[..., : cut.shape[-1]] = cut
        if not self.masked:
            return {name: fitted}
        return {name: fitted, name + MASK: np.arange(length) < lengths[:, None]}

    def _length_for(self, longest: int, name: str, batch: Batch) -> int:
        if self.policy == "crop":
            assert self.length is not None
            return self.length
        limits = self.buckets if self.policy == "bucket" else (self.length or 0,)
        for limit in limits:
            if longest <= limit:
                return limit
        raise FeatureError(
            f"{ordinal_range(batch)}: a record of {longest} samples in column {name!r} is longer "
            f"than the {limits[-1]} that the run was planned for; give a larger length, or "
            "lengths=crop"
        )


def middle(value: Array, length: int) -> Array:
    """The middle `length` samples of the last axis; all of it if it has no more."""
    start = max(0, (value.shape[-1] - length) // 2)
    return value[..., start : start + length]
