"""Command lines that run a module of this package in a new interpreter with this one's search path."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from reigen.errors import LaunchError

# The interpreter begins in safe-path mode, in which a json.py in the working directory is not imported. After
# that its search path is the caller's, so that functions of the caller's modules, and Reigen itself, are found.
_SAME_INTERPRETER = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
# Another interpreter has its own libraries; only what lies outside of this one's is added behind them.
_OTHER_INTERPRETER = "import sys, json; sys.path += [p for p in json.loads(sys.argv[1]) if p not in sys.path]; "
_CALL_MAIN = (
    "from importlib import import_module; main = import_module(sys.argv[2]).main; arguments = sys.argv[3:]; "
    "sys.argv[1:] = []; sys.exit(main(arguments))"
)


def module_command(module: str, arguments: Sequence[str], executable: str | None = None) -> tuple[str, ...]:
    """Return a command line that exits with the result of a module's ``main(arguments)``.

    All users of the host can read the arguments. ``executable`` is another Python than this process's, with Reigen.

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
    """Return the entries of the search path that do not belong to this interpreter's installation."""
    installation = tuple({sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix})
    return [entry for entry in _path() if not entry.startswith(installation)]
