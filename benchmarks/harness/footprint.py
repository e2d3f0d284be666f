"""What training on several ranks of a host needs in memory: of all ranks together, in processes that do nothing else.

The kernel's proportional set size (proc(5), smaps_rollup): a page that several processes have counts in each of them as
its part, so that the sum over the ranks is what the host must have. Only memory without a file and shared memory
count: code is shared with whoever runs just now.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.figures import Footprint
from benchmarks.harness.memory import kib_of
from benchmarks.harness.models import recipe_of
from benchmarks.harness.work import Case

_FIELDS = ("Pss_Anon", "Pss_Shmem")


def measure(title: str, mode: str, spec: CrewSpec, case: Case, num_steps: int) -> Footprint:
    """Train a few steps in new processes, and look at their memory before and after.

    Before, they train another model, whose size does not matter: torch loads much only when it is used.

    Raises:
        LaunchError: the processes failed.
    """
    with Crew(spec) as crew:
        crew.spawn()
        crew.meet()
        tiny = Case("tiny+" + case.name.partition("+")[2])
        crew.open("tiny", tiny, num_steps)
        crew.shut("tiny")
        before = proportional_bytes(crew.pids)
        crew.open("footprint", case, num_steps)
        after = proportional_bytes(crew.pids)
    return Footprint(title, mode, spec.num_ranks, parameter_bytes(case), after - before)


def proportional_bytes(pids: Sequence[int]) -> int:
    """Memory without a file, and shared memory, of these processes together."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(kib_of(text, field) << 10 for text in texts for field in _FIELDS)


def parameter_bytes(case: Case) -> int:
    """Of a case's model, without making it."""
    with torch.device("meta"):
        model = recipe_of(case).make()
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
