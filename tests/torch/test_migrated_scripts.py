"""Scripts for DDP and Horovod that `reigen migrate --apply` has changed train as they did before."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.cli.main import main

SCRIPTS = Path(__file__).parent / "migrate_scripts"
#: What the unchanged scripts print on two ranks: by DDP over Gloo (`python ddp_spawn.py`, `python ddp_main_worker.py`,
#: and the others by `reigen run --torchrun-env -np 2 python ddp_trainer.py`), and by `reigen run --as-horovod -np 2
#: python horovod_mnist.py`.
RESULTS = {
    "ddp_spawn": [(1.79815, 1.79815)],
    "ddp_trainer": [(0, 13.8791, 1.01178), (1, 13.7033, 1.01178)],
    "ddp_launch": [(2, 0, 7.17082)],
    "ddp_runner": [(0, 0.56094), (1, 0.56094)],
    "ddp_late": [(0, 0.48694), (1, 0.48694)],
    "ddp_handed": [(0, 0.37179), (1, 0.37179)],
    "ddp_gpt": [(0, 239.94304), (1, 239.94304)],
    "ddp_ema": [(0, 3.5107, 1.405), (1, 3.5107, 1.405)],
    "ddp_main_worker": [(80, 0.35981, 14.04345)],
    "tv_train": [(48, 0.93857, 0.87175)],
    "horovod_mnist": [(2, 4.58790)],
    "horovod_imagenet": [(2, 0.67307, 7.94762), (2, 0.67307, 7.94762)],
}
#: Files that have no results of their own; and a script that is not changed, for groups are to be changed by hand.
HELPERS = ["tv_utils"]
KEPT = {"ddp_groups": [(0, -0.14967), (1, -0.20887)]}


@pytest.mark.slow
def test_changed_scripts_give_the_results_of_ddp_and_of_horovod(tmp_path: Path) -> None:
    for name in [*RESULTS, *HELPERS, *KEPT]:
        shutil.copy(SCRIPTS / f"{name}.py", tmp_path)

    assert main(["migrate", "--apply", str(tmp_path)]) == 0

    texts = {file: file.read_text() for file in tmp_path.iterdir()}
    old = re.compile(r"\bdist\.(?!is_available)|DataParallel\(|DDP\(|horovod\.torch|mp\.spawn")
    assert [file.stem for file, text in texts.items() if old.search(text)] == list(KEPT)
    assert all(texts[tmp_path / f"{name}.py"] == (SCRIPTS / f"{name}.py").read_text() for name in KEPT)
    changed = [str(tmp_path / f"{name}.py") for name in [*RESULTS, *HELPERS]]
    assert main(["migrate", "--apply", "--check", *changed]) == 0
    assert texts == {file: file.read_text() for file in tmp_path.iterdir()}

    command = [sys.executable, "-m", "reigen", "run", "-np", "2", "--no-prefix", "--torchrun-env"]
    program = [sys.executable, str(SCRIPTS / "run_all.py"), str(tmp_path), *RESULTS, *KEPT]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = sorted(
        tuple(map(float, re.findall(r"-?[\d.]+", line)[:3])) for line in re.findall(r"RESULT ([-\d. ]+)", done.stdout)
    )
    results = [*RESULTS.values(), *KEPT.values()]
    expected = sorted(tuple(map(float, each)) for of_script in results for each in of_script)
    assert printed == [pytest.approx(each, rel=1e-3) for each in expected]
    assert "['rank 0', 'rank 1'] ['net1.weight', 'net1.bias', 'net2.weight', 'net2.bias']" in done.stdout
