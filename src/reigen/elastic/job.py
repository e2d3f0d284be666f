"""Job whose steps survive a change of members: a step that was cut off is undone, dealt anew and run again.

a. A step is *applied* on a member when the optimizer has changed the weights. The update is made under a lock which the
   driver's thread takes when a view ends (`BaseJob.progress`), so that what it reports is true: no update comes later.
b. Every step needs all members, so that they are at most one step apart. A step that some have applied is complete:
   those who have not get weights and optimizer state from them. A step that nobody has applied has left no trace
   but in small state (see `TrainingState`), of which there is a copy.
c. The program learns of a change by an error of a collective in ``with step:``, which that block swallows, or at its
   end, if the members have agreed to stop there. Then it enters the next view and *catches up* with its members, all of
   them together (`plan_catch_up`). A failure on the way there leads to the view behind that one.
d. A step is *stable* at a member that knows that all have applied it: it has caught up since, or all have said so
   (`AppliedSteps`), or been in the barrier at the job's end. Only stable state leaves the job, in a checkpoint or at
   its end.

Where all gradients of a step that nobody has applied are still there, the step is completed instead of being undone:

e. Each member goes on to the place where it waits for the sums, and changes the view there (`complete_step`), in the
   middle of the user's call of the optimizer. So what the program does with gradients is done to these sums, too.
f. In the next view all say what they have (`SumsAtHand`), and decide alike. If all wait, and nothing is lost, they
   finish the sums (`reigen.backends.shm.step_sums`), meet in a barrier, and return to the program, which applies them:
   the step has had the samples of the dead. Views are numbered as if they had known (`StepBase.completes`); where they
   have not, or had hoped in vain, the numbers of steps of program and membership differ by another `_Mark.offset`.
   So it is with an update of weights that exist once a host, if some owner has begun it (`UpdateAtHand`): others finish
   what the dead have left (`reigen.backends.base.SharedUpdate`). Newcomers wait until those have ended the step.
g. If a member dies in (f), or before all have applied the step, the next view begins with (f), too: who has all sums
   applies them by itself, if others have.
h. A member that waits holds the gradients of this step until it is applied, then its optimizer begins anew in the view.

Newcomers to a running job may get its state while the members are in the next step (`OverlappedTransfer`):

i. They take no samples of it (`BaseJob.dealt_ranks`), and are no members, for views and plans, until they have the
   state. Whoever dies meanwhile has the next view begin with (c), where they get it anew.
j. Before the update all exchange digests. Where one is wrong everybody waits until the state has been sent again: the
   weights are still those of the step before. Who dies here leaves whole sums behind: the others look at the digests in
   the next view (`confirm_newcomers`), and go on with the update there, as in (f). Who had all digests before that
   death has compared them, and answers for the source, even if it has applied the step (`ArrivedState`).

Warm spares (`View.spares`) are members that are dealt no samples, so that they always have the state:

k. A spare comes as any newcomer, adds nothing to the sums of each step, and makes its update. When a member has gone,
   the next view deals it samples, and nothing is copied but what forward passes change and each rank has for itself
   (statistics of BatchNorm, say), which it has not followed (`HeldState.was_spare`, `LocalState`).
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from reigen import context as contexts
from reigen.api import job as api
from reigen.api.functions import allgather_object, barrier, broadcast_object
from reigen.api.process_sets import RegisteredSets, describe_former_sets, follow_members
from reigen.cluster.membership.views.messages import HeldSums, StepProgress
from reigen.cluster.membership.views.record import SamplePosition
from reigen.elastic import membership
from reigen.elastic.applied_steps import AppliedSteps
from reigen.elastic.catch_up import (
    ArrivedState,
    CatchUpPlan,
    HeldState,
    SumsAtHand,
    UpdateAtHand,
    are_alike,
    confirm_newcomers,
    find_lost_state,
    find_outcome,
    is_step_redone,
    may_overlap_transfer,
    note_arrival,
    plan_catch_up,
    plan_local_state,
    plan_updates,
)
from reigen.elastic.cursor import Cursor, Part, SampleInterval
from reigen.elastic.description import check_description, digest_description
from reigen.elastic.state import Departure
from reigen.elastic.state_transfer import (
    OfferAddress,
    OverlappedTransfer,
    StateOffer,
    compare_digests,
    explain_wrong_state,
)
from reigen.elastic.training import LocalState, TrainingState
from reigen.errors import (
    ArgumentError,
    CollectiveError,
    DeadlineError,
    JobLeft,
    NotInitializedError,
    PeerLostError,
    SharedMemoryError,
    StepOrderError,
)

if TYPE_CHECKING:
    import os

    from reigen.elastic_job import ElasticJob

_log = logging.getLogger(__name__)

#: How often a receiver's state may differ from the source's after it was sent.
_MAX_TRANSFERS = 2
#: Changes in a row because of members that do not come, with no step between: who does not come to two views has ended.
_MAX_LATE = 2
#: Why nothing works in the job's block.
_SHUT_DOWN_TEXT = (
    "hvd.shutdown() was called within the `with` block of the elastic Job: call it after the block, or let the end of "
    "the program do it"
)


class StepParts(Sequence[Part]):
    """Parts of a step that this rank takes; who takes one out begins with it: its gradients are weighted.

    Args:
        job: whose step.
        parts: of this rank.
    """

    def __init__(self, job: BaseJob, parts: tuple[Part, ...]) -> None:
        self._job, self._parts = job, parts

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def num_samples(self) -> int:
        """Number of samples in them."""
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Part]:
        """Iterate over the parts, one forward and backward each."""
        for part in self._parts:
            self._job.begin_part(part)
            yield part
        self._job.training.end_parts()

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Part]: ...
    def __getitem__(self, index: int | slice) -> Part | Sequence[Part]:
        """Return a part, whose gradients come next."""
        if isinstance(index, slice):
            return self._parts[index]
        part = self._parts[index]
        self._job.begin_part(part)
        return part


class ElasticStep(AbstractContextManager["ElasticStep"]):
    """One attempt at a step; ``with step:`` around everything that belongs to it.

    Attributes:
        number: of the step in the training, from 0; the same in all attempts.
        interval: its samples: ``epoch``, ``start`` and ``stop`` in the epoch's order.
        is_last: it is the last of its epoch.
        num_epochs: how many epochs the training has.
        rank, size: this rank, and how many there are.
        num_dealt: how many of them share the samples; newcomers that read the state take none, nor do warm spares.
        num_sharing: how many share those of the following steps, if members stay as they are: all but warm spares.
        place: of this rank among these; None: it is a warm spare.
        parts: what this rank takes of them; may be empty.
        is_applied: the weights have had it.
    """

    def __init__(self, job: BaseJob, number: int, interval: SampleInterval, num_epochs: int) -> None:
        self._job, self.number, self.interval, self.num_epochs = job, number, interval, num_epochs
        self.rank, self.size = job.rank, job.size
        sharing = job.sharing_ranks()
        self.num_dealt, self.num_sharing = len(job.dealt_ranks()), len(sharing)
        self.place = sharing.index(self.rank) if self.rank in sharing else None
        self.parts = StepParts(job, job.deal(interval))
        self.is_last = job.data.is_last(interval, self.num_sharing)
        self.is_applied = self.has_ended = False

    @property
    def epoch(self) -> int:
        """The pass over the data set."""
        return self.interval.epoch

    def __enter__(self) -> Self:
        """Begin."""
        self._job.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End; swallow the error if it is a change of members."""
        return self._job.end(self, error)


