"""The command line: export and train, validate, verify, inspect, synth and demo.

`python -m signal_batch` runs jobs in plain worker processes. The installed `signal-batch` command
is the same program with jobs run as Prefect flows; it hands its runners to `main`.
Exit codes: 0 done, 1 the job failed, 2 bad input. A person sees one line, never a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from signal_batch import backfill_cli, job, planning, report, training_cli
from signal_batch.attached import tell
from signal_batch.backfill import tell_outcome
from signal_batch.cli_options import Runners, add_scheduled, as_scheduled, command, fields_from
from signal_batch.demo import demo_spec, demo_training
from signal_batch.errors import InputError, SignalBatchError
from signal_batch.execution import Execution
from signal_batch.features import resolve_feature
from signal_batch.frozen import checked
from signal_batch.pins import Pin, write_pin
from signal_batch.recordings import write_japanese_vowels
from signal_batch.runner import export
from signal_batch.specs import ExportSpec
from signal_batch.status import read_status
from signal_batch.status_report import show_status
from signal_batch.store import OutputStore
from signal_batch.synth import parse_shape, synthesize
from signal_batch.training_runner import train
from signal_batch.validation import validate
from signal_batch.verification import verify

_EXPORT_EXAMPLES = """\
examples:
  # power spectra with labels, two workers
  signal-batch export captures.sds spectra --column field:samples \\
      --column label=annotation:truth-v1/label:int32 --features power_spectrum

  # only good captures, on S3, eight workers
  signal-batch export s3://lab/captures s3://lab/features --column field:samples \\
      --where 'metadata:snr_db >= 5' --where 'annotation:review-v1 status success' \\
      --features statistics --workers 8

  # your own feature function
  signal-batch export captures.sds out --column field:samples \\
      --features my_features:envelope --feature-arg window=64

  # what would happen
  signal-batch export captures.sds out --column field:samples --dry-run

