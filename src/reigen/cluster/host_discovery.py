"""Which ranks share a machine: found out by the ranks themselves, whoever started them.

Ranks share a machine if they can share memory: one kernel and one process namespace. Two containers of one host are
two machines. What a launcher says of local ranks is not asked, since it may count otherwise.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from reigen.cluster.local_peers import process_namespace_id
from reigen.cluster.membership.abort_message import format_ranks
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError, DeadlineError, PeerLostError

#: How often to look whether rank 0 still lives.
_SLICE_SECONDS = 0.2
#: How long rank 0 waits for the others to find out why there is no job.
_REJECT_SECONDS = 5.0
_MAX_HOSTNAME = 255


class _HostReport(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank runs, and what it takes to be the same for all. A process says the same however often it joins."""

    machine: str
    hostname: str
    pid: int
    size: int
    terms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostLayout:
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


def host_identity(host_id: str = "") -> tuple[str, str]:
    """What tells this machine from all others, and what people call it.

    Args:
        host_id: makes several machines of one: ranks with different ones do not share memory (REIGEN_HOST_ID).
    """
    name = socket.gethostname()
    if not host_id:
        return process_namespace_id(), name[:_MAX_HOSTNAME]
    return f"{process_namespace_id()} {host_id}", f"{name}/{host_id}"[:_MAX_HOSTNAME]


def make_host_layout(rank: int, machines: tuple[str, ...], hostnames: tuple[str, ...]) -> HostLayout:
    """The layout of ranks on machines that are told apart by names, given by rank."""
    ranks_of: dict[str, list[int]] = {}
    for number, machine in enumerate(machines):
        ranks_of.setdefault(machine, []).append(number)
    return HostLayout(rank, tuple(tuple(ranks) for ranks in ranks_of.values()), hostnames)


def discover_hosts(
    rendezvous: Rendezvous, rank: int, size: int, timeout_seconds: float, host_id: str = "", terms: Sequence[str] = ()
) -> HostLayout:
    """Find out which ranks share a machine. Collective over all ranks of the job.

    Rank 0 collects where the others are and tells all of them: two messages a rank, however many there are.

    Args:
        rendezvous: where the ranks meet; a `PrefixRendezvous` that nobody but these processes has used for this.
        rank: this rank.
        size: how many there are.
        timeout_seconds: how long to wait for the last rank.
        host_id: see `host_identity`.
        terms: ``NAME=value``, what must be the same for all ranks, each of which gives the same names in this order.

    Raises:
        ConfigError: ``size`` or ``terms`` are not the same on all ranks; says on each of them how they differ.
        DeadlineError: ranks did not come; names them.
        PeerLostError: the service has gone, or rank 0, of this machine, died.
    """
    until = time.monotonic() + timeout_seconds
    own = _HostReport(*host_identity(host_id), os.getpid(), size, tuple(terms))
    rendezvous.put(f"place/{rank}", msgspec.msgpack.encode(own))
    places = _gather_reports(rendezvous, own, until) if rank == 0 else _await_layout(rendezvous, own, until)
    contradiction = _find_contradiction({**dict(enumerate(places)), rank: own})
    if rank == 0 and (contradiction or None not in places):
        rendezvous.put("layout", msgspec.msgpack.encode(places))
    if contradiction:
        _reject_job(rendezvous, rank, places)
        raise ConfigError(contradiction)
    found = [place for place in places if place is not None]
    if len(found) < size:
        missing = [peer for peer, place in enumerate(places) if place is None] or _missing_ranks(rendezvous, size)
        _reject_job(rendezvous, rank, places)
        raise DeadlineError(
            f"rank(s) {format_ranks(missing)} did not call init() within {timeout_seconds:g} s "
            "(REIGEN_START_TIMEOUT sets how long to wait)",
            ranks=missing,
        )
    return make_host_layout(rank, tuple(place.machine for place in found), tuple(place.hostname for place in found))


def _find_contradiction(places: Mapping[int, _HostReport | None]) -> str:
    """What ranks take to be the same for all and is not; empty if they agree."""
    terms = {rank: (f"the number of ranks={p.size}", *p.terms) for rank, p in places.items() if p is not None}
    for column in zip(*terms.values(), strict=False):
        if len(set(column)) > 1:
            ranks_of: dict[str, list[int]] = {}
            for rank, term in zip(terms, column, strict=True):
                ranks_of.setdefault(term.partition("=")[2], []).append(rank)
            told = "; ".join(f"{value} for rank(s) {format_ranks(ranks)}" for value, ranks in ranks_of.items())
            return f"{column[0].partition('=')[0]} must be the same for all ranks of a job, and is {told}"
    return ""


def _reject_job(rendezvous: Rendezvous, rank: int, places: Sequence[_HostReport | None]) -> None:
    """There is no job. Rank 0, which may host the service, goes when the others know why."""
    with suppress(PeerLostError, TimeoutError):
        if rank != 0:
            rendezvous.put(f"told/{rank}", b"")
            return
        until = time.monotonic() + _REJECT_SECONDS
        for peer, place in enumerate(places):
            if place is not None and peer != 0:
                _get_until(rendezvous, f"told/{peer}", until)


def _gather_reports(rendezvous: Rendezvous, own: _HostReport, until: float) -> list[_HostReport | None]:
    """Everybody's place, as rank 0 finds them; once two contradict each other, the rest is not waited for."""
    places: list[_HostReport | None] = [own]
    while len(places) < own.size:
        data = _get_until(rendezvous, f"place/{len(places)}", until)
        places.append(None if data is None else msgspec.msgpack.decode(data, type=_HostReport))
        if _find_contradiction(dict(enumerate(places))):
            until = min(until, time.monotonic() + _SLICE_SECONDS)
    return places


def _get_until(rendezvous: Rendezvous, key: str, until: float) -> bytes | None:
    """The value of a key, waited for, but not for longer than that."""
    left = until - time.monotonic()
    if left > 0:
        with suppress(TimeoutError):
            return rendezvous.get(key, left)
    return rendezvous.peek(key)


def _await_layout(rendezvous: Rendezvous, own: _HostReport, until: float) -> list[_HostReport | None]:
    """What rank 0 tells; nothing if it is too late."""
    zero: _HostReport | None = None
    while True:
        data = _get_until(rendezvous, "layout", min(until, time.monotonic() + _SLICE_SECONDS))
        if data is not None:
            return msgspec.msgpack.decode(data, type=list[_HostReport | None])
        if zero is not None and zero.machine == own.machine and _has_process_ended(zero.pid):
            raise PeerLostError("rank(s) 0 died during init()", ranks=(0,))
        if time.monotonic() >= until:
            return []
        if zero is None and (told := rendezvous.peek("place/0")) is not None:
            zero = msgspec.msgpack.decode(told, type=_HostReport)


def _has_process_ended(pid: int) -> bool:
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


def _missing_ranks(rendezvous: Rendezvous, size: int) -> list[int]:
    """Who has not come; rank 0 if it cannot be anybody else: it has come before, but does not tell what it found."""
    return [peer for peer in range(size) if rendezvous.peek(f"place/{peer}") is None] or [0]
