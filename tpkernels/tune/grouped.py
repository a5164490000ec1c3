"""Grouped products, as tuning sees them.

Sizes of groups change from call to call. A plan is a tile, a schedule and a number of cuts, which fit any sizes; so
calls whose rows in all, and whose groups that have rows, differ by less than an eighth are one case, and take what was
fastest for the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.ops import _gemm, _grouped, _plans
from tpkernels.ops._paths import Choice
from tpkernels.tune import case as cases
from tpkernels.tune.calls import Operands, Run, surroundings


class GroupedCase(NamedTuple):
    """Attributes: as :class:`tpkernels.tune.case.Case`; ``sizes`` in place of M and the batch."""

    sizes: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: str
    b: str
    epilogue: str
    workers: int = 0

    @property
    def key(self) -> str:
        used = near(sum(size > 0 for size in self.sizes))
        return cases.key_of(
            f"grouped {used} of {near(sum(self.sizes))}x{self.n}x{self.k}",
            self.dtype,
            self.out_dtype,
            self.a + self.b,
            self.epilogue,
            self.workers,
        )

    @property
    def is_empty(self) -> bool:
        return 0 in (sum(self.sizes), self.n, self.k)

    def machine(self, device: torch.device) -> _plans.Machine:
        name = cases.dtype_name(self.dtype, self.workers)
        return cases.machine_of(device, name, self.a + self.b, self.epilogue)

    @property
    def product(self) -> _plans.Product:
        name = cases.dtype_name(self.dtype, self.workers)
        gated, finishes = cases.follows(self.epilogue, self.out_dtype)
        outer = self.a[0] == "o" and self.b[0] == "o"
        return _plans.Product(
            1, sum(self.sizes), self.n, self.k, gated, finishes, outer, group_sizes=self.sizes, dtype=name
        )


def near(count: int) -> int:
    """``count`` rounded up to four binary digits, less than an eighth more.

    >>> [near(n) for n in (7, 16, 17, 100, 4096, 4097)]
    [7, 16, 18, 104, 4096, 4608]
    """
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit


class GroupedCall(NamedTuple):
    """``sizes[g]`` rows of ``a`` by ``b[g]``."""

    a: Tensor
    b: Tensor
    epilogue: _gemm.Epilogue
    sizes: Sequence[int]
    out_dtype: torch.dtype
    want_preact: bool = False

    @property
    def device(self) -> torch.device:
        return self.a.device

    def case(self, device: str = "") -> GroupedCase:
        on_cpu = (device or self.a.device.type) == "cpu"
        e = self.epilogue
        b = cases.lies(self.b, -2, -1, on_cpu)
        alike = e.gate is None or cases.lies(e.gate, -2, -1, on_cpu) == b
        a = cases.lies(self.a, -1, -2, on_cpu)
        begins = (rows.start for _, rows in _grouped.spans(self.sizes))
        if a == "o" and not on_cpu and any(begin % 8 for begin in begins):
            a = "o!"  # TMA's boxes begin at multiples of 16 bytes
        names = {
            "gate" if alike else "gate!": e.gate is not None,
            "bias": e.bias is not None,
            "activation": e.activation != "none",
            "preact": self.want_preact,
        }
        epilogue = "+".join(name for name, there in names.items() if there)
        workers = cases.threads() if on_cpu else 0
        sizes = tuple(int(size) for size in self.sizes)
        n, k = self.b.shape[2], self.b.shape[1]
        return GroupedCase(sizes, n, k, self.a.dtype, self.out_dtype, a, b, epilogue, workers)

    def name(self) -> tuple[object, ...]:
        a, b, e = self.a, self.b, self.epilogue
        used = near(sum(size > 0 for size in self.sizes))
        facts: list[object] = ["grouped", a.device, a.dtype, self.out_dtype, near(a.shape[0]), used]
        facts += [a.stride(), b.shape, b.stride(), e.bias is None, e.activation == "none", self.want_preact]
        facts += [None if e.gate is None else e.gate.stride()]
        if a.stride(0) == 1:  # M contiguous: where groups begin matters
            facts.append(all(rows.start % 8 == 0 for _, rows in _grouped.spans(self.sizes)))
        return (*facts, *surroundings(a, b, e.gate))

    def operands(self) -> Operands:
        return [self.a, self.b, self.epilogue.gate, self.epilogue.bias]

    def runner(self) -> Run:
        def run(choice: Choice, operands: Operands) -> object:
            a, b, gate, bias = operands
            assert a is not None and b is not None
            e = self.epilogue._replace(gate=gate, bias=bias)
            return _grouped.run(choice, a, b, e, self.sizes, self.out_dtype, self.want_preact)

        return run
