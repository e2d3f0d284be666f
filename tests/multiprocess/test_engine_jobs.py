"""Jobs on an engine's hosts from the process that holds its client. The engine: processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import reigen
from reigen.errors import ArgumentError, ConfigError, LaunchError, RankFailedError
from reigen.launch.agent.dial_back import decode_dial_text
from reigen.runner.agent_process import AgentProcess
from reigen.runner.engine_executor import EngineExecutor
from reigen.runner.engine_jobs import Cancellation, EngineAgents, EngineHost, EngineJobOptions, run_on_engine
from reigen.runner.notes import send_note

HOSTS = [EngineHost("a.invalid", 2, "127.0.0.1", {"COLOUR": "red"}), EngineHost("b.invalid", 1, "127.0.0.1")]


class Engine:
    """Starts agents, as an engine would, and knows when they have ended."""

    def __init__(self) -> None:
        self.processes: dict[str, AgentProcess] = {}
        self.all: list[AgentProcess] = []
        self.texts: dict[str, str] = {}
        self.has_started = threading.Event()

    def start_agents(self, texts: Mapping[str, str]) -> None:
        self.texts.update(texts)
        for name, text in texts.items():
            self.processes[name] = AgentProcess(text)
            self.all.append(self.processes[name])
        self.has_started.set()

    def explain_exit(self, name: str) -> str:
        code = self.processes[name].wait(0) if name in self.processes else None
        return "" if code is None else f"the actor of {name} ended with {code}: {self.processes[name].output}"

    def agents(self, hosts=HOSTS, **more) -> EngineAgents:
        return EngineAgents("Toy", hosts, self.start_agents, self.explain_exit, **more)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    for process in made.all:
        process.stop()


def add(number: int) -> tuple[int, str | None, float]:
    reigen.init()
    total = reigen.allreduce(np.full(3, number, np.float32), op=reigen.Sum)
    return reigen.rank(), os.environ.get("COLOUR"), float(total[0])


def sum_on_servers(dies: bool) -> tuple[int, int, str, float]:
    store = reigen.kv.create("dist_sync")
    total = np.empty(4, np.float32)
    store.init("w", np.zeros(4, np.float32))
    for _ in range(3):
        store.push("w", np.full(4, store.rank + 1, np.float32))
        store.pull("w", total)
    if dies and store.rank == 0:
        [server] = find_server(1)
        os.kill(server, signal.SIGKILL)
        time.sleep(600)
    found = store.rank, store.num_workers, os.environ["DMLC_NUM_SERVER"], float(total[0])
    store.close()
    return found


def find_server(index: int) -> list[int]:
    """The process of a server of this job, wherever it is: by its environment."""
    own = {f"{name}={os.environ[name]}" for name in ("DMLC_PS_ROOT_PORT", "REIGEN_SECRET")}
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            variables = set((entry / "environ").read_bytes().decode(errors="replace").split("\0"))
            if entry.name.isdigit() and own | {"DMLC_ROLE=server", f"DMLC_TASK_ID={index}"} <= variables:
                found.append(int(entry.name))
    return found


def sleep_long() -> None:
    time.sleep(600)


def fail(rank: int) -> int:
    if int(os.environ["REIGEN_RANK"]) == rank:
        raise ValueError("no such thing")
    return rank


def die(rank: int) -> None:
    if int(os.environ["REIGEN_RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.slow
def test_a_function_runs_on_the_hosts_of_an_engine(engine):
    options = EngineJobOptions(environ={"COLOUR": "blue"})
    results = run_on_engine(add, (2,), agents=engine.agents(), options=options)
    assert results == [(0, "red", 6.0), (1, "red", 6.0), (2, "blue", 6.0)]


@pytest.mark.slow
def test_servers_run_beside_the_ranks_on_hosts_in_turn(engine, capfd):
    hosts = [EngineHost("localhost", 1, "127.0.0.1"), EngineHost("b.invalid", 1, "127.0.0.1")]
    options = EngineJobOptions(num_servers=2, environ={"REIGEN_KV_SNAPSHOT_DIR": ""}, verbose=True)
    results = run_on_engine(sum_on_servers, (False,), agents=engine.agents(hosts), options=options)
    assert results == [(0, 2, "2", 3.0), (1, 2, "2", 3.0)]
    started = re.findall(r"host (\S+): (server \d|scheduler): process", capfd.readouterr().err)
    assert sorted(started) == [("b.invalid", "server 1"), ("localhost", "server 0"), ("localhost#", "scheduler")]


@pytest.mark.slow
def test_servers_beside_tasks_that_were_gathered_and_one_that_is_killed(engine):
    agents = engine.agents(2, listen_towards="127.0.0.1", exports_environ=False, kept_variables=("",))
    options = EngineJobOptions(num_servers=2)
    with pytest.raises(LaunchError, match=r"^server 1 \(host .*\) failed first: killed by SIGKILL") as failed:
        run_on_engine(sum_on_servers, (True,), agents=agents, options=options)
    assert "a server is only where it keeps snapshots" in str(failed.value)
    assert failed.value.exit_code == 137
    with pytest.raises(ConfigError, match="num_servers must be at least 0, not -1"):
        run_on_engine(add, (1,), agents=agents, options=EngineJobOptions(num_servers=-1))


@pytest.mark.slow
def test_an_executor_with_servers_runs_several_functions(engine):
    with EngineExecutor(engine.agents(), EngineJobOptions(num_servers=1)) as executor:
        assert [found[3] for found in executor.run(sum_on_servers, (False,))] == [6.0] * 3
        assert executor.run(add, (1,))[0] == (0, "red", 3.0)


@pytest.mark.slow
def test_tasks_whose_hosts_nobody_knows_are_gathered(engine):
    agents = engine.agents(3, listen_towards="127.0.0.1", exports_environ=False, kept_variables=("",))
    assert [rank for rank, *_ in run_on_engine(add, (1,), agents=agents)] == [0, 1, 2]
    assert [process.wait(60) for process in engine.processes.values()] == [0, 0, 0]


@pytest.mark.slow
def test_a_rank_that_fails_is_the_drivers_exception_with_its_host(engine):
    with pytest.raises(RankFailedError) as failed:
        run_on_engine(fail, (2,), agents=engine.agents())
    assert (failed.value.rank, failed.value.host) == (2, "b.invalid")
    assert isinstance(failed.value.__cause__, ValueError)
    assert "rank 2 of 3 (host b.invalid) raised ValueError: no such thing" in str(failed.value)
    with pytest.raises(RankFailedError, match=r"rank 1 of 3 \(host a.invalid\) was killed by SIGKILL"):
        run_on_engine(die, (1,), agents=engine.agents())


@pytest.mark.slow
def test_an_agent_that_dies_is_explained_by_its_engine(engine):
    def kill() -> None:
        engine.has_started.wait(60)
        os.kill(engine.processes["b.invalid"].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(LaunchError, match=r"Toy says: the actor of b\.invalid ended with -9"):
        run_on_engine(sleep_long, agents=engine.agents())
    killer.join()


@pytest.mark.slow
def test_jobs_are_cancelled_from_another_thread(engine):
    cancellation = Cancellation()

    def cancel() -> None:
        engine.has_started.wait(60)
        cancellation.cancel("enough")

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(LaunchError, match="the job was cancelled: enough"):
        run_on_engine(sleep_long, agents=engine.agents(), cancellation=cancellation)
    canceller.join()
    with pytest.raises(LaunchError, match="the job was cancelled: enough"):
        run_on_engine(sleep_long, agents=engine.agents(), cancellation=cancellation)


@pytest.mark.slow
def test_an_engine_that_cannot_start_agents_ends_the_job(engine):
    def refuse(texts: Mapping[str, str]) -> None:
        raise RuntimeError("no cluster")

    with pytest.raises(RuntimeError, match="no cluster"):
        run_on_engine(sleep_long, agents=EngineAgents("Toy", HOSTS, refuse))

    def half(texts: Mapping[str, str]) -> None:
        engine.start_agents({name: text if name == "a.invalid" else "nonsense" for name, text in texts.items()})

    with pytest.raises(LaunchError, match=r"(?s)1 of 2 .*b.invalid  Toy says: .* no dial text"):
        run_on_engine(sleep_long, agents=EngineAgents("Toy", HOSTS, half, engine.explain_exit))


@pytest.mark.slow
def test_a_ticket_is_worth_nothing_when_the_job_runs(engine):
    """Who finds a dial text in the records of an engine learns that it was used."""
    found: list[str] = []

    def use_again() -> None:
        engine.has_started.wait(60)
        deadline = time.monotonic() + 60
        while "ready" not in found and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        thief = AgentProcess(engine.texts["b.invalid"])
        code = thief.wait(60)
        found.append(f"{code}: {thief.output}")
        thief.stop()
        executor.run(os.getpid)
        executor.shutdown()

    executor = EngineExecutor(engine.agents())
    executor.start()
    found.append("ready")
    thread = threading.Thread(target=use_again)
    thread.start()
    thread.join()
    assert found[1].startswith("1: "), found
    assert "two agents claim host b.invalid" in found[1]
    assert decode_dial_text(engine.texts["b.invalid"]).ticket not in found[1]


def test_orders_that_cannot_be(engine):
    for hosts, options, what in (
        (HOSTS, EngineJobOptions(num_ranks=4), "Toy has given 3 slots, and 4 processes were asked for"),
        ([HOSTS[0], HOSTS[0]], EngineJobOptions(), "a host twice"),
        ([], EngineJobOptions(), "no slots"),
        (2, EngineJobOptions(), "listen_towards"),
        (HOSTS, EngineJobOptions(start_timeout_seconds=-1), "start timeout"),
    ):
        with pytest.raises(ConfigError, match=what):
            run_on_engine(sleep_long, agents=engine.agents(hosts), options=options)


# ---------------------------------------------------------------------------------------------- ranks that stay


class Counter:
    def __init__(self, begin: int) -> None:
        self.number = begin


def count(counter: Counter, step: int) -> int:
    counter.number += step
    send_note({"number": counter.number})
    return counter.number


def meet_without(rank: int) -> None:
    reigen.init()
    if reigen.rank() == rank:
        raise ValueError("not me")
    reigen.allreduce(np.ones(1, np.float32))


@pytest.mark.slow
def test_ranks_stay_and_run_one_function_after_the_other(engine):
    notes: list[tuple[int, dict[str, int]]] = []
    executor = EngineExecutor(
        engine.agents(), state=(Counter, (5,), {}), on_note=lambda rank, note: notes.append((rank, note))
    )
    with executor:
        assert executor.hosts == ["a.invalid", "a.invalid", "b.invalid"]
        pids = executor.run(os.getpid)
        assert executor.run(count, (1,), with_state=True) == [6, 6, 6]
        assert executor.run(count, (1,), with_state=True, ranks=[2]) == [7]
        assert executor.run(count, (1,), with_state=True) == [7, 7, 8]
        assert (2, {"number": 8}) in notes
        large = np.arange(1_000_000.0)
        assert [float(result.sum()) for result in executor.run(np.negative, (large,))] == [-large.sum()] * 3
        with pytest.raises(RankFailedError, match=r"rank 1 of 3 \(host a.invalid\) raised ValueError: no such thing"):
            executor.run(fail, (1,))
        assert executor.run(os.getpid) == pids
        with pytest.raises(ArgumentError, match="there is no rank 3"):
            executor.run(os.getpid, ranks=[3])
    with pytest.raises(ArgumentError, match="has ended"):
        executor.run(os.getpid)
    executor.shutdown()


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_failed_are_stopped(engine):
    with EngineExecutor(engine.agents(), EngineJobOptions(grace_seconds=0.5)) as executor:
        with pytest.raises(RankFailedError, match="rank 1 of 3") as failed:
            executor.run(meet_without, (1,))
        assert isinstance(failed.value.__cause__, ValueError)
        executor.shutdown()
        with pytest.raises(ArgumentError, match="has ended"):
            executor.run(os.getpid)


@pytest.mark.slow
def test_an_executor_whose_rank_dies_says_which(engine):
    with EngineExecutor(engine.agents()) as executor:
        with pytest.raises(RankFailedError, match="was killed by SIGKILL") as failed:
            executor.run(die, (2,))
        assert (failed.value.rank, failed.value.host) == (2, "b.invalid")


@pytest.mark.slow
def test_a_state_that_cannot_be_made_is_an_error_of_the_start(engine):
    executor = EngineExecutor(engine.agents(), state=(Counter, (), {}))
    with pytest.raises(RankFailedError, match="raised TypeError"):
        executor.start()


def test_notes_are_for_ranks():
    with pytest.raises(RuntimeError, match="has started on an engine"):
        send_note(sys.path)
