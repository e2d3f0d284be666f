"""Collectives in graphs: where they run, under which names, and how they end."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from reigen import context
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import PeerLostError, UnsupportedError
from reigen.tensorflow import compiled, graph
from reigen.tensorflow.collectives import reduce_gradients
from reigen.tensorflow.errors import collective_error_of
from reigen.tensorflow.native import collectives as native_collectives
from reigen.tensorflow.native import trust
from reigen.tensorflow.native.kernels import KernelError
from reigen.testing import RankError, RankPool, run_ranks
from reigen.types import ReduceOp
from tests.multiprocess.launcher import until

SUM = ReductionSpec(ReduceOp.SUM, 1.0, 1.0)


def call_names(function: Any) -> list[str]:
    """Names of the collectives of a traced function, without those in functions that it calls."""
    found = [each.get_attr("call") for each in function.graph.get_operations() if each.type.startswith("Reigen")]
    return [graph.decode(text.decode()).name for text in found]  # type: ignore[union-attr]


# -- names ------------------------------------------------------------------------------------------------------------


def names() -> None:
    """They come from the function and the scope, whatever was traced before; none is there twice in a graph."""

    @tf.function
    def step(x: tf.Tensor) -> Any:
        with tf.name_scope("layer"):
            a = hvd.allreduce(x)
        return a, hvd.allreduce(x), hvd.allreduce(x), hvd.allreduce(x, name="given"), hvd.allreduce(x, name="given")

    expected = ["step/layer/allreduce", "step/allreduce", "step/allreduce_1", "given", "given_1"]
    for length in range(1, 4 + hvd.rank()):  # ranks trace a different number of times
        assert call_names(step.get_concrete_function(tf.zeros([length]))) == expected
    for made in step(tf.ones([2])):
        assert made.numpy().tolist() == [1.0, 1.0]
    with tf.Graph().as_default() as other:
        hvd.allgather([1.0])
        assert [each.get_attr("call") for each in other.get_operations() if each.type.startswith("Reigen")]


def control_flow() -> None:
    """Loops, branches and maps; the iterations of a loop that depend on each other have one name."""
    n = hvd.size()

    @tf.function
    def run(x: tf.Tensor, flag: tf.Tensor) -> Any:
        for _ in tf.range(3):
            x = hvd.allreduce(x, op=hvd.Sum)
        x = hvd.allreduce(x, op=hvd.Max) + 1.0 if flag else hvd.broadcast(x, 0)
        mapped = tf.map_fn(lambda row: hvd.allreduce(row, op=hvd.Sum), tf.ones([4, 2]))
        _, same = tf.while_loop(
            lambda i, _: i < 50,
            lambda i, _: (i + 1, hvd.allreduce(tf.ones([2]), op=hvd.Sum)),
            (0, tf.zeros([2])),
            parallel_iterations=10,
        )
        return x, mapped + same - same[0]

    for flag in (True, False):
        x, mapped = run(tf.constant([1.0]), tf.constant(flag))
        assert x.numpy() == n**3 + flag
        assert mapped.numpy().tolist() == [[n, n]] * 4


def two_functions_of_one_name() -> None:
    def make(factor: float) -> Any:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(x * factor, op=hvd.Sum)

        return step

    first, second = make(1.0), make(2.0)

    @tf.function
    def both(x: tf.Tensor) -> tf.Tensor:
        return first(x) + second(x)

    assert both(tf.ones([3])).numpy().tolist() == [3.0 * hvd.size()] * 3


def calls_of_functions_that_read_variables() -> None:
    """Each that has collectives follows the one before it, whose may have the same names; others are not ordered."""
    variable = tf.Variable(tf.ones([3]))

    def make(factor: float, collective: bool = True) -> Any:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(factor * variable * x, op=hvd.Sum) if collective else factor * variable * x

        return step

    first, second, other = make(1.0), make(2.0), make(0.0, collective=False)

    @tf.function
    def within(x: tf.Tensor) -> tf.Tensor:
        return first(x)

    @tf.function
    def run(x: tf.Tensor) -> tf.Tensor:
        return first(x) + second(x) + first(2 * x) + other(x) + within(x) + within(2 * x)

    operations = run.get_concrete_function(tf.ones([3])).graph.get_operations()
    calls = [each for each in operations if each.type in ("StatefulPartitionedCall", "PartitionedCall")]
    before = [[calls.index(each) for each in call.control_inputs if each in calls] for call in calls]
    assert before == [[], [0], [1], [], [2], [4]]
    for _ in range(3):
        assert run(tf.ones([3])).numpy().tolist() == [8.0 * hvd.size()] * 3


def unused_results() -> None:
    """A collective runs although this rank does not need its result."""

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        total = hvd.allreduce(x, op=hvd.Sum, name="unused")
        return total if hvd.rank() == 0 else x

    for _ in range(3):
        assert step(tf.ones([2])).numpy()[0] == (hvd.size() if hvd.rank() == 0 else 1)


@pytest.mark.parametrize(
    "func",
    [names, control_flow, two_functions_of_one_name, calls_of_functions_that_read_variables, unused_results],
)
def test_graphs(rank_pool, func):
    rank_pool(2).run(func, init=True)


def executions_and_a_late_rank(directory: str) -> None:
    """A graph that fails because rank 2 is late is not executed again: it would meet rank 2's first execution."""

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)

    def execute(value: float) -> str:
        with pytest.raises(tf.errors.UnknownError) as caught:
            step(tf.fill([2], value))
        return caught.value.message

    if hvd.rank() == 2:
        until(lambda: len(list(Path(directory).iterdir())) == 2)
    else:
        assert "rank(s) 2 did not submit it" in execute(1.0)
        Path(directory, str(hvd.rank())).touch()
    assert "rank(s) 2 did not submit it" in execute(2.0)


