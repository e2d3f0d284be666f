"""DistributedTrainer: gluon's Trainer, whose gradients are added up over all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from reigen import context
from reigen.api.compression import CastCompression, parse_compression
from reigen.api.gradients.replica_check import ReplicaCheckSchedule, check_replicas
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.errors import UnsupportedTypeError
from reigen.mxnet.adapter import MXNetAdapter
from reigen.mxnet.compression import Compression
from reigen.mxnet.errors import raises_mxnet_errors
from reigen.mxnet.gradient_buckets import GradientBuckets
from reigen.mxnet.gradient_reducer import GradientReducer
from reigen.mxnet.optimizer import DistributedOptimizer


class DistributedTrainer(mx.gluon.Trainer):
    """``gluon.Trainer`` that needs no kvstore: ``step()`` updates with the averages of all ranks' gradients.

    From the first step on, the gradients of a host's ranks lie in memory that all of them share, in buckets. The
    reduction of a bucket is an operation of MXNet's engine, which begins it when its gradients have been computed,
    while the rest of the backward pass goes on.

    As in Horovod, ``allreduce_grads()`` leaves *sums* in the gradients; ``update()`` and ``step()`` divide by the
    number of ranks, through the optimizer's ``rescale_grad``. A script that clips between the two reckons with sums.

    Args:
        params: ``net.collect_params()``, a dict or a list of Parameters; the same on every rank, in the same order.
        optimizer: a name of MXNet's, or one of its optimizers.
        optimizer_params: the optimizer's arguments, if it is given by name.
        compression: the type in which gradients travel (Compression.fp16), or a codec of `reigen.compression` with
            error feedback, or its parameters (``{"type": "2bit", "threshold": 0.5}``).
        gradient_predivide_factor: gradients are divided by it before they are added, and multiplied after.
        prefix: accepted for Horovod's sake: trainers are told apart by the order in which they are made.
        num_groups: reduce the gradients in so many groups; 0: in buckets of the usual size.
        process_set: the ranks that average; others update with their own gradients.

    Raises:
        ArgumentError: an argument makes no sense.
        NotInitializedError: ``init()`` has not been called.
    """

    @raises_mxnet_errors
    def __init__(
        self,
        params: Any,
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        chosen = (
            None if _is_custom_compression(compression) else parse_compression(compression, "Compression.none or .fp16")
        )
        self._compressor = compression
        self._gradients = GradientReducer(gradient_predivide_factor, num_groups, process_set)
        del prefix
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer does not take DistributedOptimizer as its optimizer. It has been unwrapped.",
                stacklevel=3,
            )
            optimizer = optimizer.unwrapped()
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._own_scale = self._optimizer.rescale_grad
        self._comparisons = ReplicaCheckSchedule()
        self._chosen = chosen
        self._buckets = self._make_buckets()

    def _make_buckets(self) -> GradientBuckets | None:
        """Return the buckets of this job; None for a rank alone, or where a class of the user's compresses tensors."""
        reduce_group = self._gradients.reduce_group
        if reduce_group is None or self._chosen is None:
            return None
        return GradientBuckets(reduce_group, self._gradients.num_groups, self._chosen)

    def _follow_job(self) -> None:
        """Have the ranks of the present job reduce, if members have changed."""
        if self._gradients.follow_job():
            self._buckets = self._make_buckets()

    @property
    def _scale(self) -> float:
        """Factor of gluon's Trainer: here it makes averages of sums, too."""
        self._follow_job()
        return float(self._own_scale * self._gradients.factor)

    @_scale.setter
    def _scale(self, scale: float) -> None:
        self._own_scale = scale / self._gradients.factor

    @raises_mxnet_errors
    def _allreduce_grads(self) -> None:
        self._follow_job()
        if self._gradients.reduce_group is None:
            return
        parameters = [(index, p) for index, p in enumerate(self._params) if p.grad_req != "null"]
        for _, parameter in parameters:
            _sum_local_contexts(parameter, parameter.list_grad())
        if self._buckets is not None:
            self._buckets.reduce(parameters)
        else:
            self._reduce_compressed([(index, parameter.list_grad()[0]) for index, parameter in parameters])
        for _, parameter in parameters:
            first, *copies = parameter.list_grad()
            for other in copies:
                first.copyto(other)

    @raises_mxnet_errors
    def _update(self, ignore_stale_grad: bool = False) -> None:
        super()._update(ignore_stale_grad)
        reduce_group = self._gradients.reduce_group
        if reduce_group is not None and self._comparisons.due(
            reduce_group.context.config.check_replicas, reduce_group.context.num_joins
        ):
            names = [parameter.name for parameter in self._params]
            check_replicas(reduce_group, [_bytes_of(parameter) for parameter in self._params], names)
        context.mark("STEP")

    def _reduce_compressed(self, gradients: list[tuple[int, Any]]) -> None:
        compressed = [(index, *self._compressor.compress(gradient)) for index, gradient in gradients]
        self._gradients.reduce([(index, -index, array) for index, array, _ in compressed])
        for (_, gradient), (_, array, ctx) in zip(gradients, compressed, strict=True):
            if array is not gradient:
                self._compressor.decompress(array, ctx).copyto(gradient)


def _is_custom_compression(compression: object) -> bool:
    """Return whether it is a class of the user's own, as Horovod has them, which makes tensors of tensors."""
    return (
        not isinstance(compression, CastCompression)
        and hasattr(compression, "compress")
        and hasattr(compression, "decompress")
    )


def _bytes_of(parameter: Any) -> NDArray[np.uint8]:
    array, _ = MXNetAdapter().array(parameter.list_data()[0])
    return array.reshape(-1).view(np.uint8)


def _sum_local_contexts(parameter: Any, copies: list[Any]) -> None:
    """Add the gradients of this rank's contexts up, in the first."""
    if copies[0].stype != "default":
        raise UnsupportedTypeError(
            f"the gradient of {parameter.name} is {copies[0].stype}, and only dense ones can be reduced: create the "
            "layer with sparse_grad=False, or use a kvstore"
        )
    for other in copies[1:]:
        copies[0][:] += other.as_in_context(copies[0].context)
