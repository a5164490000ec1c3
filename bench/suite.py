"""What a suite is made of. The engine (:mod:`.engine`) does the rest: order, timing, checks, rows.

A suite turns options into *cases* (an operation at one shape) and says which *variants* (implementations) there
are. For one case it makes a *workload*: inputs that all variants share. A workload prepares each variant into a
*runnable*: a function that launches one call, and a function that checks the result.

Everything runs on one CUDA stream that is not the default one; work for other libraries goes to
``torch.cuda.current_stream()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .records import Role, Row, Stats

if TYPE_CHECKING:
    from .context import Context
    from .lockstep import Report
    from .nvml import Sampler
    from .plan import Item, Job

    Runner = Callable[["Case", Item], list[Row]]

__all__ = ["Case", "Check", "Options", "Runnable", "Skip", "Suite", "Variant", "Workload"]


class Skip(Exception):
    """Raised by a workload or a variant that cannot run here; the message is the row's reason."""


@dataclass(frozen=True)
class Options:
    """What the user asked for; the suites read what concerns them.

    Attributes:
        device: "cuda" or "cpu". On the CPU everything runs, small, over gloo, to try the suite rather than to measure.
        world: number of ranks.
        dtypes: names such as "bfloat16".
        sets: names of shape sets, empty for the suite's default ones.
        models: names of models whose shapes are wanted (overlap, layer), empty for the default ones.
        rows: values of M wanted (overlap, layer), empty for the default ones.
        ops: operations wanted, empty for all.
        tiles: tiles that every schedule is forced on (gemm), empty for none.
        sweep: number of log-sampled shapes (gemm, sweep); 0 for none, or for as many as the suite sweep usually has.
        part: (i, n) for the i-th of n parts of them, counted from 1 (sweep).
        seed: of the sweep and of all data.
        small: tiny shapes: the default on CPU, and for trying things.
    """

    device: str = "cuda"
    world: int = 1
    dtypes: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()
    tiles: tuple[str, ...] = ()
    sweep: int = 0
    part: tuple[int, int] = (1, 1)
    seed: int = 0
    small: bool = False


@dataclass(frozen=True)
class Case:
    """An operation at one shape. ``name`` is unique within the suite for a dtype and world, stable between runs.

    ``flops`` and ``bytes`` are those of one call on one rank, 0 where they say nothing.
    """

    name: str
    op: str
    dtype: str
    params: Mapping[str, Any]
    shape_set: str = ""
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Variant:
    """An implementation.

    Attributes:
        what: one line for ``--list`` and the report.
        isolated: runs in processes of its own, beside the suite's baseline (measured again there, for the ratio),
            because it may hang, crash, or disturb others: any library that is not torch.
        time_limit: seconds that one of its steps (preparing, checking, capturing) may take where that is more than
            ``--time-limit``: compilation, say.
    """

    name: str
    role: Role
    what: str
    isolated: bool = False
    time_limit: float = 0.0


@dataclass(frozen=True)
class Check:
    """Largest relative error against float64 (inf for an unwritten output) and the error that is allowed."""

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """False also for nan."""
        return self.error <= self.tolerance


@dataclass
class Runnable:
    """One variant of one case, ready to run.

    Attributes:
        launch: ``launch(i)`` enqueues one call on buffer set ``i % copies`` on the current stream; it does not
            synchronise.
        copies: buffer sets that the calls walk over (:meth:`.Context.copies`).
        check: compares the results that the last ``launch`` of each set (or of some) left with float64; None only
            for transfers without a result worth checking (say why there).
        poison: fills the outputs with NaN; called before the launches that ``check`` judges.
        graph: may be captured into a CUDA graph; otherwise calls are enqueued one by one (see :mod:`.measure`).
        parts: further calls timed beside ``launch`` in the same way; their medians go to ``extra["<name>_us"]``
            (forward alone, say).
        sample: for what cannot be timed as one call (a flag's round trip): returns times in us, as many on every
            rank, in place of everything above but ``check`` and ``poison``.
        extra: goes into the row.
        finish: receives the row's ``us`` or ``host_us`` and returns what else goes into ``extra`` (tokens/s); the
            parts' times are in ``extra`` by then.
        flops, bytes: of one call, where they differ from the case's.
        close: frees what Python does not.
    """

    launch: Callable[[int], object]
    copies: int = 1
    check: Callable[[], Check] | None = None
    poison: Callable[[], object] | None = None
    graph: bool = True
    parts: Mapping[str, Callable[[int], object]] = field(default_factory=dict)
    sample: Callable[[], Sequence[float]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Stats], Mapping[str, Any]] | None = None
    flops: float | None = None
    bytes: float | None = None
    close: Callable[[], object] | None = None


class Workload(ABC):
    """The inputs of one case on this rank, and what makes runnables of it."""

    @abstractmethod
    def prepare(self, variant: str) -> Runnable:
        """Set up a variant: outputs, warm-up, communication buffers. All ranks call it together, in the same order.

        Raises:
            Skip: it does not apply, or is not installed.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do for most
        """Free what Python does not."""


class Suite(ABC):
    """One suite; instances hold no state."""

    name: str
    what: str
    distributed: bool = False  # runs on several ranks; other suites run on one, without a process group
    smallest_world: int = (
        2  # of a distributed suite; 1 if some cases need no peer (then without a process group)
    )
    track_memory: bool = False  # report peak memory of one call
    twice: bool = True  # the baseline is measured twice in every case, for the noise floor
    brief: bool = (
        False  # so many cases that each is one line, and that runs go on in their file without --resume
    )

    def baseline(self, options: Options) -> str | None:
        """Name of the variant that ratios refer to; it is measured twice (see ``twice``). Pure."""
        return None

    @abstractmethod
    def variants(self, options: Options) -> Sequence[Variant]:
        """All variants, in the order of tables. Needs no GPU and imports no torch."""

    @abstractmethod
    def cases(self, options: Options) -> Sequence[Case]:
        """The cases asked for. Pure; needs no GPU and imports no torch.

        Raises:
            BenchError: unknown set, model, operation or dtype; the sentence lists those there are.
        """

    def applies(self, case: Case, variant: str, options: Options) -> bool:
        """False where a variant makes no sense for a case: no row is written. Pure."""
        return True

    def bytes_needed(self, case: Case, options: Options) -> int:
        """Device memory that the case needs on one rank with one buffer set; if there is less it is skipped."""
        return 0

    @abstractmethod
    def workload(self, case: Case, context: Context) -> Workload:
        """Make the inputs."""

    def runner(self, context: Context, job: Job, report: Report, sampler: Sampler) -> Runner | None:
        """What measures a case in place of the engine's protocol; None for that protocol."""
        return None

    def summarise(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Rows that follow from the others (fitted constants), given all rows of one world at its end. Pure."""
        return []

    def conclude(self, rows: Sequence[Row]) -> str:
        """What is printed after a run: a summary of all rows of the card in the file. Pure."""
        return ""