def test_a_late_rank_meets_no_other_execution(rank_pool, tmp_path):
    rank_pool(3).run(executions_and_a_late_rank, str(tmp_path), init=True, env={"REIGEN_DEADLINE": "1"})


def one_name_twice_at_a_time() -> None:
    """Which of the two another rank's execution would meet is not known: the job ends, and nobody waits."""
    rows = tf.data.Dataset.range(40).map(
        lambda row: hvd.allreduce(tf.cast(row, tf.float32), name="fixed"), num_parallel_calls=4
    )
    for _ in range(2):
        with pytest.raises((tf.errors.UnknownError, tf.errors.InvalidArgumentError), match="still being processed"):
            list(rows)


def test_one_name_for_calls_at_the_same_time_is_an_error(rank_pool):
    rank_pool(2).run(one_name_twice_at_a_time, init=True, timeout=60.0)


def forwarded() -> None:
    """What others need, too, is left alone; results are the only thing that is written."""

    @tf.function
    def step(x: tf.Tensor) -> Any:
        y = x + 1.0
        return hvd.allreduce(y, op=hvd.Sum), y, hvd.grouped_allreduce([x, x, x * 1.0], op=hvd.Sum), x

    n, x = hvd.size(), tf.ones([100_000])
    variable = tf.Variable(tf.ones([100_000]))
    for _ in range(3):
        total, y, group, same = step(x)
        assert (total.numpy() == 2.0 * n).all()
        assert (y.numpy() == 2.0).all()
        assert (same.numpy() == 1.0).all()
        assert all((each.numpy() == n).all() for each in group)
        assert (x.numpy() == 1.0).all()
        assert (tf.function(lambda: hvd.allreduce(variable, op=hvd.Sum))().numpy() == n).all()
        assert (variable.numpy() == 1.0).all()


def reduced_gradients() -> None:
    n = hvd.size()
    tensors = [tf.ones([3]), tf.ones([2, 2], tf.float64), tf.ones([], tf.bfloat16)]
    for run in (reduce_gradients, tf.function(reduce_gradients)):
        made = run(tensors, SUM, "gradients", hvd.global_process_set)
        assert [float(tf.reduce_max(each)) for each in made] == [n, n, n]
        assert [each.dtype for each in made] == [each.dtype for each in tensors]
    assert reduce_gradients([], SUM, "none", hvd.global_process_set) == []


def saved_models() -> None:
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None])])
        def __call__(self, x: tf.Tensor) -> Any:
            return hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)

    with tempfile.TemporaryDirectory() as directory:
        tf.saved_model.save(Model(), directory)
        total, gathered = tf.saved_model.load(directory)(tf.ones([2]))
    assert total.numpy().tolist() == [hvd.size()] * 2
    assert gathered.shape == [2 * hvd.size()]


def loads_a_saved_model(directory: str, *, saves: bool) -> None:
    if saves:
        module = tf.Module()
        module.run = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum), input_signature=[tf.TensorSpec([None])])
        tf.saved_model.save(module, directory)
    else:
        hvd.init()
        assert tf.saved_model.load(directory).run(tf.ones([2])).numpy().tolist() == [1.0, 1.0]


def test_another_process_loads_a_saved_model(rank_pool, tmp_path):
    rank_pool(1).run(functools.partial(loads_a_saved_model, str(tmp_path), saves=True), init=True)
    run_ranks(functools.partial(loads_a_saved_model, str(tmp_path), saves=False), 1, timeout=90)


@pytest.mark.parametrize("func", [forwarded, reduced_gradients, saved_models])
def test_functions(rank_pool, func):
    rank_pool(2).run(func, init=True)


# -- threads, and ends -------------------------------------------------------------------------------------------------


