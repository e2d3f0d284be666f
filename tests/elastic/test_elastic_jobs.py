"""Elastic jobs of real processes: members are killed, stopped and added at moments that a seed chooses."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from reigen._version import __version__
from tests.elastic.elastic_processes import ElasticProcesses, Member
from tests.multiprocess.launcher import until

pytestmark = pytest.mark.slow

COUNTING = Path(__file__).with_name("counting_program.py")
TRAINING = Path(__file__).with_name("training_program.py")


def steps_of(member: Member) -> list[list[str]]:
    """What a member has said of its steps, in order."""
    return [line.split()[1:] for line in list(member.lines) if line.startswith("STEP ") and len(line.split()) == 6]


def wait_for_steps(members: list[Member], num_steps: int, seconds: float = 60.0) -> None:
    """Waits until each member has made so many more steps."""
    before = {member: len(steps_of(member)) for member in members}
    until(lambda: all(len(steps_of(member)) >= before[member] + num_steps for member in members), seconds)


def kill(job: ElasticProcesses, *victims: Member, stopped: Sequence[Member] = ()) -> float:
    """Kills members; returns seconds until all others but stopped ones have ended a step that they make together."""
    gone = {*victims, *stopped, *(member for member in job.members if member.process.poll() is not None)}
    rest = [member for member in job.members if member not in gone and member.says("STEP")]
    at = time.monotonic()
    for victim in victims:
        victim.kill()
    size = str(len(rest))

    def goes_on() -> bool:
        return all(any(step[2] == size and float(step[4]) > at for step in steps_of(member)) for member in rest)

    until(goes_on)
    return (
        max(min(float(step[4]) for step in steps_of(m) if step[2] == size and float(step[4]) > at) for m in rest) - at
    )


def check_counts(members: list[Member]) -> None:
    """Checks the totals of the counting program: each step was added once, and none is missing."""
    for member in members:
        for number, _, _, total, _ in steps_of(member):
            assert float(total) == int(number) * (int(number) - 1) // 2, member.lines[-5:]


def test_survivors_go_on_in_their_processes():
    with ElasticProcesses(COUNTING, "100000000", "0.002") as job:
        members = job.start_first(4)
        job.wait_for("STEP 5 ")
        for victims in (members[3:], members[:1], members[1:2]):
            kill(job, *victims)
        (last,) = members[2:3]
        steps = steps_of(last)
        check_counts(members)
        # ranks keep their order, no step is missing, and at most one is made again for each death
        assert list(dict.fromkeys((step[1], step[2]) for step in steps)) == [
            ("2", "4"),
            ("2", "3"),
            ("1", "2"),
            ("0", "1"),
        ]
        numbers = [int(step[0]) for step in steps]
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1))
        assert len(numbers) - len(set(numbers)) <= 3


def test_views_change_without_a_launcher():
    """Nothing of a view is the launcher's: rank 0 serves it, and when that dies, the next one does."""
    with ElasticProcesses(COUNTING, "200", "0.005") as job:
        members = job.start_first(4)
        job.wait_for("STEP 5 ")
        job.end_service()
        kill(job, members[2])
        kill(job, members[0])
        rest = [members[1], members[3]]
        job.wait_for("DONE", rest)
        assert [member.wait() for member in rest] == [0, 0]
        check_counts(members)


@pytest.mark.parametrize("victims", [(0, 2), (1, 2, 3)], ids=str)
def test_several_die_at_once(victims: tuple[int, ...]):
    with ElasticProcesses(COUNTING, "300", "0.005") as job:
        members = job.start_first(4)
        job.wait_for("STEP 5 ")
        kill(job, *(members[rank] for rank in victims))
        rest = [member for member in members if member.slot not in victims]
        job.wait_for("DONE", rest)
        assert [member.wait() for member in rest] == [0] * len(rest)
        check_counts(members)
        assert [steps_of(member)[-1][1:3] for member in rest] == [[str(n), str(len(rest))] for n in range(len(rest))]
        for member in rest:
            (words,) = [line.split(" ", 4) for line in member.lines if line.startswith("HISTORY")]
            assert 1 <= int(words[1]) <= len(victims)
            assert int(words[2]) >= 1
            assert 0 < float(words[3]) < 30
            assert f"{len(rest)} rank" in words[4]


