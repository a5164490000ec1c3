"""A layer, forward and backward, in float64, at the full size, a piece at a time so that it fits.

Independent of what it judges: formulas written out, rotary positions by complex numbers, no collective: every
rank computes the whole layer from the dense weights and keeps its rows of y and of x's gradient. Of every
weight's gradient it keeps one random row of every 64 of this rank's part, so that every tile of a kernel has one.
The weights are drawn in the type under test, one product at a time, and widened; tokens pass through the MLP in
chunks, heads one after the other, so that a block of 70 billion parameters' sizes takes seconds and some 30 GB.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checks import sampled_rows
from .dense import EPS
from .shapes import Layer
from .weights import cut, draw_, share

__all__ = ["Reference", "inputs", "layer_reference", "sampled"]

_CHUNK = 2048  # tokens of the MLP at a time
_ROTARY_BASE = 10000.0


@dataclass
class Reference:
    """What a right layer gives on this rank.

    Attributes:
        y, dx: this rank's rows, [S / world, B, hidden].
        weights: dense name -> (rows of this rank's part, their gradients).
    """

    y: Tensor
    dx: Tensor
    weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def inputs(
    shape: Layer, seed: int, dtype: torch.dtype, device: torch.device, which: int = 0
) -> tuple[Tensor, Tensor]:
    """x and the gradient of y, [S, B, hidden], uniform in [-1, 1]: the same on every rank.

    ``which``: different ones from the same seed.
    """
    generator = torch.Generator(device).manual_seed(seed * 1009 + which)
    size = (shape.tokens.seq, shape.tokens.batch, shape.model.hidden)

    def draw() -> Tensor:
        return torch.empty(size, device=device).uniform_(-1, 1, generator=generator).to(dtype)

    return draw(), draw()


def sampled(name: str, rows: int, seed: str, device: torch.device) -> Tensor:
    """Rows of a rank's part of the weight ``name`` whose gradient is looked at; random by ``seed`` and name."""
    if cut(name) is None:
        return torch.arange(rows, device=device)  # a norm: all of it
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return sampled_rows(rows, generator).to(device)


class _Pieces:
    """Drawing weights, and keeping the sampled gradients."""

    def __init__(
        self,
        shape: Layer,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        world: int,
        which: int,
    ) -> None:
        self.shape, self.seed, self.dtype, self.device = shape, seed, dtype, device
        self.rank, self.world = rank, world
        self.sample = f"{seed} {which} {rank}"  # other rows for other inputs
        self.sums: dict[str, Tensor] = {}

    def weight(self, name: str) -> Tensor:
        """The dense weight in float64, as the type under test rounds it."""
        narrow = torch.empty(self.shape.weights[name], dtype=self.dtype, device=self.device)
        return draw_(narrow, self.seed, name).double()

    def rows_of(self, name: str) -> Tensor:
        where = share(name, self.shape.weights[name], self.rank, self.world)[0]
        return sampled(name, where.stop - where.start, self.sample, self.device)

    def bias(self, name: str) -> Tensor | float:
        """That of the layer whose weight is ``name``; 0 where there is none."""
        bias = name.replace("weight", "bias")
        return self.weight(bias) if self.shape.model.biases else 0.0

    def add(self, name: str, dy: Tensor, x: Tensor) -> None:
        """The sampled rows of dy^T x, the gradient of the weight of y = x W^T, over [tokens, ...] matrices; and those
        of the bias beside it."""
        where = share(name, self.shape.weights[name], self.rank, self.world)
        rows = where[0].start + self.rows_of(name)
        self._add(name, dy[:, rows].t() @ x[:, where[1]])
        if self.shape.model.biases:
            bias = name.replace("weight", "bias")
            first = share(bias, self.shape.weights[bias], self.rank, self.world)[0].start
            self._add(bias, dy[:, first + self.rows_of(bias)].sum(0))

    def _add(self, name: str, part: Tensor) -> None:
        self.sums[name] = self.sums[name] + part if name in self.sums else part

    def gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (self.rows_of(name), value) for name, value in self.sums.items()}


