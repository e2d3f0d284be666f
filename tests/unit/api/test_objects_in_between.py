"""Python objects between hosts without TLS, and somebody on the way who records them and plays them again.

The ranks are threads, as hosts of their own; all between them is TCP, through `tests.middle.Middle`.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reigen.api.objects import allgather_bytes, allgather_object, broadcast_bytes, broadcast_object
from reigen.cluster import connection_pool
from reigen.context import Context
from reigen.errors import ArgumentError, AuthenticationError, DeadlineError, JoinedError, MismatchError
from tests.middle import Middle
from tests.patience import patiently
from tests.unit.engine.jobs import across

MARKER = b"OBJECT"


@pytest.fixture
def middle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Middle]:
    """On the way of all connections between ranks."""
    with contextlib.closing(Middle()) as between:
        split = connection_pool.split_address
        monkeypatch.setattr(connection_pool, "split_address", lambda address: between.in_front_of(split(address)))
        yield between


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is unpickled."""
    things: list[object] = []
    loads = pickle.loads

    def load(data: Any) -> object:
        things.append(loads(data))
        return things[-1]

    monkeypatch.setattr(pickle, "loads", load)
    return things


def an_object(what: str) -> str:
    """All of one length."""
    return f"{MARKER.decode()} {what:_<20}"


def replay(middle: Middle, wanted: bytes, instead: bytes) -> None:
    """From now on something else arrives in the place of an object; both were seen, or are known, as bytes."""

    def change(sender: int, receiver: int, body: bytes) -> bytes:
        if wanted not in body:
            return body
        old, *_ = sorted({each for each in middle.with_marker(instead) if len(each) == len(body)})
        return old

    middle.change = change


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(AuthenticationError, match="changed on its way") as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def say(job: Context, what: str, root: int = 0, name: str | None = "name", process_set: int = 0) -> Any:
    return broadcast_object(job, an_object(what) if job.rank == root else None, root, name, process_set)


def everybody(job: Context) -> None:
    """All have come here."""
    job.barrier(blocking=True).wait()


def before_and_after(
    job: Context, middle: Middle, before: Callable[[], object], after: Callable[[], object], *words: str
) -> None:
    """What is said first is played again in place of what is said then; and the job goes on."""
    before()
    everybody(job)
    if job.rank == 0:
        replay(middle, b"second", b"first")
    everybody(job)
    refused(after, *words)
    everybody(job)
    if job.rank == 0:
        middle.change = lambda sender, receiver, body: body
    everybody(job)
    assert say(job, "third") == an_object("third")


@pytest.mark.parametrize("other", ["earlier", "another name", "unnamed", "of an allgather"])
def test_an_object_that_was_recorded_is_not_believed_again(middle: Middle, loaded: list[object], other: str) -> None:
    name = None if other == "unnamed" else "name"

    def first(job: Context) -> object:
        if other == "of an allgather":
            return allgather_object(job, an_object(f"first {job.rank}"), "name")
        return say(job, "first", name="another" if other == "another name" else name)

    def act(job: Context) -> None:
        before_and_after(
            job, middle, lambda: first(job), lambda: say(job, "second", name=name), "what rank 0 sent", "to rank 1"
        )

    across([[0], [1]], act)
    assert not [each for each in loaded if "second" in str(each)]
    assert len(loaded) == (5 if other == "of an allgather" else 2)


def test_a_rank_that_is_another_root_is_not_believed_in_the_roots_place(middle: Middle, loaded: list[object]) -> None:
    """Three hosts: what rank 0 said once as the root is played to rank 2 when rank 1 is."""

    def act(job: Context) -> None:
        before_and_after(job, middle, lambda: say(job, "first", 0), lambda: say(job, "second", 1), "what rank 1 sent")

    across([[0], [1], [2]], act)
    assert not [each for each in loaded if "second" in str(each)]


def test_an_object_of_another_process_set_is_not_believed(middle: Middle, loaded: list[object]) -> None:
    """The same name, root, and number of calls."""

    def act(job: Context) -> None:
        number = job.add_process_set([0, 1])

        def in_the_set() -> object:
            return say(job, "first", process_set=number) if job.rank < 2 else None

        before_and_after(job, middle, in_the_set, lambda: say(job, "second"), "what rank 0 sent")

    across([[0], [1], [2]], act)
    assert not [each for each in loaded if "second" in str(each)]


def test_an_object_of_an_earlier_life_of_the_job_is_not_believed(middle: Middle, loaded: list[object]) -> None:
    """The same secret, name and number of calls, after shutdown() and init()."""
    across([[0], [1]], lambda job: say(job, "first"))

    replay(middle, b"second", b"first")
    across([[0], [1]], lambda job: refused(lambda: say(job, "second"), "what rank 0 sent", "to rank 1"))
    assert loaded == [an_object("first")]


