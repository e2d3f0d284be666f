"""``import horovod`` for unmodified scripts: a directory for PYTHONPATH, in which ``horovod`` re-exports Reigen.

`reigen run --as-horovod` prepends it for the ranks and what they start; ``python -m reigen.compat`` prints it, for
other ways to start. Nothing is installed under Horovod's name, so an installed Horovod stays as it is: it is only
hidden where this directory comes first. ``python -E`` and ``python -I`` ignore PYTHONPATH.

``kvstore`` is another one, for `reigen run --as-mxnet`: there ``import mxnet`` gives the installed MXNet, with Reigen's
stores in the place of its own. ``python -m reigen.compat mxnet`` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import pathsep
from pathlib import Path

#: Its content is importable as a top-level module: the package ``horovod``.
DIRECTORY = str(Path(__file__).parent)
#: And of this one: the module ``mxnet``.
MXNET_DIRECTORY = str(Path(__file__).parent / "kvstore")


def as_horovod(environ: Mapping[str, str]) -> dict[str, str]:
    """Put the directory first in PYTHONPATH."""
    return _with_first(DIRECTORY, environ)


def as_mxnet(environ: Mapping[str, str]) -> dict[str, str]:
    """Put the directory in which ``mxnet`` has Reigen's stores first in PYTHONPATH."""
    return _with_first(MXNET_DIRECTORY, environ)


def _with_first(directory: str, environ: Mapping[str, str]) -> dict[str, str]:
    rest = [entry for entry in environ.get("PYTHONPATH", "").split(pathsep) if entry and entry != directory]
    return {**environ, "PYTHONPATH": pathsep.join([directory, *rest])}
