"""Process sets, and jobs of some of the ranks, as scripts use them."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
import torch

import reigen.torch as hvd
from reigen.api.process_sets import get_process_set_ids_and_ranks

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
everybody = hvd.global_process_set


def total(value: float, process_set: hvd.ProcessSet = everybody) -> float:
    return hvd.allreduce(torch.tensor([value]), op=hvd.Sum, process_set=process_set).item()


# -- the class --------------------------------------------------------------------------------------------------------


def test_a_set_that_is_not_registered():
    members = hvd.ProcessSet(range(2, -1, -1))
    assert members.ranks == [0, 1, 2]
    members.ranks.append(7)
    assert members.ranks == [0, 1, 2]
    assert members.process_set_id is None
    assert members.mpi_comm is None
    assert (members.size(), members.rank(), members.included()) == (None, None, None)
    assert repr(members) == "ProcessSet(process_set_id=None, ranks=[0, 1, 2], mpi_comm=None)"
    assert hvd.ProcessSet(np.array([1, 0])).ranks == [0, 1]
    assert pickle.loads(pickle.dumps(members)).ranks == [0, 1, 2]
    assert everybody.process_set_id == 0
    assert everybody.ranks == []
    assert everybody.included() is None
    assert pickle.loads(pickle.dumps(everybody)) is everybody
    for wrong in ([0, 0], [0.5], "ab", 3):
        with pytest.raises(ValueError, match="rank"):
            hvd.ProcessSet(wrong)


class Communicator:
    """What is used of mpi4py's: its processes are these ranks, in this order."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        return len(self.ranks)

    def allgather(self, sendobj: int) -> list[int]:
        assert sendobj in self.ranks
        return list(self.ranks)


# -- collectives in sets ----------------------------------------------------------------------------------------------


def collectives_in_sets() -> None:
    """Rank 0 is in the first set, rank 1 in the second, and rank 2 in both: there first in one, then in the other."""
    rank = hvd.rank()
    first, second = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1, 2]))
    assert (first.process_set_id, second.process_set_id) == (1, 2)
    assert get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1, 2]}
    assert everybody.ranks == [0, 1, 2]
    assert (everybody.size(), everybody.rank(), everybody.included()) == (3, rank, True)
    for mine in (first, second):
        assert mine.size() == 2
        assert mine.included() is (rank in mine.ranks)
        if rank not in mine.ranks:
            with pytest.raises(ValueError, match="not part of provided process set"):
                mine.rank()
            with pytest.raises(ValueError, match=rf"rank {rank} is not in process set \d"):
                hvd.allreduce(torch.ones(1), process_set=mine)
            continue
        place = mine.ranks.index(rank)
        assert mine.rank() == place
        _in_one_set(mine, place)
        _groups_in_one_set(mine, place)
        _gradients_in_one_set(mine, place)
    # Unnamed operations are numbered by set: the ranks were not in step, and yet
    assert total(rank) == 3
    assert hvd.remove_process_set(first) is True
    assert hvd.remove_process_set(first) is False
    assert first.process_set_id is None
    assert hvd.add_process_set([0, 1, 2][:2]).process_set_id == 1  # the number is free again
    assert second.process_set_id == 2
    hvd.barrier()


