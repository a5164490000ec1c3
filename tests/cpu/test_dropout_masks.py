"""Dropout masks by position: known answer, statistics, parts equal the whole, nothing else drawn."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tpkernels import nn as tnn
from tpkernels.errors import ArgumentError
from tpkernels.nn.init import random_bits, stream_key


def mask(*shape: int, p: float = 0.5, **other: object) -> torch.Tensor:
    return tnn.keep_mask(shape, p, **{"seed": 1, "name": "m", "step": 2, **other})


def lowbias32(z: int) -> int:
    """With Python integers."""
    z ^= z >> 16
    z = z * 0x7FEB352D % 2**32
    z ^= z >> 15
    z = z * 0x846CA68B % 2**32
    return z ^ z >> 16


def test_mask_is_the_documented_function() -> None:
    p, start = 0.3, (5, 7, 3)
    got = mask(2, 3, 9, p=p, starts=start)
    key = stream_key(1, "m")

    def link(value: int) -> int:
        wrapped = (value + 2**63) % 2**64 - 2**63
        return int(random_bits(torch.tensor(wrapped), key))

    for i, j, k in itertools.product(range(2), range(3), range(9)):
        row = link(link(link(2) + i + start[0]) + j + start[1]) % 2**64
        word = lowbias32((row + k + start[2]) % 2**32) ^ (row >> 32)
        kept = lowbias32(word) % 2**31 >= round(p * 2**31)
        assert bool(got[i, j, k]) is kept


def test_masks_do_not_change_between_releases() -> None:
    bits = "".join("01"[int(k)] for k in mask(2, 24, seed=0, name="blocks.0").flatten())
    assert bits == KNOWN


KNOWN = "110110101010111000111011001010001011011111110011"


def test_a_part_has_the_mask_of_the_whole(seed: int) -> None:
    whole = mask(4, 5, 6, 7, p=0.4, seed=seed)
    for dim in range(4):
        for start in range(3):
            starts = [start if d == dim else 0 for d in range(4)]
            shape = [2 if d == dim else n for d, n in enumerate(whole.shape)]
            part = mask(*shape, p=0.4, seed=seed, starts=starts)
            assert torch.equal(part, whole.narrow(dim, start, 2))
    assert torch.equal(mask(2, 3, 6, 7, p=0.4, seed=seed), whole[:2, :3])  # no total size enters
    assert mask(0, 3).shape == (0, 3)
    assert mask(3, 0).shape == (3, 0)
    assert torch.equal(mask(7, seed=seed, step=torch.tensor(5)), mask(7, seed=seed, step=5))


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_statistics(p: float) -> None:
    n = 1_000_000  # the seed is fixed: this passes or fails for good
    first = mask(1000, 1000, p=p)
    others = [mask(1000, 1000, p=p, **k) for k in ({"step": 3}, {"name": "n"}, {"seed": 2}, {"step": -2})]
    assert abs((~first).double().mean() - p) <= 4 * math.sqrt(p * (1 - p) / n)
    if p in (0.1, 0.5):
        z = (first.double() - (1 - p)) / math.sqrt(p * (1 - p))
        pairs = [(z[:, :-lag], z[:, lag:]) for lag in (1, 2, 64)]
        pairs += [(z[:-lag], z[lag:]) for lag in (1, 2, 64)]
        pairs += [(z[:-1, :-1], z[1:, 1:]), (z[1:, :-1], z[:-1, 1:])]
        pairs += [(z, (other.double() - (1 - p)) / math.sqrt(p * (1 - p))) for other in others]
        for a, b in pairs:
            assert abs((a * b).mean()) < 4.5 / math.sqrt(a.numel())
        for sums in (z.sum(0), z.sum(1)):  # rows and columns are as even as independent draws
            assert abs(sums.square().mean() / 1000 - 1) < 5 * math.sqrt(2 / 1000)


def test_steps_and_names_are_apart() -> None:
    masks = [mask(64, 64, step=s, name=n, seed=d) for s in (0, 1, -1, 2**40) for n in "ab" for d in (0, 1)]
    for a, b in itertools.combinations(masks, 2):
        assert 0.4 < (a == b).double().mean() < 0.6


def test_dropout_scales_and_draws_nothing(seed: int) -> None:
    state = torch.get_rng_state()
    x = torch.ones(50, 40, dtype=torch.float64, requires_grad=True)
    y = tnn.dropout(x, 0.2, seed=seed, name="d", step=1)
    assert torch.equal(torch.get_rng_state(), state)
    keep = tnn.keep_mask(x.shape, 0.2, seed=seed, name="d", step=1)
    torch.testing.assert_close(y, torch.where(keep, 1.25, 0.0).double())
    y.backward(torch.full_like(y, 3.0))
    torch.testing.assert_close(x.grad, torch.where(keep, 3.75, 0.0).double())
    assert tnn.dropout(x, 0.0, seed=seed, name="", step=None) is x
    half = torch.ones(8, 8, dtype=torch.bfloat16)
    assert tnn.dropout(half, 0.5, seed=seed, name="d", step=1).dtype == torch.bfloat16
    nan = torch.full((64,), float("nan"))
    assert tnn.dropout(nan, 0.5, seed=seed, name="d", step=1).isnan().logical_not().any()  # dropped: zero


@pytest.mark.parametrize("step", [7, torch.tensor(7)], ids=["int", "tensor"])
def test_compiles_to_one_graph(step: object) -> None:
    def run(x: torch.Tensor, step: object) -> torch.Tensor:
        return tnn.dropout(x, 0.3, seed=1, name="c", step=step)

    x = torch.randn(6, 50)
    for dynamic in (False, None):
        fast = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for s in (step, step + 1, step + 2):
            assert torch.equal(fast(x, s), run(x, s))


def test_bad_input() -> None:
    x = torch.zeros(2, 2)
    for given, pattern in (
        ({"p": 1.0}, r"p: the part that is dropped must be 0 or more and below 1, but it is 1.0"),
        ({"p": -0.1}, r"p: .* but it is -0.1"),
        ({"p": float("nan")}, r"p: .* but it is nan"),
        ({"name": ""}, r"name: dropout needs one"),
        ({"step": None}, r"step: .* but it is None; pass step= to forward"),
        ({"step": True}, r"step: .* but it is True"),
        ({"step": torch.zeros(2)}, r"step: .* but it is \[2\] of torch.float32"),
    ):
        kinds = {"p": 0.5, "name": "n", "seed": 0, "step": 0, **given}
        with pytest.raises(ArgumentError, match=pattern):
            tnn.dropout(x, kinds.pop("p"), **kinds)
    with pytest.raises(ArgumentError, match=r"x: dropout takes at least 1 dimension"):
        tnn.dropout(torch.tensor(1.0), 0.5, seed=0, name="n", step=0)


@pytest.mark.gpu1
def test_gpu_has_the_mask_of_the_cpu() -> None:
    assert torch.equal(mask(7, 33, 129, p=0.3), mask(7, 33, 129, p=0.3, device="cuda").cpu())
