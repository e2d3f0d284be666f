"""Examples as a user starts them: alone, or with `reigen run`."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.testing.environment import clean_environment
from tests.multiprocess.launcher import launched, until
from tests.warm_python import current_session

ROOT = Path(__file__).parents[2]
#: PyTorch's scripts find torchvision's operators there, where those of its library cannot be loaded.
OPERATORS = ROOT / "tests" / "torchvision_operators"
DEADLINE_SECONDS = 580
#: That no environment has all of.
LIBRARIES = (
    "torch",
    "torchvision",
    "lightning",
    "PIL",
    "sklearn",
    "tensorflow",
    "keras",
    "jax",
    "flax",
    "optax",
    "mxnet",
)
_VARIABLES = {
    "PYTHONPATH": f"{ROOT / 'tests' / 'quick_python'}:{ROOT / 'src'}:{OPERATORS}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise torchvision's replacement of roi_align is compiled first
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # it compiles much longer than it computes
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


#: Imported once for all processes of a framework but each script's first; importing them starts no threads.
MODULES = {
    "torch": ["torch", "torchvision"],
    "tensorflow": ["tensorflow", "keras"],
    "jax": ["jax", "optax", "flax", "tensorflow"],  # which reads images
    "keras": ["keras", "tensorflow"],
}
#: `reigen launch`: servers and the scheduler run the script, too.
LAUNCH = ("launch", "--launcher", "local", "--no-prefix", "-n")
#: A ResNet that is trained for so short a time that the number of ranks does not show; bfloat16 has three digits.
SMALL_RESNET = ["--layers", 6, "--dtype", "float32", "--num-images", 32, "--batch", 16, "--micro-batch", 4]
SMALL_RESNET += ["--lr", 1, "--goal", 0]
#: A line of a script's while it trains: how fast, how well, and for how long.
PROGRESS = re.compile(r"^(?=.*[\d.] samples/s)(?=.*loss -?[\d.]+\d)(?=.*ETA \d)", re.MULTILINE)


def example_environment(backend: str = "") -> dict[str, str]:
    """Return the environment of a process that runs an example; ``backend`` is Keras's.

    What XLA compiles for one, JAX's cache has for those that compute the same.
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": str(current_session().directory / "jax")}
    return clean_environment() | _VARIABLES | cache | ({"KERAS_BACKEND": backend} if backend else {})


def run(
    script: str,
    *options: object,
    np: int = 1,
    servers: int = 0,
    launcher: tuple[str, ...] = ("run", "--no-prefix", "-np"),
    framework: str = "torch",
    backend: str = "",
    code: int = 0,
) -> str:
    """Return the output of an example of a framework on ``np`` ranks; without servers, one rank has no launcher.

    ``backend`` is Keras's; with another exit code than 0 it is what the example complained about.
    """
    started = [sys.executable, "-m", "reigen", *launcher, str(np)]
    started += ["-s", str(servers)] if servers else []
    environ = example_environment(backend)
    command = [*(started if np > 1 or servers else []), *_python(framework, backend, script, environ, code)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / framework / script), *map(str, options)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert code or PROGRESS.search(done.stdout), done.stdout
    return done.stderr if code else done.stdout


def _python(framework: str, backend: str, script: str, environ: dict[str, str], code: int) -> list[str]:
    """Return Python as a user starts it when a script trains for the first time; then one whose imports are done.

    Where another exit code than 0 is expected, it is the user's, too: a warm one might end so for reasons of its own.
    """
    session, name = current_session(), "-".join(filter(None, (framework, backend)))
    if code or session.is_first(f"{name}-{script}"):
        return [sys.executable]
    modules = ["sklearn.datasets", *MODULES[backend or framework], *(MODULES["keras"] if backend else ())]
    return session.command(name, [*modules, f"reigen.{framework}"], environ)


def run_elastic_and_kill_rank_0(directory: Path, framework: str, backend: str = "") -> str:
    """Return the output of a framework's elastic.py on three ranks, of which one dies early."""
    output = directory / "output"
    program = ["-np", "3", "--min-np", "2", sys.executable, str(ROOT / "examples" / framework / "elastic.py")]
    environ = example_environment(backend)
    with output.open("wb") as file, launched(*program, stdout=file, stderr=subprocess.STDOUT, env=environ) as launcher:
        until(lambda: "epoch   2/" in output.read_text(), DEADLINE_SECONDS)
        found = [line.split() for line in output.read_text().splitlines() if " is rank 0 of 3" in line]
        os.kill(int(found[0][found[0].index("process") + 1]), signal.SIGKILL)
        assert launcher.process.wait(DEADLINE_SECONDS) == 0, output.read_text()
    printed = output.read_text()
    assert "2 ranks go on at epoch" in printed
    assert PROGRESS.search(printed), printed
    return printed


def run_notebook(framework: str, backend: str = "") -> str:
    """Return what a notebook's cells print, run one after the other in ``__main__``; a kernel itself runs PyTorch's."""
    document = json.loads((ROOT / "examples" / framework / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        env=example_environment(backend),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed_help(scripts: list[Path]) -> dict[str, str]:
    """Return what scripts print with --help: those whose libraries are installed here."""
    command = [sys.executable, "-m", "tests.examples.helping", *map(str, scripts)]
    environ = example_environment("tensorflow") | {"COLUMNS": "200"}
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    missing = {f"needs {name}" for name in LIBRARIES if importlib.util.find_spec(name) is None}
    return {script: text for script, text in found.items() if text not in missing}


def options_without_help(printed: str) -> list[str]:
    """Return those options that --help only names."""
    lines = printed.partition("\noptions:\n")[2].splitlines()
    assert lines, printed
    return [
        line
        for line, after in itertools.pairwise([*lines, ""])
        if line.startswith("  -") and "  " not in line.strip() and not after.startswith(" " * 10)
    ]


def assert_help(scripts: list[Path]) -> None:
    """--help works, says what a script is, and something about each option."""
    printed = printed_help(scripts)
    assert printed
    for script, text in printed.items():
        assert text.startswith(f"usage: {Path(script).name}"), f"{script}: {text}"
        assert (ast.get_docstring(ast.parse(Path(script).read_text())) or "no text").splitlines()[0] in text
        assert options_without_help(text) == [], script


def figure(printed: str, name: str) -> float:
    """Return the last number that an example printed behind a name, which is a regular expression."""
    return float(re.findall(rf"{name} (-?[\d.]+\d)", printed)[-1])


def assert_same(name: str, tolerance: float, *printed: str) -> None:
    """Compare a figure of several runs: sums of floating-point numbers differ by their order alone."""
    figures = [figure(each, name) for each in printed]
    assert figures == pytest.approx([figures[0]] * len(figures), rel=tolerance), figures
