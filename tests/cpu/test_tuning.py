"""Autotuning of the local product on the CPU, whose Stream-K kernel has several tiles to choose from."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_fakes import FakeRuntime

import tpkernels as tpk
from tpkernels.comm import runtime
from tpkernels.errors import ArgumentError
from tpkernels.ops import _gemm, _paths, _plans
from tpkernels.ops._paths import PlanArguments
from tpkernels.testing import assert_close_tiles
from tpkernels.tune import candidates, local, mode, timer
from tpkernels.tune import case as cases
from tpkernels.tune.candidates import Candidate
from tpkernels.tune.local import Call

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TPK_CACHE_DIR", str(tmp_path / "cache"))
    local.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield tmp_path / "cache"
    local.forget()


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes one candidate the fastest, by what it is."""

    def choose(wanted: Any) -> None:
        def times(call: Call, library: str, finished: Any = None) -> list[tuple[Candidate, float]]:
            case = call.case()
            tried = candidates.candidates(case.product, case.machine(call.a.device), library)
            assert any(map(wanted, tried)), tried
            return [(c, 10.0 if wanted(c) else 50.0) for c in tried]

        monkeypatch.setattr(local, "time_all", times)

    return choose


def last() -> _paths.PathRecord:
    record = tpk.last_path()
    assert record is not None
    return record


def test_without_it_nothing_changes(cache, generator):
    a, b = (torch.randn(40, 40, generator=generator) for _ in range(2))
    tpk.matmul(a, b)
    assert last().path == "blas" and "tuned" not in last().why
    assert not cache.exists() and local.counts.timed == 0


def test_the_environment(monkeypatch):
    for text, what in (("", "off"), ("0", "off"), ("1", "on"), ("read", "read")):
        monkeypatch.setattr(mode, "_mode", None)
        monkeypatch.setenv("TPK_AUTOTUNE", text)
        assert (mode.active(), mode.times()) == (what != "off", what == "on")
    monkeypatch.setattr(mode, "_mode", None)
    monkeypatch.setenv("TPK_AUTOTUNE", "always")
    with pytest.raises(ArgumentError, match=r"TPK_AUTOTUNE: expected 1 .*, got 'always'; unset it"):
        tpk.matmul(torch.ones(2, 2), torch.ones(2, 2))
    monkeypatch.setattr(mode, "_mode", None)
    with tpk.autotune(False):  # nobody asks the environment
        tpk.matmul(torch.ones(2, 2), torch.ones(2, 2))
    sentence = "mode: expected True, False, 'on', 'off' or 'read', got 'yes'"
    with pytest.raises(ArgumentError, match=sentence), tpk.autotune("yes"):
        pass


def test_modes_nest():
    with tpk.autotune():
        with tpk.autotune("read"):
            assert mode.active() and not mode.times()
        assert mode.times()
        with tpk.autotune(False):
            assert not mode.active()


CALLS = {
    "plain": {},
    "bias": {"bias": (150,), "activation": "silu"},
    "gate": {"gate": (1000, 150), "activation": "silu"},
    "residual": {"residual": (200, 150), "alpha": 0.5},
}


