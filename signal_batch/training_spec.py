"""The frozen description of a training run: split, transforms, schedule, trainer.

A split says which side a record falls on, by a key of the record alone::

    scene test=0.2 validation=0.1     by a hash of the scene: no scene on two sides
    id test=0.2                       by a hash of the record's own id
    metadata:fold test=[3]            by value; all other records are for training
    metadata:split test=test train=train     records with any other value are left out

A transform names a step with its options::

    add_noise snr_db=[0,20]
    package.module:function strength=0.5
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from signal_batch.columns import Column, Selector
from signal_batch.errors import SpecError
from signal_batch.execution import MOST_SECONDS, Credentials, Limits, RetryDelay, SafeDecode
from signal_batch.frozen import OPTIONS_FORM, Frozen, Json, check_json
from signal_batch.specs import JobSpec
from signal_batch.uris import refuse_credentials

SIDES = ("train", "validation", "test")
#: Names of columns by which accuracy is broken down unless `by` says otherwise.
SNR_NAMES = ("snr", "snr_db")

#: A bucket is kept as a byte.
MOST_BUCKETS = 255
#: Above any dataset or schedule there is, and below what a form in a browser can still count.
MOST_STEPS = 1 << 48

KeyValue = bool | int | float | str
Share = Annotated[float, Field(ge=0, lt=1)]


class Split(Frozen):
    """Which side each record falls on; see the module's docstring for the forms.

    `by` is `id`, `scene` or a metadata or annotation value. A share is a fraction of the keys,
    chosen by a hash of the key and `seed`: adding records never moves one that was there. A list
    holds the values of the key that belong to that side.
    """

    by: Selector = Selector(source="id")
    test: Share | tuple[KeyValue, ...] = 0.0
    validation: Share | tuple[KeyValue, ...] = 0.0
    train: tuple[KeyValue, ...] | None = None
    seed: int = Field(default=0, ge=0, lt=1 << 32)

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, value: Any) -> Any:
        return cls.fields_of(value) if isinstance(value, str) else value

    @field_validator("by", mode="before")
    @classmethod
    def _accept_selector_text(cls, value: Any) -> Any:
        return Selector.parse(value) if isinstance(value, str) else value

    @field_validator("test", "validation", "train", mode="before")
    @classmethod
    def _one_value(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list | tuple):
            return value
        if info.field_name == "train":
            takes, plain = "the values of the key that are for training", value is None
        else:
            takes = "a share from 0 to below 1, or the values of the key that belong there"
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            plain = plain and 0 <= value < 1
        if plain:
            return value
        raise SpecError(f"{info.field_name} is {value}; it takes {takes}, as in [3]")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.by.is_array:
            raise SpecError(f"a split goes by a single value of a record, not by {self.by}")
        sides = [self.test, self.validation]
        values = [
            item for side in (*sides, self.train or ()) if isinstance(side, tuple) for item in side
        ]
        # 3 and 3.0 are one value, 1 and true are two.
        if len({(isinstance(item, bool), item) for item in values}) < len(values):
            raise SpecError("a split must not name the same value for two sides")
        shares = [side for side in sides if isinstance(side, float) and side]
        if self.by_value and shares:
            raise SpecError("a split goes by shares or by values, not by both")
        if any(map(str.isspace, str(self.by))):
            raise SpecError(f"a split cannot go by {self.by}: its key has a space in it")
        if sum(shares) >= 1:
            raise SpecError("the shares of test and validation leave nothing to train on")
        return self

    @property
    def by_value(self) -> bool:
        return (
            isinstance(self.test, tuple)
            or isinstance(self.validation, tuple)
            or self.train is not None
        )

    @property
    def is_trivial(self) -> bool:
        """Whether every record is for training."""
        return not (self.test or self.validation or self.train is not None)

    @classmethod
    def fields_of(cls, text: str) -> dict[str, Any]:
        """The model's fields from `KEY [test=...] [validation=...] [train=...] [seed=...]`."""
        by, options = _named(f"split {text!r}", text)
        return {"by": by} | options

    @model_serializer
    def _as_text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        given: dict[str, Any] = {}
        for name in ("test", "validation", "train", "seed"):
            value = getattr(self, name)
            if value or isinstance(value, tuple):
                given[name] = value
        return _written(str(self.by), given)


