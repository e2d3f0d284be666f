"""Agent as a child of a process that an engine runs on a host: a Ray actor, a task of Spark's or Dask's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress

from reigen.errors import LaunchError, WireError
from reigen.launch.agent.dial_back import decode_dial_text, encode_dial_text, text_of_attempt
from reigen.resources.limits import explain_limit

#: Seconds between the end of its stdin and its own.
_STOP_SECONDS = 10.0
_OUTPUT_BYTES = 1 << 14


class AgentProcess:
    """Agent of a host, or a task that holds a slot there; when this object's process ends in any way, so does it.

    Its directory and its variables are this process's; PYTHONPATH is its search path. Its stdin stays open: at its end
    the agent ends the ranks, and itself.

    Args:
        dial_text: what the driver has got for this host; it holds a ticket.
        environ: further variables.
        python: the interpreter, with Reigen; None: this process's.
        attempt: how often the engine has run this task before, where it does that by itself.

    Raises:
        LaunchError: it cannot be started.
    """

    def __init__(
        self,
        dial_text: str,
        *,
        environ: Mapping[str, str] | None = None,
        python: str | None = None,
        attempt: int = 0,
    ) -> None:
        path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str) and entry)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `stop`
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, "-P", "-m", "reigen.launch.agent", "--dial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": path, **(environ or {})},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise LaunchError(f"cannot start the agent: {explain_limit(error).strerror}") from error
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):  # `output` says why
            self._process.stdin.write(_text_of_attempt(dial_text, attempt).encode() + b"\n")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def output(self) -> str:
        """End of its stderr: why it has ended; empty after `stop`."""
        if self._stderr.closed:
            return ""
        descriptor = self._stderr.fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, _OUTPUT_BYTES, max(0, size - _OUTPUT_BYTES)).decode(errors="replace").strip()

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Wait for its end, at most so long; returns its exit code (negative: minus a signal), None: it still runs."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int:
        """Have it end its ranks and itself, and kill it if it does not; returns its exit code. May be called twice."""
        assert self._process.stdin is not None, "it was asked for"
        if not self._process.stdin.closed:
            self._process.stdin.close()
        exit_code = self.wait(_STOP_SECONDS)
        if exit_code is None:
            self._process.kill()
            exit_code = self._process.wait()
        self._stderr.close()
        return exit_code


def _text_of_attempt(text: str, attempt: int) -> str:
    try:
        return encode_dial_text(text_of_attempt(decode_dial_text(text), attempt))
    except WireError:  # the agent says so
        return text
