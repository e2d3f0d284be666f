"""What is fuzzed: functions of some bytes, which they follow like a script. A broken promise is an AssertionError.

Hypothesis writes the scripts in `test_wire.py`, libFuzzer in `explore.py`. Whatever they say, an end of a connection
raises nothing but the errors of a bad peer, takes in nothing that was not said to it, and keeps no more than a little.
"""

from __future__ import annotations

import functools
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Literal

import msgspec

from reigen.cluster.membership import messages
from reigen.cluster.membership.abort_message import AbortMessage
from reigen.cluster.membership.control_service import (
    REQUEST_CODEC,
    CancelGet,
    ControlService,
    ExchangeValues,
    ForgetKeys,
    GetValue,
    PutValue,
    RendezvousStore,
    StoreRequest,
)
from reigen.cluster.membership.members import RANK_HOLD_SECONDS, LossPolicy, parameter_server_job
from reigen.cluster.membership.messages import MEMBER_CODEC, MEMBERSHIP_REPLY_CODEC
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.cluster.membership.table import GroupTable, MembershipTable
from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import AuthSession, ClientHandshake, Identity, ProcessRole, ServerHandshake
from reigen.net.bulk_connection import BulkConnection
from reigen.net.connection import StreamProtocol, open_connection
from reigen.net.tls import TlsContext

SECRET = b"s" * 32
RANK, LAUNCHER = Identity(ProcessRole.RANK, 5, "fuzz"), Identity(ProcessRole.LAUNCHER, 0)
MAX_PAYLOAD_BYTES = 1 << 16
#: What a bad peer may cause at the other end, and nothing else.
BAD_PEER = (AuthenticationError, WireError, ConnectionError)
#: What a conversation may have to send before its peer is proven: the flights of both handshakes.
_MOST_OUTGOING_BYTES = 1 << 13


class Script:
    """Reads decisions from bytes; when they are used up, all that is left to decide is 0."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self, limit: int) -> int:
        """One of ``range(limit)``."""
        return int.from_bytes(self.bytes(1 if limit <= 256 else 3)) % limit

    def bytes(self, num: int) -> bytes:
        """The next ``num`` bytes, or fewer."""
        part = self._data[self._at : self._at + num]
        self._at += num
        return part


@functools.cache
def tls() -> TlsContext:
    return TlsContext()


def conversations(encrypted: bool) -> tuple[StreamProtocol, StreamProtocol]:
    client = StreamProtocol(ClientHandshake(SECRET, RANK), MAX_PAYLOAD_BYTES, tls().connects() if encrypted else None)
    server = StreamProtocol(
        ServerHandshake(SECRET, LAUNCHER), MAX_PAYLOAD_BYTES, tls().accepts() if encrypted else None
    )
    return client, server


def stranger(data: bytes) -> None:
    """Somebody who does not know the secret talks to an end of a connection."""
    script = Script(data)
    end = conversations(encrypted=script.number(2) == 1)[script.number(2)]
    with suppress(*BAD_PEER):
        while True:
            wanted = end.num_wanted_bytes
            assert 0 < wanted <= (1 << 14) + 256, "more is read of a stranger than a handshake has"
            said = script.bytes(1 + script.number(wanted))
            if not said:
                break
            assert end.receive(said) == []
            assert len(end.outgoing) <= _MOST_OUTGOING_BYTES
    assert end.peer is None


class Way:
    """One direction of a connection, with somebody who changes what comes by.

    Attributes:
        has_spoilt: whether it has changed anything.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._untouched = script.number(24)
        self._seen = bytearray()
        self.has_spoilt = False

    def carry(self, data: bytes) -> bytes:
        """What arrives of ``data``."""
        if not data:
            return data
        self._seen += data
        if self._untouched:
            self._untouched -= 1
            return data
        changed = self._change(bytearray(data), self._script.number(8))
        self.has_spoilt |= changed != data
        return changed

    def _change(self, data: bytearray, kind: int) -> bytes:
        at = self._script.number(len(data))
        if kind == 1:
            data[at] ^= 1 + self._script.number(255)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + 1 + self._script.number(64)]
        elif kind == 4:  # say something again
            begin = self._script.number(len(self._seen))
            data += self._seen[begin : begin + 1 + self._script.number(300)]
        elif kind == 5:
            data[at:at] = self._script.bytes(1 + self._script.number(100))
        elif kind == 6:  # change the order
            data = data[at:] + data[:at]
        return bytes(data)


