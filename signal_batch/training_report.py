"""report.html: what a training run learned, from what and how fast, for people to read.

One file without scripts or links, so it opens from a disk, an attachment or an object store.
Pictures are SVG from Matplotlib in `data:` URIs. Equal input gives an equal file, for the same
versions of Matplotlib.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from signal_batch.evaluation import wilson_interval
from signal_batch.metrics import RESERVED, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json: TypeAlias = Mapping[str, Any]

#: Sides as results are listed: the one that was held back longest goes first.
SIDES = ("test", "validation", "train")
#: Okabe and Ito's colours, told apart with any kind of colour vision, and a line for grey print.
LINES = {"train": ("#0072B2", "-"), "validation": ("#D55E00", "--"), "test": ("#009E73", ":")}

#: Points of one learning curve; longer ones are averaged down to this.
_MOST_POINTS = 300
#: Groups drawn and listed of one column that accuracy is broken down by.
_MOST_GROUPS = 30
#: Classes up to which a confusion matrix shows its counts and its labels.
_MOST_COUNTED, _MOST_LABELLED = 26, 60
#: Rows of a table from which it is folded away.
_LONG_TABLE = 30
_DASH = "–"

# Matplotlib's settings are global to the process: two reports take turns.
_DRAWING = threading.Lock()


def render(model: Json, history: Sequence[Json], evaluation: Mapping[str, Json]) -> str:
    """The whole page, from a model.json, metric rows and the results of `Scores` by side.

    Parts that a run has nothing for, such as classes, are left out.
    """
    names = [_text(label) for label in model.get("classes") or ()]
    judged = next((side for side in SIDES if evaluation.get(side, {}).get("records")), None)
    result = evaluation[judged] if judged else {}
    title = f"{_dataset_name(model)}, trained with {model.get('trainer', 'an unknown trainer')}"
    with _drawing():
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
        parts.append(_counted(cursor["step"], "step"))
    if "records" in cursor:
        parts.append(f"{_counted(cursor['records'], 'record')} seen")
    if "train_s" in timing:
        parts.append(f"{_duration(timing['train_s'])} of training")
    line = " · ".join(part for part in parts if part)
    return f'<p class="summary">{escape(line)}</p>' if line else ""


def _final(history: Sequence[Json], evaluation: Mapping[str, Json]) -> str:
    """Final accuracies, or the final losses of a run without classes."""
    results = {side: evaluation[side].get("accuracy") for side in SIDES if side in evaluation}
    shown = [f"{_percent(value)} on {side}" for side, value in results.items() if value is not None]
    if shown:
        return f"accuracy {', '.join(shown)}"
    for name in ("accuracy", "loss"):
        curves = {side: _curve(history, side, name) for side in SIDES}
        form = _percent if name == "accuracy" else _number
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


def _learning(history: Sequence[Json], evaluation: Mapping[str, Json]) -> str:
    chosen = _learned(history)
    figures = []
    for name in chosen:
        curves = {side: _curve(history, side, name) for side in LINES}
        curves = {side: points for side, points in curves.items() if points}
        if curves:
            ends = (f"{side} ends at {_metric(name, c[-1][1])}" for side, c in curves.items())
            alt = f"{name} over steps: {', '.join(ends)}"
            figures.append(_figure(_draw_curves(name, curves), alt))
    rows = []
    for side in SIDES:
        result = evaluation.get(side, {})
        if result.get("records") and result.get("accuracy") is not None:
            right = round(result["accuracy"] * result["records"])
            interval = _interval(*wilson_interval(right, result["records"]))
            loss = "not finite" if result.get("loss") is None else _number(result["loss"])
            accuracy = _percent(result["accuracy"])
            rows.append([side, _count(result["records"]), accuracy, interval, loss])
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
    names = _names(names, len(matrix))
    alt = (
        f"Confusion matrix of {_counted(result['records'], 'record')} in {len(matrix)} classes; "
        f"{_percent(result['accuracy'])} are on the diagonal"
    )
    counted = "counts, coloured by" if len(matrix) <= _MOST_COUNTED else "coloured by"
    caption = f"Side {judged}: {counted} the share of the true class"
    if len(matrix) > _MOST_LABELLED:
        caption += "; classes are numbered from 0 in the order of the table"
    rows = [
        [name, _count(item["records"]), *(_percent(item[k]) for k in ("recall", "precision", "f1"))]
        for name, item in zip(names, classes, strict=True)
    ]
    table = _table(["class", "records", "recall", "precision", "F1"], rows)
    picture = _figure(_draw_confusion(names, matrix), alt, caption)
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
    numeric = [group for group in kept if _middle(group) is not None]
    draw = _draw_points if len(numeric) > 2 else _draw_bars
    best = max(kept, key=lambda group: float(group["accuracy"]))
    worst = min(kept, key=lambda group: float(group["accuracy"]))
    alt = (
        f"Accuracy by {name}: from {_percent(worst['accuracy'])} at {_group(worst)} to "
        f"{_percent(best['accuracy'])} at {_group(best)}"
    )
    caption = f"Side {judged}, with 95 % intervals"
    rows = [
        [
            _group(group),
            _count(group["records"]),
            _percent(group["accuracy"]),
            _interval(group["low"], group["high"]),
        ]
        for group in kept
    ]
    table = _table([_with_unit(name), "records", "accuracy", "95 % interval"], rows)
    if len(kept) < len(groups):
        table += f"<p>The {len(kept)} largest of {len(groups):,} groups are shown.</p>"
    drawn = numeric if draw is _draw_points else kept
    return _beside(_figure(draw(name, drawn), alt, caption), f"<div>{table}</div>")


def _split(names: Sequence[str], split: Json) -> str:
    sides: Mapping[str, Json] = split.get("sides") or {}
    if not sides:
        return ""
    total = sum(side["records"] for side in sides.values()) + (split.get("unused") or 0)
    scenes = any(side.get("scenes") for side in sides.values())
    rows = [
        [side, _count(item["records"]), _percent(item["records"] / max(1, total))]
        + ([_count(item.get("scenes") or 0)] if scenes else [])
        for side, item in sides.items()
    ]
    if split.get("unused"):
        left = [_count(split["unused"]), _percent(split["unused"] / total)]
        rows.append(["left out", *left] + ([_DASH] if scenes else []))
    table = _table(["side", "records", "share"] + (["scenes"] if scenes else []), rows)
    shared = split.get("shared_scenes") or 0
    note = f"<p>Split by <code>{escape(str(split['by']))}</code>.</p>" if split.get("by") else ""
    if scenes:
        note += f"<p>Scenes on more than one side: {shared:,}.</p>"
    return _section("Split", _beside(f"<div>{table}{note}</div>", _class_counts(names, sides)))


def _class_counts(names: Sequence[str], sides: Mapping[str, Json]) -> str:
    counts: dict[str, Mapping[str, int]] = {
        side: {_text(label): count for label, count in (item.get("classes") or {}).items()}
        for side, item in sides.items()
    }
    labels = list(dict.fromkeys([*names, *(label for of in counts.values() for label in of)]))
    if not any(counts.values()):
        return ""
    rows = [[label, *(_count(of.get(label, 0)) for of in counts.values())] for label in labels]
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
        rows.append(("records", _count(pin["record_count"])))
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
        rows.append(("records per second", _count(round(timing["records"] / seconds))))
    if seconds and "steps" in timing:
        rows.append(("steps per second", _number(timing["steps"] / seconds)))
    if seconds is not None:
        rows.append(("training", _duration(seconds)))
    if seconds and "wait_s" in timing:
        share = _percent(timing["wait_s"] / seconds)
        waited = f"{_duration(timing['wait_s'])}, {share} of the time of training"
        rows.append(("waiting for input", waited))
    if attempts := timing.get("attempts"):
        resumed = "" if attempts == 1 else f", resumed {_times(attempts - 1)}"
        rows.append(("attempts", f"{attempts:,}{resumed}"))
    return _section("Speed", _pairs(rows))


def _settings(model: Json) -> str:
    spec = model.get("spec") or {"trainer_args": model.get("trainer_args")}
    return _section("Settings", _pairs(list(_flat("", spec))))


def _versions(model: Json) -> str:
    rows = [("run key", str(model["run_key"]))] if model.get("run_key") else []
    if model.get("created"):
        rows.append(("created", _moment(str(model["created"]))))
    rows += [(name, str(version)) for name, version in (model.get("versions") or {}).items()]
    return _section("Run and versions", _pairs(rows))


# --- pictures ----------------------------------------------------------------------------------


@contextmanager
def _drawing() -> Iterator[None]:
    """Matplotlib as it comes, whatever the process set, for one thread at a time.

    Text stays text, so it is found, and drawn in scripts that Matplotlib's own font lacks (of
    which it warns); `$` in a label is no formula. Importing it takes most of a second, so only
    reports do.
    """
    import matplotlib.style

    settings = {
        **{"svg.fonttype": "none", "svg.hashsalt": "signal-batch", "text.parse_math": False},
        **{
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 9,
            "axes.edgecolor": "#666",
            "axes.axisbelow": True,
            "grid.color": "#ddd",
        },
        **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    }
    with _DRAWING, matplotlib.style.context(["default", settings]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _picture(
    width: float, height: float, draw: Callable[[Axes], object], *, cropped: bool = False
) -> str:
    """An SVG of one pair of axes, in inches, as a `data:` URI; `cropped` takes margins off."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure.add_subplot())
    target = io.BytesIO()
    nothing = {"Date": None, "Creator": None}
    box = "tight" if cropped else None
    figure.savefig(target, format="svg", dpi=144, metadata=nothing, bbox_inches=box)
    return f"data:image/svg+xml;base64,{base64.b64encode(target.getvalue()).decode()}"


