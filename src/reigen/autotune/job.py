"""Start of autotuning in a job: from its configuration and its layout to the session of rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from reigen.autotune.log_file import TuningLog
from reigen.autotune.search_space import ParameterPoint, SearchSpace, make_search_space
from reigen.autotune.session import TunedEngine, TuningSession
from reigen.autotune.surrogate import GaussianSurrogate
from reigen.autotune.tuner import Autotuner, TunerOptions
from reigen.config import Config
from reigen.engine.messages import TunedParameters
from reigen.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TunableJob:
    """Facts of a job by which it is tuned; the same on all ranks.

    Attributes:
        hosts: the ranks of every host.
        network: name of the network between ranks; None: they share memory.
        shares_memory: the ranks of a host do.
        bucket_bytes: size of a gradient bucket where nothing is tuned.
    """

    hosts: Sequence[Sequence[int]]
    network: str | None
    shares_memory: bool
    bucket_bytes: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def network_ranks(self) -> int:
        """Ranks that reduce together over TCP."""
        if self.network != "tcp":
            return 0
        return len(self.hosts) if self.shares_memory else self.size


def can_tune(config: Config, job: TunableJob) -> bool:
    """Return whether a job is tuned, the same on all ranks: not where sums depend on how tensors are cut."""
    return config.autotune and job.size > 1 and job.network in {None, "tcp"}


def make_space(config: Config, job: TunableJob, latest: TunedParameters | None = None) -> SearchSpace:
    """Make the search space of a job; its view begins with the parameters of the one before, if they were tuned."""
    algorithm, num_sockets = config.network_parameters()
    has_network = job.network_ranks > 0
    base = ParameterPoint(
        config.fusion_threshold_bytes,
        job.bucket_bytes,
        algorithm if has_network else "",
        config.tcp_sockets if has_network else 0,
    )
    space = make_search_space(
        base,
        config.origins,
        network_ranks=job.network_ranks,
        num_sockets=num_sockets,
        allows_ring=config.autotune_allow_ring,
    )
    if latest is None:
        return space
    return space.moved(
        ParameterPoint(
            latest.fusion_threshold_bytes,
            latest.bucket_bytes,
            latest.tcp_algorithm if has_network else "",
            latest.tcp_sockets if has_network else 0,
        )
    )


class TuningStart:
    """Start of autotuning on rank 0: what may fail is done when it is made, before other ranks wait for this one.

    Args:
        config: the knobs.
        job: its facts.
        latest: what was chosen in the view before this one.
        is_first_view: members of an elastic job do not wait for this rank; else they do, and so it loads no library.

    Raises:
        ConfigError: there is no scikit-learn, or the log is another file.
    """

    def __init__(
        self, config: Config, job: TunableJob, latest: TunedParameters | None, is_first_view: bool = True
    ) -> None:
        self._config = config
        self._initial = make_space(config, job).base
        self._space = make_space(config, job, latest)
        self._log = TuningLog(config.autotune_log, job.size) if config.autotune_log else None
        max_points = config.autotune_bayes_opt_max_samples
        options = TunerOptions(
            config.autotune_warmup_samples,
            max(1, config.autotune_steps_per_sample),
            max_points if latest is None else max_points // 2,  # much is known from the view before
            config.autotune_seconds,
        )
        warm_start = None if self._log is None or latest is not None else self._log.warm_start
        surrogate = GaussianSurrogate(config.autotune_gaussian_process_noise, loads_now=is_first_view)
        self._tuner = Autotuner(self._space, surrogate, options, warm_start)

    def begin(self, engine: TunedEngine) -> TuningSession:
        """Begin with the engine that there is now."""
        session = TuningSession(
            engine,
            self._tuner,
            self._space.base,
            log=self._log,
            fixed=self._space.fixed,
            allows_reordering=self._config.autotune_allow_ring,
        )
        if self._space.base != self._initial:
            session.apply(self._space.base)
        return session


def start_tuning(config: Config, job: TunableJob, latest: TunedParameters | None, view: int) -> TuningStart | None:
    """Make the start of rank 0; None: an elastic job goes on without tuning, for this member lacks what that needs.

    Raises:
        ConfigError: it lacks that, and the job begins.
    """
    try:
        return TuningStart(config, job, latest, is_first_view=view <= 1)
    except ConfigError as error:
        if view <= 1:
            raise
        _log.warning("autotuning ends with this view: %s", error)
        return None


def warn_if_not_tuned(config: Config, job: TunableJob) -> None:
    """On rank 0: say why a job is not tuned though that was asked for."""
    if config.autotune and job.size > 1 and not can_tune(config, job):
        _log.warning(
            "autotuning has no effect: sums of the network %s depend on how tensors are cut, and tuning would change "
            "results",
            job.network,
        )
