"""One job, as a process that takes part in it sees it."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import itertools
import os
import socket
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from msgspec import structs
from numpy.typing import NDArray

from reigen import log
from reigen.backends.base import BlockJournal, MemoryRegion, SharedUpdate
from reigen.backends.device import DeviceArray, DeviceBackend, HostOrDeviceArray
from reigen.backends.selection import BackendChoice, choose_backends
from reigen.cluster.bootstrap.mpi_library import can_use_mpi
from reigen.cluster.environ import ELASTIC_VARIABLE, PREFIXED_VARIABLE, JobInfo, detect_job
from reigen.cluster.metrics import METRICS_VARIABLE, MetricSample, ProcessKind
from reigen.cluster.topology import Topology
from reigen.config import Config, default_bucket_bytes, load_config
from reigen.engine import operation_builders
from reigen.engine.control_channel import NoteListener
from reigen.engine.counters import EngineCounters
from reigen.engine.handle import CollectiveResult, Handle, TensorTableEntry
from reigen.engine.messages import JOIN_NAME, UNNAMED, Operation, OperationKind, Topic
from reigen.engine.observer import EngineObserver
from reigen.engine.operation_builders import OperationBuilder, ReductionSpec, build_members, build_operation
from reigen.errors import ArgumentError, CollectiveError, ConfigError, NotInitializedError
from reigen.resources.stdio import occupy_standard_descriptors
from reigen.types import DType, ReduceOp

if TYPE_CHECKING:  # loaded by those who join a job, or an elastic one: to import a framework's package takes no longer
    from reigen.autotune.job import TuningStart
    from reigen.autotune.session import TuningSession
    from reigen.backends.shm.step_sums import StepSums
    from reigen.cluster.membership.place import ElasticPlace
    from reigen.elastic_job import ElasticJob
    from reigen.engine_factory import JobRendezvous
    from reigen.observe.recorder import EventRecorder
    from reigen.observe.timeline import Timeline

__all__ = [
    "CollectiveResult",
    "Context",
    "Handle",
    "MemoryRegion",
    "current",
    "init",
    "is_initialized",
    "mark",
    "shutdown",
]

MakeOutput = Callable[[tuple[int, ...]], HostOrDeviceArray]


class CollectiveOptions(TypedDict, total=False):
    """Arguments that every collective takes.

    Attributes:
        name: what the tensor is called on every rank; None: its number among the unnamed operations.
        make_output: gives an array of the result's shape, on whichever thread completes the operation.
        process_set: the number of the set whose ranks take part.
        blocking: the caller waits for the handle next.
    """

    name: str | None
    make_output: MakeOutput | None
    process_set: int
    blocking: bool


class Context:
    """A job of which this process is one rank.

    Every collective submits and returns a `Handle` at once. Arrays are C-contiguous and of the dtype's *storage* type
    (bfloat16 is uint16); or they are memory of a device, if `device` takes it. With ``blocking=True`` the caller
    promises to wait for the handle next; that spares waking another thread. Unnamed operations must be submitted in the
    same order on every rank; named ones in any order. ``process_set`` is the number of the set whose ranks take part
    ("all ranks" are then its ranks, "the rank" is one of the job); a rank that is not in it gets an ArgumentError.

    Args:
        config: the knobs.
        job_rendezvous: where to meet the other ranks; None for a job of one rank.
        view: number of the view of an elastic job.
        counters: of this rank in all views; None: in this job alone.
    """

    #: rank 0 chooses parameters while the job runs: the same on all ranks; and there, what does so
    autotunes = False
    tuning: TuningSession | None = None

    def __init__(
        self,
        config: Config,
        job_rendezvous: JobRendezvous | None = None,
        view: int = 0,
        counters: EngineCounters | None = None,
    ) -> None:
        from reigen import engine_factory

        topology = Topology.alone() if job_rendezvous is None else job_rendezvous.layout.topology()
        self.rank, self.size = topology.rank, topology.size
        self.local_rank, self.local_size = topology.local_rank, topology.local_size
        self.cross_rank, self.cross_size = topology.cross_rank, topology.cross_size
        #: what users are told: another place only where a candidate of an elastic job is not a member yet
        self.shown_place = topology
        self.config = config
        self._all_ranks = tuple(range(self.size))
        #: whether averages of gradients divide by the ranks that have not joined: in a loop over uneven data
        self.counts_active = False
        #: how often this rank has joined: the same on all ranks that are not just waiting for the others to do so
        self.num_joins = 0
        #: numbers for unnamed operations, by process set: the same on every member that submits in the same order
        self._numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        #: numbers for sets of gradients, by process set: the same on every member that makes them in the same order
        self.gradient_sets: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        #: numbers for layers that communicate, by process set: the same on members that first use them in one order
        self.layer_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        #: registered memory that was not given back: by process set and offset, where it lies
        self._regions: defaultdict[int, dict[int, int]] = defaultdict(dict)
        #: whether sums of gradients are made so that others can finish them: see `reigen.elastic.forward`
        self.keeps_journals = False
        #: sums of gradients of which that is true
        self.step_sums: list[StepSums] = []
        #: weights that exist once a host, whose updates others can finish
        self.shared_updates: list[SharedUpdate] = []
        self._release: Callable[[], None] = lambda: None
        #: called when this rank leaves the job: methods of objects that may be gone by then
        self._followers: list[weakref.WeakMethod[Callable[[], None]]] = []
        #: the ranks of every host
        self.hosts = ((0,),) if job_rendezvous is None else job_rendezvous.layout.hosts
        can_mpi, why_not = can_use_mpi(os.environ)
        choice = choose_backends([len(ranks) for ranks in self.hosts], config.backend, None if can_mpi else why_not)
        #: the backends in use, and why
        self.backend, self.backend_reason = choice.name, choice.reason
        self.has_network = choice.network is not None
        cpu = config.engine_cpu(topology.local_rank)
        cpus = os.sched_getaffinity(0) | (set() if cpu is None else {cpu})
        #: whether collectives go on while this rank computes: on another processor than its thread, or on the network
        self.overlaps = self.has_network or len(cpus) > 1
        start_tuning = self._prepare_tuning(choice, counters, view) if config.autotune else None
        if job_rendezvous is None or self.size == 1:
            self._engine = engine_factory.create_single_rank_engine(config)
        elif choice.network is None:
            self._engine, self._release = engine_factory.create_single_host_engine(job_rendezvous, config)
        else:
            self._engine, self._release = engine_factory.create_multi_host_engine(job_rendezvous, choice, config)
        if counters is not None:
            counters.registered_bytes = 0
            self._engine.count_in(counters)
        #: what this rank does, in numbers; see `reigen.metrics`
        self.counters = self._engine.counters
        self.view = view
        #: backend for memory of devices, as far as it takes it; everything else is staged through the host
        self.device: DeviceBackend | None = self._engine.device
        #: of all ranks' collectives; see `Timeline.start`
        self.timeline = self._make_timeline(job_rendezvous)
        self.tuning = None if start_tuning is None else start_tuning.begin(self._engine)
        if self.size > 1:
            self._engine.start(cpu)
        self.timeline.start_as_configured(config.timeline, config.timeline_mark_cycles)

    def _make_timeline(self, job_rendezvous: JobRendezvous | None) -> Timeline:
        from reigen.observe.timeline import Timeline

        name = "" if job_rendezvous is None or not self.view else _job_name(job_rendezvous)
        return Timeline(self._engine, self.rank, self.size, socket.gethostname(), view=self.view, job=name)

    # -- collectives --------------------------------------------------------------------------------------------------

    def start(
        self,
        build: OperationBuilder,
        source: HostOrDeviceArray,
        dtype: DType,
        argument: object = None,
        *,
        target: HostOrDeviceArray | None = None,
        name: str | None = None,
        make_output: MakeOutput | None = None,
        process_set: int = 0,
        blocking: bool = False,
        deliver: Callable[[CollectiveResult], Any] | None = None,
        journal: BlockJournal | None = None,
    ) -> Handle[Any]:
        """Begin the collective that a builder of `operation_builders` makes of a tensor and the ``argument`` it has.

        Args:
            build: the builder.
            source: this rank's tensor.
            dtype: its element type.
            argument: of this collective: how it is reduced, the root, the splits.
            target: for the result, where its shape is the source's; may be ``source``.
            name: see `CollectiveOptions`.
            make_output: likewise.
            process_set: likewise.
            blocking: likewise.
            deliver: makes the handle's result of the outcome.
            journal: see `allreduce`.
        """
        ranks = self._members(process_set) if process_set else self._all_ranks
        if name is not None and type(name) is not str:
            name = str(name)
        device = source.device.kind if type(source) is DeviceArray else ""
        operation = build_operation(build, source.shape, dtype.name, argument, ranks, process_set, name, device)
        if name is None:
            operation = self._name(operation, None)
        flat = source.reshape(-1)
        if target is None:
            task = TensorTableEntry(flat, None, None, make_output)
        else:
            out = flat if source is target else target.reshape(-1)
            task = TensorTableEntry(flat, out, target, journal=journal)
        handle = Handle(self._engine, operation.name, task, deliver)
        self._engine.submit(operation, handle, blocking)
        return handle

    def start_group(
        self,
        build: OperationBuilder,
        sources: Sequence[HostOrDeviceArray],
        dtypes: Sequence[DType],
        argument: object = None,
        *,
        targets: Sequence[HostOrDeviceArray] | None = None,
        name: str | None = None,
        labels: Sequence[str] = (),
        make_output: MakeOutput | Sequence[MakeOutput] | None = None,
        process_set: int = 0,
        blocking: bool = False,
    ) -> Handle:
        """`start` of several tensors as one, all or none: `CollectiveResult.members` has their results, in order.

        ``labels``, if there are any, say which tensor each one is; they must be the same on every rank.
        ``make_output`` is one for all, or one for each.
        """
        ranks = self._members(process_set)
        shapes = tuple([source.shape for source in sources])
        names = tuple([dtype.name for dtype in dtypes])
        members = build_members(build, shapes, names, argument, ranks, process_set, tuple(labels))
        if targets is None:
            makers = make_output if isinstance(make_output, Sequence) else [make_output] * len(sources)
            tasks = [TensorTableEntry(s.reshape(-1), make_output=make) for s, make in zip(sources, makers, strict=True)]
        else:
            tasks = [_make_entry(source, target) for source, target in zip(sources, targets, strict=True)]
        return self._submit_group(name, members, tasks, blocking)

    def allreduce(
        self,
        source: HostOrDeviceArray,
        target: HostOrDeviceArray,
        dtype: DType,
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        region: MemoryRegion | None = None,
        journal: BlockJournal | None = None,
        divide_by_active: bool = False,
        **options: Unpack[CollectiveOptions],
    ) -> Handle:
        """``target = postscale * op(prescale * source)`` over all ranks.

        Args:
            source: this rank's contribution; the same shape on every rank.
            target: of the same shape; may be ``source``.
            dtype: element type.
            op: operator. AVERAGE divides by the number of ranks.
            prescale: factor of each contribution.
            postscale: factor of the result.
            region: registered memory of which source and target are one view; then nothing is copied.
            journal: keeps account of the reduction in that memory.
            divide_by_active: AVERAGE divides by the number of ranks that have not joined.
            options: see `CollectiveOptions`.

        Raises:
            ArgumentError, UnsupportedTypeError, DuplicateNameError: here, at once.
            CollectiveError: a rank was lost before.
        """
        if region is not None and source is not target:
            raise ArgumentError("registered memory is reduced in place: source must be target")
        offset = -1 if region is None else operation_builders.region_offset(region, target)
        reduction = (op, prescale, postscale, offset, divide_by_active)
        build = operation_builders.build_allreduce
        return self.start(build, source, dtype, reduction, target=target, journal=journal, **options)

    def grouped_allreduce(
        self,
        sources: Sequence[HostOrDeviceArray],
        targets: Sequence[HostOrDeviceArray],
        dtypes: Sequence[DType],
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        **options: Unpack[CollectiveOptions],
    ) -> Handle:
        """`allreduce` of several tensors; see `start_group`."""
        reduction, build = ReductionSpec(op, prescale, postscale), operation_builders.build_allreduce
        return self.start_group(build, sources, dtypes, reduction, targets=targets, **options)

    def broadcast(
        self,
        source: HostOrDeviceArray,
        target: HostOrDeviceArray,
        dtype: DType,
        *,
        root_rank: int,
        **options: Unpack[CollectiveOptions],
    ) -> Handle:
        """``target = source`` of rank ``root_rank``; ``source`` is read there alone, and may be ``target``."""
        return self.start(operation_builders.build_broadcast, source, dtype, root_rank, target=target, **options)

    def allgather(self, source: HostOrDeviceArray, dtype: DType, **options: Unpack[CollectiveOptions]) -> Handle:
        """The sources of all ranks concatenated on dimension 0, which may differ between ranks; the others may not."""
        return self.start(operation_builders.build_allgather, source, dtype, **options)

    def alltoall(
        self,
        source: HostOrDeviceArray,
        dtype: DType,
        *,
        splits: Sequence[int] | None = None,
        **options: Unpack[CollectiveOptions],
    ) -> Handle:
        """Send ``splits[i]`` rows to the i-th rank of the set; the result holds what came, in rank order.

        `CollectiveResult.received_splits` tells how many rows came from each rank. Without ``splits`` the rows are
        divided equally. Rows beyond the sum of the splits are not sent.
        """
        return self.start(
            operation_builders.build_alltoall, source, dtype, None if splits is None else tuple(splits), **options
        )

    def reducescatter(
        self,
        source: HostOrDeviceArray,
        dtype: DType,
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        **options: Unpack[CollectiveOptions],
    ) -> Handle:
        """Reduce like `allreduce`; this rank gets its rows. The first ``rows % size`` ranks get one row more."""
        build, reduction = operation_builders.build_reducescatter, (op, prescale, postscale)
        return self.start(build, source, dtype, reduction, **options)

    def reduce_to_owners(
        self,
        array: NDArray[Any],
        dtype: DType,
        parts: operation_builders.OwnerReduction,
        *,
        name: str,
        process_set: int = 0,
        blocking: bool = False,
    ) -> Handle:
        """Reduce registered memory in place; of the result each owner (`MemoryRegion.owned`) gets its part alone."""
        size = len(self._members(process_set))
        operation = operation_builders.build_reduce_to_owners(array, dtype, parts, size, process_set)
        task = TensorTableEntry(array.reshape(-1), output=array)
        return self._submit(self._name(operation, name), task, blocking)

    def barrier(self, *, name: str | None = None, process_set: int = 0, blocking: bool = False) -> Handle:
        """Done when every rank has submitted it. Other outstanding operations need not be."""
        self._members(process_set)
        operation = Operation(OperationKind.BARRIER, self._named(name, "barrier", process_set), process_set=process_set)
        return self._submit(operation, TensorTableEntry(), blocking)

    def exchange(
        self,
        payload: bytes,
        *,
        root_rank: int | None = None,
        name: str | None = None,
        process_set: int = 0,
        blocking: bool = True,
    ) -> Handle:
        """Send all ranks a few bytes by control messages, which cannot be changed, repeated or exchanged on their way.

        `CollectiveResult.payloads` has what each rank said. ``root_rank``, if any, is the same on all.
        """
        members = self._members(process_set)
        root = -1 if root_rank is None else operation_builders.check_root(root_rank, members)
        named = self._named(name, "exchange", process_set)
        operation = Operation(OperationKind.EXCHANGE, named, root=root, process_set=process_set, payload=payload)
        return self._submit(operation, TensorTableEntry(), blocking)

    def join(self, *, blocking: bool = False) -> Handle:
        """Declare that this rank has no more data: done when all have; `CollectiveResult.value` is the last one.

        Until then it takes part, with neutral elements, in the allreduces of those that have not joined. Their other
        collectives are refused (JoinedError). Unnamed operations are counted anew afterwards, since the others went on.
        """
        handle = self._submit(Operation(OperationKind.JOIN, JOIN_NAME), TensorTableEntry(), blocking)
        self.num_joins += 1
        self._numbers.clear()
        return handle

    # -- process sets -------------------------------------------------------------------------------------------------

    @property
    def process_sets(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of every process set, ascending, by number; number 0 is all ranks."""
        return self._engine.process_sets

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """A new process set of these ranks; its number, the lowest that is free. Collective over all ranks; waits.

        Raises:
            ArgumentError: no ranks, repeated ones, ranks that are not in the job, or there is such a set already.
            MismatchError: the ranks ask for different sets.
            SharedMemoryError: a member has no memory for staging; the set does not exist then.
        """
        members = operation_builders.validate_ranks(ranks, self.size)
        if members in self.process_sets.values():
            raise ArgumentError(f"there is a process set of the ranks {list(members)} already")
        operation = Operation(OperationKind.ADD_SET, self._named(None, "add_process_set", 0), shape=members)
        return self._submit(operation, TensorTableEntry(), blocking=True).wait().value

    def remove_process_set(self, process_set: int) -> None:
        """Undo `add_process_set`. Collective over all ranks; waits. Outstanding operations of the set fail.

        Raises:
            ArgumentError: it is the set of all ranks, or there is none of this number.
            MismatchError: the ranks ask for different sets.
        """
        if process_set == 0 or process_set not in self.process_sets:
            raise ArgumentError(f"there is no process set {process_set} that could be removed")
        operation = Operation(
            OperationKind.REMOVE_SET, self._named(None, "remove_process_set", 0), shape=(process_set,)
        )
        self._submit(operation, TensorTableEntry(), blocking=True).wait()
        self._regions.pop(process_set, None)
        self._numbers.pop(process_set, None)
        self.gradient_sets.pop(process_set, None)
        self.layer_numbers.pop(process_set, None)

    def _members(self, process_set: int) -> tuple[int, ...]:
        """The ranks of a set, of which this is one."""
        ranks = self._engine.ranks_of(process_set)
        if ranks is None:
            raise ArgumentError(f"there is no process set {process_set}; it has to be added first, on all ranks")
        if process_set and self.rank not in ranks:
            raise ArgumentError(f"rank {self.rank} is not in process set {process_set}, whose ranks are {list(ranks)}")
        return ranks

    # -- registered memory --------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, name: str, process_set: int = 0, shared: bool = False) -> MemoryRegion:
        """Registered memory of ``nbytes`` bytes, at one offset on all ranks; or one, ``shared`` by a host. Collective.

        Raises:
            SharedMemoryError: some rank has not enough memory; raised on all, and the job carries on.
        """
        self._members(process_set)
        operation = self._name(operation_builders.build_allocation(nbytes, process_set, shared=shared), name)
        region = self._submit(operation, TensorTableEntry(), blocking=True).wait().region
        assert region is not None
        self._regions[process_set][region.offset] = region.array.ctypes.data
        self.counters.registered_bytes += region.array.nbytes
        return region

    def free(self, region: MemoryRegion, *, process_set: int = 0) -> None:
        """Give a region back, once every rank has; returns at once. Does nothing in a job, or a set, that is over."""
        if self.backend == "null" or process_set not in self.process_sets:
            return  # the memory goes with its last view
        if self._regions[process_set].get(region.offset) != region.array.ctypes.data:
            return  # given back before, or of a set that is over and whose number is used again
        del self._regions[process_set][region.offset]
        self.counters.registered_bytes -= region.array.nbytes
        base = self._named(f"free.{region.offset}", "free", process_set)
        operation = Operation(OperationKind.FREE, base, offset=region.offset, process_set=process_set)
        try:
            self._submit(operation, TensorTableEntry(), blocking=False)
        except CollectiveError:
            return  # the memory goes with the job

    # -- for who watches ----------------------------------------------------------------------------------------------

    def observe(self, observer: EngineObserver | None) -> None:
        """Report this rank's engine's work to ``observer``, from now on; None ends it."""
        self._engine.observe(observer)

    def samples(self) -> Iterator[MetricSample]:
        """Yield the metrics of this rank, for `reigen.observe.metrics`; any thread."""
        yield from self._engine.samples()
        if self.view:
            yield "reigen_view_epoch", (), self.view

    def when_refused(self, notify: Callable[[], None]) -> None:
        """Have ``notify`` called with each collective that is refused because nothing works any more, by its thread."""
        self._engine.refused = notify

    def when_late(self, notify: Callable[[Sequence[int]], None]) -> None:
        """Have ``notify`` called with the ranks for which a collective has waited until its deadline.

        Nothing works any more then: the others go on without them, in another view.
        """
        self._engine.late = notify

    def post(self, topic: Topic, data: bytes) -> None:
        """Send a note beside the collectives: see `Engine.post`."""
        self._engine.post(topic, data)

    def listen(self, topic: Topic, listener: NoteListener) -> None:
        """Receive the notes on ``topic``: see `Engine.listen`."""
        self._engine.listen(topic, listener)

    # -- autotuning ---------------------------------------------------------------------------------------------------

    def _prepare_tuning(self, choice: BackendChoice, counters: EngineCounters | None, view: int) -> TuningStart | None:
        """Decide whether this job is tuned; on rank 0, load what that needs before others wait for this rank."""
        from reigen.autotune import job

        bucket_bytes = self.config.bucket_bytes or default_bucket_bytes(self.has_network, self.overlaps)
        tunable = job.TunableJob(self.hosts, choice.network, choice.shares_memory, bucket_bytes)
        self.autotunes = job.can_tune(self.config, tunable)
        if self.rank == 0 and not self.autotunes:
            job.warn_if_not_tuned(self.config, tunable)
        if self.rank or not self.autotunes:
            return None
        return job.start_tuning(self.config, tunable, None if counters is None else counters.tuned, view)

    # -- ends ---------------------------------------------------------------------------------------------------------

    @property
    def is_operational(self) -> bool:
        """Return whether collectives are still possible; False once the job is over."""
        return self._engine.is_operational

    def view_begins(self, size: int, change: str, lost_seconds: float) -> None:
        """In an elastic job: the steps of this view may be run now; for a timeline."""
        self.timeline.view_begins(size, change, lost_seconds)

    def give_up(self, error: BaseException) -> None:
        """End the job for all ranks: this one cannot go on, and no other without it; see `Engine.give_up`."""
        self._engine.give_up(error)

    def close(self) -> None:
        """Leave the job. Outstanding operations fail here; ranks that wait for this one get PeerLostError."""
        try:
            if self.tuning is not None:
                self.tuning.close(is_view=self.view > 0)
            self.timeline.close()
        finally:
            self._engine.close()
            followers, self._followers = self._followers, []
            for reference in followers:
                if (follower := reference()) is not None:
                    follower()
            self._release()

    def when_closed(self, method: Callable[[], None]) -> None:
        """Have a bound method called, once, when this rank has left the job: nothing of it is under way any more.

        Its object is not kept alive. It must not raise.
        """
        self._followers = [each for each in self._followers if each() is not None]
        self._followers.append(weakref.WeakMethod(method))

    def _submit(self, operation: Operation, task: TensorTableEntry, blocking: bool) -> Handle:
        if type(task.source) is DeviceArray:
            operation = structs.replace(operation, device=task.source.device.kind)
        handle = Handle(self._engine, operation.name, task)
        self._engine.submit(operation, handle, blocking)
        return handle

    def _submit_group(
        self, name: str | None, members: Sequence[Operation], tasks: Sequence[TensorTableEntry], blocking: bool
    ) -> Handle:
        if not members:
            raise ArgumentError("a group needs at least one tensor")
        kind, process_set = members[0].kind, members[0].process_set
        base = self._named(name, f"grouped_{kind.name.lower()}", process_set)
        group = Operation(kind, base, process_set=process_set, members=tuple(members))
        if type(tasks[0].source) is DeviceArray:
            group = structs.replace(group, device=tasks[0].source.device.kind)
        return self._submit(group, TensorTableEntry(members=tuple(tasks)), blocking)

    def _name(self, operation: Operation, name: str | None) -> Operation:
        process_set = operation.process_set
        if name is None:
            named = self._named(None, operation.kind.name.lower(), process_set)
        else:
            named = operation_builders.travelling_name(name if type(name) is str else str(name), process_set)
        return structs.replace(operation, name=named)

    def next_name(self, kind: str, process_set: int) -> str:
        """Return the name of an unnamed operation. A caller that submits it later takes its name now."""
        return f"{kind}{UNNAMED}{self.num_joins}.{next(self._numbers[process_set])}"

    def _named(self, name: str | None, kind: str, process_set: int) -> str:
        """The name that travels. For when all else has been checked: an error takes no number of unnamed operations."""
        if name is None:
            return operation_builders.qualify_name(self.next_name(kind, process_set), process_set)
        return operation_builders.travelling_name(str(name), process_set)


