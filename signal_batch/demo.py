"""The job that `signal-batch demo` runs on the packaged recordings."""

from __future__ import annotations

from signal_batch.specs import ExportSpec, checked


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
