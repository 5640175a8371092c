"""What people find on the pages of runs: which data, how far, how fast, what failed, what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import pytest
import signal_dataset as sds

from signal_batch import pin_dataset

pytestmark = pytest.mark.xdist_group("ui")

Show = Callable[..., str]
SHARDS = [f"shard {k + 1} of 8, ordinals {40 * k}-{40 * k + 39}" for k in range(8)]


@pytest.fixture(scope="module")
def show(page: Any, stories: Any) -> Show:
    """Opens a page, again until it holds what is waited for, and gives its text."""

    def show(path: str, awaited: str, tab: str | None = None) -> str:
        for _ in range(15):
            page.goto(f"{stories.server.url}{path}")
            if tab:
                page.get_by_text(tab, exact=True).first.click()
            try:
                page.get_by_text(awaited).first.wait_for(timeout=6_000)
            except Exception as exc:
                if type(exc).__name__ != "TimeoutError":
                    raise
            else:
                return str(page.inner_text("body"))
        raise AssertionError(f"{path} never showed {awaited}: {page.inner_text('body')}")

    return show


@pytest.fixture(scope="module")
def waiting(stories: Any, show: Show) -> dict[str, str]:
    """The export's pages while it waited at its half; all runs have ended afterwards."""
    run = stories.run("export-features", "spectra")
    progress = f"/artifacts/artifact/{stories.artifact(run, 'export-progress')}"
    half = show(progress, "160 of 320 records")
    texts = {"half": half, "run": show(f"/runs/flow-run/{run}", "Running")}
    stories.go()
    return texts | {"whole": show(progress, "320 of 320 records")}


@pytest.fixture
def ended(waiting: dict[str, str], stories: Any) -> Any:
    """The stories, all of them told."""
    return stories


def pinned(stories: Any, dataset: str = "captures.sds") -> Any:
    return pin_dataset(str(stories.folder / dataset), ["truth-v1"]).pin


def artifact(stories: Any, run: str, key: str) -> str:
    return f"/artifacts/artifact/{stories.artifact(run, key)}"


def cells(page: Any) -> list[list[str]]:
    """The table on the page, its head first."""
    return [row.locator("th, td").all_inner_texts() for row in page.locator("tr").all()]


def linked(page: Any, name: str) -> str:
    """Where a link of that name leads; the page opens it in a tab of its own."""
    return str(page.get_by_role("link", name=name, exact=True).get_attribute("href"))


def test_a_run_in_progress_says_how_far_and_how_fast(waiting: dict[str, str]) -> None:
    """Workers wait at record 160 of 320, so half is written; then they go on."""
    assert "Running" in waiting["run"]
    assert "Progress: 50%" in waiting["half"]
    assert re.search(r"160 of 320 records, [\d,]+ records/s", waiting["half"])
    assert "Progress: 100%" in waiting["whole"]


def test_the_list_of_runs_names_dataset_and_purpose(ended: Any, show: Show) -> None:
    text = show("/runs", "spectra")
    for name in (
        "export gated:spectrum of captures.sds to spectra",
        "export raw of damaged.sds to hurt",
        "train sklearn on captures.sds to model",
        "validate captures.sds",
    ):
        assert name in text
    assert "dataset:captures.sds" in text
    assert f"snapshot:{pinned(ended).snapshot_id}" in text


