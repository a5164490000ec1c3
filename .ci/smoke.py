"""A short test of an installed or built package under the torch that is imported here: every extension in it loads.

python .ci/smoke.py FOLDER [TORCH]    FOLDER must be where tpkernels is imported from, TORCH the torch that runs
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import tpkernels as tpk
from tpkernels import _extensions


def unloaded(folder: Path, statuses: Mapping[str, _extensions.ExtensionStatus], cuda: bool) -> list[str]:
    """The extensions in `folder` that should be loaded and are not: with a CPU-only torch those for GPUs may not."""
    built = sorted(path.name.split(".")[0] for path in folder.glob("*.so"))
    loaded = {name for name, status in statuses.items() if status.loaded}
    return [
        name
        for name in built
        if name not in loaded and (cuda or not name.startswith(("_C_sm", "_C_nvshmem")))
    ]


def main() -> None:
    """Multiplies on both CPU paths, forward and backward, and prints what was loaded."""
    folder = Path(sys.argv[1]).resolve()
    where = Path(tpk.__file__).resolve()
    assert folder in where.parents, f"tpkernels was imported from {where}, expected {folder}"
    if len(sys.argv) > 2:
        assert torch.__version__ == sys.argv[2], f"torch is {torch.__version__}, expected {sys.argv[2]}"
    print(f"torch {torch.__version__}, tpkernels {tpk.__version__} from {where.parent}")
    print(*_extensions.status().values(), sep="\n")
    missing = unloaded(where.parent, _extensions.status(), torch.version.cuda is not None)
    assert not missing, f"{', '.join(missing)}: in {where.parent}, but not loaded"

    torch.manual_seed(0)
    weight = torch.randn(37, 53, dtype=torch.float64)
    for path in ("blas", "streamk"):
        a = torch.randn(5, 41, 53, dtype=torch.float64, requires_grad=True)
        b = weight.clone().requires_grad_()
        out = tpk.matmul(a, b.t(), bias=torch.ones(37, dtype=torch.float64), activation="gelu", path=path)
        out.sum().backward()
        a2, b2 = a.detach().clone().requires_grad_(), weight.clone().requires_grad_()
        expected = torch.nn.functional.gelu(a2 @ b2.t() + 1)
        expected.sum().backward()
        for got, want in ((out, expected), (a.grad, a2.grad), (b.grad, b2.grad)):
            torch.testing.assert_close(got, want)
        print(f"matmul, path {path}: right, forward and backward ({tpk.last_path()})")


if __name__ == "__main__":
    main()
