"""A folder in which a test trains with the recording trainer, and a plain loop to compare with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds
from safetensors.numpy import load

import signal_batch  # noqa: F401  (sets Grain up)
from signal_batch._grain import grain
from signal_batch.frozen import checked
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

HERE = Path(__file__).parent
BATCH, CLASSES = 16, 7
MOMENTUM, RATE = 0.9, 1e-3
EVALUATE_STEPS, LOG_STEPS = 5, 3
#: What is the same however often a run was disturbed.
SAME_FILES = (
    *("model.safetensors", "metrics.jsonl", "metrics.parquet"),
    *("_evaluation.json", "_statistics.json", "_records.safetensors"),
)
Arrays = dict[str, np.ndarray]


class Scene:
    """A dataset, a folder for what the trainer says and is to do, and outputs beside it.

    Used as a context it has the environment that worker processes take over.
    """

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder, self.dataset = folder, dataset
        folder.mkdir(exist_ok=True)

    def spec(self, output: str = "out", **changes: Any) -> TrainSpec:
        """200 captures, about a third of their scenes held out, 20 steps; options in
        `execution` are those of a run that does not wait."""
        execution = {"retry_delay_s": 0, "retries": 0} | changes.pop("execution", {})
        fields = {
            "dataset": str(self.dataset),
            "output": str(self.folder / output),
            "columns": [
                "field:samples",
                "label=annotation:truth-v1/label:int32",
                "metadata:snr_db:float32",
            ],
            "target": "label",
            "split": "scene test=0.2 validation=0.15",
            "batch_size": BATCH,
            "steps": 20,
            "seed": 11,
            "trainer": "recording_trainer:RecordingTrainer",
            "log_steps": LOG_STEPS,
            "evaluate_steps": EVALUATE_STEPS,
            "checkpoint_steps": 4,
        }
        return checked(TrainSpec, fields | changes | {"execution": execution})

    def train(self, output: str = "out", **changes: Any) -> dict[str, Any]:
        """The manifest of a run in this process."""
        return train(self.spec(output, **changes)).manifest

    def act(self, *actions: Mapping[str, Any], step_s: float = 0.0) -> None:
        """What is to go wrong from now on; see `recording_trainer`."""
        for used in self.folder.glob("used-*"):
            used.unlink()
        (self.folder / "actions.json").write_text(json.dumps(actions))
        (self.folder / "step_s").write_text(str(step_s))

    def log(self, *, forget: bool = False) -> list[dict[str, Any]]:
        import recording_trainer  # type: ignore[import-not-found]

        found: list[dict[str, Any]] = recording_trainer.read_log(self.folder)
        if forget:
            (self.folder / "log").unlink(missing_ok=True)
        return found

    def seen(self) -> dict[int, list[tuple[Any, ...]]]:
        """What each step saw, every time that it was taken."""
        import recording_trainer

        found: dict[int, list[tuple[Any, ...]]] = recording_trainer.steps_seen(self.log())
        return found

    def arrays(self, output: str = "out") -> Arrays:
        return load((self.folder / output / "model.safetensors").read_bytes())

    def json(self, name: str, output: str = "out") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / output / name).read_text())
        return found

    def start(self, spec: TrainSpec) -> subprocess.Popen[str]:
        """The command line in a process of its own."""
        file = self.folder / f"{Path(spec.output).name}.json"
        file.write_text(spec.model_dump_json())
        return subprocess.Popen(
            [sys.executable, "-m", "signal_batch", "train", "--spec", str(file)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def check_same(self, output: str, reference: Path) -> None:
        """A disturbed run ended with the files of an undisturbed one, bit for bit."""
        here = self.folder / output
        for name in SAME_FILES:
            assert (here / name).exists() == (reference / name).exists(), name
            if (reference / name).exists():
                assert (here / name).read_bytes() == (reference / name).read_bytes(), name
        found, wanted = (json.loads((p / "_manifest.json").read_text()) for p in (here, reference))
        for key in ("run_key", "identity", "metrics", "steps"):
            assert found[key] == wanted[key]
        assert [*here.rglob("*.tmp")] == []


class MadeScenes:
    """Makes scenes, each with an environment of its own; one is in force at a time."""

    @staticmethod
    @contextmanager
    def entered(folder: Path, dataset: Path) -> Iterator[Scene]:
        scene = Scene(folder, dataset)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(HERE))
            path = os.environ.get("PYTHONPATH")
            patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *([path] if path else [])]))
            patch.setenv("TEST_TRAINING", str(folder))
            yield scene


@pytest.fixture
def scene(tmp_path: Path, iq_root: Path) -> Iterator[Scene]:
    with MadeScenes.entered(tmp_path, iq_root) as made:
        yield made


@pytest.fixture(scope="session")
def entered() -> Callable[[Path, Path], Any]:
    """`with entered(folder, dataset) as scene:` for what several tests share."""
    return MadeScenes.entered


# --- processes ---------------------------------------------------------------------------------


class Processes:
    """Looks processes up in /proc."""

    @staticmethod
    def alive(pid: int) -> bool:
        """Whether a process runs; one that only waits to be reaped does not."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    @staticmethod
    def children_of(pid: int) -> set[int]:
        found: set[int] = set()
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found |= set(map(int, path.read_text().split()))
        return found

    def none_within(self, pids: set[int], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(map(self.alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not any(map(self.alive, pids))

    @staticmethod
    def wait_until(condition: Callable[[], Any], seconds: float = 60) -> Any:
        """The first true value of the condition."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)
        return value


@pytest.fixture(scope="session")
def processes() -> Processes:
    if sys.platform != "linux":
        pytest.skip("looks processes up in /proc")
    return Processes()


# --- a plain loop ------------------------------------------------------------------------------


class Plain:
    """A training run once more: Grain's shuffle, a loop over the dataset, and NumPy."""

    def __init__(self, dataset: Path) -> None:
        opened = sds.open(str(dataset))
        truth = opened.annotations["truth-v1"]
        self.samples = np.stack([record["samples"].data for record in opened])
        self.labels = np.array([truth[i].values["label"] for i in range(len(opened))])
        self.snr = np.array([r.metadata["snr_db"] for r in opened], np.float32)
        self.scenes = [record.scene_id for record in opened]
        self.ids = [record.id for record in opened]

    def side(self, name: str, *, test: float = 0.2, validation: float = 0.15) -> list[int]:
        """Ordinals of a side of `scene test=... validation=...`, by the published definition."""
        bounds = {"test": (0, test), "validation": (test, test + validation)}
        low, high = bounds.get(name, (test + validation, 1))
        places = [
            int.from_bytes(sha256(f'[0,"{scene}"]'.encode()).digest()[:8], "big") / 2**64
            for scene in self.scenes
        ]
        return [i for i, place in enumerate(places) if low <= place < high]

    def order(self, train: Sequence[int], steps: int, seed: int = 11) -> list[list[int]]:
        """The ordinals of every step."""
        shuffled = grain.MapDataset.range(len(train)).shuffle(seed=seed).repeat()
        return [
            [train[shuffled[place]] for place in range(step * BATCH, (step + 1) * BATCH)]
            for step in range(steps)
        ]

    def rows(self, ordinals: Sequence[int]) -> np.ndarray:
        """float64 (records, features): of each channel the real parts, then imaginary parts."""
        x = self.samples[list(ordinals)]
        return np.concatenate([x.real, x.imag], axis=1).reshape(len(x), -1).astype(np.float64)


class Model:
    """Softmax regression with momentum, written once more."""

    def __init__(self, features: int, classes: int, rate: float = RATE) -> None:
        self.rate = rate
        self.weights = np.zeros((features, classes))
        self.velocity = np.zeros((features, classes))

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        logits = np.zeros((len(x), self.weights.shape[1]))
        for feature in range(x.shape[1]):
            logits += x[:, feature, None] * self.weights[feature]
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def learn(self, x: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
        """Loss and accuracy before the step, which is then taken."""
        p = self.probabilities(x)
        gradient = np.zeros_like(self.weights)
        for row, label, found in zip(x, truth, p, strict=True):
            error = found.copy()
            error[label] -= 1
            gradient += row[:, None] * error
        self.velocity = MOMENTUM * self.velocity - self.rate * (gradient / len(x))
        self.weights = self.weights + self.velocity
        loss = np.mean([-np.log(found[label]) for found, label in zip(p, truth, strict=True)])
        return float(loss), float(np.mean(p.argmax(axis=1) == truth))

    def judged(self, x: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        """Accuracy, loss and confusion, from probabilities as float32."""
        p = self.probabilities(x).astype(np.float32)
        confusion = np.zeros((p.shape[1], p.shape[1]), int)
        loss = 0.0
        for found, label in zip(p, truth, strict=True):
            confusion[label, int(found.argmax())] += 1
            loss -= float(np.log(np.float64(found[label])))
        return {
            "accuracy": confusion.trace() / len(x),
            "loss": loss / len(x),
            "confusion": confusion.tolist(),
        }


@pytest.fixture(scope="session")
def plain(iq_root: Path) -> Plain:
    return Plain(iq_root)


@pytest.fixture(scope="session")
def make_model() -> type[Model]:
    return Model
