"""Loader of the samples of a job's steps, with worker processes that load steps ahead."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from reigen.elastic.job import BaseJob, ElasticStep
from reigen.errors import ArgumentError

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class StepLoader:
    """Loader of the parts of a job's steps by a `torch.utils.data.DataLoader`.

    Workers load what the cursor will deal to this rank if members stay. Where they change, what was loaded ahead is
    dropped, and the same workers go on with what is dealt then.

    Args:
        job: whose steps.
        dataset: with ``dataset[index]``.
        options: of the DataLoader: ``num_workers``, ``collate_fn``, ``pin_memory``, ...; what says which samples it
            loads, and in which order, is the job's.

    Attributes:
        num_restarts: how often loading began anew: at first, and where steps did not follow each other on this rank.

    Raises:
        ArgumentError: an option is the job's.

    Example::

        loader = hvd.elastic.StepLoader(job, dataset, num_workers=4)
        for step in job.steps(epochs=10):
            with step:
                for images, labels in loader.batches(step):
                    loss(model(images), labels).backward()
                optimizer.step()
    """

    def __init__(self, job: BaseJob, dataset: Dataset[Any], **options: Any) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise ArgumentError(f"{name} is the job's: its Cursor says which samples a step has")
        self._plan = _PartPlan(job)
        options.setdefault("persistent_workers", bool(options.get("num_workers")))
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._plan, **options)
        self.num_restarts = 0
        self._batches: Iterator[Any] | None = None
        #: number of the step that comes next, and to which place of how many what is loaded ahead was dealt
        self._next: tuple[int, int | None, int] | None = None

    def batches(self, step: ElasticStep) -> Iterator[Any]:
        """Iterate over a step's parts on this rank, each loaded and collated: none, if it has no samples."""
        at = (step.number, step.place, step.num_dealt)
        if self._batches is None or self._next != at:
            self._plan.begin(step)
            self.num_restarts += 1
            self._batches = iter(self._loader)
            self._next = (step.number + 1, step.place, step.num_sharing)
        else:
            self._next = (step.number + 1, *self._next[1:])
        for _ in step.parts:
            yield next(self._batches)


class _PartPlan(torch.utils.data.Sampler[list[int]]):
    """Samples of this rank's parts from one step on, as long as the members stay."""

    def __init__(self, job: BaseJob) -> None:
        self._job = job
        self._first: ElasticStep | None = None

    def begin(self, step: ElasticStep) -> None:
        """Let the next iteration begin with this step."""
        self._first = step

    def __iter__(self) -> Iterator[list[int]]:
        step, cursor = self._first, copy.copy(self._job.data)
        assert step is not None
        if step.place is None:  # a warm spare
            return
        interval, parts = step.interval, tuple(step.parts[:])  # of its first step a newcomer takes none
        while interval.epoch < step.num_epochs:
            for part in parts:
                yield part.indices.tolist()
            cursor.move_behind(interval)
            interval = cursor.next_interval(step.num_sharing)
            parts = cursor.deal(interval, step.place, step.num_sharing, self._job.num_parts)
