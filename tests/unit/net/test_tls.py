"""Encrypted connections, attacked: who listens learns nothing, who stands in between is found out."""

import importlib.util
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.membership.client import MembershipClient
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import AuthenticationError, ConfigError
from reigen.net.auth import ClientHandshake, Identity, ProcessRole, ServerHandshake
from reigen.net.bulk_connection import BulkConnection
from reigen.net.connection import StreamProtocol, open_connection
from reigen.net.tls import TlsContext
from reigen.testing import run_threads
from tests.accepting import accept_connection
from tests.patience import patiently

SECRET, OTHER = b"s" * 32, b"o" * 32
RANK, LAUNCHER = Identity(ProcessRole.RANK, 5, "test"), Identity(ProcessRole.LAUNCHER, 0)


def soon(seconds=60.0):
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def tls():
    return TlsContext()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


def both_ends(address, listener, *, client_tls=None, server_tls=None, client_secret=SECRET):
    """A stream or an error for each end."""
    ends = {}

    def run(name, function):
        try:
            ends[name] = function()
        except (AuthenticationError, OSError) as error:
            ends[name] = error

    def serve():
        with ExitStack() as stack:
            connection = stack.enter_context(listener.accept()[0])
            stream = accept_connection(connection, SECRET, LAUNCHER, 1 << 20, soon(), server_tls)
            stack.pop_all()
            return stream

    thread = threading.Thread(target=run, args=("server", serve))
    thread.start()
    run("client", lambda: open_connection(address, client_secret, RANK, 1 << 20, soon(), client_tls))
    thread.join()
    return ends["client"], ends["server"]


@pytest.fixture
def streams(tls, listener):
    client, server = both_ends(listener.getsockname(), listener, client_tls=tls, server_tls=tls)
    yield client, server
    client.close()
    server.close()


def receive_until_error(link):
    until = soon()
    while time.monotonic() < until:
        link.advance_receives()


def give(conversation, data):
    """Hand over bytes as the conversation asks for them, until it refuses; it never asks for more than a record."""
    while data:
        wanted = conversation.num_wanted_bytes
        assert 0 < wanted <= (1 << 14) + 256
        conversation.receive(data[:wanted])
        data = data[wanted:]


