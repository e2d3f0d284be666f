"""`reigen.torch` with tensors on "GPUs": collectives and DistributedOptimizer, between ranks that are threads."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen.errors import MismatchError
from tests.devices.torch_ranks import TorchDevice, TorchRanks
from tests.torch.training import (
    assert_identical_everywhere,
    assert_same,
    batches,
    make_net,
    mean_loss,
    mine,
    train,
    whole,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TorchRanks:
    return TorchRanks(monkeypatch)


def on_device(device: TorchDevice) -> Counter[str]:
    """How often process groups were asked to move something, by method."""
    return Counter(name for name in device.calls if name not in ("connect", "abort", "shutdown"))


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def test_every_collective(ranks: TorchRanks) -> None:
    def act(device: TorchDevice) -> None:
        rank, size = hvd.rank(), hvd.size()
        torch.testing.assert_close(hvd.allreduce(full(rank, 2, 3), op=hvd.Average), full(1.0, 2, 3))
        x = full(rank + 1, 4)
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        torch.testing.assert_close(x, full(6.0, 4))
        torch.testing.assert_close(hvd.broadcast(full(rank, 5), root_rank=2), full(2.0, 5))
        y = full(rank, 3)
        hvd.broadcast_(y, root_rank=1)
        torch.testing.assert_close(y, full(1.0, 3))
        gathered = hvd.allgather(full(rank, rank + 1, 2))
        torch.testing.assert_close(gathered, torch.cat([full(r, r + 1, 2) for r in range(size)]))
        torch.testing.assert_close(hvd.allgather(torch.tensor(float(rank))), torch.arange(3.0))
        received, splits = hvd.alltoall(torch.arange(6.0), splits=torch.tensor([1, 2, 3], dtype=torch.int32))
        assert splits.tolist() == [rank + 1] * 3
        begin = [0, 1, 3][rank]
        torch.testing.assert_close(received, torch.arange(6.0)[begin : begin + rank + 1].repeat(3))
        scattered = hvd.reducescatter(torch.arange(4.0), op=hvd.Sum)
        torch.testing.assert_close(scattered, 3 * torch.arange(4.0)[[0, 1] if rank == 0 else [rank + 1]])
        first, second = hvd.grouped_allreduce([full(rank, 2), full(rank, 3, dtype=torch.float64)], op=hvd.Max)
        assert (first.tolist(), second.tolist()) == ([2.0] * 2, [2.0] * 3)
        moves = ("allreduce", "_reduce_scatter_base", "broadcast", "_allgather_base", "alltoall_base")
        assert all(on_device(device)[name] for name in moves)

    ranks.run(3, act)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8])
def test_types(ranks: TorchRanks, dtype: torch.dtype) -> None:
    def act(device: TorchDevice) -> Counter[str]:
        assert hvd.allreduce(full(3, 4, dtype=dtype), op=hvd.Sum).tolist() == [6.0] * 4
        assert hvd.allreduce(full(3, 4, dtype=dtype), op=hvd.Product).tolist() == [9.0] * 4
        return on_device(device)

    assert ranks.run(2, act) == [{"allreduce": 2}] * 2


def test_what_devices_cannot_do_goes_through_the_host(ranks: TorchRanks) -> None:
    def act(device: TorchDevice) -> Counter[str]:
        integers = full(3 + hvd.rank(), 4, dtype=torch.int32)
        assert hvd.allreduce(integers, op=hvd.Average).tolist() == [3] * 4
        assert hvd.allreduce(full(2, 4), op=hvd.Max, prescale_factor=0.5).tolist() == [1.0] * 4
        assert hvd.allreduce(full(2, 4, dtype=torch.int16), op=hvd.Sum).tolist() == [4] * 4
        hvd.allreduce(full(1.0 + hvd.rank(), 4), op=hvd.Adasum)
        both = hvd.grouped_allreduce([full(1, 2), full(1, 2, dtype=torch.int16)], op=hvd.Sum)
        assert [one.tolist() for one in both] == [[2, 2], [2, 2]]
        return on_device(device)

    assert ranks.run(2, act) == [{}, {}]


def test_layouts(ranks: TorchRanks) -> None:
    """Transposed, sliced, scalars, empty: the result has the shape, and the order, of the input."""

    def act(device: TorchDevice) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        for view in (base.t(), base[:, 1:3], base[::2], torch.tensor(2.0), torch.empty(0, 3)):
            torch.testing.assert_close(hvd.allreduce(view, op=hvd.Sum), 2 * view)
            own = view.clone(memory_format=torch.preserve_format)
            window = torch.zeros(3, 8)[:, ::2]
            window.copy_(base)
            hvd.allreduce_(window, op=hvd.Sum)
            torch.testing.assert_close(window, 2 * base)
            hvd.allreduce_(own, op=hvd.Sum)
            torch.testing.assert_close(own, 2 * view)
        assert on_device(device) == {"allreduce": 13}  # the empty ones need nothing

    ranks.run(2, act)


def test_an_operation_in_place_is_one_change_of_the_tensor(ranks: TorchRanks) -> None:
    """torch counts changes: those of the process group's on the way are none of the user's."""

    def act(device: TorchDevice) -> int:
        x = full(1.0, 4)
        hvd.allreduce_(x, op=hvd.Average)
        return x._version

    assert ranks.run(2, act) == [1, 1]


def test_gradients_flow_through_collectives(ranks: TorchRanks) -> None:
    def act(device: TorchDevice) -> list[float]:
        x = full(1.0 + hvd.rank(), 3).requires_grad_()
        (hvd.allreduce(x * x, op=hvd.Sum).sum() * (1 + hvd.rank())).backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert ranks.run(2, act) == [[6.0] * 3, [12.0] * 3]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [400, 1 << 20])
def test_training(ranks: TorchRanks, size: int, bucket_bytes: int) -> None:
    """The same parameters as one process with the whole batch gets; gradients are views of buckets on the device."""
    made = make_net()  # here: the generator of random numbers is common to all threads

    def act(device: TorchDevice) -> None:
        truth, model = copy.deepcopy(made), copy.deepcopy(made)
        train(truth, torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9), whole)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        before = device.num_reduced
        train(model, optimizer, mine)
        assert_same(model, truth)
        assert_identical_everywhere(model)
        (reducer,) = optimizer._reducer.reducers
        buckets = reducer._places.buckets
        assert device.num_reduced - before == 4 * len(buckets)
        assert (len(buckets) > 1) == (bucket_bytes == 400)
        assert not reducer._places.arrays, "there are buckets in host memory"
        storages = {bucket.untyped_storage().data_ptr() for bucket in buckets}
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert not parameter.numel() or parameter.grad.untyped_storage().data_ptr() in storages

    ranks.run(size, act, bucket_bytes=bucket_bytes)


def test_until_its_bucket_is_submitted_a_gradient_is_what_backward_made(ranks: TorchRanks) -> None:
    """A hook of the user's reads it, and what it changes is summed."""
    made = make_net()

    def act(device: TorchDevice) -> None:
        model = copy.deepcopy(made)
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        parameters = dict(model.named_parameters())
        found: dict[str, torch.Tensor] = {}

        def note(name: str, parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()
            if len(found) == 1:
                parameter.grad.mul_(2.0)

        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(functools.partial(note, name))
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = mean_loss(model, mine(x), mine(y))
            expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
            found.clear()
            mean_loss(model, mine(x), mine(y)).backward()
            *whole, _ = found  # the last one completes the bucket: it is being reduced
            for name in whole:
                torch.testing.assert_close(found[name], expected[name])
            optimizer.synchronize()
            for name, parameter in parameters.items():
                factor = 2.0 if name == whole[0] else 1.0
                sums = hvd.allreduce(expected[name] * factor, op=hvd.Average, name=name)
                torch.testing.assert_close(parameter.grad, sums)
            with optimizer.skip_synchronize():
                optimizer.step()

    ranks.run(2, act, bucket_bytes=1 << 20)


@pytest.mark.parametrize("option", ["compression", "predivide", "layout"])
def test_training_with_options(ranks: TorchRanks, option: str) -> None:
    made = make_net()

    def act(device: TorchDevice) -> None:
        truth, model = copy.deepcopy(made), copy.deepcopy(made)
        if option == "layout":
            truth, model = (m.to(memory_format=torch.channels_last) for m in (truth, model))
        train(truth, torch.optim.SGD(truth.parameters(), lr=0.1), whole)
        options: dict[str, Any] = {
            "compression": {"compression": hvd.Compression.fp16},
            "predivide": {"gradient_predivide_factor": 2.0},
        }.get(option, {})
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        train(model, optimizer, mine)
        if option == "compression":
            assert_identical_everywhere(model)
            for value, other in zip(model.parameters(), truth.parameters(), strict=True):
                torch.testing.assert_close(value, other, rtol=0, atol=1e-2)
        else:
            assert_same(model, truth)
        assert optimizer._reducer.reducers[0]._places.buckets

    ranks.run(2, act)


def test_ranks_with_different_amounts_of_data(ranks: TorchRanks) -> None:
    def act(device: TorchDevice) -> None:
        model = nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        with hvd.uneven_data(optimizer, model):
            for _ in range(2 + 2 * hvd.rank()):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
        # Every step's average is the same gradient, whoever took part: 4 steps of -0.1 on the rank with the most data.
        moved = [value.detach().clone() for value in model.parameters()]
        others = hvd.allgather_object([value.tolist() for value in moved])
        assert all(other == others[0] for other in others)

    ranks.run(2, act)


def test_sparse_gradients(ranks: TorchRanks) -> None:
    def act(device: TorchDevice) -> list[float]:
        embedding = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(embedding.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
        embedding(torch.tensor([hvd.rank(), 3])).sum().backward()
        optimizer.step()
        return embedding.weight[:, 0].tolist()

    assert ranks.run(2, act) == [[-0.5, -0.5, 0.0, -1.0]] * 2


def test_a_rank_without_a_library_is_named(ranks: TorchRanks) -> None:
    ranks.without_library = {1}

    def act(device: TorchDevice) -> None:
        with pytest.raises(MismatchError, match="the devices differ") as caught:
            hvd.allreduce(full(1, 2), name="t")
        assert caught.value.details[1].startswith("cpu (or staged there")
        model = nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(MismatchError):
            optimizer.step()

    ranks.run(2, act)


def test_without_a_library_everything_is_staged(ranks: TorchRanks) -> None:
    ranks.without_library = {0, 1}

    def act(device: TorchDevice) -> list[float]:
        return hvd.allreduce(full(1 + hvd.rank(), 2), op=hvd.Sum).tolist()

    assert ranks.run(2, act) == [[3.0, 3.0]] * 2
