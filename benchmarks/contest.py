"""The contenders of a size, measured in turn: A B C A B C ..."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks import measure
from benchmarks.exports import NEEDS
from benchmarks.exports import SLOW as SLOW_EXPORTS
from benchmarks.loaders import SLOW as SLOW_LOADERS
from benchmarks.measure import Sample
from benchmarks.settings import Size

Samples = dict[str, list[Sample]]


def in_turn(contenders: Mapping[str, Callable[[], Sample]], rounds: int, title: str) -> Samples:
    """One sample of every contender a round, `rounds` times."""
    samples: Samples = {name: [] for name in contenders}
    for number in range(rounds):
        for name, once in contenders.items():
            _say(f"{title}: round {number + 1} of {rounds}, {name}")
            samples[name].append(once())
    _say("")
    return samples


def _say(text: str) -> None:
    """One line that the next replaces; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def loaders(folder: Path, size: Size, names: tuple[str, ...]) -> dict[str, Callable[[], Sample]]:
    """Shuffled and sequential loading of one dataset."""

    def task(name: str) -> dict[str, Any]:
        # A per-record pipeline is given as much as it takes in about the time of the others.
        records = size.slow if name in SLOW_LOADERS else size.loaded
        dataset = str(folder / size.name)
        return {"kind": "load", "name": name, "dataset": dataset, "records": records}

    return {name: (lambda name=name: measure.run([task(name)])) for name in names}


def exports(
    folder: Path, scratch: Path, size: Size, feature: str, names: tuple[str, ...]
) -> dict[str, Callable[[], Sample]]:
    """Exports of one feature of one dataset; `NAME xN` runs in N processes."""
    contenders: dict[str, Callable[[], Sample]] = {}
    for label in names:
        name, _, count = label.partition(" x")
        if not available(name):
            print(f"{name} is left out: {NEEDS[name]} is not installed")
            continue
        task = export_task(folder, scratch, size, feature, name)
        processes = int(count or 1)
        if name == "signal_batch":
            contenders[label] = lambda task=task, n=processes: signal_batch(task, n)
        else:
            contenders[label] = lambda task=task, n=processes: _in_processes(task, n)
    return contenders


def available(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def export_task(folder: Path, scratch: Path, size: Size, feature: str, name: str) -> dict[str, Any]:
    return {
        "kind": "export",
        "name": name,
        "dataset": str(folder / size.name),
        "scratch": str(scratch),
        "feature": feature,
        "feature_args": size.feature_args(feature),
        "shape": size.shape,
        "record_bytes": size.record_bytes,
        "records": size.slow if name in SLOW_EXPORTS else size.records,
    }


def _in_processes(task: dict[str, Any], processes: int) -> Sample:
    """Each process exports a run of neighbouring records of its own."""
    bounds = [task["records"] * i // processes for i in range(processes + 1)]
    with scratch_folder(task) as scratch:
        ranges = itertools.pairwise(bounds)
        shared = task | {"scratch": str(scratch)}
        return measure.run([shared | {"first": first, "stop": stop} for first, stop in ranges])


def signal_batch(task: dict[str, Any], workers: int) -> Sample:
    """Steady state from the workers of a planned job, the whole from the command."""
    with scratch_folder(task) as scratch:
        sample = work(task, workers, scratch, warm=True)
        whole = measure.command(export_command(task, workers, scratch / "whole"))
    return replace(sample, whole_s=whole)


def work(task: dict[str, Any], workers: int, scratch: Path, *, warm: bool) -> Sample:
    """Plan an export, run its work orders in `workers` processes, commit."""
    from signal_batch import job
    from signal_batch.execution import Execution
    from signal_batch.planning import prepare
    from signal_batch.specs import ExportSpec

    spec = ExportSpec(
        dataset=task["dataset"],
        output=str(scratch / "out"),
        columns=("field:samples",),
        features=task["feature"],
        feature_args=task["feature_args"],
        execution=Execution(workers=workers),
    )
    planned = job.claim(prepare(spec))
    shards = job.progress_of(planned).shards
    warm = warm and all(len(shard.parts) > 1 for shard in shards)
    tasks = []
    for shard in shards:
        path = scratch / f"order-{shard.number}.json"
        path.write_text(json.dumps(planned.order(shard).to_json()))
        tasks.append({"kind": "work", "order": str(path), "warm": warm})
    sample = measure.run(tasks)
    job.commit(planned)
    return sample


def export_command(task: dict[str, Any], workers: int, output: Path) -> list[str]:
    options = [f"--feature-arg={name}={value}" for name, value in task["feature_args"].items()]
    return [
        *("-m", "signal_batch", "export", task["dataset"], str(output)),
        *("--column", "field:samples", "--features", task["feature"], *options),
        *("--workers", str(workers)),
    ]


@contextmanager
def scratch_folder(task: dict[str, Any]) -> Iterator[Path]:
    """An empty folder that goes away again."""
    scratch = Path(task["scratch"]) / uuid4().hex
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)
