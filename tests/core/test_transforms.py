"""Chains of transforms: streams that follow records, the three kinds of steps, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal

from signal_batch import augmentations
from signal_batch.batches import Batch
from signal_batch.errors import FeatureError, SpecError
from signal_batch.features import resolve_feature
from signal_batch.iteration import rng_at
from signal_batch.statistics import measure
from signal_batch.training_spec import Transform
from signal_batch.transforms import BUILT_IN, Chain, resolve_chain

AUGMENTED = (
    "random_crop length=16",
    "add_noise snr_db=[0,20]",
    "frequency_offset max_hz=1000 sample_rate_hz=rate_hz",
    "channel_dropout probability=0.4",
    "scale gain_db=[-6,6]",
    "unit_power",
)

OWN = '''
import numpy as np

from signal_batch.augmentations import transform
from signal_batch.built_ins import feature

BUFFER = np.empty(3, "float32")

def louder(record, rng, *, by=2.0):
    return {**record, "samples": record["samples"] * np.float32(by), "drawn": rng.random()}

def tagged(record, rng):
    return {**record, "tag": "of " + record["id"]}

@transform(training_only=True)
def flipped(record, rng):
    return {**record, "samples": record["samples"][..., ::-1]}

def mixed(batch, rngs, *, share):
    """Each record with some of the next."""
    samples = np.stack(list(batch["samples"]))
    weights = np.array([share * rng.random() for rng in rngs], "float32")
    shape = (-1, *[1] * (samples.ndim - 1))
    return {**batch, "samples": samples + weights.reshape(shape) * np.roll(samples, 1, axis=0)}

def buffered(record, rng):
    BUFFER[:] = record["ordinal"]
    return {**record, "samples": BUFFER}

def buffered_batch(batch, rngs):
    return {**batch, "samples": [BUFFER] * len(rngs)}

def energy(batch, *, scale=1.0):
    return {"energy": scale * np.sum(np.abs(batch["samples"]) ** 2, axis=-1)}

@transform(training_only=True)
def training_energy(batch):
    return energy(batch)

def moved(batch):
    return {"position": batch["ordinal"] + 1}

def in_place(record, rng):
    record["samples"] *= 2
    return record

def in_place_batch(batch, rngs):
    batch["samples"] *= 2
    return batch

def gives(record, rng, *, what):
    x = record["samples"]
    odd = int(record["ordinal"]) % 2
    return {
        "other id": lambda: {**record, "id": "x"},
        "other position": lambda: {**record, "position": record["position"] + 1},
        "no ordinal": lambda: {n: v for n, v in record.items() if n != "ordinal"},
        "list": lambda: [x],
        "dtypes": lambda: {**record, "samples": x.astype("f8") if odd else x},
        "names": lambda: {**record, "extra": 1} if odd else record,
        "axes": lambda: {**record, "samples": x[0] if odd else x},
        "complex128": lambda: {**record, "samples": x.astype("c16")},
        "object": lambda: {**record, "samples": {}},
        "masked": lambda: {**record, "samples": np.ma.masked_array(x)},
        "name": lambda: {**record, "a b": 1},
        "text": lambda: {**record, "label": "t" if odd else None, "size": x.size},
        "same": lambda: {**record, "ordinal": int(record["ordinal"]), "id": str(record["id"])},
        "ragged": lambda: {**record, "samples": x[..., : 3 + odd]},
    }[what]()

def gives_batch(batch, rngs, *, what):
    x = batch["samples"]
    return {
        "other ids": lambda: {**batch, "id": batch["id"][::-1]},
        "no ordinal": lambda: {n: v for n, v in batch.items() if n != "ordinal"},
        "fewer": lambda: {**batch, "samples": x[1:]},
        "fewer of all": lambda: {n: v[1:] for n, v in batch.items()},
        "list": lambda: [x],
        "complex128": lambda: {**batch, "samples": x.astype("c16")},
        "dtypes": lambda: {**batch, "samples": [x[0], *x[1:].astype("f8")]},
        "ragged": lambda: {**batch, "samples": [v[..., : 3 + i % 2] for i, v in enumerate(x)]},
        "number": lambda: {**batch, "samples": 3.0},
    }[what]()

def broken(record, rng):
    if record["ordinal"] == 12:
        raise ZeroDivisionError("no samples")
    return record

def broken_batch(batch, rngs):
    raise SystemExit(0)

def keyword(record, *, rng):
    return record
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the module `own_transforms`, above."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_transforms.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    sys.modules.pop("own_transforms", None)
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("own_transforms", None)


def chain_of(
    *steps: str, seed: int = 5, arrays: Any = ("samples",), statistics: Any = None
) -> Chain:
    transforms = [Transform.model_validate(step) for step in steps]
    return resolve_chain(transforms, seed=seed, array_columns=arrays, statistics=statistics)


def records_of(
    positions: list[int], *, ragged: bool = False, dtype: str = "complex64", shape: Any = (2, 40)
) -> Batch:
    """A batch in which everything about a record follows from its ordinal, position + 10."""
    samples = []
    for position in positions:
        rng = np.random.default_rng(position)
        drawn = rng.standard_normal(shape) + (1j if dtype == "complex64" else 0)
        samples.append(drawn.astype(dtype)[..., : 20 + position % 3 if ragged else None])
    ordinals = np.array(positions, "int64") + 10
    same = len({x.shape for x in samples}) == 1
    return {
        "ordinal": ordinals,
        "id": np.array([f"r{o}" for o in ordinals], dtype=object),
        "rate_hz": np.full(len(positions), 5e4, "float32"),
        "samples": np.stack(samples) if same else samples,
        "position": np.array(positions, "int64"),
    }


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


# --- streams -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    positions=st.lists(st.integers(0, 1000), min_size=1, max_size=12, unique=True),
    cuts=st.sets(st.integers(1, 11)),
    seed=st.integers(0, 2**32 - 1),
    ragged=st.booleans(),
    training=st.booleans(),
)
def test_a_record_becomes_the_same_in_any_batch(
    own: Path, positions: list[int], cuts: set[int], seed: int, ragged: bool, training: bool
) -> None:
    steps = (*AUGMENTED, "own_transforms:louder", "power_spectrum nperseg=16 nfft=64")
    chain = chain_of(*steps, seed=seed)
    together = chain(records_of(positions, ragged=ragged), training=training)
    edges = [0, *sorted(cut for cut in cuts if cut < len(positions)), len(positions)]
    at = 0
    for first, stop in pairwise(edges):
        part = chain(records_of(positions[first:stop], ragged=ragged), training=training)
        assert list(part) == list(together)
        for row in range(stop - first):
            for name, value in part.items():
                np.testing.assert_array_equal(value[row], together[name][at])
            at += 1
    assert at == len(positions)


def test_training_depends_on_seed_and_position_and_evaluation_on_seed_and_ordinal() -> None:
    always = chain_of("unit_power")
    chain, batch = chain_of(*AUGMENTED), records_of([3, 4])
    first = chain(batch, training=True)["samples"]
    same(first, chain(batch, training=True)["samples"])
    moved = batch | {"position": batch["position"] + 7}
    assert not np.array_equal(first, chain(moved, training=True)["samples"])
    other = chain_of(*AUGMENTED, seed=6)(batch, training=True)["samples"]
    assert not np.array_equal(first, other)
    del moved["position"]
    evaluated = chain(moved, training=False)
    same(evaluated["samples"], always(batch, training=False)["samples"])
    assert "position" not in evaluated


def test_the_streams_are_those_that_are_documented(own: Path) -> None:
    chain, batch = chain_of("own_transforms:louder", seed=9), records_of([3, 2**40])
    trained = chain(batch, training=True)["drawn"]
    assert trained.tolist() == [rng_at(9, p).random() for p in (3, 2**40)]
    evaluated = chain(batch, training=False)["drawn"]
    keys = [np.array([9, 2**63 + p + 10], "uint64") for p in (3, 2**40)]
    philox = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
    assert evaluated.tolist() == [rng.random() for rng in philox]
    near = chain(records_of([1, 2, 3, 4]), training=False)["drawn"]
    assert len(set(near.tolist())) == 4  # as floats, keys this large would all be one


def test_steps_take_from_one_stream_in_their_order(own: Path) -> None:
    steps = ("add_noise snr_db=3", "own_transforms:mixed share=0", "own_transforms:louder")
    batch = records_of([6, 7])
    result = chain_of(*steps)(batch, training=True)
    for row, position in enumerate((6, 7)):
        rng = rng_at(5, position)
        record = {"samples": batch["samples"][row]}
        noisy = augmentations.add_noise(record, rng, snr_db=3)["samples"]
        rng.random()
        np.testing.assert_array_equal(result["samples"][row], noisy * np.float32(2))
        assert result["drawn"][row] == rng.random()


def test_no_generator_is_made_for_steps_that_draw_nothing(monkeypatch: Any) -> None:
    def none(seed: int, position: int) -> Any:
        raise AssertionError("made")

    monkeypatch.setattr("signal_batch.transforms.rng_at", none)
    chain_of("unit_power", "normalize", "statistics")(records_of([1, 2]), training=True)
    with pytest.raises(AssertionError, match="made"):
        chain_of("scale gain_db=1")(records_of([1, 2]), training=True)


def test_a_chain_may_be_used_by_several_threads(own: Path) -> None:
    chain = chain_of(*AUGMENTED, "own_transforms:mixed share=0.5", "own_transforms:louder")
    batches = [records_of(list(range(at, at + 8))) for at in range(0, 320, 8)]
    alone = [chain(batch, training=True) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(lambda batch: chain(batch, training=True), batches))
    for one, other in zip(alone, threaded, strict=True):
        same(one["samples"], other["samples"])


# --- what a batch becomes ----------------------------------------------------------------------


def test_without_steps_a_batch_stays_as_it_is() -> None:
    batch = records_of([1, 2, 3], ragged=True)
    chain = chain_of()
    assert chain(batch, training=True) is batch
    assert chain.array_columns_after(batch) == ("samples",)


def test_columns_that_no_step_touches_are_carried_on_as_they_are() -> None:
    batch = records_of([1, 2, 3]) | {"label": np.array(["a", None, "b"], dtype=object)}
    result = chain_of(*AUGMENTED)(batch, training=True)
    assert list(result) == list(batch)
    assert all(result[name] is batch[name] for name in batch if name != "samples")
    assert result["samples"].flags.writeable


def test_cropping_stacks_records_of_differing_lengths() -> None:
    batch = records_of([1, 2, 3], ragged=True)
    chain = chain_of("random_crop length=16", "add_noise snr_db=10")
    assert isinstance(batch["samples"], list)
    assert chain(batch, training=True)["samples"].shape == (3, 2, 16)
    evaluated = chain(batch, training=False)["samples"]
    assert evaluated is batch["samples"]
    noisy = chain_of("add_noise snr_db=10")(batch, training=True)["samples"]
    assert [x.shape for x in noisy] == [x.shape for x in batch["samples"]]


def test_a_batch_of_no_records_stays_one() -> None:
    batch = {name: value[:0] for name, value in records_of([1]).items()}
    result = chain_of("unit_power", "normalize", "statistics")(batch, training=True)
    assert len(result["ordinal"]) == 0


def test_a_step_on_batches_gets_a_stream_for_each_record(own: Path) -> None:
    batch = records_of([4, 8, 15])
    result = chain_of("own_transforms:mixed share=0.5")(batch, training=True)["samples"]
    for row, position in enumerate((4, 8, 15)):
        weight = np.float32(0.5 * rng_at(5, position).random())
        x = batch["samples"]
        np.testing.assert_allclose(result[row], x[row] + weight * x[row - 1], rtol=1e-6)


def test_a_feature_replaces_the_arrays_and_carries_the_rest() -> None:
    batch = records_of([1, 2])
    chain = chain_of("unit_power", "power_spectrum nperseg=32")
    result = chain(batch, training=True)
    assert set(result) == {"ordinal", "id", "rate_hz", "position", "power_spectrum"}
    x = batch["samples"].astype("complex128")
    x = x / np.sqrt(np.mean(np.abs(x) ** 2, axis=(1, 2), keepdims=True))
    expected = signal.welch(x, nperseg=32, detrend=False, return_onesided=False)[1]
    np.testing.assert_allclose(result["power_spectrum"], expected, rtol=1e-4, atol=1e-6)
    assert chain.array_columns_after(batch) == ("power_spectrum",)


def test_the_tensors_after_each_kind_of_step(own: Path) -> None:
    batch = records_of([1, 2], dtype="float32", shape=(40,)) | {"mask": np.ones((2, 3), bool)}
    names = ("samples", "mask")
    moments = ("mean", "std", "skewness", "kurtosis", "min", "max", "rms")

    def after(*steps: str) -> tuple[str, ...]:
        return chain_of(*steps, arrays=names).array_columns_after(batch)

    assert after("unit_power", "own_transforms:louder") == names  # a number is no tensor
    assert after("statistics column=samples") == moments  # of a feature it is
    assert after("raw") == names
    assert after("statistics column=samples", "own_transforms:tagged") == moments


def test_values_that_records_gain(own: Path) -> None:
    batch = records_of([1, 2])
    steps = ("own_transforms:gives what=text", "own_transforms:tagged")
    result = chain_of(*steps)(batch, training=True)
    assert result["label"].tolist() == ["t", None]
    assert result["tag"].tolist() == ["of r11", "of r12"]
    assert result["size"].tolist() == [80, 80]
    assert result["samples"] is batch["samples"]
    equal = chain_of("own_transforms:gives what=same")(batch, training=True)
    assert all(equal[name] is batch[name] for name in batch)


@pytest.mark.parametrize("name", ["gives", "gives_batch"])
def test_results_of_differing_shapes_are_listed(own: Path, name: str) -> None:
    chain = chain_of(f"own_transforms:{name} what=ragged")
    result = chain(records_of([0, 1, 2]), training=True)["samples"]
    assert [x.shape for x in result] == [(2, 3), (2, 4), (2, 3)]
    assert chain.array_columns_after(records_of([0, 1, 2]), training=True) == ("samples",)


def test_training_only_functions_are_skipped_in_evaluation(own: Path) -> None:
    batch, chain = records_of([1, 2]), chain_of("own_transforms:flipped")
    np.testing.assert_array_equal(
        chain(batch, training=True)["samples"], batch["samples"][..., ::-1]
    )
    assert chain(batch, training=False)["samples"] is batch["samples"]


def test_a_buffer_used_again_does_not_change_another_record(own: Path) -> None:
    result = chain_of("own_transforms:buffered")(records_of([1, 2]), training=True)["samples"]
    assert result[:, 0].tolist() == [11.0, 12.0]
    first = chain_of("own_transforms:buffered_batch")(records_of([1]), training=True)["samples"]
    chain_of("own_transforms:buffered")(records_of([70]), training=True)
    assert first[:, 0].tolist() == [12.0]


# --- normalize ---------------------------------------------------------------------------------


def test_normalize_uses_what_was_measured_at_its_place(own: Path) -> None:
    steps = ("add_noise snr_db=0", "unit_power", "normalize", "own_transforms:louder by=3")
    chain = chain_of(*steps)
    train, test = records_of(list(range(20))), records_of([50, 51])
    assert chain.needs_statistics
    assert chain.measured_columns(train) == ("samples",)
    before = chain.until_statistics()
    statistics = measure([before(train, training=False)], ["samples"])
    x = train["samples"].astype("complex128")
    x = x / np.sqrt(np.mean(np.abs(x) ** 2, axis=(1, 2), keepdims=True))  # without the noise
    mean, std = x.mean(axis=(0, 2)), x.std(axis=(0, 2))
    np.testing.assert_allclose(statistics.columns["samples"].mean, mean, atol=1e-6)
    np.testing.assert_allclose(statistics.columns["samples"].std, std, rtol=1e-6)
    result = chain_of(*steps, statistics=statistics)(test, training=False)["samples"]
    y = test["samples"].astype("complex128")
    y = y / np.sqrt(np.mean(np.abs(y) ** 2, axis=(1, 2), keepdims=True))
    expected = 3 * (y - mean[:, None]) / std[:, None]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    trained = chain_of(*steps[1:3], statistics=statistics)
    same(trained(test, training=True)["samples"], trained(test, training=False)["samples"])


def test_without_statistics_normalize_leaves_values_as_they_are() -> None:
    batch, chain = records_of([1, 2]), chain_of("normalize")
    assert chain(batch, training=True)["samples"] is batch["samples"]
    assert chain.until_statistics()(batch, training=True) is batch
    assert not chain_of("unit_power").needs_statistics
    assert chain_of("unit_power").measured_columns(batch) == ()


def test_normalize_takes_all_float_tensors_or_the_one_it_names() -> None:
    batch = records_of([1, 2, 3]) | {
        "power": np.random.default_rng(0).random((3, 4)),
        "counts": np.ones((3, 4), "int16"),
    }
    arrays = ("samples", "power", "counts")
    everything = chain_of("normalize", arrays=arrays)
    assert everything.measured_columns(batch) == ("samples", "power")
    named = chain_of("normalize column=power", arrays=arrays)
    assert named.measured_columns(batch) == ("power",)
    statistics = measure([batch], ["samples", "power"])
    one = chain_of("normalize column=power", arrays=arrays, statistics=statistics)
    result = one(batch, training=False)
    assert result["samples"] is batch["samples"]
    x = batch["power"]
    np.testing.assert_allclose(result["power"], (x - x.mean(axis=0)) / x.std(axis=0))
    with pytest.raises(SpecError, match="'counts' must hold float or complex arrays"):
        chain_of("normalize column=counts", arrays=arrays).measured_columns(batch)
    after = chain_of("power_spectrum column=samples", "normalize column=samples", arrays=arrays)
    with pytest.raises(SpecError, match="'samples' is no tensor here; those are: power_spectrum"):
        after.measured_columns(batch)


def test_an_augmentation_that_changes_the_first_axis_does_not_fit_the_statistics() -> None:
    batch = records_of([1, 2], shape=(40,))
    steps = ("random_crop length=16", "normalize")
    statistics = measure([chain_of(*steps).until_statistics()(batch, training=False)], ["samples"])
    with pytest.raises(SpecError, match=r"has 16 along .*, but 40 in the .*shape \(1, time\)"):
        chain_of(*steps, statistics=statistics)(batch, training=True)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("gives", "other id", "ordinal 10: changed 'id'"),
        ("gives", "other position", "ordinal 10: changed 'position'"),
        ("gives", "no ordinal", "ordinal 10: changed 'ordinal'"),
        ("gives", "list", "ordinal 10: returned a list, not a dict"),
        ("gives", "dtypes", "10-12: column 'samples' differs in dtype .*: float32, float64"),
        ("gives", "names", "ordinals 10-12: returned extra for some records"),
        ("gives", "axes", "ordinals 10-12: column 'samples' mixes .* numbers of axes"),
        ("gives", "complex128", "column 'samples' has dtype complex128.* cast it to complex64"),
        ("gives", "object", "column 'samples' is a dict"),
        ("gives", "masked", "column 'samples' is a MaskedArray"),
        ("gives", "name", "column 'a b' needs a name of letters"),
        ("gives_batch", "other ids", "ordinals 10-12: changed 'id'"),
        ("gives_batch", "no ordinal", "ordinals 10-12: changed 'ordinal'"),
        ("gives_batch", "fewer", "ordinals 10-12: column 'samples' has 2 entries for 3 records"),
        ("gives_batch", "fewer of all", "ordinals 10-12: "),
        ("gives_batch", "list", "ordinals 10-12: returned a list, not a dict"),
        ("gives_batch", "complex128", "column 'samples' has dtype complex128"),
        ("gives_batch", "dtypes", "column 'samples' differs in dtype between records"),
        ("gives_batch", "number", "column 'samples' is a float, not an array"),
    ],
)
def test_a_wrong_result_is_named_with_its_ordinals(
    own: Path, name: str, what: str, message: str
) -> None:
    chain = chain_of(f'own_transforms:{name} what="{what}"')
    with pytest.raises(FeatureError, match=rf"^transform own_transforms:{name}, .*{message}"):
        chain(records_of([0, 1, 2], dtype="float32"), training=True)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("own_transforms:broken", "broken, ordinal 12: ZeroDivisionError: no samples .*the record"),
        ("own_transforms:broken_batch", "broken_batch, ordinals 10-12: SystemExit.*the batch has"),
        ("own_transforms:in_place", "in_place, ordinal 10: ValueError.*read-only"),
        ("own_transforms:in_place_batch", "in_place_batch, ordinals 10-12: ValueError.*read-only"),
        ("own_transforms:moved", "own_transforms:moved, ordinals 10-12: changed 'position'"),
    ],
)
def test_a_step_that_fails_is_named_with_its_ordinals(own: Path, step: str, message: str) -> None:
    batch = records_of([0, 1, 2])
    before = batch["samples"].copy()
    with pytest.raises(FeatureError, match=message):
        chain_of(step)(batch, training=True)
    np.testing.assert_array_equal(batch["samples"], before)


def test_a_damaged_sample_rate_is_named_with_its_ordinal_and_a_wrong_dtype_is_bad_input() -> None:
    chain, batch = chain_of(AUGMENTED[2]), records_of([0, 1, 2])
    batch["rate_hz"][1] = np.nan
    with pytest.raises(
        FeatureError, match=r"frequency_offset, ordinal 11: .* 'rate_hz' holds .*nan"
    ):
        chain(batch, training=True)
    with pytest.raises(SpecError, match="has dtype float32; a carrier can be shifted in complex"):
        chain(records_of([0], dtype="float32"), training=True)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["add_nose snr_db=3"], "'add_nose' is not a built-in transform; did you mean add_noise?"),
        (["wobble"], "The built-ins are random_crop, add_noise, .*normalize, raw, power_spectrum"),
        (["add_noise"], "transform 'add_noise' needs the option 'snr_db'"),
        (["add_noise snr=3"], "transform 'add_noise' has no option 'snr'; it takes snr_db, column"),
        (["add_noise snr_db=[9,3]"], r"transform add_noise: snr_db \[9, 3\] must go from low"),
        (["random_crop length=0"], "transform random_crop: length must be"),
        (["scale gain_db=3 rng=1"], "transform 'scale' has no option 'rng'"),
        (["scale gain_db=3 column=iq"], "scale: column 'iq' is no tensor here; those are: samples"),
        (["normalize column=iq"], "normalize: column 'iq' is no tensor here; those are: samples"),
        (["normalize mean=0"], "transform 'normalize' has no option 'mean'; it takes column"),
        (["normalize", "unit_power", "normalize"], "normalize can be one step"),
        (["power_spectrum size=2"], "transform 'power_spectrum' has no option 'size'"),
        (["no_such_package.mod:f"], "transform 'no_such_package.mod:f': there is no module"),
        (["own_transforms:loud"], "transform 'own_transforms:loud': .* did you mean louder"),
        (["own_transforms:BUFFER"], "transform 'own_transforms:BUFFER' is a ndarray, not a func"),
        (["own_transforms:louder to=1"], "transform 'own_transforms:louder' has no option 'to'"),
        (["own_transforms:mixed"], "transform 'own_transforms:mixed' needs the option 'share'"),
        (["own_transforms:energy x=1"], "transform 'own_transforms:energy' has no option 'x'"),
        (["own_transforms:keyword"], "must take the rng as its second argument"),
        (["own_transforms:training_energy"], "cannot be for training only"),
        (["os:getcwd"], "transform 'os:getcwd' must take the batch as its first argument"),
    ],
)
def test_a_wrong_step_is_refused_before_any_record_is_read(
    own: Path, steps: list[str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        chain_of(*steps)


def test_columns_are_not_checked_after_a_step_that_may_bring_others(own: Path) -> None:
    chain_of("own_transforms:louder", "scale gain_db=3 column=drawn")
    chain_of("spectrogram", "scale gain_db=3 column=spectrogram")


# --- identity ----------------------------------------------------------------------------------


def test_each_step_has_its_part_of_the_run_key(own: Path) -> None:
    steps = (*AUGMENTED, "normalize", "own_transforms:louder", "own_transforms:energy")
    hashes = chain_of(*steps).source_sha256
    assert len(hashes) == len(steps)
    assert len(set(hashes[:-2])) == len(steps) - 2
    assert hashes[-1] == hashes[-2]  # one file
    assert hashes[-1] == resolve_feature("own_transforms:energy", {}).source_sha256
    statistics = resolve_feature("statistics", {}).source_sha256
    assert chain_of("statistics").source_sha256 == [statistics]
    assert chain_of("scale gain_db=1").source_sha256 == chain_of("scale gain_db=2").source_sha256
    assert len(set(BUILT_IN)) == len(BUILT_IN)
