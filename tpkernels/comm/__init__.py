"""Path "fused": products whose operands or results travel while they are computed.

:mod:`~tpkernels.comm.conditions` says where it can run, :mod:`~tpkernels.comm.ranks` makes all ranks agree on that,
:mod:`~tpkernels.comm.workspace` keeps the memory that ranks share, :mod:`~tpkernels.comm.fused` makes the calls. What
they need of CUDA is in :mod:`~tpkernels.comm.runtime`. The words and buffers: csrc/host/protocol.hpp.

When path "auto" takes it: :mod:`~tpkernels.comm.choice` predicts times by the constants in
:mod:`~tpkernels.comm.machines`, :mod:`~tpkernels.comm.auto` makes all ranks take the same.
"""
