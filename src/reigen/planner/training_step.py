"""A training step as events: computing, negotiation, collectives or requests to servers, the update.

Decisions are those of the job's own code: `plan_buckets` and `GradientTracker` say which bucket is submitted when, the
`RankController` of each kind of rank and the `Coordinator` what travels together and in which order, the backends'
functions in which chunks, and the store's in which shards. Only time is made up here, from costs.

Ranks that are alike in everything are one for the coordinator, too: they submit the same at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reigen.api.compression import CastCompression, CodecCompression
from reigen.api.gradients.bucket_plan import BucketPlan
from reigen.api.gradients.tracker import GradientTracker
from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import Operation, OperationKind, Report
from reigen.engine.rank_controller import ExecuteBatch, RankController
from reigen.planner.collectives import CollectiveModel, CollectiveStage
from reigen.planner.control import ControlPlan
from reigen.planner.costs import Costs
from reigen.planner.fluid import FluidSimulator
from reigen.planner.layout import HostKind, JobLayout
from reigen.planner.profile import TrainingProfile
from reigen.types import DTYPES, ReduceOp

_DEADLINE_SECONDS = 1e9
_REPORTS, _ANNOUNCEMENT = "reports", "announcement"
#: Resource: rank 0 deals with one control message after the other.
COORDINATOR = "rank 0's negotiation"


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that are alike.

    Attributes:
        index: of the kind.
        kind: of their hosts.
        slowdown: their computing takes so many times as long.
        num_ranks: on each of these hosts.
        is_near: they share the host of rank 0.
    """

    index: int
    kind: HostKind
    slowdown: float
    num_ranks: int
    is_near: bool

    @property
    def track(self) -> str:
        """Row of the picture."""
        slow = f", {self.slowdown:g} times as slow" if self.slowdown > 1 else ""
        return f"ranks of {self.kind.name}{slow}"


def rank_kinds(layout: JobLayout) -> list[RankKind]:
    """Return the kinds of ranks of a job; those of rank 0's host come first."""
    found: list[RankKind] = []
    for kind in sorted(layout.training, key=lambda kind: not kind.has_rank_0):
        for slowdown, count in kind.slowdowns:
            found.append(RankKind(len(found), kind, slowdown, count, kind.has_rank_0))
    return found


class StepComputing:
    """Computing of every kind of rank, as activities of a simulator."""

    def __init__(self, simulator: FluidSimulator, layout: JobLayout, profile: TrainingProfile, costs: Costs) -> None:
        self.simulator = simulator
        self._layout, self._profile, self._costs = layout, profile, costs

    def forward(self, rank: RankKind, then: Callable[[], None]) -> None:
        """Compute the forward pass, and the rest of a step."""
        self.part(rank, self._profile.forward_seconds + self._profile.other_seconds, "forward", then)

    def update(self, rank: RankKind, then: Callable[[], None]) -> None:
        """Update the weights."""
        self.part(rank, self._profile.update_seconds * self._costs.update_scale, "update", then)

    def part(self, rank: RankKind, seconds: float, name: str, then: Callable[[], None]) -> None:
        """Compute for so many seconds of a rank that is not slow."""
        busy = seconds * rank.slowdown
        load = self._layout.computing(rank.kind, busy * self._profile.processors * rank.num_ranks)
        self.simulator.start(busy, load, then, rank.track, name)


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """Buckets of a job, and the way in which they travel.

    Attributes:
        plan: of the job.
        compression: of the gradients.
        overlaps: buckets are reduced while backward runs.
        cache_capacity, fusion_bytes: of the coordinator.
    """

    plan: BucketPlan
    compression: CastCompression | CodecCompression
    overlaps: bool
    cache_capacity: int
    fusion_bytes: int


