"""Feature functions: the built-ins against SciPy and theory, ragged batches, what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal, stats

from signal_batch.batches import Batch
from signal_batch.built_ins import BUILT_IN, feature
from signal_batch.errors import FeatureError, SpecError
from signal_batch.features import compute, resolve_feature


def noise(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """White noise that is always the same for the same arguments."""
    rng = np.random.default_rng([seed, *shape])
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return (values * 100).astype(dtype) if "int" in dtype else values.astype(dtype)


def batch_of(samples: Any, **columns: Any) -> Batch:
    rows = len(samples)
    ids = np.array([f"r{i}" for i in range(rows)], dtype=object)
    return {"ordinal": np.arange(rows) + 10, "id": ids, "samples": samples, **columns}


def run(name: str, samples: Any, **options: Any) -> Batch:
    return compute(resolve_feature(name, options), batch_of(samples), ["samples"])


def close(actual: Any, expected: Any, dtype: str = "float32") -> None:
    """Equal to rounding, measured against the largest value as an FFT rounds."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    relative = 1e-5 if dtype in ("float32", "complex64") else 1e-11
    np.testing.assert_allclose(
        actual, expected, rtol=relative, atol=relative * np.abs(expected).max(initial=0)
    )


# --- power spectrum and spectrogram ------------------------------------------------------------

KINDS = {
    "float32": "float32",
    "float64": "float64",
    "complex64": "float32",
    "int16": "float32",
    "float16": "float32",
    "int32": "float64",
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nperseg": 64, "noverlap": 16, "window": "blackman", "scaling": "spectrum"},
        {"nperseg": 63, "window": ["kaiser", 8.6], "detrend": "constant", "nfft": 100},
        {"nperseg": 50, "detrend": "linear", "nfft": 51, "sample_rate_hz": 8000.0},
    ],
)
def test_power_spectrum_is_welch_of_each_record(dtype: str, options: dict[str, Any]) -> None:
    samples = noise(5, 2, 1000, dtype=dtype)
    spectra = run("power_spectrum", samples, **options)["power_spectrum"]
    asked = {"nperseg": 256, "detrend": False, **options}
    rate = asked.pop("sample_rate_hz", 1.0)
    window = asked.pop("window", "hann")
    window = tuple(window) if isinstance(window, list) else window
    sided = dtype != "complex64"
    expected = [
        [
            signal.welch(
                channel.astype("complex128" if not sided else "float64"),
                rate,
                window,
                return_onesided=sided,
                **asked,
            )[1]
            for channel in record
        ]
        for record in samples
    ]
    close(spectra, expected, KINDS[dtype])


def test_power_spectrum_of_short_records_takes_a_shorter_segment() -> None:
    samples = [noise(n) for n in (1, 2, 100, 300, 100)]
    spectra = run("power_spectrum", samples)["power_spectrum"]
    assert [len(spectrum) for spectrum in spectra] == [1, 2, 51, 129, 51]
    for record, spectrum in zip(samples, spectra, strict=True):
        size = min(256, len(record))
        close(spectrum, signal.welch(record.astype("f8"), nperseg=size, detrend=False)[1])
    padded = run("power_spectrum", samples, nperseg=100, noverlap=99, nfft=128)["power_spectrum"]
    assert isinstance(padded, np.ndarray)
    assert padded.shape == (5, 65)


def test_power_spectrum_of_a_long_record_is_averaged_piece_by_piece() -> None:
    samples = noise(1, 600_000, dtype="complex64")
    spectrum = run("power_spectrum", samples)["power_spectrum"]
    expected = signal.welch(samples[0], nperseg=256, detrend=False, return_onesided=False)[1]
    close(spectrum[0], expected)


