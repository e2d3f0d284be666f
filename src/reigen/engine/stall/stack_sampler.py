"""Sampler of a rank's position: its threads' stacks by Python, its process's state by the kernel.

Another thread's stack is read through ``sys._current_frames()``: that needs nothing of the thread, which may compute,
sleep, or wait for a lock, but it needs the interpreter's lock. A rank in native code that does not give up the lock,
or whose process is stopped, cannot answer; then the kernel is asked (`process_state`).

The only way to a stack without the lock is faulthandler, which another process can trigger by a signal alone. No
signal is free for that: the script may use any (SIGUSR1 is what batch systems warn with), and one that has no handler,
since it came before ``init()`` or after, would end the rank. faulthandler's own timer is one for the whole process and
belongs to the script.
"""

from __future__ import annotations

import linecache
import os
import re
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import msgspec

_MOST_FRAMES, _MOST_INNER, _MOST_THREADS, _MOST_NAMES = 12, 3, 3, 5
#: Frames that are looked at; a recursion may have many more.
_MAX_FRAMES = 500
_MAX_CHARACTERS = 200

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = re.compile(r"/(site|dist)-packages/")
#: The outermost functions of a thread's stack, of the module threading.
_THREAD_BEGINNINGS = frozenset({"Thread._bootstrap", "Thread._bootstrap_inner", "Thread.run"})


class StackFrame(msgspec.Struct, frozen=True, array_like=True):
    """A frame of a stack.

    Attributes:
        file: path of the source file.
        line: number of the line.
        function: name of the function.
        source: the line's text; empty where it cannot be had.
        is_library: it is in the standard library or an installed package, not in a program of the user's.
    """

    file: str
    line: int
    function: str
    source: str
    is_library: bool


class StackSample(msgspec.Struct, frozen=True, array_like=True):
    """Sample of a rank's own threads.

    Attributes:
        pid: its process id.
        host: the name of its host.
        stack: of the thread that trains, innermost first: at most a few frames of libraries, then the program's.
            Reigen's own frames are left out, and those with which every thread begins. Where nothing of the program
            is left and it does not wait, as of a thread that has made a view, it is the main thread's.
        threads: other threads that run code of the program: name, and innermost such frame.
        blocked_in: the collective that the thread waits for; empty if it does not.
        outstanding: names of collectives that it has submitted and that are not complete, at most a few.
        num_outstanding: how many there are.
        running: the collective whose data it moves at this moment, or is kept from moving; empty if there is none.
    """

    pid: int
    host: str
    stack: tuple[StackFrame, ...]
    threads: tuple[tuple[str, StackFrame], ...]
    blocked_in: str
    outstanding: tuple[str, ...]
    num_outstanding: int
    running: str


def sample_stack(thread: int, waiting: CodeType, outstanding: Iterable[str], running: str) -> StackSample:
    """Sample this process.

    Args:
        thread: ident of the thread that trains; the main thread if that has ended, or runs no code of the program and
            does not wait.
        waiting: code of the method in which threads wait for a collective; its variable ``handle`` has the name.
        outstanding: names of what it has submitted and what is not complete.
        running: see `StackSample`.
    """
    frames = sys._current_frames()
    blocked = _find_waiting(frames.get(thread), waiting)
    main = threading.main_thread().ident or 0
    if blocked is None and not _has_own(frames.get(thread)) and (thread not in frames or _has_own(frames.get(main))):
        thread, blocked = main, _find_waiting(frames.get(main), waiting)
    names = list(outstanding)
    return StackSample(
        os.getpid(),
        socket.gethostname(),
        _make_stack(blocked or frames.get(thread)),
        _sample_other_threads(frames, thread),
        "" if blocked is None else str(blocked.f_locals["handle"].name),
        tuple(names[:_MOST_NAMES]),
        len(names),
        running,
    )


def _walk_outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _make_stack(innermost: FrameType | None) -> tuple[StackFrame, ...]:
    places = [_make_frame(frame) for frame in _walk_outward(innermost) if not _is_left_out(frame.f_code)]
    own = [place for place in places if not place.is_library]
    if not own:
        return tuple(places[:_MOST_FRAMES])
    inner = places[: places.index(own[0])]
    return (*inner[:_MOST_INNER], *own[:_MOST_FRAMES])


def _is_left_out(code: CodeType) -> bool:
    """Return whether a frame tells nothing: one of Reigen's, or of the beginning of a thread."""
    begins = code.co_filename == threading.__file__ and code.co_qualname in _THREAD_BEGINNINGS
    return begins or code.co_filename.startswith(_PACKAGE)


def _has_own(innermost: FrameType | None) -> bool:
    """Return whether a thread runs code of the program."""
    return any(not place.is_library for place in _make_stack(innermost))


def _find_waiting(innermost: FrameType | None, waiting: CodeType) -> FrameType | None:
    return next((frame for frame in _walk_outward(innermost) if frame.f_code is waiting), None)


def _sample_other_threads(frames: dict[int, FrameType], but: int) -> tuple[tuple[str, StackFrame], ...]:
    """Threads that have a frame of the program's; Reigen's and idle pools have none."""
    found: list[tuple[str, StackFrame]] = []
    for thread in threading.enumerate():
        if thread.ident in frames and thread.ident != but:
            stack = _make_stack(frames[thread.ident])
            own = next((place for place in stack if not place.is_library), None)
            if own is not None:
                found.append((thread.name[:_MAX_CHARACTERS], own))
    return tuple(found[:_MOST_THREADS])


def _make_frame(frame: FrameType) -> StackFrame:
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    is_library = file.startswith((*_LIBRARIES, "<frozen")) or _INSTALLED.search(file) is not None
    source = linecache.getline(file, line).strip()
    function = frame.f_code.co_qualname
    return StackFrame(file[-_MAX_CHARACTERS:], line, function[:_MAX_CHARACTERS], source[:_MAX_CHARACTERS], is_library)


_LOCKED = "; native code keeps Python's interpreter lock, or its engine is busy moving data"
_STATES = {
    "R": f"runs{_LOCKED}",
    "S": f"sleeps in the kernel{_LOCKED}",
    "D": "waits for a disk, a file server or another device",
    "T": "is stopped, by SIGSTOP or Ctrl-Z (kill -CONT lets it go on)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}


def process_state(pid: int) -> str:
    """Describe by the kernel a process of this host that does not answer, as the end of a sentence, or nothing."""
    process = Path("/proc") / str(pid)
    try:
        status = (process / "status").read_text()
    except OSError:
        return ""
    match = re.search(r"^State:\s*(\w)", status, re.MULTILINE)
    if match is None or match[1] not in _STATES:
        return ""
    where = ""
    if match[1] in "SD":
        try:
            where = (process / "wchan").read_text().strip()
        except OSError:
            where = ""  # not every process may know
    return f"{pid} {_STATES[match[1]]}" + (f" (in {where})" if where not in {"", "0"} else "")
