"""Store on one server: requests go in, shards change, answers come out.

What happens when is decided elsewhere (`reigen.kv.consistency` for each shard, `reigen.kv.server.consensus` for
what all workers say alike). What they decide comes back as instructions, which stand in the queue of their shard and
are carried out in order by one loop (`ServerStore._advance`). What computes is given to a thread if it is long; the
shard's later instructions wait for it, and other shards go on.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.cluster.membership.members import LossPolicy
from reigen.errors import ArgumentError, CollectiveError, ReigenError, WireError
from reigen.kv.consistency.sample_leases import select_unapplied
from reigen.kv.consistency.state_machine import (
    AcknowledgePush,
    AnswerPull,
    ApplyPush,
    CombineRound,
    ConsistencyEngine,
    ConsistencyEvent,
    ConsistencyInstruction,
    ConsistencyState,
    DropRequest,
    FailRequest,
    RepeatAcknowledgement,
    RequestExpired,
    RequestToken,
    RoundRecovered,
    RoundsForgotten,
    WorkerDisconnected,
    WorkerLeft,
    WorkerLost,
    WorkerReappeared,
    WorkerReturned,
)
from reigen.kv.protocol import (
    DTYPE_NUMBERS,
    NOTICE_CODEC,
    PUSH_KINDS,
    KeySpec,
    MessageFlag,
    MessageHeader,
    MessageKind,
    RemoteError,
    ServerNotice,
    ShardRange,
)
from reigen.kv.server.buffers import BufferPool, ValueAllocator
from reigen.kv.server.key_declarations import KeyDeclarations
from reigen.kv.server.reduction import PushData
from reigen.kv.server.requests import WorkerConnection, WorkerRequest, request_of
from reigen.kv.server.sample_leases import StoreLeases
from reigen.kv.server.shard import (
    AnswerRequest,
    RestoreStates,
    Shard,
    ShardId,
    ShardInstruction,
    ValueUpdate,
    shard_bytes,
)
from reigen.kv.server.snapshots import LoadedShard, SnapshotStorage, StoreSnapshot
from reigen.kv.server.stalls import WaitingWorker
from reigen.kv.server.store_settings import StoreSettings
from reigen.kv.server.thread_pool import ComputeTask, ComputeThreads
from reigen.optim import Optimizer

#: Work on fewer bytes is done at once, in a fraction of a millisecond: handing it on takes a good part of that.
_SMALL_BYTES = 2 << 20
#: Ranges of batches that a shard keeps, before it looks which ones all shards have.
_MAX_RANGES = 64
_ENCODED, _ENCODE_ANSWER = int(MessageFlag.ENCODED), int(MessageFlag.ENCODE_ANSWER)
#: Keys that are named in a message, and how much of a name.
_MOST_NAMES, _MAX_NAME_CHARACTERS = 3, 80
_log = logging.getLogger(__name__)


@dataclass
class ServerRoster:
    """Workers of an elastic job, as a server has heard of them from the scheduler.

    Attributes:
        has_begun: the first workers have come.
        first: of those, they that are still there: all stores expect them. Of a server that was started again: those
            that were there then.
        present: all that are there.
        processes: by worker, the incarnation of the latest process of which was heard.
        excluded: incarnations of lost processes, which may not go on if they live.
    """

    has_begun: bool = False
    first: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    processes: dict[int, int] = field(default_factory=dict)
    excluded: set[int] = field(default_factory=set)

    def begin(self, workers: Mapping[int, int], *, is_open: bool) -> None:
        """Take in who is there: workers, and the incarnations of their processes."""
        self.present = set(workers)
        self.processes.update(workers)
        if is_open and not self.has_begun:
            self.has_begun, self.first = True, set(self.present)

    def join(self, worker: int, incarnation: int) -> None:
        """Note that a process has become a worker."""
        self.present.add(worker)
        self.processes[worker] = incarnation

    def remove(self, worker: int, incarnation: int) -> None:
        """Note that a worker has gone, unless another process has its place already."""
        if self.processes.get(worker, incarnation) == incarnation:
            self.present.discard(worker)
            self.first.discard(worker)


@dataclass(frozen=True)
class ServerContext:
    """Parts that all stores of a server share.

    Attributes:
        buffers: where bodies are received.
        workers: the threads that compute.
        snapshots: where they are kept; None: nowhere.
        saves_always: a snapshot is taken before every acknowledgement.
        policy: what a lost worker leads to.
        roster: who is there, in an elastic job.
        deadline_seconds: how long a request may wait for others.
        acknowledges: receipts are told (PS_RESEND).
    """

    server: int
    num_workers: int
    memory: ValueAllocator
    buffers: BufferPool
    workers: ComputeThreads
    snapshots: SnapshotStorage | None = None
    saves_always: bool = False
    policy: LossPolicy = LossPolicy.ABORT
    roster: ServerRoster = field(default_factory=ServerRoster)
    deadline_seconds: float = 600.0
    acknowledges: bool = False


@dataclass(eq=False)
class ServerStore:
    """Store on one server.

    Attributes:
        number: of the store in its job.
        connections: of its workers, by number.
        incarnations: of the workers' processes, the latest ones.
        planned: shards that are to be here, and have no value yet; of an elastic job, with the workers of their first
            round.
        broken: the answer to every request from now on.
        aborted: the answer to all that concerns more than a shard; shards know it themselves.
        left: workers that have nothing more to push.
        losses: workers that are lost: on which host, and how it was noticed, in words.
        must_save: something has changed that is no shard's, and is in no snapshot.
        is_unsaved: such a snapshot could not be written.
        is_saving: a thread writes one; nothing leaves until it is there.
        layout_version: grows whenever a shard comes or goes.
    """

    number: int
    staleness: float
    context: ServerContext
    connections: dict[int, WorkerConnection] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    shards: dict[ShardId, Shard] = field(default_factory=dict)
    planned: dict[ShardId, tuple[KeySpec, ShardRange, tuple[int, ...]]] = field(default_factory=dict)
    broken: RemoteError | None = None
    aborted: RemoteError | None = None
    left: set[int] = field(default_factory=set)
    losses: dict[int, str] = field(default_factory=dict)
    must_save: bool = True
    is_unsaved: bool = False
    is_saving: bool = False
    layout_version: int = 0

    def __post_init__(self) -> None:
        self.declarations = KeyDeclarations(self)
        self.settings = StoreSettings(self, self.context.num_workers)
        self.leases = StoreLeases(self)

    # ---- workers

    @property
    def is_elastic(self) -> bool:
        return self.context.policy is LossPolicy.ELASTIC

    @property
    def has_begun(self) -> bool:
        return not self.is_elastic or self.context.roster.has_begun

    def expected(self) -> tuple[int, ...]:
        """The workers that the others wait for, ascending."""
        gone = set(self.left)
        if self.is_elastic:
            return tuple(sorted((self.context.roster.first | self.connections.keys()) - gone))
        if self.context.policy is LossPolicy.CONTINUE:
            gone |= set(self.losses)
        return tuple(worker for worker in range(self.context.num_workers) if worker not in gone)

    def connected(self, connection: WorkerConnection) -> None:
        """Take a worker's connection, perhaps another one, perhaps of another process in its place."""
        worker, before = connection.worker, self.connections.get(connection.worker)
        if before is not None:
            before.end()
            self._all(WorkerDisconnected(worker))
        self.connections[worker] = connection
        known, self.incarnations[worker] = self.incarnations.get(worker), connection.hello.incarnation
        if known is not None and known != connection.hello.incarnation:
            self.leases.release((worker, known))
        if self.is_elastic:
            if known != connection.hello.incarnation or not connection.hello.resumes:  # it asks to join each shard
                if known is not None and known != connection.hello.incarnation and worker not in self.left:
                    self.context.roster.excluded.add(known)
                self.left.discard(worker)
                self._all(WorkerLost(worker, LossPolicy.ELASTIC))
            self._settle()
        elif known is not None and known != connection.hello.incarnation:
            self.returned(worker, connection.hello.host)
        self.must_save = True

    def disconnected(self, connection: WorkerConnection) -> None:
        """Forget a connection that has ended."""
        connection.end()
        if self.connections.get(connection.worker) is connection:
            del self.connections[connection.worker]
            self._all(WorkerDisconnected(connection.worker))
            if self.is_elastic:
                self._settle()

    def has_left(self, worker: int, host: str) -> None:
        """Wait for a worker no more; it may have said goodbye to the process that this server was before."""
        self.leases.release((worker, self.incarnations.get(worker, 0)))
        if worker not in self.left:
            self.left.add(worker)
            self._all(WorkerLeft(worker))
            self._settle()
            self._notify(ServerNotice("left", worker, host, f"worker {worker} has left"))

    def lost(self, worker: int, host: str, reason: str, incarnation: int = 0) -> None:
        """Note that the scheduler has given a worker's process up; it may have been replaced in between."""
        self.leases.release((worker, incarnation or self.incarnations.get(worker, 0)))
        if worker in self.left or (incarnation and self.incarnations.get(worker, incarnation) != incarnation):
            return
        what = _describe_loss(worker, host, reason)
        if not self.is_elastic:  # where another process may have the place in the next moment
            self.losses[worker] = what
        failures = self._all(WorkerLost(worker, self.context.policy))
        problem = None
        if self.context.policy is LossPolicy.ABORT:
            problem = failures[0] if failures else RemoteError("PeerLostError", what, None, (worker,))
            self.aborted = self.aborted or RemoteError("PeerLostError", what, None, (worker,))
            self.settings.fail(problem)
            self.declarations.fail(problem)
        self._settle()
        self._notify(ServerNotice("lost", worker, host, problem.reason if problem else what, problem))

    def found(self, worker: int, host: str) -> None:
        """Note that a worker that was lost is there again: it was silent."""
        if self.losses.pop(worker, None) is not None:
            self._all(WorkerReappeared(worker))
            self.must_save = True
            self._notify_return(worker, host)

    def returned(self, worker: int, host: str) -> None:
        """Note that another process is there in place of a worker that was lost."""
        was_gone = self.losses.pop(worker, None) is not None or worker in self.left
        self.left.discard(worker)
        self._all(WorkerReturned(worker))
        if was_gone:
            self._notify_return(worker, host)

    def begin(self) -> None:
        """Answer the first workers of an elastic job, once they are all there."""
        self._settle()

    def find_lost(self, present: Mapping[int, int]) -> list[int]:
        """Note who of an elastic job was lost before this server was started again; return their incarnations.

        ``present``: by number, the incarnations of those that are there.
        """
        known = self.incarnations.items()
        lost = [(worker, one) for worker, one in known if worker not in self.left and present.get(worker) != one]
        for worker, incarnation in lost:
            self.lost(worker, "unknown", "it was lost before this server was started again", incarnation)
        return [incarnation for _, incarnation in lost]

    def note_named(self, worker: int) -> None:
        """Note that a worker of an elastic job has named all shards that it had joined."""
        for shard in list(self.shards.values()):
            if shard.engine.is_away(worker):
                self.handle_events(shard, WorkerLost(worker, LossPolicy.ELASTIC))

    def _settle(self) -> None:
        self.declarations.settle()
        self.settings.settle()
        self.must_save = True

    def _notify_return(self, worker: int, host: str) -> None:
        self._notify(ServerNotice("returned", worker, host, f"worker {worker} is there again, on host {host}"))

    def _notify(self, notice: ServerNotice) -> None:
        body = NOTICE_CODEC.encode(notice)
        for worker, connection in self.connections.items():
            if worker != notice.worker:
                connection.send(MessageHeader(MessageKind.NOTICE, store=self.number, body_bytes=len(body)), body)

    # ---- keys

    def plan_shards(
        self, key: int, spec: KeySpec, places: tuple[ShardRange, ...], workers: tuple[int, ...] = ()
    ) -> None:
        for shard_id in [one for one, shard in self.shards.items() if one[0] == key and shard.spec != spec]:
            self.layout_version += 1
            self.context.memory.retire(self.shards.pop(shard_id).value)
            if self.context.snapshots is not None:
                self.context.snapshots.forget_shard(self.number, shard_id)
        for shard_id in [one for one in self.planned if one[0] == key]:
            del self.planned[shard_id]
        for place in places:
            if place.server == self.context.server and (key, place.index) not in self.shards:
                self.planned[key, place.index] = (spec, place, workers)

    def has_pushes(self, key: int | None = None) -> bool:
        self.split_waiting(*self.shards.values())
        engines = [shard.engine for shard in self.shards.values() if key is None or shard.key == key]
        return any(engine.has(worker, 1) for engine in engines for worker in range(self.context.num_workers))

    def use(self, optimizer: Optimizer) -> None:
        for shard in self.shards.values():
            shard.use(optimizer)

    def make_shard(
        self,
        key: int,
        spec: KeySpec,
        place: ShardRange,
        workers: tuple[int, ...] = (),
        state: ConsistencyState | None = None,
    ) -> Shard:
        """Return a shard without a value yet, whose engine knows who has gone."""
        if state is None:
            present = self.context.roster.present.intersection(workers) if self.is_elastic else None
            engine = ConsistencyEngine(self.context.num_workers, self.staleness, present)
        else:
            engine = ConsistencyEngine.from_state(state, self.incarnations.keys() if self.is_elastic else None)
        for worker in self.left:
            engine.handle(WorkerLeft(worker))
        for worker in self.losses:
            engine.handle(WorkerLost(worker, self.context.policy))
        return Shard(key, spec, place, engine, self.context.memory.new(shard_bytes(spec, place)))

    def add(self, shard: Shard) -> None:
        """Add a shard that has its value."""
        self.shards[shard.id] = shard
        self.layout_version += 1
        shard.use(self.settings.optimizer)
        self.planned.pop(shard.id, None)
        if self.context.snapshots is not None:  # from now on another process can take this one's place
            shard.must_save = True
            self._advance(shard)

    # ---- requests for shards

    def shard_of(self, request: WorkerRequest) -> Shard:
        """Return the shard that a request is about, and note it there.

        Raises:
            ArgumentError: it is not here.
            WireError: it has elements of another type.
        """
        header = request.header
        shard = self.shards.get((header.key, header.shard))
        if shard is None:
            if (header.key, header.shard) in self.planned:
                raise ArgumentError(f"key {self.planned[header.key, header.shard][0].name!r} has no value yet")
            raise ArgumentError(
                f"there is no shard {header.shard} of a key {header.key} on server {self.context.server}; "
                "it was never initialised, or the server has lost it"
            )
        if header.dtype and header.dtype != DTYPE_NUMBERS[shard.spec.dtype]:
            raise WireError(f"elements of another type than those of key {shard.spec.name!r}")
        request.shard = shard
        return shard

    def refuse(self, request: WorkerRequest, error: ReigenError) -> None:
        """Answer a request with an error instead of carrying it out."""
        request.release_body(self.context.buffers)
        request.connection.refuse(request, error, None if request.shard is None else request.shard.spec.name)

    def handle_events(self, shard: Shard, *events: ConsistencyEvent) -> list[ConsistencyInstruction]:
        """Have events happen to a shard, and begin with the instructions that follow, which are returned."""
        if shard.waiting is not None:
            self.split_waiting(shard)
        return self._decide(shard, events)

    def _decide(self, shard: Shard, events: Sequence[ConsistencyEvent]) -> list[ConsistencyInstruction]:
        instructions: list[ConsistencyInstruction] = []
        for event in events:
            instructions += shard.engine.handle(event)
        shard.queue.extend(instructions)
        if self.context.snapshots is not None:
            shard.queue.append(shard.engine.state())
        self._advance(shard)
        return instructions

    def handle_parts(self, parts: Iterable[tuple[WorkerRequest, NDArray[np.uint8]]]) -> None:
        """Have pushes and pulls of single keys, with their elements, happen to shards for which nothing waits."""
        for part, elements in parts:
            if self.broken is not None:
                part.connection.refuse(part, self.broken)
                continue
            try:
                shard = self.shard_of(part)
                if part.header.kind in PUSH_KINDS:
                    shard.check_push(self.settings.optimizer)
                    if elements.nbytes != shard.num_bytes:
                        raise ArgumentError("the key has been declared again since this push")
                    part.contribution = PushData(elements.view(shard.dtype.storage))
                else:
                    part.release_body(self.context.buffers)
            except ReigenError as error:
                self.refuse(part, error)
            else:
                self._decide(shard, part.events())

    def split_waiting(self, *shards: Shard) -> None:
        """Have engines know of all requests for these shards that wait in batches."""
        for shard in shards:
            if shard.waiting is not None:
                self.handle_parts(shard.waiting.split())

    def _split_late(self, before: float) -> None:
        """Have engines know of all requests, if any has waited since ``before``."""
        if any(one.since <= before for each in self.connections.values() for one in each.open_requests.values()):
            self.split_waiting(*self.shards.values())

    def _all(self, event: ConsistencyEvent) -> list[RemoteError]:
        """Have something happen to all shards; returns the errors of the requests that fail of it."""
        failures = []
        for shard in list(self.shards.values()):
            failures += [
                self.problem_of(shard, one) for one in self.handle_events(shard, event) if isinstance(one, FailRequest)
            ]
        return failures

    # ---- instructions

    def enqueue(self, shard: Shard, *instructions: ShardInstruction) -> None:
        """Carry out instructions when all that has happened to a shard until now is carried out."""
        shard.queue.extend(instructions)
        self._advance(shard)

    def _advance(self, shard: Shard) -> None:
        """Carry out a shard's instructions, up to one that takes long."""
        while not shard.is_busy:
            if shard.must_save:
                self._save_shard(shard)
            elif shard.queue:
                instruction = shard.queue.popleft()
                # by type, since `match` asks one case after the other, and this is done several times for each request
                _CARRIED_OUT_BY[type(instruction)](self, shard, instruction)
            else:
                return

    def problem_of(self, shard: Shard, failed: FailRequest) -> RemoteError:
        """Return the error of a request that has failed."""
        kind = "DeadlineError" if failed.late else "PeerLostError" if failed.workers else "ArgumentError"
        reason = failed.reason
        if failed.late:
            reason += f"; nothing happened for {self.context.deadline_seconds:g} s"
        losses = [self.losses[one] for one in failed.workers if one in self.losses]
        return RemoteError(kind, "; ".join([reason, *losses]), shard.spec.name, failed.workers)

    # ---- what takes time

    def update(self, shard: Shard, update: ValueUpdate, applied: ConsistencyState) -> None:
        """Change a shard's value, to that of another state of its engine."""
        memory, optimizer = self.context.memory, self.settings.optimizer
        target = memory.target(shard.value)

        def done(error: BaseException | None) -> None:
            if error is not None:
                self.fail_all(shard, error)
                return
            shard.settle(target, memory)
            self._note_batches(shard, update.batches)
            shard.applied = applied
            shard.must_save = self.context.saves_always

        num_bytes = shard.num_bytes * (len(update.parts) + 1)
        self.compute([shard], lambda scratch: shard.change(update, optimizer, target, scratch), done, num_bytes)

    def skip(self, shard: Shard, applied: ConsistencyState) -> None:
        """Go on to another state of a shard's engine: the value has all batches that were pushed already."""
        shard.applied, shard.is_dirty = applied, True
        shard.must_save = self.context.saves_always

    def _note_batches(self, shard: Shard, batches: Sequence[int]) -> None:
        for batch in batches:
            shard.batches.add(batch)
        if shard.batches.num_ranges > _MAX_RANGES:
            self.leases.compact(shard.batches)

    def _save_shard(self, shard: Shard) -> None:
        shard.must_save = False
        snapshots = self.context.snapshots
        if snapshots is None or not shard.is_dirty:
            return

        def done(error: BaseException | None) -> None:
            if error is None:
                shard.is_dirty = snapshots.is_stale(self.number, shard.id)
                return
            _log.error("no snapshot of key %r: %s", shard.spec.name, str(error))
            if self.context.saves_always:
                self.fail_all(shard, error)

        self.compute([shard], lambda _: snapshots.save_shard(self.number, shard.id, shard.pack()), done, _SMALL_BYTES)

    def compute(
        self, shards: Sequence[Shard], task: ComputeTask, done: Callable[[BaseException | None], None], num_bytes: int
    ) -> None:
        """Have something computed, in another thread if it is long, then go on with the shards.

        Nothing else is done to the shards until then. ``done`` is called in this thread, with what the task raised;
        ``num_bytes`` is how much it goes through.
        """
        if num_bytes < _SMALL_BYTES:
            done(self.context.workers.now(task))
            return
        for shard in shards:
            shard.is_busy = True

        def ended(error: BaseException | None) -> None:
            for shard in shards:
                shard.is_busy = False
            done(error)
            for shard in shards:
                self._advance(shard)

        self.context.workers.begin(task, ended)

    def fail_all(self, shard: Shard, error: BaseException) -> None:
        """Break off, since a shard could not be updated: nothing of this store can be trusted any more."""
        traceback_text = "".join(traceback.format_exception(error))
        _log.error("key %r could not be updated: %s", shard.spec.name, traceback_text)
        reason = f"server could not update the value: {type(error).__name__}: {error}"
        problem = error if isinstance(error, ReigenError) else CollectiveError(reason)
        self.break_off(RemoteError.of(problem, shard.spec.name))

    def break_off(self, problem: RemoteError) -> None:
        """Answer every request with this error from now on; all workers get a notice."""
        self.broken = self.broken or problem
        for one in self.shards.values():
            one.queue.clear()
            one.waiting = None
        for connection in self.connections.values():
            for request in list(connection.open_requests.values()):
                connection.refuse(request, problem)
        self._notify(ServerNotice("problem", -1, "", problem.reason, problem))

    # ---- time

    def expire(self) -> None:
        """Fail what has waited too long."""
        before = time.monotonic() - self.context.deadline_seconds
        self._split_late(before)
        for connection in list(self.connections.values()):
            asked = [one for one in connection.unanswered() if one.shard is not None]
            late = {one.shard for one in asked if one.since <= before}
            # The latest first: what waits for a push of the same worker is to name the others, not that push, which
            # does not count any more once it has expired.
            for request in reversed([one for one in asked if one.shard in late]):
                tokens = [request] if request.pull_half is None else [request.pull_half, request]
                if request.shard is not None:
                    self.handle_events(request.shard, *map(RequestExpired, tokens))
        self.declarations.expire(before)
        self.settings.expire(before)
        self.leases.expire(before)

    def waiting(self, before: float) -> Iterator[WaitingWorker]:
        """Yield who has waited for other workers since ``before``, or longer."""
        self._split_late(before)
        asked = [one for each in self.connections.values() for one in each.unanswered()]
        for shard in {one.shard for one in asked if one.shard is not None and one.since <= before}:
            for wait in shard.engine.waits():
                yield WaitingWorker(f"key {shard.spec.name!r}", wait.worker, wait.workers, request_of(wait.token).since)
        yield from self.declarations.waiting()
        yield from self.settings.waiting()
        yield from self.leases.waiting()

    def save_all(self) -> None:
        """Begin with a snapshot of every shard that has changed; and have `save` try again if it failed."""
        self.must_save, self.is_unsaved = self.must_save or self.is_unsaved, False
        for shard in self.shards.values():
            shard.must_save = shard.is_dirty
            self._advance(shard)

    def save(self) -> None:
        """Save the facts of the store that are no shard's; where that waits for another process, in a thread."""
        snapshots = self.context.snapshots
        if snapshots is None or not self.must_save or self.is_saving:
            return
        self.must_save = False
        facts = store_facts(self)

        def done(error: BaseException | None) -> None:
            self.is_saving = False
            if error is None:
                self.must_save = self.must_save or snapshots.is_stale(self.number, None)
            else:
                _log.error("no snapshot of store %d: %s", self.number, str(error))
                self.is_unsaved = True
                if self.context.saves_always:  # what is acknowledged now would be lost
                    self.break_off(RemoteError.of(CollectiveError(f"server could not save a snapshot: {error}")))
            for connection in self.connections.values():
                connection.must_flush = True

        if snapshots.is_remote:
            self.is_saving = True
            self.context.workers.begin(lambda _: snapshots.save_store(self.number, facts), done)
        else:
            done(self.context.workers.now(lambda _: snapshots.save_store(self.number, facts)))

    def save_anew(self) -> None:
        """Save everything once more, since it is lost elsewhere."""
        self.must_save = True
        for shard in self.shards.values():
            shard.is_dirty = shard.must_save = True
            self._advance(shard)

    def restore(self, facts: StoreSnapshot, shards: Iterable[LoadedShard]) -> None:
        """Take over a snapshot, before anything else happens; raises ReigenError if it makes no sense."""
        self.left = set(facts.left)
        reason = "it was lost before this server was restarted"
        self.losses = {worker: _describe_loss(worker, "unknown", reason) for worker in facts.missed}
        self.incarnations = dict(facts.incarnations)
        self.context.roster.excluded.update(facts.excluded)
        self.settings.restore(facts.settings)
        self.leases.restore(facts.ledgers)
        for key, spec, places in facts.keys:
            self.declarations.restore(key, spec, places)
        for snapshot, arrays in shards:
            shard = self.make_shard(snapshot.key, snapshot.spec, snapshot.place, state=snapshot.applied)
            shard.restore(snapshot, arrays, self.settings.optimizer)
            self.shards[shard.id] = shard
            self.declarations.remember(shard.key, shard.spec)


