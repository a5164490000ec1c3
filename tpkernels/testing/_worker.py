"""The process behind one rank of a RankPool: joins the groups, then serves tasks until the pool closes its pipe."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import random
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tpkernels.testing._messages import Result, Task, load_function


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker needs to join: the store is served by the pool's process at 127.0.0.1:port."""

    rank: int
    size: int
    backend: str
    share_gpu: bool
    port: int
    collective_timeout_s: float
    stack_file: str
    env: dict[str, str]


@dataclass(frozen=True)
class RankContext:
    """What a function run by ``RankPool.run`` gets first: its place among the ``world`` ranks of this run.

    ``group`` holds exactly the ranks 0..world-1 and ``group_name`` is the string that ops take. The process's default
    group spans the whole pool: pass ``ctx.group`` unless ``world`` is the pool's size. ``device`` is cpu, or cuda:rank
    (cuda:0 where the ranks share a GPU).
    """

    rank: int
    world: int
    group: dist.ProcessGroup
    group_name: str
    device: torch.device
    backend: str

    def barrier(self) -> None:
        """Wait until every rank of this run is here."""
        dist.barrier(group=self.group)


def worker_main(config: WorkerConfig, pipe: Connection) -> None:
    """Entry point of the process: report readiness as an empty Result, then answer each Task with a Result."""
    os.environ.update(config.env)
    # The file stays open for as long as the process lives: faulthandler keeps only its descriptor.
    stack_file = open(config.stack_file, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        contexts = _join(config)
    except BaseException as exc:
        pipe.send_bytes(pickle.dumps(_failure(exc)))
        return
    pipe.send_bytes(pickle.dumps(Result(value=None)))
    while True:
        try:
            task: Task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        pipe.send_bytes(pickle.dumps(_serve(task, contexts[task.world])))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def device_of(config: WorkerConfig) -> torch.device:
    """Where the rank computes."""
    if config.share_gpu:
        return torch.device("cuda", 0)
    return torch.device("cuda", config.rank) if config.backend == "nccl" else torch.device("cpu")


def _join(config: WorkerConfig) -> dict[int, RankContext]:
    """Enter the default group and one subgroup for every world size from this rank on; {world: context}."""
    device = device_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    store = TCPStore("127.0.0.1", config.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        config.backend, store=store, rank=config.rank, world_size=config.size, timeout=timeout
    )
    contexts = {}
    for world in range(1, config.size + 1):
        # Every process makes every group, in one order, also those it is no member of: torch demands it.
        group = dist.new_group(list(range(world)), timeout=timeout)
        if isinstance(group, dist.ProcessGroup):  # Otherwise this rank is no member.
            name = group.group_name
            contexts[world] = RankContext(config.rank, world, group, name, device, config.backend)
    return contexts


def _serve(task: Task, ctx: RankContext) -> Result:
    try:
        fn = load_function(task)
        args = pickle.loads(task.payload)
        torch.manual_seed(task.seed)
        if task.jitter > 0:
            time.sleep(random.uniform(0, task.jitter))
        return Result(value=pickle.dumps(to_cpu(fn(ctx, *args))))
    except BaseException as exc:
        return _failure(exc)


def _failure(exc: BaseException) -> Result:
    try:
        pickled = pickle.dumps(exc)
        pickle.loads(
            pickled
        )  # Many exceptions pickle but cannot be rebuilt; the traceback text then has to do.
    except Exception:
        pickled = None
    text = "".join(traceback.format_exception(exc))
    return Result(None, type(exc).__qualname__, str(exc), text, pickled)


def to_cpu(value: Any) -> Any:
    """``value`` with each tensor in lists, tuples and dicts detached and on the CPU, fit to be sent off."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_cpu(item) for item in value]
    if isinstance(value, tuple):
        items = [to_cpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _exit_with_parent(parent: int) -> None:
    """A rank stuck in a collective never sees its pipe close; do not outlive the pool's process."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
