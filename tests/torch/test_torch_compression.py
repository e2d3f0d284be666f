"""DistributedOptimizer with gradients that travel as codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen.api.compression import CodecCompression
from reigen.compression import Cast, ErrorFeedback, Int8, TopK, chain
from reigen.errors import ArgumentError, MismatchError
from reigen.torch.optimizers.arguments import choose_compression, choose_compressor
from reigen.types import DTYPES, ReduceOp
from tests.torch.training import assert_identical_everywhere, batches, make_net, mean_loss, mine

#: and what may be left of the distance to the truth; one bit sends 1 or -1 and never settles
CODES: list[tuple[dict[str, Any], float]] = [
    ({"type": "2bit", "threshold": 0.1}, 0.1),
    ({"type": "1bit", "threshold": 0.0}, 0.4),
    ({"type": "int8"}, 0.02),
    ({"type": "topk", "ratio": 0.25, "values": "fp16"}, 0.02),
]


def two_bits(total: np.ndarray, t: np.float32) -> np.ndarray:
    """What MXNet's two bits stand for."""
    return np.where(total >= t, t, np.where(total <= -t, -t, np.float32(0)))


def coded(dtype: torch.dtype) -> None:
    """Every gradient is the mean of what the ranks sent; each rank's is computed here from the rule."""
    t = np.float32(0.01)
    model = make_net().to(dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), {"type": "2bit", "threshold": 0.01}
    )
    residuals = [np.zeros((hvd.size(), *p.shape), np.float32) for p in model.parameters()]
    for rows, results in batches(4):
        x, y = mine(rows).to(dtype), mine(results).to(dtype)
        optimizer.zero_grad()
        local = torch.autograd.grad(mean_loss(model, x, y), model.parameters())
        everyone = [np.stack(hvd.allgather_object(g.float().numpy())) for g in local]
        mean_loss(model, x, y).backward()
        optimizer.step()
        for number, (parameter, gradients) in enumerate(zip(model.parameters(), everyone, strict=True)):
            residuals[number] += gradients
            sent = two_bits(residuals[number], t)
            residuals[number] -= sent
            expected = torch.from_numpy((sent.astype(np.float64).sum(0) / hvd.size()).astype(np.float32)).to(dtype)
            torch.testing.assert_close(parameter.grad, expected, rtol=2e-3 if dtype.itemsize == 2 else 1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_mean_of_what_the_ranks_sent(rank_pool, dtype):
    env = {"REIGEN_BUCKET_BYTES": "1000"} if dtype is torch.float32 else {}
    rank_pool(2).run(coded, dtype, init=True, env=env)


def learns(params: dict[str, Any]) -> float:
    torch.manual_seed(0)
    model, truth = nn.Linear(40, 3), nn.Linear(40, 3)
    generator = torch.Generator().manual_seed(hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), compression=params)
    hvd.broadcast_parameters(truth.state_dict(), 0)
    first = (model.weight - truth.weight).square().sum().item()
    for _ in range(150):
        x = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        (model(x) - truth(x)).square().sum(1).mean().backward()
        optimizer.step()
    assert_identical_everywhere(model)
    return (model.weight - truth.weight).square().sum().item() / first


@pytest.mark.slow
@pytest.mark.parametrize(("params", "left"), CODES, ids=[params["type"] for params, _ in CODES])
def test_ranks_learn_and_stay_the_same_bit_for_bit(rank_pool, params, left):
    assert max(rank_pool(3).run(learns, params, init=True)) < left


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(100 * number + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def checkpoint(path: Path) -> None:
    """Training goes on from a checkpoint bit for bit as if it had not been interrupted."""

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
        model.to(memory_format=torch.channels_last)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, hvd.DistributedOptimizer(plain, compression={"type": "topk", "ratio": 0.1})

    model, optimizer = make()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}  # nothing was sent yet
    steps(model, optimizer, range(4))
    file = path / f"of rank {hvd.rank()}"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(model, optimizer, range(4, 8))

    again, other = make()
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    unsent = other.state_dict()["reigen.unsent"]
    assert (unsent["rank"], unsent["size"], sorted(unsent["residuals"])) == (hvd.rank(), 2, [0, 1, 2, 3])
    steps(again, other, range(4, 8))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9).load_state_dict(saved["optimizer"])  # passes over it
    other.load_state_dict({**saved["optimizer"], "reigen.unsent": {**unsent, "rank": 1 - hvd.rank()}})
    assert not any(left.any() for left in other.state_dict()["reigen.unsent"]["residuals"].values())
    with pytest.raises(ArgumentError, match=r"residual of shape \(2,\) for parameter 0"):
        other.load_state_dict({**saved["optimizer"], "reigen.unsent": {**unsent, "residuals": {0: torch.zeros(2)}}})


@pytest.mark.slow
def test_what_was_not_sent_yet_is_in_checkpoints(rank_pool, tmp_path):
    rank_pool(2).run(checkpoint, tmp_path, init=True, env={"REIGEN_BUCKET_BYTES": "300"})


