"""What is measured: record sizes, how many records, which contenders take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BATCH = 64
SEED = 7
CHECKED = 96


@dataclass(frozen=True, slots=True)
class Size:
    """One dataset. `slow` is what contenders that go record by record are given of it, and
    `loaded` how many records of any number of epochs a fast loader takes.
    """

    label: str
    shape: tuple[int, int]
    nperseg: int
    records: int
    slow: int
    loaded: int

    @property
    def name(self) -> str:
        return f"iq-{self.shape[0]}x{self.shape[1]}-{self.records}"

    @property
    def record_bytes(self) -> int:
        return 8 * self.shape[0] * self.shape[1]

    def feature_args(self, feature: str) -> dict[str, int]:
        return {"nperseg": self.nperseg} if feature == "power_spectrum" else {}


@dataclass(frozen=True, slots=True)
class Mode:
    """How much of everything. `exports` maps a feature to its contenders."""

    name: str
    sizes: tuple[Size, ...]
    rounds: int
    loaders: tuple[str, ...]
    exports: Mapping[str, tuple[str, ...]]
    growth: tuple[int, ...]
    planning: tuple[int, int]
    shuffle: tuple[int, ...] = ()
    training: tuple[str, ...] = ()
    steps: int = 200
    orchestration: tuple[int, ...] = ()


# Datasets of 128 MiB or more, in eight parts of full batches, so that two workers have the same
# to do; guide-like pipelines take whole rounds of their 16 threads.
_SMALL = (
    Size("8 KB", (1, 1024), 256, records=16_384, slow=2_048, loaded=32_768),
    Size("64 KB", (8, 1024), 256, records=2_048, slow=1_024, loaded=8_192),
    Size("512 KB", (8, 8192), 1024, records=320, slow=320, loaded=1_280),
)
_FULL = (
    Size("8 KB", (1, 1024), 256, records=40_960, slow=8_192, loaded=131_072),
    Size("64 KB", (8, 1024), 256, records=8_192, slow=4_096, loaded=32_768),
    Size("512 KB", (8, 8192), 1024, records=1_024, slow=1_024, loaded=4_096),
)
_SMOKE = (Size("8 KB", (1, 1024), 256, records=192, slow=128, loaded=192),)

_MAIN_LOADERS = ("guide", "training_batches")
_ALL_LOADERS = (
    "guide",
    "getitems",
    "training_batches",
    "raw shuffled",
    "iter_records",
    "raw in order",
)
_MAIN_EXPORTS = ("guide", "signal_batch x2", "limit loop x2")
_ALL_EXPORTS = (
    "guide",
    "pandas lists",
    "signal_batch x1",
    "limit loop x1",
    "signal_batch x2",
    "limit loop x2",
    "Ray Data",
    "HF datasets",
)
_STATISTICS = ("limit loop x1", "signal_batch x1", "limit loop x2", "signal_batch x2")

MODES = {
    mode.name: mode
    for mode in (
        Mode(
            "small",
            _SMALL,
            rounds=5,
            loaders=_MAIN_LOADERS,
            exports={"power_spectrum": _MAIN_EXPORTS},
            growth=(),
            planning=(100_000_000, 10_000),
            training=("jax", "sklearn"),
        ),
        Mode(
            "full",
            _FULL,
            rounds=5,
            loaders=_ALL_LOADERS,
            exports={"power_spectrum": _ALL_EXPORTS, "statistics": _STATISTICS},
            growth=(400, 4_000, 40_000),
            planning=(100_000_000, 10_000),
            shuffle=(16_384, 128),
            training=("jax", "sklearn"),
            orchestration=(8, 64, 256),
        ),
        Mode(
            "smoke",
            _SMOKE,
            rounds=1,
            loaders=_MAIN_LOADERS,
            exports={"power_spectrum": ("limit loop x1", "signal_batch x1")},
            growth=(),
            planning=(1_000_000, 100),
            training=("sklearn",),
            steps=6,
        ),
    )
}