def _draw_curves(name: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    share = name == "accuracy"

    def draw(axes: Axes) -> None:
        for side, points in curves.items():
            colour, line = LINES[side]
            marker = "o" if len(points) <= 40 and (side != "train" or len(points) == 1) else ""
            steps, values = zip(*_thinned(points), strict=True)
            drawn = [100 * value for value in values] if share else values
            axes.plot(
                steps, drawn, line, color=colour, marker=marker, markersize=3.5, label=side, lw=1.6
            )
        axes.set(xlabel="step", ylabel="accuracy, %" if share else name)
        if share:
            axes.set_ylim(0, 102)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.grid(True)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(curves), borderpad=0)

    return _picture(4.4, 3.0, draw)


def _draw_confusion(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> str:
    size = len(matrix)
    totals = [max(1, sum(row)) for row in matrix]
    shares = [
        [100 * count / total for count in row] for row, total in zip(matrix, totals, strict=True)
    ]
    side = max(2.2, min(0.5 * size, 7.2))
    longest = max(len(_compact(count)) for row in matrix for count in row)
    font = min(9.0, 0.84 * 72 * side / size / (0.65 * longest))

    def draw(axes: Axes) -> None:
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
        if size <= _MOST_LABELLED:
            labels = [_shortened(name) for name in names]
            upright = max(map(_columns, labels)) * 0.62 * 8 < 72 * side / size
            axes.set_xticks(range(size), labels, rotation=0 if upright else 90, fontsize=8)
            axes.set_yticks(range(size), labels, fontsize=8)
            axes.set_xticks([i - 0.5 for i in range(1, size)], minor=True)
            axes.set_yticks([i - 0.5 for i in range(1, size)], minor=True)
            axes.grid(True, which="minor", color="white", linewidth=1)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        number = "" if size <= _MOST_LABELLED else ", by number"
        axes.set(xlabel=f"predicted class{number}", ylabel=f"true class{number}")
        if size <= _MOST_COUNTED:
            for row, column in ((i, j) for i in range(size) for j in range(size) if matrix[i][j]):
                colour = "white" if shares[row][column] > 66 else "#222"
                cell = axes.text(column, row, _compact(matrix[row][column]), color=colour)
                cell.set(ha="center", va="center", fontsize=font, in_layout=False)
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.02)
        bar.set_label("share of the true class, %")
        bar.outline.set_visible(False)

    return _picture(side + 1.6, side + 0.6, draw, cropped=True)


