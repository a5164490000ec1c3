"""Nsight Systems and Nsight Compute: finding them, their commands, the parsers of what they export."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from bench.profiling import finish, ncu, nsys, nsys_sqlite, summary, tools

RECORDED = Path(__file__).parents[1] / "data"

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"
PAUSE = "at::cuda::<unnamed>::spin_kernel(long)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"

# nsys.

# The columns of exports by nsys 2024.6 and 2025.
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
  globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER,
  launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL,
  gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL,
  blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL,
  staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL,
  localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER,
  sharedMemoryLimitConfig INTEGER, qmdBulkReleaseDone INTEGER, qmdPreexitDone INTEGER, qmdLastCtaDone INTEGER,
  graphId INTEGER, clusterX INTEGER, clusterY INTEGER, clusterZ INTEGER, clusterSchedulingPolicy INTEGER,
  maxPotentialClusterSize INTEGER, maxActiveClusters INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
  globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER,
  dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER,
  migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER, copyCount INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
  category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
  uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL,
  jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
"""
# What was different years ago: names and processes in other columns, tables without what was added since.
OLD_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, streamId INT, correlationId INT, shortName INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, streamId INT, correlationId INT, bytes INT, copyKind INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT);
"""
PROCESS = (7 << 56) | (4242 << 24)  # hardware and virtual machine in the high bits, then the process
THREAD, OTHER_THREAD = PROCESS | 4242, PROCESS | 4300
OTHER_PROCESS = (7 << 56) | (5555 << 24)


def export(path: Path, schema: str = SCHEMA, *, text_ids: bool = True, pause: bool = False) -> Path:
    """One step, from 1 ms on: a gather, a product that begins before it ends, two copies.

    With ``pause`` behind one that ends 48 us after the host began with the step, which has its own at the end.
    """
    at, us = 1_000_000, 1000
    with closing(sqlite3.connect(path)) as database:
        database.executescript(schema)
        strings: dict[str, int] = {}

        def text(value: str) -> int:
            if value not in strings:
                strings[value] = len(strings) + 1
                database.execute("INSERT INTO StringIds VALUES (?, ?)", (strings[value], value))
            return strings[value]

        def insert(table: str, **values: Any) -> None:
            """The values whose columns this schema has; 0 where it wants something."""
            columns = database.execute(f"PRAGMA table_info({table})").fetchall()
            row = {c[1]: values.get(c[1], 0 if c[3] else None) for c in columns}
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO {table} VALUES ({marks})", list(row.values()))

        def nvtx(name: str, begin: float, end: float | None, thread: int = THREAD, kind: int = 59) -> None:
            named = {"textId": text(name)} if text_ids else {"text": name}
            stop = None if end is None else at + int(end * us)
            insert(
                "NVTX_EVENTS", start=at + int(begin * us), end=stop, eventType=kind, globalTid=thread, **named
            )

        def launch(when: float, correlation: int, thread: int = THREAD) -> None:
            start = at + int(when * us)
            call = dict(start=start, end=start + 2 * us, globalTid=thread, correlationId=correlation)
            insert("CUPTI_ACTIVITY_KIND_RUNTIME", nameId=text("cudaLaunchKernel_v7000"), **call)

        def kernel(
            name: str, begin: float, end: float, stream: int, correlation: int, pid: int = PROCESS
        ) -> None:
            times = dict(start=at + int(begin * us), end=at + int(end * us), streamId=stream)
            ids = dict(
                correlationId=correlation, globalPid=pid, demangledName=text(name), shortName=text(name)
            )
            insert("CUPTI_ACTIVITY_KIND_KERNEL", **times, **ids)

        if "SESSION_START" in schema:
            insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=10**18, utcTime="", localTime="")
        kernel(NCCL, -50, -20, 20, 1)  # to line up: not counted
        nvtx("step 0", 0, 90)
        nvtx("gather nccl", 1, 21)
        launch(5, 2)
        nvtx("product cublas", 30, 50)
        launch(35, 3)
        launch(36, 9, OTHER_THREAD)
        nvtx("open", 60, None)
        nvtx("a mark", 61, None, kind=34)
        kernel(NCCL, 50, 150, 20, 2)
        kernel(GEMM, 100, 180, 7, 3)
        if "globalPid" in schema:
            kernel(ADD, 185, 186, 7, 3, pid=OTHER_PROCESS)  # the same correlation of another process
        times = dict(start=at + 180 * us, end=at + 200 * us, streamId=21, correlationId=4, globalPid=PROCESS)
        insert("CUPTI_ACTIVITY_KIND_MEMCPY", bytes=1 << 20, copyKind=10, **times)
        times.update(start=at + 210 * us, end=at + 220 * us)
        insert("CUPTI_ACTIVITY_KIND_MEMCPY", bytes=1 << 20, copyKind=8, srcDeviceId=0, dstDeviceId=0, **times)
        if pause:
            nvtx("warm-up", -300, -250)
            for begun, name, begin, end, correlation in (
                (-290, GEMM, -280, -200, 90),  # of the warm-up
                (-100, PAUSE, -90, 30, 91),
                (-90, NCCL, 31, 41, 92),
                (-80, PAUSE, 42, 48, 93),
                (40, PAUSE, 230, 240, 94),
            ):
                launch(begun, correlation)
                kernel(name, begin, end, 7, correlation)
        database.commit()
    return path


@pytest.mark.parametrize("text_ids", [True, False])
def test_nsys_export(tmp_path, text_ids):
    found = nsys_sqlite.read(export(tmp_path / "rank3.sqlite", text_ids=text_ids), 3)
    assert (found.rank, found.steps, found.clock_ns) == (3, 1, 10**18)
    (rank,) = summary.build([found], "", tool="nsys")["ranks"]
    assert (
        rank["communication_us"] == 120 and rank["exposed_us"] == 69
    )  # 1 us of it beside the other process's kernel
    assert {e.category for e in found.events if e.name == "Memcpy DtoD"} == {"copy"}
    gpu = {r.name: r.gpu_us for r in found.ranges}
    assert gpu == {"step 0": 130, "gather nccl": 100, "product cublas": 80}
    assert {r.name: r.host_us for r in found.ranges}["step 0"] == 90


def test_nsys_export_of_an_older_version(tmp_path):
    found = nsys_sqlite.read(export(tmp_path / "rank0.sqlite", OLD_SCHEMA, text_ids=False), 0)
    (rank,) = summary.build([found], "", tool="nsys")["ranks"]
    assert rank["communication_us"] == 120 and rank["compute_us"] == 80 and rank["exposed_us"] == 70
    assert {r.name: r.gpu_us for r in found.ranges} == {
        "step 0": 130,
        "gather nccl": 100,
        "product cublas": 80,
    }


@pytest.mark.parametrize("schema,text_ids", [(SCHEMA, True), (OLD_SCHEMA, False)])
def test_nsys_counts_from_the_end_of_the_pause(tmp_path, schema, text_ids):
    plain, paused = (
        nsys_sqlite.read(export(tmp_path / f"{pause}.sqlite", schema, text_ids=text_ids, pause=pause), 0)
        for pause in (False, True)
    )
    assert plain.begin is None and paused.begin == 1048
    (a,), (b,) = (summary.build([p], "", tool="nsys")["ranks"] for p in (plain, paused))
    for name in ("communication_us", "compute_us", "exposed_us"):
        assert a[name] == b[name], name
    begins = {e["name"]: e["start_us"] for s in b["streams"] for e in s["events"]}
    assert (begins[NCCL], begins[GEMM], begins[PAUSE]) == (2, 52, 182)
    found = {r.name: r.gpu_us for r in paused.ranges}
    assert found == {"step 0": 140, "gather nccl": 100, "product cublas": 90}


def test_nsys_export_that_is_none(tmp_path):
    path = tmp_path / "x.sqlite"
    path.write_text("not a database, but long enough to have a header to look at")
    with pytest.raises(BenchError, match="expected the SQLite export"):
        nsys_sqlite.read(path, 0)
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE other (x);")
    with pytest.raises(BenchError, match="no table StringIds"):
        nsys_sqlite.read(path, 0)
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.executescript(SCHEMA)
    with pytest.raises(BenchError, match="launched nothing on a GPU"):
        nsys_sqlite.read(path, 0)


def test_recorded_nsys_exports():
    """Real exports of GPU hosts: communication and compute are found, and ranges have GPU time."""
    paths = sorted(RECORDED.glob("nsys_*.sqlite"))
    assert paths
    for path in paths:
        found = nsys_sqlite.read(path, 0)
        (rank,) = summary.build([found], path.stem, tool="nsys")["ranks"]
        assert rank["compute_us"] > 0 and rank["communication_us"] > 0, path
        assert 0 <= rank["overlap_fraction"] <= 1 and rank["exposed_us"] <= rank["communication_us"], path
        assert any(r.name == "step 0" and r.gpu_us for r in found.ranges), path
        ours = "pause" not in path.name
        assert any(r.name.startswith("tpk::") and r.gpu_us for r in found.ranges) == ours, path


def test_a_recorded_pause_does_not_count():
    """torch's fused all-gather + GEMM, four steps behind the pause, of which each takes some 660 us."""
    found = nsys_sqlite.read(RECORDED / "nsys_2025.3_h200_pause.sqlite", 0)
    (rank,) = summary.build([found], "x", tool="nsys")["ranks"]
    assert rank["compute_us"] == pytest.approx(2542.265)
    assert rank["communication_us"] == pytest.approx(823.388)
    assert rank["overlap_fraction"] == pytest.approx(0.882516)
    assert not any("spin_kernel" in e["name"] for stream in rank["streams"] for e in stream["events"])


