"""Engine that decides when pushes are applied, and pulls answered: synchronous, stale (SSP), asynchronous.

One engine per shard, without I/O or clock: an event goes in (`handle`), instructions come out, in the order in which
the server must carry them out.

A *token* is the server's own handle on one request of a worker: its connection, and for a push its body. It is any
hashable object, a new one for each `PushReceived` and `PullRequested`, and ends with exactly one of `AcknowledgePush`,
`RepeatAcknowledgement`, `AnswerPull`, `FailRequest` and `DropRequest`. The body of a push is used by one `CombineRound`
or `ApplyPush` before that, or not at all.

The protocol
------------
A. *Rounds.* Every worker counts its own pushes of the shard, from 1. A contribution is known by (worker, round), never
   by the request that brought it. `done(worker)` is how many of its rounds are over; no push of such a round is ever
   applied: it is a `RepeatAcknowledgement`, answered again. A worker sends its pushes in order, and a pull after its
   pushes.
B. *Synchronous* (staleness 0). A round is over when every expected worker has contributed to it. Then all its
   contributions are combined in rank order, which is one update, and acknowledged; one that comes early waits for its
   round. Rounds are over for all workers at once, so `done` is the same for all.
C. *Asynchronous and stale* (staleness k > 0, or infinite). A contribution is applied and acknowledged at once, each
   worker's in the order of its rounds; one that comes before its predecessor waits for it. `done` is the worker's own.
D. *Reading.* A worker that has pushed r times may read when done(itself) >= r, so that it sees its own updates, and
   done(w) >= r - staleness for every expected worker w. Synchronous: exactly the value after round r, since round
   r + 1 is not over without the worker itself. Stale: all updates of rounds <= r - k, and perhaps later ones.
   Asynchronous: at once.
E. *The same push again* (a resend). Before it was applied the later one takes the earlier one's place, which is
   dropped; after, (A). So a push that is resent, doubled or taken up by a replacement is applied once.
F. *Leaving.* A worker that has left is not expected any more. It leaves when its pushes have been acknowledged. It may
   pull. To push again it returns first (H).
G. *Loss.* What a lost worker has pushed counts. Its requests end without an answer. Then, by policy:
   abort: whatever waits fails, and whatever comes later, naming the worker and the round;
   continue: it is not expected any more, and synchronous rounds that lack it are scaled by (contributors + lost) /
   contributors;
   wait: it is expected, so others wait, until their deadlines, for the process that returns in its place.
   A lost worker's pushes and pulls fail until it is found or returns: it may be alive, and wrong about that.
   Losing a worker that has left changes nothing, nor does finding it.
H. *Returning.* The worker is told which of its rounds are over (`RoundRecovered`) and is expected from the next one on.
   What its predecessor has pushed beyond is pushed again (E): no other process could, if this server were to die now.
   If the others have gone on without it, it must neither repeat rounds that are over nor hold the others up until it
   has caught up: its rounds up to the least `done` of the expected ones (of all, the largest, if none is) then count as
   over. A key's shards may tell different rounds; the worker goes on after the least, and (A) takes care of the rest.
I. *Restart of the server, or of a connection.* `state` goes into a snapshot together with the value. In an engine made
   `from_state` all workers are away, until each itself has said how far it was (`WorkerResumed`), or returned, or left.
   While an expected one is away no synchronous round is completed, and nothing is applied or answered for it. What was
   not acknowledged, workers send again, and that they have left they say again. What was acknowledged and is not in the
   snapshot is lost, in whole rounds if synchronous: they count as over (`RoundsForgotten`). With a snapshot before
   each acknowledgement there are none. `WorkerResumed` is answered like `WorkerReturned`. It is a return if nothing but
   the snapshot says that the worker had left or was lost, since that may be older than its return.
J. *Bounds.* A push that is more than `MAX_ROUNDS_AHEAD` rounds ahead of `done` fails: its worker does not wait for
   acknowledgements.
K. *Deadlines.* The server keeps them; `waits` says who each request waits for. A push that has expired is withdrawn.
   Its worker came: it is not named beside those that did not, only where there are none, and until it pushes again.
L. *Elastic jobs.* Workers' numbers are places, which processes take and leave. An absent one is not expected. What a
   lost worker has pushed, and what was not applied, is dropped: it was not acknowledged, and nobody repeats it. Another
   process joins (`WorkerJoined`). It is expected from the first round on that has not begun; or from a later one that
   it names, since the shards of a key may be in different rounds, and each of its pushes is to count in all of them. It
   asks all shards, and tells them the latest round that it hears: no shard can have passed that round without it. A
   round in which nobody is expected, since those who are there have joined for later ones, is over without an update.
   Servers save before each acknowledgement, and one that is restarted (I) forgets who was there, but not which
   processes may still be: these are expected, and away, until they say again (`WorkerJoined`) which rounds are over
   for them, or are lost. A process that does not name a shard then has not joined it.

Instructions may be carried out later than they are given, in order. A snapshot of the value after an instruction
therefore needs the state of that moment: take `state` when `handle` returns, and keep it with the instructions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from enum import Enum

import msgspec

from reigen.cluster.membership.members import LossPolicy

#: Rounds that a worker may be ahead of what has been applied for it.
MAX_ROUNDS_AHEAD = 64
_RESTARTED = "the server was restarted; it waits to hear from"


RequestToken = Hashable


class _OfWorker(msgspec.Struct, frozen=True):
    worker: int


class _OfRequest(_OfWorker, frozen=True):
    round: int
    token: RequestToken


# -- events -----------------------------------------------------------------------------------------------------------


class PushReceived(_OfRequest, frozen=True):
    """Contribution of a worker; ``round`` is the worker's own count of pushes of the shard, from 1."""


