"""TLS between processes that share a secret: encryption, and no certificates to manage.

a. Every process that accepts connections makes a key and a certificate of its own, which nobody has signed and which
   exist in its memory only.
b. The connecting end accepts any certificate: TLS 1.3 then proves that the other end of the *encrypted* connection has
   the key of the certificate that was shown, and no more.
c. The handshake of `net.auth` runs inside. Both ends mix the hash of the accepting end's certificate into their proofs
   (tls-server-end-point, RFC 5929). Who stands in between has shown the connecting end another certificate than the
   true end has, so the proofs do not fit, and without the secret it can make none.

Sessions are not resumed, and nothing older than TLS 1.3 is spoken. OpenSSL works on memory here (`TlsChannel`), and
whoever owns a socket reads and writes it as without TLS. Until the peer has proven itself, its bytes are taken record
by record, so that nothing is read that belongs to what comes after the handshake.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.util
import os
import socket
import ssl
from collections.abc import Iterable
from typing import cast

from reigen.errors import AuthenticationError, ConfigError

_RECORD_HEADER_BYTES = 5
_RECORD_TYPES = range(20, 24)
_MOST_RECORD_BYTES = (1 << 14) + 256
_CHUNK_BYTES = 1 << 18


class TlsContext:
    """TLS of one process: makes the ends of its connections.

    Raises:
        ConfigError: the package that makes certificates is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("cryptography") is None:
            raise ConfigError(
                "REIGEN_TLS is on, but the Python package cryptography is missing on "
                f"host {socket.gethostname()}: pip install cryptography there, or turn it off everywhere"
            )
        self._accepting: tuple[ssl.SSLContext, bytes] | None = None
        self._connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._connecting.minimum_version = ssl.TLSVersion.TLSv1_3
        self._connecting.check_hostname = False
        self._connecting.verify_mode = ssl.CERT_NONE  # the proofs of `net.auth` are bound to the certificate

    def connects(self) -> TlsChannel:
        """The connecting end of a new connection."""
        return TlsChannel(self._connecting, b"")

    def accepts(self) -> TlsChannel:
        """The accepting end of a new connection. All of this process show the same certificate."""
        if self._accepting is None:
            certificate, binding = _make_certificate()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            _load(context, certificate)
            self._accepting = context, binding
        return TlsChannel(*self._accepting)


class TlsChannel:
    """One end of a TLS connection without I/O: records go in, plain bytes come out, and the other way round.

    Made by `TlsContext`.

    Attributes:
        binding: what both ends, and nobody in between, know of this connection; empty until TLS is established.
    """

    def __init__(self, context: ssl.SSLContext, own_binding: bytes) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=bool(own_binding))
        self._own_binding = own_binding
        self.binding = b""
        self._record_header = bytearray()
        #: How much of the current record is missing.
        self._num_missing_bytes = 0
        self.advance()

    @property
    def num_wanted_bytes(self) -> int:
        """Number of bytes to read, so that none behind the current record is."""
        return self._num_missing_bytes or _RECORD_HEADER_BYTES - len(self._record_header)

    @property
    def has_read_ahead(self) -> bool:
        """Return whether bytes were fed that have not been read."""
        return bool(self._incoming.pending or self._tls.pending())

    def feed_record(self, data: bytes) -> None:
        """Take at most ``num_wanted_bytes`` that were read.

        Raises:
            AuthenticationError: these are no records of TLS.
        """
        if self._num_missing_bytes:
            self._num_missing_bytes -= len(data)
        else:
            self._record_header += data
            if self._record_header[0] not in _RECORD_TYPES:
                raise AuthenticationError(
                    "the other end of the connection does not speak TLS: set REIGEN_TLS to the same value on all hosts"
                )
            if len(self._record_header) == _RECORD_HEADER_BYTES:
                self._num_missing_bytes = int.from_bytes(self._record_header[3:], "big")
                self._record_header.clear()
                if not 0 < self._num_missing_bytes <= _MOST_RECORD_BYTES:
                    raise AuthenticationError(
                        "the other end of the connection announced a record that TLS does not allow"
                    )
        self.feed(data)

    def feed(self, data: bytes | memoryview) -> None:
        """Take any number of bytes that were read."""
        self._incoming.write(data)

    def advance(self) -> bool:
        """Go on establishing TLS, as far as the bytes fed allow; return whether it is established.

        Raises:
            AuthenticationError: the other end does not do as TLS demands.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise _tls_error(error) from None
        certificate = self._tls.getpeercert(binary_form=True)
        self.binding = self._own_binding or hashlib.sha256(certificate or b"").digest()
        return True

    def read_into(self, place: memoryview) -> int:
        """Decrypt into ``place``; returns how many bytes, 0 when more must be fed first.

        Raises:
            AuthenticationError: what was fed was not sent by the peer.
            ConnectionError: the peer has closed the connection.
        """
        num_read = 0
        try:
            while num_read < len(place):
                num_read += cast(int, self._tls.read(len(place) - num_read, place[num_read:]))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            raise ConnectionResetError("the other end closed the connection") from None
        except ssl.SSLError as error:
            raise _tls_error(error) from None
        return num_read

    def read(self) -> bytes:
        """Decrypt everything that was fed. Raises as `read_into`."""
        place = bytearray(_MOST_RECORD_BYTES)
        parts = []
        while num_read := self.read_into(memoryview(place)):
            parts.append(bytes(place[:num_read]))
        return b"".join(parts)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt ``data``, for `take`.

        Raises:
            AuthenticationError: the connection was broken before.
        """
        num_written = 0
        try:
            with memoryview(data) as view:
                while num_written < len(view):
                    num_written += self._tls.write(view[num_written:])
        except ssl.SSLError as error:
            raise _tls_error(error) from None

    def take(self) -> bytes:
        """All that is to be sent."""
        return self._outgoing.read()


