"""A run with shared parameters is saved by some ranks and goes on with others, or without Reigen: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reigen.torch as hvd
from tests.multiprocess import sharing_script as script

#: Steps between two checkpoints.
STEPS = 3


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])


def go_on(path: Path, name: str, first: int) -> str:
    """One more part of the run by these ranks; rank 0 saves it."""
    torch.set_num_threads(1)
    model = script.make_model()
    optimizer = script.make_optimizer(model, name)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, share_parameters=True)
    load(path, model, optimizer)
    hvd.barrier()
    script.train(model, optimizer, range(first, first + STEPS), hvd.rank(), hvd.size())
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = script.digest(model, optimizer)
    hvd.barrier()
    return found


def go_on_without(path: Path, name: str, first: int) -> str:
    """The same by one process and plain torch."""
    model = script.make_model()
    optimizer = script.make_optimizer(model, name)
    load(path, model, optimizer)
    script.train(model, optimizer, range(first, first + STEPS))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return script.digest(model, optimizer)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((2, 0, 2), "Adam"),
        pytest.param((4, 2, 1, 0), "Adam", marks=pytest.mark.slow),
        pytest.param((0, 3, 4), "AdamW", marks=pytest.mark.slow),
        pytest.param((3, 0, 2), "Adafactor", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_part_of_a_run_has_as_many_ranks_as_it_likes(rank_pool, tmp_path, sizes, name):
    """0 ranks: plain torch, without Reigen. A run that never stops is the truth."""
    path = tmp_path / "checkpoint.pt"
    for number, size in enumerate(sizes):
        arguments = path, name, number * STEPS
        if size:
            digests = rank_pool(size).run(go_on, *arguments, init=True)
            assert len(set(digests)) == 1
            last = digests[0]
        else:
            last = go_on_without(*arguments)
    model = script.make_model()
    optimizer = script.make_optimizer(model, name)
    script.train(model, optimizer, range(len(sizes) * STEPS))
    assert last == script.digest(model, optimizer)
