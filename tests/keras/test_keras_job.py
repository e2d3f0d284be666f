"""`hvd.elastic.Job` with Keras, on each backend: whoever is killed, no sample is lost or taken twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.elastic import array_jobs as checks
from tests.elastic.elastic_processes import ElasticProcesses
from tests.elastic.fork_server import ForkServer
from tests.elastic.step_ledger import finish
from tests.keras.conftest import BACKENDS, backend_environment

#: Without compiled programs, each of which is compiled anew after a change, a step of Keras takes long on JAX.
CHOSEN = BACKENDS if "REIGEN_TEST_KILLS" in os.environ else [name for name in BACKENDS if name != "jax"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", CHOSEN)
def test_deaths_and_a_newcomer(backend: str, tmp_path: Path):
    """Rank 0 dies within its update, when a weight is changed; another comes."""
    variables = {"FRAMEWORK": "keras", "KIND": "norm dropout", "SIZE": "3", **backend_environment(backend)}
    server = ForkServer("tests.elastic.array_job_program", **variables)
    try:
        with ElasticProcesses("1", str(checks.SAMPLES), max_size=3, server=server, **variables) as job:
            newcomer = job.start_candidate(4, WAITS_FOR=str(tmp_path / "go"))
            job.wait_for("IMPORTED")
            newcomer, dying, *survivors = job.start_first(3, {0: {"DIES_AT": "within:3"}})
            assert dying.wait(120) == -9
            (tmp_path / "go").touch()
            finish(job, [newcomer, *survivors])
        checks.check_ledger(job.members)
    finally:
        server.close()
