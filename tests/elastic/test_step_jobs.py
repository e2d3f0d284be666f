"""`hvd.elastic.Job` in real processes: whoever is killed, no sample is lost or repeated, and all weights are equal.

The ledger of samples is the test's: what processes have written before they computed gradients.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from reigen.observe.trace_reader import read_trace
from tests.elastic.elastic_processes import ElasticProcesses, Member
from tests.elastic.fork_server import ForkServer
from tests.elastic.step_ledger import Ledger, count_steps, finish, segments
from tests.elastic.undisturbed_runs import check_undisturbed
from tests.multiprocess.launcher import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts processes of `job_program`."""
    server = ForkServer("tests.elastic.job_program")
    yield server
    server.close()


@pytest.mark.parametrize(("kind", "overlap"), [("norm dropout", "0"), ("norm dropout", "1")])
def test_deaths_at_random_moments_cost_no_sample(server: ForkServer, kind: str, overlap: str, tmp_path: Path):
    """REIGEN_TEST_KILLS: how many die."""
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "7")))
    num_kills = int(os.environ.get("REIGEN_TEST_KILLS", "3"))
    epochs, samples = 3, 75 + 96 * num_kills
    variables = {"KIND": kind, "OVERLAP": overlap}
    with ElasticProcesses(str(epochs), str(samples), "0.01", max_size=4, server=server, **variables) as job:
        newcomers = [job.start_candidate(4 + n, WAITS_FOR=str(tmp_path / str(n))) for n in range(num_kills)]
        job.wait_for("IMPORTED")
        members = job.start_first(4)[num_kills:]
        job.wait_for("STEP 3 ", members)
        for number, newcomer in enumerate(newcomers):
            threading.Event().wait(chances.uniform(0.0, 0.03))
            victim = members.pop(chances.randrange(4))
            victim.kill()
            (tmp_path / str(number)).touch()
            job.wait_for("STEP", [newcomer])
            members.append(newcomer)
        finish(job, members)
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(epochs, samples)


def test_who_is_stopped_in_a_step_is_left_out_at_the_deadline(server: ForkServer):
    with ElasticProcesses("2", "403", "0.02", server=server, REIGEN_DEADLINE="2") as job:
        members = [*job.start_first(3)]
        job.wait_for("STEP 5 ")
        stopped = members.pop(0)
        stopped.kill(signal.SIGSTOP)
        finish(job, members)
        assert stopped.wait() == -signal.SIGKILL
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(2, 403)


#: By slot: where it dies, and in which step.
DEATHS = {
    0: "forward:3",
    1: "middle:6",
    2: "before:9",
    3: "after:12",
}


