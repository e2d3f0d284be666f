"""Every rank's side of negotiation; the protocol stands in `reigen.engine.coordinator`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from reigen.engine.counters import EngineCounters
from reigen.engine.messages import (
    Announcement,
    CacheEviction,
    ErrorCause,
    ErrorResponse,
    JobAbort,
    Operation,
    OperationKind,
    RankShutdown,
    Report,
    Response,
    ResponseList,
    ShutdownRequest,
    SubmitRequest,
    TunedParameters,
)
from reigen.errors import CollectiveError, DeadlineError, DuplicateNameError, JoinedError, MismatchError, PeerLostError

_ERRORS: dict[ErrorCause, type[CollectiveError]] = {
    ErrorCause.MISMATCH: MismatchError,
    ErrorCause.LATE: DeadlineError,
    ErrorCause.JOINED: JoinedError,
}


class ExecuteBatch(msgspec.Struct, frozen=True):
    """Instruction: execute these together, now; where this rank did not submit, with neutral elements."""

    batch: tuple[tuple[Operation, Response], ...]


@dataclass(frozen=True, slots=True)
class FailOperation:
    """Instruction: the submission under this name has failed.

    Attributes:
        name: of the submission.
        error: says why.
        is_release: it was to release memory, for which no program waits.
    """

    name: str
    error: CollectiveError
    is_release: bool = False


#: The last one: from now on these are the parameters.
Instruction = ExecuteBatch | FailOperation | TunedParameters


class CachedResponse(msgspec.Struct, frozen=True):
    """A response that may be asked for by its number, and this rank's operation."""

    slot: int
    operation: Operation
    response: Response


class _PendingRequest(msgspec.Struct):
    """Submission that has not been answered; ``slot`` if it was reported by that number."""

    operation: Operation
    slot: int


class RankController:
    """One rank's side of the protocol."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        #: counts hits and misses of the response cache
        self.counters = EngineCounters()
        #: submitted and not answered, in order of submission
        self.pending: dict[str, _PendingRequest] = {}
        #: what to say to the coordinator next
        self.outgoing: list[Report] = []
        #: why nothing works any more, once it does not
        self.broken: CollectiveError | None = None
        #: responses by name, and by slot; both hold the same entries
        self.cached: dict[str, CachedResponse] = {}
        self._by_slot: dict[int, CachedResponse] = {}
        #: process sets of which this rank is a member
        self._sets = {0}

    def submit(self, operation: Operation) -> None:
        """Step A.

        Raises:
            DuplicateNameError: the name is pending.
            CollectiveError: a rank was lost or has left before.
        """
        name = operation.name
        if self.broken is not None:
            raise self.broken.of(name)
        if name in self.pending:
            raise DuplicateNameError(name)
        cached = self.cached.get(name)
        if cached is not None and cached.operation == operation:
            self.pending[name] = _PendingRequest(operation, cached.slot)
            self.outgoing.append(cached.slot)
            self.counters.cache_hits += 1
        else:
            self.counters.cache_misses += 1
            self.pending[name] = _PendingRequest(operation, -1)
            self.outgoing.append(SubmitRequest(operation))

    def submitted_eagerly(self, cached: CachedResponse) -> None:
        """Step O: the coordinator knows, or will, that this rank is ready; nothing else is pending."""
        self.pending[cached.operation.name] = _PendingRequest(cached.operation, cached.slot)
        self.counters.cache_hits += 1

    def answered_eagerly(self, name: str) -> None:
        """Step O: it is being carried out."""
        del self.pending[name]

    def receive(self, announcement: Announcement) -> list[Instruction]:
        """Take in an announcement; returns what to do, in order."""
        if self.broken is not None:
            return []
        if isinstance(announcement, ResponseList):
            found: list[Instruction] = []  # of process sets that this rank is in (step I); a batch is of one set
            for batch in announcement.batches:
                resolved = []
                for item in batch:
                    if not isinstance(item, int):
                        if item.process_set in self._sets:
                            resolved.append(self._resolve(item))
                    elif (cached := self._by_slot.get(item)) is not None:
                        del self.pending[cached.operation.name]
                        resolved.append((cached.operation, cached.response))
                if resolved:
                    found.append(ExecuteBatch(tuple(resolved)))
            return found
        return self._receive_rare(announcement)

    def _receive_rare(self, announcement: Announcement) -> list[Instruction]:
        """Take in messages that do not come with every collective."""
        match announcement:
            case ErrorResponse(name, cause, reason, submitted, at_fault, details):
                if self.rank not in submitted:
                    return []
                is_release = self.pending.pop(name).operation.kind is OperationKind.FREE
                error = _ERRORS[cause](reason, tensor=name, ranks=at_fault, details=dict(details))
                return [FailOperation(name, error, is_release)]
            case CacheEviction(slots):
                for slot in slots:
                    self._forget(slot)
            case RankShutdown(rank):
                if rank != self.rank:
                    error = PeerLostError(
                        f"rank {rank} has left the job (shutdown, or the end of the script)", ranks=(rank,)
                    )
                    error.has_left = True
                    return self.lose(error)
            case TunedParameters():
                return [announcement]
            case JobAbort():
                return self.lose(abort_error(announcement))
        return []

    def lose(self, error: CollectiveError) -> list[Instruction]:
        """Steps G and H: nothing will be answered any more."""
        if self.broken is not None:
            return []
        self.broken = error
        failed = [FailOperation(name, error.of(name)) for name in self.pending]
        self.pending.clear()
        self.outgoing.clear()
        return list(failed)

    def leave(self) -> None:
        """Queue the report that this rank leaves: step G of the protocol. The caller fails pending submissions."""
        self.outgoing.append(ShutdownRequest())

    def abandon_set(self, number: int) -> None:
        """A process set could not be made after all."""
        self._sets.discard(number)

    def _resolve(self, item: Response) -> tuple[Operation, Response]:
        """Return this rank's submission (or its stand-in) and the agreement; remember a new response."""
        waiting = self.pending.pop(item.name, None)
        if waiting is None:
            assert item.template is not None, f"{item.name} was announced to rank {self.rank}, which did not submit it"
            return item.template, item
        operation = waiting.operation
        if operation.kind is OperationKind.ADD_SET and self.rank in operation.shape:
            self._sets.add(item.value)
        elif operation.kind is OperationKind.REMOVE_SET:
            self._sets.discard(operation.shape[0])
        if item.slot >= 0:
            old = self.cached.get(item.name)
            if old is not None:
                del self._by_slot[old.slot]
            self.cached[item.name] = self._by_slot[item.slot] = CachedResponse(item.slot, operation, item)
        return operation, item

    def _forget(self, slot: int) -> None:
        """Step E."""
        entry = self._by_slot.pop(slot, None)
        if entry is None:
            return
        name = entry.operation.name
        del self.cached[name]
        waiting = self.pending.get(name)
        if waiting is not None and waiting.slot == slot:
            waiting.slot = -1
            self.outgoing.append(SubmitRequest(waiting.operation, slot))

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        assert {e.slot for e in self.cached.values()} == set(self._by_slot)
        assert all(e.operation.name == name for name, e in self.cached.items())
        assert all(e.operation.process_set in self._sets for e in self.cached.values())
        assert all(w.slot < 0 or w.slot in self._by_slot for w in self.pending.values())
        assert self.broken is None or not (self.pending or self.outgoing)


def abort_error(stop: JobAbort) -> DeadlineError:
    """The error that every rank gets."""
    return DeadlineError(stop.reason, tensor=stop.tensor or None, ranks=stop.ranks, details=dict(stop.details))
