"""The schedules of a deployment, held to what a server can keep.

A server works schedules out again and again, for all deployments in one place: a rule that takes
it minutes, or has no end, stops every schedule there is. Such a rule is refused before it is
registered.
"""

from __future__ import annotations

import subprocess
import sys
import unicodedata
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
from signal_batch.frozen import Frozen

LEAST_INTERVAL_S = 60
MOST_INTERVAL_S = 3652 * 86_400
MOST_OCCURRENCES = 10_000
MOST_NAME_CHARACTERS = 200
_YEARS = range(1970, 2200)
#: As dateutil counts frequencies.
_SECONDLY = 6
#: Processor seconds. Some rules have no next date and no end either, and nothing but doing it shows
#: which: `FREQ=MINUTELY;BYHOUR=3;BYSETPOS=5`.
MOST_WORK_S = 3
_NEXT_DATE = """
import sys
from datetime import datetime
from dateutil.rrule import rrulestr
try:
    from resource import RLIMIT_CPU, setrlimit
    setrlimit(RLIMIT_CPU, (int(sys.argv[1]),) * 2)
except ImportError:
    pass
rule = rrulestr(sys.stdin.read(), dtstart=datetime(2020, 1, 1))
first = next(iter(rule), None)
if first is None:
    sys.exit("it has no date at all")
next(rule.xafter(datetime.now(first.tzinfo), inc=True), None)
"""


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
            made = DeploymentScheduleCreate(schedule=self._timing(), **given)
        except PydanticValidationError as exc:
            raise SpecError(first_message(exc)) from exc
        if isinstance(made.schedule, RRuleSchedule):
            _work_out(made.schedule.rrule, shown=f"rrule {(self.rrule or '')[:200]!r}")
        return made

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
        for rule in getattr(found, "_rrule", (found,)):  # it is one rule, or a set of them
            _check_rule(rule)
    except (ArithmeticError, AttributeError, LookupError, TypeError, AssertionError) as exc:
        raise SpecError(f"rrule {text[:200]!r} is no rule of iCalendar: {exc}") from exc
    return schedule


def _check_rule(rule: Any) -> None:
    if rule._freq == _SECONDLY:
        raise SpecError("rrule: a rule comes due every minute at most; write FREQ=MINUTELY")
    if (rule._count or 0) > MOST_OCCURRENCES:
        raise SpecError(f"rrule: COUNT is {MOST_OCCURRENCES} at most; write UNTIL=DATE, or no end")
    _check_year("rrule: DTSTART", rule._dtstart)


def _work_out(rule: str, shown: str) -> None:
    """Find the next date of a rule as a server does it, in a process that ends if it cannot.

    The rule is the one that is sent, with the beginning that Prefect gave it.
    """
    program = (sys.executable, "-c", _NEXT_DATE, str(MOST_WORK_S))
    try:
        done = subprocess.run(program, input=rule.encode(), capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode < 0:
        raise SpecError(
            f"{shown} takes a server more than {MOST_WORK_S} s to work out; write "
            "one that comes due less often, begins later or has fewer BY... parts"
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SpecError(f"{shown} is no rule that comes due: {said}")


def _check_year(subject: str, value: date) -> None:
    if value.year not in _YEARS:
        raise SpecError(
            f"{subject} lies in the years {_YEARS[0]} to {_YEARS[-1]}, not in {value.year}"
        )
