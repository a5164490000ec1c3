"""Checks the ABI of the built libraries: which torch they need, what else they need and where they look for it.

    python .ci/check_libraries.py tpkernels/_C*.so

They must use libtorch's stable ABI of 2.11 or older, and need neither Python nor the CUDA driver nor NCCL, so that
one file loads everywhere (the driver and NCCL are those of the process), and carry no path of the build machine. Only
_C_nvshmem needs NVSHMEM.
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_TORCH = (2, 11)
FORBIDDEN = re.compile(r"lib(python|torch_python|cuda\.so|nccl|nvshmem|cublas)")
ALLOWED = {"_C_nvshmem": re.compile(r"libnvshmem_host\.so\.\d+$")}  # what an extension exists for


def link_problems(name: str, dynamic: str) -> list[str]:
    """What is wrong in the output of `readelf -d`, one sentence each."""
    allowed = ALLOWED.get(Path(name).name.partition(".")[0], re.compile("(?!)"))
    found = [
        f"{name} needs {library}"
        for library in needed(dynamic)
        if FORBIDDEN.match(library) and not allowed.match(library)
    ]
    for paths in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", dynamic):
        found += [
            f"{name} looks for libraries in {p}" for p in paths.split(":") if not p.startswith("$ORIGIN")
        ]
    return found


def needed(dynamic: str) -> list[str]:
    """The libraries that the output of `readelf -d` names as needed."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def abi_problems(name: str, report: str) -> list[str]:
    """What is wrong in the report of torch-abi-audit, one sentence each."""
    found = (
        []
        if re.search(r"Torch ABI:\s+STABLE", report)
        else [f"{name} uses more of torch than its stable ABI"]
    )
    least = re.search(r"Min torch:\s+(\d+)\.(\d+)", report)
    if least is None:
        found.append(f"{name}: the audit names no least version of torch")
    elif (int(least[1]), int(least[2])) > MAX_TORCH:
        found.append(f"{name} needs torch {least[1]}.{least[2]}, newer than {MAX_TORCH[0]}.{MAX_TORCH[1]}")
    return found


def main() -> int:
    """Prints what each library needs and the problems; returns 1 if there are any."""
    found = []
    audit = Path(sys.executable).parent / "torch-abi-audit"
    for name in sys.argv[1:]:
        dynamic = subprocess.run(["readelf", "-d", name], capture_output=True, text=True, check=True).stdout
        result = subprocess.run([audit, "--check", "both", name], capture_output=True, text=True, check=False)
        print(result.stdout + result.stderr, f"{name} needs {', '.join(needed(dynamic))}", sep="")
        found += link_problems(name, dynamic) + abi_problems(name, result.stdout)
        if result.returncode != 0:
            found.append(f"torch-abi-audit refuses {name} (status {result.returncode})")
    for sentence in found:
        print("problem:", sentence)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
