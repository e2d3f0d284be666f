"""Launcher's side of a job that goes on when its launcher is lost: its record, and agents that listen for others."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import AuthenticationError, LaunchError, WireError
from reigen.files import open_to_append
from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_protocol import AgentReply
from reigen.launch.agent.lines import DialedLine
from reigen.launch.elastic.job import SlotStart
from reigen.launch.job_directory import AGENT_LOG, AgentRecord, JobFile, SlotRecord
from reigen.launch.metrics.options import TOKEN_VARIABLES
from reigen.launch.options import LaunchOptions
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.net.auth import SECRET_BYTES, Identity, ProcessRole
from reigen.net.connection import Connection, open_connection
from reigen.resources.limits import explain_limit

#: Host of the record of the agent of the launcher's own host.
THIS_HOST = ""
_AGENT_SECONDS = 20.0
#: How long an agent may take to answer a launcher that takes another one's place.
ATTACH_SECONDS = 5.0


class AttachedLine(DialedLine):
    """Line through a connection that the launcher has made to an agent, which knows the job's secret already."""

    def __init__(self, loop: LauncherLoop, connection: Connection) -> None:
        super().__init__(loop)
        self._to_attach = connection

    def open(self, on_reply: Callable[[AgentReply], None], on_end: Callable[[str], None]) -> None:
        """Begin to read."""
        super().open(on_reply, on_end)
        self.attach(self._to_attach)

    def mask(self, secret: bytes) -> bytes:
        """Return nothing: it need not travel."""
        return b""


class ContinuedJob:
    """A job that goes on without its launcher.

    Args:
        file: record of the job, which this launcher holds.
        takes_over: another launcher has begun it.

    Attributes:
        file, takes_over: as above.
        secret: the job's.
    """

    def __init__(self, file: JobFile, *, takes_over: bool = False) -> None:
        self.file, self.takes_over = file, takes_over
        #: The record stays when this launcher ends: others may yet find the processes.
        self.keeps_record = takes_over
        self.secret = bytes.fromhex(file.record.secret)

    @classmethod
    def create(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Begin a job; see `JobFile.create`."""
        return cls(JobFile.create(tuple(arguments), environ, secrets.token_bytes(SECRET_BYTES)))

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.file.record.job

    @property
    def generation(self) -> int:
        """Number of this launcher."""
        return self.file.record.generation

    def output_directory(self, options: LaunchOptions) -> Path:
        """Return where output goes without a launcher."""
        return Path.cwd() / (options.output_directory or self.file.directory / "output")

    def continuation(self, options: LaunchOptions) -> agent_protocol.Continuation:
        """Return what agents need to go on."""
        output = "" if options.output_directory is None else str(self.output_directory(options))
        return agent_protocol.Continuation(self.name, self.generation, output, options.num_ranks)

    def start_local_agent(self, environ: Mapping[str, str]) -> None:
        """Start the agent of this host, unless it is there; it is below no process of the launcher's.

        To be called before this process takes in orphans.

        Raises:
            LaunchError: it cannot be started.
        """
        if any(agent.host == THIS_HOST and self.is_reachable(agent) for agent in self.file.record.agents):
            return
        try:
            with os.fdopen(open_to_append(self.file.directory / AGENT_LOG, mode=0o600), "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "reigen.launch.agent", "--listen"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={name: text for name, text in environ.items() if name not in TOKEN_VARIABLES},
                )
                out, _ = process.communicate(f"{self.secret.hex()}\n".encode(), _AGENT_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            what = explain_limit(error).strerror if isinstance(error, OSError) else "it does not answer"
            raise LaunchError(f"the agent of this host cannot be started: {what}") from None
        if process.returncode or not out.strip():
            words = (self.file.directory / AGENT_LOG).read_text(errors="replace").strip()
            raise LaunchError(f"the agent of this host cannot be started: {words or 'it does not say why'}")
        self.note_agent(THIS_HOST, out.decode().strip())

    @staticmethod
    def is_reachable(agent: AgentRecord) -> bool:
        """Return whether something listens where an agent did."""
        try:
            socket.create_connection(split_address(agent.address), ATTACH_SECONDS).close()
        except OSError:
            return False
        return True

    def connect(self, agent: AgentRecord, options: LaunchOptions) -> Connection | None:
        """Connect to an agent, as this launcher; None: it has gone, or does not obey this launcher."""
        me = Identity(ProcessRole.LAUNCHER, self.generation, agent_protocol.ATTACH_PURPOSE)
        limit, until = agent_protocol.MAX_FRAME_BYTES, time.monotonic() + ATTACH_SECONDS
        try:
            address, tls = split_address(agent.address), options.network.make_tls()
            connection = open_connection(address, self.secret, me, limit, until, tls)
            connection.keep_alive(options.network.peer_timeout_seconds)
        except (OSError, AuthenticationError, WireError):
            return None
        return connection

    def has_agent(self, host: str, options: LaunchOptions) -> bool:
        """Return whether the agent of a host lives: one that a launcher has lost goes on by itself.

        A launcher that started other processes in the places of those would be a second one.
        """
        for agent in self.file.record.agents:
            if agent.host == host and (connection := self.connect(agent, options)) is not None:
                connection.close()  # the agent has seen this generation before, and does not obey it anew
                return True
        return False

    # ---------------------------------------------------------------- the record

    def note_agent(self, host: str, address: str) -> None:
        """Keep where an agent can be reached."""
        others = tuple(agent for agent in self.file.record.agents if agent.host != host)
        if (agent := AgentRecord(host, address)) not in self.file.record.agents:
            self.file.update(agents=(*others, agent))

    def forget_agent(self, host: str) -> None:
        """An agent has gone."""
        others = tuple(agent for agent in self.file.record.agents if agent.host != host)
        if others != self.file.record.agents:
            self.file.update(agents=others)

    def note_starts(self, starts: Sequence[SlotStart]) -> None:
        """Keep which processes are about to be started: no other one ever gets the same incarnation of a place."""
        slots = {slot.number: slot for slot in self.file.record.slots}
        for start in starts:
            slots[start.slot] = SlotRecord(start.slot, start.host, start.local_rank, start.incarnation)
        self.file.update(slots=tuple(slots[number] for number in sorted(slots)))

    def note_view(self, epoch: int, members: tuple[tuple[int, int], ...]) -> None:
        """Keep who is in the latest view."""
        self.file.update(epoch=epoch, members=members)

    def note_service(self, host: str) -> None:
        """Keep at which address of this host the launcher's service is reached."""
        self.file.update(service=host)

    def note_metrics(self, address: str) -> None:
        """Keep where the job's metrics are served."""
        self.file.update(metrics=address)

    def end(self) -> None:
        """The job has ended with this launcher: nothing is left to take over."""
        self.file.remove()

    def describe_start(self, options: LaunchOptions) -> str:
        """Describe the way to go on when this launcher will have gone, for the user."""
        output = self.output_directory(options)
        return (
            f"job {self.name}: if this launcher is lost, it goes on, with its output in {output}; "
            f"`reigen attach {self.name}` takes its place"
        )

    def describe_loss(self, options: LaunchOptions) -> str:
        """Describe the ways to go on when this launcher has gone, for the user."""
        output = self.output_directory(options)
        return (
            f"job {self.name} goes on without a launcher, unless its first ranks were still being started; its output "
            f"is in {output}; `reigen attach {self.name}` takes the launcher's place"
        )
