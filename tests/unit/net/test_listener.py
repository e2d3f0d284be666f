"""Connections that are authenticated and say nothing: how long a service keeps them, and how many."""

import errno
import os
import queue
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import ConnectionOptions, open_connection
from reigen.net.event_loop import EventLoop
from reigen.net.listener import Listener, MessageListener, open_listening_socket
from tests.patience import patiently

SECRET = b"r" * 32


OPTIONS = ConnectionOptions(SECRET, Identity(ProcessRole.RANK, 0), 1 << 12, peer_timeout_seconds=20.0)


@contextmanager
def receiving(**facts):
    """A reception that a thread serves, and what it has heard."""
    heard = queue.Queue()
    reception = MessageListener(
        ("127.0.0.1", 0), OPTIONS, lambda _, said: heard.put(said), lambda guest, silent: None, **facts,
    )  # fmt: skip
    with closing(reception):
        thread = threading.Thread(target=lambda: all(iter(lambda: reception.turn(None), False)))
        thread.start()
        try:
            yield reception, heard
        finally:
            reception.end()
            thread.join(60)


def guest(reception):
    host, port = reception.address.split(":")
    return closing(
        open_connection((host, int(port)), SECRET, Identity(ProcessRole.RANK, 1), 1 << 12, time.monotonic() + 60)
    )


def test_who_must_speak_and_does_not_is_closed_at_the_deadline():
    def attempt(seconds):
        with receiving(handshake_seconds=seconds, must_speak=True) as (reception, heard), guest(reception) as speaks:
            speaks.send(b"here", time.monotonic() + 60)
            with guest(reception) as silent, pytest.raises(ConnectionError):
                silent.receive(time.monotonic() + 60)
            speaks.send(b"still", time.monotonic() + 60)
            with guest(reception) as silent, pytest.raises(ConnectionError):
                silent.receive(time.monotonic() + 60)
            assert [heard.get(timeout=60), heard.get(timeout=60)] == [b"here", b"still"]

    patiently(attempt, 0.2)


def test_a_crowd_that_says_nothing_does_not_stay(monkeypatch):
    monkeypatch.setattr("reigen.net.listener.MAX_UNAUTHENTICATED", 2)
    with (
        receiving(must_speak=True) as (reception, _),
        guest(reception) as first,
        guest(reception),
        guest(reception),
        pytest.raises(ConnectionError),
    ):
        first.receive(time.monotonic() + 60)


def test_where_nobody_must_speak_silence_is_no_fault():
    def attempt(seconds):
        with receiving(handshake_seconds=seconds) as (reception, heard), guest(reception) as silent:
            with pytest.raises(TimeoutError):
                silent.receive(time.monotonic() + 3 * seconds)
            silent.send(b"late", time.monotonic() + 60)
            assert heard.get(timeout=60) == b"late"

    patiently(attempt, 0.1)


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptors left, so many times."""

    num_failures, errno = 0, errno.EMFILE

    def accept(self):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(self.errno, os.strerror(self.errno))
        return super().accept()


class Listening:
    """A listener on a loop of the test's, and what it has handed over."""

    def __init__(self, stack, *, must_confirm=False, **facts):
        plain, self.address = open_listening_socket("127.0.0.1")
        self.socket = Exhausted(fileno=plain.detach())
        self.socket.setblocking(False)
        self.loop = EventLoop()
        self.must_confirm, self.connections, self.dropped = must_confirm, [], []
        options = ConnectionOptions(SECRET, Identity(ProcessRole.RANK, 0), 1 << 12)
        self.listener = Listener(self.loop, self.socket, options, self.take, **facts)
        self.stack = stack
        stack.callback(self.loop.close)
        stack.callback(self.listener.close)

    def take(self, connection):
        self.stack.callback(connection.close)
        self.connections.append(connection)
        return (lambda: self.dropped.append(connection)) if self.must_confirm else None

    def stranger(self):
        host, port = self.address.split(":")
        made = socket.create_connection((host, int(port)), timeout=60)
        self.stack.callback(made.close)
        return made

    def client(self):
        """A connection, proven while the loop runs."""
        options = ConnectionOptions(SECRET, Identity(ProcessRole.RANK, 1), 1 << 12)
        host, port = self.address.split(":")
        made = options.start_connecting((host, int(port)))
        self.stack.callback(made.close)
        self.until(made.advance)
        return made

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.loop.wait(0.01)


