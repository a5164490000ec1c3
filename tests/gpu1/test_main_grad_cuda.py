"""Weight gradients in ``main_grad`` on one GPU: the product that adds, and layers of processes that share the GPU."""

from __future__ import annotations

import main_grad_checks as checks
import pytest
import torch
from op_checks import on_device
from streamk_cases import hopper_only

import tpkernels as tpk
from tpkernels.testing import RankContext, RankPool

pytestmark = pytest.mark.gpu1

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(64, 96, 40), (129, 37, 264), (2048, 1536, 1024), (3, 5, 0), (0, 8, 16), (1, 1, 1)]  # N, K, M rows


@pytest.mark.usefixtures("cublas_sums_in_fp32")
@pytest.mark.parametrize("dtype, path", [(BF16, "cublas"), (F16, "cublas"), (BF16, "streamk"), (F16, "streamk"),
                                         (F32, "auto"), (F64, "auto")])  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
def test_product_is_added(
    dtype: torch.dtype, path: str, transposed: bool, generator: torch.Generator
) -> None:
    """dY^T X, or its transposed as the backward formulas ask for it, to a view in a larger buffer."""
    wide = F64 if dtype == F64 else F32
    for n, k, rows in SHAPES:
        x, dy = (torch.randn(rows, c, device="cuda", generator=generator).to(dtype) for c in (k, n))
        start = torch.randn(n, k, device="cuda", generator=generator).to(wide)
        buffer = torch.full((n + 2, k + 3), torch.nan, device="cuda", dtype=wide)
        acc = buffer[1 : n + 1, 2 : k + 2]
        acc.copy_(start)
        a, b, target = (x.t(), dy, acc.t()) if transposed else (dy.t(), x, acc)
        assert tpk.matmul(a, b, accumulate_into=target, path=path) is target
        scale = start.double().abs() + dy.double().abs().t() @ x.double().abs()
        error = (acc - (start.double() + dy.double().t() @ x.double())).abs()
        assert (error <= (rows + 4) * torch.finfo(wide).eps * scale).all(), f"{(n, k, rows)}: {error.max()}"
        acc.fill_(torch.nan)
        assert buffer.isnan().all(), "wrote outside of its view"


@pytest.mark.parametrize("path", ["cublas", "streamk"])
def test_no_gradient_is_made_beside_the_sum(path: str) -> None:
    """The product allocates less than a bfloat16 gradient would take."""
    x, dy = torch.ones(512, 4096, device="cuda", dtype=BF16), torch.ones(512, 8192, device="cuda", dtype=BF16)
    acc = torch.zeros(8192, 4096, device="cuda")
    tpk.matmul(x.t(), dy, accumulate_into=acc.t(), path=path)  # workspaces are made once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tpk.matmul(x.t(), dy, accumulate_into=acc.t(), path=path)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2 * acc.numel()
    assert (acc == 1024).all()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype, path",
    [(BF16, "auto"), (F16, "auto"), (BF16, "gloo"), (F16, "gloo"), (F32, "auto"), (F64, "auto")],
)
def test_sums(shared_gpu_ranks: RankPool, world: int, dtype: torch.dtype, path: str) -> None:
    shared_gpu_ranks.run(on_device, checks.check_sums, dtype, path, world=world)


@hopper_only
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sums_on_path_fused(shared_gpu_ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    shared_gpu_ranks.run(on_device, checks.check_sums, dtype, "fused", world=world)


@pytest.mark.parametrize(
    "check",
    [
        checks.check_together,
        checks.check_several_uses,
        checks.check_other_gradients_alone,
        checks.check_megatron,
        checks.check_refusals,
        checks.check_clipping,
    ],
)
def test_check(shared_gpu_ranks: RankPool, check: object) -> None:
    shared_gpu_ranks.run(on_device, check, world=2)


def check_graph(ctx: RankContext) -> None:
    """A captured step adds once at every replay."""
    for case in checks.cases(1):
        layer = checks.make(ctx, case, BF16)
        checks.fused(layer)
        b = checks.batch(ctx, case, layer, BF16)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                checks.step(layer, case, b)
        torch.cuda.current_stream().wait_stream(side)
        layer.bias.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            checks.step(layer, case, b)
        layer.weight.main_grad.zero_()
        for _ in range(5):
            graph.replay()
        sums, scale = checks.expected(ctx, case, layer, [b])
        assert ((layer.weight.main_grad - 5 * sums).abs() <= 1e-4 * scale).all(), case


def test_graph(shared_gpu_ranks: RankPool) -> None:
    shared_gpu_ranks.run(on_device, check_graph, world=1)
