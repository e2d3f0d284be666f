"""Elastic jobs on an engine's hosts, which come and go. The engine: processes of this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reigen.errors import ConfigError, LaunchError, RankFailedError
from reigen.launch.elastic.options import Cooldown, ElasticOptions
from reigen.runner.agent_process import AgentProcess
from reigen.runner.engine_jobs import Cancellation, EngineAgents, EngineHost, EngineJobOptions, run_on_engine
from reigen.runner.notes import send_note
from tests.elastic.engine_training import Training, train_until
from tests.multiprocess.launcher import launched, until

A, B = (EngineHost(f"{name}.invalid", 2, "127.0.0.1", {"COLOUR": name}) for name in "ab")
#: Rests are short, so that what has failed comes back soon.
SHORT = Cooldown(0.5, 0.5, max_failures=None)


class Engine:
    """Starts agents, as an engine would; its hosts are a list that the test changes."""

    def __init__(self) -> None:
        self.hosts: list[EngineHost] = []
        self.texts: dict[str, str] = {}
        self.agents: dict[str, AgentProcess] = {}
        self.all: list[AgentProcess] = []
        self.cancellation = Cancellation()

    def start_agents(self, texts: Mapping[str, str]) -> None:
        self.texts.update(texts)
        for name, text in texts.items():
            self.start(name, text)

    def start(self, name: str, text: str, attempt: int = 0) -> None:
        """Starts an agent, or an attempt of a task."""
        self.agents[name] = AgentProcess(text, attempt=attempt)
        self.all.append(self.agents[name])

    def explain_exit(self, name: str) -> str:
        code = self.agents[name].wait(0) if name in self.agents else None
        return "" if code is None else f"the actor of {name} ended with {code}"

    def run(self, function: Callable[..., Any], *args: Any, num_tasks: int = 0, **options: Any) -> Future[Any]:
        """Runs a job in a thread."""
        hosts: Any = num_tasks or self.hosts
        elastic = ElasticOptions(2, 2, cooldown=SHORT, timeout_seconds=60, start_timeout_seconds=60)
        notes = options.pop("on_note", None)
        elastic = options.pop("change", lambda each: each)(elastic)
        agents = EngineAgents(
            "Toy", hosts, self.start_agents, self.explain_exit, discover=lambda: self.hosts, listen_towards="127.0.0.1"
        )
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = run_on_engine(
                    function,
                    args,
                    agents=agents,
                    options=EngineJobOptions(elastic=elastic, **options),
                    cancellation=self.cancellation,
                    on_note=notes,
                )
                future.set_result(result)
            except BaseException as error:  # noqa: BLE001  the test raises it
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.cancellation.cancel()
    for process in made.all:
        process.stop()


@pytest.mark.slow
def test_hosts_come_and_go_while_a_job_runs(engine: Engine, tmp_path: Path):
    training = Training(tmp_path)
    engine.hosts[:] = [A]
    job = engine.run(train_until, str(tmp_path), change=lambda each: replace(each, max_ranks=3))
    first = training.wait_for_size(2)
    assert [step.colour for step in first] == ["a", "a"]
    engine.hosts.append(B)  # one place of two is used
    second = training.wait_for_size(3)
    assert [step.pid for step in second[:2]] == [step.pid for step in first]
    assert second[2].colour == "b"
    # its agent dies, and all on that host with it; the others stay, and it is called again
    os.kill(engine.agents["b.invalid"].pid, signal.SIGKILL)
    third = training.wait_for_size(3, is_so=lambda steps: steps[2].pid != second[2].pid)
    assert [step.pid for step in third[:2]] == [step.pid for step in first]
    assert len(engine.all) == 3
    del engine.hosts[1]  # and its rank leaves
    fourth = training.wait_for_size(2)
    assert [step.pid for step in fourth] == [step.pid for step in first]
    training.end()
    results = job.result(60)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert results[0][2:] == results[1][2:]
    training.check()


@pytest.mark.slow
def test_tasks_come_and_go_while_a_job_runs(engine: Engine, tmp_path: Path):
    """All of them are one host, for they are on one machine: the first is its agent."""
    training = Training(tmp_path)
    job = engine.run(train_until, str(tmp_path), num_tasks=3, change=lambda each: replace(each, max_ranks=3))
    until(lambda: len(engine.agents) == 3)
    first = training.wait_for_size(3)
    # a rank dies: its place is used again
    training.kill(first[1])
    second = training.wait_for_size(3, is_so=lambda steps: first[1].pid not in {step.pid for step in steps})
    # a task that only holds a slot dies: a rank leaves; its next attempt brings the slot back
    agent = next(name for name, process in engine.agents.items() if _has_children(process.pid))
    holder = next(name for name in engine.agents if name != agent)
    os.kill(engine.agents[holder].pid, signal.SIGKILL)
    training.wait_for_size(2)
    engine.start(holder, engine.texts[holder], attempt=1)
    training.wait_for_size(3)
    assert second[0].pid in {step.pid for step in training.steps()[-3:]}
    training.end()
    assert len(job.result(60)) == 3
    until(lambda: all(process.wait(0) is not None for process in engine.all))
    training.check()


def _has_children(pid: int) -> bool:
    return any((thread / "children").read_text().strip() for thread in Path(f"/proc/{pid}/task").iterdir())


def note_and_end(name: str) -> int:
    import reigen as hvd

    hvd.init()
    send_note((name, hvd.rank()))
    return hvd.rank()


@pytest.mark.slow
def test_notes_of_an_elastic_job(engine: Engine):
    engine.hosts[:] = [A]
    notes: list[tuple[int, Any]] = []
    job = engine.run(note_and_end, "hello", on_note=lambda slot, note: notes.append((slot, note)))
    assert job.result(60) == [0, 1]
    assert sorted(notes) == [(0, ("hello", 0)), (1, ("hello", 1))]


@pytest.mark.slow
def test_an_engine_that_never_has_enough(engine: Engine):
    engine.hosts[:] = [EngineHost("a.invalid", 1, "127.0.0.1")]
    job = engine.run(note_and_end, "", change=lambda each: replace(each, start_timeout_seconds=2.0))
    with pytest.raises(LaunchError, match="Timed out waiting for minimum number of slots"):
        job.result(60)
    with pytest.raises(ConfigError, match="listen_towards"):
        run_on_engine(
            note_and_end,
            agents=EngineAgents("Toy", [], engine.start_agents),
            options=EngineJobOptions(elastic=ElasticOptions(1)),
        )


def fail_everywhere() -> None:
    raise ValueError("no such thing")


@pytest.mark.slow
def test_a_function_that_fails_everywhere(engine: Engine):
    engine.hosts[:] = [A]
    with pytest.raises(RankFailedError, match="raised ValueError: no such thing"):
        engine.run(fail_everywhere).result(60)


DIALING = "tests.conformance.dialing_launcher:DialingLauncher"


@pytest.mark.slow
def test_a_launcher_whose_agents_dial_back_has_elastic_jobs(tmp_path: Path):
    training = Training(tmp_path)
    program = f"from tests.elastic.engine_training import train_until; train_until({str(tmp_path)!r})"
    options = ["--min-np", "1", "--blacklist-cooldown-range", "1", "1", "-H", "h1.invalid:1,h2.invalid:1", "-np", "2"]
    options += ["--launcher", DIALING]
    with launched(*options, sys.executable, "-c", program, env={"PYTHONPATH": os.pathsep.join(sys.path)}) as job:
        first = training.wait_for_size(2)
        agent = next(
            pid for pid, command in job.processes().items() if "--dial" in command and _is_ancestor(pid, first[1].pid)
        )
        os.kill(agent, signal.SIGKILL)
        training.wait_for_size(2, is_so=lambda steps: steps[0].pid == first[0].pid and steps[1].pid != first[1].pid)
        training.end()
        code, _, err = job.finish()
        assert code == 0, err
    training.check()


@pytest.mark.slow
def test_nodes_that_start_themselves_go_and_come_anew(tmp_path: Path):
    """As pods of an Indexed Job do, all of them on this machine."""
    training = Training(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("5e" * 32)
    secret.chmod(0o600)
    program = f"from tests.elastic.engine_training import train_until; train_until({str(tmp_path)!r})"
    options = [
        "--min-np",
        "1",
        "--blacklist-cooldown-range",
        "1",
        "1",
        "--nodes-from-env",
        "--network-interfaces",
        "lo",
    ]
    environ = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "REIGEN_NODES": "3",
        "REIGEN_LEADER": "127.0.0.1",
        "REIGEN_SECRET_FILE": str(secret),
    }

    def node(index: int) -> Any:
        variables = {**environ, "JOB_COMPLETION_INDEX": str(index)}
        return stack.enter_context(launched(*options, sys.executable, "-c", program, env=variables))

    with ExitStack() as stack:
        nodes = [node(0), node(1)]
        first = training.wait_for_size(2)
        os.kill(nodes[1].process.pid, signal.SIGKILL)
        assert training.wait_for_size(1)[0].pid == first[0].pid
        nodes += [node(1), node(2)]
        assert training.wait_for_size(3)[0].pid == first[0].pid
        training.end()
        ends = [each.finish() for each in nodes]
        assert [code for code, *_ in ends] == [0, -signal.SIGKILL, 0, 0], ends
    training.check()


def _is_ancestor(pid: int, of: int) -> bool:
    while of > 1 and of != pid:
        of = int(Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()[1])
    return of == pid
