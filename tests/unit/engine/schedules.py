"""Random schedules for the simulator of negotiation: what each rank submits in which order, and what goes wrong.

Every name occurs once in a section of a program, and every section has at most one operation that a rank waits for, so
that no program waits for itself in a circle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from reigen.engine.messages import JOIN_NAME, Operation, OperationKind
from reigen.types import ReduceOp

FOREVER = 1e9

#: An operation, and the process set that it is about: the program's own number of it, since those that the coordinator
#: gives are used again. 0 is all ranks.
Item = tuple[Operation, int]
Programs = list[list[Item]]


@dataclass(frozen=True)
class Plan:
    """What one seed stands for."""

    size: int
    capacity: int
    threshold_bytes: int
    fuse_groups: bool
    deadline_seconds: float
    #: for each rank, what it submits, in order
    programs: Programs
    #: (rank, after how many of its submissions) or None
    leaves: tuple[int, int] | None
    dies: tuple[int, int] | None
    #: after how many announcements the coordinator ends the job
    stops: int | None
    #: what is said travels through memory, as between the ranks of one host
    encoded: bool
    #: ranks mostly wait for one operation before they submit the next, as in a script of blocking calls
    blocking: bool
    #: how likely each kind of event is
    weights: tuple[int, ...]


def make_plan(rng: random.Random) -> Plan:
    """Draw a schedule's parameters."""
    size = rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 5, 6))
    fault = rng.choice(("", "", "", "", "", "late", "late", "leave", "die", "die", "stop"))
    simple = rng.random() < 0.65
    #: the same again and again: what is cached is used, forgotten while somebody uses it, and said in full again
    steady = not simple and rng.random() < 0.4
    blocking = rng.random() < (0.3 if simple else 0.4)
    programs = _simple_programs(rng, size, blocking) if simple else _Author(rng, size, steady).write()
    where = (rng.randrange(size), rng.randrange(5 if simple else 15))
    if fault == "late" and size > 1:
        for program in programs:  # some ranks lack some submissions
            if rng.random() < 0.5 and program:
                del program[rng.randrange(len(program)) :]
    return Plan(
        size=size,
        capacity=rng.choice((1, 2, 3) if steady else (2, 3, 1024) if blocking else (0, 1, 2, 4, 1024, 1024)),
        threshold_bytes=rng.choice((0, 40, 1 << 20)),
        fuse_groups=rng.random() < 0.8,
        deadline_seconds=5.0 if fault == "late" else FOREVER,
        programs=programs,
        leaves=where if fault == "leave" else None,
        dies=where if fault == "die" else None,
        stops=where[1] if fault == "stop" else None,
        encoded=blocking or rng.random() < 0.2,
        blocking=blocking,
        weights=(9, 9, 1, 9, 3) if steady else (*(rng.choice((1, 1, 3, 9)) for _ in range(4)), rng.choice((0, 1, 3))),
    )


# -- programs ---------------------------------------------------------------------------------------------------------


def _simple_programs(rng: random.Random, size: int, blocking: bool) -> Programs:
    """Steps that use the same names again, in an order of its own on each rank; now and then something new.

    Where ranks wait for each it is the same order, but now and then: then one rank waits while another does not.
    """
    names = [f"t{i}" for i in range(rng.randrange(1, 5))]
    kinds = (OperationKind.ALLREDUCE,) if blocking else rng.choice((_KINDS, (OperationKind.ALLREDUCE,)))
    tensors = {name: _Tensor(rng, name, tuple(range(size)), kinds) for name in names}
    programs: Programs = [[] for _ in range(size)]
    for _ in range(rng.randrange(4, 16) if blocking else rng.randrange(1, 5)):
        for tensor in tensors.values():
            if not blocking or rng.random() < 0.1:
                tensor.change()
        order = rng.sample(names, len(names))
        for rank, program in enumerate(programs):
            if not blocking or rng.random() < 0.05:
                order = rng.sample(names, len(names))
            program.extend((tensors[name].operations[rank], 0) for name in order)
    return programs


