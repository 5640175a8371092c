"""Templates of places that move with time, against what `datetime` itself says."""

from __future__ import annotations

import json
import string
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from signal_batch import planning
from signal_batch.errors import SpecError
from signal_batch.frozen import checked
from signal_batch.scheduling import (
    at_time,
    is_moving,
    parse_every,
    parse_moment,
    refuse_unresolved,
    resolve,
)
from signal_batch.specs import ExportSpec
from signal_batch.training_spec import TrainSpec

DIRECTIVES = "YymdHMSjGVu"
UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}

# From the year 1000 on: before, C libraries differ in whether %Y has four digits.
moments = st.datetimes(
    min_value=datetime(1200, 1, 1), max_value=datetime(9000, 1, 1), timezones=st.just(UTC)
)
formats = st.lists(
    st.one_of(
        st.sampled_from([f"%{letter}" for letter in DIRECTIVES]),
        st.sampled_from(["-", "/", "_", ".", "year=", "T", "+", ","]),
    ),
    min_size=1,
    max_size=8,
).map("".join)
plain = st.text(alphabet=string.ascii_letters + string.digits + "/-_. ", max_size=12).filter(
    lambda text: "sched" not in text.lower()
)


def spec(**changes: Any) -> ExportSpec:
    fields = {
        "dataset": "s3://lab/captures-{scheduled:%Y-%m-%d}.sds",
        "output": "out/{scheduled:%Y/%m/%d}",
        "columns": ["field:samples"],
    }
    return checked(ExportSpec, fields | changes)


def training(**changes: Any) -> TrainSpec:
    fields = {
        "dataset": "data-{scheduled:%j}.sds",
        "output": "models/{scheduled:%j}",
        "columns": ["field:samples", "label=annotation:truth-v1/label:int32"],
        "trainer": "sklearn",
    }
    return checked(TrainSpec, fields | changes)


@settings(deadline=None)
@given(moment=moments, form=formats, before=plain, after=plain)
def test_a_template_reads_as_strftime_writes(
    moment: datetime, form: str, before: str, after: str
) -> None:
    if "%" in form and ".." not in form:
        text = f"{before}{{scheduled:{form}}}{after}"
        assert resolve(text, moment) == f"{before}{moment.strftime(form)}{after}"


@settings(deadline=None)
@given(
    moment=moments,
    amount=st.integers(0, 100_000),
    unit=st.sampled_from(sorted(UNITS)),
    sign=st.sampled_from("+-"),
)
def test_an_offset_is_elapsed_time(moment: datetime, amount: int, unit: str, sign: str) -> None:
    seconds = amount * UNITS[unit] * (-1 if sign == "-" else 1)
    year = moment.year + seconds / 31_556_952
    assume(2 < year < 9998)  # what the calendar holds; beyond is refused
    expected = datetime.fromtimestamp(moment.replace(microsecond=0).timestamp() + seconds, UTC)
    found = resolve(f"{{scheduled{sign}{amount}{unit}:%Y%m%dT%H%M%S}}", moment)
    assert found == f"{expected.year:04d}{expected:%m%dT%H%M%S}"


@settings(deadline=None)
@given(
    local=st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2036, 1, 1)),
    zone=st.sampled_from(["America/New_York", "Asia/Kathmandu", "Europe/Berlin", "UTC"]),
    fold=st.sampled_from([0, 1]),
)
def test_the_zone_of_a_moment_does_not_matter(local: datetime, zone: str, fold: int) -> None:
    moment = local.replace(tzinfo=ZoneInfo(zone), fold=fold)
    text = "{scheduled:%Y-%m-%dT%H%M%S} {scheduled-1d:%Y-%m-%dT%H%M%S}"
    assert resolve(text, moment) == resolve(text, moment.astimezone(UTC))
    today, before = (
        datetime.fromisoformat(part).replace(tzinfo=UTC)
        for part in resolve(text, moment).split(" ")
    )
    assert today == moment.astimezone(UTC).replace(microsecond=0)
    assert today - before == timedelta(hours=24)


@pytest.mark.parametrize(
    ("template", "moment", "expected"),
    [
        ("{scheduled-1d:%Y-%m-%d}", "2024-03-01", "2024-02-29"),
        ("{scheduled-1d:%Y-%m-%d}", "2026-03-01", "2026-02-28"),
        ("{scheduled-52w:%Y-%m-%d}", "2024-02-29", "2023-03-02"),
        ("{scheduled:%j}", "2024-12-31", "366"),
        ("{scheduled:%G-W%V-%u}", "2027-01-01", "2026-W53-5"),
        # Clocks in Berlin go from 2 to 3 on this night; a day before is 24 hours, not "yesterday".
        ("{scheduled-1d:%m-%dT%H%M}", "2026-03-29T12:00+02:00", "03-28T1000"),
        ("{scheduled-24h:%m-%dT%H%M}", "2026-10-25T12:00+01:00", "10-24T1100"),
        # Half past midnight there is still the day before in UTC.
        ("{scheduled:%Y-%m-%d}", "2026-07-01T00:30+02:00", "2026-06-30"),
        ("{scheduled+90m:%Y%m%d-%H%M}", "2026-12-31T23:00", "20270101-0030"),
    ],
)
def test_calendars(template: str, moment: str, expected: str) -> None:
    assert resolve(template, parse_moment(moment)) == expected


