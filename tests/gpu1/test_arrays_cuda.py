"""Arrays of CuPy and JAX: docs/arrays.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pages import snippets

import tpkernels as tpk

pytestmark = pytest.mark.gpu1


def _cupy() -> Any:
    return pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")


def test_the_page():
    _cupy()
    for code in snippets("arrays.md", "python cupy"):
        exec(compile(code, "docs/arrays.md", "exec"), {})


@pytest.mark.parametrize("path", ["cublas", "streamk"])
def test_on_the_callers_stream(path: str, rng: np.random.Generator) -> None:
    """Behind what is enqueued there: operands are filled after a long wait, and results are overwritten when used."""
    cp = _cupy()
    wait = cp.RawKernel(
        'extern "C" __global__ void wait() { for (int i = 0; i < 2000; ++i) __nanosleep(10000); }', "wait"
    )
    host = [rng.standard_normal((256, 256)).astype(np.float16) for _ in range(2)]
    ready = [cp.asarray(x) for x in host]
    want = cp.asarray(host[0].astype(np.float64) @ host[1].astype(np.float64))
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(3):
            a, b = (cp.full((256, 256), cp.nan, cp.float16) for _ in range(2))
            wait((1,), (1,), ())
            a[...], b[...] = ready
            y = tpk.matmul(a, b, path=path)
            assert isinstance(y, cp.ndarray) and y.dtype == cp.float16
            error = cp.abs(y.astype(cp.float64) - want).max()
            del a, b, y
        assert not stream.done, "it was waited for"
        stream.synchronize()
        assert float(error) < 0.1


def test_results_are_memory_of_the_callers_stream() -> None:
    """So that torch, when CuPy has freed one, gives it to nobody else while that stream still reads it."""
    cp = _cupy()
    a = cp.ones((1024, 1024), cp.float16)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True):
        y = tpk.matmul(a, a)
        address = y.data.ptr
        del y
        other = torch.empty(1024, 1024, dtype=torch.float16, device="cuda")
        assert other.data_ptr() != address, "memory of another stream"
        y = tpk.matmul(a, a)
        assert y.data.ptr == address


def test_accumulates_into_an_array() -> None:
    cp = _cupy()
    a, total = cp.ones((64, 32), cp.float16), cp.ones((64, 64), cp.float32)
    assert tpk.matmul(a, a.T, accumulate_into=total) is total
    assert bool((total == 33).all())


def test_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes three quarters of the memory
    jax: Any = pytest.importorskip("jax", reason="needs JAX: pip install jax[cuda13]")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    a = jax.numpy.ones((64, 32), jax.numpy.bfloat16)
    y = tpk.matmul(a, a.T)
    assert isinstance(y, jax.Array) and y.dtype == jax.numpy.bfloat16 and bool((y == 32).all())
