"""Output in files, exit codes and last words of processes, as an agent keeps them while there is no launcher."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from reigen.files import open_directory, write_atomically
from reigen.launch.job_state import ProcessExited
from reigen.launch.output.output_files import OUTPUT_NAMES, process_directory

_MAX_LAST_BYTES = 4096
#: Name of a host's result in the directory of the job.
RESULT_PREFIX = "result."


class ProcessResult(msgspec.Struct, frozen=True, kw_only=True):
    """End of one process: ``last_words`` are the end of its stderr since there was no launcher."""

    slot: int
    exit_code: int
    cause: str = ""
    last_words: str = ""


class HostResult(msgspec.Struct, frozen=True, kw_only=True):
    """End of a host's part of a job without a launcher.

    Attributes:
        host: its name.
        ended: when, in seconds since 1970.
        finished: a slot whose program was done; None: of none.
        output_directory: where the output is.
        processes: those that have ended without a launcher, in order.
    """

    host: str
    ended: float
    finished: int | None
    output_directory: str
    processes: tuple[ProcessResult, ...]


class UnattendedHost:
    """Keeper of output and ends of processes.

    Args:
        directory: of the job on this host.
        output_directory: of its output.
        num_ranks: as in ``launch.output.output_files.process_directory``.
    """

    def __init__(self, directory: Path, output_directory: Path, num_ranks: int) -> None:
        self._directory, self.output_directory, self._num_ranks = directory, output_directory, num_ranks
        self._files: dict[tuple[int, int], int] = {}
        self._last: dict[int, deque[bytes]] = {}
        #: Ends that no launcher knows.
        self.exits: list[ProcessExited] = []
        #: Why output could not be kept; empty: it is.
        self.problem = ""

    def write(self, number: int, stream: int, data: bytes) -> None:
        """Keep output; where that fails, the processes go on without."""
        if stream == 1:
            kept = self._last.setdefault(number, deque())
            kept.append(data[-_MAX_LAST_BYTES:])
            while sum(map(len, kept)) - len(kept[0]) >= _MAX_LAST_BYTES:
                kept.popleft()
        try:
            view = memoryview(data)
            while view and not self.problem:
                view = view[os.write(self._descriptor(number, stream), view) :]
        except OSError as error:
            self.problem = f"output cannot be kept in {self.output_directory}: {error.strerror}"

    def close_stream(self, number: int, stream: int) -> None:
        """Close the file of a stream; it may be opened again."""
        descriptor = self._files.pop((number, stream), None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close all files."""
        for number, stream in list(self._files):
            self.close_stream(number, stream)

    def write_result(self, finished: int | None) -> None:
        """Write how everything has ended; raises OSError."""
        host = socket.gethostname()
        processes = tuple(
            ProcessResult(
                slot=each.rank,
                exit_code=each.exit_code,
                cause=each.cause,
                last_words=b"".join(self._last.get(each.rank, ())).decode(errors="replace")[-_MAX_LAST_BYTES:],
            )
            for each in self.exits
        )
        result = HostResult(
            host=host,
            ended=time.time(),
            finished=finished,
            output_directory=str(self.output_directory),
            processes=processes,
        )
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._directory / f"{RESULT_PREFIX}{host}", [msgspec.json.encode(result)], mode=0o600)

    def _descriptor(self, number: int, stream: int) -> int:
        if (number, stream) not in self._files:
            directory = self.output_directory / process_directory(number, self._num_ranks, "")
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open_directory(directory) as dir_fd:
                self._files[number, stream] = os.open(OUTPUT_NAMES[stream], flags, 0o666, dir_fd=dir_fd)
        return self._files[number, stream]


def read_results(directory: Path) -> list[HostResult]:
    """Return the results of hosts that are in the directory of a job, in the order in which they ended."""
    found = []
    for file in directory.glob(f"{RESULT_PREFIX}*"):
        with suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(file.read_bytes(), type=HostResult))
    return sorted(found, key=lambda result: result.ended)
