"""Batch pipelines over immutable signal datasets: read with Grain, train, export to Parquet.

The core, usable from a notebook and free of Prefect; the flows are in `flows`.
"""

from __future__ import annotations

from signal_batch.arrow import to_numpy
from signal_batch.augmentations import transform
from signal_batch.built_ins import feature
from signal_batch.columns import Column
from signal_batch.errors import SignalBatchError
from signal_batch.execution import Execution
from signal_batch.iteration import batches_in_order, iterating, rng_at, training_batches
from signal_batch.models import evaluate, read_model
from signal_batch.pins import Pin, pin_dataset, read_pin, reopen, write_pin
from signal_batch.runner import export
from signal_batch.selection import Selection
from signal_batch.shuffling import BlockShuffle
from signal_batch.source import BatchFetcher, SDSSource
from signal_batch.specs import ExportSpec
from signal_batch.training import BatchSpec, Classifier, Trainer
from signal_batch.training_runner import train
from signal_batch.training_spec import Split, TrainExecution, TrainSpec, Transform
from signal_batch.validation import validate
from signal_batch.verification import verify

__all__ = [
    "BatchFetcher",
    "BatchSpec",
    "BlockShuffle",
    "Classifier",
    "Column",
    "Execution",
    "ExportSpec",
    "Pin",
    "SDSSource",
    "Selection",
    "SignalBatchError",
    "Split",
    "TrainExecution",
    "TrainSpec",
    "Trainer",
    "Transform",
    "batches_in_order",
    "evaluate",
    "export",
    "feature",
    "iterating",
    "pin_dataset",
    "read_model",
    "read_pin",
    "reopen",
    "rng_at",
    "to_numpy",
    "train",
    "training_batches",
    "transform",
    "validate",
    "verify",
    "write_pin",
]
