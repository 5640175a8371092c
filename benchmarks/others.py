"""Exports with general data frameworks, which the extra `bench` installs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.settings import BATCH

Task = dict[str, Any]


class _Spectra:
    """A Ray actor's work: read the records of a batch of ordinals and compute the feature."""

    def __init__(self, task: Task, notes: str) -> None:
        import signal_dataset as sds

        self._dataset = sds.open(task["dataset"])
        self._nperseg = task["feature_args"]["nperseg"]
        self._note = Path(notes) / str(os.getpid())

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np
        from scipy import signal

        from benchmarks.measure import peak_bytes

        records = self._dataset.__getitems__(batch["id"].tolist())
        samples = np.stack([record["samples"].data for record in records])
        _, power = signal.welch(
            samples, nperseg=self._nperseg, detrend=False, return_onesided=False
        )
        self._note.write_text(str(peak_bytes()))
        return {
            "ordinal": batch["id"],
            "id": np.array([record.id for record in records]),
            "power_spectrum": power.astype(np.float32),
        }


@contextmanager
def _ray_data(task: Task) -> Iterator[Any]:
    """Two actors that read whole batches through `__getitems__`; their start is part of it."""
    import ray

    from benchmarks.measure import peak_bytes

    notes = Path(task["scratch"]) / f"peaks-{os.getpid()}"
    notes.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False

    def export(first: int, stop: int, path: Path) -> None:
        ordinals = ray.data.range(stop, override_num_blocks=8)
        if first:
            ordinals = ordinals.filter(lambda row: row["id"] >= first)
        spectra = ordinals.map_batches(
            _Spectra,
            fn_constructor_args=(task, str(notes)),
            batch_size=BATCH,
            num_cpus=0.5,  # leaves the other core to the tasks that write
            compute=ray.data.ActorPoolStrategy(size=1 if stop - first < BATCH * 2 else 2),
        )
        spectra.write_parquet(str(path), compression="zstd")

    try:
        yield export
        peaks = [peak_bytes(), *(int(note.read_text()) for note in notes.iterdir())]
        # The work is done in other processes: this one's CPU time says nothing.
        task["of_others"] = {"peak_bytes": max(peaks), "cpu_s": 0.0}
    finally:
        ray.shutdown()


@contextmanager
def _hugging_face(task: Task) -> Iterator[Any]:
    """`Dataset.from_generator`, which writes its own Arrow cache first, then `to_parquet`.

    The library chooses compression and encodings itself.
    """
    import datasets
    import signal_dataset as sds
    from scipy import signal

    dataset = sds.open(task["dataset"])
    nperseg = task["feature_args"]["nperseg"]
    channels = task["shape"][0]
    features = datasets.Features(
        {
            "ordinal": datasets.Value("int64"),
            "id": datasets.Value("string"),
            "power_spectrum": datasets.Array2D((channels, nperseg), "float32"),
        }
    )
    datasets.disable_progress_bars()

    def export(first: int, stop: int, path: Path) -> None:
        def rows() -> Iterator[dict[str, Any]]:
            for ordinal, record in enumerate(dataset.iter_records()):
                if ordinal >= stop:
                    return
                if ordinal < first:
                    continue
                _, power = signal.welch(
                    record["samples"].data, nperseg=nperseg, detrend=False, return_onesided=False
                )
                yield {
                    "ordinal": ordinal,
                    "id": record.id,
                    "power_spectrum": power.astype("float32"),
                }

        cache = Path(task["scratch"]) / f"cache-{os.getpid()}-{time.monotonic_ns()}"
        made = datasets.Dataset.from_generator(
            rows, features=features, cache_dir=str(cache), fingerprint=cache.name
        )
        made.to_parquet(str(path))

    yield export


EXPORTS = {"Ray Data": _ray_data, "HF datasets": _hugging_face}
