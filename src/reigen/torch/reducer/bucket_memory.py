"""Memory of gradient buckets: the host's, or that of the GPU on which the model is.

On the GPU nothing has to be registered, and no thread waits: a bucket is submitted behind what has been enqueued to
fill it, and a reader of the gradients lets its stream wait for the reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from reigen.api.adapter import Array
from reigen.api.compression import CastCompression, CodecCompression
from reigen.api.gradients.bucket_plan import BucketPlan
from reigen.api.gradients.compressed_buckets import CompressedBuckets
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.gradients.sharding import SHARD_ALIGNMENT_BYTES, ShardAssignment, ShardGranularity, assign_shards
from reigen.backends.device import DeviceArray, DeviceStream
from reigen.backends.shm.reduction_journal import BucketExtent, ReductionJournal, journal_bytes
from reigen.backends.shm.step_sums import StepSums
from reigen.compression import Codec
from reigen.context import CollectiveResult, Handle, MemoryRegion
from reigen.engine.process_set import get_reduction
from reigen.errors import CollectiveError, JoinedError
from reigen.torch.adapter import TorchAdapter
from reigen.torch.cuda_tensors import TorchDevice, TorchDeviceTensorAdapter
from reigen.torch.reducer.bucket_views import BucketViews
from reigen.types import DTYPES, DType


class BucketMemory:
    """Host memory of the buckets of one `BucketPlan` at a time.

    It is registered with the job, so that it is reduced in place: it is the memory that all ranks of the host share.
    Subclasses are for the memory of devices.

    Attributes:
        kind: ``cpu``, ``cuda``.
        is_registered: it is kept for the passes to come.
    """

    kind = "cpu"
    is_registered = False
    #: of the sums, for survivors of this rank, where there is one
    _journal: ReductionJournal | None = None

    def __init__(self, places: BucketViews) -> None:
        self._places = places
        self._plan = BucketPlan((), 0, (), {})
        self._region: MemoryRegion | None = None
        #: buckets that were filled in this pass
        self._filled: set[int] = set()
        self._sums: StepSums | None = None

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether a place in it could be the parameter's gradient, being on the same device."""
        return parameter.device.type == "cpu"

    def register(self, reduce_group: ReduceGroup, plan: BucketPlan) -> None:
        """Lay the buckets out, for all passes to come. Collective."""
        extents = self._extents(reduce_group, plan) if reduce_group.keeps_journals else []
        self._region = reduce_group.allocate(plan.nbytes + (journal_bytes(len(extents)) if extents else 0))
        self._lay_out(plan, self._region.array)
        self.is_registered = True
        if extents:
            owner = self._region.owner
            assert owner is not None
            self._journal = ReductionJournal(self._region.owned, owner, extents)
            self._sums = StepSums(self._journal)
            reduce_group.context.step_sums.append(self._sums)
            reduce_group.barrier("journal")  # all have cleared their words
            self._sums.begin_step()

    def _extents(self, reduce_group: ReduceGroup, plan: BucketPlan) -> list[BucketExtent]:
        """Return the buckets as a journal needs them."""
        spec, size = reduce_group.reduction, reduce_group.size
        return [
            BucketExtent(
                bucket.offset,
                bucket.nbytes,
                get_reduction(bucket.dtype, spec.op, size, spec.prescale, spec.postscale),
            )
            for bucket in plan.buckets
        ]

    def can_complete(self, lost: Collection[int]) -> bool:
        """Return whether the sums of this pass can be completed, as far as is known, though these ranks are lost."""
        return self._sums is not None and len(self._sums.held(lost)) == self._sums.num_buckets

    def fill(self, buckets: Iterable[int]) -> Sequence[int]:
        """The gradients of these buckets are complete in this pass, and are going to be reduced.

        Returns:
            Parameters whose gradients are in their places only now.
        """
        if self._journal is not None:
            for bucket in buckets:
                if bucket not in self._filled:
                    self._filled.add(bucket)
                    self._journal.buckets[bucket].fill()
        return ()

    def end_pass(self, *, is_reduced: bool) -> None:
        """A pass is over."""
        self._filled.clear()
        if self._journal is not None and is_reduced:
            self._journal.check_reduced()

    def allocate_for_pass(self, plan: BucketPlan) -> None:
        """Lay them out for one pass, in memory that the gradients keep alive for as long as it is needed."""
        self._lay_out(plan, np.empty(plan.nbytes, np.uint8))

    def put(self, parameter: int, gradient: torch.Tensor | None) -> bool:
        """Put a dense gradient, or zeros, into its place; return whether it is there before `fill` says so."""
        if gradient is not None:
            self._places.fill(parameter, gradient)
        else:
            place = self._places.tensors[parameter]
            assert place is not None
            place.zero_()
        return True

    def abandon(self) -> None:
        """Drop gradients that are not in their places yet: their buckets are not going to be submitted."""

    def reduce(self, reduce_group: ReduceGroup, bucket: int, part: str, *, blocking: bool) -> Handle | None:
        """Submit a bucket, which the caller waits for next if that is ``blocking``; None if it is empty."""
        if not self._plan.buckets[bucket].nbytes:
            return None
        return self._submit(reduce_group, bucket, DTYPES[self._plan.buckets[bucket].dtype], part, blocking=blocking)

    def finish(self, reduce_group: ReduceGroup, handles: dict[int, Handle]) -> dict[int, CollectiveError]:
        """Wait for what `reduce` has submitted, by bucket: the calling thread needs it. Returns what failed."""
        return wait_for_all(handles)[1]

    def release(self, reduce_group: ReduceGroup) -> None:
        """Give registered memory back."""
        region, self._region, self.is_registered = self._region, None, False
        if self._sums is not None:
            reduce_group.context.step_sums.remove(self._sums)
            self._sums = self._journal = None
            self._filled.clear()
        if region is not None:
            reduce_group.free(region)

    def _lay_out(self, plan: BucketPlan, memory: Array) -> None:
        self._plan = plan
        self._places.lay_out(plan, memory)

    def _submit(self, reduce_group: ReduceGroup, bucket: int, dtype: DType, part: str, *, blocking: bool) -> Handle:
        array, journal = self._places.arrays[bucket], None if self._journal is None else self._journal.buckets[bucket]
        return reduce_group.reduce(array, dtype, part, self._region, blocking=blocking, journal=journal)


