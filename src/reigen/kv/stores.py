"""One store on one server: requests go in, cells change, answers come out.

What happens when is decided elsewhere (`consistency` for each cell, `meetings` for what all workers say alike); here it
is carried out. A cell's instructions are carried out in order. What computes is given to a thread if it is long; the
cell's later instructions wait for it, and other cells go on.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reigen.errors import CollectiveError, ReigenError
from reigen.kv.cells import Cell, CellId, KeyFacts
from reigen.kv.cells import Update as ValueUpdate
from reigen.kv.consistency import Consistency, ConsistencyState
from reigen.kv.events import (
    Acknowledge,
    Answer,
    Apply,
    Combine,
    Disconnected,
    Drop,
    Event,
    Expired,
    Fail,
    Forgotten,
    Found,
    Instruction,
    Left,
    LossPolicy,
    Lost,
    Recovered,
    Repeat,
    Returned,
    Token,
)
from reigen.kv.meetings import Declarations
from reigen.kv.memory import Buffers, Memory
from reigen.kv.protocol import DTYPE_NUMBERS, NOTICE_CODEC, Header, Kind, Notice, Place, Problem
from reigen.kv.requests import Connection, Reading, Request
from reigen.kv.settings import Settings
from reigen.kv.snapshots import Snapshots, StoreSnapshot
from reigen.kv.stalls import Waiting
from reigen.kv.sums import Contribution
from reigen.kv.work import Task, Workers
from reigen.optim import Optimizer
from reigen.types import dtype_named

#: Work on fewer bytes is done at once, in a fraction of a millisecond: handing it on takes a good part of that.
_SMALL_BYTES = 2 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What all stores of a server share.

    Attributes:
        server: this server's number.
        num_workers: of the job.
        memory: where values are.
        buffers: where bodies are received.
        workers: the threads that compute.
        snapshots: where snapshots are kept; None: nowhere.
        saves_always: a snapshot is taken before every acknowledgement.
        policy: what a lost worker leads to.
        deadline_seconds: how long a request may wait for others.
        acknowledges: receipts are told (PS_RESEND).
    """

    server: int
    num_workers: int
    memory: Memory
    buffers: Buffers
    workers: Workers
    snapshots: Snapshots | None = None
    saves_always: bool = False
    policy: LossPolicy = LossPolicy.ABORT
    deadline_seconds: float = 600.0
    acknowledges: bool = False


@dataclass
class Loss:
    """A worker that was lost: on which host, and how that was noticed."""

    host: str
    reason: str


