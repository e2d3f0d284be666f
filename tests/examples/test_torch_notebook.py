"""The notebook of examples/torch runs from top to bottom in a kernel of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from reigen.testing.environment import clean_environment
from tests.examples.running import DEADLINE_SECONDS, ROOT


@pytest.mark.timeout(600)
def test_the_notebook(tmp_path: Path) -> None:
    file = tmp_path / "executed.ipynb"
    program = "from nbclient.cli import main; main()"
    command = [sys.executable, "-c", program, "--timeout", "300", "--output", str(file.with_suffix(""))]
    environ = clean_environment() | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "torch" / "notebook.ipynb")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = nbformat.read(file, as_version=4).cells
    printed = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))
    assert "epoch 10/10" in printed
    assert "test accuracy 0.9" in printed
