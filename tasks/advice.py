"""What to do about a run that failed, for each kind of error."""

from __future__ import annotations

from signal_batch.errors import (
    CorruptDatasetError,
    FeatureError,
    InputError,
    OutputError,
    ShardsFailedError,
    StorageError,
    WorkerDiedError,
)
from signal_batch.specs import ExportSpec, JobSpec

_AGAIN = (
    "What is finished stays. When the cause is gone, run this again with the same parameters "
    "(*Retry*, *Copy to new run*, or the next scheduled run): it does only what is missing."
)
#: Errors that the same parameters would meet again.
_OF_THE_REQUEST = (InputError, FeatureError)
_REMEDIES: dict[type[Exception], str] = {
    CorruptDatasetError: "Put the damaged file back from a copy. "
    "`signal-batch validate {dataset} --deep` finds all that is damaged.",
    StorageError: "See that the storage answers, and that address and credentials are right.",
    WorkerDiedError: "See what ended the worker on its machine, memory first: fewer workers at a "
    "time need less.",
    OutputError: "See that there is room, and permission to write, at `{output}`.",
    FeatureError: "Correct the feature function. Its source is part of the run key, so what it "
    "makes then needs another output folder.",
    InputError: "Correct the parameters: *Copy to new run* opens the form with those of this run.",
}
_WITHOUT_BAD = (
    "Or go on without such records: export to another folder with *On unreadable records* set to "
    "`quarantine` or `skip`."
)


def advice(error: object, spec: JobSpec, *, claimed: bool) -> list[str]:
    """Lines of Markdown, the most urgent first; `claimed` if the run came to have an output."""
    causes = error.causes if isinstance(error, ShardsFailedError) else [error]
    places = {"dataset": spec.dataset, "output": spec.output}
    lines = [
        words.format(**places)
        for kind, words in _REMEDIES.items()
        if any(isinstance(cause, kind) for cause in causes)
    ]
    if isinstance(spec, ExportSpec) and any(isinstance(c, CorruptDatasetError) for c in causes):
        lines.append(_WITHOUT_BAD)
    if not any(isinstance(cause, _OF_THE_REQUEST) for cause in causes):
        lines.append(_AGAIN)
    if claimed:
        lines.append(f"`signal-batch status {spec.output}` shows how far it came.")
    return lines
