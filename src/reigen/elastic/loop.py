"""Loop of an elastic training function: it is called again in each new view, with the state of the members."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, TypeVar

from reigen.api.process_sets import RegisteredSets, follow_members
from reigen.elastic import membership
from reigen.elastic.state import Departure, State
from reigen.errors import (
    CollectiveError,
    DeviceError,
    HostsUpdatedInterrupt,
    JobLeft,
    JoinedError,
    MismatchError,
    ReplicaError,
    SharedMemoryError,
)

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

#: Failures that come again wherever the program comes again, whoever the members are.
_OF_THE_PROGRAM = (MismatchError, ReplicaError, DeviceError)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function whose first argument is its `State`.

    The state is synchronized, and the function called. When a collective fails there (HorovodInternalError), the state
    goes back to the last commit; when members come or go (HostsUpdatedInterrupt), it stays. The process waits for the
    next members, the reset callbacks run, and it begins again: the function must go on from what the state says.
    Other exceptions leave. In a job that is not elastic all do.

    Raises:
        CollectiveError: the ranks have failed to do the same twice, with no commit between: the program is wrong. Or
            the job is not elastic.

    Example::

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                for state.batch in range(state.batch, batches):
                    train_one_batch(state)
                    if state.batch % 10 == 0:
                        state.commit()
                state.batch = 0
    """
    return repeat_in_views(func)


def run_fn(func: Callable[Concatenate[S, P], R], reset: Callable[[], None]) -> Callable[Concatenate[S, P], R]:
    """Like `run`, in any job, with a function of the caller's that returns when the next members are together."""
    return repeat_in_views(func, reset=reset, is_elastic=lambda: True)


def repeat_in_views(
    func: Callable[Concatenate[S, P], R],
    *,
    reset: Callable[[], None] = membership.reset,
    errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    is_elastic: Callable[[], bool] = membership.is_elastic,
) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function as `run` does, for a framework.

    Args:
        func: the training function.
        reset: returns when the next members are together.
        errors: makes a context in which the framework's errors of failed collectives become CollectiveErrors.
        is_elastic: whether the function is called again at all.
    """

    @functools.wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(state, *args, **kwargs)
        except BaseException:
            membership.fail()
            raise

    def call(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if membership.is_candidate():
            reset()
            state.on_reset()
        loop = _Loop(state)
        while True:
            try:
                with errors():
                    loop.synchronize()
                    return func(state, *args, **kwargs)
            except CollectiveError as error:
                if not is_elastic() or not loop.goes_on_after(error):
                    raise
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                if not is_elastic():
                    raise
                skips_sync = interrupt.skip_sync
            try:
                reset()
            except JobLeft as left:
                state.on_leave(Departure(left.rank, left.size, left.all_leave))
                raise
            state.on_reset()
            loop.skips_sync = skips_sync and not membership.needs_sync()

    return wrapper


class _Loop:
    """Memory from one call of the function to the next."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.skips_sync = False
        self._process_sets: RegisteredSets | None = None
        #: commits at the last failure that was the program's own
        self._num_commits: int | None = None

    def synchronize(self) -> None:
        """Collective, unless all members are known to hold the same."""
        if membership.is_elastic():
            self._process_sets = follow_members(self._process_sets)
        if not self.skips_sync:
            self._state.sync()
            membership.step_applied()

    def goes_on_after(self, error: CollectiveError) -> bool:
        """Return whether it makes sense to begin again after this error; a note says why not."""
        if isinstance(error, SharedMemoryError) and not error.ranks:
            return False  # this rank has too little memory, and leaves; the others begin again without it
        if isinstance(error, _OF_THE_PROGRAM) and not isinstance(error, JoinedError):
            if self._num_commits == self._state.num_commits:
                error.add_note(
                    "This came twice with no commit() between, so that it would come again: the ranks do different "
                    "things, whoever the members of the job are."
                )
                return False
            self._num_commits = self._state.num_commits
        _log.info("a collective has failed, the state goes back to its last commit: %s", error)
        return True
