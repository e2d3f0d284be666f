"""Metrics of torchmetrics, computed from the states of all ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch

from reigen.api import job
from reigen.torch.ops import allgather


def synchronize_metrics(model: torch.nn.Module) -> None:
    """Let the metrics among a model's modules gather their states over the ranks of the job.

    They ask torch.distributed otherwise, and there is no process group. Those that have been given functions of their
    own for that are left as they are.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    for metric in model.modules():
        if isinstance(metric, torchmetrics.Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather_states
            metric.distributed_available_fn = has_others


def has_others() -> bool:
    """Return whether this process is in a job of several ranks."""
    return job.is_initialized() and job.size() > 1


def gather_states(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Gather one state of a metric.

    Args:
        state: a tensor whose first dimension may differ between ranks.
        group: None.

    Returns:
        The states, by rank.

    Raises:
        CollectiveError: the ranks disagree, or one has died.
    """
    if not state.ndim:
        return list(allgather(state.unsqueeze(0)).unbind())
    lengths: list[int] = allgather(torch.tensor([state.shape[0]])).tolist()
    return list(torch.split(allgather(state.contiguous()), lengths))
