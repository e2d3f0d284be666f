"""The scripts of examples/mxnet, started as the pages that they come from start them."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

import reigen
from reigen.testing.environment import clean_environment
from tests.examples.running import assert_help
from tests.mpirun import launcher_alone

EXAMPLES = Path(__file__).parents[2] / "examples" / "mxnet"
DEADLINE_SECONDS = 400

pytestmark = pytest.mark.timeout(500)


def run(command: list[str], *options: object, code: int = 0) -> str:
    """What a command, and behind it a script with options, printed."""
    environ = {
        **{name: value for name, value in clean_environment().items() if not name.startswith("DMLC_")},
        "PYTHONPATH": str(Path(reigen.__file__).parents[1]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    whole = [*command, *map(str, options)]
    done = subprocess.run(
        whole, env=environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False, cwd=EXAMPLES
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def numbers(printed: str, name: str) -> list[float]:
    """All that was said about the loss, the accuracy or something else."""
    return [float(each) for each in re.findall(rf"{name}=([\d.]+)", printed)]


@pytest.fixture
def datasets(monkeypatch):
    """The module that draws data sets, and reads CIFAR-10."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import datasets

    yield datasets
    del sys.modules["datasets"]


def test_digits_are_mnist_files(datasets, tmp_path) -> None:
    """As MXNet's own readers see them: that of gluon wants them compressed."""
    datasets.write_mnist(tmp_path, 30, 10)
    images, labels = datasets.draw_digits(30, 1)
    iterator = mx.io.MNISTIter(
        image=str(tmp_path / "train-images-idx3-ubyte"),
        label=str(tmp_path / "train-labels-idx1-ubyte"),
        batch_size=30,
        shuffle=False,
        silent=True,
    )
    batch = next(iterator)
    np.testing.assert_allclose(batch.data[0].asnumpy()[:, 0], images / 256, atol=1e-6)
    np.testing.assert_array_equal(batch.label[0].asnumpy(), labels)
    assert len(gzip.compress(images.tobytes())) > images.size / 4  # not so many blanks that there is nothing to learn


def test_cifar10_is_read_as_it_is_written(datasets, tmp_path) -> None:
    datasets.write_cifar10(tmp_path, 12, 4)
    images, labels = datasets.read_cifar10(tmp_path, "data_batch_*.bin")
    expected, expected_labels = datasets.draw_pictures(12, 32, 1)
    np.testing.assert_array_equal(np.rint(images * 255), expected)
    np.testing.assert_array_equal(labels, expected_labels)
    raw = (tmp_path / "test_batch.bin").read_bytes()
    (tmp_path / "test_batch.bin").write_bytes(raw[:-1])
    with pytest.raises(ValueError, match=r"12291 bytes; CIFAR-10 has 3073"):
        datasets.read_cifar10(tmp_path, "test_batch.bin")
    with pytest.raises(ValueError, match="0 bytes"):
        datasets.read_cifar10(tmp_path, "data_batch_7.bin")


def test_parts_of_a_record_file_are_all_its_images_once(datasets, tmp_path) -> None:
    datasets.write_records(tmp_path / "all", 20, 16, seed=3)
    expected, _ = datasets.draw_pictures(20, 16, 3)
    seen = []
    for part in range(2):
        iterator = mx.io.ImageRecordIter(
            path_imgrec=str(tmp_path / "all.rec"),
            path_imgidx=str(tmp_path / "all.idx"),
            data_shape=(3, 16, 16),
            batch_size=2,
            num_parts=2,
            part_index=part,
            preprocess_threads=1,
        )
        seen += [image for batch in iterator for image in batch.data[0].asnumpy()]
    np.testing.assert_array_equal(np.stack(seen), expected)


def test_help_says_what_each_option_is() -> None:
    assert_help([path for path in sorted(EXAMPLES.glob("*.py")) if "__main__" in path.read_text()])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["reigen", "mpirun"])
def test_mnist(launcher) -> None:
    """Seed 000's command line, and `reigen run`."""
    if launcher == "mpirun":
        mpirun = launcher_alone()
        if isinstance(mpirun, str):
            pytest.skip(mpirun)
        command = [str(mpirun), "-np", "2", "-H", "localhost:2", "-bind-to", "none", "-map-by", "slot", sys.executable]
    else:
        command = [sys.executable, "-m", "reigen", "run", "-np", "2", sys.executable]
    printed = run(command, "mxnet_mnist.py", "--images", 2400, "--batch-size", 32, "--goal", 0.9)
    assert len(numbers(printed, "Validation-accuracy")) == 3  # of rank 0 alone
    assert numbers(printed, "Validation-accuracy")[-1] >= 0.9