@dataclass
class _Author:
    """Writes programs with process sets, groups and joins."""

    rng: random.Random
    size: int
    steady: bool
    programs: Programs = field(init=False)
    #: process sets that there are, by the program's number
    live: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_sets: int = 0
    tensors: dict[tuple[int, str], _Tensor] = field(default_factory=dict)

    def write(self) -> Programs:
        """One program for each rank."""
        rng = self.rng
        self.programs = [[] for _ in range(self.size)]
        self._joins = rng.random() < 0.7
        self._names = [f"t{i}" for i in (range(4) if self.steady else range(rng.randrange(1, 4)))]
        for _ in range(rng.randrange(1, 4)):
            self._epoch()
        return self.programs

    def _epoch(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(1, 4) if self.steady else rng.randrange(3)):
            choice = rng.random()
            if choice < 0.6:
                self._section(self._add)
            elif choice < 0.9 and self.live:
                self._section(self._remove)
            self._section()
        if not self._joins:
            return
        active = set(range(self.size))
        for _ in range(rng.randrange(3)):  # one after the other has no more data
            last = {rank for rank in active if rng.random() < 0.5}
            self._section(active=active, last=last)
            active -= last
        if active and len(active) < self.size and rng.random() < 0.2:  # which is refused now
            self.num_sets += 1
            for rank in active:
                self.programs[rank].append((Operation(OperationKind.ADD_SET, "", shape=(0,)), self.num_sets))
        free = Operation(OperationKind.FREE, "free", offset=64)
        frees = rng.random() < 0.3
        for program in self.programs:  # memory is freed whenever the garbage collector says so
            last = [(Operation(OperationKind.JOIN, JOIN_NAME), 0)]
            if frees:
                last.insert(rng.randrange(2), (free, 0))
            program.extend(last)

    def _section(
        self,
        blocking: Callable[[], dict[int, Item]] | None = None,
        active: Collection[int] | None = None,
        last: Collection[int] = (),
    ) -> None:
        """Every name once in some of the sets, on the ranks ``active`` (all); on those in ``last`` some of them."""
        rng = self.rng
        targets = [(0, tuple(range(self.size))), *self.live.items()]
        used = [(number, ranks, name) for number, ranks in targets for name in self._names if rng.random() < 0.6]
        waits = blocking() if blocking is not None else {}
        items: Programs = [[] for _ in range(self.size)]
        for number, ranks, name in used:
            tensor = self.tensors.get((number, name))
            if tensor is None:
                tensor = self.tensors[number, name] = _Tensor(rng, name, ranks, _SET_KINDS, steady=self.steady)
            tensor.change()
            for rank, operation in zip(ranks, tensor.operations, strict=True):
                if (active is None or rank in active) and not (rank in last and rng.random() < 0.3):
                    items[rank].append((operation, number))
        for rank, program in enumerate(self.programs):
            rng.shuffle(items[rank])
            if rank in waits:
                items[rank].insert(rng.randrange(len(items[rank]) + 1), waits[rank])
            program.extend(items[rank])

    def _add(self) -> dict[int, Item]:
        rng = self.rng
        ranks = tuple(sorted(rng.sample(range(self.size), rng.randrange(1, self.size + 1))))
        if len(ranks) == self.size or ranks in self.live.values():
            return {}
        self.num_sets += 1
        operation = Operation(OperationKind.ADD_SET, "", shape=ranks)
        items = dict.fromkeys(range(self.size), (operation, self.num_sets))
        others = [(rank,) for rank in range(self.size) if (rank,) not in (ranks, *self.live.values())]
        if others and rng.random() < 0.1:
            items[rng.randrange(self.size)] = structs.replace(operation, shape=rng.choice(others)), self.num_sets
        else:
            self.live[self.num_sets] = ranks
        return items

    def _remove(self) -> dict[int, Item]:
        number = self.rng.choice(list(self.live))
        del self.live[number]
        return dict.fromkeys(range(self.size), (Operation(OperationKind.REMOVE_SET, ""), number))


# -- operations -------------------------------------------------------------------------------------------------------


