"""Master of an application: ``python -P -m reigen.launch.yarn.master``, which YARN runs in the first container.

It runs `reigen launch` as a child, whose launcher (`launch.yarn.launcher`) asks it for containers and agents; it speaks
to YARN (`launch.yarn.containers`); it writes the job's output to its own stdout and stderr, which YARN keeps, and to
the client that has submitted the application, if that connects. It decides nothing about the job.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from reigen.errors import AuthenticationError, ConfigError, LaunchError, WireError
from reigen.launch.env_export import PACKAGE_DIRECTORY, merge_remote_environ
from reigen.launch.options import NetworkOptions
from reigen.launch.supervision.process_tree import dies_with_parent
from reigen.launch.yarn.containers import Containers
from reigen.launch.yarn.exits import master_diagnostics
from reigen.launch.yarn.hadoop import Gateway, find_hadoop
from reigen.launch.yarn.job import (
    CLIENT_PURPOSE,
    CONFIGURATION_FILE,
    EXIT_CODE,
    HISTORY_BYTES,
    JOB_FILE,
    MAX_MESSAGE_BYTES,
    STDERR,
    STDOUT,
    STOP,
    LauncherRequest,
    MasterEvent,
    YarnJob,
)
from reigen.launch.yarn.launcher import KEPT_VARIABLES, MASTER_VARIABLE, MessageSocket
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.event_loop import EventLoop
from reigen.net.listener import Listener, open_listening_socket

_READ_BYTES = 1 << 15
#: Output that may wait for a client that does not read, and how long it may go on so before it is given up.
_SLOW_BYTES, _SLOW_SECONDS = 1 << 20, 60.0
#: Seconds in which a client may fetch the rest, the job's containers end, and the ResourceManager be told.
_LAST_SECONDS, _FINISH_SECONDS = 5.0, 15.0
_MESSAGE = b"reigen run: "


def main() -> int:
    """Run the application whose job is in this directory; returns the exit code."""
    job = msgspec.json.decode(Path(JOB_FILE).read_bytes(), type=YarnJob)
    return Master(job, dict(os.environ)).run()


class Master:
    """Master of an application; for one thread, the main one.

    Args:
        job: from the client.
        environ: the container's.
    """

    def __init__(self, job: YarnJob, environ: dict[str, str]) -> None:
        self._job, self._container_environ = job, environ
        self._environ = merge_remote_environ(environ, job.environ, PACKAGE_DIRECTORY, KEPT_VARIABLES)
        self._loop = EventLoop()
        self._events: deque[MasterEvent] = deque()
        self._client: Connection | None = None
        self._client_is_late_since: float | None = None
        #: What was printed last, for a client that comes later: pieces with their first byte.
        self._history: deque[bytes] = deque()
        self._num_history_bytes = 0
        self._last_message = ""
        self._stops: list[int] = []
        self._is_cancelled = False
        #: The job has ended, and has told its exit code.
        self._is_over = False
        self._streams: dict[int, bytes] = {}

    def run(self) -> int:
        """Run the job to its end."""
        self._handle_signals()
        launcher = self._start_launcher()
        address = self._listen()
        exit_code, containers = 1, None
        try:
            client = find_hadoop(self._container_environ)
            with Gateway(client, self._container_environ) as gateway:
                # a node that has no configuration of its own gets the client's
                has_own = bool(self._container_environ.get("HADOOP_CONF_DIR"))
                file = "" if has_own else str(Path(CONFIGURATION_FILE).absolute())
                with gateway.explained("YARN"):
                    containers = Containers(gateway, gateway.configuration({}, file), self._job, address, self._tell)
                containers.start()
                self._serve(launcher, containers)
                exit_code = self._exit_code(launcher)
                self._finish_client(exit_code)
                self._finish(containers, exit_code)
        except (LaunchError, ConfigError) as error:
            self._print(STDERR, f"reigen launch: {error}\n".encode())
            if not self._is_over:
                self._finish_client(exit_code)
            return 1
        finally:
            launcher.kill()
            launcher.wait()
        return 0

    # ---------------------------------------------------------------- the launcher

    def _start_launcher(self) -> subprocess.Popen[bytes]:
        ours, inherited = socket.socketpair()
        environ = {**self._environ, MASTER_VARIABLE: str(inherited.fileno())}
        command = [sys.executable, "-P", "-m", "reigen", "launch", *self._job.arguments]
        try:
            launcher = subprocess.Popen(
                [*command, "--launcher", "yarn", "--", *self._job.command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[inherited.fileno()],
                start_new_session=True,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  there is no other thread
            )
        finally:
            inherited.close()
        self._link = MessageSocket(ours.detach(), msgspec.json.Decoder[LauncherRequest](LauncherRequest))
        assert launcher.stdout is not None, "it was asked for"
        assert launcher.stderr is not None, "it was asked for"
        self._streams = {launcher.stdout.fileno(): STDOUT, launcher.stderr.fileno(): STDERR}
        return launcher

    def _serve(self, launcher: subprocess.Popen[bytes], containers: Containers) -> None:
        """Serve launcher and client until the launcher's output has ended."""
        self._loop.watch(self._link, lambda: self._on_request(containers))
        self._watch_streams()
        while self._streams:
            self._loop.wait(1.0)
            while self._events:
                self._link.send(self._events.popleft())
            for signum in self._take_stops():
                self._is_cancelled = True
                with suppress(ProcessLookupError):
                    launcher.send_signal(signum)
            self._look_after_client()

    def _on_request(self, containers: Containers) -> None:
        for request in self._link.read():
            containers.request(request)
        if self._link.is_ended:
            self._loop.unwatch(self._link)

    def _tell(self, event: MasterEvent) -> None:
        """Pass an event on to the launcher; from any thread."""
        self._events.append(event)
        self._loop.wake()

    def _exit_code(self, launcher: subprocess.Popen[bytes]) -> int:
        code = launcher.wait()
        return code if code >= 0 else 128 - code

    def _finish(self, containers: Containers, exit_code: int) -> None:
        message = master_diagnostics(exit_code, self._last_message if exit_code else "")
        containers.finish(exit_code, message, is_cancelled=self._is_cancelled, timeout_seconds=_FINISH_SECONDS)

    # ---------------------------------------------------------------- output

    def _watch_streams(self) -> None:
        for descriptor in self._streams:
            if not self._loop.watches(descriptor):
                self._loop.watch(descriptor, partial(self._on_output, descriptor))

    def _on_output(self, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        if data:
            self._print(self._streams[descriptor], data)
        else:
            self._loop.unwatch(descriptor)
            del self._streams[descriptor]

    def _print(self, kind: bytes, data: bytes) -> None:
        """Write output to YARN's log, and to the client, or keep it for that."""
        with suppress(OSError):  # the disk is full: the job goes on
            _write_all(1 if kind == STDOUT else 2, data)
        if kind == STDERR:
            for line in data.split(b"\n"):
                if line.startswith(_MESSAGE):
                    self._last_message = line.removeprefix(_MESSAGE).decode(errors="replace").strip()
        if self._client is not None:
            self._send(kind + data)
            return
        self._history.append(kind + data)
        self._num_history_bytes += len(data)
        while self._num_history_bytes > HISTORY_BYTES:
            self._num_history_bytes -= len(self._history.popleft()) - 1

    # ---------------------------------------------------------------- the client

    def _listen(self) -> tuple[str, int]:
        """Listen for the client; returns the address that YARN tells it."""
        node = self._container_environ.get("NM_HOST") or socket.gethostname()
        listening, address = open_listening_socket(_resolve(node))
        network = NetworkOptions.from_environ(self._environ)
        options = ConnectionOptions(
            bytes.fromhex(self._job.secret),
            Identity(ProcessRole.LAUNCHER, 0, CLIENT_PURPOSE),
            MAX_MESSAGE_BYTES,
            network.make_tls(),
            network.peer_timeout_seconds,
        )
        self._listener = Listener(self._loop, listening, options, self._on_client)
        return node, int(address.rpartition(":")[2])

    def _on_client(self, connection: Connection) -> None:
        """Talk to a client, the latest one that has come: an older one is gone, or will be."""
        self._drop_client()
        self._client = connection
        self._loop.watch(connection, self._on_client_message)
        while self._history and self._client is not None:
            self._send(self._history.popleft())
        self._num_history_bytes = 0

    def _on_client_message(self) -> None:
        assert self._client is not None, "it is unwatched when it goes"
        try:
            if STOP in self._client.read():
                self._stops.append(signal.SIGTERM)
        except (OSError, AuthenticationError, WireError):
            self._drop_client()

    def _send(self, message: bytes) -> None:
        assert self._client is not None, "asked before"
        try:
            self._client.post(message)
            self._client.flush()
        except OSError:
            self._drop_client()

    def _look_after_client(self) -> None:
        """Send what waits for the client; print no more while it is much, but not for ever."""
        client, now = self._client, time.monotonic()
        is_late = client is not None and client.num_unsent_bytes > _SLOW_BYTES
        if client is not None and client.num_unsent_bytes:
            self._flush()
        self._client_is_late_since = (self._client_is_late_since or now) if is_late else None
        if is_late and self._client_is_late_since is not None and now - self._client_is_late_since > _SLOW_SECONDS:
            self._drop_client()
            is_late = False
        if not is_late:
            self._watch_streams()
            return
        for descriptor in self._streams:
            self._loop.unwatch(descriptor)

    def _flush(self) -> None:
        assert self._client is not None, "asked before"
        try:
            on_writable = None if self._client.flush() else self._flush
            self._loop.watch(self._client, self._on_client_message, on_writable)
        except OSError:
            self._drop_client()

    def _drop_client(self) -> None:
        if self._client is not None:
            self._loop.unwatch(self._client)
            self._client.close()
            self._client = None

    def _finish_client(self, exit_code: int) -> None:
        """Tell the client the exit code, and give it some time to read the rest."""
        self._is_over = True
        if self._client is None:
            return
        self._send(EXIT_CODE + str(exit_code).encode())
        deadline = time.monotonic() + _LAST_SECONDS
        while self._client is not None and self._client.num_unsent_bytes and time.monotonic() < deadline:
            self._flush()
            self._loop.wait(0.1)

    # ---------------------------------------------------------------- signals

    def _handle_signals(self) -> None:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._loop.watch(reading, lambda: self._stops.extend(os.read(reading, 64)))

    def _take_stops(self) -> list[int]:
        stops, self._stops = self._stops, []
        return stops


def _resolve(host: str) -> str:
    """Return the address of a host; where it is not known, all the same, so that the error says which."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main())