class _Update(AbstractContextManager[None]):
    """Context of the update of a job's weights."""

    def __init__(self, job: BaseJob) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._job.begin_update()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_applied = True if kind is None else self._job.training.failed_update()
        if is_applied is None:
            self._job.lose_state()
        self._job.end_update(is_applied=bool(is_applied))


@dataclass(slots=True)
class _Mark:
    """Progress of this process; guarded by the job's lock.

    Attributes:
        number: steps that its weights have had.
        offset: less by this they are the steps of the membership, which begin at another number.
        is_member: see `HeldState`.
        has_lost: see `HeldState`.
        was_spare: see `HeldState`.
        revoked: epoch of the latest view that has ended.
    """

    number: int = 0
    offset: int = 0
    is_member: bool = False
    has_lost: bool = False
    was_spare: bool = False
    revoked: int = 0


def _newcomers(arrival: tuple[OverlappedTransfer, CatchUpPlan] | None) -> frozenset[int]:
    """Return the ranks whose state is not yet known to be that of its source: they read it during a step; (i)."""
    return frozenset() if arrival is None else arrival[1].receivers


def _give_local_state(local: LocalState, rank: int, source: int | None, receivers: frozenset[int]) -> None:
    """Collective: who has taken no samples, and does so from here on, gets what only forward passes change."""
    if not receivers or local.is_empty:
        return
    if source is None:
        if rank in receivers:
            _log.warning(
                "no rank is left that has taken samples: what forward passes change (statistics of BatchNorm, say) is "
                "of when this warm spare came, or older"
            )
        return
    given = broadcast_object(local.copy() if rank == source else None, source, "elastic.local_state")
    if rank in receivers:
        local.load(given)


def _current(job: BaseJob) -> contexts.Context:
    """Return the context of the job.

    Raises:
        NotInitializedError: the program has left it.
    """
    return contexts.current(_SHUT_DOWN_TEXT if job.is_open else None)


