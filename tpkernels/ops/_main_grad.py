"""Weight gradients that a product adds to a parameter's ``main_grad``, in float32, instead of making a tensor for them.

The convention is that of Megatron-LM (``gradient_accumulation_fusion``) and TransformerEngine
(``fuse_wgrad_accumulation``):

- ``main_grad`` is an attribute of the parameter, a tensor of its shape and device: float32, for a float64 parameter
  float64. Whoever trains makes it, zeroes it, and reads the gradient there. ``weight.grad`` stays None.
- A parameter that has the attribute ``grad_added_to_main_grad`` gets True in it, and a gradient without meaning in
  ``weight.grad``: Megatron's DistributedDataParallel wants one, so that its hooks run on the backward pass's own
  thread, and drops it there. Its values are not set, or zero where ``weight.zero_out_wgrad`` is true: for a weight
  that gets another gradient too, as one tied to an embedding does; the hook then adds ``weight.grad`` to ``main_grad``.
- Uses of one weight in a step add up, if they are on one stream: the engine orders no two of them.

``Delayed`` in place of a parameter leaves the gradient for later (:mod:`tpkernels.ops._delayed`).

What a call gives is handed to the operation's ``setup_context`` on the same thread, and stays on its node of the
autograd graph; ``main_grad`` is looked up in the backward pass. A graph that torch.compile makes has no parameters, but
tensors: there ``main_grad`` is looked up in the forward pass, at every call, and is an argument of the operation, as
are ``main_grad_of``, its weight's number, and ``stand_ins``, whether that gets a gradient of zeros. Different then:

- ``grad_added_to_main_grad`` is True from the forward pass on.
- The compiled backward pass adds to ``main_grad`` also where ``torch.autograd.grad`` asks for other gradients alone.
- A gradient that is left for later breaks the graph.
- torch 2.11 does not notice a ``main_grad`` that a parameter gets when its graph is made already: give it one before,
  make the layer with ``gradient_accumulation_fusion=True``, or call ``torch._dynamo.reset()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from tpkernels.ops._collectives import accumulate_dtype


def checked(parameter: Tensor, name: str = "weight") -> Tensor:
    """The parameter's ``main_grad``, or an error that says what is wrong with it."""
    main_grad = getattr(parameter, "main_grad", None)
    dtype = accumulate_dtype(parameter.dtype)
    if not isinstance(main_grad, Tensor):
        raise ArgumentError(
            f"{name}.main_grad: its gradient was asked to be added to main_grad, but that is "
            f"{'missing' if main_grad is None else repr(main_grad)}; set {name}.main_grad = "
            f"torch.zeros_like({name}, dtype={dtype}) before the forward pass and keep it for the backward pass."
        )
    if main_grad.shape != parameter.shape:
        raise ShapeError(
            f"{name}.main_grad: expected {name}'s shape {list(parameter.shape)}, got {list(main_grad.shape)}."
        )
    if main_grad.dtype != dtype:
        raise DTypeError(
            f"{name}.main_grad: expected {dtype} for a parameter of {parameter.dtype}, got {main_grad.dtype}; make it "
            "so, or make the layer with gradient_accumulation_fusion=False and add weight.grad to it."
        )
    if main_grad.device != parameter.device:
        raise DeviceError(
            f"{name}.main_grad: expected device {parameter.device} as {name}'s, got {main_grad.device}; move it there."
        )
    if getattr(parameter, "overwrite_main_grad", False):
        raise ArgumentError(
            f"{name}.overwrite_main_grad: gradients are added to main_grad and never replace it, but it is true; "
            "leave it out, and zero main_grad before a step."
        )
    return main_grad


@dataclass(frozen=True)
class Delayed:
    """The gradient of ``parameter`` is left for later, and ``later(parameter, fused, left, right, path)`` told of what.

    ``fused``: it will go to ``main_grad``.
    """

    parameter: Tensor
    fused: bool
    later: Callable[[Tensor, bool, Tensor, Tensor, str], None]


Sink = Tensor | Delayed


def operand(parameter: Tensor, sink: Sink | None) -> Tensor:
    """The parameter as the product takes its ``.t()``.

    One whose gradient is delayed is a leaf of its own there: ``backward()`` then does not come to the parameter's
    accumulator, whose hooks, such as those of DistributedDataParallel, run when the gradient is made.
    """
    return parameter.detach().requires_grad_() if isinstance(sink, Delayed) else parameter


