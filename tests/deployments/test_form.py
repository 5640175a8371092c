"""Registering on a work pool, and the form that the UI makes of a deployment's schema."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flows.deploying import DEFAULT_FILE, read_entries
from signal_batch.specs import ExportSpec
from signal_batch.training_spec import TrainSpec

pytestmark = pytest.mark.xdist_group("deployments")

NAMES = sorted(entry.name for entry in read_entries(DEFAULT_FILE))
SPEC = {"dataset": "in.sds", "output": "out", "columns": ["field:samples"]}


@pytest.fixture(scope="module")
def registered(api: Any, environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The packaged deployments as the server has them, registered by the installed command."""
    command = [str(Path(sys.executable).with_name("signal-batch")), "deploy", "--pool", "forms"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "forms: a new work pool" in done.stdout
    assert "prefect worker start --pool forms" in done.stdout
    assert f"{api.url.removesuffix('/api')}/deployments" in done.stdout
    assert api.get("/work_pools/forms")["type"] == "process"
    return api.deployments()


Leaf = tuple[str, dict[str, Any]]


def leaves(schema: dict[str, Any], properties: dict[str, Any], path: str = "") -> Iterator[Leaf]:
    """Every field of a form that a person fills in, with its dotted name."""
    for name, field in properties.items():
        where = f"{path}.{name}" if path else name
        if "$ref" in field:
            model = schema["definitions"][field["$ref"].rpartition("/")[2]]
            assert field.get("title") or model["title"], where
            assert field.get("description") or model["description"], where
            yield from leaves(schema, model["properties"], where)
        else:
            yield where, field


def kinds(field: dict[str, Any]) -> list[dict[str, Any]]:
    """What a field can be, None aside."""
    return [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_form_is_usable(registered: dict[str, dict[str, Any]], name: str) -> None:
    schema = registered[name]["parameter_openapi_schema"]
    fields = dict(leaves(schema, schema["properties"]))
    assert fields
    for where, field in fields.items():
        assert field.get("title"), where
        assert field.get("description"), where
        # The form tells what a field can be apart by type.
        types = [kind.get("type") for kind in field.get("anyOf", [field])]
        assert None not in types, where
        assert len(types) == len(set(types)), where
        assert kinds(field), f"{where} can only be null"
        for kind in kinds(field):
            _check_kind(where, kind)
        if types.count("null"):
            assert field["default"] is None, where


def _check_kind(where: str, kind: dict[str, Any]) -> None:
    if kind["type"] in ("integer", "number"):
        assert {"minimum", "exclusiveMinimum"} & set(kind), where
        assert {"maximum", "exclusiveMaximum"} & set(kind), where
    if kind["type"] == "array":
        assert kind["items"]["type"] in ("string", "integer"), where
        if kind["items"]["type"] == "integer":
            _check_kind(where, kind["items"])
    if kind["type"] == "object":
        assert kind["additionalProperties"] is True, where


def test_choices_are_enums_and_what_has_a_form_says_so(
    registered: dict[str, dict[str, Any]],
) -> None:
    schema = registered["export-features"]["parameter_openapi_schema"]
    assert schema["required"] == ["spec"]
    assert set(schema["definitions"]["ExportSpec"]["properties"]) == set(ExportSpec.model_fields)
    fields = dict(leaves(schema, schema["properties"]))
    assert fields["spec.columns"]["items"] == {"type": "string"}
    assert fields["spec.compression"]["enum"] == ["zstd", "snappy", "lz4", "gzip", "none"]
    assert fields["spec.tensors"]["enum"] == ["nested", "extension"]
    assert fields["spec.on_error"]["enum"] == ["fail", "skip", "quarantine"]
    assert fields["spec.execution.runner"]["pattern"]
    assert fields["spec.execution.runner"]["default"] == "local"
    assert fields["spec.batch_size"]["default"] == 256
    schema = registered["train-model"]["parameter_openapi_schema"]
    assert set(schema["definitions"]["TrainSpec"]["properties"]) == set(TrainSpec.model_fields)
    fields = dict(leaves(schema, schema["properties"]))
    assert fields["spec.shuffle"]["enum"] == ["global", "block", "none"]
    assert fields["spec.lengths"]["enum"] == ["equal", "pad", "crop", "bucket"]
    assert fields["spec.execution.ranks"]["minimum"] == 1


@pytest.fixture
def submit(
    api: Any, registered: dict[str, dict[str, Any]]
) -> Iterator[Callable[..., httpx.Response]]:
    """Asks for a run as the form does; nobody works on the pool, and what was made goes away."""
    made = []

    def submit(name: str, parameters: dict[str, Any]) -> httpx.Response:
        path = f"/deployments/{registered[name]['id']}/create_flow_run"
        answer = api.ask("POST", path, {"parameters": parameters})
        if answer.status_code < 300:
            made.append(answer.json()["id"])
        return answer

    yield submit
    for run_id in made:
        api.ask("DELETE", f"/flow_runs/{run_id}").raise_for_status()


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"export-shard"}))
def test_the_defaults_of_the_file_are_a_good_form(
    registered: dict[str, dict[str, Any]], submit: Callable[..., httpx.Response], name: str
) -> None:
    assert submit(name, {}).status_code == 201
    assert submit(name, registered[name]["parameters"]).status_code == 201


