"""A seeded simulator of negotiation: the pure state machines over in-memory queues, with time and faults made up.

One seed is one schedule: how many ranks, what each submits in which order, how long every message takes, what goes
wrong. What must come of it is known without asking the machines: the k-th submission of a name on one rank belongs to
the k-th on every other.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from reigen.engine.messages import (
    Announcement,
    Cause,
    Kind,
    Operation,
    Refuse,
    Report,
    Response,
    Run,
    decode_announcements,
    decode_reports,
    encode,
)
from reigen.engine.negotiation import Coordinator, Execute, Fail, Participant
from reigen.errors import CollectiveError, DeadlineError, DuplicateNameError, MismatchError, PeerLostError
from reigen.types import DTYPES, ReduceOp

FOREVER = 1e9


@dataclass(frozen=True)
class Plan:
    """What one seed stands for."""

    size: int
    capacity: int
    threshold_bytes: int
    deadline_seconds: float
    #: for each rank, what it submits, in order
    programs: list[list[Operation]]
    #: (rank, after how many of its submissions) or None
    leaves: tuple[int, int] | None
    dies: tuple[int, int] | None
    #: messages travel as bytes
    encoded: bool
    #: how likely each kind of event is
    weights: tuple[int, ...]


def make_plan(rng: random.Random) -> Plan:
    """Draw a schedule's parameters."""
    size = rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 5, 6))
    fault = rng.choice(("", "", "", "", "late", "late", "leave", "die", "die"))
    programs = _programs(rng, size)
    where = (rng.randrange(size), rng.randrange(5))
    if fault == "late" and size > 1:
        for program in programs:  # some ranks lack some submissions
            if rng.random() < 0.5 and program:
                del program[rng.randrange(len(program)) :]
    return Plan(
        size=size,
        capacity=rng.choice((0, 1, 2, 4, 1024, 1024)),
        threshold_bytes=rng.choice((0, 40, 1 << 20)),
        deadline_seconds=5.0 if fault == "late" else FOREVER,
        programs=programs,
        leaves=where if fault == "leave" else None,
        dies=where if fault == "die" else None,
        encoded=rng.random() < 0.1,
        weights=(*(rng.choice((1, 1, 3, 9)) for _ in range(4)), rng.choice((0, 1, 3))),
    )


def _programs(rng: random.Random, size: int) -> list[list[Operation]]:
    """Steps that use the same names again, in an order of its own on each rank; now and then something new."""
    names = [f"t{i}" for i in range(rng.randrange(1, 5))]
    kinds = rng.choice((_KINDS, (Kind.ALLREDUCE,)))
    current: dict[str, list[Operation]] = {name: _operations(rng, name, size, kinds) for name in names}
    programs: list[list[Operation]] = [[] for _ in range(size)]
    for _ in range(rng.randrange(1, 5)):
        for name in names:
            if rng.random() < 0.25:  # what is cached does not hold any more
                current[name] = _operations(rng, name, size, kinds)
            elif rng.random() < 0.25:  # on one rank alone
                rank = rng.randrange(size)
                current[name] = [*current[name][:rank], _varied(rng, current[name][rank]), *current[name][rank + 1 :]]
        for rank, program in enumerate(programs):
            program.extend(current[name][rank] for name in rng.sample(names, len(names)))
    return programs


