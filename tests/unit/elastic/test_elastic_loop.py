"""The loop of hvd.elastic.run, and states of objects, with a membership that says what is asked of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import reigen
from reigen.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    HostUpdateResult,
    ObjectState,
    State,
    membership,
    run,
    run_fn,
)
from reigen.errors import ArgumentError, MismatchError, PeerLostError, SharedMemoryError


class Scripted:
    """A membership whose members change when `changes` says so, by its calls of `step_applied` and `check`."""

    def __init__(self, changes: dict[int, bool] | None = None, *, syncs: bool = True, views: int = 9) -> None:
        #: by number of the call: whether to skip the synchronization
        self.changes = changes or {}
        self.syncs, self.views = syncs, views
        self.calls: list[str] = []
        self.count = 0

    def step_applied(self) -> None:
        self.calls.append("step")
        self._look()

    def check(self) -> None:
        self.calls.append("check")
        self._look()

    def needs_sync(self) -> bool:
        return self.syncs

    def reset(self) -> None:
        self.calls.append("reset")
        self.views -= 1
        if not self.views:
            raise PeerLostError("the training has ended elsewhere")

    def fail(self) -> None:
        self.calls.append("fail")

    def _look(self) -> None:
        self.count += 1
        if self.count in self.changes:
            raise HostsUpdatedInterrupt(self.changes[self.count])


@pytest.fixture
def member() -> Iterator[type[Scripted]]:
    class Used(Scripted):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            membership.use(self)

    reigen.init()
    yield Used
    membership.use(None)
    reigen.shutdown()


class Logged(ObjectState):
    """Notes what is called, in the membership's list, if there is one."""

    def __init__(self, calls: list[str], **kwargs: Any) -> None:
        self.calls = calls
        super().__init__(lambda value: value, lambda: 0, **kwargs)

    def restore(self) -> None:
        self.calls.append("restore")
        super().restore()

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()

    def reset(self) -> None:
        self.calls.append("on_reset")


def test_attributes_are_deep_copies_and_sync_saves() -> None:
    state = ObjectState(lambda value: {**value, "batch": 7}, lambda: 0, batch=1, seen=[1, [2]])
    state.seen[1].append(3)
    state.batch = 5
    state.restore()
    assert (state.batch, state.seen) == (1, [1, [2]])
    state.seen.append(4)
    state.commit()
    state.seen[1].append(5)
    state.restore()
    assert state.seen == [1, [2], 4]
    state.restore()  # what was restored is not the copy itself
    state.seen.append(6)
    state.restore()
    assert state.seen == [1, [2], 4]
    state.seen.append(8)
    state.sync()  # what rank 0 has now, not what it saved last
    assert (state.batch, state.seen) == (7, [1, [2], 4, 8])
    state.batch = 9
    state.restore()
    assert state.batch == 7


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"state's lock cannot be copied.*keep"):
        ObjectState(lambda value: value, lambda: 0, lock=threading.Lock())


def test_in_a_job_that_is_not_elastic_errors_and_interrupts_leave() -> None:
    calls: list[str] = []
    state = Logged(calls, step=0)
    for error in (HorovodInternalError("broken"), HostsUpdatedInterrupt(), KeyError("x")):

        @run
        def train(state: Logged, error: BaseException = error) -> None:
            state.step += 1
            state.commit()
            state.check_host_updates()
            raise error

        with pytest.raises(type(error)) as raised:
            train(state)
        assert raised.value is error
    assert calls == ["sync"] * 3
    assert run(lambda state, a, *, b: (a, b))(state, 1, b=2) == (1, 2)  # type: ignore[arg-type]


def test_an_error_goes_back_to_the_last_commit_and_all_are_synchronized(member: Any) -> None:
    job = member()
    state = Logged(job.calls, step=0)
    seen: list[Any] = []
    state.register_reset_callbacks([lambda: seen.append("first"), lambda: seen.append(state.step)])

    @run
    def train(state: Logged) -> str:
        while state.step < 5:
            state.step += 1
            if state.step == 3 and "reset" not in job.calls:
                raise PeerLostError("rank 1 is dead", ranks=(1,))
            if state.step != 2:
                state.commit()
        return "done"

    assert train(state) == "done"
    assert seen == ["first", 1]
    assert job.calls == [
        *("sync", "step", "step"),  # a sync is a step
        *("restore", "reset", "on_reset"),
        *("sync", "step", "step", "step", "step"),
    ]
    assert train.__name__ == "train"