class ShardedBucketMemory(BucketMemory):
    """Buckets whose sums stay with the slices' owners (`reigen.api.gradients.sharding`), registered with the job.

    Args:
        places: of the gradients.
        division: what one owner has to update together.

    Attributes:
        shares: who owns what, once it is registered.
    """

    def __init__(self, places: BucketViews, division: ShardGranularity) -> None:
        super().__init__(places)
        self.kind = f"cpu, with shared parameters, divided by {division.value}"
        self.division = division
        self.shares = ShardAssignment((), ())

    @property
    def region(self) -> MemoryRegion:
        """Region of the buckets; those of the other owners, too."""
        assert self._region is not None
        return self._region

    def register(self, reduce_group: ReduceGroup, plan: BucketPlan) -> None:
        super().register(reduce_group, plan)
        self.shares = assign_shards(plan, len(self.region.owned), SHARD_ALIGNMENT_BYTES, self.division)

    def _extents(self, reduce_group: ReduceGroup, plan: BucketPlan) -> list[BucketExtent]:
        return []  # until an owner has begun to update weights, the step is undone without

    def gather(self, reduce_group: ReduceGroup) -> None:
        """Gather the other owners' sums into this rank's buckets; collective, with no reduction on its way."""
        for bucket, counts in zip(self._plan.buckets, self.shares.counts, strict=True):
            itemsize = DTYPES[bucket.dtype].itemsize
            bounds = itertools.accumulate((count * itemsize for count in counts), initial=bucket.offset)
            for owner, (begin, end) in enumerate(itertools.pairwise(bounds)):
                if owner != self.region.owner:
                    self.region.array[begin:end] = self.region.owned[owner][begin:end]
        reduce_group.barrier("gathered")  # until now the others read what is here

    def _submit(self, reduce_group: ReduceGroup, bucket: int, dtype: DType, part: str, *, blocking: bool) -> Handle:
        array, counts = self._places.arrays[bucket], self.shares.counts[bucket]
        return reduce_group.reduce_to_owners(array, dtype, part, self.region, counts, blocking=blocking)


