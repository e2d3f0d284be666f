"""Executes what :mod:`reigen.frontends.gradients` decides, for one fixed list of parameters.

The memory of the buckets is registered at the end of the first pass, in ``synchronize()`` or ``step()``, when the order
in which gradients arrive is known: registering is collective, and there every rank comes, whatever its model did. From
then on ``p.grad`` is a view of its bucket, and buckets are reduced in place while backward runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from reigen import context as contexts
from reigen.errors import ArgumentError, CollectiveError, StepOrderError
from reigen.frontends.adapter import Array
from reigen.frontends.agreement import Agreement, Proposal, agree
from reigen.frontends.buckets import BucketPlan, ParameterSpec, arrival_order, divide, plan_buckets
from reigen.frontends.gradients import GradientTracker
from reigen.torch.adapter import dtype_of, tensor_over
from reigen.torch.compression import Compressor
from reigen.torch.sparse import SparseGradients
from reigen.types import DTYPES, DType, ReduceOp

if TYPE_CHECKING:
    from reigen.context import Context, Handle, Region


@dataclass(frozen=True)
class Reduction:
    """``postscale * op(prescale * gradient)``."""

    op: ReduceOp
    prescale: float
    postscale: float


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are reduced; the same on every rank.

    Attributes:
        reduction: the operator and its factors.
        compression: in which element type gradients travel.
        sparse_as_dense: sparse gradients are made dense instead of being gathered.
        groups: how many groups are submitted as a whole, or the group of each parameter that is in one.
    """

    reduction: Reduction
    compression: Compressor
    sparse_as_dense: bool
    groups: int | Mapping[torch.Tensor, int] | None


