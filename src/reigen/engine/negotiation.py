"""Negotiation: how ranks that submit tensors in any order come to run the same collectives in the same order.

Two state machines without clocks, threads or sockets: every rank has a `Participant`, rank 0 has the `Coordinator` too.
Messages of one sender to one receiver arrive in order; nothing else is assumed about time.

The protocol
------------
A. A rank that has a tensor ready tells the coordinator: `Submit` with everything about it or, when the response cache
   knows the name with the very same operation, `Ready` with the small number of its slot. Until the name has been
   answered the rank does not submit it again (a second one is refused on the spot: `DuplicateNameError`).
B. The coordinator collects by name. When every rank has told of a name, it compares what they said. If they
   agree, the name becomes ready; if not, it announces `Refuse` with what each said, to be raised on every rank that
   submitted it (which is all), and forgets the name. Later operations are not touched.
C. When the coordinator has read all that lay before it, it announces what became ready as one `Run`: batches
   that travel together (fusion), in an order. All ranks read the same announcements in the same order and execute
   them as they read them, so no two ranks wait in different collectives. That every rank submitted is known by then,
   so no further "are you there" is needed before the data is touched.
D. A ready operation gets a slot in the response cache (least recently used out first; names made up for unnamed
   operations never: they do not come again). Its `Response` carries the number, and each rank keeps it with its own
   operation. When all ranks say `Ready` for one slot, `Run` holds its number alone. When a rank says something new
   about a cached name while others say `Ready`, their cached operations stand for them in (B); what is then agreed
   takes a new slot and the old one is forgotten by all. Numbers are never used again.
E. What leaves the cache is announced (`Forget`); a slot that some rank has said `Ready` for does not leave. A `Ready`
   that crosses the `Forget` on its way is ignored by the coordinator; the rank knows, when it reads `Forget`, that
   this has happened, and submits in full.
F. A name that not all ranks have told of by the deadline, counted from the first, is refused as late, naming the ranks
   that are missing. The refusal is for the ranks that it lists: one that submits later waits for the others anew.
G. A rank that shuts down says `Leave`, as its last word. The coordinator announces `Left` and nothing ever after,
   since nothing can be complete without that rank. On `Left` every rank fails what it has outstanding, and whatever it
   submits later.
H. A rank that dies says nothing. Whoever notices tells its own participant (`lose`), with the same effect as `Left`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from reigen.engine import fusion
from reigen.engine.agreement import disagreement, respond
from reigen.engine.messages import (
    Announcement,
    Forget,
    Kind,
    Leave,
    Left,
    Operation,
    Ready,
    Refuse,
    Report,
    Response,
    Run,
    Submit,
)
from reigen.errors import CollectiveError, DeadlineError, DuplicateNameError, MismatchError, PeerLostError

#: Part of every name that was made up.
UNNAMED = ".noname."
_UNCACHED = (Kind.ALLOCATE, Kind.FREE)

# -- a rank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Execute:
    """Instruction: carry these out together, now."""

    batch: tuple[tuple[Operation, Response], ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """Instruction: the submission under this name has failed."""

    name: str
    error: CollectiveError


Instruction = Execute | Fail


@dataclass(slots=True)
class _Cached:
    slot: int
    operation: Operation
    response: Response


@dataclass(slots=True)
class _Waiting:
    """A submission that has not been answered; ``slot`` if it was told by that number."""

    operation: Operation
    slot: int


class Participant:
    """One rank's side of the protocol."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        #: submitted and not answered, in order of submission
        self.pending: dict[str, _Waiting] = {}
        #: what to say to the coordinator next
        self.outgoing: list[Report] = []
        #: why nothing works any more, once it does not
        self.broken: CollectiveError | None = None
        #: name -> entry and slot -> entry hold the same entries
        self._by_name: dict[str, _Cached] = {}
        self._by_slot: dict[int, _Cached] = {}

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
        cached = self._by_name.get(name)
        if cached is not None and cached.operation == operation:
            self.pending[name] = _Waiting(operation, cached.slot)
            self.outgoing.append(Ready(cached.slot))
        else:
            self.pending[name] = _Waiting(operation, -1)
            self.outgoing.append(Submit(operation))

    def hear(self, announcement: Announcement) -> list[Instruction]:
        """Take in an announcement; returns what to do, in order."""
        if self.broken is not None:
            return []
        match announcement:
            case Run(batches):
                return [Execute(tuple(map(self._resolve, batch))) for batch in batches]
            case Refuse(name, late, reason, submitted, at_fault, details):
                if self.rank not in submitted:
                    return []
                del self.pending[name]
                kind = DeadlineError if late else MismatchError
                return [Fail(name, kind(reason, tensor=name, ranks=at_fault, details=dict(details)))]
            case Forget(slots):
                for slot in slots:
                    self._forget(slot)
            case Left(rank):
                if rank != self.rank:
                    return self.lose(
                        PeerLostError(
                            f"rank {rank} has left the job (shutdown, or the end of the script)", ranks=(rank,)
                        )
                    )
        return []

    def lose(self, error: CollectiveError) -> list[Instruction]:
        """Steps G and H: nothing will be answered any more."""
        if self.broken is not None:
            return []
        self.broken = error
        failed = [Fail(name, error.of(name)) for name in self.pending]
        self.pending.clear()
        self.outgoing.clear()
        return list(failed)

    def leave(self) -> None:
        """Step G: say goodbye. The caller fails what is pending."""
        self.outgoing.append(Leave())

    def _resolve(self, item: int | Response) -> tuple[Operation, Response]:
        """The operation that this rank submitted and what was agreed; remembers a new response."""
        if isinstance(item, int):
            cached = self._by_slot[item]
            del self.pending[cached.operation.name]
            return cached.operation, cached.response
        operation = self.pending.pop(item.name).operation
        if item.slot >= 0:
            old = self._by_name.get(item.name)
            if old is not None:
                del self._by_slot[old.slot]
            self._by_name[item.name] = self._by_slot[item.slot] = _Cached(item.slot, operation, item)
        return operation, item

    def _forget(self, slot: int) -> None:
        """Step E."""
        entry = self._by_slot.pop(slot, None)
        if entry is None:
            return
        name = entry.operation.name
        del self._by_name[name]
        waiting = self.pending.get(name)
        if waiting is not None and waiting.slot == slot:
            waiting.slot = -1
            self.outgoing.append(Submit(waiting.operation))

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        assert {e.slot for e in self._by_name.values()} == set(self._by_slot)
        assert all(e.operation.name == name for name, e in self._by_name.items())
        assert all(w.slot < 0 or w.slot in self._by_slot for w in self.pending.values())
        assert self.broken is None or not (self.pending or self.outgoing)


