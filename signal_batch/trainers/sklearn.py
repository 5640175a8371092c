"""The built-in trainer `sklearn`: classifiers of scikit-learn that learn batch by batch.

Any classifier of `sklearn.linear_model`, `sklearn.neural_network` or `sklearn.naive_bayes` that has
`partial_fit` will do. Options:

- `estimator`, the name of its class, by default `SGDClassifier`;
- `estimator_args`, a dict of arguments to the class. Without a `random_state` it is the run's seed,
  and `SGDClassifier` learns with `loss="log_loss"`, so that it gives probabilities. The keys of a
  `class_weight` are the classes as text.

The model sees all inputs side by side as one float64 row a record: each input flattened, a complex
one as all real parts followed by all imaginary parts. float64, because these estimators work in
the dtype of what they are given, and in float32 naive Bayes stops counting records at 2**24 and
gradient descent loses its smallest steps. Most of them need inputs of about unit size, so let a
transform standardise them first.

A step is one `partial_fit`. With an integer as its `random_state` scikit-learn makes a new
generator at every call of it, so there is no random state to carry from step to step; records come
in the run's own shuffled order, and drawing the same numbers for every batch does no harm.
"""

from __future__ import annotations

import difflib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from signal_batch.batches import Array, ordinal_range
from signal_batch.errors import SpecError
from signal_batch.training import (
    ArraySpec,
    BatchSpec,
    Classifier,
    Label,
    Metrics,
    ModelBatch,
    State,
    check_classes,
    cross_entropy,
)

OPTIONS = ("estimator", "estimator_args")
DEFAULT_ESTIMATOR = "SGDClassifier"
DEFAULT_ARGS: Mapping[str, Mapping[str, Any]] = {"SGDClassifier": {"loss": "log_loss"}}

_MODULES = ("sklearn.linear_model", "sklearn.neural_network", "sklearn.naive_bayes")
#: Its tables take up one more column for every new value, and it takes whole numbers only.
_GROWS = "CategoricalNB"
#: Copies of the first weights, which only early stopping goes back to.
_NEVER_READ = ("_best_coefs", "_best_intercepts")
#: The entry of the state that says which arrays are one and the same; see `_shared`.
_SHARED = "shared"


