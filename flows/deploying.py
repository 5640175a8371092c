"""A file of deployments, read strictly into Prefect's deployment objects.

The file is what `prefect deploy` takes, less its templates, build and pull steps: the flows are
installed packages, so nothing is built or pulled. What Prefect would ignore or find out later, a
misspelt key or parameters that the flow refuses, is an error here, before anything is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from prefect import Flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ParameterTypeError
from prefect.flows import load_flow_from_entrypoint
from prefect.types.entrypoint import EntrypointType
from prefect.utilities.schema_tools import ValidationError as SchemaError
from prefect.utilities.schema_tools import validate
from pydantic import AfterValidator, Field, field_validator
from pydantic import ValidationError as PydanticValidationError

from flows.packaged import packaged
from flows.timetable import Name, Schedule, a_name, first_message, refuse_two_of_a_slug
from signal_batch import built_ins, trainers
from signal_batch.errors import InputError, SpecError
from signal_batch.frozen import Frozen, check_json, checked
from signal_batch.references import is_reference, unknown_built_in

#: The deployments of this project.
DEFAULT_FILE = packaged("prefect.yaml")
#: What every run needs in its environment, unless the file says otherwise: no usage telemetry, and
#: the heartbeats by which automations.yaml tells a long run from a dead one.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "SIGNAL_BATCH_PLAIN_GRAIN": "1",
}
#: Keys of the file that say nothing about a deployment.
_IGNORED = {"name", "prefect-version", "definitions"}

#: More of these than any file of deployments has; what holds itself goes on for ever.
_MOST_LEVELS = 50
_MOST_VALUES = 100_000
_MOST_RUNS = 1_000_000


def _deployment_name(text: str) -> str:
    if odd := sorted(set(text) & set("/%&><")):
        raise SpecError(f"a name goes without / % & > <; take {odd[0]} out of it")
    return a_name(text)


class Limit(Frozen):
    """How many runs of a deployment there may be at a time, and what happens to one more."""

    limit: int = Field(ge=1, le=_MOST_RUNS, strict=True)
    collision_strategy: Literal["ENQUEUE", "CANCEL_NEW"] = "ENQUEUE"
    grace_period_seconds: int | None = Field(default=None, ge=60, le=86_400, strict=True)

    def build(self) -> ConcurrencyLimitConfig:
        return ConcurrencyLimitConfig(
            limit=self.limit,
            collision_strategy=ConcurrencyLimitStrategy(self.collision_strategy),
            grace_period_seconds=self.grace_period_seconds,
        )


class WorkPool(Frozen):
    """Where runs of a deployment wait for a worker; `--pool` takes the place of the name."""

    name: Name | None = None
    work_queue_name: Name | None = None
    job_variables: dict[str, Any] = Field(default_factory=dict)

    @property
    def variables(self) -> dict[str, Any]:
        """The job variables, with what every run needs."""
        return self.job_variables | {"env": ENVIRONMENT | (self.job_variables.get("env") or {})}

    @field_validator("job_variables")
    @classmethod
    def _environment_is_a_mapping(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("env") or {}, dict):
            raise SpecError("env must map names to values")
        check_json("a job variable", value)
        return value


class Entry(Frozen):
    """One deployment of the file."""

    name: Annotated[str, AfterValidator(_deployment_name)]
    entrypoint: str
    description: str | None = Field(default=None, max_length=10_000)
    version: Name | None = None
    tags: tuple[Name, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)
    enforce_parameter_schema: bool = True
    paused: bool | None = None
    schedules: tuple[Schedule, ...] | None = None
    concurrency_limit: int | Limit | None = None
    work_pool: WorkPool = WorkPool()
    pull: tuple[()] | None = None

    @field_validator("schedules")
    @classmethod
    def _schedules_have_their_own_slugs(cls, value: tuple[Schedule, ...] | None) -> Any:
        refuse_two_of_a_slug(value or ())
        return value

    @field_validator("concurrency_limit", mode="before")
    @classmethod
    def _limit_in_either_form(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return checked(Limit, value)
        if value is not None and not (type(value) is int and 1 <= value <= _MOST_RUNS):
            raise SpecError(
                f"write a whole number from 1 to {_MOST_RUNS:,}, or limit and collision_strategy"
            )
        return value

    def build(self) -> RunnerDeployment:
        """Prefect's deployment of the flow at the entrypoint.

        Raises `InputError` where there is no such flow, or where it refuses the parameters.
        """
        flow = _flow_at(self.entrypoint)
        for given in ({}, *(schedule.parameters for schedule in self.schedules or ())):
            check_parameters(flow, self.parameters | given)
            _check_names((self.parameters | given).get("spec"))
        limit = self.concurrency_limit
        deployment = RunnerDeployment.from_flow(
            flow,
            self.name,
            description=self.description,
            version=self.version,
            tags=list(self.tags),
            parameters=self.parameters,
            enforce_parameter_schema=self.enforce_parameter_schema,
            paused=self.paused,
            schedules=[schedule.build() for schedule in self.schedules or ()] or None,
            concurrency_limit=limit.build() if isinstance(limit, Limit) else limit,
            work_queue_name=self.work_pool.work_queue_name,
            job_variables=self.work_pool.variables,
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        # What is sent replaces what is there: a pause or a schedule made in the UI is to stay.
        open_fields = {"paused": self.paused, "schedules": self.schedules or None}
        deployment.model_fields_set.difference_update(
            name for name, value in open_fields.items() if value is None
        )
        return deployment


def read_entries(path: Path) -> list[Entry]:
    """The deployments of a file, in its order; raises `InputError` naming what is wrong."""
    content = _content(path)
    entries = content.get("deployments")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path} names no deployments; it must hold a list of them")
    unknown = sorted(set(map(str, content)) - _IGNORED - {"deployments"})
    if unknown:
        raise InputError(f"{path}: there is no key {unknown[0]!r} outside of a deployment")
    found = [_entry(path, index, entry) for index, entry in enumerate(entries, 1)]
    keys = [(entry.entrypoint, entry.name) for entry in found]
    twice = sorted({name for key in keys if keys.count(key) > 1 for name in key[1:]})
    if twice:
        raise InputError(f"{path}: deployment {twice[0]} is there twice")
    return found


def read_deployments(path: Path, only: tuple[str, ...] = ()) -> list[RunnerDeployment]:
    """Prefect's deployments from a file, or those whose name is in `only`.

    Raises `InputError` in one line: the file, the deployment, and what is wrong with it.
    """
    entries = read_entries(path)
    names = [entry.name for entry in entries]
    for name in only:
        if name not in names:
            raise InputError(f"{path} has no deployment {name!r}; there are {', '.join(names)}")
    chosen = [entry for entry in entries if not only or entry.name in only]
    return [_built(path, entry) for entry in chosen]


def check_parameters(flow: Flow[..., Any], parameters: Mapping[str, Any]) -> None:
    """Hold parameters to the form of a flow, and to the flow itself if none is missing.

    Raises `SpecError` with the first thing that is wrong.
    """
    schema = flow.parameters.model_dump()
    known = schema["properties"]
    for name in parameters:
        if name not in known:
            raise SpecError(f"{flow.name} takes no parameter {name!r}; it takes {', '.join(known)}")
    check_json("parameters", parameters)
    for name, value in parameters.items():
        _refuse_unknown(name, value, known[name], schema.get("definitions") or {})
    try:
        # As the server does it, where what is missing may come with the run.
        validate(dict(parameters), schema, raise_on_error=True, ignore_required=True)
        flow.serialize_parameters(dict(parameters))  # refuses URIs with credentials
        if set(schema.get("required") or ()) <= set(parameters):
            flow.validate_parameters(dict(parameters))
    except SchemaError as exc:
        raise SpecError(str(exc)) from exc
    except ParameterTypeError as exc:
        cause = exc.__cause__ or exc.__context__
        known_cause = isinstance(cause, PydanticValidationError)
        raise SpecError(first_message(cause) if known_cause else str(exc)) from exc  # type: ignore[arg-type]


def _refuse_unknown(
    where: str, value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> None:
    """Refuse a misspelt key inside a parameter, naming those that there are."""
    reference = schema.get("$ref") or next(
        (part["$ref"] for part in schema.get("allOf", ()) if "$ref" in part), None
    )
    if reference:
        schema = definitions.get(str(reference).rpartition("/")[2], {})
    fields = schema.get("properties")
    if not isinstance(value, dict) or not fields or schema.get("additionalProperties") is not False:
        return
    for key, item in value.items():
        if key not in fields:
            raise SpecError(f"{where}.{key}: there is no such field; there are {', '.join(fields)}")
        _refuse_unknown(f"{where}.{key}", item, fields[key], definitions)


def _check_names(spec: Any) -> None:
    """Refuse a built-in that does not exist; what is not built in need not be installed here."""
    spec = spec if isinstance(spec, dict) else {}
    for field, kind, known in (
        ("features", "feature", tuple(built_ins.BUILT_IN)),
        ("trainer", "trainer", tuple(trainers.BUILT_IN)),
    ):
        name = spec.get(field)
        if isinstance(name, str) and not is_reference(name) and name not in known:
            raise unknown_built_in(kind, name, known)


def _content(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except FileNotFoundError:
        raise InputError(f"{path} is not there; name a file of deployments with --file") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} cannot be read: {exc}") from exc
    except RecursionError:
        raise _too_deep(path) from None
    except yaml.YAMLError as exc:
        raise InputError(f"{path} is no YAML: {' '.join(str(exc).split())}") from exc
    except (ValueError, LookupError, AttributeError) as exc:  # a 13th month, a `!!int` of nothing
        raise InputError(f"{path} holds a value that is none of its kind: {exc}") from exc
    if not isinstance(content, dict):
        raise InputError(f"{path} names no deployments; it must hold a list of them")
    _check_shape(path, content)
    return content


def _check_shape(path: Path, content: Any) -> None:
    """Refuse what holds itself, which an anchor can, before anything goes down into it."""
    level = [content]
    for _ in range(_MOST_LEVELS):
        pairs = [pair for item in level if isinstance(item, dict) for pair in item.items()]
        items = [item for values in level if isinstance(values, list | tuple) for item in values]
        level = [*(part for pair in pairs for part in pair), *items]
        if not level:
            return
        if len(level) > _MOST_VALUES:
            break
    raise _too_deep(path)


def _too_deep(path: Path) -> InputError:
    return InputError(
        f"{path} is nested too deeply or in itself; write out what its anchors (&) and aliases (*) "
        "stand for"
    )


def _entry(path: Path, index: int, entry: Any) -> Entry:
    where = f"{path}: deployment {_shown_name(entry) or index}"
    if not isinstance(entry, dict):
        raise InputError(f"{where} must be a mapping with name and entrypoint")
    if templates := sorted(_templates(entry)):
        raise InputError(
            f"{where}: {templates[0]!r} is a template, which only `prefect deploy` fills in"
        )
    try:
        return checked(Entry, entry)
    except SpecError as exc:
        raise InputError(f"{where}: {_in_a_line(exc)}") from exc


def _shown_name(entry: Any) -> str | None:
    """The name of a deployment, where it has one that can be shown."""
    name = entry.get("name") if isinstance(entry, dict) else None
    try:
        return a_name(name) if isinstance(name, str) else None
    except SpecError:
        return None


def _in_a_line(exc: Exception) -> str:
    return " ".join(str(exc).split())


def _templates(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value} if "{{" in value else set()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {found for item in values for found in _templates(item)}


def _built(path: Path, entry: Entry) -> RunnerDeployment:
    try:
        return entry.build()
    except InputError as exc:
        raise InputError(f"{path}: deployment {entry.name}: {_in_a_line(exc)}") from exc


def _flow_at(entrypoint: str) -> Flow[..., Any]:
    parts = entrypoint.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise InputError(
            f"entrypoint {entrypoint!r} must be a dotted path of an installed module, such as "
            "flows.export_features.export_features"
        )
    try:
        return load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
    except Exception as exc:  # whatever a module does while it is imported
        said = f"{type(exc).__name__}: {_in_a_line(exc)}"
        raise InputError(f"there is no flow at {entrypoint}: {said}") from exc
