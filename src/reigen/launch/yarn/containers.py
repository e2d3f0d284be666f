"""Containers of an application, as its master gets and starts them: Hadoop's AMRMClient and NMClient, in a thread."""

from __future__ import annotations

import queue
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reigen.errors import ConfigError, LaunchError
from reigen.launch.yarn.hadoop import Gateway
from reigen.launch.yarn.job import (
    DIAL_FILE,
    Ended,
    Grant,
    Granted,
    LauncherRequest,
    LookNow,
    MasterEvent,
    Refused,
    StartAgent,
    StoredFile,
    Unanswered,
    Waiting,
    YarnJob,
)
from reigen.launch.yarn.requests import ContainerSize, check_size

#: Seconds between two heartbeats while containers are awaited, and afterwards; and between two lines about waiting.
_WAITING_SECONDS, _RUNNING_SECONDS, _NEWS_SECONDS = 0.25, 1.0, 30.0
#: How long the ResourceManager may not answer, as in Hadoop's own clients.
_LOST_SECONDS = 900.0
_LOG = "1><LOG_DIR>/stdout 2><LOG_DIR>/stderr"
#: Priorities of what is asked for. Requests of several sizes need several, or the last one counts.
_SERVERS, _WORKERS = 1, 2
_MASTER_TOKEN = "YARN_AM_RM_TOKEN"
#: Exit status of a container that has not been started.
_NOT_STARTED = -1000


class FileStore:
    """Files of a job in a filesystem of Hadoop's, for their owner alone."""

    def __init__(self, gateway: Gateway, configuration: Any, directory: str) -> None:
        self._jvm = gateway.jvm
        self._directory = self._jvm.org.apache.hadoop.fs.Path(directory)
        self._system = self._directory.getFileSystem(configuration)
        self.uri = self._system.makeQualified(self._directory).toString()

    def _permission(self, mode: int) -> Any:
        return self._jvm.org.apache.hadoop.fs.permission.FsPermission(f"{mode:o}")

    def make_directory(self) -> None:
        """Make the directory."""
        self._system.mkdirs(self._directory, self._permission(0o700))
        self._system.setPermission(self._directory, self._permission(0o700))

    def open(self, name: str) -> tuple[Any, Any]:
        """Create a file; returns its path and Java's stream, which is the caller's to close."""
        path = self._jvm.org.apache.hadoop.fs.Path(self._directory, name)
        stream = self._system.create(path, True)  # nobody else can open the directory
        self._system.setPermission(path, self._permission(0o600))
        return path, stream

    def write(self, name: str, data: bytes, link: str = "") -> StoredFile:
        """Write a file, which has the name ``link`` in a container."""
        path, stream = self.open(name)
        stream.write(data)
        stream.close()
        return self.describe(path, link or name)

    def copy(self, local: str, name: str, link: str, *, is_archive: bool) -> StoredFile:
        """Copy a file of this host."""
        path = self._jvm.org.apache.hadoop.fs.Path(self._directory, name)
        source = self._jvm.org.apache.hadoop.fs.Path(f"file://{local}")
        self._system.copyFromLocalFile(False, True, source, path)
        self._system.setPermission(path, self._permission(0o600))
        return self.describe(path, link, is_archive=is_archive)

    def describe(self, path: Any, link: str, *, is_archive: bool = False) -> StoredFile:
        """Describe a file as YARN has to know it."""
        system = path.getFileSystem(self._system.getConf())
        status = system.getFileStatus(path)
        uri = system.makeQualified(path).toString()
        return StoredFile(uri, link, is_archive, status.getLen(), status.getModificationTime())

    def remove(self) -> None:
        """Remove the directory, if it is there."""
        self._system.delete(self._directory, True)


def make_launch_context(
    gateway: Gateway, files: tuple[StoredFile, ...], environ: dict[str, str], argv: tuple[str, ...]
) -> Any:
    """Make YARN's description of a process in a container. It is recorded: no secret is in it but YARN's own tokens."""
    records = gateway.jvm.org.apache.hadoop.yarn.api.records
    resources = {}
    for file in files:
        url = records.URL.fromPath(gateway.jvm.org.apache.hadoop.fs.Path(file.uri))
        kind = records.LocalResourceType.ARCHIVE if file.is_archive else records.LocalResourceType.FILE
        visibility = records.LocalResourceVisibility.APPLICATION
        resources[file.name] = records.LocalResource.newInstance(url, kind, visibility, file.num_bytes, file.modified)
    command = f"exec {shlex.join(argv)} {_LOG}"
    return records.ContainerLaunchContext.newInstance(resources, environ, [command], None, _tokens(gateway), None)


