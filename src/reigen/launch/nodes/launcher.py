"""Self-start: each node of a job runs the same `reigen run --nodes-from-env`, and they find each other.

a. Each node learns its number, how many there are, and how node 0 is reached, from its engine (`nodes.sources`). All
   have the same secret. Each node's ticket, and the ports where node 0 may listen, follow from it.
b. Node 0 is the launcher. It waits until the others have dialed, each with its number of slots
   (`launch.agent.gathering`), places the ranks, its own first, and has the others become agents of the job.
c. The others dial until node 0 takes them in, as long as the start may take: names may not be known yet. Then each is
   the agent of its node. Its ranks have its own environment, but for Reigen's and Horovod's variables.
d. In an elastic job node 0 waits for no node in particular: nodes come at any time, also anew under the number of one
   that has gone. The number of nodes is then the greatest that there may be.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from reigen.cluster.bootstrap.job_credentials import (
    SECRET_FILE_VARIABLE,
    JobCredentials,
    derive_job_secret,
    derive_ports,
)
from reigen.cluster.environ import SECRET_VARIABLE
from reigen.errors import ConfigError, LaunchError
from reigen.launch.agent.dial_back import DialText, text_of_attempt
from reigen.launch.agent.gathering import Gathering, SlotGathering
from reigen.launch.agent.remote_start import describe_waiting, format_problems
from reigen.launch.base import AgentCaller, AgentCommand, DialCall, HostProblem, JobPlan, PolledHost, assign_processes
from reigen.launch.hosts import HostInfo, is_own_address
from reigen.launch.metrics.options import TOKEN_VARIABLES
from reigen.launch.nodes.failure_file import FailureFile
from reigen.launch.nodes.secret_file import ensure_secret_file, remove_secret_file
from reigen.launch.nodes.sources import NodeJob, require_node_job
from reigen.launch.nodes.stop_signals import stop_by_signals
from reigen.launch.nodes.variables import count_gpus
from reigen.launch.options import JobListener, LaunchOptions, NetworkOptions, complain
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.supervisor import run_job
from reigen.net.interfaces import choose_address
from reigen.net.listener import join_address

_Made = TypeVar("_Made")
#: Name of this launcher.
NODES_LAUNCHER = "nodes"
#: Seconds of the engine's grace that are left for what comes after the ranks' end.
_LAST_SECONDS = 5.0
_NOTICE_SECONDS = 30.0
_DEFAULT_GRACE_SECONDS = 5.0


def read_file(path: str) -> str | None:
    """Read a file for a source; None: there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def count_slots(job: NodeJob, environ: Mapping[str, str], num_ranks: int | None) -> int:
    """Count the ranks that this node takes: as its engine says, or its share of those that the user names, or GPUs."""
    if job.slots is not None:
        return job.slots
    if num_ranks is None:
        return count_gpus(environ) or 1
    share, rest = divmod(num_ranks, job.size)
    return share + (job.index < rest)