@dataclass(eq=False)
class Store:
    """One store on one server.

    Attributes:
        number: of the store in its job.
        staleness: as of `reigen.kv.consistency`.
        connections: of its workers, by number.
        incarnations: of the workers' processes, the latest ones.
        cells: that are here.
        planned: cells that are to be here, and have no value yet.
        broken: what every request leads to from now on.
        aborted: what all that concerns more than a cell leads to from now on; cells know it themselves.
        left: workers that have nothing more to push.
        losses: workers that are lost.
        must_save: something has changed that is no cell's, and is in no snapshot.
        num_laid_out: grows whenever a cell comes or goes.
    """

    number: int
    staleness: float
    around: Surroundings
    connections: dict[int, Connection] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    cells: dict[CellId, Cell] = field(default_factory=dict)
    planned: dict[CellId, tuple[KeyFacts, Place]] = field(default_factory=dict)
    broken: Problem | None = None
    aborted: Problem | None = None
    left: set[int] = field(default_factory=set)
    losses: dict[int, Loss] = field(default_factory=dict)
    must_save: bool = True
    num_laid_out: int = 0

    def __post_init__(self) -> None:
        self.declarations = Declarations(self)
        self.settings = Settings(self, self.around.num_workers)

    # ---- workers

    def expected(self) -> tuple[int, ...]:
        """The workers that the others wait for, ascending."""
        gone = set(self.left)
        if self.around.policy is LossPolicy.CONTINUE:
            gone |= set(self.losses)
        return tuple(worker for worker in range(self.around.num_workers) if worker not in gone)

    def connected(self, connection: Connection) -> None:
        """A worker is there, perhaps again, perhaps in the place of another."""
        worker, before = connection.worker, self.connections.get(connection.worker)
        if before is not None:
            before.end()
            self._all(Disconnected(worker))
        self.connections[worker] = connection
        known, self.incarnations[worker] = self.incarnations.get(worker), connection.hello.incarnation
        if known is not None and known != connection.hello.incarnation:
            self.returned(worker, connection.hello.host)
        self.must_save = True

    def disconnected(self, connection: Connection) -> None:
        """A connection has ended."""
        connection.end()
        if self.connections.get(connection.worker) is connection:
            del self.connections[connection.worker]
            self._all(Disconnected(connection.worker))

    def said_goodbye(self, request: Request) -> None:
        """A worker has nothing more to push."""
        connection = request.connection
        self.has_left(connection.worker, connection.hello.host)
        connection.answer(request, Kind.DONE)

    def has_left(self, worker: int, host: str) -> None:
        """A worker is not waited for any more; it may have told the process that this server was before."""
        if worker not in self.left:
            self.left.add(worker)
            self._all(Left(worker))
            self._settle()
            self._notify(Notice("left", worker, host, f"worker {worker} has left"))

    def lost(self, worker: int, host: str, reason: str, incarnation: int = 0) -> None:
        """The scheduler has given a worker's process up; it may have been replaced meanwhile."""
        if worker in self.left or (incarnation and self.incarnations.get(worker, incarnation) != incarnation):
            return
        self.losses[worker] = Loss(host, reason)
        what = f"worker {worker} on host {host} is lost: {reason}"
        failures = self._all(Lost(worker, self.around.policy))
        problem = None
        if self.around.policy is LossPolicy.ABORT:
            problem = failures[0] if failures else Problem("PeerLostError", what, None, (worker,))
            self.aborted = self.aborted or Problem("PeerLostError", what, None, (worker,))
            self.settings.fail(problem)
            self.declarations.fail(problem)
        self._settle()
        self._notify(Notice("lost", worker, host, problem.reason if problem else what, problem))

    def found(self, worker: int, host: str) -> None:
        """A worker that was lost is there again: it was silent."""
        if self.losses.pop(worker, None) is not None:
            self._all(Found(worker))
            self.must_save = True
            self._notify(Notice("returned", worker, host, f"worker {worker} is there again, on host {host}"))

    def returned(self, worker: int, host: str) -> None:
        """Another process is there in place of a worker that was lost."""
        was_gone = self.losses.pop(worker, None) is not None or worker in self.left
        self.left.discard(worker)
        self._all(Returned(worker))
        if was_gone:
            self._notify(Notice("returned", worker, host, f"worker {worker} is there again, on host {host}"))

    def _settle(self) -> None:
        self.declarations.settle()
        self.settings.settle()
        self.must_save = True

    def _notify(self, notice: Notice) -> None:
        body = NOTICE_CODEC.encode(notice)
        for worker, connection in self.connections.items():
            if worker != notice.worker:
                connection.send(Header(Kind.NOTICE, store=self.number, body_bytes=len(body)), body)

    # ---- keys

    def laid_out(self, key: int, facts: KeyFacts, places: tuple[Place, ...]) -> None:
        """See `reigen.kv.meetings.Host`."""
        for cell_id in [one for one, cell in self.cells.items() if one[0] == key and cell.facts != facts]:
            self.num_laid_out += 1
            self.around.memory.retire(self.cells.pop(cell_id).value)
            if self.around.snapshots is not None:
                self.around.snapshots.forget_cell(self.number, cell_id)
        for cell_id in [one for one in self.planned if one[0] == key]:
            del self.planned[cell_id]
        for place in places:
            if place.server == self.around.server and (key, place.index) not in self.cells:
                self.planned[key, place.index] = (facts, place)

    def has_pushes(self, key: int | None = None) -> bool:
        """See `reigen.kv.meetings.Host`."""
        self._open_all()
        engines = [cell.engine for cell in self.cells.values() if key is None or cell.key == key]
        return any(engine.has(worker, 1) for engine in engines for worker in range(self.around.num_workers))

    def use(self, optimizer: Optimizer) -> None:
        """See `reigen.kv.meetings.Host`."""
        for cell in self.cells.values():
            self._make_use(cell, optimizer)

    @staticmethod
    def _make_use(cell: Cell, optimizer: Optimizer | None) -> None:
        if optimizer is not None and cell.dtype.is_floating:  # others may be stored, too; a push of them is an error
            cell.use(optimizer)

    def new_cell(self, key: int, facts: KeyFacts, place: Place, state: ConsistencyState | None = None) -> Cell:
        """A cell without a value yet. Its engine knows who has gone."""
        if state is None:
            engine = Consistency(self.around.num_workers, self.staleness)
        else:
            engine = Consistency.from_state(state)
        for worker in self.left:
            engine.handle(Left(worker))
        for worker in self.losses:
            engine.handle(Lost(worker, self.around.policy))
        num_bytes = (place.end - place.begin) * dtype_named(facts.dtype).itemsize
        return Cell(key, facts, place, engine, self.around.memory.new(num_bytes))

    def add(self, cell: Cell) -> None:
        """A cell that has its value."""
        self.cells[cell.id] = cell
        self.num_laid_out += 1
        self._make_use(cell, self.settings.optimizer)
        self.planned.pop(cell.id, None)
        if self.around.snapshots is not None:  # from now on another process can take this one's place
            cell.must_save = True
            self._advance(cell)

    # ---- instructions

    def happen(self, cell: Cell, *events: Event) -> list[Instruction]:
        """Have events happen to a cell, and begin with what they lead to, which is returned."""
        if cell.waiting is not None:
            cell.waiting.open()
        instructions: list[Instruction] = []
        for event in events:
            instructions += cell.engine.handle(event)
        cell.queue.extend(instructions)
        if self.around.snapshots is not None:
            cell.queue.append(cell.engine.state())
        self._advance(cell)
        return instructions

    def _open_all(self) -> None:
        """Whatever waits, engines know of it."""
        for cell in self.cells.values():
            if cell.waiting is not None:
                cell.waiting.open()

    def then(self, cell: Cell, action: Callable[[], None]) -> None:
        """Do something when all that has happened to a cell until now is carried out."""
        cell.queue.append(action)
        self._advance(cell)

    def _open_late(self, before: float) -> None:
        """Engines know of what waits, if any of it has waited since ``before``."""
        if any(one.since <= before for each in self.connections.values() for one in each.open_requests.values()):
            self._open_all()

    def _all(self, event: Event) -> list[Problem]:
        """Have something happen to all cells; returns what is told to those whose requests fail of it."""
        failures = []
        for cell in list(self.cells.values()):
            failures += [self.problem_of(cell, one) for one in self.happen(cell, event) if isinstance(one, Fail)]
        return failures

    def _advance(self, cell: Cell) -> None:
        """Carry out a cell's instructions, up to one that takes long."""
        while not cell.is_busy:
            if cell.must_save:
                self._save_cell(cell)
            elif cell.queue:
                instruction = cell.queue.popleft()
                # by type, since `match` asks one case after the other, and this is done several times for each request
                handler = _HANDLERS.get(type(instruction))
                if handler is not None:
                    handler(self, cell, instruction)
                else:
                    instruction()  # type: ignore[operator]  # all others have handlers
            else:
                return

    def _combine(self, cell: Cell, what: Combine) -> None:
        parts = [_part_of(token) for token in what.tokens]
        applied = cell.applied.over((what.round,) * self.around.num_workers)
        self._change(cell, ValueUpdate(parts, what.scale), applied)

    def _note_state(self, cell: Cell, state: ConsistencyState) -> None:
        cell.is_dirty = cell.is_dirty or cell.applied != state
        cell.applied = state

    def _drop(self, cell: Cell, what: Drop) -> None:
        if isinstance(what.token, Request):
            what.token.used(self.around.buffers)

    def _apply(self, cell: Cell, what: Apply) -> None:
        worker, round, token = what.worker, what.round, what.token
        done = tuple(round if one == worker else n for one, n in enumerate(cell.applied.done))
        begin = 0 if self.settings.optimizer is None else self.settings.optimizer.begin_num_update
        num_update = cell.num_earlier + begin + round
        self._change(cell, ValueUpdate([_part_of(token)], 1.0, num_update), cell.applied.over(done))

    def _tell_forgotten(self, cell: Cell, what: Forgotten) -> None:
        whose = "" if what.worker is None else f" of worker {what.worker}"
        _log.warning(
            "key %r, cell %d: rounds %d to %d%s were acknowledged before this server was restarted and are in no "
            "snapshot: they are lost", cell.facts.name, cell.place.index, what.first, what.last, whose,
        )  # fmt: skip

    def _acknowledge(self, cell: Cell, what: Acknowledge | Repeat) -> None:
        token = what.token
        assert isinstance(token, Request)
        token.used(self.around.buffers)
        if token.header.kind != Kind.PUSHPULL:  # that is answered as a pull
            token.connection.answer(token, Kind.DONE)

    def _fail(self, cell: Cell, instruction: Fail) -> None:
        token = instruction.token
        request = token.request if isinstance(token, Reading) else token
        assert isinstance(request, Request)
        request.used(self.around.buffers)
        request.connection.fail(request, self.problem_of(cell, instruction))

    def problem_of(self, cell: Cell, failed: Fail) -> Problem:
        """What a worker is told of a request that has failed."""
        kind = "DeadlineError" if failed.late else "PeerLostError" if failed.workers else "ArgumentError"
        reason = failed.reason
        if failed.late:
            reason += f"; nothing happened for {self.around.deadline_seconds:g} s"
        told = [
            f"worker {one} on host {self.losses[one].host} is lost: {self.losses[one].reason}"
            for one in failed.workers
            if one in self.losses
        ]
        return Problem(kind, "; ".join([reason, *told]), cell.facts.name, failed.workers)

    # ---- what takes time

    def _change(self, cell: Cell, update: ValueUpdate, applied: ConsistencyState) -> None:
        memory, optimizer = self.around.memory, self.settings.optimizer
        target = memory.target(cell.value)

        def done(error: BaseException | None) -> None:
            if error is not None:
                self.fail_all(cell, error)
                return
            cell.settle(target, memory)
            cell.applied = applied
            cell.must_save = self.around.saves_always

        num_bytes = cell.num_bytes * (len(update.parts) + 1)
        self.do([cell], lambda scratch: cell.change(update, optimizer, target, scratch), done, num_bytes)

    def _save_cell(self, cell: Cell) -> None:
        cell.must_save = False
        snapshots = self.around.snapshots
        if snapshots is None or not cell.is_dirty:
            return

        def done(error: BaseException | None) -> None:
            if error is None:
                cell.is_dirty = False
                return
            _log.error("no snapshot of key %r: %s", cell.facts.name, str(error))
            if self.around.saves_always:
                self.fail_all(cell, error)

        self.do([cell], lambda _: snapshots.save_cell(self.number, cell.id, cell.pack()), done, _SMALL_BYTES)

    def do(
        self, cells: Sequence[Cell], task: Task, done: Callable[[BaseException | None], None], num_bytes: int
    ) -> None:
        """Have something computed, then go on with the cells.

        Args:
            cells: that nothing else is done to meanwhile.
            task: what; in another thread if it is long.
            done: called then, in this one, with what it raised.
            num_bytes: that it goes through.
        """
        if num_bytes < _SMALL_BYTES:
            done(self.around.workers.now(task))
            return
        for cell in cells:
            cell.is_busy = True

        def ended(error: BaseException | None) -> None:
            for cell in cells:
                cell.is_busy = False
            done(error)
            for cell in cells:
                self._advance(cell)

        self.around.workers.begin(task, ended)

    def fail_all(self, cell: Cell, error: BaseException) -> None:
        """A cell could not be updated: nothing of this store can be trusted any more."""
        how = "".join(traceback.format_exception(error))
        _log.error("key %r could not be updated: %s", cell.facts.name, how)
        reason = f"server could not update the value: {type(error).__name__}: {error}"
        problem = Problem.of(error if isinstance(error, ReigenError) else CollectiveError(reason), cell.facts.name)
        self.broken = self.broken or problem
        for one in self.cells.values():
            one.queue.clear()
            one.waiting = None
        for connection in self.connections.values():
            for request in list(connection.open_requests.values()):
                connection.fail(request, problem)
        self._notify(Notice("problem", -1, "", problem.reason, problem))

    # ---- answers

    def _answer(self, cell: Cell, what: Answer) -> None:
        token = what.token
        request = token.request if isinstance(token, Reading) else token
        assert isinstance(request, Request)
        dtype = DTYPE_NUMBERS[cell.facts.dtype]
        encoder = self.settings.encoder
        if request.numbers is not None:
            memory = self.around.memory
            rows = memory.new(len(request.numbers) * cell.row_length * cell.dtype.itemsize)
            cell.rows(request.numbers, rows.array)
            request.connection.answer_value(request, rows, dtype)
            memory.retire(rows)
        elif request.wants_codes and encoder is not None and self.settings.optimizer is None and cell.is_sum:
            codes = cell.encoded(encoder)
            if cell.is_dirty and self.around.saves_always:  # with what these codes lack, before anybody has them
                cell.must_save = True
                cell.queue.appendleft(what)
                return
            request.connection.answer_codes(request, codes)
        else:
            request.connection.answer_value(request, cell.value, dtype)

    # ---- time

    def expire(self) -> None:
        """Fail what has waited too long."""
        before = time.monotonic() - self.around.deadline_seconds
        self._open_late(before)
        for connection in list(self.connections.values()):
            asked = [one for one in connection.asked() if one.cell is not None]
            late = {one.cell for one in asked if one.since <= before}
            # The latest first: what waits for a push of the same worker is to name the others, not that push, which
            # does not count any more once it has expired.
            for request in reversed([one for one in asked if one.cell in late]):
                tokens = [request] if request.reading is None else [request.reading, request]
                if request.cell is not None:
                    self.happen(request.cell, *map(Expired, tokens))
        self.declarations.expire(before)
        self.settings.expire(before)

    def waiting(self, before: float) -> Iterator[Waiting]:
        """Who has waited for other workers since ``before``, or longer."""
        self._open_late(before)
        asked = [one for each in self.connections.values() for one in each.asked()]
        for cell in {one.cell for one in asked if one.cell is not None and one.since <= before}:
            for wait in cell.engine.waits():
                request = wait.token.request if isinstance(wait.token, Reading) else wait.token
                assert isinstance(request, Request)
                yield Waiting(f"key {cell.facts.name!r}", wait.worker, wait.workers, request.since)
        yield from self.declarations.waiting()
        yield from self.settings.waiting()

    def save_all(self) -> None:
        """Begin with a snapshot of every cell that has changed."""
        for cell in self.cells.values():
            cell.must_save = cell.is_dirty
            self._advance(cell)

    def save(self) -> None:
        """Have the snapshot of what is no cell's be as things are now."""
        if self.around.snapshots is None or not self.must_save:
            return
        self.must_save = False
        staleness = None if math.isinf(self.staleness) else int(self.staleness)
        missed = tuple(self.losses) if self.around.policy is LossPolicy.CONTINUE else ()
        facts = StoreSnapshot(
            staleness, self.settings.state(), self.declarations.initialised(), tuple(sorted(self.left)), missed,
            dict(self.incarnations),
        )  # fmt: skip
        try:
            self.around.snapshots.save_store(self.number, facts)
        except OSError as error:
            _log.error("no snapshot of store %d: %s", self.number, str(error))

    def restore(self, facts: StoreSnapshot) -> None:
        """Take over a snapshot, before anything else happens.

        Raises:
            ReigenError: it makes no sense.
        """
        assert self.around.snapshots is not None
        self.left = set(facts.left)
        loss = Loss("unknown", "it was lost before this server was restarted")
        self.losses = dict.fromkeys(facts.missed, loss)
        self.incarnations = dict(facts.incarnations)
        self.settings.restore(facts.settings)
        for key, about, places in facts.keys:
            self.declarations.restore(key, about, places)
        for snapshot, arrays in self.around.snapshots.cells(self.number):
            cell = self.new_cell(snapshot.key, snapshot.facts, snapshot.place, snapshot.applied)
            cell.restore(snapshot, arrays, self.settings.optimizer)
            self.cells[cell.id] = cell
            self.declarations.remember(cell.key, cell.facts)


_HANDLERS: Mapping[type, Callable[[Store, Cell, Any], None]] = {
    Acknowledge: Store._acknowledge,
    Repeat: Store._acknowledge,
    Answer: Store._answer,
    Combine: Store._combine,
    Apply: Store._apply,
    ConsistencyState: Store._note_state,
    Fail: Store._fail,
    Drop: Store._drop,
    Forgotten: Store._tell_forgotten,
    Recovered: lambda store, cell, what: None,  # whoever asked has read it
}


def _part_of(token: Token) -> Contribution:
    """What a push gives to its cell."""
    assert isinstance(token, Request)
    assert token.contribution is not None, "a push is used once, and not before its instruction is carried out"
    return token.contribution
