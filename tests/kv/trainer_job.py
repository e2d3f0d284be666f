"""A worker of tests/kv/test_trainer.py: ``trainer_job.py DIRECTORY CASE ...``; writes what it found as JSON.

Several cases share a job, each with a store of its own. Numbers are small multiples of powers of two wherever an exact
result is compared, so that no order of operations can round them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from reigen import kv, optim
from reigen.torch import Trainer, clip_global_norm

DIRECTORY = Path(sys.argv[1])
#: More elements than the bound that the test sets: cut over all servers.
LARGE, SMALL = 3000, 5


def gradient(worker: int, step: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(size, generator=generator).to(dtype)


MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}


def same_bits_as_one_process(on_store: bool, name: str = "sgd", **params: float) -> dict[str, object]:
    """An optimizer on random gradients; beside it, in this process, the same on their float32 sums."""
    large, small = nn.Parameter(torch.zeros(LARGE)), nn.Parameter(torch.zeros(SMALL))
    with Trainer(
        {"large": large, "small": small}, name, params, kvstore="dist_sync", update_on_kvstore=on_store
    ) as trainer:
        truth = {"large": np.zeros(LARGE, np.float32), "small": np.zeros(SMALL, np.float32)}
        updater = optim.Updater(optim.create(name, **params, rescale_grad=1 / 6))
        for step in range(4):
            if step == 2:
                trainer.set_learning_rate(0.05)
                updater.set_optimizer(updater.optimizer.with_learning_rate(0.05))
            for parameter in (large, small):
                parameter.grad = gradient(trainer.rank, step, len(parameter))
            trainer.step(6)
            for key, weight in truth.items():
                total = gradient(0, step, len(weight)).numpy()
                for worker in range(1, trainer.num_workers):
                    total = total + gradient(worker, step, len(weight)).numpy()
                updater(key, total, weight)
        same = [
            bool((parameter.detach().numpy() == truth[key]).all())
            for key, parameter in (("large", large), ("small", small))
        ]
        return {"same": same, "moved": float(large.detach().abs().max()) > 0.1, "on_store": trainer.update_on_kvstore}


def servers_same_bits() -> dict[str, object]:
    return same_bits_as_one_process(True, **MOMENTUM)


def workers_same_bits() -> dict[str, object]:
    return same_bits_as_one_process(False, **MOMENTUM)


def layerwise_same_bits() -> dict[str, object]:
    """The optimizer comes after the key, which was cut: LAMB looks at whole layers."""
    return same_bits_as_one_process(True, "lamb", learning_rate=0.1, wd=0.01)


def batches_of_other_sizes() -> list[float]:
    parameter = nn.Parameter(torch.zeros(SMALL))
    with Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore="dist_sync") as trainer:
        for size in (4, 4, 2, 8):
            parameter.grad = torch.ones(SMALL) * (trainer.rank + 1)
            trainer.step(size)
        return parameter.tolist()


def first_weights() -> list[object]:
    """Worker 0's, frozen ones and other dtypes too; masters keep what bfloat16 would round away."""
    rank = kv_rank()
    parameters = {
        "moving": nn.Parameter(torch.full((3,), 1.0 + rank, dtype=torch.float64)),
        "frozen": nn.Parameter(torch.full((2,), 7.0 + rank), requires_grad=False),
        "count": nn.Parameter(torch.tensor([3 + rank]), requires_grad=False),
        "half": nn.Parameter(torch.full((2,), 1.0 + rank, dtype=torch.bfloat16)),
        "float16": nn.Parameter(torch.full((2,), 1.0 + rank, dtype=torch.float16)),
    }
    params = {"learning_rate": 2.0**-10, "multi_precision": True}
    with Trainer(parameters, "sgd", params, kvstore="dist_sync") as trainer:
        first = [parameters[name].tolist() for name in parameters]
        for _ in range(256):
            for parameter in parameters.values():
                if parameter.requires_grad:
                    parameter.grad = torch.ones_like(parameter)
            trainer.step(1)
        return [first, [parameters[name].tolist() for name in parameters]]


def kv_rank() -> int:
    """This worker's number, before there is a Trainer to tell it."""
    with kv.create("dist_sync") as store:
        return store.rank


def compressed(on_store: bool) -> list[list[float]]:
    """2bit with threshold 0.5: of 0.75, 0.5 travels and 0.25 is kept; the second time 0.5 and 0.5."""
    parameter = nn.Parameter(torch.zeros(LARGE))
    compression = {"type": "2bit", "threshold": 0.5}
    seen = []
    with Trainer(
        [parameter],
        "sgd",
        {"learning_rate": 1.0},
        kvstore="dist_sync",
        update_on_kvstore=on_store,
        compression_params=compression,
    ) as trainer:
        for _ in range(2):
            parameter.grad = torch.full((LARGE,), 0.75)
            trainer.step(1)
            seen.append([float(parameter.detach().min()), float(parameter.detach().max())])
    return seen


def compressed_to_servers() -> list[list[float]]:
    return compressed(True)


def compressed_to_workers() -> list[list[float]]:
    return compressed(False)


