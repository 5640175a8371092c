"""The datasets that are measured on, written once and kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.settings import SEED, Size

_RECORD_BYTES = 8_978
_ROW_BYTES = 739


def datasets(folder: Path, wanted: Sequence[tuple[str, int, tuple[int, int]]]) -> None:
    """Write the datasets (name, records, shape) that are not there yet, two at a time.

    Each has at least eight shards, so that reading meets more than one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [item for item in wanted if not (folder / item[0] / "root.json").exists()]
    if not missing:
        return
    print(f"writing {', '.join(name for name, _, _ in missing)} to {folder}", flush=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_write, folder / name, n, shape) for name, n, shape in missing]
        for job in jobs:
            job.result()


def of_size(size: Size) -> tuple[str, int, tuple[int, int]]:
    return size.name, size.records, size.shape


def _write(root: Path, records: int, shape: tuple[int, int]) -> None:
    from signal_batch.synth import synthesize

    shard = max(16, -(-records // 8))
    most = (64 << 20) // (8 * shape[0] * shape[1])
    synthesize(
        str(root), records=records, shape=shape, seed=SEED, records_per_shard=min(shard, most)
    )


def manifest_only(folder: Path, records: int, shards: int) -> Path:
    """A dataset of control documents alone: every shard is named, none exists.

    One manifest page, as `signal_dataset.publish` writes for up to 10,000 shards.
    """
    from signal_dataset.dataset.layout import (
        DatasetRoot,
        Manifest,
        ManifestReference,
        ShardEntry,
        Snapshot,
    )
    from signal_dataset.storage.reference import ObjectReference

    root = folder / f"manifest-{records}-{shards}"
    if (root / "root.json").exists():
        return root
    each = records // shards
    data_bytes, row_bytes = each * _RECORD_BYTES, each * _ROW_BYTES
    entries = tuple(
        ShardEntry(
            number * each,
            each,
            ObjectReference(f"objects/data/{number:08x}.arrayrecord", None, data_bytes),
            ObjectReference(f"objects/metadata/{number:08x}.arrayrecord", None, row_bytes),
        )
        for number in range(shards)
    )
    stored = shards * (data_bytes + row_bytes)
    page = _put(root, "manifests/00000000.json", Manifest(0, each * shards, entries).to_dict())
    reference = ManifestReference(0, each * shards, shards, stored, page)
    snapshot = Snapshot("planned", each * shards, shards, stored, (reference,))
    control = _put(root, "snapshots/planned/snapshot.json", snapshot.to_dict())
    _put(root, "root.json", DatasetRoot("manifest-only", control).to_dict())
    return root


def _put(root: Path, path: str, value: dict[str, Any]) -> Any:
    from signal_dataset.storage.reference import ObjectReference

    payload = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(payload)
    return ObjectReference(path, None, len(payload))