def test_tone_stands_at_its_frequency_with_its_power() -> None:
    rate, tone, amplitude = 8000.0, 1000.0, 3.0
    wave = amplitude * np.sin(2 * np.pi * tone * np.arange(4096) / rate)
    spectrum = run(
        "power_spectrum", wave[None], sample_rate_hz=rate, scaling="spectrum", window="hann"
    )["power_spectrum"][0]
    assert np.argmax(spectrum) == round(tone * 256 / rate)
    assert spectrum.max() == pytest.approx(amplitude**2 / 2, rel=1e-3)
    turning = np.exp(-2j * np.pi * tone * np.arange(4096) / rate)[None].astype("complex64")
    both = run("power_spectrum", turning)["power_spectrum"][0]
    assert np.argmax(both) == 256 - round(tone * 256 / rate)  # negative: second half


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nperseg": 64, "hop": 10, "nfft": 128, "sample_rate_hz": 50.0},
        {"nperseg": 31, "window": "boxcar", "scaling": "spectrum"},
        {"nperseg": 16, "hop": 40},
        {"nperseg": 5000},
    ],
)
def test_spectrogram_is_that_of_short_time_fft(dtype: str, options: dict[str, Any]) -> None:
    samples = noise(3, 2, 500, dtype=dtype)
    result = run("spectrogram", samples, **options)["spectrogram"]
    size = min(options.get("nperseg", 256), 500)
    transform = signal.ShortTimeFFT(
        signal.get_window(options.get("window", "hann"), size),
        hop=options.get("hop", size // 2),
        fs=options.get("sample_rate_hz", 1.0),
        mfft=options.get("nfft"),
        fft_mode="twosided" if dtype == "complex64" else "onesided2X",
        scale_to="magnitude" if options.get("scaling") == "spectrum" else "psd",
    )
    exact = samples.astype("complex128" if dtype == "complex64" else "float64")
    expected = [[transform.spectrogram(channel) for channel in record] for record in exact]
    if transform.fft_mode == "onesided2X" and transform.scaling == "magnitude":
        # There SciPy doubles amplitudes, here it is power that a bin stands twice for.
        expected = np.array(expected)
        expected[:, :, 1 : -1 if transform.mfft % 2 == 0 else None] /= 2
    close(result, expected, KINDS[dtype])


def test_slices_inside_the_record_average_to_the_power_spectrum() -> None:
    samples = noise(2, 1024)
    slices = run("spectrogram", samples, nperseg=128)["spectrogram"]
    spectrum = run("power_spectrum", samples, nperseg=128)["power_spectrum"]
    close(slices[:, :, 1:-1].mean(-1), spectrum)


# --- statistics --------------------------------------------------------------------------------


def test_statistics_of_real_records_are_those_of_numpy_and_scipy() -> None:
    for dtype in ("float32", "float64", "int16", "uint8", "float16", "int64"):
        samples = noise(4, 3, 777, dtype=dtype if dtype != "uint8" else "int16").astype(dtype)
        out = "float64" if dtype in ("float64", "int64") else "float32"
        result = run("statistics", samples)
        for record, row in zip(samples.astype("f8"), range(4), strict=True):
            for channel, at in zip(record, range(3), strict=True):
                expected = {
                    "mean": np.mean(channel),
                    "std": np.std(channel),
                    "skewness": stats.skew(channel),
                    "kurtosis": stats.kurtosis(channel),
                    "min": min(channel),
                    "max": max(channel),
                    "rms": np.sqrt(np.mean(channel**2)),
                }
                assert list(result) == ["ordinal", "id", *expected]
                for name, value in expected.items():
                    close(result[name][row, at], value, out)


def test_a_large_offset_does_not_cancel() -> None:
    samples = noise(1, 10_000, dtype="float64") * 1e-3 + 1e4
    result = run("statistics", samples)
    assert result["std"][0] == pytest.approx(np.std(samples[0]), rel=1e-9)
    assert result["kurtosis"][0] == pytest.approx(stats.kurtosis(samples[0]), abs=1e-5)


def test_constant_silent_and_empty_records_give_nan_without_a_warning() -> None:
    result = run("statistics", np.full((1, 50), 0.1, "float32"))
    assert result["mean"][0] == np.float32(0.1)
    assert result["std"][0] == pytest.approx(0, abs=1e-9)
    assert np.isnan([result["skewness"][0], result["kurtosis"][0]]).all()
    silent = run("statistics", np.zeros((1, 50), "complex64"))
    assert silent["power"][0] == 0
    assert all(np.isnan(silent[name][0]) for name in ("papr", "kurtosis", "c40", "c42"))
    empty = run("statistics", np.zeros((2, 3, 0), "int16"))
    assert empty["max"].shape == (2, 3)
    assert np.isnan(empty["max"]).all()
    run("statistics", np.array([[np.inf, -np.inf, np.nan]], "float32"))


def test_statistics_of_complex_records() -> None:
    samples = noise(3, 2, 400, dtype="complex64") + np.complex64(0.5 - 1j)
    result = run("statistics", samples)
    for row in range(3):
        for at in range(2):
            x = samples[row, at].astype("complex128")
            power = np.mean(np.abs(x) ** 2)
            expected = {
                "mean_re": x.real.mean(),
                "mean_im": x.imag.mean(),
                "power": power,
                "papr": max(abs(x) ** 2) / power,
                "kurtosis": stats.kurtosis(abs(x)),
            }
            for name, value in expected.items():
                close(result[name][row, at], value)
            c40 = np.mean(x**4) - 3 * np.mean(x**2) ** 2
            c42 = np.mean(abs(x) ** 4) - abs(np.mean(x**2)) ** 2 - 2 * power**2
            close(result["c40"][row, at], c40 / power**2, "complex64")
            close(result["c42"][row, at], c42 / power**2)


def qam(order: int) -> np.ndarray:
    side = np.arange(1 - order**0.5, order**0.5, 2)
    return (side[:, None] + 1j * side[None, :]).ravel()


@pytest.mark.parametrize(
    ("points", "c40", "c42"),
    [
        (np.array([1, -1]), -2, -2),  # BPSK
        (np.array([1, 1j, -1, -1j]), 1, -1),  # QPSK
        (np.exp(2j * np.pi * np.arange(8) / 8), 0, -1),  # 8PSK
        (qam(16), -0.68, -0.68),
        (qam(64), -0.6190, -0.6190),
    ],
)
def test_cumulants_reach_their_theoretical_values(
    points: np.ndarray, c40: float, c42: float
) -> None:
    """Table I of Swami and Sadler (2000), each point equally often."""
    once = np.tile(points, 65_536 // len(points))
    symbols = 7.5 * np.stack([once, np.random.default_rng(1).permutation(once)])
    result = run("statistics", symbols.astype("complex64"))
    np.testing.assert_allclose(result["c40"], [c40, c40], atol=5e-5)
    np.testing.assert_allclose(result["c42"], [c42, c42], atol=5e-5)


# --- batches -----------------------------------------------------------------------------------


def test_raw_returns_every_column_and_touches_none() -> None:
    samples, label = [noise(3), noise(5)], np.array(["a", None], dtype=object)
    batch = batch_of(samples, label=label, mask=np.ones((2, 4), bool))
    result = compute(resolve_feature("raw", {}), batch, ["samples", "mask"])
    assert list(result) == ["ordinal", "id", "label", "samples", "mask"]
    assert all(np.shares_memory(a, b) for a, b in zip(result["samples"], samples, strict=True))
    assert result["label"].tolist() == ["a", None]


def test_scalars_are_carried_and_arrays_are_not() -> None:
    batch = batch_of(noise(2, 64), label=np.array([3, 4], "int32"), gain=np.array([1.0, 2.0]))

    def louder(batch: Batch) -> Batch:
        return {"peak": np.abs(batch["samples"]).max(-1), "gain": batch["gain"] * 2}

    result = compute(_own(louder), batch, ["samples"])
    assert list(result) == ["ordinal", "id", "label", "gain", "peak"]
    assert result["gain"].tolist() == [2.0, 4.0]


def _own(function: Any, **options: Any) -> Any:
    """A Feature around a function of this file."""
    return replace(
        resolve_feature("raw", {}),
        name=function.__name__,
        function=function,
        options=options,
        equal_lengths=getattr(function, "equal_lengths", True),
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    name=st.sampled_from(sorted(BUILT_IN)),
    dtype=st.sampled_from(["float32", "complex64", "int16"]),
    channels=st.integers(0, 2),
)
def test_a_ragged_batch_equals_its_records_one_by_one(
    lengths: list[int], name: str, dtype: str, channels: int
) -> None:
    lead = (channels,) if channels else ()
    samples = [noise(*lead, n, dtype=dtype, seed=row) for row, n in enumerate(lengths)]
    options = {} if name in ("raw", "statistics") else {"nperseg": 16}
    together = run(name, samples, **options)
    assert together["ordinal"].tolist() == list(range(10, 10 + len(lengths)))
    for row, record in enumerate(samples):
        alone = run(name, record[None], **options)
        assert set(alone) == set(together)
        for column in set(alone) - {"ordinal", "id"}:
            np.testing.assert_allclose(
                together[column][row], alone[column][0], rtol=1e-6, atol=1e-5, equal_nan=True
            )


def test_results_of_equal_shape_are_stacked_and_others_are_listed() -> None:
    samples = [noise(8), noise(4), noise(8)]
    assert isinstance(run("statistics", samples)["mean"], np.ndarray)
    spectra = run("power_spectrum", samples)["power_spectrum"]
    assert isinstance(spectra, list)
    assert [spectrum.shape for spectrum in spectra] == [(5,), (3,), (5,)]


def test_a_batch_of_no_records_keeps_its_columns() -> None:
    for dtype in ("float32", "complex64"):
        empty = run("power_spectrum", np.zeros((0, 2, 512), dtype))["power_spectrum"]
        assert empty.shape == (0, 2, 256 if dtype == "complex64" else 129)
        assert run("spectrogram", np.zeros((0, 512), dtype))["spectrogram"].shape[0] == 0
        assert run("statistics", np.zeros((0, 2, 512), dtype))["kurtosis"].shape == (0, 2)
    with pytest.raises(FeatureError, match="a batch of no records has no shapes"):
        run("statistics", [])


def test_a_marked_function_gets_lists_as_they_are() -> None:
    seen = []

    @feature(equal_lengths=False)
    def lengths(batch: Batch) -> Batch:
        seen.append(type(batch["samples"]))
        return {"length": np.array([len(x) for x in batch["samples"]])}

    result = compute(_own(lengths), batch_of([noise(3), noise(5)]), ["samples"])
    assert seen == [list]
    assert result["length"].tolist() == [3, 5]


def test_groups_see_the_scalars_of_their_own_records() -> None:
    def named(batch: Batch) -> Batch:
        size = batch["samples"].shape[-1]
        return {"label": np.array([f"{name}/{size}" for name in batch["id"]])}

    samples = [noise(3), noise(500), noise(3)]
    result = compute(_own(named), batch_of(samples), ["samples"])
    assert result["label"].tolist() == ["r0/3", "r1/500", "r2/3"]


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1], "returned a list, not a dict"),
        ({"a b": np.zeros(2)}, "column 'a b' needs a name of letters"),
        ({"id": np.zeros(2)}, "column 'id' is always the record's own"),
        ({"ordinal": np.zeros(2)}, "column 'ordinal' is always the record's own"),
        ({"x": 3.0}, "column 'x' is a float, not an array"),
        ({"x": np.float32(3)}, "column 'x' is a float32, not an array"),
        ({"x": np.zeros(())}, "lacks the record axis"),
        ({"x": np.zeros(3)}, "has 3 entries for 2 records"),
        ({"x": [np.zeros(3)]}, "has 1 entries for 2 records"),
        ({"x": [1, 2]}, "a list of something else than arrays"),
        ({"x": [np.zeros(2), np.zeros(2, "f4")]}, "mixes dtypes"),
        ({"x": [np.zeros(2), np.zeros((2, 2))]}, "mixes dtypes or numbers of axes"),
        ({"x": np.zeros(2, "complex128")}, "complex128, .* cast it to complex64"),
        ({"x": [np.zeros(2, "complex128")] * 2}, "cast it to complex64"),
        ({"x": np.zeros(2, "datetime64[s]")}, "has dtype datetime64"),
        ({"x": np.zeros(2, ">f4")}, "has dtype >f4"),
        ({"x": np.array([{}, 1], dtype=object)}, "Python objects other than str"),
        ({"x": np.array([["a"], ["b"]])}, "text has one value a record"),
        ({"x": np.ma.masked_array([1.0, 2.0])}, "is a MaskedArray"),
    ],
)
def test_a_wrong_result_is_named_with_its_ordinals(result: Any, message: str) -> None:
    def wrong(batch: Batch) -> Any:
        return result

    with pytest.raises(FeatureError, match=rf"feature wrong, ordinals 10-11: .*{message}"):
        compute(_own(wrong), batch_of(noise(2, 8)), ["samples"])


