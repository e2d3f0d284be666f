"""What the pages about key-value stores leave to their reader, and what their programs must have done."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import reigen.kv
import reigen.optim
import reigen.torch as hvd
from reigen.torch import Trainer
from tests.docs.names_torch import Names, given_gpu

NUM_CLASSES = 10


def _store() -> Any:
    kv = reigen.kv.create("dist_sync")
    kv.set_optimizer(reigen.optim.create("sgd", learning_rate=0.1))
    return kv


def given_kv() -> Names:
    return {"weight": np.zeros(3, np.float32), "gradients": [np.ones(3, np.float32)] * 2}


def check_kv(names: Names) -> None:
    # two rounds of sums of two workers, with momentum
    assert np.allclose(names["weight"], -0.1 * (2 + 2 + 0.9 * 2))


def given_kv_elastic() -> Names:
    return {"reigen": reigen, "weights": np.zeros(3, np.float32), "gradient": np.ones(3, np.float32), "num_steps": 3}


def check_kv_elastic(names: Names) -> None:
    assert np.allclose(names["weights"], -0.3)
    names["kv"].close()


def given_sample_leases() -> Names:
    def gradient(weights: np.ndarray, images: np.ndarray) -> np.ndarray:
        return np.full(3, images.sum(), np.float32)

    return {"reigen": reigen, "weights": np.zeros(3, np.float32), "images": np.arange(50), "gradient": gradient}


def check_sample_leases(names: Names) -> None:
    out = np.empty(3, np.float32)
    names["kv"].pull("w", out=out)
    assert np.allclose(out, -0.1 * 10 * sum(range(50)), rtol=1e-4)
    names["kv"].close()


def given_optim() -> Names:
    return {"kv": reigen.kv.create("dist_sync")}


def check_optim(names: Names) -> None:
    weight = np.ones(2, np.float32)
    names["kv"].init("w", weight)
    names["kv"].pushpull("w", np.ones(2, np.float32), out=weight)
    assert np.allclose(weight, 1 - 0.1 * (2 + 1e-4))
    names["kv"].close()


def given_compression() -> Names:
    hvd.init()
    model = given_gpu()["model"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return {"kv": _store(), "hvd": hvd, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "model": model}


def check_compression(names: Names) -> None:
    weight = np.ones(2, np.float32)
    names["kv"].init("w", weight)
    names["kv"].pushpull("w", np.full(2, 0.7, np.float32), out=weight)
    assert np.allclose(weight, 1 - 0.1 * 2 * 0.5)  # of 0.7 the threshold is sent, and the rest kept
    names["kv"].close()
    names["model"](torch.ones(2, 8)).sum().backward()
    names["optimizer"].step()


class _Digits(TensorDataset):
    def __init__(self) -> None:
        images = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
        super().__init__(images, images[:, :NUM_CLASSES].argmax(1))


def _model() -> nn.Module:
    """A model whose weights differ between workers."""
    torch.manual_seed(int(os.environ["REIGEN_RANK"]))
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))


def _training() -> Names:
    """A model, whose weights are remembered, and data."""
    model = _model()
    names = {"model": model, "data": _Digits(), "DataLoader": DataLoader, "torch": torch}
    return {**names, "before": nn.utils.parameters_to_vector(model.parameters()).detach()}


def _check(names: Names) -> None:
    """The weights have changed, and are the same in all workers: their sum is as many times one's."""
    flat = nn.utils.parameters_to_vector(names["model"].parameters()).detach()
    assert not torch.equal(flat, names["before"])
    names["trainer"].kvstore.close()
    with reigen.kv.create("dist_sync") as kv:
        total = torch.zeros_like(flat)
        kv.init("weights", total)
        kv.pushpull("weights", flat, out=total)
        assert torch.allclose(total, kv.num_workers * flat)


def given_trainer() -> Names:
    return _training()


def given_trainer_clips() -> Names:
    names = _training()
    model = names["model"]
    trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1}, "dist_sync", update_on_kvstore=False)
    images, labels = _Digits()[:32]
    cross_entropy(model(images), labels, reduction="sum").backward()

    def clip_global_norm(gradients: list[Tensor], max_norm: float) -> None:
        assert max_norm == 64
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, nn.utils.get_total_norm(gradients))

    return {**names, "trainer": trainer, "clip_global_norm": clip_global_norm, "max_norm": 1, "batch_size": 64}


def given_trainer_groups() -> Names:
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    return {"model": model, "Trainer": Trainer}


def given_trainer_sparse() -> Names:
    embedding = nn.Embedding(20, 4, sparse=True)
    trainer = Trainer([{"params": [embedding.weight], "stype": "row_sparse"}], "sgd", {"learning_rate": 0.1})
    return {"trainer": trainer, "embedding": embedding, "batch_of_words": torch.tensor([3, 5])}


def check_trainer_sparse(names: Names) -> None:
    names["embedding"](names["batch_of_words"]).sum().backward()
    names["trainer"].step(2)
    names["trainer"].row_sparse_pull(names["embedding"].weight, names["batch_of_words"])
    names["trainer"].kvstore.close()


def given_tutorial() -> Names:
    torch.manual_seed(int(os.environ["REIGEN_RANK"]))
    return {"loader": DataLoader(_Digits(), 32)}


def check_tutorial(names: Names) -> None:
    _check({**names, "before": torch.zeros(1)})


check_trainer = check_trainer_clips = _check
