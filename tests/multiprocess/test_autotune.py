"""Jobs that are tuned: their results have the bits of those that are not; and what becomes of their options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reigen import context
from reigen.api.gradients.bucket_plan import ParameterSpec, choose_bucket_bytes, plan_buckets
from reigen.api.gradients.bucket_size import BucketSizeAgreement
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.process_sets import global_process_set
from reigen.autotune.log_file import HEADER
from reigen.autotune.search_space import ParameterPoint
from reigen.engine.operation_builders import ReductionSpec
from reigen.testing import RankPool
from reigen.types import DTYPES, ReduceOp
from tests.tuning import POINTS, follow_schedule

_COUNTS = (1_100_000, 3, 70_001, 65_536, 12_345)
#: Weights, how many buckets there were, and the number of changes.
Trained = tuple[list[np.ndarray[Any, Any]], set[int], int]


def _train(points: Sequence[ParameterPoint], steps: int) -> Trained:
    """Steps of an optimizer in NumPy: gradients in buckets of registered memory, which are laid out as ranks agree."""
    job = context.current()
    if points:
        follow_schedule(points)
    group = ReduceGroup(job, global_process_set, ReductionSpec(ReduceOp.AVERAGE, 1.0, 1.0))
    agreement = BucketSizeAgreement(group) if job.autotunes else None
    specs = [ParameterSpec(count, 4, "float32") for count in _COUNTS]
    weights = [np.ones(count, np.float32) for count in _COUNTS]
    plan, region, sizes = None, None, set()
    for step in range(steps):
        if plan is None or region is None:
            size = agreement.settle() if agreement is not None else choose_bucket_bytes(job)
            plan = plan_buckets(specs, range(len(_COUNTS)), size)
            region = group.allocate(plan.nbytes)
            sizes.add(len(plan.buckets))
        arrays, handles = {}, []
        for number, bucket in enumerate(plan.buckets):
            memory = region.array[bucket.offset : bucket.offset + bucket.nbytes].view(np.float32)
            for place in bucket.places:
                rng = np.random.default_rng([step, place.parameter, job.rank])
                arrays[place.parameter] = region.array[place.offset : place.offset + place.nbytes].view(np.float32)
                exponents = rng.integers(-8, 8, _COUNTS[place.parameter], np.int32)
                arrays[place.parameter][:] = np.ldexp(
                    rng.standard_normal(_COUNTS[place.parameter], np.float32), exponents
                )
            handles.append(group.reduce(memory, DTYPES["float32"], f"{len(sizes)}.{number}", region))
        if agreement is not None:
            agreement.pass_starts()
        for handle in handles:
            handle.wait()
        for parameter, array in arrays.items():
            weights[parameter] -= np.float32(0.1) * array
        if agreement is not None and agreement.pass_ended():
            group.free(region)
            plan = region = None
        context.mark("STEP")
    tuned = job.counters.tuned
    return weights, sizes, 0 if tuned is None else tuned.version


def _same(first: Trained, second: Trained) -> bool:
    pairs = zip(first[0], second[0], strict=True)
    return all(np.array_equal(one.view(np.uint32), other.view(np.uint32)) for one, other in pairs)


_ORDERED = {"REIGEN_PLANE": "tcp", "REIGEN_TCP_ALGORITHM": "ordered"}


@pytest.mark.parametrize(
    ("size", "env"),
    [
        (2, {}),
        pytest.param(3, {"REIGEN_PLANE": "tcp"}, marks=pytest.mark.slow),
        pytest.param(9, {}, marks=pytest.mark.slow),
        pytest.param(9, _ORDERED, marks=pytest.mark.slow),
    ],
    ids=["shm-2", "tcp-3", "shm-9", "tcp-9"],
)
def test_weights_are_the_same_bit_for_bit(
    size: int, env: Mapping[str, str], rank_pool: Callable[[int], RankPool]
) -> None:
    pool, steps = rank_pool(size), 11
    plain = pool.run(_train, [], steps, init=True, env=env)[0]
    tuned = pool.run(_train, POINTS, steps, init=True, env={**env, "REIGEN_AUTOTUNE": "1"})
    assert len(plain[1]) == 1
    for one in tuned:
        assert len(one[1]) >= 2, "buckets were laid out anew"
        assert one[2] >= steps // 3 - 1, "all ranks have heard of all choices"
        assert _same(plain, one)


@pytest.mark.slow
def test_with_the_ring_they_differ(rank_pool: Callable[[int], RankPool]) -> None:
    """So the test above can fail; and the ring is what may not be tuned."""
    pool, env = rank_pool(9), {"REIGEN_PLANE": "tcp", "REIGEN_AUTOTUNE": "1", "REIGEN_AUTOTUNE_ALLOW_RING": "1"}
    plain = pool.run(_train, [], 5, init=True, env=_ORDERED)[0]
    ring = [replace(point, tcp_algorithm="ring") for point in POINTS]
    tuned = pool.run(_train, ring, 5, init=True, env=env)
    assert all(_same(tuned[0], one) for one in tuned), "all ranks have the same, though"
    assert not _same(plain, tuned[0])


_SCRIPT = """
import numpy as np, reigen, time
reigen.init()
data = [np.ones(1000, np.float32) for _ in range(20)]
for step in range({steps}):
    handles = [reigen.allreduce_async(one, name=str(number)) for number, one in enumerate(data)]
    for handle in handles:
        reigen.synchronize(handle)
    reigen.report_progress(steps=1)
reigen.shutdown()
"""


def _run(tmp_path: Path, *options: str, steps: int = 400, env: Mapping[str, str] | None = None) -> Any:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(steps=steps))
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", *options, sys.executable, str(script)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | dict(env or {}), check=False
    )


@pytest.mark.slow
def test_a_job_tells_what_it_has_chosen_and_writes_its_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    options = ["--autotune", "--autotune-log-file", str(path), "--autotune-bayes-opt-max-samples", "2"]
    done = _run(tmp_path, *options, "--autotune-warmup-samples", "1", "--autotune-steps-per-sample", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("reigen autotune: ") == 1, done.stderr
    lines = path.read_text().splitlines()
    assert lines[0] == HEADER
    assert lines[-1].split(",")[10] == "best"


@pytest.mark.slow
def test_a_log_of_something_else_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("a log of something else\n")
    done = _run(tmp_path, "--autotune", env={"HOROVOD_AUTOTUNE_LOG": str(path)})
    assert done.returncode != 0
    assert "log.csv is no log of autotuning of this version" in done.stderr
    assert path.read_text() == "a log of something else\n"


@pytest.mark.slow
def test_without_the_library_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('not here')\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = _run(tmp_path, env={"HOROVOD_AUTOTUNE": "1", "PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode != 0
    assert "pip install 'reigen[autotune]'" in done.stderr
