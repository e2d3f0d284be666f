"""The examples for PyTorch: each reaches its goal, or fails, and the number of ranks does not matter for the result."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.mnist_files import write_digits
from tests.examples.running import LAUNCH, ROOT, assert_same, example_environment, figure, run

pytestmark = pytest.mark.timeout(1800)
HAS_COCO = importlib.util.find_spec("pycocotools") is not None


def test_digits() -> None:
    """Without dropout, which differs between the ranks."""
    options = ["--epochs", 4, "--goal", 0.93, "--dropout", 0]
    printed = {size: run("digits.py", *options, np=size) for size in (1, 2, 4)}
    for size, each in printed.items():
        assert f"{size} rank(s), " in each
        assert 0.93 <= figure(each, "test accuracy") <= 1
        assert "bit-identical on all ranks: yes" in each
    assert_same("loss", 1e-2, *printed.values())


def test_digits_fails_below_its_goal() -> None:
    run("digits.py", "--epochs", 1, "--goal", 1, code=1)


def test_digits_reads_the_files_of_mnist(tmp_path: Path) -> None:
    """With dropout."""
    write_digits(tmp_path, 320, 100)
    options = ["--data", tmp_path, "--epochs", 6, "--goal", 0.8]
    assert "bit-identical on all ranks: yes" in run("digits.py", *options, np=2)


def test_kvstore_learns_the_same_by_servers_by_allreduce_and_alone() -> None:
    assert_same(
        "test loss",
        1e-3,
        run("kvstore.py", "--kvstore", "local"),
        run("kvstore.py", "--kvstore", "ring", np=2),
        run("kvstore.py", "--kvstore", "dist_sync", np=4, servers=2),
    )


def test_sample_leases_trains_on_each_image_once_an_epoch() -> None:
    printed = run("sample_leases.py", "--epochs", 6, "--goal", 0.85, np=3, servers=2)
    found = re.findall(r"^worker \d: (\d+) images, test accuracy 0\.\d", printed, re.MULTILINE)
    assert len(found) == 3
    assert sum(map(int, found)) == 6 * 1437


def test_elastic_learns_the_same_if_no_process_dies() -> None:
    options = ["--epochs", 5, "--goal", 0]
    assert_same(
        "loss",
        1e-3,
        run("elastic.py", *options),
        run("elastic.py", *options, np=2),
        run("elastic.py", *options, np=4),
    )


def test_elastic_job_learns_the_same_if_no_process_dies() -> None:
    options = ["--epochs", 5, "--goal", 0, "--dropout", 0]
    assert_same(
        "test loss",
        1e-3,
        run("elastic_job.py", *options),
        run("elastic_job.py", *options, np=2),
        run("elastic_job.py", *options, np=4),
    )


def test_vgg11_learns_the_same_by_servers_by_allreduce_and_alone() -> None:
    def options(kvstore: str) -> list[object]:
        return ["--kvstore", kvstore, "--num-images", 320]

    assert_same(
        "norm of the weights",
        1e-6,
        run("cifar10_vgg11.py", *options("local")),
        run("cifar10_vgg11.py", *options("ring"), np=2),
        run("cifar10_vgg11.py", *options("ring"), np=4),
        run("cifar10_vgg11.py", *options("dist_sync"), np=2, servers=1),
    )


@pytest.mark.parametrize(("script", "code"), [("cifar10_vgg11.py", 1), ("kvstore.py", 2)])
def test_a_store_within_a_process_is_refused_where_there_are_several(script: str, code: int) -> None:
    printed = run(script, "--kvstore", "local", np=2, code=code)
    assert "--kvstore local is for one process: the 2 workers would train a model each" in printed


def test_gpt() -> None:
    options = ["--steps", 40, "--goal", 2.9]  # log 256 = 5.5 before
    assert_same(
        "test loss",
        1e-3,
        run("gpt.py", *options),
        run("gpt.py", *options, np=2),
        run("gpt.py", *options, np=4),
    )


def test_recommender() -> None:
    options = ["--num-ratings", 12_000, "--batch", 256, "--goal", 0.7]  # 1.10 is the error of the mean alone
    assert_same(
        "test error",
        1e-3,
        run("recommender.py", *options, servers=1),
        run("recommender.py", *options, np=2, servers=1),
        run("recommender.py", *options, np=4, servers=2, launcher=LAUNCH),
    )


def test_sync_batch_norm() -> None:
    options = ["--epochs", 2, "--goal", 0.9]
    assert_same(
        "test loss",
        1e-3,
        run("sync_batch_norm.py", *options),
        run("sync_batch_norm.py", *options, np=2),
        run("sync_batch_norm.py", *options, np=4),
    )


def test_adasum() -> None:
    assert "Adasum, 2 rank(s)" in run("adasum.py", np=2)
    assert "Adasum needs 1, 2, 4, 8 ... ranks, not 3" in run("adasum.py", np=3, code=2)


def test_join() -> None:
    printed = run("join.py", np=2)
    assert "steps of each rank: [180, 360]" in printed
    assert "bit-identical on all ranks: yes" in printed


def test_lightning_digits() -> None:
    """Reaches its goal, and after an epoch the number of ranks does not show."""
    run("lightning_digits.py", "--epochs", 5, "--goal", 0.9, np=2)
    options = ["--epochs", 1, "--goal", 0]
    assert_same(
        "test loss",
        1e-3,
        run("lightning_digits.py", *options),
        run("lightning_digits.py", *options, np=2),
        run("lightning_digits.py", *options, np=4),
    )


def test_resnet_goes_on_from_a_checkpoint_with_more_ranks_as_if_nothing_had_been(tmp_path: Path) -> None:
    """A small one, in float32: bfloat16 has three digits."""
    options = ["--model", "resnet18", "--dtype", "float32", "--num-images", 64, "--drop-epochs", 1, "--goal", 0]
    checkpoint = ["--checkpoint", tmp_path / "resnet.pt"]
    run("imagenet_resnet50.py", *options, "--epochs", 1, *checkpoint)
    assert_same(
        "last epoch's loss",
        1e-3,
        run("imagenet_resnet50.py", *options, "--epochs", 2),
        run("imagenet_resnet50.py", *options, "--epochs", 2, np=2),
        run("imagenet_resnet50.py", *options, "--epochs", 2, *checkpoint, np=4),
    )


def test_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "train" / "n00000000").mkdir(parents=True)
    printed = run("imagenet_resnet50.py", "--data", tmp_path, code=1)
    assert printed.splitlines()[-1] == f"{tmp_path}: no train/CLASS/ and val/CLASS/ there"


def test_resnet50_in_mixed_precision_with_synthetic_images() -> None:
    options = ["--synthetic", "--num-images", 32, "--epochs", 1]
    assert "resnet50, bfloat16" in run("imagenet_resnet50.py", *options)


def test_faster_rcnn() -> None:
    options = ["--num-images", 8, "--epochs", 1, "--goal", 4]  # 2.1, after one step
    assert_same(
        "test loss",
        1e-3,
        run("coco_detection.py", *options),
        run("coco_detection.py", *options, np=2),
        run("coco_detection.py", *options, np=4),
    )


def test_mask_rcnn() -> None:
    options = ["--model", "mask", "--num-images", 8, "--epochs", 1, "--goal", 20]
    options += ["--average-precision"] if HAS_COCO else []
    printed = run("coco_detection.py", *options)
    assert "mask R-CNN" in printed
    if HAS_COCO:  # after one step it finds nothing
        assert 0 <= figure(printed, "average precision of bbox:") < 0.1
        assert 0 <= figure(printed, "average precision of segm:") < 0.1


@pytest.mark.skipif(not HAS_COCO, reason="needs pycocotools")
def test_average_precision_is_1_for_what_is_there_and_falls_with_what_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.examples.perfect_detections", str(tmp_path)]
    environ = example_environment()
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found, moved, half, nothing = json.loads(done.stdout)
    assert found["bbox"] == pytest.approx(1.0)
    assert found["segm"] > 0.75  # Pillow counts the pixels on an outline, too, which are many in a small image
    assert moved["bbox"] == 0.0
    assert 0.3 < half["bbox"] < 0.9
    assert nothing == {"bbox": 0.0, "segm": 0.0}
