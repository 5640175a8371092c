"""A trainer that says what it is given, and fails when and how a test asks for it.

It is imported by worker processes, so what a test asks for comes through a folder, which
`TEST_TRAINING` names, and not through options: a disturbed run must have the run key of one that
was left alone. In that folder:

- `log`: a line of JSON for every step, for every record that `noted` saw, for every document
  that a trainer's process wrote;
- `actions.json`: a list of what is to go wrong; each item happens once, unless it says `always`;
- `step_s`: seconds to sleep in every step, and in `noted`.

The model is softmax regression with momentum. Every sum in it adds one record or feature after
the other, along an axis that is not the last one, so a plain loop elsewhere gets the same bits.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from signal_batch import store
from signal_batch.augmentations import transform
from signal_batch.iteration import rng_at
from signal_batch.training import BatchSpec, Classifier, ModelBatch

IN_WORKER = Path(sys.argv[0]).name == "training_worker.py"  # and not in the planning
MOMENTUM = 0.9
RATE = 1e-3
TOO_MUCH = 1 << 50
FOREVER_S = 600


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def scores(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(records, classes) from (records, features) and (features, classes)."""
    return (x[:, :, None] * weights).sum(axis=1)


def features(batch: Mapping[str, np.ndarray], inputs: tuple[str, ...]) -> np.ndarray:
    """float64 (records, features): inputs flattened, or the mean over time where it is masked."""
    parts = []
    for name in inputs:
        x = batch[name]
        if x.dtype.kind == "c":
            x = np.concatenate([x.real, x.imag], axis=1)
        if (mask := batch.get(f"{name}_mask")) is not None:
            real = mask[:, None, :]
            x = np.where(real, x, 0).astype(np.float64).sum(axis=-1) / real.sum(axis=-1)
        parts.append(x.reshape(len(x), -1).astype(np.float64))
    return np.concatenate(parts, axis=1)


