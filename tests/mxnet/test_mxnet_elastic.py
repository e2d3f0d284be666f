"""`hvd.elastic` with MXNet: processes are killed and others come, and the weights are those of an undisturbed run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import reigen.mxnet as hvd
from reigen.errors import ArgumentError
from reigen.mxnet.engine import written_again
from tests.elastic.elastic_processes import ElasticProcesses
from tests.multiprocess.launcher import until
from tests.mxnet.programs import elastic_training as program

PROGRAM = Path(program.__file__)


def expected_weights(num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of one process that takes all samples of each step, in float64."""
    weights, velocity = np.zeros((3, program.INPUTS + 1)), np.zeros((3, program.INPUTS + 1))
    for step in range(num_steps):
        batch = program.rows(step).astype(np.float64)
        inputs = np.hstack([batch[:, : program.INPUTS], np.ones((program.BATCH, 1))])
        slope = (inputs @ weights.T - batch[:, program.INPUTS :]).T @ inputs / program.BATCH / 3
        velocity = program.MOMENTUM * velocity - program.RATE * slope
        weights = weights + velocity
    return weights[:, :-1], weights[:, -1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "optimizer"])
def test_kills_and_newcomers_leave_no_trace_in_the_weights(kind: str):
    """Of 4 ranks, one dies, which makes 3, and then rank 0, which makes 2; then two come."""
    with ElasticProcesses(PROGRAM, kind, "20", "4") as job:
        members = job.start_first(4, {2: {"DIES_AT": "5"}, 0: {"DIES_AT": "9"}})
        assert [members[slot].wait() for slot in (2, 0)] == [-9, -9]
        survivors = [members[1], members[3]]
        until(lambda: all(any(line.endswith(" 2 9") for line in member.lines) for member in survivors), 60)
        newcomers = [job.start_candidate(slot) for slot in (0, 2)]
        assert [member.wait() for member in (*survivors, *newcomers)] == [0] * 4, job.members[-1].lines
    done = [member.lines[-1].split(maxsplit=4) for member in (*survivors, *newcomers)]
    assert len({tuple(words[2:]) for words in done}) == 1  # bit for bit
    assert sorted(int(words[1]) for words in done) == [0, 1, 2, 3]
    _, _, num_steps, num_updates, weights = done[0]
    assert num_steps == num_updates
    found = json.loads(weights)
    for mine, other in zip(found, expected_weights(int(num_steps)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)
    views = [line.split()[2:] for line in survivors[0].lines if line.startswith("VIEW")]
    assert views[:3] == [["4", "0"], ["3", "5"], ["2", "9"]]  # the step that was cut off, and no other, is made again


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def make_net(**options: int) -> gluon.Block:
    net = gluon.nn.Dense(2, prefix="net_", **options)
    net.initialize(mx.init.One())
    return net


@pytest.mark.usefixtures("alone")
def test_what_is_restored_is_what_was_saved():
    net = make_net(in_units=3)
    scheduler = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    trainer = hvd.DistributedTrainer(net.collect_params(), "nadam", {"learning_rate": 0.1, "lr_scheduler": scheduler})
    state = hvd.elastic.MXNetState(net.collect_params(), trainer, seen=[])
    weights = []
    for number in (1, 2, 3, 3):
        if len(weights) == 3:
            state.restore()
            assert state.seen == [1, 2]
            assert trainer.optimizer.lr_scheduler is scheduler
        with autograd.record():
            loss = net(mx.nd.full((1, 3), number)).square().sum()
        loss.backward()
        trainer.step(1)
        state.seen.append(number)
        weights.append((net.weight.data().asnumpy().tolist(), trainer.learning_rate, trainer.optimizer.num_update))
        if number < 3:
            state.save()
    assert weights[2] == weights[3] != weights[1]
    assert weights[3][1:] == (0.05, 3)


@pytest.mark.usefixtures("alone")
def test_parameters_need_values():
    net = make_net()
    with pytest.raises(ArgumentError, match="net_weight has no values yet: initialize the net, and call it once"):
        hvd.elastic.MXNetState(net.collect_params())
    net(mx.nd.ones((1, 3)))
    assert hvd.elastic.MXNetState(net.collect_params(), step=4).step == 4


def another_net() -> str:
    """Ranks with other parameters: who is not rank 0 is refused."""
    state = hvd.elastic.MXNetState(make_net(in_units=3 + hvd.rank()).collect_params())
    if not hvd.rank():
        with pytest.raises(hvd.HorovodInternalError), written_again():  # the other one has gone
            state.sync()
        return ""
    with pytest.raises(ArgumentError) as caught:
        state.sync()
    hvd.shutdown()
    return str(caught.value)


@pytest.mark.slow
def test_another_net_is_refused(rank_pool):
    said = rank_pool(2).run(another_net, init=True)[1]
    assert said.endswith("net_weight: (2, 4) float32 here, net_weight: (2, 3) float32 there"), said
