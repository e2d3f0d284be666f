"""The distributions that a release has: the wheel of the sdist, with nothing else, on each Python, and with extras."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from reigen import __version__

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff", "SECURITY.md")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
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
TOTALS = "total [2.0, 2.0, 2.0] []\n" * 2
#: Extras that need another version of a package than development does.
OTHER_VERSIONS = {"mxnet": ["numpy"], "sagemaker": ["rich", "pyarrow"]}
#: Small extras: what needs each, as options of `reigen run` and variables.
SMALL_EXTRAS: dict[str, tuple[list[str], dict[str, str]]] = {
    "tls": ([], {"REIGEN_TLS": "1"}),
    "metrics": (["--metrics-port", "0"], {}),
    "dashboard": (["--dashboard", "0"], {}),
    "autotune": (["--autotune"], {}),
}
#: Extras that no environment of tests has, and the test of each.
TESTED_ALONE = {
    "fuzz": "tests/packaging/test_distributions.py",
    "sagemaker": "tests/packaging/test_distributions.py",
    "spark": "tests/engines/spark/test_spark_alone.py",
}


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


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return build(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def bare(distributions: tuple[Path, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with Reigen and what it needs, and no pip."""
    environment = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = ["install", "--no-compile", "--no-index", "--find-links", distributions[0].parent, "reigen"]
    subprocess.run([*PIP, "--python", environment / "bin" / "python", *install], check=True)
    return environment


