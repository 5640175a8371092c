"""Places that move with time: templates in a spec, resolved from a run's scheduled time.

::

    s3://lab/captures-{scheduled:%Y-%m-%d}.sds       the day that the run is scheduled for
    features/year={scheduled-1d:%Y}/month={scheduled-1d:%m}   of the day before
    logs/{scheduled+90m:%Y%m%d-%H%M}                 offsets in m, h, d or w, before or after

`dataset`, `output` and `pin` may hold any number of them. Times are in UTC, whatever time zone a
schedule is written in, and an offset counts elapsed time. Directives give digits only, the same
on every machine; between them may stand letters, digits and `/ - _ . = + ,`.

Braces that begin with `scheduled`, or hold a format such as `:%Y`, are meant as a template and
must be a good one. In a text without any template a brace is plain text: a dataset may be called
`{a}.sds`. Beside a template it is taken for a slip, and refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from pydantic import BaseModel

from signal_batch.errors import SpecError

S = TypeVar("S", bound=BaseModel)

#: Fields of a spec that may hold templates.
MOVING = ("dataset", "output", "pin")

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DIRECTIVES: dict[str, Callable[[datetime], str]] = {
    "Y": lambda at: f"{at.year:04d}",
    "y": lambda at: f"{at.year % 100:02d}",
    "m": lambda at: f"{at.month:02d}",
    "d": lambda at: f"{at.day:02d}",
    "H": lambda at: f"{at.hour:02d}",
    "M": lambda at: f"{at.minute:02d}",
    "S": lambda at: f"{at.second:02d}",
    "j": lambda at: f"{at.timetuple().tm_yday:03d}",
    "G": lambda at: f"{at.isocalendar().year:04d}",
    "V": lambda at: f"{at.isocalendar().week:02d}",
    "u": lambda at: f"{at.isoweekday()}",
}
_KNOWN = (
    "%Y year, %y its last two digits, %m month, %d day, %j day of the year, %H hour, %M minute, "
    "%S second, %G, %V and %u year, week and weekday of ISO 8601"
)
_BRACES = re.compile(r"\{([^{}]*)\}?")
_MEANT = re.compile(r"\s*scheduled|[^:]*:\s*%", re.IGNORECASE)
_TEMPLATE = re.compile(r"scheduled(?:([+-])([0-9]+)([mhdw]))?:(.+)", re.DOTALL)
_DURATION = re.compile(r"([0-9]+)([mhdw])")
_PLAIN = re.compile(r"[A-Za-z0-9/_.,=+-]*")
_DIRECTIVE = re.compile(r"%(.?)", re.DOTALL)
_ANY_MOMENT = datetime(2000, 1, 1, tzinfo=UTC)
_EXAMPLE = "as in {scheduled:%Y-%m-%d} or {scheduled-1d:%Y/%m/%d}"


def at_time(spec: S, moment: datetime) -> S:
    """The spec of the run for this moment: every template resolved, in UTC.

    A moment without a time zone is taken for UTC. A spec without templates comes back as it is.
    """
    moment = _in_utc(moment)
    fields = {name: getattr(spec, name, None) for name in MOVING}
    changed = {
        name: resolve(text, moment) for name, text in fields.items() if text and is_moving(text)
    }
    return spec.model_copy(update=changed) if changed else spec


def resolve(text: str, moment: datetime) -> str:
    """The text with every template in it resolved; raises `SpecError` for a bad one."""
    moment = _in_utc(moment)
    pieces, between, end = [], [], 0
    for found in _templates(text):
        between.append(text[end : found.start()])
        pieces += [between[-1], _resolved(found, moment)]
        end = found.end()
    if pieces and re.search("[{}]", "".join([*between, text[end:]])):
        raise SpecError(f"{text}: a brace is left over beside the template; take it out")
    return "".join([*pieces, text[end:]])


def is_moving(text: str) -> bool:
    """Whether the text holds a template."""
    return any(True for _ in _templates(text))


def check_templates(*, dataset: str, output: str, pin: str | None) -> None:
    """Refuse bad templates, and those that would send two days' data to one output."""
    moves = {}
    for name, text in (("dataset", dataset), ("output", output), ("pin", pin or "")):
        resolve(text, _ANY_MOMENT)
        moves[name] = is_moving(text)
    source = next((name for name in ("dataset", "pin") if moves[name]), None)
    if source and not moves["output"]:
        raise SpecError(
            f"{source} moves with the scheduled time but output does not, so the next run would "
            "meet the output of the one before, made of other data; give output a template too, "
            "for example features-{scheduled:%Y-%m-%d}"
        )


def refuse_unresolved(spec: BaseModel) -> None:
    """Refuse to work on a spec whose place still depends on a time that nobody gave."""
    for name in MOVING:
        text = getattr(spec, name, None)
        if text and is_moving(text):
            raise SpecError(
                f"{name} {text} depends on the scheduled time of a run; give --scheduled TIME, "
                "for example --scheduled 2026-03-01, or in Python signal_batch.scheduling.at_time"
            )


def parse_moment(text: str) -> datetime:
    """A moment in UTC from an ISO date or date-time; UTC is meant where no zone is given."""
    try:
        return _in_utc(datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        raise SpecError(
            f"{text!r} is no date or time; write 2026-03-01, 2026-03-01T06:00 (UTC) or "
            "2026-03-01T06:00+01:00"
        ) from None


def parse_every(text: str) -> timedelta:
    """A positive step of time, `90m`, `6h`, `1d` or `2w`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not match[1].strip("0"):
        raise SpecError(f"{text!r} is no step of time; write 90m, 6h, 1d or 2w")
    return _duration(match[1], match[2])


def _templates(text: str) -> Iterator[re.Match[str]]:
    return (found for found in _BRACES.finditer(text) if _MEANT.match(found[1]))


def _resolved(found: re.Match[str], moment: datetime) -> str:
    match = _TEMPLATE.fullmatch(found[1])
    if match is None or not found[0].endswith("}"):
        raise SpecError(f"{found[0]} is no template; write it {_EXAMPLE}")
    sign, amount, unit, form = match.groups()
    _check_form(found[0], form)
    offset = _duration(amount, unit) if amount else timedelta()
    try:
        at = moment - offset if sign == "-" else moment + offset
    except OverflowError:
        raise SpecError(f"{found[0]} leaves the calendar; its offset is too large") from None
    return _DIRECTIVE.sub(lambda item: _DIRECTIVES[item[1]](at), form)


def _check_form(shown: str, form: str) -> None:
    used = _DIRECTIVE.findall(form)
    if bad := [letter for letter in used if letter not in _DIRECTIVES]:
        raise SpecError(f"{shown}: %{bad[0]} is not known; there are {_KNOWN}")
    if not used:
        raise SpecError(f"{shown} has no directive in it; write it {_EXAMPLE}")
    if _PLAIN.fullmatch(_DIRECTIVE.sub("", form)) is None:
        raise SpecError(
            f"{shown}: only letters, digits and / - _ . = + , may stand between directives"
        )
    if ".." in form:
        raise SpecError(f"{shown}: '..' would lead out of the folder; take it out")


def _duration(amount: str, unit: str) -> timedelta:
    try:
        return timedelta(**{_UNITS[unit]: int(amount)})
    except (OverflowError, ValueError):  # of more days, or more digits, than Python counts
        raise SpecError(f"{amount[:20]}{unit} is longer than any calendar") from None


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC)
