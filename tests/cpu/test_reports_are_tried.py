"""What users of other libraries reported of overlapped products, and which tests try it here.

Those in gpu1 and gpun need GPUs; docs/overlap.md says which of them have run.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpkernels

ROOT = Path(__file__).parents[2]
ON_FAKES, ON_GPUS = "spawn/test_reported_on_fakes.py::", "gpun/test_reported.py::"
FUSED_GPUS, FUSED_PATH = "gpun/test_fused_gpus.py::", "cpu/test_fused_path.py::"

# Report (of github.com): what was reported, and where it is tried.
REPORTS: dict[str, tuple[str, list[str]]] = {
    "bytedance/flux/issues/17": (
        "wrong results of repeated calls",
        [
            ON_FAKES + "test_lengths_that_change",
            ON_GPUS + "test_lengths_that_change",
            "spawn/test_fused_on_fakes.py::test_shapes_that_change",
            "gpu1/test_fused_one_gpu.py::test_repeats",
            FUSED_GPUS + "test_ten_thousand_repeats",
        ],
    ),
    "pytorch/pytorch/pull/153595": (
        "wrong results where the scattered dimension is not the first",
        [ON_FAKES + "test_every_dimension", ON_GPUS + "test_every_dimension"],
    ),
    "ByteDance-Seed/Triton-distributed/issues/40": (
        "8192 x 53248 x 16384 hangs",
        [
            FUSED_GPUS + "test_huge",
            ON_GPUS + "test_widest_scatter",
            "host/test_progress.py::test_a_shape_on_which_another_library_hung",
        ],
    ),
    "ByteDance-Seed/Triton-distributed/issues/81": (
        "layers hang for some sizes",
        [ON_FAKES + "test_layers_of_models", ON_GPUS + "test_layers_of_models"],
    ),
    "NVIDIA/cutlass/pull/3143": (
        "memory of other ranks is used before all of them are ready",
        [
            "cpu/test_workspace.py::test_order_of_growth",
            ON_FAKES + "test_a_rank_late_with_its_memory",
            ON_GPUS + "test_a_rank_late_with_its_memory",
            FUSED_GPUS + "test_groups_come_and_go",
        ],
    ),
    "NVIDIA/TransformerEngine/pull/409": (
        "after a wait that is over, calls go on with stale rows",
        [
            "cpu/test_fused_conditions.py::test_faults_are_raised_in_words",
            "gpu1/test_fused_one_gpu.py::test_a_stalled_rank_is_reported",
            FUSED_GPUS + "test_a_stalled_rank_is_reported",
            ON_GPUS + "test_a_rank_that_is_killed_is_reported",
        ],
    ),
    "NVIDIA/Megatron-LM/issues/1238": (
        "lengths that change, that do not divide by the ranks, one row, none (also TransformerEngine/issues/1303, "
        "verl-project/verl/issues/5663)",
        [
            ON_FAKES + "test_lengths_that_change",
            "spawn/test_more_ranks_on_fakes.py::test_lengths_and_dimensions",
            ON_GPUS + "test_lengths_that_change",
        ],
    ),
    "bytedance/flux/issues/180": (
        "only shapes of a table run (also issues/179, 174, 121, 81, 14)",
        [
            "host/test_hopper_plan.py::test_every_iteration_of_every_tile_once",
            "spawn/test_auto_on_fakes.py::test_not_where_it_cannot",
            ON_FAKES + "test_lengths_that_change",
            ON_GPUS + "test_lengths_that_change",
        ],
    ),
    "pytorch/pytorch/issues/137145": (
        "no more than 2 GB",
        [
            ON_FAKES + "test_rows_in_parts",
            ON_FAKES + "test_sums_in_parts",
            FUSED_GPUS + "test_huge",
            ON_GPUS + "test_more_elements_than_32_bits_count",
        ],
    ),
    "pytorch/torchtitan/issues/1185": (
        "nothing overlaps, and nobody is told (also issues/1613, Blackwellboy/model-serving-minefield/issues/43)",
        [
            "spawn/test_auto_on_fakes.py::test_takes_what_pays",
            "spawn/test_auto_on_fakes.py::test_not_where_it_cannot",
            FUSED_PATH + "test_one_rank_cannot",
            FUSED_PATH + "test_refusals",
            FUSED_PATH + "test_explain",
        ],
    ),
    "NVIDIA/TransformerEngine/issues/426": (
        "twice as slow with a hidden size of 4096",
        [ON_FAKES + "test_times_are_compared", ON_GPUS + "test_a_hidden_size_of_4096"],
    ),
    "bytedance/flux/issues/30": (
        "cannot be installed beside a newer torch (also issues/83)",
        [
            "cpu/test_ci_checks.py::test_library_dependencies_are_judged",
            "cpu/test_ci_checks.py::test_the_smoke_test_misses_an_extension_that_does_not_load",
        ],
    ),
    "pytorch/pytorch/pull/197857": (
        "memory is allocated in a capture",
        [
            FUSED_PATH + "test_memory_of_calls",
            "spawn/test_auto_on_fakes.py::test_captures",
            "spawn/test_fused_on_fakes.py::test_small_sums",
            "gpu1/test_fused_one_gpu.py::test_captures_that_need_memory",
            FUSED_GPUS + "test_memory_and_captures",
        ],
    ),
    "vllm-project/vllm/pull/26038": (
        "a private operator of torch was changed",
        [
            "cpu/test_reports_are_tried.py::test_no_private_operators",
            "cpu/test_symmetric_memory.py::test_torch_has_what_the_adapter_uses",
        ],
    ),
    "bytedance/flux/issues/139": (
        "no backward pass",
        [
            "spawn/test_ops.py::test_gradcheck",
            "spawn/test_fused_on_fakes.py::test_values",
            ON_FAKES + "test_training",
            ON_GPUS + "test_training",
            FUSED_GPUS + "test_values",
        ],
    ),
    "pytorch/pytorch/pull/149875": (
        "broken by activation checkpointing",  # fused_gradients.check_gradients: both sorts of checkpoint()
        [
            "spawn/test_fused_on_fakes.py::test_values",
            "gpu1/test_fused_one_gpu.py::test_gradients",
            FUSED_GPUS + "test_values",
        ],
    ),
    "triton-lang/triton/pull/8900": (
        "shared memory is not freed (also pytorch/pytorch/pull/163750)",
        [
            "cpu/test_workspace.py::test_memory_goes_with_its_group",
            ON_FAKES + "test_layers_come_and_go",
            "spawn/test_fused_on_fakes.py::test_groups_that_come_and_go",
            "gpu1/test_fused_one_gpu.py::test_groups_come_and_go",
            FUSED_GPUS + "test_groups_come_and_go",
            ON_GPUS + "test_layers_come_and_go",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_is_tried(report: str) -> None:
    _, tests = REPORTS[report]
    for test in tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{file} has no {name}"
    assert any(test.startswith(("cpu/", "host/", "spawn/")) for test in tests), (
        "nothing of it runs without GPUs"
    )


def test_no_private_operators() -> None:
    """Of torch's operators aten's alone are used, and what is used of its private Python is there.

    Integrations are left out: they stand in the place of others.
    """
    package = Path(tpkernels.__file__).parent
    libraries = {
        name
        for path in sorted(package.rglob("*.py"))
        if "integrations" not in path.parts
        for name in re.findall(r"torch\.ops\.(\w+)", path.read_text())
    }
    assert {"tpkernels"} <= libraries <= {"tpkernels", "aten", "load_library"}
    assert hasattr(dist.distributed_c10d, "_resolve_process_group") and hasattr(torch.cuda, "_sleep")
