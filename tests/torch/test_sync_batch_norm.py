"""SyncBatchNorm is one batch norm over the concatenated batch: compared with torch's own, in one process."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen import context
from reigen.torch.sync_batch_norm import SyncBatchNorm
from tests.torch.training import assert_identical_everywhere

ORDINARY = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TAILS = {2: (), 3: (5,), 4: (3, 2), 5: (2, 3, 2)}
CHANNELS = 4
#: rows of each rank
UNEVEN = {2: [(3, 3), (1, 6), (5, 0)], 3: [(2, 2, 2), (4, 1, 7), (0, 3, 0)]}


def fresh(module: nn.Module, seed: int) -> nn.Module:
    """Parameters and buffers that are not those of a new module."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    return module


def everything(rows: tuple[int, ...], dims: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' inputs and the gradients of the outputs; channels far from zero."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(rows), CHANNELS, *TAILS[dims])
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * 0.3 + 10.0 * torch.arange(CHANNELS).view(1, -1, *[1] * (dims - 2))
    return x, torch.randn(shape, generator=generator, dtype=torch.float64)


def part(x: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    return x.split(list(rows))[hvd.rank()].clone()


def compare(dims: int, rows: tuple[int, ...], steps: int = 2, **options: object) -> None:
    truth = fresh(ORDINARY[dims](CHANNELS, **options).double(), 3)
    layer = fresh(SyncBatchNorm(CHANNELS, **options).double(), 3)
    for step in range(steps):
        x, dy = everything(rows, dims, step)
        x.requires_grad_()
        expected = truth(x)
        expected.backward(dy)
        own = part(x.detach(), rows).requires_grad_()
        y = layer(own)
        y.backward(part(dy, rows))
        exact = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(y, part(expected.detach(), rows), **exact)
        torch.testing.assert_close(own.grad, part(x.grad, rows), **exact)
        for mine, theirs in zip(layer.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(hvd.allreduce(mine.grad, op=hvd.Sum), theirs.grad, **exact)
    for name, value in truth.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value, rtol=1e-10, atol=1e-10, msg=name)
    assert_identical_everywhere(layer)
    x, _ = everything(rows, dims, 9)
    torch.testing.assert_close(layer.eval()(x), truth.eval()(x), **exact)


def every_shape(size: int) -> None:
    for dims, rows in itertools.product(ORDINARY, UNEVEN[size]):
        compare(dims, rows)
    for options in ({"momentum": None}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}):
        compare(4, UNEVEN[size][1], 3, **options)
    compare(2, UNEVEN[size][1], track_running_stats=False)


@pytest.mark.parametrize("size", [2, 3])
def test_it_is_a_batch_norm_of_the_whole_batch(rank_pool, size):
    rank_pool(size).run(every_shape, size, init=True)


def alone() -> None:
    compare(4, (6,))
    with pytest.raises(ValueError, match="more than 1 value"):
        SyncBatchNorm(CHANNELS)(torch.zeros(1, CHANNELS))


def test_alone_it_is_torchs(rank_pool):
    rank_pool(1).run(alone, init=True)


def other_types() -> None:
    rows = (5, 3)
    x, dy = everything(rows, 4, 0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 2e-1)):
        for own_dtype in dict.fromkeys((torch.float32, dtype)):  # of the layer; inputs may be narrower
            values = x.to(dtype).detach()
            truth = nn.BatchNorm2d(CHANNELS).double()
            a = values.double().requires_grad_()
            b = part(values, rows).to(memory_format=torch.channels_last).requires_grad_()
            expected = truth(a)
            expected.backward(dy.to(dtype).double())
            layer = SyncBatchNorm(CHANNELS, dtype=own_dtype)
            y = layer(b)
            assert y.dtype is dtype
            assert y.is_contiguous(memory_format=torch.channels_last)
            y.backward(part(dy, rows).to(dtype))
            assert b.grad.dtype is dtype
            limit = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(y.double(), part(expected.detach(), rows), **limit)
            torch.testing.assert_close(b.grad.double(), part(a.grad, rows), **limit)
            assert layer.weight.grad.dtype is own_dtype
            torch.testing.assert_close(
                hvd.allreduce(layer.weight.grad, op=hvd.Sum).double(), truth.weight.grad, rtol=0.05, atol=tolerance * 10
            )


def far_from_zero() -> None:
    """Values about 1000 with deviation 0.01, in float32: their squares would leave nothing of the variance."""
    x = 1000.0 + 0.01 * torch.randn(400, 1, generator=torch.Generator().manual_seed(1))
    layer = SyncBatchNorm(1, momentum=1.0, eps=1e-12)
    layer(part(x, (300, 100)))
    torch.testing.assert_close(layer.running_var.double(), x.double().var(0), rtol=1e-4, atol=0)


def in_between() -> None:
    """Nothing at all, too little, and what is refused before anything is sent."""
    layer = SyncBatchNorm(CHANNELS)
    before = copy.deepcopy(layer.state_dict())
    x = torch.zeros(0, CHANNELS, 2, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with pytest.raises(ValueError, match="in all ranks together"):
        layer(torch.zeros(hvd.rank(), CHANNELS))
    for wrong in (torch.zeros(CHANNELS), torch.zeros(3, CHANNELS + 1)):
        with pytest.raises(ValueError, match=r"\(N, 4, ...\)"):
            layer(wrong)
    layer(torch.randn(3, CHANNELS))
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), reloaded(layer)):
        x, _ = everything((2, 3), 2, 0)
        a, b = copied(part(x, (2, 3)).float()), layer(part(x, (2, 3)).float())
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def reloaded(layer: SyncBatchNorm) -> SyncBatchNorm:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = SyncBatchNorm(CHANNELS)
    other.load_state_dict(torch.load(file))
    return other


