"""Verification: an intact output has no faults, and every kind of damage is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from signal_batch.cli import main
from signal_batch.digests import LogicalDigest
from signal_batch.errors import InputError
from signal_batch.frozen import checked, digest
from signal_batch.job import claim, commit, progress_of
from signal_batch.planning import prepare
from signal_batch.specs import ExportSpec
from signal_batch.store import AGAIN
from signal_batch.verification import verify
from signal_batch.worker import work


def export_here(dataset: Path, output: Path, **fields: Any) -> dict[str, Any]:
    defaults = {"columns": ["field:samples"], "batch_size": 8, "part_bytes": "40KB"}
    locations = {"dataset": str(dataset), "output": str(output)}
    job = claim(prepare(checked(ExportSpec, defaults | locations | fields)))
    for shard in progress_of(job).shards:
        work(job.order(shard), lambda event: None)
    return commit(job)


@pytest.fixture(scope="module")
def intact(iq_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("intact") / "out"
    export_here(iq_root, output)
    return output


@pytest.fixture
def out(intact: Path, tmp_path: Path) -> Path:
    """A copy of a complete output of six parts, of 32 records but the last."""
    return Path(shutil.copytree(intact, tmp_path / "out"))


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def part(out: Path, index: int) -> Path:
    return out / "data" / read(out / "_receipts" / f"part-{index:05d}.json")["file"]


def forge(out: Path, index: int, change: Callable[[pa.Table], pa.Table], **receipt: Any) -> None:
    """Rewrite a part and make file name, receipt and manifest agree with it again."""
    old = part(out, index)
    table = change(pq.read_table(old))
    table = table.cast(pq.read_schema(old)) if table.schema.metadata else table
    old.unlink()
    temporary = out / "forged.parquet"
    pq.write_table(table, temporary)
    logical = LogicalDigest(table.schema)
    for batch in table.to_batches():
        logical.update(batch)
    content = sha256(temporary.read_bytes()).hexdigest()
    path = out / "_receipts" / f"part-{index:05d}.json"
    changed = read(path) | {
        "file": f"part-{index:05d}-{content[:12]}.parquet",
        "bytes": temporary.stat().st_size,
        "sha256": content,
        "rows": table.num_rows,
        "logical_digest": logical.hexdigest(),
    }
    changed |= receipt
    temporary.rename(out / "data" / changed["file"])
    write(path, changed)
    manifest = read(out / "_manifest.json")
    manifest["files"][index] = changed
    recount(manifest)
    write(out / "_manifest.json", manifest)


def recount(manifest: dict[str, Any]) -> None:
    files = manifest["files"]
    manifest["totals"] = {
        "files": len(files),
        "rows": sum(entry["rows"] for entry in files),
        "bytes": sum(entry["bytes"] for entry in files),
        "bad": sum(len(entry["bad_ordinals"]) for entry in files),
        "logical_digest": digest([entry["logical_digest"] for entry in files]),
    }


def edit_manifest(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = read(out / "_manifest.json")
    change(manifest)
    write(out / "_manifest.json", manifest)


def edit_receipt(out: Path, index: int, **changes: Any) -> None:
    path = out / "_receipts" / f"part-{index:05d}.json"
    write(path, read(path) | changes)


def replace_bytes(path: Path, at: int, flip: int = 1) -> None:
    payload = bytearray(path.read_bytes())
    payload[at] ^= flip
    path.write_bytes(payload)


# --- intact ------------------------------------------------------------------------------------


def test_an_intact_output_has_no_faults(out: Path) -> None:
    seen: list[str] = []
    found = verify(str(out), on_file=seen.append)
    assert found.ok
    assert found.faults == ()
    names = sorted(path.name for path in (out / "data").iterdir())
    assert sorted(seen) == names
    assert (found.files, found.rows) == (len(names), 200)
    assert found.bytes == sum(path.stat().st_size for path in (out / "data").iterdir())


def test_an_output_can_be_moved(out: Path, tmp_path: Path) -> None:
    moved = out.rename(tmp_path / "elsewhere")
    assert verify(str(moved)).ok


def test_a_forgery_that_changes_nothing_has_no_faults(out: Path) -> None:
    """The helper that crafts damage below does not itself cause a fault."""
    forge(out, 1, lambda table: table)
    assert verify(str(out)).faults == ()


# --- damage ------------------------------------------------------------------------------------


def delete_file(out: Path) -> str:
    part(out, 2).unlink()
    return r"data/part-00002-\w+\.parquet is missing"


def truncate(out: Path) -> str:
    path = part(out, 2)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    return rf"part-00002-\w+\.parquet has {size - 10} bytes, not {size}: truncated"


def flip_a_bit(out: Path) -> str:
    path = part(out, 1)
    replace_bytes(path, path.stat().st_size // 2)
    return r"part-00001-\w+\.parquet has other bytes than were written"


def same_size_other_bytes(out: Path) -> str:
    path = part(out, 3)
    path.write_bytes(bytes(path.stat().st_size))
    return r"part-00003-\w+\.parquet has other bytes than were written"


def swap_two_files(out: Path) -> str:
    one, two = part(out, 0), part(out, 1)
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)
    return r"part-0000[01]-\w+\.parquet has "


def stray_file(out: Path) -> str:
    shutil.copy(part(out, 0), out / "data" / "part-00099-abcdef012345.parquet")
    return r"data/part-00099-abcdef012345\.parquet is not named by the manifest"


def missing_receipt(out: Path) -> str:
    (out / "_receipts" / "part-00002.json").unlink()
    return r"_receipts/part-00002\.json is missing"


def changed_receipt(out: Path) -> str:
    edit_receipt(out, 2, rows=7)
    return r"_receipts/part-00002\.json differs from the manifest"


def foreign_receipt(out: Path) -> str:
    shutil.copy(out / "_receipts" / "part-00002.json", out / "_receipts" / "part-00077.json")
    path = out / "_receipts" / "part-00077.json"
    write(path, read(path) | {"part": 77})
    return r"_receipts/part-00077\.json is of no part of the manifest"


def unreadable_receipt(out: Path) -> str:
    (out / "_receipts" / "part-00002.json").write_text("{")
    return rf"_receipts/part-00002\.json is not valid JSON.*; {AGAIN}"


def empty_receipt(out: Path) -> str:
    (out / "_receipts" / "part-00002.json").write_text("")
    return rf"_receipts/part-00002\.json is empty; {AGAIN}"


def receipt_of_negative_rows(out: Path) -> str:
    edit_receipt(out, 2, rows=-5)
    return rf"_receipts/part-00002\.json is not a receipt: rows is -5; {AGAIN}"


def receipt_of_endless_rows(out: Path) -> str:
    path = out / "_receipts" / "part-00002.json"
    path.write_text(re.sub(r'"rows": \d+', '"rows": 1e400', path.read_text()))
    return rf"_receipts/part-00002\.json is not a receipt: rows is inf; {AGAIN}"


def receipt_under_another_name(out: Path) -> str:
    folder = out / "_receipts"
    (folder / "part-00003.json").write_bytes((folder / "part-00002.json").read_bytes())
    return r"_receipts/part-00003\.json is the receipt of part-00002"


def nested_stray(out: Path) -> str:
    (out / "data" / "sub").mkdir()
    part = next(path for path in (out / "data").glob("*.parquet"))
    (out / "data" / "sub" / "a.parquet").write_bytes(part.read_bytes())
    return r"data/sub/a\.parquet is not named by the manifest"


def edited_identity(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest["identity"]["spec"].update(features="other"))
    return r"the identity does not give the run key"


def edited_pin(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest["pin"].update(fingerprint="0" * 64))
    return r"the pin is not that of the run key"


def edited_totals(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest["totals"].update(rows=201))
    return r"_manifest\.json: total rows is 201, not 200"


def edited_digest(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest["totals"].update(logical_digest="0" * 64))
    return r"_manifest\.json: total logical_digest is 0+, not "


def other_claim(out: Path) -> str:
    claimed = read(out / "_spec.json")
    write(out / "_spec.json", claimed | {"run_key": "0" * 64})
    return r"_spec\.json and _manifest\.json have different run keys"


def no_claim(out: Path) -> str:
    (out / "_spec.json").unlink()
    return r"_spec\.json is missing"


def manifest_without_a_file(out: Path) -> str:
    edit_manifest(out, lambda manifest: (manifest["files"].pop(2), recount(manifest)))
    return r"hold 168 ordinals and 0 were set aside, which is not the selection of 200"


def manifest_out_of_order(out: Path) -> str:
    edit_manifest(out, lambda manifest: (manifest["files"].reverse(), recount(manifest)))
    return r"ordinals are not ascending: 12\d comes after 199|ordinals are not ascending"


def rows_out_of_order(out: Path) -> str:
    forge(out, 1, lambda table: table.take(list(range(table.num_rows))[::-1]))
    return r"ordinals are not ascending: \d+ comes after \d+"


def row_twice(out: Path) -> str:
    def twice(table: pa.Table) -> pa.Table:
        return table.take([0, 1, *range(1, table.num_rows)])

    forge(out, 1, twice)
    return r"ordinals are not ascending: (\d+) comes after \1"


def row_of_another_part(out: Path) -> str:
    first = pq.read_table(part(out, 0)).slice(0, 1)
    forge(out, 1, lambda table: pa.concat_tables([table, first.cast(table.schema)]))
    return r"ordinals are not ascending: 0 comes after"


def row_missing(out: Path) -> str:
    forge(out, 1, lambda table: table.slice(1))
    return r"hold 199 ordinals and 0 were set aside, which is not the selection of 200"


def row_beyond_the_selection(out: Path) -> str:
    def beyond(table: pa.Table) -> pa.Table:
        last = table.slice(table.num_rows - 1)
        ordinal = pa.array([1000], pa.int64())
        return pa.concat_tables([table, last.set_column(0, table.schema.field(0), ordinal)])

    forge(out, len(list((out / "data").iterdir())) - 1, beyond)
    return r"hold 201 ordinals and 0 were set aside, which is not the selection of 200"


def row_both_written_and_set_aside(out: Path) -> str:
    forge(out, 1, lambda table: table, bad_ordinals=[3])
    return r"hold 200 ordinals and 1 were set aside, which is not the selection of 200"


def negative_ordinal(out: Path) -> str:
    def negative(table: pa.Table) -> pa.Table:
        ordinals = pa.array([-1, *table["ordinal"].to_pylist()[1:]], pa.int64())
        return table.set_column(0, table.schema.field(0), ordinals)

    forge(out, 0, negative)
    return r"is not the selection of 200|negative"


def other_values(out: Path) -> str:
    """A consistent file of changed values, with the digest that the original had."""
    old = read(out / "_receipts" / "part-00001.json")["logical_digest"]

    def renamed(table: pa.Table) -> pa.Table:
        ids = pa.array(["x"] * table.num_rows)
        return table.set_column(1, table.schema.field("id"), ids)

    forge(out, 1, renamed, logical_digest=old)
    return r"part-00001-\w+\.parquet holds other values than its receipt says"


def row_count_of_the_receipt(out: Path) -> str:
    forge(out, 1, lambda table: table, rows=5)
    return r"part-00001-\w+\.parquet has \d+ rows, not 5"


def file_of_another_run(out: Path) -> str:
    def relabelled(table: pa.Table) -> pa.Table:
        return table.replace_schema_metadata({"signal_batch.run_key": "0" * 64})

    path = part(out, 1)
    table = relabelled(pq.read_table(path))
    path.unlink()
    plant(out, 1, table)
    return r"part-00001-\w+\.parquet was written for another run key"


def plant(out: Path, index: int, table: pa.Table) -> None:
    """Like `forge`, with the table's own metadata."""
    temporary = out / "data" / "x.parquet"
    pq.write_table(table, temporary)
    shutil.copy(temporary, part(out, index))
    temporary.unlink()
    forge_hashes(out, index)