def test_newcomers_get_the_state_and_members_keep_theirs():
    with ElasticProcesses(COUNTING, "100000", "0.002", max_size=5) as job:
        members = [*job.start_first(3)]
        job.wait_for("STEP 5 ")
        newcomers = [job.start_candidate(slot) for slot in (3, 4)]
        job.wait_for("STEP", newcomers)
        wait_for_steps(job.members, 3)
        assert {steps_of(member)[-1][2] for member in job.members} == {"5"}
        check_counts(job.members)
        for member in members:  # their change was planned: nothing was made again
            numbers = [int(step[0]) for step in steps_of(member)]
            assert numbers == list(range(1, len(numbers) + 1))
        # a newcomer is a member like any other: it goes on when all of the first have gone
        kill(job, *members)
        wait_for_steps(newcomers, 3)
        check_counts(job.members)


def test_members_do_not_wait_for_a_newcomer_that_prepares_itself(tmp_path: Path):
    """What a program does between init() and the training is done before any member stops for it."""
    with ElasticProcesses(COUNTING, "100000", "0.002", max_size=3) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        newcomer = job.start_candidate(2, PREPARES_UNTIL=str(tmp_path / "go"))
        job.wait_for("PLACE", [newcomer])
        assert newcomer.says("PLACE 2 3 2 3"), "where it will be"
        wait_for_steps(members, 30)
        assert {step[2] for member in members for step in steps_of(member)} == {"2"}
        (tmp_path / "go").touch()
        job.wait_for("STEP", [newcomer])
        assert steps_of(newcomer)[0][1:3] == ["2", "3"]


def make_old_version(directory: Path) -> Path:
    """Make a directory which, where it is in PYTHONPATH, makes processes of another version of Reigen."""
    old = directory / "old"
    old.mkdir()
    (old / "sitecustomize.py").write_text('import reigen._version\nreigen._version.__version__ = "0.0.1"\n')
    return old


def test_newcomers_that_fail_disturb_nobody(tmp_path: Path):
    """They die at random moments, have another secret or version, or are stopped before they are members."""
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "3")))
    with ElasticProcesses(COUNTING, "100000", "0.002", max_size=3) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        stranger = job.start_candidate(2, REIGEN_SECRET="5e" * 32)
        path = os.pathsep.join([str(make_old_version(tmp_path)), *filter(None, [os.environ.get("PYTHONPATH")])])
        old = job.start_candidate(7, PYTHONPATH=path)
        stopped = job.start_candidate(3, PREPARES_UNTIL=str(tmp_path / "never"))
        job.wait_for("PLACE", [stopped])
        stopped.kill(signal.SIGSTOP)
        assert stranger.wait() == 1
        assert stranger.says("does not know this job's secret"), stranger.lines
        assert stranger.says("(REIGEN_SECRET) is not that of the job. The job's launcher sets it")
        assert old.wait() == 1
        assert old.says(f"the members of the job have Reigen {__version__}, this process on host "), old.lines
        assert old.says(" has 0.0.1 (")
        assert old.says("install the same version on all hosts")
        for slot in (4, 5, 6):  # about to be taken in, or soon after
            newcomer = job.start_candidate(slot)
            job.wait_for("PLACE", [newcomer])
            threading.Event().wait(chances.uniform(0.0, 0.2))
            newcomer.kill()
            newcomer.wait()
        wait_for_steps(members, 5)
        check_counts(members)
        for member in members:
            numbers = [int(step[0]) for step in steps_of(member)]
            assert sorted(set(numbers)) == list(range(1, max(numbers) + 1))
            assert len(numbers) - len(set(numbers)) <= 3, "one step for each that was a member, at most"


