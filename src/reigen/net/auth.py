"""Proof that both ends of a connection know the job's secret, and seals on everything they say afterwards.

The protocol, every message of a fixed size so that a stranger's bytes are counted, not parsed:

a. The connecting end sends HELLO: the protocol's name and version (4 bytes), its role, its rank, what the connection is
   for, a fresh nonce (73 bytes in all).
b. The accepting end sends CHALLENGE: the same of its own, and its proof (105 bytes).
c. The connecting end checks that proof and sends its own PROOF (32 bytes).
d. The accepting end checks it. An end that finds a wrong proof closes the connection without an answer.

The first four bytes are looked at as soon as they are there: an end that speaks another version, or no Reigen at all,
is refused at once, whatever the length of its messages. Who the peer is gets read after its proof was checked; only an
end that has another secret for each peer (`KeyedServerHandshake`) reads it before, from bytes of fixed size.

A proof is HMAC-SHA256(secret, label of that end + HELLO + CHALLENGE without proof + binding): both nonces, roles, ranks
and purposes are in it. The labels of the two ends differ, so that a proof cannot be sent back to the end that made it;
nonces are fresh, so that it cannot be used again. The binding is empty, or says in which TLS connection this happens
(`net.tls`).

Afterwards each direction has its own key, HMAC-SHA256(secret, label of that direction + the same transcript). A sealed
body is a 16-byte tag, BLAKE2b keyed with it (RFC 7693) over sequence number + payload, and the payload. The number
counts the bodies of this direction and is not sent: a body that is repeated, left out, reordered or taken from
elsewhere does not open. (BLAKE2b, because a tag of a short message takes a third of HMAC's time.)

Nothing is encrypted: on one host the loopback interface is as private as the processes' memory. One secret may be told
in a session all the same, masked by HMAC-SHA256(secret, "mask" + the same transcript), of which both ends' nonces are a
part: so a job's secret goes to an agent that knows only a ticket (`AuthSession.mask`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from reigen.errors import ArgumentError, AuthenticationError

SECRET_BYTES = 32
NONCE_BYTES = 32
PURPOSE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16

_MAGIC = b"RGN3"
_TLS_HELLO = b"\x16\x03"
_INTRODUCTION = struct.Struct(f">4sBI{PURPOSE_BYTES}s{NONCE_BYTES}s")
_SEQUENCE = struct.Struct(">Q")


class ProcessRole(IntEnum):
    """Role of a process in the job."""

    LAUNCHER = 1
    RANK = 2
    AGENT = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of one end of a connection.

    Attributes:
        role: what the process is.
        rank: its rank, 0 for a launcher.
        purpose: what the connection is for, as its end calls it: at most 32 printable ASCII characters.
    """

    role: ProcessRole
    rank: int
    purpose: str = ""


class AuthSession:
    """Sealer of outgoing bodies and opener of incoming ones. Made by a handshake.

    Attributes:
        peer: who is at the other end; it has proven to know the secret.
    """

    def __init__(self, peer: Identity, send_key: bytes, receive_key: bytes, mask: bytes = b"") -> None:
        self.peer = peer
        #: For one secret; empty once it was used.
        self._mask = mask
        #: The beginnings of all tags, by direction.
        self._send_mac = hashlib.blake2b(key=send_key, digest_size=TAG_BYTES)
        self._receive_mac = hashlib.blake2b(key=receive_key, digest_size=TAG_BYTES)
        #: How many bodies went each way: the number of the next one.
        self._num_sent = self._num_received = 0

    def mask(self, secret: bytes) -> bytes:
        """Mask a secret of 32 bytes before it is sent, or unmask it at the other end: once in a session.

        Raises:
            AuthenticationError: it was done before: two secrets under one mask would tell of each other.
        """
        mask, self._mask = self._mask, b""
        if len(secret) != len(mask):
            raise AuthenticationError("one secret of 32 bytes can be told in a session, and it was told before")
        return bytes(one ^ other for one, other in zip(secret, mask, strict=True))

    def seal(self, payload: bytes) -> bytes:
        """``payload`` with its tag in front."""
        tag = self._send_mac.copy()
        tag.update(_SEQUENCE.pack(self._num_sent))
        tag.update(payload)
        self._num_sent += 1
        return tag.digest() + payload

    def take_back(self, num_bodies: int) -> None:
        """Forget the last bodies that were sealed: no byte of them has been sent, nor will be."""
        self._num_sent -= num_bodies

    def open(self, body: bytes) -> bytes:
        """The payload of a sealed body.

        Raises:
            AuthenticationError: it was not sealed by the peer as its next body.
        """
        expected = self._receive_mac.copy()
        expected.update(_SEQUENCE.pack(self._num_received))
        expected.update(memoryview(body)[TAG_BYTES:])
        if not hmac.compare_digest(body[:TAG_BYTES], expected.digest()):
            raise AuthenticationError("a message was altered, repeated or not sent by the authenticated peer")
        self._num_received += 1
        return body[TAG_BYTES:]


