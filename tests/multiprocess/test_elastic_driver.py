"""Elastic members as real processes: they are killed and stopped, come and leave."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from contextlib import suppress
from pathlib import Path

import pytest

from reigen.cluster.environ import ELASTIC_VIEW_KEY
from tests.multiprocess.elastic_lab import Lab, LabProcess, elastic_lab

_SEED = int(os.environ.get("REIGEN_ELASTIC_SEED", "1"))
_ROUNDS = int(os.environ.get("REIGEN_ELASTIC_ROUNDS", "20"))


def kill(victims: list[LabProcess], members: list[LabProcess]) -> float:
    """Kill members; returns when the last one was."""
    at = max(victim.signal(signal.SIGKILL) for victim in victims)
    for victim in victims:
        members.remove(victim)
    return at


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_members_go_on_after_deaths() -> None:
    with elastic_lab(["a"] * 4) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        assert epoch == 1
        lab.make_steps(members)
        for victims in ([members[3]], [members[0]], [members[1]]):
            kill(victims, members)
            epoch, _ = lab.run_view(members, epoch)
            lab.make_steps(members)
        assert len(members) == 1


def test_the_launcher_hears_once_what_is_done_again_though_members_wait_for_others() -> None:
    """A view that is too small is told as the one behind the death; when others have come, nothing more is lost."""
    with elastic_lab(["a", "a"], (2, 4)) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        lab.make_steps(members)
        kill(members[1:], members)
        lab.until(lambda: len(members[0].told("note")) > 0, "the small view is told")
        members.append(lab.candidate(1))
        epoch, _ = lab.run_view(members, epoch)
        told = members[0].told("note")
        assert [what for number, what in told if number <= epoch] == ["commit", *["nothing"] * (len(told) - 1)], told
        assert len(told) > 1
        lab.make_steps(members)
        kill(members[1:], members)
        lab.until(lambda: len(members[0].told("note")) > len(told), "a step has been run: the next death is told anew")
        assert members[0].told("note")[len(told)][1] == "commit"


def test_deaths_at_random_moments() -> None:
    """Of one, of several, of all but one, of rank 0, and of more in the middle of the change; others take their places.

    No step that anybody has applied is lost: `LabPlane.roll`, and each view begins where the one before has ended.
    """
    rng = random.Random(_SEED)
    seconds: list[float] = []
    with elastic_lab(["a", "a", "a", "b"]) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        for number in range(_ROUNDS):
            time.sleep(rng.random() * 0.03)  # any moment of a step
            first = keep_a_quorum(rng.sample(members, rng.choice((1, 1, 1, 2, len(members) - 1))), members)
            at = kill(first, members)
            later = keep_a_quorum(rng.sample(members, min(1, len(members) - 1)), members) if rng.random() < 0.5 else []
            if later:
                time.sleep(rng.random() * 0.03)  # any moment of the change
                at = kill(later, members)
            epoch, began = lab.run_view(members, epoch - 1 if not first + later else epoch)
            seconds.append(began - at)
            lab.make_steps(members, 2)
            members += refill(lab, first + later, number)
            epoch, _ = lab.run_view(members, epoch)
        check_steps(lab)
    seconds.sort()
    print(f"death to the next view: median {statistics.median(seconds):.3f} s, worst {seconds[-1]:.3f} s")
    assert statistics.median(seconds) < 1.0


def test_faults_of_all_kinds_together() -> None:
    """Deaths, stops, notices, changes for nothing and candidates that die, each in the middle of what another began."""
    rng = random.Random(_SEED)
    with elastic_lab(["a", "a", "a", "b"], timeouts={"stuck": 1.0, "kill": 0.1}) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        for number in range(_ROUNDS // 4):
            gone: list[LabProcess] = []
            for kind in rng.sample(["kill", "stop", "leave", "change", "candidate"], 2):
                victim = rng.choice(members)
                if kind == "change":
                    victim.order("change", "for nothing")
                elif kind == "candidate":
                    lab.candidate(5, incarnation=number).signal(signal.SIGKILL)
                elif len(members) > 1 and keep_a_quorum([victim], members):
                    members.remove(victim)
                    gone.append(victim)
                    end(kind, victim, members[0])
                time.sleep(rng.random() * 0.02)  # any moment of the change
            epoch, _ = lab.run_view(members, epoch - 1)
            lab.make_steps(members, 2)
            for each in gone:
                with suppress(ProcessLookupError):
                    each.signal(signal.SIGCONT)
                assert lab.exit_code(each) in {0, 75, -signal.SIGKILL}
            members += refill(lab, gone, number)
            epoch, _ = lab.run_view(members, epoch - 1)
            lab.make_steps(members, 2)
        check_steps(lab)


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "exit_code"), [(0, -signal.SIGKILL), (1, -signal.SIGKILL), (3, 75)], ids=str)
def test_who_is_stopped_while_a_view_is_built_is_left_out_soon(stopped: int, exit_code: int) -> None:
    """Nobody waits for it as long as for those who build, and say so; woken, it does no harm."""
    timeouts = {"stuck": 3.0, "kill": 0.1, "install": 300.0}
    with elastic_lab(["a", "a", "a", "b"], timeouts=timeouts, stops_in={stopped: 2}) as lab:
        members = lab.alive()
        lab.run_view(members)
        lab.make_steps(members)
        lab.processes[2, 0].signal(signal.SIGKILL)
        rest = [each for each in members if each.slot not in {2, stopped}]
        lab.run_view(rest)
        lab.make_steps(rest)
        with suppress(ProcessLookupError):
            lab.processes[stopped, 0].signal(signal.SIGCONT)
        assert lab.exit_code(lab.processes[stopped, 0]) == exit_code
        lab.make_steps(rest)


@pytest.mark.slow
def test_who_builds_for_long_is_waited_for() -> None:
    with elastic_lab(["a", "a", "a", "b"], timeouts={"stuck": 1.0, "kill": 0.1}, build_seconds=3.0) as lab:
        members = lab.alive()
        lab.run_view(members)
        lab.processes[2, 0].signal(signal.SIGKILL)
        rest = [each for each in members if each.slot != 2]
        epoch, _ = lab.run_view(rest)
        assert epoch == 2
        lab.make_steps(rest)


def end(kind: str, victim: LabProcess, witness: LabProcess) -> None:
    """Let a member die, be stopped for long, or leave."""
    if kind == "leave":
        victim.order("leave")
        return
    victim.signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "stop":
        witness.order("stuck", *victim.id)


def keep_a_quorum(victims: list[LabProcess], members: list[LabProcess]) -> list[LabProcess]:
    """Return those who may die: some process must be left on the host that decides if two are there."""
    view_hosts = [lab_host(each) for each in members]
    left = [each for each in members if each not in victims]
    if "b" not in view_hosts or any(lab_host(each) == "a" for each in left):
        return victims
    spared = next(each for each in victims if lab_host(each) == "a")
    return [each for each in victims if each is not spared]


def lab_host(process: LabProcess) -> str:
    return "b" if process.slot == 3 else "a"


def refill(lab: Lab, gone: list[LabProcess], number: int) -> list[LabProcess]:
    return [lab.candidate(each.slot, lab_host(each), number + 1) for each in gone]


def check_steps(lab: Lab) -> None:
    """Assert that no view begins before a step that was applied in an earlier one."""
    bases: dict[int, set[int]] = {}
    for process in lab.processes.values():
        for _, epoch, _, target, *_ in process.runs():
            bases.setdefault(epoch, set()).add(target)
    assert all(len(targets) == 1 for targets in bases.values()), bases
    order = [min(bases[epoch]) for epoch in sorted(bases)]
    assert order == sorted(order)


# -- a witness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dir", "launcher"])
@pytest.mark.parametrize("victim", [0, 1])
def test_either_of_two_hosts_goes_on_with_a_witness(tmp_path: Path, kind: str, victim: int) -> None:
    with elastic_lab(["a", "b"], witness=kind if kind == "launcher" else f"dir:{tmp_path}") as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        kill([members[victim]], members)
        epoch, _ = lab.run_view(members, epoch)
        lab.make_steps(members)
        if victim == 0:  # two hosts again, and the other one dies
            members.append(lab.candidate(0, "a"))
            epoch, _ = lab.run_view(members, epoch)
            kill([members[0]], members)
            lab.run_view(members, epoch)
            lab.make_steps(members)


@pytest.mark.parametrize(("is_with_witness", "stopped"), [(True, [0, 1]), (True, [2, 3]), (False, [2, 3])])
def test_half_of_four_hosts_goes_on_and_the_other_half_is_fenced(
    tmp_path: Path, is_with_witness: bool, stopped: list[int]
) -> None:
    """Without a witness that half which has rank 0. The others are stopped, and find that they were left behind."""
    options = {"witness": f"dir:{tmp_path}"} if is_with_witness else {}
    hosts = ["a", "b", "c", "d"]
    with elastic_lab(hosts, timeouts={"stuck": 0.3, "kill": 0.1}, **options) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        halted = [members[rank] for rank in stopped]
        going = [each for each in members if each not in halted]
        for each in halted:
            each.signal(signal.SIGSTOP)
        for each in halted:
            going[0].order("stuck", *each.id)
        lab.run_view(going, epoch)
        lab.make_steps(going)
        for each in halted:
            each.signal(signal.SIGCONT)
        assert [lab.exit_code(each) for each in halted] == [75, 75]
        lab.make_steps(going)


def test_without_a_witness_the_second_of_two_hosts_says_how_to_name_one() -> None:
    with elastic_lab(["a", "b"], timeouts={"change": 1.0}) as lab:
        first, second = lab.alive()
        lab.run_view([first, second])
        first.signal(signal.SIGKILL)
        assert lab.exit_code(second) == 1
        assert "--witness-dir" in second.told("end")[0][1]


def test_a_witness_that_has_lost_its_memory_votes_again_in_the_next_view(tmp_path: Path) -> None:
    with elastic_lab(["a", "a", "b"], witness=f"dir:{tmp_path}") as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        lab.until(lambda: any(tmp_path.glob("*/state.1")), "the witness is told of the first view")
        for file in tmp_path.glob("*/state.*"):
            file.unlink()
        kill([members[1]], members)  # both hosts are a quorum, and learn of the witness's new life
        epoch, _ = lab.run_view(members, epoch)
        while not has_new_witness(members):  # a view has what was answered before it was decided
            members[0].order("change", "to have its new life in a view")
            epoch, _ = lab.run_view(members, epoch)
        kill([members[0]], members)
        lab.run_view(members, epoch)
        lab.make_steps(members)


def has_new_witness(members: list[LabProcess]) -> bool:
    """Whether the newest view of each member has another life of the witness than the first one."""
    lives = [[incarnation for _, incarnation in each.told("witness")] for each in members]
    return all(each[-1] != each[0] for each in lives)


# -- processes that are stopped ----------------------------------------------------------------------------------------


def test_who_was_stopped_is_fenced() -> None:
    """On another host: nobody there can kill it, and it learns that the others have gone on without it."""
    with elastic_lab(["a", "a", "b"], timeouts={"stuck": 0.3, "kill": 0.1}) as lab:
        first, second, stopped = lab.alive()
        lab.run_view([first, second, stopped])
        stopped.signal(signal.SIGSTOP)
        first.order("stuck", *stopped.id)
        lab.run_view([first, second], 1)
        lab.make_steps([first, second])

        stopped.signal(signal.SIGCONT)

        assert lab.exit_code(stopped) == 75
        (code, reason) = stopped.told("end")[0]
        assert code == 75
        assert "without this process" in reason
        lab.make_steps([first, second])


def test_who_was_stopped_on_the_same_host_is_killed() -> None:
    with elastic_lab(["a"] * 3, timeouts={"stuck": 0.3}) as lab:
        stopped, *others = lab.alive()
        lab.run_view([stopped, *others])
        stopped.signal(signal.SIGSTOP)
        others[0].order("stuck", *stopped.id)

        lab.run_view(others, 1)

        assert lab.exit_code(stopped) == -signal.SIGKILL
        assert "did not come" in others[0].runs()[-1][4]


def test_whom_another_has_given_up_is_not_waited_for_if_he_is_stopped() -> None:
    """Who leads the change has noticed nothing itself; a member that runs would get the time in which it can answer."""
    with elastic_lab(["a"] * 3, timeouts={"stuck": 300.0}) as lab:
        stopped, *others = lab.alive()
        lab.run_view([stopped, *others])
        stopped.signal(signal.SIGSTOP)
        others[1].order("stuck", *stopped.id)

        lab.run_view(others, 1)

        assert lab.exit_code(stopped) == -signal.SIGKILL


@pytest.mark.parametrize("slow", [0, 2])
def test_who_stops_its_plane_slowly_has_told_the_others_and_is_no_suspect(slow: int) -> None:
    """A collective has waited for it, and it is in an update now: the others hear of it before that ends."""
    with elastic_lab(["a"] * 3, revoke_seconds={str(slow): 2.0}, timeouts={"late": 1.0}) as lab:
        members = lab.alive()
        lab.run_view(members)
        for each in members:
            if each.slot != slow:
                each.order("late", *members[slow].id)
        members[1].order("change", "the collective has failed")
        lab.run_view(members, 1)
        lab.make_steps(members)
        assert [len(each.runs()) for each in members] == [2, 2, 2], lab.story()


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 2])
def test_an_update_that_takes_longer_than_silence_may_last_costs_nobody_its_place(slow: int) -> None:
    times = {"stuck": 3.0, "install": 60.0}
    with elastic_lab(["a"] * 3, revoke_seconds={str(slow): 7.0}, timeouts=times) as lab:
        members = lab.alive()
        lab.run_view(members)
        members[1].order("change", "a change that has another reason")
        lab.run_view(members, 1)
        lab.make_steps(members)
        assert [len(each.runs()) for each in members] == [2, 2, 2], lab.story()


def test_stopped_for_a_moment() -> None:
    """Nothing happens to a process of which nobody says that it is stuck."""
    with elastic_lab(["a"] * 3) as lab:
        members = lab.alive()
        lab.run_view(members)
        members[1].signal(signal.SIGSTOP)
        time.sleep(0.3)
        members[1].signal(signal.SIGCONT)
        lab.make_steps(members)
        assert [len(each.runs()) for each in members] == [1, 1, 1]


# -- who comes ---------------------------------------------------------------------------------------------------------


def test_candidates_join_at_one_step() -> None:
    """Two at once, one of them on a host of its own; then one in the place of a dead one."""
    with elastic_lab(["a", "a"]) as lab:
        members = lab.alive()
        lab.run_view(members)
        members += [lab.candidate(2), lab.candidate(3, "spare host")]
        epoch, _ = lab.run_view(members)
        lab.make_steps(members)
        targets = {run[3] for each in members for run in each.runs() if run[1] == epoch}
        assert len(targets) == 1
        assert targets != {0}

        kill([members[0]], members)
        members.append(lab.candidate(0, incarnation=1))
        epoch, _ = lab.run_view(members, epoch)
        lab.make_steps(members)
        assert members[-1].runs()[-1][2][0] == members[0].id, "who has the state is rank 0"


def test_candidates_that_die_disturb_nobody_for_long() -> None:
    rng = random.Random(_SEED)
    with elastic_lab(["a"] * 2) as lab:
        members = lab.alive()
        lab.run_view(members)
        for number in range(6):
            candidate = lab.candidate(2, incarnation=number)
            time.sleep(rng.random() * 0.1)
            candidate.signal(signal.SIGKILL)
            lab.exit_code(candidate)
        last = lab.candidate(2, incarnation=6)
        lab.run_view([*members, last])
        lab.make_steps([*members, last])


def test_a_candidate_answers_for_the_voter_of_a_host_whose_members_are_dead() -> None:
    """Two hosts with one member each: the vote of the first one is needed, and nobody is left there but who comes."""
    with elastic_lab(["a", "b"], sizes=(1, 2)) as lab:
        first, second = lab.alive()
        lab.run_view([first, second])
        lab.until(lambda: ELASTIC_VIEW_KEY in lab.told_service, "a candidate can find the view")
        first.signal(signal.SIGKILL)
        lab.until(lambda: bool(second.told("revoke")), "the change begins")
        newcomer = lab.candidate(0, "a")

        epoch, _ = lab.run_view([second, newcomer], 1)
        lab.make_steps([second, newcomer])

        assert newcomer.runs()[-1][2][0] == second.id, "who has the state is rank 0"
        assert epoch == 2


def test_no_more_than_the_largest_size() -> None:
    with elastic_lab(["a"] * 2, sizes=(2, 3)) as lab:
        members = lab.alive()
        lab.run_view(members)
        third = lab.candidate(2)
        epoch, _ = lab.run_view([*members, third])
        fourth = lab.candidate(3)
        lab.make_steps([*members, third])
        assert not fourth.told("build")

        kill([members[1]], members)
        lab.run_view([*members, third, fourth], epoch)


def test_too_few_wait_for_more() -> None:
    with elastic_lab(["a"] * 2, sizes=(2, 2)) as lab:
        members = lab.alive()
        lab.run_view(members)
        kill([members[0]], members)
        lab.until(lambda: len(members[0].told("roll")) == 2, "a view of one")
        assert len(members[0].runs()) == 1
        members.append(lab.candidate(0))
        lab.run_view(members, 1)
        lab.make_steps(members)


@pytest.mark.parametrize("stopped", [0, 3])
def test_newcomers_do_not_wait_for_a_host_that_is_stopped_while_there_are_too_few(stopped: int) -> None:
    """No step shows that its processes are stopped, and newcomers are to be answered by each host: it is left out."""
    with elastic_lab(["a", "a", "b", "c"], (4, 8), timeouts={"stuck": 0.5, "kill": 0.1}) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        lab.make_steps(members)
        kill(members[1:2], members)
        lab.until(lambda: all(is_waiting(each) for each in members), "there are too few")
        victim = lab.processes[stopped, 0]
        victim.signal(signal.SIGSTOP)
        rest = [each for each in members if each is not victim]

        rest += [lab.candidate(4, "b"), lab.candidate(5, "b")]

        lab.run_view(rest, epoch)
        lab.make_steps(rest)
        victim.signal(signal.SIGCONT)
        assert lab.exit_code(victim) == 75


def is_waiting(process: LabProcess) -> bool:
    """Whether it says so at last; it is asked again and again."""
    process.order("ask")
    return process.told("state")[-1:] == [["waiting", []]]


def test_too_few_for_too_long() -> None:
    with elastic_lab(["a"] * 2, sizes=(2, 2), timeouts={"wait": 0.3}) as lab:
        members = lab.alive()
        lab.run_view(members)
        kill([members[0]], members)
        assert lab.exit_code(members[0]) == 1
        assert "HOROVOD_ELASTIC_TIMEOUT" in members[0].told("end")[0][1]


@pytest.mark.parametrize("is_known", [False, True])
def test_candidate_without_members_ends(is_known: bool) -> None:
    with elastic_lab(["a"] * is_known) as lab:
        for member in lab.alive():
            lab.run_view([member])
            member.signal(signal.SIGKILL)
        candidate = lab.candidate(1, timeouts={"wait": 0.5})
        assert lab.exit_code(candidate) == 1
        assert "have not taken this process in" in candidate.told("end")[0][1]


def test_wrong_secret() -> None:
    with elastic_lab(["a"] * 2) as lab:
        members = lab.alive()
        lab.run_view(members)
        stranger = lab.candidate(2, secret=(b"x" * 32).hex(), timeouts={"wait": 1.0})
        assert lab.exit_code(stranger) == 1
        lab.make_steps(members)
        assert [len(each.runs()) for each in members] == [1, 1]


# -- who leaves --------------------------------------------------------------------------------------------------------


def test_leave() -> None:
    """No step is lost or made again: all stop at one."""
    with elastic_lab(["a"] * 3, timeouts={"kill": 0.2}) as lab:
        leaving, *others = lab.alive()
        lab.run_view([leaving, *others])
        lab.make_steps(others)
        leaving.order("leave")
        assert lab.exit_code(leaving) == 0
        lab.run_view(others, 1)
        lab.make_steps(others)
        stopped = {line[1] for each in (leaving, *others) for line in each.told("revoke")}
        assert stopped == {others[0].runs()[-1][3]}
        assert leaving.told("end") == [[0, "left in good order"]]
        assert [each.runs()[-1][-2:] for each in others] == [["processes come or leave", True]] * 2


def test_last_member_leaves() -> None:
    with elastic_lab(["a"]) as lab:
        (member,) = lab.alive()
        lab.run_view([member])
        member.order("leave")
        assert lab.exit_code(member) == 0


def test_finish() -> None:
    """The ends of those who have finished begin no change; `elastic/finished` is at the rendezvous."""
    with elastic_lab(["a"] * 3, last=40) as lab:
        members = lab.alive()
        assert [lab.exit_code(each) for each in members] == [0, 0, 0], lab.story()
        assert [len(each.runs()) for each in members] == [1, 1, 1]
        assert [each.told("finished") for each in members] == [[[40]]] * 3
        assert [each.told("closed") for each in members] == [[[2]]] * 3, "the main thread and that of orders are left"


def test_who_has_finished_is_left_out_of_a_later_change() -> None:
    """The others go on without it: `finished` names it, and another view has no place for it."""
    with elastic_lab(["a"] * 3, finishing={"1": 20}) as lab:
        first, finished, last = lab.alive()
        assert lab.exit_code(finished) == 0
        first.order("ask")
        lab.until(lambda: bool(first.told("state")), "it tells its state")
        assert first.told("state") == [["running", [finished.id]]]
        assert len(first.runs()) == 1

        first.order("change", "a collective needs rank 1, which has finished")

        lab.run_view([first, last], 1)
        lab.make_steps([first, last])


# -- changes that are asked for ----------------------------------------------------------------------------------------


def test_same_members_in_another_view() -> None:
    with elastic_lab(["a", "a", "b"]) as lab:
        members = lab.alive()
        lab.run_view(members)
        members[1].order("change", "the engine gave up")
        lab.run_view(members, 1)
        lab.make_steps(members)
        assert members[1].runs()[-1][4] == "rank 1: the engine gave up"
        assert all("asked for it" in members[rank].runs()[-1][4] for rank in (0, 2)), lab.story()


def test_changes_leave_nothing_behind() -> None:
    """Descriptors, after members have come, died, and changed for nothing."""
    with elastic_lab(["a"] * 3) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        counts = []
        for number in range(9):
            members[0].order("change", "for nothing")
            epoch, _ = lab.run_view(members, epoch)
            if number % 3 == 2:
                slot = members[2].slot
                kill([members[2]], members)
                epoch, _ = lab.run_view(members, epoch)
                members.append(lab.candidate(slot, incarnation=number))
                epoch, _ = lab.run_view(members, epoch)
                lab.make_steps(members)
                before = len(members[0].told("count"))
                members[0].order("count")
                lab.until(lambda before=before: len(members[0].told("count")) > before, "it counts")
                counts.append(members[0].told("count")[-1][0])
        assert max(counts) <= counts[0] + 1, counts


def test_build_that_fails_is_tried_again() -> None:
    with elastic_lab(["a"] * 2, failing={"1": 2}) as lab:
        members = lab.alive()
        epoch, _ = lab.run_view(members)
        assert epoch == 3
        lab.make_steps(members)


def test_build_that_always_fails_ends_its_process() -> None:
    with elastic_lab(["a"] * 2, failing={"1": 1000}) as lab:
        other, failing = lab.alive()
        assert lab.exit_code(failing) == 1
        assert "its build failed" in failing.told("end")[0][1]
        lab.run_view([other])
        lab.make_steps([other])
