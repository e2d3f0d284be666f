"""The rendezvous: what ranks rely on, checked on the service and on its twin, and what an enemy may try."""

import os
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from reigen.cluster.membership.control_service import (
    EXCHANGED_CODEC,
    MAX_EXCHANGED_BYTES,
    MAX_KEYS,
    MAX_VALUE_BYTES,
    REQUEST_CODEC,
    CancelGet,
    ControlService,
    ExchangeValues,
    ForgetKeys,
    GetValue,
    PutValue,
    RendezvousStore,
    StoreReply,
)
from reigen.cluster.membership.rendezvous import LocalRendezvous, PrefixRendezvous, RendezvousClient
from reigen.errors import ArgumentError, AuthenticationError, ConfigError, PeerLostError, WireError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection
from reigen.net.listener import MAX_UNAUTHENTICATED
from tests.patience import patiently

SECRET = b"s" * 32


@pytest.fixture
def server():
    service = ControlService(SECRET, handshake_seconds=60.0)
    service.start()
    yield service
    service.close()


@pytest.fixture(params=["service", "local"])
def ranks(request, server):
    """Two ranks' ends of one rendezvous."""
    with ExitStack() as stack:
        if request.param == "local":
            shared = LocalRendezvous()
            yield shared, shared
        else:
            clients = [RendezvousClient(server.address, SECRET, rank, 60.0) for rank in range(2)]
            for client in clients:
                stack.callback(client.close)
            yield clients


def test_the_first_value_stays_for_who_wants_to_be_the_first(ranks):
    zero, one = ranks
    assert zero.put_first("place", b"zero") == b"zero"
    assert one.put_first("place", b"one") == b"zero"
    assert one.get("place", 60.0) == b"zero"
    one.put("place", b"two")
    assert zero.put_first("place", b"zero") == b"two"


def raw(server):
    host, port = server.address.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def closed_by_peer(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def still_works(server):
    client = RendezvousClient(server.address, SECRET, 0, 60.0)
    client.put("alive", b"yes")
    assert client.get("alive", 60.0) == b"yes"
    client.close()


def test_what_one_puts_the_other_gets(ranks):
    ranks[0].put("key", b"value")
    assert ranks[1].get("key", 60.0) == b"value"
    assert ranks[0].get("key", 60.0) == b"value"
    ranks[0].put("empty", b"")
    assert ranks[1].get("empty", 60.0) == b""


def test_a_later_value_replaces_the_first(ranks):
    ranks[0].put("key", b"one")
    ranks[1].put("key", b"two")
    assert ranks[0].get("key", 60.0) == b"two"


def test_rooms_do_not_see_each_other(ranks):
    one, other = PrefixRendezvous(ranks[0], "one"), PrefixRendezvous(ranks[1], "other")
    one.put("key", b"1")
    ranks[0].put("key", b"0")
    assert other.put_first("key", b"2") == b"2"
    assert PrefixRendezvous(ranks[1], "one").get("key", 1.0) == b"1"
    assert [each.get("key", 1.0) for each in (one, other, ranks[1])] == [b"1", b"2", b"0"]


def test_what_is_forgotten_is_gone_and_makes_room(ranks):
    one, other = ranks
    for key in ("view 1/a", "view 1/b", "view 10/a"):
        one.put(key, b"value")
    PrefixRendezvous(other, "view 1").forget("")
    with pytest.raises(ArgumentError, match="1 to 256 bytes"):
        other.forget("")
    assert [one.peek(key) for key in ("view 1/a", "view 1/b", "view 10/a")] == [None, None, b"value"]


def test_the_store_counts_what_was_forgotten():
    store = RendezvousStore()
    for number in range(3):
        store.handle(0, PutValue(number, "view 1/a", bytes(MAX_VALUE_BYTES)))
        store.handle(0, ForgetKeys(number, "view 1/"))
    assert [reply.problem for _, reply in store.handle(0, PutValue(4, "other", b"x"))] == [""]
    assert store._num_bytes == 1


def test_get_waits_for_put(ranks):
    found = []
    thread = threading.Thread(target=lambda: found.append(ranks[1].get("later", 60.0)))
    thread.start()
    ranks[0].put("other", b"no")
    ranks[0].put("later", b"yes")
    thread.join()
    assert found == [b"yes"]


def test_ranks_exchange_values_with_one_request_each(ranks):
    zero, one = (PrefixRendezvous(rank, "view 1") for rank in ranks)
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(one.exchange("card", ["0", "1"], 1, b"one", 60.0)))
    thread.start()
    found.append(zero.exchange("card", ["0", "1"], 0, b"zero", 60.0))
    thread.join()
    assert found == [[b"zero", b"one"]] * 2
    assert zero.get("card/1", 60.0) == b"one"
    assert zero.exchange("card", ["0", "1"], 0, b"again", 60.0) == [b"again", b"one"]


