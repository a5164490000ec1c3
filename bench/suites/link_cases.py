"""What the link suite measures: operations, sizes, transports, and which go together. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import check_known
from ..models import MODELS
from ..suite import Case, Options

__all__ = [
    "EXCHANGES",
    "OPS",
    "SETS",
    "Layout",
    "Transport",
    "applies",
    "layout",
    "make_cases",
    "moved_bytes",
    "size_name",
    "sm_name",
    "transports",
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Transfers between ranks: each moves pieces of `bytes` bytes.
#   push, pull       from every rank to the next one, all at once
#   all_gather       every rank's piece to all others
#   scatter          another piece from every rank to every other (an all-to-all)
#   reduce_scatter, all_reduce   by NCCL only, to compare
EXCHANGES = ("push", "pull", "all_gather", "scatter", "reduce_scatter", "all_reduce")
OPS = ("copy", "matmul", *EXCHANGES, "beside", "flag_round_trip")
SETS = ("default", "full")

_LARGEST = 128 * MIB
_SIZES = (256 * KIB, *(n * MIB for n in (1, 2, 4, 8, 16, 25)), _LARGEST)
_SWEPT = (2 * MIB, 8 * MIB, 25 * MIB, _LARGEST)  # by default, sizes at which several numbers of SMs are tried
_SMALL_SIZES = (4 * KIB, 64 * KIB)
_SMS = (4, 8, 16, 32)
_FULL_SMS = (1, 2, 4, 8, 16, 32, 0)
_USUAL_SMS = 16
# M of the products that run beside a gather; N and K are those of one of eight ranks, as in the table of transports
# (hidden, ffn / 8).
_BESIDE = {"gpt3": (8192,), "llama70b": (8192, 2048), "llama8b": (8192,)}
_PEAK_SHAPES = ((8192, 8192, 8192), (16384, 8192, 8192), (8192, 6144, 12288))


Kind = Literal["engine", "bulk", "lsu", "torch", "nccl", "gloo", "flag"]
_SM_KINDS: tuple[tuple[Kind, str], ...] = (
    ("bulk", "bulk copies through shared memory"),
    ("lsu", "16-byte loads and stores"),
)


@dataclass(frozen=True)
class Transport:
    """Who moves the bytes, and how.

    Attributes:
        name: of the variant.
        what: one line.
        kind: "engine" (copy engine, through torch's copy_), "bulk" (bulk copies by SMs), "lsu" (loads and stores by
            SMs), "torch" (torch's own operation), "nccl", "gloo", "flag" (a flag alone).
        pull: the receiver copies, not the sender.
        sms: CTAs, one an SM; 0 for all SMs of the device (kinds bulk and lsu).
        chunks: copies a piece is cut into (kind engine).
        flag: a flag is raised behind each piece.
    """

    name: str
    what: str
    kind: Kind
    pull: bool = False
    sms: int = 0
    chunks: int = 1
    flag: bool = False

    @property
    def by_sms(self) -> bool:
        """True for our kernels."""
        return self.kind in ("bulk", "lsu")


def transports(options: Options) -> list[Transport]:
    """All of them, in the order of tables."""
    own = Transport("torch", "torch's own operation (copy_, mm)", "torch")
    if options.device == "cpu":
        return [own, Transport("gloo", "torch.distributed over gloo", "gloo")]
    engine = "copy engine, W-1 copies in a row, rank+1 first"
    made = [
        own,
        Transport("engine", f"{engine}, pushing", "engine"),
        Transport("engine x4", f"{engine}, 4 chunks a piece", "engine", chunks=4),
        Transport("engine +flag", f"{engine}, a 4-byte flag behind each piece", "engine", flag=True),
        Transport("engine pull", f"{engine}, pulling", "engine", pull=True),
    ]
    counts = _FULL_SMS if _full(options) else (*_SMS, 0)
    for kind, how in _SM_KINDS:
        for pull in (False, True):
            for sms in counts:
                what = f"{how} of {sms or 'all'} SMs, {'pulling' if pull else 'pushing'}"
                made.append(Transport(sm_name(kind, sms, pull=pull), what, kind, pull, sms))
        what = f"{how} of {_USUAL_SMS} SMs, pushing, a flag behind each piece"
        if kind == "bulk" or _thorough(options):
            made.append(Transport(f"{sm_name(kind)} +flag", what, kind, sms=_USUAL_SMS, flag=True))
    made.append(Transport("one thread", "one thread a rank, st.release.sys and ld.acquire.sys", "flag"))
    return [*made, Transport("nccl", "torch.distributed over NCCL", "nccl")]


def sm_name(kind: Kind, sms: int = _USUAL_SMS, *, pull: bool = False) -> str:
    """Name of a transport by SMs."""
    return f"{kind}{' pull' if pull else ''} {sms or 'all'} SMs"


def applies(case: Case, transport: Transport, options: Options) -> bool:
    """True where the transport is measured for the case."""
    t = transport
    if case.op == "copy":
        return t.kind == "torch" or (t.by_sms and t.sms == 0 and not t.pull)
    if case.op == "matmul":
        return t.kind == "torch"
    if case.op == "flag_round_trip":
        return t.kind in ("gloo", "flag")
    if case.op == "beside":
        return t.kind == "gloo" or t.name in ("engine", sm_name("bulk"))
    if t.kind in ("torch", "flag"):
        return False
    if t.kind in ("nccl", "gloo"):
        return case.op != "pull" or t.kind == "gloo"
    ways = {"push": (False,), "pull": (True,), "all_gather": (False, True), "scatter": (False,)}
    if t.pull not in ways.get(case.op, ()) or (t.chunks > 1 and case.op == "push"):
        return False
    return _thorough(options) or _by_default(case.op, int(case.params["bytes"]), t)


def _by_default(op: str, size: int, t: Transport) -> bool:
    """A selection that takes a minute: what is of use is tried at all sizes, the rest where it tells most."""
    if op == "scatter" and (t.flag or t.chunks > 1):
        return False
    if t.kind == "engine":
        return t.chunks == 1 or size >= MIB
    if t.kind == "bulk" and (t.flag or t.sms == _USUAL_SMS):
        return True
    if t.kind == "bulk" and t.sms in (8, 32):
        return size in _SWEPT
    return size == _LARGEST or (size in _SWEPT and t.sms == _USUAL_SMS)


@dataclass(frozen=True)
class Layout:
    """Bytes of one buffer set on one rank. ``source`` is 0 where a rank's piece lies in its slot of the target."""

    source: int
    target: int

    @property
    def total(self) -> int:
        return self.source + self.target


def layout(op: str, piece: int, world: int) -> Layout:
    """The buffers of a transfer of pieces of ``piece`` bytes."""
    return {
        "push": Layout(piece, piece),
        "pull": Layout(piece, piece),
        "all_gather": Layout(0, world * piece),
        "scatter": Layout(world * piece, world * piece),
        "reduce_scatter": Layout(world * piece, piece),
        "all_reduce": Layout(0, piece),
    }[op]


def moved_bytes(op: str, piece: int, world: int) -> float:
    """What a rank sends in one call, at least."""
    if op in ("push", "pull"):
        return float(piece)
    return 2.0 * (world - 1) / world * piece if op == "all_reduce" else float((world - 1) * piece)


def size_name(count: int) -> str:
    """262144 -> "256 KiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"


def make_cases(options: Options) -> list[Case]:
    """The cases asked for.

    Raises:
        BenchError: an unknown operation, set, dtype or model.
    """
    for op in options.ops:
        check_known("operation", op, OPS)
    for name in options.sets:
        check_known("set", name, SETS)
    for name in options.dtypes:
        check_known("dtype", name, ("bfloat16", "float16"), hint=" Transfers move bfloat16.")
    for name in options.models:
        check_known("model", name, MODELS)
    cases = [*_local_cases(options)]
    if options.world > 1:
        cases += [*_exchange_cases(options), *_beside_cases(options)]
        cases.append(Case("flag round trip", "flag_round_trip", "", {}, "default"))
    return [case for case in cases if not options.ops or case.op in options.ops]


def _full(options: Options) -> bool:
    return "full" in options.sets


def _thorough(options: Options) -> bool:
    """Every transport at every size: where that was asked for, and where it costs little."""
    return _full(options) or options.small


def _local_cases(options: Options) -> list[Case]:
    size = MIB if options.device == "cpu" else 16 * MIB if options.small else GIB
    cases = [
        Case(f"copy {size_name(size)}", "copy", "bfloat16", {"bytes": size}, "default", bytes=2.0 * size)
    ]
    shapes = ((256, 256, 256),) if options.small else _PEAK_SHAPES
    for dtype in options.dtypes or ("bfloat16", "float16"):
        for m, n, k in shapes:
            params = {"m": m, "n": n, "k": k}
            cases.append(
                Case(f"matmul {m}x{n}x{k}", "matmul", dtype, params, "default", flops=2.0 * m * n * k)
            )
    return cases


def _exchange_cases(options: Options) -> list[Case]:
    cases = []
    for op in EXCHANGES:
        for size in _SMALL_SIZES if options.small else _SIZES:
            if size == _LARGEST and op not in ("push", "pull") and not _full(options):
                continue
            name, sent = f"{op} {size_name(size)}", moved_bytes(op, size, options.world)
            cases.append(Case(name, op, "bfloat16", {"bytes": size}, "default", bytes=sent))
    return cases


def _beside_cases(options: Options) -> list[Case]:
    if options.small:
        return [_beside_case("small", 64, 48, 32, options.world)]
    cases = []
    for name in options.models or _BESIDE:
        model = MODELS[name]
        for m in options.rows or _BESIDE.get(name, (8192,)):
            cases.append(_beside_case(name, m, model.ffn // 8, model.hidden, options.world))
    return cases


def _beside_case(name: str, m: int, n: int, k: int, world: int) -> Case:
    shard = -(-m // world) * k * 2
    shard = -(-shard // 256) * 256
    params = {"m": m, "n": n, "k": k, "bytes": shard}
    return Case(f"beside {name} M{m}", "beside", "bfloat16", params, "default", flops=2.0 * m * n * k)
