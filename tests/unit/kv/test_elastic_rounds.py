"""Rounds of an elastic job: workers come, go, and die, while the shards of a key are in different rounds."""

from __future__ import annotations

import math
import os
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from reigen.cluster.membership.members import LossPolicy
from reigen.kv.consistency.state_machine import (
    AcknowledgePush,
    AnswerPull,
    ApplyPush,
    CombineRound,
    ConsistencyEngine,
    ConsistencyEvent,
    ConsistencyInstruction,
    DropRequest,
    FailRequest,
    PullRequested,
    PushReceived,
    RepeatAcknowledgement,
    RoundRecovered,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerPresence,
)

ASYNC = math.inf
ELASTIC = LossPolicy.ELASTIC


def handle(engine: ConsistencyEngine, *events: ConsistencyEvent) -> list[ConsistencyInstruction]:
    """Take events in, with the invariants after each; returns what the last one leads to."""
    instructions: list[ConsistencyInstruction] = []
    for event in events:
        instructions = engine.handle(event)
        engine.validate()
    return instructions


def test_absent_workers_are_not_expected() -> None:
    engine = ConsistencyEngine(4, present=[0, 2])
    assert handle(engine, PushReceived(0, 1, "a1")) == []
    assert [wait.workers for wait in engine.waits()] == [(2,)]
    assert handle(engine, PushReceived(2, 1, "c1")) == [
        CombineRound(1, (0, 2), ("a1", "c1"), 1.0), AcknowledgePush(0, 1, "a1"), AcknowledgePush(2, 1, "c1"),
    ]  # fmt: skip
    (failure,) = handle(engine, PushReceived(1, 2, "b2"))
    assert isinstance(failure, FailRequest)
    assert failure.workers == (1,)


def test_what_a_dead_worker_has_pushed_is_dropped_with_it() -> None:
    engine = ConsistencyEngine(3)
    handle(engine, PushReceived(0, 1, "a1"), PushReceived(1, 1, "b1"), PushReceived(1, 2, "b2"))
    assert handle(engine, WorkerLost(1, ELASTIC)) == [DropRequest("b1"), DropRequest("b2")]
    assert handle(engine, PushReceived(2, 1, "c1"))[0] == CombineRound(1, (0, 2), ("a1", "c1"), 1.0)


def test_the_last_one_that_is_waited_for_dies() -> None:
    engine = ConsistencyEngine(2)
    handle(engine, PushReceived(0, 1, "a1"), PullRequested(0, 1, "pull"))
    assert handle(engine, WorkerLost(1, ELASTIC)) == [
        CombineRound(1, (0,), ("a1",), 1.0), AcknowledgePush(0, 1, "a1"), AnswerPull(0, "pull"),
    ]  # fmt: skip


def test_a_round_counts_those_of_its_beginning() -> None:
    engine = ConsistencyEngine(3, present=[0, 1])
    assert handle(engine, WorkerJoined(2)) == [RoundRecovered(2, 0)]  # nobody has pushed yet
    handle(engine, WorkerLost(2, ELASTIC), PushReceived(0, 1, "a1"))
    assert handle(engine, WorkerJoined(2)) == [RoundRecovered(2, 1)]
    assert handle(engine, PullRequested(2, 1, "pull")) == []  # it sees the round that goes on without it
    assert handle(engine, PushReceived(1, 1, "b1")) == [
        CombineRound(1, (0, 1), ("a1", "b1"), 1.0), AcknowledgePush(0, 1, "a1"), AcknowledgePush(1, 1, "b1"),
        AnswerPull(2, "pull"),
    ]  # fmt: skip
    handle(engine, PushReceived(0, 2, "a2"), PushReceived(1, 2, "b2"))
    assert [wait.workers for wait in engine.waits()] == [(2,), (2,)]


