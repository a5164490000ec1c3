"""``python -m bench host``: every operation is measured, beside what it stands for, which gives the same."""

from __future__ import annotations

import io
import re

import pytest
import torch

from bench import cli, host_time
from bench.errors import BenchError


def both(ctx, op):
    """Value and gradients of both sides."""
    pair = host_time._pair(op, ctx, "auto")
    results = []
    for run in (pair.ours, pair.plain):
        out = run()
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(leaf.grad.clone() for leaf in pair.leaves)])
        for leaf in pair.leaves:
            leaf.grad = None
    return results


@pytest.mark.parametrize("op", host_time.OPS)
def test_the_two_sides_compute_the_same(ranks, op: str) -> None:
    for ours, plain in ranks.run(both, op, world=2):
        for got, expected in zip(ours, plain, strict=True):
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_a_table_of_times(capsys) -> None:
    given = ["host", "--backend", "fake", "--ranks", "2", "--seconds", "0.05"]
    assert cli.main([*given, "--op", "matmul,all_gather_matmul"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks (fake), us of the host"
    for line, op in zip(lines[3:], ("matmul", "all_gather_matmul"), strict=True):
        name, *cells = line.split()
        assert name == op
        ours, plain, more, *training = map(float, cells)
        assert ours > plain > 0 and abs(ours - plain - more) < 0.2
        assert training[0] > ours and training[1] > plain
    assert cli.main([*given, "--profile", "matmul"]) == 0
    assert re.search(r"\d+ .*_matmul\.py:\d+\(_implementation\)", capsys.readouterr().out)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--op: 'product' is not known.*matmul_all_reduce"):
        host_time.run([1], ["product"], "fake", stdout=io.StringIO())
