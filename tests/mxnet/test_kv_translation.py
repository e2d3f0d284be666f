"""Optimizers of MXNet's and what they are translated to, on the same gradients; MXNet's own update is the truth."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from reigen import optim
from reigen.errors import ConfigError
from reigen.mxnet.optimizer_conversion import CONVERTIBLE_OPTIMIZERS, convert_optimizer

opt = mx.optimizer
_COMMON = {"learning_rate": 0.05, "wd": 0.01, "rescale_grad": 0.5, "clip_gradient": 1.5}


def optimizers():
    return [
        opt.SGD(**_COMMON),
        opt.SGD(momentum=0.9, **_COMMON),
        opt.ccSGD(momentum=0.5, **_COMMON),
        opt.NAG(momentum=0.9, **{**_COMMON, "wd": 0.0}),  # with decay MXNet's differs from its own documentation
        opt.Signum(momentum=0.9, wd_lh=0.01, **_COMMON),
        opt.Adam(beta1=0.8, beta2=0.99, epsilon=1e-6, **_COMMON),
        opt.AdaGrad(eps=1e-5, **_COMMON),
        opt.RMSProp(gamma1=0.8, **_COMMON),
        opt.RMSProp(gamma1=0.8, gamma2=0.7, centered=True, clip_weights=2.0, **_COMMON),
        opt.Ftrl(lamda1=0.02, beta=0.8, **_COMMON),
        opt.LAMB(beta1=0.8, lower_bound=0.1, upper_bound=5.0, **_COMMON),
        opt.LARS(momentum=0.9, eta=0.1, **{**_COMMON, "clip_gradient": None}),
        opt.Test(rescale_grad=0.5),
    ]


def test_every_translated_one_is_tried() -> None:
    assert {type(each).__name__ for each in optimizers()} == set(CONVERTIBLE_OPTIMIZERS)


@pytest.mark.parametrize("theirs", optimizers(), ids=lambda each: type(each).__name__)
def test_updates_are_the_same(theirs) -> None:
    ours, _ = convert_optimizer(theirs)
    random = np.random.default_rng(3)
    start = random.normal(size=(5, 4)).astype(np.float32)
    weight, updater = mx.nd.array(start), opt.get_updater(theirs)
    mine, states = start.reshape(-1).copy(), [np.zeros(20, np.float32) for _ in range(ours.num_states)]
    for t in range(1, 7):
        gradient = random.normal(size=(5, 4)).astype(np.float32)
        updater(0, mx.nd.array(gradient), weight)
        ours.update(mine, gradient.reshape(-1), states, t)
    np.testing.assert_allclose(mine.reshape(5, 4), weight.asnumpy(), rtol=2e-5, atol=2e-6)
    assert not np.allclose(mine.reshape(5, 4), start, atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.4, warmup_steps=4, warmup_begin_lr=0.1),
        lambda: mx.lr_scheduler.MultiFactorScheduler([2, 5], 0.1, base_lr=0.4),
        lambda: mx.lr_scheduler.PolyScheduler(9, base_lr=0.4, pwr=2, final_lr=0.01, warmup_steps=2),
        lambda: mx.lr_scheduler.CosineScheduler(9, base_lr=0.4, final_lr=0.01, warmup_mode="constant", warmup_steps=2),
    ],
)
def test_schedules_are_the_same(make) -> None:
    ours, rate = convert_optimizer(opt.SGD(lr_scheduler=make()))
    truth = make()
    assert rate is None
    assert [ours.rate_of(n) for n in range(1, 13)] == pytest.approx([truth(n) for n in range(1, 13)])


def test_a_schedule_of_ones_own_is_asked_here() -> None:
    class Falling(mx.lr_scheduler.LRScheduler):
        def __call__(self, num_update):
            return self.base_lr / num_update

    ours, rate = convert_optimizer(opt.SGD(lr_scheduler=Falling(0.6)))
    assert ours.lr_scheduler is None
    assert ours.learning_rate == rate.first() == pytest.approx(0.6)
    assert [rate.before([key]) for key in ("a", "b", "a", "b", "a")] == pytest.approx([0.6, 0.6, 0.3, 0.3, 0.2])


def test_a_schedule_that_was_asked_before_is_not_begun_anew() -> None:
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.8)
    schedule(5)
    _, rate = convert_optimizer(opt.SGD(lr_scheduler=schedule))
    assert rate is not None
    assert rate.first() == pytest.approx(0.2)


def test_a_rate_that_is_set_later_is_seen() -> None:
    optimizer = opt.SGD(learning_rate=0.3)
    ours, rate = convert_optimizer(optimizer)
    optimizer.set_learning_rate(0.1)
    assert ours.learning_rate == pytest.approx(0.3)
    assert rate.before([0]) == pytest.approx(0.1)


def test_factors_come_from_parameters_and_names() -> None:
    net = mx.gluon.nn.Dense(2, in_units=3)
    net.weight.lr_mult, net.bias.wd_mult = 0.5, 0.0
    ours, _ = convert_optimizer(opt.SGD(param_dict=dict(enumerate(net.collect_params().values()))))
    assert ours.lr_mult == {0: 0.5}
    assert ours.wd_mult == {1: 0.0}
    named, _ = convert_optimizer(opt.SGD(param_idx2name={0: "fc_weight", 1: "fc_bias"}))  # as Module makes it
    assert named.wd_mult == {"fc_bias": 0.0}
    assert named.param_idx2name == {0: "fc_weight", 1: "fc_bias"}


@pytest.mark.parametrize("theirs", [opt.AdaDelta, opt.Adamax, opt.Nadam, opt.FTML, opt.DCASGD, opt.SGLD, opt.LBSGD])
def test_what_has_no_counterpart_is_an_error_that_says_what_to_do(theirs) -> None:
    with pytest.raises(ConfigError, match=rf"MXNet's {theirs.__name__} cannot .* update_on_kvstore=False"):
        convert_optimizer(theirs())


def test_a_class_of_ones_own_is_no_sgd() -> None:
    class Mine(opt.SGD):
        def update(self, index, weight, grad, state):
            weight -= grad

    with pytest.raises(ConfigError, match="a class of your own, Mine cannot"):
        convert_optimizer(Mine())


def test_a_spec_travels_as_plain_values() -> None:
    ours, _ = convert_optimizer(opt.Adam(learning_rate=np.float32(0.25), multi_precision=True))
    assert optim.from_spec(ours.to_spec()) == ours
    assert ours.multi_precision
    assert ours.learning_rate == 0.25
