"""What of the overlap suite needs GPUs, on gloo ranks with stand-ins for the libraries: the flow and the calls."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from overlap_cases import make, run_all

from bench.peers import cublasmp, symm_mem
from bench.peers.cublasmp_api import CublasMpError
from bench.suite import Skip
from bench.suites import overlap_ceiling
from bench.suites.overlap import SUITE
from bench.suites.overlap_problem import Problem
from bench.suites.overlap_shapes import OPS


class FakeCublasMp:
    """Stands for :class:`bench.peers.cublasmp_api.Libraries`: computes from descriptors and pointers, on CPU ranks.

    It sees what cuBLASMp would see and nothing else, so a wrong layout, pointer or attribute gives a wrong result.
    """

    version = "0.7.0"
    cost_us: ClassVar = {0: 30.0, 1: 10.0, 5: 20.0}  # of a call by algorithm

    def __init__(self, context, refuses=()):
        self.context, self.refuses = context, refuses
        self.handles, self.memory, self.clock_us, self.created = {}, {}, 0.0, 0

    def nccl(self, name, *arguments):
        assert name == "GetUniqueId"
        arguments[0]._obj.internal = b"the id"

    def communicator(self, world, unique_id, rank):
        assert (world, unique_id.internal, rank) == (self.context.world, b"the id", self.context.rank)
        return 1

    def create(self, name, *arguments, first=False):
        assert first == (name in ("Create", "MatmulDescriptorCreate"))
        self.created += 1
        self.handles[self.created] = (name, arguments, {})
        return self.created

    def malloc(self, size):
        assert len(set(self.context.agree(size))) == 1  # collective
        block = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address):
        self.context.agree(None)
        del self.memory[address]

    def mp(self, name, *arguments):
        if name == "MatmulDescriptorAttributeSet":
            operation, attribute, number, size = arguments
            assert size == 4
            self.handles[operation][2][attribute] = number._obj.value
        elif name == "Matmul_bufferSize":
            *_, device, host = arguments
            if self.attributes(arguments)[3] in self.refuses:
                raise CublasMpError("cublasMpMatmul_bufferSize", 7, "NOT_SUPPORTED")
            device._obj.value, host._obj.value = 100 + self.context.rank, 5
        elif name == "Matmul":
            self.matmul(*arguments)
        else:
            assert name.endswith("Destroy")
            assert self.handles[arguments[0]][0] == name.replace("Destroy", "Create")
            del self.handles[arguments[0]]

    def attributes(self, arguments):
        return self.handles[arguments[1]][2]

    def matmul(self, handle, operation, m, n, k, alpha, *rest):
        a, beta, c, d = rest[0:4], rest[8], rest[9:13], rest[13:17]
        b = rest[4:8]
        workspace, device_bytes, _, host_bytes = rest[17:]
        assert self.handles[handle][0] == "Create"
        assert (alpha._obj.value, beta._obj.value, c) == (1.0, 0.0, (None, 1, 1, None))
        assert len(self.memory[workspace]) == device_bytes == 100 + self.context.world - 1
        assert host_bytes == 5
        attributes = self.handles[operation][2]
        assert (attributes[0], attributes[1]) == (1, 0)  # A transposed, B not
        whole_a, whole_b = (self.assemble(matrix) for matrix in (a, b))
        assert (whole_a.shape, whole_b.shape) == ((k, m), (k, n))
        result = whole_a.double().t() @ whole_b.double()
        part, rows, columns = self.local(d)
        if attributes.get(5, 0) == 1:
            assert (rows, columns) == (m, n * self.context.world)
        else:
            assert (rows, columns) == (m, n)
            dim = 0 if part.shape[0] < rows else 1
            result = result.chunk(self.context.world, dim)[self.context.rank]
        part.copy_(result)
        self.clock_us += self.cost_us[attributes[3]]

    def local(self, matrix):
        """This rank's part of a distributed matrix, column-major in memory, and the global sizes."""
        pointer, i, j, descriptor = matrix
        name, (rows, columns, block_rows, block_columns, *source, leading, data_type, grid), _ = self.handles[
            descriptor
        ]
        assert (name, i, j, source, data_type) == ("MatrixDescriptorCreate", 1, 1, [0, 0], 14)
        kind, (down, across, layout, _), _ = self.handles[grid]
        assert kind == "GridCreate"
        assert (down, across, layout) in ((self.context.world, 1, 0), (1, self.context.world, 1))
        assert rows == block_rows * down  # what is distributed is in one block a rank
        assert down > 1 or columns == block_columns * across
        shape = (rows // down, columns // across)
        assert leading == shape[0]
        memory = (ctypes.c_uint8 * (2 * shape[0] * shape[1])).from_address(pointer)
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(shape[1], shape[0]).t(), rows, columns

    def assemble(self, matrix):
        part, rows, _ = self.local(matrix)
        return torch.cat(self.context.agree(part.clone()), dim=0 if part.shape[0] < rows else 1)


def fake_cuda(clock=None):
    """Streams do nothing; events read ``clock.clock_us``."""
    stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=1)

    class Event:
        def __init__(self, enable_timing):
            self.at_us = 0.0

        def record(self):
            self.at_us = clock.clock_us

        def elapsed_time(self, end):
            return (end.at_us - self.at_us) * 1e-3

    return mock.patch.multiple(
        torch.cuda,
        Stream=lambda device, priority=0: stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda: stream,
        Event=Event,
        _sleep=lambda cycles: None,
    )


