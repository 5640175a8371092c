"""The runs whose pages the tests look at: `python runs.py STORY...` in the folder of the data.

Apart from the tests, whose process knows no Prefect; and so that an export of few records can be
cut into as many shards as a large one has.
"""

from __future__ import annotations

import sys
from typing import Any

from flows.export_features import export_features
from flows.train_model import train_model
from flows.validate_dataset import validate_dataset
from signal_batch import plan
from signal_batch.frozen import checked
from signal_batch.specs import ExportSpec
from signal_batch.training_spec import TrainSpec

LABEL = "label=annotation:truth-v1/label:int32"


def export(**changes: Any) -> None:
    fields = {
        "columns": ["field:samples", LABEL],
        "batch_size": 20,
        "part_bytes": 9_000,
        "execution": {"workers": 2},
    }
    export_features(checked(ExportSpec, fields | changes), return_state=True)


def story(name: str) -> None:
    if name == "export":
        snr = ["field:samples", LABEL, "snr=metadata:snr_db:float32"]
        features = {"features": "gated:spectrum", "columns": snr}
        export(dataset="captures.sds", output="spectra", **features)
    elif name == "damaged":
        export(dataset="damaged.sds", output="hurt", features="raw", part_bytes=2_500)
    elif name == "train":
        fields = {"dataset": "captures.sds", "output": "model", "target": "label"}
        fields |= {"split": "scene test=0.2", "trainer": "sklearn", "epochs": 2}
        fields |= {"transforms": ["unit_power", "statistics", "normalize"]}
        train_model(checked(TrainSpec, {"columns": ["field:samples", LABEL], **fields}))
    else:
        validate_dataset("captures.sds", ["truth-v1", "review-v1"])


if __name__ == "__main__":
    plan.SHARD_BYTES, plan.MOST_SHARDS = 1, 8
    for each in sys.argv[1:]:
        story(each)
