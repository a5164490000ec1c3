"""Memory between ranks: sizes, growth, graphs that keep it, groups that go. One process plays a rank of two."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from fused_fakes import FakeRuntime, forget

from tpkernels.comm import ranks, runtime, small, workspace
from tpkernels.comm.symmetric import Mapping
from tpkernels.errors import BackendError
from tpkernels.ops import _groups

CPU = torch.device("cpu")
MIB = 1 << 20


class ProcessGroup:
    """Stands for a real one: known by name until it is destroyed."""

    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.fixture
def world(monkeypatch):
    """Groups by name, and a fake runtime; the peer says what this rank says, or what ``peer`` makes of it."""

    class World(FakeRuntime):
        def __init__(self):
            super().__init__()
            self.groups, self.peer = {}, lambda value: value

        def group(self, name="tp"):
            self.groups.setdefault(name, ProcessGroup())
            return _groups.resolve(name)

        def exchange(self, group, value):
            self.log.append("exchange")
            return [value, self.peer(value)]

    def resolve(name):
        if name not in here.groups:
            raise RuntimeError("Could not resolve the process group")
        return here.groups[name]

    here = World()
    monkeypatch.setattr(runtime, "active", here)
    monkeypatch.setattr(ranks, "exchange", here.exchange)
    monkeypatch.setattr(_groups, "_resolve", resolve)
    forget()
    yield here
    forget()


def test_sizes():
    assert workspace.gather_bytes(10, 64, 2) == 4096 + 10 * 64 * 2
    assert workspace.gather_bytes(10, 65, 2) == 4096 + 10 * 72 * 2
    assert workspace.scatter_bytes([3, 0, 5], 8, 2) == 4096 + 3 * 5 * 16
    assert workspace.scatter_bytes([3, 0, 5], 9, 2) == 4096 + 3 * 5 * 32
    assert workspace.scatter_bytes([4, 4], 5, 4) == 4096 + 2 * 4 * 32
    assert [workspace.grown(n) for n in (1, 4096, 4097, 2 * MIB)] == [2 * MIB] * 3 + [4 * MIB]
    assert workspace.grown(4096 + 256 * MIB) == 258 * MIB, "the usual sizes must not double"
    assert workspace.grown(4097 + 256 * MIB) == 514 * MIB
    assert [workspace.pitch(n, 2) for n in (1, 8, 9)] == [8, 8, 16] and workspace.pitch(5, 4) == 8


def test_order_of_growth(world):
    """Nobody frees, or maps, or writes, before every rank is ready for it."""
    space = workspace.ensure(world.group(), CPU, "gather", 100)
    made = ["exchange", "exchange", "allocate 2097152", "synchronize", "exchange"]  # sizes, a name
    mapped = ["exchange", "map", "exchange", "exchange"]  # before and behind "map" those of the fake itself
    first = ["synchronize", *made, *mapped, "warm up", "exchange"]
    assert world.log == first
    assert not space.memory[: workspace.PAGE_BYTES].any() and space.memory[workspace.PAGE_BYTES :].all()
    world.log.clear()
    assert workspace.ensure(world.group(), CPU, "gather", 2 * MIB) is space and world.log == []
    larger = workspace.ensure(world.group(), CPU, "gather", 2 * MIB + 1)
    assert larger.size == 4 * MIB and larger.kept == [] and larger.addresses != space.addresses
    assert world.log == [line.replace("2097152", "4194304") for line in first]
    assert workspace.ensure(world.group(), CPU, "gather", 5) is larger
    scatter = workspace.ensure(world.group(), CPU, "scatter", 5)
    assert scatter is not larger and workspace.ensure(world.group(), CPU, "gather", 5) is larger


def test_memory_of_small_sums(world):
    """All zero, as epochs lie among the data; one size for all calls, no power of two."""
    space = workspace.ensure(world.group(), CPU, "small", small.WORKSPACE_BYTES)
    assert not space.memory.any()
    assert small.WORKSPACE_BYTES <= space.size < small.WORKSPACE_BYTES + 2 * MIB
    workspace.reserve(world.group(), CPU, {"small": small.WORKSPACE_BYTES})
    assert world.log.count("map") == 1


def test_what_is_outgrown_is_freed_before_the_next_is_made(world):
    group, alive = world.group(), []
    allocate = world.allocate
    world.allocate = lambda *args: alive.append(old() is not None) or allocate(*args)
    world.map_ranks = lambda memory, group, name, most: Mapping((memory.data_ptr(), 1))
    world.warm_up = lambda *args: None
    old = lambda: None  # noqa: E731
    old = weakref.ref(workspace.ensure(group, CPU, "gather", 5).memory)
    old = weakref.ref(workspace.ensure(group, CPU, "gather", 3 * MIB).memory)
    workspace.reserve(group, CPU, {"gather": 9 * MIB})
    assert alive == [False, False, False] and old() is None


def test_sizes_are_the_same_on_every_rank_that_makes_the_same_calls(world):
    draw = random.Random(1)
    calls = [draw.randrange(1, 64 * MIB) for _ in range(100)]
    for size in calls:
        space = workspace.ensure(world.group(), CPU, "gather", size)
        assert space.size >= size
    assert world.log.count("map") <= 6


def test_reserve(world):
    group = world.group()
    workspace.reserve(group, CPU, {"gather": 3 * MIB + 1, "scatter": 7})
    sizes = {kind: workspace.ensure(group, CPU, kind, 1).size for kind in ("gather", "scatter")}
    assert sizes == {"gather": 4 * MIB, "scatter": 2 * MIB}
    workspace.reserve(group, CPU, {"gather": 4 * MIB})
    assert world.log.count("map") == 2
    world.peer = lambda value: ({"gather": 5}, "") if isinstance(value[0], dict) else value
    with pytest.raises(
        BackendError, match=r"same size of reserve .* got {'gather': 9} on rank 0, {'gather': 5} on"
    ):
        workspace.reserve(group, CPU, {"gather": 9})


def test_captures(world):
    group = world.group()
    world.capture = True
    with pytest.raises(
        BackendError, match=r"needs 5 bytes for a gather in group 'tp', which has 0: .*captured"
    ):
        workspace.ensure(group, CPU, "gather", 5)
    with pytest.raises(BackendError, match="captured"):
        workspace.reserve(group, CPU, {"gather": 5})
    assert world.log == []
    world.capture = False
    first = workspace.ensure(group, CPU, "gather", 5)
    assert not first.captured
    world.capture = True
    assert workspace.ensure(group, CPU, "gather", 6) is first and first.captured
    with pytest.raises(
        BackendError, match="needs 3,145,728 bytes for a gather in group 'tp', which has 2,097,152"
    ):
        workspace.ensure(group, CPU, "gather", 3 * MIB)
    world.capture = False
    second = workspace.ensure(group, CPU, "gather", 3 * MIB)
    assert [memory.data_ptr() for memory, _ in second.kept] == [first.memory.data_ptr()]
    third = workspace.ensure(group, CPU, "gather", 5 * MIB)  # no graph has the second
    assert [memory.data_ptr() for memory, _ in third.kept] == [first.memory.data_ptr()]


def test_a_failure_keeps_what_graphs_replay(world):
    group = world.group()
    world.capture, first = False, workspace.ensure(group, CPU, "gather", 5)
    first.captured, world.fail = True, "allocate"
    with pytest.raises(BackendError, match="rank 0: RuntimeError: out of memory; rank 1") as got:
        workspace.ensure(group, CPU, "gather", 3 * MIB)
    assert isinstance(got.value.__cause__, RuntimeError)
    world.fail = ""
    back = workspace.ensure(group, CPU, "gather", 5)
    assert back.memory is first.memory and back.captured


def test_a_peer_that_fails_or_disagrees(world):
    group = world.group()
    world.peer = lambda value: (value[0], "RuntimeError: no memory")
    with pytest.raises(
        BackendError, match=r"could not be had .rank 1: RuntimeError: no memory.; use path='auto'"
    ):
        workspace.ensure(group, CPU, "gather", 5)
    assert "map" not in world.log
    world.peer = lambda value: (1, "")
    with pytest.raises(BackendError, match=r"same size .* 2097152 on rank 0, 1 on rank 1; TPK_CHECK=1 tells"):
        workspace.ensure(group, CPU, "gather", 5)
    assert workspace._spaces == {}


def test_memory_goes_with_its_group(world):
    """Noticed at the next use, whoever still holds the group; a new group may have the old one's name."""
    old, other = world.group("0"), world.group("1")
    for group in (old, other):
        workspace.ensure(group, CPU, "gather", 5)
    del world.groups["0"]  # destroyed
    world.log.clear()
    workspace.ensure(other, CPU, "gather", 5)
    assert [key[0] for key in workspace._spaces] == ["1"] and world.log == ["synchronize"]
    again = world.group("0")
    workspace.ensure(again, CPU, "gather", 5)
    world.groups["0"] = ProcessGroup()
    space = workspace.ensure(world.group("0"), CPU, "gather", 5)
    assert space.group() is world.groups["0"]
    del again, old, space
    world.groups.clear()
    gc.collect()
    workspace.free_destroyed()
    assert workspace._spaces == {}


