"""Scripts as users of Horovod's estimators have written them, with Horovod's names, in a Spark of one host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import reigen
from reigen.compat import DIRECTORY
from tests.engines.spark.cluster import why_no_spark

SCRIPTS = Path(__file__).parent / "horovod_scripts"
_MISSING = [name for name in ("pyarrow", "pandas", "torch", "keras", "sklearn") if find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_no_spark()), reason=why_no_spark()),
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are not installed here"),
]


def run_script(name: str, directory: Path, *arguments: str) -> str:
    """What a script prints, in a driver that has Horovod's names."""
    path = os.pathsep.join([DIRECTORY, str(Path(reigen.__file__).parents[1])])
    environ = {
        "PYTHONPATH": path,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    environ |= {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, SCRIPTS / name, "--master", "local[2]", "--num-proc", "2", "--work-dir", directory]
    done = subprocess.run(
        [*command, *arguments], env={**os.environ, **environ}, capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def number_after(text: str, output: str) -> float:
    found = re.search(rf"^{text}: ([0-9.]+)$", output, re.MULTILINE)
    assert found, output[-3000:]
    return float(found[1])


def test_digits_with_torch_estimator(tmp_path: Path) -> None:
    output = run_script("pytorch_spark_digits.py", tmp_path)
    assert number_after("Test accuracy", output) > 0.85
    assert "epoch 12: " in output


def test_sales_with_keras_estimator(tmp_path: Path) -> None:
    output = run_script("keras_spark_sales.py", tmp_path)
    best, found = number_after("Best RMSPE", output), number_after("Test RMSPE", output)
    assert found < 0.1
    assert abs(best - found) < 0.05, "the model of the best epoch is the one that predicts"


def test_the_estimator_for_lightning_says_what_to_do() -> None:
    code = "import horovod.spark.lightning"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([DIRECTORY, str(Path(reigen.__file__).parents[1])])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert "call Lightning's own Trainer in a function, and that by reigen.spark.run" in done.stderr
