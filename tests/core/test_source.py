"""Sources: opened once, read in parallel, pickled small, and told apart by Grain's checkpoints."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import signal_dataset as sds

from signal_batch import source as module
from signal_batch._grain import grain
from signal_batch.columns import Column
from signal_batch.errors import PinMismatchError, SpecError
from signal_batch.pins import Pin, pin_dataset, write_pin
from signal_batch.selection import Selection
from signal_batch.source import BatchFetcher, SDSSource
from signal_batch.synth import synthesize

THREADS = 16
TEXTS = ("field:samples", "snr=metadata:snr_db:float32", "label=annotation:truth-v1/label:int32")
COLUMNS = tuple(map(Column.parse, TEXTS))


@pytest.fixture(scope="module")
def pin(iq_root: Path) -> Pin:
    return pin_dataset(str(iq_root), ["truth-v1"]).pin


@pytest.fixture(scope="module")
def other_pin(tmp_path_factory: pytest.TempPathFactory) -> Pin:
    """A dataset of the same size and shape with other samples."""
    root = str(tmp_path_factory.mktemp("other") / "iq")
    synthesize(root, records=200, shape=(2, 64), seed=8, records_per_shard=40)
    return pin_dataset(root, ["truth-v1"]).pin


@pytest.fixture(scope="module")
def dataset(iq_root: Path) -> sds.Dataset:
    return sds.open(str(iq_root))


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[Pin]:
    """The pins that sources have opened so far; opening takes a while."""
    opened: list[Pin] = []
    reopen = module.reopen

    def slowly(pin: Pin) -> Any:
        opened.append(pin)
        time.sleep(0.05)
        return reopen(pin)

    monkeypatch.setattr(module, "reopen", slowly)
    return opened


def check(tree: dict[str, Any], dataset: sds.Dataset, ordinal: int) -> None:
    record = dataset[ordinal]
    assert (int(tree["ordinal"]), tree["id"]) == (ordinal, record.id)
    np.testing.assert_array_equal(tree["samples"], record["samples"].data)
    assert tree["samples"].shape == (2, 64)
    assert tree["snr"] == np.float32(record.metadata["snr_db"])
    assert tree["label"] == dataset.annotations["truth-v1"][ordinal].values["label"]


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Run `call(0)` to `call(count - 1)` at the same moment, each in a thread."""
    start = threading.Barrier(count)

    def begin(number: int) -> Any:
        start.wait(10)
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


# --- the batch fetcher ---------------------------------------------------------------------


def test_batches_are_in_the_order_asked_for(pin: Pin, dataset: sds.Dataset) -> None:
    ordinals = [150, 3, 3, 199, 0]
    fetch = BatchFetcher(pin, COLUMNS)
    batch = fetch(ordinals)
    assert list(batch) == ["ordinal", "id", "samples", "snr", "label"]
    for row, ordinal in enumerate(ordinals):
        check({name: values[row] for name, values in batch.items()}, dataset, ordinal)
    assert (batch["snr"].dtype, batch["label"].dtype) == (np.float32, np.int32)
    safe = BatchFetcher(pin, COLUMNS, safe_decode=True)(ordinals)
    for name, values in batch.items():
        np.testing.assert_array_equal(safe[name], values)


def test_a_dataset_is_opened_once_however_many_ask_for_it(
    pin: Pin, dataset: sds.Dataset, opens: list[Pin]
) -> None:
    fetch = BatchFetcher(pin, COLUMNS)
    assert opens == []
    batches = together(THREADS, lambda i: fetch([i, 199 - i]))
    assert opens == [pin]
    for i, batch in enumerate(batches):
        for row, ordinal in enumerate((i, 199 - i)):
            check({name: values[row] for name, values in batch.items()}, dataset, ordinal)