def _make_entry(source: HostOrDeviceArray, target: HostOrDeviceArray) -> TensorTableEntry:
    flat = source.reshape(-1)
    return TensorTableEntry(flat, flat if source is target else target.reshape(-1), target)


# -- the one context of this process ----------------------------------------------------------------

_lock = threading.Lock()
_current: Context | None = None
#: in an elastic job, whose views have contexts of their own
_elastic: ElasticJob[Context] | None = None
#: an elastic job that this process has come to, and must not come to again
_has_left = False
#: in a process that was forked from a rank: that rank's context, kept so that nothing of it is torn down here
_forked_from: Context | None = None


def init(
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    ranks: Sequence[int] | None = None,
    job: JobInfo | None = None,
) -> Context:
    """Join the job that the environment speaks of; alone if it speaks of none. Does nothing when already in it.

    Args:
        environ: environment variables, by default this process's.
        arguments: knobs that the program has set, by the names of their fields; they win over the environment.
        ranks: some ranks of that job, of which this is one, that form a job of their own; numbered in this order.
        job: what the program says of its job, in place of the environment.

    Raises:
        ArgumentError: ``ranks`` are none of the job, or this rank is not one of them.
        ConfigError: the environment is contradictory, asks for what there is not, or belongs to another process.
        DeadlineError: other ranks did not come; names them.
        AuthenticationError: the launcher's rendezvous knows another secret.
    """
    global _current  # noqa: PLW0603
    with _lock:
        if _current is None:
            _check_not_forked()
            _register_fork_hook()
            occupy_standard_descriptors()
            environ = os.environ if environ is None else environ
            elastic_place = _find_elastic_place(environ) if job is None else None
            if job is None and elastic_place is not None:
                job = elastic_place.candidate_job(environ)
            job, config = job or detect_job(environ), load_config(environ, arguments)
            place = None if job.size == 1 or environ.get(PREFIXED_VARIABLE) else job.rank
            log.attach(config.log_level, hide_time=config.log_hide_time, rank=place)
            if elastic_place is None:
                _current = _join(job, config, environ, ranks)
            else:
                _current = _join_elastic(elastic_place, job, config, environ, ranks)
            if _current.rank == 0 and not is_candidate():
                from reigen.startup import log_job

                log_job(job, config, environ, _current.size, (_current.backend, _current.backend_reason))
            atexit.register(_shutdown_at_exit)
            report_metrics(environ, config)
        return _current


