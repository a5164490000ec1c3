"""What travels between a RankPool and its worker processes, and how a worker finds a test's function.

A task names its function by (module, file, qualname) instead of pickling it: test files have no package and may share
a base name, so that a plain ``import`` in the worker could find nothing, or another file. The arguments travel as
pickled bytes that are only opened once that module is loaded, so they may hold instances of its classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Task:
    """One call for one rank. ``jitter`` (seconds) delays the start at random; ``seed`` is torch's, on all ranks."""

    module: str
    file: str | None
    qualname: str
    payload: bytes
    world: int
    sys_path: tuple[str, ...]
    seed: int
    jitter: float


@dataclass(frozen=True)
class Result:
    """A rank's answer: ``value`` (pickled) or, if ``traceback`` is set, the exception (pickled where it can be)."""

    value: bytes | None
    exc_type: str = ""
    exc_text: str = ""
    traceback: str = ""
    exception: bytes | None = None


def make_task(fn: Callable[..., Any], args: tuple[Any, ...], world: int, seed: int, jitter: float) -> Task:
    """Describe the call ``fn(ctx, *args)``; TypeError if a fresh process could not find ``fn``."""
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or "<" in qualname:
        raise TypeError(
            f"fn must be a function defined at the top level of a module (the ranks import it by name), got {fn!r}. "
            "Move it to module level and pass what it captures as arguments."
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    return Task(module, file, qualname, pickle.dumps(args), world, tuple(sys.path), seed, jitter)


def load_function(task: Task) -> Callable[..., Any]:
    """The task's function in this process, importing its module by name or, failing that, by path."""
    for entry in task.sys_path:
        if entry not in sys.path:
            sys.path.append(entry)
    target: Any = _load_module(task.module, task.file)
    for part in task.qualname.split("."):
        target = getattr(target, part)
    function: Callable[..., Any] = target
    return function


def _load_module(name: str, file: str | None) -> ModuleType:
    loaded = sys.modules.get(name)
    if loaded is not None and (name == "__main__" or _same_file(loaded, file)):
        return loaded
    if loaded is None:
        try:
            found = importlib.import_module(name)
        except ImportError:
            if file is None:
                raise
        else:
            if _same_file(found, file):
                return found
    if file is None:
        raise ImportError(f"the module {name!r} has no file, so a worker process cannot load it")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"the worker cannot load the module {name!r} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _same_file(module: ModuleType, file: str | None) -> bool:
    own = getattr(module, "__file__", None)
    if file is None or own is None:
        return file is None
    return bool(os.path.realpath(own) == os.path.realpath(file))