def test_a_training_is_exact_whoever_dies(tmp_path: Path):
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "20")))
    epochs, samples, joined = 3, 203, tmp_path / "joined"
    with ElasticProcesses(TRAINING, str(epochs), str(samples), "0.5", max_size=4, SLOW_UNTIL=str(joined)) as job:
        newcomer = job.start_candidate(4, WAITS_FOR=str(tmp_path / "go"))
        job.wait_for("IMPORTED")
        members = job.start_first(4)[1:]
        job.wait_for("STEP 3 ", members)
        kill(job, members[chances.randrange(4)])
        (tmp_path / "go").touch()
        job.wait_for("STEP", [newcomer])
        kill(job, next(member for member in members if member.process.poll() is None))
        joined.touch()
        rest = [member for member in job.members if member.process.poll() is None]
        job.wait_for("LEDGER", rest)
        assert [member.wait() for member in rest] == [0] * len(rest)
        digests: dict[tuple[str, str], set[str]] = {}
        for member in job.members:
            for number, _, size, found, _ in steps_of(member):
                digests.setdefault((number, size), set()).add(found)
        assert {len(found) for found in digests.values()} == {1}, "replicas differ"
        ledgers = {next(line for line in member.lines if line.startswith("LEDGER")) for member in rest}
        (ledger,) = ledgers
    dealt = [{index for batch in step for index in batch} for step in json.loads(ledger.removeprefix("LEDGER "))]
    counts = Counter(index for step in dealt for index in step)
    # each epoch has each sample; only the last step of an epoch may deal a few again, so that ranks get equally many
    assert set(counts) == set(range(samples))
    assert min(counts.values()) == epochs
    assert sum(counts.values()) - epochs * samples <= epochs * 3


def test_a_program_that_fails_on_one_rank_ends_there_alone():
    with ElasticProcesses(TRAINING, "1", "400", "0.01") as job:
        failing, *members = job.start_first(4, {0: {"FAIL_AT": "20"}})
        assert failing.wait() == 1
        assert failing.says("OSError")
        job.wait_for("DONE", members)
        assert [member.wait() for member in members] == [0, 0, 0]


def test_a_member_that_was_stopped_for_long_is_left_behind_and_ends():
    with ElasticProcesses(COUNTING, "100000", "0.002", REIGEN_DEADLINE="5") as job:
        members = job.start_first(3)
        job.wait_for("STEP 5 ")
        members[1].kill(signal.SIGSTOP)
        kill(job, members[2], stopped=members[1:2])  # the change does not wait for it for ever
        assert members[1].wait() in {75, -signal.SIGKILL}
        wait_for_steps(members[:1], 3)
        check_counts(members)


def test_who_is_stopped_is_left_out_at_the_deadline_and_killed():
    """Those who wait know that its process is stopped: they do not wait for its answer, too."""
    with ElasticProcesses(COUNTING, "300", "0.005", REIGEN_DEADLINE="2") as job:
        members = [*job.start_first(3)]
        job.wait_for("STEP 5 ")
        stopped = members.pop(1)
        stopped.kill(signal.SIGSTOP)
        job.wait_for("DONE", members)
        assert [member.wait() for member in members] == [0, 0]
        assert stopped.wait() == -signal.SIGKILL
        check_counts([*members, stopped])
        histories = [line for member in members for line in member.lines if line.startswith("HISTORY")]
        assert all("view 2: 2 ranks go on" in history for history in histories), histories
        reason = "rank 1 did not come until the deadline: its process is stopped"
        assert any(reason in history for history in histories), histories


