"""``PYTHONPATH=$(python -m reigen.compat) mpirun ...``: prints the directory that makes ``import horovod`` work.

``python -m reigen.compat mxnet`` prints the one that gives MXNet Reigen's stores. ``python -m reigen.compat install``
gives Horovod's names to all processes of this Python environment, ``uninstall`` takes them back.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reigen.compat import DIRECTORY, MXNET_DIRECTORY
from reigen.compat.installation import install, uninstall
from reigen.errors import ConfigError

_ACTIONS: dict[str, Callable[[], Sequence[str | Path]]] = {
    "horovod": lambda: [DIRECTORY],
    "mxnet": lambda: [MXNET_DIRECTORY],
    "install": install,
    "uninstall": uninstall,
}

action = _ACTIONS.get(" ".join(sys.argv[1:]) or "horovod")
if action is None:
    sys.exit("usage: python -m reigen.compat [horovod | mxnet | install | uninstall]")
try:
    sys.stdout.writelines(f"{line}\n" for line in action())
except ConfigError as error:
    sys.exit(f"reigen.compat: {error}")
