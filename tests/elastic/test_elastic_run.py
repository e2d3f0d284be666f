"""`reigen run` with an elastic job of a Horovod script: a process is killed, hosts come and go."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reigen._version import __version__
from tests.multiprocess.launcher import DEADLINE_SECONDS, launched, until
from tests.multiprocess.test_launch_hosts import FAKE_SSH

pytestmark = pytest.mark.slow

COUNTING = Path(__file__).with_name("counting_program.py")
LEAVING = Path(__file__).with_name("leaving_program.py")
PROGRAM = Path(__file__).with_name("horovod_program.py")


def test_a_horovod_script_survives_a_kill_and_follows_the_discovery(tmp_path: Path):
    hosts, script, enough = tmp_path / "hosts", tmp_path / "discover.sh", tmp_path / "enough"
    hosts.write_text("localhost:2\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    options = ["--as-horovod", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script)]
    more = ["--blacklist", "seat", "--blacklist-cooldown-range", "1", "1"]
    output = tmp_path / "output"
    with (
        output.open("wb") as file,
        launched(
            *options, *more, sys.executable, str(PROGRAM), str(enough), stdout=file, stderr=subprocess.STDOUT
        ) as launcher,
    ):

        def batches(size: int) -> list[list[str]]:
            found = [line.split("BATCH ")[1].split() for line in output.read_text().splitlines() if "BATCH " in line]
            return [each for each in found if len(each) == 4 and each[2] == str(size)]

        def pids(size: int) -> set[int]:
            return {int(each[3]) for each in batches(size)}

        until(lambda: len(batches(2)) > 10)
        first = pids(2)
        survivor = min(first)
        os.kill(max(first), signal.SIGKILL)
        until(lambda: len(pids(2)) == 3)  # one goes on, and one is new
        hosts.write_text("localhost:3\n")
        until(lambda: len(batches(3)) > 10)
        hosts.write_text("localhost:2\n")
        before = len(batches(2))
        until(lambda: len(batches(2)) > before + 10 and "slot 2 has left\n" in output.read_text())
        enough.touch()
        assert launcher.process.wait(DEADLINE_SECONDS) == 0, output.read_text()
    numbers = [int(line.split()[-4]) for line in output.read_text().splitlines() if line.endswith(f" {survivor}")]
    assert sorted(set(numbers)) == list(range(1, max(numbers) + 1))  # no batch is missing
    assert len(numbers) - len(set(numbers)) <= 1  # a death makes one batch anew; who is asked to leave does not
    said = [line for line in output.read_text().splitlines() if line.startswith("reigen run: ")]
    assert "killed by SIGKILL" in said[0]
    # one line for each view: a death, who came in its place, a host with one place more, and with one less
    views = [line.removeprefix("reigen run: ") for line in said if ": view " in line]
    assert len(views) == 4, said
    killed = r"slot \d has gone \(killed by SIGKILL\); .*since the last commit is done again"
    assert re.fullmatch(rf"view 2: 1 rank goes on \d+\.\d s after that; {killed}", views[0]), views
    planned = "nothing is done again"
    assert re.fullmatch(rf"view 3: 2 ranks go on after \d+\.\d\d s; slot \d joins as rank 1; {planned}", views[1]), (
        views
    )
    assert re.fullmatch(rf"view 4: 3 ranks go on after \d+\.\d\d s; slot \d joins as rank 2; {planned}", views[2]), (
        views
    )
    left = r"slot 2 has gone \(host localhost has fewer places\)"
    assert re.fullmatch(rf"view 5: 2 ranks go on after \d+\.\d\d s; {left};.* {planned}", views[3]), views


def test_a_job_that_is_told_to_end_saves_the_state_of_one_step(tmp_path: Path):
    output = tmp_path / "output"
    command = ["-np", "3", "--min-np", "1", sys.executable, str(COUNTING), "100000000", "0.01"]
    with output.open("wb") as file, launched(*command, stdout=file, stderr=subprocess.STDOUT) as launcher:

        def lines(text: str) -> list[list[str]]:
            return [line.split(" ") for line in output.read_text().splitlines() if text in line]

        until(lambda: len(lines("STEP")) > 20)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    last = {line[0]: line[2] for line in lines("STEP ")}
    assert len(last) == 3
    assert len(set(last.values())) == 1
    assert {line[0]: line[2] for line in lines("LEFT ") if line[-1] == "all_leave=True)"} == last


def test_a_job_of_steps_that_is_told_to_end_writes_its_checkpoint(tmp_path: Path):
    """One process leaves, and the others go on; then all are told to end, and rank 0 writes what all have applied."""
    output, checkpoint = tmp_path / "output", tmp_path / "checkpoint.pt"
    command = ["-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "60", "60"]
    program = [sys.executable, str(LEAVING), str(checkpoint)]
    with output.open("wb") as file, launched(*command, *program, stdout=file, stderr=subprocess.STDOUT) as launcher:

        def fields(text: str) -> list[list[str]]:
            lines = [line.split() for line in output.read_text().splitlines()]
            return [words[2:] for words in lines if words[1:2] == [text]]

        until(lambda: len(fields("STEP")) > 20)
        (leaving,) = (pid for rank, pid in fields("RANK") if rank == "2")
        os.kill(int(leaving), signal.SIGTERM)
        until(lambda: "view 2: 2 ranks go on" in output.read_text())
        until(lambda: fields("LEFT"))
        assert [left[:2] for left in fields("LEFT")] == [["2", "3"]]
        assert not checkpoint.exists()
        before = len(fields("STEP"))
        until(lambda: len(fields("STEP")) > before + 20)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    last = fields("LEFT")[1:]
    assert sorted(left[:2] for left in last) == [["0", "2"], ["1", "2"]]
    assert torch.load(checkpoint, weights_only=False)["number"] == int(last[0][2]) == int(last[1][2])


def test_a_straggler_is_ejected_and_nothing_is_done_again(tmp_path: Path):
    """Its place is filled again when it has rested, by a process that is as fast as the others."""
    output = tmp_path / "output"
    options = ["-np", "3", "--min-np", "2", "--eject-stragglers", "2/10", "--blacklist-cooldown-range", "1", "1"]
    command = [*options, sys.executable, str(COUNTING), "100000000", "0.01"]
    environ = {"SLOW": "1.0:0.2"}
    with output.open("wb") as file, launched(*command, stdout=file, stderr=subprocess.STDOUT, env=environ) as launcher:

        def steps(slot: str) -> list[list[str]]:
            lines = [line.split() for line in output.read_text().splitlines() if " STEP " in line]
            return [line[2:] for line in lines if len(line) == 7 and line[0] == f"[{slot}]"]

        until(lambda: "view 2: 2 ranks go on" in output.read_text())
        until(lambda: "view 3: 3 ranks go on" in output.read_text())
        num = len(steps("1"))
        until(lambda: len(steps("1")) > num + 5)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM, output.read_text()
    said = [line for line in output.read_text().splitlines() if line.startswith("reigen run: ")]
    late = r"slot 1 is late: 0\.\d+ s of work in each of the last 10 steps, where the median of the others is 0\.\d+ s"
    rests = "it is asked to leave: 2 processes go on, its place rests for 1 s"
    assert re.fullmatch(f"reigen run: {late}; {rests}", said[0]), said
    assert "reigen run: slot 1 has left" in said
    for slot in "02":
        numbers = [int(step[0]) for step in steps(slot)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert [float(step[3]) for step in steps(slot)] == [number * (number - 1) // 2 for number in numbers]
    taken = [int(step[0]) for step in steps("1")]
    assert taken == sorted(set(taken)), "the place's second process goes on where the members are"


def test_hosts_that_come_with_another_version_or_secret_disturb_nobody(tmp_path: Path):
    """The job names them, and they say what to do; the members make each step once."""
    hosts, output = tmp_path / "hosts", tmp_path / "output"
    hosts.write_text("localhost:2\n")
    (tmp_path / "sitecustomize.py").write_text('import reigen._version\nreigen._version.__version__ = "0.0.1"\n')
    files = {
        "discover": f"cat {hosts}",
        "ssh": FAKE_SSH.partition("\n")[2],
        # of the program: something between the agent and Python changes its environment
        "program": f'[ "$FAKE_HOST" != wrong.invalid ] || export REIGEN_SECRET={"5e" * 32}\nexec "$@"',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    old = f'export PYTHONPATH={tmp_path}; set -- "$1" "$2" "$(echo "$3" | sed "s#PYTHONPATH=#&{tmp_path}:#")"'
    does = f"if [ $FAKE_HOST = old.invalid ]; then {old}; fi"
    options = ["--min-np", "2", "--max-np", "4", "--host-discovery-script", str(tmp_path / "discover")]
    program = [str(tmp_path / "program"), sys.executable, str(COUNTING), "100000000", "0.01"]
    with (
        output.open("wb") as file,
        launched(
            *(*options, "--ssh-command", str(tmp_path / "ssh"), *program),
            stdout=file,
            stderr=subprocess.STDOUT,
            env={"FAKE_SSH_DOES": does},
        ) as launcher,
    ):

        def says(text: str) -> bool:
            return text in output.read_text()

        def steps() -> list[int]:
            return [int(number) for number in re.findall(r"^\[0\] STEP (\d+) 0 2 ", output.read_text(), re.MULTILINE)]

        until(lambda: len(steps()) > 5)
        hosts.write_text("localhost:2\nold.invalid:1\nwrong.invalid:1\n")
        until(lambda: says("host old.invalid cannot take part: Reigen 0.0.1 there, ") and says("slot 2 (host wrong"))
        num = len(steps())
        until(lambda: len(steps()) > num + 5)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM, output.read_text()
    assert says(f" {__version__} here: install the same version on all hosts; it is called again in 10 s")
    assert says("slot 2 (host wrong.invalid): exit code 1; 2 processes go on, its place rests for")
    assert says("(REIGEN_SECRET) is not that of the job. The job's launcher sets it")
    assert steps() == list(range(1, len(steps()) + 1))
    assert not says("view 2")


def test_the_example_reaches_its_accuracy_though_a_process_dies(tmp_path: Path):
    output = tmp_path / "output"
    example = Path(__file__).parents[2] / "examples" / "torch" / "elastic.py"
    command = ["-np", "3", "--min-np", "2", sys.executable, str(example), "--epochs", "20"]
    with (
        output.open("wb") as file,
        launched(*command, stdout=file, stderr=subprocess.STDOUT) as launcher,
    ):
        until(lambda: "epoch   2/" in output.read_text())
        found = [line.split() for line in output.read_text().splitlines() if " is rank 0 of 3" in line]
        os.kill(int(found[0][found[0].index("process") + 1]), signal.SIGKILL)
        assert launcher.process.wait(DEADLINE_SECONDS) == 0, output.read_text()
    assert "2 ranks go on at epoch" in output.read_text()
    assert "test accuracy 0.9" in output.read_text()


def test_the_example_of_a_job_loses_no_step_though_rank_0_dies(tmp_path: Path):
    output = tmp_path / "output"
    checkpoint = tmp_path / "digits.pt"
    example = Path(__file__).parents[2] / "examples" / "torch" / "elastic_job.py"
    program = [sys.executable, str(example), "--epochs", "15", "--checkpoint", str(checkpoint), "--workers", "1"]
    with (
        output.open("wb") as file,
        launched("-np", "3", "--min-np", "2", *program, stdout=file, stderr=subprocess.STDOUT) as launcher,
    ):
        until(lambda: "epoch 2:" in output.read_text())
        found = [line.split() for line in output.read_text().splitlines() if " is rank 0 of 3" in line]
        os.kill(int(found[0][found[0].index("process") + 1]), signal.SIGKILL)
        assert launcher.process.wait(DEADLINE_SECONDS) == 0, output.read_text()
    said = output.read_text()
    assert "2 ranks at step" in said
    # who dies while it tests the model, between two steps, costs none
    outcome = (
        r"(nothing is done again"
        r"|step \d+ (\(samples \d+-\d+ of epoch \d+\) )?(is undone and run again|is completed with|had been applied))"
    )
    assert re.search(
        rf"view 2: 2 ranks go on .* after that; slot 0 has gone \(killed by SIGKILL\); .*; {outcome}", said
    ), said
    assert "epoch 15:" in said
    state = torch.load(checkpoint, weights_only=True)
    assert state["number"] == 15 * 23
    assert (state["data"]["epoch"], state["data"]["position"]) == (14, 1437)