def _join(job: JobInfo, config: Config, environ: Mapping[str, str], ranks: Sequence[int] | None) -> Context:
    from reigen import startup

    job_rendezvous = startup.join_rendezvous(job, config, environ, ranks)
    if job_rendezvous is None:
        return Context(config)
    context = _create(config, None, job_rendezvous)
    startup.count_generation(job_rendezvous)
    return context


def report_metrics(environ: Mapping[str, str], config: Config, kind: ProcessKind = "rank") -> None:
    """Report this process's metrics to its launcher from now on, if that wants to hear of them.

    Args:
        environ: environment variables.
        config: the knobs.
        kind: what the process is.
    """
    if not environ.get(METRICS_VARIABLE):
        return
    from reigen import startup

    find = _elastic.launcher_rendezvous if _elastic is not None else None
    startup.report_metrics(environ, config, kind, lambda: None if is_candidate() else _current, find)


def _find_elastic_place(environ: Mapping[str, str]) -> ElasticPlace | None:
    if environ.get(ELASTIC_VARIABLE) != "1":
        return None
    from reigen.cluster.membership.place import ElasticPlace

    return ElasticPlace.find(environ)


def _join_elastic(
    place: ElasticPlace, job: JobInfo, config: Config, environ: Mapping[str, str], ranks: Sequence[int] | None
) -> Context:
    from reigen.elastic_job import join_elastic_job
    from reigen.observe import timeline  # noqa: F401  a view that takes this process in must not wait for its imports

    global _elastic, _has_left  # noqa: PLW0603
    if _has_left:
        raise ConfigError("this process has left its elastic job by shutdown(), and cannot come back")
    counters = EngineCounters()
    make_context = functools.partial(_create, config, counters)
    _elastic = join_elastic_job(place, job, config, environ, ranks, make_context, counters)
    _has_left = True
    try:
        if place.is_candidate:
            alone = Context(dataclasses.replace(config, timeline=None))
            alone.shown_place = _elastic.expect_place()
            return alone
        return _elastic.enter()
    except BaseException:
        failed, _elastic = _elastic, None
        failed.close()
        raise