def _in_one_set(mine: hvd.ProcessSet, place: int) -> None:
    rank, last = hvd.rank(), mine.ranks[-1]
    x = torch.arange(3.0) + rank
    assert torch.equal(hvd.allreduce(x, process_set=mine), torch.arange(3.0) + sum(mine.ranks) / 2)
    assert hvd.allreduce(torch.tensor([-rank]), process_set=mine).item() == -(sum(mine.ranks) // 2)
    assert torch.equal(hvd.allreduce_(x.clone(), op=hvd.Max, process_set=mine), torch.arange(3.0) + last)
    assert hvd.broadcast(x, last, process_set=mine).tolist() == [last, last + 1, last + 2]  # a rank of the job
    outsider = ({0, 1, 2} - set(mine.ranks)).pop()
    with pytest.raises(ValueError, match="root_rank must be one of"):
        hvd.broadcast(x, outsider, process_set=mine)
    gathered = hvd.synchronize(hvd.allgather_async(torch.full((rank + 1,), rank), process_set=mine))
    assert gathered.tolist() == [r for r in mine.ranks for _ in range(r + 1)]
    output, received = hvd.alltoall(torch.tensor([rank, rank, rank + 10]), [2, 1], process_set=mine)
    assert received.tolist() == [2 - place] * 2
    assert output.tolist() == [each for r in mine.ranks for each in ([r, r] if place == 0 else [r + 10])]
    with pytest.raises(ValueError, match="splits must be 2 numbers"):
        hvd.alltoall(x, [1, 1, 1], process_set=mine)
    rows = hvd.reducescatter(x, op=hvd.Sum, process_set=mine)
    assert rows.tolist() == [[sum(mine.ranks), 2 + sum(mine.ranks)], [4 + sum(mine.ranks)]][place]
    assert hvd.broadcast_object({"from": rank}, root_rank=last, process_set=mine) == {"from": last}
    hvd.barrier(process_set=mine)
    sparse = torch.sparse_coo_tensor([[rank]], torch.tensor([2.0]), (3,))
    averaged = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average, process_set=mine)().to_dense()
    assert averaged.tolist() == [1.0 if r in mine.ranks else 0.0 for r in range(3)]


def _groups_in_one_set(mine: hvd.ProcessSet, place: int) -> None:
    rank, both = hvd.rank(), sum(mine.ranks)
    tensors = [torch.full((2,), float(rank)), torch.tensor([rank, 1])]
    summed = hvd.grouped_allreduce(tensors, op=hvd.Sum, process_set=mine, name="group")
    assert [each.tolist() for each in summed] == [[both, both], [both, 2]]
    gathered = hvd.grouped_allgather(tensors, process_set=mine)
    assert gathered[1].tolist() == [each for r in mine.ranks for each in (r, 1)]
    assert hvd.grouped_reducescatter(tensors, op=hvd.Sum, process_set=mine)[1].tolist() == [[both], [2]][place]


def _gradients_in_one_set(mine: hvd.ProcessSet, place: int) -> None:
    """As for all ranks, but means and sums are those of the set."""
    weight = float(hvd.rank() + 1)
    both = float(sum(mine.ranks) + 2)

    def leaf(rows: int) -> torch.Tensor:
        return torch.ones(rows, requires_grad=True)

    cases = {
        hvd.allreduce: [both / 2] * 2,
        hvd.allgather: [both / 2] * 2,
        hvd.alltoall: [r + 1.0 for r in mine.ranks],
        hvd.reducescatter: [r + 1.0 for r in mine.ranks],
    }
    for function, expected in cases.items():
        x = leaf(2)
        (function(x, process_set=mine) * weight).sum().backward()
        assert x.grad.tolist() == expected, function
    x = leaf(2)
    (hvd.reducescatter(x, op=hvd.Sum, process_set=mine) * weight).sum().backward()
    assert x.grad.tolist() == [2 * (r + 1.0) for r in mine.ranks]
    x = leaf(2)
    (hvd.broadcast(x, mine.ranks[1], process_set=mine) * weight).sum().backward()
    assert x.grad.tolist() == [[0.0, 0.0], [both / 2] * 2][place]
    for function, expected in (
        (hvd.grouped_allreduce, [both / 2] * 2),
        (hvd.grouped_allgather, [both / 2] * 2),
        (hvd.grouped_reducescatter, [r + 1.0 for r in mine.ranks]),
    ):
        x, y = leaf(2), leaf(2)
        one, other = function([x, y], process_set=mine)
        ((one.sum() + 2 * other.sum()) * weight).backward()
        assert (x.grad.tolist(), y.grad.tolist()) == (expected, [2 * each for each in expected])


def test_collectives_in_sets_that_overlap(rank_pool):
    rank_pool(3).run(collectives_in_sets, init=True, env=DYNAMIC)


