"""`python -m benchmarks`: measure, print the tables, write the JSON."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import (
    checks,
    contest,
    data,
    growth,
    orchestration,
    planning,
    shuffles,
    targets,
    training,
)
from benchmarks.report import Report
from benchmarks.settings import BATCH, MODES, Mode, Size

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    arguments = _parser().parse_args()
    mode = MODES[arguments.mode]
    rounds = arguments.rounds or mode.rounds
    folder = arguments.folder.resolve()
    report = Report(mode.name, rounds)
    chosen = [size for size in mode.sizes if not arguments.size or size.label in arguments.size]
    growing = growth.sizes(mode.growth) if arguments.only in (None, "growth") else []
    read = chosen if arguments.only in (None, "load", "export") else []
    data.datasets(folder, [data.of_size(size) for size in (*read, *growing)])
    scratch = folder.parent / f"{folder.name}-scratch"
    path = arguments.json or RESULTS / f"{mode.name}.json"
    steps: list[Callable[[], None]] = []
    if arguments.only in (None, "load"):
        steps += [partial(_load, report, folder, size, mode, rounds) for size in chosen]
    if arguments.only in (None, "export"):
        steps += [partial(_export, report, folder, scratch, size, mode, rounds) for size in chosen]
    if growing:
        steps.append(partial(_grow, report, folder, scratch, mode, rounds))
    if arguments.only in (None, "plan"):
        steps.append(partial(_plan, report, folder, mode, min(3, rounds)))
    if arguments.only in (None, "shuffle") and mode.shuffle:
        steps.append(partial(_shuffle, report, folder, mode))
    if arguments.only in (None, "train") and mode.training:
        data.datasets(folder, [data.of_size(mode.sizes[0])])
        steps.append(partial(_train, report, folder, scratch, mode))
    if arguments.only in (None, "orchestration") and mode.orchestration:
        steps.append(partial(_orchestrate, report, scratch, mode))
    for step in steps:
        step()
        report.write(path)  # a run that is stopped has what it measured so far
    shutil.rmtree(scratch, ignore_errors=True)
    report.show()
    print(f"every sample is in {path}")
    return 0


def _load(report: Report, folder: Path, size: Size, mode: Mode, rounds: int) -> None:
    title = f"load {size.label}, batches of {BATCH}"
    names = checks.check_loaders(folder, size)
    print(f"{title}: {len(names)} contenders give the same records", flush=True)
    samples = contest.in_turn(contest.loaders(folder, size, mode.loaders), rounds, title)
    report.add(title, samples, size, "guide")
    report.targets += targets.of_loaders(size.label, samples)


def _export(
    report: Report, folder: Path, scratch: Path, size: Size, mode: Mode, rounds: int
) -> None:
    for feature, names in mode.exports.items():
        title = f"export {size.label}, {feature}"
        agreeing = checks.check_exports(folder, scratch, size, feature, names)
        print(f"{title}: the same values from {', '.join(agreeing)}", flush=True)
        contenders = contest.exports(folder, scratch, size, feature, names)
        samples = contest.in_turn(contenders, rounds, title)
        report.add(title, samples, size, next(iter(samples)))
        report.targets += targets.of_exports(size.label, feature, samples)


def _grow(report: Report, folder: Path, scratch: Path, mode: Mode, rounds: int) -> None:
    samples = growth.measured(folder, scratch, mode.growth, rounds)
    report.add("growth: records x workers, 8 KB", samples, None)
    report.targets += targets.of_growth(samples, mode.growth)


def _plan(report: Report, folder: Path, mode: Mode, rounds: int) -> None:
    results = planning.measured(folder, *mode.planning, rounds=rounds)
    report.add_planning(results)
    report.targets += targets.of_planning(results)


def _shuffle(report: Report, folder: Path, mode: Mode) -> None:
    report.add_shuffles(shuffles.measured(folder, *mode.shuffle))


def _train(report: Report, folder: Path, scratch: Path, mode: Mode) -> None:
    results = training.measured(folder, scratch, mode.sizes[0], mode.steps, mode.training)
    report.add_training(results)
    report.targets += targets.of_training(results)


def _orchestrate(report: Report, scratch: Path, mode: Mode) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    results = orchestration.measured(scratch, mode.orchestration)
    report.add_orchestration(results)
    report.targets += targets.of_orchestration(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Speed and memory, side by side in one run."
    )
    add = parser.add_argument
    add(
        "--full",
        dest="mode",
        action="store_const",
        const="full",
        default="small",
        help="larger datasets, all contenders, growth",
    )
    add(
        "--smoke",
        dest="mode",
        action="store_const",
        const="smoke",
        help="one round of a few records: that everything runs, no more",
    )
    add("--rounds", type=int, metavar="N", help="alternating rounds (default 5)")
    add(
        "--folder",
        type=Path,
        default=RESULTS / "data",
        metavar="DIR",
        help="where the datasets are kept (default benchmarks/results/data)",
    )
    add("--json", type=Path, metavar="FILE", help="default benchmarks/results/MODE.json")
    parts = ("load", "export", "growth", "plan", "shuffle", "train", "orchestration")
    add("--only", choices=parts, help="one part alone")
    add("--size", action="append", metavar="LABEL", help="a record size alone, e.g. '64 KB'")
    return parser


if __name__ == "__main__":
    sys.exit(main())