def _job_name(job_rendezvous: JobRendezvous) -> str:
    """Return a name that the views of a job have in common, and other jobs have not."""
    return hashlib.blake2b(job_rendezvous.secret, digest_size=8, person=b"timeline").hexdigest()


def _create(config: Config, counters: EngineCounters | None, job_rendezvous: JobRendezvous, view: int = 0) -> Context:
    try:
        context = Context(config, job_rendezvous, view, counters)
    except BaseException:
        job_rendezvous.rendezvous.close()
        raise
    if not context.has_network:
        job_rendezvous.rendezvous.close()
    return context


def is_candidate() -> bool:
    """Return whether this process has come to an elastic job, and is no member yet: the program sets itself up.

    `change_view` makes it one. Until then its context is that of a job of one rank, but for the place that users are
    told: what is slow in a program stands between ``init()`` and the training, and members are not to wait for it.
    """
    return _elastic is not None and _elastic.is_candidate and _current is not None


def elastic_job() -> ElasticJob[Context] | None:
    """Return this process's part in its elastic job; None in another one, and outside of any."""
    return _elastic


def change_view() -> tuple[dict[int, int], Context]:
    """In an elastic job: give this context up, and wait for that of the next view. Objects of this one are void.

    Returns:
        Ranks in the new view, by ranks in the old one; and the new context.

    Raises:
        NotInitializedError: this process is in no elastic job.
        ReigenError: there is no next view; says why.
    """
    global _current  # noqa: PLW0603
    with _lock:
        if _elastic is None:
            raise NotInitializedError("this process is in no elastic job")
        alone, _current = (_current if _elastic.is_candidate else None), None
        if alone is not None:
            alone.close()
        _elastic.leave_view()
        _current = _elastic.enter()
        return _elastic.renumbered, _current


