"""Which path runs, how it is forced, and what explain() says."""

from __future__ import annotations

import re
import threading

import pytest
import torch

import tpkernels as tpk
from tpkernels import _host
from tpkernels.errors import ArgumentError
from tpkernels.ops import _paths, _plans


def test_last_path_tells_what_ran():
    tpk.matmul(torch.randn(2, 3), torch.randn(3, 4), path="streamk")
    record = tpk.last_path()
    assert (record.op, record.transport, record.gemm, record.path) == ("matmul", "none", "streamk", "streamk")
    assert "M=2 N=4 K=3 float32" in str(record) and "asked for" in str(record)


def test_environment_overrides_auto_only(monkeypatch):
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    monkeypatch.setenv("TPK_PATH", "gloo+streamk")
    tpk.matmul(a, b)
    assert tpk.last_path().path == "streamk"
    tpk.matmul(a, b, path="blas")
    assert tpk.last_path().path == "blas"
    monkeypatch.setenv("TPK_PATH", "turbo")
    with pytest.raises(ArgumentError, match="TPK_PATH: 'turbo'"):
        tpk.matmul(a, b)


def test_record_paths_counts_and_nests():
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4)
    with tpk.record_paths() as outer:
        tpk.matmul(a, b).sum().backward()
        with tpk.record_paths() as inner:
            tpk.matmul(a, b, path="streamk")
    tpk.matmul(a, b)
    assert inner.counts == {("matmul", "streamk"): 1}
    assert outer.counts == {("matmul", "blas"): 2, ("matmul", "streamk"): 1}
    assert "matmul: blas x 2" in str(outer)


def test_record_paths_closes_the_right_log():
    """Two logs with equal contents: closing one must not close the other."""
    with tpk.record_paths() as outer:
        with tpk.record_paths():
            pass
        tpk.matmul(torch.randn(2, 3), torch.randn(3, 4))
    assert sum(outer.counts.values()) == 1


def test_last_path_is_seen_from_other_threads():
    thread = threading.Thread(target=lambda: tpk.matmul(torch.randn(5, 3), torch.randn(3, 4), path="streamk"))
    thread.start()
    thread.join()
    assert "M=5" in tpk.last_path().detail


@pytest.mark.parametrize(
    "path,device,expected",
    [
        ("auto", "cpu", (None, None)),
        ("streamk", "cpu", (None, "streamk")),
        ("nccl", "cuda", ("nccl", "streamk")),
        ("nccl+cublas", "cuda", ("nccl", "cublas")),
        ("cublas+nccl", "cuda", ("nccl", "cublas")),
        ("blas", "cpu", (None, "blas")),
    ],
)
def test_parse(path, device, expected, monkeypatch):
    monkeypatch.delenv("TPK_PATH", raising=False)
    assert _paths.parse(path, device, distributed=True)[:2] == expected


@pytest.mark.parametrize("path", ["", "nccl+gloo", "streamk+blas", "NCCL", "nccl+", "cublas"])
def test_parse_rejects(path):
    with pytest.raises(ArgumentError, match="path: "):
        _paths.parse(path, "cpu", distributed=True)


def test_choice_on_cuda_without_a_gpu(monkeypatch):
    """The decision is a pure function: it can be asked for hardware that is not here."""
    monkeypatch.setattr(_paths._extensions, "why_not", lambda name: "")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert _paths.choose_gemm(_paths.Request("nccl", "streamk"), "cuda", dtype).gemm == "streamk"
    auto = _paths.choose_gemm(_paths.Request(None, None), "cuda", torch.int8)
    assert auto.gemm == "cublas" and "int8" in auto.why
    with pytest.raises(tpk.errors.BackendError, match="takes bfloat16, float16, float32, float64, not int8"):
        _paths.choose_gemm(_paths.Request(None, "streamk"), "cuda", torch.int8)
    monkeypatch.setattr(_paths._extensions, "why_not", lambda name: "it was not built")
    with pytest.raises(tpk.errors.BackendError, match="it was not built"):
        _paths.choose_gemm(_paths.Request(None, "streamk"), "cuda", torch.bfloat16)


