"""Output of a pod, followed by `kubectl logs -f`, also when the API server ends the connection meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from reigen.errors import LaunchError
from reigen.resources.limits import explain_limit

_CHUNK_BYTES = 1 << 16
#: A line that is longer is passed on in pieces.
_LONGEST_LINE_BYTES = 1 << 20
#: Bytes that one call takes; the rest waits in the pipe.
_TURN_BYTES = 8 << 20


class LineStamps:
    """Lines with a time before each, of which those that have been seen are dropped when they come again.

    ``kubectl logs --since-time`` counts in whole seconds: a log that is followed anew begins with lines that are known.
    A line that was cut comes again, too: of a short one nothing was returned, of a long one what was is dropped.
    """

    def __init__(self) -> None:
        #: Time of the last line, as the API server writes it, and how many lines have had that time.
        self.last, self._num_last = "", 0
        self._skipped: int | None = None
        self._partial = b""
        self._is_inside = self._is_dropped = False
        #: Bytes of the long line that is being taken, and of one that was cut and comes again.
        self._num_taken = self._num_returned = 0

    def restart(self) -> None:
        """Expect known lines again."""
        if self._is_inside and not self._is_dropped:
            self._num_last -= 1
            self._num_returned = max(self._num_returned, self._num_taken)
        self._partial, self._is_inside, self._skipped = b"", False, 0

    def feed(self, data: bytes) -> bytes:
        """Return the text of new lines, without their times."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        found = b"".join(self._take(line + b"\n") for line in lines)
        if len(self._partial) > _LONGEST_LINE_BYTES:
            found += self._take(self._partial)
            self._partial, self._is_inside = b"", True
        return found

    def finish(self) -> bytes:
        """Return what has come of the last line of all, which nothing ends any more."""
        rest, self._partial = self._partial, b""
        return self._take(rest) if rest else b""

    def _take(self, line: bytes) -> bytes:
        if self._is_inside:  # the rest of a long line
            self._is_inside, text = False, line
        else:
            stamp, _, text = line.partition(b" ")
            self._is_dropped = self._is_known(stamp.decode(errors="replace").rstrip("\n"))
            self._num_taken = 0
        if self._is_dropped:
            return b""
        num_repeated = max(0, self._num_returned - self._num_taken)
        self._num_taken += len(text)
        if line.endswith(b"\n"):
            self._num_returned = 0
        return text[num_repeated:]

    def _is_known(self, stamp: str) -> bool:
        # times of one pod are in ascending order, and all of UTC: texts of different lengths, as zeros are left out
        new, last = _sort_key(stamp), _sort_key(self.last)
        if self._skipped is not None:
            if new < last:
                return True
            if new == last and self._skipped < self._num_last:
                self._skipped += 1
                return True
            self._skipped = None
        if new == last:
            self._num_last += 1
        else:
            self.last, self._num_last = stamp, 1
        return False


def _sort_key(stamp: str) -> tuple[str, str]:
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return whole, fraction.ljust(9, "0")


class PodLog:
    """Log of a pod.

    Args:
        command: kubectl with its options for the cluster.
        pod: its name.
        container: its container.

    Attributes:
        error: what kubectl has said when it ended last.
    """

    def __init__(self, command: Sequence[str], pod: str, container: str) -> None:
        self._command = [*command, "logs", "--follow", "--timestamps", f"--container={container}", pod]
        self._stamps = LineStamps()
        self._process: subprocess.Popen[bytes] | None = None
        self.error = ""

    @property
    def has_ended(self) -> bool:
        """True if nothing follows the log now."""
        return self._process is None

    def follow(self) -> None:
        """Follow the log, from where it was left; raises LaunchError where there is no kubectl."""
        if self._process is not None:
            return
        since = [f"--since-time={self._stamps.last}"] if self._stamps.last else []
        self._stamps.restart()
        try:
            self._process = subprocess.Popen(
                [*self._command, *since],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is ours
            )
        except OSError as error:
            raise LaunchError(f"cannot start {self._command[0]}: {explain_limit(error).strerror}") from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for stream in (self._process.stdout, self._process.stderr):
            os.set_blocking(stream.fileno(), False)

    def read(self) -> bytes:
        """Return some of what has come since the last call, in whole lines unless they are long; never waits."""
        found, num_read = [], 0
        while self._process is not None and num_read < _TURN_BYTES and (data := self._read_some()):
            num_read += len(data)
            found.append(self._stamps.feed(data))
        return b"".join(found)

    def finish(self) -> bytes:
        """Return what has come of the last line, where the log has ended for good."""
        return self._stamps.finish()

    def _read_some(self) -> bytes:
        """Return some bytes; none: nothing is there now, or, if the process is gone, ever."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            data = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            with suppress(BlockingIOError):
                self.error = os.read(self._process.stderr.fileno(), _CHUNK_BYTES).decode(errors="replace").strip()
            self._reap()
        return data

    def close(self) -> None:
        """End what follows the log."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        with suppress(ProcessLookupError):
            process.kill()  # it has closed its output: there is nothing more to be had of it
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
