"""Thin side of the launcher: time, signals, output and processes around ``launch.job_state``, which decides."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Self

from reigen.cluster.environ import PREFIXED_VARIABLE
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.elastic.witness import witness_directory
from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.metrics import METRICS_SECRET_VARIABLE, METRICS_SERVICE_VARIABLE
from reigen.errors import LaunchError, ReigenError, format_ranks
from reigen.launch import job_state
from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_client import AgentClient, AgentPhase
from reigen.launch.agent.lines import DialedLine, PipedLine
from reigen.launch.agent.remote_start import RemoteStart
from reigen.launch.base import DEFAULT_LAUNCHER, HostProblem, JobPlan, Launcher, LauncherFactory, find_launcher
from reigen.launch.elastic.continuation import AttachedLine, ContinuedJob
from reigen.launch.elastic.job import (
    CallHost,
    ElasticEvent,
    ElasticInstruction,
    ElasticJobState,
    HostNoticed,
    SayToUser,
    StartServers,
    StartSlots,
    members_in_order,
)
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.elastic.places import without_elastic_variables
from reigen.launch.elastic.server_placement import ForgetCommands, StartServerProcess, TellServerProcess
from reigen.launch.elastic.supervision import ElasticSupervision, parse_worker_report
from reigen.launch.exit_report import ProcessLocations, describe_exit, format_exit_report
from reigen.launch.hosts import HostInfo
from reigen.launch.job_options import name_of_command
from reigen.launch.local_plan import TERMINAL_VARIABLE, JobServices, ProcessSpec, output_variables, plan_host
from reigen.launch.metrics.service import MetricsService, report_environ
from reigen.launch.metrics.top import ComplaintQueue, LiveTable
from reigen.launch.metrics.waiting import describe_waiting
from reigen.launch.options import JobListener, LaunchOptions, complain, notice_grace_seconds
from reigen.launch.output.output_mux import OutputMux
from reigen.launch.ps_processes import (
    NODE_HOST_VARIABLE,
    PsJobSpec,
    choose_restart_policy,
    name_ps_processes,
    servers_keep_values,
)
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.host_processes import HostProcesses, LocalProcesses
from reigen.launch.supervision.process_tree import signal_name
from reigen.launch.supervision.scheduler_pipes import LOOK_SECONDS, SchedulerPipes
from reigen.launch.supervision.spawn import reserve_port
from reigen.launch.supervision.watchdog import PASSED_SIGNALS, STOP_SIGNALS, run_under_watchdog
from reigen.net.auth import SECRET_BYTES
from reigen.net.connection import Connection
from reigen.resources.limits import explain_limit

#: Seconds that the agents may take to end when everything else has.
_SHUTDOWN_SECONDS = 5.0
#: Seconds that client processes have to end by themselves when the job could not be started, or is given up.
_LAST_SECONDS = 2.5
#: A scheduler, which writes twice a second, is not killed for a shorter silence.
_LEAST_SILENCE_SECONDS = 2.0
_LOOPBACK = "127.0.0.1"


def run_job(
    options: LaunchOptions,
    environ: Mapping[str, str],
    listener: JobListener | None = None,
    *,
    launcher: str | LauncherFactory = DEFAULT_LAUNCHER,
    continued: ContinuedJob | None = None,
) -> int:
    """Run a job to its end; returns its exit code. Call it before any thread is started.

    Nothing that the job started is left when this returns, on any host that can be reached, unless the job goes on
    without its launcher (``continued``), and this one was lost. The default listener writes to stderr.

    Raises:
        LaunchError: the kernel refused a process, or the launcher cannot be used.
        ConfigError: there is no such launcher, or it cannot do what is asked for: the hosts have too few slots.
    """
    listener = listener or JobListener()
    try:
        make = find_launcher(launcher) if isinstance(launcher, str) else launcher
        engine = make(options, environ)
        try:
            if continued is not None:
                continued.start_local_agent(environ)
            return run_under_watchdog(
                lambda end: _run_supervised(engine, environ, end, listener, continued),
                listener.complain,
                lambda: "" if continued is None else continued.describe_loss(options),
            )
        finally:
            _close_launcher(engine, listener)
    except OSError as error:
        raise LaunchError(f"cannot start: {explain_limit(error)}") from error
    except ReigenError:
        if continued is not None and not continued.takes_over:
            continued.end()
        raise


def _close_launcher(launcher: Launcher, listener: JobListener) -> None:
    for message in launcher.close():
        listener.complain(message)


def _run_supervised(
    launcher: Launcher,
    environ: Mapping[str, str],
    watchdog_pipe: int,
    listener: JobListener,
    continued: ContinuedJob | None,
) -> int:
    options = launcher.options
    kept = {name: text for name, text in environ.items() if name not in {TERMINAL_VARIABLE, PREFIXED_VARIABLE}}
    environ = without_elastic_variables(kept) | output_variables(is_terminal=sys.stdout.isatty(), prefix=options.prefix)
    environ = report_environ(options.metrics, environ)
    with ExitStack() as stack:
        stack.callback(_close_launcher, launcher, listener)
        supervisor = stack.enter_context(Supervisor(options, watchdog_pipe, listener, environ, continued))
        plan = supervisor.allocate(launcher)
        if options.elastic is not None:
            listener.started(_start_elastic(options, options.elastic, plan, environ, supervisor, stack, continued))
        elif plan.processes is not None:
            supervisor.start_all(_take_reports(options, plan.processes, plan.report_address, supervisor, stack))
            supervisor.is_starting = False
        else:
            listener.started(_start_ranks(options, plan, environ, supervisor, stack))
        return supervisor.run()


def _take_reports(
    options: LaunchOptions, specs: Sequence[ProcessSpec], address: str, supervisor: Supervisor, stack: ExitStack
) -> Sequence[ProcessSpec]:
    """Have ranks that an engine starts report their metrics, if they are wanted; returns the engine's processes."""
    if not options.metrics.is_wanted:
        return specs
    secret, network = secrets.token_bytes(SECRET_BYTES), options.network
    server = ControlService(
        secret,
        address,
        peer_timeout_seconds=network.peer_timeout_seconds,
        tls=network.make_tls(),
        on_put=supervisor.metrics.receive,
    )
    stack.callback(server.close)
    server.start()
    supervisor.metrics.start()
    variables = {METRICS_SERVICE_VARIABLE: server.address, METRICS_SECRET_VARIABLE: secret.hex()}
    return [replace(spec, environ={**spec.environ, **variables}) for spec in specs]


