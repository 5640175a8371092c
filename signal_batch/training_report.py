"""report.html: what a training run learned, from what and how fast, for people to read.

One file without scripts or links, so it opens from a disk, an attachment or an object store.
Pictures are SVG from Matplotlib in `data:` URIs. Equal input gives an equal file, for the same
versions of Matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, TypeAlias

from signal_batch import pictures, wording
from signal_batch.evaluation import wilson_interval
from signal_batch.metrics import RESERVED, value_of

Json: TypeAlias = Mapping[str, Any]

#: Sides as results are listed: the one that was held back longest goes first.
SIDES = ("test", "validation", "train")
#: Groups drawn and listed of one column that accuracy is broken down by.
_MOST_GROUPS = 30
#: Rows of a table from which it is folded away.
_LONG_TABLE = 30


def render(model: Json, history: Sequence[Json], evaluation: Mapping[str, Json]) -> str:
    """The whole page, from a model.json, metric rows and the results of `Scores` by side.

    Parts that a run has nothing for, such as classes, are left out.
    """
    names = [wording.text(label) for label in model.get("classes") or ()]
    judged = next((side for side in SIDES if evaluation.get(side, {}).get("records")), None)
    result = evaluation[judged] if judged else {}
    title = (
        f"{wording.dataset_name(model)}, trained with {model.get('trainer', 'an unknown trainer')}"
    )
    with pictures.drawing():
        body = [
            f"<h1>{escape(title)}</h1>",
            _summary(model, history, evaluation),
            _warnings(model, history),
            _learning(history, evaluation),
            _confusion(names, judged, result),
            *_broken_down(judged, result),
            _split(names, model.get("split") or {}),
            _pin(model.get("pin") or {}),
            _speed(model),
            _settings(model),
            _versions(model),
        ]
    head = f'<meta charset="utf-8">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n{viewport}\n</head>\n<body>\n<main>\n'
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


# --- sections ----------------------------------------------------------------------------------


def _summary(model: Json, history: Sequence[Json], evaluation: Mapping[str, Json]) -> str:
    cursor, timing = model.get("cursor") or {}, model.get("timing") or {}
    parts = [_final(history, evaluation)]
    if "step" in cursor:
        parts.append(wording.counted(cursor["step"], "step"))
    if "records" in cursor:
        parts.append(f"{wording.counted(cursor['records'], 'record')} seen")
    if "train_s" in timing:
        parts.append(f"{wording.duration(timing['train_s'])} of training")
    line = " · ".join(part for part in parts if part)
    return f'<p class="summary">{escape(line)}</p>' if line else ""


def _final(history: Sequence[Json], evaluation: Mapping[str, Json]) -> str:
    """Final accuracies, or the final losses of a run without classes."""
    results = {side: evaluation[side].get("accuracy") for side in SIDES if side in evaluation}
    shown = [
        f"{wording.percent(value)} on {side}"
        for side, value in results.items()
        if value is not None
    ]
    if shown:
        return f"accuracy {', '.join(shown)}"
    for name in ("accuracy", "loss"):
        curves = {side: _curve(history, side, name) for side in SIDES}
        form = wording.percent if name == "accuracy" else wording.number
        shown = [f"{form(points[-1][1])} on {side}" for side, points in curves.items() if points]
        if shown:
            return f"{name} {', '.join(shown)}"
    return ""


def _warnings(model: Json, history: Sequence[Json]) -> str:
    found = [str(warning) for warning in model.get("warnings") or ()]
    shared = (model.get("split") or {}).get("shared_scenes") or 0
    if shared and not any("scene" in warning for warning in found):
        scenes = "1 scene has" if shared == 1 else f"{shared:,} scenes have"
        found.append(f"{scenes} records on more than one side of the split: scores may be too good")
    for side in SIDES:
        rows = [row for row in history if row["side"] == side]
        broken = [row for row in rows if row.get("not_finite")]
        if broken:
            names = sorted({name for row in broken for name in row["not_finite"]})
            found.append(
                f"{' and '.join(names)} of {side} not finite in {len(broken):,} of {len(rows):,} "
                f"rows, first at step {broken[0]['step']:,}"
            )
    if not found:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<section class="warnings">\n<h2>Warnings</h2>\n<ul>{items}</ul>\n</section>'


def learning_curves(history: Sequence[Json]) -> list[tuple[str, str]]:
    """Pictures of the metrics that say how learning went, as `data:` URIs, each with its words.

    To be called within `pictures.drawing()`.
    """
    drawn = []
    for name in _learned(history):
        curves = {side: _curve(history, side, name) for side in pictures.LINES}
        curves = {side: points for side, points in curves.items() if points}
        if curves:
            ends = (
                f"{side} ends at {wording.metric(name, c[-1][1])}" for side, c in curves.items()
            )
            words = f"{name} over steps: {', '.join(ends)}"
            drawn.append((pictures.draw_curves(name, curves), words))
    return drawn


def _learning(history: Sequence[Json], evaluation: Mapping[str, Json]) -> str:
    figures = [_figure(picture, words) for picture, words in learning_curves(history)]
    rows = []
    for side in SIDES:
        result = evaluation.get(side, {})
        if result.get("records") and result.get("accuracy") is not None:
            right = round(result["accuracy"] * result["records"])
            interval = wording.interval(*wilson_interval(right, result["records"]))
            loss = "not finite" if result.get("loss") is None else wording.number(result["loss"])
            accuracy = wording.percent(result["accuracy"])
            rows.append([side, wording.count(result["records"]), accuracy, interval, loss])
    final = _table(["side", "records", "accuracy", "95 % interval", "loss"], rows)
    return _section("Learning curves", _beside(*figures), final)


def _learned(history: Sequence[Json]) -> list[str]:
    """The metrics to draw: loss and accuracy, or else up to four, those of most sides first."""
    sides: dict[str, set[str]] = {}
    for row in history:
        for name in row.keys() - set(RESERVED):
            sides.setdefault(name, set()).add(row["side"])
    usual: list[str] = [name for name in ("loss", "accuracy") if name in sides]
    return usual or sorted(sides, key=lambda name: (-len(sides[name]), name))[:4]


def _confusion(names: Sequence[str], judged: str | None, result: Json) -> str:
    matrix, classes = result.get("confusion") or [], result.get("per_class") or []
    if not matrix:
        return ""
    names = wording.names(names, len(matrix))
    alt = (
        f"Confusion matrix of {wording.counted(result['records'], 'record')} in "
        f"{len(matrix)} classes; {wording.percent(result['accuracy'])} are on the diagonal"
    )
    counted = "counts, coloured by" if len(matrix) <= pictures.MOST_COUNTED else "coloured by"
    caption = f"Side {judged}: {counted} the share of the true class"
    if len(matrix) > pictures.MOST_LABELLED:
        caption += "; classes are numbered from 0 in the order of the table"
    rows = [
        [
            name,
            wording.count(item["records"]),
            *(wording.percent(item[k]) for k in ("recall", "precision", "f1")),
        ]
        for name, item in zip(names, classes, strict=True)
    ]
    table = _table(["class", "records", "recall", "precision", "F1"], rows)
    picture = _figure(pictures.draw_confusion(names, matrix), alt, caption)
    return _section("Confusion matrix", _beside(picture, f"<div>{table}</div>"))


def _broken_down(judged: str | None, result: Json) -> Iterator[str]:
    for name, groups in (result.get("by") or {}).items():
        if groups:
            yield _section(f"Accuracy by {name}", _by_column(name, str(judged), groups))


def _by_column(name: str, judged: str, groups: Sequence[Json]) -> str:
    kept = groups
    if len(groups) > _MOST_GROUPS:
        fewest = sorted((group["records"] for group in groups), reverse=True)[_MOST_GROUPS - 1]
        kept = [group for group in groups if group["records"] >= fewest][:_MOST_GROUPS]
    numeric = [group for group in kept if wording.middle(group) is not None]
    draw = pictures.draw_points if len(numeric) > 2 else pictures.draw_bars
    best = max(kept, key=lambda group: float(group["accuracy"]))
    worst = min(kept, key=lambda group: float(group["accuracy"]))
    alt = (
        f"Accuracy by {name}: from {wording.percent(worst['accuracy'])} at "
        f"{wording.group(worst)} to {wording.percent(best['accuracy'])} at {wording.group(best)}"
    )
    caption = f"Side {judged}, with 95 % intervals"
    rows = [
        [
            wording.group(group),
            wording.count(group["records"]),
            wording.percent(group["accuracy"]),
            wording.interval(group["low"], group["high"]),
        ]
        for group in kept
    ]
    table = _table([wording.with_unit(name), "records", "accuracy", "95 % interval"], rows)
    if len(kept) < len(groups):
        table += f"<p>The {len(kept)} largest of {len(groups):,} groups are shown.</p>"
    drawn = numeric if draw is pictures.draw_points else kept
    return _beside(_figure(draw(name, drawn), alt, caption), f"<div>{table}</div>")


def _split(names: Sequence[str], split: Json) -> str:
    sides: Mapping[str, Json] = split.get("sides") or {}
    if not sides:
        return ""
    total = sum(side["records"] for side in sides.values()) + (split.get("unused") or 0)
    scenes = any(side.get("scenes") for side in sides.values())
    rows = [
        [side, wording.count(item["records"]), wording.percent(item["records"] / max(1, total))]
        + ([wording.count(item.get("scenes") or 0)] if scenes else [])
        for side, item in sides.items()
    ]
    if split.get("unused"):
        left = [wording.count(split["unused"]), wording.percent(split["unused"] / total)]
        rows.append(["left out", *left] + ([wording.DASH] if scenes else []))
    table = _table(["side", "records", "share"] + (["scenes"] if scenes else []), rows)
    shared = split.get("shared_scenes") or 0
    note = f"<p>Split by <code>{escape(str(split['by']))}</code>.</p>" if split.get("by") else ""
    if scenes:
        note += f"<p>Scenes on more than one side: {shared:,}.</p>"
    return _section("Split", _beside(f"<div>{table}{note}</div>", _class_counts(names, sides)))


def _class_counts(names: Sequence[str], sides: Mapping[str, Json]) -> str:
    counts: dict[str, Mapping[str, int]] = {
        side: {wording.text(label): count for label, count in (item.get("classes") or {}).items()}
        for side, item in sides.items()
    }
    labels = list(dict.fromkeys([*names, *(label for of in counts.values() for label in of)]))
    if not any(counts.values()):
        return ""
    rows = [
        [label, *(wording.count(of.get(label, 0)) for of in counts.values())] for label in labels
    ]
    return f"<div>{_table(['class', *counts], rows)}</div>"


def _pin(pin: Json) -> str:
    if not pin:
        return ""
    kept = {
        "dataset": pin.get("uri"),
        "dataset id": pin.get("dataset_id"),
        "snapshot": pin.get("snapshot_id"),
        "fingerprint": pin.get("fingerprint"),
    }
    rows = [(name, str(value)) for name, value in kept.items() if value]
    if "record_count" in pin:
        rows.append(("records", wording.count(pin["record_count"])))
    sets = [
        [item.get("name"), item.get("publication_id"), item.get("root_sha256")]
        for item in pin.get("annotations") or ()
    ]
    head = ["annotation set", "publication", "SHA-256 of its root"]
    return _section("Data", _pairs(rows), _table(head, sets, "text"))


def _speed(model: Json) -> str:
    timing = model.get("timing") or {}
    seconds = timing.get("train_s")
    rows = []
    if seconds and "records" in timing:
        rows.append(("records per second", wording.count(round(timing["records"] / seconds))))
    if seconds and "steps" in timing:
        rows.append(("steps per second", wording.number(timing["steps"] / seconds)))
    if seconds is not None:
        rows.append(("training", wording.duration(seconds)))
    if seconds and "wait_s" in timing:
        share = wording.percent(timing["wait_s"] / seconds)
        waited = f"{wording.duration(timing['wait_s'])}, {share} of the time of training"
        rows.append(("waiting for input", waited))
    if attempts := timing.get("attempts"):
        resumed = "" if attempts == 1 else f", resumed {wording.times(attempts - 1)}"
        rows.append(("attempts", f"{attempts:,}{resumed}"))
    return _section("Speed", _pairs(rows))


def _settings(model: Json) -> str:
    spec = model.get("spec") or {"trainer_args": model.get("trainer_args")}
    return _section("Settings", _pairs(list(wording.flat("", spec))))


def _versions(model: Json) -> str:
    rows = [("run key", str(model["run_key"]))] if model.get("run_key") else []
    if model.get("created"):
        rows.append(("created", wording.moment(str(model["created"]))))
    rows += [(name, str(version)) for name, version in (model.get("versions") or {}).items()]
    return _section("Run and versions", _pairs(rows))


def _curve(history: Sequence[Json], side: str, name: str) -> list[tuple[int, float]]:
    """Step and value of every row of a side that has one, as far as axes can reach."""
    rows = ((row["step"], value_of(row, name)) for row in history if row["side"] == side)
    return [(step, value) for step, value in rows if value is not None and abs(value) < 1e300]


# --- HTML --------------------------------------------------------------------------------------


def _section(title: str, *parts: str) -> str:
    """A section with a heading; nothing where it would be empty."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _beside(*parts: str) -> str:
    shown = [part for part in parts if part]
    return '<div class="beside">' + "\n".join(shown) + "</div>" if shown else ""


