"""DistributedOptimizer in process sets: its ranks average among themselves, the others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen.errors import ArgumentError, ReplicaError
from tests.torch.training import assert_same, batches, make_net, mean_loss

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def rows(x: torch.Tensor, ranks: list[int]) -> torch.Tensor:
    return torch.cat([x.tensor_split(hvd.size())[rank] for rank in ranks])


def trains_in_sets() -> None:
    """Ranks 0 and 2 train together, rank 1 alone, and all of them a second model; sets were made in this order."""
    rank, mine = hvd.rank(), [hvd.rank()]
    hvd.add_process_set([1])
    pair = hvd.add_process_set([2, 0])
    ranks = [0, 2] if rank in (0, 2) else [1]
    truth, model, other_truth, other = make_net(), make_net(), make_net(5), make_net(5)
    reference, other_reference = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (truth, other_truth))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), process_set=pair
    )
    everybodys = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    assert bool(optimizer._reducer.reducers) == (rank != 1)
    for x, y in batches(4):
        for o, m, members in (
            (reference, truth, ranks),
            (other_reference, other_truth, [0, 1, 2]),
            (everybodys, other, mine),
            (optimizer, model, mine),
        ):
            o.zero_grad()
            mean_loss(m, rows(x, members), rows(y, members)).backward()
            o.step()
        assert_same(model, truth)
        assert_same(other, other_truth)
    if rank != 1:
        if rank == 2:
            model.head.bias.data += 1
        optimizer.zero_grad()
        mean_loss(model, rows(x, mine), rows(y, mine)).backward()
        with pytest.raises(ReplicaError, match=r"head\.bias") as caught:
            optimizer.step()
        assert caught.value.ranks == (2,)
        assert list(caught.value.details) == [0, 2]
    hvd.barrier()


def test_the_ranks_of_a_set_average_among_themselves(rank_pool):
    rank_pool(3).run(trains_in_sets, init=True, env={**DYNAMIC, "REIGEN_CHECK_REPLICAS": "5"})


def sparse_and_closures_in_a_set() -> None:
    """Sparse gradients are gathered, and losses of LBFGS averaged, in the set alone; rank 3 has no gradient."""
    rank = hvd.rank()
    members = hvd.add_process_set([0, 1, 3])
    embedding = nn.Embedding(5, 2, sparse=True)
    nn.init.zeros_(embedding.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=3.0), process_set=members)
    if rank != 2:
        for _ in range(2):
            optimizer.zero_grad()
            if rank != 3:
                embedding(torch.tensor([rank, 4])).sum().backward()
            optimizer.step()
        assert embedding.weight[:, 0].tolist() == [-2, -2, 0, 0, -4]
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS([weight], max_iter=30, line_search_fn="strong_wolfe"), process_set=members
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - rank).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(weight.item(), 2.0 if rank == 2 else 4 / 3)
    hvd.barrier()


@pytest.mark.slow
def test_sparse_gradients_and_closures_in_a_set(rank_pool):
    rank_pool(4).run(sparse_and_closures_in_a_set, init=True, env=DYNAMIC)


def wrong_sets() -> None:
    """A set that is not registered is refused on all ranks; a difference within a set is told to its ranks alone."""
    rank = hvd.rank()
    weight = nn.Parameter(torch.zeros(2 + (rank == 2)))

    def wrap(process_set: object) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=process_set)

    for wrong in (hvd.ProcessSet([0, 1]), [0, 1], 0, None):
        with pytest.raises(ArgumentError, match=r"process_set|registered"):
            wrap(wrong)
    members = hvd.add_process_set([1, 2])
    optimizer = wrap(members)
    for _ in range(2):
        weight.sum().backward()
        if rank == 0:
            optimizer.step()
        else:
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 1: .*\(2,\)[\s\S]*rank 2: .*\(3,\)"):
                optimizer.step()
        optimizer.zero_grad()
    assert weight.tolist() == ([-2.0] * 2 if rank == 0 else [0.0] * (1 + rank))
    hvd.remove_process_set(members)
    if rank:
        weight.sum().backward()
        with pytest.raises(ArgumentError, match="process set"):
            optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def test_sets_that_are_wrong(rank_pool):
    rank_pool(3).run(wrong_sets, init=True, env=DYNAMIC)