class SelfStart:
    """Job that this node takes part in, before it is known whether as node 0.

    Args:
        environ: of this process.
        num_ranks: as the user says; None: as many as there are slots.

    Attributes:
        job: what the engine says.
        slots: this node's.
        num_ranks: of the job.

    Raises:
        ConfigError: no engine says which node this is, or its variables are not in order.
    """

    def __init__(self, environ: Mapping[str, str], num_ranks: int | None) -> None:
        self.job = require_node_job(environ, read_file)
        self.slots = count_slots(self.job, environ, num_ranks)
        self.is_counted = num_ranks is None
        self.num_ranks = self.slots * self.job.size if num_ranks is None else num_ranks
        if self.num_ranks < 1:
            raise ConfigError(f"the number of processes must be at least 1, not {self.num_ranks}")

    def run(self, options: LaunchOptions, environ: Mapping[str, str]) -> int:
        """Run the job on node 0, or be its agent on another; returns the exit code.

        Raises:
            ConfigError, LaunchError: it cannot be run, or a signal has come before it ran. The failure file has it.
        """
        environ = {**self.job.environ, **environ}
        failure = FailureFile(self.job.failure_file)
        try:
            with stop_by_signals():
                code = self._run(options, environ, failure)
        except Exception as error:
            failure.begin_with(f"reigen run: {error}\n")
            raise
        finally:
            if self.job.index == 0:
                self.forget_secret(environ)
        failure.close(code)
        return code

    def _run(self, options: LaunchOptions, environ: Mapping[str, str], failure: FailureFile) -> int:
        options = replace(
            options, network=NetworkOptions.from_environ(environ), grace_seconds=self._choose_grace(options)
        )
        if options.verbose:
            complain(f"launcher nodes: {self.job.source}, {self.slots} slots")
        tickets = None
        if self.job.size > 1:
            if self._makes_secret(environ):
                ensure_secret_file(self.job, self.start_seconds(options))
            tickets = _Tickets.of(self.job, environ)
        if self.job.index == 0:
            listener = JobListener(complain=failure.complain, described=failure.begin_with)
            return run_job(
                options, environ, listener, launcher=lambda options, environ: NodesLauncher(self, options, tickets)
            )
        assert tickets is not None, "node 0 is the only one of one"
        code = self._serve(options, environ, tickets)
        if code:
            ended = f"node {self.job.index} ({socket.gethostname()}) has ended with exit code {code}"
            failure.begin_with(f"reigen run: {ended}: its output, or node 0's, says why\n")
        return code

    def _serve(self, options: LaunchOptions, environ: Mapping[str, str], tickets: _Tickets) -> int:
        from reigen.launch.agent.__main__ import serve_by_dialing

        # what the options of the command come to, and -x: each node has its own
        os.environ.clear()
        not_passed_on = {SECRET_VARIABLE, *TOKEN_VARIABLES}
        os.environ.update({name: text for name, text in environ.items() if name not in not_passed_on})
        text = DialText(
            tuple(join_address(self.job.leader, port) for port in tickets.ports),
            tickets.of_node(self.job.index).hex(),
            self.job.index - 1,
            self.start_seconds(options),
            options.network.peer_timeout_seconds,
            options.network.tls,
            gathers=True,
            has_attempts=options.elastic is not None,
        )
        # a node that comes anew has no other way to differ from the one before it
        text = text_of_attempt(text, secrets.randbits(16))
        return serve_by_dialing(text, num_slots=self.slots)

    def forget_secret(self, environ: Mapping[str, str]) -> None:
        """Remove the secret that this node has made."""
        if self._makes_secret(environ):
            remove_secret_file(self.job)

    def _makes_secret(self, environ: Mapping[str, str]) -> bool:
        return self.job.makes_secret and not (environ.get(SECRET_VARIABLE) or environ.get(SECRET_FILE_VARIABLE))

    def start_seconds(self, options: LaunchOptions) -> float:
        """Return how long nodes may take to come."""
        wanted = options.start_timeout_seconds, options.network.start_timeout_seconds, self.job.resolve_seconds
        return max(seconds or 0.0 for seconds in wanted)

    def _choose_grace(self, options: LaunchOptions) -> float:
        """Give ranks the time that the engine gives the node, unless the user has said something else."""
        if self.job.grace_seconds is None or options.grace_seconds != _DEFAULT_GRACE_SECONDS:
            return options.grace_seconds
        return max(_DEFAULT_GRACE_SECONDS, self.job.grace_seconds - _LAST_SECONDS)


def find_secret(job: NodeJob, environ: Mapping[str, str]) -> tuple[JobCredentials, str]:
    """Find the secret that all nodes have, and say where it is.

    Raises:
        ConfigError: there is none, its file may be read by others, or not by this user.
    """
    _check_readable(environ.get(SECRET_FILE_VARIABLE) or job.secret_file)
    text = None if SECRET_FILE_VARIABLE in environ or not job.secret_file else read_file(job.secret_file)
    if text is not None and job.is_private and not environ.get(SECRET_VARIABLE):
        environ = {**environ, SECRET_VARIABLE: text.strip()}
        return JobCredentials.of(environ), f"the secret is in {job.secret_file}"
    if text is not None:
        environ = {**environ, SECRET_FILE_VARIABLE: job.secret_file}
    credentials = JobCredentials.of(environ)
    if credentials.secret is None:
        default = f", or {job.secret_file}" if job.secret_file else ""
        raise ConfigError(
            f"{job.source}: the nodes need a secret that all of them have, to know each other: 64 hexadecimal digits "
            f"in the file that {SECRET_FILE_VARIABLE} names{default} (openssl rand -hex 32)"
        )
    if environ.get(SECRET_VARIABLE):
        return credentials, f"{SECRET_VARIABLE} has the secret, which the engine shows to whoever may see the job"
    return credentials, f"the secret is in {environ[SECRET_FILE_VARIABLE]}"


def _check_readable(path: str) -> None:
    """Raise ConfigError where this user may not read the file of the secret."""
    try:
        if path:
            Path(path).open("rb").close()
    except PermissionError:
        raise ConfigError(
            f"user {os.geteuid()} may not read {path}: a pod whose user is not root needs securityContext: {{fsGroup: "
            "GROUP}, which lets the group read its Secrets (defaultMode: 0400 is root's alone); a file that is no "
            "Secret's must be this user's"
        ) from None
    except OSError:
        return  # who reads it says so


