"""The chain of steps between a record read from a dataset and a model.

A step is a built-in name or `package.module:function`. Its second parameter tells its kind:

- `rng`: called for each record, `f(record, rng, **options)` returns a record, a dict of values
  without the record axis;
- `rngs`: called for each batch, `f(batch, rngs, **options)` returns a batch, with a sequence of
  one generator for each record;
- neither: a feature function, `f(batch, **options)`, whose columns replace the arrays of the
  batch, as in an export.

In training the random stream of a record follows from the seed and its place in the global order
alone, in evaluation from the seed and its ordinal. Steps take from it in their order, so what a
record becomes does not depend on the records that it shares a batch with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from signal_batch import augmentations, built_ins
from signal_batch.augmentations import Record
from signal_batch.batches import Batch, Values, ordinal_range
from signal_batch.errors import FeatureError, SpecError
from signal_batch.features import Feature, checked_column, compute, own, resolve_feature
from signal_batch.frozen import digest
from signal_batch.iteration import rng_at
from signal_batch.references import (
    call,
    check_options,
    is_reference,
    load,
    parameters_of,
    read_only,
    unknown_built_in,
)
from signal_batch.statistics import Statistics, is_measurable
from signal_batch.training_spec import Transform

Kind: TypeAlias = Literal["record", "batch", "feature", "normalize"]

#: What a step must hand on as it came.
IDENTITY = ("ordinal", "id", "position")
NORMALIZE = "normalize"
BUILT_IN = (*augmentations.BUILT_IN, NORMALIZE, *built_ins.BUILT_IN)

_NORMALIZE_VERSION = 1
#: Keys from here on are of records in evaluation: no place in the global order is so far.
_EVALUATION = 1 << 63


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a chain; `random` is False where no generator needs to be made for it."""

    name: str
    kind: Kind
    function: Callable[..., Any]
    options: Mapping[str, Any]
    source_sha256: str
    training_only: bool = False
    random: bool = True
    feature: Feature | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is a function that a person brought."""
        return is_reference(self.name)


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps in order, ready to be called on batches, from several threads at once.

    `array_columns` are the tensors of the batches that it is given. Without `statistics` the
    step `normalize` leaves values as they are.
    """

    steps: tuple[Step, ...]
    seed: int
    array_columns: tuple[str, ...]
    statistics: Statistics | None = None

    @property
    def source_sha256(self) -> list[str]:
        """Each step's part of the run key, without its options; see `Feature.source_sha256`."""
        return [step.source_sha256 for step in self.steps]

    @property
    def needs_statistics(self) -> bool:
        """Whether there is a `normalize` among the steps."""
        return any(step.kind == "normalize" for step in self.steps)

    def until_statistics(self) -> Chain:
        """The steps before `normalize`: in evaluation, what the statistics are measured of."""
        names = [step.name for step in self.steps]
        stop = names.index(NORMALIZE) if NORMALIZE in names else len(names)
        return replace(self, steps=self.steps[:stop], statistics=None)

    def measured_columns(self, batch: Batch) -> tuple[str, ...]:
        """The columns whose statistics `normalize` needs, found by running a batch up to it.

        Raises `SpecError` where it names a column that it cannot work on.
        """
        step = next((step for step in self.steps if step.kind == "normalize"), None)
        if step is None:
            return ()
        result, arrays = self.until_statistics()._run(batch, training=False)
        return tuple(_normalizable(step, result, arrays))

    def array_columns_after(self, batch: Batch, *, training: bool = False) -> tuple[str, ...]:
        """The tensors of the result, found by running a batch.

        A column of a feature counts even where it is one number a record; a value that another
        step adds does only where it has an axis.
        """
        return self._run(batch, training=training)[1]

    def __call__(self, batch: Batch, *, training: bool) -> Batch:
        """The batch after all steps; in evaluation, without those for training only.

        A batch in training needs the column `position`. Values are stacked wherever the shapes
        of its records agree.

        Raises:
            SpecError: a step cannot do what its options ask for.
            FeatureError: a step failed or returned what does not fit, with the ordinals.
        """
        return self._run(batch, training=training)[0]

    def _run(self, batch: Batch, *, training: bool) -> tuple[Batch, tuple[str, ...]]:
        streams = _Streams(self.seed, batch, training)
        arrays = self.array_columns
        steps = [step for step in self.steps if training or not step.training_only]
        for part in _parts(steps):
            after = self._applied(part, batch, arrays, streams)
            arrays = _arrays_after(part[0], batch, arrays, after)
            batch = after
        return batch, arrays

    def _applied(
        self, steps: list[Step], batch: Batch, arrays: tuple[str, ...], streams: _Streams
    ) -> Batch:
        step = steps[0]
        if step.kind == "record":
            return _by_record(steps, batch, streams)
        if step.kind == "batch":
            return _by_batch(step, batch, streams)
        if step.feature is not None:
            return _kept(_subject([step], batch), batch, compute(step.feature, batch, arrays))
        names = _normalizable(step, batch, arrays)
        if self.statistics is None:
            return batch
        measured, ordinals = self.statistics, np.asarray(batch["ordinal"])
        return batch | {name: measured.normalized(name, batch[name], ordinals) for name in names}


