"""Horovod's names for all processes of one Python environment: ``import horovod``, and ``horovodrun`` in its bin."""

from __future__ import annotations

import shlex
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

from reigen.compat import DIRECTORY
from reigen.errors import ConfigError
from reigen.files import write_atomically

_MARK = "Written by `python -m reigen.compat install`."
#: A shell, and not the first line, finds the interpreter: that may be long, and have blanks in its path.
_SCRIPT = f"""#!/bin/sh
'''exec' {shlex.quote(sys.executable)} "$0" "$@"
' '''
# {_MARK}
import sys

from reigen.cli.main import main

sys.exit(main(["run", "--as-horovod", *sys.argv[1:]]))
"""


def install() -> list[Path]:
    """Write a ``.pth`` file, which no PYTHONPATH overrides, and ``horovodrun``, or replace both; returns their paths.

    Raises:
        ConfigError: Horovod is installed here, or its ``horovodrun``; or the files cannot be written.
    """
    path_file, script = _files()
    found = PathFinder.find_spec("horovod", [str(path_file.parent)])
    if found is not None:
        raise ConfigError(f"Horovod is installed here ({found.origin}): uninstall it first")
    if script.exists() and _MARK not in script.read_text(errors="replace"):
        raise ConfigError(f"{script} is another one: remove it first")
    try:
        write_atomically(script, [_SCRIPT.encode()], mode=0o777)
        write_atomically(path_file, [f"{DIRECTORY}\n".encode()])  # last: with it every process finds `horovod`
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return [path_file, script]


def uninstall() -> list[Path]:
    """Remove the files of `install`; returns those that existed, or raises ConfigError."""
    path_file, script = _files()
    files = [path_file] if path_file.exists() else []
    files += [script] if script.exists() and _MARK in script.read_text(errors="replace") else []
    for path in files:
        try:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"cannot remove {path}: {error.strerror}") from None
    return files


def _files() -> tuple[Path, Path]:
    return Path(sysconfig.get_path("purelib"), "reigen-horovod.pth"), Path(sysconfig.get_path("scripts"), "horovodrun")
