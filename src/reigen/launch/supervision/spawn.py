"""Starters of a job's processes, and of client processes of agents."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from reigen.errors import LaunchError
from reigen.launch.local_plan import ProcessSpec
from reigen.launch.supervision.process_tree import dies_with_parent
from reigen.resources.limits import explain_limit, find_limit


def spawn_process(
    command: Sequence[str], spec: ProcessSpec, descriptors: Sequence[int] = (), stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """Start one process: no shell, a session of its own, pipes for its output.

    Rank 0 reads ``stdin``, by default that of this process; the others read nothing. The process inherits
    ``descriptors`` under the same numbers, and nothing else that is open.
    To be called from the main thread: Python code runs between fork and exec. It takes no lock that another thread may
    hold, for a PS process may be started again when the launcher's service has its thread.

    Raises:
        LaunchError: the command does not exist (exit code 127) or cannot be executed (126).
    """
    try:
        return subprocess.Popen(
            command,
            stdin=stdin if spec.number == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=descriptors,
            env=spec.environ,
            start_new_session=True,
            preexec_fn=_prepare(spec.cpus),  # noqa: PLW1509  there is no other thread
        )
    except (OSError, ValueError) as error:
        raise _explain_spawn_error(command[0], spec, error) from None


#: How long the client of an engine may take to end, where it is given time, when its agent has been told to.
CLIENT_END_SECONDS = 3.0


class ClientProcess(subprocess.Popen[bytes]):
    """Client process of an engine, which is given some time to end by itself before it is killed.

    Attributes:
        end_seconds: of that, from the end of its stdin on; 0: it is killed at once.
    """

    end_seconds = 0.0


def spawn_client(command: Sequence[str], end_seconds: float = 0.0) -> subprocess.Popen[bytes]:
    """Start the client process of an engine, whose stdin and stdout are an agent's.

    It has a session of its own, for Ctrl-C at a terminal is the supervisor's to handle, and dies with this process.
    ``end_seconds``: how long it may take to end when its stdin is closed, before it is killed, for engines that take
    the death of a client for that of the job. Raises LaunchError.
    """
    try:
        process = ClientProcess(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
        process.end_seconds = end_seconds
        return process
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {explain_limit(error).strerror}") from None


def reserve_port(*, for_reigen: bool = False) -> socket.socket:
    """Bind a socket to a free port, which the kernel then gives to no process that asks for any port.

    It does not listen. It is bound to all addresses, for servers usually are, and another one's on one of them would be
    in the way. An option that both must have set decides who can listen there all the same:

    SO_REUSEADDR  Every process that asks for just this port, whatever the user. Servers of others set it: torch's
                  TCPStore and MXNet's own scheduler do, and nothing else.
    SO_REUSEPORT  Processes of this user alone, by the kernel's check: for servers that know that they must set it,
                  Reigen's (``for_reigen``) from PORT_IS_HELD_VARIABLE.
    """
    is_dual = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, socket.SOCK_STREAM)
    if is_dual:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if for_reigen else socket.SO_REUSEADDR, 1)
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


def _explain_spawn_error(name: str, spec: ProcessSpec, error: OSError | ValueError) -> LaunchError:
    if not isinstance(error, OSError):
        return LaunchError(f"cannot start {name!r}: {error}")
    if find_limit(error):  # before anything is imported: it may be that of open files
        return LaunchError(f"cannot start {spec.name}: {explain_limit(error).strerror}")
    from shutil import which  # loads every compression library: only for an error

    found = which(name, path=spec.environ.get("PATH"))
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if found is None:
            script = f"; to run the script: python {name}" if name.endswith(".py") and Path(name).is_file() else ""
            return LaunchError(f"no such command: {name}{script}", 127)
        return LaunchError(f"cannot execute {found}: the interpreter in its first line does not exist", 126)
    if isinstance(error, PermissionError) or error.errno == errno.ENOEXEC:
        reason = "it is not a program" if error.errno == errno.ENOEXEC else "permission denied"
        return LaunchError(f"cannot execute {name}: {reason}", 126)
    return LaunchError(f"cannot start {spec.name}: {error.strerror}")
