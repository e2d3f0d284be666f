"""What `--as-mxnet` does before MXNet is there; with MXNet: tests/mxnet/test_kv.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import reigen
from reigen.compat import MXNET_DIRECTORY, as_mxnet

SOURCES = str(Path(reigen.__file__).parents[1])


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "REIGEN_"))}
    environ = as_mxnet({**environ, "PYTHONPATH": SOURCES, **variables})
    return subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_directory_comes_first_and_once() -> None:
    first = as_mxnet({"PYTHONPATH": os.pathsep.join(["/a", "/b"])})
    assert first["PYTHONPATH"].split(os.pathsep) == [MXNET_DIRECTORY, "/a", "/b"]
    assert as_mxnet(first) == first
    assert run("-m", "reigen.compat", "mxnet").stdout == MXNET_DIRECTORY + "\n"


def test_the_mxnet_further_down_the_path_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("raise ImportError(f'the real one: {__name__}, {__path__}')")
    done = run("-c", "import mxnet", PYTHONPATH=os.pathsep.join([SOURCES, str(tmp_path)]))
    assert f"the real one: mxnet, ['{tmp_path}/mxnet']" in done.stderr


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_server_serves_when_it_imports_mxnet_and_needs_none(role: str) -> None:
    done = run("-c", "import mxnet; print('went on')", DMLC_ROLE=role)  # of which job, it is not told
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "DMLC_PS_ROOT_URI is not set" in done.stderr


def test_a_role_set_by_hand_makes_the_launcher_the_command() -> None:
    script = "import os; print(os.getpid(), os.environ['DMLC_ROLE'], os.environ['PYTHONPATH'])"
    command = ("-m", "reigen", "run", "--as-mxnet", sys.executable, "-c", script)
    done = run(*command, DMLC_ROLE="worker")
    assert done.stdout.split()[1:] == ["worker", os.pathsep.join([MXNET_DIRECTORY, SOURCES])], done.stderr
    assert "-np/--num-proc" in run(*command).stderr
