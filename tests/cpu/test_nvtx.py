"""Ranges around ops and phases: their names, how they nest, none when they are off, closed by errors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.ops import _nvtx


@pytest.fixture
def alone():
    """A default group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ranges(run: Any) -> list[tuple[str, list[str]]]:
    """Every range of ours that ``run`` emits, with those around it (outermost first)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    mine = []
    for event in profile.events():
        if event.is_user_annotation:
            outer, parent = [], event.cpu_parent
            while parent is not None:
                if parent.is_user_annotation:
                    outer.insert(0, parent.name)
                parent = parent.cpu_parent
            mine.append((event.name, outer))
    return mine


def test_ops_and_phases_are_named_and_nest():
    a, b = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(5, 2, dtype=torch.bfloat16)
    with _nvtx.enable():
        found = ranges(lambda: tpk.matmul(a, b, activation="gelu"))
    op = "tpk::matmul [3, 5] x [5, 2] bfloat16"
    assert (op, []) in found
    assert ("product blas", [op]) in found
    assert ("epilogue", [op, "product blas"]) in found
    with _nvtx.enable():
        assert ("product streamk", [op]) in ranges(lambda: tpk.matmul(a, b, path="streamk"))


def test_backward_has_ranges():
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    with _nvtx.enable():
        names = [name for name, _ in ranges(lambda: tpk.matmul(a, b).sum().backward())]
    for op in ("[3, 5] x [5, 2]", "[3, 2] x [2, 5]", "[5, 3] x [3, 2]"):
        assert f"tpk::matmul {op} float32" in names


def test_operands_in_lists(alone):
    x, w, name = torch.randn(4, 6), torch.randn(6, 2), dist.group.WORLD.group_name
    with _nvtx.enable():
        found = ranges(
            lambda: (tpk.all_gather_matmul(x, [w, w]), torch.ops.tpkernels.all_reduce(x, "sum", name))
        )
    names = [name for name, _ in found]
    assert "tpk::all_gather_matmul [4, 6] x [6, 2] + [6, 2] float32" in names
    assert "tpk::all_reduce [4, 6] float32" in names


def test_nothing_when_off():
    a, b = torch.randn(3, 5), torch.randn(5, 2)
    with _nvtx.enable(False):
        assert ranges(lambda: tpk.matmul(a, b)) == []
        assert _nvtx.op("matmul", (a, b)) is _nvtx.phase("sum")  # one shared object: nothing is made


@pytest.mark.parametrize("value,expected", [("1", "True"), ("0", "False"), ("", "False")])
def test_environment_is_read_at_import(value, expected):
    code = "from tpkernels.ops import _nvtx; print(_nvtx.active())"
    env = {**os.environ, "TPK_NVTX": value}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_enable_restores_after_an_error():
    before = _nvtx.active()
    with pytest.raises(KeyError), _nvtx.enable(not before):
        raise KeyError
    assert _nvtx.active() == before


def test_exceptions_close_ranges():
    a = torch.randn(3, 5)

    def run() -> None:
        with pytest.raises(tpk.errors.ShapeError):
            torch.ops.tpkernels.matmul(
                a, torch.randn(4, 2), None, None, None, 1.0, "none", None, False, "auto"
            )
        tpk.matmul(a, torch.randn(5, 2))

    with _nvtx.enable():
        found = ranges(run)
    assert ("tpk::matmul [3, 5] x [4, 2] float32", []) in found
    assert ("tpk::matmul [3, 5] x [5, 2] float32", []) in found  # not inside the one that failed


def test_nvtx_pushes_and_pops(monkeypatch):
    """The calls that a torch with CUDA gets, in pairs, also around an exception."""
    stack: list[str] = []
    seen: list[str] = []
    monkeypatch.setattr(_nvtx, "_has_nvtx", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (stack.append(name), seen.append(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: stack.pop())

    def fail() -> None:
        with _nvtx.phase("outer"), _nvtx.phase("inner", "nccl"):
            assert stack == ["outer", "inner nccl"]
            raise KeyError

    with _nvtx.enable():
        tpk.matmul(torch.randn(3, 5), torch.randn(5, 2))
        with pytest.raises(KeyError):
            fail()
    assert stack == []
    assert seen[:2] == ["tpk::matmul [3, 5] x [5, 2] float32", "product blas"]


def test_compiled_graph_has_one_range_and_no_break():
    a, b = torch.randn(3, 5), torch.randn(5, 2)
    with _nvtx.enable():
        compiled = torch.compile(lambda x, y: tpk.matmul(x, y), backend="aot_eager", fullgraph=True)
        compiled(a, b)
        names = [name for name, _ in ranges(lambda: compiled(a, b))]
    assert names.count("tpk::matmul [3, 5] x [5, 2] float32") == 1
