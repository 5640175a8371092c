"""What of a record becomes a column: selectors, and columns that name one.

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
from typing import Any, Literal, Self

from pydantic import field_validator, model_serializer, model_validator

from signal_batch.errors import SpecError
from signal_batch.frozen import Frozen, Json, checked

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

Source = Literal["field", "metadata", "annotation", "annotation-field", "id", "scene", "ordinal"]


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


def annotation_sets(columns: tuple[Column, ...]) -> tuple[str, ...]:
    """Names of the annotation sets that columns read, sorted."""
    return tuple(sorted({c.selector.set_name for c in columns if c.selector.set_name}))
