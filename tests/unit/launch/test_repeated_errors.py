"""Which tracebacks are shown, and which ranks are only named."""

import pytest

from reigen.launch.output.repeated_errors import AHEAD_SECONDS, HOLD_SECONDS, RepeatedErrors

BEGIN = b"Traceback (most recent call last):"
ERROR = [BEGIN, b'  File "train.py", line 3, in <module>', b"    model(x)", b"ValueError: 3 is not 4"]
OTHER = [*ERROR[:3], b"ValueError: 5 is not 4"]
CHAIN = [*ERROR, b"", b"During handling of the above exception, another exception occurred:", b"", *OTHER]


@pytest.fixture
def errors():
    return RepeatedErrors(4)


def end(errors, *ranks):
    for rank in ranks:
        errors.end(rank)


#: MXNet's errors have a traceback of C++ in the message.
NESTED = [
    *ERROR[:3],
    b"mxnet.base.MXNetError: " + BEGIN,
    b'  File "postoffice.cc", line 20',
    b"MXNetError: Check notnull",
]


@pytest.mark.parametrize("error", [ERROR, CHAIN, NESTED])
def test_the_first_is_shown_at_once_and_the_others_are_named_in_the_end(errors, error):
    assert errors.feed(2, error, 0.0) == error
    assert [errors.feed(rank, error, 0.1) for rank in (3, 0)] == [[], []]
    end(errors, 0, 2, 3)
    assert errors.settle(0.2) == []
    assert errors.take_repeats(0.2) == []
    assert errors.wait_seconds(0.2) == HOLD_SECONDS - 0.2
    assert errors.take_repeats(HOLD_SECONDS) == [(2, [0, 3])]
    assert errors.take_repeats(float("inf")) == []
    assert errors.wait_seconds(9.0) is None
    assert [errors.find_shared(rank) for rank in (0, 1, 2, 3)] == [2, None, 2, 2]
    assert [errors.take_sharing(rank) for rank in (0, 1, 2, 3)] == [[2, 3], [], [0, 3], [0, 2]]


def test_ranks_that_are_named_elsewhere_are_not_named_again(errors):
    errors.feed(0, ERROR, 0.0)
    errors.feed(1, ERROR, 0.0)
    end(errors, 0, 1)
    errors.settle(0.0)
    assert errors.take_sharing(1) == [0]
    assert errors.take_repeats(float("inf")) == []


def test_lines_of_two_ranks_may_come_by_turns_and_one_may_overtake(errors):
    assert errors.feed(0, ERROR[:1], 0.0) == ERROR[:1]
    assert errors.feed(1, ERROR, 0.0) == []
    end(errors, 1)
    assert errors.settle(0.0) == [], "rank 0 may still print the same"
    assert errors.feed(0, ERROR[1:], 0.0) == ERROR[1:]
    assert errors.settle(0.0) == []
    assert errors.take_repeats(float("inf")) == [(0, [1])]


def test_another_error_is_shown_as_soon_as_it_differs(errors):
    errors.feed(0, ERROR, 0.0)
    assert errors.feed(1, OTHER[:3], 0.0) == []
    assert errors.feed(1, OTHER[3:], 0.0) == OTHER
    assert errors.feed(2, OTHER, 0.0) == [], "the same as rank 1's"
    end(errors, 2)
    assert errors.settle(0.0) == []
    assert errors.take_repeats(float("inf")) == [(1, [2])]
    assert errors.find_shared(0) is None


def test_a_rank_that_logs_an_error_and_goes_on_shows_it(errors):
    errors.feed(0, ERROR, 0.0)
    assert errors.feed(1, ERROR, 0.0) == []
    assert errors.settle(HOLD_SECONDS - 0.1) == []
    assert errors.settle(HOLD_SECONDS) == [(1, ERROR)]
    assert errors.feed(1, [b"more"], 6.0) == [b"more"]


def test_lines_that_only_one_of_two_ranks_prints_behind_the_error_are_not_held_for_long(errors):
    errors.feed(0, ERROR, 0.0)
    assert errors.feed(1, [*ERROR, b"going on"], 0.0) == [], "rank 0 may be late"
    assert errors.wait_seconds(0.0) == AHEAD_SECONDS
    assert errors.settle(AHEAD_SECONDS) == [(1, [*ERROR, b"going on"])]
    assert errors.feed(1, [b"more"], 6.0) == [b"more"]


