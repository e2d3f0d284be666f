"""Warm spares of a `hvd.elastic.Job` in real processes: they take over with the state that they have.

That a spare takes no samples is seen from what processes have written; what its weights should be, from runs of jobs
that know of no spares, in which the test itself deals the samples to the first ranks alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from reigen.elastic.cursor import Part
from reigen.torch.elastic.parts import PartwiseTraining
from reigen.torch.elastic.training import TorchTraining
from tests.elastic.elastic_processes import ElasticProcesses, Member
from tests.elastic.fork_server import ForkServer
from tests.elastic.step_ledger import Ledger, count_steps, finish, segments
from tests.elastic.undisturbed_runs import check_undisturbed
from tests.multiprocess.launcher import until

COUNTING = Path(__file__).parent / "counting_program.py"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts processes of `job_program`."""
    server = ForkServer("tests.elastic.job_program")
    yield server
    server.close()


def samples_by_step(member: Member) -> dict[tuple[int, int], list[int]]:
    """Samples of each attempt of a process, by number and view."""
    tries = [line.split(maxsplit=6) for line in list(member.lines) if line.startswith("TRY ")]
    return {(int(words[1]), int(words[2])): json.loads(words[6]) for words in tries}


def transfers(members: list[Member]) -> dict[int, list[int]]:
    """Who has received the state, by view."""
    lines = [line.split(maxsplit=3) for member in members for line in member.lines if line.startswith("TRANSFER ")]
    return {int(view): json.loads(receivers) for _, view, _, receivers in lines}


def read_ledger(job: ElasticProcesses, epochs: int, samples: int) -> Ledger:
    ledger = Ledger()
    ledger.read(job.members)
    ledger.check(epochs, samples)
    return ledger


#: By slot: where it dies, and in which step. Six begin, of which four take samples.
DEATHS = {5: "forward:2", 0: "middle:5", 1: "before:8", 2: "after:11"}


@pytest.mark.slow
def test_spares_take_over_with_the_weights_of_runs_that_have_none(server: ForkServer, tmp_path: Path):
    """A spare dies; a rank, and a spare takes samples; then there is no spare any more."""
    epochs, samples = 1, 250
    first = tmp_path / "first"
    first.mkdir()
    variables = {"EVERY": "1", "SCALER": "1"}
    warm = {"REIGEN_WARM_SPARES": "2", "CHECKPOINTS": str(first)}
    with ElasticProcesses(str(epochs), str(samples), "0", max_size=6, server=server, **variables, **warm) as job:
        members = job.start_first(6, {slot: {"DIES_AT": at} for slot, at in DEATHS.items()})
        finish(job, members[3:5])
        ledger = read_ledger(job, epochs, samples)
    assert transfers(members) == {1: [1, 2, 3, 4, 5]}, "no state is sent but in the beginning"
    assert [samples_by_step(members[5])[number, 1] for number in range(3)] == [[], [], []]
    taken = {number: indices for (number, view), indices in samples_by_step(members[4]).items()}
    assert [number for number, indices in taken.items() if not indices] == list(range(min(5, len(taken))))
    runs = segments(ledger)
    assert [size for _, _, size in runs] == [6, 5, 4, 3, 2]
    dealt = {"DEALT": "4", "DEALT_STEPS": "999"}
    check_undisturbed(ledger, server, first, (epochs, samples), lambda size: variables | (dealt if size > 4 else {}))


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"KIND": "norm"}, {"KIND": "norm", "OVERLAP": "1"}, {"SHARE": "1"}])
def test_a_spare_that_comes_later_replaces_who_dies_in_a_step(server: ForkServer, variables: dict[str, str]):
    """Two more die, one after the other, and another spare comes meanwhile."""
    with ElasticProcesses("1", "8000", "0.01", max_size=4, server=server, REIGEN_WARM_SPARES="1", **variables) as job:
        members = [*job.start_first(3)]
        job.wait_for("STEP 3 ", members)
        for victim, slot in ((1, 3), (0, 4)):
            spare = job.start_candidate(slot)
            until(lambda: count_steps(spare) > 3)  # noqa: B023  at once
            assert not any(samples_by_step(spare).values()), "it takes no samples"
            sent = transfers(job.members)
            dead = members.pop(victim)
            dead.kill()
            until(lambda: any(samples_by_step(spare).values()))  # noqa: B023  at once
            assert transfers(job.members) == sent, "nothing is copied"
            members.append(spare)
        finish(job, members)
        read_ledger(job, 1, 8000)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["forward", "before", "after"])
def test_the_death_of_a_spare_changes_nothing_for_the_others(server: ForkServer, moment: str):
    with ElasticProcesses("1", "320", "0.005", max_size=4, server=server, REIGEN_WARM_SPARES="1") as job:
        members = job.start_first(4, {3: {"DIES_AT": f"{moment}:5"}})
        finish(job, members[:3])
        assert members[3].wait() == -signal.SIGKILL
        ledger = read_ledger(job, 1, 320)
    assert transfers(members) == {1: [1, 2, 3]}
    assert {len(indices) for member in members[:3] for indices in samples_by_step(member).values()} == {5, 6}
    assert len(segments(ledger)) == 2


