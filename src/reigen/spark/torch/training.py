"""Training of a PyTorch model in one of the processes of a job."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from reigen.errors import ArgumentError
from reigen.spark.data_parquet import Columns
from reigen.spark.estimator_task import Progress, TrainingTask

Loss = Callable[..., Any]


@dataclass(frozen=True)
class TorchParts:
    """Objects of the user's: they are pickled together, so that the optimizer has the model's own parameters.

    Attributes:
        losses: one for each label.
        loss_constructors: functions that make them, instead of ``losses``.
        metrics: functions ``(output, label)``, a list for each label.
        train_minibatch: does a step in the place of `train_minibatch`, or None.
        callbacks: functions ``(epoch, record)``, or objects with a method ``on_epoch_end`` of that kind.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: Sequence[Loss]
    loss_constructors: Sequence[Callable[..., Loss]] | None
    loss_weights: Sequence[float]
    metrics: Sequence[Sequence[Callable[..., Any]]]
    input_shapes: Sequence[Sequence[int]] | None
    train_minibatch: Callable[..., Any] | None
    callbacks: Sequence[Any]


def train(task: TrainingTask, parts: TorchParts) -> tuple[bytes, list[dict[str, Any]]] | None:
    """Train, as each rank does; returns the state of model and optimizer, and the history, on rank 0."""
    import reigen.torch as hvd

    task.set_start_method()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = _choose_device(task.use_gpu, hvd.local_rank())
    torch.manual_seed(task.seed + rank)
    parts.model.to(device)
    progress, history = _restore(
        hvd.broadcast_object(task.read_checkpoint() if rank == 0 else None), parts, task.epochs
    )
    _move_state(parts.optimizer)
    optimizer = _wrap(parts, task)
    if parts.loss_constructors:
        parts = replace(parts, losses=[_construct(each, parts.model, optimizer) for each in parts.loss_constructors])
    trainer = _Trainer(parts, task, optimizer, device)
    reader, val_reader = task.train_reader(rank, size), task.val_reader(rank, size)
    steps = task.train_steps or task.train_plan(rank, size).num_steps
    content = b""
    for epoch in range(progress.done, progress.end):
        trained = trainer.train_epoch(reader.batches(epoch * steps, steps), steps)
        record = {"epoch": epoch, "train": _reduce(trained, parts.metrics, f"train.{epoch}")}
        if val_reader is not None:
            found = trainer.evaluate(itertools.islice(val_reader.all_batches(), task.val_steps))
            record["validation"] = _reduce(found, parts.metrics, f"validation.{epoch}")
        history.append(record)
        progress = progress.after(epoch)
        if rank == 0:
            content = _save(parts, progress, history)
            task.write_checkpoint(content, history)
        _report(record, task, parts.callbacks, is_first=rank == 0)
    hvd.shutdown()
    return (content, history) if rank == 0 else None


def _wrap(parts: TorchParts, task: TrainingTask) -> Any:
    import reigen.torch as hvd

    return hvd.DistributedOptimizer(
        parts.optimizer,
        named_parameters=parts.model.named_parameters(),
        compression=hvd.Compression.none if task.compression is None else task.compression,
        backward_passes_per_step=task.passes,
    )


def _choose_device(use_gpu: bool, local_rank: int) -> torch.device:
    if not use_gpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state to the device of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _construct(constructor: Callable[..., Loss], model: torch.nn.Module, optimizer: Any) -> Loss:
    """Make a loss, with what its constructor takes of the model and the optimizer."""
    known = {"model": model, "optimizer": optimizer}
    parameters = inspect.signature(constructor).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return constructor(**{name: value for name, value in known.items() if takes_all or name in parameters})


@dataclass
class _Sums:
    """Sums over a rank's rows of an epoch."""

    rows: int = 0
    loss: float = 0.0
    metrics: list[float] = field(default_factory=list)

    def add(self, rows: int, loss: float, metrics: Sequence[float]) -> None:
        self.metrics = self.metrics or [0.0] * len(metrics)
        self.rows += rows
        self.loss += loss * rows
        self.metrics = [total + value * rows for total, value in zip(self.metrics, metrics, strict=True)]


