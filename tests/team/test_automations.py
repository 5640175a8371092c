"""`automate` and `announce` against the team's server: by name, again and again, wrong input."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows import automating
from signal_batch.errors import InputError

pytestmark = [pytest.mark.xdist_group("team"), pytest.mark.timeout(420)]

SHIPPED = Path(__file__).resolve().parents[2] / "deployments" / "automations.yaml"
BLOCK = "custom-webhook/mailbox"
NOBODY = "00000000-0000-0000-0000-000000000000"


def outcomes(printed: str) -> dict[str, str]:
    """Automation to outcome, from what `automate` prints."""
    found = re.findall(r"^(created|updated|unchanged|left out) +signal-batch: (.+)$", printed, re.M)
    return {name: outcome for outcome, name in found}


def automate(team: Any, *arguments: object) -> dict[str, str]:
    return outcomes(team.services.run("deploy", "signal-batch", "automate", *arguments))


def refused(team: Any, *arguments: object) -> tuple[int, str]:
    """Exit code and message of a command that must fail, in one line and with no traceback."""
    done = subprocess.run(
        ["signal-batch", *map(str, arguments)],
        env=team.services.environment("deploy"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.returncode, done.stderr


def write(path: Path, automation: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"automations": [automation]}))
    return path


def test_the_file_is_in_prefects_schema() -> None:
    automations = yaml.safe_load(SHIPPED.read_text())["automations"]
    assert len(automations) >= 5
    for item in automations:
        for action in item["actions"]:
            if action.pop("deployment", None):
                action |= {"source": "selected", "deployment_id": NOBODY}
            if action.pop("block", None):
                action["block_document_id"] = NOBODY
        automation = AutomationCore.model_validate(item)
        assert automation.description


def test_the_service_creates_them_and_the_next_one_changes_what_differs(automated: Any) -> None:
    first, second = outcomes(automated.deployed), outcomes(automated.moved)
    assert set(first.values()) == {"created"}
    assert len(first) >= 5
    differing = {name for name, outcome in second.items() if outcome != "unchanged"}
    assert differing == {"export a published dataset"}
    assert second["export a published dataset"] == "updated"


def test_again_changes_nothing_and_what_is_paused_stays_paused(team: Any, automated: Any) -> None:
    name = "signal-batch: notify of a late run"
    body = {"automations": {"name": {"any_": [name]}}}
    [late] = team.api.post("/automations/filter", body)
    path = f"/automations/{late['id']}"
    team.api.http.patch(path, json={"enabled": False}).raise_for_status()
    try:
        again = automate(team, "--file", automated.file, "--notify", BLOCK)
        assert set(again.values()) == {"unchanged"}
        assert team.api.get(path)["enabled"] is False
    finally:
        team.api.http.patch(path, json={"enabled": True}).raise_for_status()
    names = [item["name"] for item in team.api.post("/automations/filter", {})]
    assert len(names) == len(set(names)) == len(again)


def test_without_a_block_those_that_notify_are_left_out(team: Any, automated: Any) -> None:
    printed = team.services.run("deploy", "signal-batch", "automate", "--file", automated.file)
    found = outcomes(printed)
    assert {name for name in found if name.startswith("notify of")} == {
        name for name, outcome in found.items() if outcome == "left out"
    }
    assert "--notify TYPE/NAME" in printed


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ({"type": "run-deployment", "deployment": "export-features/x"}, "no deployment export"),
        ({"type": "run-deployment", "deployment": "export-features"}, "must read FLOW/DEPLOYMENT"),
        ({"type": "send-notification", "block": "slack-webhook/x", "body": "x"}, "no block slack"),
        ({"type": "send-notification", "block": "slack", "body": "x"}, "must read TYPE/NAME"),
        ({"type": "send-notification", "block": "custom-webhook/mailbox"}, "body: Field required"),
    ],
)
def test_a_wrong_name_changes_nothing_and_is_said(
    action: dict[str, Any], complaint: str, team: Any, automated: Any, tmp_path: Path
) -> None:
    trigger = {"type": "event", "posture": "Reactive", "expect": ["some.event"]}
    item = {"name": "wrong", "trigger": trigger, "actions": [action]}
    file = write(tmp_path / "a.yaml", item)
    settings = {PREFECT_API_URL: team.api.url, PREFECT_API_AUTH_STRING: team.login}
    with temporary_settings(settings), pytest.raises(InputError, match=re.escape(complaint)):
        automating.automate(file)
    assert (
        team.api.post("/automations/filter", {"automations": {"name": {"any_": ["wrong"]}}}) == []
    )


@pytest.mark.parametrize("text", ["automations: 3", "- a list", "automations: [{}]", "{"])
def test_a_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(str(file))):
        automating.automate(file)


def test_a_file_that_is_not_there_is_bad_input(team: Any, tmp_path: Path) -> None:
    code, said = refused(team, "automate", "--file", tmp_path / "a.yaml")
    assert code == 2
    assert str(tmp_path / "a.yaml") in said


def test_credentials_in_a_uri_are_not_announced(team: Any) -> None:
    code, said = refused(team, "announce", "s3://user:pass@bucket/captures.sds")
    assert code == 2
    assert "user" not in said
    assert "pass@" not in said


def test_what_is_no_dataset_is_not_announced(team: Any, tmp_path: Path) -> None:
    code, said = refused(team, "announce", tmp_path / "nothing.sds")
    assert code == 2
    assert "nothing.sds" in said
    resource = f"{tmp_path / 'nothing.sds'}"
    assert all(
        event["payload"]["uri"] != resource
        for event in team.events("signal-batch.dataset.published")
    )
