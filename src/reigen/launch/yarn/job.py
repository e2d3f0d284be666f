"""Messages between the parts of an application, and the file in the job's directory that describes it to its master."""

from __future__ import annotations

import msgspec

from reigen.launch.yarn.requests import ContainerSize

#: Names of the application's own files in the job's directory, and in containers.
JOB_FILE, CONFIGURATION_FILE, DIAL_FILE = "reigen-job.json", "reigen-hadoop.xml", "reigen-dial"
#: What the client says its connection to the master is for.
CLIENT_PURPOSE = "yarn client"
#: Largest message between master and client, and how much output waits for a client.
MAX_MESSAGE_BYTES, HISTORY_BYTES = 1 << 16, 1 << 20
#: First byte of a message to the client: output for descriptor 1 or 2, or the exit code; the only one to the master.
STDOUT, STDERR, EXIT_CODE, STOP = b"\1", b"\2", b"\3", b"stop"


class StoredFile(msgspec.Struct, frozen=True):
    """File in the job's directory, or elsewhere in the cluster, as YARN has to know it."""

    uri: str
    name: str
    is_archive: bool
    num_bytes: int
    #: In milliseconds since 1970, as the filesystem says it.
    modified: int


class YarnJob(msgspec.Struct, frozen=True):
    """Job of an application.

    Attributes:
        arguments: for `reigen launch` in the master, before the command.
        command: the user's.
        environ: the user's variables that travel, in no record of YARN's.
        exports: names of those that win over a host's own.
        secret: by which client and master know each other, in hexadecimal digits.
        num_workers, num_servers: of processes.
        worker, server: sizes of one.
        hosts: with numbers of workers in one container there; empty: one worker a container, wherever.
        directory: URI of the job's directory.
        files: for every container.
        agent_environ: variables without which an agent does not find Reigen.
        tls: client and master encrypt what they say.
    """

    arguments: tuple[str, ...]
    command: tuple[str, ...]
    environ: dict[str, str]
    exports: tuple[str, ...]
    secret: str
    num_workers: int
    num_servers: int
    worker: ContainerSize
    server: ContainerSize
    hosts: tuple[tuple[str, int], ...]
    directory: str
    files: tuple[StoredFile, ...]
    agent_environ: dict[str, str]
    tls: bool = False

    def __repr__(self) -> str:
        """Describe it without secrets."""
        return f"YarnJob({self.num_workers} workers, {self.num_servers} servers, {self.directory})"


class Grant(msgspec.Struct, frozen=True):
    """Container that YARN has given: its id, node, role, and how many processes it is for."""

    container: str
    node: str
    is_worker: bool
    slots: int


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Master to launcher: all containers are there."""

    grants: tuple[Grant, ...]


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Master to launcher: so many of the containers are there."""

    num_granted: int
    num_wanted: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Master to launcher: a container has ended."""

    container: str
    status: int
    diagnostics: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Master to launcher: YARN refuses the containers; why."""

    reason: str


class Unanswered(msgspec.Struct, frozen=True, tag=True):
    """Master to launcher: the ResourceManager does not answer, and is asked again; how."""

    reason: str


class StartAgent(msgspec.Struct, frozen=True, tag=True):
    """Launcher to master: start an agent in a container, with this command and dial text."""

    container: str
    argv: tuple[str, ...]
    text: str

    def __repr__(self) -> str:
        """Describe it without the ticket."""
        return f"StartAgent({self.container})"


class LookNow(msgspec.Struct, frozen=True, tag=True):
    """Launcher to master: ask YARN at once which containers have ended."""


MasterEvent = Granted | Waiting | Ended | Refused | Unanswered
LauncherRequest = StartAgent | LookNow