class RecordingTrainer(Classifier):
    """Options: `rate` of learning, random `jitter` of the gradient, a loss that is `nan_at` a step,
    and `ballast`, how many numbers there are only to make the state large."""

    def init(self, batch_spec: BatchSpec, options: Mapping[str, Any]) -> None:
        self.spec, self.options = batch_spec, dict(options)
        shapes = [batch_spec.arrays[name].shape for name in batch_spec.inputs]
        masked = [f"{name}_mask" in batch_spec.arrays for name in batch_spec.inputs]
        parts = [2 if "complex" in batch_spec.arrays[n].dtype else 1 for n in batch_spec.inputs]
        width = sum(
            part * math.prod(shape[:-1] if mean else shape)  # type: ignore[arg-type]
            for part, shape, mean in zip(parts, shapes, masked, strict=True)
        )
        self.weights = np.zeros((width, len(batch_spec.classes)))
        self.velocity = np.zeros_like(self.weights)
        self.ballast = np.arange(float(self.options.get("ballast", 0)))
        self.steps, self.seen = np.zeros(1, np.int64), np.zeros(1, np.uint32)
        self._met, self._learns = batch_spec.world == 1, False
        if IN_WORKER:
            _record({"event": "init", "rank": batch_spec.rank})
            _watch_saving(batch_spec.rank)

    def step(self, batch: ModelBatch) -> dict[str, Any]:
        number = int(self.steps[0]) + 1
        x, truth = features(batch, self.spec.inputs), batch[str(self.spec.target)]
        self._learns = True
        self._meet()
        self._note(number, batch, x)
        if strange := self._disturb(number):
            return strange
        probabilities = softmax(scores(x, self.weights))
        wrong = probabilities - np.eye(len(self.spec.classes))[truth]
        gradient = (x[:, :, None] * wrong[:, None, :]).sum(axis=0) / len(x)
        if jitter := self.options.get("jitter"):
            rng = rng_at(self.spec.seed, int(batch["position"][0]))
            gradient += jitter * rng.standard_normal(gradient.shape)
        # In place: what was handed out for a checkpoint must have been copied at once.
        self.velocity *= MOMENTUM
        self.velocity -= self.options.get("rate", RATE) * gradient
        self.weights += self.velocity
        self.ballast += number
        self.steps += 1
        loss = float(-np.log(probabilities[np.arange(len(truth)), truth]).mean())
        right = float((probabilities.argmax(axis=1) == truth).mean())
        blown = number == self.options.get("nan_at")
        return {"loss": math.nan if blown else loss, "accuracy": right}

    def predict(self, batch: ModelBatch) -> dict[str, np.ndarray]:
        if IN_WORKER and not self._learns:
            for _ in _due(judging=1):
                os.kill(os.getpid(), signal.SIGKILL)
        found = softmax(scores(features(batch, self.spec.inputs), self.weights))
        return {"probabilities": found.astype(np.float32)}

    def state(self) -> dict[str, np.ndarray]:
        return {
            "weights": self.weights,
            "velocity": self.velocity,
            "ballast": self.ballast,
            "steps": self.steps,
            "seen": self.seen,
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        for name in self.state():
            setattr(self, name, state[name].copy())

    def _meet(self) -> None:
        """Wait for the other ranks before the first step, as ranks that talk to each other do."""
        if self._met:
            return
        mine = {"event": "met", "at": self.spec.coordinator}
        _record({**mine, "rank": self.spec.rank})
        while sum(mine.items() <= line.items() for line in read_log(_folder())) < self.spec.world:
            time.sleep(0.01)
        self._met = True

    def _note(self, number: int, batch: ModelBatch, x: np.ndarray) -> None:
        """One line a step, with checksums of its values and of all that were seen up to here."""
        values = (batch["ordinal"], batch["position"], x, batch[str(self.spec.target)])
        payload = b"".join(np.ascontiguousarray(value).tobytes() for value in values)
        self.seen[0] = zlib.crc32(payload, int(self.seen[0]))
        _record(
            {
                "event": "step",
                "step": number,
                "rank": self.spec.rank,
                "positions": batch["position"].tolist(),
                "ordinals": batch["ordinal"].tolist(),
                "shapes": [list(batch[name].shape[1:]) for name in self.spec.inputs],
                "values": zlib.crc32(payload),
                "seen": int(self.seen[0]),
            }
        )

    def _disturb(self, number: int) -> dict[str, Any] | None:
        _sleep()
        for action in _due(step=number, rank=self.spec.rank):
            if action["do"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif action["do"] == "exit":
                os._exit(action["code"])
            elif action["do"] == "hang":
                time.sleep(FOREVER_S)
            elif action["do"] == "settle":  # the save that is going on is done
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":
                        thread.join()
            elif action["do"] == "raise":
                raise ZeroDivisionError("no such luck")
            elif action["do"] == "allocate":
                np.zeros(TOO_MUCH, np.uint8)
            elif action["do"] == "metrics":
                return dict(action["metrics"])
        return None


class RankedTrainer(RecordingTrainer):
    """Its ranks know nothing of each other: each learns from its own share."""

    distributed = True


class Measuring:
    """A trainer without classes and without `predict`: the mean of all that it saw."""

    def init(self, batch_spec: BatchSpec, options: Mapping[str, Any]) -> None:
        (self._name,) = batch_spec.inputs
        self._sum, self._count = np.zeros(1), np.zeros(1, np.int64)

    def step(self, batch: ModelBatch) -> dict[str, Any]:
        self._sum += batch[self._name].astype(np.float64).sum()
        self._count += batch[self._name].size
        return {"mean": float(self._sum[0] / self._count[0])}

    def evaluate(self, batches: Iterator[ModelBatch]) -> dict[str, Any]:
        values = np.concatenate([batch[self._name].ravel() for batch in batches])
        error = values.astype(np.float64) - self._sum[0] / self._count[0]
        return {"squared_error": float((error**2).mean())}

    def state(self) -> dict[str, np.ndarray]:
        return {"sum": self._sum, "count": self._count}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._sum, self._count = state["sum"].copy(), state["count"].copy()


def noted(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A transform that changes nothing, and says which record passed through it."""
    if IN_WORKER:
        _record({"event": "noted", "ordinal": int(record["ordinal"])})
        _sleep()
        for action in _due(noted=int(record["ordinal"])):
            assert action["do"] == "kill"
            os.kill(os.getpid(), signal.SIGKILL)
    return record


@transform(training_only=True)
def shake(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Random, in training only: adds one normal number to all samples of the record."""
    return {**record, "samples": record["samples"] + np.float32(rng.standard_normal())}


# --- the folder --------------------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ["TEST_TRAINING"])


def _record(event: Mapping[str, Any]) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    line = json.dumps({"pid": os.getpid(), **event}) + "\n"
    descriptor = os.open(_folder() / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _actions() -> list[dict[str, Any]]:
    path = _folder() / "actions.json"
    return json.loads(path.read_text()) if path.exists() else []  # type: ignore[no-any-return]


def _sleep() -> None:
    path = _folder() / "step_s"
    time.sleep(float(path.read_text()) if path.exists() else 0.0)


def _due(**when: int) -> Iterator[dict[str, Any]]:
    """What is to happen now; an item that does not name its rank is for the first."""
    for number, action in enumerate(_actions()):
        if any(action.get(key, 0 if key == "rank" else None) != at for key, at in when.items()):
            continue
        if _unused(number, action):
            yield action


def _unused(number: int, action: Mapping[str, Any]) -> bool:
    used = _folder() / f"used-{number}"
    happens = bool(action.get("always")) or not used.exists()
    used.touch()
    return happens


def _watch_saving(rank: int) -> None:
    """Log which documents this process writes; be killed inside the save of a checkpoint.

    From step `save` on, at the `place` that an action names: `half` of the arrays is written, all
    of them `between` them and the document, or both `before` old checkpoints are removed.
    """
    kept = store.OutputStore
    write, put, put_document, remove = (
        store._write_durably,
        kept.put_object,
        kept.put_document,
        kept.remove,
    )
    saved = 0

    def due(place: str) -> bool:
        return any(
            saved >= action["save"] and action["place"] == place and _unused(number, action)
            for number, action in enumerate(_actions())
            if "save" in action
        )

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def put_object(self: store.OutputStore, path: str, payload: bytes) -> None:
        nonlocal saved
        if path.startswith("_checkpoints/step-"):
            saved = int(path[18:27])
        put(self, path, payload)

    def write_durably(path: Path, payload: bytes) -> None:
        if ".safetensors." in path.name and due("half"):
            path.write_bytes(payload[: len(payload) // 2])
            kill()
        write(path, payload)

    def put_document_noted(self: store.OutputStore, path: str, value: Mapping[str, Any]) -> None:
        if due("between"):
            kill()
        put_document(self, path, value)
        _record({"event": "wrote", "rank": rank, "path": path})

    def remove_all(self: store.OutputStore, paths: Any) -> None:
        if due("before"):
            kill()
        remove(self, paths)

    store._write_durably = write_durably
    kept.put_object = put_object  # type: ignore[method-assign]
    kept.put_document = put_document_noted  # type: ignore[method-assign]
    kept.remove = remove_all  # type: ignore[method-assign]


# --- the other end of it -----------------------------------------------------------------------


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the log."""
    path = folder / "log"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_seen(log: list[dict[str, Any]]) -> dict[int, list[tuple[Any, ...]]]:
    """For each step what each taking of it saw, however often it was taken, ranks aside."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for line in log:
        if line["event"] == "step":
            seen = (line["positions"], line["ordinals"], line["shapes"], line["seen"])
            found.setdefault(line["step"], []).append(seen)
    return found