@pytest.mark.slow
def test_several_die_at_once_and_more_than_there_are_spares(server: ForkServer):
    deaths = {slot: {"DIES_AT": "forward:6"} for slot in (0, 1, 2)}
    with ElasticProcesses("2", "330", "0", max_size=5, server=server, REIGEN_WARM_SPARES="1") as job:
        members = job.start_first(5, deaths)
        finish(job, members[3:])
        read_ledger(job, 2, 330)
    assert transfers(members) == {1: [1, 2, 3, 4]}


@pytest.mark.slow
def test_the_only_one_that_takes_samples_dies(server: ForkServer):
    """As often as there are spares; the last one is alone."""
    deaths = {0: {"DIES_AT": "middle:4"}, 1: {"DIES_AT": "after:8"}}
    with ElasticProcesses("2", "160", "0", max_size=3, server=server, REIGEN_WARM_SPARES="2") as job:
        members = job.start_first(3, deaths)
        finish(job, members[2:])
        ledger = read_ledger(job, 2, 160)
    assert [size for _, _, size in segments(ledger)] == [3, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["counts", "counts data"])
def test_a_spare_gets_what_only_forward_passes_change_when_it_takes_over(server: ForkServer, kind: str):
    """A count of forward passes: one a step of each rank that takes samples, and none of a spare."""
    variables = {"KIND": kind, "REIGEN_WARM_SPARES": "1"}
    with ElasticProcesses("1", "480", "0", max_size=4, server=server, **variables) as job:
        members = job.start_first(4, {1: {"DIES_AT": "forward:9"}, 2: {"DIES_AT": "middle:15"}})
        finish(job, [members[0], members[3]])
        read_ledger(job, 1, 480)
    behind = [line.split()[1:] for line in members[3].lines if line.startswith("BEHIND")]
    counted = [hashlib.sha256(torch.tensor([float(n)]).numpy().tobytes()).hexdigest()[:16] for n in range(40)]
    found = {int(number): counted.index(digest) for number, *_, applied, digest in behind if applied == "True"}
    assert [found[number] for number in range(9)] == [0] * 9
    assert [found[number] for number in range(9, 30)] == list(range(10, 31))


@pytest.mark.slow
def test_jobs_with_parts_have_the_same_bits_with_a_spare(server: ForkServer):
    """Buffers, too: they are the mean over the parts."""
    digests, untrained = [], []
    for first, warm, deaths in ((1, "0", {}), (4, "1", {1: {"DIES_AT": "middle:6"}})):
        variables = {"KIND": "norm dropout", "PARTS": "4", "REIGEN_WARM_SPARES": warm}
        with ElasticProcesses("1", "240", "0", max_size=max(first, 2), server=server, **variables) as job:
            members = job.start_first(first, deaths)
            finish(job, [member for slot, member in enumerate(members) if slot not in deaths])
            ledger = read_ledger(job, 1, 240)
        digests.append([ledger.digests[number, max(ledger.views[number])] for number in sorted(ledger.views)])
        behind = [line.split()[1:] for line in members[-1].lines if line.startswith("BEHIND")]
        untrained.append([words[-1] for words in behind if words[4] == "True"])
    assert digests[0] == digests[1]
    assert untrained[0] == untrained[1]


@pytest.mark.slow
def test_a_program_of_elastic_run_is_refused_before_its_first_step():
    with ElasticProcesses(COUNTING, "1000", "0.001", max_size=3, REIGEN_WARM_SPARES="1") as job:
        members = job.start_first(2)
        assert [member.wait() for member in members] == [1, 1]
        assert all(member.says("Start this job with --spares N: its spares get the state when") for member in members)
        assert not any(member.says("STEP") for member in members)


PLAIN = """
import torch
import reigen.torch as hvd
from reigen.errors import ArgumentError

hvd.init()
for options in ({}, {"op": hvd.Adasum}, {"share_parameters": True}):
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    model(torch.ones(2, 4)).sum().backward()
    try:
        optimizer.step()
    except ArgumentError as error:
        print("REFUSED", error, flush=True)
"""


