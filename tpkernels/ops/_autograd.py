"""Gradients of the ops: a kernel under the dispatch key Autograd.

``torch.library.register_autograd`` does the same for ops of any kind, and takes several times as long as all else that
a small call needs: it flattens arguments, results and gradients as trees, looks for defaults in the schema, and goes
through the dispatcher once more. Here the schema is read once, when an op is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["autograd_kernel"]

Implementation: TypeAlias = Callable[..., Any]

# What torch's own kernel (torch._library.autograd) is made of, with these names from torch 2.11 to 2.14.
_below_autograd: Any = torch._C._AutoDispatchBelowAutograd
_after_autograd_keys: Any = torch._C._after_autograd_keyset
_any_requires_grad: Any = torch._C._any_requires_grad


def autograd_kernel(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    implementations: Mapping[str, Implementation],
) -> Callable[..., Any]:
    """Kernel of op ``tpkernels::name`` for ``Library.impl(name, kernel, "Autograd", with_keyset=True)``.

    Args:
        backward, setup_context: as ``torch.library.register_autograd`` takes them, except that ``backward`` may leave
            out what follows its last gradient, and that gradients of what is not a tensor are not looked at.
        implementations: by dispatch key ("CPU"): called directly where nothing is between Autograd and that key, such
            as a dispatch mode, a fake tensor or a subclass; all else goes through the dispatcher.

    Raises:
        ValueError: the schema has default arguments, which the dispatcher of torch 2.11 leaves out.
    """
    op = getattr(torch.ops.tpkernels, name).default
    if any(argument.has_default_value() for argument in op._schema.arguments):
        raise ValueError(f"{name}: an op with a gradient takes no default arguments, but its schema has some")
    kinds = [str(argument.type) for argument in op._schema.arguments]
    # A tensor has a gradient of its own, a list of them a list of gradients; a list that may be left out has none.
    differentiable = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    places = [(i, kind == "List[Tensor]") for i, kind in enumerate(kinds) if kind in differentiable]
    by_key = {getattr(torch._C.DispatchKey, key): f for key, f in implementations.items()}
    directly: dict[int, Implementation | None] = {}  # by set of keys: keys themselves are slow to look up
    returns_list = str(op._schema.returns[0].type) == "List[Tensor]"

    def below(keys: Any, args: Sequence[Any]) -> Any:
        number = keys.raw_repr()
        if number not in directly:
            directly[number] = by_key.get((keys & _after_autograd_keys).highestPriorityTypeId())
        implementation = directly[number]
        with _below_autograd():
            if implementation is not None:
                return implementation(*args)
            return op.redispatch(keys & _after_autograd_keys, *args)

    def forward(ctx: Any, keys: Any, args: Sequence[Any], *_: Tensor | None) -> Any:
        result = below(keys, args)
        ctx.needs_input_grad = _nested(ctx.needs_input_grad, args)
        setup_context(ctx, args, result)
        return tuple(result) if returns_list else result

    def _nested(needed: Sequence[bool], args: Sequence[Any]) -> list[Any]:
        """As the arguments are."""
        nested: list[Any] = [False] * len(args)
        begin = 2  # keys and args
        for i, is_list in places:
            if is_list:
                end = begin + len(args[i])
                nested[i] = list(needed[begin:end])
                begin = end
            else:
                nested[i] = needed[begin]
                begin += 1
        return nested

    def flat_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        made = backward(ctx, list(grads)) if returns_list else backward(ctx, *grads)
        flat: list[Any] = [None, None]
        for i, is_list in places:
            grad = made[i] if i < len(made) else None
            if not is_list:
                flat.append(grad)
            elif grad is None:
                flat.extend([None] * len(ctx.needs_input_grad[i]))
            else:
                flat.extend(grad)
        return tuple(flat)

    node: Any = type(
        f"tpkernels_{name}",  # torch adds "Backward"
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(flat_backward)},
    )
    apply: Callable[..., Any] = node.apply

    def kernel(keys: Any, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and _any_requires_grad(*args)):
            return below(keys, args)
        tensors: list[Tensor | None] = []
        for i, is_list in places:
            if is_list:
                tensors.extend(args[i])
            else:
                tensors.append(args[i])
        result = apply(keys, args, *tensors)
        return list(result) if returns_list else result

    return kernel