def test_a_newcomer_begins_with_one_round_in_all_shards() -> None:
    """It hears 0 of the first shard and 2 of the second one, where the others are ahead."""
    first, second = ConsistencyEngine(2, present=[0]), ConsistencyEngine(2, present=[0])
    handle(second, PushReceived(0, 1, "x1"), PushReceived(0, 2, "x2"))
    assert handle(first, WorkerJoined(1)) == [RoundRecovered(1, 0)]
    assert handle(second, WorkerJoined(1)) == [RoundRecovered(1, 2)]
    assert handle(first, WorkerJoined(1, 2)) == [RoundRecovered(1, 2)]
    assert handle(second, WorkerJoined(1, 2)) == [RoundRecovered(1, 2)]
    assert handle(first, PushReceived(1, 3, "y3")) == []
    assert handle(first, PushReceived(0, 1, "a1"))[0] == CombineRound(1, (0,), ("a1",), 1.0)
    assert handle(first, PushReceived(0, 2, "a2"))[0] == CombineRound(2, (0,), ("a2",), 1.0)
    assert handle(first, PushReceived(0, 3, "a3"))[0] == CombineRound(3, (0, 1), ("a3", "y3"), 1.0)


def test_rounds_without_anybody_are_over() -> None:
    """The others have died where this shard was behind: the newcomer's pull of round 2 waits for nobody."""
    engine = ConsistencyEngine(2, present=[0])
    handle(engine, WorkerJoined(1), WorkerJoined(1, 2))
    assert handle(engine, PullRequested(1, 2, "pull")) == []
    assert handle(engine, WorkerLost(0, ELASTIC)) == [AnswerPull(1, "pull")]
    assert handle(engine, PushReceived(1, 3, "b3"))[0] == CombineRound(3, (1,), ("b3",), 1.0)


def test_rounds_go_on_when_all_have_died() -> None:
    engine = ConsistencyEngine(2)
    handle(engine, PushReceived(0, 1, "a1"), WorkerLost(0, ELASTIC), WorkerLost(1, ELASTIC))
    assert handle(engine, WorkerJoined(1)) == [RoundRecovered(1, 0)]
    assert handle(engine, PushReceived(1, 1, "b1"))[0] == CombineRound(1, (1,), ("b1",), 1.0)


@pytest.mark.parametrize("staleness", [1.0, ASYNC])
def test_a_newcomer_where_pushes_are_applied_one_by_one(staleness: float) -> None:
    engine = ConsistencyEngine(3, staleness, present=[0, 1])
    handle(engine, PushReceived(0, 1, "a1"), PushReceived(1, 1, "b1"), PushReceived(1, 2, "b2"))
    handle(engine, WorkerLost(1, ELASTIC))
    (recovered,) = handle(engine, WorkerJoined(1))
    assert recovered == RoundRecovered(1, 2)  # above all rounds that another process has had under this number
    assert handle(engine, WorkerJoined(1, 5)) == [RoundRecovered(1, 5)]
    assert handle(engine, PushReceived(1, 6, "b6")) == [ApplyPush(1, 6, "b6"), AcknowledgePush(1, 6, "b6")]


def test_another_connection_of_one_that_has_left_changes_nothing() -> None:
    engine = ConsistencyEngine(2)
    handle(engine, PushReceived(0, 1, "a1"), WorkerLeft(1))
    assert handle(engine, WorkerJoined(1, 0)) == [RoundRecovered(1, 1)]
    assert handle(engine, PushReceived(0, 2, "a2"))[0] == CombineRound(2, (0,), ("a2",), 1.0)


def restarted(engine: ConsistencyEngine, *candidates: int) -> ConsistencyEngine:
    return ConsistencyEngine.from_state(engine.state(), candidates)