class BaseJob(ABC):
    """Job that trains step by step; base of those of the frameworks. See the module.

    In a job that is not elastic, every error leaves, and everything else is the same.

    Args:
        training: what is trained.
        data: the samples.
        min_size: with fewer members steps wait.
        num_parts: into how many parts a step is divided, whoever takes them; None: one for each rank.
        resume: a checkpoint to begin with, if it is there; where ranks have different ones, the latest.
        on_leave: called when this process leaves the job after a notice, before it ends; `state_dict` is of the last
            step, which all members have applied. Not on a newcomer that leaves before the end of its first step.

    Attributes:
        data: where the next step begins.
        num_parts: see above.
        num_undone: steps that were undone and run again, in this process.
        is_open: the program is in the `with` block.
        counts_steps: no optimizer of ours counts its steps (`reigen.context.mark`).
    """

    counts_steps = False

    def __init__(
        self,
        training: TrainingState,
        data: Cursor,
        *,
        min_size: int = 1,
        num_parts: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        on_leave: Callable[[Departure], None] | None = None,
    ) -> None:
        self._on_leave = on_leave
        self._departure: Departure | None = None
        if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
            raise ArgumentError(f"min_size must be a positive integer, got {min_size!r}")
        if num_parts is not None and (isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1):
            raise ArgumentError(f"num_parts must be a positive integer, got {num_parts!r}")
        self.training, self.data = training, data
        self.num_undone = 0
        self._min_size, self.num_parts, self._resume = min_size, num_parts, resume
        self._elastic: ElasticJob[contexts.Context] | None = None
        self._lock = threading.RLock()
        self._mark = _Mark()
        self._applied = AppliedSteps()
        self._step: ElasticStep | None = None
        self._is_updating = False
        #: this member has caught up and begun no step since; the same on all, as long as they stay
        self._is_stable = False
        #: the program has come behind the update to the end of the step
        self._is_whole = True
        self._process_sets: RegisteredSets | None = None
        self.is_open = False
        #: the context and the epoch in which the step began
        self._step_context: contexts.Context | None = None
        self._step_epoch = 0
        #: the program waits for sums, with which it can go on
        self._waits = False
        #: all sums of the step are there, wherever they lie
        self._is_summed = False
        #: steps that all have had when they have come to the membership's target
        self._base_number = 0
        #: the membership has counted the step that is completed
        self._is_counted = False
        #: the optimizer has begun anew in this view
        self._has_renewed = True
        #: others wait for the end of the step that is completed, to get the state then
        self._is_awaited = False
        #: this rank leaves: its state is not what was sent to it, or nobody has the state any more
        self._is_wrong = False
        #: changes because of members that were late, since the latest step
        self._num_late = 0
        #: see (i): the transfer, and its plan
        self._arrival: tuple[OverlappedTransfer, CatchUpPlan] | None = None
        #: see (j): what newcomers have read, as far as it is known here; others may not have compared it yet
        self._arrived: ArrivedState | None = None
        #: of this rank, and those of all in this view: state that newcomers may read; see `TrainingState.offer`
        self._offer: StateOffer | None = None
        self._offers: tuple[OfferAddress | None, ...] = ()

    # -- for users ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Collective: all ranks get the state of rank 0, or of the members that there are."""
        self._elastic = contexts.elastic_job()
        has_spares = self._elastic is not None and self._elastic.has_warm_spares
        if has_spares and (problem := self.training.local.find_problem()):
            raise ArgumentError(problem)
        if membership.is_candidate() and self._elastic is not None:
            self._elastic.reserve_memory(self.training.registered_bytes())
            self.training.warm_up()
            self.training.change_view(membership.join)
        if self._resume is not None:
            self.load(self._resume)
        contexts.current()  # raises if init() was not called
        self.training.attach(_Update(self), self.complete_step)
        self.is_open = True
        if self._elastic is not None:
            self._elastic.follow_steps(self)
            self._elastic.require_size(self._min_size)
        elif self.size < self._min_size:
            raise ArgumentError(f"the job has {self.size} rank(s), and is not elastic; min_size is {self._min_size}")
        self._catch_up_or_change()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Collective: leave when all members have applied the last step. After an error, at once: the others go on."""
        try:
            if error is None:
                self._complete_arrival()
                self._settle(is_end=True)
            elif isinstance(error, JobLeft):
                self._departure = Departure(error.rank, error.size, error.all_leave)
                if self._on_leave is not None and self.rank not in _newcomers(self._arrival):
                    self._step, self._is_stable = None, True  # all have stopped at one step, or this one is undone
                    self._on_leave(self._departure)
        finally:
            self.is_open = False
            self.training.detach()
            if self._elastic is not None:
                has_failed = error is not None and not isinstance(error, JobLeft)
                self._elastic.has_failed = self._elastic.has_failed or has_failed

    @property
    def size(self) -> int:
        """Number of members, warm spares among them; after this process has left the job, the last one."""
        return _current(self).size if self._departure is None else self._departure.size

    @property
    def rank(self) -> int:
        """Rank of this one among them; after it has left the job, the last one."""
        return _current(self).rank if self._departure is None else self._departure.rank

    @property
    def number(self) -> int:
        """Steps that have been applied, in this job and those that it goes on from."""
        return self._mark.number

    def steps(self, epochs: int) -> Iterator[ElasticStep]:
        """Iterate over the steps that are left of so many epochs; a step that was undone comes again.

        Raises:
            StepOrderError: a step was not entered by ``with step:``.
            NotInitializedError: the program has called `shutdown`.
        """
        if not self.is_open:
            raise StepOrderError("steps are run in the job's `with` block")
        while (interval := self.data.next_interval(len(self.dealt_ranks()))).epoch < epochs:
            step = ElasticStep(self, self._mark.number, interval, epochs)
            yield step
            if not step.has_ended:
                raise StepOrderError("a step was left without `with step:` around what belongs to it")
            _current(self)  # or the program has shut it down

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the cursor in it, as all members have it; between steps.

        It holds the model's own tensors, as ``state_dict()`` of a model does. A rank may call this alone: it waits
        until the others have applied the step, wherever they are.

        Raises:
            StepOrderError: this process is a newcomer, and what it has read is compared with what was sent only in its
                first step; or a step is under way.
        """
        self._settle()
        if self.rank in _newcomers(self._arrival):
            raise StepOrderError(
                "this process has come to the running job, and the state that it has read is compared with that of its "
                "source in its first step: call state_dict() after that step"
            )
        return {
            "number": self._mark.number,
            "data": self.data.state_dict(),
            "training": self.training.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that `state_dict` has returned, in a job of any size; before the job's `with` block.

        Raises:
            StepOrderError: the job has begun.
        """
        if self.is_open:
            raise StepOrderError("load a state before the job's `with` block, so that all members get it there")
        self.training.load_state_dict(state["training"])
        self.data.load_state_dict(state["data"])
        self._mark.number = state["number"]
        self._applied.note(self._mark.number)

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, on rank 0, as a whole or not at all; between steps.

        It holds what all members have applied, and nothing else. Rank 0 may call this alone: it waits until the others
        have applied the step, wherever they are. Where the others call it, too, they wait for rank 0, and if that dies
        before it has come here, the next rank 0 writes. Should it die while it writes, there is none. A newcomer writes
        nothing.

        Raises:
            OSError: it cannot be written.
        """
        self._settle()
        if self.rank in _newcomers(self._arrival):  # rank 0, which writes, is another: they stand behind members
            return
        state = self.state_dict()
        if self.rank == 0:
            self.save(state, path)

    @abstractmethod
    def save(self, state: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write a state to a file; atomically."""

    @abstractmethod
    def load(self, path: str | os.PathLike[str]) -> bool:
        """Load a checkpoint, if it is there; return whether it was."""

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, step: ElasticStep) -> None:
        """Begin an attempt at a step."""
        if self._step is not None or not self.is_open:
            raise StepOrderError("a step was entered within another one, or outside of the job")
        self._applied.go_on()
        self._step, self._is_stable = step, False
        step.has_ended = True
        self.training.begin_step()
        self._step_context = _current(self)
        self._step_context.keeps_journals = self._elastic is not None
        self._step_epoch = 0 if self._elastic is None else self._elastic.epoch
        for sums in self._step_context.step_sums:
            sums.begin_step()
        for update in self._step_context.shared_updates:
            update.begin_step()

    def deal(self, interval: SampleInterval) -> tuple[Part, ...]:
        """Return this rank's parts of the next step, which takes these samples."""
        ranks = self.dealt_ranks()
        if self.rank not in ranks:
            return ()
        return self.data.deal(interval, ranks.index(self.rank), len(ranks), self.num_parts)

    def sharing_ranks(self) -> list[int]:
        """Return the ranks that take samples as long as members stay as they are, in order: all but warm spares."""
        spares = frozenset[int]() if self._elastic is None else self._elastic.view.spares
        return [rank for rank in range(self.size) if rank not in spares]

    def dealt_ranks(self) -> list[int]:
        """Return the ranks that take samples of the next step, in order."""
        newcomers = _newcomers(self._arrival)
        return [rank for rank in self.sharing_ranks() if rank not in newcomers]

    def begin_part(self, part: Part) -> None:
        """Begin with a part: its gradients come next."""
        self.training.begin_part(part, self._mark.number, self.size)

    def end(self, step: ElasticStep, error: BaseException | None) -> bool:
        """End an attempt at a step; returns whether the error was a change of members, and is done with."""
        if isinstance(error, NotInitializedError):
            _current(self)  # says more
        if self._is_updating:
            self.end_update(is_applied=False)
        error = error and self.training.collective_error(error)
        if self._step is not step:  # it was cut off, and could not be completed: members have changed since
            return error is None or isinstance(error, CollectiveError)
        if not self._has_renewed:
            self.training.renew()
            self._has_renewed = True
        if error is None and not step.is_applied:
            error = self._apply_nothing()
        if error is not None and not self._is_change(error):
            self._step = None
            return False
        self._is_whole = error is None
        if not step.is_applied:  # it stays the step until it is known what comes of it
            self._change(f"step {step.number} is cut off: {error}")
            return True
        self._step = None
        self._count_progress(step)
        if error is not None:
            self._change(f"step {step.number} is applied; what came after the update is lost here: {error}")
        elif self._elastic is not None and (self._count_step(self._elastic) or self._is_awaited):
            self._change(f"step {step.number} is the last with these members")
        return True

    def _count_progress(self, step: ElasticStep) -> None:
        """Count an applied step's samples, and the steps that are left, for metrics."""
        counters = _current(self).counters
        if self.counts_steps:
            contexts.mark("STEP")
        counters.samples += step.parts.num_samples
        left = self.data.num_steps_behind(step.interval, step.num_epochs, step.num_sharing)
        counters.goal_steps = counters.steps + left

    def _count_step(self, elastic: ElasticJob[contexts.Context]) -> bool:
        """Count a step for the membership, if its view does not yet; returns True if members change now."""
        is_counted, self._is_counted = self._is_counted, False
        return elastic.is_changing() if is_counted else elastic.step_applied()

    def complete_step(self, error: CollectiveError) -> bool:
        """Go to the next view in the middle of a step, at the place where its sums are waited for.

        Collective over the members of that view: each comes from here, or from the end of its step.

        Args:
            error: the reason why there are no sums.

        Returns:
            The sums are complete in this rank's memory, and the program goes on as if nothing had been. Otherwise the
            step is undone, or is to be: the error has to leave it.
        """
        step = self._step
        if step is None or step.is_applied or not self._is_change(error):
            if self._has_begun_update():
                self.lose_state()
            return False
        self._waits = True
        try:
            self._change(f"step {step.number} is cut off: {error}")
        finally:
            self._waits = False
        if self._step is step:
            _log.info("step %d is completed with the gradients of all ranks that began it", step.number)
        return self._step is step

    def _has_begun_update(self) -> bool:
        """Return whether shared weights are no longer those of the step before, which this rank has not applied yet."""
        context, step = self._step_context, self._step
        if context is None or step is None or step.is_applied:
            return False
        return any(update.is_begun for update in list(context.shared_updates))

    def _update_at_hand(self) -> UpdateAtHand | None:
        """Return a description of an update that the members of this host finish; None: there is none."""
        if not self._waits or self._step_context is None or not self._has_begun_update():
            return None
        updates = self._step_context.shared_updates
        return UpdateAtHand(self._step_epoch, self._step_context.cross_rank, updates[0].owner)

    def _sums_at_hand(self) -> SumsAtHand | None:
        """Return a description of the sums for which the program waits; None: it waits for none."""
        context = self._step_context
        if not self._waits or self._step is None or context is None:
            return None
        if self._is_summed:
            return SumsAtHand(self._step_epoch, context.rank, can_finish=True, are_whole=True)
        if not context.step_sums:
            return None
        can_finish = all(sums.can_finish for sums in context.step_sums)
        are_whole = all(sums.is_whole for sums in context.step_sums)
        return SumsAtHand(self._step_epoch, context.rank, can_finish, are_whole)

    def _apply_nothing(self) -> BaseException | None:
        """Count a step in which no update was made, on no rank; returns an error if members change meanwhile."""
        try:
            self.training.finish_gradients()
            if self.size > 1:  # otherwise one could be more than a step ahead of another
                _current(self).barrier(name="job.step", blocking=True).wait()
            with _Update(self):
                pass
        except CollectiveError as error:
            return error
        return None

    def begin_update(self) -> None:
        """Begin to change the weights.

        Raises:
            StepOrderError: the step has been applied, or there is none.
            PeerLostError: the view has ended.
        """
        kept = None if self._arrival is None else self.training.gradients()  # which another transfer clears
        self._is_summed = kept is not None
        while True:
            try:
                self._confirm_arrival()
                self._lock.acquire()
                if self._elastic is None or self._mark.revoked < self._elastic.epoch:
                    break
                self._lock.release()
                raise PeerLostError("the members of the job change: this step is not applied")
            except CollectiveError as error:
                gradients = self.training.gradients() if kept is None else kept  # perhaps clipped by now
                if not self.complete_step(error):
                    raise
                self.training.set_gradients(gradients)
        self._is_updating = True
        problem: Exception | None = None
        if self._step is not None and self._step.is_applied:
            problem = StepOrderError("optimizer.step() was called twice in a step")
        if problem is not None:
            self.end_update(is_applied=False)
            raise problem

    def end_update(self, *, is_applied: bool) -> None:
        """End the update of the weights."""
        if is_applied and self._step is not None:
            self._step.is_applied = True
            self._num_late = 0
            self._mark.number += 1
            self.data.move_behind(self._step.interval)
            self._applied.note(self._mark.number)
        self._is_updating = self._is_summed = False
        self._lock.release()

    def lose_state(self) -> None:
        """Take note that this member's weights are not those of any step, until it gets them from another one."""
        with self._lock:
            self._mark.is_member, self._mark.has_lost, self._arrived = False, True, None

    # -- changes of members -------------------------------------------------------------------------------------------

    def progress(self, epoch: int) -> StepProgress:
        """Return how far this process is; see `reigen.elastic_job.StepState`."""
        with self._lock:
            mark = self._mark
            mark.revoked = max(mark.revoked, epoch)
            applied = mark.number - mark.offset if mark.is_member else 0
            here = SamplePosition(self.data.epoch, self.data.position)
            held, following = HeldSums(epoch), here
            if self._step is not None and not self._step.is_applied:
                held = self._held_sums(epoch)
                following = SamplePosition(self._step.epoch, self._step.interval.stop)
            return StepProgress(applied, here, following, held)

    def _held_sums(self, epoch: int) -> HeldSums:
        """Return of which buckets the sums of the step in flight can be had, as far as that is known now."""
        context, elastic = self._step_context, self._elastic
        if context is None or elastic is None:
            return HeldSums(epoch)
        if self._has_begun_update():
            return HeldSums(self._step_epoch, (0,))
        lost = elastic.lost_ranks if self._step_epoch == epoch else ()
        buckets: list[int] = []
        first = 0
        for sums in list(context.step_sums):
            buckets += [first + number for number in sums.held(lost)]
            first += sums.num_buckets
        return HeldSums(self._step_epoch, tuple(buckets), max(1, first))

    def _is_change(self, error: BaseException) -> bool:
        """Return whether an error is a change of members; others leave."""
        if self._elastic is None or not isinstance(error, CollectiveError):
            return False
        if self._is_wrong:
            return False
        if isinstance(error, SharedMemoryError):  # who has too little memory leaves, and has an error of its own
            return bool(error.ranks)
        if isinstance(error, DeadlineError):
            self._num_late += 1
            if self._num_late > _MAX_LATE:
                error.add_note("This came again and again with no step between: the ranks do different things.")
                return False
        return isinstance(error, PeerLostError) or not _current(self).is_operational

    def _change(self, reason: str) -> None:
        """Go on in the next view."""
        _log.info("%s", reason)
        self.training.change_view(api.change_view)
        self._catch_up_or_change()

    def _catch_up_or_change(self) -> None:
        """Collective: come to hold the state of all members; if one is lost meanwhile, in the view behind this one."""
        while True:
            try:
                self._catch_up()
                if self._elastic is None or not self._count_state():
                    return
            except CollectiveError as error:
                if not self._is_change(error):
                    raise
                _log.info("members change again: %s", error)
            self.training.change_view(api.change_view)

    def _count_state(self) -> bool:
        """Begin to count the membership's steps; returns True if members change now.

        That all have the state is its first step: who has none is at step 0.
        """
        assert self._elastic is not None
        target = self._elastic.view.base.target
        with self._lock:
            self._mark.offset = self._base_number - max(target, 1)
            self._mark.is_member = self.rank not in _newcomers(self._arrival)
            self._mark.has_lost = self._mark.has_lost and not self._mark.is_member
        return target == 0 and self._elastic.step_applied()

    def _catch_up(self) -> None:
        """Collective: all members of a view come to hold the state of those who are furthest."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            self._arrived = note_arrival(self._mark.number, arrival[0].digest() if self._is_summed else b"")
        self._applied.enter_view(contexts.current())
        # All have come to this view (`api.change_view`): nobody fills a bucket, or changes a weight, of the one before.
        mark = self._mark
        held, described_views = self._exchange_held()
        plan = plan_catch_up(held)
        may_overlap = self._elastic is not None and may_overlap_transfer(held, plan)
        if plan.finishing and self._step_context is not None:
            for sums in self._step_context.step_sums:
                sums.finish(plan.finishing)
            barrier()
        self._finish_updates(held)
        self._base_number = held[plan.source].number
        if self._elastic is not None and self._elastic.view.base.completes and plan.source in plan.completing:
            self._base_number += 1
        if self._elastic is not None:
            self._tell_outcome(self._elastic, held, plan)
        is_completing = self.rank in plan.completing
        self._is_counted = is_completing and self._base_number > mark.number
        self._has_renewed = not is_completing
        if not is_completing:
            self._end_step(is_redone=is_step_redone(plan, self.rank, mark.number, self._base_number))
        self.training.enter_view(described_views, keeps_gradients=is_completing)
        if plan.receivers or plan.partial_receivers:
            self._receive(plan, held, may_overlap=may_overlap)
        sharing = self.sharing_ranks()
        _give_local_state(self.training.local, self.rank, *plan_local_state(held, plan, sharing))
        with self._lock:
            mark.was_spare = self.rank not in sharing or (mark.was_spare and self.rank in plan.waiting)
        self._is_whole = True  # or nobody has more
        self._is_stable = not plan.completing
        self._is_awaited = bool(plan.waiting)
        if self.rank in plan.waiting:
            _log.info("the state comes after the step that the others are completing")
            contexts.current().barrier(name="elastic.next_view", blocking=True).wait()  # which the others begin

    def _exchange_held(self) -> tuple[list[HeldState], tuple[Any, ...]]:
        """Collective: return the states and descriptions that all members of a view hold; process sets follow.

        Newcomers that have the state count as members.

        Raises:
            CollectiveError: nobody has the state any more; this process leaves.
        """
        mark = self._mark
        is_whole = self._is_whole or self._step is not None  # what is cut off is undone as a whole
        if (update := self._update_at_hand()) is None and self._has_begun_update():
            self.lose_state()
        is_in_step = self._step is not None and not self._step.is_applied
        has_newcomers = self._elastic is None or len(self._elastic.renumbered) < self.size
        described = digest_description(self._describe()) if has_newcomers else b""
        own = HeldState(
            *(mark.number, mark.is_member, is_whole, self._sums_at_hand(), update, is_in_step),
            arrived=self._arrived,
            description=described,
            has_lost=mark.has_lost,
            was_spare=mark.was_spare,
        )
        may_offer = self._elastic is not None and has_newcomers and mark.is_member and self._step is None
        self._offer = self.training.offer() if may_offer else None
        address = None if self._offer is None else self._offer.address
        entries = allgather_object(
            (own, describe_former_sets(self._process_sets), self.training.describe_view(), address), "elastic.held"
        )
        all_held, former_sets, described_views, self._offers = zip(*entries, strict=True)
        if self._elastic is not None:
            self._process_sets = follow_members(self._process_sets, former_sets)
        held = confirm_newcomers(all_held)
        if problem := find_lost_state(held):
            self._is_wrong = True
            with suppress(CollectiveError):
                barrier()  # who has not seen this yet would take the end of the others for a change of views
            raise CollectiveError(problem)
        if held[self.rank].is_member:
            with self._lock:
                mark.is_member = True
        return held, described_views

    def _tell_outcome(
        self, elastic: ElasticJob[contexts.Context], held: Sequence[HeldState], plan: CatchUpPlan
    ) -> None:
        """Tell the outcome for the step that was under way."""
        outcome, number = find_outcome(held, plan)
        step = self._step
        interval = self.data.next_interval(len(self.sharing_ranks())) if step is None else step.interval
        is_known = number == self._mark.number  # this member has not applied it, so that it knows which samples it had
        samples = (interval.epoch, interval.start, interval.stop) if is_known else ()
        elastic.tell_outcome(outcome, number, samples)

    def _finish_updates(self, held: Sequence[HeldState]) -> None:
        """Collective: updates of shared weights are finished that some owner has begun."""
        if all(each.update is None for each in held):
            return
        if (share := plan_updates(held, self.rank)) is not None and self._step_context is not None:
            for update in self._step_context.shared_updates:
                update.finish(*share)
        barrier()

    def _end_step(self, *, is_redone: bool) -> None:
        """End a step that was cut off: it is undone here, or its result comes from others.

        In the latter case it is this rank's step until the result is there: should those die who have it, it is undone.
        """
        if self._has_begun_update():  # who sends the state may die before this rank has it
            self.lose_state()
        step, self._step = self._step, None
        self._is_summed = False
        if step is None or step.is_applied:
            self.training.drop_gradients()
        elif is_redone:
            self.num_undone += 1
            self.training.undo_step()
            self._is_whole = True
        else:
            self.training.drop_gradients()
            self._step, self._step_context = step, None  # without sums, so that it is not completed

    def _receive(self, plan: CatchUpPlan, held: Sequence[HeldState], *, may_overlap: bool) -> None:
        """Collective: receivers get the state of the source; who was a member keeps its own if that fails.

        Partial receivers get what of the small state is the same on all members.
        """
        source, receives = plan.source, self.rank in plan.receivers
        if plan.receivers and not are_alike(held, plan):
            check_description(self._describe(), source)
        backup = self.training.backup() if receives and self._mark.is_member else None
        keeps_local = receives and held[source].was_spare and not held[self.rank].was_spare and self._mark.is_member
        local = self.training.local.copy() if keeps_local else None
        if receives:
            self._arrived = None
        own = None
        if self.rank == source:
            own = (self._mark.number, self.data.state_dict(), self.training.small_state())
        try:
            state = self._transfer(plan, own, may_overlap=may_overlap) if plan.receivers else None
            if state is None:
                state = broadcast_object(own, source, "elastic.small_state")
        except BaseException:
            if backup is not None:
                self.training.recover(backup)
            raise
        number, cursor, small = state
        if receives:
            with self._lock:
                self._mark.number = number
                self._applied.note(number)
                self._mark.offset = 0 if self._elastic is None else number - max(self._elastic.view.base.target, 1)
                self.data.load_state_dict(cursor)
                self._is_whole = False
        if receives or self.rank in plan.partial_receivers:
            self.training.load_small_state(small)
        if keeps_local:
            self.training.local.load(local)
        if receives and self._step is not None:
            self._step.is_applied = True  # elsewhere
            self._step = None
        if receives and self._arrival is not None:
            self._arrival[0].read()

    def _transfer(
        self, plan: CatchUpPlan, message: Any = None, *, may_overlap: bool = False, is_repeated: bool = False
    ) -> Any:
        """Collective: receivers get weights and optimizer state, which are compared with those of the source.

        Args:
            plan: who gets them.
            message: of the source, to all ranks.
            may_overlap: they may get them while the members are in the next step: then `_confirm_arrival` compares.
            is_repeated: that step is under way, and what they have read meanwhile is wrong: it comes once more. Who
                dies may leave others that have not compared it.

        Returns:
            The source's message; None where `_confirm_arrival` compares, and it did not come.
        """
        source, receivers = plan.source, plan.receivers
        is_compared = self.rank == source or self.rank in receivers
        attempt, offers = (1, ()) if is_repeated else (0, self._offers)
        while attempt < _MAX_TRANSFERS:
            overlapped = self.training.transfer(
                source, receivers, may_overlap=may_overlap, offers=offers, message=message
            )
            if overlapped is not None:
                self._arrival = overlapped, plan
                return overlapped.message
            own = self.training.digest() if is_compared else b""
            if is_repeated:
                self._arrived = note_arrival(self._mark.number, own)
            found = compare_digests(own, source, message)
            if not found.wrong:
                if is_repeated:
                    self._arrived = note_arrival(self._mark.number, found.digest)
                return found.message
            if not found.is_unread:
                attempt += 1
                _log.warning("what was received differs from what was sent; attempt %d", attempt)
            wrong, offers = found.wrong, ()
        self._is_wrong = self.rank in wrong
        with suppress(CollectiveError):
            barrier()  # members that change before those ranks know of it would only be asked for the state again
        raise explain_wrong_state(wrong, source, _MAX_TRANSFERS)

    def _confirm_arrival(self) -> None:
        """Collective: return when newcomers have the state of which the next step is, and are members."""
        if self._arrival is None:
            return
        overlapped, plan = self._arrival
        found = compare_digests(overlapped.digest(), plan.source)
        if found.wrong:
            _log.warning("what newcomers have read differs from what was sent; attempt 1")
            gradients = self.training.gradients()
            self._arrival = self._arrived = None  # the digests are of what was sent first
            self._transfer(plan, is_repeated=True)
            self.training.set_gradients(gradients)
        else:
            self._arrived = note_arrival(self._mark.number, found.digest)
        with self._lock:
            self._arrival, self._mark.is_member = None, True

    def _complete_arrival(self) -> None:
        """Collective: do what `_confirm_arrival` does at the end of the job, with the members that there are."""
        while self._arrival is not None:
            try:
                self._confirm_arrival()
            except CollectiveError as error:
                if not self._is_change(error):
                    raise
                if self._elastic is not None and self._elastic.has_finished_members:  # they have seen all digests
                    return
                self._change(f"members change after the last step: {error}")

    def _describe(self) -> dict[str, list[str]]:
        """Return what must be the same on all members, by name, in lines."""
        return {**self.training.describe(), "data": self.data.describe()}

    def _settle(self, *, is_end: bool = False) -> None:
        """Return when all members are known to have applied the last step; at the end of the job, collective."""
        if self._step is not None:
            raise StepOrderError("the state belongs to no step here: call it after the `with step:` block")
        if is_end:
            self._applied.go_on()
        if self._is_stable:
            return
        try:
            if self.size > 1 and is_end:  # under a name of its own, which no barrier of the program has
                _current(self).barrier(name="job.end", blocking=True).wait()
            elif self.size > 1:
                self._applied.wait_for_all()
        except CollectiveError as error:
            if not self._is_change(error):
                raise
            if self._elastic is None or not self._elastic.has_finished_members:  # they have been in the barrier
                self._change(f"members change after step {self._mark.number - 1}: {error}")
