"""The pictures of reports: charts as SVG, drawn by Matplotlib."""

from __future__ import annotations

import base64
import io
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from signal_batch import wording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json: TypeAlias = Mapping[str, Any]

#: Okabe and Ito's colours, told apart with any kind of colour vision, and a line for grey print.
LINES = {"train": ("#0072B2", "-"), "validation": ("#D55E00", "--"), "test": ("#009E73", ":")}

#: Points of one learning curve; longer ones are averaged down to this.
_MOST_POINTS = 300
#: Classes up to which a confusion matrix shows its counts and its labels.
MOST_COUNTED, MOST_LABELLED = 26, 60

# Matplotlib's settings are global to the process: two reports take turns.
_DRAWING = threading.Lock()


@contextmanager
def drawing() -> Iterator[None]:
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
    width: float,
    height: float,
    draw: Callable[[Axes], object],
    *,
    cropped: bool = False,
    dpi: int = 144,
) -> str:
    """An SVG of one pair of axes, in inches, as a `data:` URI; `cropped` takes margins off.

    `dpi` is that of images in it, which are what makes it large.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure.add_subplot())
    target = io.BytesIO()
    nothing = {"Date": None, "Creator": None}
    box = "tight" if cropped else None
    figure.savefig(target, format="svg", dpi=dpi, metadata=nothing, bbox_inches=box)
    return f"data:image/svg+xml;base64,{base64.b64encode(target.getvalue()).decode()}"


def draw_curves(name: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A metric over steps, one line for each side."""
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


def draw_confusion(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> str:
    """A confusion matrix, counts in cells coloured by the share of their row."""
    size = len(matrix)
    totals = [max(1, sum(row)) for row in matrix]
    shares = [
        [100 * count / total for count in row] for row, total in zip(matrix, totals, strict=True)
    ]
    side = max(2.2, min(0.5 * size, 7.2))
    longest = max(len(wording.compact(count)) for row in matrix for count in row)
    font = min(9.0, 0.84 * 72 * side / size / (0.65 * longest))

    def draw(axes: Axes) -> None:
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
        if size <= MOST_LABELLED:
            labels = [wording.shortened(name) for name in names]
            upright = max(map(wording.columns, labels)) * 0.62 * 8 < 72 * side / size
            axes.set_xticks(range(size), labels, rotation=0 if upright else 90, fontsize=8)
            axes.set_yticks(range(size), labels, fontsize=8)
            axes.set_xticks([i - 0.5 for i in range(1, size)], minor=True)
            axes.set_yticks([i - 0.5 for i in range(1, size)], minor=True)
            axes.grid(True, which="minor", color="white", linewidth=1)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        number = "" if size <= MOST_LABELLED else ", by number"
        axes.set(xlabel=f"predicted class{number}", ylabel=f"true class{number}")
        if size <= MOST_COUNTED:
            for row, column in ((i, j) for i in range(size) for j in range(size) if matrix[i][j]):
                colour = "white" if shares[row][column] > 66 else "#222"
                cell = axes.text(column, row, wording.compact(matrix[row][column]), color=colour)
                cell.set(ha="center", va="center", fontsize=font, in_layout=False)
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.02)
        bar.set_label("share of the true class, %")
        bar.outline.set_visible(False)

    return _picture(side + 1.6, side + 0.6, draw, cropped=True)


def draw_points(name: str, groups: Sequence[Json]) -> str:
    """Accuracy over the middles of numeric groups, with a band for the interval."""
    places = [float(wording.middle(group) or 0) for group in groups]

    def draw(axes: Axes) -> None:
        low, middle, high = (
            [100 * group[key] for group in groups] for key in ("low", "accuracy", "high")
        )
        colour = LINES["train"][0]
        axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(places, middle, "o-", color=colour, markersize=4)
        axes.set(xlabel=wording.with_unit(name), ylabel="accuracy, %", ylim=(0, 102))
        axes.grid(True)

    return _picture(4.4, 3.0, draw)


def draw_bars(name: str, groups: Sequence[Json]) -> str:
    """Accuracy of each group as a bar, with its interval."""

    def draw(axes: Axes) -> None:
        places = range(len(groups))
        shares = [100 * group["accuracy"] for group in groups]
        below = [100 * (group["accuracy"] - group["low"]) for group in groups]
        above = [100 * (group["high"] - group["accuracy"]) for group in groups]
        axes.barh(places, shares, height=0.65, color="#56B4E9")
        axes.errorbar(
            shares, places, xerr=[below, above], fmt="none", ecolor="#333", capsize=3, lw=1
        )
        axes.set_yticks(places, [wording.shortened(wording.group(group), 22) for group in groups])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set(xlabel="accuracy, %", ylabel=wording.with_unit(name), xlim=(0, 102))
        axes.grid(True, axis="x")

    return _picture(4.4, 0.9 + 0.3 * len(groups), draw)


def draw_lines(name: str, rows: npt.NDArray[Any], labels: Sequence[str]) -> str:
    """Each row of a (R, N) array as a line over its index, in dB as `draw_map` is."""
    wide = _is_wide(rows)
    shown = 10 * np.log10(rows) if wide else rows

    def draw(axes: Axes) -> None:
        for label, row in zip(labels, shown, strict=True):
            axes.plot(row, lw=1.2, label=label)
        axes.set(xlabel="index", ylabel=f"{name}, dB" if wide else name)
        axes.grid(True)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(rows), borderpad=0)

    return _picture(5.6, 3.0, draw)


def draw_map(name: str, values: npt.NDArray[Any]) -> str:
    """A matrix as colours, first axis upwards; in dB where it holds powers of a wide range."""
    wide = _is_wide(values)
    shown = 10 * np.log10(values) if wide else values

    def draw(axes: Axes) -> None:
        drawn = axes.imshow(shown, aspect="auto", origin="lower", cmap="viridis")
        axes.set(title=f"{name}, dB" if wide else name)
        assert axes.figure is not None
        axes.figure.colorbar(drawn)

    return _picture(5.6, 3.0, draw, dpi=72)


def _is_wide(values: npt.NDArray[Any]) -> bool:
    return bool(values.min() > 0 and values.max() > 100 * values.min())


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS` points: means over runs of equal length."""
    run = -(-len(points) // _MOST_POINTS)
    pieces = (points[at : at + run] for at in range(0, len(points), run))
    return [tuple(sum(v) / len(v) for v in zip(*piece, strict=True)) for piece in pieces]
