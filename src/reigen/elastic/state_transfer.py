"""Reading of a training's state from the memory of the member that is its source, by newcomers on the same host.

a. All ranks exchange in which process their arrays lie, and where (`_StateAddress`). The source's stay as they are
   until (c).
b. Each receiver that may read the source's memory does so: one copy, straight to where it belongs, by as many threads
   as it has processors, and no work for anybody else (`reigen.net.process_memory`).
c. All ranks exchange who has read everything. Who has not (it is on another host, the kernel does not let it, the
   source has died) needs the state in another way.

There is one source, and not a part from each member: members may differ in what is not trained (statistics of
BatchNorm), and the memory of a host is not faster for being of several processes. Whether what was read is what the
source holds is for digests to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reigen import context
from reigen.api.functions import allgather_object
from reigen.backends.buffer_list import rank_slice
from reigen.backends.shm.cross_memory import cut_ranges
from reigen.net.process_memory import AddressRange, can_read_process_memory, read_process_memory

_PROBE_BYTES = 16


@dataclass(frozen=True, slots=True)
class _StateAddress:
    """Address of a rank's state.

    Attributes:
        pid: of its process.
        probe: bytes that lie at ``probe_address`` there, and nowhere else: who finds them has found that process.
        layout: see `read_from_source`.
        ranges: of its arrays.
    """

    pid: int
    probe_address: int
    probe: bytes
    layout: str
    ranges: tuple[AddressRange, ...]


def read_from_source(
    arrays: Sequence[NDArray[np.uint8]],
    layout: str,
    source: int,
    receivers: frozenset[int],
    during_read: Callable[[], object] = lambda: None,
) -> bool:
    """Collective: receivers read the state of the source.

    Args:
        arrays: this rank's memory of the state, where the tensors themselves lie: read, or written if it receives.
        layout: describes the arrays: only between ranks with the same text bytes are copied. Empty: not at all.
        source: rank whose state it is.
        receivers: ranks that get it.
        during_read: called on the source while the others read; it changes nothing.

    Returns:
        All receivers have it. If not, nobody should rely on what is in their arrays.
    """
    rank = context.current().rank
    probe = np.frombuffer(os.urandom(_PROBE_BYTES), np.uint8)
    ranges = tuple((array.ctypes.data, array.nbytes) for array in arrays)
    address = _StateAddress(os.getpid(), probe.ctypes.data, probe.tobytes(), layout, ranges)
    addresses: list[_StateAddress] = allgather_object(address, "elastic.addresses")
    has_read = rank not in receivers
    if not has_read and layout and addresses[source].layout == layout and _is_readable(addresses[source]):
        has_read = _read(addresses[source], ranges)
    if rank == source:
        during_read()
    return all(allgather_object(has_read, "elastic.has_read"))


def _is_readable(source: _StateAddress) -> bool:
    return can_read_process_memory(source.pid, source.probe_address, source.probe)


def _read(source: _StateAddress, into: Sequence[AddressRange]) -> bool:
    """Read everything; return whether that was possible."""
    num_bytes, num_threads = sum(nbytes for _, nbytes in into), len(os.sched_getaffinity(0))

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
