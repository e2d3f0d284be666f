"""`reigen bench train-step`: what training on several ranks costs beside training alone, with Reigen and with DDP."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from reigen.bench.crew import Crew, CrewSpec
from reigen.bench.figures import Overhead, Summary, overhead, overhead_ratio
from reigen.bench.peers import DDP, find_peer
from reigen.bench.report import Document, Row, Verdict
from reigen.bench.schedule import WARMUP, Mode, Report, about, alternate, crews
from reigen.bench.work import Case

MODELS = ("mlp", "deep", "cnn")
ALONE, REIGEN, DDP_DEFAULT, DDP_VIEW = "one rank alone", "reigen", "ddp", "ddp, gradients as bucket views"
#: As many ranks as the others have, none of which communicates: what sharing the machine costs by itself.
SIDE_BY_SIDE = "ranks that do not communicate"
TIMELINE = "reigen, with a timeline"
_BUDGET = 0.4
_TIMELINE_BUDGET = 1.02
#: Two ways to add the same float32 numbers may differ in the last bits; this part of the update is far above that.
_TOLERANCE = 1e-3
_ALONE_CREW, _SILENT_CREW, _REIGEN_CREW, _TIMELINE_CREW = "alone", "silent", "reigen", "reigen with a timeline"


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        num_ranks: processes of Reigen and DDP.
        models: names in `reigen.bench.models.RECIPES`.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
        timeline: measure what a timeline costs, too.
    """

    num_ranks: int
    models: tuple[str, ...]
    rounds: int
    turn_seconds: float
    timeline: bool = False


class Agreement(msgspec.Struct, frozen=True):
    """How far the weights of two modes are apart after the same steps on the same data.

    Attributes:
        difference: Euclidean length of the difference of the weights, as a part of that of the update.
        ranks_identical: whether all ranks of the first mode have bit-identical weights.
    """

    difference: float
    ranks_identical: bool

    @property
    def holds(self) -> bool:
        """Whether the two modes compute the same thing."""
        return self.ranks_identical and self.difference <= _TOLERANCE


def run(settings: Settings, command: str, report: Report) -> Document:
    """Measure; without DDP the overhead of Reigen is shown alone."""
    document = Document(command, settings.num_ranks, settings.rounds)
    peer = find_peer(DDP, settings.num_ranks)
    specs = [
        CrewSpec(_ALONE_CREW, "reigen.bench.programs.alone", 1),
        CrewSpec(_SILENT_CREW, "reigen.bench.programs.alone", settings.num_ranks),
        CrewSpec(_REIGEN_CREW, "reigen.bench.programs.train", settings.num_ranks),
    ]
    if settings.timeline:
        specs.append(CrewSpec(_TIMELINE_CREW, "reigen.bench.programs.train", settings.num_ranks))
    if isinstance(peer, str):
        document.skipped.append(peer)
    else:
        specs.append(peer)
    with crews(specs, report) as (came, failures):
        document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
        for crew in came.values():
            document.versions |= crew.versions
        for model in settings.models:
            _measure(model, settings, came, document, report)
    return document


def _measure(model: str, settings: Settings, came: Mapping[str, Crew], document: Document, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="reigen-bench-") as directory:
        ours, theirs = Path(directory, "reigen"), Path(directory, "ddp")
        modes = [
            Mode(name, came[crew], Case(f"{model}/{variant}", save=save), joint=crew != _SILENT_CREW)
            for name, crew, variant, save in (
                (ALONE, _ALONE_CREW, "alone", ""),
                (SIDE_BY_SIDE, _SILENT_CREW, "alone", ""),
                (REIGEN, _REIGEN_CREW, "reigen", str(ours)),
                (TIMELINE, _TIMELINE_CREW, "timeline", ""),
                (DDP_DEFAULT, DDP, "default", str(theirs)),
                (DDP_VIEW, DDP, "view", ""),
            )
            if crew in came
        ]
        outcome = alternate(modes, settings.rounds, settings.turn_seconds, about(model, report))
        document.rows.append(Row(model, 0, outcome.summaries, ALONE, outcome.failures))
        if {REIGEN, DDP_DEFAULT} <= outcome.summaries.keys():
            document.notes.append(_sentence(model, agreement(ours, theirs, settings.num_ranks)))
        if {REIGEN, TIMELINE} <= outcome.summaries.keys():
            document.verdicts.append(timeline_verdict(model, outcome.summaries))
    document.overheads[model] = found = overheads(outcome.summaries)
    if REIGEN in found and {DDP_DEFAULT, DDP_VIEW} & found.keys():
        document.verdicts.append(verdict(model, found))


def overheads(summaries: Mapping[str, Summary]) -> dict[str, Overhead]:
    """What each mode's step took longer than one rank alone; empty if that failed."""
    alone = summaries.get(ALONE)
    if alone is None:
        return {}
    return {name: overhead(step, alone) for name, step in summaries.items() if name != ALONE}


def verdict(model: str, found: Mapping[str, Overhead]) -> Verdict:
    """Reigen's overhead as a part of DDP's, with the better of DDP's two settings."""
    theirs = min((found[name] for name in (DDP_DEFAULT, DDP_VIEW) if name in found), key=lambda o: o.median)
    value, reason = overhead_ratio(found[REIGEN], theirs)
    claim = f"{model}: overhead of Reigen / of DDP at its best"
    return Verdict(claim, value, _BUDGET, at_least=False, note="" if value is not None else reason)


def timeline_verdict(model: str, summaries: Mapping[str, Summary]) -> Verdict:
    """A step with a timeline in steps without: the median of the rounds' quotients."""
    quotients = [w / o for w, o in zip(summaries[TIMELINE].rounds, summaries[REIGEN].rounds, strict=True)]
    claim = f"{model}: a step with a timeline / without"
    note = f"({min(quotients):.3f} - {max(quotients):.3f})"
    return Verdict(claim, median(quotients), _TIMELINE_BUDGET, at_least=False, note=note)


def agreement(ours: Path, theirs: Path, num_ranks: int) -> Agreement:
    """Compare the weights that two modes saved (see `Case.save`): rank 0's of both, and ours among the ranks."""
    mine = [np.load(f"{ours}.{rank}.npz")["weights"] for rank in range(num_ranks)]
    with np.load(f"{theirs}.0.npz") as file:
        weights, initial = file["weights"].astype(np.float64), file["initial"].astype(np.float64)
    difference = np.linalg.norm(mine[0] - weights) / np.linalg.norm(weights - initial)
    identical = all(mine[0].tobytes() == other.tobytes() for other in mine[1:])
    return Agreement(float(difference), identical)


def _sentence(model: str, found: Agreement) -> str:
    ranks = "bit-identical on all of Reigen's ranks" if found.ranks_identical else "NOT IDENTICAL on Reigen's ranks"
    verb = "agree" if found.holds else "DO NOT AGREE"
    return (
        f"{model}: after {WARMUP} steps the weights of Reigen and DDP {verb}: they differ by {found.difference:.1e} "
        f"of the update; they are {ranks}"
    )
