"""Caller's side of a running job: receives its processes' messages, shows their output, stops it."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Self, TextIO

from reigen.errors import LaunchError
from reigen.net.event_loop import EventLoop, HasFileno
from reigen.resources.limits import explain_limit
from reigen.runner.result_channel import RankNote, RankReport, ResultChannel, ResultMessage
from reigen.runner.serialization import unpack_object

_READ_BYTES = 1 << 16


class JobMonitor:
    """Monitor of a launcher process, and a context manager; nothing of the job is left behind it.

    For any one thread: no handler is set and no thread is started. The launcher ends when this thread does.

    Args:
        command: the launcher's command line.
        channel: the caller's end of the channel.
        descriptors: those that the launcher inherits.
        environ: its environment; None: this process's.
        outputs: where the processes' output goes; None: to this process's stdout and stderr.

    Attributes:
        messages: those received so far, in order.
        payloads: descriptors of results and exceptions, by rank.

    Raises:
        LaunchError: the launcher cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        channel: ResultChannel,
        descriptors: Sequence[int],
        environ: Mapping[str, str] | None = None,
        outputs: tuple[TextIO | None, TextIO | None] = (None, None),
    ) -> None:
        self.messages: list[ResultMessage] = []
        self.payloads: dict[int, int] = {}
        self._channel = channel
        self._is_open = True
        now = outputs[0] or sys.stdout, outputs[1] or sys.stderr
        streams = [_stream(now[0], sys.__stdout__), _stream(now[1], sys.__stderr__)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=descriptors,
                env=environ,
                start_new_session=True,  # Ctrl-C reaches it one way only: through the caller
                bufsize=0,
            )
            self._handle = self._open_handle()
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {explain_limit(error).strerror}") from error
        self._loop = loop = EventLoop()
        #: Ends `wait` soon, from any thread.
        self.wake = loop.wake
        #: Called after each turn of `wait`; what it raises ends the waiting.
        self.on_turn: Callable[[], float | None] = lambda: None
        #: Called with each note of a rank's; None: nobody wants them.
        self.on_note: Callable[[int, Any], None] | None = None
        #: everything that is read from; each returns whether there may be more
        self._readers: list[Callable[[], bool]] = [self._receive]
        self._loop.watch(channel, self._receive)
        for file, target in zip((self._process.stdout, self._process.stderr), now, strict=True):
            if file is not None:
                self._readers.append(_OutputPump(self._loop, file, target).turn)
                self._loop.watch(file, self._readers[-1])
        self._loop.watch(self._handle, self._on_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._process.wait()
        self._loop.close()
        os.close(self._handle)
        for file in (self._process.stdout, self._process.stderr):
            if file is not None:
                file.close()
        for payload in self.payloads.values():
            os.close(payload)
        self.payloads.clear()

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher, as a shell counts: 128 + n where a signal n ended it."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def wait(self) -> None:
        """Receive and show everything until the launcher has ended."""
        while self._is_open:
            self._loop.wait(self.on_turn())
        for read in self._readers:  # the last messages and output
            while read():
                pass

    def watch(self, file: HasFileno, on_readable: Callable[[], object]) -> None:
        """Call a function whenever something can be read from a file, while `wait` runs."""
        self._loop.watch(file, on_readable)

    def unwatch(self, file: HasFileno) -> None:
        """Call nothing for a file any more."""
        self._loop.unwatch(file)

    def _open_handle(self) -> int:
        """Open a descriptor that becomes readable when the launcher ends."""
        try:
            return os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    def _stop(self) -> None:
        """Ask the launcher to stop, again each time that the caller is interrupted meanwhile; wait until it has."""
        signum = signal.SIGTERM
        self.on_turn = lambda: None
        while self._is_open:
            try:
                self._process.send_signal(signum)
                self.wait()
            except KeyboardInterrupt:
                signum = signal.SIGINT  # a second one kills what does not stop
            except Exception:  # noqa: BLE001  an error of the channel or of the output must not keep the job alive
                self._process.wait()
                self._is_open = False

    def _receive(self) -> bool:
        try:
            received = self._channel.receive()
        except BlockingIOError:
            return False
        if received is None:
            self._loop.unwatch(self._channel)
            return False
        if isinstance(received.message, RankNote):
            self._take_note(received.message, received.descriptor)
            return True
        self.messages.append(received.message)
        if received.descriptor is not None:
            assert isinstance(received.message, RankReport), "only reports come with a payload"
            if (older := self.payloads.pop(received.message.rank, None)) is not None:  # of another process there
                os.close(older)
            self.payloads[received.message.rank] = received.descriptor
        return True

    def _take_note(self, note: RankNote, payload: int | None) -> None:
        assert payload is not None, "notes come with a payload"
        try:
            if self.on_note is not None:
                with suppress(Exception):  # the user's classes, and the user's function
                    self.on_note(note.rank, unpack_object(payload))
        finally:
            os.close(payload)

    def _on_exit(self) -> None:
        self._is_open = False


class _OutputPump:
    """Copier of the launcher's output into a stream of this process that is no file, a notebook's for example."""

    def __init__(self, loop: EventLoop, file: IO[bytes], target: TextIO) -> None:
        self._loop, self._file, self._target = loop, file, target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(file.fileno(), False)

    def turn(self) -> bool:
        """Copy the available output; return whether there may be more."""
        try:
            data = os.read(self._file.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.unwatch(self._file)
        text = self._decoder.decode(data, final=not data)
        if text:
            self._target.write(text)
            self._target.flush()
        return bool(data)


def _stream(now: TextIO | None, original: TextIO | None) -> int | None:
    """Choose the launcher's stream: the process's own as it is, or a pipe where another object stands in for it."""
    if now is None:
        return subprocess.DEVNULL
    if now is original:
        now.flush()
        return None
    return subprocess.PIPE
