"""What Prefect costs: the same export without it, as a flow, and with a flow run for each shard.

All three run the same worker programs, two at a time, on a dataset so small that a shard is little
more than starting one; the differences are what orchestration takes. The server is warm, and one
for all; so are the two Prefect workers that poll the work pool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

RECORDS = 1024
WORKERS = 2
POOL = "benchmarks"


def measured(scratch: Path, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds of each kind of run for so many shards, one run each after one to warm up."""
    os.environ.setdefault("PREFECT_HOME", str(scratch / "prefect"))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")
    from signal_batch.synth import synthesize

    dataset = scratch / "orchestration.sds"
    shutil.rmtree(dataset, ignore_errors=True)
    synthesize(str(dataset), records=RECORDS, shape=(1, 16), seed=1)
    from flows.embedded import server

    with server(), _workers():
        for runner in ("local", "work-pool"):
            _flow(dataset, scratch / "warm", 2, runner)
        return [_row(dataset, scratch, count) for count in counts]


def _row(dataset: Path, scratch: Path, count: int) -> dict[str, Any]:
    from signal_batch import export

    started = time.perf_counter()
    with _cut_into(count):
        export(_spec(dataset, scratch / "plain", count, "local"))
    plain_s = time.perf_counter() - started
    local_s = _flow(dataset, scratch / "flow", count, "local")
    pool_s = _flow(dataset, scratch / "pool", count, "work-pool")
    row = {"shards": count, "plain_s": plain_s, "local_s": local_s, "pool_s": pool_s}
    print(row, flush=True)
    return row


def _flow(dataset: Path, output: Path, count: int, runner: str) -> float:
    from flows.export_features import export_features

    started = time.perf_counter()
    with _cut_into(count):
        export_features(_spec(dataset, output, count, runner))
    return time.perf_counter() - started


def _spec(dataset: Path, output: Path, count: int, runner: str) -> Any:
    from signal_batch import ExportSpec
    from signal_batch.frozen import checked

    shutil.rmtree(output, ignore_errors=True)
    fields = {
        "dataset": str(dataset),
        "output": str(output),
        "columns": ["field:samples"],
        "batch_size": RECORDS // count,
        "part_bytes": 1,
        "execution": {"runner": runner, "workers": WORKERS},
    }
    return checked(ExportSpec, fields)


@contextmanager
def _cut_into(count: int) -> Iterator[None]:
    """One part a shard, however small."""
    with (
        patch("signal_batch.plan.SHARD_BYTES", 1),
        patch("signal_batch.plan.MOST_SHARDS", count),
        patch("signal_batch.planning.rows_a_part", lambda **_: RECORDS // count),
    ):
        yield


@contextmanager
def _workers() -> Iterator[None]:
    from prefect.client.orchestration import get_client
    from prefect.deployments.runner import EntrypointType
    from prefect.settings import get_current_settings

    from flows.export_shard import export_shard
    from flows.registering import ensure_pool

    with get_client(sync_client=True) as client:
        ensure_pool(client, POOL)
    deployment: Any = export_shard.to_deployment(
        export_shard.name, work_pool_name=POOL, entrypoint_type=EntrypointType.MODULE_PATH
    )
    deployment.apply()
    environment = {
        **os.environ,
        "PREFECT_API_URL": str(get_current_settings().api.url),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "SIGNAL_BATCH_PLAIN_GRAIN": "1",
    }
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    started = [
        subprocess.Popen(
            [*command, "--name", name],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in ("one", "two")
    ]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
