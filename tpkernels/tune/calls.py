"""Products that can be timed: what tuning asks of each kind, and the plain one.

The others: :mod:`.grouped`, :mod:`.scaled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tpkernels.ops import _gemm, _plans
from tpkernels.ops._paths import Choice
from tpkernels.tune import case as cases
from tpkernels.tune import timer
from tpkernels.tune.case import Case

Operands = Sequence[Tensor | None]
Run = Callable[[Choice, Operands], object]


class AnyCase(Protocol):
    """What one product is to tuning: two calls with the same key get the same plan."""

    @property
    def key(self) -> str:
        """The name in the cache."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to time."""

    @property
    def product(self) -> _plans.Product:
        """As plans are asked for."""

    def machine(self, device: torch.device) -> _plans.Machine:
        """The kernel that takes it on a device."""


class AnyCall(Protocol):
    """A product that can be run."""

    @property
    def device(self) -> torch.device:
        """Of its operands."""

    def case(self, device: str = "") -> AnyCase:
        """``device``: that tensors on "meta" stand for."""

    def name(self) -> tuple[object, ...]:
        """All that the case is made from, cheaper than the case."""

    def operands(self) -> Operands:
        """Tensors that timing takes copies of, in turn."""

    def runner(self) -> Run:
        """Runs the product by a choice, with operands as :meth:`operands` lists them. Writes to no tensor of the
        caller's."""


class Call(NamedTuple):
    """A plain product. ``into``: the tensor that it is added to, which timing leaves alone."""

    a: Tensor
    b: Tensor
    epilogue: _gemm.Epilogue
    out_dtype: torch.dtype
    want_preact: bool = False
    into: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.a.device

    def case(self, device: str = "") -> Case:
        return cases.of(
            self.a,
            self.b,
            self.epilogue,
            self.out_dtype,
            want_preact=self.want_preact,
            into=self.into is not None,
            device=device,
        )

    def name(self) -> tuple[object, ...]:
        a, b, e, into = self.a, self.b, self.epilogue, self.into
        facts: list[object] = [a.device, a.dtype, self.out_dtype, a.shape, a.stride(), b.shape, b.stride()]
        facts += [e.bias is None, e.residual is None, e.alpha == 1.0, e.activation == "none"]
        facts += [self.want_preact, into is None, None if e.gate is None else e.gate.stride()]
        return (*facts, *surroundings(a, b, e.gate))

    def operands(self) -> Operands:
        e = self.epilogue
        return [self.a, self.b, e.gate, e.bias, e.residual]

    def runner(self) -> Run:
        into = None if self.into is None else timer.copy_alike(self.into)

        def run(choice: Choice, operands: Operands) -> object:
            a, b, gate, bias, residual = operands
            assert a is not None and b is not None
            if into is not None:
                return _gemm.accumulate(choice, a, b, into)
            e = self.epilogue._replace(gate=gate, bias=bias, residual=residual)
            return _gemm.run(choice, a, b, e, out_dtype=self.out_dtype, want_preact=self.want_preact)

        return run


def surroundings(*factors: Tensor | None) -> tuple[object, ...]:
    """What a name has beside shapes and strides: TF32 is a switch of the process, which takes other kernels with other
    tiles; TMA wants addresses at multiples of 16 bytes; threads of the CPU."""
    first = factors[0]
    assert first is not None
    if not first.is_cuda:
        return _plans.may_use_tf32(first.dtype), torch.get_num_threads()
    return _plans.may_use_tf32(first.dtype), *(x.data_ptr() % 16 for x in factors if x is not None)