@pytest.mark.parametrize("text", ["{a}.sds", "{{x}}", "a{b", "a}b", "{}", "{a:b}", "{0:>5}", "%Y"])
def test_other_braces_are_plain_text(text: str) -> None:
    assert not is_moving(text)
    assert resolve(text, datetime.now(UTC)) == text
    made = spec(dataset=text, output="out")
    assert at_time(made, datetime.now(UTC)) is made


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{scheduled}", "is no template; write it as in {scheduled:%Y-%m-%d}"),
        ("{scheduled:}", "is no template"),
        ("{scheduled:today}", "has no directive"),
        ("{scheduled:%B}", "%B is not known; there are %Y year, %y"),
        ("{scheduled:%-d}", "%- is not known"),
        ("{scheduled:%f}", "%f is not known"),
        ("{scheduled:%%}", "%% is not known"),
        ("{scheduled:%Y%}", "% is not known"),
        ("{scheduled:%Y:%m}", "only letters, digits and"),
        ("{scheduled:%Y@b}", "only letters, digits and"),
        ("{scheduled:%Y%m ?}", "only letters, digits and"),
        ("{scheduled:../%Y}", "'..' would lead out of the folder; take it out"),
        ("{scheduled:%Y/../../%m}", "'..' would lead out of the folder"),
        ("{scheduled:%Y..%m}", "'..' would lead out of the folder"),
        ("{scheduled:%Y}}", "a/{scheduled:%Y}}: a brace is left over beside the template"),
        ("{{scheduled:%Y}}", "a brace is left over"),
        ("{{scheduled:%Y}", "a brace is left over"),
        ("{a}/{scheduled:%Y}", "a brace is left over"),
        ("{scheduled:%Y}/{", "a brace is left over"),
        ("{scheduled:%Y}-}-{scheduled:%m}", "a brace is left over"),
        ("{scheduled-1y:%Y}", "is no template"),
        ("{scheduled - 1d:%Y}", "is no template"),
        ("{scheduled-1.5d:%Y}", "is no template"),
        ("{schedule:%Y}", "is no template"),
        ("{Scheduled:%Y}", "is no template"),
        ("{date:%Y}", "is no template"),
        ("{scheduled:%Y", "is no template"),
        ("{scheduled-9999999d:%Y}", "leaves the calendar"),
        (f"{{scheduled-{'9' * 5000}d:%Y}}", "longer than any calendar"),
    ],
)
@pytest.mark.parametrize("field", ["dataset", "output", "pin"])
def test_a_bad_template_is_refused_where_it_is_written(
    field: str, template: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**{field: f"a/{template}"})
    assert words in str(caught.value)
    assert "%m month, %d day" in str(caught.value) or "not known" not in str(caught.value)


@pytest.mark.parametrize("field", ["dataset", "pin"])
def test_data_that_moves_into_one_output_is_refused(field: str) -> None:
    changes = {"dataset": "a.sds", "output": "out"} | {field: "x-{scheduled:%d}"}
    with pytest.raises(SpecError, match=f"{field} moves .* the next run would meet the output"):
        spec(**changes)
    assert spec(dataset="a.sds").output == "out/{scheduled:%Y/%m/%d}"  # the same data, day by day


def test_a_spec_of_a_moment() -> None:
    moved = spec(pin="pins/{scheduled-1w:%G-%V}.json")
    made = at_time(moved, datetime(2026, 3, 1, 6))
    assert made.dataset == "s3://lab/captures-2026-03-01.sds"
    assert made.output == "out/2026/03/01"
    assert made.pin == "pins/2026-08.json"
    assert made == checked(ExportSpec, json.loads(made.model_dump_json()))
    assert made.identity() == moved.identity()
    assert at_time(made, datetime(2030, 1, 1)) is made
    model = at_time(training(), datetime(2026, 3, 1, tzinfo=timezone(timedelta(hours=1))))
    assert (model.dataset, model.output) == ("data-059.sds", "models/059")


@pytest.mark.parametrize("made", [spec(), training()], ids=["export", "train"])
def test_nothing_is_planned_while_the_moment_is_unknown(made: Any) -> None:
    for refuse in (refuse_unresolved, planning.pin_inputs):
        with pytest.raises(SpecError, match="give --scheduled TIME"):
            refuse(made)
    refuse_unresolved(at_time(made, datetime(2026, 3, 1)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T06:30", datetime(2026, 3, 1, 6, 30, tzinfo=UTC)),
        ("2026-03-01 06:30:15Z", datetime(2026, 3, 1, 6, 30, 15, tzinfo=UTC)),
        ("2026-03-01T00:30+02:00", datetime(2026, 2, 28, 22, 30, tzinfo=UTC)),
    ],
)
def test_moments_as_people_write_them(text: str, expected: datetime) -> None:
    found = parse_moment(text)
    assert found == expected
    assert found.utcoffset() == timedelta()


@pytest.mark.parametrize("text", ["", "today", "2026-02-30", "1.3.2026", "0001-01-01T00:00+05:00"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(SpecError, match="is no date or time; write 2026-03-01"):
        parse_moment(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("6h", 21600), ("1d", 86400), ("2w", 1209600)]
)
def test_steps(text: str, seconds: int) -> None:
    assert parse_every(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "0d", "-1d", "1y", "d", "1.5h", "1 d", "9" * 5000 + "w"])
def test_what_is_no_step(text: str) -> None:
    with pytest.raises(SpecError, match=r"is no step of time|longer than any calendar"):
        parse_every(text)
