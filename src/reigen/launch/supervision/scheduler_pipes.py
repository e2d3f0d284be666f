"""Pipes between the launcher and the scheduler of parameter servers, which is on its host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from reigen.cluster.environ import (
    DEATH_FD_VARIABLE,
    DEPARTURE_FD_VARIABLE,
    ROSTER_FD_VARIABLE,
)
from reigen.cluster.inherited_files import describe_inherited
from reigen.launch.local_plan import ProcessSpec
from reigen.launch.ps_processes import PsRole

_READ_BYTES = 1 << 16
#: How often this process looks whether the scheduler is silent.
LOOK_SECONDS = 1.0


class SchedulerPipes:
    """Pipe by which the scheduler reports workers and keys, and one by which an elastic job's hears of dead processes.

    And the memory in which the latter keeps its record for the scheduler that follows it.

    Args:
        clock: a steady one, in seconds.

    Attributes:
        held: by server, the keys of which it holds something, in words.
        silent_seconds: for how long the present scheduler has been silent while this process ran, at the latest look;
            None: it was not heard yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.held: dict[int, str] = {}
        self.silent_seconds: float | None = None
        self._clock, self._looked_at = clock, clock()
        self._reports, self._reports_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._deaths_reader, self._deaths = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._roster = os.memfd_create("reigen-roster", os.MFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor of the scheduler's reports."""
        return self._reports

    def attach(self, spec: ProcessSpec, *, is_elastic: bool) -> ProcessSpec:
        """Return a process's spec with the pipes, if it is the scheduler."""
        if spec.ps_process is None or spec.ps_process.role is not PsRole.SCHEDULER:
            return spec
        pipes = {DEPARTURE_FD_VARIABLE: self._reports_writer}
        if is_elastic:
            pipes |= {DEATH_FD_VARIABLE: self._deaths_reader, ROSTER_FD_VARIABLE: self._roster}
        variables = {name: describe_inherited(number) for name, number in pipes.items()}
        return replace(spec, environ={**spec.environ, **variables}, descriptors=tuple(pipes.values()))

    def read(self) -> Iterator[bytes]:
        """Yield the reports of workers that have come, and note those of keys. Does not wait."""
        with suppress(BlockingIOError):
            while True:
                lines = os.read(self._reports, _READ_BYTES).splitlines(keepends=True)
                self.silent_seconds, self._looked_at = 0.0, self._clock()
                for line in [line for line in lines if line.startswith(b"holds ")]:
                    _, server, text = line.decode(errors="replace").rstrip("\n").split(" ", 2)
                    self.held[int(server)] = text
                yield b"".join(line for line in lines if not line.startswith(b"holds "))

    def look(self) -> float | None:
        """Return `silent_seconds` now. Between two looks no more than `LOOK_SECONDS` counts.

        Where more passes, this process was stopped or did not get a processor, and so perhaps was the scheduler.
        """
        now = self._clock()
        if self.silent_seconds is not None:
            self.silent_seconds += min(now - self._looked_at, LOOK_SECONDS)
        self._looked_at = now
        return self.silent_seconds

    def announce_deaths(self, ended: Iterable[tuple[int, int]]) -> None:
        """Report that an elastic job's processes have ended: no connection of them is to be waited for.

        Args:
            ended: by slot, the latest incarnation of which no process is left.
        """
        for slot, incarnation in ended:
            with suppress(BlockingIOError):  # the scheduler does not read
                os.write(self._deaths, b"%d %d\n" % (slot, incarnation))

    def close(self) -> None:
        """Close all ends that this process has."""
        for pipe in (self._reports, self._reports_writer, self._deaths_reader, self._deaths, self._roster):
            os.close(pipe)
