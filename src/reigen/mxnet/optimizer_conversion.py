"""MXNet's optimizers as Reigen's: by name and numbers, since no code travels to servers.

What is one of MXNet's own classes, and has a counterpart in `reigen.optim`, is translated. Another one is an error that
says what to do: classes of a user's own, even those that inherit from MXNet's, may compute anything.

Learning-rate schedules of MXNet's are translated, too. One that is a user's own is asked in this process, once a step,
and the rate is sent to the servers (`LocalLearningRate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import mxnet as mx

from reigen import optim
from reigen.errors import ConfigError

#: MXNet's class: our name, and where our parameters are found in it. That of the same name, if nothing else is said.
_COUNTERPARTS: dict[str, tuple[str, dict[str, str]]] = {
    "SGD": ("sgd", {"momentum": "momentum", "lazy_update": "lazy_update"}),
    "ccSGD": ("sgd", {"momentum": "momentum", "lazy_update": "lazy_update"}),
    "NAG": ("nag", {"momentum": "momentum"}),
    "Signum": ("signum", {"momentum": "momentum", "wd_lh": "wd_lh"}),
    "Adam": ("adam", {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon", "lazy_update": "lazy_update"}),
    "AdaGrad": ("adagrad", {"eps": "float_stable_eps"}),
    "RMSProp": ("rmsprop", {name: name for name in ("gamma1", "gamma2", "epsilon", "centered", "clip_weights")}),
    "Ftrl": ("ftrl", {"lamda1": "lamda1", "beta": "beta"}),
    "LAMB": (
        "lamb",
        {name: name for name in ("beta1", "beta2", "epsilon", "lower_bound", "upper_bound", "bias_correction")},
    ),
    "LARS": ("lars", {name: name for name in ("momentum", "eta", "eps", "momentum_correction")}),
    "Test": ("test", {}),
}
_SCHEDULES: dict[str, tuple[type[optim.Schedule], dict[str, str]]] = {
    "FactorScheduler": (optim.FactorScheduler, {n: n for n in ("step", "factor", "stop_factor_lr")}),
    "MultiFactorScheduler": (optim.MultiFactorScheduler, {n: n for n in ("step", "factor")}),
    "PolyScheduler": (optim.PolyScheduler, {"max_update": "max_update", "final_lr": "final_lr", "pwr": "power"}),
    "CosineScheduler": (optim.CosineScheduler, {n: n for n in ("max_update", "final_lr")}),
}
_WARMUP = ("warmup_steps", "warmup_begin_lr", "warmup_mode")

#: names of MXNet's classes that can be translated
CONVERTIBLE_OPTIMIZERS = tuple(_COUNTERPARTS)


class LocalLearningRate:
    """The learning rate of an optimizer of MXNet's, where this process decides about it.

    Args:
        optimizer: MXNet's.
        schedule: asked for each update; None: the rate is the optimizer's ``lr``, which a program may change.
    """

    def __init__(self, optimizer: Any, schedule: Callable[[int], float] | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._counts: dict[int | str, int] = {}
        self._num_update = int(optimizer.begin_num_update)

    def first(self) -> float:
        """That of the first update."""
        return float(self._optimizer.lr if self._schedule is None else self._schedule(self._num_update + 1))

    def before(self, keys: Iterable[int | str]) -> float:
        """That of updates which are about to be pushed."""
        if self._schedule is None:
            return float(self._optimizer.lr)
        for key in keys:
            self._counts[key] = self._counts.get(key, int(self._optimizer.begin_num_update)) + 1
            self._num_update = max(self._num_update, self._counts[key])
        return float(self._schedule(self._num_update))


def convert_optimizer(optimizer: Any) -> tuple[optim.Optimizer, LocalLearningRate | None]:
    """Our counterpart of an optimizer of MXNet's, at this moment.

    Returns:
        It; and who decides about its learning rate from now on; None: itself, by its schedule.

    Raises:
        ConfigError: it has no counterpart; or numbers that make no sense.
    """
    name, places = _counterpart(optimizer)
    parameters = {ours: _plain(getattr(optimizer, theirs)) for ours, theirs in places.items()}
    schedule, rate = _schedule(optimizer)
    made = optim.create(
        name,
        learning_rate=None if rate is None else rate.first(),  # a schedule has its own
        wd=_plain(optimizer.wd),
        rescale_grad=_plain(optimizer.rescale_grad),
        clip_gradient=_plain(optimizer.clip_gradient),
        lr_scheduler=schedule,
        multi_precision=bool(optimizer.multi_precision),
        begin_num_update=int(optimizer.begin_num_update),
        lr_mult=_factors(optimizer, "lr_mult"),
        wd_mult=_factors(optimizer, "wd_mult"),
        param_idx2name=dict(optimizer.idx2name),
        **parameters,
    )
    return made, rate


def _counterpart(optimizer: Any) -> tuple[str, dict[str, str]]:
    kind = type(optimizer)
    if kind is getattr(mx.optimizer, kind.__name__, None) and kind.__name__ in _COUNTERPARTS:
        return _COUNTERPARTS[kind.__name__]
    whose = "MXNet's" if kind.__module__.startswith("mxnet.") else "a class of your own,"
    raise ConfigError(
        f"{whose} {kind.__name__} cannot update weights on servers: they take optimizers by name and numbers, never as "
        f"code, and there are counterparts of {', '.join(CONVERTIBLE_OPTIMIZERS)}. Use one of these; or "
        f"let the workers update, "
        "with any optimizer: gluon.Trainer(..., update_on_kvstore=False), or MXNET_UPDATE_ON_KVSTORE=0 for Module (not "
        "with an asynchronous store)"
    )


def _schedule(optimizer: Any) -> tuple[optim.Schedule | None, LocalLearningRate | None]:
    """The schedule that servers follow; or else who says the rate here."""
    given = optimizer.lr_scheduler
    if given is None:
        return None, LocalLearningRate(optimizer, None)
    kind = type(given)
    if kind is not getattr(mx.lr_scheduler, kind.__name__, None) or kind.__name__ not in _SCHEDULES:
        return None, LocalLearningRate(optimizer, given)
    # one that has been asked before, or was given another rate since it was made, has a past that numbers do not tell
    if getattr(given, "count", 0) or given.base_lr != given.warmup_final_lr:
        return None, LocalLearningRate(optimizer, given)
    made, places = _SCHEDULES[kind.__name__]
    parameters = {ours: _plain(getattr(given, theirs)) for ours, theirs in places.items()}
    warmup = {name: _plain(getattr(given, name)) for name in _WARMUP}
    return made(base_lr=float(given.base_lr), **parameters, **warmup), None


def _factors(optimizer: Any, name: str) -> dict[int | str, float]:
    """Factors of keys and names: those that gluon's parameters have win, as in MXNet."""
    named = {key: float(factor) for key, factor in getattr(optimizer, name).items()}
    found = {index: float(getattr(parameter, name)) for index, parameter in optimizer.param_dict.items()}
    return {**named, **{index: factor for index, factor in found.items() if named or factor != 1.0}}


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value
