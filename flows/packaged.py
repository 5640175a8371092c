"""The files of `deployments/`: beside the flows in a wheel, beside their folder in a checkout."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def packaged(name: str) -> Path:
    """Where a file of `deployments/` is; it is not looked whether it is there."""
    installed = _HERE / "_deployments"
    return (installed if installed.is_dir() else _HERE.parent / "deployments") / name
