"""Stands for a Python process that `server.py` forks: `client.py ADDRESS SCRIPT [ARGUMENT...]`."""

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Return the exit code of the forked process; end by the signal that has ended it."""
    inherited = sorted(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208  no import that takes time
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(sys.argv[1])
    except OSError:
        return _no_server()
    descriptors = [number for number in inherited if number != server.fileno() and _is_open(number)]
    cwd = os.getcwd()  # noqa: PTH109  as above
    about = {"argv": sys.argv[2:], "cwd": cwd, "environ": dict(os.environ), "descriptors": descriptors}
    about["processors"] = sorted(os.sched_getaffinity(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    text = json.dumps(about).encode()
    server.sendmsg([len(text).to_bytes(4, "big")], rights)
    server.sendall(text)
    answers = server.makefile()
    pid = int(answers.readline() or 0)
    if not pid:
        return _no_server()
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    if not (answer := answers.readline()):
        return _no_server()
    status = int(answer)
    if status >= 0:
        return status
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
    return 128 - status


def _no_server() -> int:
    print("the warm Python has ended", file=sys.stderr)
    return 70


def _is_open(number: int) -> bool:
    try:
        return os.fstat(number) is not None
    except OSError:
        return False


if __name__ == "__main__":
    os._exit(main())