def resolve_chain(
    transforms: Sequence[Transform],
    *,
    seed: int,
    array_columns: Sequence[str],
    statistics: Statistics | None = None,
) -> Chain:
    """The chain that transforms describe, for batches with these tensors.

    Raises `SpecError` for a name that is none, for options that a step does not take, for a
    built-in's column that is no tensor, and for more than one `normalize`.
    """
    if sum(transform.name == NORMALIZE for transform in transforms) > 1:
        raise SpecError(
            "normalize can be one step of the transforms only: there is one set of "
            "statistics, measured before it"
        )
    known: Sequence[str] | None = array_columns
    steps = []
    for transform in transforms:
        step = _resolve(transform)
        if known is not None and not step.is_own and step.kind in ("record", "normalize"):
            _check_column(step, known)
        # Features and functions of one's own may bring other columns.
        known = None if step.is_own or step.kind == "feature" else known
        steps.append(step)
    return Chain(tuple(steps), seed, tuple(array_columns), statistics)


# --- finding steps -------------------------------------------------------------------------------


def normalize(*, column: str | None = None) -> None:
    """The options of the step that brings values to mean 0 and standard deviation 1.

    (x - mean) / std for each index of a record's first axis, by the training split's statistics
    at this place among the steps: of all float and complex tensors, or of one. Applied in
    evaluation as well. A std of 0 counts as 1.
    """


def _resolve(transform: Transform) -> Step:
    name, options = transform.name, dict(transform.options)
    subject = f"transform {name!r}"
    if is_reference(name):
        return _resolve_own(name, options)
    if name in augmentations.BUILT_IN:
        built_in = augmentations.BUILT_IN[name]
        function = built_in.function
        check_options(subject, function, options, given=("record", "rng"))
        built_in.check(**{key: value for key, value in options.items() if key != "column"})
        source = digest(["built-in", name, built_in.version])
        training_only = bool(getattr(function, "training_only", False))
        return Step(name, "record", function, options, source, training_only, built_in.random)
    if name == NORMALIZE:
        check_options(subject, normalize, options, given=())
        source = digest(["built-in", name, _NORMALIZE_VERSION])
        return Step(name, "normalize", normalize, options, source, random=False)
    if name not in built_ins.BUILT_IN:
        raise unknown_built_in("transform", name, BUILT_IN)
    return _feature_step(name, options, training_only=False)


def _resolve_own(name: str, options: dict[str, Any]) -> Step:
    function, source = load("transform", name)
    training_only = bool(getattr(function, "training_only", False))
    parameters = parameters_of(function) or []
    second = parameters[1].name if len(parameters) > 1 else None
    if second not in ("rng", "rngs"):
        return _feature_step(name, options, training_only=training_only)
    kind: Kind = "record" if second == "rng" else "batch"
    check_options(f"transform {name!r}", function, options, given=(kind, second))
    return Step(name, kind, function, options, source, training_only)


