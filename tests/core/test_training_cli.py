"""The commands about models: what they print and write, and one clear line for every mistake."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import signal_dataset as sds
import yaml

from signal_batch import job as steps
from signal_batch.cli import main
from signal_batch.cli_options import Runners
from signal_batch.frozen import checked
from signal_batch.job import Outcome
from signal_batch.planning import prepare
from signal_batch.publishing import TrainOutcome, publish
from signal_batch.specs import ExportSpec
from signal_batch.splits import side_of
from signal_batch.store import OutputStore
from signal_batch.synth import synthesize
from signal_batch.training_job import claim_training, standing_model
from signal_batch.training_planning import check_trainer, prepare_training
from signal_batch.training_run import evaluate_model, measure_statistics, train_rank
from signal_batch.training_spec import Split, TrainExecution, TrainSpec
from signal_batch.worker import work

Run = Callable[..., tuple[int, str, str]]

COLUMNS = (
    *("--column", "field:samples", "--column", "label=annotation:truth-v1/label:int32"),
    *("--column", "metadata:snr_db:float32", "--target", "label"),
)
TRAINER = (
    *("--transform", "statistics", "--transform", "normalize"),
    *("--trainer", "sklearn", "--trainer-arg", "estimator=GaussianNB"),
)
OPTIONS = (*COLUMNS, *TRAINER, "--split", "scene test=0.3", "--batch-size", "20", "--epochs", "3")


def export_here(spec: ExportSpec, *, on_progress: Any) -> Outcome:
    """`signal_batch.export` with the worker's work done in this process."""
    job = steps.claim(prepare(spec))
    progress = steps.progress_of(job)
    if progress.manifest is not None:
        return Outcome(progress.manifest, already_complete=True)
    for shard in progress.shards:
        work(job.order(shard), lambda event: on_progress(event.get("rows", 0)))
    return Outcome(steps.commit(job))


def train_here(spec: TrainSpec, *, on_progress: Any) -> TrainOutcome:
    """`signal_batch.train` likewise."""
    job = prepare_training(spec)
    check_trainer(job)
    job = claim_training(job)
    if (standing := standing_model(job)) is not None:
        return TrainOutcome(standing, already_complete=True)

    def listen(event: dict[str, Any]) -> None:
        on_progress(event.get("rows", 0))

    if job.plan.normalizes:
        measure_statistics(job, listen)
    train_rank(job, 0, None, listen)
    if job.monitored is not None:
        evaluate_model(job, listen)
    return TrainOutcome(publish(job))


