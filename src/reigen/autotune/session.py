"""Autotuning of a running job, on rank 0: gives steps to the `Autotuner`, and carries out its decisions."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from reigen.autotune.log_file import TuningLog
from reigen.autotune.report import format_outcome, format_unfinished
from reigen.autotune.search_space import ParameterPoint
from reigen.autotune.tuner import StepEnd, TunerDecision
from reigen.engine.counters import DEVICE_WAY, NETWORK_WAY, EngineCounters
from reigen.engine.messages import OperationKind, TunedParameters

_log = logging.getLogger(__name__)

_ALLREDUCE = OperationKind.ALLREDUCE


class StepTuner(Protocol):
    """Decides about parameters when steps end: `Autotuner`, or a schedule of tests."""

    def step_ended(self, step: StepEnd) -> TunerDecision:
        """Take in the end of a step; return what follows."""

    def best_point(self) -> ParameterPoint:
        """Return what seems best by now."""


class TunedEngine(Protocol):
    """Engine of rank 0."""

    counters: EngineCounters

    def tune(self, parameters: TunedParameters) -> None:
        """Change parameters of all ranks."""


class TuningSession:
    """Autotuning of one view of a job.

    Args:
        engine: of rank 0.
        tuner: decides.
        base: the parameters with which the job begins.
        log: where blocks are written, if anywhere.
        fixed: why parameters are not tuned, by name, for the report.
        allows_reordering: sums may be taken in another order.
        show: gets the report.

    Attributes:
        first: the parameters with which the view began.
        point: those that were chosen last.
        is_final: nothing will be chosen any more.
    """

    def __init__(
        self,
        engine: TunedEngine,
        tuner: StepTuner,
        base: ParameterPoint,
        *,
        log: TuningLog | None = None,
        fixed: Mapping[str, str] | None = None,
        allows_reordering: bool = False,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._engine, self._tuner, self.first = engine, tuner, base
        self._log, self._fixed = log, fixed or {}
        self._allows_reordering = allows_reordering
        self._show = show or _write_report
        self.point, self.is_final = base, False
        tuned = engine.counters.tuned
        self._version = 0 if tuned is None else tuned.version
        #: agreements on the size of buckets, and those of them that have yet to take on the one that was chosen last
        self._agreements: weakref.WeakSet[object] = weakref.WeakSet()
        self._stale: weakref.WeakSet[object] = weakref.WeakSet()
        self._has_changed = False
        self._best_seconds, self._num_steps = 0.0, 0
        self._first_fused = engine.counters.fused

    def step_ended(self) -> None:
        """Count a step; on the program's thread."""
        self._num_steps += 1
        if self.is_final:
            return
        counters = self._engine.counters
        step = StepEnd(
            time.monotonic(),
            counters.blocked_seconds,
            _reduced_bytes(counters),
            self._is_applied(),
            self._obstacle(counters),
            bool(self._agreements),
            counters.fused - self._first_fused,
        )
        try:
            decision = self._tuner.step_ended(step)
        except Exception as error:  # noqa: BLE001 - the program's step must not fail for it
            self._give_up(error)
            return
        if decision.block is not None and self._log is not None:
            self._log.add(decision.block)
        if decision.outcome is not None:
            self.is_final, outcome = True, decision.outcome
            self._show(format_outcome(outcome, self._fixed))
            self._best_seconds = outcome.base_seconds / outcome.speedup
            self._close_log(outcome.chosen)
        if decision.point is not None:
            self.apply(decision.point)

    def apply(self, point: ParameterPoint) -> None:
        """Have all ranks take on these parameters."""
        if point.bucket_bytes != self.point.bucket_bytes:
            self._stale.update(self._agreements)
        self.point, self._has_changed = point, True
        self._version += 1
        self._engine.tune(
            TunedParameters(
                self._version,
                point.fusion_threshold_bytes,
                point.bucket_bytes,
                point.tcp_algorithm,
                point.tcp_sockets,
                self.is_final,
            )
        )

    def follow(self, tuner: StepTuner, show: Callable[[str], None]) -> None:
        """Go on with another tuner, whose report goes to ``show``; also where the one before has ended."""
        self._tuner, self._show, self.is_final = tuner, show, False

    def settled(self, agreement: object, bucket_bytes: int) -> None:
        """Take note that the ranks have agreed on a size of buckets."""
        self._agreements.add(agreement)
        if bucket_bytes == self.point.bucket_bytes:
            self._stale.discard(agreement)

    def close(self, *, is_view: bool = False) -> None:
        """Write the log to its end, and say so where the search has none: the job ends, or a view of it."""
        if not self.is_final:
            best = self.first
            with suppress(Exception):  # a model of few points
                best = self._tuner.best_point()
            if not is_view:
                self._show(format_unfinished(self.first, best, self._num_steps))
            self._close_log(best)
        self.is_final = True

    def _give_up(self, error: Exception) -> None:
        """Go on as the view began: the tuner is of no use."""
        _log.warning("autotuning has failed, the job goes on as it began: %s: %s", type(error).__name__, error)
        self.is_final = True
        self.apply(self.first)
        self._close_log(self.first)

    def _close_log(self, best: ParameterPoint) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close(best, self._best_seconds)

    def _is_applied(self) -> bool:
        tuned = self._engine.counters.tuned
        version = 0 if tuned is None else tuned.version
        return (version == self._version or not self._has_changed) and not self._stale

    def _obstacle(self, counters: EngineCounters) -> str:
        if counters.bytes[DEVICE_WAY][_ALLREDUCE] and not self._allows_reordering:
            return "gradients are reduced on GPUs, where sums depend on how they are cut"
        return ""


def _reduced_bytes(counters: EngineCounters) -> float:
    """Bytes of tensors that were reduced; the network counts others."""
    ways = (by_kind[_ALLREDUCE] for way, by_kind in counters.bytes.items() if way != NETWORK_WAY)
    return sum(ways) + counters.eager_bytes


def _write_report(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
