"""The frozen description of an export, what it shares with other jobs, and its identity."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from signal_batch.columns import Column, annotation_sets
from signal_batch.errors import SpecError
from signal_batch.execution import Execution
from signal_batch.frozen import OPTIONS_FORM, SIZE_FORM, Frozen, Json, check_json, parse_size
from signal_batch.scheduling import check_templates
from signal_batch.uris import refuse_credentials, refuse_placeless, refuse_read_only

#: Raised when the same spec and pin would produce other files than before.
SCHEMA_VERSION = 1
#: What claim and manifest of an output say it is.
EXPORT_FORMAT = "signal-batch.export"
MODEL_FORMAT = "signal-batch.model"


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
