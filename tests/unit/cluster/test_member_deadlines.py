"""Earliest of many members' deadlines, against a plain minimum."""

import random

from reigen.cluster.membership.deadlines import MemberDeadlines
from reigen.cluster.membership.members import NEVER, Member, RolePolicy


def make(count):
    return [Member("worker", number, RolePolicy(count)) for number in range(count)]


def test_there_is_no_deadline_at_first_and_none_once_it_was_taken_back():
    members = make(3)
    deadlines = MemberDeadlines(members)
    assert deadlines.earliest() == NEVER
    assert deadlines.take_due(1e9) == []
    deadlines.set(members[1], 5.0)
    assert (deadlines.earliest(), members[1].until) == (5.0, 5.0)
    deadlines.set(members[1], NEVER)
    assert deadlines.earliest() == NEVER


def test_members_whose_time_has_come_are_in_the_order_of_their_numbers():
    members = make(4)
    deadlines = MemberDeadlines(members)
    for member, until in zip(members, (3.0, 2.0, 9.0, 1.0), strict=True):
        deadlines.set(member, until)
    assert deadlines.take_due(3.0) == [members[0], members[1], members[3]]
    assert deadlines.earliest() == 9.0


def test_random_changes_agree_with_a_plain_minimum():
    rng = random.Random(3)
    for _ in range(200):
        members = make(rng.randint(1, 6))
        deadlines, now = MemberDeadlines(members), 0.0
        for _ in range(60):
            deadlines.set(rng.choice(members), rng.choice((NEVER, now + rng.randint(0, 5), now + rng.random())))
            if rng.random() < 0.3:
                now += rng.random()
                due = deadlines.take_due(now)
                assert due == [member for member in members if member.until <= now]
                for member in due:
                    deadlines.set(member, rng.choice((NEVER, now + 1.0)))
            assert deadlines.earliest() == min(member.until for member in members)


def test_heartbeats_do_not_make_the_heap_grow():
    members = make(2)
    deadlines = MemberDeadlines(members)
    for step in range(1000):
        deadlines.set(members[step % 2], 10.0 + step)
    assert len(deadlines._heap) == 2
    assert deadlines.earliest() == 1008.0
