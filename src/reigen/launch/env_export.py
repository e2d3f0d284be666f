"""Environment variables that go from the launcher's host to the others. Decides, no I/O.

All of them do, as with horovodrun, but those that speak of the host, of the login or of the terminal there. PATH is the
launcher's, with what the host itself has behind it: the same ``python`` is found, where it is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from reigen.errors import ConfigError

#: Directory where this Reigen is installed.
PACKAGE_DIRECTORY = str(Path(__file__).resolve().parents[1])

#: Variables that stay at home unless `-x` names them.
_HOST_VARIABLES = re.compile(
    r"HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|_|HOSTNAME|HOST|HOSTTYPE|DISPLAY|XAUTHORITY|TTY|TMPDIR"
    r"|SSH_.*|XDG_.*|DBUS_.*|BASH_FUNC_.*|LS_COLORS|KRB5CCNAME"
    r"|.*CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_exports(environ: Mapping[str, str], specs: Sequence[str]) -> dict[str, str]:
    """Return the variables of `-x NAME` and `-x NAME=value`, which every rank gets, on every host.

    Raises:
        ConfigError: an option has another form, or names a variable that is not set.
    """
    found = {}
    for spec in specs:
        name, has_value, value = spec.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"-x {spec}: it is neither NAME nor NAME=value")
        if not has_value and name not in environ:
            raise ConfigError(f"-x {spec}: there is no such variable in the environment")
        found[name] = value if has_value else environ[name]
    return found


def select_exported(environ: Mapping[str, str], exports: Collection[str]) -> dict[str, str]:
    """Select the variables of ``environ`` for other hosts; ``exports`` are always among them."""
    return {name: text for name, text in environ.items() if name in exports or not _HOST_VARIABLES.fullmatch(name)}


def merge_remote_environ(
    remote: Mapping[str, str], exported: Mapping[str, str], package: str = "", kept: tuple[str, ...] = ()
) -> dict[str, str]:
    """Merge a host's own variables with the exported ones.

    Args:
        remote: the host's own.
        exported: from the launcher's host; they win, but for
        package: where Reigen is on the launcher's host.
        kept: beginnings of names of which the host's own win.
    """
    both = {**remote, **exported, **{name: text for name, text in remote.items() if name.startswith(kept)}}
    if paths := _entries(exported, "PATH") + _entries(remote, "PATH"):
        both["PATH"] = os.pathsep.join(dict.fromkeys(paths))
    is_kept = "PYTHONPATH" in remote and "PYTHONPATH".startswith(kept)
    if package and not is_kept and (modules := _entries(exported, "PYTHONPATH")):
        both["PYTHONPATH"] = os.pathsep.join(_relocate_entry(entry, package) for entry in modules)
    return both


def _entries(environ: Mapping[str, str], name: str) -> list[str]:
    return [entry for entry in environ.get(name, "").split(os.pathsep) if entry]


def _relocate_entry(entry: str, package: str) -> str:
    """Translate an entry in the launcher's installation of Reigen to this host's."""
    is_inside = entry == package or entry.startswith(package + os.sep)
    return PACKAGE_DIRECTORY + entry.removeprefix(package) if is_inside else entry
