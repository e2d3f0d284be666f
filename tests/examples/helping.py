"""Prints what example scripts print with --help, as JSON: they run one after the other, each as the main program.

A framework is imported once for all of them, which takes longer than everything else.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


def help_of(script: Path) -> str:
    """What it prints; "needs NAME" where a library is not installed here."""
    printed, before = io.StringIO(), set(sys.modules)
    sys.argv, sys.path[0] = [str(script), "--help"], str(script.parent)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        return f"needs {error.name}"
    except SystemExit as ended:
        return printed.getvalue() if not ended.code else f"exit code {ended.code}"
    finally:
        for name in set(sys.modules) - before:  # modules beside the script: others' have the same names
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == script.parent:
                del sys.modules[name]
    return "it went on"


if __name__ == "__main__":
    print(json.dumps({script: help_of(Path(script)) for script in sys.argv[1:]}))