class DeviceBucketMemory(BucketMemory):
    """Ordinary memory of the device on which all parameters are.

    Gradients are copied when a bucket is submitted, all that have come until then in one call: to start a copy of one
    takes the processor longer than the GPU needs for it.
    """

    def __init__(self, places: BucketViews, device: TorchDevice, lender: TorchDeviceTensorAdapter) -> None:
        super().__init__(places)
        self.kind = device.kind
        self._device, self._lender = device, lender
        #: the streams by which gradients were made or places filled in this pass: usually one
        self._producers: dict[int, DeviceStream] = {}
        #: by stream, gradients of parameters that are not in their places
        self._waiting: dict[int, dict[int, torch.Tensor]] = {}

    def holds(self, parameter: torch.Tensor) -> bool:
        return True

    def register(self, reduce_group: ReduceGroup, plan: BucketPlan) -> None:
        self.allocate_for_pass(plan)
        self.is_registered = True

    def allocate_for_pass(self, plan: BucketPlan) -> None:
        memory = self._device.empty((plan.nbytes,), DTYPES["uint8"]).owner
        assert isinstance(memory, torch.Tensor)
        self._plan = plan
        self._places.lay_out_on_device(plan, memory)

    def put(self, parameter: int, gradient: torch.Tensor | None) -> bool:
        stream = self._device.current()
        self._producers[stream.handle] = stream
        if gradient is None:
            return super().put(parameter, None)
        self._waiting.setdefault(stream.handle, {})[parameter] = gradient
        return False

    def fill(self, buckets: Iterable[int]) -> Sequence[int]:
        """Copy all gradients that have come, by the streams that have made them, and return their parameters."""
        waiting, self._waiting = self._waiting, {}
        for handle, gradients in waiting.items():
            # Not to the tensors that p.grad is going to be: this is no change of the user's.
            targets = [self._places.own(parameter) for parameter in gradients]
            self._producers[handle].run(partial(torch._foreach_copy_, targets, list(gradients.values())))
        return [parameter for gradients in waiting.values() for parameter in gradients]

    def end_pass(self, *, is_reduced: bool) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._waiting.clear()
        self._producers.clear()

    def release(self, reduce_group: ReduceGroup) -> None:
        self.abandon()
        super().release(reduce_group)

    def finish(self, reduce_group: ReduceGroup, handles: dict[int, Handle]) -> dict[int, CollectiveError]:
        outcomes, failures = wait_for_all(handles)
        for outcome in outcomes.values():
            assert isinstance(outcome.array, DeviceArray)
            assert outcome.array.ready is not None
            self._device.current().wait(outcome.array.ready)
        return failures

    def _submit(self, reduce_group: ReduceGroup, bucket: int, dtype: DType, part: str, *, blocking: bool) -> Handle:
        """Submit it behind all streams that have filled places so far."""
        current = self._device.current()
        for handle, stream in self._producers.items():
            if handle != current.handle:
                current.wait(stream.record())
        array, _ = self._lender.lend(self._places.buckets[bucket])
        return reduce_group.reduce(array, dtype, part, blocking=blocking)


