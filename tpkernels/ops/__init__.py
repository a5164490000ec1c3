"""Operations: :mod:`tpkernels.ops.api` has the public ones."""