class Tap:
    """Somebody on the way of a connection, who sees and may change everything: ``change(bytes) -> bytes``."""

    def __init__(self, target, change=lambda data: data):
        self.seen = bytearray()
        self._change = change
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, args=(target,))
        self._thread.start()

    def _run(self, target):
        near = self._listener.accept()[0]
        with near, socket.create_connection(target) as far:
            back = threading.Thread(target=self._pump, args=(far, near))
            back.start()
            self._pump(near, far)
            back.join()

    def _pump(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self._change(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self._listener.close()
        self._thread.join()


def test_payloads_travel_both_ways(streams):
    client, server = streams
    assert (client.peer, server.peer) == (LAUNCHER, RANK)
    payloads = [b"", b"one", bytes(range(256)) * 4096]
    for source, target in ((client, server), (server, client)):
        for payload in payloads:
            source.send(payload, soon())
        assert [target.receive(soon()) for _ in payloads] == payloads


def test_a_deadline_ends_a_wait_and_nothing_is_lost(streams):
    client, server = streams
    with pytest.raises(TimeoutError):
        server.receive(soon(0.02))
    client.send(b"late", soon())
    assert server.receive(soon()) == b"late"
    client.close()
    with pytest.raises(ConnectionError):
        server.receive(soon())


@pytest.mark.parametrize("encrypted", [True, False])
def test_who_listens_learns_nothing_where_there_is_tls(tls, listener, encrypted):
    """Without TLS everything can be seen: the other half of the test shows that the tap works."""
    own = tls if encrypted else None
    tap = Tap(listener.getsockname())
    with ExitStack() as stack:
        stack.callback(tap.close)
        client, server = both_ends(tap.address, listener, client_tls=own, server_tls=own)
        client.send(b"a payload " * 10, soon())
        server.receive(soon())
        one, zero = BulkConnection(*client.detach()), BulkConnection(*server.detach())
        stack.callback(one.close)
        stack.callback(zero.close)
        place = bytearray(1000)
        one.post_send(memoryview(b"weight_17 " * 100))
        zero.post_receive(memoryview(place))
        one.advance_sends()
        until = soon()
        while not zero.advance_receives():
            assert time.monotonic() < until
    assert place == b"weight_17 " * 100
    for text in (b"a payload", b"weight_17", b"RGN3"):
        assert (text in tap.seen) is not encrypted
    assert SECRET not in tap.seen


def test_who_decrypts_and_encrypts_again_in_between_is_found_out(tls, listener):
    """The strongest one there is without the secret: it ends TLS with both, and hands on all that they say."""
    between = TlsContext()
    fake = socket.create_server(("127.0.0.1", 0))
    heard = bytearray()

    def relay():
        near = fake.accept()[0]
        with near, socket.create_connection(listener.getsockname()) as far, ExitStack() as stack:
            inner = stack.enter_context(between.accepts()._tls.context.wrap_socket(near, server_side=True))
            outer = stack.enter_context(between.connects()._tls.context.wrap_socket(far))
            with suppress(OSError):
                for source, target in ((inner, outer), (outer, inner), (inner, outer)):  # HELLO, CHALLENGE, PROOF
                    data = source.recv(1 << 16)
                    heard.extend(data)
                    target.sendall(data)

    thread = threading.Thread(target=relay)
    thread.start()
    client, server = both_ends(fake.getsockname(), listener, client_tls=tls, server_tls=tls)
    thread.join()
    fake.close()
    assert heard.startswith(b"RGN3")  # it could read the whole handshake
    assert isinstance(client, AuthenticationError)
    assert "does not know this job's secret" in str(client)
    assert isinstance(server, AuthenticationError)


def test_the_wrong_secret(tls, listener):
    client, server = both_ends(listener.getsockname(), listener, client_tls=tls, server_tls=tls, client_secret=OTHER)
    assert isinstance(client, AuthenticationError)
    assert isinstance(server, AuthenticationError)


@pytest.mark.parametrize("at_client", [True, False])
def test_tls_at_one_end_only_is_an_error_that_says_so(tls, listener, at_client):
    client, server = both_ends(
        listener.getsockname(),
        listener,
        client_tls=tls if at_client else None,
        server_tls=None if at_client else tls,
    )
    assert isinstance(client, AuthenticationError)
    assert isinstance(server, AuthenticationError)
    assert "REIGEN_TLS" in str(server)


def test_a_byte_that_was_changed_on_the_way_ends_a_link(tls, listener):
    """Also one of a message's own bytes, which have no seal."""
    spoil = threading.Event()

    def change(data):
        if spoil.is_set() and len(data) > 2000:
            data = data[:-500] + bytes([data[-500] ^ 1]) + data[-499:]
        return data

    tap = Tap(listener.getsockname(), change)
    with ExitStack() as stack:
        stack.callback(tap.close)
        client, server = both_ends(tap.address, listener, client_tls=tls, server_tls=tls)
        one, zero = BulkConnection(*client.detach()), BulkConnection(*server.detach())
        stack.callback(one.close)
        stack.callback(zero.close)
        spoil.set()
        one.post_send(memoryview(bytes(10_000)))
        zero.post_receive(memoryview(bytearray(10_000)))
        one.advance_sends()
        with pytest.raises(AuthenticationError, match="TLS with the other end"):
            receive_until_error(zero)


def test_each_process_has_a_certificate_of_its_own(tls):
    digests = {one.accepts()._own_binding for one in (tls, TlsContext(), TlsContext())}
    assert len(digests) == 3
    assert all(len(digest) == 32 for digest in digests)


def test_nothing_older_than_tls_1_3_is_spoken(tls, listener):
    def serve():
        with listener.accept()[0] as connection, pytest.raises(AuthenticationError):
            accept_connection(connection, SECRET, LAUNCHER, 100, soon(), tls)

    thread = threading.Thread(target=serve)
    thread.start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(listener.getsockname(), timeout=60) as connection,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(connection)
    thread.join()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x16\x03\x01\x00\x00",
        b"\x17\x03\x03\x00\x10" + b"x" * 16,
    ],
)
def test_noise_is_refused_and_never_more_than_a_record_of_it_is_read(tls, noise):
    server = StreamProtocol(ServerHandshake(SECRET, LAUNCHER), 100, tls.accepts())
    with pytest.raises(AuthenticationError):
        give(server, noise)


