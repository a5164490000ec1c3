"""What the suites need to know of an implementation, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .weights import Part, share

__all__ = ["Implementation", "parts_of"]


def _as_they_are(gradients: Sequence[Tensor]) -> list[Tensor]:
    return list(gradients)


def _backward(loss: Tensor) -> None:
    loss.backward()


@dataclass
class Implementation:
    """A layer or a language model on this rank.

    Attributes:
        module: holds the parameters.
        run: a layer: what this rank is ``given`` of x -> of y, the same of it. A language model: token ids and
            targets [B, S] -> mean loss.
        parts: what the parameters hold of the dense weights.
        complete: gradients of ``module.parameters()`` as backward leaves them -> whole ones (the norms' are
            sums over the ranks' tokens). Part of every call that is timed.
        backward: of the loss of a language model.
        extra: goes into the row.
    """

    module: nn.Module
    run: Callable[..., Tensor]
    parts: list[Part]
    complete: Callable[[Sequence[Tensor]], list[Tensor]] = _as_they_are
    backward: Callable[[Tensor], object] = _backward
    extra: dict[str, Any] = field(default_factory=dict)

    def given(self, whole: Tensor, rank: int, world: int) -> Tensor:
        """What this rank is given of x, or of the gradient of y, [S, B, hidden]."""
        length = whole.shape[0]
        return whole[rank * length // world : (rank + 1) * length // world].clone()

    def judged(
        self, y: Tensor, dx: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """y and dx, this rank's rows of them, and by name its parts of the weights' gradients; all ranks call it."""
        return y, dx, {part.name: part.of(gradients[part.index]) for part in self.parts}

    def draw_(self, seed: int) -> None:
        """Set all parameters to their starting values."""
        parameters = list(self.module.parameters())
        for part in self.parts:
            part.draw_(parameters[part.index], seed)


def parts_of(
    module: nn.Module,
    weights: Mapping[str, tuple[int, ...]],
    rank: int,
    world: int,
    packed: Mapping[str, Sequence[str]] | None = None,
) -> list[Part]:
    """Parts of every parameter, by its name.

    Args:
        weights: names and shapes of the dense weights.
        packed: layers whose weight holds those of several dense layers, one below the other: {"qkv_proj":
            ("q_proj", "k_proj", "v_proj")}.
    """
    parts: list[Part] = []
    for index, name in enumerate(name for name, _ in module.named_parameters()):
        *before, layer, kind = name.split(".")
        start = 0
        for dense_layer in (packed or {}).get(layer, (layer,)):
            dense = ".".join((*before, dense_layer, kind))
            where = share(dense, weights[dense], rank, world)
            rows = where[0].stop - where[0].start
            parts.append(Part(dense, weights[dense], where, index, start, start + rows))
            start += rows
    return parts
