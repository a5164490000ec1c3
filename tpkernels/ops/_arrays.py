"""Arrays of other libraries: taken through DLPack as torch tensors, without a copy, and given back as they were."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.utils.dlpack
from torch import Tensor

from tpkernels.errors import ArgumentError, DTypeError

F = TypeVar("F", bound=Callable[..., Any])


def tensor(name: str, value: Any) -> Tensor:
    """A dense torch tensor: itself, or a view of any array that speaks DLPack (CuPy, NumPy, JAX)."""
    if not isinstance(value, Tensor):
        if not hasattr(value, "__dlpack__"):
            raise DTypeError(
                f"{name}: expected a torch.Tensor or an array with DLPack support, got {type(value).__name__}."
            )
        strides = getattr(value, "strides", None)
        try:
            if isinstance(strides, tuple) and any(stride < 0 for stride in strides):
                raise BufferError("it has negative strides")  # torch 2.11 would abort the process
            value = torch.utils.dlpack.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:  # negative strides, byte order, objects
            raise DTypeError(
                f"{name}: the {type(value).__name__} cannot be shared through DLPack "
                f"({str(error).splitlines()[0]}); pass a contiguous copy in native byte order."
            ) from error
    out: Tensor = value
    if out.layout != torch.strided:
        raise ArgumentError(
            f"{name}: expected a dense (strided) tensor, got layout {out.layout}; call .to_dense()."
        )
    return out


def gives_back(operation: F) -> F:
    """An operation whose results are of the library that its arrays are of; torch's, if one of them is a tensor.

    It runs on that library's current stream, where it has one: what was enqueued there before is done first, and the
    memory of results is of that stream.
    """

    @functools.wraps(operation)
    def run(*args: Any, **options: Any) -> Any:
        if isinstance(args[0] if args else None, Tensor):  # also what torch.compile sees
            return operation(*args, **options)
        arrays = [x for x in _each((*args, *options.values())) if hasattr(x, "__dlpack__")]
        if not arrays or any(isinstance(x, Tensor) for x in arrays):
            return operation(*args, **options)
        library = _library(arrays[0])
        with _stream(library, arrays[0]):
            out = operation(*args, **options)
            return _map(out, lambda x: _given_back(library, arrays[0], x))

    return run  # type: ignore[return-value]


def _each(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _map(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(x, change) for x in value)
    return change(value) if isinstance(value, Tensor) else value


def _library(array: Any) -> ModuleType | None:
    """Its namespace by the array API standard, which can take arrays over, or its package; None: neither."""
    namespace = getattr(array, "__array_namespace__", None)  # arrays of CuPy have none
    return sys.modules.get(type(array).__module__.partition(".")[0]) if namespace is None else namespace()


def _given_back(library: ModuleType | None, like: Any, result: Tensor) -> Any:
    take = getattr(library, "from_dlpack", None)
    if take is None:
        return result
    try:
        return take(result.detach())
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # numpy has no bfloat16
        raise DTypeError(
            f"out_dtype: the result is {result.dtype}, which {type(like).__module__} cannot take "
            f"({str(error).splitlines()[0]}); ask for another out_dtype, or pass torch tensors."
        ) from error


def _stream(library: ModuleType | None, array: Any) -> AbstractContextManager[Any]:
    """The library's current stream as torch's. Only CuPy has one."""
    if library is None or library.__name__.partition(".")[0] != "cupy":
        return nullcontext()
    with array.device:
        pointer = library.cuda.get_current_stream().ptr
    device = torch.device("cuda", array.device.id)
    if pointer == 0:
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer, device=device))