def _start_ranks(
    options: LaunchOptions, plan: JobPlan, environ: Mapping[str, str], supervisor: Supervisor, stack: ExitStack
) -> JobServices:
    """Start ranks and servers on all hosts, with the services that they need, which are returned."""
    secret = secrets.token_bytes(SECRET_BYTES)
    start = RemoteStart(options, plan, environ, supervisor)
    stack.callback(start.close)
    network = options.network
    server = ControlService(
        secret,
        start.call() or _LOOPBACK,
        peer_timeout_seconds=network.peer_timeout_seconds,
        tls=network.make_tls(),
        on_put=supervisor.metrics.receive,
    )
    stack.callback(server.close)
    if options.verbose and start.reason:
        complain(f"the other hosts reach this one at {server.address}: {start.reason}")
    start.prepare(server.address)
    start.deliver()
    address, port = start.master or (split_address(server.address)[0], 0)
    port = port or stack.enter_context(reserve_port()).getsockname()[1]
    services = _add_scheduler(JobServices(server.address, secret, port, address), options, environ, stack)
    supervisor.start(services)
    start.start(services, server.heard_at)
    supervisor.is_starting = False
    server.start()
    supervisor.metrics.start()
    return services


def _start_elastic(
    options: LaunchOptions,
    elastic: ElasticOptions,
    plan: JobPlan,
    environ: Mapping[str, str],
    supervisor: Supervisor,
    stack: ExitStack,
    continued: ContinuedJob | None,
) -> JobServices:
    """Find the hosts of an elastic job, and begin it, with the services that its processes need, which are returned."""
    elastic = replace(elastic, is_polled=plan.poll is not None)
    part = ElasticSupervision(options, elastic, plan, environ, supervisor, continued)
    stack.callback(part.close)
    supervisor.make_elastic(part)
    listed = [HostInfo(each.host, len(each.ranks)) for each in plan.assignments]
    # as many as may run at a time where no host is named
    hosts = (
        options.hosts or listed or [HostInfo("localhost", min(elastic.max_ranks, options.num_ranks) + elastic.spares)]
    )
    network, metrics = options.network, supervisor.metrics

    def on_put(key: str, value: bytes) -> None:
        if not metrics.receive(key, value):
            part.announce(key, value)

    secret = secrets.token_bytes(SECRET_BYTES) if continued is None else continued.secret
    takes_over = continued is not None and continued.takes_over
    server = ControlService(
        secret,
        continued.file.record.service if continued is not None and takes_over else part.find_hosts(hosts),
        peer_timeout_seconds=network.peer_timeout_seconds,
        tls=network.make_tls(),
        on_put=on_put,
    )
    stack.callback(server.close)
    if elastic.witness.startswith("dir:"):
        stack.callback(part.remove_witness, witness_directory(elastic.witness.removeprefix("dir:"), secret))
    port = stack.enter_context(reserve_port()).getsockname()[1]
    services = JobServices(server.address, secret, port, split_address(server.address)[0])
    services = _add_scheduler(services, options, environ, stack)
    server.start()
    metrics.start()
    if takes_over:
        with supervisor.held_events():
            part.job.restore(part.attach(server.address), time.monotonic())
            part.find_hosts(hosts)
    supervisor.is_starting = False
    part.begin(services, server.heard_at)
    supervisor.release_events()
    if continued is not None:
        continued.note_metrics(metrics.address)
        continued.keeps_record = False
        supervisor.say(continued.describe_start(options))
    return services