def _figure(source: str, alt: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img src="{source}" alt="{escape(alt)}">{below}</figure>'


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "numbers") -> str:
    """A table of which the first column names the rows; a long one is folded away."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = (
        f'<tr><th scope="row">{escape(str(row[0]))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    table = (
        f'<table class="{kind}">\n<thead><tr>{top}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table>"
    )
    if len(rows) <= _LONG_TABLE:
        return table
    return f"<details><summary>Table of {len(rows):,} rows</summary>\n{table}\n</details>"


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = (
        f'<tr><th scope="row">{escape(name)}</th>'
        f"<td>{'<br>'.join(map(escape, value.splitlines()))}</td></tr>"
        for name, value in rows
    )
    return '<table class="pairs">\n<tbody>\n' + "\n".join(lines) + "\n</tbody>\n</table>"


_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1a1a1a;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
main { max-width: 920px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 10px; padding-bottom: 4px; border-bottom: 1px solid #ccc;
  overflow-wrap: anywhere; }
section { margin-top: 32px; }
.summary { margin: 0; font-size: 16px; color: #333; }
.warnings { margin-top: 20px; padding: 12px 16px; border-left: 5px solid #b35900;
  background: #fff5e6; }
.warnings h2 { border: 0; margin: 0; padding: 0; font-size: 16px; }
.warnings ul { margin: 4px 0 0; padding-left: 20px; }
.beside { display: flex; flex-wrap: wrap; gap: 4px 32px; align-items: flex-start; }
.beside > div { flex: 1 1 300px; }
figure { margin: 0 0 14px; min-width: 0; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { color: #444; font-size: 14px; }
table { border-collapse: collapse; margin: 0 0 12px; font-size: 14px; }
th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #e4e4e4; overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
thead th { border-bottom: 1px solid #888; overflow-wrap: normal; white-space: nowrap; }
tbody th { font-weight: 600; }
.numbers td, .numbers thead th:not(:first-child) { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.pairs tbody th { font-weight: 400; color: #444; white-space: nowrap; padding-right: 24px; }
.text td, code { font-family: ui-monospace, Consolas, "Liberation Mono", monospace;
  font-size: 13px; }
p { margin: 0 0 8px; }
summary { cursor: pointer; margin-bottom: 6px; }
@media print {
  body { zoom: 0.72; }
  main { max-width: none; padding: 0; }
  figure, tr, .warnings, .beside { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""
