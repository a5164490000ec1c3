"""Suite ``train``: tokens a second and model FLOP utilisation of whole training steps of a language model.

A step is forward, loss, backward and AdamW (torch's fused one, parameters and moments in the model's dtype, no
clipping) on a batch of random tokens. Steps are launched from the host, not captured. Where the host is too slow to
enqueue several ahead, ``us`` is the time of one of several steps launched back to back from an idle GPU (see
:mod:`..measure`): the host's time where that is longer than the GPU's. ``host_us`` is a single step on an idle GPU.
The model is the demo's, in sizes of the demo and with the blocks of large models, few of them.

``extra``, from ``us``: ``tokens_per_s`` of the whole group; ``mfu``, model FLOPs
(:func:`..blocks.shapes.train_flops`) a second over the GPU's dense peak by its data sheet, where it is known, else
over the rate of a large ``torch.mm`` measured before; that rate is ``matmul_tflops``, and ``mfu_of_matmul`` refers
to it. All but ``tokens_per_s`` per rank.

Correctness: every variant starts from the same weights and sees the same batches as the unsharded twin, a plain
model of torch in float32. The losses of the first three steps, as launched by the engine, must be the twin's;
then, from the starting weights again, the first gradients: one random row of every 64 of every parameter (of the
embedding also one that the batch uses), all of them together and in pieces of 128 columns (:mod:`..blocks.judge`
says what is allowed and why). The row's ``error`` and ``tolerance`` are those of what comes nearest to its limit;
``extra`` has all three. What small part of a sum over the ranks is wrong shows in suite ``layer``, whose limits are
tighter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..blocks.shapes import SIZES, Size, train_bytes, train_flops
from ..blocks.variants import baseline, variants
from ..errors import check_known
from ..suite import Case, Options, Suite, Variant, Workload
from .layer import element_size

if TYPE_CHECKING:
    from ..context import Context

__all__ = ["SUITE", "TrainSuite", "size_of"]

DTYPES = ("bfloat16", "float32")  # float16 would want its loss scaled
_DEFAULT = ("small", "medium", "large", "xlarge", "llama8b-4layers")


def size_of(case: Case) -> Size:
    """The model and batch of a case."""
    return SIZES[case.params["size"]]


class TrainSuite(Suite):
    """See the module."""

    name = "train"
    what = "training steps of a language model, tokens/s: ours, by hand, torch's parallelize_module"
    distributed = True
    track_memory = True

    def baseline(self, options: Options) -> str:
        """The model by hand, nothing overlapped."""
        return baseline(options)

    def variants(self, options: Options) -> Sequence[Variant]:
        """See :mod:`..blocks.variants`."""
        return variants(options, layers=False)

    def cases(self, options: Options) -> Sequence[Case]:
        """Every size (``models``) in every dtype."""
        small = options.small or options.device == "cpu"
        sizes = options.models or (("tiny",) if small else _DEFAULT)
        dtypes = options.dtypes or ("float32" if options.device == "cpu" else "bfloat16",)
        for name in sizes:
            check_known("--model", name, SIZES)
        for name in dtypes:
            check_known("--dtype", name, DTYPES)
        return [self._case(name, dtype, options.world) for dtype in dtypes for name in sizes]

    @staticmethod
    def _case(name: str, dtype: str, world: int) -> Case:
        size = SIZES[name]
        return Case(
            name=f"step {name}",
            op="step",
            dtype=dtype,
            params={
                "size": name,
                "batch": size.tokens.batch,
                "seq": size.tokens.seq,
                "layers": size.model.layers,
                "hidden": size.model.hidden,
                "vocab": size.vocab,
                "parameters": size.parameters,
            },
            shape_set=name,
            flops=train_flops(size, world),
        )

    def bytes_needed(self, case: Case, options: Options) -> int:
        """Of a variant or of the twin, whichever is more."""
        return train_bytes(size_of(case), options.world, element_size(case.dtype))

    def workload(self, case: Case, context: Context) -> Workload:
        """Batches and the twin's losses."""
        from .train_workload import TrainWorkload

        return TrainWorkload(case, context)


SUITE = TrainSuite()