def _add_scheduler(
    services: JobServices, options: LaunchOptions, environ: Mapping[str, str], stack: ExitStack
) -> JobServices:
    """Add a scheduler at a port of this host to the services, if there is to be one."""
    if options.servers is None:
        return services
    is_held = options.servers.uses_reigen_scheduler
    port = stack.enter_context(reserve_port(for_reigen=is_held)).getsockname()[1]
    address = split_address(services.rendezvous)[0]
    # the user knows best which address is this host's; that is true of one host
    own = environ.get(NODE_HOST_VARIABLE, address) if address == _LOOPBACK else address
    ps_job = PsJobSpec(address, port, options.num_ranks, options.servers.num_in_job, is_held)
    if (elastic := options.elastic) is not None:
        timeout = elastic.timeout_seconds
        ps_job = replace(ps_job, num_workers=elastic.max_ranks, is_elastic=True, elastic_timeout_seconds=timeout)
        ps_job = replace(ps_job, servers_move=options.servers.max_num is not None)
    return replace(services, ps_job=ps_job, node_host=own)


class Supervisor:
    """Supervisor of a job, from the start of its ranks to the launcher's exit code. A context manager.

    Takes the events of each host (``ProcessListener``, ``AgentListener``) and carries out the instructions of
    ``launch.job_state``.

    Attributes:
        loop: waits for everything.
        agents: those on other hosts, by the name of the host.
        is_starting: the hosts are being prepared; the job has not begun, and a signal ends it as an error.
        metrics: of the job's processes.

    Raises:
        ConfigError: metrics cannot be served or written as the options say.
    """

    def __init__(
        self,
        options: LaunchOptions,
        watchdog_pipe: int,
        listener: JobListener,
        environ: Mapping[str, str],
        continued: ContinuedJob | None = None,
    ) -> None:
        self._options, self._listener, self._environ, self._continued = options, listener, environ, continued
        #: Exit code of this launcher, which goes, while the job goes on; None: it does not.
        self._detached: int | None = None
        self._holds_events = False
        self._held_events: list[job_state.JobEvent | ElasticEvent] = []
        self.here: AgentClient | None = None
        self._plan = JobPlan(())
        #: The host of each process, and the processes of each host.
        self._hosts: dict[int, str] = {}
        self._numbers: dict[str, tuple[int, ...]] = {}
        self._names = name_ps_processes(options.first_ps_number, options.servers)
        self._job = job_state.JobState(options.num_ranks, {})
        self._elastic: ElasticSupervision | None = None
        #: Events of an elastic job that were not handled to the end, the first of them in work.
        self._events: deque[job_state.JobEvent | ElasticEvent] = deque()
        self.loop = LauncherLoop(watchdog_pipe, self._on_signal, self._on_watchdog_lost)
        self.agents: dict[str, AgentClient] = {}
        self.is_starting = True
        #: Hosts that were lost, and why.
        self._losses: dict[str, str] = {}
        takes_over = continued is not None and continued.takes_over
        self._complaints = ComplaintQueue(listener.complain, is_held=options.metrics.top)
        self._display = OutputMux(options, self.loop, lambda: self._groups, self._complaints, appends=takes_over)
        self.printed, self.closed = self._display.printed, self._display.closed
        self._local = LocalProcesses(self.loop, self)
        self.metrics = MetricsService(options.metrics, self._complaints, name_of_command(options.command))
        self._top = LiveTable(self.metrics.metrics, self._display, self._complaints) if options.metrics.top else None
        #: Groups of which something may be left, while sweeping.
        self._unswept: set[HostProcesses] = set()
        inherited = options.inherited
        self._channel = None if inherited is None else socket.socket(fileno=os.dup(inherited.channel))
        #: The scheduler writes there which ranks have left the parameter servers.
        self._scheduler_pipes = SchedulerPipes()
        #: Keys of which each server holds something, in words.
        self._held_keys: dict[int, str] = {}
        #: The last lines of ranks that were started again, as they were then.
        self._first_tails: dict[int, list[bytes]] = {}
        self._grace_ends: float | None = None
        self._finish: job_state.FinishJob | None = None
        #: Do not wait until all output is written.
        self._is_forced = False
        #: An agent was asked to stop by its engine, and the user knows.
        self._is_noticed = False
        #: A signal has come by which engines announce an end.
        self._has_notice = False

    def __enter__(self) -> Self:
        self.loop.__enter__()
        self.loop.watch(self._scheduler_pipes, self._read_departures)  # at once: a full pipe would lose departures
        return self

    def __exit__(self, *exception: object) -> None:
        if self._continued is not None and self._detached is None and not self._continued.keeps_record:
            for agent in self._all_agents:
                agent.send(agent_protocol.EndRequest())
            self._continued.end()
        # engines may lose sight of what a client has just started when it is killed: first it may end by itself
        for agent in self._all_agents:
            agent.finish_agent()
        deadline = time.monotonic() + _LAST_SECONDS
        for agent in self._all_agents:
            agent.wait_end(0.0 if self._is_forced else max(0.0, deadline - time.monotonic()))
        for agent in self._all_agents:
            agent.begin_close()
        for agent in self._all_agents:
            agent.close()
        self.metrics.close()
        self._complaints.close()
        if self._channel is not None:
            self._channel.close()
        self._scheduler_pipes.close()
        self.loop.__exit__(*exception)

    @property
    def _groups(self) -> list[HostProcesses]:
        return [self._local, *self._all_agents]

    @property
    def _all_agents(self) -> list[AgentClient]:
        return [*([] if self.here is None else [self.here]), *self.agents.values()]

    def allocate(self, launcher: Launcher) -> JobPlan:
        """Have the launcher place the processes; returns its plan.

        Raises:
            LaunchError: it cannot have what the job needs, the user has stopped it, or its plan is not of this job.
        """
        plan = self._plan = launcher.allocate(self.turn)
        self._hosts = {number: each.host for each in plan.assignments for number in each.numbers}
        placed, wanted = sorted(rank for each in plan.assignments for rank in each.ranks), self._options.num_ranks
        if self._options.elastic is not None:
            if plan.processes is not None:
                raise LaunchError("the engine of this launcher starts the ranks itself: its jobs cannot be elastic")
            return plan
        if placed != list(range(wanted)):
            raise LaunchError(f"the launcher's plan has rank(s) {format_ranks(placed)}; the job has 0 to {wanted - 1}")
        self._numbers = {each.host: each.numbers for each in plan.assignments}
        # what an engine has started, it ends: none of that can be started again
        if self._options.requeue_on_notice and plan.requeue is None:
            raise LaunchError("--requeue-on-notice: this launcher has no queue that takes the job again")
        environ = self._environ if plan.processes is None else {}
        policy = choose_restart_policy(self._options.num_ranks, self._options.servers, environ)
        self._job = job_state.JobState(
            self._options.num_ranks, policy.restarts, continue_on_failure=policy.continue_on_failure
        )
        return plan

    # ---------------------------------------------------------------- elastic jobs

    def make_elastic(self, part: ElasticSupervision) -> None:
        """Let this part decide about processes and hosts, which come and go."""
        self._elastic, self._job = part, part.job
        self._hosts.clear()
        self._numbers.clear()

    def handle(self, event: ElasticEvent | job_state.ProcessExited) -> None:
        """Have an elastic job decide."""
        self._handle(event)

    def attach_agent(self, host: str, connection: Connection) -> AgentClient:
        """Talk to an agent that listens, that of this host if the name is empty."""
        line, silence = AttachedLine(self.loop, connection), self._options.network.silence_seconds
        client = AgentClient(host or "localhost", line, self, silence)
        if host:
            self.agents[host] = client
        else:
            self.here = client
        return client

    @contextmanager
    def held_events(self) -> Iterator[None]:
        """Keep what happens to processes, until `release_events`: the job is not known yet."""
        self._holds_events = True
        try:
            yield
        finally:
            self._holds_events = False

    def release_events(self) -> None:
        """Handle the events that were kept."""
        events, self._held_events = self._held_events, []
        for event in events:
            self._handle(event)

    def detach(self, reason: str, exit_code: int) -> None:
        """Go, and leave the job to itself, or to another launcher."""
        if self._continued is not None and self._detached is None:
            self.say(f"{reason}; {self._continued.describe_loss(self._options)}")
            self._detached = exit_code

    def start_slots(self, host: str, numbers: Sequence[int]) -> None:
        """Take note that these processes are on this host from now on."""
        for number in numbers:
            self._hosts[number] = host
            self._display.add_process(number)
        self._numbers[host] = tuple(sorted({*self._numbers.get(host, ()), *numbers}))

    def say(self, text: str) -> None:
        """Tell the user."""
        self._display.say(f"reigen run: {text}\n".encode())
        self.metrics.note(text)

    @property
    def excluded(self) -> set[int]:
        """Children of this process that are not the job's."""
        return self._local.excluded

    # ---------------------------------------------------------------- the beginning

    def start(self, services: JobServices) -> None:
        """Start the processes of this host; raises LaunchError."""
        own = next((each for each in self._plan.assignments if each.is_local), None)
        if own is None:
            return
        specs, notes = plan_host(own, self._options.processes, services, self._environ)
        self.start_all(specs)
        self._report(list(self._local.pids.items()), notes)

    def start_all(self, specs: Iterable[ProcessSpec]) -> None:
        """Start processes of this host; raises LaunchError where one cannot be (the watchdog ends the others)."""
        for spec in specs:
            attached = self._scheduler_pipes.attach(spec, is_elastic=self._elastic is not None)
            self._local.start(attached, self._options.inherited)

    def add_agent(self, host: str, process: subprocess.Popen[bytes]) -> None:
        """Talk to the agent of another host through this client process."""
        line = PipedLine(process, self.loop)
        self.agents[host] = AgentClient(host, line, self, self._options.network.silence_seconds)
        self.exclude_child(process.pid)

    def await_agent(self, host: str) -> DialedLine:
        """Wait for the agent of another host, which dials back; returns the line that it will have."""
        line = DialedLine(self.loop)
        self.agents[host] = AgentClient(host, line, self, self._options.network.silence_seconds)
        return line

    def agent_ended(self, host: str, problem: HostProblem) -> None:
        """Take note that an agent cannot come, or has ended, as its engine says."""
        self.agents[host].give_up(problem)

    def has_agent(self, host: str) -> bool:
        """Return whether an agent of this host is awaited, or there."""
        return host in self.agents and self.agents[host].phase is not AgentPhase.GONE

    def agent_printed(self, host: str, line: str) -> None:
        """Keep a line of an agent's, or of its engine about it."""
        self.agents[host].add_output(line)

    def exclude_child(self, pid: int) -> None:
        """Exclude a child of this process from the job's."""
        self._local.excluded.add(pid)

    def run(self) -> int:
        """Keep the job until it ends; returns the exit code."""
        while self._finish is None:
            self.turn()
            if self._detached is not None:
                self._display.write()
                return self._detached
        self._local.drain()
        if self._top is not None:
            self._top.close()
            self._top = None
        self._finish_agents()
        self._display.finish()
        failure, is_shown = self._finish.failure, self._listener.finished is None
        is_server = failure is not None and failure.rank in self._names
        message = self._describe_end(self._finish) if is_shown or is_server else b""
        self.metrics.finish(self._finish.exit_code, message.decode(errors="replace"))
        self._display.say_repeats()
        self._display.say(message if is_shown else b"")
        if message:
            self._listener.described(message.decode(errors="replace"))
        timeout_seconds = None if self._finish.signum is None else self._options.grace_seconds
        self._display.write_all(timeout_seconds, lambda: self._is_forced)
        if isinstance(self._job, ElasticJobState):
            if self._job.problem and self._listener.finished is not None:
                self._listener.complain(self._job.problem)
            self._listener.members(members_in_order(self._job.members))
        if self._listener.finished is not None:
            self._listener.finished(self._finish)
        if self._options.requeue_on_notice and self._has_notice and self._plan.requeue is not None:
            complain("the job has ended after a notice, and is to run again")
            return self._plan.requeue()
        if not self._finish.exit_code and self._options.metrics.verdict:
            sentence = describe_waiting(self.metrics.metrics.current())
            if sentence:
                self._listener.complain(f"verdict: {sentence} (HOROVOD_TIMELINE=FILE says why)")
        return self._finish.exit_code

    def _describe_end(self, finish: job_state.FinishJob) -> bytes:
        if self._plan.describe_end is not None:
            message = self._plan.describe_end(finish)
            return f"reigen run: {message}\n".encode() if message else b""
        environ, servers = self._environ if self._plan.processes is None else {}, self._options.servers
        is_lost = servers is not None and not servers_keep_values(servers, environ)
        locations = ProcessLocations(
            self._hosts if self._all_agents else {}, self._names, self._losses, self._held_keys if is_lost else {}
        )
        if finish.failure is None:
            return format_exit_report(finish, [], locations)
        number = finish.failure.rank
        first = self._first_tails.get(number)
        is_above = first is None and self._display.is_error_last(number)
        tail = first or self._display.tail(number)
        sharing = [] if first is not None else self._display.take_sharing(number)
        hint = "" if self._plan.hint is None else self._plan.hint(finish)
        return format_exit_report(finish, tail, locations, is_above=is_above, sharing=sharing) + (
            f"  {hint}\n".encode() if hint else b""
        )

    # ---------------------------------------------------------------- one turn

    def turn(self, limit_seconds: float | None = None) -> None:
        """Wait for events, not longer than that, and handle them."""
        was_finished = self._finish is not None
        if self._detached is not None:
            return
        waits = [limit_seconds, self._display.turn(), *(group.turn() for group in self._groups)]
        if self._elastic is not None:
            waits += [self._elastic.turn(), self._end_silent_scheduler()]
        if self._top is not None:
            waits.append(self._top.turn(time.monotonic()))
        if self._finish is not None and not was_finished:
            return
        if self._grace_ends is not None:
            waits.append(max(0.0, self._grace_ends - time.monotonic()))
        self._wait(min((wait for wait in waits if wait is not None), default=None))
        if self._grace_ends is not None and time.monotonic() >= self._grace_ends:
            self._grace_ends = None
            self._handle(job_state.GraceExpired())

    def _end_silent_scheduler(self) -> float | None:
        """Kill the scheduler of an elastic job if it is silent, and may be started again; returns when to look next.

        It may be stopped: its connections last, and whoever waits for it would never look for another one.
        """
        scheduler = max(self._names, default=-1)
        limit = max(self._options.network.peer_timeout_seconds, _LEAST_SILENCE_SECONDS)
        if scheduler not in self._job.running or not self._job.may_restart(scheduler):
            return None
        if (silent_seconds := self._scheduler_pipes.look()) is not None and silent_seconds >= limit:
            self._read_departures()  # it may have been heard meanwhile
            silent_seconds = self._scheduler_pipes.silent_seconds
        if silent_seconds is None or self._job.phase is not job_state.JobPhase.RUNNING:
            return None
        if silent_seconds < limit:
            return min(limit - silent_seconds, LOOK_SECONDS)
        self._scheduler_pipes.silent_seconds = None
        self.say(f"{self._describe(scheduler)}: nothing was heard of it for {limit:g} s; it is killed")
        self._execute(job_state.SignalProcesses((scheduler,), signal.SIGKILL))
        return None

    def _wait(self, seconds: float | None) -> None:
        self.loop.wait(seconds)
        had_reader = not self._display.is_stdout_closed
        self._display.write()
        if had_reader and self._display.is_stdout_closed:
            if self._continued is not None and not self.is_starting:
                self.detach("stdout has no reader any more", 128 + signal.SIGPIPE)
                return
            self._handle(job_state.SignalReceived(signal.SIGPIPE, time.monotonic()))

    def _handle(self, event: job_state.JobEvent | ElasticEvent) -> None:
        if self._holds_events:
            self._held_events.append(event)
            return
        if isinstance(self._job, ElasticJobState):
            self._events.append(event)
            if len(self._events) == 1:  # else it is what follows from another one, which is carried out first
                while self._events:
                    for decided in self._job.handle_at(self._events[0], time.monotonic()):
                        self._execute(decided)
                    self._events.popleft()
        else:
            assert not isinstance(event, ElasticEvent), "the job is elastic"
            for instruction in self._job.handle(event):
                self._execute(instruction)
        if self._job.failure is not None and self._job.phase is not job_state.JobPhase.RUNNING:
            for agent in self._all_agents:
                agent.silence_seconds = self._options.network.last_silence_seconds

    def _execute(self, instruction: job_state.JobInstruction | ElasticInstruction) -> None:
        match instruction:
            case (
                SayToUser()
                | CallHost()
                | StartSlots()
                | StartServers()
                | StartServerProcess()
                | ForgetCommands()
                | TellServerProcess()
            ):
                assert self._elastic is not None, "the job is elastic"
                self._elastic.execute(instruction)
            case job_state.RestartProcess(number, _, exit_code, cause):
                end = describe_exit(exit_code, cause)
                self.say(f"{self._describe(number)}: {end}; it is started again")
                if number not in self._names:
                    self._first_tails.setdefault(number, self._display.tail(number))
                # for a scheduler: the one before it may have read of some
                ended = self._job.slots.ended() if isinstance(self._job, ElasticJobState) else ()
                self._scheduler_pipes.announce_deaths(ended)
                self._scheduler_pipes.silent_seconds = None
                next(group for group in self._groups if self._of(group, [number])).execute(instruction)
            case job_state.SignalProcesses(ranks, signum):
                if signum in PASSED_SIGNALS:
                    self.say(f"{signal_name(signum)} is passed on to the ranks")
                for group in self._groups:
                    group.execute(job_state.SignalProcesses(self._of(group, ranks), signum))
            case job_state.TerminateProcesses(ranks) | job_state.KillProcesses(ranks):
                for group in self._groups:
                    group.execute(type(instruction)(self._of(group, ranks)))
            case job_state.StartGraceTimer():
                self._grace_ends = time.monotonic() + self._grace_seconds
            case job_state.SweepProcesses():
                self._sweep(instruction)
            case job_state.FinishJob():
                self._finish = instruction

    @property
    def _grace_seconds(self) -> float:
        """Seconds in which processes may end; those of an elastic job that a notice ends may finish a step."""
        seconds = self._options.grace_seconds
        is_noticed = self._elastic is not None and self._job.signum == signal.SIGTERM
        return max(seconds, notice_grace_seconds(self._environ)) if is_noticed else seconds

    def _sweep(self, instruction: job_state.SweepProcesses) -> None:
        if self._elastic is not None:
            self._elastic.stop_calls()
        self._unswept = set(self._groups)
        for group in self._groups:
            group.execute(instruction)

    def _of(self, group: HostProcesses, ranks: Sequence[int]) -> tuple[int, ...]:
        here = self._local if self.here is None else self.here
        return tuple(rank for rank in ranks if self.agents.get(self._hosts[rank], here) is group)

    def _finish_agents(self) -> None:
        """Have the agents end, and wait for that: where ssh has ended, nothing is left there."""
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for agent in self._all_agents:
            agent.finish_agent()
        while not self._is_forced and any(each.phase is not AgentPhase.GONE for each in self._all_agents):
            if (remaining := deadline - time.monotonic()) <= 0:
                return
            self.turn(remaining)

    # ---------------------------------------------------------------- events

    def exited(self, event: job_state.ProcessExited) -> None:
        """Handle the end of a process, after the departures that were announced before."""
        self._read_departures()
        if event.rank not in self._names:
            self._listener.exited(event)
            if isinstance(self._job, ElasticJobState) and self._names and self._job.slots.has(event.rank):
                self._scheduler_pipes.announce_deaths([self._job.slots[event.rank].id])
        if self._elastic is not None:  # what it has said before its end
            self._elastic.read_announcements()
            self._elastic.read_server_processes()
        self._handle(event)

    def _read_departures(self) -> None:
        """Handle departures: a rank that left has waited until the scheduler had written here."""
        for text in self._scheduler_pipes.read():
            if self._elastic is not None:
                for event in parse_worker_report(text):
                    self._handle(event)
                continue
            for number in text.split():
                self._handle(job_state.PsWorkerLeft(int(number)))
        if self._elastic is not None and self._elastic.job.placement is not None:  # of processes with several servers
            return
        self._held_keys |= {
            self._options.first_ps_number + server: keys for server, keys in self._scheduler_pipes.held.items()
        }

    def swept(self, group: HostProcesses) -> None:
        """Count a host as swept."""
        self._unswept.discard(group)
        if not self._unswept:
            self._handle(job_state.ProcessesSwept())

    def stepped(self, agent: AgentClient) -> None:
        """Handle an agent's progress or loss."""
        if agent.superseded is not None:
            self.detach(f"launcher {agent.superseded.generation} has taken the place of this one", 1)
            return
        if self._elastic is not None and self._elastic.stepped(agent):
            return
        if agent.started is not None and agent.phase is AgentPhase.RUNNING and self._elastic is None:
            numbers = self._numbers[agent.host]
            self._report(list(zip(numbers, agent.started.pids, strict=True)), list(agent.started.notes))
        if self.is_starting or agent.refused is None:
            return  # RemoteStart looks for itself
        if agent.phase is not AgentPhase.GONE:
            refused = agent.refused
            if self._elastic is not None:
                self._elastic.refused(agent)
                return
            raise LaunchError(f"host {agent.host}: {refused.reason}", refused.exit_code)
        if self._continued is not None and self._continued.has_agent(
            "" if agent is self.here else agent.host, self._options
        ):
            self.detach(f"the connection to host {agent.host} has ended, and its agent lives", 1)
            return
        if self._elastic is not None and (agent is self.here or agent.attached is not None):
            self._elastic.lose_agent(agent, agent.refused.reason or "its agent has ended")
        else:
            assert self._plan.agents is not None, "something has started this agent"
            self.lose_host(agent.host, agent.problem(self._plan.agents, 0.0).what)
        if agent in self._unswept:
            self.swept(agent)

    def rank_message(self, text: bytes, payload: int | None) -> None:
        """Pass a rank's message to the holder of the channel's other end."""
        if self._channel is not None:
            with suppress(OSError):  # it is closed
                socket.send_fds(self._channel, [text], [] if payload is None else [payload])

    def lose_host(self, host: str, reason: str) -> None:
        """Count a host, and what runs there, as lost."""
        self._losses[host] = reason
        numbers = self._numbers.get(host, ())
        ranks = [number for number in numbers if number in self._job.running and number not in self._names]
        self._listener.lost(ranks, f"host {host} was lost: {reason}")
        self.metrics.note(f"host {host} was lost: {reason}")
        if isinstance(self._job, ElasticJobState) and self._names:
            self._scheduler_pipes.announce_deaths(self._job.slots[rank].id for rank in ranks)
        self._handle(job_state.HostLost(numbers, reason, host))

    def _report(self, pids: Sequence[tuple[int, int]], notes: Sequence[str]) -> None:
        if not self._options.verbose or not pids:
            return
        where = f"host {self._hosts[pids[0][0]]}: " if self.agents else ""
        complain(where + notes[0])
        for (rank, pid), note in zip(pids, notes[1:], strict=True):
            complain(f"{where}{self._names.get(rank, f'rank {rank}')}: process {pid}, {note}")

    def _describe(self, number: int) -> str:
        where = f" (host {self._hosts[number]})" if self.agents else ""
        return self._names.get(number, f"rank {number}") + where

    def _on_watchdog_lost(self) -> None:
        self._is_forced = True
        if self._continued is not None and not self.is_starting:
            self.detach("the process that watches over the launcher has gone", 128 + signal.SIGKILL)
            return
        if self.is_starting:
            raise LaunchError("the process that watches over the launcher has gone", 128 + signal.SIGKILL)
        self._handle(job_state.WatchdogLost())

    def signalled(self, agent: AgentClient, signum: int) -> None:
        """Handle a signal that an agent was sent: it concerns the whole job."""
        self._has_notice = True
        is_first = signum in STOP_SIGNALS and not self._is_noticed
        self._is_noticed |= is_first
        if is_first:
            explain = self._plan.describe_notice
            by = f" {explain(agent.output)}" if explain is not None else ""
            self.say(f"host {agent.host} was sent {signal_name(signum)}{by}")
        if self._elastic is not None and signum in STOP_SIGNALS:
            self._handle(HostNoticed(agent.host, signum, time.monotonic()))
        else:
            self._handle(job_state.SignalReceived(signum, time.monotonic()))

    def _on_signal(self, signum: int) -> None:
        if self.is_starting:
            if signum in STOP_SIGNALS:
                raise LaunchError(f"stopped by {signal_name(signum)}", 128 + signum)
            return
        if self._continued is not None and signum == signal.SIGHUP and self._finish is None:
            self.detach("the terminal has gone", 128 + signum)
            return
        self._has_notice |= signum in PASSED_SIGNALS or signum == signal.SIGTERM
        self._is_forced = self._finish is not None and signum in STOP_SIGNALS
        self._handle(job_state.SignalReceived(signum, time.monotonic()))
