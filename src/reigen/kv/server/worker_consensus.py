"""What all workers of a store say alike, on the server that hears it: keys at their home, and the store's settings.

The steps of a declaration stand in `reigen.kv.protocol` (c).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from reigen.errors import ArgumentError, DeadlineError, MismatchError, WireError
from reigen.kv.keys import key_id
from reigen.kv.protocol import (
    DECLARED_CODEC,
    DeclareKey,
    KeyDeclared,
    MessageFlag,
    MessageKind,
    RemoteError,
    ShardRange,
)
from reigen.kv.server.consensus import Consensus
from reigen.kv.server.requests import WorkerRequest
from reigen.kv.server.shard import KeySpec
from reigen.kv.server.stalls import WaitingWorker
from reigen.kv.values import DENSE, ROW_SPARSE
from reigen.optim import Optimizer
from reigen.types import DTYPES

#: More than any machine has memory for, and few enough to be counted in 64 bits as bytes.
_MOST_ELEMENTS = 1 << 40


class ConsensusStore(Protocol):
    """What a meeting needs of its store.

    Attributes:
        must_save: what was agreed on belongs into the next snapshot.
    """

    must_save: bool

    def expected(self) -> tuple[int, ...]:
        """The workers whose word counts, ascending."""

    def plan_shards(self, key: int, facts: KeySpec, places: tuple[ShardRange, ...]) -> None:
        """The shards of a key are known; those of earlier generations are gone."""

    def has_pushes(self, key: int | None = None) -> bool:
        """Whether a shard that is here, of that key or of any, has been pushed."""

    def use(self, optimizer: Optimizer) -> None:
        """The store's optimizer is known.

        Raises:
            ReigenError: it cannot update what is stored.
        """


@dataclass
class WorkerConsensus:
    """Workers say one thing; who has said it waits until all have.

    Attributes:
        agreement: what they say.
        waiting: their requests.
        withdrawn: workers that had said it when somebody's deadline was over, and have not said it again.
    """

    agreement: Consensus[Any]
    waiting: dict[int, WorkerRequest] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)

    def say(self, request: WorkerRequest, word: Any) -> None:
        """A worker's word."""
        worker = request.connection.worker
        self.agreement.say(worker, word)
        self.withdrawn.discard(worker)
        self.waiting[worker] = request

    def decide(self, expected: Collection[int], agreed: Callable[[Any], None]) -> None:
        """Answer everybody with an error if they disagree; call ``agreed`` with the word that all have said."""
        word, error = self.agreement.decide(expected)
        if error is not None:
            self.fail(RemoteError.of(error))
        elif word is not None:
            agreed(word)

    def fail(self, problem: RemoteError) -> None:
        """Answer all that wait with an error; they may say it again."""
        self.agreement.words.clear()
        waiting, self.waiting = self.waiting, {}
        for request in waiting.values():
            request.connection.refuse(request, problem)

    def waits(self, expected: Collection[int]) -> Iterator[WaitingWorker]:
        """Who waits for whom."""
        missing = self._missing(expected)
        for worker, request in self.waiting.items():
            yield WaitingWorker(self.agreement.what, worker, missing, request.since)

    def expire(self, before: float, expected: Collection[int]) -> None:
        """Give up if somebody has waited since ``before``."""
        if any(request.since < before for request in self.waiting.values()):
            missing = self._missing(expected)
            self.withdrawn.update(self.waiting)
            names = ", ".join(f"worker {number}" for number in sorted(missing))
            error = DeadlineError(
                f"{self.agreement.what}: not all workers have said it; missing: {names}", ranks=missing
            )
            self.fail(RemoteError.of(error))

    def _missing(self, expected: Collection[int]) -> tuple[int, ...]:
        """Who has not said it; who came and was told that others did not, only where there is nobody else."""
        missing = self.agreement.missing(expected)
        return tuple(worker for worker in missing if worker not in self.withdrawn) or missing


