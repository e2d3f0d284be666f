"""`python -m reigen.compat install`: Horovod's names for all processes of one Python environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import reigen
from reigen.testing.environment import clean_environment

RANK = """
import os
import horovod, horovod.torch as hvd
try:
    hvd.rank()
except ValueError as error:
    print(error)
hvd.init()
print(horovod.__version__, hvd.rank(), hvd.size(), "WORLD_SIZE" in os.environ)
"""


class Environment:
    """A virtual environment with what this one has, Reigen first; PYTHONPATH leads elsewhere."""

    def __init__(self, root: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        self.bin = root / "bin"
        self.purelib = Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
        (self.purelib / "a.pth").write_text(f"{Path(reigen.__file__).parents[1]}\n{sysconfig.get_path('purelib')}\n")

    def __call__(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / program, *arguments],
            env={**clean_environment(), "PYTHONPATH": "/nowhere"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "an environment's")


@pytest.mark.slow
def test_horovodrun_and_import_horovod_whatever_pythonpath_says(environment):
    find = "import importlib.util; print(importlib.util.find_spec('horovod'))"
    for _ in range(2):  # a second time changes nothing
        done = environment("python", "-m", "reigen.compat", "install")
        assert (done.returncode, done.stderr) == (0, "")
    written = done.stdout.splitlines()
    assert written == [str(environment.purelib / "reigen-horovod.pth"), str(environment.bin / "horovodrun")]
    done = environment("horovodrun", "-np", "2", "--no-prefix", str(environment.bin / "python"), "-c", RANK)
    assert done.returncode == 0, done.stderr
    rank = "Horovod has not been initialized; use hvd.init()."
    assert sorted(done.stdout.splitlines()) == [f"0.28.1+reigen {r} 2 False" for r in range(2)] + [rank] * 2
    assert environment("python", "-m", "reigen.compat", "uninstall").stdout.splitlines() == written
    assert not any(Path(name).exists() for name in written)
    assert environment("python", "-c", find).stdout == "None\n"
    assert environment("python", "-m", "reigen.compat", "uninstall").stdout == ""


def test_what_belongs_to_horovod_is_left_alone(environment):
    horovodrun = environment.bin / "horovodrun"
    horovodrun.write_text("#!/bin/sh\n")
    done = environment("python", "-m", "reigen.compat", "install")
    assert (done.returncode, done.stderr) == (1, f"reigen.compat: {horovodrun} is another one: remove it first\n")
    assert environment("python", "-m", "reigen.compat", "uninstall").stdout == ""
    assert horovodrun.read_text() == "#!/bin/sh\n"
    horovodrun.unlink()
    package = environment.purelib / "horovod" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    done = environment("python", "-m", "reigen.compat", "install")
    assert done.returncode == 1
    assert f"Horovod is installed here ({package})" in done.stderr
    assert not horovodrun.exists()
    assert environment("python", "-m", "reigen.compat", "nonsense").returncode == 1
