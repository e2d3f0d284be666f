"""What a server says of workers that wait, and when."""

import math

from reigen.kv.server.stalls import StallReporter, WaitingWorker


def waiting(key: str = "x", worker: int = 0, missing: tuple[int, ...] = (1,), since: float = 0.0) -> WaitingWorker:
    return WaitingWorker(f"key {key!r}", worker, missing, since)


def test_who_waits_long_is_told_of_once_and_again_after_twice_as_long() -> None:
    stalls = StallReporter(60.0)
    told = [stalls.report([waiting()], now) for now in (59.0, 60.0, 61.0, 119.0, 121.0, 200.0, 500.0, 900.0)]
    assert [text is not None for text in told] == [False, True, False, False, True, False, True, False]
    assert told[1] is not None
    assert told[1].splitlines() == [
        "Stall: workers wait for others that do not come.",
        "  key 'x' for 60 s: waiting: worker 0; missing: worker 1",
        "  All workers must push and initialise the same keys equally often, or leave().",
    ]


def test_a_line_for_each_key_with_all_who_wait_for_it() -> None:
    several = [waiting("x", 0, (1,), 5.0), waiting("x", 2, (1, 3), 0.0), waiting("y", 1, (0,), 0.0)]
    told = StallReporter(1.0).report(several, 10.0)
    assert told is not None
    assert told.splitlines()[1:-1] == [
        "  key 'x' for 10 s: waiting: workers 0, 2; missing: workers 1, 3",
        "  key 'y' for 10 s: waiting: worker 1; missing: worker 0",
    ]
    many = StallReporter(1.0).report([waiting(str(number)) for number in range(30)], 10.0)
    assert many is not None
    assert "  and 22 more" in many
    assert len(many.splitlines()) == 11


def test_its_end_is_told_and_the_next_one_anew() -> None:
    stalls = StallReporter(60.0)
    assert stalls.report([waiting()], 60.0) is not None
    assert stalls.report([waiting(since=50.0)], 61.0) == "Stall over: no worker waits for others any more"
    assert stalls.report([], 62.0) is None
    assert stalls.report([waiting(since=100.0)], 160.0) is not None


def test_who_waits_for_nobody_or_is_not_looked_at_is_not_told_of() -> None:
    assert StallReporter(60.0).report([waiting(missing=())], 1000.0) is None
    assert StallReporter(math.inf).report([waiting()], 1000.0) is None
