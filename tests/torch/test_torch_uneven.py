"""Ranks with different amounts of data: join() in a training loop, and uneven_data(), which needs no ceremony."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen.errors import ArgumentError, DeadlineError, JoinedError, PeerLostError, StepOrderError
from tests.torch.training import assert_identical_everywhere, assert_same, make_net, mean_loss

#: for 3 ranks, the number of batches in each epoch; in the first one rank 0, whose order is the plan's, has none
EPOCHS = [(0, 2, 3), (4, 1, 2), (2, 2, 2), (0, 0, 1), (1, 3, 0)]


def batch(epoch: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * epoch + 100 * rank + step)
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randn(3, 2, dtype=torch.float64, generator=generator)


def make_pair(**options: object) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    truth, model = make_net(), make_net()
    reference = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return truth, reference, model, hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def true_step(truth: nn.Module, reference: torch.optim.Optimizer, parts: list, divisor: int) -> None:
    """A step of the one process that has everything: the sum of the parts' gradients, divided."""
    reference.zero_grad()
    for x, y in parts:
        (mean_loss(truth, x, y) / divisor).backward()
    reference.step()


def trains_uneven(with_model: bool) -> None:
    rank = hvd.rank()
    truth, reference, model, optimizer = make_pair()
    for epoch, counts in enumerate(EPOCHS):
        with hvd.uneven_data(optimizer, model if with_model else None):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                mean_loss(model, *batch(epoch, rank, step)).backward()
                optimizer.step()
                hvd.allreduce(torch.ones(1))  # a metric; it has no name
        for step in range(max(counts)):
            active = [r for r, count in enumerate(counts) if step < count]
            true_step(truth, reference, [batch(epoch, r, step) for r in active], len(active))
        assert_same(model, truth)
        assert_identical_everywhere(model)
        states = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        for state, parameter in zip(states, truth.parameters(), strict=True):
            torch.testing.assert_close(state, reference.state[parameter]["momentum_buffer"])
        assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum).item() == 3.0
    assert optimizer._reducer.reducers[0]._memory.is_registered  # planned by now


@pytest.mark.parametrize("with_model", [True, False])
def test_uneven_data_is_averaged_over_the_ranks_that_have_any(rank_pool, with_model):
    env = {"REIGEN_CHECK_REPLICAS": "2", "REIGEN_BUCKET_BYTES": "1000"}
    rank_pool(3).run(trains_uneven, with_model, init=True, env=env)


def uneven_accumulation() -> None:
    """Two passes a step. Rank 0 uses its odd last batch in a step of one pass, rank 1 leaves its own to be dropped."""
    rank, counts = hvd.rank(), (3, 5)
    truth, reference, model, optimizer = make_pair(backward_passes_per_step=2)
    for epoch in range(2):
        with hvd.uneven_data(optimizer, model):
            for step in range(counts[rank]):
                if step % 2 == 0:
                    optimizer.zero_grad()
                mean_loss(model, *batch(epoch, rank, step)).backward()
                if step % 2 or (rank == 0 and step == 2):
                    optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        own, other = ([batch(epoch, r, step) for step in range(5)] for r in range(2))
        true_step(truth, reference, [*own[:2], *other[:2]], 2)
        true_step(truth, reference, [own[2], *other[2:4]], 2)
        assert_same(model, truth)
        assert_identical_everywhere(model)


def test_uneven_data_with_accumulated_gradients(rank_pool):
    rank_pool(2).run(uneven_accumulation, init=True)


