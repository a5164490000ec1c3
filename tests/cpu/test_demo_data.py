"""The demo's parts that need one process: data, options, comparisons, optimizer, plot, checkpoint."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tpkernels.demo import __main__ as entry
from tpkernels.demo import cli, data, dense, launch, output, plot, verify
from tpkernels.demo import config as settings
from tpkernels.demo.errors import DemoError, DisagreementError
from tpkernels.demo.optim import Optimizer, dense_norm, learning_rate

SMALL = dense.ModelConfig(width=24, layers=1, heads=4, kv_heads=2, ffn=32, dtype="float64", max_seq=16)


def resolve(*arguments: str) -> settings.RunConfig:
    return cli.resolve(cli.parse(arguments))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TPK_PATH"):
        monkeypatch.delenv(name, raising=False)


# --- data ---


def test_corpus_is_deterministic_and_split_by_files() -> None:
    first, second = data.load_corpus(), data.load_corpus()
    assert first.digest == second.digest
    assert torch.equal(first.train, second.train)
    assert first.train.numel() > 5 * first.heldout.numel() > 0
    assert first.train.numel() + first.heldout.numel() <= data.MAX_BYTES + 2 * first.files
    smaller = data.load_corpus(max_bytes=1 << 20)
    assert torch.equal(smaller.train, first.train[: smaller.train.numel()])


def test_stripped_standard_library_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "abc.py").write_text("x = 1\n")
    with pytest.raises(DemoError, match=r"holds only 6 bytes.*installed with its sources"):
        data.load_corpus(tmp_path)


def test_batches_depend_on_seed_and_step_alone() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    tokens, targets = data.batch_at(text, 3, seed=1, batch=4, seq=16)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens + 1, targets)
    torch.manual_seed(5)
    again, _ = data.batch_at(text, 3, seed=1, batch=4, seq=16)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, data.batch_at(text, 4, seed=1, batch=4, seq=16)[0])
    assert not torch.equal(tokens, data.batch_at(text, 3, seed=2, batch=4, seq=16)[0])


def test_windows_reach_the_last_byte_and_not_further() -> None:
    text = torch.arange(18, dtype=torch.uint8)
    starts = {
        int(data.batch_at(text, step, seed=0, batch=8, seq=16)[0][row, 0])
        for step in range(20)
        for row in range(8)
    }
    assert starts == {0, 1}
    batches = data.heldout_batches(text, batch=1, seq=16, count=2)
    assert [int(tokens[0, 0]) for tokens, _ in batches] == [0, 1]
    assert int(batches[1][1][0, -1]) == 17


# --- options ---


def test_defaults_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = resolve()
    assert (config.device, config.tp, config.size, config.dtype) == ("cpu", 2, "small", "float32")
    assert config.dense
    assert config.sequence_parallel
    assert not config.compile


@pytest.mark.parametrize(("gpus", "tp"), [(1, 1), (2, 2), (3, 2), (8, 8)])
def test_defaults_with_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, tp: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = resolve()
    assert (config.device, config.tp, config.size, config.dtype) == ("cuda", tp, "medium", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--size", "huge"], "--size huge is unknown; choose one of tiny, small"),
        (["--dtype", "int8"], "--dtype int8 is unknown; choose one of float64, float32"),
        (["--device", "tpu"], "--device tpu is unknown"),
        (["--device", "cpu", "--path", "carrier-pigeon"], "carrier-pigeon"),
        (["--device", "cpu", "--path", "nccl"], "ranks on cpu communicate through gloo"),
        (["--device", "cpu", "--path", "cublas"], "not a path on cpu"),
        (
            ["--device", "cpu", "--tp", "3"],
            "4 attention heads, which 3 ranks cannot share evenly; use --tp 1, 2, 4",
        ),
        (["--device", "cpu", "--tp", "16", "--size", "medium"], "8 kv heads, which 16 ranks"),
        (["--tp", "0"], "--tp must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--batch", "-1"], "--batch must be at least 1"),
        (["--seq", "2"], "--seq must be at least 8"),
        (["--lr", "nan"], "--lr must be greater than 0"),
        (["--lr", "inf"], "--lr must be greater than 0 and finite, got inf"),
        (["--seed", str(1 << 63)], "--seed must be less than 2**63"),
        (["--steps", "many"], "argument --steps: invalid int value"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_wrong_options_are_sentences(arguments: list[str], sentence: str) -> None:
    with pytest.raises(DemoError) as caught:
        resolve(*arguments)
    assert sentence in str(caught.value)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DemoError, match="4 ranks need 4 GPUs, but this machine has 2"):
        resolve("--tp", "4")
    assert resolve("--tp", "4", "--device", "cpu", "--size", "small").device == "cpu"


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DemoError, match="finds no CUDA GPU"):
        resolve("--device", "cuda")


def test_world_of_the_launcher_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert resolve("--device", "cpu").tp == 4
    with pytest.raises(DemoError, match="--tp 2 was asked for, but the launcher started 4 ranks"):
        resolve("--device", "cpu", "--tp", "2")


def test_output_folder_that_cannot_be(tmp_path: Path) -> None:
    cli.check_output(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match=r"--out .*file.* cannot be written"):
        cli.check_output(tmp_path / "file" / "out")


def test_main_prints_one_sentence_and_returns_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--device", "cpu", "--tp", "3"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: --size small has 4 attention heads")
    assert captured.err.count("\n") == 1


def test_every_size_fits_some_rank_count_and_every_dtype_has_a_tolerance() -> None:
    for name, size in settings.SIZES.items():
        assert size.width % size.heads == 0
        assert (size.width // size.heads) % 2 == 0
        assert {1, 2} <= set(settings.fitting_ranks(name))
    for name in settings.DTYPES:
        assert settings.tolerance(name).loss > 0


def test_available_cores_is_positive() -> None:
    assert 1 <= launch.available_cores() <= (os.cpu_count() or 1)


# --- comparisons ---


def test_largest_difference_names_the_parameter() -> None:
    a = {"x": torch.ones(4), "y": torch.tensor([3.0, 4.0])}
    b = {"x": torch.ones(4), "y": torch.tensor([3.0, 4.5])}
    found = verify.largest_difference(b, a)
    assert found.name == "y"
    assert math.isclose(found.difference, 0.1)
    found.check("gradient", 0.11)
    with pytest.raises(DisagreementError, match=r"gradient of y differs by 1.00e-01"):
        found.check("gradient", 0.09)
    with pytest.raises(DisagreementError, match="only one has: y"):
        verify.largest_difference({"x": torch.ones(4)}, a)
    with pytest.raises(DisagreementError, match="shape"):
        verify.largest_difference({"x": torch.ones(3), "y": torch.ones(2)}, a)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_a_number_never_passes(bad: float) -> None:
    limit = settings.tolerance("bfloat16")
    with pytest.raises(DisagreementError):
        verify.check_loss(0, bad, bad, limit)
    worst = verify.largest_difference({"x": torch.tensor([bad])}, {"x": torch.tensor([1.0])})
    with pytest.raises(DisagreementError):
        worst.check("weight", 1e30)


def test_two_losses_that_are_not_numbers_are_not_blamed_on_the_sharding() -> None:
    with pytest.raises(DisagreementError, match="not a number, sharded and unsharded alike"):
        verify.check_loss(0, math.nan, math.nan, settings.tolerance("float32"))


# --- optimizer ---


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(s, peak=1.0, warmup=10, steps=100) for s in range(100)]
    assert rates[9] == 1.0 == max(rates)
    assert rates[0] == 0.1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert math.isclose(rates[-1], 0.1)
    assert learning_rate(0, peak=1.0, warmup=1, steps=1) == 1.0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_optimizer_follows_torch_on_master_weights(dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(getattr(torch, dtype))
    wide = torch.float64 if dtype == "float64" else torch.float32
    twin = nn.Linear(8, 4).to(wide)
    twin.load_state_dict({k: v.to(wide) for k, v in model.state_dict().items()})
    ours = Optimizer(model, weight_decay=0.1, max_norm=0.5, global_norm=lambda: dense_norm(model))
    groups = [{"params": [twin.weight], "weight_decay": 0.1}, {"params": [twin.bias], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for _ in range(3):
        x = torch.randn(5, 8).to(model.weight.dtype)
        ours.scale_loss(model(x).square().mean().to(wide)).backward()
        for name, gradient in ours.gradients().items():
            twin.get_parameter(name).grad = gradient
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        theirs.step()
        assert ours.step(1e-2) > 0
        assert model.weight.grad is None
        torch.testing.assert_close(model.weight, twin.weight.to(model.weight.dtype))


def test_optimizer_state_makes_two_runs_one() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 4).bfloat16() for _ in range(2)]
    optimizers = [
        Optimizer(m, weight_decay=0.1, max_norm=1.0, global_norm=lambda m=m: dense_norm(m)) for m in models
    ]
    for round_ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step(1e-2)
        assert torch.equal(models[0].weight, models[1].weight) == (round_ == 1)
        optimizers[1].load_state(optimizers[0].state())
        assert torch.equal(models[0].weight, models[1].weight)


def test_float16_overflow_skips_the_step_and_halves_the_scale() -> None:
    model = nn.Linear(2, 2).half()
    before = model.weight.detach().clone()
    optimizer = Optimizer(model, weight_decay=0.0, max_norm=1.0, global_norm=lambda: dense_norm(model))
    scale = float(optimizer.scale_loss(torch.tensor(1.0)))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    assert not math.isfinite(optimizer.step(1.0))
    assert torch.equal(model.weight, before)
    assert float(optimizer.scale_loss(torch.tensor(1.0))) == scale / 2


# --- what a run leaves behind ---


@pytest.mark.parametrize("with_dense", [True, False])
def test_plot_is_a_png(tmp_path: Path, with_dense: bool) -> None:
    losses = [5.5 / (i + 1) for i in range(20)]
    dense_losses = [loss + 1e-7 * (i % 3) for i, loss in enumerate(losses)] if with_dense else None
    path = tmp_path / "loss.png"
    plot.draw_losses(
        path, title="t", losses=losses, dense_losses=dense_losses, heldout=1.0, limit=1e-4, note="n"
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_plot_of_one_exactly_equal_step(tmp_path: Path) -> None:
    plot.draw_losses(
        tmp_path / "p.png", title="t", losses=[5.0], dense_losses=[5.0], heldout=None, limit=1e-9
    )
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_checkpoint_round_trip_and_causality(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = dense.DenseModel(SMALL)
    output.save_checkpoint(tmp_path, SMALL, model.state_dict())
    loaded = dense.load_checkpoint(tmp_path)
    tokens = torch.randint(0, 256, (2, 16))
    assert torch.equal(loaded(tokens), model(tokens))
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(loaded(changed)[:, :10], loaded(tokens)[:, :10])
    sampled = dense.generate(loaded, [b"def ", b""], 20, window=16, seed=3)
    assert [len(text) for text in sampled] == [20, 20]
    assert sampled == dense.generate(loaded, [b"def ", b""], 20, window=16, seed=3)


def test_dense_file_runs_alone_with_torch_only(tmp_path: Path) -> None:
    output.save_checkpoint(tmp_path, SMALL, dense.DenseModel(SMALL).state_dict())
    script = tmp_path / "dense.py"
    script.write_text(Path(dense.__file__).read_text())
    code = (
        "import runpy, sys; sys.argv = ['dense.py', sys.argv[1], 'def f', '--length', '5']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "assert not any(m.split('.')[0] == 'tpkernels' for m in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def f")


def test_damaged_or_missing_checkpoints_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dense.main([str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err
    output.save_checkpoint(tmp_path, SMALL, dense.DenseModel(SMALL).state_dict())
    fields = json.loads((tmp_path / "config.json").read_text())
    for change in ({"width": 48}, {"colour": "red"}, {"dtype": "float7"}):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
        assert dense.main([str(tmp_path)]) == 1
        assert "damaged or does not fit" in capsys.readouterr().err
    (tmp_path / "model.pt").write_bytes(b"nonsense")
    assert dense.main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--device", "foo"], "--device foo is unknown"),
        (["--device", "meta"], "--device meta is unknown"),
        (["--device", "cuda"], "--device cuda was asked for, but PyTorch finds no CUDA GPU here"),
        (["--length", "-1"], "--length must be at least 0, got -1"),
        (["--temperature", "nan"], "--temperature must be 0 or more and finite, got nan"),
        (["--seed", str(1 << 63)], "--seed must be from 0 to 2**63 - 1"),
    ],
)
def test_wrong_options_of_the_sampler_are_sentences(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    output.save_checkpoint(tmp_path, SMALL, dense.DenseModel(SMALL).state_dict())
    assert dense.main([str(tmp_path), *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {sentence}")
    assert captured.err.count("\n") == 1
