"""The benchmark suite: ``python -m bench <suite>`` in a checkout, ``tpk-bench <suite>`` after installation.

It is installed as ``tpkernels.bench``, so modules here import each other relatively. ``bench/README.md`` tells how
to use it.
"""
