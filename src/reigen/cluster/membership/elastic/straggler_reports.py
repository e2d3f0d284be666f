"""Reports about the pace of steps in an elastic job: members tell rank 0, which names stragglers to the launcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from reigen.cluster.membership.elastic.messages import StepTimes
from reigen.cluster.membership.stragglers import Straggler, StragglerDetector, StragglerRule
from reigen.cluster.membership.views.record import MemberId, View


class StragglerReports:
    """One member's part. Its methods, but for `tell`, are for the driver's thread.

    Args:
        me: this member.
        rule: who is a straggler.
        post: has the driver's thread do something.
        send: sends a frame to a member.
        report: names a straggler to the launcher, and the least number of members with which steps are made.
    """

    def __init__(
        self,
        me: MemberId,
        rule: StragglerRule,
        post: Callable[[Callable[[], None]], None],
        send: Callable[[MemberId, StepTimes], None],
        report: Callable[[Straggler, int], None],
    ) -> None:
        self._me, self._rule, self._post, self._send, self._report = me, rule, post, send, report
        self._view: View | None = None
        self._min_size = 1
        #: on rank 0
        self._detector: StragglerDetector | None = None

    def enter(self, view: View, min_size: int) -> None:
        """Begin anew, in a view that runs."""
        self._view, self._min_size = view, min_size
        is_first = view.members[0] == self._me
        spares = [view.members[rank] for rank in view.spares]
        self._detector = StragglerDetector(self._rule, view.members, spares) if is_first else None

    def tell(self, times: StepTimes) -> None:
        """Tell rank 0 how long steps have taken here. May be called by any thread."""
        self._post(partial(self.take, self._me, times))

    def take(self, member: MemberId, times: StepTimes) -> None:
        """Take in times of a member's steps, this one's among them; those of another view are dropped."""
        view = self._view
        if view is None or view.epoch != times.epoch:
            return
        if self._detector is not None:
            for straggler in self._detector.add(member, times.first_step, times.times):
                self._report(straggler, self._min_size)
        elif member == self._me:
            self._send(view.members[0], times)
