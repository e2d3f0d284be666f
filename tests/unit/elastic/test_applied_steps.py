"""`AppliedSteps` over contexts that deliver notes at once: who submits the exchange of a step, and when."""

from __future__ import annotations

from collections.abc import Callable

from reigen.elastic.applied_steps import AppliedSteps
from reigen.errors import PeerLostError


class Handle:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


class FakeContext:
    """One rank of a job; `submitted` has the names of its exchanges, by number of ranks in order."""

    def __init__(self, rank: int, contexts: list[FakeContext]) -> None:
        self.rank, self._contexts = rank, contexts
        self.submitted: list[str] = []
        self.is_over = False
        self._listener: Callable[[int, bytes], None] = lambda rank, data: None

    def listen(self, topic: object, listener: Callable[[int, bytes], None]) -> None:
        self._listener = listener

    def post(self, topic: object, data: bytes) -> None:
        for other in self._contexts:
            if other is not self and (self.rank == 0 or other.rank == 0):
                other._listener(self.rank, data)

    def exchange(self, payload: bytes, *, name: str, blocking: bool) -> Handle:
        if self.is_over:
            raise PeerLostError("the view has ended")
        self.submitted.append(name)
        return Handle()


def begin(size: int) -> tuple[list[FakeContext], list[AppliedSteps]]:
    contexts: list[FakeContext] = []
    contexts += [FakeContext(rank, contexts) for rank in range(size)]
    ranks = [AppliedSteps() for _ in contexts]
    for applied, context in zip(ranks, contexts, strict=True):
        applied.note(4)
        applied.enter_view(context)
    return contexts, ranks


def test_ranks_answer_rank_0_when_they_have_applied_the_step() -> None:
    contexts, ranks = begin(3)
    ranks[0].note(5)
    ranks[1].note(5)
    ranks[1].go_on()
    assert [context.submitted for context in contexts] == [[], [], []], "nobody has asked"
    ranks[0].wait_for_all()
    assert [context.submitted for context in contexts] == [["job.applied.5"], ["job.applied.5"], []]
    ranks[2].note(5)
    assert contexts[2].submitted == ["job.applied.5"]


def test_no_rank_submits_a_number_twice_in_a_view() -> None:
    contexts, ranks = begin(3)
    for _ in range(2):
        for applied in ranks:
            applied.wait_for_all()
    assert [context.submitted for context in contexts] == [["job.applied.4"]] * 3
    for applied in ranks:
        applied.note(5)
    ranks[0].wait_for_all()
    assert [context.submitted for context in contexts] == [["job.applied.4", "job.applied.5"]] * 3


def test_rank_0_answers_others_when_its_program_asks_or_has_gone_on() -> None:
    """Not before: if it dies, those who have called for a checkpoint, too, are still there, and one of them writes."""
    for goes_on in (False, True):
        contexts, ranks = begin(3)
        ranks[1].wait_for_all()
        assert [context.submitted for context in contexts] == [[], ["job.applied.4"], []]
        ranks[0].go_on() if goes_on else ranks[0].wait_for_all()
        assert [context.submitted for context in contexts] == [["job.applied.4"]] * 3


def test_questions_of_a_view_that_has_ended_are_not_answered() -> None:
    contexts, ranks = begin(2)
    ranks[0].note(5)
    ranks[0].wait_for_all()
    contexts[1].is_over = True
    ranks[1].note(5)
    assert contexts[1].submitted == []
    later, _ = begin(2)
    ranks[1].enter_view(later[1])
    contexts[0].post(None, (5).to_bytes(8))
    ranks[1].note(6)
    assert later[1].submitted == contexts[1].submitted == []
