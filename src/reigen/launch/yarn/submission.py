"""Submission of applications: Hadoop's YarnClient, and the connection to the application's master."""

from __future__ import annotations

import argparse
import math
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from reigen.errors import AuthenticationError, ConfigError, LaunchError, WireError
from reigen.launch.base import AgentCommand
from reigen.launch.env_export import select_exported
from reigen.launch.job_options import name_of_command
from reigen.launch.options import NetworkOptions, complain
from reigen.launch.submission import SubmissionRequest, SubmittedPhase, SubmittedState
from reigen.launch.yarn.containers import FileStore, as_buffer, make_launch_context
from reigen.launch.yarn.exits import explain_application
from reigen.launch.yarn.hadoop import Gateway, find_hadoop
from reigen.launch.yarn.job import (
    CLIENT_PURPOSE,
    CONFIGURATION_FILE,
    EXIT_CODE,
    JOB_FILE,
    MAX_MESSAGE_BYTES,
    STDERR,
    STDOUT,
    STOP,
    StoredFile,
    YarnJob,
)
from reigen.launch.yarn.requests import (
    MASTER_MB,
    ContainerSize,
    NodeSpace,
    SentFile,
    check_size,
    container_sizes,
    find_files,
    plan_by_host,
)
from reigen.net.auth import SECRET_BYTES, Identity, ProcessRole
from reigen.net.connection import Connection, open_connection

#: Hadoop waits a quarter of an hour for a ResourceManager that does not answer; here something is said before that.
_ANSWER_MILLISECONDS = 10_000
_MAX_WAIT = "yarn.resourcemanager.connect.max-wait.ms"
_CONNECT_SECONDS = 3.0
#: How long the application may take to end when its job has, or could have: its ranks' time to end is over.
_END_SECONDS = 20.0
#: How long a master whose connection was lost may not be reached before that is said.
_LOST_SECONDS = 5.0
_NOT_OURS = ("NEW", "NEW_SAVING", "SUBMITTED", "ACCEPTED")
_ENDED = ("FINISHED", "FAILED", "KILLED")
_STREAMS = {STDOUT: 1, STDERR: 2}


