"""The handshake and the seals, attacked."""

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.errors import ArgumentError, AuthenticationError
from reigen.net.auth import ClientHandshake, Identity, ProcessRole, ServerHandshake

SECRET, OTHER = b"s" * 32, b"o" * 32
RANK, LAUNCHER = Identity(ProcessRole.RANK, 5), Identity(ProcessRole.LAUNCHER, 0)


def take(end, data):
    """Give bytes to an end of a handshake as it asks for them; returns all that it answers, and its session."""
    answers, session = b"", None
    while data:
        assert session is None, "bytes are left behind the handshake"
        part, data = data[: end.num_expected_bytes], data[end.num_expected_bytes :]
        answer, session = end.advance(part)
        answers += answer
    return answers, session


def established(client_secret=SECRET, server_secret=SECRET, bindings=(b"", b""), rank=RANK):
    client, server = ClientHandshake(client_secret, rank), ServerHandshake(server_secret, LAUNCHER)
    client.binding, server.binding = bindings
    challenge, nothing = take(server, client.opening)
    assert nothing is None
    proof, at_client = take(client, challenge)
    answer, at_server = take(server, proof)
    assert answer == b""
    return at_client, at_server


def test_both_ends_know_each_other_afterwards():
    at_client, at_server = established()
    assert at_client.peer == LAUNCHER
    assert at_server.peer == RANK


def test_messages_have_the_sizes_of_the_protocol():
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    assert len(client.opening) == 73
    assert client.num_expected_bytes == server.num_expected_bytes == 4
    assert server.advance(client.opening[:4]) == (b"", None)
    assert server.num_expected_bytes == 69
    challenge, _ = server.advance(client.opening[4:])
    assert len(challenge) == 105
    assert client.advance(challenge[:4]) == (b"", None)
    assert client.num_expected_bytes == 101
    proof, _ = client.advance(challenge[4:])
    assert len(proof) == server.num_expected_bytes == 32


def test_the_proof_is_hmac_sha256_over_nonces_roles_ranks_and_purposes():
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    challenge, _ = take(server, client.opening)
    expected = hmac.new(SECRET, b"reigen/2 accepts\0" + client.opening + challenge[:73], hashlib.sha256).digest()
    assert challenge[73:] == expected


@pytest.mark.parametrize(("client", "server"), [(OTHER, SECRET), (SECRET, OTHER)])
def test_the_wrong_secret_is_found_by_the_connecting_end(client, server):
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        established(client, server)


def test_an_end_that_cannot_prove_itself_is_refused_by_the_accepting_end():
    server = ServerHandshake(SECRET, LAUNCHER)
    take(server, ClientHandshake(OTHER, RANK).opening)
    with pytest.raises(AuthenticationError):
        take(server, b"\0" * 32)


def test_a_proof_cannot_be_reflected():
    server = ServerHandshake(SECRET, LAUNCHER)
    challenge, _ = take(server, ClientHandshake(SECRET, RANK).opening)
    with pytest.raises(AuthenticationError):
        take(server, challenge[73:])


def test_a_recorded_handshake_cannot_be_replayed():
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    challenge, _ = take(server, client.opening)
    proof, _ = take(client, challenge)
    again = ServerHandshake(SECRET, LAUNCHER)
    take(again, client.opening)
    with pytest.raises(AuthenticationError):
        take(again, proof)


@given(st.integers(0, 72), st.integers(1, 255))
def test_no_bit_of_the_introduction_can_be_changed(place, flip):
    client, server = ClientHandshake(SECRET, RANK), ServerHandshake(SECRET, LAUNCHER)
    changed = bytearray(client.opening)
    changed[place] ^= flip
    with pytest.raises(AuthenticationError):
        take(client, take(server, bytes(changed))[0])


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n", b"\0" * 73, b"rgn2" * 20])
def test_strangers_are_told_apart_by_their_first_bytes(opening):
    with pytest.raises(AuthenticationError, match="does not speak Reigen's protocol"):
        take(ServerHandshake(SECRET, LAUNCHER), opening)


@pytest.mark.parametrize("version", [b"1", b"2", b"4", b"\xff"])
def test_another_version_is_named_whatever_the_length_of_its_messages(version):
    for end in (ServerHandshake(SECRET, LAUNCHER), ClientHandshake(SECRET, RANK)):
        with pytest.raises(AuthenticationError, match=r"speaks version .* this end version b'3': install the same"):
            take(end, b"RGN" + version)


@pytest.mark.parametrize("purpose", ["", "ring 0", "x" * 32])
def test_what_a_connection_is_for_is_told(purpose):
    assert established(rank=Identity(ProcessRole.RANK, 7, purpose))[1].peer == Identity(ProcessRole.RANK, 7, purpose)


@pytest.mark.parametrize("purpose", ["x" * 33, "ü", "a\nb", "\0"])
def test_a_purpose_that_is_too_long_or_not_plain(purpose):
    with pytest.raises(ArgumentError, match="at most 32 printable ASCII"):
        ClientHandshake(SECRET, Identity(ProcessRole.RANK, 0, purpose))


@pytest.mark.parametrize(("role", "purpose"), [(9, b""), (2, b"\xff")])
def test_an_end_that_says_what_makes_no_sense_of_itself(role, purpose):
    """It knows the secret: a bug rather than an attack, and an error, too."""
    introduction = struct.pack(">4sBI32s32s", b"RGN3", role, 0, purpose, bytes(32))
    client = ClientHandshake(SECRET, RANK)
    client.opening = introduction
    server = ServerHandshake(SECRET, LAUNCHER)
    proof, _ = take(client, take(server, introduction)[0])
    with pytest.raises(AuthenticationError, match="makes no sense"):
        take(server, proof)


def test_ends_of_different_channels_do_not_meet():
    assert established(bindings=(b"b" * 32, b"b" * 32))[0].peer == LAUNCHER
    for bindings in ((b"a" * 32, b"b" * 32), (b"", b"b" * 32), (b"a" * 32, b"")):
        with pytest.raises(AuthenticationError):
            established(bindings=bindings)


def test_seals_open_in_order_and_once():
    at_client, at_server = established()
    first, second = at_client.seal(b"first"), at_client.seal(b"second")
    assert at_server.open(first) == b"first"
    with pytest.raises(AuthenticationError):
        at_server.open(first)
    assert at_server.open(second) == b"second"


def test_what_was_not_sent_can_be_taken_back():
    at_client, at_server = established()
    for payload in (b"sent", b"not sent", b"not sent either"):
        body = at_client.seal(payload)
        if payload == b"sent":
            assert at_server.open(body) == b"sent"
    at_client.take_back(2)
    assert at_server.open(at_client.seal(b"instead")) == b"instead"


def test_seals_do_not_open_out_of_order_backwards_or_elsewhere():
    at_client, at_server = established()
    _, other_server = established()
    first, second = at_client.seal(b"first"), at_client.seal(b"second")
    for session, body in ((at_server, second), (at_client, first), (other_server, first), (at_server, b"short")):
        with pytest.raises(AuthenticationError):
            session.open(body)


@given(st.binary(max_size=50), st.integers(0, 65), st.integers(1, 255))
def test_no_bit_of_a_sealed_body_can_be_changed(payload, place, flip):
    at_client, at_server = established()
    body = bytearray(at_client.seal(payload))
    body[place % len(body)] ^= flip
    with pytest.raises(AuthenticationError):
        at_server.open(bytes(body))


def test_a_short_secret_is_refused():
    with pytest.raises(AuthenticationError, match="must have 32 bytes, not 5"):
        ClientHandshake(b"short", RANK)
