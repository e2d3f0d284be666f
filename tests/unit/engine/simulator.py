"""A seeded simulator of negotiation: the pure state machines over in-memory queues, with time and faults made up.

One seed is one schedule: how many ranks, what each submits in which order, how long every message takes, what goes
wrong. What must come of it is known without asking the machines: in an epoch (what lies between two answers to JOIN),
the k-th submission of a name on one rank belongs to the k-th on every other of its process set, and the ranks that have
none have joined. In half of the schedules rank 0 chooses other parameters now and then: all ranks take them
on between the same two batches, and what is fused fits the threshold that counts there.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs

from reigen.engine.control_channel import ControlChannel
from reigen.engine.control_tree import ControlTree
from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import (
    JOIN_NAME,
    Announcement,
    CacheEviction,
    ErrorCause,
    ErrorResponse,
    JobAbort,
    MergedReports,
    Operation,
    OperationKind,
    Report,
    Response,
    ResponseList,
    SubmitRequest,
    TunedParameters,
)
from reigen.engine.rank_controller import CachedResponse, ExecuteBatch, FailOperation, RankController
from reigen.engine.rank_masks import from_bytes, to_ranks
from reigen.engine.report_merger import HOLD_SECONDS, ReportMerger
from reigen.errors import CollectiveError, DeadlineError, DuplicateNameError, JoinedError, MismatchError, PeerLostError
from reigen.net.shm_eager import max_eager_bytes
from reigen.net.shm_ring import ShmTransport, shm_transport_bytes
from reigen.types import DTYPES
from tests.unit.engine.schedules import FOREVER, Item, can_be_stood_in_for, make_plan, same_request

#: A batch: the number of the announcement, and its place there.
Where = tuple[int, int]
_SETS = (OperationKind.ADD_SET, OperationKind.REMOVE_SET)


@dataclass(eq=False)
class Submission:
    """What a rank submitted once, and what became of it."""

    operation: Operation
    #: the process set by the program's number; for ADD_SET and REMOVE_SET the one that it makes or unmakes
    number: int
    #: how many answers to JOIN its rank had seen
    epoch: int
    #: the batch, or the number of the refusal; None while it is open, or when it failed since a rank is gone
    ran: Where | None = None
    refused: int | None = None


@dataclass
class Rank:
    """A rank as the simulator sees it."""

    participant: RankController
    program: deque[Item]
    #: on their way to the coordinator, and from it with their numbers
    up: deque[Report] = field(default_factory=deque)
    down: deque[tuple[int, Announcement]] = field(default_factory=deque)
    num_heard: int = 0
    #: submitted and not answered
    open: dict[str, Submission] = field(default_factory=dict)
    #: what the program waits for: JOIN, or a process set that is made or unmade
    blocked: Submission | None = None
    #: the coordinator's numbers of process sets by the program's
    sets: dict[int, int] = field(default_factory=lambda: {0: 0})
    epoch: int = 0
    num_sets_asked: int = 0
    num_submitted: int = 0
    #: when each name was last submitted
    since: dict[str, float] = field(default_factory=dict)
    executed: list[Where] = field(default_factory=list)
    #: announcements of parameters that it has taken on, and how many batches it had carried out by then
    tuned: dict[int, int] = field(default_factory=dict)
    gone: str = ""
    #: how often it has submitted eagerly, and what it did last
    num_eager: int = 0
    eager: CachedResponse | None = None
    #: what was outstanding when this rank learned that another is gone; None before
    lost: dict[str, Submission] | None = None

    def has_submitted(self, name: str) -> bool:
        """Whether the name is, or was to the last, outstanding."""
        return name in (self.open if self.lost is None else self.lost)

    @property
    def waits_for_join(self) -> bool:
        """Whether it has joined, and not been answered."""
        return self.blocked is not None and self.blocked.operation.kind is OperationKind.JOIN


@dataclass
class Batch:
    """What was announced, and what each rank executed of it."""

    set_ranks: tuple[int, ...]
    names: tuple[str, ...]
    #: what may be fused
    threshold_bytes: int = 0
    executed: dict[int, tuple[tuple[Operation, Response], ...]] = field(default_factory=dict)
    #: for each member, the ranks that had submitted it
    own: list[set[int]] = field(default_factory=list)


def shm_transports(size: int) -> list[ShmTransport]:
    """The ends of all ranks, which keep what is sent until it is received."""
    parts = [np.zeros(shm_transport_bytes(size), np.uint8) for _ in range(size)]
    others = list(range(1, size))
    peers = [others] + [[0]] * len(others)
    return [ShmTransport(parts, r, peers[r], peers[r]) for r in range(size)]


def make_tree(seed: int, size: int) -> ControlTree | None:
    """For two thirds of the schedules a tree: some hosts, and few children of each rank."""
    rng = random.Random(f"tree {seed}")
    if size < 3 or rng.random() < 1 / 3:
        return None
    hosts: list[list[int]] = [[] for _ in range(rng.randint(1, size))]
    for rank in range(size):
        hosts[rng.randrange(len(hosts)) if rank else 0].append(rank)
    return ControlTree([ranks for ranks in hosts if ranks], rng.randint(1, 3))


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.plan = plan = make_plan(self.rng)
        self.now = 0.0
        self.coordinator = Coordinator(
            plan.size, plan.capacity, plan.threshold_bytes, plan.deadline_seconds, fuse_groups=plan.fuse_groups
        )
        self.ranks = [Rank(RankController(r), deque(p)) for r, p in enumerate(plan.programs)]
        #: where what is said travels through memory, as between the ranks of one host
        self.transports = shm_transports(plan.size) if plan.encoded else []
        #: where there is a tree: who reports to whom, and the relays' mergers
        self.tree = None if plan.encoded else make_tree(seed, plan.size)
        relays = () if self.tree is None else self.tree.relays()
        self.mergers = {r: ReportMerger(plan.size, cast("ControlTree", self.tree).subtree(r)) for r in relays}
        self.num_merged = self.num_forwarded = 0
        self.channels = [ControlChannel(t, receives_reports=r == 0) for r, t in enumerate(self.transports)]
        #: what each rank had put into its slot when rank 0 answered, by the number of the answer
        self.eager_answers: list[list[int]] = []
        self.num_announced = 0
        #: parameters: when they are chosen, all that were, those that were announced by the number of the announcement,
        #: and the threshold that counts now
        self.tuning_rng = random.Random(f"tuning {seed}")
        self.tuning_share = self.tuning_rng.choice((0.0, 0.0, 0.1, 0.5))
        self.chosen: list[TunedParameters] = []
        self.tuned: dict[int, TunedParameters] = {}
        self.threshold_bytes = plan.threshold_bytes
        self.stopped = False
        #: how often nothing has happened, one after the other
        self.idle = 0
        self.batches: dict[Where, Batch] = {}
        #: batches of each announcement
        self.runs: dict[int, list[Where]] = {}
        #: announcement -> rank -> its operation and error
        self.refusals: dict[int, dict[int, tuple[Operation, CollectiveError]]] = {}
        self.refused: dict[int, ErrorResponse] = {}
        #: process sets as they are after all that was announced, by the coordinator's numbers
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(plan.size))}
        #: ranks of the sets by the program's numbers, and the epochs in which they were removed
        self.ranks_by_set: dict[int, tuple[int, ...]] = {0: tuple(range(plan.size))}
        self.removed: dict[int, int] = {}
        self.numbers_given: list[int] = []
        #: what cached responses stand for
        self.slots: dict[int, tuple[str, int]] = {}
        #: ranks of which the coordinator knows that they have joined, and which told it something last
        self.joined: list[int] = []
        self.submissions: list[dict[tuple[int, int, str], list[Submission]]] = [
            defaultdict(list) for _ in range(plan.size)
        ]
        #: what has happened: when, a format, and what to put into it
        self._events: list[tuple[float, str, tuple[object, ...]]] = []

    def log(self) -> list[str]:
        """What has happened, line by line."""
        return [f"{now:g}: {text % values}" for now, text, values in self._events]

    def _note(self, text: str, *values: object) -> None:
        self._events.append((self.now, text, values))

    # -- running

    def run(self) -> None:
        """Play the schedule to its end and check what has come of it."""
        actions = [a for a, w in zip(self._actions(), self.plan.weights, strict=True) for _ in range(w)]
        size, pick = self.plan.size, self.rng.random
        while self.idle < 2:
            for _ in range(12 * size):
                rank = int(pick() * size)
                actions[int(pick() * len(actions))](rank)
            # then everything that is under way arrives, rank by rank: the schedule has an end
            self.idle = self.idle + 1 if not self._sweep() else 0
            if self.idle and self._pass_time():
                self.idle = 0
        self._check_end()

    def _actions(self) -> tuple[Any, ...]:
        return self.submit, self.send, self.receive, self.tell, self.speak

    def _sweep(self) -> bool:
        moved = False
        for action in (self.submit, self.send, self.tell, self.release, self.speak, self.receive):
            for rank in self.rng.sample(range(self.plan.size), self.plan.size):
                while action(rank):
                    moved = True
        return moved

    def _pass_time(self) -> bool:
        """Nothing happens any more: let the clock run to the next deadline."""
        expiry = self.coordinator.next_expiry()
        if expiry is None or expiry >= FOREVER or self._silent():
            return False
        self.now = max(self.now, expiry)
        return self.speak(0)

    # -- events: each returns whether something happened

    def submit(self, rank: int) -> bool:
        """The next submission of a rank, unless its name is still outstanding; faults happen here, too."""
        state = self.ranks[rank]
        if state.gone:
            return False
        if self.plan.leaves == (rank, state.num_submitted) and self.plan.size > 1:
            return self._leave(rank)
        if self.plan.dies == (rank, state.num_submitted):
            return self._die(rank)
        if not state.program or self._waits(state):
            return False
        submission = self._next(rank)
        if submission is None:  # its process set was never made
            state.program.popleft()
            return True
        operation = submission.operation
        if rank == 0 and self._looks_for_others(operation):
            return False
        if operation.name in state.open:
            if self.rng.random() < 0.05:
                self._submit_twice(state, operation)
            return False
        state.program.popleft()
        state.num_submitted += 1
        if state.participant.broken is not None:
            self._submit_to_broken(state, operation)
            return True
        if not self._submit_eagerly(rank, submission):
            state.participant.submit(operation)
            self._submitted(rank, submission)
            self._note("rank %d submits %s", rank, operation)
        state.participant.validate_state()
        if self.plan.deadline_seconds < FOREVER and self.rng.random() < 0.3:
            self.now += self.rng.random() * 2
        return True

    def _waits(self, state: Rank) -> bool:
        """Whether a rank waits for what it has submitted, before it goes on."""
        if self.plan.blocking and state.open and not self.idle and self.rng.random() < 0.95:
            return True  # where ranks wait for different operations one has to go on, when all else is done
        if state.blocked is None:
            return False
        frees = state.program[0][0].kind is OperationKind.FREE  # which is done while a rank waits, too
        return not (frees and state.waits_for_join)

    def _looks_for_others(self, operation: Operation) -> bool:
        """Whether rank 0 looks for what others submit eagerly, and has not found it yet."""
        if not self.plan.blocking or self.idle or self.rng.random() < 0.1:
            return False
        cached = self.ranks[0].participant.cached.get(operation.name)
        eager = self.transports[0].eager
        return cached is not None and any(
            words[1] == eager._taken[r] or words[0] != cached.slot for r, words in eager._others
        )

    def _next(self, rank: int) -> Submission | None:
        """What the program says next, in the coordinator's words; None if it is about a set that there is not."""
        state = self.ranks[rank]
        operation, number = state.program[0]
        if operation.kind in _SETS:
            name = f"{operation.kind.name.lower()}.noname.{state.num_sets_asked}"
            shape = operation.shape
            if operation.kind is OperationKind.REMOVE_SET:
                if number not in state.sets:
                    return None
                shape = (state.sets[number],)
            elif any(self.ranks_by_set[known] == shape for known in state.sets):  # it could not be removed in time
                return None
            return Submission(structs.replace(operation, name=name, shape=shape), number, state.epoch)
        if number:
            there = state.sets.get(number)
            if there is None:
                return None
            members = tuple(structs.replace(member, process_set=there) for member in operation.members)
            name = f"{operation.name} (process set {there})"
            operation = structs.replace(operation, name=name, process_set=there, members=members)
        return Submission(operation, number, state.epoch)

    def _submitted(self, rank: int, submission: Submission) -> None:
        state, operation = self.ranks[rank], submission.operation
        state.open[operation.name] = submission
        state.since[operation.name] = self.now
        if operation.kind in _SETS:
            state.num_sets_asked += 1
        elif operation.kind is OperationKind.JOIN:
            state.num_sets_asked = 0
        if operation.kind in (*_SETS, OperationKind.JOIN):
            state.blocked = submission
        about = 0 if operation.kind in _SETS else submission.number
        epoch = 0 if operation.name == "free" else submission.epoch  # which waits for those who have joined, too
        self.submissions[rank][about, epoch, operation.name].append(submission)

    def _submit_eagerly(self, rank: int, submission: Submission) -> bool:
        """Submit as a blocking call does, where it may; rank 0 carries it out if all others are there."""
        state, operation = self.ranks[rank], submission.operation
        cached = state.participant.cached.get(operation.name)
        may = self.transports and not (state.open or state.down or state.participant.outgoing)
        if not may or cached is None or cached.operation != operation or self.rng.random() < 0.05:
            return False
        if operation.kind is not OperationKind.ALLREDUCE or operation.members or operation.process_set:
            return False
        transport, slot = self.transports[rank], cached.slot
        state.num_eager += 1
        own = transport.eager.slots[transport.eager.count & 1][rank]
        assert own.size == max_eager_bytes(len(self.ranks))
        own[:8].view(np.int64)[0] = state.num_eager
        if rank:
            self._submitted(rank, submission)
            self._note("rank %d submits eagerly %d: %s", rank, slot, operation)
            assert not transport.eager.submit(slot, 0)
            state.participant.submitted_eagerly(cached)
            state.eager = cached
            return True
        if self._silent() or not self.coordinator.may_answer_eagerly(slot) or not transport.eager.answer(slot, 0):
            return False
        self._submitted(rank, submission)
        self._note("answered eagerly is %d", slot)
        where = -1 - len(self.eager_answers), 0
        self.eager_answers.append([other.num_eager for other in self.ranks])
        self.batches[where] = Batch(self.sets[0], (operation.name,))
        state.participant.submitted_eagerly(cached)
        self._execute_eagerly(rank, cached)
        return True

    def _execute_eagerly(self, rank: int, cached: CachedResponse) -> None:
        """Read all slots, after an answer."""
        state, eager = self.ranks[rank], self.transports[rank].eager
        found = [int(slot[:8].view(np.int64)[0]) for slot in eager.slots[(eager.count - 1) & 1]]
        assert found == self.eager_answers[eager.count - 1], "a slot holds something else than was submitted"
        state.participant.answered_eagerly(cached.operation.name)
        self._execute(rank, (-eager.count, 0), ExecuteBatch(((cached.operation, cached.response),)))

    def send(self, rank: int) -> bool:
        """What a rank has to say gets on its way."""
        state = self.ranks[rank]
        reports = state.participant.outgoing
        if not reports or state.gone == "died":
            return False
        state.participant.outgoing = []
        if self.channels and rank:
            self.channels[rank].send(reports)
        elif rank in self.mergers:
            self._merge(rank, rank, reports)
        else:
            state.up.extend(reports)
        return True

    def _merge(self, relay: int, sender: int, reports: Sequence[Report], later: float = 0.0) -> bool:
        """A relay takes in reports, and sends on what is to leave; whether something left."""
        merger = self.mergers[relay]
        merger.receive(1 << sender, reports, self.now)
        merger.validate_state()
        found = merger.take(self.now + later)
        self.ranks[relay].up.extend(found)
        self.num_merged += sum(isinstance(r, MergedReports) and len(r.ranks) > 0 and r.ranks != b"\1" for r in found)
        return bool(found)

    def release(self, rank: int) -> bool:
        """A relay has waited for others long enough, and sends what it keeps."""
        if rank not in self.mergers or self.ranks[rank].gone == "died":
            return False
        return self._merge(rank, rank, (), 2 * HOLD_SECONDS)

    def tell(self, rank: int) -> bool:
        """One report of a rank reaches the coordinator."""
        up = self.ranks[rank].up
        if self.channels and not up:
            for sender, reports in self.channels[0].receive():
                self.ranks[sender].up.extend(cast("Sequence[Report]", reports))
        if not up or self._silent():
            return False
        report = up.popleft()
        parent = 0 if self.tree is None else self.tree.parent(rank)
        if parent > 0:
            self._note("rank %d hears of rank %d: %s", parent, rank, report)
            if self.ranks[parent].gone != "died":
                self._merge(parent, rank, [report])
            return True
        self._note("coordinator hears of rank %d: %s", rank, report)
        if isinstance(report, MergedReports):
            for each in to_ranks(from_bytes(report.first, report.ranks)):
                for one in report.reports:
                    self._hear(each, one)
        else:
            self._hear(rank, report)
        self.coordinator.receive(rank, [report], self.now)
        self.coordinator.validate_state()
        return True

    def _hear(self, rank: int, report: Report) -> None:
        if isinstance(report, SubmitRequest):
            kind = report.operation.kind
            if kind is OperationKind.JOIN:
                self.joined.append(rank)
            elif (
                rank in self.joined and kind is not OperationKind.FREE
            ):  # said again: it has joined no earlier than now
                self.joined.remove(rank)
                self.joined.append(rank)

    def speak(self, _: int) -> bool:
        """The coordinator announces what follows from all that it has heard."""
        return not self._silent() and self._announce()

    def _silent(self) -> bool:
        """Whether rank 0's engine, which feeds the coordinator, stands still."""
        return bool(self.ranks[0].gone) or self.ranks[0].lost is not None

    def receive(self, rank: int) -> bool:
        """One announcement reaches a rank; without any, a rank may notice that another has died."""
        state = self.ranks[rank]
        if state.gone:
            if rank in self.mergers and state.gone == "left" and state.down:  # until it hears of its own shutdown
                self._pass_on(rank, *state.down.popleft())
                return True
            return False
        if self.channels and rank and not state.down:
            for _, announcements in self.channels[rank].receive():
                for heard in cast("Sequence[Announcement]", announcements):
                    state.down.append((state.num_heard, heard))
                    state.num_heard += 1
            if state.eager is not None and state.lost is None and self.transports[rank].eager.take_answer():
                self._note("rank %d reads an eager answer", rank)
                self._execute_eagerly(rank, state.eager)
                return True
        if not state.down:
            return self._notice(state)
        number, announcement = state.down.popleft()
        self._note("rank %d hears %s", rank, announcement)
        self._pass_on(rank, number, announcement)
        concerning = deque(w for w in self.runs.get(number, ()) if rank in self.batches[w].set_ranks)
        broken = state.participant.broken is not None
        instructions = state.participant.receive(announcement)
        state.participant.validate_state()
        for instruction in instructions:
            if isinstance(instruction, ExecuteBatch):
                self._execute(rank, concerning.popleft(), instruction)
            elif isinstance(instruction, TunedParameters):
                self._take_on(rank, number, instruction)
            else:
                self._fail(rank, number, instruction)
        assert broken or not concerning, "a rank passes over what it should take part in"
        return True

    def _pass_on(self, rank: int, number: int, announcement: Announcement) -> None:
        """A relay passes on an announcement to the ranks below it."""
        if rank not in self.mergers:
            return
        assert self.tree is not None
        self.mergers[rank].follow([announcement])
        self._merge(rank, rank, ())
        self.num_forwarded += 1
        for child in self.tree.children(rank):
            self.ranks[child].down.append((number, announcement))

    def _announce(self) -> bool:
        if self.plan.stops is not None and self.num_announced >= self.plan.stops and not self.stopped:
            self.coordinator.stop(DeadlineError("stalled", ranks=(0,)))
            self.stopped = True
        if self.tuning_rng.random() < self.tuning_share:
            self._choose_parameters()
        said = self.coordinator.announce(self.now)
        if not said:
            return False
        assert not self.stopped or isinstance(said[-1], JobAbort), "the end of a job is the last word"
        self.coordinator.validate_state()
        if self.channels:
            self.channels[0].send(said)
        for announcement in said:
            self._note("announced is %s", announcement)
            if isinstance(announcement, ErrorResponse):
                self.refused[self.num_announced] = announcement
                self._check_refusal(announcement)
            listeners = range(1 if self.channels else self.plan.size)
            for rank in listeners if self.tree is None else (0, *self.tree.children(0)):
                self.ranks[rank].down.append((self.num_announced, announcement))
            if isinstance(announcement, ResponseList):
                self._take_down(announcement)
            elif isinstance(announcement, TunedParameters):
                self.tuned[self.num_announced] = announcement
                self.threshold_bytes = announcement.fusion_threshold_bytes
            elif isinstance(announcement, CacheEviction):
                for slot in announcement.slots:
                    self.slots.pop(slot, None)
            self.num_announced += 1
        return True

    def _take_down(self, run: ResponseList) -> None:
        """For whom each batch is."""
        assert all(run.batches), "an empty batch"
        wheres = self.runs[self.num_announced] = []
        for place, batch in enumerate(run.batches):
            items = [(i.name, i.process_set) if isinstance(i, Response) else self.slots[i] for i in batch]
            [there] = {number for _, number in items}
            assert there in self.sets, "something is executed in a process set that is removed"
            where = self.num_announced, place
            wheres.append(where)
            self.batches[where] = Batch(self.sets[there], tuple(name for name, _ in items), self.threshold_bytes)
            for item in batch:
                if isinstance(item, Response):
                    self._take_down_response(item)
        if self.threshold_bytes == 0:
            assert all(len(batch) == 1 for batch in run.batches)

    def _take_down_response(self, response: Response) -> None:
        if response.slot >= 0:
            assert response.slot not in self.slots, "a slot is used twice"
            for slot in [s for s, meant in self.slots.items() if meant[0] == response.name]:
                del self.slots[slot]
            self.slots[response.slot] = response.name, response.process_set
            assert self.plan.capacity
        asked = [s.open[response.name].operation for s in self.ranks if response.name in s.open]
        operation = asked[0] if asked else None
        if operation is None or operation.kind not in (*_SETS, OperationKind.JOIN):
            return
        if operation.kind is OperationKind.JOIN:
            assert sorted(self.joined) == list(range(self.plan.size)), "JOIN is answered when all have joined"
            assert response.value == self.joined[-1], "the answer is the last that has joined"
            self.joined.clear()
        elif operation.kind is OperationKind.ADD_SET:
            assert response.value == min(set(range(1, len(self.sets) + 1)) - set(self.sets)), "the lowest free number"
            self.sets[response.value] = operation.shape
            self.numbers_given.append(response.value)
        else:
            del self.sets[operation.shape[0]]
            assert all(number in self.sets for _, number in self.slots.values()), "a removed set is still cached"

    # -- parameters

    def _choose_parameters(self) -> None:
        """Rank 0 chooses other parameters."""
        choose = self.tuning_rng.choice
        threshold, algorithm = choose((0, 40, 1 << 20)), choose(("ordered", "direct", "latency"))
        parameters = TunedParameters(
            len(self.chosen) + 1, threshold, choose((1, 2, 4)) << 20, algorithm, choose((1, 4))
        )
        self.chosen.append(parameters)
        self.coordinator.tune(parameters)
        self._note("chosen are %s", parameters)

    def _take_on(self, rank: int, number: int, parameters: TunedParameters) -> None:
        """A rank takes on parameters: behind every batch that was announced before them, and before all others."""
        state = self.ranks[rank]
        assert self.tuned[number] == parameters
        concerning = [where for where, batch in self.batches.items() if where[0] >= 0 and rank in batch.set_ranks]
        before = [where for where in concerning if where[0] < number]
        assert [where for where in state.executed if where[0] >= 0] == before, "taken on between other batches"
        state.tuned[number] = len(before)

    # -- faults

    def _leave(self, rank: int) -> bool:
        state = self.ranks[rank]
        state.participant.leave()
        self.send(rank)
        if rank == 0:  # its last act: it coordinates for itself, then for nobody
            while state.up:
                self.tell(0)
            self._announce()
        state.gone = "left"
        self._note("rank %d leaves", rank)
        return True

    def _die(self, rank: int) -> bool:
        state = self.ranks[rank]
        state.gone = "died"
        state.participant.outgoing = []
        self._note("rank %d dies", rank)
        return True

    def _notice(self, state: Rank) -> bool:
        gone = [r for r, other in enumerate(self.ranks) if other.gone and (other.gone == "died" or r == 0)]
        if not gone or state.participant.broken is not None:
            return False
        error = PeerLostError("gone", ranks=gone)
        failed = state.participant.lose(error)
        assert {f.name for f in failed if isinstance(f, FailOperation)} == set(state.open), (
            "a loss fails what is outstanding"
        )
        assert all(isinstance(f, FailOperation) and f.error.ranks == tuple(gone) for f in failed)
        state.participant.validate_state()
        state.lost, state.open, state.blocked = state.open, {}, None
        return True

    @staticmethod
    def _submit_twice(state: Rank, operation: Operation) -> None:
        before = list(state.participant.outgoing)
        with pytest.raises(DuplicateNameError):
            state.participant.submit(operation)
        assert state.participant.outgoing == before

    @staticmethod
    def _submit_to_broken(state: Rank, operation: Operation) -> None:
        with pytest.raises((PeerLostError, DeadlineError)) as caught:
            state.participant.submit(operation)
        assert caught.value.tensor == operation.name

    # -- checks as it goes

    def _execute(self, rank: int, where: Where, execute: ExecuteBatch) -> None:
        state, batch = self.ranks[rank], self.batches[where]
        assert tuple(operation.name for operation, _ in execute.batch) == batch.names
        if not batch.own:
            batch.own = [set() for _ in batch.names]
        for place, (operation, response) in enumerate(execute.batch):
            submission = state.open.pop(operation.name, None)
            if submission is None:
                assert state.waits_for_join, "a rank stands in that has not joined"
                assert operation == response.template
            else:
                assert submission.operation == operation, "executed is what was submitted, once"
                batch.own[place].add(rank)
                submission.ran = where
                self._came_to(rank, submission, response)
            for member in batch.set_ranks:
                other = self.ranks[member]
                there = other is state or other.has_submitted(operation.name) or where in other.executed
                assert there or other.has_submitted(JOIN_NAME), "executed before every rank had submitted or joined"
        state.executed.append(where)
        batch.executed[rank] = execute.batch

    def _came_to(self, rank: int, submission: Submission, response: Response) -> None:
        """A rank's submission is executed: what follows for its program."""
        state, kind = self.ranks[rank], submission.operation.kind
        if state.blocked is submission:
            state.blocked = None
        if kind is OperationKind.ADD_SET:
            self.ranks_by_set[submission.number] = submission.operation.shape
            state.sets[submission.number] = response.value
        elif kind is OperationKind.REMOVE_SET:
            del state.sets[submission.number]
            self.removed[submission.number] = state.epoch
        elif kind is OperationKind.JOIN:
            assert all(s.operation.kind is OperationKind.FREE for s in state.open.values()), (
                "JOIN is answered before the rest"
            )
            state.epoch += 1

    def _fail(self, rank: int, number: int, fail: FailOperation) -> None:
        state = self.ranks[rank]
        submission = state.open.pop(fail.name)
        if state.blocked is submission:
            state.blocked = None
        assert fail.error.tensor == fail.name
        if state.participant.broken is not None:
            state.lost = state.lost or {}
            state.lost[fail.name] = submission
            if isinstance(fail.error, PeerLostError):
                assert self.plan.leaves is not None
                assert fail.error.ranks == (self.plan.leaves[0],)
            else:
                assert self.stopped
                assert type(fail.error) is DeadlineError
        else:
            submission.refused = number
            self.refusals.setdefault(number, {})[rank] = submission.operation, fail.error

    def _check_refusal(self, refuse: ErrorResponse) -> None:
        submitted, at_fault = set(refuse.submitted), set(refuse.at_fault)
        assert submitted
        asked = [s.open[refuse.name].operation for s in self.ranks if refuse.name in s.open]
        if asked and at_fault:
            set_ranks = set(self.sets[asked[0].process_set])
            assert submitted | at_fault <= set_ranks
            assert set_ranks - submitted - at_fault <= set(self.joined), "a refusal is about all who have not joined"
        assert all(self.ranks[rank].has_submitted(refuse.name) or self.ranks[rank].gone for rank in submitted)
        if refuse.cause is ErrorCause.LATE:
            assert not submitted & at_fault
            assert at_fault
            assert self.plan.deadline_seconds < FOREVER, "refused as late without a deadline"
            first = min(self.ranks[rank].since[refuse.name] for rank in refuse.submitted)
            assert self.now >= first + self.plan.deadline_seconds, "refused as late too early"
        elif refuse.cause is ErrorCause.JOINED:
            assert not submitted & at_fault
            assert at_fault <= set(self.joined)
        elif "removed" in refuse.reason:
            assert not at_fault
        else:
            assert submitted == at_fault

    # -- checks at the end

    def _check_end(self) -> None:
        for (number, _), batch in self.batches.items():
            assert number not in self.refused
            if batch.executed:
                self._check_batch(batch)
        for number, refuse in self.refused.items():
            self._check_refused(refuse, self.refusals.get(number, {}))
        for rank, state in enumerate(self.ranks):
            concerning = [where for where, batch in self.batches.items() if rank in batch.set_ranks]
            assert state.executed == concerning[: len(state.executed)], "ranks executed in different orders"
        fault = any(state.gone for state in self.ranks) or self.stopped
        self._check_parameters(fault)
        for state in self.ranks:
            if state.gone:
                continue
            assert not [s for s in state.open.values() if s.operation.kind is not OperationKind.JOIN], "never answered"
            assert not state.open or (self.plan.deadline_seconds < FOREVER and len(self.joined) < self.plan.size)
            assert set(state.participant.pending) == set(state.open)
            assert not state.program or state.open
            assert (state.participant.broken is not None) == (fault and (self.plan.size > 1 or self.stopped))
        if not fault:
            assert all(set(batch.executed) == set(batch.set_ranks) for batch in self.batches.values())
            assert self.coordinator.next_expiry() is None, "a pending entry was left"
            if self.plan.deadline_seconds >= FOREVER:
                self._check_outcomes()

    def _check_parameters(self, fault: bool) -> None:
        """Every rank has taken on all that were announced, in order; those who met a fault, the first of them."""
        assert [*self.tuned.values()] == self.chosen[: len(self.tuned)]
        for state in self.ranks:
            taken = [*state.tuned]
            assert taken == [*self.tuned][: len(taken)]
            assert fault or len(taken) == len(self.tuned), "a rank goes on with other parameters than the rest"

    def _check_batch(self, batch: Batch) -> None:
        members = batch.executed
        ranks = sorted(members)
        assert all(len(m) == len(batch.names) for m in members.values())
        for place in range(len(batch.names)):
            operations = [members[rank][place][0] for rank in ranks]
            responses = [members[rank][place][1] for rank in ranks]
            assert all(response == responses[0] for response in responses)
            assert same_request(operations), "executed although ranks want different things"
            own = batch.own[place]
            if len(own) < len(ranks):
                assert responses[0].slot == -1
                assert can_be_stood_in_for(operations[0])
                assert responses[0].num_active == len(own) or len(ranks) < len(batch.set_ranks)
                self._check_not_in_place(responses[0], responses[0].template)
            elif len(ranks) == len(batch.set_ranks):
                assert responses[0].num_active == 0
                assert responses[0].template is None
            for rank, operation in zip(ranks, operations, strict=True):
                if rank in own:
                    self._check_parts(batch.set_ranks.index(rank), operation, responses[0], operations)
        self._check_fused(members[ranks[0]], batch.threshold_bytes)

    @staticmethod
    def _check_not_in_place(response: Response, template: Operation | None) -> None:
        assert template is not None
        for part, told in zip(template.parts, response.parts, strict=True):
            assert part.offset == -1
            assert not told.in_place

    @staticmethod
    def _check_parts(index: int, operation: Operation, response: Response, everybody: Sequence[Operation]) -> None:
        for place, (part, told) in enumerate(zip(operation.parts, response.parts, strict=True)):
            if part.kind is OperationKind.ALLGATHER:
                assert told.sizes[0][index] == part.shape[0]
            elif part.kind is OperationKind.ALLTOALL:
                assert told.sizes[index] == part.splits
            elif part.kind is OperationKind.EXCHANGE:
                assert told.payloads[index] == part.payload
            if told.in_place:
                assert all(other.parts[place].offset == part.offset >= 0 for other in everybody)

    def _check_fused(self, batch: Sequence[tuple[Operation, Response]], threshold_bytes: int) -> None:
        if len(batch) == 1:
            return
        parts = [p for o, r in batch for p in zip(o.parts, r.parts, strict=True)]
        assert {o.kind for o, _ in parts} == {OperationKind.ALLREDUCE}
        same = {(o.dtype, o.op, o.prescale, o.postscale, o.divide_by_active, o.process_set) for o, _ in parts}
        assert len(same) == 1
        assert len({response.num_active for _, response in batch}) == 1
        assert len({told.in_place for _, told in parts}) == 1
        assert self.plan.fuse_groups or not any(o.members for o, _ in batch)
        sizes = [o.shape[0] * o.shape[1] * DTYPES[o.dtype].itemsize for o, _ in parts]
        assert sum(sizes) <= threshold_bytes

    def _check_refused(self, refuse: ErrorResponse, heard: dict[int, tuple[Operation, CollectiveError]]) -> None:
        expected = {rank for rank in refuse.submitted if not self.ranks[rank].gone and self.ranks[rank].lost is None}
        assert expected <= set(heard) <= set(refuse.submitted), "a refusal did not reach who had submitted"
        kind = {ErrorCause.LATE: DeadlineError, ErrorCause.JOINED: JoinedError, ErrorCause.MISMATCH: MismatchError}[
            refuse.cause
        ]
        for operation, error in heard.values():
            assert operation.name == refuse.name
            assert type(error) is kind
            assert error.ranks == refuse.at_fault
            assert refuse.cause is not ErrorCause.MISMATCH or set(error.details) == set(refuse.at_fault)
        if refuse.cause is ErrorCause.MISMATCH and refuse.at_fault and set(heard) == set(refuse.submitted):
            assert not same_request([operation for operation, _ in heard.values()]), "refused although all agree"

    def _check_outcomes(self) -> None:
        """Without faults everything is determined: what belongs together agrees and runs, or is refused."""
        keys = {key: None for of_rank in self.submissions for key in of_rank}
        for key in keys:
            set_ranks = self.ranks_by_set[key[0]]
            of_ranks = {rank: self.submissions[rank].get(key, []) for rank in set_ranks}
            for k in range(max(map(len, of_ranks.values()))):
                together = {rank: s[k] for rank, s in of_ranks.items() if k < len(s)}
                self._check_outcome(key[0], together, [rank for rank in set_ranks if rank not in together])

    def _check_outcome(self, number: int, together: Mapping[int, Submission], missing: Sequence[int]) -> None:
        submissions = list(together.values())
        operations = [s.operation for s in submissions]
        refusals = [self.refused[s.refused] for s in submissions if s.refused is not None]
        if any("removed" in refuse.reason for refuse in refusals):
            assert number in self.removed, "refused although the set is there"
            assert all("removed" in refuse.reason for refuse in refusals)
            assert len(refusals) == len(submissions)
            assert missing or self.plan.capacity not in (0, 1024), "refused although all had submitted before"
            return
        assert not (missing and self.removed.get(number) == submissions[0].epoch), "waits in a removed set"
        agree = same_request(operations)
        if agree and (not missing or can_be_stood_in_for(operations[0])):
            [where] = {s.ran for s in submissions}
            assert where is not None, "refused although all agree"
            assert set(missing) <= set(self.batches[where].executed), "a joined rank did not take part"
        else:
            [refused] = {s.refused for s in submissions}
            assert refused is not None, "executed although it should not be"
            if agree:
                assert self.refused[refused].cause is ErrorCause.JOINED
                assert set(self.refused[refused].at_fault) == set(missing)
            else:
                assert self.refused[refused].cause is ErrorCause.MISMATCH or missing

    def names_submitted_again(self) -> bool:
        """Whether some rank submitted some name more than once."""
        return any(len(s) > 1 for of_rank in self.submissions for s in of_rank.values())


def play(seed: int) -> Simulation:
    """Run one schedule; a failure tells its seed and the last events."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:
        events = "\n  ".join(simulation.log()[-40:])
        raise AssertionError(
            f"schedule of seed {seed} failed: {error!r}; replay with REIGEN_SIM_SEED={seed}\n"
            f"  {simulation.plan}\n  {events}"
        ) from error
    return simulation
