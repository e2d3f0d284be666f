"""Keys of an elastic job: any worker may be the first, and the next one where it dies."""

from __future__ import annotations

import pytest

from reigen.errors import MismatchError
from reigen.kv.protocol import (
    DECLARED_CODEC,
    DeclareKey,
    KeyDeclared,
    KeySpec,
    MessageFlag,
    MessageHeader,
    MessageKind,
    RemoteError,
    ShardRange,
)
from reigen.kv.server.key_declarations import KeyDeclarations
from reigen.kv.server.requests import WorkerRequest
from reigen.kv.values import key_id

SPEC = KeySpec("w", (4,), "float32")
#: Where each worker would have the shards.
PLACES = {worker: (ShardRange(0, 0, 4, worker),) for worker in range(4)}


class Store:
    """A store, with the workers that are expected, and the shards that were planned."""

    is_elastic = True

    def __init__(self) -> None:
        self.has_begun = self.must_save = False
        self.workers: tuple[int, ...] = (0, 2)
        self.planned: list[tuple[tuple[ShardRange, ...], tuple[int, ...]]] = []

    def expected(self) -> tuple[int, ...]:
        return self.workers

    def has_pushes(self, key: int | None = None) -> bool:
        return False

    def plan_shards(
        self, key: int, spec: KeySpec, places: tuple[ShardRange, ...], workers: tuple[int, ...] = ()
    ) -> None:
        self.planned.append((places, workers))


class Connection:
    """Where answers go."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.answers: list[KeyDeclared] = []
        self.problems: list[RemoteError] = []

    def answer(self, request: WorkerRequest, kind: MessageKind, body: bytes) -> None:
        self.answers.append(DECLARED_CODEC.decode(body))

    def refuse(self, request: WorkerRequest, problem: RemoteError) -> None:
        self.problems.append(problem)


class Home:
    """The home server of a key."""

    def __init__(self) -> None:
        self.store = Store()
        self.declarations = KeyDeclarations(self.store)  # type: ignore[arg-type]
        self.connections = {worker: Connection(worker) for worker in range(4)}

    def declare(self, worker: int, spec: KeySpec = SPEC, *, is_initialised: bool = False) -> list[KeyDeclared]:
        """What all are answered: by worker, if there is something."""
        header = MessageHeader(MessageKind.DECLARE, 1, key_id(spec.name), flags=int(MessageFlag.HOME))
        request = WorkerRequest(self.connections[worker], header, 0.0)  # type: ignore[arg-type]
        self.declarations.declare(request, DeclareKey(spec, PLACES[worker], is_initialised))
        return self.connections[worker].answers

    def expect(self, *workers: int) -> None:
        self.store.workers = workers
        self.declarations.settle()


def began() -> Home:
    home = Home()
    home.store.has_begun = True
    return home


def first(worker: int, *workers: int) -> KeyDeclared:
    return KeyDeclared(PLACES[worker], was_initialised=False, is_first=True, workers=workers)


def test_nobody_is_answered_before_the_first_workers_have_come() -> None:
    home = Home()
    assert home.declare(0) == home.declare(2) == []
    home.store.has_begun = True
    home.declarations.settle()
    assert home.connections[0].answers == [first(0, 0, 2)]
    assert home.store.planned == [(PLACES[0], (0, 2))]


def test_the_lowest_one_sends_the_value_and_the_others_wait() -> None:
    home = began()
    assert home.declare(2) == []
    assert home.declare(0) == [first(0, 0, 2)]
    assert home.connections[2].answers == []
    assert home.declare(0, is_initialised=True)[1:] == [KeyDeclared(PLACES[0], workers=(0, 2))]
    assert home.connections[2].answers == [KeyDeclared(PLACES[0])]


def test_a_newcomer_declares_what_is_there() -> None:
    home = began()
    home.declare(2)
    home.declare(0)
    home.declare(0, is_initialised=True)
    home.expect(0, 1, 2)
    assert home.declare(1) == [KeyDeclared(PLACES[0], was_initialised=True, workers=(0, 2))]
    with pytest.raises(MismatchError, match="something else by the key"):
        home.declare(3, KeySpec("w", (5,), "float32"))


def test_another_one_is_the_first_when_that_dies() -> None:
    home = began()
    home.declare(2)
    home.declare(0)
    home.expect(2)
    assert home.connections[2].answers == [first(0, 0, 2)]  # with the shards as they are
    home.declare(2, is_initialised=True)
    assert home.declare(3) == [KeyDeclared(PLACES[0], was_initialised=True, workers=(0, 2))]


def test_a_newcomer_is_the_first_when_all_have_died() -> None:
    home = began()
    home.declare(2)
    home.declare(0)
    home.expect()
    home.expect(1)
    assert home.declare(1) == [first(0, 0, 2)]


def test_a_newcomer_with_the_number_of_one_that_has_waited_is_told_that_it_is_the_first() -> None:
    home = began()
    home.declare(2)
    home.declare(0)
    home.expect()
    home.expect(2)  # another process, which has not declared the key yet
    home.connections[2].answers.clear()
    assert home.declare(2) == [first(0, 0, 2)]


def test_one_that_dies_before_all_have_come_is_not_waited_for() -> None:
    home = began()
    home.declare(0)
    home.expect(2)
    assert home.declare(2) == [first(2, 2)]


def test_who_disagrees_hears_of_it() -> None:
    home = began()
    home.declare(0)
    home.declare(2, KeySpec("w", (5,), "float32"))
    assert [len(one.problems) for one in home.connections.values()] == [1, 0, 1, 0]
