"""Command lines that run a module of this package in a new interpreter, which finds what this one finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from reigen.errors import LaunchError

# The interpreter begins in safe-path mode: a file named json.py in the working directory is nobody's joke then. After
# that its search path is the caller's, so that functions of the caller's modules, and Reigen itself, are found.
_SAME_INTERPRETER = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
# Another interpreter has its own libraries; only what lies outside of this one's is added behind them.
_OTHER_INTERPRETER = "import sys, json; sys.path += [p for p in json.loads(sys.argv[1]) if p not in sys.path]; "
_CALL_MAIN = (
    "from importlib import import_module; main = import_module(sys.argv[2]).main; arguments = sys.argv[3:]; "
    "sys.argv[1:] = []; sys.exit(main(arguments))"
)


def module_command(module: str, arguments: Sequence[str], executable: str | None = None) -> tuple[str, ...]:
    """The command line that calls ``main(arguments)`` of a module and exits with what it returns.

    Args:
        module: its name.
        arguments: for its ``main``; everybody on the machine can read them.
        executable: another Python than this process's, in which Reigen is installed; or None.

    Raises:
        LaunchError: this process does not know its own interpreter (it is embedded in another program).
    """
    if executable is None:
        if not sys.executable:
            raise LaunchError("this process does not know which Python it runs in: give run() an executable")
        return sys.executable, "-P", "-c", _SAME_INTERPRETER + _CALL_MAIN, json.dumps(_path()), module, *arguments
    return executable, "-P", "-c", _OTHER_INTERPRETER + _CALL_MAIN, json.dumps(_outside()), module, *arguments


def _path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]  # the import system ignores what is no text


def _outside() -> list[str]:
    """The entries of the search path that do not belong to this interpreter's installation."""
    ours = tuple({sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix})
    return [entry for entry in _path() if not entry.startswith(ours)]
