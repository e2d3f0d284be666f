"""Scripts for Horovod with Keras that `reigen migrate --apply` has changed run without Horovod's names."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.cli.main import main
from tests.quick_python import quick_environment

SCRIPTS = Path(__file__).parent / "horovod_scripts"


@pytest.mark.parametrize(("name", "backend"), [("keras_mnist.py", "torch"), ("keras_resume.py", "tensorflow")])
def test_changed_scripts_train_without_horovods_names(tmp_path: Path, name: str, backend: str) -> None:
    script = Path(shutil.copy(SCRIPTS / name, tmp_path))
    assert main(["migrate", "--apply", str(script)]) == 0
    assert "horovod" not in re.sub(r'""".*?"""', "", script.read_text(), flags=re.DOTALL)

    done = subprocess.run(
        [sys.executable, "-m", "reigen", "run", "-np", "2", "--no-prefix", sys.executable, str(script)]
        + ([str(tmp_path), "--epochs", "2"] if name == "keras_resume.py" else []),
        env={**quick_environment(), "TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "0", "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    ranks = re.findall(r"^done rank=(\d+) same=True", done.stdout, re.MULTILINE)
    assert sorted(map(int, ranks)) == [0, 1], done.stdout