def test_half_an_error_is_shown(errors):
    """Its rank was stopped while it printed."""
    errors.feed(0, ERROR, 0.0)
    assert errors.feed(1, ERROR[:2], 0.0) == []
    end(errors, 0, 1)
    assert errors.settle(0.0) == [(1, ERROR[:2])]
    assert errors.take_repeats(float("inf")) == []


def test_the_same_error_much_later_is_shown_again(errors):
    errors.feed(0, ERROR, 0.0)
    assert errors.feed(1, ERROR, 60.0) == ERROR


def test_a_rank_that_was_started_again_shows_what_it_prints(errors):
    errors.feed(0, ERROR, 0.0)
    errors.feed(1, ERROR, 0.0)
    end(errors, 0, 1)
    errors.settle(0.0)
    assert errors.feed(1, [b"second life"], 1.0) == [b"second life"]


def test_lines_that_are_no_error_pass(errors):
    assert errors.feed(0, [b"epoch 1"], 0.0) == [b"epoch 1"]
    assert errors.feed(1, [b"epoch 1", *ERROR], 0.0) == [b"epoch 1", *ERROR]
    assert errors.feed(2, [b"epoch 1", b"\r10%" + BEGIN, *ERROR[1:]], 0.0) == [b"epoch 1"]


def test_the_only_rank_shares_its_error_with_all():
    alone = RepeatedErrors(1)
    assert alone.find_shared(0) is None
    alone.feed(0, ERROR, 0.0)
    assert alone.find_shared(0) == 0


@pytest.mark.parametrize("later", [OTHER, [b"line"] * 1200])
@pytest.mark.parametrize("is_named_elsewhere", [False, True])
def test_repeats_are_named_though_the_rank_that_showed_the_error_goes_on(errors, later, is_named_elsewhere):
    errors.feed(0, ERROR, 0.0)
    assert [errors.feed(rank, ERROR, 0.1) for rank in (1, 2)] == [[], []]
    end(errors, 1, 2)
    assert errors.settle(0.2) == []
    assert errors.feed(0, later, 0.3) == later
    assert errors.wait_seconds(0.3) == HOLD_SECONDS - 0.3
    if is_named_elsewhere:
        assert errors.take_sharing(1) == [2]
    assert errors.take_repeats(HOLD_SECONDS) == ([] if is_named_elsewhere else [(0, [1, 2])])
    assert errors.take_repeats(float("inf")) == []
    assert errors.wait_seconds(9.0) is None


def test_an_error_that_is_only_the_first_of_a_chain_is_shown(errors):
    errors.feed(0, CHAIN, 0.0)
    assert errors.feed(1, ERROR, 0.1) == []
    end(errors, 0, 1)
    assert errors.settle(0.2) == [(1, ERROR)]
    assert errors.take_repeats(float("inf")) == []


def test_each_held_line_is_compared_only_once(errors):
    num_compared = 0

    class Line(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other):
            nonlocal num_compared
            num_compared += 1
            return bytes(self) == bytes(other)

    lines = [b"    frame %d" % number for number in range(900)]
    errors.feed(0, [BEGIN, *lines], 0.0)
    errors.feed(1, [BEGIN], 0.1)
    for line in lines:
        assert errors.feed(1, [Line(line)], 0.1) == []
        assert errors.settle(0.1) == []
    assert num_compared < 10 * len(lines)
    assert errors.feed(1, [b"another"], 0.1) == []
    assert errors.feed(0, [b"line"], 0.1) == [b"line"]
    assert errors.feed(1, [b"more"], 0.1) == [BEGIN, *lines, b"another", b"more"]


def test_lines_are_compared_from_the_beginning_with_another_original(errors):
    errors.feed(0, [*ERROR, b"a", b"b"], 0.0)
    errors.feed(1, [*ERROR, b"a", b"c"], 0.0)
    assert errors.feed(2, [*ERROR, b"a"], 0.1) == [], "as rank 0"
    assert errors.feed(2, [b"c"], 0.1) == [], "as rank 1"
    assert errors.feed(2, [b"d"], 0.1) == []
    assert errors.feed(1, [b"e"], 0.1) == [b"e"]
    end(errors, 2)
    assert errors.settle(0.2) == [], "rank 1 may be late"
    assert errors.settle(HOLD_SECONDS + 1) == [(2, [*ERROR, b"a", b"c", b"d"])]
