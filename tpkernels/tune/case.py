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
        size = "x".join(map(str, self.size))
        lies = self.a + self.b
        return key_of(f"matmul {size}", self.dtype, self.out_dtype, lies, self.epilogue, self.workers)

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    def machine(self, device: torch.device) -> _plans.Machine:
        """The kernel that takes it on a device."""
        return machine_of(device, dtype_name(self.dtype, self.workers), self.a + self.b, self.epilogue)

    @property
    def product(self) -> _plans.Product:
        """As plans are asked for."""
        outer = self.a[0] == "o" and self.b[0] == "o"
        name = dtype_name(self.dtype, self.workers)
        return _plans.Product(*self.size, *follows(self.epilogue, self.out_dtype), outer, dtype=name)


def key_of(
    product: str, dtype: torch.dtype, out_dtype: torch.dtype, lies: str, epilogue: str, workers: int
) -> str:
    """``product``: what it is and its size. ``lies``: both operands'."""
    tf32 = not workers and _plans.may_use_tf32(dtype)  # other kernels, of the library too
    dtypes = f"{'tf32' if tf32 else _short(dtype)}>{_short(out_dtype)}"
    threads = f" threads={workers}" if workers else ""
    return f"{product} {dtypes} {lies} {epilogue or 'plain'}{threads}"


def machine_of(device: torch.device, dtype: str, lies: str, epilogue: str) -> _plans.Machine:
    """The kernel that takes operands of such a dtype, which lie so, on a device."""
    found = _plans.machine_of(device.type, device, dtype)
    loads = not set("!x") & set(lies) and "gate!" not in epilogue
    return found if loads or found.architecture != "sm90" else found._replace(architecture="sm90-portable")


def follows(epilogue: str, out_dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether a product is gated in one call, and whether more than rounding follows it."""
    names = {name.rstrip("!") for name in epilogue.split("+")} - {"", "alpha"}
    sums = {"into"} if out_dtype == torch.float32 else set()  # made where they are stored
    return "gate" in names and "preact" not in names, bool(names - sums)


def dtype_name(dtype: torch.dtype, workers: int) -> str:
    """What plans call it; on the CPU (``workers`` above 0) there is no TF32."""
    return _short(dtype) if workers else _plans.dtype_name(dtype)


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
    lies_b = lies(b, -2, -1, on_cpu)
    alike = e.gate is None or lies(e.gate, -2, -1, on_cpu) == lies_b
    *batch, m, n = _gemm.output_shape(a, b)
    if b.dim() == 2:
        batch, m = [], math.prod([*batch, m])
    names = {
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
        lies(a, -1, -2, on_cpu),
        lies_b,
        "+".join(name for name, there in names.items() if there),
        threads() if on_cpu else 0,
    )


def threads() -> int:
    """Threads of a product on the CPU, as its kernel counts them."""
    size = 1 << 20, 1 << 20, 1
    _, numbers, _ = torch.ops.tpkernels.streamk_plan(1, *size, "cpu", "data_parallel", 0, 1, 0, "")
    return int(numbers[5])


def lies(x: Tensor, k: int, other: int, on_cpu: bool) -> str:
    """Which of the dimensions ``k`` and ``other`` is contiguous: as ``a`` and ``b`` of :class:`Case`."""

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