# -- wrong use --------------------------------------------------------------------------------------------------------


def wrong_sets() -> None:
    rank = hvd.rank()
    hvd.init(process_sets="dynamic")  # does nothing: the job runs, and allows it
    evens, odds = hvd.add_process_set([0]), hvd.add_process_set([1])
    unregistered, removed = hvd.ProcessSet([0]), odds
    assert hvd.remove_process_set(odds)
    x = torch.ones(2)
    for wrong, message in (
        (unregistered, "not registered"),
        (removed, "not registered"),
        (None, "must be a ProcessSet"),
    ):
        for call in (
            lambda ps: hvd.allreduce(x, process_set=ps),
            lambda ps: hvd.allreduce_async_(x, process_set=ps),
            lambda ps: hvd.grouped_allreduce([x], process_set=ps),
            lambda ps: hvd.allgather(x, process_set=ps),
            lambda ps: hvd.broadcast(x, 0, process_set=ps),
            lambda ps: hvd.alltoall(x, process_set=ps),
            lambda ps: hvd.reducescatter(x, process_set=ps),
            lambda ps: hvd.broadcast_object(1, process_set=ps),
            lambda ps: hvd.sparse_allreduce_async(x.to_sparse(), "s", hvd.Sum, process_set=ps),
            lambda ps: hvd.barrier(process_set=ps),
        ):
            with pytest.raises(ValueError, match=message):
                call(wrong)
    for ranks, message in (
        ([0], "already"),
        ([0, 1], "already"),
        ([2], "from 0 to 1"),
        ([], "at least one"),
        ([-1], "-1"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.add_process_set(ranks)
    with pytest.raises(NotImplementedError, match="communicator"):
        hvd.add_process_set(hvd.ProcessSet(Communicator(1)))
    assert hvd.remove_process_set(unregistered) is False
    assert hvd.remove_process_set(everybody) is False
    if rank == 0:
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.allreduce(x, op=hvd.Adasum, process_set=evens)
    assert hvd.remove_process_set(evens)

    for lists in ([[0], [1]], [[0], [0, 1]], [[7], [1]]):  # the second is there already, and there is no rank 7
        with pytest.raises(hvd.HorovodInternalError, match="different process sets") as caught:
            hvd.add_process_set(lists[rank])
        assert caught.value.details == {0: str(lists[0]), 1: str(lists[1])}
    assert get_process_set_ids_and_ranks() == {0: [0, 1]}
    evens, odds = hvd.add_process_set([0]), hvd.add_process_set([1])
    with pytest.raises(hvd.HorovodInternalError, match="process sets differ"):
        hvd.remove_process_set([evens, odds][rank])
    assert total(rank + 1, [evens, odds][rank]) == rank + 1  # both are still there
    assert total(1) == 2
    assert copy.deepcopy({"set": evens})["set"] is evens
    assert pickle.loads(pickle.dumps(evens)).process_set_id is None
    hvd.shutdown()
    assert evens.process_set_id is None
    hvd.init(process_sets="dynamic")
    assert evens.process_set_id is None
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(x, process_set=evens)
    assert hvd.add_process_set(evens) is evens
    assert evens.process_set_id == 1


def test_wrong_sets_raise_and_leave_no_trace(rank_pool):
    rank_pool(2).run(wrong_sets, init=True, env=DYNAMIC)


# -- sets from the start ----------------------------------------------------------------------------------------------


def from_the_start() -> None:
    hvd.init(process_sets="dynamic")
    place = hvd.rank()
    hvd.shutdown()
    for wrong, message in (
        ("static", "list of ProcessSet"),
        ([[0]], "objects of ProcessSet"),
        (7, "list of ProcessSet"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.init(process_sets=wrong)
    for sets in ([[0], [0]], [[0], [1, 0]], [[0], [0, 1]]):
        with pytest.raises(ValueError, match="process_sets entry number 1 is a duplicate"):
            hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in sets])
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="from 0 to 1"):
        hvd.init(process_sets=[hvd.ProcessSet([2])])
    for differing in ([hvd.ProcessSet([place])], None if place else [hvd.ProcessSet([0])]):
        with pytest.raises(hvd.HorovodInternalError, match=r"different process_sets[\s\S]*rank 0: \[\[0\]\]"):
            hvd.init(process_sets=differing)
        assert not hvd.is_initialized()

    alone = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=alone)
    hvd.init(process_sets=alone)
    hvd.init()
    with pytest.raises(ValueError, match="init\\(\\) was called before"):
        hvd.init(process_sets=[hvd.ProcessSet([0])])
    assert [each.process_set_id for each in alone] == [1, 2]
    assert total(place + 1, alone[place]) == place + 1
    for change in (hvd.add_process_set, hvd.remove_process_set):
        with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
            change(alone[0])
    hvd.barrier()  # a job ends with the first rank that leaves
    hvd.shutdown()
    assert [each.process_set_id for each in alone] == [None, None]


