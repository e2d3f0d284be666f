"""One job, as a process that takes part in it sees it."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from reigen.cluster.environ import Job, detect
from reigen.cluster.neighbours import meet
from reigen.cluster.rendezvous import Rendezvous, RendezvousClient
from reigen.cluster.topology import Topology
from reigen.config import Config, load
from reigen.engine.engine import Engine, Listener
from reigen.engine.execution import reduction_of
from reigen.engine.handles import Handle, Outcome, Task
from reigen.engine.messages import Kind, Operation, Topic
from reigen.engine.negotiation import UNNAMED, Coordinator
from reigen.engine.observer import Observer
from reigen.engine.transport import Solitude
from reigen.errors import ArgumentError, CollectiveError, NotInitializedError
from reigen.planes.base import Region
from reigen.planes.choice import choose
from reigen.planes.null import NullPlane
from reigen.planes.shm import ShmPlane, shm_plane_bytes
from reigen.types import DType, ReduceOp
from reigen.wire.mailbox import Mailbox, mailbox_bytes

__all__ = ["Context", "Handle", "Outcome", "Region", "current", "init", "is_initialized", "shutdown"]

_MAX_NAME_BYTES = 512
#: How often a waiting caller looks for an answer before it sleeps, where every rank has a core of its own.
_LOOKS = 200

MakeOutput = Callable[[tuple[int, ...]], NDArray[Any]]


class Context:
    """A job of which this process is one rank.

    Every collective submits and returns a `Handle` at once. Arrays are C-contiguous and of the dtype's *storage* type
    (bfloat16 is uint16). With ``blocking=True`` the caller promises to wait for the handle next; that spares waking
    another thread. Unnamed operations must be submitted in the same order on every rank; named ones in any order.

    Args:
        topology: this process's place.
        config: the knobs.
        rendezvous: where to meet the other ranks; not needed for one rank.
        generation: how often this process has been in this job before.
    """

    def __init__(
        self, topology: Topology, config: Config, rendezvous: Rendezvous | None = None, generation: int = 0
    ) -> None:
        self.rank, self.size = topology.rank, topology.size
        self.local_rank, self.local_size = topology.local_rank, topology.local_size
        self.cross_rank, self.cross_size = topology.cross_rank, topology.cross_size
        self.config = config
        self._numbers = itertools.count()
        #: numbers for sets of gradients: the same on every rank that makes them in the same order
        self.gradient_sets = itertools.count()
        self._release: Callable[[], None] = lambda: None
        #: the data plane in use, and why
        self.plane, self.plane_reason = choose(topology, config.plane)
        if rendezvous is None or self.plane == "null":
            self._engine = _engine_alone(config)
        else:
            self._engine, self._release = _engine_on_host(topology, config, rendezvous, generation)
            self._engine.start()

    # -- collectives --------------------------------------------------------------------------------------------------

    def allreduce(
        self,
        source: NDArray[Any],
        target: NDArray[Any],
        dtype: DType,
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        region: Region | None = None,
        blocking: bool = False,
    ) -> Handle:
        """``target = postscale * op(prescale * source)`` over all ranks.

        Args:
            source: this rank's contribution; the same shape on every rank.
            target: of the same shape; may be ``source``.
            dtype: element type.
            op: operator. AVERAGE divides by the number of ranks.
            name: what the tensor is called on every rank.
            prescale: factor of each contribution.
            postscale: factor of the result.
            region: registered memory of which source and target are one view; then nothing is copied.
            blocking: see the class.

        Raises:
            ArgumentError, UnsupportedTypeError, DuplicateNameError: here, at once.
            CollectiveError: a rank was lost before.
        """
        reduction_of(dtype.name, op, self.size, prescale, postscale)
        if region is not None and source is not target:
            raise ArgumentError("registered memory is reduced in place: source must be target")
        offset = -1 if region is None else _offset_in(region, target)
        operation = Operation(
            Kind.ALLREDUCE,
            self._named(name, "allreduce"),
            dtype.name,
            source.shape,
            op,
            prescale,
            postscale,
            offset=offset,
        )
        task = Task(source.reshape(-1), target.reshape(-1))
        return self._submit(operation, task, target, blocking)

    def broadcast(
        self,
        source: NDArray[Any],
        target: NDArray[Any],
        dtype: DType,
        *,
        root_rank: int,
        name: str | None = None,
        blocking: bool = False,
    ) -> Handle:
        """``target = source`` of rank ``root_rank``; ``source`` is read there alone, and may be ``target``."""
        if not 0 <= root_rank < self.size:
            raise ArgumentError(f"root_rank must be from 0 to {self.size - 1}, not {root_rank}")
        operation = Operation(Kind.BROADCAST, self._named(name, "broadcast"), dtype.name, source.shape, root=root_rank)
        flat = target.reshape(-1)
        task = Task(flat if source is target else source.reshape(-1), flat)
        return self._submit(operation, task, target, blocking)

    def allgather(
        self,
        source: NDArray[Any],
        dtype: DType,
        *,
        name: str | None = None,
        make_output: MakeOutput | None = None,
        blocking: bool = False,
    ) -> Handle:
        """The sources of all ranks concatenated on dimension 0, which may differ between ranks; the others may not.

        ``make_output(shape)`` gives the array for the result, called on whichever thread completes the operation.
        """
        if not source.ndim:
            raise ArgumentError("allgather needs at least one dimension, got a scalar")
        operation = Operation(Kind.ALLGATHER, self._named(name, "allgather"), dtype.name, source.shape)
        return self._submit(operation, Task(source.reshape(-1), make_output=make_output), None, blocking)

    def alltoall(
        self,
        source: NDArray[Any],
        dtype: DType,
        *,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        make_output: MakeOutput | None = None,
        blocking: bool = False,
    ) -> Handle:
        """Send ``splits[r]`` rows to each rank r; the result holds what came, in rank order.

        `Outcome.received_splits` tells how many rows came from each rank. Without ``splits`` the rows are divided
        equally. Rows beyond the sum of the splits are not sent.
        """
        rows = self._splits(source, splits)
        operation = Operation(Kind.ALLTOALL, self._named(name, "alltoall"), dtype.name, source.shape, splits=rows)
        return self._submit(operation, Task(source.reshape(-1), make_output=make_output), None, blocking)

    def reducescatter(
        self,
        source: NDArray[Any],
        dtype: DType,
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        make_output: MakeOutput | None = None,
        blocking: bool = False,
    ) -> Handle:
        """Reduce like `allreduce`; this rank gets its rows. The first ``rows % size`` ranks get one row more."""
        if not source.ndim:
            raise ArgumentError("reducescatter needs at least one dimension, got a scalar")
        reduction_of(dtype.name, op, self.size, prescale, postscale)
        operation = Operation(
            Kind.REDUCESCATTER, self._named(name, "reducescatter"), dtype.name, source.shape, op, prescale, postscale
        )
        return self._submit(operation, Task(source.reshape(-1), make_output=make_output), None, blocking)

    def barrier(self, *, name: str | None = None, blocking: bool = False) -> Handle:
        """Done when every rank has submitted it. Other outstanding operations need not be."""
        return self._submit(Operation(Kind.BARRIER, self._named(name, "barrier")), Task(), None, blocking)

    # -- registered memory --------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, name: str) -> Region:
        """Registered memory of ``nbytes`` bytes at the same offset on every rank. Collective; waits.

        Raises:
            SharedMemoryError: some rank has not enough memory; raised on all, and the job carries on.
        """
        if nbytes < 1:
            raise ArgumentError(f"a region must have at least 1 byte, not {nbytes}")
        operation = Operation(Kind.ALLOCATE, self._named(name, "allocate"), shape=(nbytes,))
        region = self._submit(operation, Task(), None, blocking=True).wait().region
        assert region is not None
        return region

    def free(self, region: Region) -> None:
        """Give a region back, once every rank has; returns at once. Does nothing in a job that is over."""
        if self.plane == "null":
            return  # the memory goes with its last view
        operation = Operation(Kind.FREE, f"free.{region.offset}", offset=region.offset)
        try:
            self._submit(operation, Task(), None, blocking=False)
        except CollectiveError:
            return  # the memory goes with the job

    # -- for who watches ----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer | None) -> None:
        """Tell ``observer`` what this rank's engine does, from now on; None ends it."""
        self._engine.observer = observer

    def post(self, topic: Topic, data: bytes) -> None:
        """Send a note beside the collectives: see `Engine.post`."""
        self._engine.post(topic, data)

    def listen(self, topic: Topic, listener: Listener) -> None:
        """Receive the notes on ``topic``: see `Engine.listen`."""
        self._engine.listen(topic, listener)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the job. What is outstanding here fails; ranks that wait for this one get PeerLostError."""
        self._engine.close()
        self._release()

    def _submit(self, operation: Operation, task: Task, output: NDArray[Any] | None, blocking: bool) -> Handle:
        handle = Handle(self._engine, operation.name, task, output)
        self._engine.submit(operation, handle, blocking=blocking)
        return handle

    def _named(self, name: str | None, kind: str) -> str:
        if name is None:
            return f"{kind}{UNNAMED}{next(self._numbers)}"
        name = str(name)  # some scripts number their tensors
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            raise ArgumentError(f"a name must have 1 to {_MAX_NAME_BYTES} bytes, got {len(name.encode())}")
        return name

    def _splits(self, source: NDArray[Any], splits: Sequence[int] | None) -> tuple[int, ...]:
        if not source.ndim:
            raise ArgumentError("alltoall needs at least one dimension, got a scalar")
        rows = source.shape[0]
        if splits is None:
            if rows % self.size:
                raise ArgumentError(
                    f"alltoall without splits: {rows} rows cannot be divided equally among {self.size} ranks"
                )
            return (rows // self.size,) * self.size
        if len(splits) != self.size or min(splits) < 0 or sum(splits) > rows:
            raise ArgumentError(
                f"splits must be {self.size} numbers of at least 0 that add up to at most {rows}, got {list(splits)}"
            )
        return tuple(map(int, splits))


def _offset_in(region: Region, array: NDArray[Any]) -> int:
    begin = array.ctypes.data - region.array.ctypes.data
    if not 0 <= begin <= region.nbytes - array.nbytes:
        raise ArgumentError("the array does not lie in the region")
    return region.offset + begin


def _engine_alone(config: Config) -> Engine:
    solitude = Solitude()
    coordinator = Coordinator(1, config.cache_capacity, config.fusion_threshold_bytes, config.deadline_seconds)
    return Engine(NullPlane(), solitude, solitude, coordinator, config.deadline_seconds, looks=0)


def _engine_on_host(
    topology: Topology, config: Config, rendezvous: Rendezvous, generation: int
) -> tuple[Engine, Callable[[], None]]:
    rank, size = topology.rank, topology.size
    sizes = [mailbox_bytes(size), shm_plane_bytes()]
    neighbours, (mail, part) = meet(rendezvous, rank, size, generation, config.start_timeout_seconds, sizes)
    looks = _LOOKS if size <= (os.cpu_count() or 1) else 0
    plane = ShmPlane(neighbours, part, looks)
    try:
        plane.try_direct(time.monotonic() + config.start_timeout_seconds)
    except BaseException:
        neighbours.close()
        raise
    others = [r for r in range(size) if r != rank]
    mailbox = Mailbox(mail.arrays, rank, others if rank == 0 else [0], others if rank == 0 else [0])
    coordinator = None
    if rank == 0:
        coordinator = Coordinator(size, config.cache_capacity, config.fusion_threshold_bytes, config.deadline_seconds)

    def release() -> None:
        neighbours.leave()
        plane.close()
        neighbours.close()

    return Engine(plane, mailbox, neighbours, coordinator, config.deadline_seconds, looks), release


# -- the one context of this process ----------------------------------------------------------------

_lock = threading.Lock()
_current: Context | None = None
#: in a process that was forked from a rank: that rank's context, kept so that nothing of it is torn down here
_forked_from: Context | None = None
#: how often this process has joined each job, by the job's secret: ranks that meet count alike
_generations: Counter[bytes] = Counter()


def init(environ: Mapping[str, str] | None = None) -> Context:
    """Join the job that the environment speaks of; alone if it speaks of none. Does nothing when already in it.

    Raises:
        ConfigError: the environment is contradictory, or asks for what there is not.
        DeadlineError: other ranks did not come; names them.
        AuthenticationError: the launcher's rendezvous knows another secret.
    """
    global _current  # noqa: PLW0603  # the one global of the package
    with _lock:
        if _current is None:
            _refuse_fork()
            _watch_forks()
            environ = os.environ if environ is None else environ
            _current = _join(detect(environ), load(environ))
            atexit.register(shutdown)
        return _current


def _join(job: Job, config: Config) -> Context:
    if job.rendezvous is None or job.secret is None:
        return Context(job.topology, config)
    timeout = config.start_timeout_seconds
    rendezvous = RendezvousClient(job.rendezvous, job.secret, job.topology.rank, timeout)
    try:
        context = Context(job.topology, config, rendezvous, _generations[job.secret])
        _generations[job.secret] += 1
        return context
    finally:
        rendezvous.close()


def shutdown() -> None:
    """Leave the job. Does nothing outside one; `init` joins again."""
    global _current  # the one global of the package
    with _lock:
        context, _current = _current, None
    if context is not None:
        atexit.unregister(shutdown)
        context.close()


def _after_fork() -> None:
    """In the child: it is no rank. Threads, locks and the place in the job stay with the parent."""
    global _lock, _current, _forked_from  # noqa: PLW0603
    _lock = threading.Lock()
    if _current is not None:
        _current, _forked_from = None, _current
        atexit.unregister(shutdown)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def is_initialized() -> bool:
    """Whether this process is in a job. Never raises."""
    return _current is not None


def current() -> Context:
    """The job.

    Raises:
        NotInitializedError: this process is in none.
    """
    if _current is None:
        _refuse_fork()
        raise NotInitializedError
    return _current


def _refuse_fork() -> None:
    if _forked_from is not None:
        raise NotInitializedError(
            f"this process was forked from rank {_forked_from.rank} after init() and is no rank of the job; "
            "let the rank itself call the collectives, or fork before init()"
        )
