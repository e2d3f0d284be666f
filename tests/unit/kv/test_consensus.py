"""What all workers say alike: gathered until all have, or until they do not agree."""

from reigen.errors import MismatchError
from reigen.kv.server.consensus import WorkerConsensus


def gather(*words, expected=3):
    agreement = WorkerConsensus("the type", lambda word: f"type {word}")
    for worker, word in words:
        agreement.proposals[worker] = word
    return agreement, agreement.decide(range(expected))


def test_nothing_is_decided_while_somebody_is_missing():
    agreement, decision = gather((0, "a"), (2, "a"))
    assert decision == (None, None)
    assert agreement.missing(range(3)) == (1,)
    assert WorkerConsensus("x").decide(()) == (None, None)


def test_all_say_the_same():
    assert gather((2, "a"), (1, "a"), (0, "a"))[1] == ("a", None)


def test_who_says_something_else_is_named_and_may_try_again():
    agreement, (word, error) = gather((0, "a"), (1, "b"), (2, "a"))
    assert word is None
    assert isinstance(error, MismatchError)
    assert error.ranks == (1,)
    assert error.details == {0: "type a", 1: "type b", 2: "type a"}
    for worker in range(3):
        agreement.proposals[worker] = "b"
    assert agreement.decide(range(3)) == ("b", None)


def test_without_a_majority_the_lowest_worker_is_right():
    assert gather((0, "a"), (1, "b"), expected=2)[1][1].ranks == (1,)


def test_the_word_of_one_who_is_not_expected_any_more_counts():
    _, (_, error) = gather((0, "a"), (1, "a"), (2, "b"), expected=2)
    assert error.ranks == (2,)
