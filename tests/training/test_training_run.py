"""A training run end to end with its worker processes, against a plain loop over the dataset."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch._grain import grain
from signal_batch.batches import Batch
from signal_batch.errors import (
    FeatureError,
    InputError,
    OutputConflictError,
    SignalBatchError,
    SpecError,
)
from signal_batch.frozen import checked
from signal_batch.models import evaluate, prediction_fields, read_model
from signal_batch.tracing import records_of, steps_of
from signal_batch.training_job import read_training
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainSpec

STEPS, BATCH, EVERY, LOG = 20, 16, 5, 3


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file under a folder, with the time it was written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- one run, looked at from all sides ----------------------------------------------------------


class Whole:
    """A run of the default spec, and the same from a plain loop."""

    def __init__(self, scene: Any, plain: Any, make_model: Any) -> None:
        self.scene, self.plain = scene, plain
        self.progress: list[tuple[int, int | None]] = []
        outcome = train(scene.spec(), on_progress=lambda n, total=None: self._note(n, total))
        self.manifest = outcome.manifest
        self.log, self.seen = scene.log(), scene.seen()
        self.out = scene.folder / "out"
        self.order = plain.order(plain.side("train"), STEPS)
        self.model = make_model(2 * 2 * 64, 7)
        self.rows: list[dict[str, Any]] = []
        losses: list[float] = []
        hits: list[float] = []
        validation = plain.side("validation")
        for step, ordinals in enumerate(self.order, start=1):
            loss, hit = self.model.learn(plain.rows(ordinals), plain.labels[ordinals])
            losses.append(loss)
            hits.append(hit)
            if step % LOG == 0 or step == STEPS:
                means = {"accuracy": sum(hits) / len(hits), "loss": sum(losses) / len(losses)}
                self.rows.append({"step": step, "side": "train", **means})
                losses, hits = [], []
            if step % EVERY == 0:
                judged = self.model.judged(plain.rows(validation), plain.labels[validation])
                numbers = {name: judged[name] for name in ("accuracy", "loss")}
                self.rows.append({"step": step, "side": "validation", **numbers})

    def _note(self, records: int, total: int | None) -> None:
        self.progress.append((records, total))


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
    iq_root: Path,
    plain: Any,
    make_model: Any,
    entered: Callable[..., Any],
) -> Iterator[Whole]:
    with entered(tmp_path_factory.mktemp("whole"), iq_root) as scene:
        yield Whole(scene, plain, make_model)


def test_the_arrays_are_those_of_a_plain_loop(whole: Whole) -> None:
    arrays = whole.scene.arrays()
    np.testing.assert_array_equal(arrays["weights"], whole.model.weights)
    np.testing.assert_array_equal(arrays["velocity"], whole.model.velocity)
    assert arrays["steps"].tolist() == [STEPS]


def test_every_step_saw_the_records_of_grains_shuffle(whole: Whole) -> None:
    assert list(whole.seen) == list(range(1, STEPS + 1))
    for step, ((positions, ordinals, _, _),) in whole.seen.items():
        assert positions == list(range((step - 1) * BATCH, step * BATCH))
        assert ordinals == whole.order[step - 1]
    assert {line["pid"] for line in whole.log} != {os.getpid()}


def test_the_metrics_are_those_of_a_plain_loop(whole: Whole) -> None:
    found = rows_of(whole.out)
    assert [(row["step"], row["side"]) for row in found] == [
        (row["step"], row["side"]) for row in whole.rows
    ]
    for row, wanted in zip(found, whole.rows, strict=True):
        assert row.keys() == wanted.keys()
        for name in ("accuracy", "loss"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-12)


def test_the_evaluation_is_that_of_a_plain_loop(whole: Whole) -> None:
    sides = whole.scene.json("_evaluation.json")["sides"]
    assert set(sides) == {"validation", "test"}
    for name, side in sides.items():
        ordinals = whole.plain.side(name)
        wanted = whole.model.judged(whole.plain.rows(ordinals), whole.plain.labels[ordinals])
        assert side["records"] == len(ordinals)
        assert side["confusion"] == wanted["confusion"]
        assert side["accuracy"] == wanted["accuracy"]
        assert side["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
        numbers = {"accuracy": side["accuracy"], "loss": side["loss"]}
        assert side["metrics"] == whole.manifest["metrics"][name] == numbers
        groups = side["by"]["snr_db"]
        assert sum(group["records"] for group in groups) == len(ordinals)
        for group in groups:
            inside = [i for i in ordinals if group["from"] <= whole.plain.snr[i] < group["to"]]
            judged = whole.model.judged(whole.plain.rows(inside), whole.plain.labels[inside])
            assert group["records"] == len(inside)
            assert group["accuracy"] == judged["accuracy"]


def test_the_manifest_names_every_file_with_its_hash(whole: Whole) -> None:
    assert whole.scene.json("_manifest.json") == whole.manifest
    named = {entry["file"]: entry for entry in whole.manifest["files"]}
    assert set(named) == {
        *("metrics.jsonl", "metrics.parquet", "model.json", "model.safetensors", "report.html")
    }
    for name, entry in named.items():
        payload = (whole.out / name).read_bytes()
        assert entry["bytes"] == len(payload)
        assert entry["sha256"] == sha256(payload).hexdigest()
    kept = sorted(path.name for path in (whole.out / "_checkpoints").glob("*.json"))
    assert len(kept) == 3
    assert kept[-1] == f"step-{STEPS:09d}.json"
    left = {path.name for path in whole.out.iterdir()} - set(named)
    assert left == {
        *("_spec.json", "_records.safetensors", "_evaluation.json", "_manifest.json"),
        "_checkpoints",
    }


def test_progress_counts_every_record_once(whole: Whole) -> None:
    assert whole.progress[0] == (0, STEPS * BATCH)
    assert sum(records for records, _ in whole.progress) == STEPS * BATCH


def test_the_model_read_again_predicts_as_the_loop(whole: Whole) -> None:
    model = read_model(str(whole.out))
    ordinals = list(range(0, 200, 13))
    batch: Batch = {
        "ordinal": np.array(ordinals),
        "id": np.array([whole.plain.ids[i] for i in ordinals], dtype=object),
        "samples": whole.plain.samples[ordinals],
    }
    found = model.predict(batch)
    wanted = whole.model.probabilities(whole.plain.rows(ordinals)).astype(np.float32)
    np.testing.assert_array_equal(found["probabilities"], wanted)
    np.testing.assert_array_equal(found["prediction"], wanted.argmax(axis=1))
    np.testing.assert_array_equal(found["probability"], wanted.max(axis=1))


def test_judged_again_it_gives_the_same_numbers(whole: Whole) -> None:
    sides = whole.scene.json("_evaluation.json")["sides"]
    again = evaluate(str(whole.out), str(whole.scene.dataset), side="test")
    assert {name: again[name] for name in sides["test"]} == sides["test"]
    training = evaluate(str(whole.out), str(whole.scene.dataset), side="train")
    ordinals = whole.plain.side("train")
    wanted = whole.model.judged(whole.plain.rows(ordinals), whole.plain.labels[ordinals])
    assert training["confusion"] == wanted["confusion"]


def test_what_a_step_saw_is_known_without_training_again(whole: Whole) -> None:
    job = read_training(str(whole.out))
    for step in (1, 7, STEPS):
        ((positions, ordinals, _, _),) = whole.seen[step]
        seen = records_of(job, step)
        assert [(item.position, item.ordinal) for item in seen] == [
            *zip(positions, ordinals, strict=True)
        ]
        assert [item.id for item in seen] == [whole.plain.ids[i] for i in ordinals]
    chosen = whole.order[4][3]
    wanted = [step for step, ordinals in enumerate(whole.order, 1) if chosen in ordinals]
    assert steps_of(job, whole.plain.ids[chosen]) == wanted


def test_a_complete_output_is_left_alone(whole: Whole) -> None:
    before, log = contents(whole.out), whole.scene.log()
    outcome = train(whole.scene.spec())
    assert outcome.already_complete
    assert outcome.manifest == whole.manifest
    assert contents(whole.out) == before
    assert whole.scene.log() == log, "no worker was started"


def test_another_spec_at_the_same_output_is_refused(whole: Whole) -> None:
    before = contents(whole.out)
    with pytest.raises(OutputConflictError, match=r"spec\.batch_size: there 16, here 8") as caught:
        whole.scene.train(batch_size=8, seed=12)
    assert "spec.seed: there 11, here 12" in str(caught.value)
    assert contents(whole.out) == before


def test_speed_and_patience_are_no_part_of_the_run(whole: Whole) -> None:
    """Another number of threads, of checkpoints or of retries is the same run."""
    other = {"threads": 7, "prefetch_batches": 1, "retries": 9, "stall_timeout_s": 5}
    changes = {"checkpoint_steps": 1, "checkpoint_s": 1, "keep_checkpoints": 1}
    assert train(whole.scene.spec(execution=other, **changes)).already_complete


# --- transforms and statistics ------------------------------------------------------------------


def test_transforms_and_statistics_do_not_depend_on_threads_or_attempts(
    scene: Any, plain: Any
) -> None:
    """One run in one thread, undisturbed; one in four threads that is killed while it measures
    statistics, fails while it trains, and is started again."""
    chain = ["recording_trainer:noted", "normalize", "add_noise snr_db=[0,20]"]
    spec = {
        "transforms": [*chain, "recording_trainer:shake"],
        "trainer_args": {"jitter": 0.01},
    }
    scene.train("one", **spec, execution={"threads": 1, "prefetch_batches": 1})
    log = scene.log(forget=True)
    training = plain.side("train")
    # The first record once more: it is what tells the columns.
    assert measured(log) == [training[0], *training]
    wanted = steps_of_log(log)

    scene.act({"noted": training[40], "do": "kill"}, {"step": 8, "do": "raise"})
    four = {"threads": 4, "prefetch_batches": 8, "retries": 1}
    with pytest.raises(SignalBatchError, match="ZeroDivisionError: no such luck"):
        scene.train("four", **spec, execution=four)
    assert set(measured(scene.log(forget=True))) == set(training)
    scene.train("four", **spec, execution=four)
    assert measured(scene.log()) == [], "the statistics of the first attempt stand"
    resumed = steps_of_log(scene.log())
    assert resumed == {step: wanted[step] for step in range(min(resumed), STEPS + 1)}
    assert min(resumed) in (1, 5), "from the first checkpoint, if it was written in time"
    scene.check_same("four", scene.folder / "one")

    (moments,) = scene.json("_statistics.json", "one")["statistics"]["columns"].values()
    x = plain.samples[training].astype(np.complex128)
    mean = x.mean(axis=(0, 2))
    np.testing.assert_allclose([complex(*m) for m in moments["mean"]], mean, rtol=1e-10)
    spread = np.sqrt((np.abs(x - mean[:, None]) ** 2).mean(axis=(0, 2)))
    np.testing.assert_allclose(moments["std"], spread, rtol=1e-10)
    assert moments["count"] == len(training) * 64

    # In evaluation there is the normalizing, and nothing random.
    weights = scene.arrays("one")["weights"]
    side = scene.json("_evaluation.json", "one")["sides"]["test"]
    ordinals = plain.side("test")
    z = (plain.samples[ordinals] - mean[:, None]) / spread[:, None]
    rows = np.concatenate([z.real, z.imag], axis=1).reshape(len(z), -1)
    guesses = (rows @ weights).argmax(axis=1)
    assert side["accuracy"] == np.mean(guesses == plain.labels[ordinals])


def steps_of_log(log: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    steps = [line for line in log if line["event"] == "step"]
    return {line["step"]: (line["ordinals"], line["seen"]) for line in steps}


def measured(log: list[dict[str, Any]]) -> list[int]:
    """The ordinals that workers without a trainer read: those that measured statistics."""
    trainers = {line["pid"] for line in log if line["event"] == "init"}
    noted = [line for line in log if line["event"] == "noted" and line["pid"] not in trainers]
    return sorted(line["ordinal"] for line in noted)


# --- orders -------------------------------------------------------------------------------------


def test_without_a_shuffle_records_come_in_order(scene: Any) -> None:
    scene.train(shuffle="none", split="id", epochs=2, steps=None)
    ordinals = [i for ((_, seen, _, _),) in scene.seen().values() for i in seen]
    assert ordinals == [*range(200), *range(200)]
    assert not (scene.folder / "out" / "_evaluation.json").exists()
    assert scene.json("_manifest.json")["metrics"] == {}


def test_block_shuffle_takes_every_record_once_an_epoch(scene: Any) -> None:
    """And goes on as it was after an attempt that failed."""
    spec = {"shuffle": "block", "split": "id", "epochs": 2, "steps": None}
    scene.act({"step": 15, "do": "kill"})
    scene.train(**spec, execution={"retries": 1})
    seen = scene.seen()
    ordinals = [i for step in sorted(seen) for i in seen[step][0][1]]
    assert sorted(ordinals[:200]) == sorted(ordinals[200:]) == list(range(200))
    assert ordinals[:200] != ordinals[200:]
    assert ordinals[:200] != list(range(200))
    for taken in seen.values():
        assert all(each == taken[0] for each in taken)
    assert any(len(taken) > 1 for taken in seen.values())


# --- records of different lengths ---------------------------------------------------------------


class Vowels:
    """The utterances of the packaged recordings, read in a loop."""

    def __init__(self, root: Path) -> None:
        opened = sds.open(str(root))
        speakers = opened.annotations["speakers-v1"]
        self.samples = [record["samples"].data for record in opened]
        self.labels = np.array([speakers[i].values["label"] for i in range(len(opened))]) - 1
        splits = [record.metadata["split"] for record in opened]
        self.train = [i for i, split in enumerate(splits) if split == "train"]
        self.test = [i for i, split in enumerate(splits) if split == "test"]

    def rows(self, ordinals: list[int]) -> np.ndarray:
        """The mean over time of every channel, float64 (records, 12)."""
        return np.stack([self.samples[i].mean(axis=1, dtype=np.float64) for i in ordinals])


@pytest.fixture(scope="module")
def vowels(vowels_root: Path) -> Vowels:
    return Vowels(vowels_root)


@pytest.fixture
def spoken(
    tmp_path: Path, vowels_root: Path, entered: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """Trains on the utterances and returns the scene."""
    with entered(tmp_path, vowels_root) as scene:

        def trained(**changes: Any) -> Any:
            fields = {
                "columns": ["field:samples", "label=annotation:speakers-v1/label:int32"],
                "split": "metadata:split test=test train=train",
                "steps": 160,
                "trainer_args": {"rate": 0.5},
                "evaluate_steps": None,
                "checkpoint_steps": 50,
            }
            scene.train(**fields | changes)
            return scene

        yield trained


def check_vowels(scene: Any, vowels: Vowels, order: list[list[int]], make_model: Any) -> float:
    """The model and its evaluation equal a loop over these ordinals; returns the accuracy."""
    model = make_model(12, 9, rate=0.5)
    for ordinals in order:
        model.learn(vowels.rows(ordinals), vowels.labels[ordinals])
    np.testing.assert_allclose(scene.arrays()["weights"], model.weights, rtol=1e-9, atol=1e-9)
    wanted = model.judged(vowels.rows(vowels.test), vowels.labels[vowels.test])
    side = scene.json("_evaluation.json")["sides"]["test"]
    assert side["confusion"] == wanted["confusion"]
    assert side["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    return float(side["accuracy"])


def shuffled(train: list[int], steps: int, seed: int = 11) -> list[list[int]]:
    order = grain.MapDataset.range(len(train)).shuffle(seed=seed).repeat()
    return [
        [train[order[place]] for place in range(step * BATCH, (step + 1) * BATCH)]
        for step in range(steps)
    ]


def test_lengths_padded(spoken: Callable[..., Any], vowels: Vowels, make_model: Any) -> None:
    scene = spoken(lengths="pad")
    order = shuffled(vowels.train, 160)
    seen = scene.seen()
    assert [seen[step][0][1] for step in sorted(seen)] == order
    longest = max(x.shape[1] for x in vowels.samples)
    assert {tuple(shape) for taken in seen.values() for shape in taken[0][2]} == {(12, longest)}
    assert check_vowels(scene, vowels, order, make_model) > 0.7  # and it does learn


def test_lengths_in_buckets(spoken: Callable[..., Any], vowels: Vowels, make_model: Any) -> None:
    limits = [12, 18, 29]
    scene = spoken(lengths="bucket", buckets=limits)
    seen = scene.seen()
    order = [seen[step][0][1] for step in sorted(seen)]
    # Records are sorted within windows of 64 steps of the global order.
    plain = shuffled(vowels.train, 160)
    for first in range(0, 160, 64):
        window = slice(first, first + 64)
        assert sorted(i for step in order[window] for i in step) == sorted(
            i for step in plain[window] for i in step
        )
    pure = 0
    for step, ordinals in enumerate(order, start=1):
        lengths = [vowels.samples[i].shape[1] for i in ordinals]
        (shape,) = seen[step][0][2]
        assert shape == [12, min(limit for limit in limits if limit >= max(lengths))]
        pure += len({int(np.searchsorted(limits, n)) for n in lengths}) == 1
    assert pure >= 160 - 3 * (len(limits) - 1), "of a window all but the steps at a border"
    check_vowels(scene, vowels, order, make_model)


# --- what is told, and what is refused ----------------------------------------------------------


def test_a_report_says_what_to_be_wary_of(scene: Any, plain: Any) -> None:
    """A class that is not learned, records that are left out, a loss that blew up."""
    kept = [i for i in range(200) if plain.labels[i] != 6]
    annotation = "annotation:truth-v1/label"
    spec = {"split": f"{annotation} test=[6,0] train=[1,2,3,4]", "steps": 6}
    scene.train(**spec, trainer_args={"nan_at": 5})
    told = scene.json("model.json")["warnings"]
    assert any("there is no record of 0, 6 to train on" in line for line in told)
    unused = sum(plain.labels[i] == 5 for i in kept)
    assert any(f"{unused} selected records are on no side" in line for line in told)
    page = (scene.folder / "out" / "report.html").read_text()
    for line in told:
        assert html.escape(line) in page
    (row,) = [row for row in rows_of(scene.folder / "out") if row["loss"] is None]
    assert row["not_finite"] == {"loss": "nan"}
    assert row["step"] == 6
    assert np.isfinite(scene.arrays()["weights"]).all()


def test_a_trainer_without_classes(scene: Any, plain: Any) -> None:
    """Evaluated by its own numbers; it cannot predict, and says so.

    The split is by record, so scenes are on two sides, which the report says.
    """
    columns = ["snr=metadata:snr_db:float32"]
    spec = {"columns": columns, "inputs": ["snr"], "target": None, "split": "id test=0.3"}
    scene.train(**spec, trainer="recording_trainer:Measuring")
    held_out = [place < 0.3 for place in places_of(plain.ids)]
    training = [i for i in range(200) if not held_out[i]]
    mean = plain.snr[[i for step in plain.order(training, STEPS) for i in step]].mean(dtype=float)
    error = plain.snr[np.array(held_out)].astype(float) - mean
    metrics = scene.json("_manifest.json")["metrics"]["test"]
    assert metrics == {"squared_error": pytest.approx((error**2).mean(), rel=1e-9)}
    model = read_model(str(scene.folder / "out"))
    with pytest.raises(InputError, match="cannot predict"):
        prediction_fields(model, str(scene.dataset), str(scene.folder / "predictions"))

    sides: dict[str, set[bool]] = {}
    for name, side in zip(plain.scenes, held_out, strict=True):
        sides.setdefault(name, set()).add(side)
    both = sum(len(found) == 2 for found in sides.values())
    (told,) = scene.json("model.json")["warnings"]
    assert told.startswith(f"{both} scenes have records on more than one side")


def places_of(keys: list[str]) -> list[float]:
    """Where a split puts keys between 0 and 1, by the published definition."""
    hashes = [sha256(f'[0,"{key}"]'.encode()).digest() for key in keys]
    return [int.from_bytes(each[:8], "big") / 2**64 for each in hashes]


@pytest.mark.parametrize(
    ("metrics", "kind", "said"),
    [
        ({"loss": "much"}, SpecError, "metrics must be numbers by name"),
        ({"step": 1.0}, FeatureError, "cannot name a metric 'step'"),
    ],
)
def test_metrics_that_are_none(
    scene: Any, metrics: dict[str, Any], kind: type[Exception], said: str
) -> None:
    scene.act({"step": 2, "do": "metrics", "metrics": metrics, "always": True})
    with pytest.raises(kind, match=said):
        scene.train(execution={"retries": 3})
    assert max(scene.seen()) == 2
    assert len(scene.seen()[1]) == 1, "trying again would not help"


def test_options_that_a_trainer_does_not_take_are_known_before_anything_is_written(
    scene: Any,
) -> None:
    with pytest.raises(SpecError, match="has no option"):
        scene.train(trainer="sklearn", trainer_args={"epochs": 3})
    assert not (scene.folder / "out").exists()
    with pytest.raises(SpecError, match="works alone"):
        scene.train(execution={"ranks": 2})
    assert checked(TrainSpec, scene.spec().model_dump(mode="json")) == scene.spec()
