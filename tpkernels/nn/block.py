"""A transformer block, tensor parallel, in the styles of Llama and of GPT.

    h = x + attention(attention_norm(x));  y = h + mlp(mlp_norm(h))

    Llama   ParallelTransformerBlock(4096, 11008, 32, 8)
    GPT     ParallelTransformerBlock(768, 3072, 12, norm="layer", activation="gelu", bias=True, rotary_base=None,
                                     dropout=0.1, attention_dropout=0.1, name="blocks.0")

Both sums are the ``residual`` of a row-parallel product: added once, in float32, before the one rounding of
its output; where dropout comes between, they are sums of their own. Under sequence parallelism x, h and y are this
rank's part of the sequence; the block then has two gathers and two reduce-scatters forward, and the parameters of
the norms get their complete gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import Unpack

from tpkernels.errors import ArgumentError
from tpkernels.nn._options import ModelOptions, joined
from tpkernels.nn.attention import ParallelAttention
from tpkernels.nn.masks import Dropout, Step, check_name, check_probability
from tpkernels.nn.mlp import ParallelMLP
from tpkernels.nn.norm import LayerNorm, RMSNorm
from tpkernels.nn.recompute import check_recompute, recomputed

__all__ = ["ParallelTransformerBlock"]

_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


class ParallelTransformerBlock(nn.Module):
    """attention_norm, attention, mlp_norm, mlp.

    Args:
        hidden, intermediate, heads, kv_heads, activation, bias, rotary_base, causal, options: those of
            ``ParallelAttention`` and ``ParallelMLP``.
        norm: "rms" or "layer" (weight and bias); ``eps`` of both.
        dropout: of the outputs of attention and mlp, before they are added. attention_dropout: of the attention
            probabilities. Both in training only; forward then needs ``step`` and the block a ``name``, see
            ``tpkernels.nn.masks``.
        recompute: "none", "selective" (the attention core) or "full", see ``tpkernels.nn.recompute``.
    Raises:
        ArgumentError: sizes that do not fit, an unknown norm, activation or recompute, dropout without a name.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        norm: str = "rms",
        activation: str = "swiglu",
        bias: bool = False,
        eps: float = 1e-5,
        rotary_base: float | None = 10000.0,
        causal: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        recompute: str = "none",
        **options: Unpack[ModelOptions],
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise ArgumentError(
                f"norm: it must be one of {', '.join(map(repr, _NORMS))}, but it is {norm!r}."
            )
        check_probability(dropout, "dropout")
        check_probability(attention_dropout, "attention_dropout")
        check_recompute(recompute)
        name = options.get("name", "")
        check_name(max(dropout, attention_dropout), name)
        self.recompute = recompute
        group, sequence_parallel = options.get("group"), options.get("sequence_parallel", False)

        def normalised() -> nn.Module:
            return _NORMS[norm](
                hidden,
                group=group,
                eps=eps,
                sequence_parallel=sequence_parallel,
                dtype=options.get("dtype"),
                device=options.get("device"),
            )

        def dropped(key: str) -> Dropout:
            return Dropout(
                dropout,
                name=f"{name}.{key}",
                group=group,
                sequence_parallel=sequence_parallel,
                sequence_dim=options.get("sequence_dim", 0),
                seed=options.get("seed", 0),
            )

        self.attention_norm = normalised()
        self.attention = ParallelAttention(
            hidden,
            heads,
            kv_heads,
            causal=causal,
            rotary_base=rotary_base,
            bias=bias,
            out_bias=bias,
            dropout=attention_dropout,
            recompute_core=recompute == "selective",
            **joined(options, "attention"),
        )
        self.attention_dropout = dropped("attention_dropout")
        self.mlp_norm = normalised()
        self.mlp = ParallelMLP(
            hidden, intermediate, activation=activation, bias=bias, **joined(options, "mlp")
        )
        self.mlp_dropout = dropped("mlp_dropout")

    def forward(
        self,
        x: Tensor,
        shard_sizes: Sequence[int] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        step: Step | None = None,
    ) -> Tensor:
        """[S, B, hidden] or [B, S, hidden] -> the same; arguments as in ``ParallelAttention.forward``."""
        if self.recompute == "full":
            return recomputed(self._forward, x, shard_sizes, rotary, step)
        return self._forward(x, shard_sizes, rotary, step)

    def _forward(
        self,
        x: Tensor,
        shard_sizes: Sequence[int] | None,
        rotary: tuple[Tensor, Tensor] | None,
        step: Step | None,
    ) -> Tensor:
        normed = self.attention_norm(x)
        if self.attention_dropout.active:
            y = self.attention(normed, shard_sizes=shard_sizes, rotary=rotary, step=step)
            h = x + self.attention_dropout(y, step, shard_sizes)
        else:
            h = self.attention(normed, residual=x, shard_sizes=shard_sizes, rotary=rotary, step=step)
        normed = self.mlp_norm(h)
        if self.mlp_dropout.active:
            y = self.mlp(normed, shard_sizes=shard_sizes)
            out: Tensor = h + self.mlp_dropout(y, step, shard_sizes)
        else:
            out = self.mlp(normed, residual=h, shard_sizes=shard_sizes)
        return out

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}"
