"""bench compare: ratios, what counts as noise, exit codes, statuses, baselines, and bad input."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_samples as samples
import pytest
from bench_samples import stats

from bench import records
from bench.compare import BASELINE, DEFAULT_FLOOR, compare, run
from bench.errors import BenchError
from bench.records import Header, Results, Row, Stats


def row(variant: str, us: float | Stats | None, case: str = "a", **more: Any) -> Row:
    """A row of the gemm suite; 1.1 % wide unless given as Stats."""
    role = "noise" if variant.endswith("again") else "ours" if variant.startswith("streamk") else "peer"
    given: dict[str, Any] = {"suite": "gemm", "op": "matmul", "role": role, "dtype": "bfloat16", "run": "r"}
    if role == "noise":
        given["partner"] = variant.removesuffix(" again")
    timed = us if us is None or isinstance(us, Stats) else stats(us)
    return Row(**{**given, **more}, case=case, variant=variant, us=timed)


def results(*rows: Row, **env: Any) -> Results:
    return Results([Header("r", "gemm", "now", env={**samples.ENV, **env})], list(rows))


def files(tmp_path: Path, a: Sequence[Row], b: Sequence[Row], **env: Any) -> tuple[Path, Path]:
    return samples.write(tmp_path / "a.jsonl", a), samples.write(tmp_path / "b.jsonl", b, env=env)


def shown(a: Path, b: Path, **options: Any) -> tuple[int, str]:
    stdout = io.StringIO()
    code = run(a, b, stdout=stdout, **options)
    return code, stdout.getvalue()


def exact(us: float) -> Stats:
    """Samples without any width."""
    return Stats(us, us, us, us, 10)


# --- ratios and significance ---------------------------------------------------------------------------------------


def test_ratio_is_b_over_a():
    (change,) = compare(results(row("streamk", 100)), results(row("streamk", 110))).changes
    assert change.ratio == pytest.approx(1.1)
    assert change.significant
    assert change.slower(0.05)
    assert not change.slower(0.2)


def test_noise_floor_is_the_larger_of_the_two_files():
    def pair(again: float) -> list[Row]:
        return [row("cublas", exact(100)), row("cublas again", exact(again))]

    a = results(*pair(101), row("streamk", exact(100)))
    b = results(*pair(96), row("streamk", exact(104.1)))
    found = compare(a, b)
    assert found.noise == {("gemm", "bfloat16", 1): pytest.approx(100 / 96 - 1)}
    change = next(c for c in found.changes if c.after.variant == "streamk")
    assert change.noise == pytest.approx(100 / 96 - 1)
    assert not change.significant  # 4.1 % is less than 4.17 %
    slower = results(*pair(96), row("streamk", exact(104.3)))
    assert next(c for c in compare(a, slower).changes if c.after.variant == "streamk").significant
    faster = results(*pair(96), row("streamk", exact(100 / 1.043)))
    change = next(c for c in compare(a, faster).changes if c.after.variant == "streamk")
    assert change.significant
    assert not change.slower(0.0)


def test_floors_are_those_of_suite_dtype_and_world():
    noisy = [row("cublas", 100), row("cublas again", 150)]
    other = row("streamk", exact(100), dtype="float16")
    found = compare(results(*noisy, other), results(*noisy, row("streamk", exact(103), dtype="float16")))
    assert found.noise[("gemm", "bfloat16", 1)] == pytest.approx(0.5)
    assert found.noise[("gemm", "float16", 1)] == DEFAULT_FLOOR
    change = next(c for c in found.changes if c.after.dtype == "float16")
    assert change.significant


def test_overlapping_ranges_are_no_change():
    a = results(row("streamk", Stats(90, 100, 110, 80, 10)))
    (change,) = compare(a, results(row("streamk", Stats(104, 115, 126.5, 100, 10)))).changes
    assert change.noise == pytest.approx(0.1 + 22.5 / 115 / 2)
    assert not change.significant
    (change,) = compare(a, results(row("streamk", Stats(119, 120, 121, 118, 10)))).changes
    assert change.significant


def test_second_measurements_and_constants_are_not_compared():
    rows = samples.few_rows()
    found = compare(results(*rows), results(*rows))
    variants = {c.after.variant for c in found.changes}
    assert not any("again" in v for v in variants)
    assert "fit" not in variants
    assert all(c.ratio == 1 and not c.significant for c in found.changes)
    assert found.statuses == found.missing == found.new == found.incomparable == []


def test_the_last_of_several_measurements_counts():
    a = results(row("streamk", 500), row("streamk", 100))
    (change,) = compare(a, results(row("streamk", 100))).changes
    assert change.ratio == 1


def test_host_time_is_compared_with_host_time():
    def both(us: float | None, host: float | None) -> Row:
        return dataclasses.replace(row("streamk", us), host_us=stats(host) if host else None)

    (change,) = compare(results(both(100, 150)), results(both(None, 165))).changes
    assert change.ratio == pytest.approx(1.1)
    found = compare(results(both(100, None)), results(both(None, 165)))
    assert found.changes == []
    assert [r.variant for r in found.incomparable] == ["streamk"]


# --- relative to a baseline ----------------------------------------------------------------------------------------


def test_relative_to_a_baseline():
    # The host of B is 20 % slower in everything; ours got 10 % slower beside that.
    a = [row("cublas", exact(100)), row("streamk", exact(80)), row("other", exact(200))]
    b = [row("cublas", exact(120)), row("streamk", exact(105.6)), row("other", exact(240))]
    for name in ("cublas", BASELINE):
        found = compare(results(*a), results(*b), name)
        ratios = {c.after.variant: c.ratio for c in found.changes}
        assert ratios == {"streamk": pytest.approx(1.1), "other": pytest.approx(1.0)}
        assert found.incomparable == []


def test_relative_width_includes_the_baseline():
    a = [row("cublas", Stats(99, 100, 101, 99, 9)), row("streamk", exact(80))]
    (change,) = compare(results(*a), results(*a), "cublas").changes
    assert change.noise == pytest.approx(max(DEFAULT_FLOOR, 0.02))
    wide = [row("cublas", Stats(90, 100, 110, 90, 9)), row("streamk", exact(80))]
    (change,) = compare(results(*a), results(*wide), "cublas").changes
    assert change.noise == pytest.approx((0.02 + 0.2) / 2)


def test_relative_to_the_baseline_of_the_same_processes():
    def isolated(host: float, beside: float) -> list[Row]:
        own = dataclasses.replace(row("cublasmp", None), suite="overlap", extra={"baseline_host_us": beside})
        base = dataclasses.replace(row("nccl+cublas", 100), suite="overlap", host_us=stats(1000))
        return [base, dataclasses.replace(own, host_us=stats(host))]

    (change,) = compare(results(*isolated(150, 300)), results(*isolated(150, 200)), BASELINE).changes
    assert change.ratio == pytest.approx(1.5)


def test_without_the_baseline_nothing_is_compared():
    a = [row("cublas", 100), row("streamk", 80)]
    found = compare(results(*a), results(row("streamk", 80)), "cublas")
    assert found.changes == []
    assert [r.variant for r in found.incomparable] == ["streamk"]
    assert [r.variant for r in found.missing] == ["cublas"]


# --- the command ---------------------------------------------------------------------------------------------------


def test_no_change(tmp_path):
    rows = [row("cublas", 100), row("cublas again", 101), row("streamk", 80)]
    code, text = shown(*files(tmp_path, rows, rows))
    assert code == 0
    assert (
        "2 measurements in both; time in B / in A: geometric mean 1.000; 0 differ by more than noise" in text
    )
    assert "Noise floors: gemm bfloat16 x1 1.0 %.\n" in text
    assert text.endswith("Result: no slow-down.\n")


def test_slow_downs_are_sorted_and_end_with_1(tmp_path):
    cases = {"a": 0.5, "b": 1.04, "c": 1.5, "d": 1.2, "e": 1.001}
    a = [row("streamk", 100, case) for case in cases]
    b = [row("streamk", 100 * factor, case) for case, factor in cases.items()]
    code, text = shown(*files(tmp_path, a, b))
    assert code == 1
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| gemm")]
    assert [(line[2].strip(), line[8].strip(), line[10].strip()) for line in lines] == [
        ("c", "1.500", "SLOWER"),
        ("d", "1.200", "SLOWER"),
        ("b", "1.040", "slower"),
        ("a", "0.500", "faster"),
    ]
    assert "Result: 2 slower." in text
    assert shown(*files(tmp_path, a, b), threshold=0.6)[0] == 0
    assert shown(*files(tmp_path, b, a))[0] == 1  # what was twice as fast is slow again
    assert shown(*files(tmp_path, a[1:2], b[1:2]))[0] == 0  # 4 % is past the noise, not past the threshold


@pytest.mark.parametrize("status", ["failed", "crashed", "timeout", "error"])
def test_what_was_right_and_is_broken(tmp_path, status):
    a = [row("streamk", 100), row("cublas", 100)]
    b = [row("streamk", 50, status=status, reason="because\nof <this>"), row("cublas", 100)]
    code, text = shown(*files(tmp_path, a, b))
    assert code == 1
    assert text.count(f"BROKEN gemm, a, bfloat16, x1, streamk: ok -> {status} (because of <this>)") == 1
    assert "Result: 1 broken." in text
    code, text = shown(*files(tmp_path, b, a))
    assert code == 0
    assert f"gemm, a, bfloat16, x1, streamk: {status} -> ok" in text
    assert shown(*files(tmp_path, b, b))[0] == 0  # as broken as before


def test_a_variant_of_ours_that_is_skipped_now_is_broken(tmp_path):
    a = [row("streamk", 100), row("cublas", 100)]
    for reason in ("not enough memory: CUDA out of memory", "ended its processes twice before in this run"):
        b = [row("streamk", None, status="skipped", reason=reason), row("cublas", 100)]
        code, text = shown(*files(tmp_path, a, b))
        assert code == 1
        assert f"BROKEN gemm, a, bfloat16, x1, streamk: ok -> skipped ({reason})\n" in text
        assert text.endswith("Result: 1 broken.\n")
        assert shown(*files(tmp_path, b, a))[0] == shown(*files(tmp_path, b, b))[0] == 0


def test_peers_may_be_skipped_or_gone_but_not_fail(tmp_path):
    ours, peer = row("streamk", 100), row("cublas", 100)
    skipped = row("cublas", None, status="skipped", reason="not installed")
    code, text = shown(*files(tmp_path, [ours, peer], [ours, skipped]))
    assert code == 0
    assert "  gemm, a, bfloat16, x1, cublas: ok -> skipped (not installed)" in text
    code, text = shown(*files(tmp_path, [ours, peer], [ours]))
    assert code == 0
    assert "1 only in A:\n  gemm, a, bfloat16, x1, cublas" in text
    assert shown(*files(tmp_path, [ours, peer], [ours, row("cublas", None, status="crashed")]))[0] == 1


def test_a_variant_of_ours_that_is_gone_from_a_case_is_broken(tmp_path):
    ours, peer = row("streamk", 100), row("cublas", 100)
    code, text = shown(*files(tmp_path, [ours, peer], [peer]))
    assert code == 1
    assert "BROKEN gemm, a, bfloat16, x1, streamk: no row in B, which has this case\n" in text
    assert "only in A" not in text
    # A case that is gone as a whole was not asked for; and what was never right cannot be lost.
    other = row("cublas", 100, "b")
    assert shown(*files(tmp_path, [ours, peer, other], [other]))[0] == 0
    assert shown(*files(tmp_path, [row("streamk", 100, status="failed"), peer], [peer]))[0] == 0
    assert shown(*files(tmp_path, [ours, peer], [row("cublas", 100, world=2), other, peer]))[0] == 1


def test_what_of_ours_cannot_be_compared_any_more_is_broken(tmp_path):
    peer = row("cublas", 100)
    from_host = dataclasses.replace(row("streamk", None), host_us=stats(165))
    code, text = shown(*files(tmp_path, [row("streamk", 100), peer], [from_host, peer]))
    assert code == 1
    reason = "not comparable any more: graph time in A, host-launched time in B"
    assert f"BROKEN gemm, a, bfloat16, x1, streamk: {reason}\n" in text
    code, text = shown(*files(tmp_path, [row("streamk", 100), peer], [row("streamk", None), peer]))
    assert code == 1
    assert "graph time in A, no time in B" in text
    as_peer = [dataclasses.replace(r, role="peer") for r in (row("streamk", 100), from_host)]
    code, text = shown(*files(tmp_path, [as_peer[0]], [as_peer[1]]))
    assert code == 0
    assert "1 not comparable" in text
    # Without the baseline in B nothing can be told; without it in A nothing could ever be.
    both = [row("streamk", 100), peer]
    code, text = shown(*files(tmp_path, both, both[:1]), relative_to="cublas")
    assert code == 1
    assert "not comparable any more: no baseline beside it in B" in text
    assert shown(*files(tmp_path, both[:1], both), relative_to="cublas")[0] == 0


def test_a_file_of_several_cards_is_refused(tmp_path):
    a, b = files(tmp_path, [row("streamk", 100)], [row("streamk", 100)])
    records.append(b, Header("s", "gemm", "later", env={**samples.ENV, "gpu": "NVIDIA H200"}))
    records.append(b, row("streamk", 90, run="s"))
    with pytest.raises(
        BenchError, match=r"b\.jsonl: holds results of NVIDIA H100 80GB HBM3 and of NVIDIA H200"
    ):
        run(a, b, stdout=io.StringIO())


def test_missing_and_new_are_listed(tmp_path):
    common = row("cublas", 100)
    a = [common, *(row("streamk", 100, f"case {i}") for i in range(15))]
    b = [common, row("streamk:stream_k", 90, world=2)]
    code, text = shown(*files(tmp_path, a, b))
    assert code == 0
    assert "15 only in A:" in text
    assert "... and 3 more" in text
    assert "1 only in B:\n  gemm, a, bfloat16, x2, streamk:stream_k" in text


def test_warns_of_another_card_and_torch(tmp_path):
    rows = [row("streamk", 100)]
    paths = files(tmp_path, rows, rows, gpu="NVIDIA H200", torch="2.12.0")
    _, text = shown(*paths)
    assert "gemm bfloat16 x1 2.0 % (assumed)" in text
    assert "the cards differ: NVIDIA H100 80GB HBM3 in A, NVIDIA H200 in B; --relative-to baseline" in text
    assert "the torch versions differ: 2.11.0+cu130 in A, 2.12.0 in B" in text
    assert "Warning" not in shown(*files(tmp_path, rows, rows))[1]


def test_relative_to_on_the_command(tmp_path):
    a = [row("cublas", exact(100)), row("streamk", exact(80))]
    b = [row("cublas", exact(200)), row("streamk", exact(160))]
    paths = files(tmp_path, a, b)
    assert shown(*paths)[0] == 1
    code, text = shown(*paths, relative_to="cublas")
    assert code == 0
    assert "time / time of cublas in B / in A: geometric mean 1.000" in text


def test_real_samples_against_themselves(tmp_path):
    path = samples.write(tmp_path / "r.jsonl", samples.few_rows())
    assert shown(path, path)[0] == 0
    assert shown(path, path, relative_to=BASELINE)[0] == 0


def test_bad_input(tmp_path):
    a, b = files(tmp_path, [row("streamk", 100)], [row("streamk", 100, "other")])
    with pytest.raises(BenchError, match=r"no measurement in common.*1 rows and 1 rows"):
        run(a, b, stdout=io.StringIO())
    for threshold in (-0.1, float("nan")):
        with pytest.raises(BenchError, match="--threshold: expected a fraction"):
            run(a, a, threshold=threshold, stdout=io.StringIO())
    with pytest.raises(BenchError, match="no row of variant 'cublass'; expected baseline or one of streamk"):
        run(a, a, relative_to="cublass", stdout=io.StringIO())
    with pytest.raises(BenchError, match="cannot be read"):
        run(a, tmp_path / "none.jsonl", stdout=io.StringIO())
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BenchError, match="no header line"):
        run(a, tmp_path / "empty.jsonl", stdout=io.StringIO())
    (tmp_path / "old.jsonl").write_text(
        '{"kind": "header", "schema": 0, "run": "r", "suite": "s", "started": ""}\n'
    )
    with pytest.raises(BenchError, match="schema 0"):
        run(tmp_path / "old.jsonl", a, stdout=io.StringIO())
    assert records.SCHEMA == 1
