"""Tools for testing tensor-parallel code: rank pools, comparison by tiles, poison, gradient checks across ranks."""

from tpkernels.testing._worker import RankContext
from tpkernels.testing.gradcheck import GradcheckError, gradcheck_ranks
from tpkernels.testing.poison import Canary, canary_copy, canary_view, check_canary, nan_like, poison_
from tpkernels.testing.rank_pool import RankDiedError, RankError, RankPool, RankTimeoutError
from tpkernels.testing.tiles import UNIT_ROUNDOFF, assert_close_tiles, tile_errors

__all__ = [
    "UNIT_ROUNDOFF",
    "Canary",
    "GradcheckError",
    "RankContext",
    "RankDiedError",
    "RankError",
    "RankPool",
    "RankTimeoutError",
    "assert_close_tiles",
    "canary_copy",
    "canary_view",
    "check_canary",
    "gradcheck_ranks",
    "nan_like",
    "poison_",
    "tile_errors",
]