class AllreduceJob:
    """Job whose gradients are reduced by collectives; `run_step` may be called again and again.

    Attributes:
        num_batches: that were executed in the last step.
        messages, sent: of data in the last step, by all; bytes that the busiest host has sent.
        control_messages: that rank 0 has had, or sent, in the last step.
        computed_at: when the first and the last rank had computed all gradients.
    """

    def __init__(
        self, layout: JobLayout, profile: TrainingProfile, model: CollectiveModel, costs: Costs, options: BucketOptions
    ) -> None:
        self._layout, self._profile, self._model, self._costs = layout, profile, model, costs
        self._options = options
        self._ranks = rank_kinds(layout)
        self._coordinator = Coordinator(
            len(self._ranks), options.cache_capacity, options.fusion_bytes, _DEADLINE_SECONDS
        )
        self._controllers = [RankController(rank.index) for rank in self._ranks]
        self._trackers = [GradientTracker(len(profile.tensors)) for _ in self._ranks]
        for tracker in self._trackers:
            tracker.adopt(options.plan)
        self._order = sorted(range(len(profile.tensors)), key=lambda each: profile.tensors[each].ready_seconds)
        self._control_plan = ControlPlan.of(layout)
        self.num_batches = self.messages = 0
        self.control_messages = self.sent = 0.0
        self.computed_at: list[float] = []

    def run_step(self) -> FluidSimulator:
        """Simulate a step of all ranks; returns the simulator, which is at its end."""
        self._simulator = FluidSimulator({**self._layout.capacities, COORDINATOR: 1.0})
        self._computing = StepComputing(self._simulator, self._layout, self._profile, self._costs)
        self._queue: deque[ExecuteBatch] = deque()
        self._control_queue: deque[tuple[float, Callable[[], None], str]] = deque()
        #: reports in the queue that rank 0 reads before it announces something
        self._unread = 0
        self._is_executing = False
        #: by rank kind: backward has ended; buckets that are not reduced yet
        self._has_computed = [False] * len(self._ranks)
        self._outstanding = [len(self._options.plan.buckets)] * len(self._ranks)
        self.num_batches = self.messages = 0
        self.control_messages, self.sent, self.computed_at = 0.0, 0.0, []
        for rank in self._ranks:
            self._computing.forward(rank, lambda rank=rank: self._backward(rank, iter(self._segments(rank))))  # type: ignore[misc]
        self._simulator.run()
        return self._simulator

    # -- computing ----------------------------------------------------------------------------------------------------

    def _segments(self, rank: RankKind) -> list[tuple[float, tuple[int, ...]]]:
        """Return parts of backward: their lengths, and the buckets that are submitted at their ends."""
        tracker, segments, begin = self._trackers[rank.index], list[tuple[float, tuple[int, ...]]](), 0.0
        for parameter in self._order:
            action = tracker.gradient(parameter)
            if action.submit and self._options.overlaps:
                ready = self._profile.tensors[parameter].ready_seconds
                segments.append((max(0.0, ready - begin), action.submit))
                begin = max(begin, ready)
        left = tuple(range(len(self._options.plan.buckets))) if not self._options.overlaps else ()
        segments.append((max(0.0, self._profile.backward_seconds - begin), left))
        tracker.finish()
        tracker.reset()
        return segments

    def _backward(self, rank: RankKind, segments: object) -> None:
        try:
            seconds, buckets = next(segments)  # type: ignore[call-overload]
        except StopIteration:
            self._has_computed[rank.index] = True
            self.computed_at.append(self._simulator.now)
            self._end_if_reduced(rank)
            return

        def ended() -> None:
            self._submit(rank, buckets)
            self._backward(rank, segments)

        self._computing.part(rank, seconds, "backward", ended)

    def _end_if_reduced(self, rank: RankKind) -> None:
        if self._has_computed[rank.index] and not self._outstanding[rank.index]:
            self._computing.update(rank, lambda: None)

    # -- negotiation --------------------------------------------------------------------------------------------------

    def _submit(self, rank: RankKind, buckets: Sequence[int]) -> None:
        controller = self._controllers[rank.index]
        for bucket in buckets:
            controller.submit(self._operation(bucket))
        reports, controller.outgoing = controller.outgoing, []
        if not reports:
            return
        count = rank.num_ranks * rank.kind.count - (rank.index == 0)  # rank 0 needs no message to itself
        hop = self._costs.wakeup_seconds if rank.is_near else self._model.hop_seconds
        messages, way = self._control_plan.messages(count), self._control_plan.seconds(hop, self._costs)
        if not messages:
            self._unread += 1
            self._receive(rank, reports)
            return
        self._delay(way, lambda: self._control(messages, lambda: self._receive(rank, reports), _REPORTS))

    def _operation(self, number: int) -> Operation:
        bucket = self._options.plan.buckets[number]
        name, count = f"gradients.{number}", bucket.nbytes // DTYPES[bucket.dtype].itemsize
        if isinstance(self._options.compression, CodecCompression):
            nbytes = self._options.compression.codec.max_bytes(count)
            return Operation(OperationKind.ALLGATHER, name, "uint8", (nbytes,))
        return Operation(OperationKind.ALLREDUCE, name, bucket.dtype, (count,), ReduceOp.AVERAGE, offset=bucket.offset)

    def _receive(self, rank: RankKind, reports: Sequence[Report]) -> None:
        """Take in a message on rank 0, and announce ready operations."""
        self._coordinator.receive(rank.index, reports, self._simulator.now)
        self._unread -= 1
        if self._unread > 0:
            return  # it reads all that lies before it, and announces then
        announcements = self._coordinator.announce(self._simulator.now)
        if not announcements:
            return
        batches: list[ExecuteBatch] = []
        for announcement in announcements:
            for controller in self._controllers:
                found = controller.receive(announcement)
                if controller is self._controllers[0]:
                    batches += [each for each in found if isinstance(each, ExecuteBatch)]

        def announced() -> None:
            self._queue.extend(batches)
            self._execute()

        way = self._control_plan.seconds(self._model.hop_seconds, self._costs)
        self._control(self._control_plan.children, lambda: self._delay(way, announced), _ANNOUNCEMENT)

    def _control(self, count: float, then: Callable[[], None], name: str) -> None:
        """Deal with so many control messages, on rank 0."""
        self.control_messages += count
        self._control_queue.append((count * self._costs.control_message_seconds, then, name))
        if len(self._control_queue) == 1:
            self._control_next()

    def _control_next(self) -> None:
        """Deal with one message after the other, on rank 0."""
        seconds, then, name = self._control_queue[0]
        if self._unread <= 0:
            self._unread = sum(1 for *_, each in self._control_queue if each == _REPORTS)

        def ended() -> None:
            then()
            self._control_queue.popleft()
            if self._control_queue:
                self._control_next()

        load = self._layout.computing(self._ranks[0].kind, seconds / self._ranks[0].kind.count)
        load = {**load, COORDINATOR: seconds}
        self._simulator.start(seconds, load, ended, "rank 0, negotiation" if seconds else "", name)

    def _delay(self, seconds: float, then: Callable[[], None]) -> None:
        self._simulator.start(seconds, {}, then)

    # -- execution ----------------------------------------------------------------------------------------------------

    def _execute(self) -> None:
        """Begin the next batch, unless one is being executed: an engine moves the data of one at a time."""
        if self._is_executing or not self._queue:
            return
        self._is_executing = True
        self.num_batches += 1
        batch = self._queue.popleft().batch
        self._run_stages(deque([self._dispatch(len(batch)), *self._stages(batch)]), len(batch))

    def _stages(self, batch: Sequence[tuple[Operation, object]]) -> list[CollectiveStage]:
        operations = [operation for operation, _ in batch]
        if operations[0].kind is OperationKind.ALLGATHER:
            [operation] = operations
            bucket = self._options.plan.buckets[int(operation.name.rpartition(".")[2])]
            return [self._encode(bucket.nbytes), *self._model.allgather(operation.nbytes, bucket.nbytes)]
        stages: list[CollectiveStage] = []
        for dtype in dict.fromkeys(operation.dtype for operation in operations):
            count = sum(operation.num_elements for operation in operations if operation.dtype == dtype)
            stages += self._model.allreduce(count, dtype)
        return stages

    def _dispatch(self, num_operations: int) -> CollectiveStage:
        return self._on_every_rank("dispatch", num_operations * self._costs.operation_seconds)

    def _encode(self, nbytes: int) -> CollectiveStage:
        return self._on_every_rank("encode", nbytes * self._costs.encode_seconds_per_byte)

    def _on_every_rank(self, name: str, seconds: float) -> CollectiveStage:
        load: dict[str, float] = {}
        for kind in self._layout.training:
            for resource, amount in self._layout.computing(kind, seconds * kind.host.num_ranks).items():
                load[resource] = load.get(resource, 0.0) + amount
        return CollectiveStage(name, seconds, load)

    def _run_stages(self, stages: deque[CollectiveStage], num_operations: int) -> None:
        if not stages:
            self._is_executing = False
            for rank in self._ranks:
                self._outstanding[rank.index] -= num_operations
                self._end_if_reduced(rank)
            self._execute()
            return
        stage = stages.popleft()
        self.messages += stage.messages
        self.sent += stage.sent
        self._simulator.start(
            stage.seconds, stage.load, lambda: self._run_stages(stages, num_operations), "collectives", stage.name
        )
