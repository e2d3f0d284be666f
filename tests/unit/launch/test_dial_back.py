"""Dial-back: tickets that count once, and what liars, strangers and the late can do: nothing."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import msgspec
import pytest

from reigen._version import __version__
from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import AuthenticationError, LaunchError, WireError
from reigen.launch.agent import dialing
from reigen.launch.agent.agent_protocol import MAX_FRAME_BYTES, REPLY_CODEC, KeepAlive
from reigen.launch.agent.dial_back import (
    DIAL_PURPOSE,
    DialedAgent,
    DialGreeting,
    DialListener,
    DialText,
    TicketBook,
    decode_dial_text,
    derive_ticket,
    encode_dial_text,
    text_of_attempt,
)
from reigen.launch.agent.dialing import dial, read_dial_file, read_dial_text
from reigen.launch.agent.gathering import Gathering, SlotGathering, await_call, group_by_machine
from reigen.launch.agent.lines import DialedLine
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, open_connection
from reigen.net.event_loop import EventLoop, wait_ready
from tests.patience import patiently

SECONDS = 60.0
AGENT = Identity(ProcessRole.AGENT, 0, DIAL_PURPOSE)


class Supervisor:
    """The listening end; its loop turns whenever a test waits."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.agents: list[DialedAgent] = []
        self.conflicts: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.listener = DialListener(
            self.loop,
            DialListener.at("127.0.0.1"),
            self.agents.append,
            self.conflicts.append,
            lambda host, reason: self.refused.append((host, reason)),
        )

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline
            self.loop.wait(0.01)

    def close(self) -> None:
        for agent in self.agents:
            agent.connection.close()
        self.listener.close()
        self.loop.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with closing(Supervisor()) as made:
        yield made


class Dialing:
    """`dial` in a thread of its own."""

    def __init__(self, text: str, **options) -> None:
        self.connection: Connection | None = None
        self.error: Exception | None = None
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._run, args=(decode_dial_text(text), options))
        self._thread.start()

    def _run(self, text: DialText, options) -> None:
        try:
            self.connection = dial(text, self.lines.append, **options)
        except LaunchError as error:
            self.error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self._thread.join()
        if self.connection is not None:
            self.connection.close()


def raw_connection(supervisor: Supervisor, ticket: bytes, me: Identity = AGENT) -> Connection | Exception:
    """A connection of somebody who does the handshake by himself; or what came of it."""
    found: list[Connection | Exception] = []

    def connect() -> None:
        try:
            address = split_address(supervisor.listener.address)
            found.append(open_connection(address, ticket, me, MAX_FRAME_BYTES, time.monotonic() + SECONDS))
        except (AuthenticationError, OSError) as error:
            found.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    supervisor.wait_for(lambda: found)
    thread.join()
    return found[0]


def ticket_of(text: str) -> bytes:
    return bytes.fromhex(decode_dial_text(text).ticket)


def test_an_agent_is_taken_in_by_its_ticket_and_learns_the_secret_which_a_listener_does_not(supervisor):
    with closing(Dialing(supervisor.listener.issue(0, "h3", SECONDS))) as agent:
        supervisor.wait_for(lambda: agent.is_done and supervisor.agents)
        [found] = supervisor.agents
        assert (found.host, found.greeting.version) == ("h3", __version__)
        secret = os.urandom(32)
        masked = found.connection.mask(secret)
        assert masked != secret
        assert agent.connection.mask(masked) == secret
        with pytest.raises(AuthenticationError, match="one secret"):
            found.connection.mask(secret)


def test_tickets_are_in_no_representation():
    book = TicketBook()
    secret = book.issue(0, "h1", time.monotonic() + SECONDS)
    text = DialText(("h0:1",), secret.hex(), 0, 5.0)
    assert secret.hex() not in repr(text)
    assert secret.hex() not in repr(book._tickets)
    assert decode_dial_text(encode_dial_text(text)) == text


def test_a_ticket_that_is_used_twice_names_both_addresses(supervisor):
    text = supervisor.listener.issue(0, "h3", SECONDS)
    with closing(Dialing(text)) as first:
        supervisor.wait_for(lambda: first.is_done)
        with closing(Dialing(text)) as second:
            supervisor.wait_for(lambda: second.is_done and supervisor.conflicts)
        addresses = [f"127.0.0.1:{first.connection.socket.getsockname()[1]}"]
        assert supervisor.conflicts[0].startswith(f"two agents claim host h3: from {addresses[0]} and from 127.0.0.1:")
        assert "two agents claim host h3" in str(second.error)
        assert len(supervisor.agents) == 1