def in_between(data: bytes) -> None:
    """Somebody changes what two ends say to each other: what arrives was said, in that order, or nothing arrives."""
    script = Script(data)
    ends = conversations(encrypted=script.number(2) == 1)
    ways = [Way(script), Way(script)]
    said: list[list[bytes]] = [[], []]
    heard: list[list[bytes]] = [[], []]
    is_over = False
    for here, there in [(0, 1), (1, 0)] * 12:
        if ends[here].peer is not None:
            said[here].append(bytes([len(said[here])]) * script.number(300))
            ends[here].send(said[here][-1])
        arriving = ways[here].carry(bytes(ends[here].outgoing))
        ends[here].outgoing.clear()
        try:
            heard[there] += _give(ends[there], arriving, script)
        except BAD_PEER:
            is_over = True
            break
    assert heard[1] == said[0][: len(heard[1])]
    assert heard[0] == said[1][: len(heard[0])]
    assert ends[0].peer in {None, LAUNCHER}
    assert ends[1].peer in {None, RANK}
    if not ways[0].has_spoilt and not ways[1].has_spoilt:
        assert not is_over, "nobody changed anything"
        assert heard[1] == said[0]
        assert len(said[1]) > 5


def _give(end: StreamProtocol, data: bytes, script: Script) -> list[bytes]:
    heard = []
    while data:
        num = min(end.num_wanted_bytes, 1 + script.number(1000)) if script else end.num_wanted_bytes
        heard += end.receive(data[:num])
        data = data[num:]
    return heard


def link_of_a_liar(data: bytes) -> None:
    """Headers of a link are forged, repeated, left out or put into another order, or say what makes no sense."""
    script = Script(data)
    peer, here = AuthSession(RANK, b"a" * 32, b"b" * 32), AuthSession(LAUNCHER, b"b" * 32, b"a" * 32)
    messages = [bytes([index]) * script.number(300) for index in range(1 + script.number(8))]
    pieces = [peer.seal(struct.pack(">BQ", 1, len(one))) + one for one in messages]
    num_good = _forge(script, pieces, peer)
    stream = b"".join(pieces)
    places = [bytearray(len(one)) for one in messages]
    num_received, error = _through_a_link(script, stream, here, places)
    assert num_received <= num_good
    assert places[:num_received] == messages[:num_received]
    if num_good == len(messages) == len(pieces):
        assert num_received == num_good
        assert error is None


def _forge(script: Script, pieces: list[bytes], liar: AuthSession) -> int:
    """Change the sequence of messages; returns how many of the first ones are as they should be."""
    true = list(pieces)
    kind, index, other = script.number(8), script.number(len(pieces)), script.number(len(pieces))
    if kind == 1:
        header = bytearray(pieces[index])
        header[script.number(25)] ^= 1 + script.number(255)
        pieces[index] = bytes(header)
    elif kind == 2:
        pieces.insert(index, pieces[other])
    elif kind == 3:
        del pieces[index]
    elif kind == 4:
        pieces[index], pieces[other] = pieces[other], pieces[index]
    elif kind == 5:
        pieces[index] = script.bytes(25 + script.number(300)).ljust(25, b"\0")
    elif kind == 6:  # by somebody who knows the keys
        pieces.append(liar.seal(struct.pack(">BQ", script.number(256), script.number(1 << 24) << script.number(41))))
        pieces.append(script.bytes(2000))
    elif kind == 7:
        pieces[index] = pieces[index][: script.number(len(pieces[index]))]
        del pieces[index + 1 :]
    return next(
        (i for i, (one, was) in enumerate(zip(pieces, true, strict=False)) if one != was), min(len(pieces), len(true))
    )