def two_models_unevenly() -> None:
    """Two optimizers in one loop, one with an adaptive state; only the list of both is right."""
    rank, n = hvd.rank(), hvd.size()
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    one = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
    two = hvd.DistributedOptimizer(torch.optim.Adam([second], lr=0.5))
    with hvd.uneven_data([one, two]):
        for _ in range(2 * rank):
            for optimizer, parameter in ((one, first), (two, second)):
                optimizer.zero_grad()
                (parameter * (rank + 1)).sum().backward()
                optimizer.step()
    # Steps 1 and 2: ranks 1 and 2; steps 3 and 4: rank 2 alone.
    assert first.tolist() == [-2 * 2.5 - 2 * 3.0] * 2 if n == 3 else [-2 * 2.0] * 2
    assert two.state[second]["step"] == 2 * (n - 1)
    assert len({str(value) for value in hvd.allgather_object((first.tolist(), second.tolist()))}) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_optimizers_in_one_loop(rank_pool, size):
    rank_pool(size).run(two_models_unevenly, init=True) if size > 1 else rank_pool(1).run(alone, init=True)


def alone() -> None:
    truth, reference, model, optimizer = make_pair()
    with hvd.uneven_data(optimizer, model):
        mean_loss(model, *batch(0, 0, 0)).backward()
        optimizer.step()
    true_step(truth, reference, [batch(0, 0, 0)], 1)
    assert_same(model, truth)


def joins_by_hand() -> None:
    """Horovod's join(): averages divide by all ranks, and whoever joined early keeps what it had."""
    rank, n = hvd.rank(), hvd.size()
    truth, reference, model, optimizer = make_pair()
    for epoch, counts in enumerate(EPOCHS):
        steps = iter(range(max(counts)))
        for step in range(counts[rank]):
            optimizer.zero_grad()
            mean_loss(model, *batch(epoch, rank, step)).backward()
            optimizer.step()
            parts = [batch(epoch, r, step) for r, count in enumerate(counts) if step < count]
            true_step(truth, reference, parts, n)
            assert_same(model, truth)
            next(steps)
        last = hvd.join()
        assert counts[last] == max(counts)
        for step in steps:
            parts = [batch(epoch, r, step) for r, count in enumerate(counts) if step < count]
            true_step(truth, reference, parts, n)
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        assert_same(model, truth)
        assert_identical_everywhere(model)


def test_join_in_a_training_loop(rank_pool):
    rank_pool(3).run(joins_by_hand, init=True, env={"REIGEN_CHECK_REPLICAS": "3"})


def sparse_and_joined(planned: bool) -> None:
    """Sparse gradients are gathered, which nobody can do for a rank that has joined; made dense they are reduced."""
    rank = hvd.rank()
    for as_dense in (False, True):
        embedding = nn.Embedding(3, 2, sparse=True)
        nn.init.zeros_(embedding.weight)
        other = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([embedding.weight, other], lr=1.0),
            [("words", embedding.weight), ("other", other)],
            sparse_as_dense=as_dense,
            op=hvd.Sum,
        )

        def step(has_words: bool, optimizer=optimizer, embedding=embedding, other=other) -> None:
            optimizer.zero_grad()
            loss = other.sum() + (embedding(torch.tensor([1])).sum() if has_words else 0)
            loss.backward()
            optimizer.step()

        if planned:
            step(has_words=True)
        if rank:
            if as_dense:
                step(has_words=rank == 1)
            else:
                for _ in range(2):
                    with pytest.raises(JoinedError, match=r"words: .*sparse_as_dense=True") as caught:
                        step(has_words=rank == 1)  # all ranks that go on get the error, with or without such a gradient
                    assert caught.value.ranks == (0,)
        hvd.join()
        words, others = (-3.0 if planned else 0.0) - (as_dense and rank > 0), (-3.0 if planned else 0.0)
        assert embedding.weight[1].tolist() == [words] * 2
        assert other.item() == others - (2 if as_dense and rank else 0)
        hvd.broadcast_parameters(embedding.state_dict(), root_rank=0)
        before = embedding.weight[1, 0].item()
        step(has_words=True)
        assert embedding.weight[1, 0].item() == before - 3  # all is well again


@pytest.mark.parametrize("planned", [False, True])
def test_sparse_gradients_while_a_rank_has_joined(rank_pool, planned):
    rank_pool(3).run(sparse_and_joined, planned, init=True)


