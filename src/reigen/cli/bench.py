"""`reigen bench`: the benchmarks of a checkout (``benchmarks/``), which are not part of the installed package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import reigen

_ROOT = Path(reigen.__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Run ``python -m benchmarks`` of the checkout that this package lies in; returns 2 where there is none."""
    is_checkout = (_ROOT / "src" / "reigen" / "cli" / "bench.py").is_file()  # and not just any directory above this one
    if not (is_checkout and (_ROOT / "benchmarks" / "__main__.py").is_file()):
        print(
            "reigen bench: the benchmarks come with a checkout of the repository, not with the installed package. "
            "Clone it, install it from there (`pip install -e '.[torch,bench]'`), and repeat.",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(_ROOT))  # for `python -m reigen`, which may have been called from anywhere
    exit_code: int = importlib.import_module("benchmarks.__main__").main(arguments)
    return exit_code
