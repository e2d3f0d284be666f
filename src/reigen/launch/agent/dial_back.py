"""Dial-back: agents that connect to the supervisor by themselves, each by a ticket that it uses once.

For engines that give a process on each host but no stream of bytes to it. The protocol:

a. The supervisor makes a ticket of 32 random bytes for each host, and listens at the address by which the hosts reach
   it. The engine brings each agent its *dial text*: addresses, ticket, number. A ticket is void after its first use,
   and after its deadline.
b. The agent connects, again and again until the deadline, for names may not be known yet, nor the listener be there. It
   says its number, and both ends prove by the handshake of ``net.auth`` that they know the ticket. Until then nothing
   that a stranger sends is parsed, and strangers are bounded in number and in time (``net.listener``).
c. From here on everything is sealed. The agent sends DialGreeting: its version and where it is. The supervisor answers
   with a refusal in words, or with an empty text; so far no secret has been told.
d. Then both go on as through a pipe (``launch.agent.agent_protocol``, from c. on), a sealed body for each message. The
   job's secret in StartRequest is masked (``AuthSession.mask``): a listener on the way learns neither it nor a ticket.
e. An agent that proves a ticket which was used before is refused with the address of the first one. While the job is
   starting that ends the job, for nobody can tell which of the two is the engine's.
   Where an engine may run a task again (Spark), its ticket is that of an *attempt*, which follows from what the engine
   has brought and the number of the attempt: so each is used once, and the supervisor need not know of it before.
f. An end that closes its side for writing has nothing more to say: the end of the file, as of a pipe.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from reigen._version import __version__
from reigen.errors import AuthenticationError, WireError
from reigen.launch.agent.agent_protocol import MAX_FRAME_BYTES
from reigen.net.auth import SECRET_BYTES, Handshake, Identity, KeyedServerHandshake, ProcessRole
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.event_loop import EventLoop
from reigen.net.listener import Listener, join_address, open_listening_socket

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: What an agent says its connection is for.
DIAL_PURPOSE = "agent"
#: Limit of a greeting and of its answer.
_MAX_GREETING_BYTES = 8192
#: An agent's number has that of its attempt above these bits.
_NUMBER_BITS = 16


class DialText(msgspec.Struct, frozen=True):
    """Address and ticket for an agent, in one line of text (JSON).

    Attributes:
        addresses: ``host:port`` of the supervisor, to be tried in turn.
        ticket: in hexadecimal digits.
        number: the agent's.
        timeout_seconds: how long it tries to connect.
        peer_timeout_seconds: how long the other host may be silent.
        tls: everything is encrypted.
        gathers: it says where it is, and waits to be made an agent (``launch.agent.gathering``).
        is_listening: the supervisor listened before there was this text; where it does not, the job is over.
        has_attempts: ticket and number are those of the task, of which each attempt has its own (`text_of_attempt`).
    """

    addresses: tuple[str, ...]
    ticket: str
    number: int
    timeout_seconds: float
    peer_timeout_seconds: float = 20.0
    tls: bool = False
    gathers: bool = False
    is_listening: bool = False
    has_attempts: bool = False

    def __repr__(self) -> str:
        """Describe it without the ticket."""
        return f"DialText(agent {self.number} to {', '.join(self.addresses)})"


class DialGreeting(msgspec.Struct, frozen=True):
    """First words of an agent.

    Attributes:
        version: of Reigen.
        python: its interpreter.
        hostname: its host's own name.
        machine: the same for all processes of a machine, or of a container.
        num_slots: of its host; None: the launcher knows it.
    """

    version: str
    python: str
    hostname: str
    machine: str = ""
    num_slots: int | None = None


def identify_machine() -> str:
    """Return a text that is the same in processes which see one another, and another one in each container."""
    parts = [_read_text("/proc/sys/kernel/random/boot_id")]
    for name in ("pid", "net"):
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    return " ".join(parts)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return socket.gethostname()


# ---------------------------------------------------------------------------------------------- tickets


@dataclass(slots=True)
class _Ticket:
    host: str
    secret: bytes = field(repr=False)
    deadline: float
    claimed_from: str = ""


@dataclass(frozen=True, slots=True)
class TicketClaim:
    """Outcome of the use of a ticket: by the agent of ``host``, or refused for a reason.

    ``is_conflict``: it was used before.
    """

    host: str
    refusal: str = ""
    is_conflict: bool = False


class TicketBook:
    """Tickets of a job's agents, by number. No I/O."""

    def __init__(self) -> None:
        self._tickets: dict[int, _Ticket] = {}
        #: Tasks that may be tried again: host and secret, by number.
        self._tasks: dict[int, tuple[str, bytes]] = {}

    def issue_for_attempts(self, number: int, host: str, secret: bytes | None = None) -> bytes:
        """Make the secret of a task, from which the tickets of its attempts follow, which count from now on."""
        assert number < 1 << _NUMBER_BITS, "numbers of attempts are above"
        secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._tasks[number] = host, secret
        return secret

    def issue(self, number: int, host: str, deadline: float, secret: bytes | None = None) -> bytes:
        """Make the ticket of a host, which counts until ``deadline`` (``time.monotonic()``); an older one is void."""
        secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._tickets[number] = _Ticket(host, secret, deadline)
        return secret

    def find_secret(self, peer: Identity, now: float) -> bytes | None:
        """Return the secret by which a peer has to prove itself; None: it has no ticket, or one that is void.

        One that was used is found, too, so that who has it, again, can be told apart from a stranger.
        """
        if peer.role is not ProcessRole.AGENT or peer.purpose != DIAL_PURPOSE:
            return None
        ticket = self._tickets.get(peer.rank)
        if ticket is None and (task := self._tasks.get(peer.rank % (1 << _NUMBER_BITS))) is not None:
            return derive_ticket(task[1], peer.rank >> _NUMBER_BITS)
        if ticket is None or (not ticket.claimed_from and now > ticket.deadline):
            return None
        return ticket.secret

    def claim(self, number: int, address: str) -> TicketClaim:
        """Use a ticket that a peer at ``address`` has proven to know."""
        ticket = self._tickets.get(number)
        if ticket is None:
            ticket = self._tickets[number] = _Ticket(self._tasks[number % (1 << _NUMBER_BITS)][0], b"", 0.0)
            ticket.secret = derive_ticket(self._tasks[number % (1 << _NUMBER_BITS)][1], number >> _NUMBER_BITS)
        if ticket.claimed_from:
            text = f"two agents claim host {ticket.host}: from {ticket.claimed_from} and from {address}"
            return TicketClaim(ticket.host, text, is_conflict=True)
        ticket.claimed_from = address
        return TicketClaim(ticket.host)

    def cancel(self, number: int) -> None:
        """Make a ticket void."""
        self._tickets.pop(number, None)


