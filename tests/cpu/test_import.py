"""Importing the package where parts are missing: it works, or says in one sentence what to do.

Each case runs in its own process, over a folder of links to the package from which the part is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import tpkernels
from tpkernels import _extensions

PACKAGE = Path(tpkernels.__file__).parent

MULTIPLY = """
import torch
import tpkernels as tpk
from tpkernels import _extensions
a, b = torch.randn(3, 4), torch.randn(4, 5)
torch.testing.assert_close(tpk.matmul(a, b), a @ b)
print(*_extensions.status().values(), sep="\\n")
print("end")
"""


def _package_without(folder: Path, *missing: str) -> Path:
    """A `sys.path` entry whose tpkernels has links to everything but the extensions named."""
    copy = folder / "tpkernels"
    copy.mkdir()
    for entry in PACKAGE.iterdir():
        if not (entry.suffix == ".so" and entry.name.split(".")[0] in missing):
            (copy / entry.name).symlink_to(entry)
    return folder


def _run(path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new process that imports tpkernels from `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=path, env=environment, capture_output=True, text=True, check=False
    )


def test_the_required_extension_is_loaded_here():
    assert _extensions.is_loaded("_C")
    assert _extensions.why_not("_C") == ""
    assert set(_extensions.status()) == {"_C", "_C_sm80", "_C_sm90a", "_C_nvshmem", "_host"}
    for status in _extensions.status().values():
        assert status.loaded or status.reason, f"{status.name} is not loaded and nobody says why"


def test_without_the_optional_extensions_everything_on_the_cpu_works(tmp_path):
    result = _run(_package_without(tmp_path, "_host", "_C_sm80"), MULTIPLY)
    assert result.returncode == 0, result.stderr
    assert "_host: not loaded, it was not built" in result.stdout
    assert "_C_sm80: not loaded, it was not built" in result.stdout
    assert result.stdout.endswith("end\n")


def test_asking_for_a_missing_host_module_says_why(tmp_path):
    code = "import tpkernels; from tpkernels import _extensions; _extensions.host()"
    result = _run(_package_without(tmp_path, "_host"), code)
    assert result.returncode == 1
    assert "ImportError: tpkernels._host is not available: it was not built" in result.stderr


def test_host_module_of_another_python_is_named(tmp_path):
    path = _package_without(tmp_path, "_host")
    (path / "tpkernels/_host.cpython-399-x86_64-linux-gnu.so").write_bytes(b"")
    result = _run(path, MULTIPLY)
    assert result.returncode == 0, result.stderr
    assert "_host.cpython-399-x86_64-linux-gnu.so was built for another Python" in result.stdout


def test_cuda_extension_that_does_not_load_is_reported_and_left(tmp_path):
    path = _package_without(tmp_path, "_C_sm80")
    (path / "tpkernels/_C_sm80.abi3.so").write_bytes(b"not a library")
    result = _run(path, MULTIPLY)
    assert result.returncode == 0, result.stderr
    line = next(x for x in result.stdout.splitlines() if x.startswith("_C_sm80"))
    assert "not loaded" in line
    assert "_C_sm80.abi3.so" in line or "CPU-only" in line


def test_cuda_extension_is_not_tried_under_a_cpu_only_torch(tmp_path):
    path = _package_without(tmp_path, "_C_sm80")
    (path / "tpkernels/_C_sm80.abi3.so").write_bytes(b"not a library")
    result = _run(path, "import torch\ntorch.version.cuda = None\n" + MULTIPLY)
    assert result.returncode == 0, result.stderr
    assert f"_C_sm80: not loaded, torch {torch.__version__} is a CPU-only build" in result.stdout


def test_hopper_kernels_that_do_not_load_are_reported_and_left(tmp_path):
    path = _package_without(tmp_path, "_C_sm90a")
    result = _run(path, MULTIPLY)
    assert result.returncode == 0, result.stderr
    assert "_C_sm90a: not loaded, it was not built" in result.stdout
    (path / "tpkernels/_C_sm90a.abi3.so").write_bytes(b"not a library")
    result = _run(path, MULTIPLY)
    assert result.returncode == 0, result.stderr
    line = next(x for x in result.stdout.splitlines() if x.startswith("_C_sm90a"))
    assert "not loaded" in line
    assert "_C_sm90a.abi3.so" in line or "CPU-only" in line


def test_hopper_kernels_are_attached_to_the_ops_that_call_them(monkeypatch):
    attached = []
    ops = types.SimpleNamespace(sm90a_entry=lambda: 4711, attach_sm90a=attached.append)
    monkeypatch.setattr(torch.ops, "tpkernels", ops)
    loaded = _extensions.ExtensionStatus("_C_sm90a", True, PACKAGE / "_C_sm90a.abi3.so")
    monkeypatch.setattr(_extensions, "_load_cuda", lambda name: loaded)
    monkeypatch.setitem(
        _extensions._statuses, "_C_sm80", _extensions.ExtensionStatus("_C_sm80", True, PACKAGE)
    )
    assert _extensions._load_hopper("_C_sm90a") == loaded
    assert attached == [4711]

    monkeypatch.setitem(
        _extensions._statuses, "_C_sm80", _extensions.ExtensionStatus("_C_sm80", False, None, "no nvcc")
    )
    status = _extensions._load_hopper("_C_sm90a")
    assert not status.loaded
    assert status.reason == "_C_sm80, which calls its kernels, is not loaded (no nvcc)"
    assert attached == [4711]

    monkeypatch.setitem(
        _extensions._statuses, "_C_sm80", _extensions.ExtensionStatus("_C_sm80", True, PACKAGE)
    )
    del ops.sm90a_entry
    status = _extensions._load_hopper("_C_sm90a")
    assert not status.loaded
    assert "sm90a_entry" in status.reason


def test_without_the_required_extension_the_build_command_is_named(tmp_path):
    result = _run(_package_without(tmp_path, "_C"), "import tpkernels")
    assert result.returncode == 1
    assert "ImportError: tpkernels is not built: there is no _C extension in" in result.stderr
    assert "pip install --no-build-isolation ." in result.stderr


def test_required_extension_that_does_not_load_is_an_import_error(tmp_path):
    path = _package_without(tmp_path, "_C")
    (path / "tpkernels/_C.abi3.so").write_bytes(b"not a library")
    result = _run(path, "import tpkernels")
    assert result.returncode == 1
    assert "ImportError: tpkernels cannot load" in result.stderr
    assert f"into torch {torch.__version__}" in result.stderr


@pytest.mark.parametrize("version", ["2.10.0", "1.13.1+cu117"])
def test_too_old_torch_is_refused_before_the_library_is_opened(tmp_path, version):
    path = _package_without(tmp_path, "_C")
    (path / "tpkernels/_C.abi3.so").write_bytes(b"not a library")
    result = _run(path, f"import torch\ntorch.__version__ = {version!r}\nimport tpkernels")
    assert result.returncode == 1
    assert f"ImportError: tpkernels needs torch 2.11 or newer, found {version}" in result.stderr
    assert 'pip install --upgrade "torch>=2.11"' in result.stderr


def test_import_starts_no_cuda():
    """A process that only imports may fork workers afterwards, and takes no memory of a GPU."""
    code = "import torch, tpkernels; print(torch.cuda.is_initialized())"
    result = _run(PACKAGE.parent, code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False"