@pytest.mark.parametrize("follows", CALLS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_candidate_is_right(follows, dtype, generator, monkeypatch):
    """What is timed are the calls themselves, by plans that really differ."""
    monkeypatch.setattr(timer, "_BUDGET_S", 0.0)  # one round

    def made(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    a, b = made(200, 1000), made(1000, 150)
    given = {name: made(*x) if isinstance(x, tuple) else x for name, x in CALLS[follows].items()}
    e = _gemm.Epilogue(**given)
    call = Call(a, b, e, dtype)
    timed = local.time_all(call, "blas")
    assert [c.gemm for c, _ in timed[:2]] == ["blas", "streamk"] and len(timed) >= 5
    plans = [c.plan for c, _ in timed[1:]]
    assert len(set(plans)) == len(plans) and len({plan.tile for plan in plans}) >= 3
    assert all(0 < us < math.inf for _, us in timed)
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    want = tpk.matmul(a.double(), b.double(), path="blas", **wide)
    sums = a.double().abs() @ b.double().abs()
    magnitude = sums + sum(wide[name].abs() for name in ("bias", "residual") if name in wide)
    if "gate" in wide:  # each factor's error times the other factor; silu grows no faster than 1.1
        of_gate = a.double().abs() @ wide["gate"].abs()
        magnitude = 1.1 * of_gate * (a.double() @ b.double()).abs() + sums * (a.double() @ wide["gate"]).abs()
    for candidate, _ in timed:
        out = _gemm.run(_paths.Choice(candidate.gemm, "", plan=candidate.plan), a, b, e, out_dtype=dtype).out
        assert_close_tiles(out, want, dtype, k=1000, magnitude=magnitude, name=candidate.what)


def test_plans_reach_the_kernel(only, generator):
    """A split plan has other bits than whole tiles: those of the kernel asked by hand."""
    a, b = torch.randn(64, 2000, generator=generator), torch.randn(2000, 64, generator=generator)
    only(lambda c: c.plan.schedule == "split_k" and c.plan.splits == 4)
    with tpk.autotune():
        y = tpk.matmul(a, b)
        assert last().path == "streamk" and "split_k x4 10.0 us, the library 50.0" in last().why
        entry = next(iter(local.store_of(a.device).all().values()))
        by_hand = torch.empty(1, 64, 64)
        torch.ops.tpkernels.streamk_gemm(
            a[None], b[None], None, by_hand, None, "none", False, "split_k", 0, 4, entry.tile
        )
        assert torch.equal(y, by_hand[0])
        assert torch.equal(tpk.matmul(a, b), y)  # and again
        into = torch.randn(64, 64, generator=generator)
        want = into.double() + a.double() @ b.double()
        tpk.matmul(a, b, accumulate_into=into)
        assert last().op == "matmul_accumulate" and "split_k x4" in last().why
        assert_close_tiles(into, want, F32, k=2000)
    assert not torch.equal(tpk.matmul(a, b, path="streamk"), y), "the cost model would not split"


def test_gradients_and_batches_are_tuned_too(only, generator):
    only(lambda c: c.gemm == "streamk")
    a = torch.randn(3, 20, 30, generator=generator, requires_grad=True)
    b = torch.randn(3, 30, 10, generator=generator, requires_grad=True)
    with tpk.record_paths() as log, tpk.autotune():
        tpk.matmul(a, b).sum().backward()
    assert log.counts == {("matmul", "streamk"): 3}
    assert_close_tiles(b.grad, a.detach().double().mT @ torch.ones(3, 20, 10).double(), F32, k=20)
    keys = local.store_of(a.device).all()
    assert len(keys) == 3 and "matmul 3x20x10x30 float32>float32 ko plain" in next(iter(keys))


def test_a_named_path_is_never_tuned(cache, monkeypatch, generator):
    a = torch.randn(20, 20, generator=generator)
    with tpk.autotune():
        tpk.matmul(a, a, path="streamk")
        tpk.matmul(a, a, path="blas")
        monkeypatch.setenv("TPK_PATH", "streamk")
        tpk.matmul(a, a)
    assert local.counts.timed == 0 and not cache.exists()


def test_nothing_to_time():
    with tpk.autotune():
        for m, n, k in ((0, 4, 4), (4, 0, 4), (4, 4, 0)):
            y = tpk.matmul(torch.ones(m, k), torch.ones(k, n))
            assert y.shape == (m, n) and not y.any() and "tuned" not in last().why
    assert local.counts.timed == 0


def test_another_process_takes_what_was_timed(only, generator):
    a, b = torch.randn(30, 40, generator=generator), torch.randn(40, 50, generator=generator)
    only(lambda c: c.plan.tile == "16x64x128")
    with tpk.autotune():
        tpk.matmul(a, b)
        why = last().why
    local.forget()  # as a new process
    with tpk.autotune("read"):
        tpk.matmul(a, b)
        assert last().why == why and (local.counts.timed, local.counts.found) == (0, 1)
        tpk.matmul(b.t(), a.t())
        assert last().path == "blas" and last().why.endswith("not in the cache of tuned plans")
    with tpk.autotune():
        tpk.matmul(b.t(), a.t())
        assert local.counts.timed == 1


def test_a_plan_of_the_cache_that_no_kernel_has(generator):
    """It is timed anew, and replaced."""
    a = torch.randn(30, 30, generator=generator)
    with tpk.autotune():
        tpk.matmul(a, a)
        store = local.store_of(a.device)
        ((key, entry),) = store.all().items()
        store.put(key, dataclasses.replace(entry, gemm="streamk", tile="7x7x7"))
        local.forget()
        tpk.matmul(a, a)
        assert local.counts.timed == 1 and local.store_of(a.device).all()[key].tile != "7x7x7"


def test_nothing_is_timed_in_a_capture(monkeypatch, only, generator):
    fake = FakeRuntime()
    monkeypatch.setattr(runtime, "active", fake)
    only(lambda c: c.plan.tile == "16x64x128")
    a = torch.randn(30, 30, generator=generator)
    with tpk.autotune():
        fake.capture = True
        tpk.matmul(a, a)
        assert last().path == "blas" and last().why.endswith("not tuned while a CUDA graph is captured")
        assert local.counts.timed == 0
        fake.capture = False
        tpk.matmul(a, a)
        assert local.counts.timed == 1 and last().path == "streamk"
        fake.capture = True  # what is known is taken there too
        tpk.matmul(a, a)
        assert last().path == "streamk"


def test_compiled(only, generator):
    """One graph; tracing times nothing, a run does."""
    only(lambda c: c.plan.tile == "16x64x128")
    a = torch.randn(12, 30, generator=generator)
    compiled = torch.compile(
        lambda x: tpk.matmul(x, x.t(), activation="silu"), fullgraph=True, backend="aot_eager"
    )
    with tpk.autotune():
        y = compiled(a)
        assert local.counts.timed == 1 and last().path == "streamk"
        compiled(a)
        assert local.counts.timed == 1
    assert_close_tiles(y, torch.nn.functional.silu(a.double() @ a.double().t()), F32, k=30)


def test_explain_tells_without_timing(only, generator):
    only(lambda c: c.plan.tile == "16x64x128")
    a, b = torch.randn(30, 40, generator=generator), torch.randn(40, 50, generator=generator)
    options = {"bias": torch.randn(50, generator=generator), "activation": "silu"}
    with tpk.autotune():
        told = tpk.explain("matmul", a, b, **options)
        assert told.path == "blas" and told.why.endswith("not tuned yet: the first call times it")
        assert local.counts.timed == 0
        tpk.matmul(a, b, **options)
        told = tpk.explain("matmul", a, b, **options)
        assert (told.path, told.why) == (last().path, last().why) == ("streamk", last().why)
        assert tpk.explain("matmul", a, b).why.endswith("the first call times it")
    with tpk.autotune("read"):
        assert tpk.explain("matmul", a, b).why.endswith("not tuned yet: not in the cache")


def test_a_waiting_process_keeps_what_it_had(monkeypatch, only, generator):
    """Another one is timing the product for too long: no second choice later."""
    only(lambda c: c.gemm == "streamk")
    a = torch.randn(30, 30, generator=generator)
    monkeypatch.setattr(local, "WAIT_S", 0.0)
    with tpk.autotune():
        store = local.store_of(a.device)
        monkeypatch.setattr(store, "_locked", _never)
        tpk.matmul(a, a)
        assert last().path == "blas" and last().why.endswith("another process has been timing it for 0 s")
        monkeypatch.undo()
        tpk.matmul(a, a)
        assert last().path == "blas" and local.counts.timed == 0


def _never(byte: int, timeout_s: float) -> Any:
    from contextlib import nullcontext

    return nullcontext(False)


def test_no_memory_for_copies(monkeypatch, generator):
    def fails(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(timer, "copies_of", fails)
    a = torch.randn(30, 30, generator=generator)
    with tpk.autotune(), pytest.warns(RuntimeWarning, match="no memory to time matmul 1x30x30x30"):
        y = tpk.matmul(a, a)
    assert torch.equal(y, a @ a) and last().why.endswith("no memory to time others")


# Parts


def test_the_library_stays_unless_another_is_clearly_faster():
    library = Candidate("blas", PlanArguments(), 0.0, "blas")
    model = Candidate("streamk", PlanArguments("stream_k", 1, "64x64x128"), 70.0, "the model's")
    other = Candidate("streamk", PlanArguments("split_k", 2, "64x64x128"), 75.0, "another")
    inf = math.inf
    for times, taken, us in (
        ((100, 90, 95), model, 90),
        ((100, 99, 98.5), library, 100),
        ((100, 90, 80), other, 80),
        ((100, 120, inf), library, 100),
        ((inf, inf, 5), other, 5),
    ):
        entry = local.decide(list(zip((library, model, other), map(float, times), strict=True)))
        assert (entry.gemm, entry.what, entry.us) == (taken.gemm, taken.what, us)
        assert all(map(math.isfinite, (entry.library_us, entry.model_us)))
        assert PlanArguments(entry.schedule, entry.splits, entry.tile) == taken.plan
        assert (entry.model, entry.predicted_us) == ("the model's", 70.0)


def test_candidates_of_the_hopper_kernel():
    """No GPU is needed to list them. The model's choice is named, so that other constants do not change it."""
    hopper = _plans.Machine("sm90", 132)
    for product in (
        _plans.Product(1, 2048, 5120, 8192),
        _plans.Product(1, 64, 8192, 8192),
        _plans.Product(1, 512, 3584, 4096, True, True),
    ):
        found = candidates.candidates(product, hopper, "cublas")
        assert found[0].gemm == "cublas" and 4 <= len(found) <= 13
        chosen = _plans.plan(product, hopper)
        named = found[1].plan
        again = _plans.plan(product, hopper, named.schedule, named.tile, named.splits)
        assert again == chosen and found[1].predicted_us == chosen["predicted_us"]
        assert len({c.plan.tile for c in found[1:]}) >= 2
        assert all(c.predicted_us <= 1.5 * found[1].predicted_us for c in found[1:])
        names = set(_plans.tiles_of(product, hopper))
        assert {c.plan.tile for c in found[1:]} <= names


def test_what_the_hopper_kernel_cannot_load_is_planned_for_the_portable_one(monkeypatch):
    monkeypatch.setattr(_plans, "machine_of", lambda *_: _plans.Machine("sm90", 132))
    place = torch.device("cuda", 0)

    def machine(a, b, **follows):
        e = _gemm.Epilogue(**follows)
        return cases.of(a, b, e, BF16, want_preact=False, device="cuda").machine(place).architecture

    def meta(*shape):
        return torch.empty(*shape, dtype=BF16, device="meta")

    assert machine(meta(64, 64), meta(64, 64)) == "sm90"
    assert machine(meta(64, 64), meta(64, 64).t()) == "sm90"
    assert machine(meta(64, 63), meta(63, 64)) == "sm90-portable"
    assert machine(meta(64, 64), meta(64, 128)[:, ::2]) == "sm90-portable"
    assert machine(meta(64, 64), meta(64, 64), gate=meta(64, 64)) == "sm90"
    assert machine(meta(64, 64), meta(64, 64), gate=meta(64, 64).t()) == "sm90-portable"


def test_keys():
    a, b, wide = torch.empty(2, 5, 7), torch.empty(9, 7).t(), torch.empty(7, 18)[:, ::2]
    e = _gemm.Epilogue(bias=torch.empty(9), activation="relu")

    def key(left, right, e=_gemm.PLAIN, **more):
        return cases.of(left, right, e, more.pop("out", F32), want_preact=False, **more).key

    threads = f" threads={torch.get_num_threads()}"
    assert key(a, b) == "matmul 1x10x9x7 float32>float32 kk plain" + threads
    assert key(a, wide) == "matmul 1x10x9x7 float32>float32 kx plain" + threads
    assert key(a, b, e, out=BF16) == "matmul 1x10x9x7 float32>bfloat16 kk bias+activation" + threads
    assert key(a.mT, a) == "matmul 2x7x7x5 float32>float32 oo plain" + threads
    assert key(a.half(), b.half(), into=True, device="cuda") == "matmul 1x10x9x7 float16>float32 k!k! into"


def test_copies_lie_as_the_tensors_do(monkeypatch, generator):
    base = torch.randn(9, 40, generator=generator).to(BF16)
    for x in (base, base.t(), base[1:, 3:30], base[:, ::3], base[0].expand(5, 40), base[:0], base[2]):
        y = timer.copy_alike(x)
        assert torch.equal(x, y) and x.shape == y.shape and (x.stride() == y.stride() or x.numel() == 0)
        assert x.numel() == 0 or (y.data_ptr() - x.data_ptr()) % 16 == 0
        assert x.numel() == 0 or y.data_ptr() != x.data_ptr()
    monkeypatch.setattr(timer.machine, "cache_bytes", lambda device: 2000)
    sets = timer.copies_of([base, None], base.device)
    assert len(sets) == 6 and sets[0][0] is base and all(torch.equal(x, base) and n is None for x, n in sets)


def test_a_race_drops_who_falls_behind():
    ran = [0] * 4

    def runner(i: int, us: float) -> Any:
        def run() -> float:
            ran[i] += 1
            return us

        return run

    times = timer.race([runner(0, 10.0), runner(1, 100.0), runner(2, 12.0), runner(3, 200.0)], keep=[1])
    assert times == [10.0, 100.0, 12.0, 200.0]
    assert ran == [7, 7, 3, 1]  # 12 is more than 1.15 times 10, once three rounds could tell


def test_a_race_survives_what_cannot_run():
    def fails() -> float:
        raise RuntimeError("no memory for a workspace")

    assert timer.race([lambda: 5.0, fails], keep=[0, 1]) == [5.0, math.inf]
    with pytest.raises(RuntimeError, match="no memory for a workspace"):
        timer.race([fails, fails])


def test_a_race_takes_medians():
    steady, odd = iter([10.0] * 7), iter([9.0, 9.0, 9.0, 500.0, 9.0, 500.0, 9.0])
    assert timer.race([lambda: next(steady), lambda: next(odd)], keep=[1]) == [10.0, 9.0]


def test_tf32_is_another_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's switch may change between two calls, and the kernels for it have other tiles."""
    call = local.Call(torch.zeros(4, 8), torch.zeros(8, 4), _gemm.PLAIN, torch.float32)
    names = set()
    for allowed in (False, True):
        monkeypatch.setattr(_plans, "may_use_tf32", lambda dtype, allowed=allowed: allowed)
        names.add((call.name(), cases.of(*call[:4], want_preact=False, device="cuda").key))
    assert len(names) == len({name for name, _ in names}) == len({key for _, key in names}) == 2