def _draw_points(name: str, groups: Sequence[Json]) -> str:
    places = [float(_middle(group) or 0) for group in groups]

    def draw(axes: Axes) -> None:
        low, middle, high = (
            [100 * group[key] for group in groups] for key in ("low", "accuracy", "high")
        )
        colour = LINES["train"][0]
        axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(places, middle, "o-", color=colour, markersize=4)
        axes.set(xlabel=_with_unit(name), ylabel="accuracy, %", ylim=(0, 102))
        axes.grid(True)

    return _picture(4.4, 3.0, draw)


def _draw_bars(name: str, groups: Sequence[Json]) -> str:
    def draw(axes: Axes) -> None:
        places = range(len(groups))
        shares = [100 * group["accuracy"] for group in groups]
        below = [100 * (group["accuracy"] - group["low"]) for group in groups]
        above = [100 * (group["high"] - group["accuracy"]) for group in groups]
        axes.barh(places, shares, height=0.65, color="#56B4E9")
        axes.errorbar(
            shares, places, xerr=[below, above], fmt="none", ecolor="#333", capsize=3, lw=1
        )
        axes.set_yticks(places, [_shortened(_group(group), 22) for group in groups])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set(xlabel="accuracy, %", ylabel=_with_unit(name), xlim=(0, 102))
        axes.grid(True, axis="x")

    return _picture(4.4, 0.9 + 0.3 * len(groups), draw)


