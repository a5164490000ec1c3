"""Transformer layers and a language model, the same in every implementation that layer and train compare.

    shapes      sizes, floating-point operations, memory; no torch
    variants    the implementations by name
    weights     which part of which dense tensor a parameter holds; starting values by name
    dense       plain modules of torch: for ``parallelize_module``, and for the twin
    ours        tpkernels.nn
    manual      by hand on the collectives of torch.distributed and F.linear, in Megatron's way
    torch_tp    parallelize_module: eager, compiled, compiled with async tensor parallelism
    reference   a layer in float64, a piece at a time
    twin        the unsharded language model in float32, trained for a few steps
    judge       errors and what is allowed
    peaks       matrix peaks of GPUs by their data sheets

Activations are [sequence, batch, hidden] everywhere, cut along the sequence between the layers: gathering
dimension 0 moves no data about, which suits every implementation best.
"""
