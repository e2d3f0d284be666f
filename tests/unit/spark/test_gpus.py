"""GPUs of Spark's tasks."""

from __future__ import annotations

import pytest

from reigen.errors import LaunchError
from reigen.spark import get_available_devices
from reigen.spark.gpus import TaskGpus, gpu_variables


def test_ranks_see_the_gpus_of_all_tasks_of_their_host() -> None:
    tasks = [TaskGpus("h1", ("3",)), TaskGpus("h1", ("0",))]
    assert gpu_variables(tasks) == {"CUDA_VISIBLE_DEVICES": "3,0", "REIGEN_SPARK_GPUS_PER_TASK": "1"}


def test_addresses_are_numbers_among_the_gpus_that_the_executor_sees() -> None:
    tasks = [TaskGpus("h1", ("1", "0"), "GPU-a,GPU-b"), TaskGpus("h1", ("0", "1"), "6,7")]
    assert gpu_variables(tasks)["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a,6,7"


def test_no_gpus_no_variables() -> None:
    assert gpu_variables([TaskGpus("h1", ()), TaskGpus("h1", ())]) == {}


@pytest.mark.parametrize("address", ["00", "-1", "gpu0", ""])
def test_an_address_that_is_no_number(address: str) -> None:
    with pytest.raises(LaunchError, match=r"address of a GPU .* has to be a number.*discoveryScript"):
        gpu_variables([TaskGpus("h1", (address,))])


@pytest.mark.parametrize(
    ("visible", "per_task", "local_rank", "expected"),
    [
        ("3,0", "1", "1", ["1"]),
        ("3,0,5,6", "2", "1", ["2", "3"]),
        ("3", "1", "1", []),
        ("", "0", "0", []),
    ],
)
def test_devices_of_a_rank(
    visible: str, per_task: str, local_rank: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("REIGEN_SPARK_GPUS_PER_TASK", per_task)
    monkeypatch.setenv("REIGEN_LOCAL_RANK", local_rank)
    assert get_available_devices() == expected


def test_devices_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REIGEN_LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"a function that reigen\.spark\.run runs"):
        get_available_devices()
