"""Which environment variables go from the launcher's host to the others. Decides, no I/O.

All of them do, as with horovodrun, but those that speak of the host, of the login or of the terminal there. PATH is the
launcher's, with what the host itself has behind it: the same ``python`` is found, where it is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from reigen.errors import ConfigError

#: Where this Reigen is installed.
PACKAGE_DIRECTORY = str(Path(__file__).resolve().parents[1])

#: Variables that stay at home unless `-x` names them.
_HOST_VARIABLES = re.compile(
    r"HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|_|HOSTNAME|HOST|HOSTTYPE|DISPLAY|XAUTHORITY|TTY|TMPDIR"
    r"|SSH_.*|XDG_.*|DBUS_.*|BASH_FUNC_.*|.*CUDA_VISIBLE_DEVICES|LS_COLORS"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_exports(environ: Mapping[str, str], wishes: Sequence[str]) -> dict[str, str]:
    """What `-x NAME` and `-x NAME=value` ask for, which every rank gets, on every host.

    Raises:
        ConfigError: a wish has another form, or names a variable that is not set.
    """
    found = {}
    for wish in wishes:
        name, is_given, value = wish.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"-x {wish}: it is neither NAME nor NAME=value")
        if not is_given and name not in environ:
            raise ConfigError(f"-x {wish}: there is no such variable in the environment")
        found[name] = value if is_given else environ[name]
    return found


def select_exported(environ: Mapping[str, str], exports: Collection[str]) -> dict[str, str]:
    """What goes to the other hosts of ``environ``; ``exports`` do in any case."""
    return {name: text for name, text in environ.items() if name in exports or not _HOST_VARIABLES.fullmatch(name)}


def merge_remote_environ(there: Mapping[str, str], travelled: Mapping[str, str], package: str = "") -> dict[str, str]:
    """The environment of the ranks on a host.

    Args:
        there: the host's own.
        travelled: what came from the launcher's host.
        package: where Reigen is installed on the launcher's host: what PYTHONPATH says of it is true of the one here.
    """
    both = {**there, **travelled}
    if paths := _entries(travelled, "PATH") + _entries(there, "PATH"):
        both["PATH"] = os.pathsep.join(dict.fromkeys(paths))
    if package and (modules := _entries(travelled, "PYTHONPATH")):
        both["PYTHONPATH"] = os.pathsep.join(_relocate_entry(entry, package) for entry in modules)
    return both


def _entries(environ: Mapping[str, str], name: str) -> list[str]:
    return [entry for entry in environ.get(name, "").split(os.pathsep) if entry]


def _relocate_entry(entry: str, package: str) -> str:
    """A directory of Reigen's, where it is here."""
    return (
        PACKAGE_DIRECTORY + entry.removeprefix(package)
        if entry == package or entry.startswith(package + os.sep)
        else entry
    )