class SklearnTrainer(Classifier):
    """Trains one scikit-learn classifier, kept in `estimator`, by `partial_fit`.

    scikit-learn is an extra and is loaded by `init`.
    """

    estimator: Any

    def init(self, batch_spec: BatchSpec, options: Mapping[str, Any]) -> None:
        """Make the estimator and try it on a record of zeros.

        Raises `SpecError` for options, arguments or batches that it cannot work with: trying it
        shows here what scikit-learn would say at the first step.
        """
        self.spec = batch_spec
        if unknown := [name for name in options if name not in OPTIONS]:
            raise SpecError(
                f"trainer sklearn has no option {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(OPTIONS)}"
            )
        self._width = sum(_width(name, batch_spec.arrays[name]) for name in batch_spec.inputs)
        _check_batches(batch_spec, self._width)
        self._name = options.get("estimator", DEFAULT_ESTIMATOR)
        kind = _find(self._name)
        args = _arguments(kind, options.get("estimator_args", {}), batch_spec)
        self._make: Callable[[], Any] = partial(_quietly, kind, **args)
        self.estimator = self._make()
        try:
            self._primed()
        except Exception as exc:
            raise SpecError(
                f"{self._name} does not work with these estimator_args: {_said(exc)}"
            ) from exc

    def step(self, batch: ModelBatch) -> Metrics:
        """`loss` and `accuracy` of the batch, as in `evaluate`; then learn from it.

        They are worked out before learning, so they tell how the model does on records that it
        has not seen in this epoch, as the loss of a deep learning framework's training step does
        (progressive validation: A. Blum, A. Kalai and J. Langford, "Beating the hold-out", COLT
        1999). The first step has no model yet and is given the uniform distribution: a loss of
        log(classes). Raises `SpecError` for values that the estimator cannot learn from.
        """
        assert self.spec.target is not None
        features, truth = self._features(batch), batch[self.spec.target]
        probabilities = self._probabilities(features)
        try:
            self._learn(self.estimator, features, truth)
        except ValueError as exc:
            raise SpecError(
                f"{self._name} cannot learn from {ordinal_range(batch)}: {_said(exc)}"
            ) from exc
        return {
            "loss": float(cross_entropy(probabilities, truth).mean()),
            "accuracy": float((probabilities.argmax(axis=1) == truth).mean()),
        }

    def predict(self, batch: ModelBatch) -> dict[str, Array]:
        """`probabilities`, float32 (records, classes); 1 / classes before the first step.

        They are those of `predict_proba`. An estimator without one (a perceptron, a hinge loss)
        gives the softmax of its decision function, for two classes of (0, decision): this keeps
        the order of the scores but is no calibrated probability.
        """
        return {"probabilities": self._probabilities(self._features(batch))}

    def state(self) -> State:
        """Fitted arrays and numbers, named by attribute: `coef_`, `coefs_.0`, `_optimizer.ms.1`.

        Empty before the first step; from then on names, shapes and dtypes stay the same.
        """
        if not self._fitted:
            return {}
        leaves = self._leaves(self.estimator)
        arrays = {name: np.asarray(leaf.value) for name, leaf in leaves.items()}
        return {**arrays, _SHARED: _shared([leaf.value for leaf in leaves.values()])}

    def load(self, state: State) -> None:
        """Go on from `state`, of which only copies are kept.

        An estimator that has learned from a record of zeros has every attribute that is needed,
        and then gets the values. Raises `SpecError` for the state of another estimator.
        """
        if not state:
            self.estimator = self._make()
            return
        estimator = self._primed()
        leaves = self._leaves(estimator)
        _check_state(self._name, leaves, state)
        restored: list[Any] = []
        for (name, leaf), same in zip(leaves.items(), state[_SHARED].tolist(), strict=True):
            value = state[name]
            if same < len(restored):
                restored.append(restored[same].reshape(value.shape))
            elif isinstance(leaf.value, np.ndarray):
                restored.append(np.array(value, order="C"))
            else:
                restored.append(value.item())
            leaf.holder[leaf.key] = restored[-1]
        self.estimator = estimator

    @property
    def _fitted(self) -> bool:
        return hasattr(self.estimator, "classes_")

    def _primed(self) -> Any:
        """An estimator after one step on a record of zeros of the first class."""
        estimator = self._make()
        self._learn(estimator, np.zeros((1, self._width)), np.zeros(1, np.int32))
        return estimator

    def _learn(self, estimator: Any, features: Array, truth: Array) -> None:
        classes = np.arange(len(self.spec.classes))
        _quietly(estimator.partial_fit, features, truth, classes=classes)
        # The losses of all steps so far, which nothing reads again.
        getattr(estimator, "loss_curve_", []).clear()

    def _features(self, batch: ModelBatch) -> Array:
        """float64 (records, features) of all inputs."""
        parts = []
        for name in self.spec.inputs:
            part = _flat(batch[name])
            if not (finite := np.isfinite(part).all(axis=1)).all():
                raise SpecError(
                    f"input {name!r} has NaN or infinity in record "
                    f"{batch['id'][int(finite.argmin())]}, which {self._name} cannot take; mend it "
                    "in a transform or leave such records out"
                )
            parts.append(part)
        return np.concatenate(parts, axis=1)

    def _probabilities(self, features: Array) -> Array:
        """float32 (records, classes)."""
        classes = len(self.spec.classes)
        if not self._fitted:
            return np.full((len(features), classes), 1 / classes, np.float32)
        probabilities: Array = _quietly(_probabilities, self.estimator, features)
        return probabilities.astype(np.float32)

    def _leaves(self, estimator: Any) -> dict[str, _Leaf]:
        """What fitting added to an estimator, sorted by name."""
        unfitted = vars(self._make())
        found = _leaves(vars(estimator), "", (*unfitted, *_NEVER_READ))
        return dict(sorted((leaf.name, leaf) for leaf in found))


# --- the batches and the arguments -------------------------------------------------------------


def _check_batches(spec: BatchSpec, width: int) -> None:
    check_classes(spec, "trainer sklearn")
    if not width:
        raise SpecError("trainer sklearn has nothing to learn from: the inputs hold no values")


def _width(name: str, array: ArraySpec) -> int:
    """Features that an input turns into."""
    dtype = np.dtype(array.dtype)
    if dtype.kind not in "biufc":
        raise SpecError(f"input {name!r} is {array.dtype}; trainer sklearn takes numbers only")
    lengths = [length for length in array.shape if length is not None]
    if len(lengths) < len(array.shape):
        raise SpecError(
            f"input {name!r} differs in length from batch to batch, and trainer sklearn needs one "
            "length: use lengths=pad or lengths=crop, or a transform to features of one shape, "
            "such as statistics"
        )
    return math.prod(lengths) * (2 if dtype.kind == "c" else 1)


def _find(name: Any) -> type[Any]:
    """The class of an estimator; SpecError if there is none that learns batch by batch."""
    modules = _modules()
    base = importlib.import_module("sklearn.base")
    known = {
        key: found
        for module in modules
        for key in module.__all__
        if isinstance(found := getattr(module, key), type)
    }
    able = [
        key
        for key, found in known.items()
        if issubclass(found, base.ClassifierMixin) and hasattr(found, "partial_fit")
    ]
    able.remove(_GROWS)
    if name in able:
        return known[name]
    if name not in known:
        problem = f"there is no {name!r} in {', '.join(_MODULES)}{_near(str(name), able)}"
    elif not issubclass(known[name], base.ClassifierMixin):
        problem = f"{name} is no classifier"
    elif name == _GROWS:
        problem = f"{name} needs more room with every new value, and its state has to keep its size"
    else:
        problem = f"{name} has no partial_fit and cannot learn batch by batch"
    raise SpecError(f"{problem}; trainer sklearn takes {', '.join(able)}")


def _modules() -> list[ModuleType]:
    try:
        return [importlib.import_module(name) for name in _MODULES]
    except ModuleNotFoundError as exc:
        raise SpecError(
            f"trainer sklearn needs scikit-learn ({exc}); install signal-batch[sklearn]"
        ) from exc