class Transform(Frozen):
    """One step between a record and the model: a built-in name or `package.module:function`."""

    name: str
    options: dict[str, Json] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            name, options = _named(f"transform {value!r}", value)
            return {"name": name, "options": options}
        # In YAML: `- add_noise: {snr_db: [0, 20]}`.
        if isinstance(value, Mapping) and len(value) == 1 and "name" not in value:
            name, options = next(iter(value.items()))
            return {"name": name, "options": options or {}}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_json(f"transform {self.name!r}", self.options)
        if not self.name or any(map(str.isspace, self.name)):
            raise SpecError(f"{self.name!r} is no name of a transform")
        if bad := [key for key in self.options if not key.isidentifier()]:
            raise SpecError(f"transform {self.name!r}: {bad[0]!r} is no name of an option")
        return self

    @model_serializer
    def _as_text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return _written(self.name, self.options)


class TrainExecution(Frozen):
    """How training is run: changes its speed and its patience, never which records a step sees.

    More ranks add up gradients in another order, so losses agree to float tolerance only.
    """

    ranks: int = Field(default=1, ge=1, le=1024, description="processes that share each batch")
    threads: int = Field(default=2, ge=1, le=256, description="batches read at a time, per rank")
    prefetch_batches: int = Field(
        default=4, ge=1, le=1024, title="Prefetched batches", description="batches that may wait"
    )
    retries: int = Field(default=3, ge=0, le=100, description="further attempts from a checkpoint")
    retry_delay_s: RetryDelay = 2.0
    stall_timeout_s: float = Field(
        default=900.0,
        gt=0,
        le=MOST_SECONDS,
        title="Stall timeout (seconds)",
        description="kill a run that takes no step for so long",
    )
    safe_decode: SafeDecode = False
    credentials: Credentials = None
    limits: Limits = ()


