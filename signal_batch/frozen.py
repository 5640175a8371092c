"""What descriptions of jobs are made of: models that cannot be changed, and canonical JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from hashlib import sha256
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, WithJsonSchema
from pydantic import ValidationError as PydanticValidationError

from signal_batch.errors import SpecError

M = TypeVar("M", bound=BaseModel)
Json = None | bool | int | float | str | list[Any] | dict[str, Any]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

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
