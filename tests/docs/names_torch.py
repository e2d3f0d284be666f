"""What the pages about PyTorch and NumPy leave to their reader, and what their programs must have done."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import reigen.torch as hvd

Names = dict[str, Any]
NUM_SAMPLES = 512


class Rows(TensorDataset):
    """Images and their labels; several rows at once, too."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(NUM_SAMPLES, 8, generator=generator)
        super().__init__(images, images.sum(1, keepdim=True))


class Net(nn.Linear):
    """A layer, whose weights differ between ranks."""

    def __init__(self) -> None:
        torch.manual_seed(hvd.rank() if hvd.is_initialized() else 0)
        super().__init__(8, 1)


def _distributed(**options: Any) -> Names:
    """A job with a model that all ranks have alike."""
    hvd.init()
    model = Net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    return {"hvd": hvd, "torch": torch, "model": model, "optimizer": optimizer}


def _alike(model: nn.Module) -> bool:
    """Whether all ranks have the same weights."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return bool((hvd.allgather(flat[None]) == flat).all())


def _step(names: Names) -> None:
    """A step of training with what a page has made."""
    names["optimizer"].zero_grad()
    torch.manual_seed(hvd.rank())
    images = torch.randn(4, names["model"].get_parameter("weight").shape[1])
    names["model"](images).square().mean().backward()
    names["optimizer"].step()
    assert _alike(names["model"])


def check_numpy(names: Names) -> None:
    assert names["total"].tolist() == [2.0] * 3
    assert names["rows"].shape == (3, 2)


def given_readme() -> Names:
    def my_share_of(data: Rows, rank: int, size: int) -> Iterator[tuple[Tensor, ...]]:
        assert size == 2
        return iter(DataLoader(data, 32, sampler=range(rank, len(data), size)))

    return {"torch": torch, "Net": Net, "data": Rows(), "loss_of": mse_loss, "my_share_of": my_share_of}


def check_readme(names: Names) -> None:
    images, labels = Rows()[:]
    assert mse_loss(names["model"](images), labels).item() < 0.1
    assert _alike(names["model"])


def check_index(names: Names) -> None:
    assert names["hvd"] is hvd


check_torch = _step


def given_uneven() -> Names:
    names = _distributed()

    def train_one_batch(images: Tensor, labels: Tensor) -> None:
        names["optimizer"].zero_grad()
        mse_loss(names["model"](images), labels).backward()
        names["optimizer"].step()

    my_batches = [Rows()[:4]] * (2 + 3 * hvd.rank())
    return {**names, "my_batches": my_batches, "train_one_batch": train_one_batch}


def check_uneven(names: Names) -> None:
    assert _alike(names["model"])


def check_first_job(names: Names) -> None:
    assert names["mean"].item() < 1e-4  # the page shows 0.000008
    assert _alike(names["model"])


def given_timeline() -> Names:
    hvd.init()
    return {"hvd": hvd, "directory": str(Path.cwd())}


def check_timeline(names: Names) -> None:
    if hvd.rank() == 0:
        path = Path(names["directory"], "timeline.json")
        assert json.loads(path.read_text())
        path.unlink()


def given_shared_parameters() -> Names:
    return {"model": _distributed()["model"], "hvd": hvd, "torch": torch}


check_shared_parameters = _step


def check_compression(names: Names) -> None:
    names |= _distributed(compression=names["codec"])
    _step(names)


def given_metrics() -> Names:
    names = _distributed()
    _step(names)
    return names


def check_metrics(names: Names) -> None:
    assert names["numbers"]["reigen_steps_total"] >= 1


def given_gpu() -> Names:
    """What there is without GPUs, too: the page's own names and arguments."""
    if not torch.cuda.is_available():
        torch.cuda.set_device = lambda device: None
        nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment, return-value]
    return {"torch": torch, "model": Net()}


check_gpu = _step


def given_gpus() -> Names:
    names = given_gpu()
    loss = names["model"](torch.ones(2, 8)).mean()
    return {**names, "loss": loss, "scaler": torch.amp.GradScaler("cpu")}


check_gpus = _step


def given_elastic_run() -> Names:
    hvd.init()
    dataset, model = Rows(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = {"dataset": dataset, "model": model, "optimizer": optimizer, "DataLoader": DataLoader}

    def train_one_batch(batch: list[Tensor]) -> None:
        made = vars(sys.modules["documentation_elastic_run"])  # with the optimizer that the page has made
        made["optimizer"].zero_grad()
        mse_loss(model(batch[0]), batch[1]).backward()
        made["optimizer"].step()

    return {**names, "epochs": 2, "batch_size": 32, "train_one_batch": train_one_batch, "save": lambda state: None}


def check_elastic_run(names: Names) -> None:
    assert names["state"].epoch == 1
    assert len(names["sampler"]) == NUM_SAMPLES // 2


def given_elastic_job() -> Names:
    hvd.init()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = Rows()
    names = {"model": model, "optimizer": optimizer, "dataset": dataset}
    names["directory"] = str(Path.cwd())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    return {**names, "scheduler": scheduler, "loss": lambda model, rows: mse_loss(model(rows[0]), rows[1])}


def check_elastic_job(names: Names) -> None:
    assert names["step"].is_last
    images, labels = Rows()[:]
    assert mse_loss(names["model"](images), labels).item() < 1.0
