"""Multiplexer of the ranks' output: to the launcher's stdout and stderr, and into files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from reigen.errors import format_ranks
from reigen.launch.options import LaunchOptions
from reigen.launch.output.line_prefix import LineSplitter, TerminalSink
from reigen.launch.output.nonblocking_writer import NonblockingWriter, open_std_writers
from reigen.launch.output.output_files import OutputFile, process_directory
from reigen.launch.output.repeated_errors import RepeatedErrors
from reigen.launch.ps_processes import name_ps_processes
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.host_processes import STDERR, STDOUT, STREAMS, HostProcesses

#: Lines of a footer where the terminal does not say how many it has.
_FOOTER_LINES = 20


class _OutputStream(NamedTuple):
    lines: LineSplitter
    writer: NonblockingWriter
    record: OutputFile | None


class OutputMux:
    """Multiplexer of the streams of all processes.

    ``groups`` returns the sources that have to pause when a reader does not keep up; ``complain`` is called when a file
    cannot be written. ``appends``: files of a launcher before this one go on.

    Raises:
        LaunchError: a file cannot be made.
    """

    def __init__(
        self,
        options: LaunchOptions,
        loop: LauncherLoop,
        groups: Callable[[], Iterable[HostProcesses]],
        complain: Callable[[str], None],
        *,
        appends: bool = False,
    ) -> None:
        self._loop, self._groups, self._appends = loop, groups, appends
        num_ranks = options.num_ranks
        names = name_ps_processes(options.first_ps_number, options.servers)
        self._writers = open_std_writers(prefix=options.prefix, timestamps=options.timestamps, names=names)
        self._streams: dict[tuple[int, int], _OutputStream] = {}
        #: Writers that wait for their reader: the loop has them.
        self._waiting: set[NonblockingWriter] = set()
        self._errors = RepeatedErrors(num_ranks)
        #: The stream of the last lines on stderr.
        self._last_source: tuple[int, int] | None = None
        self._directory, self._complain = options.output_directory, complain
        self._num_ranks, self._names = num_ranks, names
        for number in [*range(num_ranks), *names]:
            self.add_process(number)

    def add_process(self, number: int) -> None:
        """Make the streams of a process, unless there are some; raises LaunchError."""
        if (number, STDERR) in self._streams:
            return
        name, directory = self._names.get(number, ""), self._directory
        folder = process_directory(number, self._num_ranks, name)
        for stream in STREAMS:
            writer = self._writers[stream]
            record = None
            if directory is not None:
                record = OutputFile(directory / folder, stream, self._complain, appends=self._appends)
            keep = partial(self._keep, number) if stream == STDERR and not name else list
            lines = LineSplitter(writer.screen, (number, stream), keep)
            self._streams[number, stream] = _OutputStream(lines, writer, record)

    @property
    def is_stdout_closed(self) -> bool:
        """Return whether stdout's reader has gone, or it cannot be written; the reason is printed once, on stderr."""
        writer = self._writers[STDOUT]
        if writer.why_broken:
            self.say(f"reigen run: stdout cannot be written: {writer.why_broken}\n".encode())
            writer.why_broken = ""
        return writer.broken

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Write output of a process."""
        to = self._streams[rank, stream]
        if to.record is not None:
            to.record.write(data)
        self._put((rank, stream), to.lines.feed(data))

    def closed(self, rank: int, stream: int) -> None:
        """End a stream."""
        to = self._streams[rank, stream]
        self._put((rank, stream), to.lines.end())
        if to.record is not None:
            to.record.close()
        if stream == STDERR:
            self._errors.end(rank)

    def turn(self) -> float | None:
        """Show lines that repeat no other rank's error; return the seconds until the next call."""
        now = time.monotonic()
        self._settle(now)
        self.say_repeats(now)
        return self._errors.wait_seconds(now)

    def finish(self) -> None:
        """Show all lines that are held back; nothing more is printed."""
        self._settle(float("inf"))

    def is_error_last(self, rank: int) -> bool:
        """Return whether an error that a rank shares with others was written last on stderr."""
        return self._last_source == (self._errors.find_shared(rank), STDERR)

    def tail(self, rank: int) -> list[bytes]:
        """Return the last lines of a process's stderr."""
        return list(self._streams[rank, STDERR].lines.tail)

    @property
    def footer_size(self) -> tuple[int, int] | None:
        """Columns and lines that a footer may have; None: stderr is no terminal."""
        screen = self._writers[STDERR].screen
        if not isinstance(screen, TerminalSink):
            return None
        try:
            size = os.get_terminal_size(self._writers[STDERR].fd)
        except OSError:
            return screen.num_columns, _FOOTER_LINES
        return size.columns or screen.num_columns, max(1, (size.lines or _FOOTER_LINES) // 2)

    def set_footer(self, lines: list[bytes]) -> None:
        """Have these lines stand at the bottom of the terminal; none: no more."""
        writer = self._writers[STDERR]
        if not (lines and writer.pending):  # otherwise the terminal has not taken the ones before
            writer.set_footer(lines)

    def say(self, message: bytes) -> None:
        """Write a message of the launcher's own to stderr."""
        writer = self._writers[STDERR]
        writer.put(writer.screen.say(message))

    def _put(self, source: tuple[int, int], data: bytes) -> None:
        writer = self._streams[source].writer
        writer.put(data)
        if data and writer is self._writers[STDERR]:
            self._last_source = source

    def _keep(self, rank: int, lines: list[bytes]) -> list[bytes]:
        return self._errors.feed(rank, lines, time.monotonic()) if lines else lines

    def _settle(self, now: float) -> None:
        for rank, lines in self._errors.settle(now):
            self._put((rank, STDERR), self._streams[rank, STDERR].lines.show(lines))

    def take_sharing(self, rank: int) -> list[int]:
        """Return the ranks that ended with the same error as ``rank``; nothing more is said of them."""
        return self._errors.take_sharing(rank)

    def say_repeats(self, now: float = float("inf")) -> None:
        """Name the ranks whose errors were left out."""
        for rank, others in self._errors.take_repeats(now):
            noun = "ranks" if len(others) > 1 else "rank"
            self.say(f"reigen run: {noun} {format_ranks(others)}: the same error as rank {rank}\n".encode())

    def write(self) -> None:
        """Write as much as is possible without waiting; sources of a full writer are paused."""
        for writer in set(self._writers):
            writer.draw_footer()
            waited = writer in self._waiting
            writer.flush()
            if bool(writer.pending) != waited:
                self._wait_for(writer) if writer.pending else self._resume(writer)
            if writer.is_full:
                for group, stream in self._sources(writer):
                    group.pause(stream)

    def write_all(self, timeout_seconds: float | None, is_forced: Callable[[], bool]) -> None:
        """Wait until everything is written; not longer than ``timeout_seconds`` seconds, and not in a hurry."""
        self.write()
        end = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._waiting and not is_forced() and (remaining := end - time.monotonic()) > 0:
            self._loop.wait(None if timeout_seconds is None else remaining)
            self.write()

    def _wait_for(self, writer: NonblockingWriter) -> None:
        self._waiting.add(writer)
        self._loop.watch(writer.fd, on_writable=lambda: None)

    def _resume(self, writer: NonblockingWriter) -> None:
        self._waiting.discard(writer)
        self._loop.unwatch(writer.fd)
        for group, stream in self._sources(writer):
            group.resume(stream)

    def _sources(self, writer: NonblockingWriter) -> list[tuple[HostProcesses, int]]:
        """Return the streams whose output goes to a writer."""
        streams = [stream for stream in STREAMS if self._writers[stream] is writer]
        return [(group, stream) for group in self._groups() for stream in streams]