def test_explain_local():
    explanation = tpk.explain("matmul", torch.randn(300, 200), torch.randn(200, 100))
    assert explanation.path == "blas" and explanation.wire_bytes == 0
    text = str(explanation)
    assert "M=300 N=100 K=200" in text and "not on this path" in text
    plan = tpk.explain("matmul", torch.randn(300, 200), torch.randn(200, 100), path="streamk").plan
    bm, bn, bk = plan["tile"]
    assert plan["tiles"] == -(-300 // bm) * -(-100 // bn) and plan["k_iters"] == -(-200 // bk)
    assert plan["predicted_us"] > 0


def test_explain_lists_what_was_considered():
    explanation = tpk.explain("matmul", torch.randn(300, 200), torch.randn(200, 100))
    times = [us for us, _ in explanation.candidates]
    assert times == sorted(times) and times[0] == explanation.plan["predicted_us"] and 2 <= len(times) <= 7
    text = str(explanation)
    assert "why so" in text and all(what in text for _, what in explanation.candidates)


def test_explain_shows_the_cluster():
    plan = _plans.plan(_plans.Product(1, 8192, 8192, 8192), _plans.Machine("sm90"), tile="256x128x64/1x2")
    text = str(tpk.Explanation("matmul", "streamk", "M=8192", "asked for", 0, plan))
    assert "tile 256x128x64 in clusters of 1x2, 1024 tiles of 128 iterations over 66 workers" in text
    alone = str(tpk.Explanation("matmul", "streamk", "M=8192", "asked for", 0, plan | {"cluster": (1, 1)}))
    assert "tile 256x128x64, 1024 tiles" in alone


def check_tiles(found, allowed, whole):
    """All tiles of those, and of whole ones, which are for small products, the cheapest, if there may be some."""
    cheapest = {name for name in found if _plans.is_whole(name)}
    assert found - cheapest == set(allowed) and len(cheapest) == (8 if whole else 0)
    assert cheapest <= set(_host.HOPPER_TILES)


@pytest.mark.parametrize("architecture", list(_plans.TILES))
def test_the_first_candidate_is_what_the_kernel_takes(architecture):
    for size in ((1, 2048, 5120, 8192), (1, 512, 512, 32768), (3, 70, 50, 200), (1, 0, 5, 8)):
        product, machine = _plans.Product(*size), _plans.Machine(architecture)
        found = _plans.candidates(product, machine)
        assert found[0] == _plans.plan(product, machine)
        times = [one["predicted_us"] for one in found]
        names = {_plans.tile_name(one, machine) for one in found}
        assert times == sorted(times) and len(names) == len(found)
        check_tiles(names, _plans.TILES[architecture], architecture == "sm90")
        assert _plans.why(product, machine, found[0])


@pytest.mark.parametrize("architecture", list(_plans.TILES))
def test_candidates_of_a_gated_product(architecture):
    """Tiles whose columns cannot be halved are left out; what follows is in the prediction."""
    machine = _plans.Machine(architecture)
    product = _plans.Product(1, 2048, 5120, 8192, gated=True, finishes=True)
    found = _plans.candidates(product, machine)
    assert found[0] == _plans.plan(product, machine) and _plans.why(product, machine, found[0])
    names = {_plans.tile_name(one, machine) for one in found}
    check_tiles(names, [n for n in _plans.TILES[architecture] if "x192x" not in n], architecture == "sm90")
    assert all(int(n.split("x")[1]) % 128 == 0 for n in names) or architecture != "sm90"
    alone = _plans.plan(_plans.Product(1, 2048, 5120, 8192), machine)
    assert found[0]["predicted_us"] > 1.7 * alone["predicted_us"]
    assert _plans.estimate_us(product) == 2 * _plans.estimate_us(_plans.Product(1, 2048, 5120, 8192))


@pytest.mark.parametrize("collective", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_plans_of_fused_operations(collective):
    """Tiles that serve other ranks are not whole, and have room for what others send; the rest is as they travel."""
    hopper, summing = _plans.Machine("sm90"), collective != "all_gather_matmul"
    takes = {n for n in _plans.TILES["sm90"] if not (summing and "x192x" in n)}
    for m, n, k in ((64, 4096, 8192), (2048, 6144, 12288), (3, 100, 40)):
        plain = _plans.Product(1, m, n, k)
        alone = _plans.plan(plain, hopper)
        rows = (m - 3 * (m // 4), m // 4, m // 4, m // 4)
        product = plain._replace(collective=collective, shard_rows=rows, rank=1)
        found = _plans.candidates(product, hopper)
        assert {_plans.tile_name(one, hopper) for one in found} == takes
        assert found[0] == _plans.plan(product, hopper) and _plans.why(product, hopper, found[0])
        assert found[0]["predicted_us"] > alone["predicted_us"] or m == 3
        assert _plans.plan(product, _plans.Machine("cpu")) == _plans.plan(plain, _plans.Machine("cpu"))
    assert _plans.plan(_plans.Product(1, 64, 4096, 8192), hopper)["suffix"]
    with pytest.raises(RuntimeError, match=r"take whole tiles, one each, and no rows of other ranks"):
        _plans.plan(product, hopper, tile="64x128x64s")


def test_a_fused_gather_takes_own_rows_first():
    product = _plans.Product(1, 2048, 6144, 12288, collective="all_gather_matmul", shard_rows=(512,) * 4)
    assert _plans.plan(product, _plans.Machine("sm90"))["schedule"] == "own_first"
    last = product._replace(shard_rows=(2048, 0, 0, 0))  # nothing is waited for
    assert _plans.plan(last, _plans.Machine("sm90"))["schedule"] != "own_first"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"collective": "all_reduce"}, "collective must be '', 'all_gather_matmul'"),
        ({"shard_rows": (8,)}, "shard_rows must name 2 to 16 ranks, and rank one of them, but there are 1"),
        ({"rank": 2}, "there are 2 and rank is 2"),
        ({"shard_rows": (4, 5)}, "must add up to m = 8, but they add up to 9"),
        ({"shard_rows": (-1, 9)}, "must not be negative, but rank 0 has -1 rows"),
        ({"out_bytes": 8}, "out_bytes must be 2 or 4, but it is 8"),
        ({"batch": 2}, "takes no batch and no group_sizes"),
        ({"group_sizes": (4, 4)}, "takes no batch and no group_sizes"),
    ],
)
def test_plans_of_fused_operations_refuse(changes, words):
    product = _plans.Product(1, 8, 64, 64, collective="matmul_all_reduce", shard_rows=(4, 4))
    _plans.plan(product, _plans.Machine("sm90"))
    with pytest.raises(RuntimeError, match=re.escape(words)):
        _plans.plan(product._replace(**changes), _plans.Machine("sm90"))


