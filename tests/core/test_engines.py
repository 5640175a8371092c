"""Where worker programs run, and what a run makes of shards that fail."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import signal_dataset as sds

from signal_batch import Execution, ExportSpec, engines, export
from signal_batch.engines import Fallout, LocalEngine, engine_for, receipts_from, run_order
from signal_batch.errors import (
    CorruptDatasetError,
    FeatureError,
    InputError,
    ShardsFailedError,
    SignalBatchError,
    StoppedError,
    WorkerDiedError,
)
from signal_batch.frozen import checked
from signal_batch.job import ExportJob, claim, progress_of
from signal_batch.planning import prepare


def spec_of(root: Path, output: Path, **changes: Any) -> ExportSpec:
    fields = {
        "dataset": str(root),
        "output": str(output),
        "columns": ["field:samples"],
        "features": "statistics",
        "batch_size": 8,
        "part_bytes": 4000,
    }
    return checked(ExportSpec, fields | changes)


@pytest.fixture
def job(iq_root: Path, tmp_path: Path) -> ExportJob:
    return claim(prepare(spec_of(iq_root, tmp_path / "out")))


# --- choosing one --------------------------------------------------------------------------------


def test_the_runner_names_an_engine_and_its_place() -> None:
    assert (Execution().engine, Execution().runner_address) == ("local", None)
    found = Execution(runner="dask:tcp://10.0.0.7:8786")
    assert (found.engine, found.runner_address) == ("dask", "tcp://10.0.0.7:8786")
    assert isinstance(engine_for(Execution()), LocalEngine)


NO_RUNNERS = (
    *("", "Local", "local:here", "spark", "ray: x", "ray:host", "work-pool:one", "work-pool:a/b/c"),
    *("dask:", "dask:foo", "dask:tcp://host", "dask:tcp://user:secret@host:8786"),
)


@pytest.mark.parametrize("runner", NO_RUNNERS)
def test_anything_else_is_no_runner(runner: str, iq_root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"execution\.runner: that is no runner; it is local, dask"
    ) as told:
        spec_of(iq_root, tmp_path / "out", execution={"runner": runner})
    assert "secret" not in str(told.value)


def test_a_work_pool_needs_a_server(iq_root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a Prefect server"):
        export(spec_of(iq_root, tmp_path / "out", execution={"runner": "work-pool"}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_missing_package_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = builtins.__import__

    def without(module: str, *arguments: Any, **options: Any) -> Any:
        if module.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return load(module, *arguments, **options)

    monkeypatch.delitem(sys.modules, f"signal_batch.{name}_engine", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=rf"pip install 'signal-batch\[{name}\]'"):
        engine_for(Execution(runner=name))


def test_a_dask_scheduler_that_does_not_answer(
    iq_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dask_engine = pytest.importorskip("signal_batch.dask_engine", reason="no distributed")
    monkeypatch.setattr(dask_engine, "CONNECT_S", 1)
    execution = {"runner": "dask:tcp://127.0.0.1:9"}
    with pytest.raises(InputError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        export(spec_of(iq_root, tmp_path / "out", execution=execution))
    assert not (tmp_path / "out").exists()


# --- what crosses --------------------------------------------------------------------------------


def test_an_order_is_run_anywhere_and_answers_in_json(
    job: ExportJob, iq_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(iq_root.parent)
    relative = claim(prepare(spec_of(Path(iq_root.name), tmp_path / "other")))
    order = relative.order(progress_of(relative).shards[0]).to_json()
    monkeypatch.chdir(tmp_path)
    answer = run_order(order, "anywhere")
    receipts = receipts_from(answer)
    assert [receipt.part for receipt in receipts] == [part["index"] for part in order["parts"]]
    assert answer == {"receipts": [receipt.to_dict() for receipt in receipts]}


def test_an_error_crosses_as_itself(job: ExportJob) -> None:
    order = job.order(progress_of(job).shards[0]).to_json()
    order["pin"]["fingerprint"] = "0" * 64
    with pytest.raises(SignalBatchError) as caught:
        receipts_from(run_order(order, "mismatch"))
    assert type(caught.value).__name__ == "PinMismatchError"


def test_an_order_that_is_taken_back_ends(job: ExportJob) -> None:
    abort = threading.Event()
    abort.set()
    order = job.order(progress_of(job).shards[0]).to_json()
    with pytest.raises(StoppedError):
        receipts_from(run_order(order, "aborted", abort))


# --- progress from the ledger --------------------------------------------------------------------


def test_progress_is_read_from_the_ledger(job: ExportJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "FOLLOW_EVERY_S", 0.05)
    engine = LocalEngine()
    monkeypatch.setattr(LocalEngine, "reports_rows", False)
    counted: list[int] = []
    progress = progress_of(job)
    with engine, engines.following(engine, job, progress.done_rows, counted.append):
        for shard in progress.shards:
            engine.run(job.order(shard), lambda rows: None)
    assert sum(counted) == len(job.selection) == 200
    assert progress_of(job).done_rows == 200


# --- shards that fail ----------------------------------------------------------------------------


def test_one_failure_is_raised_as_it_is_once_the_others_are_done() -> None:
    fallout = Fallout()
    fallout.check()
    failure = CorruptDatasetError("record 7 is damaged", ordinal=7)
    fallout.add("shard 1 of 3", failure)
    with pytest.raises(CorruptDatasetError) as caught:
        fallout.check()
    assert caught.value is failure


def test_several_failures_are_told_together() -> None:
    fallout = Fallout()
    fallout.add("shard 1 of 9, ordinals 0-9", CorruptDatasetError("record 7 is damaged"))
    fallout.add("shard 4 of 9, ordinals 30-39", WorkerDiedError("it was killed"))
    with pytest.raises(ShardsFailedError) as caught:
        fallout.check()
    for words in ("2 shards", "ordinals 0-9: record 7 is damaged", "ordinals 30-39: it was killed"):
        assert words in str(caught.value)
    assert not caught.value.transient


def test_what_concerns_every_shard_ends_the_run() -> None:
    failure = FeatureError("no such luck")
    with pytest.raises(FeatureError) as caught:
        Fallout().add("shard 1 of 3", failure)
    assert caught.value is failure


def test_too_many_failures_end_the_run() -> None:
    fallout = Fallout()
    for number in range(engines.MOST_FAILED):
        fallout.add(f"shard {number}", CorruptDatasetError("damaged"))
    with pytest.raises(ShardsFailedError, match=f"{engines.MOST_FAILED + 1} shards"):
        fallout.add("one more", CorruptDatasetError("damaged"))


@dataclass
class Damaged:
    """A dataset with two records that cannot be decoded, and the ordinals of those."""

    root: Path
    bad: list[int] = field(default_factory=lambda: [47, 102])  # none of those that planning reads


@pytest.fixture
def damaged(write_dataset: Callable[..., Path], tmp_path: Path) -> Damaged:
    found = Damaged(tmp_path / "damaged.sds")
    uncompressed = sds.StorageOptions(writer_options="group_size:1,uncompressed")
    write_dataset(found.root, 200, per_shard=40, options=uncompressed)
    dataset = sds.open(str(found.root))
    for ordinal in found.bad:
        samples = dataset[ordinal]["samples"].data.tobytes()
        entry, _ = dataset._index.locate(ordinal)
        path = found.root / entry.data.path
        data = bytearray(path.read_bytes())
        data[data.index(samples)] ^= 4
        path.write_bytes(data)
    return found


def test_damaged_shards_leave_the_others_alone(
    damaged: Damaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal_batch.plan.SHARD_BYTES", 1)
    monkeypatch.setattr("signal_batch.plan.MOST_SHARDS", 5)
    spec = spec_of(damaged.root, tmp_path / "out", batch_size=4, part_bytes=300)
    with pytest.raises(ShardsFailedError) as caught:
        export(spec)
    for ordinal in damaged.bad:
        assert f"record {ordinal} " in str(caught.value)
    job = prepare(spec)
    left = [part for shard in progress_of(job).shards for part in shard.parts]
    undone = {part.index for part in left}
    # Done are all parts but those of a damaged record, and what came after it in its shard.
    shards = [range(first, first + 40) for first in range(0, 200, 40)]
    for ordinals in shards:
        bad = [ordinal for ordinal in damaged.bad if ordinal in ordinals]
        for part in job.parts:
            if part.first_ordinal in ordinals:
                assert (part.index in undone) is bool(bad and part.last_ordinal >= bad[0])
