"""Checkpoints of a training run in its output folder.

::

    OUT/_checkpoints/step-000001200-3f2a9c1b0d4e.safetensors   arrays; the name carries their hash
    OUT/_checkpoints/step-000001200.json                       written after; says what they are

The document makes the checkpoint: arrays that no document names are what a killed run left. The
newest checkpoint whose arrays have the size and hash that its document says is the one to go on
from. Two runs of one job that are at the same step write the same bytes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from signal_batch.columns import FIELD_DTYPES
from signal_batch.errors import (
    DamagedOutputError,
    OutputConflictError,
    SignalBatchError,
    SpecError,
)
from signal_batch.frozen import digest
from signal_batch.store import OutputStore, differences
from signal_batch.training import State
from signal_batch.training_job import TrainJob

FOLDER = "_checkpoints"
_DOCUMENT = re.compile(r"step-(\d{9})\.json")
#: A document, arrays, or what a killed run left of either.
_ANY = re.compile(r"step-(\d{9})[-.].+")

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run had learned after `step` global steps, `records` of the global order.

    `progress` is the rest of what a run needs to go on: metric history, counts and times.
    """

    step: int
    records: int
    arrays: State
    progress: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run key; `identity` is what that key was made of."""

    def __init__(
        self, output: str, *, run_key: str, identity: Mapping[str, Any], keep: int
    ) -> None:
        self._store = OutputStore(output)
        self._run_key = run_key
        self._identity = identity
        self._keep = keep

    def save(self, checkpoint: Checkpoint, versions: Mapping[str, str]) -> None:
        """Write a checkpoint, then remove all but the newest ones.

        Raises `SpecError` for a state with a dtype that safetensors has not, as complex128.
        """
        payload = _packed(checkpoint.arrays)
        hashed = sha256(payload).hexdigest()
        name = f"step-{checkpoint.step:09d}"
        arrays = f"{name}-{hashed[:12]}.safetensors"
        self._store.put_object(f"{FOLDER}/{arrays}", payload)
        document = {
            "run_key": self._run_key,
            "identity": self._identity,
            "cursor": {"step": checkpoint.step, "records": checkpoint.records},
            "arrays": {"file": arrays, "bytes": len(payload), "sha256": hashed},
            "progress": checkpoint.progress,
            "versions": dict(versions),
        }
        self._store.put_document(f"{FOLDER}/{name}.json", {**document, "digest": digest(document)})
        self._prune(checkpoint.step)

    def newest(self, warn: Warn) -> Checkpoint | None:
        """The newest checkpoint that is whole; `warn` is told of every one that is not.

        Raises `OutputConflictError`, listing the differences, for one of another run key.
        """
        for name in reversed(self._documents()):
            try:
                return self._load(name)
            except DamagedOutputError as exc:
                warn(
                    f"checkpoint {name.removesuffix('.json')} is damaged ({exc}); trying the "
                    "one before"
                )
        return None

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, ascending."""
        return [int(name[5:14]) for name in self._documents()]

    def _documents(self) -> list[str]:
        return sorted(name for name in self._store.listing(FOLDER) if _DOCUMENT.fullmatch(name))

    def _load(self, name: str) -> Checkpoint:
        document = self._store.read_document(f"{FOLDER}/{name}")
        if document is None:
            raise DamagedOutputError("it went away")
        try:
            if document["run_key"] != self._run_key:
                self._refuse(document)
            step, records = document["cursor"]["step"], document["cursor"]["records"]
            said, progress = document["arrays"], dict(document["progress"])
            if name != f"step-{step:09d}.json" or type(records) is not int:
                raise ValueError("its cursor is of another step")
            payload = self._store.read_object(f"{FOLDER}/{said['file']}")
            if payload is None:
                raise ValueError(f"{said['file']} is missing")
            if len(payload) != said["bytes"] or sha256(payload).hexdigest() != said["sha256"]:
                raise ValueError(f"{said['file']} was cut short or changed")
            if document.pop("digest", None) != digest(document):
                raise ValueError("it was changed after it was written")
            return Checkpoint(step, records, load(payload), progress)
        except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as exc:
            if isinstance(exc, SignalBatchError):
                raise
            raise DamagedOutputError(str(exc)) from exc

    def _refuse(self, document: Mapping[str, Any]) -> None:
        changes = differences(document.get("identity", {}), self._identity)
        raise OutputConflictError(
            f"the checkpoints in {self._store.uri} are of another run (run key "
            f"{str(document['run_key'])[:12]}, this one is {self._run_key[:12]}). They differ in: "
            f"{'; '.join(changes) or 'the run key alone'}. Choose another output folder"
        )

    def _prune(self, saved: int) -> None:
        """Remove old checkpoints: documents first, so that none names arrays that are gone.

        Those of later steps, from which nothing could go on, count for nothing: they are written
        anew when their turn comes.
        """
        names = self._store.listing(FOLDER)
        steps = sorted(int(match[1]) for name in names if (match := _DOCUMENT.fullmatch(name)))
        # None is left where another run of this job, further on, just removed them.
        oldest = min([step for step in steps if step <= saved][-self._keep :], default=saved)
        found = [(int(match[1]), name) for name in names if (match := _ANY.fullmatch(name))]
        old = sorted(
            (
                name
                for step, name in found
                if step < oldest or (step <= saved and name.endswith(".tmp"))
            ),
            key=lambda name: not name.endswith(".json"),
        )
        self._store.remove(f"{FOLDER}/{name}" for name in old)


def checkpoints_of(job: TrainJob) -> Checkpoints:
    """The checkpoints of a run, in its output folder."""
    return Checkpoints(
        job.spec.output, run_key=job.run_key, identity=job.identity, keep=job.spec.keep_checkpoints
    )


def last_checkpoint(job: TrainJob, warn: Warn) -> Checkpoint:
    """What a run had learned after its last step; `DamagedOutputError` where that is not there."""
    found = checkpoints_of(job).newest(warn)
    if found is None or found.step != job.plan.total_steps:
        raise DamagedOutputError(
            f"{job.spec.output} has no whole checkpoint of the last step; run the same command "
            "again"
        )
    return found


def _packed(state: State) -> bytes:
    try:
        return save(state)
    except SafetensorError as exc:
        odd = (f"{k} is {v.dtype}" for k, v in state.items() if v.dtype.name not in FIELD_DTYPES)
        raise SpecError(f"a trainer's state cannot be saved: {', '.join(odd)} ({exc})") from exc


class BackgroundSaver:
    """Saves checkpoints in a thread of its own, one at a time."""

    def __init__(self, save: Callable[[Checkpoint], None]) -> None:
        self._save = save
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, checkpoint: Checkpoint) -> None:
        """Begin to save; raises what the save before this one raised."""
        self.finish()
        self._thread = threading.Thread(target=self._run, args=(checkpoint,), name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save that is going on; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, checkpoint: Checkpoint) -> None:
        try:
            self._save(checkpoint)
        except BaseException as exc:
            self._error = exc


def copied(state: State) -> State:
    """The arrays of a state, copied and contiguous, so that training can go on meanwhile."""
    return {name: np.array(value, copy=True, order="C") for name, value in state.items()}
