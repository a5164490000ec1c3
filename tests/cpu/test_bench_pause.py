"""The pause behind which profiled steps are enqueued, with a stand-in for CUDA."""

from __future__ import annotations

from typing import Any

import pytest

from bench.profiling import capture, kineto, profile


class FakeGroup:
    """Two ranks with CUDA, of which this is one; what it calls is in ``calls``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, world: int, slowest: int) -> None:
        import torch
        import torch.distributed as dist

        self.calls: list[Any] = []
        tensor = torch.tensor

        def all_reduce(x: torch.Tensor, op: Any, group: Any) -> None:
            assert op == dist.ReduceOp.MAX and group == "group"
            x.fill_(max(int(x), slowest))
            self.calls.append("all_reduce")

        monkeypatch.setattr(torch, "tensor", lambda values, device: tensor(values))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.calls.append(("sleep", cycles)))
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: self.calls.append("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: self.calls.append("stop"))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group: world)
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(dist, "barrier", lambda group: self.calls.append("barrier"))

    def run(self) -> None:
        self.calls.append("run")


def test_steps_are_enqueued_behind_a_pause(monkeypatch):
    slowest = 200_000_000  # longer than this rank's own pause can be, however busy the machine is
    fake = FakeGroup(monkeypatch, world=2, slowest=slowest)
    profile("nsys", fake.run, steps=2, out=None, rank=0, group="group")  # type: ignore[arg-type]
    at = fake.calls.index("start")
    assert fake.calls[:at] == ["run", "barrier"]
    assert fake.calls[at:] == [
        "start",
        "barrier",
        "run",  # to see how long the host needs
        "all_reduce",  # for the slowest rank
        "barrier",
        ("sleep", slowest),
        "all_reduce",
        ("sleep", capture._MARK_CYCLES),
        "run",
        "run",
        "stop",
    ]
    fake.calls.clear()
    profile("ncu", fake.run, steps=2, out=None, rank=0, group="group")  # type: ignore[arg-type]
    assert fake.calls == ["run", "barrier", "start", "barrier", "run", "run", "stop"]


def test_a_rank_alone_pauses_too(monkeypatch):
    fake = FakeGroup(monkeypatch, world=1, slowest=0)
    times = iter([1.0, 1.004])
    monkeypatch.setattr(capture.time, "perf_counter", lambda: next(times))
    capture.hold(fake.run, 5)
    assert fake.calls[0] == "run" and len(fake.calls) == 2
    ((_, cycles),) = fake.calls[1:]
    assert cycles == pytest.approx(1.5 * 5 * 4000 * 2000 + 1e6, rel=1e-6)


def test_length_of_the_pause():
    assert capture.pause_cycles(0, 3) > 0
    assert capture.pause_cycles(2000, 4) - capture.pause_cycles(1000, 4) == 1.5 * 4 * 1000 * 2000
    assert capture.pause_cycles(1e9, 4) == 50_000 * 2000  # 50 ms


def test_without_a_gpu_there_is_no_pause():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    capture.hold(lambda: pytest.fail("no step is needed"), 3)


def test_kineto_pauses_right_before_the_steps(tmp_path, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(kineto, "hold", lambda run, steps, group: calls.append(("hold", steps)))
    kineto.record(lambda: calls.append("run"), 2, tmp_path, 0)
    assert calls == ["run", "run", ("hold", 2), "run", "run"]