def _through_a_link(
    script: Script, stream: bytes, session: AuthSession, places: list[bytearray]
) -> tuple[int, Exception | None]:
    """Send bytes to a link in pieces; returns how many places it filled, and the error that ended it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ExitStack() as stack:
        theirs.setblocking(False)
        link = BulkConnection(theirs, session)
        stack.callback(link.close)
        num_received, num_posted = 0, 0
        while stream or num_posted < len(places):
            if num_posted < len(places) and script.number(3) < 2:
                link.post_receive(memoryview(places[num_posted]))
                num_posted += 1
            num = 1 + script.number(700) if script else len(stream)
            ours.sendall(stream[:num])
            stream = stream[num:]
            try:
                for _ in range(3):
                    num_received += link.advance_receives()
            except BAD_PEER as error:
                return num_received, error
            assert link.num_expected == num_posted - num_received
        return num_received, None


def link_in_between(data: bytes) -> None:
    """Somebody changes any byte of a link that is encrypted: what arrives was sent, in that order."""
    script = Script(data)
    ends = conversations(encrypted=True)
    while ends[0].outgoing or ends[1].outgoing:
        for here, there in ((0, 1), (1, 0)):
            arriving = bytes(ends[here].outgoing)
            ends[here].outgoing.clear()
            _give(ends[there], arriving, Script(b""))
    pairs = [socket.socketpair(), socket.socketpair()]
    with ExitStack() as stack:
        for one in (*pairs[0], *pairs[1]):
            one.setblocking(False)
            stack.enter_context(one)
        sender, receiver = (BulkConnection(*end.detach(pair[0])) for end, pair in zip(ends, pairs, strict=True))
        stack.callback(sender.close)
        stack.callback(receiver.close)
        messages = [bytes([index]) * script.number(3000) for index in range(1 + script.number(8))]
        places = [bytearray(len(one)) for one in messages]
        way = Way(script)
        num_received = 0
        for message, place in zip(messages, places, strict=True):
            sender.post_send(memoryview(message))
            receiver.post_receive(memoryview(place))
            sender.advance_sends()
            pairs[1][1].sendall(way.carry(pairs[0][1].recv(1 << 16)))
            try:
                num_received += receiver.advance_receives()
            except BAD_PEER:
                break
        assert places[:num_received] == messages[:num_received]
        assert way.has_spoilt or num_received == len(messages)


def requests(data: bytes) -> None:
    """Ranks that know the secret ask the service for what makes no sense."""
    script = Script(data)
    store, groups = RendezvousStore(), GroupTable()
    now = 0.0
    while script:
        owner = script.number(4)
        now += script.number(3) * RANK_HOLD_SECONDS
        try:
            message = REQUEST_CODEC.decode(payload(script))
        except WireError:
            continue
        if isinstance(message, StoreRequest):
            store.handle(owner, message)
        else:
            for told, answer in groups.handle(owner, message, now):
                if isinstance(answer, messages.MemberRefused):  # the service closes that connection
                    groups.ended(told, now)
        if script.number(8) == 7:
            store.forget_all(owner)
            groups.ended(owner, now, silent=script.number(2) == 1)
        groups.tick(now)
        groups.validate()
    groups.tick(now + 100.0)


def payload(script: Script) -> bytes:
    """A message to the service, more or less: some are as they should be, some nearly, some not at all."""
    kind, number, text = script.number(12), script.number(1 << 24) << script.number(40), "k" * script.number(300)
    small = script.number(5)
    known: list[msgspec.Struct] = [
        PutValue(number, text, script.bytes(small)),
        PutValue(number, text, script.bytes(small), only_first=True),
        GetValue(number, text),
        CancelGet(number),
        messages.RegisterMember("rank", small, text, number, {"rank": 1 + script.number(5)}, group=text, host_id=text),
        messages.LeaveJob(),
        AbortMessage(text, tuple(range(small)), text),
        ForgetKeys(number, text),
        ExchangeValues(number, text, tuple("abcd"[:small]), script.number(4), b"x" * small),
    ]
    return _spoilt(known[kind] if kind < len(known) else None, script)


def _spoilt(message: msgspec.Struct | None, script: Script) -> bytes:
    if message is None:
        return script.bytes(script.number(300))
    encoded = bytearray(msgspec.msgpack.encode(message))
    if script.number(4) == 3:
        encoded[script.number(len(encoded))] = script.number(256)
    return bytes(encoded)


def calls(data: bytes) -> None:
    """Nodes that know the secret tell a scheduler of parameter servers what makes no sense."""
    script = Script(data)
    roster = MembershipTable(
        parameter_server_job(2, 2, policy=list(LossPolicy)[script.number(3)], servers_return=script.number(2) == 1), 1
    )
    now = 0.0
    while script:
        owner = script.number(6)
        now += script.number(4) * 0.7
        with suppress(WireError):
            for told, answer in roster.handle(owner, MEMBER_CODEC.decode(call(script)), now):
                MEMBERSHIP_REPLY_CODEC.encode(answer)
                if isinstance(answer, messages.MemberRefused):  # the scheduler closes that connection
                    roster.ended(told, now)
        if script.number(8) == 7:
            roster.ended(owner, now)
        roster.tick(now)
        roster.validate()
    roster.tick(now + 1000.0)


def call(script: Script) -> bytes:
    """A message to the scheduler, more or less, as `payload`."""
    kind, number, text = script.number(10), script.number(4) - 1, "k" * script.number(4)
    role: Literal["worker", "server"] = "worker" if script.number(2) else "server"
    counts: dict[messages.MemberRole, int] = {"worker": 2, "server": 2}
    expected, incarnation, sequence = script.number(10), script.number(5), script.number(1 << 24) - 2
    known: list[msgspec.Struct] = [
        messages.RegisterMember(role, number, text, incarnation, counts, text, job=script.number(3)),
        messages.RegisterMember(
            role, number, text, incarnation, {**counts, "server": max(2, expected)}, text, left=(number,)
        ),
        messages.EnterBarrier(text, sequence),
        messages.EnterBarrier(text, sequence, is_abandoned=True, is_over=script.number(2) == 1),
        messages.StatusQuery(),
        messages.StatusQuery(float(sequence)),
        messages.MemberHeartbeat(),
        messages.LeaveJob(),
    ]
    return _spoilt(known[kind] if kind < len(known) else None, script)


class Victim:
    """A rendezvous that is attacked, and an honest rank that must not notice.

    Args:
        encrypted: whether they use TLS.
        handshake_seconds: how long a connection may stay unproven.
    """

    def __init__(self, *, encrypted: bool = False, handshake_seconds: float = 60.0) -> None:
        self.tls = tls() if encrypted else None
        self.server = ControlService(SECRET, handshake_seconds=handshake_seconds, tls=self.tls)
        self.server.start()
        self._bystander = RendezvousClient(self.server.address, SECRET, 0, 10.0, self.tls)
        self._num_visits = 0

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)

    def check(self) -> None:
        """The honest rank is served on the connection that it has had all the time."""
        self._num_visits += 1
        value = struct.pack(">Q", self._num_visits)
        self._bystander.put("bystander", value)
        assert self._bystander.get("bystander", 10.0) == value

    def close(self) -> None:
        self._bystander.close()
        self.server.close()

    def attack(self, data: bytes) -> None:
        """Strangers, and ranks that talk nonsense, come and go."""
        script = Script(data)
        with ExitStack() as stack:
            for _ in range(1 + script.number(3)):
                visit(self.address, script, stack, self.tls)
        self.check()


def visit(address: tuple[str, int], script: Script, stack: ExitStack, own: TlsContext | None) -> None:
    """Connect as a stranger, or as a rank that talks nonsense; whatever happens to it is its own affair."""
    with suppress(OSError, *BAD_PEER):
        if script.number(2):
            rank = open_connection(address, SECRET, Identity(ProcessRole.RANK, 1), 1 << 22, time.monotonic() + 0.2, own)
            stack.callback(rank.close)
            for _ in range(1 + script.number(4)):
                rank.send(payload(script), time.monotonic() + 1.0)
            return
        connection = stack.enter_context(socket.create_connection(address, timeout=10.0))
        for _ in range(1 + script.number(6)):
            connection.sendall(script.bytes(1 + script.number(200)))
            if script.number(8) == 7:
                connection.shutdown(socket.SHUT_WR)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "stranger": stranger,
    "in_between": in_between,
    "link_of_a_liar": link_of_a_liar,
    "link_in_between": link_in_between,
    "requests": requests,
    "calls": calls,
}
