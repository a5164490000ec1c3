"""Suite ``overlap``: a matrix product and the collective beside it, fused, in sequence, and in parts.

Three operations (:mod:`.overlap_shapes` has the sizes): all-gather + GEMM, GEMM + reduce-scatter, GEMM + all-reduce.
The baseline is a collective and ``torch.mm`` one after the other, in buffers allocated beforehand. ``gemm`` and
``comm`` are its halves alone: a fused operation that takes ``t`` shows ``t - t_gemm`` of its communication and hides
the rest of ``t_comm``. ``ceiling`` runs the product beside copies of the same bytes that it does not depend on
(:mod:`.overlap_ceiling`).

Weights are stored [N, K], as ``nn.Linear`` has them, and passed as ``w.t()`` to everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import check_known
from ..suite import Case, Options, Suite, Variant, Workload
from .overlap_shapes import AG, AR, OPS, shapes

if TYPE_CHECKING:
    from ..context import Context

__all__ = ["DTYPES", "OURS", "SUITE", "OverlapSuite"]

DTYPES = ("bfloat16", "float16", "float32")

# Values of the ``path`` argument beside "auto", which stands for us as variant "ours"; a new one is added here.
OURS = {
    "cuda": ("nccl+cublas", "nccl+streamk", "fused"),
    "cpu": ("gloo+blas", "gloo+streamk"),
}
DEPARTURES = ("copies", "stores")  # tpkernels.comm.departures.WAYS, without torch
# What not every operation has: rows do not depart from a gather, all-reduce has no fused one in torch.
_ALL = frozenset(OPS.values())
_TAKES = {
    **{f"ours:fused:{way}": _ALL - {AG} for way in DEPARTURES},
    "symm_mem": _ALL - {AR},
    "symm_mem:one_shot": frozenset({AR}),
    "symm_mem:two_shot": frozenset({AR}),
}


class OverlapSuite(Suite):
    """See the module."""

    name = "overlap"
    what = "AG+GEMM, GEMM+RS and GEMM+AR: ours, NCCL + cuBLAS, torch's symm_mem, cuBLASMp, and the ceiling"
    distributed = True

    def baseline(self, options: Options) -> str:
        """The collective, then the product (or the other way round)."""
        return "gloo+blas" if options.device == "cpu" else "nccl+cublas"

    def variants(self, options: Options) -> Sequence[Variant]:
        """Baseline, ours, peers, parts, ceiling."""
        baseline = self.baseline(options)
        return (
            Variant(
                baseline, "peer", "the collective and torch.mm in sequence, in buffers allocated beforehand"
            ),
            Variant("ours", "ours", "tpkernels as it chooses itself (path='auto')"),
            *(
                Variant(f"ours:{path}", "ours", f"tpkernels with path={path!r}")
                for path in OURS[options.device]
            ),
            *(
                Variant(f"ours:fused:{way}", "ours", f"path='fused' with TPK_DEPARTURE={way}")
                for way in (DEPARTURES if options.device == "cuda" else ())
            ),
            Variant(
                "symm_mem", "peer", "torch.ops.symm_mem.fused_all_gather_matmul, fused_matmul_reduce_scatter"
            ),
            Variant("symm_mem:one_shot", "peer", "torch.mm, then torch.ops.symm_mem.one_shot_all_reduce"),
            Variant("symm_mem:two_shot", "peer", "torch.mm, then torch.ops.symm_mem.two_shot_all_reduce_"),
            Variant(
                "cublasmp",
                "peer",
                "cublasMpMatmul, its fastest algorithm here",
                isolated=True,
                time_limit=180.0,
            ),
            Variant("comm", "part", "the collective alone"),
            Variant("gemm", "part", "torch.mm alone"),
            Variant(
                "ceiling", "ceiling", "torch.mm beside independent copy-engine pushes: what overlap can reach"
            ),
        )

    def cases(self, options: Options) -> Sequence[Case]:
        """Every shape in every dtype."""
        for dtype in options.dtypes:
            check_known("--dtype", dtype, DTYPES)
        return [
            Case(
                name=shape.name,
                op=OPS[shape.short],
                dtype=dtype,
                params={"m": shape.m, "n": shape.n, "k": shape.k},
                shape_set=shape.shape_set,
                flops=2.0 * shape.m * shape.n * shape.k,
            )
            for dtype in options.dtypes or ("bfloat16",)
            for shape in shapes(options)
        ]

    def applies(self, case: Case, variant: str, options: Options) -> bool:
        """False where there is no such operation."""
        return case.op in _TAKES.get(variant, _ALL)

    def bytes_needed(self, case: Case, options: Options) -> int:
        """Two sets of: inputs, and for each of about seven variants what is gathered or partial, and the result."""
        m, n, k = (int(case.params[name]) for name in ("m", "n", "k"))
        travels = m * k if case.op == OPS["AG"] else m * n
        return 2 * (m * k + n * k + 7 * (travels + m * n)) * (4 if case.dtype == "float32" else 2)

    def workload(self, case: Case, context: Context) -> Workload:
        """Inputs and reference; collective."""
        from .overlap_workload import OverlapWorkload

        return OverlapWorkload(case, context)


SUITE = OverlapSuite()