def test_explain_knows_what_follows(monkeypatch):
    """The plan is that of the kernel's call: gated, with an epilogue, or neither."""
    asked = []
    real = _plans.candidates

    def spy(product, machine):
        asked.append(product)
        return real(product, _plans.Machine("sm90"))

    monkeypatch.setattr(_plans, "candidates", spy)
    monkeypatch.setattr(_plans, "machine_of", lambda *_: _plans.Machine("sm90"))
    a, b, x = torch.randn(3, 200, 300), torch.randn(300, 100), torch.randn(3, 200, 100)

    def follows(a=a, b=b, **options):
        explanation = tpk.explain("matmul", a, b, **options)
        return explanation, (asked[-1].gated, asked[-1].finishes)

    assert follows()[1] == follows(alpha=2.0)[1] == follows(activation="none")[1] == (False, False)
    for options in (
        dict(bias=b[0]),
        dict(residual=x),
        dict(activation="relu"),
        dict(accumulate_into=x.bfloat16()),
    ):
        assert follows(**options)[1] == (False, True)
    assert follows(accumulate_into=x)[1] == (False, False)  # float32: summed where it is stored
    assert not asked[-1].outer_major
    follows(a=torch.randn(300, 200).t())
    assert asked[-1].outer_major and not asked[-2].outer_major
    gated, what = follows(gate=b, activation="silu", residual=x)
    assert what == (True, True) and asked[-1][:4] == (1, 600, 100, 300)
    assert "K=300 float32 gated" in str(gated) and "cuBLAS, two products, a rough estimate" in str(gated)
    # Where backward wants both products, they are computed apart, and the plan is that of one.
    trained = b.clone().requires_grad_()
    assert follows(b=trained, gate=b)[1] == (False, False)
    assert follows(b=trained, gate=b, save_preact=False)[1] == (True, True)
    with torch.no_grad():
        assert follows(b=trained, gate=b)[1] == (True, True)
    follows(a=torch.randn(2, 1, 5, 300), b=torch.randn(4, 300, 7))
    assert asked[-1][:4] == (8, 5, 7, 300)
    with pytest.raises(tpk.errors.ShapeError, match="gate: expected the shape of b"):
        tpk.explain("matmul", a, b, gate=b[:, :50])


