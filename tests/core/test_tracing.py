"""Which records a step saw, against what a trainer wrote down while it was trained."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch.errors import DamagedOutputError, InputError
from signal_batch.frozen import checked
from signal_batch.tracing import Seen, records_of, steps_of
from signal_batch.training_job import TrainJob, claim_training, read_training
from signal_batch.training_planning import prepare_training
from signal_batch.training_run import train_rank
from signal_batch.training_spec import TrainSpec

BATCH = 6

_NOTING = """
import json
import numpy as np

class Noting:
    '''Learns nothing, and writes down what each step is given.'''
    distributed = True

    def init(self, batch_spec, options):
        self.file = options["file"].format(rank=batch_spec.rank)
        self.steps = 0

    def step(self, batch):
        self.steps += 1
        row = {name: batch[name].tolist() for name in ("position", "ordinal", "id")}
        with open(self.file, "a") as stream:
            stream.write(json.dumps({"step": self.steps, **row}) + "\\n")
        return {"loss": 0.0}

    def evaluate(self, batches):
        return {"records": sum(len(batch["ordinal"]) for batch in batches)}

    def state(self):
        return {"steps": np.array(self.steps)}

    def load(self, state):
        self.steps = int(state["steps"])
"""

#: Name of a case: what its run differs in.
CASES: dict[str, dict[str, Any]] = {
    "global": {"epochs": 2},
    "a side": {"epochs": 3, "split": "scene test=0.3 seed=2"},
    "filtered": {"epochs": 2, "where": ["metadata:index >= 9"], "split": "id test=0.2"},
    "in order": {"epochs": 2, "shuffle": "none"},
    "blocks": {"epochs": 2, "shuffle": "block"},
    "buckets": {"epochs": 2, "lengths": "bucket", "buckets": [16, 24, 40]},
    "steps": {"steps": 4},
    "two ranks": {"epochs": 2, "split": "scene test=0.3", "execution": {"ranks": 2}},
}

Row = tuple[int, int, str]
Recorded = tuple[TrainJob, dict[int, list[Row]]]


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    write_dataset: Callable[..., Path],
    make_record: Callable[..., sds.Record],
) -> Path:
    """50 records of 10 to 39 samples."""
    records = []
    for i in range(50):
        length = 10 + 7 * i % 30
        data = np.full((1, length), i, np.float32)
        field = sds.Field(data, (sds.Axis("channel", 1), sds.Axis("time", length)))
        records.append(make_record(i, scene_id=f"s{i // 3}", fields={"samples": field}))
    return write_dataset(tmp_path_factory.mktemp("tracing") / "ds", records, per_shard=8)


@pytest.fixture(scope="module", params=CASES)
def recorded(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    """A run as it was claimed, and for each of its steps the rows that its trainer was given."""
    folder = tmp_path_factory.mktemp("run")
    module = f"noting_{folder.name}"
    (folder / f"{module}.py").write_text(_NOTING)
    fields: dict[str, Any] = {
        "dataset": str(root),
        "output": str(folder / "out"),
        "columns": ["field:samples", "metadata:split"],
        "target": "split",
        "trainer": f"{module}:Noting",
        "trainer_args": {"file": str(folder / "rank-{rank}.jsonl")},
        "batch_size": BATCH,
        "seed": 3,
        "lengths": "pad",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        job = claim_training(prepare_training(checked(TrainSpec, fields | CASES[request.param])))
        for rank in reversed(range(job.spec.execution.ranks)):
            train_rank(job, rank, None, lambda event: None)
            if rank:  # each rank starts from the beginning here
                shutil.rmtree(folder / "out" / "_checkpoints", ignore_errors=True)
    rows: dict[int, list[Row]] = defaultdict(list)
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            rows[line["step"]] += zip(line["position"], line["ordinal"], line["id"], strict=True)
    return read_training(str(folder / "out")), dict(rows)


def test_the_records_of_each_step(recorded: Recorded) -> None:
    job, rows = recorded
    assert sorted(rows) == list(range(1, job.plan.total_steps + 1))
    for step, given in rows.items():
        assert len(given) == BATCH
        found = records_of(job, step)
        assert found == [Seen(*row) for row in sorted(given)]
        assert [row.position for row in found] == list(range((step - 1) * BATCH, step * BATCH))


def test_the_steps_of_each_record(recorded: Recorded) -> None:
    job, rows = recorded
    seen: dict[str, list[int]] = defaultdict(list)
    for step in sorted(rows):
        for _, _, name in rows[step]:
            seen[name].append(step)
    trained = job.sides["train"].ordinals().tolist()
    for ordinal in trained[::9]:
        assert steps_of(job, f"r{ordinal:04d}") == seen[f"r{ordinal:04d}"]
    assert set(seen) <= {f"r{ordinal:04d}" for ordinal in trained}


def test_ids_are_those_of_the_dataset(recorded: Recorded, root: Path) -> None:
    job, _ = recorded
    dataset = sds.open(str(root))
    for row in records_of(job, 1):
        assert dataset[row.ordinal].id == row.id


def test_what_the_run_has_not(recorded: Recorded) -> None:
    job, _ = recorded
    total = job.plan.total_steps
    for step in (-1, 0, total + 1, 10**9):
        with pytest.raises(
            InputError, match=f"step {step} is none of this run, which has steps 1 to {total}"
        ):
            records_of(job, step)
    for name in ("nobody", "", "r9999"):
        with pytest.raises(InputError, match=f"record '{name}' is not among the"):
            steps_of(job, name)
    held_out = [o for o in range(50) if o not in set(job.sides["train"].ordinals().tolist())]
    for ordinal in held_out[:2]:
        with pytest.raises(InputError, match=f"is not among the {len(job.sides['train'])} that"):
            steps_of(job, f"r{ordinal:04d}")


@pytest.mark.parametrize("recorded", ["global"], indirect=True)
def test_neither_checkpoints_nor_the_trainer_are_needed(recorded: Recorded, tmp_path: Path) -> None:
    """The claim alone, copied elsewhere, on a machine without the trainer's module."""
    job, rows = recorded
    for name in ("_spec.json", "_records.safetensors"):
        shutil.copy(Path(job.spec.output) / name, tmp_path / name)
    copy = read_training(str(tmp_path))
    assert records_of(copy, 2) == [Seen(*row) for row in sorted(rows[2])]