class TrainSpec(JobSpec):
    """What to train, on which records, and where to put the model.

    Every field but those in `TRAIN_NOT_IDENTITY` is part of the run key.
    """

    target: str | None = Field(
        default=None,
        description="column to learn: whole numbers, text or booleans are classes",
        examples=["label"],
    )
    split: Annotated[Split, WithJsonSchema({"type": "string", "title": "Split"})] = Field(
        default=Split(),
        description="sides of records, e.g. 'scene test=0.2' or 'metadata:split test=test'",
        examples=["scene test=0.2 validation=0.1", "metadata:split test=test"],
    )
    transforms: tuple[Annotated[Transform, WithJsonSchema({"type": "string"})], ...] = Field(
        default=(),
        description="steps between a record and the model, e.g. 'add_noise snr_db=[0,20]'",
        examples=[["unit_power", "add_noise snr_db=[0,20]", "normalize"]],
    )
    inputs: tuple[str, ...] = Field(
        default=(),
        description="columns that the model sees; by default every tensor",
        examples=[["samples"]],
    )
    lengths: Literal["equal", "pad", "crop", "bucket"] = Field(
        default="equal", description="how records of different lengths come into one batch"
    )
    length: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="samples to pad or crop to; by default what the data needs",
    )
    buckets: tuple[
        Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MOST_STEPS})],
        ...,
    ] = Field(
        default=(),
        description="largest length of each bucket; by default four of equal counts",
        examples=[[1024, 4096]],
    )
    batch_size: int = Field(
        default=64,
        ge=1,
        le=1_000_000,
        title="Batch size",
        description="records of a global step",
    )
    epochs: int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="passes over the training records"
    )
    steps: int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="global steps, instead of epochs"
    )
    seed: int = Field(default=0, ge=0, lt=1 << 32, description="of order, transforms and model")
    shuffle: Literal["global", "block", "none"] = Field(
        default="global", description="block reads shard by shard, for storage that is far away"
    )
    trainer: str = Field(
        description="sklearn, jax or package.module:Class", examples=["sklearn", "nearest:Mean"]
    )
    trainer_args: Annotated[dict[str, Json], OPTIONS_FORM] = Field(
        default_factory=dict,
        title="Trainer options",
        description="options of the trainer, a JSON object",
        examples=[{"estimator": "MLPClassifier"}],
    )
    checkpoint_steps: int = Field(
        default=500,
        ge=1,
        le=MOST_STEPS,
        title="Checkpoint every (steps)",
        description="save after so many steps",
    )
    checkpoint_s: float = Field(
        default=60.0,
        gt=0,
        le=MOST_SECONDS,
        title="Checkpoint every (seconds)",
        description="and after so many seconds",
    )
    keep_checkpoints: int = Field(
        default=3, ge=1, le=1000, title="Checkpoints kept", description="how many are kept"
    )
    evaluate_steps: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        title="Evaluate every (steps)",
        description="evaluate every so many steps; by default once an epoch",
    )
    log_steps: int = Field(
        default=10,
        ge=1,
        le=MOST_STEPS,
        title="Log every (steps)",
        description="steps of one line of metrics",
    )
    by: tuple[str, ...] | None = Field(
        default=None,
        title="Accuracy by",
        description="value columns to break accuracy down by; by default an SNR",
        examples=[["snr_db"]],
    )
    mlflow: str | None = Field(
        default=None,
        title="MLflow",
        description="MLflow tracking URI to log to",
        examples=["http://mlflow:5000"],
    )
    execution: TrainExecution = Field(
        default=TrainExecution(),
        title="Execution",
        description="how it is run; never changes what a step sees",
    )

    @field_validator("transforms", mode="before")
    @classmethod
    def _transforms_from_text(cls, value: Any) -> Any:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple):
            return values
        return [v if isinstance(v, Transform) else Transform.model_validate(v) for v in values]

    @field_validator("inputs", "by", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = {column.name: column for column in self.columns}
        for role, name in (("target", self.target), *(("by", name) for name in self.by or ())):
            if name is not None and name not in known:
                raise SpecError(f"{role} {name!r} is no column; there are {', '.join(known)}")
            if role == "by" and known[str(name)].selector.is_array:
                raise SpecError(f"by {name!r} is a tensor; accuracy is told apart by single values")
        if self.epochs is not None and self.steps is not None:
            raise SpecError("give epochs or steps, not both")
        if self.batch_size % self.execution.ranks:
            raise SpecError(
                f"batch_size {self.batch_size} does not divide among {self.execution.ranks} ranks"
            )
        if self.length is not None and self.lengths not in ("pad", "crop"):
            raise SpecError("length goes with lengths=pad or lengths=crop")
        if self.buckets and self.lengths != "bucket":
            raise SpecError("buckets go with lengths=bucket")
        if list(self.buckets) != sorted(set(self.buckets)) or any(b < 1 for b in self.buckets):
            raise SpecError("buckets must be ascending lengths")
        if len(self.buckets) > MOST_BUCKETS:
            raise SpecError(f"at most {MOST_BUCKETS} buckets, not {len(self.buckets)}")
        if self.mlflow is not None:
            refuse_credentials(self.mlflow)
        check_json("trainer_args", self.trainer_args)
        return self

    @property
    def target_column(self) -> Column | None:
        return next((c for c in self.columns if c.name == self.target), None)

    @property
    def annotation_sets(self) -> set[str]:
        return super().annotation_sets | ({self.split.by.set_name} - {None})  # type: ignore[operator]

    @property
    def by_columns(self) -> tuple[str, ...]:
        """Columns to break accuracy down by."""
        if self.by is not None:
            return self.by
        return tuple(c.name for c in self.columns if c.name in SNR_NAMES)

    def identity(self) -> dict[str, Any]:
        """The part of the spec that can change the result, defaults dropped."""
        return self.model_dump(mode="json", exclude=set(TRAIN_NOT_IDENTITY), exclude_defaults=True)


#: Fields that do not change the model or its metrics, or that other digests stand for.
TRAIN_NOT_IDENTITY = (
    *("dataset", "output", "pin", "where", "split", "execution", "mlflow"),
    *("checkpoint_steps", "checkpoint_s", "keep_checkpoints"),
)
#: Epochs where a spec gives neither epochs nor steps.
DEFAULT_EPOCHS = 10


def _named(subject: str, text: str) -> tuple[str, dict[str, Any]]:
    """A name and its options from `NAME [KEY=VALUE ...]`; a value is JSON or a bare word."""
    name, _, rest = text.strip().partition(" ")
    if not name:
        raise SpecError(f"{subject} is empty")
    options: dict[str, Any] = {}
    while rest := rest.lstrip():
        key, equals, rest = rest.partition("=")
        if not equals or not key or any(map(str.isspace, key)):
            wrong = (key or f"={rest}").split()[0]
            raise SpecError(f"{subject}: {wrong!r} must read KEY=VALUE")
        if key in options:
            raise SpecError(f"{subject} gives {key} twice")
        options[key], rest = _value(rest)
    return name, options


def _value(text: str) -> tuple[Any, str]:
    """The JSON value or bare word that a text begins with, and what follows it."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        end = -1
    if end < 0 or text[end : end + 1].strip():
        word, _, rest = text.partition(" ")
        return word, rest
    return value, text[end:]


def _written(name: str, options: Mapping[str, Any]) -> str:
    shown = (f"{key}={json.dumps(value)}" for key, value in options.items())
    return " ".join([name, *shown])
