"""The frozen description of a job: selectors, columns, the export spec and its identity.

A selector says where in a record a value is::

    field:samples                    one tensor of the record
    metadata:radio.snr_db            a metadata key, dots go into nested objects
    annotation:review-v1/label       a value of an annotation set's row at the same ordinal
    annotation-field:review-v1/mask  a tensor of that row
    id    scene    ordinal           the record's id, scene id and integer position

A column names one, with an optional dtype and an optional default::

    label=annotation:speakers-v1/label:int32
    snr=metadata:radio.snr_db:float32?null
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic import ValidationError as PydanticValidationError

from signal_batch.errors import SpecError
from signal_batch.scheduling import check_templates

#: Raised when the same spec and pin would produce other files than before.
SCHEMA_VERSION = 1
#: What claim and manifest of an output say it is.
EXPORT_FORMAT = "signal-batch.export"
MODEL_FORMAT = "signal-batch.model"

FIELD_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64"),
)
VALUE_DTYPES = (*(name for name in FIELD_DTYPES if name != "complex64"), "str")
ARRAY_SOURCES = ("field", "annotation-field")
IDENTITY_SOURCES = ("id", "scene", "ordinal")
RESERVED_COLUMNS = ("id", "ordinal")

_SOURCES = ("field", "metadata", "annotation", "annotation-field", *IDENTITY_SOURCES)
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Schemes whose URI begins with a bucket, a container or a host.
_PLACED = (
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"),
    *("ftp", "sftp", "ssh", "smb", "webhdfs", "http", "https"),
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

Source = Literal["field", "metadata", "annotation", "annotation-field", "id", "scene", "ordinal"]
M = TypeVar("M", bound=BaseModel)
Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def canonical_json(value: Any) -> bytes:
    """Serialize for hashing: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(value: Any) -> str:
    """SHA-256 (hex) over the canonical JSON of a value."""
    return sha256(canonical_json(value)).hexdigest()


def parse_size(value: str | int) -> int:
    """Bytes from `134217728`, `"128MB"` or `"128MiB"`.

    MB and MiB both mean 2**20 bytes, as Parquet tools take them.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise SpecError(f"{value!r} is not a size; write bytes or something like 128MB")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise SpecError(f"{value!r} is not a size; write bytes or something like 128MB")
        size = int(Decimal(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
    if not 1 <= size < 1 << 62:
        raise SpecError("a size must be at least one byte, and no more than any disk holds")
    return size


class Frozen(BaseModel):
    """A model that cannot be changed and takes no field that it does not know."""

    # Input is hidden in pydantic's own messages: a URI may carry a password.
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True
    )


class Selector(Frozen):
    """Where in a record a value is; see the module's docstring for the forms."""

    source: Source
    set_name: str | None = None
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        source, colon, rest = text.partition(":")
        if source not in _SOURCES:
            raise SpecError(
                f"selector {text!r} starts with {source!r}; it must be one of "
                f"{', '.join(_SOURCES)} (for example field:samples or metadata:snr_db)"
            )
        if source in IDENTITY_SOURCES:
            if colon:
                raise SpecError(f"selector {text!r}: {source!r} takes nothing after it")
            return cls(source=source)  # type: ignore[arg-type]
        if not rest:
            raise SpecError(f"selector {text!r} needs a name after the colon")
        if source in ("field", "metadata"):
            return cls(source=source, path=rest)  # type: ignore[arg-type]
        set_name, slash, path = rest.partition("/")
        if _SET_NAME.fullmatch(set_name) is None or not slash or not path:
            raise SpecError(f"selector {text!r} must read {source}:SET/KEY")
        return cls(source=source, set_name=set_name, path=path)  # type: ignore[arg-type]

    @property
    def is_array(self) -> bool:
        """Whether it names a tensor rather than a single value."""
        return self.source in ARRAY_SOURCES

    def __str__(self) -> str:
        where = f"{self.set_name}/{self.path}" if self.set_name else self.path
        return self.source if where is None else f"{self.source}:{where}"