class _Tensor:
    """What the ranks of a set say of one name, from step to step."""

    def __init__(
        self,
        rng: random.Random,
        name: str,
        ranks: tuple[int, ...],
        kinds: Sequence[OperationKind],
        *,
        steady: bool = False,
    ) -> None:
        self._rng, self._name, self._ranks, self._kinds, self._steady = rng, name, ranks, kinds, steady
        self.operations = self._new()

    def change(self) -> None:
        """Mostly nothing; sometimes what is cached does not hold any more, perhaps on one rank alone."""
        rng = self._rng
        if self._steady:
            return
        if rng.random() < 0.25:
            self.operations = self._new()
        elif rng.random() < 0.25:
            odd = rng.randrange(len(self._ranks))
            self.operations = list(self.operations)
            self.operations[odd] = _varied(rng, self.operations[odd], self._ranks)

    def _new(self) -> list[Operation]:
        rng, size = self._rng, len(self._ranks)
        kind = rng.choice(self._kinds)
        if self._kinds is _SET_KINDS and kind in _GROUPED and rng.random() < 0.3:
            length = 200 if rng.random() < 0.002 else rng.randrange(1, 4)
            columns = [_operations(rng, kind, "", self._ranks) for _ in range(length)]
            if kind is OperationKind.ALLREDUCE and rng.random() < 0.5:
                columns = columns[:1] * length
            rows = zip(*columns, strict=True)
            operations = [Operation(kind, self._name, members=row) for row in rows]
        else:
            operations = _operations(rng, kind, self._name, self._ranks)
        if size > 1 and not self._steady and rng.random() < 0.25:
            odd = rng.randrange(size)
            operations[odd] = _spoiled(rng, operations[odd], self._ranks)
        return operations


_SINGLE = tuple(
    kind for kind in OperationKind if kind not in (OperationKind.JOIN, OperationKind.ADD_SET, OperationKind.REMOVE_SET)
)
_GROUPED = (OperationKind.ALLREDUCE, OperationKind.ALLGATHER, OperationKind.REDUCESCATTER)
_KINDS = (OperationKind.ALLREDUCE, OperationKind.ALLREDUCE, OperationKind.ALLREDUCE, OperationKind.ALLREDUCE, *_SINGLE)
#: FREE waits for those who have joined, too: it goes under a name of its own.
_SET_KINDS = (*[OperationKind.ALLREDUCE] * 7, *[kind for kind in _SINGLE if kind is not OperationKind.FREE])


def _operations(rng: random.Random, kind: OperationKind, name: str, ranks: Sequence[int]) -> list[Operation]:
    """One for each rank of a set."""
    rows, columns = rng.randrange(5), rng.randrange(1, 4)
    common: dict[str, Any] = {"kind": kind, "name": name, "dtype": rng.choice(("float32", "float32", "float16"))}
    if kind is OperationKind.BARRIER:
        common["dtype"] = ""
    elif kind is OperationKind.EXCHANGE:
        common |= {"dtype": "", "root": rng.choice((-1, *ranks))}
    elif kind in (OperationKind.ALLOCATE, OperationKind.ALLOCATE_SHARED):
        common |= {"dtype": "", "shape": (4096,)}
    elif kind is OperationKind.FREE:
        common |= {"dtype": "", "offset": 64}
    else:
        common["shape"] = (rows, columns)
    if kind in (OperationKind.ALLREDUCE, OperationKind.REDUCESCATTER, OperationKind.REDUCE_TO_OWNERS):
        common |= {"op": rng.choice((ReduceOp.SUM, ReduceOp.MAX)), "prescale": rng.choice((1.0, 1.0, 0.5))}
    if kind is OperationKind.ALLREDUCE:
        common |= {"offset": rng.choice((-1, -1, 128)), "divide_by_active": rng.random() < 0.2}
    if kind is OperationKind.REDUCE_TO_OWNERS:
        first = rng.randrange(rows * columns + 1)
        common |= {"offset": 128, "splits": (first, rows * columns - first)}
    if kind is OperationKind.BROADCAST:
        common["root"] = rng.choice(ranks)
    operations = [Operation(**common) for _ in ranks]
    if kind is OperationKind.EXCHANGE:
        operations = [structs.replace(o, payload=rng.randbytes(rng.randrange(9))) for o in operations]
    if kind is OperationKind.ALLGATHER:
        operations = [structs.replace(o, shape=(rng.randrange(3), columns)) for o in operations]
    if kind is OperationKind.ALLTOALL:
        splits = [tuple(rng.randrange(3) for _ in ranks) for _ in ranks]
        operations = [
            structs.replace(o, shape=(sum(s), columns), splits=s) for o, s in zip(operations, splits, strict=True)
        ]
    return operations


