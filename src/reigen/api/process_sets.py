"""Process sets: collectives among some of the ranks. Horovod's class and functions, the same for every framework."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reigen import context
from reigen.api.objects import allgather_object
from reigen.errors import ArgumentError, MismatchError, UnsupportedError

# -- ranks as users name them: a list of numbers, or an mpi4py communicator; nothing here imports mpi4py ---------------


def is_communicator(value: object) -> bool:
    """Return whether it looks like an mpi4py communicator."""
    return hasattr(value, "Get_size") and hasattr(value, "allgather")


def translate_ranks(comm: Any, rank: int) -> list[int]:
    """The global ranks of a communicator's processes, in its order, given this process's. Collective over it."""
    return [int(each) for each in comm.allgather(rank)]


def as_ranks(ranks: Any) -> list[int]:
    """A list of ranks, as the user gave it; raises ArgumentError if it holds others than integers, or one twice."""
    try:
        found = [operator.index(rank) for rank in ranks]
    except TypeError:
        raise ArgumentError(f"a list of ranks is needed, got {ranks!r}") from None
    if len(set(found)) < len(found):
        raise ArgumentError(f"a rank is there twice: {found}")
    return found


# -- process sets ------------------------------------------------------------------------------------------------------


class ProcessSet:
    """Some of the ranks, which run collectives among themselves.

    Every collective takes one as ``process_set``. It must be registered first, on all ranks of the job: with
    ``init(process_sets=[...])`` or :func:`add_process_set`.

    Args:
        ranks_or_comm: global ranks, in any order; or an mpi4py communicator whose processes are to form the set.

    Attributes:
        mpi_comm: the communicator, if it was made of one.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.mpi_comm = ranks_or_comm if is_communicator(ranks_or_comm) else None
        self._ranks = None if self.mpi_comm is not None else tuple(sorted(as_ranks(ranks_or_comm)))
        self._number = 0
        #: the job in which it is registered; when that ends, so does the registration
        self._job: weakref.ReferenceType[context.Context] | None = None

    @property
    def process_set_id(self) -> int | None:
        """Number in the job; None before it is registered, after it was removed, and after ``shutdown()``."""
        return None if self._context() is None else self._number

    @process_set_id.setter
    def process_set_id(self, number: int | None) -> None:
        """Take another number, as in Horovod: a collective with one that no process set has raises ArgumentError."""
        if number is None or not context.is_initialized():
            self._job = None
        else:
            self._job, self._number = weakref.ref(context.current()), operator.index(number)

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks, ascending; None for one that was made of a communicator and is not registered yet."""
        return None if self._ranks is None else list(self._ranks)

    def size(self) -> int | None:
        """Return the number of its ranks; None while it is not registered."""
        return None if self._context() is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Return this process's number among its ranks; None while it is not registered.

        Raises:
            ArgumentError: this process is not one of them.
        """
        job, ranks = self._context(), self.ranks
        if job is None or ranks is None:
            return None
        if job.rank not in ranks:
            raise ArgumentError(
                f"Process is not part of provided process set: rank {job.rank} is none of its ranks {ranks}"
            )
        return ranks.index(job.rank)

    def included(self) -> bool | None:
        """Return whether this process is one of its ranks; None while it is not registered."""
        job, ranks = self._context(), self.ranks
        return None if job is None or ranks is None else job.rank in ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def __deepcopy__(self, memo: object) -> ProcessSet:
        return self  # what is registered is this object

    def __reduce__(self) -> str | tuple[Any, ...]:
        return ProcessSet, (self.mpi_comm or self.ranks,)  # in another process it is not registered

    def registered(self, job: context.Context, number: int, ranks: Sequence[int]) -> None:
        """The job knows it by this number from now on."""
        self._job, self._number, self._ranks = weakref.ref(job), number, tuple(ranks)
        _registered.setdefault(job, []).append(self)

    def removed(self) -> None:
        """The job knows it no more."""
        if (job := self._context()) is not None and self in _registered.get(job, ()):
            _registered[job].remove(self)
        self._job = None

    def _context(self) -> context.Context | None:
        """The job in which it is registered, while that goes on."""
        job = None if self._job is None else self._job()
        return job if job is not None and job is _current_or_none() else None


