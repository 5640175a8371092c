"""`python -m signal_batch`: the command line without Prefect."""

from __future__ import annotations

import sys

from signal_batch.cli import main

if __name__ == "__main__":
    sys.exit(main())
