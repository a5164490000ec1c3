"""The grouped product: semantics and errors are those of :mod:`tpkernels.ops.api`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.errors import ArgumentError
from tpkernels.ops import _grouped, _main_grad, api
from tpkernels.ops import _grouped_grads as _register  # noqa: F401 - registers the ops
from tpkernels.ops._arrays import gives_back, tensor


@gives_back
def grouped_matmul(
    a: Tensor,
    b: Tensor,
    group_sizes: Sequence[int] | Tensor | None = None,
    *,
    offs: Sequence[int] | Tensor | None = None,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    save_preact: bool = True,
    main_grad_of: _main_grad.Parameters = None,
    path: str = "auto",
) -> Tensor:
    """``activation(a_g @ b[g] + bias[g])``, or with a gate ``activation(a_g @ gate[g]) * (a_g @ b[g])``, for every
    group of rows ``a_g`` of ``a``: experts and their tokens.

    ``group_sizes[0]`` rows of ``a`` belong to ``b[0]``, the next ``group_sizes[1]`` to ``b[1]``, and so on::

        h = tpk.grouped_matmul(tokens, up.mT, [300, 0, 212], gate=gate.mT, activation="silu")  # up [3, out, in]
        y = tpk.grouped_matmul(h, down.mT, [300, 0, 212])

    Without a gate what ``torch.nn.functional.grouped_mm(a, b, offs=offs)`` computes for these shapes; docs/grouped.md
    compares them.

    Args:
        a: [rows of all groups, K].
        b: [groups, K, N], any strides. Weights stored [groups, out, in] are passed as ``weight.mT``.
        group_sizes: rows of every group, 0 allowed, which add up to those of ``a``: integers, or a tensor of them. The
            launch is planned by the host: a CUDA tensor costs a wait for the device, and cannot be read while a CUDA
            graph is captured, which keeps the sizes that it was captured with.
        offs: where every group ends, in place of ``group_sizes``, as ``grouped_mm`` takes it; the last is a's rows.
        gate: shape and dtype of ``b``. The activation applies to its product alone. Takes no bias.
        bias: [groups, N], or [N] for all of them; dtype of ``a``.
        activation, out_dtype: as in :func:`tpkernels.matmul`.
        save_preact: as in :func:`tpkernels.matmul`: keep for the backward pass what it needs of the products (default),
            or compute it again there. Where both products of a gated call are kept, path "streamk" makes them apart, in
            two launches and torch operations; without gradients, or with False, it is one launch.
        main_grad_of: the stacked parameter [groups, N, K] whose ``.mT`` is ``b``, with a gate a list of it and the
            gate's, see :mod:`tpkernels.ops.api`.
        path: "auto", "streamk" (one list of tiles, and one launch, for all groups on Hopper, for operands that TMA
            takes; elsewhere a product for each), "cublas" or "blas" (a product of the library for each).

    Returns:
        [rows of all groups, N]. Gradients for a, b, gate and bias, which can be differentiated again.
    """
    a, b = tensor("a", a), tensor("b", b)
    gate = None if gate is None else tensor("gate", gate)
    bias = None if bias is None else tensor("bias", bias)
    sizes = _grouped.sizes_of(group_sizes, offs)
    api._check_options(path, activation, out_dtype)
    parameters = [main_grad_of] if isinstance(main_grad_of, (Tensor, _main_grad.Delayed)) else main_grad_of
    if any(isinstance(p, _main_grad.Delayed) for p in parameters or ()):
        raise ArgumentError(
            "main_grad_of: gradients of grouped weights cannot be delayed; pass the parameter."
        )
    into = _main_grad.listed(parameters, [b] if gate is None else [b, gate])
    a, b, gate, bias = api._autocast(a, b, gate, bias)
    if bias is not None and bias.dim() == 1:
        bias = bias.expand(b.shape[0], -1)
    name = activation or "none"
    keep = api.keeps_preact(name, save_preact, a, b, gate, bias, gated=gate is not None)

    def call(a: Tensor, bs: Sequence[Tensor]) -> list[Tensor]:
        out: list[Tensor] = torch.ops.tpkernels.grouped_matmul(
            a, *bs, *([None] * (2 - len(bs))), bias, sizes, name, out_dtype, keep, path
        )
        return out

    return _main_grad.call(call, (a, [b] if gate is None else [b, gate]), into)[0]  # type: ignore[no-any-return]
