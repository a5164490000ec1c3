"""The cache of tuned plans: what is read back, what is ignored and how it says so, locks, processes that start cold."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from tpkernels.tune import machine, store
from tpkernels.tune.store import Entry, Store

STAMP = {"device": "A GPU (80 GB)", "tpkernels": "1", "torch": "2"}
ENTRY = Entry(
    "streamk", "split_k", 3, "64x64x128", "64x64x128 split_k x3", 9.5, 12.0, 11.0, 10.0, "other", 5.0
)
ROOT = Path(__file__).resolve().parents[2]


def kept(where: Path, stamp: dict[str, str] = STAMP) -> Store:
    return Store(stamp, where)


def test_what_is_put_is_read_by_others(tmp_path):
    one = kept(tmp_path / "new" / "folder")
    one.put("a key", ENTRY)
    one.put_constants("cpu", {"text": "launch_us 3.0\n", "p90_error": 0.5})
    other = kept(tmp_path / "new" / "folder")
    assert other.get("a key") == ENTRY and other.get("another") is None and other.all() == {"a key": ENTRY}
    assert other.constants("cpu") == {"text": "launch_us 3.0\n", "p90_error": 0.5}
    assert other.constants("sm90") is None
    # What comes later is seen, without being asked for anew.
    other.put("third", ENTRY)
    assert one.get("third") == ENTRY
    (path,) = store.files(tmp_path / "new" / "folder")
    assert path == one.path and path.name.startswith("tuned-A-GPU-80-GB-")
    assert not list((tmp_path / "new" / "folder").glob("*.tmp"))


def test_other_versions_have_other_files(tmp_path):
    kept(tmp_path).put("key", ENTRY)
    for name in STAMP:
        assert kept(tmp_path, STAMP | {name: "other"}).get("key") is None
    assert kept(tmp_path).get("key") == ENTRY


OTHER = {"format": 1, "machine": STAMP | {"torch": "3"}, "entries": {}, "constants": {}}
WRONG = [
    (b"", "it holds no tuned plans, or only a part of them"),
    (b"\xff\x00 no text", "it holds no tuned plans"),
    (b"[1, 2]", "it holds no tuned plans"),
    (b'{"format": 1}', "it holds no tuned plans"),
    (b'{"format": 99, "machine": {}}', "its format is 99, not 1"),
    (b"[" * 100_000, "it holds no tuned plans"),
    (json.dumps(OTHER).encode(), "it was made with another torch"),
    (store.render(STAMP, {"key": ENTRY}, {})[:-40], "or only a part of them"),
]


@pytest.mark.parametrize("text,words", WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_read_is_told_once_and_replaced(tmp_path, text, words):
    path = kept(tmp_path).path
    path.write_bytes(text)
    one = kept(tmp_path)
    with pytest.warns(RuntimeWarning, match="tpkernels' tuning cache: .* is ignored: .*" + words):
        assert one.get("key") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.get("key") is None
        one.put("new", ENTRY)
        assert kept(tmp_path).all() == {"new": ENTRY}


BAD = [
    {"gemm": "magic"}, {"splits": 0}, {"splits": True}, {"us": -1.0}, {"us": "5"}, {"tile": 7}, {"tile": "x" * 300},
    {"when": float("nan")}, {"us": float("inf")},
]  # fmt: skip


@pytest.mark.parametrize("change", BAD, ids=str)
def test_entries_that_make_no_sense(tmp_path, change):
    entries = {"good": dataclasses.asdict(ENTRY), "bad": dataclasses.asdict(ENTRY) | change, "worse": 3}
    whole = {"format": 1, "machine": STAMP, "constants": {"cpu": 1}, "entries": entries}
    path = kept(tmp_path).path
    path.write_text(json.dumps(whole))
    one = kept(tmp_path)
    with pytest.warns(RuntimeWarning, match="3 of its entries make no sense"):
        assert one.get("bad") is None
    assert one.all() == {"good": ENTRY}


def test_folders_that_cannot_be_written_to(tmp_path):
    """A file where the folder should be: whoever runs the tests, it cannot be made."""
    (tmp_path / "file").write_text("")
    one = kept(tmp_path / "file" / "cache")
    with pytest.warns(
        RuntimeWarning, match="cannot be written to .*; tuned plans last as long as this process"
    ):
        one.put("key", ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.put("other", ENTRY)
        with one.claim("key", 0.1) as held:
            assert held
    assert one.get("key") == ENTRY and store.files(tmp_path / "file" / "cache") == []


def test_without_a_home(monkeypatch):
    monkeypatch.delenv("TPK_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    one = Store(STAMP)
    assert one.path is None and store.folder() is None and store.files() == [] and store.clear() == []
    one.put("key", ENTRY)
    with one.claim("key", 0.1) as held:
        assert held and one.get("key") == ENTRY


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TPK_CACHE_DIR", str(tmp_path))
    assert store.folder() == tmp_path and Store(STAMP).path.parent == tmp_path
    monkeypatch.setenv("TPK_CACHE_DIR", "")
    monkeypatch.setenv("HOME", "/somewhere")
    assert store.folder() == Path("/somewhere/.cache/tpkernels")


def test_sizes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_ENTRIES", 5)
    monkeypatch.setattr(store, "MOST_FILES", 3)
    one = kept(tmp_path)
    for i in range(8):
        one.put(f"key {i}", dataclasses.replace(ENTRY, when=float(i)))
    assert list(kept(tmp_path).all()) == [f"key {i}" for i in range(3, 8)]  # the oldest are gone
    for i in range(5):
        kept(tmp_path, STAMP | {"torch": str(i)}).put("key", ENTRY)
        time.sleep(0.01)
    names = {json.loads(path.read_text())["machine"]["torch"] for path in store.files(tmp_path)}
    assert names == {"2", "3", "4"} and len(list(tmp_path.iterdir())) <= 6


def test_clear_leaves_other_files(tmp_path):
    kept(tmp_path).put("key", ENTRY)
    (tmp_path / "notes.txt").write_text("mine")
    assert store.clear(tmp_path) == [kept(tmp_path).path]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_stamps():
    stamp = machine.stamp(torch.device("cpu"))
    assert set(stamp) == {"tpkernels", "kernels", "torch", "device", "cores"} and all(stamp.values())
    assert len(stamp["kernels"]) == 16 and stamp["torch"] == torch.__version__


HOLDER = """
import sys, time
from pathlib import Path
from tpkernels.tune.store import Store
with Store({stamp!r}, Path(sys.argv[1])).claim("key", 5.0) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def run(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.update(options.pop("env", {}))  # type: ignore[call-overload]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
    )


