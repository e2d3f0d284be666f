"""Models that are trained by two ranks; the truth is what NumPy makes of all ranks' gradients."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.base import MXNetError

import reigen.mxnet as hvd
from reigen.errors import ArgumentError, MismatchError, ReplicaError, UnsupportedTypeError
from tests.tuning import POINTS, follow_schedule

pytestmark = pytest.mark.slow  # several processes

BATCH, RATE = 4, 0.1


def _data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all ranks, by rank."""
    random = np.random.default_rng(3)
    return random.random((2, BATCH, 6), np.float32), random.random((2, BATCH, 3), np.float32)


def _trained(weight: np.ndarray, steps: int) -> np.ndarray:
    """Linear regression by SGD with the averages of all ranks' gradients, in float64."""
    inputs, targets = (each.astype(np.float64) for each in _data())
    weight = weight.astype(np.float64)
    for _ in range(steps):
        gradients = [(x @ weight.T - y).T @ x / BATCH for x, y in zip(inputs, targets, strict=True)]
        weight = weight - RATE * np.mean(gradients, axis=0)
    return weight


def _net(**options: int) -> gluon.nn.Dense:
    """Weights that differ between ranks until they are broadcast."""
    net = gluon.nn.Dense(3, use_bias=False, prefix="net_", **options)
    net.initialize(mx.init.Uniform(1 + hvd.rank()))
    return net


def _steps(net: gluon.nn.Dense, trainer: gluon.Trainer, steps: int) -> None:
    inputs, targets = (mx.nd.array(each[hvd.rank()]) for each in _data())
    loss = gluon.loss.L2Loss()
    for _ in range(steps):
        with autograd.record():
            value = loss(net(inputs), targets) * 3  # L2Loss is the mean over the 3 outputs of half the square
        value.backward()
        trainer.step(BATCH)


def train_with_trainers() -> None:
    for options in (
        {},
        {"num_groups": 1, "prefix": "b"},
        {"gradient_predivide_factor": 4.0},
        {"compression": hvd.Compression.fp16},
    ):
        net = _net(in_units=6)
        hvd.broadcast_parameters(net.collect_params(), root_rank=1)
        first = net.weight.data().asnumpy()
        assert hvd.allgather(mx.nd.array(first).reshape((1, -1))).asnumpy().std(axis=0).max() == 0
        _steps(net, hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, **options), 3)
        tolerance = 2e-3 if "compression" in options else 1e-5
        np.testing.assert_allclose(net.weight.data().asnumpy(), _trained(first, 3), atol=tolerance)


def sums_between_reduction_and_update() -> None:
    net = _net(in_units=6)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    net.weight.grad()[:] = hvd.rank() + 1
    net.weight.data()._fresh_grad = True
    before = net.weight.data().asnumpy()
    trainer.allreduce_grads()
    assert net.weight.grad().asnumpy().tolist() == np.full((3, 6), 3).tolist()
    trainer.update(2)
    np.testing.assert_allclose(net.weight.data().asnumpy(), before - RATE * 1.5 / 2, rtol=1e-5)


def one_rank_of_a_set_trains_by_itself() -> None:
    alone = hvd.add_process_set([1])
    net = _net(in_units=6)
    options = {"process_set": alone}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, **options)
    net.weight.grad()[:] = hvd.rank() + 1
    trainer.allreduce_grads()
    assert net.weight.grad().asnumpy().min() == hvd.rank() + 1
    hvd.remove_process_set(alone)


def codes_of_two_bits() -> None:
    """What a rank has not sent is sent later; the sums are MXNet's: of plus and minus the threshold, and 0."""
    net = _net(in_units=6)
    options = {"compression": {"type": "2bit", "threshold": 0.5}}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, **options)
    for expected in (0.5, 1.0, 0.5):  # of 0.3, 0.6, 0.4 and of 0.6, 0.7, 0.8 with what was left
        net.weight.grad()[:] = 0.3 + 0.3 * hvd.rank()
        trainer.allreduce_grads()
        assert net.weight.grad().asnumpy().tolist() == np.full((3, 6), expected).tolist()


def two_contexts_are_one_rank() -> None:
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = gluon.nn.Dense(2, in_units=2, use_bias=False, prefix="two_")
    net.initialize(mx.init.Uniform(1 + hvd.rank()), ctx=contexts)
    hvd.broadcast_parameters(net.collect_params())
    first = [copy.asnumpy() for copy in net.weight.list_data()]
    np.testing.assert_array_equal(*first)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    with autograd.record():
        losses = [net(mx.nd.full((1, 2), 1 + hvd.rank(), ctx=each)).sum() for each in contexts]
    autograd.backward(losses)
    trainer.step(1)
    for copy in net.weight.list_data():  # (1 + 1 + 2 + 2) / 2 ranks
        np.testing.assert_allclose(copy.asnumpy(), first[0] - 3, rtol=1e-5)