def test_why_a_plan_cuts_tiles():
    machine = _plans.Machine("sm90", 132)

    def why(*size):
        product = _plans.Product(*size)
        return _plans.why(product, machine, _plans.plan(product, machine))

    assert "whole tiles would keep" in why(1, 512, 512, 32768) and "hybrid_aligned" in why(1, 512, 512, 32768)
    assert "cutting them was not predicted to be faster" in why(1, 128, 128, 64)


def test_names_of_tiles_are_those_of_the_kernel():
    walking = tuple(name for name in _host.HOPPER_TILES if not _plans.is_whole(name))
    assert _plans.TILES["sm90"] == walking
    for size in ((1, 512, 512, 512), (1, 64, 8192, 8192), (3, 5000, 136, 4000)):
        whole = torch.ops.tpkernels.streamk_whole_tiles(*size)
        times = [
            _plans.plan(_plans.Product(*size), _plans.Machine("sm90"), tile=n)["predicted_us"] for n in whole
        ]
        assert set(whole) <= set(_host.HOPPER_TILES) - set(walking) and times == sorted(times)
    gated = torch.ops.tpkernels.streamk_whole_tiles(1, 512, 512, 512, gated=True)
    assert gated and all(n.split("x")[1] == "128" and "64s/" in n for n in gated)
    with pytest.raises(
        RuntimeError, match="streamk_whole_tiles: batch, m, n, k and multiprocessors must not be"
    ):
        torch.ops.tpkernels.streamk_whole_tiles(1, -1, 512, 512)


def test_few_long_sums_in_float32_are_cut():
    """What is cut among eight CTAs at most adds up errors that a result of 4 bytes shows."""
    machine = _plans.Machine("sm90")
    for size in ((1, 256, 256, 65536), (1, 1000, 128, 20000)):
        product = _plans.Product(*size)
        assert _plans.plan(product, machine)["suffix"]  # in 16 bits: whole tiles
        wide = product._replace(out_bytes=4)
        chosen = _plans.plan(wide, machine)
        assert chosen["partial_tiles"] > 0 or size[3] / chosen["cluster"][2] <= 4096
        tiles = [name for name in _plans.tiles_of(wide, machine) if _plans.is_whole(name)]
        cuts = [_plans.plan(wide, machine, tile=name)["cluster"] for name in tiles]
        assert all(len(cut) == 3 and size[3] / cut[2] <= 4096 for cut in cuts)
        name = "64x64x64w/1x1x8"  # may be asked for, nevertheless
        assert _plans.tile_name(_plans.plan(wide, machine, tile=name), machine) == name
    full = _plans.Product(1, 2048, 2048, 16384, out_bytes=4)  # no multiprocessor is free to cut it
    assert any(_plans.is_whole(name) for name in _plans.tiles_of(full, machine))