def test_an_exception_keeps_its_type_cause_and_ordinals() -> None:
    def broken(batch: Batch) -> Batch:
        raise ZeroDivisionError("no samples")

    with pytest.raises(FeatureError, match="broken, ordinal 10: ZeroDivisionError: no sam") as info:
        compute(_own(broken), batch_of(noise(1, 8)), ["samples"])
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_groups_that_disagree_are_refused() -> None:
    def by_length(batch: Batch, *, how: str) -> Batch:
        short = batch["samples"].shape[-1] < 4
        rows = len(batch["ordinal"])
        if how == "dtype":
            return {"x": np.zeros(rows, "f4" if short else "f8")}
        if how == "names":
            return {"x": np.zeros(rows)} if short else {"y": np.zeros(rows)}
        return {"x": np.zeros((rows, 2) if short else rows)}

    batch = batch_of([noise(3), noise(5)])
    with pytest.raises(FeatureError, match="'x' is float32 with 0 axes and float64 with 0 axes"):
        compute(_own(by_length, how="dtype"), batch, ["samples"])
    with pytest.raises(FeatureError, match="returned x, y for some lengths only"):
        compute(_own(by_length, how="names"), batch, ["samples"])
    with pytest.raises(FeatureError, match="0 axes and float64 with 1 axes"):
        compute(_own(by_length, how="axes"), batch, ["samples"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("power_spectrum", {"nperseg": 0}, "nperseg must be a positive integer, not 0"),
        ("power_spectrum", {"nperseg": 8.0}, "nperseg must be a positive integer"),
        ("power_spectrum", {"noverlap": 256}, "noverlap must be an integer from 0 to nperseg - 1"),
        ("power_spectrum", {"nfft": 100}, "nfft must be an integer of at least nperseg=256"),
        ("power_spectrum", {"window": "hamn"}, "window 'hamn': "),
        ("power_spectrum", {"detrend": "cubic"}, "detrend must be"),
        ("power_spectrum", {"scaling": "dB"}, "scaling must be density or spectrum"),
        ("power_spectrum", {"sample_rate_hz": 0}, "sample_rate_hz must be a positive number"),
        ("spectrogram", {"hop": 0}, "hop must be a positive integer"),
        ("statistics", {"column": "ordinal"}, "'ordinal' is not an array .* those are: samples"),
    ],
)
def test_wrong_option_values_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        run(name, noise(2, 300), **options)


