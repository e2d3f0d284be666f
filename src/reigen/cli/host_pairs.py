"""Speed between each two hosts: ``python -m reigen.cli.host_pairs``, one rank a host.

`reigen check --hosts` starts it with the launcher that starts every job, and it connects as every job does: the same
choice of addresses, the same authenticated connections. In each round every host talks to one other host, so that no
measurement disturbs another one more than it must. Rank 0 prints the findings, as JSON.
"""

from __future__ import annotations

import os
import select
import statistics
import sys
import time
from collections.abc import Callable

import msgspec

from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.environ import detect_job
from reigen.cluster.membership.rendezvous import RendezvousClient, split_address
from reigen.config import load_config
from reigen.errors import ReigenError
from reigen.net.bulk_connection import BulkConnection
from reigen.net.event_loop import wait_ready
from reigen.net.interfaces import choose_address, local_addresses
from reigen.net.tls import TlsContext

_CONNECT_SECONDS = 5.0
#: Limits in seconds of the time for one pair, and for waiting for the partner in a round.
_PAIR_SECONDS, _ROUND_SECONDS = 20.0, 60.0
_NUM_ROUND_TRIPS = 50
_MESSAGE_BYTES = 1 << 18
#: Intended seconds of a transfer, and limit of its messages: 2 GiB.
_TRANSFER_SECONDS, _MOST_MESSAGES = 0.5, 1 << 13


class Pair(msgspec.Struct, frozen=True):
    """Findings about two ranks.

    Attributes:
        ranks: the two.
        problem: why they cannot talk to each other; empty where they can.
        round_trip_seconds: of a message of one byte and its answer, the median.
        bytes_per_second: from the first to the second, and back.
    """

    ranks: tuple[int, int]
    problem: str = ""
    round_trip_seconds: float = 0.0
    bytes_per_second: tuple[float, float] = (0.0, 0.0)


class Findings(msgspec.Struct, frozen=True):
    """Findings of one rank, or of all.

    Attributes:
        addresses: each rank's address, with the reason why it was chosen.
        pairs: those in which one of these ranks is the lower one.
    """

    addresses: list[tuple[str, str]]
    pairs: list[Pair]


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Plan a tournament: each two of ``size`` meet once, and no rank is in two pairs of a round.

    Example:
        >>> rounds(4)
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    number = size + size % 2
    found = []
    circle = list(range(1, number))
    for _ in range(number - 1):
        around = [0, *circle]
        pairs = [(around[at], around[number - 1 - at]) for at in range(number // 2)]
        found.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < size))
        circle = [circle[-1], *circle[:-1]]
    return found


def main() -> int:
    """Take part as one rank; returns the exit code."""
    job, config = detect_job(os.environ), load_config(os.environ)
    rank, size = job.rank, job.size
    assert job.rendezvous is not None, "reigen run starts this"
    assert job.secret is not None, "reigen run starts this"
    tls = TlsContext() if config.tls else None
    client = RendezvousClient(job.rendezvous, job.secret, rank, config.start_timeout_seconds, tls)
    host, _ = split_address(job.rendezvous)
    address, reason = choose_address(config.network_interfaces, host)
    interface = next((name for name, own in local_addresses().items() if address in own), "no interface")
    mesh = ConnectionPool(rank, size, client, job.secret, address, config.peer_timeout_seconds, tls=tls)
    pairs = []
    for number, round_ in enumerate(rounds(size)):
        for pair in round_:
            if rank in pair:
                client.put(f"pairs/{number}/{rank}", b"")
                client.get(f"pairs/{number}/{sum(pair) - rank}", _ROUND_SECONDS)
                pairs.append(_measure(mesh, rank, pair))
    own = [pair for pair in pairs if pair.ranks[0] == rank]
    client.put(f"pairs/of/{rank}", msgspec.json.encode(Findings([(mesh.address, f"{interface}: {reason}")], own)))
    if rank == 0:
        sys.stdout.write(msgspec.json.encode(_gather(client, size)).decode() + "\n")
    mesh.close()
    client.close()
    return 0


def _gather(client: RendezvousClient, size: int) -> Findings:
    got = [client.get(f"pairs/of/{other}", _ROUND_SECONDS) for other in range(size)]
    parts = [msgspec.json.decode(data, type=Findings) for data in got]
    return Findings([each.addresses[0] for each in parts], [pair for each in parts for pair in each.pairs])


def _measure(mesh: ConnectionPool, rank: int, pair: tuple[int, int]) -> Pair:
    peer = sum(pair) - rank
    try:
        stream = mesh.open([peer], "check", time.monotonic() + _CONNECT_SECONDS, bulk=True)[peer]
        with_peer = _PeerMeasurement(BulkConnection(*stream.detach()), time.monotonic() + _PAIR_SECONDS)
    except (OSError, ReigenError) as error:
        return Pair(pair, str(error))
    try:
        if rank == pair[0]:
            return Pair(pair, "", with_peer.round_trip(), (with_peer.send_much(), with_peer.take_much()))
        with_peer.answer()
        return Pair(pair, "", 0.0, (with_peer.take_much(), with_peer.send_much()))
    except (OSError, ReigenError) as error:
        return Pair(pair, str(error))
    finally:
        with_peer.close()


class _PeerMeasurement:
    """Measurements with one peer, which makes the other half of each."""

    def __init__(self, link: BulkConnection, deadline: float) -> None:
        self._link, self._deadline = link, deadline
        self._message = bytearray(_MESSAGE_BYTES)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def round_trip(self) -> float:
        """Measure the seconds that a byte takes to the peer and back; the peer calls ``answer``."""
        seconds = []
        for _ in range(_NUM_ROUND_TRIPS):
            begin = time.perf_counter()
            self._send(b"?")
            self._take(1)
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    def answer(self) -> None:
        """Do the peer's half of ``round_trip``."""
        for _ in range(_NUM_ROUND_TRIPS):
            self._take(1)
            self._send(b"!")

    def send_much(self) -> float:
        """Measure bytes per second to the peer, which calls ``take_much``; a short transfer limits the long one."""
        rate = self._transfer(4)
        rate = self._transfer(max(4, min(_MOST_MESSAGES, int(rate * _TRANSFER_SECONDS / _MESSAGE_BYTES))))
        self._send(int(rate).to_bytes(8))
        return rate

    def take_much(self) -> float:
        """Return bytes per second from the peer, by its own clock."""
        for _ in range(2):
            num_messages = int.from_bytes(self._take(8))
            for _ in range(min(num_messages, _MOST_MESSAGES)):
                self._take_into(self._message)
            self._send(b".")
        return float(int.from_bytes(self._take(8)))

    def _transfer(self, num_messages: int) -> float:
        begin = time.perf_counter()
        self._send(num_messages.to_bytes(8))
        for _ in range(num_messages):
            self._send(self._message)
        self._take(1)
        return num_messages * _MESSAGE_BYTES / (time.perf_counter() - begin)

    def _send(self, data: bytes | bytearray) -> None:
        self._link.post_send(memoryview(data))
        self._until(lambda: self._link.advance_sends() > 0, select.POLLOUT)

    def _take(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self._take_into(data)
        return data

    def _take_into(self, data: bytearray) -> None:
        self._link.post_receive(memoryview(data))
        self._until(lambda: self._link.advance_receives() > 0, select.POLLIN)

    def _until(self, is_done: Callable[[], bool], events: int) -> None:
        while not is_done():
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"the measurement did not end within {_PAIR_SECONDS:g} s")
            wait_ready(self._link, remaining, events)


if __name__ == "__main__":
    sys.exit(main())
