"""Connections between ranks: who gets which, and what happens when somebody is late, gone, or a stranger."""

import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from reigen.cluster.connection_pool import MAX_KEPT_PER_RANK, ConnectionPool
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.errors import AuthenticationError, CollectiveError, DeadlineError, PeerLostError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection
from reigen.net.listener import MAX_UNAUTHENTICATED
from reigen.testing import run_threads

SECRET = b"s" * 32


def soon(seconds=20.0):
    return time.monotonic() + seconds


@contextmanager
def mesh(rank, size, rendezvous, secret=SECRET, address="127.0.0.1"):
    one = ConnectionPool(rank, size, rendezvous, secret, address, peer_timeout_seconds=20.0)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def opened(one, peers, purpose, **options):
    streams = one.open(peers, purpose, soon(), **options)
    try:
        yield streams
    finally:
        for stream in streams.values():
            stream.close()


@contextmanager
def in_thread(work):
    """Runs ``work(stop)`` beside the test until the test is done with it."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


def closed_by_peer(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def accepting(one, peer):
    """Has a mesh accept connections while the test does something else."""

    def work(stop):
        def look(_):
            if stop.is_set():
                raise CollectiveError("enough")

        with pytest.raises(CollectiveError, match="enough"):
            one.open([peer], "never", soon(), look)

    return in_thread(work)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("size", [2, 5])
def test_everybody_reaches_everybody(size, address):
    def body(rank, rendezvous):
        others = [r for r in range(size) if r != rank]
        with mesh(rank, size, rendezvous, address=address) as one, opened(one, others, "test") as streams:
            for stream in streams.values():
                stream.send(b"%d" % rank, soon())
            heard = {peer: int(stream.receive(soon())) for peer, stream in streams.items()}
            assert heard == {peer: peer for peer in others}
            assert {peer: stream.peer.rank for peer, stream in streams.items()} == heard

    run_threads(body, size)


def test_purposes_are_kept_apart_whatever_the_order():
    purposes = [f"purpose/{n}" for n in range(5)]

    def body(rank, rendezvous):
        with mesh(rank, 2, rendezvous) as one, ExitStack() as stack:
            found = {}
            for purpose in purposes if rank else purposes[::-1]:
                found[purpose] = stack.enter_context(opened(one, [1 - rank], purpose))[1 - rank]
            for purpose in purposes:
                found[purpose].send(f"{purpose} of {rank}".encode(), soon())
            return [found[purpose].receive(soon()).decode() for purpose in purposes]

    first, second = run_threads(body, 2)
    assert first == [f"{purpose} of 1" for purpose in purposes]
    assert second == [f"{purpose} of 0" for purpose in purposes]


def test_a_rank_that_starts_late_is_waited_for_and_named_meanwhile():
    named = []

    def body(rank, rendezvous):
        if rank == 2:
            rendezvous.get("waited for", 20.0)

        def waiting(missing):
            named.append((rank, tuple(missing)))
            if {(0, (2,)), (1, (2,))} <= set(named):
                rendezvous.put("waited for", b"")

        others = [r for r in range(3) if r != rank]
        with mesh(rank, 3, rendezvous) as one, opened(one, others, "test", waiting=waiting) as streams:
            assert sorted(streams) == others

    run_threads(body, 3)


def test_a_deadline_names_who_did_not_come_and_how_far_it_got():
    rendezvous = LocalRendezvous()
    with mesh(2, 5, rendezvous) as one, mesh(0, 5, rendezvous) as silent:
        with pytest.raises(DeadlineError) as caught:
            one.open([0, 1, 4], "test", soon(0.3))
        assert caught.value.ranks == (0, 1, 4)
        assert caught.value.details[0] == f"did not answer at {silent.address}"
        assert "has not told" in caught.value.details[1]
        assert caught.value.details[4] == f"has not connected to {one.address}"


def test_a_rank_that_has_ended_is_lost():
    rendezvous = LocalRendezvous()
    with mesh(0, 2, rendezvous) as gone:
        address = gone.address
    with mesh(1, 2, rendezvous) as one, pytest.raises(PeerLostError, match=address) as caught:
        one.open([0], "test", soon())
    assert caught.value.ranks == (0,)


def test_who_waits_can_be_told_to_stop():
    rendezvous = LocalRendezvous()

    def told(missing):
        raise PeerLostError("rank 1 has died", ranks=missing)

    with mesh(0, 2, rendezvous) as one, pytest.raises(PeerLostError, match="has died"):
        one.open([1], "test", soon(), told)


@pytest.mark.parametrize("knows", [0, 1])
def test_a_wrong_secret_is_refused_on_both_sides(knows):
    rendezvous = LocalRendezvous()
    secrets = [SECRET if rank == knows else os.urandom(32) for rank in range(2)]
    with mesh(0, 2, rendezvous, secrets[0]) as zero, mesh(1, 2, rendezvous, secrets[1]) as one:
        errors = []

        def accept(_):
            with pytest.raises(DeadlineError) as caught:
                zero.open([1], "test", soon(0.5))
            errors.append(caught.value)

        with in_thread(accept), pytest.raises(AuthenticationError, match=r"rank 0 at .* does not know"):
            one.open([0], "test", soon())
    assert "1 connection(s) were refused" in errors[0].details[1]


def test_strangers_keep_nobody_out():
    """Silent ones, noisy ones, and more of them than are listened to."""
    rendezvous = LocalRendezvous()
    with mesh(0, 2, rendezvous) as zero, mesh(1, 2, rendezvous) as one, ExitStack() as stack:
        host, port = zero.address.split(":")

        def stranger(data):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            connection.sendall(data)
            return connection

        silent = [stranger(b"") for _ in range(MAX_UNAUTHENTICATED + 5)]
        noisy = stranger(b"GET / HTTP/1.1\r\n" * 100)
        found = []

        def accept(_):
            found.append(stack.enter_context(opened(zero, [1], "test")))

        with in_thread(accept), opened(one, [0], "test") as streams:
            streams[0].send(b"hello", soon())
        assert found[0][1].receive(soon()) == b"hello"
        assert closed_by_peer(silent[0]), "the oldest strangers were let go"
        assert closed_by_peer(noisy)


@pytest.mark.parametrize(
    ("role", "rank"),
    [(ProcessRole.LAUNCHER, 1), (ProcessRole.RANK, 0), (ProcessRole.RANK, 2)],
    ids=["launcher", "itself", "no rank"],
)
def test_who_knows_the_secret_but_has_no_business_here_is_refused(role, rank):
    with mesh(0, 2, LocalRendezvous()) as zero, accepting(zero, 1):
        host, port = zero.address.split(":")
        stream = open_connection((host, int(port)), SECRET, Identity(role, rank, "never"), 1024, soon())
        with pytest.raises(ConnectionError):
            stream.receive(soon())
        stream.close()


def test_what_nobody_asks_for_is_kept_within_bounds_and_the_latest_counts():
    with mesh(0, 2, LocalRendezvous()) as zero, ExitStack() as stack:
        host, port = zero.address.split(":")

        def come(purpose):
            stream = open_connection((host, int(port)), SECRET, Identity(ProcessRole.RANK, 1, purpose), 1024, soon())
            stack.callback(stream.close)
            return stream

        with accepting(zero, 1):
            first = come("again")
            second = come("again")
            with pytest.raises(ConnectionError):
                first.receive(soon())
            kept = [come(f"purpose/{number}") for number in range(MAX_KEPT_PER_RANK - 1)]
            with pytest.raises(ConnectionError):
                come("too many").receive(soon())
        with opened(zero, [1], "again") as streams:
            streams[1].send(b"hello", soon())
            assert second.receive(soon()) == b"hello"
        zero.close()
        with pytest.raises(ConnectionError):
            kept[0].receive(soon())