def uneven(dtype: torch.dtype) -> None:
    """What all have given is in the parameters, but for what rounding left in the residuals."""
    rank, n = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.zeros(50, dtype=dtype))
    int8 = {"type": "int8", "ef": True}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum, compression=int8)
    values = torch.arange(50, dtype=dtype) / 64
    for epoch in range(2):
        with hvd.uneven_data(optimizer):
            for _ in range(rank + 2 if epoch else rank):  # in the first epoch rank 0 has none: no plan for the others
                optimizer.zero_grad()
                (p * values).sum().backward()
                optimizer.step()
    everyone = hvd.allgather_object(p.tolist())
    assert everyone == [everyone[0]] * n
    num_batches = sum(rank + rank + 2 for rank in range(n))
    torch.testing.assert_close(-p.detach().float(), num_batches * values.float(), rtol=0.05, atol=0.05 * n)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_that_have_no_more_data(rank_pool, dtype):
    rank_pool(3).run(uneven, dtype, init=True)


def nothing_is_lost() -> None:
    """Rank 0 stops early. What its partners' codes lacked goes out whole, once the buckets travel as they are."""
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum, compression={"type": "topk", "k": 1})
    values = torch.arange(1, 11, dtype=torch.float32)
    with hvd.uneven_data(optimizer):
        for _ in range(2 if rank == 0 else 5):
            optimizer.zero_grad()
            (p * values).sum().backward()
            optimizer.step()
    # Rank 0 sent the largest of its sums twice: the last element, then, of twice 9 and 10, the one before.
    sent = torch.zeros(10)
    sent[9], sent[8] = 10, 18
    assert (-p.detach() - sent).tolist() == (5 * values).tolist()


@pytest.mark.slow
def test_while_a_rank_has_joined_the_others_send_all_they_have(rank_pool):
    rank_pool(2).run(nothing_is_lost, init=True)


def different_codes() -> None:
    model = make_net()
    params = {"type": "2bit", "threshold": 0.5 if hvd.rank() else 0.25}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=params)
    x, y = next(batches(1))
    mean_loss(model, x, y).backward()
    with pytest.raises(MismatchError, match=r"rank 0: .*threshold 0\.25(.|\n)*rank 1: .*threshold 0\.5"):
        optimizer.step()


@pytest.mark.slow
def test_ranks_with_different_codes(rank_pool):
    rank_pool(2).run(different_codes, init=True)


def test_what_compression_may_be() -> None:
    average = ReduceOp.AVERAGE
    assert choose_compression(hvd.Compression.fp16, ReduceOp.MIN) is hvd.Compression.fp16
    assert choose_compression({"type": "bf16"}, ReduceOp.MIN).wire_dtype(DTYPES["float32"]).name == "bfloat16"
    assert choose_compression({"type": "fp32"}, ReduceOp.MIN).wire_dtype(DTYPES["float64"]).name == "float64"
    assert choose_compression({"type": "fp16", "ef": True}, average) == CodecCompression(ErrorFeedback(Cast("fp16")))
    codec = chain(ErrorFeedback(TopK(0.1)), Int8())
    assert choose_compression(codec, average) == CodecCompression(codec)
    assert choose_compressor({"type": "fp16"}) == hvd.Compression.fp16
    with pytest.raises(ArgumentError, match="unknown type of compression '3bit'"):
        choose_compression({"type": "3bit"}, average)
    with pytest.raises(ArgumentError, match=r"compression must be Compression\.none.*got 'fp16'"):
        choose_compression("fp16", average)
    with pytest.raises(ArgumentError, match="2bit compression needs op=Average or op=Sum, got Min"):
        choose_compression({"type": "2bit"}, ReduceOp.MIN)
    with pytest.raises(ArgumentError, match="2bit compression needs op=Average or op=Sum, got Adasum"):
        choose_compressor({"type": "2bit"})


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.reducescatter, hvd.grouped_allreduce, hvd.grouped_reducescatter])
def test_single_tensors_do_not_travel_as_codes(call):
    tensor = torch.zeros(3)
    with pytest.raises(ArgumentError, match=r"Compression\.none, \.fp16 or \.bf16 here.*got \{'type': '2bit'\}"):
        call([tensor] if "grouped" in call.__name__ else tensor, compression={"type": "2bit"})


def among_themselves() -> None:
    members = hvd.add_process_set([0, 2])
    p = nn.Parameter(torch.zeros(33))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), op=hvd.Sum, compression={"type": "2bit"}, process_set=members
    )
    for _ in range(3):
        optimizer.zero_grad()
        (p * (hvd.rank() + 1) / 4).sum().backward()
        optimizer.step()
    hvd.barrier()  # rank 1 has nothing to wait for, and must not leave the others
    if members.included():
        # Quarters add up to halves: rank 0 has sent 0, 1/2 and 0 of its 3/4; rank 2, of 9/4, three halves.
        assert (-p.detach()).tolist() == [0.5 + 1.5] * 33
    else:
        assert (-p.detach()).tolist() == [1.5] * 33  # its own, uncompressed


@pytest.mark.slow
def test_a_process_set_gathers_its_own_codes(rank_pool):
    rank_pool(3).run(among_themselves, init=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
