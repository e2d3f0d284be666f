"""Which ranks share a machine: found out by the ranks themselves, whoever started them.

Ranks share a machine if they can share memory: one kernel and one process namespace. Two containers of one host are
two machines. What a launcher says of local ranks is not asked, since it may count otherwise.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import msgspec

from reigen.cluster.neighbours import listed, this_machine
from reigen.cluster.rendezvous import Rendezvous
from reigen.cluster.topology import Topology
from reigen.errors import DeadlineError

#: How long to ask whether somebody has put something when it is too late anyway.
_LOOK_SECONDS = 0.05
#: Rank 0 tells the others who is missing; what that may take beyond the deadline.
_SLACK_SECONDS = 2.0
_MAX_HOSTNAME = 255
_ATTEMPT_BYTES = 8


class _Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank runs, and which of its tries to come into the job this is."""

    machine: str
    hostname: str
    attempt: bytes


class _Table(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 found: everybody's place, None for those who did not come."""

    places: tuple[_Place | None, ...]

    @property
    def missing(self) -> list[int]:
        """Who did not come."""
        return [rank for rank, place in enumerate(self.places) if place is None]


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of a job by machine, the same on every rank but for ``rank``.

    Attributes:
        rank: this one.
        machines: the ranks of each machine, ascending; machines by their lowest rank.
        hostnames: of every rank's host, by rank.
    """

    rank: int
    machines: tuple[tuple[int, ...], ...]
    hostnames: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hostnames)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's machine, itself among them."""
        return next(ranks for ranks in self.machines if self.rank in ranks)

    @property
    def is_homogeneous(self) -> bool:
        """Whether all machines have the same number of ranks."""
        return len({len(ranks) for ranks in self.machines}) == 1

    def topology(self) -> Topology:
        """This rank's numbers, as Horovod counts them: see `Topology`."""
        local = self.local
        local_rank = local.index(self.rank)
        peers = [ranks for ranks in self.machines if len(ranks) > local_rank]
        return Topology(self.rank, self.size, local_rank, len(local), peers.index(local), len(peers))


def this_host(host_id: str = "") -> tuple[str, str]:
    """What tells this machine from all others, and what people call it.

    Args:
        host_id: makes several machines of one: ranks with different ones do not share memory (REIGEN_HOST_ID).
    """
    name = socket.gethostname()
    if not host_id:
        return this_machine(), name[:_MAX_HOSTNAME]
    return f"{this_machine()} {host_id}", f"{name}/{host_id}"[:_MAX_HOSTNAME]


def arrange(rank: int, machines: tuple[str, ...], hostnames: tuple[str, ...]) -> Layout:
    """The layout of ranks on machines that are told apart by names, given by rank."""
    ranks_of: dict[str, list[int]] = {}
    for number, machine in enumerate(machines):
        ranks_of.setdefault(machine, []).append(number)
    return Layout(rank, tuple(tuple(ranks) for ranks in ranks_of.values()), hostnames)


def exchange(rendezvous: Rendezvous, rank: int, size: int, timeout_seconds: float, host_id: str = "") -> Layout:
    """Find out which ranks share a machine. Collective over all ranks of the job.

    Args:
        rendezvous: where the ranks meet; a `Room` that nobody has used for this before.
        rank: this rank.
        size: how many there are.
        timeout_seconds: how long to wait for the last rank.
        host_id: see `this_host`.

    Raises:
        DeadlineError: ranks did not come; names them, on every rank that did.
        PeerLostError: the service has gone.
    """
    until = time.monotonic() + timeout_seconds
    own = _Place(*this_host(host_id), os.urandom(_ATTEMPT_BYTES))
    rendezvous.put(f"place/{rank}", msgspec.msgpack.encode(own))
    if rank == 0:
        table = _gather(rendezvous, size, until)
        rendezvous.put("layout", msgspec.msgpack.encode(table))
    else:
        table = _await_table(rendezvous, rank, own, size, until)
    if table.missing:
        raise DeadlineError(
            f"rank(s) {listed(table.missing)} did not call init() within {timeout_seconds:g} s "
            "(REIGEN_START_TIMEOUT sets how long to wait)",
            ranks=table.missing,
        )
    machines, hostnames = zip(*((place.machine, place.hostname) for place in table.places if place), strict=True)
    return arrange(rank, machines, hostnames)


def _gather(rendezvous: Rendezvous, size: int, until: float) -> _Table:
    """Everybody's place, as rank 0 collects them."""
    places: list[_Place | None] = []
    for peer in range(size):
        try:
            data = rendezvous.get(f"place/{peer}", max(_LOOK_SECONDS, until - time.monotonic()))
        except TimeoutError:
            places.append(None)
        else:
            places.append(msgspec.msgpack.decode(data, type=_Place))
    return _Table(tuple(places))


def _await_table(rendezvous: Rendezvous, rank: int, own: _Place, size: int, until: float) -> _Table:
    """What rank 0 found when it had seen this rank's place; if rank 0 did not come, who else did not.

    A table that does not hold it was left by a try that has failed.
    """
    until += _SLACK_SECONDS + size * _LOOK_SECONDS
    while True:
        left = until - time.monotonic()
        try:
            table = msgspec.msgpack.decode(rendezvous.get("layout", max(_LOOK_SECONDS, left)), type=_Table)
        except TimeoutError:
            table = _Table(())
        if len(table.places) == size and table.places[rank] == own:
            return table
        if left <= 0:
            found = _gather(rendezvous, size, time.monotonic())
            return found if found.missing else _Table((None, *found.places[1:]))
        time.sleep(min(left, _LOOK_SECONDS))
