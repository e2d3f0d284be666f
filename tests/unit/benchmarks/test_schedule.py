"""Who has a turn when, with teams that only write down what they are asked."""

from __future__ import annotations

import pytest

from benchmarks.harness.figures import Timeline
from benchmarks.harness.schedule import Mode, alternate, rotated
from benchmarks.harness.work import Case
from reigen.errors import LaunchError


class _Team:
    """Every operation takes ``seconds``; fails at the ``fails_at``-th request."""

    def __init__(self, log: list[str], seconds: float = 0.1, fails_at: int | None = None) -> None:
        self.log, self.seconds, self.left = log, seconds, fails_at

    def open(self, key: str, case: Case, warmup: int) -> list[Timeline]:
        return self._do(f"open {key} {case.name}", warmup)

    def turn(self, key: str, settle: int, iterations: int) -> list[Timeline]:
        return self._do(f"turn {key} {settle}+{iterations}", iterations)

    def shut(self, key: str) -> None:
        self._do(f"shut {key}", 0)

    def _do(self, what: str, iterations: int) -> list[Timeline]:
        self.log.append(what)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise LaunchError(f"{what}: broken")
        spans = [(float(number), number + self.seconds) for number in range(iterations)]
        return [spans, spans]


def _ignore(_: str) -> None:
    """Nobody looks at the progress."""


def test_each_round_begins_with_another_mode() -> None:
    assert [rotated("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_all_modes_are_open_and_have_turns_in_turn() -> None:
    log: list[str] = []
    team = _Team(log)
    outcome = alternate([Mode("a", team, Case("x")), Mode("b", team, Case("y"))], 2, 1.0, _ignore)
    assert log == [
        *("open a x", "open b y"),
        *("turn a 1+10", "turn b 1+10"),
        *("turn b 1+10", "turn a 1+10"),
        *("shut a", "shut b"),
    ]
    assert outcome.summaries["a"].median == pytest.approx(0.1)
    assert outcome.summaries["a"].num_operations == 20


def test_turns_are_about_equally_long() -> None:
    log: list[str] = []
    alternate([Mode("fast", _Team(log, 0.01), Case("")), Mode("slow", _Team(log, 0.25), Case(""))], 1, 1.0, _ignore)
    assert log[2:4] == ["turn fast 10+100", "turn slow 1+4"]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_mode_that_fails_is_left_out_and_the_others_go_on(fails_at: int) -> None:
    modes = [Mode("bad", _Team([], fails_at=fails_at), Case("")), Mode("good", _Team([]), Case(""))]
    outcome = alternate(modes, 3, 0.5, _ignore)
    assert list(outcome.summaries) == ["good"]
    assert outcome.summaries["good"].num_operations == 15
    assert "broken" in outcome.failures["bad"]


def test_two_ranks_own_calls_count_twice() -> None:
    outcome = alternate([Mode("copy", _Team([]), Case(""), joint=False)], 1, 0.5, _ignore)
    assert outcome.summaries["copy"].num_operations == 10


def test_progress_names_mode_and_round() -> None:
    said: list[str] = []
    alternate([Mode("a", _Team([]), Case(""))], 2, 0.5, said.append)
    assert said == ["a: warming up", "round 1 of 2: a", "round 2 of 2: a"]
