"""docs/overlap.md shows the protocol and the orders of path "fused" as they are now."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tpkernels.comm import conditions, watchdog, workspace

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REMAKE = "it is old; run: PYTHONPATH=. python docs/make_overlap.py"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not beside the tests")


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_overlap", DOCS / "make_overlap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_overlap"] = module  # dataclasses and the drawing module look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_overlap"]


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "overlap.md").read_text()


def source(path: str) -> str:
    return (ROOT / path).read_text()


def test_the_page_is_what_the_script_writes(maker: Any, page: str) -> None:
    assert maker.page_text(page) == page, f"docs/overlap.md: {REMAKE}"
    for name in [*(f"figure {name}" for name in maker.captions()), "words", "sizes", "chunks"]:
        assert f"<!-- made: {name} -->" in page, f"the page does not show {name}"


def test_pictures_show_what_is_so_now(maker: Any) -> None:
    names = {maker.picture_file(name, theme).name for name in maker.captions() for theme in maker.THEMES}
    assert {path.name for path in maker.PICTURES.iterdir()} == names, (
        "a picture is missing, or nobody draws it"
    )
    for name in maker.captions():
        for theme in maker.THEMES:
            path = maker.picture_file(name, theme)
            assert maker.digest(name) in path.read_text(), f"{path.name}: {REMAKE}"
            assert path.stat().st_size < 150_000, path.name


def test_pictures_are_drawn_alike_on_every_run(maker: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS))
    import draw_overlap

    for name in maker.captions():
        for copy in ("one", "two"):
            draw_overlap.draw(name, "dark", tmp_path / f"{copy}.svg")
        assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes(), name


# ---- Words.


def test_every_word_is_where_the_page_says(maker: Any, page: str) -> None:
    """The header, read here in another way: `words + kName + i` is what each accessor returns."""
    header = source("csrc/host/protocol.hpp")
    offsets = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", header)}
    accessors = dict(re.findall(r"uint32_t\* (\w+)\(.*?\) const \{ return words \+ (k\w+)", header))
    rows = re.findall(r"^\| (\d+)(?: to (\d+))? \| `(\w+)\((\w*)\)` \|", page, flags=re.M)
    assert {name for _, _, name, _ in rows} == set(accessors), "a word is missing, or does not exist"
    counts = dict(re.findall(r"static constexpr int (k\w+) = \d+;\s*// \[(\w+)\]", header))
    for first, last, name, argument in rows:
        constant = accessors[name]
        assert int(first) == offsets[constant], name
        count = offsets[counts[constant]] if constant in counts else 1
        assert int(last or first) == int(first) + count - 1, name
        assert bool(argument) == (constant in counts), name
    used = sorted((int(first), int(last or first)) for first, last, _, _ in rows)
    assert all(a[1] < b[0] for a, b in pairwise(used)), "words overlap"
    assert used[-1][1] < maker.constants()["kBytes"] // 4 == 1024


def test_other_words_that_the_page_names(page: str) -> None:
    setup = source("csrc/ops/sm90a_fused_setup.cpp")
    scratch = int(re.findall(r"kScratch = (\d+);", setup)[0])
    last = scratch + 16 * (1 + conditions.MAX_RANKS) - 1
    assert f"Words {scratch} to {last} are scratch" in page and last < workspace.PAGE_BYTES // 4
    assert "words + kScratch + 16 * (1 + rank)" in setup


def test_who_writes_which_word(page: str) -> None:
    """The instructions that the page names are those of the sources."""
    flags, sync = source("csrc/comm/flags.cuh"), source("csrc/kernels/sm90a/sync.cu")
    for instruction in ("st.release.sys", "ld.acquire.sys", "atom.acq_rel.gpu"):
        assert f"{instruction}.global" in flags and f"`{instruction}`" in page
    engine = source("csrc/comm/copy_engine.cpp")
    for call in ("cuStreamWaitValue32", "cuStreamWriteValue32"):
        assert call in engine and f"`{call}`" in page
    assert "CU_STREAM_WAIT_VALUE_EQ" in engine and "`cuStreamWaitValue32` (== 1)" in page
    epilogue = source("csrc/kernels/sm90a/epilogue.cuh")
    for part, steps in {
        "void count_stored": ["add_acq_rel", "h.counters[c] = 0", "store_release"],
        "void run_ringer": ["wait_stored()", "__threadfence_system()", "count_stored("],
        "void ring_doorbells": ["__threadfence_system()", "__syncwarp()", "count_stored("],
    }.items():
        text = epilogue.partition(part)[2]
        assert [text.index(step) for step in steps] == sorted(text.index(step) for step in steps), part
    steps = ["publish_entered", "peer_entered", "*mine.arrived(c) = epoch", "advance_epoch"]
    assert [sync.index(step) for step in steps] == sorted(sync.index(step) for step in steps)
    assert "*mine.ticket() = 0" in source("csrc/host/protocol.hpp").partition("void advance_epoch")[2]
    ticket = flags.partition("u32 take_ticket(")[2].partition("}")[0]
    assert "atom.relaxed.gpu.global" in ticket and "`atom.relaxed.gpu`" in page
    for name, wait, acquire in (
        ("loader", "void wait_for_chunks", "wait_or_fail<comm::Scope::kSys>"),
        ("owner", "void look_at_peer", "is_raised(h.arrived"),
    ):
        text = source(f"csrc/kernels/sm90a/{name}.cuh").partition(wait)[2]
        assert text.index(acquire) < text.index("fence_async_proxy()")
    owner = source("csrc/kernels/sm90a/owner.cuh")
    for who, how in (
        ("void wait_for_peers", "wait_or_fail<"),
        ("void look_for_peers", "comm::load_acquire<"),
    ):
        assert f"{how}comm::Scope::kSys>" in owner.partition(who)[2].partition("\n}\n")[0]


def test_calls_are_enqueued_in_the_order_of_the_page() -> None:
    gather = source("csrc/ops/sm90a_fused_gather.cpp")
    order = ["enter_function", "CopyEngine::Call engine(", "pushes.enqueue(engine)", "copy_own(kGather, buffer",
             "run_hopper(", "engine.join()", "copy_rows(kGather, out"]  # fmt: skip
    assert [gather.index(step) for step in order] == sorted(gather.index(step) for step in order)
    own = source("csrc/ops/gather_pushes.hpp").partition("void copy_rows(")[2]
    assert "g_.stream)" in own, "own rows are copied on the caller's stream"
    reduce = source("csrc/ops/sm90a_fused_reduce.cpp")
    run = reduce.partition("void run(")[2].partition("void push(")[0]
    order = ["engine_.emplace(", "run_hopper(", "push(*engine_)"]  # it forks in front of the product
    assert [run.index(step) for step in order] == sorted(run.index(step) for step in order)
    assert "push_scatter(" in reduce.partition("void push(CopyEngine")[2]
    for call, collects in (("kReduce", False), ("kAllReduce", True)):
        body = reduce.partition(f"launch_sync({call}, tpk::sm90a::enter")[2].partition("scatter.join()")[0]
        assert "scatter.run(device)" in body
        assert ("collect_function" in body.partition("scatter.run(device)")[2]) is collects
    gathers, scatters = (
        source("csrc/host/pushes.hpp").partition("void push_gather(")[2].split("bool push_scatter(")
    )
    assert "engine.use(owner == rank ? 2 : sent++ % 2)" in scatters, "chunks in turn on two, sums on a third"
    assert "engine.use(" not in gathers, "a gather's chunks take one"


def test_files_and_links_exist(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page):
        assert (DOCS / link).exists(), link


# ---- Orders.


def test_receivers_are_those_of_the_pushes(maker: Any) -> None:
    """The expressions of pushes.hpp, for every world that there may be."""
    text = source("csrc/host/pushes.hpp")
    found = dict(re.findall(r"constexpr int (\w+)_peer\(.*?\) \{ return ([^;]+); \}", text))
    for rank in range(maker.WORLD):
        for name, receivers in (("gather", maker.gather_receivers), ("scatter", maker.scatter_receivers)):
            steps = range(1, maker.WORLD)
            peers = [eval(found[name], {"rank": rank, "step": step, "world": maker.WORLD}) for step in steps]
            assert receivers(rank) == peers, (name, rank)
    for world in range(1, conditions.MAX_RANKS + 1):
        for rank in range(world):
            for step in range(1, world):
                values = {"rank": rank, "step": step, "world": world}
                # A shard lands at its receiver in the step in which it is sent, and rows leave when they are computed.
                assert maker._host.arrival_class(rank, eval(found["gather"], values), world) == step
                assert maker._host.departure_class(eval(found["scatter"], values), rank, world) == step - 1


def test_order_of_a_gather(maker: Any) -> None:
    for rank in range(maker.WORLD):
        rows = maker.gather_rows(rank)
        assert sorted(row.begin for row in rows) == list(range(0, sum(maker.SHARDS), maker.TILE_ROWS))
        for row in rows:
            assert row.shards == tuple(range(maker.owner(row.begin), maker.owner(row.end - 1) + 1))
        lands = [max((shard - rank) % maker.WORLD for shard in row.shards) for row in rows]
        assert lands == sorted(lands) and lands[0] == 0, "a tile stands with the shard that lands last"
        begin = maker.begins()[rank]
        first = next(row for row in rows if row.begin <= begin < row.end)
        assert begin == first.begin or first is rows[-1], "the beginning of the own shard stands last"


def test_order_of_a_scatter(maker: Any) -> None:
    for rank in range(maker.WORLD):
        rows = maker.scatter_rows(rank)
        covered = sorted(row for each in rows for row in range(each.begin, each.end))
        assert covered == list(range(sum(maker.SHARDS))), "every row once"
        assert all(len(row.shards) == 1 and maker.owner(row.end - 1) == row.shards[0] for row in rows)
        leaves = [(row.shards[0] - rank - 1) % maker.WORLD for row in rows]
        assert leaves == sorted(leaves), "rank + 1 first, own rows last"
        assert {row.begin for row in rows} >= set(maker.begins()[:-1]), "tiles begin anew"
        assert len(rows) <= len(maker.gather_rows(rank)) + maker.WORLD, "at most a row of tiles a rank"


def test_timelines_keep_to_the_waits(maker: Any) -> None:
    for steps, in_turn in ((maker.gather_timeline(), False), (maker.scatter_timeline(), True)):
        told = max(s.end for s in steps if s.what == "enter")
        for rank in range(maker.WORLD):
            for lane in maker.LANES:
                mine = sorted((s.begin, s.end) for s in steps if (s.rank, s.lane) == (rank, lane))
                assert all(a[1] <= b[0] for a, b in pairwise(mine)), "one thing at a time"
            of = {
                what: sorted((s for s in steps if s.rank == rank and s.what == what), key=lambda s: s.begin)
                for what in ("enter", "push", "product", "own")
            }
            assert of["enter"][0].begin == maker.CALLED[rank]
            assert all(s.begin >= told for what in ("push", "product", "own") for s in of[what]), "a barrier"
            assert all(s.end <= of["product"][0].begin for s in of["own"]), "own rows are copied in front"
            assert len(of["push"]) == maker.WORLD - 1
            for a, b in pairwise(of["push"]):
                assert (a.lane != b.lane) is in_turn and a.end <= b.begin
    for step in maker.gather_timeline():
        if step.what == "product" and step.of != step.rank:
            pushes = [
                s for s in maker.gather_timeline() if (s.what, s.rank, s.to) == ("push", step.of, step.rank)
            ]
            assert [s.end <= step.begin for s in pushes] == [True]
    steps = maker.scatter_timeline()
    for step in steps:
        if step.what == "push":
            made = next(s for s in steps if (s.what, s.rank, s.of) == ("product", step.rank, step.to))
            added = next(s for s in steps if (s.what, s.rank) == ("sum", step.to))
            assert made.end <= step.begin and step.end <= added.begin


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_waits_have_no_circle(maker: Any, kind: str) -> None:
    """Of all ranks and calls: what a peer does is a node of its own."""
    edges = set()
    for rank in range(3):
        for peer in set(range(3)) - {rank}:
            for call in range(1, 4):
                for before, after in maker.WAITS[kind]:
                    who = peer if before.startswith("peer ") else rank
                    name, late = before.removeprefix("peer ").removesuffix(" - 1"), before.endswith(" - 1")
                    edges.add(((who, name, call - late), (rank, after, call)))
    nodes = {node for edge in edges for node in edge}
    while nodes:
        free = {
            node for node in nodes if not any(after == node for before, after in edges if before in nodes)
        }
        assert free, f"a circle among {sorted(nodes)[:5]}"
        nodes -= free


@pytest.mark.parametrize("kind", ["data_parallel", "hybrid_aligned", "hybrid_last", "stream_k"])
def test_own_tiles_in_a_turn_of_their_own_are_enough(maker: Any, kind: str) -> None:
    """What the planner asks of a scatter's schedule, and what comes of it, simulated with one worker resident."""
    host = maker._host
    tile = host.TileShape(maker.TILE_ROWS, 128, 64)
    sizes = [-(-rows // maker.TILE_ROWS) * maker.TILE_ROWS for rows in maker.SHARDS]
    programs, apart = [], []
    for rank in range(maker.WORLD):
        order, shard_tiles = host.make_departure_order(sizes, rank, 3 * 128, 1, tile)
        schedule = host.make_schedule(kind, len(order), 8, workers=5, min_iters=2, shard_tiles=shard_tiles)
        first_own = len(order) - shard_tiles[-1]
        apart.append(host.tiles_apart(schedule, first_own))
        if apart[-1]:
            schedule = host.start_turn(schedule, first_own)
        programs.append(host.RankProgram(schedule, order))
    assert kind != "data_parallel" or all(apart)
    assert kind != "stream_k" or not any(apart), "it is refused"
    report = host.simulate_progress(programs, tile=tile, shard_sizes=sizes, resident=1, owner_waits="shard")
    assert report.finished or not all(apart), report.blocked


# ---- What the text says.


def test_numbers_of_the_text(maker: Any, page: str) -> None:
    c = maker.constants()
    assert c["kMaxRanks"] == conditions.MAX_RANKS and f"more than {conditions.MAX_RANKS} ranks" in page
    assert "(int64_t{1} << 31) - 2048 - end" in source("csrc/ops/fused_group.hpp")
    assert conditions.MOST_ROWS == (1 << 31) - 2048 - 1 and "| M of 2^31 - 2048 or more, " in page
    assert c["kBytes"] == workspace.PAGE_BYTES
    hooks = maker.constants("kernels/gemm_hooks.hpp")
    assert all(hooks[name] == c[name] for name in ("kMaxRanks", "kMaxChunks"))
    assert workspace.grown(workspace.PAGE_BYTES + (100 << 20)) == 130 << 20, (
        "a power of two, and 2 MiB for the page"
    )
    # "Eight shards of 1024 rows of 16 KiB become 16 chunks"
    pushes = maker.constants("host/pushes.hpp")
    least = pushes["kLeastChunkBytes"] // 16384
    assert least % pushes["kChunkRows"] == 0 and 8 * (1024 // least) == 16
    assert "list.count == 16" in source("cmake/tests/test_protocol.cpp")


def test_what_is_refused(page: str) -> None:
    refused = page.partition("## What is refused")[2].partition("## How to test it")[0]
    assert conditions.CAPABILITY == (9, 0) and "capability other than 9.0" in refused
    assert conditions.OVERLAP in refused
    assert [str(dtype) for dtype in conditions.DTYPES] == ["torch.bfloat16", "torch.float16"]
    assert [str(dtype) for dtype in conditions.OUT_DTYPES[2:]] == ["torch.float32"]
    assert conditions.machine_missing((9, 0), "", {"CUDA_LAUNCH_BLOCKING": "1"}) is not None
    assert "CUDA_LAUNCH_BLOCKING" in refused


def test_names_of_the_text_exist(page: str) -> None:
    """Functions and variables that the text sends the reader to."""
    for name, path in {
        "wait_for_chunks": "csrc/kernels/sm90a/loader.cuh",
        "wait_for_peers": "csrc/kernels/sm90a/owner.cuh",
        "run_ringer": "csrc/kernels/sm90a/epilogue.cuh",
        "tiles_apart": "csrc/kernels/sm90a/plan.hpp",
        "start_turn": "csrc/kernels/sm90a/plan.hpp",
        "leaving_order": "csrc/ops/sm90a_fused_reduce.cpp",
        "place_tiles": "csrc/kernels/sm90a/placement.hpp",
        "make_arrival_order": "csrc/host/shards.hpp",
        "fused_warm_up": "csrc/ops/schemas.cpp",
        "slab_k": "csrc/kernels/gemm_hooks.hpp",
        "Patience": "csrc/comm/flags.cuh",
        "TPK_COMM_TIMEOUT_S": "tpkernels/comm/faults.py",
        "TPK_WATCHDOG": "tpkernels/comm/watchdog.py",
        "TPK_SYMMETRIC_BACKEND": "tpkernels/comm/symmetric.py",
        "TPK_TRANSPORT": "tpkernels/comm/nvshmem.py",
        "CommTimeoutError": "tpkernels/errors.py",
    }.items():
        assert f"`{name}`" in page and name in source(path), name


def test_what_is_told_of_the_watchdog(page: str) -> None:
    text = source("tpkernels/comm/watchdog.py")
    assert watchdog.PERIOD_S == 0.5 and "looks at the record every half second" in page
    assert (
        watchdog._log.name == "tpkernels"
        and "_log.error(" in text
        and "an error of the logger `tpkernels`" in page
    )
    # Its look: the record lies in host memory, and exists, since what makes it is called before.
    setup, cache = source("csrc/ops/sm90a_fused_setup.cpp"), source("csrc/kernels/sm90a/device.hpp")
    assert "DeviceCache::instance().fault();" in setup.partition("void fused_warm_up(")[2].partition("\n}")[0]
    assert "cudaHostAlloc(" in cache.partition("FaultRecord* fault()")[2].partition("return fault_;")[0]


def test_reserve_knows_every_kind() -> None:
    kinds = set(re.findall(r'sizes\["(\w+)"\]', source("tpkernels/comm/reserve.py")))
    assert kinds == {"gather", "scatter", "small", "sum"}
