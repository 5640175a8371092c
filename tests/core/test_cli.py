"""The command line: every command's happy path, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import signal_dataset as sds
import yaml

from signal_batch import job as steps
from signal_batch import planning
from signal_batch.cli import main
from signal_batch.cli_options import Runners
from signal_batch.job import Outcome
from signal_batch.pins import pin_dataset
from signal_batch.planning import prepare
from signal_batch.specs import ExportSpec
from signal_batch.training_runner import train
from signal_batch.worker import work

Run = Callable[..., tuple[int, str, str]]


def export_here(spec: ExportSpec, *, on_progress: Any) -> Outcome:
    """`signal_batch.export` with the worker's work done in this process."""
    job = steps.claim(prepare(spec))
    progress = steps.progress_of(job)
    if progress.manifest is not None:
        return Outcome(progress.manifest, already_complete=True)
    for shard in progress.shards:
        work(job.order(shard), lambda event: on_progress(event.get("rows", 0)))
    return Outcome(steps.commit(job))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(argument, ...)` in an empty folder: exit code, stdout and stderr of a command."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, workers: bool = False) -> tuple[int, str, str]:
        capsys.readouterr()
        options: dict[str, Any] = {} if workers else {"runners": Runners(export_here, train)}
        try:
            code = main(list(map(str, arguments)), **options)
        except SystemExit as exc:  # argparse ends this way
            code = int(exc.code or 0)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        return code, shown.out, shown.err

    return call


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- export ------------------------------------------------------------------------------------


def test_export_with_every_option(run: Run, iq_root: Path, tmp_path: Path) -> None:
    code, out, err = run(
        *("export", iq_root, "out", "--column", "field:samples"),
        *("--column", "label=annotation:truth-v1/label:int32"),
        *("--where", "metadata:snr_db >= 5", "--where", "annotation:review-v1 status success"),
        *("--features", "power_spectrum", "--feature-arg", "nperseg=32"),
        *("--feature-arg", "scaling=spectrum", "--workers", 2, "--part-size", "32KB"),
        *("--row-group-size", "16KB", "--batch-size", 16, "--compression", "snappy"),
        *("--tensors", "nested", "--on-error", "quarantine", "--max-bad", 0.5, "--retries", 1),
        *("--timeout", 300, "--safe-decode", "--write-pin", "pin.json"),
        workers=True,
    )
    assert (code, err) == (0, "")
    dataset = sds.open(str(iq_root))
    review = dataset.annotations["review-v1"]
    chosen = [
        i
        for i in range(200)
        if dataset[i].metadata["snr_db"] >= 5 and review[i].status.value == "success"
    ]
    rows = duckdb.sql(f"select ordinal from '{tmp_path}/out/data/*.parquet' order by 1").fetchall()
    assert [row[0] for row in rows] == chosen
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert out.startswith(f"out: {len(chosen)} rows in {len(manifest['files'])} Parquet files")
    assert manifest["run_key"][:16] in out
    assert manifest["spec"]["feature_args"] == {"nperseg": 32, "scaling": "spectrum"}
    assert json.loads((tmp_path / "pin.json").read_text())["record_count"] == 200


def test_a_second_run_says_that_there_was_nothing_to_do(run: Run, iq_root: Path) -> None:
    command = ("export", iq_root, "out", "--column", "metadata:snr_db")
    assert run(*command)[0] == 0
    code, out, _ = run(*command)
    assert code == 0
    assert "it was complete already; nothing was done" in out


def test_another_spec_at_the_same_place(run: Run, iq_root: Path, tmp_path: Path) -> None:
    run("export", iq_root, "out", "--column", "metadata:snr_db")
    before = files_below(tmp_path)
    code, out, err = run("export", iq_root, "out", "--column", "metadata:snr_db", "--batch-size", 7)
    assert (code, out) == (2, "")
    assert "spec.batch_size: there the default, here 7" in err
    assert files_below(tmp_path) == before


def test_a_dry_run_tells_all_and_writes_nothing(run: Run, iq_root: Path, tmp_path: Path) -> None:
    command = ("export", iq_root, "out", "--column", "field:samples", "--part-size", "32KB")
    command += ("--column", "annotation:truth-v1/label", "--batch-size", "8")
    code, out, err = run(*command, "--dry-run")
    assert (code, err) == (0, "")
    assert files_below(tmp_path) == []
    spec = ExportSpec.model_validate(
        {
            "dataset": str(iq_root),
            "output": "out",
            "columns": ["field:samples", "annotation:truth-v1/label"],
            "part_bytes": "32KB",
            "batch_size": 8,
        }
    )
    job = prepare(spec)
    assert job.run_key in out
    assert job.pin.fingerprint[:16] in out
    assert "selected      200 of 200 records" in out
    assert f"parts         {len(job.parts)} of up to" in out
    assert "would write   200 rows, about 2" in out
    assert "would skip    0 parts, 0 rows" in out
    assert "samples: fixed_size_list" in out

    claimed = steps.claim(job)
    shard = steps.progress_of(claimed).shards[0]
    work(claimed.order(shard), lambda event: None)
    before = files_below(tmp_path)
    _, out, _ = run(*command, "--dry-run")
    assert f"would skip    {len(shard.parts)} parts, {shard.rows} rows" in out
    assert f"would write   {200 - shard.rows} rows" in out
    assert files_below(tmp_path) == before
    run(*command)
    _, out, _ = run(*command, "--dry-run")
    assert "would write   0 rows" in out
    assert "the output is complete already" in out


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_spec_file_and_options_that_win_over_it(
    run: Run, iq_root: Path, tmp_path: Path, kind: str
) -> None:
    fields = {
        "dataset": str(iq_root),
        "output": "out",
        "columns": ["field:samples", "snr=metadata:snr_db"],
        "features": "statistics",
        "part_bytes": "4KB",
        "execution": {"workers": 1, "retries": 0},
    }
    dump = {"yaml": yaml.safe_dump, "json": json.dumps}[kind]
    (tmp_path / f"spec.{kind}").write_text(dump(fields))
    options = ("--spec", f"spec.{kind}", "--batch-size", 16, "--workers", 2)
    code, _, err = run("export", *options, "--where", "ordinal < 50")
    assert (code, err) == (0, "")
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["totals"]["rows"] == 50
    spec = manifest["spec"]
    assert (spec["batch_size"], spec["features"], spec["where"]) == (
        16,
        "statistics",
        ["ordinal < 50"],
    )
    assert (spec["execution"]["workers"], spec["execution"]["retries"]) == (2, 0)
    other = run("export", iq_root, "elsewhere", "--spec", f"spec.{kind}")
    assert other[0] == 0
    assert (tmp_path / "elsewhere" / "_manifest.json").exists()


def test_a_pin_reproduces_a_run_and_refuses_other_data(
    run: Run, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    labels = {"a": [("success", {"y": i}) for i in range(20)]}
    one = write_dataset(tmp_path / "one", annotations=labels)
    columns = ("--column", "field:samples", "--column", "annotation:a/y")
    code, _, err = run("export", one, "first", *columns, "--write-pin", "pin.json")
    assert (code, err) == (0, "")
    code, _, _ = run("export", one, "second", *columns, "--pin", "pin.json")
    assert code == 0
    first, second = (
        json.loads((tmp_path / name / "_manifest.json").read_text()) for name in ("first", "second")
    )
    assert first["run_key"] == second["run_key"]
    assert first["files"] == second["files"]

    two = write_dataset(tmp_path / "two", 21, snapshot_id="s2")
    code, _, err = run("export", two, "third", "--column", "field:samples", "--pin", "pin.json")
    assert code == 1
    assert "is not what was pinned" in err
    assert "snapshot: pinned s1, found s2" in err
    assert "records: pinned 20, found 21" in err
    assert not (tmp_path / "third").exists()
    code, _, err = run("export", one, "x", "--column", "annotation:b/y", "--pin", "pin.json")
    assert code == 2
    assert "does not pin annotation set b" in err


def test_progress_is_silent_where_nobody_watches(run: Run, iq_root: Path) -> None:
    _, out, err = run("export", iq_root, "out", "--column", "metadata:snr_db")
    assert err == ""
    assert "\x1b" not in out


def test_a_feature_in_the_current_folder(run: Run, iq_root: Path, tmp_path: Path) -> None:
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def mine(batch, *, k=1):\n    return {'m': k * batch['samples'].real.mean((1, 2))}\n"
    )
    code, _, err = run(
        *("export", iq_root, "out", "--column", "field:samples", "--workers", 1),
        *("--features", f"{name}:mine", "--feature-arg", "k=3"),
        workers=True,
    )
    assert (code, err) == (0, "")
    found = duckdb.sql(f"select m from '{tmp_path}/out/data/*.parquet' order by ordinal").fetchall()
    dataset = sds.open(str(iq_root))
    wanted = [3 * dataset[i]["samples"].data.real.mean() for i in range(200)]
    np.testing.assert_allclose([row[0] for row in found], wanted, rtol=1e-3, atol=1e-5)


def test_a_failing_job_is_exit_code_1_and_one_line(run: Run, iq_root: Path, tmp_path: Path) -> None:
    name = f"bad_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("def bad(batch):\n    return {'m': 1 / 0}\n")
    code, out, err = run(
        "export", iq_root, "out", "--column", "field:samples", "--features", f"{name}:bad"
    )
    assert (code, out) == (1, "")
    assert err.startswith("signal-batch: feature bad, ordinals 0-199: ZeroDivisionError")
    assert err.count("\n") == 1


# --- mistakes ----------------------------------------------------------------------------------

COLUMN = ("--column", "field:samples")
MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no dataset": (("{none}", "out", *COLUMN), "the path does not exist"),
    "a file as dataset": (("{file}", "out", *COLUMN), "is a file"),
    "an empty folder": (("{empty}", "out", *COLUMN), "holds no root.json"),
    "scheme of the dataset": (("ftp://host/ds", "out", *COLUMN), "scheme ftp"),
    "no arguments": ((), "no dataset given"),
    "no output": (("{iq}",), "no output given"),
    "no column": (("{iq}", "out"), "at least one column"),
    "selector": (("{iq}", "out", "--column", "filed:samples"), "starts with 'filed'"),
    "empty column": (("{iq}", "out", "--column", ""), "starts with ''"),
    "half a selector": (("{iq}", "out", "--column", "annotation:truth-v1"), "SET/KEY"),
    "dtype": (("{iq}", "out", "--column", "metadata:snr_db:complex64"), "dtype"),
    "dtype that loses": (("{iq}", "out", "--column", "field:samples:float32"), "convert"),
    "column name": (("{iq}", "out", "--column", "a b=metadata:snr_db"), "column name"),
    "column twice": (("{iq}", "out", *COLUMN, *COLUMN), "unique"),
    "annotation set": (("{iq}", "out", "--column", "annotation:no/label"), "no annotation set"),
    "feature": (("{iq}", "out", *COLUMN, "--features", "power_spectrm"), "mean power_spectrum"),
    "feature module": (("{iq}", "out", *COLUMN, "--features", "no_such:f"), "no module"),
    "feature attribute": (("{iq}", "out", *COLUMN, "--features", "math:no"), "no attribute"),
    "not a function": (("{iq}", "out", *COLUMN, "--features", "math:pi"), "not a function"),
    "no batch": (("{iq}", "out", *COLUMN, "--features", "os:getcwd"), "first argument"),
    "feature argument": (("{iq}", "out", *COLUMN, "--feature-arg", "nperseg"), "KEY=VALUE"),
    "feature option": (("{iq}", "out", *COLUMN, "--feature-arg", "np=3"), "no option 'np'"),
    "option's value": (
        ("{iq}", "out", *COLUMN, "--features", "power_spectrum", "--feature-arg", "nperseg=-3"),
        "positive integer",
    ),
    "not a number": (("{iq}", "out", *COLUMN, "--feature-arg", "k=NaN"), "NaN or an infinity"),
    "no JSON": (
        ("{iq}", "out", *COLUMN, "--features", "power_spectrum", "--feature-arg", "detrend=[NaN]"),
        "NaN or an infinity",
    ),
    "filter": (("{iq}", "out", *COLUMN, "--where", "snr_db>5"), "a filter reads"),
    "filter operator": (("{iq}", "out", *COLUMN, "--where", "metadata:snr_db => 5"), "=>"),
    "filter type": (("{iq}", "out", *COLUMN, "--where", "metadata:snr_db > high"), "compares"),
    "filter status": (
        ("{iq}", "out", *COLUMN, "--where", "annotation:review-v1 status good"),
        "no status",
    ),
    "filter on samples": (("{iq}", "out", *COLUMN, "--where", "field:samples > 1"), "not samples"),
    "nothing selected": (("{iq}", "out", *COLUMN, "--where", "ordinal < 0"), "no record"),
    "size": (("{iq}", "out", *COLUMN, "--part-size", "12 parsecs"), "not a size"),
    "size of zero": (("{iq}", "out", *COLUMN, "--row-group-size", "0"), "at least one byte"),
    "batch size": (("{iq}", "out", *COLUMN, "--batch-size", "0"), "greater than or equal to 1"),
    "batch size in words": (("{iq}", "out", *COLUMN, "--batch-size", "many"), "invalid int"),
    "workers": (("{iq}", "out", *COLUMN, "--workers", "-1"), "workers"),
    "retries": (("{iq}", "out", *COLUMN, "--retries", "-1"), "retries"),
    "timeout": (("{iq}", "out", *COLUMN, "--timeout", "0"), "timeout_s"),
    "share": (("{iq}", "out", *COLUMN, "--max-bad", "1.5"), "max_bad_fraction"),
    "no share": (("{iq}", "out", *COLUMN, "--max-bad", "nan"), "max_bad_fraction"),
    "compression": (("{iq}", "out", *COLUMN, "--compression", "rar"), "compression"),
    "tensors": (("{iq}", "out", *COLUMN, "--tensors", "flat"), "tensors"),
    "policy": (("{iq}", "out", *COLUMN, "--on-error", "ignore"), "on_error"),
    "ragged": (("{iq}", "out", *COLUMN, "--ragged", "nothing"), "no such array"),
    "pin": (("{iq}", "out", *COLUMN, "--pin", "no.json"), "not a readable pin"),
    "pin that is none": (("{iq}", "out", *COLUMN, "--pin", "{file}"), "not a readable pin"),
    "pin to nowhere": (("{iq}", "out", *COLUMN, "--write-pin", "no/pin.json"), "no/pin.json"),
    "spec file": (("--spec", "no.yaml"), "no.yaml cannot be read"),
    "output location": (("{iq}", "nosuch://x/y", *COLUMN), "nosuch"),
    "output is a file": (("{iq}", "{file}", *COLUMN), "is a file"),
    "output below a file": (("{iq}", "{file}/out", *COLUMN), "is a file"),
    "output has other things": (("{iq}", "{full}", *COLUMN), "not empty"),
    "unknown option": (("{iq}", "out", *COLUMN, "--colour", "red"), "unrecognized"),
}


@pytest.fixture
def places(iq_root: Path, tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "places"
    for name in ("empty", "full"):
        (folder / name).mkdir(parents=True)
    (folder / "file").write_text("precious: [")
    (folder / "full" / "thesis").write_text("precious")
    names = ("none", "file", "empty", "full")
    return {"iq": str(iq_root)} | {name: str(folder / name) for name in names}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    run: Run, places: dict[str, str], tmp_path: Path, mistake: str
) -> None:
    arguments, words = MISTAKES[mistake]
    before = files_below(tmp_path)
    code, out, err = run("export", *(text.format_map(places) for text in arguments))
    assert code == 2, err
    assert words in err
    assert out == ""
    assert files_below(tmp_path) == before
    if not err.startswith("usage:"):
        assert err.startswith("signal-batch: ")
        assert err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold the fields"),
        ("- a\n- b\n", "must hold the fields"),
        ("{", "cannot be read"),
        ("\x00", "cannot be read"),
        ("colour: red\n", "colour"),
        ("batch_size: many\n", "batch_size"),
        ("batch_size: [1]\n", "batch_size"),
        ("columns: 7\n", "columns"),
        ("columns: {a: b}\n", "columns"),
        ("columns: [1, 2]\n", "columns"),
        ("columns: [{name: x}]\n", "columns"),
        ("columns: [{name: x, selector: 5}]\n", "columns"),
        ("where: 3\n", "where"),
        ("where: [3]\n", "where"),
        ("feature_args: [nperseg]\n", "feature_args"),
        ("features: statistics\nfeature_args: {column: 2020-01-01}\n", "feature_args"),
        ("features: statistics\nfeature_args: {column: .nan}\n", "feature_args"),
        ("features: null\n", "features"),
        ("dataset: 2020-01-01\n", "dataset"),
        ("dataset: null\n", "dataset"),
        ("part_bytes: true\n", "size"),
        ("part_bytes: 1.5\n", "size"),
        ("execution: fast\n", "execution"),
        ("execution: [1]\n", "execution"),
        ("execution: {threads: 3}\n", "threads"),
        ("execution: {workers: two}\n", "workers"),
        ("1: 2\n", "1"),
        ("output: {a: b}\n", "output"),
        ('output: "nul\\0byte"\n', "no place to write to"),
        ("pin: 3\n", "pin"),
        ("max_bad_fraction: .inf\n", "max_bad_fraction"),
    ],
)
@pytest.mark.parametrize("overriding", [False, True])
def test_a_spec_file_of_nonsense(
    run: Run, iq_root: Path, tmp_path: Path, text: str, words: str, overriding: bool
) -> None:
    given = yaml.safe_load(text) if text not in ("{", "\x00") else None
    fields = {"dataset": str(iq_root), "output": "out", "columns": ["field:samples"]}
    if isinstance(given, dict):
        absent = {name: value for name, value in fields.items() if name not in given}
        text = yaml.safe_dump(absent) + text
    (tmp_path / "spec.yaml").write_text(text)
    options = ("--retries", "2") if overriding else ()
    code, out, err = run("export", "--spec", "spec.yaml", *options)
    assert code == 2, err
    assert words in err
    assert out == ""
    assert err.count("\n") == 1 or "cannot be read" in err
    assert files_below(tmp_path) == ["spec.yaml"]


@pytest.mark.parametrize("command", ["export", "validate", "inspect", "verify", "synth"])
@pytest.mark.parametrize("uri", ["s3://key:hunter2@bucket/x", "s3://bucket/x?token=hunter2"])
def test_credentials_in_a_uri_are_refused_and_not_repeated(
    run: Run, command: str, uri: str
) -> None:
    more = {"export": ("out", *COLUMN), "synth": ("--records", "1")}.get(command, ())
    code, out, err = run(command, uri, *more)
    assert code == 2
    assert "credentials" in err
    assert "hunter2" not in out + err


def test_credentials_in_the_output_are_not_repeated(run: Run, iq_root: Path) -> None:
    code, out, err = run("export", iq_root, "s3://key:hunter2@bucket/x", *COLUMN)
    assert code == 2
    assert "hunter2" not in out + err


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '{"a": [NaN]}'])
def test_an_option_that_has_no_json(run: Run, iq_root: Path, tmp_path: Path, value: str) -> None:
    name = f"any_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "def any(batch, *, k):\n    return {'m': batch['ordinal'] * 1.0}\n"
    )
    options = ("--features", f"{name}:any", "--feature-arg", f"k={value}")
    code, _, err = run("export", iq_root, "out", *COLUMN, *options)
    assert code == 2
    assert "feature_args holds NaN or an infinity" in err
    assert not (tmp_path / "out").exists()


# --- the other commands ------------------------------------------------------------------------


def test_validate(run: Run, iq_root: Path, tmp_path: Path) -> None:
    pin = pin_dataset(str(iq_root), ["review-v1"]).pin
    code, out, err = run(
        "validate", iq_root, "--annotations", "review-v1", "--deep", "--write-pin", "pin.json"
    )
    assert (code, err) == (0, "")
    assert pin.fingerprint in out
    assert "200 in 5 shards" in out
    assert "samples: complex64 2x64 (channel x time)" in out
    assert "sound, every record decoded" in out
    assert "other sets    truth-v1" in out
    review = sds.open(str(iq_root)).annotations["review-v1"]
    statuses = [review[i].status.value for i in range(200)]
    assert f"{statuses.count('success')} success" in out
    assert json.loads((tmp_path / "pin.json").read_text())["fingerprint"] == pin.fingerprint
    assert run("validate", iq_root, "--expect", pin.fingerprint)[0] == 0


def test_validate_as_json(run: Run, iq_root: Path) -> None:
    code, out, err = run("validate", iq_root, "--annotations", "review-v1", "truth-v1", "--json")
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert value["pin"]["fingerprint"] == pin_dataset(str(iq_root)).pin.fingerprint
    assert value["faults"] == []
    assert value["statuses"]["truth-v1"] == {"success": 200}
    assert value["fields"]["samples"]["dtypes"] == ["complex64"]


def test_validate_names_what_is_wrong(run: Run, iq_copy: Path, tmp_path: Path) -> None:
    code, _, err = run("validate", iq_copy, "--expect", "0" * 64)
    assert code == 1
    assert "not 000" in err
    assert run("validate", iq_copy, "--annotations", "none")[0] == 2
    assert run("validate", "nowhere")[0] == 2
    assert run("validate", iq_copy, "--write-pin", "no/pin.json")[0] == 2
    entry, _ = sds.open(str(iq_copy))._index.locate(50)
    (iq_copy / entry.data.path).unlink()
    code, out, err = run("validate", iq_copy, "--write-pin", "pin.json")
    assert code == 1
    assert f"{entry.data.path} is missing" in err
    assert "NOT sound" in out
    assert not (tmp_path / "pin.json").exists()
    code, out, _ = run("validate", iq_copy, "--json")
    assert code == 1
    assert len(json.loads(out)["faults"]) == 1


def test_synth(run: Run, tmp_path: Path) -> None:
    command = ("synth", "captures", "--records", 6, "--shape", "2x32", "--seed", 3)
    code, out, err = run(*command, "--records-per-shard", 4)
    assert (code, err) == (0, "")
    assert out == "captures: 6 captures of 2x32, sets review-v1, truth-v1\n"
    dataset = sds.open(str(tmp_path / "captures"))
    assert len(dataset) == 6
    assert dataset[5]["samples"].data.shape == (2, 32)
    assert run(*command, "--records-per-shard", 4)[0] == 0
    code, _, err = run(*command, "--records-per-shard", 3)
    assert code == 2
    assert "already holds another dataset" in err


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--records", "0"),
        ("--records", "-1"),
        ("--records", "many"),
        ("--records", "1", "--shape", "2by3"),
        ("--records", "1", "--shape", "0x3"),
        ("--records", "1", "--seed", "-1"),
        ("--records", "1", "--records-per-shard", "0"),
    ],
)
def test_synth_of_nonsense(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    code, _, err = run("synth", "captures", *options)
    assert code == 2
    assert err
    assert files_below(tmp_path) == []


def test_inspect_a_dataset(run: Run, iq_root: Path) -> None:
    code, out, err = run("inspect", iq_root)
    assert (code, err) == (0, "")
    assert "annotations   truth-v1: 200 success" in out
    assert "metadata      " in out
    assert "sound" not in out
    _, out, _ = run("inspect", iq_root, "--annotations", "truth-v1")
    assert "other sets    review-v1" in out


def test_inspect_an_output(run: Run, iq_root: Path, tmp_path: Path) -> None:
    run("export", iq_root, "out", *COLUMN, "--batch-size", 8, "--part-size", "32KB")
    code, out, err = run("inspect", "out")
    assert (code, err) == (0, "")
    assert out.startswith("out: 200 rows in ")
    assert f"from {iq_root}, features raw" in out
    assert "ordinal: int64" in out
    (tmp_path / "out" / "_manifest.json").unlink()
    (tmp_path / "out" / "_receipts" / "part-00001.json").unlink()
    count = len(list((tmp_path / "out" / "data").iterdir()))
    code, out, err = run("inspect", "out")
    assert (code, err) == (0, "")
    assert f"out: not complete, {count - 1} of {count} parts are written" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [("none", "does not exist"), ("empty", "root.json"), ("file", "file"), ("full", "root.json")],
)
def test_inspect_something_else(run: Run, places: dict[str, str], name: str, words: str) -> None:
    code, _, err = run("inspect", places[name])
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["_manifest.json", "_spec.json"])
@pytest.mark.parametrize("content", ["{", "{}", '{"plan": 3}', '{"plan": {}, "totals": {}}'])
def test_inspect_and_verify_a_damaged_output(
    run: Run, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    for command in ("inspect", "verify"):
        code, _, err = run(command, "out")
        assert code in (1, 2), command
        assert err


def test_the_demo(run: Run, tmp_path: Path) -> None:
    code, out, err = run("demo", "show")
    assert (code, err) == (0, "")
    output = tmp_path / "show" / "features"
    assert "640 rows" in out
    assert f"in DuckDB: SELECT label, count(*) FROM '{output}/data/*.parquet' GROUP BY ALL" in out
    counts = duckdb.sql(f"select label, count(*) from '{output}/data/*.parquet' group by all")
    assert len(counts.fetchall()) == 9
    assert run("verify", output)[0] == 0
    code, out, _ = run("demo", "show")
    assert code == 0
    assert "complete already" in out
    (tmp_path / "file").touch()
    code, _, err = run("demo", "file")
    assert code == 2
    assert "is a file" in err


@pytest.mark.parametrize(
    "command", ["export", "validate", "verify", "inspect", "synth", "demo", None]
)
def test_help(run: Run, command: str | None) -> None:
    code, out, err = run(*([command] if command else []), "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: signal-batch")
    assert len(out.splitlines()) > 5
    for line in out.splitlines():
        option = line.strip().split("  ")
        if option[0].startswith("--") and not option[0].endswith("]"):
            assert len(line) < 100


def test_every_option_of_export_says_what_it_does(run: Run) -> None:
    _, out, _ = run("export", "--help")
    for name in ("column", "where", "features", "feature-arg", "workers", "part-size", "dry-run"):
        assert f"--{name}" in out
    assert "examples:" in out


def test_no_command_and_an_unknown_one(run: Run) -> None:
    for arguments in ((), ("exprot",)):
        code, _, err = run(*arguments)
        assert code == 2
        assert err.startswith("usage:")


def test_ctrl_c_while_planning(run: Run, iq_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "pin_inputs", interrupted)
    code, _, err = run("export", iq_root, "out", *COLUMN)
    assert code == 1
    assert err.startswith("signal-batch: stopped")


def test_a_reader_that_goes_away_is_no_error(iq_root: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "signal_batch", "validate", str(iq_root), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    err = program.stderr.read()
    program.stderr.close()
    assert program.wait(60) in (0, 1)
    assert "Traceback" not in err


def test_no_secret_ends_up_anywhere(
    run: Run, iq_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"hunter2-{time.time_ns()}"
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MY_PASSWORD"):
        monkeypatch.setenv(name, secret)
    shown = run("export", iq_root, "out", *COLUMN, "--write-pin", "p")
    shown += run("export", iq_root, "nosuch://x/y", *COLUMN)
    assert secret not in str(shown)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes()
