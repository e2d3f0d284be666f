"""Fingerprints, who has diverged, and the error that all ranks get."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reigen.torch as hvd
from reigen.api.gradients.replica_check import Divergence, ReplicaCheckSchedule, find_divergence, fingerprint
from reigen.errors import ReplicaError
from reigen.torch.adapter import tensor_bytes
from tests.torch.training import batches, make_net, mean_loss, mine

ROW = 4096


def some_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@given(st.sampled_from([1, 7, ROW - 1, ROW, 3 * ROW + 5]), st.data())
def test_one_flipped_bit_changes_the_fingerprint(size, data):
    before = some_bytes(size)
    after = before.copy()
    after[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(before) == fingerprint(before.copy()) != fingerprint(after)


@given(st.lists(st.integers(0, 3 * ROW // 8 - 1), min_size=2, max_size=2, unique=True))
def test_two_words_that_trade_places_change_the_fingerprint(places):
    before = some_bytes(3 * ROW).view(np.uint64)
    after = before.copy()
    after[places] = before[places[::-1]]
    assert fingerprint(before.view(np.uint8)) != fingerprint(after.view(np.uint8))


def test_length_counts_and_alignment_does_not():
    memory = np.zeros(2 * ROW + 9, np.uint8)
    prints = [fingerprint(memory[:size]) for size in (0, 1, 8, ROW, ROW + 1, 2 * ROW)]
    assert len(set(prints)) == len(prints)
    memory[:] = some_bytes(memory.size)
    shifted = memory.copy()
    shifted[1:] = memory[:-1]
    assert fingerprint(memory[: 2 * ROW]) == fingerprint(shifted[1 : 2 * ROW + 1])
    assert -(2**63) <= fingerprint(memory) < 2**63


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([[1, 2, 3]] * 3, None),
        ([[1, 2, 3], [1, 9, 9], [1, 2, 3]], Divergence(1, (5,), 2)),
        ([[7, 2], [1, 2], [1, 2]], Divergence(0, (4,), 1)),  # the lowest rank has no more weight than another
        ([[1, 2], [1, 3]], Divergence(1, (5,), 1)),  # but for a tie
        ([[0], [1], [1], [2], [2]], Divergence(0, (4, 7, 8), 1)),
        ([[], []], None),
    ],
)
def test_the_majority_is_right_and_the_lowest_rank_decides_a_tie(table, expected):
    ranks = range(4, 4 + len(table))
    assert find_divergence(ranks, np.array(table, np.int64)) == expected


def test_steps_are_counted_anew_after_a_join():
    schedule = ReplicaCheckSchedule()
    joins = [0, 0, 0, 0, 1, 1, 1, 3, 3]
    assert [schedule.due(2, n) for n in joins] == [False, True, False, True, False, True, False, False, True]
    assert not any(schedule.due(0, 3) for _ in range(9))


def test_the_bytes_of_a_tensor_are_its_memory():
    dense = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    assert np.shares_memory(tensor_bytes(dense), dense.permute(0, 2, 3, 1).numpy())
    assert tensor_bytes(dense).size == 96
    assert tensor_bytes(torch.arange(8.0)[::2]).tobytes() == torch.tensor([0.0, 2, 4, 6]).numpy().tobytes()
    assert tensor_bytes(torch.tensor(3, dtype=torch.int16)).tolist() == [3, 0]
    assert tensor_bytes(torch.ones(2, dtype=torch.bfloat16)).tolist() == [128, 63] * 2
    assert tensor_bytes(torch.empty(0)).size == tensor_bytes(torch.empty(3, 0, 2)).size == 0


def diverges() -> None:
    """The last rank spoils one element of `head.bias` and, after that, one of `shared.weight`; every 2nd step looks."""
    rank, n = hvd.rank(), hvd.size()
    model = make_net()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    named = [("frozen", frozen), *model.named_parameters()]
    plain = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, named)

    def step() -> None:
        x, y = next(batches(1))
        optimizer.zero_grad()
        mean_loss(model, mine(x), mine(y)).backward()
        optimizer.step()

    for _ in range(4):
        step()
    for number, (name, spoilt) in enumerate([("head.bias", model.head.bias), ("shared.weight", model.shared.weight)]):
        if rank == n - 1:
            spoilt.data.view(-1)[1] += 1e-15
        step()  # not looked at
        with pytest.raises(
            ReplicaError, match=rf"{name}: .*rank {n - 1} holds .*\({number + 1} of 9 tensors"
        ) as caught:
            step()
        error = caught.value
        assert (error.tensor, error.ranks, list(error.details)) == (name, (n - 1,), list(range(n)))
        assert isinstance(error, hvd.HorovodInternalError)
        if number:
            hvd.broadcast_parameters(dict(named), root_rank=0)
    for _ in range(4):
        step()  # all is well again
    if rank == n - 1:
        frozen.data[0] = -0.0
    step()
    with pytest.raises(ReplicaError, match="frozen"):
        step()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_learns_which_tensor_and_which_rank(rank_pool, size):
    rank_pool(size).run(diverges, init=True, env={"REIGEN_CHECK_REPLICAS": "2"})


def begins_differently(op: int, ranks: list[int], broadcasts: bool) -> None:
    """Every rank draws its own parameters; rank 0 of the set says so in the first step, and never again."""
    torch.manual_seed(hvd.rank())
    model = nn.Linear(4, 2)
    members = hvd.add_process_set(ranks) if len(ranks) < hvd.size() else hvd.global_process_set
    if broadcasts:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op, process_set=members)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if step == 0 and os.environ.get("REIGEN_CHECK_REPLICAS") and not broadcasts:
            with pytest.raises(ReplicaError, match="broadcast_parameters"):
                optimizer.step()
            break
        optimizer.step()
    hvd.barrier()


WARNING = r"the ranks begin to train with different parameters: rank \d holds not what the others hold in weight"


@pytest.mark.parametrize(
    ("op", "ranks", "broadcasts", "every", "speaker"),
    [
        (hvd.Average, [0, 1], False, "0", 0),
        (hvd.Adasum, [0, 1], False, "0", 0),
        (hvd.Average, [1, 2], False, "0", 1),
        (hvd.Average, [0, 1], True, "0", None),
        (hvd.Average, [0, 1], False, "7", None),
        (hvd.Adasum, [0, 1], False, "7", None),
        (hvd.Average, [0, 1], True, "1", None),
    ],
)
def test_parameters_that_nobody_has_broadcast(rank_pool, op, ranks, broadcasts, every, speaker):
    pool = rank_pool(max(ranks) + 1)
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **({} if every == "0" else {"REIGEN_CHECK_REPLICAS": every})}
    pool.run(begins_differently, op, ranks, broadcasts, init=True, env=env)
    found = [len(re.findall(WARNING, pool.output(rank)[1])) for rank in range(pool.size)]
    assert found == [int(rank == speaker) for rank in range(pool.size)]


def differs_in_a_second_job(op: int) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=op)

    def step() -> None:
        optimizer.zero_grad()
        (weight * torch.arange(4.0)).sum().backward()
        optimizer.step()

    step()
    hvd.shutdown()
    hvd.init()
    weight.data += hvd.rank()
    with pytest.raises(ReplicaError):
        step()
    hvd.shutdown()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_parameters_are_compared_again_when_init_is_called_again(rank_pool, op):
    rank_pool(2).run(differs_in_a_second_job, op, env={"REIGEN_CHECK_REPLICAS": "100"})


def trains_alone() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    optimizer.step()


def test_one_rank_has_nothing_to_compare(rank_pool):
    rank_pool(1).run(trains_alone, init=True, env={"REIGEN_CHECK_REPLICAS": "1"})