def test_an_exchange_ends_without_one_of_them_and_can_be_tried_again(ranks):
    zero, one = ranks
    with pytest.raises(TimeoutError, match="card"):
        zero.exchange("card", ["0", "1"], 0, b"zero", 0.01)
    assert one.peek("card/0") == b"zero"
    assert one.exchange("card", ["0", "1"], 1, b"one", 60.0) == [b"zero", b"one"]
    assert zero.exchange("card", ["0", "1"], 0, b"zero", 60.0) == [b"zero", b"one"]


@pytest.mark.parametrize(
    ("names", "own", "value"),
    [
        ([], 0, b""),
        (["0"], 1, b""),
        (["0"], -1, b""),
        (["0", "k" * 300], 0, b""),
        (["0"], 0, bytes(MAX_VALUE_BYTES + 1)),
    ],
)
def test_bounds_of_an_exchange(ranks, names, own, value):
    with pytest.raises(ArgumentError):
        ranks[0].exchange("card", names, own, value, 1.0)


def test_a_wait_ends_and_names_the_key(ranks):
    with pytest.raises(TimeoutError, match=r"'missing' .* within 0.02 s"):
        ranks[0].get("missing", 0.02)
    ranks[1].put("missing", b"late")
    assert ranks[0].get("missing", 60.0) == b"late"


def test_a_look_does_not_wait(ranks):
    assert ranks[0].peek("key") is None
    assert PrefixRendezvous(ranks[0], "room").peek("key") is None
    ranks[1].put("room/key", b"value")
    assert PrefixRendezvous(ranks[0], "room").peek("key") == b"value"
    assert ranks[0].peek("key") is None
    with pytest.raises(ArgumentError):
        ranks[0].peek("k" * 257)


def test_bounds_of_keys_and_values(ranks):
    large = os.urandom(1 << 20)
    ranks[0].put("k" * 256, large)
    assert ranks[1].get("k" * 256, 60.0) == large
    for key, value in (("", b""), ("k" * 257, b""), ("ü" * 129, b""), ("k", large + b"x")):
        with pytest.raises(ArgumentError):
            ranks[0].put(key, value)
    with pytest.raises(ArgumentError):
        ranks[0].get("k" * 257, 1.0)


def test_many_ranks_exchange_everything_with_everybody(server):
    size, failures = 12, []

    def run(rank):
        client = RendezvousClient(server.address, SECRET, rank, 20.0)
        client.put(f"card/{rank}", f"I am {rank}".encode())
        failures.extend(p for p in range(size) if client.get(f"card/{p}", 20.0) != f"I am {p}".encode())
        client.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_service_can_be_reached_before_it_starts():
    service = ControlService(SECRET)
    done = []
    thread = threading.Thread(target=lambda: done.append(RendezvousClient(service.address, SECRET, 0, 60.0)))
    thread.start()
    service.start()
    thread.join()
    done[0].close()
    service.close()
    service.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "", "224.0.0.1"])
