"""Cases, flops, weights, the float64 reference and the judge of the layer and train suites, in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.blocks import dense, shapes
from bench.blocks.grid_names import grid_variants
from bench.blocks.judge import allowed, allowed_gradient, allowed_piece, worst, worst_whole
from bench.blocks.peaks import data_sheet_tflops
from bench.blocks.reference import inputs, layer_reference, sampled
from bench.blocks.shapes import TINY, Layer, Size, Tokens
from bench.blocks.twin import batches, train_twin
from bench.blocks.weights import Part, draw_, share
from bench.errors import BenchError
from bench.models import MODELS, Model
from bench.suite import Options
from bench.suites.layer import SUITE as LAYER
from bench.suites.layer import layer_of
from bench.suites.train import SUITE as TRAIN

PLAIN = Model(hidden=48, ffn=96, heads=6, kv_heads=6, head_dim=8, layers=2, gated=False)
WIDE_HEADS = Model(hidden=48, ffn=96, heads=12, kv_heads=6, head_dim=8, layers=2)


def test_layer_cases_by_default_and_by_name() -> None:
    names = [case.name for case in LAYER.cases(Options(world=2))]
    assert names[:4] == [
        "mlp llama8b M8192",
        "attention llama8b M8192",
        "block llama8b M8192",
        "mlp llama8b M2048",
    ]
    assert len(names) == len(set(names)) == 12
    cases = LAYER.cases(Options(world=4, models=("gpt3",), rows=(4096,), ops=("block",), dtypes=("float16",)))
    assert [(c.name, c.dtype, c.params["batch"], c.params["seq"]) for c in cases] == [
        ("block gpt3 M4096", "float16", 2, 2048)
    ]
    assert layer_of(cases[0]) == Layer("block", MODELS["gpt3"], Tokens(2, 2048))
    assert [
        c.params["batch"] for c in LAYER.cases(Options(rows=(4097,), ops=("mlp",), models=("gpt3",)))
    ] == [1]
    small = LAYER.cases(Options(device="cpu", world=2))
    assert [c.name for c in small] == ["mlp tiny M48", "attention tiny M48", "block tiny M48"]
    assert {c.dtype for c in small} == {"float32"}


def test_train_cases_by_default_and_by_name() -> None:
    names = [case.name for case in TRAIN.cases(Options(world=2))]
    assert names == [
        "step small", "step medium", "step large", "step xlarge", "step llama8b-4layers",
    ]  # fmt: skip
    assert [c.name for c in TRAIN.cases(Options(device="cpu", world=2))] == ["step tiny"]
    (case,) = TRAIN.cases(Options(world=2, models=("llama70b-2layers",), dtypes=("float32",)))
    assert (case.dtype, case.params["hidden"], case.params["vocab"]) == ("float32", 8192, 32768)


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        (LAYER, Options(models=("llama8",)), "--model: 'llama8' is not known.*Did you mean 'llama8b'"),
        (LAYER, Options(ops=("blok",)), "--op: 'blok' is not known; expected one of mlp, attention, block"),
        (LAYER, Options(dtypes=("int8",)), "--dtype: 'int8' is not known"),
        (TRAIN, Options(models=("llama8b",)), "--model: 'llama8b' is not known.*llama8b-4layers"),
        (TRAIN, Options(dtypes=("float16",)), "--dtype: 'float16' is not known"),
    ],
)
def test_unknown_names_are_sentences(suite: object, options: Options, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        suite.cases(options)  # type: ignore[attr-defined]


def test_variants_of_both_devices() -> None:
    for suite in (LAYER, TRAIN):
        names = [v.name for v in suite.variants(Options())]
        assert names == [
            "nccl+cublas", "nccl+cublas-async", "torch-tp", "torch-tp-compiled", "torch-tp-async", "ours",
            "ours:nccl+streamk", *(["ours:keep_gathered"] if suite is LAYER else []),
            "ours-styles", "ours-styles-compiled", "ours-async-tp",
        ]  # fmt: skip
        assert suite.baseline(Options()) == "nccl+cublas"
        on_cpu = {v.name for v in suite.variants(Options(device="cpu"))}
        assert {"gloo+blas", "gloo+blas-async", "ours:gloo+streamk"} <= on_cpu
        assert suite.baseline(Options(device="cpu")) in on_cpu
        slow = {v.name for v in suite.variants(Options()) if v.time_limit >= 300}
        assert slow == {"torch-tp-compiled", "torch-tp-async", "ours-styles-compiled", "ours-async-tp"}
        # torch's operations are ours in that process.
        assert [v.name for v in suite.variants(Options()) if v.isolated] == ["ours-async-tp"]


@pytest.mark.parametrize(
    ("world", "grids"),
    [
        (1, {}),
        (2, {}),
        (4, {"ours-2d": "2 x 2", "ours-2d:fused": "2 x 2", "ours-spatial-temporal": "2 x 2"}),
        (8, {"ours-2.5d": "2 x 2 x 2", "ours-2.5d:fused": "2 x 2 x 2", "ours-3d": "2 x 2 x 2"}),
        (9, {"ours-2d": "3 x 3", "ours-2d:fused": "3 x 3"}),
        (12, {"ours-2.5d": "2 x 2 x 3", "ours-2.5d:fused": "2 x 2 x 3"}),
        (
            16,
            {
                "ours-2d": "4 x 4",
                "ours-2.5d": "2 x 2 x 4",
                "ours-2d:fused": "4 x 4",
                "ours-2.5d:fused": "2 x 2 x 4",
                "ours-spatial-temporal": "4 x 4",
            },
        ),
        (27, {"ours-2.5d": "3 x 3 x 3", "ours-3d": "3 x 3 x 3"}),
    ],
)
def test_grids_that_ranks_fill(world: int, grids: dict[str, str]) -> None:
    assert {one.variant: one.grid for one in grid_variants(world)} == grids
    names = [v.name for v in LAYER.variants(Options(world=world))]
    assert set(grids) == set(names) - {v.name for v in LAYER.variants(Options())}


def test_grids_of_eight_get_four_sequences() -> None:
    batches = {
        world: [
            int(c.params["batch"])
            for c in LAYER.cases(Options(world=world, rows=(96, 49, 50), ops=("mlp",), models=("tiny",)))
        ]
        for world in (2, 4, 8)
    }
    assert batches == {2: [2, 1, 2], 4: [2, 1, 2], 8: [4, 1, 2]}


def test_listing_imports_no_torch() -> None:
    code = (
        "import sys; from bench.suite import Options; from bench.suites import load\n"
        "for name in ('layer', 'train'):\n"
        "    suite = load(name); o = Options(world=2)\n"
        "    cases = suite.cases(o); suite.variants(o); [suite.bytes_needed(c, o) for c in cases]\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_flops_by_hand() -> None:
    # llama8b: q and o 4096 x 4096, k and v 1024 x 4096; three of 14336 x 4096. M = 2 x 4096, two ranks.
    attention, mlp = 2 * 4096 * 4096 + 2 * 1024 * 4096, 3 * 14336 * 4096
    # Scores and values, each 2 * S * S * (32 * 128) a sequence, half of them; two sequences.
    causal = 2 * (2 * 2 * 4096 * 4096 * 4096) // 2
    cases = {c.op: c for c in LAYER.cases(Options(world=2, models=("llama8b",), rows=(8192,)))}
    assert cases["mlp"].flops == 3 * 2 * 8192 * mlp / 2
    assert cases["attention"].flops == 3 * (2 * 8192 * attention + causal) / 2
    assert cases["block"].flops == cases["mlp"].flops + cases["attention"].flops
    # gpt3 is not gated: two weights.
    (gpt3,) = LAYER.cases(Options(world=8, models=("gpt3",), rows=(2048,), ops=("mlp",)))
    assert gpt3.flops == 3 * 2 * 2048 * (2 * 49152 * 12288) / 8


def test_train_flops_and_parameters_by_hand() -> None:
    (case,) = TRAIN.cases(Options(world=4, models=("small",)))
    # Width 128, MLP 384, all 4 heads with their own k and v, 2 layers, bytes; 8 x 64 tokens.
    matrices = 2 * (4 * 128 * 128 + 3 * 384 * 128) + 256 * 128  # with the head
    assert case.params["parameters"] == matrices + 256 * 128 + 5 * 128  # and embedding and norms
    tokens = 8 * 64
    assert case.flops == (6 * matrices * tokens + 6 * 2 * tokens * 64 * 128) / 4


def test_demo_sizes_are_the_demos() -> None:
    from tpkernels.demo.config import SIZES

    for name in ("small", "medium", "large", "xlarge"):
        ours, demo = shapes.SIZES[name], SIZES[name]
        m = ours.model
        assert (m.hidden, m.layers, m.heads, m.kv_heads, m.ffn) == (
            demo.width, demo.layers, demo.heads, demo.kv_heads, demo.ffn,
        )  # fmt: skip
        assert (ours.tokens.batch, ours.tokens.seq) == (demo.batch, demo.seq)


def test_memory_grows_with_the_model_and_falls_with_the_ranks() -> None:
    def need(model: str, world: int) -> float:
        options = Options(world=world, models=(model,), rows=(8192,), ops=("block",))
        return LAYER.bytes_needed(LAYER.cases(options)[0], options) / 1e9

    assert need("llama8b", 2) < need("llama70b", 2) < need("llama405b", 2)
    assert need("llama405b", 8) < 80
    assert need("llama70b", 8) <= need("llama70b", 2) < 80
    options = Options(world=2)
    for case in TRAIN.cases(options):
        assert 0 < TRAIN.bytes_needed(case, options) < 80e9


def test_what_cannot_be_shared_is_named() -> None:
    llama = MODELS["llama8b"]
    assert shapes.misfit(llama, Tokens(2, 4096), 8) == ""
    assert shapes.misfit(llama, Tokens(2, 4096), 16) == "16 ranks cannot share 8 kv heads evenly"
    assert "4097 tokens of a sequence" in shapes.misfit(llama, Tokens(1, 4097), 2)


def test_peaks_by_device_name() -> None:
    assert data_sheet_tflops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4
    assert data_sheet_tflops("NVIDIA H100 PCIe", "float16") == 756.5
    assert data_sheet_tflops("NVIDIA H100 80GB HBM3", "float32") == 0
    assert data_sheet_tflops("a device of the future", "bfloat16") == 0


def test_parts_put_together_are_the_dense_weight() -> None:
    for name, shape in (
        ("mlp.up_proj.weight", (12, 8)),
        ("mlp.down_proj.weight", (8, 12)),
        ("norm.weight", (8,)),
    ):
        whole = draw_(torch.empty(shape), 5, name)
        for rank in range(3):
            where = share(name, shape, rank, 3)
            packed = torch.zeros(3, *whole[where].shape[1:]).repeat_interleave(whole[where].shape[0], 0)
            part = Part(name, shape, where, 0, whole[where].shape[0], 2 * whole[where].shape[0])
            part.draw_(torch.nn.Parameter(packed), 5)
            assert torch.equal(part.of(packed), whole[where])
            assert not packed[: part.start].any()
            assert not packed[part.stop :].any()


@pytest.mark.parametrize("part", ["mlp", "attention", "block"])
@pytest.mark.parametrize("model", [TINY, PLAIN, WIDE_HEADS], ids=["tiny", "plain", "wide heads"])
def test_reference_equals_the_plain_module(part: str, model: Model) -> None:
    """The piecewise reference against autograd through the unsharded module, both in float64."""
    layer = Layer(part, model, Tokens(2, 12))
    dtype, cpu = torch.float64, torch.device("cpu")
    module = dense.build(layer).to(dtype)
    for name, parameter in module.named_parameters():
        draw_(parameter.data, 7, name)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == layer.weights
    x, dy = inputs(layer, 7, dtype, cpu)
    x.requires_grad_()
    y = module(x, *(dense.rotary_of(model, 12, cpu) if layer.has_attention else ()))
    y.backward(dy)
    for rank in range(3):
        found = layer_reference(layer, 7, dtype, cpu, rank, 3)
        mine = slice(4 * rank, 4 * rank + 4)
        close = {"rtol": 1e-6, "atol": 1e-6}  # the module's rotary tables are in float32
        torch.testing.assert_close(found.y, y[mine], **close)
        torch.testing.assert_close(found.dx, x.grad[mine], **close)
        assert found.weights.keys() == layer.weights.keys()
        for name, parameter in module.named_parameters():
            rows, values = found.weights[name]
            part_of_it = parameter.grad[share(name, parameter.shape, rank, 3)]
            torch.testing.assert_close(values, part_of_it[rows], **close)


def test_judge_sees_a_wrong_tile_and_an_unwritten_element() -> None:
    want = torch.randn(64, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    limit = allowed(torch.bfloat16, 2)
    rounded = want.bfloat16()
    error, _ = worst({"y": (rounded, want, None)})
    assert 0 < error < limit / 5
    tile = rounded.clone()
    tile[:16, 256:384] *= 1.1  # a hundredth of a row's columns would hide in its norm
    error, name = worst({"y": (rounded, want, None), "tile": (tile, want, None)})
    assert name == "tile"
    assert error == pytest.approx(0.1, abs=0.01) and error > limit
    # Not a multiple of 128 columns: the last piece ends at the edge.
    odd, odd_want = rounded[:, :704].clone(), want[:, :704]
    odd[5, 640:] = 0
    assert worst({"odd": (odd, odd_want, None)})[0] > 0.5
    rows = torch.tensor([3, 60])
    assert worst({"rows": (tile[:, :256], want[rows][:, :256], rows)})[0] < limit
    hole = rounded.clone()
    hole[1, 1] = float("nan")  # not in a row that is looked at
    assert worst({"hole": (hole, want[rows], rows)})[0] == float("inf")


# More than 256 rows of every weight on each of two ranks: only some are looked at. 576 is not a multiple of 128.
TALL = Model(hidden=640, ffn=1152, heads=40, kv_heads=40, head_dim=16, layers=1)


def assert_every_tile_counts(
    gradient: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, limit: float
) -> int:
    """Zero every tile of 64 x 128 in turn; returns how many were not all zero anyway."""
    assert worst({"": (gradient, values, rows)})[0] < 1e-3
    seen = 0
    for i in range(0, gradient.shape[0], 64):
        for j in range(0, gradient.shape[-1], 128):
            wrong = gradient.clone()
            tile = wrong[i : i + 64, j : j + 128] if gradient.dim() == 2 else wrong[i : i + 64]
            if tile.any():
                tile.zero_()
                assert worst({"": (wrong, values, rows)})[0] > limit, (i, j)
                seen += 1
    return seen


def test_a_missing_tile_of_any_weight_gradient_of_a_layer_is_found() -> None:
    layer, cpu = Layer("block", TALL, Tokens(2, 12)), torch.device("cpu")
    module = dense.build(layer).double()
    for name, parameter in module.named_parameters():
        draw_(parameter.data, 7, name)
    x, dy = inputs(layer, 7, torch.float64, cpu, 2)
    module(x, *dense.rotary_of(TALL, 12, cpu)).backward(dy)
    sampled_rows = 0
    for rank in range(2):
        found = layer_reference(layer, 7, torch.float64, cpu, rank, 2, which=2)
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            part = parameter.grad[share(name, parameter.shape, rank, 2)]
            rows, values = found.weights[name]
            assert assert_every_tile_counts(part, rows, values, allowed(torch.bfloat16, 8)) > 0
            sampled_rows += len(rows) < part.shape[0]
    assert sampled_rows == 2 * 7  # not the norms'


def test_a_missing_tile_of_any_gradient_of_a_model_is_found() -> None:
    size, cpu = Size(TALL, 1024, Tokens(2, 12)), torch.device("cpu")
    data = batches(size, 1, 7, cpu)
    model = dense.LanguageModel(size)
    for name, parameter in model.named_parameters():
        draw_(parameter.data, 7, name)
    ((tokens, targets),) = data
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.t().flatten()).backward()
    for rank in range(2):
        twin = train_twin(size, data, 7, torch.float32, cpu, rank, 2)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            part = parameter.grad[share(name, parameter.shape, rank, 2)]
            rows, values = twin.gradients[name]
            limit = allowed_piece(torch.bfloat16, 8, 16)
            tiles = assert_every_tile_counts(part, rows, values, limit)
            assert tiles > 0
            assert len(rows) < part.shape[0] or part.dim() == 1


def test_sampled_rows_differ_by_seed_and_meet_every_64() -> None:
    cpu = torch.device("cpu")
    name = "mlp.up_proj.weight"
    first, second = (sampled(name, 1000, seed, cpu) for seed in ("0 0 0", "0 1 0"))
    assert first.tolist() != second.tolist()
    assert (first // 64).tolist() == list(range(16))
    assert torch.equal(first, sampled(name, 1000, "0 0 0", cpu))
    assert sampled(name, 64, "0", cpu).tolist() == list(range(64))
    assert sampled("attention_norm.weight", 1000, "0", cpu).tolist() == list(range(1000))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_sum_without_one_rank_exceeds_what_a_deep_model_may_err(world: int) -> None:
    parts = torch.randn(world, 128, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error, _ = worst_whole({"": (parts[1:].sum(0), parts.sum(0), None)})
    assert error == pytest.approx(world**-0.5, rel=0.05)
    assert allowed_gradient(torch.bfloat16, world, 16) < min(0.101, error / 3)
    assert allowed_piece(torch.bfloat16, world, 16) < 0.354
