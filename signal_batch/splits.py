"""Looking over the selected records once, without samples: sides, classes and lengths.

A record's side follows from its key and the split alone, by a hash of the key or by its value, so
records that are added later never move one that was there, and records that share a key are
never on two sides. Sides are made on ordinals before any shuffle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import signal_dataset as sds

from signal_batch.batches import Ints
from signal_batch.columns import Column
from signal_batch.errors import SpecError
from signal_batch.frozen import canonical_json
from signal_batch.reading import MetadataRow, RecordReader, metadata_rows
from signal_batch.selection import Selection
from signal_batch.training import Label
from signal_batch.training_spec import SIDES, Split

_KEY = Column.parse("split_key=id")
_UNUSED = len(SIDES)
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Side:
    """The records of one side, how many scenes they are of, and how many there are of a class."""

    selection: Selection
    scenes: int
    counts: Mapping[Label, int]

    def to_json(self) -> dict[str, Any]:
        counts = {str(label): self.counts[label] for label in sorted(self.counts, key=_order_of)}
        return {"records": len(self.selection), "scenes": self.scenes, "classes": counts}


@dataclass(frozen=True, slots=True)
class Survey:
    """What a pass over metadata and annotation rows found.

    `lengths` holds, for each tensor column of the records themselves, the size of its last axis
    at every position of the selection (int32), -1 where a record has no such axis.
    """

    selection: Selection
    sides: Mapping[str, Side]
    unused: int
    shared_scenes: int
    classes: tuple[Label, ...]
    lengths: Mapping[str, npt.NDArray[np.int32]]

    def lengths_of(self, column: str, side: str) -> npt.NDArray[np.int32]:
        """The lengths of a column at every position of one side."""
        chosen = self.sides[side].selection.ordinals()
        return self.lengths[column][np.searchsorted(self.selection.ordinals(), chosen)]

    def to_json(self) -> dict[str, Any]:
        return {
            "sides": {name: side.to_json() for name, side in self.sides.items()},
            "unused": self.unused,
            "shared_scenes": self.shared_scenes,
        }


def side_of(split: Split, key: Any) -> str | None:
    """The side that a record with this key falls on; None for one that is left out.

    A share: SHA-256 over the canonical JSON of [seed, key], its first 8 bytes taken as a number
    in [0, 1), is below `test`, or below `test + validation`.
    """
    if split.by_value:
        return _side_by_value(split, key)
    hashed = sha256(canonical_json([split.seed, key])).digest()
    place = int.from_bytes(hashed[:8], "big") / 2**64
    test, validation = float(split.test or 0), float(split.validation or 0)  # type: ignore[arg-type]
    if place < test:
        return "test"
    return "validation" if place < test + validation else "train"


def _side_by_value(split: Split, key: Any) -> str | None:
    for side in ("test", "validation"):
        values = getattr(split, side)
        if isinstance(values, tuple) and any(_same(key, value) for value in values):
            return side
    if split.train is None or any(_same(key, value) for value in split.train):
        return "train"
    return None


def _same(key: Any, value: Any) -> bool:
    return isinstance(key, bool) == isinstance(value, bool) and bool(key == value)


def survey(
    dataset: sds.Dataset,
    selection: Selection,
    split: Split,
    columns: Sequence[Column],
    target: str | None,
) -> Survey:
    """Read keys, scenes, labels and shapes of the selected records, but no samples.

    Raises `SpecError` where a side would be empty or a record has no key, `MissingValueError`
    where a record lacks a value.
    """
    label = next((c for c in columns if c.name == target and not c.selector.is_array), None)
    looked_up = _LookedUp(dataset, selection, split, columns, label)
    codes = np.empty(len(selection), np.int8)
    counts: list[Counter[Label]] = [Counter() for _ in range(_UNUSED + 1)]
    scenes: list[set[str]] = [set() for _ in range(_UNUSED + 1)]
    known: dict[tuple[type, Any], int] = {}
    for first in range(0, len(selection), _BLOCK):
        part = selection.slice(first, _BLOCK).ordinals()
        for place, (key, scene, value) in enumerate(looked_up.block(first, part)):
            kind = type(key)  # True and 1 are two keys
            code = known.get((kind, key))
            if code is None:
                code = known[kind, key] = _code(side_of(split, key))
            codes[first + place] = code
            if value is not None:
                counts[code][value] += 1
            if scene is not None:
                scenes[code].add(scene)
    ordinals = selection.ordinals()
    sides = {
        name: Side(Selection.of(ordinals[codes == code]), len(scenes[code]), dict(counts[code]))
        for code, name in enumerate(SIDES)
    }
    _check_sides(sides, split)
    found: set[Label] = {item for side in sides.values() for item in side.counts}
    return Survey(
        selection=selection,
        sides=sides,
        unused=int((codes == _UNUSED).sum()),
        shared_scenes=_shared(scenes[:_UNUSED]),
        classes=tuple(sorted(found, key=_order_of)),
        lengths=looked_up.lengths,
    )


class _LookedUp:
    """Reads the value columns of a block of records, and the lengths of their tensors."""

    def __init__(
        self,
        dataset: sds.Dataset,
        selection: Selection,
        split: Split,
        columns: Sequence[Column],
        label: Column | None,
    ) -> None:
        self._dataset = dataset
        self._split = split
        self._label = label
        self._tensors = [column for column in columns if column.selector.source == "field"]
        self.lengths = {c.name: np.full(len(selection), -1, np.int32) for c in self._tensors}
        key = _KEY.model_copy(update={"selector": split.by})
        self._reader = RecordReader(dataset, [key, *([label] if label else [])])

    def block(self, first: int, ordinals: Ints) -> list[tuple[Any, str | None, Label | None]]:
        rows = metadata_rows(self._dataset, ordinals)
        for column in self._tensors:
            into = self.lengths[column.name]
            into[first : first + len(rows)] = [_length(row, column) for row in rows]
        values = self._reader.read(ordinals)
        keys = _plain(values[_KEY.name])
        if self._split.by.source == "scene" and not self._split.is_trivial and None in keys:
            ordinal = int(ordinals[keys.index(None)])
            raise SpecError(
                f"record {ordinal} belongs to no scene, so a split by scene cannot place it; "
                "split by id, or by a metadata value that every record has"
            )
        labels = [None] * len(rows) if self._label is None else _labels(values[self._label.name])
        return list(zip(keys, (row.scene for row in rows), labels, strict=True))


def _length(row: MetadataRow, column: Column) -> int:
    spec = row.fields.get(str(column.selector.path))
    return int(spec[1][-1]) if spec is not None and len(spec[1]) else -1


def _plain(values: Any) -> list[Any]:
    """Values as Python objects; whole floats as integers, so that 3.0 and 3 are one key."""
    plain = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return [int(v) if isinstance(v, float) and v.is_integer() else v for v in plain]


def _labels(values: Any) -> list[Label | None]:
    """The classes of a target column; floats are no classes."""
    if values.dtype.kind == "f":
        return [None] * len(values)
    return list(values.tolist())


def _order_of(label: Label) -> tuple[str, Any]:
    return ("text", label) if isinstance(label, str) else ("number", label)


def _code(side: str | None) -> int:
    return _UNUSED if side is None else SIDES.index(side)


def _shared(scenes: Sequence[set[str]]) -> int:
    """How many scenes have records on more than one side."""
    counts = Counter(scene for side in scenes for scene in side)
    return sum(1 for count in counts.values() if count > 1)


def _check_sides(sides: Mapping[str, Side], split: Split) -> None:
    if not len(sides["train"].selection):
        raise SpecError(f"split '{split}' leaves no record to train on")
    for name in ("test", "validation"):
        if getattr(split, name) and not len(sides[name].selection):
            raise SpecError(f"split '{split}' puts no record on the {name} side")
