"""This process's membership in an elastic job: what the functions that users call need of it, and nothing more.

The functions here do nothing in a job that is not elastic. `use` says who answers in one that is.
"""

from __future__ import annotations

from typing import Protocol


class Membership(Protocol):
    """A member of an elastic job. The thread that trains calls these."""

    def step_applied(self) -> None:
        """See the function of this name, as for the others."""

    def check(self) -> None: ...

    def needs_sync(self) -> bool: ...

    def reset(self) -> None: ...


_membership: Membership | None = None


def use(membership: Membership | None) -> None:
    """From now on this process is in an elastic job, as this member; None: it is in none."""
    global _membership  # noqa: PLW0603  # the one of this process, as its context
    _membership = membership


def is_elastic() -> bool:
    """Return whether this process is in an elastic job."""
    return _membership is not None


def step_applied() -> None:
    """This process's state has been saved: one more step, which all members take.

    Raises:
        HostsUpdatedInterrupt: the members change now, at this step of all of them.
    """
    if _membership is not None:
        _membership.step_applied()


def check() -> None:
    """As `step_applied`, without a step: raises HostsUpdatedInterrupt if the members change now."""
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
