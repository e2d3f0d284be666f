"""Membership of this process in an elastic job, as far as the functions that users call need it.

The functions here do nothing in a job that is not elastic. `use` says who answers in one that is.
"""

from __future__ import annotations

from typing import Protocol


class Membership(Protocol):
    """A member of an elastic job. The thread that trains calls these."""

    def step_applied(self) -> None:
        """Do the work of the function of this name."""

    def check(self) -> None:
        """Do the work of the function of this name."""

    def needs_sync(self) -> bool:
        """Do the work of the function of this name."""

    def reset(self) -> None:
        """Do the work of the function of this name."""


_membership: Membership | None = None


def use(membership: Membership | None) -> None:
    """From now on this process is in an elastic job, as this member; None: it is in none."""
    global _membership  # noqa: PLW0603  # the one of this process, as its context
    _membership = membership


def is_elastic() -> bool:
    """Return whether this process is in an elastic job."""
    return _membership is not None


def step_applied() -> None:
    """Count a step, which all members take: the state of this process has been saved.

    Raises:
        HostsUpdatedInterrupt: the members change now, at this step of all of them.
    """
    if _membership is not None:
        _membership.step_applied()


def check() -> None:
    """Raise HostsUpdatedInterrupt if the members change now, without a step."""
    if _membership is not None:
        _membership.check()


def needs_sync() -> bool:
    """Return whether some member of the view may hold another state than rank 0: who came anew, or after an error."""
    return _membership is None or _membership.needs_sync()


def reset() -> None:
    """After an error or an interrupt: return when the next view runs; ``rank()`` and ``size()`` are of that view then.

    Raises:
        ReigenError: there will be none for this process.
    """
    if _membership is not None:
        _membership.reset()
