"""Grain, imported without its notice that JAX is not installed.

The notice goes through absl, which configures the root logger of the whole program the first
time it logs; that is not a library's business.
"""

from __future__ import annotations

import logging

_quiet = logging.NullHandler()
logging.getLogger().addHandler(_quiet)
try:
    import grain
finally:
    logging.getLogger().removeHandler(_quiet)

__all__ = ["grain"]
