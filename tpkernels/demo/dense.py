"""The unsharded twin: a plain PyTorch language model over bytes (RMSNorm, rotary attention, SwiGLU).

It is the yardstick of the demo and the proof that its checkpoint is ordinary: this file imports torch and nothing
else, so it may be copied away and run on its own::

    python -m tpkernels.demo.dense demo-out "def main("     # or: python dense.py demo-out "def main("

demo-out is the folder that the demo wrote (``config.json`` and ``model.pt``). Parameter names equal those of the
gathered state dict of the tensor-parallel model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["DenseModel", "ModelConfig", "generate", "load_checkpoint", "main", "rotary_angles"]

SEEDS = 1 << 63  # of torch.Generator, from 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. ``width`` = ``heads`` x head size; ``kv_heads`` divides ``heads``; tokens are bytes."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 256
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    dtype: str = "float32"
    max_seq: int = 128

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.width // self.heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def rotary_angles(seq: int, head_dim: int, base: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [seq, head_dim / 2] in float32, of position x frequency (computed in float64)."""
    half = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), base ** (-2.0 * half / head_dim))
    return angles.cos().float().to(device), angles.sin().float().to(device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of x [batch, heads, seq, head_dim]; float32 inside at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.to(wide), sin.to(wide)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, float32 inside at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.to(wide.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions; x [batch, seq, width]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, seq, -1, self.config.head_dim).transpose(1, 2)

        q = _rotate(heads(self.q_proj(x)), cos, sin)
        k = _rotate(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        groups = self.config.heads // self.config.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, seq, width))
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class DenseModel(nn.Module):
    """Token ids [batch, seq] (int64) to logits [batch, seq, vocab] in the model's dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.to(config.torch_dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        config = self.config
        cos, sin = rotary_angles(tokens.shape[1], config.head_dim, config.rope_base, tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte (float32 at least); tokens and targets are [batch, seq]."""
        logits = self(tokens)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


class LogitsModel(Protocol):
    """Whatever turns ids [batch, seq] into logits [batch, seq, vocab]."""

    def __call__(self, tokens: Tensor) -> Tensor: ...


@torch.no_grad()
def generate(
    model: LogitsModel,
    prompts: list[bytes],
    length: int,
    *,
    window: int,
    temperature: float = 0.7,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[bytes]:
    """Continues every prompt by ``length`` sampled bytes and returns the continuations.

    The model sees windows of exactly ``window`` ids (the last bytes so far, padded at the end: causal attention never
    looks there), so shapes do not change from byte to byte. Random numbers are drawn on the CPU in float64, the same
    for the same ``seed`` on every machine and on every rank. ``temperature`` 0 takes the likeliest byte.
    """
    draws = torch.Generator().manual_seed(seed)
    texts = [bytearray(prompt or b"\n") for prompt in prompts]
    starts = [len(text) for text in texts]
    for _ in range(length):
        tokens = torch.zeros(len(texts), window, dtype=torch.int64)
        for row, text in enumerate(texts):
            tail = bytes(text[-window:])
            tokens[row, : len(tail)] = torch.tensor(list(tail))
        logits = model(tokens.to(device)).cpu()
        for row, text in enumerate(texts):
            scores = logits[row, min(len(text), window) - 1].double()
            if temperature > 0:
                odds = torch.softmax(scores / temperature, dim=-1)
                text.append(int(torch.multinomial(odds, 1, generator=draws)))
            else:
                text.append(int(scores.argmax()))
    return [bytes(text[start:]) for text, start in zip(texts, starts, strict=True)]


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> DenseModel:
    """The model stored in folder ``path`` (or beside the file ``path``), ready to evaluate.

    Raises FileNotFoundError without ``config.json`` or ``model.pt``, ValueError where they do not fit each other.
    """
    folder = Path(path)
    folder = folder if folder.is_dir() else folder.parent
    for name in ("config.json", "model.pt"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{path} is no checkpoint of the demo: {folder / name} does not exist.")
    try:
        fields: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = ModelConfig(**fields)
        state = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
        model = DenseModel(config)
        model.load_state_dict(state)
    except (
        TypeError,
        AttributeError,
        RuntimeError,
        json.JSONDecodeError,
        EOFError,
        pickle.UnpicklingError,
    ) as e:
        raise ValueError(f"the checkpoint in {folder} is damaged or does not fit this model: {e}") from e
    return model.to(device).eval()


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError with a sentence for an option that cannot be."""
    if options.length < 0:
        raise ValueError(f"--length must be at least 0, got {options.length}.")
    if not 0 <= options.temperature < math.inf:
        raise ValueError(f"--temperature must be 0 or more and finite, got {options.temperature:g}.")
    if not 0 <= options.seed < SEEDS:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {options.seed}.")
    try:
        kind = torch.device(options.device)
    except RuntimeError:
        kind = None
    if kind is None or kind.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {options.device} is unknown; choose cpu, cuda, cuda:1 and so on.")
    found = torch.cuda.device_count()
    if kind.type == "cuda" and (kind.index or 0) >= found:
        gpus = "no CUDA GPU" if found == 0 else f"{found} CUDA GPU{'s' if found > 1 else ''}"
        raise ValueError(
            f"--device {options.device} was asked for, but PyTorch finds {gpus} here; use --device cpu."
        )


def main(arguments: list[str] | None = None) -> int:
    """Loads a checkpoint and prints the prompt with its continuation; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Sample from a checkpoint of the tpkernels demo with plain PyTorch."
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="folder with config.json and model.pt")
    parser.add_argument("prompt", nargs="?", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument("--length", type=int, default=300, help="bytes to sample (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest byte (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        _check(options)
        model = load_checkpoint(options.checkpoint, options.device)
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    (text,) = generate(
        model,
        [options.prompt.encode()],
        options.length,
        window=model.config.max_seq,
        temperature=options.temperature,
        seed=options.seed,
        device=options.device,
    )
    print(options.prompt + text.decode("utf-8", errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
