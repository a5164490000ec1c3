"""Host core of tpkernels (pybind11, no torch): decomposition, tile order, plans and progress. Pure functions.

Sizes are integers of at most 63 bits, times are microseconds; ``workers``, ``min_iters`` and ``splits`` are at
most 2^30. Wrong arguments raise ValueError with a sentence (IndexError for ``TileOrder.at``). The C++ is in
``csrc/host``; kernels and the CPU executor are compiled from the same headers.
"""

from collections.abc import Sequence
from typing import Literal, overload

SCHEDULE_KINDS: tuple[str, ...]
MAX_PIECES: int
MAX_WORLD: int

class Segment:
    """One contiguous run of iterations [k_begin, k_end) of the tile at a position, done by one worker.

    ``slot`` is where its partial goes if it does not finish the tile; ``[first_slot, end_slot)`` are the partials
    that it adds, in K order, if it finishes a split tile; all are -1 otherwise.
    """

    def __init__(
        self,
        position: int,
        k_begin: int,
        k_end: int,
        piece: int = 0,
        slot: int = -1,
        first_slot: int = -1,
        end_slot: int = -1,
    ) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def k_begin(self) -> int: ...
    @property
    def k_end(self) -> int: ...
    @property
    def piece(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def first_slot(self) -> int: ...
    @property
    def end_slot(self) -> int: ...
    @property
    def finishes(self) -> bool: ...
    @property
    def is_split(self) -> bool: ...

class Piece:
    """A run of tiles that is dealt out whole ("waves") or cut into equal shares of iterations ("streamed")."""

    @property
    def kind(self) -> Literal["waves", "streamed"]: ...
    @property
    def first_tile(self) -> int: ...
    @property
    def num_tiles(self) -> int: ...
    @property
    def first_worker(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def handicapped(self) -> int: ...
    @property
    def handicap(self) -> int: ...
    @property
    def granules(self) -> int:
        """Above 0: tiles are cut at multiples of K / granules only."""
    @property
    def turn(self) -> int:
        """Tickets [turn * workers, (turn + 1) * workers) walk it."""

class Schedule:
    """Who computes which iterations of which tile, in which order of time."""

    @property
    def k_iters(self) -> int: ...
    @property
    def workers(self) -> int:
        """Tickets; at most the number asked for, except for split_k (tiles * splits)."""

    @property
    def min_iters(self) -> int: ...
    @property
    def num_slots(self) -> int:
        """Partial tiles (and fix-up flags) to allocate."""

    @property
    def divided_shares(self) -> int:
        """Shares of every split tile, if all of its workers finish it together (one run of one tile each); else 0."""

    @property
    def pieces(self) -> list[Piece]: ...
    def segments(self, worker: int, limit: int = -1) -> list[Segment]:
        """Segments of one worker in time order; the first ``limit`` of them if it is not negative."""

    def share_bounds(self, piece: int) -> list[int]:
        """First iteration of every share of a streamed piece, and its total: workers + 1 numbers."""

def snap_cut(cut: int, k_iters: int, min_iters: int) -> int:
    """The cut at or below ``cut`` that leaves no run of a tile shorter than ``min_iters``."""

def snap_slack(k_iters: int, min_iters: int) -> int:
    """How far ``snap_cut`` may move a cut: shares keep their even length to within this, and one iteration."""

def least_share(k_iters: int, min_iters: int) -> int:
    """Iterations that a share of a streamed piece has at least before snapping; fewer workers share it otherwise."""

def make_schedule(
    kind: str,
    tiles: int,
    k_iters: int,
    *,
    workers: int,
    min_iters: int = 4,
    splits: int = 1,
    comm_workers: int = 0,
    comm_iters: int = 0,
    shard_tiles: Sequence[int] = (),
) -> Schedule:
    """The schedule of ``tiles`` tiles of ``k_iters`` iterations each.

    Args:
        kind: one of ``SCHEDULE_KINDS``.
        splits: cuts of every tile (split_k only).
        comm_workers: tickets 0 ... comm_workers - 1 also communicate,
        comm_iters: which costs each of them as much as this many iterations; charged in streamed pieces.
        shard_tiles: tiles of every shard in time order (see ``make_arrival_order``); empty: one shard.
    """

class TileShape:
    """Output tile of bm rows and bn columns, advanced bk along K per iteration."""

    def __init__(self, bm: int, bn: int, bk: int) -> None: ...
    @property
    def bm(self) -> int: ...
    @property
    def bn(self) -> int: ...
    @property
    def bk(self) -> int: ...

class TileOrder:
    """A permutation of the output tiles: positions are times, tiles are places."""

    @property
    def tiles_m(self) -> int: ...
    @property
    def tiles_n(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def group_m(self) -> int:
        """Rows of tiles walked together: the number asked for, or ``tiles_m`` if that is less."""

    @property
    def start_m(self) -> int: ...
    @property
    def band_end(self) -> list[int]: ...
    def __len__(self) -> int: ...
    def at(self, position: int) -> tuple[int, int, int]:
        """(batch, row, column) of the tile at a position."""

def make_tile_order(m: int, n: int, batch: int, tile: TileShape, group_m: int = 8) -> TileOrder: ...
def make_arrival_order(
    shard_sizes: Sequence[int], rank: int, n: int, batch: int, tile: TileShape, group_m: int = 8
) -> tuple[TileOrder, list[int]]:
    """Order of an all-gather + GEMM (own rows first, then rank + 1, ...), and the tiles of each class."""

def make_departure_order(
    shard_sizes: Sequence[int], rank: int, n: int, batch: int, tile: TileShape, group_m: int = 8
) -> tuple[TileOrder, list[int]]:
    """Order of a GEMM + reduce-scatter (rows of rank + 1 first, own last), and the tiles of each class."""

def even_shards(total: int, world: int) -> list[int]:
    """Ceil-split of ``total`` rows, like torch.chunk: the last shards may be shorter or empty."""

def arrival_class(shard: int, rank: int, world: int) -> int:
    """When a shard lands: 0 is the own one, 1 that of rank + 1."""

def departure_class(shard: int, rank: int, world: int) -> int:
    """When a shard leaves: 0 is that of rank + 1, world - 1 the own one."""

def shards_of_tile_row(shard_sizes: Sequence[int], tile_row: int, bm: int) -> tuple[int, int]:
    """Half-open range of the shards whose rows a row of tiles holds; empty shards in it hold none."""

class Chunks:
    """The pieces in which an arrival lands: ``chunk_rows`` rows of one shard by ``slab_k`` of K."""

    def __init__(self, shard_sizes: Sequence[int], k: int, chunk_rows: int, slab_k: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def slabs(self) -> int: ...
    def rows_of_tile_row(self, tile_row: int, bm: int) -> tuple[int, int]:
        """Half-open range of the row chunks that a row of tiles reads."""

    def slabs_of_iters(self, k_begin: int, k_end: int, bk: int) -> tuple[int, int]:
        """Half-open range of the slabs of K that iterations [k_begin, k_end) read."""

class CostConstants:
    """Constants of the cost model of one architecture, in microseconds (csrc/host/cost_model.hpp)."""

    def __init__(self) -> None: ...
    launch_us: float
    mac_us: float
    load_us: float
    iter_us: float
    epilogue_us: float
    epilogue_elem_us: float
    partial_us: float
    partial_elem_us: float

def cost_constants(arch: str) -> CostConstants:
    """Defaults of "cpu", "sm80" or "sm90"."""

class WorkCounts:
    """What one worker does: iterations, tiles finished, partials written and partials added."""

    @property
    def iterations(self) -> int: ...
    @property
    def epilogues(self) -> int: ...
    @property
    def partials_written(self) -> int: ...
    @property
    def partials_added(self) -> int: ...

def count_work(schedule: Schedule, worker: int) -> WorkCounts:
    """What one worker of the schedule does, 0 <= worker < ``schedule.workers``."""

def predict_us(schedule: Schedule, tile: TileShape, cost: CostConstants, multiprocessors: int) -> float:
    """Predicted time, ``multiprocessors`` workers running at once.

    Of more than 8192 tickets only the first and the last 4096 are looked at.
    """

class Plan:
    """Tile, schedule and order of one product on one machine."""

    @property
    def tile(self) -> TileShape: ...
    @property
    def kind(self) -> str: ...
    @property
    def splits(self) -> int: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def order(self) -> TileOrder: ...
    @property
    def predicted_us(self) -> float: ...

def make_plan(
    m: int,
    n: int,
    k: int,
    batch: int,
    *,
    tile: TileShape,
    kind: str,
    cost: CostConstants,
    workers: int,
    min_iters: int = 4,
    splits: int = 1,
) -> Plan: ...
def choose_plan(
    m: int,
    n: int,
    k: int,
    batch: int,
    *,
    cost: CostConstants,
    multiprocessors: int,
    candidates: Sequence[TileShape],
) -> Plan:
    """The cheapest plan by the cost model."""

HOPPER_TILES: tuple[str, ...]
"""Tiles of the Hopper kernel with their clusters: "128x256x64/2x1", "64x128x64s/1x1x4"."""

def is_hopper_tile(text: str) -> bool:
    """Whether the Hopper kernel has a tile of that name, with or without its cluster."""

def hopper_cost() -> dict[str, float]:
    """Constants of the Hopper cost model (csrc/kernels/sm90a/cost.hpp): "launch_us", "iter_us 128x256x64/2x1", ..."""

class HopperCost:
    """Constants of that cost model, read from a dict once.

    Raises:
        ValueError: ``constants`` has other names than ``hopper_cost()``.
    """

    def __init__(self, constants: dict[str, float]) -> None: ...

class HopperPlan:
    """A plan of the Hopper kernel. ``plan.tile`` is the cluster's, of which a gate halves the columns."""

    @property
    def tile(self) -> str: ...
    @property
    def cluster(self) -> tuple[int, int, int]: ...
    @property
    def plan(self) -> Plan: ...

def hopper_plans(
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    *,
    schedule: str = "auto",
    workers: int = 0,
    splits: int = 1,
    tile: str = "",
    gated: bool = False,
    finishes: bool = False,
    outer_major: bool = False,
    multiprocessors: int = 132,
) -> list[HopperPlan]:
    """The best plan of every tile and cluster that ``tile`` allows ("": all), cheapest first.

    Args:
        workers: clusters that run at once; 0: as many as fit on an empty device, one CTA a multiprocessor.
        gated: the product has a gate.
        finishes: the epilogue does more than round.
    """

def hopper_predict_us(
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    *,
    plan: HopperPlan,
    finishes: bool = False,
    outer_major: bool = False,
    multiprocessors: int = 132,
    cost: HopperCost | dict[str, float],
) -> float:
    """Predicted time of a plan with other constants; ``cost`` has the names of ``hopper_cost()``."""

class RankProgram:
    """Segments of every worker of one rank, from a schedule or written by hand."""

    @overload
    def __init__(self, schedule: Schedule, order: TileOrder) -> None: ...
    @overload
    def __init__(self, workers: Sequence[Sequence[Segment]], order: TileOrder, num_slots: int) -> None: ...

class ProgressReport:
    @property
    def finished(self) -> bool: ...
    @property
    def steps(self) -> int: ...
    @property
    def blocked(self) -> list[str]:
        """One sentence for every worker that waits in vain."""

def tiles_apart(schedule: Schedule, position: int) -> bool:
    """Whether no worker meets a tile at ``position`` or later before one in front of it."""

def start_turn(schedule: Schedule, position: int) -> Schedule:
    """The same work, tiles from ``position`` on by tickets behind those of all tiles in front of it.

    Raises:
        ValueError: a streamed piece has tiles on both sides.
    """

def simulate_progress(
    programs: Sequence[RankProgram],
    *,
    tile: TileShape,
    shard_sizes: Sequence[int] = (),
    resident: int = 1,
    comm_workers: int = 0,
    owner_waits: str = "none",
    defer_straddlers: bool = True,
) -> ProgressReport:
    """Whether the plans of all ranks finish together with ``resident`` workers at once on each.

    Args:
        programs: one a rank.
        shard_sizes: rows of every rank; needed for remote waits.
        comm_workers: > 0: an arrival sent by the first tickets of every rank.
        owner_waits: "none", "tile" or "shard": what the owner's epilogue waits for on the other ranks.
        defer_straddlers: tiles of several owners are reduced at the end of the worker instead of in their epilogue.
    """

def portable_cost(device: str) -> dict[str, float]:
    """Constants of the portable kernel's cost model (csrc/kernels/sm80/cost_in_use.hpp) for "sm80" or "sm90-portable":
    "launch_us", "alone_us 128x256x32 half", ..."""

class PortableCost:
    """Constants of that cost model, read from a dict once.

    Raises:
        ValueError: ``constants`` has other names than ``portable_cost()``.
    """

    def __init__(self, constants: dict[str, float]) -> None: ...

class PortablePlan:
    """A plan of the portable kernel."""

    @property
    def plan(self) -> Plan: ...

def portable_plan(
    m: int,
    n: int,
    k: int,
    *,
    device: str,
    dtype: str = "bfloat16",
    schedule: str = "auto",
    splits: int = 1,
    tile: str = "",
    multiprocessors: int,
) -> PortablePlan:
    """The plan that the arguments name, as torch.ops.tpkernels.streamk_plan takes them."""

def portable_predict_us(plan: PortablePlan, cost: PortableCost) -> float:
    """Predicted time of a plan with other constants."""
