"""Who is alive, as the service keeps it: events in, instructions out; then thousands of random schedules."""

import random
import re

import pytest

from reigen.cluster.membership import liveness as module
from reigen.cluster.membership.abort_message import AbortMessage
from reigen.cluster.membership.liveness import (
    HOLD_SECONDS,
    EnterGroup,
    GroupEntered,
    LeaveGroup,
    LivenessTable,
    LivenessUpdate,
    RankAborted,
    RankLeft,
    RanksDied,
    RequestRefused,
)

ROOM = "0"


def entered(*machines, roll=None):
    """A roll that ranks 0, 1, ... have entered, one for each machine given; owners are called like ranks."""
    roll = LivenessTable() if roll is None else roll
    for rank, machine in enumerate(machines):
        answer = roll.handle(rank, EnterGroup(5, ROOM, rank, len(machines), f"host {machine}", machine), 0.0)
        assert answer == [(rank, GroupEntered(5))]
    return roll


def died(*ranks, host, whole=False, silent=False):
    return RanksDied(ranks, f"host {host}", whole, silent)


def to(owners, *events):
    return [(owner, LivenessUpdate(events)) for owner in owners]


ABORT = AbortMessage("CollectiveError", (1,), "no reason")


def test_a_rank_that_ends_without_a_word_has_died():
    roll = entered("a", "b", "c")
    assert roll.lost(1, 1.0) == to([0, 2], died(1, host="b"))  # its machine has no other rank: nothing to wait for
    assert roll.due() is None


def test_a_rank_that_leaves_is_told_at_once_and_its_end_is_nothing_new():
    roll = entered("a", "a", "b")
    assert roll.handle(1, LeaveGroup(), 1.0) == to([0, 2], RankLeft(1, "host a"))
    assert roll.handle(1, LeaveGroup(), 1.0) == []
    assert roll.lost(1, 1.0) == []
    assert (roll.due(), roll.tick(9.0)) == (None, [])


def test_an_abort_is_held_for_the_death_that_it_follows_from():
    roll = entered("a", "b", "c")
    assert roll.handle(0, ABORT, 1.0) == []
    assert roll.due() == 1.0 + HOLD_SECONDS
    assert roll.lost(1, 1.05) == to([0, 2], died(1, host="b"), RankAborted(0, "host a", ABORT))


def test_an_abort_by_itself_is_told_after_a_moment():
    roll = entered("a", "b")
    assert roll.handle(0, ABORT, 1.0) == []
    assert roll.tick(1.0 + HOLD_SECONDS / 2) == []
    assert roll.tick(1.0 + HOLD_SECONDS) == to([0, 1], RankAborted(0, "host a", ABORT))
    assert roll.due() is None


def test_only_the_first_abort_is_told_and_the_end_of_who_aborted_is_no_death():
    roll = entered("a", "b", "c")
    roll.handle(0, ABORT, 1.0)
    assert roll.handle(1, AbortMessage("CollectiveError", (0,), "because of 0"), 1.01) == []
    assert roll.tick(2.0) == to([0, 1, 2], RankAborted(0, "host a", ABORT))
    assert roll.handle(2, ABORT, 3.0) == []
    assert [roll.lost(rank, 3.0) for rank in range(3)] == [[], [], []]
    assert roll.due() is None


def test_ranks_of_one_machine_that_end_together_are_one_event():
    roll = entered("a", "b", "b", "b")
    assert roll.lost(2, 1.0) == []  # two more may follow
    assert roll.lost(1, 1.01) == []
    assert roll.lost(3, 1.02) == to([0], died(1, 2, 3, host="b", whole=True))


def test_some_ranks_of_a_machine():
    roll = entered("a", "b", "b", "b")
    roll.lost(2, 1.0)
    roll.lost(1, 1.01)
    assert roll.tick(1.0 + HOLD_SECONDS) == to([0, 3], died(1, 2, host="b"))
    assert roll.lost(3, 5.0) == to([0], died(3, host="b"))


def test_a_machine_one_rank_of_which_had_left_is_not_said_to_be_lost():
    roll = entered("a", "b", "b")
    assert roll.handle(1, LeaveGroup(), 0.5) == to([0, 2], RankLeft(1, "host b"))
    assert roll.lost(2, 1.0) == to([0], died(2, host="b"))