def store_facts(store: ServerStore) -> StoreSnapshot:
    """Return the facts of a store that are no shard's, for a snapshot."""
    staleness = None if math.isinf(store.staleness) else int(store.staleness)
    missed = tuple(store.losses) if store.context.policy is LossPolicy.CONTINUE else ()
    return StoreSnapshot(
        staleness, store.settings.state(), store.declarations.initialised(), tuple(sorted(store.left)), missed,
        dict(store.incarnations), tuple(sorted(store.context.roster.excluded)), store.leases.state(),
    )  # fmt: skip


def is_at_rest(store: ServerStore) -> bool:
    """Return whether each value is that of its engine's state, and nothing is being computed or saved."""
    return not store.is_saving and not any(shard.is_busy or shard.queue for shard in store.shards.values())


def describe_keys(names: Collection[int | str]) -> str:
    """Describe keys by their number and a few names: ``5 keys: 'a', 'b', 'c' and 2 others``."""
    ordered = sorted(names, key=str)
    num_shown = _MOST_NAMES if len(ordered) > _MOST_NAMES + 1 else len(ordered)
    some = [repr(name)[:_MAX_NAME_CHARACTERS] for name in ordered[:num_shown]]
    others = f" and {len(ordered) - num_shown} others" if num_shown < len(ordered) else ""
    what = f"{len(ordered)} key{'s' if len(ordered) != 1 else ''}"
    return f"{what}: {', '.join(some)}{others}" if some else what


