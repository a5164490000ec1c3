"""Layers on a path and in 16 bits against the same layers in float64 on path "auto"; run on the ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch
from few_rows import overlaps

import tpkernels as tpk
from tpkernels import nn as tnn

Tensor = torch.Tensor

STYLES = {
    "llama": {"activation": "swiglu"},
    "gpt": {
        "norm": "layer",
        "activation": "gelu",
        "bias": True,
        "rotary_base": None,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "recompute": "selective",
    },
}


@overlaps()
def check_block(ctx: Any, path: str, style: str, dtype: torch.dtype) -> None:
    """One kv head, delayed weight gradients, LoRA beside what is trained: outputs and every gradient."""
    options = {"group": ctx.group_name, "sequence_parallel": True, "name": "b", "device": ctx.device}
    forms = ({"dtype": dtype, "path": path, "delay_wgrad": True}, {"dtype": torch.float64})
    blocks = [
        tnn.ParallelTransformerBlock(384, 512, 12, 1, **STYLES[style], **options, **form) for form in forms
    ]
    for block in blocks:
        tnn.add_lora_(block, 8, alpha=4, freeze=False)
    with torch.no_grad():
        for (name, p), wide in zip(blocks[0].named_parameters(), blocks[1].parameters(), strict=True):
            if name.endswith("lora_B"):
                p.fill_(0.02)
            elif p.dim() == 1:  # norms and biases, away from 0 and 1, the same on all ranks
                p.add_(torch.linspace(-0.1, 0.1, p.numel(), dtype=p.dtype, device=p.device))
            wide.copy_(p)
    draw = torch.Generator("cpu").manual_seed(ctx.rank)
    x, g = (torch.randn(96, 2, 384, generator=draw, device="cpu").to(ctx.device, dtype) for _ in range(2))
    found = []
    for block in blocks:
        inner = x.detach().to(block.attention.o_proj.weight.dtype).requires_grad_()
        with tpk.record_paths() as log:
            y = block(inner, step=3)
            y.backward(g.to(y.dtype))
        if block is blocks[0]:
            tnn.backward_dw(block)
            for op in ("all_gather_matmul", "matmul_reduce_scatter"):
                assert {run for name, run in log.counts if name == op} == {"fused+streamk"}, log
        grads = {name: p.grad for name, p in block.named_parameters()}
        found.append({"output": y.detach(), "gradient of x": inner.grad, **grads})
    for name, want in found[1].items():
        if (
            name == "attention.k_proj.bias"
        ):  # adds as much to all scores of a query: its gradient is 0, and noise
            continue
        got = found[0][name]
        assert got is not None and want is not None, f"{name} has no gradient"
        error = (got.double() - want).norm() / want.norm()
        assert error < 0.04, f"{name}: relative error {error:.4f}"