def test_a_restarted_server_waits_for_those_who_may_be_there() -> None:
    before = ConsistencyEngine(4, present=[0, 1, 2])
    handle(before, *(PushReceived(worker, 1, f"{worker}1") for worker in range(3)), PushReceived(0, 2, "lost"))
    engine = restarted(before, 0, 1, 2)
    assert handle(engine, WorkerJoined(0, 0)) == [RoundRecovered(0, 1)]  # round 1 is over, though it was not told
    assert handle(engine, PushReceived(0, 1, "a1 again")) == [RepeatAcknowledgement(0, 1, "a1 again")]
    assert handle(engine, PushReceived(0, 2, "a2"), WorkerJoined(1, 1), PushReceived(1, 2, "b2")) == []
    assert [wait.workers for wait in engine.waits()] == [(2,), (2,)]
    assert handle(engine, WorkerLost(2, ELASTIC))[0] == CombineRound(2, (0, 1), ("a2", "b2"), 1.0)


def test_a_restarted_server_hears_again_who_has_joined_for_a_later_round() -> None:
    before = ConsistencyEngine(2, present=[0])
    handle(before, PushReceived(0, 1, "a1"), WorkerJoined(1), WorkerJoined(1, 3))
    engine = restarted(before, 0, 1)
    handle(engine, WorkerJoined(1, 3), WorkerJoined(0, 1))
    assert handle(engine, PushReceived(0, 2, "a2"))[0] == CombineRound(2, (0,), ("a2",), 1.0)
    handle(engine, PushReceived(0, 3, "a3"))
    assert handle(engine, PushReceived(0, 4, "a4")) == []
    assert handle(engine, PushReceived(1, 4, "b4"))[0] == CombineRound(4, (0, 1), ("a4", "b4"), 1.0)


def test_a_restarted_server_applies_what_comes_again_once_where_pushes_are_applied_one_by_one() -> None:
    before = ConsistencyEngine(2, ASYNC)
    handle(before, PushReceived(0, 1, "a1"), PushReceived(0, 2, "a2"))
    engine = restarted(before, 0, 1)
    assert handle(engine, PullRequested(1, 0, "early")) == []
    assert handle(engine, WorkerJoined(1, 0)) == [RoundRecovered(1, 0), AnswerPull(1, "early")]
    assert handle(engine, WorkerJoined(0, 1)) == [RoundRecovered(0, 2)]
    assert handle(engine, PushReceived(0, 2, "a2 again")) == [RepeatAcknowledgement(0, 2, "a2 again")]
    assert handle(engine, PushReceived(0, 3, "a3")) == [ApplyPush(0, 3, "a3"), AcknowledgePush(0, 3, "a3")]


# -- random schedules -------------------------------------------------------------------------------------------------


class Resume(WorkerJoined, frozen=True):
    """What a process says first on another connection."""


@dataclass
class Process:
    """A worker's process: what is on its way to each shard, what was not answered, and what it has heard."""

    name: int
    place: int
    inboxes: list[deque[ConsistencyEvent]]
    lives: bool = True
    round: int | None = None
    heard: dict[int, int] = field(default_factory=dict)
    has_asked_again: bool = False
    acknowledged: Counter[int] = field(default_factory=Counter)
    is_gone: set[int] = field(default_factory=set)
    #: by shard, its rounds that are over, and what was not answered
    over: Counter[int] = field(default_factory=Counter)
    unanswered: list[list[ConsistencyEvent]] = field(default_factory=list)

    def send(self, shard: int, event: ConsistencyEvent) -> None:
        self.inboxes[shard].append(event)
        self.unanswered[shard].append(event)

    def answered(self, shard: int, kind: type, round: int | None = None) -> None:
        left = self.unanswered[shard]
        one = next((each for each in left if type(each) is kind and round in {None, each.round}), None)  # type: ignore[union-attr]
        if one is not None:
            left.remove(one)


