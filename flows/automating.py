"""Automations from a file, with names where Prefect wants ids: created once, then updated."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound
from pydantic import ValidationError

from flows.packaged import packaged
from flows.registering import server
from signal_batch.errors import InputError

#: The block of an action that `--notify` names.
NOTIFY = "notify"
#: The automations of this project.
DEFAULT_FILE = packaged("automations.yaml")


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of an automation: `created`, `updated`, `unchanged` or `left out`, and why."""

    name: str
    outcome: str
    why: str = ""


class _LacksDeployment(InputError):
    """An automation starts a deployment that the server does not have."""


def automate(path: Path | None = None, notify: str | None = None) -> list[Applied]:
    """Create the automations of a file, and update those that differ, by name.

    Of the packaged ones, those are left out that start a deployment which the server does not
    have, and those that notify where `notify` names no block.

    Raises:
        InputError: the file is wrong, or names a deployment or block that the server lacks.
        SignalBatchError: no server, or it does not answer or does not let us in.
    """
    wanted = _read(path or DEFAULT_FILE)
    with server() as client:
        # Everything is looked up first, so a wrong name changes nothing on the server.
        resolved = [_looked_up(client, item, notify, strict=path is not None) for item in wanted]
        return [
            found if isinstance(found, Applied) else Applied(found.name, _put(client, found))
            for found in resolved
        ]


def _looked_up(
    client: SyncPrefectClient, item: dict[str, Any], notify: str | None, *, strict: bool
) -> AutomationCore | Applied:
    if not _concerns(item, notify):
        return Applied(item["name"], "left out", "name a block with --notify TYPE/NAME")
    try:
        return _resolved(client, item, notify)
    except _LacksDeployment as exc:
        if strict:
            raise
        return Applied(item["name"], "left out", str(exc))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} cannot be read: {exc}") from exc
    found = value.get("automations") if isinstance(value, dict) else None
    if not isinstance(found, list) or not all(
        isinstance(item, dict) and isinstance(item.get("name"), str) for item in found
    ):
        raise InputError(f"{path} must hold `automations:`, a list in which each has a name")
    names = [item["name"] for item in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{path} has {twice[0]!r} twice; automations are told apart by name")
    return found


def _concerns(item: dict[str, Any], notify: str | None) -> bool:
    return notify is not None or all(action.get("block") != NOTIFY for action in _actions(item))


def _actions(item: dict[str, Any]) -> list[dict[str, Any]]:
    actions = item.get("actions")
    if not isinstance(actions, list) or not all(isinstance(one, dict) for one in actions):
        raise InputError(f"automation {item['name']!r}: `actions` must be a list of actions")
    return actions


def _resolved(
    client: SyncPrefectClient, item: dict[str, Any], notify: str | None
) -> AutomationCore:
    item = copy.deepcopy(item)  # YAML anchors share what they stand for
    for action in _actions(item):
        if deployment := action.pop("deployment", None):
            action |= {"source": "selected"}
            action["deployment_id"] = _deployment_id(client, str(deployment))
        if block := action.pop("block", None):
            name = notify if block == NOTIFY and notify else str(block)
            action["block_document_id"] = _block_id(client, name)
    try:
        return AutomationCore.model_validate(item)
    except ValidationError as exc:
        problem = _problem(exc)
        where = ".".join(map(str, problem["loc"]))
        raise InputError(f"automation {item['name']!r}: {where}: {problem['msg']}") from exc


def _problem(exc: ValidationError) -> dict[str, Any]:
    """What is wrong, and not that every other kind of action or trigger is another kind."""
    problems: list[dict[str, Any]] = [dict(one) for one in exc.errors()]
    others = [one["loc"][:-1] for one in problems if one["type"] == "literal_error"]
    chosen = [
        one for one in problems if not any(one["loc"][: len(other)] == other for other in others)
    ]
    return (chosen or problems)[0]


def _deployment_id(client: SyncPrefectClient, name: str) -> str:
    if name.count("/") != 1:
        raise InputError(f"deployment {name!r} must read FLOW/DEPLOYMENT")
    try:
        return str((client.read_deployment_by_name(name)).id)
    except ObjectNotFound as exc:
        raise _LacksDeployment(
            f"the server has no deployment {name}; register it, or name another in a copy of "
            "automations.yaml (--file)"
        ) from exc


def _block_id(client: SyncPrefectClient, name: str) -> str:
    kind, slash, block = name.partition("/")
    if not slash or not kind or not block:
        raise InputError(f"block {name!r} must read TYPE/NAME, for example slack-webhook/team")
    try:
        document = client.read_block_document_by_name(
            block, block_type_slug=kind, include_secrets=False
        )
    except ObjectNotFound as exc:
        raise InputError(
            f"the server has no block {name}; create it on the UI's page of blocks"
        ) from exc
    return str(document.id)


def _put(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    standing = client.read_automations_by_name(wanted.name)
    if not standing:
        client.create_automation(wanted)
        return "created"
    if len(standing) > 1:
        raise InputError(f"the server has {len(standing)} automations {wanted.name!r}; delete some")
    if "enabled" not in wanted.model_fields_set:
        wanted.enabled = standing[0].enabled
    # Not sent if it is the same: the server forgets what it was waiting for when one is updated.
    if _plain(standing[0]) == _plain(wanted):
        return "unchanged"
    client.update_automation(standing[0].id, wanted)
    return "updated"


def _plain(automation: Automation | AutomationCore) -> dict[str, Any]:
    fields = automation.model_dump(mode="json", include=set(AutomationCore.model_fields))
    return _ordered(fields)  # type: ignore[no-any-return]


def _ordered(value: Any) -> Any:
    """The same with lists of names in order: the server keeps them as sets."""
    if isinstance(value, dict):
        return {key: _ordered(item) for key, item in value.items() if key != "id"}
    if isinstance(value, list):
        items = [_ordered(item) for item in value]
        return sorted(items) if all(isinstance(item, str) for item in items) else items
    return value