class _Tickets:
    """Tickets of the nodes, and ports of node 0, from the secret that all nodes have."""

    def __init__(self, secret: bytes, port: int | None) -> None:
        self._secret = secret
        self.ports = derive_ports(secret) if port is None else [port]

    @classmethod
    def of(cls, job: NodeJob, environ: Mapping[str, str]) -> _Tickets:
        """Read the secret; raises ConfigError where there is none."""
        credentials, where = find_secret(job, environ)
        assert credentials.secret is not None, "found before"
        if where.startswith(SECRET_VARIABLE + " "):
            complain(f"{where}: a file is better ({SECRET_FILE_VARIABLE})")
        port = credentials.port if credentials.port is not None else job.port
        return cls(derive_job_secret(credentials.secret, job.job_id), port)

    def of_node(self, index: int) -> bytes:
        """Derive a node's ticket."""
        return hmac.digest(self._secret, b"reigen node\0" + index.to_bytes(4), "sha256")


class NodesLauncher:
    """Launcher on node 0; both a ``Launcher`` and its ``DialBackStarter``."""

    remote_shell = ()

    def __init__(self, start: SelfStart, options: LaunchOptions, tickets: _Tickets | None) -> None:
        self.options, self._start, self._job, self._tickets = options, start, start.job, tickets
        self._gathering: Gathering | None = None
        #: The number of each node that dials, by its host's name in the plan.
        self._numbers: dict[str, str] = {}
        #: Of an elastic job: the address of this node, its nodes, and who calls them.
        self._address = ""
        self._slots: SlotGathering | None = None
        self._caller: AgentCaller | None = None

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Wait for the other nodes, and place the ranks: those of node 0 first."""
        own = self._job.names[0] if self._job.names else socket.gethostname()
        if self.options.elastic is not None:
            return self._plan_elastic(own, wait)
        hosts, addresses = [HostInfo(own, self._start.slots)], {}
        if self._tickets is not None:
            gathering = self._gather(self._tickets, wait)
            for number in self._indices():
                agent = gathering.agents[number]
                slots = agent.greeting.num_slots or 0
                name = self._name(int(number), agent.greeting.hostname, {host.name for host in hosts})
                hosts.append(HostInfo(name, slots))
                self._numbers[name] = number
                addresses[name] = agent.address.rpartition(":")[0].strip("[]")
            self._check_slots(hosts)
        hosts = [host for host in hosts if host.slots]
        assignments = assign_processes(self.options, hosts, lambda name: name == own)
        removed = dict.fromkeys(self._job.removed)
        assignments = [replace(each, rank_environs=tuple(dict(removed) for _ in each.ranks)) for each in assignments]
        return JobPlan(
            assignments,
            self,
            addresses,
            kept_variables=("",),
            describe_notice=lambda output: f"by its engine ({self._job.source.partition(' of ')[0]})",
            directory="",
            exports_environ=False,
        )

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        """Make the nodes that have ranks agents, and let go of the others, unless more may come."""
        if self._slots is not None:
            self._caller = caller
            for call in calls:
                self._slots.call(call.host, call.text)
            return
        assert self._gathering is not None, "nodes that are alone have no agents"
        for call in calls:
            self._gathering.call(self._numbers[call.host], call.text)
        self._gathering.close()
        self._start.forget_secret(os.environ)

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of a node as far as it is seen from here: the rest is its engine's."""
        return HostProblem(host, "the connection to its agent has ended", "see its own output")

    def close_agents(self) -> None:
        """Let go of all nodes."""
        self.close()

    def close(self) -> tuple[str, ...]:
        """Give nothing back."""
        if self._gathering is not None:
            self._gathering.close()
        if self._slots is not None:
            self._slots.close()
        return ()

    def _plan_elastic(self, own: str, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan of an elastic job: nodes come while it runs.

        Raises:
            ConfigError: the user has named hosts; those of the engine cannot be others.
        """
        elastic = self.options.elastic
        if self.options.hosts or (elastic is not None and elastic.discovery is not None):
            raise ConfigError(
                "--nodes-from-env: an elastic job's hosts are the nodes that have come; leave -H, --hostfile and "
                "--host-discovery-script out"
            )
        if self._tickets is not None:
            self._address = self._find_own_address(time.monotonic() + self._start.start_seconds(self.options), wait)
        return JobPlan(
            (),
            self,
            kept_variables=("",),
            describe_notice=lambda output: f"by its engine ({self._job.source.partition(' of ')[0]})",
            directory="",
            exports_environ=False,
            poll=lambda loop: self._poll(own, loop),
            is_local=lambda name: name == own,
            listen_towards=self._address,
        )

    def _poll(self, own: str, loop: LauncherLoop) -> list[PolledHost]:
        """Return this node, and those that have come."""
        removed = dict.fromkeys(self._job.removed)
        hosts = [PolledHost(own, self._start.slots, self._address, removed)]
        if self._tickets is None:
            return hosts
        if self._slots is None:
            self._slots = self._listen_for_slots(own, loop, self._tickets)
        return hosts + [PolledHost(each.name, each.num_slots, each.address, removed) for each in self._slots.hosts()]

    def _listen_for_slots(self, own: str, loop: LauncherLoop, tickets: _Tickets) -> SlotGathering:
        network, names = self.options.network, self._indices()
        return self._listen_at(
            tickets.ports,
            lambda port: SlotGathering(
                loop,
                (self._address, port),
                names,
                self._start.start_seconds(self.options),
                lambda host: self._caller is not None and self._caller.has_agent(host),
                secrets={name: tickets.of_node(int(name)) for name in names},
                tls=network.make_tls(),
                peer_timeout_seconds=network.peer_timeout_seconds,
                on_problem=complain,
                reserved=(own,),
            ),
        )

    def _indices(self) -> list[str]:
        return [str(index) for index in range(1, self._job.size)]

    def _name(self, index: int, host_name: str, taken: set[str]) -> str:
        name = self._job.names[index] if self._job.names else host_name
        return name if name not in taken else f"{name}#{index}"

    def _check_slots(self, hosts: Sequence[HostInfo]) -> None:
        """Raise LaunchError where the number of ranks was counted here, and other nodes count otherwise."""
        first = hosts[0]
        other = next((host for host in hosts if host.slots != first.slots), None)
        if self._start.is_counted and other is not None:
            raise LaunchError(
                f"nodes have different numbers of slots: {first.name} {first.slots}, {other.name} {other.slots}; say "
                "how many processes there are: -np N"
            )

    def _gather(self, tickets: _Tickets, wait: Callable[[float], None]) -> Gathering:
        seconds, begin = self._start.start_seconds(self.options), time.monotonic()
        address = self._find_own_address(begin + seconds, wait)
        gathering = self._gathering = self._listen(address, tickets, begin + seconds - time.monotonic())
        next_notice = begin + _NOTICE_SECONDS

        def look(problems: Mapping[str, str]) -> None:
            nonlocal next_notice
            if problems:
                table = [HostProblem(f"node {number}", reason) for number, reason in problems.items()]
                raise LaunchError(format_problems(table, self._job.size - 1, "other nodes"))
            if (now := time.monotonic()) >= next_notice:
                next_notice = now + _NOTICE_SECONDS
                missing = [f"node {number}" for number in gathering.missing()]
                complain(describe_waiting(missing, now - begin, max(0.0, begin + seconds - now)))

        gathering.wait(wait, look)
        if missing := gathering.missing():
            table = [HostProblem(f"node {number}", f"it has not come within {seconds:g} s") for number in missing]
            raise LaunchError(format_problems(table, self._job.size - 1, "other nodes"))
        return gathering

    def _listen(self, address: str, tickets: _Tickets, seconds: float) -> Gathering:
        network = self.options.network
        return self._listen_at(
            tickets.ports,
            lambda port: Gathering(
                (address, port),
                self._indices(),
                seconds,
                secrets={number: tickets.of_node(int(number)) for number in self._indices()},
                tls=network.make_tls(),
                peer_timeout_seconds=network.peer_timeout_seconds,
            ),
        )

    def _listen_at(self, ports: Sequence[int], make: Callable[[int], _Made]) -> _Made:
        """Listen at the first port that is free."""
        for port in ports:
            try:
                return make(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        listed = ", ".join(map(str, ports))
        raise LaunchError(f"ports {listed} of this node are all in use: name another, REIGEN_RENDEZVOUS_PORT")

    def _find_own_address(self, deadline: float, wait: Callable[[float], None]) -> str:
        """Find the address by which the others reach node 0, as soon as a name of it is known here."""
        interfaces = self.options.network.interfaces
        if interfaces:
            return choose_address(interfaces, None)[0]
        names, next_notice = (self._job.leader, socket.gethostname()), time.monotonic() + _NOTICE_SECONDS
        while (now := time.monotonic()) < deadline:
            if (found := next(filter(None, map(_resolve_own, names)), None)) is not None:
                return found
            if now >= next_notice:
                next_notice = now + _NOTICE_SECONDS
                complain(f"waiting for {self._job.leader}: its name is not known yet, or is not this host's")
            wait(0.5)
        raise LaunchError(f"{explain_address(self._job.leader)}: name an interface, --network-interfaces")


def explain_address(leader: str) -> str:
    """Explain why node 0 cannot be reached under its name, as far as this host knows."""
    addresses = _resolve(leader)
    if addresses and all(map(_is_loopback, addresses)):
        return f"{leader} is {addresses[0]} here, where no other host reaches node 0 (lo serves nodes of one host)"
    return f"{leader} is no address of this host, though it is node 0"


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _resolve_own(name: str) -> str | None:
    """Return an address of this host's by which others reach it under this name; None: there is none yet."""
    outer = (each for each in _resolve(name) if not _is_loopback(each) and is_own_address(each))
    return next(outer, None)
