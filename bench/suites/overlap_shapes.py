"""Shapes of the overlap suite: which operation, at which sizes on which rank. Pure; imports no torch.

``m`` counts rows over all ranks; ``n`` and ``k`` are those of one rank's product. An all-gather + GEMM gathers [m, k]
from [m / world, k] and multiplies by [k, n]; a GEMM + reduce-scatter multiplies [m, k] by [k, n] and leaves
[m / world, n]; a GEMM + all-reduce leaves [m, n].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import BenchError, check_known
from ..models import MODELS
from ..suite import Options

__all__ = ["AG", "AR", "OPS", "RS", "SETS", "Shape", "misfit", "shapes"]

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = {"AG": AG, "RS": RS, "AR": AR}
SETS = {
    "measured": "one rank's products of several models as in earlier measurements, the same for every world",
    "models": "every projection of --model (default: all), M from 16 to 32768 (--rows)",
}

_MODEL_ROWS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
_DECODE_ROWS = (16, 64, 256)

# Name, n and k of an all-gather + GEMM on one rank, values of m. The second halves of the layers (reduce-scatter,
# all-reduce) have n and k exchanged.
_MEASURED = (
    ("gpt3", 6144, 12288, (8192, 2048, 1024)),
    ("llama70b", 3584, 8192, (8192, 2048)),
    ("llama8b", 1792, 4096, (8192,)),
    ("llama70b qkv", 1280, 8192, (8192,)),
)


@dataclass(frozen=True)
class Shape:
    """One operation (short name: AG, RS, AR) at one size; ``label`` tells it from others of the same ``m``."""

    short: str
    label: str
    m: int
    n: int
    k: int
    shape_set: str

    @property
    def name(self) -> str:
        """Unique within the suite for a world."""
        return f"{self.short} {self.label} M{self.m}"


def misfit(shape: Shape, world: int) -> str:
    """Why a shape cannot be measured over ``world`` ranks; empty if it can.

    The collectives that the baseline calls take shards of equal size, so the rows that are gathered or scattered must
    divide by the number of ranks.
    """
    if shape.short != "AR" and shape.m % world != 0:
        return f"{shape.name}: {shape.m} rows do not divide among {world} ranks"
    return ""


def shapes(options: Options) -> list[Shape]:
    """The shapes asked for, without those that do not fit the world.

    Raises:
        BenchError: unknown set, model or operation, rows below 1, or nothing left.
    """
    for name in options.sets:
        check_known("--set", name, SETS)
    for name in options.models:
        check_known("--model", name, MODELS)
    for name in options.ops:
        check_known("--op", name, [*OPS, *OPS.values()])
    for m in options.rows:
        if m < 1:
            raise BenchError(f"--rows: expected numbers from 1 up, got {m}.")
    wanted = {op for op in OPS if not options.ops or op in options.ops or OPS[op] in options.ops}
    if options.small:
        found = list(_small(options))
    else:
        named = options.models or options.rows  # the measured set has few of either
        sets = options.sets or (("models",) if named else ("measured",))
        found = [shape for name in sets for shape in _SOURCES[name](options)]
    found = [shape for shape in dict.fromkeys(found) if shape.short in wanted]
    fitting = [shape for shape in found if not misfit(shape, options.world)]
    if not fitting:
        reasons = [misfit(shape, options.world) for shape in found]
        why = f" For example, {reasons[0]}." if reasons else ""
        raise BenchError(f"overlap: no shape is left of what --set, --model, --rows and --op select.{why}")
    return fitting


def _small(options: Options) -> Iterator[Shape]:
    """For trying the suite: sizes that are no multiples of any tile."""
    for m in options.rows or (16 * options.world,):
        yield Shape("AG", "small", m, 72, 40, "small")
        yield Shape("RS", "small", m, 72, 40, "small")
        yield Shape("AR", "small", m, 72, 40, "small")
    if not options.rows:
        yield Shape("AR", "small", 5, 72, 40, "small")


def _measured(options: Options) -> Iterator[Shape]:
    for label, n, k, rows in _MEASURED:
        if options.models and label.split()[0] not in options.models:
            continue
        base = Shape("AG", label, 0, n, k, "measured")
        yield from _at(base, _keep(rows, options.rows))
        base = replace(base, short="RS", n=k, k=n)
        yield from _at(base, _keep(rows, options.rows))
        yield from _at(replace(base, short="AR"), _keep((*rows, *_DECODE_ROWS), options.rows))


def _models(options: Options) -> Iterator[Shape]:
    world = options.world
    for name in options.models or MODELS:
        model = MODELS[name]
        if any(size % world for size in (model.ffn, model.heads, model.kv_heads)):
            continue
        wide = model.heads * model.head_dim
        for short, label, n, k in (
            ("AG", "attn qkv", model.qkv // world, model.hidden),
            ("RS", "attn out", model.hidden, wide // world),
            ("AR", "attn out", model.hidden, wide // world),
            ("AG", "up", model.up // world, model.hidden),
            ("RS", "down", model.hidden, model.ffn // world),
            ("AR", "down", model.hidden, model.ffn // world),
        ):
            yield from _at(Shape(short, f"{name} {label}", 0, n, k, "models"), options.rows or _MODEL_ROWS)


_SOURCES = {"measured": _measured, "models": _models}


def _at(shape: Shape, rows: Iterable[int]) -> Iterator[Shape]:
    return (replace(shape, m=m) for m in rows)


def _keep(rows: Iterable[int], wanted: tuple[int, ...]) -> Iterator[int]:
    return (m for m in rows if not wanted or m in wanted)