class _Trainer:
    """One rank's training and validation."""

    def __init__(self, parts: TorchParts, task: TrainingTask, optimizer: Any, device: torch.device) -> None:
        self._parts, self._task, self._optimizer, self._device = parts, task, optimizer, device

    def train_epoch(self, batches: Iterator[tuple[Columns, float]], steps: int) -> _Sums:
        model, sums = self._parts.model, _Sums()
        model.train()
        for step, (columns, weight) in enumerate(batches):
            inputs, labels, weights = self._tensors(columns)

            def loss_fn(outputs: Any, labels: Any, sample_weights: Any = None, scale: float = weight) -> Any:
                return self._loss(outputs, labels, sample_weights) * scale

            if self._parts.train_minibatch is not None:
                arguments = model, self._optimizer, self._match, loss_fn, inputs, labels, weights
                outputs, loss = self._parts.train_minibatch(*arguments)
            else:
                first, last = step % self._task.passes == 0, (step + 1) % self._task.passes == 0 or step + 1 == steps
                outputs, loss = self._step(loss_fn, inputs, labels, weights, first=first, last=last)
            self._count(sums, outputs, labels, _number(loss) / weight)
        return sums

    def _step(self, loss_fn: Loss, inputs: Any, labels: Any, weights: Any, *, first: bool, last: bool) -> Any:
        if first:
            self._optimizer.zero_grad()
        outputs, labels = self._match(self._parts.model(*inputs), labels)
        loss = loss_fn(outputs, labels, weights)
        loss.backward()
        if last:
            self._optimizer.step()
        return outputs, loss

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Columns]) -> _Sums:
        model, sums = self._parts.model, _Sums()
        model.eval()
        for columns in batches:
            inputs, labels, weights = self._tensors(columns)
            outputs, matched = self._match(model(*inputs), labels)
            self._count(sums, outputs, labels, float(self._loss(outputs, matched, weights)))
        return sums

    @torch.no_grad()
    def _count(self, sums: _Sums, outputs: Any, labels: Any, loss: float) -> None:
        outputs, labels = self._match(outputs, labels)
        found = zip(outputs, labels, self._parts.metrics, strict=True) if self._parts.metrics else ()
        values = [_number(metric(output, label)) for output, label, group in found for metric in group]
        sums.add(len(labels[0]), loss, values)

    def _tensors(self, columns: Columns) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        task = self._task
        inputs = shape_inputs([columns[name] for name in task.features], self._parts.input_shapes, self._device)
        labels = [torch.as_tensor(columns[name]).float().to(self._device) for name in task.labels]
        if task.sample_weights is None:
            return inputs, labels, None
        return inputs, labels, torch.as_tensor(columns[task.sample_weights]).float().to(self._device)

    def _match(self, outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Return lists of outputs and labels, these in the shapes that were given, or that the outputs have."""
        found = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        if len(found) != len(labels):
            names = ", ".join(self._task.labels)
            raise ArgumentError(f"the model has {len(found)} outputs, but {len(labels)} labels: {names}; one for each")
        if self._task.label_shapes:
            return found, [label.reshape(*shape) for label, shape in zip(labels, self._task.label_shapes, strict=True)]
        return found, [
            label.reshape(output.shape) if output.numel() == label.numel() else label
            for output, label in zip(found, labels, strict=True)
        ]

    def _loss(self, outputs: Any, labels: Any, sample_weights: torch.Tensor | None = None) -> Any:
        total: Any = 0.0
        parts = self._parts
        for output, label, loss, factor in zip(outputs, labels, parts.losses, parts.loss_weights, strict=True):
            if sample_weights is None:
                total = total + loss(output, label) * factor
            else:
                each = _loss_of_samples(loss, output, label)
                total = total + (each.reshape(len(sample_weights), -1).mean(1) * sample_weights).mean() * factor
        return total


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _loss_of_samples(loss: Loss, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return a loss's values for each sample."""
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        same: Any = copy.copy(loss)
        same.reduction = "none"
        values: torch.Tensor = same(output, label)
        return values
    found: torch.Tensor = loss(output, label, reduction="none")
    return found


def shape_inputs(
    arrays: Sequence[np.ndarray[Any, Any]], shapes: Sequence[Sequence[int]] | None, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Return inputs of the model, float32: of the shapes that were given, or as matrices (rows, elements)."""
    tensors = [torch.as_tensor(array).float() for array in arrays]
    chosen = shapes or [(len(tensor), -1) for tensor in tensors]
    return [tensor.reshape(*shape).to(device) for tensor, shape in zip(tensors, chosen, strict=True)]


def _reduce(sums: _Sums, metrics: Sequence[Sequence[Any]], name: str) -> dict[str, Any]:
    """Collective: return means over all ranks' rows."""
    import reigen.torch as hvd

    num_metrics = sum(map(len, metrics))
    own = [sums.rows, sums.loss, *(sums.metrics or [0.0] * num_metrics)]
    total = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Sum, name=f"estimator.{name}").tolist()
    loss, *values = [value / max(total[0], 1.0) for value in total[1:]]
    groups = iter(values)
    return {"loss": loss, "all_metrics": [[next(groups) for _ in group] for group in metrics]}


def _report(record: dict[str, Any], task: TrainingTask, callbacks: Sequence[Any], *, is_first: bool) -> None:
    if is_first and task.verbose:
        values = json.dumps({name: value for name, value in record.items() if name != "epoch"})
        print(f"epoch {record['epoch'] + 1}: {values}", flush=True)  # noqa: T201 - what `verbose` asks for
    for callback in callbacks:
        getattr(callback, "on_epoch_end", callback)(record["epoch"], record)


def _save(parts: TorchParts, progress: Progress, history: list[dict[str, Any]]) -> bytes:
    """Return a checkpoint: tensors and plain values, so that ``torch.load(weights_only=True)`` reads it."""
    buffer = io.BytesIO()
    state = {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
    torch.save({**state, "progress": asdict(progress), "history": json.dumps(history)}, buffer)
    return buffer.getvalue()


def _restore(content: bytes | None, parts: TorchParts, epochs: int) -> tuple[Progress, list[dict[str, Any]]]:
    """Load a checkpoint, if there is one; returns where the run stands."""
    if content is None:
        return Progress(wanted=epochs), []
    saved = load_state(content, parts.model, parts.optimizer)
    return Progress(**saved["progress"]).next_fit(epochs), json.loads(saved["history"])


def load_state(content: bytes, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into a model and an optimizer, without running code out of it; returns all of it."""
    saved: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved
