"""A stopped launch is told when it happens: the thread that does so, and when it lives."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from fused_fakes import on_fakes
from op_behaviour import expect

import tpkernels as tpk
from tpkernels.comm import faults, runtime, watchdog
from tpkernels.errors import BackendError
from tpkernels.ops import _groups

SENTENCE = "CTA 3 waited 4000 ms for slab 0 of chunk 5 of a: its flag is 1, expected 2."
TOLD = "was stopped; its last call is all_gather_matmul on rank 2 of 4 (group 'tp'). " + SENTENCE

# Of processes: as a call on path "fused" leaves things, but for the record.
SETUP = f"""
import os, sys, threading, time
from tpkernels.comm import faults, runtime, watchdog
from tpkernels.ops._groups import Group

class Fake(runtime.Runtime):
    sentence = ""

    def fault(self):
        return self.sentence

def watchdogs():
    return sum(thread.name == "tpkernels watchdog" for thread in threading.enumerate())

runtime.active = fake = Fake()
faults.Reported("all_gather_matmul", Group("tp", 2, 4, object()))
assert watchdogs() == 0, "importing starts none"
SENTENCE = {SENTENCE!r}
"""


def start(code: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TPK_WATCHDOG"}
    return subprocess.Popen(
        [sys.executable, "-c", SETUP + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """What is left of stderr; the process ends by itself."""
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, out + err
    return err


def test_a_process_that_is_busy_elsewhere_tells():
    process = start(
        """
watchdog.start()
watchdog.start()
assert watchdogs() == 1
fake.sentence = SENTENCE
print("stopped", flush=True)
time.sleep(4)
assert watchdogs() == 0, "it has told"
watchdog.start()
assert watchdogs() == 0, "once is enough"
"""
    )
    assert process.stdout is not None and process.stdout.readline() == "stopped\n"
    begin = time.monotonic()
    line = process.stderr.readline()
    assert time.monotonic() - begin < 2
    assert line == f"A launch of process {process.pid} {TOLD}\n"
    assert finish(process) == "", "it tells once, and the process ends"


def test_a_process_that_ends_at_once_has_told():
    """Of an error of CUDA, say, that nothing else explains."""
    told = finish(
        start("watchdog.start()\nfake.sentence = SENTENCE\nraise RuntimeError('CUDA error')"), status=1
    )
    assert told.count(TOLD) == 1 and "RuntimeError: CUDA error" in told, told


def test_it_can_be_switched_off():
    process = start(
        """
for value, count in (("0", 0), ("", 1), ("1", 1)):
    os.environ["TPK_WATCHDOG"] = value
    watchdog.start()
    assert watchdogs() == count, value
"""
    )
    assert finish(process) == "", "there was nothing to tell"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forks():
    """A child has none until it needs one, does not wait for the parent's, and ends."""
    told = finish(
        start(
            """
watchdog.start()
for again in (False, True):
    child = os.fork()
    if child == 0:
        assert watchdogs() == 0
        if again:
            watchdog.start()
            assert watchdogs() == 1
            fake.sentence = "child: " + SENTENCE
        sys.exit(0)
    begin = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - begin < 20
    assert watchdogs() == 1
"""
        )
    )
    lines = [line for line in told.splitlines() if "Deprecation" not in line and "os.fork()" not in line]
    assert len(lines) == 1 and lines[0].endswith("child: " + SENTENCE), told


def test_who_logs_elsewhere_gets_it_there(caplog):
    faults.Reported("all_gather_matmul", _groups.Group("tp", 2, 4, object()))
    end = threading.Event()
    end.set()
    watchdog._watch(lambda: "", end)
    assert caplog.record_tuples == []
    watchdog._watch(lambda: SENTENCE, end)
    assert caplog.record_tuples == [("tpkernels", logging.ERROR, f"A launch of process {os.getpid()} {TOLD}")]


# When it starts


def _starts_with_memory(ctx):
    fake, started, usual = runtime.active, [], watchdog.start
    x, w = torch.ones(6, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    watchdog.start = lambda: started.append(fake.log[-1])
    call = lambda k=8: tpk.all_gather_matmul(x[:, :k], w[:k], ctx.group, path="fused")  # noqa: E731
    try:
        tpk.all_gather_matmul(x, w, ctx.group, path="gloo")
        fake.fail = "allocate"
        expect(BackendError, ["out of memory"], call)
        assert started == [], "there is no record yet"
        fake.fail = ""
        call()
        assert started == ["warm up"], "which makes the record: the thread must not, as that calls CUDA"
        call()
        assert started == ["warm up"], "calls pay nothing"
    finally:
        watchdog.start = usual


def test_it_starts_with_memory_for_calls(ranks):
    ranks.run(on_fakes, _starts_with_memory, world=2)