def test_nothing_behind_the_proof_is_read_before_it_was_checked(tls):
    """So that what follows the handshake can be received by somebody else, straight into its place."""
    client = StreamProtocol(ClientHandshake(SECRET, RANK), 100, tls.connects())
    server = StreamProtocol(ServerHandshake(SECRET, LAUNCHER), 100, tls.accepts())
    on_the_way = bytearray()
    while server.peer is None:
        on_the_way += client.outgoing
        client.outgoing.clear()
        if client.peer is not None:
            client.send(b"already")
            client.send(b"more")
            on_the_way += client.outgoing
            client.outgoing.clear()
        while on_the_way and server.peer is None:
            wanted = server.num_wanted_bytes
            assert server.receive(bytes(on_the_way[:wanted])) == []
            del on_the_way[:wanted]
        while server.outgoing:
            wanted = client.num_wanted_bytes
            client.receive(bytes(server.outgoing[:wanted]))
            del server.outgoing[:wanted]
    assert server.receive(bytes(on_the_way)) == [b"already", b"more"]


def test_without_the_library_there_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"REIGEN_TLS is on, but .* pip install cryptography"):
        TlsContext()


def test_nobody_loads_openssl_who_does_not_use_it():
    code = "import sys, reigen.net.connection; print('ssl' in sys.modules, 'cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_rendezvous_and_its_members_encrypt_and_strangers_disturb_nobody(tls):
    def attempt(seconds):
        service = ControlService(SECRET, handshake_seconds=seconds, tls=tls)
        service.start()
        with ExitStack() as stack:
            stack.callback(service.close)
            host, port = service.address.split(":")
            noisy = stack.enter_context(socket.create_connection((host, int(port))))
            silent = stack.enter_context(socket.create_connection((host, int(port))))
            noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
            ranks = [RendezvousClient(service.address, SECRET, rank, 60.0, tls) for rank in range(2)]
            for one in ranks:
                stack.callback(one.close)
            large = bytes(range(256)) * 4096
            ranks[0].put("key", large)
            assert ranks[1].get("key", 60.0) == large
            members = [
                MembershipClient(
                    service.address, SECRET, "0", r, 2, timeout_seconds=60.0, peer_timeout_seconds=20.0, tls=tls
                )
                for r in range(2)
            ]
            for member in members:
                stack.callback(member.close)
            assert members[0].failure([1]) is None
            members[1].close()
            until = soon()
            while members[0].failure([1]) is None:
                assert time.monotonic() < until
            for stranger in (noisy, silent):
                stranger.settimeout(60)
                assert closed_by_peer(stranger)
            with pytest.raises(AuthenticationError, match="REIGEN_TLS"):
                RendezvousClient(service.address, SECRET, 2, 60.0)

    patiently(attempt, 0.3)


def closed_by_peer(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_mesh_of_ranks_encrypts(tls):
    def exchange(rank, rendezvous):
        mesh = ConnectionPool(rank, 3, rendezvous, SECRET, "127.0.0.1", 20.0, tls)
        try:
            others = [peer for peer in range(3) if peer != rank]
            links = {
                peer: BulkConnection(*stream.detach()) for peer, stream in mesh.open(others, "bulk", soon()).items()
            }
            places = {peer: bytearray(100_000) for peer in links}
            left, until = 2 * len(links), soon()
            for peer, link in links.items():
                link.post_send(memoryview(bytes([rank]) * 100_000))
                link.post_receive(memoryview(places[peer]))
            while left:
                assert time.monotonic() < until
                left -= sum(link.advance_sends() + link.advance_receives() for link in links.values())
            rendezvous.put(f"done/{rank}", b"")
            for peer, link in links.items():
                rendezvous.get(f"done/{peer}", 60.0)
                link.close()
            return all(place == bytes([peer]) * 100_000 for peer, place in places.items())
        finally:
            mesh.close()

    assert run_threads(exchange, 3) == [True] * 3
