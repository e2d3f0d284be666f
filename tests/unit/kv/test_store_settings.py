"""What a store is set to: by all workers alike, before the first push, and said again by those that come anew."""

import pytest

from reigen.errors import ArgumentError, MismatchError
from reigen.kv.protocol import MessageHeader, MessageKind, StoreCommand
from reigen.kv.server.requests import WorkerRequest
from reigen.kv.server.store_settings import StoreSettings
from reigen.optim import SGD, Adam


class Connection:
    def __init__(self, worker):
        self.worker, self.num_answers = worker, 0

    def answer(self, request, kind, body):
        self.num_answers += 1


class Store:
    """Two workers are expected."""

    is_elastic, has_begun = False, True

    def __init__(self):
        self.is_pushed = self.must_save = False
        self.optimizer = None

    def expected(self):
        return frozenset({0, 1})

    def has_pushes(self):
        return self.is_pushed

    def use(self, optimizer):
        self.optimizer = optimizer


FIRST, SECOND = SGD(learning_rate=0.1), Adam(learning_rate=0.1)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def settings(store):
    return StoreSettings(store, 2)


def tell(settings, connection, optimizer):
    request = WorkerRequest(connection, MessageHeader(MessageKind.COMMAND, 1), 0.0)
    settings.command(request, StoreCommand("set_optimizer", {"spec": optimizer.to_spec()}))


def train(settings, store, *optimizers):
    """Both workers set the same, one after the other, and push."""
    workers = [Connection(0), Connection(1)]
    for optimizer in optimizers:
        for worker in workers:
            tell(settings, worker, optimizer)
    assert [worker.num_answers for worker in workers] == [len(optimizers)] * 2
    store.is_pushed = True
    return workers


def test_the_last_one_counts(settings, store):
    train(settings, store, FIRST, SECOND)
    assert store.optimizer == SECOND


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_worker_in_the_place_of_a_lost_one_runs_the_script_again(settings, store, is_restored):
    train(settings, store, FIRST, SECOND, FIRST)
    if is_restored:
        state = settings.state()
        settings = StoreSettings(store, 2)
        settings.restore(state)
    newcomer = Connection(1)
    for number, optimizer in enumerate([FIRST, SECOND, FIRST]):
        tell(settings, newcomer, optimizer)
        assert newcomer.num_answers == number + 1
        assert store.optimizer == FIRST, "nothing changes"


def test_a_worker_that_has_gone_on_cannot_go_back(settings, store):
    workers = train(settings, store, FIRST, SECOND)
    tell(settings, workers[0], SECOND)
    with pytest.raises(MismatchError, match="otherwise before the first push"):
        tell(settings, workers[0], FIRST)
    for last in (FIRST, SECOND):
        newcomer = Connection(1)
        tell(settings, newcomer, last)
        with pytest.raises(MismatchError, match="otherwise before the first push"):
            tell(settings, newcomer, FIRST)


def test_nothing_new_after_the_first_push(settings, store):
    workers = train(settings, store)
    with pytest.raises(ArgumentError, match="only before the first push"):
        tell(settings, workers[0], FIRST)