@dataclass(frozen=True, slots=True)
class _TicketConnectionOptions(ConnectionOptions):
    """Options of connections that are accepted by tickets."""

    book: TicketBook = field(default_factory=TicketBook)

    def make_server_handshake(self) -> Handshake:
        """Make the accepting end's handshake, with the ticket of the peer's number."""
        return KeyedServerHandshake(lambda peer: self.book.find_secret(peer, time.monotonic()), self.me)


# ---------------------------------------------------------------------------------------------- the supervisor's end


@dataclass(frozen=True, slots=True)
class DialedAgent:
    """Agent that has connected: its host, greeting, and connection, which is the receiver's."""

    number: int
    host: str
    greeting: DialGreeting
    connection: Connection
    address: str


class DialListener:
    """Listener for the agents of a job.

    Args:
        loop: run by the owner.
        listening: from `net.listener.open_listening_socket`.
        address: its ``host:port``.
        on_agent: called with each agent that has connected, has a ticket and the right version.
        on_conflict: called with the words about a ticket that was used twice.
        on_refused: called with a host, and why its agent was refused: another version.
        tls: everything is encrypted.
        peer_timeout_seconds: how long another host may be silent.
    """

    def __init__(
        self,
        loop: EventLoop,
        listening: tuple[socket.socket, str],
        on_agent: Callable[[DialedAgent], None],
        on_conflict: Callable[[str], None],
        on_refused: Callable[[str, str], None],
        *,
        tls: TlsContext | None = None,
        peer_timeout_seconds: float = 20.0,
    ) -> None:
        self._loop, self.address = loop, listening[1]
        self._on_agent, self._on_conflict, self._on_refused = on_agent, on_conflict, on_refused
        self.book = TicketBook()
        self._has_tls, self._peer_timeout_seconds = tls is not None, peer_timeout_seconds
        me = Identity(ProcessRole.LAUNCHER, 0, DIAL_PURPOSE)
        options = _TicketConnectionOptions(
            bytes(SECRET_BYTES), me, MAX_FRAME_BYTES, tls, peer_timeout_seconds, book=self.book
        )
        self._waiting: set[Connection] = set()
        self._listener = Listener(loop, listening[0], options, self._on_authenticated)

    @classmethod
    def at(cls, host: str, port: int = 0) -> tuple[socket.socket, str]:
        """Open the listening socket at an address of this host; raises ConfigError, OSError."""
        return open_listening_socket(host, port)

    @property
    def num_refused(self) -> int:
        """Number of connections that came to nothing."""
        return self._listener.num_refused

    def issue(
        self,
        number: int,
        host: str,
        timeout_seconds: float,
        secret: bytes | None = None,
        *,
        gathers: bool = False,
        has_attempts: bool = False,
    ) -> str:
        """Make the ticket of a host, or take ``secret`` for it; returns the dial text of its agent.

        ``has_attempts``: a ticket for each attempt of a task; ``timeout_seconds`` is then for each of them.
        """
        if has_attempts:
            ticket = self.book.issue_for_attempts(number, host, secret)
        else:
            ticket = self.book.issue(number, host, time.monotonic() + timeout_seconds, secret)
        text = DialText(
            (self.address,),
            ticket.hex(),
            number,
            timeout_seconds,
            self._peer_timeout_seconds,
            self._has_tls,
            gathers,
            is_listening=True,
            has_attempts=has_attempts,
        )
        return encode_dial_text(text)

    def close(self) -> None:
        """Stop listening, and end what has not greeted. May be called twice."""
        for connection in list(self._waiting):
            self._drop(connection)
        self._listener.close()

    def _on_authenticated(self, connection: Connection) -> Callable[[], None]:
        self._waiting.add(connection)
        self._loop.watch(connection, partial(self._read, connection))
        return partial(self._drop, connection)  # one that does not greet in time

    def _drop(self, connection: Connection) -> None:
        self._waiting.discard(connection)
        if connection.fileno() >= 0:
            self._loop.unwatch(connection)
            connection.close()

    def _read(self, connection: Connection) -> None:
        try:
            messages = connection.read()
            if not messages:
                return
            greeting = _decode_greeting(messages)
        except (OSError, AuthenticationError, WireError) as error:
            self._listener.refuse(str(error))
            self._listener.confirm(connection)
            self._drop(connection)
            return
        self._listener.confirm(connection)
        self._waiting.discard(connection)
        self._loop.unwatch(connection)
        self._admit(connection, greeting)

    def _admit(self, connection: Connection, greeting: DialGreeting) -> None:
        number = connection.peer.rank
        try:
            address = join_address(*connection.socket.getpeername()[:2])
        except OSError:
            address = "an address unknown"  # it has gone, and used its ticket
        claim = self.book.claim(number, address)
        refusal = claim.refusal or _check_version(greeting)
        connection.post(refusal.encode())
        with suppress(OSError):
            connection.flush()
        if refusal:
            connection.close()
            self._listener.refuse(refusal)
            if claim.is_conflict:
                self._on_conflict(refusal)
            else:
                self._on_refused(claim.host, refusal)
            return
        self._on_agent(DialedAgent(number, claim.host, greeting, connection, address))