def program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_nsys_prefix_and_finish(tmp_path, monkeypatch):
    """With a stand-in for nsys that copies a database when it is to export."""
    database = export(tmp_path / "there.sqlite")
    script = f'for a in "$@"; do case $a in --output=*) cp {database} "${{a#--output=}}";; esac; done'
    monkeypatch.setenv("TPK_NSYS", str(program(tmp_path / "bin" / "nsys", script)))
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank7.nsys-rep").write_text("of an earlier profile")
    prefix = nsys.rank_prefix(out)
    assert prefix[:2] == [str(tmp_path / "bin" / "nsys"), "profile"]
    for option in ("--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"):
        assert option in prefix
    assert prefix[-1] == f"--output={out}/rank%q{{RANK}}"
    with pytest.raises(BenchError, match=r"expected rank0\.nsys-rep"):
        nsys.finish(out)
    for rank in range(2):
        (out / f"rank{rank}.nsys-rep").write_text("")
    found = json.loads(finish("nsys", out, title="AG").read_text())
    assert (found["tool"], [r["rank"] for r in found["ranks"]]) == ("nsys", [0, 1])
    assert "gather nccl" in (out / "summary.txt").read_text()


def test_nsys_that_could_not_convert(tmp_path, monkeypatch):
    monkeypatch.setenv("TPK_NSYS", str(program(tmp_path / "target-linux-x64" / "nsys")))
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank1.qdstrm").write_text("")
    with pytest.raises(BenchError, match=r"rank1\.qdstrm: .*QdstrmImporter.*was not found"):
        nsys.finish(out)
    importer = program(tmp_path / "host-linux-x64" / "QdstrmImporter")
    ldd = "echo '\tlibdw.so.1 => not found'; echo '\tlibc.so.6 => /lib/libc.so.6'; echo '\tlibelf.so.1 => not found'"
    program(tmp_path / "fake" / "ldd", ldd)
    monkeypatch.setenv("PATH", f"{tmp_path / 'fake'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(
        BenchError, match=r"lacks libdw\.so\.1, libelf\.so\.1; install libdw1 libelf1"
    ) as error:
        nsys.finish(out)
    assert str(importer) in str(error.value)


