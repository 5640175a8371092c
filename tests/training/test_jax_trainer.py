"""The trainer `jax`: its network and its steps against NumPy, its state, what it refuses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signal_batch.errors import SpecError
from signal_batch.training import ArraySpec, BatchSpec, ModelBatch, Trainer

pytest.importorskip("flax")
pytest.importorskip("optax")

import jax

from signal_batch.trainers.jax import JaxTrainer

RECORDS, TIME, CLASSES, STEPS, SEED = 6, 21, 3, 10, 5
SMALL: Mapping[str, Any] = {"width": 4, "blocks": 1, "kernel": 3}
STRIDE = 4


def spec(
    shape: tuple[int | None, ...] = (2, TIME), dtype: str = "complex64", **changes: Any
) -> Any:
    values: dict[str, Any] = {
        "arrays": {"x": ArraySpec(shape, dtype), "y": ArraySpec((), "int32")},
        "inputs": ("x",),
        "target": "y",
        "classes": tuple("abc"),
        "batch_size": RECORDS,
        "total_steps": STEPS,
        "seed": SEED,
    }
    return BatchSpec(**values | changes)


def trainer(batches: BatchSpec | None = None, **options: Any) -> JaxTrainer:
    made = JaxTrainer()
    made.init(batches or spec(), {**SMALL, **options})
    return made


def batch(
    number: int = 0,
    shape: tuple[int, ...] = (2, TIME),
    dtype: str = "complex64",
    lengths: Any = None,
) -> ModelBatch:
    """Records of noise around the class's own mean; zeros and a mask after each length, if any."""
    rng = np.random.default_rng([number, *shape])
    truth = rng.integers(0, CLASSES, RECORDS).astype(np.int32)
    x = rng.standard_normal((RECORDS, *shape)) + truth.reshape(-1, *[1] * len(shape))
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(x.shape)
    found = {
        "x": x.astype(dtype),
        "y": truth,
        "position": np.arange(RECORDS) + RECORDS * number,
        "ordinal": np.arange(RECORDS),
        "id": np.array([f"r{i}" for i in range(RECORDS)], dtype=object),
    }
    if lengths is not None:
        mask = np.arange(shape[-1]) < np.asarray(lengths)[:, None]
        found["x_mask"] = mask
        found["x"] = np.where(mask if x.ndim == 2 else mask[:, None], found["x"], 0)
    return found


