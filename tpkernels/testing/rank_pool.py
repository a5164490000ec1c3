"""RankPool: processes started once that run test functions as the ranks of a process group."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tpkernels.testing._messages import Result, make_task
from tpkernels.testing._worker import WorkerConfig, worker_main

# Several ranks on one GPU: without the first, symmetric memory refuses that. No multicast, as everywhere here.
SHARED_GPU_ENV = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}


class RankError(RuntimeError):
    """A function raised on one or more ranks.

    ``rank`` is the first that reported, ``exc_type`` its exception's class name, ``failures`` maps every failed rank to
    its traceback text. ``__cause__`` is the original exception where it could be pickled.
    """

    def __init__(
        self, message: str, rank: int, exc_type: str = "", failures: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exc_type = exc_type
        self.failures = dict(failures or {})


class RankTimeoutError(RankError, TimeoutError):
    """Ranks did not answer in time; the message names them and shows where each one stood."""


class RankDiedError(RankError):
    """The process of a rank ended (exit code or signal in the message)."""


class RankPool:
    """``size`` processes that run functions as ranks; started at the first ``run``, restarted after a hang or a death.

    Args:
        size: number of processes, so the largest world a run may ask for.
        backend: "gloo" (CPU tensors) or "nccl" (rank r on cuda:r; needs ``size`` GPUs).
        share_gpu: with "gloo", every rank computes on cuda:0, and symmetric memory may be mapped between them. The
            processes take turns on the GPU by time slices, so a kernel that waits for another rank costs milliseconds:
            small problems, long timeouts, and no conclusions about speed.
        timeout: default limit of one run, seconds.
        start_timeout: limit for the start of all processes, seconds.
        seed: torch's seed in every rank at the start of every run (equal on all ranks).
        env: environment variables set in the workers before they join.
        start_method: "spawn", or "forkserver": one process loads the package and forks the ranks. 16 ranks on 2 cores
            start in 4 s, not 50. For CPU ranks: what is read from the environment when the package is loaded must be
            there when this process makes its first such pool.

    Example::

        def double(ctx, x):                       # module level, in a test file
            dist.all_reduce(x, group=ctx.group)
            return x

        with RankPool(4) as pool:
            out = pool.run(double, torch.ones(2), world=2)   # [tensor of 2s, tensor of 2s]
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        *,
        share_gpu: bool = False,
        timeout: float = 60.0,
        start_timeout: float = 120.0,
        seed: int = 0,
        env: Mapping[str, str] | None = None,
        start_method: str = "spawn",
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1 process, got {size}")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be 'gloo' or 'nccl', got {backend!r}")
        if share_gpu and backend != "gloo":
            raise ValueError(
                f"share_gpu needs the backend 'gloo', got {backend!r}: NCCL refuses two ranks on one GPU"
            )
        if start_method not in ("spawn", "forkserver"):
            raise ValueError(f"start_method must be 'spawn' or 'forkserver', got {start_method!r}")
        if start_method == "forkserver" and (backend != "gloo" or share_gpu):
            raise ValueError("start_method 'forkserver' is for CPU ranks: backend 'gloo' without share_gpu")
        self.start_method = start_method
        self.size = size
        self.backend = backend
        self.share_gpu = share_gpu
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.seed = seed
        self.starts = 0
        self._env = {**(SHARED_GPU_ENV if share_gpu else {}), **(env or {})}
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None
        self._folder = ""

    def start(self) -> None:
        """Start the processes and wait until all have joined; does nothing if they run. Raises RankError."""
        if self._processes:
            return
        self.starts += 1
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout: float | None = None,
        jitter: float = 0.0,
        grace: float = 3.0,
    ) -> list[Any]:
        """Call ``fn(ctx, *args)`` on ranks 0..world-1 and return their results, one per rank.

        Args:
            fn: function at the top level of a module; ``ctx`` is a RankContext. Result tensors come back on the CPU.
            args: anything picklable; each rank gets its own copy.
            world: number of ranks (None: all of the pool).
            timeout: seconds until a rank that has not answered counts as hung (None: the pool's).
            jitter: each rank first sleeps up to this many seconds at random.
            grace: seconds the other ranks get once one has failed; after that they count as waiting for it in vain.

        Raises:
            RankError: a rank raised. The pool lives on if every rank raised one type of exception, and none that CUDA
                does not survive; else it restarts.
            RankTimeoutError, RankDiedError: a rank hung or died; the pool is killed and the next run restarts it.
        """
        world = self.size if world is None else world
        if not 1 <= world <= self.size:
            raise ValueError(f"world must be from 1 to the pool's size {self.size}, got {world}")
        task = pickle.dumps(make_task(fn, args, world, self.seed, jitter))
        self.start()
        what = fn.__qualname__
        for rank in range(world):
            # A worker that died since the last run has closed its pipe; _collect reports it through its sentinel.
            with contextlib.suppress(OSError):
                self._pipes[rank].send_bytes(task)
        answers = self._collect(world, self.timeout if timeout is None else timeout, what=what, grace=grace)
        if any(answer.traceback for answer in answers.values()):
            kinds = {answer.exc_type for answer in answers.values() if answer.traceback}
            if (
                len(kinds) > 1
                or len(answers) < world
                or not all(answer.traceback for answer in answers.values())
                or any(_is_spent(answer) for answer in answers.values())
            ):
                # Some ranks went further than others, so their collectives no longer match; or CUDA is lost.
                self.close()
            self._raise_failure(answers, what)
        return [pickle.loads(answers[rank].value or b"") for rank in range(world)]

    def close(self) -> None:
        """End the processes. A later run starts them again."""
        processes, pipes = self._processes, self._pipes
        # First of all, so that an interrupt below leaves a pool that starts afresh.
        self._processes, self._pipes, self._store = [], [], None
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in processes:
            process.kill()
        for process in processes:
            process.join(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="tpk-ranks-")
        # This process serves the store on a port the system chooses: no race for it, and no rank takes it along.
        wait = datetime.timedelta(seconds=self.start_timeout)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        # All ranks are on this host; without this, gloo needs the host's own name to resolve.
        loopback = os.path.isdir("/sys/class/net/lo") and "GLOO_SOCKET_IFNAME" not in os.environ
        env = {"GLOO_SOCKET_IFNAME": "lo"} if loopback else {}
        env.update(self._env)
        context = self._context()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            config = WorkerConfig(
                rank,
                self.size,
                self.backend,
                self.share_gpu,
                self._store.port,
                self.start_timeout + 600,
                self._stack_file(rank),
                env,
            )
            process = context.Process(
                target=worker_main, args=(config, theirs), name=f"rank{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        answers = self._collect(self.size, self.start_timeout, what="the start of the pool", grace=5.0)
        if any(answer.traceback for answer in answers.values()):
            self._raise_failure(answers, "the start of the pool")

    def _context(self) -> Any:
        context = multiprocessing.get_context(self.start_method)
        if self.start_method == "forkserver":
            context.set_forkserver_preload([worker_main.__module__])
        return context

    def _collect(self, world: int, timeout: float, *, what: str, grace: float) -> dict[int, Result]:
        """Answers of ranks 0..world-1 in the order they came; not all if one failed and others are stuck."""
        try:
            return self._wait_for_answers(world, timeout, what, grace)
        except BaseException:
            # Also Ctrl-C and pytest-timeout: answers still on their way must not be taken for those of the next run.
            self.close()
            raise

    def _wait_for_answers(self, world: int, timeout: float, what: str, grace: float) -> dict[int, Result]:
        deadline = time.monotonic() + timeout
        failed = False
        answers: dict[int, Result] = {}
        while len(answers) < world:
            waiting = [rank for rank in range(world) if rank not in answers]
            sources: dict[Any, int] = {self._pipes[rank]: rank for rank in waiting}
            sources |= {self._processes[rank].sentinel: rank for rank in waiting}
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(sources), max(left, 0.0))
            if not ready:
                if failed:
                    return answers
                self._raise_timeout(waiting, timeout, what)
            for rank in sorted({sources[source] for source in ready}):
                # The pipe first: a process may answer and then end.
                answer = self._receive(rank)
                if answer is None:
                    self._raise_died(rank, what, answers)
                else:
                    answers[rank] = answer
                    if answer.traceback and not failed:
                        failed = True
                        deadline = min(deadline, time.monotonic() + grace)
        return answers

    def _receive(self, rank: int) -> Result | None:
        """The message waiting in a rank's pipe, or None if the process is gone."""
        try:
            if self._pipes[rank].poll(0):
                result: Result = pickle.loads(self._pipes[rank].recv_bytes())
                return result
        except (EOFError, OSError):
            pass
        return None

    def _raise_failure(self, answers: Mapping[int, Result], what: str) -> NoReturn:
        failures = {rank: answer for rank, answer in answers.items() if answer.traceback}
        rank, first = next(iter(failures.items()))
        stuck = [r for r in range(max(answers) + 1) if r not in answers]
        parts = [
            f"{what}: rank {rank} raised {first.exc_type}: {first.exc_text}",
            f"[rank {rank}] {first.traceback}",
        ]
        shown = {first.traceback.splitlines()[-1]}
        for other, answer in failures.items():
            last = answer.traceback.splitlines()[-1]
            if other != rank:
                parts.append(f"[rank {other}] {last if last in shown else answer.traceback}")
                shown.add(last)
        if stuck:
            parts.append(f"Ranks {stuck} had not finished and were ended.")
        error = RankError(
            "\n".join(parts), rank, first.exc_type, {r: f.traceback for r, f in failures.items()}
        )
        cause: BaseException | None = None
        if first.exception is not None:
            with contextlib.suppress(Exception):
                cause = pickle.loads(first.exception)
        raise error from cause

    def _raise_timeout(self, waiting: list[int], timeout: float, what: str) -> NoReturn:
        stacks = {rank: self._stack(rank) for rank in waiting}
        self.close()
        names = ", ".join(f"rank {rank}" for rank in waiting)
        text = "\n".join(f"[rank {rank}] stood at:\n{stack}" for rank, stack in stacks.items())
        message = f"{what}: {names} did not finish within {timeout:g} s; the pool was ended and will restart.\n{text}"
        raise RankTimeoutError(message, waiting[0], failures=stacks)

    def _raise_died(self, rank: int, what: str, answers: Mapping[int, Result]) -> NoReturn:
        self._processes[rank].join(2.0)
        code = self._processes[rank].exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        self.close()
        tracebacks = {r: answer.traceback for r, answer in answers.items() if answer.traceback}
        text = "".join(f"\n[rank {r}] {trace}" for r, trace in tracebacks.items())
        message = (
            f"{what}: the process of rank {rank} died ({how}); the pool was ended and will restart.{text}"
        )
        raise RankDiedError(message, rank, failures=tracebacks)

    def _stack_file(self, rank: int) -> str:
        return os.path.join(self._folder, f"rank{rank}.stack")

    def _stack(self, rank: int) -> str:
        """Ask a rank's faulthandler for its Python stacks; works while it is blocked in C++."""
        process = self._processes[rank]
        if process.pid is None or not process.is_alive() or not os.path.exists(self._stack_file(rank)):
            return "(no stack)"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        with open(self._stack_file(rank)) as file:
            return file.read() or "(no stack)"


def _is_spent(answer: Result) -> bool:
    """A CUDA error lasts as long as its process."""
    return answer.exc_type == "CommTimeoutError" or "CUDA error" in answer.traceback
