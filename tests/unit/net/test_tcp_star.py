"""Control messages over connections: order, full sockets, ends, forgeries, wake-ups."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, open_connection
from reigen.net.doorbells import WaitingThread
from reigen.net.shm_ring import MAX_MESSAGE_BYTES
from reigen.net.tcp_star import TcpStarTransport
from tests.accepting import accept_connection

_PATIENCE = 80.0


def pair(made: ExitStack, rank: int) -> tuple[Connection, Connection]:
    """Rank 0's end of a connection to ``rank``, and that rank's."""
    secret, until = bytes(32), time.monotonic() + _PATIENCE
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:
        me = Identity(ProcessRole.RANK, rank)
        one = other.submit(open_connection, listener.getsockname(), secret, me, MAX_MESSAGE_BYTES, until)
        hub = accept_connection(listener.accept()[0], secret, Identity(ProcessRole.RANK, 0), MAX_MESSAGE_BYTES, until)
        ends = hub, one.result()
    for end in ends:
        made.callback(end.close)
    return ends


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def star(made: ExitStack, size: int) -> list[TcpStarTransport]:
    """Rank 0's end, and all others'."""
    hub, others = {}, []
    for rank in range(1, size):
        hub[rank], other = pair(made, rank)
        others.append(TcpStarTransport({0: other}))
    ends = [TcpStarTransport(hub), *others]
    for end in ends:
        made.callback(end.close)
    return ends


def heard(end: TcpStarTransport, count: int) -> list[tuple[int, bytes]]:
    """The next messages; the kernel may take its time to deliver them."""
    found: list[tuple[int, bytes]] = []
    until = time.monotonic() + _PATIENCE
    while len(found) < count:
        assert time.monotonic() < until
        found += end.receive()
    return found


def comes(condition: Callable[[], object]) -> bool:
    """Whether something that is on its way arrives."""
    until = time.monotonic() + _PATIENCE
    while not condition() and time.monotonic() < until:
        pass
    return bool(condition())


def test_messages_arrive_in_each_senders_order(made: ExitStack) -> None:
    hub, one, two = star(made, 3)
    one.send(b"a")
    two.send(b"b")
    one.send(b"")
    assert comes(hub.pending)
    assert sorted(heard(hub, 3)) == [(1, b""), (1, b"a"), (2, b"b")]
    one.send(b"1")
    one.send(b"2")
    assert heard(hub, 2) == [(1, b"1"), (1, b"2")]
    assert hub.receive() == []
    assert not hub.pending()


def test_the_hub_is_heard_by_all(made: ExitStack) -> None:
    hub, one, two = star(made, 3)
    hub.send(b"all")
    assert heard(one, 1) == heard(two, 1) == [(0, b"all")]
    assert hub.receive() == []


def test_what_does_not_fit_is_kept_back_in_order(made: ExitStack) -> None:
    hub, one = star(made, 2)
    messages = [bytes([number]) * MAX_MESSAGE_BYTES for number in range(250)]
    for message in messages:
        hub.send(message)
    assert hub.backlog
    received = []
    until = time.monotonic() + _PATIENCE
    while len(received) < len(messages) and time.monotonic() < until:
        received += [message for _, message in one.receive()]
        hub.flush()
    assert received == messages
    assert hub.backlog == 0


def test_a_message_may_be_as_long_as_allowed_and_no_longer(made: ExitStack) -> None:
    hub, _ = star(made, 2)
    with pytest.raises(AssertionError, match="control message"):
        hub.send(bytes(MAX_MESSAGE_BYTES + 1))


def test_who_went_has_been_heard_and_is_remembered(made: ExitStack) -> None:
    hub, one, two = star(made, 3)
    one.send(b"last words")
    one.close()
    assert heard(hub, 1) == [(1, b"last words")]
    assert comes(lambda: 1 in hub.lost or hub.pending())
    assert hub.receive() == []
    assert hub.lost == {1: "the other end closed the connection"}
    hub.send(b"go on")
    assert heard(two, 1) == [(0, b"go on")]
    assert not hub.pending()


def test_who_went_is_noticed_by_sending_too(made: ExitStack) -> None:
    hub, one = star(made, 2)
    one.send(b"last words")
    one.close()
    assert comes(lambda: hub.send(b"are you there?") or hub.lost)
    assert list(hub.lost) == [1]
    assert hub.pending()
    assert heard(hub, 1) == [(1, b"last words")]


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"\0\0\0\x21" + bytes(33), AuthenticationError), (b"\xff" * 4, WireError)],
    ids=["forged", "long"],
)
def test_bytes_that_are_not_the_peers_are_refused(made: ExitStack, data: bytes, kind: type[Exception]) -> None:
    ours, theirs = pair(made, 1)
    hub = TcpStarTransport({1: ours})
    made.callback(hub.close)
    theirs.socket.sendall(data)
    hub.set_wake_target(WaitingThread.CALLER)
    hub.sleep(hub.token(), WaitingThread.CALLER, _PATIENCE)
    with pytest.raises(kind):
        hub.receive()


@pytest.mark.parametrize("who", [WaitingThread.ENGINE, WaitingThread.CALLER])
def test_a_message_or_a_call_ends_a_sleep(made: ExitStack, who: WaitingThread) -> None:
    hub, one = star(made, 2)
    hub.set_wake_target(who)
    one.send(b"m")
    hub.sleep(hub.token(), who, _PATIENCE)
    assert heard(hub, 1) == [(1, b"m")]
    caller = threading.Thread(target=lambda: hub.wake(WaitingThread.ENGINE | WaitingThread.CALLER))
    caller.start()
    begin = time.monotonic()
    hub.sleep(hub.token(), who, _PATIENCE)
    caller.join()
    assert time.monotonic() - begin < _PATIENCE / 2


def test_a_call_before_the_sleep_is_not_lost(made: ExitStack) -> None:
    hub, _ = star(made, 2)
    for taker in (WaitingThread.NONE, WaitingThread.ENGINE):
        hub.set_wake_target(taker)
        hub.wake(WaitingThread.ENGINE | WaitingThread.CALLER)
        hub.set_wake_target(WaitingThread.ENGINE)
        begin = time.monotonic()
        hub.sleep(hub.token(), WaitingThread.ENGINE, _PATIENCE)
        assert time.monotonic() - begin < _PATIENCE / 2


def test_a_message_for_the_caller_leaves_the_engines_thread_asleep(made: ExitStack) -> None:
    hub, one = star(made, 2)
    hub.set_wake_target(WaitingThread.CALLER)
    one.send(b"for the caller")
    assert comes(hub.pending)
    begin = time.monotonic()
    hub.sleep(hub.token(), WaitingThread.ENGINE, 0.05)
    assert time.monotonic() - begin >= 0.05
    hub.set_wake_target(WaitingThread.ENGINE)
    hub.sleep(hub.token(), WaitingThread.ENGINE, _PATIENCE)
    assert hub.receive() == [(1, b"for the caller")]


def test_behind_a_caller_the_engines_thread_hears_of_messages_in_a_moment(made: ExitStack) -> None:
    hub, one = star(made, 2)
    hub.set_wake_target(WaitingThread.NONE)
    one.send(b"m")
    assert comes(hub.pending)
    hub.release_to_engine(urgent=False)
    hub.set_wake_target(WaitingThread.NONE)  # the caller is back
    begin = time.monotonic()
    hub.sleep(hub.token(), WaitingThread.ENGINE, 0.05)
    assert time.monotonic() - begin >= 0.05
    assert hub.release_to_engine(urgent=False)
    hub.sleep(hub.token(), WaitingThread.ENGINE, _PATIENCE)  # until it is time to look
    assert hub.receive() == [(1, b"m")]
    hub.set_wake_target(WaitingThread.ENGINE)
    assert time.monotonic() - begin < _PATIENCE / 2
    begin = time.monotonic()
    hub.sleep(hub.token(), WaitingThread.ENGINE, 0.05)
    assert time.monotonic() - begin >= 0.05, "it is told once"


def test_a_descriptor_tells_of_messages_and_calls_and_is_calmed(made: ExitStack) -> None:
    hub, one = star(made, 2)
    hub.set_wake_target(WaitingThread.NONE)
    poll = select.poll()
    poll.register(hub.descriptor, select.POLLIN)
    assert poll.poll(0) == []
    one.send(b"m")
    assert poll.poll(_PATIENCE * 1000)
    assert hub.receive() == [(1, b"m")]
    assert poll.poll(0) == []
    hub.wake(WaitingThread.ENGINE | WaitingThread.CALLER)
    assert poll.poll(0)
    hub.clear_wakeup()
    assert poll.poll(0) == []