def other_arrays_and_other_gradients() -> None:
    """What cannot, or can no more, be where gradients are reduced: also a gradient that somebody else has made."""

    class Halving:
        compress = staticmethod(lambda tensor: (tensor / 2, None))
        decompress = staticmethod(lambda tensor, _: tensor * 2)

    for options in ({"compression": Halving}, {"num_groups": 2}):
        net = _net(in_units=6)
        hvd.broadcast_parameters(net.collect_params())
        first = net.weight.data().asnumpy()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, **options)
        gradient = net.weight.grad()  # a script may keep it, to clip it
        _steps(net, trainer, 2)
        assert gradient is net.weight.grad()
        np.testing.assert_array_equal(gradient.asnumpy(), net.weight.data().grad.asnumpy())
        net.weight.grad_req = "null"
        net.weight.grad_req = "add"  # a new gradient, which adds up
        _steps(net, trainer, 1)
        net.weight.zero_grad()
        net.hybridize(static_alloc=True, static_shape=True)
        _steps(net, hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}), 1)
        del trainer
        gc.collect()
        kept = mx.nd.array(net.weight.grad().asnumpy())
        for _ in range(2):  # takes memory that was given back, if that was too early
            other = _net(in_units=6)
            _steps(other, hvd.DistributedTrainer(other.collect_params(), "sgd", {"learning_rate": RATE}), 1)
        np.testing.assert_array_equal(net.weight.grad().asnumpy(), kept.asnumpy())
        np.testing.assert_allclose(net.weight.data().asnumpy(), _trained(first, 4), atol=1e-5)
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = gluon.nn.Dense(2, in_units=2, use_bias=False)
        net.initialize(mx.init.One())
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
        for _ in range(2):
            with autograd.record():
                value = net(mx.np.full((1, 2), hvd.rank() * 1.0)).sum()
            value.backward()
            trainer.step(1)
        assert isinstance(net.weight.grad(), mx.np.ndarray)
        assert net.weight.data().asnumpy().tolist() == [[0, 0], [0, 0]]


def ranks_with_other_parameters_are_told() -> None:
    net = gluon.nn.Dense(2, in_units=2 + hvd.rank(), prefix="unlike_")
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    with pytest.raises(MXNetError, match="different parameters or options") as caught:
        trainer.allreduce_grads()
    assert isinstance(caught.value, MismatchError)
    assert "(2, 2)" in caught.value.details[0]


def deferred_parameters_are_broadcast_when_they_are_there() -> None:
    net = _net()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    inputs = mx.nd.array(_data()[0][hvd.rank()])
    net(inputs)
    first = net.weight.data().asnumpy()
    assert hvd.allgather(mx.nd.array(first).reshape((1, -1))).asnumpy().std(axis=0).max() == 0
    assert "_init_impl" not in vars(net.weight)
    _steps(net, trainer, 2)
    np.testing.assert_allclose(net.weight.data().asnumpy(), _trained(first, 2), atol=1e-5)


def train_with_optimizers() -> None:
    for factor in (1.0, 8.0):
        net = _net(in_units=6)
        hvd.broadcast_parameters(net.collect_params())
        first = net.weight.data().asnumpy()
        plain = mx.optimizer.create("sgd", learning_rate=RATE * 2, multi_precision=True)
        optimizer = hvd.DistributedOptimizer(plain, gradient_predivide_factor=factor)
        trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
        trainer.set_learning_rate(RATE)
        assert plain.learning_rate == optimizer.learning_rate == trainer.learning_rate == RATE
        _steps(net, trainer, 3)
        assert (optimizer.rescale_grad, optimizer.wd, optimizer.num_update) == (1 / BATCH, 0.0, 3)
        np.testing.assert_allclose(net.weight.data().asnumpy(), _trained(first, 3), atol=1e-5)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            unwrapped = hvd.DistributedTrainer(net.collect_params(), optimizer)
        assert "unwrapped" in str(told[0].message)
        assert unwrapped.optimizer is plain
    half = gluon.nn.Dense(2, in_units=2, use_bias=False, prefix="half_")
    half.cast("float16")
    half.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(half.collect_params(), "sgd", {"learning_rate": 1.0, "multi_precision": True})
    half.weight.grad()[:] = hvd.rank()  # on a CPU MXNet cannot compute it
    half.weight.data()._fresh_grad = True
    trainer.step(1)
    assert half.weight.data().asnumpy().tolist() == [[0.5, 0.5], [0.5, 0.5]]


