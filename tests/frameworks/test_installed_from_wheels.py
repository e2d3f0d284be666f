"""Every combination of frameworks that is promised, installed from wheels into an environment of its own, trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
#: What is installed, and which programs are run in it, with which Keras backend.
COMBINATIONS = {
    "tensorflow": (
        ["reigen[keras,tensorflow]", "tf_keras"],
        [("tensorflow_step.py", ""), ("keras_fit.py", "tensorflow"), ("tensorflow_keras_fit.py", "legacy")],
    ),
    "oldest tensorflow": (
        ["reigen[tensorflow]", "tensorflow==2.16.2", "keras==3.5.0"],
        [("tensorflow_step.py", ""), ("keras_fit.py", "tensorflow"), ("tensorflow_keras_fit.py", "tensorflow")],
    ),
    "jax": (["reigen[jax,keras]", "optax"], [("jax_step.py", ""), ("keras_fit.py", "jax")]),
    "oldest jax": (["reigen[jax]", "optax", "jax==0.6.2", "jaxlib==0.6.2"], [("jax_step.py", "")]),
    "torch": (["reigen[keras,torch]"], [("keras_fit.py", "torch")]),
}
#: Their versions are in the environment of the other tests of frameworks; tests/packaging has all extras together.
USED_BY_OTHER_TESTS = {"tensorflow", "jax"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of Reigen's wheel, made of this checkout."""
    directory = tmp_path_factory.mktemp("wheels")
    source = directory / "source"  # a build writes into its source
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", directory, source], check=True)
    return directory


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """A virtual environment, which is removed: some are of 2 GB."""
    directory = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    yield directory
    shutil.rmtree(directory)


def constraints(requirements: list[str], path: Path) -> Path:
    """Those of this project, but for what a combination asks for in another version."""
    chosen = {requirement.partition("==")[0] for requirement in requirements if "==" in requirement}
    if "tensorflow" in chosen:  # older ones need an older NumPy and TensorBoard, among others
        chosen |= {"numpy", "ml_dtypes", "tensorboard"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path.write_text("\n".join(line for line in lines if line.partition("==")[0] not in chosen))
    return path


@pytest.mark.parametrize(
    "combination",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each in USED_BY_OTHER_TESTS)) for each in COMBINATIONS],
)
def test_two_ranks_train(combination: str, wheels: Path, environment: Path, tmp_path: Path) -> None:
    requirements, programs = COMBINATIONS[combination]
    python = environment / "bin" / "python"
    limits = constraints(requirements, tmp_path / "constraints.txt")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    # --no-compile: most of the modules are never imported
    install = [*pip, "install", "--no-compile", "--find-links", str(wheels), "-c", str(limits), *requirements]
    subprocess.run(install, check=True, env=environ, stderr=subprocess.DEVNULL)
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for program, keras in programs:
        choice = {"TF_USE_LEGACY_KERAS": "1"} if keras == "legacy" else {"KERAS_BACKEND": keras} if keras else {}
        command = [str(environment / "bin" / "reigen"), "run", "-np", "2", str(python), str(PROGRAMS / program)]
        done = subprocess.run(command, env=environ | choice, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{program} {keras}\n{done.stdout}{done.stderr}"
        digests = [line.split("digest ")[1] for line in done.stdout.splitlines() if "digest " in line]
        assert len(digests) == 2, done.stdout
        assert digests[0] == digests[1]
        assert "take longer" not in done.stdout + done.stderr  # what a fallback says
