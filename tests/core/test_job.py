"""Planning, claiming, resuming and committing: nothing is redone, nothing is written in vain."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import signal_dataset as sds

import signal_batch
from signal_batch import store as store_module
from signal_batch.errors import (
    CorruptDatasetError,
    DamagedOutputError,
    InputError,
    OutputConflictError,
    OutputError,
)
from signal_batch.export import PartExporter
from signal_batch.frozen import checked
from signal_batch.job import ExportJob, claim, commit, peek, progress_of
from signal_batch.plan import Shard
from signal_batch.planning import prepare
from signal_batch.specs import ExportSpec
from signal_batch.store import OutputStore
from signal_batch.worker import work


def spec_of(dataset: Path, output: Path, **fields: Any) -> ExportSpec:
    defaults: dict[str, Any] = {
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        "batch_size": 8,
        "part_bytes": "24KB",
    }
    locations = {"dataset": str(dataset), "output": str(output)}
    return checked(ExportSpec, defaults | locations | fields)


def export_here(spec: ExportSpec, *, parts: int | None = None) -> ExportJob:
    """Claim and write the first `parts` parts that are missing, in this process."""
    job = claim(prepare(spec))
    shards = progress_of(job).shards
    chosen = [part for shard in shards for part in shard.parts][:parts]
    if chosen:
        work(job.order(replace(shards[0], parts=tuple(chosen))), lambda event: None)
    return job


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Identity and time of every file below a folder, notes for people aside."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name not in ("_attempts", "_errors")
    }


def digests(manifest: dict[str, Any]) -> list[tuple[int, str]]:
    return [(entry["part"], entry["logical_digest"]) for entry in manifest["files"]]


@pytest.fixture(scope="module")
def undisturbed(iq_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The manifest of a run in one go."""
    return commit(export_here(spec_of(iq_root, tmp_path_factory.mktemp("whole") / "out")))


# --- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_resumed_run_writes_only_the_rest(
    iq_root: Path, tmp_path: Path, undisturbed: dict[str, Any], done: int
) -> None:
    spec = spec_of(iq_root, tmp_path / "out")
    export_here(spec, parts=done)
    before = stamps(tmp_path / "out")
    progress = progress_of(claim(prepare(spec)))
    total = len(undisturbed["files"])
    assert sum(len(shard.parts) for shard in progress.shards) == total - done
    assert progress.done_rows == sum(entry["rows"] for entry in undisturbed["files"][:done])
    assert progress.manifest is None
    manifest = commit(export_here(spec))
    after = stamps(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert digests(manifest) == digests(undisturbed)
    assert manifest["totals"] == undisturbed["totals"]
    assert manifest["run_key"] == undisturbed["run_key"]
    assert signal_batch.verify(str(tmp_path / "out")).ok


def test_parts_missing_in_the_middle_are_filled_in(
    iq_root: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    commit(export_here(spec_of(iq_root, out)))
    for index in (2, 5):
        (out / "_receipts" / f"part-{index:05d}.json").unlink()
    (out / "_manifest.json").unlink()
    manifest = commit(export_here(spec_of(iq_root, out)))
    assert digests(manifest) == digests(undisturbed)
    assert signal_batch.verify(str(out)).ok


def test_a_finished_output_is_left_alone(iq_root: Path, tmp_path: Path) -> None:
    spec = spec_of(iq_root, tmp_path / "out")
    manifest = commit(export_here(spec))
    before = stamps(tmp_path / "out")
    outcome = signal_batch.export(spec)
    assert outcome.already_complete
    assert outcome.manifest == manifest
    assert stamps(tmp_path / "out") == before


def test_how_a_job_is_run_and_where_the_data_lies_are_no_other_job(
    iq_root: Path, tmp_path: Path
) -> None:
    spec = spec_of(iq_root, tmp_path / "out")
    export_here(spec, parts=2)
    moved = Path(shutil.copytree(iq_root, tmp_path / "moved"))
    execution = {"workers": 7, "retries": 0, "timeout_s": 60.0, "safe_decode": True}
    again = spec_of(moved, tmp_path / "out", execution=execution, max_bad_fraction=0.5)
    job = export_here(again)
    assert job.run_key == prepare(spec).run_key
    commit(job)
    assert signal_batch.verify(str(tmp_path / "out")).ok


def test_a_default_that_is_spelled_out_is_the_same_job(iq_root: Path, tmp_path: Path) -> None:
    short = prepare(spec_of(iq_root, tmp_path / "out"))
    long = prepare(
        spec_of(iq_root, tmp_path / "b", compression="zstd", features="raw", tensors="nested")
    )
    assert short.run_key == long.run_key


def test_the_plan_of_the_claim_stands(iq_root: Path, tmp_path: Path) -> None:
    """Another version may plan other parts; what is claimed is carried on with."""
    spec = spec_of(iq_root, tmp_path / "out")
    other = replace(prepare(spec), part_rows=3, batch_rows=2)
    claim(other)
    for job in (claim(prepare(spec)), peek(prepare(spec))):
        assert (job.part_rows, job.batch_rows) == (3, 2)
        assert job.schema.equals(other.schema, check_metadata=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda claimed: claimed.pop("plan"),
        lambda claimed: claimed.update(plan=None),
        lambda claimed: claimed["plan"].update(schema="bm9uc2Vuc2U="),
        lambda claimed: claimed["plan"].pop("part_rows"),
    ],
    ids=["no plan", "null", "schema", "part_rows"],
)
def test_a_damaged_claim_is_named(
    iq_root: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], Any]
) -> None:
    spec = spec_of(iq_root, tmp_path / "out")
    claim(prepare(spec))
    path = tmp_path / "out" / "_spec.json"
    claimed = json.loads(path.read_text())
    damage(claimed)
    path.write_text(json.dumps(claimed))
    with pytest.raises(DamagedOutputError, match=r"_spec\.json"):
        claim(prepare(spec))


