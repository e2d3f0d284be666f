"""Report of autotuning: a table of the parameters before and after, and the gain with its confidence. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from reigen.autotune.search_space import ParameterPoint
from reigen.autotune.tuner import TuningOutcome

_ROWS = {
    "fusion_threshold_bytes": ("fusion threshold", "REIGEN_FUSION_THRESHOLD"),
    "bucket_bytes": ("gradient bucket", "REIGEN_BUCKET_BYTES"),
    "tcp_algorithm": ("TCP algorithm", "REIGEN_TCP_ALGORITHM"),
    "tcp_sockets": ("TCP sockets", "REIGEN_TCP_SOCKETS"),
}


def format_outcome(outcome: TuningOutcome, fixed: Mapping[str, str]) -> str:
    """Return the report.

    Args:
        outcome: of the search.
        fixed: why parameters were not tuned, by name.
    """
    gain = (
        f"{outcome.speedup:.3f} times as fast ({outcome.low:.3f} to {outcome.high:.3f} with 90 % confidence)"
        if outcome.chosen != outcome.base
        else "nothing is changed"
    )
    lines = [f"reigen autotune: {gain}, after {outcome.seconds:.0f} s and {outcome.num_points} points"]
    table = [("", "before", "now", "")]
    for name, (title, _) in _ROWS.items():
        before, now = (format_parameter(point, name) for point in (outcome.base, outcome.chosen))
        if before:
            table.append((title, before, now, fixed.get(name, "")))
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"  {cells}  {row[3]}".rstrip())
    if outcome.base_seconds:
        now_seconds = outcome.base_seconds / outcome.speedup
        lines.append(f"  a step takes {1000 * now_seconds:.2f} ms, and {1000 * outcome.base_seconds:.2f} ms before")
    lines.append(f"  {outcome.reason}")
    if reason := fixed.get("ring"):
        lines.append(f"  the ring was left out: {reason}")
    if outcome.chosen != outcome.base:
        lines.append(f"  to begin with these: {format_variables(outcome.base, outcome.chosen)}")
    return "\n".join(lines)


def format_parameter(point: ParameterPoint, name: str) -> str:
    """Return a parameter's value; empty where there is none."""
    value = getattr(point, name)
    if not name.endswith("_bytes"):
        return str(value or "")
    return f"{value / (1 << 20):g} MiB"


def format_unfinished(base: ParameterPoint, best: ParameterPoint, num_steps: int) -> str:
    """Return the report of a job that has ended before the search.

    Args:
        base: the parameters with which it began.
        best: those that seemed best by then.
        num_steps: of the job.
    """
    if not num_steps:
        return (
            "reigen autotune: nothing was tuned, for the job has marked no steps; reigen.report_progress(steps=1) "
            "marks one"
        )
    seems = f"; these seemed best, unchecked: {format_variables(base, best)}" if best != base else ""
    return f"reigen autotune: the job has ended before the search, after {num_steps} steps{seems}"


def format_variables(base: ParameterPoint, chosen: ParameterPoint) -> str:
    """Return the environment variables that set the parameters that were changed."""
    return " ".join(
        f"{variable}={getattr(chosen, name)}"
        for name, (_, variable) in _ROWS.items()
        if getattr(chosen, name) != getattr(base, name)
    )
