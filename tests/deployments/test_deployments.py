"""The file of deployments: what is in it, and what is refused in one like it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint

from flows import deploying
from flows.timetable import Schedule
from signal_batch.errors import InputError

pytestmark = pytest.mark.xdist_group("deployments")

FILE = deploying.DEFAULT_FILE
ENTRIES = {entry.name: entry for entry in deploying.read_entries(FILE)}
NAMES = sorted(ENTRIES)


def test_the_file_has_these_deployments() -> None:
    shown = "export-features export-shard train-model validate-dataset verify-export"
    assert shown.split() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_entrypoint_is_a_flow_of_that_name(name: str) -> None:
    flow = load_flow_from_entrypoint(ENTRIES[name].entrypoint, use_placeholder_flow=False)
    assert isinstance(flow, Flow)
    assert flow.name == name
    assert f"{flow.fn.__module__}.{flow.fn.__name__}" == ENTRIES[name].entrypoint


@pytest.mark.parametrize("name", NAMES)
def test_every_deployment_is_described_and_limited(name: str) -> None:
    entry = ENTRIES[name]
    assert entry.description
    assert "signal-batch" in entry.tags
    assert len(entry.tags) == 2
    assert entry.enforce_parameter_schema
    assert isinstance(entry.concurrency_limit, deploying.Limit)
    assert entry.work_pool.job_variables["env"]["DO_NOT_TRACK"] == "1"


def test_what_overruns_is_dropped_and_what_differs_waits() -> None:
    limits = {name: entry.concurrency_limit for name, entry in ENTRIES.items()}
    strategies = {name: limit.collision_strategy for name, limit in limits.items()}  # type: ignore[union-attr]
    assert strategies.pop("train-model") == "CANCEL_NEW"
    assert set(strategies.values()) == {"ENQUEUE"}


def test_only_the_nightly_training_is_scheduled() -> None:
    scheduled = {name: entry.schedules for name, entry in ENTRIES.items() if entry.schedules}
    assert list(scheduled) == ["train-model"]
    (nightly,) = scheduled["train-model"]
    built = nightly.build()
    assert (built.slug, built.active) == ("nightly", True)
    assert (built.schedule.cron, built.schedule.timezone) == ("0 3 * * *", "UTC")  # type: ignore[union-attr]


def test_every_schedule_that_is_commented_out_is_a_good_one() -> None:
    blocks = re.findall(r"^( *)# schedules:\n((?:\1#   .*\n)+)", FILE.read_text(), re.MULTILINE)
    found = [
        Schedule.model_validate(schedule)
        for indent, block in blocks
        for schedule in yaml.safe_load(block.replace(f"{indent}#", ""))
    ]
    kinds = {type(schedule.build().schedule).__name__ for schedule in found}
    assert kinds == {"CronSchedule", "IntervalSchedule", "RRuleSchedule"}
    assert len(found) == 7
    assert any("{scheduled-1d:%Y-%m-%d}" in str(schedule.parameters) for schedule in found)
    assert all(schedule.slug for schedule in found)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A file with one deployment, the validation of a dataset, changed."""

    def write(**changes: Any) -> Path:
        entry = {
            "name": "one",
            "entrypoint": "flows.validate_dataset.validate_dataset",
            "parameters": {"dataset": "/data/captures.sds"},
        }
        path = tmp_path / "deployments.yaml"
        path.write_text(yaml.safe_dump({"deployments": [entry | changes]}))
        return path

    return write


EXPORT = {
    "entrypoint": "flows.export_features.export_features",
    "parameters": {"spec": {"dataset": "in.sds", "output": "out", "columns": ["field:samples"]}},
}


@pytest.mark.parametrize(
    ("flow", "given", "words"),
    [
        ("export_features", {"features": "spectogram"}, "did you mean spectrogram"),
        ("train_model", {"trainer": "torch"}, "'torch' is not a built-in trainer"),
    ],
)
def test_a_built_in_that_does_not_exist_is_refused(
    flow: str, given: dict[str, str], words: str, write: Callable[..., Path]
) -> None:
    spec = {"dataset": "in.sds", "output": "out", "columns": ["field:samples"]} | given
    path = write(entrypoint=f"flows.{flow}.{flow}", parameters={"spec": spec})
    with pytest.raises(InputError, match=words):
        deploying.read_deployments(path)


def test_runs_show_that_they_live_whatever_the_file_says(write: Callable[..., Path]) -> None:
    """Otherwise the automation that finds dead runs would find every long one."""
    (made,) = deploying.read_deployments(write())
    assert made.job_variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert made.job_variables["env"]["DO_NOT_TRACK"] == "1"
    own = {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "45"}}
    (made,) = deploying.read_deployments(write(work_pool={"job_variables": own}))
    assert made.job_variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "45"