class PullRequested(_OfRequest, frozen=True):
    """Request of a worker for the shard's value; ``round`` is how often it has pushed the shard before."""


class WorkerLeft(_OfWorker, frozen=True):
    """End of a worker that has no more data; its pushes before count. It may still pull."""


class WorkerDisconnected(_OfWorker, frozen=True):
    """End of a worker's connection. It may make another, and asks again then for missing answers."""


class WorkerLost(_OfWorker, frozen=True):
    """End of a worker that the scheduler has given up."""

    policy: LossPolicy


class WorkerReappeared(_OfWorker, frozen=True):
    """Return of a lost worker, which was silent, and is the same process as before."""


class WorkerReturned(_OfWorker, frozen=True):
    """Question of a worker where to go on: of another process in place of a lost one, or of one that had left."""


class WorkerResumed(_OfWorker, frozen=True):
    """Message of a worker that has connected again, to a server that may have been restarted.

    ``round`` is the last push of the shard that was acknowledged to it: it sends those that come after it again.
    """

    round: int


class WorkerJoined(_OfWorker, frozen=True):
    """Message of a process of an elastic job that has connected (L).

    ``round`` is the last one that is over for it at least; None: it has just come, and asks.
    """

    round: int | None = None


class RequestExpired(msgspec.Struct, frozen=True):
    """End of a request's deadline."""

    token: RequestToken


ConsistencyEvent = (
    PushReceived | PullRequested | WorkerLeft | WorkerDisconnected | WorkerLost | WorkerReappeared | WorkerReturned
    | WorkerResumed | WorkerJoined | RequestExpired
)  # fmt: skip

# -- instructions -----------------------------------------------------------------------------------------------------


class CombineRound(msgspec.Struct, frozen=True):
    """Add up a round, update the value by it, and free the bodies.

    Attributes:
        workers: those that have contributed, ascending.
        tokens: their contributions, to be added in this order.
        scale: factor of the sum; not 1 only where workers that were lost are made up for.
    """

    round: int
    workers: tuple[int, ...]
    tokens: tuple[RequestToken, ...]
    scale: float


class ApplyPush(_OfRequest, frozen=True):
    """Update the value by one contribution, and free its body."""


