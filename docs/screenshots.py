"""Makes the pictures of the README: `python docs/screenshots.py`.

Runs an export, one with damaged records and a training run on synthetic captures, against a
Prefect server of its own in a temporary folder, and takes pictures of their pages with Chromium.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from signal_batch.synth import synthesize
from signal_batch.validation import validate

IMAGES = Path(__file__).parent / "images"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
SIZE = {"width": 1280, "height": 800}
MOST_BYTES = 80_000

RUNS = """
from flows.export_features import export_features
from flows.train_model import train_model
from signal_batch import plan
from signal_batch.specs import ExportSpec
from signal_batch.training_spec import TrainSpec

COLUMNS = ["field:samples", "label=annotation:truth-v1/label:int32"]

if __name__ == "__main__":
    plan.SHARD_BYTES, plan.MOST_SHARDS = 1, 8
    for dataset, output in (("captures.sds", "spectra"), ("damaged.sds", "other-spectra")):
        spec = ExportSpec(
            dataset=dataset, output=output, columns=COLUMNS, part_bytes=400_000,
            features="power_spectrum", feature_args={"nperseg": 128}, execution={"workers": 2},
        )
        export_features(spec, return_state=True)
    spec = TrainSpec(
        dataset="captures.sds", output="modulation", columns=COLUMNS, target="label",
        split="scene test=0.2", transforms=["unit_power", "statistics", "normalize"],
        trainer="sklearn", epochs=8,
    )
    train_model(spec)
"""

#: The folder of the runs is temporary, and stands for the one where a team keeps its data.
HIDE = """folder => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode;
        if (node.data.includes(folder)) node.data = node.data.replaceAll(folder, "/data");
    }
}"""


@contextmanager
def server(home: Path) -> Iterator[dict[str, str]]:
    """A server on a free port; the environment that processes find it by."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    environment = os.environ | {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((home / "server.log").read_text())
            time.sleep(0.2)
        yield environment
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def write_data(folder: Path) -> None:
    """A dataset, and a copy with a flipped bit in two of its shards."""
    root = folder / "captures.sds"
    synthesize(str(root), records=6400, shape=(2, 512), seed=3, records_per_shard=800)
    shutil.copytree(root, folder / "damaged.sds")
    shards = (folder / "damaged.sds" / "objects").rglob("*.arrayrecord")
    by_age = sorted(shards, key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in (by_age[2], by_age[5]):
        _damage(path, folder / "damaged.sds")


def _damage(path: Path, root: Path) -> None:
    """Flip a bit of samples: one of metadata would be found before the export begins."""
    whole = path.read_bytes()
    for sixteenth in range(1, 16):
        hurt = bytearray(whole)
        hurt[len(hurt) * sixteenth // 16] ^= 4
        path.write_bytes(hurt)
        if validate(str(root)).ok:
            return
    raise SystemExit(f"every bit that was flipped in {path.name} concerned metadata")


def found(url: str, output: str, key: str) -> tuple[str, str]:
    """The pages of the run that wrote an output, and of one of its artifacts."""
    with httpx.Client(base_url=url, trust_env=False) as http:

        def ask(kind: str, body: dict[str, Any]) -> Any:
            return http.post(f"/{kind}/filter", json=body).raise_for_status().json()

        run = next(run for run in ask("flow_runs", {}) if run["name"].endswith(f"to {output}"))
        wanted = {"flow_run_id": {"any_": [run["id"]]}, "key": {"any_": [key]}}
        artifact = ask("artifacts", {"artifacts": wanted})[0]
    return f"/runs/flow-run/{run['id']}", f"/artifacts/artifact/{artifact['id']}"


def take(page: Page, address: str, awaited: str, folder: Path, name: str) -> None:
    """A picture of a page, in few colours, so that it is small."""
    page.goto(address)
    page.get_by_text(awaited).first.wait_for()
    page.wait_for_timeout(3000)  # pictures and the graph are drawn after the text
    page.evaluate(HIDE, str(folder))
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    small = picture.quantize(128, dither=Image.Dither.NONE)
    target = IMAGES / f"{name}.png"
    small.save(target, optimize=True)
    size = target.stat().st_size
    print(f"{target.name}: {size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{target.name} is larger than {MOST_BYTES:,} bytes")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="captures-") as name:
        folder = Path(name).resolve()
        write_data(folder)
        (folder / "runs.py").write_text(RUNS)
        with server(folder) as environment, sync_playwright() as playwright:
            command = [sys.executable, "runs.py"]
            subprocess.run(command, cwd=folder, env=environment, check=True)
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
            api = environment["PREFECT_API_URL"]
            base = api.removesuffix("/api")
            run, report = found(api, "spectra", "export-report")
            take(page, base + run, "Finished in state", folder, "run")
            take(page, base + report, "Columns and filters", folder, "report")
            _, table = found(api, "other-spectra", "export-shards")
            take(page, base + table, "failed", folder, "failure")
            _, trained = found(api, "modulation", "training-report")
            take(page, base + trained, "Columns and filters", folder, "training")
            browser.close()


if __name__ == "__main__":
    main()