class TlsSocket:
    """Non-blocking socket through a channel of TLS, as `net.framing.FramedConnection` needs it."""

    def __init__(self, connection: socket.socket, channel: TlsChannel) -> None:
        self._connection, self._channel = connection, channel
        self._scratch = memoryview(bytearray(_CHUNK_BYTES))
        #: Records that are to be sent, and how many of the sender's bytes are in them.
        self._records = memoryview(b"")
        self.num_held_bytes = 0

    @property
    def has_read_ahead(self) -> bool:
        """Return whether bytes were read from the socket that have not been received."""
        return self._channel.has_read_ahead

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def sendmsg(self, pieces: Iterable[bytes | memoryview]) -> int:
        """Send the beginning of ``pieces``; returns how much has left.

        Raises:
            BlockingIOError: nothing has yet; the next call must begin with the same ``num_held_bytes`` bytes.
            OSError: the connection is over.
        """
        if not self.num_held_bytes:
            self.num_held_bytes = self._encrypt(pieces)
            self._records = memoryview(self._channel.take())
        while self._records:
            self._records = self._records[self._connection.send(self._records) :]
        num_sent, self.num_held_bytes = self.num_held_bytes, 0
        return num_sent

    def recv_into(self, place: memoryview) -> int:
        """Receive at most ``len(place)`` bytes; 0 when the connection has ended.

        Less than that is returned only when the socket has no more now.

        Raises:
            BlockingIOError: there is nothing.
            AuthenticationError: what came was not sent by the peer.
            OSError: the connection is over.
        """
        num_received = 0
        while True:
            num_received += self._channel.read_into(place[num_received:])
            if num_received == len(place):
                return num_received
            try:
                num_read = self._connection.recv_into(self._scratch)
            except BlockingIOError:
                if num_received:
                    return num_received
                raise
            if not num_read:
                return num_received
            self._channel.feed(self._scratch[:num_read])

    def recvmsg_into(self, places: Iterable[memoryview]) -> tuple[int]:
        """`recv_into` for several places, filled one after the other."""
        num_received = 0
        for place in places:
            try:
                num_filled = self.recv_into(place) if len(place) else 0
            except BlockingIOError:
                if not num_received:
                    raise
                break
            num_received += num_filled
            if num_filled < len(place):
                break
        return (num_received,)

    def _encrypt(self, pieces: Iterable[bytes | memoryview]) -> int:
        """Encrypt a chunk of the pieces; return its length."""
        left = _CHUNK_BYTES
        parts: list[bytes | memoryview] = []
        for piece in pieces:
            parts.append(piece[:left])
            left -= len(parts[-1])
            if not left:
                break
        num_bytes = _CHUNK_BYTES - left
        for part in parts if num_bytes > _MOST_RECORD_BYTES else [b"".join(parts)]:  # small ones in one record
            self._channel.write(part)
        return num_bytes


def _tls_error(error: ssl.SSLError) -> AuthenticationError:
    return AuthenticationError(f"TLS with the other end of the connection is broken: {error.reason or error}")


def _make_certificate() -> tuple[bytes, bytes]:
    """A key with its certificate, as text, and the certificate's hash."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "reigen")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))  # nobody looks: clocks may differ
        .not_valid_after(now + dt.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    encoding, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    text = certificate.public_bytes(encoding)
    text += key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, no_password)
    return text, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def _load(context: ssl.SSLContext, certificate: bytes) -> None:
    """Give a context its certificate: it takes files only, so this is one that is never on a disk."""
    descriptor = os.memfd_create("reigen-certificate")
    try:
        os.write(descriptor, certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