class AcknowledgePush(_OfRequest, frozen=True):
    """Tell the worker that its push has been applied."""


class RepeatAcknowledgement(_OfRequest, frozen=True):
    """Free the body of a push that has been applied before, and tell the worker so again."""


class AnswerPull(_OfWorker, frozen=True):
    """Send the value as it is after all instructions before this one."""

    token: RequestToken


class FailRequest(msgspec.Struct, frozen=True):
    """Answer with an error; if it was a push, its body is not used.

    Attributes:
        reason: in words, without the names of the key and of hosts.
        workers: who is at fault.
        late: a deadline is over. Otherwise a worker was lost or, with no ``workers``, the request makes no sense.
    """

    token: RequestToken
    reason: str
    workers: tuple[int, ...] = ()
    late: bool = False


class DropRequest(msgspec.Struct, frozen=True):
    """Forget a request without a waiting worker, and its body if it still has one."""

    token: RequestToken


class RoundRecovered(_OfWorker, frozen=True):
    """Answer `WorkerReturned`, `WorkerResumed` and `WorkerJoined`: so many rounds of the worker are over.

    The next push of a worker that does not know its number is ``round + 1``. One that waits for the acknowledgement of
    an earlier one sends it again.
    """

    round: int


class RoundsForgotten(msgspec.Struct, frozen=True):
    """Report updates that were acknowledged and are in no snapshot: the restarted server goes on without them.

    Attributes:
        first, last: rounds.
        worker: whose, or None where they are of all.
    """

    first: int
    last: int
    worker: int | None


ConsistencyInstruction = (
    CombineRound | ApplyPush | AcknowledgePush | RepeatAcknowledgement | AnswerPull | FailRequest | DropRequest
    | RoundRecovered | RoundsForgotten
)  # fmt: skip
ConsistencyInstructions = list[ConsistencyInstruction]

# -- the engine -------------------------------------------------------------------------------------------------------


class WorkerPresence(Enum):
    """State of a worker."""

    HERE = "here"
    LEFT = "left"
    #: lost, the others go on without it
    MISSED = "missed"
    #: lost, the others wait for it
    AWAITED = "awaited"
    #: no process has this place of an elastic job
    ABSENT = "absent"


#: Workers whose contributions rounds wait for.
_EXPECTED = (WorkerPresence.HERE, WorkerPresence.AWAITED)


