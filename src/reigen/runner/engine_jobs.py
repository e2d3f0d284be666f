"""Jobs on hosts of an engine whose client library lives in the caller's process: Ray's driver, Spark's, Dask's client.

The caller has the engine grant hosts, or tasks, before the job begins, and has it start an agent on each: an
`AgentProcess` in the engine's process there. Everything else is as with `reigen.run`.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec

from reigen.errors import ConfigError, LaunchError
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.options import NetworkOptions
from reigen.launch.payload import PYTHON_PLACEHOLDER, PayloadFile
from reigen.resources.stdio import occupy_standard_descriptors
from reigen.runner.call import collect_results
from reigen.runner.engine_channel import (
    AgentProblem,
    CallAgent,
    CallsComplete,
    EngineChannel,
    EngineHostSettings,
    EngineHostsFound,
    ExplainAgent,
    RankHosts,
    RanksStarted,
)
from reigen.runner.engine_launcher import EngineSettings
from reigen.runner.interpreter import module_command
from reigen.runner.job_monitor import JobMonitor
from reigen.runner.options import RunSettings, check_num_servers
from reigen.runner.outcome import list_complaints
from reigen.runner.result_channel import ResultChannel
from reigen.runner.serialization import pack_object

#: Seconds between two questions to the engine about agents, and for how long one is asked about an end.
_POLL_SECONDS, _EXPLAIN_SECONDS, _EXPLAIN_PAUSE_SECONDS = 1.0, 2.0, 0.1
#: Hosts in one message.
_HOSTS_PER_MESSAGE = 50


@dataclass(frozen=True, slots=True)
class EngineHost:
    """Host that an engine has granted.

    Attributes:
        name: as users know it.
        slots: ranks that it may have.
        address: where the other hosts reach it; empty: at its name.
        environ: variables of the ranks there, above all others.
    """

    name: str
    slots: int
    address: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineAgents:
    """Hosts of an engine, and the way to start agents there. The functions are called in the thread that runs the job.

    Attributes:
        engine: its name, for messages.
        hosts: in the order of ranks, an agent each, which goes by the host's name. Or a number: of tasks on hosts that
            nobody knows yet, ``"0"``, ``"1"`` ...: those of one machine are one host with as many slots, and the first
            one of them is its agent. Of an elastic job's hosts and tasks not all have to be there.
        start_agents: gets the dial texts by the agents' names, has the engine start them, and returns soon.
        explain_exit: returns why an agent has ended or cannot come, in the engine's words; empty: it knows of nothing.
            Asked each second about all agents until the ranks are started, and when a connection ends.
        kept_variables: beginnings of names of which a host's own value wins against this process's.
        exports_environ: ranks get this process's variables; else only REIGEN_*, HOROVOD_*, and those of the options.
        listen_towards: name or address of a host of the cluster: this process listens on the interface that leads
            there. Empty: the first host; needed where ``hosts`` is a number.
        python: the ranks' Python; None: that in which their host's agent runs.
        discover: of an elastic job: returns the hosts that there are now, in the order of ranks, and returns soon;
            called each second. What it raises ends the job. None: ``hosts`` are those that there ever are.
    """

    engine: str
    hosts: Sequence[EngineHost] | int
    start_agents: Callable[[Mapping[str, str]], None]
    explain_exit: Callable[[str], str] = lambda name: ""
    kept_variables: tuple[str, ...] = ()
    exports_environ: bool = True
    listen_towards: str = ""
    python: str | None = None
    discover: Callable[[], Sequence[EngineHost]] | None = None

    @property
    def num_slots(self) -> int:
        """Slots of all hosts."""
        return self.hosts if isinstance(self.hosts, int) else sum(host.slots for host in self.hosts)

    @property
    def names(self) -> list[str]:
        """Names of the agents."""
        if isinstance(self.hosts, int):
            return [str(number) for number in range(self.hosts)]
        return [host.name for host in self.hosts]


@dataclass(frozen=True, slots=True)
class EngineJobOptions:
    """Options of a job on an engine.

    Attributes:
        num_ranks: the number of processes; None: all slots.
        environ: variables for all ranks, above this process's and the hosts' own.
        start_timeout_seconds: how long agents may take to come, and ranks to meet; None: REIGEN_START_TIMEOUT, or 30.
        directory: where ranks run; empty: where their agents do.
        verbose, prefix, timestamps, output_directory, grace_seconds: as in ``launch.options.LaunchOptions``.
        network_interfaces: those that may be used, with commas between them; None: as in the environment.
        num_servers: parameter servers that run beside the ranks, on their hosts in turn; the engine counts no slots for
            them. The scheduler runs on the caller's host.
        stdout, stderr: where the ranks' output goes; None: to this process's own.
        elastic: what makes the job elastic; it has at most ``elastic.max_ranks`` processes then. None: it is not.
    """

    num_ranks: int | None = None
    environ: Mapping[str, str] | None = None
    start_timeout_seconds: float | None = None
    directory: str = ""
    verbose: bool = False
    prefix: bool = True
    timestamps: bool = False
    output_directory: str | None = None
    num_servers: int = 0
    grace_seconds: float = 5.0
    network_interfaces: str | None = None
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    elastic: ElasticOptions | None = None


class Cancellation:
    """Request to end a job, from any thread, also before it begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        #: Why; None: it is not cancelled.
        self.reason: str | None = None

    def cancel(self, reason: str = "") -> None:
        """End the job; ``run_on_engine`` raises LaunchError with this reason when nothing of it is left."""
        with self._lock:
            if self.reason is None:
                self.reason = reason
            self._wake()

    def attach(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called by `cancel`, from then on."""
        with self._lock:
            self._wake = wake


class _JobCancelled(Exception):  # noqa: N818  leaves the loop
    """Job was cancelled."""


def run_on_engine(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    agents: EngineAgents,
    options: EngineJobOptions | None = None,
    cancellation: Cancellation | None = None,
    on_started: Callable[[RanksStarted, list[str]], None] | None = None,
    on_note: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in new processes on an engine's hosts, which form a job; as `reigen.run`.

    May be called from any thread, from several at the same time. KeyboardInterrupt, in this thread, ends the job, and
    is raised again when nothing of it is left.

    Args:
        func: the function.
        args: its arguments, the same in all processes.
        kwargs: its keyword arguments.
        agents: the hosts, and how agents are started there.
        options: options of the job.
        cancellation: its means to be ended from another thread.
        on_started: called when the ranks were started, with the job's services and the host of each rank.
        on_note: gets a rank (of an elastic job: its slot), and what it has sent by `reigen.runner.calls.send_note`.

    Returns:
        The values that the processes returned, by rank; of an elastic job's last view.

    Raises:
        RankFailedError: a rank raised, exited, or was killed, or its host was lost: the first one that failed by
            itself, with its rank, host, traceback and, as ``__cause__``, its exception. The others were stopped.
        ConfigError: the hosts have fewer slots than ranks were asked for, or options make no sense.
        UnsupportedTypeError: ``func`` or an argument cannot be pickled.
        LaunchError: agents have not come (the message names all), the job was cancelled, or its launcher was ended.
    """
    options = options or EngineJobOptions()
    job = _EngineJob(agents, options, cancellation or Cancellation(), on_started, on_note)
    payload = pack_object((func, tuple(args), dict(kwargs or {})), "the function, or one of its arguments,")
    try:
        return job.run(payload)
    finally:
        os.close(payload)


class _EngineJob:
    """One job: the caller's side of it."""

    def __init__(
        self,
        agents: EngineAgents,
        options: EngineJobOptions,
        cancellation: Cancellation,
        on_started: Callable[[RanksStarted, list[str]], None] | None,
        on_note: Callable[[int, Any], None] | None,
    ) -> None:
        self._agents, self._options, self._cancellation = agents, options, cancellation
        self._on_started, self._on_note = on_started, on_note
        self._size = _check_size(agents, options)
        self._hosts: list[str] = []
        self._texts: dict[str, str] = {}
        #: Number of the call of each agent that was started last, or is about to be.
        self._calls: dict[str, int] = {}
        self._next_calls: dict[str, int] = {}
        self._channel: EngineChannel | None = None
        #: Agents that are asked about, and when next.
        self._asked: set[str] = set()
        self._next_poll = 0.0
        #: Hosts that the supervisor of an elastic job was told of last.
        self._reported: tuple[EngineHostSettings, ...] | None = None

    def run(self, payload: int) -> list[Any]:
        occupy_standard_descriptors()
        settings = PayloadFile()
        try:
            settings.write(msgspec.json.encode(self._engine_settings()))
            own, inherited = ResultChannel.pair()
            own_engine, inherited_engine = EngineChannel.pair()
            with own, own_engine:
                with inherited, inherited_engine:
                    descriptors = payload, inherited.fileno(), settings.descriptor, inherited_engine.fileno()
                    arguments = msgspec.json.encode(self._settings()).decode(), *map(str, (os.getpid(), *descriptors))
                    command = module_command("reigen.runner.launcher_process", arguments)
                    outputs = self._options.stdout, self._options.stderr
                    monitor = JobMonitor(command, own, descriptors, self._environ(), outputs)
                self._channel = own_engine
                return self._monitor(monitor, own_engine)
        finally:
            self._cancellation.attach(lambda: None)
            os.close(settings.descriptor)

    def _monitor(self, monitor: JobMonitor, channel: EngineChannel) -> list[Any]:
        try:
            with monitor:
                monitor.watch(channel, lambda: self._receive(monitor, channel))
                monitor.on_turn = self._turn
                monitor.on_note = self._on_note
                self._cancellation.attach(monitor.wake)
                monitor.wait()
                for complaint in list_complaints(monitor.messages):
                    if not monitor.exit_code and self._options.elastic is None:
                        warnings.warn(f"{self._agents.engine}: {complaint}", RuntimeWarning, stacklevel=5)
                monitor.unwatch(channel)
                return collect_results(monitor, self._size, self._hosts)
        except _JobCancelled:
            reason = self._cancellation.reason
            raise LaunchError(f"the job was cancelled{reason and ': '}{reason or ''}", 130) from None

    def _turn(self) -> float | None:
        """Look at the engine's agents, and whether the job was cancelled; returns the seconds until the next look."""
        if self._cancellation.reason is not None:
            raise _JobCancelled
        is_discovering = self._options.elastic is not None and not isinstance(self._agents.hosts, int)
        if not self._asked and not is_discovering:
            return None
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_SECONDS
            if is_discovering:
                self._tell_hosts()
            for name in list(self._asked):
                if reason := self._agents.explain_exit(name):
                    self._asked.discard(name)
                    self._post(AgentProblem(name, reason, self._calls.get(name, 0)))
        return max(0.0, self._next_poll - now)

    def _tell_hosts(self) -> None:
        """Tell the supervisor of an elastic job which hosts there are, if they are others than before."""
        agents = self._agents
        assert not isinstance(agents.hosts, int), "these say by themselves where they are"
        found = _host_settings(agents.hosts if agents.discover is None else agents.discover())
        if found == self._reported:
            return
        self._reported = found
        for first in range(0, max(1, len(found)), _HOSTS_PER_MESSAGE):
            part = found[first : first + _HOSTS_PER_MESSAGE]
            self._post(EngineHostsFound(part, first == 0, first + _HOSTS_PER_MESSAGE >= len(found)))

    def _receive(self, monitor: JobMonitor, channel: EngineChannel) -> None:
        try:
            message = channel.receive()
        except BlockingIOError:
            return
        match message:
            case None:
                monitor.unwatch(channel)
                self._asked.clear()
            case CallAgent(name, text, call):
                self._texts[name], self._next_calls[name] = text, call
            case CallsComplete():
                texts, self._texts = self._texts, {}
                self._agents.start_agents(texts)
                self._calls |= self._next_calls
                if self._options.elastic is None or not isinstance(self._agents.hosts, int):
                    self._asked |= set(texts)  # but not about tasks that may come again
                self._next_poll = time.monotonic() + _POLL_SECONDS
            case ExplainAgent(name):
                self._post(AgentProblem(name, self._explain(name), self._calls.get(name, 0)))
            case RankHosts(first, hosts):
                self._hosts[first:] = hosts
            case RanksStarted():
                if self._options.elastic is None:
                    self._asked.clear()
                if self._on_started is not None:
                    self._on_started(message, self._hosts)

    def _explain(self, name: str) -> str:
        """Ask the engine about an end, which it may hear of later than this process does."""
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        while not (reason := self._agents.explain_exit(name)) and time.monotonic() < deadline:
            time.sleep(_EXPLAIN_PAUSE_SECONDS)
        return reason

    def _post(self, message: AgentProblem | EngineHostsFound) -> None:
        assert self._channel is not None, "the job runs"
        with suppress(OSError):  # the launcher has ended
            self._channel.post(message)

    def _environ(self) -> dict[str, str]:
        environ = {**os.environ, **(self._options.environ or {})}
        return {name: text for name, text in environ.items() if name not in _NOT_INHERITED}

    def _engine_settings(self) -> EngineSettings:
        agents = self._agents
        hosts = () if isinstance(agents.hosts, int) else agents.hosts
        return EngineSettings(
            agents.engine,
            _host_settings(hosts),
            agents.hosts if isinstance(agents.hosts, int) else 0,
            agents.kept_variables,
            agents.exports_environ,
            dict(self._options.environ or {}),
            agents.listen_towards,
            self._options.directory,
        )

    def _settings(self) -> RunSettings:
        options = self._options
        return RunSettings(
            self._size,
            options.start_timeout_seconds,
            options.output_directory,
            options.verbose,
            self._agents.python or PYTHON_PLACEHOLDER,
            (),
            None,
            None,
            options.network_interfaces,
            "",
            options.prefix,
            options.timestamps,
            options.grace_seconds,
            options.elastic,
            num_servers=options.num_servers,
        )


def _host_settings(hosts: Sequence[EngineHost]) -> tuple[EngineHostSettings, ...]:
    return tuple(EngineHostSettings(host.name, host.slots, host.address, dict(host.environ)) for host in hosts)


#: Variables of a rank's own job, which a job that it starts does not have.
_NOT_INHERITED = frozenset({"REIGEN_SECRET", "REIGEN_RENDEZVOUS"})


def _check_size(agents: EngineAgents, options: EngineJobOptions) -> int:
    """Return the number of ranks; raises ConfigError."""
    if options.elastic is not None:
        if not agents.listen_towards:
            raise ConfigError("listen_towards is needed where hosts come and go: a host of the cluster")
        return options.elastic.max_ranks
    num_slots = agents.num_slots
    if num_slots < 1 or not agents.names:
        raise ConfigError(f"{agents.engine} has given no slots")
    if len(set(agents.names)) < len(agents.names):
        raise ConfigError(f"{agents.engine} has given a host twice: {', '.join(agents.names)}")
    size = num_slots if options.num_ranks is None else options.num_ranks
    if size < 1:
        raise ConfigError(f"the number of processes must be at least 1, not {size}")
    if size > num_slots:
        raise ConfigError(f"{agents.engine} has given {num_slots} slots, and {size} processes were asked for")
    timeout = options.start_timeout_seconds
    if timeout is not None and not 0 < timeout < 1e9:
        raise ConfigError(f"the start timeout must be a number of seconds greater than 0, not {timeout!r}")
    check_num_servers(options.num_servers, options.elastic is not None)
    if isinstance(agents.hosts, int) and not agents.listen_towards:
        raise ConfigError("listen_towards is needed where the hosts are not known: a host of the cluster")
    NetworkOptions.from_environ(os.environ)
    return size
