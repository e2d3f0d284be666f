"""Shell commands of the documentation run, one after the other in one directory; of the others NOT_RUN says why not.

All are parsed besides (test_docs_commands.py). The programs that pages leave to their reader, `train.py` and
`hosts.sh`, are those of this file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from reigen.testing.environment import clean_environment
from tests.docs.blocks import Block, blocks, blocks_of
from tests.docs.commands import command_lines
from tests.multiprocess.launcher import MARK, marked, until
from tools.docs.__main__ import ROOT

DEADLINE_SECONDS = 120
#: Why no test runs a command as a page has it, and which tests have what it does.
NOT_RUN = {
    r"-H (h1|hosts)|--hosts |--hostfile|\bssh\b": "needs several hosts: tests/network has stand-in ones",
    r"^(mpirun|salloc|torchrun|(.* )?srun)\b|--launcher mpi": "of another launcher: tests/network, tests/multiprocess",
    r"^(exec )?reigen run (--nodes-from-env|python)|^export REIGEN_SECRET": "in an engine's job: tests/network",
    r"--launcher (kubernetes|sge|yarn)|kubectl|HADOOP": "needs an engine: tests/network, tests/engines",
    r"^pip |^python3(\.11)? -m venv": "installs packages: tests/packaging",
    r"pytest tests/gpu": "needs a GPU",
    r"^make |^\. ": "runs the tests, or takes minutes",
    r"^reigen bench|benchmarks\.|tests\.fuzz": "takes minutes: tests/unit/benchmarks, tests/fuzz",
    r"--costs": "needs what `reigen bench costs` measures: tests/unit/cli",
    r"as-mxnet|reigen\.compat|V/bin|examples/mxnet": "needs MXNet: tests/mxnet",
    r"torch/kvstore\.py": "takes half a minute: tests/kv/test_trainer.py runs the example once",
    r"KERAS_BACKEND": "needs Keras: tests/keras",
    r"^horovodrun": "a command that `python -m reigen.compat install` makes: tests/multiprocess",
    r"^reigen top|^kill|torch/elastic\.py": "of a job in another terminal: tests/multiprocess, tests/elastic",
}
#: In the place of what a page has and a test cannot have: a directory, and more ranks than matter here.
REPLACED = {r"/tmp/": "", r"(?<= )-np 4(?= .*train\.py\b)(?!.* sh -c)": "-np 2"}
#: Each of them is another one.
PORTS = ("8080", "9091")
#: Like any program: collectives, and a store where there are servers. Timelines are those of a training by torch.
TRAIN = """
import os
import numpy as np
import reigen, reigen.kv

if {"HOROVOD_TIMELINE", "REIGEN_TIMELINE"} & os.environ.keys():
    exec(compile(open("first_job.py").read(), "first_job.py", "exec"))
elif "DMLC_PS_ROOT_PORT" in os.environ:
    with reigen.kv.create("dist_sync") as store:
        store.init("w", np.zeros(4))
        num_workers = store.num_workers  # of an elastic job one may have ended by the time the sum is there
        store.push("w", np.ones(4))
        store.pull("w", out := np.empty(4))
        assert out.tolist() == [num_workers] * 4
        print("pulled", flush=True)
else:
    reigen.init()
    assert reigen.allreduce(np.ones(4), op=reigen.Sum).tolist() == [reigen.size()] * 4
    print("trained", flush=True)
"""
FILES = {
    "train.py": TRAIN,
    "hosts.sh": "#!/bin/sh\necho localhost:4\n",
    "src/old.py": "import horovod.torch as hvd\n\nhvd.init()\n",
}
#: What commands have written in the end.
WRITTEN = {"src/old.py": "import reigen.torch as hvd", "train.json": '"tensors"', "plan.svg": "<svg", "tune.csv": ","}


def why_not(line: str) -> str | None:
    """Why no test runs a command, if none does."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), None)


def replaced(line: str) -> str:
    """A command with what a test has in the place of what it cannot have."""
    for written, used in REPLACED.items():
        line = re.sub(written, used, line)
    return line


def scripts() -> Iterator[tuple[Block, list[str]]]:
    """The commands to run of each block, each once; first those on which others depend."""
    seen = set()
    found = blocks("bash", "console")
    for block in sorted(found, key=lambda each: (each.page != "docs/timeline.md", each.page, each.line)):
        lines = [replaced(line) for line in command_lines(block) if why_not(line) is None]
        is_whole = any(line.endswith("&") for line in lines)
        fresh = [line for line in lines if is_whole or line not in seen]
        seen.update(lines)
        if any(not line.startswith("export ") for line in fresh):
            yield block, fresh


def run(lines: list[str], directory: Path) -> str:
    """Run a script; its output. Nothing of it is left."""
    script, mark = "\n".join([*lines, "for job in $(jobs -p); do wait $job; done"]), uuid.uuid4().hex
    for port in PORTS:
        script = script.replace(port, str(unused_port()))
    process = subprocess.Popen(
        ["bash", "-euxc", script],
        env=clean_environment()
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
        | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", MARK: mark},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
    except BaseException:
        for pid in (process.pid, *marked(mark)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=10.0)
        raise
    assert process.returncode == 0, out
    until(lambda: not marked(mark))
    return out


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def prepare(directory: Path) -> None:
    """Write what pages leave to their reader, or tell him to save."""
    cluster = next(blocks_of("docs/planner.md", "yaml")).text
    program = next(blocks_of("docs/tutorials/first-job.md", "python")).text
    for name, text in {**FILES, "cluster.yaml": cluster, "first_job.py": program}.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


def test_every_reason_is_that_of_a_command() -> None:
    lines = {line for block in blocks("bash", "console") for line in command_lines(block)}
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, line) for line in lines)] == []
    assert sum(why_not(line) is None for line in lines) > 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed here")
def test_commands_run_and_write_what_pages_say(tmp_path: Path) -> None:
    prepare(tmp_path)
    printed = {block.page: "" for block, _ in scripts()}
    for block, lines in scripts():
        try:
            printed[block.page] += run(lines, tmp_path)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            error.add_note(f"{block.page}, line {block.line}: {lines}")
            raise
    for name, text in WRITTEN.items():
        assert text in (tmp_path / name).read_text(), name
    for block in blocks_of("docs/metrics.md", "json"):
        shown = json.loads(block.text)
        records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert any(shown.keys() == each.keys() and shown["role"] == each["role"] for each in records), shown
    survives = next(blocks_of("docs/elastic-tutorial.md", "console"))
    assert squeezed(survives.text.partition("\n")[2]) in squeezed(printed["docs/elastic-tutorial.md"])
    rehearsed = next(blocks_of("docs/tutorials/several-hosts.md", "text")).text
    for line in rehearsed.splitlines():
        assert line.removeprefix("[0] ").removesuffix("(...)") in printed["docs/tutorials/several-hosts.md"], line


def squeezed(text: str) -> str:
    """A text whose columns may have another width."""
    return re.sub(r" {2,}", " ", text).strip()
