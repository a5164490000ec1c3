"""Shared fixtures and markers: GPU tests that say why they skip, rank pools, and seeds that can be repeated."""

from __future__ import annotations

import os
import secrets
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np

    from tpkernels.testing import RankPool

# Ranks are checked for agreement in every test; the pools' processes inherit this.
os.environ.setdefault("TPK_CHECK", "1")
# torch keeps compiled graphs on disk and does not see that a gradient's formula has changed since.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

RANKS = 4


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu1: needs one CUDA GPU; skipped with a reason where there is none")
    config.addinivalue_line(
        "markers", "gpun(count=2): needs `count` CUDA GPUs on one host, skipped with a reason otherwise"
    )
    # In the environment, so that child processes (pytest-xdist) share it.
    os.environ.setdefault("TPK_TEST_SEED", str(secrets.randbits(31)))
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("tpkernels", deadline=None)  # A busy machine is no reason to fail.
    settings.load_profile("tpkernels")


def _session_seed() -> int:
    return int(os.environ["TPK_TEST_SEED"])


def _cuda_count() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def _gpus(count: int) -> str:
    return f"{count} CUDA GPU{'' if count == 1 else 's'}"


def _needed_gpus(item: pytest.Item) -> int:
    gpun = item.get_closest_marker("gpun")
    if gpun is not None:
        return int(gpun.args[0] if gpun.args else gpun.kwargs.get("count", 2))
    return 1 if item.get_closest_marker("gpu1") is not None else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {item: _needed_gpus(item) for item in items}
    if not any(needs.values()):
        return
    found = _cuda_count()
    for item, needed in needs.items():
        if needed > found:
            item.add_marker(pytest.mark.skip(reason=f"needs {_gpus(needed)}, found {found}"))


def pytest_report_header() -> str:
    seed = _session_seed()
    return f"tpkernels: random seed {seed} (TPK_TEST_SEED={seed} repeats this run), TPK_CHECK={os.environ['TPK_CHECK']}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    total = sum(reasons.values())
    terminalreporter.section("skipped tests by reason")
    terminalreporter.line(f"{total} skipped" if total else "none skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6d}  {reason}")
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.line(f"To repeat these random inputs: TPK_TEST_SEED={_session_seed()}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's seed: from the session's seed and the test's id, so it does not depend on which tests run."""
    return (_session_seed() + zlib.crc32(request.node.nodeid.encode())) % 2**31


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A NumPy generator with this test's seed."""
    import numpy as np

    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Pool of 4 gloo processes; ``ranks.run(fn, *args, world=W)``. They start at the first run."""
    from tpkernels.testing import RankPool

    with RankPool(RANKS, "gloo", seed=_session_seed()) as pool:
        yield pool


@pytest.fixture(scope="module")
def many_ranks() -> Iterator[RankPool]:
    """Pool of 16 gloo processes, for grids of ranks."""
    from tpkernels.testing import RankPool

    with RankPool(16, "gloo", timeout=120.0, seed=_session_seed(), start_method="forkserver") as pool:
        yield pool


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """Pool of nccl processes, one for each GPU. For tests marked gpun."""
    from tpkernels.testing import RankPool

    found = _cuda_count()
    if found < 1:
        pytest.skip(f"needs {_gpus(1)}, found {found}")
    with RankPool(found, "nccl", timeout=120.0, seed=_session_seed()) as pool:
        yield pool