def test_a_failed_open_is_tried_again(pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    reopen, calls = module.reopen, []

    def fails_once(pin: Pin) -> Any:
        calls.append(pin)
        if len(calls) == 1:
            raise TimeoutError
        return reopen(pin)

    monkeypatch.setattr(module, "reopen", fails_once)
    fetch = BatchFetcher(pin, COLUMNS)
    with pytest.raises(TimeoutError):
        fetch([0])
    assert fetch([7])["ordinal"].tolist() == [7]


@pytest.mark.parametrize("make", [BatchFetcher, SDSSource])
def test_reads_are_not_serialised(
    make: Callable[..., Any], pin: Pin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reads are inside the reader at once, or the barrier breaks."""
    both = threading.Barrier(2)
    read = module.RecordReader.read

    def meets(self: Any, ordinals: Any) -> Any:
        both.wait(10)
        return read(self, ordinals)

    monkeypatch.setattr(module.RecordReader, "read", meets)
    source = make(pin, COLUMNS)
    if isinstance(source, BatchFetcher):
        found = together(2, lambda i: source([i])["ordinal"].tolist())
        assert found == [[0], [1]]
    else:
        assert together(2, lambda i: int(source[i]["ordinal"])) == [0, 1]


def test_closing_lets_go_of_the_shards_and_a_later_read_opens_again(
    pin: Pin, opens: list[Pin]
) -> None:
    fetch = BatchFetcher(pin, COLUMNS)
    fetch.close()
    fetch([0, 50])
    store = fetch._opened[0].dataset.shard_store  # type: ignore[index]
    assert store._open  # type: ignore[attr-defined]
    fetch.close()
    assert not store._open  # type: ignore[attr-defined]
    assert fetch([3])["ordinal"].tolist() == [3]
    assert len(opens) == 2


def test_a_dataset_that_changed_is_a_mismatch_at_the_first_read(
    pin: Pin, iq_copy: Path, other_pin: Pin
) -> None:
    moved = pin.model_copy(update={"uri": str(iq_copy)})
    fetch = BatchFetcher(moved, COLUMNS)
    shutil.rmtree(iq_copy)
    shutil.copytree(other_pin.uri, iq_copy)
    with pytest.raises(PinMismatchError, match="fingerprint: pinned"):
        fetch([0])
    with pytest.raises(PinMismatchError, match="is not what was pinned"):
        SDSSource(moved, COLUMNS)[0]


@pytest.mark.parametrize("make", [BatchFetcher, SDSSource])
def test_annotation_sets_have_to_be_pinned(make: Callable[..., Any], pin: Pin) -> None:
    columns = (*COLUMNS, Column.parse("annotation:review-v1/quality?0"))
    with pytest.raises(SpecError, match="sets that are not pinned: review-v1; name them"):
        make(pin, columns)


# --- the record source ---------------------------------------------------------------------


def test_elements_are_records_without_a_record_axis(pin: Pin, dataset: sds.Dataset) -> None:
    source = SDSSource(pin, COLUMNS)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert (len(source), source.pin) == (200, pin)
    for index in (0, 41, np.int64(199)):
        tree = source[index]
        assert set(tree) == {"ordinal", "id", "samples", "snr", "label"}
        check(tree, dataset, int(index))
    for outside in (200, -1):
        with pytest.raises(IndexError):
            source[outside]


def test_records_of_different_shapes_can_be_read_one_by_one(vowels_root: Path) -> None:
    source = SDSSource(pin_dataset(str(vowels_root)).pin, (Column.parse("field:samples"),))
    dataset = sds.open(str(vowels_root))
    for ordinal in (0, 1, 300, 639):
        np.testing.assert_array_equal(source[ordinal]["samples"], dataset[ordinal]["samples"].data)


def test_a_selection_is_what_the_source_is_of(pin: Pin, dataset: sds.Dataset) -> None:
    source = SDSSource(pin, COLUMNS, selection=Selection.of([3, 77, 190]))
    assert len(source) == 3
    check(source[1], dataset, 77)
    with pytest.raises(IndexError, match="position 3 of a selection of 3"):
        source[3]


def test_an_empty_selection_is_not_the_whole_dataset(pin: Pin) -> None:
    assert len(SDSSource(pin, COLUMNS, selection=Selection.of([]))) == 0


def power(tree: dict[str, Any]) -> float:
    return float(np.mean(np.abs(tree["samples"]) ** 2))


def test_elements_pass_through_adapt(pin: Pin, dataset: sds.Dataset) -> None:
    source = SDSSource(pin, COLUMNS, adapt=power)
    assert source[9] == pytest.approx(np.mean(np.abs(dataset[9]["samples"].data) ** 2))
    assert "adapt=power" in repr(source)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def _open_shards() -> list[str]:
    """Files of datasets that this process has open; threads of other tests may open others."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(descriptor.readlink()))
    return sorted(name for name in found if name.endswith(".arrayrecord"))


def test_a_source_pickles_to_its_pin_alone(
    pin: Pin, dataset: sds.Dataset, opens: list[Pin]
) -> None:
    source = SDSSource(pin, COLUMNS, selection=Selection.of([5, 6, 120]), adapt=None)
    check(source[2], dataset, 120)
    before = _open_shards()
    payload = pickle.dumps(source)
    copies = [pickle.loads(payload) for _ in range(5)]  # noqa: S301
    assert _open_shards() == before
    assert len(payload) < 3000 + len(pickle.dumps(pin))
    assert len(opens) == 1
    assert repr(copies[0]) == repr(source)
    check(copies[0][2], dataset, 120)
    assert len(opens) == 2
    fetch = pickle.loads(pickle.dumps(BatchFetcher(pin, COLUMNS, safe_decode=True)))  # noqa: S301
    assert (fetch.pin, fetch.columns, fetch.safe_decode) == (pin, COLUMNS, True)
    assert fetch([4])["ordinal"].tolist() == [4]


REPR = """
import sys
from signal_batch import Column, SDSSource, Selection, read_pin
from signal_batch.source import BatchFetcher
pin, columns = read_pin(sys.argv[1]), [Column.parse(text) for text in sys.argv[2:]]
print(repr(SDSSource(pin, columns, selection=Selection.of([1, 2, 9]))))
print(repr(BatchFetcher(pin, columns)))
"""


def test_a_repr_is_the_same_in_every_process(pin: Pin, tmp_path: Path) -> None:
    path = str(tmp_path / "pin.json")
    write_pin(pin, path)
    source = SDSSource(pin, COLUMNS, selection=Selection.of([1, 2, 9]))
    here = [repr(source), repr(BatchFetcher(pin, COLUMNS))]
    source[0]
    assert repr(source) == here[0]
    result = subprocess.run(
        [sys.executable, "-c", REPR, path, *TEXTS],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines() == here, result.stderr
    for text in here:
        assert pin.fingerprint in text
        assert " at 0x" not in text


def test_a_repr_tells_datasets_columns_and_selections_apart(pin: Pin, other_pin: Pin) -> None:
    moved = pin.model_copy(update={"uri": "s3://elsewhere/set", "catalog_revision": None})
    sets = pin.annotations[0].model_copy(update={"root_sha256": "0" * 64})
    relabelled = pin.model_copy(update={"annotations": (sets,)})
    base = repr(SDSSource(pin, COLUMNS))
    assert repr(SDSSource(moved, COLUMNS)) == base
    others = {
        repr(SDSSource(other_pin, COLUMNS)),
        repr(SDSSource(relabelled, COLUMNS)),
        repr(SDSSource(pin, COLUMNS[:2])),
        repr(SDSSource(pin, COLUMNS[::-1])),
        repr(SDSSource(pin, COLUMNS, selection=Selection.all_of(199))),
        repr(SDSSource(pin, COLUMNS, adapt=power)),
    }
    assert len(others | {base}) == 7


# --- Grain's data loader -------------------------------------------------------------------


def loader(source: SDSSource) -> Any:
    sampler = grain.samplers.IndexSampler(
        len(source), grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    return grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)


def ordinals(batches: Iterator[dict[str, Any]]) -> list[int]:
    return [int(tree["ordinal"]) for tree in batches]


def test_a_checkpoint_restores_over_the_same_pin(
    pin: Pin, other_pin: Pin, dataset: sds.Dataset
) -> None:
    whole = ordinals(iter(loader(SDSSource(pin, COLUMNS))))
    assert sorted(whole) == list(range(200))
    assert whole != list(range(200))
    iterator = iter(loader(SDSSource(pin, COLUMNS)))
    first = [next(iterator) for _ in range(60)]
    for tree in first[:3]:
        check(tree, dataset, int(tree["ordinal"]))
    state = iterator.get_state()
    moved = pickle.loads(pickle.dumps(SDSSource(pin, COLUMNS)))  # noqa: S301
    again = iter(loader(moved))
    again.set_state(state)
    assert ordinals(iter(first)) + ordinals(again) == whole
    refused = iter(loader(SDSSource(other_pin, COLUMNS)))
    with pytest.raises(ValueError, match="data source"):
        refused.set_state(state)
