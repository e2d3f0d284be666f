"""Record of an elastic job's roster, in memory that the launcher holds and each scheduler of the job inherits.

It is written before anybody is told, a line an event; what a killed process has written stays. Each scheduler begins
with a line of its own and goes on from what stands before it. Of two schedulers only the latest one decides: the lines
of an earlier one behind that do not count, and it finds that line before it tells anything, and ends. A scheduler kills
the one before it, should that live: the processes that are connected to a stopped one would never look for another.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from reigen.cluster.local_peers import process_namespace_id
from reigen.cluster.membership.recorded_job import RecordedEvent

_log = logging.getLogger(__name__)


class _SchedulerBegan(msgspec.Struct, array_like=True, frozen=True, tag="began", forbid_unknown_fields=True):
    """Line of a scheduler that begins; its process may be looked for in that namespace."""

    scheduler: int
    pid: int
    started: int
    namespace: str


class _RecordLine(msgspec.Struct, array_like=True, frozen=True, tag="event", forbid_unknown_fields=True):
    scheduler: int
    entry: RecordedEvent


_DECODER = msgspec.json.Decoder(_SchedulerBegan | _RecordLine)


class RosterRecord:
    """Record, as one scheduler reads and writes it.

    Args:
        descriptor: of the file; closed by `close`.

    Attributes:
        generation: how many schedulers the job has had, with this one.
        entries: what the others have recorded.

    Raises:
        OSError: there is no memory for the record.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        me = _SchedulerBegan(secrets.randbits(62), os.getpid(), _start_time(os.getpid()), _process_namespace())
        self._scheduler = me.scheduler
        line = b"\n" + msgspec.json.encode(me) + b"\n"  # behind a line that was cut off, perhaps
        self._write(line)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        before_mine = text.index(line)
        #: as far as the file was looked through for schedulers behind this one
        self._end, self._is_latest = before_mine + len(line), True
        self.generation, self.entries, before = _parse(text[:before_mine])
        if before is not None:
            _kill(before, me)

    def is_latest(self) -> bool:
        """Return whether no other scheduler has begun behind this one."""
        if (size := os.fstat(self._descriptor).st_size) > self._end:
            whole, end, _ = os.pread(self._descriptor, size - self._end, self._end).rpartition(b"\n")
            self._end += len(whole + end)
            self._is_latest = self._is_latest and _parse(whole)[2] is None
        return self._is_latest

    def append(self, entries: Iterable[RecordedEvent]) -> bool:
        """Append events before they are announced; returns whether they may be: this is the latest scheduler.

        Raises:
            OSError: there is no memory for them.
        """
        data = b"".join(msgspec.json.encode(_RecordLine(self._scheduler, entry)) + b"\n" for entry in entries)
        if data:
            self._write(data)
        return self.is_latest()

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        if os.write(self._descriptor, data) != len(data):
            raise OSError("the roster of the job could not be recorded: no memory is left for it")


def _parse(text: bytes) -> tuple[int, list[RecordedEvent], _SchedulerBegan | None]:
    """Return the number of the next scheduler, the events of those before it, and the last one of these."""
    generation, entries, latest = 1, list[RecordedEvent](), None
    for line in text.splitlines():
        with suppress(msgspec.DecodeError):  # a scheduler was killed while it wrote that: it has told nobody
            found = _DECODER.decode(line)
            if isinstance(found, _SchedulerBegan):
                generation, latest = generation + 1, found
            elif latest is not None and found.scheduler == latest.scheduler:
                entries.append(found.entry)
    return generation, entries, latest


def _kill(before: _SchedulerBegan, me: _SchedulerBegan) -> None:
    """Kill the scheduler before this one, if its process is there: it may be stopped."""
    if not before.started or not before.namespace:  # there was no /proc: that number may be another process's by now
        return
    if before.namespace != me.namespace or before.pid == me.pid:
        return
    try:
        handle = os.pidfd_open(before.pid)
    except OSError:
        return
    try:
        if _start_time(before.pid) == before.started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            _log.warning("the scheduler before this one, process %d, had not ended; it was killed", before.pid)
    except OSError:  # it has ended meanwhile
        pass
    finally:
        os.close(handle)


def _start_time(pid: int) -> int:
    """Return when a process has started, in the kernel's ticks: the same process if that is the same; 0: unknown."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return 0


def _process_namespace() -> str:
    """Return which numbers of processes are the same processes; empty: unknown."""
    with suppress(OSError):
        return process_namespace_id()
    return ""
