"""Thin side of an elastic job: carries out what ``launch.elastic.job`` decides, beside the supervisor."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from reigen.cluster.environ import (
    CANDIDATE_VARIABLE,
    ELASTIC_CHANGE_KEY,
    ELASTIC_FINISHED_KEY,
    ELASTIC_LEAVING_KEY,
    ELASTIC_PAUSE_KEY,
    ELASTIC_STRAGGLER_KEY,
    ELASTIC_VIEW_KEY,
    SECRET_VARIABLE,
)
from reigen.cluster.membership.elastic.witness import check_witness_directory
from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.membership.views.history import CHANGE_NOTE_CODEC
from reigen.cluster.membership.views.record import MAX_VIEW_BYTES, View
from reigen.errors import ConfigError, LaunchError, WireError
from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_client import AgentClient, AgentPhase
from reigen.launch.agent.dial_calls import DialCalls, DialingOwner
from reigen.launch.agent.remote_start import find_scripts, is_dial_back, is_own_variable
from reigen.launch.base import AgentCommand, AgentStarter, JobPlan
from reigen.launch.elastic.continuation import ATTACH_SECONDS, THIS_HOST, ContinuedJob
from reigen.launch.elastic.discovery import (
    POLL_SECONDS,
    DiscoveryRuns,
    HostPolls,
    can_begin,
    describe_missing_slots,
    discovery_command,
    first_discovery_error,
)
from reigen.launch.elastic.job import (
    CallHost,
    ChangeExplained,
    ElasticEvent,
    ElasticInstruction,
    ElasticJobState,
    HostPrepared,
    HostsFound,
    HostUnusable,
    MemberFinished,
    MemberLeaving,
    MemberStraggles,
    PauseAnnounced,
    SayToUser,
    ServerProcessReport,
    ServersWanted,
    SlotStart,
    StartServers,
    StartSlots,
    TakenOverJob,
    TimePassed,
    ViewAnnounced,
    WorkerDeparted,
    WorkerEntered,
    WorkersBegan,
)
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.elastic.places import PlacedStart, make_voter_memory, place_starts, plan_starts
from reigen.launch.elastic.server_controls import ServerControls
from reigen.launch.elastic.server_placement import (
    ForgetCommands,
    ServerPlacement,
    StartServerProcess,
    TellServerProcess,
)
from reigen.launch.env_export import PACKAGE_DIRECTORY, select_exported
from reigen.launch.hosts import HostAssignment, HostInfo, choose_own_address
from reigen.launch.job_state import JobPhase, ProcessExited
from reigen.launch.local_plan import JobServices, ProcessSpec, plan_host
from reigen.launch.options import LaunchOptions
from reigen.launch.payload import PAYLOAD_CHUNK_BYTES
from reigen.launch.ps_processes import choose_restart_policy, list_ps_processes
from reigen.net.codec import MessageCodec
from reigen.net.connection import Connection
from reigen.net.interfaces import choose_address

_LOOPBACK = "127.0.0.1"
#: Seconds for a host to log in, to start Python, and to answer.
_CALL_SECONDS = 30.0
_PREPARE_SECONDS = 20.0
#: Most announcements that wait to be handled.
_MAX_ANNOUNCEMENTS = 1 << 12
#: No pause of members is longer.
_MAX_PAUSE_SECONDS = 1e6
_ANNOUNCED_KEYS = {
    ELASTIC_CHANGE_KEY,
    ELASTIC_FINISHED_KEY,
    ELASTIC_LEAVING_KEY,
    ELASTIC_PAUSE_KEY,
    ELASTIC_STRAGGLER_KEY,
    ELASTIC_VIEW_KEY,
}
_VIEW_CODEC: MessageCodec[View] = MessageCodec(View, MAX_VIEW_BYTES)


class ElasticOwner(DialingOwner, Protocol):
    """Supervisor, as the elastic part of it sees it."""

    #: Agent of this host, in a job that goes on without its launcher.
    here: AgentClient | None

    def turn(self, limit_seconds: float | None = None) -> None:
        """Wait for events, and handle them."""

    def handle(self, event: ElasticEvent | ProcessExited) -> None:
        """Have the job decide."""

    def add_agent(self, host: str, process: subprocess.Popen[bytes]) -> None:
        """Talk to an agent through this client process."""

    def attach_agent(self, host: str, connection: Connection) -> AgentClient:
        """Talk to an agent that listens, that of this host if the name is empty."""

    def start_slots(self, host: str, numbers: Sequence[int]) -> None:
        """Take note that these processes are on this host from now on."""

    def start_all(self, specs: Sequence[ProcessSpec]) -> None:
        """Start processes of this host."""

    def lose_host(self, host: str, reason: str) -> None:
        """Count a host, and what runs there, as lost."""

    def say(self, text: str) -> None:
        """Tell the user."""

    @property
    def excluded(self) -> set[int]:
        """Children of this process that are not the job's."""


