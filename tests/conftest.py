"""Datasets for the tests. What is shared within a session is read-only: change a copy of it."""

from __future__ import annotations

import os

# Before anything imports Prefect, which takes its settings from the environment once.
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
# As in the installed command: importing JAX takes a process a second.
os.environ["SIGNAL_BATCH_PLAIN_GRAIN"] = "1"

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch.recordings import write_japanese_vowels
from signal_batch.synth import synthesize

_NOBODY = 65534
IQ_RECORDS = 200
IQ_SHAPE = (2, 64)
IQ_SEED = 7


@pytest.fixture(scope="session")
def iq_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 captures of 2x64 in five shards, with `truth-v1` and `review-v1`; not to be changed."""
    root = tmp_path_factory.mktemp("session") / "iq"
    synthesize(str(root), records=IQ_RECORDS, shape=IQ_SHAPE, seed=IQ_SEED, records_per_shard=40)
    return root


@pytest.fixture(scope="session")
def vowels_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged recordings, with `speakers-v1`, shards uncompressed; not to be changed."""
    root = tmp_path_factory.mktemp("session") / "vowels"
    write_japanese_vowels(str(root))
    return root


@pytest.fixture
def iq_copy(iq_root: Path, tmp_path: Path) -> Path:
    """A copy of `iq_root` that a test may damage."""
    return Path(shutil.copytree(iq_root, tmp_path / "iq-copy"))


@pytest.fixture
def vowels_copy(vowels_root: Path, tmp_path: Path) -> Path:
    """A copy of `vowels_root` that a test may damage."""
    return Path(shutil.copytree(vowels_root, tmp_path / "vowels-copy"))


@pytest.fixture(scope="session")
def make_record() -> Callable[..., sds.Record]:
    """`make_record(i, **changes)`: record `i`, a pure function of its arguments.

    Field `samples` is float32 (2, 4) and holds 8 i to 8 i + 7; metadata are `index`, `snr_db`
    (i / 2), `split` (every third record is "test") and `radio.gain` (10 i).
    """

    def make(index: int, **changes: Any) -> sds.Record:
        samples = np.arange(8 * index, 8 * index + 8, dtype=np.float32).reshape(2, 4)
        axes = (sds.Axis("channel", 2), sds.Axis("time", 4))
        values: dict[str, Any] = {
            "id": f"r{index:04d}",
            "fields": {"samples": sds.Field(samples, axes)},
            "metadata": {
                "index": index,
                "snr_db": index / 2,
                "split": "test" if index % 3 == 0 else "train",
                "radio": {"gain": 10 * index},
            },
        }
        return sds.Record(**values | changes)

    return make


@pytest.fixture(scope="session")
def write_dataset(make_record: Callable[..., sds.Record]) -> Callable[..., Path]:
    """`write_dataset(root, records=20, ...)`: write a small dataset and return its root.

    `records` are `sds.Record`s, or how many of `make_record` to write. `annotations` maps the
    name of a set to its rows, `(status, values)` for each record; `options` are the storage
    options of the shards. A `snapshot_id` and `per_shard` of one's own make another snapshot.
    """

    def write(
        root: Path | str,
        records: int | Sequence[sds.Record] = 20,
        *,
        per_shard: int = 5,
        dataset_id: str = "small",
        snapshot_id: str = "s1",
        annotations: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] | None = None,
        options: sds.StorageOptions | None = None,
        publication: sds.PublicationOptions | None = None,
    ) -> Path:
        rows = list(map(make_record, range(records))) if isinstance(records, int) else records
        shards = [
            sds.write_shard(
                rows[first : first + per_shard], str(root), work_id=f"{first:06d}", options=options
            )
            for first in range(0, len(rows), per_shard)
        ]
        dataset = sds.publish(
            str(root),
            shards,
            dataset_id=dataset_id,
            snapshot_id=snapshot_id,
            storage_options=options,
            publication_options=publication,
        )
        for name, labels in (annotations or {}).items():
            sds.publish_annotations(
                dataset,
                name,
                [
                    sds.AnnotationRecord(row.id, i, sds.AnnotationStatus(status), values)
                    for i, (row, (status, values)) in enumerate(zip(rows, labels, strict=True))
                ],
            )
        return Path(root)

    return write


@pytest.fixture
def unprivileged(tmp_path: Path) -> Callable[[], AbstractContextManager[None]]:
    """`with unprivileged():` permissions bind, also where the tests run as root.

    Everything in the test's folder belongs to the other user by then.
    """

    @contextmanager
    def act() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        for parent in tmp_path.parents:
            if parent.is_relative_to(tempfile.gettempdir()):
                parent.chmod(parent.stat().st_mode | 0o011)
        for path in (tmp_path, *tmp_path.rglob("*")):
            os.chown(path, _NOBODY, _NOBODY)
        os.seteuid(_NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return act


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """In CI every part that a test needs is there, so a test that skips is one that failed."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though CI has every part: {report.longrepr}"
    return report