A column is [NAME=]SELECTOR[:DTYPE][?DEFAULT]; selectors are field:NAME, metadata:KEY,
annotation:SET/KEY, annotation-field:SET/FIELD, id, scene and ordinal.
"""


WITHOUT_PREFECT = Runners(export=export, train=train)


def main(argv: Sequence[str] | None = None, *, runners: Runners = WITHOUT_PREFECT) -> int:
    """Run one command and return its exit code."""
    with contextlib.suppress(OSError):  # a folder that is gone has no feature functions either
        # Behind everything installed: a tasks.py beside the user must not hide ours.
        sys.path.append(str(Path.cwd()))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser(runners).parse_args(argv)
    try:
        return int(arguments.run(arguments, runners))
    except SignalBatchError as exc:
        report.problem(str(exc))
        tell(kind=type(exc).__name__, message=str(exc))
        return exc.exit_code
    except KeyboardInterrupt:
        report.problem("stopped; what is finished stays, the same command goes on from there")
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output went away
        return 1
    except Exception as exc:
        if os.environ.get("SIGNAL_BATCH_DEBUG"):
            raise
        report.problem(f"unexpected {type(exc).__name__}: {exc} (SIGNAL_BATCH_DEBUG=1 shows where)")
        return 1


def spec_from(arguments: argparse.Namespace) -> ExportSpec:
    """The export spec from `--spec` and the options given, options winning."""
    fields = fields_from(
        arguments, options=_SPEC_OPTIONS, execution=_EXECUTION_OPTIONS, pairs=("feature_args",)
    )
    return checked(ExportSpec, fields)


# --- commands ------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace, runners: Runners) -> int:
    spec = as_scheduled(spec_from(arguments), arguments)
    resolve_feature(spec.features, spec.feature_args)
    with runners.storage(spec.execution.credentials):
        pin = planning.pin_inputs(spec)
        if arguments.write_pin:
            write_pin(pin, arguments.write_pin)
        if arguments.dry_run:
            report.show_dry_run(_peeked(spec, pin))
            return 0
        _run(spec, pin, runners)
    return 0


def _peeked(spec: ExportSpec, pin: Pin) -> job.ExportJob:
    return job.peek(planning.plan(spec, pin, planning.select(spec, pin)))


def _run(spec: ExportSpec, pin: Pin, runners: Runners) -> None:
    # Whether there is anything to do is known before a server is started for it.
    if OutputStore(spec.output).read_manifest() is not None:
        standing = job.progress_of(_peeked(spec, pin)).manifest
        if standing is not None:
            _show(spec, job.Outcome(standing, already_complete=True))
            return
    with report.progress_bar() as on_progress:
        outcome = runners.export(spec, on_progress=on_progress)
    _show(spec, outcome)


def _show(spec: ExportSpec, outcome: job.Outcome) -> None:
    report.show_outcome(spec.output, outcome)
    tell_outcome(outcome)


def _job_of(argv: Sequence[str], runners: Runners) -> tuple[argparse.Namespace, backfill_cli.Spec]:
    """The arguments of an export or a training run, and the spec that they ask for."""
    arguments = _parser(runners).parse_args(argv)
    if argv[0] == "train":
        return arguments, training_cli.train_spec_from(arguments)
    return arguments, spec_from(arguments)


def _validate(arguments: argparse.Namespace, runners: Runners) -> int:
    result = validate(
        arguments.dataset, arguments.annotations, deep=arguments.deep, expect=arguments.expect
    )
    if arguments.write_pin and result.ok:
        write_pin(result.pin, arguments.write_pin)
    if arguments.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        report.show_validation(result)
    return 0 if result.ok else 1


def _verify(arguments: argparse.Namespace, runners: Runners) -> int:
    result = verify(arguments.output)
    report.show_verification(result)
    return 0 if result.ok else 1


def _status(arguments: argparse.Namespace, runners: Runners) -> int:
    found = read_status(arguments.output)
    show_status(found, as_json=arguments.json)
    return found.exit_code


def _inspect(arguments: argparse.Namespace, runners: Runners) -> int:
    if not report.show_output(arguments.path):
        sets = arguments.annotations or None
        first = validate(arguments.path, sets or (), check_objects=False)
        if sets is None and first.known_annotations:
            first = validate(arguments.path, first.known_annotations, check_objects=False)
        report.show_validation(first, judge=False)
    return 0


def _synth(arguments: argparse.Namespace, runners: Runners) -> int:
    shape = parse_shape(arguments.shape)
    with report.progress_bar(total=arguments.records) as on_progress:
        dataset = synthesize(
            arguments.dataset,
            records=arguments.records,
            shape=shape,
            seed=arguments.seed,
            records_per_shard=arguments.records_per_shard,
            progress=_steps_of(on_progress),
        )
    sets = ", ".join(sorted(dataset.annotations))
    print(f"{arguments.dataset}: {len(dataset)} captures of {shape[0]}x{shape[1]}, sets {sets}")
    return 0


def _steps_of(on_progress: Callable[[int], None]) -> Callable[[int], None]:
    """From a running total to the steps that a progress bar takes."""
    seen = 0

    def report_total(total: int) -> None:
        nonlocal seen
        on_progress(total - seen)
        seen = total

    return report_total


def _demo(arguments: argparse.Namespace, runners: Runners) -> int:
    folder = Path(arguments.folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder for the demo")
    dataset, output = folder / "japanese_vowels.sds", folder / "features"
    write_japanese_vowels(str(dataset))
    print(f"1. 640 recorded utterances of 9 speakers: {dataset}")
    print("2. exporting their features in two workers ...", flush=True)
    with runners.session():
        spec = demo_spec(str(dataset), str(output))
        _run(spec, planning.pin_inputs(spec), runners)
        if find_spec("sklearn") is None:
            print("3. no model is trained: that needs pip install 'signal-batch[sklearn]'")
        else:
            print("3. training a model that tells the speakers apart ...", flush=True)
            model = demo_training(str(dataset), str(folder / "model"))
            training_cli.run_training(model, runners)
    print(report.reading_hint(output))
    return 0


# --- arguments -----------------------------------------------------------------------------


_EXECUTION_OPTIONS = tuple(set(Execution.model_fields) - {"retry_delay_s"})
_SPEC_OPTIONS = (set(ExportSpec.model_fields) | set(_EXECUTION_OPTIONS)) - {"execution"}


def _parser(runners: Runners) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="signal-batch",
        description="Batch pipelines over immutable signal datasets.",
        epilog="exit codes: 0 done, 1 the job failed, 2 bad input",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_export(commands)
    training_cli.add_commands(commands)
    _add_validate(commands)
    verifying = command(commands, "verify", _verify, "check a complete output against itself")
    verifying.add_argument("output", metavar="OUT", help="output folder of an export")
    telling = command(commands, "status", _status, "show how far an export or a training run is")
    telling.add_argument("output", metavar="OUT", help="output folder, complete or not")
    telling.add_argument("--json", action="store_true", help="print everything as JSON")
    inspecting = command(commands, "inspect", _inspect, "show what a dataset or an output holds")
    inspecting.add_argument("path", metavar="DATASET|OUT")
    _add_annotations(inspecting)
    _add_synth(commands)
    demo = command(commands, "demo", _demo, "export and train on real recordings in DIR")
    demo.add_argument("folder", metavar="DIR")
    backfill_cli.add_commands(commands, lambda argv: _job_of(argv, runners))
    runners.add_commands(commands)
    return parser


def _add_export(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        _export,
        "export features of a dataset to Parquet",
        epilog=_EXPORT_EXAMPLES,
    )
    add = parser.add_argument
    unset = argparse.SUPPRESS
    add("dataset", metavar="DATASET", nargs="?", default=unset, help="path, s3:// or gs://")
    add("output", metavar="OUT", nargs="?", default=unset, help="output folder or fsspec URI")
    add(
        "--column",
        dest="columns",
        action="append",
        default=unset,
        metavar="COLUMN",
        help="what to read; give it once a column",
    )
    add(
        "--where",
        action="append",
        default=unset,
        metavar="FILTER",
        help="keep records for which it holds, e.g. 'metadata:snr_db >= 5'",
    )
    add(
        "--features",
        default=unset,
        metavar="NAME",
        help="raw (default), power_spectrum, spectrogram, statistics or package.module:function",
    )
    add(
        "--feature-arg",
        dest="feature_args",
        action="append",
        default=unset,
        metavar="KEY=VALUE",
        help="an option of the feature; VALUE is JSON or text",
    )
    add("--workers", type=int, default=unset, metavar="N", help="worker processes (default 2)")
    add(
        "--runner",
        default=unset,
        metavar="RUNNER",
        help="where shards run: local (default), dask[:ADDRESS], ray[:ADDRESS] or "
        "work-pool[:FLOW/DEPLOYMENT]",
    )
    add(
        "--part-size",
        dest="part_bytes",
        default=unset,
        metavar="SIZE",
        help="largest Parquet file, before compression (default 128MB)",
    )
    add(
        "--row-group-size",
        dest="row_group_bytes",
        default=unset,
        metavar="SIZE",
        help="size aimed at for a row group (default 16MB)",
    )
    add(
        "--batch-size",
        type=int,
        default=unset,
        metavar="N",
        help="records handed to a feature at a time (default 256)",
    )
    add(
        "--compression",
        default=unset,
        metavar="NAME",
        help="zstd (default), snappy, lz4, gzip or none",
    )
    add(
        "--tensors",
        default=unset,
        metavar="LAYOUT",
        help="nested (default: nested fixed-size lists) or extension (arrow.fixed_shape_tensor)",
    )
    add(
        "--ragged",
        action="append",
        default=unset,
        metavar="COLUMN",
        help="write this output column as lists even where a sample has equal shapes",
    )
    add(
        "--on-error",
        default=unset,
        metavar="POLICY",
        help="fail (default), skip or quarantine records that cannot be read",
    )
    add(
        "--max-bad",
        dest="max_bad_fraction",
        type=float,
        default=unset,
        metavar="SHARE",
        help="largest share of unreadable records to put up with (default 0.01)",
    )
    add(
        "--retries",
        type=int,
        default=unset,
        metavar="N",
        help="further attempts of a shard (default 3)",
    )
    add(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=unset,
        metavar="SECONDS",
        help="kill a worker that is silent for this long (default 900)",
    )
    add(
        "--safe-decode",
        dest="safe_decode",
        action="store_true",
        default=unset,
        help="decode records with signal-dataset's own decoder: slower, the reference",
    )
    add(
        "--credentials",
        default=unset,
        metavar="BLOCK",
        help="Prefect Secret block with the storage's environment variables",
    )
    add(
        "--limit",
        dest="limits",
        action="append",
        default=unset,
        metavar="TAG",
        help="further tag of the shards' tasks, for a concurrency limit on the Prefect server",
    )
    add("--pin", default=unset, metavar="FILE", help="read exactly what this pin names")
    add_scheduled(parser)
    add("--write-pin", metavar="FILE", help="write the pin of this run, to reproduce it later")
    add("--spec", metavar="FILE", help="YAML or JSON file with the fields of the export spec")
    add("--dry-run", action="store_true", help="show run key, parts and sizes; write nothing")


def _add_validate(commands: Any) -> None:
    parser = command(commands, "validate", _validate, "check a dataset and pin it")
    parser.add_argument("dataset", metavar="DATASET")
    _add_annotations(parser)
    parser.add_argument("--deep", action="store_true", help="decode every record")
    parser.add_argument("--expect", metavar="FINGERPRINT", help="fail unless it is this one")
    parser.add_argument("--write-pin", metavar="FILE", help="write the pin to a file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_annotations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--annotations",
        nargs="+",
        default=[],
        metavar="SET",
        help="annotation sets to pin and count",
    )


def _add_synth(commands: Any) -> None:
    parser = command(commands, "synth", _synth, "write a dataset of synthetic IQ captures")
    parser.add_argument("dataset", metavar="DATASET")
    parser.add_argument("--records", type=int, required=True, metavar="N")
    parser.add_argument(
        "--shape",
        default="1x1024",
        metavar="CxT",
        help="channels x samples (default 1x1024: 8 KB a record)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--records-per-shard", type=int, metavar="N")
