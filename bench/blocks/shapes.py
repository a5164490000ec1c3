"""Sizes of what is measured, and what follows from them: floating-point operations and memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..models import Model

__all__ = [
    "INPUTS",
    "SIZES",
    "TINY",
    "Layer",
    "Size",
    "Tokens",
    "layer_bytes",
    "layer_flops",
    "misfit",
    "train_bytes",
    "train_flops",
]

# Different inputs that the calls of a layer walk over, each with its own right results. Three, because a result made
# of what a buffer held one call before, or two where buffers alternate, then belongs to other inputs.
INPUTS = 3

# For the CPU: divides by 1, 2, 3, 4 ranks and more; q heads share kv heads.
TINY = Model(hidden=192, ffn=384, heads=24, kv_heads=12, head_dim=8, layers=2)


@dataclass(frozen=True)
class Tokens:
    """A batch: ``batch`` sequences of ``seq`` tokens."""

    batch: int
    seq: int

    @property
    def count(self) -> int:
        """M of every product: rows over all ranks."""
        return self.batch * self.seq


def misfit(model: Model, tokens: Tokens, world: int) -> str:
    """Why a model cannot be cut over ``world`` ranks; empty if it can. Peers want equal parts of everything."""
    sizes = {
        "attention heads": model.heads,
        "kv heads": model.kv_heads,
        "columns of the MLP": model.ffn,
        "tokens of a sequence": tokens.seq,
    }
    bad = [f"{count} {what}" for what, count in sizes.items() if count % world]
    return f"{world} ranks cannot share {', '.join(bad)} evenly" if bad else ""


@dataclass(frozen=True)
class Layer:
    """``part`` of one transformer block ("mlp", "attention" or "block") on a batch."""

    part: str
    model: Model
    tokens: Tokens

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Names and dense shapes of the parameters, in the order of the modules."""
        m = self.model
        width = m.heads * m.head_dim
        attention: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (width, m.hidden),
            "k_proj.weight": (m.kv_heads * m.head_dim, m.hidden),
            "v_proj.weight": (m.kv_heads * m.head_dim, m.hidden),
            "o_proj.weight": (m.hidden, width),
        }
        mlp: dict[str, tuple[int, ...]] = {
            "up_proj.weight": (m.ffn, m.hidden),
            "down_proj.weight": (m.hidden, m.ffn),
        }
        if m.gated:
            mlp = {"gate_proj.weight": (m.ffn, m.hidden), **mlp}
        norm: dict[str, tuple[int, ...]] = {"norm.weight": (m.hidden,)}
        parts = {"attention": attention, "mlp": mlp, "norm": norm}
        if m.biases:
            for of_part in parts.values():
                of_part.update({name.replace("weight", "bias"): shape[:1] for name, shape in of_part.items()})
        if self.part != "block":
            return dict(parts[self.part])
        return {
            **{f"attention_{name}": shape for name, shape in norm.items()},
            **{f"attention.{name}": shape for name, shape in attention.items()},
            **{f"mlp_{name}": shape for name, shape in norm.items()},
            **{f"mlp.{name}": shape for name, shape in mlp.items()},
        }

    @property
    def has_attention(self) -> bool:
        """Whether tokens meet each other."""
        return self.part != "mlp"


def _matrix_elements(weights: dict[str, tuple[int, ...]]) -> int:
    return sum(shape[0] * shape[1] for shape in weights.values() if len(shape) == 2)


def _attention_flops(model: Model, tokens: Tokens) -> int:
    """Of q k^T and p v, forward: 2 x 2 S^2 (heads x head_dim) a sequence, half of it below the diagonal."""
    return 2 * tokens.batch * tokens.seq**2 * model.heads * model.head_dim


def layer_flops(layer: Layer, world: int) -> float:
    """Forward and backward of a layer on one rank.

    3 x (2 M P + 2 M S A) / world with P elements of the weight matrices, A = heads x head_dim: a product takes
    2 M P forward and twice that backward; causal attention counts the half that is needed. What a flash kernel
    computes again in backward is not counted, nor are norms, rotary positions and activations.
    """
    matrices = 2 * layer.tokens.count * _matrix_elements(layer.weights)
    attention = _attention_flops(layer.model, layer.tokens) if layer.has_attention else 0
    return 3 * (matrices + attention) / world


