"""Numbers, times and labels of a report as people write them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

Json: TypeAlias = Mapping[str, Any]

DASH = "–"


def dataset_name(model: Json) -> str:
    pin, spec = model.get("pin") or {}, model.get("spec") or {}
    uri = str(pin.get("uri") or spec.get("dataset") or "")
    return uri.rstrip("/").rpartition("/")[2] or str(pin.get("dataset_id") or "a dataset")


def text(label: Any) -> str:
    """A class as its JSON key reads: True and "True" are the same class."""
    return str(label) if isinstance(label, str | bool) else json.dumps(label, ensure_ascii=False)


def names(names: Sequence[str], size: int) -> list[str]:
    return list(names) if len(names) == size else [str(index) for index in range(size)]


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f} %"


def interval(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def number(value: float | None) -> str:
    """Four significant digits, without an exponent where people would write none."""
    if value is None:
        return DASH
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        digits = f"{value:,.4f}" if abs(value) < 1 else f"{value:,.3f}"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{value:.3e}"


def metric(name: str, value: float) -> str:
    return percent(value) if name == "accuracy" else number(value)


def count(number: float) -> str:
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def compact(count: int) -> str:
    """A count that fits a cell: 9999, 12k, 3.4M."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60:,} h {minutes % 60:02} min"


def moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    zone = moment.tzname() or ""
    return f"{moment:%Y-%m-%d %H:%M} {zone}".rstrip()


def with_unit(name: str) -> str:
    return f"{name}, dB" if name.startswith("snr") else name


def group(group: Json) -> str:
    """A bin or a value as people write it."""
    if "from" in group:
        return f"{plain(group['from'])} to {plain(group['to'])}"
    value = group.get("value")
    return "no value" if value is None else plain(value)


def plain(value: Any) -> str:
    if isinstance(value, str | bool):
        return str(value)
    return f"{value:.10g}".replace("-", "−")


def middle(group: Json) -> float | None:
    """Where a group lies on an axis of numbers; None for text, booleans and no value."""
    if "from" in group:
        return float(group["from"] + group["to"]) / 2
    value = group.get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def columns(text: str) -> int:
    """How wide a text is: East Asian characters take two columns."""
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def shortened(text: str, most: int = 14) -> str:
    """A text on one line, cut to so many columns."""
    text = " ".join(text.split()) or '""'
    if columns(text) <= most:
        return text
    while columns(text) >= most:
        text = text[:-1]
    return f"{text}…"


def flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Settings with dotted names, lists a line each; what is not set is left out."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, list | tuple) and value:
        yield prefix, "\n".join(map(yaml, value))
    elif value is not None and value != [] and value != ():
        yield prefix, yaml(value)


def yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