class Schedule:
    """One seed: places, shards, processes that are killed at any moment, and servers that are started again."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.staleness = rng.choice((0, 0, 0, 2, ASYNC))
        self.num_places, self.num_shards = rng.randint(1, 4), rng.randint(1, 3)
        self.last = rng.randint(3, 12)
        first = range(rng.randint(1, self.num_places))
        self.engines = [ConsistencyEngine(self.num_places, self.staleness, first) for _ in range(self.num_shards)]
        self.applied: list[Counter[tuple[int, int]]] = [Counter() for _ in self.engines]
        self.processes: list[Process] = []
        self.at: list[dict[int, Process]] = [{} for _ in self.engines]
        for place in first:
            process = self.start(place)
            process.round = 0
            for shard in self.at:
                shard[place] = process
            for queue in (*process.inboxes, *process.unanswered):
                queue.clear()
        self.num_crashes = 0

    def start(self, place: int) -> Process:
        """A process takes a place, and asks all shards where it is to begin."""
        process = Process(len(self.processes), place, [deque() for _ in self.engines])
        process.unanswered = [[] for _ in self.engines]
        self.processes.append(process)
        for shard in range(self.num_shards):
            process.send(shard, WorkerJoined(place))
        return process

    def free(self) -> list[int]:
        used = {one.place for one in self.processes if one.lives}
        return [place for place in range(self.num_places) if place not in used]

    def push(self, process: Process) -> None:
        assert process.round is not None
        process.round += 1
        for shard in range(self.num_shards):
            process.send(shard, PushReceived(process.place, process.round, (process.name, process.round)))

    def deliver(self, process: Process, shard: int) -> None:
        """One message of a process arrives, unless its connection was ended because it is lost."""
        event = process.inboxes[shard].popleft()
        if shard in process.is_gone:
            return
        if self.at[shard].get(process.place) is not process:  # it says hello: whoever had its place is lost
            self.lose(self.at[shard].get(process.place), shard)
            self.at[shard][process.place] = process
        if isinstance(event, PushReceived):  # each message is a request of its own
            event = PushReceived(event.worker, event.round, (*event.token, self.rng.random()))  # type: ignore[misc]
        instructions = handle(self.engines[shard], event)
        if isinstance(event, Resume):
            (recovered,) = (each for each in instructions if isinstance(each, RoundRecovered))
            instructions.remove(recovered)
        self.carry_out(shard, instructions)

    def crash(self, shard: int) -> None:
        """A shard's server dies, and goes on from what it had saved: workers connect and say all once more."""
        self.num_crashes += 1
        self.engines[shard] = ConsistencyEngine.from_state(self.engines[shard].state(), list(self.at[shard]))
        for process in self.processes:
            inbox = process.inboxes[shard]
            inbox.clear()
            if process.lives and shard not in process.is_gone:
                if self.at[shard].get(process.place) is process:
                    inbox.append(Resume(process.place, process.over[shard]))
                inbox.extend(process.unanswered[shard])

    def lose(self, process: Process | None, shard: int) -> None:
        if process is not None and shard not in process.is_gone:
            process.is_gone.add(shard)
            if self.at[shard].get(process.place) is process:
                self.carry_out(shard, handle(self.engines[shard], WorkerLost(process.place, ELASTIC)))
                del self.at[shard][process.place]

    def carry_out(self, shard: int, instructions: list[ConsistencyInstruction]) -> None:
        for each in instructions:
            if isinstance(each, CombineRound):
                for token in each.tokens:
                    assert token[1] == each.round  # type: ignore[index]
                    self.applied[shard][token[:2]] += 1  # type: ignore[index]
            elif isinstance(each, ApplyPush):
                self.applied[shard][each.token[:2]] += 1  # type: ignore[index]
            elif isinstance(each, AcknowledgePush | RepeatAcknowledgement):
                process = self.processes[each.token[0]]  # type: ignore[index]
                process.acknowledged[each.round] += 1
                process.over[shard] = max(process.over[shard], each.round)
                process.answered(shard, PushReceived, each.round)
            elif isinstance(each, RoundRecovered):
                process = self.at[shard][each.worker]
                process.over[shard] = max(process.over[shard], each.round)
                process.answered(shard, WorkerJoined)
                self.heard(process, shard, each.round)
            else:
                assert isinstance(each, DropRequest), each

    def heard(self, process: Process, shard: int, round: int) -> None:
        process.heard[shard] = round
        if len(process.heard) < self.num_shards or not process.lives:
            return
        latest = max(process.heard.values())
        if min(process.heard.values()) == latest:
            process.round = latest
            return
        assert not process.has_asked_again, "the second answers are all the same"
        process.has_asked_again = True
        process.heard.clear()
        for each in range(self.num_shards):
            process.send(each, WorkerJoined(process.place, latest))

    def play(self) -> None:
        kills, crashes = self.rng.randint(0, 6), self.rng.choice((0, 0, 1, 2, 4))
        for _ in range(5000):
            actions = [
                (self.deliver, one, shard)
                for one in self.processes
                for shard, inbox in enumerate(one.inboxes)
                if inbox
            ]  # fmt: skip
            unheard = [
                (self.lose, one, shard)
                for one in self.processes
                if not one.lives
                for shard in range(self.num_shards)
                if shard not in one.is_gone
            ]
            pushing = [one for one in self.processes if one.lives and one.round is not None and one.round < self.last]
            kind = self.rng.random()
            if kills and kind < 0.05 and (living := [one for one in self.processes if one.lives]):
                self.rng.choice(living).lives = False
                kills -= 1
            elif crashes and kind < 0.08:
                self.crash(self.rng.randrange(self.num_shards))
                crashes -= 1
            elif kind < 0.1 and (free := self.free()) and self.num_left:
                self.start(self.rng.choice(free))
            elif kind < 0.4 and pushing:
                self.push(self.rng.choice(pushing))
            elif unheard and (kind < 0.5 or not actions):
                step, process, shard = self.rng.choice(unheard)
                step(process, shard)
            elif actions:
                step, process, shard = self.rng.choice(actions)  # type: ignore[assignment]
                step(process, shard)
            elif not pushing:
                break
        self.leave()

    @property
    def num_left(self) -> int:
        """Processes that may still be started."""
        return max(0, 12 - len(self.processes))

    def leave(self) -> None:
        """Those who are there leave, behind all that is on its way."""
        for one in self.processes:
            for shard, inbox in enumerate(one.inboxes):
                while inbox:
                    self.deliver(one, shard)
        for one in self.processes:
            for shard in range(self.num_shards):
                if one.lives:
                    self.carry_out(shard, handle(self.engines[shard], WorkerLeft(one.place)))
                else:
                    self.lose(one, shard)