def shutdown() -> None:
    """Leave the job. Does nothing outside one; `init` joins again, but no elastic job: its program is done then."""
    global _current, _elastic
    with _lock:
        context, _current = _current, None
        job, _elastic = _elastic, None
    if job is not None and not (job.has_failed or job.has_left or job.is_candidate):
        job.finish()
    if context is not None:
        atexit.unregister(_shutdown_at_exit)
        context.close()
    if job is not None:
        job.close()


def _shutdown_at_exit() -> None:
    """Leave the job at the end of the script; of an elastic one in good order only if no exception has ended it."""
    if _elastic is not None and getattr(sys, "last_value", None) is not None:
        _elastic.has_failed = True
    shutdown()


def _after_fork() -> None:
    """In the child: it is no rank. Threads, locks and the place in the job stay with the parent."""
    global _lock, _current, _elastic, _forked_from
    _lock, _elastic = threading.Lock(), None
    if _current is not None:
        _current, _forked_from = None, _current
        atexit.unregister(_shutdown_at_exit)


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def is_initialized() -> bool:
    """Return whether this process is in a job. Never raises."""
    return _current is not None


def mark(name: str) -> None:
    """For a timeline, and STEP for metrics: the calling thread has come to the end of another ``name``.

    Raises nothing, outside a job too.
    """
    if (job := _current) is not None:
        if name == "STEP":
            job.counters.steps += 1
            if job.tuning is not None:
                job.tuning.step_ended()
        if (recorder := job.timeline.recorder) is not None:
            recorder.mark(name)


def timeline_recorder() -> EventRecorder | None:
    """Return what records this rank's events for a timeline; None: nothing does. Never raises."""
    job = _current
    return None if job is None else job.timeline.recorder


def current(problem: str | None = None) -> Context:
    """The job.

    Args:
        problem: what is wrong if this process is in none; None: `init` was not called.

    Raises:
        NotInitializedError: this process is in none.
    """
    if _current is None:
        _check_not_forked()
        raise NotInitializedError(problem)
    return _current


def _check_not_forked() -> None:
    if _forked_from is not None:
        raise NotInitializedError(
            f"this process was forked from rank {_forked_from.rank} after init() and is no rank of the job; "
            "let the rank itself call the collectives, or fork before init()"
        )
