"""Discovery of the ranks that share a host, by the ranks themselves, under any launcher.

Ranks share a host if they can share memory: one kernel and one process namespace. Two containers of one computer are
two hosts. A launcher's local ranks are not used, since it may count otherwise.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from reigen.cluster.local_peers import init_timeout_error, process_namespace_id
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError, PeerLostError, format_ranks
from reigen.net.event_loop import wait_ready

#: Seconds between looks whether rank 0 still lives.
_SLICE_SECONDS = 0.2
#: Seconds that rank 0 waits for the others to read why there is no job.
_REJECT_SECONDS = 5.0
_MAX_HOSTNAME = 255


class _HostReport(msgspec.Struct, array_like=True, frozen=True):
    """Report of a rank: its host, and its settings that must be the same for all. Alike however often it joins."""

    host_id: str
    hostname: str
    pid: int
    size: int
    terms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Ranks of a job by host, the same on every rank but for ``rank``.

    Attributes:
        rank: this one.
        hosts: the ranks of each host, ascending; hosts by their lowest rank.
        hostnames: of every rank's host, by rank.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    hostnames: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hostnames)

    @property
    def local(self) -> tuple[int, ...]:
        """Ranks of this rank's host, itself among them."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    def topology(self) -> Topology:
        """Return this rank's numbers, as Horovod counts them: see `Topology`."""
        local = self.local
        local_rank = local.index(self.rank)
        peers = [ranks for ranks in self.hosts if len(ranks) > local_rank]
        return Topology(self.rank, self.size, local_rank, len(local), peers.index(local), len(peers))


def host_identity(host_id: str = "") -> tuple[str, str]:
    """Return this host's unique identity, and its name.

    ``host_id`` (REIGEN_HOST_ID) makes several hosts of one: ranks with different ones do not share memory.
    """
    name = socket.gethostname()
    if not host_id:
        return process_namespace_id(), name[:_MAX_HOSTNAME]
    return f"{process_namespace_id()} {host_id}", f"{name}/{host_id}"[:_MAX_HOSTNAME]


def make_host_layout(rank: int, host_ids: tuple[str, ...], hostnames: tuple[str, ...]) -> HostLayout:
    """Group ranks by their hosts' identities, given by rank."""
    ranks_of: dict[str, list[int]] = {}
    for number, host_id in enumerate(host_ids):
        ranks_of.setdefault(host_id, []).append(number)
    return HostLayout(rank, tuple(tuple(ranks) for ranks in ranks_of.values()), hostnames)


def discover_hosts(
    rendezvous: Rendezvous, rank: int, size: int, timeout_seconds: float, host_id: str = "", terms: Sequence[str] = ()
) -> HostLayout:
    """Find out which ranks share a host. Collective over all ranks of the job.

    Rank 0 collects all reports and sends them to all: two messages a rank, however many there are.

    Args:
        rendezvous: a `PrefixRendezvous` that only these processes have used for this.
        rank: this rank.
        size: the number of ranks.
        timeout_seconds: how long to wait for the last rank.
        host_id: see `host_identity`.
        terms: ``NAME=value``, settings that must be the same for all ranks, with the same names in this order.

    Raises:
        ConfigError: ``size`` or ``terms`` are not the same on all ranks; describes the difference on each of them.
        DeadlineError: ranks did not come; names them.
        PeerLostError: the service has gone, or rank 0, of this host, died.
    """
    until = time.monotonic() + timeout_seconds
    own = _HostReport(*host_identity(host_id), os.getpid(), size, tuple(terms))
    rendezvous.put(f"place/{rank}", msgspec.msgpack.encode(own))
    reports = _gather_reports(rendezvous, own, until) if rank == 0 else _await_layout(rendezvous, own, until)
    contradiction = _find_contradiction({**dict(enumerate(reports)), rank: own})
    if rank == 0 and (contradiction or None not in reports):
        rendezvous.put("layout", msgspec.msgpack.encode(reports))
    if contradiction:
        _reject_job(rendezvous, rank, reports)
        raise ConfigError(contradiction)
    found = [report for report in reports if report is not None]
    if len(found) < size:
        missing = [peer for peer, report in enumerate(reports) if report is None]
        missing = missing or [peer for peer in range(size) if rendezvous.peek(f"place/{peer}") is None]
        missing = missing or [0]  # it has come before, but has not sent the list
        _reject_job(rendezvous, rank, reports)
        raise init_timeout_error(missing, timeout_seconds)
    return make_host_layout(rank, tuple(each.host_id for each in found), tuple(each.hostname for each in found))


def _find_contradiction(reports: Mapping[int, _HostReport | None]) -> str:
    """Describe the first setting that is not the same for all ranks; empty if they agree."""
    terms = {rank: (f"the number of ranks={p.size}", *p.terms) for rank, p in reports.items() if p is not None}
    for column in zip(*terms.values(), strict=False):
        if len(set(column)) > 1:
            ranks_of: dict[str, list[int]] = {}
            for rank, term in zip(terms, column, strict=True):
                ranks_of.setdefault(term.partition("=")[2], []).append(rank)
            values = "; ".join(f"{value} for rank(s) {format_ranks(ranks)}" for value, ranks in ranks_of.items())
            return f"{column[0].partition('=')[0]} must be the same for all ranks of a job, and is {values}"
    return ""


def _reject_job(rendezvous: Rendezvous, rank: int, reports: Sequence[_HostReport | None]) -> None:
    """Give up. Rank 0, which may host the service, goes when the others know why."""
    with suppress(PeerLostError, TimeoutError):
        if rank != 0:
            rendezvous.put(f"told/{rank}", b"")
            return
        until = time.monotonic() + _REJECT_SECONDS
        for peer, report in enumerate(reports):
            if report is not None and peer != 0:
                _get_until(rendezvous, f"told/{peer}", until)


def _gather_reports(rendezvous: Rendezvous, own: _HostReport, until: float) -> list[_HostReport | None]:
    """Gather all reports on rank 0; once two contradict each other, the rest is not waited for."""
    reports: list[_HostReport | None] = [own]
    while len(reports) < own.size:
        data = _get_until(rendezvous, f"place/{len(reports)}", until)
        reports.append(None if data is None else msgspec.msgpack.decode(data, type=_HostReport))
        if _find_contradiction(dict(enumerate(reports))):
            until = min(until, time.monotonic() + _SLICE_SECONDS)
    return reports


def _get_until(rendezvous: Rendezvous, key: str, until: float) -> bytes | None:
    """Wait for the value of a key, but not for longer than that."""
    remaining = until - time.monotonic()
    if remaining > 0:
        with suppress(TimeoutError):
            return rendezvous.get(key, remaining)
    return rendezvous.peek(key)


def _await_layout(rendezvous: Rendezvous, own: _HostReport, until: float) -> list[_HostReport | None]:
    """Wait for rank 0's list of reports; empty if it is too late."""
    zero: _HostReport | None = None
    while True:
        data = _get_until(rendezvous, "layout", min(until, time.monotonic() + _SLICE_SECONDS))
        if data is not None:
            return msgspec.msgpack.decode(data, type=list[_HostReport | None])
        if zero is not None and zero.host_id == own.host_id and _has_process_ended(zero.pid):
            raise PeerLostError("rank(s) 0 died during init()", ranks=(0,))
        if time.monotonic() >= until:
            return []
        if zero is None and (report := rendezvous.peek("place/0")) is not None:
            zero = msgspec.msgpack.decode(report, type=_HostReport)


def _has_process_ended(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return wait_ready(fd)  # also where its end has not been waited for
    finally:
        os.close(fd)
