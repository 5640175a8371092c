"""The schedules of a deployment, held to what a server can keep.

A server works schedules out again and again, for all deployments in one place: a rule that takes
it minutes, or has no end, stops every schedule there is. Such a rule is refused before it is
registered.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Annotated, Any

from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import (
    SCHEDULE_TYPES,
    CronSchedule,
    IntervalSchedule,
    RRuleSchedule,
)
from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic import ValidationError as PydanticValidationError

from signal_batch.errors import SpecError
from signal_batch.specs import Frozen

LEAST_INTERVAL_S = 60
MOST_INTERVAL_S = 3652 * 86_400
MOST_OCCURRENCES = 10_000
MOST_NAME_CHARACTERS = 200
_YEARS = range(1970, 2200)
#: Frequencies as dateutil counts them.
_MINUTELY, _SECONDLY = 5, 6


def a_name(text: str) -> str:
    """A name that fits in a line, a page and a log; raises `SpecError` for any other text."""
    if not text.strip() or len(text) > MOST_NAME_CHARACTERS:
        raise SpecError(
            f"a name has 1 to {MOST_NAME_CHARACTERS} characters, this one has {len(text)}"
        )
    if odd := [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]:
        raise SpecError(f"a name is one line of plain text; take {odd[0]!a} out of it")
    return text


Name = Annotated[str, AfterValidator(a_name)]


class Schedule(Frozen):
    """When a deployment runs by itself: by exactly one of `cron`, `interval` and `rrule`."""

    cron: str | None = None
    interval: float | None = Field(default=None, description="seconds")
    rrule: str | None = None
    timezone: str | None = None
    anchor_date: datetime | date | None = None
    day_or: bool = True
    slug: Name | None = None
    active: bool | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)

    @field_validator("interval")
    @classmethod
    def _interval_in_reach(cls, value: float | None) -> float | None:
        if value is not None and not LEAST_INTERVAL_S <= value <= MOST_INTERVAL_S:
            raise SpecError(
                f"{value:g} is no interval; write seconds, from {LEAST_INTERVAL_S} to "
                f"{MOST_INTERVAL_S} (10 years)"
            )
        return value

    @field_validator("anchor_date")
    @classmethod
    def _anchor_in_reach(cls, value: date | None) -> date | None:
        if value is not None:
            _check_year("an anchor date", value)
        return value

    @model_validator(mode="after")
    def _one_form(self) -> Schedule:
        forms = [name for name in ("cron", "interval", "rrule") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise SpecError(f"a schedule takes one of cron, interval and rrule, not {forms}")
        return self

    def build(self) -> DeploymentScheduleCreate:
        """Prefect's schedule. What the file leaves open is not sent, so the server keeps its own.

        Raises `SpecError` for an expression that means nothing, or too much.
        """
        given = self.model_dump(exclude_none=True, include={"slug", "active"})
        if self.parameters:
            given["parameters"] = self.parameters
        try:
            return DeploymentScheduleCreate(schedule=self._timing(), **given)
        except PydanticValidationError as exc:
            raise SpecError(first_message(exc)) from exc

    def _timing(self) -> SCHEDULE_TYPES:
        if self.cron is not None:
            return CronSchedule(cron=self.cron, timezone=self.timezone, day_or=self.day_or)
        if self.rrule is not None:
            return _rule(self.rrule, self.timezone)
        anchor = {"anchor_date": self.anchor_date} if self.anchor_date else {}
        return IntervalSchedule.model_validate(
            {"interval": timedelta(seconds=self.interval or 0), "timezone": self.timezone, **anchor}
        )


def refuse_two_of_a_slug(schedules: tuple[Schedule, ...]) -> None:
    """Refuse schedules of which one would take the other's place on the server."""
    slugs = [schedule.slug for schedule in schedules if schedule.slug is not None]
    if twice := sorted({slug for slug in slugs if slugs.count(slug) > 1}):
        raise SpecError(f"slug {twice[0]!r} is there twice; give each schedule its own")


def first_message(exc: PydanticValidationError) -> str:
    """The first fault that pydantic names, and where it is."""
    item = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _rule(text: str, timezone: str | None) -> RRuleSchedule:
    """Prefect's schedule by a rule of iCalendar that a server can work out."""
    zone = {"timezone": timezone} if timezone else {}
    try:
        schedule = RRuleSchedule.model_validate({"rrule": text, **zone})
        found = schedule.to_rrule()
        for rule in _rules(found):
            _check_rule(rule, begins="DTSTART" in text.upper())
        due = next(iter(found), None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, AssertionError) as exc:
        raise SpecError(f"rrule {text[:200]!r} is no rule of iCalendar: {exc}") from exc
    if due is None:
        raise SpecError(f"rrule {text[:200]!r} never comes due; change its BY... parts or its end")
    return schedule


def _rules(found: Any) -> Iterator[Any]:
    """The rules of what dateutil read: it is one rule, or a set of them."""
    yield from (*found._rrule, *found._exrule) if hasattr(found, "_rrule") else (found,)


def _check_rule(rule: Any, *, begins: bool) -> None:
    if rule._freq == _SECONDLY or (rule._freq == _MINUTELY and begins):
        raise SpecError(
            "rrule: a rule comes due at most every minute, and with a DTSTART every hour; write "
            "FREQ=MINUTELY without DTSTART, FREQ=HOURLY or an interval"
        )
    if (rule._count or 0) > MOST_OCCURRENCES:
        raise SpecError(f"rrule: COUNT is {MOST_OCCURRENCES} at most; write UNTIL=DATE, or no end")
    _check_year("rrule: DTSTART", rule._dtstart)


def _check_year(subject: str, value: date) -> None:
    if value.year not in _YEARS:
        raise SpecError(
            f"{subject} lies in the years {_YEARS[0]} to {_YEARS[-1]}, not in {value.year}"
        )
