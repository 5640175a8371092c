"""The ratios to hold, and whether this run held them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contest import Samples

MEGABYTE = 1 << 20
_LOADING = {"8 KB": 5.0, "64 KB": 3.5, "512 KB": 1.3}
_EXPORT = {"8 KB": 15.0, "64 KB": 5.0}
_OF_LIMIT = 0.8
_WORKER_MB = 400.0
_FLAT = 1.1
_LINEAR = 1.25
_PLANNING_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """A figure beside what it should be; `at_least` or at most.

    `by_cpu` is the same ratio for CPU time a record, which other load disturbs less. It does not
    see two processes at work instead of one.
    """

    what: str
    found: float
    wanted: float
    unit: str
    at_least: bool = True
    by_cpu: float | None = None

    @property
    def reached(self) -> bool:
        return self.found >= self.wanted if self.at_least else self.found <= self.wanted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"reached": self.reached}


def ratio(samples: Samples, one: str, other: str) -> float:
    """Median, over rounds, of the rate of `one` over that of `other` in the same round."""
    pairs = zip(samples[one], samples[other], strict=True)
    return statistics.median(a.rate / b.rate for a, b in pairs)


def cpu_ratio(samples: Samples, one: str, other: str) -> float:
    """Median ratio of records for each CPU second: what `ratio` would be on idle cores."""
    pairs = zip(samples[one], samples[other], strict=True)
    return statistics.median((b.cpu_s / b.rows) / (a.cpu_s / a.rows) for a, b in pairs)


def peak_mb(samples: Samples, name: str) -> float:
    return max(sample.peak_bytes for sample in samples[name]) / MEGABYTE


def of_loaders(label: str, samples: Samples) -> list[Target]:
    if label not in _LOADING:
        return []
    found = ratio(samples, "training_batches", "guide")
    cpu = cpu_ratio(samples, "training_batches", "guide")
    subject = f"load {label}: training_batches / guide"
    return [Target(subject, found, _LOADING[label], "x", by_cpu=cpu)]


def of_exports(label: str, feature: str, samples: Samples) -> list[Target]:
    subject = f"export {label} {feature}"
    found = []
    if label in _EXPORT and {"guide", "signal_batch x2"} <= samples.keys():
        times = ratio(samples, "signal_batch x2", "guide")
        cpu = cpu_ratio(samples, "signal_batch x2", "guide")
        what = f"{subject}: signal_batch x2 / guide"
        found.append(Target(what, times, _EXPORT[label], "x", by_cpu=cpu))
    for count in ("x1", "x2"):
        ours, limit = f"signal_batch {count}", f"limit loop {count}"
        if {ours, limit} <= samples.keys():
            share = ratio(samples, ours, limit)
            cpu = cpu_ratio(samples, ours, limit)
            found.append(Target(f"{subject}: {ours} / {limit}", share, _OF_LIMIT, "x", by_cpu=cpu))
    if "signal_batch x2" in samples:
        most = peak_mb(samples, "signal_batch x2")
        found.append(Target(f"{subject}: worker memory", most, _WORKER_MB, "MB", at_least=False))
    return found


def of_growth(samples: Samples, records: Sequence[int]) -> list[Target]:
    """Memory at most over that at a tenth; time of a further record over that of earlier ones.

    Time is compared by what each further record costs, because starting costs the same at all
    sizes.
    """
    few, middle, most = records[-3:]
    found = []
    for workers in (1, 2):
        names = {count: f"{count} x{workers}" for count in (few, middle, most)}
        seconds = {
            count: statistics.median(sample.seconds for sample in samples[name])
            for count, name in names.items()
        }
        early = (seconds[middle] - seconds[few]) / (middle - few)
        late = (seconds[most] - seconds[middle]) / (most - middle)
        memory = peak_mb(samples, names[most]) / peak_mb(samples, names[middle])
        subject = f"growth x{workers}, {middle:,} to {most:,} records"
        found += [
            Target(f"{subject}: memory", memory, _FLAT, "x", at_least=False),
            Target(f"{subject}: time of a further record", late / early, _LINEAR, "x", False),
        ]
    return found


def of_planning(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    seconds = statistics.median(sum(result["steps"].values()) for result in rounds)
    return [Target("planning", seconds, _PLANNING_S, "s", at_least=False)]


def of_orchestration(results: Sequence[dict[str, Any]]) -> list[Target]:
    """The bounds on what Prefect may add: a run's fixed part, and each shard's."""
    first, last = results[0], results[-1]
    over = [row["local_s"] - row["plain_s"] for row in (first, last)]
    a_shard = (over[1] - over[0]) / (last["shards"] - first["shards"])
    a_run = over[0] - a_shard * first["shards"]
    return [
        Target("orchestration: a shard", 1000 * a_shard, 100, "ms", at_least=False),
        Target("orchestration: a run", a_run, 5, "s", at_least=False),
    ]


def of_training(results: Sequence[dict[str, Any]]) -> list[Target]:
    """What the network trainer must hold to; scikit-learn's steps are too short to be compared."""
    return [
        target
        for result in results
        if result["trainer"] == "jax"
        for target in (
            Target("training: waiting for input", 100 * result["waiting"], 5, "%", at_least=False),
            Target(
                "training: restart to first step",
                result["first_step_again_s"],
                10,
                "s",
                at_least=False,
            ),
        )
    ]