@pytest.mark.parametrize(("skips", "needs", "synced"), [(False, False, 2), (True, False, 1), (True, True, 2)])
def test_an_interrupt_keeps_the_state(member: Any, skips: bool, needs: bool, synced: int) -> None:
    job = member({3: skips}, syncs=needs)
    state = Logged(job.calls, step=0)

    @run
    def train(state: Logged) -> int:
        while state.step < 4:
            state.step += 1
            state.commit()
        return state.step

    assert train(state) == 4
    assert "restore" not in job.calls
    assert job.calls.count("sync") == synced
    assert job.calls.count("step") == 4 + synced


def test_a_change_in_sync_and_one_without_a_commit(member: Any) -> None:
    job = member({1: False, 3: False})
    state = Logged(job.calls, step=0)

    @run
    def train(state: Logged) -> int:
        while state.step < 3:
            state.step += 1
            state.check_host_updates()
        return state.step

    assert train(state) == 3
    assert job.calls == [
        *("sync", "step", "reset", "on_reset"),
        *("sync", "step", "check", "reset", "on_reset"),
        *("sync", "step", "check", "check"),
    ]


def test_other_exceptions_leave_and_so_does_the_end_of_the_job(member: Any) -> None:
    job = member(views=2)
    state = Logged(job.calls)

    @run
    def train(state: Logged, error: type[Exception]) -> None:
        raise error("here")

    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="here"):
            train(state, error)
    assert "reset" not in job.calls
    assert job.calls.count("fail") == 2
    with pytest.raises(PeerLostError, match="ended elsewhere"):
        train(state, HorovodInternalError)
    assert job.calls.count("reset") == 2


def test_a_mistake_of_the_program_does_not_come_again_for_ever(member: Any) -> None:
    job = member()
    state = Logged(job.calls, step=0)

    @run
    def train(state: Logged) -> None:
        if state.step < 2:
            state.step += 1
            state.commit()  # it makes progress: that may have been something else
        raise MismatchError("the ranks have different shapes")

    with pytest.raises(MismatchError) as raised:
        train(state)
    assert job.calls.count("reset") == 2
    assert "twice with no commit" in raised.value.__notes__[0]


def test_a_rank_without_memory_leaves_and_the_others_begin_again(member: Any) -> None:
    """The allocation has failed on all: the error of those that had enough names the ranks that had not."""
    job = member()

    @run
    def train(_: Logged, error: SharedMemoryError) -> None:
        raise error

    with pytest.raises(SharedMemoryError):
        train(Logged(job.calls), SharedMemoryError("not enough here"))
    assert job.calls.count("reset") == 0
    with pytest.raises(PeerLostError, match="ended elsewhere"):
        train(Logged(job.calls), SharedMemoryError("not enough on rank 2", ranks=(2,)))
    assert job.calls.count("reset") > 2


def test_whoever_learns_of_changes_by_itself_says_so(member: Any) -> None:
    job = member()
    state = Logged(job.calls)
    for results, skips in (([1], True), ([2], False), ([1, 2], False)):
        for result in results:
            state.on_hosts_updated(1.5, result)
        with pytest.raises(HostsUpdatedInterrupt) as raised:
            state.check_host_updates()
        assert raised.value.skip_sync is skips
        state.check_host_updates()  # once
    state.on_hosts_updated(2.0, HostUpdateResult.mixed)
    state.on_reset()
    state.commit()


def test_a_reset_of_the_callers_own() -> None:
    resets: list[int] = []

    class Own(State):
        def save(self) -> None: ...
        def restore(self) -> None: ...
        def sync(self) -> None: ...

    def train(state: Own) -> int:
        if len(resets) < 2:
            raise HorovodInternalError("broken")
        return len(resets)

    assert run_fn(train, lambda: resets.append(1))(Own(lambda value: value, lambda: 0)) == 2
