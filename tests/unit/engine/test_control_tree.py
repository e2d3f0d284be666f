"""Trees by hosts: who reports to whom, and how few messages meet anywhere, however many ranks there are."""

from __future__ import annotations

import pytest

from reigen.engine.control_tree import FANOUT, ControlTree, describe_relays
from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import MergedReports, Operation, OperationKind, Report, ResponseList, SubmitRequest
from reigen.engine.rank_masks import to_ranks
from reigen.engine.report_merger import ReportMerger


def hosts(num_hosts: int, num_local: int) -> list[range]:
    return [range(num_local * host, num_local * (host + 1)) for host in range(num_hosts)]


def test_ranks_report_through_their_host() -> None:
    tree = ControlTree([[0, 2], [1, 3, 5], [4]])
    assert [tree.parent(rank) for rank in range(6)] == [-1, 0, 0, 1, 0, 1]
    assert tree.neighbors(0) == (1, 4, 2)
    assert tree.neighbors(1) == (0, 3, 5)
    assert to_ranks(tree.subtree(1)) == (1, 3, 5)
    assert tree.relays() == (1,)


@pytest.mark.parametrize(("num_hosts", "num_local"), [(1, 1), (1, 100), (100, 1), (128, 8), (1250, 8), (3, 200)])
def test_every_rank_reaches_rank_0_and_none_has_many_children(num_hosts: int, num_local: int) -> None:
    tree = ControlTree(hosts(num_hosts, num_local))
    assert to_ranks(tree.subtree(0)) == tuple(range(tree.size))
    assert max(len(tree.children(rank)) for rank in range(tree.size)) <= 2 * FANOUT


def test_of_ranks_that_are_silent_a_relay_may_be_why() -> None:
    tree = ControlTree(hosts(4, 3), fanout=2)
    assert tree.parent(9) == 3
    assert tree.silent_relays([4, 5]) == {}
    assert tree.silent_relays([3, 4, 5]) == {}, "rank 9 reports through rank 3, and was heard"
    assert tree.silent_relays([3, 4, 5, 9, 10, 11]) == dict.fromkeys([4, 5, 9, 10, 11], 3)
    assert tree.silent_relays([9, 10, 11]) == {10: 9, 11: 9}
    assert describe_relays(tree, [9, 10, 11]) == "; ranks 10, 11 report through rank 9, so it alone may be stuck"
    assert describe_relays(None, [9, 10]) == ""


class CountedJob:
    """Negotiation through a tree, with the messages that rank 0 reads and what it finds in them."""

    def __init__(self, num_hosts: int, num_local: int) -> None:
        self.tree = tree = ControlTree(hosts(num_hosts, num_local))
        self.coordinator = Coordinator(tree.size, 1024, 0, 60.0, tree=tree)
        self.mergers = {rank: ReportMerger(tree.size, tree.subtree(rank)) for rank in tree.relays()}
        self.num_messages = self.num_reports = self.num_messages_of_relays = 0

    def submit(self, report: Report) -> ResponseList:
        """Every rank reports the same; returns the answer."""
        self.num_messages = self.num_reports = self.num_messages_of_relays = 0
        for rank in range(self.tree.size):
            if rank in self.mergers:
                self._relay(rank, rank, [report])
            else:
                self._send(rank, [report])
        [answer] = self.coordinator.announce(0.0)
        assert isinstance(answer, ResponseList)
        for merger in self.mergers.values():
            merger.follow([answer])
            merger.validate_state()
            assert merger.next_release() is None
        return answer

    def _send(self, rank: int, reports: list[Report]) -> None:
        parent = self.tree.parent(rank)
        if parent > 0:
            self.num_messages_of_relays += 1
            self._relay(parent, rank, reports)
        else:
            self.num_messages += parent == 0
            self.num_reports += sum(len(r.reports) if isinstance(r, MergedReports) else 1 for r in reports)
            self.coordinator.receive(rank, reports, 0.0)

    def _relay(self, relay: int, sender: int, reports: list[Report]) -> None:
        self.mergers[relay].receive(1 << sender, reports, 0.0)
        if found := self.mergers[relay].take(0.0):
            self._send(relay, found)


@pytest.mark.parametrize(("num_hosts", "num_local", "most"), [(16, 8, 22), (125, 8, 23), (1250, 8, 23)])
def test_rank_0_reads_as_many_messages_as_it_has_children(num_hosts: int, num_local: int, most: int) -> None:
    """1,000 ranks cost rank 0 no more than 128 do: what is counted are messages, and reports in them, of a batch."""
    job = CountedJob(num_hosts, num_local)
    in_full = job.submit(SubmitRequest(Operation(OperationKind.ALLREDUCE, "t", "float32", (4,))))
    assert (job.num_messages, job.num_reports) == (most, most + 1)
    [[response]] = in_full.batches
    assert not isinstance(response, int)
    cached = job.submit(response.slot)
    assert cached.batches == ((response.slot,),)
    assert (job.num_messages, job.num_reports) == (most, most + 1)
    assert job.num_messages + job.num_messages_of_relays == job.tree.size - 1, "each rank sends one message"