def _arguments(kind: type[Any], given: Any, spec: BatchSpec) -> dict[str, Any]:
    """Everything to make an estimator with."""
    if not isinstance(given, Mapping):
        raise SpecError(f"estimator_args must be a dict of arguments, not {given!r}")
    names = list(_quietly(kind).get_params(deep=False))
    if unknown := [name for name in given if name not in names]:
        raise SpecError(
            f"{kind.__name__} has no argument {unknown[0]!r}{_near(str(unknown[0]), names)}; it "
            f"takes {', '.join(names) or 'none'}"
        )
    args = {**DEFAULT_ARGS.get(kind.__name__, {}), **given}
    # None would be a different seed in each run.
    if "random_state" in names and args.get("random_state") is None:
        args["random_state"] = spec.seed
    if isinstance(args.get("class_weight"), Mapping):
        args["class_weight"] = _by_index(args["class_weight"], spec.classes)
    return args


def _by_index(weights: Mapping[str, Any], classes: Sequence[Label]) -> dict[int, Any]:
    """Weights by index into the classes, from weights by class: the keys of JSON are text."""
    indices = {str(label): index for index, label in enumerate(classes)}
    if unknown := [key for key in weights if str(key) not in indices]:
        raise SpecError(
            f"class_weight names {unknown[0]!r}, which is no class; there are {', '.join(indices)}"
        )
    return {indices[str(key)]: weight for key, weight in weights.items()}


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


# --- numbers -----------------------------------------------------------------------------------


def _flat(values: Array) -> Array:
    """float64 (records, features) of one input."""
    rows = values.reshape(len(values), math.prod(values.shape[1:]))
    if rows.dtype.kind == "c":
        rows = np.concatenate([rows.real, rows.imag], axis=1)
    return rows.astype(np.float64)


def _probabilities(estimator: Any, features: Array) -> Array:
    """(records, classes) of a fitted estimator.

    One classifier for each class may give all of them a probability of 0: far from what it has
    seen, the logistic function underflows. scikit-learn makes that 1 / classes, the same for each,
    while the limit of dividing by the sum is the softmax of the decision function: it keeps the
    largest one the largest.
    """
    if not hasattr(estimator, "predict_proba"):
        return _softmax(estimator.decision_function(features))
    probabilities: Array = estimator.predict_proba(features)
    undecided = ~(probabilities.max(axis=1) > probabilities.min(axis=1))
    if undecided.any() and hasattr(estimator, "decision_function"):
        probabilities[undecided] = _softmax(estimator.decision_function(features[undecided]))
    return probabilities


def _softmax(scores: Array) -> Array:
    """(records, classes) from a decision function: (records, classes), (records,) for two."""
    if scores.ndim == 1:
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call without warnings: no step converges, and a class not seen yet has a log(0)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


def _said(exc: Exception) -> str:
    """What scikit-learn has to say: the reason why a method is not there, or the first line."""
    reason = exc.__cause__ if isinstance(exc, AttributeError) else None
    lines = str(reason or exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__


# --- the state ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An array or number inside an estimator, and where it is kept."""

    name: str
    holder: Any  # the dict of an object's attributes, or a list
    key: Any

    @property
    def value(self) -> Any:
        return self.holder[self.key]


def _leaves(holder: Any, prefix: str, skip: Sequence[str] = ()) -> Iterator[_Leaf]:
    """Arrays and numbers among attributes, in lists of arrays and in parts such as an optimizer.

    Lists of numbers are histories. Other objects follow from the arguments and the classes, and
    are the same in every estimator that has learned from anything.
    """
    for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
        if key in skip:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, bool | int | float | np.generic | np.ndarray):
            if np.asarray(value).dtype.kind in "biuf":
                yield _Leaf(name, holder, key)
        elif isinstance(value, list):
            if all(isinstance(item, np.ndarray) for item in value):
                yield from _leaves(value, f"{name}.")
        elif type(value).__module__.startswith("sklearn.") and not hasattr(value, "get_params"):
            yield from _leaves(getattr(value, "__dict__", {}), f"{name}.")


def _shared(values: Sequence[Any]) -> Array:
    """For each value the index of the first one in the same memory, int32 (values,).

    Averaging in scikit-learn has several names for one array, changes which in the course of
    training, and writes to it by one name what it reads by another.
    """
    first: dict[Any, int] = {}
    indices = []
    for index, value in enumerate(values):
        place: Any = index
        if isinstance(value, np.ndarray) and value.size:
            place = (value.__array_interface__["data"][0], value.nbytes)
        indices.append(first.setdefault(place, index))
    return np.array(indices, np.int32)


def _check_state(name: str, leaves: Mapping[str, _Leaf], state: State) -> None:
    wrong = sorted({*leaves, _SHARED} ^ set(state)) or [
        key for key, leaf in leaves.items() if np.shape(leaf.value) != np.shape(state[key])
    ]
    if wrong:
        raise SpecError(
            f"the state is not that of {name} with these arguments and this version of "
            f"scikit-learn: they differ in {', '.join(wrong)}"
        )