def _operations(rng: random.Random, name: str, size: int, kinds: Sequence[Kind]) -> list[Operation]:
    kind = rng.choice(kinds)
    rows, columns = rng.randrange(5), rng.randrange(1, 4)
    common: dict[str, Any] = {"kind": kind, "name": name, "dtype": rng.choice(("float32", "float32", "float16"))}
    if kind is Kind.BARRIER:
        common["dtype"] = ""
    elif kind is Kind.ALLOCATE:
        common |= {"dtype": "", "shape": (4096,)}
    elif kind is Kind.FREE:
        common |= {"dtype": "", "offset": 64}
    else:
        common["shape"] = (rows, columns)
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        common |= {"op": rng.choice((ReduceOp.SUM, ReduceOp.MAX)), "prescale": rng.choice((1.0, 1.0, 0.5))}
    if kind is Kind.ALLREDUCE and rng.random() < 0.3:
        common["offset"] = 128
    if kind is Kind.BROADCAST:
        common["root"] = rng.randrange(size)
    operations = [Operation(**common) for _ in range(size)]
    if kind is Kind.ALLGATHER:
        operations = [_changed(o, shape=(rng.randrange(3), columns)) for o in operations]
    if kind is Kind.ALLTOALL:
        splits = [tuple(rng.randrange(3) for _ in range(size)) for _ in range(size)]
        operations = [_changed(o, shape=(sum(s), columns), splits=s) for o, s in zip(operations, splits, strict=True)]
    if size > 1 and rng.random() < 0.25:
        odd = rng.randrange(size)
        operations[odd] = _spoiled(rng, operations[odd])
    return operations


_SINGLE = tuple(kind for kind in Kind if kind not in (Kind.JOIN, Kind.ADD_SET, Kind.REMOVE_SET))
_KINDS = (Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.ALLREDUCE, *_SINGLE)


def _changed(operation: Operation, **changes: Any) -> Operation:
    values = {name: getattr(operation, name) for name in operation.__struct_fields__}
    return Operation(**values | changes)


def _varied(rng: random.Random, o: Operation) -> Operation:
    """Another operation, which goes with the same ones of other ranks if ranks may differ in it."""
    if o.kind is Kind.ALLGATHER and o.shape:
        return _changed(o, shape=(rng.randrange(6), *o.shape[1:]))
    if o.kind is Kind.ALLTOALL and o.shape:
        splits = tuple(rng.randrange(4) for _ in o.splits)
        return _changed(o, shape=(sum(splits), *o.shape[1:]), splits=splits)
    return _spoiled(rng, o)


def _spoiled(rng: random.Random, o: Operation) -> Operation:
    """The operation with one thing different that may or may not matter to its kind."""
    changes: list[dict[str, Any]] = [
        {"kind": Kind.BROADCAST, "root": 0},
        {"dtype": "int64"},
        {"shape": (*o.shape, 1)},
        {"shape": (o.shape[0] + 1, *o.shape[1:]) if o.shape else (1,)},
        {"op": ReduceOp.MIN},
        {"prescale": 7.0},
        {"postscale": 7.0},
        {"root": o.root + 1},
        {"offset": o.offset + 1000},
    ]
    return _changed(o, **rng.choice(changes))


def same_request(operations: list[Operation]) -> bool:
    """Whether ranks that ask for this ask for one thing; written down anew from the documentation."""

    def facts(o: Operation) -> tuple[object, ...]:
        match o.kind:
            case Kind.ALLREDUCE | Kind.REDUCESCATTER:
                return (o.shape, o.op, o.prescale, o.postscale)
            case Kind.BROADCAST:
                return (o.shape, o.root)
            case Kind.ALLGATHER | Kind.ALLTOALL:
                return o.shape[1:]
            case Kind.ALLOCATE:
                return (o.shape,)
            case Kind.FREE:
                return (o.offset,)
        return ()

    return len({(o.kind, o.dtype, facts(o)) for o in operations}) == 1


