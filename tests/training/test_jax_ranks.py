"""The trainer `jax` in several processes that train one model together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

STEPS = 20
WORLD = 2
START_S, END_S = 120, 30

#: A rank: trains on its share of each batch, writes what it has, and goes on until it is ended.
RANK = """
import json, sys
from pathlib import Path
import numpy as np
from signal_batch.trainers.jax import JaxTrainer
from signal_batch.training import ArraySpec, BatchSpec

rank, world, steps = map(int, sys.argv[1:4])
coordinator, out = sys.argv[4] or None, Path(sys.argv[5])
RECORDS, TIME, CLASSES = 8, 48, 3

def batch(number):
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
evaluation = dict(trainer.evaluate([batch(1000)])) if rank == 0 else {}
np.savez(out / f"state-{world}-{rank}.npz", **trainer.state())
written = out / f"metrics-{world}-{rank}.json"
written.with_suffix(".part").write_text(json.dumps([metrics, evaluation]))
written.with_suffix(".part").rename(written)
print("ready", flush=True)
while world > 1:
    trainer.step(batch(steps))
""".replace("STEPS", str(STEPS))


@dataclass
class Ranks:
    """Processes that have taken their steps and, if there are several, go on with more."""

    folder: Path
    processes: list[subprocess.Popen[str]]

    def metrics(self, rank: int) -> list[dict[str, float]]:
        path = self.folder / f"metrics-{len(self.processes)}-{rank}.json"
        found: list[dict[str, float]] = json.loads(path.read_text())[0]
        return found

    def state(self, rank: int) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"state-{len(self.processes)}-{rank}.npz") as arrays:
            return dict(arrays)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def ranks(folder: Path, world: int) -> Iterator[Ranks]:
    coordinator = f"127.0.0.1:{free_port()}" if world > 1 else ""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RANK, str(rank), str(world), str(STEPS)]
            + [coordinator, str(folder)],
            stdout=subprocess.PIPE,
            stderr=(folder / f"log-{world}-{rank}.txt").open("w"),
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield Ranks(folder, processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
