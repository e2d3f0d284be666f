"""Reading of a training's state from the memory of a member, by newcomers on the same host.

a. All ranks exchange in which process their arrays lie, and where (`_StateAddress`). They stay as they are until (c).
b. Each receiver reads the memory of the source or, if that is on another host, of the first other member whose memory
   it may read: one copy, straight to where it belongs, by as many threads as it has processors, and no work for
   anybody else (`reigen.net.process_memory`).
c. All ranks exchange who has read everything. Who has not (there is no member on its host, the kernel does not let it,
   the member has died) needs the state in another way.

Where members' state is not changed for a while, (b) need not be waited for (`OverlappedTransfer`):

d. Instead of (c) all ranks exchange who may read. If all receivers may, the others go on with the next step, up to its
   update. Receivers take no samples of it; when they have read everything, they add to its sums, of nothing. So nobody
   has the sums, and updates the weights that are read, before that.
e. Before the update all ranks exchange digests: the source computes its own meanwhile, and says so if the state was
   changed since. Who does not have what the source had needs the state in another way, and everybody waits.

Members that can say how their state is built before anybody has asked offer it to whoever comes (`StateOffer`), so that
fewer exchanges are made while all wait:

f. What they say beforehand is where a description of the state lies in their memory. Receivers read that first, and
   then the state, without an answer of anybody.
g. Instead of (c) receivers that could not read it have a digest which nobody else has, and the state comes in another
   way. In (d) they say that they may read when they have read the description.

A receiver reads from one member, and not a part from each: the memory of a host is not faster for being of several
processes. What is read is weights and optimizer state, which all members have alike; what is not trained (statistics of
BatchNorm) comes from the source. Whether what was read is what the source holds is for digests to say.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen import context
from reigen.api.functions import allgather_object
from reigen.api.gradients.replica_check import fingerprint
from reigen.backends.buffer_list import rank_slice
from reigen.backends.shm.cross_memory import cut_ranges
from reigen.errors import CollectiveError, PeerLostError, format_ranks
from reigen.net.process_memory import AddressRange, can_read_process_memory, read_process_memory

_log = logging.getLogger(__name__)

_PROBE_BYTES = _DIGEST_BYTES = 16
#: Of no state; members that are neither source nor receiver have an empty digest.
_CHANGED, UNREAD = b"changed", b"unread"


@dataclass(frozen=True, slots=True)
class _StateMemory:
    """Memory of a rank's state.

    Attributes:
        pid: of its process.
        ranges: of its arrays.
    """

    pid: int
    ranges: tuple[AddressRange, ...]


@dataclass(frozen=True, slots=True)
class _StateAddress(_StateMemory):
    """The same, as ranks tell each other.

    Attributes:
        probe: bytes that lie at ``probe_address`` there, and nowhere else: who finds them has found that process.
        layout: see `read_from_source`.
    """

    probe_address: int
    probe: bytes
    layout: str


class StateDescription(msgspec.Struct, array_like=True, frozen=True):
    """Description of the state that a member offers.

    Attributes:
        layout: see `read_from_source`.
        ranges: of its arrays.
        details: of the training: what else a receiver needs to make arrays of its own.
    """

    layout: str
    ranges: tuple[AddressRange, ...]
    details: bytes


@dataclass(frozen=True, slots=True)
class OfferAddress:
    """Address of a description; see (f).

    Attributes:
        pid: see `_StateMemory`.
        probe_address: see `_StateAddress`.
        probe: see there.
        address: of the description.
        nbytes: its size.
        digest: of it: it may be gone.
    """

    pid: int
    probe_address: int
    probe: bytes
    address: int
    nbytes: int
    digest: bytes


class StateOffer:
    """Offer of a member's state, whose arrays stay where they are; it is kept as long as others may read it.

    Args:
        arrays: this rank's memory of the state, where the tensors themselves lie.
        layout: see `read_from_source`; not empty.
        details: see `StateDescription`.

    Attributes:
        address: for the others.
    """

    def __init__(self, arrays: Sequence[NDArray[np.uint8]], layout: str, details: bytes) -> None:
        self._probe = _make_probe()
        encoded = msgspec.msgpack.encode(StateDescription(layout, _ranges_of(arrays), details))
        self._description = np.frombuffer(encoded, np.uint8)
        probe, address = self._probe, self._description.ctypes.data
        digest = blake2b(encoded, digest_size=_DIGEST_BYTES).digest()
        self.address = OfferAddress(
            os.getpid(), probe.ctypes.data, probe.tobytes(), address, self._description.nbytes, digest
        )


class OfferedState:
    """State that a member of this host offers, as a receiver sees it.

    Args:
        pid: of the member's process.
        description: which was read there.
    """

    def __init__(self, pid: int, description: StateDescription) -> None:
        self.layout, self.details = description.layout, description.details
        self.memory = _StateMemory(pid, description.ranges)

    def read(self, arrays: Sequence[NDArray[np.uint8]]) -> bool:
        """Read everything into arrays of the same layout; return whether that was possible."""
        return _read(self.memory, _ranges_of(arrays), _num_processors())


def may_all_read(offers: Sequence[OfferAddress | None], receivers: frozenset[int]) -> bool:
    """Return whether there is a member on the host of each receiver that offers its state; the same on all ranks.

    Args:
        offers: of all ranks.
        receivers: ranks that get the state.
    """
    offering = {rank for rank, offer in enumerate(offers) if offer is not None and rank not in receivers}
    return all(not receivers.intersection(host) or offering.intersection(host) for host in context.current().hosts)


def find_offered_state(
    offers: Sequence[OfferAddress | None], source: int, receivers: frozenset[int]
) -> OfferedState | None:
    """Return the state that this rank may read: of the source, or the first other member; None: it may read none.

    Args:
        offers: of all ranks.
        source: rank whose state it is; all that do not receive it have the same.
        receivers: ranks that get it; one that is a step behind offers what it has, too.
    """
    others = (rank for rank in range(len(offers)) if rank != source and rank not in receivers)
    for rank in (source, *others):
        offer = offers[rank]
        if offer is not None and (found := _read_description(offer)) is not None:
            return OfferedState(offer.pid, found)
    return None


def _read_description(offer: OfferAddress) -> StateDescription | None:
    if not _is_readable(offer):
        return None
    into = np.empty(offer.nbytes, np.uint8)
    try:
        read_process_memory(offer.pid, [(offer.address, offer.nbytes)], [(into.ctypes.data, into.nbytes)])
    except OSError:
        return None
    encoded = into.tobytes()
    if blake2b(encoded, digest_size=_DIGEST_BYTES).digest() != offer.digest:
        return None
    return msgspec.msgpack.decode(encoded, type=StateDescription)


def read_from_source(
    arrays: Sequence[NDArray[np.uint8]],
    layout: str,
    source: int,
    receivers: frozenset[int],
    during_read: Callable[[], object] = lambda: None,
) -> bool:
    """Collective: receivers read the state of the source, from it or another member.

    Args:
        arrays: this rank's memory of the state, where the tensors themselves lie: read, or written if it receives.
        layout: describes the arrays: only between ranks with the same text bytes are copied. Empty: not at all.
        source: rank whose state it is; all that do not receive it have the same.
        receivers: ranks that get it.
        during_read: called on the source while the receivers read; it changes nothing.

    Returns:
        All receivers have it. If not, nobody should rely on what is in their arrays.
    """
    rank, probe = context.current().rank, _make_probe()
    address, may_read = _find_source(probe, arrays, layout, source, receivers)
    has_read = rank not in receivers or (may_read and _read(address, _ranges_of(arrays), _num_processors()))
    if rank == source:
        during_read()
    return all(allgather_object(has_read, "elastic.has_read"))


def digest_of(contents: Iterable[NDArray[np.uint8]], num_threads: int | None = None) -> bytes:
    """Return the digest of arrays, given as bytes, by their fingerprints, which take less time than hashes.

    Args:
        contents: the arrays. There are not many at a time: those of a GPU's tensors are copies.
        num_threads: that read them; None: as many as there are processors, where few others compute.
    """
    found, num_threads = blake2b(digest_size=_DIGEST_BYTES), num_threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads, "reigen-digest") as executor:
        pending: deque[Future[int]] = deque()
        for content in contents:
            pending.append(executor.submit(fingerprint, content))
            if len(pending) > num_threads:
                found.update(pending.popleft().result().to_bytes(8, "little", signed=True))
        for future in pending:
            found.update(future.result().to_bytes(8, "little", signed=True))
    return found.digest()


class OverlappedTransfer:
    """Transfer of a state whose receivers read it while the other members go on with a step, up to its update.

    Args:
        source: where this rank reads it.
        arrays: see `read_from_source`; of a receiver.
        contents: returns what the digest is of, on source and receivers.
        version: returns something else when the state has been changed.
        sends, receives: this rank is the source; or a receiver.
        message: of the source, to all ranks; None: there was none.
    """

    def __init__(
        self,
        source: _StateMemory | None,
        arrays: Sequence[NDArray[np.uint8]],
        contents: Callable[[], Iterable[NDArray[np.uint8]]],
        version: Callable[[], object],
        *,
        sends: bool,
        receives: bool,
        message: Any = None,
    ) -> None:
        self.receives, self.message = receives, message
        self._source, self._arrays, self._contents, self._version = source, arrays, contents, version
        self._begun_at: object = None
        self._digest: Future[bytes] | None = None
        if sends:
            self._begun_at = version()
            executor = ThreadPoolExecutor(1, "reigen-digest")
            self._digest = executor.submit(digest_of, contents(), 1)  # the program's own threads need the processors
            executor.shutdown(wait=False)

    def read(self) -> None:
        """Read everything, on a receiver, by half of the processors: the members compute."""
        self._digest = Future()
        self._digest.set_result(digest_of(self._contents()) if self._read_all() else UNREAD)

    def _read_all(self) -> bool:
        assert self._source is not None
        return _read(self._source, _ranges_of(self._arrays), max(1, _num_processors() // 2))

    def digest(self) -> bytes:
        """Return the digest of the state that this rank has sent, if it has not changed since, or read."""
        if self._digest is None:
            return b""
        digest = self._digest.result()
        return digest if self.receives or self._version() == self._begun_at else _CHANGED


def begin_overlapped_transfer(
    arrays: Sequence[NDArray[np.uint8]],
    layout: str,
    source: int,
    receivers: frozenset[int],
    contents: Callable[[], Iterable[NDArray[np.uint8]]],
    version: Callable[[], object],
) -> OverlappedTransfer | None:
    """Collective: begin a transfer as in (d); receivers call `OverlappedTransfer.read` next.

    Args:
        arrays: see `read_from_source`.
        layout: see there.
        source: see there.
        receivers: see there.
        contents: see `OverlappedTransfer`.
        version: see there.

    Returns:
        None: some receiver cannot read.
    """
    rank, probe = context.current().rank, _make_probe()
    address, may_read = _find_source(probe, arrays, layout, source, receivers)
    if not all(allgather_object(may_read, "elastic.may_read")):
        return None
    return OverlappedTransfer(address, arrays, contents, version, sends=rank == source, receives=rank in receivers)


def begin_offered_transfer(
    offered: OfferedState | None,
    arrays: Sequence[NDArray[np.uint8]],
    source: int,
    receivers: frozenset[int],
    contents: Callable[[], Iterable[NDArray[np.uint8]]],
    version: Callable[[], object],
    message: Any = None,
) -> OverlappedTransfer | None:
    """Collective: do what `begin_overlapped_transfer` does, where members offer their state.

    Args:
        offered: what a receiver reads; None: it cannot, or receives nothing.
        arrays: of a receiver, for that.
        source: see `read_from_source`.
        receivers: see there.
        contents: see `OverlappedTransfer`.
        version: see there.
        message: of the source, to all ranks.

    Returns:
        None: some receiver cannot read.
    """
    rank = context.current().rank
    receives = rank in receivers
    answers = allgather_object((offered is not None or not receives, message), "elastic.may_read")
    if not all(may_read for may_read, _ in answers):
        return None
    memory = None if offered is None else offered.memory
    is_source, message = rank == source, answers[source][1]
    return OverlappedTransfer(memory, arrays, contents, version, sends=is_source, receives=receives, message=message)


def _make_probe() -> NDArray[np.uint8]:
    """Return bytes that lie in this process alone; they are needed until all receivers have looked for them."""
    return np.frombuffer(os.urandom(_PROBE_BYTES), np.uint8)


@dataclass(frozen=True, slots=True)
class StateComparison:
    """Result of `compare_digests`.

    Attributes:
        wrong: ranks that have not received the source's state.
        digest: of that.
        message: of the source.
        is_unread: some of them could not read what was offered: the state has not been sent yet.
    """

    wrong: list[int]
    digest: bytes
    message: Any
    is_unread: bool


def compare_digests(own: bytes, source: int, message: Any = None) -> StateComparison:
    """Collective: compare the states of source and receivers.

    Args:
        own: digest of the state here; empty on ranks that are neither source nor receiver.
        source: rank whose state it is.
        message: of the source, to all ranks; None on others.
    """
    digests, messages = zip(*allgather_object((own, message), "elastic.digest"), strict=True)
    wrong = [rank for rank, digest in enumerate(digests) if digest not in (b"", digests[source])]
    return StateComparison(wrong, digests[source], messages[source], UNREAD in digests)


def explain_wrong_state(wrong: Sequence[int], source: int, num_transfers: int) -> CollectiveError:
    """Return the error of a rank whose state is wrong, which leaves the job, or of the others, which go on."""
    if (rank := context.current().rank) in wrong:
        return CollectiveError(
            f"rank {source} has sent its weights and optimizer state {num_transfers} times, and each time other "
            f"ones have come to rank {rank} on host {socket.gethostname()}: this process leaves the job. "
            "Leave the host out, and check its memory and network"
        )
    text = f"rank(s) {format_ranks(wrong)} have another state than rank {source}, which has sent them its own"
    return PeerLostError(text, ranks=tuple(wrong))


def _find_source(
    probe: NDArray[np.uint8],
    arrays: Sequence[NDArray[np.uint8]],
    layout: str,
    source: int,
    receivers: frozenset[int],
) -> tuple[_StateAddress, bool]:
    """Collective: return where this rank can read the source's state, and whether it may, if it has to."""
    own = _StateAddress(os.getpid(), _ranges_of(arrays), probe.ctypes.data, probe.tobytes(), layout)
    addresses: list[_StateAddress] = allgather_object(own, "elastic.addresses")
    if context.current().rank not in receivers:
        return addresses[source], True
    others = (address for rank, address in enumerate(addresses) if rank != source and rank not in receivers)
    if layout and addresses[source].layout == layout:
        for found in (addresses[source], *others):
            if found.layout == layout and _is_readable(found):
                return found, True
    return addresses[source], False


def _is_readable(source: _StateAddress | OfferAddress) -> bool:
    return can_read_process_memory(source.pid, source.probe_address, source.probe)


def _ranges_of(arrays: Sequence[NDArray[np.uint8]]) -> tuple[AddressRange, ...]:
    return tuple((array.ctypes.data, array.nbytes) for array in arrays)


def _num_processors() -> int:
    return len(os.sched_getaffinity(0))


def _read(source: _StateMemory, into: Sequence[AddressRange], num_threads: int) -> bool:
    """Read everything; return whether that was possible."""
    num_bytes = sum(nbytes for _, nbytes in into)

    def read_slice(index: int) -> None:
        begin, end = rank_slice(num_bytes, index, num_threads, 1)
        read_process_memory(source.pid, cut_ranges(source.ranges, begin, end), cut_ranges(into, begin, end))

    with ThreadPoolExecutor(num_threads, "reigen-state") as executor:
        futures = [executor.submit(read_slice, index) for index in range(num_threads)]
    problems = [problem for future in futures if (problem := future.exception()) is not None]
    for problem in problems:
        if not isinstance(problem, OSError):
            raise problem
    return not problems