def test_deaths_at_each_point_leave_the_weights_of_a_run_with_these_members(server: ForkServer, tmp_path: Path):
    """Each run of steps with the same members is made again from a checkpoint, by as many processes, undisturbed."""
    epochs, samples = 2, 203
    first = tmp_path / "first"
    first.mkdir()
    variables = {"EVERY": "1", "SCALER": "1"}
    with ElasticProcesses(str(epochs), str(samples), "0", server=server, CHECKPOINTS=str(first), **variables) as job:
        members = job.start_first(6, {slot: {"DIES_AT": at} for slot, at in DEATHS.items()})
        finish(job, members[4:])
        assert [member.wait() for member in members[:4]] == [-9] * 4
        ledger = Ledger()
        ledger.read(members)
        ledger.check(epochs, samples)
        ends = {line for member in members[4:] for line in member.lines if line.startswith("SETTLED")}
    runs = segments(ledger)
    assert [size for _, _, size in runs] == [6, 5, 4, 3, 2]
    number = runs[-1][1]
    (settled,) = ends
    assert list(map(float, settled.split()[1:])) == pytest.approx(
        [number, 0.05 * 0.9 ** (number // 7), 2.0 ** (10 + number // 5)]
    )
    check_undisturbed(ledger, server, first, (epochs, samples), lambda _: variables)


def test_checkpoints_that_rank_0_writes_alone_are_of_what_all_have_applied(server: ForkServer, tmp_path: Path):
    """While it writes them the others are in the next step, and die there."""
    epochs, samples = 2, 103
    first = tmp_path / "first"
    first.mkdir()
    variables = {"EVERY": "1", "SAVES_ALONE": "1"}
    with ElasticProcesses(str(epochs), str(samples), "0", server=server, CHECKPOINTS=str(first), **variables) as job:
        members = job.start_first(4, {1: {"DIES_AT": "forward:4"}, 2: {"DIES_AT": "after:9"}})
        finish(job, [members[0], members[3]])
        ledger = Ledger()
        ledger.read(members)
        ledger.check(epochs, samples)
    assert [size for _, _, size in segments(ledger)] == [4, 3, 2]
    check_undisturbed(ledger, server, first, (epochs, samples), lambda _: variables)


def test_a_tuned_job_goes_on_when_a_rank_dies_during_the_search(server: ForkServer, tmp_path: Path):
    """Its weights are those of a job that is not tuned, whose members die in the same steps."""
    epochs, samples = 2, 443
    deaths = {1: {"DIES_AT": "before:26"}, 0: {"DIES_AT": "after:46"}}  # 0: who has the search
    log = tmp_path / "log.csv"
    tuned = {"REIGEN_AUTOTUNE": "1", "REIGEN_AUTOTUNE_LOG": str(log), "REIGEN_AUTOTUNE_STEPS_PER_SAMPLE": "1"}
    histories, digests = [], []
    for variables in ({}, tuned | {"REIGEN_AUTOTUNE_WARMUP_SAMPLES": "0"}):
        with ElasticProcesses(str(epochs), str(samples), "0", server=server, WIDTH="27000", **variables) as job:
            members = job.start_first(4, deaths)
            finish(job, members[2:])
            ledger = Ledger()
            ledger.read(members)
        ledger.check(epochs, samples)
        histories.append(segments(ledger))
        digests.append([ledger.digests[number, max(ledger.views[number])] for number in sorted(ledger.views)])
    assert [size for _, _, size in histories[0]] == [4, 3, 2]
    assert histories[0] == histories[1]
    assert digests[0] == digests[1]
    phases = [line.split(",")[10:12] for line in log.read_text().splitlines()[1:]]
    assert ["search", "4"] in phases, "the search had begun"
    assert {"3", "2"} & {ranks for phase, ranks in phases if phase in {"base", "search"}}, "and went on"


def test_a_program_that_catches_everything_goes_on(server: ForkServer):
    with ElasticProcesses("1", "203", "0", server=server, CATCHES="1") as job:
        deaths = {0: {"DIES_AT": "first:4"}, 1: {"DIES_AT": "last:8"}, 2: {"DIES_AT": "change:5"}}
        members = job.start_first(4, deaths)
        finish(job, members[3:])
        assert members[3].says("CAUGHT PeerLostError")
        ledger = Ledger()
        ledger.read(members)
        ledger.check(1, 203)


def test_steps_wait_for_enough_members(server: ForkServer, tmp_path: Path):
    with ElasticProcesses("1", "403", "0.005", server=server, MIN="3") as job:
        newcomer = job.start_candidate(3, WAITS_FOR=str(tmp_path / "go"))
        members = job.start_first(3, {1: {"DIES_AT": "first:4"}})[1:]
        assert members[1].wait() == -9
        threading.Event().wait(0.5)
        assert max(count_steps(member) for member in members) == 4
        (tmp_path / "go").touch()
        rest = [members[0], members[2], newcomer]
        finish(job, rest)
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(1, 403)
        assert set(ledger.sizes.values()) == {3}


def test_a_newcomer_with_another_model_is_told_and_disturbs_nobody(server: ForkServer):
    with ElasticProcesses("1", "803", "0.01", server=server) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ", members)
        wrong = job.start_candidate(2, WIDTH="17")
        assert wrong.wait() == 1
        assert wrong.says("model of this rank is not like that of rank 0")
        assert wrong.says("Start this process with the same program and options as the others")
        finish(job, members)
        ledger = Ledger()
        ledger.read(members)
        ledger.check(1, 803)


def wait_for_steps(members: Sequence[Member], num_steps: int) -> None:
    before = {member: count_steps(member) for member in members}
    until(lambda: all(count_steps(member) >= before[member] + num_steps for member in members))


@pytest.mark.parametrize("shares", ["0", "1"])
def test_members_do_not_wait_for_a_newcomer_that_makes_its_optimizer_and_job(
    server: ForkServer, tmp_path: Path, shares: str
):
    """It asks for its place where its `with` block begins."""
    with ElasticProcesses("1000", "60", "0.005", max_size=3, server=server, SHARE=shares) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        newcomer = job.start_candidate(2, PREPARES_UNTIL=str(tmp_path / "go"))
        job.wait_for("PREPARED 2 3", [newcomer])
        wait_for_steps(members, 20)
        ledger = Ledger()
        ledger.read(members)
        assert {*ledger.sizes.values()} == {2}
        (tmp_path / "go").touch()
        job.wait_for("STEP", [newcomer])
        wait_for_steps([*members, newcomer], 3)
        ledger = Ledger()
        ledger.read([*members, newcomer])
        assert {at: found for at, found in ledger.digests.items() if len(found) > 1} == {}


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_newcomer_whose_memory_is_corrupt_is_left_out_and_says_so(server: ForkServer, overlap: str):
    """No step is lost or applied twice; a later newcomer is taken in."""
    with ElasticProcesses("1000", "60", "0.01", max_size=3, server=server, OVERLAP=overlap) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        newcomer = job.start_candidate(2, CORRUPT="1")
        # it has said all when it leaves the job; who is in no view is killed, if it takes a while to end
        assert newcomer.wait() in {1, -signal.SIGKILL}
        said = "\n".join(newcomer.lines)
        assert "each time other ones have come to rank 2 on host" in said, said
        assert "Leave the host out, and check its memory and network" in said
        assert sum("differs from what was sent" in line for line in newcomer.lines) == 2, (
            "the others wait until it knows"
        )
        assert not newcomer.says("STEP")
        wait_for_steps(members, 3)
        other = job.start_candidate(3)
        job.wait_for("STEP", [other])
        wait_for_steps([*members, other], 3)
        ledger = Ledger()
        ledger.read([*members, other])
        assert {at: found for at, found in ledger.digests.items() if len(found) > 1} == {}
        for member in members:
            numbers = [int(line.split()[1]) for line in list(member.lines) if line.startswith("STEP ")]
            assert numbers == list(range(len(numbers)))


def samples_of(member: Member, number: int) -> list[int]:
    """Samples that a process has taken of a step, in its last attempt."""
    lines = [line for line in list(member.lines) if line.startswith(f"TRY {number} ")]
    return json.loads(lines[-1].split(maxsplit=6)[6])


def first_step_of(member: Member) -> int:
    return next(int(line.split()[1]) for line in list(member.lines) if line.startswith("STEP "))


def test_members_go_on_while_a_newcomer_reads_the_state(server: ForkServer, tmp_path: Path):
    """It takes no samples of its first step; weights are those of a run in which that is so, too."""
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    variables = {"EVERY": "1", "SCALER": "1"}
    more = {"CHECKPOINTS": str(first), "OVERLAP": "1", "UNTIL": "40"}
    with ElasticProcesses("9", "160", "0.01", max_size=3, server=server, **variables, **more) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ", members)
        newcomer = job.start_candidate(2)
        finish(job, [*members, newcomer])
    begin = first_step_of(newcomer)
    assert newcomer.says("READING")
    assert samples_of(newcomer, begin) == []
    assert len(samples_of(newcomer, begin + 1)) in {5, 6}
    assert sum(len(samples_of(member, begin)) for member in members) == 16
    assert max(int(line.split()[-1]) for member in members for line in member.lines if line.startswith("DONE")) == 0
    ledger = Ledger()
    ledger.read(job.members)
    more = {"CHECKPOINTS": str(again), "RESUME": str(first / f"{begin}.pt"), "DEALT": "2", "UNTIL": str(begin + 4)}
    with ElasticProcesses("9", "160", "0", server=server, **variables, **more) as job:
        finish(job, job.start_first(3))
        undisturbed = Ledger()
        undisturbed.read(job.members)
    for number in range(begin, begin + 4):
        (expected,) = undisturbed.digests[number, 1]
        assert ledger.digests[number, max(ledger.views[number])] == {expected}, number


@pytest.mark.parametrize("dead", ["source", "newcomer"])
def test_a_death_while_newcomers_read_the_state_costs_no_sample(server: ForkServer, tmp_path: Path, dead: str):
    go = tmp_path / "go"
    with ElasticProcesses("3", "400", "0.01", max_size=5, server=server, OVERLAP="1", KIND="norm") as job:
        members = [*job.start_first(3)]
        job.wait_for("STEP 3 ", members)
        newcomers = [job.start_candidate(3 + number, READS_WHEN=str(go)) for number in range(2)]
        until(lambda: any(newcomer.says("READING") for newcomer in newcomers))
        reading = next(newcomer for newcomer in newcomers if newcomer.says("READING"))
        victim = members[0] if dead == "source" else reading
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
        go.touch()
        finish(job, [member for member in job.members if member is not victim])
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(3, 400)


@pytest.mark.parametrize("dead", ["member", "newcomer"])
def test_a_death_when_newcomers_have_read_the_state_undoes_no_step(server: ForkServer, dead: str):
    """All sums are there: those who are left, newcomers too, go on with them in the next view."""
    dies = {"DIES_AT": "digest:0"}
    with ElasticProcesses("8", "400", "0.01", max_size=4, server=server, OVERLAP="1", KIND="norm") as job:
        members = [*job.start_first(3, {1: dies} if dead == "member" else {})]
        job.wait_for("STEP 3 ", members)
        newcomer = job.start_candidate(3, **(dies if dead == "newcomer" else {}))
        victim = members[1] if dead == "member" else newcomer
        assert victim.wait() == -signal.SIGKILL
        finish(job, [member for member in job.members if member is not victim])
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(8, 400)
        ends = [line for member in job.members for line in member.lines if line.startswith("DONE")]
    assert {line.split()[-1] for line in ends} == {"0"}, "a step was undone"


@pytest.mark.parametrize(
    ("victim", "missing", "goes_on"),
    [(1, 3, False), (0, 3, False), (1, 2, False), (1, 3, True)],
    ids=["newcomer has not", "newcomer has not, and the source died", "member has not", "others have applied the step"],
)
def test_a_death_when_some_have_compared_what_newcomers_read_undoes_no_step(
    server: ForkServer, victim: int, missing: int, goes_on: bool
):
    """Who has compared the state answers for its source, and nobody gets the state again."""
    waits = {} if goes_on else {"HESITATES": "digests"}
    variables = dict.fromkeys(range(4), waits) | {missing: {"MISSES": "digests"}, victim: {"DIES_AT": "compared:0"}}
    with ElasticProcesses("8", "400", "0.01", max_size=4, server=server, OVERLAP="1", KIND="norm") as job:
        members = [*job.start_first(3, {slot: variables[slot] for slot in range(3)})]
        job.wait_for("STEP 3 ", members)
        newcomer = job.start_candidate(3, **variables[3])
        assert members[victim].wait() == -signal.SIGKILL
        finish(job, [member for member in job.members if member is not members[victim]])
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(8, 400)
    assert sum("READING" in line for line in newcomer.lines) == 1
    if not goes_on:
        ends = [line for member in job.members for line in member.lines if line.startswith("DONE")]
        assert {line.split()[-1] for line in ends} == {"0"}, "a step was undone"


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_newcomer_gives_away_no_state_that_was_not_compared(server: ForkServer, tmp_path: Path, overlap: str):
    """Before its first step; and what it asks for then disturbs nobody."""
    path = tmp_path / "never.pt"
    with ElasticProcesses("9", "160", "0.01", max_size=3, server=server, OVERLAP=overlap, UNTIL="40") as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ", members)
        newcomer = job.start_candidate(2, SAVES_FIRST=str(path))
        finish(job, [*members, newcomer])
        ledger = Ledger()
        ledger.read(job.members)
    has = next(line for line in newcomer.lines if line.startswith("HAS"))
    if overlap == "1":
        assert "is compared with that of its source in its first step: call state_dict() after that step" in has
    else:
        assert has == f"HAS {first_step_of(newcomer)}"
    assert not path.exists()
    assert {at: found for at, found in ledger.digests.items() if len(found) > 1} == {}
    assert all(line.endswith(" 0") for line in members[0].lines if line.startswith("DONE")), "a step was undone"


@pytest.mark.parametrize("kind", ["counts", "counts data"])
def test_parameters_that_forward_changes_and_the_optimizer_does_not_have_are_undone_with_a_step(
    server: ForkServer, kind: str
):
    """Also in the first step, and in a newcomer's first one."""
    with ElasticProcesses("1", "960", "0.01", max_size=6, server=server, KIND=kind) as job:
        deaths = {0: {"DIES_AT": "forward:0"}, 1: {"DIES_AT": "middle:3"}, 2: {"DIES_AT": "forward:6"}}
        members = job.start_first(5, deaths)
        job.wait_for("STEP 8 ", members[3:])
        newcomer = job.start_candidate(5)
        job.wait_for("TRY", [newcomer])
        members[3].kill()
        finish(job, [members[4], newcomer])
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(1, 960)
    for member in job.members:
        behind = [line.split()[1:] for line in member.lines if line.startswith("BEHIND")]
        for number, *_, is_applied, found in behind:
            count = torch.tensor([int(number) + (is_applied == "True")], dtype=torch.float32)
            assert found == hashlib.sha256(count.numpy().tobytes()).hexdigest()[:16], (number, is_applied)
    assert any(" False " in line for line in members[4].lines if line.startswith("BEHIND")), "no step was undone"


def test_a_step_whose_result_dies_with_its_only_member_is_undone_and_told_to_be_applied_later(server: ForkServer):
    """Rank 0 alone has applied it, and dies when it gives the state to the others."""
    variables = {"KIND": "norm", "PARTS": "4"}
    deaths = {0: {"DIES_AT": "sends:0"}, 1: {"DIES_AT": "before:5"}}
    with ElasticProcesses("1", "160", "0", server=server, **variables) as job:
        members = job.start_first(4, {**deaths, 2: {"HESITATES": "update:5"}, 3: {"HESITATES": "update:5"}})
        finish(job, members[2:])
        ledger = Ledger()
        ledger.read(job.members)
    with ElasticProcesses("1", "160", "0", server=server, **variables) as job:
        (alone,) = job.start_first(1)
        finish(job, [alone])
    assert ledger.digests[5, 1] == ledger.digests[5, 3], "rank 0 had applied it"
    expected = [line.split()[-1] for line in alone.lines if line.startswith("BEHIND")]
    for member in members[2:]:
        behind = [line.split()[1:] for line in member.lines if line.startswith("BEHIND")]
        assert [(words[0], words[4]) for words in behind[5:7]] == [("5", "False"), ("5", "True")]
        assert [words[-1] for words in behind if words[4] == "True"] == expected, "buffers are those of steps made once"
        assert member.says("DONE")
        assert next(line for line in member.lines if line.startswith("DONE")).endswith(" 1")


def test_a_program_that_changes_weights_in_a_step_has_newcomers_get_the_state_again(server: ForkServer):
    variables = {"OVERLAP": "1", "CHANGES_WEIGHTS": "1", "UNTIL": "40"}
    with ElasticProcesses("9", "160", "0.01", max_size=3, server=server, **variables) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ", members)
        newcomer = job.start_candidate(2)
        finish(job, [*members, newcomer])
        ledger = Ledger()
        ledger.read(job.members)
    assert newcomer.says("READING")
    assert sum("differs from what was sent" in line for line in newcomer.lines) == 1
    assert {at: found for at, found in ledger.digests.items() if len(found) > 1} == {}
    numbers = [int(line.split()[1]) for line in members[0].lines if line.startswith("STEP ")]
    assert numbers == list(range(40)), "nothing is run again"


def test_a_job_that_ends_while_a_newcomer_reads_the_state_waits_for_it(server: ForkServer):
    with ElasticProcesses("9", "160", "0.01", max_size=3, server=server, OVERLAP="1", UNTIL_SIZE="3") as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ", members)
        newcomer = job.start_candidate(2)
        finish(job, [*members, newcomer])
    assert newcomer.says("READING")
    assert not newcomer.says("STEP")


def regions(member: Member) -> set[str]:
    """Files of registered memory that a process has mapped, by number."""
    lines = Path(f"/proc/{member.process.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:reigen-region" in line}


def test_members_that_stay_use_their_registered_memory_again(server: ForkServer):
    """A newcomer adds its own; behind a death all is new, and nothing of the dead one is kept."""
    with ElasticProcesses("1000", "60", "0.01", max_size=3, server=server) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        first = regions(members[0])
        assert regions(members[1]) == first
        assert len(first) == 2
        newcomer = job.start_candidate(2)
        job.wait_for("STEP", [newcomer])
        wait_for_steps([*members, newcomer], 3)
        second = regions(newcomer)
        assert len(second) == 3
        assert second > first
        assert [regions(member) for member in members] == [second] * 2
        newcomer.kill()
        assert newcomer.wait() == -9
        wait_for_steps(members, 3)
        until(lambda: all(len(regions(member)) == 2 and not regions(member) & second for member in members))
        ledger = Ledger()
        ledger.read([*members, newcomer])
        assert {at: found for at, found in ledger.digests.items() if len(found) > 1} == {}


def test_a_program_that_fails_on_one_rank_ends_there(server: ForkServer):
    with ElasticProcesses("1", "203", "0", server=server) as job:
        failing, *members = job.start_first(3, {0: {"FAIL_AT": "5"}})
        assert failing.wait() == 1
        assert failing.says("OSError")
        finish(job, members)
        ledger = Ledger()
        ledger.read(members)
        assert sorted(ledger.views) == list(range(13))


def test_weights_that_exist_once_a_host(server: ForkServer):
    with ElasticProcesses("2", "203", "0", server=server, SHARE="1") as job:
        deaths = {0: "forward:3", 1: "middle:6", 2: "last:9", 3: "update:12", 4: "after:15"}
        members = job.start_first(7, {slot: {"DIES_AT": at} for slot, at in deaths.items()})
        finish(job, members[5:])
        ledger = Ledger()
        ledger.read(members)
        ledger.check(2, 203)


def test_a_newcomer_gets_shared_weights_behind_the_step_in_whose_update_an_owner_died(server: ForkServer) -> None:
    with ElasticProcesses("1", "1603", "0.01", server=server, SHARE="1") as job:
        members = [*job.start_first(3, {1: {"DIES_AT": "joined:0"}})]
        job.wait_for("STEP 3 ", members)
        newcomer = job.start_candidate(3)
        assert members[1].wait() == -9
        finish(job, [members[0], members[2], newcomer])
        ledger = Ledger()
        ledger.read(job.members)
        ledger.check(1, 1603)
        assert all(line.endswith(" 0") for line in members[0].lines if line.startswith("DONE")), "no step is undone"


def test_parts_have_the_same_bits_whoever_the_members_are(server: ForkServer):
    variables = {"KIND": "norm dropout", "PARTS": "6", "BATCH": "24"}
    with ElasticProcesses("1", "240", "0", server=server, **variables) as job:
        members = job.start_first(4, {0: {"DIES_AT": "forward:2"}, 2: {"DIES_AT": "before:5"}})
        finish(job, [members[1], members[3]])
        ledger = Ledger()
        ledger.read(members)
        ledger.check(1, 240)
    with ElasticProcesses("1", "240", "0", server=server, **variables) as job:
        finish(job, job.start_first(1))
        alone = Ledger()
        alone.read(job.members)
    for number in range(10):
        assert ledger.digests[number, max(ledger.views[number])] == alone.digests[number, 1], number


def test_a_timeline_goes_on_over_all_views_whoever_dies(server: ForkServer, tmp_path: Path) -> None:
    """Rank 0 writes it, and dies twice: whoever is rank 0 then continues the file."""
    path = tmp_path / "timeline.json"
    path.write_text("[]")  # of an earlier job: it is replaced
    with ElasticProcesses("1", "203", "0.05", server=server, REIGEN_TIMELINE=str(path)) as job:
        members = job.start_first(4, {0: {"DIES_AT": "forward:3"}, 1: {"DIES_AT": "middle:6"}})
        assert [member.wait() for member in members[:2]] == [-9, -9]
        finish(job, members[2:])
    events = json.loads(path.read_bytes())
    views = [event for event in events if event.get("cat") == "view"]
    assert [(event["ph"], event["name"]) for event in views] == [
        ("B", "view 1: 4 ranks"),
        ("E", ""),
        ("B", "view 2: 3 ranks"),
        ("E", ""),
        ("B", "view 3: 2 ranks"),
    ]
    assert "rank 0 left" in views[2]["args"]["change"]
    times = [event["ts"] for event in views]
    assert times == sorted(times)
    trace = read_trace(path)
    assert (trace.view, trace.size, [number for number, _ in trace.views]) == (3, 2, [1, 2, 3])
    assert sorted(trace.names) == [0, 1]
    assert trace.steps[1]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.partition(" (")[0] for name in names} == {"views", "rank 0", "rank 1", "rank 2", "rank 3"}
