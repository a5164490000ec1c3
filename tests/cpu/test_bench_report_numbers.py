"""bench report: the arithmetic, by hand, and what it says of the machine."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import bench_samples as samples
import pytest
from bench_samples import fused, row, stats

from bench.records import Footer, Header, Results, Row
from bench.report import markdown_report
from bench.report.analysis import (
    by_card,
    constant,
    group_cases,
    intensity,
    noise_floor,
    percentile,
    spread,
    stream_k_gain,
    waves,
    within,
)
from bench.report.provenance import warnings
from bench.report.summary import headlines
from bench.report.table import number, percent, size

# --- arithmetic ------------------------------------------------------------------------------------------------


def test_percentiles_and_spread():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([4, 1, 3, 2], 5) == pytest.approx(1.15)
    assert percentile([7], 95) == 7
    assert math.isnan(percentile([], 50))
    s = spread([0.5, 1.0, 2.0, 4.0])
    assert s is not None
    assert s.geomean == pytest.approx(2**0.5)
    assert (s.n, s.min, s.max, s.p50, s.wins, s.share_won) == (4, 0.5, 4.0, 1.5, 3, 0.75)
    assert spread([]) is None


def test_speedup_is_baseline_over_variant():
    (g,) = group_cases([row("cublas", 100), row("streamk", 80, "ours"), row("other", 125)], "gemm")
    assert g.speedup(g.rows["streamk"]) == pytest.approx(1.25)
    assert g.speedup(g.rows["other"]) == pytest.approx(0.8)
    assert g.speedup(g.baseline) == 1
    assert g.speedup(None) is None


@pytest.mark.parametrize(
    "other",
    [
        row("x", 50, status="failed"),  # a fast wrong answer
        row("x", None, status="timeout"),
        row("x", None),
        row("cublaslt-fp8", 50),
        row("cublas again", 50, "noise", partner="cublas"),
    ],
)
def test_what_has_no_speedup(other):
    (g,) = group_cases([row("cublas", 100), other], "gemm")
    assert g.speedup(other) is None


def test_no_speedup_over_a_wrong_baseline():
    (g,) = group_cases([row("cublas", 100, status="failed"), row("streamk", 80, "ours")], "gemm")
    assert g.baseline_name == "cublas"
    assert g.baseline is None
    assert g.speedup(g.ours) is None


def test_a_row_with_its_own_baseline_is_compared_with_that():
    base = dataclasses.replace(fused("nccl+cublas", 100), host_us=stats(140))
    hosted = dataclasses.replace(fused("cublasmp", None), host_us=stats(160))
    (g,) = group_cases([base, hosted], "overlap")
    assert g.speedup(hosted) == pytest.approx(140 / 160)  # host-launched against host-launched
    beside = dataclasses.replace(hosted, extra={"baseline_host_us": 200.0})
    assert g.speedup(beside) == pytest.approx(1.25)
    graph = dataclasses.replace(
        fused("cublasmp", 80), extra={"baseline_us": 120.0, "baseline_host_us": 500.0}
    )
    assert g.speedup(graph) == pytest.approx(1.5)
    lost = dataclasses.replace(hosted, extra={"baseline_error": "crashed: x"})
    assert g.speedup(lost) is None


def test_exposed_and_hidden_communication():
    rows = [fused("gemm", 100, "part"), fused("comm", 60, "part"), fused("ours:nccl+streamk", 130, "ours")]
    (g,) = group_cases(rows, "overlap")
    e = g.exposed(g.ours)
    assert e is not None
    assert (e.exposed, e.hidden) == (pytest.approx(30), pytest.approx(0.5))
    (g,) = group_cases([rows[0], rows[2]], "overlap")
    e = g.exposed(g.ours)
    assert e is not None
    assert e.exposed == pytest.approx(30)
    assert math.isnan(e.hidden)
    (g,) = group_cases(rows[1:], "overlap")
    assert g.exposed(g.ours) is None
    # Launched from the host: against parts launched from the host.
    hosted = dataclasses.replace(fused("cublasmp", None), host_us=stats(150))
    parts = [dataclasses.replace(r, host_us=stats(us)) for r, us in ((rows[0], 120.0), (rows[1], 100.0))]
    (g,) = group_cases([*parts, hosted], "overlap")
    e = g.exposed(hosted)
    assert e is not None
    assert (e.exposed, e.hidden) == (pytest.approx(30), pytest.approx(0.7))


def test_who_stands_for_us_and_who_is_the_best_peer():
    rows = [
        fused("nccl+cublas", 100),
        fused("symm_mem", 80),
        fused("ours:a", 70, "ours"),
        fused("ours:b", 64, "ours"),
    ]
    (g,) = group_cases(rows, "overlap")
    assert g.ours is not None
    assert g.ours.variant == "ours:b"
    assert g.best_peer is not None
    assert g.best_peer.variant == "symm_mem"
    assert g.against(g.ours, g.best_peer) == pytest.approx(80 / 64)
    # What auto takes stands for us, even if a forced schedule is faster or auto was wrong.
    rows = [
        row("cublas", 100),
        row("streamk", 110, "ours", status="failed"),
        row("streamk:stream_k", 90, "ours"),
    ]
    (g,) = group_cases(rows, "gemm")
    assert g.ours is not None
    assert (g.ours.variant, g.ours.status) == ("streamk", "failed")


def test_noise_floor():
    def pair(case: str, a: float, b: float) -> list[Row]:
        return [row("cublas", a, case=case), row("cublas again", b, "noise", case=case, partner="cublas")]

    groups = group_cases([*pair("a", 100, 101), *pair("b", 100, 98), *pair("c", 100, 100)], "gemm")
    noise = noise_floor(groups)
    assert noise is not None
    # Differences, the larger way round: 0, 0.01, 100/98 - 1; the 95th percentile is at 0.9 between the last two.
    assert noise.floor == pytest.approx(0.01 + 0.9 * (100 / 98 - 1 - 0.01))
    assert noise.n == 3
    assert noise_floor(group_cases([row("cublas", 1)], "gemm")) is None
    assert within(1.015, noise)
    assert within(1 / 1.015, noise)
    assert not within(0.97, noise)
    assert not within(1.0, None)


def test_waves_and_gain():
    plan = {"schedule": "stream_k", "tile": [128, 256, 64], "tiles": 198, "workers": 132}
    ours = row("streamk", 100, "ours", extra={"plan": plan})
    assert waves(ours) == 1.5
    assert waves(dataclasses.replace(ours, extra={"plan": plan, "waves": 0.75})) == 0.75
    assert waves(dataclasses.replace(ours, extra={"plan": {**plan, "schedule": "split_k"}})) is None
    whole = {**plan, "suffix": "w", "cluster": [2, 1], "multiprocessors": 132, "workers": 198}
    assert waves(dataclasses.replace(ours, extra={"plan": whole, "waves": 0.001})) == 3.0
    assert waves(None) is None
    (g,) = group_cases([ours, row("streamk:dp-same-tile", 120, "ours")], "gemm")
    assert stream_k_gain(g) == pytest.approx(1.2)


def test_intensity_and_constants():
    assert intensity(row("x", 1)) == pytest.approx(2 * 64**3 / (2 * 3 * 64**2))
    assert intensity(row("x", 1, flops=10.0, bytes=4.0)) == 2.5
    assert intensity(row("x", 1, params={})) is None
    assert constant(samples.link_rows(), "hbm_gbps") == 2900
    assert constant(samples.link_rows(), "nonsense") is None


def test_numbers():
    shown = [
        number(v) for v in (0.00123, 0.512, 6.404, 21.33, 617.4, 1540.2, 12345.6, 0, None, math.nan, -4.41)
    ]
    assert shown == ["0.0012", "0.512", "6.40", "21.3", "617", "1,540", "12,346", "0", "–", "–", "-4.41"]
    assert [percent(v) for v in (0.5, 1.2, -0.001, None)] == ["50 %", "120 %", "0 %", "–"]
    assert [size(v) for v in (512, 2048, 25 << 20, 1 << 30)] == ["512 B", "2 KiB", "25 MiB", "1 GiB"]


# --- provenance --------------------------------------------------------------------------------------------------


def results(*runs: tuple[str, dict[str, Any], Footer | None]) -> Results:
    found = Results()
    for name, env, footer in runs:
        found.headers.append(Header(name, "gemm", "now", env={**samples.ENV, **env}))
        found.rows.append(row("cublas", 100, case=name, run=name))
        found.footers += [footer] if footer else []
    return found


def footer(run_id: str, complete: bool = True, **state: Any) -> Footer:
    return Footer(run_id, "then", 1.0, {"gpus": [{**samples.GPU_STATE, **state}] * 8}, complete)


def test_nothing_to_warn_of():
    assert warnings(results(("a", {}, footer("a")))) == []


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (results(("a", {"dirty": True}, footer("a"))), "Measured with uncommitted changes: ec1131a (dirty)."),
        (results(("a", {}, None)), "Run a (gemm) is not complete"),
        (results(("a", {}, footer("a", complete=False))), "Run a (gemm) is not complete"),
        (results(("a", {}, footer("a", sm_mhz=1700))), "GPU 0 from 1980 to 1700 MHz"),
        (results(("a", {}, footer("a", throttle_reasons=0x40))), "slowed down after it (hardware thermal)"),
        (results(("a", {"multicast": {}}, footer("a"))), "multicast through the switch was not turned off"),
        (
            results(("a", {}, footer("a")), ("b", {"nccl": "2.29.1"}, footer("b"))),
            "differ in nccl: 2.28.9, 2.29.1",
        ),
        (
            results(("a", {}, footer("a")), ("b", {"commit": "f00"}, footer("b"))),
            "differ in the commit: ec1131a, f00",
        ),
    ],
)
def test_warnings(found, sentence):
    assert len(found.headers) == 2 or len(warnings(found)) == 1
    assert any(sentence in w for w in warnings(found)), warnings(found)


def test_what_is_no_reason_to_warn():
    assert warnings(results(("a", {}, None), ("b", {}, footer("b")))) == []  # resumed, and then complete
    assert warnings(results(("a", {}, footer("a", sm_mhz=345, throttle_reasons=1)))) == []  # idle by then
    cpu = {"device": "cpu", "gpu": "", "multicast": {}, "before": []}
    assert warnings(results(("a", cpu, Footer("a", "then", 1.0, {"gpus": []})))) == []


def test_cards_are_never_mixed():
    found = results(("a", {}, footer("a")), ("b", {"gpu": "NVIDIA H200"}, footer("b")))
    for r in list(found.rows):
        found.rows.append(row("streamk", 80, "ours", case="same", run=r.run))
    found.rows.append(row("cublas", 100, case="same", run="b"))
    parts = by_card(found)
    assert list(parts) == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert [len(p.rows) for p in parts.values()] == [2, 3]
    text = markdown_report(found)
    assert text.count("# NVIDIA H") == 2
    assert headlines(parts["NVIDIA H100 80GB HBM3"].latest()) == []  # its baseline is on the other card
    assert [h.value for h in headlines(parts["NVIDIA H200"].latest())] == ["1.25×"]


def test_headlines():
    rows = [
        *(row("cublas", 100, case=c) for c in "ab"),
        row("streamk", 50, "ours", case="a"),
        row("streamk", 200, "ours", case="b"),
        *(
            fused(v, us, r)
            for v, us, r in (("gemm", 100, "part"), ("comm", 60, "part"), ("nccl+cublas", 160, "peer"))
        ),
        fused("ours:x", 130, "ours"),
    ]
    gemm, overlap = headlines(rows)
    assert gemm.value == "1.00×"
    assert gemm.detail == "2 cases, from 0.50 (b) to 2.00 (a)"
    assert overlap.value == "1.23×"
    assert overlap.label == "fused operations, 4 ranks, against nccl+cublas"  # one case has no mean
    assert "50 % of the communication hidden" in overlap.detail
