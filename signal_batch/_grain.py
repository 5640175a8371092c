"""Grain, imported without its notice that JAX is not installed.

The notice goes through absl, which configures the root logger of the whole program the first
time it logs; that is not a library's business.
"""

from __future__ import annotations

import logging


def _is_no_notice(record: logging.LogRecord) -> bool:
    return "jax profiler" not in record.getMessage()


_root, _absl, _quiet = logging.getLogger(), logging.getLogger("absl"), logging.NullHandler()
_root.addHandler(_quiet)
_absl.addFilter(_is_no_notice)
try:
    import grain
finally:
    _absl.removeFilter(_is_no_notice)
    _root.removeHandler(_quiet)

__all__ = ["grain"]
