"""Counters of a rank's engine, for metrics.

They are plain numbers. The thread that does the work adds to them, and any other may read them at any time: a number
is never half written, and several need not be of one moment. No lock is held for them. What belongs to the engine's
work is written by the thread that drives it; what belongs to waits, by the threads that wait, one after the other:
CPython changes threads at calls and loops only, and not within ``+=``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from reigen.cluster.metrics import MetricSample
from reigen.engine.messages import OperationKind, TunedParameters

_NUM_KINDS = max(OperationKind) + 1
#: Ways on which tensors go, by the names of backends; between hosts the network counts its bytes itself.
_WAYS = {"shm": "shared_memory", "hierarchical": "shared_memory", "mpi": "mpi"}
DEVICE_WAY, NETWORK_WAY, SHARED_MEMORY_WAY = "device", "network", "shared_memory"


def way_of(backend_name: str) -> str:
    """Return the way on which a backend moves tensors; empty where it moves none, or counts them itself."""
    return _WAYS.get(backend_name, "")


class NetworkTraffic(Protocol):
    """Traffic of a rank with other hosts."""

    @property
    def num_sent_bytes(self) -> int:
        """Bytes of tensors that were sent, ever."""


class SharedSegment(Protocol):
    """Shared memory of a rank."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the rank has reserved."""