def test_the_product_that_is_preferred():
    """Pure: asked for hardware that is not here. The estimate is a roofline of 132 multiprocessors."""
    large, hopper = _plans.Product(1, 8192, 8192, 8192), _plans.Machine("sm90", 132)
    estimate = _plans.estimate_us(large)
    assert estimate == pytest.approx(4.4 + 2 * 8192**3 / 6.97e8)
    assert not _plans.prefers_streamk(large, hopper)
    assert _plans.prefers_streamk(large, hopper, estimate)
    short = _plans.Product(1, 512, 512, 512)
    assert _plans.prefers_streamk(short, hopper)
    for other in ("cpu", "sm80", "sm90-portable"):
        assert not _plans.prefers_streamk(short, _plans.Machine(other))
    assert _plans.estimate_us(large, 66) == pytest.approx(2 * estimate - 4.4)
    thin = _plans.Product(1, 1, 16384, 16384)  # memory: the weight's bytes, however many multiprocessors
    assert _plans.estimate_us(thin) == _plans.estimate_us(thin, 66) > 2 * 16384**2 / 2.48e6
    assert _plans.estimate_us(_plans.Product(4, 512, 512, 512)) > _plans.estimate_us(
        _plans.Product(1, 512, 512, 512)
    )


def test_explain_meta_tensors():
    meta = dict(device="meta", dtype=torch.bfloat16)
    explanation = tpk.explain("matmul", torch.empty(8192, 4096, **meta), torch.empty(4096, 14336, **meta))
    assert "M=8192 N=14336 K=4096 bfloat16" in str(explanation)


def test_shard_sizes():
    assert tpk.shard_sizes(10, 4) == [3, 3, 3, 1]
    assert tpk.shard_sizes(2, 4) == [1, 1, 0, 0]
    assert tpk.shard_sizes(0, 3) == [0, 0, 0]
    for total in range(40):
        for world in range(1, 9):
            sizes = tpk.shard_sizes(total, world)
            assert sum(sizes) == total and len(sizes) == world and min(sizes) >= 0
            chunks = [len(c) for c in torch.arange(total).chunk(world)] if total else []
            assert [s for s in sizes if s] == [c for c in chunks if c]
    with pytest.raises(ArgumentError, match="world"):
        tpk.shard_sizes(3, 0)


def test_an_empty_environment_variable_means_auto(monkeypatch):
    monkeypatch.setenv("TPK_PATH", "")
    tpk.matmul(torch.randn(2, 3), torch.randn(3, 4))
    assert tpk.last_path().path == "blas"


def test_explain_checks_as_the_operation_does():
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    with pytest.raises(tpk.errors.ShapeError, match="b: expected 3 rows"):
        tpk.explain("matmul", a, b.t())
    with pytest.raises(tpk.errors.ShapeError, match="bias"):
        tpk.explain("matmul", a, b, bias=torch.randn(9))
    with pytest.raises(TypeError, match="gatherdim"):
        tpk.explain("matmul", a, b, gatherdim=7)
    with pytest.raises(ArgumentError, match="b: expected at least one tensor"):
        tpk.explain("matmul", a, [])
    assert tpk.explain("matmul", a.numpy(), b.numpy()).path == "blas"


def test_plans_by_architecture():
    plan = torch.ops.tpkernels.streamk_plan
    assert plan(1, 1024, 1024, 65536, "cuda") == plan(1, 1024, 1024, 65536, "sm90", "auto", 0, 1, 132)
    assert (
        plan(1, 4096, 4096, 4096, "sm80", "stream_k", 8)[1][5] == 8
    )  # workers are tickets, as in streamk_gemm
    with pytest.raises(
        RuntimeError, match="device must be 'cpu', 'cuda', 'sm80', 'sm90', 'sm90-portable', 'sm90-fp8'"
    ):
        plan(1, 8, 8, 8, "sm70")
