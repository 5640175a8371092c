"""The built-in trainers, one file a framework; each framework is an extra."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from signal_batch.errors import InputError, SpecError
from signal_batch.frozen import digest
from signal_batch.references import is_reference, load, unknown_built_in
from signal_batch.training import Trainer

#: Module, class and a version that is raised when the same run would give other arrays.
BUILT_IN = {
    "sklearn": ("signal_batch.trainers.sklearn", "SklearnTrainer", 1),
    "jax": ("signal_batch.trainers.jax", "JaxTrainer", 1),
}
_METHODS = ("init", "step", "evaluate", "state", "load")


def resolve_trainer(name: str) -> tuple[Callable[[], Trainer], str]:
    """The class of a built-in or `package.module:Class`, and its part of the run key.

    Raises `SpecError` where there is none or it is no trainer, `InputError` where its framework
    is not installed.
    """
    if is_reference(name):
        made, source = load("trainer", name)
    elif name in BUILT_IN:
        module, attribute, version = BUILT_IN[name]
        try:
            made = getattr(import_module(module), attribute)
        except ImportError as exc:
            raise InputError(
                f"trainer {name!r} needs an extra: pip install 'signal-batch[{name}]' ({exc})"
            ) from exc
        source = digest(["built-in", name, version])
    else:
        raise unknown_built_in("trainer", name, tuple(BUILT_IN))
    if lacking := [method for method in _METHODS if not callable(getattr(made, method, None))]:
        raise SpecError(
            f"trainer {name!r} lacks {', '.join(lacking)}; see signal_batch.training.Trainer for "
            "what a trainer has"
        )
    return made, source