def _tokens(gateway: Gateway) -> Any:
    """Return this user's tokens of the cluster's services, without the master's own; None: there are none."""
    security = gateway.jvm.org.apache.hadoop.security
    passed, num = security.Credentials(), 0
    own = security.UserGroupInformation.getCurrentUser().getCredentials()
    for token in gateway.jvm.java.util.ArrayList(own.getAllTokens()):
        if token.getKind().toString() != _MASTER_TOKEN:
            passed.addToken(token.getService(), token)
            num += 1
    return as_buffer(gateway, passed) if num else None


def as_buffer(gateway: Gateway, credentials: Any) -> Any:
    """Write credentials as YARN wants them."""
    stream = gateway.jvm.java.io.ByteArrayOutputStream()
    credentials.writeTokenStorageToStream(gateway.jvm.java.io.DataOutputStream(stream))
    return gateway.jvm.java.nio.ByteBuffer.wrap(stream.toByteArray())


@dataclass(frozen=True, slots=True)
class _Ask:
    """Container that is asked for: its priority, size, and host; empty: any."""

    priority: int
    size: ContainerSize
    host: str = ""


class Containers:
    """Containers of a job.

    Args:
        gateway: to Hadoop's client.
        configuration: the cluster's.
        job: what is asked for.
        address: at which the client reaches the master.
        tell: called with events, in a thread of this object's; must not wait.
    """

    def __init__(
        self,
        gateway: Gateway,
        configuration: Any,
        job: YarnJob,
        address: tuple[str, int],
        tell: Callable[[MasterEvent], None],
    ) -> None:
        self._gateway, self._job, self._address, self._tell = gateway, job, address, tell
        self._records = gateway.jvm.org.apache.hadoop.yarn.api.records
        client = gateway.jvm.org.apache.hadoop.yarn.client.api
        self._manager, self._nodes = client.AMRMClient.createAMRMClient(), client.NMClient.createNMClient()
        for each in (self._manager, self._nodes):
            each.init(configuration)
            each.start()
        self._store = FileStore(gateway, configuration, job.directory)
        self._requests: queue.SimpleQueue[LauncherRequest | None] = queue.SimpleQueue()
        self._open: dict[int, list[tuple[_Ask, Any]]] = {}
        #: What has been given for what was asked (`_ask`), and YARN's own object.
        self._granted: dict[str, tuple[Grant, _Ask, Any]] = {}
        self._num_wanted = 0
        #: All containers were there at once, and the launcher knows them.
        self._is_complete = False
        self._answered = time.monotonic()
        self._is_unanswered = False
        self._is_registered = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="containers")

    def start(self) -> None:
        """Register with the ResourceManager, and ask for the containers."""
        self._thread.start()

    def request(self, request: LauncherRequest) -> None:
        """Have a request of the launcher's carried out. Never waits."""
        self._requests.put(request)

    def finish(self, exit_code: int, diagnostics: str, *, is_cancelled: bool, timeout_seconds: float) -> None:
        """End all containers, and the application.

        Raises:
            LaunchError: the ResourceManager does not answer.
        """
        self._requests.put(None)
        self._thread.join(timeout_seconds)
        with suppress(LaunchError), self._gateway.explained("the job's files"):
            self._store.remove()
        with self._gateway.explained("the end of the application"):
            self._nodes.stop()
            if self._is_registered:
                statuses = self._records.FinalApplicationStatus
                status = statuses.KILLED if is_cancelled else statuses.FAILED if exit_code else statuses.SUCCEEDED
                self._manager.unregisterApplicationMaster(status, diagnostics, "")
            self._manager.stop()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            with self._gateway.explained("YARN's ResourceManager refuses this application's master"):
                self._register()
            self._serve()
        except (LaunchError, ConfigError) as error:
            self._refuse(str(error))
        except Exception as error:  # noqa: BLE001  nobody else would hear of it
            self._refuse(f"the application's master has failed: {type(error).__name__}: {error}")

    def _refuse(self, reason: str) -> None:
        """Tell why there are no containers, and start none any more."""
        self._tell(Refused(reason))
        while (request := self._requests.get()) is not None:
            if isinstance(request, StartAgent):
                self._tell(Ended(request.container, _NOT_STARTED, reason))

    def _register(self) -> None:
        response = self._manager.registerApplicationMaster(*self._address, "")
        self._is_registered = True
        largest = response.getMaximumResourceCapability()
        maximum = ContainerSize(largest.getMemorySize(), largest.getVirtualCores())
        job = self._job
        for index, (host, num) in enumerate(job.hosts):
            size = job.worker.times(num)
            check_size(f"a container of {num} workers", "--worker-memory", size, maximum)
            self._ask(_Ask(_WORKERS + index, size, host))
        for _ in range(0 if job.hosts else job.num_workers):
            self._ask(_Ask(_WORKERS, job.worker))
        for _ in range(job.num_servers):
            self._ask(_Ask(_SERVERS, job.server))
        self._num_wanted = sum(map(len, self._open.values()))

    def _ask(self, ask: _Ask) -> None:
        request = self._gateway.jvm.org.apache.hadoop.yarn.client.api.AMRMClient.ContainerRequest
        resource = self._records.Resource.newInstance(ask.size.memory_mb, ask.size.cores)
        nodes = self._gateway.strings([ask.host]) if ask.host else None
        asked = request(resource, nodes, None, self._records.Priority.newInstance(ask.priority), not ask.host)
        self._manager.addContainerRequest(asked)
        self._open.setdefault(ask.priority, []).append((ask, asked))

    def _serve(self) -> None:
        next_news = time.monotonic() + _NEWS_SECONDS
        while True:
            self._try_to_beat()
            if not self._is_complete and len(self._granted) == self._num_wanted:
                self._is_complete = True
                self._tell(Granted(tuple(grant for grant, *_ in self._granted.values())))
            if not self._is_complete and time.monotonic() > next_news:
                next_news += _NEWS_SECONDS
                self._tell(Waiting(len(self._granted), self._num_wanted))
            if not self._carry_out(_RUNNING_SECONDS if self._is_complete else _WAITING_SECONDS):
                return

    def _carry_out(self, seconds: float) -> bool:
        """Carry out requests for so long; returns whether to go on."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:  # many requests do not keep the heart from beating
            try:
                request = self._requests.get(timeout=left)
            except queue.Empty:
                return True
            match request:
                case None:
                    return False
                case LookNow():
                    return True
                case StartAgent():
                    self._start(request)
        return True

    def _try_to_beat(self) -> None:
        """Send a heartbeat; one that fails is followed by others, for YARN ends a master that sends none."""
        try:
            with self._gateway.explained("YARN's ResourceManager"):
                self._beat()
        except LaunchError as error:
            if self._gateway.has_ended:
                raise
            away = time.monotonic() - self._answered
            if away > _LOST_SECONDS:
                raise LaunchError(f"{error}; it has not answered for {away:.0f} s") from None
            if not self._is_unanswered:
                self._is_unanswered = True
                self._tell(Unanswered(str(error)))
        else:
            self._answered, self._is_unanswered = time.monotonic(), False

    def _beat(self) -> None:
        response = self._manager.allocate(0.5)
        for container in response.getAllocatedContainers():
            self._take(container)
        for status in response.getCompletedContainersStatuses():
            identity = status.getContainerId().toString()
            if identity not in self._granted:
                continue
            if self._is_complete:
                self._tell(Ended(identity, status.getExitStatus(), status.getDiagnostics() or ""))
            else:  # one that is not used for some minutes, as the others have not come, is taken back: ask for another
                _, ask, _ = self._granted.pop(identity)
                self._ask(ask)

    def _take(self, container: Any) -> None:
        priority = container.getPriority().getPriority()
        asked = self._open.get(priority)
        if not asked:  # one too many, which happens: YARN is told so, or it would count as used
            self._manager.releaseAssignedContainer(container.getId())
            return
        ask, request = asked.pop()
        self._manager.removeContainerRequest(request)
        is_worker = priority >= _WORKERS
        slots = dict(self._job.hosts).get(container.getNodeId().getHost(), 1) if is_worker else 1
        identity = container.getId().toString()
        self._granted[identity] = Grant(identity, container.getNodeId().getHost(), is_worker, slots), ask, container

    def _start(self, request: StartAgent) -> None:
        *_, container = self._granted[request.container]
        try:
            with self._gateway.explained("its node does not start it"):
                dial = self._store.write(f"{DIAL_FILE}-{request.container}", request.text.encode() + b"\n", DIAL_FILE)
                context = make_launch_context(
                    self._gateway, (*self._job.files, dial), self._job.agent_environ, request.argv
                )
                self._nodes.startContainer(container, context)
        except LaunchError as error:
            self._tell(Ended(request.container, _NOT_STARTED, str(error)))