def test_the_column_must_be_chosen_where_there_are_several() -> None:
    batch = batch_of(noise(2, 30), other=noise(2, 50))
    with pytest.raises(SpecError, match="choose one of samples, other"):
        compute(resolve_feature("statistics", {}), batch, ["samples", "other"])
    chosen = compute(
        resolve_feature("statistics", {"column": "other"}), batch, ["samples", "other"]
    )
    close(chosen["max"], batch["other"].max(-1))
    with pytest.raises(FeatureError, match="a record without samples has no spectrum"):
        run("power_spectrum", np.zeros((2, 0), "f4"))


# --- references --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("power_spektrum", {}, "did you mean power_spectrum.*raw, power_spectrum, spectrogram"),
        ("no_such_package.mod:f", {}, "there is no module 'no_such_package'"),
        ("signal_batch.nothing:f", {}, "there is no module 'signal_batch.nothing'"),
        ("signal_batch.features:reslove_feature", {}, "did you mean resolve_feature"),
        ("signal_batch.features:SUPPORTED_DTYPES", {}, "is a tuple, not a function"),
        ("statistics", {"colum": "x"}, "no option 'colum'; it takes column"),
        ("raw", {"x": 1}, "no option 'x'; it takes none"),
        ("os:getcwd", {}, "must take the batch as its first argument"),
    ],
)
def test_a_wrong_reference_says_what_is_wrong(
    reference: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        resolve_feature(reference, options)


OWN = """
import numpy as np
from signal_batch import feature

FACTOR = 2

@feature(equal_lengths=False)
def scaled(batch, *, by, extra=0):
    return {"length": np.array([len(x) * by * FACTOR for x in batch["samples"]])}

def anything(batch, **options):
    return {"sum": batch["samples"].sum(-1) * options["factor"]}
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_features", "own_broken"):
        sys.modules.pop(name, None)
    path = tmp_path / "own_features.py"
    path.write_text(OWN)
    return path


def test_a_function_of_ones_own(own_module: Path) -> None:
    found = resolve_feature("own_features:scaled", {"by": 3})
    assert (found.name, found.equal_lengths) == ("scaled", False)
    result = compute(found, batch_of([noise(3), noise(5)]), ["samples"])
    assert result["length"].tolist() == [18, 30]
    with pytest.raises(SpecError, match="needs the option 'by'"):
        resolve_feature("own_features:scaled", {})
    with pytest.raises(SpecError, match="no option 'bye'; it takes by, extra"):
        resolve_feature("own_features:scaled", {"by": 1, "bye": 2})
    free = resolve_feature("own_features:anything", {"factor": 2})
    assert compute(free, batch_of(np.ones((1, 4))), ["samples"])["sum"].tolist() == [8.0]


def test_the_source_hash_follows_the_whole_file_and_not_the_place(own_module: Path) -> None:
    before = resolve_feature("own_features:scaled", {"by": 3}).source_sha256
    assert before == resolve_feature("own_features:scaled", {"by": 4}).source_sha256
    own_module.write_text(OWN.replace("FACTOR = 2", "FACTOR = 3"))
    assert before != resolve_feature("own_features:scaled", {"by": 3}).source_sha256
    hashes = {resolve_feature(name, {}).source_sha256 for name in BUILT_IN}
    assert len(hashes) == len(BUILT_IN)


def test_a_module_that_fails_to_import_says_why(own_module: Path) -> None:
    broken = own_module.with_name("own_broken.py")
    broken.write_text("import no_such_library\n")
    with pytest.raises(SpecError, match="importing own_broken failed: No module named 'no_such_l"):
        resolve_feature("own_broken:f", {})
    sys.modules.pop("own_broken", None)
    broken.write_text("1 / 0\n")
    with pytest.raises(SpecError, match="importing own_broken failed: ZeroDivisionError"):
        resolve_feature("own_broken:f", {})


def test_a_function_cannot_change_what_is_carried(tmp_path: Path) -> None:
    def hostile(batch: Batch) -> Batch:
        batch["gain"] *= 0
        return {"peak": np.abs(batch["samples"]).max(-1)}

    batch = batch_of(noise(2, 64), gain=np.array([1.0, 2.0]))
    own = replace(resolve_feature("raw", {}), function=hostile, reference="own:hostile")
    with pytest.raises(FeatureError, match="read-only"):
        compute(own, batch, ["samples"])
    assert batch["gain"].tolist() == [1.0, 2.0]


def test_a_buffer_used_again_does_not_change_an_earlier_batch() -> None:
    buffer = np.empty(2)

    def reusing(batch: Batch) -> Batch:
        buffer[:] = batch["ordinal"]
        return {"peak": buffer}

    own = replace(resolve_feature("raw", {}), function=reusing, reference="own:reusing")
    first = compute(own, batch_of(noise(2, 8)), ["samples"])
    later = batch_of(noise(2, 8))
    later["ordinal"] = np.array([90, 91])
    compute(own, later, ["samples"])
    assert first["peak"].tolist() == [10.0, 11.0]


@pytest.mark.parametrize("exc", [SystemExit(0), GeneratorExit(), MemoryError()])
def test_a_function_that_leaves_is_a_failure(exc: BaseException) -> None:
    def leaving(batch: Batch) -> Batch:
        raise exc

    own = replace(resolve_feature("raw", {}), function=leaving, reference="own:leaving")
    with pytest.raises(FeatureError, match=type(exc).__name__):
        compute(own, batch_of(noise(2, 8)), ["samples"])