class ElasticSupervision:
    """Hosts and processes of an elastic job.

    Args:
        options: of the job.
        elastic: what makes it elastic.
        plan: of its launcher.
        environ: of the processes.
        owner: the supervisor.
        continued: what another launcher needs, if the job goes on without this one.

    Attributes:
        job: decides.
        address: where the ranks find the launcher's service, once it is chosen.
    """

    def __init__(
        self,
        options: LaunchOptions,
        elastic: ElasticOptions,
        plan: JobPlan,
        environ: Mapping[str, str],
        owner: ElasticOwner,
        continued: ContinuedJob | None = None,
    ) -> None:
        self._options, self._elastic, self._plan, self._continued = options, elastic, plan, continued
        self._environ, self._owner = environ, owner
        self._ps_processes = list_ps_processes(options.first_ps_number, options.servers)
        numbers = [process.number for process in self._ps_processes]
        policy = choose_restart_policy(options.first_ps_number, options.servers, environ, is_elastic=True)
        chance = random.SystemRandom().random
        self._controls, placement = None, None
        if options.servers is not None and options.servers.max_num is not None:
            self._controls = ServerControls(environ)
            placement = ServerPlacement(options.servers.max_num, options.servers.num)
        #: server processes before they are started, by number
        self._server_specs: dict[int, ProcessSpec] = {}
        self.job = ElasticJobState(elastic, chance, time.monotonic(), numbers, policy.restarts, placement)
        self._announced: deque[tuple[str, bytes]] = deque(maxlen=_MAX_ANNOUNCEMENTS)
        self._services: JobServices | None = None
        self._heard_at: Callable[[int], float] = lambda agent: -inf
        #: Hosts as they were found last; None: nothing was found yet.
        self._found: tuple[tuple[str, int], ...] | None = None
        #: Since when they are as they are.
        self._found_at = time.monotonic()
        self._problem = ""
        self._voter = make_voter_memory()
        self._is_local: dict[str, bool] = {}
        #: When a host's agent must have come, or must have answered.
        self._deadlines: dict[str, float] = {}
        self._num_agents = 0
        self._agent_numbers: dict[str, int] = {}
        #: Variables of the ranks of each host in the plan; those of ranks whose numbers change are taken out.
        self._rank_environs: dict[str, Mapping[str, str | None]] = {
            each.host: dict.fromkeys(name for environ in each.rank_environs for name in environ)
            for each in plan.assignments
        }
        self._calls: DialCalls | None = None
        self._polls: HostPolls | None = None
        self._discovery: DiscoveryRuns | HostPolls | None = None
        if elastic.discovery is not None:
            self._discovery = DiscoveryRuns(
                discovery_command(elastic.discovery),
                environ,
                elastic.slots_per_host,
                owner.loop,
                self._on_hosts,
                self._on_problem,
                owner.excluded,
            )
        elif plan.poll is not None:
            self._discovery = self._polls = HostPolls(plan.poll, owner.loop, self._on_hosts)

    def close(self) -> None:
        """Stop discovery, and calls, and give up the voter's memory. May be called twice."""
        if self._discovery is not None:
            self._discovery.close()
        if self._calls is not None:
            self._calls.close()
        if self._controls is not None:
            self._controls.close()
        if self._voter >= 0:
            os.close(self._voter)
            self._voter = -1

    def remove_witness(self, directory: Path) -> None:
        """Remove the witness's files when the job has ended, where this host shares their directory."""
        if self.job.phase is JobPhase.DONE:
            shutil.rmtree(directory, ignore_errors=True)

    # ---------------------------------------------------------------- the beginning

    def find_hosts(self, fixed: Sequence[HostInfo]) -> str:
        """Find the first hosts, and call those that are others; returns the address at which they reach this one.

        Raises:
            LaunchError: the program that lists them fails.
            ConfigError: a host cannot be used by this launcher, or the witness's directory by this host.
        """
        if self._discovery is None:
            found: dict[str, int] = {}
            for host in fixed:
                found[host.name] = found.get(host.name, 0) + host.slots
            self._found = tuple(found.items())
        while self._found is None and not self._problem:
            self._owner.turn()
        if self._problem and self._found is None:
            raise first_discovery_error(self._elastic.discovery or "", self._problem)
        assert self._found is not None, "found, or a problem"
        witness_kind, _, directory = self._elastic.witness.partition(":")
        if witness_kind == "dir" and any(self._is_here(name) for name, _ in self._found):
            check_witness_directory(directory)  # other hosts find that out by themselves
        if self._polls is not None:
            self._await_slots()
        others = [name for name, _ in self._found if not self._is_here(name)]
        address = self._await_dialing(others)
        if self._calls is not None and others:
            self._dial(others)
        else:
            for name in others:
                self._call(name)
        until = time.monotonic() + self._call_seconds
        while any(self._is_awaited(name) for name in others) and (left := until - time.monotonic()) > 0:
            self._owner.turn(left)
        return address or self._choose_address(others)

    def _await_slots(self) -> None:
        """Wait for the slots that an engine grants one after the other; too few are the job's to judge."""
        until = time.monotonic() + self._elastic.start_timeout_seconds
        while (left := until - time.monotonic()) > 0:
            num_slots = sum(slots for _, slots in self._found or ())
            if can_begin(num_slots, self._elastic, time.monotonic() - self._found_at):
                return
            self._owner.turn(min(left, POLL_SECONDS))

    def _await_dialing(self, others: Sequence[str]) -> str:
        """Listen for agents that dial back; returns the address of this host for them, empty: there are none."""
        if not is_dial_back(self._plan.agents):
            return ""
        first = others[0] if others else ""
        towards = self._plan.listen_towards or self._address_of(first) or None
        network = self._options.network
        address, _ = choose_address(network.interfaces, towards)
        command = AgentCommand.with_modules_of(self._options.ssh.python, self._environ)
        self._calls = DialCalls(
            self._plan.agents,
            command,
            address,
            network,
            self._owner,
            lambda reason: self._owner.say(f"{reason}; the second one was refused"),
        )
        return address

    @property
    def _call_seconds(self) -> float:
        """Return how long an agent may take to come."""
        options = self._options
        wanted = (options.network.start_timeout_seconds, options.start_timeout_seconds or 0.0) if self._calls else ()
        return max(_CALL_SECONDS, *wanted, 0.0)

    def _address_of(self, host: str) -> str:
        polled = None if self._polls is None else self._polls.hosts.get(host)
        return (polled.address if polled is not None else "") or self._plan.addresses.get(host, host)

    def _is_awaited(self, host: str) -> bool:
        agent = self._owner.agents.get(host)
        return agent is not None and agent.phase is AgentPhase.STARTING

    def _choose_address(self, others: Sequence[str]) -> str:
        """Choose the address of the launcher's service; hosts that appear later have to reach it, too."""
        interfaces = self._options.network.interfaces
        agents = [self._owner.agents[name] for name in others if name in self._owner.agents]
        clients = {agent.host: agent.hello.client for agent in agents if agent.hello is not None}
        if clients:
            first = next(iter(clients))
            return choose_own_address(interfaces, self._address_of(first), list(clients.values()))[0]
        if interfaces and (others or self._elastic.discovery is not None):
            return choose_address(interfaces, _LOOPBACK)[0]
        for name in others:  # none has come; the job says why, and they may come later
            with suppress(ConfigError):
                return choose_own_address(interfaces, self._address_of(name), [])[0]
        return _LOOPBACK

    def begin(self, services: JobServices, heard_at: Callable[[int], float]) -> None:
        """Begin the job: the service runs, hosts were called, and signals are the job's from now on."""
        self._services, self._heard_at = services, heard_at
        assert self._found is not None, "find_hosts comes first"
        if self._continued is not None:
            self._continued.note_service(split_address(services.rendezvous)[0])
            if not self._continued.takes_over:
                self._prepare_here(self._continued)
        self._handle_hosts(self._found)

    def _prepare_here(self, continued: ContinuedJob) -> None:
        """Connect to the agent of this host, whose processes are not below this one."""
        record = next((agent for agent in continued.file.record.agents if agent.host == THIS_HOST), None)
        connection = None if record is None else continued.connect(record, self._options)
        if connection is None:
            raise LaunchError("the agent of this host has ended")
        self._prepare(self._owner.attach_agent(THIS_HOST, connection))

    def attach(self, service: str) -> TakenOverJob:
        """Take the agents of a launcher that was lost; returns the job as it is.

        Args:
            service: address of this launcher's service.

        Raises:
            LaunchError: no agent answers.
        """
        continued = self._continued
        assert continued is not None, "there is a record"
        clients: list[AgentClient] = []
        for each in continued.file.record.agents:
            connection = continued.connect(each, self._options)
            if connection is None:
                what = f"host {each.host}" if each.host else "this host"
                self._owner.say(f"the agent of {what} has gone, with its processes")
                continue
            client = self._owner.attach_agent(each.host, connection)
            self._num_agents += 1
            self._agent_numbers[each.host] = self._num_agents
            silence = self._options.network.silence_seconds
            client.send(agent_protocol.AttachRequest(service, self._num_agents, silence))
            clients.append(client)
        until = time.monotonic() + ATTACH_SECONDS
        while any(self._is_attaching(client) for client in clients) and (left := until - time.monotonic()) > 0:
            self._owner.turn(left)
        replies = {client.host: client.attached for client in clients if client.attached is not None}
        record = continued.file.record
        slots = tuple(SlotStart(each.number, each.incarnation, each.host, each.local_rank) for each in record.slots)
        running = {number for reply in replies.values() for number in reply.running}
        if not running:
            raise LaunchError(f"job {continued.name} has no processes any more")
        for client in clients:
            if client.attached is None:
                client.close()
        here = self._owner.here
        for slot in slots:
            if slot.slot in running:
                self._owner.start_slots(slot.host, [slot.slot])
        hosts = [name for name in {slot.host for slot in slots} if name in replies]
        hosts += [slot.host for slot in slots if here is not None and here.attached and self._is_here(slot.host)]
        finished = tuple(reply.finished for reply in replies.values() if reply.finished is not None)
        if directories := sorted({reply.output_directory for reply in replies.values() if reply.output_directory}):
            self._owner.say(f"output without a launcher is in {', '.join(directories)}")
        return TakenOverJob(
            slots, frozenset(running), tuple(dict.fromkeys(hosts)), record.epoch, record.members, finished
        )

    @staticmethod
    def _is_attaching(client: AgentClient) -> bool:
        return client.attached is None and client.phase is not AgentPhase.GONE

    # ---------------------------------------------------------------- one turn

    def turn(self) -> float | None:
        """Do the work that is due; returns the seconds until the next call."""
        waits = [] if self._discovery is None else [self._discovery.turn()]
        if self._services is None:
            return min((wait for wait in waits if wait is not None), default=None)
        self.read_announcements()
        now = time.monotonic()
        for host in [host for host, deadline in self._deadlines.items() if deadline <= now]:
            self._give_up(host, "it has not answered in time")
        if self.job.next_due() <= now:
            self._owner.handle(TimePassed())
        ends = [self.job.next_due(), *self._deadlines.values()]
        if (due := min(ends)) < inf:
            waits.append(max(0.0, due - time.monotonic()))
        return min((wait for wait in waits if wait is not None), default=None)

    def announce(self, key: str, value: bytes) -> None:
        """Take a value that was put at the rendezvous; called in the service's thread."""
        if key in _ANNOUNCED_KEYS:
            self._announced.append((key, value))
            self._owner.loop.wake()

    def read_announcements(self) -> None:
        """Handle what members have announced."""
        while self._announced:
            key, value = self._announced.popleft()
            try:
                event = parse_announcement(key, value)
            except (WireError, ValueError) as error:
                self._owner.say(f"what a process has put under {key!r} makes no sense: {error}")
                continue
            if self._continued is not None and isinstance(event, ViewAnnounced):
                self._continued.note_view(event.epoch, event.members)
            self._owner.handle(event)

    def execute(self, instruction: ElasticInstruction) -> None:
        """Carry out an instruction of the job's."""
        match instruction:
            case SayToUser(text):
                self._owner.say(text)
            case CallHost(host):
                try:
                    self._call(host)
                except LaunchError as error:  # the others go on
                    self._deadlines.pop(host, None)
                    self._owner.handle(HostUnusable(host, str(error)))
                else:
                    self._advance(host)
            case StartServers(num_workers):
                self._start_servers(num_workers)
            case StartServerProcess(process):
                self._owner.say(f"server process {process} is started")
                self._start_server_processes([self._server_specs[self._options.first_ps_number + process]])
            case TellServerProcess(process, text):
                assert self._controls is not None, "servers move"
                self._controls.tell(process, text)
            case ForgetCommands(process):
                assert self._controls is not None, "servers move"
                self._controls.forget(process)
            case StartSlots(starts):
                self._start(starts)

    # ---------------------------------------------------------------- hosts

    def _is_here(self, host: str) -> bool:
        """Return whether a host is this one; asked once, for names may have to be resolved."""
        if host not in self._is_local:
            self._is_local[host] = self._plan.is_local(host)
        return self._is_local[host]

    def _on_hosts(self, hosts: tuple[tuple[str, int], ...]) -> None:
        has_changed, self._found = hosts != self._found or bool(self._problem), hosts
        self._found_at = time.monotonic() if has_changed else self._found_at
        if self._problem:
            self._owner.say("the discovery script works again")
            self._problem = ""
        if self._services is not None and has_changed:
            self._handle_hosts(hosts)

    def _handle_hosts(self, hosts: tuple[tuple[str, int], ...]) -> None:
        is_needed = self.job.phase is JobPhase.RUNNING and not self.job.finished
        if is_needed and (shortage := describe_missing_slots(hosts, self._elastic)):
            self._owner.say(shortage)
        self._owner.handle(HostsFound(hosts))

    def _on_problem(self, problem: str) -> None:
        if self._found is not None and problem != self._problem:
            self._owner.say(
                f"the discovery script {self._elastic.discovery}: {problem}; the hosts that it named before are kept"
            )
        self._problem = problem

    def _call(self, host: str) -> None:
        """Get an agent onto another host, unless it is there."""
        agent = self._owner.agents.get(host)
        if self._is_here(host) or (agent is not None and agent.phase is not AgentPhase.GONE):
            return
        if self._plan.agents is None:
            return
        if agent is not None:
            agent.close()
        if self._calls is not None:
            self._dial([host])
            return
        starter: AgentStarter = self._plan.agents  # type: ignore[assignment]
        command = AgentCommand.with_modules_of(self._options.ssh.python, self._environ)
        self._deadlines[host] = time.monotonic() + _CALL_SECONDS
        self._owner.add_agent(host, starter.start_agent(host, command))

    def _dial(self, hosts: Sequence[str]) -> None:
        """Have agents started that dial back."""
        assert self._calls is not None, "they dial back"
        self._deadlines |= dict.fromkeys(hosts, time.monotonic() + self._call_seconds)
        try:
            self._calls.call(hosts, self._call_seconds)
        except LaunchError:
            for host in hosts:
                self._owner.agents[host].close()
            raise

    def _advance(self, host: str) -> None:
        """Do the next thing for a host that was called."""
        if self._is_here(host):
            if self._continued is not None and (self._owner.here is None or self._owner.here.phase is AgentPhase.GONE):
                self._owner.handle(HostUnusable(host, "the agent of this host has ended"))
            else:
                self._owner.handle(HostPrepared(host))
            return
        agent = self._owner.agents.get(host)
        if agent is None:
            self._owner.handle(HostUnusable(host, "this launcher starts nothing on hosts that are not this one"))
        elif agent.refused is not None:
            self._give_up(host, "")
        elif agent.phase is AgentPhase.CONNECTED:
            self._prepare(agent)
        elif agent.phase is AgentPhase.READY and self._deadlines.pop(host, None) is not None:
            self._owner.handle(HostPrepared(host))

    def stepped(self, agent: AgentClient) -> bool:
        """Handle an agent's progress; returns whether it was that of a host that is being called."""
        if self._continued is not None and agent.started is not None and agent.started.attach_at:
            host = THIS_HOST if agent is self._owner.here else agent.host
            self._continued.note_agent(host, agent.started.attach_at)
        if self._services is None or agent.host not in self._deadlines:
            return False
        self._advance(agent.host)
        return True

    def stop_calls(self) -> None:
        """Wait for no host any more: the job ends. An agent that has not come cannot say that it has nothing left."""
        for host in list(self._deadlines):
            self._owner.agents[host].close()
        self._deadlines.clear()

    def refused(self, agent: AgentClient) -> None:
        """Count a host as lost whose agent cannot start a process; it ends everything there."""
        if self._continued is not None:
            agent.send(agent_protocol.EndRequest())
        agent.close()
        reason = "" if agent.refused is None else agent.refused.reason
        self.lose_agent(agent, reason or "its agent has ended")

    def lose_agent(self, agent: AgentClient, reason: str) -> None:
        """Count the host of an agent as lost; that of this host has several names perhaps."""
        names = [agent.host]
        if agent is self._owner.here:
            names = [name for name in self.job.slots.hosts if self._is_here(name)]
        if self._continued is not None:
            self._continued.forget_agent(THIS_HOST if agent is self._owner.here else agent.host)
        for name in names:
            self._owner.lose_host(name, reason)

    def _give_up(self, host: str, reason: str) -> None:
        """Take note that a host cannot take part now."""
        self._deadlines.pop(host, None)
        agent = self._owner.agents[host]
        assert self._plan.agents is not None, "something has started this agent"
        problem = agent.problem(self._plan.agents, self._call_seconds)
        agent.close()
        advice = f" ({problem.advice})" if problem.advice else ""
        self._owner.handle(HostUnusable(host, (problem.what or reason) + advice))

    def _prepare(self, agent: AgentClient) -> None:
        """Have a host checked for everything that the job needs, and give it the payload."""
        assert self._services is not None, "the service has its address"
        if agent is not self._owner.here:
            self._deadlines[agent.host] = time.monotonic() + _PREPARE_SECONDS
        options, directory = self._options, self._plan.directory
        agent.send(
            agent_protocol.PrepareRequest(
                directory=str(Path.cwd()) if directory is None else directory,
                program=options.command[0],
                path=self._environ.get("PATH", ""),
                files=find_scripts(options.command),
                launcher=self._services.rendezvous,
                interfaces=options.network.interfaces,
                silence_seconds=options.network.silence_seconds,
            )
        )
        if options.inherited is None:
            return
        payload = options.inherited.payload
        size = os.fstat(payload).st_size
        for offset in range(0, size, PAYLOAD_CHUNK_BYTES):
            data = os.pread(payload, PAYLOAD_CHUNK_BYTES, offset)
            agent.send(agent_protocol.PayloadChunk(data, offset + len(data) == size))

    # ---------------------------------------------------------------- processes

    def _start(self, starts: Sequence[SlotStart]) -> None:
        if self._continued is not None:
            self._continued.note_starts(starts)
        placed = [
            replace(each, variables={**self._variables_of(start.host), **each.variables})
            for start, each in zip(starts, place_starts(starts, self._elastic, self._place_offsets()), strict=True)
        ]
        by_machine: dict[str, list[int]] = {}
        for index, start in enumerate(starts):
            by_machine.setdefault("" if self._is_here(start.host) else start.host, []).append(index)
            self._owner.start_slots(start.host, [start.slot])
        for machine, indices in by_machine.items():
            chosen = [placed[index] for index in indices]
            if machine:
                self._send_start(self._owner.agents[machine], machine, chosen)
            elif self._owner.here is not None:
                self._send_start(self._owner.here, THIS_HOST, chosen)
            else:
                self._start_here(chosen)

    def _start_servers(self, num_workers: int) -> None:
        """Start servers and scheduler, with the number of the first workers."""
        assert self._services is not None, "the job has begun"
        assert self._services.ps_job is not None, "it has servers"
        services = replace(self._services, ps_job=replace(self._services.ps_job, first_workers=num_workers))
        places = HostAssignment("", True, (), ps_processes=tuple(self._ps_processes))
        specs, _ = plan_host(places, self._options.processes, services, self._environ)
        self._server_specs = {spec.number: spec for spec in specs}
        self._start_server_processes([spec for spec in specs if spec.number in self.job.running])

    def _start_server_processes(self, specs: Sequence[ProcessSpec]) -> None:
        """Start servers, and the scheduler if it is one of these."""
        self._owner.start_slots("localhost", [spec.number for spec in specs])
        if self._controls is not None:
            specs = [self._controls.attach(spec) for spec in specs]
            for process, control in self._controls.open_now():
                self._owner.loop.watch(control, partial(self._read_server_process, process))
        self._owner.start_all(specs)

    def _read_server_process(self, process: int) -> None:
        if self._controls is not None:
            for text in self._controls.read(process):
                self._owner.handle(ServerProcessReport(process, text))

    def read_server_processes(self) -> None:
        """Handle the reports of server processes."""
        for process in [] if self._controls is None else self._controls.processes:
            self._read_server_process(process)

    def _variables_of(self, host: str) -> Mapping[str, str | None]:
        """Return variables of a host's ranks, above all others; None removes one."""
        if self._polls is not None and host in self._polls.hosts:
            return self._polls.hosts[host].environ
        return self._rank_environs.get(host, {})

    def _start_here(self, starts: Sequence[PlacedStart]) -> None:
        assert self._services is not None, "the job has begun"
        processes, num = self._options.processes, self._num_places("")
        for spec in plan_starts(starts, num, processes, self._services, self._environ, self._voter):
            try:
                self._owner.start_all([spec])
            except LaunchError as error:
                if CANDIDATE_VARIABLE not in spec.environ:
                    raise
                # the others go on
                self._owner.handle(ProcessExited(spec.number, error.exit_code, str(error)))

    def _send_start(self, agent: AgentClient, host: str, starts: Sequence[PlacedStart]) -> None:
        assert self._services is not None, "the job has begun"
        environ = dict(self._environ) if host == THIS_HOST else select_exported(self._environ, self._options.exports)
        if host != THIS_HOST and not self._plan.exports_environ:
            exports = self._options.exports
            environ = {name: text for name, text in environ.items() if name in exports or is_own_variable(name)}
        environ.pop(SECRET_VARIABLE, None)
        if host not in self._agent_numbers or (agent.started is None and agent.attached is None):
            self._num_agents += 1
            self._agent_numbers[host] = self._num_agents
            agent.last_received_elsewhere = partial(self._heard_at, self._num_agents)
        agent.send(
            agent_protocol.StartRequest(
                self._agent_numbers[host],
                HostAssignment(host, False, ()),
                self._options.processes,
                replace(self._services, secret=agent.mask(self._services.secret)),
                environ,
                PACKAGE_DIRECTORY,
                self._plan.kept_variables,
                tuple(starts),
                self._num_places(host),
                None if self._continued is None else self._continued.continuation(self._options),
            )
        )

    def _num_places(self, machine: str) -> int:
        """Return the greatest number of processes of a host at a time; empty: of this one."""
        hosts = self.job.slots.hosts.values()
        num = sum(
            host.num_slots for host in hosts if (not machine and self._is_here(host.name)) or host.name == machine
        )
        return max(1, min(num, self._elastic.max_members))

    def _place_offsets(self) -> dict[str, int]:
        """Return the number of each host's first place: several names may be this host's."""
        offsets, num_here = {}, 0
        for host in self.job.slots.hosts.values():
            offsets[host.name] = num_here if self._is_here(host.name) else 0
            num_here += len(host.slots) if self._is_here(host.name) else 0
        return offsets