def converted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12))).half()
    model[2].eval()
    changed = SyncBatchNorm.convert_sync_batchnorm(model)
    assert changed is model
    assert [type(module) for module in (model[1], model[2][1])] == [SyncBatchNorm] * 2
    assert [model[1].training, model[2][1].training] == [True, False]
    assert model[1].weight.dtype is torch.float16
    assert SyncBatchNorm.convert_sync_batchnorm(model[1]) is model[1]
    single = nn.BatchNorm1d(3, eps=0.5, momentum=None, affine=False)
    other = SyncBatchNorm.convert_sync_batchnorm(single)
    assert isinstance(other, SyncBatchNorm)
    assert (other.eps, other.momentum, other.affine, other.running_mean is single.running_mean) == (
        0.5,
        None,
        False,
        True,
    )
    with pytest.raises(ValueError, match="lazy"):
        SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def several_things() -> None:
    other_types()
    far_from_zero()
    in_between()
    converted()


def test_types_copies_conversion_and_refusals(rank_pool):
    rank_pool(2).run(several_things, init=True)


class Branches(nn.Module):
    """Layers that are used twice, or only in evaluation; gradient hooks fire between their backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 2)
        self.one, self.two, self.idle = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            x = x + self.idle(x[:, :5]).mean()
        hidden = torch.tanh(self.one(self.first(x)))
        hidden = torch.tanh(self.two(hidden)) + self.one(hidden)
        return self.last(hidden)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Branches().double()


def in_a_model() -> None:
    """With DistributedOptimizer, uneven batches and several backward passes: as one process trains."""
    truth, own = model(), SyncBatchNorm.convert_sync_batchnorm(model())
    assert hvd.size() == 2
    rows = (3, 7)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9), own.named_parameters(), op=hvd.Sum
    )
    if hvd.rank() == 0:
        own.eval()(torch.zeros(2, 6, dtype=torch.float64))  # one rank alone evaluates
        own.train()
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(10, 6, generator=generator, dtype=torch.float64)
        plain.zero_grad()
        truth(x).square().sum().backward()
        plain.step()
        optimizer.zero_grad()
        own(part(x, rows)).square().sum().backward()
        optimizer.step()
    for name, value in truth.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], value, rtol=1e-9, atol=1e-9, msg=name)
    assert_identical_everywhere(own)


@pytest.mark.parametrize("bucket_bytes", ["64", "100000"])
def test_training_a_model(rank_pool, bucket_bytes):
    rank_pool(2).run(in_a_model, init=True, env={"REIGEN_BUCKET_BYTES": bucket_bytes})


def numbered() -> list[str]:
    """What the collectives of two layers are called, and that another job counts anew."""
    named: list[str] = []
    layers = [SyncBatchNorm(1), SyncBatchNorm(1)]
    for _ in range(2):
        job = context.current()
        start = job.start

        def spy(*args, start=start, **options):
            named.append(options["name"])
            return start(*args, **options)

        job.start = spy
        for layer in (layers[1], layers[0], layers[1]):
            layer(torch.randn(3, 1, requires_grad=True)).sum().backward()
        hvd.shutdown()
        hvd.init()
    return named


def test_names_are_a_layers_own(rank_pool):
    names = [f"sync_batch_norm.{n}{what}" for n in (0, 1, 0) for what in ("", ".grad")]
    assert rank_pool(2).run(numbered, init=True) == [names * 2] * 2


def in_sets() -> None:
    """Ranks 0 and 2 normalise together, rank 1 alone; all of them have another layer in common."""
    pair, single = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
    own = single if hvd.rank() == 1 else pair
    x, _ = everything((2, 5, 4), 2, 0)
    pieces = x.split([2, 5, 4])
    together, everywhere = SyncBatchNorm(CHANNELS, process_set=own).double(), SyncBatchNorm(CHANNELS).double()
    truth = nn.BatchNorm1d(CHANNELS).double()
    expected = truth(pieces[1] if hvd.rank() == 1 else torch.cat([pieces[0], pieces[2]]))
    result = copy.deepcopy(together)(pieces[hvd.rank()])
    torch.testing.assert_close(result, {0: expected[:2], 1: expected, 2: expected[2:]}[hvd.rank()])
    common = everywhere(together(pieces[hvd.rank()]))
    assert_identical_everywhere(everywhere)
    assert abs(hvd.allreduce(common.sum(0), op=hvd.Sum)).max() < 1e-9
    outside = SyncBatchNorm(CHANNELS, process_set=pair if own is single else single)
    with pytest.raises(ValueError, match="process set"):
        outside(torch.zeros(3, CHANNELS))
    with pytest.raises(ValueError, match="not registered"):
        SyncBatchNorm(CHANNELS, process_set=hvd.ProcessSet([0, 1]))(torch.zeros(3, CHANNELS))


def test_process_sets(rank_pool):
    rank_pool(3).run(in_sets, init=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def joined() -> None:
    """A rank that has no more data contributes an empty batch."""
    truth, layer = nn.BatchNorm1d(CHANNELS).double(), SyncBatchNorm(CHANNELS).double()
    if hvd.rank() == 1:
        context.current().join(blocking=True).wait()
        return
    x, dy = everything((4, 2), 2, 0)
    x.requires_grad_()
    truth(x).backward(dy)
    own = x.detach().clone().requires_grad_()
    layer(own).backward(dy)
    context.current().join(blocking=True).wait()
    torch.testing.assert_close(own.grad, x.grad)
    torch.testing.assert_close(layer.state_dict(), truth.state_dict())


def test_a_rank_that_has_joined_has_an_empty_batch(rank_pool):
    rank_pool(2).run(joined, init=True)
