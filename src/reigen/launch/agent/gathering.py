"""Gathering: processes of an engine say where they are before a job's hosts are decided. For engines that grant slots.

Some engines grant so many tasks, and not hosts (Spark's barrier stage, YARN's containers of one rank); or each node
knows its own number of slots alone (self-start). Each task then dials back twice (`launch.agent.dial_back`):

a. The first time, with the ticket that its engine brought, it says where it is, and how many slots it has.
b. When all are there, tasks of one machine are one host. The first of them is sent the dial text of its host's agent,
   whose ticket is masked as the job's secret is, and dials a second time, as the agent. The others keep their
   connections, hold their slots, and end when the job does.

In an elastic job tasks come and go as long as it runs (`SlotGathering`): one that has come holds slots of its machine
until its connection ends, or, once it is an agent, until that does. Its engine may run it again, as another attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from reigen.errors import AuthenticationError, LaunchError, WireError
from reigen.launch.agent.dial_back import DialedAgent, DialListener, DialText, decode_dial_text, encode_dial_text
from reigen.net.connection import Connection
from reigen.net.event_loop import EventLoop
from reigen.net.listener import open_listening_socket

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

_TURN_SECONDS = 0.05


class Gathering:
    """Supervisor's end: listens for the tasks of an engine, by their names.

    Args:
        address: of this host, where they reach it, and the port, 0: the kernel chooses.
        names: of the tasks, in order; the text of each is in ``texts``.
        timeout_seconds: how long they may take to come.
        secrets: tickets that the tasks have already, by name; others are made.
        tls: everything is encrypted.
        peer_timeout_seconds: how long another host may be silent.

    Raises:
        OSError, ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        names: Sequence[str],
        timeout_seconds: float,
        *,
        secrets: Mapping[str, bytes] | None = None,
        tls: TlsContext | None = None,
        peer_timeout_seconds: float = 20.0,
    ) -> None:
        self._loop = EventLoop()
        self._names, self._timeout_seconds = names, timeout_seconds
        self.agents: dict[str, DialedAgent] = {}
        #: Why tasks cannot come, or have gone before the job began.
        self._problems: dict[str, str] = {}
        self._conflicts: list[str] = []
        self._listener = DialListener(
            self._loop,
            open_listening_socket(*address),
            self._on_agent,
            self._conflicts.append,
            self._problems.__setitem__,
            tls=tls,
            peer_timeout_seconds=peer_timeout_seconds,
        )
        given = secrets or {}
        self.texts = {
            name: self._listener.issue(number, name, timeout_seconds, given.get(name), gathers=True)
            for number, name in enumerate(names)
        }

    def missing(self) -> list[str]:
        """Return the names of the tasks that have not come."""
        return [name for name in self._names if name not in self.agents]

    def wait(self, wait: Callable[[float], None], look: Callable[[Mapping[str, str]], None]) -> None:
        """Wait for all tasks.

        Args:
            wait: sleeps so many seconds at most (``Launcher.allocate``).
            look: called often with the problems so far, by name; may raise an error.

        Raises:
            LaunchError: a ticket was used twice. (Who has not come in time is for the caller to see.)
        """
        deadline = time.monotonic() + self._timeout_seconds
        while self.missing() and time.monotonic() < deadline:
            self._loop.wait(_TURN_SECONDS)
            wait(0.0)
            if self._conflicts:
                raise LaunchError(f"{self._conflicts[0]}: nothing was started; who else has the ticket?")
            look(self._problems)

    def call(self, name: str, text: str) -> None:
        """Make a task the agent of its host, by this dial text; raises LaunchError where it has gone."""
        agent = self.agents[name]
        self._loop.unwatch(agent.connection)
        try:
            _send_text(agent.connection, text, time.monotonic() + self._timeout_seconds)
        except OSError as error:
            raise LaunchError(f"{name} ({agent.greeting.hostname}) has gone: {error}") from None
        agent.connection.close()

    def close(self) -> None:
        """End all connections: the tasks that hold slots end. May be called twice."""
        for agent in self.agents.values():
            if agent.connection.fileno() >= 0:
                self._loop.unwatch(agent.connection)
                agent.connection.close()
        self._listener.close()
        self._loop.close()

    def _on_agent(self, agent: DialedAgent) -> None:
        self.agents[agent.host] = agent
        self._loop.watch(agent.connection, partial(self._on_readable, agent))

    def _on_readable(self, agent: DialedAgent) -> None:
        """A task says nothing here: it has gone."""
        try:
            if not agent.connection.read():
                return
            reason = "it has said something that makes no sense"
        except (OSError, AuthenticationError, WireError) as error:
            reason = str(error)
        self._loop.unwatch(agent.connection)
        self._problems[agent.host] = f"it came from {agent.greeting.hostname}, and has gone: {reason}"


