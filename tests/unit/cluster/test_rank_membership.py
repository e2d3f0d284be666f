"""Membership of ranks: events in, instructions out; then thousands of random schedules."""

import random
import re
import sys

import pytest
from msgspec import structs

from reigen.cluster.membership import table as module
from reigen.cluster.membership.abort_message import AbortMessage
from reigen.cluster.membership.members import RANK_HOLD_SECONDS, JobSpec, LossPolicy, RolePolicy
from reigen.cluster.membership.messages import (
    MEMBER_CODEC,
    LeaveJob,
    MemberAborted,
    MemberAssigned,
    MemberLeft,
    MemberLost,
    MemberRefused,
    MemberReturned,
    MembershipNews,
    RegisterMember,
    SavedJob,
    StatusQuery,
)
from reigen.cluster.membership.table import GroupTable, MembershipTable
from reigen.cluster.membership.view import JobView
from reigen.errors import WireError

GROUP = "0"


def register(group, rank, size, host, host_id, *, incarnation=None):
    return RegisterMember("rank", rank, host, incarnation or 1 + rank, {"rank": size}, group=group, host_id=host_id)


def plain(instructions):
    """Instructions without epochs, which have a test of their own."""
    return [(owner, structs.replace(a, epoch=0) if hasattr(a, "epoch") else a) for owner, a in instructions]


class Rooms(GroupTable):
    """Answers without epochs."""

    def handle(self, owner, message, now):
        return plain(super().handle(owner, message, now))

    def ended(self, owner, now, *, silent=False):
        return plain(super().ended(owner, now, silent=silent))

    def tick(self, now):
        return plain(super().tick(now))

    def flush(self):
        return plain(super().flush())


def test_what_a_liar_says_ends_no_service_and_can_be_sent():
    table = GroupTable()
    table.handle(0, register(GROUP, 0, 3, "h", "m"), 0.0)
    [(_, reply)] = table.handle(0, StatusQuery(1.0), 0.1)
    assert (reply.workers, reply.servers) == ((), ())
    liar = MEMBER_CODEC.encode(structs.replace(register(GROUP, 1, 3, "h", "m"), epoch=(1 << 64) - 1))
    with pytest.raises(WireError, match="Expected `int`"):
        MEMBER_CODEC.decode(liar)
    strange = [{"job": 5}, {"left": (2,)}, {"lost": (("rank", 0),)}, {"saved": (SavedJob(5),)}, {"role": "worker"}]
    for i, words in enumerate(strange):
        liar = structs.replace(register(GROUP, 1, 3, "h", "m"), **words)
        [(owner, refusal)] = table.handle(f"liar {i}", liar, 0.2)
        assert (owner, type(refusal)) == (f"liar {i}", MemberRefused), words
    [(_, place), *_] = table.handle(2, register(GROUP, 2, 3, "h", "m"), 0.3)
    assert isinstance(place, MemberAssigned)


def test_a_process_that_is_refused_makes_no_job():
    table = GroupTable()
    for i in range(3):
        long_name = structs.replace(register(f"group {i}", 0, 1 << 16, "h", "m"), address="a" * 600)
        [(_, refusal)] = table.handle(i, long_name, 0.0)
        assert isinstance(refusal, MemberRefused)
    assert not table._tables
    [(_, place), *_] = table.handle("a", register("group 0", 0, 2, "h", "m"), 0.0)
    assert isinstance(place, MemberAssigned)


def test_another_process_for_a_rank_that_gave_up_is_refused_and_the_rank_is_not_lost():
    table = Rooms()
    for rank in range(3):
        table.handle(rank, register(GROUP, rank, 3, "h", f"m{rank}"), 0.0)
    table.handle(1, AbortMessage("CollectiveError", (1,), "boom"), 0.1)
    assert all(isinstance(event, MemberAborted) for _, news in table.tick(0.6) for event in news.events)
    [(owner, refusal)] = table.handle("x", register(GROUP, 1, 3, "h", "m1", incarnation=99), 1.0)
    assert (owner, refusal) == ("x", MemberRefused("rank 1 has given up before; it cannot come back"))
    assert table.tick(5.0) == []


