"""What ranks tell of the error with which they give up: kind, ranks and reason come back, whatever their size."""

import msgspec
import pytest

from reigen.cluster.membership.abort_message import AbortMessage, error_from_abort, make_abort_message
from reigen.errors import CollectiveError, DeadlineError, MismatchError, PeerLostError


@pytest.mark.parametrize("kind", [CollectiveError, DeadlineError, PeerLostError])
def test_an_error_comes_back_as_what_it_was(kind):
    error = error_from_abort(make_abort_message(kind("too late", ranks=[3, 1]), 0), "rank 0, host h1")
    assert type(error) is kind
    assert (error.reason, error.ranks) == ("too late (told by rank 0, host h1)", (1, 3))
    assert error_from_abort(make_abort_message(kind("too late"), 0), "").reason == "too late"


def test_the_tensor_that_the_reason_speaks_of_comes_back():
    """The rank that is told may wait for another one. A death is no tensor's."""
    error = error_from_abort(make_abort_message(DeadlineError("too late", tensor="first", ranks=[0]), 1), "rank 1")
    assert str(error.of("second")) == "first: too late (told by rank 1)"
    died = error_from_abort(make_abort_message(PeerLostError("died", tensor="first", ranks=[0]), 1), "rank 1")
    assert str(died.of("second")) == "second: died (told by rank 1)"


def test_other_kinds_come_back_as_their_base_and_name_the_teller_where_they_name_nobody():
    error = error_from_abort(make_abort_message(MismatchError("no"), 7), "")
    assert type(error) is CollectiveError
    assert error.ranks == (7,)
    assert error_from_abort(AbortMessage("ValueError", (2,), ""), "").reason == "rank(s) 2 gave up"


def test_the_first_teller_is_named():
    first = error_from_abort(make_abort_message(DeadlineError("too late"), 0), "rank 0")
    assert error_from_abort(make_abort_message(first, 1), "rank 1").reason == "too late (told by rank 0)"


@pytest.mark.parametrize("letter", ["x", "ü", "漢", "😀", "\udcff"])
def test_it_fits_a_page(letter):
    error = CollectiveError(letter * 10_000, tensor=letter * 10_000, ranks=range(100_000, 110_000))
    abort = make_abort_message(error, 0)
    assert len(msgspec.msgpack.encode(abort)) < 3950
    assert abort.ranks == tuple(range(100_000, 100_100))
    assert abort.reason.strip("?") in letter * 10_000
