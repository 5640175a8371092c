"""Functions that a spec names as `package.module:function`: finding, checking, calling them.

Messages begin with what the function is to be, `feature 'x:y'` or `transform 'x:y'`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from signal_batch.batches import Array, Batch, Values
from signal_batch.errors import FeatureError, InputError, SpecError
from signal_batch.frozen import digest

_PLACES = ("first", "second")


def is_reference(name: str) -> bool:
    """Whether a name is `package.module:function` rather than that of a built-in."""
    return ":" in name


def load(kind: str, reference: str) -> tuple[Callable[..., Any], str]:
    """The function behind a reference, and the hash of its source for the run key.

    The hash covers the whole source file, so helpers beside the function count too.

    Raises `SpecError` when there is no such function.
    """
    module_name, _, attribute = reference.partition(":")
    subject = f"{kind} {reference!r}"
    module = _import_module(subject, module_name)
    function = _attribute(subject, module, attribute)
    return function, _source_sha256(reference, module, function)


def unknown_built_in(kind: str, name: str, known: Sequence[str]) -> SpecError:
    """The error for a name that is neither a built-in nor a reference."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return SpecError(
        f"{name!r} is not a built-in {kind}; {hint}The built-ins are {', '.join(known)}; "
        "a function of your own is written package.module:function"
    )


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; compiled ones may have no signature to look at."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def check_options(
    subject: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    given: Sequence[str] = ("batch",),
) -> None:
    """Refuse options that the function does not take after the arguments it is `given`.

    Raises `SpecError` that begins with `subject`.
    """
    parameters = parameters_of(function)
    if parameters is None:
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for at, argument in enumerate(given):
        if len(parameters) <= at or parameters[at].kind not in positional:
            raise SpecError(f"{subject} must take the {argument} as its {_PLACES[at]} argument")
    named = [p for p in parameters[len(given) :] if p.kind in (positional[1], p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    unknown = [name for name in options if name not in names]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes = f"it takes {', '.join(names)}" if names else "it takes none"
        raise SpecError(f"{subject} has no option {', '.join(map(repr, unknown))}; {takes}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in options]
    if missing:
        raise SpecError(f"{subject} needs the option {', '.join(map(repr, missing))}")


def call(
    subject: str,
    function: Callable[..., Any],
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    noun: str = "batch",
) -> Any:
    """What a person's function returns; `given` begins with a mapping, the batch or record.

    Raises `FeatureError` that begins with `subject` and says where the function failed.
    """
    try:
        return function(*given, **options)
    except (InputError, KeyboardInterrupt):  # written for people already, or a person's wish
        raise
    except BaseException as exc:  # a function that calls sys.exit() must not end the run
        where = traceback.extract_tb(exc.__traceback__)[-1]
        raise FeatureError(
            f"{subject}: {type(exc).__name__}: {exc} (in {where.name}, {where.filename}, line "
            f"{where.lineno}; the {noun} has {', '.join(given[0])})"
        ) from exc


def read_only(batch: Mapping[str, Values]) -> Batch:
    """Views that a function cannot change: ids and labels are written as they were read."""

    def locked(array: Array) -> Array:
        view = array.view()
        view.setflags(write=False)
        return view

    return {
        name: [locked(item) for item in value] if isinstance(value, list) else locked(value)
        for name, value in batch.items()
    }


def _import_module(subject: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise SpecError(f"{subject}: importing {name} failed: {exc}") from exc
        raise SpecError(
            f"{subject}: there is no module {exc.name!r} here; install the package "
            "or put its folder on PYTHONPATH, on every machine that runs workers"
        ) from exc
    except Exception as exc:
        raise SpecError(f"{subject}: importing {name} failed: {type(exc).__name__}: {exc}") from exc


def _attribute(subject: str, module: ModuleType, name: str) -> Callable[..., Any]:
    try:
        function = getattr(module, name)
    except AttributeError as exc:
        close = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SpecError(f"{subject}: {module.__name__} has no attribute {name!r}{hint}") from exc
    if not callable(function):
        raise SpecError(f"{subject} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _source_sha256(reference: str, module: ModuleType, function: Callable[..., Any]) -> str:
    """Hash of the files of the named module and of the one that defines the function.

    Both, because a package may only hand the function on. Without source (a compiled module)
    the reference alone stands for it.
    """
    while isinstance(function, partial):
        function = function.func
    defining = inspect.getmodule(inspect.unwrap(function)) or module
    hashes = set()
    for origin in (module, defining):
        file = getattr(origin, "__file__", None)
        if file is not None and file.endswith(".py") and Path(file).is_file():
            hashes.add(sha256(Path(file).read_bytes()).hexdigest())
    return digest(sorted(hashes) or reference)
