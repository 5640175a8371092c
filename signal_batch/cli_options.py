"""What the commands have in common: adding one, reading spec files and KEY=VALUE options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from signal_batch.errors import SpecError
from signal_batch.execution import refuse_block
from signal_batch.job import Outcome
from signal_batch.publishing import TrainOutcome
from signal_batch.scheduling import at_time, parse_moment


def from_environment(credentials: str | None) -> AbstractContextManager[None]:
    """The storage's credentials as the environment has them; a block takes a server."""
    refuse_block(credentials)
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Runners:
    """What runs a job: this program's own worker processes, or a Prefect flow around them.

    Jobs that run within one `session` share what it takes long to start, also those of child
    processes, which run `module` as this command does. The storage is looked at within `storage`,
    which has the credentials of a spec at hand. `add_commands` adds those that only make
    sense with a server.
    """

    export: Callable[..., Outcome]
    train: Callable[..., TrainOutcome]
    session: Callable[[], AbstractContextManager[None]] = nullcontext
    storage: Callable[[str | None], AbstractContextManager[None]] = from_environment
    module: str = "signal_batch"
    add_commands: Callable[[Any], None] = lambda commands: None


Run = Callable[[argparse.Namespace, Runners], int]
S = TypeVar("S", bound=BaseModel)


def command(
    commands: Any, name: str, run: Run, summary: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Add a command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_scheduled(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which moment a job is for."""
    parser.add_argument(
        "--scheduled",
        metavar="TIME",
        help="date or time, UTC, that {scheduled:%%Y-%%m-%%d} in DATASET, OUT and --pin stands for",
    )


def as_scheduled(spec: S, arguments: argparse.Namespace) -> S:
    """The spec as of `--scheduled`; as it is where that was not given."""
    text = getattr(arguments, "scheduled", None)
    return spec if text is None else at_time(spec, parse_moment(text))


def fields_from(
    arguments: argparse.Namespace,
    *,
    options: set[str],
    execution: Sequence[str],
    pairs: Sequence[str],
) -> dict[str, Any]:
    """The fields of a spec from `--spec` and the options given, options winning.

    `execution` are the options that belong there, `pairs` those that are lists of KEY=VALUE.
    """
    fields: dict[str, Any] = _spec_file(arguments.spec) if arguments.spec else {}
    given = {name: value for name, value in vars(arguments).items() if name in options}
    chosen = {name: given.pop(name) for name in execution if name in given}
    for name in pairs:
        if name in given:
            flag = f"--{name[:-1].replace('_', '-')}"
            given[name] = dict(key_value(flag, text) for text in given[name])
    fields |= given
    written = fields.get("execution") or {}
    if chosen and isinstance(written, dict):  # anything else is refused by the model
        fields["execution"] = written | chosen
    for name in ("dataset", "output"):
        if name not in fields:
            raise SpecError(f"no {name} given: name it on the command line or in --spec")
    if not fields.get("columns"):
        raise SpecError("name at least one column, for example --column field:samples")
    return fields


def key_value(option: str, text: str) -> tuple[str, Any]:
    """A key and its value, JSON or text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SpecError(f"{option} {text!r} must read KEY=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _spec_file(path: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as exc:
        raise SpecError(f"--spec {path} cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise SpecError(f"--spec {path} must hold the fields of a spec")
    return value