def test_only_an_address_of_one_interface_is_listened_on(host):
    with pytest.raises(ConfigError, match="interface"):
        ControlService(SECRET, host)
    with pytest.raises(OSError, match="assign"):
        ControlService(SECRET, "192.0.2.1")  # not this machine's


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")])
def test_an_address_and_a_port_of_choice(host, shown):
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        with pytest.raises(OSError, match="in use"):
            ControlService(SECRET, host, taken.getsockname()[1])
        port = taken.getsockname()[1]
    service = ControlService(SECRET, host, port)
    service.start()
    assert service.address == f"{shown}:{port}"
    client = RendezvousClient(service.address, SECRET, 0, 60.0)
    client.put("key", b"value")
    client.close()
    service.close()


def test_the_wrong_secret(server):
    with pytest.raises(AuthenticationError):
        RendezvousClient(server.address, b"x" * 32, 0, 60.0)
    still_works(server)


def test_a_launcher_that_has_gone():
    service = ControlService(SECRET)
    service.start()
    client = RendezvousClient(service.address, SECRET, 0, 60.0)
    service.close()
    for call in (lambda: client.get("key", 60.0), lambda: client.put("key", b"")):
        with pytest.raises(PeerLostError, match=r"control service at 127\.0\.0\.1"):
            call()
    client.close()
    with pytest.raises(PeerLostError):
        RendezvousClient(service.address, SECRET, 0, 60.0)


def test_a_waiting_rank_learns_at_once_that_the_launcher_has_gone():
    service = ControlService(SECRET)
    service.start()
    client = RendezvousClient(service.address, SECRET, 0, 60.0)
    caught = []

    def wait():
        try:
            client.get("never", 30.0)
        except PeerLostError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    service.close()
    thread.join(10)
    assert len(caught) == 1
    client.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 200, b"\xff" * 100_000])
def test_garbage_closes_its_own_connection_only(server, noise):
    with raw(server) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(noise)
        assert closed_by_peer(connection)
    still_works(server)


def test_slow_strangers_are_closed_at_their_deadline():
    def attempt(seconds):
        service = ControlService(SECRET, handshake_seconds=seconds)
        service.start()
        try:
            with raw(service) as silent, raw(service) as slow:
                slow.sendall(b"RGN3")
                still_works(service)
                assert closed_by_peer(silent)
                assert closed_by_peer(slow)
        finally:
            service.close()

    patiently(attempt, 0.2)


def test_a_crowd_of_strangers_does_not_keep_ranks_out():
    service = ControlService(SECRET, handshake_seconds=60.0)
    service.start()
    with ExitStack() as stack:
        crowd = [stack.enter_context(raw(service)) for _ in range(MAX_UNAUTHENTICATED + 20)]
        still_works(service)
        assert closed_by_peer(crowd[0])
    service.close()


def authenticated(server):
    host, port = server.address.split(":")
    deadline = time.monotonic() + 60
    return open_connection((host, int(port)), SECRET, Identity(ProcessRole.RANK, 0), 1 << 24, deadline), deadline


def test_an_authenticated_client_that_sends_nonsense_is_closed(server):
    stream, deadline = authenticated(server)
    stream.send(b"nonsense", deadline)
    with pytest.raises(ConnectionError):
        stream.receive(deadline)
    stream.close()
    still_works(server)


def test_a_message_that_meets_a_bug_costs_its_connection_only(server, monkeypatch, caplog):
    original = RendezvousStore.handle

    def handle(store, owner, message):
        if isinstance(message, PutValue) and message.key == "bug":
            raise IndexError("index 9 is out of bounds")
        return original(store, owner, message)

    monkeypatch.setattr(RendezvousStore, "handle", handle)
    stream, deadline = authenticated(server)
    stream.send(REQUEST_CODEC.encode(PutValue(1, "bug", b"")), deadline)
    with pytest.raises(ConnectionError):
        stream.receive(deadline)
    stream.close()
    still_works(server)
    assert "IndexError: index 9 is out of bounds" in caplog.text
    assert "Traceback" in caplog.text


