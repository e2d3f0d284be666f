"""Projects for MXNet's KVStore that `reigen migrate --apply` has changed train by their own command lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.cli.main import main
from tests.quick_python import quick_environment

SCRIPT = Path(__file__).parent / "programs" / "gluon_classes.py"

pytestmark = pytest.mark.slow  # several processes


def test_a_command_of_launch_py_starts_the_unchanged_script(tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPT, tmp_path))
    job = tmp_path / "run.sh"
    job.write_text(
        "#!/bin/sh\nset -e\npython ../../tools/launch.py -n 2 -s 1 --launcher local \\\n"
        "  python gluon_classes.py --kv-store dist_sync\n"
    )

    assert main(["migrate", "--apply", str(tmp_path)]) == 0

    assert script.read_text() == SCRIPT.read_text()
    assert "\nreigen launch --as-mxnet -n 2 -s 1 --launcher local \\\n" in job.read_text()
    environ = quick_environment()
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        ["sh", job.name], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"RESULT rank=(\d) of (\d) accuracy=(\S+) norm=(\S+)", done.stdout)
    assert sorted((rank, size) for rank, size, _, _ in found) == [("0", "2"), ("1", "2")]
    assert len({norm for _, _, _, norm in found}) == 1
    assert min(float(accuracy) for _, _, accuracy, _ in found) > 0.9