def _curve(history: Sequence[Json], side: str, name: str) -> list[tuple[int, float]]:
    """Step and value of every row of a side that has one, as far as axes can reach."""
    rows = ((row["step"], value_of(row, name)) for row in history if row["side"] == side)
    return [(step, value) for step, value in rows if value is not None and abs(value) < 1e300]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS` points: means over runs of equal length."""
    run = -(-len(points) // _MOST_POINTS)
    pieces = (points[at : at + run] for at in range(0, len(points), run))
    return [tuple(sum(v) / len(v) for v in zip(*piece, strict=True)) for piece in pieces]


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


# --- values for people -------------------------------------------------------------------------


def _dataset_name(model: Json) -> str:
    pin, spec = model.get("pin") or {}, model.get("spec") or {}
    uri = str(pin.get("uri") or spec.get("dataset") or "")
    return uri.rstrip("/").rpartition("/")[2] or str(pin.get("dataset_id") or "a dataset")


def _text(label: Any) -> str:
    """A class as its JSON key reads: True and "True" are the same class."""
    return str(label) if isinstance(label, str | bool) else json.dumps(label, ensure_ascii=False)


def _names(names: Sequence[str], size: int) -> list[str]:
    return list(names) if len(names) == size else [str(index) for index in range(size)]


def _percent(share: float | None) -> str:
    return _DASH if share is None else f"{100 * share:.1f} %"


def _interval(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _number(value: float | None) -> str:
    """Four significant digits, without an exponent where people would write none."""
    if value is None:
        return _DASH
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        digits = f"{value:,.4f}" if abs(value) < 1 else f"{value:,.3f}"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{value:.3e}"


def _metric(name: str, value: float) -> str:
    return _percent(value) if name == "accuracy" else _number(value)


def _count(number: float) -> str:
    return f"{number:,}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _compact(count: int) -> str:
    """A count that fits a cell: 9999, 12k, 3.4M."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60:,} h {minutes % 60:02} min"


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    zone = moment.tzname() or ""
    return f"{moment:%Y-%m-%d %H:%M} {zone}".rstrip()


def _with_unit(name: str) -> str:
    return f"{name}, dB" if name.startswith("snr") else name


def _group(group: Json) -> str:
    """A bin or a value as people write it."""
    if "from" in group:
        return f"{_plain(group['from'])} to {_plain(group['to'])}"
    value = group.get("value")
    return "no value" if value is None else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, str | bool):
        return str(value)
    return f"{value:.10g}".replace("-", "−")


def _middle(group: Json) -> float | None:
    """Where a group lies on an axis of numbers; None for text, booleans and no value."""
    if "from" in group:
        return float(group["from"] + group["to"]) / 2
    value = group.get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _columns(text: str) -> int:
    """How wide a text is: East Asian characters take two columns."""
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def _shortened(text: str, columns: int = 14) -> str:
    text = " ".join(text.split()) or '""'
    if _columns(text) <= columns:
        return text
    while _columns(text) >= columns:
        text = text[:-1]
    return f"{text}…"


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Settings with dotted names, lists a line each; what is not set is left out."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, list | tuple) and value:
        yield prefix, "\n".join(map(_yaml, value))
    elif value is not None and value != [] and value != ():
        yield prefix, _yaml(value)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
