"""Step at which all members of a view stop, because some of them leave or others come. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from reigen.cluster.membership.views.events import SendTo
from reigen.cluster.membership.views.messages import ChangeAt, StepReached
from reigen.cluster.membership.views.record import MemberId, StepBase, View


class PlannedStop:
    """Stop of one view's members at one step. Rank 0 counts who has stopped, and begins the change when all have.

    Args:
        me: the member.
        view: its view.

    Attributes:
        step: where all stop; None: nobody has named one.
        reached: members that have stopped, as far as this one knows.
    """

    def __init__(self, me: MemberId, view: View) -> None:
        self._me, self._view = me, view
        self.step: int | None = None
        self.reached: set[MemberId] = set()

    def name(self, step: int) -> int:
        """Take note of a step that a member has named; return the earliest of all."""
        self.step = min(self.step or step, step)
        return self.step

    def is_due(self, applied: int) -> bool:
        """Return whether a member that has applied this step runs no more."""
        return self.step is not None and applied >= self.step

    def is_kept(self, base: StepBase) -> bool:
        """Return whether all who go on from the view have stopped at that step: nothing is run again."""
        is_stable = base.stable_step == base.step and not base.completes
        return self.step is not None and is_stable and self.is_due(base.step)

    @property
    def is_complete(self) -> bool:
        """True if all have stopped."""
        return self.reached >= self._view.ranks.keys()

    def messages(self) -> Iterator[SendTo]:
        """Tell rank 0 that this member has stopped, or, as rank 0, those others at which step to stop that have not."""
        assert self.step is not None
        if self._view.ranks[self._me]:
            yield SendTo(self._view.members[0], StepReached(self._view.epoch, self.step, self._me))
        else:
            message = ChangeAt(self._view.epoch, self.step)
            yield from (SendTo(member, message) for member in self._view.members if member not in self.reached)
