"""``python -m tpkernels`` and the command ``tpk``: see :mod:`tpkernels.tune.cli`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line."""
    from tpkernels.tune import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
