"""Python objects between hosts: nothing is unpickled that somebody on the way has touched."""

import pickle

import numpy as np
import pytest

from reigen.api.objects import allgather_bytes, allgather_object, broadcast_bytes, broadcast_object
from reigen.errors import AuthenticationError
from tests.unit.engine.jobs import across, between

TWO_HOSTS = [[0], [1]]
OBJECT = {"text": "grüße", "numbers": [1, 2.5, None]}


def exchange(job):
    return broadcast_object(job, OBJECT if job.rank == 0 else None, 0, "one"), allgather_object(job, job.rank, "all")


@pytest.mark.parametrize("run", [lambda act: across(TWO_HOSTS, act), lambda act: between(2, act)])
def test_objects_arrive_everywhere(run):
    assert run(exchange) == [(OBJECT, [0, 1])] * 2


def counted(job, method):
    """Names of the collectives of a kind from now on."""
    names, original = [], getattr(job, method)

    def call(*arguments, **options):
        names.append(options["name"])
        return original(*arguments, **options)

    setattr(job, method, call)
    return names


def test_few_bytes_on_one_host_come_with_their_sizes():
    def act(job):
        gathers, broadcasts = counted(job, "allgather"), counted(job, "broadcast")
        small = allgather_bytes(job, bytes([job.rank]) * (5461 * (job.rank != 1)), "small")
        mixed = allgather_bytes(job, b"few" if job.rank else bytes(5462), "mixed")
        sent = [broadcast_bytes(job, bytes(n) if job.rank == 2 else None, 2, str(n)) for n in (0, 16384, 16385)]
        return small, [len(each) for each in mixed], [len(each) for each in sent], gathers, broadcasts

    small = [bytes([0]) * 5461, b"", bytes([2]) * 5461]
    expected = small, [5462, 3, 3], [0, 16384, 16385], ["mixed.bytes"], ["16385.bytes"]
    assert between(3, act) == [expected] * 3


def touched(job, name, method, change):
    """From now on what this rank receives under a name is changed before it gets it."""
    original = getattr(job, method)

    class Changed:
        def __init__(self, handle, place):
            self._handle, self._place = handle, place

        def wait(self):
            result = self._handle.wait()
            change(self._place if self._place is not None else result.on_host)
            return result

    def call(*arguments, **options):
        handle = original(*arguments, **options)
        if options.get("name") != name:
            return handle
        return Changed(handle, arguments[1] if method == "broadcast" else None)

    setattr(job, method, call)


def unpickled(monkeypatch):
    loaded = []
    monkeypatch.setattr(pickle, "loads", loaded.append)
    return loaded


@pytest.mark.parametrize("place", [0, 15, 16, -1])
def test_an_object_that_was_changed_on_its_way_is_not_loaded(monkeypatch, place):
    loaded = unpickled(monkeypatch)

    def flip(array):
        array[place] ^= 1

    def act(job):
        if job.rank == 1:
            touched(job, "one.bytes", "broadcast", flip)
        with pytest.raises(AuthenticationError, match="one: what rank 0 sent was changed on its way to rank 1"):
            broadcast_object(job, OBJECT if job.rank == 0 else None, 0, "one")

    across(TWO_HOSTS, act)
    assert loaded == []


def test_an_object_that_was_put_in_place_of_another_is_not_loaded(monkeypatch):
    """By somebody who knows the format, but not the secret."""
    loaded = unpickled(monkeypatch)
    forged = pickle.dumps("evil")

    def replace(array):
        array[-len(forged) :] = np.frombuffer(forged, np.uint8)

    def act(job):
        touched(job, "all.bytes", "allgather", replace)
        with pytest.raises(AuthenticationError):
            allgather_object(job, "something that is longer than what is put in its place", "all")

    across(TWO_HOSTS, act)
    assert loaded == []
