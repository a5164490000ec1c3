"""Gradient check across ranks: autograd against finite differences of one loss that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class GradcheckError(AssertionError):
    """A gradient differs from its finite difference, or a replicated value between ranks. Raised on all ranks."""


def _flags(value: bool | Sequence[bool], count: int, name: str) -> list[bool]:
    flags = [value] * count if isinstance(value, bool) else list(value)
    if len(flags) != count:
        raise ValueError(f"{name} must be one bool or {count} of them, got {len(flags)}")
    return flags


class _Check:
    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        replicated: bool | Sequence[bool],
        output_replicated: bool | Sequence[bool],
        seed: int,
    ) -> None:
        self.fn, self.group = fn, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.inputs = [x.detach().clone() for x in inputs]
        self.replicated = _flags(replicated, len(self.inputs), "replicated")
        self.device = self.inputs[0].device
        self.seed = seed
        for i, x in enumerate(self.inputs):
            if self.replicated[i]:
                self.require_equal(x, f"input {i}")
        outputs = self.call(self.inputs)
        self.output_replicated = _flags(output_replicated, len(outputs), "output_replicated")
        for i, out in enumerate(outputs):
            if self.output_replicated[i]:
                self.require_equal(out, f"output {i}")
        self.weights = [
            self.random(out, 1000 + i, self.output_replicated[i]) for i, out in enumerate(outputs)
        ]

    def call(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = self.fn(*inputs)
        return (out,) if isinstance(out, torch.Tensor) else tuple(out)

    def random(self, like: torch.Tensor, stream: int, same: bool) -> torch.Tensor:
        """Standard normal values of like's shape; equal on all ranks if ``same``."""
        generator = torch.Generator().manual_seed(
            self.seed + 7919 * stream + (0 if same else 104729 * (self.rank + 1))
        )
        values = torch.randn(like.shape, dtype=torch.float64, generator=generator, device="cpu")
        return values.to(self.device)

    def sum(self, value: torch.Tensor) -> float:
        total = value.detach().to(torch.float64).clone()
        dist.all_reduce(total, group=self.group)
        return float(total)

    def largest(self, value: int) -> int:
        most = torch.tensor(value, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def require_equal(self, value: torch.Tensor, what: str) -> None:
        size = self.largest(value.numel())
        differs = int(value.numel() != size)
        if self.largest(differs) == 0 and size:
            root = dist.get_global_rank(self.group, 0) if self.group is not None else 0
            copy = value.detach().contiguous().clone()
            dist.broadcast(copy, root, group=self.group)
            differs = int(not torch.allclose(copy, value.detach(), rtol=1e-12, atol=1e-12))
        if self.largest(differs):
            raise GradcheckError(
                f"{what} is declared replicated, but its value is not the same on every rank"
            )

    def loss(self, inputs: Sequence[torch.Tensor]) -> float:
        """Sum over ranks of <w, out>; an output that every rank holds is counted on rank 0 only."""
        with torch.no_grad():
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for out, w, same in zip(self.call(inputs), self.weights, self.output_replicated, strict=True):
                if not same or self.rank == 0:
                    total = total + (out.to(torch.float64) * w).sum()
        return self.sum(total)

    def gradients(self) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in self.inputs]
        outputs = self.call(leaves)
        torch.autograd.backward(outputs, [w.to(o.dtype) for w, o in zip(self.weights, outputs, strict=True)])
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    def difference(self, index: int, direction: torch.Tensor, eps: float) -> float:
        """Central difference of the loss along a direction of one input; zero on the ranks that hold still."""
        values = []
        for sign in (1.0, -1.0):
            moved = list(self.inputs)
            moved[index] = moved[index] + sign * eps * direction
            values.append(self.loss(moved))
        return (values[0] - values[1]) / (2 * eps)


def gradcheck_ranks(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    replicated: bool | Sequence[bool] = False,
    output_replicated: bool | Sequence[bool] = False,
    directions: int = 2,
    full: bool = False,
    eps: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    seed: int = 0,
) -> None:
    """Compare autograd with finite differences of L = sum over ranks of <w, out>; call it on every rank of ``group``.

    A sharded input moves on one rank at a time (all ranks evaluate together); a replicated one moves on all ranks
    together, and its gradient must be complete (the derivative of L) and equal on all ranks. A replicated output counts
    once in L, and each rank's backward gets the same w.

    Args:
        fn: function of the input tensors that returns a tensor or a tuple of tensors; it communicates over ``group``.
        inputs: this rank's float64 tensors (of any size, 0 included); every one is checked.
        group: the ranks that take part (None: the default group).
        replicated: which inputs have the same value on every rank: one bool, or one for each input.
        output_replicated: the same for outputs.
        directions: random directions for each input (and each rank, if sharded).
        full: every element instead of random directions; 2 evaluations each, for small inputs.
        eps: step of the central difference.
        rtol, atol: allowed |analytic - numeric| is atol * scale + rtol * |numeric|, scale = max(1, |L|).
        seed: of weights and directions; the same on all ranks.

    Raises:
        GradcheckError: on all ranks, naming the input, the rank and the two values.
        ValueError: inputs are not float64, or flags of the wrong number.
    """
    for i, x in enumerate(inputs):
        if x.dtype != torch.float64:
            raise ValueError(f"inputs[{i}] must be float64 for finite differences, got {x.dtype}")
    if not inputs:
        raise ValueError("inputs must hold at least one tensor, got none")
    check = _Check(fn, inputs, group, replicated, output_replicated, seed)
    gradients = check.gradients()
    for i, (x, gradient) in enumerate(zip(check.inputs, gradients, strict=True)):
        if gradient.shape != x.shape:
            raise GradcheckError(
                f"the gradient of input {i} has shape {tuple(gradient.shape)}, not {tuple(x.shape)}"
            )
    scale = max(1.0, abs(check.loss(check.inputs)))
    problems: list[str] = []
    for i, x in enumerate(check.inputs):
        if check.replicated[i]:
            try:
                check.require_equal(gradients[i], f"the gradient of input {i}")
            except GradcheckError as error:
                problems.append(str(error))
        movers = [None] if check.replicated[i] else list(range(check.world))
        for mover in movers:
            moves = mover is None or mover == check.rank
            count = check.largest(x.numel() if moves else 0)
            for step in range(count if full else min(directions, count)):
                direction = torch.zeros_like(x)
                if moves and full:
                    direction.view(-1)[step] = 1.0
                elif moves:
                    direction = check.random(x, 17 * step + i + 1, mover is None)
                numeric = check.difference(i, direction, eps)
                # One rank speaks for a replicated gradient: that all are equal was checked above.
                speaks = check.rank == (0 if mover is None else mover)
                analytic = check.sum((direction * gradients[i]).sum() * float(speaks))
                if not abs(analytic - numeric) <= atol * scale + rtol * abs(numeric):
                    where = "on all ranks together" if mover is None else f"on rank {mover}"
                    what = f"element {step}" if full else f"random direction {step}"
                    problems.append(
                        f"input {i} moved {where}, {what}: autograd {analytic:.9g}, finite difference {numeric:.9g}"
                    )
    if problems:
        shown = "\n  ".join(problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise GradcheckError(
            f"{len(problems)} gradients of {getattr(fn, '__name__', 'fn')} are wrong:\n  {shown}{more}"
        )