def sparse_rows() -> dict[str, object]:
    table = nn.Embedding(6, 2, sparse=True)
    nn.init.ones_(table.weight)
    with Trainer(table, "sgd", {"learning_rate": 0.5, "wd": 1.0}, kvstore="dist_sync") as trainer:
        table(torch.tensor([trainer.rank, 4, 4])).sum().backward()
        trainer.step(1)
        whole = table.weight[:, 0].tolist()
    lazy = nn.Embedding(2000, 2, sparse=True)
    nn.init.zeros_(lazy.weight)
    groups = [{"params": [lazy.weight], "stype": "row_sparse"}]
    with Trainer(groups, "sgd", {"learning_rate": 1.0}, kvstore="dist_sync") as trainer:
        lazy(torch.tensor([trainer.rank, 1999])).sum().backward()
        trainer.step(1)
        trainer.kvstore.barrier()
        trainer.row_sparse_pull(lazy.weight, torch.tensor([1999, 5, 0]))
        rows = lazy.weight[[0, 1, 5, 1999], 0].tolist()
    return {"whole": whole, "rows": rows}


def clipped() -> list[float]:
    parameter = nn.Parameter(torch.zeros(2))
    with Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore="dist_sync", update_on_kvstore=False) as trainer:
        parameter.grad = torch.tensor([3.0, 4.0]) * trainer.rank
        trainer.allreduce_grads()
        norm = clip_global_norm([parameter.grad], 2.5)
        trainer.update(1)
    return [float(norm), *parameter.tolist()]


def overflow() -> list[float]:
    parameter = nn.Parameter(torch.zeros(1))
    with Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore="dist_sync") as trainer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + trainer.rank))
        for step in range(3):
            trainer.zero_grad()
            factor = math.inf if step == 1 and trainer.rank == 1 else 1.0
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(trainer, 2)
            scaler.update()
        return [parameter.item(), scaler.get_scale()]


def uneven(kvstore: str, **how: float) -> list[float]:
    """``test`` adds every gradient: worker r takes 3 + 2 r steps of r + 1."""
    store = kv.create(kvstore, **how)
    parameters = [nn.Parameter(torch.zeros(SMALL)), nn.Parameter(torch.zeros(LARGE))]
    trainer = Trainer(parameters, "test", kvstore=store)
    for _ in range(3 + 2 * store.rank):
        for parameter in parameters:
            parameter.grad = torch.full((len(parameter),), store.rank + 1.0)
        trainer.step(1)
    trainer.leave()
    found = [value for parameter in parameters for value in (min(parameter.tolist()), max(parameter.tolist()))]
    store.close()
    return found


def uneven_sync() -> list[float]:
    return uneven("dist_sync")


def uneven_async() -> list[float]:
    return uneven("dist_async")


def uneven_ssp() -> list[float]:
    return uneven("dist_ssp", staleness=2)


def states_run(steps: range, *, load: str = "", save: str = "") -> list[str]:
    """Adam on random gradients, with weights and states from a file and into a file."""
    parameters = {"large": nn.Parameter(torch.ones(LARGE)), "small": nn.Parameter(torch.ones(SMALL))}
    if load:
        loaded = torch.load(DIRECTORY / f"{load}.weights", weights_only=True)
        for name, parameter in parameters.items():
            parameter.data.copy_(loaded[name])
    with Trainer(parameters, "adam", {"learning_rate": 0.7 if load else 0.1}, kvstore="dist_sync") as trainer:
        if load:
            trainer.load_states(DIRECTORY / f"{load}.states")
            assert trainer.num_steps == steps.start
        for step in steps:
            if step == 2:
                trainer.set_learning_rate(0.05)
            for parameter in parameters.values():
                parameter.grad = gradient(trainer.rank, step, len(parameter))
            trainer.step(6)
        if save and trainer.rank == 0:
            trainer.save_states(DIRECTORY / f"{save}.states")
            torch.save({name: each.detach() for name, each in parameters.items()}, DIRECTORY / f"{save}.weights")
        trainer.kvstore.barrier()
    return [each.detach().numpy().tobytes().hex()[:400] for each in parameters.values()]


def states_through() -> list[str]:
    return states_run(range(6))


def states_before() -> list[str]:
    return states_run(range(3), save="half")


def states_after() -> list[str]:
    return states_run(range(3, 6), load="half")


def replaced() -> list[object]:
    """Worker 1 kills itself in its first life, in step 2: the first parameter's round is complete, the second's not."""
    store = kv.create("dist_sync")
    dies = store.rank == 1 and not store.is_recovery
    parameters = {"first": nn.Parameter(torch.zeros(SMALL)), "second": nn.Parameter(torch.zeros(LARGE))}
    trainer = Trainer(parameters, "test", {"rescale_grad": 0.5}, kvstore=store)
    begun = trainer.num_steps
    for step in range(begun, 5):
        if step == 2 and dies:
            store.pushpull("first", torch.full((SMALL,), 2.0), out=torch.empty(SMALL))
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in parameters.values():
            parameter.grad = torch.full((len(parameter),), store.rank + 1.0)
        trainer.step(1)
    store.close()
    return [begun, *(value for each in parameters.values() for value in (min(each.tolist()), max(each.tolist())))]


def mismatch() -> str:
    parameter = nn.Parameter(torch.zeros(3 + kv_rank()))
    try:
        Trainer({"w": parameter}, "sgd", kvstore="dist_sync")
    except Exception as error:  # noqa: BLE001  its type and words are what is looked at
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    found = {case: globals()[case]() for case in sys.argv[2:]}
    rank = int(os.environ["REIGEN_RANK"])
    (DIRECTORY / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
