"""Part of this process in an elastic job: a context for each view, built when the view is decided.

Nothing of a view's connections is used in the next one, and of its memory only what no other process has mapped than
those that are in both (`reigen.backends.shm.region_cache`). So what a process that was left out still sends or writes
reaches nobody: that is how frames and writes of an old epoch have no effect in a new one.

The program has the context of one view at a time. It learns of a change by the failure of a collective, or when it says
that it has applied a step (`ElasticJob.step_applied`); then it gives that context up (`ElasticJob.leave_view`) and
waits for the next one (`ElasticJob.enter`), which is built meanwhile.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from reigen.backends.shm.region_cache import RegionCache, reserve_region
from reigen.cluster.environ import JobInfo
from reigen.cluster.host_discovery import HostLayout, host_identity
from reigen.cluster.membership.elastic.build_failures import BuildFailures
from reigen.cluster.membership.elastic.directory import meet_first_view
from reigen.cluster.membership.elastic.driver import DRIVER_TIMEOUTS, ViewDriver, first_outcome
from reigen.cluster.membership.elastic.host_page import HostPage
from reigen.cluster.membership.elastic.messages import StepTimes
from reigen.cluster.membership.elastic.node import ElasticNode
from reigen.cluster.membership.elastic.view_service import ViewService, view_service_address, view_service_name
from reigen.cluster.membership.elastic.witness import make_witness
from reigen.cluster.membership.place import ElasticPlace
from reigen.cluster.membership.rendezvous import (
    ReconnectingRendezvous,
    Rendezvous,
    RendezvousClient,
    split_address,
)
from reigen.cluster.membership.stragglers import StepTime
from reigen.cluster.membership.views.events import MembersLate
from reigen.cluster.membership.views.history import ElasticHistory, StepOutcome, compare_views
from reigen.cluster.membership.views.messages import HeldSums, StepProgress
from reigen.cluster.membership.views.record import SamplePosition, View
from reigen.cluster.topology import Topology
from reigen.config import Config
from reigen.engine.counters import EngineCounters
from reigen.engine_factory import JobRendezvous
from reigen.errors import ArgumentError, JobLeft, PeerLostError, format_ranks
from reigen.net.interfaces import choose_address
from reigen.resources.limits import explain_limit
from reigen.startup import job_tls, join_rendezvous

if TYPE_CHECKING:
    from reigen.net.tls import TlsContext

_log = logging.getLogger(__name__)

#: In the names of hosts in views, before what distinguishes hosts of one name.
_MARK = "@"
#: A member that leaves names the second step from now on, behind the one that is under way.
_STEPS_TO_LEAVE = 3
#: The others are told, and go on, within this time.
_LEAST_GRACE_SECONDS = 1.0
#: How long a process that has left waits until the launcher has been told.
_KNOWN_SECONDS = 1.0
#: Of the deadline of collectives, so much has passed for a program that others have waited for in vain.
_ABSENT_SHARE = 0.9
#: Between words about how long steps take, and how many steps are in one at most.
_TELL_SECONDS, _MAX_TIMES = 1.0, 1024
#: Between looks whether members have finished.
_LOOK_SECONDS = 0.2
#: A program that goes on in a view that has ended is given up when it has caught the errors of so many calls, over this
#: time at least; after `_ABSENT_SHARE` of the deadline so few refused ones are enough.
_MANY_REFUSED, _REFUSED_SECONDS, _FEW_REFUSED = 100, 10.0, 3
#: A step submits fewer collectives than that.
_MORE_THAN_A_STEP = 10_000


#: Why a process ends that keeps the others waiting.
_ABSENT_TEXT = (
    "its program has not come to view {} of the job, in which the others have waited for it for {:g} s "
    "(REIGEN_DEADLINE). Either it takes longer than that between two collectives, or it catches HorovodInternalError "
    "and HostsUpdatedInterrupt, which have to leave the function that hvd.elastic.run calls, or the block of a step"
)

#: Why a process ends whose program goes on in a view that has ended.
_REFUSED_TEXT = (
    "its program has not come to view {} of the job: for {:.0f} s it has gone on in view {}, which has ended, and has "
    "caught the errors of {} calls. HorovodInternalError and HostsUpdatedInterrupt have to leave the function that "
    "hvd.elastic.run calls: no `except` in it may catch them, also not `except Exception`"
)


class ViewContext(Protocol):
    """Context of a view, as far as the job needs it."""

    def when_refused(self, notify: Callable[[], None]) -> None:
        """Have ``notify`` called with each collective that is refused because the view has ended, by its thread."""

    def view_begins(self, size: int, change: str, lost_seconds: float) -> None:
        """Take note that the steps of the view may be run: what has changed, and for how long none could be run."""

    def when_late(self, notify: Callable[[Sequence[int]], None]) -> None:
        """Have ``notify`` called with the ranks for which a collective has waited until its deadline."""

    def give_up(self, error: BaseException) -> None:
        """Fail all collectives, on all ranks."""

    def close(self) -> None:
        """Leave it."""


class StepState(Protocol):
    """Progress of a program whose steps are undone one by one, and not back to a commit (`ElasticJob.step_state`)."""

    def progress(self, epoch: int) -> StepProgress:
        """Return how far this process is; from now on no step of this view is applied here.

        Called by a thread of its own when the view's collectives have been made to fail. An update that has begun is
        waited for: it communicates nothing, or fails. What is said here has to be true of the next view, too, until
        the program has entered it.
        """


@dataclass(frozen=True, slots=True)
class JobAccess:
    """Access to the control service of the job's launcher, where processes begin: views have services of their own.

    Attributes:
        address: ``host:port``.
        secret: the job's 32 bytes.
        slot: number of this process there.
        timeout_seconds: how long connecting, and each request, may take.
        tls: encrypts every connection, if there is one.
    """

    address: str
    secret: bytes = field(repr=False)
    slot: int
    timeout_seconds: float
    tls: TlsContext | None

    def rendezvous(self, page: HostPage) -> ReconnectingRendezvous:
        """Return a rendezvous of its own, which follows the launcher where another one takes its place."""
        return ReconnectingRendezvous(
            lambda: page.launcher or self.address,
            lambda address: RendezvousClient(address, self.secret, self.slot, self.timeout_seconds, self.tls),
        )


_Context = TypeVar("_Context", bound=ViewContext)


class StepClock:
    """Clock of a program's steps: how long each takes, and how much of that is the program's own work.

    Args:
        counters: tell how long it waits for collectives.

    Attributes:
        step_seconds: of the latest step.
    """

    def __init__(self, counters: EngineCounters) -> None:
        self.step_seconds = 0.0
        self._counters, self._waited_seconds = counters, 0.0
        #: when the latest step was applied; 0: in another view
        self._applied_at = 0.0
        #: of steps of which nobody has been told, and since when
        self._times: list[StepTime] = []
        self._sent_at = 0.0

    def enter_view(self) -> None:
        """Begin with a view: a step that was cut off by the change is not measured."""
        self._applied_at = 0.0
        self._times.clear()

    def step_applied(self) -> tuple[StepTime, ...]:
        """Count a step; return the times of the latest ones, empty as long as it is too early to send them."""
        now, waited = time.monotonic(), self._counters.blocked_seconds
        if self._applied_at:
            self.step_seconds = now - self._applied_at
            work_seconds = self.step_seconds - (waited - self._waited_seconds)
            self._times.append(StepTime(self.step_seconds, max(0.0, work_seconds)))
        self._applied_at, self._waited_seconds = now, waited
        if now - self._sent_at < _TELL_SECONDS and len(self._times) < _MAX_TIMES:
            return ()
        times, self._times = tuple(self._times), []
        self._sent_at = now
        return times


class RefusedCalls:
    """Count of the calls of a program that were refused in a view that has ended: does it catch these errors?

    One such error leaves the training function of a program that is right. Others catch it and call again: if only one
    rank does, the others wait for it in the next view; if all do, nobody waits, and they would go on for ever.

    Args:
        deadline_seconds: of collectives.

    Attributes:
        num: how many were refused.
        seconds: from the first one to the latest.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._first_at: float | None = None
        self._num_caught = 0
        self.num, self.seconds = 0, 0.0

    def add(self, *, is_caught: bool, is_in_step: bool = False) -> bool:
        """Count a refused call; returns whether the program is to be given up.

        Args:
            is_caught: the program has got the error of the one before, and has called again. It need not have where
                the runtime of a framework goes ahead of it, or where a step has to submit the rest of its gradients.
            is_in_step: there may be such a step, which may take longer than the deadline.
        """
        now = time.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        self.num, self.seconds = self.num + 1, now - self._first_at
        self._num_caught += is_caught
        few = _MORE_THAN_A_STEP if is_in_step else _FEW_REFUSED
        if self.num >= few and self.seconds >= _ABSENT_SHARE * self._deadline_seconds:
            return True
        return self._num_caught >= _MANY_REFUSED and self.seconds >= _REFUSED_SECONDS