def _decode_greeting(messages: list[bytes]) -> DialGreeting:
    if len(messages) != 1 or len(messages[0]) > _MAX_GREETING_BYTES:
        raise WireError("an agent sends one greeting, and waits for its answer")
    try:
        return msgspec.json.decode(messages[0], type=DialGreeting)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a greeting: {error}") from None


def _check_version(greeting: DialGreeting) -> str:
    """Return why an agent is refused; empty: it is not."""
    if greeting.version == __version__:
        return ""
    return (
        f"Reigen {greeting.version} there ({greeting.python}), {__version__} here ({sys.executable}): "
        "install the same version on all hosts"
    )


# ---------------------------------------------------------------------------------------------- texts


def encode_dial_text(text: DialText) -> str:
    """Write a dial text: one line."""
    return msgspec.json.encode(text).decode()


def decode_dial_text(line: str) -> DialText:
    """Read a dial text; raises WireError, whose message does not repeat it."""
    try:
        text = msgspec.json.decode(line.strip(), type=DialText)
        is_ticket = len(bytes.fromhex(text.ticket)) == SECRET_BYTES
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise WireError("what the agent was given is no dial text") from None
    if not is_ticket or not text.addresses:
        raise WireError("the dial text has no ticket, or no address")
    return text


def derive_ticket(secret: bytes, attempt: int) -> bytes:
    """Derive the ticket of an attempt from the secret of its task."""
    return hmac.digest(secret, b"reigen attempt\0" + attempt.to_bytes(4), "sha256")


def text_of_attempt(text: DialText, attempt: int) -> DialText:
    """Return the dial text of an attempt of a task, from the task's; one without attempts stays as it is."""
    if not text.has_attempts:
        return text
    attempt %= 1 << _NUMBER_BITS
    ticket = derive_ticket(bytes.fromhex(text.ticket), attempt).hex()
    number = text.number | attempt << _NUMBER_BITS
    return msgspec.structs.replace(text, ticket=ticket, number=number, has_attempts=False)
