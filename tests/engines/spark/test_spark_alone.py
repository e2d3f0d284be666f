"""`pip install reigen[spark]`: pyspark alone is what reigen.spark needs, without what its estimators do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reigen.testing.environment import clean_environment
from tests.engines.spark.cluster import why_no_spark
from tools.docs.__main__ import ROOT

#: What spark-estimators has besides, and frameworks.
NOT_THERE = ("fsspec", "jax", "keras", "pandas", "pyarrow", "tensorflow", "torch")
PROGRAM = """
import sys
sys.modules |= dict.fromkeys({missing}, None)  # an import of these is an ImportError
import reigen.spark
from tests.engines.spark.local import local_session

def rank():
    import reigen
    reigen.init()
    return reigen.rank() + 10 * reigen.size()

with local_session():
    print(reigen.spark.run(rank, num_proc=2))
try:
    import reigen.spark.torch
except ImportError as error:
    print(error.name)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_spark()), reason=why_no_spark())
def test_pyspark_alone_runs_functions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(missing=NOT_THERE)],
        env=clean_environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout.splitlines()[:1] == ["[20, 21]"], done
    assert done.stdout.splitlines()[1] in NOT_THERE, done
