"""Grain, imported without its notice that JAX is not installed, and without JAX if wanted.

The notice goes through absl, which configures the root logger of the whole program the first
time it logs; that is not a library's business.

Where JAX is installed, Grain imports all of it for its profiler and its tree functions, which
takes a process a second and 60 MB. The programs of this package have no use for either, so they
set `SIGNAL_BATCH_PLAIN_GRAIN`; a trainer may still import JAX. In a program of somebody else's,
Grain is left to do as it likes.
"""

from __future__ import annotations

import logging
import os
import sys

PLAIN_GRAIN = "SIGNAL_BATCH_PLAIN_GRAIN"


def _is_no_notice(record: logging.LogRecord) -> bool:
    return "jax profiler" not in record.getMessage()


_without_jax = bool(os.environ.get(PLAIN_GRAIN)) and "jax" not in sys.modules
_root, _absl, _quiet = logging.getLogger(), logging.getLogger("absl"), logging.NullHandler()
_root.addHandler(_quiet)
_absl.addFilter(_is_no_notice)
if _without_jax:
    sys.modules["jax"] = None  # type: ignore[assignment]  # makes `import jax` an ImportError
try:
    import grain
finally:
    if _without_jax:
        del sys.modules["jax"]
    _absl.removeFilter(_is_no_notice)
    _root.removeHandler(_quiet)

__all__ = ["PLAIN_GRAIN", "grain"]
