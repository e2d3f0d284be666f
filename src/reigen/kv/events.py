"""What happens to a cell, and what its server is to do about it: the words of `reigen.kv.consistency`.

A *token* is the server's own handle on one request of a worker: whom to answer, and for a push its body. It is any
hashable object, a new one for each `Pushed` and `PullWanted`, and ends with exactly one of `Acknowledge`, `Repeat`,
`Answer`, `Fail` and `Drop`. The body of a push is used by one `Combine` or `Apply` before that, or not at all.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

import msgspec

Token = Hashable


class LossPolicy(Enum):
    """What becomes of the others when a worker is lost; the words of REIGEN_KV_ON_WORKER_LOSS."""

    ABORT = "abort"
    CONTINUE = "continue"
    WAIT = "wait"


# -- events -----------------------------------------------------------------------------------------------------------


class Pushed(msgspec.Struct, frozen=True):
    """A contribution has come, whole.

    Attributes:
        worker: its number.
        round: this worker's own count of pushes of the cell, from 1.
        token: the server's handle on it.
    """

    worker: int
    round: int
    token: Token


class PullWanted(msgspec.Struct, frozen=True):
    """A worker wants the cell's value.

    Attributes:
        worker: its number.
        round: how often this worker has pushed the cell before.
        token: the server's handle on the request.
    """

    worker: int
    round: int
    token: Token


class Left(msgspec.Struct, frozen=True):
    """A worker has no more data; what it has pushed before counts. It may still pull."""

    worker: int


class Disconnected(msgspec.Struct, frozen=True):
    """A worker's connection has ended. It may make another, and asks again then for what was not answered."""

    worker: int


class Lost(msgspec.Struct, frozen=True):
    """The scheduler has given a worker up."""

    worker: int
    policy: LossPolicy


class Found(msgspec.Struct, frozen=True):
    """The scheduler has heard of a lost worker again: it was silent, and is the same process as before."""

    worker: int


class Returned(msgspec.Struct, frozen=True):
    """A worker asks where to go on: another process in place of a lost one, or one that has left and has data again."""

    worker: int


class Resumed(msgspec.Struct, frozen=True):
    """A worker has connected again, to a server that may have been restarted, and says how far it was.

    Attributes:
        worker: its number.
        round: the last push of the cell that was acknowledged to it: it sends those that come after it again.
    """

    worker: int
    round: int


class Expired(msgspec.Struct, frozen=True):
    """The deadline of a request is over."""

    token: Token


Event = Pushed | PullWanted | Left | Disconnected | Lost | Found | Returned | Resumed | Expired

# -- instructions -----------------------------------------------------------------------------------------------------


class Combine(msgspec.Struct, frozen=True):
    """Add up a round, update the value by it, and free the bodies.

    Attributes:
        round: which.
        workers: those that have contributed, ascending.
        tokens: their contributions, to be added in this order.
        scale: factor of the sum; not 1 only where workers that were lost are made up for.
    """

    round: int
    workers: tuple[int, ...]
    tokens: tuple[Token, ...]
    scale: float


class Apply(msgspec.Struct, frozen=True):
    """Update the value by one contribution, and free its body."""

    worker: int
    round: int
    token: Token


class Acknowledge(msgspec.Struct, frozen=True):
    """Tell the worker that its push has been applied."""

    worker: int
    round: int
    token: Token


class Repeat(msgspec.Struct, frozen=True):
    """The push has been applied before: free the body, and tell the worker so again."""

    worker: int
    round: int
    token: Token


class Answer(msgspec.Struct, frozen=True):
    """Send the value as it is after all instructions before this one."""

    worker: int
    token: Token


class Fail(msgspec.Struct, frozen=True):
    """Answer with an error; if it was a push, its body is not used.

    Attributes:
        token: the request.
        reason: in words, without the names of the key and of hosts.
        workers: who is at fault.
        late: a deadline is over. Otherwise somebody was lost or, with no ``workers``, the request makes no sense.
    """

    token: Token
    reason: str
    workers: tuple[int, ...] = ()
    late: bool = False


class Drop(msgspec.Struct, frozen=True):
    """Nobody waits for this request any more: forget it, and its body if it still has one."""

    token: Token


class Recovered(msgspec.Struct, frozen=True):
    """The answer to `Returned` and `Resumed`: so many rounds of the worker are over.

    The next push of a worker that does not know its number is ``round + 1``. One that waits for the acknowledgement of
    an earlier one sends it again.
    """

    worker: int
    round: int


class Forgotten(msgspec.Struct, frozen=True):
    """Updates that were acknowledged are in no snapshot: the restarted server goes on without them.

    Attributes:
        first, last: rounds.
        worker: whose, or None where they are of all.
    """

    first: int
    last: int
    worker: int | None


Instruction = Combine | Apply | Acknowledge | Repeat | Answer | Fail | Drop | Recovered | Forgotten
Instructions = list[Instruction]