def test_hosts_that_die_at_one_time_are_each_told_as_a_whole():
    table, hosts, size = Rooms(), 50, 400
    for rank in range(size):
        table.handle(rank, register(GROUP, rank, size + 1, f"h{rank % hosts}", f"m{rank % hosts}"), 0.0)
    table.handle(size, register(GROUP, size, size + 1, "other", "other"), 0.0)
    told = [reply for rank in range(size) for reply in table.ended(rank, 1.0)] + table.tick(2.0)
    events = [event for owner, news in told if owner == size for event in news.events]
    assert len(events) == hosts
    assert all(event.is_whole_host and len(event.numbers) == size // hosts for event in events)


def assigned(rank):
    return MemberAssigned(rank, False, 1)


def entered(*host_ids):
    """A table at which ranks 0, 1, ... have registered, one for each host id given; owners are called like ranks."""
    table = Rooms()
    for rank, host_id in enumerate(host_ids):
        answer = table.handle(rank, register(GROUP, rank, len(host_ids), f"host {host_id}", host_id), 0.0)
        assert answer == [(rank, assigned(rank))]
    return table


def died(*ranks, host, whole=False, silent=False):
    """A loss; the first of the ranks was lost first."""
    first, *others = ranks
    reason = "its host is silent" if silent else "its process ended"
    return MemberLost("rank", first, host, reason, False, 1 + first, tuple(sorted(others)), whole, silent)


def left(rank, host):
    return MemberLeft("rank", rank, host)


def aborted(rank, host):
    return MemberAborted("rank", rank, host, ABORT)


def to(owners, *events):
    return [(owner, MembershipNews(events)) for owner in owners]


ABORT = AbortMessage("CollectiveError", (1,), "no reason")


def test_a_rank_that_ends_without_a_word_has_died():
    table = entered("a", "b", "c")
    assert table.ended(1, 1.0) == to([0, 2], died(1, host="host b"))  # the only rank of its host
    assert table.due() is None


def test_epochs_count_changes():
    table, heard = GroupTable(), []
    for rank in range(4):
        (told,) = table.handle(rank, register(GROUP, rank, 4, f"h{rank}", f"m{rank}"), 0.0)
        heard.append(told)
    assert table.handle(3, LeaveJob(), 1.0) == []
    heard += table.tick(1.0)[-1:]
    assert table.handle(0, ABORT, 1.0) == []
    heard += table.ended(1, 1.0)[-1:]  # a death and an abort are two changes
    assert [(owner, answer.epoch) for owner, answer in heard] == [(0, 1), (1, 2), (2, 3), (3, 4), (2, 5), (3, 7)]


def test_a_rank_that_leaves_is_told_in_the_same_turn_and_its_end_is_nothing_new():
    table = entered("a", "a", "b")
    assert table.handle(1, LeaveJob(), 1.0) == []
    assert table.due() == 1.0
    assert table.tick(1.0) == to([0, 2], left(1, "host a"))
    assert table.handle(1, LeaveJob(), 1.0) == []
    assert table.ended(1, 1.0) == []
    assert (table.due(), table.tick(9.0)) == (None, [])


def test_ranks_that_leave_in_one_turn_are_told_together_and_only_to_those_that_stay():
    table = entered("a", "a", "b", "b", "c")
    for rank in (3, 0, 1):
        assert table.handle(rank, LeaveJob(), 1.0) == []
    assert table.ended(3, 1.0) == []
    assert table.tick(1.0) == to([2, 4], left(3, "host b"), left(0, "host a"), left(1, "host a"))
    assert (table.due(), table.tick(1.0)) == (None, [])
    assert [table.handle(rank, LeaveJob(), 2.0) for rank in (2, 4)] == [[], []]
    assert table.tick(2.0) == [], "nobody is left that could wait for them"


def test_a_departure_is_not_told_twice_to_a_rank_that_comes_in_the_same_turn():
    table = Rooms()
    for rank in range(2):
        table.handle(rank, register(GROUP, rank, 3, "h", "m"), 0.0)
    table.handle(0, LeaveJob(), 1.0)
    assert table.handle(2, register(GROUP, 2, 3, "h", "m"), 1.0) == [(2, assigned(2))]
    assert table.tick(1.0) == to([1, 2], left(0, "h"))


def test_a_departure_comes_before_a_loss_that_is_held_and_the_end_of_the_service_tells_it():
    table = entered("a", "b", "b", "c")
    table.handle(3, LeaveJob(), 1.0)
    assert table.ended(1, 1.0) == []
    assert table.tick(1.0) == to([0, 2], left(3, "host c"))
    assert table.tick(2.0) == to([0, 2, 3], died(1, host="host b"))
    table.handle(0, LeaveJob(), 3.0)
    assert table.flush() == to([0, 2, 3], left(0, "host a"))


def count_lines(table, size):
    """Return how many lines of Python, each round of a loop anew, it takes to register and to end one of many ranks."""
    counts, previous = [], sys.gettrace()

    def trace(_frame, event, _):
        counts.append(event == "line")
        return trace

    for rank in range(size):
        message = register(GROUP, rank, size, f"h{rank // 8}", f"m{rank // 8}")
        sys.settrace(trace if rank == size // 2 else previous)
        try:
            table.handle(rank, message, 0.0)
            table.tick(0.0)
        finally:
            sys.settrace(previous)
    table.handle(size // 2, LeaveJob(), 1.0)
    table.tick(1.0)
    sys.settrace(trace)
    try:
        table.ended(size // 2, 1.0)
        table.tick(1.0)
    finally:
        sys.settrace(previous)
    return sum(counts)


def test_what_a_rank_costs_does_not_depend_on_how_many_there_are():
    few, many = (count_lines(GroupTable(), size) for size in (32, 512))
    assert 0 < many < few + 100


def test_messages_at_the_end_of_a_large_job_are_few():
    size = 400
    table = entered(*(f"m{rank // 8}" for rank in range(size)))
    told = []
    for first in range(0, size, 50):  # so many leave in each turn of the service's loop
        for rank in range(first, first + 50):
            told += table.handle(rank, LeaveJob(), 1.0)
        told += table.tick(1.0)
    assert len(told) == sum(range(0, size, 50))


def test_an_abort_is_held_for_the_death_that_it_follows_from():
    table = entered("a", "b", "c")
    assert table.handle(0, ABORT, 1.0) == []
    assert table.due() == 1.0 + RANK_HOLD_SECONDS
    assert table.ended(1, 1.05) == to([0, 2], died(1, host="host b"), aborted(0, "host a"))


def test_an_abort_by_itself_is_told_after_a_moment():
    table = entered("a", "b")
    assert table.handle(0, ABORT, 1.0) == []
    assert table.tick(1.0 + RANK_HOLD_SECONDS / 2) == []
    assert table.tick(1.0 + RANK_HOLD_SECONDS) == to([0, 1], aborted(0, "host a"))
    assert table.due() is None


def test_only_the_first_abort_is_told_and_the_end_of_who_aborted_is_no_death():
    table = entered("a", "b", "c")
    table.handle(0, ABORT, 1.0)
    assert table.handle(1, AbortMessage("CollectiveError", (0,), "because of 0"), 1.01) == []
    assert table.tick(2.0) == to([0, 1, 2], aborted(0, "host a"))
    assert table.handle(2, ABORT, 3.0) == []
    assert [table.ended(rank, 3.0) for rank in range(3)] == [[], [], []]
    assert table.due() is None


def test_ranks_of_one_host_that_end_together_are_one_event():
    table = entered("a", "b", "b", "b")
    assert table.ended(2, 1.0) == []  # two more may follow
    assert table.ended(1, 1.01) == []
    assert table.ended(3, 1.02) == to([0], died(2, 1, 3, host="host b", whole=True))


def test_some_ranks_of_a_host():
    table = entered("a", "b", "b", "b")
    table.ended(2, 1.0)
    table.ended(1, 1.01)
    assert table.tick(1.0 + RANK_HOLD_SECONDS) == to([0, 3], died(2, 1, host="host b"))
    assert table.ended(3, 5.0) == to([0], died(3, host="host b"))


def test_a_host_one_rank_of_which_had_left_is_not_said_to_be_lost():
    table = entered("a", "b", "b")
    table.handle(1, LeaveJob(), 0.5)
    assert table.tick(0.5) == to([0, 2], left(1, "host b"))
    assert table.ended(2, 1.0) == to([0, 1], died(2, host="host b"))


def test_the_host_that_lost_a_rank_first_comes_first():
    table = entered("a", "b", "b", "c", "c")
    table.ended(3, 1.0)
    table.ended(2, 1.01)
    table.handle(0, ABORT, 1.02)
    expected = to([0, 1, 4], died(3, host="host c"), died(2, host="host b"), aborted(0, "host a"))
    assert table.tick(1.0 + RANK_HOLD_SECONDS) == expected


def test_one_silent_connection_stands_for_its_whole_host():
    table = entered("a", "b", "b", "c")
    told = to([0, 2, 3], died(1, 2, host="host b", whole=True, silent=True))
    assert table.ended(1, 20.0, silent=True) == told  # rank 2 is told, too: it may only have been cut off
    assert table.ended(2, 21.0, silent=True) == []
    assert table.handle(2, LeaveJob(), 22.0) == []


def test_leaving_while_something_is_held_comes_behind_it():
    table = entered("a", "b", "b", "c")
    table.ended(1, 1.0)
    assert table.handle(3, LeaveJob(), 1.01) == []
    assert table.tick(2.0) == to([0, 2, 3], died(1, host="host b"), left(3, "host c"))


def test_who_enters_late_is_told_what_has_happened():
    table = Rooms()
    for rank in range(3):
        table.handle(rank, register(GROUP, rank, 4, "h", "m"), 0.0)
    table.handle(0, LeaveJob(), 1.0)
    table.ended(1, 1.0)
    table.tick(2.0)
    answer = table.handle(3, register(GROUP, 3, 4, "h", "m"), 3.0)
    assert answer == [(3, assigned(3)), (3, MembershipNews((died(1, host="h"), left(0, "h"))))]


def test_who_enters_late_hears_of_a_lost_host_at_once():
    table = Rooms()
    for rank, host_id in enumerate("abbcc"):
        table.handle(rank, register(GROUP, rank, 6, f"host {host_id}", host_id), 0.0)
    for rank in (1, 3, 2):
        table.ended(rank, 1.0 + rank / 100)
    table.tick(2.0)
    told = table.handle(5, register(GROUP, 5, 6, "host a", "a"), 3.0)
    assert told[1:] == to([5], died(1, 2, host="host b", whole=True), died(3, host="host c"))


def test_who_aborted_comes_before_who_left():
    table = entered("a", "b", "b", "c")
    table.ended(1, 1.0)
    table.handle(3, LeaveJob(), 1.01)
    table.handle(0, ABORT, 1.02)
    (_, news), *_ = table.tick(2.0)
    assert news.events == (died(1, host="host b"), aborted(0, "host a"), left(3, "host c"))


def test_the_end_of_the_service_tells_what_is_held():
    table = entered("a", "b")
    table.handle(0, ABORT, 1.0)
    assert table.flush() == to([0, 1], aborted(0, "host a"))
    assert table.flush() == []


def test_rooms_do_not_see_each_other():
    table = entered("a", "b")
    table.handle("x", register("other", 0, 2, "h", "a"), 0.0)
    table.handle("y", register("other", 1, 2, "h", "b"), 0.0)
    assert table.ended(0, 1.0, silent=True) == to([1], died(0, host="host a", silent=True))
    assert table.ended("y", 2.0) == to(["x"], died(1, host="h"))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (register(GROUP, 0, 2, "h", "m", incarnation=9), r"rank 0 is there already, on host host a"),
        (register(GROUP, 1, 3, "h", "m"), "expects 3 rank.s., but this job has 2"),
        (register(GROUP, 2, 2, "h", "m"), "no rank 2 among 2"),
        (register(GROUP, -1, 2, "h", "m"), "no rank -1"),
        (register("new", 0, 1 << 20, "h", "m"), "no rank 0 among 1048576"),
        (register("r" * 513, 0, 2, "h", "m"), "longer than 512"),
        (register("new", 0, 2, "h" * 513, "m"), "longer than 512"),
    ],
)
def test_who_makes_no_sense_is_refused(message, complaint):
    table = Rooms()
    table.handle(0, register(GROUP, 0, 2, "host a", "a"), 0.0)
    ((owner, answer),) = table.handle("new", message, 0.0)
    assert owner == "new"
    assert isinstance(answer, MemberRefused)
    assert re.search(complaint, answer.reason)
    assert table.ended("new", 1.0) == []


def test_a_connection_enters_once_and_says_nothing_before():
    table = entered("a")
    assert isinstance(table.handle(0, register("second", 0, 1, "h", "m"), 0.0)[0][1], MemberRefused)
    assert table.handle("stranger", LeaveJob(), 0.0) == []
    assert table.handle("stranger", ABORT, 0.0) == []
    assert table.ended("stranger", 0.0) == []


def test_reasons_are_bounded():
    table = entered("a", "b")
    table.handle(0, AbortMessage("CollectiveError", (1,), "ü" * 100_000), 0.0)
    event = table.tick(1.0)[0][1].events[0]
    assert len(event.abort.reason.encode()) <= module.MAX_REASON_BYTES


def test_rooms_are_bounded_and_the_oldest_empty_one_makes_space(monkeypatch):
    monkeypatch.setattr(module, "MAX_GROUPS", 3)
    table = Rooms()
    for number in range(3):
        table.handle(number, register(f"room {number}", 0, 1, "h", "m"), 0.0)
    assert isinstance(table.handle("x", register("one more", 0, 1, "h", "m"), 0.0)[0][1], MemberRefused)
    table.ended(1, 0.0)
    assert table.handle("x", register("one more", 0, 1, "h", "m"), 0.0) == [("x", assigned(0))]


def test_long_histories_travel_in_portions():
    size = 600
    table = Rooms()
    for rank in range(size):
        table.handle(rank, register(GROUP, rank, size + 1, "h", "m"), 0.0)
        table.handle(rank, LeaveJob(), 0.0)
    table.tick(0.0)
    answers = [answer for _, answer in table.handle("late", register(GROUP, size, size + 1, "h", "m"), 0.0)]
    assert answers[0] == assigned(size)
    assert [event.number for news in answers[1:] for event in news.events] == list(range(size))
    assert max(len(news.events) for news in answers[1:]) <= 256


class Job:
    """Ranks that do random things to a table, and what each has been told; the truth is kept beside it."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.size = self.rng.randint(1, 7)
        self.host_ids = [self.rng.choice("abc") for _ in range(self.size)]
        self.table, self.now = Rooms(), 0.0
        self.ends = {}
        self.outside, self.inside, self.closed = list(range(self.size)), [], []
        self.heard = {rank: [] for rank in range(self.size)}

    def step(self):
        self.now += self.rng.choice((0.0, 0.01, 0.05, 0.2))
        self.deliver(self.table.tick(self.now))
        rank = self.rng.randrange(self.size)
        if rank in self.outside:
            self.outside.remove(rank)
            self.inside.append(rank)
            host_id = self.host_ids[rank]
            self.deliver(self.table.handle(rank, register(GROUP, rank, self.size, host_id, host_id), self.now))
        elif rank in self.inside:
            self.act(rank, self.rng.choice(("leave", "abort", "die", "silent", "nothing", "nothing")))
        self.table.validate()

    def act(self, rank, what):
        if what == "leave":
            self.ends.setdefault(rank, "left")
            self.deliver(self.table.handle(rank, LeaveJob(), self.now))
        elif what == "abort":
            self.ends.setdefault(rank, "aborted")
            self.deliver(self.table.handle(rank, AbortMessage("CollectiveError", (rank,), ""), self.now))
        elif what in {"die", "silent"}:
            gone = [rank]
            if what == "silent" and rank not in self.ends:
                gone = [each for each in self.inside if self.host_ids[each] == self.host_ids[rank]]
            for each in gone:
                self.ends.setdefault(each, "died")
            self.inside.remove(rank)
            self.closed.append(rank)
            self.deliver(self.table.ended(rank, self.now, silent=what == "silent"))

    def deliver(self, instructions):
        for owner, answer in instructions:
            assert owner not in self.closed, "nobody talks to a closed connection"
            assert owner in self.inside
            if isinstance(answer, MembershipNews):
                self.heard[owner] += answer.events

    def check(self):
        """Everybody who is still there, and did not leave itself, has heard every end exactly once, and no other."""
        self.deliver(self.table.tick(self.now + 1.0))
        assert self.table.due() is None
        deaths = {rank for rank, end in self.ends.items() if end == "died"}
        lefts = {rank for rank, end in self.ends.items() if end == "left"}
        aborts = {rank for rank, end in self.ends.items() if end == "aborted"}
        for rank in self.inside:
            if self.ends.get(rank) == "left":
                continue
            events = self.heard[rank]
            told = [each for event in events if isinstance(event, MemberLost) for each in event.numbers]
            assert sorted(told) == sorted(deaths)
            assert sorted(event.number for event in events if isinstance(event, MemberLeft)) == sorted(lefts)
            aborted = [event.number for event in events if isinstance(event, MemberAborted)]
            assert len(aborted) == bool(aborts)
            assert set(aborted) <= aborts
            for event in events:
                if isinstance(event, MemberLost):
                    assert {self.host_ids[each] for each in event.numbers} == {event.host}


def test_random_schedules():
    kinds = set()
    for seed in range(1500):
        job = Job(seed)
        for _ in range(job.rng.randint(5, 40)):
            job.step()
        job.check()
        kinds |= {type(event) for events in job.heard.values() for event in events}
    assert kinds == {MemberLost, MemberAborted, MemberLeft}


class ElasticJob:
    """Ranks that come back or are replaced, and a service that is started again; with their views."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.size = self.rng.randint(1, 6)
        policy = RolePolicy(
            self.size,
            self.rng.choice((LossPolicy.WAIT, LossPolicy.CONTINUE)),
            reconnect_seconds=1.0,
            hold_seconds=RANK_HOLD_SECONDS,
        )
        self.spec = JobSpec({"rank": policy}, return_seconds=5.0)
        self.table, self.now = MembershipTable(self.spec), 0.0
        self.num_restarts = self.num_owners = self.num_processes = 0
        #: by rank: its view; by owner: the view that it belongs to
        self.views, self.connections, self.came, self.left = {}, {}, set(), set()
        self.seen = set()

    def deliver(self, instructions):
        self.table.validate()
        for owner, answer in instructions:
            view = self.connections.get(owner)
            if view is None:
                continue
            epoch, lost = view.epoch, dict(view.lost)
            assert view.take(answer) == []
            if isinstance(answer, MemberRefused):
                del self.connections[owner]
                self.views = {rank: one for rank, one in self.views.items() if one is not view}
                self.deliver(self.table.ended(owner, self.now))
            elif isinstance(answer, MembershipNews):
                assert epoch <= view.epoch == answer.epoch, "epochs only grow"
                for event in answer.events if not self.num_restarts else ():
                    if isinstance(event, MemberReturned) and event.number != view.number:
                        assert ("rank", event.number) in lost, "a loss comes before the return"
                    self.seen.add(type(event))

    def connect(self, rank):
        owner, self.num_owners = self.num_owners, self.num_owners + 1
        self.connections[owner] = self.views[rank]
        self.deliver(self.table.handle(owner, self.views[rank].registration(), self.now))

    def step(self):
        self.now += self.rng.choice((0.0, 0.01, 0.1, 0.5))
        self.deliver(self.table.tick(self.now))
        rank = self.rng.randrange(self.size)
        owner = next((owner for owner, one in self.connections.items() if one is self.views.get(rank)), None)
        what = self.rng.choice(("die", "cut", "leave", "nothing", "nothing", "nothing", "restart"))
        if rank in self.left:
            return
        if rank not in self.views:
            self.num_processes += 1
            counts = {"rank": self.size}
            one = RegisterMember("rank", rank, "h", self.num_processes, counts, host_id=self.rng.choice("ab"))
            self.views[rank] = JobView(one)
            self.connect(rank)
            self.came |= {rank} & self.views.keys()
        elif owner is None:
            self.connect(rank)
        elif what == "leave":
            self.left.add(rank)
            self.deliver(self.table.handle(owner, LeaveJob(), self.now))
        elif what == "restart" and self.num_restarts < 2 and self.rng.random() < 0.3:
            self.num_restarts += 1
            self.connections.clear()
            self.views = {rank: view for rank, view in self.views.items() if rank not in self.left}
            self.table = MembershipTable(self.spec, 7)
            for each in self.views:
                self.connect(each)
        elif what in {"die", "cut"}:
            del self.connections[owner]
            if what == "die":
                del self.views[rank]
            self.deliver(self.table.ended(owner, self.now, silent=self.rng.random() < 0.2))

    def check(self):
        """All that are connected know who is lost, and who has left, and nothing else."""
        for _ in range(20):
            self.now += 0.5
            self.deliver(self.table.tick(self.now))
        known = set(range(self.size)) if self.num_restarts and self.connections else self.came
        here = {rank for rank, view in self.views.items() if view in self.connections.values()}
        for view in self.connections.values():
            lost = {number for _, number in view.lost}
            if self.num_restarts:  # those who knew that one had left may have gone with the service
                assert known - here - self.left <= lost <= known - here
            else:
                assert (lost, set(view.left)) == (known - here - self.left, self.left)
            assert view.epoch <= self.table.epoch


def test_random_schedules_of_ranks_that_come_back():
    seen = set()
    for seed in range(1500):
        job = ElasticJob(seed)
        for _ in range(job.rng.randint(5, 60)):
            job.step()
        job.check()
        seen |= job.seen
    assert seen == {MemberLost, MemberLeft, MemberReturned}