# Finding programs.


def test_find(tmp_path, monkeypatch):
    monkeypatch.delenv("TPK_X", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    folders = (f"{tmp_path}/nsight/*/bin", f"{tmp_path}/cuda*/bin")
    with pytest.raises(BenchError, match=r"x: not found on PATH.*install X, or set TPK_X"):
        tools.find("x", "TPK_X", folders, package="X")
    for version in ("2024.6.2", "2025.3.1", "2025.10.1"):
        program(tmp_path / "nsight" / version / "bin" / "x")
    (tmp_path / "nsight" / "2026.1" / "bin").mkdir(parents=True)
    (tmp_path / "nsight" / "2026.1" / "bin" / "x").write_text("not a program")
    assert "2025.10.1" in tools.find("x", "TPK_X", folders, package="X")
    on_path = program(tmp_path / "path" / "x")
    assert tools.find("x", "TPK_X", folders, package="X") == str(on_path)
    said = program(tmp_path / "said")
    monkeypatch.setenv("TPK_X", str(said))
    assert tools.find("x", "TPK_X", folders, package="X") == str(said)
    monkeypatch.setenv("TPK_X", str(tmp_path / "nothing"))
    with pytest.raises(BenchError, match="TPK_X: expected the path of the program x"):
        tools.find("x", "TPK_X", folders, package="X")


def test_output_of(tmp_path):
    assert tools.output_of([str(program(tmp_path / "a", "echo hi"))]) == "hi\n"
    with pytest.raises(BenchError, match=r"exit code 3 .*: went wrong"):
        tools.output_of([str(program(tmp_path / "b", "echo went wrong >&2; exit 3"))])
    with pytest.raises(BenchError, match="did not end within 0 s"):
        tools.output_of([str(program(tmp_path / "c", "sleep 10"))], timeout=0.2)
    with pytest.raises(BenchError, match="cannot be run"):
        tools.output_of([str(tmp_path / "nothing")])


# ncu.

CSV = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"gpu__time_duration.sum","gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",\
"launch__registers_per_thread","launch__shared_mem_per_block_driver","launch__shared_mem_per_block_dynamic",\
"launch__shared_mem_per_block_static","lts__t_sector_hit_rate.pct","sm__pipe_fp64_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active","sm__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","ns","%","register/thread","Kbyte/block","Kbyte/block","byte/block","%","%","%","%","%","%"
"0","4711","python3.12","127.0.0.1","nvjet_tst_128x256","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"1,234,567.00","41.50","168","1.02","213.50","48","63.25","99.0","87.40","0","91.10","18.75"
"1","4711","python3.12","127.0.0.1","void cutlass::Kernel<x>(T1, ""y"")","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",\
"500.00","n/a","255","1.02","0","0","","0","0","0","12.00","6.25"
"""


def test_ncu_csv():
    first, second = ncu.parse(CSV)
    assert first == {
        "kernel": "nvjet_tst_128x256",
        "grid": "(132, 1, 1)",
        "block": "(384, 1, 1)",
        "duration_us": pytest.approx(1234.567),
        "sm_pct": 91.1,
        "memory_pct": 41.5,
        "tensor_pct": 87.4,
        "l2_hit_pct": 63.25,
        "occupancy_pct": 18.75,
        "registers": 168,
        "shared_memory_bytes": pytest.approx(1020 + 213500 + 48),
    }
    assert second["kernel"] == 'void cutlass::Kernel<x>(T1, "y")' and second["duration_us"] == 0.5
    assert "memory_pct" not in second and "l2_hit_pct" not in second
    text = ncu.table([{"rank": 0, **first}])
    assert "1,234.6 us" in text and "87.4 %" in text and "214,568 B" in text


def test_recorded_ncu_table():
    """Columns and units as Nsight Compute 2025.3 writes them, of the portable kernel at 4096^3 on an H100."""
    text = (RECORDED / "ncu_2025.3_h100.csv").read_bytes().decode()
    assert "\r" not in text  # git would warn
    (kernel,) = ncu.parse(text)
    assert ncu.parse(text.replace("\n", "\r\n")) == [kernel]  # as ncu writes it
    assert kernel["kernel"].startswith("void streamk_gemm_kernel") and kernel["grid"] == "(264, 1, 1)"
    assert kernel["duration_us"] == pytest.approx(352.576) and kernel["registers"] == 242
    assert kernel["tensor_pct"] == pytest.approx(64.27) and kernel["l2_hit_pct"] == pytest.approx(83.94)
    assert kernel["shared_memory_bytes"] == 66816


@pytest.mark.parametrize(
    "unit,expected",
    [("ns", 1.5), ("nsecond", 1.5), ("us", 1500), ("usecond", 1500), ("ms", 1.5e6), ("second", 1.5e9)],
)
def test_ncu_units(unit, expected):
    text = CSV.replace('"","ns"', f'"","{unit}"').replace("1,234,567.00", "1,500.00")
    assert ncu.parse(text)[0]["duration_us"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "text,message",
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access",
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("==WARNING== No kernels were profiled.\nAvailable Kernels: nvjet", "no kernel was profiled"),
        ("Traceback", "begins with \"ID\", got 'Traceback'"),
        (CSV[: CSV.index('"0","4711"')], "no kernel was profiled"),
    ],
)
def test_ncu_that_measured_nothing(text, message):
    with pytest.raises(BenchError, match=re.escape(message)):
        ncu.parse(text)


def test_ncu_prefix_and_finish(tmp_path, monkeypatch):
    table = tmp_path / "raw.csv"
    table.write_text(CSV)
    monkeypatch.setenv("TPK_NCU", str(program(tmp_path / "ncu", f"cat {table}")))
    out = tmp_path / "out"
    prefix = ncu.rank_prefix(out, "nvjet", skip=3, metrics=["dram__bytes.sum"])
    line = " ".join(prefix)
    for part in (
        "--profile-from-start=off",
        "--kernel-name regex:nvjet",
        "--launch-skip 3 --launch-count 1",
        "--set basic",
        "--metrics dram__bytes.sum",
        "--clock-control=none",
        f"--export {out}/rank%q{{RANK}}",
    ):
        assert part in line
    with pytest.raises(BenchError, match=r"expected rank0\.ncu-rep"):
        ncu.finish(out)
    with pytest.raises(BenchError, match="ERR_NVGPUCTRPERM"):
        finish("ncu", out, log="...\n==ERROR== ERR_NVGPUCTRPERM - The user does not")
    (out / "rank1.ncu-rep").write_text("")
    found = json.loads(ncu.finish(out).read_text())
    assert [k["rank"] for k in found["kernels"]] == [1, 1]
    assert found["kernels"][0]["kernel"] == "nvjet_tst_128x256"
    assert "tensor" in (out / "summary.txt").read_text()


@pytest.mark.parametrize("pattern", ["nccl", "gemm|nccl", ".*", "all_gather_kernel"])
def test_ncu_refuses_kernels_that_wait_for_others(tmp_path, pattern):
    with pytest.raises(BenchError, match="wait for other ranks"):
        ncu.rank_prefix(tmp_path, pattern)


def test_ncu_refuses_what_is_no_expression(tmp_path):
    with pytest.raises(BenchError, match="not a regular expression"):
        ncu.rank_prefix(tmp_path, "gemm(")