@dataclass(eq=False)
class _Slots:
    """Task that has come: its slots, of which a host's first task becomes the agent."""

    task: str
    agent: DialedAgent
    is_agent: bool = False

    @property
    def num(self) -> int:
        num = self.agent.greeting.num_slots
        return 1 if num is None else num


@dataclass(frozen=True, slots=True)
class GatheredHost:
    """Host of tasks that are there now: its name, the slots of its tasks, and its address."""

    name: str
    num_slots: int
    address: str


@dataclass
class _TaskHost:
    """Tasks of one host, in their order."""

    name: str
    tasks: list[_Slots] = field(default_factory=list)


class SlotGathering:
    """Supervisor's end in an elastic job: tasks of an engine that come and go.

    Args:
        loop: the supervisor's.
        address: of this host, where they reach it, and the port, 0: the kernel chooses.
        names: of the tasks; the text of each is in ``texts``.
        timeout_seconds: how long a task tries to come.
        has_agent: says whether the agent of a host, by its name, is awaited, or there.
        secrets: of the tasks, where they have them already, by name; others are made.
        tls: everything is encrypted.
        peer_timeout_seconds: how long another host may be silent.
        on_problem: told of tasks that were refused, in words.
        reserved: names that no host of tasks may have.

    Raises:
        OSError, ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        loop: EventLoop,
        address: tuple[str, int],
        names: Sequence[str],
        timeout_seconds: float,
        has_agent: Callable[[str], bool],
        *,
        secrets: Mapping[str, bytes] | None = None,
        tls: TlsContext | None = None,
        peer_timeout_seconds: float = 20.0,
        on_problem: Callable[[str], None] = lambda reason: None,
        reserved: Sequence[str] = (),
    ) -> None:
        self._reserved = reserved
        self._loop, self._has_agent, self._timeout_seconds = loop, has_agent, timeout_seconds
        self._hosts: dict[str, _TaskHost] = {}
        self._listener = DialListener(
            loop,
            open_listening_socket(*address),
            self._on_agent,
            on_problem,
            lambda task, reason: on_problem(f"task {task} cannot take part: {reason}"),
            tls=tls,
            peer_timeout_seconds=peer_timeout_seconds,
        )
        given = secrets or {}
        self.texts = {
            name: self._listener.issue(number, name, timeout_seconds, given.get(name), gathers=True, has_attempts=True)
            for number, name in enumerate(names)
        }

    def hosts(self) -> list[GatheredHost]:
        """Return the hosts that there are now, in the order in which they came first."""
        found = []
        for place in self._hosts.values():
            self._forget_ended_agent(place)
            if place.tasks:
                address = place.tasks[0].agent.address.rpartition(":")[0].strip("[]")
                found.append(GatheredHost(place.name, sum(each.num for each in place.tasks), address))
        return found

    def task_of_agent(self, host: str) -> str:
        """Return the task that is, or was last, the agent of a host; empty: there is none."""
        place = self._find(host)
        return next((each.task for each in place.tasks if each.is_agent), "") if place is not None else ""

    def call(self, host: str, text: str) -> None:
        """Make the first task of a host its agent, by this dial text.

        Raises:
            LaunchError: it has none, or the task does not take it.
        """
        place = self._find(host)
        waiting = [] if place is None else [each for each in place.tasks if not each.is_agent]
        if place is None or not waiting:
            raise LaunchError("no task of its engine is there any more")
        place.tasks = waiting  # what was its agent has ended, else it would not be called
        first = waiting[0]
        self._loop.unwatch(first.agent.connection)
        try:
            _send_text(first.agent.connection, text, time.monotonic() + self._timeout_seconds)
        except OSError as error:
            waiting.remove(first)
            raise LaunchError(f"its task {first.task} has gone: {error}") from None
        finally:
            first.agent.connection.close()
        first.is_agent = True

    def close(self) -> None:
        """End all connections: the tasks that hold slots end. May be called twice."""
        for place in self._hosts.values():
            for each in place.tasks:
                self._drop(each)
        self._hosts.clear()
        self._listener.close()

    def _find(self, host: str) -> _TaskHost | None:
        found = (place for place in self._hosts.values() if place.name == host and place.tasks)
        return next(found, None)

    def _forget_ended_agent(self, place: _TaskHost) -> None:
        if not self._has_agent(place.name):
            place.tasks = [each for each in place.tasks if not each.is_agent]

    def _on_agent(self, agent: DialedAgent) -> None:
        task, key = agent.host, agent.greeting.machine or agent.host
        for place in self._hosts.values():  # an earlier attempt, which its engine has given up
            for each in [each for each in place.tasks if each.task == task and not each.is_agent]:
                self._remove(place, each)
        for place in self._hosts.values():
            self._forget_ended_agent(place)
        place = self._hosts.get(key) or _TaskHost("")
        if not place.tasks:  # its name may be another's by now
            taken = [*self._reserved, *(each.name for each in self._hosts.values() if each.tasks)]
            place.name = unique_name(agent.greeting.hostname, taken)
            self._hosts.pop(key, None)
            self._hosts[key] = place
        slots = _Slots(task, agent)
        place.tasks.append(slots)
        self._loop.watch(agent.connection, partial(self._on_readable, place, slots))

    def _on_readable(self, place: _TaskHost, slots: _Slots) -> None:
        """A task says nothing here: it has gone."""
        try:
            if not slots.agent.connection.read():
                return
        except (OSError, AuthenticationError, WireError):
            pass
        self._remove(place, slots)

    def _remove(self, place: _TaskHost, slots: _Slots) -> None:
        if slots in place.tasks:
            place.tasks.remove(slots)
        self._drop(slots)

    def _drop(self, slots: _Slots) -> None:
        connection = slots.agent.connection
        if connection.fileno() >= 0:
            self._loop.unwatch(connection)
            connection.close()


def _send_text(connection: Connection, text: str, deadline: float) -> None:
    """Send a task the dial text of its host's agent, with the ticket masked; raises OSError where it has gone."""
    dial_text = decode_dial_text(text)
    masked = connection.mask(bytes.fromhex(dial_text.ticket)).hex()
    connection.send(encode_dial_text(msgspec.structs.replace(dial_text, ticket=masked)).encode(), deadline)


def unique_name(name: str, taken: Collection[str]) -> str:
    """Return the name, or that with a number: two containers may have one name."""
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


def group_by_machine(agents: Mapping[str, DialedAgent], names: Sequence[str]) -> list[list[str]]:
    """Group the tasks by their host, in the order of ``names``; hosts are in the order of their first task."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(agents[name].greeting.machine or name, []).append(name)
    return list(groups.values())


def await_call(connection: Connection, wait: Callable[[Connection], None]) -> DialText | None:
    """Wait, as a task, for the dial text of the host's agent.

    Args:
        connection: the task's.
        wait: returns when the connection is readable; may raise an error.

    Returns:
        The text; None: the job has ended, and the task only held a slot.

    Raises:
        LaunchError: the launcher's host cannot be reached any more, or what has come is not the launcher's.
    """
    try:
        while not (messages := connection.read()):
            wait(connection)
        text = decode_dial_text(messages[0].decode("ascii", "replace"))
        return msgspec.structs.replace(text, ticket=connection.mask(bytes.fromhex(text.ticket)).hex())
    except ConnectionError:  # closed
        return None
    except (OSError, AuthenticationError, WireError) as error:
        raise LaunchError(f"the connection to the launcher has failed: {error}") from None
    finally:
        connection.close()