def use_some_parameters_in_some_steps() -> None:
    """What was reduced in a step without being used is reduced anew in the next."""
    for make in (
        lambda params: gluon.Trainer(
            params, hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0)), kvstore=None
        ),
        lambda params: hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0}),
    ):
        first, second = [gluon.Parameter(name, shape=(2,), init="zeros") for name in ("first", "second")]
        for parameter in (first, second):
            parameter.initialize()
        trainer = make([first, second])
        for used in ([second], [first, second], [first], [first, second]):
            with autograd.record():
                loss = sum(parameter.data() * (hvd.rank() + 1) for parameter in used).sum()
            loss.backward()
            trainer.step(1, ignore_stale_grad=True)
        assert first.data().asnumpy().tolist() == second.data().asnumpy().tolist() == [-4.5, -4.5]


def take_turns_with_one_model() -> None:
    net = _net(in_units=6)
    hvd.broadcast_parameters(net.collect_params())
    first = net.weight.data().asnumpy()
    made = [
        hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, prefix=prefix)
        for prefix in ("one", "other")
    ]
    for trainer in made * 10:  # not waiting for what the other has begun
        _steps(net, trainer, 1)
    np.testing.assert_allclose(net.weight.data().asnumpy(), _trained(first, 20), atol=1e-4)


def save_and_go_on(directory: str) -> None:
    path = str(Path(directory) / f"states{hvd.rank()}")
    net = _net(in_units=6)
    hvd.broadcast_parameters(net.collect_params())
    first = net.weight.data().asnumpy()
    plain = mx.optimizer.SGD(learning_rate=RATE)
    made = [
        hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}),
        gluon.Trainer(net.collect_params(), hvd.DistributedOptimizer(plain), kvstore=None),
    ]
    for trainer in made:
        _steps(net, trainer, 1)
        trainer.save_states(path)
        trainer.load_states(path)
        _steps(net, trainer, 1)
    assert isinstance(made[1].optimizer, hvd.DistributedOptimizer)
    np.testing.assert_allclose(net.weight.data().asnumpy(), _trained(first, 4), atol=1e-5)


def train_a_module() -> None:
    inputs, targets = _data()
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, no_bias=True, name="fc")
    symbol = mx.sym.LinearRegressionOutput(symbol, mx.sym.var("softmax_label"), grad_scale=3)
    batches = mx.io.NDArrayIter(inputs[hvd.rank()], targets[hvd.rank()], BATCH)
    module = mx.mod.Module(symbol)
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params(mx.init.Uniform(1 + hvd.rank()))
    arguments, auxiliary = module.get_params()
    hvd.broadcast_parameters(arguments)
    hvd.broadcast_parameters(auxiliary)
    module.set_params(arguments, auxiliary)
    first = arguments["fc_weight"].asnumpy()
    optimizer = mx.optimizer.SGD(learning_rate=RATE, rescale_grad=1 / BATCH)
    module.init_optimizer(kvstore=None, optimizer=hvd.DistributedOptimizer(optimizer))
    for _ in range(3):
        batches.reset()
        for batch in batches:
            module.forward_backward(batch)
            module.update()
    np.testing.assert_allclose(module.get_params()[0]["fc_weight"].asnumpy(), _trained(first, 3), atol=1e-5)


def make_mistakes() -> None:
    net = _net(in_units=6)
    for act in (
        lambda: hvd.DistributedTrainer(net.collect_params(), "sgd", gradient_predivide_factor=0),
        lambda: hvd.DistributedTrainer(net.collect_params(), "sgd", num_groups=-1),
        lambda: hvd.DistributedTrainer(net.collect_params(), "sgd", compression={"type": "7bit"}),
        lambda: hvd.DistributedTrainer(net.collect_params(), "sgd", process_set=hvd.ProcessSet([0])),
        lambda: hvd.DistributedOptimizer("sgd"),
        lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(mx.optimizer.SGD())),
        lambda: hvd.broadcast_parameters([net.weight]),
        lambda: hvd.broadcast_parameters(net.collect_params(), root_rank=2),
    ):
        with pytest.raises(MXNetError) as caught:
            act()
        assert isinstance(caught.value, ArgumentError)
    with pytest.raises(MXNetError, match=r"parameters\.net_weight") as caught:
        hvd.broadcast_parameters({"net_weight": mx.nd.ones((2 + hvd.rank(),))})
    assert isinstance(caught.value, MismatchError)
    embedding = gluon.nn.Embedding(4, 2, sparse_grad=True)
    embedding.initialize()
    trainer = hvd.DistributedTrainer(embedding.collect_params(), "sgd")
    with pytest.raises(MXNetError, match="sparse_grad=False") as caught:
        trainer.allreduce_grads()
    assert isinstance(caught.value, UnsupportedTypeError)