def test_an_authenticated_client_that_announces_too_much_is_closed(server):
    stream, deadline = authenticated(server)

    def flood():
        for _ in range(100):
            stream.send(b"x" * (1 << 23), deadline)

    with pytest.raises(ConnectionError):
        flood()
    stream.close()
    still_works(server)


def test_closing_leaves_no_thread():
    before = threading.active_count()
    service = ControlService(SECRET)
    service.start()
    service.close()
    assert threading.active_count() == before


def test_the_store_serves_waiters_when_the_value_comes():
    store = RendezvousStore()
    assert store.handle("a", GetValue(1, "key")) == []
    assert store.handle("b", GetValue(7, "key")) == []
    store.forget_all("b")
    assert store.handle("c", PutValue(3, "key", b"v")) == [("c", StoreReply(3)), ("a", StoreReply(1, b"v"))]
    assert store.handle("b", GetValue(8, "key")) == [("b", StoreReply(8, b"v"))]


def test_the_store_answers_an_exchange_when_the_last_value_comes():
    store, names = RendezvousStore(), ("0", "1", "2")
    assert store.handle("b", ExchangeValues(5, "card", names, 1, b"one")) == []
    assert store.handle("c", ExchangeValues(6, "card", names, 2, b"two")) == []
    assert store.handle("c", CancelGet(6)) == []
    whole = EXCHANGED_CODEC.encode([b"zero", b"one", b"two"])
    replies = store.handle("a", ExchangeValues(7, "card", names, 0, b"zero"))
    assert sorted(replies, key=repr) == [("a", StoreReply(7, whole)), ("b", StoreReply(5, whole))]
    assert store.handle("c", ExchangeValues(8, "card", names, 2, b"two")) == [("c", StoreReply(8, whole))]


def test_an_exchange_waits_for_what_was_dropped_meanwhile():
    store, names = RendezvousStore(), ("0", "1")
    assert store.handle("a", ExchangeValues(1, "card", names, 0, b"zero")) == []
    store.handle("x", ForgetKeys(1, "card/"))
    assert store.handle("b", PutValue(2, "card/1", b"one")) == [("b", StoreReply(2))]
    whole = EXCHANGED_CODEC.encode([b"new", b"one"])
    assert store.handle("x", PutValue(3, "card/0", b"new")) == [("x", StoreReply(3)), ("a", StoreReply(1, whole))]


def test_what_is_exchanged_is_bounded():
    store, half = RendezvousStore(), bytes(MAX_EXCHANGED_BYTES // 2 + 1)
    assert store.handle("a", ExchangeValues(1, "card", ("0", "1"), 0, half)) == []
    replies = store.handle("b", ExchangeValues(2, "card", ("0", "1"), 1, half))
    assert [(owner, "together" in reply.problem) for owner, reply in replies] == [("a", True), ("b", True)]


def test_the_store_is_bounded():
    store = RendezvousStore()
    for number in range(64):
        assert store.handle("a", PutValue(number, f"k{number}", b"x" * (1 << 20))) == [("a", StoreReply(number))]
    [(_, reply)] = store.handle("a", PutValue(99, "one more", b"x"))
    assert reply.problem
    assert "full" in reply.problem
    assert store.handle("a", PutValue(100, "k0", b"")) == [("a", StoreReply(100))]
    assert store.handle("a", PutValue(101, "one more", b"x")) == [("a", StoreReply(101))]


def test_the_number_of_keys_is_bounded():
    store = RendezvousStore()
    replies = [store.handle("a", PutValue(number, str(number), b"")) for number in range(MAX_KEYS + 1)]
    assert replies[-2] == [("a", StoreReply(MAX_KEYS - 1))]
    assert replies[-1][0][1].problem


def test_a_reply_of_the_wrong_kind_is_an_error(server, monkeypatch):
    client = RendezvousClient(server.address, SECRET, 0, 60.0)
    monkeypatch.setattr(client, "_call", lambda *_: StoreReply(1))
    with pytest.raises(WireError):
        client.get("key", 1.0)
    client.close()
