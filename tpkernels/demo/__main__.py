"""Entry point: ``python -m tpkernels.demo``, by itself or under torchrun."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from . import cli, data
from .errors import EXIT_ERROR, DemoError
from .launch import CRASH_EXIT, launch, under_torchrun


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit code: 0, or 1 after a printed sentence."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    is_rank = under_torchrun()
    try:
        config = cli.resolve(cli.parse(arguments))
        if not is_rank or os.environ["RANK"] == "0":
            cli.check_output(config.out)
        if not is_rank:
            data.load_corpus()  # says here, once, if there is no text
            os.environ.setdefault("TPK_CHECK", "1")
            return launch(arguments, config.tp)
    except DemoError as e:
        if os.environ.get("RANK", "0") == "0" or not is_rank:
            print(f"error: {e}", file=sys.stderr)
        return EXIT_ERROR
    from .rank import run_rank

    os.environ.setdefault("TPK_CHECK", "1")
    # Ranks share a terminal: one warning from each of them says nothing more than none.
    warnings.filterwarnings("ignore", module=r"torch\..*")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # --compile without CUDA
    code = CRASH_EXIT
    try:
        run_rank(config)
        return 0
    except DemoError as e:
        code = EXIT_ERROR
        if os.environ["RANK"] == "0":
            print(f"error: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: tearing down a group whose other ranks wait in a collective can hang.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
