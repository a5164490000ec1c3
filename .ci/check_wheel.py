"""Checks the size and the contents of a wheel against the source tree, after `make build`.

python .ci/check_wheel.py dist/tpkernels-*.whl
"""

import sys
import zipfile
from pathlib import Path

LIMIT = 50 * 1000 * 1000  # bytes; package indexes refuse much larger files
FOREIGN = ("tests/", "bench/", "csrc/", "cmake/", "build/", "docs/", ".ci/")


def problems(size: int, names: list[str], expected: list[str], source: list[str]) -> list[str]:
    """What is wrong with a wheel of `size` bytes with these files, one sentence each.

    It must have the `expected` files, and of the package only what `source`, the folder it was built from, has.
    """
    found = [f"the wheel has {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}"] if size > LIMIT else []
    found += [f"{n} does not belong into the wheel" for n in names if n.startswith(FOREIGN)]
    found += [
        f"{n} does not belong into the wheel"
        for n in names
        if n.endswith((".pyc", ".cpp", ".o")) or (n.endswith(".cu") and n not in expected)
    ]
    found += [
        f"{n} is not in the source: rm -rf build/lib*"
        for n in names
        if n.startswith("tpkernels/") and not n.endswith("/") and n not in source
    ]
    found += [f"the wheel lacks {e}" for e in expected if e not in names]
    if not any(n.endswith("licenses/LICENSE") for n in names):
        found.append("the wheel lacks the LICENSE")
    hopper = any(n.startswith("tpkernels/_C_sm90a.") for n in names)  # has code of CUTLASS's headers
    if hopper and not any(n.endswith("/LICENSE-CUTLASS.txt") for n in names):
        found.append("the wheel lacks the license of CUTLASS")
    return found


def main() -> int:
    """Prints the size, the libraries and the problems; returns 1 if there are any."""
    path = Path(sys.argv[1])
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        sizes = {i.filename: i.file_size for i in archive.infolist()}
    built = [p.as_posix() for p in Path("tpkernels").glob("*.so")]
    modules = [p.as_posix() for p in Path("tpkernels").rglob("*.py*") if p.suffix in (".py", ".pyi")]
    # What setup.py installs under another name.
    kinds = (".py", ".j2", ".cu", ".cuh")
    modules += [f"tpkernels/{p.as_posix()}" for p in Path("bench").rglob("*") if p.suffix in kinds]
    modules += [f"tpkernels/include/comm/{p.name}" for p in Path("csrc/comm").glob("*.cuh")]
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {len(names)} files")
    for name in names:
        if name.endswith(".so"):
            print(f"  {name}: {sizes[name] / 1e6:.2f} MB unpacked")
    source = [*(p.as_posix() for p in Path("tpkernels").rglob("*") if p.is_file()), *modules]
    expected = [*built, *modules, "tpkernels/py.typed", "tpkernels/_build_info.json"]
    found = problems(path.stat().st_size, names, expected, source)
    for sentence in found:
        print("problem:", sentence)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