def play(seed: int) -> Counter[str]:
    schedule = Schedule(seed)
    schedule.play()
    for shard, applied in enumerate(schedule.applied):
        assert set(applied.values()) <= {1}, "nothing twice"
        assert not any(schedule.engines[shard]._held), "nothing waits"
    seen: Counter[str] = Counter()
    for process in schedule.processes:
        for round, times in process.acknowledged.items():
            assert times <= schedule.num_shards
            num = sum(applied[process.name, round] for applied in schedule.applied)
            assert num >= times, "what was acknowledged is there"
            seen["acknowledged"] += times == schedule.num_shards
            seen["in some shards"] += 0 < num < schedule.num_shards
        if process.lives and process.round:
            first = min(process.acknowledged, default=process.round + 1)
            missing = [r for r in range(first, process.round + 1) if process.acknowledged[r] != schedule.num_shards]
            assert not missing, "all that a living process has pushed was acknowledged by all shards"
        seen["asked again"] += process.has_asked_again
        seen["killed"] += not process.lives
    seen["servers killed"] = schedule.num_crashes
    return seen


def test_random_schedules() -> None:
    first, count = int(os.environ.get("REIGEN_SIM_SEED", "0")), 1 if "REIGEN_SIM_SEED" in os.environ else 300
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        seen += play(seed)
    if count > 1:
        kinds = "acknowledged", "in some shards", "asked again", "killed", "servers killed"
        assert min(seen[what] for what in kinds) > 20, seen


def test_a_place_is_absent_until_somebody_joins() -> None:
    engine = ConsistencyEngine(2, present=[0])
    assert engine.state().presence == (WorkerPresence.HERE, WorkerPresence.ABSENT)