def _describe_loss(worker: int, host: str, reason: str) -> str:
    return f"worker {worker} on host {host} is lost: {reason}"


# ---- what each instruction does


def _combine(store: ServerStore, shard: Shard, what: CombineRound) -> None:
    applied = shard.applied.over((what.round,) * store.context.num_workers)
    _update(store, shard, what.tokens, applied, what.scale)


def _update(
    store: ServerStore,
    shard: Shard,
    tokens: Sequence[RequestToken],
    applied: ConsistencyState,
    scale: float = 1.0,
    num_update: int | None = None,
) -> None:
    """Update a value by pushes, but for those of leased batches that it has already."""
    batches = [request_of(token).header.batch for token in tokens]
    if any(batches):
        kept = select_unapplied(batches, shard.batches)
        if not kept:
            store.skip(shard, applied)
            return
        tokens, batches = [tokens[place] for place in kept], [batches[place] for place in kept]
    update = ValueUpdate([_push_data(token) for token in tokens], scale, num_update, list(filter(None, batches)))
    store.update(shard, update, applied)


def _note_state(store: ServerStore, shard: Shard, state: ConsistencyState) -> None:
    shard.is_dirty = shard.is_dirty or shard.applied != state
    shard.applied = state


def _drop(store: ServerStore, shard: Shard, what: DropRequest) -> None:
    if isinstance(what.token, WorkerRequest):
        what.token.release_body(store.context.buffers)