@pytest.mark.slow
def test_a_plain_loop_is_refused_at_its_first_step(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    with ElasticProcesses(script, max_size=3, REIGEN_WARM_SPARES="1") as job:
        (member,) = job.start_first(1)
        member.wait()
        refused = [line for line in member.lines if line.startswith("REFUSED")]
    assert len(refused) == 3, member.lines
    assert all("Start this job with --spares N: its spares get the state when" in line for line in refused)


PROGRAM = """
import os, signal, time
from pathlib import Path
import torch
import reigen.torch as hvd

hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
taken, end = 0, Path("end")
with hvd.elastic.Job(model, optimizer, data=hvd.elastic.Cursor(400_000, global_batch=20, seed=1)) as job:
    for step in job.steps(epochs=1):
        if end.exists() and job.number >= int(end.read_text()):
            break
        with step:
            if os.environ["REIGEN_SLOT"] == "1" and step.size == 3 and not end.exists():
                end.with_suffix(".new").write_text(str(job.number + 50))
                end.with_suffix(".new").rename(end)
                os.kill(os.getpid(), signal.SIGKILL)
            for part in step.parts:
                model(torch.ones(len(part), 4)).sum().backward()
                taken += len(part)
            time.sleep(0.02)
            optimizer.step()
print("TAKEN", os.environ["REIGEN_SLOT"], taken, flush=True)
"""


@pytest.mark.slow
def test_the_launcher_says_who_has_taken_over(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    options = ["-np", "2", "--min-np", "1", "--spares", "1:warm"]
    command = [sys.executable, "-m", "reigen", "run", *options, sys.executable, str(script)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks and 1 warm spare go on" in done.stderr
    assert "slot 2 joins as rank 2, a warm spare" in done.stderr
    lines = [line for line in done.stderr.splitlines() if "slot 2, a warm spare, takes over" in line]
    assert len(lines) == 1, done.stderr
    assert "slot 1 has gone (killed by SIGKILL)" in lines[0]
    taken = {line.split()[-2]: int(line.split()[-1]) for line in done.stdout.splitlines() if "TAKEN" in line}
    assert taken["2"] == 50 * 10, "half of each step from the death on"


# -- what a training says of itself ------------------------------------------------------------------------------------


class EachRanksBuffers(PartwiseTraining):
    """Of a training whose ranks have buffers of their own; that needs no job."""

    _has_own_buffers = True


def make_training(*layers: torch.nn.Module) -> tuple[torch.nn.Module, TorchTraining]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), *layers)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, EachRanksBuffers(model, torch.optim.SGD(learned, lr=0.1), {})


def test_statistics_are_local_state_and_stay_when_a_step_is_undone():
    here, training = make_training(torch.nn.BatchNorm1d(2))
    there, other = make_training(torch.nn.BatchNorm1d(2))
    assert not training.local.is_empty
    for _ in range(3):
        there(torch.randn(8, 2))
    training.begin_step()
    weights = [each.detach().clone() for each in here.parameters()]
    training.local.load(other.local.copy())
    expected = dict(there.named_buffers())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in here.named_buffers())
    assert int(dict(here.named_buffers())["1.num_batches_tracked"]) == 3
    here(torch.randn(8, 2))
    training.undo_step()
    assert all(torch.equal(buffer, expected[name]) for name, buffer in here.named_buffers())
    assert all(torch.equal(one, each) for one, each in zip(weights, here.parameters(), strict=True))


def test_what_is_given_away_is_a_copy():
    there, other = make_training(torch.nn.BatchNorm1d(2))
    buffers = other.local.copy().own
    there(torch.randn(8, 2))
    assert int(buffers["1.num_batches_tracked"]) == 0


def test_who_takes_over_within_a_step_and_undoes_it_counts_its_forward_passes_once():
    """Batches of BatchNorm, and passes that a parameter counts; the step is undone behind the take-over, and repeated.

    The one that has the samples may be in its first step, or in a later one.
    """
    for num_before in (0, 2):
        there, other = make_training(torch.nn.BatchNorm1d(2), CountedPasses())
        here, training = make_training(torch.nn.BatchNorm1d(2), CountedPasses())
        for _ in range(num_before):
            step_with_samples(there, other)
            training.begin_step()
        step_with_samples(there, other)
        training.begin_step()
        training.local.load(other.local.copy())
        assert counts_of(here) == [num_before + 1] * 2, "as if the step were completed"
        training.undo_step()
        assert counts_of(here) == [num_before] * 2
        other.undo_step()
        step_with_samples(here, training)
        step_with_samples(there, other)
        assert counts_of(here) == counts_of(there) == [num_before + 1] * 2


class CountedPasses(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count.data.add_(1)
        return inputs


def step_with_samples(model: torch.nn.Module, training: TorchTraining) -> None:
    training.begin_step()
    training.begin_part(Part(0, np.arange(8), 1.0), 0, 1)
    model(torch.randn(8, 2))


def counts_of(model: torch.nn.Module) -> list[int]:
    return [int(model[1].num_batches_tracked), int(model[2].count)]


def test_tied_weights_are_weights_by_each_of_their_names():
    model, training = make_training(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    copy = training.local.copy()
    assert set(copy.own) == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert not copy.fixed


def test_where_parts_make_the_buffers_all_ranks_have_the_same():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert PartwiseTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), {}).local.is_empty


def test_a_model_without_buffers_has_no_local_state():
    assert make_training()[1].local.is_empty


def test_normalization_over_all_ranks_needs_samples_everywhere():
    _, training = make_training(torch.nn.SyncBatchNorm(2))
    assert "the model has SyncBatchNorm, whose forward pass needs all ranks" in training.local.find_problem()
    assert make_training(torch.nn.BatchNorm1d(2))[1].local.find_problem() == ""