@pytest.mark.slow
def test_mnist_learns_the_same_on_any_number_of_ranks() -> None:
    """Where the images of a step are as many, and the rate is as high: both are of one rank."""

    def losses(size: int) -> list[float]:
        command = [sys.executable, "-m", "reigen", "run", "-np", str(size), sys.executable, "mxnet_mnist.py"]
        options = ["--images", 1280, "--epochs", 1, "--log-interval", 2, "--goal", 0]
        printed = run(command, *options, "--batch-size", 64 // size, "--lr", 0.08 / size)
        return [*numbers(printed, "loss"), *numbers(printed, "Validation-accuracy")]

    alone = losses(1)
    assert len(alone) == 10 + 1
    assert alone[9] < 0.8 * alone[0]
    assert losses(2) == pytest.approx(alone, rel=1e-3)
    assert losses(4) == pytest.approx(alone, rel=1e-3)


def vgg11(launcher: str, *options: object) -> str:
    """What the workers of seed 003's command line printed; without a launcher there is one, and no store."""
    reigen_command = [sys.executable, "-m", "reigen", *launcher.split(), "--as-mxnet"]
    command = [*(reigen_command if launcher else []), sys.executable]
    script = ["image_classification.py", "--dataset", "cifar10", "--model", "vgg11", "--epochs", "1"]
    return run(command, *script, *options, "--goal", 0, "--log-interval", 1)


@pytest.mark.slow
def test_vgg11_learns_with_dist_sync() -> None:
    losses = numbers(vgg11("run -np 2 -s 1", "--kvstore", "dist_sync", "--num-images", 576), "loss")
    assert len(losses) == 2 * 18
    assert min(losses) < 0.93 * np.mean(losses[:4])  # log 10 = 2.30 before; dropout makes every run another one


@pytest.mark.slow
def test_vgg11_learns_the_same_alone_and_with_any_number_of_workers() -> None:
    """Without dropout, where the images of a step are as many."""

    def losses(size: int) -> list[float]:
        """Of each step, the mean of all workers; and the accuracy, which is the same on all of them."""
        options = ["--num-images", 64, "--batch-size", 16 // size, "--dropout", 0]
        launcher, store = (f"run -np {size} -s 1", "dist_sync") if size > 1 else ("", "local")
        printed = vgg11(launcher, *options, "--kvstore", store)
        found = re.findall(r"Batch \[(\d+)\].*loss=([\d.]+)", printed)
        [accuracy] = set(numbers(printed, "Validation-accuracy"))
        steps = [[float(loss) for step, loss in found if step == str(number)] for number in range(1, 5)]
        assert [len(each) for each in steps] == [size] * 4
        return [*(float(np.mean(each)) for each in steps), accuracy]

    alone = losses(1)
    assert len({*alone[:4]}) == 4
    assert losses(2) == pytest.approx(alone, rel=1e-3)
    assert losses(4) == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
def test_vgg11_runs_with_dist_async_and_the_options_of_launch_py() -> None:
    """It takes longer to begin to learn: each worker's updates come between the other's gradients and weights."""
    printed = vgg11("launch -n 2 -s 1 --launcher local", "--kvstore", "dist_async", "--num-images", 160)
    assert len(numbers(printed, "loss")) == 2 * 5
    assert len(numbers(printed, "Validation-accuracy")) == 2


#: On a processor MXNet's oneDNN computes bfloat16 with these only: "could not create a primitive descriptor iterator".
FOR_BFLOAT16 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
NO_BFLOAT16 = not set(Path("/proc/cpuinfo").read_text().split()) >= FOR_BFLOAT16


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("mixed", marks=pytest.mark.skipif(NO_BFLOAT16, reason="MXNet needs AVX-512 for bfloat16")),
        pytest.param("float32", marks=pytest.mark.skipif(not NO_BFLOAT16, reason="in mixed precision here")),
    ],
)
def test_resnet50(dtype: str) -> None:
    """Four steps of warm-up to 0.1 for 256 images, four along a cosine to 0. In mixed precision where MXNet can."""
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", sys.executable, "mxnet_imagenet_resnet50.py"]
    options = ["--num-examples", 256, "--num-epochs", 1, "--log-interval", 1, "--goal", 0.2, "--dtype", dtype]
    printed = run(command, *options)
    rates = numbers(printed, "lr")
    top = 0.1 * 32 / 256
    expected = [top * step / 4 for step in range(1, 5)] + [
        top * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(1, 5)
    ]
    np.testing.assert_allclose(rates, expected, atol=1e-4)
    assert numbers(printed, "Validation-accuracy")[0] >= 0.2