def _apply(store: ServerStore, shard: Shard, what: ApplyPush) -> None:
    worker, round, token = what.worker, what.round, what.token
    done = tuple(round if one == worker else n for one, n in enumerate(shard.applied.done))
    begin = 0 if store.settings.optimizer is None else store.settings.optimizer.begin_num_update
    num_update = shard.num_earlier + begin + round
    _update(store, shard, [token], shard.applied.over(done), num_update=num_update)


def _report_forgotten(store: ServerStore, shard: Shard, what: RoundsForgotten) -> None:
    owner = "" if what.worker is None else f" of worker {what.worker}"
    _log.warning(
        "key %r, shard %d: rounds %d to %d%s were acknowledged before this server was restarted and are in no "
        "snapshot: they are lost", shard.spec.name, shard.place.index, what.first, what.last, owner,
    )  # fmt: skip


def _acknowledge(store: ServerStore, shard: Shard, what: AcknowledgePush | RepeatAcknowledgement) -> None:
    request = request_of(what.token)
    request.release_body(store.context.buffers)
    if request.header.kind != MessageKind.PUSHPULL:  # that is answered as a pull
        request.connection.answer(request)


def _fail(store: ServerStore, shard: Shard, what: FailRequest) -> None:
    request = request_of(what.token)
    request.release_body(store.context.buffers)
    request.connection.refuse(request, store.problem_of(shard, what))


