"""Messages of any length, and notes, over a transport that carries short ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from reigen.engine import control_channel as module
from reigen.engine.control_channel import ControlChannel
from reigen.engine.messages import (
    Announcement,
    CacheEviction,
    MessageFragment,
    Note,
    Operation,
    OperationKind,
    RankShutdown,
    SubmitRequest,
    Topic,
    encode,
)
from reigen.engine.transport import SingleRankTransport
from reigen.errors import CollectiveError
from reigen.net.shm_ring import MAX_MESSAGE_BYTES


class Loop(SingleRankTransport):
    """What is sent comes back, from rank 3."""

    def __init__(self) -> None:
        self.queue: list[bytes] = []

    def send(self, message: bytes) -> None:
        assert len(message) <= MAX_MESSAGE_BYTES
        self.queue.append(message)

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        found, self.queue = self.queue, []
        return [(3, message) for message in found]

    def pending(self) -> bool:
        return bool(self.queue)


def test_messages_of_any_length_arrive_whole_and_in_order() -> None:
    channel = ControlChannel(Loop(), receives_reports=True)
    long = SubmitRequest(Operation(OperationKind.ALLTOALL, "long", splits=tuple(range(1 << 40, (1 << 40) + 20_000))))
    many = [SubmitRequest(Operation(OperationKind.BARRIER, f"{i:0500}")) for i in range(400)]
    channel.send([*many, long, many[0]])
    received = channel.receive()
    assert {rank for rank, _ in received} == {3}
    assert [message for _, messages in received for message in messages] == [*many, long, many[0]]
    assert not channel.pending()


def test_reading_ahead_takes_nothing_away_and_hands_over_what_is_urgent() -> None:
    channel = ControlChannel(Loop(), receives_reports=False)
    heard: list[Any] = []
    channel.listen(Topic.STACKS, lambda sender, data: heard.append((sender, data)))
    channel.listen(Topic.TIMELINE, lambda sender, data: heard.append(data))
    channel.post(Note(Topic.TIMELINE, b"later"))
    channel.post(Note(Topic.STACKS, b"now"))
    channel.send_notes()
    said: list[Announcement] = [CacheEviction((1,)), RankShutdown(2)]
    channel.send(said)
    assert list(channel.peek(Topic.STACKS)) == said
    assert heard == [(3, b"now")]
    channel.send([RankShutdown(4)])  # comes after what was read before
    assert channel.pending()
    # Both at once: nobody rings a second time for what is left.
    assert [message for _, messages in channel.receive() for message in messages] == [*said, RankShutdown(4)]
    assert heard == [(3, b"now"), b"later", (3, b"now")]
    assert not channel.pending()


def test_a_message_that_never_ends_is_refused() -> None:

    transport = Loop()
    channel = ControlChannel(transport, receives_reports=True)
    piece = encode([MessageFragment(bytes(60_000), last=False)])
    transport.queue = [piece] * (module._MAX_REASSEMBLED_BYTES // 60_000 + 1)
    with pytest.raises(CollectiveError, match="rank 3 sent a control message of more than"):
        list(channel.receive())
