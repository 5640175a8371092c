"""The training flow against a real server: what its page shows, and how it is stopped."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.flows import EntrypointType, load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from flows.train_model import train_model
from signal_batch.errors import OutputConflictError, SignalBatchError, SpecError
from signal_batch.frozen import checked
from signal_batch.training_runner import train
from signal_batch.training_spec import TrainExecution, TrainSpec

pytestmark = pytest.mark.xdist_group("prefect")

HELPERS = Path(__file__).parents[1] / "training"
STEPS, BATCH, EVERY = 40, 8, 10
TASKS = [
    *("validate dataset", "pin annotations", "select records", "split and plan"),
    *("measure statistics", "train", "evaluate", "publish model", "report"),
]
SAME_FILES = ("model.safetensors", "metrics.jsonl", "_evaluation.json", "_statistics.json")


class Training:
    """The folder through which a test tells the recording trainer what to do, and hears it."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder, self.dataset, self.out = folder, dataset, folder / "out"
        self.forget()

    def spec(self, **changes: Any) -> TrainSpec:
        fields = {
            "dataset": str(self.dataset),
            "output": str(self.out),
            "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
            "target": "label",
            "split": "scene test=0.3",
            "transforms": ["normalize"],
            "batch_size": BATCH,
            "steps": STEPS,
            "trainer": "recording_trainer:RecordingTrainer",
            "trainer_args": {"jitter": 0.01},
            "checkpoint_steps": 2,
            "evaluate_steps": EVERY,
            "execution": {"retry_delay_s": 0.2},
        }
        return checked(TrainSpec, fields | changes)

    def act(self, *actions: dict[str, Any], step_s: float = 0.0) -> None:
        (self.folder / "actions.json").write_text(json.dumps(actions))
        (self.folder / "step_s").write_text(str(step_s))

    def log(self) -> list[dict[str, Any]]:
        import recording_trainer  # type: ignore[import-not-found]

        found: list[dict[str, Any]] = recording_trainer.read_log(self.folder)
        return found

    def forget(self) -> None:
        for path in (*self.folder.glob("used-*"), self.folder / "log"):
            path.unlink(missing_ok=True)
        self.act()

    @property
    def pids(self) -> set[int]:
        return {line["pid"] for line in self.log()}

    @property
    def attempts(self) -> list[list[int]]:
        """The steps that each process took."""
        taken: dict[int, list[int]] = {}
        for line in self.log():
            if line["event"] == "step":
                taken.setdefault(line["pid"], []).append(line["step"])
        return list(taken.values())

    def check_same(self, reference: Path) -> None:
        for name in SAME_FILES:
            assert (self.out / name).read_bytes() == (reference / name).read_bytes(), name


