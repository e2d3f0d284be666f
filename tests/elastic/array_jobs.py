"""Checks of jobs whose gradients are values, for the tests of each framework: `array_job_program` in real processes."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import numpy as np

from tests.elastic import array_job_program as program
from tests.elastic.elastic_processes import ElasticProcesses, Member
from tests.elastic.fork_server import ForkServer
from tests.elastic.step_ledger import Ledger, finish, segments

SAMPLES = 203
#: By slot: where it dies, and in which step.
DEATHS = {0: "before:2", 1: "between:4", 2: "within:6", 3: "change:6"}


def check_ledger(members: list[Member]) -> Ledger:
    ledger = Ledger()
    ledger.read(members)
    ledger.check(1 + max(ledger.epochs.values()), SAMPLES)
    return ledger


def expected_weights(ledger: Ledger) -> np.ndarray:
    """Weights of one process that takes the samples of each step of the ledger together, in float64; then the bias."""
    inputs, targets = (each.astype(np.float64) for each in program.make_data(SAMPLES))
    inputs = np.hstack([inputs, np.ones((SAMPLES, 1))])
    weights, velocity = np.zeros((program.INPUTS + 1, 1)), np.zeros((program.INPUTS + 1, 1))
    for number in sorted(ledger.views):
        parts = ledger.samples[number, max(ledger.views[number])]
        chosen = [index for part in parts.values() for index in part]
        slope = 2 * inputs[chosen].T @ (inputs[chosen] @ weights - targets[chosen]) / len(chosen)
        velocity = program.MOMENTUM * velocity - program.RATE * slope
        weights = weights + velocity
    return weights.ravel()


def final_weights(member: Member) -> np.ndarray:
    (line,) = (line for line in member.lines if line.startswith("DONE"))
    values: list[float] = json.loads(line.split(maxsplit=5)[5])
    return np.array(values)


def check_deaths_at_each_point(server: ForkServer, **variables: str) -> None:
    """Whoever dies where: each sample is in one step, replicas are equal, and the weights are those of one process."""
    with ElasticProcesses("1", str(SAMPLES), server=server, **variables) as job:
        members = job.start_first(6, {slot: {"DIES_AT": at} for slot, at in DEATHS.items()})
        finish(job, members[4:])
        assert [member.wait() for member in members[:4]] == [-9] * 4
    ledger = check_ledger(members)
    sizes = [size for _, _, size in segments(ledger)]
    assert (sizes[0], sizes[-1]) == (6, 2)
    found = final_weights(members[5])
    found = np.roll(found, -1) if variables["FRAMEWORK"] == "jax" else found  # leaves are sorted by name: b, w
    np.testing.assert_allclose(found, expected_weights(ledger), rtol=1e-4, atol=1e-5)


def check_random_deaths_and_newcomers(server: ForkServer, tmp_path: Path, **variables: str) -> None:
    """REIGEN_TEST_KILLS: how many die; a newcomer takes the place of each."""
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "7")))
    num_kills = int(os.environ.get("REIGEN_TEST_KILLS", "0"))
    more = {"SIZE": "3", "FINISH": str(tmp_path / "finish"), **variables}
    with ElasticProcesses("1", str(SAMPLES), max_size=3, server=server, **more) as job:
        newcomers = [job.start_candidate(3 + n, WAITS_FOR=str(tmp_path / str(n))) for n in range(num_kills)]
        job.wait_for("IMPORTED")
        members = job.start_first(3, {key: {"WAITS_FOR": str(tmp_path / "last")} for key in range(3)})[num_kills:]
        job.wait_for("IMPORTED")
        (tmp_path / "last").touch()
        for number, newcomer in enumerate(newcomers):
            job.wait_for("STEP", members)
            threading.Event().wait(chances.uniform(0.0, 0.05))
            victim = members.pop(chances.randrange(3))
            victim.kill()
            (tmp_path / str(number)).touch()
            job.wait_for("STEP", [newcomer])
            members.append(newcomer)
        (tmp_path / "finish").touch()
        finish(job, members)
    check_ledger(job.members)


def check_same_bits_from_checkpoints(server: ForkServer, tmp_path: Path, **variables: str) -> None:
    """Each run of steps with the same members is made again from its checkpoint, undisturbed, for the same bits."""
    first = tmp_path / "first"
    first.mkdir()
    with ElasticProcesses("1", str(SAMPLES), server=server, EVERY="1", CHECKPOINTS=str(first), **variables) as job:
        members = job.start_first(3, {0: {"DIES_AT": "between:6"}})
        finish(job, members[1:])
    ledger = check_ledger(members)
    runs = segments(ledger)
    assert [size for _, _, size in runs] == [3, 2]
    for begin, end, size in runs:
        again = tmp_path / str(begin)
        again.mkdir()
        more = {"RESUME": str(first / f"{begin}.npz"), "UNTIL": str(end), "CHECKPOINTS": str(again), "EVERY": "1"}
        with ElasticProcesses("1", str(SAMPLES), server=server, **more, **variables) as job:
            finish(job, job.start_first(size))
            undisturbed = Ledger()
            undisturbed.read(job.members)
        for number in range(begin, end):
            (expected,) = undisturbed.digests[number, 1]
            assert ledger.digests[number, max(ledger.views[number])] == {expected}, (number, size)
        one, other = (np.load(path / f"{end}.npz") for path in (first, again))
        assert {name: one[name].tobytes() for name in one} == {name: other[name].tobytes() for name in other}


def check_another_model_is_refused(server: ForkServer, **variables: str) -> None:
    """The newcomer ends, and disturbs nobody; the members go on until a right one has come."""
    with ElasticProcesses("1", str(SAMPLES), server=server, SIZE="3", **variables) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ", members)
        wrong = job.start_candidate(2, WIDTH="7")
        assert wrong.wait() == 1
        assert wrong.says("of this rank is not like that of rank 0"), wrong.lines
        members.append(job.start_candidate(3))
        finish(job, members)
    check_ledger(members)
