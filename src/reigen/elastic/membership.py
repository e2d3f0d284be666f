"""Membership of this process in an elastic job, as far as the functions that users call need it.

The functions here do nothing in a job that is not elastic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from reigen import context
from reigen.api import job
from reigen.cluster.membership.views.history import ElasticHistory
from reigen.errors import ArgumentError, HostsUpdatedInterrupt

if TYPE_CHECKING:  # elastic jobs alone load it
    from reigen.elastic_job import ElasticJob


#: Why a program cannot have warm spares.
WARM_SPARES_TEXT = (
    "--spares N:warm (REIGEN_WARM_SPARES): only a hvd.elastic.Job of reigen.torch has steps that a spare can make "
    "without samples. Start this job with --spares N: its spares get the state when they take a place"
)


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

    def fail(self) -> None:
        """Do the work of the function of this name."""

    def leave(self, grace_seconds: float | None) -> None:
        """Do the work of the function of this name."""


class _JobMembership:
    """Membership in the job of this process's context."""

    def __init__(self, elastic: ElasticJob[context.Context]) -> None:
        self._elastic = elastic

    def step_applied(self) -> None:
        self._interrupt(is_changing=self._elastic.step_applied())

    def check(self) -> None:
        self._interrupt(is_changing=self._elastic.is_changing())

    def needs_sync(self) -> bool:
        return True  # after a death some may be a commit behind others

    def reset(self) -> None:
        job.change_view()

    def fail(self) -> None:
        self._elastic.has_failed = True

    def leave(self, grace_seconds: float | None) -> None:
        self._elastic.leave(grace_seconds)

    @staticmethod
    def _interrupt(*, is_changing: bool) -> None:
        if is_changing:
            raise HostsUpdatedInterrupt


_given: Membership | None = None


def use(membership: Membership | None) -> None:
    """Let this process be a member in another way than by its context; None: no more."""
    global _given  # noqa: PLW0603  # the one of this process, as its context
    _given = membership


def _member() -> Membership | None:
    elastic = context.elastic_job()
    if _given is None and elastic is not None and elastic.has_warm_spares:
        raise ArgumentError(WARM_SPARES_TEXT)
    join()
    return _find_member()


def _find_member() -> Membership | None:
    elastic = context.elastic_job()
    return _JobMembership(elastic) if _given is None and elastic is not None else _given


def is_candidate() -> bool:
    """Return whether this process has come to an elastic job, and has not asked to be a member yet."""
    return context.is_candidate()


def join() -> None:
    """Become a member, if this process has come to an elastic job as a candidate; returns when it is one.

    Until now the program has set itself up, and nobody has waited for it.

    Raises:
        ReigenError: no view takes it in.
    """
    if context.is_candidate():
        job.change_view()


def is_elastic() -> bool:
    """Return whether this process is in an elastic job; a candidate becomes a member."""
    return _member() is not None


def check_plain_step() -> None:
    """Raise ArgumentError if this process is in a job with warm spares, and its steps are not those of a `Job`."""
    elastic = context.elastic_job()
    if _given is None and elastic is not None and elastic.has_warm_spares and elastic.step_state is None:
        raise ArgumentError(WARM_SPARES_TEXT)


def may_change() -> bool:
    """Return whether the ranks of the job may change: it is elastic. A candidate stays one."""
    return _given is not None or context.elastic_job() is not None


def step_applied() -> None:
    """Count a step, which all members take: the state of this process has been saved.

    Raises:
        HostsUpdatedInterrupt: the members change now, at this step of all of them.
        ArgumentError: the job has warm spares, which only a `Job` knows of.
    """
    if (member := _member()) is not None:
        member.step_applied()


def check() -> None:
    """Raise HostsUpdatedInterrupt if the members change now, without a step."""
    if (member := _member()) is not None:
        member.check()


def needs_sync() -> bool:
    """Return whether some member of the view may hold another state than rank 0: who came anew, or after an error."""
    return (member := _member()) is None or member.needs_sync()


def reset() -> None:
    """After an error or an interrupt: return when the next view runs; ``rank()`` and ``size()`` are of that view then.

    Raises:
        ReigenError: there will be none for this process.
    """
    if context.is_candidate():
        join()
    elif (member := _member()) is not None:
        member.reset()


def leave(grace_seconds: float | None = None) -> None:
    """Have this process leave its elastic job in good order; the others go on, and nothing is done again.

    The program goes on to the commit, one or two steps ahead, at which the members change. There the state's callbacks
    for that (`State.register_leave_callbacks`) are called, and the process ends with exit code 0, by SystemExit.
    SIGTERM does the same, unless the program has its own handler. Outside of an elastic job this does nothing.

    Args:
        grace_seconds: then the process ends, wherever it is; steps that take longer are not waited for, so that the
            others do the present one again. None: REIGEN_NOTICE_GRACE (30).
    """
    if (member := _find_member()) is not None:
        member.leave(grace_seconds)


def fail() -> None:
    """Take note that the program ends by an exception: the end of this process is a loss to the others."""
    if (member := _find_member()) is not None:
        member.fail()


def history() -> ElasticHistory:
    """Return the history of this process's views: number and reasons of changes, and their cost in seconds.

    Empty in a job that is not elastic.

    Example::

        last = hvd.elastic.history().changes[-1]
        print(last.epoch, last.size, last.reason, last.seconds, hvd.elastic.history().seconds_lost)
    """
    elastic = context.elastic_job()
    return ElasticHistory() if elastic is None else elastic.history