def ended(stranger):
    stranger.setblocking(False)
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_strangers_do_not_displace_who_has_proven_itself(monkeypatch):
    monkeypatch.setattr("reigen.net.listener.MAX_UNAUTHENTICATED", 2)
    with ExitStack() as stack:
        listening = Listening(stack, must_confirm=True)
        proven = [listening.client() for _ in range(2)]
        listening.until(lambda: len(listening.connections) == len(proven))
        strangers = [listening.stranger() for _ in range(4)]
        listening.until(lambda: sum(map(ended, strangers)) == 2)
        assert [ended(each) for each in strangers] == [True, True, False, False]
        assert listening.dropped == []
        assert listening.listener.num_refused == 2
        listening.client()
        listening.until(lambda: listening.dropped)
        assert listening.dropped == listening.connections[:1]


def test_who_was_confirmed_is_not_dropped_and_who_was_not_is():
    def attempt(seconds):
        with ExitStack() as stack:
            listening = Listening(stack, must_confirm=True, handshake_seconds=seconds)
            for _ in range(2):
                listening.client()
            listening.until(lambda: len(listening.connections) == 2)
            listening.listener.confirm(listening.connections[0])
            stranger = listening.stranger()
            listening.until(lambda: listening.dropped and ended(stranger))
            assert listening.dropped == listening.connections[1:]
            assert "in time" in listening.listener.last_refusal

    patiently(attempt, 0.2)


def test_where_descriptors_are_used_up_strangers_give_theirs_and_nobody_spins():
    with ExitStack() as stack:
        listening = Listening(stack)
        stranger = listening.stranger()
        listening.until(lambda: listening.listener._pending)
        listening.socket.num_failures = 3
        client = ConnectionOptions(SECRET, Identity(ProcessRole.RANK, 1), 1 << 12).start_connecting(
            ("127.0.0.1", int(listening.address.split(":")[1]))
        )
        stack.callback(client.close)
        listening.until(lambda: listening.socket.num_failures < 3)
        assert ended(stranger)
        before = time.monotonic()
        listening.until(client.advance)
        listening.until(lambda: listening.connections)
        assert time.monotonic() - before >= 2 * 0.05
        assert "descriptor" in listening.listener.last_refusal


def test_no_descriptors_left_is_logged_once_until_a_connection_is_accepted(caplog):
    with ExitStack() as stack:
        listening = Listening(stack)
        for num_episodes in (1, 2):
            listening.socket.num_failures = 3
            listening.client()
            listening.until(lambda n=num_episodes: len(listening.connections) == n)
            warnings = [each for each in caplog.records if "could not be accepted" in each.getMessage()]
            assert len(warnings) == num_episodes


def test_a_connection_that_has_ended_in_the_queue_costs_nobody_else_theirs(caplog):
    with ExitStack() as stack:
        listening = Listening(stack)
        stranger = listening.stranger()
        listening.until(lambda: listening.listener._pending)
        listening.socket.num_failures, listening.socket.errno = 1, errno.ECONNABORTED
        listening.client()
        listening.until(lambda: listening.connections)
        assert not ended(stranger)
        assert listening.listener.num_refused == 0
        assert "could not be accepted" not in caplog.text


def test_a_pending_connection_whose_end_ends_another_is_no_error():
    def attempt(seconds):
        with ExitStack() as stack:
            listening = Listening(stack, handshake_seconds=seconds)
            dropped = []

            def take(connection):
                stack.callback(connection.close)
                listening.connections.append(connection)

                def drop():
                    dropped.append(connection)
                    for each in listening.connections:
                        listening.listener.confirm(each)

                return drop

            listening.listener._on_authenticated = take
            for _ in range(2):
                listening.client()
            listening.until(lambda: len(listening.connections) == 2)
            time.sleep(seconds)  # both are late
            listening.until(lambda: dropped)
            assert dropped == listening.connections[:1]

    patiently(attempt, 0.2)


def test_a_burst_of_requests_makes_no_heap_of_replies(monkeypatch):
    monkeypatch.setattr("reigen.net.listener.MAX_UNREAD_BYTES", 1 << 12)
    unsent, gone = [], []

    def reply(client, said):
        for _ in range(100):
            listener.send(client, bytes(1 << 12))
            unsent.append(client.num_unsent_bytes)

    listener = MessageListener(
        ("127.0.0.1", 0), OPTIONS, reply, lambda client, silent: gone.append(client),
    )  # fmt: skip
    with closing(listener):
        thread = threading.Thread(target=lambda: all(iter(lambda: listener.turn(None), False)))
        thread.start()
        try:
            with guest(listener) as client:
                client.send(b"much", time.monotonic() + 60)
                with pytest.raises(ConnectionError):
                    all(iter(lambda: client.receive(time.monotonic() + 60), b""))
        finally:
            listener.end()
            thread.join(60)
    assert max(unsent) <= 3 << 12
    assert len(gone) == 1
