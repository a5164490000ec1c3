"""Path "fused" without a GPU: the ops of _C_sm90a and the memory between ranks, played by CPU tensors and gloo.

The fake ops check what the real ones require of their arguments, and compute in float64 what those compute. For the
ranks of a pool: ``ranks.run(on_fakes, fused_checks.check_gather, "fused", ...)``.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from gemm_checks import activate
from op_checks import on_device

from tpkernels.comm import auto, conditions, ranks, runtime, small, symmetric, workspace
from tpkernels.ops import _collectives

Tensor = torch.Tensor


class FakeRuntime(runtime.Runtime):
    """``log``: what was done, in order. ``capture``, ``sentence``, ``missing`` and ``fail`` are set by tests."""

    device_types = ("cpu",)
    compared_with: tuple[str, ...] = ()  # "gloo": then path "auto" chooses
    name = "NVIDIA H200"  # of the card

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.log: list[str] = []
        self.pairs: list[int] = []  # of factors, of every product that is summed
        self.stored: list[bool] = []  # whether such a product stores what departs, of every one
        self.mapped: dict[tuple[int, ...], tuple[Any, Tensor]] = {}
        self.names: set[str] = set()
        self.capture = False
        self.sentence = ""
        self.missing = ""
        self.fail = ""
        self.plans = {("auto", "")}  # schedules and tiles that a call may ask for
        self.asked: list[tuple[str, str]] = []  # and those that calls have asked for

    def facts(self, device):
        return conditions.RankFacts("here", f"GPU {self.rank}", {}, self.missing)

    def card(self, device):
        return self.name

    def elapsed_us(self, call, calls):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e6

    def on(self, device):
        return nullcontext()

    def capturing(self):
        return self.capture

    def synchronize(self, device):
        self.log.append("synchronize")

    def chained(self, device):
        return nullcontext()

    def allocate(self, size, device):
        self.log.append(f"allocate {size}")
        if self.fail == "allocate":
            raise RuntimeError("out of memory\nmore lines")
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def times_mapped(self):
        return 0

    def map_ranks(self, memory, group, name, most):
        assert name not in self.names and set(ranks.exchange(group, name)) == {name}
        self.names.add(name)
        assert not memory[: workspace.PAGE_BYTES].any(), "mapped before its words were zero"
        self.log.append("map")
        addresses = tuple(ranks.exchange(group, memory.data_ptr()))
        self.mapped[addresses] = group, memory
        return symmetric.Mapping(addresses)

    def warm_up(self, device, rank, addresses):
        assert addresses in self.mapped
        self.log.append("warm up")

    def fault(self):
        return self.sentence

    def _memory_of(self, addresses: list[int], shard_rows: list[int], rank: int, timeout_s: float) -> Any:
        group, memory = self.mapped[tuple(addresses)]
        assert rank == group.rank and len(shard_rows) == len(addresses) == group.world
        assert addresses[rank] == memory.data_ptr() and timeout_s > 0
        assert sum(shard_rows) > 0 and all(type(rows) is int for rows in shard_rows)
        return group, memory.numel() - workspace.PAGE_BYTES

    def gather(
        self, a_shard, bs, biases, bias_of, activation, outs, preacts, gathered,
        shard_rows, rank, addresses, timeout_s, schedule, tile, multiprocessors, whole=False,
    ):  # fmt: skip
        self.log.append("gather")
        _, room = self._memory_of(addresses, shard_rows, rank, timeout_s)
        (rows, k), m = a_shard.shape, sum(shard_rows)
        assert rows == shard_rows[rank] and k > 0 and (k == 1 or a_shard.stride(1) == 1)
        assert rows < 2 or a_shard.stride(0) >= k
        assert room >= m * -(-k // 8) * 8 * a_shard.element_size()
        assert len(bs) == len(outs) > 0 and len(preacts) in (0, len(bs)) and len(biases) == len(bias_of)
        everything = self._land(a_shard, shard_rows, addresses, keep_own=whole)
        if gathered is not None:
            assert gathered.shape == everything.shape and gathered.is_contiguous()
            gathered.copy_(everything)
        for i, b in enumerate(bs):
            assert b.shape[0] == k and b.shape[1] > 0 and outs[i].shape == (m, b.shape[1])
            value = everything.double() @ b.double()
            if i in bias_of:
                value += biases[bias_of.index(i)].double()
            if preacts:
                assert preacts[i].shape == outs[i].shape and preacts[i].dtype == outs[i].dtype
                preacts[i].copy_(value)
            outs[i].copy_(activate(value, activation))
        self.plan(schedule, tile, multiprocessors)

    def plan(self, schedule, tile, multiprocessors):
        assert (schedule, tile) in self.plans and multiprocessors == 0
        self.asked.append((schedule, tile))

    def multiply_blocks(
        self, left, right, left_sums_rows, right_sums_rows, left_from, right_from, bias, out,
        rank, addresses, timeout_s, schedule, tile, multiprocessors,
    ):  # fmt: skip
        self.log.append("multiply blocks")
        group, memory = self.mapped[tuple(addresses)]
        assert rank == group.rank and len(addresses) == group.world and timeout_s > 0
        assert len(left_from) == len(right_from) and len(left_from) % group.world == 0
        steps = len(left_from) // group.world
        assert 1 <= steps <= 4 and min(left.shape) > 0 and min(right.shape) > 0
        room = 0
        for x, table in ((left, left_from), (right, right_from)):
            assert (
                x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.element_size() == 2
            )
            counts = [
                sum(owner != r for owner in table[r * steps : (r + 1) * steps]) for r in range(group.world)
            ]
            room += max(counts) * -(-x.shape[0] * -(-x.shape[1] // 8) * 16 // 256) * 256
        assert memory.numel() - workspace.PAGE_BYTES >= room
        everyone = [ranks.exchange(group, (left.clone(), right.clone(), list(left_from), list(right_from)))][
            0
        ]
        assert all(other[2:] == (left_from, right_from) for other in everyone), "ranks have different tables"
        value = torch.zeros(out.shape, dtype=torch.float64)
        for step in range(steps):
            a = everyone[left_from[rank * steps + step]][0].double()
            b = everyone[right_from[rank * steps + step]][1].double()
            value += (a.t() if left_sums_rows else a) @ (b if right_sums_rows else b.t())
        if bias is not None:
            assert bias.shape == (out.shape[1],)
            value += bias.double()
        out.copy_(value)
        self.plan(schedule, tile, multiprocessors)

    def begin_gather(self, a_shard, shard_rows, rank, addresses, timeout_s):
        self.log.append("begin gather")
        assert a_shard.stride(1) == 1 and a_shard.shape[0] == shard_rows[rank]
        self._memory_of(addresses, shard_rows, rank, timeout_s)

    def end_gather(self, a_shard, shard_rows, rank, addresses, timeout_s):
        assert self.log.index("begin gather") < len(self.log) - 1, "something is called between the two"
        self.log.append("end gather")
        _, room = self._memory_of(addresses, shard_rows, rank, timeout_s)
        assert room >= sum(shard_rows) * -(-a_shard.shape[1] // 8) * 8 * a_shard.element_size()
        self._land(a_shard, shard_rows, addresses, keep_own=True)

    def _land(self, a_shard, shard_rows, addresses, *, keep_own):
        """All rows, in the memory too; the own ones only where they are asked for."""
        group, memory = self.mapped[tuple(addresses)]
        everything = _collectives.all_gather(a_shard, 0, shard_rows, group)
        m, k = everything.shape
        width = -(-k // 8) * 8
        end = workspace.PAGE_BYTES + m * width * a_shard.element_size()
        buffer = memory[workspace.PAGE_BYTES : end].view(a_shard.dtype).view(m, width)
        buffer.fill_(float("nan"))
        buffer[:, :k] = everything
        if not keep_own:
            begin = sum(shard_rows[: group.rank])
            buffer[begin : begin + shard_rows[group.rank]] = float("nan")
        return everything

    def scatter(
        self, a, b, bias, residual, out, send, shard_rows, rank, addresses, timeout_s,
        schedule, tile, multiprocessors, more_a, more_b,
    ):  # fmt: skip
        self.log.append("scatter")
        self._sum(
            a,
            b,
            bias,
            residual,
            out,
            send,
            shard_rows,
            rank,
            addresses,
            timeout_s,
            schedule,
            tile,
            multiprocessors,
            more_a,
            more_b,
        )

    def all_reduce(
        self, a, b, bias, residual, out, send, shard_rows, rank, addresses, timeout_s,
        schedule, tile, multiprocessors, more_a, more_b,
    ):  # fmt: skip
        self.log.append("all_reduce")
        assert out.is_contiguous() and out.shape[0] == sum(shard_rows)
        begin = sum(shard_rows[:rank])
        own = out[begin : begin + shard_rows[rank]]
        room = self._sum(
            a,
            b,
            bias,
            residual,
            own,
            send,
            shard_rows,
            rank,
            addresses,
            timeout_s,
            schedule,
            tile,
            multiprocessors,
            more_a,
            more_b,
        )
        pitch = -(-out.shape[1] * out.element_size() // 16) * 16  # bytes
        assert room >= (len(shard_rows) * max(shard_rows) + out.shape[0]) * pitch
        group, _ = self.mapped[tuple(addresses)]
        out.copy_(_collectives.all_gather(own, 0, shard_rows, group))

    def reduce_small(self, partial, bias, residual, out, way, *place):
        """As the kernel: partials as they are, in rank order, in float32."""
        group = self._small(way, *place)
        assert way in small.SUM_WAYS
        assert partial.dim() == 2 and partial.numel() > 0
        for each in (partial, out, residual):
            assert each is None or (each.is_contiguous() and each.dtype == partial.dtype)
            assert each is None or each.shape == partial.shape
        assert out.data_ptr() != partial.data_ptr()
        sent = _collectives.all_gather(partial, 0, [partial.shape[0]] * group.world, group)
        out.copy_(_summed(sent.chunk(group.world), bias, residual))

    def _small(self, way, rank, addresses, buffer_bytes, timeout_s):
        self.log.append(f"small {way}")
        group, memory = self.mapped[tuple(addresses)]
        assert (rank, len(addresses)) == (group.rank, group.world) and addresses[rank] == memory.data_ptr()
        assert buffer_bytes == memory.numel() and timeout_s > 0
        return group

    def gather_small(self, shard, out, shard_rows, *place):
        group = self._small(small.GATHER, *place)
        assert shard.is_contiguous() and shard.shape == (shard_rows[group.rank], out.shape[1])
        assert out.is_contiguous() and out.shape[0] == sum(shard_rows) > 0 and out.dtype == shard.dtype
        out.copy_(_collectives.all_gather(shard, 0, shard_rows, group))

    def scatter_small(self, partial, bias, residual, out, shard_rows, *place):
        """As reduce_small."""
        group = self._small(small.SCATTER, *place)
        own, before = shard_rows[group.rank], sum(shard_rows[: group.rank])
        assert partial.is_contiguous() and partial.shape[0] == sum(shard_rows) and partial.numel() > 0
        for each in (out, residual):
            assert each is None or (each.is_contiguous() and each.dtype == partial.dtype)
            assert each is None or each.shape == (own, partial.shape[1])
        sent = _collectives.all_gather(partial, 0, [partial.shape[0]] * group.world, group)
        out.copy_(_summed([x[before : before + own] for x in sent.chunk(group.world)], bias, residual))

    def _sum(
        self, a, b, bias, residual, out, send, shard_rows, rank, addresses, timeout_s,
        schedule, tile, multiprocessors, more_a, more_b,
    ):  # fmt: skip
        group, room = self._memory_of(addresses, shard_rows, rank, timeout_s)
        (m, k), n, own = a.shape, b.shape[1], shard_rows[rank]
        pitch = -(-n * out.element_size() // 16) * 16 // out.element_size()
        assert m == sum(shard_rows) and b.shape == (k, n) and k > 0 and n > 0
        assert out.shape in ((own, pitch), (own, n)) and out.is_contiguous()
        out = out[:, :n]
        self.stored.append(send is None)
        assert set(ranks.exchange(group, send is None)) == {send is None}, "ranks cut other chunks"
        if send is not None:
            assert send.shape == (m, pitch) and send.is_contiguous() and send.dtype == out.dtype
        if residual is not None:
            assert residual.shape == (own, pitch) and residual.is_contiguous() and residual.dtype == out.dtype
            residual = residual[:, :n]
        assert room >= group.world * max(shard_rows) * pitch * out.element_size()
        mine = slice(sum(shard_rows[:rank]), sum(shard_rows[: rank + 1]))
        self.pairs.append(1 + len(more_a))
        if _side_by_side(a, (1, 0)) == 0:  # TMA begins at whole units of 16 bytes
            assert all(end % 8 == 0 for end in accumulate(shard_rows[:-1])), "a must have K contiguous"
        partial = _sum_of_products([a, *more_a], [b, *more_b])
        sent = _collectives.all_gather(partial.to(out.dtype), 0, [m] * group.world, group)
        total = torch.zeros_like(partial[mine])
        for r in range(group.world):
            total += partial[mine] if r == rank else sent[r * m : (r + 1) * m][mine].double()
        for term in (bias, residual):
            if term is not None:
                total += term.double()
        out.copy_(total)
        self.plan(schedule, tile, multiprocessors)
        return room


def _sum_of_products(lefts, rights):
    """As the kernel takes them: up to four, the first of these layouts that fits the same for all of a kind."""
    assert len(lefts) == len(rights) <= 4
    total = 0
    for a, b in zip(lefts, rights, strict=True):
        assert a.shape[1] == b.shape[0] > 0 and a.dtype == b.dtype == lefts[0].dtype
        assert _side_by_side(a, (1, 0)) == _side_by_side(lefts[0], (1, 0))
        assert _side_by_side(b, (0, 1)) == _side_by_side(rights[0], (0, 1))
        total = total + a.double() @ b.double()
    return total


def _side_by_side(x, order):
    """The first of two dimensions whose elements TMA can take side by side."""
    assert x.data_ptr() % 16 == 0
    for inner in order:
        step = x.stride(1 - inner)
        whole = x.shape[1 - inner] == 1 or (step > 0 and step % 8 == 0)
        if whole and (x.shape[inner] == 1 or x.stride(inner) == 1):
            return inner
    raise AssertionError(f"TMA takes no matrix of strides {x.stride()}")


def _summed(partials, bias, residual):
    total = partials[0].float()
    for term in (*partials[1:], bias, residual):
        total = total if term is None else total + term.float()
    return total


def forget() -> None:
    """No group has memory, none has compared its ranks."""
    workspace._spaces.clear()
    ranks._missing.clear()
    auto._states.clear()
    auto._calibrated.clear()


def on_fakes(ctx: Any, check: Any, *args: Any) -> FakeRuntime:
    """Run a check of path "fused" on the ranks of a pool without a GPU."""
    fake, real = FakeRuntime(ctx.rank), runtime.active
    runtime.active = fake
    forget()
    try:
        on_device(ctx, check, *args)
    finally:
        runtime.active = real
        forget()
        os.environ.pop("TPK_PATH", None)
    ops = {"gather", "scatter", "all_reduce", "small", "multiply"}
    assert ops & {line.partition(" ")[0] for line in fake.log}, "no call came to the ops"