class CompressedBucketMemory(BucketMemory):
    """Ordinary memory of the host, of which codes go to the other ranks; while one has joined, the buckets as they are.

    What has not been sent goes with the memory.
    """

    kind = "cpu, coded"

    def __init__(self, places: BucketViews, codec: Codec) -> None:
        super().__init__(places)
        self._codec = codec
        #: None while buckets travel as they are
        self._coded: CompressedBuckets | None = None
        #: by parameter, what is to be sent with its next gradient: until the buckets are laid out
        self._left: dict[int, torch.Tensor] = {}

    def register(self, reduce_group: ReduceGroup, plan: BucketPlan) -> None:
        self.allocate_for_pass(plan)
        dtypes = [DTYPES[bucket.dtype] for bucket in plan.buckets]
        self._coded = CompressedBuckets(self._codec, reduce_group, self._places.arrays, dtypes)
        self.is_registered = True
        self.restore(self._left)

    def residuals(self) -> dict[int, torch.Tensor]:
        """Return error feedback's residual of each parameter's gradient: float32, shaped like it; copies."""
        if self._coded is None:
            return {number: left.clone() for number, left in self._left.items()}
        return {number: torch.empty_like(view).copy_(view) for number, view in self._residual_views(self._coded)}

    def restore(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """Restore residuals of `residuals`, of as many parameters as there are; clear the others."""
        if self._coded is None:
            self._left = dict(residuals)
            return
        for number, view in self._residual_views(self._coded):
            if number in residuals:
                view.copy_(residuals[number])
            else:
                view.zero_()
        self._left = {}

    def _residual_views(self, coded: CompressedBuckets) -> Iterator[tuple[int, torch.Tensor]]:
        """Of each parameter, its part of its bucket's residual."""
        for bucket, residual in zip(self._plan.buckets, coded.residuals, strict=True):
            itemsize = DTYPES[bucket.dtype].itemsize
            if residual is None:
                continue
            for place in bucket.places:
                begin, length = (place.offset - bucket.offset) // itemsize, place.nbytes // itemsize
                yield place.parameter, self._places.shaped(residual[begin : begin + length], place.parameter)

    def finish(self, reduce_group: ReduceGroup, handles: dict[int, Handle]) -> dict[int, CollectiveError]:
        """Wait for submitted buckets; return the errors. Buckets refused for a joined rank travel uncompressed."""
        outcomes, failures = wait_for_all(handles)
        if self._coded is None:
            return failures
        for bucket in outcomes:
            self._coded.receive(bucket)
        again: dict[int, Handle] = {}
        for bucket in [bucket for bucket, failure in failures.items() if isinstance(failure, JoinedError)]:
            self._coded.take_back(bucket)
            dtype = DTYPES[self._plan.buckets[bucket].dtype]
            again[bucket] = reduce_group.reduce(self._places.arrays[bucket], dtype, f"uncoded.{bucket}")
            del failures[bucket]
        return failures | wait_for_all(again)[1]

    def release(self, reduce_group: ReduceGroup) -> None:
        self._coded, self.is_registered = None, False

    def _submit(self, reduce_group: ReduceGroup, bucket: int, dtype: DType, part: str, *, blocking: bool) -> Handle:
        if self._coded is None:
            return super()._submit(reduce_group, bucket, dtype, part, blocking=blocking)
        return self._coded.submit(bucket, part, blocking=blocking)


def wait_for_all(handles: dict[int, Handle]) -> tuple[dict[int, CollectiveResult], dict[int, CollectiveError]]:
    """Wait for handles; return the results and the errors, in their order."""
    outcomes: dict[int, CollectiveResult] = {}
    failures: dict[int, CollectiveError] = {}
    # The last one first: the thread that drives until it is done finds the others done, and hands over once.
    for bucket, handle in reversed(handles.items()):
        try:
            outcomes[bucket] = handle.wait()
        except CollectiveError as error:
            failures[bucket] = error.with_traceback(None)  # it would hold this frame, which holds it
    return dict(reversed(outcomes.items())), dict(reversed(failures.items()))


def choose_bucket_memory(
    reduce_group: ReduceGroup,
    places: BucketViews,
    parameters: Sequence[torch.Tensor],
    wire: Sequence[DType],
    compression: CastCompression | CodecCompression,
) -> BucketMemory:
    """The device's, where all parameters are on one that reduces all their element types; else the host's.

    What is coded is on the host: codecs work there.

    Raises:
        ArgumentError: this rank's tensors were on another device before.
    """
    if isinstance(compression, CodecCompression):
        return CompressedBucketMemory(places, compression.codec)
    lender, backend = TorchAdapter.lender, reduce_group.context.device
    if lender is not None and backend is not None:
        devices = {lender.device(parameter) for parameter in parameters}
        device = devices.pop() if len(devices) == 1 else None
        if device is not None and all(backend.takes(device, dtype, reduce_group.reduction) for dtype in set(wire)):
            return DeviceBucketMemory(places, device, lender)
    return BucketMemory(places)
