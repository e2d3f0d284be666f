"""``hvd.elastic.Job``: a training loop whose steps survive the death of any process."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from reigen.elastic.cursor import Cursor
from reigen.elastic.job import BaseJob
from reigen.elastic.state import Departure
from reigen.elastic.training import reading_checkpoint
from reigen.errors import ArgumentError
from reigen.files import write_atomically
from reigen.torch.elastic.parts import PartwiseTraining
from reigen.torch.elastic.training import TorchTraining


class Job(BaseJob):
    """Elastic training with PyTorch in which no step and no sample is lost when processes die.

    Where members change in ``with step:``, the step is undone, its samples are dealt to the members that there are now,
    and it comes again from `steps`; nothing is raised. A step that some members had applied is not run again: the
    others get its result. Newcomers and members that leave do so between two steps.

    The block begins without gradients. In it each rank computes those of the mean loss over each of its parts, and
    calls ``optimizer.step()`` once. They are weighted so that what the optimizer gets is the gradient of the mean over
    all samples of the step, whatever part of them a rank has, none even. Behind ``optimizer.step()`` the block must not
    communicate: mean losses and the like are computed before it. Collectives outside of steps are not protected.

    Args:
        model: a module.
        optimizer: of its parameters; it becomes a ``DistributedOptimizer``, unless it is one (with op=Average).
        scheduler: learning rate scheduler, or None; the program steps it in the block, behind ``optimizer.step()``:
            behind the block it would be stepped twice for a step that was undone, or received with its scheduler.
        data: the samples.
        min_size: with fewer members steps wait.
        deterministic: "parts": a step is divided into ``num_parts`` parts, whoever takes them, and gradients are added
            in their order, so that weights have the same bits whoever the members are; random numbers are those of a
            part, and buffers the mean of what the parts make of them. Gradients are exchanged behind the last part,
            all parts' of them; for tests, and who asks. The optimizer is used as it is. None: as fast as it can be.
        num_parts: of each step, at least as many as there may be ranks.
        resume: a checkpoint to begin with, if it is there; where ranks have different ones, the latest.
        on_leave: called with a `Departure` when this process leaves the job after a notice, before it ends: the place
            for a checkpoint where all leave (``departure.all_leave``).
        objects: what else belongs to the training, by name, with ``state_dict()`` and ``load_state_dict()``: a
            GradScaler, say. Undone and given to newcomers like everything else.

    Raises:
        ArgumentError: an argument makes no sense; or, in a newcomer, its model is not that of the members.

    Example::

        data = hvd.elastic.Cursor(len(dataset), global_batch=256, seed=1)
        with hvd.elastic.Job(model, optimizer, data=data, min_size=2) as job:
            for step in job.steps(epochs=10):
                with step:
                    for part in step.parts:
                        loss(model, dataset[part.indices]).backward()
                    optimizer.step()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        data: Cursor,
        min_size: int = 1,
        deterministic: Literal["parts"] | None = None,
        num_parts: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        on_leave: Callable[[Departure], None] | None = None,
        **objects: Any,
    ) -> None:
        if scheduler is not None:
            objects["scheduler"] = scheduler
        if deterministic not in {None, "parts"} or (deterministic is None) != (num_parts is None):
            raise ArgumentError('deterministic must be "parts", with num_parts, or None')
        kind = TorchTraining if deterministic is None else PartwiseTraining
        training = kind(model, optimizer, objects)
        super().__init__(training, data, min_size=min_size, num_parts=num_parts, resume=resume, on_leave=on_leave)

    def save(self, state: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write a state to a file, as `torch.save` does; atomically."""
        file = io.BytesIO()
        torch.save(state, file)
        write_atomically(path, [file.getbuffer()])

    def load(self, path: str | os.PathLike[str]) -> bool:
        """Load a checkpoint, if it is there; return whether it was. Before the job's `with` block.

        Raises:
            ArgumentError: it is none, truncated or damaged.
        """
        if not Path(path).exists():
            return False
        with reading_checkpoint(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            number, data, training = state["number"], state["data"], state["training"]
        self.load_state_dict({"number": number, "data": data, "training": training})
        return True