class ElasticJob(Generic[_Context]):
    """The job; `ViewDriver` calls it as its `ViewPlane`.

    Args:
        place: of this process.
        access: to the launcher's service.
        make_context: makes the context of a view, at the rendezvous of its members, with its epoch; collective.
        counters: of this process in these contexts.

    Attributes:
        epoch: of the view whose context the program has; 0: none yet.
        renumbered: ranks in that view, by ranks in the one that the program had before.
        history: of its views.
        has_failed: the program has ended by an exception: this process's end is a loss.
        has_left: this process has left the job, and ends; its program is not done.
        step_state: says how far the program is; None: as far as `step_applied` has counted.
        launcher_rendezvous: connects to the launcher, wherever it is.
    """

    def __init__(
        self,
        place: ElasticPlace,
        access: JobAccess,
        make_context: Callable[[JobRendezvous, int], _Context],
        counters: EngineCounters,
    ) -> None:
        self._counters, self._step_clock = counters, StepClock(counters)
        self._place, self._access, self._make_context = place, access, make_context
        self._changed = threading.Condition()
        #: held where a context that is in use is made to fail: it must not be closed meanwhile
        self._revoking = threading.Lock()
        #: by epoch, contexts that are there; the program's is among them
        self._contexts: dict[int, _Context] = {}
        #: the view that is built, or was built last; and the one whose steps may be run
        self._wanted: View | None = None
        self._running: View | None = None
        #: the view whose context the program has, and the latest one in which it knew itself
        self._entered: View | None = None
        self._kept: View | None = None
        self._error: BaseException | None = None
        self._build_failures = BuildFailures()
        #: the latest step that the program has applied; whether it has the state at all
        self._step, self._has_state = 0, False
        self.epoch = 0
        self.history = ElasticHistory()
        #: the view that ran last, and when its end began
        self._ran: View | None = None
        self._revoked_at: float | None = None
        #: when the view that runs has begun; and how long its members wait for each other in a collective
        self._run_at, self._deadline_seconds = 0.0, math.inf
        #: for which a collective of the view has waited in vain
        self._late_ranks: Sequence[int] = ()
        self.renumbered: dict[int, int] = {}
        self.has_failed = self.has_left = False
        #: when a process that leaves ends, whatever its program does
        self._leaves_by, self._grace_seconds = 0.0, 0.0
        self._notices: NoticeHandler | None = None
        #: registered memory that outlives views
        self._region_cache = RegionCache(os.getpid())
        #: name of this process's host in views; and whether the program waits for a view
        self._host, self._is_waiting = "", False
        self.step_state: StepState | None = None
        #: all members stop at the step that the program has applied last: some may be in it still
        self._has_stopped = False
        #: of the view that the program has; and the program's thread
        self._refused = RefusedCalls(math.inf)
        self._thread_id = 0
        self._driver: ViewDriver
        self._service: ViewService
        self.launcher_rendezvous: Callable[[], Rendezvous]

    def start(self, node: ElasticNode, first: JobRendezvous | None, config: Config) -> None:
        """Become a member of the first view, or ask the members to be one of a later view.

        Args:
            node: this process.
            first: where the members of the first view meet; closed by this. None: it is there already.
            config: the knobs.

        Raises:
            DeadlineError: ranks of the first view did not come.
        """
        self._service = ViewService(node, self._access.secret, self._access.tls)
        self._grace_seconds, self._host = config.notice_grace_seconds, node.host
        self._deadline_seconds = config.deadline_seconds
        rule = self._place.stragglers
        timeouts = replace(DRIVER_TIMEOUTS, change=self._place.timeout_seconds, wait=self._place.timeout_seconds)
        if first is None:
            self._driver = ViewDriver(node, self, self._access.rendezvous(node.voter.page), timeouts, rule)
            self._driver.wait_for_view(is_ready=False)
            self._notices = NoticeHandler(self)
            return
        with closing(first.rendezvous):
            sizes, layout = (self._place.min_size, self._place.max_size), first.layout
            timeout = config.start_timeout_seconds
            num_spares = self._place.num_spares
            view = meet_first_view(node, first.rendezvous, layout.rank, layout.size, sizes, timeout, num_spares)
        self._driver = ViewDriver(node, self, self._access.rendezvous(node.voter.page), timeouts, rule)
        self._driver.begin(view)
        self._notices = NoticeHandler(self)

    # -- the program's thread ------------------------------------------------------------------------------------------

    @property
    def is_candidate(self) -> bool:
        """True if this process came later than the first view, and has not been a member yet."""
        return self._place.is_candidate and self.epoch == 0

    def expect_place(self) -> Topology:
        """Wait until the members are known; return the place that a candidate would have among them now."""
        with self._changed:
            while (view := self._driver.view) is None:
                if self.has_left:
                    self._raise_left()
                self._changed.wait(_LOOK_SECONDS)
        return place_behind(view, self._host)

    def enter(self) -> _Context:
        """Wait for the next view; return its context. A candidate asks the members now: its program is ready.

        Raises:
            ReigenError: the first view cannot be built, or another one time and again; or a member has finished the
                program, so that there is no next view.
            JobLeft: this process has left the job.
        """
        if self.is_candidate:
            view = self._driver.view
            if view is not None and [host.name for host in view.hosts] == [self._host]:
                self._service.connect(view)
            self._driver.be_ready()
        with self._changed:
            self._is_waiting = True
            while (view := self._next_view()) is None:
                if self._error is not None:
                    raise self._error
                if self.has_left:
                    self._raise_left()
                if self._driver.finished:
                    raise PeerLostError("other members have finished the program: there is no next view")
                self._changed.wait(_LOOK_SECONDS)
            old = {} if self._kept is None else self._kept.ranks
            self.renumbered = {rank: view.ranks[member] for member, rank in old.items() if member in view.ranks}
            before, self._has_stopped = self.epoch, False
            self._is_waiting = False
            self._entered, self.epoch, self._step = view, view.epoch, view.base.target
            self._step_clock.enter_view()
            context = self._contexts[view.epoch]
            self._refused, self._late_ranks = RefusedCalls(self._deadline_seconds), ()
            self._thread_id = threading.get_ident()
        context.when_refused(partial(self._note_refused, view.epoch))
        context.when_late(partial(self._report_late, view))
        self._close_context(before)
        return context

    def _report_late(self, view: View, ranks: Sequence[int]) -> None:
        """Report ranks for which a collective has waited until its deadline."""
        self._late_ranks = ranks  # the program hears of it later
        members = tuple(view.members[rank] for rank in ranks if rank != view.ranks[self._place.member])
        self._driver.report(MembersLate(view.epoch, members))

    def _note_refused(self, epoch: int) -> None:
        """Take note that a call of the program has failed because a view has ended; the thread that has made it."""
        refused, is_in_step = self._refused, self.step_state is not None
        is_caught = not is_in_step and threading.get_ident() == self._thread_id
        is_refused = epoch == self.epoch and not self._is_waiting
        if is_refused and refused.add(is_caught=is_caught, is_in_step=is_in_step):
            self.end(1, _REFUSED_TEXT.format(epoch + 1, refused.seconds, epoch, refused.num))

    def _raise_left(self) -> None:
        self._driver.launcher_knows.wait(_KNOWN_SECONDS)
        view = self._entered
        rank, size = (0, 0) if view is None else (view.ranks[self._place.member], view.size)
        raise JobLeft(rank, size, all_leave=self._driver.all_leave)

    def _next_view(self) -> View | None:
        """Return the view that runs, if the program does not have it yet."""
        running = self._running
        return running if running and running.epoch > self.epoch and running.epoch in self._contexts else None

    def keep_view(self) -> None:
        """Take note that the program goes on in the view that it has: later ranks are derived from those in it."""
        self._kept = self._entered

    @property
    def view(self) -> View:
        """The view whose context the program has."""
        assert self._entered is not None, "there is no context before the first view"
        return self._entered

    def leave_view(self) -> None:
        """Give up the context that the program has, and see to it that the others, too, go to the next view.

        Where all stop at one step (`step_applied` has returned True), the change begins when all have, and the context
        serves those who have not until then. A candidate has no context of a view, and asks for nothing.
        """
        if not self._has_stopped and not self.is_candidate:
            reason = ""
            if late := self._late_ranks:
                seconds = self._deadline_seconds
                reason = f"a collective has waited for rank(s) {format_ranks(late)} for {seconds:g} s (REIGEN_DEADLINE)"
            self._driver.request_change(reason, self.epoch)
            self._close_context(self.epoch)

    def _close_context(self, epoch: int) -> None:
        with self._revoking, self._changed:
            context = self._contexts.pop(epoch, None)
        if context is not None:
            context.close()

    def step_applied(self) -> bool:
        """Count that the program has applied a step; return True if the members change now."""
        self._step += 1
        self._has_state = True
        if times := self._step_clock.step_applied():
            self._driver.stragglers.tell(StepTimes(self.epoch, self._step - len(times) + 1, times))
        return self.is_changing()

    def is_changing(self) -> bool:
        """Return whether the members change now, at the step that the program has applied last."""
        self._has_stopped = self._driver.step_applied(self._step, self.epoch) and not self._driver.finished
        if self._has_stopped:
            self._note_refused(self.epoch)
        return self._has_stopped

    def follow_steps(self, state: StepState) -> None:
        """Let the program say how far it is, and the outcome of each change for its step (`tell_outcome`)."""
        self.step_state, self._driver.tells_outcomes = state, True

    def tell_outcome(self, outcome: StepOutcome, step: int, samples: tuple[int, ...]) -> None:
        """Take note of the outcome of a change for the step that was under way; as rank 0, tell the launcher, too."""
        with self._changed:
            self.history = self.history.explain(self.epoch, outcome)
        note = self._driver.note
        if note is not None and note.epoch == self.epoch and note.outcome is StepOutcome.PENDING:
            explained = msgspec.structs.replace(note, outcome=outcome, step=step, samples=samples)
            self._driver.note = explained
            self._driver.directory.tell_change(explained)

    def announce_pause(self, seconds: float, num_bytes: int, receivers: Sequence[int]) -> None:
        """Tell the launcher that all members are about to wait, while some ranks get the state."""
        slots = [self.view.members[rank].slot for rank in receivers]
        self._driver.directory.tell_pause(seconds, num_bytes, slots)

    def reserve_memory(self, nbytes: int) -> None:
        """Make registered memory ahead of its first use, as much as a view will need: members wait for it then."""
        if nbytes:
            reserve_region(self._region_cache, nbytes)

    def require_size(self, size: int) -> None:
        """Have steps run only in views of so many members; all members ask for the same. Others are waited for."""
        self._driver.require_size(size)

    @property
    def has_warm_spares(self) -> bool:
        """Return whether members beyond a number take no samples (`View.spares`), which the program has to know of."""
        return self._place.num_spares > 0

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks of the view that ends that are known, or said, to be lost; for `StepState.progress`."""
        view, lost = self._driver.view, self._driver.lost
        return [] if view is None else [rank for member, rank in view.ranks.items() if member in lost]

    @property
    def has_finished_members(self) -> bool:
        """Return whether the program is done on other members."""
        return bool(self._driver.finished)

    def leave(self, grace_seconds: float | None = None) -> None:
        """Leave the job in good order, after the step that is under way and one more, if there is time for two.

        Returns at once; may be called by a signal handler, and twice. The program goes on until `enter` raises JobLeft.

        Args:
            grace_seconds: then this process ends, whatever its program does; None: REIGEN_NOTICE_GRACE.
        """
        if not self._leaves_by:
            grace_seconds = max(_LEAST_GRACE_SECONDS, self._grace_seconds if grace_seconds is None else grace_seconds)
            self._leaves_by = time.monotonic() + grace_seconds
            self._driver.leave(grace_seconds, at_once=grace_seconds < _STEPS_TO_LEAVE * self._step_clock.step_seconds)

    def finish(self) -> None:
        """Tell all that the program is done: this process's end is no loss."""
        self._driver.finish()

    def close(self) -> None:
        """End the part of this process; its contexts are closed."""
        if self._notices is not None:
            self._notices.close()
        with self._changed:
            contexts, self._contexts = list(self._contexts.values()), {}
        for context in contexts:
            context.close()
        self._region_cache.close()
        self._service.close()
        self._driver.close()

    # -- the driver's thread; see `ViewPlane` --------------------------------------------------------------------------

    def revoke(self, epoch: int, done: Callable[[StepProgress], None]) -> None:
        """Stop the collectives of a view; then tell how far the program is."""
        if self._is_missed(epoch):
            self.end(1, _ABSENT_TEXT.format(epoch, self._deadline_seconds))
        self._revoked_at = self._revoked_at or time.monotonic()
        with self._revoking:
            with self._changed:
                self._running = self._wanted = None
                context = self._contexts.get(epoch)
                is_programs = epoch == self.epoch
                if not is_programs:
                    self._contexts.pop(epoch, None)
            if context is not None:
                context.give_up(PeerLostError(self._driver.cause.text))
        if context is not None and not is_programs:
            context.close()
        if (state := self.step_state) is not None:
            work = partial(self._tell_progress, state, epoch, done)
            threading.Thread(target=work, name=f"reigen-progress-{epoch}", daemon=True).start()
            return
        step = self._step if self._has_state else 0
        done(StepProgress(step, SamplePosition(0, step), SamplePosition(0, step), HeldSums(epoch)))

    def _tell_progress(self, state: StepState, epoch: int, done: Callable[[StepProgress], None]) -> None:
        """Wait for an update that has begun: meanwhile the driver says that this process lives."""
        try:
            progress = state.progress(epoch)
        except Exception as error:  # noqa: BLE001  a thread's last word
            self.end(1, f"it is not known how far its program is: {error!r}")
        else:
            done(progress)

    def _is_missed(self, epoch: int) -> bool:
        """Return whether this process's program has not come to a view until the others gave up waiting for it."""
        running = self._running
        if running is None or running.epoch != epoch or self.epoch == epoch or self._is_waiting or self._driver.lost:
            return False
        return time.monotonic() - self._run_at >= _ABSENT_SHARE * self._deadline_seconds

    def build(self, view: View, done: Callable[[], None]) -> None:
        """Begin to build a view's context."""
        with self._changed:
            self._wanted = view
        name = f"reigen-view-{view.epoch}"
        threading.Thread(target=self._build, args=(view, done), name=name, daemon=True).start()

    def _build(self, view: View, done: Callable[[], None]) -> None:
        try:
            context = self._make_context(self._rendezvous_of(view), view.epoch)
        except Exception as error:  # noqa: BLE001  whoever waits for the view gets it
            self._fail_build(view, explain_limit(error) if isinstance(error, OSError) else error)
            return
        with self._changed:
            is_wanted = self._wanted is view
            if is_wanted:
                self._contexts[view.epoch] = context
        if is_wanted:
            done()
        else:
            context.close()

    def _fail_build(self, view: View, error: Exception) -> None:
        """React to a view that cannot be built: its members try the next one, unless that is of no use."""
        _log.debug("view %d cannot be built: %s", view.epoch, error)
        with self._changed:
            is_wanted = self._wanted is view
            if self._build_failures.add(error, view.ranks[self._place.member], is_wanted=is_wanted):
                self._error = error
                self._changed.notify_all()
                return
        if is_wanted:
            self._driver.request_change(f"view {view.epoch} cannot be built: {error}", view.epoch)

    def _rendezvous_of(self, view: View) -> JobRendezvous:
        """Return the rendezvous of a view's members."""
        hosts: list[tuple[int, ...]] = []
        names: list[str] = []
        for host in view.hosts:
            hosts.append(tuple(range(len(names), len(names) + len(host.members))))
            names += [host.name.partition(_MARK)[0]] * len(host.members)
        layout = HostLayout(view.ranks[self._place.member], tuple(hosts), tuple(names))
        if len(layout.local) == 1:  # there is no registered memory
            self._region_cache.close()
        return JobRendezvous(
            layout,
            self._service.meet(view, self._access.timeout_seconds),
            address=view_service_address(view),
            secret=self._access.secret,
            namespace=view_service_name(view.epoch),
            tls=self._access.tls,
            region_cache=self._region_cache,
        )

    def roll(self, _: View, done: Callable[[], None]) -> None:
        """Bring the program's state to the view's step: nothing here, the program itself does that when it goes on."""
        done()

    def run(self, view: View) -> None:
        """Let steps be run in a view."""
        self._note_change(view)
        with self._changed:
            self._running, self._run_at = view, time.monotonic()
            self._build_failures.clear()
            self._error = None  # of a view before, which it may have come too late for
            self._changed.notify_all()

    def _note_change(self, view: View) -> None:
        reason, revoked_at = self._driver.cause.text, self._revoked_at
        seconds = 0.0 if revoked_at is None else time.monotonic() - revoked_at
        is_planned = self._driver.is_planned
        outcome = first_outcome(is_planned=is_planned, tells_outcomes=self.step_state is not None)
        change = compare_views(self._ran, view, reason=reason, seconds=seconds, is_planned=is_planned, outcome=outcome)
        if view.num_spares:
            self._counters.is_warm_spare = view.ranks[self._place.member] in view.spares
        with self._changed:
            self.history = self.history.add(change)
        if change.reason:
            self._counters.count_view_change(
                "planned" if is_planned else "completed" if change.completes else "rerun",
                seconds,
                num_lost=len(change.lost),
                num_joined=change.num_joined,
            )
        self._ran, self._revoked_at = view, None
        if (context := self._contexts.get(view.epoch)) is not None:
            context.view_begins(change.size, change.describe(), change.seconds)

    def end(self, exit_code: int, reason: str) -> None:
        """End this process; nothing that the program does can hold it up.

        One that leaves in good order ends by itself, as long as its grace lasts.
        """
        left_seconds = self._leaves_by - time.monotonic()
        may_finish = self._is_waiting or not self.is_candidate  # it hears of this when it waits for the next view
        if exit_code == 0 and left_seconds > 0 and may_finish:
            _log.info("this process leaves the job: %s", reason)
            overdue = threading.Timer(left_seconds, self._exit, (0,))
            overdue.daemon = True
            overdue.start()
            with self._changed:
                self.has_left = True
                self._changed.notify_all()
            return
        _log.log(
            logging.ERROR if exit_code else logging.INFO, "this process ends (exit code %d): %s", exit_code, reason
        )
        self._exit(exit_code)

    @staticmethod
    def _exit(exit_code: int) -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def place_behind(view: View, host: str) -> Topology:
    """Return the place of one more member of a view, on this host: behind the others there.

    Args:
        view: of the others.
        host: its name in views.
    """
    counts = {each.name: len(each.members) for each in view.hosts}
    counts[host] = counts.get(host, 0) + 1
    ends = list(itertools.accumulate(counts.values()))
    hosts = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts.values(), strict=True))
    rank = ends[list(counts).index(host)] - 1
    return HostLayout(rank, hosts, tuple(name for name, count in counts.items() for _ in range(count))).topology()