def test_a_wrong_ticket_is_no_ticket(supervisor):
    supervisor.listener.issue(0, "h3", SECONDS)
    assert isinstance(raw_connection(supervisor, os.urandom(32)), AuthenticationError)
    assert (supervisor.agents, supervisor.conflicts) == ([], [])
    supervisor.wait_for(lambda: supervisor.listener.num_refused == 1)


@pytest.mark.parametrize(
    "me",
    [
        Identity(ProcessRole.AGENT, 7, DIAL_PURPOSE),
        Identity(ProcessRole.RANK, 0, DIAL_PURPOSE),
        Identity(ProcessRole.AGENT, 0, "heartbeat"),
    ],
)
def test_a_ticket_counts_for_its_agent_alone(supervisor, me):
    ticket = ticket_of(supervisor.listener.issue(0, "h3", SECONDS))
    assert isinstance(raw_connection(supervisor, ticket, me), AuthenticationError)


def test_a_ticket_is_void_after_its_deadline(supervisor):
    ticket = ticket_of(supervisor.listener.issue(0, "h3", -1.0))
    assert isinstance(raw_connection(supervisor, ticket), AuthenticationError)
    book = TicketBook()
    secret = book.issue(0, "h3", 10.0)
    assert [book.find_secret(AGENT, now) for now in (9.0, 11.0)] == [secret, None]
    book.claim(0, "10.0.0.1:5")
    assert book.find_secret(AGENT, 11.0) == secret  # who has it is told why it is refused
    book.cancel(0)
    assert book.find_secret(AGENT, 9.0) is None


def test_each_attempt_of_a_task_has_a_ticket_of_its_own_which_counts_once(supervisor):
    task = decode_dial_text(supervisor.listener.issue(3, "task", SECONDS, has_attempts=True))
    texts = [text_of_attempt(task, attempt) for attempt in (0, 1, 0xFFFF)]
    assert len({text.ticket for text in texts} | {task.ticket}) == 4
    assert text_of_attempt(texts[0], 5) == texts[0]
    for text in texts:
        with closing(Dialing(encode_dial_text(text))) as first:
            supervisor.wait_for(lambda first=first: first.is_done)
            assert first.error is None
            with closing(Dialing(encode_dial_text(text))) as second:
                supervisor.wait_for(lambda second=second: second.is_done)
                assert "two agents claim host task" in str(second.error)
    assert [agent.host for agent in supervisor.agents] == ["task"] * 3
    # the task's own secret opens nothing, nor does one attempt's ticket open another
    me = Identity(ProcessRole.AGENT, 3, DIAL_PURPOSE)
    assert isinstance(raw_connection(supervisor, ticket_of(encode_dial_text(task)), me), AuthenticationError)
    other = Identity(ProcessRole.AGENT, 3 | 7 << 16, DIAL_PURPOSE)
    assert isinstance(raw_connection(supervisor, ticket_of(encode_dial_text(texts[1])), other), AuthenticationError)
    unknown = Identity(ProcessRole.AGENT, 4, DIAL_PURPOSE)
    assert isinstance(raw_connection(supervisor, derive_ticket(bytes(32), 0), unknown), AuthenticationError)


def test_what_was_recorded_is_worth_nothing(supervisor):
    """The bytes of an agent that was taken in, once more."""
    text = supervisor.listener.issue(0, "h3", SECONDS)
    sent: list[bytes] = []
    host, port = split_address(supervisor.listener.address)
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def relay() -> None:
            agent, _ = middle.accept()
            with agent, socket.create_connection((host, port)) as launcher, suppress(OSError):
                threading.Thread(target=lambda: _copy(launcher, agent, [])).start()
                _copy(agent, launcher, sent)

        thread = threading.Thread(target=relay)
        thread.start()
        address = (f"127.0.0.1:{middle.getsockname()[1]}",)
        tapped = encode_dial_text(msgspec.structs.replace(decode_dial_text(text), addresses=address))
        with closing(Dialing(tapped)) as agent:
            supervisor.wait_for(lambda: agent.is_done and supervisor.agents)
        supervisor.agents[0].connection.close()
        thread.join()
    assert ticket_of(text) not in b"".join(sent)
    with socket.create_connection((host, port)) as again:
        again.sendall(b"".join(sent))
        supervisor.wait_for(lambda: supervisor.listener.num_refused == 1)
    assert supervisor.conflicts == []