def forge_hashes(out: Path, index: int) -> None:
    path = part(out, index)
    content = sha256(path.read_bytes()).hexdigest()
    changes = {"sha256": content, "bytes": path.stat().st_size}
    edit_receipt(out, index, **changes)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][index] |= changes
        recount(manifest)

    edit_manifest(out, change)


def no_parquet_at_all(out: Path) -> str:
    part(out, 1).write_bytes(b"not parquet")
    forge_hashes(out, 1)
    return r"part-00001-\w+\.parquet cannot be read as Parquet"


def no_ordinals(out: Path) -> str:
    plant(out, 1, pq.read_table(part(out, 1)).drop_columns(["ordinal"]))
    return r"part-00001-\w+\.parquet cannot be read as Parquet"


def manifest_without_files(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest.pop("files"))
    return rf"_manifest\.json .*files is missing; {AGAIN}"


def manifest_without_totals(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest.pop("totals"))
    return r"_manifest\.json .*totals"


def manifest_without_run_key(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest.pop("run_key"))
    return r"_manifest\.json .*run_key"


def manifest_without_selection(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest.pop("selection"))
    return r"_manifest\.json .*selection"


def manifest_of_odd_types(out: Path) -> str:
    edit_manifest(out, lambda manifest: manifest.update(files=[1, "two"], totals=3))
    return r"_manifest\.json"


