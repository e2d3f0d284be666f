"""Starting a process of a job."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress

from reigen.errors import LaunchError
from reigen.launch.local import Place
from reigen.launch.processes import dies_with_parent


def spawn(
    command: Sequence[str], place: Place, descriptors: Sequence[int] = (), stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """Start one process: no shell, a session of its own, pipes for its output.

    Rank 0 reads ``stdin``, by default that of this process; the others read nothing.

    It inherits ``descriptors`` under the numbers that they have here, and nothing else that is open.
    To be called from the main thread: Python code runs between fork and exec. It takes no lock that another thread may
    hold, for a servant may be started again when the launcher's service has its thread.

    Raises:
        LaunchError: the command does not exist (exit code 127) or cannot be executed (126).
    """
    try:
        return subprocess.Popen(
            command,
            stdin=stdin if place.number == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=descriptors,
            env=place.environ,
            start_new_session=True,
            preexec_fn=_prepare(place.cpus),  # noqa: PLW1509  there is no other thread
        )
    except (OSError, ValueError) as error:
        raise _explained(command[0], place, error) from None


def hold_port() -> socket.socket:
    """A socket that is bound to a free port and keeps everybody else from being given it.

    It does not listen, and it allows the address to be used again: rank 0's own server can bind the port and listen. It
    is bound to all addresses, for such servers usually are, and a stranger's server on one of them would be in the way.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def _prepare(cpus: Sequence[int]) -> Callable[[], None]:
    die_with_parent = dies_with_parent()

    def in_child() -> None:
        die_with_parent()
        if cpus:
            with suppress(OSError):  # a processor was taken away meanwhile: run where the kernel wants
                os.sched_setaffinity(0, cpus)

    return in_child


def _explained(name: str, place: Place, error: OSError | ValueError) -> LaunchError:
    if not isinstance(error, OSError):
        return LaunchError(f"cannot start {name!r}: {error}")
    from shutil import which  # loads every compression library: only for an error

    found = which(name, path=place.environ.get("PATH"))
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if found is None:
            return LaunchError(f"no such command: {name}", 127)
        return LaunchError(f"cannot execute {found}: the interpreter in its first line does not exist", 126)
    if isinstance(error, PermissionError) or error.errno == errno.ENOEXEC:
        reason = "it is not a program" if error.errno == errno.ENOEXEC else "permission denied"
        return LaunchError(f"cannot execute {name}: {reason}", 126)
    return LaunchError(f"cannot start {place.name}: {error.strerror}")
