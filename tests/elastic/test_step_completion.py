"""Ranks die in the middle of steps, which are completed with their samples, with the bits of a step that nobody left.

The truth is made here: each step of all ranks, one after the other in one process, with torch's own optimizer. It knows
from what the processes have written which samples each rank had taken in the attempt that was applied, the dead too.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch

from tests.elastic import completion_program
from tests.elastic.elastic_processes import ElasticProcesses

pytestmark = pytest.mark.slow

PROGRAM = ("-m", "tests.elastic.completion_program")
#: Steps between two deaths: the first one of a view registers memory, and has no sums before that.
_GAP = 2


class Truth:
    """What weights are after each step, made from the samples that ranks have written down."""

    def __init__(self, num_steps: int, lines: Sequence[str], *, clips: bool) -> None:
        self.samples: defaultdict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
        self.sizes: dict[tuple[int, int], int] = {}
        self.applied: defaultdict[int, set[tuple[int, str]]] = defaultdict(set)
        for words in (line.split(maxsplit=5) for line in lines):
            if words[0] == "TRY":
                number, view, rank, size = map(int, words[1:5])
                self.samples[number, view][rank], self.sizes[number, view] = json.loads(words[5]), size
            elif words[0] == "STEP":
                self.applied[int(words[1])].add((int(words[2]), words[3]))
        self._num_steps, self._clips = num_steps, clips

    def check(self) -> None:
        """Checks that each step was applied once, by all alike, and what it made of the weights."""
        torch.set_num_threads(1)
        model = completion_program.make_model()
        optimizer = completion_program.make_optimizer(model)
        inputs, targets = completion_program.make_samples(self._num_steps * completion_program.BATCH)
        taken: Counter[int] = Counter()
        assert sorted(self.applied) == list(range(self._num_steps))
        for number in range(self._num_steps):
            ((view, digest),) = self.applied[number]
            parts, size = self.samples[number, view], self.sizes[number, view]
            assert sorted(parts) == list(range(size))
            taken.update(index for part in parts.values() for index in part)
            sums: list[torch.Tensor] = []
            for rank in range(size):
                model.zero_grad()
                batch = torch.tensor(parts[rank])
                torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
                factor = len(parts[rank]) / completion_program.BATCH * size
                own = [parameter.grad * factor if factor != 1.0 else parameter.grad for parameter in model.parameters()]
                sums = [total + each for total, each in zip(sums, own, strict=True)] if rank else [*own]
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total / size
            if self._clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert completion_program.digest(model, optimizer) == digest, (number, view)
        assert taken == Counter(range(len(inputs)))


def run(points: Sequence[str], **environ: str) -> set[int]:
    """Kill ranks 1, 2 ... at these points, one after the other; return how many steps the two others have undone."""
    num_steps = _GAP * (len(points) + 1)
    kills = [f"{point} {_GAP * (n + 1) - 1}" for n, point in enumerate(points)]
    with ElasticProcesses(*PROGRAM, str(num_steps), "", *kills, "", REIGEN_BUCKET_BYTES="262144", **environ) as job:
        [member] = job.start_first(1)
        job.wait_for("ENDED", seconds=300.0)
        assert member.says(str([0, *[-9] * len(points), 0])), member.lines
        ends = [tuple(map(int, line.split()[1:])) for line in member.lines if line.startswith("DONE")]
        undone = {end[0] for end in ends}
        assert environ.get("SHARE") == "1" or {end[1] for end in ends} == {num_steps}, "each step is one pass"
        assert len(ends) == 2, member.lines
        Truth(num_steps, member.lines, clips=environ.get("CLIPS") == "1").check()
        return undone


def test_a_step_is_completed_with_the_samples_of_the_dead() -> None:
    assert run(["sums 0", "sums 9", "sums 21"], ONE_CPU="1") == {0}


def test_what_the_program_does_with_sums_is_done_to_those_that_were_completed() -> None:
    """The death at the update may be seen in the step behind it, whose gradients are missing then.

    Who has not applied the step of the update by then does so, and has not begun the other one.
    """
    undone = run(["update 0", "filled 1", "sums 4"], CLIPS="1", ONE_CPU="1")
    assert undone <= {0, 1, 2}
    assert max(undone) - min(undone) <= 1


def test_who_applies_a_step_later_than_others_has_not_begun_the_one_that_they_undo() -> None:
    """It has all sums, and applies them in the next view; so it has undone fewer steps than the others."""
    with ElasticProcesses(*PROGRAM, "4", "", "", "hesitates 0 1", REIGEN_BUCKET_BYTES="262144") as job:
        [member] = job.start_first(1)
        job.wait_for("TRY 2 1 0")
        (pid,) = (int(line.split()[2]) for line in list(member.lines) if line.startswith("PID 1 "))
        os.kill(pid, signal.SIGKILL)
        job.wait_for("ENDED")
    assert member.says("ENDED [0, -9, 0]"), member.lines
    assert {line.split()[1] for line in member.lines if line.startswith("DONE")} == {"0", "1"}
    Truth(4, member.lines, clips=False).check()


def test_an_update_of_shared_weights_is_finished_for_the_dead() -> None:
    """Each dies in its update, which others may have begun or not: in the latter case the step is undone."""
    assert run(["owner 1", "owner 5", "owner 10"], SHARE="1") <= {0, 1, 2, 3}


def test_nobody_goes_on_with_weights_of_an_update_that_it_has_not_counted() -> None:
    """Rank 1 cannot complete it, since a newcomer is there; and who sends the state to both, and has it alone, dies.

    So nobody has it, and the job ends, long before the timeout of those who wait for more members.
    """
    points = ["knows 0 1,sends 0 2", "late 0 1", "gradient 0 2", ""]
    environ = {"SHARE": "1", "SPARES": "1", "REIGEN_BUCKET_BYTES": "262144", "REIGEN_ELASTIC_TIMEOUT": "600"}
    with ElasticProcesses(*PROGRAM, "4", *points, max_size=3, **environ) as job:
        [member] = job.start_first(1)
        job.wait_for("ENDED", seconds=300.0)
    assert member.says("ENDED [-9, 1, -9, 1]"), member.lines
    assert member.says("no process is left that holds the state of the training: rank(s) 0 of view 2 have ended"), (
        member.lines
    )
    assert max(int(line.split()[1]) for line in member.lines if line.startswith("TRY ")) == 2, "step 1 is not redone"
    assert not any(line.startswith("TRY 1 3") for line in member.lines)


@pytest.mark.skipif("REIGEN_TEST_COMPLETIONS" not in os.environ, reason="a long loop: REIGEN_TEST_COMPLETIONS=rounds")
@pytest.mark.parametrize("share", ["", "1"])
def test_bits_are_right_wherever_ranks_die(share: str) -> None:
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "7")))
    places = [("sums", 40), ("filled", 10), ("gradient", 6), ("update", 1)]
    weights = [6, 2, 1, 2]
    if share:
        places, weights = [("owner", 24), ("moment", 3000), ("gradient", 6)], [8, 6, 1]
    for _ in range(int(os.environ["REIGEN_TEST_COMPLETIONS"])):
        chosen = chances.choices(places, weights, k=4)
        points = [f"{place} {chances.randrange(most)}" for place, most in chosen]
        environ = {
            name: "1" for name in ("CLIPS", "ONE_CPU") if chances.random() < 0.5 and not (name == "CLIPS" and share)
        }
        print(points, environ, run(points, SHARE=share, **environ), flush=True)
