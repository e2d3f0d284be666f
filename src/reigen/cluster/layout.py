"""Which ranks share a machine: found out by the ranks themselves, whoever started them.

Ranks share a machine if they can share memory: one kernel and one process namespace. Two containers of one host are
two machines. What a launcher says of local ranks is not asked, since it may count otherwise.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from reigen.cluster.neighbours import this_machine
from reigen.cluster.rendezvous import Rendezvous
from reigen.cluster.told import listed
from reigen.cluster.topology import Topology
from reigen.errors import DeadlineError, PeerLostError

#: How often to look whether rank 0 still lives.
_SLICE_SECONDS = 0.2
_MAX_HOSTNAME = 255
_ATTEMPT_BYTES = 8


class _Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank runs. A process says the same however often it joins the job."""

    machine: str
    hostname: str
    pid: int


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

    Rank 0 collects where the others are and tells all of them: two messages a rank, however many there are.

    Args:
        rendezvous: where the ranks meet; a `Room` that nobody but these processes has used for this.
        rank: this rank.
        size: how many there are.
        timeout_seconds: how long to wait for the last rank.
        host_id: see `this_host`.

    Raises:
        DeadlineError: ranks did not come; names them.
        PeerLostError: the service has gone, or rank 0, of this machine, died.
    """
    until = time.monotonic() + timeout_seconds
    own = _Place(*this_host(host_id), os.getpid())
    rendezvous.put(f"place/{rank}", msgspec.msgpack.encode(own))
    if rank == 0:
        found = [_ask(rendezvous, f"place/{peer}", until) for peer in range(size)]
        missing = [peer for peer, data in enumerate(found) if data is None]
        places = [msgspec.msgpack.decode(data, type=_Place) for data in found if data is not None]
        if not missing:
            rendezvous.put("layout", msgspec.msgpack.encode(places))
    else:
        places = _await_layout(rendezvous, own, until)
        missing = [] if places else _missing(rendezvous, size)
    if missing:
        raise DeadlineError(
            f"rank(s) {listed(missing)} did not call init() within {timeout_seconds:g} s "
            "(REIGEN_START_TIMEOUT sets how long to wait)",
            ranks=missing,
        )
    return arrange(rank, tuple(place.machine for place in places), tuple(place.hostname for place in places))


def _ask(rendezvous: Rendezvous, key: str, until: float) -> bytes | None:
    """The value of a key, waited for, but not for longer than that."""
    left = until - time.monotonic()
    if left > 0:
        with suppress(TimeoutError):
            return rendezvous.get(key, left)
    return rendezvous.peek(key)


def _await_layout(rendezvous: Rendezvous, own: _Place, until: float) -> list[_Place]:
    """What rank 0 tells; nothing if it is too late."""
    zero: _Place | None = None
    while True:
        data = _ask(rendezvous, "layout", min(until, time.monotonic() + _SLICE_SECONDS))
        if data is not None:
            return msgspec.msgpack.decode(data, type=list[_Place])
        if zero is not None and zero.machine == own.machine and _has_ended(zero.pid):
            raise PeerLostError("rank(s) 0 died during init()", ranks=(0,))
        if time.monotonic() >= until:
            return []
        if zero is None and (told := rendezvous.peek("place/0")) is not None:
            zero = msgspec.msgpack.decode(told, type=_Place)


def _has_ended(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))  # also where nobody has asked how it ended
    finally:
        os.close(fd)


def _missing(rendezvous: Rendezvous, size: int) -> list[int]:
    """Who has not come; rank 0 if it cannot be anybody else: it has come before, but does not tell what it found."""
    return [peer for peer in range(size) if rendezvous.peek(f"place/{peer}") is None] or [0]
