"""Options of submitted jobs, which mean the same to every engine."""

from __future__ import annotations

import pytest

from reigen.errors import ConfigError
from reigen.launch.job_options import name_of_command, parse_memory
from reigen.launch.kubernetes.manifest import make_name
from reigen.launch.sge.submission import choose_job_name
from reigen.launch.submission import SubmissionOptions
from reigen.launch.yarn.requests import container_sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4g", 4 << 30),
        ("4Gi", 4 << 30),
        ("4GiB", 4 << 30),
        ("512m", 512 << 20),
        (" 1.5G ", 3 << 29),
        ("2048k", 2 << 20),
        ("2 TB", 2 << 40),
    ],
)
def test_memory(text: str, num_bytes: int) -> None:
    assert parse_memory("--worker-memory", text) == num_bytes


@pytest.mark.parametrize("text", ["", "g", "4 apples", "-1g", "0g", "1k", "nan", "1024", "4x"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--worker-memory .*: it is no size of memory like 4g or 512m, with a unit"):
        parse_memory("--worker-memory", text)


def test_memory_means_the_same_to_every_engine() -> None:
    assert container_sizes(SubmissionOptions(worker_memory="1.5g"))[0].memory_mb == 1536
    with pytest.raises(ConfigError, match="--worker-memory 1024: "):
        container_sizes(SubmissionOptions(worker_memory="1024"))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "-u", "dir/train it.py", "--token", "hunter2"), "train it.py"),
        (("python", "train.py", "--hook", "other.sh"), "train.py"),
        (("/opt/bin/train", "--password", "hunter2"), "train"),
        (("run.sh",), "run.sh"),
        (("bash", "-c", "KEY=hunter2 python train.py"), "bash"),
        (("python", "KEY=hunter2.py"), "python"),
        ((), ""),
    ],
)
def test_a_name_says_nothing_of_arguments(command: tuple[str, ...], name: str) -> None:
    assert name_of_command(command) == name
    assert "hunter2" not in choose_job_name(None, command) + make_name(command, "0a1b2c")