def test_a_spare_takes_the_place_of_the_dead_in_the_same_change():
    """REIGEN_TEST_KILLS=100 for a measurement: seconds from a kill until the spare has made its first step."""
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "6")))
    num_kills = int(os.environ.get("REIGEN_TEST_KILLS", "4"))
    seconds: list[float] = []
    with ElasticProcesses(COUNTING, "100000000", "0.001", max_size=3) as job:
        members = list(job.start_first(3))
        job.wait_for("STEP 5 ")
        for _ in range(num_kills):
            spare = job.start_candidate(max(member.slot for member in job.members) + 1)
            until(lambda: handles_notices(spare.pid))  # noqa: B023  at once
            wait_for_steps(members, 200)  # it has found them
            victim = chances.choice(members)
            rest = [member for member in members if member is not victim]
            at = time.monotonic()
            victim.kill()
            members = [*rest, spare]
            job.wait_for("STEP", [spare])
            wait_for_steps(members, 1)
            seconds.append(float(steps_of(spare)[0][4]) - at)
            assert {step[2] for step in steps_of(rest[0])} == {"3"}, "no view without it"
            check_counts(members)
            for member in job.members:
                del member.lines[:-100]
    seconds.sort()
    print(f"{num_kills} kills: p50 {statistics.median(seconds):.3f} s, p99 {seconds[int(len(seconds) * 0.99)]:.3f} s")


# -- who leaves --------------------------------------------------------------------------------------------------------


def check_nothing_was_made_again(members: list[Member]) -> None:
    for member in members:
        numbers = [int(step[0]) for step in steps_of(member)]
        assert numbers == list(range(1, len(numbers) + 1))
    check_counts(members)


@pytest.mark.parametrize("rank", [0, 2])
def test_who_is_told_to_end_leaves_after_its_step(rank: int):
    with ElasticProcesses(COUNTING, "100000000", "0.002") as job:
        members = job.start_first(3)
        job.wait_for("STEP 5 ")
        leaving = members[rank]
        rest = [member for member in members if member is not leaving]
        leaving.kill(signal.SIGTERM)
        leaving.kill(signal.SIGTERM)  # an engine and a launcher may both say it
        assert leaving.wait() == 0
        wait_for_steps(rest, 3)
        check_nothing_was_made_again(members)
        assert leaving.says(f"Departure(rank={rank}, size=3, all_leave=False)")
        (left,) = [line.split() for line in leaving.lines if line.startswith("LEFT")]
        assert left[1] == steps_of(leaving)[-1][0]
        assert {step[2] for step in steps_of(rest[0])[int(left[1]) :]} == {"2"}


def test_where_all_are_told_to_end_the_state_of_one_step_is_saved():
    with ElasticProcesses(COUNTING, "100000000", "0.05") as job:
        members = job.start_first(3)
        job.wait_for("STEP 3 ")
        for member in members:
            member.kill(signal.SIGTERM)
        assert [member.wait() for member in members] == [0, 0, 0]
        check_nothing_was_made_again(members)
        assert len({steps_of(member)[-1][0] for member in members}) == 1
        for rank, member in enumerate(members):
            assert member.says(f"LEFT {steps_of(member)[-1][0]} Departure(rank={rank}, size=3, all_leave=True)")


def test_the_last_member_leaves_after_its_step():
    with ElasticProcesses(COUNTING, "100000000", "0.01") as job:
        (member,) = job.start_first(1)
        job.wait_for("STEP 3 ")
        member.kill(signal.SIGTERM)
        assert member.wait() == 0
        assert member.says(f"LEFT {steps_of(member)[-1][0]} Departure(rank=0, size=1, all_leave=True)")


def test_without_grace_a_member_leaves_at_once_and_the_others_make_the_step_again():
    with ElasticProcesses(COUNTING, "100000000", "2.0", REIGEN_NOTICE_GRACE="0") as job:
        members = job.start_first(3)
        job.wait_for("STEP 2 ")
        at = time.monotonic()
        members[1].kill(signal.SIGTERM)
        assert members[1].wait() == 0
        assert time.monotonic() - at < 5.0  # two steps and what is left of one may take six
        wait_for_steps([members[0], members[2]], 2)
        check_counts(members)