HERE = Runners(export_here, train_here)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(argument, ...)` in an empty folder: exit code, stdout and stderr of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: object, workers: bool = False) -> tuple[int, str, str]:
        capsys.readouterr()
        options: dict[str, Any] = {} if workers else {"runners": HERE}
        try:
            code = main(list(map(str, arguments)), **options)
        except SystemExit as exc:  # argparse ends this way
            code = int(exc.code or 0)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        return code, shown.out, shown.err

    return call


@pytest.fixture(scope="module")
def model(iq_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Naive Bayes on features of captures, a third of the scenes held out; not to be changed."""
    out = tmp_path_factory.mktemp("cli") / "model"
    assert main(["train", str(iq_root), str(out), *OPTIONS], runners=HERE) == 0
    return out


@pytest.fixture
def model_copy(model: Path, tmp_path: Path) -> Path:
    """A copy of `model` that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "model-copy"))


_OWN = """
import numpy as np

class Silent:
    '''Cannot predict, and learns nothing.'''
    def init(self, batch_spec, options):
        self.seen = 0
    def step(self, batch):
        self.seen += len(batch["ordinal"])
        return {"seen": self.seen}
    def evaluate(self, batches):
        return {"records": sum(len(batch["ordinal"]) for batch in batches)}
    def state(self):
        return {"seen": np.array(self.seen)}
    def load(self, state):
        self.seen = int(state["seen"])
"""


@pytest.fixture
def silent(iq_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model whose trainer is a module of one's own that has no `predict`."""
    name = f"silent_{tmp_path.name}".replace("[", "_").replace("]", "_").replace("-", "_")
    with monkeypatch.context() as patch:
        (tmp_path / f"{name}.py").write_text(_OWN)
        patch.syspath_prepend(str(tmp_path))
        fields = {
            "dataset": str(iq_root),
            "output": str(tmp_path / "silent"),
            "columns": ["field:samples"],
            "trainer": f"{name}:Silent",
            "split": "scene test=0.3",
            "steps": 2,
        }
        train_here(checked(TrainSpec, fields), on_progress=lambda *_: None)
        yield tmp_path / "silent"
    sys.modules.pop(name, None)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def manifest_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "_manifest.json").read_text())
    return found


def truth(root: Path) -> dict[int, int]:
    rows = sds.open(str(root)).annotations["truth-v1"]
    return {i: rows[i].values["label"] for i in range(200)}


# --- train ---------------------------------------------------------------------------------------


def test_training_in_worker_processes(run: Run, iq_root: Path, tmp_path: Path) -> None:
    command = ("train", iq_root, "out", *COLUMNS, "--transform", "statistics")
    command += ("--trainer", "sklearn", "--steps", "2", "--threads", "1", "--write-pin", "pin.json")
    code, out, err = run(*command, workers=True)
    assert (code, err) == (0, "")
    manifest = manifest_of(tmp_path / "out")
    assert out.splitlines()[0] == "out: sklearn model after 2 steps"
    assert manifest["run_key"][:16] in out
    assert manifest["spec"]["execution"]["threads"] == 1
    assert json.loads((tmp_path / "pin.json").read_text())["record_count"] == 200


def test_what_training_prints(run: Run, iq_root: Path, tmp_path: Path, model: Path) -> None:
    code, out, err = run("train", iq_root, "out", *OPTIONS)
    assert (code, err) == (0, "")
    manifest = manifest_of(tmp_path / "out")
    accuracy = manifest["metrics"]["test"]["accuracy"]
    records = len(ordinals_on(tmp_path / "out", "test"))
    total = manifest["steps"]
    assert out.startswith(f"out: sklearn model after {total} steps\n  test        accuracy ")
    assert f"accuracy {accuracy:.4g}, loss" in out
    assert "report      out/report.html" in out
    assert (tmp_path / "out" / "report.html").exists()
    # 3 epochs of the records that are not for testing, 20 a step.
    assert total == 3 * (200 - records) // 20
    # The same spec elsewhere is the same run, down to the bytes of the model.
    assert manifest["run_key"] == manifest_of(model)["run_key"]
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def ordinals_on(out: Path, side: str) -> list[int]:
    """Ordinals of a side, from the formula that splits are documented with."""
    spec = manifest_of(out)["spec"]
    dataset = sds.open(spec["dataset"])
    split = Split.model_validate(spec["split"])
    return [i for i in range(len(dataset)) if side_of(split, dataset[i].scene_id) == side]


def test_a_second_run_says_that_there_was_nothing_to_do(
    run: Run, iq_root: Path, model_copy: Path
) -> None:
    before = {name: (model_copy / name).read_bytes() for name in files_below(model_copy)}
    code, out, err = run("train", iq_root, model_copy, *OPTIONS)
    assert (code, err) == (0, "")
    assert "it was complete already; nothing was done" in out
    assert {name: (model_copy / name).read_bytes() for name in files_below(model_copy)} == before


def test_another_spec_at_the_same_place(run: Run, iq_root: Path, model: Path) -> None:
    before = files_below(model)
    code, out, err = run("train", iq_root, model, *OPTIONS, "--seed", 3, "--by", "label")
    assert (code, out) == (2, "")
    assert "spec.seed: there the default, here 3" in err
    assert 'spec.by: there the default, here ["label"]' in err
    assert err.count("\n") == 1
    assert files_below(model) == before


def test_a_dry_run_tells_all_and_writes_nothing(run: Run, iq_root: Path, tmp_path: Path) -> None:
    code, out, err = run("train", iq_root, "out", *OPTIONS, "--dry-run")
    assert (code, err) == (0, "")
    assert files_below(tmp_path) == []
    job = prepare_training(
        checked(
            TrainSpec,
            {
                "dataset": str(iq_root),
                "output": "out",
                "columns": [c for c in COLUMNS if ":" in c],
                "target": "label",
                "split": "scene test=0.3",
                "transforms": ["statistics", "normalize"],
                "trainer": "sklearn",
                "trainer_args": {"estimator": "GaussianNB"},
                "batch_size": 20,
                "epochs": 3,
            },
        )
    )
    assert f"run key       {job.run_key}\n" in out
    assert job.pin.fingerprint[:16] in out
    assert "annotations   truth-v1 (" in out
    labels = truth(iq_root)
    for side in ("train", "test"):
        chosen = job.sides[side].ordinals().tolist()
        counts = Counter(labels[ordinal] for ordinal in chosen)
        shown = ", ".join(f"{label}: {counts[label]}" for label in sorted(counts))
        assert f"{side:<13} {len(chosen)} records ({shown})\n" in out
    assert re.search(r"^column        label: int32 a value$", out, re.MULTILINE)
    assert re.search(r"^column        snr_db: float32 a value$", out, re.MULTILINE)
    assert ", seen by the model" in out
    assert f"steps         {job.plan.total_steps} of 20 records" in out


def test_a_dry_run_of_records_in_buckets(run: Run, vowels_root: Path) -> None:
    command = ("train", vowels_root, "out", "--column", "field:samples", "--target", "label")
    command += ("--column", "label=annotation:speakers-v1/label:int32", "--dry-run")
    code, _, err = run(*command, "--trainer", "sklearn")
    assert code == 2
    assert "has records of 7 to 29 samples" in err
    for word in ("pad", "crop", "bucket"):
        assert word in err
    code, _, err = run(*command, "--trainer", "sklearn", "--lengths", "bucket", "--bucket", 29)
    assert code == 2
    assert "use lengths=pad or lengths=crop" in err
    code, out, err = run(*command, "--trainer", "sklearn", "--lengths", "crop", "--length", 7)
    assert (code, err) == (0, "")
    assert "samples: float32 12 x 7, seen by the model" in out


def test_a_dry_run_shows_warnings(run: Run, iq_root: Path) -> None:
    code, out, err = run(
        "train", iq_root, "out", *COLUMNS, *TRAINER, "--split", "id test=0.3", "--dry-run"
    )
    assert code == 0
    assert out.startswith("run key")
    assert "scenes have records on more than one side" in err


def test_a_dry_run_where_there_is_a_model(run: Run, iq_root: Path, model: Path) -> None:
    before = files_below(model)
    code, out, _ = run("train", iq_root, model, *OPTIONS, "--dry-run")
    assert code == 0
    assert manifest_of(model)["run_key"] in out
    assert run("train", iq_root, model, *OPTIONS, "--dry-run", "--seed", "1")[0] == 2
    assert files_below(model) == before


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_spec_file_and_options_that_win_over_it(
    run: Run, iq_root: Path, tmp_path: Path, kind: str
) -> None:
    fields = {
        "dataset": str(iq_root),
        "output": "out",
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        "target": "label",
        "transforms": ["statistics", {"normalize": {}}],
        "trainer": "sklearn",
        "trainer_args": {"estimator": "GaussianNB"},
        "steps": 9,
        "execution": {"threads": 1, "retries": 0},
    }
    dump = {"yaml": yaml.safe_dump, "json": json.dumps}[kind]
    (tmp_path / f"spec.{kind}").write_text(dump(fields))
    command = ("train", "--spec", f"spec.{kind}", "--steps", 3, "--threads", 2)
    code, _, err = run(*command, "--where", "ordinal < 90", "--batch-size", 30)
    assert (code, err) == (0, "")
    manifest = manifest_of(tmp_path / "out")
    spec = manifest["spec"]
    assert (manifest["steps"], spec["batch_size"], spec["where"]) == (3, 30, ["ordinal < 90"])
    assert (spec["execution"]["threads"], spec["execution"]["retries"]) == (2, 0)
    assert spec["transforms"] == ["statistics", "normalize"]


def test_a_pin_reproduces_a_run_and_refuses_other_data(
    run: Run, iq_root: Path, model: Path, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    dry = (*OPTIONS, "--dry-run")
    code, out, _ = run("train", iq_root, "out", *dry, "--write-pin", "pin.json")
    assert code == 0
    again = run("train", iq_root, "out", *dry, "--pin", "pin.json")
    assert (again[0], again[1]) == (0, out)
    other = write_dataset(tmp_path / "other")
    code, _, err = run("train", other, "out", *dry, "--pin", "pin.json")
    assert code == 1
    assert "is not what was pinned" in err
    assert not (tmp_path / "out").exists()


def test_a_trainer_in_the_current_folder(run: Run, iq_root: Path, tmp_path: Path) -> None:
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(_OWN)
    command = ("train", iq_root, "out", "--column", "field:samples", "--trainer", f"{name}:Silent")
    code, out, err = run(*command, "--steps", 3, "--split", "scene test=0.3")
    assert (code, err) == (0, "")
    assert f"{name}:Silent model after 3 steps" in out
    assert manifest_of(tmp_path / "out")["metrics"]["test"]["records"] > 0


def test_a_trainer_that_fails_is_exit_code_1_and_one_line(
    run: Run, iq_root: Path, tmp_path: Path
) -> None:
    name = f"bad_{tmp_path.name}"
    text = _OWN.replace("self.seen += len", "1 / 0; self.seen += len")
    (tmp_path / f"{name}.py").write_text(text)
    command = ("train", iq_root, "out", "--column", "field:samples", "--trainer", f"{name}:Silent")
    code, out, err = run(*command, "--steps", 3)
    assert (code, out) == (1, "")
    assert "ZeroDivisionError" in err
    assert err.count("\n") == 1


ONE = ("--column", "field:samples", "--trainer", "sklearn")
LABEL = ("--column", "label=annotation:truth-v1/label:int32", "--target", "label")
MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no dataset": (("{none}", "out", *ONE), "the path does not exist"),
    "a file as dataset": (("{file}", "out", *ONE), "is a file"),
    "an empty folder": (("{empty}", "out", *ONE), "holds no root.json"),
    "a model as dataset": (("{model}", "out", *ONE), "holds no root.json"),
    "no arguments": ((), "no dataset given"),
    "no output": (("{iq}",), "no output given"),
    "no column": (("{iq}", "out", "--trainer", "sklearn"), "at least one column"),
    "no trainer": (("{iq}", "out", "--column", "field:samples"), "trainer: Field required"),
    "unknown trainer": (("{iq}", "out", *ONE[:2], "--trainer", "sklaern"), "did you mean sklearn"),
    "trainer module": (("{iq}", "out", *ONE[:2], "--trainer", "no_such:X"), "no module"),
    "trainer attribute": (("{iq}", "out", *ONE[:2], "--trainer", "math:X"), "no attribute"),
    "no trainer at all": (("{iq}", "out", *ONE[:2], "--trainer", "math:pi"), "trainer 'math:pi'"),
    "no methods": (("{iq}", "out", *ONE[:2], "--trainer", "math:sqrt"), "lacks init, step"),
    "trainer option": (("{iq}", "out", *ONE, *LABEL, "--trainer-arg", "x=1"), "no option 'x'"),
    "estimator": (
        ("{iq}", "out", *ONE, *LABEL, "--trainer-arg", "estimator=GausianNB"),
        "did you mean GaussianNB",
    ),
    "half an option": (
        ("{iq}", "out", *ONE, "--trainer-arg", "x"),
        "--trainer-arg 'x' must read K",
    ),
    "no JSON": (("{iq}", "out", *ONE, "--trainer-arg", "x=NaN"), "trainer_args holds NaN"),
    "nothing to learn": (("{iq}", "out", *ONE), "give the column to learn as target"),
    "target": (("{iq}", "out", *ONE, "--target", "lable"), "target 'lable' is no column"),
    "target of floats": (
        ("{iq}", "out", *ONE, "--column", "metadata:snr_db", "--target", "snr_db"),
        "'snr_db' is a float, and trainer sklearn learns classes",
    ),
    "by": (("{iq}", "out", *ONE, "--by", "snr"), "by 'snr' is no column"),
    "selector": (("{iq}", "out", *ONE, "--column", "filed:x"), "starts with 'filed'"),
    "unknown column": (("{iq}", "out", *ONE, "--column", "metadata:snr"), "snr"),
    "unknown field": (("{iq}", "out", "--column", "field:x", *ONE[2:]), "field"),
    "column twice": (("{iq}", "out", *ONE, *ONE[:2]), "unique"),
    "annotation set": (("{iq}", "out", *ONE, "--column", "annotation:no/x"), "no annotation set"),
    "filter": (("{iq}", "out", *ONE, "--where", "snr_db>5"), "a filter reads"),
    "nothing selected": (("{iq}", "out", *ONE, "--where", "ordinal < 0"), "no record"),
    "split": (("{iq}", "out", *ONE, "--split", "scenes test=0.2"), "starts with 'scenes'"),
    "empty split": (("{iq}", "out", *ONE, "--split", ""), "is empty"),
    "half a split": (("{iq}", "out", *ONE, "--split", "scene test"), "must read KEY=VALUE"),
    "odd split": (("{iq}", "out", *ONE, "--split", "scene =0.2"), "must read KEY=VALUE"),
    "share": (("{iq}", "out", *ONE, "--split", "scene test=20"), "test is 20; it takes a share"),
    "shares": (("{iq}", "out", *ONE, "--split", "scene test=0.9 validation=0.2"), "nothing to tr"),
    "empty side": (("{iq}", "out", *ONE, "--split", "metadata:split test=x"), "no record on the t"),
    "split key": (("{iq}", "out", *ONE, "--split", "metadata:fold test=0.2"), "fold"),
    "split by samples": (
        ("{iq}", "out", *ONE, "--split", "field:samples test=0.2"),
        "single value",
    ),
    "split set": (
        ("{iq}", "out", *ONE, "--split", "annotation:no/x test=0.2"),
        "no annotation set",
    ),
    "transform": (("{iq}", "out", *ONE, "--transform", "normalise"), "did you mean normalize"),
    "transform module": (("{iq}", "out", *ONE, "--transform", "no_such:f"), "no module"),
    "transform option": (
        ("{iq}", "out", *ONE, "--transform", "add_noise snr=1"),
        "no option 'snr'",
    ),
    "transform form": (("{iq}", "out", *ONE, "--transform", "add_noise 3"), "must read KEY=VALUE"),
    "crop in training": (
        ("{iq}", "out", *ONE, *LABEL, "--transform", "random_crop length=32"),
        "has records of 32 to 64 samples",
    ),
    "input": (("{iq}", "out", *ONE, *LABEL, "--input", "x"), "input 'x' is no column"),
    "lengths": (("{iq}", "out", *ONE, "--lengths", "cut"), "lengths: "),
    "length": (("{iq}", "out", *ONE, "--length", "5"), "length goes with lengths=pad"),
    "length in words": (("{iq}", "out", *ONE, "--length", "short"), "invalid int"),
    "too short": (("{iq}", "out", *ONE, *LABEL, "--lengths", "pad", "--length", "9"), "64 samples"),
    "bucket": (("{iq}", "out", *ONE, "--bucket", "9"), "buckets go with lengths=bucket"),
    "batch size": (("{iq}", "out", *ONE, "--batch-size", "0"), "batch_size"),
    "batch too large": (
        ("{iq}", "out", *ONE, *LABEL, "--batch-size", "201", "--epochs", "1"),
        "a global step takes 201 records",
    ),
    "epochs and steps": (("{iq}", "out", *ONE, "--epochs", "1", "--steps", "1"), "not both"),
    "no epochs": (("{iq}", "out", *ONE, "--epochs", "0"), "epochs"),
    "no steps": (("{iq}", "out", *ONE, "--steps", "-1"), "steps"),
    "seed": (("{iq}", "out", *ONE, "--seed", "-1"), "seed"),
    "shuffle": (("{iq}", "out", *ONE, "--shuffle", "well"), "shuffle"),
    "ranks": (("{iq}", "out", *ONE, *LABEL, "--ranks", "2"), "works alone; ranks must be 1"),
    "ranks and batch": (("{iq}", "out", *ONE, "--ranks", "3"), "does not divide among 3 ranks"),
    "threads": (("{iq}", "out", *ONE, "--threads", "0"), "execution.threads"),
    "checkpoints": (("{iq}", "out", *ONE, "--checkpoint-seconds", "0"), "checkpoint_s"),
    "mlflow": (("{iq}", "out", *ONE, "--mlflow", "http://a:b@host"), "credentials"),
    "pin": (("{iq}", "out", *ONE, "--pin", "no.json"), "not a readable pin"),
    "pin to nowhere": (("{iq}", "out", *ONE, *LABEL, "--write-pin", "no/pin.json"), "no/pin.json"),
    "spec file": (("--spec", "no.yaml"), "no.yaml cannot be read"),
    "spec of nothing": (("--spec", "{empty_file}"), "must hold the fields of a spec"),
    "output location": (("{iq}", "nosuch://x/y", *ONE, *LABEL), "nosuch"),
    "output in memory": (("{iq}", "memory://x", *ONE, *LABEL), "memory://"),
    "output is a file": (("{iq}", "{file}", *ONE, *LABEL), "is a file"),
    "output below a file": (("{iq}", "{file}/out", *ONE, *LABEL), "is a file"),
    "output has other things": (("{iq}", "{full}", *ONE, *LABEL), "not empty"),
    "output is a dataset": (("{iq}", "{iq}", *ONE, *LABEL), "not empty"),
    "unknown option": (("{iq}", "out", *ONE, "--colour", "red"), "unrecognized"),
}


@pytest.fixture
def places(iq_root: Path, model: Path, tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "places"
    for name in ("empty", "full"):
        (folder / name).mkdir(parents=True)
    (folder / "file").write_text("precious: [")
    (folder / "empty_file").write_text("")
    (folder / "full" / "thesis").write_text("precious")
    names = ("none", "file", "empty_file", "empty", "full")
    found = {name: str(folder / name) for name in names}
    return {"iq": str(iq_root), "model": str(model)} | found


def one_line(err: str) -> None:
    if not err.startswith("usage:"):
        assert err.startswith("signal-batch: ")
        assert err.count("\n") == 1, err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    run: Run, places: dict[str, str], tmp_path: Path, mistake: str
) -> None:
    arguments, words = MISTAKES[mistake]
    before = files_below(tmp_path)
    code, out, err = run("train", *(text.format_map(places) for text in arguments))
    assert code == 2, err
    assert words in err
    assert out == ""
    assert files_below(tmp_path) == before
    one_line(err)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour: red\n", "colour: there is no such field"),
        ("batch_size: many\n", "batch_size"),
        ("split: 3\n", "split"),
        ("split: {by: 3}\n", "split"),
        ("split: {test: 0.2, tset: 1}\n", "split"),
        ("transforms: 3\n", "transforms"),
        ("transforms: [3]\n", "transforms"),
        ("transforms: [[a]]\n", "transforms"),
        ("transforms: [{a: 1, b: 2}]\n", "transforms"),
        ("transforms: [{add_noise: {snr_db: [2020-01-01]}}]\n", "has no JSON"),
        ("trainer_args: [1]\n", "trainer_args"),
        ("trainer_args: {x: [2020-01-01]}\n", "has no JSON"),
        ("trainer: 3\n", "trainer"),
        ("target: [a]\n", "target"),
        ("inputs: 3\n", "inputs"),
        ("by: {a: b}\n", "by"),
        ("buckets: 3\n", "buckets"),
        ("execution: fast\n", "execution"),
        ("execution: {workers: 3}\n", "workers"),
        ("steps: 1.5\n", "steps"),
        ("mlflow: 3\n", "mlflow"),
        ("checkpoint_s: .nan\n", "checkpoint_s"),
        ("1: 2\n", "1"),
    ],
)
def test_a_spec_file_of_nonsense(
    run: Run, iq_root: Path, tmp_path: Path, text: str, words: str
) -> None:
    given = yaml.safe_load(text)
    fields = {"dataset": str(iq_root), "output": "out", "columns": ["field:samples"]}
    fields |= {"trainer": "sklearn"}
    absent = {name: value for name, value in fields.items() if name not in given}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(absent) + text)
    code, out, err = run("train", "--spec", "spec.yaml")
    assert code == 2, err
    assert words in err
    assert out == ""
    one_line(err)
    assert files_below(tmp_path) == ["spec.yaml"]


# --- evaluate ------------------------------------------------------------------------------------


def test_evaluating_the_held_out_side_gives_what_training_found(
    run: Run, iq_root: Path, model: Path
) -> None:
    code, out, err = run("evaluate", model, iq_root, "--side", "test", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["metrics"] == manifest_of(model)["metrics"]["test"]
    assert found["records"] == len(ordinals_on(model, "test"))
    assert found["classes"] == sorted(set(truth(iq_root).values()))
    assert found["side"] == "test"
    assert [entry["records"] > 0 for entry in found["by"]["snr_db"]]
    code, out, _ = run("evaluate", model, iq_root, "--side", "test")
    assert code == 0
    assert out.startswith(f"{model} on {iq_root}, test side: {found['records']} records\n")
    assert f"accuracy    {found['metrics']['accuracy']:.4g}" in out


def test_evaluating_agrees_with_the_predictions(
    run: Run, iq_root: Path, model: Path, tmp_path: Path
) -> None:
    where = ("--where", "metadata:snr_db >= 10")
    code, out, _ = run("evaluate", model, iq_root, "--json", *where)
    assert code == 0
    found = json.loads(out)
    assert run("predict", model, iq_root, "out", *where)[0] == 0
    rows = duckdb.sql(
        f"select ordinal, prediction, probabilities from '{tmp_path}/out/data/*.parquet'"
    ).fetchall()
    labels = truth(iq_root)
    assert found["records"] == len(rows)
    hits = sum(labels[ordinal] == prediction for ordinal, prediction, _ in rows)
    assert found["metrics"]["accuracy"] == pytest.approx(hits / len(rows))
    loss = -np.mean([np.log(max(p[labels[ordinal]], 1e-12)) for ordinal, _, p in rows])
    assert found["metrics"]["loss"] == pytest.approx(loss, rel=1e-6)
    matrix = np.zeros((7, 7), int)
    for ordinal, prediction, _ in rows:
        matrix[labels[ordinal], prediction] += 1
    assert found["confusion"] == matrix.tolist()


def test_a_label_that_the_model_does_not_know(
    run: Run, model: Path, iq_root: Path, tmp_path: Path
) -> None:
    synthesize(str(tmp_path / "ds"), records=8, shape=(2, 64), seed=1)
    dataset = sds.open(str(tmp_path / "ds"))
    rows = [
        sds.AnnotationRecord(
            dataset[i].id, i, sds.AnnotationStatus("success"), {"label": 40 if i == 5 else 0}
        )
        for i in range(8)
    ]
    root = tmp_path / "other"
    shutil.copytree(tmp_path / "ds", root, ignore=shutil.ignore_patterns("annotations"))
    sds.publish_annotations(sds.open(str(root)), "truth-v1", rows)
    code, out, err = run("evaluate", model, root)
    assert (code, out) == (2, "")
    assert "ordinals 0-7: 40 is no class of this model; it knows 0, 1, 2" in err
    one_line(err)
    # Predicting needs no label.
    assert run("predict", model, root, "out")[0] == 0


def test_a_model_of_another_trainer(run: Run, silent: Path, iq_root: Path) -> None:
    """One without `predict` is judged by what it says itself, and cannot predict."""
    code, _, err = run("evaluate", silent, iq_root)
    assert code == 2
    assert "was trained without a target; there is nothing to judge by" in err
    code, out, err = run("predict", silent, iq_root, "out")
    assert (code, out) == (2, "")
    assert "cannot predict: it has no such method" in err
    one_line(err)


def test_a_model_whose_trainer_is_not_here(
    run: Run, silent: Path, iq_root: Path, tmp_path: Path
) -> None:
    [source] = tmp_path.glob("silent_*.py")
    source.unlink()
    sys.modules.pop(source.stem, None)
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    for command in (("evaluate", silent, iq_root), ("predict", silent, iq_root, "out")):
        code, out, err = run(*command)
        assert (code, out) == (2, ""), err
        assert f"there is no module '{source.stem}' here" in err
        one_line(err)
    for command in ("verify", "inspect"):
        assert run(command, silent)[0] == 0, "looking at it needs no trainer"


USING: dict[str, tuple[tuple[str, ...], str]] = {
    "not a model": (("{iq}", "{iq}"), "holds no published model"),
    "nothing there": (("{none}", "{iq}"), "holds no published model"),
    "an empty folder as model": (("{empty}", "{iq}"), "holds no published model"),
    "a file as model": (("{file}", "{iq}"), "{file}"),
    "missing dataset": (("{model}", "{none}"), "the path does not exist"),
    "a model as dataset": (("{model}", "{model}"), "holds no root.json"),
    "a dataset without the columns": (("{model}", "{small}"), "truth-v1"),
    "filter": (("{model}", "{iq}", "--where", "snr_db>5"), "a filter reads"),
    "nothing selected": (("{model}", "{iq}", "--where", "ordinal < 0"), "no record"),
    "unknown option": (("{model}", "{iq}", "--colour", "red"), "unrecognized"),
    "credentials": (("s3://k:hunter2@bucket/x", "{iq}"), "credentials"),
}


@pytest.mark.parametrize("mistake", USING)
def test_mistakes_in_using_a_model(
    run: Run,
    places: dict[str, str],
    tmp_path: Path,
    mistake: str,
    write_dataset: Callable[..., Path],
) -> None:
    places["small"] = str(write_dataset(tmp_path / "small"))
    before = files_below(tmp_path)
    arguments, words = USING[mistake]
    given = [text.format_map(places) for text in arguments]
    for command in (["evaluate", *given], ["predict", *given[:2], "out", *given[2:]]):
        if mistake == "a dataset without the columns" and command[0] == "predict":
            continue  # see below: a label is not needed
        code, out, err = run(*command)
        assert code == 2 or (mistake == "a file as model" and code == 1), err
        assert words.format_map(places) in err
        assert "hunter2" not in err
        assert out == ""
        one_line(err)
        assert files_below(tmp_path) == before


def test_records_of_another_shape(run: Run, model: Path, vowels_root: Path) -> None:
    code, out, err = run("predict", model, vowels_root, "out")
    assert code in (1, 2)
    assert out == ""
    one_line(err)


def test_a_side_that_has_no_records(run: Run, model: Path, iq_root: Path) -> None:
    code, _, err = run("evaluate", model, iq_root, "--side", "validation")
    assert code == 2
    assert "puts no record of" in err
    assert "validation" in err
    code, _, err = run("evaluate", model, iq_root, "--side", "training")
    assert code == 2
    assert "invalid choice" in err


def test_an_unfinished_run_is_no_model_yet(run: Run, model_copy: Path, iq_root: Path) -> None:
    (model_copy / "_manifest.json").unlink()
    for command in (("evaluate", model_copy, iq_root), ("predict", model_copy, iq_root, "out")):
        code, _, err = run(*command)
        assert code == 2
        assert "holds an unfinished training run" in err
    code, out, err = run("verify", model_copy)
    assert code == 1
    assert "not complete: there is no _manifest.json" in err
    code, out, _ = run("inspect", model_copy)
    assert code == 0
    assert "a training run that is not complete; run the same command to go on" in out
    assert run("train", iq_root, model_copy, *OPTIONS)[0] == 0
    assert run("verify", model_copy)[0] == 0


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_model(run: Run, iq_root: Path, model_copy: Path, name: str, damage: str) -> None:
    path = model_copy / name
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(payload if damage == "flipped" else payload[:-3])
    for command in (("evaluate", model_copy, iq_root), ("predict", model_copy, iq_root, "out")):
        code, out, err = run(*command)
        assert (code, out) == (1, ""), err
        assert name in err
        one_line(err)
    code, out, err = run("verify", model_copy)
    assert code == 1
    found = "missing" if damage == "missing" else "not what was published"
    assert err == f"signal-batch: {name} is {found}\n"
    assert out == f"{model_copy}: 1 fault\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.parquet", "report.html"])
def test_files_for_people_are_verified_too(run: Run, model_copy: Path, name: str) -> None:
    (model_copy / name).write_bytes(b"other")
    code, _, err = run("verify", model_copy)
    assert code == 1
    assert f"{name} is not what was published" in err


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        "[]",
        '{"format": "signal-batch.model"}',
        '{"format": "signal-batch.model", "files": []}',
        '{"format": "signal-batch.model", "files": [1]}',
        '{"format": "signal-batch.model", "files": [{}]}',
        '{"format": "signal-batch.model", "files": [{"file": 3, "bytes": "x"}]}',
        '{"format": "signal-batch.model", "files": [{"file": "model.json", "bytes": 1}]}',
    ],
)
def test_a_manifest_of_nonsense(run: Run, iq_root: Path, model_copy: Path, content: str) -> None:
    (model_copy / "_manifest.json").write_text(content)
    for command in (
        ("evaluate", model_copy, iq_root),
        ("predict", model_copy, iq_root, "out"),
        ("verify", model_copy),
        ("inspect", model_copy),
        ("train", iq_root, model_copy, *OPTIONS),
    ):
        code, out, err = run(*command)
        assert code in (1, 2), (command, out)
        assert "unexpected" not in err
        assert err.startswith("signal-batch: ")


@pytest.mark.parametrize("name", ["run_key", "identity"])
def test_a_manifest_of_another_run(run: Run, model_copy: Path, name: str) -> None:
    manifest = manifest_of(model_copy)
    manifest[name] = "0" * 64 if name == "run_key" else {**manifest[name], "sides": {}}
    (model_copy / "_manifest.json").write_text(json.dumps(manifest))
    code, _, err = run("verify", model_copy)
    assert code == 1
    assert "the identity does not give the run key" in err
    assert ("_spec.json is missing or of another run" in err) is (name == "run_key")


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "signal-batch.model"}'])
def test_a_claim_of_nonsense(run: Run, iq_root: Path, model_copy: Path, content: str) -> None:
    (model_copy / "_spec.json").write_text(content)
    (model_copy / "_manifest.json").unlink()
    for command in (
        ("trace", model_copy, "--step", 1),
        ("train", iq_root, model_copy, *OPTIONS),
        ("inspect", model_copy),
        ("verify", model_copy),
        ("evaluate", model_copy, iq_root),
    ):
        code, _, err = run(*command)
        assert code in (1, 2), command
        assert "unexpected" not in err
        assert err.startswith("signal-batch: ")


# --- predict -------------------------------------------------------------------------------------


def test_predictions(run: Run, iq_root: Path, model: Path, tmp_path: Path) -> None:
    command = ("predict", model, iq_root, "out", "--column", "metadata:snr_db:float32")
    code, out, err = run(*command, "--column", "label=annotation:truth-v1/label:int32")
    assert (code, err) == (0, "")
    assert out.startswith("out: 200 rows in ")
    rows = duckdb.sql(
        "select ordinal, id, label, snr_db, prediction, probability, probabilities "
        f"from '{tmp_path}/out/data/*.parquet' order by ordinal"
    ).fetchall()
    dataset, labels = sds.open(str(iq_root)), truth(iq_root)
    classes = sorted(set(labels.values()))
    assert [row[0] for row in rows] == list(range(200))
    for ordinal, name, label, snr, prediction, probability, probabilities in rows:
        record = dataset[ordinal]
        assert (name, label) == (record.id, labels[ordinal])
        assert snr == pytest.approx(record.metadata["snr_db"], rel=1e-6)
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
        assert prediction == classes[int(np.argmax(probabilities))]
        assert probability == max(probabilities)
    code, out, _ = run(*command, "--column", "label=annotation:truth-v1/label:int32")
    assert "it was complete already; nothing was done" in out
    assert run("verify", "out")[0] == 0


def test_predictions_do_not_depend_on_what_is_predicted_together(
    run: Run, iq_root: Path, model: Path, tmp_path: Path
) -> None:
    run("predict", model, iq_root, "all")
    run("predict", model, iq_root, "few", "--where", "ordinal in [3, 77, 150]")

    def found(name: str) -> list[Any]:
        query = f"select * from '{tmp_path}/{name}/data/*.parquet' where ordinal in (3, 77, 150)"
        return duckdb.sql(f"{query} order by ordinal").fetchall()

    assert len(found("few")) == 3
    assert found("few") == found("all")


def test_mistakes_in_predicting(run: Run, iq_root: Path, model: Path, places: Any) -> None:
    for arguments, words in (
        (("out", "--column", "filed:x"), "starts with 'filed'"),
        (("out", "--column", "metadata:nothing"), "nothing"),
        (("out", "--workers", "0"), "workers"),
        (("out", "--workers", "two"), "invalid int"),
        ((places["full"],), "not empty"),
        ((places["file"],), "is a file"),
        ((str(model),), "belongs to another job"),
        ((), "required: OUT"),
    ):
        code, out, err = run("predict", model, iq_root, *arguments)
        assert (code, out) == (2, ""), err
        assert words in err
        one_line(err)


def test_another_model_in_its_place_makes_other_predictions(
    run: Run, iq_root: Path, model_copy: Path
) -> None:
    assert run("predict", model_copy, iq_root, "out")[0] == 0
    shutil.rmtree(model_copy)
    assert run("train", iq_root, model_copy, *OPTIONS, "--seed", 3)[0] == 0
    code, _, err = run("predict", model_copy, iq_root, "out")
    assert code == 2
    assert "spec.feature_args.identity" in err


# --- trace, inspect, verify, help ----------------------------------------------------------------


def test_trace(run: Run, iq_root: Path, model: Path) -> None:
    dataset = sds.open(str(iq_root))
    code, out, err = run("trace", model, "--step", 2)
    assert (code, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [int(row[0]) for row in rows] == list(range(20, 40))
    assert all(dataset[int(ordinal)].id == name for _, ordinal, name in rows)
    assert not {int(row[1]) for row in rows} & set(ordinals_on(model, "test"))
    code, out, err = run("trace", model, "--record", rows[0][2])
    assert (code, err) == (0, "")
    assert "2" in out.split()
    for step in out.split():
        _, listed, _ = run("trace", model, "--step", step)
        assert f"\t{rows[0][2]}\n" in listed


def test_mistakes_in_tracing(run: Run, iq_root: Path, model: Path, places: Any) -> None:
    held_out = sds.open(str(iq_root))[ordinals_on(model, "test")[0]].id
    for arguments, words in (
        ((model, "--step", 0), "step 0 is none of this run, which has steps 1 to"),
        ((model, "--step", 10**12), "is none of this run"),
        ((model, "--step", "two"), "invalid int"),
        ((model, "--record", "nobody"), "record 'nobody' is not among the"),
        ((model, "--record", held_out), "is not among the"),
        ((model,), "one of the arguments --step --record is required"),
        ((model, "--step", 1, "--record", "x"), "not allowed with"),
        ((iq_root, "--step", 1), "is not the output of a training run"),
        ((places["none"], "--step", 1), "is not the output of a training run"),
        ((places["empty"], "--record", "x"), "is not the output of a training run"),
    ):
        code, out, err = run("trace", *arguments)
        assert (code, out) == (2, ""), err
        assert words in err
        one_line(err)


def test_tracing_a_dataset_that_is_gone(run: Run, iq_copy: Path, tmp_path: Path) -> None:
    assert run("train", iq_copy, "out", *COLUMNS, *TRAINER, "--steps", 1)[0] == 0
    shutil.rmtree(iq_copy)
    code, _, err = run("trace", "out", "--step", 1)
    assert code == 1
    assert f"the pinned dataset cannot be opened any more: there is no dataset at {iq_copy}" in err
    one_line(err)


def test_inspect_and_verify_a_model(run: Run, iq_root: Path, model: Path) -> None:
    manifest = manifest_of(model)
    code, out, err = run("inspect", model)
    assert (code, err) == (0, "")
    assert out.startswith(f"{model}: sklearn model after {manifest['steps']} steps\n")
    assert f"accuracy {manifest['metrics']['test']['accuracy']:.4g}" in out
    assert f"from {iq_root}, written {manifest['created']}" in out
    code, out, err = run("verify", model)
    assert (code, err) == (0, "")
    assert out.startswith(f"{model}: complete and undamaged, 5 files, ")
    assert {entry["file"] for entry in manifest["files"]} == {
        *("model.json", "model.safetensors", "metrics.jsonl", "metrics.parquet", "report.html")
    }


def test_a_model_can_be_copied_anywhere(
    run: Run, iq_root: Path, model: Path, tmp_path: Path
) -> None:
    """Two files and the manifest that names them are enough."""
    (tmp_path / "few").mkdir()
    for name in ("model.json", "model.safetensors", "_manifest.json"):
        shutil.copy(model / name, tmp_path / "few" / name)
    code, out, _ = run("evaluate", "few", iq_root, "--side", "test", "--json")
    assert code == 0
    assert json.loads(out)["metrics"] == manifest_of(model)["metrics"]["test"]


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "trace"])
def test_help(run: Run, command: str) -> None:
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: signal-batch {command}")
    if command == "train":
        assert "examples:" in out


def test_every_option_of_train_is_told_with_its_default(run: Run) -> None:
    _, out, _ = run("train", "--help")
    shown = " ".join(out.split())
    fields = {**TrainSpec.model_fields, **TrainExecution.model_fields}
    flags = {"checkpoint_s": "checkpoint-seconds", "stall_timeout_s": "stall-timeout"}
    singular = {"columns", "transforms", "inputs", "buckets", "trainer_args", "limits"}
    for name, field in fields.items():
        if name in ("dataset", "output", "execution", "prefetch_batches", "retry_delay_s"):
            continue
        flag = flags.get(name, (name[:-1] if name in singular else name).replace("_", "-"))
        assert f"--{flag} " in shown, name
        assert " ".join(str(field.description).split()) in shown, name
    assert "(default 64)" in shown
    assert "(default global)" in shown


def test_ctrl_c_while_training(
    run: Run, iq_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputStore, "put_object", interrupted)
    code, _, err = run("train", iq_root, "out", *OPTIONS)
    assert code == 1
    assert err.startswith("signal-batch: stopped; what is finished stays")
