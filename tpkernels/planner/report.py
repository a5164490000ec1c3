"""Plans as tables of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpkernels.planner.plan import Line, Plan, Run
from tpkernels.planner.problem import is_outer
from tpkernels.tune.show import table

__all__ = ["text"]

_GB = 1e9
_NAMES = {
    "attention_residual": "+ residual",
    "mlp_residual": "+ residual",
    "qkv": "norm, qkv",
    "up": "norm, up",
}


def text(plan: Plan) -> str:
    """All of it: what was planned for, each different layer, totals, and what one method alone would take."""
    model = plan.model
    limit = f"{plan.limit / _GB:.0f} GB a rank" if math.isfinite(plan.limit) else "no limit of memory"
    parts = [
        f"{model.name}: {model.layers} layers, {model.parameters / 1e9:.1f} billion parameters; {model.batch} "
        f"sequences of {model.sequence} tokens\non {plan.world} ranks of {plan.topology.name}, {limit}. "
        "Predicted, not measured."
    ]
    for run in plan.runs:
        parts.append(f"{_layers(run, model.layers)}\n\n{_of_layer(plan, (run.first + run.last + 1) // 2)}")
    sent = plan.sent_bytes
    ends = [
        _row("embedding", plan.lines[0], sent[0]),
        _row("norm, head, loss", plan.lines[-1], sent[-1]),
    ]
    whole = [
        "whole step",
        "",
        _ms(plan.us),
        *_times(plan.lines),
        _gb(plan.peak_bytes),
        _gb(sum(sent)),
    ]
    parts.append("ends, and all together\n\n" + table(_HEADINGS, [*ends, whole]))
    parts.append(_alone(plan))
    return "\n\n".join(parts)


_HEADINGS = (
    "operator",
    "cut as",
    "ms",
    "products ms",
    "messages ms",
    "copies ms",
    "moved ms",
    "memory GB",
    "sent GB",
)


def _layers(run: Run, layers: int) -> str:
    if run.first == run.last:
        return f"layer {run.first}"
    return f"{'each layer' if run.last - run.first + 1 == layers else f'layers {run.first} to {run.last}'}"


def _of_layer(plan: Plan, number: int) -> str:
    lines, sent = plan.lines[plan.layer(number)], plan.sent_bytes[plan.layer(number)]
    rows = [_row(_NAMES.get(e.operator, e.operator), e, of) for e, of in zip(lines, sent, strict=True)]
    rest = sum(line.cost.parameter_bytes + line.cost.kept_bytes for line in lines)
    us = sum(line.us for line in lines)
    rows.append(["layer", "", _ms(us), *_times(lines), _gb(rest), _gb(sum(sent))])
    return table(_HEADINGS, rows)


def _row(name: str, line: Line, sent: float) -> list[str]:
    cost = line.cost
    at = {True: "x of ", False: "y of ", None: ""}[is_outer(line.operator)]
    memory = _gb(cost.parameter_bytes + cost.kept_bytes)
    return [name, at + line.strategy.text, _ms(line.us), *_times([line]), memory, _gb(sent)]


def _times(lines: Sequence[Line]) -> list[str]:
    """What products, messages, sums over copies and ways between operators take, each alone."""
    return [
        _ms(sum(line.cost.products_us for line in lines)),
        _ms(sum(line.cost.messages_us for line in lines)),
        _ms(sum(line.cost.copies_us for line in lines)),
        _ms(sum(line.moved_us for line in lines)),
    ]


def _alone(plan: Plan) -> str:
    rows = [["this plan", _mixture(plan), _ms(plan.us), "1.00x", _gb(plan.peak_bytes), "yes"]]
    for single in plan.singles:
        fits = "yes" if single.peak_bytes <= plan.limit else "no"
        more = f"{single.us / plan.us:.2f}x"
        rows.append([single.name, single.strategy.text, _ms(single.us), more, _gb(single.peak_bytes), fits])
    found = "beside the best of each method alone\n\n" + table(
        ("method", "cut as", "ms", "time", "memory GB", "fits"), rows
    )
    if 0 < plan.bound_us < plan.us * (1 - 1e-9):
        gap = plan.us / plan.bound_us - 1
        found += (
            f"\n\nNo plan within the limit takes less than {_ms(plan.bound_us)} ms (this one {gap:.1%} more)."
        )
    return found


def _mixture(plan: Plan) -> str:
    """Strategies of linear layers, and how many there are of each."""
    linear = [line.strategy.text for line in plan.lines if is_outer(line.operator) is None]
    different = len(dict.fromkeys(linear))
    return linear[0] if different == 1 else f"{different} strategies"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"


def _gb(of_bytes: float) -> str:
    return f"{of_bytes / _GB:.2f}"
