"""Negotiation: how ranks that submit tensors in any order come to run the same collectives in the same order.

Two state machines without clocks, threads or sockets: every rank has a `RankController`, which stands in
`reigen.engine.rank_controller`, rank 0 has the `Coordinator` too. Messages of one sender to one receiver arrive in
order; nothing else is assumed about time.

The protocol
------------
A. A rank that has a tensor ready tells the coordinator: `SubmitRequest` with everything about it or, when the response
   cache knows the name with the very same operation, a cache hit: the number of its slot. Until the name has been
   answered the rank does not submit it again (a second one is refused on the spot: `DuplicateNameError`).
B. The coordinator collects by name. When every rank has reported a name, it compares what they reported. If they
   agree, the name becomes ready; if not, it announces `ErrorResponse` with what each reported, for every rank to raise
   that submitted it (which is all), and forgets the name. Later operations are not touched.
C. When the coordinator has read all that lay before it, it announces what became ready as one `ResponseList`: batches
   that travel together (fusion), in an order. All ranks read the same announcements in the same order and execute
   them as they read them, so no two ranks wait in different collectives. That every rank submitted is known by then,
   so no further "are you there" is needed before the data is touched.
D. A ready operation gets a slot in the response cache (least recently used out first; names made up for unnamed
   operations never: they do not come again). Its `Response` carries the number, and each rank keeps it with its own
   operation. When all ranks hit one slot, `ResponseList` holds its number alone. When a rank says something new about a
   cached name while others hit it, their cached operations stand for them in (B); what is then agreed
   takes a new slot and the old one is forgotten by all. Numbers are never used again.
E. What leaves the cache is announced (`CacheEviction`); a slot that some rank has hit does not leave. A
   cache hit that crosses the `CacheEviction` on its way is ignored by the coordinator; the rank knows, when it reads
   `CacheEviction`, that this has happened, and submits in full.
F. A name that not all ranks have reported by the deadline, counted from the first, is refused as late, naming the ranks
   that are missing. The refusal is for the ranks that it lists: one that submits later waits for the others anew.
G. A rank that shuts down says `ShutdownRequest`, as its last word. The coordinator announces `RankShutdown` and nothing
   ever after, since nothing can be complete without that rank. On `RankShutdown` every rank fails what it has
   outstanding, and whatever it submits later.
H. A rank that dies says nothing. A rank that notices tells its own participant (`lose`), with the same effect as
   `RankShutdown`. What waits too long ends the job, if that is wanted: the coordinator announces `JobAbort`, with the
   same effect, too.

Beyond all ranks and single tensors
-----------------------------------
I. *Process sets.* An operation names its set; "every rank" above is then every rank of the set. All ranks still read
   all announcements, in one order, and pass over what is not theirs: sets that overlap cannot wait for each other in
   a circle. A set is made (and unmade) by an operation of all ranks; its number is in the response, the lowest free
   one. What waits in a set that is unmade, or comes later, is refused. Two sets of the same ranks there are not.
J. *Groups.* Several tensors under one name are one operation: submitted, compared, refused, cached, answered as one.
K. *Join.* A rank that has no more data submits JOIN and nothing more (but FREE) until it is answered, which is when all
   ranks have: with the last one's number. Meanwhile an operation that waits for joined ranks alone is complete; at the
   end that is every one, so nothing of before is outstanding when JOIN is answered. An allreduce is announced with a
   template, from which those who did not submit it stand in with neutral elements; such responses are not cached, nor
   in place (no rank could know when a stand-in has cleared its memory). Anything else is refused. A JOIN waits as long
   as it takes. Where a cache hit before it was ignored (E), it counts only when what is to be said in full has come: a
   rank must not be stood in for in what it has submitted.
L. An operation that makes no sense whatever the others say is refused on the rank that submitted it.
M. *Exchange.* A few bytes of every rank are in what it submits, and all of them in the response: control messages are
   authenticated, numbered and bound to this life of the job between any two hosts, what the backends move is not.
N. *Integers.* Cache hits and announcements of nothing but cached responses travel as integers where the transport
   carries them: between the ranks of one host. They lie in the order of all else that the sender says, so nothing above
   changes. They need not wake their readers at once: the writer wakes those that have not read them when it
   sleeps or stops driving; see `reigen.net.shm_ring`.
O. *Eager.* On one host a rank that waits for a small allreduce that is cached, and has nothing else outstanding, puts
   its data into shared memory along with the cache hit. When rank 0 comes to the same one itself, in the same way, and
   finds the others' there, its answer is one number, and every rank reads every other's data: this stands for the
   `ResponseList` of that slot and its execution. In any other case rank 0 takes what was submitted so as a cache hit.
   Since rank 0 alone decides which of the two happens, all ranks do the same. A rank reads the answer before messages
   that came behind it, and rank 0 the submission before those of its sender.
P. *Autotuning.* What is chosen anew on rank 0 is announced right before the next `ResponseList` (`TunedParameters`), so
   that all ranks carry out the same batches before it and after it. Fusion changes there and then. An operation that is
   carried out eagerly may come on either side; it depends on none of these parameters.
Q. *Tree.* In large jobs reports come through relays, which merge them, and announcements go through them: see
   `reigen.engine.report_merger`. A merged report is that of each of its ranks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import structs

from reigen.engine import fusion
from reigen.engine.control_tree import ControlTree, describe_relays
from reigen.engine.messages import (
    JOIN_NAME,
    UNNAMED,
    Announcement,
    CacheEviction,
    ErrorCause,
    ErrorResponse,
    JobAbort,
    MergedReports,
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
from reigen.engine.rank_masks import from_bytes, lowest_rank, to_mask, to_ranks
from reigen.engine.response_batches import MAX_SLOTS, build_response_lists
from reigen.engine.stall.inspector import PendingCollective
from reigen.engine.validation import Mismatch, build_response, find_mismatch, validate_operation
from reigen.errors import DeadlineError, format_ranks
from reigen.types import ReduceOp

_UNCACHEABLE = (
    OperationKind.ALLOCATE,
    OperationKind.ALLOCATE_SHARED,
    OperationKind.FREE,
    OperationKind.ADD_SET,
    OperationKind.REMOVE_SET,
    OperationKind.EXCHANGE,
)
#: Operations in whose responses each rank has a part.
_PER_RANK_KINDS = (OperationKind.ALLGATHER, OperationKind.ALLTOALL, OperationKind.EXCHANGE)
#: Operations that say nothing of a rank's data: they wait for those who have joined, too.
_INTERNAL_KINDS = (OperationKind.FREE,)


class _PendingTensor(msgspec.Struct):
    """Name that some ranks have reported. Ranks are bits of integers (`reigen.engine.rank_masks`)."""

    since: float
    process_set: int
    #: what the first one wants
    first: Operation
    #: ranks that have reported it, and those that said so by the number of ``slot``
    ranks: int = 0
    by_slot: int = 0
    slot: int = -1
    #: ranks that reported it in full, by their operation
    operations: dict[Operation, int] = {}


class _CacheEntry(msgspec.Struct, frozen=True):
    """A cached response, and the operations of all ranks then: ranks by their operation."""

    response: Response
    operations: dict[Operation, int]
    first: Operation


class Coordinator:
    """Rank 0's side of the protocol.

    Args:
        size: number of ranks.
        cache_capacity: slots of the response cache; 0 turns it off.
        fusion_threshold_bytes: see `fusion.plan`.
        deadline_seconds: how long a name may wait for its last rank.
        fuse_groups: see `fusion.plan`.
        tree: on which reports come, if it is not from each rank.
        warn: called when the response cache is full for the first time, with what to tell the user.
    """

    def __init__(
        self,
        size: int,
        cache_capacity: int,
        fusion_threshold_bytes: int,
        deadline_seconds: float,
        *,
        fuse_groups: bool = True,
        warn: Callable[[str], None] | None = None,
        tree: ControlTree | None = None,
    ) -> None:
        self.size = size
        self._capacity = cache_capacity
        self._threshold = fusion_threshold_bytes
        self._fuse_groups = fuse_groups
        self._deadline = deadline_seconds
        self._warn = warn
        self.tree = tree
        #: process sets: their ranks in ascending order, by number
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._set_masks: dict[int, int] = {0: (1 << size) - 1}
        #: ranks that have joined, and those that will have when what they said by forgotten numbers has come in full
        self._joined = 0
        self._joining: set[int] = set()
        #: by rank: numbers by which it reported something when they had been forgotten
        self._crossed: defaultdict[int, set[int]] = defaultdict(set)
        #: names that wait for ranks; oldest first, since they only ever enter at the end
        self._table: dict[str, _PendingTensor] = {}
        #: slot -> record, least recently used first; and the slot of each name
        self._cache: OrderedDict[int, _CacheEntry] = OrderedDict()
        self._slots: dict[str, int] = {}
        self._next_slot = 0
        self._ready: list[tuple[Operation, Response, bool]] = []
        self._announcements: list[Announcement] = []
        #: chosen and not announced
        self._tuned: deque[TunedParameters] = deque()
        self._closed = False

    def receive(self, rank: int, reports: Iterable[Report], now: float, ranks: int = 0) -> None:
        """Take in a rank's message (steps B, E, G, K). Its consequences are announced by the next `announce`.

        Args:
            rank: whose message it is.
            reports: the message.
            now: the time.
            ranks: those who report this, as a mask, where ``rank`` is their relay; 0: it is the rank's own report.
        """
        ranks, cache, table = ranks or 1 << rank, self._cache, self._table
        for report in reports:
            if self._closed:
                return
            if isinstance(report, int):
                record = cache.get(report)
                if record is None:
                    for each in to_ranks(ranks):
                        self._crossed[each].add(report)
                    continue
                name = record.response.name
                entry = table.get(name)
                if entry is None:
                    entry = table[name] = _PendingTensor(now, record.response.process_set, record.first)
                entry.ranks |= ranks
                entry.by_slot |= ranks
                entry.slot = report
                if self._joined or entry.ranks == self._set_masks[entry.process_set]:
                    self._complete_if_all_submitted(name, entry)
            elif isinstance(report, SubmitRequest):
                self._take(ranks, report.operation, now)
                if self._crossed:
                    self._take_in_full(ranks, report.instead_of)
            elif isinstance(report, MergedReports):
                self.receive(rank, report.reports, now, from_bytes(report.first, report.ranks))
            elif isinstance(report, ShutdownRequest):
                self._flush()
                self._close(RankShutdown(lowest_rank(ranks)))

    def _take_in_full(self, ranks: int, instead_of: int) -> None:
        """Take in full reports that replace hits of a forgotten slot: steps E and K."""
        for rank in to_ranks(ranks):
            crossed = self._crossed.get(rank)
            if crossed is not None:
                crossed.discard(instead_of)
                if not crossed:
                    del self._crossed[rank]
            if rank in self._joining:
                self._join(rank)

    def may_answer_eagerly(self, slot: int) -> bool:
        """Return whether rank 0 may answer this slot eagerly, if all ranks want it (step O)."""
        if self._closed or slot not in self._cache:
            return False
        self._cache.move_to_end(slot)
        return True

    def tune(self, parameters: TunedParameters) -> None:
        """Change parameters of all ranks with the next batch (step P). Any thread."""
        self._tuned.append(parameters)

    def announce(self, now: float) -> list[Announcement]:
        """Return the next announcements to all ranks, this one too: steps C to F."""
        if not self._closed:
            if self._ready or len(self._cache) > self._capacity:
                self._flush()
            for entry in self._table.values():
                if now >= entry.since + self._deadline:
                    self._expire(now)
                break  # the first is the oldest
        announcements, self._announcements = self._announcements, []
        return announcements

    def next_expiry(self) -> float | None:
        """Return when to call `announce` at the latest, on the clock of ``now``; 0 for at once."""
        if self._ready or self._announcements:
            return 0.0
        for entry in self._table.values():
            return entry.since + self._deadline
        return None

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Their ranks, ascending, by number."""
        return dict(self._sets)

    def waits(self) -> list[PendingCollective]:
        """Return everything that waits for ranks and that ranks wait for, oldest first."""
        found = []
        for name, entry in self._table.items():
            if entry.first.kind not in _INTERNAL_KINDS:
                kind, ready, missing = entry.first.kind.name.lower(), to_ranks(entry.ranks), self._missing(entry)
                found.append(PendingCollective(name, kind, entry.process_set, entry.since, ready, missing))
        return found

    def oldest_wait(self) -> float | None:
        """Since when the first of `waits` does."""
        for entry in self._table.values():
            if entry.first.kind not in _INTERNAL_KINDS:
                return entry.since
        return None

    def stop(self, error: DeadlineError) -> None:
        """End the job (step H). Operations that were ready are not begun any more."""
        if not self._closed:
            self._ready.clear()
            self._close(JobAbort(error.reason, error.tensor or "", error.ranks, tuple(sorted(error.details.items()))))

    def _close(self, last: JobAbort | RankShutdown) -> None:
        self._closed = True
        self._table.clear()
        self._announcements.append(last)

    def _take(self, ranks: int, operation: Operation, now: float) -> None:
        """Take in the full report of some ranks: steps A, I, K, L."""
        if operation.process_set not in self._sets:
            self._refuse_removed(operation.name, operation.process_set, to_ranks(ranks))
            return
        if outside := ranks & ~self._set_masks[operation.process_set]:
            self._refuse_invalid(operation, outside)
            if not (ranks := ranks & ~outside):
                return
        if self._validate(operation, ranks) is not None:
            self._refuse_invalid(operation, ranks)
            return
        if operation.kind is OperationKind.JOIN:
            for rank in to_ranks(ranks):
                self._join(rank)
            return
        entry = self._table.get(operation.name)
        if entry is None:
            entry = self._table[operation.name] = _PendingTensor(now, operation.process_set, operation)
        entry.ranks |= ranks
        entry.operations[operation] = entry.operations.get(operation, 0) | ranks
        self._complete_if_all_submitted(operation.name, entry)

    def _validate(self, operation: Operation, ranks: int) -> str | None:
        """Step L: return the error in the operation of the lowest of these ranks, which is that of the others."""
        members = self._sets[operation.process_set] if operation.process_set else range(self.size)
        return validate_operation(operation, lowest_rank(ranks), members)

    def _refuse_invalid(self, operation: Operation, ranks: int) -> None:
        """Step L."""
        for rank in to_ranks(ranks):
            reason = self._validate(operation, 1 << rank)
            assert reason is not None, "it was found before"
            self._announcements.append(ErrorResponse(operation.name, ErrorCause.MISMATCH, reason, (rank,), (rank,)))

    def _complete_if_all_submitted(self, name: str, entry: _PendingTensor) -> None:
        members = self._set_masks[entry.process_set]
        if entry.ranks != members and self._missing_mask(entry):
            return
        del self._table[name]
        if entry.by_slot == members:
            cached = self._cache[entry.slot]
            self._cache.move_to_end(entry.slot)
            self._ready.append((entry.first, cached.response, True))
        else:
            self._complete(name, entry)

    def _missing_mask(self, entry: _PendingTensor) -> int:
        missing = self._set_masks[entry.process_set] & ~entry.ranks
        return missing if entry.first.kind in _INTERNAL_KINDS else missing & ~self._joined

    def _missing(self, entry: _PendingTensor) -> tuple[int, ...]:
        """Ranks that the entry waits for."""
        return to_ranks(self._missing_mask(entry))

    def _operations_of(self, entry: _PendingTensor) -> dict[Operation, int]:
        """Return the ranks by operation: hits of the slot stand for those that are cached."""
        if not entry.by_slot:
            return entry.operations
        found = dict(entry.operations)
        for operation, ranks in self._cache[entry.slot].operations.items():
            if hits := ranks & entry.by_slot:
                found[operation] = found.get(operation, 0) | hits
        return found

    def _complete(self, name: str, entry: _PendingTensor) -> None:
        """Complete a name that every rank has reported (step B)."""
        operations, joined = self._operations_of(entry), self._set_masks[entry.process_set] & ~entry.ranks
        lowest = {lowest_rank(ranks): operation for operation, ranks in operations.items()}
        first = lowest[min(lowest)]
        if joined and not all(map(_has_neutral_element, first.parts)):
            what = first.kind.name.lower()
            if first.kind is OperationKind.ALLREDUCE:
                what = f"scaled {what} with {first.parts[0].op.name}"
            absent = to_ranks(joined)
            reason = f"rank(s) {format_ranks(absent)} have joined, so they have no data for this {what}"
            self._announcements.append(ErrorResponse(name, ErrorCause.JOINED, reason, to_ranks(entry.ranks), absent))
            return
        differing = find_mismatch(lowest)
        if differing is not None:
            self._refuse_mismatch(name, operations, differing)
        elif joined:
            self._ready.append(_fill_in_joined(_by_rank(operations), entry.ranks.bit_count()))
        elif (refusal := self._refusal_reason(first)) is not None:
            self._announcements.append(ErrorResponse(name, ErrorCause.MISMATCH, refusal, to_ranks(entry.ranks)))
        else:
            self._agree(first, operations)

    def _refuse_mismatch(self, name: str, operations: Mapping[Operation, int], differing: Mismatch) -> None:
        what, show = differing
        shown = {rank: show(operation) for operation, ranks in operations.items() for rank in to_ranks(ranks)}
        submitted, details = tuple(sorted(shown)), tuple(sorted(shown.items()))
        self._announcements.append(
            ErrorResponse(name, ErrorCause.MISMATCH, f"{what} between ranks", submitted, submitted, details)
        )

    def _agree(self, first: Operation, operations: dict[Operation, int]) -> None:
        response = build_response(_by_rank(operations), self._new_slot(first))
        if response.slot >= 0:
            self._remember(response, first, operations)
        if first.kind is OperationKind.ADD_SET:
            response = structs.replace(response, value=self._add_set(first.shape))
        elif first.kind is OperationKind.REMOVE_SET:
            self._remove_set(first.shape[0])
        self._ready.append((first, response, False))

    # -- process sets and join ----------------------------------------------------------------------------------------

    def _refusal_reason(self, operation: Operation) -> str | None:
        """Step I: why a set is not made, or not unmade, although all ranks want it: another thread was first."""
        if operation.kind is OperationKind.ADD_SET and operation.shape in self._sets.values():
            return f"there is a process set of the ranks {list(operation.shape)} already"
        if operation.kind is OperationKind.REMOVE_SET and operation.shape[0] not in self._sets:
            return f"process set {operation.shape[0]} has been removed"
        return None

    def _add_set(self, ranks: tuple[int, ...]) -> int:
        """Step I."""
        number = next(number for number in itertools.count(1) if number not in self._sets)
        self._sets[number], self._set_masks[number] = ranks, to_mask(ranks)
        return number

    def _remove_set(self, number: int) -> None:
        """Remove a process set (step I): announce ready operations, refuse waiting ones, forget cached ones."""
        self._flush()
        for name, entry in list(self._table.items()):
            if entry.process_set == number:
                del self._table[name]
                self._refuse_removed(name, number, to_ranks(entry.ranks))
        gone = [slot for slot, record in self._cache.items() if record.response.process_set == number]
        self._drop(gone)
        self.abandon_set(number)

    def abandon_set(self, number: int) -> None:
        """Refuse an operation of a process set that does not exist any more, or could not be made."""
        self._sets.pop(number, None)
        self._set_masks.pop(number, None)

    def _refuse_removed(self, name: str, number: int, submitted: Sequence[int]) -> None:
        reason = f"process set {number} has been removed"
        self._announcements.append(ErrorResponse(name, ErrorCause.MISMATCH, reason, tuple(submitted)))

    def _join(self, rank: int) -> None:
        """Step K."""
        if self._crossed.get(rank):
            self._joining.add(rank)
            return
        self._joining.discard(rank)
        self._joined |= 1 << rank
        for name, entry in list(self._table.items()):  # only this one leaves it: sets change when no rank has joined
            self._complete_if_all_submitted(name, entry)
        if self._joined == self._set_masks[0]:
            self._joined = 0
            self._ready.append((Operation(OperationKind.JOIN, JOIN_NAME), Response(JOIN_NAME, value=rank), False))

    def _new_slot(self, operation: Operation) -> int:
        if not self._capacity or operation.kind in _UNCACHEABLE or UNNAMED in operation.name:
            return -1
        self._next_slot += 1
        return self._next_slot - 1

    def _remember(self, response: Response, first: Operation, operations: dict[Operation, int]) -> None:
        """Step D. The ranks drop the old slot of this name themselves when they read the response."""
        old = self._slots.pop(response.name, None)
        if old is not None:
            del self._cache[old]
        self._slots[response.name] = response.slot
        self._cache[response.slot] = _CacheEntry(response, operations, first)

    def _flush(self) -> None:
        """Announce ready names, then those that leave the cache: steps C, E and P."""
        while self._tuned:
            tuned = self._tuned.popleft()
            self._threshold = tuned.fusion_threshold_bytes
            self._announcements.append(tuned)
        if self._ready:
            ready, self._ready = self._ready, []
            if len(ready) == 1:
                [(_, response, known)] = ready
                self._announcements.append(ResponseList(((response.slot if known else response,),)))
            else:
                self._announcements.extend(self._fuse(ready))
        if len(self._cache) > self._capacity:
            self._evict()

    def _fuse(self, ready: Sequence[tuple[Operation, Response, bool]]) -> list[ResponseList]:
        agreed = [(operation, response) for operation, response, _ in ready]
        batches = fusion.fuse_responses(agreed, self._threshold, fuse_groups=self._fuse_groups)
        items = [response.slot if known else response for _, response, known in ready]
        return build_response_lists([[items[i] for i in batch] for batch in batches])

    def _evict(self) -> None:
        gone: list[int] = []
        for slot in self._cache:
            if len(self._cache) - len(gone) <= self._capacity:
                break
            name = self._cache[slot].response.name
            entry = self._table.get(name)
            if entry is None or not entry.by_slot:
                gone.append(slot)
        self._drop(gone)
        if gone and self._warn is not None:
            self._warn(
                f"more than {self._capacity} different tensors: the response cache forgets those that were not used "
                "for the longest time, and negotiating them takes longer; raise HOROVOD_CACHE_CAPACITY"
            )
            self._warn = None

    def _drop(self, slots: Sequence[int]) -> None:
        """Step E."""
        for slot in slots:
            del self._slots[self._cache.pop(slot).response.name]
        for begin in range(0, len(slots), MAX_SLOTS):
            self._announcements.append(CacheEviction(tuple(slots[begin : begin + MAX_SLOTS])))

    def _expire(self, now: float) -> None:
        """Step F."""
        for name, entry in list(self._table.items()):
            if now < entry.since + self._deadline:
                return
            del self._table[name]
            submitted, missing = to_ranks(entry.ranks), self._missing(entry)
            reason = (
                f"rank(s) {format_ranks(missing)} did not submit it within {self._deadline:g} s (ranks "
                f"{list(submitted)} "
                "did); REIGEN_DEADLINE sets how long to wait" + describe_relays(self.tree, missing)
            )
            self._announcements.append(
                ErrorResponse(name, ErrorCause.LATE, reason, submitted, missing, self._describe_waits(missing))
            )

    def _describe_waits(self, missing: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """For ranks that did not come: the first thing, if any, that they wait for."""
        found: dict[int, str] = {}
        wanted = to_mask(missing)
        for name, entry in self._table.items():
            for operation, ranks in self._operations_of(entry).items():
                for rank in to_ranks(ranks & wanted):
                    found.setdefault(rank, f"waits for {operation.kind.name.lower()} {name}")
        return tuple(sorted(found.items()))

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        assert self._slots == {record.response.name: slot for slot, record in self._cache.items()}
        assert all(e.ranks and self._missing(e) for e in self._table.values())
        assert self._joined < self._set_masks[0] or not self._joined
        assert all(self._crossed[rank] and not self._joined >> rank & 1 for rank in self._joining)
        assert self._set_masks == {number: to_mask(ranks) for number, ranks in self._sets.items()}
        assert all(e.process_set in self._sets for e in self._table.values())
        assert all(record.response.process_set in self._sets for record in self._cache.values())
        assert all(not e.by_slot & ~e.ranks for e in self._table.values())
        assert all(e.slot in self._cache for e in self._table.values() if e.by_slot)
        assert list(self._table.values()) == sorted(self._table.values(), key=lambda e: e.since)


def _has_neutral_element(operation: Operation) -> bool:
    """Step K: whether there is an element that leaves the others' result as it is."""
    if operation.kind is not OperationKind.ALLREDUCE:
        return False
    is_sum = operation.op in {ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.ADASUM}
    return is_sum or operation.prescale == 1.0


def _by_rank(operations: Mapping[Operation, int]) -> dict[int, Operation]:
    """Return one rank's operation for each that says something of its own; of others, one for all that say the same."""
    if any(part.kind in _PER_RANK_KINDS for operation in operations for part in operation.parts):
        return {rank: operation for operation, ranks in operations.items() for rank in to_ranks(ranks)}
    return {lowest_rank(ranks): operation for operation, ranks in operations.items()}


def _fill_in_joined(operations: Mapping[int, Operation], num_active: int) -> tuple[Operation, Response, bool]:
    """Step K: nothing in place, and a template for who did not submit the operation."""
    staged = {rank: _without_region(operation) for rank, operation in operations.items()}
    template = staged[min(staged)]
    response = structs.replace(build_response(staged, -1), num_active=num_active, template=template)
    return template, response, False


def _without_region(operation: Operation) -> Operation:
    return structs.replace(operation, offset=-1, members=tuple(map(_without_region, operation.members)))
