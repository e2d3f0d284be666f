"""Models that are in the hands of torch's own data parallelism: an error says so, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn

import reigen.torch as hvd
from reigen.errors import ArgumentError, StepOrderError


def with_process_group(act, path: str):
    """Runs ``act`` with a default process group of Gloo, as scripts for FSDP and DDP have one."""
    store = distributed.FileStore(path, hvd.size())
    distributed.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size(), store=store)
    try:
        act()
    finally:
        distributed.destroy_process_group()


def wrap(model: nn.Module) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (hvd.size(),)))
    for attempt in (lambda: wrap(model), lambda: hvd.broadcast_parameters(model.state_dict(), 0)):
        with pytest.raises(ArgumentError, match=r"'(weight|bias)' is a DTensor \(of FSDP's.*share_parameters=True"):
            attempt()
    flattened = nn.Parameter(torch.ones(2))
    flattened._fsdp_flattened = True  # what FullyShardedDataParallel, which needs a GPU, sets
    with pytest.raises(ArgumentError, match="'flat' is held by FullyShardedDataParallel"):
        hvd.DistributedOptimizer(torch.optim.SGD([flattened], lr=0.1), [("flat", flattened)])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


def wraps_in_ddp() -> None:
    for is_first in (True, False):
        model: nn.Module = nn.Linear(4, 2)
        plain = model
        model = nn.parallel.DistributedDataParallel(model) if is_first else model
        optimizer = wrap(model)
        model = model if is_first else nn.parallel.DistributedDataParallel(plain)
        model(torch.full((3, 4), float(hvd.rank()))).sum().backward()
        with pytest.raises(StepOrderError, match=r"DistributedDataParallel.*leave it away"):
            optimizer.step()
        optimizer.synchronize()


@pytest.mark.parametrize("act", [shards, wraps_in_ddp])
def test_torchs_own_data_parallelism_is_named(rank_pool, tmp_path, act):
    rank_pool(2).run(with_process_group, act, str(tmp_path / "store"), init=True)
