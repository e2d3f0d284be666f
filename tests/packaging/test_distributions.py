"""The distributions that a release has: the wheel made of the sdist, installed with nothing else, runs a job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from reigen import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff", "SECURITY.md")
#: Bytes to be downloaded for `pip install reigen`, with all that it needs.
MAX_BYTES = 30_000_000
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
JOB = """
import sys
import numpy as np
import reigen
reigen.init()
total = reigen.allreduce(np.ones(3, np.float32), op=reigen.Sum)
print("total", total.tolist(), [name for name in ("torch", "tensorflow", "jax") if name in sys.modules])
"""


def build(directory: Path) -> tuple[Path, list[Path]]:
    """The sdist of this checkout, and the wheels made of it and of all that it needs."""
    source, out = directory / "source", directory / "out"  # a build writes into its source
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    tools = directory / "tools"
    found = {each.name: each.version for each in metadata.distributions()}.get("setuptools", "0")
    if int(found.partition(".")[0]) < 77:
        subprocess.run([*PIP, "install", "--target", tools, "setuptools>=77"], check=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    environ = os.environ | {"PYTHONPATH": str(tools)}
    subprocess.run([sys.executable, "-c", code, out], cwd=source, env=environ, check=True, capture_output=True)
    [sdist] = out.glob("*.tar.gz")
    limits = ROOT / "constraints.txt"
    wheel = [*PIP, "wheel", "--no-build-isolation", "-c", limits, "-w", out, sdist]
    subprocess.run(wheel, env=environ, check=True, stderr=subprocess.DEVNULL)
    return sdist, sorted(out.glob("*.whl"))


def test_the_wheel_of_the_sdist_is_small_and_runs_a_job_without_anything_else(tmp_path: Path) -> None:
    sdist, wheels = build(tmp_path)
    assert sdist.name == f"reigen-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES, "src/reigen/py.typed", "src/reigen/torch/ops.pyi"} <= names

    packages = {wheel.name.partition("-")[0].lower() for wheel in wheels}
    assert {"reigen", "numpy", "msgspec"} <= packages
    assert not packages & {"torch", "tensorflow", "jax", "keras"}
    assert sum(wheel.stat().st_size for wheel in wheels) < MAX_BYTES, [(w.name, w.stat().st_size) for w in wheels]

    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = ["install", "--no-compile", "--no-index", "--find-links", tmp_path / "out", "reigen"]
    subprocess.run([*PIP, "--python", python, *install], check=True)

    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "train.py").write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    reigen = str(environment / "bin" / "reigen")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [reigen, *arguments], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("--version") == f"reigen {__version__}\n"
    assert run("run", "--no-prefix", "-np", "2", str(python), "job.py") == "total [2.0, 2.0, 2.0] []\n" * 2
    assert "+import reigen.torch as hvd" in run("migrate", "train.py")