def _answer_request(store: ServerStore, shard: Shard, what: AnswerRequest) -> None:
    request = request_of(what.token)
    if request.header.kind == MessageKind.GET_STATES:
        request.connection.answer(request, MessageKind.VALUE, shard.pack_states(store.settings.optimizer))
    else:
        request.connection.answer(request)


def _restore_states(store: ServerStore, shard: Shard, what: RestoreStates) -> None:
    request = request_of(what.token)
    try:
        shard.put_states(what.body, store.settings.optimizer)
        shard.must_save = store.context.saves_always
    except ReigenError as error:
        request.connection.refuse(request, error, shard.spec.name)
    request.release_body(store.context.buffers)


def _answer_pull(store: ServerStore, shard: Shard, what: AnswerPull) -> None:
    request, memory = request_of(what.token), store.context.memory
    dtype, encoder = DTYPE_NUMBERS[shard.spec.dtype], store.settings.encoder
    if not request.header.flags & _ENCODE_ANSWER or store.settings.optimizer is not None:
        encoder = None
    if request.rows is not None:
        rows = memory.new(len(request.rows) * shard.row_length * shard.dtype.itemsize)
        shard.rows(request.rows, rows.array)
        request.connection.answer_value(request, rows, dtype)
        memory.retire(rows)
    elif encoder is not None and shard.is_sum:
        codes = shard.encoded(encoder)
        if shard.is_dirty and store.context.saves_always:  # with what these codes lack, before any worker has them
            shard.must_save = True
            shard.queue.appendleft(what)
            return
        request.connection.answer(request, MessageKind.VALUE, codes, _ENCODED)
    else:
        request.connection.answer_value(request, shard.value, dtype)


def _push_data(token: RequestToken) -> PushData:
    data = request_of(token).contribution
    assert data is not None, "a push is used once, and not before its instruction is carried out"
    return data


_CARRIED_OUT_BY: Mapping[type, Callable[[ServerStore, Shard, Any], None]] = {
    AcknowledgePush: _acknowledge,
    RepeatAcknowledgement: _acknowledge,
    AnswerPull: _answer_pull,
    CombineRound: _combine,
    ApplyPush: _apply,
    ConsistencyState: _note_state,
    FailRequest: _fail,
    DropRequest: _drop,
    RoundsForgotten: _report_forgotten,
    RoundRecovered: lambda store, shard, what: None,  # the answer to RESUME, which has been read
    AnswerRequest: _answer_request,
    RestoreStates: _restore_states,
}
