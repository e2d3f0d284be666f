"""Relay of an agent: its ranks' messages, and their ends, in the order in which they happened."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable

from reigen.errors import LaunchError
from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_protocol import AgentReply
from reigen.launch.payload import (
    PAYLOAD_CHUNK_BYTES,
    InheritedDescriptors,
    PayloadFile,
    RankMessage,
    receive_rank_message,
)
from reigen.launch.supervision.event_loop import LauncherLoop


class RankRelay:
    """Sender of messages and answers to the launcher one after the other, payloads in pieces.

    Args:
        loop: waits for messages.
        send: gives an answer to the launcher.
        is_busy: whether earlier data has not been written yet: payloads wait for that, so as not to be in memory twice.
    """

    def __init__(self, loop: LauncherLoop, send: Callable[[AgentReply], None], is_busy: Callable[[], bool]) -> None:
        self._loop, self._send, self._is_busy = loop, send, is_busy
        self._queue: deque[RankMessage | AgentReply] = deque()
        #: Bytes of the first message's payload that have been sent; None: not even its header.
        self._num_sent: int | None = None
        self._incoming: PayloadFile | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self.inherited: InheritedDescriptors | None = None

    def receive(self, piece: agent_protocol.PayloadChunk) -> None:
        """Take a piece of the ranks' payload; raises LaunchError where there is not enough memory for it."""
        self._incoming = self._incoming or PayloadFile()
        self._incoming.write(piece.data)
        if piece.is_last:
            self._incoming.seal()
            own, ranks_end = self._sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._loop.watch(own, self.collect)
            self.inherited = InheritedDescriptors(self._incoming.descriptor, ranks_end.fileno())

    def collect(self) -> None:
        """Take the messages that are there."""
        if self._sockets is not None:
            try:
                while (message := receive_rank_message(self._sockets[0])).text:
                    self._queue.append(message)
            except BlockingIOError:
                return
            except OSError as error:
                raise LaunchError(str(error)) from None

    def put(self, answer: AgentReply) -> None:
        """Send ``answer`` after every message that ranks have sent until now."""
        self.collect()
        self._queue.append(answer)
        self.forward()

    def forward(self) -> None:
        """Send as much as is possible now."""
        while self._queue:
            first = self._queue[0]
            if isinstance(first, RankMessage):
                if not self._forward(first):
                    return
            else:
                self._send(first)
            self._queue.popleft()

    def _forward(self, message: RankMessage) -> bool:
        """Send a message, in parts; return whether all of it is sent."""
        size = None if message.payload is None else os.fstat(message.payload).st_size
        if self._num_sent is None:
            self._send(agent_protocol.RankMessageHeader(message.text, size))
            self._num_sent = 0
        if message.payload is not None and size is not None:
            while self._num_sent < size:
                if self._is_busy():
                    return False
                data = os.pread(message.payload, PAYLOAD_CHUNK_BYTES, self._num_sent)
                self._num_sent += len(data)
                self._send(agent_protocol.PayloadChunk(data, self._num_sent == size))
            os.close(message.payload)
        self._num_sent = None
        return True