def host_bytes(address, size):
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def check_cublasmp(ctx, op):
    context, _, cases = make(ctx, op, rows=(4 * ctx.world,))
    problem = Problem(cases[0], context)
    fake = FakeCublasMp(context, refuses=(5,))
    with (
        fake_cuda(fake),
        mock.patch.object(cublasmp.api, "load", return_value=fake),
        mock.patch.object(cublasmp, "_DeviceBytes", host_bytes),
        mock.patch.object(cublasmp.Session, "_current", None),
    ):
        runnable = cublasmp.prepare(problem)
        assert not runnable.graph
        assert (runnable.extra["version"], runnable.extra["algorithm"]) == ("0.7.0", "split_p2p")
        assert runnable.extra["algorithms_us"] == {"default": 30.0, "split_p2p": 10.0}
        assert "NOT_SUPPORTED" in runnable.extra["refused"]["no_overlap"]
        runnable.poison()
        assert runnable.check().error == math.inf
        run_all(runnable)
        assert runnable.check().ok
        runnable.close()
        session = [name for name, *_ in fake.handles.values()]
        assert (session, fake.memory) == (["Create", "GridCreate", "GridCreate"], {})
        # A second case goes on with the session; one that no algorithm takes is skipped, and leaves nothing either.
        fake.refuses = (0, 1, 5)
        with pytest.raises(Skip, match=r"cuBLASMp 0\.7\.0 has no algorithm for this case"):
            cublasmp.prepare(problem)
        assert (len(fake.handles), fake.memory) == (3, {})


@pytest.mark.parametrize("op", OPS)
def test_cublasmp(ranks, op):
    ranks.run(check_cublasmp, op, world=3)


def shared_files(context, folder):
    """Stands for :func:`bench.peers.symm_mem.symmetric`: memory of every rank that every rank has mapped."""

    count = itertools.count()

    def symmetric(group, size, dtype, device):
        number = next(count)
        files = [f"{folder}/{number}-{rank}" for rank in range(context.world)]
        mapped = [torch.from_file(files[context.rank], shared=True, size=size, dtype=dtype)]
        context.agree(None)  # the others have theirs
        for rank, file in enumerate(files):
            if rank != context.rank:
                mapped.append(torch.from_file(file, shared=True, size=size, dtype=dtype))
        local, *peers = mapped
        peers.insert(context.rank, local)
        return symm_mem.Symmetric(local, peers, None)

    return symmetric


def check_ceiling(ctx, folder, op, rows):
    context, _, cases = make(ctx, op, rows=rows)
    problem = Problem(cases[0], context)
    with fake_cuda(), mock.patch.object(symm_mem, "symmetric", shared_files(context, folder)):
        runnable = overlap_ceiling.prepare(problem)
        runnable.poison()
        run_all(runnable)
        assert runnable.check().ok
        runnable.poison()
        for i in range(runnable.copies):
            runnable.parts["push"](i)
        assert runnable.check().error == math.inf  # the product is missing
        runnable.poison()
        if ctx.rank > 0:  # rank 0 multiplies and does not push
            run_all(runnable)
        else:
            with mock.patch.object(overlap_ceiling.Exchange, "push"):
                run_all(runnable)
        assert runnable.check().ok == (ctx.rank == 0)
        runnable.close()


@pytest.mark.parametrize("op, rows", [("AG", ()), ("RS", ()), ("AR", ()), ("AR", (5,))])
def test_ceiling(ranks, tmp_path, op, rows):
    ranks.run(check_ceiling, str(tmp_path), op, rows, world=3)


def check_symm_mem(ctx, folder, op):
    """torch's own fallbacks behind the schemas of its operations."""
    context, options, cases = make(ctx, op)
    problem = Problem(cases[0], context)
    library = torch.library.Library("symm_mem", "IMPL")

    def one_shot(partial, reduce_op, group_name, out):
        assert (reduce_op, group_name) == ("sum", ctx.group_name)
        dist.all_reduce(out.copy_(partial), group=ctx.group)
        return out

    def two_shot(partial, reduce_op, group_name):
        return one_shot(partial, reduce_op, group_name, partial)

    for name, function in {
        "fused_all_gather_matmul": torch_symm_mem._fused_all_gather_matmul_fallback,
        "fused_matmul_reduce_scatter": torch_symm_mem._fused_matmul_reduce_scatter_fallback,
        "one_shot_all_reduce_out": one_shot,
        "two_shot_all_reduce_": two_shot,
    }.items():
        library.impl(name, function, "CPU")
    try:
        with mock.patch.object(symm_mem, "symmetric", shared_files(context, folder)):
            for variant in SUITE.variants(options):
                if variant.name.startswith("symm_mem") and SUITE.applies(cases[0], variant.name, options):
                    runnable = symm_mem.prepare(problem, variant.name)
                    runnable.poison()
                    assert runnable.check().error == math.inf
                    run_all(runnable)
                    assert runnable.check().ok, variant.name
                    if runnable.close is not None:
                        runnable.close()
    finally:
        library._destroy()


@pytest.mark.parametrize("op", OPS)
def test_symm_mem(ranks, tmp_path, op):
    ranks.run(check_symm_mem, str(tmp_path), op, world=2)