def test_a_deployment_is_what_its_file_says(write: Callable[..., Path]) -> None:
    path = write(
        description="what it is",
        tags=["a", "b"],
        concurrency_limit={"limit": 3, "collision_strategy": "CANCEL_NEW"},
        schedules=[{"interval": 3600, "slug": "hourly", "active": False}],
        work_pool={"name": "somewhere", "job_variables": {"env": {"A": "1"}}},
    )
    (made,) = deploying.read_deployments(path)
    assert made.full_name == "validate-dataset/one"
    assert made.entrypoint == "flows.validate_dataset.validate_dataset"
    assert (made.description, made.tags) == ("what it is", ["a", "b"])
    assert made.parameters == {"dataset": "/data/captures.sds"}
    assert made.concurrency_limit == 3
    assert made.concurrency_options is not None
    assert made.concurrency_options.collision_strategy.value == "CANCEL_NEW"
    assert made.job_variables == {"env": deploying.ENVIRONMENT | {"A": "1"}}
    assert made.enforce_parameter_schema
    (schedule,) = made.schedules or ()
    assert schedule.schedule.interval.total_seconds() == 3600  # type: ignore[union-attr]
    assert schedule.active is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entrypoint": "flows.nothing.here"}, "no flow at flows.nothing.here: ModuleNotFound"),
        ({"entrypoint": "flows.validate_dataset.nothing"}, "no flow at .* 'nothing' not found"),
        ({"entrypoint": "flows/validate_dataset.py:validate_dataset"}, "must be a dotted path"),
        ({"entrypoint": "signal_batch.verification.verify"}, "no flow at .* is not a flow"),
        ({"shedules": []}, "shedules: there is no such field; there are name, entrypoint"),
        ({"name": "a/b"}, "a/b: name: a name goes without / % & > <; take / out of it"),
        ({"parameters": {"data": "x"}}, "takes no parameter 'data'; it takes dataset"),
        ({"parameters": {"dataset": 7}}, "'dataset'. Failure reason: 7 is not of type 'string'"),
        ({"parameters": {"dataset": "s3://me:key@lab/x"}}, "carries credentials"),
        (EXPORT | {"parameters": {"spec": {"dataset": "in.sds"}}}, "spec.output: Field required"),
        (
            EXPORT | {"parameters": {"spec": {"colums": ["id"]}}},
            "spec.colums: there is no such field; there are dataset, output, columns, where",
        ),
        (
            EXPORT | {"parameters": {"spec": {"execution": {"worker": 2}}}},
            "spec.execution.worker: there is no such field; there are runner, workers",
        ),
        (
            EXPORT | {"parameters": {"spec": {"compression": "zip"}}},
            r"'zip' is not one of \['zstd'",
        ),
        (
            EXPORT | {"parameters": {"spec": EXPORT["parameters"]["spec"] | {"columns": ["x"]}}},  # type: ignore[index]
            "spec.columns: selector 'x' starts with 'x'",
        ),
        ({"schedules": [{"cron": "0 25 * * *"}]}, "Invalid cron"),
        ({"schedules": [{"cron": "0 3 * * *", "timezone": "Mars"}]}, "Invalid timezone"),
        ({"schedules": [{"rrule": "FREQ=NEVER"}]}, "RRule"),
        ({"schedules": [{"interval": 60, "cron": "0 3 * * *"}]}, "one of cron, interval and rrule"),
        ({"schedules": [{"interval": 60, "parameters": {"deep": 3}}]}, "'deep'.* 3 is not of"),
        ({"concurrency_limit": {"limit": 1, "collision_strategy": "WAIT"}}, "'ENQUEUE' or"),
        ({"parameters": {"dataset": "{{ prefect.variables.x }}"}}, "only `prefect deploy`"),
        ({"pull": [{"a.step": {}}]}, "pull: "),
        ({"tags": "nightly"}, "tags: Input should be a list"),
        ({"schedules": {"interval": 60}}, "schedules: Input should be a list"),
        ({"schedules": [{"intervall": 60}]}, "no such field; there are cron, interval, rrule"),
        ({"name": "one\ntwo"}, r"deployment 1: name: a name is one line .* take '\\n' out"),
        ({"name": "n" * 201}, "deployment 1: name: a name has 1 to 200 characters.* has 201"),
        ({"tags": ["a\0"]}, r"tags.0: a name is one line of plain text; take '\\x00' out"),
        ({"description": "d" * 10_001}, "description: .* at most 10000 characters"),
        ({"entrypoint": "flows.a\nb"}, "must be a dotted path"),
        ({"work_pool": {"job_variables": {"x": math.nan}}}, "a job variable holds NaN"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(
    write: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    path = write(**changes)
    with pytest.raises(InputError, match=message) as caught:
        deploying.read_deployments(path)
    assert str(caught.value).startswith(f"{path}: deployment ")
    assert "\n" not in str(caught.value)
    assert "key@" not in str(caught.value)


@pytest.mark.parametrize("limit", [-1, 0, True, 10**26, 1.5, "2"])
@pytest.mark.parametrize("form", ["number", "mapping"])
def test_a_limit_is_a_whole_number_in_reach(
    write: Callable[..., Path], limit: Any, form: str
) -> None:
    path = write(concurrency_limit=limit if form == "number" else {"limit": limit})
    with pytest.raises(InputError, match=r"concurrency_limit: (write a whole number|limit: Input)"):
        deploying.read_deployments(path)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"interval": 1e300}, "1e[+]300 is no interval; write seconds, from 60 to 315532800 "),
        ({"interval": math.inf}, "inf is no interval"),
        ({"interval": math.nan}, "nan is no interval"),
        ({"interval": 59.9}, "59.9 is no interval"),
        ({"interval": -60}, "-60 is no interval"),
        ({"interval": True}, "1 is no interval"),
        ({"interval": 10**400}, "interval: "),
        ({"interval": 60, "anchor_date": "1969-12-31"}, "1970 to 2199, not in 1969"),
        ({"interval": 60, "anchor_date": "2200-01-01T00:00:00Z"}, "1970 to 2199, not in 2200"),
        ({"rrule": "FREQ=SECONDLY;COUNT=100000000000000000000"}, "every minute at most"),
        ({"rrule": "freq=secondly"}, "every minute at most"),
        ({"rrule": "RRULE:FREQ=DAILY\nRRULE:FREQ=SECONDLY"}, "every minute at most"),
        ({"rrule": "FREQ=DAILY;COUNT=10001"}, "COUNT is 10000 at most; write UNTIL=DATE"),
        ({"rrule": "FREQ=DAILY;COUNT=+1_0_0_0_1"}, "COUNT is 10000 at most"),
        ({"rrule": "DTSTART:19000101T000000\nRRULE:FREQ=DAILY"}, "1970 to 2199, not in 1900"),
        ({"rrule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"}, "it has no date at all"),
        ({"rrule": "FREQ=DAILY;INTERVAL=0"}, "more than 3 s to work out; write one that"),
        ({"rrule": "FREQ=MINUTELY;BYHOUR=3;BYMINUTE=99"}, "is no rule that comes due: TypeError"),
    ],
)
def test_a_schedule_that_no_server_can_keep_is_refused(
    write: Callable[..., Path], schedule: dict[str, Any], message: str
) -> None:
    path = write(schedules=[schedule])
    with pytest.raises(InputError, match=message) as caught:
        deploying.read_deployments(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schedule",
    [
        {"interval": 60},
        {"interval": 315_532_800, "anchor_date": "2199-12-31"},
        {"rrule": "FREQ=MINUTELY"},
        {"rrule": "FREQ=DAILY;COUNT=10000"},
        {"rrule": "DTSTART:20260101T000000\nRRULE:FREQ=HOURLY\nEXRULE:FREQ=WEEKLY"},
    ],
)
def test_schedules_at_the_edge_are_taken(
    write: Callable[..., Path], schedule: dict[str, Any]
) -> None:
    (made,) = deploying.read_deployments(write(schedules=[schedule]))
    assert len(made.schedules or ()) == 1


