"""With the cycle collector off: what a job leaves is freed with its last user, for nothing of it is in a cycle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.multiprocess.launcher import run

SCRIPT = """
import gc, os, sys
gc.disable()
os.environ["REIGEN_DYNAMIC_PROCESS_SETS"] = "1"
import numpy as np
import reigen
from reigen import context
from reigen.errors import ReigenError
from reigen.types import DTYPES

rank = int(os.environ["REIGEN_RANK"])

def held():
    mappings = [line for line in open("/proc/self/maps") if "/memfd:" in line]
    return len(mappings), len(os.listdir("/proc/self/fd"))

def in_cycles():
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    ours = sorted({type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("reigen")})
    gc.garbage.clear()
    gc.collect()
    return ours

def repeat(action, times):
    action()
    in_cycles()  # of what was imported
    before = held()
    for _ in range(times):
        action()
    assert held() == before, (before, held())
    found = in_cycles()
    assert not found, found

def collective():
    assert reigen.allreduce(np.ones(3), op=reigen.Sum, name="sum")[0] == reigen.size()

def session(action=collective):
    reigen.init()
    action()
    reigen.shutdown()
"""
SETS = """
def process_set():
    made = reigen.add_process_set([0, 1])
    if rank < 2:
        assert reigen.allreduce(np.ones(3), op=reigen.Sum, name="of the set", process_set=made)[0] == 2
    reigen.remove_process_set(made)

def registered():
    job = context.current()
    region = job.allocate(1 << 20, name="region")
    view = region.array.view(np.float32)
    job.allreduce(view, view, DTYPES["float32"], name="in place", region=region).wait()
    job.free(region)

def timeline():
    reigen.start_timeline(sys.argv[1])
    collective()
    reigen.stop_timeline()

def refused():
    for wrong in (lambda: reigen.allreduce(np.ones(3 + rank), name="wrong"), too_much):
        try:
            wrong()
        except ReigenError:
            continue
        raise AssertionError("it was not refused")

def too_much():
    context.current().allocate(1 << 45, name="too much")

reigen.init()
for action, times in ((process_set, 10), (registered, 3), (timeline, 2), (refused, 3)):
    repeat(action, times)
reigen.shutdown()
repeat(session, 5)
"""


def ranks(hosts: str, code: str, *arguments: str, num: int = 3) -> tuple[str, ...]:
    command = f'REIGEN_HOST_ID=$(({hosts})) exec "$@"'
    return "-np", str(num), "sh", "-c", command, "sh", sys.executable, "-c", SCRIPT + code, *arguments


@pytest.mark.parametrize("hosts", ["0", "RANK", "RANK / 2"])
def test_process_sets_memory_timelines_errors_and_sessions(tmp_path, hosts: str) -> None:
    exit_code, _, err = run(*ranks(hosts, SETS, str(tmp_path / "timeline")))
    assert exit_code == 0, err


LOST = """
import threading

def until_it_breaks():
    try:
        for _ in range(1000):
            reigen.allreduce(np.ones(1 << 20), name="large")
    except ReigenError:
        return
    raise AssertionError("nobody was lost")

reigen.init()
collective()
in_cycles()
if rank == 1:
    threading.Timer(0.2, os._exit, [0]).start()  # in the middle; with 0 the launcher lets the others go on
until_it_breaks()
reigen.shutdown()
assert held()[0] == 0, held()
found = in_cycles()
assert not found, found
"""


@pytest.mark.parametrize("hosts", ["0", "RANK"])
def test_a_job_that_has_lost_a_rank(hosts: str) -> None:
    exit_code, _, err = run(*ranks(hosts, LOST, num=2))
    assert exit_code == 0, err


TORCH = """
import torch
import reigen.torch as hvd

def training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
    shared = {"share_parameters": True} if sys.argv[1] == "shared" else {}
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), **shared)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()

repeat(lambda: session(training), 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["buckets", "shared"])
def test_optimizers_of_torch_in_sessions(kind: str) -> None:
    exit_code, _, err = run(*ranks("0", TORCH, kind, num=2))
    assert exit_code == 0, err


STORES = """
import reigen.kv

def store(kind):
    made = reigen.kv.create(kind)
    made.init("key", np.ones(100_000, np.float32))
    made.push("key", np.ones(100_000, np.float32))
    out = np.zeros(100_000, np.float32)
    made.pull("key", out=out)
    made.close()

if sys.argv[1] == "ring":
    repeat(lambda: session(lambda: store("ring")), 3)
else:
    repeat(lambda: store("dist_sync"), 3)
"""


@pytest.mark.parametrize("kind", ["ring", "dist_sync"])
def test_stores(kind: str) -> None:
    servers = ("-s", "1") if kind == "dist_sync" else ()
    exit_code, _, err = run(*servers, *ranks("0", STORES, kind, num=2))
    assert exit_code == 0, err


def test_a_job_of_one_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace('os.environ["REIGEN_RANK"]', '"0"') + "repeat(session, 3)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
