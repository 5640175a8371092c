"""The commands about models: train, evaluate, predict and trace."""

from __future__ import annotations

import argparse
import json
from typing import Any

from signal_batch import planning, report
from signal_batch.backfill import tell_outcome
from signal_batch.cli_options import Runners, add_scheduled, as_scheduled, command, fields_from
from signal_batch.frozen import checked
from signal_batch.models import evaluate, prediction_fields, read_model
from signal_batch.pins import write_pin
from signal_batch.publishing import TrainOutcome
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore
from signal_batch.tracing import records_of, steps_of
from signal_batch.training_job import peek_training, read_training, standing_model
from signal_batch.training_planning import check_trainer, plan_training, prepare_training
from signal_batch.training_spec import SIDES, TrainExecution, TrainSpec

_EXAMPLES = """\
examples:
  # who speaks: features of each utterance, a linear model, the official split
  signal-batch train vowels.sds models/speaker --column field:samples \\
      --column label=annotation:speakers-v1/label:int32 --target label \\
      --split 'metadata:split test=test train=train' \\
      --transform statistics --transform normalize --trainer sklearn --epochs 30

  # modulations, with augmentation, no scene on two sides
  signal-batch train captures.sds models/modulation --column field:samples \\
      --column label=annotation:truth-v1/label:int32 --column metadata:snr_db:float32 \\
      --target label --split 'scene test=0.2' --transform unit_power \\
      --transform 'add_noise snr_db=[5,30]' --trainer jax --epochs 20

  # what would happen
  signal-batch train captures.sds models/modulation --spec train.yaml --dry-run

The same command again goes on from the newest checkpoint, and does nothing on a complete model.
"""

_EXECUTION = tuple(TrainExecution.model_fields)
_OPTIONS = (set(TrainSpec.model_fields) | set(_EXECUTION)) - {"execution"}

#: Flag, field of the spec or of its execution, and what stands for the value.
_FLAGS = (
    ("--column", "columns", "COLUMN"),
    ("--target", "target", "COLUMN"),
    ("--where", "where", "FILTER"),
    ("--split", "split", "SPLIT"),
    ("--transform", "transforms", "STEP"),
    ("--input", "inputs", "COLUMN"),
    ("--lengths", "lengths", "HOW"),
    ("--length", "length", "N"),
    ("--bucket", "buckets", "N"),
    ("--trainer", "trainer", "NAME"),
    ("--trainer-arg", "trainer_args", "KEY=VALUE"),
    ("--batch-size", "batch_size", "N"),
    ("--epochs", "epochs", "N"),
    ("--steps", "steps", "N"),
    ("--seed", "seed", "N"),
    ("--shuffle", "shuffle", "HOW"),
    ("--checkpoint-steps", "checkpoint_steps", "N"),
    ("--checkpoint-seconds", "checkpoint_s", "SECONDS"),
    ("--keep-checkpoints", "keep_checkpoints", "N"),
    ("--evaluate-steps", "evaluate_steps", "N"),
    ("--log-steps", "log_steps", "N"),
    ("--by", "by", "COLUMN"),
    ("--mlflow", "mlflow", "URI"),
    ("--ranks", "ranks", "N"),
    ("--threads", "threads", "N"),
    ("--retries", "retries", "N"),
    ("--stall-timeout", "stall_timeout_s", "SECONDS"),
    ("--safe-decode", "safe_decode", None),
    ("--credentials", "credentials", "BLOCK"),
    ("--limit", "limits", "TAG"),
    ("--pin", "pin", "FILE"),
)
#: Given once for each value.
_REPEATED = ("columns", "where", "transforms", "inputs", "buckets", "trainer_args", "by", "limits")
_TYPES = {"N": int, "SECONDS": float}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """The options of a spec, with the help that its own fields give."""
    fields = {**TrainSpec.model_fields, **TrainExecution.model_fields}
    for flag, name, metavar in _FLAGS:
        default = fields[name].default
        shown = f" (default {default})" if isinstance(default, int | str) and metavar else ""
        settings: dict[str, Any] = {"dest": name, "help": f"{fields[name].description}{shown}"}
        if metavar is None:
            settings["action"] = "store_true"
        else:
            settings |= {"metavar": metavar, "type": _TYPES.get(metavar, str)}
            settings |= {"action": "append"} if name in _REPEATED else {}
        parser.add_argument(flag, default=argparse.SUPPRESS, **settings)