# --- refusing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_size": 16}, "spec.batch_size: there 8, here 16"),
        ({"features": "statistics"}, 'spec.features: there the default, here "statistics"'),
        ({"columns": ["field:samples"]}, "spec.columns: there"),
        ({"compression": "gzip"}, 'spec.compression: there the default, here "gzip"'),
        ({"where": ["ordinal < 100"]}, "selection: there"),
        ({"on_error": "skip"}, 'spec.on_error: there the default, here "skip"'),
        ({"part_bytes": "8KB"}, "spec.part_bytes: there 24576, here 8192"),
    ],
    ids=str,
)
def test_another_spec_is_refused_with_what_differs(
    iq_root: Path, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    export_here(spec_of(iq_root, tmp_path / "out"), parts=1)
    before = stamps(tmp_path / "out")
    with pytest.raises(OutputConflictError) as caught:
        signal_batch.export(spec_of(iq_root, tmp_path / "out", **change))
    assert field in str(caught.value)
    assert caught.value.exit_code == 2
    assert stamps(tmp_path / "out") == before


def test_other_data_is_refused_with_what_differs(
    iq_root: Path, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    one = write_dataset(tmp_path / "one", 20)
    two = write_dataset(tmp_path / "two", 21)
    columns = ["field:samples"]
    export_here(spec_of(one, tmp_path / "out", columns=columns))
    with pytest.raises(OutputConflictError, match=r"data\.fingerprint: there"):
        claim(prepare(spec_of(two, tmp_path / "out", columns=columns)))


def test_a_folder_of_something_else_is_refused(iq_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("precious")
    with pytest.raises(OutputConflictError, match=r"notes\.txt"):
        signal_batch.export(spec_of(iq_root, out))
    assert list(stamps(out)) == ["notes.txt"]


def test_the_dataset_itself_is_no_output(iq_copy: Path) -> None:
    before = stamps(iq_copy)
    with pytest.raises(OutputConflictError):
        signal_batch.export(spec_of(iq_copy, iq_copy))
    assert stamps(iq_copy) == before


@pytest.mark.parametrize("below", ["", "sub/out"])
def test_an_output_that_is_a_file(iq_root: Path, tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(InputError, match="file") as caught:
        signal_batch.export(spec_of(iq_root, file / below))
    assert caught.value.exit_code == 2
    assert file.read_text() == "precious"


def test_a_plan_writes_nothing(iq_root: Path, tmp_path: Path) -> None:
    job = peek(prepare(spec_of(iq_root, tmp_path / "out")))
    assert len(job.parts) > 1
    assert progress_of(job).done_rows == 0
    assert not (tmp_path / "out").exists()


# --- committing --------------------------------------------------------------------------------


def test_what_no_receipt_names_is_removed_at_commit(
    iq_root: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """A late attempt of a dead worker wrote another file, and died while it wrote a third."""
    job = export_here(spec_of(iq_root, tmp_path / "out"))
    data = tmp_path / "out" / "data"
    (data / "part-00000-deadbeef0000.parquet").write_bytes(b"late")
    (data / "part-00001-deadbeef0000.parquet.0123.tmp").write_bytes(b"half")
    manifest = commit(job)
    assert sorted(path.name for path in data.iterdir()) == [
        entry["file"] for entry in manifest["files"]
    ]
    assert digests(manifest) == digests(undisturbed)
    assert signal_batch.verify(str(tmp_path / "out")).ok


def test_a_late_attempt_with_other_bytes_adopts_the_receipt_and_leaves_no_file(
    iq_root: Path, tmp_path: Path
) -> None:
    """Its own file would be a second copy of the rows, once the manifest is there."""
    job = export_here(spec_of(iq_root, tmp_path / "out"))
    part = job.parts[0]
    order = replace(
        job.order(Shard(1, 1, (part,))),
        spec=job.spec.model_copy(update={"compression": "none"}),
    )
    before = OutputStore(job.spec.output).listing("data")
    with PartExporter(order) as exporter:
        found = exporter.export(part, order.runs[0], lambda rows: None)
    assert found == OutputStore(job.spec.output).receipts()[0]
    assert OutputStore(job.spec.output).listing("data") == before


def test_a_commit_with_a_part_missing(iq_root: Path, tmp_path: Path) -> None:
    job = export_here(spec_of(iq_root, tmp_path / "out"), parts=3)
    with pytest.raises(DamagedOutputError, match=r"part-00003 has no receipt"):
        commit(job)
    assert not (tmp_path / "out" / "_manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run_key": "0" * 64}, "another plan"),
        ({"rows": 7}, "another plan"),
        ({"last_ordinal": 3}, "another plan"),
        ({"bytes": 1}, "names .* with 1 bytes"),
        ({"file": "part-00002-000000000000.parquet"}, "no such file"),
    ],
    ids=str,
)
def test_a_commit_holds_receipts_against_plan_and_files(
    iq_root: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    job = export_here(spec_of(iq_root, tmp_path / "out"))
    path = tmp_path / "out" / "_receipts" / "part-00002.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedOutputError, match=words):
        commit(job)
    assert not (tmp_path / "out" / "_manifest.json").exists()


def test_what_is_known_of_the_run_is_recorded_beside_the_identity(
    iq_root: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    job = export_here(spec_of(iq_root, tmp_path / "out"))
    manifest = commit(job, run={"flow_run_id": "abc"})
    assert manifest["run"] == {"flow_run_id": "abc"}
    assert manifest["run_key"] == undisturbed["run_key"]
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text()) == manifest


def test_a_dataset_that_vanishes_after_the_plan(iq_copy: Path, tmp_path: Path) -> None:
    spec = spec_of(iq_copy, tmp_path / "out")
    job = export_here(spec, parts=2)
    entry, _ = sds.open(str(iq_copy))._index.locate(100)
    (iq_copy / entry.data.path).unlink()
    with pytest.raises(CorruptDatasetError, match=f"{entry.data.path} is missing"):
        export_here(spec)
    assert len(OutputStore(job.spec.output).receipts()) >= 2
    assert not (tmp_path / "out" / "_manifest.json").exists()


# --- disks -------------------------------------------------------------------------------------


def test_a_disk_that_fills_up(
    iq_root: Path, tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, out = spec_of(iq_root, tmp_path / "out"), tmp_path / "out"
    sync, rounds = store_module._sync, []

    def full(path: str) -> None:
        rounds.append(path)
        if len(rounds) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(store_module, "_sync", full)
    with pytest.raises(OutputError, match=r"no space left for .*part-00003.*run the same command"):
        export_here(spec)
    monkeypatch.undo()
    before = stamps(out)
    assert len(list((out / "data").iterdir())) == 3
    manifest = commit(export_here(spec))
    after = stamps(out)
    assert {name: after[name] for name in before} == before
    assert digests(manifest) == digests(undisturbed)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount command")
def test_a_disk_that_really_fills_up(
    iq_root: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        spec = spec_of(iq_root, disk / "out", execution={"workers": 1})
        with pytest.raises(OutputError, match="no space left") as caught:
            signal_batch.export(spec)
        assert caught.value.exit_code == 1
        done = OutputStore(spec.output).receipts()
        assert 0 < len(done) < len(undisturbed["files"])
        files = {path.name: path.stat().st_size for path in (disk / "out" / "data").iterdir()}
        assert {receipt.file: receipt.bytes for receipt in done.values()}.items() <= files.items()
        assert len(files) - len(done) <= 1, "one may have found room, and its receipt none"
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        manifest = commit(export_here(spec))
        assert digests(manifest) == digests(undisturbed)
        assert signal_batch.verify(spec.output).ok
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("damage", ["gone", "short", "foreign manifest", "no totals"])
def test_a_complete_output_that_is_damaged_is_not_called_complete(
    iq_root: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    spec = spec_of(iq_root, out)
    commit(export_here(spec))
    part = next((out / "data").glob("part-00000-*"))
    manifest = json.loads((out / "_manifest.json").read_text())
    if damage == "gone":
        part.unlink()
    elif damage == "short":
        part.write_bytes(part.read_bytes()[:-1])
    elif damage == "foreign manifest":
        (out / "_manifest.json").write_text(json.dumps(manifest | {"run_key": "x"}))
    else:
        del manifest["totals"]
        (out / "_manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedOutputError, match="was complete, but"):
        progress_of(claim(prepare(spec)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("part_rows", -1), ("part_rows", 2.5), ("batch_rows", "5"), ("columns", ["x=metadata:y"])],
)
def test_a_claim_with_another_plan_is_damage(
    iq_root: Path, tmp_path: Path, name: str, value: Any
) -> None:
    out = tmp_path / "out"
    spec = spec_of(iq_root, out)
    claim(prepare(spec))
    document = json.loads((out / "_spec.json").read_text())
    document["plan"][name] = value
    (out / "_spec.json").write_text(json.dumps(document))
    with pytest.raises(DamagedOutputError, match=r"_spec\.json"):
        claim(prepare(spec))


def test_an_output_folder_that_looks_like_a_pattern(iq_root: Path, tmp_path: Path) -> None:
    spec = spec_of(iq_root, tmp_path / "out[1]*")
    commit(export_here(spec))
    assert progress_of(claim(prepare(spec))).manifest is not None
    assert signal_batch.verify(spec.output).ok


def test_the_claim_is_looked_for_before_each_part(iq_root: Path, tmp_path: Path) -> None:
    job = claim(prepare(spec_of(iq_root, tmp_path / "out")))
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(OutputError, match="no longer has the claim"):
        work(job.order(progress_of(job).shards[0]), lambda event: None)
    assert not (tmp_path / "out").exists()


def test_what_killed_writers_left_half_done_is_swept_at_commit(
    iq_root: Path, tmp_path: Path
) -> None:
    """A process that is killed while it writes a small file leaves it under a name of its own."""
    out = tmp_path / "out"
    spec = checked(
        ExportSpec, {"dataset": str(iq_root), "output": str(out), "columns": ["field:samples"]}
    )
    job = claim(prepare(spec))
    for shard in progress_of(job).shards:
        work(job.order(shard), lambda event: None)
    (out / "_quarantine").mkdir()
    left = ["_manifest.json", "_receipts/part-00001.json", "_quarantine/part-00000.jsonl"]
    for name in left:
        (out / f"{name}.00c1e17c33514e24.tmp").write_text("{")
    commit(job)
    assert not list(out.rglob("*.tmp"))
    assert signal_batch.verify(str(out)).ok
