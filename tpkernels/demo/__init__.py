"""The demo: a byte-level language model trained with tensor parallelism beside its unsharded twin.

``python -m tpkernels.demo --help`` lists the options. The modules, in the order in which a run passes them:

- ``cli``, ``config``: options, sizes, tolerances; ``errors``: what a user can get wrong, as sentences.
- ``launch``: starts one process per rank when torchrun has not.
- ``data``: the text (the standard library of the running Python) and its batches.
- ``model``: the tensor-parallel model; ``dense``: its plain PyTorch twin, which needs torch and nothing else.
- ``optim``, ``verify``, ``train``: AdamW, the comparisons with the twin, the loop.
- ``paths``, ``ui``, ``plot``, ``output``: what the run shows and what it leaves behind.
"""
