"""Sizes, run options, tolerances: every number that a run depends on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .dense import ModelConfig
from .errors import DemoError

__all__ = [
    "DTYPES",
    "SIZES",
    "RunConfig",
    "Size",
    "Tolerance",
    "check_divisible",
    "fitting_ranks",
    "model_config",
    "tolerance",
]


@dataclasses.dataclass(frozen=True)
class Size:
    """A named model and the batch that suits it. ``lr`` is the peak learning rate.

    ``window``: for how many steps two runs that differ by rounding stay comparable, see the tolerances below.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    batch: int
    seq: int
    steps: int
    lr: float
    window: int = 250


# "tiny" divides by 1, 2, 3 and 6 ranks, the others by powers of two up to their kv heads. "small" is the default
# without GPUs (under a minute on two cores), "medium" the default with them.
SIZES = {
    "tiny": Size(width=96, layers=2, heads=6, kv_heads=6, ffn=288, batch=4, seq=64, steps=200, lr=2e-3),
    "small": Size(width=128, layers=2, heads=4, kv_heads=4, ffn=384, batch=8, seq=64, steps=250, lr=2e-3),
    "medium": Size(
        width=512, layers=6, heads=16, kv_heads=8, ffn=1536, batch=16, seq=256, steps=300, lr=1e-3, window=100
    ),
    "large": Size(
        width=1024,
        layers=12,
        heads=16,
        kv_heads=8,
        ffn=2816,
        batch=16,
        seq=512,
        steps=400,
        lr=6e-4,
        window=100,
    ),
    "xlarge": Size(
        width=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn=5632,
        batch=16,
        seq=1024,
        steps=500,
        lr=3e-4,
        window=100,
    ),
}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What the sharded and the unsharded run may differ by.

    ``loss``: absolute, in nats per byte, at any step. ``grad``: per parameter, |difference| / |gradient| (Frobenius) at
    the first step, where both models still hold the same weights. ``weight``: the same for weights at the end of the
    run and of every ``window`` steps; after a window the twin goes on from the sharded weights and moments.
    """

    loss: float
    grad: float
    weight: float
    window: int


# Why differences exist at all, and why these bounds. Sharding changes only the order of sums: a row-parallel
# product adds `tp` partial sums, each rounded once to the model's dtype. Gradients of the first step therefore
# differ by a few units of eps (2^-53, 2^-24, 2^-8, 2^-11) times the square root of the number of roundings on the
# way through the layers: some tens of eps in all. Bounds lie a factor of ten or more above the largest values seen.
# A sum over the ranks that is missing or made twice changes some gradient of the first step by half of it or more.
#
# Training then multiplies differences: it is a chaotic map where the learning rate is high. Measured (tiny, peak rate
# 4e-3, after warm-up): a factor of ten every 25 steps, in float64 (1e-15 at step 100, 3e-10 at 250) as in float32
# (1e-6, then 5e-2), so it is the training and not the arithmetic. Hence the windows: two right programs can be
# compared only over a limited time, which is shorter the coarser the dtype and the larger the model (medium, float32
# on two H100s: 2e-7 at step 51, 1e-5 at 101, 2e-4 at 161). The sizes' rates are chosen below that regime.
_TOLERANCES = {
    "float64": Tolerance(loss=1e-10, grad=1e-12, weight=1e-9, window=250),
    "float32": Tolerance(loss=2e-4, grad=1e-5, weight=1e-3, window=250),
    "bfloat16": Tolerance(loss=1e-1, grad=1e-1, weight=1e-1, window=50),
    "float16": Tolerance(loss=1e-2, grad=2e-2, weight=5e-2, window=50),
}
DTYPES = tuple(_TOLERANCES)
# In FP8 the twin, which has none, goes its own way to the end: what differs is what FP8 does to training. Measured over
# the 200 steps of "tiny" on two CPU ranks, every recipe, in float32 and bfloat16: loss 0.022 to 0.047, the first
# gradients 0.22 to 0.24 (of attention's q and k, small and behind most products), weights at the end 0.05 to 0.06.
_FP8_TOLERANCE = Tolerance(loss=0.15, grad=0.4, weight=0.2, window=1 << 30)


def tolerance(dtype: str, size: str = "small", fp8: str | None = None) -> Tolerance:
    """The bounds for a dtype and a size by name, and a recipe if there is one; the reasons stand beside the table."""
    bounds = _TOLERANCES[dtype] if fp8 is None else _FP8_TOLERANCE
    return bounds if fp8 else dataclasses.replace(bounds, window=min(bounds.window, SIZES[size].window))


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All options of a run, defaults filled in. ``device`` is "cpu" or "cuda"; sizes in bytes of text (tokens)."""

    size: str
    tp: int
    steps: int
    batch: int
    seq: int
    lr: float
    dtype: str
    device: str
    seed: int
    out: Path
    path: str = "auto"
    fp8: str | None = None
    compile: bool = False
    dense: bool = True
    sequence_parallel: bool = True
    weight_decay: float = 0.1
    max_norm: float = 1.0
    heldout_batches: int = 8
    sample_bytes: int = 120

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return max(1, min(20, self.steps // 10))


def model_config(config: RunConfig) -> ModelConfig:
    """The model's shape for a run."""
    size = SIZES[config.size]
    return ModelConfig(
        width=size.width,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        ffn=size.ffn,
        dtype=config.dtype,
        max_seq=config.seq,
    )


def fitting_ranks(size_name: str) -> list[int]:
    """The numbers of ranks that share this size's heads and kv heads evenly, ascending."""
    size = SIZES[size_name]
    return [n for n in range(1, size.kv_heads + 1) if size.heads % n == 0 and size.kv_heads % n == 0]


def check_divisible(size_name: str, tp: int) -> None:
    """Raises DemoError unless every rank gets the same number of heads and kv heads."""
    size = SIZES[size_name]
    for what, count in (("attention heads", size.heads), ("kv heads", size.kv_heads)):
        if count % tp:
            fits = ", ".join(str(n) for n in fitting_ranks(size_name))
            raise DemoError(
                f"--size {size_name} has {count} {what}, which {tp} ranks cannot share evenly; "
                f"use --tp {fits}, or another --size."
            )
