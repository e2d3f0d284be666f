"""Processes below this one: finding them, ending them, and not outliving a parent. Linux only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt every orphan below this process from now on: none can hide by forking twice. Raises OSError."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1)


def dies_with_parent() -> Callable[[], None]:
    """Return a function for a child to call between fork and exec: the kernel kills it when its parent ends.

    The setting is tied to the *thread* that forked, so fork from a thread that lives as long as the process does. It
    survives exec, except into a setuid program, and is not inherited by the child's children.
    """
    prctl, parent = _prctl(), os.getpid()
    return lambda: _set_parent_death_signal(prctl, parent)


def die_with_process(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, or the parent's thread that started it."""
    _set_parent_death_signal(_prctl(), parent)


def _set_parent_death_signal(prctl: Callable[[int, int], None], parent: int) -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def find_descendants(ancestor: int, excluded: Collection[int] = ()) -> set[int]:
    """Return live descendants of ``ancestor``, but for those ``excluded`` and their descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in _list_processes():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    front = [ancestor]
    while front:
        new = [pid for pid in children.get(front.pop(), []) if pid not in excluded]
        found.update(new)
        front += new
    return found


def signal_all_below(signum: int, excluded: Collection[int] = ()) -> int:
    """Send a signal to every process below this one but some (as in ``find_descendants``); returns how many there were.

    Each is held by a pidfd while it is made sure that it still descends from this process: a process id that was used
    again in between is not hit.
    """
    me = os.getpid()
    handles = {}
    for pid in find_descendants(me, excluded):
        with suppress(ProcessLookupError):
            handles[pid] = os.pidfd_open(pid)
    still = find_descendants(me, excluded)
    for pid, handle in handles.items():
        with suppress(ProcessLookupError, PermissionError):
            if pid in still:
                signal.pidfd_send_signal(handle, signum)
        os.close(handle)
    return len(still)


def reap_orphans(known: set[int]) -> bool:
    """Reap ended children that are not in ``known``: orphans that were given to this process.

    Returns:
        whether there are children left.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if ended is None or ended.si_pid in known:
            return True
        os.waitpid(ended.si_pid, 0)


def kill_all_below(limit_seconds: float) -> int:
    """Kill every process below this one, which adopts orphans, and those that they start meanwhile; return how many.

    A look at /proc is no picture of one moment: whose parent ends during it may seem to be somebody else's. So this
    ends when there is no child left. A process that is alive after ``limit_seconds`` is stuck in the kernel and will
    end when it comes back.
    """
    deadline = time.monotonic() + limit_seconds
    num_found = signal_all_below(signal.SIGKILL)
    while reap_orphans(set()) and time.monotonic() < deadline:
        select.select([], [], [], 0.005)
        num_found = max(num_found, signal_all_below(signal.SIGKILL))
    return num_found


def _list_processes() -> Iterator[tuple[int, int]]:
    """Yield (process, its parent) of all processes that have not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may hold anything, brackets too; what follows it does not.
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):  # it ended meanwhile
                continue
            if state not in {b"Z", b"X"}:
                yield int(entry.name), int(parent)


def _prctl() -> Callable[[int, int], None]:
    function = ctypes.CDLL(None, use_errno=True).prctl
    function.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]

    def call(option: int, argument: int) -> None:
        if function(option, argument, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl({option}): {os.strerror(code)}")

    return call


def signal_name(signum: int) -> str:
    """Return the name of a signal; realtime signals have numbers only."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
