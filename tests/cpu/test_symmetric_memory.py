"""The adapter over torch's symmetric memory, on a stand-in for torch's module."""

from __future__ import annotations

import datetime

import pytest
import torch

from tpkernels.comm import conditions, symmetric
from tpkernels.comm.renumbered import Renumbered
from tpkernels.errors import ArgumentError, BackendError
from tpkernels.ops import _groups


class _SymmetricModule:
    """What the adapter uses of torch.distributed._symmetric_memory."""

    def __init__(self, backend: str = "CUDA", failures: int = 0) -> None:
        self.log: list[object] = []
        self.backend, self.failures, self.shift = backend, failures, 0
        functions = {
            "empty_strided_p2p": self._empty,
            "set_group_info": self._set_group_info,
            "rendezvous": self._rendezvous,
        }
        self._SymmetricMemory = type("_SymmetricMemory", (), functions)

    def get_backend(self, device):
        return self.backend

    def set_backend(self, name):
        self.backend = name

    def _empty(self, size, stride, dtype, device):
        self.log.append("empty")
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.zeros(size, dtype=dtype, device=device)

    def _set_group_info(self, name, rank, world, store):
        self.log.append(("group", name, rank, world))
        store.set("from", str(rank))

    def _rendezvous(self, memory, name):
        self.log.append(("rendezvous", name))
        here = memory.data_ptr() - self.shift
        return type("Handle", (), {"buffer_ptrs": [4096, here]})


@pytest.fixture
def symm_mem(monkeypatch):
    module = _SymmetricModule()
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", module, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed._symmetric_memory", module)
    monkeypatch.delenv("TPK_SYMMETRIC_BACKEND", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    return module


def test_symmetric_memory(symm_mem, monkeypatch):
    import os

    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_process_group_store", {"itself": store}.get)
    known: dict[str, str] = {}
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_register_process_group", known.__setitem__)
    group, cpu = _groups.Group("tp", 1, 2, "itself"), torch.device("cpu")
    memory = symmetric.allocate(100, cpu)
    assert memory.shape == (100,) and memory.dtype == torch.uint8
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    mapping = symmetric.map_ranks(memory, group, "new")
    assert mapping.addresses == (4096, memory.data_ptr())
    assert symm_mem.log == ["empty", ("group", "new", 1, 2), ("rendezvous", "new")], (
        "torch knows names for ever"
    )
    assert known == {"new": "itself"}
    assert store.get("new/from") == b"1", "over the group's own store, apart from its other keys"
    symm_mem.shift = 512
    with pytest.raises(BackendError, match="begins 512 bytes behind"):
        symmetric.map_ranks(memory, group, "newer")
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    symm_mem.failures = 1
    assert symmetric.allocate(8, cpu).numel() == 8 and emptied == [1]
    symm_mem.failures = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        symmetric.allocate(8, cpu)


def test_backend_of_symmetric_memory(symm_mem, monkeypatch):
    cpu = torch.device("cpu")
    symm_mem.backend = "NCCL"
    symmetric.allocate(8, cpu)
    assert symm_mem.backend == "CUDA"
    monkeypatch.setenv("TPK_SYMMETRIC_BACKEND", "NVSHMEM")
    with pytest.raises(BackendError, match="TPK_SYMMETRIC_BACKEND: 'NVSHMEM' was asked for, but torch"):
        symmetric.allocate(8, cpu)
    symm_mem.is_nvshmem_available = lambda: True
    symmetric.allocate(8, cpu)
    assert symm_mem.backend == "NVSHMEM"

    def refuse(name):
        raise RuntimeError("already allocated")

    symm_mem.set_backend = refuse
    monkeypatch.delenv("TPK_SYMMETRIC_BACKEND")
    with pytest.raises(BackendError, match=r"uses 'NVSHMEM' .already allocated.; choose before"):
        symmetric.allocate(8, cpu)
    monkeypatch.setenv("TPK_SYMMETRIC_BACKEND", "smoke")
    with pytest.raises(
        ArgumentError, match="TPK_SYMMETRIC_BACKEND: expected one of CUDA, NVSHMEM, got 'smoke'"
    ):
        symmetric.allocate(8, cpu)


def test_torch_has_what_the_adapter_uses():
    import torch.distributed._symmetric_memory as real

    for name in ("empty_strided_p2p", "set_group_info", "rendezvous", "buffer_ptrs"):
        assert hasattr(real._SymmetricMemory, name), name
    for name in ("_register_process_group", "_get_process_group_store"):
        assert hasattr(torch.distributed.distributed_c10d, name), name
    assert conditions.MAX_RANKS == 16


def test_ranks_find_each_other_whatever_they_told_others_before():
    """As torch does it: one count in a process, for all groups."""
    shared = torch.distributed.HashStore()
    through = torch.distributed.PrefixStore  # C++, as the caller in torch is
    for counts in ((0, 0), (17, 3), (2, 40)):
        halves = [Renumbered(through(f"rendezvous {counts}", shared)) for _ in counts]
        stores = [through("in C++", half) for half in halves]
        for step in range(3):
            for rank, (store, count) in enumerate(zip(stores, counts, strict=True)):
                store.set(f"CUDASymmetricMemory/{count + step}/{rank}", f"{rank} in {step}")
            for rank, (store, count) in enumerate(zip(stores, counts, strict=True)):
                key = f"CUDASymmetricMemory/{count + step}/{1 - rank}"
                store.wait([key])
                store.wait([key], datetime.timedelta(seconds=1))
                assert store.get(key) == f"{1 - rank} in {step}".encode()
    half = Renumbered(shared)
    other = through("in C++", half)
    other.set("a name", "x")
    assert other.get("a name") == b"x"
