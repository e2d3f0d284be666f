"""Stages of one allreduce on a cluster: their least lengths, and their loads.

Chunks, rows, messages and the choice of an algorithm are those of the backends (`reigen.backends.tcp.algorithm`,
`reigen.backends.hierarchical`): the same functions are called here. All ranks go through the stages together, at the
pace of the slowest, because every rank needs data of every other.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from reigen.backends.buffer_list import rank_slice
from reigen.backends.hierarchical.cross_groups import SMALL_BYTES
from reigen.backends.tcp.algorithm import choose_algorithm, cut_chunks, make_rows, rows_ahead
from reigen.planner.costs import Costs
from reigen.planner.layout import HostKind, JobLayout, device_link, receive_link, send_link
from reigen.types import DTYPES

_HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class CollectiveStage:
    """Part of a collective.

    Attributes:
        name: for the picture.
        seconds: at least; of latencies, and of one rank's thread.
        load: of resources.
        messages: of data that all ranks send in it.
        sent: bytes that leave a host, of the kind that sends most, with headers.
    """

    name: str
    seconds: float
    load: Mapping[str, float] = field(default_factory=dict)
    messages: int = 0
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class TcpPlan:
    """Allreduce of one group of ranks between hosts, as one of them sees it.

    Attributes:
        algorithm, reason: that the backend chooses.
        sent: bytes that a rank sends, and as many that it receives.
        messages: that it sends.
        reduced: bytes that it reads to add them up.
        hops: on an element's longest way, but for those for which the bytes leave time.
        rounds: hops that waiting for what others send makes of it; at least ``hops``.
    """

    algorithm: str
    reason: str
    sent: float
    messages: int
    reduced: float
    hops: int
    rounds: int

    def waiting_seconds(self, hop_seconds: float, bandwidth: float) -> float:
        """Return the least seconds of its bytes: each message waits for one of another rank.

        Around a ring the first chunk that comes is what a rank sends next, while the rest of its slice still leaves.

        Args:
            hop_seconds: length of a message's way.
            bandwidth: of a rank's connection, in bytes per second.
        """
        waits = self.rounds - self.hops
        if self.algorithm != "ring" or waits == 0:
            return waits * hop_seconds
        slice_seconds, chunk_seconds = self.sent / self.rounds / bandwidth, self.sent / self.messages / bandwidth
        return waits * (hop_seconds + chunk_seconds) + slice_seconds


@functools.lru_cache(maxsize=4096)
def plan_tcp(count: int, itemsize: int, size: int, requested: str) -> TcpPlan:
    """Plan an allreduce of ``count`` elements among ``size`` ranks."""
    nbytes = count * itemsize
    algorithm, reason = choose_algorithm(nbytes, size, requested)
    if algorithm == "latency":
        chunks = len(cut_chunks(0, count, itemsize, least_bytes=1 << 18, divisor=2))
        return TcpPlan(algorithm, reason, (size - 1) * nbytes, (size - 1) * chunks, size * nbytes, 1, 1)
    share = 2 * (size - 1) / size * nbytes
    if algorithm == "ring":
        low, high = rank_slice(count, 0, size, itemsize)
        messages, steps = len(cut_chunks(low, high, itemsize)), 2 * (size - 1)
        return TcpPlan(algorithm, reason, share, steps * messages, 2 * (size - 1) * nbytes / size, 1, steps)
    rows = make_rows(count, itemsize, size)
    messages = 2 * (size - 1) * len(rows)
    return TcpPlan(algorithm, reason, share, messages, nbytes, 2, max(2, _count_rounds(rows, itemsize)))


def plan_devices(nbytes: int, num_hosts: int, hop_seconds: float, bandwidth: float) -> TcpPlan:
    """Plan an allreduce of GPUs between hosts: NCCL takes the faster of a ring and two binary trees.

    Of NCCL nothing is simulated but bytes and hops: Jeaugey, "Massively Scale Your Deep Learning Training with NCCL
    2.4", 2019 (NVIDIA's developer blog). NCCL before 2.4 has rings alone.
    """
    around, height = 2 * (num_hosts - 1), (num_hosts - 1).bit_length()
    ring_bytes, tree_bytes = around / num_hosts * nbytes, 2 * (nbytes if num_hosts > 2 else nbytes / 2)
    ring, tree = around * hop_seconds + ring_bytes / bandwidth, 2 * height * hop_seconds + tree_bytes / bandwidth
    if ring <= tree:
        return TcpPlan("ring", f"NCCL, {around} hops", ring_bytes, around, 0, around, around)
    return TcpPlan("tree", f"NCCL, {2 * height} hops", tree_bytes, 4, 0, 2 * height, 2 * height)


def _count_rounds(rows: tuple[tuple[tuple[int, int], ...], ...], itemsize: int) -> int:
    """Count the hops of the direct algorithm if data took no time: contributions are only so far ahead of sums."""
    leads = rows_ahead(rows, itemsize)
    complete = [0] * len(rows)
    left_after = -1  # the row whose completion lets contributions leave
    for row in range(len(rows)):
        while leads[left_after + 1] <= row:
            left_after += 1
        leaves = complete[left_after] if left_after >= 0 else 0
        complete[row] = max(complete[row - 1] if row else 0, leaves + 1)
    return complete[-1] + 1 if rows else 0


class CollectiveModel:
    """Stages of collectives of one job.

    Args:
        layout: where its ranks are.
        costs: of messages and bytes.
        algorithm: of the TCP backend, ``auto`` to choose.
        shares_memory: ranks of a host share its memory (or their devices' links).
    """

    def __init__(self, layout: JobLayout, costs: Costs, algorithm: str, *, shares_memory: bool) -> None:
        self._layout, self._costs, self._algorithm = layout, costs, algorithm
        self.shares_memory = shares_memory and max(kind.host.num_ranks for kind in layout.training) > 1
        #: ranks of each host that exchange with other hosts
        self._groups = min(kind.host.num_ranks for kind in layout.training) if self.shares_memory else 1
        self._on_devices = all(kind.host.device_bandwidth for kind in layout.training)
        #: the largest allreduce between hosts so far, for the report
        self.largest_plan: TcpPlan | None = None

    @property
    def hop_seconds(self) -> float:
        """Length of a message's way to another host."""
        if self._on_devices:
            return self._layout.latency + self._costs.device_hop_seconds
        return self._layout.latency + self._costs.wakeup_seconds

    def allreduce(self, count: int, dtype: str) -> list[CollectiveStage]:
        """Return the stages of an allreduce of so many elements."""
        layout = self._layout
        if layout.num_ranks == 1:
            return []
        if not self.shares_memory and layout.num_hosts < layout.num_ranks:
            return self._flat_ring(count, dtype)
        stages = []
        if self.shares_memory:
            stages.append(self._local("reduce in each host", count, dtype, self._costs.shm_seconds_per_byte))
        if layout.num_hosts > 1:
            stages += self._between(count, dtype)
        if self.shares_memory:
            stages.append(self._local("copy in each host", count, dtype, self._costs.copy_seconds_per_byte))
        return stages

    def allgather(self, nbytes: int, decode_bytes: int) -> list[CollectiveStage]:
        """Return the stages of gathering ``nbytes`` of codes of each rank, and adding up ``decode_bytes`` of each."""
        layout, costs = self._layout, self._costs
        size, load = layout.num_ranks, defaultdict[str, float](float)
        sent = dict.fromkeys(layout.training, 0.0)
        for kind in layout.training:
            away = size - kind.host.num_ranks
            sent[kind] = kind.host.num_ranks * nbytes * (layout.num_hosts - 1) * costs.wire_bytes_per_byte
            load[send_link(kind)] += sent[kind]
            load[receive_link(kind)] += away * nbytes * costs.wire_bytes_per_byte
            moving = away * nbytes * (costs.tcp_receive_seconds_per_byte + costs.tcp_send_seconds_per_byte)
            adding = kind.host.num_ranks * size * decode_bytes * costs.decode_seconds_per_byte
            self._add(load, kind, 0.0 if self._on_devices else moving + adding)
        layout.add_network(load, sent, is_ring=False)
        per_rank = size * decode_bytes * costs.decode_seconds_per_byte
        hops = self.hop_seconds if layout.num_hosts > 1 else costs.wakeup_seconds
        messages = size * (layout.num_hosts - 1)
        return [
            CollectiveStage("latency", hops),
            CollectiveStage("gather codes", per_rank, load, messages, max(sent.values())),
        ]

    def _local(self, name: str, count: int, dtype: str, per_byte: float) -> CollectiveStage:
        """A stage within each host: every rank reads, or writes, its slice of all ranks' copies."""
        nbytes, load, longest = count * DTYPES[dtype].itemsize, defaultdict[str, float](float), 0.0
        for kind in self._layout.training:
            ranks = kind.host.num_ranks
            if ranks == 1:
                continue
            if kind.host.device_bandwidth:
                load[device_link(kind)] += nbytes * (ranks - 1) / ranks
                longest = max(longest, (ranks - 1) * self._costs.device_hop_seconds)
                continue
            owners = ranks if self._layout.num_hosts == 1 else self._groups
            longest = max(longest, nbytes * ranks / owners * per_byte)
            self._add(load, kind, nbytes * ranks * per_byte)
        barrier = 0.0 if self._on_devices else self._costs.barrier_seconds
        return CollectiveStage(name, longest + barrier, load)

    def _between(self, count: int, dtype: str) -> list[CollectiveStage]:
        """The stages between hosts: every cross group carries a slice."""
        layout, itemsize, hosts = self._layout, DTYPES[dtype].itemsize, self._layout.num_hosts
        groups = 1 if count * itemsize <= SMALL_BYTES or self._on_devices else self._groups
        low, high = rank_slice(count, 0, groups, itemsize)
        slowest = min(kind.host.bandwidth for kind in layout.training)
        if self._on_devices:
            plan = self._noted(plan_devices(count * itemsize, hosts, self.hop_seconds, slowest))
        else:
            plan = self._noted(plan_tcp(high - low, itemsize, hosts, self._algorithm))
        # partial sums of half precision travel as float32, results do not: three halves of the bytes
        wide = 1.5 if dtype in _HALF_TYPES and self.shares_memory and not self._on_devices else 1.0
        load = defaultdict[str, float](float)
        thread = 0.0 if self._on_devices else self._thread_seconds(plan, wide)
        sent = dict.fromkeys(layout.training, groups * plan.sent * wide * self._costs.wire_bytes_per_byte)
        for kind in layout.training:
            load[send_link(kind)] += sent[kind]
            load[receive_link(kind)] += sent[kind]
            self._add(load, kind, groups * thread)
        layout.add_network(load, sent, is_ring=plan.algorithm == "ring")
        waiting = plan.waiting_seconds(self.hop_seconds, slowest / groups / self._costs.wire_bytes_per_byte / wide)
        messages = plan.messages * groups * hosts
        return [
            CollectiveStage("latency", plan.hops * self.hop_seconds),
            CollectiveStage(plan.algorithm, max(thread, waiting), load, messages, max(sent.values())),
        ]

    def _flat_ring(self, count: int, dtype: str) -> list[CollectiveStage]:
        """One ring through all ranks, host after host: of each host one rank sends to the next host."""
        layout, itemsize = self._layout, DTYPES[dtype].itemsize
        size = layout.num_ranks
        requested = "ring" if self._algorithm == "auto" else self._algorithm
        plan = self._noted(plan_tcp(count, itemsize, size, requested))
        is_ring = plan.algorithm == "ring"
        load, sent = defaultdict[str, float](float), {}
        thread = 0.0 if self._on_devices else self._thread_seconds(plan, 1.0)
        for kind in layout.training:
            ranks = kind.host.num_ranks
            leaving = 1.0 if is_ring else ranks * (size - ranks) / (size - 1)
            sent[kind] = plan.sent * leaving * self._costs.wire_bytes_per_byte if layout.num_hosts > 1 else 0.0
            load[send_link(kind)] += sent[kind]
            load[receive_link(kind)] += sent[kind]
            if kind.host.device_bandwidth and ranks > 1:
                load[device_link(kind)] += plan.sent
            self._add(load, kind, ranks * thread)
        layout.add_network(load, sent, is_ring=is_ring)
        inner = self._costs.device_hop_seconds if self._on_devices else self._costs.wakeup_seconds
        once = (layout.num_hosts * layout.latency + size * inner) / size if is_ring else self.hop_seconds
        slowest = min(kind.host.bandwidth for kind in layout.training) if layout.num_hosts > 1 else math.inf
        waiting = plan.waiting_seconds(once, slowest / self._costs.wire_bytes_per_byte)
        messages = plan.messages * size
        return [
            CollectiveStage("latency", plan.hops * once),
            CollectiveStage(plan.algorithm, max(thread, waiting), load, messages, max(sent.values())),
        ]

    def _noted(self, plan: TcpPlan) -> TcpPlan:
        if self.largest_plan is None or plan.sent > self.largest_plan.sent:
            self.largest_plan = plan
        return plan

    def _thread_seconds(self, plan: TcpPlan, wide: float) -> float:
        """Processor time of one rank for its part."""
        costs = self._costs
        per_byte = costs.tcp_send_seconds_per_byte + costs.tcp_receive_seconds_per_byte
        moving = 2 * plan.messages * costs.tcp_message_seconds + plan.sent * wide * per_byte
        return moving + plan.reduced * wide * costs.reduce_seconds_per_byte

    def _add(self, load: defaultdict[str, float], kind: HostKind, seconds: float) -> None:
        for resource, amount in self._layout.computing(kind, seconds).items():
            load[resource] += amount
