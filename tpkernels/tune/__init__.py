"""Autotuning: plans of products that were timed, once, and are remembered on disk. See docs/tuning.md.

With ``TPK_AUTOTUNE=1`` (or inside :func:`autotune`) path "auto" takes what was fastest: the library's product, or the
Stream-K kernel with a certain tile, schedule and split. ``TPK_AUTOTUNE=read`` takes what is known and times nothing.
Without it nothing here runs.

- :mod:`.mode`: whether to tune. :mod:`.case`: what one product is, :mod:`.machine`: what it runs on.
- :mod:`.candidates`, :mod:`.timer`: what is tried, and how it is timed.
- :mod:`.store`: the file, its locks. :mod:`.local`: the local product. :mod:`.fused`: path "fused".
- :mod:`.fitting`, :mod:`.constants`: the cost model's constants, fitted to measured times, and taken from then on.
- :mod:`.cli`: ``tpk tune``, ``tpk calibrate``, ``tpk cache``.
"""

from __future__ import annotations

from tpkernels.tune.mode import active, autotune

__all__ = ["active", "autotune"]