def manifest_that_is_no_json(out: Path) -> str:
    (out / "_manifest.json").write_text("{")
    return rf"_manifest\.json is not valid JSON.*; {AGAIN}, which checks what is written"


def claim_that_is_no_json(out: Path) -> str:
    (out / "_spec.json").write_text("{")
    return r"_spec\.json is not valid JSON.*; remove that output, or choose another"


def claim_without_a_plan(out: Path) -> str:
    (out / "_manifest.json").unlink()
    claimed = read(out / "_spec.json")
    write(out / "_spec.json", {k: v for k, v in claimed.items() if k != "plan"})
    return r"_spec\.json does not hold the plan of a job; remove that output, or choose another"


def no_manifest(out: Path) -> str:
    (out / "_manifest.json").unlink()
    count = len(list((out / "data").iterdir()))
    return rf"not complete: there is no _manifest\.json; {count} of {count} parts have a receipt"


DAMAGES = [
    delete_file,
    truncate,
    flip_a_bit,
    same_size_other_bytes,
    swap_two_files,
    stray_file,
    missing_receipt,
    changed_receipt,
    foreign_receipt,
    unreadable_receipt,
    empty_receipt,
    receipt_of_negative_rows,
    receipt_of_endless_rows,
    receipt_under_another_name,
    nested_stray,
    edited_identity,
    edited_pin,
    edited_totals,
    edited_digest,
    other_claim,
    no_claim,
    manifest_without_a_file,
    manifest_out_of_order,
    rows_out_of_order,
    row_twice,
    row_of_another_part,
    row_missing,
    row_beyond_the_selection,
    row_both_written_and_set_aside,
    negative_ordinal,
    other_values,
    row_count_of_the_receipt,
    file_of_another_run,
    no_parquet_at_all,
    no_ordinals,
    manifest_without_files,
    manifest_without_totals,
    manifest_without_run_key,
    manifest_without_selection,
    manifest_of_odd_types,
    manifest_that_is_no_json,
    claim_that_is_no_json,
    claim_without_a_plan,
    no_manifest,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_is_named(
    out: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], str]
) -> None:
    words = damage(out)
    code = main(["verify", str(out)])
    shown = capsys.readouterr()
    assert code == 1
    assert re.search(words, shown.err), shown.err
    assert "Traceback" not in shown.err
    assert "complete and undamaged" not in shown.out


def test_several_faults_are_all_named(out: Path) -> None:
    delete_file(out)
    stray_file(out)
    edited_totals(out)
    faults = verify(str(out)).faults
    assert len(faults) == 3


def test_an_output_with_records_set_aside_is_held_against_the_selection(
    iq_root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_here(
        iq_root,
        out,
        columns=["annotation:review-v1/quality"],
        on_error="skip",
        max_bad_fraction=1,
        part_bytes=800,
    )
    assert verify(str(out)).ok
    receipts = [read(path) for path in sorted((out / "_receipts").iterdir())]
    index = next(r["part"] for r in receipts if r["bad_ordinals"])
    forge(out, index, lambda table: table, bad_ordinals=[])
    (fault,) = verify(str(out)).faults
    assert "were set aside, which is not the selection of 200" in fault


def test_exit_codes(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(out)]) == 0
    assert "complete and undamaged, 200 rows" in capsys.readouterr().out
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (empty, tmp_path / "nothing"):
        assert main(["verify", str(path)]) == 2
        assert "holds no output" in capsys.readouterr().err
    with pytest.raises(InputError, match="holds no output"):
        verify(str(empty))


def test_verifying_changes_nothing(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    verify(str(out))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