class YarnSubmission:
    """Job for YARN; a ``Submission``.

    Raises:
        ConfigError: there is no Hadoop client here, or the options make no sense.
    """

    def __init__(self, request: SubmissionRequest) -> None:
        self._request = request
        self._hadoop = find_hadoop(request.environ)
        self._worker, self._server = container_sizes(request.options)
        self._files = find_files(request.options, request.command, request.directory)
        self._python = _remote_python(request.arguments)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._stack = ExitStack()
        self._application: Any = None
        self._id = ""
        self._state = ""
        self._store: FileStore | None = None
        self._link: Connection | None = None
        #: The master's connection has been there, and when it was lost.
        self._had_link, self._lost_at = False, -math.inf
        self._has_complained = False
        #: The job's own, which comes before YARN's, and when it has come.
        self._exit_code: int | None = None
        self._ended_at = self._stopped_at = 0.0

    # ---------------------------------------------------------------- before

    @property
    def preview(self) -> str:
        """Description of the application that would be submitted."""
        request, options = self._request, self._request.options
        lines = [
            f"application {self._name!r} in queue {options.queue or 'default'}, by {self._hadoop.source}",
            f"  its master, in a container of {ContainerSize(MASTER_MB, 1)}: {' '.join(self._master_command)}",
            f"  {request.num_workers} workers of {self._worker}: {' '.join(request.command)}",
        ]
        lines += [f"  {request.num_servers} servers of {self._server}"] if request.num_servers else []
        lines += [
            f"  file {each.name}{' (unpacked)' if each.is_archive else ''}: {each.source}" for each in self._files
        ]
        return "\n".join(lines)

    @property
    def cancel_command(self) -> str:
        """Command of YARN's."""
        return f"yarn application -kill {self._id}" if self._id else ""

    @property
    def _name(self) -> str:
        return self._request.options.job_name or name_of_command(self._request.command)

    @property
    def _master_command(self) -> tuple[str, ...]:
        return (self._python, "-P", "-m", "reigen.launch.yarn.master")

    # ---------------------------------------------------------------- submission

    def submit(self) -> str:
        """Submit the application."""
        self._gateway = self._stack.enter_context(Gateway(self._hadoop, self._request.environ))
        with self._gateway.explained("the Hadoop client cannot be used"):
            self._connect()
        address = self._configuration.get("yarn.resourcemanager.address")
        with self._gateway.explained(
            f"YARN's ResourceManager (yarn.resourcemanager.address={address}) does not answer"
        ):
            created = self._client.createApplication()
            largest = created.getNewApplicationResponse().getMaximumResourceCapability()
            hosts = self._check(ContainerSize(largest.getMemorySize(), largest.getVirtualCores()))
            context = created.getApplicationSubmissionContext()
            self._application = context.getApplicationId()
            self._id = self._application.toString()
        self._stack.callback(self._remove_files)
        with self._gateway.explained("the job's files cannot be stored (--hdfs-tempdir names another place)"):
            files = self._store_files(hosts)
        with self._gateway.explained("YARN's ResourceManager does not take the application"):
            self._describe(context, files)
            self._client.submitApplication(context)
        self._state = "SUBMITTED"
        return f"YARN application {self._id}"

    def _connect(self) -> None:
        configuration = self._gateway.configuration({})
        limit = min(int(configuration.getLong(_MAX_WAIT, 900_000)), _ANSWER_MILLISECONDS)
        self._configuration = self._gateway.configuration({_MAX_WAIT: str(limit)})
        self._client = self._gateway.jvm.org.apache.hadoop.yarn.client.api.YarnClient.createYarnClient()
        self._client.init(self._configuration)
        self._client.start()

    def _check(self, maximum: ContainerSize) -> tuple[tuple[str, int], ...]:
        """Check sizes against the cluster's; returns hosts with numbers of workers, if each has one container."""
        request = self._request
        try:
            check_size("the application's master", "nothing: it is as small as it can be", _MASTER, maximum)
            check_size("a worker", "--worker-memory and --worker-cores", self._worker, maximum)
            if request.num_servers:
                check_size("a server", "--server-memory and --server-cores", self._server, maximum)
        except ConfigError as error:
            raise LaunchError(f"nothing was submitted: {error}") from None
        if not request.options.containers_by_host:
            return ()
        hosts, reason = plan_by_host(request.num_workers, self._worker, self._find_nodes(), maximum)
        if reason:
            raise LaunchError(f"--containers-by-host: {reason}; nothing was submitted")
        return tuple(hosts)

    def _find_nodes(self) -> list[NodeSpace]:
        running = self._gateway.jvm.org.apache.hadoop.yarn.api.records.NodeState.RUNNING
        states = self._gateway.enums(running)
        found = []
        for node in self._client.getNodeReports(states):
            all_of_it, used = node.getCapability(), node.getUsed()
            memory, cores = all_of_it.getMemorySize(), all_of_it.getVirtualCores()
            if used is not None:
                memory, cores = memory - used.getMemorySize(), cores - used.getVirtualCores()
            found.append(NodeSpace(node.getNodeId().getHost(), memory, cores))
        return found

    def _store_files(self, hosts: tuple[tuple[str, int], ...]) -> tuple[StoredFile, ...]:
        request = self._request
        self._store = store = FileStore(self._gateway, self._configuration, self._directory)
        store.make_directory()
        files = tuple(self._send(store, index, each) for index, each in enumerate(self._files))
        job = YarnJob(
            request.arguments,
            request.command,
            select_exported(request.environ, request.exports),
            request.exports,
            self._secret.hex(),
            request.num_workers,
            request.num_servers,
            self._worker,
            self._server,
            hosts,
            store.uri,
            files,
            self._agent_environ,
            NetworkOptions.from_environ(request.environ).tls,
        )
        path, stream = store.open(CONFIGURATION_FILE)
        self._gateway.configuration({}).writeXml(
            stream
        )  # as it is: the master waits for a ResourceManager that is away
        stream.close()
        own = (store.write(JOB_FILE, msgspec.json.encode(job)), store.describe(path, CONFIGURATION_FILE))
        return (*files, *own)

    @property
    def _directory(self) -> str:
        """URI of the directory for the job's files."""
        base = self._request.options.hdfs_tempdir
        if base is None:
            system = self._gateway.jvm.org.apache.hadoop.fs.FileSystem.get(self._configuration)
            base = system.getHomeDirectory().toString() + "/.reigen"
        return f"{base.rstrip('/')}/{self._id}"

    def _send(self, store: FileStore, index: int, file: SentFile) -> StoredFile:
        if file.is_remote:
            path = self._gateway.jvm.org.apache.hadoop.fs.Path(file.source)
            return store.describe(path, file.name, is_archive=file.is_archive)
        # under a name of its own, with the ending by which YARN knows how to unpack it
        stored = f"file-{index}-{Path(file.source).name}"
        return store.copy(file.source, stored, file.name, is_archive=file.is_archive)

    @property
    def _agent_environ(self) -> dict[str, str]:
        """Variables that YARN records: the place of Reigen, and the user where there is no Kerberos."""
        environ = dict(AgentCommand.with_modules_of(self._python, self._request.environ).environ)
        security = self._gateway.jvm.org.apache.hadoop.security.UserGroupInformation
        if not security.isSecurityEnabled():
            environ["HADOOP_USER_NAME"] = security.getCurrentUser().getShortUserName()
        return environ

    def _describe(self, context: Any, files: tuple[StoredFile, ...]) -> None:
        """Describe the application to YARN."""
        records = self._gateway.jvm.org.apache.hadoop.yarn.api.records
        context.setApplicationName(self._name)
        context.setApplicationType("REIGEN")
        if self._request.options.queue is not None:
            context.setQueue(self._request.options.queue)
        context.setMaxAppAttempts(1)  # what has run before cannot go on: the job begins anew, by hand
        context.setResource(records.Resource.newInstance(MASTER_MB, 1))
        container = make_launch_context(self._gateway, files, self._agent_environ, self._master_command)
        self._add_tokens(container)
        context.setAMContainerSpec(container)

    def _add_tokens(self, container: Any) -> None:
        """Give the master tokens for the filesystem, where the cluster asks for them."""
        jvm = self._gateway.jvm
        if not jvm.org.apache.hadoop.security.UserGroupInformation.isSecurityEnabled():
            return
        credentials = jvm.org.apache.hadoop.security.Credentials()
        renewer = self._configuration.get("yarn.resourcemanager.principal")
        system = jvm.org.apache.hadoop.fs.Path(self._directory).getFileSystem(self._configuration)
        system.addDelegationTokens(renewer, credentials)
        container.setTokens(as_buffer(self._gateway, credentials))

    # ---------------------------------------------------------------- while it runs

    def poll(self) -> SubmittedState:
        """Ask for the application's state, and connect to its master."""
        try:
            with self._gateway.explained("YARN's ResourceManager"):
                report = self._client.getApplicationReport(self._application)
                state, final = (
                    report.getYarnApplicationState().toString(),
                    report.getFinalApplicationStatus().toString(),
                )
                diagnostics, host, port = report.getDiagnostics() or "", report.getHost(), report.getRpcPort()
        except LaunchError:
            if self._exit_code is not None:  # the job itself has said how it has ended
                return SubmittedState(SubmittedPhase.ENDED, "", self._exit_code)
            raise
        self._state = state
        now = time.monotonic()
        if state in _ENDED:
            return self._ended(state, final, diagnostics)
        if self._exit_code is not None and now - self._ended_at > _END_SECONDS:
            return SubmittedState(SubmittedPhase.ENDED, "", self._exit_code)
        if self._stopped_at and now - self._stopped_at > self._request.grace_seconds + _END_SECONDS:
            self._kill()
        if state in _NOT_OURS:
            return SubmittedState(SubmittedPhase.WAITING, " ".join(diagnostics.split())[:300])
        if self._link is None and self._exit_code is None and port > 0:
            self._connect_to_master(host, port)
        return SubmittedState(SubmittedPhase.RUNNING)

    def _ended(self, state: str, final: str, diagnostics: str) -> SubmittedState:
        if self._exit_code is not None:  # whatever has become of the master since
            return SubmittedState(SubmittedPhase.ENDED, "", self._exit_code)
        code, reason = explain_application(state, final, diagnostics)
        if not self._had_link:
            reason += f"{'; ' if reason else ''}its output: yarn logs -applicationId {self._id}"
        return SubmittedState(SubmittedPhase.ENDED, reason, code)

    def _connect_to_master(self, host: str, port: int) -> None:
        network = NetworkOptions.from_environ(self._request.environ)
        me = Identity(ProcessRole.LAUNCHER, 0, CLIENT_PURPOSE)
        deadline = time.monotonic() + _CONNECT_SECONDS
        try:
            self._link = open_connection(
                (host, port), self._secret, me, MAX_MESSAGE_BYTES, deadline, network.make_tls()
            )
            self._link.keep_alive(network.peer_timeout_seconds)
        except (OSError, AuthenticationError, WireError) as error:
            # the connection of a master that ends is lost, too: YARN will say so
            if not self._has_complained and time.monotonic() - self._lost_at > _LOST_SECONDS:
                self._has_complained = True
                complain(
                    f"the application's master at {host}:{port} cannot be reached ({error}), so nothing is shown of "
                    f"what it prints; it is in yarn logs -applicationId {self._id} -follow"
                )
            return
        if self._had_link:
            complain(
                "the connection to the application's master was lost, and is there again: some of what it has printed "
                f"may be missing here; it is in yarn logs -applicationId {self._id}"
            )
        self._had_link, self._has_complained = True, False

    def read_output(self) -> Iterable[tuple[int, bytes]]:
        """Return what has come from the master."""
        if self._link is None:
            return ()
        found = []
        try:
            for message in self._link.read():
                kind, data = message[:1], message[1:]
                if kind == EXIT_CODE:  # what comes behind it is about the master's own end
                    self._exit_code, self._ended_at = int(data), time.monotonic()
                else:
                    found.append((_STREAMS[kind], data))
        except (OSError, AuthenticationError, WireError):
            self._link.close()
            self._link, self._lost_at = None, time.monotonic()
        return found

    def cancel(self) -> float:
        """Ask the master to end the job; where it cannot be asked, or does not, YARN ends it. Returns 0."""
        if self._link is not None:
            try:
                self._link.post(STOP)
                self._link.flush()
            except OSError:
                pass
            else:
                self._stopped_at = time.monotonic()
                return 0.0
        self._kill()
        return 0.0

    def _kill(self) -> None:
        with self._gateway.explained("YARN's ResourceManager"):
            self._client.killApplication(self._application)
        self._stopped_at = 0.0

    def close(self) -> Sequence[str]:
        """Remove the job's files, if nothing needs them any more, and end the Hadoop client."""
        if self._link is not None:
            self._link.close()
            self._link = None
        try:
            self._stack.close()
        except LaunchError as error:
            place = "" if self._store is None else f"; to remove them: {self._remove_command}"
            return (f"{error}{place}",)
        if self._goes_on and self._exit_code is None:
            return (f"the application removes its files when it ends; if YARN kills it: {self._remove_command}",)
        return ()

    @property
    def _goes_on(self) -> bool:
        """Return whether YARN has the application, and has not said that it has ended."""
        return bool(self._state) and self._state not in _ENDED

    @property
    def _remove_command(self) -> str:
        return "" if self._store is None else f"hadoop fs -rm -r {self._store.uri}"

    def _remove_files(self) -> None:
        if self._store is None or self._goes_on:
            return
        with self._gateway.explained("the job's files are left"):
            self._store.remove()


_MASTER = ContainerSize(MASTER_MB, 1)


def _remote_python(arguments: Sequence[str]) -> str:
    """Return the Python of the containers: that of ``--remote-python``, else this one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--remote-python", default=sys.executable)
    python: str = parser.parse_known_args(list(arguments))[0].remote_python
    return python