def accumulate(parameter: Any, left: Tensor, right: Tensor, path: str) -> Tensor | None:
    """``main_grad.t() += left @ right``; returns what the parameter gets for a gradient, which stands for it."""
    torch.ops.tpkernels.matmul_accumulate(left, right, checked(parameter).detach().t(), path)
    return _stand_in(parameter)


def add(parameter: Any, grad: Tensor) -> Tensor | None:
    """``main_grad += grad``; returns as :func:`accumulate`."""
    checked(parameter).add_(grad)
    return _stand_in(parameter)


def _stand_in(parameter: Any) -> Tensor | None:
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
    return make(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class Target(NamedTuple):
    """Where the gradient of ``b``, which is the parameter's ``.t()``, goes; ``node`` is b's in the autograd graph.

    In a compiled graph, whose backward pass makes all gradients, there are ``main_grad`` and ``stand_in`` instead.
    """

    sink: Tensor | Delayed | None
    node: Any
    main_grad: Tensor | None = None
    stand_in: bool = False

    def add(self, left: Tensor, right: Tensor, path: str) -> Tensor | None:
        """Takes ``left @ right``; returns what ``b`` gets for a gradient."""
        if not self.wanted():
            return None
        if isinstance(self.sink, Delayed):
            self.sink.later(self.sink.parameter, self.sink.fused, left, right, path)
            return None
        torch.ops.tpkernels.matmul_accumulate(left, right, self.into(), path)
        return self.added(left)

    def into(self) -> Tensor:
        """``main_grad.mT``, for those who add to it themselves. Not where the gradient is delayed."""
        main_grad = checked(self._parameter()) if self.main_grad is None else self.main_grad
        return main_grad.detach().mT

    def added(self, like: Tensor) -> Tensor | None:
        """What ``b`` gets for a gradient when that was added to :meth:`into`."""
        if self.main_grad is None:
            grad = _stand_in(self._parameter())
        else:
            grad = torch.zeros_like(self.main_grad, dtype=like.dtype) if self.stand_in else None
        return None if grad is None else grad.mT.to(like.dtype)

    @property
    def delayed(self) -> bool:
        return isinstance(self.sink, Delayed)

    @property
    def compiled(self) -> bool:
        """Whether ``main_grad`` is an argument of the operation."""
        return self.main_grad is not None

    def _parameter(self) -> Tensor:
        assert isinstance(self.sink, Tensor)
        return self.sink

    def wanted(self) -> bool:
        """Whether this backward pass makes the gradient, as opposed to torch.autograd.grad(loss, [x])."""
        if self.node is not None and not torch._C._will_engine_execute_node(self.node):
            return False
        if torch.is_grad_enabled():
            raise ArgumentError(
                f"create_graph: a gradient that is {_how(self.sink)} cannot be differentiated again, but "
                f"create_graph is true; {_way_out(self.sink)}."
            )
        return True


def _how(sink: Sink | None) -> str:
    return "delayed" if isinstance(sink, Delayed) else "added to main_grad"


def _way_out(sink: Sink | None) -> str:
    if isinstance(sink, Delayed):
        return "set layer.delay_wgrad = False before the forward pass"
    return (
        "delete main_grad before the forward pass, or make the layer with gradient_accumulation_fusion=False"
    )


_handed: ContextVar[Sequence[Target | None]] = ContextVar("_handed", default=())


NOWHERE = (None, None, None)  # main_grads, main_grad_of and stand_ins of a call that adds to none


def taken(
    bs: Sequence[Tensor],
    main_grads: Sequence[Tensor] | None,
    main_grad_of: Sequence[int] | None,
    stand_ins: Sequence[bool] | None,
) -> list[Target | None]:
    """For ``setup_context``, with the last arguments of the call that is being made: one entry per weight."""
    made = list(_handed.get()) or [None] * len(bs)
    for main_grad, i, stand_in in zip(main_grads or (), main_grad_of or (), stand_ins or (), strict=True):
        _save_unversioned(main_grad)
        made[i] = Target(None, None, main_grad, stand_in)
    return made


def _save_unversioned(main_grad: Tensor) -> None:
    """Others may add to it between the passes: a graph that is being made is to save it without its version.

    What torch (2.11 to 2.14) does for tensors that an autograd.Function keeps in ``ctx`` without save_for_backward.
    """
    from torch.fx.experimental.proxy_tensor import _get_proxies

    for proxy in _get_proxies(main_grad):
        proxy.node.meta["saved_tensor_with_no_vc_check"] = True


Parameters = Sink | Sequence[Sink | None] | None


def listed(main_grad_of: Parameters, bs: Sequence[Tensor]) -> list[Sink | None] | None:
    """One parameter or None per weight, each fitting its weight; None if there is none at all."""
    if main_grad_of is None:
        return None
    parameters: list[Sink | None] = (
        [main_grad_of] if isinstance(main_grad_of, (Tensor, Delayed)) else list(main_grad_of)
    )
    if len(parameters) != len(bs):
        raise ArgumentError(
            f"main_grad_of: expected one parameter (or None) per weight, {len(bs)} in all, got {len(parameters)}."
        )
    for i, (sink, b) in enumerate(zip(parameters, bs, strict=True)):
        if sink is None:
            continue
        p = sink.parameter if isinstance(sink, Delayed) else sink
        t = p.mT if p.dim() > 1 else p
        if p.dim() < 2 or t.shape != b.shape or (p.dtype == b.dtype and t.stride() != b.stride()):
            raise ShapeError(
                f"main_grad_of[{i}]: b must be the parameter's .{'t()' if p.dim() < 3 else 'mT'}, {list(t.shape)} with "
                f"strides {list(t.stride())}, got {list(b.shape)} with strides {list(b.stride())}."
            )
        fused = not isinstance(sink, Delayed) or sink.fused
        if fused and torch.is_grad_enabled() and b.requires_grad:
            checked(p, f"main_grad_of[{i}]")
    return parameters if any(p is not None for p in parameters) else None


def call(op: Callable[..., Any], args: Sequence[Any], parameters: list[Sink | None] | None) -> Any:
    """``op(*args)``, whose second argument is the list of weights; ``parameters``: what :func:`listed` returned."""
    if parameters is None:
        return op(*args, *NOWHERE)
    if torch.compiler.is_compiling() and not any(isinstance(p, Delayed) for p in parameters):
        return op(*args, *_as_arguments(args[1], parameters))
    return _call(op, args, parameters)


def targets(bs: Sequence[Tensor], parameters: Sequence[Sink | None]) -> list[Target | None]:
    """One entry per weight, for an operation that keeps them on its node itself."""
    if not torch.compiler.is_compiling():
        return [
            None if p is None or b.grad_fn is None else Target(p, b.grad_fn)
            for p, b in zip(parameters, bs, strict=True)
        ]
    made: list[Target | None] = [None] * len(bs)
    for main_grad, i, stand_in in zip(*_as_arguments(bs, parameters), strict=True):
        made[i] = Target(None, None, main_grad, stand_in)
    return made


def target_of(parameter: Tensor) -> Target:
    """For those who make the gradient of a parameter, a leaf, themselves."""
    given = targets([parameter], [parameter])[0] if torch.compiler.is_compiling() else None
    return given or Target(parameter, None)


def _as_arguments(
    bs: Sequence[Tensor], parameters: Sequence[Any]
) -> tuple[list[Tensor], list[int], list[bool]]:
    """``main_grads``, ``main_grad_of`` and ``stand_ins``."""
    number = [i for i, b in enumerate(bs) if parameters[i] is not None and b.requires_grad]
    stand_ins = [hasattr(parameters[i], "grad_added_to_main_grad") for i in number]
    if torch.is_grad_enabled():
        for i, stand_in in zip(number, stand_ins, strict=True):
            if stand_in:
                parameters[i].grad_added_to_main_grad = True
    return [parameters[i].main_grad for i in number], number, stand_ins


@torch.compiler.disable(reason="tpkernels leaves weight gradients for later outside of compiled graphs only")
def _call(op: Callable[..., Any], args: Sequence[Any], parameters: list[Sink | None]) -> Any:
    token = _handed.set(targets(args[1], parameters))
    try:
        return op(*args, *NOWHERE)
    finally:
        _handed.reset(token)
