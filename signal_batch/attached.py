"""A command run as the child of another: it ends with its parent, and tells it how it went.

`python -m signal_batch.attached PARENT MODULE ARGUMENT ...` runs MODULE as `python -m` does, in a
process that leads its group and ends when process PARENT does. The parent names a file in the
environment, where the command leaves its outcome as JSON for `told` to read.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from signal_batch.program import end_with_parent

OUTCOME = "SIGNAL_BATCH_OUTCOME"


def tell(**outcome: Any) -> None:
    """Leave the outcome for the parent, if there is one that asked."""
    if path := os.environ.get(OUTCOME):
        with suppress(OSError):  # a parent that is gone, with its folder
            Path(path).write_text(json.dumps(outcome))


def told(path: Path) -> dict[str, Any]:
    """What a child has left at `path`; empty if it ended before it could."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def main() -> None:
    """Be the child: follow the parent, then run the module."""
    parent, module, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
