"""`reigen.dask` in a real cluster of Dask's: three worker processes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reigen.dask
from reigen.dask.call import run_agents
from reigen.errors import ConfigError, LaunchError, RankFailedError
from reigen.launch.supervision.process_tree import find_descendants
from tests.elastic.engine_training import Training, train_until
from tests.network.waiting import wait_for

if TYPE_CHECKING:
    from distributed import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
pytest.importorskip("distributed", reason="distributed is not installed here (pip install 'reigen[dask]')")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": None, "worker_dashboard_address": None}
    with (
        LocalCluster(n_workers=3, threads_per_worker=2, processes=True, memory_limit=0, **options) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(3)
        yield client


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In the place of the check for all tests: Dask's own threads and connections come and go."""


@pytest.fixture(autouse=True)
def nothing_is_left(client: Client) -> Iterator[None]:
    yield
    wait_for(lambda: not jobs(), "nothing of a job runs")
    wait_for(lambda: not any(client.processing().values()), "Dask has no task left")


def jobs() -> list[int]:
    """Agents and ranks below this process."""
    found = []
    for pid in find_descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"reigen.launch" in command or b"reigen.runner" in command:
            found.append(pid)
    return found


def announced(path: Path, func: Callable[[], object]) -> threading.Thread:
    """A thread that calls the function when the file is there."""

    def wait() -> None:
        wait_for(path.exists, "the ranks run")
        func()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def sum_on_servers(timeline: str) -> tuple[int, int, float]:
    import numpy as np

    reigen.init()
    reigen.start_timeline(timeline)
    reigen.allreduce(np.ones(2), name="seen")
    reigen.stop_timeline()
    with reigen.kv.create("dist_sync") as store:
        total = np.empty(4, np.float32)
        store.init("w", np.zeros(4, np.float32))
        store.push("w", np.full(4, store.rank + 1, np.float32))
        store.pull("w", total)
        return store.rank, store.num_workers, float(total[0])


def test_parameter_servers_and_a_timeline(client: Client, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    results = reigen.dask.run(client, sum_on_servers, str(timeline), num_proc=3, num_servers=2)
    assert results == [(rank, 3, 6.0) for rank in range(3)]
    assert "seen" in timeline.read_text()


def test_results_by_rank(client: Client) -> None:
    offset = 5

    def func(factor: int, *, more: int) -> list[Any]:
        import numpy as np

        reigen.init()
        total = reigen.allreduce(np.full(2, float(reigen.rank())), op=reigen.Sum)
        place = [reigen.rank(), reigen.size(), reigen.local_size()]
        return [place, float(total[0]), factor * more + offset, os.environ["OF_ALL"], os.environ.get("OF_CLIENT")]

    os.environ["OF_CLIENT"] = "1"
    found = reigen.dask.run(client, func, 3, more=2, env={"OF_ALL": "x y"})
    assert found == [[[rank, 3, 3], 3.0, 11, "x y", None] for rank in range(3)]
    assert reigen.dask.run(client, lambda: int(os.environ["REIGEN_RANK"]), num_proc=5) == list(range(5))


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 7), ("kill", 137)])
def test_a_rank_that_fails(client: Client, how: str, code: int) -> None:
    def func() -> None:
        reigen.init()
        if reigen.rank() == 2:
            if how == "raise":
                raise ValueError("oops")
            if how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)

    with pytest.raises(RankFailedError) as caught:
        reigen.dask.run(client, func)
    assert (caught.value.rank, caught.value.exit_code) == (2, code)
    assert caught.value.host == socket.gethostname()
    assert isinstance(caught.value.__cause__, ValueError) is (how == "raise")


def test_a_worker_that_is_killed(client: Client, tmp_path: Path) -> None:
    def func() -> None:
        reigen.init()
        reigen.barrier()
        (tmp_path / "running").touch()
        time.sleep(300)

    workers = client.scheduler_info(n_workers=-1)["workers"]
    pids = client.run(os.getpid)
    first = min(workers)
    thread = announced(tmp_path / "running", lambda: os.kill(pids[first], signal.SIGKILL))
    with pytest.raises(RankFailedError) as caught:
        reigen.dask.run(client, func, workers=sorted(workers))
    thread.join()
    assert f"Dask says: Dask's worker {first} has gone" in str(caught.value)
    client.wait_for_workers(3)
    assert reigen.dask.run(client, lambda: int(os.environ["REIGEN_RANK"])) == [0, 1, 2]


def test_an_elastic_job_goes_on_when_ranks_and_workers_go_and_come(client: Client, tmp_path: Path) -> None:
    training = Training(tmp_path)
    found: list[list[Any]] = []

    def run() -> None:
        found.append(reigen.dask.run(client, train_until, str(tmp_path), num_proc=5, min_num_proc=2, max_num_proc=6))

    thread = threading.Thread(target=run)
    thread.start()
    first = training.wait_for_size(6)
    training.kill(first[1])
    second = training.wait_for_size(6, is_so=lambda steps: first[1].pid not in {each.pid for each in steps})
    assert second[0].pid == first[0].pid
    # a worker dies, not that of rank 0; its nanny starts another one, with another address
    processes = client.run(os.getpid)
    os.kill(next(pid for pid in processes.values() if second[0].pid not in find_descendants(pid)), signal.SIGKILL)
    third = training.wait_for_size(4)
    assert third[0].pid == first[0].pid
    training.wait_for_size(6, 90)
    training.end()
    thread.join(60)
    assert [result[:2] for result in found[0]] == [(rank, 6) for rank in range(6)]
    training.check()


def test_a_worker_that_is_busy_is_named(client: Client) -> None:
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    from distributed import Event

    blocker = Event("blocker", client=client)
    busy = [client.submit(wait_for_event, "blocker", number, workers=[workers[1]], pure=False) for number in range(2)]
    try:
        wait_for(lambda: len(client.processing()[workers[1]]) == 2, "the worker is busy")
        with pytest.raises(LaunchError, match=f"worker {workers[1]}.*has not come within"):
            reigen.dask.run(client, len, (), start_timeout=4.0)
    finally:
        blocker.set()
        client.gather(busy)
    assert reigen.dask.run(client, len, "ab") == [2, 2, 2]


def wait_for_event(name: str, number: int) -> int:
    from distributed import Event

    assert Event(name).wait(120)
    return number


def test_a_task_that_is_run_again_ends_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    submit = client.submit

    def recording(func: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(args[0])
        return submit(func, *args, **kwargs)

    monkeypatch.setattr(client, "submit", recording)
    assert reigen.dask.run(client, len, "a") == [1, 1, 1]
    assert len(seen) == 3
    started = time.monotonic()
    assert client.gather(submit(run_agents, seen[:1], pure=False)) == 1
    assert time.monotonic() - started < 15.0, "it does not wait for the start timeout"


def test_calls_that_cannot_be_done(client: Client) -> None:
    with pytest.raises(ConfigError, match="num_proc is 7; Dask's 3 workers have 6 threads"):
        reigen.dask.run(client, len, "a", num_proc=7)
    with pytest.raises(ConfigError, match=r"Dask has no worker tcp://10\.0\.0\.9:1"):
        reigen.dask.run(client, len, "a", workers=["tcp://10.0.0.9:1"])
