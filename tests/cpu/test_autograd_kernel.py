"""Our kernels under the dispatch key Autograd: what lies below sees every call, and gradients go where they belong."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels as tpk
from tpkernels.ops import _autograd

OPS = torch.ops.tpkernels


class Seen(TorchDispatchMode):
    """The names of our ops that come to a mode, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tpkernels":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operands(generator):
    return (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 5), (5, 2), (2,)))


@pytest.fixture
def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("needed", [True, False])
def test_a_dispatch_mode_sees_ops_of_both_passes(operands, needed: bool) -> None:
    a, b, bias = (t.requires_grad_(needed) for t in operands)
    with Seen() as seen:
        out = tpk.matmul(a, b, bias=bias)
        assert seen.names == ["matmul"]
        if needed:
            out.sum().backward()
            assert seen.names == ["matmul"] * 3
    assert torch.equal(out.detach(), tpk.matmul(a.detach(), b.detach(), bias=bias.detach()))


def test_fake_tensors_and_meta_tensors_come_to_the_fake(operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    a, b, _ = operands
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t).requires_grad_() for t in (a, b)]
        out = tpk.matmul(*fakes)
        assert isinstance(out, FakeTensor) and out.shape == (3, 2)
        out.sum().backward()
    assert isinstance(fakes[0].grad, FakeTensor) and fakes[0].grad.shape == (3, 5)
    meta = [t.to("meta").requires_grad_() for t in (a, b)]
    out = tpk.matmul(*meta)
    out.sum().backward()
    assert out.is_meta and meta[1].grad.is_meta and meta[1].grad.shape == (5, 2)


def test_subclasses_without_a_mode_see_ops(operands) -> None:
    seen = []

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            plain = torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, args)
            return func(*plain, **(kwargs or {}))

    a, b, _ = operands
    out = tpk.matmul(Wrapped(a), b)
    assert seen == [OPS.matmul.default]
    assert torch.equal(out, tpk.matmul(a, b))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_needs_a_gradient_gets_one(operands, needed) -> None:
    leaves = [t.requires_grad_(need) for t, need in zip(operands, needed, strict=True)]
    a, b, bias = leaves
    out = tpk.matmul(a, b, bias=bias, activation="silu")
    assert out.requires_grad and out.grad_fn.name() == "tpkernels_matmulBackward"
    (expected,) = torch.autograd.grad(
        torch.nn.functional.silu(a @ b + bias).sum(), [t for t in leaves if t.requires_grad]
    )
    for _ in range(2):  # a second pass sees the same
        (got,) = torch.autograd.grad(out.sum(), [t for t in leaves if t.requires_grad], retain_graph=True)
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_without_gradients_there_is_no_node(operands) -> None:
    a, b, _ = operands
    assert tpk.matmul(a, b).grad_fn is None
    a.requires_grad_()
    with torch.no_grad():
        assert tpk.matmul(a, b).grad_fn is None
    with torch.inference_mode():
        assert tpk.matmul(a, b).grad_fn is None


def test_inside_no_autograd_is_recorded_below(operands) -> None:
    """The implementation's own tensors carry no graph, and are freed."""
    a, b, _ = (t.requires_grad_() for t in operands)
    out = OPS.matmul(a, b, None, None, None, 1.0, "gelu", None, True, "auto")
    assert isinstance(out, list) and all(t.grad_fn.name() == "tpkernels_matmulBackward" for t in out)
    node = out[0].grad_fn
    assert [n is None for n, _ in node.next_functions] == [False, False]
    watched = weakref.ref(out[1])
    del out, node
    gc.collect()
    assert watched() is None


def test_schemas_with_defaults_are_refused() -> None:
    with pytest.raises(ValueError, match="streamk_gemm: an op with a gradient takes no default arguments"):
        _autograd.autograd_kernel("streamk_gemm", lambda ctx: (), lambda ctx, i, o: None, {})


def test_a_profile_has_the_op_once(operands) -> None:
    a, b, _ = (t.requires_grad_() for t in operands)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tpk.matmul(a, b)
    assert [e.name for e in profile.events()].count("tpkernels::matmul") == 1
