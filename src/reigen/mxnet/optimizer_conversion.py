"""Conversion of MXNet's optimizers to Reigen's: by name and numbers, since no code travels to servers.

MXNet's own classes that have a counterpart in `reigen.optim` are converted. Another one is an error with advice:
classes of a user's own, even those that inherit from MXNet's, may compute anything.

Learning-rate schedules of MXNet's are converted, too. One that is a user's own is called in this process, once a step,
and the rate is sent to the servers (`LocalLearningRate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import mxnet as mx

from reigen import optim
from reigen.errors import ConfigError

#: MXNet's class: Reigen's name, and the names of parameters: Reigen's=MXNet's where they differ.
_COUNTERPARTS = {
    "SGD": ("sgd", "momentum lazy_update"),
    "ccSGD": ("sgd", "momentum lazy_update"),
    "NAG": ("nag", "momentum"),
    "Signum": ("signum", "momentum wd_lh"),
    "Adam": ("adam", "beta1 beta2 epsilon lazy_update"),
    "AdaGrad": ("adagrad", "eps=float_stable_eps"),
    "RMSProp": ("rmsprop", "gamma1 gamma2 epsilon centered clip_weights"),
    "Ftrl": ("ftrl", "lamda1 beta"),
    "LAMB": ("lamb", "beta1 beta2 epsilon lower_bound upper_bound bias_correction"),
    "LARS": ("lars", "momentum eta eps momentum_correction"),
    "Test": ("test", ""),
}
_SCHEDULES: dict[str, tuple[type[optim.Schedule], str]] = {
    "FactorScheduler": (optim.FactorScheduler, "step factor stop_factor_lr"),
    "MultiFactorScheduler": (optim.MultiFactorScheduler, "step factor"),
    "PolyScheduler": (optim.PolyScheduler, "max_update final_lr pwr=power"),
    "CosineScheduler": (optim.CosineScheduler, "max_update final_lr"),
}
_WARMUP = "warmup_steps warmup_begin_lr warmup_mode"

#: names of MXNet's classes that can be converted
CONVERTIBLE_OPTIMIZERS = tuple(_COUNTERPARTS)


class LocalLearningRate:
    """Learning rate of an optimizer of MXNet's that this process decides.

    ``schedule`` is called for each update; None: the rate is the optimizer's ``lr``, which a program may change.
    """

    def __init__(self, optimizer: Any, schedule: Callable[[int], float] | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._counts: dict[int | str, int] = {}
        self._num_update = int(optimizer.begin_num_update)

    def first(self) -> float:
        """Return the rate of the first update."""
        return float(self._optimizer.lr if self._schedule is None else self._schedule(self._num_update + 1))

    def before(self, keys: Iterable[int | str]) -> float:
        """Return the rate of updates which are about to be pushed."""
        if self._schedule is None:
            return float(self._optimizer.lr)
        for key in keys:
            self._counts[key] = self._counts.get(key, int(self._optimizer.begin_num_update)) + 1
            self._num_update = max(self._num_update, self._counts[key])
        return float(self._schedule(self._num_update))


def convert_optimizer(optimizer: Any) -> tuple[optim.Optimizer, LocalLearningRate | None]:
    """Convert an optimizer of MXNet's, as it is at this moment.

    Returns:
        Its counterpart, and the source of its learning rate from now on; None: its own schedule.

    Raises:
        ConfigError: it has no counterpart; or numbers that make no sense.
    """
    name, places = _counterpart(optimizer)
    parameters = _read_parameters(optimizer, places)
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


def _counterpart(optimizer: Any) -> tuple[str, str]:
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
    """Convert the schedule for servers; or return the learning rate that this process decides."""
    schedule = optimizer.lr_scheduler
    if schedule is None:
        return None, LocalLearningRate(optimizer, None)
    kind = type(schedule)
    if kind is not getattr(mx.lr_scheduler, kind.__name__, None) or kind.__name__ not in _SCHEDULES:
        return None, LocalLearningRate(optimizer, schedule)
    # one that has been called before, or was given another rate since it was made, has a past that numbers do not show
    if getattr(schedule, "count", 0) or schedule.base_lr != schedule.warmup_final_lr:
        return None, LocalLearningRate(optimizer, schedule)
    made, places = _SCHEDULES[kind.__name__]
    parameters = _read_parameters(schedule, f"{places} {_WARMUP}")
    return made(base_lr=float(schedule.base_lr), **parameters), None


def _read_parameters(source: Any, names: str) -> dict[str, Any]:
    """Return attributes by Reigen's names, as the tables have them."""
    pairs = (name.partition("=") for name in names.split())
    return {name: _plain(getattr(source, attribute or name)) for name, _, attribute in pairs}


def _factors(optimizer: Any, name: str) -> dict[int | str, float]:
    """Return factors of keys and names: those of gluon's parameters win, as in MXNet."""
    named = {key: float(factor) for key, factor in getattr(optimizer, name).items()}
    found = {index: float(getattr(parameter, name)) for index, parameter in optimizer.param_dict.items()}
    return {**named, **{index: factor for index, factor in found.items() if named or factor != 1.0}}


def _plain(value: Any) -> Any:
    """Convert a number of NumPy's to one of Python's."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value
