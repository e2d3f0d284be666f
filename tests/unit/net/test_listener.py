"""Connections that are authenticated and say nothing: how long a service keeps them, and how many."""

import queue
import threading
import time
from contextlib import closing, contextmanager

import pytest

from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection
from reigen.net.listener import MessageListener
from tests.patience import patiently

SECRET = b"r" * 32


@contextmanager
def receiving(**facts):
    """A reception that a thread serves, and what it has heard."""
    heard = queue.Queue()
    reception = MessageListener(
        SECRET, ("127.0.0.1", 0), Identity(ProcessRole.RANK, 0), 1 << 12, lambda _, said: heard.put(said),
        lambda guest, silent: None, **facts,
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
