"""Decisions that calls share: what they depend on is looked at in every call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.ops import _gather, _matmul, _reduce_plan
from tpkernels.ops._remembered import Remembered


def test_a_key_is_decided_once_and_an_error_again() -> None:
    remembered: Remembered[int] = Remembered(most=2)
    asked = []

    def decide(value: int) -> int:
        asked.append(value)
        if value < 0:
            raise ValueError("negative")
        return value * 2

    for key in (1, 1, 0, 0):
        assert remembered.get(key, lambda key=key: decide(key)) == 2 * key
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            remembered.get(-1, lambda: decide(-1))
    assert asked == [1, 0, -1, -1]
    remembered.get(3, lambda: decide(3))  # a third: the others are forgotten
    remembered.get(1, lambda: decide(1))
    assert asked == [1, 0, -1, -1, 3, 1]


def test_the_environment_is_read_in_every_call(monkeypatch) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    for path in ("streamk", "blas", "streamk"):
        monkeypatch.setenv("TPK_PATH", path)
        tpk.matmul(a, b)
        assert tpk.last_path().gemm == path
    monkeypatch.setenv("TPK_PATH", "cublas")
    with pytest.raises(tpk.errors.ArgumentError, match="TPK_PATH: 'cublas' is not a path on cpu"):
        tpk.matmul(a, b)
    monkeypatch.delenv("TPK_PATH")
    tpk.matmul(a, b)
    assert tpk.last_path().gemm == "blas"


def test_checks_hold_after_a_call_that_was_right() -> None:
    a, b, bias = torch.randn(3, 4), torch.randn(4, 2), torch.randn(2)
    for _ in range(2):
        tpk.matmul(a, b, bias=bias)
        with pytest.raises(tpk.errors.DTypeError, match="b: expected dtype float32"):
            tpk.matmul(a, b.double(), bias=bias)
        with pytest.raises(tpk.errors.ShapeError, match=r"bias: expected shape \[2\]"):
            tpk.matmul(a, b, bias=torch.randn(3))
        with pytest.raises(tpk.errors.ShapeError, match="residual: expected the output's shape"):
            tpk.matmul(a, b, residual=torch.randn(2, 3))
        with pytest.raises(tpk.errors.ArgumentError, match="activation: expected one of"):
            tpk.matmul(a, b, activation="tanh")
        assert tpk.matmul(a, b, bias=bias, out_dtype=torch.float64).dtype == torch.float64
        assert tpk.matmul(a, b, bias=bias).dtype == torch.float32


def products(group: str) -> list[torch.Tensor]:
    x, w = torch.ones(4, 3), torch.ones(3, 2)
    return [
        tpk.all_gather_matmul(x, w, group),
        tpk.matmul_reduce_scatter(x, w, group),
        tpk.matmul_all_reduce(x, w, group),
        tpk.matmul_replicated(x, w, group),
    ]


def test_a_group_of_the_same_name_is_another_one() -> None:
    """Nothing that is remembered holds a group, and what is remembered fits its ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rows = []
    for world in (1, 2, 1, 4):
        if world == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
        group = dist.group.WORLD
        try:
            rows.append([y.shape[0] for y in products(group.group_name)])
            assert tpk.last_path().transport == "none"  # of matmul_replicated
            tpk.all_gather_matmul(torch.ones(4, 3), torch.ones(3, 2))
            assert tpk.last_path().transport == ("none" if world == 1 else "fake")
        finally:
            dist.destroy_process_group()
        held = weakref.ref(group)
        del group
        gc.collect()
        assert held() is None
    assert rows == [[4, 4, 4, 4], [8, 2, 4, 4], [4, 4, 4, 4], [16, 1, 4, 4]]


def test_no_tensor_is_held() -> None:
    a = torch.randn(5, 7)
    watched = weakref.ref(a)
    out = tpk.matmul(a, torch.randn(7, 3), bias=torch.randn(3), activation="gelu")
    watched_out = weakref.ref(out)
    del a, out
    gc.collect()
    assert watched() is None and watched_out() is None
    for remembered in (_matmul._decided, _gather._remembered, _reduce_plan._remembered):
        for decision in remembered._decisions.values():
            assert not any(isinstance(x, torch.Tensor) for x in decision)
