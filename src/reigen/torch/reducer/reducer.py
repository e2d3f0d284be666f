"""Executes what :mod:`reigen.api.gradients.tracker` decides, for one fixed list of parameters.

The memory of the buckets is registered at the end of the first pass, in ``synchronize()`` or ``step()``, when the order
in which gradients arrive is known: registering is collective, and there every rank comes, whatever its model did. From
then on ``p.grad`` is a view of its bucket, and buckets are reduced in place while backward runs. Where ranks have one
processor each, and no network, nothing can go on beside backward: then they are submitted when it is over.

While some rank has joined, nothing can be agreed on nor registered. A pass that finds no plan then improvises: a plan
that needs no agreement, in ordinary memory, for this pass alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from reigen import context as contexts
from reigen.api.compression import CastCompression, CodecCompression, describe
from reigen.api.gradients.bucket_plan import (
    BucketPlan,
    ParameterSpec,
    arrival_order,
    choose_bucket_bytes,
    plan_buckets,
    split_evenly,
)
from reigen.api.gradients.bucket_size import BucketSizeAgreement
from reigen.api.gradients.plan_agreement import PlanProposal, agree_on_plan
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.gradients.sharding import ParameterRange, ShardGranularity
from reigen.api.gradients.tracker import GradientTracker
from reigen.api.process_sets import ProcessSet
from reigen.context import Context, Handle
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError, CollectiveError, DeadlineError, JoinedError, PeerLostError
from reigen.observe.recorder import GradientArrival
from reigen.torch.adapter import tensor_over
from reigen.torch.dtypes import dtype_of
from reigen.torch.reducer.bucket_memory import (
    BucketMemory,
    CompressedBucketMemory,
    DeviceBucketMemory,
    ShardedBucketMemory,
    choose_bucket_memory,
)
from reigen.torch.reducer.bucket_views import BucketViews, strides_of
from reigen.torch.reducer.pending_gradient import PendingGradient, pending, version
from reigen.torch.sparse import SparseGradients
from reigen.types import DTYPES, ReduceOp

#: marks the hooks that are ours
_GRAD_HOOK_ATTRIBUTE = "_watches_for_reigen"
_UNEVEN_HINT = (
    "Where ranks have different numbers of batches, put the loop into `with hvd.uneven_data(optimizer, model):`, or "
    "call `hvd.join()` after it."
)


def _hint_at_uneven_data(error: CollectiveError) -> None:
    """Add a note to an error of ranks that did not come, or have left."""
    if isinstance(error, DeadlineError) or (isinstance(error, PeerLostError) and error.has_left):
        error.add_note(_UNEVEN_HINT)


@dataclass(frozen=True)
class ReduceOptions:
    """Options of a reduction; the same on every rank.

    Attributes:
        reduction: the operator and its factors.
        compression: in which element type gradients travel, or as which codes.
        sparse_as_dense: sparse gradients are made dense instead of being gathered.
        groups: how many groups are submitted as a whole, or the group of each parameter that is in one.
        process_set: the ranks that reduce together.
        owned: what is reduced stays with the owners of the slices, which have to update so much together: see
            `reigen.api.gradients.sharding`. None: every rank gets it.
    """

    reduction: ReductionSpec
    compression: CastCompression | CodecCompression
    sparse_as_dense: bool
    groups: int | Mapping[torch.Tensor, int] | None
    process_set: ProcessSet
    owned: ShardGranularity | None = None


@dataclass(frozen=True)
class GradientShard:
    """Reduced elements of a gradient, of one owner.

    Attributes:
        piece: which elements; its parameter is a number in `Reducer.parameters`.
        gradient: where they lie after each pass, flat, in the element type that travels.
        is_direct: that is the parameter's element type.
    """

    piece: ParameterRange
    gradient: torch.Tensor
    is_direct: bool


class Reducer:
    """Keeps the gradients of some parameters the same on all ranks of the options' process set, which this one is in.

    The parameters come with names, in the same order on every rank.
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
        self.reduce_group = ReduceGroup(context, options.process_set, options.reduction)
        self.names = [name for name, _ in parameters]
        self._options = options
        self._places = BucketViews(self.parameters)
        self._choose_memory()
        #: whether buckets are reduced while backward runs; the same on all ranks
        self._overlaps = True
        #: what p.grad was, and its version, when it was last seen in this pass: who changes it later spoils the sum
        self._seen: list[tuple[int, int] | None] = [None] * len(parameters)
        #: called when the first gradient of a pass comes
        self.before_pass: Callable[[], None] | None = None
        #: whether gradients that are reduced as dense ones become sparse again; and their sparse dimensions
        self._returns_sparse = options.sparse_as_dense and not options.owned
        self._returned_dims: dict[int, int] = {}
        #: called when a gradient has been dealt with
        self.after_gradient: Callable[[], None] | None = None
        #: called when the process is found to be in another job than before
        self.after_change_of_job: Callable[[], None] | None = None
        self._handles: dict[int, Handle] = {}
        self._sparse = SparseGradients({})
        self._hooks = [set_grad_hook(p, self._hook(i)) for i, p in enumerate(self.parameters)]

    def start(self) -> None:
        """Contribute and submit everything that this pass has not yet; collective where there is no plan.

        Raises:
            MismatchError: the ranks have different parameters (first pass).
            JoinedError: a gradient is sparse, and some rank has joined (first pass).
            CollectiveError: the job is broken.
        """
        if not self.tracker.num_arrived:
            self._follow_changes()
        if self.reduce_group.size == 1:
            return
        if self.tracker.plan is None:
            self._settle()
        left = self.tracker.finish()
        for index in left.missing:
            self._collect(index, self.parameters[index])
        self._submit(left.submit)
        if self._bucket_size is not None:
            self._bucket_size.pass_starts()
        self._sparse.start(self.reduce_group, self.parameters)

    def wait(self) -> None:
        """Wait for everything that was submitted; then every ``p.grad`` is the reduced gradient, and a new pass begins.

        Raises:
            CollectiveError: the first failure; all handles have been waited for.
        """
        handles, self._handles = self._handles, {}
        failures = self._memory.finish(self.reduce_group, handles)
        if self._bucket_size is not None and self._bucket_size.pass_ended():
            self._is_resized = True
        bucket, failure = next(iter(failures.items()), (-1, None))
        if failure is not None:
            assert self.tracker.plan is not None
            names = [self.names[place.parameter] for place in self.tracker.plan.buckets[bucket].places]
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            failure.add_note(f"The gradients in it: {', '.join(names[:8])}{more}.")
            _hint_at_uneven_data(failure)
        self._memory.end_pass(is_reduced=failure is None)
        self.tracker.reset()
        self._seen = [None] * len(self.parameters)
        if failure is None and not self._options.owned:
            self._deliver_all()
        if not self._memory.is_registered:
            self.tracker.abandon()
            self._places.forget(copy=False)
        self._sparse.wait(self.reduce_group, self.parameters, self.names)
        try:
            if failure is not None:
                raise failure
        finally:
            del failure, failures  # they hold this frame

    @property
    def is_recoverable(self) -> bool:
        """Return whether sums that have failed may be completed where the gradients lie."""
        return self._memory.can_complete(()) and not self._sparse

    def recovered(self) -> None:
        """The sums that failed were completed where the gradients lie: go on as behind `wait`."""
        if not self._options.owned:
            self._deliver_all()

    def gather(self) -> None:
        """Collective: every ``p.grad`` becomes the whole reduced gradient, where so far each owner had its part."""
        self.owned_memory.gather(self.reduce_group)
        self._deliver_all()

    @property
    def owned_memory(self) -> ShardedBucketMemory:
        """Buckets whose sums stay with their owners."""
        assert isinstance(self._memory, ShardedBucketMemory)
        return self._memory

    def owned(self, owner: int | None) -> list[GradientShard]:
        """Slices of the gradients that an owner of this host has, in its memory; empty before the first reduction."""
        plan, memory = self.tracker.plan, self.owned_memory
        if plan is None or owner is None:
            return []
        places = {place.parameter: (bucket, place) for bucket in plan.buckets for place in bucket.places}
        found: list[GradientShard] = []
        for piece in memory.shares.pieces[owner]:
            bucket, place = places[piece.parameter]
            wire = DTYPES[bucket.dtype]
            begin = place.offset + piece.start * wire.itemsize
            array = memory.region.owned[owner][begin : begin + piece.numel * wire.itemsize]
            gradient = tensor_over(array.view(wire.storage), wire)
            found.append(GradientShard(piece, gradient, self._direct[piece.parameter]))
        return found

    @property
    def is_direct(self) -> bool:
        """Return whether gradients travel in the element types of their parameters, so that sums are used in place."""
        return all(self._direct)

    def residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """By parameter, what error feedback has not sent yet of its gradient; copies. Nothing without any."""
        return {self.parameters[number]: residual for number, residual in self._residuals().items()}

    def restore(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Go on with these, and with nothing for all other parameters; without error feedback they mean nothing."""
        parameters = enumerate(self.parameters)
        self._restore({number: residuals[one] for number, one in parameters if one in residuals})

    def _residuals(self) -> dict[int, torch.Tensor]:
        return self._memory.residuals() if isinstance(self._memory, CompressedBucketMemory) else {}

    def _restore(self, residuals: Mapping[int, torch.Tensor]) -> None:
        if isinstance(self._memory, CompressedBucketMemory):
            self._memory.restore(residuals)

    def changed(self) -> list[str]:
        """Return names of parameters whose complete gradients were changed or replaced since they were taken."""
        return [
            self.names[index]
            for index in self.tracker.order
            if self.parameters[index].grad is not None and self._seen[index] != gradient_version(self.parameters[index])
        ]

    def abandon(self) -> None:
        """Drop the handles of this pass: no caller will wait for them. The owner resets the tracker."""
        self._handles.clear()
        self._memory.abandon()
        if self._bucket_size is not None:
            self._bucket_size.abandon()
        self._sparse.abandon()
        self._seen = [None] * len(self.parameters)
        for parameter in self.parameters:
            if type(parameter.grad) is PendingGradient:
                parameter.grad = parameter.grad.as_subclass(torch.Tensor)

    def release(self) -> None:
        """Take the hooks off and give the buckets' memory back; gradients that lie there are copied out first."""
        for hook in self._hooks:
            hook.remove()
        self._forget_memory()

    def _follow_changes(self) -> None:
        """Begin anew, agree again and register again: after shutdown() and init(), or ``model.double()`` or ``cuda()``.

        So it is when autotuning has chosen another size of buckets, too: on all ranks before the same pass.

        Shared parameters cannot be replaced: who owns them says so.
        """
        current = contexts.current()
        is_converted = not self._options.owned and self._kinds != _tensor_kinds(self.parameters)
        if current is self.reduce_group.context and not (is_converted or self._is_resized):
            return
        residuals = self._residuals()
        self._forget_memory()
        self._handles.clear()
        self.tracker = GradientTracker(len(self.parameters), self.tracker.backward_passes_per_step)
        self._sparse, self._returned_dims = SparseGradients({}), {}
        if current is not self.reduce_group.context:
            self.reduce_group = ReduceGroup(current, self._options.process_set, self._options.reduction)
            if self.after_change_of_job is not None:
                self.after_change_of_job()
        self._choose_memory()
        self._restore(residuals)

    def _choose_memory(self) -> None:
        self._kinds = _tensor_kinds(self.parameters)
        self._wire = [self._options.compression.wire_dtype(dtype_of(p.dtype)) for p in self.parameters]
        if self._options.owned:
            self._memory: BucketMemory = ShardedBucketMemory(self._places, self._options.owned)
        else:
            compression = self._options.compression
            self._memory = choose_bucket_memory(
                self.reduce_group, self._places, self.parameters, self._wire, compression
            )
        #: agreement on the size of buckets, in a job that is tuned; where another size changes no sum, and lies as well
        self._bucket_size: BucketSizeAgreement | None = None
        if self.reduce_group.context.autotunes and type(self._memory) is BucketMemory:
            has_groups = self.reduce_group.number or self._options.groups
            self._bucket_size = None if has_groups else BucketSizeAgreement(self.reduce_group)
        self._is_resized = False
        #: whether p.grad may be the place in the bucket itself: same element type, same device
        self._direct = [
            wire is dtype_of(p.dtype) and self._memory.holds(p)
            for wire, p in zip(self._wire, self.parameters, strict=True)
        ]

    def _forget_memory(self) -> None:
        self._places.forget(copy=True)
        self._memory.release(self.reduce_group)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            # Runs for every parameter in every backward: microseconds count.
            if not self.tracker.num_arrived:
                self._follow_changes()
                if self.before_pass is not None:
                    self.before_pass()
            recorder = self.reduce_group.context.timeline.recorder
            if recorder is not None and recorder.wants_gradients:
                dtype = dtype_of(parameter.dtype)
                nbytes = parameter.numel() * dtype.itemsize
                recorder.gradient_arrived(GradientArrival(index, self.names[index], nbytes, dtype.name))
            arrival = self.tracker.gradient(index)
            if arrival.collect:
                self._collect(index, parameter)
                self._seen[index] = gradient_version(parameter)
                if arrival.submit:
                    self._submit(arrival.submit, in_backward=True)
            else:
                if self.tracker.plan is None:
                    self._mark_pending(parameter)
                self._seen[index] = gradient_version(parameter)
            if self.after_gradient is not None:
                self.after_gradient()

        return on_gradient

    def _collect(self, index: int, parameter: torch.Tensor) -> None:
        """Bring the gradient to its place; without one, zeros."""
        gradient = parameter.grad
        place = self._places.intact(index, gradient)
        if place is None:
            return
        is_there = True
        if gradient is None:
            is_there = self._memory.put(index, None)
            if not parameter.requires_grad:
                return  # frozen by now: the optimizer must not see a gradient
        elif not self._places.holds(index, gradient):
            if gradient.requires_grad or gradient.layout is not torch.strided:
                if self._returns_sparse and gradient.layout is torch.sparse_coo:
                    self._returned_dims[index] = gradient.sparse_dim()
                # It had a dense place before it was ever sparse, on any rank.
                gradient = gradient.detach().to_dense()
            is_there = self._memory.put(index, gradient)
        if not (is_there and self._direct[index]):
            self._mark_pending(parameter)
        else:
            parameter.grad = place if self._options.owned else self._places.pending[index]

    def _mark_pending(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or self._options.owned or gradient.layout is not torch.strided or gradient.requires_grad:
            return
        parameter.grad = pending(gradient)

    def _submit(self, buckets: tuple[int, ...], *, in_backward: bool = False) -> None:
        for index in self._memory.fill(buckets):
            parameter = self.parameters[index]
            if self._direct[index] and parameter.grad is not None:
                is_unchanged = self._seen[index] == gradient_version(parameter)
                parameter.grad = self._places.pending[index]
                if is_unchanged:
                    self._seen[index] = gradient_version(parameter)
        if in_backward:
            kept_back = self._kept_back(buckets)
            self.tracker.failed(kept_back)
            buckets = tuple(bucket for bucket in buckets if bucket not in kept_back)
        for position, bucket in enumerate(buckets):
            try:
                self._reduce(bucket, blocking=not in_backward)
            except BaseException as error:
                self.tracker.failed(buckets[position:])
                if in_backward and isinstance(error, CollectiveError) and self._memory.can_complete(error.ranks):
                    return  # step() fails, or completes the sums: that needs all gradients
                raise

    def _kept_back(self, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Those that are submitted when backward is over, though they are complete."""
        assert self.tracker.plan is not None
        if not self._overlaps:
            return buckets
        last = len(self.tracker.plan.buckets) - 1
        return (last,) if self._options.owned and last in buckets else ()  # step b of `reigen.api.gradients.sharding`

    def _reduce(self, bucket: int, *, blocking: bool) -> None:
        part = str(bucket) if self._memory.is_registered else f"improvised.{bucket}"
        try:
            handle = self._memory.reduce(self.reduce_group, bucket, part, blocking=blocking)
        except CollectiveError as error:  # the job was broken before
            _hint_at_uneven_data(error)
            raise
        if handle is not None:
            self._handles[bucket] = handle

    def _deliver_all(self) -> None:
        for index, (parameter, place) in enumerate(zip(self.parameters, self._places.tensors, strict=True)):
            gradient = parameter.grad
            if place is None or gradient is place or not (parameter.requires_grad or gradient is not None):
                continue
            if index in self._returned_dims:
                parameter.grad = place.to(parameter).to_sparse(self._returned_dims[index])
            elif self._direct[index]:
                parameter.grad = self._places.renew(index) if self._places.has_moved(index, gradient) else place
            elif gradient is None or gradient.layout is not torch.strided:
                parameter.grad = torch.empty_like(parameter).copy_(place)
            else:
                whole = gradient.detach().copy_(place)
                parameter.grad = whole if isinstance(gradient, PendingGradient) else gradient

    def _settle(self) -> None:
        """End of the first pass: agree with the other ranks, plan, and register the memory."""
        try:
            arrivals, sparse_dims, self._overlaps = agree_on_plan(self.reduce_group, self._proposal())
        except JoinedError as error:
            if self._options.owned:
                raise
            self._plan_one_pass(error)
            return
        order = arrival_order(arrivals, len(self.parameters))
        dense = [index for index in order if not sparse_dims[index]]
        if self._returns_sparse:
            self._returned_dims.update({index: dim for index, dim in enumerate(sparse_dims) if dim})
            dense = list(order)
        else:
            self._sparse = self._sparse_gradients(sparse_dims)
        groups = self._options.groups
        if isinstance(groups, int):
            members = split_evenly(dense, groups)
        else:
            members = _group_members(self.parameters, groups or {})
        if self._bucket_size is not None:
            self._bucket_size.settle()
        plan = self._plan(dense, members)
        self._memory.register(self.reduce_group, plan)
        self.tracker.adopt(plan)

    def _plan_one_pass(self, refusal: JoinedError) -> None:
        """Plan for this pass alone, without agreement: in the order of definition, in ordinary memory."""
        dims = np.array([self._sparse_dims(p) for p in self.parameters], np.uint8)
        self.reduce_group.combine(dims, ReduceOp.MAX, "sparse")
        if self._returns_sparse:
            self._returned_dims.update({index: dim for index, dim in enumerate(dims.tolist()) if dim})
        elif dims.any():
            name = self.names[int(dims.argmax())]
            raise SparseGradients.refused(name, refusal) from None
        plan = self._plan(range(len(self.parameters)))
        self._memory.allocate_for_pass(plan)
        self.tracker.adopt(plan)

    def _plan(self, order: Sequence[int], groups: Sequence[Sequence[int]] = ()) -> BucketPlan:
        specs = [ParameterSpec(p.numel(), w.itemsize, w.name) for p, w in zip(self.parameters, self._wire, strict=True)]
        bucket_bytes = 0 if self._bucket_size is None else self._bucket_size.bucket_bytes
        return plan_buckets(
            specs, order, bucket_bytes or choose_bucket_bytes(self.reduce_group.context, self._overlaps), groups
        )

    def _proposal(self) -> PlanProposal:
        reduction, groups = self._options.reduction, self._options.groups
        number = f", {groups} groups" if isinstance(groups, int) else ""
        scaled = f"op={reduction.op.name}, scaled by {reduction.prescale} and {reduction.postscale}{number}"
        lines = [f"{scaled}, on {self._memory.kind}, {describe(self._options.compression)}"]
        for name, parameter, wire in zip(self.names, self.parameters, self._wire, strict=True):
            layout = f"shape {tuple(parameter.shape)}, strides {strides_of(parameter)}"
            lines.append(f"{name}: {parameter.dtype} as {wire.name}, {layout}")
        if isinstance(groups, Mapping):
            members = _group_members(self.parameters, groups)
            lines += [f"a group of {', '.join(self.names[index] for index in group)}" for group in members]
        overlaps = self.reduce_group.context.overlaps or isinstance(self._memory, DeviceBucketMemory)
        dims = tuple(map(self._sparse_dims, self.parameters))
        return PlanProposal(tuple(lines), tuple(self.tracker.order), dims, overlaps)

    def _sparse_dims(self, parameter: torch.Tensor) -> int:
        gradient = parameter.grad
        if gradient is None or gradient.layout is torch.strided:
            return 0
        return 0 if self._options.sparse_as_dense and self._options.owned else gradient.sparse_dim()

    def _sparse_gradients(self, sparse_dims: Sequence[int]) -> SparseGradients:
        dims = {index: dim for index, dim in enumerate(sparse_dims) if dim}
        op = self._options.reduction.op
        if dims and self._options.owned:
            name = self.names[min(dims)]
            raise ArgumentError(
                f"share_parameters needs dense gradients, that of {name} is sparse: sparse_as_dense=True"
            )
        if dims and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ArgumentError(f"sparse gradients need op=Average or op=Sum, got {op.name}")
        return SparseGradients(dims, average=op is ReduceOp.AVERAGE)


def _group_members(parameters: Sequence[torch.Tensor], groups: Mapping[torch.Tensor, int]) -> list[Sequence[int]]:
    """The numbers of the parameters in each group that has any of them."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        if parameter in groups:
            members[groups[parameter]].append(index)
    return list(members.values())


def set_grad_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``hook(parameter)`` whenever backward has added to its gradient, instead of any hook that was given before.

    So an optimizer that is made anew for a model takes over from the one before, which may live on unseen: a scheduler
    and its optimizer hold each other until the garbage collector comes by, and it comes at another time on every rank.
    """
    hooks = parameter._post_accumulate_grad_hooks or {}
    for key in [key for key, other in hooks.items() if hasattr(other, _GRAD_HOOK_ATTRIBUTE)]:
        del hooks[key]
    setattr(hook, _GRAD_HOOK_ATTRIBUTE, True)
    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(hook)


def _tensor_kinds(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.dtype], list[torch.device]]:
    """Their dtypes and devices."""
    return [tensor.dtype for tensor in tensors], [tensor.device for tensor in tensors]


def gradient_version(parameter: torch.Tensor) -> tuple[int, int]:
    """Differs if ``p.grad`` has become another tensor, or has been changed in place."""
    gradient = parameter.grad
    return id(gradient), -1 if gradient is None else version(gradient)