@pytest.mark.parametrize("recorded", ["global"], indirect=True)
def test_a_claim_that_cannot_be_read(recorded: Recorded, tmp_path: Path) -> None:
    job, _ = recorded
    claim = json.loads((Path(job.spec.output) / "_spec.json").read_text())
    records = (Path(job.spec.output) / "_records.safetensors").read_bytes()

    def read(document: Any, runs: bytes | None = records) -> None:
        (tmp_path / "_spec.json").write_text(json.dumps(document))
        (tmp_path / "_records.safetensors").unlink(missing_ok=True)
        if runs is not None:
            (tmp_path / "_records.safetensors").write_bytes(runs)
        read_training(str(tmp_path))

    with pytest.raises(InputError, match="is not the output of a training run"):
        read_training(str(tmp_path))
    for document in ({}, {**claim, "format": "signal-batch.export"}):
        with pytest.raises(InputError, match="is not the output of a training run"):
            read(document)
    for name in ("plan", "pin", "spec", "identity", "run_key"):
        for broken in ({k: v for k, v in claim.items() if k != name}, {**claim, name: None}):
            if name == "run_key" and broken.get(name, ...) is None:
                continue  # any text is one
            with pytest.raises(DamagedOutputError, match=r"_spec\.json is not complete"):
                read(broken)
    with pytest.raises(DamagedOutputError, match=r"_records\.safetensors is missing"):
        read(claim, None)
    with pytest.raises(DamagedOutputError, match=r"_records\.safetensors is damaged"):
        read(claim, records[:-9])
    other = {**claim, "identity": {**claim["identity"], "sides": {"train": "0"}}}
    with pytest.raises(DamagedOutputError, match="does not hold the records of this run"):
        read(other)
