"""RankPool keeps its promises: results by rank, honest failures, nothing left, no memory of earlier calls."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import reigen
from reigen.cluster.environ import detect_job
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import MismatchError
from reigen.testing import LeakError, RankError, RankPool, leaks, run_ranks
from tests.patience import patiently

Pools = Callable[[int], RankPool]


def place() -> tuple[int, int, int]:
    return int(os.environ["REIGEN_RANK"]), int(os.environ["REIGEN_SIZE"]), os.getpid()


def test_ranks_are_processes_and_answer_in_order(rank_pool: Pools) -> None:
    results = rank_pool(3).run(place)
    assert [(rank, size) for rank, size, _ in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == 4


def test_processes_persist_between_calls(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    assert pool.run(place) == pool.run(place)


def test_arrays_travel(rank_pool: Pools) -> None:
    [first, second] = rank_pool(2).run(np.add, np.arange(100_000.0), 1.0)
    np.testing.assert_array_equal(first, np.arange(1.0, 100_001.0))
    np.testing.assert_array_equal(second, first)


def test_closures_run(rank_pool: Pools) -> None:
    offset = 40
    assert rank_pool(2).run(lambda: offset + int(os.environ["REIGEN_RANK"])) == [40, 41]


def meet() -> str:
    job = detect_job(os.environ)
    assert job.rendezvous is not None
    assert job.secret is not None
    client = RendezvousClient(job.rendezvous, job.secret, job.rank, 10.0)
    try:
        client.put(f"from {job.rank}", str(job.rank).encode())
        return client.get(f"from {1 - job.rank}", 10.0).decode()
    finally:
        client.close()


def test_ranks_meet_at_the_rendezvous_of_their_environment(rank_pool: Pools) -> None:
    assert rank_pool(2).run(meet) == ["1", "0"]


def bind_master_port() -> int | None:
    if os.environ["REIGEN_RANK"] != "0":
        return None
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        server.listen()
        return int(server.getsockname()[1])


def test_rank_zero_can_listen_on_the_master_port() -> None:
    with RankPool(2, env={"REIGEN_TORCHRUN_ENV": "1"}) as pool:
        port, nothing = pool.run(bind_master_port)
    assert port > 0
    assert nothing is None


def soil() -> None:
    os.environ["SOILED"] = "yes"
    os.environ["OMP_NUM_THREADS"] = "77"
    os.chdir("/")
    sys.path.insert(0, "/nowhere")


def soiled() -> tuple[str | None, str, str, bool]:
    return os.environ.get("SOILED"), os.environ["OMP_NUM_THREADS"], str(Path.cwd()), "/nowhere" in sys.path


def test_nothing_of_a_call_reaches_the_next(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    before = pool.run(soiled)
    pool.run(soil, env={"ONLY_HERE": "1"})
    assert pool.run(soiled) == before
    assert pool.run(os.getenv, "ONLY_HERE") == [None, None]


def test_a_job_around_the_tests_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REIGEN_RANK", "17")
    monkeypatch.setenv("HOROVOD_SIZE", "99")
    with RankPool(1) as pool:
        assert pool.run(os.getenv, "REIGEN_RANK") == ["0"]
        assert pool.run(os.getenv, "HOROVOD_SIZE") == ["1"]


def speak() -> None:
    print(f"out {os.environ['REIGEN_RANK']}")
    print(f"err {os.environ['REIGEN_RANK']}", file=sys.stderr)


def test_output_is_kept_apart_by_rank_stream_and_call(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    pool.run(speak)
    assert pool.output(1) == ("out 1\n", "err 1\n")
    pool.run(place)
    assert pool.output(1) == ("", "")


def disagree() -> str:
    rank = int(os.environ["REIGEN_RANK"])
    if rank == 1:
        return "fine"
    raise MismatchError(f"rank {rank} says no", tensor="t", ranks=(rank,))


def test_all_exceptions_arrive_with_their_traceback() -> None:
    with pytest.raises(RankError, match="2 of 3 ranks failed") as caught:
        run_ranks(disagree, 3)
    error = caught.value
    assert error.rank == 0
    assert [failure.rank for failure in error.failures] == [0, 2]
    assert error.results == {1: "fine"}
    assert all(isinstance(cause, MismatchError) and cause.tensor == "t" for cause in error.errors.values())
    assert "in disagree" in error.of(2).text
    assert "rank 2 says no" in str(error)


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("no")


def raise_unpicklable() -> None:
    raise Unpicklable("still told")


def test_an_exception_that_cannot_travel_is_told_as_text() -> None:
    with pytest.raises(RankError, match="still told") as caught:
        run_ranks(raise_unpicklable, 1)
    assert caught.value.errors == {}


def return_unpicklable() -> object:
    return threading.Lock()


def test_a_result_that_cannot_travel_is_a_failure() -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        run_ranks(return_unpicklable, 1)


def one_dies(how: str) -> str:
    if os.environ["REIGEN_RANK"] == "1":
        print("last words", file=sys.stderr, flush=True)
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@pytest.mark.parametrize(("how", "code", "text"), [("exit", 7, "status 7"), ("kill", -9, "SIGKILL")])
def test_a_death_is_told_at_once_with_its_last_words(how: str, code: int, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(one_dies, 2, how, timeout=170)
    assert time.monotonic() - began < 90  # before the timeout; no measurement
    [failure] = caught.value.failures
    assert (failure.rank, failure.kind, failure.exit_code, failure.stderr) == (1, "died", code, "last words\n")
    assert caught.value.results == {0: "survived"}


def hang_if_zero() -> None:
    if os.environ["REIGEN_RANK"] == "0":
        threading.Event().wait()


@pytest.mark.slow
def test_a_late_rank_tells_where_it_was_and_is_killed() -> None:
    def attempt(seconds: float) -> None:
        with RankPool(2) as pool:
            pool.run(place)  # all are there
            pids = pool.pids
            with pytest.raises(RankError, match="hang_if_zero") as caught:
                pool.run(hang_if_zero, timeout=seconds)
            [failure] = caught.value.failures
            assert (failure.rank, failure.kind) == (0, "late")
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
            assert [rank for rank, *_ in pool.run(place)] == [0, 1]  # with new processes

    patiently(attempt, 0.5)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_a_stopped_rank_is_told_to_be_stopped() -> None:
    def attempt(seconds: float) -> None:
        with RankPool(1) as pool:
            pool.run(place)  # it is there
            with pytest.raises(RankError, match="stopped by a signal"):
                pool.run(stop_self, timeout=seconds)

    patiently(attempt, 0.5)


def exit_quietly() -> None:
    sys.exit(3)


def test_sys_exit_is_a_failure_and_no_end_of_the_process() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(exit_quietly, 1)
    assert caught.value.of(0).kind == "raised"
    assert isinstance(caught.value.errors[0], SystemExit)


def leave_descriptor() -> None:
    leaks._WAIT_SECONDS = 0.1
    os.open("/dev/null", os.O_RDONLY)


@pytest.mark.slow
def test_a_leak_in_a_rank_is_found_when_asked_for() -> None:
    with RankPool(1) as pool:
        pool.run(leave_descriptor)
        with pytest.raises(RankError, match="/dev/null") as caught:
            pool.run(leave_descriptor, check_leaks=True)
        assert isinstance(caught.value.errors[0], LeakError)


def start_grandchild() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def test_what_a_rank_started_ends_with_it() -> None:
    with RankPool(1) as pool:
        [pid] = pool.run(start_grandchild)
        ended = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([ended], [], [], 60.0)
        assert readable
    finally:
        os.close(ended)


_ORPHANS = """
import os, signal
from reigen.testing import RankPool
pool = RankPool(2)
pool.start()
print(*pool.run(os.getpid), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_do_not_survive_a_killed_test() -> None:
    done = subprocess.run([sys.executable, "-c", _ORPHANS], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pause, until = threading.Event(), time.monotonic() + 60
    while alive := [pid for pid in done.stdout.split() if _runs(pid)]:
        assert time.monotonic() < until, f"still alive: {alive}"
        pause.wait(0.01)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_pool_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        RankPool(0)


def my_place() -> tuple[int, int]:
    return reigen.rank(), reigen.size()


def test_init_wraps_a_call_again_and_again(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    for _ in range(3):
        assert pool.run(my_place, init=True) == [(0, 2), (1, 2)]
    assert pool.run(reigen.is_initialized) == [False, False]


def join_and_forget() -> None:
    reigen.init()


def test_a_job_that_a_call_forgot_is_ended(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    pool.run(join_and_forget)
    assert pool.run(reigen.is_initialized) == [False, False]


def test_init_and_shutdown_leave_nothing(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    pool.run(my_place, init=True)
    pool.run(my_place, init=True, check_leaks=True)