# -- the coordinator --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    """A name that some ranks have told of."""

    since: float
    operations: dict[int, Operation] = field(default_factory=dict)
    #: ranks that said so by the number of ``slot``
    by_slot: int = 0
    slot: int = -1


@dataclass(slots=True)
class _Record:
    """A cached response, and what every rank had said."""

    response: Response
    operations: dict[int, Operation]


class Coordinator:
    """Rank 0's side of the protocol.

    Args:
        size: number of ranks.
        cache_capacity: slots of the response cache; 0 turns it off.
        fusion_threshold_bytes: see `fusion.plan`.
        deadline_seconds: how long a name may wait for its last rank.
    """

    def __init__(self, size: int, cache_capacity: int, fusion_threshold_bytes: int, deadline_seconds: float) -> None:
        self.size = size
        self._capacity = cache_capacity
        self._threshold = fusion_threshold_bytes
        self._deadline = deadline_seconds
        #: names that wait for ranks; oldest first, since they only ever enter at the end
        self._table: dict[str, _Entry] = {}
        #: slot -> record, least recently used first; and the slot of each name
        self._cache: OrderedDict[int, _Record] = OrderedDict()
        self._slots: dict[str, int] = {}
        self._next_slot = 0
        self._ready: list[tuple[Operation, Response, bool]] = []
        self._said: list[Announcement] = []
        self._closed = False

    def hear(self, rank: int, report: Report, now: float) -> None:
        """Take in what a rank says (steps B, E, G). What follows from it is announced by the next `announce`."""
        if self._closed:
            return
        match report:
            case Submit(operation):
                self._enter(operation.name, rank, operation, -1, now)
            case Ready(slot):
                record = self._cache.get(slot)
                if record is not None:
                    self._enter(record.response.name, rank, record.operations[rank], slot, now)
            case Leave():
                self._flush()
                self._closed = True
                self._table.clear()
                self._said.append(Left(rank))

    def announce(self, now: float) -> list[Announcement]:
        """Steps C to F: what all ranks, this one too, are to be told next."""
        if not self._closed:
            self._flush()
            self._expire(now)
        said, self._said = self._said, []
        return said

    def next_expiry(self) -> float | None:
        """When `announce` should be called at the latest, on the clock of ``now``."""
        for entry in self._table.values():
            return entry.since + self._deadline
        return None

    def _enter(self, name: str, rank: int, operation: Operation, slot: int, now: float) -> None:
        entry = self._table.get(name)
        if entry is None:
            entry = self._table[name] = _Entry(now)
        entry.operations[rank] = operation
        if slot >= 0:
            entry.slot = slot
            entry.by_slot += 1
        if len(entry.operations) == self.size:
            del self._table[name]
            self._complete(name, entry)

    def _complete(self, name: str, entry: _Entry) -> None:
        """Step B: every rank has told of the name."""
        if entry.by_slot == self.size:
            self._cache.move_to_end(entry.slot)
            self._ready.append((entry.operations[0], self._cache[entry.slot].response, True))
            return
        differing = disagreement(entry.operations)
        if differing is not None:
            what, show = differing
            details = tuple((rank, show(entry.operations[rank])) for rank in range(self.size))
            everybody = tuple(range(self.size))
            self._said.append(Refuse(name, False, f"{what} between ranks", everybody, everybody, details))
            return
        response = respond(entry.operations, self._new_slot(entry.operations[0]))
        if response.slot >= 0:
            self._remember(response, entry.operations)
        self._ready.append((entry.operations[0], response, False))

    def _new_slot(self, operation: Operation) -> int:
        if not self._capacity or operation.kind in _UNCACHED or UNNAMED in operation.name:
            return -1
        self._next_slot += 1
        return self._next_slot - 1

    def _remember(self, response: Response, operations: dict[int, Operation]) -> None:
        """Step D. The ranks drop the old slot of this name themselves when they read the response."""
        old = self._slots.pop(response.name, None)
        if old is not None:
            del self._cache[old]
        self._slots[response.name] = response.slot
        self._cache[response.slot] = _Record(response, operations)

    def _flush(self) -> None:
        """Steps C and E: announce what is ready, then what leaves the cache."""
        if self._ready:
            ready, self._ready = self._ready, []
            batches = fusion.plan([(operation, response) for operation, response, _ in ready], self._threshold)
            items = [response.slot if known else response for _, response, known in ready]
            self._said.extend(_runs([[items[i] for i in batch] for batch in batches]))
        if len(self._cache) > self._capacity:
            self._evict()

    def _evict(self) -> None:
        gone = []
        for slot in list(self._cache):
            if len(self._cache) <= self._capacity:
                break
            name = self._cache[slot].response.name
            entry = self._table.get(name)
            if entry is None or not entry.by_slot:
                del self._cache[slot], self._slots[name]
                gone.append(slot)
        for begin in range(0, len(gone), _MOST_SLOTS):
            self._said.append(Forget(tuple(gone[begin : begin + _MOST_SLOTS])))

    def _expire(self, now: float) -> None:
        """Step F."""
        for name, entry in list(self._table.items()):
            if now < entry.since + self._deadline:
                return
            del self._table[name]
            submitted = tuple(sorted(entry.operations))
            missing = tuple(rank for rank in range(self.size) if rank not in entry.operations)
            who = ", ".join(map(str, missing))
            reason = (
                f"rank(s) {who} did not submit it within {self._deadline:g} s (ranks {list(submitted)} did); "
                "REIGEN_DEADLINE sets how long to wait"
            )
            self._said.append(Refuse(name, True, reason, submitted, missing, self._instead(missing)))

    def _instead(self, missing: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """For ranks that did not come: the first thing, if any, that they wait for."""
        found: dict[int, str] = {}
        for name, entry in self._table.items():
            for rank in entry.operations:
                if rank in missing:
                    found.setdefault(rank, f"waits for {entry.operations[rank].kind.name.lower()} {name}")
        return tuple(sorted(found.items()))

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        assert self._slots == {record.response.name: slot for slot, record in self._cache.items()}
        assert all(0 < len(e.operations) < self.size for e in self._table.values())
        assert all(e.by_slot <= len(e.operations) for e in self._table.values())
        assert all(e.slot in self._cache for e in self._table.values() if e.by_slot)
        assert list(self._table.values()) == sorted(self._table.values(), key=lambda e: e.since)


#: Size of one announcement, roughly; a message of the transport has room for more.
_MOST_BYTES = 48 << 10
_MOST_SLOTS = _MOST_BYTES // 9


def _runs(batches: Sequence[Sequence[int | Response]]) -> list[Run]:
    """Batches as announcements of bounded size: a long list is cut between batches, a long batch is cut too."""
    runs: list[Run] = []
    current: list[tuple[int | Response, ...]] = []
    room = _MOST_BYTES
    for batch in batches:
        part: list[int | Response] = []
        for item in batch:
            nbytes = _most_bytes(item)
            if nbytes > room and (part or current):
                runs.append(Run((*current, tuple(part)) if part else tuple(current)))
                part, current, room = [], [], _MOST_BYTES
            part.append(item)
            room -= nbytes
        current.append(tuple(part))
    return [*runs, Run(tuple(current))]


def _most_bytes(item: int | Response) -> int:
    """At most so many bytes are needed to tell of a ready operation."""
    if isinstance(item, int):
        return 9
    return 32 + len(item.name.encode()) + sum(5 + 9 * len(row) for row in item.sizes)
