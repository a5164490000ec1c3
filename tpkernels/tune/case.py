"""What one product is to tuning: two calls with the same case get the same plan."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.ops import _gemm, _plans

_UNIT = 16  # bytes: where TMA wants rows to begin


class Case(NamedTuple):
    """A local product.

    Attributes:
        size: batch, M, N, K. Leading dimensions of ``a`` belong to M where ``b`` is one matrix.
        dtype, out_dtype: of the operands, and of the result.
        a, b: "k" where K is contiguous, "o" where the other dimension is, "x" where neither; with "!" where the Hopper
            kernel's loads cannot take it.
        epilogue: what follows, such as "bias+activation"; empty where nothing but rounding does. "gate!": the gate does
            not lie as b does.
        workers: threads of the CPU; 0 on a GPU, whose multiprocessors belong to the machine.
    """

    size: tuple[int, int, int, int]
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: str
    b: str
    epilogue: str
    workers: int = 0

    @property
    def key(self) -> str:
        """The name in the cache."""
        tf32 = not self.workers and _plans.may_use_tf32(self.dtype)  # other kernels, of the library too
        dtypes = f"{'tf32' if tf32 else _short(self.dtype)}>{_short(self.out_dtype)}"
        size = "x".join(map(str, self.size))
        threads = f" threads={self.workers}" if self.workers else ""
        return f"matmul {size} {dtypes} {self.a}{self.b} {self.epilogue or 'plain'}{threads}"

    def machine(self, device: torch.device) -> _plans.Machine:
        """The kernel that takes it on a device."""
        found = _plans.machine_of(device.type, device, self._dtype_name)
        loads = not set("!x") & set(f"{self.a}{self.b}{'!' if 'gate!' in self.epilogue else ''}")
        return (
            found if loads or found.architecture != "sm90" else found._replace(architecture="sm90-portable")
        )

    @property
    def product(self) -> _plans.Product:
        """As plans are asked for."""
        follows = {name.rstrip("!") for name in self.epilogue.split("+")} - {"", "alpha"}
        whole = "gate" in follows and "preact" not in follows  # in one call
        sums = {"into"} if self.out_dtype == torch.float32 else set()  # made where they are stored
        outer = self.a[0] == "o" and self.b[0] == "o"
        return _plans.Product(*self.size, whole, bool(follows - sums), outer, dtype=self._dtype_name)

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.") if self.workers else _plans.dtype_name(self.dtype)


def of(
    a: Tensor,
    b: Tensor,
    e: _gemm.Epilogue,
    out_dtype: torch.dtype,
    *,
    want_preact: bool,
    into: bool = False,
    device: str = "",
) -> Case:
    """The case of a call. ``into``: the product is added to a tensor. ``device``: that tensors on "meta" stand for."""
    on_cpu = (device or a.device.type) == "cpu"
    lies_b = _lies(b, -2, -1, on_cpu)
    alike = e.gate is None or _lies(e.gate, -2, -1, on_cpu) == lies_b
    *batch, m, n = _gemm.output_shape(a, b)
    if b.dim() == 2:
        batch, m = [], math.prod([*batch, m])
    follows = {
        "gate" if alike else "gate!": e.gate is not None,
        "bias": e.bias is not None,
        "residual": e.residual is not None,
        "alpha": e.alpha != 1.0,
        "activation": e.activation != "none",
        "preact": want_preact,
        "into": into,
    }
    return Case(
        (math.prod(batch), m, n, a.shape[-1]),
        a.dtype,
        out_dtype,
        _lies(a, -1, -2, on_cpu),
        lies_b,
        "+".join(name for name, there in follows.items() if there),
        threads() if on_cpu else 0,
    )


def threads() -> int:
    """Threads of a product on the CPU, as its kernel counts them."""
    size = 1 << 20, 1 << 20, 1
    _, numbers, _ = torch.ops.tpkernels.streamk_plan(1, *size, "cpu", "data_parallel", 0, 1, 0, "")
    return int(numbers[5])


def _lies(x: Tensor, k: int, other: int, on_cpu: bool) -> str:
    def along(dim: int, rest: int) -> bool:
        return x.shape[dim] <= 1 or (x.stride(dim) == 1 and (x.shape[rest] <= 1 or x.stride(rest) != 1))

    inner = k if along(k, other) else other if along(other, k) else None
    if inner is None:
        return "x"
    letter = "k" if inner == k else "o"
    if on_cpu or x.element_size() != 2:
        return letter
    steps = [x.stride(d) for d in range(x.dim()) if d != inner % x.dim() and x.shape[d] > 1]
    units = all(step * x.element_size() % _UNIT == 0 for step in steps)
    address = 0 if x.device.type == "meta" else x.data_ptr()
    return letter if units and address % _UNIT == 0 else f"{letter}!"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
