"""The training report: well-formed, self-contained, escaped, complete, the same every time."""

from __future__ import annotations

import base64
import re
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from signal_batch.evaluation import Scores
from signal_batch.metrics import MetricLog
from signal_batch.training_report import render

NASTY = '<script>alert("x")</script>&amp;'
VOID = {"meta", "br", "img", "hr"}


class Page(HTMLParser):
    """The page as a reader gets it; fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.texts[tag][-1] += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def pictures(self) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == "img"]

    def svg(self, alt: str) -> ET.Element:
        (source,) = (p["src"] for p in self.pictures if str(p["alt"]).startswith(alt))
        return ET.fromstring(base64.b64decode(str(source).partition("base64,")[2]))


def drawn(svg: ET.Element) -> list[str]:
    return ["".join(e.itertext()).strip() for e in svg.iter("{http://www.w3.org/2000/svg}text")]


def scores(classes: int, records: int = 300) -> dict[str, Any]:
    rng = np.random.default_rng(classes)
    truth = rng.integers(0, classes, records)
    logits = rng.standard_normal((records, classes)) + 2 * np.eye(classes)[truth]
    powers = np.exp(logits)
    found = Scores()
    by = {
        "snr": rng.uniform(-20, 20, records),
        "antenna": rng.choice(np.array(["horn", "dish", NASTY], object), records),
    }
    found.add(powers / powers.sum(axis=1, keepdims=True), truth, by)
    return found.result()


def history(*names: str) -> list[dict[str, Any]]:
    log = MetricLog(10)
    for step in range(1, 101):
        log.add(step, dict.fromkeys(names, 1 / step))
        if step % 50 == 0:
            log.record(step, "validation", dict.fromkeys(names, 2 / step))
    return list(log.rows)


def model_of(labels: list[Any]) -> dict[str, Any]:
    counts = {str(label): 30 + place for place, label in enumerate(labels)}
    sides = {"train": 270, "test": 90}
    return {
        "format": "signal-batch.model",
        "format_version": 1,
        "run_key": "3f" * 32,
        "created": "2026-01-01T09:30:00+00:00",
        "trainer": "sklearn",
        "classes": labels,
        "spec": {
            "dataset": "s3://bucket/ota",
            "split": "scene test=0.2",
            "transforms": ["add_noise snr_db=[0, 20]", "random_phase"],
            "batch_size": 64,
            "steps": None,
            "trainer_args": {"alpha": 0.5},
        },
        "pin": {
            "uri": f"s3://bucket/{NASTY}/ota",
            "dataset_id": "ota",
            "snapshot_id": "snap-17",
            "record_count": 36_000,
            "fingerprint": "9a" * 32,
            "annotations": [
                {"name": "speakers-v1", "publication_id": "pub-3", "root_sha256": "0c" * 32}
            ],
        },
        "split": {
            "by": "scene",
            "sides": {
                side: {"records": number, "scenes": 9, "classes": counts}
                for side, number in sides.items()
            },
            "unused": 40,
            "shared_scenes": 3,
        },
        "cursor": {"step": 5000, "records": 160_000},
        "timing": {
            **{"train_s": 754.2, "wait_s": 37.71, "steps": 5000, "records": 160_000},
            "attempts": 2,
        },
        "warnings": [f"class {NASTY} has few records"],
        "versions": {"numpy": "2.1"},
    }


@pytest.fixture(scope="module")
def full() -> str:
    return render(model_of([NASTY, "b", "$c$"]), history("loss", "accuracy"), {"test": scores(3)})


# --- the page ----------------------------------------------------------------------------------


def test_the_page_is_complete_and_in_order(full: str) -> None:
    page = Page(full)
    assert page.texts["h1"] == ["ota, trained with sklearn"]
    assert page.texts["h2"] == [
        *("Warnings", "Learning curves", "Confusion matrix", "Accuracy by snr"),
        *("Accuracy by antenna", "Split", "Data", "Speed", "Settings", "Run and versions"),
    ]
    (summary,) = [text for text in page.texts["p"] if "seen" in text]
    accuracy = scores(3)["accuracy"]
    assert summary == (
        f"accuracy {100 * accuracy:.1f} % on test · 5,000 steps · 160,000 records seen · "
        "12 min 34 s of training"
    )
    assert len(full.encode()) < 400_000


def test_nothing_is_loaded_or_run(full: str) -> None:
    page = Page(full)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "a"})
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("src") or "data:").startswith("data:image/svg+xml;base64,") or (
            "src" not in attributes
        )
    assert re.search(r"https?:|url\(|@import", full) is None


def test_pictures_have_a_text_for_those_who_cannot_see_them(full: str) -> None:
    alts = [str(picture["alt"]) for picture in Page(full).pictures]
    assert len(alts) == len(set(alts)) == 5
    assert alts[0].startswith("loss over steps: train ends at 0.0105, validation ends at 0.02")
    assert all(len(alt) > 20 for alt in alts)


def test_labels_and_addresses_are_escaped(full: str) -> None:
    page = Page(full)
    assert [f"s3://bucket/{NASTY}/ota"] == [row[1] for row in page.rows if row[0] == "dataset"][:1]
    assert f"class {NASTY} has few records" in page.texts["li"]
    assert sum(row[0] == NASTY for row in page.rows) == 3  # results, antenna, split
    assert "$c$" in drawn(page.svg("Confusion matrix"))  # no formula


def test_numbers_are_in_the_tables(full: str) -> None:
    rows, result = Page(full).rows, scores(3)
    first = result["per_class"][1]
    shares = [f"{100 * first[name]:.1f} %" for name in ("recall", "precision", "f1")]
    assert ["b", str(first["records"]), *shares] in rows
    group = result["by"]["snr"][0]
    assert [
        *("−20 to −15", str(group["records"]), f"{100 * group['accuracy']:.1f} %"),
        f"{100 * group['low']:.1f} to {100 * group['high']:.1f} %",
    ] in rows
    for row in (
        ["train", "270", "67.5 %", "9"],
        ["left out", "40", "10.0 %", "–"],
        ["b", "31", "31"],
        ["speakers-v1", "pub-3", "0c" * 32],
        ["records per second", "212"],
        ["waiting for input", "37.7 s, 5.0 % of the time of training"],
        ["attempts", "2, resumed once"],
        ["transforms", "add_noise snr_db=[0, 20]random_phase"],
        ["trainer_args.alpha", "0.5"],
        ["created", "2026-01-01 09:30 UTC"],
        ["run key", "3f" * 32],
    ):
        assert row in rows
    assert "steps" not in [row[0] for row in rows]  # not set
    assert any("3 scenes have records on more than one side" in li for li in Page(full).texts["li"])


# --- pictures ----------------------------------------------------------------------------------


def test_the_matrix_shows_every_count_up_to_25_classes() -> None:
    result = scores(25, 2000)
    page = Page(render({"classes": [f"k{i}" for i in range(25)]}, [], {"validation": result}))
    texts = drawn(page.svg("Confusion matrix of 2,000 records in 25 classes"))
    counts = [str(count) for row in result["confusion"] for count in row if count]
    ticks = [*(f"k{i}" for i in range(25)), *(f"k{i}" for i in range(25))]
    scale = [*map(str, range(0, 101, 20))]
    titles = ["predicted class", "true class", "share of the true class, %"]
    assert sorted(texts) == sorted(counts + ticks + scale + titles)
    assert (
        "Side validation: counts, coloured by the share of the true class"
        in page.texts["figcaption"]
    )


def test_many_classes_are_coloured_only_and_their_table_is_folded() -> None:
    page = Page(render({"classes": list(range(70))}, [], {"test": scores(70)}))
    assert len(drawn(page.svg("Confusion matrix"))) < 40
    assert "Table of 70 rows" in page.texts["summary"]


def test_units_stand_at_the_axes(full: str) -> None:
    page = Page(full)
    assert {"snr, dB", "accuracy, %"} <= set(drawn(page.svg("Accuracy by snr")))
    assert {"antenna", "horn", "accuracy, %"} <= set(drawn(page.svg("Accuracy by antenna")))
    assert {"step", "loss", "train", "validation"} <= set(drawn(page.svg("loss over steps")))


def test_long_histories_and_many_groups_stay_small() -> None:
    rows = [{"step": s, "side": "train", "loss": s % 7 + 1 / s} for s in range(1, 50_001)]
    groups = [
        {"value": f"s{i}", "records": 9 + i % 2, "accuracy": 0.5, "low": 0.2, "high": 0.8}
        for i in range(200)
    ]
    result = {"records": 1900, "accuracy": 0.5, "by": {"site": groups}}
    text = render({}, rows, {"test": result})
    assert len(text.encode()) < 100_000
    page = Page(text)
    assert "The 30 largest of 200 groups are shown." in page.texts["p"]
    assert [row[0] for row in page.rows if row[0].startswith("s")][2:5] == ["s1", "s3", "s5"]


# --- runs without classes or without luck --------------------------------------------------------


def test_a_run_without_classes_leaves_their_sections_out() -> None:
    model = model_of([]) | {"warnings": []}
    model["split"] = {"by": "id", "sides": {"train": {"records": 9, "scenes": 0, "classes": {}}}}
    page = Page(render(model, history("mse"), {}))
    assert page.texts["h2"] == [
        *("Learning curves", "Split", "Data", "Speed", "Settings", "Run and versions")
    ]
    assert ["train", "9", "100.0 %"] in page.rows
    assert [picture["alt"] for picture in page.pictures] == [
        "mse over steps: train ends at 0.0105, validation ends at 0.02"
    ]


def test_an_empty_run_is_a_page() -> None:
    page = Page(render({}, [], {}))
    assert "h2" not in page.texts
    assert "p" not in page.texts
    Page(render({}, [], {"test": Scores().result()}))


def test_a_loss_that_is_not_finite_is_named() -> None:
    log = MetricLog(1)
    for step, loss in enumerate([1.0, 0.5, np.nan, np.inf], start=1):
        log.add(step, {"loss": loss})
    broken = Scores()
    broken.add(np.full((4, 2), np.nan), np.array([0, 1, 0, 1]), {})
    page = Page(render({}, log.rows, {"test": broken.result()}))
    assert page.texts["li"] == ["loss of train not finite in 2 of 4 rows, first at step 3"]
    assert any(row[0] == "test" and row[-1] == "not finite" for row in page.rows)


# --- the same every time -----------------------------------------------------------------------


def test_equal_input_gives_equal_bytes_in_any_thread_and_style(
    full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without pyplot, which keeps figures alive and belongs to the main thread."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(mpl.rcParams, "axes.facecolor", "black")
    before = mpl.rcParams.copy()
    arguments = model_of([NASTY, "b", "$c$"]), history("loss", "accuracy"), {"test": scores(3)}
    with ThreadPoolExecutor(3) as pool:
        pages = list(pool.map(lambda _: render(*arguments), range(3)))
    assert set(pages) == {full}
    assert mpl.rcParams.copy() == before
    assert "2026-" not in full.replace("2026-01-01 09:30 UTC", "")


def test_labels_of_any_script_are_drawn_as_text() -> None:
    result = scores(2)
    page = Page(render({"classes": ["ラベル", "a" * 40]}, [], {"test": result}))
    texts = drawn(page.svg("Confusion matrix"))
    assert texts.count("ラベル") == 2
    assert texts.count("a" * 13 + "…") == 2
    assert any(row[0] == "a" * 40 for row in page.rows)
