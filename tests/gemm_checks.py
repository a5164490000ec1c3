"""What tests of streamk_gemm share, on any device: operands in any layout, outputs that show every mistake, references.

Small integers are multiplied wherever that will do: their sums are exact in fp32 in every order, so that a result must
be right to the bit, whatever K is, and one lost or doubled product shows. Inputs lie inside buffers full of NaN, so a
read beside a matrix shows; outputs start as NaN inside canaries, so an element that is left out, or a write beside the
output, shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

import tpkernels  # noqa: F401  (loads the ops)
from tpkernels.testing import Canary, assert_close_tiles, canary_view

Tensor = torch.Tensor

OUT_LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"offset": 16},  # and a pad, see output()
    "rows_odd": {"pad": 7, "offset": 1},
    "cols": {"order": [0, 2, 1], "pad": 8, "offset": 16},
    "cols_odd": {"order": [0, 2, 1], "pad": 5, "offset": 1},
    "strided": {"pad": 5, "offset": 3, "step": 2},
    "batch_inside": {"order": [1, 0, 2], "pad": 8, "offset": 8},
}


def embed(values: Tensor, layout: str) -> Tensor:
    """The same values [batch, rows, cols] in another layout, surrounded by NaN.

    rows, cols: which dimension is contiguous, fit for 16-byte loads. _odd: odd pitch and offset; strided: none is
    contiguous.
    """
    batch, rows, cols = values.shape
    by_rows = layout.startswith(("rows", "strided"))
    fast, slow = (cols, rows) if by_rows else (rows, cols)
    step = 3 if layout == "strided" else 1
    if layout in ("rows", "cols"):
        pitch, offset = (fast + 7) // 8 * 8 + 8, 16
    else:
        pitch, offset = step * fast + 1 - fast % 2 + 2, 1
    size = offset + batch * slow * pitch + 64
    buffer = torch.full((size,), math.nan, dtype=values.dtype, device=values.device)
    strides = (slow * pitch, pitch, step) if by_rows else (slow * pitch, step, pitch)
    view = buffer.as_strided((batch, rows, cols), strides, offset)
    view.copy_(values)
    return view


def output(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str = "rows", device: torch.device | str = "cuda"
) -> Canary:
    """A NaN-filled output inside a canary."""
    options = {"pad": 8 - shape[-1] % 8} | OUT_LAYOUTS[layout]
    return canary_view(shape, dtype, device, **options)


def randn(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, device=generator.device, generator=generator).to(dtype)


def integers(*shape: int, dtype: torch.dtype, generator: torch.Generator, most: int = 2) -> Tensor:
    """Integers from -most to most."""
    return torch.randint(-most, most + 1, shape, device=generator.device, generator=generator).to(dtype)


def activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return torch.where(x < 0, 0.0, x)  # keeps NaN
    if name == "silu":
        return torch.nn.functional.silu(x)
    if name == "gelu":
        return torch.nn.functional.gelu(x)
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    return x


def gemm(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
    """The op with names for its arguments. A tile whose CTAs take a whole one each has no other plan."""
    defaults = {"bias": None, "preact": None, "activation": "none", "accumulate": False}
    if options.get("tile", "").partition("/")[0].endswith(("s", "w")):
        options = {
            name: value for name, value in options.items() if name not in ("schedule", "workers", "splits")
        }
    torch.ops.tpkernels.streamk_gemm(a=a, b=b, out=out, **(defaults | options))


def differences(actual: Tensor, want: Tensor, tile: int = 128) -> str:
    """Nothing if all elements are equal, else how many are not, and where, for whoever has to find out why."""
    if actual.shape == want.shape and torch.equal(actual, want):
        return ""
    if actual.shape != want.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(want.shape)}"
    bad = (actual != want).nonzero()
    nans, rows, cols = int(actual.isnan().sum()), bad[:, -2], bad[:, -1]
    tiles = sorted({(int(r), int(c)) for r, c in (bad[:20_000, -2:] // tile).unique(dim=0)})
    samples = [
        f"{tuple(at)}: got {float(actual[tuple(at)])!r}, expected {float(want[tuple(at)])!r}"
        for at in (bad[0].tolist(), bad[len(bad) // 2].tolist(), bad[-1].tolist())
    ]
    return (
        f"{len(bad)} of {actual.numel()} elements differ ({nans} are NaN), "
        f"rows {int(rows.min())} to {int(rows.max())}, columns {int(cols.min())} to {int(cols.max())}, "
        f"{len(tiles)} blocks of {tile} x {tile}: {tiles[:8]}; " + "; ".join(samples)
    )


@dataclass
class Product:
    """Operands, what is done to their product, and what must come out."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None
    activation: str = "none"
    alpha: float = 1.0
    before: Tensor = field(init=False)  # the activation, float64
    value: Tensor = field(init=False)  # without the old output, float64

    def __post_init__(self) -> None:
        before = self.alpha * (self.a.double() @ self.b.double())
        if self.bias is not None:
            before = before + self.bias.double()
        self.before = before
        if self.gate is None:
            value = activate(before, self.activation)
        else:
            value = activate(self.alpha * (self.a.double() @ self.gate.double()), self.activation) * before
        self.value = value if self.residual is None else value + self.residual.double()

    def magnitude(self) -> Tensor:
        """Of what is summed up."""
        scale = max(1.0, abs(self.alpha))
        size = scale * (self.a.double().abs() @ self.b.double().abs())
        if self.bias is not None:
            size = size + self.bias.double().abs()
        if self.gate is not None:
            size = (size + 1) * (scale * (self.a.double().abs() @ self.gate.double().abs()) + 1)
        return size if self.residual is None else size + self.residual.double().abs()

    def run(
        self,
        out_dtype: torch.dtype,
        out_layout: str = "rows",
        *,
        old: Tensor | None = None,
        preact_layout: str = "",
        exact: bool = True,
        **plan: Any,
    ) -> Tensor:
        """Runs the op and compares everything that it may and may not write.

        old: what out holds already, to accumulate into. preact_layout: "" for none. exact: to the bit, for integers.
        """
        shape = tuple(self.value.shape)
        out = output(shape, out_dtype, out_layout, self.a.device)
        preact = output(shape, out_dtype, preact_layout, self.a.device) if preact_layout else None
        if old is not None:
            out.tensor.copy_(old)
        gemm(
            self.a,
            self.b,
            out.tensor,
            bias=self.bias,
            gate=self.gate,
            residual=self.residual,
            activation=self.activation,
            alpha=self.alpha,
            accumulate=old is not None,
            preact=None if preact is None else preact.tensor,
            **plan,
        )
        want = self.value if old is None else self.value + old.to(out_dtype).double()
        self._compare("out", out, want, old, exact)
        if preact is not None:
            self._compare("preact", preact, self.before, None, exact)
        return out.tensor

    def _compare(self, name: str, got: Canary, want: Tensor, old: Tensor | None, exact: bool) -> None:
        dtype = got.tensor.dtype
        if exact:
            different = differences(got.tensor, want.to(dtype))
            assert not different, f"{name}: {different}"
        else:
            size = self.magnitude() if old is None else self.magnitude() + old.double().abs()
            k = max(1, self.a.shape[-1]) * (
                1 if self.gate is None else 2
            )  # errors of two sums are multiplied
            assert_close_tiles(got.tensor, want, dtype, k=k, magnitude=size, slack=1.25, name=name)
        got.check(name)


class Failures:
    """Goes on after a case that fails, because GPU time is short, and reports them all.

    with Failures() as failures:
        for ...:
            with failures.case("what it is"):
                ...
    """

    MOST = 25

    def __init__(self) -> None:
        self.found: list[str] = []
        self.cases = 0

    @contextmanager
    def case(self, what: str) -> Iterator[None]:
        self.cases += 1
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            text = str(error) or type(error).__name__
            if "CUDA error" in text:  # nothing works from here on
                raise AssertionError(f"{what}: {text}") from error
            self.found.append(f"{what}: {text}")
            if len(self.found) >= self.MOST:
                self._report()

    def _report(self) -> None:
        if self.found:
            stopped = " (stopped here)" if len(self.found) >= self.MOST else ""
            found, self.found = self.found, []
            raise AssertionError(
                f"{len(found)} of {self.cases} cases failed{stopped}:\n" + "\n".join(found)
            ) from None

    def __enter__(self) -> Failures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._report()