class Reducer:
    """Keeps the gradients of some parameters the same on all ranks.

    Args:
        context: the job.
        parameters: names and parameters, in the same order on every rank.
        options: how to reduce.
        backward_passes_per_step: gradients that are summed up locally before they are communicated.
    """

    def __init__(
        self,
        context: Context,
        parameters: Sequence[tuple[str, torch.Tensor]],
        options: ReduceOptions,
        backward_passes_per_step: int,
    ) -> None:
        self.parameters = [parameter for _, parameter in parameters]
        self.tracker = GradientTracker(len(parameters), backward_passes_per_step)
        self._names = [name for name, _ in parameters]
        self._options = options
        own = [dtype_of(p.dtype) for p in self.parameters]
        self._wire = [options.compression.wire_dtype(dtype) for dtype in own]
        #: whether p.grad may be the place in the bucket itself: same element type, in host memory
        self._direct = [
            wire is dtype and p.device.type == "cpu"
            for wire, dtype, p in zip(self._wire, own, self.parameters, strict=True)
        ]
        #: a tensor over each parameter's place in its bucket; None before the plan, and for sparse gradients
        self._places: list[torch.Tensor | None] = [None] * len(parameters)
        self._arrays: list[Array] = []
        self._handles: dict[int, Handle] = {}
        self._region: Region | None = None
        self._sparse = SparseGradients({})
        self._bind(context)
        self._hooks = [watch(p, self._hook(i)) for i, p in enumerate(self.parameters)]

    def start(self) -> None:
        """Contribute and submit everything that this pass has not yet; collective in the first pass.

        Raises:
            MismatchError: the ranks have different parameters (first pass).
            CollectiveError: the job is broken.
        """
        if not self.tracker.num_arrived:
            self._follow_context()
        if self._context.size == 1:
            return
        if self.tracker.plan is None:
            self._settle()
        left = self.tracker.finish()
        for index in left.missing:
            self._collect(index, self.parameters[index])
        self._submit(left.submit)
        self._sparse.start(self._context, self.name, self.parameters)

    def wait(self) -> None:
        """Wait for everything that was submitted; then every ``p.grad`` is the reduced gradient, and a new pass begins.

        Raises:
            CollectiveError: the first failure; all handles have been waited for.
        """
        handles, self._handles = self._handles, {}
        failure: CollectiveError | None = None
        for handle in handles.values():
            try:
                handle.wait()
            except CollectiveError as error:
                failure = failure or error
        self.tracker.reset()
        if failure is not None:
            raise failure
        for index, place in enumerate(self._places):
            if place is not None:
                self._deliver(self.parameters[index], place, self._direct[index])
        self._sparse.wait(self.parameters, self._context.size)

    def release(self) -> None:
        """Take the hooks off and give the buckets' memory back; gradients that lie there are copied out first."""
        for hook in self._hooks:
            hook.remove()
        self._forget_region()

    def _bind(self, context: Context) -> None:
        self._context = context
        self.name = f"gradients.{next(context.gradient_sets[0])}"

    def _follow_context(self) -> None:
        """After shutdown() and init(), begin anew with the new context: agree again, register again."""
        current = contexts.current()
        if current is not self._context:
            self._forget_region()
            self._handles.clear()
            self.tracker = GradientTracker(len(self.parameters), self.tracker.backward_passes_per_step)
            self._bind(current)

    def _forget_region(self) -> None:
        for index, place in enumerate(self._places):
            parameter = self.parameters[index]
            if place is not None and parameter.grad is place:
                parameter.grad = place.clone()
            self._places[index] = None
        self._arrays = []
        region, self._region = self._region, None
        if region is not None:
            self._context.free(region)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            # Runs for every parameter in every backward: microseconds count.
            if not self.tracker.num_arrived:
                self._follow_context()
            arrival = self.tracker.gradient(index)
            if arrival.collect:
                self._collect(index, parameter)
                self._submit(arrival.submit)

        return on_gradient

    def _collect(self, index: int, parameter: torch.Tensor) -> None:
        """Bring the gradient to its place; without one, zeros."""
        place = self._places[index]
        gradient = parameter.grad
        if gradient is place or place is None:
            return
        if gradient is None:
            place.zero_()
            if not parameter.requires_grad:
                return  # frozen by now: the optimizer must not see a gradient
        else:
            if gradient.requires_grad or gradient.layout is not torch.strided:
                gradient = self._dense(index, gradient.detach())
            place.copy_(gradient)
        if self._direct[index]:
            parameter.grad = place

    def _dense(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is torch.strided:
            return gradient
        if not self._options.sparse_as_dense:
            raise ArgumentError(
                f"the gradient of {self._names[index]} was dense or absent on every rank in the first step "
                "and is sparse now; use sparse_as_dense=True"
            )
        return gradient.to_dense()

    def _submit(self, buckets: tuple[int, ...]) -> None:
        for position, bucket in enumerate(buckets):
            try:
                self._reduce(bucket)
            except BaseException:
                self.tracker.failed(buckets[position:])
                raise

    def _reduce(self, bucket: int) -> None:
        plan, region = self.tracker.plan, self._region
        array, reduction = self._arrays[bucket], self._options.reduction
        if not array.size:
            return
        assert plan is not None
        assert region is not None
        self._handles[bucket] = self._context.allreduce(
            array,
            array,
            DTYPES[plan.buckets[bucket].dtype],
            op=reduction.op,
            name=f"{self.name}.{bucket}",
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            region=region,
        )

    def _deliver(self, parameter: torch.Tensor, place: torch.Tensor, direct: bool) -> None:
        gradient = parameter.grad
        if gradient is place or not (parameter.requires_grad or gradient is not None):
            return
        if direct:
            parameter.grad = place
        elif gradient is None or gradient.layout is not torch.strided:
            parameter.grad = torch.empty_like(parameter).copy_(place)
        else:
            gradient.detach().copy_(place)

    def _settle(self) -> None:
        """End of the first pass: agree with the other ranks, plan, and register the memory."""
        agreement = agree(self._context, self._proposal(), self.name)
        order = arrival_order(agreement.order, len(self.parameters))
        dense = [index for index in order if not agreement.sparse_dims[index]]
        specs = [ParameterSpec(p.numel(), w.itemsize, w.name) for p, w in zip(self.parameters, self._wire, strict=True)]
        plan = plan_buckets(specs, dense, self._context.config.bucket_bytes, self._groups(dense))
        self._sparse = self._sparse_gradients(agreement)
        self._register(plan)
        self.tracker.adopt(plan)

    def _groups(self, order: Sequence[int]) -> list[Sequence[int]]:
        """The parameters, by their numbers, that are submitted together."""
        groups = self._options.groups
        if isinstance(groups, int):
            return divide(order, groups)
        return _grouped(self.parameters, groups or {})

    def _register(self, plan: BucketPlan) -> None:
        region = self._context.allocate(max(1, plan.nbytes), name=self.name)
        region.array[:] = 0  # also brings the pages in, and leaves no garbage between the places
        self._region = region
        for bucket in plan.buckets:
            wire = DTYPES[bucket.dtype]
            self._arrays.append(region.array[bucket.offset : bucket.offset + bucket.nbytes].view(wire.storage))
            for place in bucket.places:
                array = region.array[place.offset : place.offset + place.nbytes]
                self._places[place.parameter] = _place(array, wire, self.parameters[place.parameter])

    def _proposal(self) -> Proposal:
        reduction, groups = self._options.reduction, self._options.groups
        number = f", {groups} groups" if isinstance(groups, int) else ""
        lines = [f"op={reduction.op.name}, scaled by {reduction.prescale} and {reduction.postscale}{number}"]
        for name, parameter, wire in zip(self._names, self.parameters, self._wire, strict=True):
            layout = f"shape {tuple(parameter.shape)}, strides {_strides(parameter)}"
            lines.append(f"{name}: {parameter.dtype} as {wire.name}, {layout}")
        if isinstance(groups, Mapping):
            members = _grouped(self.parameters, groups)
            lines += [f"a group of {', '.join(self._names[index] for index in group)}" for group in members]
        return Proposal(tuple(lines), tuple(self.tracker.order), tuple(map(self._sparse_dims, self.parameters)))

    def _sparse_dims(self, parameter: torch.Tensor) -> int:
        gradient = parameter.grad
        if self._options.sparse_as_dense or gradient is None or gradient.layout is torch.strided:
            return 0
        return gradient.sparse_dim()

    def _sparse_gradients(self, agreement: Agreement) -> SparseGradients:
        dims = {index: dim for index, dim in enumerate(agreement.sparse_dims) if dim}
        op = self._options.reduction.op
        if dims and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ArgumentError(f"sparse gradients need op=Average or op=Sum, got {op.name}")
        return SparseGradients(dims, average=op is ReduceOp.AVERAGE)


def check_finished(reducers: Sequence[Reducer], action: str) -> None:
    """Accept if no complete gradient is on its way.

    Raises:
        StepOrderError: one is; the message says that ``action`` came too early.
    """
    if any(reducer.tracker.outstanding for reducer in reducers):
        raise StepOrderError(
            f"{action} was called after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
            "while gradients are on their way to the other ranks; call one of those first"
        )


def _grouped(parameters: Sequence[torch.Tensor], groups: Mapping[torch.Tensor, int]) -> list[Sequence[int]]:
    """The numbers of the parameters in each group that has any of them."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        if parameter in groups:
            members[groups[parameter]].append(index)
    return list(members.values())


def watch(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``hook(parameter)`` whenever backward has added to its gradient."""
    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(hook)


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor laid out in memory like the parameter."""
    return torch.empty_like(parameter, device="meta").stride()


def _place(array: Array, wire: DType, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor with the parameter's shape and layout over ``array``: its own storage, so that copies stay small."""
    flat: Any = tensor_over(array.view(wire.storage), wire)
    view: torch.Tensor = flat.as_strided(parameter.shape, _strides(parameter))
    return view
