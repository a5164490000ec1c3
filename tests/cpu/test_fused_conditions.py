"""Path "fused" without a GPU: where it can run, how long it waits and what is told then, and the order of streams."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from fused_fakes import FakeRuntime

import tpkernels as tpk
from tpkernels.comm import faults, runtime, streams
from tpkernels.comm.conditions import RankFacts, call_missing, machine_missing, ranks_missing
from tpkernels.errors import ArgumentError, BackendError, CommTimeoutError
from tpkernels.ops import _groups, _paths

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FUSED = "fused"


# Whether it can run


@pytest.mark.parametrize(
    "call, reason",
    [
        (("cuda", BF16, BF16, 8), None),
        (("cuda", F16, F32, 16), None),
        (("cpu", BF16, BF16, 8), "the tensors are on cpu"),
        (("cuda", F32, F32, 8), "takes bfloat16 and float16, not float32"),
        (("cuda", BF16, F64, 8), "its results are bfloat16, float16 or float32, not float64"),
        (("cuda", BF16, BF16, 17), "a group may have 16 ranks, not 17"),
    ],
)
def test_reasons_that_a_call_shows(call, reason):
    found = call_missing(*call)
    assert found is None if reason is None else reason in found


def test_more_rows_than_the_kernels_count():
    assert call_missing("cuda", BF16, BF16, 8, rows=2**31 - 2049) is None
    found = call_missing("cuda", BF16, BF16, 8, rows=2**31 - 2048)
    assert found == "M, rows of all ranks together, may be 2,147,481,599 at most, not 2,147,481,600"


@pytest.mark.parametrize(
    "machine, reason",
    [
        (((9, 0), "", {}), None),
        (((8, 0), "", {}), "this GPU has 8.0"),
        (((10, 0), "", {}), "this GPU has 10.0"),
        (((9, 0), "it was not built", {}), "_C_sm90a is not loaded, it was not built"),
        (((9, 0), "", {"CUDA_LAUNCH_BLOCKING": "1"}), "CUDA_LAUNCH_BLOCKING"),
        (((9, 0), "", {"CUDA_LAUNCH_BLOCKING": "0", "NVTX_INJECTION64_PATH": ""}), None),
        (((9, 0), "", {"NV_SANITIZER_INJECTION_PORT_BASE": "49152"}), "NV_SANITIZER"),
        (((9, 0), "", {"CUDA_INJECTION64_PATH": "/opt/ncu/libcuda-injection.so"}), "CUDA_INJECTION64_PATH"),
        (((9, 0), "", {"NVTX_INJECTION64_PATH": "/opt/sanitizer/libsanitizer.so"}), "NVTX_INJECTION64_PATH"),
        (((9, 0), "", {"CUDA_INJECTION64_PATH": "/opt/nsight-systems/2025/libToolsInjection64.so"}), None),
        (((9, 0), "", {"LD_PRELOAD": "/opt/libTreeLauncherTargetInjection.so"}), "LD_PRELOAD"),
    ],
)
def test_reasons_that_a_machine_shows(machine, reason):
    found = machine_missing(*machine)
    assert found is None if reason is None else reason in found


def _rank(i: int, **changes) -> RankFacts:
    usual = RankFacts("node-a", f"GPU-{i}", {f"GPU-{j}": True for j in range(4) if j != i})
    return usual._replace(**changes)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({1: {"missing": "it has no CUDA device"}}, "rank 1 cannot: it has no CUDA device"),
        ({3: {"host": "node-b"}}, "several hosts (rank 0 on node-a, rank 3 on node-b)"),
        ({2: {"device": "GPU-0"}}, "ranks 0 and 2 share the GPU GPU-0"),
        ({2: {"device": "GPU-0", "overlap": True}}, "ranks 0 and 2 share the GPU GPU-0"),
        ({2: {"device": "GPU-0", "overlap": True}, 0: {"overlap": True}}, None),
        ({2: {"reaches": {"GPU-0": True, "GPU-1": False}}}, "ranks 1 and 2 have no peer access"),
        ({1: {"reaches": {"GPU-2": False}}}, "ranks 1 and 2 have no peer access"),
        ({1: {"reaches": {}}}, None),  # it sees its own GPU only
    ],
)
def test_reasons_that_all_ranks_show(changes, reason):
    found = ranks_missing([_rank(i, **changes.get(i, {})) for i in range(4)])
    assert found is None if reason is None else reason in found


def test_parse_and_choice(monkeypatch):
    monkeypatch.delenv("TPK_PATH", raising=False)
    for device in ("cuda", "cpu"):
        for path in ("fused", "fused+streamk", "streamk+fused"):
            assert _paths.parse(path, device, distributed=True)[:2] == ("fused", "streamk")
            assert _paths.parse(path, device, distributed=False)[:2] == (None, "streamk")
    for path in ("fused+cublas", "cublas+fused"):
        with pytest.raises(
            ArgumentError, match=r"path: 'fused' is one kernel, .* cannot multiply by 'cublas'"
        ):
            _paths.parse(path, "cuda", distributed=True)
    monkeypatch.setenv("TPK_PATH", "fused")
    request = _paths.parse("auto", "cuda", distributed=True)

    def choose(world=4, device="cuda", dtype=BF16, request=request, rows=8):
        return _paths.choose_transport(request, "nccl", "g", world, device, dtype, dtype, rows)

    assert choose() == "fused" and choose(world=1) == "nccl" and choose(device="meta", dtype=F32) == "fused"
    with pytest.raises(
        BackendError, match="TPK_PATH: 'fused' was asked for, but it takes bfloat16 and float16"
    ):
        choose(dtype=F32)
    with pytest.raises(BackendError, match="TPK_PATH: 'fused' was asked for, but M, rows of all ranks"):
        choose(rows=2**31)
    assert choose(rows=object()) == "fused", "a symbol, while a graph is traced, is not compared"
    assert choose(dtype=F32, request=_paths.Request(None, None)) == "nccl"
    with pytest.raises(ArgumentError, match="'gloo' was asked for"):
        choose(request=_paths.Request("gloo", None))


# Timeouts and faults


class _Group:
    """A process group with a backend that has a timeout."""

    def __init__(self, seconds: float) -> None:
        self.options = type("Options", (), {"_timeout": datetime.timedelta(seconds=seconds)})

    def _get_backend(self, device):
        return self


def test_timeout(monkeypatch):
    group, cpu = _groups.Group("g", 0, 2, _Group(77.5)), torch.device("cpu")
    monkeypatch.delenv("TPK_COMM_TIMEOUT_S", raising=False)
    assert faults.timeout_s(group, cpu) == 77.5
    group.process_group.options = None
    assert faults.timeout_s(group, cpu) == 1800
    monkeypatch.setenv("TPK_COMM_TIMEOUT_S", "2.5")
    assert faults.timeout_s(group, cpu) == 2.5
    for bad in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("TPK_COMM_TIMEOUT_S", bad)
        with pytest.raises(ArgumentError, match=f"TPK_COMM_TIMEOUT_S: expected seconds.*'{bad}'"):
            faults.timeout_s(group, cpu)


def test_timeout_of_a_real_group(ranks):
    ranks.run(_real_timeout, world=2)


def _real_timeout(ctx):
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=123))
    assert faults.timeout_s(_groups.resolve(group.group_name), torch.device("cpu")) == 123


def test_faults_are_raised_in_words(monkeypatch):
    fake, group = FakeRuntime(), _groups.Group("tp", 2, 4, object())
    monkeypatch.setattr(runtime, "active", fake)

    def fail(error):
        with faults.Reported("all_gather_matmul", group):
            raise error

    with pytest.raises(RuntimeError, match=r"^unrelated$"):
        fail(RuntimeError("unrelated"))
    tpk.synchronize()
    fake.sentence = "CTA 3 waited 4000 ms for slab 0 of chunk 5 of a."
    with pytest.raises(
        CommTimeoutError, match=r"all_gather_matmul on rank 2 of 4 \(group 'tp'\): CTA 3 waited"
    ) as got:
        fail(RuntimeError("unspecified launch failure"))
    assert isinstance(got.value, RuntimeError) and "launch failure" in str(got.value.__cause__)
    with pytest.raises(BackendError):
        fail(BackendError("our own errors stay"))
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())

    def synchronize(device):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(fake, "synchronize", synchronize)
    with pytest.raises(CommTimeoutError, match="synchronize after all_gather_matmul on rank 2 of 4"):
        tpk.synchronize("cuda:0")
    fake.sentence = ""
    with pytest.raises(RuntimeError, match=r"^CUDA error$"):
        tpk.synchronize()


def test_synchronize_without_cuda():
    if not torch.cuda.is_available():
        tpk.synchronize()


# Streams


def test_calls_on_other_streams_are_chained(monkeypatch):
    log, state = [], {"stream": 0, "capture": False}

    class Event:
        def record(self, stream):
            log.append(f"record {stream.cuda_stream}")

    class Stream:
        def __init__(self):
            self.cuda_stream = state["stream"]

        def wait_event(self, event):
            log.append(f"{self.cuda_stream} waits")

    monkeypatch.setattr(streams, "_last", {})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capture"])

    def call(stream, device=0, capture=False):
        state.update(stream=stream, capture=capture)
        log.clear()
        with streams.Chained(torch.device("cuda", device)):
            log.append("launch")
        return log

    assert call(7) == ["launch", "record 7"]
    assert call(7) == ["launch", "record 7"]
    assert call(8) == ["8 waits", "launch", "record 8"]
    assert call(9, device=1) == ["launch", "record 9"]
    assert call(7, capture=True) == ["launch"]
    assert call(7) == ["7 waits", "launch", "record 7"]
