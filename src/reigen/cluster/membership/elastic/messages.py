"""Messages on the connections between members of an elastic job.

a. Of two processes, each may connect to the other; both ends say `LinkHello` first of all.
b. `ToMember` is for the state machine of the process at the other end.
c. `ToVoter` is for the voter of its host, whose memory all processes of that host have: any of them answers, by
   `VoterAnswer`.
d. Whose program is done says `ProgramFinished`, and waits for `FinishNoted`.
e. Members tell rank 0 how long their steps take (`StepTimes`), every second.

Frames get lost where a connection ends; what matters is asked again (`views`, d).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from reigen.cluster.membership.messages import Count
from reigen.cluster.membership.stragglers import StepTime
from reigen.cluster.membership.views.messages import (
    MAX_VIEW_MESSAGE_BYTES,
    AcceptView,
    BallotPreempted,
    BehindView,
    PrepareView,
    ViewAccepted,
    ViewDecided,
    ViewMessage,
    ViewPromise,
)
from reigen.cluster.membership.views.record import VoterId
from reigen.net.codec import MessageCodec

#: A message of the views, and what stands around it.
MAX_LINK_FRAME_BYTES = MAX_VIEW_MESSAGE_BYTES + 1024
_Text = Annotated[str, msgspec.Meta(max_length=256)]

#: What a voter is asked and told, and what it answers.
VoterRequest = PrepareView | AcceptView | ViewDecided
VoterReply = ViewPromise | ViewAccepted | BallotPreempted | BehindView | ViewDecided


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class LinkHello(_Frame, frozen=True, tag=1):
    """The process at this end.

    Attributes:
        address: ``host:port`` where it listens.
        pid: its process id.
        started: when it was started, in ticks since the kernel was (`/proc/PID/stat`): with ``pid`` it is one process.
        namespace: who has the same sees it by its ``pid``.
        is_finished: its program is done.
    """

    address: _Text
    pid: Count
    started: Count
    namespace: _Text
    is_finished: bool = False


class ToMember(_Frame, frozen=True, tag=2):
    """Message to the member at the other end."""

    message: ViewMessage


class ToVoter(_Frame, frozen=True, tag=3):
    """Message to the voter of the other end's host."""

    voter: VoterId
    message: VoterRequest


class VoterAnswer(_Frame, frozen=True, tag=4):
    """Answer of the voter of this end's host."""

    voter: VoterId
    message: VoterReply


class ProgramFinished(_Frame, frozen=True, tag=5):
    """The program is done in the process at this end, which ends soon."""


class FinishNoted(_Frame, frozen=True, tag=6):
    """Answer to `ProgramFinished`."""


class StepTimes(_Frame, frozen=True, tag=7):
    """Times of steps of the member at this end, for rank 0 of its view.

    Attributes:
        epoch: of the view.
        first_step: which the first of them is of; the others follow.
        times: one for each step.
    """

    epoch: Count
    first_step: Count
    times: tuple[StepTime, ...]


LinkFrame = LinkHello | ToMember | ToVoter | VoterAnswer | ProgramFinished | FinishNoted | StepTimes
#: All that is said on a link.
LINK_CODEC: MessageCodec[LinkFrame] = MessageCodec(LinkFrame, MAX_LINK_FRAME_BYTES)
