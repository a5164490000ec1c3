"""What a layer or an operation in FP8 does with its operands: which of them share a scale, in which formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpkernels.errors import ArgumentError, DTypeError
from tpkernels.fp8._quantize import DTYPES

__all__ = ["RECIPES", "Fp8Recipe", "RecipeLike", "recipe_of"]

RECIPES = ("tensorwise", "rowwise", "blockwise")
_BY_NAME = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


@dataclass(frozen=True)
class Fp8Recipe:
    """How the three products of a linear layer are made in FP8.

    ==========  ============================  ===================  ==============================================
    scaling     x and dY                      W                    what others call it
    ==========  ============================  ===================  ==============================================
    tensorwise  one scale                     one scale            torchao "tensorwise", TE Float8CurrentScaling
    rowwise     a scale for each row          for each row         torchao "rowwise"
    blockwise   for 1 x 128 elements          for 128 x 128        TE Float8BlockScaling, DeepSeek-V3
    ==========  ============================  ===================  ==============================================

    Scales are those of the tensor at hand ("current", "dynamic"): there is no history.

    Args:
        scaling: "tensorwise", "rowwise" or "blockwise".
        forward_dtype: of x and W; torch.float8_e4m3fn.
        backward_dtype: of dY. None: torch.float8_e5m2 for tensorwise (TransformerEngine's HYBRID), torch.float8_e4m3fn
            for the others, whose scales leave it range enough.
        fast_accumulation: leave sums in the tensor cores' short accumulators instead of promoting them to float32 every
            128 of K (``use_fast_accum`` of torch). Faster, less exact; not with blockwise.
        round_scales_to_power_of_2: of all scales. None: False for tensorwise, True for the others, whose transposed
            copies are then made from FP8 all but without rounding again.

    Raises:
        ArgumentError, DTypeError: a value that is not among these.
    """

    scaling: str = "tensorwise"
    forward_dtype: torch.dtype = torch.float8_e4m3fn
    backward_dtype: torch.dtype | None = None
    fast_accumulation: bool = False
    round_scales_to_power_of_2: bool | None = None

    def __post_init__(self) -> None:
        if self.scaling not in RECIPES:
            raise ArgumentError(f"scaling: expected one of {', '.join(RECIPES)}, got {self.scaling!r}.")
        for name in ("forward_dtype", "backward_dtype"):
            value = getattr(self, name)
            if value not in DTYPES and not (value is None and name == "backward_dtype"):
                raise DTypeError(f"{name}: expected torch.float8_e4m3fn or torch.float8_e5m2, got {value!r}.")
        if self.fast_accumulation and self.scaling == "blockwise":
            raise ArgumentError(
                "fast_accumulation: blockwise scales change every 128 of K, so that sums are promoted there; leave "
                "it out, or take 'rowwise' or 'tensorwise'."
            )
        if self.grad_dtype == torch.float8_e5m2 == self.forward_dtype:
            raise ArgumentError(
                "forward_dtype: no tensor core multiplies e5m2 by e5m2 for the gradients; take float8_e4m3fn."
            )

    @property
    def grad_dtype(self) -> torch.dtype:
        """Format of dY."""
        if self.backward_dtype is not None:
            return self.backward_dtype
        return torch.float8_e5m2 if self.scaling == "tensorwise" else torch.float8_e4m3fn

    @property
    def power_of_2(self) -> bool:
        """Whether scales are powers of two."""
        given = self.round_scales_to_power_of_2
        return self.scaling != "tensorwise" if given is None else given

    @property
    def operand_scaling(self) -> str:
        """Of x and dY."""
        return "blockwise_1x128" if self.scaling == "blockwise" else self.scaling

    @property
    def weight_scaling(self) -> str:
        """Of W, in the forward pass and for the gradient of x."""
        return "blockwise_128x128" if self.scaling == "blockwise" else self.scaling

    def __str__(self) -> str:
        text = f"{self.scaling}, {_NAMES[self.forward_dtype]} forward, {_NAMES[self.grad_dtype]} backward"
        text += ", scales powers of two" if self.power_of_2 else ""
        return text + (", fast accumulation" if self.fast_accumulation else "")


RecipeLike = Fp8Recipe | str


_NAMED = {name: Fp8Recipe(name) for name in RECIPES}


def recipe_of(recipe: object) -> Fp8Recipe:
    """A recipe, or the one of that name with everything else as it is when left out."""
    if isinstance(recipe, Fp8Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in RECIPES:
        return _NAMED[recipe]
    raise ArgumentError(
        f"recipe: expected one of {', '.join(map(repr, RECIPES))} or a tpkernels.Fp8Recipe, got {recipe!r}."
    )
