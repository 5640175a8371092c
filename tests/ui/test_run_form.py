"""The form by which a person starts a run of a deployment: filled in, refused, corrected, run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest
import signal_dataset as sds

pytestmark = pytest.mark.xdist_group("ui")

SHOWN = {
    "Dataset": "/data/captures.sds",
    "Output": "/data/features/captures",
    "Columns": "field:samples",
    "Feature function": "power_spectrum",
    "Batch size": "256",
    "Part size": str(128 << 20),
    "Largest share of bad records": "0.01",
    "Runner": "local",
    "Workers": "2",
    "Retry delay (seconds)": "2",
    "Timeout (seconds)": "900",
}


@pytest.fixture(scope="module")
def deployment(stories: Any) -> str:
    """The packaged deployment of exports, registered by the installed command."""
    command = [str(Path(sys.executable).with_name("signal-batch")), "deploy", "--pool", "forms"]
    subprocess.run(
        [*command, "--only", "export-features"],
        env=stories.server.environment,
        check=True,
        capture_output=True,
        timeout=200,
    )
    return str(ask(stories, "get", "/deployments/name/export-features/export-features")["id"])


def ask(stories: Any, method: str, path: str, **options: Any) -> Any:
    url = f"{stories.server.url}/api{path}"
    return httpx.request(method, url, trust_env=False, **options).raise_for_status().json()


def runs_of(stories: Any, deployment: str) -> list[dict[str, Any]]:
    body = {"deployments": {"id": {"any_": [deployment]}}}
    found: list[dict[str, Any]] = ask(stories, "post", "/flow_runs/filter", json=body)
    return found


def field(page: Any, title: str) -> Any:
    """The innermost box with that title."""
    text = re.compile(rf"^\s*{re.escape(title)}( \(Optional\))?\s*$")
    label = page.locator(".schema-form-property__label", has_text=text)
    return page.locator(".schema-form-property").filter(has=label).last


def test_a_person_starts_an_export_from_the_form(
    stories: Any, page: Any, deployment: str, tmp_path: Path
) -> None:
    page.goto(f"{stories.server.url}/deployments/deployment/{deployment}/run")
    page.get_by_text("Largest share of bad records").wait_for()
    for title, value in SHOWN.items():
        box = field(page, title).locator("input, textarea").first
        assert box.input_value() == value, title

    root, output = str(stories.folder / "captures.sds"), str(stories.folder / "by-hand")
    field(page, "Dataset").locator("textarea").fill(root)
    field(page, "Output").locator("textarea").fill(output)
    field(page, "Filters").get_by_text("Add item").click()
    field(page, "Filters").locator("textarea").fill("ordinal < 100")
    field(page, "Compression").get_by_role("button", name="zstd").press("ArrowDown")
    page.get_by_role("option", name="snappy", exact=True).click()
    field(page, "Feature options").locator("textarea").fill('{"nperseg": 16}')
    field(page, "Batch size").locator("input").fill("0")
    submit = page.get_by_role("button", name="Submit")
    submit.click()
    refusal = "'spec.batch_size'. Failure reason: 0 is less than the minimum of 1"
    page.get_by_text(refusal).first.wait_for()
    assert runs_of(stories, deployment) == []

    field(page, "Batch size").locator("input").fill("32")
    submit.click()
    for _ in range(10):  # and again, as one would, where a busy server answered with an error
        page.wait_for_timeout(3000)
        if runs := runs_of(stories, deployment):
            break
        if page.get_by_text("Something went wrong").count():
            submit.click()
    [run] = runs
    spec = run["parameters"]["spec"]
    assert (spec["dataset"], spec["output"], spec["batch_size"]) == (root, output, 32)
    assert (spec["where"], spec["compression"]) == (["ordinal < 100"], "snappy")
    assert spec["feature_args"] == {"nperseg": 16}

    execute = [sys.executable, "-m", "prefect", "flow-run", "execute", run["id"]]
    subprocess.run(
        execute,
        cwd=tmp_path,  # what is there is copied for the run
        env=stories.server.environment,
        check=True,
        capture_output=True,
        timeout=200,
    )
    state = ask(stories, "get", f"/flow_runs/{run['id']}")["state"]
    assert state["type"] == "COMPLETED", state["message"]
    files = f"'{output}/data/*.parquet'"
    rows = duckdb.sql(f"SELECT id FROM {files} ORDER BY ordinal").fetchall()
    dataset = sds.open(root)
    assert [name for (name,) in rows] == [str(dataset[ordinal].id) for ordinal in range(100)]
    codecs = duckdb.sql(f"SELECT DISTINCT compression FROM parquet_metadata({files})").fetchall()
    assert codecs == [("SNAPPY",)]
