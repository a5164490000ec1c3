"""The command ``tpk``: what it prints, what it keeps, and sentences with exit code 2 for what it cannot take."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pages import snippets
from tune_command import DEVICE, empty_cache, ran

import tpkernels as tpk
from bench.models import MODELS as MEASURED_MODELS
from tpkernels.errors import ArgumentError
from tpkernels.tune import (
    asked,
    cli,
    local,
    models,
    shapes,
    show,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_cache(tmp_path, monkeypatch)


def test_tune(capsys, cache):
    assert ran("tune", "16..32x48x64", "M=8,n=20:20", *DEVICE) == 2  # no K
    capsys.readouterr()
    assert ran("tune", "16..32x48x64", "M=8,N=20,K=30", *DEVICE, "--plain") == 0
    out = capsys.readouterr().out
    assert "3 products of float32 on " in out
    assert [line[:6] for line in out.splitlines() if line.startswith("[")] == ["[1/3] ", "[2/3] ", "[3/3] "]
    (heading,) = (line for line in out.splitlines() if line.startswith("shape "))
    columns = ["shape", "model's choice", "predicted us", "us", "tuned", "us", "blas us", "gain"]
    assert re.split("  +", heading) == columns
    rows = [line for line in out.splitlines() if re.match(r"\d+x\d+x\d+ ", line)]
    assert [row.split()[0] for row in rows] == ["16x48x64", "32x48x64", "8x20x30"]
    assert all(re.search(r"\d\.\d\dx$", row) for row in rows)
    (path,) = cache.glob("tuned-*.json")
    assert f"kept in {path}; TPK_AUTOTUNE=1 or read uses it" in out
    # What a program then finds, in the layout of a linear layer.
    local.forget()
    with tpk.autotune("read"):
        tpk.matmul(torch.randn(32, 64), torch.randn(48, 64).t())
        assert tpk.last_path().why.startswith("tuned: ")
        tpk.matmul(torch.randn(32, 64), torch.randn(64, 48))
        assert "not in the cache" in tpk.last_path().why
    # Again: known, unless it is asked for.
    assert ran("tune", "16..32x48x64", *DEVICE) == 0
    assert capsys.readouterr().out.count("(known)") == 2
    assert ran("tune", "16..32x48x64", *DEVICE, "--again") == 0
    assert "(known)" not in capsys.readouterr().out


@pytest.mark.parametrize("layout", asked.LAYOUTS)
@pytest.mark.parametrize("epilogue", ["", "bias+activation", "gate+residual", "into"])
def test_what_is_tuned_is_what_a_layer_calls(layout, epilogue, capsys):
    arguments = ["tune", "20x24x40", *DEVICE, "--layout", layout, "--dtype", "bf16", "--epilogue", epilogue]
    assert ran(*arguments) == 0
    m, n, k = 20, 24, 40

    def made(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16)

    a = made(k, m).t() if layout == "wgrad" else made(m, k)
    b, gate = (made(n, k).t() if layout == "forward" else made(k, n) for _ in range(2))
    options = {
        "": {},
        "bias+activation": {"bias": made(n), "activation": "gelu"},
        "gate+residual": {"gate": gate, "residual": made(m, n)},
        "into": {"accumulate_into": torch.zeros(m, n)},
    }[epilogue]
    with tpk.autotune("read"):
        tpk.matmul(a, b, **options)
    assert tpk.last_path().why.startswith("tuned: ")


def test_models(capsys):
    assert ran("tune", "--model", "llama8b", "--tp", "8", "--rows", "1", *DEVICE) == 0
    out = capsys.readouterr().out
    names = [line.split()[0] for line in out.splitlines() if re.match(r"(qkv|out|up|down) \d", line)]
    assert names == ["qkv", "out", "up", "down"] and "up 1x3584x4096" in out and "down 1x4096x1792" in out


def test_models_are_those_that_are_measured():
    for name, model in models.MODELS.items():
        other = MEASURED_MODELS[name]
        assert all(getattr(model, field) == getattr(other, field) for field in model.__dataclass_fields__), (
            name
        )
        assert [n for _, n, _ in models.weights(name, 1)] == [other.qkv, other.hidden, other.up, other.hidden]


def sizes(
    *words: str, rows: str | None = None, model: str | None = None, tp: int = 1
) -> list[tuple[int, ...]]:
    return [shape[:3] for shape in shapes.of(words, model, tp, rows)]


def test_shapes(tmp_path):
    assert sizes("2x3x4") == [(2, 3, 4)]
    assert sizes("1..8x3x4") == [(1, 3, 4), (2, 3, 4), (4, 3, 4), (8, 3, 4)]
    assert sizes("3..10x1x1") == [(3, 1, 1), (6, 1, 1), (10, 1, 1)]
    assert sizes("5..5x1x1") == [(5, 1, 1)]
    assert sizes("64..200:64x1x2..4:2") == [(m, 1, k) for m in (64, 128, 192) for k in (2, 4)]
    assert sizes("k=4,M=2,n=3", "2X3X4", "1x1x1") == [(2, 3, 4), (1, 1, 1)]  # once
    file = tmp_path / "shapes.txt"
    file.write_text("# decode\n1..2x3x4\n\nM=7 N=8 K=9  # a comment\n")
    assert (
        sizes(str(file), "5x5x5")
        == sizes(f"@{file}", "5x5x5")
        == [(1, 3, 4), (2, 3, 4), (7, 8, 9), (5, 5, 5)]
    )
    assert len(sizes(model="llama70b", tp=8)) == 4 * 6
    assert sizes(model="llama70b", tp=8, rows="1..4:3,7")[:3] == [
        (1, 1280, 8192),
        (4, 1280, 8192),
        (7, 1280, 8192),
    ]


BAD_SHAPES = [
    ([], "SHAPES: expected at least one, or --model"),
    (["2x3"], "SHAPES: expected a shape or a file of shapes, got '2x3'; a shape is MxNxK"),
    (["no such file"], "got 'no such file'"),
    (["/"], "got '/'"),
    (["M=1,N=2,Q=3"], "got 'M=1,N=2,Q=3'"),
    (["0x3x4"], "SHAPES: '0x3x4': expected a number from 1 to"),
    (["8..2x3x4"], "a..b or a..b:step with a <= b, got '8..2'"),
    (["1..9:0x3x4"], "got '1..9:0'"),
    (["1..x3x4"], "got '1..'"),
    (["1..2..3x3x4"], "got '1..2..3'"),
    ([f"{2**31}x3x4"], "expected a number from 1 to 1073741823"),
    (["1..20000:1x3x4"], "expected at most 10000 numbers"),
    (["1..200:1x1..200:1x1"], "expected at most 10000 shapes"),
]


@pytest.mark.parametrize(
    "words,sentence", BAD_SHAPES, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_bad_shapes(words, sentence):
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        shapes.of(words, None, 1, None)


def test_a_bad_line_of_a_file(tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("1x2x3\n4x5\n")
    with pytest.raises(
        ArgumentError, match=re.escape(f"SHAPES: line 2 of {file}: expected a shape, got '4x5'")
    ):
        shapes.of([str(file)], None, 1, None)
    file.write_text(str(file))  # itself
    with pytest.raises(ArgumentError, match="line 1 of"):
        shapes.of([str(file)], None, 1, None)


BAD = [
    (["tune", "2x3"], "tpk tune: SHAPES: expected a shape"),
    (["tune", "--model", "gpt9"], "tpk tune: --model: expected one of llama8b, "),
    (
        ["tune", "--model", "llama70b", "--tp", "16"],
        "tpk tune: --tp: expected a number that divides the 8 key-value",
    ),
    (["tune", "--model", "llama70b", "--tp", "0"], "tpk tune: --tp: "),
    (["tune", "--model", "llama70b", "--tp", "x"], "tpk tune: argument --tp: invalid int value: 'x'"),
    (["tune", "--model", "llama70b", "--rows", "1,a"], "tpk tune: --rows: expected a number"),
    (["tune", "1x1x1", "--rows", "1"], "tpk tune: --rows: it goes with --model"),
    (["tune", "1x1x1", "--dtype", "int8"], "tpk tune: --dtype: expected one of float64, "),
    (
        ["tune", "1x1x1", "--layout", "nt"],
        "tpk tune: --layout: expected one of forward, dgrad, wgrad, got 'nt'",
    ),
    (["tune", "1x1x1", "--epilogue", "softmax"], "tpk tune: --epilogue: expected names of bias, "),
    (["tune", "1x1x1", "--epilogue", "into+bias"], "tpk tune: --epilogue: into goes with nothing else"),
    (
        ["tune", "1x1x1", "--epilogue", "gate+bias"],
        "tpk tune: --epilogue: into goes with nothing else, and gate not",
    ),
    (["tune", "1x1x1", "--device", "tpu"], "tpk tune: --device: expected cpu, cuda or cuda:N, got 'tpu'"),
    (["tune", "1x1x1", "--device", "cuda:99"], "tpk tune: --device: expected one of "),
    (["explain", "1x1x1", "--path", "magic", *DEVICE], "tpk explain: path: 'magic' is not a path on cpu"),
    (["cache", "--show", "--clear"], "tpk cache: --show and --clear: expected one of them"),
    (["calibrate", "--device", "x"], "tpk calibrate: --device: "),
    (["dance"], "tpk: argument COMMAND: invalid choice: 'dance'"),
    ([], "tpk: the following arguments are required: COMMAND"),
    (["tune", "--dance", "1x1x1"], "unrecognized arguments: --dance"),
]


@pytest.mark.parametrize("arguments,sentence", BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_arguments(arguments, sentence, capsys, cache):
    device = [] if "--device" in arguments or arguments[:1] != ["tune"] else DEVICE
    try:
        code = cli.main([*arguments, *device])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2 and sentence in err and err.count("\n") == 1 and not out, (code, out, err)
    assert not cache.exists()


def test_cache(capsys, cache):
    assert ran("cache") == 0 and f"nothing is tuned in {cache}" in capsys.readouterr().out
    ran("tune", "4x5x6", *DEVICE)
    capsys.readouterr()
    assert ran("cache") == 0
    (path,) = cache.glob("tuned-*.json")
    assert capsys.readouterr().out == f"{path}: 1 products\n"
    assert ran("cache", "--show") == 0
    out = capsys.readouterr().out
    assert "matmul 1x4x5x6 float32>float32 kk plain" in out and "library us" in out
    path.write_text("torn")
    assert ran("cache", "--show") == 0 and "it holds no tuned plans" in capsys.readouterr().out
    assert ran("cache", "--clear") == 0 and capsys.readouterr().out == f"deleted {path}\n"
    assert ran("cache", "--clear") == 0 and capsys.readouterr().out == "there was nothing to delete\n"


def test_explain_and_status(capsys):
    assert ran("explain", "64x32x16", *DEVICE, "--epilogue", "bias+activation") == 0
    out = capsys.readouterr().out
    assert "matmul: path blas" in out and "M=64 N=32 K=16 float32" in out
    assert ran("explain", "64x32x16", *DEVICE, "--path", "streamk", "--layout", "wgrad") == 0
    assert "matmul: path streamk" in capsys.readouterr().out
    assert ran("status") == 0 and "_C: loaded from" in capsys.readouterr().out


def test_the_script():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'tpk = "tpkernels.__main__:main"' in text
    (needed,) = re.findall(r"^dependencies = (.*)$", text, re.M)
    assert "rich" not in needed


def test_as_a_module_without_rich(tmp_path):
    """rich is not needed, and not imported before something runs."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise ImportError('none here')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TPK_CACHE_DIR": str(tmp_path / "cache")}
    run = [sys.executable, "-m", "tpkernels", "tune", "8x8x8", *DEVICE]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0 and "[1/1] 8x8x8: " in result.stdout, result.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress():
    plain = io.StringIO()
    with show.Progress("tuning", 2, plain) as progress:
        progress.at("a")
        progress.step("a: 5 us")
        progress.step("b: 6 us")
    assert plain.getvalue() == "[1/2] a: 5 us\n[2/2] b: 6 us\n"
    pytest.importorskip("rich")
    with show.Progress("tuning", 2, Terminal()) as progress:
        assert progress._bar is not None
        progress.at("a")
        progress.step("a: 5 us")
        assert progress._bar.tasks[0].completed == 1 and progress._bar.tasks[0].description == "tuning a"
    with show.Progress("tuning", 2, Terminal(), bar=False) as progress:
        assert progress._bar is None


def test_table():
    assert show.table(["name", "us"], [["a", "5"], ["long", "1,234"]]) == (
        "name     us\na         5\nlong  1,234"
    )
    assert show.table(["name", "us"], []) == "name  us"


def test_the_page(monkeypatch, tmp_path):
    """docs/tuning.md: its Python runs, its commands are taken."""
    for code in snippets("tuning.md"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            exec(code, {"__name__": "page"})
    for block in snippets("tuning.md", "sh"):
        for line in block.splitlines():
            words = line.partition("#")[0].split()
            if words[:1] == ["tpk"]:
                cli._parser().parse_args(words[1:])
