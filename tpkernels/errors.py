"""Every exception that tpkernels raises on its own account.

Each message is a sentence that names the argument, what was expected, what came, and what to do.
All classes derive from :class:`TpkError` and from the built-in exception that fits, so both
``except tpkernels.errors.ShapeError`` and ``except ValueError`` work.
"""

from __future__ import annotations


class TpkError(Exception):
    """Base class of all errors raised by tpkernels."""


class ArgumentError(TpkError, ValueError):
    """An argument has a value that is not allowed (unknown activation, unknown path, bad dimension)."""


class ShapeError(ArgumentError):
    """The shapes of two arguments do not fit each other."""


class DTypeError(TpkError, TypeError):
    """An argument has a dtype (or type) that the operation does not take."""


class DeviceError(TpkError, ValueError):
    """Tensors lie on different devices, or on one that the process group cannot reach."""


class GroupError(TpkError, ValueError):
    """The process group is unknown, or this rank is not a member of it."""


class AliasError(TpkError, ValueError):
    """A tensor that is written to shares memory with one that is read (or with itself)."""


class MismatchError(TpkError, RuntimeError):
    """Ranks of one group called an operation with arguments that do not fit (``TPK_CHECK=1``)."""


class BackendError(TpkError, RuntimeError):
    """The requested path needs a compiled extension or hardware that is not there."""


class CommTimeoutError(TpkError, RuntimeError):
    """A call on path "fused", or of a layer on a grid, waited too long for a rank; the message says for which.

    Its results must not be used. On path "fused" the kernel was stopped, and CUDA does not work again in this process:
    end it. On a grid, as with any collective that timed out, the group is of no more use.
    """