def test_a_key_is_held_by_one_process(tmp_path):
    """Others do not get it; other keys they do; it is free when its holder dies."""
    one = kept(tmp_path)
    holder = run(HOLDER.format(stamp=STAMP), str(tmp_path))
    assert holder.stdout.readline() == "True\n", holder.stderr.read()
    with one.claim("key", 0.1) as held:
        assert not held
    with one.claim("another key", 0.1) as held:
        assert held
    holder.kill()
    holder.wait()
    with one.claim("key", 5.0) as held:
        assert held
    with one.claim("key", 0.1) as held:
        assert held


COLD = """
import json, os, sys, time, warnings
import torch
import tpkernels as tpk
from tpkernels.tune import local
warnings.simplefilter("error", RuntimeWarning)
folder, me, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
g = torch.Generator().manual_seed(0)
a, b = torch.randn(60, 300, generator=g), torch.randn(300, 80, generator=g)
open(os.path.join(folder, "ready" + me), "w").close()
while sum(name.startswith("ready") for name in os.listdir(folder)) < count:
    time.sleep(0.01)
told = []
for x, y in ((a, b), (b.t(), a.t()), (a[:7], b)):
    out = tpk.matmul(x, y)
    told.append([tpk.last_path().path, tpk.last_path().why, hash(out.numpy().tobytes())])
print(json.dumps({"timed": local.counts.timed, "found": local.counts.found, "told": told}))
"""


@pytest.mark.slow
def test_eight_processes_start_cold(tmp_path):
    """Every product is timed by one of them, all take the same, and the file is whole."""
    environment = {"TPK_AUTOTUNE": "1", "TPK_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": "0"}
    processes = [run(COLD, str(tmp_path), str(i), "8", env=environment) for i in range(8)]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
        results.append(json.loads(out))
    assert sum(r["timed"] for r in results) == 3, results
    assert all(r["timed"] + r["found"] == 3 for r in results)
    assert len({json.dumps(r["told"]) for r in results}) == 1, results
    assert all(why.startswith("tuned: ") for _, why, _ in results[0]["told"])
    (path,) = store.files(tmp_path / "cache")
    entries, _, wrong = store.parse(path.read_bytes(), machine.stamp(torch.device("cpu")))
    assert len(entries) == 3 and not wrong