class Handshake(ABC):
    """One end of the handshake, without I/O: takes exactly ``num_expected_bytes``, returns bytes to send.

    Args:
        secret: the job's 32 bytes.
        me: identity of this end, and what the connection is for.

    Attributes:
        binding: what both ends, and no other process, know of the channel beneath, of one length at both; empty without
            one. May be set until the first byte of the peer is given.
        opening: what this end sends before it has heard anything.
    """

    opening = b""
    #: bytes of a proof behind the peer's introduction
    _num_first_proof_bytes = 0

    def __init__(self, secret: bytes, me: Identity) -> None:
        if len(secret) != SECRET_BYTES:
            raise AuthenticationError(f"the job's secret must have {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret, self.binding = secret, b""
        self._own, self._peer_introduction = _pack_introduction(me), b""
        self.num_expected_bytes = len(_MAGIC)

    def advance(self, message: bytes) -> tuple[bytes, AuthSession | None]:
        """Take the peer's next bytes; returns what to send now, and the session once the peer is proven.

        Raises:
            AuthenticationError: the peer does not know the secret, or does not speak this protocol.
        """
        if self._peer_introduction:
            return self._take(message)
        self._peer_introduction = _check_magic(message)
        self.num_expected_bytes = _INTRODUCTION.size - len(_MAGIC) + self._num_first_proof_bytes
        return b"", None

    @abstractmethod
    def _take(self, message: bytes) -> tuple[bytes, AuthSession | None]:
        """Take what follows the first bytes."""

    def _mac(self, label: bytes, transcript: bytes) -> bytes:
        return hmac.digest(self._secret, b"reigen/2 " + label + b"\0" + transcript, "sha256")


class ClientHandshake(Handshake):
    """The connecting end."""

    _num_first_proof_bytes = PROOF_BYTES

    def __init__(self, secret: bytes, me: Identity) -> None:
        super().__init__(secret, me)
        self.opening = self._own

    def _take(self, message: bytes) -> tuple[bytes, AuthSession | None]:
        """Check CHALLENGE; returns PROOF and the session."""
        introduction, proof = self._peer_introduction + message[:-PROOF_BYTES], message[-PROOF_BYTES:]
        transcript = self.opening + introduction + self.binding
        if not hmac.compare_digest(proof, self._mac(b"accepts", transcript)):
            raise AuthenticationError("the other end of the connection does not know this job's secret")
        sends, receives = self._mac(b"there", transcript), self._mac(b"back", transcript)
        mask = self._mac(b"mask", transcript)
        peer = _unpack_introduction(introduction)
        return self._mac(b"connects", transcript), AuthSession(peer, sends, receives, mask)


class ServerHandshake(Handshake):
    """The accepting end."""

    _transcript = b""

    def _take(self, message: bytes) -> tuple[bytes, AuthSession | None]:
        """Take the rest of HELLO and return CHALLENGE; take PROOF and return the session."""
        if not self._transcript:
            self._peer_introduction += message
            self._transcript = self._peer_introduction + self._own + self.binding
            self.num_expected_bytes = PROOF_BYTES
            return self._own + self._mac(b"accepts", self._transcript), None
        if not hmac.compare_digest(message, self._mac(b"connects", self._transcript)):
            raise AuthenticationError("a connection did not prove that it knows this job's secret")
        sends, receives = self._mac(b"back", self._transcript), self._mac(b"there", self._transcript)
        mask = self._mac(b"mask", self._transcript)
        return b"", AuthSession(_unpack_introduction(self._peer_introduction), sends, receives, mask)


class KeyedServerHandshake(ServerHandshake):
    """The accepting end where each peer has a secret of its own, chosen by the number that the peer gives.

    A peer for which there is none gets a challenge like any other, and fails.

    Args:
        choose_secret: returns the secret of a peer, which is not proven yet; None: there is none.
        me: identity of this end.
    """

    def __init__(self, choose_secret: Callable[[Identity], bytes | None], me: Identity) -> None:
        super().__init__(os.urandom(SECRET_BYTES), me)
        self._choose_secret = choose_secret

    def _take(self, message: bytes) -> tuple[bytes, AuthSession | None]:
        """Choose the secret by HELLO, and go on with it."""
        if not self._transcript:
            peer = _unpack_introduction(self._peer_introduction + message)
            self._secret = self._choose_secret(peer) or self._secret
        return super()._take(message)


def _pack_introduction(me: Identity) -> bytes:
    if len(me.purpose) > PURPOSE_BYTES or not (me.purpose.isascii() and me.purpose.isprintable()):
        raise ArgumentError(
            f"the purpose of a connection has at most {PURPOSE_BYTES} printable ASCII characters: {me.purpose!r}"
        )
    return _INTRODUCTION.pack(_MAGIC, me.role, me.rank, me.purpose.encode(), os.urandom(NONCE_BYTES))


def _check_magic(magic: bytes) -> bytes:
    if magic == _MAGIC:
        return magic
    if magic[:3] == _MAGIC[:3]:
        raise AuthenticationError(
            f"the other end of the connection speaks version {magic[3:]!r} of Reigen's protocol, this end version "
            f"{_MAGIC[3:]!r}: install the same version of Reigen on all hosts"
        )
    if magic[:2] == _TLS_HELLO:
        raise AuthenticationError(
            "the other end of the connection speaks TLS, this end does not: set REIGEN_TLS alike on all hosts"
        )
    raise AuthenticationError("the other end of the connection does not speak Reigen's protocol")


def _unpack_introduction(introduction: bytes) -> Identity:
    """Return the identity that a proven peer gives."""
    _, role, rank, purpose, _ = _INTRODUCTION.unpack(introduction)
    try:
        return Identity(ProcessRole(role), rank, purpose.rstrip(b"\0").decode("ascii"))
    except ValueError:  # of an unknown role, or of characters that are not ASCII
        raise AuthenticationError("the other end of the connection says of itself what makes no sense") from None
