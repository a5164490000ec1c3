"""Constants of the cost model that were fitted on this machine, taken by the planners of this process."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from tpkernels import _extensions
from tpkernels.ops import _plans

if TYPE_CHECKING:
    from tpkernels.tune.store import Store

PORTABLE = ("sm80", "sm90-portable")  # the portable CUDA kernel on Ampere, and on later GPUs


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """Kernels that a device has, by whose constants they are; the one that half precision gets first."""
    architecture = _plans.machine_of(device.type, device).architecture
    return (architecture, "sm90-portable") if architecture == "sm90" else (architecture,)


def read(kind: str) -> dict[str, float]:
    """Those that plans are made with now, by name."""
    lines = torch.ops.tpkernels.plan_cost(kind).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def use(kind: str, constants: dict[str, float] | None) -> None:
    """Plan with these from now on, in launches too; None: with those that the package came with.

    Raises:
        RuntimeError: names or numbers that the cost model does not have.
    """
    text = "".join(f"{name} {value!r}\n" for name, value in (constants or {}).items())
    torch.ops.tpkernels.set_plan_cost(kind, text)
    if kind in PORTABLE and _extensions.is_loaded("_C_sm80"):
        torch.ops.tpkernels.sm80_set_cost(kind, text)
    if kind == "sm90" and _extensions.is_loaded("_C_sm90a"):
        torch.ops.tpkernels.sm90a_set_cost(text)


def take(store: Store, device: torch.device) -> None:
    """Use what ``tpk calibrate`` has found for a device, if it has."""
    for kind in kinds_of(device):
        found = store.constants(kind)
        if found is not None:
            _take(store, kind, found)


def _take(store: Store, kind: str, found: dict[str, Any]) -> None:
    try:
        use(kind, {n: float(v) for n, _, v in (x.rpartition(" ") for x in found["text"].splitlines())})
    except (RuntimeError, ValueError) as error:
        sentence = str(error).strip().splitlines()[0]
        warnings.warn(
            f"tpkernels' tuning cache: constants of {store.path} are not used: {sentence}",
            RuntimeWarning,
            stacklevel=2,
        )
