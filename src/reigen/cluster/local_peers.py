"""Ranks of this host: all segments mapped here, and which of the ranks still live.

Each rank creates its segment, exchanges (process id, descriptor, host id) with the others at the rendezvous, maps all
segments and opens a pidfd for each process. A pidfd becomes readable when its process ends, however it ends, and cannot
be confused by a process id that is used again. When they have mapped everything they exchange a hash of that, so that
none leaves before all have opened what they need, and none goes on with the segment of a try that has been given up.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.cluster.membership.abort_message import AbortMessage, error_from_abort, left_error, make_abort_message
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.errors import CollectiveError, DeadlineError, PeerLostError, SharedMemoryError, format_ranks
from reigen.net.futex import FutexWord, memory_fences
from reigen.net.shm_segment import ShmSegment, round_up
from reigen.resources.limits import explain_limit
from reigen.resources.oom import OomMonitor

_HEADER_BYTES = 4096
_STATUS, _REASON_LENGTH, _REASON = 0, 64, 128
#: During init(): seconds between looks whether a rank has died, and seconds to wait for a rank at least.
_SLICE_SECONDS, _LOOK_SECONDS = 0.2, 0.05
#: Seconds that a rank that is let down waits for the end of a rank that has left.
LINGER_SECONDS = 0.7
#: Seconds between looks whether that is over.
LINGER_SLICE_SECONDS = 0.01


class RankStatus(IntEnum):
    """Status of a rank, in the first word of its segment."""

    RUNNING = 0
    LEFT = 1
    ABORTED = 2


class _SegmentInfo(msgspec.Struct, array_like=True, frozen=True):
    """Place of a rank's segment, or the reason why it has none."""

    pid: int
    fd: int
    inode: int
    host_id: str
    problem: str = ""


def process_namespace_id() -> str:
    """Return an id that processes share if they can open each other's /proc/PID/fd: one kernel, one namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class MappedRange:
    """Range of every rank's segment: for each rank a uint8 array, all of one length."""

    arrays: tuple[NDArray[np.uint8], ...]


