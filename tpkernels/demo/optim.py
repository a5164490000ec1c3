"""AdamW for the sharded model and for its twin: one code, one schedule, one clipping rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Optimizer", "dense_norm", "learning_rate"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LOSS_SCALE = (
    2.0**12
)  # float16: the smallest gradients of a mean over some thousand bytes would round to zero


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Linear warm-up to ``peak`` over ``warmup`` steps, then a cosine down to a tenth of it at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def dense_norm(model: nn.Module) -> float:
    """Norm of all gradients of an unsharded model, summed in float64."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


class Optimizer:
    """AdamW with fp32 master weights where the model's are 16 bits wide, and clipping by the norm of ALL gradients.

    ``global_norm`` gives the norm of all ``.grad`` of the whole model: ``dense_norm``, or ``tpkernels.nn.grad_norm``
    for a sharded model (shards add up over the group, a replicated parameter counts once). Weight decay applies to
    matrices. ``scale_loss`` before backward and ``step`` after it belong together: float16 gradients are scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float,
        max_norm: float,
        global_norm: Callable[[], float],
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._masters: dict[str, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            narrow = parameter.dtype in (torch.float16, torch.bfloat16)
            self._masters[name] = nn.Parameter(parameter.detach().float()) if narrow else parameter
        self._scale = _LOSS_SCALE if any(p.dtype == torch.float16 for p in self._parameters.values()) else 1.0
        self._max_norm = max_norm
        self._global_norm = global_norm
        masters = list(self._masters.values())
        groups = [
            {"params": [p for p in masters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self._scale

    def gradients(self) -> dict[str, Tensor]:
        """{name: gradient} without the loss scale, in float32 or float64; raises RuntimeError where one is missing."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"parameter {name} received no gradient")
            found[name] = parameter.grad.to(self._masters[name].dtype) / self._scale
        return found

    def state(self) -> dict[str, dict[str, Tensor]]:
        """{"weight", "exp_avg", "exp_avg_sq"}: {parameter name: tensor}; the moments exist from the first step on."""
        moments = {key: {n: self._adamw.state[m][key] for n, m in self._masters.items()} for key in _MOMENTS}
        return {"weight": {name: m.detach() for name, m in self._masters.items()}, **moments}

    @torch.no_grad()
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Takes over weights and moments, of these shapes, that ``state`` of another optimizer returned."""
        for key, own in self.state().items():
            for name, tensor in own.items():
                tensor.copy_(state[key][name])
        self._write_back()

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)

    def step(self, lr: float) -> float:
        """Clips, updates the weights, clears the gradients; returns the norm before clipping.

        A norm that is not finite (float16 overflow) skips the update and halves the loss scale, on every rank alike
        since the norm is the same on all of them.
        """
        gradients = self.gradients()
        norm = self._global_norm() / self._scale
        if math.isfinite(norm):
            clip = min(1.0, self._max_norm / (norm + 1e-6))
            for name, master in self._masters.items():
                master.grad = gradients[name].mul_(clip)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._write_back()
        elif self._scale > 1.0:
            self._scale /= 2
        for parameter in (*self._parameters.values(), *self._masters.values()):
            parameter.grad = None
        return norm
