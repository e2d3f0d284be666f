"""Events that happen to a shard, and instructions to its server: the words of `reigen.kv.consistency.state_machine`.

A *token* is the server's own handle on one request of a worker: its connection, and for a push its body. It is any
hashable object, a new one for each `PushReceived` and `PullRequested`, and ends with exactly one of `AcknowledgePush`,
`RepeatAcknowledgement`, `AnswerPull`, `FailRequest` and `DropRequest`. The body of a push is used by one `CombineRound`
or `ApplyPush` before that, or not at all.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from reigen.cluster.membership.members import LossPolicy

RequestToken = Hashable


# -- events -----------------------------------------------------------------------------------------------------------


class PushReceived(msgspec.Struct, frozen=True):
    """Contribution of a worker; ``round`` is the worker's own count of pushes of the shard, from 1."""

    worker: int
    round: int
    token: RequestToken


class PullRequested(msgspec.Struct, frozen=True):
    """Request of a worker for the shard's value; ``round`` is how often it has pushed the shard before."""

    worker: int
    round: int
    token: RequestToken


class WorkerLeft(msgspec.Struct, frozen=True):
    """End of a worker that has no more data; its pushes before count. It may still pull."""

    worker: int


class WorkerDisconnected(msgspec.Struct, frozen=True):
    """End of a worker's connection. It may make another, and asks again then for missing answers."""

    worker: int


class WorkerLost(msgspec.Struct, frozen=True):
    """End of a worker that the scheduler has given up."""

    worker: int
    policy: LossPolicy


class WorkerReappeared(msgspec.Struct, frozen=True):
    """Return of a lost worker, which was silent, and is the same process as before."""

    worker: int


class WorkerReturned(msgspec.Struct, frozen=True):
    """Question of a worker where to go on: of another process in place of a lost one, or of one that had left."""

    worker: int


class WorkerResumed(msgspec.Struct, frozen=True):
    """Message of a worker that has connected again, to a server that may have been restarted.

    Attributes:
        round: the last push of the shard that was acknowledged to it: it sends those that come after it again.
    """

    worker: int
    round: int


class RequestExpired(msgspec.Struct, frozen=True):
    """End of a request's deadline."""

    token: RequestToken


ConsistencyEvent = (
    PushReceived
    | PullRequested
    | WorkerLeft
    | WorkerDisconnected
    | WorkerLost
    | WorkerReappeared
    | WorkerReturned
    | WorkerResumed
    | RequestExpired
)

# -- instructions -----------------------------------------------------------------------------------------------------


class CombineRound(msgspec.Struct, frozen=True):
    """Add up a round, update the value by it, and free the bodies.

    Attributes:
        round: which.
        workers: those that have contributed, ascending.
        tokens: their contributions, to be added in this order.
        scale: factor of the sum; not 1 only where workers that were lost are made up for.
    """

    round: int
    workers: tuple[int, ...]
    tokens: tuple[RequestToken, ...]
    scale: float


class ApplyPush(msgspec.Struct, frozen=True):
    """Update the value by one contribution, and free its body."""

    worker: int
    round: int
    token: RequestToken


class AcknowledgePush(msgspec.Struct, frozen=True):
    """Tell the worker that its push has been applied."""

    worker: int
    round: int
    token: RequestToken


class RepeatAcknowledgement(msgspec.Struct, frozen=True):
    """Free the body of a push that has been applied before, and tell the worker so again."""

    worker: int
    round: int
    token: RequestToken


class AnswerPull(msgspec.Struct, frozen=True):
    """Send the value as it is after all instructions before this one."""

    worker: int
    token: RequestToken


class FailRequest(msgspec.Struct, frozen=True):
    """Answer with an error; if it was a push, its body is not used.

    Attributes:
        token: the request.
        reason: in words, without the names of the key and of hosts.
        workers: who is at fault.
        late: a deadline is over. Otherwise somebody was lost or, with no ``workers``, the request makes no sense.
    """

    token: RequestToken
    reason: str
    workers: tuple[int, ...] = ()
    late: bool = False


class DropRequest(msgspec.Struct, frozen=True):
    """Forget a request without a waiting worker, and its body if it still has one."""

    token: RequestToken


class RoundRecovered(msgspec.Struct, frozen=True):
    """Answer `WorkerReturned` and `WorkerResumed`: so many rounds of the worker are over.

    The next push of a worker that does not know its number is ``round + 1``. One that waits for the acknowledgement of
    an earlier one sends it again.
    """

    worker: int
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
    CombineRound
    | ApplyPush
    | AcknowledgePush
    | RepeatAcknowledgement
    | AnswerPull
    | FailRequest
    | DropRequest
    | RoundRecovered
    | RoundsForgotten
)
ConsistencyInstructions = list[ConsistencyInstruction]