def _copy(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            seen.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_hundred_strangers_do_no_harm(supervisor):
    address = split_address(supervisor.listener.address)
    strangers = [socket.create_connection(address) for _ in range(200)]
    try:
        for number, stranger in enumerate(strangers):
            with suppress(OSError):
                stranger.sendall(bytes([number]) * (number % 7))
        with closing(Dialing(supervisor.listener.issue(0, "h3", SECONDS))) as agent:
            supervisor.wait_for(lambda: agent.is_done)
            assert agent.error is None
        assert supervisor.listener.num_refused >= 200 - 128
        assert (len(supervisor.agents), supervisor.conflicts) == (1, [])
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("words", [b"", b"{}", b"[" * 5000, b'{"version": 3}', b"x" * 100_000])
def test_who_has_a_ticket_and_greets_in_other_words_is_refused(supervisor, words):
    connection = raw_connection(supervisor, ticket_of(supervisor.listener.issue(0, "h3", SECONDS)))
    assert isinstance(connection, Connection)
    with closing(connection):
        connection.send(words, time.monotonic() + SECONDS)
        supervisor.wait_for(lambda: supervisor.listener.num_refused == 1)
    assert (supervisor.agents, supervisor.conflicts) == ([], [])


def test_another_version_is_refused_before_any_secret_with_both_pythons(supervisor):
    connection = raw_connection(supervisor, ticket_of(supervisor.listener.issue(0, "h3", SECONDS)))
    assert isinstance(connection, Connection)
    with closing(connection):
        greeting = DialGreeting("0.0.1", "/opt/old/python", "h3")
        connection.send(msgspec.json.encode(greeting), time.monotonic() + SECONDS)
        supervisor.wait_for(lambda: supervisor.refused)
        answer = connection.receive(time.monotonic() + SECONDS).decode()
    assert supervisor.refused == [("h3", answer)]
    assert answer.startswith(f"Reigen 0.0.1 there (/opt/old/python), {__version__} here (/")
    assert supervisor.agents == []


def test_an_agent_waits_for_a_launcher_that_comes_late(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    monkeypatch.setattr(dialing, "_NOTICE_SECONDS", 0.1)
    text = DialText((f"no-such-host.invalid:{port}", f"127.0.0.1:{port}"), bytes(32).hex(), 0, 0.5)
    with closing(Dialing(encode_dial_text(text))) as agent:
        agent._thread.join()
    assert "was not there within 0.5 s: Connection refused" in str(agent.error)
    assert any("waiting for the launcher at no-such-host.invalid" in line for line in agent.lines)


def test_an_agent_that_has_greeted_waits_for_its_answer_and_does_not_use_its_ticket_again(supervisor, monkeypatch):
    monkeypatch.setattr(dialing, "_ATTEMPT_SECONDS", 0.2)
    with closing(Dialing(supervisor.listener.issue(0, "h3", SECONDS))) as agent:
        supervisor.wait_for(lambda: supervisor.listener._waiting)
        # the launcher has other things to do for longer than an attempt may take
        assert not wait_ready(supervisor.listener._listener._listening, 0.5)
        supervisor.wait_for(lambda: agent.is_done)
        assert agent.error is None
    assert (len(supervisor.agents), supervisor.conflicts) == (1, [])


def test_an_agent_that_is_not_answered_in_time_says_so(supervisor):
    with closing(Dialing(supervisor.listener.issue(0, "h3", 0.5))) as agent:
        supervisor.wait_for(lambda: supervisor.listener._waiting or agent.is_done)
        agent._thread.join()
    assert str(agent.error) == "the launcher has not answered this agent's greeting: timed out"


def test_an_agent_whose_connection_is_closed_without_an_answer_has_its_ticket_still(supervisor):
    with closing(Dialing(supervisor.listener.issue(0, "h3", SECONDS))) as agent:
        supervisor.wait_for(lambda: supervisor.listener._waiting)
        for connection in list(supervisor.listener._waiting):  # as one of too many is closed
            supervisor.listener._drop(connection)
        supervisor.wait_for(lambda: agent.is_done)
        assert agent.error is None
    assert (len(supervisor.agents), supervisor.conflicts) == (1, [])


def test_what_the_launcher_sends_behind_its_answer_is_not_lost(supervisor):
    """Both come at once."""
    with closing(Dialing(supervisor.listener.issue(0, "h3", SECONDS))) as agent:
        supervisor.wait_for(lambda: supervisor.listener._waiting)
        [connection] = supervisor.listener._waiting
        supervisor.loop.unwatch(connection)
        connection.receive(time.monotonic() + SECONDS)
        connection.post(b"")
        connection.post(b"first request")
        assert connection.flush()
        agent._thread.join()
        assert agent.error is None
        assert agent.connection.receive(time.monotonic() + SECONDS) == b"first request"


def test_an_agent_that_waits_for_its_answer_hears_the_end_of_its_starter(supervisor):
    reading, writing = os.pipe()
    try:
        with closing(Dialing(supervisor.listener.issue(0, "h3", SECONDS), stdin=reading)) as agent:
            supervisor.wait_for(lambda: supervisor.listener._waiting)
            os.close(writing)
            agent._thread.join()
        assert "the process that has started this agent has ended" in str(agent.error)
    finally:
        os.close(reading)


def test_errors_of_those_who_handle_messages_are_not_the_end_of_the_connection(supervisor):
    """An OSError of a handler is its own: a full disk, or no more memory."""
    ends: list[str] = []

    def handle(reply: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with closing(Dialing(supervisor.listener.issue(0, "h3", SECONDS))) as agent, LauncherLoop() as loop:
        supervisor.wait_for(lambda: agent.is_done and supervisor.agents)
        line = DialedLine(loop)
        line.open(handle, ends.append)
        line.attach(supervisor.agents[0].connection)
        loop.wait(0.0)  # a first look, at what has come before
        agent.connection.send(REPLY_CODEC.encode(KeepAlive()), time.monotonic() + SECONDS)
        with pytest.raises(OSError, match="No space left"):
            loop.wait(SECONDS)
        line.close()
    assert ends == []


def test_a_gathered_agent_that_comes_when_the_job_is_over_ends_at_once():
    gathering = Gathering(("127.0.0.1", 0), ["0"], 300.0)
    text = decode_dial_text(gathering.texts["0"])
    gathering.close()
    with pytest.raises(LaunchError, match="has gone: the job is over"):
        dial(text, lambda line: None)


def test_an_agent_whose_starter_has_ended_ends(supervisor):
    reading, writing = os.pipe()
    text = DialText(("127.0.0.1:1",), bytes(32).hex(), 0, SECONDS)
    try:
        with closing(Dialing(encode_dial_text(text), stdin=reading)) as agent:
            os.close(writing)
        assert "the process that has started this agent has ended" in str(agent.error)
    finally:
        os.close(reading)


def test_dial_texts_are_read_from_stdin_and_from_files_of_this_user_alone(tmp_path):
    text = DialText(("h0:1",), bytes(32).hex(), 3, 5.0)
    line = encode_dial_text(text)
    for content, name in ((f"{line}\nrest", ""), (f"h1 nothing\nh2 {line}\n", "h2")):
        reading, writing = os.pipe()
        os.write(writing, content.encode())
        os.close(writing)
        assert read_dial_text(reading, name) == text
        os.close(reading)
    file = tmp_path / "dial"
    file.write_text(line)
    file.chmod(0o600)
    assert read_dial_file(str(file)) == text
    file.chmod(0o640)
    with pytest.raises(LaunchError, match="chmod 600"):
        read_dial_file(str(file))
    for wrong in ("", "{}", line.replace("00", "0", 1), "x" * 100):
        with pytest.raises(WireError, match="dial text"):
            decode_dial_text(wrong)
    with pytest.raises(LaunchError, match="No such file"):
        read_dial_file(str(tmp_path / "other"))


# ---------------------------------------------------------------------------------------------- gathering


def test_tasks_of_one_machine_are_one_host_and_its_first_one_is_called():
    with closing(Gathering(("127.0.0.1", 0), ["0", "1"], SECONDS)) as gathering:
        tasks = [Dialing(gathering.texts[name]) for name in ("0", "1")]
        gathering.wait(lambda seconds: None, lambda problems: None)
        assert gathering.missing() == []
        assert group_by_machine(gathering.agents, ["0", "1"]) == [["0", "1"]]
        call = DialText(("127.0.0.1:9",), os.urandom(32).hex(), 5, 1.0)
        gathering.call("0", encode_dial_text(call))
        for task in tasks:
            task._thread.join()
        assert await_call(tasks[0].connection, lambda connection: wait_ready(connection, SECONDS)) == call
    assert await_call(tasks[1].connection, lambda connection: wait_ready(connection, SECONDS)) is None


class Slots:
    """Tasks of an elastic job, and who has an agent."""

    def __init__(self, *names: str) -> None:
        self.loop, self.agents = EventLoop(), set[str]()
        self.gathering = SlotGathering(self.loop, ("127.0.0.1", 0), names, SECONDS, self.agents.__contains__)
        self.tasks: list[Dialing] = []

    def come(self, name: str, attempt: int = 0) -> Dialing:
        text = text_of_attempt(decode_dial_text(self.gathering.texts[name]), attempt)
        self.tasks.append(Dialing(encode_dial_text(text)))
        self.wait_for(lambda: self.tasks[-1].is_done)
        assert self.tasks[-1].error is None
        return self.tasks[-1]

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.gathering.hosts()
            self.loop.wait(0.01)

    @property
    def num_slots(self) -> list[int]:
        return [host.num_slots for host in self.gathering.hosts()]

    def close(self) -> None:
        for task in self.tasks:
            task.close()
        self.gathering.close()
        self.loop.close()


def test_tasks_of_an_elastic_job_come_and_go():
    call = encode_dial_text(DialText(("127.0.0.1:9",), os.urandom(32).hex(), 5, 1.0))
    with closing(Slots("0", "1", "2")) as slots:
        assert slots.num_slots == []
        first = slots.come("0")
        slots.come("1")
        assert slots.num_slots == [2]
        (host,) = slots.gathering.hosts()
        assert (host.name, host.address) == (socket.gethostname(), "127.0.0.1")
        # the first becomes the agent, and its slot counts while that is there
        slots.agents.add(host.name)
        slots.gathering.call(host.name, call)
        assert await_call(first.connection, lambda connection: wait_ready(connection, SECONDS)) is not None
        assert (slots.num_slots, slots.gathering.task_of_agent(host.name)) == ([2], "0")
        slots.come("2").close()
        slots.wait_for(lambda: slots.num_slots == [2])
        slots.agents.clear()
        assert slots.num_slots == [1]
        # the engine runs the task again, and a task that is run again has left its place
        slots.come("0", 1)
        slots.come("0", 2)
        slots.wait_for(lambda: slots.num_slots == [2])
        for task in ("1", "0"):
            slots.agents.add(host.name)
            slots.gathering.call(host.name, call)
            assert slots.gathering.task_of_agent(host.name) == task
            slots.agents.clear()
        assert slots.num_slots == []
        with pytest.raises(LaunchError, match="no task of its engine is there any more"):
            slots.gathering.call(host.name, call)


def test_what_is_not_the_launchers_is_no_end_of_the_job():
    with closing(Gathering(("127.0.0.1", 0), ["0"], SECONDS)) as gathering:
        task = Dialing(gathering.texts["0"])
        gathering.wait(lambda seconds: None, lambda problems: None)
        task._thread.join()
        gathering.agents["0"].connection.send(b"no dial text", time.monotonic() + SECONDS)
        with pytest.raises(LaunchError, match=r"the connection to the launcher has failed: .* no dial text"):
            await_call(task.connection, lambda connection: wait_ready(connection, SECONDS))


def test_a_launcher_that_cannot_be_reached_any_more_is_no_end_of_the_job():
    with closing(Gathering(("127.0.0.1", 0), ["0"], SECONDS)) as gathering:
        task = Dialing(gathering.texts["0"])
        gathering.wait(lambda seconds: None, lambda problems: None)
        task._thread.join()

        def time_out(connection: Connection) -> None:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # as of a host that has no power

        with pytest.raises(LaunchError, match="Connection timed out"):
            await_call(task.connection, time_out)


def test_tasks_that_do_not_come_are_named():
    def attempt(seconds: float) -> None:
        with closing(Gathering(("127.0.0.1", 0), ["0", "1"], seconds)) as gathering:
            with closing(Dialing(gathering.texts["1"])):
                gathering.wait(lambda seconds: None, lambda problems: None)
            assert gathering.missing() == ["0"]

    patiently(attempt, 0.3)