def _varied(rng: random.Random, o: Operation, ranks: Sequence[int]) -> Operation:
    """Another operation, which goes with the same ones of other ranks if ranks may differ in it."""
    if o.kind is OperationKind.ALLGATHER and o.shape:
        return structs.replace(o, shape=(rng.randrange(6), *o.shape[1:]))
    if o.kind is OperationKind.ALLTOALL and o.shape:
        splits = tuple(rng.randrange(4) for _ in o.splits)
        return structs.replace(o, shape=(sum(splits), *o.shape[1:]), splits=splits)
    if o.kind is OperationKind.EXCHANGE:
        return structs.replace(o, payload=rng.randbytes(rng.randrange(9)))
    return _spoiled(rng, o, ranks)


def _spoiled(rng: random.Random, o: Operation, ranks: Sequence[int]) -> Operation:
    """The operation with one thing different that may or may not matter to its kind."""
    if o.members:
        index = rng.randrange(len(o.members))
        members = list(o.members)
        match rng.randrange(4):
            case 0:
                members.append(members[index])
            case 1 if len(members) > 1:
                del members[index]
            case 2:
                return structs.replace(members[index], name=o.name)
            case _:
                changed = _spoiled(rng, members[index], ranks)
                members[index] = structs.replace(changed, kind=o.kind)
        return structs.replace(o, members=tuple(members))
    changes: list[dict[str, Any]] = [
        {"kind": OperationKind.BROADCAST, "root": ranks[0], "dtype": o.dtype or "float32"},
        {"dtype": "int64"},
        {"shape": (*o.shape, 1)},
        {"shape": (o.shape[0] + 1, *o.shape[1:]) if o.shape else (1,)},
        {"op": ReduceOp.MIN},
        {"prescale": 7.0},
        {"postscale": 7.0},
        {"root": rng.choice(ranks)},
        {"offset": o.offset + 1000},
        {"divide_by_active": not o.divide_by_active},
    ]
    changed = structs.replace(o, **rng.choice(changes))
    if changed.kind is OperationKind.REDUCE_TO_OWNERS and (changed.shape != o.shape or not rng.randrange(4)):
        changed = structs.replace(changed, splits=(changed.num_elements,))  # parts that are all of it, though others
    return changed


# -- the truth --------------------------------------------------------------------------------------------------------


def same_request(operations: Sequence[Operation]) -> bool:
    """Whether ranks that ask for this ask for one thing; written down anew from the documentation."""

    def facts(o: Operation) -> tuple[object, ...]:
        match o.kind:
            case OperationKind.ALLREDUCE:
                return (o.shape, o.op, o.prescale, o.postscale, o.divide_by_active)
            case OperationKind.REDUCESCATTER:
                return (o.shape, o.op, o.prescale, o.postscale)
            case OperationKind.BROADCAST:
                return (o.shape, o.root)
            case OperationKind.EXCHANGE:
                return (o.root,)
            case OperationKind.ALLGATHER | OperationKind.ALLTOALL:
                return o.shape[1:]
            case OperationKind.REDUCE_TO_OWNERS:
                return (o.shape, o.op, o.prescale, o.postscale, o.offset, o.splits)
            case (
                OperationKind.ALLOCATE
                | OperationKind.ALLOCATE_SHARED
                | OperationKind.ADD_SET
                | OperationKind.REMOVE_SET
            ):
                return (o.shape,)
            case OperationKind.FREE:
                return (o.offset,)
        return ()

    if len({len(o.members) for o in operations}) > 1:
        return False
    if operations[0].members:
        same_kind = len({o.kind for o in operations}) == 1
        return same_kind and all(same_request(c) for c in zip(*(o.members for o in operations), strict=True))
    return len({(o.kind, o.dtype, facts(o)) for o in operations}) == 1


def can_be_stood_in_for(operation: Operation) -> bool:
    """Whether neutral elements leave the result as it is: sums of scaled zeros do, a scaled infinity does not."""
    return operation.kind is OperationKind.ALLREDUCE and all(
        part.op is ReduceOp.SUM or part.prescale == 1.0 for part in operation.parts
    )