def test_the_page_of_a_run_shows_its_shards_and_a_quiet_log(
    ended: Any, show: Show, page: Any
) -> None:
    run = ended.run("export-features", "spectra")
    for _ in range(10):  # a page that is opened too early has a part of the log
        text = show(f"/runs/flow-run/{run}", "Finished in state Completed")
        log = text[text.index("Level: all") :]
        if log.count("records/s") == 8:
            break
        page.wait_for_timeout(1000)
    assert "dataset:captures.sds" in text
    assert f"snapshot:{pinned(ended).snapshot_id}" in text
    assert not re.search(r"\b(WARNING|ERROR|DEBUG|CRITICAL)\b", log)
    assert set(re.findall(r"^[a-z_]+\.[a-z_.]+$", log, re.M)) == {
        "prefect.flow_runs",
        "prefect.task_runs",
    }
    for shard in SHARDS:
        assert log.count(f"export {shard}") == 2
    assert len(re.findall(r"^40 rows in [\d.]+ s, [\d,]+ records/s$", log, re.M)) == 8

    assert page.locator("canvas").first.bounding_box()["height"] > 200
    asked = f"fetch('{ended.server.url}/api/flow_runs/{run}/graph-v2').then(r => r.json())"
    nodes = dict(page.evaluate(asked)["nodes"]).values()
    drawn = {node["label"]: node for node in nodes}
    for shard in SHARDS:  # a bar for each, and no lines across each other
        assert drawn[f"export {shard}"]["parents"] == drawn[f"export {shard}"]["children"] == []


def test_a_complete_export_is_reported_with_its_data_and_a_picture(
    ended: Any, show: Show, page: Any
) -> None:
    run = ended.run("export-features", "spectra")
    text = show(artifact(ended, run, "export-report"), "Columns and filters")
    files = sorted((ended.folder / "spectra" / "data").glob("*.parquet"))
    ((rows,),) = duckdb.sql(f"SELECT count(*) FROM '{files[0].parent}/*.parquet'").fetchall()
    assert rows == 320
    assert re.search(rf"^rows\s+{rows}$", text, re.M)
    assert re.search(rf"^files\s+{len(files)}$", text, re.M)
    size = sum(path.stat().st_size for path in files) / 1024
    assert float(re.findall(r"^bytes\s+([\d.]+) KiB$", text, re.M)[0]) == pytest.approx(
        size, abs=0.06
    )
    wrote, seconds, pace = re.findall(r"Wrote (\d+) rows in ([\d.]+) s, ([\d,]+) records/s", text)[
        0
    ]
    assert int(wrote) == rows
    assert int(pace.replace(",", "")) == pytest.approx(rows / float(seconds), rel=0.05, abs=1)
    pin = pinned(ended)
    assert f"snapshot {pin.snapshot_id}, 320 records" in text
    assert pin.fingerprint[:16] in text
    assert f"truth-v1 {pin.annotations[0].publication_id}" in text
    assert pin.annotations[0].root_sha256[:16] in text
    for column in ("samples=field:samples", "label=annotation:truth-v1/label:int32"):
        assert column in text

    picture = page.locator("img[src^='data:image/svg']")
    assert picture.evaluate("image => image.complete && image.naturalWidth") > 300
    assert "spectrum (1 x 32, first channel) of the first 4 records" in text.replace("×", "x")
    made_by, shards = (linked(page, name) for name in ("this run", "table of shards"))
    assert made_by == f"{ended.server.url}/runs/flow-run/{run}"
    page.goto(made_by)
    page.get_by_text("export gated:spectrum of captures.sds to spectra").first.wait_for()
    page.goto(shards)
    page.get_by_text(SHARDS[7]).wait_for()
    head, *table = cells(page)
    assert [row[head.index("shard")].strip() for row in table] == SHARDS
    assert {row[head.index("rows")].strip() for row in table} == {"40"}


