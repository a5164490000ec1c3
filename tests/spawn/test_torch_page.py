"""The page for users of torch's tensor parallelism runs as it stands; its tables are what other tests check."""

from __future__ import annotations

import re
from pathlib import Path

from integration_pages import ROOT, page, run_snippet, snippets
from test_torch_styles import Case, expected_ops
from torch.distributed.tensor import Partial, Replicate, Shard

import tpkernels as tpk
from tpkernels.integrations.torch import Colwise, Rowwise

PAGE = "torch.md"
LAYOUTS = {
    "`Shard(0)`": Shard(0),
    "`Shard(1)`": Shard(1),
    "`Shard(-1)`": Shard(-1),
    "`Replicate()`": Replicate(),
    "`Partial()`": Partial(),
}


def code_of(name: str) -> str:
    (found,) = (code for code in snippets(PAGE) if code.startswith(f"# {name}: "))
    return found


def test_every_snippet_has_a_test_here() -> None:
    names = {"train.py", "attention.py", "checkpoint.py", "fsdp.py", "async_tp.py"}
    assert {code.split(":")[0].removeprefix("# ") for code in snippets(PAGE)} == names


def test_the_plan(tmp_path: Path) -> None:
    out = run_snippet(code_of("train.py"), tmp_path, ranks=2)
    assert "all_gather_matmul: gloo+" in out, out
    assert "matmul_reduce_scatter: gloo+" in out, out
    run_snippet(code_of("attention.py"), tmp_path, ranks=2)


def test_checkpoints(tmp_path: Path) -> None:
    outs = [run_snippet(code_of("checkpoint.py"), tmp_path, ranks=n) for n in (2, 1)]
    sums = [re.findall(r"sum (\S+)", out) for out in outs]
    assert sums[0] == sums[1] and len(sums[0]) == 1, outs
    assert "['0.bias', '0.weight', '2.bias', '2.weight']" in outs[0]


def test_fsdp(tmp_path: Path) -> None:
    run_snippet(code_of("fsdp.py"), tmp_path, ranks=4)


def test_async_tp(tmp_path: Path) -> None:
    out = run_snippet(code_of("async_tp.py"), tmp_path, ranks=2)
    for op in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        assert f"symm_mem.{op}: 1 calls (gloo+" in out, out


def layouts_in(cell: str) -> list[object]:
    return [layout for name, layout in LAYOUTS.items() if name in cell] or list(LAYOUTS.values())


def test_the_table_of_what_runs() -> None:
    """``expected_ops``, which tests/spawn/test_torch_styles.py holds against what ran."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (`(?:Colwise|Rowwise)` .*) \|$", page(PAGE), re.M)]
    told = set()
    for style, given, wanted, op, _ in rows:
        kind = {"`Colwise`": Colwise, "`Rowwise`": Rowwise}[style]
        for layout in layouts_in(given):
            for output in layouts_in(wanted):
                case = Case(kind, layout, output, True, "DTensor" in given, True, False)
                assert expected_ops(case) == {op.strip("`")}, (style, given, wanted)
                told.add((kind, str(layout), str(output)))
    assert len(told) == 2 * len(LAYOUTS) ** 2
    assert all(hasattr(tpk, row[3].strip("`")) for row in rows)


def test_the_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`((?:tests|examples)/[\w/]+\.py)`", page(PAGE)))
    assert len(named) > 4
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
