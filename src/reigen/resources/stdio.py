"""Descriptors 0, 1 and 2 of a process that was started without some of them (``>&-``, daemons, ``pythonw``).

Files that such a process opens would get their numbers: any output would be written to a connection or shared memory
with descriptor 1, and a child's stdin, stdout and stderr would take its place.
"""

from __future__ import annotations

import fcntl
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def occupy_standard_descriptors() -> None:
    """Open /dev/null where one of them is closed; children inherit it, as they do with the others."""
    for fd in range(3):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, unless another thread was faster
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)


def open_standard_streams() -> None:
    """Open descriptors and Python's streams, which are None otherwise. For programs of ours, first thing."""
    occupy_standard_descriptors()
    for fd, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            stream = os.fdopen(fd, mode, encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