class ConsistencyState(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """State of an engine in a snapshot.

    Attributes:
        staleness: None is infinite.
        done: by worker.
        presence: by worker, the values of `WorkerPresence`.
    """

    staleness: int | None
    done: tuple[int, ...]
    presence: tuple[WorkerPresence, ...]

    def over(self, done: tuple[int, ...]) -> ConsistencyState:
        """Return the same with more rounds over."""
        return ConsistencyState(self.staleness, done, self.presence)


class WaitingRequest(msgspec.Struct, frozen=True):
    """Request that waits for ``workers``, ascending."""

    token: RequestToken
    worker: int
    round: int
    workers: tuple[int, ...]
    reason: str


class ConsistencyEngine:
    """Rounds of one shard.

    Args:
        num_workers: they are numbered from 0.
        staleness: 0 is synchronous, `math.inf` asynchronous; see (B) to (D).
        present: those that are there from the beginning, in an elastic job (L); None: all are.

    Attributes:
        is_synchronous: whether rounds are combined.
    """

    def __init__(self, num_workers: int, staleness: float = 0, present: Collection[int] | None = None) -> None:
        self.num_workers = num_workers
        self.staleness = staleness
        self.is_synchronous = staleness == 0
        self._done = [0] * num_workers
        self._presence = [
            WorkerPresence.HERE if present is None or worker in present else WorkerPresence.ABSENT
            for worker in range(num_workers)
        ]
        #: synchronous, by worker that has joined: the last round that is not expected of it (L)
        self._joined_after: dict[int, int] = {}
        #: not heard of since the restart of this server (I)
        self._away: set[int] = set()
        #: those of whom a snapshot alone says whether they are there: it may be older than their return
        self._remembered: set[int] = set()
        #: contributions that are not applied, by worker and round; all rounds are above ``done``
        self._held: list[dict[int, RequestToken]] = [{} for _ in range(num_workers)]
        #: contributions that are not applied, and whose senders do not wait for an answer any more
        self._dropped: set[RequestToken] = set()
        #: by worker, the last round of which its contribution was withdrawn, since it has pushed last (K)
        self._withdrawn: dict[int, int] = {}
        #: pulls that wait, in the order of their coming
        self._pulls: list[PullRequested] = []
        #: step G, abort: the reason and the workers of every failure from now on
        self._failure: tuple[str, tuple[int, ...]] | None = None

    @classmethod
    def from_state(cls, state: ConsistencyState, candidates: Collection[int] | None = None) -> ConsistencyEngine:
        """Return the engine of a restarted server (I); of an elastic job, ``candidates`` may still be there (L)."""
        engine = cls(len(state.done), math.inf if state.staleness is None else state.staleness, candidates)
        engine._done = list(state.done)
        if candidates is not None:
            engine._away = set(candidates)
            return engine
        engine._presence = list(state.presence)
        engine._away, engine._remembered = set(range(len(state.done))), set(range(len(state.done)))
        return engine

    def state(self) -> ConsistencyState:
        """Return the state that belongs to the value when all instructions so far have been carried out."""
        staleness = None if math.isinf(self.staleness) else int(self.staleness)
        return ConsistencyState(staleness, tuple(self._done), tuple(self._presence))

    def done(self, worker: int) -> int:
        """Return how many rounds of a worker are over (A)."""
        return self._done[worker]

    def is_away(self, worker: int) -> bool:
        """Return whether nothing was heard of a worker since the restart of this server (I)."""
        return worker in self._away

    def has(self, worker: int, round: int) -> bool:
        """Return whether this push has come, applied or not, so that its body is not needed again."""
        return round <= self._done[worker] or round in self._held[worker]

    def is_next(self, round: int) -> bool:
        """Return whether a round is next for all workers, with nothing else under way.

        Then it makes no difference whether all contributions are taken in one after the other, or `together`.
        """
        return (
            self._done[0] + 1 == round
            and self.is_synchronous
            and not (self._pulls or self._away or self._failure or self._joined_after or any(self._held))
            and all(presence is WorkerPresence.HERE for presence in self._presence)
        )

    def together(self, round: int) -> None:
        """Count a round as over, to which all workers have contributed, and which `is_next`."""
        self._done = [round] * self.num_workers
        self._withdrawn.clear()

    def may_read(self, worker: int, round: int) -> bool:
        """Return whether a worker that has pushed so often would be answered at once (D)."""
        pull = PullRequested(worker, round, None)
        return self._refusal(worker, None) is None and self._may_read(pull)

    def handle(self, event: ConsistencyEvent) -> ConsistencyInstructions:
        """Take one event in; returns what to do, in this order."""
        if not isinstance(event, RequestExpired) and not 0 <= event.worker < self.num_workers:
            raise ValueError(f"there is no worker {event.worker} among {self.num_workers}")
        if isinstance(event, PushReceived):  # these two are what a server does all day, and `match` takes its time
            return self._push(event)
        if isinstance(event, PullRequested):
            return self._pull(event)
        match event:
            case WorkerLeft(worker):
                return self._leave(worker)
            case WorkerDisconnected(worker):
                return self._stop_answering(worker)
            case WorkerLost(worker, policy):
                return self._lose(worker, policy)
            case WorkerReappeared(worker):
                return self._find(worker)
            case WorkerReturned(worker):
                return self._return(worker)
            case WorkerResumed(worker, round):
                return self._resume(worker, round)
            case WorkerJoined(worker, over):
                return self._join(worker, over)
            case RequestExpired(token):
                return self._expire(token)

    def waits(self) -> list[WaitingRequest]:
        """Return every request that waits, with the workers that it waits for (K)."""
        waits = []
        for worker, held in enumerate(self._held):
            for round, token in held.items():
                workers, reason = self._missing() if self.is_synchronous else self._before(worker)
                waits.append(WaitingRequest(token, worker, round, workers, reason))
        for pull in self._pulls:
            workers, reason = self._unread(pull)
            waits.append(WaitingRequest(pull.token, pull.worker, pull.round, workers, reason))
        return waits

    # -- events -------------------------------------------------------------------------------------------------------

    def _push(self, event: PushReceived) -> ConsistencyInstructions:
        worker, round, token = event.worker, event.round, event.token
        self._withdrawn.pop(worker, None)
        refusal = self._refusal(worker, token)
        if refusal is not None:
            return [refusal]
        if 1 <= round <= self._done[worker]:
            return [RepeatAcknowledgement(worker, round, token)]
        held = self._held[worker]
        if not 1 <= round <= self._done[worker] + MAX_ROUNDS_AHEAD:
            reason = f"worker {worker} pushed round {round}, but is in round {self._done[worker] + 1}"
            return [FailRequest(token, reason)]
        if self._presence[worker] is WorkerPresence.LEFT and round not in held:
            reason = f"worker {worker} has left after round {self._done[worker]}; it must return to push again"
            return [FailRequest(token, reason)]
        instructions: ConsistencyInstructions = []
        if round in held:
            self._dropped.discard(held[round])
            instructions.append(DropRequest(held[round]))
        held[round] = token
        return instructions + self._settle(worker)

    def _pull(self, event: PullRequested) -> ConsistencyInstructions:
        refusal = self._refusal(event.worker, event.token)
        if refusal is not None:
            return [refusal]
        if self._may_read(event):
            return [AnswerPull(event.worker, event.token)]
        self._pulls.append(event)
        return []

    def _refusal(self, worker: int, token: RequestToken) -> FailRequest | None:
        """Step G: whether a request fails whatever it asks for."""
        if self._failure is not None:
            return FailRequest(token, *self._failure)
        if self._presence[worker] in (WorkerPresence.MISSED, WorkerPresence.AWAITED):
            reason = f"worker {worker} was given up as lost; it must return before it goes on"
            return FailRequest(token, reason, (worker,))
        if self._presence[worker] is WorkerPresence.ABSENT:
            return FailRequest(token, f"worker {worker} was given up as lost", (worker,))
        return None

    def _leave(self, worker: int) -> ConsistencyInstructions:
        """Step F. Also of a worker that was given up: it was silent, and is not waited for once it is found."""
        self._presence[worker] = WorkerPresence.LEFT
        self._withdrawn.pop(worker, None)
        self._away.discard(worker)
        self._remembered.discard(worker)
        return self._settle(worker)

    def _stop_answering(self, worker: int) -> ConsistencyInstructions:
        """Answer a worker's requests no more; its contributions stay."""
        self._dropped.update(self._held[worker].values())
        gone = [pull for pull in self._pulls if pull.worker == worker]
        self._pulls = [pull for pull in self._pulls if pull.worker != worker]
        return [DropRequest(pull.token) for pull in gone]

    def _lose(self, worker: int, policy: LossPolicy) -> ConsistencyInstructions:
        """Step G."""
        instructions = self._stop_answering(worker)
        self._remembered.discard(worker)
        self._withdrawn.pop(worker, None)
        if self._presence[worker] is WorkerPresence.LEFT:
            return instructions
        if policy is LossPolicy.ABORT:
            return instructions + self._abort(worker)
        if policy is LossPolicy.WAIT:
            self._presence[worker] = WorkerPresence.AWAITED
            return instructions
        if policy is LossPolicy.ELASTIC:
            self._presence[worker] = WorkerPresence.ABSENT
            self._joined_after.pop(worker, None)
            self._away.discard(worker)
            return instructions + self._drop_held(worker) + self._settle(worker)
        self._presence[worker] = WorkerPresence.MISSED
        return instructions + self._settle(worker)

    def _drop_held(self, worker: int) -> ConsistencyInstructions:
        """Step L: drop the pushes of a worker that are not applied."""
        tokens = list(self._held[worker].values())
        self._held[worker].clear()
        self._dropped.difference_update(tokens)
        return [DropRequest(token) for token in tokens]

    def _join(self, worker: int, over: int | None) -> ConsistencyInstructions:
        """Step L."""
        instructions: ConsistencyInstructions = []
        self._away.discard(worker)
        if self._presence[worker] is not WorkerPresence.HERE:
            if over is not None:  # another connection of one that has left, and pulls
                return [RoundRecovered(worker, self._done[worker])]
            instructions = self._drop_held(worker)
            over = self._last_begun(worker)
            self._presence[worker] = WorkerPresence.HERE
        if self.is_synchronous:
            if over is not None and over > max(self._done[worker], self._joined_after.get(worker, 0)):
                self._joined_after[worker] = over
        else:
            self._done[worker] = max(self._done[worker], over or 0)
        over = max(self._done[worker], self._joined_after.get(worker, 0))
        return [*instructions, RoundRecovered(worker, over), *self._settle(worker)]

    def _last_begun(self, worker: int) -> int:
        """Return the last round that has begun without a worker which is about to join."""
        if not self.is_synchronous:
            least = min((self._done[each] for each in self._expected()), default=0)
            return max(self._done[worker], least)
        following = self._done[worker] + 1
        return following if any(following in held for held in self._held) else following - 1

    def _abort(self, worker: int) -> ConsistencyInstructions:
        if self._failure is not None:
            return []
        reason = f"worker {worker} was lost in round {self._done[worker] + 1}"
        self._failure = (reason, (worker,))
        tokens = [token for held in self._held for token in held.values()] + [pull.token for pull in self._pulls]
        instructions: ConsistencyInstructions = [
            DropRequest(token) if token in self._dropped else FailRequest(token, reason, (worker,)) for token in tokens
        ]
        for held in self._held:
            held.clear()
        self._pulls.clear()
        self._dropped.clear()
        return instructions

    def _find(self, worker: int) -> ConsistencyInstructions:
        """Step H for a lost worker."""
        if self._presence[worker] not in {WorkerPresence.MISSED, WorkerPresence.AWAITED}:
            return []
        return [*self._expect(worker), *self._settle(worker)]

    def _return(self, worker: int) -> ConsistencyInstructions:
        """Step H."""
        self._away.discard(worker)
        self._remembered.discard(worker)
        self._withdrawn.pop(worker, None)
        return [*self._expect(worker), RoundRecovered(worker, self._done[worker]), *self._settle(worker)]

    def _expect(self, worker: int) -> ConsistencyInstructions:
        instructions: ConsistencyInstructions = []
        if self._presence[worker] in {WorkerPresence.LEFT, WorkerPresence.MISSED}:
            over = min((self._done[each] for each in self._expected()), default=max(self._done))
            instructions = self._skip(worker, over)
        self._presence[worker] = WorkerPresence.HERE
        return instructions

    def _skip(self, worker: int, over: int) -> ConsistencyInstructions:
        """Count rounds up to ``over`` as over for a worker that comes back; its pushes for them count (G)."""
        instructions: ConsistencyInstructions = []
        for round in sorted(each for each in self._held[worker] if each <= over):
            instructions += self._apply(worker, round)
        self._done[worker] = max(self._done[worker], over)
        return instructions

    def _resume(self, worker: int, round: int) -> ConsistencyInstructions:
        """Step I."""
        instructions: ConsistencyInstructions = []
        if worker in self._away and round > self._done[worker]:
            together = self.is_synchronous
            instructions.append(RoundsForgotten(self._done[worker] + 1, round, None if together else worker))
            for each in range(self.num_workers) if together else (worker,):
                self._done[each] = round
                ended = sorted(over for over in self._held[each] if over <= round)
                instructions += [self._end(each, over, repeated=True) for over in ended]
        self._away.discard(worker)
        if worker in self._remembered:
            self._remembered.discard(worker)
            instructions += self._expect(worker)
        return [*instructions, RoundRecovered(worker, self._done[worker]), *self._settle(worker)]

    def _expire(self, token: RequestToken) -> ConsistencyInstructions:
        """Step K."""
        for wait in self.waits():
            if wait.token == token:
                self._pulls = [pull for pull in self._pulls if pull.token != token]
                if self._held[wait.worker].get(wait.round) == token:
                    del self._held[wait.worker][wait.round]
                    self._withdrawn[wait.worker] = max(wait.round, self._withdrawn.get(wait.worker, 0))
                if token in self._dropped:
                    self._dropped.discard(token)
                    return [DropRequest(token)]
                return [FailRequest(token, wait.reason, wait.workers, late=True)]
        return []

    # -- what follows -------------------------------------------------------------------------------------------------

    def _settle(self, worker: int) -> ConsistencyInstructions:
        """Return what has become possible since something changed for ``worker``."""
        instructions: ConsistencyInstructions = []
        if self.is_synchronous:
            while self._is_complete(round := self._done[0] + 1) or self._is_empty(round):
                instructions += self._combine(round)
                instructions += self._answer()
        elif worker not in self._away:
            while self._done[worker] + 1 in self._held[worker]:
                instructions += self._apply(worker, self._done[worker] + 1)
        return instructions + self._answer()

    def _is_complete(self, round: int) -> bool:
        """Step B."""
        if self._away and not self._away.isdisjoint(self._expected()):
            return False
        is_there = False
        for worker, held in enumerate(self._held):
            if round in held:
                is_there = True
            elif self._presence[worker] in _EXPECTED and round > self._joined_after.get(worker, 0):
                return False
        return is_there

    def _is_empty(self, round: int) -> bool:
        """Return whether a round has no worker, since all have joined for later ones (L)."""
        if not self._joined_after or any(round in held for held in self._held):
            return False
        return all(round <= self._joined_after.get(worker, 0) for worker in self._expected())

    def _combine(self, round: int) -> ConsistencyInstructions:
        workers = tuple([worker for worker, held in enumerate(self._held) if round in held])
        lost = 0
        if len(workers) < self.num_workers:
            missed = {worker for worker, one in enumerate(self._presence) if one is WorkerPresence.MISSED}
            lost = len(missed.difference(workers))
        tokens = tuple([self._held[worker][round] for worker in workers])
        self._done = [round] * self.num_workers
        if self._joined_after:
            self._joined_after = {worker: last for worker, last in self._joined_after.items() if last > round}
        if not workers:
            return []
        scale = (len(workers) + lost) / len(workers)
        return [CombineRound(round, workers, tokens, scale), *[self._end(worker, round) for worker in workers]]

    def _apply(self, worker: int, round: int) -> ConsistencyInstructions:
        """Step C."""
        token = self._held[worker][round]
        self._done[worker] = round
        return [ApplyPush(worker, round, token), self._end(worker, round)]

    def _end(
        self, worker: int, round: int, *, repeated: bool = False
    ) -> AcknowledgePush | RepeatAcknowledgement | DropRequest:
        """Return how a contribution ends: its worker hears of it if it is still the one that sent it."""
        token = self._held[worker].pop(round)
        if token in self._dropped:
            self._dropped.discard(token)
            return DropRequest(token)
        return RepeatAcknowledgement(worker, round, token) if repeated else AcknowledgePush(worker, round, token)

    def _answer(self) -> ConsistencyInstructions:
        """Pulls that may read now."""
        if not self._pulls:
            return []
        ready: ConsistencyInstructions = []
        waiting = []
        for pull in self._pulls:
            if self._may_read(pull):
                ready.append(AnswerPull(pull.worker, pull.token))
            else:
                waiting.append(pull)
        self._pulls = waiting
        return ready

    def _may_read(self, pull: PullRequested) -> bool:
        """Step D."""
        if self._done[pull.worker] < pull.round or pull.worker in self._away:
            return False
        # in a synchronous store rounds are over for all at once
        return self.is_synchronous or self.staleness == math.inf or not self._behind(pull)

    def _behind(self, pull: PullRequested) -> tuple[int, ...]:
        """Expected workers whose rounds a pull must see, and that have not pushed them."""
        need = pull.round - self.staleness
        return tuple(worker for worker in self._expected() if self._done[worker] < need)

    def _expected(self) -> Iterable[int]:
        """Workers whose contributions rounds wait for, ascending."""
        return (worker for worker, presence in enumerate(self._presence) if presence in _EXPECTED)

    # -- for whom ------------------------------------------------------------------------------------------------------

    def _missing(self) -> tuple[tuple[int, ...], str]:
        """Return the workers that the current synchronous round waits for, and the reason."""
        round = self._done[0] + 1
        if not self._away.isdisjoint(self._expected()):
            return self._named(self._away.intersection(self._expected()), _RESTARTED)
        expected = [worker for worker in self._expected() if round > self._joined_after.get(worker, 0)]
        missing = [worker for worker in expected if round not in self._held[worker]]
        if not missing:  # all have left, and one of them asks for more; others may come (L)
            return (), f"round {round} waits for workers, and there are none"
        if not_pushed := [worker for worker in missing if self._withdrawn.get(worker, 0) < round]:
            return self._named(not_pushed, f"round {round} waits for")
        workers, reason = self._named(missing, f"round {round} waits for")
        return workers, f"{reason}, whose pushes were withdrawn at their deadlines"

    def _before(self, worker: int) -> tuple[tuple[int, ...], str]:
        """Return the worker that its own contributions wait for, where they are applied one by one, and the reason."""
        if worker in self._away:
            return self._named([worker], _RESTARTED)
        return self._named([worker], f"later rounds wait for round {self._done[worker] + 1} of")

    def _unread(self, pull: PullRequested) -> tuple[tuple[int, ...], str]:
        """Return the workers that a pull waits for, and the reason."""
        if self.is_synchronous:
            return self._missing()
        if self._done[pull.worker] < pull.round or pull.worker in self._away:
            return self._before(pull.worker)
        what = f"after round {pull.round}, with a staleness of {self.staleness:g}, reading waits for"
        return self._named(self._behind(pull), what)

    def _named(self, workers: Iterable[int], what: str) -> tuple[tuple[int, ...], str]:
        ordered = tuple(sorted(workers))
        awaited = [str(worker) for worker in ordered if self._presence[worker] is WorkerPresence.AWAITED]
        reason = f"{what} worker(s) {', '.join(map(str, ordered))}"
        if awaited:
            reason += f"; worker(s) {', '.join(awaited)} were lost, and none has come in their place"
        return ordered, reason

    def validate(self) -> None:
        """Assert what must hold between two events."""
        held = [token for each in self._held for token in each.values()]
        tokens = held + [pull.token for pull in self._pulls]
        assert len(set(tokens)) == len(tokens), "no token twice"
        assert self._dropped <= set(held)
        assert not (self._failure and tokens), "nothing waits after a failure"
        for worker, each in enumerate(self._held):
            assert all(self._done[worker] < round <= self._done[worker] + MAX_ROUNDS_AHEAD for round in each)
        if self.is_synchronous:
            assert len(set(self._done)) == 1, "rounds are over for all at once"
            assert not self._is_complete(self._done[0] + 1)
            assert not self._is_empty(self._done[0] + 1)
            assert all(last > self._done[worker] for worker, last in self._joined_after.items())
        else:
            assert all(
                d + 1 not in h or w in self._away for w, (d, h) in enumerate(zip(self._done, self._held, strict=True))
            )
        lost = {WorkerPresence.MISSED, WorkerPresence.AWAITED, WorkerPresence.ABSENT}
        assert not any(self._presence[pull.worker] in lost or self._may_read(pull) for pull in self._pulls)
        is_anybody_there = any(True for _ in self._expected())
        assert all(wait.workers or not is_anybody_there for wait in self.waits()), "whatever waits, waits for somebody"