def test_the_machine_that_lost_a_rank_first_comes_first():
    roll = entered("a", "b", "b", "c", "c")
    roll.lost(3, 1.0)
    roll.lost(2, 1.01)
    roll.handle(0, ABORT, 1.02)
    expected = to([0, 1, 4], died(3, host="c"), died(2, host="b"), RankAborted(0, "host a", ABORT))
    assert roll.tick(1.0 + HOLD_SECONDS) == expected


def test_one_silent_connection_stands_for_its_whole_machine():
    roll = entered("a", "b", "b", "c")
    told = to([0, 2, 3], died(1, 2, host="b", whole=True, silent=True))
    assert roll.lost(1, 20.0, silent=True) == told  # rank 2 is told, too: it may only have been cut off
    assert roll.lost(2, 21.0, silent=True) == []
    assert roll.handle(2, LeaveGroup(), 22.0) == []


def test_leaving_while_something_is_held_comes_behind_it():
    roll = entered("a", "b", "b", "c")
    roll.lost(1, 1.0)
    assert roll.handle(3, LeaveGroup(), 1.01) == []
    assert roll.tick(2.0) == to([0, 2], died(1, host="b"), RankLeft(3, "host c"))


def test_who_enters_late_is_told_what_has_happened():
    roll = LivenessTable()
    for rank in range(3):
        roll.handle(rank, EnterGroup(0, ROOM, rank, 4, "h", "m"), 0.0)
    roll.handle(0, LeaveGroup(), 1.0)
    roll.lost(1, 1.0)
    roll.tick(2.0)
    answer = roll.handle(3, EnterGroup(9, ROOM, 3, 4, "h", "m"), 3.0)
    assert answer == [(3, GroupEntered(9)), (3, LivenessUpdate((RankLeft(0, "h"), RanksDied((1,), "h", False, False))))]


def test_the_end_of_the_service_tells_what_is_held():
    roll = entered("a", "b")
    roll.handle(0, ABORT, 1.0)
    assert roll.flush() == to([0, 1], RankAborted(0, "host a", ABORT))
    assert roll.flush() == []


def test_rooms_do_not_see_each_other():
    roll = entered("a", "b")
    roll.handle("x", EnterGroup(1, "other", 0, 2, "h", "a"), 0.0)
    roll.handle("y", EnterGroup(1, "other", 1, 2, "h", "b"), 0.0)
    assert roll.lost(0, 1.0, silent=True) == to([1], died(0, host="a", silent=True))
    assert roll.lost("y", 2.0) == to(["x"], RanksDied((1,), "h", False, False))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (EnterGroup(1, ROOM, 0, 2, "h", "m"), r"rank 0 \(host host a\) has been here before"),
        (EnterGroup(1, ROOM, 1, 3, "h", "m"), "counts 3 ranks, others 2"),
        (EnterGroup(1, ROOM, 2, 2, "h", "m"), "no rank 2 among 2"),
        (EnterGroup(1, ROOM, -1, 2, "h", "m"), "no rank -1"),
        (EnterGroup(1, "new", 0, 1 << 20, "h", "m"), "no rank 0 among 1048576"),
        (EnterGroup(1, "r" * 513, 0, 2, "h", "m"), "longer than 512"),
        (EnterGroup(1, "new", 0, 2, "h" * 513, "m"), "longer than 512"),
    ],
)
def test_who_makes_no_sense_is_refused(message, complaint):
    roll = LivenessTable()
    roll.handle(0, EnterGroup(5, ROOM, 0, 2, "host a", "a"), 0.0)
    ((owner, answer),) = roll.handle("new", message, 0.0)
    assert owner == "new"
    assert isinstance(answer, RequestRefused)
    assert re.search(complaint, answer.reason)
    assert roll.lost("new", 1.0) == []


def test_a_connection_enters_once_and_says_nothing_before():
    roll = entered("a")
    assert isinstance(roll.handle(0, EnterGroup(1, "second", 0, 1, "h", "m"), 0.0)[0][1], RequestRefused)
    assert roll.handle("stranger", LeaveGroup(), 0.0) == []
    assert roll.handle("stranger", ABORT, 0.0) == []
    assert roll.lost("stranger", 0.0) == []


def test_reasons_are_bounded():
    roll = entered("a", "b")
    roll.handle(0, AbortMessage("CollectiveError", (1,), "ü" * 100_000), 0.0)
    event = roll.tick(1.0)[0][1].events[0]
    assert len(event.abort.reason.encode()) <= module.MAX_REASON_BYTES


