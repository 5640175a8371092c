"""Credentials of the storage from a Secret block: what is taken, what is refused, what is told."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import fsspec
import pytest
from prefect import flow
from prefect.blocks.system import Secret

from signal_batch.errors import InputError
from tasks import credentials
from tasks.credentials import use_credentials

VALUE = "hunter2-hunter2"
KEYS = {"AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": VALUE}

_numbers = count()


@pytest.fixture
def save(api: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], str]]:
    """`save(value)`: the name of a new block; the environment is put back afterwards."""
    kept = dict(os.environ)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    monkeypatch.setattr(credentials, "_before", {})

    def save(value: Any) -> str:
        name = f"storage-{next(_numbers)}"
        Secret(value=value).save(name, _sync=True)
        return name

    yield save
    os.environ.clear()
    os.environ.update(kept)


@pytest.mark.parametrize("as_text", [False, True])
def test_variables_come_into_the_environment(
    save: Callable[[Any], str], as_text: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name = save(json.dumps(KEYS) if as_text else KEYS)
    with caplog.at_level(logging.DEBUG):
        use_credentials(name)
    assert {key: os.environ[key] for key in KEYS} == KEYS
    assert VALUE not in caplog.text
    assert "AWS_SECRET_ACCESS_KEY" in caplog.text


def test_in_a_flow_and_in_many_threads(save: Callable[[Any], str]) -> None:
    name = save(KEYS)

    @flow(persist_result=False)
    def reading() -> str:
        use_credentials(name)
        return os.environ["AWS_SECRET_ACCESS_KEY"]

    assert reading() == VALUE
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use_credentials, [name] * 8))
    assert {key: os.environ[key] for key in KEYS} == KEYS


def test_the_block_wins_and_the_next_one_takes_its_place(save: Callable[[Any], str]) -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": "mine", "AWS_SESSION_TOKEN": "of-mine"}
    use_credentials(None)
    assert os.environ["AWS_ACCESS_KEY_ID"] == "mine"
    use_credentials(save(KEYS))
    assert os.environ["AWS_ACCESS_KEY_ID"] == "lab"
    assert "AWS_SESSION_TOKEN" not in os.environ, "it belongs to the key that was replaced"
    use_credentials(save({"AZURE_STORAGE_ACCOUNT_NAME": "lab"}))
    assert os.environ["AWS_ACCESS_KEY_ID"] == "mine"
    assert os.environ["AWS_SESSION_TOKEN"] == "of-mine"
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
    assert os.environ["AZURE_STORAGE_ACCOUNT_NAME"] == "lab"


def test_file_systems_are_made_anew_when_a_block_changes(save: Callable[[Any], str]) -> None:
    name = save({**KEYS, "FSSPEC_MEMORY_SKIP_INSTANCE_CACHE": "false"})
    before = fsspec.filesystem("memory", use_listings_cache=False)
    use_credentials(name)
    found = fsspec.filesystem("memory", use_listings_cache=False)
    assert found is not before
    assert fsspec.config.conf.pop("memory") == {"skip_instance_cache": False}
    kept = fsspec.filesystem("memory", use_listings_cache=False)
    use_credentials(name)
    assert fsspec.filesystem("memory", use_listings_cache=False) is kept
    fsspec.config.conf.pop("memory", None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"PYTHONPATH": VALUE}, "sets PYTHONPATH; credentials of the storage may only set"),
        ({**KEYS, "PREFECT_API_URL": VALUE}, "sets PREFECT_API_URL"),
        ({"AWS_ACCESS_KEY_ID": 7}, "the value of AWS_ACCESS_KEY_ID is no text"),
        (f"{VALUE} is no JSON", "must hold a JSON object of environment variables"),
        ([VALUE], "must hold a JSON object"),
        ({}, "must hold a JSON object"),
    ],
)
def test_what_is_no_credentials_is_refused_and_not_repeated(
    save: Callable[[Any], str], value: Any, words: str
) -> None:
    before = dict(os.environ)
    with pytest.raises(InputError, match=words) as caught:
        use_credentials(save(value))
    assert VALUE not in str(caught.value)
    assert caught.value.exit_code == 2
    assert dict(os.environ) == before


def test_a_block_that_is_not_there(api: Any) -> None:
    with pytest.raises(InputError, match=r"no Prefect Secret block 'nobody'.*under Blocks"):
        use_credentials("nobody")
