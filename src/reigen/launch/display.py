"""What the ranks print, on its way to the user: to the launcher's stdout and stderr, and into files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from reigen.launch.crew import STDERR, STDOUT, STREAMS, Crew
from reigen.launch.loop import WRITE, Loop
from reigen.launch.options import Options
from reigen.launch.outlet import Outlet, outlets
from reigen.launch.output import Lines
from reigen.launch.record import Record, folder_of
from reigen.launch.servants import names_of


@dataclass(frozen=True, slots=True)
class _Stream:
    """One stream of one process."""

    lines: Lines
    outlet: Outlet
    record: Record | None


class Display:
    """All streams of all processes.

    Args:
        options: of the job.
        loop: waits for those who read.
        crews: called for who has to wait when a reader does not keep up.
        complain: told when a file cannot be written.

    Raises:
        LaunchError: a file cannot be made.
    """

    def __init__(
        self, options: Options, loop: Loop, crews: Callable[[], Iterable[Crew]], complain: Callable[[str], None]
    ) -> None:
        self._loop, self._crews = loop, crews
        num_ranks = options.num_ranks
        names = names_of(num_ranks, options.servers)
        self._outlets = outlets(prefix=options.prefix, timestamps=options.timestamps, names=names)
        self._streams: dict[tuple[int, int], _Stream] = {}
        #: Outlets that wait for their reader: the loop has them.
        self._waiting: set[Outlet] = set()
        directory = options.output_directory
        for number in [*range(num_ranks), *names]:
            folder = folder_of(number, num_ranks, names.get(number, ""))
            for stream in STREAMS:
                outlet = self._outlets[stream]
                record = None if directory is None else Record(directory / folder, stream, complain)
                self._streams[number, stream] = _Stream(Lines(outlet.screen, (number, stream)), outlet, record)

    @property
    def has_lost_reader(self) -> bool:
        """Whether nobody reads stdout any more."""
        return self._outlets[STDOUT].broken

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """A process has printed this."""
        to = self._streams[rank, stream]
        if to.record is not None:
            to.record.write(data)
        to.outlet.put(to.lines.feed(data))

    def closed(self, rank: int, stream: int) -> None:
        """Nothing more comes from this stream."""
        to = self._streams[rank, stream]
        to.outlet.put(to.lines.end())
        if to.record is not None:
            to.record.close()

    def tail(self, rank: int) -> list[bytes]:
        """The last lines of a process's stderr."""
        return list(self._streams[rank, STDERR].lines.tail)

    def say(self, words: bytes) -> None:
        """Something of the launcher's own, on stderr."""
        self._outlets[STDERR].put(words)

    def write(self) -> None:
        """Write what can be written without waiting; whoever fills an outlet has to wait."""
        for outlet in set(self._outlets):
            waited = outlet in self._waiting
            outlet.flush()
            if bool(outlet.pending) != waited:
                self._wait_for(outlet) if outlet.pending else self._go_on(outlet)
            if outlet.is_full:
                for crew, stream in self._sources(outlet):
                    crew.pause(stream)

    def write_all(self, patience: float | None, is_hurried: Callable[[], bool]) -> None:
        """Wait until everything is written; not longer than ``patience`` seconds, and not in a hurry."""
        self.write()
        end = float("inf") if patience is None else time.monotonic() + patience
        while self._waiting and not is_hurried() and (left := end - time.monotonic()) > 0:
            self._loop.wait(None if patience is None else left)
            self.write()

    def _wait_for(self, outlet: Outlet) -> None:
        self._waiting.add(outlet)
        self._loop.watch(outlet.fd, lambda: None, WRITE)

    def _go_on(self, outlet: Outlet) -> None:
        self._waiting.discard(outlet)
        self._loop.unwatch(outlet.fd)
        for crew, stream in self._sources(outlet):
            crew.resume(stream)

    def _sources(self, outlet: Outlet) -> list[tuple[Crew, int]]:
        """Whose output goes there."""
        streams = [stream for stream in STREAMS if self._outlets[stream] is outlet]
        return [(crew, stream) for crew in self._crews() for stream in streams]