def communicators() -> None:
    """Each rank gives the communicator that it is in; those of the others become sets, too."""
    rank = int(os.environ["REIGEN_RANK"])
    mine = hvd.ProcessSet(Communicator(2, 0) if rank != 1 else Communicator(1))
    hvd.init(comm=Communicator(0, 1, 2), process_sets=[mine, hvd.ProcessSet([0, 1])])
    assert get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1], 3: [0, 1]}
    assert mine.process_set_id == (2 if rank == 1 else 1)
    assert total(rank, mine) == [2, 1, 2][rank]
    hvd.barrier()
    hvd.shutdown()


def test_sets_from_the_start(rank_pool):
    rank_pool(2).run(from_the_start, check_leaks=True)
    rank_pool(3).run(communicators)


# -- a job of some of the ranks ---------------------------------------------------------------------------------------


def some_of_the_ranks() -> None:
    rank = int(os.environ["REIGEN_RANK"])
    for wrong, message in (
        ([0, 0], "twice"),
        ([3], "from 0 to 2"),
        ([(rank + 1) % 3], f"rank {rank}"),
        (2, "list of ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.init(comm=wrong)
    with pytest.raises(ValueError, match=f"MPI knows nothing.*comm=.{rank}."):
        hvd.init(comm=Communicator(rank))
    with pytest.raises(ValueError, match="one communicator"):
        hvd.init(comm=[Communicator(0, 1, 2), Communicator(rank)])
    for _ in range(2):  # two jobs beside each other, and again
        hvd.init(comm=[2, 0] if rank != 1 else [1])
        assert (hvd.rank(), hvd.size()) == [(1, 2), (0, 1), (0, 2)][rank]
        assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (
            hvd.rank(),
            hvd.size(),
            0,
            1,
        )
        assert hvd.is_homogeneous()
        assert hvd.allgather(torch.tensor([rank])).tolist() == ([2, 0] if rank != 1 else [1])
        assert everybody.ranks == list(range(hvd.size()))
        hvd.shutdown()
    hvd.init(comm=[0, 1, 2] if rank else None)  # all ranks in order: the same job as without a list
    assert (hvd.rank(), total(1.0)) == (rank, 3.0)
    hvd.shutdown()
    hvd.init(comm=Communicator(2, 1, 0))
    assert (hvd.rank(), total(1.0)) == (2 - rank, 3.0)
    hvd.shutdown()


@pytest.mark.slow
def test_a_job_of_some_of_the_ranks(rank_pool):
    rank_pool(3).run(some_of_the_ranks, check_leaks=True)


def waiting_in_vain() -> None:
    if os.environ["REIGEN_RANK"] == "0":
        with pytest.raises(hvd.HorovodInternalError, match=r"rank\(s\) 1 did not call init"):
            hvd.init(comm=[0, 1])


def test_a_rank_of_the_list_that_does_not_come_is_named(rank_pool):
    rank_pool(2).run(waiting_in_vain, env={"REIGEN_START_TIMEOUT": "1"})