def test_objects_that_change_places_are_not_believed(middle: Middle, loaded: list[object]) -> None:
    """Both are of this very call, by ranks that know the secret: only whose they are is wrong."""

    def swap(sender: int, receiver: int, body: bytes) -> bytes:
        if receiver != 2:
            return body
        return body.replace(b"of rank 0", b"of nobody").replace(b"of rank 1", b"of rank 0").replace(
            b"of nobody", b"of rank 1"
        )  # fmt: skip

    def act(job: Context) -> None:
        if job.rank == 0:
            middle.change = swap
        everybody(job)
        refused(
            lambda: allgather_object(job, an_object(f"of rank {job.rank}"), "all"), "what ranks 0, 1 sent", "to rank 2"
        )

    across([[0], [1], [2]], act)
    assert loaded == []


@pytest.mark.parametrize("place", [0, 10, -1])
def test_no_bit_of_an_object_can_be_changed(middle: Middle, loaded: list[object], place: int) -> None:
    def flip(sender: int, receiver: int, body: bytes) -> bytes:
        changed = bytearray(body)
        changed[place] ^= 1
        return bytes(changed)

    def act(job: Context) -> None:
        if job.rank == 0:
            middle.change = flip
        everybody(job)
        refused(lambda: say(job, "one"), "name: what rank 0 sent", "to rank 1")
        refused(lambda: say(job, "one", name=None), "an unnamed object")

    across([[0], [1]], act)
    assert loaded == []


def test_nobody_in_between_can_say_how_long_an_object_is(middle: Middle) -> None:
    """What the backends move is its bytes and nothing else; the size is in control messages, which are sealed."""

    def act(job: Context) -> None:
        broadcast_bytes(job, MARKER * 10 if job.rank == 0 else None, 0, "one")
        allgather_bytes(job, MARKER * (job.rank + 1), "all")

    across([[0], [1]], act)
    assert sorted(body for _, _, body in middle.seen if body) == [MARKER, MARKER * 2, MARKER * 10]


def test_ranks_that_went_different_ways_understand_each_other_afterwards() -> None:
    """Errors on one rank or on all, calls that some did not make, joins: no count of calls has to be the same."""

    def attempt(seconds: float) -> None:
        is_over = threading.Event()

        def act(job: Context) -> list[object]:
            with pytest.raises(MismatchError, match="root ranks differ"):
                say(job, "one", root=job.rank)
            with pytest.raises(MismatchError, match="root ranks differ"):
                say(job, "one") if job.rank == 0 else allgather_object(job, 1, "name")
            if job.rank == 0:
                with pytest.raises(DeadlineError):
                    say(job, "nobody comes")
                is_over.set()
                with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
                    broadcast_object(job, threading.Lock(), 0, "name")
            is_over.wait(60)
            if job.rank == 0:
                job.join().wait()
            else:
                with pytest.raises(JoinedError):
                    say(job, "one")
                job.join().wait()
            said: list[object] = []
            for name in ("name", None):
                said += [say(job, "one", name=name), *allgather_object(job, job.rank, name)]
            number = job.add_process_set([1])
            if job.rank == 1:
                said.append(say(job, "alone", root=1, process_set=number))
            return [*said, say(job, "last")]

        first, second = across([[0], [1]], act, deadline_seconds=seconds)
        both = [an_object("one"), 0, 1] * 2
        assert first == [*both, an_object("last")]
        assert second == [*both, an_object("alone"), an_object("last")]

    patiently(attempt, 0.5)


@pytest.mark.parametrize("root", [-1, 2, 7])
def test_a_root_that_is_no_rank_of_the_set(root: int) -> None:
    def act(job: Context) -> None:
        with pytest.raises(ArgumentError, match="root_rank must be one of"):
            broadcast_bytes(job, b"x", root, "name")

    across([[0], [1]], act)


@pytest.mark.parametrize("machines", [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]], ids=str)
def test_an_exchange_tells_every_rank_of_a_set_what_each_has_said(machines: list[list[int]]) -> None:
    def act(job: Context) -> object:
        number = job.add_process_set([0, 2])
        everyones = job.exchange(b"*" * job.rank, name="all").wait().payloads
        ours = job.exchange(bytes([job.rank]), process_set=number).wait().payloads if job.rank != 1 else None
        with pytest.raises(MismatchError, match="an exchange of 32769 bytes; at most 32768 are allowed"):
            job.exchange(bytes((32 << 10) + 1), name="all").wait()
        return everyones, ours, job.exchange(bytes(32 << 10), name="all").wait().payloads == (bytes(32 << 10),) * 3

    everyones = (b"", b"*", b"**")
    assert across(machines, act) == [(everyones, (b"\0", b"\2"), True), (everyones, None, True),
                                     (everyones, (b"\0", b"\2"), True)]  # fmt: skip
