"""At most one view is decided for each epoch, in every state that a few voters and leaders can come to; and each rule
that is broken on purpose is found. REIGEN_SEARCH=large searches more of them, for minutes.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from reigen.cluster.membership.views.messages import AcceptView, Ballot, PrepareView, ViewDecided, ViewPromise
from reigen.cluster.membership.views.paxos import Acceptor, Proposer
from reigen.cluster.membership.views.record import View
from tests.unit.cluster.views_search import Search, TwoDecisions, make_view

_IS_LARGE = os.environ.get("REIGEN_SEARCH") == "large"
large = pytest.mark.skipif(not _IS_LARGE, reason="takes minutes: REIGEN_SEARCH=large")


@pytest.mark.parametrize(
    ("num_hosts", "witness", "leaders", "num_states"),
    [
        (2, False, (0, 1), 565),
        (2, True, (0, 1), 2_684),
        (3, False, (0, 1), 2_684),
        (3, False, (1, 2), 2_684),
        (3, True, (0, 2), 2_684),
        (4, False, (0, 1), 87_109),
        pytest.param(4, True, (0, 3), None, marks=large),
        pytest.param(5, False, (0, 4), None, marks=large),
    ],
)
def test_two_leaders(num_hosts: int, witness: bool, leaders: tuple[int, ...], num_states: int | None) -> None:
    search = Search(make_view(num_hosts, witness=witness), leaders).run()

    assert search.is_complete
    assert num_states in {None, search.num_states}
    assert len(search.decided) == 2, "either leader can win"


@pytest.mark.parametrize(
    ("num_hosts", "attempts", "num_states"),
    [
        (2, (2, 1), 12_849),
        pytest.param(2, (2, 2), None, marks=large),
        pytest.param(3, (2, 1), None, marks=large),
    ],
)
def test_leaders_that_try_again(num_hosts: int, attempts: tuple[int, ...], num_states: int | None) -> None:
    search = Search(make_view(num_hosts), attempts=attempts).run()

    assert search.is_complete
    assert num_states in {None, search.num_states}


def test_two_leaders_of_one_host() -> None:
    """A host has one vote, however many of its ranks lead."""
    search = Search(make_view(2, witness=True, ranks_each=2)).run()

    assert search.is_complete
    assert len(search.decided) == 2


@pytest.mark.parametrize(
    ("num_hosts", "witness", "leaders", "attempts", "num_states"),
    [
        (2, False, (0, 1), (2, 1), 52_977),
        (3, False, (0, 2), (1, 1), 118_977),
        pytest.param(2, True, (0, 1), (2, 1), None, marks=large),
    ],
)
def test_one_view_after_the_other(
    num_hosts: int, witness: bool, leaders: tuple[int, ...], attempts: tuple[int, ...], num_states: int | None
) -> None:
    """Members of the second view decide about a third one, while others still try to decide about the second."""
    search = Search(make_view(num_hosts, witness=witness), leaders, attempts, epochs=2).run()

    assert search.is_complete
    assert num_states in {None, search.num_states}
    assert {view.epoch for view in search.decided} == {2, 3}


# -- rules that are broken on purpose ----------------------------------------------------------------------------------


def test_a_quorum_of_half_the_voters_is_too_small() -> None:
    def half(view: View, voters: frozenset[int], _: frozenset[int]) -> bool:
        return len(voters) * 2 >= len(view.voters)

    with pytest.raises(TwoDecisions):
        Search(make_view(2), has_quorum=half).run()
    with pytest.raises(TwoDecisions):
        Search(make_view(4), has_quorum=half).run()


@pytest.mark.parametrize("num_hosts", [3, 4])
def test_dead_voters_must_not_be_subtracted(num_hosts: int) -> None:
    """Two of three have accepted a view, one of them dies: the third is half of those that live, and of host 0."""

    def subtract(view: View, voters: frozenset[int], dead: frozenset[int]) -> bool:
        alive, answered = len(view.voters) - len(dead), len(voters - dead)
        return answered * 2 > alive or (answered * 2 == alive and 0 in voters)

    with pytest.raises(TwoDecisions):
        Search(make_view(num_hosts), kills=1, has_quorum=subtract).run()


def test_a_voter_keeps_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Acceptor.handle

    def forgetful(self: Acceptor, message: Any) -> Any:
        forgets = isinstance(message, AcceptView)
        return handle(msgspec.structs.replace(self, promised=None) if forgets else self, message)

    monkeypatch.setattr(Acceptor, "handle", forgetful)
    with pytest.raises(TwoDecisions):
        Search(make_view(3)).run()


def test_a_leader_adopts_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Proposer.take

    def selfish(self: Proposer, reply: Any) -> Any:
        return msgspec.structs.replace(take(self, reply), adopted=None)

    monkeypatch.setattr(Proposer, "take", selfish)
    with pytest.raises(TwoDecisions):
        Search(make_view(3)).run()


def test_a_leader_adopts_the_highest_ballot(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Proposer.take

    def careless(self: Proposer, reply: Any) -> Any:
        return take(msgspec.structs.replace(self, accepted=None), reply)

    monkeypatch.setattr(Proposer, "take", careless)
    with pytest.raises(TwoDecisions):
        Search(make_view(3), attempts=(2, 1), are_voters_equal=False).run()


def test_a_witness_that_grants_once_lets_two_views_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its vote to the first view that it sees, without promises; hosts follow the rules."""
    handle = Acceptor.handle

    def sticky(self: Acceptor, message: Any) -> Any:
        is_witness = self.id.name == "w" and not isinstance(message, ViewDecided)
        if is_witness and isinstance(message, PrepareView):
            return self, ViewPromise(message.epoch, message.ballot, 2)
        if is_witness and (self.value or message.value) == message.value:
            return handle(msgspec.structs.replace(self, promised=None), message)
        return (self, None) if is_witness else handle(self, message)

    monkeypatch.setattr(Acceptor, "handle", sticky)
    with pytest.raises(TwoDecisions):
        Search(make_view(2, witness=True), are_voters_equal=False).run()


def test_a_voter_without_memory_must_not_vote() -> None:
    with pytest.raises(TwoDecisions):
        Search(make_view(3), kills=1, forgets=True).run()


def test_leaders_need_ballots_of_their_own() -> None:
    with pytest.raises(TwoDecisions):
        Search(make_view(3), make_ballot=lambda attempt, _: Ballot(attempt, 0)).run()


def test_a_voter_that_has_learned_a_decision_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Acceptor.handle

    def naive(self: Acceptor, message: Any) -> Any:
        if self.view is not None and not isinstance(message, ViewDecided) and message.epoch <= self.view.epoch:
            view = make_view(2)
            return handle(Acceptor(self.id, view), message)
        return handle(self, message)

    monkeypatch.setattr(Acceptor, "handle", naive)
    with pytest.raises(TwoDecisions):
        Search(make_view(2), attempts=(2, 1), epochs=2).run()
