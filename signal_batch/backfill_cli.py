"""The command `backfill`: one export or training run for each of a range of moments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import datetime

from signal_batch import report
from signal_batch.backfill import Result, Run, look, moments, plan_runs, run_all
from signal_batch.cli_options import Runners, command
from signal_batch.errors import SpecError
from signal_batch.scheduling import MOVING, is_moving, parse_every, parse_moment
from signal_batch.specs import ExportSpec
from signal_batch.training_spec import TrainSpec

_EXAMPLES = """\
examples:
  # a week of exports, two days at a time
  signal-batch backfill --from 2026-03-01 --to 2026-03-07 --parallel 2 \\
      export 's3://lab/captures-{scheduled:%Y-%m-%d}.sds' 's3://lab/spectra-{scheduled:%Y-%m-%d}' \\
      --column field:samples --features power_spectrum

  # what a file describes, for every Monday of a quarter; what would happen
  signal-batch backfill --from 2026-01-05 --to 2026-03-30 --every 1w --dry-run \\
      train --spec nightly.yaml

What is complete is left alone, so the same command again does what is missing. The options of
backfill come before `export` or `train`, those of the job after it. Exit code 1 if any run failed.
"""

Spec = ExportSpec | TrainSpec
JobOf = Callable[[Sequence[str]], tuple[argparse.Namespace, Spec]]
_OWN_OPTIONS = ("scheduled", "dry_run", "write_pin")
_LONGEST_ERROR = 300


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], job_of: JobOf
) -> None:
    """Add the command; `job_of` reads the arguments of an export or a training run."""
    parser = command(
        commands,
        "backfill",
        lambda arguments, runners: _backfill(arguments, runners, job_of),
        "run a job for each of a range of dates",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("--from", dest="first", required=True, metavar="TIME", help="first date or time, UTC")
    add("--to", dest="last", required=True, metavar="TIME", help="last date or time, included")
    add("--every", default="1d", metavar="STEP", help="90m, 6h, 1d (default) or 2w")
    add("--parallel", type=int, default=2, metavar="N", help="runs at a time (default 2)")
    add(
        "--skip-missing",
        action="store_true",
        help="a moment without a dataset does not count as a failure",
    )
    add("--dry-run", action="store_true", help="show what would be run; write nothing")
    add("job", choices=("export", "train"), help="what to run")
    add("options", nargs=argparse.REMAINDER, metavar="...", help="its own arguments and options")


def _backfill(arguments: argparse.Namespace, runners: Runners, job_of: JobOf) -> int:
    if not 1 <= arguments.parallel <= 256:
        raise SpecError(f"--parallel is {arguments.parallel}; it takes 1 to 256 runs at a time")
    first, last = parse_moment(arguments.first), parse_moment(arguments.last)
    times = moments(first, last, parse_every(arguments.every))
    spec = _spec_of(arguments, job_of)
    planned = plan_runs(spec, times)
    with runners.storage(spec.execution.credentials):
        runs = look(planned)
        if arguments.dry_run:
            _show_plan(runs)
            return 0
        ended = _run(arguments, runners, runs)
    _show(ended, "steps" if arguments.job == "train" else "rows")
    bad = {Result.FAILED, Result.STOPPED}
    bad |= set() if arguments.skip_missing else {Result.NO_DATASET}
    return 1 if any(run.result in bad for run in ended) else 0


def _spec_of(arguments: argparse.Namespace, job_of: JobOf) -> Spec:
    given, spec = job_of([arguments.job, *arguments.options])
    if twice := [name for name in _OWN_OPTIONS if getattr(given, name)]:
        flag = f"--{twice[0].replace('_', '-')}"
        where = "give it before the job" if twice[0] == "dry_run" else "each run has its own"
        raise SpecError(f"{flag} is no option of a job that is backfilled; {where}")
    if not any(is_moving(getattr(spec, name) or "") for name in MOVING):
        raise SpecError(
            "nothing in dataset or output depends on the date, so every run would be the same; "
            "write a template such as captures-{scheduled:%Y-%m-%d}.sds"
        )
    return spec


def _run(arguments: argparse.Namespace, runners: Runners, runs: Sequence[Run]) -> list[Run]:
    """Every run with its result."""
    ended = {run.moment: run for run in runs}
    if not any(run.result is Result.PENDING for run in runs):
        return list(ended.values())

    def command_of(run: Run) -> tuple[str, list[str]]:
        scheduled = ["--scheduled", run.moment.isoformat()]
        return runners.module, [arguments.job, *scheduled, *arguments.options]

    def on_result(run: Run) -> None:
        ended[run.moment] = run
        report.note(f"{_date(run.moment)} {run.result}")

    with runners.session():
        run_all(runs, command_of, parallel=arguments.parallel, on_result=on_result)
    return list(ended.values())


def _show_plan(runs: Sequence[Run]) -> None:
    for run in runs:
        print(f"{_date(run.moment)}  {run.result:<12}  {run.spec.dataset} to {run.spec.output}")
    print(_counts(runs))


def _show(runs: Sequence[Run], unit: str) -> None:
    """The table, failures first and the longest ago first among them."""
    order = list(Result)
    rows = [("date", "result", unit, "seconds", "")]
    for run in sorted(runs, key=lambda run: (order.index(run.result), run.moment)):
        error = " ".join(run.error.split())
        rows.append(
            (
                _date(run.moment),
                run.result,
                "-" if run.amount is None else f"{run.amount:,}",
                f"{run.seconds:.1f}" if run.seconds else "-",
                f"{error[:_LONGEST_ERROR]} ..." if len(error) > _LONGEST_ERROR else error,
            )
        )
    date, result, amount, seconds, _ = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    for row in rows:
        line = f"{row[0]:<{date}}  {row[1]:<{result}}  {row[2]:>{amount}}  {row[3]:>{seconds}}  "
        print(f"{line}{row[4]}".rstrip())
    print(_counts(runs))


def _counts(runs: Sequence[Run]) -> str:
    counts = [(result, sum(run.result is result for run in runs)) for result in Result]
    told = ", ".join(f"{result} {count:,}" for result, count in counts if count)
    return f"{len(runs):,} runs: {told}"


def _date(moment: datetime) -> str:
    """The date alone where it says all."""
    is_midnight = (moment.hour, moment.minute, moment.second) == (0, 0, 0)
    return f"{moment:%Y-%m-%d}" if is_midnight else f"{moment:%Y-%m-%dT%H:%M}"
