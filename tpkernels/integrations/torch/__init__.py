"""Drop-in for ``torch.distributed.tensor.parallel``: plans keep their form, products run on our operations.

>>> from torch.distributed.tensor.parallel import parallelize_module, PrepareModuleInput
>>> from tpkernels.integrations.torch import Colwise, Rowwise, SequenceParallel
>>> parallelize_module(model, mesh["tp"], {"w1": Colwise(), "w2": Rowwise()})  # doctest: +SKIP

Styles mix with torch's own in one plan. What runs where is in :mod:`tpkernels.integrations.torch._linear`.
"""

from tpkernels.integrations.async_tp import AsyncTP, enable_async_tp
from tpkernels.integrations.torch._gather_once import GatherOnce
from tpkernels.integrations.torch._styles import Colwise, Rowwise, SequenceParallel

__all__ = ["AsyncTP", "Colwise", "GatherOnce", "Rowwise", "SequenceParallel", "enable_async_tp"]
