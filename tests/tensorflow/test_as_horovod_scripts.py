"""`reigen run --as-horovod`: scripts and suites for Horovod with TensorFlow and Keras, unmodified, on 1, 2, 3 ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_python import quick_environment

SCRIPTS = Path(__file__).parent / "horovod_scripts"
KERAS_3, LEGACY = {"TF_USE_LEGACY_KERAS": "0"}, {"TF_USE_LEGACY_KERAS": "1"}
BOTH = [pytest.param(KERAS_3, id="keras3"), pytest.param(LEGACY, id="legacy")]


def ran(size: int, *arguments: str, environ: dict[str, str] = KERAS_3) -> tuple[str, str]:
    """What the ranks of a script with arguments wrote: (stdout, stderr)."""
    command = [sys.executable, "-m", "reigen", "run", "--as-horovod", "-np", str(size), "--no-prefix", sys.executable]
    done = subprocess.run(
        [*command, *arguments],
        env={**quick_environment(), "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-12000:]
    return done.stdout, done.stderr


def assert_trained(out: str, size: int, least_accuracy: float = 0.8) -> None:
    """All ranks came to the same weights, which are better than the first ones."""
    ended = re.findall(r"^done rank=(\d+) same=True improved=True", out, re.MULTILINE)
    assert sorted(map(int, ended)) == list(range(size)), out
    found = re.search(r"^accuracy (\S+)$", out, re.MULTILINE)
    assert found is not None
    assert float(found[1]) > least_accuracy


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly), 3])
def test_suites(size: int) -> None:
    _, err = ran(size, "-m", "unittest", "suite_tensorflow", "suite_keras")
    assert len(re.findall(r"^OK", err, re.MULTILINE)) == size
    assert size == 1 or "skipped" not in err


def test_suites_with_legacy_keras() -> None:
    size = 3
    chosen = ["test_sync_batch_normalization", "test_partial_gradient_tape"]
    suites = ["suite_keras", *(f"suite_tensorflow.TensorFlowTests.{name}" for name in chosen)]
    _, err = ran(size, "-m", "unittest", *suites, environ=LEGACY)
    assert len(re.findall(r"^OK", err, re.MULTILINE)) == size
    assert "skipped" not in err


@pytest.mark.parametrize(
    ("option", "keras"),
    [pytest.param("", LEGACY, id="legacy"), pytest.param("--use-mixed-precision", KERAS_3, id="keras3")],
)
def test_a_loop_with_a_tape(option: str, keras: dict[str, str]) -> None:
    out, _ = ran(2, "tensorflow2_mnist.py", *option.split(), environ=keras)
    assert_trained(out, 2)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("--backward-passes-per-step 2", 3),
        ("--use-adasum", 2),
    ],
)
def test_a_session_of_version_1(options: str, size: int) -> None:
    out, _ = ran(size, "tensorflow_v1_mnist.py", *options.split())
    assert_trained(out, size, 0.7)


@pytest.mark.parametrize(
    ("keras", "size"), [pytest.param(KERAS_3, 3, id="keras3"), pytest.param(LEGACY, 2, id="legacy")]
)
def test_fit_of_tf_keras(keras: dict[str, str], size: int) -> None:
    out, _ = ran(size, "tensorflow2_keras_mnist.py", environ=keras)
    assert_trained(out, size, 0.7)
    assert out.count(f"rate={0.001 * size:.4f} version=0.28.1") == size


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.nightly)])
def test_fit_of_keras(backend: str) -> None:
    out, _ = ran(2, "keras_mnist.py", environ={"KERAS_BACKEND": backend})
    assert_trained(out, 2, 0.5)


@pytest.mark.parametrize("keras", BOTH)
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, keras: dict[str, str]) -> None:
    size = 2
    rates = [0.02 * (1 + (size - 1) / 2), 0.02 * size, 0.02 * size, 0.002 * size, 0.002 * size]
    for first, last in ((0, 3), (3, 5)):
        options = [str(tmp_path), "--epochs", str(last), "--fp16-allreduce"]
        out, _ = ran(size, "keras_resume.py", *options, environ=keras)
        expected = ",".join(f"{rate:.4f}" for rate in rates[first:last])
        for rank in range(size):
            assert f"done rank={rank} same=True from={first} rates={expected}\n" in out, out
    assert sorted(path.stem for path in tmp_path.iterdir()) == [f"checkpoint-{epoch}" for epoch in range(1, 6)]
