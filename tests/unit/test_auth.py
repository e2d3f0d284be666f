"""The handshake and the seals, attacked."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.errors import AuthenticationError
from reigen.wire.auth import ClientHandshake, Identity, Role, ServerHandshake

SECRET, OTHER = b"s" * 32, b"o" * 32
RANK, LAUNCHER = Identity(Role.RANK, 5), Identity(Role.LAUNCHER, 0)


def established(client_secret=SECRET, server_secret=SECRET):
    client, server = ClientHandshake(client_secret, RANK), ServerHandshake(server_secret, LAUNCHER)
    challenge, nothing = server.advance(client.opening)
    assert nothing is None
    proof, at_client = client.advance(challenge)
    answer, at_server = server.advance(proof)
    assert answer == b""
    return at_client, at_server


def test_both_ends_know_each_other_afterwards():
    at_client, at_server = established()
    assert at_client.peer == LAUNCHER
    assert at_server.peer == RANK


def test_messages_have_the_sizes_of_the_protocol():
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    assert len(client.opening) == server.num_expected_bytes == 41
    challenge, _ = server.advance(client.opening)
    assert len(challenge) == client.num_expected_bytes == 73
    proof, _ = client.advance(challenge)
    assert len(proof) == server.num_expected_bytes == 32


def test_the_proof_is_hmac_sha256_over_nonces_roles_and_ranks():
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    challenge, _ = server.advance(client.opening)
    expected = hmac.new(SECRET, b"reigen/1 accepts\0" + client.opening + challenge[:41], hashlib.sha256).digest()
    assert challenge[41:] == expected


@pytest.mark.parametrize(("client", "server"), [(OTHER, SECRET), (SECRET, OTHER)])
def test_the_wrong_secret_is_found_by_the_connecting_end(client, server):
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        established(client, server)


def test_an_end_that_cannot_prove_itself_is_refused_by_the_accepting_end():
    server = ServerHandshake(SECRET, LAUNCHER)
    server.advance(ClientHandshake(OTHER, RANK).opening)
    with pytest.raises(AuthenticationError):
        server.advance(b"\0" * 32)


def test_a_proof_cannot_be_reflected():
    server = ServerHandshake(SECRET, LAUNCHER)
    challenge, _ = server.advance(ClientHandshake(SECRET, RANK).opening)
    with pytest.raises(AuthenticationError):
        server.advance(challenge[41:])


def test_a_recorded_handshake_cannot_be_replayed():
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    challenge, _ = server.advance(client.opening)
    proof, _ = client.advance(challenge)
    again = ServerHandshake(SECRET, LAUNCHER)
    again.advance(client.opening)
    with pytest.raises(AuthenticationError):
        again.advance(proof)


@given(st.integers(0, 40), st.integers(1, 255))
def test_no_bit_of_the_introduction_can_be_changed(place, flip):
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    changed = bytearray(client.opening)
    changed[place] ^= flip
    with pytest.raises(AuthenticationError):
        client.advance(server.advance(bytes(changed))[0])


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*"[:41], b"\0" * 41])
def test_strangers_are_told_apart_by_their_first_bytes(opening):
    with pytest.raises(AuthenticationError, match="does not speak Reigen's protocol"):
        ServerHandshake(SECRET, LAUNCHER).advance(opening)


def test_seals_open_in_order_and_once():
    at_client, at_server = established()
    first, second = at_client.seal(b"first"), at_client.seal(b"second")
    assert at_server.open(first) == b"first"
    with pytest.raises(AuthenticationError):
        at_server.open(first)
    assert at_server.open(second) == b"second"


def test_seals_do_not_open_out_of_order_backwards_or_elsewhere():
    at_client, at_server = established()
    _, other_server = established()
    first, second = at_client.seal(b"first"), at_client.seal(b"second")
    for session, body in ((at_server, second), (at_client, first), (other_server, first), (at_server, b"short")):
        with pytest.raises(AuthenticationError):
            session.open(body)


@given(st.binary(max_size=50), st.integers(0, 81), st.integers(1, 255))
def test_no_bit_of_a_sealed_body_can_be_changed(payload, place, flip):
    at_client, at_server = established()
    body = bytearray(at_client.seal(payload))
    body[place % len(body)] ^= flip
    with pytest.raises(AuthenticationError):
        at_server.open(bytes(body))


def test_a_short_secret_is_refused():
    with pytest.raises(AuthenticationError, match="must have 32 bytes, not 5"):
        ClientHandshake(b"short", RANK)
