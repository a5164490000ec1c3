"""Sizes of a transformer language model and of its batch, and its operators in a row. No torch.

    embedding, [qkv, core, out, residual, up, activation, down, residual] a layer, head

``qkv``, ``up`` and ``head`` are a norm and a linear layer behind it (of q, k and v; of gate and up; of the vocabulary,
with the loss); ``out`` and ``down`` are linear layers; ``core`` is attention by heads. Two edges of a layer go past
others: from each residual sum to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from tpkernels.errors import ArgumentError
from tpkernels.grids import Sizes

__all__ = ["LAYER", "MODELS", "Linear", "ModelShape", "model_of"]

# Of a layer, in order. "attention_residual" and "mlp_residual" are sums of the residual stream.
LAYER = ("qkv", "core", "out", "attention_residual", "up", "activation", "down", "mlp_residual")
STYLES = ("llama", "gpt")


class Linear(NamedTuple):
    """A linear layer, or several on one input: output features of each; ``back``: it leads back to the stream."""

    in_features: int
    out_features: tuple[int, ...]
    norm: bool
    back: bool


@dataclass(frozen=True)
class ModelShape:
    """A decoder of ``layers`` blocks, and the batch that it trains on.

    Attributes:
        name: for tables.
        layers, hidden, heads, kv_heads, ffn, vocab: of the model; ``ffn``: inner features of the MLP.
        sequence, batch: tokens of a sequence, sequences of a batch over all ranks (of one micro-batch).
        style: "llama" (RMSNorm, SwiGLU, rotary positions, no biases) or "gpt" (LayerNorm, GELU, biases).
        head_dim: elements of a head; 0: hidden / heads.

    Raises:
        ArgumentError: a size that is not above 0, heads that do not fit, an unknown style.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    batch: int
    style: str = "llama"
    head_dim: int = 0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            known = " or ".join(map(repr, STYLES))
            raise ArgumentError(f"style: a model's style is {known}, but it is {self.style!r}.")
        for name, value in self.to_dict().items():
            least = 0 if name == "head_dim" else 1
            if name not in ("name", "style") and (type(value) is not int or value < least):
                raise ArgumentError(f"{name}: it must be an integer, {least} or more, but it is {value!r}.")
        if self.head_dim == 0:
            if self.hidden % self.heads:
                raise ArgumentError(
                    f"heads: {self.hidden} hidden features are no multiple of {self.heads} heads; give head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"kv_heads: the {self.heads} heads must be a multiple of it, but it is {self.kv_heads}."
            )

    @property
    def tokens(self) -> int:
        """Rows of every product."""
        return self.sequence * self.batch

    @property
    def width(self) -> int:
        """Features of all heads together."""
        return self.heads * self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP has gate and up, or up alone."""
        return self.style == "llama"

    @property
    def linears(self) -> Mapping[str, Linear]:
        """By operator."""
        kv = self.kv_heads * self.head_dim
        return {
            "qkv": Linear(self.hidden, (self.width, kv, kv), norm=True, back=False),
            "out": Linear(self.width, (self.hidden,), norm=False, back=True),
            "up": Linear(self.hidden, (self.ffn,) * (2 if self.gated else 1), norm=True, back=False),
            "down": Linear(self.ffn, (self.hidden,), norm=False, back=True),
            "head": Linear(self.hidden, (self.vocab,), norm=True, back=False),
        }

    def sizes(self, operator: str) -> Sizes:
        """Of a linear operator's product."""
        linear = self.linears[operator]
        return Sizes(self.tokens, linear.in_features, sum(linear.out_features))

    @property
    def parameters(self) -> int:
        """Of the whole model, norms and biases too."""
        per_norm = self.hidden * (1 if self.style == "llama" else 2)
        total = self.vocab * self.hidden
        for name, linear in self.linears.items():
            times = 1 if name == "head" else self.layers
            biases = sum(linear.out_features) if self.style == "gpt" and name != "head" else 0
            weight = linear.in_features * sum(linear.out_features)
            total += times * (weight + biases + per_norm * linear.norm)
        return total

    def with_batch(self, batch: int, sequence: int | None = None) -> ModelShape:
        """The same model on another batch."""
        return replace(self, batch=batch, sequence=self.sequence if sequence is None else sequence)

    def to_dict(self) -> dict[str, Any]:
        """What ``from_dict`` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Any) -> ModelShape:
        """What ``to_dict`` made.

        Raises:
            ArgumentError: it is something else.
        """
        try:
            return cls(**given)
        except TypeError as error:
            raise ArgumentError(
                f"model: expected the sizes of a model, such as ModelShape.to_dict() makes, got {given!r} ({error})."
            ) from None


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, kv, ffn, vocab, sequence=8192, batch=8)


# From their published configurations; the sizes are those of bench/models.py (a test holds them together).
MODELS: Mapping[str, ModelShape] = {
    "llama8b": _llama("llama8b", 32, 4096, 32, 8, 14336, 128256),
    "llama70b": _llama("llama70b", 80, 8192, 64, 8, 28672, 128256),
    "llama405b": _llama("llama405b", 126, 16384, 128, 8, 53248, 128256),
    # Vocabulary of 50257, padded to a multiple of 128 as trainers do.
    "gpt3": ModelShape("gpt3", 96, 12288, 96, 96, 49152, 50304, sequence=2048, batch=8, style="gpt"),
}
_OTHER_NAMES = {"gpt3-175b": "gpt3"}


def model_of(given: ModelShape | str) -> ModelShape:
    """A model, or that of a name.

    Raises:
        ArgumentError: there is none of that name.
    """
    if isinstance(given, ModelShape):
        return given
    found = MODELS.get(_OTHER_NAMES.get(given, given)) if isinstance(given, str) else None
    if found is None:
        known = ", ".join([*MODELS, *_OTHER_NAMES])
        raise ArgumentError(f"model: expected a ModelShape or one of {known}, got {given!r}.")
    return found
