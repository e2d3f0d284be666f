"""Strategy of Lightning's Trainer whose ranks are those of Reigen's job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from reigen.api import job
from reigen.api.functions import barrier, broadcast_object
from reigen.api.operations import Average, Max, Min, Product, Sum
from reigen.compression import Codec
from reigen.errors import ArgumentError
from reigen.lightning.metric_sync import synchronize_metrics
from reigen.torch.compression import Compression, Compressor
from reigen.torch.distributed_optimizer import distribute_in_place, restore_in_place
from reigen.torch.ops import allgather, allreduce
from reigen.torch.state import broadcast_parameters
from reigen.torch.sync_batch_norm import SyncBatchNorm

#: Lightning's ``ParallelStrategy``, of one of its packages.
_ParallelStrategy: Any = object

_OPERATORS = {"mean": Average, "avg": Average, "sum": Sum, "max": Max, "min": Min, "product": Product}
#: More backward passes than an accumulation has: their gradients are not sent.
_NOT_YET = 2**30
#: A module, the name of its child, and the child.
_Place = tuple[torch.nn.Module, str, torch.nn.Module]


class JobStrategy(_ParallelStrategy):
    """``Trainer(strategy="reigen")``: data-parallel training over the ranks of Reigen's job.

    The job's processes are started by ``reigen run``, or by whatever starts Reigen's; a process by itself is a job of
    one, which trains as without a strategy. The Trainer's ``devices`` and ``num_nodes`` do not count: a process uses
    one device, with GPUs that of its local rank among those given.

    Rank 0's parameters and buffers are those that all begin with. Gradients are averaged in backward, bucket by bucket,
    and when it returns they are what hooks, clipping and GradScaler see; while gradients are accumulated nothing is
    sent. Learning rates are not scaled. Samplers, ``sync_dist=True``, metrics of torchmetrics, ``sync_batchnorm=True``,
    checkpoints (rank 0 writes them) and early stopping work as with DDP.

    Args:
        accelerator: the Trainer's, by whom it is set.
        parallel_devices: likewise.
        checkpoint_io: likewise.
        precision_plugin: likewise.
        compression: of the gradients, as ``DistributedOptimizer`` takes it.

    Raises:
        DeadlineError: not every rank of the job came in time.
    """

    #: a ``ClusterEnvironment`` of the same package
    environment_class: type
    model: Any
    optimizers: Any

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        compression: Compressor | Codec | Mapping[str, Any] = Compression.none,
    ) -> None:
        job.init()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self.environment_class(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._compression = compression
        self._batch_norms: list[_Place] = []

    @property
    def is_distributed(self) -> bool:
        """Return whether there are other ranks: the Trainer gives each its own samples then."""
        return job.size() > 1

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if len(devices) == 1 and devices[0].type == "cuda" and not devices[0].index:  # devices=1: one for each process
            return torch.device("cuda", job.local_rank() % torch.cuda.device_count())
        device: torch.device = devices[job.local_rank() % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the ``DistributedSampler`` that the Trainer gives its loaders."""
        return {"num_replicas": job.size(), "rank": job.rank()}

    def set_world_ranks(self) -> None:
        """Let Lightning's messages, loggers and progress bars be those of rank 0 alone; the Trainer calls it."""
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = job.rank()

    def setup(self, trainer: Any) -> None:
        """Move the model to the device, begin with rank 0's weights, and make optimizers that average gradients."""
        is_fitting = str(trainer.state.fn.value) == "fit"
        if is_fitting and self._layer_sync is not None:
            self._batch_norms = _find_batch_norms(self.model)
            self.model = SyncBatchNorm.convert_sync_batchnorm(self.model)
        super().setup(trainer)
        synchronize_metrics(self.lightning_module)

    def model_to_device(self) -> None:
        """Move the model to this process's device, and begin with rank 0's parameters and buffers."""
        self.model.to(self.root_device)
        if job.size() > 1:
            broadcast_parameters([*self.model.named_parameters(), *self.model.named_buffers()], 0)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, schedulers with them, and let each average its gradients over the ranks."""
        super().setup_optimizers(trainer)
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            named = [(names.get(each, f"optimizer{number}.{place}"), each) for place, each in enumerate(owned)]
            distribute_in_place(optimizer, named, self._compression, synchronize_in_backward=True)
        self.optimizers = self.optimizers  # what Lightning puts around each is of the optimizer's class

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it gradients are accumulated, and not sent; the next backward pass sends their sums."""
        for optimizer in self.optimizers:
            optimizer.set_backward_passes_per_step(_NOT_YET)
        try:
            yield
        finally:
            for optimizer in self.optimizers:
                optimizer.set_backward_passes_per_step(1)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks.

        Args:
            tensor: of the same shape on all ranks; other objects are returned as they are.
            group: None.
            reduce_op: "mean", "sum", "max", "min" or "product", or torch.distributed's; None for the sum.

        Returns:
            A new tensor; the mean of integers is a float.

        Raises:
            ArgumentError: no such operation.
            CollectiveError: the ranks disagree, or one has died.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        operator = _operator_of(reduce_op)
        if operator == Average and not tensor.is_floating_point():
            return allreduce(tensor, op=Sum) / job.size()
        return allreduce(tensor, op=operator)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor of all ranks.

        Args:
            tensor: of the same shape on all ranks.
            group: None.
            sync_grads: gradients flow back: a rank's tensor gets the sum of what all ranks' losses say of it.

        Returns:
            Shape (number of ranks, *shape).

        Raises:
            CollectiveError: the ranks disagree, or one has died.
        """
        gathered: torch.Tensor
        own: Any = _GatherWithGradients
        gathered = own.apply(tensor) if sync_grads else allgather(tensor.detach().unsqueeze(0))
        return gathered

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object."""
        return broadcast_object(obj, src)

    def teardown(self) -> None:
        """Give back the optimizers and the batch norms as they were made, and the model to the host's memory."""
        _restore_batch_norms(self._batch_norms)
        self._batch_norms = []
        for optimizer in self.optimizers:
            restore_in_place(optimizer)
        self.optimizers = self.optimizers
        super().teardown()


def _find_batch_norms(model: torch.nn.Module) -> list[_Place]:
    """Find the layers that `SyncBatchNorm.convert_sync_batchnorm` replaces, and where they are."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm)
    ]


def _restore_batch_norms(places: list[_Place]) -> None:
    """Put layers back into their places, with the parameters, buffers and mode of those that were there meanwhile."""
    for parent, name, layer in places:
        trained = parent._modules.get(name)
        if not isinstance(trained, SyncBatchNorm):
            continue  # the program has put something else there
        layer._parameters, layer._buffers = trained._parameters, trained._buffers
        layer.train(trained.training)
        parent.add_module(name, layer)


class _GatherWithGradients(torch.autograd.Function):
    """Allgather with the gradient that torch.distributed's has: a sum, where Horovod's is an average."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        """Gather the tensors of all ranks."""
        return allgather(tensor.detach().unsqueeze(0))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Add up the ranks' gradients of this rank's tensor."""
        return allreduce(gradient.contiguous(), op=Sum)[job.rank()]


def _operator_of(reduce_op: Any) -> int:
    name = "sum" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op))
    name = name.rpartition(".")[2].lower()  # str(ReduceOp.SUM) is RedOpType.SUM
    if name not in _OPERATORS:
        raise ArgumentError(f"reduce_op must be one of {', '.join(_OPERATORS)}, got {reduce_op!r}")
    return _OPERATORS[name]
