"""Proof that both ends of a connection know the job's secret, and seals on everything they say afterwards.

The protocol, every message of a fixed size so that a stranger's bytes are counted, not parsed:

a. The connecting end sends HELLO: magic, its role, its rank, a fresh nonce (41 bytes).
b. The accepting end sends CHALLENGE: the same of its own, and its proof (73 bytes).
c. The connecting end checks that proof and sends its own PROOF (32 bytes).
d. The accepting end checks it. Whoever finds a wrong proof closes the connection without a word.

A proof is HMAC-SHA256(secret, label of that end + HELLO + CHALLENGE without proof): both nonces, roles and ranks are in
it. The labels of the two ends differ, so that a proof cannot be sent back to the end that made it; nonces are fresh, so
that it cannot be used again.

Afterwards each direction has its own key, HMAC-SHA256(secret, label of that direction + the same transcript). A sealed
body is a 32-byte tag, HMAC-SHA256(key, sequence number + payload), and the payload. The number counts the bodies of
this direction and is not sent: a body that is repeated, left out, reordered or taken from elsewhere does not open.
Nothing is encrypted: on one host the loopback interface is as private as the processes' memory.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from reigen.errors import AuthenticationError

SECRET_BYTES = 32
NONCE_BYTES = 32
TAG_BYTES = 32

_MAGIC = b"RGN1"
_INTRODUCTION = struct.Struct(f">4sBI{NONCE_BYTES}s")
_SEQUENCE = struct.Struct(">Q")


class Role(IntEnum):
    """What a process is in the job."""

    LAUNCHER = 1
    RANK = 2


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is at one end of a connection.

    Attributes:
        role: what the process is.
        rank: its rank, 0 for a launcher.
    """

    role: Role
    rank: int


class Session:
    """Seals what one end sends and opens what it receives. Made by a handshake.

    Attributes:
        peer: who is at the other end; it has proven to know the secret.
    """

    def __init__(self, peer: Identity, send_key: bytes, receive_key: bytes) -> None:
        self.peer = peer
        self._send_key, self._receive_key = send_key, receive_key
        #: How many bodies went each way: the number of the next one.
        self._num_sent = self._num_received = 0

    def seal(self, payload: bytes) -> bytes:
        """``payload`` with its tag in front."""
        tag = _tag(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        return tag + payload

    def open(self, body: bytes) -> bytes:
        """The payload of a sealed body.

        Raises:
            AuthenticationError: it was not sealed by the peer as its next body.
        """
        tag, payload = body[:TAG_BYTES], body[TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._num_received, payload)):
            raise AuthenticationError("a message was altered, repeated or not sent by the authenticated peer")
        self._num_received += 1
        return payload


class Handshake(Protocol):
    """One end of the handshake, without I/O: give it exactly ``num_expected_bytes``, send what it returns."""

    opening: bytes
    num_expected_bytes: int

    def advance(self, message: bytes) -> tuple[bytes, Session | None]:
        """Take the peer's next message; returns what to send now, and the session once the peer is proven.

        Raises:
            AuthenticationError: the peer does not know the secret, or does not speak this protocol.
        """


class ClientHandshake:
    """The connecting end.

    Args:
        secret: the job's 32 bytes.
        me: who connects.
    """

    num_expected_bytes = _INTRODUCTION.size + TAG_BYTES

    def __init__(self, secret: bytes, me: Identity) -> None:
        self._secret = _checked(secret)
        self.opening = _introduce(me)

    def advance(self, message: bytes) -> tuple[bytes, Session | None]:
        """Check CHALLENGE; returns PROOF and the session."""
        introduction, proof = message[: _INTRODUCTION.size], message[_INTRODUCTION.size :]
        transcript = self.opening + introduction
        server = _identify(introduction)
        if not hmac.compare_digest(proof, _mac(self._secret, b"accepts", transcript)):
            raise AuthenticationError("the other end of the connection does not know this job's secret")
        mine = _mac(self._secret, b"connects", transcript)
        sends, receives = _mac(self._secret, b"there", transcript), _mac(self._secret, b"back", transcript)
        return mine, Session(server, sends, receives)


class ServerHandshake:
    """The accepting end. Arguments as for ``ClientHandshake``."""

    opening = b""

    def __init__(self, secret: bytes, me: Identity) -> None:
        self._secret = _checked(secret)
        self._introduction = _introduce(me)
        self._client: Identity | None = None
        self._transcript = b""
        self.num_expected_bytes = _INTRODUCTION.size

    def advance(self, message: bytes) -> tuple[bytes, Session | None]:
        """Take HELLO and return CHALLENGE, then take PROOF and return the session."""
        if self._client is None:
            self._client = _identify(message)
            self._transcript = message + self._introduction
            self.num_expected_bytes = TAG_BYTES
            return self._introduction + _mac(self._secret, b"accepts", self._transcript), None
        if not hmac.compare_digest(message, _mac(self._secret, b"connects", self._transcript)):
            raise AuthenticationError("a connection did not prove that it knows this job's secret")
        sends, receives = _mac(self._secret, b"back", self._transcript), _mac(self._secret, b"there", self._transcript)
        return b"", Session(self._client, sends, receives)


def _checked(secret: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise AuthenticationError(f"the job's secret must have {SECRET_BYTES} bytes, not {len(secret)}")
    return secret


def _introduce(me: Identity) -> bytes:
    return _INTRODUCTION.pack(_MAGIC, me.role, me.rank, os.urandom(NONCE_BYTES))


def _identify(introduction: bytes) -> Identity:
    magic, role, rank, _ = _INTRODUCTION.unpack(introduction)
    if magic != _MAGIC or role not in Role.__members__.values():
        raise AuthenticationError(
            "the other end of the connection does not speak Reigen's protocol (or another version)"
        )
    return Identity(Role(role), rank)


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"reigen/1 " + label + b"\0" + transcript, "sha256")


def _tag(key: bytes, sequence: int, payload: bytes) -> bytes:
    return hmac.digest(key, _SEQUENCE.pack(sequence) + payload, "sha256")
