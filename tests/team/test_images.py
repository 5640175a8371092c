"""The image, compose.yaml and the Kubernetes template: linted, and what they run is run here.

There is no container engine in the tests. The commands are read from the files and run as they
stand, with the folders of a container put below a temporary one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.templating import apply_values

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DEPLOYMENTS = ROOT / "deployments"
DOCKERFILE = DEPLOYMENTS / "Dockerfile"
COMPOSE = DEPLOYMENTS / "compose.yaml"
TEMPLATE = DEPLOYMENTS / "kubernetes-job-template.json"
SECRET = re.compile(r"(?i)(password|secret|token|key)\s*[=:]\s*['\"]?[\w/+]{8,}")


def lint(*command: object) -> None:
    program, *arguments = map(str, command)
    done = subprocess.run(
        [str(BIN / program), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- lint ----------------------------------------------------------------------------------


def test_the_dockerfile_is_sound() -> None:
    lint("hadolint", "--failure-threshold", "style", DOCKERFILE)


def test_compose_is_sound() -> None:
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_no_file_holds_a_secret() -> None:
    for path in sorted(DEPLOYMENTS.glob("*")):
        if path.is_file():
            assert SECRET.findall(path.read_text()) == [], path
    example = (DEPLOYMENTS / "env.example").read_text()
    values = [value for value in re.findall(r"^\w+=(.*)$", example, re.MULTILINE) if value]
    assert [value for value in values if "choose" in value] == ["team:choose-one", "choose-another"]


def test_every_variable_that_compose_asks_for_is_in_the_example() -> None:
    asked = set(re.findall(r"(?<!\$)\$\{(\w+)", COMPOSE.read_text()))
    given = set(re.findall(r"^(\w+)=", (DEPLOYMENTS / "env.example").read_text(), re.MULTILINE))
    assert asked == given


def test_the_image_does_not_run_as_root_and_sends_no_telemetry(image: Any) -> None:
    last = [index for index, (name, _) in enumerate(image.instructions) if name == "FROM"][-1]
    final = image.instructions[last:]
    assert [rest for name, rest in final if name == "USER"] == ["10001"]
    [environment] = [rest for name, rest in final if name == "ENV"]
    assert "DO_NOT_TRACK=1" in environment
    assert "PREFECT_SERVER_ANALYTICS_ENABLED=false" in environment


def test_what_is_not_for_the_image_does_not_get_there() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"  # everything else is let in by name
    copied = {
        source
        for line in DOCKERFILE.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert {"deployments/.env", "deployments/storage.env"} <= set(rules)
    assert {"deployments/.env", "deployments/storage.env"} <= set(
        (ROOT / ".gitignore").read_text().splitlines()
    )


def test_compose_and_template_ask_for_the_heartbeat_that_automations_count_on(image: Any) -> None:
    automations = yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text())["automations"]
    [trigger] = [one["trigger"] for one in automations if one["trigger"]["posture"] == "Proactive"]
    environments = [
        yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())["definitions"]["pool"][
            "job_variables"
        ]["env"],
        json.loads(TEMPLATE.read_text())["variables"]["properties"]["env"]["default"],
        dict(
            word.split("=", 1)
            for name, rest in image.instructions
            if name == "ENV"
            for word in rest.split()
        ),
    ]
    for environment in environments:
        assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= trigger["within"]


# --- Kubernetes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The Kubernetes job of a run, as Prefect's worker makes it of the template's defaults."""
    template = json.loads(TEMPLATE.read_text())
    properties = template["variables"]["properties"]
    values = {name: item["default"] for name, item in properties.items() if "default" in item}
    values |= {"command": "prefect flow-run execute", "name": "quick-fox"}
    job = apply_values(template["job_configuration"], values, remove_notset=True)["job_manifest"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["args"] = container["args"].split()
    job["metadata"]["name"] = job["metadata"].pop("generateName") + "x7k2p"  # as the cluster does
    container["env"] = [{"name": key, "value": text} for key, text in container["env"].items()]
    return dict(job)


def test_the_job_is_one_that_kubernetes_takes(manifest: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    lint("kubernetes-validate", "--strict", path)


def test_the_job_may_do_little_and_has_time_to_stop(manifest: dict[str, Any]) -> None:
    pod = manifest["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert 10 <= pod["terminationGracePeriodSeconds"] <= 60  # the children are gone within 5 s
    assert {"requests", "limits"} <= container["resources"].keys()
    assert manifest["spec"]["backoffLimit"] == 0  # the next run resumes; Prefect must know of it


def test_every_variable_of_the_template_is_used_and_explained() -> None:
    template = json.loads(TEMPLATE.read_text())
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    properties = template["variables"]["properties"]
    assert used == set(properties)
    assert [name for name, item in properties.items() if not item.get("description")] == []


@pytest.mark.xdist_group("team")
@pytest.mark.timeout(420)
def test_a_server_takes_the_template(team: Any) -> None:
    create = ["prefect", "work-pool", "create", "cluster", "--type", "kubernetes"]
    team.services.run("deploy", *create, "--base-job-template", TEMPLATE)
    pool = team.api.get("/work_pools/cluster")
    assert pool["base_job_template"] == json.loads(TEMPLATE.read_text())


# --- the image's build, outside of a container ---------------------------------------------


@pytest.fixture(scope="module")
def built(image: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that stands for `/` of the image, after the RUN and COPY of its first stage."""
    slash = tmp_path_factory.mktemp("image")
    places = {"/opt/signal-batch": str(slash / "opt"), "/tmp/": f"{slash}/"}
    folder = slash / "src"
    folder.mkdir()
    (slash / "bin").mkdir()
    (slash / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        "PATH": f"{slash / 'bin'}:/usr/bin:/bin",
        "HOME": os.environ.get("HOME", str(slash)),
        "TMPDIR": str(slash),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    for name, rest in image.instructions[1:]:
        if name == "FROM":
            break
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                _copy(ROOT / source, folder / target)
        elif name == "RUN":
            command = re.sub(r"^--mount=\S+\s+", "", rest)
            command = re.sub("|".join(places), lambda found: places[found[0]], command)
            done = subprocess.run(
                ["/bin/bash", "-o", "pipefail", "-c", command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    yield slash
    shutil.rmtree(slash)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".env"))
    else:
        shutil.copy(source, target)


@pytest.mark.timeout(600)
def test_the_image_runs_the_demo(built: Path, tmp_path: Path) -> None:
    """Its virtual environment alone, away from the checkout: nothing that it needs is missing."""
    programs = built / "opt" / "bin"
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "SIGNAL_BATCH_PLAIN_GRAIN": "1",
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("signal-batch", "demo", "demo")
    for part in ("features", "model"):
        assert "complete and undamaged" in run("signal-batch", "verify", f"demo/{part}")
    assert "prefect" in run(
        "python",
        "-c",
        "import prefect, s3fs, gcsfs, adlfs, distributed, ray; print(prefect.__file__)",
    )


@pytest.mark.parametrize(
    ("version", "digest", "complaint"),
    [
        ("1.0", "b" * 64, ""),
        ("1.0", "a" * 64, "Some_Package 1.0 has the hash aaaa"),
        ("2.0", "b" * 64, "Some_Package 2.0 is not in the lock"),
    ],
)
def test_only_what_the_lock_names_gets_into_the_image(
    version: str, digest: str, complaint: str, tmp_path: Path
) -> None:
    source = {"archive_info": {"hashes": {"sha256": digest}}}
    package = {"metadata": {"name": "Some_Package", "version": version}, "download_info": source}
    (tmp_path / "report.json").write_text(json.dumps({"install": [package]}))
    (tmp_path / "lock").write_text(f"some-package==1.0 \\\n    --hash=sha256:{'b' * 64}\n")
    check = [sys.executable, str(DEPLOYMENTS / "check_hashes.py"), "report.json", "lock"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if complaint else 0)
    assert complaint in done.stderr