class LocalSubset:
    """Some of the ranks of this host: ``members`` by their numbers in ``peers``, ascending; this rank is one."""

    def __init__(self, peers: LocalPeers, members: Sequence[int]) -> None:
        self._local_peers = peers
        self._members = tuple(members)
        self.ranks = tuple(peers.ranks[member] for member in members)
        self.rank, self.size = self._members.index(peers.rank), len(members)
        self.pids = tuple(peers.pids[member] for member in members)
        self.reserve, self.shrink = peers.reserve, peers.shrink
        self.abort, self.wait_for_death = peers.abort, peers.wait_for_death

    @property
    def reserved_bytes(self) -> int:
        return self._local_peers.reserved_bytes

    def map(self, offsets: Sequence[int], nbytes: int) -> MappedRange:
        return self._local_peers.map(offsets, nbytes, self._members)

    def map_one(self, member: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self._local_peers.map_one(self._members[member], offset, nbytes)

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        return self._local_peers.failure([self._members[member] for member in needed])

    def subset(self, members: Sequence[int]) -> LocalSubset:
        return LocalSubset(self._local_peers, [self._members[member] for member in members])


class LocalPeers:
    """Segments and processes of all ranks of this host, numbered from 0 in the order of the job's ranks, `ranks`.

    Args:
        ranks: the ranks of the job that are on this host, ascending.
        rank: this rank's number among them.
        segments: in that order, as the following.
        pids: process ids.
        pidfds: a descriptor for each process.
        header: the first range of every segment.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        segments: Sequence[ShmSegment],
        pids: Sequence[int],
        pidfds: Sequence[int],
        header: MappedRange,
    ) -> None:
        self.rank = rank
        self.size = len(segments)
        self.ranks = tuple(ranks)
        self.pids = tuple(pids)
        self._segments = list(segments)
        self._pidfds = list(pidfds)
        #: member whose process has ended when a descriptor becomes readable
        self._members = {fd: member for member, fd in enumerate(pidfds) if member != rank}
        #: for errors: the name of this host, where the job has several
        self._where = ""
        self._oom = OomMonitor()
        self._poll = select.poll()
        for fd in self._members:
            self._poll.register(fd, select.POLLIN)
        self._headers = header.arrays
        self._publish, _ = memory_fences()
        self._status = [FutexWord(array, _STATUS) for array in header.arrays]

    def reserve(self, nbytes: int, what: str) -> None:
        """Give this rank's own segment ``nbytes`` more; the first half of a collective growth."""
        self._segments[self.rank].grow(nbytes, what)

    def map(self, offsets: Sequence[int], nbytes: int, members: Sequence[int] | None = None) -> MappedRange:
        """Map the memory that every one of ``members`` (all) has reserved, each at its own offset; the second half."""
        members = range(self.size) if members is None else members
        return MappedRange(tuple(self.map_one(each, at, nbytes) for each, at in zip(members, offsets, strict=True)))

    def map_one(self, member: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Map the memory that one member has reserved; every member does."""
        return self._segments[member].map(offset, nbytes)

    def subset(self, members: Sequence[int]) -> LocalSubset:
        """Return some of them, this rank among them, numbered anew."""
        return LocalSubset(self, members)

    @property
    def reserved_bytes(self) -> int:
        """Size of this rank's own segment."""
        return self._segments[self.rank].size

    def shrink(self, nbytes: int) -> None:
        """Give back memory that was reserved beyond ``nbytes`` and not mapped by any rank."""
        self._segments[self.rank].shrink(nbytes)

    def status(self, rank: int) -> RankStatus:
        """Return the status of a rank, by its number here."""
        return RankStatus(self._status[rank].load())

    def name_host(self, host: str) -> None:
        """Set the name of this host in errors, where a job has several."""
        self._where = f" (host {host})"

    def leave(self) -> None:
        """Report to the others that this rank is leaving in good order."""
        if self.status(self.rank) is RankStatus.RUNNING:
            self._status[self.rank].store(RankStatus.LEFT)

    def abort(self, error: CollectiveError) -> None:
        """Report to the others that this rank cannot go on, and why; the first call counts."""
        if self.status(self.rank) is not RankStatus.RUNNING:
            return
        data = msgspec.msgpack.encode(make_abort_message(error, self.ranks[self.rank]))
        header = self._headers[self.rank]
        header[_REASON : _REASON + len(data)] = np.frombuffer(data, np.uint8)
        FutexWord(header, _REASON_LENGTH).store(len(data))
        self._publish()
        self._status[self.rank].store(RankStatus.ABORTED)

    def dead(self) -> tuple[int, ...]:
        """Return members whose processes have ended, in ascending order. Costs one poll(2)."""
        return tuple(sorted(self._members[fd] for fd, _ in self._poll.poll(0)))

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Wait a moment for the ends of lost ranks that are on this host, unless it is ``over``.

        A rank that fails leaves in good order while its interpreter winds up. If those that it lets down were faster to
        end, the launcher would take one of them for the first failure. Its status may not be LEFT yet: the coordinator
        got its departure before.
        """
        until = time.monotonic() + LINGER_SECONDS
        members = {self.ranks.index(rank) for rank in ranks if rank in self.ranks} - {self.rank}
        poll = select.poll()
        for member in members:
            poll.register(self._pidfds[member], select.POLLIN)
        while members and not over() and (rest := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(min(rest, LINGER_SLICE_SECONDS) * 1000):
                poll.unregister(fd)
                members.discard(self._members[fd])

    def wait_for_death(self, timeout_seconds: float) -> None:
        """Wait until some process has ended, or for the time given."""
        self._poll.poll(timeout_seconds * 1000)

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Return the reason why the ranks ``needed`` will never answer, or None while they may.

        A rank that died without a report is the cause of the others' reactions, so it is named first. If this rank
        itself has given up (`abort`), that ends its own waiting, too.
        """
        dead = self.dead()  # before the statuses, so that those of the dead are their last
        statuses = {member: word.load() for member, word in enumerate(self._status)}
        died = [self.ranks[member] for member in dead if member in needed and statuses[member] == RankStatus.RUNNING]
        if died:
            why = self._oom.probable_cause()
            text = f"rank(s) {format_ranks(died)}{self._where} died while others wait for them{why and '; '}{why}"
            return PeerLostError(text, ranks=died)
        for member, status in statuses.items():
            if status == RankStatus.ABORTED:
                return self._abort_error(member)
        departed = (member for member in sorted(needed) if statuses[member] == RankStatus.LEFT and member != self.rank)
        left = [self.ranks[member] for member in departed]
        if left:
            return left_error(f"{format_ranks(left)}{self._where}", left)
        return None

    def _abort_error(self, member: int) -> CollectiveError:
        header, rank = self._headers[member], self.ranks[member]
        length = min(_HEADER_BYTES - _REASON, FutexWord(header, _REASON_LENGTH).load())
        try:
            abort = msgspec.msgpack.decode(header[_REASON : _REASON + length].tobytes(), type=AbortMessage)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return CollectiveError(f"rank {rank} gave up", ranks=(rank,))
        return error_from_abort(abort, "" if member == self.rank else f"rank {rank}")

    def close(self) -> None:
        """Close all descriptors; views of the memory stay valid."""
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()
        for segment in self._segments:
            segment.close()


#: Ranks of this host as a backend uses them.
LocalGroup = LocalPeers | LocalSubset


def map_local_peers(
    rendezvous: Rendezvous,
    rank: int,
    ranks: Sequence[int],
    generation: int,
    timeout_seconds: float,
    parts: Sequence[int] = (),
) -> tuple[LocalPeers, list[MappedRange]]:
    """Find the other ranks of this host, and map their segments. Collective.

    Args:
        rendezvous: of the job.
        rank: this rank.
        ranks: the ranks of the job that are on this host, ascending; the same on all of them.
        generation: how often this process has been in this job before; the same on all ranks.
        timeout_seconds: how long to wait for the slowest rank.
        parts: sizes, in bytes, of zeroed ranges that every segment has from the start; the same on all ranks.

    Returns:
        The ranks of this host, and every part mapped: for each rank a uint8 array of its size.

    Raises:
        DeadlineError: ranks did not come; names them.
        PeerLostError: a rank died in between.
        CollectiveError: ranks run on different hosts or in different process namespaces.
        SharedMemoryError: some rank has no memory for the parts; raised on all.
    """
    until = time.monotonic() + timeout_seconds
    own = ShmSegment.create(f"reigen-{rank}")
    sizes = [round_up(nbytes) for nbytes in (_HEADER_BYTES, *parts)]
    segments: list[ShmSegment] = []
    pidfds: list[int] = []
    try:
        own_info = _reserve_segment(rendezvous, f"{generation}/card/{rank}", own, sum(sizes), len(ranks))
        waiting = _WaitLimits(timeout_seconds, until, rank, ranks, pidfds)
        found = _exchange(rendezvous, f"{generation}/card", msgspec.msgpack.encode(own_info), waiting)
        infos = [msgspec.msgpack.decode(data, type=_SegmentInfo) for data in found]
        for peer, info in zip(ranks, infos, strict=True):  # all before the first is opened: the reason comes first
            _check_segment_info(peer, own_info, info)
        pidfds.extend(_open_pidfd(peer, info.pid) for peer, info in zip(ranks, infos, strict=True))
        try:
            segments.extend(
                own if peer == rank else _open_segment(peer, info) for peer, info in zip(ranks, infos, strict=True)
            )
        except PeerLostError as error:  # it may have given up because another had died
            raise waiting.loss() or error from None
        arrays = [segment.map(0, sum(sizes)) for segment in segments]
        view = hashlib.sha256(b"".join(found)).digest()
        _check_mappings(ranks, view, _exchange(rendezvous, f"{generation}/mapped", view, waiting))
    except BaseException:
        for segment in (own, *segments):
            segment.close()
        for fd in pidfds:
            os.close(fd)
        raise
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    header, *mapped = (
        MappedRange(tuple(array[offset : offset + nbytes] for array in arrays))
        for offset, nbytes in zip(offsets, sizes, strict=True)
    )
    pids = [info.pid for info in infos]
    return LocalPeers(ranks, ranks.index(rank), segments, pids, pidfds, header), mapped


@dataclass(frozen=True)
class _WaitLimits:
    """Time limit of waiting for the others, and pidfds of their processes, as soon as they are known."""

    timeout_seconds: float
    until: float
    rank: int
    ranks: Sequence[int]
    pidfds: list[int]

    def loss(self) -> PeerLostError | None:
        """Return the error to raise when the process of some rank has ended."""
        poll = select.poll()
        for fd in self.pidfds:
            poll.register(fd, select.POLLIN)
        dead = sorted(self.ranks[self.pidfds.index(fd)] for fd, _ in poll.poll(0))
        return PeerLostError(f"rank(s) {format_ranks(dead)} died during init()", ranks=dead) if dead else None


def _reserve_segment(rendezvous: Rendezvous, key: str, own: ShmSegment, nbytes: int, size: int) -> _SegmentInfo:
    """Make room in this rank's segment, and return its place; where there is none, publish why."""
    problem: SharedMemoryError | None = None
    try:
        own.grow(nbytes, "staging and control messages", sharers=size)
    except SharedMemoryError as error:
        problem = error
    info = _SegmentInfo(
        os.getpid(), own.fd, own.inode, process_namespace_id(), "" if problem is None else problem.reason
    )
    if problem is not None:
        rendezvous.put(key, msgspec.msgpack.encode(info))
        raise problem
    return info


def _exchange(rendezvous: Rendezvous, prefix: str, own: bytes, waiting: _WaitLimits) -> list[bytes]:
    """Give the others this rank's value; return the values of ``prefix/RANK``, in the order of the ranks."""
    names, place = list(map(str, waiting.ranks)), waiting.ranks.index(waiting.rank)
    loss: PeerLostError | None = None
    while True:
        try:
            left = waiting.until - time.monotonic()
            return rendezvous.exchange(prefix, names, place, own, max(_LOOK_SECONDS, min(_SLICE_SECONDS, left)))
        except TimeoutError:
            if loss is not None:
                raise loss from None
            loss = waiting.loss()  # all may have come before it ended: look once more
        if time.monotonic() >= waiting.until:
            missing = [peer for peer in waiting.ranks if rendezvous.peek(f"{prefix}/{peer}") is None]
            if missing:
                raise init_timeout_error(missing, waiting.timeout_seconds)


def init_timeout_error(ranks: Sequence[int], timeout_seconds: float) -> DeadlineError:
    """Make the error of ranks that have not come in time."""
    return DeadlineError(
        f"rank(s) {format_ranks(ranks)} did not call init() within {timeout_seconds:g} s "
        "(REIGEN_START_TIMEOUT sets how long to wait)",
        ranks=ranks,
    )


def _check_segment_info(peer: int, own: _SegmentInfo, info: _SegmentInfo) -> None:
    if info.problem:
        raise SharedMemoryError(f"{info.problem} (told by rank {peer})", ranks=(peer,))
    if info.host_id != own.host_id:
        raise CollectiveError(
            "the ranks do not share one host and one process namespace, which shared memory needs",
            ranks=(peer,),
            details={peer: info.host_id},
        )


def _check_mappings(ranks: Sequence[int], own: bytes, views: Sequence[bytes]) -> None:
    """Check that all have mapped the same segments: a rank may have given up and come again in between."""
    differing = [peer for peer, view in zip(ranks, views, strict=True) if view != own]
    if differing:
        raise PeerLostError(
            f"rank(s) {format_ranks(differing)} gave up during init() and tried again while this one met them; "
            "call init() again",
            ranks=differing,
        )


def _open_segment(peer: int, info: _SegmentInfo) -> ShmSegment:
    try:
        segment = ShmSegment.open(info.pid, info.fd)
    except PermissionError as error:
        raise CollectiveError(
            f"may not open the shared memory of rank {peer} (process {info.pid}): "
            "all ranks of a host must run as one user",
            ranks=(peer,),
        ) from error
    except OSError as error:
        raise _descriptor_limit_error(error) or _peer_lost_error(peer, info.pid) from error
    if segment.inode != info.inode:  # its descriptor is another file's by now
        segment.close()
        raise _peer_lost_error(peer, info.pid)
    return segment


def _peer_lost_error(peer: int, pid: int) -> PeerLostError:
    return PeerLostError(f"rank {peer} (process {pid}) died or gave up during init()", ranks=(peer,))


def _open_pidfd(peer: int, pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise _descriptor_limit_error(error) or _peer_lost_error(peer, pid) from error


def _descriptor_limit_error(error: OSError) -> OSError | None:
    """Return the error of this process, not of the other one, if it has no descriptor left."""
    return explain_limit(error) if error.errno in {errno.EMFILE, errno.ENFILE} else None
