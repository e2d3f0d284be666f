"""Placement of keys' shards on servers. Pure: no I/O, and the same answers in the same order every time.

The unit of everything below a key is the *shard*: a contiguous range of the value's flat elements on one server.
Rounds, consistency, compression, queues, snapshots and transfers are per shard.

a. Rank 0 alone places keys, in the order of its init() calls, with one `ShardPlacer`. So workers need not
   agree on it.
b. A key's *home* server (`home_server`) keeps its declaration: name, shape, dtype, and the shards, which it tells the
   other workers. A worker needs nothing but the key to find it.
c. A key of fewer elements than the bound lies on one server: that with the least bytes so far (ties: the lowest).
d. A larger one is spread over all servers: as many shards for each, equal but for one unit, in turn, so that all
   servers are busy from its first shards on. Where shards differ, those with the least bytes so far take the larger
   ones.
e. No shard is larger than the slice, but for one unit. Borders are multiples of a unit: 32 elements, so that codes of 1
   and 2 bits of the shards put together are the codes of the whole; one row for row-sparse keys.
f. A key that must not be cut (layer-wise optimizers need norms of the whole) is one shard, whatever its size.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from reigen.kv.protocol import ShardRange

#: The largest shard, where the user does not say: servers on this host, on this host without processors to spare, and
#: elsewhere.
LOCAL_SLICE_BYTES, OVERSUBSCRIBED_SLICE_BYTES, NETWORK_SLICE_BYTES = 4 << 20, 12 << 20, 1 << 20
#: Elements between two borders: whole words of 1-bit codes.
ALIGNMENT_ELEMENTS = 32


def home_server(key_id: int, num_servers: int) -> int:
    """The server that keeps a key's declaration (step b)."""
    return key_id % num_servers


def choose_slice_bytes(
    asked: int | None, server_hosts: Sequence[str], num_processes: int, num_processors: int
) -> tuple[int, str]:
    """Return the largest shard, and the reason for it in words.

    An answer can begin when the first shard has come from every worker, and ends with a shard that goes back alone.
    So the time that a shard takes on the wire is added to every pushpull, however large that is. In shared memory that
    is little, and each shard has a price of its own: its messages have left the caches while values were copied. Where
    processes wait for processors and not for each other, there is nothing to overlap, and the price counts alone.
    ``num_processes`` are workers and servers of the job, ``num_processors`` those of this host.
    """
    if asked is not None:
        return asked, "as set"
    if not all(ipaddress.ip_address(host).is_loopback for host in server_hosts):
        return NETWORK_SLICE_BYTES, "servers can be reached from other hosts"
    reason = f"only this host can reach the servers: {num_processes} processes on {num_processors} processor(s)"
    return OVERSUBSCRIBED_SLICE_BYTES if num_processes > num_processors else LOCAL_SLICE_BYTES, reason


class ShardPlacer:
    """Places keys as they come (step a).

    Args:
        num_servers: at least 1.
        bound: a key of this many elements or more is spread over all servers.
        slice_bytes: the largest shard.

    Attributes:
        loads: bytes of values on each server.
    """

    def __init__(self, num_servers: int, bound: int, slice_bytes: int) -> None:
        self._bound = bound
        self._slice_bytes = slice_bytes
        self.loads = [0] * num_servers
        #: what each key adds to which server
        self._placed: dict[int, list[tuple[int, int]]] = {}

    def place(
        self, key_id: int, num_elements: int, itemsize: int, row_length: int = 1, whole: bool = False
    ) -> tuple[ShardRange, ...]:
        """Place a key, or place it anew; returns the shards, which cover the value in order without gaps.

        The value may have no elements; ``row_length`` is 1 for a dense one; a ``whole`` one must not be cut (step f).
        """
        self.forget(key_id)
        order = sorted(range(len(self.loads)), key=lambda server: (self.loads[server], server))
        unit = row_length if row_length > 1 else ALIGNMENT_ELEMENTS
        if num_elements < self._bound or whole:
            order = order[:1]
        sizes = [num_elements] if whole else self._cut(num_elements, itemsize, unit, len(order))
        shards, begin = [], 0
        for index, size in enumerate(sizes):
            shards.append(ShardRange(index, begin, begin + size, order[index % len(order)]))
            begin += size
        self.adopt(key_id, shards, itemsize)
        return tuple(shards)

    def adopt(self, key_id: int, shards: Sequence[ShardRange], itemsize: int) -> None:
        """Take into account a key that was placed before, by another process of this rank."""
        self.forget(key_id)
        self._placed[key_id] = [(shard.server, shard.num_elements * itemsize) for shard in shards]
        for server, num_bytes in self._placed[key_id]:
            self.loads[server] += num_bytes

    def forget(self, key_id: int) -> None:
        """Discount a key that is not there any more, or about to be placed elsewhere."""
        for server, num_bytes in self._placed.pop(key_id, ()):
            self.loads[server] -= num_bytes

    def _cut(self, num_elements: int, itemsize: int, unit: int, num_servers: int) -> list[int]:
        """Sizes of the shards (steps d, e); the first are the larger ones."""
        units = -(-num_elements // unit)
        units_in_shard = max(1, self._slice_bytes // (itemsize * unit))
        rows = -(-units // (units_in_shard * num_servers))
        num_shards = max(1, min(units, rows * num_servers))
        base, more = divmod(units, num_shards)
        sizes = [(base + (index < more)) * unit for index in range(num_shards)]
        sizes[-1] -= units * unit - num_elements
        return sizes
