"""Stand-in ResourceManager and NodeManagers, which speak Hadoop's own RPC, with its tokens, and run containers.

The servers are those of the Hadoop client's jar (``YarnRPC.getServer``), in a JVM; what they answer is decided here.
Masters and nodes are asked for the tokens that YARN asks for: a client without them is refused. Nodes are addresses of
loopback; a container is a session of processes in a directory of its own, as of YARN's default executor.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlparse

from py4j.java_gateway import CallbackServerParameters, GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JJavaError

JARS = Path(find_spec("pyspark").submodule_search_locations[0]) / "jars"
MINIMUM_MB = 256
KILLED_BY_MASTER, ABORTED, PREEMPTED = -105, -100, -102
#: Seconds between SIGTERM and SIGKILL, as of YARN.
KILL_DELAY = 0.25

#: Compiled in the JVM: only there can a class be derived from Hadoop's, and be asked who calls.
_SECRETS = """
import org.apache.hadoop.security.token.*;
import org.apache.hadoop.yarn.security.*;
public class Secrets extends SecretManager {
    private final boolean ofMaster;
    private final javax.crypto.SecretKey key;
    public Secrets(boolean ofMaster, byte[] key) { this.ofMaster = ofMaster; this.key = createSecretKey(key); }
    public byte[] createPassword(TokenIdentifier id) { return createPassword(id.getBytes(), key); }
    public byte[] retrievePassword(TokenIdentifier id) { return createPassword(id); }
    public TokenIdentifier createIdentifier() {
        if (ofMaster) return new AMRMTokenIdentifier();
        return new NMTokenIdentifier();
    }
}
"""
_CALLER = """
import java.lang.reflect.*;
public class Caller implements InvocationHandler {
    private java.util.function.BiFunction handler;
    public Object invoke(Object proxy, Method method, Object[] arguments) throws Throwable {
        String user = org.apache.hadoop.security.UserGroupInformation.getCurrentUser().getUserName();
        try {
            return handler.apply(user + " " + method.getName(), arguments[0]);
        } catch (UndeclaredThrowableException error) {
            throw error.getCause();
        }
    }
    public Object implement(Class protocol, java.util.function.BiFunction handler) {
        this.handler = handler;
        return Proxy.newProxyInstance(protocol.getClassLoader(), new Class[] {protocol}, this);
    }
}
"""


@dataclass
class Container:
    number: int
    node: Node
    memory: int
    cores: int
    id: object
    priority: int = 0
    environ: dict[str, str] = field(default_factory=dict)
    command: str = ""
    directory: Path | None = None
    process: subprocess.Popen | None = None
    exit: int | None = None
    diagnostics: str = ""
    #: Exit status and diagnostics that take the place of the process's.
    forced: tuple[int, str] | None = None
    is_reported: bool = False

    @property
    def is_done(self) -> bool:
        return self.exit is not None


@dataclass
class Node:
    host: str
    memory: int
    cores: int
    port: int = 0
    server: object = None
    id: object = None
    is_lost: bool = False

    def used(self, containers: Sequence[Container]) -> tuple[int, int]:
        here = [each for each in containers if each.node is self and not each.is_done]
        return sum(each.memory for each in here), sum(each.cores for each in here)


@dataclass
class Application:
    id: object
    attempt: object
    number: int
    context: object = None
    state: str = "NEW"
    final: str = "UNDEFINED"
    diagnostics: str = ""
    host: str = "N/A"
    port: int = -1
    url: str = ""
    user: str = "root"
    started: int = 0
    #: What the master wants: (priority, host or *, memory, cores) -> number, and whether any other host will do.
    asks: dict[tuple, tuple[int, bool]] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    fresh: list[Container] = field(default_factory=list)
    master: Container | None = None
    response_id: int = 0
    known_nodes: set[str] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self.state in {"FINISHED", "FAILED", "KILLED"}


class StandIn:
    """YARN cluster of ``nodes``, {address of loopback: (memory in MB, cores)}, in ``directory``."""

    def __init__(self, directory: Path, nodes: Mapping[str, tuple[int, int]], *, maximum_mb: int = 4096) -> None:
        self.directory, self.maximum_mb = directory, maximum_mb
        self.maximum_cores = max(cores for _, cores in nodes.values())
        self.nodes = [Node(host, memory, cores) for host, (memory, cores) in nodes.items()]
        self.applications: dict[str, Application] = {}
        self.lock = threading.RLock()
        self._number = 0
        self._servers: dict[str, object] = {}
        #: Everything that YARN's own records and pages would show of applications and containers.
        self.records: list[str] = []

    def __enter__(self) -> Self:
        # a log4j of the tests' own: Hadoop's is silent
        port, token, self._jvm = launch_gateway(
            jarpath=str(next(JARS.glob("py4j*.jar"))),
            classpath=str(JARS / "*"),
            javaopts=["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
            die_on_exit=True,
            enable_auth=True,
            return_proc=True,
        )
        self.gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_convert=True),
            callback_server_parameters=CallbackServerParameters(port=0, daemonize=True, daemonize_connections=True),
        )
        java = self.gateway.java_gateway_server
        callbacks = self.gateway.get_callback_server().get_listening_port()
        java.resetCallbackClient(java.getCallbackClient().getAddress(), callbacks)
        self.jvm = self.gateway.jvm
        self._start_servers()
        return self

    def __exit__(self, *exception: object) -> None:
        for application in list(self.applications.values()):
            self._end_containers(application)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(not each.is_done for each in self.all_containers if each.process):
            time.sleep(0.02)
        self.gateway.shutdown()
        self._jvm.stdin.close()
        self._jvm.kill()
        self._jvm.wait()

    # ---------------------------------------------------------------- what tests do and look at

    @property
    def all_containers(self) -> list[Container]:
        with self.lock:
            return [each for application in self.applications.values() for each in application.containers.values()]

    @property
    def running(self) -> list[Container]:
        return [each for each in self.all_containers if each.process is not None and not each.is_done]

    def end_container(self, container: Container, status: int, diagnostics: str) -> None:
        """End a container as YARN itself does, with a status of its own."""
        with self.lock:
            container.forced = (status, diagnostics)
        self._kill(container)

    def lose_node(self, host: str) -> None:
        """Lose a node: its containers are killed at once, and nobody answers there any more."""
        node = next(each for each in self.nodes if each.host == host)
        with self.lock:
            node.is_lost = True
        node.server.stop()
        for each in self.running:
            if each.node is node:
                each.forced = (ABORTED, "Container released on a *lost* node")
                _signal(each, signal.SIGKILL)

    def stop_resource_manager(self) -> None:
        """End the ResourceManager's servers, as if its process had ended."""
        for server in self._servers.values():
            server.stop()
        self._servers.clear()

    def start_resource_manager(self) -> None:
        """Start the ResourceManager again at the same ports, with its memory."""
        self._serve_resource_manager(self._ports)

    # ---------------------------------------------------------------- servers

    def _start_servers(self) -> None:
        jvm = self.jvm
        secrets = self._compile("Secrets", _SECRETS).getConstructors()[0]
        arguments = self.gateway.new_array(jvm.java.lang.Object, 2)
        arguments[1] = os.urandom(32)
        arguments[0] = True
        self._master_secrets = secrets.newInstance(arguments)
        arguments[0] = False
        self._node_secrets = secrets.newInstance(arguments)
        self._rpc = jvm.org.apache.hadoop.yarn.ipc.YarnRPC.create(jvm.org.apache.hadoop.conf.Configuration())
        self._records = jvm.org.apache.hadoop.yarn.api.records
        self._messages = jvm.org.apache.hadoop.yarn.api.protocolrecords
        self._client_protocol, self._master_protocol = ClientProtocol(self), self._as_master_protocol()
        self._node_protocols = [NodeProtocol(self, node) for node in self.nodes]
        self._serve_resource_manager((0, 0))
        api = "org.apache.hadoop.yarn.api."
        for node, protocol in zip(self.nodes, self._node_protocols, strict=True):
            node.server = self._serve(api + "ContainerManagementProtocol", protocol, node.host, 0, self._node_secrets)
            node.port = node.server.getListenerAddress().getPort()
            node.id = self._records.NodeId.newInstance(node.host, node.port)

    def _compile(self, name: str, source: str) -> object:
        compiler = self.jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(self.jvm.java.lang.Thread.currentThread().getContextClassLoader())
        compiler.cook(source)
        return compiler.getClassLoader().loadClass(name)

    def _as_master_protocol(self) -> object:
        """Wrap the service for masters so that it hears who calls: whoever the token is for."""
        jvm = self.jvm
        protocol = jvm.java.lang.Class.forName("org.apache.hadoop.yarn.api.ApplicationMasterProtocol")
        # an instance without a handler, for py4j puts no Python object into an array of Java's
        wrapper = (
            self._compile("Caller", _CALLER)
            .getConstructors()[0]
            .newInstance(self.gateway.new_array(jvm.java.lang.Object, 0))
        )
        return wrapper.implement(protocol, MasterProtocol(self))

    def _serve_resource_manager(self, ports: tuple[int, int]) -> None:
        api, host = "org.apache.hadoop.yarn.api.", "127.0.0.1"
        client = self._serve(api + "ApplicationClientProtocol", self._client_protocol, host, ports[0], None)
        masters = self._serve(
            api + "ApplicationMasterProtocol", self._master_protocol, host, ports[1], self._master_secrets
        )
        self._servers = {"client": client, "masters": masters}
        self._ports = (client.getListenerAddress().getPort(), masters.getListenerAddress().getPort())

    def _serve(self, protocol: str, implementation: object, host: str, port: int, secrets: object) -> object:
        conf = self.jvm.org.apache.hadoop.conf.Configuration()
        if secrets is not None:
            conf.set("hadoop.security.authentication", "token")
        server = self._rpc.getServer(
            self.jvm.java.lang.Class.forName(protocol),
            implementation,
            self.jvm.java.net.InetSocketAddress(host, port),
            conf,
            secrets,
            4,
        )
        server.start()
        return server

    def write_configuration(self, directory: Path, **more: str) -> Path:
        """Write the configuration of a client of this cluster; returns its directory."""
        directory.mkdir(parents=True, exist_ok=True)
        client, masters = (f"127.0.0.1:{port}" for port in self._ports)
        settings = {
            "yarn.resourcemanager.address": client,
            "yarn.resourcemanager.scheduler.address": masters,
            "yarn.resourcemanager.connect.max-wait.ms": "600",
            "yarn.resourcemanager.connect.retry-interval.ms": "200",
            "yarn.client.nodemanager-connect.max-wait-ms": "2000",
            "yarn.client.nodemanager-connect.retry-interval-ms": "200",
            "ipc.client.connect.max.retries": "1",
            "ipc.client.connect.retry.interval": "200",
            **{name.replace("_", "."): value for name, value in more.items()},
        }
        (directory / "yarn-site.xml").write_text(_as_xml(settings))
        (directory / "core-site.xml").write_text(_as_xml({"fs.defaultFS": "file:///"}))
        return directory

    # ---------------------------------------------------------------- applications

    def fail(self, kind: str, message: str) -> Py4JJavaError:
        """Make one of YARN's exceptions, to be raised to the client."""
        exceptions = self.jvm.org.apache.hadoop.yarn.exceptions
        error = getattr(exceptions, kind)(message)
        return Py4JJavaError("refused by the stand-in", error)

    def find(self, application_id: object) -> Application:
        found = self.applications.get(application_id.toString())
        if found is None:
            raise self.fail("ApplicationNotFoundException", f"Application with id '{application_id}' doesn't exist")
        return found

    def new_application(self) -> Application:
        with self.lock:
            self._number += 1
            identity = self._records.ApplicationId.newInstance(1700000000000, self._number)
            attempt = self._records.ApplicationAttemptId.newInstance(identity, 1)
            application = Application(identity, attempt, self._number)
            self.applications[identity.toString()] = application
            return application

    def submit(self, context: object) -> None:
        with self.lock:
            application = self.find(context.getApplicationId())
            wanted = context.getResource() or context.getAMContainerResourceRequests()[0].getCapability()
            memory = self.check(wanted)
            application.context, application.state = context, "ACCEPTED"
            application.started = int(time.time() * 1000)
            container = self._allocate_one(application, memory, max(1, wanted.getVirtualCores()), None)
            if container is None:
                return  # it waits in the queue
            application.master = container
        self.launch(application, container, context.getAMContainerSpec())

    def check(self, resource: object) -> int:
        """Return the memory in MB that is granted for what is asked for, or raise YARN's exception."""
        wanted = resource.getMemorySize()
        if wanted > self.maximum_mb or resource.getVirtualCores() > self.maximum_cores:
            raise self.fail(
                "InvalidResourceRequestException",
                f"Invalid resource request! Cannot allocate containers as requested resource is greater than maximum "
                f"allowed allocation. Requested resource=<memory:{wanted}, vCores:{resource.getVirtualCores()}>, "
                f"maximum allowed allocation=<memory:{self.maximum_mb}, vCores:{self.maximum_cores}>",
            )
        return max(MINIMUM_MB, -(-wanted // MINIMUM_MB) * MINIMUM_MB)

    def _allocate_one(self, application: Application, memory: int, cores: int, host: str | None) -> Container | None:
        everything = self.all_containers
        for node in sorted(self.nodes, key=lambda each: each.used(everything)[0]):
            used_memory, used_cores = node.used(everything)
            fits = used_memory + memory <= node.memory and used_cores + cores <= node.cores
            if fits and not node.is_lost and host in {None, node.host}:
                number = len(application.containers) + 1
                identity = self._records.ContainerId.newContainerId(application.attempt, number)
                container = Container(number, node, memory, cores, identity)
                application.containers[identity.toString()] = container
                return container
        return None

    def schedule(self, application: Application) -> None:
        """Give the master's open requests what there is."""
        with self.lock:
            # hosts before "*", which counts them, too
            for key in sorted(application.asks, key=lambda each: each[1] == "*"):
                priority, host, memory, cores = key
                everywhere = (priority, "*", memory, cores)
                count, is_relaxed = application.asks[key]
                while count > 0 and (host != "*" or is_relaxed):
                    container = self._allocate_one(application, memory, cores, None if host == "*" else host)
                    if container is None:
                        break
                    container.priority = priority
                    application.fresh.append(container)
                    for name in {key, everywhere}:
                        number, others = application.asks[name]
                        application.asks[name] = number - 1, others
                    count -= 1

    # ---------------------------------------------------------------- containers

    def launch(self, application: Application, container: Container, spec: object) -> None:
        """Localize a container's resources, and start its command."""
        name = container.id.toString()
        home = self.directory / container.node.host / application.id.toString() / name
        logs = self.directory / "logs" / application.id.toString() / name
        for each in (home, logs):
            each.mkdir(parents=True, mode=0o750)
        environ = dict(spec.getEnvironment())
        container.environ, container.directory = environ, home
        commands = list(spec.getCommands())
        self.records += [name, repr(environ), repr(commands)]
        try:
            for link, resource in dict(spec.getLocalResources()).items():
                self._localize(home, link, resource)
        except OSError as error:
            self._finish(application, container, -1000, f"Localization failed: {error}")
            return
        own = self._own_environ(application, container, home, logs)
        self._write_tokens(application, home, spec.getTokens(), container is application.master)
        container.command = _expanded(" ".join(commands), logs)
        script = home / "launch_container.sh"
        lines = ["#!/bin/bash", *(f"export {key}={_quoted(value)}" for key, value in own.items())]
        lines += [f'export {key}="{_expandable(_expanded(value, logs))}"' for key, value in environ.items()]
        script.write_text("\n".join([*lines, f'exec /bin/bash -c "{_expandable(container.command)}"', ""]))
        script.chmod(0o700)
        container.process = subprocess.Popen(
            ["/bin/bash", str(script)],
            cwd=home,
            env={"PATH": os.environ["PATH"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=self._await, args=(application, container), daemon=True).start()

    def _own_environ(self, application: Application, container: Container, home: Path, logs: Path) -> dict[str, str]:
        node = container.node
        own = {
            "CONTAINER_ID": container.id.toString(),
            "NM_HOST": node.host,
            "NM_PORT": str(node.port),
            "NM_HTTP_PORT": "0",
            "LOCAL_DIRS": str(home.parent),
            "LOG_DIRS": str(logs),
            "PWD": str(home),
            "USER": application.user,
            "HOME": str(self.directory / "home"),
            "HADOOP_TOKEN_FILE_LOCATION": str(home / "container_tokens"),
            "HADOOP_CONF_DIR": str(self.write_configuration(self.directory / "node-conf")),
        }
        if java := os.environ.get("JAVA_HOME"):
            own["JAVA_HOME"] = java
        (self.directory / "home").mkdir(exist_ok=True)
        return own

    def _localize(self, home: Path, link: str, resource: object) -> None:
        """Copy a file to the node for its owner alone, and link it into the container's directory."""
        url = resource.getResource()
        source = Path(unquote(urlparse(url.toPath().toString()).path))
        facts = source.stat()
        if facts.st_size != resource.getSize() or int(facts.st_mtime * 1000) // 1000 != resource.getTimestamp() // 1000:
            raise OSError(f"Resource {source} changed on src filesystem")
        cache = home.parent / "filecache" / f"{home.name}-{link}"
        cache.parent.mkdir(mode=0o700, exist_ok=True)
        if resource.getType().toString() == "ARCHIVE":
            shutil.unpack_archive(source, cache, filter="data") if source.suffix != ".zip" else shutil.unpack_archive(
                source, cache
            )
        else:
            shutil.copyfile(source, cache)
            cache.chmod(0o500)
        (home / link).parent.mkdir(parents=True, exist_ok=True)
        (home / link).symlink_to(cache)

    def _write_tokens(self, application: Application, home: Path, tokens: object, is_master: bool) -> None:
        jvm = self.jvm
        credentials = jvm.org.apache.hadoop.security.Credentials()
        if tokens is not None:
            credentials.readTokenStorageStream(self.as_stream(tokens))
        if is_master:
            credentials.addToken(*self._master_token(application))
        path = jvm.org.apache.hadoop.fs.Path(f"file://{home}/container_tokens")
        credentials.writeTokenStorageFile(path, jvm.org.apache.hadoop.conf.Configuration())
        (home / "container_tokens").chmod(0o600)

    def as_stream(self, buffer: object) -> object:
        """Return what is left in a buffer of Java's as a stream of Java's."""
        begin = buffer.arrayOffset() + buffer.position()
        data = buffer.array()[begin : begin + buffer.remaining()]
        return self.jvm.java.io.DataInputStream(self.jvm.java.io.ByteArrayInputStream(data))

    def _master_token(self, application: Application) -> tuple[object, object]:
        jvm = self.jvm
        identifier = jvm.org.apache.hadoop.yarn.security.AMRMTokenIdentifier(application.attempt, 1)
        token = jvm.org.apache.hadoop.security.token.Token(identifier, self._master_secrets)
        return token.getService(), token

    def node_token(self, application: Application, node: Node) -> object:
        jvm = self.jvm
        identifier = jvm.org.apache.hadoop.yarn.security.NMTokenIdentifier(
            application.attempt, node.id, application.user, 1
        )
        token = jvm.org.apache.hadoop.security.token.Token(identifier, self._node_secrets)
        return self._records.NMToken.newInstance(node.id, self._as_record(token))

    def container_token(self, application: Application, container: Container) -> object:
        jvm = self.jvm
        identifier = jvm.org.apache.hadoop.yarn.security.ContainerTokenIdentifier(
            container.id,
            f"{container.node.host}:{container.node.port}",
            application.user,
            self._records.Resource.newInstance(container.memory, container.cores),
            int(time.time() * 1000) + 600_000,
            1,
            1700000000000,
            self._records.Priority.newInstance(0),
            0,
        )
        return self._records.Token.newInstance(identifier.getBytes(), "ContainerToken", os.urandom(20), "")

    def _as_record(self, token: object) -> object:
        kind, service = token.getKind().toString(), token.getService().toString()
        return self._records.Token.newInstance(token.getIdentifier(), kind, token.getPassword(), service)

    def _await(self, application: Application, container: Container) -> None:
        status = container.process.wait()
        status = 128 - status if status < 0 else status
        said = ""
        if status:
            said = f"Exception from container-launch.\nContainer id: {container.id}\nExit code: {status}\n"
        _signal(container, signal.SIGKILL)  # what is left of its process group
        self._finish(application, container, *(container.forced or (status, said)))

    def _finish(self, application: Application, container: Container, status: int, diagnostics: str) -> None:
        with self.lock:
            container.exit, container.diagnostics = status, diagnostics
            if container is not application.master or application.is_over:
                return
            if application.state != "FINISHING":
                application.state, application.final = "FAILED", "FAILED"
                application.diagnostics = (
                    f"Application {application.id} failed 1 times due to AM Container for {application.attempt} "
                    f"exited with  exitCode: {status}\nFailing this attempt.Diagnostics: {diagnostics}"
                )
            else:
                application.state = "FINISHED"
        self._end_containers(application)

    def _end_containers(self, application: Application) -> None:
        for each in list(application.containers.values()):
            if each.process is not None and not each.is_done:
                each.forced = each.forced or (KILLED_BY_MASTER, "Container killed by the ApplicationMaster.")
                self._kill(each)

    def kill_application(self, application: Application) -> None:
        with self.lock:
            if application.is_over:
                return
            application.state, application.final = "KILLED", "KILLED"
            application.diagnostics = "Application killed by user."
        self._end_containers(application)

    @staticmethod
    def _kill(container: Container) -> None:
        _signal(container, signal.SIGTERM)
        timer = threading.Timer(KILL_DELAY, _signal, (container, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    def stop_container(self, container: Container) -> None:
        if container.process is not None and not container.is_done:
            container.forced = container.forced or (KILLED_BY_MASTER, "Container killed by the ApplicationMaster.")
            self._kill(container)

    def status_of(self, container: Container) -> object:
        states = self.jvm.org.apache.hadoop.yarn.api.records.ContainerState
        state = states.COMPLETE if container.is_done else states.RUNNING
        status = -1000 if container.exit is None else container.exit
        return self._records.ContainerStatus.newInstance(container.id, state, container.diagnostics, status)

    def make_container(self, application: Application, container: Container) -> object:
        records = self._records
        return records.Container.newInstance(
            container.id,
            container.node.id,
            f"{container.node.host}:0",
            records.Resource.newInstance(container.memory, container.cores),
            records.Priority.newInstance(container.priority),
            self.container_token(application, container),
        )


class ClientProtocol:
    """``ApplicationClientProtocol`` of Hadoop: the ResourceManager's service for clients."""

    class Java:
        implements = ("org.apache.hadoop.yarn.api.ApplicationClientProtocol",)

    def __init__(self, cluster: StandIn) -> None:
        self._cluster = cluster

    def getNewApplication(self, request):
        cluster = self._cluster
        application = cluster.new_application()
        maximum = cluster._records.Resource.newInstance(cluster.maximum_mb, cluster.maximum_cores)
        return cluster._messages.GetNewApplicationResponse.newInstance(application.id, None, maximum)

    def submitApplication(self, request):
        self._cluster.submit(request.getApplicationSubmissionContext())
        return self._cluster._messages.SubmitApplicationResponse.newInstance()

    def forceKillApplication(self, request):
        application = self._cluster.find(request.getApplicationId())
        self._cluster.kill_application(application)
        return self._cluster._messages.KillApplicationResponse.newInstance(True)

    def getApplicationReport(self, request):
        application = self._cluster.find(request.getApplicationId())
        return self._cluster._messages.GetApplicationReportResponse.newInstance(self._report(application))

    def _report(self, application):
        records = self._cluster._records
        context = application.context
        with self._cluster.lock:
            return records.ApplicationReport.newInstance(
                application.id,
                application.attempt,
                application.user,
                context.getQueue() if context is not None else "default",
                (context.getApplicationName() if context is not None else None) or "",
                application.host,
                application.port,
                None,
                getattr(records.YarnApplicationState, _visible(application.state)),
                application.diagnostics,
                application.url,
                application.started,
                0,
                0,
                getattr(records.FinalApplicationStatus, application.final),
                None,
                "N/A",
                0.0,
                "YARN",
                None,
            )

    def getClusterMetrics(self, request):
        metrics = self._cluster._records.YarnClusterMetrics.newInstance(len(self._cluster.nodes))
        return self._cluster._messages.GetClusterMetricsResponse.newInstance(metrics)

    def getClusterNodes(self, request):
        cluster = self._cluster
        records, everything, found = cluster._records, cluster.all_containers, []
        for node in cluster.nodes:
            if not node.is_lost:
                memory, cores = node.used(everything)
                found.append(
                    records.NodeReport.newInstance(
                        node.id,
                        records.NodeState.RUNNING,
                        f"{node.host}:0",
                        "/default-rack",
                        records.Resource.newInstance(memory, cores),
                        records.Resource.newInstance(node.memory, node.cores),
                        0,
                        "",
                        0,
                    )
                )
        return cluster._messages.GetClusterNodesResponse.newInstance(found)

    def getQueueInfo(self, request):
        cluster = self._cluster
        name = request.getQueueName()
        if name not in {"default", "root.default"}:
            return cluster._messages.GetQueueInfoResponse.newInstance(None)
        info = cluster.jvm.org.apache.hadoop.yarn.util.Records.newRecord(
            cluster.jvm.java.lang.Class.forName("org.apache.hadoop.yarn.api.records.QueueInfo")
        )
        info.setQueueName(name)
        info.setQueueState(cluster._records.QueueState.RUNNING)
        return cluster._messages.GetQueueInfoResponse.newInstance(info)


class MasterProtocol:
    """``ApplicationMasterProtocol`` of Hadoop: the ResourceManager's service for masters."""

    class Java:
        implements = ("java.util.function.BiFunction",)

    def __init__(self, cluster: StandIn) -> None:
        self._cluster = cluster

    def apply(self, call, request):
        """Handle a call: ``call`` is the attempt whose token the caller has, and the method's name."""
        caller, _, method = call.partition(" ")
        attempt = self._cluster._records.ApplicationAttemptId.fromString(caller)
        handlers = {
            "registerApplicationMaster": self._register,
            "allocate": self._allocate,
            "finishApplicationMaster": self._finish,
        }
        return handlers[method](self._cluster.find(attempt.getApplicationId()), request)

    def _register(self, application, request):
        cluster = self._cluster
        with cluster.lock:
            application.state = "RUNNING"
            application.host, application.port = request.getHost(), request.getRpcPort()
            application.url = request.getTrackingUrl() or ""
        maximum = cluster._records.Resource.newInstance(cluster.maximum_mb, cluster.maximum_cores)
        return cluster._messages.RegisterApplicationMasterResponse.newInstance(
            None, maximum, {}, None, [], "default", []
        )

    def _allocate(self, application, request):
        cluster = self._cluster
        if application.is_over:
            raise cluster.fail("ApplicationAttemptNotFoundException", f"{application.attempt} doesn't exist")
        for ask in request.getAskList() or ():
            memory = cluster.check(ask.getCapability())
            key = (
                ask.getPriority().getPriority(),
                ask.getResourceName(),
                memory,
                ask.getCapability().getVirtualCores(),
            )
            if key[1] == "*" or any(node.host == key[1] for node in cluster.nodes):
                application.asks[key] = ask.getNumContainers(), ask.getRelaxLocality()
        for released in request.getReleaseList() or ():
            container = application.containers.get(released.toString())
            if container is not None and not container.is_done:
                if container.process is None:
                    cluster._finish(application, container, -100, "Container released by application")
                cluster.stop_container(container)
        cluster.schedule(application)
        return self._answer(application)

    def _answer(self, application):
        cluster = self._cluster
        with cluster.lock:
            fresh, application.fresh = application.fresh, []
            done = [
                each
                for each in application.containers.values()
                if each.is_done and not each.is_reported and each is not application.master
            ]
            for each in done:
                each.is_reported = True
            nodes = [each.node for each in fresh if each.node.host not in application.known_nodes]
            application.known_nodes |= {each.host for each in nodes}
            application.response_id += 1
            records = cluster._records
            return cluster._messages.AllocateResponse.newInstance(
                application.response_id,
                [cluster.status_of(each) for each in done],
                [cluster.make_container(application, each) for each in fresh],
                [],
                records.Resource.newInstance(0, 0),
                None,
                len(cluster.nodes),
                None,
                [cluster.node_token(application, each) for each in {node.host: node for node in nodes}.values()],
            )

    def _finish(self, application, request):
        cluster = self._cluster
        with cluster.lock:
            if not application.is_over:
                application.state = "FINISHING"
                application.final = request.getFinalApplicationStatus().toString()
                application.diagnostics = request.getDiagnostics() or ""
        return cluster._messages.FinishApplicationMasterResponse.newInstance(True)


class NodeProtocol:
    """``ContainerManagementProtocol`` of Hadoop: a NodeManager's service."""

    class Java:
        implements = ("org.apache.hadoop.yarn.api.ContainerManagementProtocol",)

    def __init__(self, cluster: StandIn, node: Node) -> None:
        self._cluster, self._node = cluster, node

    def _container(self, identity) -> tuple[Application, Container]:
        application = self._cluster.find(identity.getApplicationAttemptId().getApplicationId())
        return application, application.containers[identity.toString()]

    def startContainers(self, request):
        cluster, started = self._cluster, []
        for each in request.getStartContainerRequests():
            token = cluster.jvm.org.apache.hadoop.yarn.security.ContainerTokenIdentifier()
            token.readFields(cluster.as_stream(each.getContainerToken().getIdentifier()))
            application, container = self._container(token.getContainerID())
            if container.node is not self._node:
                raise cluster.fail("YarnException", f"{container.id} is not of this node")
            cluster.launch(application, container, each.getContainerLaunchContext())
            started.append(container.id)
        return cluster._messages.StartContainersResponse.newInstance({}, started, {})

    def stopContainers(self, request):
        stopped = list(request.getContainerIds())
        for identity in stopped:
            self._cluster.stop_container(self._container(identity)[1])
        return self._cluster._messages.StopContainersResponse.newInstance(stopped, {})

    def getContainerStatuses(self, request):
        statuses = [self._cluster.status_of(self._container(each)[1]) for each in request.getContainerIds()]
        return self._cluster._messages.GetContainerStatusesResponse.newInstance(statuses, {})


def _visible(state: str) -> str:
    return "RUNNING" if state == "FINISHING" else state


def _signal(container: Container, signum: int) -> None:
    if container.process is not None:
        with suppress(ProcessLookupError):
            os.killpg(container.process.pid, signum)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _expanded(text: str, logs: Path) -> str:
    """Put in what YARN puts into commands and variables."""
    text = text.replace("<LOG_DIR>", str(logs)).replace("<CPS>", ":")
    return re.sub(r"\{\{(\w+)\}\}", r"$\1", text)


def _expandable(text: str) -> str:
    """Quote as YARN does: variables are expanded, everything else is kept."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")


def _as_xml(settings: Mapping[str, str]) -> str:
    lines = [f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()]
    return "<configuration>" + "".join(lines) + "</configuration>"