@dataclass
class _KeyRecord:
    """A key at its home.

    Attributes:
        places: the shards, as rank 0 said.
        agreed: what all workers have said, once they have.
        is_initialised: rank 0 has sent all shards.
    """

    meeting: WorkerConsensus
    generation: int = 0
    places: tuple[ShardRange, ...] = ()
    agreed: KeySpec | None = None
    is_initialised: bool = False


class KeyDeclarations:
    """The keys of a store that this server has heard of.

    Args:
        host: the store.
    """

    def __init__(self, host: ConsensusStore) -> None:
        self._host = host
        self._records: dict[int, _KeyRecord] = {}
        #: keys of which shards are here, and the latest generation
        self._known: dict[int, KeySpec] = {}

    def declare(self, request: WorkerRequest, declare: DeclareKey) -> None:
        """Take in a DECLARE; it is answered now or later.

        Raises:
            ReigenError: what is told to this worker alone.
        """
        key, facts = request.header.key, _key_spec(declare)
        if key_id(declare.name) != key:
            raise WireError(f"the key {declare.name!r} has another id than {key}")
        _check_declaration(declare)
        known = self._known.get(key)
        if known is not None and known.name != facts.name:
            raise ArgumentError(
                f"the keys {known.name!r} and {facts.name!r} have the same number of 64 bits; rename one of them"
            )
        if not request.header.flags & MessageFlag.HOME:
            if request.connection.worker != 0:
                raise WireError(f"worker {request.connection.worker} says where the shards of {facts.name!r} are")
            if known is not None and known != facts and self._host.has_pushes(key):
                raise ArgumentError(f"the key {facts.name!r} was pushed; it cannot be declared anew")
            self._lay_out(key, facts, declare.places)
            self._answer(request, declare.places or (), was_initialised=False)
            return
        record = self._records.get(key)
        if record is not None and record.is_initialised:
            # a worker that takes another's place does not know how often it was declared anew
            facts = msgspec.structs.replace(facts, generation=max(facts.generation, record.generation))
        if record is None or declare.generation > record.generation:
            if record is not None and self._host.has_pushes(key):
                raise ArgumentError(f"the key {facts.name!r} was pushed; it cannot be declared anew")
            what = f"what the key {facts.name!r} is"
            record = self._records[key] = _KeyRecord(WorkerConsensus(Consensus(what)), declare.generation)
        self._at_home(request, record, facts, declare)

    def settle(self) -> None:
        """The expected workers are others now: answer who waited for one that is not any more."""
        for key, record in list(self._records.items()):
            if record.agreed is None or (0 not in self._host.expected() and not record.is_initialised):
                self._decide(key, record)

    def fail(self, problem: RemoteError) -> None:
        """Answer all that wait with an error."""
        for record in self._records.values():
            record.meeting.fail(problem)

    def expire(self, before: float) -> None:
        """Answer who has waited since ``before`` with an error that names the missing workers."""
        for record in self._records.values():
            missing = self._host.expected() if record.agreed is None else (0,)
            record.meeting.expire(before, missing)

    def waiting(self) -> Iterator[WaitingWorker]:
        """Who waits for whom to say what a key is, or for worker 0 to send its value."""
        for record in self._records.values():
            yield from record.meeting.waits(self._host.expected() if record.agreed is None else (0,))

    def initialised(self) -> list[tuple[int, KeySpec, tuple[ShardRange, ...]]]:
        """The keys that have their home here and can be used, for a snapshot."""
        records = self._records.items()
        return [(key, one.agreed, one.places) for key, one in records if one.agreed and one.is_initialised]

    def restore(self, key: int, facts: KeySpec, places: tuple[ShardRange, ...]) -> None:
        """Take over what `initialised` told."""
        meeting = WorkerConsensus(Consensus(f"what the key {facts.name!r} is"))
        self._records[key] = _KeyRecord(meeting, facts.generation, places, facts, is_initialised=True)
        self._known[key] = facts

    def remember(self, key: int, facts: KeySpec) -> None:
        """A shard of a key is here."""
        self._known[key] = facts

    def _at_home(self, request: WorkerRequest, record: _KeyRecord, facts: KeySpec, declare: DeclareKey) -> None:
        worker, key = request.connection.worker, request.header.key
        if record.agreed is None:
            if worker == 0:
                if not declare.places:
                    raise WireError(f"worker 0 does not say where the shards of the key {facts.name!r} are")
                record.places = declare.places
            record.meeting.say(request, facts)
            self._decide(key, record)
            return
        if facts != record.agreed:
            raise MismatchError(
                "this worker means something else by the key than all did before",
                ranks=[worker],
                details={worker: f"{facts}; before it was {record.agreed}"},
            )
        if worker == 0 and declare.is_initialised and not record.is_initialised:
            record.is_initialised = self._host.must_save = True
            self._answer_all(record)
        if record.is_initialised or worker == 0:
            self._answer(request, record.places, was_initialised=record.is_initialised and not declare.is_initialised)
        else:
            record.meeting.waiting[worker] = request

    def _decide(self, key: int, record: _KeyRecord) -> None:
        def agreed(facts: KeySpec) -> None:
            record.agreed = facts
            record.meeting.agreement.words.clear()
            self._lay_out(key, facts, record.places)
            first = record.meeting.waiting.pop(0, None)
            if first is not None:
                self._answer(first, record.places, was_initialised=False)

        expected = self._host.expected()
        if 0 in expected:
            record.meeting.decide(expected, agreed)
        elif record.meeting.waiting:
            reason = f"{record.meeting.agreement.what}: worker 0, whose value counts, has gone"
            record.meeting.fail(RemoteError("PeerLostError", reason, None, (0,)))

    def _lay_out(self, key: int, facts: KeySpec, places: tuple[ShardRange, ...] | None) -> None:
        if not places:
            raise WireError(f"nothing is said of where the shards of the key {facts.name!r} are")
        before = self._known.get(key)
        if before is None or before.generation <= facts.generation:
            self._known[key] = facts
            self._host.plan_shards(key, facts, places)

    def _answer_all(self, record: _KeyRecord) -> None:
        waiting, record.meeting.waiting = record.meeting.waiting, {}
        for request in waiting.values():
            self._answer(request, record.places, was_initialised=False)

    @staticmethod
    def _answer(request: WorkerRequest, places: tuple[ShardRange, ...], *, was_initialised: bool) -> None:
        request.connection.answer(
            request, MessageKind.DECLARED, DECLARED_CODEC.encode(KeyDeclared(places, was_initialised))
        )


def _check_declaration(declare: DeclareKey) -> None:
    """Raise WireError where no worker means that."""
    num_elements = math.prod(declare.shape)
    is_known = declare.dtype in DTYPES and declare.stype in {DENSE, ROW_SPARSE}
    if not is_known or min(declare.shape, default=0) < 0 or declare.generation < 0 or num_elements > _MOST_ELEMENTS:
        raise WireError(f"a key like no other: {_key_spec(declare)}")
    grain = max(1, math.prod(declare.shape[1:])) if declare.stype == ROW_SPARSE else 1
    places = declare.places or ()
    if len({place.index for place in places}) < len(places):
        raise WireError(f"shards of the key {declare.name!r} that are the same")
    for place in places:
        is_shard = 0 <= place.begin <= place.end <= num_elements and 0 <= place.index < 1 << 32
        if not is_shard or place.begin % grain or place.end % grain:
            raise WireError(f"a shard that is no part of the key {_key_spec(declare)}: {place}")


def _key_spec(declare: DeclareKey) -> KeySpec:
    return KeySpec(declare.name, declare.shape, declare.dtype, declare.stype, declare.generation)
