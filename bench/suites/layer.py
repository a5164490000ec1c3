"""Suite ``layer``: forward and backward of MLP, attention and transformer block, sequence parallel.

``us`` is forward and backward of one call together, ``extra["forward_us"]`` forward alone (no gradients wanted,
nothing kept), ``extra["backward_us"]`` the difference. Gradients are complete at the end of a call: what an
implementation leaves to the trainer (the norms' sums over the ranks) is part of it.

Models that are gated have SwiGLU and three weights in the MLP, the others (gpt3) tanh-GELU and two. All have
rotary positions; "gpt3-biases" and "tiny-biases" have LayerNorm and a bias in every linear layer, the others RMSNorm
and none. Flash attention is torch's ``scaled_dot_product_attention`` in every
variant.

Correctness: every variant starts from the same weights and gets the same x and gradient of y, all uniform; three
different ones in turn, so that what an earlier call left behind is wrong for a later one. At the full size and for
each of the three, y, the gradient of x and one random row of every 64 of every weight's gradient are compared with
the layer in float64 (:mod:`..blocks.reference`), in pieces of 128 columns of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..blocks.shapes import TINY, Layer, Tokens, layer_bytes, layer_flops
from ..blocks.variants import baseline, variants
from ..errors import check_known
from ..models import MODELS, Model
from ..suite import Case, Options, Suite, Variant, Workload

if TYPE_CHECKING:
    from ..context import Context

__all__ = ["DTYPES", "PARTS", "SUITE", "LayerSuite", "element_size", "layer_of"]

PARTS = ("mlp", "attention", "block")
DTYPES = ("bfloat16", "float16", "float32")

_MODELS: dict[str, Model] = {
    **MODELS,
    "gpt3-biases": replace(MODELS["gpt3"], biases=True),
    "tiny": TINY,
    "tiny-biases": replace(TINY, gated=False, biases=True),
}
_DEFAULT_MODELS = ("llama8b", "llama70b")
_DEFAULT_ROWS = (8192, 2048)
_TINY_ROWS = (48,)


def element_size(dtype: str) -> int:
    """Bytes."""
    return 4 if dtype == "float32" else 2


def layer_of(case: Case) -> Layer:
    """The sizes that a case's parameters stand for."""
    p = case.params
    return Layer(case.op, _MODELS[p["model"]], Tokens(int(p["batch"]), int(p["seq"])))


class LayerSuite(Suite):
    """See the module."""

    name = "layer"
    what = (
        "MLP, attention, transformer block, forward and backward: ours, by hand, torch's parallelize_module"
    )
    distributed = True
    track_memory = True

    def baseline(self, options: Options) -> str:
        """The layer by hand, nothing overlapped."""
        return baseline(options)

    def variants(self, options: Options) -> Sequence[Variant]:
        """See :mod:`..blocks.variants`."""
        return variants(options)

    def cases(self, options: Options) -> Sequence[Case]:
        """Parts of models at numbers of tokens (two sequences where even, of 8 ranks four), in every dtype."""
        small = options.small or options.device == "cpu"
        models = options.models or (("tiny",) if small else _DEFAULT_MODELS)
        parts = options.ops or PARTS
        dtypes = options.dtypes or ("float32" if options.device == "cpu" else "bfloat16",)
        for argument, values, known in (
            ("--model", models, tuple(_MODELS)),
            ("--op", parts, PARTS),
            ("--dtype", dtypes, DTYPES),
        ):
            for value in values:
                check_known(argument, value, known)
        all_rows = options.rows or (_TINY_ROWS if small else _DEFAULT_ROWS)
        return [
            self._case(part, model, rows, dtype, options.world)
            for dtype in dtypes
            for model in models
            for rows in all_rows
            for part in parts
        ]

    @staticmethod
    def _case(part: str, model: str, rows: int, dtype: str, world: int) -> Case:
        # Grids of eight ranks cut the sequences in four.
        batch = math.gcd(rows, 4 if world % 8 == 0 else 2)
        layer = Layer(part, _MODELS[model], Tokens(batch, rows // batch))
        m = layer.model
        return Case(
            name=f"{part} {model} M{rows}",
            op=part,
            dtype=dtype,
            params={
                "m": rows,
                "model": model,
                "batch": batch,
                "seq": rows // batch,
                "hidden": m.hidden,
                "ffn": m.ffn,
                "heads": m.heads,
                "kv_heads": m.kv_heads,
                "head_dim": m.head_dim,
            },
            shape_set=model,
            flops=layer_flops(layer, world),
        )

    def bytes_needed(self, case: Case, options: Options) -> int:
        """Of a variant or of the reference, whichever is more."""
        return layer_bytes(layer_of(case), options.world, element_size(case.dtype))

    def workload(self, case: Case, context: Context) -> Workload:
        """Inputs and reference; collective."""
        from .layer_workload import LayerWorkload

        return LayerWorkload(case, context)


SUITE = LayerSuite()