def test_nothing_is_freed_in_a_capture(world):
    group = world.group("0")
    workspace.ensure(group, CPU, "gather", 5)
    other = world.group("1")
    workspace.ensure(other, CPU, "gather", 5)
    del world.groups["0"]
    world.capture = True
    workspace.ensure(other, CPU, "gather", 5)
    assert len(workspace._spaces) == 2
    world.groups["0"] = ProcessGroup()
    with pytest.raises(BackendError, match="captured"):  # not the memory of the group that had this name
        workspace.ensure(world.group("0"), CPU, "gather", 5)


def test_ranks_compare_themselves_once(world):
    group = world.group()
    assert ranks.known(group, CPU) == (False, None)
    world.peer = lambda facts: facts._replace(device="GPU 1")
    ranks.require(group, CPU)
    ranks.require(group, CPU)
    assert world.log == ["exchange"] and ranks.known(group, CPU) == (True, None)
    world.groups["tp"] = ProcessGroup()
    again = world.group()
    assert ranks.known(again, CPU) == (False, None)
    world.peer = lambda facts: facts._replace(host="elsewhere", device="GPU 1")
    for _ in range(2):
        with pytest.raises(
            BackendError, match="path 'fused' was asked for, but in group 'tp' its ranks are on several"
        ):
            ranks.require(again, CPU)
    assert world.log == ["exchange"] * 2
    world.capture = True
    with pytest.raises(BackendError, match="first use cannot be captured"):
        ranks.require(world.group("new"), CPU)
