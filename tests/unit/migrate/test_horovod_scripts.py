"""Scripts for Horovod: what is said of their lines, and their imports afterwards."""

from __future__ import annotations

import re
import textwrap

import pytest

from reigen.errors import ConfigError
from reigen.migrate.findings import LineFinding
from reigen.migrate.horovod import find_in_horovod_script
from reigen.migrate.syntax import PythonSource
from reigen.migrate.text_files import apply_edits


def find(text: str) -> tuple[list[LineFinding], str]:
    """Findings, and the text after the edits."""
    text = textwrap.dedent(text)
    findings = list(find_in_horovod_script(PythonSource(text)))
    return findings, apply_edits(text, [edit for finding in findings for edit in finding.edits])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import horovod.torch as hvd\nhvd.init()\n", "import reigen.torch as hvd\nhvd.init()\n"),
        ("import horovod.torch\nhorovod.torch.init()\n", "import reigen.torch\nreigen.torch.init()\n"),
        ("import os, horovod.mxnet as hvd  # x\nhvd.rank()\n", "import os, reigen.mxnet as hvd  # x\nhvd.rank()\n"),
        (
            "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None\nhvd.size()\n",
            "try:\n    import reigen.torch as hvd\nexcept ImportError:\n    hvd = None\nhvd.size()\n",
        ),
        (
            "from horovod.torch.mpi_ops import (\n    allreduce,  # y\n)\n",
            "from reigen.torch import (\n    allreduce,  # y\n)\n",
        ),
        ("import horovod\nhorovod.run(f, np=2)\n", "import reigen\nreigen.run(f, np=2)\n"),
        ("from horovod import run\n", "from reigen import run\n"),
        ("import horovod.tensorflow.keras as hvd\nhvd.callbacks.MetricAverageCallback()\n", None),
        ("from horovod.tensorflow.keras import callbacks\ncallbacks.MetricAverageCallback()\n", None),
        ("from horovod.spark.keras import KerasEstimator\n", "from reigen.spark.keras import KerasEstimator\n"),
    ],
)
def test_imports_become_reigens(old: str, new: str | None) -> None:
    findings, text = find(old)

    assert text == (old.replace("horovod", "reigen") if new is None else new)
    assert {finding.status for finding in findings} <= {"works", "change"}
    assert find(text) == ([], text)


@pytest.mark.parametrize(
    "text",
    [
        "import horovod.torch as hvd\nhvd.mpi_ops.allreduce(x)\n",  # reigen.torch has no such module
        "from horovod.common.util import gpu_available\n",
        "import horovod.torch\nimport horovod.torch.elastic\nhorovod.torch.elastic.run(f)\n",
        "import horovod.tensorflow as hvd\nhvd.broadcast_variables(opt.variables(), root_rank=0)\n",  # of Keras 2
        "import importlib\nhvd = importlib.import_module('horovod.torch')\n",
    ],
)
def test_imports_that_need_the_option_stay(text: str) -> None:
    findings, new = find(text)

    assert new == text
    assert {finding.status for finding in findings} == {"works"}
    assert "--as-horovod" in findings[0].message


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("import horovod.torch as hvd\nhvd.allredcue(x)\n", 2, "no allredcue here; it has allreduce"),
        ("import horovod.torch as hvd\nhvd.allreduce(x, priority=3)\n", 2, "allreduce.. has no parameter priority"),
        ("from horovod.torch import nothing\n", 1, "no nothing here"),
        ("import horovod.data\n", 1, "no data loaders"),
        ("import horovod.runner.mpi_run as m\n", 1, "no module horovod.runner.mpi_run"),
        ("from horovod.spark import lightning\n", 1, "no estimator for Lightning"),
    ],
)
def test_what_is_not_there(text: str, line: int, message: str) -> None:
    findings, _ = find(text)
    [finding] = [each for each in findings if each.status == "cannot"]

    assert finding.line == line
    assert re.search(message, finding.message)


def test_clipping_before_synchronize_and_the_check_for_threads_are_to_be_changed() -> None:
    findings, _ = find("""\
        import torch
        import horovod.torch as hvd
        assert hvd.mpi_threads_supported()
        optimizer = hvd.DistributedOptimizer(optimizer)
        def step():
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        def right():
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """)

    assert [each.line for each in findings if each.status == "change" and not each.edits] == [3, 7]


def test_local_variables_are_no_modules() -> None:
    findings, _ = find("""\
        import horovod.torch as hvd
        def f(hvd):
            hvd.nothing()
        def g():
            hvd = object()
            hvd.nothing()
        def h():
            import horovod.mxnet as hvd
            hvd.DistributedTrainer(params, 'sgd')
    """)

    assert {each.status for each in findings} <= {"works", "change"}


def test_variables_have_their_effect_or_none() -> None:
    findings, _ = find("""\
        import os
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        os.environ["HOROVOD_CYCLE_TIME"] = "5"
        os.environ.setdefault("HOROVOD_FUSION_TRESHOLD", "1")
    """)

    assert [each.message.split(":")[0] for each in findings] == [
        "works as it is",
        "has no effect",
        "means nothing here, and would be ignored with a warning",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print 'hello'\nimport horovod.torch as hvd\n", r"Python 2 \(line 1"),
        ("try:\n    pass\nexcept IOError, e:\n    pass\n", "Python 2"),
        ("def f(:\n", "no Python that Python 3"),
        ("x = '\0'\n", "null"),
        ("(" * 500 + ")" * 500, "nested|too many|no Python"),
    ],
)
def test_what_cannot_be_parsed(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PythonSource(text)