class _AllRanks(ProcessSet):
    """The set of all ranks of whatever job this process is in; it needs no registration."""

    def __init__(self) -> None:
        super().__init__(())

    @property  # type: ignore[misc]  # its number cannot be changed
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        """All ranks; none outside a job."""
        job = _current_or_none()
        return [] if job is None else list(range(job.size))

    def __reduce__(self) -> str:
        return "global_process_set"

    def _context(self) -> context.Context | None:
        return _current_or_none()


#: by job, the sets that it knows
_registered: weakref.WeakKeyDictionary[context.Context, list[ProcessSet]] = weakref.WeakKeyDictionary()

#: All ranks of the job.
global_process_set: ProcessSet = _AllRanks()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set. Collective: all ranks of the job call it, with the same ranks, in the same order.

    Process sets can be added when HOROVOD_DYNAMIC_PROCESS_SETS=1 or ``init(process_sets="dynamic")`` says so.

    Args:
        process_set: the set, or the global ranks of a new one.

    Returns:
        The set, which is registered now.

    Raises:
        ArgumentError: sets cannot be added in this job, there is one with these ranks, or the ranks make no sense.
        MismatchError: the ranks of the job ask for different sets.
        UnsupportedError: it was made of a communicator (a NotImplementedError); give it to ``init()``.
    """
    job = _require_dynamic()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.mpi_comm is not None:
        raise UnsupportedError("a process set of an MPI communicator can be registered only by init(process_sets=...)")
    ranks = added.ranks or []
    # All ranks find out together, before one of them alone finds fault with its own list and the others wait for it.
    _check_equal(allgather_object(job, ranks, "add_process_set"), "the ranks ask for different process sets")
    added.registered(job, job.add_process_set(ranks), ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Undo :func:`add_process_set`. Collective: all ranks of the job call it, in the same order.

    Returns:
        True; False, and nothing was done, for a set that is not registered and for the set of all ranks.

    Raises:
        ArgumentError: sets cannot be removed in this job.
        MismatchError: the ranks of the job ask for different sets to be removed.
    """
    number = process_set.process_set_id
    if not number:
        return False
    _require_dynamic().remove_process_set(number)
    process_set.removed()
    return True


@dataclass(frozen=True)
class RegisteredSets:
    """Process sets of a view of an elastic job, and this rank's number there."""

    rank: int
    sets: list[ProcessSet]


#: A rank in the view before, and the sets of that view that are not registered in this one: their numbers and ranks.
FormerSets = tuple[int, list[tuple[int, list[int]]]]


def describe_former_sets(before: RegisteredSets | None) -> FormerSets | None:
    """Return this rank in the view before, and its sets, for `follow_members`; None: it was not in it."""
    if before is None:
        return None
    return before.rank, [(each._number, each.ranks or []) for each in before.sets if each.process_set_id is None]


