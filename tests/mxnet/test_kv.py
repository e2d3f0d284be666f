"""Scripts for MXNet's KVStore that know nothing of Reigen, on Reigen's servers: `reigen run --as-mxnet`.

The truth: closed forms, one process alone on all data, and MXNet's own dist_sync (ps-lite) with the same scripts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

import reigen
from reigen.compat import as_mxnet
from tests.kv.jobs import Port
from tests.mxnet.programs import gluon_net, module_net

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
#: MXNet alone takes its time to be imported, in several processes of a busy machine.
DEADLINE_SECONDS = 400

PROGRAMS = Path(__file__).parent / "programs"
ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "REIGEN_"))},
    "PYTHONPATH": str(Path(reigen.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
}
#: modes of gluon_net that one process alone can do, too, to the same weights but for rounding
SAME = (
    "plain",
    "forks",
    "server",
    "worker",
    "devices",
    "adam",
    "half",
    "schedule",
    "own_schedule",
    "rate",
    "states",
    "adadelta",
)
AS_MXNET = ("run", "-np", "2", "-s", "2", "--as-mxnet")
PS_LITE = ("launch", "--launcher", "local", "-n", "2", "-s", "2")


def reigen_command(*arguments: object, **variables: str) -> str:
    """What a job of two workers printed."""
    command = [sys.executable, "-m", "reigen", *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**ENVIRON, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_close(path: Path, expected: dict[str, np.ndarray], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    with np.load(path) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


def test_closed_forms() -> None:
    printed = reigen_command(
        *AS_MXNET, sys.executable, PROGRAMS / "closed_forms.py", MXNET_KVSTORE_BIGARRAY_BOUND="1000"
    )
    assert printed.count("closed forms hold") == 2


def test_a_script_may_import_reigen_before_mxnet() -> None:
    script = "import reigen.mxnet, mxnet; print(type(mxnet.kv.create('dist_sync')).__module__)"
    assert reigen_command(*AS_MXNET, sys.executable, "-c", script).count("reigen.mxnet.kvstore") == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Weights of two workers that have trained in all modes."""
    path = tmp_path_factory.mktemp("trained")
    modes = (*SAME, "2bit", "2bit_worker", "async")
    reigen_command(*AS_MXNET, sys.executable, PROGRAMS / "gluon_net.py", path, *modes)
    return path


@pytest.mark.parametrize("mode", SAME)
def test_trainer_does_what_one_process_does(mode: str, trained: Path) -> None:
    expected = gluon_net.train(mode, "device" if mode == "devices" else None, 1, 0)
    tolerances = (2e-2, 2e-3) if mode == "half" else (1e-4, 1e-5)
    assert_close(trained / f"{mode}.npz", expected, *tolerances)
    start = [p.data().asnumpy() for p in gluon_net.made_net("float32", [mx.cpu()]).collect_params().values()]
    assert not np.allclose(start[0], expected["p0"], atol=1e-2)


