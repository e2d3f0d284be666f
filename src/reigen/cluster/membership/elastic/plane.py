"""Collectives of an elastic process as its driver sees them: the role that contexts play."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from reigen.cluster.membership.views.messages import StepProgress
from reigen.cluster.membership.views.record import View


class ViewPlane(Protocol):
    """Collectives of a process, view by view. All methods are called by the driver's thread, one after the other.

    None may wait for a thread that is in a method of `ViewDriver`, nor take a lock that such a thread holds.
    """

    def revoke(self, epoch: int, done: Callable[[StepProgress], None]) -> None:
        """Stop all collectives of this view, and its building; within a second. Calls that wait in them raise.

        Then, or when an update is over that has begun, call ``done``, by any thread, with how far this process is;
        ``applied`` is 0 where it has never had the state. From then on nothing is sent or written any more in the view,
        and nothing is applied of it. It may have been stopped before, or never have been built.
        """

    def build(self, view: View, done: Callable[[], None]) -> None:
        """Begin to build a view's collectives, on a thread of its own; then call ``done``, by any thread.

        Given up by `revoke` or another `build`; ``done`` means nothing then. What fails asks for another change
        (`ViewDriver.request_change`).
        """

    def roll(self, view: View, done: Callable[[], None]) -> None:
        """Begin to bring this process to the view's ``base.target``; all have built. Otherwise as `build`."""

    def run(self, view: View) -> None:
        """Let steps be run in this view."""

    def end(self, exit_code: int, reason: str) -> None:
        """End this process, within a second if the code is not 0. Called once, and nothing else is called behind it.

        Args:
            exit_code: 0: it has left in good order. 1: no view can follow, or too few members came. 75: others have
                gone on without it; it must write nothing any more that anybody may read.
            reason: for the user.
        """