def follow_members(before: RegisteredSets | None, answers: Sequence[FormerSets | None] | None = None) -> RegisteredSets:
    """Collective: register the sets of the view before again that are not registered in this one, with the ranks left.

    Those are the sets of `add_process_set`. Sets whose ranks are all gone stay unregistered: their use is an error.

    Args:
        before: what this function returned in that view; None for a rank that was not in it.
        answers: what `describe_former_sets` has returned on all ranks; None: they are asked here.

    Returns:
        What the same function is to be given in the next view.
    """
    job = context.current()
    if answers is None:
        answers = allgather_object(job, describe_former_sets(before), "elastic.process_sets")
    here = {answer[0]: rank for rank, answer in enumerate(answers) if answer is not None}
    described: list[tuple[int, list[int]]] = next((answer[1] for answer in answers if answer is not None), [])
    mine = {} if before is None else {each._number: each for each in before.sets if each.process_set_id is None}
    for number, old_ranks in described:
        ranks = tuple(sorted(here[rank] for rank in old_ranks if rank in here))
        if not ranks:
            continue
        known = {members: each for each, members in job.process_sets.items()}
        new = known[ranks] if ranks in known else job.add_process_set(ranks)
        if number in mine:
            mine[number].registered(job, new, ranks)
    return RegisteredSets(job.rank, _registered.setdefault(job, []))


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The global ranks of every registered process set, by its id."""
    return {number: list(ranks) for number, ranks in context.current().process_sets.items()}


def process_set_number(process_set: ProcessSet) -> int:
    """The number by which the job knows the set; raises ArgumentError if it is none, or not registered."""
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise ArgumentError(f"process_set must be a ProcessSet, got {process_set!r}")
    number = process_set.process_set_id
    if number is None:
        raise ArgumentError(
            f"{process_set} is not registered in this job: give it to init(process_sets=[...]) or add_process_set()"
        )
    return number


# -- at init() --------------------------------------------------------------------------------------------------------


#: Of the collective by which ranks compare the sets that they were given.
_STATIC_NAME = "init.process_sets"


def check_static(process_sets: object) -> list[ProcessSet]:
    """The list of sets that ``init()`` was given; raises ArgumentError if it is something else."""
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
        raise ArgumentError(f'process_sets must be a list of ProcessSet, or "dynamic", got {process_sets!r}')
    sets = list(process_sets)
    wrong = [each for each in sets if not isinstance(each, ProcessSet)]
    if wrong:
        raise ArgumentError(f"process_sets must hold objects of ProcessSet only, got {wrong[0]!r}")
    return sets


def register_static(job: context.Context, process_sets: Sequence[ProcessSet]) -> None:
    """Register the sets that ``init()`` was given. Collective; all ranks take part, also those without any.

    Raises:
        MismatchError: the ranks gave different sets; raised on all.
        ArgumentError: a set is there twice, or has ranks that are not in the job; raised on all.
    """
    own = [
        (
            each.mpi_comm is not None,
            each.ranks or [] if each.mpi_comm is None else sorted(translate_ranks(each.mpi_comm, job.rank)),
        )
        for each in process_sets
    ]
    all_lists: list[list[tuple[bool, list[int]]]] = allgather_object(job, own, _STATIC_NAME)
    # Sets made of ranks are the same everywhere; those made of communicators are what each rank is part of.
    comparable = [["a communicator" if is_comm else ranks for is_comm, ranks in lists] for lists in all_lists]
    _check_equal(comparable, "the ranks gave different process_sets to init()")
    known = {tuple(range(job.size))}
    for entry, (process_set, column) in enumerate(zip(process_sets, zip(*all_lists, strict=True), strict=True)):
        for ranks in dict.fromkeys(tuple(ranks) for _, ranks in column):  # one, but for parts of a communicator
            if ranks in known:
                raise ArgumentError(f"process_sets entry number {entry} is a duplicate: {list(ranks)}")
            known.add(ranks)
            number = job.add_process_set(ranks)
            if list(ranks) == own[entry][1]:
                process_set.registered(job, number, ranks)


def register_again(job: context.Context, process_sets: Sequence[ProcessSet], renumbered: Mapping[int, int]) -> None:
    """Register the sets that ``init()`` was given in another view of an elastic job. Collective; see `register_static`.

    Members that are gone are gone from the sets; a set without members is not registered, and one that has become equal
    to another is the same. What rank 0 says counts: it has been in the job for longest.

    Args:
        job: the view's context.
        process_sets: the sets.
        renumbered: ranks in this view, by ranks in the last one that this process had; empty for a newcomer.
    """
    own = [
        (False, sorted(renumbered[rank] for rank in each.ranks or [] if rank in renumbered)) for each in process_sets
    ]
    all_lists: list[list[tuple[bool, list[int]]]] = allgather_object(job, own, _STATIC_NAME)
    _check_equal([len(lists) for lists in all_lists], "the ranks gave different numbers of process_sets to init()")
    numbers = {tuple(range(job.size)): 0}
    for members in dict.fromkeys(tuple(ranks) for _, ranks in all_lists[0]):
        if members and members not in numbers:
            numbers[members] = job.add_process_set(members)
    for process_set, (_, ranks) in zip(process_sets, all_lists[0], strict=True):  # after what may fail
        if ranks:
            process_set.registered(job, numbers[tuple(ranks)], ranks)
        else:
            process_set.removed()


def _check_equal(values: Sequence[object], message: str) -> None:
    """Raise a MismatchError with this message unless all ranks' values are equal."""
    if any(value != values[0] for value in values):
        details = {rank: str(value) for rank, value in enumerate(values)}
        raise MismatchError(message, ranks=range(len(values)), details=details)


def _require_dynamic() -> context.Context:
    job = context.current()
    if not job.config.dynamic_process_sets:
        raise ArgumentError(
            "process sets cannot be added or removed in this job: set HOROVOD_DYNAMIC_PROCESS_SETS=1 for all ranks, or "
            'call init(process_sets="dynamic")'
        )
    return job


def _current_or_none() -> context.Context | None:
    return context.current() if context.is_initialized() else None