def two_bits(gradient: np.ndarray, residual: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    """MXNet's codes, decoded; what is not sent stays in ``residual``."""
    residual += gradient
    codes = np.where(residual >= threshold, threshold, np.where(residual <= -threshold, -threshold, 0))
    residual -= codes
    return codes.astype(np.float32)


def trained_with_two_bits() -> dict[str, np.ndarray]:
    """What two workers do whose gradients travel as 2 bits: one net, computed by hand."""
    net, (images, labels) = gluon_net.made_net("float32", [mx.cpu()]), gluon_net.data()
    parameters = list(net.collect_params().values())
    parameters[0].lr_mult, parameters[3].wd_mult = 0.5, 0.0
    _, numbers, _ = gluon_net.settings("2bit")
    optimizer = mx.optimizer.SGD(
        rescale_grad=1 / 2 / gluon_net.BATCH, param_dict=dict(enumerate(parameters)), **numbers
    )
    updater = mx.optimizer.get_updater(optimizer)
    residuals = [[np.zeros(each.shape, np.float32) for each in parameters] for _ in range(2)]
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for begin in range(0, len(images), 2 * gluon_net.BATCH):
        sums = [np.zeros(each.shape, np.float32) for each in parameters]
        for rank in range(2):
            part = slice(begin + rank * gluon_net.BATCH, begin + (rank + 1) * gluon_net.BATCH)
            with mx.autograd.record():
                losses = loss(net(mx.nd.array(images[part])), mx.nd.array(labels[part]))
            losses.backward()
            for index, each in enumerate(parameters):
                sums[index] += two_bits(each.grad().asnumpy(), residuals[rank][index])
        for index, (total, each) in enumerate(zip(sums, parameters, strict=True)):
            updater(index, mx.nd.array(total), each.data())
    return {f"p{index}": each.data().asnumpy() for index, each in enumerate(parameters)}


def test_compression_through_trainer(trained: Path) -> None:
    truth = trained_with_two_bits()
    assert_close(trained / "2bit.npz", truth)
    # where workers update, the sums that they get are compressed, too, but not the weights that they begin with
    twice, start = loaded(trained / "2bit_worker.npz"), gluon_net.made_net("float32", [mx.cpu()]).collect_params()
    for name, parameter in zip(truth, start.values(), strict=True):
        np.testing.assert_allclose(twice[name], truth[name], atol=0.3)
        assert not np.allclose(twice[name], parameter.data().asnumpy(), atol=1e-3)


def test_asynchronous_training_moves_the_weights(trained: Path) -> None:
    found = loaded(trained / "async.npz")
    assert all(np.isfinite(value).all() for value in found.values())
    assert not np.allclose(found["p0"], loaded(trained / "server.npz")["p0"], atol=1e-6)


def test_module_does_what_one_process_and_what_ps_lite_do(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.npz", tmp_path / "theirs.npz"
    reigen_command(*AS_MXNET, sys.executable, PROGRAMS / "module_net.py", ours)
    reigen_command(*PS_LITE, sys.executable, PROGRAMS / "module_net.py", theirs)
    assert_close(ours, module_net.fit(mx.kv.create("local"), 1, 0), 1e-4, 1e-5)
    assert_close(ours, loaded(theirs))


def test_row_sparse_embeddings_are_those_of_ps_lite(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    reigen_command(*PS_LITE, "--as-mxnet", sys.executable, PROGRAMS / "embedding.py", ours, "weight", "gradient")
    reigen_command(*PS_LITE, sys.executable, PROGRAMS / "embedding.py", theirs, "weight")
    truth = loaded(Path(f"{theirs}.weight.npz"))
    for kind in ("weight", "gradient"):  # the second one ends ps-lite's servers
        assert_close(Path(f"{ours}.{kind}.npz"), truth)


def by_hand(program: str) -> list[tuple[int, str]]:
    """Exit code and output of a worker, the server, the scheduler and a worker, which somebody has started by hand."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(contextlib.closing(Port())).number
        job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_WORKER": "2"}
        environ = {**as_mxnet(ENVIRON), **job, "DMLC_NUM_SERVER": "1", "MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}
        processes = []
        for number, role in enumerate(("worker", "server", "scheduler", "worker")):
            command = [sys.executable, str(PROGRAMS / program)]
            if role == "server":  # the other way to say it
                command = [sys.executable, "-m", "reigen", "run", "--as-mxnet", *command]
            variables = {**environ, "DMLC_ROLE": role, "DMLC_TASK_ID": str(number // 3)}
            process = subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        printed = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


def test_roles_set_by_hand() -> None:
    ended = by_hand("closed_forms.py")
    assert [code for code, _ in ended] == [0] * 4, ended
    assert ["closed forms hold" in text for _, text in ended] == [True, False, False, True], ended


def test_who_waits_for_a_lost_worker_gets_an_error() -> None:
    (code, text), *_, (lost, _) = by_hand("failing.py")
    assert (code, lost) == (0, 9), text
    assert text.count("PeerLostError key 'a': worker 1 was lost in round 2") == 2, text
