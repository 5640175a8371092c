"""One table for people, one JSON file for everything else."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contest import Samples
from benchmarks.settings import Size
from benchmarks.targets import MEGABYTE, Target, cpu_ratio, peak_mb, ratio

_PACKAGES = (
    *("signal-batch", "signal-dataset", "array-record", "grain", "numpy", "scipy", "pyarrow"),
    *("orjson", "pandas", "ray", "datasets"),
)


class Report:
    """Collects what was measured."""

    def __init__(self, mode: str, rounds: int) -> None:
        self.targets: list[Target] = []
        self._groups: list[tuple[str, Samples, float | None, str | None]] = []
        self._planning: list[dict[str, Any]] = []
        self._shuffles: list[dict[str, Any]] = []
        self._training: list[dict[str, Any]] = []
        self._orchestration: list[dict[str, Any]] = []
        self._load_before = os.getloadavg()
        self._document: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "mode": mode,
            "rounds": rounds,
            "machine": machine(),
            "versions": versions(),
        }

    def add(
        self, title: str, samples: Samples, size: Size | None, baseline: str | None = None
    ) -> None:
        """A group of contenders; ratios are to `baseline`."""
        record_mb = None if size is None else size.record_bytes / MEGABYTE
        self._groups.append((title, samples, record_mb, baseline))

    def add_planning(self, rounds: list[dict[str, Any]]) -> None:
        self._planning = rounds

    def add_shuffles(self, results: list[dict[str, Any]]) -> None:
        self._shuffles = results

    def add_training(self, results: list[dict[str, Any]]) -> None:
        self._training = results

    def add_orchestration(self, results: list[dict[str, Any]]) -> None:
        self._orchestration = results

    def show(self) -> None:
        console = Console(width=None if Console().is_terminal else 150)
        table = _table(
            "",
            "records/s",
            "min .. max",
            "MB/s",
            "ratio",
            "us CPU",
            "CPU ratio",
            "peak MB",
            "whole s",
        )
        for title, samples, record_mb, baseline in self._groups:
            table.add_section()
            table.add_row(f"[bold]{title}[/bold]")
            for name in samples:
                table.add_row(*_row(name, samples, record_mb, baseline))
        if self._groups:
            console.print(table)
        if self._planning:
            console.print(_planning_table(self._planning))
        if self._shuffles:
            console.print(_shuffle_table(self._shuffles))
        if self._training:
            console.print(_training_table(self._training))
        if self._orchestration:
            console.print(_orchestration_table(self._orchestration))
        targets = _table("target", "found", "by CPU", "wanted", "")
        for target in self.targets:
            targets.add_row(*_target_row(target))
        console.print(targets)

    def document(self) -> dict[str, Any]:
        groups = [
            {
                "title": title,
                "contenders": {
                    name: [sample.to_dict() for sample in rounds]
                    for name, rounds in samples.items()
                },
            }
            for title, samples, _, _ in self._groups
        ]
        load = {"before": self._load_before, "after": os.getloadavg()}
        return self._document | {
            "load_average": load,
            "groups": groups,
            "planning": self._planning,
            "shuffles": self._shuffles,
            "training": self._training,
            "orchestration": self._orchestration,
            "targets": [target.to_dict() for target in self.targets],
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document(), indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What it was measured on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_bytes": pages,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _row(
    name: str, samples: Samples, record_mb: float | None, baseline: str | None
) -> tuple[str, ...]:
    rounds = samples[name]
    rates = [sample.rate for sample in rounds]
    median = statistics.median(rates)
    times = f"{ratio(samples, name, baseline):.2f}x" if baseline in samples else ""
    cpu = statistics.median(sample.cpu_s / sample.rows for sample in rounds)
    thrift = f"{cpu_ratio(samples, name, baseline):.2f}x" if cpu and baseline in samples else ""
    whole = statistics.median(sample.whole_s for sample in rounds)
    return (
        f"  {name}",
        f"{median:,.0f}",
        f"{min(rates):,.0f} .. {max(rates):,.0f}",
        "" if record_mb is None else f"{median * record_mb:,.0f}",
        times,
        f"{cpu * 1e6:,.0f}" if cpu else "",
        thrift,
        f"{peak_mb(samples, name):,.0f}",
        f"{whole:.2f} for {rounds[0].whole_rows:,}",
    )


def _planning_table(rounds: Sequence[dict[str, Any]]) -> Table:
    table = _table("planning", "s")
    for step in rounds[0]["steps"]:
        table.add_row(step, f"{statistics.median(r['steps'][step] for r in rounds):.3f}")
    peak = max(result["peak_bytes"] for result in rounds) / MEGABYTE
    table.add_row("peak MB", f"{peak:,.0f}")
    return table


def _shuffle_table(results: Sequence[dict[str, Any]]) -> Table:
    table = _table("order, of 16 shards", "kept", "fetched x dataset", "records/s")
    for result in results:
        pace = f"{result['records_per_s']:,.0f}"
        table.add_row(result["order"], str(result["kept"]), f"{result['fetched']:.1f}", pace)
    return table


def _orchestration_table(results: Sequence[dict[str, Any]]) -> Table:
    table = _table("shards", "no Prefect, s", "flow, s", "ms a shard", "work pool, s", "ms a shard")
    for row in results:
        over = [
            1000 * (row[kind] - row["plain_s"]) / row["shards"] for kind in ("local_s", "pool_s")
        ]
        table.add_row(
            str(row["shards"]),
            f"{row['plain_s']:.1f}",
            f"{row['local_s']:.1f}",
            f"{over[0]:.0f}",
            f"{row['pool_s']:.1f}",
            f"{over[1]:.0f}",
        )
    return table


def _training_table(results: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "trainer, 8 KB records",
        "ms a step",
        "records/s",
        "waiting for input",
        "first step s",
        "again s",
    )
    for result in results:
        table.add_row(
            result["trainer"],
            f"{result['step_ms']:.1f}",
            f"{result['records_per_s']:,.0f}",
            f"{result['waiting']:.1%}",
            f"{result['first_step_s']:.1f}",
            f"{result['first_step_again_s']:.1f}",
        )
    return table


def _target_row(target: Target) -> tuple[str, ...]:
    sign = ">=" if target.at_least else "<="
    digits = 0 if target.unit == "MB" else 2
    return (
        target.what,
        f"{target.found:,.{digits}f} {target.unit}",
        "" if target.by_cpu is None else f"{target.by_cpu:,.{digits}f} {target.unit}",
        f"{sign} {target.wanted:g} {target.unit}",
        "[green]held[/green]" if target.reached else "[red]missed[/red]",
    )