def more_than_threads() -> None:
    """One thread of TensorFlow's, many operations, and another order on each rank."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    count, n = 20, hvd.size()
    order = list(range(count))[:: 1 if hvd.rank() else -1]

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        made = {index: hvd.allreduce(x + float(index), op=hvd.Sum, name=f"t{index}") for index in order}
        return [made[index] for index in range(count)]

    for _ in range(5):
        for index, each in enumerate(step(tf.zeros([1000]))):
            assert (each.numpy() == n * index).all()


def test_more_waiting_operations_than_threads():
    run_ranks(more_than_threads, 2, init=True, timeout=90)


def forks() -> None:
    """A child is no rank, and the parent goes on."""
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    step(tf.ones([2]))
    child = os.fork()
    if child == 0:
        os._exit(int(context.is_initialized()))
    assert os.waitpid(child, 0)[1] == 0
    assert step(tf.ones([2])).numpy()[0] == hvd.size()


def test_forks(rank_pool):
    rank_pool(2).run(forks, init=True)


def lost_peer() -> str:
    step = tf.function(lambda x: hvd.allreduce(x, name="lost"))
    step(tf.ones([2]))
    if hvd.rank() == 1:
        os._exit(3)
    with pytest.raises(tf.errors.UnknownError) as caught:
        step(tf.ones([2]))
    known = collective_error_of(caught.value)
    assert isinstance(known, PeerLostError)
    assert known.ranks == (1,)
    return str(caught.value)


def test_a_rank_that_dies_while_a_graph_waits():
    with RankPool(2) as pool, pytest.raises(RankError) as caught:
        pool.run(lost_peer, init=True, timeout=90)
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert "rank(s) 1 died" in caught.value.results[0]


def leaves_while_it_waits() -> None:
    """``shutdown()`` ends what waits."""
    if hvd.rank() == 1:
        hvd.broadcast_object(None, 0, name="done")
        return
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            tf.function(lambda x: hvd.allreduce(x, name="alone"))(tf.ones([2]))
        except tf.errors.OpError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 30
    while not context.current()._engine._outstanding.handles:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    hvd.broadcast_object(None, 0, name="done")
    hvd.shutdown()
    thread.join(30)
    assert len(failures) == 1


def test_shutdown_ends_what_waits(rank_pool):
    rank_pool(2).run(leaves_while_it_waits, init=True)


# -- trust ------------------------------------------------------------------------------------------------------------


def test_the_installed_version_is_one_of_the_tested():
    assert tf.__version__ in trust.TESTED_VERSIONS


def self_tests() -> list[object]:
    tests = [trust.kernels_test(), trust.xla_test()]
    assert all(test.is_tested for test in tests)
    return [importlib.import_module(test.module).main() for test in tests]


def test_the_self_tests_succeed_with_this_version(rank_pool):
    assert rank_pool(1).run(self_tests) == [[0, 0]]


def test_other_versions_are_tested_first(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, judge in (("kernels_test", trust.judge), ("xla_test", trust.judge_xla)):
        failing = dataclasses.replace(getattr(trust, name)(), tested_versions=(), module="reigen.tensorflow_of_mars")
        monkeypatch.setattr(trust, name, lambda failing=failing: failing)
        assert "ended with exit code 1" in judge()
    monkeypatch.setenv("REIGEN_TENSORFLOW_NATIVE", "0")
    assert trust.judge() == "REIGEN_TENSORFLOW_NATIVE=0"
    monkeypatch.setenv("REIGEN_TENSORFLOW_NATIVE", "1")
    assert trust.judge() is None
    compiled._registered.cache_clear()
    monkeypatch.setenv("REIGEN_TENSORFLOW_NATIVE", "auto")
    with pytest.raises(UnsupportedError, match=r"cannot call collectives \(the self-test .*leave it outside"):
        compiled._registered()


def fallback_is_announced() -> tuple[list[float], int]:
    find_anew = functools.cache(graph._native_or_none.__wrapped__)
    with mock.patch.object(graph, "_log") as log, mock.patch.object(graph, "_native_or_none", find_anew):
        step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
        made = step(tf.ones([2])).numpy().tolist(), step(tf.ones([3])).numpy().tolist()
    assert "REIGEN_TENSORFLOW_NATIVE=0" in str(log.warning.call_args)
    return np.concatenate(made).tolist(), log.warning.call_count


def test_the_fallback_is_announced_once(rank_pool):
    made = rank_pool(2).run(fallback_is_announced, init=True, env={"REIGEN_TENSORFLOW_NATIVE": "0"})
    assert made == [([2.0] * 5, 1)] * 2


def test_an_operation_ends_when_there_is_no_memory_for_its_result() -> None:
    ends = []

    def complete(result: object) -> None:
        raise KernelError("no memory")

    run = SimpleNamespace(finish=lambda *status: ends.append(status))
    native_collectives._end(run, SimpleNamespace(wait=lambda: None), complete)
    assert ends == [((tf.errors.INTERNAL, "KernelError: no memory"),)]