def _gradients(y: Tensor, of: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, of, dy)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | float) -> Tensor:
    """LayerNorm where there is a bias, else RMSNorm."""
    if isinstance(bias, Tensor):
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def _norm_of(pieces: _Pieces, name: str, x: Tensor) -> Tensor:
    return _norm(x, pieces.weight(name), pieces.bias(name))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _mlp(pieces: _Pieces, before: str, x: Tensor, dy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """y and, given dy, dx; everything [tokens, ...]."""
    gated = pieces.shape.model.gated
    up, down = pieces.weight(f"{before}up_proj.weight"), pieces.weight(f"{before}down_proj.weight")
    gate = pieces.weight(f"{before}gate_proj.weight") if gated else None
    gate_bias = pieces.bias(f"{before}gate_proj.weight") if gated else 0.0
    up_bias, down_bias = (pieces.bias(f"{before}{name}_proj.weight") for name in ("up", "down"))
    ys, dxs = [], []
    for i in range(0, x.shape[0], _CHUNK):
        with torch.enable_grad():
            xs = x[i : i + _CHUNK].detach().requires_grad_()
            u = xs @ up.t() + up_bias
            g = u if gate is None else xs @ gate.t() + gate_bias
            inner = _gelu_tanh(u) if gate is None else g * torch.sigmoid(g) * u
            y = inner @ down.t() + down_bias
        ys.append(y.detach())
        if dy is None:
            continue
        dys = dy[i : i + _CHUNK]
        dx, du, dg = _gradients(y, (xs, u, g), dys)
        dxs.append(dx)
        pieces.add(f"{before}up_proj.weight", du, xs.detach())
        if gated:
            pieces.add(f"{before}gate_proj.weight", dg, xs.detach())
        pieces.add(f"{before}down_proj.weight", dys, inner.detach())
    return torch.cat(ys), torch.cat(dxs) if dxs else None


def _turn(x: Tensor) -> Tensor:
    """Rotary positions of [..., S, D]: the pair (i, i + D / 2) as a complex number, turned."""
    length, size = x.shape[-2:]
    positions = torch.arange(length, dtype=torch.float64, device=x.device)
    frequencies = _ROTARY_BASE ** (
        -2.0 * torch.arange(size // 2, dtype=torch.float64, device=x.device) / size
    )
    angles = torch.outer(positions, frequencies)
    turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the q heads [G, S, D] that share one k and v head [S, D]."""
    q, k = _turn(q), _turn(k)
    scores = q @ k.t() / math.sqrt(k.shape[-1])
    above = torch.ones(k.shape[0], k.shape[0], dtype=torch.bool, device=k.device).triu(1)
    return scores.masked_fill_(above, -math.inf).softmax(-1) @ v


def _attention(pieces: _Pieces, before: str, x: Tensor, dy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As ``_mlp``; the rows of x are (position, sequence of the batch)."""
    m, tokens = pieces.shape.model, pieces.shape.tokens
    group = m.heads // m.kv_heads
    names = [f"{before}{n}_proj.weight" for n in "qkv"]
    q, k, v = (
        (x @ pieces.weight(name).t() + pieces.bias(name)).view(tokens.seq, tokens.batch, -1, m.head_dim)
        for name in names
    )
    o_proj = pieces.weight(f"{before}o_proj.weight")
    out = torch.empty_like(q)
    dout = None if dy is None else (dy @ o_proj).view_as(q)
    grads = None if dy is None else [torch.empty_like(t) for t in (q, k, v)]
    for b in range(tokens.batch):
        for h in range(m.kv_heads):
            mine = slice(h * group, (h + 1) * group)
            with torch.enable_grad():
                qs = q[:, b, mine].transpose(0, 1).detach().requires_grad_()
                ks, vs = (t[:, b, h].detach().requires_grad_() for t in (k, v))
                y = _heads(qs, ks, vs)
            out[:, b, mine] = y.detach().transpose(0, 1)
            if dout is not None and grads is not None:
                dq, dk, dv = _gradients(y, (qs, ks, vs), dout[:, b, mine].transpose(0, 1))
                grads[0][:, b, mine] = dq.transpose(0, 1)
                grads[1][:, b, h], grads[2][:, b, h] = dk, dv
    y = out.flatten(0, 1).flatten(1) @ o_proj.t() + pieces.bias(f"{before}o_proj.weight")
    if dy is None or grads is None:
        return y, None
    pieces.add(f"{before}o_proj.weight", dy, out.flatten(0, 1).flatten(1))
    dx = torch.zeros_like(x)
    for name, grad in zip(names, grads, strict=True):
        rows = grad.flatten(0, 1).flatten(1)
        pieces.add(name, rows, x)
        dx += rows @ pieces.weight(name)
    return y, dx


def _through_norm(pieces: _Pieces, name: str, x: Tensor, dy: Tensor) -> Tensor:
    """dx of y = norm(x) * weight + bias; keeps the gradients of both."""
    with torch.enable_grad():
        xs, weight = x.detach().requires_grad_(), pieces.weight(name).requires_grad_()
        y = _norm(xs, weight, pieces.bias(name))
    dx, pieces.sums[name] = _gradients(y, (xs, weight), dy)
    if pieces.shape.model.biases:
        pieces.sums[name.replace("weight", "bias")] = dy.sum(0)
    return dx


def _block(pieces: _Pieces, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    first = _norm_of(pieces, "attention_norm.weight", x)
    h = x + _attention(pieces, "attention.", first, None)[0]
    y, dsecond = _mlp(pieces, "mlp.", _norm_of(pieces, "mlp_norm.weight", h), dy)
    assert dsecond is not None
    dh = dy + _through_norm(pieces, "mlp_norm.weight", h, dsecond)
    dfirst = _attention(pieces, "attention.", first, dh)[1]
    assert dfirst is not None
    return h + y, dh + _through_norm(pieces, "attention_norm.weight", x, dfirst)


@torch.no_grad()
def layer_reference(
    shape: Layer,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    world: int,
    which: int = 0,
) -> Reference:
    """The layer with the weights of ``seed`` on the ``inputs`` of ``seed`` and ``which``; no communication."""
    pieces = _Pieces(shape, seed, dtype, device, rank, world, which)
    x, dy = (t.double().flatten(0, 1) for t in inputs(shape, seed, dtype, device, which))
    if shape.part == "block":
        y, dx = _block(pieces, x, dy)
    else:
        y, found = (_mlp if shape.part == "mlp" else _attention)(pieces, "", x, dy)
        assert found is not None
        dx = found
    # Float32 holds a reference well enough for narrow types.
    keep = torch.float32 if dtype.itemsize == 2 else torch.float64
    rows = slice(rank * x.shape[0] // world, (rank + 1) * x.shape[0] // world)
    gradients: Mapping[str, tuple[Tensor, Tensor]] = pieces.gradients()
    kept = {name: (index, value.to(keep)) for name, (index, value) in gradients.items()}
    size = (shape.tokens.seq // world, *inputs_shape(shape)[1:])
    return Reference(y[rows].to(keep).view(size), dx[rows].to(keep).view(size), kept)


def inputs_shape(shape: Layer) -> tuple[int, int, int]:
    """[S, B, hidden]."""
    return shape.tokens.seq, shape.tokens.batch, shape.model.hidden