def misused() -> None:
    rank = hvd.rank()
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    lbfgs = hvd.DistributedOptimizer(torch.optim.LBFGS([nn.Parameter(torch.zeros(2))]))

    def loop(optimizer: object, num_steps: int = 0, forgotten: bool = False) -> None:
        with hvd.uneven_data(optimizer):
            for step in range(num_steps):
                optimizer.zero_grad()
                weight.sum().backward()
                if not forgotten or step + 1 < num_steps:
                    optimizer.step()
            if num_steps == 7:
                raise ZeroDivisionError

    for wrong, message in ((torch.optim.SGD([weight], lr=1.0), "DistributedOptimizer"), (lbfgs, "LBFGS"), (3, "int")):
        with pytest.raises(ArgumentError, match=message):
            loop(wrong)
    with hvd.uneven_data(optimizer), pytest.raises(ArgumentError, match="running already"):
        loop(optimizer)
    weight.sum().backward()
    with pytest.raises(StepOrderError, match="was entered"):
        loop(optimizer)
    optimizer.step()
    # Errors on all ranks: nobody has joined, and the loop can be entered anew.
    with pytest.raises(StepOrderError, match="ended"):
        loop(optimizer, 2, forgotten=True)
    optimizer.synchronize()
    with pytest.raises(ZeroDivisionError):
        loop(optimizer, 7)
    loop(optimizer, rank)
    assert len({str(value) for value in hvd.allgather_object(weight.tolist())}) == 1


def test_misuse_is_explained(rank_pool):
    rank_pool(2).run(misused, init=True)


def dies_in_the_loop() -> None:
    """Rank 1 gets an exception in its loop and ends; rank 0 waits in its own, or at its end."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

    def loop() -> None:
        with hvd.uneven_data(optimizer):
            for step in range(3 - hvd.rank()):
                optimizer.zero_grad()
                weight.sum().backward()
                optimizer.step()
                if hvd.rank() == 1 and step == 1:
                    raise ZeroDivisionError

    with pytest.raises(PeerLostError if hvd.rank() == 0 else ZeroDivisionError):
        loop()


def test_an_exception_in_the_loop_does_not_leave_the_others_waiting(rank_pool):
    rank_pool(2).run(dies_in_the_loop, init=True)


def only_some_enter() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

    def step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    def loop() -> None:
        with hvd.uneven_data(optimizer):
            step()

    step()
    with pytest.raises(hvd.HorovodInternalError, match="ranks that have data"):
        loop() if hvd.rank() == 0 else step()
    assert weight.tolist() == [-1.0, -1.0]


def test_all_ranks_must_enter_the_loop(rank_pool):
    rank_pool(2).run(only_some_enter, init=True)


def train_unevenly(last: str) -> list[str]:
    """Returns what the error says beyond its message; rank 0 has a batch less."""
    _, _, model, optimizer = make_pair()

    def step(number: int) -> None:
        optimizer.zero_grad()
        mean_loss(model, *batch(0, hvd.rank(), number)).backward()
        optimizer.step()

    step(0)
    step(1)
    if hvd.rank() == 1:
        with pytest.raises((PeerLostError, DeadlineError)) as raised:
            step(2)
        return raised.value.__notes__
    if last == "barrier":
        with pytest.raises((DeadlineError, PeerLostError)):
            hvd.barrier()
    return []


@pytest.mark.parametrize("last", ["end", "barrier"])
def test_an_error_because_of_a_missing_batch_names_uneven_data_and_join(rank_pool, last):
    """A rank with fewer batches has left, or is in another collective."""
    notes = rank_pool(2).run(train_unevenly, last, init=True, env={"REIGEN_DEADLINE": "2"})[1]
    assert any("`with hvd.uneven_data(optimizer, model):`" in note and "`hvd.join()`" in note for note in notes)