@pytest.fixture
def training(
    tmp_path: Path, dataset: Path, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    """After `workers`, which `start` needs and which says where modules are found."""
    monkeypatch.syspath_prepend(str(HELPERS))
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    monkeypatch.setenv("TEST_TRAINING", str(tmp_path))
    found = Training(tmp_path, dataset)
    yield found
    assert not [pid for pid in found.pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """The output of the same run without Prefect, left alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HELPERS))
        patch.setenv("PYTHONPATH", str(HELPERS))
        patch.setenv("TEST_TRAINING", str(folder))
        found = Training(folder, dataset)
        train(found.spec())
    return found.out


def names_of(task_runs: list[dict[str, Any]]) -> list[str]:
    """Prefect adds a few characters to the name of a task that is called."""
    return [re.sub(r"-\w{3}$", "", run["name"]) for run in task_runs]


def table_of(artifact: dict[str, Any]) -> list[dict[str, Any]]:
    data = artifact["data"]
    return json.loads(data) if isinstance(data, str) else data  # type: ignore[no-any-return]


def test_a_run_whose_worker_is_killed_and_what_its_page_shows(
    api: Any, training: Training, undisturbed: Path
) -> None:
    """The task is tried again and goes on; the model is that of a run without Prefect."""
    training.act({"step": 25, "do": "kill"})
    outcome = train_model(training.spec())
    assert not outcome.already_complete
    training.check_same(undisturbed)
    first, second = training.attempts
    assert first == list(range(1, 26))
    assert 1 < second[0] <= 25
    assert second[-1] == STEPS

    run_id = outcome.manifest["run"]["flow_run_id"]
    run = api.flow_run(run_id)
    assert run["state_type"] == "COMPLETED"
    assert run["name"] == outcome.manifest["run"]["flow_run_name"]
    assert run["name"] == (
        f"train recording_trainer:RecordingTrainer on captures.sds to {training.out}"
    )
    task_runs = api.task_runs(run_id, len(TASKS))
    assert names_of(task_runs) == TASKS
    assert {item["state_type"] for item in task_runs} == {"COMPLETED"}
    assert [item["run_count"] for item in task_runs] == [
        2 if name == "train" else 1 for name in TASKS
    ]
    killed = task_runs[TASKS.index("train")]
    states = [state["name"] for state in api.states(killed)]
    assert states == ["Pending", "Running", "AwaitingRetry", "Retrying", "Completed"]

    (progress,) = api.artifacts(run_id, "progress")
    assert progress["key"] == "training-progress"
    assert progress["data"] == 100
    assert progress["description"].startswith(f"{STEPS * BATCH} of {STEPS * BATCH} records")

    (table,) = api.artifacts(run_id, "table")
    assert table["key"] == "training-metrics"
    rows = [json.loads(row) for row in (training.out / "metrics.jsonl").read_text().splitlines()]
    judged = {row["step"]: row for row in rows if row["side"] == "test"}
    assert list(judged) == list(range(EVERY, STEPS + 1, EVERY))
    shown = table_of(table)
    assert {row["step"] for row in shown} == set(judged)
    for row in shown:
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        assert numbers == pytest.approx({n: judged[row["step"]][n] for n in numbers}, rel=1e-3)
        assert row.keys() == judged[row["step"]].keys()

    (report,) = api.artifacts(run_id, "markdown")
    assert report["key"] == "training-report"
    manifest, pin = outcome.manifest, outcome.manifest["pin"]
    for fragment in (
        f"| steps | {STEPS} |",
        f"| test accuracy | {manifest['metrics']['test']['accuracy']:.4g} |",
        f"| test loss | {manifest['metrics']['test']['loss']:.4g} |",
        manifest["run_key"],
        f"{training.out}/report.html",
        pin["fingerprint"][:16],
        pin["annotations"][0]["root_sha256"][:16],
    ):
        assert fragment in report["data"]
    assert len(api.artifacts(run_id)) == 3

    check_a_finished_model_is_left_alone(api, training)
    check_another_spec_is_refused(api, training)


def check_a_finished_model_is_left_alone(api: Any, training: Training) -> None:
    before = {path: path.stat().st_mtime_ns for path in training.out.rglob("*")}
    known = training.pids
    state = train_model(training.spec(), return_state=True)
    assert state.is_completed()
    assert state.result().already_complete
    assert {path: path.stat().st_mtime_ns for path in training.out.rglob("*")} == before
    assert training.pids == known
    run_id = state.state_details.flow_run_id
    (report,) = api.artifacts(run_id)
    assert "Complete already" in report["data"]
    assert names_of(api.task_runs(run_id, 5)) == [*TASKS[:4], "report"]


def check_another_spec_is_refused(api: Any, training: Training) -> None:
    state = train_model(training.spec(batch_size=4), return_state=True)
    assert state.is_failed()
    with pytest.raises(OutputConflictError, match="batch_size"):
        state.result()
    message = api.flow_run(state.state_details.flow_run_id)["state"]["message"]
    assert "batch_size" in message


def test_a_trainer_that_fails_is_not_tried_again(api: Any, training: Training) -> None:
    training.act({"step": 3, "do": "raise"})
    state = train_model(training.spec(), return_state=True)
    assert state.is_failed()
    with pytest.raises(SignalBatchError, match="ZeroDivisionError: no such luck"):
        state.result()
    run = api.flow_run(state.state_details.flow_run_id)
    assert "no such luck" in run["state"]["message"]
    failed = api.task_runs(run["id"], 6)[-1]
    assert (failed["state_type"], failed["run_count"]) == ("FAILED", 1)
    assert not (training.out / "_manifest.json").exists()


def test_a_terminated_run_leaves_no_worker_and_the_next_one_goes_on(
    api: Any,
    training: Training,
    undisturbed: Path,
    start: Callable[..., Any],
    wait_until: Callable[..., Any],
) -> None:
    training.act(step_s=0.2)
    file = training.folder / "spec.json"
    file.write_text(training.spec().model_dump_json())
    process = start("train", "--spec", file)
    checkpoints = training.out / "_checkpoints"
    wait_until(lambda: process.poll() or len(list(checkpoints.glob("*.json"))) > 1, 90)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in training.pids), 5, 0.02)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert api.flow_runs("train-model")[0]["state_type"] == "CRASHED"
    assert not (training.out / "_manifest.json").exists()
    (taken,) = training.attempts
    newest = max(int(path.stem[5:]) for path in checkpoints.glob("*.json"))
    assert 4 <= newest <= taken[-1] < STEPS

    training.forget()
    again = start("train", "--spec", file)
    shown, errors = again.communicate(timeout=120)
    assert (again.returncode, errors) == (0, "")
    (resumed,) = training.attempts
    assert resumed == list(range(newest + 1, STEPS + 1))
    training.check_same(undisturbed)
    page = f"{api.url.removesuffix('/api')}/runs/flow-run/{api.flow_runs('train-model')[0]['id']}"
    assert page in shown
    timing = json.loads((training.out / "model.json").read_text())["timing"]
    assert timing["attempts"] == 2
    assert timing["steps"] == STEPS


@pytest.mark.parametrize("where", ["dataset", "output", "mlflow"])
def test_credentials_in_a_uri_never_reach_the_server(
    api: Any, training: Training, where: str
) -> None:
    before = len(api.flow_runs("train-model"))
    secret = "https://key:hunter2@host/path"
    with pytest.raises(SpecError, match="credentials") as caught:
        training.spec(**{where: secret})
    assert "hunter2" not in str(caught.value)
    fields = training.spec().model_dump(mode="json") | {where: secret}
    with pytest.raises(SpecError) as refused:
        train_model(fields)  # type: ignore[arg-type]
    assert "hunter2" not in str(refused.value)
    assert len(api.flow_runs("train-model")) == before


def test_the_flow_can_be_deployed() -> None:
    made = train_model.to_deployment(
        "test", work_pool_name="tests", entrypoint_type=EntrypointType.MODULE_PATH
    )
    assert made.entrypoint == "flows.train_model.train_model"
    loaded = load_flow_from_entrypoint(made.entrypoint)
    assert loaded.name == "train-model"


def test_the_form_of_a_training_run() -> None:
    schema = parameter_schema(train_model).model_dump()
    assert schema["required"] == ["spec"]
    models = schema["definitions"]
    assert set(models["TrainSpec"]["properties"]) == set(TrainSpec.model_fields)
    assert set(models["TrainExecution"]["properties"]) == set(TrainExecution.model_fields)
    fields = models["TrainSpec"]["properties"]
    assert fields["split"]["type"] == "string"
    assert fields["transforms"]["items"] == {"type": "string"}
    assert fields["lengths"]["enum"] == ["equal", "pad", "crop", "bucket"]
    for model in ("TrainSpec", "TrainExecution"):
        properties = models[model]["properties"]
        assert [n for n, field in properties.items() if not field.get("description")] == []