@pytest.mark.parametrize(
    "changes",
    [
        {"part_bytes": "64MB", "row_group_bytes": 1 << 20, "where": ["ordinal < 3"]},
        {"feature_args": {"nperseg": 128, "deep": {"er": [1, None, 0.5]}}, "pin": "pin.json"},
        {"execution": {"runner": "dask:tcp://scheduler:8786", "workers": 8, "limits": ["gpu"]}},
        {"output": "/data/{scheduled-1d:%Y-%m-%d}"},
    ],
)
def test_a_good_form_is_taken(
    submit: Callable[..., httpx.Response], changes: dict[str, Any]
) -> None:
    answer = submit("export-features", {"spec": SPEC | changes})
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("export-features", {"spec": SPEC | {"batch_size": 0}}, "less than the minimum of 1"),
        ("export-features", {"spec": SPEC | {"compression": "zip"}}, "is not one of"),
        ("export-features", {"spec": SPEC | {"columns": []}}, "non-empty"),
        ("export-features", {"spec": SPEC | {"part_bytes": "big"}}, "'spec.part_bytes'"),
        ("export-features", {"spec": SPEC | {"execution": {"runner": "cloud"}}}, "does not match"),
        ("export-features", {"spec": SPEC | {"execution": {"speed": 1}}}, "unexpected"),
        ("export-features", {"spec": {"dataset": "in.sds"}}, "'output' is a required property"),
        ("train-model", {"spec": SPEC | {"trainer": "jax", "epochs": 0}}, "minimum of 1"),
        ("train-model", {"spec": SPEC | {"trainer": "jax", "buckets": [0]}}, "minimum of 1"),
        ("verify-export", {"output": None}, "is not of type 'string'"),
        ("validate-dataset", {"dataset": "in.sds", "deep": "very"}, "not of type 'boolean'"),
        ("export-shard", {}, "is a required property"),
    ],
)
def test_a_bad_form_is_refused_before_anything_runs(
    submit: Callable[..., httpx.Response], name: str, parameters: dict[str, Any], said: str
) -> None:
    answer = submit(name, parameters)
    assert answer.status_code in (409, 422)
    assert said in answer.json()["detail"]


def test_deploying_again_updates_and_keeps_what_people_switched(
    api: Any,
    registered: dict[str, dict[str, Any]],
    finish: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    before = api.deployments()
    training = before["train-model"]
    (nightly,) = training["schedules"]
    assert (nightly["active"], nightly["slug"]) == (True, "nightly")
    schedule = f"/deployments/{training['id']}/schedules/{nightly['id']}"
    api.ask("PATCH", schedule, {"active": False}).raise_for_status()
    verifying = f"/deployments/{before['verify-export']['id']}"
    api.ask("POST", f"{verifying}/pause_deployment").raise_for_status()
    added = {"schedule": {"interval": 3600}, "active": True}
    api.post(f"/deployments/{before['export-features']['id']}/schedules", [added])

    file = tmp_path / "mine.yaml"
    content = yaml.safe_load(DEFAULT_FILE.read_text())
    for entry in content["deployments"]:
        if entry["name"] == "train-model":
            weekly = {"slug": "weekly", "cron": "0 6 * * 0"}
            entry["schedules"] = [*entry["schedules"], weekly]
    file.write_text(yaml.safe_dump(content))
    code, said = finish("signal-batch", "deploy", "--pool", "forms", "--file", file)
    assert code == 0, said
    assert "a new work pool" not in said
    assert said.count("paused") == 1
    assert "verify-export/verify-export, paused: resume it in the UI" in said

    after = api.deployments()
    assert {name: item["id"] for name, item in after.items()} == {
        name: item["id"] for name, item in before.items()
    }
    schedules = {item["slug"]: item for item in after["train-model"]["schedules"]}
    assert {slug: item["active"] for slug, item in schedules.items()} == {
        "nightly": False,
        "weekly": True,
    }
    assert after["verify-export"]["paused"]
    assert not after["export-features"]["paused"]
    assert len(after["export-features"]["schedules"]) == 1

    # The file as it was: what it no longer names is gone, and only these are touched.
    code, said = finish("signal-batch", "deploy", "--pool", "forms", "--only", "train-model")
    assert code == 0, said
    assert "export-features" not in said
    (left,) = api.deployments()["train-model"]["schedules"]
    assert (left["slug"], left["active"]) == ("nightly", False)


def test_prefect_itself_deploys_the_file(
    api: Any, registered: dict[str, dict[str, Any]], finish: Callable[..., tuple[int, str]]
) -> None:
    pool = {"name": "signal-batch", "type": "process"}
    api.post("/work_pools/", pool)
    command = ("--no-prompt", "deploy", "--prefect-file", DEFAULT_FILE, "--all")
    code, said = finish("prefect", *command)
    assert code == 0, said
    made = api.deployments()
    assert sorted(made) == NAMES
    for name in NAMES:
        assert made[name]["id"] == registered[name]["id"]
        assert made[name]["work_pool_name"] == "signal-batch"
        for same in ("parameters", "tags", "parameter_openapi_schema", "entrypoint"):
            assert made[name][same] == registered[name][same], same


def test_bad_input_is_exit_code_2_and_no_server_is_1(
    finish: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "deployments: [{name: a, entrypoint: flows.verify_export.verify_export, "
        "schedules: [{cron: never}]}]"
    )
    code, said = finish("signal-batch", "deploy", "--pool", "forms", "--file", file)
    assert (code, said.count("\n")) == (2, 1)
    assert f"{file}: deployment a: " in said
    assert "Invalid cron" in said
    nowhere = "http://127.0.0.2:9/api"  # not where one might just be starting
    for command in (("deploy", "--pool", "forms"), ("serve",)):
        code, said = finish("signal-batch", *command, PREFECT_API_URL=nowhere)
        assert (code, said.count("\n")) == (1, 1)
        assert f"no Prefect server answers at {nowhere}" in said
        assert "start one with `prefect server start`" in said
