"""The trainer `sklearn`: against scikit-learn itself, after a resume, and what it refuses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model
import sklearn.naive_bayes
import sklearn.neural_network
from safetensors.numpy import load, save
from sklearn.base import ClassifierMixin

from signal_batch.errors import SpecError
from signal_batch.trainers.sklearn import SklearnTrainer
from signal_batch.training import ArraySpec, BatchSpec, ModelBatch, Trainer

MODULES = (sklearn.linear_model, sklearn.neural_network, sklearn.naive_bayes)
SEED, STEPS, RECORDS, FEATURES = 5, 6, 12, 6

#: Name of a case: class of the estimator, its arguments.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGDClassifier", {}),
    "sgd hinge": ("SGDClassifier", {"loss": "hinge", "penalty": "elasticnet"}),
    "sgd huber": ("SGDClassifier", {"loss": "modified_huber", "learning_rate": "invscaling"}),
    "sgd averaged": ("SGDClassifier", {"average": True}),
    "sgd averaged late": ("SGDClassifier", {"average": 4 * RECORDS}),
    "mlp adam": ("MLPClassifier", {"hidden_layer_sizes": [5, 3]}),
    "mlp small batches": ("MLPClassifier", {"hidden_layer_sizes": 4, "batch_size": 5}),
    "mlp sgd": ("MLPClassifier", {"hidden_layer_sizes": [4], "solver": "sgd", "momentum": 0.8}),
    "mlp plain momentum": ("MLPClassifier", {"solver": "sgd", "nesterovs_momentum": False}),
    "mlp invscaling": ("MLPClassifier", {"solver": "sgd", "learning_rate": "invscaling"}),
    "mlp adaptive": (
        "MLPClassifier",
        {"solver": "sgd", "learning_rate": "adaptive", "n_iter_no_change": 1, "tol": 0.5},
    ),
    "perceptron": ("Perceptron", {"penalty": "l2"}),
    "gaussian": ("GaussianNB", {}),
    "multinomial": ("MultinomialNB", {"alpha": 0.5}),
    "complement": ("ComplementNB", {}),
    "bernoulli": ("BernoulliNB", {"binarize": 1.0}),
}
if hasattr(sklearn.linear_model, "PassiveAggressiveClassifier"):  # until scikit-learn 1.10
    CASES["passive aggressive"] = ("PassiveAggressiveClassifier", {"C": 0.1})


def spec(count: int = 4, **changes: Any) -> BatchSpec:
    values: dict[str, Any] = {
        "arrays": {
            "x": ArraySpec((2, FEATURES // 2), "float32"),
            "y": ArraySpec((), "int32"),
        },
        "inputs": ("x",),
        "target": "y",
        "classes": tuple("abcdefgh"[:count]),
        "batch_size": RECORDS,
        "total_steps": STEPS,
        "seed": SEED,
    }
    return BatchSpec(**values | changes)


def trainer(
    estimator: str | None = None,
    args: Mapping[str, Any] | None = None,
    batches: BatchSpec | None = None,
) -> SklearnTrainer:
    given = {"estimator": estimator, "estimator_args": args}
    made = SklearnTrainer()
    made.init(batches or spec(), {name: v for name, v in given.items() if v is not None})
    return made


def batch(number: int, classes: int = 4, **columns: Any) -> ModelBatch:
    """Records of overlapping classes, none negative, of which a batch need not have all."""
    rng = np.random.default_rng([number, classes])
    truth = rng.integers(0, classes, RECORDS).astype(np.int32)
    noise = rng.standard_normal((RECORDS, 2, FEATURES // 2))
    return {
        "x": np.abs(truth[:, None, None] + noise).astype(np.float32),
        "y": truth,
        "ordinal": np.arange(RECORDS) + RECORDS * number,
        "id": np.array([f"r{i}" for i in range(RECORDS)], dtype=object),
        **columns,
    }


def rows(found: ModelBatch) -> np.ndarray:
    return found["x"].reshape(len(found["x"]), -1).astype(np.float64)


def plain(name: str, args: Mapping[str, Any]) -> Any:
    """The estimator itself, with the defaults that the trainer promises."""
    kind = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = kind().get_params()
        defaults = {"random_state": SEED} if "random_state" in names else {}
        if name == "SGDClassifier":
            defaults["loss"] = "log_loss"
        return kind(**defaults | args)


def learn(estimator: Any, batches: Iterator[ModelBatch], classes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in batches:
            estimator.partial_fit(rows(each), each["y"], classes=np.arange(classes))


def same(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Equal bit for bit, names and dtypes included."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert actual[name].tobytes() == value.tobytes(), name


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


# --- learning ----------------------------------------------------------------------------------


def test_it_is_a_trainer() -> None:
    assert isinstance(SklearnTrainer(), Trainer)


def test_every_classifier_that_learns_in_batches_is_tried_here() -> None:
    able = {
        name
        for module in MODULES
        for name in module.__all__
        if isinstance(kind := getattr(module, name), type)
        and issubclass(kind, ClassifierMixin)
        and hasattr(kind, "partial_fit")
    }
    assert {name for name, _ in CASES.values()} == able - {"CategoricalNB"}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_an_uninterrupted_one_is_scikit_learn(case: str, classes: int) -> None:
    name, args = CASES[case]
    alone = trainer(name, args, spec(classes))
    reference = plain(name, args)
    resumed = trainer(name, args, spec(classes))
    for number in range(STEPS):
        alone.step(batch(number, classes))
        if number in (0, 1, 4):
            stored = load(save(resumed.state()))
            resumed = trainer(name, args, spec(classes))
            resumed.load(stored)
            same(resumed.state(), stored)
        resumed.step(batch(number, classes))
        same(resumed.state(), alone.state())
        learn(reference, iter([batch(number, classes)]), classes)

    fitted = {
        key: value
        for key, value in vars(reference).items()
        if key.endswith("_") and isinstance(value, float | int | np.ndarray)
    }
    assert fitted
    same({key: alone.state()[key] for key in fitted}, {k: np.asarray(v) for k, v in fitted.items()})
    other = batch(99, classes)
    probabilities = resumed.predict(other)["probabilities"]
    if hasattr(reference, "predict_proba"):
        expected = reference.predict_proba(rows(other)).astype(np.float32)
        np.testing.assert_array_equal(probabilities, expected)
    else:
        np.testing.assert_array_equal(probabilities.argmax(1), reference.predict(rows(other)))


def test_the_weights_of_a_network_are_those_of_scikit_learn() -> None:
    args = {"hidden_layer_sizes": [5, 3], "solver": "adam"}
    network, reference = trainer("MLPClassifier", args), plain("MLPClassifier", args)
    for number in range(STEPS):
        network.step(batch(number))
    learn(reference, map(batch, range(STEPS)), 4)
    state = network.state()
    for layer in range(3):
        np.testing.assert_array_equal(state[f"coefs_.{layer}"], reference.coefs_[layer])
        np.testing.assert_array_equal(state[f"intercepts_.{layer}"], reference.intercepts_[layer])
    for index, moments in enumerate(reference._optimizer.vs):
        np.testing.assert_array_equal(state[f"_optimizer.vs.{index}"], moments)


@pytest.mark.parametrize("case", CASES)
def test_the_state_keeps_its_size(case: str) -> None:
    learner = trainer(*CASES[case])
    assert learner.state() == {}
    kinds = set()
    for number in range(5):
        learner.step(batch(number))
        state = learner.state()
        kinds.add(tuple((name, value.shape, str(value.dtype)) for name, value in state.items()))
        assert all(value.dtype.kind in "biuf" for value in state.values())
    assert len(kinds) == 1


def test_the_losses_of_a_network_do_not_pile_up() -> None:
    network = trainer("MLPClassifier")
    for number in range(3):
        network.step(batch(number))
    assert network.estimator.loss_curve_ == []


@pytest.mark.parametrize("case", ["sgd", "sgd averaged", "mlp adam", "mlp sgd", "gaussian"])
def test_loading_keeps_nothing_of_the_callers(case: str) -> None:
    learner = trainer(*CASES[case])
    learner.step(batch(0))
    stored = {name: value.copy() for name, value in learner.state().items()}
    handed = {name: value.copy() for name, value in stored.items()}
    learner.load(handed)
    learner.step(batch(1))
    same(handed, stored)
    expected = {name: value.copy() for name, value in learner.state().items()}
    for value in handed.values():
        value[...] = 0
    same(learner.state(), expected)


def test_an_empty_state_starts_anew() -> None:
    learner = trainer()
    learner.step(batch(0))
    first = {name: value.copy() for name, value in learner.state().items()}
    learner.load({})
    assert learner.state() == {}
    learner.step(batch(0))
    same(learner.state(), first)


def test_the_run_seeds_what_is_random() -> None:
    def weights(args: dict[str, Any], seed: int) -> np.ndarray:
        learner = trainer("MLPClassifier", args, spec(seed=seed))
        learner.step(batch(0))
        return learner.state()["coefs_.0"]

    first = weights({}, 1)
    np.testing.assert_array_equal(first, weights({"random_state": None}, 1))
    np.testing.assert_array_equal(first, weights({"random_state": 1}, 2))
    assert not np.array_equal(first, weights({}, 2))


def test_weights_of_classes_go_by_their_names() -> None:
    weighted = trainer("SGDClassifier", {"class_weight": {"b": 3.0, "d": 0.5}})
    reference = plain("SGDClassifier", {"class_weight": {1: 3.0, 3: 0.5}})
    weighted.step(batch(0))
    learn(reference, iter([batch(0)]), 4)
    np.testing.assert_array_equal(weighted.state()["coef_"], reference.coef_)


def test_all_inputs_are_seen_side_by_side_and_masks_are_not() -> None:
    """Naive Bayes learns the mean of each feature of a class."""
    rng = np.random.default_rng(0)
    truth = np.array([0, 1, 1, 0, 1], np.int32)
    columns: ModelBatch = {
        "iq": (rng.standard_normal((5, 2, 3)) + 1j * rng.standard_normal((5, 2, 3))).astype("c8"),
        "level": rng.integers(-3, 3, 5).astype(np.int16),
        "x": rng.standard_normal((5, 4)).astype(np.float32),
        "x_mask": np.ones((5, 4), bool),
        "flags": rng.random((5, 2)) < 0.5,
    }
    arrays = {name: ArraySpec(value.shape[1:], str(value.dtype)) for name, value in columns.items()}
    learner = trainer(
        "GaussianNB", batches=spec(2, arrays=arrays, inputs=("x", "iq", "level", "flags"))
    )
    learner.step({**columns, "y": truth, "ordinal": np.arange(5), "id": np.arange(5)})
    wide = np.column_stack(
        [
            columns["x"],
            columns["iq"].real.reshape(5, 6),
            columns["iq"].imag.reshape(5, 6),
            columns["level"],
            columns["flags"],
        ]
    ).astype(np.float64)
    expected = [wide[truth == index].mean(0) for index in range(2)]
    assert learner.state()["theta_"].dtype == np.float64
    np.testing.assert_allclose(learner.state()["theta_"], expected, rtol=1e-12)


# --- metrics and probabilities -----------------------------------------------------------------


def test_metrics_of_a_step_come_before_learning_from_it() -> None:
    learner = trainer("SGDClassifier", {"alpha": 0.1})
    learner.step(batch(0))
    coef, intercept = (learner.state()[name].copy() for name in ("coef_", "intercept_"))
    metrics = learner.step(batch(1))
    each = 1 / (1 + np.exp(-(rows(batch(1)) @ coef.T + intercept)))  # one class against the rest
    probabilities, truth = each / each.sum(1, keepdims=True), batch(1)["y"]
    chosen = np.maximum(probabilities[np.arange(RECORDS), truth], 1e-12)
    assert metrics["loss"] == pytest.approx(-np.log(chosen).mean(), rel=1e-5)
    assert metrics["accuracy"] == np.mean(probabilities.argmax(1) == truth)
    assert set(map(type, metrics.values())) == {float}


def test_without_a_model_every_class_is_as_likely() -> None:
    learner = trainer()
    first = batch(0)
    probabilities = learner.predict(first)["probabilities"]
    assert probabilities.dtype == np.float32
    np.testing.assert_array_equal(probabilities, np.full((RECORDS, 4), 0.25))
    metrics = learner.step(first)
    assert metrics["loss"] == pytest.approx(np.log(4))
    assert metrics["accuracy"] == np.mean(first["y"] == 0)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("case", ["perceptron", "sgd hinge"])
def test_scores_become_a_softmax(case: str, classes: int) -> None:
    name, args = CASES[case]
    learner = trainer(name, args, spec(classes))
    learner.step(batch(0, classes))
    other = batch(1, classes)
    state = learner.state()
    scores = rows(other) @ state["coef_"].T + state["intercept_"]
    if classes == 2:
        scores = np.hstack([np.zeros_like(scores), scores])
    probabilities = learner.predict(other)["probabilities"]
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, softmax(scores), rtol=1e-5, atol=1e-7)


def test_probabilities_that_underflow_keep_their_order() -> None:
    """Where the logistic function of every class is 0, exp(score) / sum is its limit."""
    learner = trainer()
    learner.step(batch(0))
    state = {name: value.copy() for name, value in learner.state().items()}
    state["coef_"][:] = 0.0
    state["intercept_"][:] = [-1004.0, -1001.0, -1002.0, -2000.0]
    learner.load(state)
    probabilities = learner.predict(batch(1))["probabilities"]
    expected = softmax(state["intercept_"][None])
    np.testing.assert_allclose(probabilities, np.repeat(expected, RECORDS, 0), rtol=1e-6)


def test_evaluate_is_over_all_records() -> None:
    learner = trainer("GaussianNB")
    for number in range(3):
        learner.step(batch(number))
    part = {name: value[:5] for name, value in batch(4).items()}
    metrics = learner.evaluate([batch(3), part])
    features = np.vstack([rows(batch(3)), rows(part)])
    truth = np.concatenate([batch(3)["y"], part["y"]])
    state = learner.state()
    variance, mean = state["var_"][:, None], state["theta_"][:, None]
    likelihood = -0.5 * (np.log(2 * np.pi * variance) + (features - mean) ** 2 / variance).sum(2)
    probabilities = softmax(likelihood.T + np.log(state["class_prior_"]))
    chosen = np.maximum(probabilities[np.arange(len(truth)), truth], 1e-12)
    assert metrics["accuracy"] == np.mean(probabilities.argmax(1) == truth)
    assert metrics["loss"] == pytest.approx(-np.log(chosen).mean(), rel=1e-5)


def test_it_learns_to_tell_classes_apart() -> None:
    learner = trainer("MLPClassifier", {"hidden_layer_sizes": [16], "learning_rate_init": 0.02})
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, 400).astype(np.int32)
    noise = 0.3 * rng.standard_normal((400, 2, FEATURES // 2))
    values = (np.eye(4)[truth] @ rng.standard_normal((4, FEATURES))).reshape(400, 2, -1) + noise
    for _ in range(3):
        for at in range(0, 400, 20):
            part = slice(at, at + 20)
            learner.step(batch(0, x=values[part], y=truth[part], id=truth[part]))
    assert learner.evaluate([batch(0, x=values, y=truth, id=truth)])["accuracy"] > 0.95


# --- what it refuses ---------------------------------------------------------------------------

SQUARE = {"x": ArraySpec((3,), "float32"), "y": ArraySpec((), "int32")}
ABLE = r"trainer sklearn takes .*SGDClassifier, MLPClassifier, .*GaussianNB, MultinomialNB"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "x", "alpha": 1},
            "no option 'model', 'alpha'; it takes estimator, estimator_args",
        ),
        ({"estimator": "SGDClasifier"}, r"there is no 'SGDClasifier' in sklearn\.linear_model"),
        ({"estimator": "SGDClasifier"}, r"did you mean SGDClassifier\?"),
        ({"estimator": "SGDClasifier"}, ABLE),
        ({"estimator": 3}, "there is no 3 in"),
        ({"estimator": "LogisticRegression"}, f"has no partial_fit and cannot learn.*; {ABLE}"),
        ({"estimator": "SGDRegressor"}, f"SGDRegressor is no classifier; {ABLE}"),
        ({"estimator": "CategoricalNB"}, f"CategoricalNB needs more room with every.*; {ABLE}"),
        ({"estimator_args": [1]}, r"estimator_args must be a dict of arguments, not \[1\]"),
        (
            {"estimator_args": {"alhpa": 1}},
            r"SGDClassifier has no argument 'alhpa'; did you mean alpha\?; it takes alpha, average",
        ),
        (
            {"estimator_args": {"alpha": -1}},
            "SGDClassifier does not work with these estimator_args: The 'alpha' parameter .* -1",
        ),
        ({"estimator_args": {"early_stopping": True}}, "early_stopping should be False with"),
        (
            {"estimator": "MLPClassifier", "estimator_args": {"early_stopping": True}},
            "partial_fit does not support early_stopping=True",
        ),
        (
            {"estimator": "MLPClassifier", "estimator_args": {"solver": "lbfgs"}},
            "lbfgs is not stochastic",
        ),
        (
            {"estimator": "MLPClassifier", "estimator_args": {"warm_start": True}},
            "warm_start can only be used where",
        ),
        ({"estimator_args": {"class_weight": "balanced"}}, "'balanced' is not supported"),
        (
            {"estimator_args": {"class_weight": {"z": 1}}},
            "class_weight names 'z', which is no class; there are a, b, c, d",
        ),
        (
            {"estimator": "GaussianNB", "estimator_args": {"priors": [0.5, 0.5]}},
            "Number of priors must match number of classes",
        ),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SklearnTrainer().init(spec(), options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "give the column to learn as target"),
        (
            {"classes": ()},
            "target 'y' is a float, .*; choose a target of whole numbers, text or booleans",
        ),
        ({"classes": ("a",)}, "target 'y' is 'a' in every record; there must be two classes"),
        (
            {"arrays": {**SQUARE, "x": ArraySpec((2, None), "float32")}},
            "input 'x' differs in length .*: use lengths=pad or lengths=crop, or a transform",
        ),
        (
            {"arrays": {**SQUARE, "x": ArraySpec((), "object")}},
            "input 'x' is object; trainer sklearn takes numbers only",
        ),
        ({"inputs": ()}, "nothing to learn from: the inputs hold no values"),
        (
            {"arrays": {**SQUARE, "x": ArraySpec((2, 0), "float32")}},
            "nothing to learn from: the inputs hold no values",
        ),
    ],
)
def test_batches_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SklearnTrainer().init(spec(**changes), {})


def test_scikit_learn_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.naive_bayes", None)
    with pytest.raises(SpecError, match=r"needs scikit-learn .*install signal-batch\[sklearn\]"):
        SklearnTrainer().init(spec(), {})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_no_number_names_its_record(bad: float) -> None:
    learner = trainer()
    first = batch(0)
    first["x"][7, 1, 2] = bad
    message = "input 'x' has NaN or infinity in record r7, which SGDClassifier cannot take; mend it"
    with pytest.raises(SpecError, match=message):
        learner.step(first)
    with pytest.raises(SpecError, match=message):
        learner.predict(first)


def test_values_that_an_estimator_cannot_take() -> None:
    learner = trainer("MultinomialNB")
    bad = batch(1, x=-batch(1)["x"])
    message = "MultinomialNB cannot learn from ordinals 12-23: Negative values in data"
    with pytest.raises(SpecError, match=message):
        learner.step(bad)


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("gaussian", {}, "coef_, .*theta_"),
        ("sgd averaged", {}, "_average_coef"),
        ("sgd", {"shared": None}, "shared"),
        ("sgd", {"coef_": np.zeros((4, 5))}, "differ in coef_$"),
    ],
)
def test_a_state_of_another_estimator(case: str, change: dict[str, Any], named: str) -> None:
    other, learner = trainer(*CASES[case]), trainer()
    other.step(batch(0))
    state = {k: v for k, v in (other.state() | change).items() if v is not None}
    message = f"the state is not that of SGDClassifier with these arguments .*{named}"
    with pytest.raises(SpecError, match=message):
        learner.load(state)
