"""The adapter over torch's symmetric memory, on a stand-in for torch's module."""

from __future__ import annotations

import pytest
import torch

from tpkernels.comm import conditions, symmetric
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
    mapping = symmetric.map_ranks(memory, group, "new", 0)
    assert mapping.addresses == (4096, memory.data_ptr())
    assert symm_mem.log == ["empty", ("group", "new", 1, 2), ("rendezvous", "new")], (
        "torch knows names for ever"
    )
    assert known == {"new": "itself"}
    assert store.get("new/from") == b"1", "over the group's own store, apart from its other keys"
    symm_mem.shift = 512
    with pytest.raises(BackendError, match="begins 512 bytes behind"):
        symmetric.map_ranks(memory, group, "newer", 0)
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


def test_ranks_that_mapped_less_catch_up(symm_mem, monkeypatch):
    """Ranks meet under a count that torch keeps for the process: a rank brings its own up to that of the others."""
    store, known = torch.distributed.HashStore(), {}
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_process_group_store", {"itself": store}.get)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_register_process_group", known.__setitem__)
    group, cpu = _groups.Group("tp", 1, 2, "itself"), torch.device("cpu")
    memory, before = symmetric.allocate(100, cpu), symmetric.mapped()
    symmetric.map_ranks(memory, group, "level", before)
    assert symmetric.mapped() == before + 1
    symm_mem.log.clear()
    symmetric.map_ranks(memory, group, "behind", before + 3)
    assert symmetric.mapped() == before + 4
    groups = [entry for entry in symm_mem.log if entry[0] == "group"]
    assert [entry[2:] for entry in groups] == [(0, 1), (0, 1), (1, 2)], "twice alone, then with the other"
    assert len({entry[1] for entry in groups}) == 3, "torch knows names for ever"
    alone = known[groups[0][1]]
    assert (alone.rank(), alone.size()) == (0, 1)