def _feature_step(name: str, options: dict[str, Any], *, training_only: bool) -> Step:
    found = resolve_feature(name, options, kind="transform")
    if training_only:
        raise SpecError(
            f"transform {name!r} cannot be for training only: a feature function replaces the "
            "arrays of a batch, and a model needs the same columns in evaluation"
        )
    return Step(
        name, "feature", found.function, options, found.source_sha256, random=False, feature=found
    )


def _check_column(step: Step, known: Sequence[str]) -> None:
    column = step.options.get("column", None if step.kind == "normalize" else "samples")
    if column is None and step.kind == "normalize":
        return
    if column not in known:
        raise SpecError(_no_tensor(step, column, known))


def _no_tensor(step: Step, column: Any, arrays: Iterable[str]) -> str:
    known = ", ".join(arrays) or "none"
    return f"transform {step.name}: column {column!r} is no tensor here; those are: {known}"


# --- applying them -------------------------------------------------------------------------------


def _parts(steps: Iterable[Step]) -> list[list[Step]]:
    """Steps one by one, but those on records that follow each other together.

    They run record by record, so that a record stays in cache from one step to the next.
    """
    parts: list[list[Step]] = []
    for step in steps:
        if parts and step.kind == parts[-1][0].kind == "record":
            parts[-1].append(step)
        else:
            parts.append([step])
    return parts


class _Streams:
    """The random stream of each record of one batch, made when first asked for."""

    def __init__(self, seed: int, batch: Mapping[str, Values], training: bool) -> None:
        self._seed = seed
        self._training = training
        self._keys = batch
        self._made: dict[int, np.random.Generator] = {}

    def __getitem__(self, row: int) -> np.random.Generator:
        if row not in self._made:
            self._made[row] = self._new(row)
        return self._made[row]

    def _new(self, row: int) -> np.random.Generator:
        if self._training:
            return rng_at(self._seed, int(self._keys["position"][row]))
        # As an array: NumPy would make floats of a list with so large a number, and round it.
        key = np.array([self._seed, _EVALUATION + int(self._keys["ordinal"][row])], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))


def _by_record(steps: list[Step], batch: Batch, streams: _Streams) -> Batch:
    """Steps on one record after the other, and the records put together again."""
    rows = len(batch["ordinal"])
    if rows == 0:
        return batch
    locked = read_only(batch)
    before = [{name: value[row] for name, value in locked.items()} for row in range(rows)]
    after = [_one_record(steps, record, streams, row) for row, record in enumerate(before)]
    subject = _subject(steps, batch)
    names = list(after[0])
    for record in after:
        if odd := sorted(set(record) ^ set(names), key=str):
            raise FeatureError(f"{subject}: returned {', '.join(map(str, odd))} for some records")
    result: Batch = {}
    for name in names:
        values = [record[name] for record in after]
        unchanged = (v is old.get(name, ...) for v, old in zip(values, before, strict=True))
        if name in IDENTITY or all(unchanged):
            result[name] = batch[name]
        else:
            result[name] = _column(f"{subject}: column {name!r}", name, values)
    return _kept(subject, batch, result)


def _one_record(steps: list[Step], record: Record, streams: _Streams, row: int) -> Record:
    first = record
    for step in steps:
        subject = f"transform {step.name}, ordinal {first['ordinal']}"
        given = (record, streams[row] if step.random else None)
        result = call(subject, step.function, given, step.options, noun="record")
        if not isinstance(result, Mapping):
            raise FeatureError(f"{subject}: returned a {type(result).__name__}, not a dict")
        for name in IDENTITY:
            if not _same(result.get(name), first.get(name)):
                raise FeatureError(f"{subject}: changed {name!r}, which is the record's own")
        record = dict(result)
    if any(step.is_own for step in steps):  # a buffer that it hands out may be used again
        for name, value in record.items():
            if isinstance(value, np.ndarray) and value is not first.get(name):
                record[name] = value.copy()
    return record


