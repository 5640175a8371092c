"""Encoded records straight from the shard reader, with nothing checked."""

from __future__ import annotations

import bisect
from types import TracebackType
from typing import Self

import numpy as np
import signal_dataset as sds
from array_record.python.array_record_module import ArrayRecordReader


class RawShards:
    """The data shards of a dataset, opened once and read by ordinal."""

    def __init__(self, root: str) -> None:
        dataset = sds.open(root)
        instructions = dataset.read_instructions(0, len(dataset))
        self._options = dataset.storage_options.reader_options
        self._readers = [ArrayRecordReader(item.filename, self._options) for item in instructions]
        self._starts = [item.first_ordinal for item in instructions]
        self._size = len(dataset)

    def __len__(self) -> int:
        return self._size

    def read(self, ordinals: list[int]) -> list[bytes]:
        """Encoded records in the order of `ordinals`; one call for each shard that is met."""
        if len(self._readers) == 1:
            return list(self._readers[0].read(ordinals))
        groups: dict[int, list[int]] = {}
        for position, ordinal in enumerate(ordinals):
            shard = bisect.bisect_right(self._starts, ordinal) - 1
            groups.setdefault(shard, []).append(position)
        found = [b""] * len(ordinals)
        for shard, positions in groups.items():
            first = self._starts[shard]
            local = [ordinals[position] - first for position in positions]
            payloads = self._readers[shard].read(local)
            for position, payload in zip(positions, payloads, strict=True):
                found[position] = payload
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reader in self._readers:
            reader.close()


def record_id(payload: bytes) -> str:
    """The id that the descriptor of an encoded record holds."""
    start = payload.rfind(b'"id":"capture-') + 6
    return payload[start : payload.index(b'"', start)].decode()


def stacked(payloads: list[bytes], shape: tuple[int, int]) -> np.ndarray:
    """Samples of encoded records (records, channels, samples): their first and only tensor."""
    batch = np.empty((len(payloads), *shape), np.complex64)
    items = shape[0] * shape[1]
    for row, payload in enumerate(payloads):
        start = 8 + int.from_bytes(payload[:8], "little")
        batch[row] = np.frombuffer(payload, np.complex64, items, start).reshape(shape)
    return batch
