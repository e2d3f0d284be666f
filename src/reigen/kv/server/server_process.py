"""Process of an elastic job that runs several servers, each in a thread of its own, as its launcher says.

`launch.elastic.server_placement` states the protocol. Over a socket come ``take SERVER GENERATION``, ``release
SERVER``, ``close`` (end with the servers that are here: the job is about to be over) and ``end`` (end now). This
process says ``ready``, ``leaving`` when it is sent SIGTERM, ``released SERVER``, and ``failed SERVER REASON`` where it
cannot take one. The end of a server that was not told to be released is the end of the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping

from reigen.cluster.environ import HANDOVER_VARIABLE, SERVER_CONTROL_VARIABLE
from reigen.cluster.inherited_files import find_inherited
from reigen.context import report_metrics
from reigen.errors import ConfigError, ReigenError
from reigen.kv.membership.discovery import choose_listen_host
from reigen.kv.membership.environment import ProcessConfig
from reigen.kv.membership.scheduler_client import SchedulerClient
from reigen.kv.server.server import KVServer, limit_garbage_collection
from reigen.kv.server.snapshots import find_saved_jobs
from reigen.net.event_loop import EventLoop
from reigen.net.listener import open_listening_socket
from reigen.observe.metrics import add_source, finish_reporting

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 12


class _PlacedServer(threading.Thread):
    """Server in a thread, from its taking to its release or the end of the job.

    Attributes:
        exit_code: of the server, once it has ended; None: it is released.
        problem: why it could not be taken; empty: it was.
        is_over: nothing of it is left.
    """

    def __init__(self, settings: ProcessConfig, handover: str, loop: EventLoop) -> None:
        super().__init__(name=f"reigen-server-{settings.number}", daemon=True)
        self.exit_code: int | None = 1
        self.problem, self.is_over = "", False
        self._settings, self._handover, self._loop = settings, handover, loop
        self._lock = threading.Lock()
        self._server: KVServer | None = None
        self._must_release = False

    def release(self) -> None:
        """Have it end so that another process can take the server."""
        with self._lock:
            self._must_release = True
            if self._server is not None:
                self._server.release()

    def run(self) -> None:
        try:
            self.exit_code = self._serve()
        except (ReigenError, OSError) as error:
            if self._server is None:
                self.problem = str(error)
            else:
                _log.critical("server %s: %s", self._settings.number, error)
        except Exception:  # noqa: BLE001  its log has the traceback, and the process ends
            _log.critical("server %s has failed", self._settings.number, exc_info=True)
        finally:
            self.is_over = True
            self._loop.wake()

    def _serve(self) -> int | None:
        settings, config = self._settings, self._settings.config
        listening, address = open_listening_socket(choose_listen_host(settings)[0])
        directory = config.kv_snapshot_dir
        with contextlib.closing(listening):
            member = SchedulerClient(
                settings,
                address,
                time.monotonic() + config.start_timeout_seconds,
                lambda secret: () if directory is None else find_saved_jobs(directory, secret),
            )
            with (
                contextlib.closing(member),
                contextlib.closing(KVServer(member, config, listening, self._handover)) as server,
            ):
                with self._lock:
                    self._server = server
                    if self._must_release:
                        server.release()
                add_source(server)
                code = server.serve()
                return None if server.is_released else code


class ServerProcess:
    """Server process; see the module.

    Args:
        settings: of the job.
        environ: tells the socket's descriptor, and the directory for servers that move.

    Raises:
        ConfigError: it was not started by the launcher of an elastic job, or servers are to be copied.
    """

    def __init__(self, settings: ProcessConfig, environ: Mapping[str, str]) -> None:
        control = find_inherited(environ, SERVER_CONTROL_VARIABLE, "the socket to the launcher")
        if control < 0:
            raise ConfigError(
                f"{SERVER_CONTROL_VARIABLE} is not set, or its descriptor is closed: servers that move (--max-servers) "
                "are started by `reigen run`, and a script in between must leave descriptors open"
            )
        if settings.config.kv_replicas > 1:
            raise ConfigError(
                "REIGEN_KV_REPLICAS=2 and --max-servers: servers that move have no copies in the memory of others. "
                "With REIGEN_KV_SNAPSHOT_DIR they survive the death of their process"
            )
        self._settings, self._environ = settings, environ
        self._handover = environ.get(HANDOVER_VARIABLE, "")
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self._loop = EventLoop()
        self._servers: dict[int, _PlacedServer] = {}
        self._is_noticed = self._is_closing = False
        self._exit_code: int | None = None
        self._worst = 0  # of the exit codes of servers

    def run(self) -> int:
        """Run servers until the job is over, or this process is not needed any more; returns the exit code."""
        signal.signal(signal.SIGTERM, self._on_notice)
        report_metrics(self._environ, self._settings.config, "server")
        limit_garbage_collection()
        self._loop.watch(self._control, self._read)
        self._say("ready")
        while self._exit_code is None:
            self._loop.wait()
            if self._is_noticed:
                self._is_noticed = False
                self._say("leaving")
            self._collect()
        finish_reporting()
        return self._exit_code

    def _on_notice(self, *_: object) -> None:
        self._is_noticed = True
        self._loop.wake()

    def _say(self, text: str) -> None:
        with contextlib.suppress(ConnectionError):  # the launcher has gone
            self._control.send(text.encode(errors="replace")[:_MOST_BYTES])

    def _read(self) -> None:
        """Carry out the commands of the launcher."""
        with contextlib.suppress(BlockingIOError):
            while data := self._control.recv(_MOST_BYTES):
                word, *numbers = data.decode().split()
                if word == "take":
                    self._take(int(numbers[0]), int(numbers[1]))
                elif word == "release":
                    if (server := self._servers.get(int(numbers[0]))) is not None:  # its job is not over
                        server.release()
                elif word == "close":
                    self._is_closing = True
                else:
                    self._end()
            self._end()  # the launcher has gone

    def _take(self, server: int, generation: int) -> None:
        settings = dataclasses.replace(self._settings, number=server, is_restart=generation > 0)
        self._servers[server] = placed = _PlacedServer(settings, self._handover, self._loop)
        placed.start()

    def _collect(self) -> None:
        """Handle the ends of servers."""
        for number, server in list(self._servers.items()):
            if not server.is_over:
                continue
            server.join()
            del self._servers[number]
            if server.problem:
                self._say(f"failed {number} {server.problem}")
                self._is_closing = True
            elif server.exit_code is None:
                self._say(f"released {number}")
            else:
                self._is_closing = True
                self._worst = max(self._worst, server.exit_code)
        if self._is_closing and not self._servers:
            self._exit_code = self._worst

    def _end(self) -> None:
        """End now; where servers are still here as SIGTERM would have ended it."""
        if not self._servers:
            self._exit_code = 0
            return
        logging.shutdown()
        os._exit(128 + signal.SIGTERM)
