"""The picture of an export: what is drawn, of which records, and when nothing is."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from signal_batch import ExportSpec, export
from signal_batch.preview import preview


def exported(root: Path, folder: Path, **changes: Any) -> tuple[str, dict[str, Any]]:
    fields = {"columns": ["field:samples"], "features": "power_spectrum", "batch_size": 50}
    fields |= {"dataset": str(root), "output": str(folder / "out"), **changes}
    return str(folder / "out"), dict(export(ExportSpec(**fields)).manifest)


def svg(picture: str) -> str:
    head, _, body = picture.partition(",")
    assert head == "data:image/svg+xml;base64"
    return base64.b64decode(body).decode()


def test_lines_are_named_by_the_ordinals_of_their_records(iq_root: Path, tmp_path: Path) -> None:
    output, manifest = exported(
        iq_root, tmp_path, where=["ordinal >= 7"], feature_args={"nperseg": 32}
    )
    drawn = preview(output, manifest)
    assert drawn is not None
    picture, words = drawn
    assert words == "power_spectrum (2 x 32, first channel) of the first 4 records"
    text = svg(picture)
    first = pq.read_table(min(Path(output, "data").iterdir()))["ordinal"].to_pylist()[:4]
    assert first == [7, 8, 9, 10]
    for ordinal in first:
        assert f"record {ordinal}<" in text


def test_a_matrix_is_drawn_as_a_map_of_one_record(iq_root: Path, tmp_path: Path) -> None:
    args = {"nperseg": 16, "hop": 4}
    output, manifest = exported(iq_root, tmp_path, features="spectrogram", feature_args=args)
    drawn = preview(output, manifest)
    assert drawn is not None
    assert drawn[1].endswith("of record 0")
    assert "spectrogram" in svg(drawn[0])


@pytest.mark.parametrize("gone", ["data", "all"])
def test_an_output_that_cannot_be_read_has_no_picture(
    iq_root: Path, tmp_path: Path, gone: str
) -> None:
    output, manifest = exported(iq_root, tmp_path, feature_args={"nperseg": 32})
    for path in Path(output).rglob("*.parquet" if gone == "data" else "*"):
        if path.is_file():
            path.unlink()
    assert preview(output, manifest) is None
