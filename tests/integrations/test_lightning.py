"""Lightning's Trainer with Reigen's strategy: the weights of one process that has the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reigen.testing import RankPool
from tests.integrations.conftest import program_environment
from tests.integrations.lightning_training import Options, fit

Pools = Callable[[int], RankPool]
#: Processes import Lightning, on a machine that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def pair(pools: Pools, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Results of two ranks, and of one process without a strategy whose batches are as large as theirs together."""
    first, second = pools(2).run(fit, Options(**options), init=True, timeout=300)
    [alone] = pools(1).run(fit, Options(**options | {"strategy": "auto", "batch": 16}), timeout=300)
    return first, second, alone


def check_same(first: dict[str, Any], second: dict[str, Any], alone: dict[str, Any], rel: float = 2e-4) -> None:
    """Two ranks have the same weights to the bit; they are those of one process but for rounding."""
    assert (first["rank"], first["size"], second["rank"], second["size"]) == (0, 2, 1, 2)
    assert first["weights"] == second["weights"]
    for key in ("parameters", "losses", "norms"):
        assert first[key] == second[key]
        assert first[key] == pytest.approx(alone[key], rel=rel, abs=rel / 10)
    for key in ("steps", "epochs", "lr"):
        assert first[key] == second[key] == alone[key]


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"accumulate": 4, "epochs": 3, "clip": 0.3}], ids=str)
def test_two_ranks_train_as_one_process_does(integration_pools: Pools, options: dict[str, Any]) -> None:
    first, second, alone = pair(integration_pools, **options)
    check_same(first, second, alone)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]
    assert first["sampler"] == second["sampler"] == "DistributedSampler"
    assert first["broadcast"] == second["broadcast"] == ("of", 0)
    # the optimizer is as it was made, and nothing hangs on the parameters
    assert first["optimizer"]
    assert first["hooks"] == alone["hooks"]


def test_the_metrics_are_those_of_all_ranks(integration_pools: Pools) -> None:
    first, second, alone = pair(integration_pools)
    for key in ("accuracy", "val_loss"):
        assert first[key] == second[key] == pytest.approx(alone[key], abs=1e-4)
    assert first["gathered"] == [[0.0, 1.0], [3.0]]  # a sum of gradients, as with DDP
    assert second["gathered"] == [[0.0, 1.0], [3.0]]


def test_batch_normalisation_sees_the_whole_batch(integration_pools: Pools) -> None:
    first, second, alone = pair(integration_pools, sync_batchnorm=True)
    check_same(first, second, alone, rel=2e-3)
    # the layers are as they were made, with what they have learnt
    assert first["norm"] == second["norm"] == alone["norm"] == "BatchNorm1d"
    for ours, theirs in zip(first["buffers"], alone["buffers"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-4)


def test_a_layer_that_the_program_has_put_in_the_place_of_a_batch_norm_stays(integration_pools: Pools) -> None:
    def replace_layers() -> bool:
        import torch

        from reigen.lightning.strategy import _find_batch_norms, _restore_batch_norms
        from reigen.torch.sync_batch_norm import SyncBatchNorm

        first, *_ = model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(3) for _ in range(3)))
        places = _find_batch_norms(model)
        SyncBatchNorm.convert_sync_batchnorm(model)
        model[1] = other = torch.nn.Identity()
        del model[2]
        _restore_batch_norms(places)
        return list(model) == [first, other]

    assert integration_pools(1).run(replace_layers, timeout=300) == [True]


def test_a_compiled_network_in_the_module_trains_and_a_compiled_module_is_refused_by_lightning(
    integration_pools: Pools,
) -> None:
    def compile_all() -> str:
        import lightning
        import torch

        import reigen.lightning

        assert reigen.lightning.register_strategies()
        model: Any = torch.compile(lightning.LightningModule(), backend="eager")
        trainer = lightning.Trainer(strategy="reigen", accelerator="cpu", logger=False, enable_checkpointing=False)
        try:
            trainer.fit(model)
        except RuntimeError as error:
            return str(error)
        return ""

    check_same(*pair(integration_pools, compiled=True))
    assert "compiled model is incompatible" in integration_pools(2).run(compile_all, init=True, timeout=300)[0]


def test_one_device_that_is_named_is_used_and_others_are_chosen_by_the_local_rank(integration_pools: Pools) -> None:
    def devices() -> list[str]:
        from unittest import mock

        import torch

        import reigen.lightning

        make = reigen.lightning.make_strategy_class()
        with mock.patch("torch.cuda.device_count", return_value=4):
            given = ([3], [0], [2, 1])
            cuda = [[torch.device("cuda", number) for number in numbers] for numbers in given]
            return [str(make(parallel_devices=each).root_device) for each in cuda]

    results = integration_pools(2).run(devices, init=True, timeout=300)
    assert results == [["cuda:3", "cuda:0", "cuda:2"], ["cuda:3", "cuda:1", "cuda:1"]]


