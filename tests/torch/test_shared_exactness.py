"""Parameters that exist once a host, for every optimizer that may be cut: the bits of torch's own on whole tensors.

The truth is one process with plain torch. Gradients are small multiples of a power of two, so that the sum over the
ranks is exact in every element type and the truth need not know how it was added up.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reigen.torch as hvd
from tests.unit.torch.optimizer_cases import DTYPES, OPTIMIZERS

#: A matrix, one that ends in the middle of a vector, vectors, a number, nothing; 16 KiB in float32 and more.
SHAPES = ((61, 83), (3, 5, 7), (1000,), (129,), (), (0,))
#: Buckets of which several are needed, and cuts in many places.
ENVIRONMENT = {"REIGEN_BUCKET_BYTES": "8192"}
#: RAdam takes its second formula from the sixth on.
STEPS = 7
#: torch 2.13's fused SGD leaves memory unwritten in the momentum of half types: the remainder behind the last vector.
#: Two runs of plain torch differ there, too, and the weights do not depend on it.
UNWRITTEN = frozenset(
    (name, dtype) for name in ("momentum, fused", "nesterov, fused") for dtype in (torch.bfloat16, torch.float16)
)


def parameters_of(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [torch.nn.Parameter((0.1 * value).to(dtype)) for value in values]


def gradients_of(rank: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of one rank: whole numbers up to 15, times a power of two that is the same on all ranks."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * rank + step)
    gradients = []
    for shape in SHAPES:
        scale = 2.0 ** -torch.randint(3, 13, shape, generator=common).double()
        gradients.append((torch.randint(-15, 16, shape, generator=own) * scale).to(dtype))
    return gradients


def groups_of(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups: the second one's learning rate is half of the first one's."""
    return [{"params": parameters[::2]}, {"params": parameters[1::2]}]


def made(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[name]
    optimizer = cls(groups_of(parameters), **options)
    optimizer.param_groups[1]["lr"] /= 2
    return optimizer


def truth_of(name: str, dtype: torch.dtype, size: int) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = parameters_of(dtype)
    optimizer = made(name, parameters)
    for step in range(STEPS):
        everyone = [gradients_of(rank, step, dtype) for rank in range(size)]
        for parameter, *summands in zip(parameters, *everyone, strict=True):
            parameter.grad = torch.stack(summands).sum(0).to(dtype)
        if step == STEPS // 2:
            optimizer.param_groups[0]["lr"] *= 0.1  # as a scheduler does
        optimizer.step()
    return parameters, optimizer


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stays_exact(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        parameters = parameters_of(dtype)
        optimizer = hvd.DistributedOptimizer(made(name, parameters), op=hvd.Sum, share_parameters=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            products = zip(parameters, gradients_of(hvd.rank(), step, dtype), strict=True)
            torch.stack([(parameter * gradient).sum() for parameter, gradient in products]).sum().backward()
            if step == STEPS // 2:
                optimizer.param_groups[0]["lr"] *= 0.1
            optimizer.step()
        expected, reference = truth_of(name, dtype, hvd.size())
        for number, (parameter, other) in enumerate(zip(parameters, expected, strict=True)):
            assert bits(parameter) == bits(other), f"{name}: parameter {number}"
        state, wanted = optimizer.state_dict(), reference.state_dict()
        assert state["param_groups"] == wanted["param_groups"], name
        assert state["state"].keys() == wanted["state"].keys(), name
        for number, held in wanted["state"].items():
            found = state["state"][number]
            assert found.keys() == held.keys(), name
            for key, value in held.items():
                assert found[key].shape == value.shape, (name, number, key)
                if (name, dtype) not in UNWRITTEN:
                    assert bits(found[key]) == bits(value), (name, number, key)
        hvd.barrier()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 2),
        *(pytest.param(dtype, 2, marks=pytest.mark.slow) for dtype in DTYPES if dtype != torch.float32),
        *(pytest.param(torch.float32, size, marks=pytest.mark.slow) for size in (1, 3, 4)),
        pytest.param(torch.bfloat16, 3, marks=pytest.mark.slow),
        pytest.param(torch.float64, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_bits_of_one_process_with_plain_torch(rank_pool, dtype, size):
    rank_pool(size).run(stays_exact, dtype, env=ENVIRONMENT, init=True, timeout=150)
