"""The agent's post: what its ranks send home, and that they have ended, in the order in which it happened."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable

from reigen.errors import LaunchError
from reigen.launch import orders
from reigen.launch.loop import Loop
from reigen.launch.luggage import PIECE_BYTES, Incoming, Letter, Luggage, take_letter
from reigen.launch.orders import Answer


class Post:
    """Sends letters and answers to the launcher one after the other, parcels in pieces.

    Args:
        loop: waits for letters.
        send: gives an answer to the launcher.
        is_busy: whether what was sent has not left yet: parcels wait for that, so that they are not in memory twice.
    """

    def __init__(self, loop: Loop, send: Callable[[Answer], None], is_busy: Callable[[], bool]) -> None:
        self._loop, self._send, self._is_busy = loop, send, is_busy
        self._queue: deque[Letter | Answer] = deque()
        #: How much of the first letter's parcel has been sent; None: not even the letter.
        self._num_sent: int | None = None
        self._incoming: Incoming | None = None
        self._lines: tuple[socket.socket, socket.socket] | None = None
        self.luggage: Luggage | None = None

    def receive(self, piece: orders.Piece) -> None:
        """Take a piece of the ranks' parcel.

        Raises:
            LaunchError: there is not enough memory for it.
        """
        self._incoming = self._incoming or Incoming()
        self._incoming.write(piece.data)
        if piece.is_last:
            self._incoming.seal()
            ours, theirs = self._lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._loop.watch(ours, self.collect)
            self.luggage = Luggage(self._incoming.descriptor, theirs.fileno())

    def collect(self) -> None:
        """Take the letters that are there."""
        if self._lines is not None:
            try:
                while (letter := take_letter(self._lines[0])) is not None:
                    self._queue.append(letter)
            except OSError as error:
                raise LaunchError(str(error)) from None

    def put(self, answer: Answer) -> None:
        """Send ``answer`` after every letter that ranks have sent until now."""
        self.collect()
        self._queue.append(answer)
        self.forward()

    def forward(self) -> None:
        """Send what can be sent now."""
        while self._queue:
            first = self._queue[0]
            if isinstance(first, Letter):
                if not self._forward(first):
                    return
            else:
                self._send(first)
            self._queue.popleft()

    def _forward(self, letter: Letter) -> bool:
        """Whether it is on its way completely."""
        size = None if letter.parcel is None else os.fstat(letter.parcel).st_size
        if self._num_sent is None:
            self._send(orders.Letter(letter.text, size))
            self._num_sent = 0
        if letter.parcel is not None and size is not None:
            while self._num_sent < size:
                if self._is_busy():
                    return False
                data = os.pread(letter.parcel, PIECE_BYTES, self._num_sent)
                self._num_sent += len(data)
                self._send(orders.Piece(data, self._num_sent == size))
            os.close(letter.parcel)
        self._num_sent = None
        return True