def test_the_other_package_and_bfloat16(integration_pools: Pools) -> None:
    first, second, _ = pair(integration_pools, package="pytorch_lightning", precision="bf16-mixed", strategy="horovod")
    assert first["weights"] == second["weights"]
    assert first["losses"][-1] < 0.7 * first["losses"][0]


def test_compression_of_the_strategy(integration_pools: Pools) -> None:
    from reigen.torch import Compression

    plain, _ = integration_pools(2).run(fit, Options(), init=True, timeout=300)
    first, second = integration_pools(2).run(
        fit, Options(arguments={"compression": Compression.fp16}), init=True, timeout=300
    )
    assert first["weights"] == second["weights"] != plain["weights"]
    assert first["parameters"] == pytest.approx(plain["parameters"], rel=0.02, abs=0.002)


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(integration_pools: Pools, tmp_path: Path) -> None:
    two = integration_pools(2)
    through = two.run(fit, Options(epochs=4), init=True, timeout=300)
    two.run(fit, Options(epochs=2, directory=str(tmp_path)), init=True, timeout=300)
    assert (tmp_path / "last.ckpt").exists()
    resumed = two.run(fit, Options(epochs=4, resume=str(tmp_path / "last.ckpt")), init=True, timeout=300)
    assert {each["weights"] for each in resumed} == {each["weights"] for each in through}
    assert [each["steps"] for each in resumed] == [24, 24]


def test_all_ranks_stop_early_together(integration_pools: Pools) -> None:
    first, second = integration_pools(2).run(fit, Options(epochs=9, patience=2), init=True, timeout=300)
    assert first["epochs"] == second["epochs"] == 3
    assert first["weights"] == second["weights"]


def test_ddp_has_the_same_curve(integration_pools: Pools) -> None:
    def with_ddp() -> dict[str, Any]:
        import os
        import socket

        import torch.distributed

        import reigen

        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = reigen.broadcast_object(listener.getsockname()[1], 0)
        place = {"RANK": reigen.rank(), "LOCAL_RANK": 0, "GROUP_RANK": reigen.rank(), "WORLD_SIZE": reigen.size()}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        os.environ.update({name: str(value) for name, value in place.items()})
        try:
            return fit(Options("ddp", accumulate=2))
        finally:
            torch.distributed.destroy_process_group()

    ours = integration_pools(2).run(fit, Options(accumulate=2), init=True, timeout=300)[0]
    theirs, other = integration_pools(2).run(with_ddp, init=True, timeout=300)
    assert (theirs["size"], theirs["weights"]) == (2, other["weights"])
    for key in ("losses", "norms", "parameters", "accuracy"):
        assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-5)
    assert ours["gathered"] == theirs["gathered"]


PROGRAM = [sys.executable, "-m", "tests.integrations.lightning_training", "reigen"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program."""
    root = Path(__file__).parents[2]
    environ = os.environ | program_environment()
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=300, check=False)


def test_a_process_by_itself_and_ranks_of_reigen_run(integration_pools: Pools) -> None:
    [alone] = integration_pools(1).run(fit, Options(), timeout=300)
    assert (alone["rank"], alone["size"], alone["sampler"]) == (0, 1, "SequentialSampler")
    done = run(sys.executable, "-m", "reigen", "run", "--no-prefix", "-np", "2", *PROGRAM)
    ends = dict(line.split(": ") for line in done.stdout.splitlines() if " of 2: " in line)
    assert {*ends} == {"0 of 2", "1 of 2"}, done.stderr
    assert len(set(ends.values())) == 1


def test_the_death_of_a_rank_ends_the_job_with_an_error_that_names_it() -> None:
    done = run(sys.executable, "-m", "reigen", "run", "-np", "2", *PROGRAM, "3")
    assert done.returncode not in {0, 124}
    assert " of 2: " not in done.stdout
    assert "PeerLostError" in done.stderr, done.stderr
    assert "rank 1" in done.stderr


@pytest.mark.parametrize("parameters", [[], ["all"]], ids=["of their own", "the same"])
def test_manual_optimization_with_two_optimizers(parameters: list[str]) -> None:
    program = (sys.executable, "-m", "tests.integrations.lightning_manual", *parameters)
    ended = run(sys.executable, "-m", "reigen", "run", "--no-prefix", "-np", "2", *program)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    weights = [line for line in ended.stdout.splitlines() if line.startswith("changed: True, weights: ")]
    assert len(weights) == 2
    assert len(set(weights)) == 1
