"""That all contenders compute the same, before anything is timed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.contest import available, export_command, export_task
from benchmarks.loaders import IN_ORDER
from benchmarks.settings import CHECKED, Size

_LOADED = 512


class DifferentValuesError(RuntimeError):
    """A contender does not compute what the others do."""


def check_loaders(folder: Path, size: Size) -> list[str]:
    """Every loader gives the same records in the same order, with the same labels.

    Samples are compared byte for byte. Who shuffles is held against the library's own
    `__getitems__`, who does not against its `iter_records`.
    """
    records = min(_LOADED, size.records)
    task = {"kind": "check loaders", "dataset": str(folder / size.name), "records": records}
    digests = measure.ask(task)["digests"]
    for name, found in digests.items():
        expected = "iter_records" if name in IN_ORDER else "getitems"
        if found != digests[expected]:
            raise DifferentValuesError(f"{size.label}: {name} and {expected} differ")
    return list(digests)


def check_exports(
    folder: Path, scratch: Path, size: Size, feature: str, names: tuple[str, ...]
) -> list[str]:
    """Every export holds the rows of the limit loop: same ordinals, ids and close values."""
    wanted = {label.partition(" x")[0] for label in names} | {"limit loop"}
    if feature == "power_spectrum":
        wanted |= {"guide", "pandas lists"}
    task = export_task(folder, scratch, size, feature, "limit loop")
    stop = min(CHECKED, size.records)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    paths = {name: scratch / f"{name}.parquet" for name in sorted(wanted) if available(name)}
    ours = paths.pop("signal_batch", None)
    given = {name: str(path) for name, path in paths.items()}
    measure.ask(task | {"kind": "check exports", "paths": given, "stop": stop})
    if ours is not None:
        measure.command(export_command(task, 2, ours))
        paths["signal_batch"] = ours / "data"
    tables = {name: _rows(path, stop) for name, path in paths.items()}
    if feature == "power_spectrum":
        tables["SciPy"] = _by_scipy(folder, size, stop)
    for name, table in tables.items():
        _compare(f"{size.label}, {feature}: {name}", table, tables["limit loop"])
    return sorted(tables)


def _rows(path: Path, stop: int) -> dict[str, Any]:
    """Columns of the first `stop` records as flat arrays, in the order of ordinals."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.dataset as ds

    table = ds.dataset(str(path), format="parquet").to_table()
    table = table.sort_by("ordinal").slice(0, stop)
    columns: dict[str, Any] = {}
    for name in table.column_names:
        array = table.column(name).combine_chunks()
        while hasattr(array, "storage") or hasattr(array.type, "value_type"):
            array = array.storage if isinstance(array, pa.ExtensionArray) else array.flatten()
        columns[name] = np.asarray(array.to_numpy(zero_copy_only=False))
    return columns


def _by_scipy(folder: Path, size: Size, stop: int) -> dict[str, Any]:
    """The power spectra in double precision, record by record."""
    import numpy as np
    import signal_dataset as sds
    from scipy import signal

    dataset = sds.open(str(folder / size.name))
    records = [dataset[ordinal] for ordinal in range(stop)]
    spectra = [
        signal.welch(
            record["samples"].data.astype(np.complex128),
            nperseg=size.nperseg,
            detrend=False,
            return_onesided=False,
        )[1]
        for record in records
    ]
    return {
        "ordinal": np.arange(stop),
        "id": np.array([record.id for record in records], object),
        "power_spectrum": np.stack(spectra).reshape(-1),
    }


def _compare(subject: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    import numpy as np

    if found.keys() != expected.keys():
        raise DifferentValuesError(f"{subject} has columns {sorted(found)}")
    for name, values in expected.items():
        same = found[name].shape == values.shape and (
            np.allclose(found[name], values, rtol=1e-3, atol=1e-6 * np.abs(values).max())
            if values.dtype.kind == "f"
            else bool((found[name] == values).all())
        )
        if not same:
            raise DifferentValuesError(f"{subject} differs from the limit loop in column {name}")