def test_rooms_are_bounded_and_the_oldest_empty_one_makes_space(monkeypatch):
    monkeypatch.setattr(module, "MAX_GROUPS", 3)
    roll = LivenessTable()
    for number in range(3):
        roll.handle(number, EnterGroup(0, f"room {number}", 0, 1, "h", "m"), 0.0)
    assert isinstance(roll.handle("x", EnterGroup(0, "one more", 0, 1, "h", "m"), 0.0)[0][1], RequestRefused)
    roll.lost(1, 0.0)
    assert roll.handle("x", EnterGroup(0, "one more", 0, 1, "h", "m"), 0.0) == [("x", GroupEntered(0))]


def test_long_histories_travel_in_portions():
    size = 600
    roll = LivenessTable()
    for rank in range(size):
        roll.handle(rank, EnterGroup(0, ROOM, rank, size + 1, "h", "m"), 0.0)
        roll.handle(rank, LeaveGroup(), 0.0)
    answers = [answer for _, answer in roll.handle("late", EnterGroup(0, ROOM, size, size + 1, "h", "m"), 0.0)]
    assert answers[0] == GroupEntered(0)
    assert [event.rank for news in answers[1:] for event in news.events] == list(range(size))
    assert max(len(news.events) for news in answers[1:]) <= 256


class Job:
    """Ranks that do random things to a roll, and what each has been told; the truth is kept beside it."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.size = self.rng.randint(1, 7)
        self.machines = [self.rng.choice("abc") for _ in range(self.size)]
        self.roll, self.now = LivenessTable(), 0.0
        self.ends = {}
        self.outside, self.inside, self.closed = list(range(self.size)), [], []
        self.heard = {rank: [] for rank in range(self.size)}

    def step(self):
        self.now += self.rng.choice((0.0, 0.01, 0.05, 0.2))
        self.deliver(self.roll.tick(self.now))
        rank = self.rng.randrange(self.size)
        if rank in self.outside:
            self.outside.remove(rank)
            self.inside.append(rank)
            machine = self.machines[rank]
            self.deliver(self.roll.handle(rank, EnterGroup(0, ROOM, rank, self.size, machine, machine), self.now))
        elif rank in self.inside:
            self.act(rank, self.rng.choice(("leave", "abort", "die", "silent", "nothing", "nothing")))
        self.roll.validate()

    def act(self, rank, what):
        if what == "leave":
            self.ends.setdefault(rank, "left")
            self.deliver(self.roll.handle(rank, LeaveGroup(), self.now))
        elif what == "abort":
            self.ends.setdefault(rank, "aborted")
            self.deliver(self.roll.handle(rank, AbortMessage("CollectiveError", (rank,), ""), self.now))
        elif what in {"die", "silent"}:
            gone = [rank]
            if what == "silent" and rank not in self.ends:
                gone = [each for each in self.inside if self.machines[each] == self.machines[rank]]
            for each in gone:
                self.ends.setdefault(each, "died")
            self.inside.remove(rank)
            self.closed.append(rank)
            self.deliver(self.roll.lost(rank, self.now, silent=what == "silent"))

    def deliver(self, instructions):
        for owner, answer in instructions:
            assert owner not in self.closed, "nobody talks to a closed connection"
            assert owner in self.inside
            if isinstance(answer, LivenessUpdate):
                self.heard[owner] += answer.events

    def check(self):
        """Everybody who is still there, and did not leave itself, has heard every end exactly once, and no other."""
        self.deliver(self.roll.tick(self.now + 1.0))
        assert self.roll.due() is None
        deaths = {rank for rank, end in self.ends.items() if end == "died"}
        lefts = {rank for rank, end in self.ends.items() if end == "left"}
        aborts = {rank for rank, end in self.ends.items() if end == "aborted"}
        for rank in self.inside:
            if self.ends.get(rank) == "left":
                continue
            events = self.heard[rank]
            told = [each for event in events if isinstance(event, RanksDied) for each in event.ranks]
            assert sorted(told) == sorted(deaths)
            assert sorted(event.rank for event in events if isinstance(event, RankLeft)) == sorted(lefts)
            aborted = [event.rank for event in events if isinstance(event, RankAborted)]
            assert len(aborted) == bool(aborts)
            assert set(aborted) <= aborts
            for event in events:
                if isinstance(event, RanksDied):
                    assert {self.machines[each] for each in event.ranks} == {event.host}


def test_random_schedules():
    kinds = set()
    for seed in range(1500):
        job = Job(seed)
        for _ in range(job.rng.randint(5, 40)):
            job.step()
        job.check()
        kinds |= {type(event) for events in job.heard.values() for event in events}
    assert kinds == {RanksDied, RankAborted, RankLeft}