def add_commands(commands: Any) -> None:
    """Add the commands about models to the parser's."""
    train = command(commands, "train", _train, "train a model on a dataset", epilog=_EXAMPLES)
    train.add_argument("dataset", metavar="DATASET", nargs="?", default=argparse.SUPPRESS)
    train.add_argument("output", metavar="OUT", nargs="?", default=argparse.SUPPRESS)
    _add_flags(train)
    add_scheduled(train)
    train.add_argument("--write-pin", metavar="FILE", help="write the pin of this run")
    train.add_argument("--spec", metavar="FILE", help="YAML or JSON file with the spec's fields")
    train.add_argument("--dry-run", action="store_true", help="show the plan; write nothing")
    judging = command(commands, "evaluate", _evaluate, "judge a model on a dataset")
    judging.add_argument("model", metavar="MODEL", help="output folder of a training run")
    judging.add_argument("dataset", metavar="DATASET")
    judging.add_argument("--where", action="append", default=[], metavar="FILTER")
    judging.add_argument(
        "--side", choices=SIDES, help="only what the model's own split puts on this side"
    )
    judging.add_argument("--json", action="store_true", help="print the result as JSON")
    predicting = command(commands, "predict", _predict, "write a model's predictions to Parquet")
    predicting.add_argument("model", metavar="MODEL", help="output folder of a training run")
    predicting.add_argument("dataset", metavar="DATASET")
    predicting.add_argument("output", metavar="OUT")
    predicting.add_argument(
        "--column",
        dest="columns",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a value to write beside the predictions",
    )
    predicting.add_argument("--where", action="append", default=[], metavar="FILTER")
    predicting.add_argument("--workers", type=int, default=2, metavar="N")
    tracing = command(commands, "trace", _trace, "show which records a training step saw")
    tracing.add_argument("output", metavar="OUT", help="output folder of a training run")
    what = tracing.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="K", help="the records of step K, from 1")
    what.add_argument("--record", metavar="ID", help="the steps that see this record")


def train_spec_from(arguments: argparse.Namespace) -> TrainSpec:
    """The training spec from `--spec` and the options given, options winning."""
    fields = fields_from(arguments, options=_OPTIONS, execution=_EXECUTION, pairs=("trainer_args",))
    return checked(TrainSpec, fields)


def run_training(spec: TrainSpec, runners: Runners) -> None:
    """Train, unless the model is complete already, and show what came out."""
    # Whether there is anything to do is known before a server is started for it.
    if OutputStore(spec.output).read_manifest() is not None:
        standing = standing_model(peek_training(prepare_training(spec)))
        if standing is not None:
            _show(spec, TrainOutcome(standing, already_complete=True))
            return
    with report.progress_bar() as on_progress:
        outcome = runners.train(spec, on_progress=on_progress)
    _show(spec, outcome)


def _show(spec: TrainSpec, outcome: TrainOutcome) -> None:
    report.show_model(spec.output, outcome)
    tell_outcome(outcome)


def _train(arguments: argparse.Namespace, runners: Runners) -> int:
    spec = as_scheduled(train_spec_from(arguments), arguments)
    with runners.storage(spec.execution.credentials):
        pin = planning.pin_inputs(spec)
        if arguments.write_pin:
            write_pin(pin, arguments.write_pin)
        job = plan_training(spec, pin, planning.select(spec, pin))
        check_trainer(job)
        if arguments.dry_run:
            report.show_training_plan(peek_training(job))
            return 0
        run_training(spec, runners)
    return 0


def _evaluate(arguments: argparse.Namespace, runners: Runners) -> int:
    result = evaluate(
        arguments.model, arguments.dataset, where=arguments.where, side=arguments.side
    )
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        report.show_evaluation(result)
    return 0


def _predict(arguments: argparse.Namespace, runners: Runners) -> int:
    model = read_model(arguments.model)
    fields = prediction_fields(model, arguments.dataset, arguments.output)
    fields["columns"] += arguments.columns
    fields |= {"where": arguments.where, "execution": {"workers": arguments.workers}}
    with report.progress_bar() as on_progress:
        outcome = runners.export(checked(ExportSpec, fields), on_progress=on_progress)
    report.show_outcome(arguments.output, outcome)
    return 0


def _trace(arguments: argparse.Namespace, runners: Runners) -> int:
    job = read_training(arguments.output)
    if arguments.step is not None:
        for seen in records_of(job, arguments.step):
            print(f"{seen.position}\t{seen.ordinal}\t{seen.id}")
    else:
        for step in steps_of(job, arguments.record):
            print(step)
    return 0
