"""The jobs that `signal-batch demo` runs on the packaged recordings."""

from __future__ import annotations

from signal_batch.specs import ExportSpec, checked
from signal_batch.training_spec import TrainSpec


def demo_spec(dataset: str, output: str) -> ExportSpec:
    """Cepstrum statistics of each utterance with its speaker, in several small parts."""
    return checked(
        ExportSpec,
        {
            "dataset": dataset,
            "output": output,
            "columns": [
                "samples=field:samples",
                "label=annotation:speakers-v1/label:int32",
                "split=metadata:split",
                "frames=metadata:frames:int32",
            ],
            "features": "statistics",
            "batch_size": 64,
            "part_bytes": "64KB",
            "execution": {"workers": 2},
        },
    )


def demo_training(dataset: str, output: str) -> TrainSpec:
    """Who speaks: a linear model on statistics of each utterance, with the official split."""
    return checked(
        TrainSpec,
        {
            "dataset": dataset,
            "output": output,
            "columns": ["samples=field:samples", "label=annotation:speakers-v1/label:int32"],
            "target": "label",
            "split": "metadata:split train=train test=test",
            "transforms": ["statistics", "normalize"],
            "trainer": "sklearn",
            "batch_size": 30,
            "epochs": 20,
        },
    )
