"""The user's program in all roles, and beside `reigen server`: started by hand with MXNet's variables."""

from __future__ import annotations

import json
import sys

import pytest

from tests.kv.jobs import SCHEDULER, Job, Process

pytestmark = pytest.mark.slow

SERVER = (sys.executable, "-m", "reigen", "server")
#: It carries on whatever happens, which only a worker may do.
TRAIN = """
import json, os
import numpy as np
import reigen.kv
try:
    kv = reigen.kv.create("dist_sync")
except Exception as error:
    os.write(1, (json.dumps(f"{type(error).__name__}: {error}") + "\\n").encode())
    raise SystemExit(3)
kv.init(["small", "large"], [np.zeros(3, np.float32), np.zeros(3000, np.float32)])
out = [np.empty(3, np.float32), np.empty(3000, np.float32)]
for _ in range(2):
    kv.push(["small", "large"], [np.full(each.shape, kv.rank + 1, np.float32) for each in out])
    kv.pull(["small", "large"], out=out)
kv.close()
values = sorted({float(value) for each in out for value in each})
os.write(1, (json.dumps([os.environ["DMLC_ROLE"], kv.rank, kv.num_workers, values]) + "\\n").encode())
"""
PROGRAM = (sys.executable, "-c", TRAIN)


def said(process: Process) -> tuple[int, list[object]]:
    """Its exit code, and all that it printed."""
    code = process.end()
    return code, [json.loads(line) for line in process.rest().splitlines()]


def test_one_program_in_all_roles_runs_on_in_workers_only() -> None:
    with Job(2, 2, REIGEN_KV_BIGARRAY_BOUND="1000") as job:
        roles = ["worker", "server", "scheduler", "server", "worker"]
        processes = [job.start(PROGRAM, DMLC_ROLE=role) for role in roles]
        ends = [said(process) for process in processes]
        assert [code for code, _ in ends] == [0] * 5
        assert [lines for _, lines in ends[1:4]] == [[]] * 3
        assert sorted(lines[0] for _, lines in (ends[0], ends[4])) == [["worker", rank, 2, [3.0]] for rank in range(2)]


def test_servers_may_run_without_the_program() -> None:
    with Job(2, 1) as job:
        workers = [job.start(PROGRAM, DMLC_ROLE="worker", DMLC_TASK_ID=str(rank)) for rank in range(2)]
        others = [job.start(SERVER), job.start(SCHEDULER)]
        assert [said(worker) for worker in workers] == [(0, [["worker", rank, 2, [3.0]]]) for rank in range(2)]
        assert [said(other) for other in others] == [(0, [])] * 2


def test_servers_and_schedulers_that_cannot_serve_do_not_run_the_program_either() -> None:
    wrong = [
        {"DMLC_NUM_WORKER": ""},
        {"PS_VERBOSE": "loudly"},
        {"DMLC_PS_ROOT_URI": "192.0.2.7"},
        {"REIGEN_START_TIMEOUT": "0.2", "REIGEN_DEADLINE": "0.2"},  # nobody comes
    ]
    with Job(1, 1) as job:
        processes = [
            job.start(PROGRAM, **{"DMLC_ROLE": role, "DMLC_PS_ROOT_PORT": job.another_port(), **variables})
            for variables in wrong
            for role in ("server", "scheduler")
        ]
        assert [said(process) for process in processes] == [(1, [])] * 8
        assert all(process.errors() for process in processes)


def test_without_servers_it_is_said_how_to_have_them() -> None:
    with Job(1, 1) as job:
        nothing = dict.fromkeys((name for name in job.variables if name.startswith("DMLC_")), "")
        code, lines = said(job.start(PROGRAM, **nothing))
        assert code == 3
        assert "reigen run -np 4 -s 2" in str(lines[0])