def same(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Equal bit for bit, names and dtypes included."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        assert actual[name].tobytes() == value.tobytes(), name


# --- the network in NumPy, float64 -------------------------------------------------------------


def weights_of(state: Mapping[str, np.ndarray], part: str = "model") -> dict[str, np.ndarray]:
    prefix = f"{part}/"
    return {
        name.removeprefix(prefix): value.astype(np.float64)
        for name, value in state.items()
        if name.startswith(prefix)
    }


def convolved(x: np.ndarray, w: Mapping[str, np.ndarray], name: str, stride: int) -> np.ndarray:
    """(time, channels) -> (ceil(time / stride), width), zeros before and after."""
    kernel, bias = w[f"{name}/kernel"], w[f"{name}/bias"]
    side = len(kernel) // 2
    padded = np.pad(x, ((side, side), (0, 0)))
    at = range(0, len(x), stride)
    return np.array([np.tensordot(padded[i : i + len(kernel)], kernel, 2) + bias for i in at])


def normalised(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def logits_of(record: np.ndarray, w: Mapping[str, np.ndarray], stride: int = STRIDE) -> np.ndarray:
    """Of one record (channels, time) without padding."""
    if np.iscomplexobj(record):
        power = np.log(np.abs(record.astype(np.complex128)) ** 2 + 1e-4)
        record = np.concatenate([record.real, record.imag, power])
    x = convolved(record.T.astype(np.float64), w, "stem", stride)
    blocks = len({name.split("/")[1] for name in w if name.startswith("blocks/")})
    for i in range(blocks):
        y = x
        for j in (1, 2):
            y = np.maximum(normalised(y, w[f"blocks/{i}/norm{j}/scale"]), 0)
            y = convolved(y, w, f"blocks/{i}/conv{j}", 1)
        x = x + y
    pooled = np.maximum(normalised(x, w["norm/scale"]), 0).mean(axis=0)
    return pooled @ w["head"] + w["bias"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def records_of(found: ModelBatch) -> list[np.ndarray]:
    """Each record as (channels, time), without its padding."""
    x = found["x"] if found["x"].ndim == 3 else found["x"][:, None]
    masks = found.get("x_mask", np.ones((len(x), x.shape[-1]), bool))
    return [record[:, mask] for record, mask in zip(x, masks, strict=True)]


def loss_of(found: ModelBatch, w: Mapping[str, np.ndarray], smoothing: float = 0.0) -> float:
    scores = log_softmax(np.array([logits_of(record, w) for record in records_of(found)]))
    wanted = np.eye(CLASSES)[found["y"]] * (1 - smoothing) + smoothing / CLASSES
    return float(-(wanted * scores).sum(-1).mean())


@pytest.mark.parametrize(
    ("shape", "dtype", "lengths", "options"),
    [
        ((2, TIME), "complex64", None, {}),
        ((2, TIME), "complex64", [21, 5, 16, 17, 1, 9], {}),
        ((3, TIME), "float32", [4, 21, 8, 12, 20, 7], {"blocks": 2, "stride": 1}),
        ((TIME,), "float64", None, {"stride": 2, "kernel": 5}),
    ],
)
def test_the_network_is_what_the_documentation_says(
    shape: tuple[int, ...], dtype: str, lengths: Any, options: dict[str, Any]
) -> None:
    made, found = trainer(spec(shape, dtype), **options), batch(1, shape, dtype, lengths)
    for number in range(2):  # so that biases and norms are not what they began with
        made.step(batch(number, shape, dtype, lengths))
    w = weights_of(made.state())
    stride = options.get("stride", STRIDE)
    scores = np.array([logits_of(record, w, stride) for record in records_of(found)])
    expected = np.exp(log_softmax(scores))
    actual = made.predict(found)["probabilities"]
    assert (actual.dtype, actual.shape) == (np.float32, (RECORDS, CLASSES))
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-6)


# --- padding, short batches, lengths -----------------------------------------------------------


def test_what_is_in_the_padding_changes_nothing() -> None:
    made = trainer()
    clean = batch(lengths=[21, 5, 16, 17, 1, 9])
    dirty = dict(clean)
    dirty["x"] = np.where(clean["x_mask"][:, None], clean["x"], complex(np.nan, 1e30))
    same(made.predict(dirty), made.predict(clean))
    other = trainer()
    assert made.step(clean) == other.step(dirty)
    same(other.state(), made.state())


def test_a_padded_record_is_as_good_as_one_that_is_not() -> None:
    made = trainer(spec((2, None)))
    long = batch(lengths=[13] * RECORDS)
    short = {**long, "x": long["x"][..., :13], "x_mask": long["x_mask"][:, :13]}
    bare = {name: value for name, value in short.items() if name != "x_mask"}
    expected = made.predict(long)["probabilities"]
    for found in (short, bare):
        np.testing.assert_allclose(made.predict(found)["probabilities"], expected, rtol=1e-5)
    losses = [made.step(batch(shape=(2, length)))["loss"] for length in (13, TIME, 13)]
    assert np.isfinite(losses).all()


def test_the_last_batch_may_be_shorter_and_is_not_compiled_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, found = trainer(), batch()
    expected = made.predict(found)["probabilities"]
    few = {name: value[:2] for name, value in found.items()}
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        same(made.predict(few), {"probabilities": expected[:2]})
    assert not [line for line in caplog.messages if "ompil" in line]
    evaluated = made.evaluate([found, few])
    truth = np.concatenate([found["y"], found["y"][:2]])
    chosen = np.concatenate([expected, expected[:2]])
    losses = -np.log(chosen[np.arange(len(truth)), truth])
    assert evaluated["accuracy"] == (chosen.argmax(1) == truth).mean()
    assert evaluated["loss"] == pytest.approx(losses.mean(), rel=1e-5)


# --- a step ------------------------------------------------------------------------------------


def test_a_step_is_adamw_on_the_gradient_of_the_cross_entropy() -> None:
    """Loshchilov and Hutter's algorithm 2 from zero moments: m = 0.1 g, v = 0.001 g^2."""
    smoothing, decay, rate = 0.1, 0.5, 0.01
    made = trainer(
        label_smoothing=smoothing,
        weight_decay=decay,
        learning_rate=rate,
        warmup_fraction=0.0,
        clip_norm=1e9,
    )
    before, found = weights_of(made.state()), batch()
    metrics = made.step(found)
    after = made.state()
    scores = np.array([logits_of(record, before) for record in records_of(found)])
    assert metrics["loss"] == pytest.approx(loss_of(found, before, smoothing), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx((scores.argmax(-1) == found["y"]).mean())
    assert metrics["learning_rate"] == pytest.approx(rate)
    gradient = {n: m / 0.1 for n, m in weights_of(after, "optimizer/1/mu").items()}
    assert set(gradient) == set(before)

    # The slope of the loss along each parameter's gradient is the square of its length.
    for name, direction in gradient.items():
        h = 1e-4 / max(1e-3, np.linalg.norm(direction))
        up, down = (
            loss_of(found, {**before, name: before[name] + sign * h * direction}, smoothing)
            for sign in (1, -1)
        )
        assert (up - down) / (2 * h) == pytest.approx((direction**2).sum(), rel=2e-3, abs=1e-7)

    for name, g in gradient.items():
        decayed = decay * before[name] if before[name].ndim > 1 else 0
        expected = before[name] - rate * (g / (np.abs(g) + 1e-8) + decayed)
        np.testing.assert_allclose(after[f"model/{name}"], expected, atol=2e-5, err_msg=name)
    assert after["optimizer/1/count"] == after["optimizer/3/count"] == 1


def test_the_learning_rate_rises_and_falls_and_long_gradients_are_cut() -> None:
    made = trainer(learning_rate=0.5, warmup_fraction=0.3, clip_norm=1e-3)
    rates = [made.step(batch())["learning_rate"]]
    parts = [m / 0.1 for m in weights_of(made.state(), "optimizer/1/mu").values()]
    assert np.sqrt(sum((part**2).sum() for part in parts)) == pytest.approx(1e-3, rel=1e-5)
    rates += [made.step(batch(number))["learning_rate"] for number in range(1, STEPS)]
    rising = [0.5 * (step + 1) / 4 for step in range(3)]
    falling = [0.25 * (1 + np.cos(np.pi * step / 7)) for step in range(7)]
    np.testing.assert_allclose(rates, rising + falling, rtol=1e-5)


def test_it_learns_frequencies() -> None:
    """Three tones in noise as strong as they are, at any phase."""
    rng = np.random.default_rng(1)

    def tones(records: int) -> ModelBatch:
        truth = rng.integers(0, CLASSES, records).astype(np.int32)
        turns = 0.1 * truth[:, None] * np.arange(64) + rng.random((records, 1))
        noise = rng.standard_normal((2, records, 64)) / np.sqrt(2)
        x = np.exp(2j * np.pi * turns) + noise[0] + 1j * noise[1]
        return {"x": x.astype(np.complex64), "y": truth}

    batches = spec((64,), batch_size=32, total_steps=60)
    made = trainer(batches, width=8, blocks=1, kernel=5, learning_rate=0.02)
    losses = [made.step(tones(32))["loss"] for _ in range(60)]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert made.evaluate([tones(32) for _ in range(4)])["accuracy"] > 0.9


def test_dropout_follows_a_records_position_and_not_its_place_in_the_batch() -> None:
    found = batch()
    turned = {name: value[::-1] for name, value in found.items()}
    later = {**found, "position": found["position"] + RECORDS}
    losses = [trainer(dropout=0.5).step(each)["loss"] for each in (found, found, turned, later)]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert losses[3] != pytest.approx(losses[0], rel=1e-4)
    same(trainer(dropout=0.5).predict(found), trainer().predict(found))


# --- the state ---------------------------------------------------------------------------------


def test_it_is_a_trainer() -> None:
    assert isinstance(JaxTrainer(), Trainer)
    assert JaxTrainer.distributed


def test_going_on_from_a_state_is_the_same_as_not_stopping() -> None:
    options = {"dropout": 0.5}
    whole = trainer(**options)
    expected = [whole.step(batch(number)) for number in range(6)]
    first = trainer(**options)
    for number in range(3):
        first.step(batch(number))
    kept = first.state()
    copies = {name: value.copy() for name, value in kept.items()}
    first.step(batch(3))
    same(kept, copies)

    second = trainer(**options)
    second.load(kept)
    same(second.state(), copies)
    assert [second.step(batch(number)) for number in range(3, 6)] == expected[3:]
    same(second.state(), whole.state())
    same(second.predict(batch(9)), whole.predict(batch(9)))
    same(kept, copies)


def test_names_of_the_state() -> None:
    state = trainer().state()
    parts = ["norm1/scale", "norm2/scale"]
    parts += [f"conv{i}/{kind}" for i in (1, 2) for kind in ("kernel", "bias")]
    model = [f"blocks/0/{part}" for part in parts]
    model += ["stem/kernel", "stem/bias", "norm/scale", "head", "bias"]
    moments = [f"optimizer/1/{kind}/{name}" for kind in ("mu", "nu") for name in model]
    counts = ["optimizer/1/count", "optimizer/3/count"]
    assert sorted(state) == sorted([*(f"model/{name}" for name in model), *moments, *counts])
    assert state["model/stem/kernel"].shape == (3, 6, 4)


def test_weights_follow_from_the_seed() -> None:
    same(trainer().state(), trainer().state())
    kernels = [trainer(spec(seed=seed)).state()["model/stem/kernel"] for seed in (5, 6)]
    assert not np.array_equal(*kernels)
    wide = trainer(width=64).state()["model/blocks/0/conv1/kernel"]
    assert wide.std() == pytest.approx(np.sqrt(2 / (3 * 64)), rel=0.05)  # He et al., 2015


def test_the_state_of_another_network_is_refused() -> None:
    made = trainer()
    state = made.state()
    with pytest.raises(SpecError, match="blocks/1/conv1/bias is not part of it"):
        made.load(trainer(blocks=2).state())
    with pytest.raises(SpecError, match=r"stem/kernel is float32 \(3, 6, 8\) instead of .*6, 4"):
        made.load(trainer(width=8).state())
    with pytest.raises(SpecError, match=r"options, inputs and classes: model/head is missing$"):
        made.load({name: value for name, value in state.items() if name != "model/head"})
    with pytest.raises(SpecError, match="model/bias is float64"):
        made.load({**state, "model/bias": state["model/bias"].astype(np.float64)})
    same(made.state(), state)


#: Prints a digest of the state after a few steps of a network that is worth dividing into threads.
STEPS_AND_DIGEST = """
import hashlib, os, sys
if sys.argv[1] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from signal_batch.trainers.jax import JaxTrainer
from signal_batch.training import ArraySpec, BatchSpec

before = dict(os.environ)
arrays = {"x": ArraySpec((1, 512), "complex64"), "y": ArraySpec((), "int32")}
trainer = JaxTrainer()
trainer.init(BatchSpec(arrays, ("x",), "y", (0, 1, 2), 32, 3, 1), {"blocks": 1})
rng = np.random.default_rng(2)
for _ in range(3):
    noise = rng.standard_normal((2, 32, 1, 512))
    x = (noise[0] + 1j * noise[1]).astype(np.complex64)
    trainer.step({"x": x, "y": rng.integers(0, 3, 32).astype(np.int32)})
state = trainer.state()
assert dict(os.environ) == before
print(hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest())
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores and a way to be held to one",
)
def test_the_number_of_cores_changes_no_bit_and_nothing_is_said(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.endswith("NPROC")}
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", STEPS_AND_DIGEST, cores],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cores in ("one", "all")
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [said for _, said in outputs] == ["", ""]
    digests = [digest.split() for digest, _ in outputs]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 3}, "no option 'depth'; it takes width, blocks, kernel, stride, learning_rate"),
        ({"width": 0}, "width must be a positive integer, not 0"),
        ({"blocks": True}, "blocks must be a positive integer, not True"),
        ({"width": 8.0}, "width must be a positive integer, not 8.0"),
        ({"kernel": 4}, "kernel must be odd, not 4"),
        ({"learning_rate": "fast"}, "learning_rate must be a positive number, not 'fast'"),
        ({"learning_rate": float("nan")}, "learning_rate must be a positive number"),
        ({"clip_norm": 0}, "clip_norm must be a positive number, not 0"),
        ({"weight_decay": -1}, "weight_decay must be 0 or a positive number, not -1"),
        ({"warmup_fraction": 1}, "warmup_fraction must be a number from 0 to less than 1"),
        ({"label_smoothing": -0.1}, "label_smoothing must be a number from 0"),
        ({"dropout": None}, "dropout must be a number from 0 to less than 1, not None"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"trainer jax.*{message}"):
        trainer(**options)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (spec(target=None), "give the column to learn as target"),
        (spec(classes=()), "target 'y' is a float, and trainer jax learns classes"),
        (spec(classes=("a",)), "'y' is 'a' in every record; there must be two classes"),
        (spec(inputs=()), "trainer jax sees one input, not none; choose it with inputs"),
        (spec(inputs=("x", "y")), "trainer jax sees one input, not x, y; choose it with inputs"),
        (spec(dtype="int16"), "input 'x' is int16, .* example field:samples:float32"),
        (spec(dtype="bool"), "input 'x' is bool, and trainer jax takes float or complex"),
        (spec(()), r"shape \(\); trainer jax takes \(channels, time\) or \(time,\)"),
        (spec((1, 2, 3)), r"records of shape \(1, 2, 3\)"),
        (spec((None, 8)), r"records of shape \(None, 8\)"),
        (spec(world=2), "2 ranks need the address of a coordinator to meet at"),
    ],
)
def test_batches_that_it_cannot_work_with_are_named(batches: BatchSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trainer(batches)
