"""Attention by heads, MLP and a transformer block on a grid, with the parameters' names of
``ParallelTransformerBlock``.

    h = x + attention(attention_norm(x));  y = h + mlp(mlp_norm(h))

x is [batch, sequence, hidden]: the grid cuts the batch and the hidden features, so that every rank has whole
sequences of some heads, and the attention core is its own. Inner features lie as the heads do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpkernels.errors import ArgumentError, ShapeError
from tpkernels.grids.layout import Layout
from tpkernels.grids.redistribute import would_fit
from tpkernels.nn.grids.linear import GridLinear, shared_input
from tpkernels.nn.grids.norm import LayerNorm, RMSNorm
from tpkernels.nn.grids.strategy import GridStrategy, check_residual
from tpkernels.nn.rotary import apply_rotary, rotary_tables

__all__ = ["MLP", "Attention", "TransformerBlock"]

_NORMS = {"rms": RMSNorm, "layer": LayerNorm}
_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Attention(nn.Module):
    """Self-attention: q_proj, k_proj and v_proj to heads, o_proj back.

    Args:
        hidden: features of x.
        heads, kv_heads: of the whole layer; the grid must cut both in equal parts. kv_heads None: as many as heads.
        on: the method and its grid.
        causal, rotary_base: as in ``ParallelAttention``.
        bias: of all four.
        options: ``seed``, ``init_std``, ``name``, ``dtype``, ``device``, ``path``, ``gradient_accumulation_fusion``.
    Shape:
        x: [batch here, sequence, hidden here] -> the same.
    Raises:
        ArgumentError: heads that the grid does not cut, or that hidden is no multiple of.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        on: GridStrategy,
        causal: bool = True,
        rotary_base: float | None = 10000.0,
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        for argument, count in (("heads", heads), ("kv_heads", kv_heads)):
            if count < 1 or count % on.cuts.n:
                raise ArgumentError(
                    f"{argument}: a grid of {on.grid.grid} ranks cuts the heads in {on.cuts.n} equal parts, but "
                    f"they are {count}; {would_fit(count, on.cuts.n)} would fit."
                )
        if hidden % heads or heads % kv_heads:
            raise ArgumentError(
                f"heads: hidden must be a multiple of them, and they of kv_heads, but hidden is {hidden}, "
                f"heads {heads} and kv_heads {kv_heads}."
            )
        self.head_dim, self.causal, self.rotary_base = hidden // heads, causal, rotary_base
        if rotary_base is not None and self.head_dim % 2:
            raise ArgumentError(
                f"rotary_base: rotary positions turn pairs of elements, but head_dim is {self.head_dim}; pass None."
            )

        def made(key: str, features: int) -> GridLinear:
            return on.into(hidden, features, bias=bias, **_named(options, key))

        self.q_proj = made("q_proj", hidden)
        self.k_proj = made("k_proj", kv_heads * self.head_dim)
        self.v_proj = made("v_proj", kv_heads * self.head_dim)
        self.o_proj = on.back(hidden, hidden, bias=bias, **_named(options, "o_proj"))

    @property
    def input_layout(self) -> Layout:
        """Of x."""
        return self.q_proj.input_layout

    @property
    def output_layout(self) -> Layout:
        """Of the output."""
        return self.o_proj.output_layout

    def forward(self, x: Tensor) -> Tensor:
        """[batch here, sequence, hidden here] -> the same."""
        if x.dim() != 3:
            raise ShapeError(
                f"x: attention takes three dimensions, [batch, sequence, hidden], but the shape is {list(x.shape)}."
            )
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in shared_input((self.q_proj, self.k_proj, self.v_proj), x)
        )
        if self.rotary_base is not None:
            tables = rotary_tables(x.shape[1], self.head_dim, base=self.rotary_base, device=x.device)
            q, k = apply_rotary(q, *tables), apply_rotary(k, *tables)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """up_proj (and gate_proj), activation, down_proj.

    Args:
        hidden, intermediate: features of x and between the products.
        on: the method and its grid.
        activation: "swiglu", "gelu" (erf), "gelu_tanh", "relu" or "silu".
        bias: of all layers. options: as in ``Attention``.
    Shape:
        x: [rows here, ..., hidden here] -> the same.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        on: GridStrategy,
        activation: str = "swiglu",
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if activation != "swiglu" and activation not in _ACTIVATIONS:
            known = ", ".join(map(repr, ("swiglu", *_ACTIVATIONS)))
            raise ArgumentError(f"activation: it must be one of {known}, but it is {activation!r}.")
        self.activation = activation
        if activation == "swiglu":
            self.gate_proj = on.into(hidden, intermediate, bias=bias, **_named(options, "gate_proj"))
        self.up_proj = on.into(hidden, intermediate, bias=bias, **_named(options, "up_proj"))
        self.down_proj = on.back(intermediate, hidden, bias=bias, **_named(options, "down_proj"))

    @property
    def input_layout(self) -> Layout:
        """Of x."""
        return self.up_proj.input_layout

    @property
    def output_layout(self) -> Layout:
        """Of the output."""
        return self.down_proj.output_layout

    def forward(self, x: Tensor) -> Tensor:
        """[rows here, ..., hidden here] -> the same."""
        if self.activation == "swiglu":
            gate, up = shared_input((self.gate_proj, self.up_proj), x)
            inner = F.silu(gate) * up
        else:
            inner = _ACTIVATIONS[self.activation](self.up_proj(x))
        out: Tensor = self.down_proj(inner)
        return out


class TransformerBlock(nn.Module):
    """attention_norm, attention, mlp_norm, mlp.

    Args:
        hidden, intermediate, heads, kv_heads, on, causal, rotary_base, activation, bias, options: those of
            ``Attention`` and ``MLP``.
        norm: "rms" or "layer"; ``eps`` of both.
    Shape:
        x: [batch here, sequence, hidden here] -> the same.
    Raises:
        ArgumentError: sizes that the grid does not cut evenly, and what would fit; an unknown norm or activation.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        on: GridStrategy,
        norm: str = "rms",
        eps: float = 1e-5,
        causal: bool = True,
        rotary_base: float | None = 10000.0,
        activation: str = "swiglu",
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise ArgumentError(
                f"norm: it must be one of {', '.join(map(repr, _NORMS))}, but it is {norm!r}."
            )
        kinds: dict[str, torch.dtype | torch.device | str | None] = {
            key: options.get(key) for key in ("dtype", "device")
        }

        def normalised() -> nn.Module:
            return _NORMS[norm](hidden, layout=on.layout, grid=on.grid, eps=eps, **kinds)  # type: ignore[arg-type]

        self.attention_norm = normalised()
        self.attention = Attention(
            hidden,
            heads,
            kv_heads,
            on=on,
            causal=causal,
            rotary_base=rotary_base,
            bias=bias,
            **_named(options, "attention"),
        )
        self.mlp_norm = normalised()
        self.mlp = MLP(
            hidden, intermediate, on=on, activation=activation, bias=bias, **_named(options, "mlp")
        )
        for part in (self.attention, self.mlp):
            check_residual(part.input_layout, part.output_layout, type(self).__name__)

    @property
    def input_layout(self) -> Layout:
        """Of x."""
        return self.attention.input_layout

    @property
    def output_layout(self) -> Layout:
        """Of y, the same."""
        return self.mlp.output_layout

    def forward(self, x: Tensor) -> Tensor:
        """[batch here, sequence, hidden here] -> the same."""
        h = x + self.attention(self.attention_norm(x))
        y: Tensor = h + self.mlp(self.mlp_norm(h))
        return y


def _named(options: dict[str, Any], key: str) -> dict[str, Any]:
    """The options, with ``key`` added to the name."""
    name = options.get("name", "")
    return {**options, "name": f"{name}.{key}" if name else key}
