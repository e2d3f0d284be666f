"""Keys at their home server, and where rank 0 wants their shards: steps (c) of `reigen.kv.protocol`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from reigen.errors import ArgumentError, MismatchError, WireError
from reigen.kv.protocol import (
    DECLARED_CODEC,
    DeclareKey,
    KeyDeclared,
    KeySpec,
    MessageFlag,
    MessageKind,
    RemoteError,
    ShardRange,
)
from reigen.kv.server.consensus import ConsensusStore, WorkerConsensus
from reigen.kv.server.requests import WorkerRequest
from reigen.kv.server.stalls import WaitingWorker
from reigen.kv.values import DENSE, ROW_SPARSE, key_id
from reigen.types import DTYPES

#: More than any host has memory for, and few enough to be counted in 64 bits as bytes.
_MOST_ELEMENTS = 1 << 40


@dataclass
class _KeyRecord:
    """Key at its home.

    Attributes:
        consensus: of all workers, on what the key is.
        places: the shards, as the leader said.
        agreed: their proposal, once all have made the same.
        is_initialised: the leader has sent all shards.
        leader: the worker that does so: rank 0, or one of those of an elastic job; None: it has gone.
        proposed: by worker of an elastic job, the shards as it would have them.
        workers: of an elastic job, those that had declared the key.
    """

    consensus: WorkerConsensus
    generation: int = 0
    places: tuple[ShardRange, ...] = ()
    agreed: KeySpec | None = None
    is_initialised: bool = False
    leader: int | None = 0
    proposed: dict[int, tuple[ShardRange, ...]] = field(default_factory=dict)
    workers: tuple[int, ...] = ()


class KeyDeclarations:
    """Declared keys of a store."""

    def __init__(self, store: ConsensusStore) -> None:
        self._store = store
        #: keys that have their home here
        self._records: dict[int, _KeyRecord] = {}
        #: keys of which shards are here, and the latest generation
        self._known: dict[int, KeySpec] = {}

    def declare(self, request: WorkerRequest, declare: DeclareKey) -> None:
        """Take in a DECLARE, which is answered now or later; its errors are for this worker alone."""
        key, spec = request.header.key, declare.spec
        if key_id(spec.name) != key:
            raise WireError(f"the key {spec.name!r} has another id than {key}")
        _check_declaration(declare)
        known = self._known.get(key)
        if known is not None and known.name != spec.name:
            raise ArgumentError(
                f"the keys {known.name!r} and {spec.name!r} have the same number of 64 bits; rename one of them"
            )
        if not request.header.flags & MessageFlag.HOME:
            if request.connection.worker != 0 and not self._store.is_elastic:
                raise WireError(f"worker {request.connection.worker} says where the shards of {spec.name!r} are")
            if known is not None and known != spec and self._store.has_pushes(key):
                raise ArgumentError(f"the key {spec.name!r} was pushed; it cannot be declared again")
            self._lay_out(key, spec, declare.places, declare.workers)
            self._answer(request, declare.places or (), was_initialised=False)
            return
        record = self._records.get(key)
        if record is not None and (record.is_initialised or (record.agreed and self._store.is_elastic)):
            # a worker that takes another's place does not know how often it was declared anew
            spec = msgspec.structs.replace(spec, generation=max(spec.generation, record.generation))
        if record is None or spec.generation > record.generation:
            if record is not None and self._store.has_pushes(key):
                raise ArgumentError(f"the key {spec.name!r} was pushed; it cannot be declared again")
            what = f"what the key {spec.name!r} is"
            leader = None if self._store.is_elastic else 0
            record = self._records[key] = _KeyRecord(WorkerConsensus(what), spec.generation, leader=leader)
        self._at_home(request, record, spec, declare)

    def settle(self) -> None:
        """Answer who waited for a worker that is not expected any more."""
        for key, record in list(self._records.items()):
            if self._store.is_elastic:
                self._decide_elastic(key, record)
            elif record.agreed is None or (0 not in self._store.expected() and not record.is_initialised):
                self._decide(key, record)

    def fail(self, problem: RemoteError) -> None:
        """Answer all that wait with an error."""
        for record in self._records.values():
            record.consensus.fail(problem)

    def expire(self, before: float) -> None:
        """Answer who has waited since ``before`` with an error that names the missing workers."""
        for record in self._records.values():
            missing = self._store.expected() if record.agreed is None else _leaders(record)
            record.consensus.expire(before, missing)

    def waiting(self) -> Iterator[WaitingWorker]:
        """Yield the workers that wait for others to declare a key, or for worker 0 to send its value."""
        for record in self._records.values():
            yield from record.consensus.waits(self._store.expected() if record.agreed is None else _leaders(record))

    def initialised(self) -> list[tuple[int, KeySpec, tuple[ShardRange, ...]]]:
        """Return the keys that have their home here and can be used, for a snapshot."""
        records = self._records.items()
        return [(key, one.agreed, one.places) for key, one in records if one.agreed and one.is_initialised]

    def restore(self, key: int, spec: KeySpec, places: tuple[ShardRange, ...]) -> None:
        """Take over a key of `initialised`."""
        consensus = WorkerConsensus(f"what the key {spec.name!r} is")
        self._records[key] = _KeyRecord(consensus, spec.generation, places, spec, is_initialised=True)
        self._known[key] = spec

    def remember(self, key: int, spec: KeySpec) -> None:
        """Note that a shard of a key is here."""
        self._known[key] = spec

    def _at_home(self, request: WorkerRequest, record: _KeyRecord, spec: KeySpec, declare: DeclareKey) -> None:
        worker, key = request.connection.worker, request.header.key
        if record.agreed is None:
            if self._store.is_elastic:
                record.proposed[worker] = declare.places or ()
                record.consensus.take(request, spec)
                self._decide_elastic(key, record)
                return
            if worker == 0:
                if not declare.places:
                    raise WireError(f"worker 0 does not say where the shards of the key {spec.name!r} are")
                record.places = declare.places
            record.consensus.take(request, spec)
            self._decide(key, record)
            return
        if spec != record.agreed:
            raise MismatchError(
                "this worker means something else by the key than all did before",
                ranks=[worker],
                details={worker: f"{spec}; before it was {record.agreed}"},
            )
        if worker == record.leader and declare.is_initialised and not record.is_initialised:
            record.is_initialised = self._store.must_save = True
            for each in record.consensus.pop_waiting():
                self._answer(each, record.places, was_initialised=False)
        if record.is_initialised or worker == record.leader:
            was_initialised = record.is_initialised and not declare.is_initialised
            is_first = self._store.is_elastic and not record.is_initialised  # perhaps in the place of one that was
            self._answer(
                request, record.places, was_initialised=was_initialised, is_first=is_first, workers=record.workers
            )
        else:
            record.consensus.waiting[worker] = request
            if self._store.is_elastic:
                self._decide_elastic(key, record)

    def _decide_elastic(self, key: int, record: _KeyRecord) -> None:
        """Settle the spec of a key of an elastic job, and the worker that sends its value, as far as they are open."""
        consensus, expected = record.consensus, self._store.expected()
        if record.agreed is None and self._store.has_begun:
            workers = tuple(worker for worker in consensus.proposals if worker in expected)
            if (spec := consensus.settle(expected)) is None or not workers:
                return
            record.agreed, record.workers = spec, tuple(sorted(workers))
            record.places = record.proposed[min(record.workers)]
            self._lay_out(key, spec, record.places, record.workers)
        if record.agreed is None or record.is_initialised or record.leader in expected:
            return
        candidates = [worker for worker in consensus.waiting if worker in expected]
        record.leader = min(candidates, default=None)
        if record.leader is not None:
            request = consensus.waiting.pop(record.leader)
            self._answer(request, record.places, was_initialised=False, workers=record.workers, is_first=True)

    def _decide(self, key: int, record: _KeyRecord) -> None:
        consensus, expected = record.consensus, self._store.expected()
        if 0 not in expected:
            if consensus.waiting:
                reason = f"{consensus.what}: worker 0, whose value counts, has gone"
                consensus.fail(RemoteError("PeerLostError", reason, None, (0,)))
        elif (spec := consensus.settle(expected)) is not None:
            record.agreed = spec
            self._lay_out(key, spec, record.places)
            first = consensus.waiting.pop(0, None)
            if first is not None:
                self._answer(first, record.places, was_initialised=False)

    def _lay_out(
        self, key: int, spec: KeySpec, places: tuple[ShardRange, ...] | None, workers: tuple[int, ...] = ()
    ) -> None:
        if not places:
            raise WireError(f"nothing is said of where the shards of the key {spec.name!r} are")
        before = self._known.get(key)
        if before is None or before.generation <= spec.generation:
            self._known[key] = spec
            self._store.plan_shards(key, spec, places, workers)

    @staticmethod
    def _answer(
        request: WorkerRequest,
        places: tuple[ShardRange, ...],
        *,
        was_initialised: bool,
        is_first: bool = False,
        workers: tuple[int, ...] = (),
    ) -> None:
        answer = KeyDeclared(places, was_initialised, is_first, workers)
        request.connection.answer(request, MessageKind.DECLARED, DECLARED_CODEC.encode(answer))


def _leaders(record: _KeyRecord) -> tuple[int, ...]:
    """Return the worker whose value counts, if there is one."""
    return () if record.leader is None else (record.leader,)


def _check_declaration(declare: DeclareKey) -> None:
    """Raise WireError where no worker means that."""
    spec, places = declare.spec, declare.places or ()
    num_elements = math.prod(spec.shape)
    is_known = spec.dtype in DTYPES and spec.stype in {DENSE, ROW_SPARSE}
    if not is_known or min(spec.shape, default=0) < 0 or spec.generation < 0 or num_elements > _MOST_ELEMENTS:
        raise WireError(f"a key like no other: {spec}")
    row_elements = max(1, math.prod(spec.shape[1:])) if spec.stype == ROW_SPARSE else 1
    if len({place.index for place in places}) < len(places):
        raise WireError(f"shards of the key {spec.name!r} that are the same")
    for place in places:
        is_shard = 0 <= place.begin <= place.end <= num_elements and 0 <= place.index < 1 << 32
        if not is_shard or place.begin % row_elements or place.end % row_elements:
            raise WireError(f"a shard that is no part of the key {spec}: {place}")