def test_two_schedules_of_one_slug(write: Callable[..., Path]) -> None:
    path = write(schedules=[{"interval": 60, "slug": "a"}, {"cron": "0 3 * * *", "slug": "a"}])
    with pytest.raises(InputError, match="schedules: slug 'a' is there twice; give each"):
        deploying.read_deployments(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters: &p {folder: x, more: *p}", "nested too deeply or in itself"),
        ("work_pool: {job_variables: &p {a: *p}}", "nested too deeply or in itself"),
        ("tags: &t [*t]", "nested too deeply or in itself"),
        ("parameters: " + "[" * 3000, "nested too deeply or in itself"),
        ("parameters: " + "{a: " * 60 + "1" + "}" * 60, "nested too deeply or in itself"),
        (
            "a: &a [0,0,0,0,0,0,0,0,0,0]\n  b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
            "  c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n  d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
            "  e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\n  f: [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]",
            "nested too deeply or in itself",
        ),
        ("version: 2026-13-45", "holds a value that is none of its kind: month"),
        ("version: " + "9" * 5000, "holds a value that is none of its kind"),
        ("version: !!int ''", "holds a value that is none of its kind"),
    ],
    ids=lambda value: value[:20],
)
def test_what_yaml_can_hold_and_no_deployment(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(
        "deployments:\n- name: x\n  entrypoint: flows.verify_export.verify_export\n  " + text
    )
    with pytest.raises(InputError, match=message) as caught:
        deploying.read_entries(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deployments: [", "is no YAML"),
        ("deployments: []", "names no deployments"),
        ("- a", "names no deployments"),
        ("deployments: [3]", "deployment 1 must be a mapping"),
        ("deployment: []\ndeployments: [{name: a, entrypoint: b.c}]", "no key 'deployment'"),
        ("deployments: [{name: a, entrypoint: b.c}, {name: a, entrypoint: b.c}]", "is there twice"),
    ],
)
def test_what_is_no_file_of_deployments(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        deploying.read_entries(path)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no deployment 'nightly'; there are validate-dataset, "):
        deploying.read_deployments(FILE, ("nightly",))
    with pytest.raises(InputError, match="is not there; name a file of deployments with --file"):
        deploying.read_entries(tmp_path / "none.yaml")
