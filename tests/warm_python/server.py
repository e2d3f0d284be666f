"""Imports modules once, and forks a process whenever a client asks: `server.py LISTENER SESSION MODULE...`.

The process that is started ends at once; its child is the server, and ends with the session, a process (pidfd).

a. A client (`client.py`) connects, and sends what its process is to have: arguments, environment, descriptors.
b. The server forks a guardian, which forks the process, and tells the client its number.
c. The process becomes what the client would have been: the script is its `__main__`, its exit is Python's own.
d. The guardian waits for it and sends its exit code. If the client is gone before, it kills the process's session.

It forks before any thread is there, and says which there are if an import has started one.
"""

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

MOST_DESCRIPTORS = 64


def import_all(names: list[str]) -> None:
    """Import what is installed."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    threads = {(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()}
    own = Path("/proc/self/comm").read_text().strip()
    if others := threads - {own, "jemalloc_bg_thd"}:  # jemalloc, which pyarrow brings, knows of forks
        raise SystemExit(f"cannot fork, for an imported module has started threads: {sorted(others)}")


def serve(listener: socket.socket, session: int) -> dict[str, Any]:
    """Return, in each forked process, what its client has sent; the server itself does not return."""
    while True:
        ready, _, _ = select.select([listener, session], [], [])
        with contextlib.suppress(ChildProcessError):  # there is no guardian
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if session in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(session)
            return guard(client)
        client.close()


def guard(client: socket.socket) -> dict[str, Any]:
    """Return in the process; end in its guardian."""
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
    head, ancillary, _, _ = client.recvmsg(4, space)
    numbers = array.array("i")
    for _, _, data in ancillary:
        numbers.frombytes(data)
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length or not head:
        if not (read := client.recv(length - len(text)) if head else b""):
            os._exit(0)  # the client was killed
        text += read
    about: dict[str, Any] = json.loads(text)
    pid = os.fork()
    if pid == 0:
        client.close()
        os.setsid()
        take_descriptors(list(numbers), about["descriptors"])
        return about
    for number in numbers:
        os.close(number)
    for standard in (0, 1, 2):
        os.close(standard)
    process = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % pid)
    select.select([process, client], [], [])
    if not select.select([process], [], [], 0)[0]:  # the client was killed
        for kill in (os.kill, os.killpg):  # it may not have its session yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % status)
    os._exit(0)


def take_descriptors(received: list[int], wanted: list[int]) -> None:
    """Give each the number that it has in the client."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 512) for number in received]
    os.closerange(0, 512)
    for source, number in zip(high, wanted, strict=True):
        os.dup2(source, number)
        os.close(source)


def become(about: dict[str, Any]) -> types.CodeType:
    """Take over what the client has sent; return the script's code."""
    os.environ.clear()
    os.environ.update(about["environ"])
    os.chdir(about["cwd"])
    os.sched_setaffinity(0, about["processors"])
    sys.argv = about["argv"]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = open(number, mode, closefd=False)  # noqa: SIM115
        if mode == "w":
            stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=sys.argv[0], __builtins__=__builtins__)
    sys.modules["__main__"] = module
    with open(sys.argv[0], "rb") as file:  # noqa: PTH123
        return compile(file.read(), sys.argv[0], "exec")


if os.fork():
    os._exit(0)
import_all(sys.argv[3:])
gc.collect()
gc.freeze()
code = become(serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
exec(code, sys.modules["__main__"].__dict__)  # noqa: S102  a script of the tests
