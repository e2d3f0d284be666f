"""Gradients in registered memory: the memory that all ranks of a host share, where they are reduced without a copy.

At the first step the ranks agree on a plan of buckets. From then on the gradient of a parameter *is* its place in one:
MXNet's backward pass writes there. Gradients on another device, or that travel in another element type, are copied in
and out by MXNet's engine. A bucket is one operation of that engine, with its gradients as the arrays that it writes: it
begins when they have been computed.

In a job that is tuned, ranks lay their buckets out anew, between two steps, when they have agreed on another size.

The memory is given back with its last array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from reigen.api.adapter import Array
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
from reigen.api.gradients.compressed_buckets import CompressedBuckets
from reigen.api.gradients.plan_agreement import PlanProposal, agree_on_plan
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.context import MemoryRegion
from reigen.engine.handle import Handle
from reigen.errors import UnsupportedTypeError
from reigen.mxnet import arrays
from reigen.mxnet.engine import get_engine_queue
from reigen.types import DTYPES, DType

#: gluon Parameter.
Parameter = Any


class _ParameterSignature(NamedTuple):
    """Facts about the gradient of parameter ``number`` that have to be the same on every rank.

    ``shape`` is the parameter's, ``dtype`` its gradient's, ``wire`` the type in which that travels.
    """

    number: int
    shape: tuple[int, ...]
    dtype: DType
    wire: DType

    def __str__(self) -> str:
        return f"parameter {self.number}: {self.dtype.name} as {self.wire.name}, shape {self.shape}"


class GradientBuckets:
    """Buckets of one trainer, reduced by ``group``: ``num_groups`` of gradients, each as one; 0: of the usual size."""

    def __init__(self, group: ReduceGroup, num_groups: int, compression: CastCompression | CodecCompression) -> None:
        self._group, self._num_groups, self._compression = group, num_groups, compression
        self._coded: CompressedBuckets | None = None
        #: agreement on the size of buckets, in a job that is tuned; where another size changes no sum
        self._bucket_size: BucketSizeAgreement | None = None
        is_coded = isinstance(compression, CodecCompression)
        if group.context.autotunes and not (num_groups or group.number or is_coded):
            self._bucket_size = BucketSizeAgreement(group)
        #: signatures that the plan was made for; none at first
        self._trained: tuple[_ParameterSignature, ...] = ()
        self._plan = BucketPlan((), 0, (), {})
        self._region: MemoryRegion | None = None
        self._buckets: list[Array] = []
        #: over the places of the plan, by position in `_trained`
        self._places: list[Any] = []
        self._addresses: list[int] = []
        #: handles of the gradients that lie there; another trainer may have moved one since
        self._handles: list[Any] = []

    def reduce(self, parameters: Sequence[tuple[int, Parameter]]) -> None:
        """Put the reduction of the parameters' first gradients into MXNet's engine.

        It does not wait, but where they are others than last time: then it is collective. In a job that is tuned it is
        that, too, where buckets of another size are laid out, and waits for the step before now and then.

        Args:
            parameters: with their numbers, in ascending order; the same on every rank.

        Raises:
            MismatchError: they are not the same on every rank; all raise it.
            SharedMemoryError: there is not enough memory for them; all raise it.
            UnsupportedTypeError: an element type that cannot be communicated.
        """
        trained = tuple(self._described(index, parameter) for index, parameter in parameters)
        is_resized = self._bucket_size is not None and self._bucket_size.pass_ended()
        if is_resized:
            for place in self._places:  # operations of the step before look for gradients where they lie now
                place.wait_to_read()
        if trained != self._trained or is_resized:
            self._lay_out(trained, [parameter.list_grad()[0] for _, parameter in parameters])
        staged = []
        for position, (_, parameter) in enumerate(parameters):
            gradient, place = parameter.list_grad()[0], self._places[position]
            if gradient.handle is self._handles[position]:
                continue
            if _can_lie_in_bucket(gradient, place):
                _move_to_bucket(parameter, place)
                self._handles[position] = gradient.handle
            else:
                staged.append((place, gradient))
        for place, gradient in staged:
            gradient.copyto(place)
        for unit in self._plan.units:
            for bucket in unit:
                self._submit(bucket)
        if self._bucket_size is not None:
            self._bucket_size.pass_starts()
        for place, gradient in staged:
            place.copyto(gradient)

    def _described(self, index: int, parameter: Parameter) -> _ParameterSignature:
        dtype = arrays.dtype_of(parameter.list_grad()[0])
        return _ParameterSignature(index, tuple(parameter.shape), dtype, self._compression.wire_dtype(dtype))

    def _lay_out(self, trained: tuple[_ParameterSignature, ...], gradients: Sequence[Any]) -> None:
        group, reduction = self._group, self._group.reduction
        options = f"op={reduction.op.name}, scaled by {reduction.prescale} and {reduction.postscale}, "
        options += f"{self._num_groups} groups, {describe(self._compression)}"
        agree_on_plan(group, PlanProposal((options, *map(str, trained)), (), ()))
        specs = [ParameterSpec(int(np.prod(each.shape)), each.wire.itemsize, each.wire.name) for each in trained]
        order = arrival_order((), len(specs))
        groups = split_evenly(order, self._num_groups) if self._num_groups else ()
        bucket_bytes = 0 if self._bucket_size is None else self._bucket_size.settle()
        plan = plan_buckets(specs, order, bucket_bytes or choose_bucket_bytes(group.context), groups)
        memory = self._allocate(plan.nbytes)
        memory[:] = 0  # also brings the pages in
        self._trained, self._plan = trained, plan
        self._buckets, self._places, self._addresses = [], [None] * len(trained), [0] * len(trained)
        self._handles = [None] * len(trained)
        for bucket in plan.buckets:
            storage = DTYPES[bucket.dtype].storage
            self._buckets.append(memory[bucket.offset : bucket.offset + bucket.nbytes].view(storage))
            for at in bucket.places:
                place = memory[at.offset : at.offset + at.nbytes].view(storage).reshape(trained[at.parameter].shape)
                self._addresses[at.parameter] = place.ctypes.data
                array = mx.nd.from_numpy(place, zero_copy=True)
                is_np = isinstance(gradients[at.parameter], mx.np.ndarray)
                self._places[at.parameter] = array.as_np_ndarray() if is_np else array

        if isinstance(self._compression, CodecCompression):
            dtypes = [DTYPES[bucket.dtype] for bucket in plan.buckets]
            self._coded = CompressedBuckets(self._compression.codec, group, self._buckets, dtypes)

    def _allocate(self, nbytes: int) -> Array:
        """Allocate the buckets: registered memory, unless codes travel instead of gradients."""
        if isinstance(self._compression, CodecCompression):
            return np.empty(nbytes, np.uint8)
        self._region = self._group.allocate(nbytes)
        return self._group.memory_of(self._region)

    def _submit(self, bucket: int) -> None:
        plan = self._plan.buckets[bucket]
        members = [place.parameter for place in plan.places]
        written = [(self._places[member], self._addresses[member]) for member in members]
        array, dtype, group, region = self._buckets[bucket], DTYPES[plan.dtype], self._group, self._region
        coded = self._coded
        if not array.size:
            return

        def begin() -> Handle[Any]:
            for place, address in written:
                if arrays.address_in_engine(place) != address:
                    raise UnsupportedTypeError("MXNet has put a gradient into other memory than it was given")
            if coded is None:
                return group.reduce(array, dtype, str(bucket), region)
            return coded.submit(bucket, str(bucket)).then(lambda _: coded.receive(bucket))

        first = min(self._trained[member].number for member in members)
        get_engine_queue().push(begin, [], [place for place, _ in written], -first, f"{group.name}.{bucket}")


class StepBuckets:
    """Buckets for a caller that asks for one parameter after the other, when all gradients are on their way."""

    def __init__(self, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        #: numbers of parameters whose gradients have been reduced in this step and not been asked for
        self._reduced: set[int] = set()

    def begin(self) -> None:
        """Begin a step: all gradients are new."""
        self._reduced.clear()

    def take(self, parameters: Mapping[int, Parameter], numbers: Sequence[int]) -> list[Any] | None:
        """Return the reduced gradients of the parameters with these numbers; once in a step for each.

        The first call of a step reduces all that are trained. None where buckets are not for them: no gluon Parameters,
        sparse, or on several contexts.
        """
        trained = [(number, parameter) for number, parameter in sorted(parameters.items()) if _is_plain(parameter)]
        if not {number for number, _ in trained}.issuperset(numbers):
            return None
        if not self._reduced.issuperset(numbers):
            self._buckets.reduce(trained)
            self._reduced = {number for number, _ in trained}
        self._reduced.difference_update(numbers)
        return [parameters[number].list_grad()[0] for number in numbers]


def _is_plain(parameter: Parameter) -> bool:
    if parameter.grad_req == "null" or parameter._grad is None:
        return False
    copies = parameter.list_grad()
    return len(copies) == 1 and not arrays.is_sparse(copies[0])


def _can_lie_in_bucket(gradient: Any, place: Any) -> bool:
    return bool(gradient.context == place.context and gradient.dtype == place.dtype and type(gradient) is type(place))


def _move_to_bucket(parameter: Parameter, place: Any) -> None:
    """Move the gradient's memory to its place in the bucket.

    It stays the same object, which scripts may have taken before the first step: to clip it, for example.
    """
    gradient, copies = parameter.list_grad()[0], parameter.list_data()
    gradient.copyto(place)
    # The place stays: operations of earlier steps look for it, and another trainer may move the gradient.
    other = place.detach()
    gradient.handle, other.handle = other.handle, gradient.handle
    fresh = [copy._fresh_grad for copy in copies]
    mx.autograd.mark_variables(copies, parameter.list_grad(), parameter.grad_req)
    for copy, is_fresh in zip(copies, fresh, strict=True):
        copy._fresh_grad = is_fresh
