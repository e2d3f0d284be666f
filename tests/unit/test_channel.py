"""Messages of any length, and notes, over a transport that carries short ones."""

from __future__ import annotations

from typing import Any

import pytest

from reigen.engine import channel as module
from reigen.engine.channel import Channel
from reigen.engine.messages import Announcement, Forget, Kind, Left, Note, Operation, Piece, Submit, Topic, encode
from reigen.engine.transport import Solitude
from reigen.errors import CollectiveError
from reigen.wire.mailbox import MAX_MESSAGE_BYTES


class Loop(Solitude):
    """What is sent comes back, from rank 3."""

    def __init__(self) -> None:
        self.queue: list[bytes] = []

    def send(self, message: bytes) -> None:
        assert len(message) <= MAX_MESSAGE_BYTES
        self.queue.append(message)

    def receive(self) -> list[tuple[int, bytes]]:
        found, self.queue = self.queue, []
        return [(3, message) for message in found]

    def pending(self) -> bool:
        return bool(self.queue)


def test_messages_of_any_length_arrive_whole_and_in_order() -> None:
    channel = Channel(Loop(), hears_reports=True)
    long = Submit(Operation(Kind.ALLTOALL, "long", splits=tuple(range(1 << 40, (1 << 40) + 20_000))))
    many = [Submit(Operation(Kind.BARRIER, f"{i:0500}")) for i in range(400)]
    channel.send([*many, long, many[0]])
    assert list(channel.receive()) == [(3, message) for message in [*many, long, many[0]]]
    assert not channel.pending()


def test_reading_ahead_takes_nothing_away_and_hands_over_what_is_urgent() -> None:
    channel = Channel(Loop(), hears_reports=False)
    heard: list[Any] = []
    channel.listen(Topic.STACKS, lambda sender, data: heard.append((sender, data)))
    channel.listen(Topic.TIMELINE, lambda sender, data: heard.append(data))
    channel.post(Note(Topic.TIMELINE, b"later"))
    channel.post(Note(Topic.STACKS, b"now"))
    channel.send_notes()
    said: list[Announcement] = [Forget((1,)), Left(2)]
    channel.send(said)
    assert list(channel.read_ahead(Topic.STACKS)) == said
    assert heard == [(3, b"now")]
    channel.send([Left(4)])  # comes after what was read before
    assert channel.pending()
    first = [message for _, message in channel.receive()]
    assert heard == [(3, b"now"), b"later", (3, b"now")]
    assert [*first, *(message for _, message in channel.receive())] == [*said, Left(4)]


def test_a_message_that_never_ends_is_refused() -> None:

    transport = Loop()
    channel = Channel(transport, hears_reports=True)
    piece = encode([Piece(bytes(60_000), last=False)])
    transport.queue = [piece] * (module._MOST_WHOLE_BYTES // 60_000 + 1)
    with pytest.raises(CollectiveError, match="rank 3 sent a control message of more than"):
        list(channel.receive())
