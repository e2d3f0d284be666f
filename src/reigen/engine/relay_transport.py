"""Transport of a relay: a rank in large jobs that stands between rank 0 and other ranks (`reigen.engine.control_tree`).

For the engine of the relay it is a transport like any other: it sends reports, and receives announcements. In between,
whenever it is used, it passes on announcements, and sends what the ranks below report along with the relay's own. The
engine only has to know when that is due (`next_release`), and to see that announcements leave before it carries them
out (`announcement_backlog`), as others wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from reigen.engine.control_tree import ControlTree
from reigen.engine.messages import (
    MergedReports,
    MessageFragment,
    Report,
    decode_announcements,
    decode_reports,
    encode,
)
from reigen.engine.report_merger import ReportMerger
from reigen.net.connection import Connection
from reigen.net.shm_ring import MAX_MESSAGE_BYTES
from reigen.net.tcp_star import TcpStarTransport


class RelayTransport(TcpStarTransport):
    """Endpoint of a relay (`reigen.engine.transport.ControlTransport`).

    Args:
        connections: to its parent and its children; they are closed by `close`.
        rank: this rank.
        tree: has them.
    """

    #: hits of the relay's own need not be encoded, only to be decoded by the merger
    carries_integers = True

    def __init__(self, connections: Mapping[int, Connection], rank: int, tree: ControlTree) -> None:
        super().__init__(connections)
        self._rank, self._parent = rank, tree.parent(rank)
        self._merger = ReportMerger(tree.size, tree.subtree(rank))
        #: the beginning of an announcement that comes in pieces
        self._pieces = bytearray()

    @property
    def announcement_backlog(self) -> int:
        """Return how many messages of the `backlog` are announcements."""
        return sum(connection.num_posted for connection in self._children())

    def next_release(self) -> float | None:
        """Return when reports that are kept leave at the latest (`receive` sends them); None: none are."""
        return self._merger.next_release()

    def send(self, message: bytes) -> None:
        """Send reports or notes of this rank."""
        self._merger.receive(1 << self._rank, decode_reports(message), time.monotonic())
        self._report()

    def send_integers(self, integers: Sequence[int]) -> None:
        """Send cache hits of this rank."""
        self._merger.receive(1 << self._rank, integers, time.monotonic())
        self._report()

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        """Return announcements that have come, and were passed on; reports that have come go to the parent."""
        announced: list[tuple[int, bytes | Sequence[int]]] = []
        for sender, data in super().receive():
            assert isinstance(data, bytes), "integers do not travel between hosts"
            if sender == self._parent:
                self._follow(data)
                self._post(data, self._children())
                announced.append((sender, data))
            else:
                self._merger.receive(1 << sender, decode_reports(data), time.monotonic())
        self._report()
        return announced

    def _children(self) -> list[Connection]:
        return [connection for connection, rank in self._ranks.items() if rank != self._parent]

    def _follow(self, data: bytes) -> None:
        """Have the merger take in announcements; reports that must not come behind them leave now."""
        for announcement in decode_announcements(data):
            if not isinstance(announcement, MessageFragment):
                self._merger.follow([announcement])
                continue
            self._pieces += announcement.data
            if announcement.last:
                self._merger.follow(decode_announcements(bytes(self._pieces)))
                self._pieces.clear()

    def _report(self) -> None:
        """Send reports to the parent that are to leave now."""
        reports = self._merger.take(time.monotonic())
        if not reports:
            return
        parent = [connection for connection, rank in self._ranks.items() if rank == self._parent]
        for data in encode_bounded(reports):
            self._post(data, parent)


def encode_bounded(reports: Sequence[Report]) -> Iterator[bytes]:
    """Encode reports as messages that the transport carries; long ones are cut between reports."""
    data = encode(reports)
    if len(data) <= MAX_MESSAGE_BYTES:
        yield data
        return
    if len(reports) > 1:
        halves = [reports[: len(reports) // 2], reports[len(reports) // 2 :]]
    else:
        [merged] = reports
        assert isinstance(merged, MergedReports), "one report alone came in one message"
        middle = len(merged.reports) // 2
        halves = [
            [MergedReports(merged.first, merged.ranks, part)]
            for part in (merged.reports[:middle], merged.reports[middle:])
        ]
    for half in halves:
        yield from encode_bounded(half)