class NoticeHandler:
    """Handler of SIGTERM in a process of an elastic job: it leaves the job.

    Only where the program has no handler of its own, and for the main thread, which alone can have one.

    Args:
        job: this process's part.
    """

    def __init__(self, job: ElasticJob[Any]) -> None:
        self._job, self._pid = job, os.getpid()
        is_main = threading.current_thread() is threading.main_thread()
        self._is_installed = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, _: object) -> None:
        if os.getpid() == self._pid:
            self._job.leave()
            return
        signal.signal(signum, signal.SIG_DFL)  # a child of this process, which the signal is to end
        os.kill(os.getpid(), signum)

    def close(self) -> None:
        """Let the signal end the process again; where another thread does this, it stays."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_installed and is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def join_elastic_job(
    place: ElasticPlace,
    job: JobInfo,
    config: Config,
    environ: Mapping[str, str],
    ranks: Sequence[int] | None,
    make_context: Callable[[JobRendezvous, int], _Context],
    counters: EngineCounters,
) -> ElasticJob[_Context]:
    """Take this process's part in an elastic job; `ElasticJob.enter` comes next.

    Args:
        place: of this process.
        job: the facts in the environment.
        config: the knobs.
        environ: environment variables.
        ranks: must be None: members change.
        make_context: see `ElasticJob`.
        counters: see `ElasticJob`.

    Raises:
        ArgumentError: a job of only some ranks is asked for.
        ReigenError: as `join_rendezvous`.
    """
    if ranks is not None:
        raise ArgumentError("an elastic job has all of its processes, not only some ranks; add process sets instead")
    assert job.rendezvous is not None
    assert job.secret is not None
    tls = job_tls(config)
    access = JobAccess(job.rendezvous, job.secret, place.member.slot, config.start_timeout_seconds, tls)
    address, _ = choose_address(config.network_interfaces, split_address(job.rendezvous)[0])
    host_id, hostname = host_identity(config.host_id or "")
    page = HostPage(place.voter_fd)
    node = ElasticNode(
        place.member,
        _name_host(hostname, host_id, place.voter_fd),
        address,
        job.secret,
        place.voter_fd,
        tls=tls,
        peer_timeout_seconds=config.peer_timeout_seconds,
        witness=make_witness(place.witness, job.secret, partial(access.rendezvous, page)),
    )
    elastic = ElasticJob(place, access, make_context, counters)
    elastic.launcher_rendezvous = partial(access.rendezvous, page)
    elastic.start(node, None if place.is_candidate else join_rendezvous(job, config, environ, None), config)
    return elastic


def _name_host(hostname: str, host_id: str, voter_fd: int) -> str:
    """Return the name of this process's host in views: a host is that of one voter, and two agents have two."""
    with suppress(OSError):  # who opens the voter's memory says why
        host_id += f" {os.fstat(voter_fd).st_ino}"
    return f"{hostname}{_MARK}{hashlib.sha256(host_id.encode()).hexdigest()[:8]}"
