"""The status of an output on S3, whose listings tell times in another way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from signal_batch.cli import main
from signal_batch.frozen import checked
from signal_batch.job import claim, commit, progress_of
from signal_batch.planning import prepare
from signal_batch.specs import ExportSpec
from signal_batch.status import read_status
from signal_batch.worker import work


def test_an_export_on_s3_from_its_claim_to_its_end(
    s3_client: Any, bucket: str, iq_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"s3://{bucket}/deep/out"
    fields = {
        "dataset": str(iq_root),
        "output": uri,
        "columns": ["field:samples"],
        "features": "statistics",
        "batch_size": 20,
        "part_bytes": "2KB",
        "execution": {"workers": 1},
    }
    job = claim(prepare(checked(ExportSpec, fields)))
    (shard,) = progress_of(job).shards
    assert len(shard.parts) >= 4
    assert read_status(uri).state == "waiting"

    work(job.order(replace(shard, parts=shard.parts[:3])), lambda event: None, run_id="r")
    names = [item["Key"] for item in objects(s3_client, bucket, "deep/out/_receipts/")]
    times = [item["LastModified"].timestamp() for item in objects(s3_client, bucket, "deep/out/")]
    status = read_status(uri)
    assert (status.counts[0].done, status.counts[0].of) == (len(names), len(shard.parts))
    assert status.counts[1].done == sum(part.rows for part in shard.parts[:3])
    assert [(item.first_part, item.last_part) for item in status.missing] == [
        (3, len(shard.parts) - 1)
    ]
    if max(times) > min(times):  # of whole seconds
        assert status.speed.overall is not None
        assert status.speed.overall >= status.counts[1].done / (max(times) - min(times))
    assert objects(s3_client, bucket, "deep/out/_attempts/")

    work(job.order(shard), lambda event: None)
    commit(job)
    assert not objects(s3_client, bucket, "deep/out/_attempts/")
    assert read_status(uri).state == "complete"
    assert main(["status", uri]) == 0
    assert f"{uri}: export, complete" in capsys.readouterr().out
    assert main(["status", f"s3://{bucket}/deep"]) == 2


def objects(client: Any, bucket: str, prefix: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get(
        "Contents", []
    )
    return found
