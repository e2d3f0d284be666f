"""Consensus of all workers before something holds: the spec of a key, the optimizer of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from reigen.errors import CollectiveError, DeadlineError, MismatchError
from reigen.kv.protocol import KeySpec, RemoteError, ShardRange
from reigen.kv.server.requests import WorkerRequest
from reigen.kv.server.stalls import WaitingWorker
from reigen.optim import Optimizer


class ConsensusStore(Protocol):
    """Interface of the store whose settings the workers agree on.

    Attributes:
        must_save: what was decided belongs into the next snapshot.
    """

    must_save: bool

    @property
    def is_elastic(self) -> bool:
        """Return whether workers come and go."""

    @property
    def has_begun(self) -> bool:
        """Return whether it is known who is expected: the first workers of an elastic job have come."""

    def expected(self) -> tuple[int, ...]:
        """Return the workers that the others wait for, ascending."""

    def plan_shards(
        self, key: int, spec: KeySpec, places: tuple[ShardRange, ...], workers: tuple[int, ...] = ()
    ) -> None:
        """Expect the values of a key's shards, and drop those of earlier generations.

        ``workers`` of an elastic job take part in the first round.
        """

    def has_pushes(self, key: int | None = None) -> bool:
        """Return whether a shard that is here, of that key or of any, has been pushed."""

    def use(self, optimizer: Optimizer) -> None:
        """Update stored values by an optimizer; raises ReigenError if it cannot do so."""


@dataclass
class WorkerConsensus:
    """Consensus on one value: the workers' proposals, gathered until all have come, and the requests that wait for it.

    Attributes:
        what: the decided value, for errors.
        describe: a worker's proposal, for errors.
        proposals: of the workers since the last decision; a worker may replace its own.
        waiting: the requests, by worker.
        withdrawn: workers that had proposed when a worker's deadline was over, and have not proposed again.
    """

    what: str
    describe: Callable[[Any], str] = str
    proposals: dict[int, Hashable] = field(default_factory=dict)
    waiting: dict[int, WorkerRequest] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)

    def missing(self, expected: Collection[int]) -> tuple[int, ...]:
        """Return those of ``expected`` that have not proposed, ascending."""
        return tuple(sorted(set(expected) - set(self.proposals)))

    def decide(self, expected: Collection[int]) -> tuple[Any, CollectiveError | None]:
        """Return the value that all have proposed, or the error that all get, or neither while a worker is missing.

        After either all proposals are dropped; after an error the workers can try again.
        """
        if not self.proposals or self.missing(expected):
            return None, None
        proposals, self.proposals = self.proposals, {}
        votes = Counter(proposals[worker] for worker in sorted(proposals))
        if len(votes) == 1:
            return next(iter(votes)), None
        usual, _ = votes.most_common(1)[0]  # of the lowest worker, where there is no majority
        odd = [worker for worker, proposal in proposals.items() if proposal != usual]
        details = {worker: self.describe(proposal) for worker, proposal in proposals.items()}
        return None, MismatchError(f"the workers do not agree on {self.what}", ranks=odd, details=details)

    def take(self, request: WorkerRequest, proposal: Any) -> None:
        """Take a worker's proposal, and have its request wait."""
        worker = request.connection.worker
        self.proposals[worker] = proposal
        self.withdrawn.discard(worker)
        self.waiting[worker] = request

    def settle(self, expected: Collection[int]) -> Any:
        """Return the value that all have proposed, if they have; answer all with an error if they disagree."""
        proposal, error = self.decide(expected)
        if error is not None:
            self.fail(RemoteError.of(error))
        return proposal

    def pop_waiting(self) -> Collection[WorkerRequest]:
        """Return the requests that wait; they are the caller's to answer."""
        waiting, self.waiting = self.waiting, {}
        return waiting.values()

    def fail(self, problem: RemoteError) -> None:
        """Answer all that wait with an error; they may propose it again."""
        self.proposals.clear()
        for request in self.pop_waiting():
            request.connection.refuse(request, problem)

    def waits(self, expected: Collection[int]) -> Iterator[WaitingWorker]:
        """Yield every worker that waits, with those that it waits for."""
        missing = self._absent(expected)
        for worker, request in self.waiting.items():
            yield WaitingWorker(self.what, worker, missing, request.since)

    def expire(self, before: float, expected: Collection[int]) -> None:
        """Give up if a request has waited since ``before``."""
        if any(request.since < before for request in self.waiting.values()):
            missing = self._absent(expected)
            self.withdrawn.update(self.waiting)
            names = ", ".join(f"worker {number}" for number in sorted(missing))
            error = DeadlineError(f"{self.what}: not all workers have said it; missing: {names}", ranks=missing)
            self.fail(RemoteError.of(error))

    def _absent(self, expected: Collection[int]) -> tuple[int, ...]:
        """Return the workers that have not spoken; those that came in vain before only where there are no others."""
        missing = self.missing(expected)
        return tuple(worker for worker in missing if worker not in self.withdrawn) or missing