def test_a_member_that_makes_no_step_is_gone_when_its_grace_is_over():
    with ElasticProcesses(COUNTING, "100000000", "2.0") as job:
        members = job.start_first(2, {1: {"REIGEN_NOTICE_GRACE": "1"}})
        job.wait_for("STEP 1 ")
        members[1].kill(signal.SIGTERM)
        assert members[1].wait() == 0
        wait_for_steps(members[:1], 2)
        assert steps_of(members[0])[-1][2] == "1"
        check_counts(members)


def test_a_candidate_that_is_told_to_end_disturbs_nobody():
    with ElasticProcesses(COUNTING, "100000000", "0.002", max_size=2) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 5 ")
        newcomer = job.start_candidate(2)
        until(lambda: handles_notices(newcomer.pid))
        newcomer.kill(signal.SIGTERM)
        assert newcomer.wait() == 0
        wait_for_steps(members, 3)
        check_nothing_was_made_again(members)


def handles_notices(pid: int) -> bool:
    """True if a process has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_short_stop_changes_nothing():
    with ElasticProcesses(COUNTING, "300", "0.002") as job:
        members = job.start_first(2)
        job.wait_for("STEP 5 ")
        members[1].kill(signal.SIGSTOP)
        threading.Event().wait(0.5)
        members[1].kill(signal.SIGCONT)
        job.wait_for("DONE")
        assert [member.wait() for member in members] == [0, 0]
        assert {step[2] for member in members for step in steps_of(member)} == {"2"}


def test_kills_at_random_moments():
    """REIGEN_TEST_KILLS=300 for a measurement: seconds from a kill until all others have made a step."""
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "4")))
    num_kills = int(os.environ.get("REIGEN_TEST_KILLS", "6"))
    seconds: list[float] = []
    with ElasticProcesses(COUNTING, "100000000", "0.001", max_size=4) as job:
        job.start_first(4)
        job.wait_for("STEP 5 ")
        for number in range(num_kills):
            members = [member for member in job.members if member.process.poll() is None]
            threading.Event().wait(chances.uniform(0.0, 0.02))
            victim = chances.choice(members)
            seconds.append(kill(job, victim))
            newcomer = job.start_candidate(victim.slot)
            job.wait_for("STEP", [newcomer])
            wait_for_steps([member for member in members if member is not victim], 1)
            check_counts(job.members)
            for member in job.members:
                del member.lines[:-100]
            oldest = [member for member in job.members if member.process.poll() is None]
            assert len(oldest) == 4, number
    seconds.sort()
    print(f"{num_kills} kills: p50 {statistics.median(seconds):.3f} s, p99 {seconds[int(len(seconds) * 0.99)]:.3f} s")
    assert statistics.median(seconds) < 1.0


def test_changes_leak_nothing():
    """REIGEN_TEST_CHANGES=100 for a measurement: descriptors, threads, mappings and memory of one that stays."""
    num_changes = int(os.environ.get("REIGEN_TEST_CHANGES", "8"))

    def held(pid: int) -> dict[str, int]:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {
            "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            "threads": int(status["Threads"]),
            "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
            "kB": int(status["VmRSS"].split()[0]),
        }

    with ElasticProcesses(COUNTING, "100000000", "0.001", max_size=2) as job:
        stays, victim = job.start_first(2)
        found = []
        for _ in range(num_changes):
            wait_for_steps([stays, victim], 3)
            found.append(held(stays.pid))
            kill(job, victim)
            victim = job.start_candidate(1)
            job.wait_for("STEP", [victim])
            del stays.lines[:-100]
    first, last = found[2], found[-1]
    print(first, last)
    assert last["descriptors"] <= first["descriptors"]
    assert last["threads"] <= first["threads"]
    assert last["mappings"] <= first["mappings"] + 8
    assert last["kB"] <= first["kB"] + 2000 + 20 * num_changes
