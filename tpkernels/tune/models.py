"""Products of transformer layers, by model and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.errors import ArgumentError


@dataclass(frozen=True)
class Model:
    """Sizes from a published configuration. ``gated``: gate and up weights, else one weight into the MLP."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    gated: bool = True


MODELS = {
    "llama8b": Model(4096, 14336, 32, 8),
    "llama70b": Model(8192, 28672, 64, 8),
    "llama405b": Model(16384, 53248, 128, 8),
    "gpt3": Model(12288, 49152, 96, 96, gated=False),
    "qwen32b": Model(5120, 25600, 64, 8),
}


def weights(name: str, tp: int) -> list[tuple[str, int, int]]:
    """(what, N, K) of one rank's weights: columns of those into a block, rows of those out of it, split over ``tp``.

    Raises:
        ArgumentError: no such model, or it cannot be split so.
    """
    model = MODELS.get(name)
    if model is None:
        raise ArgumentError(f"--model: expected one of {', '.join(MODELS)}, got {name!r}.")
    if tp < 1 or model.kv_heads % tp or model.ffn % tp:
        raise ArgumentError(
            f"--tp: expected a number that divides the {model.kv_heads} key-value heads of {name}, got {tp}."
        )
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim // tp
    up = model.ffn * (2 if model.gated else 1) // tp
    return [
        ("qkv", qkv, model.hidden),
        ("out", model.hidden, model.heads * model.head_dim // tp),
        ("up", up, model.hidden),
        ("down", model.hidden, model.ffn // tp),
    ]
