"""Callbacks of the driver."""

from __future__ import annotations

import threading

import pytest

from reigen.ray.callbacks import NoteCallbacks


def test_all_notes_reach_all_callbacks_in_order_before_the_end():
    notes, one, two = NoteCallbacks(), [], []
    notes.put("before, and for nobody")
    with notes.called([one.append, two.append]):
        for number in range(100):
            notes.put(number)
    notes.put("after")
    assert one == two == list(range(100))


def test_a_callback_that_raises_does_not_stop_the_others_and_is_heard_of():
    notes, found = NoteCallbacks(), []

    def fail(note: object) -> None:
        raise KeyError(note)

    def log() -> None:
        with notes.called([fail, found.append]):
            notes.put(1)
            notes.put(2)

    with pytest.raises(KeyError, match="1"):
        log()
    assert found == [1, 2]


def test_the_functions_own_error_comes_first_and_no_thread_is_left():
    notes = NoteCallbacks()
    before = threading.active_count()

    def fail() -> None:
        with notes.called([lambda note: 1 / 0]):
            notes.put(1)
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        fail()
    assert threading.active_count() == before