def run_reigen(python: Path, directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`reigen` of an environment, with its `bin` before all others; a program is job.py."""
    (directory / "job.py").write_text(JOB)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PATH": f"{python.parent}:{os.environ['PATH']}", **variables}
    command = [str(python), "-m", "reigen", *arguments]
    return subprocess.run(command, env=environ, cwd=directory, capture_output=True, text=True, timeout=300, check=False)


def run_job(python: Path, directory: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Two ranks add up arrays."""
    run = ("run", "--no-prefix", "-np", "2", *options)
    return run_reigen(python, directory, *run, str(python), "job.py", **variables)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_of_the_sdist_is_small_and_runs_a_job_without_anything_else(
    distributions: tuple[Path, list[Path]], bare: Path, tmp_path: Path
) -> None:
    sdist, wheels = distributions
    assert sdist.name == f"reigen-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES, "src/reigen/py.typed", "src/reigen/torch/ops.pyi"} <= names

    packages = {wheel.name.partition("-")[0].lower() for wheel in wheels}
    assert {"reigen", "numpy", "msgspec"} <= packages
    assert not packages & {"torch", "tensorflow", "jax", "keras"}
    assert sum(wheel.stat().st_size for wheel in wheels) < MAX_BYTES, [(w.name, w.stat().st_size) for w in wheels]

    python = bare / "bin" / "python"
    version = subprocess.run([bare / "bin" / "reigen", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"reigen {__version__}\n"
    done = run_job(python, tmp_path)
    assert (done.returncode, done.stdout) == (0, TOTALS), done.stderr
    (tmp_path / "train.py").write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    assert "+import reigen.torch as hvd" in run_reigen(python, tmp_path, "migrate", "train.py").stdout


def find_interpreters() -> dict[str, str]:
    """Another interpreter of each version from 3.11 on that is on PATH, or that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    places = [*filter(None, names), *sorted(map(str, pyenv.glob("versions/*/bin/python3")))]
    found: dict[str, str] = {}
    for place in places:  # pyenv's may be scripts for versions that are not chosen
        code = "import ensurepip, sys, venv; print(*sys.version_info[:2], sys.executable)"
        try:
            done = subprocess.run([place, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        except OSError:  # a link to one that is gone
            continue
        if done.returncode == 0:
            major, minor, executable = done.stdout.strip().split(" ", 2)
            if (3, 11) <= (int(major), int(minor)) != sys.version_info[:2]:
                found.setdefault(f"{major}.{minor}", executable)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_runs_a_job_on_every_python_that_is_here(
    distributions: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    if not (found := find_interpreters()):
        pytest.skip("there is no other Python from 3.11 on here")
    [wheel] = distributions[0].parent.glob("reigen-*.whl")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for version, interpreter in found.items():
        environment = tmp_path / version
        subprocess.run([interpreter, "-m", "venv", environment], check=True, env=environ)
        python = environment / "bin" / "python"
        install = ["-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wheel]
        subprocess.run([python, *install], check=True, env=environ, stderr=subprocess.DEVNULL)
        done = run_job(python, tmp_path)
        assert (done.returncode, done.stdout) == (0, TOTALS), f"Python {version}\n{done.stderr}"


# ---------------------------------------------------------------- extras


def install_beside(bare: Path, directory: Path, *requirements: str) -> Path:
    """An environment with what ``bare`` has, of which nothing is installed anew, and this; returns its Python."""
    environment = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    [packages] = environment.glob("lib/python*/site-packages")
    [beside] = bare.glob("lib/python*/site-packages")
    (packages / "bare.pth").write_text(f"{beside}\n")
    install = ["install", "--no-compile", "-c", ROOT / "constraints.txt", *requirements]
    subprocess.run([*PIP, "--python", python, *install], check=True, stderr=subprocess.DEVNULL)
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", SMALL_EXTRAS)
def test_a_small_extra_brings_what_a_job_lacks_without_it(
    extra: str, distributions: tuple[Path, list[Path]], bare: Path, tmp_path: Path
) -> None:
    options, variables = SMALL_EXTRAS[extra]
    without = run_job(bare / "bin" / "python", tmp_path, *options, **variables)
    lacking = "pip install cryptography" if extra == "tls" else f"reigen[{extra}]"
    assert lacking in without.stdout + without.stderr, without
    python = install_beside(bare, tmp_path, f"reigen[{extra}]")
    done = run_job(python, tmp_path, *options, **variables)
    assert done.returncode == 0, done
    assert done.stdout.count("total [2.0, 2.0, 2.0] []") == 2, done
    assert lacking not in done.stdout + done.stderr, done


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_fuzz_extra_fuzzes(bare: Path, tmp_path: Path) -> None:
    def fuzz(python: Path) -> subprocess.CompletedProcess[str]:
        command = [
            python,
            "-m",
            "tests.fuzz.explore",
            "in_between",
            "-runs=20",
            "-seed=1",
            f"-artifact_prefix={tmp_path}/",
        ]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)

    without = fuzz(bare / "bin" / "python")
    assert "No module named 'atheris'" in without.stderr, without
    done = fuzz(install_beside(bare, tmp_path, "reigen[fuzz]"))
    assert done.returncode == 0, done
    assert "Done 20 runs" in done.stderr, done


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sagemaker_extra_has_the_class_that_ours_is_one_of(tmp_path: Path) -> None:
    """Without what it needs itself, which is 500 MB: a test of our class runs where all of it is installed."""
    [requirement] = EXTRAS["sagemaker"]
    install = ["install", "--no-deps", "--no-compile", "--target", tmp_path, requirement]
    subprocess.run([*PIP, *install], check=True, stderr=subprocess.DEVNULL)
    tree = ast.parse((tmp_path / "sagemaker/train/distributed.py").read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DistributedConfig"]
    needed = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    ours = ast.parse((ROOT / "src/reigen/sagemaker/distributed.py").read_text())
    [own] = [node for node in ours.body if isinstance(node, ast.ClassDef)]
    assert needed == {node.name for node in own.body if isinstance(node, ast.FunctionDef)}


TOGETHER = [name for name in EXTRAS if name not in OTHER_VERSIONS]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extras", [TOGETHER, *([name] for name in OTHER_VERSIONS)], ids=["most", *OTHER_VERSIONS])
def test_extras_have_versions_of_all_that_they_need_which_go_together(
    extras: list[str], distributions: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    """Then those of each extra alone do so, too: they are some of these.

    Nothing is installed, and of most packages only what they say of themselves is loaded.
    """
    [wheel] = distributions[0].parent.glob("reigen-*.whl")
    limits, report = tmp_path / "constraints.txt", tmp_path / "report.json"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    others = {name for extra in extras for name in OTHER_VERSIONS.get(extra, ())}
    limits.write_text("".join(line for line in lines if line.partition("==")[0] not in others))
    install = ["install", "--dry-run", "--ignore-installed", "--report", report, "-c", limits]
    requirement = f"reigen[{','.join(extras)}] @ {wheel.as_uri()}"
    subprocess.run([*PIP, *install, requirement], check=True, stderr=subprocess.DEVNULL)
    chosen = {each["metadata"]["name"].lower().replace("_", "-") for each in json.loads(report.read_text())["install"]}
    for extra in extras:
        wanted = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in EXTRAS[extra]}
        assert {"reigen", "numpy", *wanted} <= chosen, extra


def test_every_extra_is_in_an_environment_or_has_a_test() -> None:
    environments = re.findall(r"-e '\.\[([\w,-]+)\]'", (ROOT / "Makefile").read_text())
    wheels = (ROOT / "tests/frameworks/test_installed_from_wheels.py").read_text()
    installed = {
        name for group in environments + re.findall(r'"reigen\[([\w,]+)\]"', wheels) for name in group.split(",")
    }
    assert installed | SMALL_EXTRAS.keys() == EXTRAS.keys() - TESTED_ALONE.keys()
    assert all(
        f"[{name}]" in (ROOT / path).read_text() or f"_{name}_" in (ROOT / path).read_text()
        for name, path in TESTED_ALONE.items()
    )
    assert {*EXTRAS["spark"]} <= {*EXTRAS["spark-estimators"]}