class Column(Frozen):
    """An output array and where it comes from.

    `default` (with `has_default`) stands in where a record lacks the key; `null` becomes NaN
    for float dtypes and a null for strings.
    """

    name: str
    selector: Selector
    dtype: str | None = None
    has_default: bool = False
    default: Json = None

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, value: Any) -> Any:
        return cls.fields_of(value) if isinstance(value, str) else value

    @field_validator("selector", mode="before")
    @classmethod
    def _accept_selector_text(cls, value: Any) -> Any:
        return Selector.parse(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        subject = f"column {self.name!r}"
        if _COLUMN_NAME.fullmatch(self.name) is None:
            raise SpecError(
                f"{subject}: a column name is letters, digits and underscores; "
                f"put one in front, as in NAME={self.selector}"
            )
        known = FIELD_DTYPES if self.selector.is_array else VALUE_DTYPES
        if self.dtype is not None and self.dtype not in known:
            raise SpecError(f"{subject}: dtype {self.dtype!r} is not one of {', '.join(known)}")
        if self.dtype is not None and self.selector.source in IDENTITY_SOURCES:
            raise SpecError(f"{subject}: {self.selector} has a dtype of its own")
        if self.name in RESERVED_COLUMNS and self.selector.source != self.name:
            raise SpecError(f"{subject}: that name always means the record's own {self.name}")
        written = self.fields_of(str(self))
        if (written["selector"], written["dtype"]) != (self.selector, self.dtype):
            raise SpecError(
                f"{subject}: {self.selector} reads as something else where it is written down; "
                "a key cannot hold '?' or end in a colon and a dtype"
            )
        if not self.has_default:
            return self
        if self.selector.is_array or self.selector.source in IDENTITY_SOURCES:
            raise SpecError(f"{subject}: only metadata and annotation values take a default")
        if self.default is None and not (self.dtype or "").startswith(("float", "str")):
            raise SpecError(
                f"{subject}: a null default needs a float dtype or str, "
                f"as in {self.selector}:float32?null"
            )
        if isinstance(self.default, list | dict):
            raise SpecError(f"{subject}: a default is a single value, not a {self.default!r}")
        if isinstance(self.default, float) and not math.isfinite(self.default):
            raise SpecError(f"{subject}: a default must be finite; write null for NaN")
        return self

    @classmethod
    def fields_of(cls, text: str) -> dict[str, Any]:
        """The model's fields from `[NAME=]SELECTOR[:DTYPE][?DEFAULT]`."""
        rest, mark, default_text = text.partition("?")
        name, equals, selector_text = rest.partition("=")
        if not equals:
            name, selector_text = "", rest
        head, colon, last = selector_text.rpartition(":")
        dtype = last if colon and head.count(":") and last in (*FIELD_DTYPES, "str") else None
        selector = Selector.parse(head if dtype else selector_text)
        if not equals:
            name = re.split(r"[./]", selector.path)[-1] if selector.path else selector.source
        fields: dict[str, Any] = {"name": name.strip(), "selector": selector, "dtype": dtype}
        if mark:
            try:
                default = json.loads(default_text, parse_constant=_constant)
            except (ValueError, RecursionError):
                default = default_text
            fields |= {"has_default": True, "default": default}
        return fields

    @model_serializer
    def _as_text(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Column:
        return checked(cls, cls.fields_of(text))

    def __str__(self) -> str:
        dtype = f":{self.dtype}" if self.dtype else ""
        default = f"?{json.dumps(self.default)}" if self.has_default else ""
        return f"{self.name}={self.selector}{dtype}{default}"


def _constant(text: str) -> float | None:
    return None if text == "NaN" else float(text)


#: Options of a function, as the form of the Prefect UI takes them: any JSON object.
OPTIONS_FORM = WithJsonSchema({"type": "object", "additionalProperties": True})
#: A size in a form: bytes, or a number with a unit; `parse_size` has the last word.
SIZE_FORM = WithJsonSchema(
    {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": 1 << 40},
            {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*[KkMmGgTt]?[Ii]?[Bb]?\s*$"},
        ]
    }
)
#: A week: whoever waits longer for one step has another problem.
MOST_SECONDS = 7 * 86_400

#: A runner is a name, and where it is if not on this machine: `dask:tcp://host:8786`.
RUNNER_FORM = (
    r"^(local|dask(:([a-z]+://)?[^\s/@?#]+:\d{1,5})?|ray(:(ray://)?[^\s/@?#]+:\d{1,5})?"
    r"|work-pool(:[^\s/]+/[^\s/]+)?)$"
)

#: Name of the block that holds the storage's environment variables; see `tasks.credentials`.
Credentials = Annotated[
    str | None,
    Field(
        title="Credentials",
        description="Prefect Secret block with environment variables for the storage",
        examples=["lab-bucket"],
    ),
]

#: Tags of the tasks that do the work; see "Run it for a team" in the README.
Limits = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(
        title="Limits",
        description="further tags of the working tasks, for Prefect's concurrency limits",
        examples=[["gpu"]],
    ),
]

#: Seconds before the second attempt of something that failed; twice as long before each further.
RetryDelay = Annotated[
    float,
    Field(
        ge=0, le=MOST_SECONDS, title="Retry delay (seconds)", description="first pause, doubling"
    ),
]

#: Whether records are decoded by signal-dataset itself, more slowly.
SafeDecode = Annotated[
    bool, Field(title="Safe decoder", description="use signal-dataset's decoder")
]


def refuse_block(credentials: str | None) -> None:
    """Refuse credentials from a block where no Prefect server hands it out."""
    if credentials is not None:
        raise SpecError(
            f"credentials {credentials!r} name a block on a Prefect server; run it with the "
            "installed signal-batch command, or leave them out and set the storage's environment "
            "variables"
        )


class Execution(Frozen):
    """How a job is run: changes its speed and its patience, never its result."""

    runner: str = Field(
        default="local",
        pattern=RUNNER_FORM,
        description="local, dask or ray (on this machine), dask:tcp://HOST:8786, "
        "ray:ray://HOST:10001, or work-pool[:FLOW/DEPLOYMENT]",
        examples=["local", "dask:tcp://scheduler:8786", "work-pool"],
    )
    workers: int = Field(default=2, ge=1, le=1024, description="worker processes at a time")
    retries: int = Field(default=3, ge=0, le=100, description="further attempts of a shard")
    retry_delay_s: RetryDelay = 2.0
    timeout_s: float = Field(
        default=900.0,
        gt=0,
        le=MOST_SECONDS,
        title="Timeout (seconds)",
        description="kill a worker silent for so long",
    )
    safe_decode: SafeDecode = False
    credentials: Credentials = None
    limits: Limits = ()

    @field_validator("runner", mode="before")
    @classmethod
    def _runner_in_words(cls, value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(RUNNER_FORM, value) is None:
            # Not repeated in the message: an address may carry a password.
            raise SpecError(
                "that is no runner; it is local, dask or dask:tcp://HOST:PORT, ray or "
                "ray:ray://HOST:PORT, work-pool or work-pool:FLOW/DEPLOYMENT"
            )
        return value

    @property
    def engine(self) -> str:
        """The runner's name without its place: `dask` for `dask:tcp://host:8786`."""
        return self.runner.partition(":")[0]

    @property
    def runner_address(self) -> str | None:
        """Where the runner is; None for one on this machine, or for the usual deployment."""
        return self.runner.partition(":")[2] or None


class JobSpec(Frozen):
    """What every job names: the data it reads and the place it writes to."""

    dataset: str = Field(
        description="dataset root: a local path, s3:// or gs://; {scheduled:%Y-%m-%d} in it "
        "stands for the date that a run is scheduled for",
        examples=["/data/captures.sds", "s3://lab/captures-{scheduled-1d:%Y-%m-%d}.sds"],
    )
    output: str = Field(
        description="output folder: a local path or any fsspec URI; {scheduled:%Y-%m-%d} as in "
        "dataset",
        examples=["/data/features", "s3://lab/features/{scheduled-1d:%Y-%m-%d}"],
    )
    columns: tuple[Annotated[Column, WithJsonSchema({"type": "string"})], ...] = Field(
        description="what to read, e.g. field:samples or label=annotation:speakers-v1/label:int32",
        json_schema_extra={"minItems": 1},
        examples=[["field:samples", "snr=metadata:snr_db:float32?null"]],
    )
    where: tuple[str, ...] = Field(
        default=(),
        title="Filters",
        description="filters, all of which must hold",
        examples=[["metadata:snr_db >= 5", "annotation:review-v1 status success"]],
    )
    pin: str | None = Field(
        default=None,
        title="Pin file",
        description="pin file, to reproduce a run",
        examples=["pins/captures.json"],
    )

    @field_validator("columns", mode="before")
    @classmethod
    def _columns_from_text(cls, value: Any) -> Any:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple):
            return values
        return [Column.parse(v) if isinstance(v, str) else v for v in values]

    @field_validator("where", mode="before")
    @classmethod
    def _one_or_many_filters(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_job(self) -> Self:
        if not self.columns:
            raise SpecError("name at least one column, for example --column field:samples")
        names = [column.name for column in self.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"column names must be unique; {', '.join(twice)} is used twice")
        for uri in (self.dataset, self.output):
            refuse_credentials(uri)
            refuse_placeless(uri)
        refuse_read_only(self.output)
        if self.output.startswith("memory:"):
            raise SpecError("memory:// is another place in each worker process; name a folder")
        check_templates(dataset=self.dataset, output=self.output, pin=self.pin)
        return self

    @property
    def annotation_sets(self) -> set[str]:
        """Annotation sets that the job reads, those of filters aside."""
        return set(annotation_sets(self.columns))

    def identity(self) -> dict[str, Any]:
        """The part of the spec that can change the result, defaults dropped."""
        raise NotImplementedError


def check_json(name: str, value: Any) -> None:
    """Refuse options that JSON cannot carry, and that no digest could be made of."""
    try:
        canonical_json(value)
    except RecursionError as exc:
        raise SpecError(f"{name} is nested too deeply or in itself") from exc
    except UnicodeEncodeError as exc:
        raise SpecError(f"{name} holds a text that is not UTF-8") from exc
    except ValueError as exc:
        if "Circular" in str(exc):
            raise SpecError(f"{name} is nested too deeply or in itself") from exc
        raise SpecError(f"{name} holds NaN or an infinity, which JSON has not") from exc
    except TypeError as exc:  # a date, as YAML reads them, deep inside
        raise SpecError(f"{name} holds what has no JSON: {exc}") from exc


class ExportSpec(JobSpec):
    """What to export, from where, to where.

    Every field but those in `NOT_IDENTITY` is part of the run key.
    """

    features: str = Field(
        default="raw",
        title="Feature function",
        description="raw, power_spectrum, spectrogram, statistics or package.module:function",
        examples=["power_spectrum", "my_features:envelope"],
    )
    feature_args: Annotated[dict[str, Json], OPTIONS_FORM] = Field(
        default_factory=dict,
        title="Feature options",
        description="options of the feature function, a JSON object",
        examples=[{"nperseg": 128}],
    )
    batch_size: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        title="Batch size",
        description="records a feature is given",
    )
    part_bytes: Annotated[int, SIZE_FORM] = Field(
        default=128 << 20,
        title="Part size",
        description="largest Parquet file: bytes, or e.g. 128MB",
        examples=["128MB"],
    )
    row_group_bytes: Annotated[int, SIZE_FORM] = Field(
        default=16 << 20,
        title="Row group size",
        description="size aimed at for a row group: bytes, or e.g. 16MB",
        examples=["16MB"],
    )
    compression: Literal["zstd", "snappy", "lz4", "gzip", "none"] = Field(
        default="zstd", description="of the Parquet pages"
    )
    tensors: Literal["nested", "extension"] = Field(
        default="nested",
        title="Tensor layout",
        description="nested fixed-size lists or arrow.fixed_shape_tensor",
    )
    ragged: tuple[str, ...] = Field(
        default=(),
        title="Ragged columns",
        description="output columns to write as lists, whatever the sample shows",
        examples=[["samples"]],
    )
    on_error: Literal["fail", "skip", "quarantine"] = Field(
        default="fail",
        title="On unreadable records",
        description="what to do with a record that cannot be read",
    )
    max_bad_fraction: float = Field(
        default=0.01,
        ge=0,
        le=1,
        title="Largest share of bad records",
        description="largest share of unreadable records to put up with",
    )
    execution: Execution = Field(
        default=Execution(),
        title="Execution",
        description="how it is run; never changes the result",
    )

    @field_validator("ragged", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("part_bytes", "row_group_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> int:
        return parse_size(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_json("feature_args", self.feature_args)
        return self

    def identity(self) -> dict[str, Any]:
        """The part of the spec that can change the result, defaults dropped."""
        return self.model_dump(mode="json", exclude=set(NOT_IDENTITY), exclude_defaults=True)


#: Fields that do not change what is written, or that other digests in the run key stand for.
NOT_IDENTITY = ("dataset", "output", "pin", "where", "execution", "max_bad_fraction")


def annotation_sets(columns: tuple[Column, ...]) -> tuple[str, ...]:
    """Names of the annotation sets that columns read, sorted."""
    return tuple(sorted({c.selector.set_name for c in columns if c.selector.set_name}))


def refuse_credentials(uri: str) -> None:
    """Refuse a URI that carries a user, a password or a query: those end up in logs."""
    if not uri or not uri.strip():
        raise SpecError("a dataset or output URI is empty")
    try:
        uri.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{uri!r} is not a name in UTF-8") from None
    if uri != redact(uri):
        raise SpecError(
            f"{redact(uri)} carries credentials or a query in the URI; "
            "give them through the environment instead (for example AWS_PROFILE)"
        )


def refuse_placeless(uri: str) -> None:
    """Refuse a URI of a service that names no bucket or host there, before one is asked for it."""
    scheme, mark, rest = uri.partition("://")
    if mark and scheme.lower() in _PLACED and not rest.partition("/")[0].strip():
        raise SpecError(
            f"{redact(uri)} names no bucket or host; write it as in {scheme}://NAME/folder"
        )


def refuse_read_only(uri: str) -> None:
    """Refuse an output where nothing can be written."""
    if uri.lower().startswith(("http://", "https://")):
        raise SpecError(
            f"{redact(uri)} can only be read; an output is a folder on a local path, s3://, gs:// "
            "or another storage that can be written"
        )


def local_path(path: str) -> Path:
    """An absolute local path; `~` stands for a home folder."""
    try:
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as exc:
        raise SpecError(f"{path} is no path here: {exc}") from exc


def redact(uri: str) -> str:
    """The URI without user, password, query and fragment (local paths are left alone)."""
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return uri
    return f"{scheme}://{re.split('[?#]', _without_user(rest), maxsplit=1)[0]}"


def _without_user(rest: str) -> str:
    """What follows user and password; secret keys often hold a `/` that nobody escaped."""
    host, slash, path = rest.partition("/")
    if "@" in host:
        return host.rpartition("@")[2] + slash + path
    is_host = ":" not in host or re.fullmatch(r".*(:\d*|\])", host)
    return rest if is_host or "@" not in path else path.partition("@")[2]


def _unknown_field(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    execution: Any = getattr(model.model_fields.get("execution"), "annotation", None)
    if execution is not None and len(path) == 1 and path[0] in execution.model_fields:
        return f"there is no such field; it is execution.{path[0]}"
    known = model
    for name in path[:-1]:
        if field := known.model_fields.get(str(name)):
            known = next(_models_in(field.annotation), known)
    return f"there is no such field; there are {', '.join(known.model_fields)}"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field may hold, also as items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def checked(model: type[M], value: Mapping[str, Any]) -> M:
    """Build a model, turning pydantic's report into a `SpecError` that a person can read."""
    try:
        return model.model_validate(dict(value))
    except PydanticValidationError as exc:
        lines = []
        for item in exc.errors(include_url=False, include_context=False):
            where = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = _unknown_field(model, item["loc"])
            if item["type"] == "tuple_type":  # which neither YAML nor JSON has
                message = "Input should be a list"
            lines.append(f"{where}: {message}" if where else message)
        raise SpecError("; ".join(lines)) from exc