def layer_bytes(layer: Layer, world: int, element: int) -> int:
    """Device memory of one rank: the larger of a variant's and the reference's need; an estimate.

    A variant: weights and gradients, and some 20 activations of [M, hidden] and 8 of [M, ffn] a world-th of
    them, of which two gathered inputs and two whole outputs are not cut. The reference, in float64: the largest
    weights of one product chain, 12 activations of [M, hidden], the projections, some ten matrices of the
    scores of one group of heads. Of every one of the ``INPUTS``: x, dy, y, dx, right y and dx, and of all but
    one the weights' gradients.
    """
    m, tokens = layer.model, layer.tokens
    matrices = _matrix_elements(layer.weights)
    rows = tokens.count
    variant = element * (
        2 * matrices // world + rows * (20 * m.hidden + 8 * m.ffn + 6 * m.qkv) // world + 4 * rows * m.hidden
    )
    kept = INPUTS * rows * m.hidden // world * (4 * element + 2 * max(4, 2 * element))
    variant += kept + (INPUTS - 1) * element * matrices // world
    attention = 0
    if layer.has_attention:
        group = m.heads // m.kv_heads
        attention = 8 * (3 * rows * m.qkv + 10 * group * tokens.seq**2)
    mlp = 8 * (3 if m.gated else 2) * m.ffn * m.hidden if layer.part != "attention" else 0
    return max(variant, kept + 12 * 8 * rows * m.hidden + max(attention, mlp + 8 * 6 * 2048 * m.ffn))


@dataclass(frozen=True)
class Size:
    """A language model and the batch that it trains on."""

    model: Model
    vocab: int
    tokens: Tokens

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Names and dense shapes of the parameters."""
        m = self.model
        block = Layer("block", m, self.tokens).weights
        return {
            "embed.weight": (self.vocab, m.hidden),
            **{f"layers.{i}.{name}": shape for i in range(m.layers) for name, shape in block.items()},
            "norm.weight": (m.hidden,),
            **({"norm.bias": (m.hidden,)} if m.biases else {}),
            "head.weight": (self.vocab, m.hidden),
        }

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in self.weights.values())


def _demo(
    width: int, layers: int, heads: int, kv_heads: int, ffn: int, batch: int, seq: int, vocab: int = 256
) -> Size:
    model = Model(width, ffn, heads, kv_heads, width // heads, layers)
    return Size(model, vocab, Tokens(batch, seq))


# "small" to "xlarge" are those of the demo (tpkernels/demo/config.py; a test holds them together), over bytes.
# The others have the blocks of large models, a few of them so that optimizer states fit on two GPUs, and a
# vocabulary in proportion.
SIZES = {
    "tiny": Size(TINY, 256, Tokens(2, 24)),
    "small": _demo(128, 2, 4, 4, 384, batch=8, seq=64),
    "medium": _demo(512, 6, 16, 8, 1536, batch=16, seq=256),
    "large": _demo(1024, 12, 16, 8, 2816, batch=16, seq=512),
    "xlarge": _demo(2048, 16, 32, 8, 5632, batch=16, seq=1024),
    "llama8b-4layers": _demo(4096, 4, 32, 8, 14336, batch=2, seq=4096, vocab=32768),
    "llama70b-2layers": _demo(8192, 2, 64, 8, 28672, batch=2, seq=4096, vocab=32768),
}


def train_flops(size: Size, world: int) -> float:
    """Forward and backward of one training step on one rank ("model FLOPs").

    (6 N T + 6 L T S A) / world: N parameters without the embedding (a lookup multiplies nothing) and the norms,
    T tokens, L layers, S the sequence, A = heads x head_dim; causal attention counts half. The optimizer and
    what is computed twice are not counted.
    """
    weights = {name: shape for name, shape in size.weights.items() if not name.startswith("embed.")}
    products = 6 * _matrix_elements(weights) * size.tokens.count
    attention = 3 * size.model.layers * _attention_flops(size.model, size.tokens)
    return (products + attention) / world


def train_bytes(size: Size, world: int, element: int) -> int:
    """Device memory of one rank: the larger of a variant's need and that of the dense twin; an estimate.

    A variant: weights, gradients and two moments, all in the model's dtype, activations of every layer, and the
    logits, once in the model's dtype and twice in float32. The twin: the same four in float32 and sampled
    gradients, and the activations of one sequence.
    """
    m, rows = size.model, size.tokens.count
    block = 20 * m.hidden + 8 * m.ffn + 6 * m.qkv
    variant = 4 * element * size.parameters // world
    variant += rows * m.layers * (element * block // world + 4 * element * m.hidden)
    variant += rows * size.vocab * (element + 8) // world
    twin = 5 * 4 * size.parameters + 4 * size.tokens.seq * (m.layers * block + 3 * size.vocab)
    return max(variant, twin)