class EngineCounters:
    """Counters of one rank in its job; the views of an elastic job share them.

    Waits of several threads at once count once.

    Attributes:
        started: when the counting began, on the clock of ``time.monotonic()``.
        steps: ends of steps of the optimizer.
        samples, goal_steps: as the program has reported; the latter None where it has not.
        operations: collectives that were carried out, by kind.
        bytes: by way, and there by kind.
        batches, fused: batches of operations; operations in batches of several.
        eager, eager_bytes: small allreduces whose data came with their submission.
        cache_hits, cache_misses: submissions by number, and in full.
        encoded_bytes, code_bytes: bytes of gradients that were encoded, and of their codes.
        execution_seconds: for which data was moved and reduced; since when it is, 0: it is not now.
        blocked_seconds: for which the program has waited, without a wait that goes on.
        transfer_seconds: of these, with data being moved.
        registered_bytes: registered memory.
        tuned: parameters that autotuning has chosen, where it has.
        view_changes: changes of members of an elastic job, by kind.
        view_change_seconds: for which they let no steps be run; members that were lost, and that joined.
        is_warm_spare: this rank takes no samples in the view of its elastic job; None: that has no such spares.
        waits_for: name of the collective for which a thread began to wait last.
    """

    __slots__ = (
        "_execution_before",
        "_num_waiting",
        "_waiting_since",
        "batches",
        "blocked_seconds",
        "bytes",
        "cache_hits",
        "cache_misses",
        "code_bytes",
        "eager",
        "eager_bytes",
        "encoded_bytes",
        "executing_since",
        "execution_seconds",
        "fused",
        "goal_steps",
        "is_warm_spare",
        "joined_ranks",
        "lost_ranks",
        "operations",
        "registered_bytes",
        "samples",
        "started",
        "steps",
        "transfer_seconds",
        "tuned",
        "view_change_seconds",
        "view_changes",
        "waits_for",
    )

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.steps = self.samples = 0
        self.goal_steps: int | None = None
        self.operations = [0] * _NUM_KINDS
        #: what a backend that moves nothing would have moved is kept, and not shown
        self.bytes = {way: [0] * _NUM_KINDS for way in ("", *_WAYS.values(), DEVICE_WAY, NETWORK_WAY)}
        self.batches = self.fused = self.eager = self.eager_bytes = 0
        self.cache_hits = self.cache_misses = 0
        self.encoded_bytes = self.code_bytes = 0
        self.execution_seconds = self.executing_since = 0.0
        self.blocked_seconds = self.transfer_seconds = 0.0
        self.registered_bytes = 0
        self.view_changes: dict[str, int] = {}
        self.view_change_seconds, self.lost_ranks, self.joined_ranks = 0.0, 0, 0
        self.is_warm_spare: bool | None = None
        self.waits_for = ""
        self.tuned: TunedParameters | None = None
        self._num_waiting, self._waiting_since, self._execution_before = 0, 0.0, 0.0

    # -- on the threads that work -------------------------------------------------------------------------------------

    def begin_wait(self, name: str) -> None:
        """Count a thread of the program that begins to wait for a collective."""
        if not self._num_waiting:
            self.waits_for = name
            now, since = time.monotonic(), self.executing_since
            self._waiting_since = now
            self._execution_before = self.execution_seconds + (now - since if since else 0.0)
        self._num_waiting += 1

    def end_wait(self) -> None:
        """Count one that waits no longer."""
        since, before = self._waiting_since, self._execution_before
        self._num_waiting -= 1
        if not self._num_waiting:
            seconds = time.monotonic() - since
            moved = self.execution_seconds - before
            self.blocked_seconds += seconds
            self.transfer_seconds += min(seconds, moved)

    def count_view_change(self, change: str, seconds: float, *, num_lost: int, num_joined: int) -> None:
        """Count a change of an elastic job's members, of one of three kinds, and for how long no steps were run."""
        self.view_changes[change] = self.view_changes.get(change, 0) + 1
        self.view_change_seconds += seconds
        self.lost_ranks += num_lost
        self.joined_ranks += num_joined

    # -- on others ----------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Return whether the program waits for a collective now."""
        return self._num_waiting > 0

    def times(self, now: float) -> tuple[float, float, float]:
        """Return the seconds of waiting, of transfers for which the program has waited, and of all transfers.

        What is under way counts as far as it has come. What is left of the time since `started` is computing.
        """
        blocked, transfer, execution = self.blocked_seconds, self.transfer_seconds, self.execution_seconds
        if since := self.executing_since:
            execution += max(0.0, now - since)
        if self._num_waiting:
            seconds = max(0.0, now - self._waiting_since)
            blocked += seconds
            transfer += min(seconds, max(0.0, execution - self._execution_before))
        return max(0.0, blocked - transfer), transfer, execution

    def samples_now(self) -> Iterator[MetricSample]:
        """Yield the metrics, without the time of computing, which others may have a part in."""
        wait, transfer, execution = self.times(time.monotonic())
        yield from _plain(
            ("reigen_steps_total", self.steps),
            ("reigen_samples_total", self.samples),
            ("reigen_wait_seconds_total", wait),
            ("reigen_transfer_seconds_total", transfer),
            ("reigen_execution_seconds_total", execution),
            ("reigen_batches_total", self.batches + self.eager),
            ("reigen_fused_operations_total", self.fused),
            ("reigen_eager_operations_total", self.eager),
            ("reigen_response_cache_hits_total", self.cache_hits),
            ("reigen_response_cache_misses_total", self.cache_misses),
            ("reigen_encoded_bytes_total", self.encoded_bytes),
            ("reigen_code_bytes_total", self.code_bytes),
        )
        if self.goal_steps is not None:
            yield "reigen_goal_steps", (), self.goal_steps
        operations = list(self.operations)
        operations[OperationKind.ALLREDUCE] += self.eager
        for kind, number in enumerate(operations):
            if number:
                yield "reigen_operations_total", (_name(kind),), number
        yield from self._byte_samples()
        if self.view_changes:
            for change, number in list(self.view_changes.items()):
                yield "reigen_view_changes_total", (change,), number
            yield "reigen_view_change_seconds_total", (), self.view_change_seconds
            yield "reigen_lost_ranks_total", (), self.lost_ranks
            yield "reigen_joined_ranks_total", (), self.joined_ranks
        if self.is_warm_spare is not None:
            yield "reigen_warm_spare", (), float(self.is_warm_spare)
        yield "reigen_memory_bytes", ("registered",), self.registered_bytes

    def _byte_samples(self) -> Iterator[MetricSample]:
        ways = {way: list(by_kind) for way, by_kind in self.bytes.items()}
        ways[SHARED_MEMORY_WAY][OperationKind.ALLREDUCE] += self.eager_bytes
        del ways[""]
        for way, by_kind in ways.items():
            for kind, num_bytes in enumerate(by_kind):
                if num_bytes:
                    yield "reigen_bytes_total", (_name(kind), way), num_bytes


def _plain(*samples: tuple[str, float]) -> Sequence[MetricSample]:
    return [(name, (), value) for name, value in samples]


def _name(kind: int) -> str:
    return OperationKind(kind).name.lower()
