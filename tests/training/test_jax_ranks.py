"""The trainer `jax` in several processes that train one model together."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

STEPS = 20
WORLD = 2
PATIENCE_S = 120

#: A rank: trains on its share of each batch, writes what it has, and goes on until it is ended.
RANK = """
import json, sys
from pathlib import Path
import numpy as np
from signal_batch.errors import WorkerDiedError
from signal_batch.trainers.jax import JaxTrainer
from signal_batch.training import ArraySpec, BatchSpec

rank, world, steps = int(sys.argv[1]), int(sys.argv[2]), STEPS
coordinator, out = sys.argv[3] or None, Path(sys.argv[4])
RECORDS, TIME, CLASSES = 8, 48, 3

def batch(number, rank=rank):
    rng = np.random.default_rng(number)
    truth = rng.integers(0, CLASSES, RECORDS).astype(np.int32)
    turns = np.exp(2j * np.pi * (0.1 + 0.1 * truth[:, None]) * np.arange(TIME))
    noise = rng.standard_normal((2, RECORDS, TIME))
    lengths = rng.integers(20, TIME + 1, RECORDS)
    columns = {
        "x": (turns + noise[0] + 1j * noise[1]).astype(np.complex64),
        "x_mask": np.arange(TIME) < lengths[:, None],
        "y": truth,
        "position": number * RECORDS + np.arange(RECORDS),
    }
    return {name: value[rank::world] for name, value in columns.items()}

trainer = JaxTrainer()
arrays = {"x": ArraySpec((TIME,), "complex64"), "y": ArraySpec((), "int32")}
spec = BatchSpec(
    arrays, ("x",), "y", tuple(range(CLASSES)), RECORDS // world, STEPS, 5, rank, world, coordinator
)
trainer.init(spec, {"width": 8, "blocks": 1, "kernel": 5, "dropout": 0.2})
metrics = [dict(trainer.step(batch(number))) for number in range(steps)]
# One rank may evaluate alone: were there anything collective in it, rank 0 would hang.
evaluation = dict(trainer.evaluate([batch(1000, r) for r in range(world)])) if rank == 0 else {}
np.savez(out / f"state-{world}-{rank}.npz", **trainer.state())
written = {"metrics": metrics, "evaluation": evaluation}
(out / f"metrics-{world}-{rank}.json").write_text(json.dumps(written))
print("ready", flush=True)
try:
    while world > 1:
        trainer.step(batch(steps))
except WorkerDiedError as exc:
    print(exc, flush=True)
""".replace("STEPS", str(STEPS))


@dataclass
class Ranks:
    """Processes that have taken their steps and, if there are several, go on with more."""

    folder: Path
    processes: list[subprocess.Popen[str]]

    def log(self, rank: int) -> Path:
        return self.folder / f"log-{len(self.processes)}-{rank}.txt"

    def said(self, rank: int) -> str:
        """The next line of its output, without waiting for ever."""
        stream = self.processes[rank].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], PATIENCE_S)
        assert ready, self.log(rank).read_text()
        return stream.readline().strip()

    def written(self, rank: int) -> dict[str, Any]:
        """`metrics` of each step and `evaluation`, of rank 0 only."""
        path = self.folder / f"metrics-{len(self.processes)}-{rank}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def state(self, rank: int) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"state-{len(self.processes)}-{rank}.npz") as arrays:
            return dict(arrays)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def started(folder: Path, world: int) -> Iterator[Ranks]:
    coordinator = f"127.0.0.1:{free_port()}" if world > 1 else ""
    ranks = Ranks(folder, [])
    with contextlib.ExitStack() as stack:
        for rank in range(world):
            log = stack.enter_context((folder / f"log-{world}-{rank}.txt").open("w"))
            arguments = [str(rank), str(world), coordinator, str(folder)]
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", RANK, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            ranks.processes.append(process)
        yield ranks


@pytest.fixture(scope="module")
def alone_and_together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, Ranks]]:
    """One rank that has done, and two that go on; all at the same time, to take less of it."""
    folder = tmp_path_factory.mktemp("ranks")
    with started(folder, WORLD) as together, started(folder, 1) as alone:
        for ranks in (alone, together):
            for rank in range(len(ranks.processes)):
                assert ranks.said(rank) == "ready", ranks.log(rank).read_text()
        yield alone, together


def test_two_ranks_learn_what_one_learns(alone_and_together: tuple[Ranks, Ranks]) -> None:
    """Up to the order of additions: losses to 1e-4 and parameters to 1e-3 of their size."""
    alone, together = alone_and_together
    expected = alone.written(0)
    assert len(expected["metrics"]) == STEPS
    for rank in range(WORLD):
        for actual, wanted in zip(
            together.written(rank)["metrics"], expected["metrics"], strict=True
        ):
            assert actual == pytest.approx(wanted, rel=1e-4)
    assert together.written(0)["metrics"] == together.written(1)["metrics"]
    assert together.written(0)["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-3)
    for name, value in alone.state(0).items():
        difference = np.abs(together.state(0)[name] - value)
        assert difference.max() <= 1e-3 * np.abs(value).max(), name


def test_all_ranks_have_the_same_state(alone_and_together: tuple[Ranks, Ranks]) -> None:
    states = [alone_and_together[1].state(rank) for rank in range(WORLD)]
    assert set(states[0]) == set(states[1])
    for name, value in states[0].items():
        assert states[1][name].tobytes() == value.tobytes(), name


def test_ranks_are_silent(alone_and_together: tuple[Ranks, Ranks]) -> None:
    for ranks in alone_and_together:
        assert [ranks.log(rank).read_text() for rank in range(len(ranks.processes))] == [""] * len(
            ranks.processes
        )


def test_a_rank_that_loses_another_says_so_and_can_be_ended(
    alone_and_together: tuple[Ranks, Ranks],
) -> None:
    """Last in this file.

    At its end the process waits for the other one until JAX misses its heartbeats: 100 seconds.
    Had it been rank 0 that died, with the service through which ranks meet, JAX would end the
    other's process at once (SIGABRT).
    """
    _, together = alone_and_together
    together.processes[1].send_signal(signal.SIGKILL)
    assert together.said(0).startswith("rank 0 of 2 could not finish a step with the others: ")
    together.processes[0].terminate()
    assert together.processes[0].wait(timeout=10) == -signal.SIGTERM