def test_a_failed_export_says_what_failed_where_and_what_to_do(
    ended: Any, show: Show, page: Any
) -> None:
    run = ended.run("export-features", "hurt")
    bad = unreadable(ended)
    assert sorted(bad) == [102, 230]
    show(artifact(ended, run, "export-shards"), "failed")
    head, *table = cells(page)
    rows = [dict(zip(head, map(str.strip, row), strict=True)) for row in table]
    assert [row["state"] for row in rows] == ["failed"] * 2 + ["done"] * 6
    assert [row["shard"] for row in rows] == [
        *(SHARDS[k] for k in (2, 5)),
        *(SHARDS[k] for k in (0, 1, 3, 4, 6, 7)),
    ]
    assert [row["record"] for row in rows[:2]] == ["102", "230"]
    assert [row["rows"] for row in rows[2:]] == ["40"] * 6

    text = show(artifact(ended, run, "export-features-failure"), "What to do")
    assert "hurt is not complete" in text
    assert "damaged.sds" in text
    assert "2 of the 8 shards that ran failed" in text
    for ordinal, shard in ((102, SHARDS[2]), (230, SHARDS[5])):
        assert f"{shard}, at record {ordinal}" in text
        assert bad[ordinal] in text
    to_do = text[text.index("What to do") :]
    assert "signal-batch validate damaged.sds --deep" in to_do
    assert "quarantine" in to_do
    assert "run this again with the same parameters" in to_do
    assert "signal-batch status hurt" in to_do
    page.goto(linked(page, "table of shards"))
    page.get_by_text("1 of 8", exact=False).first.wait_for()
    assert len(cells(page)) == 9

    text = show(artifact(ended, run, "export-progress"), "Progress:")
    assert "240 of 320 records" in text
    assert "Progress: 75%" in text
    receipts = list((ended.folder / "hurt" / "_receipts").glob("*.json"))
    assert sum(json.loads(path.read_text())["rows"] for path in receipts) == 240


def unreadable(stories: Any) -> dict[int, str]:
    """Records that do not read, each with the file it is in: by reading all, one by one."""
    root = stories.folder / "damaged.sds"
    dataset = sds.open(str(root))
    found = {}
    for ordinal in range(len(dataset)):
        try:
            np.asarray(dataset[ordinal]["samples"].data)
        except Exception:
            first = np.arange(8 * (ordinal + 1), 8 * (ordinal + 1) + 8, dtype=np.float32)
            holders = root.rglob("*.arrayrecord")
            (path,) = [path for path in holders if first.tobytes() in path.read_bytes()]
            found[ordinal] = path.name
    return found


def test_a_training_run_is_reported_with_its_metrics_and_curves(
    ended: Any, show: Show, page: Any
) -> None:
    run = ended.run("train-model", "model")
    show(artifact(ended, run, "training-metrics"), "accuracy")
    head, *table = cells(page)
    lines = (ended.folder / "model" / "metrics.jsonl").read_text().splitlines()
    judged = [row for row in map(json.loads, lines) if row["side"] == "test"]
    assert len(table) == len(judged) >= 2
    for row, truth in zip(table, judged, strict=True):
        shown = dict(zip(head, map(str.strip, row), strict=True))
        assert int(shown["step"]) == truth["step"]
        for name in ("accuracy", "loss"):
            assert float(shown[name]) == pytest.approx(truth[name], rel=1e-3)

    text = show(artifact(ended, run, "training-report"), "Columns and filters")
    evaluation = json.loads((ended.folder / "model" / "_evaluation.json").read_text())
    accuracy = evaluation["sides"]["test"]["accuracy"]
    assert f"test accuracy\t{accuracy:.4g}" in text
    assert "model/report.html" in text
    assert pinned(ended).fingerprint[:16] in text
    pictures = page.locator("img[src^='data:image/svg']").all()
    assert len(pictures) == 2
    for picture in pictures:
        assert picture.evaluate("image => image.complete && image.naturalWidth") > 300
    steps = judged[-1]["step"]
    text = show(artifact(ended, run, "training-progress"), "Progress: 100%")
    assert re.search(rf"{steps * 64:,} of {steps * 64:,} records", text)


def test_a_validation_names_the_data_and_its_labels(ended: Any, show: Show) -> None:
    run = ended.run("validate-dataset", "captures.sds")
    text = show(artifact(ended, run, "dataset-validation"), "Faults")
    pin = pinned(ended)
    assert f"320 records, snapshot {pin.snapshot_id}, fingerprint {pin.fingerprint}" in " ".join(
        text.split()
    )
    review = sds.open(str(ended.folder / "captures.sds")).annotations["review-v1"]
    statuses = [str(review[ordinal].status.value) for ordinal in range(320)]
    for status in sorted(set(statuses)):
        assert f"{statuses.count(status)} {status}" in text
    assert re.search(r"truth-v1\s+\w+\s+320 success", text)
    assert text.split("Faults")[1].split()[0] == "None."
