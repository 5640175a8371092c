"""What an output folder says about its job, whether or not anybody works on it.

From the folder alone: no server is asked, the dataset is not opened, and nothing is written.
"""

from __future__ import annotations

from signal_batch.errors import InputError
from signal_batch.export_status import export_status
from signal_batch.specs import EXPORT_FORMAT, MODEL_FORMAT
from signal_batch.status_model import Status
from signal_batch.store import CLAIM, MANIFEST, OutputStore
from signal_batch.training_status import training_status
from signal_batch.uris import redact

_READERS = {EXPORT_FORMAT: export_status, MODEL_FORMAT: training_status}


def read_status(output: str) -> Status:
    """The status of an output folder, local or on any file system that fsspec knows.

    Raises:
        InputError: the folder is no output of this program.
        DamagedOutputError: claim or manifest hold no JSON object.
        StorageError: storage did not answer.
    """
    store = OutputStore(output)
    claim, manifest = store.read_claim(), store.read_manifest()
    document = claim or manifest
    reader = _READERS.get(str((document or {}).get("format")))
    if document is None or reader is None:
        raise InputError(
            f"{redact(store.uri)} is no output of an export or a training run: there is no "
            f"{CLAIM} or {MANIFEST} of one"
        )
    return reader(store, document, manifest)
