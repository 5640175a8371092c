"""Hold what pip installed against requirements.lock: same versions, and hashes that it names.

`python check_hashes.py REPORT LOCK`, where REPORT is what `pip install --report` wrote. pip checks
each download against the hash in the report; this checks that hash against the lock. The project
itself, installed from a folder, is not in the lock.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


def locked_hashes(lock: str) -> dict[tuple[str, str], set[str]]:
    """Name and version to the SHA-256 digests that the lock allows."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in lock.splitlines():
        if pinned := re.match(r"([\w.-]+)(?:\[.*?\])?==([^\s;\\]+)", line):
            hashes = found.setdefault((_normalized(pinned[1]), pinned[2]), set())
        elif digest := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            hashes.add(digest[1])
    return found


def faults_of(report: dict[str, Any], locked: dict[tuple[str, str], set[str]]) -> list[str]:
    """What was installed and is not what the lock names."""
    faults = []
    for item in report["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        source = item["download_info"]
        if "dir_info" in source:
            continue
        allowed = locked.get((_normalized(name), version))
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if allowed is None:
            faults.append(f"{name} {version} is not in the lock")
        elif digest not in allowed:
            faults.append(f"{name} {version} has the hash {digest}, which is not in the lock")
    return faults


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    report, lock = map(Path, sys.argv[1:])
    faults = faults_of(json.loads(report.read_text()), locked_hashes(lock.read_text()))
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