def _same(value: Any, expected: Any) -> bool:
    plain = isinstance(value, str | int | np.integer)
    return value is expected or (plain and bool(value == expected))


def _column(subject: str, name: str, values: list[Any]) -> Values:
    """One column from the values of its records: stacked where shapes agree, else their list."""
    try:
        return checked_column(name, _stacked(values), len(values))
    except ValueError as exc:
        raise FeatureError(f"{subject} {exc}") from None


def _stacked(values: list[Any]) -> Values:
    if all(value is None or isinstance(value, str) for value in values):
        return np.array(values, dtype=object)
    for value in values:
        if not isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
            raise ValueError(f"is a {type(value).__name__} for some records, not an array")
        if isinstance(value, np.ma.MaskedArray):
            raise ValueError("is a MaskedArray, not an array")
    arrays = [np.asarray(value) for value in values]
    dtypes = sorted({str(array.dtype) for array in arrays})
    if len(dtypes) > 1:
        raise ValueError(f"differs in dtype between records: {', '.join(dtypes)}")
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return [array.copy() for array in arrays]


def _by_batch(step: Step, batch: Batch, streams: _Streams) -> Batch:
    """One call for the whole batch; its columns are checked and copied."""
    rows = len(batch["ordinal"])
    subject = _subject([step], batch)
    locked = read_only(batch)
    given = (locked, [streams[row] for row in range(rows)])
    result = call(subject, step.function, given, step.options)
    if not isinstance(result, Mapping):
        raise FeatureError(f"{subject}: returned a {type(result).__name__}, not a dict of arrays")
    after: Batch = {}
    for name, value in result.items():
        if name in batch and value is locked[name]:
            after[name] = batch[name]
        elif name in IDENTITY:
            after[name] = value
        elif isinstance(value, list) and len(value) == rows:
            after[name] = _column(f"{subject}: column {name!r}", name, value)
        else:
            try:
                after[name] = own(checked_column(name, value, rows))
            except ValueError as exc:
                raise FeatureError(f"{subject}: column {name!r} {exc}") from None
    return _kept(subject, batch, after)


def _kept(subject: str, before: Batch, after: Batch) -> Batch:
    """The batch after a step, with what says which records they are as it was before.

    Raises `FeatureError` where the step changed, dropped or invented it.
    """
    for name in IDENTITY:
        old, new = before.get(name), after.get(name)
        if old is not new and (old is None or new is None or not np.array_equal(old, new)):
            raise FeatureError(f"{subject}: changed {name!r}, which is the records' own")
        if old is not None:
            after[name] = old
    return after


def _normalizable(step: Step, batch: Batch, arrays: Sequence[str]) -> list[str]:
    """The columns that `normalize` works on: all that can be, or the one that it names."""
    column = step.options.get("column")
    if column is None:
        return [name for name in arrays if is_measurable(batch[name])]
    if column not in arrays:
        raise SpecError(_no_tensor(step, column, arrays))
    if not is_measurable(batch[column]):
        raise SpecError(
            f"transform normalize: column {column!r} must hold float or complex arrays with a "
            "first axis in each record"
        )
    return [column]


def _arrays_after(
    step: Step, before: Batch, arrays: Sequence[str], after: Batch
) -> tuple[str, ...]:
    """The tensors of a batch after a step: those that are left, then what it added."""
    new = [name for name in after if name not in before]
    if step.kind == "feature":
        # In the order in which they were returned; text is no number that a model could see.
        numbers = [n for n in new if isinstance(v := after[n], list) or v.dtype != object]
        return tuple(name for name in after if name in arrays or name in numbers)
    added = [name for name in new if isinstance(v := after[name], list) or v.ndim > 1]
    return (*(name for name in arrays if name in after), *added)


def _subject(steps: Sequence[Step], batch: Batch) -> str:
    names = " and ".join(step.name for step in steps)
    return f"transform {names}, {ordinal_range(batch)}"