def everything(directory: str) -> None:
    train_with_trainers()
    sums_between_reduction_and_update()
    one_rank_of_a_set_trains_by_itself()
    codes_of_two_bits()
    two_contexts_are_one_rank()
    other_arrays_and_other_gradients()
    ranks_with_other_parameters_are_told()
    deferred_parameters_are_broadcast_when_they_are_there()
    train_with_optimizers()
    use_some_parameters_in_some_steps()
    take_turns_with_one_model()
    save_and_go_on(directory)
    train_a_module()
    make_mistakes()


def diverge() -> None:
    net = _net(in_units=6)
    hvd.broadcast_parameters(net.collect_params())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE})
    _steps(net, trainer, 2)
    net.weight.data()[1, 1] += hvd.rank()
    with pytest.raises(MXNetError, match="net_weight") as caught:
        _steps(net, trainer, 1)
    assert isinstance(caught.value, ReplicaError)
    assert caught.value.ranks == (1,)


def train_tuned(is_tuned: bool) -> tuple[list[np.ndarray], list[int]]:
    """Weights after some steps of layers of several sizes, and how many buckets there were in them."""
    if is_tuned:  # with a schedule in place of the search, which needs scikit-learn
        sys.modules["sklearn"], sys.modules["sklearn.gaussian_process"] = sklearn = [ModuleType("sklearn")] * 2
        sklearn[0].gaussian_process = sklearn[0]  # type: ignore[attr-defined]
    hvd.init()
    if is_tuned:
        follow_schedule([replace(point, tcp_algorithm="", tcp_sockets=0) for point in POINTS])
    net = gluon.nn.HybridSequential()
    for width in (400, 300, 7):
        net.add(gluon.nn.Dense(width, in_units={400: 200, 300: 400, 7: 300}[width]))
    mx.random.seed(1)
    net.initialize(mx.init.Uniform(0.05))
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    random, num_buckets = np.random.default_rng(hvd.rank()), []
    for _ in range(24):
        inputs = mx.nd.array(random.random((BATCH, 200), np.float32))
        with autograd.record():
            loss = ((net(inputs) - 1) ** 2).mean()
        loss.backward()
        trainer.step(BATCH)
        num_buckets.append(len(trainer._buckets._plan.buckets))
    weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    hvd.shutdown()
    return weights, num_buckets


def test_weights_of_a_job_that_is_tuned_are_the_same_bit_for_bit(rank_pool):
    plain, tuned = (
        rank_pool(2).run(train_tuned, is_tuned, env={"REIGEN_AUTOTUNE": "1"} if is_tuned else {})
        for is_tuned in (False, True)
    )
    assert len(set(plain[0][1])) == 1
    assert len(set(tuned[0][1])) > 1, "buckets were laid out anew"
    for weights, num_buckets in tuned:
        assert num_buckets == tuned[0][1], "in the same steps on all ranks"
        for one, other in zip(weights, plain[0][0], strict=True):
            assert np.isfinite(one).all()
            assert one.std() > 0
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_replicas_can_be_compared(rank_pool):
    rank_pool(2).run(diverge, init=True, env={"REIGEN_CHECK_REPLICAS": "1"})


def test_training(rank_pool, tmp_path):
    rank_pool(2).run(everything, str(tmp_path), init=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


SCRIPT = """
import sys
import mxnet as mx
import horovod.mxnet as hvd
from horovod.mxnet.mpi_ops import allreduce_
hvd.init()
assert hvd.nccl_built() == 0 and not hvd.mpi_enabled() and "torch" not in sys.modules
net = mx.gluon.nn.Dense(1, in_units=1 << 20, use_bias=False)
net.initialize(mx.init.One())
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
for step in range(3):
    with mx.autograd.record():
        loss = net(mx.nd.full((1, 1 << 20), hvd.rank()))
    loss.backward()
    trainer.step(1)
if hvd.rank() == 1:  # rank 0 ends here, with its last reduction still to be done
    print("weight", net.weight.data().asnumpy().mean(), flush=True)
"""


def test_a_script_of_horovods_runs_unmodified_and_may_end_without_waiting(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "reigen", "run", "--as-horovod", "--no-prefix", "-np", "2", sys.executable, script]
    done = subprocess.run(line, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "weight 0.25\n"
    assert "Error" not in done.stderr