def parse_worker_report(text: bytes) -> list[ElasticEvent]:
    """Parse lines of the scheduler of parameter servers (`cluster.environ.DEPARTURE_FD_VARIABLE`)."""
    events: list[ElasticEvent] = []
    for line in text.splitlines():
        match line.split():
            case [b"open"]:
                events.append(WorkersBegan())
            case [b"joined", slot, incarnation]:
                events.append(WorkerEntered(int(slot), int(incarnation)))
            case [b"left", slot, incarnation]:
                events.append(WorkerDeparted(int(slot), int(incarnation)))
            case [b"servers", num]:
                events.append(ServersWanted(int(num)))
    return events


def parse_announcement(key: str, value: bytes) -> ElasticEvent:
    """Parse an announcement of a member, from the rendezvous.

    Raises:
        WireError: it is no view, or no note about a change.
        ValueError: it is no number of a slot, or not what says which process leaves, or is late, or how long all wait.
    """
    if key == ELASTIC_FINISHED_KEY:
        return MemberFinished(int(value))
    if key == ELASTIC_LEAVING_KEY:
        slot, incarnation = map(int, value.split())
        return MemberLeaving(slot, incarnation)
    if key == ELASTIC_CHANGE_KEY:
        return ChangeExplained(CHANGE_NOTE_CODEC.decode(value))
    if key == ELASTIC_STRAGGLER_KEY:
        *numbers, work_seconds, median_seconds = value.split()
        slot, incarnation, step, num_steps, min_ranks = map(int, numbers)
        return MemberStraggles(
            slot, incarnation, step, num_steps, min_ranks, float(work_seconds), float(median_seconds)
        )
    if key == ELASTIC_PAUSE_KEY:
        return _parse_pause(value)
    view = _VIEW_CODEC.decode(value)
    members = tuple((member.slot, member.incarnation) for member in view.members)
    return ViewAnnounced(view.epoch, members, view.base.target, view.base.completes, tuple(sorted(view.spares)))


def _parse_pause(value: bytes) -> PauseAnnounced:
    seconds, num_bytes, *slots = value.split()
    pause = PauseAnnounced(float(seconds), int(num_bytes), tuple(map(int, slots)))
    if not (0 <= pause.seconds <= _MAX_PAUSE_SECONDS and 0 <= pause.num_bytes < 1 << 63):
        raise ValueError(f"a pause of {pause.seconds:.3g} s")
    return pause