@dataclass
class Rank:
    """A rank as the simulator sees it."""

    participant: Participant
    program: deque[Operation]
    #: on their way to the coordinator, and from it with their numbers
    up: deque[Report] = field(default_factory=deque)
    down: deque[tuple[int, Announcement]] = field(default_factory=deque)
    #: submitted and not answered
    open: dict[str, Operation] = field(default_factory=dict)
    num_submitted: int = 0
    #: when each name was last submitted
    since: dict[str, float] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)
    #: batches by number of announcement and place in it: what this rank submitted for each member
    executed: list[tuple[int, int]] = field(default_factory=list)
    gone: str = ""
    #: what was outstanding when this rank learned that another is gone; None before
    lost: dict[str, Operation] | None = None

    def has_submitted(self, name: str) -> bool:
        """Whether the name is, or was to the last, outstanding."""
        return name in (self.open if self.lost is None else self.lost)


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.plan = plan = make_plan(self.rng)
        self.now = 0.0
        self.coordinator = Coordinator(plan.size, plan.capacity, plan.threshold_bytes, plan.deadline_seconds)
        self.ranks = [Rank(Participant(r), deque(p)) for r, p in enumerate(plan.programs)]
        self.num_announced = 0
        #: (announcement, batch) -> rank -> its operations and the responses
        self.batches: dict[tuple[int, int], dict[int, tuple[tuple[Operation, Response], ...]]] = {}
        #: announcement -> rank -> its operation and error
        self.refusals: dict[int, dict[int, tuple[Operation, CollectiveError]]] = {}
        self.refused: dict[int, Refuse] = {}
        self.log: list[str] = []

    # -- running

    def run(self) -> None:
        """Play the schedule to its end and check what has come of it."""
        actions = [a for a, w in zip(self._actions(), self.plan.weights, strict=True) for _ in range(w)]
        size, pick = self.plan.size, self.rng.random
        idle = 0
        while idle < 2:
            for _ in range(12 * size):
                rank = int(pick() * size)
                actions[int(pick() * len(actions))](rank)
            # then everything that is under way arrives, rank by rank: the schedule has an end
            idle = idle + 1 if not self._sweep() else 0
            if idle and self._pass_time():
                idle = 0
        self._check_end()

    def _actions(self) -> tuple[Any, ...]:
        return self.submit, self.send, self.hear, self.tell, self.speak

    def _sweep(self) -> bool:
        moved = False
        for action in (self.submit, self.send, self.tell, self.speak, self.hear):
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
        if not state.program:
            return False
        operation = state.program[0]
        if operation.name in state.open:
            if self.rng.random() < 0.05:
                self._submit_twice(state, operation)
            return False
        state.program.popleft()
        state.num_submitted += 1
        if state.participant.broken is not None:
            self._submit_to_broken(state, operation)
            return True
        state.participant.submit(operation)
        state.open[operation.name] = operation
        state.count[operation.name] += 1
        state.since[operation.name] = self.now
        self.log.append(f"{self.now:g}: rank {rank} submits {operation}")
        state.participant.validate_state()
        if self.plan.deadline_seconds < FOREVER and self.rng.random() < 0.3:
            self.now += self.rng.random() * 2
        return True

    def send(self, rank: int) -> bool:
        """What a rank has to say gets on its way."""
        state = self.ranks[rank]
        reports = state.participant.outgoing
        if not reports or state.gone == "died":
            return False
        state.participant.outgoing = []
        state.up.extend(decode_reports(encode(reports)) if self.plan.encoded else reports)
        return True

    def tell(self, rank: int) -> bool:
        """One report of a rank reaches the coordinator."""
        up = self.ranks[rank].up
        if not up or self._silent():
            return False
        report = up.popleft()
        self.log.append(f"{self.now:g}: coordinator hears {report} of rank {rank}")
        self.coordinator.hear(rank, report, self.now)
        self.coordinator.validate_state()
        return True

    def speak(self, _: int) -> bool:
        """The coordinator announces what follows from all that it has heard."""
        return not self._silent() and self._announce()

    def _silent(self) -> bool:
        """Whether rank 0's engine, which feeds the coordinator, stands still."""
        return bool(self.ranks[0].gone) or self.ranks[0].lost is not None

    def hear(self, rank: int) -> bool:
        """One announcement reaches a rank; without any, a rank may notice that another has died."""
        state = self.ranks[rank]
        if state.gone:
            return False
        if not state.down:
            return self._notice(state)
        number, announcement = state.down.popleft()
        self.log.append(f"{self.now:g}: rank {rank} hears {announcement}")
        instructions = state.participant.hear(announcement)
        state.participant.validate_state()
        place = 0
        for instruction in instructions:
            if isinstance(instruction, Execute):
                self._execute(rank, (number, place), instruction)
                place += 1
            else:
                self._fail(rank, number, instruction)
        return True

    def _announce(self) -> bool:
        said = self.coordinator.announce(self.now)
        self.coordinator.validate_state()
        heard = decode_announcements(encode(said)) if said and self.plan.encoded else said
        for announcement in heard:
            if isinstance(announcement, Refuse):
                self.refused[self.num_announced] = announcement
                self._check_refusal(announcement)
            for state in self.ranks:
                state.down.append((self.num_announced, announcement))
            if isinstance(announcement, Run):
                self._check_fusion(announcement)
            self.num_announced += 1
        return bool(said)

    # -- faults

    def _leave(self, rank: int) -> bool:
        state = self.ranks[rank]
        state.participant.leave()
        self.send(rank)
        if rank == 0:  # its last act: it coordinates for itself, then for nobody
            while state.up:
                self.coordinator.hear(0, state.up.popleft(), self.now)
            self._announce()
        state.gone = "left"
        self.log.append(f"{self.now:g}: rank {rank} leaves")
        return True

    def _die(self, rank: int) -> bool:
        state = self.ranks[rank]
        state.gone = "died"
        state.participant.outgoing = []
        self.log.append(f"{self.now:g}: rank {rank} dies")
        return True

    def _notice(self, state: Rank) -> bool:
        gone = [r for r, other in enumerate(self.ranks) if other.gone and (other.gone == "died" or r == 0)]
        if not gone or state.participant.broken is not None:
            return False
        error = PeerLostError("gone", ranks=gone)
        failed = state.participant.lose(error)
        assert {f.name for f in failed if isinstance(f, Fail)} == set(state.open), "a loss fails what is outstanding"
        assert all(isinstance(f, Fail) and f.error.ranks == tuple(gone) for f in failed)
        state.participant.validate_state()
        state.lost, state.open = state.open, {}
        return True

    @staticmethod
    def _submit_twice(state: Rank, operation: Operation) -> None:
        before = list(state.participant.outgoing)
        with pytest.raises(DuplicateNameError):
            state.participant.submit(operation)
        assert state.participant.outgoing == before

    @staticmethod
    def _submit_to_broken(state: Rank, operation: Operation) -> None:
        with pytest.raises(PeerLostError) as caught:
            state.participant.submit(operation)
        assert caught.value.tensor == operation.name

    # -- checks

    def _execute(self, rank: int, where: tuple[int, int], execute: Execute) -> None:
        state = self.ranks[rank]
        for operation, _ in execute.batch:
            assert state.open.pop(operation.name) == operation, "executed is what was submitted, once"
            for other in self.ranks:
                there = other is state or other.has_submitted(operation.name) or where in other.executed
                assert there, "executed before every rank had submitted"
        state.executed.append(where)
        self.batches.setdefault(where, {})[rank] = execute.batch

    def _fail(self, rank: int, number: int, fail: Fail) -> None:
        state = self.ranks[rank]
        operation = state.open.pop(fail.name)
        assert fail.error.tensor == fail.name
        if isinstance(fail.error, PeerLostError):
            state.lost = state.lost or {}
            state.lost[fail.name] = operation
            assert self.plan.leaves is not None
            assert fail.error.ranks == (self.plan.leaves[0],)
        else:
            self.refusals.setdefault(number, {})[rank] = operation, fail.error

    def _check_fusion(self, run: Run) -> None:
        assert all(run.batches), "an empty batch"
        if self.plan.threshold_bytes == 0:
            assert all(len(batch) == 1 for batch in run.batches)

    def _check_refusal(self, refuse: Refuse) -> None:
        if refuse.cause is Cause.LATE:
            assert set(refuse.submitted) | set(refuse.at_fault) == set(range(self.plan.size))
            assert not set(refuse.submitted) & set(refuse.at_fault)
            assert refuse.submitted
            assert refuse.at_fault
            assert self.plan.deadline_seconds < FOREVER, "refused as late without a deadline"
            assert all(self.ranks[rank].has_submitted(refuse.name) for rank in refuse.submitted)
            first = min(self.ranks[rank].since[refuse.name] for rank in refuse.submitted)
            assert self.now >= first + self.plan.deadline_seconds, "refused as late too early"
        else:
            assert refuse.submitted == refuse.at_fault == tuple(range(self.plan.size))

    def _check_end(self) -> None:
        for (number, _), members in self.batches.items():
            assert number not in self.refused
            self._check_batch(members)
        for number, refuse in self.refused.items():
            self._check_refused(refuse, self.refusals.get(number, {}))
        longest = max((state.executed for state in self.ranks), key=len)
        for state in self.ranks:
            assert state.executed == longest[: len(state.executed)], "ranks executed in different orders"
        survivors = [state for state in self.ranks if not state.gone]
        fault = any(state.gone for state in self.ranks)
        for state in survivors:
            assert not state.open, "a submission was never answered"
            assert not state.participant.pending
            assert not state.program
            assert (state.participant.broken is not None) == (fault and self.plan.size > 1)
            if not fault:
                assert state.executed == longest
        if not fault:
            self._check_outcomes()
            assert self.coordinator.next_expiry() is None, "a pending entry was left"

    def _check_batch(self, members: dict[int, tuple[tuple[Operation, Response], ...]]) -> None:
        ranks = sorted(members)
        for place in range(len(members[ranks[0]])):
            assert all(len(m) == len(members[ranks[0]]) for m in members.values())
            operations = [members[rank][place][0] for rank in ranks]
            assert same_request(operations), "executed although ranks want different things"
            for rank in ranks:
                operation, response = members[rank][place]
                assert response.name == operation.name
                if operation.kind is Kind.ALLGATHER:
                    assert response.sizes[0][rank] == operation.shape[0]
                elif operation.kind is Kind.ALLTOALL:
                    assert response.sizes[rank] == operation.splits
                if response.in_place:
                    assert operation.offset == operations[0].offset >= 0
        batch = [operation for operation, _ in members[ranks[0]]]
        if len(batch) > 1:
            assert {(o.kind, o.dtype, o.op, o.prescale, o.postscale) for o in batch} == {
                (Kind.ALLREDUCE, batch[0].dtype, batch[0].op, batch[0].prescale, batch[0].postscale)
            }
            assert len({response.in_place for _, response in members[ranks[0]]}) == 1
            sizes = [o.shape[0] * o.shape[1] * DTYPES[o.dtype].itemsize for o in batch]
            assert sum(sizes) <= self.plan.threshold_bytes

    def _check_refused(self, refuse: Refuse, heard: dict[int, tuple[Operation, CollectiveError]]) -> None:
        expected = {rank for rank in refuse.submitted if not self.ranks[rank].gone and self.ranks[rank].lost is None}
        assert expected <= set(heard) <= set(refuse.submitted), "a refusal did not reach who had submitted"
        for operation, error in heard.values():
            assert operation.name == refuse.name
            assert isinstance(error, DeadlineError if refuse.cause is Cause.LATE else MismatchError)
            assert error.ranks == refuse.at_fault
            assert refuse.cause is Cause.LATE or set(error.details) == set(range(self.plan.size))
        if refuse.cause is not Cause.LATE and len(heard) == self.plan.size:
            assert not same_request([operation for operation, _ in heard.values()]), "refused although all agree"

    def _check_outcomes(self) -> None:
        """Without faults everything is determined: the k-th submissions of a name agree and run, or are refused."""
        if self.plan.deadline_seconds < FOREVER:
            return
        expected: Counter[tuple[str, bool]] = Counter()
        for name in {o.name for program in self.plan.programs for o in program}:
            for together in zip(*([o for o in p if o.name == name] for p in self.plan.programs), strict=True):
                expected[name, same_request(list(together))] += 1
        found: Counter[tuple[str, bool]] = Counter()
        for members in self.batches.values():
            found.update((operation.name, True) for operation, _ in members[0])
        found.update((refuse.name, False) for refuse in self.refused.values())
        assert found == expected


def play(seed: int) -> Simulation:
    """Run one schedule; a failure tells its seed and the last events."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:
        events = "\n  ".join(simulation.log[-40:])
        raise AssertionError(
            f"schedule of seed {seed} failed: {error!r}; replay with REIGEN_SIM_SEED={seed}\n"
            f"  {simulation.plan}\n  {events}"
        ) from error
    return simulation
